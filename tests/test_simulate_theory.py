"""The simulator against closed forms: within four standard errors over many requests (theory of renewal, mixing,
correlation, adaptive lengths and queues)."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmodel.acceptance import acceptance_variance, cycles_for_tokens, design_effect, harmonic_mean
from specmodel.adaptive import beta_nodes, beta_request_adaptation, oracle_speedup, request_adaptation
from specmodel.closed_forms import best_steps, constant_acceptance_length, constant_acceptance_variance, walltime_factor
from specmodel.simulate.classes import BUCKETS_BITS, AcceptanceClasses, accepted, classes_of, lookup_of
from specmodel.simulate.costs import Prefill
from specmodel.simulate.randoms import chances, fractions, next_words, request_random
from specmodel.simulate.rounds import Outcome, run_block
from specmodel.uncertainty import beta_length, beta_pooled_survival, cycles_variance, modulated_acceptance


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cases = loaded("simulate_cases")
within = cases.within


def words(count: int, seed: int = 1) -> np.ndarray:
    return request_random(seed, 9).integers(0, 2**64, size=count, dtype=np.uint64)


def tokens_a_cycle(outcome: Outcome) -> np.ndarray:
    """Of each lane, what its cycles had accepted, the part beyond the ends of outputs counted."""
    decoded = outcome.tokens - outcome.finish_ms.shape[1] + outcome.overshoot.sum(axis=1)
    return np.asarray(decoded / outcome.request_rounds)


# ------------------------------------------------------------------------------------------------------ random numbers
def test_the_words_of_a_request_are_uniform_and_independent() -> None:
    state = words(200_000)
    out, spare = np.empty_like(state), np.empty_like(state)
    first = fractions(next_words(state, out, spare))
    low = chances(out)
    second = fractions(next_words(state, out, spare))
    n = len(first)
    for x in (first, low, second):
        counts = np.bincount((x * 64).astype(int), minlength=64)
        chi2 = float(np.sum((counts - n / 64) ** 2) / (n / 64))
        assert 30.0 < chi2 < 105.0  # 63 degrees: beyond it once in a thousand
    for x, y in ((first, second), (first, low), (first[:-1], first[1:])):
        assert abs(np.corrcoef(x, y)[0, 1]) < 4.5 / np.sqrt(n)


def test_words_of_neighbouring_seeds_have_nothing_in_common() -> None:
    u = np.stack([request_random(seed, 4).random(4000) for seed in range(8)])
    correlation = np.corrcoef(u) - np.eye(8)
    assert np.abs(correlation).max() < 5.0 / np.sqrt(4000)


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12))
def test_the_lookup_counts_exactly(conditional: list[float]) -> None:
    """Whatever the curve: the table with its exact corner cases is the count of survivals above the number."""
    curve = np.cumprod(conditional)
    x = words(2000)
    count = accepted(lookup_of(curve[None, :]), np.zeros(len(x), dtype=np.int64), x)
    assert np.array_equal(count, np.count_nonzero(fractions(x)[:, None] < curve, axis=1))


def test_the_lookup_is_exact_at_the_edges_of_its_buckets() -> None:
    curve = np.array([1.0, 0.5, 0.25, 2.0**-BUCKETS_BITS, 2.0**-39, 0.0])
    edge = np.array([0, 1 << 24, 1 << 63, (1 << 63) - 1, 1 << 62, (1 << 62) - 1, (1 << 64) - 1], dtype=np.uint64)
    count = accepted(lookup_of(curve[None, :]), np.zeros(len(edge), dtype=np.int64), edge)
    assert count.tolist() == [5, 5, 1, 2, 2, 3, 1]


# ------------------------------------------------------------------------------------------------------------- renewal
@pytest.mark.parametrize(("alpha", "num_steps"), [(0.8, 3), (0.8, 5), (0.7, 3), (0.9, 7)])
def test_mean_and_variance_of_a_cycle(alpha: float, num_steps: int) -> None:
    curve = alpha ** np.arange(1.0, num_steps + 1)
    x = words(400_000)
    n = 1.0 + accepted(lookup_of(curve[None, :]), np.zeros(len(x), dtype=np.int64), x)
    assert within(n, float(constant_acceptance_length(alpha, num_steps)))
    expected = float(constant_acceptance_variance(alpha, num_steps))
    assert within((n - constant_acceptance_length(alpha, num_steps)) ** 2, expected)
    assert expected == pytest.approx(float(acceptance_variance(curve)))


@pytest.mark.parametrize(("tokens", "exact"), [(16, 4.8433), (128, 35.2015), (512, 139.287)])
def test_cycles_of_an_output_with_its_overshoot(tokens: int, exact: float) -> None:
    """The last cycle is cut: L tokens take more cycles than L over the mean."""
    out = run_block(
        cases.block(
            cases.constant(0.8, 5),
            cases.linear_costs(0.05, 5),
            num_steps=5,
            output_tokens=tokens + 1,
            seeds=640,
            requests=10,
        )
    )
    mean, variance = float(constant_acceptance_length(0.8, 5)), float(constant_acceptance_variance(0.8, 5))
    assert cycles_for_tokens(tokens, mean, variance) == pytest.approx(exact, rel=3e-4)
    assert within(out.cycles, exact, also=0.001)
    spread = (out.cycles - exact) ** 2
    exact_variance = {512: 39.55}.get(tokens, float(cycles_variance(tokens, mean, variance)))
    assert within(spread, exact_variance, also=0.02 * exact_variance if tokens > 100 else 0.25 * exact_variance)
    assert within(out.overshoot, (variance + mean**2 - mean) / (2.0 * mean), also=0.005)


def test_what_is_emitted_is_what_was_asked_for() -> None:
    out = run_block(
        cases.block(cases.constant(0.9, 7), cases.linear_costs(0.05, 7, 8), num_steps=7, batch=8, clients=8)
    )
    assert np.all(out.tokens == 100 * 129)
    assert np.all((out.overshoot >= 0) & (out.overshoot <= 7))


# -------------------------------------------------------------------------------------------------------------- mixing
def test_prompts_of_equal_length_pool_harmonically() -> None:
    alpha = np.array([0.6, 0.9])
    out = run_block(
        cases.block(
            cases.mixed(alpha, [0.5, 0.5], 5),
            cases.linear_costs(0.05, 5),
            num_steps=5,
            output_tokens=401,
            seeds=480,
            requests=10,
        )
    )
    lengths, variances = constant_acceptance_length(alpha, 5), constant_acceptance_variance(alpha, 5)
    cycles = [cycles_for_tokens(400, m, v) for m, v in zip(lengths, variances, strict=True)]
    assert within(out.cycles.mean(axis=1), float(np.mean(cycles)), also=0.001)
    # Effective tokens a cycle: near the harmonic mean, and far from the arithmetic one.
    effective = 400.0 / out.cycles.mean()
    assert effective == pytest.approx(harmonic_mean(lengths), rel=0.02)
    assert abs(effective - lengths.mean()) > 0.3


@pytest.mark.parametrize(("a", "b"), [(8.0, 2.0), (4.0, 1.0), (20.0, 5.0)])
def test_beta_requests_have_the_length_of_the_closed_form(a: float, b: float) -> None:
    nodes, share = beta_nodes(a, b, 24)
    classes = cases.mixed(nodes, share, 5)
    assert classes.length(5) == pytest.approx(beta_length(a, b, 5), rel=1e-6)
    out = run_block(
        cases.block(classes, cases.linear_costs(0.05, 5), num_steps=5, output_tokens=301, seeds=640, requests=10)
    )
    each = [
        cycles_for_tokens(300, float(m), float(v))
        for m, v in zip(constant_acceptance_length(nodes, 5), constant_acceptance_variance(nodes, 5), strict=True)
    ]
    assert within(out.cycles.mean(axis=1), float(share @ each / share.sum()), also=0.005)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(0.02, 0.98), min_size=1, max_size=10),
    st.floats(0.001, 0.5),
    st.floats(0.0, 0.3),
    st.integers(1, 12),
)
def test_classes_show_the_curve_that_was_measured(
    conditional: list[float], spread: float, wander: float, measured: int
) -> None:
    """Weighted by the cycles that each class takes at the measured steps, the classes are the workload's curve."""
    curve = np.cumprod(conditional)
    classes = classes_of(curve, measured, spread, wander)
    steps = min(measured, len(curve))
    by_cycle = classes.share / classes.lengths[:, steps]
    seen = (by_cycle / by_cycle.sum()) @ classes.survival.mean(axis=1)
    assert seen == pytest.approx(curve, abs=1e-9)
    assert classes.length(steps) == pytest.approx(1.0 + curve[:steps].sum(), rel=1e-9)
    assert np.all(np.diff(classes.survival, axis=2, prepend=1.0) <= 1e-12)


