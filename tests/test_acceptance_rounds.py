"""Closed forms against simulated rounds of drafting and verifying, within four standard errors of the simulation."""

from __future__ import annotations

import numpy as np
import pytest

from specmodel import acceptance, adaptive, closed_forms, uncertainty, verify_forms

ROUNDS = 40_000
CONDITIONALS = [(0.8, 0.8, 0.8, 0.8, 0.8), (0.9, 0.7, 0.55, 0.4), (0.5, 0.6, 0.7, 0.8, 0.85, 0.9), (0.3,)]


def within(simulated: np.ndarray, standard_errors: float = 4.0) -> object:
    """The mean of independent values, to the given number of its standard errors."""
    error = simulated.std(axis=0) / np.sqrt(len(simulated))
    return pytest.approx(simulated.mean(axis=0), rel=0, abs=standard_errors * float(np.max(error)) + 1e-12)


def accepted_drafts(rng: np.random.Generator, conditional: np.ndarray, rounds: int) -> np.ndarray:
    """Drafts accepted before the first rejection."""
    accepted = rng.uniform(size=(rounds, len(conditional))) < conditional
    return np.cumprod(accepted, axis=1).sum(axis=1)


@pytest.mark.parametrize("conditional", CONDITIONALS)
def test_tokens_of_a_cycle(conditional: tuple[float, ...]) -> None:
    c = np.array(conditional)
    tokens = 1 + accepted_drafts(np.random.default_rng(1), c, ROUNDS)
    survival = acceptance.survival_from_conditional(c)
    assert acceptance.acceptance_length(survival) == within(tokens)
    assert acceptance.acceptance_variance(survival) == within((tokens - tokens.mean()) ** 2)
    for k in range(1, len(c) + 1):
        assert survival[k - 1] == within((tokens > k).astype(float))


@pytest.mark.parametrize("conditional", CONDITIONALS)
def test_the_estimate_covers_the_curve_it_was_drawn_from(conditional: tuple[float, ...]) -> None:
    c = np.array(conditional)
    counts = np.bincount(accepted_drafts(np.random.default_rng(2), c, 2000), minlength=len(c) + 1)
    estimate = acceptance.kaplan_meier(counts)
    truth = acceptance.survival_from_conditional(c)
    assert np.all(np.abs(estimate.survival - truth) <= 4.0 * estimate.survival_sd)
    assert abs(estimate.length - float(acceptance.acceptance_length(truth))) <= 4.0 * estimate.length_sd


def test_tokens_where_a_draft_is_not_always_found() -> None:
    c, reach = np.array([0.8, 0.7, 0.6]), np.array([0.6, 0.5, 0.2])
    rng = np.random.default_rng(12)
    found = np.sum(rng.uniform(size=(ROUNDS, 1)) < reach, axis=1)  # how far the drafter gets, whatever is accepted
    tokens = 1 + np.minimum(accepted_drafts(rng, c, ROUNDS), found)
    length = np.exp(acceptance.log_length_gradient(c, reach)[0][3])
    assert length == within(tokens)
    assert acceptance.mean_drafts(reach, 3) == within(found)


def test_the_product_limit_of_cycles_of_mixed_length() -> None:
    c = np.array([0.85, 0.7, 0.6, 0.5])
    truth = acceptance.survival_from_conditional(c)
    rng = np.random.default_rng(3)
    estimates = []
    for _ in range(300):
        num_steps = rng.integers(1, 5, size=400)
        accepted = np.minimum(accepted_drafts(rng, c, 400), num_steps)
        estimates.append(uncertainty.product_limit(accepted, num_steps))
    survival = np.array([e.survival for e in estimates])
    assert list(truth) == within(survival)
    lengths = np.array([e.length for e in estimates])
    assert float(acceptance.acceptance_length(truth)) == within(lengths)
    # Greenwood's errors are those of the estimates: an sd from 300 values is known to 1 / sqrt(600).
    stated = np.mean([e.survival_sd for e in estimates], axis=0)
    assert stated == pytest.approx(survival.std(axis=0), rel=4.0 / np.sqrt(600))
    assert np.mean([e.length_sd for e in estimates]) == pytest.approx(lengths.std(), rel=4.0 / np.sqrt(600))


def test_speculative_sampling_accepts_the_overlap_and_keeps_the_target_distribution() -> None:
    target = np.array([0.5, 0.25, 0.15, 0.1])
    draft = np.array([0.3, 0.5, 0.1, 0.1])
    rng = np.random.default_rng(4)
    drafted = rng.choice(4, size=ROUNDS, p=draft)
    accepted = rng.uniform(size=ROUNDS) < np.minimum(1.0, target / draft)[drafted]
    residual = np.maximum(target - draft, 0.0)
    emitted = np.where(accepted, drafted, rng.choice(4, size=ROUNDS, p=residual / residual.sum()))
    assert closed_forms.overlap_acceptance(target, draft) == within(accepted.astype(float))
    for token in range(4):
        assert target[token] == within((emitted == token).astype(float))


