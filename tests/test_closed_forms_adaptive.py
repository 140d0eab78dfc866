"""Properties of adaptive lengths: the stopping rule is optimal, adaptation never loses, the oracle bounds both."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import roots_jacobi

from specmodel import acceptance, adaptive, closed_forms

COST = st.floats(0.01, 0.6)


@st.composite
def confidences(draw: st.DrawFn) -> tuple[tuple[float, ...], tuple[float, ...]]:
    kinds = draw(st.integers(1, 3))
    confidence = draw(st.lists(st.floats(0.05, 0.98), min_size=kinds, max_size=kinds))
    weights = draw(st.lists(st.floats(0.1, 1.0), min_size=kinds, max_size=kinds))
    return tuple(confidence), tuple(w / sum(weights) for w in weights)


# ------------------------------------------------------------------------------------------------------------- oracle
def test_the_oracle_at_its_ends() -> None:
    assert adaptive.oracle_speedup([0.0, 1.0, 1.0, 0.5], [0.3, 0.25, 0.0, 1.0]).tolist() == [1.0, 4.0, np.inf, 1.0]
    assert adaptive.oracle_gain(0.3, 0.9) == pytest.approx(1.0 / 0.97 - 1.0)


@settings(deadline=None, max_examples=60)
@given(st.floats(0.01, 0.99), st.floats(0.01, 1.0))
def test_the_oracle_is_never_slower(alpha: float, cost: float) -> None:
    assert adaptive.oracle_gain(alpha, cost) >= -1e-12


# ----------------------------------------------------------------------------------------------------------- stopping
@settings(deadline=None, max_examples=60)
@given(confidences(), COST, st.integers(0, 12))
def test_a_threshold_of_zero_is_a_chain_and_above_one_is_plain_decoding(
    kinds: tuple[tuple[float, ...], tuple[float, ...]], cost: float, max_steps: int
) -> None:
    mean = float(np.dot(*kinds))
    chain = adaptive.stop_by_threshold(*kinds, cost, 0.0, max_steps)
    assert chain.mean_draft_tokens == pytest.approx(max_steps, rel=1e-12)
    assert chain.length == pytest.approx(acceptance.constant_acceptance_length(mean, max_steps), rel=1e-9)
    assert chain.speedup == pytest.approx(closed_forms.walltime_factor(mean, max_steps, cost), rel=1e-9)
    plain = adaptive.stop_by_threshold(*kinds, cost, 1.01, max_steps)
    assert (plain.length, plain.mean_draft_tokens, plain.speedup) == (1.0, 0.0, 1.0)


def best_of_all_policies(
    confidence: tuple[float, ...], probability: tuple[float, ...], cost: float, speedup: float, max_steps: int
) -> float:
    """Largest ``E[tokens] - speedup * E[time]`` over every rule that sees the same, by dynamic programming."""
    mean = float(np.dot(confidence, probability))

    @functools.cache
    def gain(drafted: tuple[int, ...]) -> float:
        if sum(drafted) == max_steps:
            return 0.0
        survival = float(np.prod(np.power(confidence, drafted)))
        later = sum(
            weight * gain((*drafted[:i], drafted[i] + 1, *drafted[i + 1 :])) for i, weight in enumerate(probability)
        )
        return max(0.0, survival * mean - speedup * cost + later)

    return 1.0 - speedup + gain((0,) * len(confidence))


@settings(deadline=None, max_examples=60)
@given(confidences(), COST)
def test_the_rule_beats_every_other_that_sees_the_same(
    kinds: tuple[tuple[float, ...], tuple[float, ...]], cost: float
) -> None:
    rule = adaptive.stop_by_confidence(*kinds, cost, 10)
    # At the optimal ratio the best difference is 0, at any smaller one it is above.
    assert best_of_all_policies(*kinds, cost, rule.speedup, 10) == pytest.approx(0.0, abs=1e-9)
    mean = float(np.dot(*kinds))
    fixed = closed_forms.walltime_factor(mean, np.arange(11), cost).max()
    assert fixed - 1e-9 <= rule.speedup <= adaptive.oracle_speedup(mean, cost) + 1e-9
    for threshold in (0.0, 0.1, 0.3, 0.5, 0.8, 1.0):
        assert adaptive.stop_by_threshold(*kinds, cost, threshold, 10).speedup <= rule.speedup + 1e-9
    assert rule.speedup == pytest.approx(rule.length / (1.0 + cost * rule.mean_draft_tokens), rel=1e-12)


def test_no_confidence_no_draft() -> None:
    assert adaptive.stop_by_confidence((0.0,), (1.0,), 0.1).mean_draft_tokens == 0.0
    assert adaptive.stop_by_confidence((0.2, 0.1), (0.5, 0.5), 0.5).speedup == 1.0


# ---------------------------------------------------------------------------------------------------------- requests
@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.05, 0.98), st.floats(0.1, 5.0)), min_size=1, max_size=6), COST)
def test_a_length_for_each_request_never_loses(rows: list[tuple[float, float]], cost: float) -> None:
    alpha, share = np.array(rows).T
    both = adaptive.request_adaptation(alpha, share, cost)
    assert both.gain >= -1e-12
    each = [float(closed_forms.best_steps(a, cost)[1]) for a in alpha]
    assert both.adaptive == pytest.approx(acceptance.harmonic_mean(each, share), rel=1e-9)
    fixed = [float(closed_forms.walltime_factor(a, both.num_steps, cost)) for a in alpha]
    assert both.fixed == pytest.approx(acceptance.harmonic_mean(fixed, share), rel=1e-9)
    for num_steps in range(8):
        other = closed_forms.walltime_factor(alpha, num_steps, cost)
        assert acceptance.harmonic_mean(other, share) <= both.fixed + 1e-9


def test_requests_that_are_alike_gain_nothing() -> None:
    assert adaptive.request_adaptation([0.8, 0.8], [1.0, 2.0], 0.05).gain == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("a", "b"), [(8.0, 2.0), (4.0, 1.0), (2.0, 0.5), (0.5, 0.5)])
def test_quadrature_over_a_beta_distribution(a: float, b: float) -> None:
    alpha, weight = adaptive.beta_nodes(a, b)
    assert np.all(np.diff(alpha) > 0.0)
    assert weight.sum() == pytest.approx(1.0, rel=1e-12)
    assert weight @ alpha == pytest.approx(a / (a + b), rel=1e-12)
    assert weight @ alpha**2 == pytest.approx(a * (a + 1) / ((a + b) * (a + b + 1)), rel=1e-12)


def test_adaptation_over_a_beta_distribution_by_a_fine_grid() -> None:
    both = adaptive.beta_request_adaptation(8.0, 2.0, 0.1)
    x = (np.arange(100_000) + 0.5) / 100_000
    density = x**7 * (1.0 - x)
    density /= density.sum()
    assert both.adaptive == pytest.approx(1.0 / (density @ (1.0 / closed_forms.best_steps(x, 0.1)[1])), rel=1e-4)
    one = closed_forms.walltime_factor(x, both.num_steps, 0.1)
    assert both.fixed == pytest.approx(1.0 / (density @ (1.0 / one)), rel=1e-8)


@pytest.mark.parametrize(("a", "b"), [(8.0, 2.0), (0.5, 0.5), (0.3, 0.9), (1.0, 1.0), (30.0, 3.0)])
def test_quadrature_nodes_are_those_of_the_jacobi_polynomials(a: float, b: float) -> None:
    alpha, weight = adaptive.beta_nodes(a, b, 24)
    x, w = roots_jacobi(24, b - 1.0, a - 1.0)
    assert alpha == pytest.approx((1.0 + x) / 2.0, rel=1e-9, abs=1e-12)
    assert weight == pytest.approx(w / w.sum(), rel=1e-7, abs=1e-14)
