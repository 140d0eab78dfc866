"""What was held out beside its prediction: measured settings, points with intervals at several levels, decisions."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from specmodel.calibration import AcceptanceEntry, Calibration, CycleRow
from specmodel.prediction import Prediction
from specmodel.validate import measured_tok_s

__all__ = [
    "LEVELS",
    "Decision",
    "HeldOut",
    "Results",
    "Setting",
    "Task",
    "around_of",
    "length_of",
    "place_of",
    "point",
    "settings_of",
    "shape_of",
]

LEVELS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Nominal levels of the intervals that are kept of every prediction."""
Task = Literal[
    "length, given",
    "length, not given",
    "length, blind",
    "between, given",
    "between, not given",
    "between, blind",
    "tree",
    "batch",
    "all of a batch",
    "kept apart",
    "full table",
    "sparse table",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One measured setting; repeated rows of it count once, as their mean."""

    rows: tuple[int, ...]
    """Where they stand in their list of cycles."""
    row: CycleRow
    """The first of them."""
    tok_s: float
    acceptance_length: float | None
    """1 without drafts; None where nothing is known of it."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Steps, topk, verified tokens."""
        return self.row.num_steps, self.row.topk, self.row.verify_tokens

    @property
    def chain(self) -> bool:
        """Whether it is a chain, or plain decoding."""
        return self.row.topk == 1 and self.row.verify_tokens == self.row.num_steps + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One measured setting beside its prediction from what was left, as total tok/s."""

    task: Task
    file: str
    group: str
    row: CycleRow
    measured_tok_s: float
    predicted_tok_s: float
    intervals: tuple[tuple[float, float], ...] = field(repr=False)
    """One interval for one new measurement at each of `LEVELS`."""
    interior: bool
    """Whether it lies between settings that the fit saw."""
    simple_tok_s: float | None = None
    """What arithmetic says without a model: the line through the two nearest lengths, or the sum of table entries."""
    mode: str = ""
    """How the drafts ran, of cycles from tables."""

    @property
    def error(self) -> float:
        """Relative error, positive where the prediction is too fast."""
        return self.predicted_tok_s / self.measured_tok_s - 1.0

    @property
    def simple_error(self) -> float | None:
        """Relative error of the arithmetic without a model."""
        return None if self.simple_tok_s is None else self.simple_tok_s / self.measured_tok_s - 1.0

    def inside(self, level: float = 0.9) -> bool:
        """Whether the measurement lies in the interval of one of `LEVELS`."""
        low, high = self.intervals[LEVELS.index(level)]
        return low <= self.measured_tok_s <= high

    @property
    def width(self) -> float:
        """Width of the 90 % interval, relative to the measurement."""
        low, high = self.intervals[LEVELS.index(0.9)]
        return (high - low) / self.measured_tok_s

    @property
    def miss(self) -> float:
        """How far the measurement lies outside the 90 % interval, relative to it; 0 inside."""
        low, high = self.intervals[LEVELS.index(0.9)]
        return max(low / self.measured_tok_s - 1.0, 1.0 - high / self.measured_tok_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The chain length that is chosen from the ends of a group, judged by what was measured."""

    file: str
    group: str
    blind: bool
    picked: int
    judged_as: int
    """The picked length, or where it was not measured the model's best among those that were."""
    best: int
    regret: float
    """Share of the best measured rate that is lost."""
    right: bool | None
    """Whether the picked length is as good as the best; None where it was not measured."""
    probability_best: float
    """As stated: of all lengths up to the longest."""
    probability: float
    """The same among the measured lengths alone."""
    complete: bool
    """Whether every candidate length was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What was held out of one file."""

    points: tuple[HeldOut, ...] = ()
    decisions: tuple[Decision, ...] = ()
    failures: tuple[str, ...] = ()
    """Groups that could not be fitted or predicted, and why."""


def length_of(entry: AcceptanceEntry) -> float | None:
    """Acceptance length of an entry; None where it does not reach to the last position."""
    if entry.acceptance_length is not None:
        return entry.acceptance_length
    drafts = entry.drafts or 1
    if entry.accepted_by_rank is not None:
        survival = [sum(ranks) / drafts for ranks in entry.accepted_by_rank]
    elif entry.survival is not None:
        survival = list(entry.survival)
    elif entry.accepted_per_position is not None:
        survival = [count / drafts for count in entry.accepted_per_position]
    else:
        survival = list(np.cumprod(entry.conditional or ()))
    return 1.0 + float(sum(survival)) if len(survival) == entry.num_steps else None


def shape_of(x: CycleRow | AcceptanceEntry) -> tuple[int, int, int]:
    """Steps, topk, verified tokens of a row or an entry."""
    return x.num_steps, x.topk, x.verify_tokens


def settings_of(cal: Calibration, cycles: Sequence[CycleRow]) -> list[Setting]:
    """Return the settings that were measured, in file order; bounds and steps that draft nothing are none."""
    found: dict[Hashable, list[tuple[int, float, float | None]]] = {}
    for i, row in enumerate(cycles):
        if row.tok_s_at_most is not None or (row.speculating and row.num_steps == 0):
            continue
        length = 1.0 if row.num_steps == 0 else row.acceptance_length
        if length is None:
            entries = [a for a in cal.acceptance if a.workload == row.workload and shape_of(a) == shape_of(row)]
            length = next((known for a in reversed(entries) if (known := length_of(a)) is not None), None)
        if length is not None or row.form not in ("cycle_ms", "range_cycle_ms"):
            key = (row.workload, shape_of(row), place_of(row))
            found.setdefault(key, []).append((i, measured_tok_s(row, length or 1.0), length))
    out = []
    for repeats in found.values():
        lengths = [length for _, _, length in repeats if length is not None]
        out.append(
            Setting(
                rows=tuple(i for i, _, _ in repeats),
                row=cycles[repeats[0][0]],
                tok_s=float(np.mean([tok_s for _, tok_s, _ in repeats])),
                acceptance_length=float(np.mean(lengths)) if lengths else None,
            )
        )
    return out


def place_of(row: CycleRow) -> tuple[object, ...]:
    """Where a cycle ran: batch, communication, context, and in which graphs."""
    return row.batch, *around_of(row)


def around_of(row: CycleRow) -> tuple[object, ...]:
    """Where a cycle ran, whatever its batch."""
    drafter = (row.cuda_graph, row.graph_scope) if row.num_steps else (True, None)
    return row.comm, row.context_tokens, row.verify_cuda_graph, *drafter


def point(
    prediction: Prediction,
    setting: Setting,
    task: Task,
    file: str,
    group: str,
    *,
    interior: bool,
    simple_tok_s: float | None = None,
    mode: str = "",
) -> HeldOut:
    """Put a prediction beside what was measured."""
    return HeldOut(
        task=task,
        file=file,
        group=group,
        row=setting.row,
        measured_tok_s=setting.tok_s,
        predicted_tok_s=float(prediction.tok_s),
        intervals=tuple((float(a), float(b)) for a, b in map(prediction.interval, LEVELS)),
        interior=interior,
        simple_tok_s=simple_tok_s,
        mode=mode,
    )
