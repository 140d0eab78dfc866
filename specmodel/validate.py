"""Predicted against measured: whole cycles that the fit did not see, their verdicts, and how honest the intervals are.

A measured cycle is *inside* the 90 % interval, *slower* or *faster* than predicted, or *impossible*: an acceptance
length above what a cycle can emit, or a speedup above the acceptance length, since a cycle that drafts and verifies
cannot be shorter than a plain step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from specmodel.calibration import Calibration, CycleRow
from specmodel.errors import UsageError
from specmodel.fit import fit
from specmodel.model import FittedModel
from specmodel.prediction import Prediction
from specmodel.speeds import Noise, stated_speed

__all__ = [
    "Acceptance",
    "ValidatedRow",
    "ValidationReport",
    "Verdict",
    "cross_validate",
    "measured_tok_s",
    "prediction_of",
    "validate",
]

Verdict = Literal["inside", "slower", "faster", "impossible"]
Acceptance = Literal["stated", "fitted"]
_LEVEL = 0.9
_SLACK = 1.005  # what rounding in a published table may add to a ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRow:
    """One measured cycle beside its prediction, both as total tok/s."""

    row: CycleRow
    predicted_tok_s: float
    tok_s_interval: tuple[float, float]
    """90 % interval for one measurement."""
    measured_tok_s: float
    verdict: Verdict
    reason: str
    """Why a row is impossible, empty otherwise."""
    extrapolated: bool
    fitted_tok_s: float
    """The prediction that does not use the row's own acceptance length, where the calibration knows its workload."""

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive where it is too fast; 0 for a bound that it keeps."""
        error = self.predicted_tok_s / self.measured_tok_s - 1.0
        return max(error, 0.0) if self.row.tok_s_at_most is not None else error

    @property
    def fitted_error(self) -> float:
        """Relative error where the acceptance is predicted too."""
        error = self.fitted_tok_s / self.measured_tok_s - 1.0
        return max(error, 0.0) if self.row.tok_s_at_most is not None else error


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationReport:
    """Rows that were checked, and why others were not."""

    rows: tuple[ValidatedRow, ...]
    skipped: tuple[str, ...] = ()

    @property
    def possible(self) -> tuple[ValidatedRow, ...]:
        """Rows that can be; a model is not judged by the others."""
        return tuple(r for r in self.rows if r.verdict != "impossible")

    @property
    def coverage(self) -> float | None:
        """Share of the possible rows inside their 90 % interval; None where there is none."""
        rows = self.possible
        return sum(r.verdict == "inside" for r in rows) / len(rows) if rows else None

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors of the possible rows, positive where the prediction is too fast."""
        return tuple(r.error for r in self.possible)

    def beyond(self, tolerance_percent: float) -> tuple[ValidatedRow, ...]:
        """Return the possible rows whose tok/s is off by more than a percentage of what was measured."""
        return tuple(r for r in self.possible if 100.0 * abs(r.error) > tolerance_percent)


def validate(model: FittedModel, cycles: Iterable[CycleRow], *, acceptance: Acceptance = "stated") -> ValidationReport:
    """Compare measured cycles with what a model predicts of them.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    cycles : iterable of CycleRow
        What was measured, in any form of speed. A ``cycle_ms`` without an acceptance length is compared at the fitted
        one; for ``tok_s_at_most`` a prediction that may lie below the bound is inside.
    acceptance : {"stated", "fitted"}
        Predict from the acceptance length that a row states, where it states one, which tests the cost of a cycle; or
        from the fitted acceptance, which tests both together.

    Returns
    -------
    ValidationReport

    Raises
    ------
    UsageError
        For a communication setting, or a workload without an acceptance length, that the calibration lacks.
    """
    rows = list(cycles)
    checked: list[ValidatedRow] = []
    skipped = []
    for i, row in enumerate(rows):
        if row.speculating and row.num_steps == 0:
            skipped.append(f"row {i + 1}: a step with speculation on and nothing drafted is not predicted")
        else:
            checked.append(_check(model, row, rows, acceptance))
    return ValidationReport(rows=tuple(checked), skipped=tuple(skipped))


