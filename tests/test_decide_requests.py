"""Objectives, limits, distributions of batches, and calls that cannot be answered."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

TRUTH = cases.Truth(knee_tokens=60.0, draft_step=0.05)
PLACES = [(k, b, "default") for b in (1, 8, 32) for k in (0, 1, 3, 6)]
MODEL = fitted(cases.measured_cycles(TRUTH, np.random.default_rng(5), PLACES, relative_sd=0.002), comm={"ring": {}})


def test_time_per_token_and_throughput_agree_at_one_batch() -> None:
    for batch in (1, 8, 32):
        fast, quick = (sm.optimize(MODEL, batch=batch, objective=name) for name in ("tok_s", "tpot_ms"))
        assert fast.best == quick.best
        assert (fast.objective, quick.objective) == ("tok_s", "tpot_ms")


def test_a_limit_leaves_out_what_is_more_likely_above_it() -> None:
    free = sm.optimize(MODEL, batch=32)
    limit = float(np.median([c.tpot_ms for c in free.table]))
    held = sm.optimize(MODEL, batch=32, max_tpot_ms=limit)
    assert held.best.tpot_ms <= limit * 1.001
    out = [c for c in held.table if c.tpot_ms > 1.02 * limit]
    assert out
    assert all(c.probability_best == 0.0 for c in out)
    assert all(c not in held.ties for c in out)
    assert sm.optimize(MODEL, batch=32, max_tpot_ms=1e6).best == free.best


def test_goodput_counts_only_what_keeps_the_limit() -> None:
    """At a loose limit goodput is throughput; at a tight one the setting that keeps it most surely wins."""
    shares = {1.0: 0.2, 8.0: 0.5, 32.0: 0.3}
    loose = sm.optimize(MODEL, batch=shares, objective="goodput", max_tpot_ms=1e6)
    free = sm.optimize(MODEL, batch=shares)
    assert loose.best == free.best
    assert loose.batch == 8.0, "the likeliest batch"
    best = max(range(11), key=lambda k: sum(s * TRUTH.tok_s(k, b) for b, s in shares.items()))
    mine = sum(s * TRUTH.tok_s(loose.best.num_steps, b) for b, s in shares.items())
    assert mine > 0.98 * sum(s * TRUTH.tok_s(best, b) for b, s in shares.items())
    tight_ms = 1.02 * min(c.tpot_ms for c in sm.optimize(MODEL, batch=8).table)
    tight = sm.optimize(MODEL, batch=shares, objective="goodput", max_tpot_ms=tight_ms)
    assert tight.best.tpot_ms < 1.01 * tight_ms
    for optimum in (loose, tight):
        assert sum(c.probability_best for c in optimum.table) == pytest.approx(1.0)
        assert np.isfinite([c.expected_regret for c in optimum.table]).all()
        assert min(c.expected_regret for c in optimum.table) >= 0.0


def test_shares_of_batches_are_relative() -> None:
    few = sm.optimize(MODEL, batch={1: 1, 8: 3})
    many = sm.optimize(MODEL, batch={1: 0.25, 8: 0.75})
    assert few.best == many.best
    assert [c.probability_best for c in few.table] == [c.probability_best for c in many.table]


def test_a_numpy_number_is_a_number() -> None:
    by_numpy = sm.optimize(MODEL, batch=np.float64(8), max_steps=np.int64(4), context_tokens=np.int64(5))
    assert by_numpy == sm.optimize(MODEL, batch=8.0, max_steps=4, context_tokens=5)


NAN, INF = float("nan"), float("inf")
WRONG: dict[str, list[Any]] = {
    "batch": [
        "four",
        [1, 2],
        [],
        (),
        NAN,
        INF,
        0,
        0.5,
        -1,
        {},
        {1: 0},
        {1: -1},
        {1: NAN},
        {1: "a"},
        {0.5: 1},
        {"a": 1},
    ],
    "comm": ["tree", "", 3, [], [None], ["default", "tree"], {"a"}],
    "max_steps": [-1, 2.5, NAN, "three", [3]],
    "workload": ["other", "", 3, {}, {"default": 0}, {"default": -1}, {"default": NAN}, {"default": "a"}, {"other": 1}],
    "context_tokens": [-1, NAN, INF, "a"],
    "trees": [
        3,
        [3],
        [(1, 2)],
        [(0, 2, 4)],
        [(2, 0, 4)],
        [(2, 2, 1)],
        [(2, 1, 4)],
        ["abc"],
        [(2.5, 2, 4)],
        [(NAN, 2, 4)],
    ],
    "objective": ["", "speed", None, ["tok_s"], "goodput"],
    "max_tpot_ms": [0, -1, NAN, "five", [5.0], 1e-9],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs], ids=lambda v: repr(v)[:30])
def test_what_cannot_be_asked_is_refused_in_words(name: str, value: Any) -> None:
    with pytest.raises(sm.UsageError) as refused:
        sm.optimize(MODEL, **{name: value})
    text = str(refused.value)
    assert len(text.splitlines()) == 1
    assert len(text) > 20
    words = {"trees": ("tree",), "context_tokens": ("context_tokens",), "max_tpot_ms": ("max_tpot_ms",)}
    assert any(word in text for word in words.get(name, (name,))), text


@pytest.mark.parametrize("value", [True, "step", 1.0, [1]])
def test_graph_modes_are_flags(value: Any) -> None:
    """Anything that is true or false is taken as such; nothing else breaks the call."""
    try:
        optimum = sm.optimize(MODEL, max_steps=1, cuda_graph=value)
    except sm.UsageError:
        return
    assert np.isfinite(optimum.best.tok_s)


def test_a_limit_that_nothing_keeps_says_what_is_the_fastest() -> None:
    fastest = min(c.tpot_ms for c in sm.optimize(MODEL, batch=8).table)
    with pytest.raises(sm.UsageError, match=rf"max_tpot_ms.*{fastest:.3g}"):
        sm.optimize(MODEL, batch=8, max_tpot_ms=0.5 * fastest)
    with pytest.raises(sm.UsageError, match="max_tpot_ms"):
        sm.optimize(MODEL, batch={8: 1}, objective="goodput", max_tpot_ms=0.01 * fastest)


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    with pytest.raises(sm.UsageError, match="default, ring"):
        sm.optimize(MODEL, comm="tree")
    with pytest.raises(sm.UsageError, match="default"):
        sm.optimize(MODEL, workload="chat")
    with pytest.raises(sm.UsageError, match="default, ring"):
        MODEL.predict(3, comm="tree")
    with pytest.raises(sm.UsageError, match="default"):
        MODEL.predict(3, workload="chat")


def test_nothing_is_too_large_to_be_answered_or_refused() -> None:
    """In bounded time: a very long chain, a very wide tree, very many sequences, a very long context."""
    for options in (
        {"max_steps": 10**9},
        {"trees": [(10**9, 10**9, 10**9)]},
        {"trees": [(3, 10**9, 8)]},
        {"trees": [(3, 4, 10**9)]},
        {"batch": 1e15},
        {"context_tokens": 10**15},
    ):
        try:
            optimum = sm.optimize(MODEL, **options)
        except sm.UsageError:
            continue
        assert np.isfinite([c.tok_s for c in optimum.table]).all()
