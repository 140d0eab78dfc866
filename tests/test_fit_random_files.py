"""Any valid file, however odd: fit, predict and optimize end in finite numbers or a SpecModelError, without warning."""

from __future__ import annotations

import contextlib
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))

# Times and rates over fifteen orders of magnitude, most of them ordinary.
TIME_MS = st.one_of(st.floats(0.1, 100.0), st.floats(1e-6, 1e9), st.sampled_from([1e-6, 1.0, 1e9]))
RATE = st.one_of(st.floats(1.0, 1e4), st.floats(1e-6, 1e9), st.sampled_from([1e-6, 100.0, 1e9]))
BATCH = st.one_of(st.just(1), st.integers(1, 64), st.floats(1.0, 1e6), st.just(10**9))
CONTEXT = st.one_of(st.integers(0, 10**5), st.sampled_from([0, 1, 10**9]))
STEPS = st.one_of(st.integers(1, 10), st.integers(1, 40))
COMM = st.sampled_from(["default", "ring"])
WORKLOAD = st.sampled_from(["default", "default", "chat", "code"])
PROBABILITY = st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 1.0, 1e-12, 0.5]))


def maybe(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


@st.composite
def ranges(draw: st.DrawFn, values: st.SearchStrategy[float]) -> list[float]:
    return sorted([draw(values), draw(values)])


@st.composite
def timed(draw: st.DrawFn) -> dict[str, Any]:
    """One of the forms of a time, with or without its spread."""
    if draw(st.booleans()):
        return {"range_ms": draw(ranges(TIME_MS))}
    row = {"time_ms": draw(TIME_MS)}
    return row | draw(maybe(sd_ms=st.one_of(st.just(0.0), TIME_MS), samples=st.integers(1, 10**6)))


@st.composite
def shapes(draw: st.DrawFn, least: int = 0) -> dict[str, Any]:
    """A chain or a tree."""
    if draw(st.integers(0, 4)) == 0:
        return {
            "num_steps": draw(STEPS),
            "topk": draw(st.integers(2, 16)),
            "num_draft_tokens": draw(st.integers(2, 64)),
        }
    return {"num_steps": draw(st.one_of(st.just(least), STEPS))}


@st.composite
def verify_rows(draw: st.DrawFn) -> dict[str, Any]:
    tokens = st.one_of(st.integers(1, 64), st.integers(1, 10**6))
    row = {"tokens": draw(tokens), **draw(timed())}
    return row | draw(maybe(batch=BATCH, comm=COMM, context_tokens=CONTEXT, cuda_graph=st.booleans()))


@st.composite
def draft_rows(draw: st.DrawFn) -> dict[str, Any]:
    row = {**draw(shapes(1)), **draw(timed())}
    row |= draw(maybe(batch=BATCH, comm=COMM, context_tokens=CONTEXT, cuda_graph=st.booleans()))
    return row | ({} if row.get("cuda_graph") is False else draw(maybe(graph_scope=st.sampled_from(["step", "cycle"]))))


@st.composite
def cycle_rows(draw: st.DrawFn) -> dict[str, Any]:
    row = draw(shapes())
    form = draw(st.sampled_from(["tok_s", "tok_s", "tpot_ms", "cycle_ms", "tok_s_at_most"]))
    values = RATE if form.startswith("tok_s") else TIME_MS
    if form != "tok_s_at_most" and draw(st.integers(0, 3)) == 0:
        row["range_" + form] = draw(ranges(values))
    else:
        row[form] = draw(values)
        if form != "tok_s_at_most":
            row |= draw(maybe(**{"sd_" + form: st.one_of(st.just(0.0), values), "samples": st.integers(1, 1000)}))
    row |= draw(
        maybe(
            batch=BATCH,
            comm=COMM,
            workload=WORKLOAD,
            context_tokens=CONTEXT,
            cuda_graph=st.booleans(),
            verify_cuda_graph=st.booleans(),
            acceptance_length=st.one_of(st.floats(1.0, row["num_steps"] + 1.0), st.floats(1.0, 1e6)),
            mean_draft_tokens=st.one_of(st.just(0.0), st.floats(0.0, 40.0)),
            speculation=st.just(True),
        )
    )
    return row | ({} if row.get("cuda_graph") is False else draw(maybe(graph_scope=st.sampled_from(["step", "cycle"]))))


@st.composite
def acceptance_entries(draw: st.DrawFn) -> dict[str, Any]:
    entry = {**draw(shapes(1)), **draw(maybe(workload=WORKLOAD))}
    K = entry["num_steps"]
    length = draw(st.integers(1, K))
    form = draw(st.sampled_from(["counts", "counts", "survival", "conditional", "ranks", "length"]))
    if form == "counts":
        drafts = draw(st.sampled_from([1, 7, 1000, 10**12]))
        survival = sorted((draw(PROBABILITY) for _ in range(length)), reverse=True)
        entry |= {"drafts": drafts, "accepted_per_position": [int(drafts * s) for s in survival]}
        entry |= draw(maybe(prompts=st.integers(1, 1000)))
        if draw(st.booleans()):
            entry["drafted_per_position"] = [drafts] * length
    elif form == "ranks":
        drafts = draw(st.sampled_from([1, 100, 10**6]))
        ranks = st.lists(st.integers(0, drafts // 8), min_size=1, max_size=4)
        entry |= {"drafts": drafts, "accepted_by_rank": draw(st.lists(ranks, min_size=1, max_size=min(K, 3)))}
    elif form == "length":
        entry["acceptance_length"] = draw(st.one_of(st.floats(1.0, K + 1.0), st.floats(1.0, 1e6)))
        entry |= draw(maybe(sd=st.sampled_from([0.0, 1e-9, 0.1, 1e6])))
    else:
        values = [draw(PROBABILITY) for _ in range(length)]
        entry[form] = sorted(values, reverse=True) if form == "survival" else values
        entry |= draw(maybe(sd=st.sampled_from([0.0, 1e-9, 0.01, 10.0])))
    return entry


@st.composite
def allreduce_rows(draw: st.DrawFn) -> dict[str, Any]:
    row = {"size_bytes": draw(st.integers(1, 10**9)), **draw(timed())}
    return row | draw(maybe(comm=COMM, num_gpus=st.sampled_from([2, 8]), in_graph=st.booleans()))


MODEL = maybe(
    method=st.sampled_from(["eagle3", "ngram", "parallel", "none"]),
    hidden_size=st.sampled_from([1, 4096, 10**6]),
    num_layers=st.sampled_from([1, 60, 1000]),
    cuda_graph_sizes=st.sampled_from([[1], [1, 2, 4, 8], [64], [1, 10**6]]),
    cuda_graph_unit=st.sampled_from(["tokens", "sequences"]),
)
EXPERTS = st.sampled_from(
    [{}, {}, {"num_experts": 128, "experts_per_token": 8}, {"num_experts": 4, "experts_per_token": 4}]
)
SYSTEM = maybe(
    data_parallel=st.sampled_from([1, 8, 10**6]),
    tensor_parallel=st.sampled_from([1, 8]),
    engine=st.sampled_from(["sglang", cases.LOOP]),
)


@st.composite
def documents(draw: st.DrawFn, most_rows: int = 6) -> dict[str, Any]:
    def rows(kind: st.SearchStrategy[Any], most: int) -> list[Any]:
        if draw(st.integers(0, 2)) == 0:
            return []
        return draw(st.lists(kind, max_size=most))

    return cases.document(
        rows(cycle_rows(), most_rows),
        verify=rows(verify_rows(), most_rows),
        draft=rows(draft_rows(), most_rows),
        allreduce=rows(allreduce_rows(), 3),
        acceptance=rows(acceptance_entries(), 3),
        model={**draw(MODEL), **draw(EXPERTS)},
        system=draw(SYSTEM),
        comm={"ring": {}},
        workloads=draw(st.sampled_from([{}, {"chat": {"weight": 2}}, {"chat": {"weight": 0}, "code": {"weight": 0}}])),
    )


def answer(document: dict[str, Any]) -> None:
    """Fit, predict and optimise: all finite and in order."""
    calibration = sm.from_dict(document)
    model = sm.fit(calibration)
    K, batch = np.array([0, 1, 3, 8, 25])[:, None], np.array([1.0, 2.5, 1000.0])
    for comm in ("default", "ring"):
        for workload in (None, *model.layout.workloads):
            cases.identities(model.predict(K, batch, comm, workload=workload), batch)
    cases.identities(model.predict(3, topk=4, num_draft_tokens=8, context_tokens=[0, 100, 10**6]), 1)
    cases.identities(model.predict(3, cuda_graph=[True, False], verify_cuda_graph=[False, True]), 1)
    optimum = sm.optimize(model, trees=[(3, 2, 6)])
    for c in optimum.table:
        assert np.isfinite([c.tok_s, *c.tok_s_interval, c.speedup, c.probability_best, c.expected_regret]).all()
    assert sum(c.probability_best for c in optimum.table) == pytest.approx(1.0)
    for ceiling in optimum.ceilings.values():
        assert np.isfinite([ceiling.speedup, *ceiling.interval]).all()
    if optimum.measure_next:
        assert np.isfinite(optimum.measure_next.gain_tok_s)
    assert all(np.isfinite([t.value, t.low, t.high]).all() for t in model.terms)
    assert model.summary()
    sm.schedule([optimum, sm.optimize(model, batch=4)])


SLOWLY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(document=documents())
@settings(max_examples=20, derandomize=True, **SLOWLY)
@example(document=cases.document([cases.plain(1e-6), cases.plain(1e9)]))
@example(document=cases.document([cases.plain(1e-6), cases.spec(3, 1e9, 4.0)]))
@example(document=cases.document([cases.plain(), cases.spec(3, 100.0, sd_tok_s=1e9)]))
@example(document=cases.document([cases.plain(), {"num_steps": 3, "range_tok_s": [1e-6, 1e9]}]))
@example(document=cases.document([cases.spec(3, 100.0, batch=1e15)]))
@example(document=cases.document([{"num_steps": 2, "tok_s_at_most": 1e-6}, cases.plain(1e9)]))
@example(document=cases.document([cases.plain()], verify=[{"tokens": 10**15, "time_ms": 1.0}]))
@example(document=cases.document(verify=[{"tokens": 10**6, "time_ms": 50.0}]))
@example(document=cases.document([cases.plain(), cases.spec(1000, 100.0)]))
@example(document=cases.document([cases.spec(3, 100.0, topk=10**7, num_draft_tokens=8)]))
@example(document=cases.document([cases.spec(3, 100.0, topk=4, num_draft_tokens=10**6)]))
@example(document=cases.document([cases.spec(6, 100.0, topk=4, num_draft_tokens=5)]))
@example(document=cases.document([cases.plain()], acceptance=[{"num_steps": 3, "survival": [1e-300, 1e-301, 0.0]}]))
@example(document=cases.document([cases.plain()], acceptance=[{"num_steps": 3, "survival": [0.5], "sd": 1e15}]))
@example(document=cases.document([cases.plain()], acceptance=[{"num_steps": 10**6, "acceptance_length": 2.0}]))
def test_any_valid_file_is_answered(document: dict[str, Any]) -> None:
    with contextlib.suppress(sm.SpecModelError):
        answer(document)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 6))])
