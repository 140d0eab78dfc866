"""Properties of the closed forms of constant acceptance and linear cost, against scans and against each other."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specmodel import acceptance, adaptive, closed_forms, verify_forms

ALPHA = st.floats(0.01, 0.99)
COST = st.floats(0.005, 1.2)
STEPS = st.integers(0, 30)


# ------------------------------------------------------------------------------------------------ one acceptance rate
@settings(deadline=None, max_examples=60)
@given(st.floats(0.0, 1.0), STEPS)
def test_the_variance_agrees_with_that_of_the_survival(alpha: float, num_steps: int) -> None:
    expected = acceptance.acceptance_variance(alpha ** np.arange(1.0, num_steps + 1))
    variance = closed_forms.constant_acceptance_variance(alpha, num_steps)
    assert variance == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert variance >= -1e-12


@pytest.mark.parametrize("gap", [1e-12, 1e-9, 1e-6, 0.0099, 0.0101])
def test_the_variance_keeps_its_digits_close_to_certainty(gap: float) -> None:
    with mpmath.workdps(60):
        a, n = mpmath.mpf(1.0 - gap), 21
        exact = (a * (1 - a ** (2 * n - 1)) - (2 * n - 1) * a**n * (1 - a)) / (1 - a) ** 2
        assert closed_forms.constant_acceptance_variance(1.0 - gap, 20) == pytest.approx(float(exact), rel=1e-10)


def test_the_variance_of_many_at_once() -> None:
    alpha, steps = np.array([[0.3], [0.995], [1.0]]), np.array([0, 3, 8])
    together = closed_forms.constant_acceptance_variance(alpha, steps)
    for i, j in np.ndindex(3, 3):
        assert together[i, j] == closed_forms.constant_acceptance_variance(alpha[i, 0], steps[j])
    assert np.all(together[2] == 0.0)


@settings(deadline=None, max_examples=60)
@given(ALPHA, st.integers(1, 30), st.floats(0.0, 2.0))
def test_speed_and_arithmetic_of_a_chain(alpha: float, num_steps: int, cost: float) -> None:
    length = 1.0 + np.sum(alpha ** np.arange(1.0, num_steps + 1))
    speedup = closed_forms.walltime_factor(alpha, num_steps, cost)
    assert speedup == pytest.approx(length / (1.0 + cost * num_steps), rel=1e-12)
    operations = closed_forms.operation_factor(alpha, num_steps, cost)
    assert operations == pytest.approx(((1.0 + cost) * num_steps + 1.0) / length, rel=1e-12)
    assert operations >= 1.0
    assert length <= closed_forms.oracle_tokens(alpha) * (1 + 1e-12)


def test_plain_decoding_is_the_unit() -> None:
    assert np.all(closed_forms.walltime_factor([0.0, 0.5, 1.0], 0, 0.3) == 1.0)
    assert np.all(closed_forms.operation_factor([0.0, 0.5, 1.0], 0, 0.3) == 1.0)
    assert closed_forms.oracle_tokens(1.0) == np.inf


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.001, 1.0), min_size=2, max_size=8), st.data(), st.floats(0.05, 1.0))
def test_acceptance_is_the_overlap_of_the_distributions(weights: list[float], data: st.DataObject, l: float) -> None:  # noqa: E741
    p = np.array(weights) / np.sum(weights)
    others = data.draw(st.lists(st.floats(0.001, 1.0), min_size=len(p), max_size=len(p)))
    q = np.array(others) / np.sum(others)
    alpha = closed_forms.overlap_acceptance(p, q)
    assert alpha == pytest.approx(1.0 - 0.5 * np.abs(p - q).sum(), rel=1e-12)
    assert alpha == pytest.approx(closed_forms.overlap_acceptance(q, p), rel=1e-12)
    assert alpha - 1e-12 <= closed_forms.overlap_acceptance(p, q, l) <= 1.0 + 1e-12
    assert list(closed_forms.overlap_acceptance(np.stack([p, q]), q)) == pytest.approx([float(alpha), 1.0], rel=1e-12)


# --------------------------------------------------------------------------------------------------------- break-even
@settings(deadline=None, max_examples=60)
@given(st.floats(0.0, 1.0), st.integers(1, 40))
def test_break_even_is_the_inverse_of_the_length(alpha: float, num_steps: int) -> None:
    length = acceptance.constant_acceptance_length(alpha, num_steps)
    root = closed_forms.break_even_acceptance(length, num_steps)
    assert acceptance.constant_acceptance_length(root, num_steps) == pytest.approx(length, rel=1e-10)


@settings(deadline=None, max_examples=60)
@given(st.floats(1.0, 30.0), st.integers(1, 29))
def test_more_steps_need_less_acceptance(cycle_ratio: float, num_steps: int) -> None:
    fewer, more, endless = closed_forms.break_even_acceptance(cycle_ratio, [num_steps, num_steps + 1, np.inf])
    assert np.isnan(fewer) == (cycle_ratio > num_steps + 1)
    if not np.isnan(fewer):
        assert endless - 1e-12 <= more <= fewer + 1e-12


def test_break_even_of_what_cannot_lose_or_win() -> None:
    needed = closed_forms.break_even_acceptance([0.5, 1.0, 3.0, 3.001, 1.0, 2.0], [2, 2, 2, 2, 0, 0])
    assert needed[[0, 1, 2, 4]] == pytest.approx([0.0, 0.0, 1.0, 0.0], abs=1e-11)
    assert np.all(np.isnan(needed[[3, 5]]))


@settings(deadline=None, max_examples=60)
@given(ALPHA, st.integers(1, 20), COST)
def test_above_break_even_is_faster_than_plain(alpha: float, num_steps: int, cost: float) -> None:
    needed = float(closed_forms.break_even_acceptance(1.0 + cost * num_steps, num_steps))
    speedup = closed_forms.walltime_factor(alpha, num_steps, cost)
    assume(np.isnan(needed) or abs(alpha - needed) > 1e-9)
    assert (speedup > 1.0) == (not np.isnan(needed) and alpha > needed)


@settings(deadline=None, max_examples=60)
@given(*[st.floats(0.1, 100.0)] * 3, st.floats(1.0, 8.0))
def test_time_per_token_and_the_overhead_it_implies(
    draft: float, verify: float, overhead: float, length: float
) -> None:
    total = closed_forms.time_per_token_ms(draft, verify, overhead, length)
    assert total == pytest.approx((draft + verify + overhead) / length, rel=1e-12)
    assert closed_forms.implied_overhead_ms(total, draft, verify, length) == pytest.approx(overhead, rel=1e-9)


# ------------------------------------------------------------------------------------------------------------ optimum
@settings(deadline=None, max_examples=60)
@given(ALPHA, COST)
def test_the_best_whole_steps_are_those_of_a_scan(alpha: float, cost: float) -> None:
    scan = closed_forms.walltime_factor(alpha, np.arange(400), cost)
    steps, speedup = closed_forms.best_steps(alpha, cost)
    assert speedup == pytest.approx(scan.max(), rel=1e-12)
    assert scan[int(steps)] == pytest.approx(scan.max(), rel=1e-12)
    assume(abs(alpha - cost) > 1e-6)
    assert (speedup > 1.0 + 1e-12) == closed_forms.gain_possible(alpha, cost)
    if closed_forms.gain_possible(alpha, cost):
        assert speedup >= closed_forms.least_gain(alpha, cost) - 1e-12
        assert closed_forms.least_gain(alpha, cost) == pytest.approx(scan[1], rel=1e-12)
    assert speedup <= adaptive.oracle_speedup(alpha, cost) + 1e-12 or cost > 1.0


@settings(deadline=None, max_examples=60)
@given(ALPHA, COST)
def test_the_real_optimum_bounds_every_whole_one(alpha: float, cost: float) -> None:
    steps, speedup = closed_forms.continuous_best_steps(alpha, cost)
    K = np.linspace(0.0, 60.0, 601)
    assert np.all(closed_forms.walltime_factor(alpha, K, cost) <= speedup * (1 + 1e-12))
    assert closed_forms.walltime_factor(alpha, steps, cost) == pytest.approx(speedup, rel=1e-9)


@pytest.mark.parametrize(
    ("alpha", "cost"),
    [
        *[(0.999999, 1e-6), (0.5, 0.499999), (0.9, 1e-6), (1 - 1e-9, 0.999), (0.2, 1e-4), (0.99, 0.98), (0.9, 1e-290)],
        *[(0.3, 0.0020), (0.3, 0.0021), (1 - 1e-5, 0.09), (1 - 1e-5, 0.11)],  # both sides of the changes of method
    ],
)
def test_the_real_optimum_keeps_its_digits_at_extremes(alpha: float, cost: float) -> None:
    with mpmath.workdps(350):
        a, c = mpmath.mpf(alpha), mpmath.mpf(cost)
        log_a = -mpmath.log(a)
        y = b = 1 + log_a * (1 - c) / c
        for _ in range(200):  # Newton on y - ln y = b from the right
            y = y - (y - mpmath.log(y) - b) * y / (y - 1) if y > 1 else mpmath.mpf(2) * b
        expected = float((y - 1) / log_a - 1 / c), float(log_a / (c * (1 - a) * y))
    assert closed_forms.continuous_best_steps(alpha, cost) == (
        pytest.approx(expected[0], rel=1e-9),
        pytest.approx(expected[1], rel=1e-12),
    )


def test_optimum_where_every_step_pays_or_none() -> None:
    alpha = np.array([1.0, 0.5, 0.0, 0.5, 1.0, 0.0, 1.0, 0.4])
    cost = np.array([0.1, 0.0, 0.1, 0.7, 1.0, 0.0, 0.0, 1.5])
    steps, speedup = closed_forms.best_steps(alpha, cost)
    assert steps.tolist() == [np.inf, np.inf, 0.0, 0.0, 0.0, 0.0, np.inf, 0.0]
    assert speedup.tolist() == pytest.approx([10.0, 2.0, 1.0, 1.0, 1.0, 1.0, np.inf, 1.0])
    assert closed_forms.continuous_best_steps(alpha, cost)[0].tolist() == steps.tolist()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=15), st.floats(0.5, 3.0), st.data())
def test_convex_cost_gives_one_peak_and_the_first_stop_finds_it(
    conditional: list[float], base: float, data: st.DataObject
) -> None:
    lengths = acceptance.acceptance_lengths(conditional)
    rises = data.draw(st.lists(st.floats(0.01, 1.0), min_size=len(conditional), max_size=len(conditional)))
    cycle = base + np.concatenate([[0.0], np.cumsum(np.sort(rises))])
    assert closed_forms.marginals_fall(lengths, cycle)
    ratio = lengths / cycle
    assert ratio[closed_forms.first_stop(lengths, cycle)] == pytest.approx(ratio.max(), rel=1e-12)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.01, 2.0)), min_size=1, max_size=15), st.floats(-5.0, 50.0))
def test_any_cost_is_settled_by_a_scan_or_by_dinkelbach(rows: list[tuple[float, float]], start: float) -> None:
    conditional, rises = np.array(rows).T
    lengths = acceptance.acceptance_lengths(conditional)
    cycle = 1.0 + np.concatenate([[0.0], np.cumsum(rises)])
    ratio = lengths / cycle
    stop = closed_forms.first_stop(lengths, cycle)
    assert np.all(np.diff(ratio[: stop + 1]) >= 0.0)
    assert stop == len(ratio) - 1 or ratio[stop + 1] < ratio[stop]
    optimum = closed_forms.dinkelbach(lengths, cycle, start)
    assert optimum.ratio == pytest.approx(ratio.max(), rel=1e-12)
    assert ratio[optimum.index] == optimum.ratio
    reached = ratio[list(optimum.path[:-1])]
    assert np.all(np.diff(reached) > 0.0)
    assert len(optimum.path) <= 12  # superlinear


# ------------------------------------------------------------------------------------------------------------- batch
@settings(deadline=None, max_examples=60)
@given(ALPHA, st.integers(1, 12), st.integers(1, 64))
def test_lock_step_loses_and_the_longest_gains_with_the_batch(alpha: float, num_steps: int, batch: int) -> None:
    survival = alpha ** np.arange(1, num_steps + 1)
    ragged = acceptance.acceptance_length(survival)
    together = closed_forms.lock_step_length(alpha, num_steps, [1, batch, batch + 1])
    assert together[0] == pytest.approx(ragged, rel=1e-12)
    assert 1.0 <= together[2] <= together[1] <= ragged + 1e-12
    longest = closed_forms.longest_length(survival, [1, batch, batch + 1])
    assert longest[0] == pytest.approx(ragged, rel=1e-12)
    assert ragged - 1e-12 <= longest[1] <= longest[2] <= num_steps + 1.0


@settings(deadline=None, max_examples=60)
@given(ALPHA, st.integers(0, 12), st.floats(1.0, 400.0), st.floats(16.0, 512.0), st.floats(0.001, 0.3))
def test_the_knee_makes_speculation_pay_less_with_the_batch(
    alpha: float, num_steps: int, batch: float, knee: float, cost: float
) -> None:
    speedup = verify_forms.hinge_speedup(alpha, num_steps, [batch, 2.0 * batch], knee, cost)
    free = closed_forms.walltime_factor(alpha, num_steps, cost)
    assert speedup[0] <= free + 1e-12 or batch > knee
    if batch >= knee:  # compute-bound throughout: every verified token is paid for
        assert np.all(speedup <= 1.0 + 1e-12)
    if 2.0 * batch * (num_steps + 1) <= knee:
        assert list(speedup) == pytest.approx([float(free)] * 2, rel=1e-12)
    if 2.0 * batch <= knee:
        assert speedup[1] <= speedup[0] + 1e-12


@settings(deadline=None, max_examples=60)
@given(ALPHA, st.integers(1, 200), st.integers(16, 512))
def test_the_fill_rule_is_the_scan_for_cheap_drafts(alpha: float, batch: int, knee: int) -> None:
    steps = float(verify_forms.fill_rule_steps(alpha, batch, knee, 0.001))
    scan = verify_forms.hinge_speedup(alpha, np.arange(800), batch, knee, 0.001)
    # Where the batch divides the knee the pass is filled exactly; else a step past the knee is paid for in part only.
    if knee % batch == 0:
        assert verify_forms.hinge_speedup(alpha, steps, batch, knee, 0.001) == pytest.approx(scan.max(), rel=1e-9)
    assert batch <= batch * (steps + 1) <= max(knee, batch)


# ----------------------------------------------------------------------------------------------------------- ceilings
@settings(deadline=None, max_examples=60)
@given(ALPHA, st.floats(0.01, 0.5), st.floats(0.0, 1.0))
def test_choosing_steps_again_never_loses(alpha: float, cost: float, kept: float) -> None:
    steps, now = closed_forms.best_steps(alpha, cost)
    cheaper = kept * cost
    fixed = closed_forms.walltime_factor(alpha, steps, cheaper)
    share = (cost - cheaper) * steps / (1.0 + cost * steps)
    assert now * closed_forms.amdahl_ceiling(share) == pytest.approx(fixed, rel=1e-12)
    assert closed_forms.best_steps(alpha, cheaper)[1] >= fixed - 1e-12
    assert fixed >= now - 1e-12


@settings(deadline=None, max_examples=60)
@given(ALPHA, st.integers(0, 20), st.floats(0.1, 50.0), st.floats(0.1, 50.0))
def test_other_ceilings(alpha: float, num_steps: int, draft: float, verify: float) -> None:
    length = acceptance.constant_acceptance_length(alpha, num_steps)
    assert closed_forms.acceptance_ceiling(length, num_steps) * length == pytest.approx(num_steps + 1.0, rel=1e-12)
    gain = closed_forms.overlap_ceiling(draft, verify)
    assert gain == pytest.approx((draft + verify) / max(draft, verify), rel=1e-12)
    assert 1.0 <= gain <= 2.0
    assert closed_forms.amdahl_ceiling(1.0) == np.inf
