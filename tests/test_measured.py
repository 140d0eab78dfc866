"""What was measured, and what lies too far from it: the ground of every warning and of `extrapolated`."""

from __future__ import annotations

import itertools
import math
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.measured import default_context

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

VERIFY = [{"tokens": n, "time_ms": 10.0 + 0.1 * n} for n in (1, 2, 5)]
SWEEP = [plain(), spec(1, 130.0, 1.7), spec(3, 170.0, 2.4)]
GRAPHS_BY_SEQUENCES = {"cuda_graph_sizes": [1, 2], "cuda_graph_unit": "sequences"}
FILES: dict[str, tuple[dict[str, Any], int, tuple[float, ...]]] = {
    # what is in the file; the longest measured chain; the measured batches
    "sweep": ({"cycles": SWEEP}, 3, (1.0,)),
    "plain only": ({"cycles": [plain()]}, 0, (1.0,)),
    "bounds do not count": ({"cycles": [*SWEEP, {"num_steps": 9, "batch": 64, "tok_s_at_most": 200.0}]}, 3, (1.0,)),
    "acceptance counts": (
        {"cycles": [plain()], "acceptance": [{"num_steps": 6, "survival": [0.8, 0.6]}]},
        6,
        (1.0,),
    ),
    "tables only": ({"verify": [*VERIFY, {"tokens": 16, "batch": 4, "time_ms": 13.0}]}, 4, (1.0, 4.0)),
    "several batches": (
        {"cycles": [*SWEEP, spec(2, 2000.0, 2.1, batch=16), plain(600.0, batch=7.5)]},
        3,
        (1.0, 7.5, 16.0),
    ),
    "ranks": (
        {"cycles": [spec(2, 2000.0, 2.1, batch=16)], "verify": VERIFY, "system": {"data_parallel": 8}},
        2,
        (8.0, 16.0),
    ),
    "tree": ({"cycles": [plain(), spec(4, 150.0, 2.4, topk=4, num_draft_tokens=8)]}, 4, (1.0,)),
    "graphs by tokens": ({"cycles": SWEEP, "model": {"cuda_graph_sizes": [1, 2, 4, 8]}}, 3, (1.0,)),
    "graphs by sequences": (
        {"cycles": SWEEP, "model": GRAPHS_BY_SEQUENCES},
        3,
        (1.0,),
    ),
    "a cycle beyond the graphs": (
        {"cycles": [plain(), spec(8, 120.0, 4.0)], "model": {"cuda_graph_sizes": [1, 2, 4, 8]}},
        8,
        (1.0,),
    ),
    "cycles and passes beyond the graphs": (
        {
            "cycles": [*SWEEP, spec(5, 600.0, 2.9, batch=8, comm="ring"), spec(5, 300.0, 2.9, batch=2)],
            "verify": [*VERIFY, {"tokens": 16, "batch": 4, "time_ms": 13.0}],
            "model": {"cuda_graph_sizes": [1, 2, 4], "cuda_graph_unit": "tokens"},
            "comm": {"ring": {}},
        },
        5,
        (1.0, 2.0, 4.0, 8.0),
    ),
    "a batch beyond the graphs": (
        {"cycles": [*SWEEP, spec(3, 600.0, 2.4, batch=8)], "model": GRAPHS_BY_SEQUENCES},
        3,
        (1.0, 8.0),
    ),
    "graphs of each rank": (
        {
            "cycles": [spec(2, 2000.0, 2.1, batch=16)],
            "model": {"cuda_graph_sizes": [1, 2, 4, 8]},
            "system": {"data_parallel": 4},
        },
        2,
        (16.0,),
    ),
}