def test_two_hundred_odd_rows_are_answered(seed: int) -> None:
    """Rows that contradict each other over many orders of magnitude, of every form and many places."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(200):
        K = int(random.integers(0, 12))
        row: dict[str, Any] = {"num_steps": K, "batch": float(np.exp(random.uniform(0, 8))), "comm": "default"}
        form = random.choice(["tok_s", "tpot_ms", "cycle_ms", "tok_s_at_most"])
        row[form] = float(np.exp(random.normal(3.0, 3.0)))
        if random.uniform() < 0.5:
            row["acceptance_length"] = float(random.uniform(1.0, 1.5 * K + 1.0))
        if K and random.uniform() < 0.05:
            row |= {"topk": 4, "num_draft_tokens": int(random.integers(2, 40))}
        if random.uniform() < 0.3:
            row |= {"comm": "ring", "workload": "chat", "context_tokens": int(random.integers(0, 10**5))}
        rows.append(row)
    answer(cases.document(rows, comm={"ring": {}}))


@pytest.mark.slow
@given(document=documents())
@settings(max_examples=int(os.environ.get("SPECMODEL_RANDOM_FILES", "150")), derandomize=True, **SLOWLY)
def test_very_many_files_are_answered(document: dict[str, Any]) -> None:
    with contextlib.suppress(sm.SpecModelError):
        answer(document)
