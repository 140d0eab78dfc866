"""The named terms of the cycle time: derivatives against differences, signs, scales, and what each term answers to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmodel import cost
from specmodel.cost import COMM_PARAMETERS, PARAMETERS, CostPoints, CostStructure

SEEDS = st.integers(0, 2**32 - 1)
COMMS = ("default", "ring", "tree")
STRUCTURES = {
    "dense": CostStructure(comm_names=COMMS),
    "experts": CostStructure(comm_names=COMMS, num_experts=128, experts_per_token=8, reference_tokens=1.0),
    "batched experts": CostStructure(comm_names=COMMS, num_experts=64, experts_per_token=6, reference_tokens=8.0),
    "all experts": CostStructure(comm_names=COMMS, num_experts=4, experts_per_token=4),
}
RANGES = {
    "log_pass_ms": (0.0, 4.0),
    "tax": (-0.5, 1.0),
    "logit_expert_share": (-3.0, 3.0),
    "logit_overlap": (-3.0, 3.0),
    "log_token": (-9.0, -2.0),
    "log_knee_tokens": (2.0, 8.0),
    "log_kv": (-9.0, 0.0),
    "kv_multi": (-1.0, 1.0),
    "log_overhead": (-9.0, -1.0),
    "log_draft_base": (-6.0, -1.0),
    "log_draft_step": (-5.0, -1.0),
    "log_draft_sequence": (-9.0, -2.0),
    "log_draft_width": (-9.0, -2.0),
    "log_draft_kv": (-9.0, -2.0),
    "log_tree": (-9.0, -2.0),
    "verify_eager": (-0.2, 1.0),
    "draft_graph_cycle": (-1.0, 0.5),
    "draft_eager": (-0.2, 2.0),
    "log_comm_base": (-9.0, -1.0),
    "log_comm_token": (-9.0, -3.0),
    "comm_offset": (-0.04, 0.3),
    "draft_comm": (-1.0, 1.0),
}


def parameters(rng: np.random.Generator) -> np.ndarray:
    names = [name.partition("[")[0] for name in cost.parameter_names(COMMS)]
    return np.array([rng.uniform(*RANGES[name]) for name in names])


def points(rng: np.random.Generator, size: int = 12, **changes: Any) -> CostPoints:
    steps = rng.integers(0, 11, size)
    query_tokens = steps + 1.0
    sequences = rng.integers(1, 65, size).astype(float)
    values: dict[str, Any] = {
        "steps": steps.astype(float),
        "query_tokens": query_tokens,
        "sequences": sequences,
        "context_ratio": np.exp(rng.uniform(-2.0, 2.0, size)),
        "comm": rng.integers(0, 3, size),
        "speculating": (steps > 0).astype(float),
        "topk": np.where(steps > 0, rng.integers(1, 5, size), 1).astype(float),
        "draft_mode": rng.integers(0, 3, size),
        "verify_eager": rng.integers(0, 2, size).astype(float),
        "allreduce_ms": rng.choice([0.0, 1.7, 4.0], size),
        "padded_tokens": sequences * query_tokens * rng.choice([1.0, 1.25], size),
    }
    return CostPoints(**(values | changes))


def index(name: str) -> int:
    return cost.parameter_names(COMMS).index(name)


def test_names_of_the_parameters_stand_in_the_order_of_the_vector() -> None:
    names = cost.parameter_names(("default", "ring"))
    assert names[: len(PARAMETERS)] == PARAMETERS
    assert names[len(PARAMETERS) :] == tuple(f"{p}[{c}]" for c in ("default", "ring") for p in COMM_PARAMETERS)
    assert len(set(names)) == len(names)
    assert {name.partition("[")[0] for name in names} == set(RANGES)


# --------------------------------------------------------------------------------------------------------- derivatives
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_derivatives(structure: CostStructure, seed: int) -> None:
    rng = np.random.default_rng(seed)
    theta, where = parameters(rng), points(rng)
    values = cost.cost(theta, where, structure, derivatives=True)
    plain = cost.cost(theta, where, structure)
    assert plain.d_verify is plain.d_draft is plain.d_overhead is None
    step = 1e-5
    for part, derivative in (("verify_ms", "d_verify"), ("draft_ms", "d_draft"), ("overhead_ms", "d_overhead")):
        assert np.array_equal(getattr(values, part), getattr(plain, part))
        analytic = getattr(values, derivative)
        assert analytic.shape == (len(theta), len(where))
        for i in range(len(theta)):
            move = step * np.eye(len(theta))[i]
            up = getattr(cost.cost(theta + move, where, structure), part)
            down = getattr(cost.cost(theta - move, where, structure), part)
            # Central differences err by step^2 and by rounding of the value over the step.
            bound = 1e-7 * (np.abs(analytic[i]) + getattr(values, part) + 1e-3)
            difference = np.abs(analytic[i] - (up - down) / (2 * step))
            assert np.all(difference <= bound), (part, cost.parameter_names(COMMS)[i])


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_shares_of_a_part_are_the_elasticities_of_the_cycle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    theta, where = parameters(rng), points(rng)
    values = cost.cost(theta, where, STRUCTURES["experts"], derivatives=True)
    assert np.array_equal(values.cycle_ms, values.verify_ms + values.draft_ms + values.overhead_ms)
    # A draft cheaper by a factor lowers the cycle by its share: every setting's factor together.
    rows = [index(f"draft_comm[{comm}]") for comm in COMMS]
    assert values.d_draft is not None
    elasticity = values.d_draft[rows].sum(axis=0) / values.cycle_ms
    assert elasticity == pytest.approx(values.draft_ms / values.cycle_ms, rel=1e-12)


# -------------------------------------------------------------------------------------------------- signs and scales
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@settings(deadline=None, max_examples=25)
@given(seed=SEEDS)
def test_every_part_is_positive_and_verify_rises_with_tokens_and_batch(structure: CostStructure, seed: int) -> None:
    rng = np.random.default_rng(seed)
    theta, where = parameters(rng), points(rng, padded_tokens=None)
    where = replace(where, padded_tokens=where.sequences * where.query_tokens)
    values = cost.cost(theta, where, structure)
    assert np.all(values.verify_ms > 0.0)
    assert np.all((values.draft_ms > 0.0) == (where.steps > 0))
    assert np.all((values.overhead_ms > 0.0) == ((where.speculating > 0) | (where.topk > 1)))
    # One token more a sequence; from one row to several the attention kernel changes and may even get cheaper.
    more = replace(where, query_tokens=where.query_tokens + 1, padded_tokens=where.padded_tokens + where.sequences)
    rises = cost.cost(theta, more, structure).verify_ms - values.verify_ms
    assert np.all(rises[where.query_tokens > 1] > 0.0)
    ratio = (where.sequences + 1) / where.sequences
    wider = replace(where, sequences=where.sequences + 1, padded_tokens=where.padded_tokens * ratio)
    assert np.all(cost.cost(theta, wider, structure).verify_ms > values.verify_ms)
    assert np.all(cost.cost(theta, wider, structure).draft_ms >= values.draft_ms)
    longer = replace(where, context_ratio=2.0 * where.context_ratio)
    assert np.all(cost.cost(theta, longer, structure).verify_ms > values.verify_ms)
    farther = replace(where, steps=where.steps + 1)
    assert np.all(cost.cost(theta, farther, structure).draft_ms > values.draft_ms)


@settings(deadline=None, max_examples=25)
@given(SEEDS, st.floats(0.1, 10.0))
def test_the_plain_pass_is_the_unit_of_all_but_known_all_reduces(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    theta, where = parameters(rng), points(rng)
    where = replace(where, allreduce_ms=np.zeros(len(where)))
    slower = theta.copy()
    slower[index("log_pass_ms")] += np.log(scale)
    before, after = (cost.cost(t, where, STRUCTURES["experts"]) for t in (theta, slower))
    for part in ("verify_ms", "draft_ms", "overhead_ms"):
        assert getattr(after, part) == pytest.approx(scale * getattr(before, part), rel=1e-12)


@settings(deadline=None, max_examples=25)
@given(SEEDS)
def test_known_all_reduces_add_to_the_verify_pass(seed: int) -> None:
    rng = np.random.default_rng(seed)
    theta, where = parameters(rng), points(rng)
    without = replace(where, allreduce_ms=np.zeros(len(where)))
    added = (
        cost.cost(theta, where, STRUCTURES["dense"]).verify_ms
        - cost.cost(theta, without, STRUCTURES["dense"]).verify_ms
    )
    assert added == pytest.approx(where.allreduce_ms, rel=1e-9, abs=1e-9)


def test_an_offset_may_not_eat_the_pass() -> None:
    rng = np.random.default_rng(0)
    theta, where = parameters(rng), points(rng, allreduce_ms=np.zeros(12))
    names = [f"comm_offset[{comm}]" for comm in COMMS]
    for name in names:
        theta[index(name)] = 0.0
    whole = cost.cost(theta, where, STRUCTURES["dense"]).verify_ms
    for name in names:
        theta[index(name)] = -1e3
    assert cost.cost(theta, where, STRUCTURES["dense"]).verify_ms == pytest.approx(0.05 * whole, rel=1e-12)


def test_derivatives_where_an_offset_would_eat_the_pass() -> None:
    rng = np.random.default_rng(1)
    theta, where = parameters(rng), points(rng)
    for comm in COMMS:
        theta[index(f"comm_offset[{comm}]")] = -1e3
    analytic = cost.cost(theta, where, STRUCTURES["experts"], derivatives=True).d_verify
    assert analytic is not None
    step = 1e-5
    for i in range(len(theta)):
        move = step * np.eye(len(theta))[i]
        up, down = (cost.cost(theta + m, where, STRUCTURES["experts"]).verify_ms for m in (move, -move))
        assert analytic[i] == pytest.approx((up - down) / (2 * step), rel=1e-6, abs=1e-6)


# ------------------------------------------------------------------------------------------------- what terms answer to
def plain_theta() -> np.ndarray:
    """A pass of 10 ms and every other term about nothing."""
    theta = np.full(len(cost.parameter_names(COMMS)), -60.0)
    for name in (
        "tax",
        "logit_expert_share",
        "logit_overlap",
        "kv_multi",
        "verify_eager",
        "draft_graph_cycle",
        "draft_eager",
    ):
        theta[index(name)] = 0.0
    theta[index("log_pass_ms")] = np.log(10.0)
    theta[index("log_knee_tokens")] = 30.0
    for comm in COMMS:
        theta[index(f"comm_offset[{comm}]")] = 0.0
        theta[index(f"draft_comm[{comm}]")] = 0.0
    return theta


def one(num_steps: int, batch: float = 1.0, **changes: Any) -> CostPoints:
    values: dict[str, Any] = {
        "steps": num_steps, "query_tokens": num_steps + 1.0, "sequences": batch, "context_ratio": 1.0, "comm": 0,
        "speculating": float(num_steps > 0), "topk": 1.0, "draft_mode": 0, "verify_eager": 0.0, "allreduce_ms": 0.0,
        "padded_tokens": batch * (num_steps + 1.0),
    }  # fmt: skip
    whole = {"comm", "draft_mode"}
    return CostPoints(
        **{
            k: np.atleast_1d(np.asarray(v, dtype=np.intp if k in whole else float))
            for k, v in (values | changes).items()
        }
    )


def parts(theta: np.ndarray, where: CostPoints, structure: CostStructure = STRUCTURES["dense"]) -> list[float]:
    values = cost.cost(theta, where, structure)
    return [float(values.verify_ms[0]), float(values.draft_ms[0]), float(values.overhead_ms[0])]


@pytest.mark.parametrize(
    ("name", "value", "where", "expected"),
    [
        ("tax", np.log(1.5), one(4), [15.0, 0.0, 0.0]),
        ("tax", np.log(1.5), one(0), [10.0, 0.0, 0.0]),
        ("log_token", np.log(0.01), one(4, batch=2.0), [10.0 + 0.1 * 9, 0.0, 0.0]),
        ("log_knee_tokens", np.log(100.0), one(0, batch=100.0), [10.0 * 2**0.25, 0.0, 0.0]),
        ("log_knee_tokens", np.log(1.0), one(9, batch=100.0), [10.0 * 1000.0, 0.0, 0.0]),
        ("log_kv", np.log(0.02), one(3, batch=4.0, context_ratio=2.5), [10.0 + 0.2 * 4 * 2.5, 0.0, 0.0]),
        ("log_overhead", np.log(0.1), one(2), [10.0, 0.0, 1.0]),
        ("log_overhead", np.log(0.1), one(0), [10.0, 0.0, 0.0]),
        ("log_overhead", np.log(0.1), one(0, speculating=1.0), [10.0, 0.0, 1.0]),  # on, but nothing drafted
        ("log_tree", np.log(0.2), one(2, topk=3), [10.0, 0.0, 2.0]),
        ("log_tree", np.log(0.2), one(2), [10.0, 0.0, 0.0]),
        ("log_draft_base", np.log(0.05), one(3), [10.0, 0.5, 0.0]),
        ("log_draft_base", np.log(0.05), one(0), [10.0, 0.0, 0.0]),
        ("log_draft_step", np.log(0.05), one(3), [10.0, 1.5, 0.0]),
        ("log_comm_base[default]", np.log(0.3), one(3), [13.0, 0.0, 0.0]),
        ("log_comm_base[ring]", np.log(0.3), one(3), [10.0, 0.0, 0.0]),
        ("log_comm_token[default]", np.log(0.1), one(3), [13.0, 0.0, 0.0]),
        ("comm_offset[default]", 0.2, one(3), [12.0, 0.0, 0.0]),
        ("verify_eager", np.log(3.0), one(3, verify_eager=1.0), [30.0, 0.0, 0.0]),
        ("verify_eager", np.log(3.0), one(3), [10.0, 0.0, 0.0]),
    ],
)  # fmt: skip
def test_each_term_alone(name: str, value: float, where: CostPoints, expected: list[float]) -> None:
    theta = plain_theta()
    theta[index(name)] = value
    assert parts(theta, where) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("name", "where", "factor"),
    [
        ("log_draft_sequence", one(3, batch=5.0), 1.0 + 0.1 * 4),
        ("log_draft_width", one(3, batch=2.0, topk=4), 1.0 + 0.1 * 2 * 3),
        ("log_draft_width", one(3, batch=2.0), 1.0),
        ("log_draft_kv", one(3, batch=2.0, context_ratio=3.0), 1.0 + 0.1 * 2 * 3),
        ("draft_graph_cycle", one(3, draft_mode=1), 0.1),
        ("draft_graph_cycle", one(3), 1.0),
        ("draft_eager", one(3, draft_mode=2), 0.1),
        ("draft_eager", one(3, draft_mode=1), 1.0),
        ("draft_comm[tree]", one(3, comm=2), 0.1),
        ("draft_comm[tree]", one(3, comm=1), 1.0),
    ],
)
def test_each_factor_of_the_draft(name: str, where: CostPoints, factor: float) -> None:
    theta = plain_theta()
    theta[index("log_draft_step")] = np.log(0.05)
    theta[index(name)] = np.log(0.1)
    assert parts(theta, where)[1] == pytest.approx(1.5 * factor, rel=1e-6)


@pytest.mark.parametrize(("num_steps", "factor"), [(0, 1.0), (3, 4.0)])
def test_several_query_rows_change_the_attention_kernel(num_steps: int, factor: float) -> None:
    theta = plain_theta()
    theta[index("log_kv")] = np.log(0.1)
    theta[index("kv_multi")] = np.log(4.0)
    assert parts(theta, one(num_steps))[0] == pytest.approx(10.0 + factor, rel=1e-9)


def test_experts_cost_what_they_add_to_the_reference_pass() -> None:
    theta = plain_theta()
    theta[index("logit_overlap")] = -60.0
    structure = STRUCTURES["experts"]
    assert parts(theta, one(0), structure)[0] == pytest.approx(10.0, rel=1e-9)
    touched = float(cost.distinct_experts(16.0, 128, 8)) / 8.0
    assert parts(theta, one(3, batch=4.0), structure)[0] == pytest.approx(10.0 * (0.5 + 0.5 * touched), rel=1e-9)


@pytest.mark.parametrize(("logit_overlap", "tokens"), [(-60.0, 16.0), (60.0, 4.0), (0.0, 10.0)])
def test_overlap_counts_the_tokens_of_a_sequence_as_fewer(logit_overlap: float, tokens: float) -> None:
    theta = plain_theta()
    theta[index("logit_overlap")] = logit_overlap
    touched = float(cost.distinct_experts(tokens, 128, 8)) / 8.0
    expected = 10.0 * (0.5 + 0.5 * touched)
    assert parts(theta, one(3, batch=4.0), STRUCTURES["experts"])[0] == pytest.approx(expected, rel=1e-9)


def test_a_dense_model_has_no_expert_term() -> None:
    rng = np.random.default_rng(3)
    theta, where = parameters(rng), points(rng)
    values = cost.cost(theta, where, STRUCTURES["dense"], derivatives=True)
    other = theta.copy()
    other[[index("logit_expert_share"), index("logit_overlap")]] += 5.0
    assert np.array_equal(cost.cost(other, where, STRUCTURES["dense"]).verify_ms, values.verify_ms)
    assert values.d_verify is not None
    assert not np.any(values.d_verify[[index("logit_expert_share"), index("logit_overlap")]])


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_points_of_any_shapes_broadcast(structure: CostStructure) -> None:
    rng = np.random.default_rng(4)
    theta = parameters(rng)
    steps, batch, comm = np.arange(5.0), np.array([[1.0], [6.0], [17.0]]), np.array([[[0]], [[2]]])
    grid = one(
        0, steps=steps, query_tokens=steps + 1.0, sequences=batch, padded_tokens=batch * (steps + 1.0), comm=comm
    )
    grid = replace(grid, speculating=(steps > 0).astype(float), verify_eager=np.array([1.0]))
    flat = {name: np.broadcast_to(getattr(grid, name), (2, 3, 5)).ravel() for name in CostPoints.__slots__}
    values, expected = cost.cost(theta, grid, structure), cost.cost(theta, CostPoints(**flat), structure)
    for part in ("verify_ms", "draft_ms", "overhead_ms", "cycle_ms"):
        assert np.broadcast_to(getattr(values, part), (2, 3, 5)).ravel() == pytest.approx(
            getattr(expected, part), rel=1e-14
        )
    assert len(CostPoints(**flat)) == 30


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 512), st.data())
def test_distinct_experts_lie_between_one_token_and_all(num_experts: int, data: st.DataObject) -> None:
    per_token = data.draw(st.integers(1, num_experts))
    tokens = np.array([0.0, 1.0, 1.5, 2.0, 7.0, 1e6])
    touched = cost.distinct_experts(tokens, num_experts, per_token)
    assert np.all(np.diff(touched) >= -1e-9)
    assert touched[1] == pytest.approx(per_token, rel=1e-9)
    assert touched[5] == pytest.approx(num_experts, rel=1e-6)
    assert np.all(touched <= np.maximum(tokens, 1.0) * per_token * (1 + 1e-9))
