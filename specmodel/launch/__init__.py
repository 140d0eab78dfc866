"""A decision as each engine accepts it: flags, configuration files, and what of the decision an engine cannot do.

Only plain values come in (step counts, environment, batch ranges), only text goes out. A spelling depends on the
engine's version: the one that is given, else one that is assumed and named. Sources: SGLang v0.5.18 and its tags, vLLM
v0.24 to v0.26, TensorRT-LLM 1.2 to 1.3, llama.cpp b10472.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from specmodel.errors import UsageError
from specmodel.launch import llamacpp, sglang, trtllm, vllm
from specmodel.launch.plan import BatchRange, Launch, Plan, capture_sizes, capture_tokens, safe_for_shell

__all__ = ["ENGINES", "BatchRange", "Launch", "Plan", "capture_sizes", "launch"]

BESIDE = (
    "only the settings of this recommendation: put them beside the server's own other flags; "
    "of a model's path in a log the name alone is kept"
)
ASSUMED = {"sglang": "0.5.18", "vllm": "0.26.0", "trtllm": "1.3.0", "llamacpp": "b10472"}
ENGINES = tuple(ASSUMED)
_WRITERS = {"sglang": sglang.write, "vllm": vllm.write, "trtllm": trtllm.write, "llamacpp": llamacpp.write}


def launch(plan: Plan, engine: str, version: str | None = None) -> Launch:
    """Write what an engine needs to run a plan.

    Parameters
    ----------
    plan : Plan
    engine : str
        One of `ENGINES`.
    version : str, optional
        The engine's version or build; else one is assumed, and named.

    Raises
    ------
    UsageError
        An engine or version that is not known, or a schedule that does not begin at batch 1 or has gaps.
    """
    if engine not in ASSUMED:
        raise UsageError(f"no engine {engine!r}; known are {', '.join(ENGINES)}")
    used = version if version is not None else ASSUMED[engine]
    number = _numbers(used, engine)
    _check_schedule(plan.schedule)
    plan, left_out = safe_for_shell(plan)
    parts = _WRITERS[engine](plan, number)
    beside = (BESIDE,) if parts.command is not None else ()
    return Launch(
        engine=engine,
        version=used,
        assumed=version is None,
        env=dict(plan.env),
        command=parts.command,
        files=dict(parts.files),
        notes=(*beside, *_comm_notes(plan, engine, number), *parts.notes, *left_out),
        validation=tuple(parts.validation),
        capture_sizes=capture_sizes(plan) if parts.command is not None else (),
        capture_tokens=capture_tokens(plan, parts.ranges) if parts.command is not None else (),
    )


def _numbers(version: str, engine: str) -> tuple[int, ...]:
    found = re.match(r"[vb]?(\d+(?:\.\d+)*)", version)
    if found is None:
        example = ASSUMED[engine]
        raise UsageError(f"a version of {engine} must begin with a number, such as {example}; got {version!r}")
    return tuple(int(part) for part in found[1].split("."))


def _check_schedule(schedule: Sequence[BatchRange]) -> None:
    expected: int | None = 1
    for step in schedule:
        if expected is None or step.batch_from != expected:
            at = "after the open end" if expected is None else f"at batch {expected}"
            raise UsageError(f"a schedule must go on {at} without gaps or overlaps, got a range from {step.batch_from}")
        if step.batch_to is not None and step.batch_to < step.batch_from:
            raise UsageError(f"a range of batches must not end before it begins: {step.batch_from}-{step.batch_to}")
        expected = None if step.batch_to is None else step.batch_to + 1


def _comm_notes(plan: Plan, engine: str, version: tuple[int, ...]) -> list[str]:
    """Say what is to be known of NCCL variables beside an engine's own all-reduce."""
    notes = []
    tuning = [name for name in plan.env if name.startswith("NCCL_")]
    own_disabled = "--disable-custom-all-reduce" in plan.flags
    if tuning and plan.tensor_parallel > 1 and not own_disabled and engine in ("sglang", "vllm"):
        notes.append(
            "NCCL variables change nothing where the engine's own all-reduce serves the message (NVLink, one node, "
            "small batches); it is out with --disable-custom-all-reduce, across nodes, or without full peer access"
        )
    overwritten = sorted({"NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"} & set(plan.env))
    if engine == "sglang" and overwritten and version < (0, 5, 5):
        notes.append(f"SGLang up to 0.5.4 overwrites {' and '.join(overwritten)}: these need a later release")
    return notes
