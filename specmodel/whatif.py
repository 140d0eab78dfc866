"""What if: the same deployment with something changed, before and after, the decision made again.

The changes act on joint draws of the posterior, so what a change brings is known as well as it can be: its interval is
that of the ratio, not of the difference of two uncertain speeds. Nothing here was measured: a changed quantity is a
supposition, and only what surrounds it comes from the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specmodel.changes import TARGETS, Axis, Change, changes_of, parse_axis
from specmodel.errors import UsageError
from specmodel.model import FittedModel
from specmodel.optimum import Candidate
from specmodel.shapes import Trees
from specmodel.situations import (
    Gain,
    Outcome,
    Situation,
    chosen,
    gain_of,
    kept_of,
    moved,
    outcome_of,
    ratios_of,
    reference_of,
    situation,
)
from specmodel.suppose import changed, thinned

__all__ = ["Cell", "Gain", "Outcome", "Situation", "Sweep", "WhatIf", "situation", "suppose", "sweep", "whatif"]

THIN = 4
"""A cell of a sweep looks at every fourth draw."""
MOST_CELLS = 625


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Before and after."""

    changes: tuple[Change, ...]
    before: Outcome
    after: Outcome
    gain: Gain
    """The best after over the best before, steps and setting chosen again."""
    kept: Candidate | None
    """The best before, as it would be after: the same steps and setting. None where it is no candidate any more."""
    kept_gain: Gain | None
    warnings: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """Throughput after over that before."""
        return self.gain.speedup

    @property
    def interval(self) -> tuple[float, float]:
        """90 % interval of `speedup`."""
        return self.gain.interval

    @property
    def bound(self) -> Literal["", "at most", "at worst"]:
        """What the gain is where a change is followed as far as it could go; empty where it is expected."""
        factor = math.prod(c.of(1.0) for c in self.changes if TARGETS[c.target].bound)
        return "at most" if factor > 1.0 else "at worst" if factor < 1.0 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of a sweep."""

    values: tuple[float, ...]
    best: Candidate
    speculative: Candidate | None
    """The fastest that drafts: its speedup is below 1 where plain decoding is better."""
    plain_tok_s: float
    gain: Gain
    """Over the best before any change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Suppositions over one or two axes; cells in the order of the values, the last axis fastest."""

    changes: tuple[Change, ...]
    axes: tuple[Axis, ...]
    before: Outcome
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...]


def whatif(
    model: FittedModel,
    changes: Sequence[Change | str] | Change | str,
    *,
    batch: float | None = None,
    comm: str | Sequence[str] | None = None,
    max_steps: int | None = None,
    workload: str | Mapping[str, float] | None = None,
    context_tokens: int | None = None,
    trees: Trees = (),
) -> WhatIf:
    """What would be best, and how fast, if something were different.

    Changes of a place (batch, context_tokens, comm, num_steps) say where; the others act in the order in which they
    are given. Verify, draft, overhead and acceptance are those of speculative cycles: plain decoding stays as it is.
    Bandwidth, compute and all-reduce belong to the machine: plain decoding changes with them.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    changes : sequence of str or Change, or one
        As `parse_change` reads them: ``"verify*=0.73"``, ``"draft=0"``, ``"acceptance+=0.1"``, ``"batch=32"``.
    batch, comm, max_steps, workload, context_tokens, trees
        As in `optimize`: where the question is asked, before any change.

    Returns
    -------
    WhatIf

    Raises
    ------
    UsageError
        For a change that means nothing, and as `optimize`.
    """
    checked = changes_of(changes)
    here = situation(
        model,
        batch=batch,
        comm=comm,
        max_steps=max_steps,
        workload=workload,
        context_tokens=context_tokens,
        trees=trees,
    )
    return suppose(here, checked)


def suppose(before: Situation, changes: Sequence[Change | str] | Change | str, every: int = 1) -> WhatIf:
    """`whatif` from a situation that is at hand, by every `every`-th of its draws; errors as there."""
    return _supposed(before, changes_of(changes), {}, every)


def sweep(
    model: FittedModel,
    axes: Sequence[Axis | str] | Axis | str,
    changes: Sequence[Change | str] | Change | str = (),
    **place: Any,
) -> Sweep:
    """`whatif` for every value of one axis, or every pair of two: the last axis runs fastest.

    Parameters
    ----------
    model : FittedModel
    axes : one or two of str or Axis
        As `parse_axis` reads them: ``"acceptance+=-0.1:0.2:0.05"``, ``"batch=1,2,4,8"``.
    changes : sequence of str or Change
        What is changed besides, first.
    **place
        Keyword arguments of `whatif`.

    Raises
    ------
    UsageError
        As `whatif`; for other than one or two axes, for the same axis twice, and for too many cells.
    """
    given = (axes,) if isinstance(axes, str | Axis) else tuple(axes)
    read = tuple(parse_axis(a) if isinstance(a, str) else a for a in given)
    if not 1 <= len(read) <= 2:
        raise UsageError(f"a sweep has one or two axes, got {len(read)}")
    fixed = changes_of(changes)
    # Together they must be as good as the changes of one supposition.
    changes_of((*fixed, *(a.change(a.values[0]) for a in read)))
    if len(read) == 2 and read[0].target == read[1].target:
        raise UsageError(f"both axes change {read[0].target}; sweep two different quantities")
    points: list[tuple[float, ...]] = [(v,) for v in read[0].values]
    if len(read) == 2:
        points = [(v, w) for v in read[0].values for w in read[1].values]
    if len(points) > MOST_CELLS:
        raise UsageError(f"the sweep has {len(points)} points; at most {MOST_CELLS}, take larger steps")
    before = situation(model, **place)
    cache: dict[tuple[Any, ...], Situation] = {}
    cells, warnings = [], dict[str, None]()
    for point in points:
        all_changes = (*fixed, *(a.change(v) for a, v in zip(read, point, strict=True)))
        result = _supposed(before, all_changes, cache, THIN)
        cells.append(
            Cell(
                values=point,
                best=result.after.best,
                speculative=result.after.speculative,
                plain_tok_s=result.after.plain_tok_s,
                gain=result.gain,
            )
        )
        warnings |= dict.fromkeys(result.warnings)
    return Sweep(changes=fixed, axes=read, before=outcome_of(before), cells=tuple(cells), warnings=tuple(warnings))


# ------------------------------------------------------------------------------------------------------- one answer
def _supposed(
    before: Situation, changes: tuple[Change, ...], cache: dict[tuple[Any, ...], Situation], every: int
) -> WhatIf:
    there, steps = moved(before, changes, cache)
    now = before.optimum.best
    kept = there.index(kept_of(now, changes, steps))
    reference = reference_of(there, kept)
    of = there.of if every == 1 else thinned(there.of, every)
    drawn_after = changed(of, changes, reference)
    notes: list[str] = []
    middle = changed(there.middle, changes, reference, notes)
    after = chosen(there, of, drawn_after, middle, steps)
    best = there.index(after.best)
    targets = [i for i in (best, kept) if i is not None]
    ratios = ratios_of(before, there, changes, reference, targets, of, drawn_after)
    gains = [gain_of(after.table[i].tok_s / now.tok_s, ratio) for i, ratio in zip(targets, ratios, strict=True)]
    warnings = dict.fromkeys((*before.optimum.warnings, *there.optimum.warnings, *_of_contexts(before, there), *notes))
    warnings |= dict.fromkeys(_end_of_chains(there, after.best, steps))
    return WhatIf(
        changes=changes,
        before=outcome_of(before),
        after=after,
        gain=gains[0],
        kept=None if kept is None else after.table[kept],
        kept_gain=None if kept is None else gains[1],
        warnings=tuple(warnings),
    )


def _end_of_chains(there: Situation, best: Candidate, steps: int | None) -> list[str]:
    """Say where the best is the longest chain that was looked at."""
    longest = max((c.num_steps for c in there.optimum.table if c.topk == 1), default=0)
    if steps is None and best.topk == 1 and best.num_steps == longest > 0:
        return [
            f"the best is the longest chain looked at, {longest} steps: a longer one may be better still (max_steps)"
        ]
    return []


def _of_contexts(before: Situation, there: Situation) -> list[str]:
    """Say where a change of the place changes the context too, or not at all."""
    asked = there.call["context_tokens"]
    if asked is None and before.context_tokens != there.context_tokens:
        return [
            f"the context is {_context(before)} at batch {before.optimum.batch:g} and {_context(there)} at batch "
            f"{there.optimum.batch:g}, as measured there: set context_tokens to compare alike"
        ]
    if there is not before and asked != before.call["context_tokens"] and not before.model.measured.contexts:
        return ["the file states no context, so context_tokens changes nothing"]
    return []


def _context(of: Situation) -> str:
    return "not stated" if of.context_tokens is None else f"{of.context_tokens:,} tokens"