def _knows(model: FittedModel, workload: str) -> bool:
    return workload in model.layout.workloads or any(
        r.workload == workload for r in model.calibration.measurements.cycles
    )


def prediction_of(model: FittedModel, row: CycleRow, acceptance_length: float | None) -> Prediction:
    """Predict what a row measured: at an acceptance length, or at the fitted one where that is None."""
    # Where the acceptance is given, or nothing is drafted, the workload does not matter and may be a new one.
    free = not _knows(model, row.workload) and (acceptance_length is not None or row.num_steps == 0)
    drafted = row.mean_draft_tokens if row.topk == 1 and row.num_steps else None
    early = drafted is not None and acceptance_length is not None
    # Drafting that stops early costs what it drafts on average.
    steps = min(max(float(drafted or 0.0), 1e-3), float(row.num_steps)) if early else float(row.num_steps)
    return model.predict(
        steps,
        batch=row.batch,
        comm=row.comm,
        topk=row.topk,
        num_draft_tokens=steps + 1.0 if early else row.num_draft_tokens,
        context_tokens=row.context_tokens,
        workload=None if free else row.workload,
        cuda_graph=row.cuda_graph,
        verify_cuda_graph=row.verify_cuda_graph,
        acceptance_length=acceptance_length,
    )


def _check(model: FittedModel, row: CycleRow, rows: Sequence[CycleRow], acceptance: Acceptance) -> ValidatedRow:
    own = row.acceptance_length if row.num_steps else None
    length = own if acceptance == "stated" else None
    # Where a workload is known from the row alone, its acceptance cannot be predicted.
    fitted = prediction_of(model, row, None) if length is None or _knows(model, row.workload) else None
    if row.cycle_ms is not None or row.range_cycle_ms is not None:
        # A cycle time says nothing about acceptance: compare at one acceptance length, whichever it is.
        length = own if own is not None else float(fitted.acceptance_length) if fitted is not None else None
    prediction = prediction_of(model, row, length) if length is not None or fitted is None else fitted
    low, high = prediction.interval(_LEVEL)
    measured = measured_tok_s(row, float(prediction.acceptance_length))
    reason = _impossible(model, row, measured, rows)
    return ValidatedRow(
        row=row,
        predicted_tok_s=float(prediction.tok_s),
        tok_s_interval=(float(low), float(high)),
        measured_tok_s=measured,
        verdict="impossible" if reason else _verdict(row, measured, float(low), float(high)),
        reason=reason,
        extrapolated=bool(prediction.extrapolated),
        fitted_tok_s=float((fitted or prediction).tok_s),
    )


def measured_tok_s(row: CycleRow, acceptance_length: float) -> float:
    """Total tok/s of a row; a cycle time becomes one by an acceptance length."""
    if row.tok_s_at_most is not None:
        return row.tok_s_at_most
    stated = stated_speed(row, Noise())
    if stated is None:
        raise UsageError(f"a cycle of {row.num_steps} steps at batch {row.batch:g} states no speed")
    form, value, _ = stated
    return value if form == "tok_s" else 1000.0 * row.batch * acceptance_length / value


def _range(row: CycleRow, measured: float) -> tuple[float, float]:
    """Between what a measured tok/s was seen to vary; the value itself where that is not said."""
    bounds = row.range_tok_s or row.range_tpot_ms or row.range_cycle_ms
    if bounds is None:
        return measured, measured
    half = float(np.sqrt(bounds[1] / bounds[0]))
    return measured / half, measured * half


def _verdict(row: CycleRow, measured: float, low: float, high: float) -> Verdict:
    least, most = _range(row, measured)
    if most < low:
        return "slower"
    return "faster" if least > high and row.tok_s_at_most is None else "inside"