def test_a_lenient_rule_accepts_more() -> None:
    target, draft = np.array([0.5, 0.25, 0.15, 0.1]), np.array([0.3, 0.5, 0.1, 0.1])
    rng = np.random.default_rng(5)
    drafted = rng.choice(4, size=ROUNDS, p=draft)
    accepted = rng.uniform(size=ROUNDS) < np.minimum(1.0, target / (0.8 * draft))[drafted]
    assert closed_forms.overlap_acceptance(target, draft, 0.8) == within(accepted.astype(float))


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_batches_in_lock_step_and_the_longest_of_a_batch(batch: int) -> None:
    conditional = np.full(5, 0.8)
    rng = np.random.default_rng(6)
    tokens = 1 + accepted_drafts(rng, conditional, 10_000 * batch).reshape(-1, batch)
    assert closed_forms.lock_step_length(0.8, 5, batch) == within(tokens.min(axis=1))
    assert closed_forms.longest_length(0.8 ** np.arange(1, 6), batch) == within(tokens.max(axis=1))


@pytest.mark.parametrize(
    "paths",
    [
        [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)],
        [(r, *[0] * depth) for r in range(4) for depth in range(3)],
        [(0,) * depth for depth in range(1, 6)],
    ],
    ids=["tree", "chains", "chain"],
)
def test_trees_accept_the_path_that_is_drawn(paths: list[tuple[int, ...]]) -> None:
    by_rank = np.array([0.6, 0.2, 0.1, 0.05])
    drawn = np.searchsorted(np.cumsum(by_rank), np.random.default_rng(7).uniform(size=(ROUNDS, 5)), side="right")
    nodes, longest = set(paths), max(map(len, paths))
    # A path is accepted as far as its nodes are in the tree; rank 4 is none of the candidates.
    depth = np.array(
        [max(d for d in range(longest + 1) if d == 0 or tuple(row[:d]) in nodes) for row in drawn.tolist()]
    )
    assert verify_forms.tree_length(paths, by_rank) == within(1.0 + depth)


def test_throughput_of_many_cycles_is_the_ratio_of_means() -> None:
    tokens = 1 + accepted_drafts(np.random.default_rng(8), np.full(5, 0.8), ROUNDS)
    time = 20.0 + 2.0 * tokens
    length = float(acceptance.constant_acceptance_length(0.8, 5))
    expected = length / (20.0 + 2.0 * length)
    error = np.std(tokens - expected * time) / (time.mean() * np.sqrt(ROUNDS))
    assert tokens.sum() / time.sum() == pytest.approx(expected, rel=0, abs=4.0 * error)


@pytest.mark.parametrize("step_cost", [0.05, 0.2])
def test_stopping_by_confidence(step_cost: float) -> None:
    confidence, probability = np.array([0.95, 0.4]), np.array([0.7, 0.3])
    rule = adaptive.stop_by_confidence(confidence, probability, step_cost)
    rng = np.random.default_rng(9)
    shown = rng.choice(confidence, size=(ROUNDS, 64), p=probability)
    survival = np.cumprod(shown, axis=1)
    before = np.concatenate([np.ones((ROUNDS, 1)), survival[:, :-1]], axis=1)
    drafted = np.cumprod(before >= rule.threshold, axis=1)
    judged = np.cumprod(rng.uniform(size=shown.shape) < shown, axis=1) * drafted
    assert rule.mean_draft_tokens == within(drafted.sum(axis=1))
    assert rule.length == within(1 + judged.sum(axis=1))


def test_variance_of_long_runs_when_acceptance_wanders() -> None:
    moments = uncertainty.modulated_acceptance([0.9, 0.6], 0.9, 5)
    rng = np.random.default_rng(10)
    runs, cycles = 4000, 400
    state = rng.integers(0, 2, size=runs)
    total, first = np.zeros(runs), []
    for i in range(cycles):
        alpha = np.array([0.9, 0.6])[state]
        tokens = 1 + np.cumprod(rng.uniform(size=(runs, 5)) < alpha[:, None], axis=1).sum(axis=1)
        total += tokens
        if i < 2:
            first.append(tokens)
        state = np.where(rng.uniform(size=runs) < 0.9, state, 1 - state)
    assert moments.length == within(total / cycles)
    assert moments.variance == within((first[0] - first[0].mean()) ** 2)
    # The variance of means of 400 cycles is below its limit by about 1 / 400 of the correlation time.
    assert cycles * np.var(total / cycles) == pytest.approx(
        moments.long_run_variance, rel=4.0 * np.sqrt(2 / runs) + 0.02
    )
    product = (first[0] - first[0].mean()) * (first[1] - first[1].mean())
    assert moments.lag_one * moments.variance == within(product)
