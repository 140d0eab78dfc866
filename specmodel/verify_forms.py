"""Closed results on one verify pass: trees of given shape, experts touched, tiles, and the compute-bound knee."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import constant_acceptance_length, grow_tree
from specmodel.closed_forms import best_steps, broadcast_floats
from specmodel.cost import distinct_experts

__all__ = [
    "balanced_tree_length",
    "best_tree_size",
    "chains_length",
    "distinct_experts_sd",
    "distinct_experts_skewed",
    "effective_tokens",
    "fill_rule_steps",
    "full_size_steps",
    "hinge_speedup",
    "power_law_popularity",
    "ridge_tokens",
    "tiles",
    "tokens_to_touch",
    "tree_candidates",
    "tree_length",
    "tree_length_limit",
    "waves",
    "weight_bytes_ratio",
]

Array = NDArray[np.float64]


# ------------------------------------------------------------------------------------------------------------- trees
def tree_length(paths: Iterable[Sequence[int]], probability: ArrayLike) -> float:
    """Return the expected tokens a cycle of a given tree.

    1 for the root and the product of the acceptances along the path of every node: Sequoia (arXiv 2402.12374,
    proposition 3.4).

    Parameters
    ----------
    paths : iterable of sequences of int
        The nodes without the root, each as the ranks (from 0) from the root down. A node whose parent is missing can
        never be accepted: ValueError.
    probability : array_like
        Acceptance of a child by rank, shape (ranks,), or by depth of the parent and rank, shape (depths, ranks).
    """
    table = np.asarray(probability, dtype=float)
    value: dict[tuple[int, ...], float] = {(): 1.0}
    for path in sorted((tuple(p) for p in paths), key=len):
        if not path or path[:-1] not in value or path in value:
            fault = "is the root" if not path else "occurs twice" if path in value else "has no parent in the tree"
            raise ValueError(f"paths: each must be one node below another, got {path}, which {fault}; leave it out")
        depth, rank = len(path) - 1, path[-1]
        value[path] = value[path[:-1]] * float(table[rank] if table.ndim == 1 else table[depth, rank])
    return sum(value.values())


def chains_length(probability: ArrayLike, num_chains: int, num_steps: int) -> float:
    """Return the expected tokens of k chains that part at the root.

    ``1 + (p_1 + ... + p_k) (1 + p_1 + ... + p_1^(l-1))``. `probability` is the acceptance of a child by rank, at
    least k long; l is `num_steps`, the depth of every chain.
    """
    p = np.asarray(probability, dtype=float)
    return float(1.0 + p[:num_chains].sum() * np.sum(p[0] ** np.arange(num_steps)))


def balanced_tree_length(probability: ArrayLike, depth: int) -> float:
    """Return the expected tokens when every node above `depth` has every child: ``sum_d (sum p)^d``, d = 0..depth."""
    return float(np.sum(np.sum(np.asarray(probability, dtype=float)) ** np.arange(depth + 1)))


def tree_length_limit(probability: ArrayLike) -> float:
    """Return the expected tokens of an endless tree: ``1 / (1 - sum p)``, infinite where the sum is 1 or more."""
    total = float(np.sum(np.asarray(probability, dtype=float)))
    return 1.0 / (1.0 - total) if total < 1.0 else np.inf


def best_tree_size(probability: ArrayLike, verify_cost: ArrayLike, step_cost: float) -> tuple[int, int, float]:
    """Size and depth of the fastest tree on given hardware: the maximum of ``G(n, D) / (t(n) + c D)``.

    G is the largest expected length with n nodes (root included) no deeper than D (Sequoia, section 3.3).

    Parameters
    ----------
    probability : array_like, shape (depths, ranks)
        Acceptance of a child by depth of the parent and rank, not increasing in the rank.
    verify_cost : array_like
        t(n) for n = 1, 2, ...: the verify pass of n tokens over a plain pass.
    step_cost : float
        One draft pass over a plain pass.

    Returns
    -------
    num_tokens, depth, speedup
        Of equals the shallower, then the smaller; ``(1, 0, 1 / t(1))`` where drafting does not pay.
    """
    table, t = np.asarray(probability, dtype=float), np.asarray(verify_cost, dtype=float)
    best = (1, 0, 1.0 / float(t[0]))
    for depth in range(1, len(table) + 1):
        nodes = grow_tree(table[:depth], len(t))
        lengths = 1.0 + np.cumsum([value for _, value in nodes])
        speedup = lengths / (t[1 : len(lengths) + 1] + step_cost * depth)
        i = int(np.argmax(speedup))
        if speedup[i] > best[2]:
            best = (i + 2, depth, float(speedup[i]))
    return best


def tree_candidates(num_steps: ArrayLike, topk: ArrayLike) -> NDArray[np.int64]:
    """Tokens that SGLang's drafter scores before it keeps the best: ``topk + (num_steps - 1) topk^2``."""
    K, k = np.asarray(num_steps, dtype=np.int64), np.asarray(topk, dtype=np.int64)
    return np.asarray(k + (K - 1) * k * k)


