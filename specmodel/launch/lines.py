"""The launch line of a recommendation: for the engine that the calibration names, or for another one."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from specmodel.launch import BatchRange, Launch, Plan, launch
from specmodel.launch.plan import shell_flags

if TYPE_CHECKING:
    from specmodel.decide import Optimum
    from specmodel.model import FittedModel
    from specmodel.optimum import Candidate
    from specmodel.schedule import ScheduleStep

__all__ = ["engine_of", "launch_lines", "launch_of"]

_ENGINES = {
    "sglang": r"sglang$",
    "vllm": r"vllm$",
    "trtllm": r"(tensorrt|trt)[-_ ]?llm$",
    "llamacpp": r"llama[._-]?cpp\b",
}
_WORD = re.compile(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+")
_MOST_POINTS = 64
_SHARED_FLAGS = ("--disable-custom-all-reduce",)
"""What SGLang and vLLM call alike."""


def engine_of(name: str | None) -> str | None:
    """Return the engine that a name means, in one word; None for one that is not known."""
    return next((known for known, pattern in _ENGINES.items() if re.match(pattern, (name or "").lower())), None)


def launch_of(
    model: FittedModel,
    optima: Sequence[Optimum],
    steps: Sequence[ScheduleStep],
    engine: tuple[str, str | None] | None = None,
) -> Launch | None:
    """Write the recommendation for an engine; None where none is given and the file names none that is known.

    Parameters
    ----------
    model, optima, steps
        The fitted file, its answers, and their schedule.
    engine : (str, str or None), optional
        One of `specmodel.launch.ENGINES` and its version; by default those of the file.

    Raises
    ------
    UsageError
        A version that does not begin with a number.
    """
    system = model.calibration.system
    own = engine_of(system.engine)
    name, version = engine if engine is not None else (own, None)
    if name is None:
        return None
    # A version that is no number (a commit, "main") is as good as none; that of another engine says nothing.
    if version is None and name == own and re.match(r"[vb]?[0-9]", system.engine_version or ""):
        version = system.engine_version
    plan = _plan(model, optima, steps)
    if own is None or name == own:
        return launch(plan, name, version)
    notes = [f"this was measured under {own}; {name} has other times: ingest its own log before you rely on it"]
    kept = tuple(flag for flag in plan.flags if flag in _SHARED_FLAGS)
    shown, _ = shell_flags(plan.flags)
    if left := [flag for flag in shown if flag not in kept]:
        notes.append(f"flags of {own} are left out: {' '.join(map(shlex.quote, left))}")
    found = launch(replace(plan, flags=kept), name, version)
    return replace(found, notes=(*notes, *found.notes))


def launch_lines(
    model: FittedModel,
    optima: Sequence[Optimum],
    steps: Sequence[ScheduleStep],
    width: int,
    engine: tuple[str, str | None] | None = None,
) -> tuple[list[str], list[str]]:
    """Return what to paste into a shell, and notes on it; both are empty for an engine that is not known.

    Where an engine is asked for by name, the lines end in how to check the cost model with acceptance pinned.
    """
    found = launch_of(model, optima, steps, engine)
    if found is None:
        return [], []
    if found.command is None:
        return [], list(found.notes)
    lines = []
    for file, text in found.files.items():
        lines += [f"cat > {file} <<'EOF'", *text.rstrip("\n").split("\n"), "EOF"]
    environment = [f"{key}={shlex.quote(value)}" for key, value in sorted(found.env.items())]
    words = _WORD.findall(found.command.replace("\\\n", " "))
    lines += _continued(environment + words, width)
    notes = []
    if found.assumed:
        named = f"--engine {found.engine}:VERSION, or system.engine_version of the file, names another"
        notes = [f"for {found.engine} {found.version}, which is assumed: {named}"]
    elif engine is not None:
        notes = [f"for {found.engine} {found.version}"]
    if engine is not None and found.validation:
        lines += ["", "# to check the cost model with acceptance pinned (never in production):"]
        lines += [f"#   {line}" for line in found.validation]
    return lines, [*notes, *found.notes]


def _plan(model: FittedModel, optima: Sequence[Optimum], steps: Sequence[ScheduleStep]) -> Plan:
    cal = model.calibration
    best = optima[0].best
    name = best.comm if len(optima) == 1 else steps[0].comm
    comm = cal.comm.get(name)
    fixed = best if len(optima) == 1 else _one_for_all(optima, name, trees=any(s.topk > 1 for s in steps))
    ranges = [
        BatchRange(
            batch_from=math.floor(s.batch_from),
            batch_to=None if s.batch_to is None else math.floor(s.batch_to),
            num_steps=s.num_steps,
            topk=s.topk,
            num_draft_tokens=s.num_draft_tokens,
        )
        for s in steps
        if s.batch_to is None or math.floor(s.batch_to) >= math.floor(s.batch_from)  # engines count whole sequences
    ]
    parallel = cal.model.method == "parallel"
    return Plan(
        num_steps=fixed.num_steps,
        topk=fixed.topk,
        num_draft_tokens=fixed.num_draft_tokens,
        max_batch=math.ceil(max(o.batch for o in optima)),
        env={} if comm is None else dict(comm.env),
        flags=() if comm is None else comm.flags,
        schedule=ranges if len(ranges) > 1 else (),
        target=cal.model.target,
        draft=cal.model.draft,
        method=cal.model.method,
        tensor_parallel=cal.system.tensor_parallel or 1,
        data_parallel=cal.system.data_parallel,
        survival=_survival(optima[0], name),
        step_ms=_step_times(optima, name, fixed.num_steps, cal.system.data_parallel) if parallel else {},
        captured=cal.model.cuda_graph_sizes,
        captured_unit=cal.model.cuda_graph_unit,
    )


def _shape(c: Candidate) -> tuple[int, int, int]:
    return c.num_steps, c.topk, c.num_draft_tokens


def _one_for_all(optima: Sequence[Optimum], comm: str, *, trees: bool) -> Candidate:
    """Return the shape that loses least over all batches, for an engine that takes no schedule.

    Losses are relative to the best of each batch under the setting; shapes that are extrapolated at some batch come
    after all others.
    """
    tables = [{_shape(c): c for c in o.table if c.comm == comm and (trees or c.topk == 1)} for o in optima]
    tops = [max(c.tok_s for c in table.values()) for table in tables]

    def loss(shape: tuple[int, int, int]) -> tuple[bool, float, int]:
        listed = [table[shape] for table in tables]
        total = sum(math.log(top / max(c.tok_s, 1e-300)) for top, c in zip(tops, listed, strict=True))
        return any(c.extrapolated for c in listed), total, shape[2]

    common = [shape for shape in tables[0] if all(shape in table for table in tables)]
    return tables[0][min(common, key=loss)]


def _chains(optimum: Optimum, comm: str) -> list[Candidate]:
    """Return the chains of an answer from 0 steps on, as far as none is missing."""
    chains = {c.num_steps: c for c in optimum.table if c.comm == comm and c.topk == 1}
    out: list[Candidate] = []
    while len(out) in chains:
        out.append(chains[len(out)])
    return out


def _survival(optimum: Optimum, comm: str) -> tuple[float, ...]:
    """P(at least k drafts accepted): by how much the acceptance length grows from k - 1 steps to k."""
    lengths = [c.acceptance_length for c in _chains(optimum, comm)]
    out: list[float] = []
    for shorter, longer in pairwise(lengths):
        out.append(min(max(longer - shorter, 0.0), out[-1] if out else 1.0))
    return tuple(out)


def _step_times(optima: Sequence[Optimum], comm: str, num_steps: int, data_parallel: int) -> dict[int, float]:
    """Time of a whole step of one rank by the tokens that it verifies together, as DSPARK looks it up.

    Where batches of different size verify as many tokens, their mean; never less than for fewer tokens, since the
    table is looked up downwards.
    """
    times: dict[int, list[float]] = {}
    for optimum in optima:
        for c in _chains(optimum, comm)[1 : num_steps + 1]:
            tokens = round(max(optimum.batch / data_parallel, 1.0) * c.num_draft_tokens)
            times.setdefault(tokens, []).append(c.cycle_ms)
    out: dict[int, float] = {}
    largest = 0.0
    for tokens in sorted(times):
        largest = max(largest, sum(times[tokens]) / len(times[tokens]))
        out[tokens] = largest
    return out if len(out) <= _MOST_POINTS else dict(list(out.items())[:: -(-len(out) // _MOST_POINTS)])


def _continued(words: Sequence[str], width: int) -> list[str]:
    """Join words into lines of a shell command that fit a width where their words do."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > width:
            lines[-1] += " \\"
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return lines
