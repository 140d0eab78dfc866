"""What a draft length that adapts could bring: bounds against closed forms and sums, and silence where unknown."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.acceptance import constant_acceptance_length
from specmodel.adaptive import request_adaptation, stop_by_confidence, stop_by_threshold
from specmodel.adaptivity import _stopped
from specmodel.words import adaptive_lines

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

PROBABILITY = st.floats(0.05, 0.95)


@given(PROBABILITY, st.floats(0.01, 0.5), st.integers(1, 30))
def test_of_one_acceptance_the_bound_is_a_geometric_sum(alpha: float, step_cost: float, longest: int) -> None:
    """``E[max(j, 1)] = (a + ... + a^K) + (1 - a)``, as exactly none are accepted with probability 1 - a."""
    K = np.arange(longest + 1)
    lengths = constant_acceptance_length(alpha, K)
    got = _stopped(1.0 + step_cost * K, lengths[None, :], np.ones(1))
    drafted = np.sum(alpha ** np.arange(1, longest + 1)) + (1.0 - alpha)
    assert got[longest] == pytest.approx((1.0 + step_cost * drafted) / lengths[longest], rel=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(PROBABILITY, st.floats(0.05, 1.0)), min_size=1, max_size=3),
    st.floats(0.01, 0.4),
    st.floats(0.05, 1.0),
)
def test_no_rule_that_looks_at_confidences_beats_the_bound(
    types: list[tuple[float, float]], step_cost: float, threshold: float
) -> None:
    confidence, weight = (np.array(x) for x in zip(*types, strict=True))
    probability = weight / weight.sum()
    longest = 6
    K = np.arange(longest + 1)
    lengths = constant_acceptance_length(float(confidence @ probability), K)
    bound = 1.0 / np.min(_stopped(1.0 + step_cost * K, lengths[None, :], np.ones(1))[1:])
    rules = [stop_by_threshold(confidence, probability, step_cost, threshold, longest)]
    rules.append(stop_by_confidence(confidence, probability, step_cost, longest))
    assert all(rule.speedup <= bound * (1 + 1e-9) for rule in rules if rule.mean_draft_tokens > 0.0)


TRUTH = cases.Truth(tax=0.02, overhead=0.0)


def exact(conditionals: dict[str, tuple[float, ...]], **more: object) -> object:
    """Exact tables, and exact acceptance of some workloads."""
    entries = [
        {"workload": name, "num_steps": len(values), "conditional": list(values), "sd": 0.001}
        for name, values in conditionals.items()
    ]
    rows = cases.tables(TRUTH, range(11), relative_sd=0.001)
    return fitted((), **rows, acceptance=entries, system={"engine": cases.LOOP}, **more)


def test_the_bound_of_a_deployment_by_direct_sum() -> None:
    optimum = sm.optimize(exact({"default": TRUTH.conditional[:10]}), max_steps=10)
    K = optimum.best.num_steps
    survival = np.cumprod(TRUTH.conditional[:10])
    times = []
    for longest in range(1, 11):
        p = -np.diff([1.0, *survival[:longest], 0.0])
        time_ms = sum(p[j] * TRUTH.cycle_ms(max(j, 1)) for j in range(longest + 1))
        times.append(time_ms / TRUTH.length(longest))
    gain = TRUTH.cycle_ms(K) / TRUTH.length(K) / min(times) - 1.0
    assert optimum.adaptivity.stopping_gain == pytest.approx(gain, abs=0.01)
    assert optimum.adaptivity.workload_gain is None
    [line] = adaptive_lines(optimum)
    assert f"at most {100 * optimum.adaptivity.stopping_gain:.0f} %" in line


def test_a_step_count_for_each_workload_pools_times_by_tokens() -> None:
    easy, hard = (0.92,) * 10, (0.35,) * 10
    model = exact({"easy": easy, "hard": hard})
    optimum = sm.optimize(model, workload={"easy": 0.6, "hard": 0.4}, max_steps=10)
    a = optimum.adaptivity
    times = {
        name: [TRUTH.cycle_ms(k) / float(constant_acceptance_length(alpha, k)) for k in range(11)]
        for name, alpha in (("easy", 0.92), ("hard", 0.35))
    }
    K = optimum.best.num_steps
    fixed = 0.6 * times["easy"][K] + 0.4 * times["hard"][K]
    own = 0.6 * min(times["easy"]) + 0.4 * min(times["hard"])
    assert a.workload_gain == pytest.approx(fixed / own - 1.0, abs=0.01)
    assert a.workload_gain > 0.02
    assert a.workload_steps["easy"] > K > a.workload_steps["hard"]
    assert len(adaptive_lines(optimum)) == 2
    # The closed form of the same thing, for a cost that is exactly a line.
    line = request_adaptation([0.92, 0.35], [0.6, 0.4], 0.12, 10)
    assert line.gain == pytest.approx(a.workload_gain, abs=0.05)


def test_where_it_is_not_known_nothing_is_said() -> None:
    rows = [plain(), spec(1, 140.0, 1.75), spec(3, 175.0, 2.5)]
    known = sm.optimize(fitted(rows), max_steps=3)
    assert known.adaptivity is not None
    blind = [{k: v for k, v in row.items() if k != "acceptance_length"} for row in rows]
    several = [{**row, "batch": 4, "tok_s": 4 * row["tok_s"]} for row in rows]
    losing = [plain(), spec(1, 90.0, 1.2), spec(3, 80.0, 1.3)]
    stopping = [{"num_steps": 3, "drafts": 1000, "drafted_per_position": [1000, 700, 500]}]
    assert sm.optimize(fitted(blind), max_steps=3).adaptivity is None
    assert sm.optimize(fitted(several), batch=4, max_steps=3).adaptivity is None
    assert sm.optimize(fitted(losing), max_steps=3).adaptivity is None
    counted = [{**stopping[0], "accepted_per_position": [700, 450, 300]}]
    assert sm.optimize(fitted(rows, acceptance=counted), max_steps=3).adaptivity is None
    beyond_graphs = sm.optimize(
        fitted(rows, model={"cuda_graph_unit": "tokens", "cuda_graph_sizes": [1, 2]}), max_steps=3
    )
    assert beyond_graphs.best.num_steps == 3
    assert beyond_graphs.adaptivity is None
    assert adaptive_lines(sm.optimize(fitted(blind), max_steps=3)) == []
