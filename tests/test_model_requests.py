"""Arguments of a prediction: what is refused in words, what is answered however far it lies, and large grids."""

from __future__ import annotations

import runpy
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

MODELS = {
    "dense": fitted(
        [plain(), spec(3, 170.0, 2.4), spec(5, 160.0, 2.8), spec(3, 150.0, 2.4, topk=2, num_draft_tokens=6)]
    ),
    "experts": fitted(
        [plain(), spec(3, 140.0, 2.4), plain(300.0, batch=4)], model={"num_experts": 128, "experts_per_token": 8}
    ),
    "graphs": fitted(
        [plain(context_tokens=1024), spec(3, 170.0, 2.4, context_tokens=1024)],
        model={"cuda_graph_sizes": [1, 4, 8], "cuda_graph_unit": "sequences"},
        system={"data_parallel": 2},
    ),
    "nothing": fitted(),
}
NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "num_steps": [-1, 2.5, [1, 2.5], NAN, INF, "three", None, 1j, [[1], [2, 3]], {}],
    "batch": [0, 0.5, -1, NAN, INF, "many", None, [1, 0]],
    "topk": [0, -1, 2.5, NAN, "wide"],
    "num_draft_tokens": [0, -2, 4.5, NAN, "many"],
    "context_tokens": [-1, NAN, INF, "long"],
    "acceptance_length": [0.5, 0, -1, NAN, INF, "long"],
    "comm": ["tree", "", None, 3, ["default", "tree"]],
    "workload": ["other", "", 3, {}, {"default": 0}, {"default": NAN}, {"default": "a"}, ["default"]],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs], ids=lambda v: repr(v)[:30])
def test_what_cannot_be_is_refused_in_words(name: str, value: Any) -> None:
    arguments = {"num_steps": 3, **({"topk": 4} if name == "num_draft_tokens" else {}), name: value}
    with pytest.raises(sm.UsageError) as refused:
        MODELS["dense"].predict(**arguments)
    text = str(refused.value)
    assert name in text
    assert len(text.splitlines()) == 1


def test_shapes_that_do_not_fit_together_are_refused_in_words() -> None:
    with pytest.raises(sm.UsageError, match="shape"):
        MODELS["dense"].predict([1, 2], batch=[1, 2, 3])
    with pytest.raises(sm.UsageError, match="shape"):
        MODELS["dense"].predict([1, 2], topk=[2, 2, 2], num_draft_tokens=4)


@pytest.mark.parametrize("tokens", [1, 3, 5, 100])
def test_a_chain_verifies_one_more_than_it_drafts(tokens: int) -> None:
    """`topk` 1 with another number of draft tokens is no chain and no tree."""
    with pytest.raises(sm.UsageError, match="num_draft_tokens"):
        MODELS["dense"].predict(3, num_draft_tokens=tokens)
    assert MODELS["dense"].predict(3, num_draft_tokens=4).tok_s == MODELS["dense"].predict(3).tok_s


@pytest.mark.parametrize("level", [0, 1, -0.5, 1.5, NAN, INF, "most", None])
def test_levels_are_refused_in_words(level: Any) -> None:
    p = MODELS["dense"].predict(3)
    for call in (p.interval, p.quantile, lambda x: MODELS["dense"].interval_of("tok_s", 3, level=x)):
        with pytest.raises(sm.UsageError):
            call(level)


def test_parts_are_named() -> None:
    model = MODELS["dense"]
    with pytest.raises(sm.UsageError, match="verify_ms"):
        model.interval_of("speed", 3)
    p = model.predict(3)
    for quantity in ("tok_s", "cycle_ms", "verify_ms", "draft_ms", "acceptance_length"):
        middle, low, high = model.interval_of(quantity, 3)
        assert low < middle < high
        assert middle == pytest.approx(getattr(p, quantity), rel=1e-6)
    for quantity, share in (("verify_share", p.verify_ms), ("draft_share", p.draft_ms)):
        middle, low, high = model.interval_of(quantity, 3)
        assert 0.0 < low < middle < high < 1.0
        assert middle == pytest.approx(share / p.cycle_ms, rel=1e-6)


def test_parts_that_are_nothing_are_exactly_nothing() -> None:
    for model in MODELS.values():
        assert model.interval_of("draft_ms", 0) == (0.0, 0.0, 0.0)
        assert model.interval_of("draft_share", 0) == (0.0, 0.0, 0.0)
        assert model.interval_of("acceptance_length", 0) == pytest.approx((1.0, 1.0, 1.0), abs=1e-5)
        low, high = model.interval_of("verify_share", 0)[1:]
        assert 0.99 < low <= high <= 1.0


def test_the_interval_of_the_rate_leaves_out_the_noise_of_a_measurement() -> None:
    for model in MODELS.values():
        low, high = model.predict(3).interval(0.9)
        _, inner_low, inner_high = model.interval_of("tok_s", 3, level=0.9)
        if len(model.posteriors) == 1:
            assert low < inner_low < inner_high < high


