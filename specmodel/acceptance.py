"""Acceptance: survival curves, expected tokens, trees, estimation from counts, and the prior of a drafter's kind.

Notation: ``conditional[k-1]`` = P(draft k accepted | drafts 1..k-1 accepted), ``survival[k-1]`` = P(at least k
accepted) = product of the conditionals, acceptance length = E[N] = 1 + sum of survivals (the bonus token included).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "MOST_TREE_TOKENS",
    "AcceptancePrior",
    "SurvivalEstimate",
    "Tree",
    "acceptance_length",
    "acceptance_lengths",
    "acceptance_variance",
    "best_tree",
    "conditional_from_survival",
    "constant_acceptance_length",
    "cycles_for_tokens",
    "design_effect",
    "grow_tree",
    "harmonic_mean",
    "kaplan_meier",
    "log_length_gradient",
    "logit",
    "mean_drafts",
    "mixture_length",
    "monotone",
    "prior_of",
    "reach_of",
    "sigmoid",
    "survival_from_conditional",
]

Array = NDArray[np.float64]
MOST_TREE_TOKENS = 4096
"""Larger trees are cut: no engine verifies more tokens a sequence, and the rest would add next to nothing."""


def logit(p: ArrayLike) -> Array:
    """Log odds of a probability, elementwise; 0 and 1 are moved in by 1e-9."""
    q = np.clip(np.asarray(p, dtype=float), 1e-9, 1.0 - 1e-9)
    return np.asarray(np.log(q) - np.log1p(-q))


def sigmoid(x: ArrayLike) -> Array:
    """Inverse of `logit`, elementwise."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * np.asarray(x, dtype=float))))


def survival_from_conditional(conditional: ArrayLike) -> Array:
    """Survival curve of conditional acceptances along the last axis: the running product."""
    return np.asarray(np.cumprod(np.asarray(conditional, dtype=float), axis=-1))


def conditional_from_survival(survival: ArrayLike) -> Array:
    """Conditional acceptances of a survival curve along the last axis; 0 where nothing survives."""
    s = np.asarray(survival, dtype=float)
    before = np.concatenate([np.ones_like(s[..., :1]), s[..., :-1]], axis=-1)
    return np.asarray(np.divide(s, before, out=np.zeros_like(s), where=before > 0))


def acceptance_length(survival: ArrayLike) -> Array:
    """Expected tokens a cycle, bonus included: ``1 + sum(survival)`` over the last axis."""
    return np.asarray(1.0 + np.sum(np.asarray(survival, dtype=float), axis=-1))


def acceptance_lengths(conditional: ArrayLike) -> Array:
    """Expected tokens for every step count 0..K at once, last axis K+1 long."""
    s = survival_from_conditional(conditional)
    return np.concatenate([np.ones_like(s[..., :1]), 1.0 + np.cumsum(s, axis=-1)], axis=-1)


def acceptance_variance(survival: ArrayLike) -> Array:
    """Variance of the tokens a cycle: ``sum (2k+1) S_k - E[N]^2`` with S_0 = 1, over the last axis.

    Written as ``sum_j S_j ((1 - S_j) + 2 sum_{i<j} (1 - S_i))``, the same without a difference of large numbers.
    """
    s = np.asarray(survival, dtype=float)
    missed = 1.0 - s
    return np.asarray(np.sum(s * (2.0 * np.cumsum(missed, axis=-1) - missed), axis=-1))


def constant_acceptance_length(alpha: ArrayLike, num_steps: ArrayLike) -> Array:
    """E[N] for one acceptance rate at every position: ``(1 - a^(K+1)) / (1 - a)`` (Leviathan 2023, equation 1)."""
    a, K = np.broadcast_arrays(np.asarray(alpha, dtype=float), np.asarray(num_steps, dtype=float))
    gap = 1.0 - a
    with np.errstate(divide="ignore", invalid="ignore"):
        value = -np.expm1((K + 1) * np.log(a)) / gap
    return np.asarray(np.where(gap < 1e-12, K + 1, np.where(a <= 0, 1.0, value)))