def _impossible(model: FittedModel, row: CycleRow, measured: float, rows: Sequence[CycleRow]) -> str:
    if row.num_steps == 0:
        return ""
    most = min(row.num_steps + 1, row.verify_tokens)
    length = row.acceptance_length
    if length is not None and length > most * _SLACK:
        return f"acceptance length {length:g} is above the {most} tokens that a cycle can emit"
    if row.tok_s_at_most is not None:
        return ""
    plain = [
        measured_tok_s(r, 1.0)
        for r in rows
        if r.num_steps == 0
        and not r.speculating
        and r.tok_s_at_most is None
        and (r.batch, r.context_tokens) == (row.batch, row.context_tokens)
    ]
    rate = model.measured.plain_rate(row.batch, row.context_tokens, (row.workload,))
    best = max(plain) if plain else rate.tok_s if rate is not None else None
    limit = most if length is None else length
    if best is None or measured <= best * limit * _SLACK:
        return ""
    what = f"the acceptance length {length:g}" if length is not None else f"the {most} tokens that a cycle can emit"
    return f"a speedup of {measured / best:.2f} over plain decoding ({best:g} tok/s) is above {what}"


def cross_validate(
    cal: Calibration,
    *,
    acceptance: Acceptance = "stated",
    most_settings: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ValidationReport:
    """Leave-one-out over the cycles of a calibration: each setting is predicted from everything else in the file.

    All rows of one setting (the same shape, batch, communication, context and workload) are held out together, bounds
    on it included, so that no repeat of a row stands in for it.

    Parameters
    ----------
    cal : Calibration
        What was measured; its `validation` section is not looked at.
    acceptance : {"stated", "fitted"}
        As in `validate`.
    most_settings : int, optional
        Hold out only so many settings, evenly spread over the file; by default every one.
    progress : callable of (done, total), optional
        Called after each setting.

    Returns
    -------
    ValidationReport
        Rows in the order of the file.
    """
    cycles = cal.measurements.cycles
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(cycles):
        groups.setdefault(_setting(row), []).append(i)
    wanted = [g for g in groups.values() if any(cycles[i].tok_s_at_most is None for i in g)]
    skipped = []
    if most_settings is not None and len(wanted) > most_settings:
        picked = sorted({int(i) for i in np.linspace(0, len(wanted) - 1, most_settings)})
        skipped.append(f"{len(picked)} of {len(wanted)} settings were held out, evenly spread")
        wanted = [wanted[i] for i in picked]
    found: dict[int, ValidatedRow] = {}
    for done, group in enumerate(wanted):
        held = [i for i in group if cycles[i].tok_s_at_most is None]
        reason = _unlike(cal, cycles[held[0]], set(group))
        if reason:
            skipped += [f"measurements.cycles[{i}]: {reason}" for i in held]
        else:
            rest = tuple(row for i, row in enumerate(cycles) if i not in group)
            model = fit(replace(cal, measurements=replace(cal.measurements, cycles=rest)))
            for i in held:
                found[i] = _check(model, cycles[i], [*rest, *(cycles[j] for j in held)], acceptance)
        if progress is not None:
            progress(done + 1, len(wanted))
    return ValidationReport(rows=tuple(found[i] for i in sorted(found)), skipped=tuple(skipped))


def _setting(row: CycleRow) -> tuple[object, ...]:
    shape = (row.num_steps, row.topk, row.verify_tokens, row.speculating)
    place = (row.batch, row.comm, row.workload, row.context_tokens)
    return (*shape, *place, row.cuda_graph, row.graph_scope, row.verify_cuda_graph)


def _unlike(cal: Calibration, row: CycleRow, group: set[int]) -> str:
    """Why a setting cannot be predicted from the rest of its file; empty where it can."""
    if row.speculating and row.num_steps == 0:
        return "a step with speculation on and nothing drafted is not predicted"
    m = cal.measurements
    if not (m.verify or len(m.cycles) > len(group)):
        return "nothing else is left to predict it from"
    rest = [r.workload for i, r in enumerate(m.cycles) if i not in group]
    if (
        row.num_steps
        and row.acceptance_length is None
        and row.workload not in ({*rest, *(a.workload for a in cal.acceptance)})
    ):
        return f"nothing else is known of workload {row.workload}"
    return ""
