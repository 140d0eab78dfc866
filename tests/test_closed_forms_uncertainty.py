"""Properties of intervals, mixtures, estimates and the worth of measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaln

from specmodel import acceptance, closed_forms, uncertainty

METHODS = ("clopper-pearson", "wilson", "jeffreys")


# ----------------------------------------------------------------------------------------------------------- intervals
@settings(deadline=None, max_examples=60)
@given(st.integers(1, 2000), st.data(), st.sampled_from(METHODS), st.floats(0.5, 0.99))
def test_binomial_intervals_hold_the_frequency_and_mirror(
    trials: int, data: st.DataObject, method: Any, level: float
) -> None:
    hits = data.draw(st.integers(0, trials))
    low, high = uncertainty.binomial_interval(hits, trials, level, method)
    assert 0.0 <= low <= hits / trials <= high <= 1.0
    mirrored = uncertainty.binomial_interval(trials - hits, trials, level, method)
    assert (1.0 - mirrored[1], 1.0 - mirrored[0]) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))
    wider = uncertainty.binomial_interval(hits, trials, 0.995, method)
    assert wider[0] <= low + 1e-12
    assert wider[1] >= high - 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_coverage_of_binomial_intervals(method: Any) -> None:
    trials = 30
    x = np.arange(trials + 1)
    low, high = uncertainty.binomial_interval(x, trials, 0.95, method)
    p = np.linspace(0.005, 0.995, 199)[:, None]
    log_pmf = (
        gammaln(trials + 1) - gammaln(x + 1) - gammaln(trials - x + 1) + x * np.log(p) + (trials - x) * np.log1p(-p)
    )
    coverage = np.sum(np.exp(log_pmf) * ((low <= p) & (p <= high)), axis=1)
    if method == "clopper-pearson":
        assert coverage.min() >= 0.95
    else:
        assert coverage.mean() == pytest.approx(0.95, abs=0.01)


# ------------------------------------------------------------------------------------------------------------ mixtures
@settings(deadline=None, max_examples=25)
@given(st.floats(0.3, 30.0), st.floats(0.3, 30.0), st.integers(1, 12))
def test_survival_of_a_beta_mixture(a: float, b: float, num_steps: int) -> None:
    survival = uncertainty.beta_survival(a, b, num_steps)
    k = np.arange(1, num_steps + 1)
    assert acceptance.conditional_from_survival(survival) == pytest.approx((a + k - 1) / (a + b + k - 1), rel=1e-8)
    # Jensen: a mixture survives better than its mean acceptance.
    assert np.all(survival >= (a / (a + b)) ** k * (1 - 1e-9))
    # Measured without drafting, every prompt has as many cycles as tokens: pooled over cycles is pooled over prompts.
    assert uncertainty.beta_pooled_survival(a, b, num_steps, 0) == pytest.approx(survival, rel=1e-8)
    # Longer drafts give good prompts fewer cycles.
    assert np.all(uncertainty.beta_pooled_survival(a, b, num_steps, 5) <= survival * (1 + 1e-9))


@settings(deadline=None, max_examples=25)
@given(st.floats(0.5, 30.0), st.floats(0.5, 30.0), st.integers(1, 12))
def test_a_curve_pooled_at_the_steps_it_is_used_at_is_right(a: float, b: float, num_steps: int) -> None:
    pooled = acceptance.acceptance_length(uncertainty.beta_pooled_survival(a, b, num_steps, num_steps))
    assert pooled == pytest.approx(uncertainty.beta_length(a, b, num_steps), rel=1e-9)


def test_a_narrow_mixture_is_one_rate() -> None:
    assert uncertainty.beta_length(8e5, 2e5, 5) == pytest.approx(
        float(acceptance.constant_acceptance_length(0.8, 5)), rel=1e-5
    )


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.05, 0.95), min_size=2, max_size=4), st.floats(0.05, 0.95), st.integers(1, 8))
def test_order_in_time_changes_the_long_run_variance_alone(alpha: list[float], stay: float, num_steps: int) -> None:
    moments = uncertainty.modulated_acceptance(alpha, stay, num_steps)
    fair = uncertainty.modulated_acceptance(alpha, 1.0 / len(alpha), num_steps)
    assert (moments.length, moments.variance) == (fair.length, fair.variance)
    assert fair.inflation == pytest.approx(1.0, rel=1e-9)
    assert fair.lag_one == pytest.approx(0.0, abs=1e-12)
    # The long-run variance sums the correlations of all lags, which fall by the chain's factor r.
    r = (len(alpha) * stay - 1.0) / (len(alpha) - 1.0)
    if abs(r) > 1e-6:
        lags = moments.lag_one / r * r ** np.arange(1, 2000)
        assert moments.inflation == pytest.approx(1.0 + 2.0 * lags.sum(), rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(1.0, 1e6), st.floats(-0.9, 0.99))
def test_effective_samples(samples: float, correlation: float) -> None:
    effective = uncertainty.effective_sample_size(samples, correlation)
    assert (effective <= samples) == (correlation >= 0.0) or effective == pytest.approx(samples)
    assert uncertainty.effective_sample_size(effective, -correlation) == pytest.approx(samples, rel=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(1.0, 9.0), st.floats(0.01, 20.0), st.floats(0.001, 0.2))
def test_cycles_for_a_precision_give_it(mean: float, variance: float, relative: float) -> None:
    cycles = uncertainty.cycles_for_precision(mean, variance, relative, 0.95)
    assert 1.959964 * np.sqrt(variance / cycles) == pytest.approx(relative * mean, rel=1e-6)
    assert uncertainty.cycles_for_precision(mean, variance, relative, 0.9) < cycles
    # Tokens of so many cycles vary as much as the time of so many tokens.
    tokens = float(mean * cycles)
    assert 1.959964 * uncertainty.latency_cv(tokens, mean, variance) == pytest.approx(relative, rel=1e-6)
    sd = np.sqrt(uncertainty.cycles_variance(tokens, mean, variance))
    assert sd / (tokens / mean) == pytest.approx(uncertainty.latency_cv(tokens, mean, variance), rel=1e-9)


@pytest.mark.parametrize("batch", [1, 8, 32, 1000])
def test_the_slowest_of_a_batch_is_below_its_bound(batch: int) -> None:
    largest = np.random.default_rng(1).normal(35.0, 2.0, size=(2000, batch)).max(axis=1)
    bound = uncertainty.slowest_of_batch(35.0, 2.0, batch)
    assert largest.mean() <= bound + 4.0 * largest.std() / np.sqrt(2000)
    assert bound <= largest.mean() + 3.0


# ----------------------------------------------------------------------------------------------------------- estimates
def test_the_product_limit_is_kaplan_and_meiers_where_all_draft_alike() -> None:
    accepted = np.random.default_rng(4).integers(0, 6, size=300)
    ours = uncertainty.product_limit(accepted, 5)
    theirs = acceptance.kaplan_meier(np.bincount(accepted, minlength=6))
    for name in ("conditional", "survival", "survival_sd", "length", "length_sd"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name), rel=1e-9)


def test_the_product_limit_where_nothing_survives_or_nothing_is_judged() -> None:
    estimate = uncertainty.product_limit([0, 1, 1, 0], [3, 3, 3, 1])
    assert estimate.conditional.tolist() == [0.5, 0.0, 0.0]
    assert estimate.survival.tolist() == [0.5, 0.0, 0.0]
    assert estimate.survival_sd.tolist() == [0.25, 0.0, 0.0]
    assert (estimate.length, estimate.length_sd) == (1.5, 0.25)


def test_the_product_limit_by_hand() -> None:
    # Position 1: 3 of 4; position 2, of the 2 that accepted one and drafted two: 1.
    estimate = uncertainty.product_limit([1, 2, 1, 0], [1, 2, 2, 2])
    assert estimate.survival.tolist() == [0.75, 0.375]
    variance = 0.375**2 * (0.25 / (0.75 * 4) + 0.5 / (0.5 * 2))
    assert estimate.survival_sd[1] == pytest.approx(np.sqrt(variance), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 3000), min_size=2, max_size=8).filter(any))
def test_jeffreys_posterior_tends_to_the_counts(histogram: list[int]) -> None:
    h = np.array(histogram) * 10_000
    at_least = np.cumsum(h[::-1])[::-1]
    mean, sd = uncertainty.jeffreys_length(at_least[1:], at_least[:-1])
    estimate = acceptance.kaplan_meier(h)
    assert mean == pytest.approx(estimate.length, rel=1e-3)
    assert sd == pytest.approx(estimate.length_sd, rel=2e-2, abs=1e-3)


def test_jeffreys_moments_by_draws() -> None:
    hits, judged = np.array([7.0, 4.0, 1.0]), np.array([9.0, 7.0, 4.0])
    draws = np.random.default_rng(6).beta(hits + 0.5, judged - hits + 0.5, size=(200_000, 3))
    lengths = acceptance.acceptance_length(np.cumprod(draws, axis=1))
    mean, sd = uncertainty.jeffreys_length(hits, judged)
    assert mean == pytest.approx(lengths.mean(), abs=4.0 * sd / np.sqrt(200_000))
    assert sd == pytest.approx(lengths.std(), rel=4.0 / np.sqrt(2 * 200_000) * 1.5)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.05, 0.95), st.integers(1, 10))
def test_the_censored_estimate_finds_its_own_rate(alpha: float, num_steps: int) -> None:
    # In expectation a cycle accepts E[N] - 1 drafts and rejects one unless it accepts all.
    accepted = 1000.0 * float(acceptance.constant_acceptance_length(alpha, num_steps) - 1.0)
    rejected = 1000.0 * (1.0 - alpha**num_steps)
    estimate, sd = uncertainty.censored_acceptance(accepted, rejected)
    assert estimate == pytest.approx(alpha, rel=1e-9)
    # Judged positions a cycle are (1 - a^K) / (1 - a): the Fisher information over a (1 - a).
    judged = 1000.0 * float(acceptance.constant_acceptance_length(alpha, num_steps - 1))
    assert sd == pytest.approx(np.sqrt(alpha * (1.0 - alpha) / judged), rel=1e-9)
    by_moments = closed_forms.break_even_acceptance(accepted / 1000.0 + 1.0, num_steps)
    assert by_moments == pytest.approx(alpha, rel=1e-8)


@settings(deadline=None, max_examples=60)
@given(st.floats(1.0, 9.0), st.floats(1.0, 90.0), st.floats(0.001, 0.5), st.floats(0.001, 0.5), st.floats(-1.0, 1.0))
def test_a_ratio_is_surer_the_more_its_parts_vary_together(a: float, c: float, x: float, y: float, r: float) -> None:
    ratio, sd = uncertainty.ratio_sd((a, c), (x * a, y * c), r)
    assert ratio == pytest.approx(a / c)
    assert sd <= uncertainty.ratio_sd((a, c), (x * a, y * c), -1.0)[1] * (1 + 1e-9)
    assert uncertainty.ratio_sd((a, c), (x * a, y * c), -1.0)[1] == pytest.approx(ratio * (x + y), rel=1e-9)
    assert uncertainty.ratio_sd((a, c), (x * a, x * c), 1.0)[1] == pytest.approx(0.0, abs=1e-7)


@settings(deadline=None, max_examples=60)
@given(st.integers(6, 200), st.integers(1, 4), st.floats(0.01, 10.0))
def test_a_parameter_must_earn_its_keep(observations: int, parameters: int, rss: float) -> None:
    fewer = uncertainty.corrected_aic(rss, observations, parameters)
    more = uncertainty.corrected_aic(rss, observations, parameters + 1)
    plain = observations * np.log(rss / observations) + 2 * parameters
    assert more > fewer > plain


# -------------------------------------------------------------------------------------------------- what to measure
BELIEFS = st.lists(st.tuples(st.floats(-3.0, 3.0), st.floats(0.3, 3.0)), min_size=2, max_size=5)


@settings(deadline=None, max_examples=60)
@given(BELIEFS, st.floats(0.1, 5.0))
def test_no_measurement_is_worth_more_than_knowing_all(rows: list[tuple[float, float]], noise: float) -> None:
    mean, sd = np.array(rows).T
    worth, best = uncertainty.perfect_information(mean, sd)
    one = uncertainty.knowledge_gradient(mean, sd, noise)
    assert np.all(one >= 0.0)
    assert np.all(one <= worth + 1e-9)
    assert np.all(uncertainty.knowledge_gradient(mean, sd, 2.0 * noise) <= one + 1e-12)
    assert np.all(best >= 0.0)
    assert best.sum() == pytest.approx(1.0, rel=1e-6)
    shifted, same = uncertainty.perfect_information(mean + 100.0, sd)
    assert shifted == pytest.approx(worth, abs=1e-6)
    assert same == pytest.approx(best, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(-30.0, 30.0))
def test_expected_excess(z: float) -> None:
    excess = uncertainty.expected_excess(z)
    assert excess >= max(z, 0.0) - 1e-12
    assert excess - uncertainty.expected_excess(-z) == pytest.approx(z, rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.2, 3.0)), min_size=1, max_size=5))
def test_shares_of_a_budget_follow_the_ratio_of_noise_and_distance(rows: list[tuple[float, float]]) -> None:
    distance, sd = np.array(rows).T
    shares = uncertainty.ocba_shares(np.append(-distance, 0.0), np.append(sd, 1.0))
    assert shares.sum() == pytest.approx(1.0)
    others = shares[:-1] / (sd / distance) ** 2
    assert others == pytest.approx(np.full(len(rows), others[0]), rel=1e-9)
    assert shares[-1] == pytest.approx(np.sqrt(np.sum((shares[:-1] / sd) ** 2)), rel=1e-9)


@settings(deadline=None, max_examples=25)
@given(st.integers(2, 8), st.integers(1, 3), st.integers(0, 10_000))
def test_no_design_says_more_than_the_optimal_one(extra: int, coefficients: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(coefficients + extra, coefficients))
    weights = uncertainty.d_optimal_weights(features, tolerance=1e-3)
    assert weights.sum() == pytest.approx(1.0)

    def information(w: np.ndarray) -> float:
        return float(np.linalg.slogdet((features * w[:, None]).T @ features)[1])

    for _ in range(5):
        other = rng.dirichlet(np.ones(len(features)))
        assert information(other) <= information(weights) + coefficients * 1e-3