# ------------------------------------------------------------------------------------------------------------ experts
def distinct_experts_sd(tokens: ArrayLike, num_experts: int, experts_per_token: int) -> Array:
    """Return the standard deviation of the experts that t tokens touch, each drawing k distinct of E uniformly.

    ``Var = E p (1 - p) + E (E - 1) (q - p^2)`` with ``p = (1 - k/E)^t``, an expert missed, and
    ``q = [(E-k)(E-k-1) / (E (E-1))]^t``, two of them missed (occupancy with draws without replacement).
    """
    t = np.asarray(tokens, dtype=float)
    E, k = float(num_experts), float(experts_per_token)
    missed = (1.0 - k / E) ** t
    both = ((E - k) * (E - k - 1.0) / (E * (E - 1.0))) ** t if E > 1.0 else missed
    variance = E * missed * (1.0 - missed) + E * (E - 1.0) * (both - missed**2)
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


def distinct_experts_skewed(tokens: ArrayLike, popularity: ArrayLike) -> Array:
    """Return the expected experts touched when a token chooses expert e with probability ``popularity[e]``.

    ``sum_e 1 - (1 - pi_e)^t`` for independent tokens; the popularities add up to k. Uniform popularity touches most
    (Jensen's inequality), which is `cost.distinct_experts`.
    """
    t = np.asarray(tokens, dtype=float)[..., None]
    return np.asarray(np.sum(1.0 - (1.0 - np.asarray(popularity, dtype=float)) ** t, axis=-1))


def power_law_popularity(num_experts: int, experts_per_token: int, exponent: float) -> Array:
    """Probability of each expert to be among a token's k: proportional to ``rank^-exponent``, at most 1, sum k."""
    weight = np.arange(1, num_experts + 1, dtype=float) ** -exponent
    certain = 0
    # Experts whose share would be above 1 are always chosen; the rest share what is left.
    while True:
        scale = (experts_per_token - certain) / weight[certain:].sum()
        more = int(np.sum(weight[certain:] * scale > 1.0))
        if more == 0:
            return np.concatenate([np.ones(certain), weight[certain:] * scale])
        certain += more


def effective_tokens(tokens: ArrayLike, overlap: ArrayLike) -> Array:
    """Independent tokens that touch as many experts as `tokens` whose routing overlaps: ``1 + (t - 1)(1 - overlap)``.

    A one-parameter description: adjacent tokens of one sequence share a fraction `overlap` of their experts.
    """
    t, share = broadcast_floats(tokens, overlap)
    return np.asarray(1.0 + (t - 1.0) * (1.0 - share))


def tokens_to_touch(share: ArrayLike, num_experts: int, experts_per_token: int) -> Array:
    """Tokens after which `share` of all experts is touched: ``ln(1 - share) / ln(1 - k/E)``, uniform routing."""
    return np.asarray(np.log1p(-np.asarray(share, dtype=float)) / np.log1p(-experts_per_token / num_experts))


