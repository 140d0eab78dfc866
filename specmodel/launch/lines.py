"""The launch line of a recommendation, for the engine that the calibration names."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specmodel.launch import BatchRange, Plan, launch

if TYPE_CHECKING:
    from specmodel.decide import Optimum
    from specmodel.model import FittedModel
    from specmodel.schedule import ScheduleStep

_ENGINES = {
    "sglang": r"sglang$",
    "vllm": r"vllm$",
    "trtllm": r"(tensorrt|trt)[-_ ]?llm$",
    "llamacpp": r"llama\.?cpp\b",
}
_WORD = re.compile(r"(?:[^\s'\"]|'[^']*'|\"[^\"]*\")+")


def launch_lines(
    model: FittedModel, optima: Sequence[Optimum], steps: Sequence[ScheduleStep], width: int
) -> tuple[list[str], list[str]]:
    """Return what to paste into a shell, and notes on it; both are empty for an engine that is not known."""
    system = model.calibration.system
    name = (system.engine or "").lower()
    engine = next((known for known, pattern in _ENGINES.items() if re.match(pattern, name)), None)
    if engine is None:
        return [], []
    # A version that is no number (a commit, "main") is as good as none.
    version = system.engine_version if re.match(r"[vb]?[0-9]", system.engine_version or "") else None
    found = launch(_plan(model, optima, steps), engine, version)
    if found.command is None:
        return [], list(found.notes)
    lines = []
    for file, text in found.files.items():
        lines += [f"cat > {file} <<'EOF'", *text.rstrip("\n").split("\n"), "EOF"]
    environment = [f"{key}={shlex.quote(value)}" for key, value in sorted(found.env.items())]
    words = _WORD.findall(found.command.replace("\\\n", " "))
    lines += _continued(environment + words, width)
    assumed = []
    if found.assumed:
        named = "system.engine_version of the file names another"
        assumed = [f"for {found.engine} {found.version}, which is assumed: {named}"]
    return lines, [*assumed, *found.notes]


def _plan(model: FittedModel, optima: Sequence[Optimum], steps: Sequence[ScheduleStep]) -> Plan:
    cal = model.calibration
    best = optima[0].best
    comm = cal.comm.get(best.comm if len(optima) == 1 else steps[0].comm)
    longest = max(steps, key=lambda s: s.num_steps) if len(optima) > 1 else best
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
    return Plan(
        num_steps=longest.num_steps,
        topk=longest.topk,
        num_draft_tokens=longest.num_draft_tokens,
        max_batch=math.ceil(max(o.batch for o in optima)),
        env={} if comm is None else dict(comm.env),
        flags=() if comm is None else comm.flags,
        schedule=ranges if len(ranges) > 1 else (),
        target=cal.model.target,
        draft=cal.model.draft,
        method=cal.model.method,
        tensor_parallel=cal.system.tensor_parallel or 1,
        data_parallel=cal.system.data_parallel,
    )


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