FAR: list[dict[str, Any]] = [
    {"num_steps": 100},
    {"num_steps": 10_000},
    {"num_steps": 10**6},
    {"num_steps": 3, "batch": 1e6},
    {"num_steps": 3, "batch": 1e15},
    {"num_steps": 0, "batch": 1e15},
    {"num_steps": 3, "context_tokens": 10**9},
    {"num_steps": 3, "context_tokens": 0},
    {"num_steps": 3, "acceptance_length": 1e6},
    {"num_steps": 8, "topk": 64, "num_draft_tokens": 512},
    {"num_steps": 3, "topk": 10**6, "num_draft_tokens": 8},
    {"num_steps": 3, "topk": 4, "num_draft_tokens": 10**6},
    {"num_steps": 64, "topk": 4, "num_draft_tokens": 8},
    {"num_steps": 1, "topk": 1000, "num_draft_tokens": 2},
]


@pytest.mark.parametrize("far", FAR, ids=repr)
@pytest.mark.parametrize("name", MODELS)
def test_however_far_it_is_finite_or_refused(name: str, far: dict[str, Any]) -> None:
    try:
        p = MODELS[name].predict(**far)
    except sm.UsageError:
        return
    batch = far.get("batch", 1)
    cases.identities(p, batch)
    if far["num_steps"] > 100 or batch > 100:
        assert p.extrapolated
        low, high = p.interval()
        assert high / low > 1.5


def test_the_farther_the_less_is_known() -> None:
    model = MODELS["dense"]
    for arguments in ({"num_steps": [5, 8, 14, 40]}, {"num_steps": 3, "batch": [1, 4, 64, 4096]}):
        low, high = model.predict(**arguments).interval()
        assert np.all(np.diff(np.log(high / low)) > 0)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (1, 1, 1), ()])
def test_any_shape_of_array_is_answered_in_that_shape(shape: tuple[int, ...]) -> None:
    K = np.full(shape, 3)
    for model in MODELS.values():
        p = model.predict(K)
        assert np.shape(p.tok_s) == np.shape(p.extrapolated) == np.shape(p.speedup) == shape
        low, high = p.interval()
        assert np.shape(low) == np.shape(high) == shape


def test_lists_tuples_and_integers_of_every_width_are_numbers() -> None:
    model = MODELS["dense"]
    want = model.predict([0, 3, 5]).tok_s
    for K in (
        (0, 3, 5),
        np.array([0, 3, 5], dtype=np.int8),
        np.array([0.0, 3.0, 5.0], dtype=np.float32),
        range(0, 6, 5),
    ):
        got = model.predict(K).tok_s
        assert list(got) == [want[0], *([want[1]] if len(got) == 3 else []), want[2]]
    assert model.predict(True).tok_s == model.predict(1).tok_s


def test_arguments_are_left_as_they_are() -> None:
    K, batch, length = np.arange(4), np.array([1.0, 2.0, 3.0, 4.0]), np.array([1.0, 1.5, 2.0, 2.5])
    for array in (K, batch, length):
        array.setflags(write=False)
    p = MODELS["dense"].predict(K, batch, acceptance_length=length)
    first = p.interval()
    np.testing.assert_array_equal(first, p.interval())
    assert p.tok_s.shape == (4,)


def test_pieces_of_work_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    K, batch = np.meshgrid(np.arange(12), np.geomspace(1, 64, 31))
    for model in MODELS.values():
        module = sys.modules[type(model).__module__]
        whole = model.predict(K, batch, acceptance_length=np.where(K > 5, 2.0, 1.5))
        bounds = whole.interval()
        with monkeypatch.context() as patch:
            patch.setattr(module, "CHUNK", 7)
            np.testing.assert_allclose(
                model.predict(K, batch, acceptance_length=np.where(K > 5, 2.0, 1.5)).interval(), bounds, rtol=1e-9
            )


def test_a_large_grid_takes_bounded_memory() -> None:
    """Each further point of a grid costs about its answer, not its covariance with eighty observations."""
    rows = [spec(k, 100.0 * b, 1.0 + 0.4 * k if k else None, batch=b) for k in range(5) for b in range(1, 17)]
    model = fitted(rows)

    def peak_bytes(points: int) -> int:
        K, batch = np.meshgrid(np.arange(10), np.geomspace(1, 512, points // 10))
        tracemalloc.start()
        try:
            low, high = model.predict(K, batch).interval()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert np.all(low < high)
        return peak

    few, many = 20_000, 50_000
    assert (peak_bytes(many) - peak_bytes(few)) / (many - few) < 1200


def test_a_mixture_lies_between_its_parts() -> None:
    rows = [plain(), spec(3, 140.0, 1.9, workload="chat"), spec(3, 230.0, 3.2, workload="code")]
    model = fitted(rows)
    one, two = (model.predict(np.arange(1, 8), workload=w).acceptance_length for w in ("chat", "code"))
    for share in (0.2, 0.5, 0.9):
        both = model.predict(np.arange(1, 8), workload={"chat": share, "code": 1 - share}).acceptance_length
        assert np.all((one < both) & (both < two))
        np.testing.assert_allclose(1.0 / both, share / one + (1 - share) / two, rtol=1e-6)
    ten = model.predict(3, workload={"chat": 10, "code": 10})
    assert ten.tok_s == pytest.approx(model.predict(3, workload={"chat": 0.5, "code": 0.5}).tok_s)


def test_a_workload_with_plain_rows_only_is_the_mixture() -> None:
    rows = [plain(), spec(3, 140.0, 1.9, workload="chat"), spec(3, 230.0, 3.2, workload="code")]
    model = fitted(rows)
    default, mixture = (model.predict(3, workload=w).acceptance_length for w in ("default", {"chat": 1, "code": 1}))
    assert default == pytest.approx(mixture, rel=1e-6)
