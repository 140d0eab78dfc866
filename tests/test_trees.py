"""Trees: greedy growth against the dynamic programme, published trees and check values, properties of `best_tree`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from specmodel import acceptance, closed_forms, verify_forms

DATA = Path(__file__).parent / "data" / "theory"
EAGLE = json.loads((DATA / "eagle1_2024.json").read_text())
SEQUOIA = json.loads((DATA / "sequoia_2024.json").read_text())
FOUR = (0.6, 0.2, 0.1, 0.05)


def printed(*texts: str) -> Any:
    """Values as printed: each may be off by half a unit of the last digit of the first."""
    half = 0.5000001 * 10.0 ** -len(texts[0].partition(".")[2])
    values = [float(text) for text in texts]
    return pytest.approx(values if len(values) > 1 else values[0], rel=0, abs=half)


def greedy_length(probability: np.ndarray, num_tokens: int) -> float:
    return 1.0 + sum(value for _, value in acceptance.grow_tree(probability, num_tokens))


def alike(ranks: tuple[float, ...], depth: int) -> np.ndarray:
    """The same acceptances by rank at every depth."""
    return np.tile(np.array(ranks), (depth, 1))


def programme(probability: np.ndarray, num_tokens: int) -> list[float]:
    """Largest expected length for 1..num_tokens nodes by Sequoia's dynamic programme over subtrees and branches."""
    depths, ranks = probability.shape

    @functools.cache
    def forest(tokens: int, rank: int, depth: int) -> float:
        """Most expected accepted nodes below one node, of `tokens` spread over its children from `rank` on."""
        if tokens == 0 or rank == ranks or depth == depths:
            return 0.0
        best = 0.0
        for own in range(tokens + 1):
            rest = forest(tokens - own, rank + 1, depth) if rank + 1 < ranks else 0.0
            here = probability[depth, rank] * (1.0 + forest(own - 1, 0, depth + 1)) if own else 0.0
            best = max(best, here + rest)
        return best

    return [1.0 + forest(tokens, 0, 0) for tokens in range(num_tokens)]


# ------------------------------------------------------------------------------------------------------ check values
@pytest.mark.parametrize(
    ("ranks", "lengths"),
    [
        (FOUR, ("1.6000", "2.176", "2.7456", "3.3094", "3.8685", "4.4201")),
        ((0.75, 0.1, 0.05, 0.02), ("1.7500", "2.7344", "3.5995", "4.1936", "4.8038", "5.4221")),
        ((0.5, 0.25, 0.12, 0.06, 0.03), ("1.5000", "2.0", "2.495", "2.9875", "3.4775", "3.9578")),
    ],
)
def test_length_of_the_best_tree(ranks: tuple[float, ...], lengths: tuple[str, ...]) -> None:
    assert [greedy_length(alike(ranks, 64), n) for n in (2, 4, 8, 16, 32, 64)] == printed(*lengths)


@pytest.mark.parametrize(
    ("num_tokens", "depth", "length"), [(16, 3, "3.178"), (32, 3, "3.524"), (32, 5, "3.8438"), (60, 6, "4.3504")]
)
def test_length_of_the_best_tree_of_limited_depth(num_tokens: int, depth: int, length: str) -> None:
    nodes = acceptance.grow_tree(alike(FOUR, depth), num_tokens)
    assert 1.0 + sum(value for _, value in nodes) == printed(length)
    assert max(len(path) for path, _ in nodes) <= depth


def test_a_full_tree_has_all_its_nodes() -> None:
    assert greedy_length(alike((0.6, 0.2, 0.1), 3), 40) == printed("3.439")
    assert verify_forms.balanced_tree_length((0.6, 0.2, 0.1), 3) == printed("3.439")
    nodes = acceptance.grow_tree(alike((0.6, 0.2, 0.1), 3), 1000)
    assert len(nodes) + 1 == 40 == sum(3**d for d in range(4))


