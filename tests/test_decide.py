"""The decision: its rule, its probabilities, ties, ceilings and words, against direct computation and known answers."""

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

TWO = {"comm": {"default": {}, "ring": {}}}
TRUTH = cases.Truth()


def sure(num_steps: int, tok_s: float, acceptance_length: float | None = None, **more: Any) -> dict[str, Any]:
    """A row known to 0.1 %."""
    return spec(num_steps, tok_s, acceptance_length, sd_tok_s=0.001 * tok_s, **more)


def rows_of(rates: dict[int, float]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Well-known rows of these rates (of 0, 1, 2, ... steps), and the acceptance that makes them."""
    cycles = [TRUTH.cycle_ms(k) for k in rates]
    lengths = np.array([1.0, *(rate * cycles[k] / 1000.0 for k, rate in rates.items() if k)])
    survival = [float(s) for s in np.diff(lengths)]
    assert all(0.0 < s <= 1.0 for s in survival)
    assert sorted(survival, reverse=True) == survival
    rows = [sure(k, 1000.0 * lengths[k] / cycles[k], float(lengths[k]) if k else None) for k in rates]
    return rows, [{"num_steps": len(survival), "survival": survival, "sd": 0.0002}]


def swept(rates: dict[int, float], **sections: Any) -> Any:
    rows, acceptance = rows_of(rates)
    return fitted(rows, acceptance=acceptance, **sections)


MODELS = {
    "two settings": fitted(
        [
            plain(),
            plain(104.0, comm="ring"),
            spec(1, 140.0, 1.7, comm="ring"),
            spec(3, 171.0, 2.4),
            spec(5, 160.0, 2.8),
        ],
        **TWO,
    ),
    "several batches": fitted(
        cases.measured_cycles(
            TRUTH, np.random.default_rng(1), [(k, b, "default") for b in (1, 4, 16) for k in (0, 1, 3, 5)]
        )
    ),
    "two explanations": fitted([plain(), spec(3, 75.0, 2.4)]),
    "seed": sm.fit(sm.load(cases.SEED)),
}
TREES = [(3, 2, 6), (4, 4, 16)]


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def draws_of(model: Any, optimum: Any, batch: float) -> Any:
    """Draws of every row of the table, in its order."""
    comms = tuple(dict.fromkeys(c.comm for c in optimum.table))
    first = [c for c in optimum.table if c.comm == comms[0]]
    request, _ = model.request(
        np.array([c.num_steps for c in first]),
        batch,
        comms,
        np.array([c.topk for c in first]),
        np.array([c.num_draft_tokens for c in first]),
    )
    return model.draws(request, 2000)


def test_the_table_has_every_candidate_as_it_is_predicted(model: Any) -> None:
    optimum = sm.optimize(model, max_steps=6, trees=TREES)
    comms = model.deployment.structure.comm_names
    shapes = [(k, 1, k + 1) for k in range(7)] + TREES
    assert [(c.comm, c.num_steps, c.topk, c.num_draft_tokens) for c in optimum.table] == [
        (comm, *shape) for comm in comms for shape in shapes
    ]
    for c in optimum.table:
        p = model.predict(c.num_steps, optimum.batch, c.comm, c.topk, c.num_draft_tokens)
        for name in (
            "tok_s",
            "tpot_ms",
            "cycle_ms",
            "verify_ms",
            "draft_ms",
            "overhead_ms",
            "acceptance_length",
            "speedup",
        ):
            assert getattr(c, name) == pytest.approx(getattr(p, name), rel=1e-9)
        assert c.tok_s_interval == pytest.approx(p.interval(0.9), rel=1e-6)
        assert c.extrapolated == p.extrapolated
        assert c.batch == optimum.batch


def test_probabilities_and_regrets_are_those_of_joint_draws(model: Any) -> None:
    optimum = sm.optimize(model, max_steps=6)
    draws = draws_of(model, optimum, optimum.batch)
    top = draws.max(axis=1, keepdims=True)
    probability = (draws >= top).mean(axis=0)
    np.testing.assert_allclose([c.probability_best for c in optimum.table], probability, atol=1e-9)
    assert sum(c.probability_best for c in optimum.table) == pytest.approx(1.0)
    regret = np.expm1(np.log(top / draws).mean(axis=0))
    np.testing.assert_allclose([c.expected_regret for c in optimum.table], regret, rtol=1e-6, atol=1e-12)
    assert optimum.probability_best == optimum.best.probability_best
    assert optimum.expected_regret == optimum.best.expected_regret
    # The draws are of the same distribution as the intervals, the noise of one measurement left out.
    low, high = np.quantile(draws, [0.05, 0.95], axis=0)
    bounds = np.array([c.tok_s_interval for c in optimum.table])
    assert np.all(bounds[:, 0] < 1.03 * low)
    assert np.all(bounds[:, 1] > 0.97 * high)


def test_the_choice_follows_its_rule(model: Any) -> None:
    """Of those within 0.005 of the least regret: measured before unmeasured, then the fewest steps."""
    for batch in model.measured.batches:
        for trees in ((), TREES):
            optimum = sm.optimize(model, batch=batch, trees=trees)
            least = min(c.expected_regret for c in optimum.table)
            close = [c for c in optimum.table if c.expected_regret <= least + 0.005]
            assert optimum.best in close
            assert optimum.best.measured == any(c.measured for c in close)
            rivals = [c for c in close if c.measured == optimum.best.measured]
            assert optimum.best.num_steps == min(c.num_steps for c in rivals)


def test_ties_are_those_that_may_well_be_better(model: Any) -> None:
    optimum = sm.optimize(model, max_steps=6)
    draws = draws_of(model, optimum, optimum.batch)
    best = optimum.table.index(optimum.best)
    better = (draws > draws[:, [best]]).mean(axis=0)
    assert optimum.ties == tuple(c for c, share in zip(optimum.table, better, strict=True) if share > 0.25)


def test_ceilings_are_amdahls() -> None:
    for optimum, model in ((sm.optimize(m), m) for m in MODELS.values()):
        best = optimum.best
        most = best.num_steps + 1
        draft, verify, acceptance = (optimum.ceilings[name] for name in ("draft", "verify", "acceptance"))
        if len(model.posteriors) == 1:
            assert draft.speedup == pytest.approx(best.cycle_ms / (best.cycle_ms - best.draft_ms), rel=1e-6)
            assert verify.speedup == pytest.approx(best.cycle_ms / (best.cycle_ms - best.verify_ms), rel=1e-4)
            assert acceptance.speedup == pytest.approx(most / best.acceptance_length, rel=1e-6)
        for ceiling in (draft, verify, acceptance):
            assert ceiling.interval[0] <= ceiling.speedup <= ceiling.interval[1]
            assert ceiling.interval[0] >= 1.0


def test_ceilings_of_known_parts() -> None:
    """A free drafter against removing its measured share; plain decoding has nothing to draft or accept."""
    rows = cases.tables(TRUTH, range(6))
    given = {"num_steps": 5, "conditional": list(TRUTH.conditional[:5]), "sd": 0.001}
    model = fitted((), **rows, acceptance=[given], system={"engine": cases.LOOP})
    optimum = sm.optimize(model, max_steps=5)
    K = optimum.best.num_steps
    assert K > 0
    parts = TRUTH.verify_ms(K + 1) + TRUTH.draft_ms(K)
    assert optimum.ceilings["draft"].speedup == pytest.approx(parts / TRUTH.verify_ms(K + 1), rel=0.01)
    assert optimum.ceilings["verify"].speedup == pytest.approx(parts / TRUTH.draft_ms(K), rel=0.05)
    assert optimum.ceilings["acceptance"].speedup == pytest.approx((K + 1) / TRUTH.length(K), rel=0.01)
    nothing = sm.optimize(model, max_steps=0)
    assert nothing.ceilings["draft"].speedup == 1.0
    assert nothing.ceilings["acceptance"].speedup == pytest.approx(1.0)


def test_a_clear_winner_is_chosen_and_sure() -> None:
    optimum = sm.optimize(swept({0: 99, 1: 140, 2: 165, 3: 155, 4: 145, 5: 136}), max_steps=5)
    assert optimum.best.num_steps == 2
    assert optimum.probability_best > 0.95
    assert optimum.expected_regret < 0.005
    assert optimum.ties == ()
    assert optimum.measure_next is None
    assert optimum.stop_reason.startswith("stop")


def test_plain_decoding_is_a_candidate_and_wins_where_nothing_beats_it() -> None:
    optimum = sm.optimize(swept({0: 99, 1: 88, 2: 83, 3: 78, 4: 73.5}), max_steps=4)
    assert optimum.best.num_steps == 0
    assert optimum.best.acceptance_length == 1.0
    assert optimum.best.draft_ms == 0.0


def test_within_half_a_percent_the_fewest_steps_win() -> None:
    rates = {0: 99, 1: 139, 2: 160.0, 3: 160.3, 4: 159.9, 5: 151}
    optimum = sm.optimize(swept(rates), max_steps=5)
    assert optimum.best.num_steps == 2
    clear = sm.optimize(swept({**rates, 3: 166.0, 4: 164.0, 5: 156.0}), max_steps=5)
    assert clear.best.num_steps == 3


def test_within_half_a_percent_the_measured_wins() -> None:
    """Two steps would be as good, but of them only a bound is known."""
    rows, acceptance = rows_of({0: 99, 1: 139, 2: 160.2, 3: 160.4, 4: 155})
    tables = cases.tables(TRUTH, range(5))  # of two steps both parts are known, and the cycle is not
    model = fitted([r for r in rows if r["num_steps"] != 2], acceptance=acceptance, **tables)
    optimum = sm.optimize(model, max_steps=4)
    table = {c.num_steps: c for c in optimum.table}
    assert table[2].expected_regret < min(c.expected_regret for c in optimum.table) + 0.004
    assert optimum.best.num_steps == 3
    assert optimum.best.measured
    assert not table[2].measured


def test_measured_is_said_of_the_mode_that_is_asked_for() -> None:
    """A row with CUDA graphs is no measurement of a call without them, nor the other way round."""
    rows = [plain(), spec(2, 150.0, 2.0), spec(3, 120.0, 2.4, cuda_graph=False)]
    model = fitted(rows)
    with_graphs = {c.num_steps: c.measured for c in sm.optimize(model, max_steps=3).table}
    without = {c.num_steps: c.measured for c in sm.optimize(model, max_steps=3, cuda_graph=False).table}
    assert with_graphs == {0: True, 1: False, 2: True, 3: False}
    assert without == {0: True, 1: False, 2: False, 3: True}
    eager = {c.num_steps: c.measured for c in sm.optimize(model, max_steps=3, verify_cuda_graph=False).table}
    assert not any(eager.values())


def test_the_best_setting_is_found_and_comm_restricts_the_search() -> None:
    model = MODELS["two settings"]
    assert {c.comm for c in sm.optimize(model).table} == {"default", "ring"}
    only = sm.optimize(model, comm="ring")
    assert {c.comm for c in only.table} == {"ring"} == {only.best.comm}
    assert [c.comm for c in sm.optimize(model, comm=["ring", "ring", "default"], max_steps=0).table] in (
        ["ring", "default"],
        ["ring", "ring", "default"],
    )
    fast = fitted([plain(), sure(3, 150.0, 2.4), sure(3, 190.0, 2.4, comm="ring")], **TWO)
    assert sm.optimize(fast).best.comm == "ring"


def test_max_steps_and_its_default() -> None:
    model = MODELS["two settings"]
    assert max(c.num_steps for c in sm.optimize(model).table) == 10
    assert max(c.num_steps for c in sm.optimize(model, max_steps=2).table) == 2
    assert [c.num_steps for c in sm.optimize(model, max_steps=0, comm="ring").table] == [0]
    long = fitted([plain(), spec(14, 150.0, 4.0)])
    assert [c.num_steps for c in sm.optimize(long).table] == list(range(15))


def test_the_default_batch_is_one_or_the_smallest_measured() -> None:
    assert sm.optimize(MODELS["several batches"]).batch == 1.0
    assert sm.optimize(fitted([plain(300.0, batch=8), plain(200.0, batch=4)])).batch == 4.0
    assert sm.optimize(fitted()).batch == 1.0
    assert sm.optimize(MODELS["several batches"], batch=3.5).batch == 3.5


def test_trees_compete_with_chains() -> None:
    counts = {"drafts": 20_000, "accepted_by_rank": [[9000, 4000, 2000], [5000, 3000, 1000]]}
    given = {"num_steps": 2, "topk": 3, "num_draft_tokens": 8, **counts}
    rows = [plain(), sure(2, 130.0, 1.7), sure(2, 160.0, 2.2, topk=3, num_draft_tokens=8)]
    model = fitted(rows, acceptance=[given])
    optimum = sm.optimize(model, trees=[(2, 3, 8), (1, 3, 4)], max_steps=4)
    assert (optimum.best.topk, optimum.best.num_draft_tokens) == (3, 8)
    assert optimum.best.measured
    assert len(optimum.table) == 7
    # A measured tree needs no asking for; within fewer steps than it has it is no candidate.
    assert sm.optimize(model, max_steps=4).best.topk == 3
    assert sm.optimize(model, max_steps=1).best.topk == 1


def test_speedup_is_over_the_plain_rate_that_is_named() -> None:
    for name, model in MODELS.items():
        for comm in (None, *model.deployment.structure.comm_names):
            optimum = sm.optimize(model, comm=comm)
            assert optimum.best.speedup == pytest.approx(optimum.best.tok_s / optimum.plain.tok_s, rel=1e-6), name
            low, high = optimum.plain.tok_s_interval
            assert low < high
    measured = sm.optimize(MODELS["two settings"]).plain
    assert (measured.comm, measured.tok_s, measured.measured) == ("ring", 104.0, True)


def test_where_no_plain_was_measured_the_named_one_is_the_one_compared_with() -> None:
    model = fitted([spec(3, 180.0, 2.5), spec(3, 150.0, 2.5, comm="ring")], **TWO)
    for comm in (None, "default", "ring"):
        optimum = sm.optimize(model, comm=comm)
        assert not optimum.plain.measured
        assert optimum.best.speedup == pytest.approx(optimum.best.tok_s / optimum.plain.tok_s, rel=1e-6)


def test_what_the_answer_rests_on_without_a_measurement_is_said() -> None:
    everything = swept({0: 99, 1: 139, 2: 155, 3: 165, 4: 157, 5: 149}, **cases.tables(TRUTH, range(6)))
    optimum = sm.optimize(everything, max_steps=5)
    assert optimum.best.num_steps == 3
    assert optimum.unmeasured == ()
    blind = sm.optimize(fitted([sure(0, 100.0), sure(3, 160.0)]), max_steps=3)
    assert blind.best.num_steps == 3
    assert [t for t in blind.unmeasured if "acceptance at any position" in t]
    assert not [t for t in blind.unmeasured if "verify" in t or "draft" in t]
    short = fitted([plain()], acceptance=[{"num_steps": 2, "workload": "code", "survival": [0.95, 0.93]}])
    far = sm.optimize(short, workload="code", max_steps=6)
    assert far.best.num_steps > 2
    assert [t for t in far.unmeasured if "acceptance past position 2 of workload code" in t]
    assert [t for t in far.unmeasured if f"the verify pass of {far.best.num_steps + 1} tokens" in t]
    assert [t for t in far.unmeasured if f"the draft of {far.best.num_steps} steps" in t]
    nothing = sm.optimize(fitted(acceptance=[{"num_steps": 1, "survival": [0.0]}]), max_steps=2)
    assert nothing.best.num_steps == 0
    assert any("plain decoding" in t for t in nothing.unmeasured)
    ranks = sm.optimize(
        fitted(
            [plain(800.0, batch=8)], verify=[{"tokens": 2, "batch": 2, "time_ms": 9.0}], system={"data_parallel": 4}
        ),
        batch=8,
        max_steps=0,
    )
    assert ranks.unmeasured == ()


def test_warnings_of_the_predictions_are_handed_on_once() -> None:
    model = fitted([spec(3, 180.0, 2.5, workload="chat"), spec(3, 150.0, 2.5, workload="code")])
    optimum = sm.optimize(model, batch=2)
    assert len(set(optimum.warnings)) == len(optimum.warnings)
    for words in ("mixture", "speedup is over its prediction", "num_steps up to", "batch 2 is outside"):
        assert sum(words in w for w in optimum.warnings) == 1


def test_options_reach_the_predictions() -> None:
    rows = [
        plain(context_tokens=1024),
        spec(3, 160.0, 2.2, context_tokens=1024),
        spec(3, 120.0, 2.2, context_tokens=32_768),
        spec(3, 250.0, 3.5, workload="code", context_tokens=1024),
    ]
    model = fitted(rows)
    for options in (
        {"workload": "code"},
        {"workload": {"default": 0.3, "code": 0.7}},
        {"context_tokens": 32_768},
        {"cuda_graph": False},
        {"verify_cuda_graph": False},
    ):
        optimum = sm.optimize(model, max_steps=4, **options)
        p = model.predict(3, **{"context_tokens": 1024, **options})
        [three] = [c for c in optimum.table if c.num_steps == 3]
        assert three.tok_s == pytest.approx(p.tok_s, rel=1e-9)
