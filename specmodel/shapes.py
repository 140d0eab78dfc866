"""Which chains and trees are candidates of a decision, and the best trees that a model knows of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from specmodel.errors import UsageError
from specmodel.measured import default_context
from specmodel.model import FittedModel
from specmodel.request import number

__all__ = ["MOST_STEPS", "Trees", "proposed_trees", "shapes_of"]

MOST_STEPS = 64
"""Longest chain that is a candidate without having been measured."""
BUDGETS = (4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Verified tokens of a sequence, the root counted, for each of which one tree is proposed."""
WIDTHS = (2, 4, 8)
DEPTHS = (2, 3, 4, 5, 6, 8, 10)
PROPOSALS = 4

Tree = tuple[int, int, int]
"""(num_steps, topk, num_draft_tokens), as SGLang counts them."""
Trees = Iterable[Tree] | Literal["auto"]


def shapes_of(
    model: FittedModel,
    max_steps: int | None,
    trees: Trees,
    batches: Sequence[float],
    comms: Sequence[str],
    options: dict[str, Any],
) -> list[Tree]:
    """Every chain up to the longest, the measured trees and the given ones, as (num_steps, topk, verified tokens).

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    max_steps : int, optional
        By default the larger of 10 and the longest measured.
    trees : iterable of trees, or "auto"
        "auto" is `proposed_trees` at `batches`.
    batches, comms, options
        Of the call; `options` go to `FittedModel.predict`.

    Raises
    ------
    UsageError
        For numbers outside their domain.
    """
    measured = model.measured.largest_steps
    if max_steps is None:
        # Long chains are candidates where they were measured; nobody runs one of 64 steps that nobody measured.
        chains = set(range(min(max(10, measured), MOST_STEPS) + 1))
    else:
        longest = int(number("max_steps", max_steps, 0.0, 4.0 * MOST_STEPS, whole=True))
        chains = set(range(longest + 1))
    if max_steps is None:
        chains |= {s[0] for s in model.measured.speeds if s[1] == 1}
    # A tree that was measured is a candidate, asked for or not: it may be the fastest thing in the file.
    known = sorted({s[:3] for s in model.measured.speeds if s[1] > 1 and s[0] <= max(chains)})
    try:
        if isinstance(trees, str):
            asked = proposed_trees(model, batches, comms, max(chains), **options) if trees == "auto" else None
        else:
            asked = tuple(_tree(t) for t in trees)
    except TypeError:
        asked = None
    if asked is None:
        raise UsageError(f"trees must be a list of (num_steps, topk, num_draft_tokens) or 'auto', got {trees!r}")
    return [(k, 1, k + 1) for k in sorted(chains)] + list(dict.fromkeys([*known, *asked]))


def _tree(tree: Tree) -> Tree:
    wrong = UsageError(
        "a tree is (num_steps, topk, num_draft_tokens), whole numbers with num_steps >= 1 and num_draft_tokens >= 2 "
        f"(num_steps + 1 where topk is 1), got {tree!r}"
    )
    if len(tree) != 3 or not all(isinstance(x, int | np.integer) for x in tree):
        raise wrong
    steps, topk, tokens = (int(x) for x in tree)
    if steps < 1 or topk < 1 or tokens < 2 or (topk == 1 and tokens != steps + 1):
        raise wrong
    return steps, topk, tokens


def proposed_trees(
    model: FittedModel,
    batches: Sequence[float],
    comms: Sequence[str] | None = None,
    max_steps: int | None = None,
    **options: Any,
) -> tuple[Tree, ...]:
    """The best few trees by the fitted cost and the fitted acceptance of depths and ranks.

    For each number of verified tokens up to twice the largest measured (at least 8), the tree of some common widths
    and depths with the most tok/s at each batch, under the setting with most rows; of these, the `PROPOSALS` fastest
    of each batch. The nodes within each are the best ones (`acceptance.best_tree`).

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    batches, comms : sequences
        Of the call; by default every setting.
    max_steps : int, optional
        No tree is deeper; nor ever than twice the longest measured, or 4.
    options
        For `FittedModel.predict`: workload and graphs.
    """
    m = model.measured
    deepest = max(2 * m.largest_steps, 4)
    deepest = deepest if max_steps is None else min(max_steps, deepest)
    per_sequence = [tokens for _, _, tokens, *_ in m.speeds] + [int(t / b) for t, b, _ in m.verify]
    most = max(2 * max(per_sequence, default=1), 8)
    grid = [
        (k, t, n)
        for n in BUDGETS
        for t in WIDTHS
        for k in DEPTHS
        if k < n <= min(most, 1 + t + (k - 1) * t * t) and t < n and k <= deepest
    ]
    if not grid:
        return ()
    rows = [row.comm for _, table in model.calibration.tables for row in table]
    comm = max(comms or model.comm_names, key=rows.count)
    K, width, tokens = (np.array(x, dtype=float) for x in zip(*grid, strict=True))
    chosen: dict[Tree, None] = {}
    for batch in batches:
        context = default_context(model.calibration, batch)
        tok_s = model.predict(K, batch, comm, width, tokens, context, **options).tok_s
        fastest = {n: max((i for i, x in enumerate(grid) if x[2] == n), key=lambda i: tok_s[i]) for _, _, n in grid}
        chosen |= dict.fromkeys(grid[i] for i in sorted(fastest.values(), key=lambda i: -tok_s[i])[:PROPOSALS])
    return tuple(sorted(chosen, key=lambda tree: (tree[2], tree[0])))
