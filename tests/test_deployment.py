"""What is constant of a deployment: padding to captured graphs, all-reduce curves, contexts, points in their units."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.deployment import as_settings, deployment_of

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec = cases.plain, cases.spec


def deployment(cycles: Any = (), **sections: Any) -> Any:
    return deployment_of(cases.calibration(cycles, **sections))


def points(dep: Any, num_steps: Any, batch: Any = 1.0, **more: Any) -> Any:
    K = np.asarray(num_steps, dtype=float)
    given = {
        "num_steps": K,
        "verify_tokens": K + 1.0,
        "batch": batch,
        "context_tokens": None,
        "comm": 0,
        "speculating": K > 0,
        "topk": 1.0,
        "draft_mode": 0,
        "verify_eager": 0.0,
    }
    return dep.points(as_settings(**{**given, **more}))


def at(array: Any, shape: tuple[int, ...]) -> Any:
    return np.broadcast_to(array, shape)


def test_without_captured_sizes_nothing_is_padded() -> None:
    cost, residual = points(deployment(), [0, 3, 7], np.array([[1.0], [2.5], [100.0]]))
    want = np.array([[1.0], [2.5], [100.0]]) * [1, 4, 8]
    np.testing.assert_allclose(at(cost.padded_tokens, (3, 3)), want)
    np.testing.assert_allclose(at(residual.log_tokens, (3, 3)), np.log(want))
    assert not np.any(cost.verify_eager)
    assert deployment().graph_limit_tokens(np.array([4.0])).min() == np.inf


def test_tokens_are_padded_to_the_next_captured_size() -> None:
    dep = deployment(model={"cuda_graph_sizes": [1, 2, 4, 8, 16]})
    cost, residual = points(dep, [0, 1, 2, 3, 4, 7, 8, 15, 16, 99])
    assert list(at(cost.padded_tokens, (10,))) == [1, 2, 4, 4, 8, 8, 16, 16, 17, 100]
    assert list(at(cost.verify_eager, (10,))) == [0.0] * 8 + [1.0, 1.0]
    assert list(at(cost.sequences, (10,))) == [1.0] * 10
    np.testing.assert_allclose(at(residual.log_tokens, (10,)), np.log(at(cost.padded_tokens, (10,))))
    assert list(at(dep.graph_limit_tokens(np.array([1.0, 8.0])), (2,))) == [16.0, 16.0]
    fractional, _ = points(dep, 3, [1.5, 2.5])
    assert list(at(fractional.padded_tokens, (2,))) == [8, 16]


def test_sequences_are_padded_to_the_next_captured_size() -> None:
    dep = deployment(model={"cuda_graph_sizes": [1, 4, 8], "cuda_graph_unit": "sequences"})
    cost, _ = points(dep, 3, [1.0, 2.0, 4.0, 4.5, 8.0, 9.0])
    assert list(at(cost.sequences, (6,))) == [1, 4, 4, 8, 8, 9]
    assert list(at(cost.padded_tokens, (6,))) == [4, 16, 16, 32, 32, 36]
    assert list(at(cost.verify_eager, (6,))) == [0, 0, 0, 0, 0, 1]
    assert list(at(dep.graph_limit_tokens(np.array([1.0, 4.0])), (2,))) == [8.0, 32.0]


def test_an_eager_pass_runs_at_its_own_size() -> None:
    for unit in ("tokens", "sequences"):
        dep = deployment(model={"cuda_graph_sizes": [8], "cuda_graph_unit": unit})
        cost, _ = points(dep, [1, 2, 3], 1.5, verify_eager=1.0)
        assert list(at(cost.padded_tokens, (3,))) == [3.0, 4.5, 6.0]
        assert list(at(cost.sequences, (3,))) == [1.5] * 3


def test_the_batch_of_a_rank_is_its_share_and_at_least_one() -> None:
    dep = deployment(system={"data_parallel": 4})
    cost, _ = points(dep, 3, [1.0, 4.0, 10.0])
    assert list(at(cost.sequences, (3,))) == [1.0, 1.0, 2.5]
    assert list(at(cost.padded_tokens, (3,))) == [4.0, 4.0, 10.0]


def test_the_reference_context_is_the_median_and_an_unknown_one_is_the_reference() -> None:
    rows = [plain(context_tokens=1000), plain(context_tokens=4000), spec(3, 100.0, context_tokens=9000)]
    dep = deployment(rows, verify=[{"tokens": 1, "time_ms": 9.0, "context_tokens": 4000}])
    assert dep.context_reference == 4000
    cost, residual = points(dep, 3, context_tokens=[np.nan, 4000.0, 8000.0, 2000.0])
    np.testing.assert_allclose(at(cost.context_ratio, (4,)), [1.0, 1.0, 2.0, 0.5])
    np.testing.assert_allclose(at(residual.log_context, (4,)), np.log([1.0, 1.0, 2.0, 0.5]))
    none, _ = points(deployment([plain()]), 3, context_tokens=[np.nan, 10.0, 1e9])
    np.testing.assert_allclose(at(none.context_ratio, (3,)), 1.0)
    zero, _ = points(dep, 3, context_tokens=0.0)
    assert np.all(np.isfinite(np.log(zero.context_ratio)))


def test_experts_need_both_numbers() -> None:
    for model, experts in (
        ({"num_experts": 64, "experts_per_token": 8}, 64),
        ({"num_experts": 64}, 0),
        ({"experts_per_token": 8}, 0),
        ({}, 0),
    ):
        assert deployment(model=model).structure.num_experts == experts
    rows = [plain(300.0, batch=8), spec(3, 900.0, batch=16)]
    dep = deployment(rows, model={"num_experts": 64, "experts_per_token": 8}, system={"data_parallel": 4})
    assert dep.structure.reference_tokens == 2.0
    assert deployment(verify=[{"tokens": 4, "batch": 3, "time_ms": 9.0}]).structure.reference_tokens == 3.0


SIZED = {"hidden_size": 1024, "num_layers": 10, "activation_bytes": 2}


def reduced(**more: Any) -> dict[str, Any]:
    return {"size_bytes": 2048, "time_ms": 0.01, **more}


def test_all_reduces_of_a_pass_are_two_a_layer_of_the_tokens_of_a_rank() -> None:
    rows = [reduced(size_bytes=2048 * n, time_ms=0.010 + 0.001 * n) for n in (1, 2, 4, 8)]
    dep = deployment(allreduce=rows, model=SIZED)
    cost, _ = points(dep, [0, 1, 3, 7])
    np.testing.assert_allclose(at(cost.allreduce_ms, (4,)), 20 * np.array([0.011, 0.012, 0.014, 0.018]))
    wide = deployment(allreduce=rows, model={**SIZED, "activation_bytes": 4})
    np.testing.assert_allclose(at(points(wide, 1)[0].allreduce_ms, (1,)), 20 * 0.014)
    ranks = deployment(allreduce=rows, model=SIZED, system={"data_parallel": 2})
    np.testing.assert_allclose(at(points(ranks, 3, 2.0)[0].allreduce_ms, (1,)), 20 * 0.014)


def test_a_curve_needs_the_sizes_of_the_model() -> None:
    for model in ({}, {"hidden_size": 1024}, {"num_layers": 10}):
        dep = deployment(allreduce=[reduced()], model=model)
        assert not any(dep.own_curve)
        assert not np.any(points(dep, 3)[0].allreduce_ms)


def test_a_setting_without_a_curve_borrows_that_of_default() -> None:
    rows = [reduced(), reduced(comm="ring", time_ms=0.004)]
    dep = deployment(allreduce=rows, model=SIZED, comm={"ring": {}, "tree": {}})
    assert dep.structure.comm_names == ("default", "ring", "tree")
    assert dep.own_curve == (True, True, False)
    cost, _ = points(dep, 0, comm=np.array([0, 1, 2]))
    np.testing.assert_allclose(at(cost.allreduce_ms, (3,)), [0.2, 0.08, 0.2])


@pytest.mark.parametrize(
    ("rows", "time_ms"),
    [
        ([reduced(time_ms=0.01), reduced(time_ms=0.02), reduced(time_ms=0.03)], 0.02),  # the median of repeats
        ([reduced(time_ms=0.01, in_graph=True), reduced(time_ms=0.05, in_graph=False)], 0.01),  # as the pass runs
        ([reduced(time_ms=0.05, in_graph=False)], 0.05),
        ([{"size_bytes": 2048, "range_ms": [0.01, 0.04]}], 0.02),  # the middle of a range
        ([reduced(num_gpus=8), reduced(num_gpus=2, time_ms=0.5)], 0.01),  # of as many GPUs as a rank has
        ([reduced(num_gpus=2, time_ms=0.5)], None),
    ],
)
def test_which_rows_make_the_curve(rows: list[dict[str, Any]], time_ms: float | None) -> None:
    dep = deployment(allreduce=rows, model=SIZED, system={"tensor_parallel": 8})
    got = at(points(dep, 0)[0].allreduce_ms, (1,))[0]
    assert got == pytest.approx(0.0 if time_ms is None else 20 * time_ms)


def test_between_and_beyond_measured_sizes() -> None:
    sizes, times = [2048, 4096, 65_536], [0.010, 0.011, 0.10]
    rows = [reduced(size_bytes=s, time_ms=t) for s, t in zip(sizes, times, strict=True)]
    model = cases.fitted((), allreduce=rows, model=SIZED)
    [curve] = [c for c in model.deployment.curves if c is not None][:1]
    asked = np.array([1.0, 2048.0, 4096.0, 20_000.0, 65_536.0, 131_072.0, 1e12])
    got = curve.at(asked)
    assert got[0] == pytest.approx(0.010), "a smaller message takes as long as the smallest"
    np.testing.assert_allclose(got[[1, 2, 4]], times)
    assert np.all(np.diff(got) >= 0)
    assert got[5] <= 2.0 * got[4] * 1.0001, "bytes cost at most what they cost on average"
    assert np.isfinite(got).all()
    single = deployment(allreduce=[reduced()], model=SIZED).curves[0]
    np.testing.assert_allclose(single.at(np.array([1.0, 2048.0, 1e9])), 0.01)
    falling = deployment(allreduce=[reduced(time_ms=0.02), reduced(size_bytes=4096, time_ms=0.01)], model=SIZED).curves[
        0
    ]
    assert falling.at(np.array([1e9]))[0] >= 0.0099


def test_points_broadcast_against_each_other() -> None:
    dep = deployment(model={"cuda_graph_sizes": [1, 4, 8], "cuda_graph_unit": "sequences"}, comm={"ring": {}})
    K, batch = np.arange(3.0).reshape(3, 1, 1), np.array([1.0, 3.0]).reshape(2, 1)
    cost, residual = points(dep, K, batch, comm=np.array([0, 1]), context_tokens=np.nan)
    for kind in (cost, residual):
        shapes = [np.shape(getattr(kind, name)) for name in kind.__slots__]
        assert np.broadcast_shapes(*shapes) == (3, 2, 2)


def test_every_committed_deployment_has_points() -> None:
    for path in cases.COMMITTED[::6]:
        dep = deployment_of(sm.load(path))
        cost, _ = points(dep, [0, 1, 5], 2.0)
        assert np.all(np.isfinite(cost.padded_tokens))
        assert len(dep.curves) == len(dep.own_curve) == len(dep.structure.comm_names)
