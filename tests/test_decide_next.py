"""What to measure next, and when to stop: the worth of knowing, and what following the advice leads to."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.next_measurement import EFFORT
from specmodel.posterior import Combination, covariance

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

POOR = {
    "plain only": fitted([plain()]),
    "plain and one run": fitted([plain(), spec(3, 170.0, 2.4)]),
    "one batch of two": fitted([plain(300.0, batch=4), spec(3, 700.0, 2.4, batch=4)]),
    "a setting unmeasured": fitted([plain(), spec(3, 170.0, 2.4)], comm={"ring": {}}),
    "a named workload": fitted([plain(workload="code"), spec(3, 170.0, 2.4, workload="code")]),
    "a context": fitted([plain(context_tokens=2048), spec(3, 170.0, 2.4, context_tokens=2048)]),
    "blind": fitted([plain(), spec(3, 170.0), spec(6, 160.0)]),
    "nothing": fitted(),
}


@pytest.mark.parametrize("name", POOR)
def test_the_next_measurement_is_a_row_of_the_format_that_is_not_there(name: str) -> None:
    model = POOR[name]
    optimum = sm.optimize(model)
    following = optimum.measure_next
    assert following is not None
    assert optimum.stop_reason == ""
    assert following.kind in ("cycles", "verify", "draft", "allreduce", "acceptance")
    assert following.gain_tok_s >= 0.002 * optimum.best.tok_s
    assert len(following.reason.splitlines()) == 1
    assert following.row["comm"] in model.deployment.structure.comm_names
    # With a number in it, it is a row that the file takes, at the place that was asked for.
    extended = cases.document([{**following.row, "tok_s": 100.0}], comm={"ring": {}})
    [row] = sm.from_dict(extended).measurements.cycles
    assert row.batch == optimum.batch
    [meant] = [
        c
        for c in optimum.table
        if (c.num_steps, c.topk, c.comm, c.num_draft_tokens) == (row.num_steps, row.topk, row.comm, row.verify_tokens)
    ]
    assert not meant.measured
    if name == "a context":
        assert row.context_tokens == 2048
    if name == "a named workload":
        assert row.num_steps == 0 or row.workload == "code"


def test_the_gain_is_the_expected_improvement_of_joint_draws() -> None:
    """E[ln max(f_c, f_best)] - E[ln f_best] of the row that is named, over the draws that the decision used."""
    for model in (POOR["plain and one run"], POOR["blind"]):
        optimum = sm.optimize(model)
        following = optimum.measure_next
        request, _ = model.request(np.arange(11), 1, ("default",))
        draws = np.log(model.draws(request, 2000))
        best, other = draws[:, optimum.best.num_steps], draws[:, following.row["num_steps"]]
        if following.row["num_steps"] == optimum.best.num_steps:
            continue
        gain = np.expm1(np.maximum(best, other).mean() - best.mean())
        assert following.gain_tok_s == pytest.approx(gain * optimum.best.tok_s, rel=1e-6)


def test_plain_decoding_takes_less_than_a_cycle_and_a_new_setting_more() -> None:
    """Of equal gains the cheaper measurement is named: what it takes is weighed, and said."""
    # Plain decoding and a chain may each be the best: the former is named though the latter would bring more.
    open_ = sm.optimize(fitted([spec(3, 101.0, 2.0), spec(4, 97.0, 2.1)]), max_steps=4)
    assert open_.measure_next.row["num_steps"] == 0
    assert open_.measure_next.effort == EFFORT["plain"]
    model = fitted(
        [plain(comm="ring"), spec(3, 170.0, 2.4, comm="ring")],
        allreduce=CURVES,
        comm={"ring": {}, "tree": {}},
        model=SIZES,
    )
    optimum = sm.optimize(model)
    assert {c.comm for c in optimum.table} == {"ring", "tree"}  # nothing was measured under default
    following = optimum.measure_next
    assert following.effort == EFFORT["cycle"] + EFFORT["setting"] * (following.row["comm"] == "tree")
    assert EFFORT["pass"] < EFFORT["plain"] < EFFORT["cycle"] < EFFORT["cycle"] + EFFORT["setting"]


def test_a_setting_of_which_nothing_is_known_is_no_candidate_unless_it_is_named() -> None:
    model = fitted([plain(), spec(3, 170.0, 2.4)], comm={"ring": {}})
    assert {c.comm for c in sm.optimize(model).table} == {"default"}
    assert {c.comm for c in sm.optimize(model, comm="ring").table} == {"ring"}


SIZES = {"hidden_size": 4096, "num_layers": 32}
CURVES = [{"size_bytes": s, "time_ms": 0.02 + s * 1e-7, "comm": c} for s in (8192, 131072) for c in ("ring", "tree")]
UNTIMED = {
    "nothing": {},
    "all-reduces alone": {"allreduce": CURVES, "comm": {"ring": {}, "tree": {}, "other": {}}, "model": SIZES},
    "drafts alone": {"draft": [{"num_steps": 3, "time_ms": 2.0}]},
    "acceptance alone": {"acceptance": [{"num_steps": 3, "conditional": [0.8, 0.7, 0.6]}]},
}


@pytest.mark.parametrize("name", UNTIMED)
def test_where_nothing_was_timed_plain_decoding_comes_first_and_no_gain_is_absurd(name: str) -> None:
    optimum = sm.optimize(fitted(**UNTIMED[name]))
    following = optimum.measure_next
    assert following.row["num_steps"] == 0
    assert following.row["comm"] in (("ring", "tree") if "allreduce" in UNTIMED[name] else ("default",))
    assert 0.0 < following.gain_tok_s < optimum.best.tok_s
    assert "nothing was timed" in following.reason


def test_a_point_of_a_table_is_proposed_where_there_is_one() -> None:
    """With exact tables of some sizes, one more size tells nearly what a whole run of it would, for less."""
    truth = cases.Truth(bumps=(0.03, -0.03, 0.03))
    tables = cases.tables(truth, (0, 1, 3, 7), relative_sd=0.002)
    entry = {"num_steps": 8, "conditional": list(truth.conditional[:8]), "sd": 0.002}
    model = fitted((), **tables, acceptance=[entry], system={"engine": cases.LOOP})
    optimum = sm.optimize(model, max_steps=8)
    following = optimum.measure_next
    assert following.kind in ("verify", "draft")
    assert following.effort == EFFORT["pass"]
    assert following.gain_tok_s >= 0.002 * optimum.best.tok_s
    # The row is one of the format, and stands nowhere in the file.
    more = {"verify": [*tables["verify"]], "draft": [*tables["draft"]]}
    more[following.kind].append({**following.row, "time_ms": 1.0})
    rows = getattr(cases.calibration((), **more).measurements, following.kind)
    assert len({(r.comm, r.batch, getattr(r, "tokens", None) or r.num_steps) for r in rows}) == len(rows)
    # Two sizes are no table.
    few = fitted((), **cases.tables(truth, (0, 3), relative_sd=0.002), acceptance=[entry])
    assert sm.optimize(few, max_steps=8).measure_next.kind == "cycles"


def test_the_covariance_of_two_quantities_is_linear_in_each() -> None:
    """ln f = ln E[N] - ln T, so its covariance with a part is that of the length less that of the cycle."""
    model = POOR["blind"]
    request, _ = model.request(np.arange(6), 1)
    post = model.posteriors[0]

    def moments(**of: float) -> Any:
        ((_, at, right),) = model.moments(0, request, Combination(**of))
        return at, right

    rate, right = moments(cycle=-1.0, length=1.0)
    for part in ({"verify": 1.0}, {"draft": 1.0}, {"cycle": 1.0, "verify": -1.0}):
        other, _ = moments(**part)
        whole = covariance(post, right, rate, other)
        pieces = [covariance(post, right, moments(**of)[0], other) for of in ({"length": 1.0}, {"cycle": -1.0})]
        np.testing.assert_allclose(whole, sum(pieces), atol=1e-10)
        np.testing.assert_allclose(whole.T, covariance(post, right, other, rate), atol=1e-10)


def test_where_all_is_known_there_is_nothing_to_gain() -> None:
    truth = cases.Truth()
    rows = [spec(k, truth.tok_s(k), truth.length(k) if k else None, sd_tok_s=0.01) for k in range(11)]
    optimum = sm.optimize(fitted(rows))
    assert optimum.measure_next is None
    assert "stop" in optimum.stop_reason
    assert "%" in optimum.stop_reason


def test_what_lies_too_far_is_not_proposed() -> None:
    """One measurement of a point that may not be recommended would not make it one."""
    for model in POOR.values():
        optimum = sm.optimize(model)
        row = optimum.measure_next.row
        shape = (row["num_steps"], row["comm"])
        [meant] = [c for c in optimum.table if (c.num_steps, c.comm) == shape]
        assert not meant.extrapolated or optimum.best.extrapolated


def follow(truth: Any, random: np.random.Generator) -> tuple[int, float]:
    """Measure what is proposed until it says stop: how often, and what the choice then loses."""
    comms = tuple(truth.comm)
    places = [(0, 1, comms[0]), (6, 1, comms[0])]
    rows = cases.measured_cycles(truth, random, places)
    count = cases.counted(truth, random, 6, 4000, 100)
    given = len(rows)
    while len(rows) < given + 25:
        optimum = sm.optimize(fitted(rows, acceptance=[count], **truth.sections()), max_steps=10)
        if optimum.measure_next is None:
            break
        row = optimum.measure_next.row
        rows += cases.measured_cycles(truth, random, [(row["num_steps"], 1, row["comm"])])
    rates = {(k, c): truth.tok_s(k, 1, c) for k in range(11) for c in comms}
    best = optimum.best
    return len(rows) - given, max(rates.values()) / rates[best.num_steps, best.comm] - 1.0


def test_following_the_advice_ends_soon_at_nearly_the_best() -> None:
    extra, regret = zip(*(follow(cases.drawn(r), r) for r in map(np.random.default_rng, range(4))), strict=True)
    assert max(extra) <= 8
    assert np.mean(regret) < 0.012


@pytest.mark.slow
def test_following_the_advice_over_many_deployments() -> None:
    extra, regret = zip(
        *(
            follow(cases.drawn(r, moe=bool(i % 2), settings=1 + i % 3), r)
            for i, r in enumerate(map(np.random.default_rng, range(30)))
        ),
        strict=True,
    )
    assert np.mean(extra) <= 7.0
    assert max(extra) <= 20
    assert np.mean(regret) < 0.008
    assert max(regret) < 0.08