def test_chains_that_part_at_the_root() -> None:
    assert verify_forms.chains_length(FOUR, 4, 8) == printed("3.3351")
    paths = [(r, *[0] * depth) for r in range(4) for depth in range(8)]
    assert verify_forms.tree_length(paths, FOUR) == printed("3.3351")


def test_limits_of_endless_trees() -> None:
    assert verify_forms.tree_length_limit((0.6,)) == pytest.approx(1.0 / (1.0 - 0.6))
    assert verify_forms.tree_length_limit(FOUR) == pytest.approx(verify_forms.balanced_tree_length(FOUR, 2000))
    assert verify_forms.tree_length_limit((0.7, 0.3)) == np.inf


def test_size_and_depth_for_given_hardware() -> None:
    verify_cost = np.maximum(1.0, 0.9 + np.arange(1, 129) / 100.0)
    num_tokens, depth, speedup = verify_forms.best_tree_size(alike(FOUR, 12), verify_cost, 0.03)
    assert (num_tokens, depth) == (25, 4)
    assert speedup == printed("2.8444")


def test_no_tree_where_drafting_does_not_pay() -> None:
    assert verify_forms.best_tree_size(alike((0.2, 0.1), 3), np.arange(1, 9, dtype=float), 0.1) == (1, 0, 1.0)


@pytest.mark.parametrize("row", SEQUOIA["rows"])
def test_verify_cost_implied_by_published_trees(row: dict[str, Any]) -> None:
    plain, draft = SEQUOIA["plain_ms"], SEQUOIA["draft_ms"]
    assert draft / plain == printed(SEQUOIA["step_cost"])
    time = plain / row["speedup"]
    assert time == pytest.approx(float(row["time_per_token_ms"]), abs=0.1)
    # What the time per token leaves for neither draft nor a known part is the verify pass here.
    verify_cost = closed_forms.implied_overhead_ms(time, row["depth"] * draft, 0.0, row["length"]) / plain
    assert verify_cost == printed(row["verify_cost"])
    assert verify_cost == pytest.approx(1.07, abs=0.042)
    alpha = closed_forms.break_even_acceptance(row["length"], row["depth"])
    assert closed_forms.walltime_factor(alpha, row["depth"], draft / plain) > row["speedup"]  # were verifying free


# ------------------------------------------------------------------------------------------------------ given trees
def test_the_static_tree_of_eagle() -> None:
    tree = EAGLE["tree"]
    assert [sum(len(path) == depth for path in tree) for depth in range(1, 6)] == EAGLE["per_depth"]
    assert len(tree) == 25
    assert verify_forms.tree_length(tree, FOUR) == printed("3.59808")


@pytest.mark.parametrize("row", EAGLE["rows"], ids=lambda row: row["model"])
def test_chain_and_tree_of_eagle_from_its_conditionals(row: dict[str, Any]) -> None:
    conditional = np.array(row["conditional"])
    predicted = acceptance.acceptance_lengths(conditional)[-1]
    assert predicted == printed(row["predicted"])
    assert 100.0 * (predicted / row["chain_length"] - 1.0) == printed(row["error_percent"])

    def excess(ratio: float) -> float:
        return (
            verify_forms.tree_length(EAGLE["tree"], np.outer(conditional, ratio ** np.arange(4))) - row["tree_length"]
        )

    assert brentq(excess, 0.01, 0.9) == printed(row["rank_ratio"])


def test_the_prediction_of_chains_is_unbiased() -> None:
    predicted = [acceptance.acceptance_lengths(row["conditional"])[-1] for row in EAGLE["rows"]]
    errors = 100.0 * (np.array(predicted) / [row["chain_length"] for row in EAGLE["rows"]] - 1.0)
    assert np.sqrt(np.mean(np.square(errors))) == printed("3.0")
    assert np.mean(errors) == printed("0")


