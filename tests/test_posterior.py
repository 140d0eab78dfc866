"""Acceptance lengths and times under a mode, their derivatives, and the moments of what is predicted."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specmodel.acceptance import acceptance_length, best_tree, sigmoid, survival_from_conditional
from specmodel.deployment import flattened
from specmodel.model import QUANTITIES
from specmodel.observations import Shape
from specmodel.posterior import Layout, covariance, lengths, parts, residual_means, times
from specmodel.residual import draft_covariance, verify_covariance

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

MODELS = {
    "rich": fitted(
        [plain(), spec(3, 170.0, 2.4), spec(5, 160.0), spec(3, 500.0, 2.4, batch=4), spec(3, 190.0, 2.4, comm="ring")],
        verify=[{"tokens": 4, "time_ms": 11.0, "context_tokens": 2048}],
        draft=[{"num_steps": 5, "time_ms": 4.0}],
        acceptance=[{"num_steps": 4, "drafts": 500, "accepted_per_position": [350, 220, 130, 70]}],
        comm={"ring": {}},
        model={"num_experts": 64, "experts_per_token": 4},
    ),
    "trees": fitted(
        [plain(), spec(3, 150.0, 2.3, topk=4, num_draft_tokens=9), spec(5, 140.0, 2.6, topk=2, num_draft_tokens=8)]
    ),
    "nothing": fitted(),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def layout_of(positions: int = 6, workloads: int = 2) -> tuple[Layout, Any]:
    layout = Layout(num_cost=3, positions=positions, workloads=tuple(f"w{i}" for i in range(workloads)))
    theta = np.random.default_rng(7).normal(0.6, 0.7, size=layout.size)
    return layout, theta


def test_every_parameter_has_its_own_place_and_name(model: Any) -> None:
    layout = model.layout
    places = [*range(layout.num_cost), layout.rank_ratio]
    places += [i for w in range(len(layout.workloads)) for i in range(layout.size)[layout.curve(w)]]
    assert len(set(places)) == len(places)
    assert max(places) == layout.size - 1
    names = layout.names(tuple(f"cost-{i}" for i in range(layout.num_cost)))
    assert len(set(names)) == len(names) == layout.size
    assert model.posteriors[0].theta.shape == (layout.size,)


def test_chains_have_the_length_of_their_survival() -> None:
    layout, theta = layout_of()
    shapes = tuple(Shape(w, k, 1, k + 1) for w in (0, 1) for k in range(7))
    value, _ = lengths(theta, layout, shapes)
    for got, shape in zip(value, shapes, strict=True):
        conditional = sigmoid(theta[layout.curve(shape.workload)])[: shape.num_steps]
        assert np.exp(got) == pytest.approx(acceptance_length(survival_from_conditional(conditional)), rel=1e-12)


def test_past_the_curve_the_last_acceptance_goes_on() -> None:
    layout, theta = layout_of()
    conditional = sigmoid(theta[layout.curve(0)])
    for K in (7, 12, 40, 10_000):
        value, _ = lengths(theta, layout, (Shape(0, K, 1, K + 1),))
        extended = np.concatenate([conditional, np.full(K - 6, conditional[-1])])
        assert np.exp(value[0]) == pytest.approx(acceptance_length(survival_from_conditional(extended)), rel=1e-6)


def test_a_tree_that_is_a_chain_is_as_long_as_the_chain() -> None:
    """Only first ranks fit into K + 1 tokens of depth K when later ranks are hopeless."""
    layout, theta = layout_of()
    theta[layout.rank_ratio] = -20.0
    theta[layout.rank_ratio + 1 : layout.curve(0).start] = 0.0
    value, _ = lengths(theta, layout, (Shape(0, 4, 1, 5), Shape(0, 4, 3, 5)))
    assert value[1] == pytest.approx(value[0], rel=1e-3)


def test_wider_and_larger_trees_accept_no_less() -> None:
    layout, theta = layout_of()
    theta[layout.rank_ratio] = -0.5
    for w in (0, 1):
        sizes, _ = lengths(theta, layout, tuple(Shape(w, 4, 4, n) for n in (3, 5, 9, 17, 33, 65)))
        assert np.all(np.diff(sizes) >= -1e-9)
        widths, _ = lengths(theta, layout, tuple(Shape(w, 4, t, 20) for t in (2, 3, 4, 8)))
        assert np.all(np.diff(widths) >= -1e-9)
        best = best_tree(sigmoid(theta[layout.curve(w)]), float(sigmoid(theta[layout.rank_ratio])), 4, 4, 17)
        assert 1.0 < best.length <= 5.0


SHAPES = [
    Shape(0, 1, 1, 2),
    Shape(1, 6, 1, 7),
    Shape(0, 9, 1, 10),
    Shape(1, 100, 1, 101),
    Shape(0, 3, 4, 9),
    Shape(1, 8, 2, 12),
    Shape(0, 6, 4, 5),
    Shape(0, 2, 16, 64),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_derivatives_of_lengths(shape: Shape) -> None:
    layout, theta = layout_of()
    theta[layout.rank_ratio] = -1.0
    _, gradient = lengths(theta, layout, (shape,))
    h = 1e-6
    slope = [
        (lengths(theta + h * e, layout, (shape,))[0][0] - lengths(theta - h * e, layout, (shape,))[0][0]) / (2 * h)
        for e in np.eye(layout.size)
    ]
    np.testing.assert_allclose(gradient[0], slope, atol=2e-6)


def test_derivatives_of_times(model: Any) -> None:
    post, obs, layout = model.posteriors[0], model.observations, model.layout
    request, _ = model.request(np.array([0, 1, 3, 6]), [[1.0], [4.0]], topk=2, num_draft_tokens=7)
    points, _ = model.deployment.points(request.settings)
    points = flattened(points, request.shape)
    random = np.random.default_rng(1)
    v, d = random.normal(0, 0.1, size=(2, 8))
    theta = post.theta[: layout.num_cost]
    at = parts(theta, points, model.deployment, v, d)
    np.testing.assert_allclose(at.cycle_ms, at.verify_ms + at.draft_ms + at.overhead_ms)
    h = 1e-6
    for i in range(layout.num_cost):
        e = h * np.eye(layout.num_cost)[i]
        up, down = (parts(theta + s * e, points, model.deployment, v, d) for s in (1, -1))
        for name, slope in (("cycle_ms", at.d_log_cycle), ("verify_ms", at.d_log_verify), ("draft_ms", at.d_log_draft)):
            a, b = getattr(up, name), getattr(down, name)
            some = getattr(at, name) > 0
            np.testing.assert_allclose(slope[i][some], (np.log(a[some] / b[some])) / (2 * h), atol=1e-5)
    assert len(obs) == len(obs.source)


def test_residuals_of_measured_points_are_those_of_the_search(model: Any) -> None:
    """At the observed points: the mean of the process is its covariance times what the data pull."""
    post, obs = model.posteriors[0], model.observations
    right = obs.residual_points
    if not len(obs.points):
        assert all(not np.any(mean) for mean in residual_means(post, obs, right))
        return
    verify, draft = residual_means(post, obs, right)
    used = obs.point >= 0
    pulls = [
        np.bincount(obs.point[used], weights=(weight * post.alpha)[used], minlength=len(obs.points))
        for weight in (post.verify_weight, post.draft_weight)
    ]
    np.testing.assert_allclose(verify, pulls[0] @ verify_covariance(right, right, post.residuals), atol=2e-3)
    np.testing.assert_allclose(draft, pulls[1] @ draft_covariance(right, right, post.residuals), atol=2e-3)


def test_times_broadcast_as_they_flatten(model: Any) -> None:
    post, obs, dep = model.posteriors[0], model.observations, model.deployment
    request, _ = model.request(
        np.arange(4).reshape(4, 1, 1), np.array([1.0, 2.0, 8.0]).reshape(3, 1), context_tokens=[100, 5000]
    )
    points, right = dep.points(request.settings)
    broad = times(post, obs, dep, points, right)
    flat = times(post, obs, dep, flattened(points, request.shape), flattened(right, request.shape))
    for a, b in zip(broad, flat, strict=True):
        np.testing.assert_allclose(np.broadcast_to(a, request.shape).ravel(), b, rtol=1e-10)


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_variances_are_the_diagonal_of_the_covariance(model: Any, quantity: str) -> None:
    request, _ = model.request(np.array([1, 3, 3, 6, 9]), np.array([1.0, 1.0, 4.0, 2.0, 64.0]))
    for mode, post in enumerate(model.posteriors):
        ((_, at, right),) = model.moments(mode, request, QUANTITIES[quantity])
        spread = covariance(post, right, at)
        np.testing.assert_allclose(np.diag(spread), at.variance, rtol=1e-7, atol=1e-11)
        np.testing.assert_allclose(spread, spread.T, atol=1e-12)
        assert np.linalg.eigvalsh(spread).min() > -1e-9 * max(1.0, np.abs(spread).max())


def test_the_rate_is_what_its_parts_make_of_it(model: Any) -> None:
    """ln rate = ln length - ln cycle; its variance lies between those of full agreement and full opposition."""
    request, _ = model.request(np.array([2, 5]))
    for mode in range(len(model.posteriors)):
        at = {}
        for name in ("tok_s", "cycle_ms", "acceptance_length"):
            ((_, at[name], _),) = model.moments(mode, request, QUANTITIES[name])
        np.testing.assert_allclose(at["tok_s"].mean, at["acceptance_length"].mean - at["cycle_ms"].mean, atol=1e-12)
        each = np.sqrt([at["cycle_ms"].variance, at["acceptance_length"].variance])
        assert np.all(at["tok_s"].variance <= each.sum(axis=0) ** 2 + 1e-9)
        assert np.all(at["tok_s"].variance >= np.diff(each, axis=0)[0] ** 2 - 1e-9)


def test_a_measured_point_is_known_and_a_far_one_is_as_vague_as_its_prior(model: Any) -> None:
    near, _ = model.request(3)
    far, _ = model.request(3, batch=1e6)
    for mode in range(len(model.posteriors)):
        ((_, here, _),) = model.moments(mode, near)
        ((_, there, _),) = model.moments(mode, far)
        assert 0.0 < here.variance[0] <= here.prior_variance[0]
        assert here.variance[0] < there.variance[0] <= there.prior_variance[0]


def test_draws_have_the_moments_of_the_posterior() -> None:
    model = MODELS["rich"]
    request, _ = model.request(np.arange(5), 1.0, ("default", "ring"))
    draws = np.log(model.draws(request, 40_000))
    assert draws.shape == (40_000, 10)
    mean = sum(w * next(model.moments(m, request))[1].mean for m, w in enumerate(model.weights)) + np.log(1000.0)
    np.testing.assert_allclose(draws.mean(axis=0), mean, atol=0.02)
    assert np.array_equal(model.draws(request, 100), model.draws(request, 100))
    # Candidates of one draw share their parameters: their differences are known better than they are.
    apart = np.var(draws[:, 3] - draws[:, 4])
    assert apart < np.var(draws[:, 3]) + np.var(draws[:, 4])
