"""An answer as ``specmodel.optimum/1``: the optima of several batches, their schedule and settings, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specmodel.launch.plan import shell_env, shell_flags

if TYPE_CHECKING:
    from specmodel.launch.plan import Launch
    from specmodel.model import FittedModel
    from specmodel.optimum import Candidate, Optimum
    from specmodel.schedule import ScheduleStep

__all__ = ["CANDIDATE_KEYS", "answer_document", "candidate_document", "comm_settings", "whole"]

CANDIDATE_KEYS = (
    "num_steps",
    "num_draft_tokens",
    "topk",
    "comm",
    "tok_s",
    "tok_s_interval",
    "tpot_ms",
    "cycle_ms",
    "verify_ms",
    "draft_ms",
    "overhead_ms",
    "acceptance_length",
    "speedup",
    "probability_best",
    "extrapolated",
    "measured",
)


def whole(value: float) -> float:
    """Return a batch as an integer where it is one."""
    return int(value) if value == int(value) else value


def candidate_document(c: Candidate) -> dict[str, Any]:
    """Return a candidate with the keys of the interface."""
    return {key: getattr(c, key) for key in CANDIDATE_KEYS}


def answer_document(
    model: FittedModel,
    optima: Sequence[Optimum],
    steps: Sequence[ScheduleStep],
    refusals: Sequence[str | None],
    launch: Launch | None = None,
) -> dict[str, Any]:
    """Return the answer as ``specmodel.optimum/1``; `launch` is how an engine runs it, where it is recommended."""
    warnings = dict.fromkeys(w for optimum in optima for w in optimum.warnings)
    warnings |= dict.fromkeys(f"not recommended: {text}" for text in refusals if text)
    return {
        "schema": "specmodel.optimum/1",
        "optima": [_optimum_document(optimum) for optimum in optima],
        "schedule": [
            {
                "batch_from": whole(step.batch_from),
                "batch_to": None if step.batch_to is None else whole(step.batch_to),
                "num_steps": step.num_steps,
                "topk": step.topk,
                "num_draft_tokens": step.num_draft_tokens,
                "comm": step.comm,
            }
            for step in steps
        ],
        "comm_settings": comm_settings(model),
        "launch": None if launch is None else launch.to_dict(),
        "warnings": list(warnings),
    }


def _optimum_document(optimum: Optimum) -> dict[str, Any]:
    plain, following = optimum.plain, optimum.measure_next
    return {
        "batch": whole(optimum.batch),
        "best": candidate_document(optimum.best),
        "ties": [candidate_document(c) for c in optimum.ties],
        "table": [candidate_document(c) for c in optimum.table],
        "plain": {
            "comm": plain.comm,
            "tok_s": plain.tok_s,
            "tok_s_interval": plain.tok_s_interval,
            "measured": plain.measured,
        },
        "ceilings": {
            name: {"speedup": ceiling.speedup, "interval": ceiling.interval}
            for name, ceiling in optimum.ceilings.items()
        },
        "expected_regret": optimum.expected_regret,
        "measure_next": None
        if following is None
        else {
            "kind": following.kind,
            "row": following.row,
            "reason": following.reason,
            "gain_tok_s": following.gain_tok_s,
        },
        "unmeasured": list(optimum.unmeasured),
    }


def comm_settings(model: FittedModel) -> dict[str, Any]:
    """Return every communication setting of the file, `default` included, with its environment and flags."""
    stated = model.calibration.comm
    return {
        name: {"env": shell_env(stated[name].env)[0], "flags": list(shell_flags(stated[name].flags)[0])}
        if name in stated
        else {"env": {}, "flags": []}
        for name in model.calibration.comm_names
    }
