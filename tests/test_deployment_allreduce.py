"""All-reduce curves as lines of the alpha-beta model: regimes, cutoffs between them, and other numbers of GPUs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmodel.allreduce import AllreduceCurve, Regime, cutoffs, other_width, regimes

SIZES = 2.0 ** np.arange(10, 24)


def curve(time_ms: object, size_bytes: object = SIZES) -> AllreduceCurve:
    return AllreduceCurve(size_bytes=np.asarray(size_bytes, float), time_ms=np.asarray(time_ms, float))


def two_protocols(noise: float = 0.0, seed: int = 0) -> AllreduceCurve:
    """A latency-bound protocol to 128 KiB, and one of three times the latency and a quarter of the cost of a byte."""
    low, high = 0.010 + SIZES * 4e-7, 0.110 + SIZES * 1e-7
    scatter = np.exp(noise * np.random.default_rng(seed).standard_normal(len(SIZES)))
    return curve(np.where(SIZES <= 2**17, low, high) * scatter)


def test_one_line_is_one_regime() -> None:
    [only] = regimes(curve(0.02 + SIZES * 3e-7))
    assert (only.from_bytes, only.to_bytes) == (SIZES[0], SIZES[-1])
    assert only.alpha_ms == pytest.approx(0.02, rel=1e-6)
    assert only.beta_ms_per_byte == pytest.approx(3e-7, rel=1e-6)
    assert only.at(1e6) == pytest.approx(0.32)
    assert cutoffs(curve(0.02 + SIZES * 3e-7)) == ()


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_change_of_protocol_is_found_where_it_is(noise: float) -> None:
    for seed in range(5):
        c = two_protocols(noise, seed)
        low, high = regimes(c)
        assert (low.to_bytes, high.from_bytes) == (2**17, 2**18)
        assert low.beta_ms_per_byte == pytest.approx(4e-7, rel=0.3)
        assert high.beta_ms_per_byte == pytest.approx(1e-7, rel=0.1)
        [(size_bytes, jump)] = cutoffs(c)
        assert size_bytes == 2**17
        # Between the two sizes the lines are 97 to 19 % apart.
        assert 0.1 < jump < 1.2


def test_scatter_alone_is_no_regime() -> None:
    found = [
        len(regimes(curve((0.02 + SIZES * 3e-7) * np.exp(0.03 * np.random.default_rng(s).standard_normal(len(SIZES))))))
        for s in range(20)
    ]
    assert np.mean(np.array(found) == 1) > 0.8


def test_a_kink_without_a_step_is_no_cutoff() -> None:
    """A library that changes its protocol where both take as long."""
    bent = np.minimum(0.010 + SIZES * 4e-7, 0.050 + SIZES * 1e-7)
    assert len(regimes(curve(bent))) == 2
    assert cutoffs(curve(bent)) == ()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_short_curves_have_regimes(count: int) -> None:
    times = [0.02, 0.03, 0.02, 0.5][:count]
    found = regimes(curve(times, SIZES[:count]))
    assert found[0].from_bytes == SIZES[0]
    assert found[-1].to_bytes == SIZES[count - 1]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=14), st.integers(1, 4))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_regimes_cover_the_curve_once_with_no_negative_cost(times: list[float], most: int) -> None:
    c = curve(times, SIZES[: len(times)])
    found = regimes(c, most)
    assert len(found) <= most
    assert found[0].from_bytes == c.size_bytes[0]
    assert found[-1].to_bytes == c.size_bytes[-1]
    for left, right in itertools.pairwise(found):
        assert left.to_bytes < right.from_bytes
    assert all(r.alpha_ms >= 0.0 and r.beta_ms_per_byte >= 0.0 for r in found)
    assert all(np.isfinite(jump) for _, jump in cutoffs(c))


def test_a_wider_ring_has_more_steps_of_smaller_pieces() -> None:
    """From four to eight GPUs: 7/3 of the latency, 7/6 of the time of a byte; and back again."""
    four = curve(0.03 + SIZES * 6e-7)
    eight = other_width(four, 4, 8)
    np.testing.assert_allclose(eight.time_ms, 0.03 * 7 / 3 + SIZES * 6e-7 * (7 / 8) / (3 / 4), rtol=1e-6)
    np.testing.assert_allclose(other_width(eight, 8, 4).time_ms, four.time_ms, rtol=1e-6)
    np.testing.assert_allclose(other_width(four, 4, 4).time_ms, four.time_ms, rtol=1e-9)
    steps = two_protocols(0.02)
    wider = other_width(steps, 2, 8)
    assert np.all(wider.time_ms > steps.time_ms)
    assert [r.to_bytes for r in regimes(wider)] == [r.to_bytes for r in regimes(steps)]


def test_between_measured_sizes_the_curve_is_monotone_where_the_points_are() -> None:
    c = two_protocols()
    at = c.at(np.geomspace(1.0, 1e9, 500))
    assert np.all(np.diff(at) >= -1e-12)
    assert Regime(from_bytes=1, to_bytes=2, alpha_ms=0.5, beta_ms_per_byte=0.25).at(2.0) == 1.0
