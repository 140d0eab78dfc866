"""Files of any kind get a diagnosis: no crash, no number that is not finite, bounds in order."""

import json
import random
from typing import Any

import pytest

import specmodel as sm
from specmodel.diagnose import diagnosis_document

METHODS = ("eagle3", "mtp", "ngram", "draft_model", "parallel", "none", "eagle")


def some_cycle(r: random.Random, names: list[str], comms: list[str]) -> dict[str, Any]:
    steps = r.choice([0, 0, 1, 2, 3, 5, 7, 15, 60])
    row: dict[str, Any] = {"num_steps": steps, "batch": r.choice([1, 1, 1, 2, 8, 1.5, 1000])}
    row |= {"workload": r.choice(names), "comm": r.choice(comms)}
    if steps and r.random() < 0.2:
        row |= {"topk": r.choice([2, 8]), "num_draft_tokens": r.choice([2, 8, 64])}
    if steps == 0 and r.random() < 0.2:
        row["speculation"] = True
    if r.random() < 0.2:
        row["context_tokens"] = r.choice([0, 1, 1024, 200000])
    for name in ("cuda_graph", "verify_cuda_graph"):
        if r.random() < 0.1:
            row[name] = False
    form = r.choice(["tok_s"] * 4 + ["tpot_ms", "cycle_ms", "tok_s_at_most", "range_tok_s", "range_cycle_ms"])
    value = r.choice([r.uniform(5, 500)] * 8 + [10 ** r.uniform(-3, 7)])
    row[form] = [value, value * r.uniform(1, 1.5)] if form.startswith("range") else value
    if steps and r.random() < 0.6:
        row["acceptance_length"] = 1 + r.random() * steps * r.choice([1, 1, 1, 1.5])
    return row


def some_file(r: random.Random) -> dict[str, Any]:
    names, comms = r.choice([["default"], ["a", "b"], ["default", "x"]]), r.choice([["default"], ["default", "ring"]])
    model: dict[str, Any] = {"method": r.choice(METHODS)} if r.random() < 0.6 else {}
    if r.random() < 0.3:
        model |= {"num_experts": 128, "experts_per_token": r.choice([1, 8, 128])}
    if r.random() < 0.3:
        model["cuda_graph_sizes"] = sorted(r.sample(range(1, 600), 3))
    measured: dict[str, Any] = {"cycles": [some_cycle(r, names, comms) for _ in range(r.choice([0, 1, 2, 3, 5, 8]))]}
    if r.random() < 0.4:
        passes = [(r.choice([1, 2, 4, 64]), r.choice([1, 2, 8])) for _ in range(3)]
        measured["verify"] = [{"tokens": n, "batch": b, "time_ms": 10 ** r.uniform(-1, 2)} for n, b in passes]
    if r.random() < 0.3:
        measured["draft"] = [{"num_steps": r.choice([1, 3, 5]), "time_ms": 10 ** r.uniform(-2, 2)}]
    out = {"schema": "specmodel.calibration/1", "name": "random", "model": model, "measurements": measured}
    out |= {"comm": {c: {} for c in comms}, "system": {"tensor_parallel": r.choice([1, 8])}}
    if r.random() < 0.4:
        out["acceptance"] = [{"num_steps": 3, "workload": r.choice(names), "survival": [0.8, 0.5, 0.3]}]
    return out


@pytest.mark.parametrize("seed", range(30))
def test_any_file_is_diagnosed(seed: int) -> None:
    r = random.Random(seed)
    found = sm.diagnose(sm.fit(sm.from_dict(some_file(r))), worth=r.choice([0.02, 0.0, 0.5]))
    json.dumps(diagnosis_document(found), allow_nan=False)
    assert len({x.name for x in found.levers}) == len(found.levers)
    for x in found.levers:
        assert x.evidence
        assert x.status != "measure" or x.decided_by
        if x.bound is not None and x.bound_optimised is not None and x.interval is not None:
            assert 1.0 <= x.interval[0] <= x.interval[1]
            assert 1.0 <= x.bound <= x.bound_optimised <= x.interval[1] + 1e-9
