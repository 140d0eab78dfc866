"""What held-out predictions come to: quantiles and coverage, aims kept and missed, the worst and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from specmodel.calibration import Calibration
from specmodel.findings import findings_of
from specmodel.heldout.points import Decision, HeldOut, Task
from specmodel.heldout.tables import EAGER, SPARSE_TOKENS, OtherWidth, Transfer

__all__ = [
    "TABLE_AIMS",
    "TRANSFER_AIMS",
    "WORSE",
    "Aim",
    "Summary",
    "aims_of",
    "likely_reason",
    "summary_of",
    "worse_than_simple",
    "worst_of",
]

# What in a caveat may explain an error, the stronger first.
_STRONG = re.compile(
    r"before a fix|steps at|not amortise|cannot be|inferred|one data-parallel|throttl|stale|degenerate|lossy|host work"
    r"|another run|may be lower|noisy|vary together|disagree|very different|one prompt|very short"
)
_WEAK = re.compile(r"prefill|approximate|varie|bracket|not stated|from the aggregate|headline|two-digit")
_OF_TREES = re.compile(r"tree")
_MOST_CAVEATS = 2
WORSE = 0.005
"""An error that is larger by more than this is worse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Absolute relative errors of tok/s and intervals of some predictions, as fractions."""

    count: int
    groups: int
    median: float
    mean: float
    p90: float
    p95: float
    worst: float
    inside: float
    """Share inside the 90 % interval."""
    width: float
    """Mean width of that interval."""
    simple: float | None
    """Mean error of arithmetic without a model where there is one, else None."""
    beside: float | None
    """Mean error of the model on the same rows."""


def summary_of(points: Sequence[HeldOut]) -> Summary | None:
    """Summarise predictions; None where there are none."""
    if not points:
        return None
    errors = np.abs([p.error for p in points])
    compared = [(abs(p.error), abs(p.simple_error)) for p in points if p.simple_error is not None]
    return Summary(
        count=len(points),
        groups=len({(p.file, p.group) for p in points}),
        median=float(np.median(errors)),
        mean=float(np.mean(errors)),
        p90=float(np.quantile(errors, 0.9)),
        p95=float(np.quantile(errors, 0.95)),
        worst=float(np.max(errors)),
        inside=float(np.mean([p.inside() for p in points])),
        width=float(np.mean([p.width for p in points])),
        simple=float(np.mean([simple for _, simple in compared])) if compared else None,
        beside=float(np.mean([own for own, _ in compared])) if compared else None,
    )


def worse_than_simple(p: HeldOut) -> bool:
    """Whether a prediction is clearly worse than arithmetic on measured numbers."""
    return p.simple_error is not None and abs(p.error) > abs(p.simple_error) + WORSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """One figure that is to be reached, and what it is."""

    what: str
    figure: str
    limit: float
    value: float
    least: bool = False
    """Whether the limit is the least that is wanted, not the most."""

    @property
    def kept(self) -> bool:
        """Whether the value is on the right side of the limit."""
        return self.value >= self.limit if self.least else self.value <= self.limit


TABLE_AIMS = {"median": 0.01, "p95": 0.03}
"""Of whole cycles from full tables."""
TRANSFER_AIMS = {"median": 0.015, "p95": 0.04}
"""Of verify passes of a communication setting from the table of another."""
_FIELD_AIMS: tuple[tuple[Task, bool, dict[str, float]], ...] = (
    ("length, given", False, {"mean": 0.032, "p90": 0.08, "inside": 0.86}),
    ("length, not given", False, {"mean": 0.036, "p90": 0.085, "inside": 0.86}),
    ("length, blind", False, {"mean": 0.045, "inside": 0.85}),
    ("between, given", False, {"mean": 0.043, "inside": 0.87}),
    ("between, not given", False, {"mean": 0.05, "inside": 0.87}),
    ("tree", False, {"mean": 0.055, "inside": 0.85}),
    ("batch", True, {"mean": 0.042, "p90": 0.085, "inside": 0.88}),
    ("all of a batch", True, {"mean": 0.05, "p90": 0.11, "inside": 0.86}),
    ("full table", False, {**TABLE_AIMS, "inside": 0.85}),
    ("sparse table", False, {"median": 0.02, "p95": 0.06, "inside": 0.85}),
    ("sparse table", True, {"median": 0.02, "p95": 0.06, "inside": 0.85}),
)
_WORDS = {
    "median": "median error",
    "mean": "mean error",
    "p90": "90 % of errors below",
    "p95": "95 % of errors below",
    "inside": "inside the 90 % interval",
}
_REGRETS = (
    ("chain length chosen, acceptance known", False, 0.004, 0.055),
    ("chain length chosen, blind", True, 0.017, None),
)
_OTHER_WIDTH = 0.15


def aims_of(
    points: Sequence[HeldOut],
    decisions: Sequence[Decision],
    transfers: Sequence[Transfer],
    widths: Sequence[OtherWidth],
) -> list[Aim]:
    """Every aim that the files can test, those that are missed first."""
    out = []
    for task, interior, limits in _FIELD_AIMS:
        graphs = task == "full table"
        some = [
            p for p in points if p.task == task and (p.interior or not interior) and not (graphs and p.mode == EAGER)
        ]
        summary = summary_of(some)
        if summary is not None:
            within = f"to {SPARSE_TOKENS[-1]} tokens" if task == "sparse table" else "interior"
            what = f"{task} ({within})" if interior else f"{task} (drafts in graphs)" if graphs else task
            for figure, limit in limits.items():
                value = float(getattr(summary, figure))
                out.append(Aim(what=what, figure=_WORDS[figure], limit=limit, value=value, least=figure == "inside"))
    for what, blind, mean, worst in _REGRETS:
        regrets = [d.regret for d in decisions if d.blind == blind]
        if regrets:
            out.append(Aim(what=what, figure="mean regret", limit=mean, value=float(np.mean(regrets))))
            if worst is not None:
                out.append(Aim(what=what, figure="largest regret", limit=worst, value=max(regrets)))
    if transfers:
        errors = np.abs([t.error for t in transfers])
        for figure, limit in TRANSFER_AIMS.items():
            value = float(np.quantile(errors, 0.5 if figure == "median" else 0.95))
            out.append(Aim(what="verify pass of another setting", figure=_WORDS[figure], limit=limit, value=value))
    if widths:
        value = float(np.median(np.abs([e for w in widths for e in w.errors])))
        out.append(Aim(what="all-reduces of another width", figure="median error", limit=_OTHER_WIDTH, value=value))
    return sorted(out, key=lambda a: a.kept)


def worst_of(
    points: Iterable[HeldOut], by: Callable[[HeldOut], float], above: float, most: int
) -> list[tuple[HeldOut, int]]:
    """The worst prediction of each group, and how many other settings of the group are worse than a threshold.

    Parameters
    ----------
    points : iterable of HeldOut
        Any predictions.
    by : callable
        How bad a prediction is.
    above : float
        What counts as bad.
    most : int
        How many groups are wanted.
    """
    groups: dict[tuple[str, str], list[HeldOut]] = {}
    for p in sorted(points, key=lambda p: -by(p)):
        if by(p) > above:
            groups.setdefault((p.file, p.group), []).append(p)
    return [(bad[0], len({p.row for p in bad}) - 1) for bad in groups.values()][:most]


def likely_reason(cal: Calibration, p: HeldOut) -> str:
    """What the numbers and the file itself say about a bad prediction; empty where they say nothing."""
    reasons = []
    if not p.interior:
        if p.task == "sparse table":
            reasons.append(f"more than the {SPARSE_TOKENS[-1]} tokens that the sparse table ends with")
        else:
            beyond = "batches" if "batch" in p.task else "lengths"
            reasons.append(f"beyond the other {beyond}: an extrapolation")
    simple = p.simple_error
    if simple is not None and abs(simple) > 0.5 * abs(p.error) and simple * p.error > 0:
        how = "the sum of the table entries" if p.task.endswith("table") else "the line through its neighbours"
        reasons.append(f"{how} is off by {_signed(simple)} too")
    if p.row.note:
        reasons.append(f"its note: {p.row.note}")
    cycles = cal.measurements.cycles
    reasons += [f.text for f in findings_of(cal) if f.section == "cycles" and cycles[f.row] == p.row]
    caveats = [" ".join(c.split()) for c in cal.provenance.caveats]
    patterns = (_OF_TREES, _STRONG, _WEAK) if p.row.topk > 1 else (_STRONG, _WEAK)
    telling = dict.fromkeys(c for pattern in patterns for c in caveats if pattern.search(c))
    reasons += [f"caveat: {c}" for c in list(telling)[:_MOST_CAVEATS]]
    return "; ".join(reasons)


def _signed(error: float) -> str:
    return f"{100.0 * error:+.0f} %"