def too_far(sections: dict[str, Any], longest: int, batches: tuple[float, ...], num_steps: int, batch: float) -> bool:
    """The rule, word for word."""
    model, ranks = sections.get("model", {}), sections.get("system", {}).get("data_parallel", 1)
    if num_steps > 2 * longest:
        return True
    if all(batch > 4 * b or batch < b / 4 for b in batches):
        return True
    if "cuda_graph_sizes" in model:
        sequences = max(batch / ranks, 1.0)
        tokens = sequences * (num_steps + 1)
        cycles = [(c.get("batch", 1) / ranks, c["num_steps"] + 1) for c in sections.get("cycles", ())]
        passes = [(v.get("batch", 1), v["tokens"]) for v in sections.get("verify", ())]
        if (sequences, tokens) in [(b, b * n) for b, n in cycles] + passes:
            return False
        size = sequences if model.get("cuda_graph_unit") == "sequences" else tokens
        return bool(size > model["cuda_graph_sizes"][-1])
    return False


@pytest.mark.parametrize("name", FILES)
def test_extrapolated_by_the_rules(name: str) -> None:
    sections, longest, batches = FILES[name]
    model = fitted(**sections)
    assert model.measured.largest_steps == longest
    assert model.measured.batches == batches
    steps = range(20)
    sizes = (1.0, 1.5, 2.0, 4.0, 4.01, 5.0, 8.0, 16.0, 30.0, 64.0, 65.0, 300.0)
    K, batch = np.meshgrid(steps, sizes, indexing="ij")
    got = model.predict(K, batch)
    want = [[too_far(sections, longest, batches, k, b) for b in sizes] for k in steps]
    np.testing.assert_array_equal(got.extrapolated, want)
    cases.identities(got, batch)
    assert {model.predict(k, b).extrapolated for k, b in itertools.product(steps[::7], sizes[::4])} <= {True, False}


@pytest.mark.parametrize("name", FILES)
def test_beyond_the_measured_there_is_a_warning_and_within_there_is_none(name: str) -> None:
    sections, longest, batches = FILES[name]
    model = fitted(**sections)

    def about(word: str, K: int, batch: float) -> bool:
        return any(word in w for w in model.predict(K, batch).warnings)

    inside = batches[0]
    assert not about("num_steps", longest, inside)
    assert about("num_steps", longest + 1, inside)
    assert not about("outside the measured", 0, batches[-1])
    assert about("outside the measured", 0, batches[-1] + 0.5)
    if batches[0] > 1:
        assert about("outside the measured", 0, batches[0] - 0.5)
    beyond_graphs = too_far(sections, 100, (4.0 * batches[-1],), longest, 4.0 * batches[-1])
    assert about("captured", longest, 4.0 * batches[-1]) == beyond_graphs


def test_with_nothing_measured_everything_is_extrapolated() -> None:
    for sections in (
        {},
        {"draft": [{"num_steps": 3, "time_ms": 1.0}]},
        {"acceptance": [{"num_steps": 3, "survival": [0.9]}]},
    ):
        model = fitted(**sections)
        p = model.predict([0, 1, 3], batch=[1, 2, 1])
        assert p.extrapolated.all()
        assert any("guess" in w for w in p.warnings)


def test_speeds_are_those_of_rows_that_state_one() -> None:
    rows = [
        plain(),
        spec(3, 170.0, 2.4),
        {"num_steps": 4, "cycle_ms": 14.0},
        {"num_steps": 5, "range_tpot_ms": [6.0, 7.0]},
        {"num_steps": 6, "tok_s_at_most": 170.0},
        spec(7, 150.0, cuda_graph=False),
        spec(8, 150.0, verify_cuda_graph=False),
        spec(2, 130.0, workload="code"),
        spec(1, 130.0, context_tokens=9000),
        spec(9, 400.0, batch=4),
        spec(2, 130.0, comm="ring"),
        spec(3, 150.0, topk=2, num_draft_tokens=6),
    ]
    m = fitted(rows, comm={"ring": {}}).measured

    def has(
        K: int,
        topk: int = 1,
        tokens: int = 0,
        batch: float = 1.0,
        comm: str = "default",
        context: Any = None,
        **more: Any,
    ) -> bool:
        workloads = more.pop("workloads", ("default",))
        return m.has_speed((K, topk, tokens or K + 1), batch, comm, context, workloads, **more)

    assert [has(k) for k in range(10)] == [True, True, False, True, True, True, False, False, False, False]
    assert has(2, workloads=("code",))
    assert has(2, comm="ring")
    assert not has(3, comm="ring")
    assert has(0, workloads=("code",)), "plain decoding does not depend on acceptance"
    assert not has(0, comm="ring")
    assert has(9, batch=4.0)
    assert not has(9, batch=2.0)
    assert has(1, context=9000)
    assert not has(1, context=8000)
    assert has(3, context=8000), "a row without a context holds at any"
    assert has(3, topk=2, tokens=6)
    assert not has(3, topk=2, tokens=8)
    assert has(7, cuda_graph=False)
    assert not has(3, cuda_graph=False)
    assert has(8, verify_cuda_graph=False)
    assert has(0, cuda_graph=False), "plain decoding drafts nothing"
    assert not has(0, verify_cuda_graph=False)