@pytest.mark.parametrize(
    ("paths", "fault"),
    [([(0,), (1, 0)], "no parent"), ([()], "is the root"), ([(0,), (0,)], "occurs twice")],
)
def test_a_tree_that_is_none_is_refused(paths: list[tuple[int, ...]], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        verify_forms.tree_length(paths, FOUR)


def test_a_given_tree_with_acceptance_by_depth() -> None:
    table = np.array([[0.8, 0.1], [0.5, 0.2]])
    assert verify_forms.tree_length([(0,), (1,), (0, 0), (1, 1)], table) == pytest.approx(1 + 0.8 + 0.1 + 0.4 + 0.02)


# ------------------------------------------------------------------------------------------------- SGLang's parameters
@pytest.mark.parametrize(("topk", "num_steps", "count"), [(4, 5, 68), (8, 5, 264), (4, 3, 36), (1, 3, 3), (10, 6, 510)])
def test_tokens_that_the_drafter_scores(topk: int, num_steps: int, count: int) -> None:
    assert verify_forms.tree_candidates(num_steps, topk) == count


def test_the_default_tree_against_chains() -> None:
    assert greedy_length(alike(FOUR, 5), 8) == printed("2.7456")
    assert greedy_length(alike(FOUR[:1], 3), 4) == printed("2.176")
    assert greedy_length(alike(FOUR[:1], 7), 8) == printed("2.458")


def test_a_tree_of_one_candidate_is_the_chain() -> None:
    conditional = np.array([0.8, 0.7, 0.6, 0.5])
    tree = acceptance.best_tree(conditional, 0.3, 4, 1, 5)
    assert tree.length == pytest.approx(acceptance.acceptance_lengths(conditional)[-1], rel=1e-15)
    assert [(depth, rank) for depth, rank, _ in tree.nodes] == [(1, 0), (2, 0), (3, 0), (4, 0)]


# ------------------------------------------------------------------------------------------------ greedy = programme
VECTORS = [
    alike(FOUR, 64),
    alike((0.75, 0.1, 0.05, 0.02), 64),
    alike((0.5, 0.25, 0.12, 0.06, 0.03), 64),
    alike((0.9, 0.05), 64),
    alike(FOUR, 4),
    np.outer([0.9, 0.7, 0.4, 0.6], [0.7, 0.2, 0.1]),  # by depth, not falling
]


@pytest.mark.parametrize("probability", VECTORS, ids=["four", "steep", "five", "two", "shallow", "by depth"])
def test_greedy_equals_the_dynamic_programme(probability: np.ndarray) -> None:
    exact = programme(probability[:8], 33)  # within 8 levels, which already branch in every way
    assert [greedy_length(probability[:8], n) for n in range(1, 34)] == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("probability", VECTORS, ids=["four", "steep", "five", "two", "shallow", "by depth"])
def test_greedy_equals_the_dynamic_programme_at_sixty_four(probability: np.ndarray) -> None:
    assert greedy_length(probability, 64) == pytest.approx(programme(probability, 64)[-1], rel=1e-12)


@st.composite
def rank_tables(draw: st.DrawFn) -> np.ndarray:
    depths, ranks = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rows = []
    for _ in range(depths):
        shares = sorted(draw(st.lists(st.floats(0.01, 1.0), min_size=ranks, max_size=ranks)), reverse=True)
        rows.append(np.array(shares) / max(sum(shares), 1.0))
    return np.array(rows)


@settings(deadline=None, max_examples=60)
@given(rank_tables(), st.integers(1, 12))
def test_greedy_equals_the_dynamic_programme_for_any_table(probability: np.ndarray, num_tokens: int) -> None:
    assert greedy_length(probability, num_tokens) == pytest.approx(programme(probability, num_tokens)[-1], rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(rank_tables(), st.integers(1, 40))
def test_grown_nodes_are_a_tree_best_first(probability: np.ndarray, num_tokens: int) -> None:
    nodes = acceptance.grow_tree(probability, num_tokens)
    values = [value for _, value in nodes]
    assert values == sorted(values, reverse=True)
    possible = sum(probability.shape[1] ** d for d in range(len(probability) + 1))
    assert len(nodes) == min(num_tokens, possible) - 1
    # Each node hangs under one taken before, and its value is the product along its path.
    assert verify_forms.tree_length([path for path, _ in nodes], probability) == pytest.approx(
        1.0 + sum(values), rel=1e-12
    )
    for path, value in nodes:
        assert value == pytest.approx(np.prod([probability[d, r] for d, r in enumerate(path)]), rel=1e-12)


def test_a_table_without_ranks_or_with_nothing_accepted_grows_nothing() -> None:
    assert acceptance.grow_tree(np.empty((0, 2)), 5) == []
    assert acceptance.grow_tree(np.empty((2, 0)), 5) == []
    assert acceptance.grow_tree(np.zeros((2, 2)), 5) == []


# -------------------------------------------------------------------------------------------------------- best_tree
CONDITIONALS = st.lists(st.floats(0.05, 0.95), min_size=6, max_size=6).map(np.array)
RATIOS = st.floats(0.05, 0.95)
LIMITS = st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(2, 40))


@settings(deadline=None, max_examples=60)
@given(CONDITIONALS, RATIOS, LIMITS)
def test_a_tree_grows_with_every_limit_and_never_below_its_chain(
    conditional: np.ndarray, ratio: float, limits: tuple[int, int, int]
) -> None:
    num_steps, topk, tokens = limits
    length = acceptance.best_tree(conditional, ratio, num_steps, topk, tokens).length
    assert acceptance.best_tree(conditional, ratio, num_steps, topk, tokens + 1).length >= length - 1e-12
    assert acceptance.best_tree(conditional, ratio, num_steps, topk + 1, tokens).length >= length - 1e-12
    deeper = np.append(conditional, 0.5)
    assert acceptance.best_tree(deeper, ratio, num_steps + 1, topk, tokens).length >= length - 1e-12
    assert length >= acceptance.acceptance_lengths(conditional)[min(num_steps, tokens - 1)] - 1e-12
    assert 1.0 <= length <= min(num_steps + 1, tokens) + 1e-12


@settings(deadline=None, max_examples=60)
@given(CONDITIONALS, RATIOS, LIMITS)
def test_a_tree_of_better_acceptance_is_longer(
    conditional: np.ndarray, ratio: float, limits: tuple[int, int, int]
) -> None:
    better = 0.5 * (conditional + 1.0)
    tree = acceptance.best_tree(conditional, ratio, *limits)
    assert acceptance.best_tree(better, ratio, *limits).length >= tree.length - 1e-12
    assert tree.length == pytest.approx(1.0 + sum(value for _, _, value in tree.nodes), rel=1e-14)
    assert len(tree.nodes) <= limits[2] - 1
    assert max(depth for depth, _, _ in tree.nodes) <= limits[0]
    assert max(rank for _, rank, _ in tree.nodes) < limits[1]
    # The children of one node are at most certain together: those of the root.
    assert sum(value for depth, _, value in tree.nodes if depth == 1) <= 1.0 + 1e-12


def has_a_kink(conditional: np.ndarray, ratio: float, limits: tuple[int, int, int]) -> bool:
    """Whether the derivatives are one-sided: the best node left is worth the worst taken, or children just certain."""
    num_steps, topk, tokens = limits
    nodes = acceptance.best_tree(conditional, ratio, num_steps, topk, tokens + 1).nodes
    tie = len(nodes) == tokens and nodes[-2][2] <= nodes[-1][2] * 1.001
    together = np.outer(conditional[:num_steps], np.cumsum(ratio ** np.arange(topk)))
    return tie or bool(np.any(np.abs(together - 1.0) < 1e-3))


@settings(deadline=None, max_examples=60)
@given(CONDITIONALS, RATIOS, LIMITS)
def test_derivatives_of_the_length(conditional: np.ndarray, ratio: float, limits: tuple[int, int, int]) -> None:
    assume(not has_a_kink(conditional, ratio, limits))
    tree = acceptance.best_tree(conditional, ratio, *limits)

    def length(log_first: np.ndarray, log_ratio: float) -> float:
        return acceptance.best_tree(conditional * np.exp(log_first), ratio * np.exp(log_ratio), *limits).length

    step = 1e-6
    none = np.zeros(len(conditional))
    for depth in range(limits[0]):
        move = step * np.eye(len(conditional))[depth]
        slope = (length(move, 0.0) - length(-move, 0.0)) / (2 * step)
        assert tree.by_log_first[depth] == pytest.approx(slope, rel=1e-5, abs=1e-6)
    slope = (length(none, step) - length(none, -step)) / (2 * step)
    assert tree.by_log_ratio == pytest.approx(slope, rel=1e-5, abs=1e-6)


@settings(deadline=None, max_examples=60)
@given(CONDITIONALS, CONDITIONALS, RATIOS, LIMITS)
def test_a_tree_of_given_nodes_is_smooth(
    conditional: np.ndarray, other: np.ndarray, ratio: float, limits: tuple[int, int, int]
) -> None:
    # The nodes are those of the best tree at another acceptance: no kink of its choice is near by chance.
    paths = acceptance.best_tree(other, ratio, *limits).paths
    together = np.outer(conditional, np.cumsum(ratio ** np.arange(limits[1])))
    assume(not np.any(np.abs(together - 1.0) < 1e-3))
    tree = acceptance.best_tree(conditional, ratio, *limits, paths=paths)
    assert tree.paths == paths
    assert tree.length <= acceptance.best_tree(conditional, ratio, *limits).length + 1e-12
    step = 1e-6

    def length(log_first: np.ndarray, log_ratio: float) -> float:
        first, moved = conditional * np.exp(log_first), ratio * np.exp(log_ratio)
        return acceptance.best_tree(first, moved, *limits, paths=paths).length

    none = np.zeros(len(conditional))
    for depth in range(limits[0]):
        move = step * np.eye(len(conditional))[depth]
        slope = (length(move, 0.0) - length(-move, 0.0)) / (2 * step)
        assert tree.by_log_first[depth] == pytest.approx(slope, rel=1e-5, abs=1e-6)
    slope = (length(none, step) - length(none, -step)) / (2 * step)
    assert tree.by_log_ratio == pytest.approx(slope, rel=1e-5, abs=1e-6)


def test_the_best_tree_at_its_own_nodes_is_the_best_tree() -> None:
    best = acceptance.best_tree(np.full(5, 0.6), 1.0 / 3.0, 5, 4, 24)
    again = acceptance.best_tree(np.full(5, 0.6), 1.0 / 3.0, 5, 4, 24, paths=best.paths)
    assert np.array(again.nodes) == pytest.approx(np.array(best.nodes), rel=1e-14)
    assert again.length == pytest.approx(best.length, rel=1e-14)
    assert again.by_log_first == pytest.approx(best.by_log_first, rel=1e-12)


@pytest.mark.parametrize("limits", [(6, 3, 3), (3, 10**9, 4), (6, 2, 2)], ids=["deep", "wide", "one node"])
def test_limits_that_the_others_cut_short(limits: tuple[int, int, int]) -> None:
    conditional = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])
    tree = acceptance.best_tree(conditional, 0.4, *limits)
    tokens = limits[2]
    assert tree.length == pytest.approx(
        acceptance.best_tree(conditional, 0.4, min(limits[0], tokens), min(limits[1], tokens), tokens).length, rel=1e-14
    )
    assert tree.by_log_first.shape == (limits[0],)
    assert not np.any(tree.by_log_first[tokens - 1 :])


def test_an_endless_budget_ends() -> None:
    tree = acceptance.best_tree(np.full(30, 0.6), 0.3, 30, 8, 10**9)
    assert len(tree.nodes) == acceptance.MOST_TREE_TOKENS - 1
    assert tree.length <= verify_forms.tree_length_limit(0.6 * 0.3 ** np.arange(8)) + 1e-9


def test_every_node_but_the_root_may_be_a_sibling() -> None:
    tree = acceptance.best_tree([0.2, 0.2], 0.9, 2, 9, 4)
    assert [(depth, rank) for depth, rank, _ in tree.nodes] == [(1, 0), (1, 1), (1, 2)]
    assert tree.length == pytest.approx(1.0 + 0.2 * (1.0 + 0.9 + 0.81), rel=1e-14)
