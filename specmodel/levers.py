"""How the ledger bounds a lever: draws of tok/s before and after, with the steps as they are and chosen again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmodel.calibration import Evidence
from specmodel.diagnosed import Case
from specmodel.diagnosis import Lever, Status

__all__ = ["KNOWN", "NOTHING", "Bound", "Ledger", "bound_of", "judged", "lever", "on_ranks", "percent_gain", "settled"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What every entry of the ledger needs."""

    case: Case
    worth: float
    facts: dict[str, tuple[Evidence, ...]]
    """Evidence by what it is about, of the file and of the logs."""

    def seen(self, about: str) -> Evidence | None:
        """The fact on a question: where several contradict each other, the one that says no."""
        found = self.facts.get(about, ())
        return min(found, key=lambda e: e.value is not False, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The most that a lever could bring, factors on tok/s."""

    fixed: float
    optimised: float
    low: float
    high: float

    @property
    def interval(self) -> tuple[float, float]:
        """90 % interval."""
        return self.low, self.high


KNOWN = 1.25
"""Greatest ratio of the ends of an interval for which its value counts as known."""
NOTHING = Bound(fixed=1.0, optimised=1.0, low=1.0, high=1.0)


def bound_of(case: Case, after: Array, points: Sequence[int] | None = None) -> Bound:
    """Bound a lever from draws of tok/s after it, shape (draws, points of the case).

    Steps are chosen again before and after, by the mean of ln tok/s, among `points` (by default those of the diagnosed
    communication setting): what it brings beyond choosing them well already.
    """
    before = case.parts.tok_s
    at = case.points(case.comm) if points is None else list(points)
    fixed = after[:, case.chosen] / before[:, case.chosen]
    old = at[int(np.argmax(np.log(before[:, at]).mean(axis=0)))]
    new = at[int(np.argmax(np.log(after[:, at]).mean(axis=0)))]
    again = after[:, new] / before[:, old]
    if np.median(fixed) > np.median(again):
        again = fixed
    ends = [np.quantile(x, (0.05, 0.95)) for x in (fixed, again)]
    return Bound(
        fixed=max(float(np.median(fixed)), 1.0),
        optimised=max(float(np.median(again)), 1.0),
        low=max(min(float(e[0]) for e in ends), 1.0),
        high=max(max(float(e[1]) for e in ends), 1.0),
    )


def judged(bound: Bound | None, worth: float, *, decidable: bool) -> Status:
    """`closed` where not even the upper end is worth while, `open` where the lower end is, else what can be said."""
    if bound is None:
        return "measure"
    if bound.high < 1.0 + worth:
        return "closed"
    if bound.low >= 1.0 + worth or not decidable:
        return "open" if bound.optimised >= 1.0 + worth else "closed"
    return "measure"


def lever(
    name: str,
    title: str,
    bound: Bound | None,
    status: Status,
    evidence: str,
    decided_by: str = "",
    advice: str = "",
) -> Lever:
    """One entry: what is to be measured is decided by something, what is open may have an advice."""
    return Lever(
        name=name,
        title=title,
        bound=None if bound is None else bound.fixed,
        bound_optimised=None if bound is None else bound.optimised,
        interval=None if bound is None else bound.interval,
        status=status,
        evidence=evidence,
        decided_by={"measure": decided_by, "open": advice, "closed": ""}[status],
    )


def settled(name: str, title: str, evidence: str) -> Lever:
    """An entry that is closed by a fact: nothing is left to gain."""
    return lever(name, title, NOTHING, "closed", evidence)


def on_ranks(seen: Evidence) -> str:
    """Say on how many ranks something was seen, where that is known."""
    return f" on {seen.ranks} rank{'s' if seen.ranks > 1 else ''}" if seen.ranks else ""


def percent_gain(factor: float) -> str:
    """Write a factor as a gain: +3.7 %."""
    return f"+{100 * (factor - 1):.1f} %" if factor < 10.995 else f"{factor:.0f} times"
