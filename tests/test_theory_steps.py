"""Check values on the best number of steps: optimum, stopping, break-even, batch, adaptive lengths, ceilings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmodel import acceptance, adaptive, closed_forms, uncertainty, verify_forms

DATA = Path(__file__).parent / "data" / "theory"
OPTIMAL = json.loads((DATA / "optimal_steps.json").read_text())["rows"]
MAGICDEC = json.loads((DATA / "magicdec_2024.json").read_text())


def printed(*texts: str) -> Any:
    """Values as printed: each may be off by half a unit of the last digit of the first."""
    half = 0.5000001 * 10.0 ** -len(texts[0].partition(".")[2])
    values = [float(text) for text in texts]
    return pytest.approx(values if len(values) > 1 else values[0], rel=0, abs=half)


# ----------------------------------------------------------------------------------------------------------- optimum
@pytest.mark.parametrize("row", OPTIMAL)
def test_optimal_steps_at_linear_cost(row: dict[str, Any]) -> None:
    steps, _ = closed_forms.continuous_best_steps(row["alpha"], row["step_cost"])
    whole, speedup = closed_forms.best_steps(row["alpha"], row["step_cost"])
    assert steps == printed(row["steps"])
    assert whole == row["whole_steps"]
    assert speedup == printed(row["speedup"])
    assert adaptive.oracle_speedup(row["alpha"], row["step_cost"]) == printed(row["oracle"])


@pytest.mark.parametrize(("alpha", "step_cost", "steps", "whole"), [(0.7, 0.05, "5.48", 6), (0.6, 0.2, "1.971", 2)])
def test_neither_floor_nor_nearest_is_always_the_best(alpha: float, step_cost: float, steps: str, whole: int) -> None:
    assert closed_forms.continuous_best_steps(alpha, step_cost)[0] == printed(steps)
    assert closed_forms.best_steps(alpha, step_cost)[0] == whole


def stepped_cycle(num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """A verify pass that jumps past 4 and past 8 tokens: acceptance lengths and cycle times for K = 0..num_steps."""
    K = np.arange(num_steps + 1)
    tokens = K + 1
    verify = np.where(tokens <= 4, 1.0, np.where(tokens <= 8, 1.3, 1.7))
    return acceptance.constant_acceptance_length(0.9, K), verify + 0.03 * K


def test_steps_of_a_kernel_hide_the_optimum_from_the_stopping_rule() -> None:
    lengths, cycle = stepped_cycle(11)
    values = ("1.0000", "1.8447", "2.5566", "3.1550", "2.8839", "3.2314", "3.5250", "3.7717", "3.1576")
    assert list(lengths / cycle)[:9] == printed(*values)
    assert closed_forms.first_stop(lengths, cycle) == 3
    assert int(np.argmax(lengths / cycle)) == 7
    assert closed_forms.dinkelbach(lengths, cycle).index == 7
    assert not closed_forms.marginals_fall(lengths, cycle)


def test_step_counts_that_fill_a_pass_contain_the_optimum() -> None:
    assert verify_forms.full_size_steps(1, (4, 8, 12), 11) == (3, 7, 11)


def test_dinkelbach_from_one() -> None:
    K = np.arange(33)
    lengths, cycle = acceptance.constant_acceptance_length(0.75, K), 1.0 + 0.06 * K
    optimum = closed_forms.dinkelbach(lengths, cycle, start=1.0)
    assert optimum.path == (9, 6, 6)
    assert [(lengths / cycle)[i] for i in optimum.path] == printed("2.451134", "2.548577", "2.548577")
    assert optimum.index == 6
    assert optimum.ratio == printed("2.548577")


@pytest.mark.parametrize(
    ("cycle_ratio", "num_steps", "alpha"),
    [
        (1.2, 1, ".200"), (1.2, 2, ".1708"), (1.2, 3, ".1673"), (1.2, 5, ".1667"),
        (1.4, 1, ".400"), (1.4, 2, ".3062"), (1.4, 3, ".2908"), (1.4, 5, ".2861"),
        (1.6, 1, ".600"), (1.6, 2, ".4220"), (1.6, 3, ".3894"), (1.6, 5, ".3768"),
        (2.0, 2, ".618"), (2.0, 3, ".5437"), (2.0, 5, ".5087"),
    ],
)  # fmt: skip
def test_break_even_acceptance(cycle_ratio: float, num_steps: int, alpha: str) -> None:
    assert closed_forms.break_even_acceptance(cycle_ratio, num_steps) == printed(alpha)


@pytest.mark.parametrize("cycle_ratio", [1.2, 1.4, 1.6, 2.0])
def test_break_even_acceptance_at_its_ends(cycle_ratio: float) -> None:
    assert closed_forms.break_even_acceptance(cycle_ratio, 1) == pytest.approx(cycle_ratio - 1.0, abs=1e-11)
    assert closed_forms.break_even_acceptance(cycle_ratio, np.inf) == pytest.approx(1.0 - 1.0 / cycle_ratio, abs=1e-11)


# ------------------------------------------------------------------------------------------------------------- batch
@pytest.mark.parametrize(("num_steps", "length"), [(5, "1.4855"), (10_000, "1.4874")])
def test_a_batch_in_lock_step_accepts_the_least(num_steps: int, length: str) -> None:
    assert closed_forms.lock_step_length(0.8, num_steps, 5) == printed(length)


@pytest.mark.parametrize(("batch", "share"), [(1, "1.000"), (2, ".701"), (4, ".457"), (8, ".326")])
def test_lock_step_against_ragged(batch: int, share: str) -> None:
    ragged = acceptance.constant_acceptance_length(0.8, 5)
    assert closed_forms.lock_step_length(0.8, 5, batch) / ragged == printed(share)


@pytest.mark.parametrize(("batch", "length"), [(8, "5.940"), (32, "6.000")])
def test_longest_acceptance_of_a_batch(batch: int, length: str) -> None:
    assert closed_forms.longest_length(0.8 ** np.arange(1, 6), batch) == printed(length)


def cycle_distribution(alpha: float, num_steps: int, num_tokens: int) -> np.ndarray:
    """P(at most c cycles for `num_tokens`), c = 0, 1, ..., by powers of the distribution of one cycle."""
    survival = alpha ** np.arange(num_steps + 1)
    one = np.append(0.0, survival - np.append(survival[1:], 0.0))
    reached, out = np.eye(1, num_tokens).ravel(), []
    for _ in range(num_tokens + 1):
        out.append(1.0 - reached.sum())
        reached = np.convolve(reached, one)[:num_tokens]
    return np.array(out)


@pytest.mark.parametrize(("batch", "simulated", "bound"), [(1, 35.2, "35.2"), (8, 39.9, "41.6"), (32, 42.2, "43.5")])
def test_the_slowest_sequence_of_a_static_batch(batch: int, simulated: float, bound: str) -> None:
    mean = float(acceptance.constant_acceptance_length(0.8, 5))
    variance = float(closed_forms.constant_acceptance_variance(0.8, 5))
    cycles = acceptance.cycles_for_tokens(128, mean, variance)
    sd = np.sqrt(uncertainty.cycles_variance(128, mean, variance))
    assert uncertainty.slowest_of_batch(cycles, sd, batch) == printed(bound)
    exact = np.sum(1.0 - cycle_distribution(0.8, 5, 128) ** batch)
    assert exact == pytest.approx(simulated, abs=0.1)
    assert exact <= uncertainty.slowest_of_batch(cycles, sd, batch) + 1e-3


@pytest.mark.parametrize(
    ("batch", "steps", "speedup"),
    [(8, 11, "3.8167"), (16, 7, "3.6501"), (32, 3, "2.7849"), (64, 1, "1.7647"), (128, 0, "1.0"), (200, 0, "1.0")],
)
def test_fill_the_pass_up_to_the_knee(batch: int, steps: int, speedup: str) -> None:
    assert verify_forms.fill_rule_steps(0.8, batch, 128, 0.02) == steps
    assert verify_forms.hinge_speedup(0.8, steps, batch, 128, 0.02) == printed(speedup)
    scan = verify_forms.hinge_speedup(0.8, np.arange(64), batch, 128, 0.02)
    assert int(np.argmax(scan)) == steps


@pytest.mark.parametrize(("batch", "speedup"), [(64, "1.433"), (128, ".727")])
def test_three_steps_past_the_knee(batch: int, speedup: str) -> None:
    assert verify_forms.hinge_speedup(0.8, 3, batch, 128, 0.02) == printed(speedup)


@pytest.mark.parametrize(
    ("flops_per_byte", "half_precision", "four_bit"),
    [(312 / 2.039, "153", "38"), (989 / 3.35, "295", "74"), (989 / 4.8, "206", "51.5"), (2250 / 8.0, "281", "70")],
    ids=["A100", "H100", "H200", "B200"],
)
def test_tokens_at_the_ridge(flops_per_byte: float, half_precision: str, four_bit: str) -> None:
    assert verify_forms.ridge_tokens(flops_per_byte, 2.0) == printed(half_precision)
    assert verify_forms.ridge_tokens(flops_per_byte, 0.5) == printed(four_bit)


@pytest.mark.parametrize("row", MAGICDEC["rows"], ids=lambda row: f"{row['system']} {row['case']}")
def test_draft_verify_and_a_constant_overhead_give_the_published_times(row: dict[str, Any]) -> None:
    parts = (row["draft_ms"], row["verify_ms"])
    without = closed_forms.time_per_token_ms(*parts, 0.0, row["length"])
    assert without == printed(row["without_overhead_ms"])
    overhead = closed_forms.implied_overhead_ms(row["time_per_token_ms"], *parts, row["length"])
    assert overhead == printed(row["overhead_ms"])
    assert 0.0065 <= 1.0 - without / row["time_per_token_ms"] <= 0.0555
    gpu = row["system"].lstrip("48")
    constant = MAGICDEC["overhead_ms_by_gpu"][gpu]
    predicted = closed_forms.time_per_token_ms(*parts, constant, row["length"])
    error_percent = 100.0 * abs(predicted / row["time_per_token_ms"] - 1.0)
    assert error_percent <= float(MAGICDEC["largest_error_percent"][gpu]) + 0.005
    assert row["plain_ms"] / row["time_per_token_ms"] == printed(row["speedup"])
    assert 0.0 < closed_forms.break_even_acceptance(row["length"], row["num_steps"]) < 1.0


@pytest.mark.parametrize(
    ("num_steps", "length", "speedup", "rate", "cycle_ratio"),
    [(3, 2.25, 1.65, ".4167", "1.364"), (6, 2.50, 1.75, ".25", "1.429"), (21, 2.92, 1.85, ".0914", "1.578")],
)
def test_acceptance_rate_and_cycle_ratio_of_published_runs(
    num_steps: int, length: float, speedup: float, rate: str, cycle_ratio: str
) -> None:
    assert (length - 1.0) / num_steps == printed(rate)
    ratio = length / speedup
    assert ratio == printed(cycle_ratio)
    # With the acceptance implied by the length, break-even at this cycle ratio lies below it: all three runs gained.
    alpha = closed_forms.break_even_acceptance(length, num_steps)
    assert acceptance.constant_acceptance_length(alpha, num_steps) / ratio == pytest.approx(speedup, rel=1e-12)
    assert closed_forms.break_even_acceptance(ratio, num_steps) < alpha


# -------------------------------------------------------------------------------------------------- adaptive lengths
@pytest.mark.parametrize(
    ("alpha", "step_cost", "percent"),
    [(0.8, 0.02, "21"), (0.8, 0.05, "35"), (0.8, 0.1, "45"), (0.8, 0.2, "49"), (0.6, 0.05, "21"), (0.9, 0.1, "53")],
)
def test_gain_of_the_oracle_over_the_best_fixed_length(alpha: float, step_cost: float, percent: str) -> None:
    assert 100.0 * adaptive.oracle_gain(alpha, step_cost) == printed(percent)


@pytest.mark.parametrize(
    ("step_cost", "fixed", "steps", "stopping", "oracle"),
    [
        (0.05, "2.9485", 7, "3.1390", "3.9331"),
        (0.1, "2.3752", 5, "2.5486", "3.4072"),
        (0.2, "1.8137", 4, "2.0068", "2.6882"),
    ],
)
def test_stopping_by_a_confidence_of_two_kinds(
    step_cost: float, fixed: str, steps: int, stopping: str, oracle: str
) -> None:
    confidence, probability = (0.95, 0.4), (0.7, 0.3)
    mean = float(np.dot(confidence, probability))
    assert mean == printed(".785")
    best, speedup = closed_forms.best_steps(mean, step_cost)
    assert best == steps
    assert speedup == printed(fixed)
    rule = adaptive.stop_by_confidence(confidence, probability, step_cost)
    assert rule.speedup == printed(stopping)
    ceiling = adaptive.oracle_speedup(mean, step_cost)
    assert ceiling == printed(oracle)
    assert 17 <= round(100.0 * float((rule.speedup - speedup) / (ceiling - speedup))) <= 22


@pytest.mark.parametrize("step_cost", [0.05, 0.1, 0.2])
@pytest.mark.parametrize(
    ("confidence", "least", "most"), [((0.98, 0.6), 9, 10), ((0.785, 0.785), 0, 0)], ids=["close", "equal"]
)
def test_close_confidences_leave_less_to_gain(
    confidence: tuple[float, float], least: int, most: int, step_cost: float
) -> None:
    mean = float(np.mean(confidence))
    _, fixed = closed_forms.best_steps(mean, step_cost)
    rule = adaptive.stop_by_confidence(confidence, (0.5, 0.5), step_cost)
    share = (rule.speedup - fixed) / (adaptive.oracle_speedup(mean, step_cost) - fixed)
    assert least <= round(100.0 * float(share)) <= most


# The reference gives whole percents from draws: one point of tolerance.
@pytest.mark.parametrize("step_cost", [0.02, 0.05, 0.1, 0.2])
@pytest.mark.parametrize(("a", "b", "least", "most"), [(8, 2, 5, 5), (4, 1, 9, 10), (2, 0.5, 15, 18)])
def test_a_length_for_every_request(a: float, b: float, least: int, most: int, step_cost: float) -> None:
    gain = 100.0 * adaptive.beta_request_adaptation(a, b, step_cost).gain
    assert least - 1.0 <= gain <= most + 1.0


# ---------------------------------------------------------------------------------------------------------- ceilings
@pytest.mark.parametrize(
    ("share", "gain"),
    [(0.0357, "1.037"), (0.05, "1.0526"), (0.1, "1.1111"), (0.2, "1.25"), (0.3, "1.4286"), (0.5, "2")],
)
def test_ceiling_of_a_part_of_the_cycle(share: float, gain: str) -> None:
    assert closed_forms.amdahl_ceiling(share) == printed(gain)


def test_a_ceiling_at_fixed_steps_is_none_once_steps_are_chosen_again() -> None:
    steps, speedup = closed_forms.best_steps(0.75, 0.06)
    assert steps == 6
    assert speedup == printed("2.5486")
    fixed = closed_forms.walltime_factor(0.75, 6, 0.0)
    assert fixed == printed("3.4661")
    assert 100.0 * (fixed / speedup - 1.0) == printed("36")
    assert speedup * closed_forms.amdahl_ceiling(0.36 / 1.36) == pytest.approx(fixed, rel=1e-12)
    chosen_again = closed_forms.best_steps(0.75, 0.0)[1]
    assert chosen_again == printed("4.0")
    assert 100.0 * (chosen_again / speedup - 1.0) == printed("57")
    assert closed_forms.best_steps(0.75, 0.02)[1] == printed("3.1989")  # 0.02 of the step is verify
    assert chosen_again >= fixed >= speedup