def weight_bytes_ratio(tokens: ArrayLike, num_experts: int, experts_per_token: int, expert_share: ArrayLike) -> Array:
    """Weight bytes of a pass of t tokens over those of one token: ``1 - rho + rho N(t) / k``.

    `expert_share` is rho, the part of the active bytes of one token that routed experts hold.
    """
    rho = np.asarray(expert_share, dtype=float)
    touched = distinct_experts(np.asarray(tokens, dtype=float), num_experts, experts_per_token)
    return np.asarray(1.0 - rho + rho * touched / experts_per_token)


# ------------------------------------------------------------------------------------------------- tiles and the knee
def tiles(tokens: ArrayLike, width: ArrayLike, tile_tokens: int, tile_width: int) -> NDArray[np.int64]:
    """Output tiles of a matrix product of `tokens` rows and `width` columns, edges padded up."""
    n, w = np.asarray(tokens, dtype=float), np.asarray(width, dtype=float)
    return np.asarray(np.ceil(n / tile_tokens) * np.ceil(w / tile_width)).astype(np.int64)


def waves(num_tiles: ArrayLike, num_processors: int) -> NDArray[np.int64]:
    """Return the rounds in which `num_processors` multiprocessors work off the tiles, the last perhaps not full."""
    return np.asarray(-(-np.asarray(num_tiles, dtype=np.int64) // num_processors))


def ridge_tokens(flops_per_byte: ArrayLike, weight_bytes: ArrayLike) -> Array:
    """Tokens at which a pass over the weights turns compute-bound: ``machine balance * bytes a weight / 2``.

    A weight of `weight_bytes` bytes is read once a pass and used in two operations a token (roofline model, Williams
    et al. 2009). Peak numbers give an upper bound; in a mixture of experts multiply by E / k.
    """
    balance, size = broadcast_floats(flops_per_byte, weight_bytes)
    return np.asarray(balance * size / 2.0)


def hinge_speedup(
    alpha: ArrayLike, num_steps: ArrayLike, batch: ArrayLike, knee_tokens: ArrayLike, step_cost: ArrayLike
) -> Array:
    """Speedup where a pass costs ``max(1, n / n_knee)`` plain passes of one sequence.

    ``E[N_K] max(1, B / n_knee) / (max(1, B (K+1) / n_knee) + c K)``: free verification up to the knee, none beyond.
    """
    a, K, B, knee, c = broadcast_floats(alpha, num_steps, batch, knee_tokens, step_cost)
    plain = np.maximum(1.0, B / knee)
    cycle = np.maximum(1.0, B * (K + 1.0) / knee) + c * K
    return np.asarray(constant_acceptance_length(a, K) * plain / cycle)


def fill_rule_steps(alpha: ArrayLike, batch: ArrayLike, knee_tokens: ArrayLike, step_cost: ArrayLike) -> Array:
    """Best K under `hinge_speedup` for cheap drafts: ``min(K without a knee, floor(n_knee / B) - 1)``, at least 0.

    The batch is filled up to the knee and no further; exact where a step beyond the knee never pays.
    """
    steps, _ = best_steps(alpha, step_cost)
    room = np.floor(np.asarray(knee_tokens, dtype=float) / np.asarray(batch, dtype=float)) - 1.0
    return np.asarray(np.maximum(np.minimum(steps, room), 0.0))


def full_size_steps(batch: int, graph_sizes: Sequence[int], max_steps: int) -> tuple[int, ...]:
    """Step counts that fill a captured graph size as far as the batch allows: the only ones worth trying.

    Where the verify pass is padded up to the next of `graph_sizes` (tokens) and a draft step costs little, every
    other step count costs the same pass for fewer tokens.
    """
    steps = {size // batch - 1 for size in graph_sizes}
    return tuple(sorted(k for k in steps if 0 <= k <= max_steps))