def cycles_for_tokens(num_tokens: float, mean: float, variance: float) -> float:
    """Expected cycles to emit `num_tokens`, the overshoot of the last cycle included.

    ``(L + (v + m^2 - m) / (2 m)) / m``: renewal theory for a lattice step of mean m and variance v (Lorden).
    """
    return (num_tokens + (variance + mean * mean - mean) / (2.0 * mean)) / mean


def harmonic_mean(values: ArrayLike, weights: ArrayLike | None = None) -> float:
    """Weighted harmonic mean: the acceptance length of prompts of equal length taken together."""
    v = np.asarray(values, dtype=float)
    w = np.ones_like(v) if weights is None else np.asarray(weights, dtype=float)
    return float(np.sum(w) / np.sum(w / v))


def mixture_length(lengths: ArrayLike, shares: ArrayLike) -> Array:
    """Acceptance length of a mixture by share of tokens (harmonic), over the first axis."""
    w = np.asarray(shares, dtype=float)
    return np.asarray(1.0 / np.tensordot(w / np.sum(w), 1.0 / np.asarray(lengths, dtype=float), axes=(0, 0)))


def design_effect(drafts: float, prompts: float, intraclass_correlation: float = 0.05) -> float:
    """Variance inflation of counts that come from few prompts: ``1 + (m - 1) ICC`` (Kish), m drafts a prompt."""
    return 1.0 + max(drafts / prompts - 1.0, 0.0) * intraclass_correlation


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalEstimate:
    """Product-limit estimate of a survival curve from counts of accepted drafts."""

    conditional: Array
    survival: Array
    survival_sd: Array
    length: float
    length_sd: float


def kaplan_meier(histogram: ArrayLike) -> SurvivalEstimate:
    """Survival of a chain from a histogram of accepted counts, ``histogram[j]`` cycles that accepted j of K drafts.

    Kaplan and Meier's product-limit estimate with Greenwood's variance; with one cap, as here, it equals the
    binomial ``S (1 - S) / n``.
    """
    h = np.asarray(histogram, dtype=float)
    at_least = np.cumsum(h[::-1])[::-1]
    cycles = at_least[0]
    conditional = np.divide(at_least[1:], at_least[:-1], out=np.zeros(len(h) - 1), where=at_least[:-1] > 0)
    survival = at_least[1:] / cycles
    covariance = np.minimum.outer(survival, survival) - np.outer(survival, survival)
    return SurvivalEstimate(
        conditional=conditional,
        survival=survival,
        survival_sd=np.sqrt(np.maximum(survival * (1.0 - survival), 0.0) / cycles),
        length=float(acceptance_length(survival)),
        length_sd=float(np.sqrt(np.sum(covariance) / cycles)),
    )


def monotone(values: ArrayLike, weights: ArrayLike | None = None) -> Array:
    """Non-increasing least-squares fit by pooling adjacent violators (Barlow et al. 1972)."""
    v = [float(x) for x in np.asarray(values, dtype=float)]
    w = [1.0] * len(v) if weights is None else [float(x) for x in np.asarray(weights, dtype=float)]
    blocks: list[list[float]] = []
    for value, weight in zip(v, w, strict=True):
        blocks.append([value, weight, 1.0])
        while len(blocks) > 1 and blocks[-1][0] > blocks[-2][0]:
            last, prior = blocks.pop(), blocks.pop()
            total = last[1] + prior[1]
            blocks.append([(last[0] * last[1] + prior[0] * prior[1]) / total, total, last[2] + prior[2]])
    return np.concatenate([np.full(int(count), value) for value, _, count in blocks])


