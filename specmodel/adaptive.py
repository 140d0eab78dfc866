"""The value of drafting a length that adapts: the oracle, stopping by confidence, and a length for every request.

Constant step cost c (`step_cost`, in plain passes) as in `closed_forms`; speedups are over plain decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh_tridiagonal

from specmodel.closed_forms import best_steps, broadcast_floats, walltime_factor

__all__ = [
    "RequestAdaptation",
    "Stopping",
    "beta_nodes",
    "beta_request_adaptation",
    "oracle_gain",
    "oracle_speedup",
    "request_adaptation",
    "stop_by_confidence",
    "stop_by_threshold",
]

Array = NDArray[np.float64]


def oracle_speedup(alpha: ArrayLike, step_cost: ArrayLike) -> Array:
    """Speedup when every cycle drafts exactly the prefix that will be accepted: ``1 / (1 - a (1 - c))``.

    ``1 / (1 - a)`` tokens a cycle that costs ``1 + c a / (1 - a)``: the ceiling of every adaptive length.
    """
    a, c = broadcast_floats(alpha, step_cost)
    with np.errstate(divide="ignore"):
        return np.asarray(1.0 / (1.0 - a * (1.0 - c)))


def oracle_gain(alpha: ArrayLike, step_cost: ArrayLike) -> Array:
    """Speedup of the oracle over that of the best fixed K, less 1 (0 where both are plain decoding)."""
    _, fixed = best_steps(alpha, step_cost)
    return np.asarray(oracle_speedup(alpha, step_cost) / fixed - 1.0)


# --------------------------------------------------------------------------------------------- stopping by confidence
@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """A rule that drafts on while the survival of the draft so far is at least `threshold`."""

    threshold: float
    length: float
    """Expected tokens a cycle, the bonus token included."""
    mean_draft_tokens: float
    speedup: float


def stop_by_threshold(
    confidence: ArrayLike, probability: ArrayLike, step_cost: float, threshold: float, max_steps: int = 64
) -> Stopping:
    """Return what drafting brings that goes on while the survival of what is drafted is at least `threshold`.

    A drafted token shows a confidence, its conditional acceptance, which is `confidence[i]` with `probability[i]`,
    independently of the others; the survival of a draft is the product of its confidences.

    Parameters
    ----------
    confidence, probability : array_like, shape (types,)
        Within [0, 1]; the probabilities add up to 1.
    step_cost : float
        c.
    threshold : float
        Above 1 nothing is drafted, at 0 always `max_steps`.
    max_steps : int
        Longest draft.
    """
    q, w = np.asarray(confidence, dtype=float), np.asarray(probability, dtype=float)
    survival, weight = np.ones(1), np.ones(1)
    length, drafted = 1.0, 0.0
    for _ in range(max_steps):
        on = survival >= threshold
        if not np.any(on):
            break
        survival, weight = survival[on], weight[on]
        drafted += float(weight.sum())
        # The order of the confidences does not matter: equal products, up to rounding, are one state.
        products = np.round(np.outer(survival, q).ravel(), 14)
        survival, state = np.unique(products, return_inverse=True)
        weight = np.asarray(np.bincount(state, weights=np.outer(weight, w).ravel()), dtype=float)
        length += float(weight @ survival)
    return Stopping(
        threshold=threshold, length=length, mean_draft_tokens=drafted, speedup=length / (1.0 + step_cost * drafted)
    )


def stop_by_confidence(
    confidence: ArrayLike, probability: ArrayLike, step_cost: float, max_steps: int = 64
) -> Stopping:
    """Return the optimal rule: draft on while ``survival * E[confidence] >= speedup * c``.

    Looking one step ahead is optimal, since survival only falls (the monotone case of Chow, Robbins and Siegmund
    1971, Great Expectations, section 3.5); the speedup it refers to is its own, found by Dinkelbach's iteration.
    SpecDec++ (arXiv 2405.19715) proves the same form. Parameters as in `stop_by_threshold`.
    """
    mean = float(np.dot(np.asarray(confidence, dtype=float), np.asarray(probability, dtype=float)))
    best = stop_by_threshold(confidence, probability, step_cost, np.inf, max_steps)
    while mean > 0.0:
        better = stop_by_threshold(confidence, probability, step_cost, best.speedup * step_cost / mean, max_steps)
        if better.speedup <= best.speedup:
            break
        best = better
    return best


# ------------------------------------------------------------------------------------------------ one K for a request
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestAdaptation:
    """Speedups over requests that emit equally many tokens: one K for all, and the best K for each."""

    num_steps: int
    """Best K for all together."""
    fixed: float
    adaptive: float

    @property
    def gain(self) -> float:
        """Gain of the adaptive length over the fixed one."""
        return self.adaptive / self.fixed - 1.0


def request_adaptation(alpha: ArrayLike, share: ArrayLike, step_cost: float, max_steps: int = 256) -> RequestAdaptation:
    """Value of choosing K for each request when its acceptance is known.

    Requests emit equally many tokens, so times add up and speedups pool harmonically.

    Parameters
    ----------
    alpha, share : array_like, shape (requests,)
        Acceptance of each kind of request and its share of the tokens.
    step_cost : float
        c, above 0.
    max_steps : int
        Longest draft considered.
    """
    a, w = np.asarray(alpha, dtype=float), np.asarray(share, dtype=float)
    w = w / w.sum()
    times = 1.0 / walltime_factor(a[:, None], np.arange(max_steps + 1)[None, :], step_cost)
    fixed = w @ times
    best = int(np.argmin(fixed))
    return RequestAdaptation(
        num_steps=best, fixed=float(1.0 / fixed[best]), adaptive=float(1.0 / (w @ times.min(axis=1)))
    )


def beta_nodes(a: float, b: float, order: int = 200) -> tuple[Array, Array]:
    """Gauss-Jacobi nodes and weights of the Beta(a, b) distribution, increasing, the weights adding up to 1.

    Golub and Welsch 1969 (Mathematics of Computation 23): eigenvalues of the Jacobi matrix and the squares of the
    first components of its eigenvectors, which no size of a and b overflows.
    """
    n = np.arange(1.0, order)
    total = 2.0 * n + a + b - 2.0
    middle = (a - b) * (a + b - 2.0) / (total * (total + 2.0))
    side = n[1:] * (n[1:] + a - 1.0) * (n[1:] + b - 1.0) * (n[1:] + a + b - 2.0)
    side = side / (total[1:] ** 2 * (total[1:] + 1.0) * (total[1:] - 1.0))
    diagonal = np.append((a - b) / (a + b), middle)
    off = 2.0 * np.sqrt(np.append(a * b / ((a + b) ** 2 * (a + b + 1.0)), side))
    x, vectors = eigh_tridiagonal(diagonal, off)
    return np.asarray((1.0 + x) / 2.0), np.asarray(vectors[0] ** 2)


def beta_request_adaptation(a: float, b: float, step_cost: float, max_steps: int = 256) -> RequestAdaptation:
    """`request_adaptation` where the acceptance of a request is Beta(a, b) distributed."""
    return request_adaptation(*beta_nodes(a, b), step_cost, max_steps)