def test_a_pooled_curve_of_beta_prompts_gives_them_back() -> None:
    """From the curve that Beta(8, 2) prompts show at 5 steps, their lengths at other steps; the curve alone is off."""
    pooled = beta_pooled_survival(8.0, 2.0, 15, 5)
    placed = classes_of(pooled, 5, spread=1.0 / 11.0)
    for steps in (3, 7, 10):
        truth = beta_length(8.0, 2.0, steps)
        alone = 1.0 + pooled[:steps].sum()
        assert abs(placed.length(steps) - truth) < 0.35 * abs(alone - truth)


def test_few_prompts_vary_by_the_design_effect() -> None:
    """Acceptance of one draft, m cycles a prompt: the variance between prompts is inflated by 1 + (m - 1) ICC."""
    a, b, cycles, prompts = 8.0, 2.0, 40, 20_000
    nodes, share = beta_nodes(a, b, 24)
    lookup = lookup_of(nodes[:, None])
    chosen = np.searchsorted(np.cumsum(share / share.sum()), request_random(3, 1).random(prompts), side="right")
    base = np.broadcast_to(np.minimum(chosen, len(nodes) - 1)[:, None] << BUCKETS_BITS, (prompts, cycles)).copy()
    hits = accepted(lookup, base, words(prompts * cycles).reshape(prompts, cycles)).mean(axis=1)
    p = a / (a + b)
    expected = design_effect(cycles * prompts, prompts, 1.0 / (a + b + 1.0)) * p * (1.0 - p) / cycles
    assert within((hits - p) ** 2, expected)