# ------------------------------------------------------------------------------------------------------------- trees
@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The best tree within given limits: its nodes (depth, rank, path probability), best first, and its gradient."""

    nodes: tuple[tuple[int, int, float], ...]
    paths: tuple[tuple[int, ...], ...]
    """Ranks from the root to each node."""
    length: float
    """Expected tokens a cycle: 1 for the root and the path probability of every node."""
    by_log_first: Array
    """Derivative of `length` by the logarithm of the first-rank acceptance at each depth."""
    by_log_ratio: float
    """Derivative of `length` by the logarithm of the rank ratio."""


def best_tree(
    conditional: ArrayLike,
    rank_ratio: float,
    num_steps: int,
    topk: int,
    num_draft_tokens: int,
    paths: Sequence[tuple[int, ...]] | None = None,
) -> Tree:
    """The tree of largest expected length within SGLang's limits.

    A child of rank r (from 0) is the accepted one with probability ``conditional[depth] * rank_ratio**r``, or what the
    ranks before it leave to certainty where that is less. The path probabilities fall along edges
    and from sibling to sibling, so taking the largest first gives a valid tree and the optimum (equal to the dynamic
    programme of Sequoia, arXiv 2402.12374, proposition 3.4).

    Parameters
    ----------
    conditional : array_like
        Acceptance of the first candidate by depth, at least `num_steps` long.
    rank_ratio : float
        Acceptance of one rank over that of the rank before, within (0, 1).
    num_steps, topk, num_draft_tokens : int
        As SGLang defines them: depth, width a node, and nodes with the root counted.
    paths : sequence of tuple of int, optional
        The nodes of this tree instead of the best ones (as `Tree.paths` gives them): its length is then smooth in the
        acceptance, where that of the best tree has a kink at every change of nodes.
    """
    num_draft_tokens = min(num_draft_tokens, MOST_TREE_TOKENS)
    topk = min(topk, max(num_draft_tokens - 1, 1))
    asked = min(num_steps, len(np.asarray(conditional)))
    first = np.asarray(conditional, dtype=float)[: min(num_steps, num_draft_tokens)]
    raw = np.outer(first, rank_ratio ** np.arange(topk, dtype=float))
    before = np.cumsum(raw, axis=1) - raw
    table = np.minimum(raw, np.maximum(1.0 - before, 0.0))
    # Derivatives of ln p by ln first and by ln ratio; a rank that takes what is left loses what those before it gain.
    last = (table < raw) & (table > 0.0)
    share = 1.0 / np.where(last, table, 1.0)
    rank = np.arange(topk, dtype=float)
    d_first = np.where(last, -before * share, 1.0)
    d_ratio = np.where(last, -(np.cumsum(raw * rank, axis=1) - raw * rank) * share, rank)
    if paths is None:
        nodes = grow_tree(table, num_draft_tokens)
    else:
        nodes = [(path, float(np.prod([table[depth, r] for depth, r in enumerate(path)]))) for path in paths]
    by_first, by_ratio, length = np.zeros(asked), 0.0, 1.0  # no node lies deeper than there are tokens
    for path, value in nodes:
        length += value
        for depth, r in enumerate(path):
            by_first[depth] += value * d_first[depth, r]
            by_ratio += value * float(d_ratio[depth, r])
    return Tree(
        nodes=tuple((len(path), path[-1], value) for path, value in nodes),
        paths=tuple(path for path, _ in nodes),
        length=length,
        by_log_first=by_first,
        by_log_ratio=by_ratio,
    )


def grow_tree(probability: Array, num_tokens: int) -> list[tuple[tuple[int, ...], float]]:
    """Best-first growth of a tree of `num_tokens` nodes, the root counted.

    Parameters
    ----------
    probability : numpy.ndarray, shape (depths, ranks)
        Acceptance of a child by the depth of its parent and its rank, non-increasing in the rank.
    num_tokens : int
        Verified tokens: the root and ``num_tokens - 1`` nodes.

    Returns
    -------
    list of (path, path probability), best first
        A path is the ranks from the root down.
    """
    depths, width = probability.shape
    nodes: list[tuple[tuple[int, ...], float]] = []
    # An entry is the best sibling not yet taken under one parent: value, tie-break, path, probability of the parent.
    heap: list[tuple[float, int, tuple[int, ...], float]] = []
    order = 0

    def push(path: tuple[int, ...], parent: float) -> None:
        nonlocal order
        order += 1
        heapq.heappush(heap, (-parent * float(probability[len(path) - 1, path[-1]]), order, path, parent))

    if depths and width:
        push((0,), 1.0)
    while heap and len(nodes) < num_tokens - 1 and heap[0][0] < 0.0:
        negative, _, path, parent = heapq.heappop(heap)
        nodes.append((path, -negative))
        if path[-1] + 1 < width:
            push((*path[:-1], path[-1] + 1), parent)
        if len(path) < depths:
            push((*path, 0), -negative)
    return nodes


# ------------------------------------------------------------------------------------------------------------- prior
@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePrior:
    """Gaussian prior of the logits of the conditional acceptance of one workload.

    ``mean(k) = level - decay ln k``, covariance ``level_sd^2 + decay_sd^2 ln k ln k' + walk_sd^2 (min(k, k') - 1)``;
    `shared` is the correlation of the level and decay of two workloads of one drafter.
    """

    level: float = 1.0
    decay: float = 0.25
    level_sd: float = 0.9
    decay_sd: float = 0.6
    walk_sd: float = 0.2
    shared: float = 0.5

    def mean(self, positions: int) -> Array:
        """Prior mean of the logits at positions 1..`positions`."""
        return np.asarray(self.level - self.decay * np.log(np.arange(1, positions + 1)))

    def covariance(self, positions: int) -> Array:
        """Prior covariance of the logits of one workload, shape (positions, positions)."""
        k = np.arange(1, positions + 1)
        log_k = np.log(k)
        walk = np.minimum.outer(k, k) - 1.0
        return np.asarray(self.level_sd**2 + self.decay_sd**2 * np.outer(log_k, log_k) + self.walk_sd**2 * walk)


_PRIORS = {
    # A parallel drafter fills one trained block; its later positions see less and fall faster.
    "parallel": AcceptancePrior(level=1.2, decay=0.45),
    # A suggestion that matched keeps matching: acceptance does not fall along it.
    "ngram": AcceptancePrior(level=0.4, decay=-0.2),
}


def prior_of(method: str | None) -> AcceptancePrior:
    """Prior for a drafter's kind (`ModelShape.method`)."""
    return _PRIORS.get(method or "", AcceptancePrior())


