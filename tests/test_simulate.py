"""The simulator: equal to a plain-Python one, the same beside anything, and clear about what it cannot answer."""

import contextlib
import dataclasses
import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.errors import UsageError
from specmodel.model import FittedModel
from specmodel.simulate import Scenario, Simulation, TraceRequest, scenario_from, simulate_all, trace_from
from specmodel.simulate.policies import SGLANG_TIERS
from specmodel.simulate.prepare import prepared
from specmodel.simulate.rounds import run_block
from specmodel.simulate.run import _block, _streams
from specmodel.simulate.scenario import arrivals_of, lengths_of, limits_of, policy_of

ROOT = Path(__file__).parent.parent
EVERY = ("plain", "fixed:3", "fixed:7", "adaptive", "optimal", "oracle")


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


reference = loaded("simulate_reference")


def made(prefill: bool = False, **more: Any) -> FittedModel:
    """A small deployment: two workloads, two settings, contexts, captured sizes."""
    document: dict[str, Any] = {
        "schema": "specmodel.calibration/1",
        "name": "small",
        "comm": {"ring": {}},
        "model": {"cuda_graph_sizes": [1, 2, 4, 8, 16], "cuda_graph_unit": "sequences"},
        "workloads": {"chat": {"weight": 0.7, "output_tokens": 40}, "code": {"weight": 0.3, "output_tokens": 80}},
        "measurements": {
            "cycles": [
                {"num_steps": k, "batch": b, "context_tokens": c, "cycle_ms": (8 + 0.2 * b + 0.5 * k) * (1 + c / 2e4)}
                for k in (0, 2, 4)
                for b in (1, 8, 16)
                for c in (500, 2000)
            ]
        },
        "acceptance": [
            {"workload": "chat", "num_steps": 4, "survival": [0.7, 0.5, 0.3, 0.2]},
            {"workload": "code", "num_steps": 4, "survival": [0.9, 0.8, 0.7, 0.6]},
        ],
    }
    if prefill:
        document["measurements"]["prefill"] = [{"tokens": 512, "time_ms": 20.0}, {"tokens": 2048, "time_ms": 70.0}]
        document["measurements"]["prefill"].append({"tokens": 512, "time_ms": 40.0, "comm": "ring"})
    return sm.fit(sm.from_dict(document | more))


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return made()


@pytest.fixture(scope="module")
def with_prefill() -> FittedModel:
    return made(prefill=True)


SHORT: dict[str, Any] = {"requests": 40, "seeds": 2, "comm": "default", "output_tokens": "24", "prompt_tokens": "600"}


def scenario(**options: Any) -> Scenario:
    return Scenario(**(SHORT | {"policies": ("plain", "fixed:2")} | options))


def same(left: Simulation, right: Simulation) -> None:
    assert left.as_dict() == right.as_dict()


# ----------------------------------------------------------------------------------------------------- plain Python
@pytest.mark.parametrize(
    "options",
    [
        {"arrivals": "closed:5", "max_batch": 3},
        {"arrivals": "closed:1"},
        {"arrivals": "poisson:30", "output_tokens": "geometric:12", "prompt_tokens": "uniform:10-3000"},
        {"arrivals": "closed:12", "acceptance_wander": 0.1, "output_tokens": "uniform:1-40"},
        {"arrivals": "closed:20", "acceptance_spread": 0.0, "workload": {"chat": 1.0, "code": 2.0}},
        {"arrivals": "poisson:1000000", "max_batch": 16, "output_tokens": "lognormal:20:1.5"},
        {"arrivals": "poisson:0.001", "output_tokens": "1", "prompt_tokens": "geometric:900"},
    ],
    ids=str,
)
def test_every_policy_is_what_a_plain_loop_gives(with_prefill: FittedModel, options: dict[str, Any]) -> None:
    """First tokens, ends, cycles and overshoot of every request, from a scheduler that was written independently."""
    asked = scenario(**({"policies": EVERY} | options))
    ready = [prepared(with_prefill, asked)]
    block = _block(with_prefill, ready, [_streams(ready[0])])
    before = dataclasses.replace(block, arrival_ms=block.arrival_ms.copy())
    out = run_block(block)
    tiers = [(t.batch_from, list(t.candidates), t.down) for t in SGLANG_TIERS]
    for lane in range(len(block.count)):
        plain = reference.run_lane(before, lane, tiers, ready[0].start, (1, 2, 4, 8, 16))
        for name in ("arrival_ms", "first_ms", "finish_ms", "cycles", "overshoot"):
            assert getattr(out, name)[lane] == pytest.approx(np.array(plain[name]), rel=1e-12), (lane, name)


