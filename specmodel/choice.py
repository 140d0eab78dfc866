"""Which of several candidates is chosen, from joint draws of what is to be maximised."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["REGRET_TOLERANCE", "choose", "judge"]

Array = NDArray[np.float64]
REGRET_TOLERANCE = 0.005


def judge(score: Array, allowed: NDArray[np.bool_]) -> tuple[Array, Array]:
    """P(best) and expected regret of each candidate: the mean log-ratio of the best to it, as a fraction of its own.

    Parameters
    ----------
    score : numpy.ndarray, shape (draws, candidates)
        What is to be maximised.
    allowed : numpy.ndarray of bool, shape (candidates,)
        Candidates that may be best.
    """
    open_score = np.where(allowed, score, -np.inf)
    top = open_score.max(axis=1, keepdims=True)
    winners = open_score >= top
    probability = (winners / winners.sum(axis=1, keepdims=True)).mean(axis=0)
    if np.any(score <= 0.0):
        return probability, (top - score).mean(axis=0) / np.maximum(score.mean(axis=0), 1e-300)
    # In logarithms a candidate gains nothing from being little known: a long upper tail is no reason to choose it.
    return probability, np.expm1(np.log(top / score).mean(axis=0))


def choose(
    shapes: Sequence[tuple[int, int, int]],
    regret: Array,
    allowed: NDArray[np.bool_],
    measured: NDArray[np.bool_],
) -> int:
    """Index of the choice: of those within the tolerance of the least regret, measured ones first, then fewest steps.

    `shapes` are the (num_steps, topk, num_draft_tokens) of the candidates.
    """
    least = regret[allowed].min()
    close = [int(i) for i in np.flatnonzero(allowed) if regret[i] <= least + REGRET_TOLERANCE]
    return min(close, key=lambda i: (not measured[i], shapes[i][0], shapes[i][2], regret[i]))