def test_acceptance_that_wanders_has_the_long_run_variance() -> None:
    """States 0.9 and 0.6, kept with 0.9: the mean is that of a cycle, the variance over an output is 3.5 times more."""
    curves = np.array([0.6, 0.9])[None, :, None] ** np.arange(1.0, 6.0)
    classes = AcceptanceClasses(survival=curves, share=np.ones(1), persistence=0.8)
    tokens = 2000
    out = run_block(
        cases.block(classes, cases.linear_costs(0.05, 5), num_steps=5, output_tokens=tokens + 1, seeds=600, requests=2)
    )
    expected = modulated_acceptance([0.9, 0.6], 0.9, 5)
    assert expected.length == pytest.approx(3.5345, abs=1e-4)
    assert expected.long_run_variance == pytest.approx(14.6, abs=0.3)
    # Every request begins in the first state: what that takes at the start is less than a cycle and a half.
    assert within(out.cycles, tokens / expected.length, also=3.0)
    inflated = float(cycles_variance(tokens, expected.length, expected.long_run_variance))
    alone = float(cycles_variance(tokens, expected.length, expected.variance))
    spread = (out.cycles - out.cycles.mean()) ** 2
    assert within(spread, inflated, also=0.03 * inflated)
    assert spread.mean() > 2.5 * alone


# -------------------------------------------------------------------------------------------------- lengths that adapt
def speedup(outcome: Outcome, plain_ms: float = 10.0) -> np.ndarray:
    """Tokens per plain pass of each lane, what lies beyond the ends of outputs counted."""
    time = outcome.time_at_ms.sum(axis=(1, 2))
    return np.asarray(tokens_a_cycle(outcome) * outcome.request_rounds * plain_ms / time)


@pytest.mark.parametrize(("alpha", "cost"), [(0.8, 0.02), (0.8, 0.05), (0.8, 0.2), (0.6, 0.05), (0.9, 0.1)])
def test_the_oracle_is_the_closed_form(alpha: float, cost: float) -> None:
    costs, classes = cases.linear_costs(cost, 100), cases.constant(alpha, 100)
    out = run_block(cases.block(classes, costs, kind="oracle", output_tokens=400, seeds=200, requests=6))
    assert within(speedup(out), float(oracle_speedup(alpha, cost)), also=1e-3)
    steps, best = best_steps(alpha, cost)
    fixed = run_block(cases.block(classes, costs, num_steps=int(steps), output_tokens=400, seeds=200, requests=6))
    assert within(speedup(fixed), float(best), also=1e-3)
    assert within(speedup(fixed), float(walltime_factor(alpha, steps, cost)), also=1e-3)