def test_the_plain_rate_is_the_best_of_the_place() -> None:
    rows = [
        plain(100.0),
        plain(104.0),
        plain(110.0, comm="ring"),
        plain(90.0, comm="tree", workload="code"),
        plain(300.0, batch=4),
        plain(50.0, context_tokens=32_768),
        plain(60.0, context_tokens=16_384, workload="code"),
        {"num_steps": 0, "batch": 2, "cycle_ms": 12.5},
        {"num_steps": 0, "batch": 3, "tpot_ms": 12.5},
        plain(200.0, speculation=True),
        {"num_steps": 0, "batch": 8, "tok_s_at_most": 500.0},
    ]
    m = fitted(rows, comm={"ring": {}, "tree": {}}).measured

    def rate(batch: float, context: Any = None, workload: str = "default") -> Any:
        found = m.plain_rate(batch, context, (workload,))
        return None if found is None else (found.comm, found.tok_s)

    assert rate(1.0, 2048) == ("ring", 110.0)
    assert rate(1.0, 2048, "code") == ("tree", 90.0), "that of the same workload where one was measured"
    assert rate(1.0, 2048, "other") == ("ring", 110.0)
    assert rate(4.0) == ("default", 300.0)
    assert rate(2.0) == ("default", pytest.approx(160.0))
    assert rate(3.0) == ("default", pytest.approx(240.0))
    assert rate(8.0) is None, "a bound is no rate"
    assert rate(16.0) is None
    only = fitted(rows[5:7]).measured
    assert only.plain_rate(1.0, 32_768, ("default",)).tok_s == 50.0
    assert only.plain_rate(1.0, 16_384, ("default",)).tok_s == 60.0
    assert only.plain_rate(1.0, 8192, ("default",)) is None


def test_repeated_plain_rows_count_by_their_mean() -> None:
    m = fitted([plain(100.0), plain(104.0)]).measured
    assert m.plain_rate(1.0, None, ("default",)).tok_s == pytest.approx(102.0)


def test_speedup_is_over_the_plain_rate_of_its_place() -> None:
    rows = [plain(100.0), plain(340.0, batch=4), plain(60.0, context_tokens=32_768), spec(3, 180.0, 2.5)]
    model = fitted(rows)
    p = model.predict(3, batch=[1, 4, 1], context_tokens=[1024, 1024, 32_768])
    np.testing.assert_allclose(p.speedup, p.tok_s / [100.0, 340.0, 100.0], rtol=1e-9)
    assert not any("prediction" in w for w in p.warnings)
    elsewhere = model.predict(3, batch=[1, 2])
    assert elsewhere.speedup[1] == pytest.approx(elsewhere.tok_s[1] / model.predict(0, 2).tok_s, rel=1e-6)
    assert any("batch 2" in w and "prediction" in w for w in elsewhere.warnings)
    many = model.predict(3, batch=np.arange(1, 30))
    [named] = [w for w in many.warnings if "prediction" in w]
    assert len(named) < 200


def test_where_no_plain_was_measured_speedup_is_over_the_best_predicted_setting() -> None:
    model = fitted([spec(3, 180.0, 2.5), spec(3, 150.0, 2.5, comm="slow")], comm={"slow": {}})
    p = model.predict(3, comm="slow")
    best = max(model.predict(0, comm=c).tok_s for c in ("default", "slow"))
    assert p.speedup == pytest.approx(p.tok_s / best, rel=1e-6)
    assert any("prediction" in w for w in p.warnings)