def log_length_gradient(conditional: Array, reach: Array | None = None) -> tuple[Array, Array]:
    """Logarithm of E[N_K] for K = 0..n and its derivative by the logits.

    Parameters
    ----------
    conditional : numpy.ndarray
        Conditional acceptances of positions 1..n.
    reach : numpy.ndarray, optional
        Share of the cycles in which a draft is made at each position, non-increasing: below 1 where an n-gram drafter
        finds nothing or drafting stops early. Stopping is taken as independent of acceptance.

    Returns
    -------
    log_length : numpy.ndarray, shape (n + 1,)
        ``E[N_K] = 1 + sum(reach_k S_k)``.
    gradient : numpy.ndarray, shape (n + 1, n)
        ``d ln E[N_K] / d logit(c_k) = (1 - c_k) (S_k + ... + S_K) / E[N_K]``, 0 for k > K.
    """
    n = len(conditional)
    s = np.cumprod(conditional)
    if reach is not None:
        s = s * reach
    total = np.concatenate([[0.0], np.cumsum(s)])
    length = 1.0 + total
    # S_k + ... + S_K = total[K] - total[k-1]
    tail = np.maximum(total[:, None] - total[None, :n], 0.0) * (np.arange(n + 1)[:, None] > np.arange(n)[None, :])
    return np.log(length), tail * (1.0 - conditional)[None, :] / length[:, None]


def reach_of(drafted: ArrayLike, drafts: float, positions: int) -> Array:
    """Share of cycles that draft at positions 1..`positions`, from counts; the last known share goes on."""
    share = np.minimum.accumulate(np.clip(np.asarray(drafted, dtype=float) / drafts, 1e-6, 1.0))[:positions]
    return np.pad(share, (0, positions - len(share)), mode="edge")


def mean_drafts(reach: Array, num_steps: ArrayLike) -> Array:
    """Drafts made in a cycle on average with `num_steps` asked for: the sum of the reach; the last share goes on."""
    K = np.asarray(num_steps, dtype=float)
    total = np.concatenate([[0.0], np.cumsum(reach)])
    inside = np.minimum(K, len(reach))
    return np.asarray(np.interp(inside, np.arange(len(total)), total) + (K - inside) * reach[-1])
