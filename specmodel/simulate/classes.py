"""How the acceptance of requests differs: a finite set of curves, from which every request has one.

A workload's curve is what its cycles show together. Requests scatter around it (Beta distributed acceptance, taken at
its Gauss-Jacobi nodes, which give every moment that a cycle needs) and may wander from round to round between two
states. The curves are placed so that together they show the workload's curve again at the step count at which it was
measured: the easy requests finish in fewer cycles, so a cycle is not an average request.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import conditional_from_survival, logit, sigmoid
from specmodel.adaptive import beta_nodes
from specmodel.closed_forms import break_even_acceptance
from specmodel.simulate.randoms import fractions

__all__ = ["AcceptanceClasses", "Lookup", "accepted", "classes_of", "lookup_of"]

Array = NDArray[np.float64]
NODES = 12
"""Nodes of the Beta distribution: exact moments up to order 23."""
BUCKETS_BITS = 12
_SHIFT = np.uint64(64 - BUCKETS_BITS)
_AMBIGUOUS = 128
MOST_ACCEPTED = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceClasses:
    """Curves of a workload: `survival` has shape (ease, states, positions)."""

    survival: Array
    share: Array
    """Share of the requests of each ease, shape (ease,)."""
    persistence: float = 1.0
    """Correlation of the state from one round to the next: with 1 - persistence it is drawn anew, each as likely."""

    @property
    def lengths(self) -> Array:
        """Acceptance length of each ease at every step count 0..positions, shape (ease, positions + 1)."""
        means = self.survival.mean(axis=1)
        return np.concatenate([np.ones((len(means), 1)), 1.0 + np.cumsum(means, axis=1)], axis=1)

    def length(self, num_steps: int) -> float:
        """Tokens a cycle of requests that emit equally many tokens: harmonic over the requests."""
        return float(1.0 / (self.share @ (1.0 / self.lengths[:, num_steps])))


def classes_of(
    survival: ArrayLike,
    measured_steps: int,
    spread: float = 0.0,
    wander: float = 0.0,
    persistence: float = 0.9,
) -> AcceptanceClasses:
    """Classes whose cycles together show a given curve.

    Parameters
    ----------
    survival : array_like, shape (positions,)
        P(at least k drafts accepted) of the workload's cycles.
    measured_steps : int
        Step count at which the curve was measured.
    spread : float
        Intraclass correlation of the acceptance of one draft: the share of its variance that lies between requests,
        ``1 / (a + b + 1)`` of a Beta(a, b); 0 makes all requests alike.
    wander : float
        The same between stretches of one request: two states, equally likely.
    persistence : float
        Correlation of the state from round to round.
    """
    whole = np.clip(np.asarray(survival, dtype=float), 0.0, 1.0)
    steps = min(max(measured_steps, 1), len(whole)) if len(whole) else 0
    if not len(whole) or (spread <= 0.0 and wander <= 0.0):
        return AcceptanceClasses(survival=whole[None, None, :], share=np.ones(1))
    typical = float(break_even_acceptance(1.0 + whole[:steps].sum(), steps))
    typical = min(max(typical, 1e-6), 1.0 - 1e-6)
    shift, share = np.zeros(1), np.ones(1)
    if spread > 0.0:
        total = 1.0 / spread - 1.0
        nodes, share = beta_nodes(typical * total, (1.0 - typical) * total, NODES)
        shift = logit(nodes) - logit(typical)
        share = share / share.sum()
    state = np.zeros(1)
    if wander > 0.0:
        half = np.sqrt(wander * typical * (1.0 - typical))
        state = logit(np.array([typical - half, typical + half])) - logit(typical)
    curves = _placed(whole, steps, shift, share, state)
    return AcceptanceClasses(survival=curves, share=share, persistence=persistence if wander > 0.0 else 1.0)


def _placed(whole: Array, steps: int, shift: Array, share: Array, state: Array) -> Array:
    """Curves shifted in the logit of the conditional acceptance that together show `whole` at `steps` drafts."""
    offset = shift[:, None] + state[None, :]
    wanted = conditional_from_survival(whole)
    by_cycle = share.copy()
    curves = np.zeros((*offset.shape, len(whole)))
    for _ in range(60):
        before = np.ones(offset.shape)
        for k, target in enumerate(whole):
            weight = by_cycle[:, None] * before / len(state)
            if target <= 0.0 or wanted[k] >= 1.0 - 1e-12:
                part = np.full(offset.shape, float(target > 0.0))
            else:
                part = sigmoid(_level(weight, offset, target, float(logit(wanted[k]))) + offset)
            before = before * part
            curves[:, :, k] = before
        lengths = 1.0 + curves[:, :, :steps].mean(axis=1).sum(axis=1)
        fresh = share / lengths
        fresh = fresh / fresh.sum()
        if np.max(np.abs(fresh - by_cycle)) < 1e-13:
            break
        by_cycle = fresh
    return curves


def _level(weight: Array, offset: Array, target: float, start: float) -> float:
    """Level at which the weighted mean of ``sigmoid(level + offset)`` is the target: bisection, it rises."""
    least = float(weight.sum())
    if target >= least:
        return start + 60.0
    low, high = start - 60.0, start + 60.0
    for _ in range(80):
        middle = 0.5 * (low + high)
        if float(np.sum(weight * sigmoid(middle + offset))) < target:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


# -------------------------------------------------------------------------------------------------- in the inner loop
@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Accepted drafts by curve and the leading bits of a random word; ambiguous buckets are compared exactly."""

    table: NDArray[np.uint8]
    """Flat, (curves << BUCKETS_BITS,): the number accepted, or `_AMBIGUOUS` where a survival lies in the bucket."""
    survival: Array
    """Shape (curves, positions)."""


def lookup_of(survival: Array) -> Lookup:
    """Build the table of curves of shape (curves, positions), at most `MOST_ACCEPTED` positions."""
    curves, positions = survival.shape
    if positions > MOST_ACCEPTED:
        raise ValueError(f"at most {MOST_ACCEPTED} positions, got {positions}")
    edges = np.arange((1 << BUCKETS_BITS) + 1) / (1 << BUCKETS_BITS)
    table = np.empty((curves, 1 << BUCKETS_BITS), dtype=np.uint8)
    for i, curve in enumerate(survival):
        # Accepted is the number of k with u < S_k; S falls, so count those above the edge.
        rising = -curve
        at_edge = np.searchsorted(rising, -edges, side="left")  # number of S_k > edge
        low, high = at_edge[1:], at_edge[:-1]
        table[i] = np.where(low == high, low, _AMBIGUOUS)
    return Lookup(table=table.ravel(), survival=np.ascontiguousarray(survival, dtype=float))


def accepted(lookup: Lookup, base: NDArray[np.int64], words: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Accepted drafts of a chain without end, for each word; any shape.

    `base` is the index of the curve, shifted left by `BUCKETS_BITS`.
    """
    index = (words >> _SHIFT).view(np.int64)
    index += base
    count = lookup.table.take(index)
    flat = count.ravel()
    unsure = np.flatnonzero(flat >= _AMBIGUOUS)
    if len(unsure):
        curve = index.ravel()[unsure] >> BUCKETS_BITS
        u = fractions(words.ravel()[unsure])
        flat[unsure] = np.count_nonzero(u[:, None] < lookup.survival[curve], axis=1)
    return count
