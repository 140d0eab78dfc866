"""Properties of survival curves, acceptance lengths, their estimates and priors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from specmodel import acceptance

PROBABILITY = st.floats(0.0, 1.0)
INSIDE = st.floats(0.001, 0.999)
CURVES = st.lists(PROBABILITY, min_size=1, max_size=12).map(np.array)
INSIDE_CURVES = st.lists(INSIDE, min_size=1, max_size=12).map(np.array)
HISTOGRAMS = st.lists(st.integers(0, 500), min_size=2, max_size=10).filter(any).map(np.array)


# ------------------------------------------------------------------------------------------------ curves and lengths
@settings(deadline=None, max_examples=60)
@given(INSIDE_CURVES)
def test_conditionals_and_survival_are_two_forms_of_one_curve(conditional: np.ndarray) -> None:
    survival = acceptance.survival_from_conditional(conditional)
    assert np.all(np.diff(survival) <= 0.0)
    assert acceptance.conditional_from_survival(survival) == pytest.approx(conditional, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(CURVES)
def test_where_nothing_survives_the_conditional_is_zero(conditional: np.ndarray) -> None:
    survival = acceptance.survival_from_conditional(np.append(conditional, [0.0, 0.7]))
    again = acceptance.conditional_from_survival(survival)
    assert again[-1] == again[-2] == 0.0
    assert acceptance.survival_from_conditional(again) == pytest.approx(survival, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(CURVES)
def test_lengths_for_every_step_count(conditional: np.ndarray) -> None:
    lengths = acceptance.acceptance_lengths(conditional)
    steps = np.arange(len(lengths))
    assert lengths[0] == 1.0
    assert np.all((lengths >= 1.0) & (lengths <= steps + 1.0 + 1e-12))
    gains = np.diff(lengths)
    assert np.all((gains >= 0.0) & (gains <= 1.0 + 1e-12))
    assert np.all(np.diff(gains) <= 1e-12)  # concave
    survival = acceptance.survival_from_conditional(conditional)
    assert lengths[-1] == pytest.approx(acceptance.acceptance_length(survival), rel=1e-14)


@settings(deadline=None, max_examples=60)
@given(CURVES, st.integers(0, 11), PROBABILITY)
def test_the_length_rises_with_each_conditional(conditional: np.ndarray, position: int, other: float) -> None:
    i = position % len(conditional)
    higher = conditional.copy()
    higher[i] = max(conditional[i], other)
    assert np.all(acceptance.acceptance_lengths(higher) >= acceptance.acceptance_lengths(conditional) - 1e-12)


def test_curves_of_many_workloads_at_once() -> None:
    conditional = np.random.default_rng(0).uniform(size=(4, 3, 6))
    survival = acceptance.survival_from_conditional(conditional)
    lengths = acceptance.acceptance_lengths(conditional)
    assert lengths.shape == (4, 3, 7)
    for i in np.ndindex(4, 3):
        assert lengths[i] == pytest.approx(acceptance.acceptance_lengths(conditional[i]), rel=1e-15)
        assert acceptance.conditional_from_survival(survival)[i] == pytest.approx(conditional[i], rel=1e-12)
        assert acceptance.acceptance_variance(survival)[i] == pytest.approx(
            acceptance.acceptance_variance(survival[i]), rel=1e-12
        )


@settings(deadline=None, max_examples=60)
@given(CURVES)
def test_variance_is_that_of_the_distribution(conditional: np.ndarray) -> None:
    survival = acceptance.survival_from_conditional(conditional)
    probability = -np.diff(np.concatenate([[1.0], survival, [0.0]]))
    tokens = np.arange(1, len(survival) + 2)
    mean = probability @ tokens
    assert acceptance.acceptance_length(survival) == pytest.approx(mean, rel=1e-12)
    expected = probability @ (tokens - mean) ** 2
    assert acceptance.acceptance_variance(survival) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.0, 1.0), st.integers(0, 40))
def test_one_rate_at_every_position(alpha: float, num_steps: int) -> None:
    expected = 1.0 + np.sum(alpha ** np.arange(1.0, num_steps + 1))
    assert acceptance.constant_acceptance_length(alpha, num_steps) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("gap", [0.0, 1e-15, 1e-13, 1e-11, 1e-9, 1e-6])
def test_one_rate_close_to_certainty(gap: float) -> None:
    K = 100
    expected = K + 1 - gap * K * (K + 1) / 2  # to first order
    assert acceptance.constant_acceptance_length(1.0 - gap, K) == pytest.approx(expected, rel=1e-7)


def test_one_rate_broadcasts() -> None:
    lengths = acceptance.constant_acceptance_length(np.array([[0.0], [0.5], [1.0]]), np.arange(3))
    assert lengths.tolist() == [[1.0, 1.0, 1.0], [1.0, 1.5, 1.75], [1.0, 2.0, 3.0]]


@settings(deadline=None, max_examples=60)
@given(st.floats(-15.0, 15.0))
def test_logit_and_sigmoid_are_inverse(x: float) -> None:
    assert acceptance.logit(acceptance.sigmoid(x)) == pytest.approx(x, rel=1e-8, abs=1e-8)


def test_logit_of_certainty_is_finite() -> None:
    assert acceptance.logit([0.0, 0.5, 1.0]) == pytest.approx([-20.723, 0.0, 20.723], abs=1e-3)
    assert np.all(np.diff(acceptance.sigmoid(np.linspace(-800.0, 800.0, 33))) >= 0.0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-4.0, 4.0), min_size=1, max_size=10).map(np.array))
def test_gradient_of_the_log_length(logits: np.ndarray) -> None:
    value, gradient = acceptance.log_length_gradient(acceptance.sigmoid(logits))
    assert value == pytest.approx(np.log(acceptance.acceptance_lengths(acceptance.sigmoid(logits))), rel=1e-12)
    step = 1e-5
    for k in range(len(logits)):
        move = step * np.eye(len(logits))[k]
        up = acceptance.log_length_gradient(acceptance.sigmoid(logits + move))[0]
        down = acceptance.log_length_gradient(acceptance.sigmoid(logits - move))[0]
        assert gradient[:, k] == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-9)
    steps, positions = np.indices(gradient.shape)
    assert np.all(gradient[positions >= steps] == 0.0)


# ------------------------------------------------------------------------------------ drafts that are not always made
REACHES = st.lists(st.floats(0.05, 1.0), min_size=10, max_size=10).map(lambda r: np.minimum.accumulate(np.array(r)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-4.0, 4.0), min_size=1, max_size=10).map(np.array), REACHES)
def test_gradient_where_drafts_are_not_always_made(logits: np.ndarray, reach: np.ndarray) -> None:
    n = len(logits)
    conditional = acceptance.sigmoid(logits)
    value, gradient = acceptance.log_length_gradient(conditional, reach[:n])
    expected = 1.0 + np.concatenate([[0.0], np.cumsum(reach[:n] * np.cumprod(conditional))])
    assert np.exp(value) == pytest.approx(expected, rel=1e-12)
    assert np.all(value <= acceptance.log_length_gradient(conditional)[0] + 1e-12)
    assert acceptance.log_length_gradient(conditional, np.ones(n))[0] == pytest.approx(
        acceptance.log_length_gradient(conditional)[0], rel=1e-14
    )
    step = 1e-5
    for k in range(n):
        move = step * np.eye(n)[k]
        up = acceptance.log_length_gradient(acceptance.sigmoid(logits + move), reach[:n])[0]
        down = acceptance.log_length_gradient(acceptance.sigmoid(logits - move), reach[:n])[0]
        assert gradient[:, k] == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("drafted", "drafts", "reach"),
    [
        ((800, 600, 300), 1000, (0.8, 0.6, 0.3)),
        ((800, 600), 1000, (0.8, 0.6, 0.6)),  # what is not known goes on
        ((800, 600, 300, 200, 100), 1000, (0.8, 0.6, 0.3)),
        ((800, 900, 300), 1000, (0.8, 0.8, 0.3)),  # never more than the position before
        ((1200, 1000, 0), 1000, (1.0, 1.0, 1e-6)),
    ],
)
def test_reach_from_counts(drafted: tuple[int, ...], drafts: int, reach: tuple[float, ...]) -> None:
    assert acceptance.reach_of(drafted, drafts, 3) == pytest.approx(reach, rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(REACHES, st.integers(0, 20))
def test_drafts_made_on_average(reach: np.ndarray, num_steps: int) -> None:
    whole = np.append(reach, np.full(10, reach[-1]))
    drafts = acceptance.mean_drafts(reach, np.array([num_steps, num_steps + 1]))
    assert drafts == pytest.approx(
        [whole[:num_steps].sum(), np.append(whole, reach[-1])[: num_steps + 1].sum()], rel=1e-12
    )
    assert drafts[0] <= num_steps
    assert acceptance.mean_drafts(np.ones(3), 7.5) == pytest.approx(7.5)


# -------------------------------------------------------------------------------------------------- means and mixtures
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(1.0, 10.0), st.floats(0.01, 10.0)), min_size=1, max_size=8))
def test_the_harmonic_mean_lies_below_the_arithmetic_and_within_its_values(rows: list[tuple[float, float]]) -> None:
    values, weights = np.array(rows).T
    mean = acceptance.harmonic_mean(values, weights)
    assert values.min() - 1e-9 <= mean <= np.average(values, weights=weights) + 1e-9
    assert acceptance.harmonic_mean(3.0 * values, 7.0 * weights) == pytest.approx(3.0 * mean, rel=1e-12)
    assert acceptance.mixture_length(values, weights) == pytest.approx(mean, rel=1e-12)
    # Tokens over cycles, when each workload emits tokens by its weight.
    assert mean == pytest.approx(weights.sum() / np.sum(weights / values), rel=1e-12)


def test_mixtures_of_whole_curves() -> None:
    lengths = np.array([[1.0, 1.8, 2.4], [1.0, 1.5, 1.6]])
    mixed = acceptance.mixture_length(lengths, [3.0, 1.0])
    assert mixed == pytest.approx([acceptance.harmonic_mean(column, [3.0, 1.0]) for column in lengths.T], rel=1e-14)


@settings(deadline=None, max_examples=60)
@given(st.floats(1.0, 1e6), st.floats(1.0, 1e4), st.floats(0.0, 1.0))
def test_counts_are_never_worth_more_than_independent_ones(drafts: float, prompts: float, icc: float) -> None:
    effect = acceptance.design_effect(drafts, prompts, icc)
    assert effect >= 1.0
    assert effect == pytest.approx(max(1.0 + (drafts / prompts - 1.0) * icc, 1.0), rel=1e-12)


# ---------------------------------------------------------------------------------------------------------- estimates
@settings(deadline=None, max_examples=60)
@given(HISTOGRAMS)
def test_a_histogram_gives_its_own_frequencies(histogram: np.ndarray) -> None:
    estimate = acceptance.kaplan_meier(histogram)
    n, K = histogram.sum(), len(histogram) - 1
    frequency = np.array([histogram[k:].sum() / n for k in range(1, K + 1)])
    assert estimate.survival == pytest.approx(frequency, rel=1e-12)
    assert acceptance.survival_from_conditional(estimate.conditional) == pytest.approx(frequency, rel=1e-9, abs=1e-12)
    mean = 1.0 + histogram @ np.arange(K + 1) / n
    assert estimate.length == pytest.approx(mean, rel=1e-12)
    variance = histogram @ (1.0 + np.arange(K + 1) - mean) ** 2 / n
    assert estimate.length_sd == pytest.approx(np.sqrt(variance / n), rel=1e-6, abs=1e-7)
    assert estimate.survival_sd == pytest.approx(np.sqrt(frequency * (1.0 - frequency) / n), rel=1e-9, abs=1e-9)


@settings(deadline=None, max_examples=60)
@given(HISTOGRAMS)
def test_twice_the_counts_say_the_same_more_surely(histogram: np.ndarray) -> None:
    once, twice = acceptance.kaplan_meier(histogram), acceptance.kaplan_meier(2 * histogram)
    assert twice.survival == pytest.approx(once.survival, rel=1e-12)
    assert twice.length_sd == pytest.approx(once.length_sd / np.sqrt(2.0), rel=1e-9, abs=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.1, 10.0)), min_size=1, max_size=12))
def test_the_monotone_fit_is_the_least_squares_one(rows: list[tuple[float, float]]) -> None:
    values, weights = np.array(rows).T
    fitted = acceptance.monotone(values, weights)
    assert np.all(np.diff(fitted) <= 0.0)
    assert fitted == pytest.approx(
        isotonic_regression(values, weights=weights, increasing=False).x, rel=1e-9, abs=1e-12
    )
    assert np.average(fitted, weights=weights) == pytest.approx(
        np.average(values, weights=weights), rel=1e-9, abs=1e-12
    )
    assert acceptance.monotone(fitted, weights) == pytest.approx(fitted, rel=1e-12, abs=1e-15)


# --------------------------------------------------------------------------------------------------------------- prior
@pytest.mark.parametrize(
    "method", ["eagle3", "eagle", "mtp", "draft_model", "ngram", "parallel", "none", None, "other"]
)
def test_the_prior_of_every_kind_of_drafter_is_a_distribution(method: str | None) -> None:
    prior = acceptance.prior_of(method)
    mean, covariance = prior.mean(12), prior.covariance(12)
    assert mean.shape == (12,)
    assert covariance == pytest.approx(covariance.T)
    assert np.linalg.eigvalsh(covariance).min() > 0.0
    assert np.all(np.diff(np.diag(covariance)) > 0.0)  # later positions are less sure
    assert mean[0] == prior.level
    assert covariance[0, 0] == pytest.approx(prior.level_sd**2)
    assert 0.0 <= prior.shared < 1.0
    assert prior.mean(5) == pytest.approx(mean[:5])
    assert prior.covariance(5) == pytest.approx(covariance[:5, :5])


def test_priors_follow_the_kind_of_drafter() -> None:
    usual = acceptance.prior_of("eagle3").mean(8)
    assert acceptance.prior_of("mtp").mean(8) == pytest.approx(usual)
    assert np.all(np.diff(usual) < 0.0)
    assert np.all(np.diff(acceptance.prior_of("parallel").mean(8)) < np.diff(usual))  # falls faster
    assert np.all(np.diff(acceptance.prior_of("ngram").mean(8)) > 0.0)  # what matched keeps matching