# ------------------------------------------------------------------------------------------------------- determinism
def test_an_answer_does_not_depend_on_what_is_computed_beside_it(with_prefill: FittedModel) -> None:
    several = [
        scenario(arrivals="closed:3", policies=EVERY),
        scenario(arrivals="closed:9", max_batch=4, workload="code", acceptance_wander=0.05, seeds=3),
        scenario(arrivals="poisson:20", slo="tpot=9ms,ttft=60ms", comm="ring", requests=70, prompt_tokens="50"),
        scenario(arrivals="closed:2", seeds=1, max_steps=2, output_tokens="geometric:9"),
    ]
    together = simulate_all(with_prefill, several)
    for asked, answer in zip(several, together, strict=True):
        same(answer, sm.simulate(with_prefill, asked))
    for asked, answer in zip(several[::-1], simulate_all(with_prefill, several[::-1]), strict=True):
        same(answer, sm.simulate(with_prefill, asked))


def test_a_seed_is_the_same_among_any_others(model: FittedModel) -> None:
    many = sm.simulate(model, scenario(seeds=5))
    one = sm.simulate(model, scenario(seeds=1, first_seed=3))
    for policy in ("plain", "fixed:2"):
        for name, values in one[policy].seed_values.items():
            assert values[0] == many[policy].seed_values[name][3]


def test_a_longer_run_begins_like_a_shorter_one(model: FittedModel) -> None:
    short, long = (prepared(model, scenario(arrivals="poisson:5", requests=n)) for n in (30, 90))
    a, b = _streams(short), _streams(long)
    for item in dataclasses.fields(a):
        assert np.array_equal(getattr(a, item.name), getattr(b, item.name)[:, :30])


def test_policies_see_the_same_requests_so_their_difference_is_known_better(model: FittedModel) -> None:
    answer = sm.simulate(model, scenario(arrivals="closed:4", seeds=12, requests=120, policies=("fixed:2", "fixed:4")))
    factor = answer.comparisons[0].factor
    a, b = (np.log(r.seed_values["tok_s"]) for r in answer.results)
    unpaired = math.sqrt(a.var(ddof=1) + b.var(ddof=1))
    assert np.std(a - b, ddof=1) < 0.8 * unpaired
    assert factor.low < factor.mean < factor.high


# ------------------------------------------------------------------------------------------------------------ meaning
def test_a_full_batch_is_the_steady_state_of_the_model(model: FittedModel) -> None:
    answer = sm.simulate(
        model,
        scenario(
            arrivals="closed:8", workload="code", output_tokens="900", requests=64, seeds=4, acceptance_spread=0.0
        ),
    )
    context = 600 + 450
    for steps, policy in ((0, "plain"), (2, "fixed:2")):
        p = model.predict(steps, 8, context_tokens=context, workload="code")
        assert answer[policy].tok_s.mean == pytest.approx(p.tok_s, rel=0.01)
        assert answer[policy].acceptance_length.mean == pytest.approx(p.acceptance_length, rel=0.01)


def test_verify_passes_are_padded_to_captured_sizes(model: FittedModel) -> None:
    """Nine to sixteen sequences run the same graph: a cycle takes the same time."""
    costs = prepared(model, scenario(max_batch=16)).costs
    times = costs.verify_ms[0, 2, 1:, 0]
    assert times[8:] == pytest.approx(times[15])
    assert times[4:8] == pytest.approx(times[7])
    assert times[7] < times[8]


