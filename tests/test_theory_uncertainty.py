"""Check values on uncertainty and design: ratios, model choice, optimal designs, the worth of a measurement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specmodel import uncertainty


def printed(*texts: str) -> Any:
    """Values as printed: each may be off by half a unit of the last digit of the first."""
    half = 0.5000001 * 10.0 ** -len(texts[0].partition(".")[2])
    values = [float(text) for text in texts]
    return pytest.approx(values if len(values) > 1 else values[0], rel=0, abs=half)


def test_a_ratio_of_correlated_means() -> None:
    ratio, sd = uncertainty.ratio_sd((3.5, 30.0), (0.02, 0.3), 0.5)
    assert ratio == printed(".116667")
    assert sd == printed(".0010138")
    covariance = 0.5 * 0.02 * 0.3
    draws = np.random.default_rng(3).multivariate_normal(
        [3.5, 30.0], [[0.02**2, covariance], [covariance, 0.3**2]], size=200_000
    )
    assert np.std(draws[:, 0] / draws[:, 1]) == pytest.approx(sd, rel=4.0 / np.sqrt(2 * 200_000) + 1e-3)


def test_criterion_for_few_observations() -> None:
    assert uncertainty.corrected_aic(1.2, 8, 3) == printed("-3.17696")
    assert uncertainty.corrected_aic(1.2, 4, 3) == np.inf
    assert uncertainty.corrected_aic(1.2, 3, 3) == np.inf


@pytest.mark.parametrize(
    ("mean", "sd", "value"), [((1.0, 0.0), (2.0, 1.0), ".47981"), ((0.0, 1.0), (2.0, 1.0), ".47981")]
)
def test_perfect_information_on_two(mean: tuple[float, ...], sd: tuple[float, ...], value: str) -> None:
    worth, best = uncertainty.perfect_information(mean, sd)
    assert worth == printed(value)
    spread = np.hypot(*sd)
    assert worth == pytest.approx(spread * uncertainty.expected_excess(-1.0 / spread), rel=1e-9)
    assert best.sum() == pytest.approx(1.0, rel=1e-9)


ALTERNATIVES = ((100.0, 101.0, 99.0), (1.0, 2.0, 4.0))


def test_perfect_information_on_three() -> None:
    worth, best = uncertainty.perfect_information(*ALTERNATIVES)
    assert list(best) == printed(".210", ".508", ".282")
    # The reference draws 1.2226; within four standard errors of its kind of draw.
    assert worth == pytest.approx(1.2226, abs=0.005)
    draws = np.random.default_rng(5).normal(*ALTERNATIVES, size=(200_000, 3)).max(axis=1)
    assert worth == pytest.approx(draws.mean() - 101.0, abs=4.0 * draws.std() / np.sqrt(200_000))


def test_knowledge_gradient_measures_the_uncertain_third() -> None:
    assert list(uncertainty.knowledge_gradient(*ALTERNATIVES, 2.0)) == printed(".00197", ".19964", ".64468")


def test_a_measurement_that_can_say_nothing_is_worth_nothing() -> None:
    assert list(uncertainty.knowledge_gradient((1.0, 2.0), (0.0, 0.0), 0.0)) == [0.0, 0.0]
    assert uncertainty.knowledge_gradient((0.0, 1e6), (1e-3, 1e-3), 1.0) == pytest.approx([0.0, 0.0], abs=1e-300)


def test_knowledge_gradient_by_drawing_the_next_posterior_mean() -> None:
    mean, sd, noise = np.array([1.0, 1.5]), np.array([2.0, 0.5]), 1.0
    spread = sd[0] ** 2 / np.hypot(sd[0], noise)
    after = np.random.default_rng(11).normal(mean[0], spread, size=200_000)
    rise = np.maximum(after, mean[1]) - mean.max()
    expected = uncertainty.knowledge_gradient(mean, sd, noise)[0]
    assert expected == pytest.approx(rise.mean(), abs=4.0 * rise.std() / np.sqrt(len(rise)))


def test_shares_of_a_measuring_budget() -> None:
    shares = uncertainty.ocba_shares((10.0, 9.5, 9.0, 8.0), (1.0, 1.0, 1.5, 1.0))
    assert list(shares) == printed(".397", ".371", ".209", ".023")
    assert shares.sum() == pytest.approx(1.0)


STEPS = np.arange(1.0, 17.0)


@pytest.mark.parametrize(
    ("degree", "design"),
    [(1, {1: 1 / 2, 16: 1 / 2}), (2, {1: 1 / 3, 8: 1 / 6, 9: 1 / 6, 16: 1 / 3})],
    ids=["linear", "quadratic"],
)
def test_optimal_designs_over_step_counts(degree: int, design: dict[int, float]) -> None:
    features = np.vander(STEPS, degree + 1)
    exact = np.array([design.get(int(k), 0.0) for k in STEPS])
    weights = uncertainty.d_optimal_weights(features, tolerance=1e-5)
    assert weights == pytest.approx(exact, abs=2e-3)
    # Kiefer and Wolfowitz: the largest prediction variance is the number of coefficients, reached where measured. The
    # quadratic's middle lies between two step counts, so the even split is optimal to the third digit only.
    assert uncertainty.prediction_variance(features, weights).max() == pytest.approx(degree + 1.0, rel=1e-4)
    assert uncertainty.prediction_variance(features, exact).max() == pytest.approx(degree + 1.0, rel=5e-3)


def test_errors_when_left_out_without_refitting() -> None:
    rng = np.random.default_rng(2)
    design, values = rng.normal(size=(9, 3)), rng.normal(size=9)
    for i, error in enumerate(uncertainty.leave_one_out_errors(design, values)):
        keep = np.arange(9) != i
        coefficients, *_ = np.linalg.lstsq(design[keep], values[keep], rcond=None)
        assert error == pytest.approx(values[i] - design[i] @ coefficients, rel=1e-10)
