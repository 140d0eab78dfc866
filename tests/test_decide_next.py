"""What to measure next, and when to stop: the worth of knowing, and what following the advice leads to."""

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
    """E[max(f_c, f_best)] - E[f_best] of the row that is named, over the draws that the decision used."""
    for model in (POOR["plain and one run"], POOR["blind"]):
        optimum = sm.optimize(model)
        following = optimum.measure_next
        request, _ = model.request(np.arange(11), 1, ("default",))
        draws = model.draws(request, 2000)
        best, other = draws[:, optimum.best.num_steps], draws[:, following.row["num_steps"]]
        if following.row["num_steps"] == optimum.best.num_steps:
            continue
        assert following.gain_tok_s == pytest.approx(np.maximum(best, other).mean() - best.mean(), rel=1e-6)


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