@pytest.mark.parametrize("shape", [(8.0, 2.0), (4.0, 1.0), (2.0, 0.5)])
@pytest.mark.parametrize("cost", [0.05, 0.2])
def test_steps_for_each_request_gain_what_the_closed_form_says(shape: tuple[float, float], cost: float) -> None:
    nodes, share = beta_nodes(*shape, 12)
    expected = request_adaptation(nodes, share, cost, 60)
    classes, costs = cases.mixed(nodes, share, 60), cases.linear_costs(cost, 60)
    common = {"output_tokens": 401, "seeds": 400, "requests": 6}
    times = {}
    for kind, steps in (("optimal", 0), ("fixed", expected.num_steps)):
        out = run_block(cases.block(classes, costs, kind=kind, num_steps=steps, **common))
        times[kind] = out.time_at_ms.sum(axis=(1, 2))
    # The same requests and luck: the ratio is known far better than either.
    gain = times["fixed"] / times["optimal"] - 1.0
    assert within(gain, expected.gain, also=0.012)
    assert expected.gain == pytest.approx(beta_request_adaptation(*shape, cost, 60).gain, abs=0.025)


# -------------------------------------------------------------------------------------------------------------- queues
def test_a_single_server_queues_as_pollaczek_and_khinchine_say() -> None:
    service, load = 100.0, 0.6  # eleven tokens, the first from the prefill
    rng = np.random.default_rng(5)
    arrival = np.cumsum(rng.exponential(service / load, size=(400, 400)), axis=1)
    out = run_block(
        cases.block(
            cases.constant(0.5, 1),
            cases.linear_costs(0.1, 1),
            output_tokens=11,
            arrival_ms=arrival,
            requests=400,
            seeds=400,
        )
    )
    wait = (out.admitted_ms - out.arrival_ms)[:, 100:].mean(axis=1)
    assert within(wait, load * service / (2.0 * (1.0 - load)))
    assert out.finish_ms - out.first_ms == pytest.approx(service)


def test_prefill_stops_what_runs_and_is_not_decoding() -> None:
    prefill = Prefill(tokens=np.array([100.0, 200.0]), time_ms=np.array([5.0, 9.0]), least_ms=2.0, ranks=1)
    assert prefill.at([0, 10, 100, 150, 200, 400]) == pytest.approx([0.0, 2.0, 5.0, 7.0, 9.0, 17.0])
    out = run_block(
        cases.block(
            cases.constant(0.5, 1),
            cases.linear_costs(0.0, 1, 2),
            output_tokens=4,
            requests=2,
            seeds=1,
            batch=2,
            arrival_ms=np.array([[0.0, 12.0]]),
            prompt_tokens=100,
            prefill=prefill,
        )
    )
    # 5 ms of prefill, a cycle to 15 ms, the second prefill to 20 ms, then both run: 30 ms and 40 ms, the second one on.
    assert out.first_ms[0].tolist() == [5.0, 20.0]
    assert out.finish_ms[0].tolist() == [40.0, 50.0]
    assert out.prefill_ms[0] == 10.0


def test_time_and_work_add_up() -> None:
    """Batch times time over all cycles is the time that requests spend running; every cycle of a request is one."""
    rng = np.random.default_rng(2)
    arrival = np.cumsum(rng.exponential(60.0, size=(6, 200)), axis=1)
    out = run_block(
        cases.block(
            cases.constant(0.7, 3),
            cases.linear_costs(0.1, 3, 4),
            num_steps=3,
            output_tokens=50,
            arrival_ms=arrival,
            requests=200,
            seeds=6,
            batch=4,
        )
    )
    sizes = np.arange(5)
    assert (out.finish_ms - out.admitted_ms).sum(axis=1) == pytest.approx(out.time_at_ms.sum(axis=1) @ sizes)
    assert out.cycles.sum(axis=1).tolist() == out.request_rounds.tolist()
    assert np.all(np.diff(out.admitted_ms, axis=1) >= 0.0)  # first come, first served
