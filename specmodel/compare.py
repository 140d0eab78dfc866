"""What changed between two calibrations: term by term, and in tok/s at the configurations that both know.

The two were measured apart, so their errors are taken as independent. The interval of a change is recovered from the
two intervals (MOVER, Zou and Donner, Statistics in Medicine 27, 2008): for a difference d = b - a with intervals
[la, ua] and [lb, ub],

    d - sqrt((b - lb)^2 + (ua - a)^2)   to   d + sqrt((ub - b)^2 + (a - la)^2),

in logarithms for what is positive. A change is clear where that interval leaves zero out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from specmodel.decide import optimize
from specmodel.measured import default_context
from specmodel.model import FittedModel
from specmodel.optimum import Candidate
from specmodel.prediction import Term

__all__ = ["Change", "Comparison", "ConfigurationChange", "TermChange", "compare"]

Interval = tuple[float, float]
_INFORMED = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Two values with their 90 % intervals, and what changed from one to the other."""

    before: float
    before_interval: Interval
    after: float
    after_interval: Interval
    kind: Literal["ratio", "difference"]
    change: float
    """after / before - 1 for a ratio, after - before for a difference."""
    change_interval: Interval

    @property
    def clear(self) -> bool:
        """Whether the interval of the change leaves zero out."""
        return self.change_interval[0] > 0.0 or self.change_interval[1] < 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TermChange:
    """One fitted parameter in both calibrations."""

    name: str
    unit: str
    change: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationChange:
    """One configuration in both calibrations: total tok/s, and the two parts that it is made of."""

    num_steps: int
    batch: float
    comm: str
    workload: str | None
    """None: the mixture that each file states."""
    context_tokens: int | None
    tok_s: Change
    cycle_ms: Change
    acceptance_length: Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from one calibration to another."""

    before: str
    after: str
    terms: tuple[TermChange, ...]
    configurations: tuple[ConfigurationChange, ...]
    best: tuple[tuple[Candidate, Candidate], ...]
    """The best configuration before and after, one pair for each batch."""
    warnings: tuple[str, ...]


def _change(before: tuple[float, float, float], after: tuple[float, float, float], *, ratio: bool) -> Change:
    """Change between two (value, low, high), by MOVER."""
    a, b = (tuple(map(math.log, x)) if ratio else x for x in (before, after))
    difference = b[0] - a[0]
    low = difference - math.hypot(b[0] - b[1], a[2] - a[0])
    high = difference + math.hypot(b[2] - b[0], a[0] - a[1])
    back = math.expm1 if ratio else float
    return Change(
        before=before[0],
        before_interval=(before[1], before[2]),
        after=after[0],
        after_interval=(after[1], after[2]),
        kind="ratio" if ratio else "difference",
        change=back(difference),
        change_interval=(back(low), back(high)),
    )


def compare(before: FittedModel, after: FittedModel) -> Comparison:
    """Compare two fitted calibrations, such as one before and one after a fix.

    Parameters
    ----------
    before, after : FittedModel
        From `fit`.

    Returns
    -------
    Comparison
        Terms that the data of either inform; configurations at the communication settings, batches and workloads
        that both know, for plain decoding and every step count that either measured or would choose.
    """
    warnings: list[str] = []
    comms = _common("communication setting", before.calibration.comm_names, after.calibration.comm_names, warnings)
    batches = _common("batch", before.measured.batches, after.measured.batches, warnings)
    batches = batches or sorted({*before.measured.batches, *after.measured.batches}) or [1.0]
    workloads = _workloads(before, after, warnings)
    configurations: list[ConfigurationChange] = []
    best = []
    for batch in batches:
        context = _context(before, after, batch, warnings)
        pair = tuple(
            optimize(m, batch=batch, comm=comms, workload=workloads[0], context_tokens=context) for m in (before, after)
        )
        best.append((pair[0].best, pair[1].best))
        steps = sorted({0, *_steps(before, batch), *_steps(after, batch), *(p.best.num_steps for p in pair)})
        for workload in workloads:
            for comm in comms:
                place = {"batch": batch, "comm": comm, "workload": workload, "context_tokens": context}
                configurations += [_configuration(before, after, k, place) for k in steps]
    return Comparison(
        before=before.calibration.name,
        after=after.calibration.name,
        terms=_terms(before, after),
        configurations=tuple(configurations),
        best=tuple(best),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _common(what: str, first: Iterable[Any], second: Iterable[Any], warnings: list[str]) -> list[Any]:
    """Return what both have, in the order of the first; say what only one has."""
    one, two = list(first), list(second)
    for name, own, other in (("before", one, two), ("after", two, one)):
        lone = [f"{x:g}" if isinstance(x, float) else str(x) for x in own if x not in other]
        if lone:
            warnings.append(f"{what} {', '.join(lone)}: only {name}")
    return [x for x in one if x in two]


def _workloads(before: FittedModel, after: FittedModel, warnings: list[str]) -> list[str | None]:
    common: list[str | None] = list(_common("workload", before.layout.workloads, after.layout.workloads, warnings))
    if not common:
        warnings.append("no workload is in both: each is taken with the mixture that it states")
    return common or [None]


def _context(before: FittedModel, after: FittedModel, batch: float, warnings: list[str]) -> int | None:
    first, second = (default_context(m.calibration, batch) for m in (before, after))
    if first == second:
        return first
    warnings.append(f"batch {batch:g}: measured at a context of {first} before and of {second} after")
    return None


def _steps(model: FittedModel, batch: float) -> set[int]:
    """Chains whose speed was measured at a batch."""
    return {s[0] for s in model.measured.speeds if s[1] == 1 and s[3] == batch}


def _configuration(
    before: FittedModel, after: FittedModel, num_steps: int, place: dict[str, Any]
) -> ConfigurationChange:
    def changed(quantity: str) -> Change:
        first, second = (m.interval_of(quantity, num_steps, **place) for m in (before, after))
        return _change(first, second, ratio=True)

    return ConfigurationChange(
        num_steps=num_steps,
        **place,
        tok_s=changed("tok_s"),
        cycle_ms=changed("cycle_ms"),
        acceptance_length=changed("acceptance_length"),
    )


def _terms(before: FittedModel, after: FittedModel) -> tuple[TermChange, ...]:
    """Terms of both that the data of at least one inform; acceptance only up to the longest chain that was measured."""
    second = {term.name: term for term in after.terms}
    pairs = [(term, second[term.name]) for term in before.terms if term.name in second]
    return tuple(
        TermChange(name=a.name, unit=a.unit, change=_change(_values(a), _values(b), ratio=_positive(a, b)))
        for a, b in pairs
        if max(a.informed, b.informed) > _INFORMED and _seen(a.name, before, after)
    )


def _values(term: Term) -> tuple[float, float, float]:
    return term.value, term.low, term.high


def _positive(a: Term, b: Term) -> bool:
    """Whether a term is compared as a ratio: a probability (without a unit) or one of either sign is not."""
    return bool(a.unit) and min(a.low, b.low) > 0.0


def _seen(name: str, before: FittedModel, after: FittedModel) -> bool:
    if not name.startswith("conditional["):
        return True
    workload, _, position = name.removeprefix("conditional[").removesuffix("]").rpartition("][")
    longest = max(m.measured.positions.get(workload, 0) for m in (before, after))
    return int(position) <= (longest or max(before.measured.largest_steps, after.measured.largest_steps))
