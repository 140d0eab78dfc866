"""Closed results under constant acceptance and linear cost: what the numeric model is checked against.

Symbols: `alpha` is the acceptance of every draft, `num_steps` is K, `step_cost` is c, the time of one more step over
that of a plain pass (draft and marginal verify together). A cycle then takes ``1 + c K`` plain passes and emits
``(1 - alpha^(K+1)) / (1 - alpha)`` tokens (`acceptance.constant_acceptance_length`). Functions take arrays that
broadcast unless they say otherwise; a value that does not exist is NaN, one without bound is infinite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import lambertw

from specmodel.acceptance import constant_acceptance_length

__all__ = [
    "RatioOptimum",
    "acceptance_ceiling",
    "amdahl_ceiling",
    "best_steps",
    "break_even_acceptance",
    "broadcast_floats",
    "constant_acceptance_variance",
    "continuous_best_steps",
    "dinkelbach",
    "first_stop",
    "gain_possible",
    "implied_overhead_ms",
    "least_gain",
    "lock_step_length",
    "longest_length",
    "marginals_fall",
    "operation_factor",
    "oracle_tokens",
    "overlap_acceptance",
    "overlap_ceiling",
    "time_per_token_ms",
    "walltime_factor",
]

Array = NDArray[np.float64]


def broadcast_floats(*values: ArrayLike) -> tuple[Array, ...]:
    """Return the values as arrays of one shape."""
    return tuple(np.broadcast_arrays(*[np.asarray(v, dtype=float) for v in values]))


# --------------------------------------------------------------------------------------- one acceptance, linear cost
def overlap_acceptance(target: ArrayLike, draft: ArrayLike, lenience: float = 1.0) -> Array:
    """Return the acceptance of one token: ``sum_x min(p(x) / l, q(x))`` over the last axis.

    ``1 - TV(p, q)`` at lenience 1 (Leviathan et al. 2023, arXiv 2211.17192, theorem 3.5); a lenience below 1 accepts
    more and changes the distribution (appendix A.5).

    Parameters
    ----------
    target, draft : array_like
        Next-token distributions p and q.
    lenience : float
        l within (0, 1].
    """
    p, q = broadcast_floats(target, draft)
    return np.asarray(np.sum(np.minimum(p / lenience, q), axis=-1))


_SHORT = 64
"""Longest chain whose moments are summed term by term."""


def constant_acceptance_variance(alpha: ArrayLike, num_steps: ArrayLike) -> Array:
    """Variance of the tokens a cycle: that of a geometric variable capped at n = K + 1.

    ``[a (1 - a^(2n-1)) - (2n-1) a^n (1-a)] / (1-a)^2``; near a = 1 and for short chains, where that cancels, the sum
    of positive terms of `acceptance.acceptance_variance`.
    """
    a, K = broadcast_floats(alpha, num_steps)
    n, gap = K + 1.0, 1.0 - a
    with np.errstate(divide="ignore", invalid="ignore"):
        closed = (a * (1.0 - a ** (2 * n - 1)) - (2 * n - 1) * a**n * gap) / gap**2
        log_a = np.log(a)
    total, missed = np.zeros(a.shape), np.zeros(a.shape)
    summed = (a > 0.0) & ((gap < 0.01) | (K <= _SHORT))
    rate = np.where(summed, log_a, 0.0)
    for j in range(1, int(np.max(K, where=summed, initial=0.0)) + 1):
        miss = -np.expm1(j * rate)
        total += np.where(j <= K, np.exp(j * rate) * (miss + 2.0 * missed), 0.0)
        missed += miss
    return np.asarray(np.where(summed, total, closed))


def walltime_factor(alpha: ArrayLike, num_steps: ArrayLike, step_cost: ArrayLike) -> Array:
    """Speedup over plain decoding: ``(1 - a^(K+1)) / ((1 - a) (c K + 1))`` (Leviathan et al. 2023, theorem 3.8)."""
    return np.asarray(constant_acceptance_length(alpha, num_steps) / (1.0 + np.multiply(step_cost, num_steps)))


def operation_factor(alpha: ArrayLike, num_steps: ArrayLike, draft_operations: ArrayLike) -> Array:
    """Arithmetic over that of plain decoding: ``(1 - a)(c' K + K + 1) / (1 - a^(K+1))`` (Leviathan, theorem 3.11).

    `draft_operations` is c', the operations of one draft pass over those of one target pass.
    """
    K = np.asarray(num_steps, dtype=float)
    return np.asarray((np.multiply(draft_operations, K) + K + 1.0) / constant_acceptance_length(alpha, K))


def gain_possible(alpha: ArrayLike, step_cost: ArrayLike) -> NDArray[np.bool_]:
    """Whether any step count is faster than plain decoding: acceptance above the cost of a step (corollary 3.9)."""
    return np.asarray(np.greater(alpha, step_cost))


def least_gain(alpha: ArrayLike, step_cost: ArrayLike) -> Array:
    """Speedup of a single step, ``(1 + a) / (1 + c)``; the best is at least that (Leviathan et al., corollary 3.9)."""
    a, c = broadcast_floats(alpha, step_cost)
    return np.asarray((1.0 + a) / (1.0 + c))


def oracle_tokens(alpha: ArrayLike) -> Array:
    """Tokens a cycle when every cycle drafts up to its first rejection and no further: ``1 / (1 - a)``."""
    with np.errstate(divide="ignore"):
        return np.asarray(1.0 / (1.0 - np.asarray(alpha, dtype=float)))


# ------------------------------------------------------------------------------------------------------- break-even
def break_even_acceptance(cycle_ratio: ArrayLike, num_steps: ArrayLike) -> Array:
    """Constant acceptance whose acceptance length equals `cycle_ratio`; the inverse of `constant_acceptance_length`.

    With the cycle time over the plain step time as `cycle_ratio` it is the acceptance needed to break even, since the
    speedup is acceptance length over cycle ratio; with a measured acceptance length it is the acceptance implied.

    Parameters
    ----------
    cycle_ratio : array_like
        A ratio or a length; below 1 every acceptance reaches it (0 is returned), above K + 1 none does (NaN).
    num_steps : array_like
        K; infinity gives the necessary condition ``1 - 1 / r``.
    """
    r, K = broadcast_floats(cycle_ratio, num_steps)
    # 1 + a <= E[N_K] <= 1 / (1 - a) brackets the root; the ends are the answers at K = 1 and K = infinity.
    low = 1.0 - 1.0 / np.maximum(r, 1.0)
    high = np.clip(r - 1.0, low, 1.0)
    finite = np.where(np.isfinite(K), K, 0.0)
    for _ in range(60):
        middle = 0.5 * (low + high)
        short = constant_acceptance_length(middle, finite) < r
        low, high = np.where(short, middle, low), np.where(short, high, middle)
    root = np.where(np.isfinite(K), 0.5 * (low + high), 1.0 - 1.0 / np.maximum(r, 1.0))
    return np.asarray(np.where(r > K + 1.0, np.nan, np.where(r <= 1.0, 0.0, root)))


def time_per_token_ms(draft_ms: ArrayLike, verify_ms: ArrayLike, overhead_ms: ArrayLike, length: ArrayLike) -> Array:
    """Time of one token of one sequence, ms: the cycle over its acceptance length (MagicDec, arXiv 2408.11049)."""
    draft, verify, overhead, tokens = broadcast_floats(draft_ms, verify_ms, overhead_ms, length)
    return np.asarray((draft + verify + overhead) / tokens)


def implied_overhead_ms(time_ms: ArrayLike, draft_ms: ArrayLike, verify_ms: ArrayLike, length: ArrayLike) -> Array:
    """Return what a measured time per token leaves for neither draft nor verify, ms a cycle.

    Below 0 the measured parts contradict the time per token.
    """
    total, draft, verify, tokens = broadcast_floats(time_ms, draft_ms, verify_ms, length)
    return np.asarray(total * tokens - draft - verify)


# ------------------------------------------------------------------------------------------------------- optimal K
def _excess(b: Array) -> Array:
    """Return the root t >= 0 of ``t - ln(1 + t) = b``, accurate for every b >= 0.

    It is ``-1 - W_{-1}(-exp(-1 - b))`` (Corless et al. 1996, On the Lambert W function). The argument of W underflows
    for large b and loses its digits near the branch point; there a fixed point and a series in sqrt(2 b) take over.
    """
    s = np.sqrt(2.0 * np.minimum(b, 1.0))
    series = s * (1.0 + s * (1.0 / 3 + s * (1.0 / 36 + s * (-1.0 / 270 + s / 4320))))
    far = b
    for _ in range(8):
        far = b + np.log1p(far)
    middle = np.clip(b, 1e-4, 600.0)
    t = -1.0 - np.real(lambertw(-np.exp(-1.0 - middle), -1))
    t = t - (t - np.log1p(t) - middle) * (1.0 + t) / t
    return np.asarray(np.where(b < 1e-4, series, np.where(b > 600.0, far, t)))


def continuous_best_steps(alpha: ArrayLike, step_cost: ArrayLike) -> tuple[Array, Array]:
    """Real K that maximises `walltime_factor`, and the speedup there.

    With ``L = -ln a`` and ``y = -W_{-1}(-exp(-1 - L (1-c) / c))``: ``K = (y - 1) / L - 1 / c = ln y / L - 1`` and the
    speedup is ``L / (c (1-a) y)``. Where no positive K helps it is 0, where every step pays it is infinite.

    Returns
    -------
    steps, speedup : numpy.ndarray
    """
    a, c = broadcast_floats(alpha, step_cost)
    free = c < 1e-300  # below, 1 / c has no value
    inside = (a > 0.0) & (a < 1.0) & ~free & (c < 1.0)
    a_, c_ = np.where(inside, a, 0.5), np.where(inside, c, 0.5)
    log_a = -np.log(a_)
    t = _excess(log_a * (1.0 - c_) / c_)
    steps = np.log1p(t) / log_a - 1.0
    speedup = log_a / ((1.0 - a_) * (c_ + c_ * t))
    helps = inside & (steps > 0.0)
    with np.errstate(divide="ignore"):
        limit = np.where(free, 1.0 / (1.0 - a), 1.0 / np.where(free, 1.0, c))  # of an endless chain
    endless = (a > 0.0) & (c < 1.0) & ((a >= 1.0) | free)
    return (
        np.asarray(np.where(endless, np.inf, np.where(helps, steps, 0.0))),
        np.asarray(np.where(endless, limit, np.where(helps, speedup, 1.0))),
    )


def best_steps(alpha: ArrayLike, step_cost: ArrayLike) -> tuple[Array, Array]:
    """Whole K that maximises `walltime_factor`, and the speedup there; 0 and 1 where plain decoding is best.

    The factor is quasi-concave in K (concave tokens over linear cost), so the better neighbour of the real optimum is
    the optimum; the fewer steps where both are equal.
    """
    a, c = broadcast_floats(alpha, step_cost)
    steps, limit = continuous_best_steps(a, c)
    finite = np.isfinite(steps)
    below = np.floor(np.where(finite, steps, 0.0))
    fewer, more = walltime_factor(a, below, c), walltime_factor(a, below + 1.0, c)
    best = np.where(more > fewer, below + 1.0, below)
    return np.where(finite, best, steps), np.where(finite, np.maximum(fewer, more), limit)


def marginals_fall(lengths: ArrayLike, cycle_ms: ArrayLike) -> bool:
    """Whether ``(E[N_K] - E[N_{K-1}]) / (C_K - C_{K-1})`` never rises: then tok/s has one peak and the first is it.

    Sufficient: survival falls (always) and the cycle time is convex in K. Kernel and graph steps break it.

    Parameters
    ----------
    lengths, cycle_ms : array_like
        E[N_K] and the cycle time for K = 0, 1, ..., the time increasing.
    """
    tokens, rises = np.asarray(lengths, dtype=float), np.diff(np.asarray(cycle_ms, dtype=float))
    rounding = 1e-12 * np.max(tokens) / np.min(rises, initial=np.inf)
    return bool(np.all(np.diff(np.diff(tokens) / rises) <= rounding))


def first_stop(lengths: ArrayLike, cycle_ms: ArrayLike) -> int:
    """First K after which a step more no longer pays: its gain over its cost is below the ratio reached so far.

    The mediant makes that ``R_{K+1} < R_K``. It is the best K where `marginals_fall`; where not, a later peak may be
    higher and only a scan finds it. Arguments as in `marginals_fall`.
    """
    ratio = np.asarray(lengths, dtype=float) / np.asarray(cycle_ms, dtype=float)
    falls = np.flatnonzero(np.diff(ratio) < 0.0)
    return int(falls[0]) if len(falls) else len(ratio) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioOptimum:
    """The member of a finite set with the largest ratio, and how the iteration reached it."""

    index: int
    ratio: float
    path: tuple[int, ...]
    """Maximisers of ``gain - ratio * cost`` in turn; the last is no better than the one before."""


def dinkelbach(gain: ArrayLike, cost: ArrayLike, start: float = 0.0) -> RatioOptimum:
    """Largest ``gain / cost`` of a finite set, without forming all ratios (Dinkelbach 1967, Management Science 13).

    From a ratio r the member that maximises ``gain - r * cost`` has a larger ratio or r is the optimum; the steps
    grow superlinearly. Decisions that add up (steps of each request, nodes of a tree) are then separable at common r.

    Parameters
    ----------
    gain, cost : array_like, one dimension
        Numerator and positive denominator of each member.
    start : float
        First ratio; at most the optimum for the iteration to rise at once, any number for it to end there.
    """
    a, c = np.asarray(gain, dtype=float), np.asarray(cost, dtype=float)
    best = int(np.argmax(a - start * c))
    path = [best]
    while True:
        ratio = float(a[best] / c[best])
        candidate = int(np.argmax(a - ratio * c))
        path.append(candidate)
        if a[candidate] / c[candidate] <= ratio:
            return RatioOptimum(index=best, ratio=ratio, path=tuple(path))
        best = candidate


# ------------------------------------------------------------------------------------------------------- batch
def lock_step_length(alpha: ArrayLike, num_steps: ArrayLike, batch: ArrayLike) -> Array:
    """Return the acceptance length when a batch advances by its shortest sequence: acceptance a^B instead of a.

    Batches whose sequences keep their own lengths have no such loss (BASS, arXiv 2404.15778).
    """
    a, K, B = broadcast_floats(alpha, num_steps, batch)
    return constant_acceptance_length(a**B, K)


def longest_length(survival: ArrayLike, batch: ArrayLike) -> Array:
    """Return the expected largest number of tokens among B independent sequences, over the last axis.

    ``1 + sum_k (1 - (1 - S_k)^B)``: what buffers, and the draft pass that extends over accepted tokens, must hold.
    """
    s = np.asarray(survival, dtype=float)
    B = np.asarray(batch, dtype=float)[..., None]
    return np.asarray(1.0 + np.sum(1.0 - (1.0 - s) ** B, axis=-1))


# ------------------------------------------------------------------------------------------------------- ceilings
def amdahl_ceiling(share: ArrayLike) -> Array:
    """Largest gain from a part of the cycle that takes `share` of it, at fixed K: ``1 / (1 - share)`` (Amdahl 1967).

    With K chosen again the gain can be larger: see `best_steps` at the lower step cost.
    """
    with np.errstate(divide="ignore"):
        return np.asarray(1.0 / (1.0 - np.asarray(share, dtype=float)))


def acceptance_ceiling(length: ArrayLike, num_steps: ArrayLike) -> Array:
    """Largest gain from better acceptance at fixed K: ``(K + 1) / E[N]``."""
    tokens, K = broadcast_floats(length, num_steps)
    return np.asarray((K + 1.0) / tokens)


def overlap_ceiling(draft_ms: ArrayLike, verify_ms: ArrayLike) -> Array:
    """Largest gain from drafting while verifying: ``1 + min(D, V) / max(D, V)`` (PEARL, arXiv 2408.11850).

    The cycle is then ``max(D, V)`` and overhead, so the gain is below 2.
    """
    draft, verify = broadcast_floats(draft_ms, verify_ms)
    return np.asarray(1.0 + np.minimum(draft, verify) / np.maximum(draft, verify))
