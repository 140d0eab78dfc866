"""What to measure next: the value of knowing, over what it takes to know it, and when to stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specmodel.model import FittedModel
from specmodel.optimum import Candidate, NextMeasurement
from specmodel.posterior import Combination, covariance
from specmodel.request import Request
from specmodel.uncertainty import expected_excess

__all__ = ["EFFORT", "WORTH_MEASURING", "next_measurement"]

Array = NDArray[np.float64]
WORTH_MEASURING = 0.002
"""Least expected gain, as a share of the throughput, for which anything is measured."""
EFFORT = {"pass": 1.0, "plain": 5.0, "cycle": 10.0, "setting": 10.0}
"""What a measurement takes, relative to one point of a table of passes: plain decoding is a start of the server and a
benchmark; a cycle with speculation needs enough prompts for its acceptance, too; a communication setting without any
whole run in the file needs its environment on every rank besides. Round numbers: only their order is sure."""

TABLE = 3
"""Sizes of passes under one setting from which on they are a table that one can add to: fewer come from a trace of
whole runs, and another size from another run."""

_PARTS: dict[Literal["verify", "draft"], Combination] = {
    "verify": Combination(verify=1.0),
    "draft": Combination(draft=1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """One thing that could be measured about a candidate."""

    kind: Literal["cycles", "verify", "draft"]
    candidate: int
    gain: float
    """Expected gain of knowing it exactly, tok/s."""
    effort: float


def next_measurement(
    model: FittedModel,
    table: tuple[Candidate, ...],
    best: int,
    score: Array,
    open_: NDArray[np.bool_],
    request: Request | None,
    context: int | None,
    workloads: tuple[str, ...],
) -> tuple[NextMeasurement | None, str]:
    """The measurement with the largest expected gain for its effort, or None and why nothing is worth one.

    A whole run of a candidate tells its speed; one more point of a table of passes or drafts, where the file has such
    a table, tells that part of it. Nothing is proposed whose expected gain is below `WORTH_MEASURING`. Where nothing
    was timed at all, or whole runs of one shape alone, plain decoding comes first: it gives every other number its
    scale.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    table : tuple of Candidate
        All candidates of a call; `best` is the index of the chosen one.
    score : numpy.ndarray
        Joint draws of what is maximised, shape (draws, candidates).
    open_ : numpy.ndarray of bool
        Candidates whose whole run may be proposed: allowed, near enough, and not measured.
    request : Request, optional
        The candidates, in order; None where the score is not their rate: then only whole runs are proposed.
    context, workloads
        The place of the call, for the row to add.

    Returns
    -------
    following, reason : NextMeasurement or None, str
        One of them says something.
    """
    gains, logarithmic = _gains(score, best, table[best].tok_s)
    if model.measured.plain_first:
        return _first(model, gains, table, context, workloads), ""
    timed = {row.comm for row in model.calibration.measurements.cycles}
    options = [
        _Option(kind="cycles", candidate=int(j), gain=float(gains[j]), effort=_effort(table[j], timed))
        for j in np.flatnonzero(open_)
    ]
    if request is not None and logarithmic:
        options += _parts(model, table, best, np.log(score).mean(axis=0), open_, request)
    most = max((o.gain for o in options), default=0.0)
    if most < WORTH_MEASURING * table[best].tok_s:
        share = 100.0 * most / table[best].tok_s
        return None, f"stop: at most {max(share, 0.05):.1f} % to gain from one more measurement"
    worth = [o for o in options if o.gain >= WORTH_MEASURING * table[best].tok_s]
    chosen = max(worth, key=lambda o: (o.gain / o.effort, -o.effort))
    return _described(model, chosen, table[chosen.candidate], context, workloads), ""


def _gains(score: Array, best: int, tok_s: float) -> tuple[Array, bool]:
    """Expected gain of knowing each candidate exactly (value of information), tok/s, and whether in logarithms.

    For a candidate c other than the chosen one: ``E[max(f_c, f_best)] - E[f_best]``; for the chosen one, against the
    runner-up (expected improvement, Jones et al. 1998, with the incumbent's own uncertainty). In logarithms, where all
    scores are positive: the long upper tail of what is hardly known promises nothing.
    """
    logarithmic = bool(np.all(score > 0.0))
    value = np.log(score) if logarithmic else score
    mean = value.mean(axis=0)
    gain = np.maximum(value, value[:, [best]]).mean(axis=0) - mean[best]
    if score.shape[1] > 1:
        runner = _runner(mean, best)
        gain[best] = np.maximum(value[:, best], value[:, runner]).mean() - max(mean[best], mean[runner])
    return (tok_s * np.expm1(gain) if logarithmic else gain), logarithmic


def _runner(mean: Array, best: int) -> int:
    """The best of the others."""
    return int(np.argmax(np.where(np.arange(len(mean)) == best, -np.inf, mean)))


def _effort(c: Candidate, timed: set[str]) -> float:
    return EFFORT["cycle" if c.num_steps else "plain"] + (0.0 if c.comm in timed else EFFORT["setting"])


def _parts(
    model: FittedModel,
    table: tuple[Candidate, ...],
    best: int,
    mean: Array,
    open_: NDArray[np.bool_],
    request: Request,
) -> Iterator[_Option]:
    """Value of one more point of a table of passes or drafts, for the candidate whose part it is.

    Knowing the part moves the expectation of the candidate's logarithm by a normal variable of sd ``|b_c - b_best|``,
    ``b = cov(ln f, ln part) / sd(ln part)``: the correlated knowledge gradient of Frazier, Powell and Dayanik 2009
    (INFORMS Journal on Computing 21), for the pair of it and the chosen one (for the chosen one, the runner-up).
    """
    measurements = model.calibration.measurements
    sizes = {
        "verify": {(row.comm, row.tokens) for row in measurements.verify},
        "draft": {(row.comm, row.num_steps) for row in measurements.draft},
    }
    for kind, of in _PARTS.items():
        comms = {comm for comm in model.comm_names if sum(c == comm for c, _ in sizes[kind]) >= TABLE}
        wanted = [j for j in np.flatnonzero(open_) if table[j].comm in comms and not _known(model, kind, table[j])]
        if not wanted:
            continue
        gain = np.zeros(len(table))
        for mode, weight in enumerate(model.weights):
            ((_, rate, right),) = model.moments(mode, request)
            ((_, part, _),) = model.moments(mode, request, of)
            slope = covariance(model.posteriors[mode], right, rate, part) / np.sqrt(part.variance)
            for j in wanted:
                other = _runner(mean, best) if j == best and len(table) > 1 else best
                spread = float(abs(slope[j, j] - slope[other, j]))
                ahead = float(mean[j] - mean[other]) if j != best else -abs(float(mean[j] - mean[other]))
                if spread > 0.0:
                    gain[j] += weight * spread * float(expected_excess(ahead / spread))
        for j in wanted:
            yield _Option(
                kind=kind,
                candidate=int(j),
                gain=float(table[best].tok_s * np.expm1(gain[j])),
                effort=EFFORT["pass"],
            )


def _known(model: FittedModel, kind: str, c: Candidate) -> bool:
    """Whether this part of a candidate was measured, or cannot be stated as a row."""
    sequences = max(c.batch / model.deployment.data_parallel, 1.0)
    tokens = sequences * c.num_draft_tokens
    if c.num_steps == 0:
        return True  # plain decoding is its pass, and a whole run of it says so at once
    if kind == "draft":
        return (c.num_steps, c.topk, c.comm) in model.measured.draft
    return tokens != int(tokens) or (tokens, sequences, c.comm) in model.measured.verify


def _first(
    model: FittedModel,
    gains: Array,
    table: tuple[Candidate, ...],
    context: int | None,
    workloads: tuple[str, ...],
) -> NextMeasurement | None:
    """Plain decoding, where nothing was timed yet, or one shape alone."""
    plain = [j for j, c in enumerate(table) if c.num_steps == 0]
    j = max(plain, key=lambda j: gains[j])
    c = table[j]
    reason = (
        f"{model.measured.plain_first}; under {c.comm} "
        f"(a guess says {_rate(c.tok_s)} tok/s, {_rate(c.tok_s_interval[0])} to {_rate(c.tok_s_interval[1])})"
    )
    gain = max(float(gains[j]), WORTH_MEASURING * c.tok_s)
    return NextMeasurement(
        kind="cycles", row=_cycle_row(c, context, workloads), reason=reason, gain_tok_s=gain, effort=EFFORT["plain"]
    )


def _cycle_row(c: Candidate, context: int | None, workloads: tuple[str, ...]) -> dict[str, Any]:
    row: dict[str, Any] = {"num_steps": c.num_steps}
    if c.topk > 1:
        row |= {"topk": c.topk, "num_draft_tokens": c.num_draft_tokens}
    row |= {"batch": _whole(c.batch), "comm": c.comm}
    if context is not None:
        row["context_tokens"] = context
    if len(workloads) == 1 and workloads[0] != "default" and c.num_steps:
        row["workload"] = workloads[0]
    return row


def _described(
    model: FittedModel, option: _Option, c: Candidate, context: int | None, workloads: tuple[str, ...]
) -> NextMeasurement:
    """The row to add and the reason, in words."""
    low, high = c.tok_s_interval
    steps = "plain decoding" if c.num_steps == 0 else "1 step" if c.num_steps == 1 else f"{c.num_steps} steps"
    if c.topk > 1:
        steps = f"tree {c.num_steps}x{c.topk}x{c.num_draft_tokens}"
    predicted = f"predicted at {_rate(c.tok_s)} tok/s ({_rate(low)} to {_rate(high)})"
    brings = f"knowing it brings {_rate(option.gain)} tok/s on average"
    sequences = max(c.batch / model.deployment.data_parallel, 1.0)
    if option.kind == "cycles":
        row = _cycle_row(c, context, workloads)
        reason = f"{steps} under {c.comm} is {predicted} and was not measured; {brings}"
    elif option.kind == "verify":
        tokens = round(sequences * c.num_draft_tokens)
        row = {"tokens": tokens, "batch": _whole(sequences), "comm": c.comm}
        reason = (
            f"the verify pass of {tokens} tokens under {c.comm} was not measured: it decides on {steps}, {predicted}; "
            f"{brings}, and one more point of the table takes less than a whole run"
        )
    else:
        row = {"num_steps": c.num_steps, "batch": _whole(sequences), "comm": c.comm}
        row |= {"topk": c.topk, "num_draft_tokens": c.num_draft_tokens} if c.topk > 1 else {}
        reason = (
            f"the draft of {steps} under {c.comm} was not measured: it decides on {steps}, {predicted}; {brings}, "
            "and one more point of the table takes less than a whole run"
        )
    if option.kind != "cycles" and context is not None:
        row["context_tokens"] = context
    return NextMeasurement(kind=option.kind, row=row, reason=reason, gain_tok_s=option.gain, effort=option.effort)


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