def test_context_grows_with_what_is_emitted(model: FittedModel) -> None:
    short, long = (
        sm.simulate(model, scenario(arrivals="closed:1", prompt_tokens=n, policies=("plain",), output_tokens="30"))
        for n in ("500", "2000")
    )
    ratio = long["plain"].user_tok_s.mean / short["plain"].user_tok_s.mean
    expected = model.predict(0, 1, context_tokens=2015).tok_s / model.predict(0, 1, context_tokens=515).tok_s
    assert ratio == pytest.approx(expected, rel=0.02)  # what was measured at 500 and 2000 holds around them


def test_a_schedule_runs_the_steps_of_each_batch(model: FittedModel) -> None:
    from specmodel.simulate.policies import chain_schedule, steps_by_batch

    chains, trees = chain_schedule(model, "default", None, None, 16, 612.0)
    assert trees == ()
    steps = steps_by_batch(chains, 16)
    answer = sm.simulate(model, scenario(arrivals="poisson:15", policies=("schedule",), max_batch=16))
    assert {(k, b) for k, b, _ in answer["schedule"].time_at} <= {(int(steps[b]), b) for b in range(1, 17)}
    assert sum(share for *_, share in answer["schedule"].time_at) == pytest.approx(1.0)


def test_the_schedule_is_for_the_context_of_the_requests(model: FittedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch is decided at the measured context that is nearest to the mean one."""
    from specmodel.simulate import policies

    real, asked = policies.optimize, list[Any]()

    def noted(*words: Any, **options: Any) -> Any:
        asked.append(options["context_tokens"])
        return real(*words, **options)

    monkeypatch.setattr(policies, "optimize", noted)
    for prompt, nearest in (("480", 500), ("1500", 2000), ("90000", 2000)):
        asked.clear()
        sm.simulate(model, scenario(arrivals="closed:8", policies=("schedule",), prompt_tokens=prompt))
        assert set(asked) == {nearest}


def test_a_tree_of_the_schedule_is_replaced_and_said() -> None:
    """Where `optimize` recommends a tree the schedule runs a chain: who compares them must know."""
    tree = {"num_steps": 3, "topk": 4, "num_draft_tokens": 16, "batch": 1, "context_tokens": 500}
    document = {
        "schema": "specmodel.calibration/1",
        "name": "treed",
        "measurements": {
            "cycles": [
                {"num_steps": 0, "batch": 1, "context_tokens": 500, "cycle_ms": 10.0},
                {"num_steps": 3, "batch": 1, "context_tokens": 500, "cycle_ms": 12.0, "acceptance_length": 2.0},
                tree | {"cycle_ms": 12.5, "acceptance_length": 3.5},
                {"num_steps": 0, "batch": 8, "context_tokens": 500, "cycle_ms": 11.0},
                {"num_steps": 3, "batch": 8, "context_tokens": 500, "cycle_ms": 14.0, "acceptance_length": 2.0},
            ]
        },
    }
    model = sm.fit(sm.from_dict(document))
    assert sm.optimize(model, batch=1).best.topk == 4
    answer = sm.simulate(model, scenario(arrivals="closed:8", policies=("plain", "schedule")))
    assert any("recommends a tree at batch 1, 8;" in text for text in answer.warnings)
    answer = sm.simulate(model, scenario(arrivals="closed:4", policies=("plain", "schedule")))
    assert any("recommends a tree at batch 1;" in text for text in answer.warnings)  # batch 8 is never reached
    assert not any(
        "tree" in text for text in sm.simulate(model, scenario(arrivals="closed:8", policies=("plain",))).warnings
    )


def test_whoever_is_not_surely_worse_is_marked() -> None:
    from types import SimpleNamespace

    from specmodel.simulate.summary import compared

    def result(policy: str, values: list[float]) -> Any:
        return SimpleNamespace(policy=policy, deployable=True, seed_values={"tok_s": np.array(values)})

    several = result("a", [10, 30, 20, 25]), result("b", [12, 18, 19, 16]), result("c", [1, 3, 2, 2])
    best, tied, _ = compared(several, "tok_s")
    assert (best, tied) == ("a", ("b",))
    one = result("a", [10.0]), result("b", [9.8]), result("c", [8.0])
    best, tied, _ = compared(one, "tok_s")
    assert (best, tied) == ("a", ("b",))


def test_a_schedule_of_ones_own_is_run(model: FittedModel) -> None:
    from specmodel.schedule import ScheduleStep

    def step(first: float, last: float | None, steps: int, topk: int = 1) -> ScheduleStep:
        return ScheduleStep(
            batch_from=first, batch_to=last, num_steps=steps, topk=topk, num_draft_tokens=steps + 1, comm="default"
        )

    own = (step(1, 3, 4), step(4, None, 0))
    answer = sm.simulate(model, scenario(arrivals="poisson:15", policies=("schedule",), max_batch=16, schedule=own))
    assert answer.schedule == ((1, 3, 4), (4, 16, 0))
    assert {(k, b > 3) for k, b, _ in answer["schedule"].time_at} == {(4, False), (0, True)}
    with pytest.raises(UsageError, match="schedule: chains"):
        sm.simulate(model, scenario(schedule=(step(1, None, 3, topk=2),)))


def test_bounds_are_bounds_and_never_the_best(model: FittedModel) -> None:
    answer = sm.simulate(model, scenario(arrivals="closed:6", policies=EVERY, requests=120, seeds=6))
    able = max(r.tok_s.mean for r in answer.results if r.deployable)
    assert answer["oracle"].tok_s.mean > able
    assert answer["optimal"].tok_s.mean > 0.995 * able
    assert answer[answer.best].deployable
    only = sm.simulate(model, scenario(policies=("oracle",)))
    assert only.best == "oracle"
    assert not only["oracle"].deployable


def test_goodput_counts_the_requests_that_keep_every_limit(with_prefill: FittedModel) -> None:
    loose = sm.simulate(with_prefill, scenario(arrivals="closed:4", slo="tpot=10s,ttft=1000s,latency=1e6s"))
    tight = sm.simulate(with_prefill, scenario(arrivals="closed:4", slo="tpot=0.001us"))
    for r in loose.results:
        assert r.good_share is not None
        assert r.goodput_tok_s is not None
        assert (r.good_share.mean, r.goodput_tok_s.mean) == (1.0, r.tok_s.mean)
    assert [r.goodput_tok_s and r.goodput_tok_s.mean for r in tight.results] == [0.0, 0.0]
    assert loose.objective == tight.objective == "goodput_tok_s"
    # What arrives by itself and is all good is no yardstick: goodput is the load then.
    few = [sm.simulate(with_prefill, scenario(arrivals="poisson:0.5", slo=slo)) for slo in ("tpot=10s", "tpot=0.001us")]
    assert [answer.objective for answer in few] == ["latency_ms", "goodput_tok_s"]
    assert all(math.isnan(c.factor.low) for c in tight.comparisons)  # nothing to compare, and no warning of numpy's


def test_without_prefill_rows_there_is_no_time_to_first_token(model: FittedModel, with_prefill: FittedModel) -> None:
    without, with_rows = (sm.simulate(m, scenario(arrivals="closed:4")) for m in (model, with_prefill))
    assert all(r.ttft_ms is None and r.prefill_share == 0.0 for r in without.results)
    assert any("no prefill rows" in text for text in without.assumptions)
    assert all(r.ttft_ms is not None and r.ttft_ms.p50.mean > 20.0 for r in with_rows.results)
    assert with_rows["plain"].tok_s.mean < without["plain"].tok_s.mean
    with pytest.raises(UsageError, match="ttft cannot be judged without prefill"):
        sm.simulate(model, scenario(slo="ttft=1s"))


def test_too_much_arriving_is_said(model: FittedModel) -> None:
    much = sm.simulate(model, scenario(arrivals="poisson:500", requests=300))
    little = sm.simulate(model, scenario(arrivals="poisson:0.5", requests=300))
    assert all(r.queue_grows for r in much.results)
    assert any("queue grows without end under plain, fixed:2" in text for text in much.warnings)
    assert not any("queue" in text for text in little.warnings)
    assert little["plain"].wait_ms.p99.mean < 10.0  # the cycle that runs when a request arrives


def test_points_far_from_what_was_measured_are_named(model: FittedModel) -> None:
    answer = sm.simulate(model, scenario(arrivals="closed:80", policies=("fixed:2", "fixed:9"), requests=160, seeds=1))
    assert answer["fixed:2"].extrapolated_share > 0.9
    text = " ".join(answer.warnings)
    assert "batch 80 is outside the measured 1 to 16" in text
    assert "num_steps up to 9 is beyond the longest measured (4): extrapolated" in text
    assert re.search(r"too far from what was measured 9\d% to 100% of the time: fixed:2, fixed:9", text)
    assert "one seed: no interval" in text
    assert math.isnan(answer["fixed:2"].tok_s.low)
    far = sm.simulate(model, scenario(prompt_tokens="20000"))
    assert any("contexts of 20001 to" in w and "500 to 2000 measured" in w for w in far.warnings)


def test_the_default_load_is_one_that_was_measured(model: FittedModel) -> None:
    single = made(measurements={"cycles": [{"num_steps": k, "cycle_ms": 9.0 + k} for k in (0, 2)]}, model={})
    for m, clients in ((model, 8), (single, 1)):
        answer = sm.simulate(m, Scenario(policies=("plain",), requests=20, seeds=1, comm="default"))
        assert answer.scenario.arrivals == f"closed:{clients}"
        assert answer["plain"].extrapolated_share == 0.0


def test_intervals_say_what_they_cover_and_draws_widen_them(model: FittedModel) -> None:
    alone, drawn = (sm.simulate(model, scenario(arrivals="closed:4", seeds=8, model_draws=d)) for d in (False, True))
    assert "chance alone" in alone.interval_covers
    assert "model's uncertainty" in drawn.interval_covers

    def width(answer: Simulation) -> float:
        e = answer["fixed:2"].tok_s
        return (e.high - e.low) / e.mean

    assert width(drawn) > 3.0 * width(alone)
    assert drawn["fixed:2"].tok_s.mean == pytest.approx(alone["fixed:2"].tok_s.mean, rel=0.1)
    assert alone.model_interval is not None
    assert alone.model_interval[0] < 1.0 < alone.model_interval[1]
    same(drawn, sm.simulate(model, scenario(arrivals="closed:4", seeds=8, model_draws=True)))


def test_shares_are_of_requests_and_lengths_are_those_of_the_workload(model: FittedModel) -> None:
    ready = prepared(model, scenario(output_tokens=None, workload={"chat": 3.0, "code": 1.0}, requests=4000, seeds=1))
    streams = _streams(ready)
    assert np.bincount(streams.workload[0])[0] / 4000 == pytest.approx(0.75, abs=0.03)
    assert set(streams.output_tokens[streams.workload == 0]) == {40}
    assert set(streams.output_tokens[streams.workload == 1]) == {80}


# ------------------------------------------------------------------------------------------------------------- traces
def test_a_trace_is_served_as_it_came(model: FittedModel) -> None:
    rows = [
        {"arrival_ms": 500, "output_tokens": 3, "prompt_tokens": 600, "workload": "code"},
        {"arrival_ms": 0, "output_tokens": 20, "prompt_tokens": 600, "workload": "chat"},
        {"arrival_ms": 500, "output_tokens": 1, "prompt_tokens": 600, "workload": "code"},
    ]
    trace, warnings = trace_from(rows, "t.jsonl")
    assert [r.output_tokens for r in trace] == [20, 3, 1]
    assert warnings == ("t.jsonl: 1 line(s) arrive before the line above; taken in the order of arrival",)
    answer = sm.simulate(
        model, Scenario(arrivals="trace", trace=trace, policies=("plain",), seeds=2, comm="default", max_batch=4)
    )
    assert answer["plain"].cycles.mean == pytest.approx((19 + 2 + 0) / 3)
    assert answer["plain"].tok_s.mean < 24 / 0.5
    assert answer.objective == "latency_ms"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "has no request"),
        ([3], "line 1: must be an object"),
        ([{}], "arrival_ms must be a number from 0 to 1e\\+12, got null"),
        ([{"arrival_ms": math.nan, "output_tokens": 4}], "arrival_ms must be a number"),
        ([{"arrival_ms": math.inf, "output_tokens": 4}], "arrival_ms must be a number"),
        ([{"arrival_ms": -1, "output_tokens": 4}], "got -1"),
        ([{"arrival_ms": 10**400, "output_tokens": 4}], "got an integer of about 401 digits"),
        ([{"arrival_ms": 0, "output_tokens": 0}], "output_tokens must be a whole number from 1"),
        ([{"arrival_ms": 0, "output_tokens": 2.5}], "got 2.5"),
        ([{"arrival_ms": 0, "output_tokens": True}], "got true"),
        ([{"arrival_ms": 0, "output_tokens": 2}, {"arrival_ms": 0, "output_tokens": "2"}], "line 2: output_tokens"),
        ([{"arrival_ms": 0, "output_tokens": 2, "prompt_tokens": -1}], "prompt_tokens"),
        ([{"arrival_ms": 0, "output_tokens": 2, "tokens": 1}], "'tokens' is no key of a request"),
        ([{"arrival_ms": 0, "output_tokens": 2, "workload": 1}], "workload must be a name"),
    ],
)
def test_a_faulty_trace_is_refused_with_its_line(rows: list[Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace_from(rows, "t.jsonl")


def test_workloads_of_a_trace_must_be_known_and_complete(model: FittedModel) -> None:
    def asked(*names: str | None, **more: Any) -> Scenario:
        rows = [TraceRequest(arrival_ms=0.0, output_tokens=4, prompt_tokens=9, workload=n) for n in names]
        return Scenario(arrivals="trace", trace=tuple(rows), policies=("plain",), seeds=1, comm="default", **more)

    sm.simulate(model, asked("chat", "code"))
    sm.simulate(model, asked(None, None, workload="chat"))
    for wrong, said in (
        (asked("chat", "poem"), "'poem' is not in small"),
        (asked("chat", None), "every request or of none"),
        (asked("chat", workload="chat"), "leave workload out"),
    ):
        with pytest.raises(UsageError, match=said):
            sm.simulate(model, wrong)


# ------------------------------------------------------------------------------------------------- options, hostile
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"arrivals": "closed:0"}, "closed:N"),
        ({"arrivals": "closed:2.5"}, "closed:N"),
        ({"arrivals": "closed:"}, "closed:N"),
        ({"arrivals": "poisson:0"}, "above 0"),
        ({"arrivals": "poisson:-1"}, "above 0"),
        ({"arrivals": "poisson:nan"}, "above 0"),
        ({"arrivals": "poisson:inf"}, "above 0"),
        ({"arrivals": "poisson:1e9"}, "at most 1e6"),
        ({"arrivals": "uniform:3"}, "must be closed:N"),
        ({"arrivals": "trace"}, "the trace has no request"),
        ({"arrivals": "closed:5000"}, "needs max_batch"),
        ({"output_tokens": "0"}, "output_tokens must be"),
        ({"output_tokens": "nan"}, "output_tokens must be"),
        ({"output_tokens": "2.5"}, "output_tokens must be"),
        ({"output_tokens": "uniform:9-3"}, "output_tokens must be"),
        ({"output_tokens": "geometric:0.5"}, "output_tokens must be"),
        ({"output_tokens": "lognormal:9"}, "output_tokens must be"),
        ({"output_tokens": "lognormal:9:0"}, "output_tokens must be"),
        ({"prompt_tokens": "1e12"}, "prompt_tokens must be"),
        ({"output_tokens": "1"}, "nothing to simulate"),
        ({"policies": ("fixed:-1",)}, "a policy is"),
        ({"policies": ("fixed:101",)}, "a policy is"),
        ({"policies": ("best",)}, "a policy is"),
        ({"policies": ("plain", "fixed:0")}, "named twice"),
        ({"policies": ("fixed:5",), "max_steps": 3}, "drafts more than max_steps 3"),
        ({"slo": "tpot"}, "slo must be"),
        ({"slo": "tpot=0"}, "slo must be"),
        ({"slo": "tpot=-3ms"}, "slo must be"),
        ({"slo": "speed=3ms"}, "slo must be"),
        ({"slo": "tpot=3ms,tpot=4ms"}, "limited twice"),
        ({"seeds": 0}, "seeds must lie"),
        ({"seeds": 1.5}, "whole number"),
        ({"requests": 0}, "requests must lie"),
        ({"requests": 10**7}, "requests must lie"),
        ({"requests": 10**6, "seeds": 4000}, "do not fit into memory"),
        ({"max_batch": 4096, "seeds": 4096}, "do not fit into memory"),
        ({"output_tokens": 100_000, "requests": 200, "arrivals": "closed:8"}, "take about 2,500,000 rounds"),
        ({"output_tokens": "lognormal:300000:0.1", "requests": 80, "arrivals": "poisson:9"}, "run for many minutes"),
        ({"max_batch": 0}, "max_batch must lie"),
        ({"max_batch": 5000}, "max_batch must lie"),
        ({"acceptance_spread": -0.1}, "acceptance_spread must lie"),
        ({"acceptance_spread": 1.0}, "acceptance_spread must lie"),
        ({"acceptance_wander": math.nan}, "acceptance_wander must lie"),
        ({"warmup": 1.0}, "warmup must lie"),
        ({"comm": "nvls"}, "'nvls' is not in small"),
        ({"workload": "poem"}, "'poem' is not in small"),
        ({"workload": {"chat": -1.0}}, "share must be a number above 0"),
        ({"trace": (TraceRequest(arrival_ms=0.0, output_tokens=2, prompt_tokens=2),)}, "beside arrivals"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(model: FittedModel, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        sm.simulate(model, scenario(**options))


@pytest.mark.slow
@pytest.mark.parametrize("name", [p.stem for p in sorted((ROOT / "calibrations").glob("*/*.yaml"))[::4]])
def test_every_calibration_is_simulated_to_its_steady_state(name: str) -> None:
    """At the largest measured batch: plain decoding and the longest chain as the model says, the bounds no less."""
    from specmodel.acceptance import acceptance_variance, cycles_for_tokens
    from specmodel.simulate.costs import survival_of

    m = sm.fit(sm.load(next((ROOT / "calibrations").glob(f"*/{name}.yaml"))))
    batch, steps = int(m.measured.batches[-1]), min(max(m.measured.largest_steps, 1), 20)
    comm, workload = m.comm_names[0], m.layout.workloads[0]
    policies = ("plain", f"fixed:{steps}", "optimal", "oracle")
    asked = Scenario(
        arrivals=f"closed:{batch}",
        policies=policies,
        requests=max(4 * batch, 30),
        seeds=3,
        output_tokens="120",
        comm=comm,
        acceptance_spread=0.0,
        max_steps=steps,
        workload=workload,
    )
    answer = sm.simulate(m, asked)
    for k, policy in ((0, "plain"), (steps, f"fixed:{steps}")):
        known = math.isfinite(m.deployment.context_reference)
        context = float(answer.scenario.prompt_tokens or 0) + 60.0
        p = m.predict(k, batch, comm, workload=workload, context_tokens=context if known else None)
        variance = float(acceptance_variance(survival_of(m, workload, k)))
        cycles = cycles_for_tokens(119, float(p.acceptance_length), variance)
        expected = 1000.0 * batch * 120 / (cycles * float(p.cycle_ms))
        assert answer[policy].tok_s.mean == pytest.approx(expected, rel=0.05)
    best = max(answer[p].tok_s.mean for p in policies[:2])
    assert min(answer[p].tok_s.mean for p in policies[2:]) > 0.97 * best


@pytest.mark.parametrize(
    "options",
    [
        {"arrivals": "closed:1", "requests": 1},
        {"arrivals": "closed:16", "requests": 3},
        {"arrivals": "closed:3", "max_batch": 1},
        {"arrivals": "poisson:1000000", "max_batch": 1},
        {"arrivals": "poisson:0.000001"},
        {"output_tokens": "2"},
        {"output_tokens": "uniform:1-2"},
        {"max_steps": 0, "policies": ("plain", "oracle", "optimal")},
        {"acceptance_spread": 0.9, "acceptance_wander": 0.9, "policies": EVERY},
        {"seeds": 1, "requests": 1, "model_draws": True},
        {"warmup": 0.9},
        {"prompt_tokens": "1", "output_tokens": "lognormal:2:10"},
    ],
    ids=str,
)
def test_extremes_end_in_finite_numbers(model: FittedModel, with_prefill: FittedModel, options: dict[str, Any]) -> None:
    for m in (model, with_prefill):
        answer = sm.simulate(m, scenario(**options))
        for r in answer.results:
            assert r.tok_s.mean > 0.0
            assert math.isfinite(r.latency_ms.p99.mean)
            assert r.latency_ms.mean.mean >= r.wait_ms.mean.mean >= 0.0
        assert "NaN" not in str(answer.as_dict())


@pytest.mark.parametrize("flat", [[0.0, 0.0], [1.0, 1.0], [1.0, 0.0], [1e-12, 1e-13]])
def test_acceptance_at_its_ends(flat: list[float]) -> None:
    """Drafts that never or always hold."""
    m = made(acceptance=[{"num_steps": 2, "survival": flat}], workloads={})
    for spread in (0.0, 0.05):
        answer = sm.simulate(m, scenario(acceptance_spread=spread, policies=("fixed:2", "oracle", "optimal")))
        assert answer["fixed:2"].acceptance_length.mean == pytest.approx(
            float(m.predict(2).acceptance_length), rel=0.05
        )


def test_a_file_with_nothing_in_it_still_says_that_it_knows_nothing() -> None:
    empty = sm.fit(sm.from_dict({"schema": "specmodel.calibration/1", "name": "x"}))
    answer = sm.simulate(empty, Scenario(seeds=2, requests=20))
    assert answer[answer.best].extrapolated_share == pytest.approx(1.0)
    assert any("every time is a guess from priors" in w for w in answer.warnings)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=16))
def test_no_text_is_read_by_accident(text: str) -> None:
    for read in (arrivals_of, policy_of, limits_of, lambda t: lengths_of("output_tokens", t)):
        with contextlib.suppress(UsageError):
            read(text)


@given(
    st.sampled_from(["128", "uniform:3-9", "geometric:7", "lognormal:12:0.5"]), st.floats(0.0, 1.0, exclude_max=True)
)
def test_lengths_are_written_as_they_are_read(text: str, quantile: float) -> None:
    lengths = lengths_of("output_tokens", text)
    assert str(lengths) == text
    assert 1 <= int(lengths.of(np.array([quantile]))[0]) <= 10**6


@pytest.mark.parametrize(
    ("text", "mean"), [("geometric:7", 7.0), ("uniform:3-9", 6.0), ("lognormal:120:0.5", 120.0), ("64", 64.0)]
)
def test_lengths_have_their_mean(text: str, mean: float) -> None:
    lengths = lengths_of("output_tokens", text)
    drawn = lengths.of((np.arange(20_000) + 0.5) / 20_000)
    assert drawn.mean() == pytest.approx(mean, rel=5e-3)
    assert lengths.mean == mean


def test_scenarios_from_plain_values() -> None:
    read = scenario_from({"arrivals": "closed:4", "policy": ["plain", "fixed:2"], "output_tokens": 64, "seeds": 3.0})
    assert (read.policies, read.output_tokens, read.seeds) == (("plain", "fixed:2"), "64", 3)
    for wrong, said in (
        ({"arrivals": 4}, "arrivals must be text"),
        ({"policy": 3}, "policy must be"),
        ({"clients": 4}, "'clients' is no option of a scenario; use"),
        ({"seeds": "3"}, "seeds must be a number"),
        ({"seeds": True}, "seeds must be a number"),
        ({"model_draws": "yes"}, "model_draws must be true or false"),
        ({"trace": []}, "no option of a scenario"),
        ({"warmup": math.nan}, "warmup must lie"),
        ({"workload": 3}, "workload must be"),
    ):
        with pytest.raises(UsageError, match=said):
            scenario_from(wrong, "grid.yaml")