def test_plain_rates_of_several_contexts_beside_predicted_ones() -> None:
    """Measured at two contexts and predicted at the rest: one call, any shape of arguments."""
    rows = [
        plain(60.0, context_tokens=32_768),
        plain(96.0, context_tokens=1024),
        spec(3, 180.0, 2.5, context_tokens=1024),
    ]
    model = fitted(rows)
    contexts = np.array([0, 1024, 8192, 32_768])
    base = np.array([model.predict(0, context_tokens=c).tok_s for c in contexts])
    base[[1, 3]] = [96.0, 60.0]
    for batch in (1, np.ones((2, 1)), np.ones((3, 1, 4))):
        p = model.predict(3, batch, context_tokens=contexts)
        np.testing.assert_allclose(p.speedup, p.tok_s / base * np.ones(p.tok_s.shape), rtol=1e-6)


def test_the_default_context_is_the_one_with_most_rows() -> None:
    from specmodel.measured import default_context

    rows = [
        plain(context_tokens=1024),
        spec(1, 130.0, 1.7, context_tokens=1024),
        spec(2, 130.0, 1.9, context_tokens=9000),
        plain(300.0, batch=4, context_tokens=9000),
        plain(320.0, batch=8),
    ]
    verify = [{"tokens": 4, "batch": 2, "context_tokens": 500, "time_ms": 9.0}] * 2
    calibration = cases.calibration(rows, verify=verify, system={"data_parallel": 2})
    assert default_context(calibration, 1.0) == 1024
    assert default_context(calibration, 4.0) == 500
    assert default_context(calibration, 8.0) is None
    assert default_context(calibration, 3.0) == 500  # that of the nearest batch
    tie = cases.calibration([plain(context_tokens=1024), plain(context_tokens=512)])
    assert default_context(tie, 1.0) == 512
    model = sm.fit(calibration)
    assert sm.optimize(model, batch=1).best.tok_s == pytest.approx(
        model.predict(sm.optimize(model, batch=1).best.num_steps, 1, context_tokens=1024).tok_s
    )


def test_a_batch_is_measured_if_any_pass_or_cycle_ran_with_it() -> None:
    m = fitted(
        [plain(batch=2)], verify=[{"tokens": 12, "batch": 3, "time_ms": 9.0}], system={"data_parallel": 2}
    ).measured
    assert m.batches == (2.0, 6.0)
    assert not any(math.isnan(b) for b in m.batches)
    assert (12.0, 3.0, "default") in m.verify
    assert (1.0, 1.0, "default") in m.verify


def test_whatever_is_far_is_said_in_words() -> None:
    """A gap inside the measured batches, and batches where only plain decoding was measured."""
    inside = fitted([plain(batch=b) for b in (1, 100)] + [spec(2, 150.0, 2.0, batch=b) for b in (1, 100)])
    drafted = fitted([plain(batch=b) for b in (1, 8, 32)] + [spec(2, 150.0, 2.0, batch=b) for b in (1, 2)])
    for model, steps, batch, words in (
        (inside, 2, 10, "batch 10 is more than four times from every batch measured with speculation (1, 100)"),
        (drafted, 2, 32, "batch 32 is more than four times from every batch measured with speculation (1, 2)"),
    ):
        p = model.predict(steps, batch)
        assert p.extrapolated
        assert words in p.warnings
    assert not drafted.predict(0, 32).extrapolated
    assert not any("four times" in w for w in drafted.predict(0, 32).warnings)


def test_a_batch_without_rows_is_answered_at_the_context_of_the_nearest() -> None:
    rows = [plain(batch=b, context_tokens=c) for b, c in ((1, 4096), (1, 4096), (16, 1024), (64, 1024), (64, 8192))]
    cal = cases.calibration(rows)
    assert [default_context(cal, b) for b in (1, 2, 16, 32, 64, 512)] == [4096, 4096, 1024, 1024, 1024, 1024]
    # Where the rows of a batch state none, none is put into them.
    mixed = cases.calibration([*rows, plain(batch=32)])
    assert default_context(mixed, 32) is None
    assert default_context(cases.calibration([plain()]), 1) is None
