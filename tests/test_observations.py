"""What each row says: its value in logarithms, how sure it is, and about which setting, shape and position."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.deployment import deployment_of
from specmodel.observations import observations_of
from specmodel.speeds import Noise, stated_speed

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec = cases.plain, cases.spec

NOISE = Noise(
    cycle=0.05,
    cycle_floor=0.02,
    verify=0.04,
    verify_floor=0.01,
    draft=0.06,
    draft_floor=0.03,
    length=0.1,
    probability=0.02,
)


def observed(cycles: Any = (), **sections: Any) -> Any:
    calibration = cases.calibration(cycles, **sections)
    return observations_of(calibration, deployment_of(calibration), NOISE)


def rows_of(obs: Any, section: str, index: int = 0) -> list[int]:
    return [i for i, source in enumerate(obs.source) if source == (section, index)]


def coefficients(obs: Any, i: int) -> tuple[float, float, float, float]:
    return obs.cycle[i], obs.verify[i], obs.draft[i], obs.length[i]


SPREADS = [
    # the spread of a row, and the relative standard deviation that it means, given default and floor
    ({"time_ms": 8.0}, lambda default, floor: default),
    ({"time_ms": 8.0, "samples": 100}, lambda default, floor: default),
    ({"time_ms": 8.0, "sd_ms": 4.0}, lambda default, floor: 0.5),
    ({"time_ms": 8.0, "sd_ms": 4.0, "samples": 4}, lambda default, floor: 0.25),
    ({"time_ms": 8.0, "sd_ms": 0.0}, lambda default, floor: floor),
    ({"time_ms": 8.0, "sd_ms": 1.0, "samples": 10**6}, lambda default, floor: floor),
    ({"range_ms": [4.0, 16.0]}, lambda default, floor: np.log(4.0) / 3.29),
    ({"range_ms": [7.99, 8.01]}, lambda default, floor: default),
]


@pytest.mark.parametrize(("time", "sd"), SPREADS, ids=lambda x: "sd" if callable(x) else str(x)[:40])
def test_tables_state_a_time_and_how_sure_it_is(time: dict[str, Any], sd: Any) -> None:
    obs = observed(verify=[{"tokens": 4, **time}], draft=[{"num_steps": 3, **time}])
    (v,), (d,) = rows_of(obs, "verify"), rows_of(obs, "draft")
    assert coefficients(obs, v) == (0, 1, 0, 0)
    assert coefficients(obs, d) == (0, 0, 1, 0)
    for i, default, floor in ((v, NOISE.verify, NOISE.verify_floor), (d, NOISE.draft, NOISE.draft_floor)):
        assert obs.value[i] == pytest.approx(np.log(8.0), abs=1e-3)
        assert obs.sd[i] == pytest.approx(sd(default, floor), rel=1e-3)
        assert obs.sampled[i]
        assert obs.scaled[i] == ("sd_ms" not in time)


RATE, LENGTH, BATCH = 400.0, 2.5, 4.0
FORMS = {
    "tok_s": RATE,
    "tpot_ms": 1000.0 * BATCH / RATE,
    "cycle_ms": 1000.0 * BATCH * LENGTH / RATE,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["value", "sd", "range"])
def test_a_cycle_with_its_length_states_the_cycle_time(form: str, kind: str) -> None:
    value = FORMS[form]
    speed = {"value": {form: value}, "sd": {form: value, f"sd_{form}": 0.3 * value, "samples": 9}}
    speed["range"] = {f"range_{form}": [value / 2.0, value * 2.0]}
    obs = observed([{"num_steps": 3, "batch": BATCH, "acceptance_length": LENGTH, **speed[kind]}])
    length, cycle = rows_of(obs, "cycles")
    assert coefficients(obs, length) == (0, 0, 0, 1)
    assert obs.value[length] == pytest.approx(np.log(LENGTH))
    assert obs.sd[length] == pytest.approx(NOISE.length * (LENGTH - 1.0) / LENGTH)
    assert not obs.sampled[length]
    assert coefficients(obs, cycle) == (1, 0, 0, 0)
    assert obs.value[cycle] == pytest.approx(np.log(FORMS["cycle_ms"]))
    assert obs.sd[cycle] == pytest.approx({"value": NOISE.cycle, "sd": 0.1, "range": np.log(4.0) / 3.29}[kind])
    assert obs.scaled[cycle] == (kind != "sd")


@pytest.mark.parametrize("form", FORMS)
def test_a_cycle_without_its_length_states_the_ratio_or_the_time(form: str) -> None:
    obs = observed([{"num_steps": 3, "batch": BATCH, form: FORMS[form]}])
    (i,) = rows_of(obs, "cycles")
    if form == "cycle_ms":
        assert coefficients(obs, i) == (1, 0, 0, 0)
        assert obs.value[i] == pytest.approx(np.log(FORMS[form]))
    else:
        assert coefficients(obs, i) == (-1, 0, 0, 1)
        assert obs.value[i] == pytest.approx(np.log(RATE / (1000.0 * BATCH)))
        assert obs.shapes[obs.shape[i]].num_steps == 3


@pytest.mark.parametrize("form", FORMS)
def test_plain_decoding_emits_one_token_a_cycle(form: str) -> None:
    obs = observed([{"num_steps": 0, "batch": BATCH, form: FORMS[form], "acceptance_length": 1.0}])
    (i,) = rows_of(obs, "cycles")
    assert coefficients(obs, i) == (1, 0, 0, 0)
    want = FORMS["cycle_ms"] if form == "cycle_ms" else 1000.0 * BATCH / RATE
    assert obs.value[i] == pytest.approx(np.log(want))
    assert obs.shape[i] == -1


def test_a_bound_is_a_bound_of_the_rate() -> None:
    obs = observed(
        [{"num_steps": 3, "tok_s_at_most": RATE}, {"num_steps": 5, "tok_s_at_most": RATE, "acceptance_length": 2.5}]
    )
    (blind,) = rows_of(obs, "cycles", 0)
    assert obs.bound[blind]
    assert coefficients(obs, blind) == (-1, 0, 0, 1)
    assert obs.value[blind] == pytest.approx(np.log(RATE / 1000.0))
    length, bound = rows_of(obs, "cycles", 1)
    assert not obs.bound[length]
    assert obs.bound[bound]
    assert coefficients(obs, bound) == (-1, 0, 0, 0)
    assert obs.value[bound] == pytest.approx(np.log(RATE / 1000.0 / 2.5))
    assert obs.bound.sum() == 2


def test_rows_of_one_setting_share_a_point_and_others_do_not() -> None:
    same = {"batch": 2, "context_tokens": 1024, "comm": "ring"}
    rows = [spec(3, 100.0, **same), spec(3, 110.0, **same), {"num_steps": 3, "cycle_ms": 20.0, **same}]
    others = [
        {"batch": 3},
        {"context_tokens": 1025},
        {"comm": "default"},
        {"cuda_graph": False},
        {"verify_cuda_graph": False},
        {"graph_scope": "cycle"},
        {"topk": 2, "num_draft_tokens": 5},
    ]
    obs = observed([*rows, *({**rows[0], **other} for other in others)], comm={"ring": {}})
    points = [obs.point[rows_of(obs, "cycles", i)[-1]] for i in range(len(rows) + len(others))]
    assert len(set(points[:3])) == 1
    assert len(set(points)) == 1 + len(others)
    assert len(obs.points) == len(obs.settings) == len(set(points))
    plain_rows = observed([plain(), plain(cuda_graph=False), plain(speculation=True)])
    assert plain_rows.point[0] == plain_rows.point[1], "plain decoding drafts nothing"
    assert plain_rows.point[0] != plain_rows.point[2]


def test_points_are_those_of_the_rows() -> None:
    obs = observed(
        [spec(3, 900.0, batch=8), plain(speculation=True), spec(4, 100.0, mean_draft_tokens=1.5)],
        verify=[
            {"tokens": 12, "batch": 3, "time_ms": 9.0, "cuda_graph": False},
            {"tokens": 2, "batch": 5, "time_ms": 9.0},
        ],
        draft=[{"num_steps": 5, "batch": 2, "time_ms": 3.0, "graph_scope": "cycle"}],
        system={"data_parallel": 4},
    )
    at = {source: obs.point[rows_of(obs, *source)[-1]] for source in obs.source}
    p = obs.points

    def point(section: str, index: int) -> tuple[float, ...]:
        i = at[section, index]
        return (p.steps[i], p.query_tokens[i], p.sequences[i], p.speculating[i], p.draft_mode[i], p.verify_eager[i])

    assert point("cycles", 0) == (3, 4, 2, 1, 0, 0)
    assert point("cycles", 1) == (0, 1, 1, 1, 0, 0)
    assert point("cycles", 2) == (1.5, 2.5, 1, 1, 0, 0)
    assert point("verify", 0) == (0, 4, 3, 1, 0, 1)
    assert point("verify", 1) == (0, 1, 2, 0, 0, 0), "no more sequences than tokens"
    assert point("draft", 0)[:4] == (5, 6, 2, 1)
    assert point("draft", 0)[4] == 1


def test_counts_are_hits_among_the_trials_that_reached_a_position() -> None:
    obs = observed(acceptance=[{"num_steps": 5, "drafts": 100, "accepted_per_position": [80, 60, 60, 0]}])
    i = rows_of(obs, "acceptance")
    assert list(obs.position[i]) == [0, 1, 2, 3]
    assert list(obs.hits[i]) == [80, 60, 60, 0]
    assert list(obs.trials[i]) == [100, 80, 60, 60]
    assert not obs.sampled[i].any()
    nothing = observed(acceptance=[{"num_steps": 3, "drafts": 9, "accepted_per_position": [0, 0, 0]}])
    assert list(nothing.trials) == [9], "nobody came past the first"


def test_few_prompts_are_fewer_trials() -> None:
    entry = {"num_steps": 2, "drafts": 1000, "accepted_per_position": [800, 600]}
    full, few, single = (observed(acceptance=[{**entry, **more}]) for more in ({}, {"prompts": 20}, {"prompts": 1000}))
    effect = full.trials / few.trials
    assert np.all(effect > 2.0)
    np.testing.assert_allclose(effect, effect[0])
    np.testing.assert_allclose(full.hits / few.hits, effect[0])
    np.testing.assert_allclose(single.trials, full.trials)


@pytest.mark.parametrize("form", ["survival", "conditional"])
def test_stated_probabilities_count_as_trials_that_have_their_sd(form: str) -> None:
    values, sd = [0.8, 0.6, 0.45], 0.03
    for given in ({}, {"sd": sd}):
        obs = observed(acceptance=[{"num_steps": 3, form: values, **given}])
        reach = np.array([1.0, *values[:-1]]) if form == "survival" else np.ones(3)
        conditional = np.array(values) / reach
        np.testing.assert_allclose(obs.hits / obs.trials, conditional, rtol=1e-6)
        got = np.sqrt(conditional * (1.0 - conditional) / obs.trials) * reach
        np.testing.assert_allclose(got, given.get("sd", NOISE.probability), rtol=1e-6)


def test_a_stated_probability_of_one_or_zero_leaves_a_doubt() -> None:
    for values in ([1.0, 1.0], [0.0], [1.0, 0.0], [0.3, 0.0, 0.0]):
        obs = observed(acceptance=[{"num_steps": 3, "conditional": values, "sd": 0.0}])
        assert np.all((obs.hits > 0) & (obs.hits < obs.trials))
        assert np.isfinite([obs.value, obs.trials]).all()
    assert len(observed(acceptance=[{"num_steps": 3, "survival": [0.3, 0.0, 0.0]}])) == 2, "nothing is known past zero"


def test_lengths_and_ranks_of_acceptance_entries() -> None:
    obs = observed(
        acceptance=[
            {"num_steps": 3, "acceptance_length": 2.5, "sd": 0.5},
            {"num_steps": 4, "acceptance_length": 2.5},
            {
                "num_steps": 2,
                "topk": 3,
                "num_draft_tokens": 7,
                "drafts": 200,
                "accepted_by_rank": [[100, 40], [50, 10]],
            },
        ]
    )
    assert [coefficients(obs, i) for i in range(3)] == [(0, 0, 0, 1)] * 3
    np.testing.assert_allclose(obs.value, np.log([2.5, 2.5, 2.0]))
    assert obs.sd[0] == pytest.approx(0.2)
    assert obs.sd[1] == pytest.approx(NOISE.length * 1.5 / 2.5)
    shape = obs.shapes[obs.shape[2]]
    assert (shape.num_steps, shape.topk, shape.verify_tokens) == (2, 3, 7)


def test_lengths_of_one_shape_are_one_number_measured_several_times() -> None:
    """Rows of several batches repeat the same acceptance: together they are surer, and less so where they scatter."""
    agree = observed([spec(3, 100.0 * b, 2.5, batch=b) for b in (1, 2, 4, 8)])
    scatter = observed([spec(3, 100.0 * b, 2.0 + 0.25 * b, batch=b) for b in (1, 2, 4, 8)])
    alone = observed([spec(3, 100.0, 2.5)])

    def known(obs: Any) -> tuple[float, float]:
        i = (obs.length == 1) & (obs.cycle == 0)
        weight = obs.sd[i] ** -2.0
        return float(weight @ obs.value[i] / weight.sum()), float(weight.sum() ** -0.5)

    assert known(agree)[0] == pytest.approx(np.log(2.5))
    assert known(agree)[1] < known(alone)[1]
    assert known(scatter)[1] > known(agree)[1]


def test_a_row_that_cannot_be_is_wide() -> None:
    rows = [plain(), spec(3, 150.0, 2.0), spec(3, 900.0, 2.0), spec(2, 150.0, 9.0)]
    obs = observed(rows)
    sd = [obs.sd[rows_of(obs, "cycles", i)[-1]] for i in range(4)]
    assert sd[0] == sd[1] == NOISE.cycle
    assert sd[2] > np.log(900.0 / 200.0) / 2
    assert sd[3] > np.log(9.0 / 3.0) / 2


def test_workloads_are_those_that_draft_or_accept() -> None:
    obs = observed(
        [plain(workload="idle"), spec(3, 100.0, workload="chat")], acceptance=[{"num_steps": 1, "survival": [0.5]}]
    )
    assert set(obs.workloads) == {"chat", "default"}
    assert observed().workloads == ("default",)
    assert observed([plain()]).workloads == ("default",)


def test_an_early_stop_does_not_state_the_length_of_the_full_chain() -> None:
    obs = observed([spec(8, 100.0, 2.0, mean_draft_tokens=1.5)])
    assert [coefficients(obs, i) for i in range(len(obs))] == [(1, 0, 0, 0)]
    full = observed([spec(8, 100.0, 2.0, mean_draft_tokens=8)])
    assert len(full) == 2


def test_drafts_that_do_not_happen_cost_nothing() -> None:
    """An n-gram drafter that finds something in one of four cycles: its cycles draft so much on average."""
    entry = {
        "num_steps": 4,
        "drafts": 1000,
        "drafted_per_position": [250] * 4,
        "accepted_per_position": [200, 180, 160, 150],
    }
    obs = observed(
        [spec(4, 100.0, 1.7), spec(2, 100.0, 1.4), spec(4, 90.0, 1.5, mean_draft_tokens=3.0)], acceptance=[entry]
    )
    steps = [obs.points.steps[obs.point[rows_of(obs, "cycles", i)[-1]]] for i in range(3)]
    assert steps == pytest.approx([1.0, 0.5, 3.0])
    tokens = [obs.points.query_tokens[obs.point[rows_of(obs, "cycles", i)[-1]]] for i in range(3)]
    assert tokens == pytest.approx([2.0, 1.5, 4.0])


def test_a_part_of_many_rows_keeps_its_points() -> None:
    obs = observed([spec(k, 100.0 + k, 1.0 + 0.2 * k, batch=b) for k in range(1, 9) for b in range(1, 20)])
    some = obs.thinned(20)
    assert len(some) <= 20
    assert len(some.points) == len(obs.points)
    whole = {(*s, v) for s, v in zip(obs.source, obs.value, strict=True)}
    assert {(*s, v) for s, v in zip(some.source, some.value, strict=True)} <= whole
    assert len(obs.thinned(10**6)) == len(obs)


@pytest.mark.parametrize("path", cases.COMMITTED[::5], ids=lambda path: path.stem)
def test_every_array_of_a_committed_file_is_finite_and_in_step(path: Path) -> None:
    calibration = sm.load(path)
    obs = observations_of(calibration, deployment_of(calibration))
    assert len(obs.source) == len(obs)
    for name in ("value", "sd", "cycle", "verify", "draft", "length", "hits", "trials"):
        array = getattr(obs, name)
        assert array.shape == (len(obs),)
        assert np.isfinite(array).all()
    assert np.all(obs.sd > 0)
    assert np.all(obs.hits <= obs.trials)
    assert np.all(obs.point < len(obs.points))
    assert np.all(obs.shape < len(obs.shapes))
    sources = {s for s in obs.source if s[0] in ("verify", "draft")}
    measured = calibration.measurements
    assert {s for s in sources if s[0] == "verify"} == {("verify", i) for i in range(len(measured.verify))}
    assert {s for s in sources if s[0] == "draft"} == {("draft", i) for i in range(len(measured.draft))}


def test_speeds_are_read_in_total_tokens_or_cycles() -> None:
    def stated(**row: Any) -> Any:
        [cycle] = cases.calibration([{"num_steps": 2, "batch": 4, **row}]).measurements.cycles
        return stated_speed(cycle, NOISE)

    assert stated(tok_s=50.0) == ("tok_s", 50.0, NOISE.cycle)
    assert stated(tpot_ms=10.0) == ("tok_s", 400.0, NOISE.cycle)
    assert stated(cycle_ms=10.0) == ("cycle_ms", 10.0, NOISE.cycle)
    assert stated(tok_s_at_most=50.0) is None
    form, value, sd = stated(range_tpot_ms=[5.0, 20.0])
    assert (form, value) == ("tok_s", pytest.approx(400.0))
    assert sd == pytest.approx(np.log(4.0) / 3.29)
