"""The residual process: its kernels are covariances, and correlate what should be alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmodel import residual
from specmodel.residual import ResidualPoints, Residuals

SEEDS = st.integers(0, 2**32 - 1)
KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "verify": (residual.verify_covariance, residual.verify_variance),
    "draft": (residual.draft_covariance, residual.draft_variance),
}
MEANS: dict[str, Callable[..., Any]] = {"verify": residual.verify_mean, "draft": residual.draft_mean}


def points(rng: np.random.Generator, size: int) -> ResidualPoints:
    """Random passes of which many share a batch, a setting or a width, some all of them."""
    steps = rng.integers(0, 6, size)
    sequences = rng.choice([1.0, 2.0, 8.0, 32.0], size)
    return ResidualPoints(
        log_tokens=np.log(sequences * (steps + 1.0)),
        log_sequences=np.log(sequences),
        log_context=rng.choice([0.0, 0.0, 1.3], size),
        log_steps=np.log(np.maximum(steps, 0.5)),
        speculating=(steps > 0).astype(float),
        comm=rng.integers(0, 2, size),
        draft_mode=rng.integers(0, 3, size),
        topk=rng.choice([1.0, 4.0], size),
        workload=rng.integers(-1, 2, size),
    )


def scales(rng: np.random.Generator) -> Residuals:
    return Residuals(**{field.name: rng.uniform(0.005, 1.5) for field in fields(Residuals)})


def one(**changes: Any) -> ResidualPoints:
    values: dict[str, Any] = {
        "log_tokens": 1.0, "log_sequences": 0.0, "log_context": 0.0, "log_steps": 0.7, "speculating": 1.0,
        "comm": 0, "draft_mode": 0, "topk": 1.0, "workload": -1,
    }  # fmt: skip
    return ResidualPoints(**{name: np.atleast_1d(value) for name, value in (values | changes).items()})


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=60)
@given(seed=SEEDS)
def test_kernels_are_covariances(name: str, seed: int) -> None:
    covariance, variance = KERNELS[name]
    rng = np.random.default_rng(seed)
    where, scale = points(rng, 25), scales(rng)
    matrix = covariance(where, where, scale)
    assert matrix.shape == (25, 25)
    assert matrix == pytest.approx(matrix.T, rel=1e-14)
    assert np.linalg.eigvalsh(matrix).min() >= -1e-10 * matrix.max()
    assert np.diag(matrix) == pytest.approx(variance(where, scale), rel=1e-12)
    assert np.all(matrix >= 0.0)


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=40)
@given(seed=SEEDS)
def test_covariance_of_two_sets_is_a_block_of_that_of_their_union(name: str, seed: int) -> None:
    covariance, _ = KERNELS[name]
    rng = np.random.default_rng(seed)
    left, right, scale = points(rng, 6), points(rng, 4), scales(rng)
    both = ResidualPoints(
        **{s: np.concatenate([getattr(left, s), getattr(right, s)]) for s in ResidualPoints.__slots__}
    )
    block = covariance(left, right, scale)
    assert block.shape == (6, 4)
    assert np.array_equal(block, covariance(both, both, scale)[:6, 6:])


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, measured=st.integers(0, 9))
def test_the_mean_is_the_weighted_covariance(name: str, seed: int, measured: int) -> None:
    rng = np.random.default_rng(seed)
    left, right, scale = points(rng, measured), points(rng, 20), scales(rng)
    if measured % 3 == 0:
        scale = replace(scale, workload=0.0)
    weights = rng.normal(size=measured) * rng.integers(0, 2, measured)
    expected = weights @ KERNELS[name][0](left, right, scale)
    assert MEANS[name](weights, left, right, scale) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("context", [0.0, 0.7])
@pytest.mark.parametrize("name", KERNELS)
def test_the_mean_over_coordinates_that_broadcast(name: str, context: float) -> None:
    rng = np.random.default_rng(5)
    left, scale = points(rng, 12), scales(rng)
    left = replace(left, log_context=context * left.log_context)
    batch, steps, comm = np.array([1.0, 2.0, 8.0])[:, None], np.arange(6.0), np.array([0, 1])[:, None, None]
    grid = one(
        log_tokens=np.log(batch * (steps + 1.0)), log_sequences=np.log(batch), log_steps=np.log(np.maximum(steps, 0.5)),
        speculating=(steps > 0).astype(float), comm=comm, log_context=np.array([[context]]),
    )  # fmt: skip
    flat = ResidualPoints(**{s: np.broadcast_to(getattr(grid, s), (2, 3, 6)).ravel() for s in ResidualPoints.__slots__})
    weights = rng.normal(size=12)
    mean = np.broadcast_to(MEANS[name](weights, left, grid, scale), (2, 3, 6)).ravel()
    assert mean == pytest.approx(weights @ KERNELS[name][0](left, flat, scale), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("repeated", [True, False], ids=["repeated", "distinct"])
def test_many_points_are_as_few(name: str, repeated: bool) -> None:
    rng = np.random.default_rng(6)
    left, right, scale = points(rng, 5), points(rng, 5000), scales(rng)
    if not repeated:
        right = replace(right, **{s: rng.uniform(size=5000) for s in ("log_tokens", "log_sequences", "log_steps")})
    covariance = KERNELS[name][0]
    whole = covariance(left, right, scale)
    cut = ResidualPoints(**{s: getattr(right, s)[:3000] for s in ResidualPoints.__slots__})
    assert whole[:, :3000] == pytest.approx(covariance(left, cut, scale), rel=1e-14)
    weights = rng.normal(size=5)
    assert MEANS[name](weights, left, right, scale) == pytest.approx(weights @ whole, rel=1e-11, abs=1e-11)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(-5.0, 5.0), min_size=2, max_size=12), st.floats(0.1, 5.0))
def test_the_correlation_falls_with_distance(places: list[float], length: float) -> None:
    x = np.array(places)
    matrix = residual.matern32(x[:, None] - x[None, :], length)
    assert np.linalg.eigvalsh(matrix).min() >= -1e-12
    assert np.diag(matrix) == pytest.approx(np.ones(len(x)))
    along = residual.matern32(np.linspace(0.0, 10.0, 50), length)
    assert np.all(np.diff(along) < 0.0)
    assert np.all(along > 0.0)


def test_matern_correlation_at_its_length() -> None:
    # (1 + sqrt 3) exp(-sqrt 3)
    assert residual.matern32(np.array([0.0, 2.0, -2.0]), 2.0) == pytest.approx([1.0, 0.48335772, 0.48335772], rel=1e-7)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({}, {"tokens", "batch", "batch_speculating", "context", "comm", "configuration"}),
        ({"comm": 1}, {"tokens", "batch", "batch_speculating", "context", "configuration"}),
        ({"topk": 4.0}, {"tokens", "batch", "batch_speculating", "context", "comm"}),
        ({"speculating": 0.0}, {"batch", "context", "comm"}),
        ({"log_sequences": 99.0}, {"tokens", "context", "comm"}),
        ({"log_tokens": 99.0}, {"batch", "batch_speculating", "context"}),
        ({"log_context": 99.0}, {"tokens", "batch", "batch_speculating", "comm"}),
        ({"workload": 0}, {"tokens", "batch", "batch_speculating", "context", "comm", "configuration"}),
    ],
)
def test_what_two_verify_passes_share(change: dict[str, Any], parts: set[str]) -> None:
    scale = scales(np.random.default_rng(0))
    shared = residual.verify_covariance(one(), one(**change), scale)[0, 0]
    assert shared == pytest.approx(sum(getattr(scale, part) ** 2 for part in parts), rel=1e-9)


@pytest.mark.parametrize(("left", "right", "shared"), [(0, 0, True), (0, 1, False), (-1, -1, False), (0, -1, False)])
def test_cycles_of_one_workload_share_more(left: int, right: int, shared: bool) -> None:
    scale = Residuals()
    extra = residual.verify_covariance(one(workload=left), one(workload=right), scale)
    extra = extra - residual.verify_covariance(one(), one(), scale)
    assert extra[0, 0] == pytest.approx(shared * scale.workload**2, rel=1e-9, abs=1e-15)
    nothing = replace(scale, workload=0.0)
    assert np.array_equal(
        residual.verify_covariance(one(workload=left), one(workload=right), nothing),
        residual.verify_covariance(one(), one(), nothing),
    )


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({}, {"draft_steps", "draft_batch", "draft_context", "draft_configuration"}),
        ({"topk": 4.0}, {"draft_batch", "draft_context"}),
        ({"draft_mode": 2}, set()),
        ({"comm": 1}, set()),
        ({"log_steps": 99.0}, {"draft_batch", "draft_context"}),
        ({"log_sequences": 99.0}, {"draft_steps", "draft_context"}),
        ({"log_context": 99.0}, {"draft_steps", "draft_batch"}),
        ({"log_tokens": 99.0}, {"draft_steps", "draft_batch", "draft_context", "draft_configuration"}),
    ],
)
def test_what_two_drafts_share(change: dict[str, Any], parts: set[str]) -> None:
    scale = scales(np.random.default_rng(0))
    shared = residual.draft_covariance(one(), one(**change), scale)[0, 0]
    assert shared == pytest.approx(sum(getattr(scale, part) ** 2 for part in parts), rel=1e-9, abs=1e-12)


def test_plain_passes_share_less_than_speculating_ones() -> None:
    scale = Residuals()
    plain = residual.verify_variance(one(speculating=0.0), scale)
    assert residual.verify_variance(one(), scale) - plain == pytest.approx(scale.batch_speculating**2, rel=1e-9)


def test_a_measured_pass_pins_its_neighbours_and_leaves_the_far_ones() -> None:
    scale = Residuals()
    known = one(log_tokens=np.log(4.0))
    near, far = one(log_tokens=np.log(5.0)), one(log_tokens=np.log(400.0), log_sequences=np.log(100.0))
    variance = residual.verify_variance(known, scale)[0] + 1e-6
    left = {}
    for name, place in (("near", near), ("far", far)):
        shared = residual.verify_covariance(place, known, scale)[0, 0]
        left[name] = residual.verify_variance(place, scale)[0] - shared**2 / variance
    assert 0.0 < left["near"] < 0.5 * left["far"]


@pytest.mark.parametrize("field", [field.name for field in fields(Residuals)])
def test_every_scale_is_used(field: str) -> None:
    rng = np.random.default_rng(2)
    where, scale = points(rng, 20), Residuals()
    other = replace(scale, **{field: 2.0 * getattr(scale, field)})
    assert any(np.any(kernel(where, where, scale) != kernel(where, where, other)) for kernel, _ in KERNELS.values())
