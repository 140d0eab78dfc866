"""The committed measurements: their raw samples keep to the schema and give the calibrations beside them."""

import gzip
import hashlib
import re
from datetime import datetime
from pathlib import Path

import jsonschema
import pytest

from specmodel import io
from specmodel.harness.results import addition_errors, calibration_of, falls
from specmodel.harness.samples import json_schema, read_samples

MEASURED = Path(__file__).resolve().parents[1] / "calibrations" / "measured"
SAMPLES = sorted(MEASURED.glob("*.samples.json.gz"))


def test_there_are_measurements_with_raw_samples():
    assert {path.name.partition(".samples")[0] for path in SAMPLES} >= {
        "h200-llama-3.1-8b",
        "h200-qwen3-30b-a3b",
        "h200x2-llama-3.3-70b",
        "h200x2-llama-3.3-70b-ctas",
        "h200x2-llama-3.3-70b-nccl",
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name.partition(".samples")[0])
def test_the_calibration_is_what_its_samples_say(path):
    content = read_samples(path)
    jsonschema.validate(content, json_schema())
    name, digest = path.name.partition(".samples")[0], hashlib.sha256(path.read_bytes()).hexdigest()
    committed = io.load(MEASURED / f"{name}.yaml")
    assert digest in str(committed.provenance.source)
    made = calibration_of(content, name=name, samples_name=path.name, samples_sha256=digest, keep_noisy=True)
    assert committed.measurements == made.measurements
    assert committed.acceptance == made.acceptance
    assert committed.comm == made.comm
    # Cycles may be left out, with a caveat that says so, but none is changed.
    left_out = [row for row in made.validation.cycles if row not in committed.validation.cycles]
    assert [row for row in committed.validation.cycles if row not in made.validation.cycles] == []
    assert bool(left_out) == any(
        "left out (they are in the raw samples)" in text for text in committed.provenance.caveats
    )


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name.partition(".samples")[0])
def test_raw_samples_are_small_and_hold_nothing_of_the_machine(path):
    assert path.stat().st_size < 2_000_000
    text = gzip.decompress(path.read_bytes()).decode()
    assert re.findall(r"/(?:home|root|tmp|usr|opt|var)/", text) == []
    assert [word for word in ("TOKEN", "SECRET", "PASSWORD", "LD_LIBRARY_PATH") if word in text] == []


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.name.partition(".samples")[0])
def test_validated_cycles_are_the_sum_of_their_parts(path):
    """What the tables and the cycles measure is the same thing: half of the cycles within one percent."""
    name = path.name.partition(".samples")[0]
    kept = {
        (row.comm, row.num_steps, row.batch, row.context_tokens, row.cuda_graph, row.graph_scope)
        for row in io.load(MEASURED / f"{name}.yaml").validation.cycles
    }
    errors = []
    for point, error in addition_errors(read_samples(path)):
        scope = "cycle" if point.get("graph_scope") == "cycle" and point["num_steps"] else None
        graph = point["cuda_graph"] or not point["num_steps"]
        where = (point["comm"], point["num_steps"], point["batch"], point["context_tokens"], graph, scope)
        if where in kept:
            errors.append(abs(error))
    assert len(errors) >= 0.8 * len(kept)  # a run that was cut off lacks the parts of some
    assert sorted(errors)[len(errors) // 2] < 0.01


def test_the_verify_graph_is_shorter_after_eager_drafts():
    """What docs/measure.md says of drafting without graphs: the drafts are longer, the pass behind them is shorter."""
    content = read_samples(MEASURED / "h200-qwen3-30b-a3b.samples.json.gz")
    parts = {point["key"]: point["runs"][0]["parts"] for point in content["points"] if point["kind"] == "cycle"}
    graphs, eager = parts["cycle/k2/b1/c1024/step"], parts["cycle/k2/b1/c1024/eager"]
    assert (round(eager["verify_ms"], 2), round(graphs["verify_ms"], 2)) == (5.24, 5.49)
    assert (round(eager["draft_ms"], 2), round(graphs["draft_ms"], 2)) == (0.33, 0.29)
    for num_steps in (2, 3, 5, 7, 10):
        ratio = (
            parts[f"cycle/k{num_steps}/b1/c1024/eager"]["verify_ms"]
            / parts[f"cycle/k{num_steps}/b1/c1024/step"]["verify_ms"]
        )
        assert 0.95 < ratio < 0.98


RINGS = ("ring-ll", "ring-ll128", "ring-simple")
SETTINGS = {
    "h200x2-llama-3.3-70b-nccl": {
        *(f"{kind}{ctas}" for kind in ("default", *RINGS) for ctas in ("", "-1cta", "-4cta", "-16cta")),
        "host-staged",
    },
    "h200x2-llama-3.3-70b": {"default", *(f"{ring}{ctas}" for ring in RINGS for ctas in ("", "-1cta"))},
    "h200x2-llama-3.3-70b-ctas": {"default", *(f"{ring}{ctas}" for ring in RINGS for ctas in ("-4cta", "-16cta"))},
}
BROKEN_OFF = ("h200x2-llama-3.3-70b-ctas", "ring-simple-16cta")  # its caveats say so


@pytest.mark.parametrize("name", SETTINGS)
def test_every_nccl_setting_of_two_gpus_was_measured_whole(name):
    """Ring with each protocol and the default, with 1, 4, 16 and NCCL's own CTAs, and host-staged transfer."""
    cal = io.load(MEASURED / f"{name}.yaml")
    assert set(cal.comm_names) == SETTINGS[name]
    tokens = {*range(1, 17), 24, 32, 64, 128}
    tables = cal.measurements
    for comm in SETTINGS[name]:
        found = (
            ({row.tokens for row in tables.verify if row.comm == comm and row.cuda_graph}, tokens),
            (
                {row.size_bytes for row in tables.allreduce if row.comm == comm and row.in_graph},
                {2 * cal.model.hidden_size * n for n in tokens},
            ),
            ({row.num_steps for row in tables.draft if row.comm == comm}, set(range(1, 11))),
            ({row.num_steps for row in cal.validation.cycles if row.comm == comm}, set(range(11))),
        )
        for there, planned in found:
            assert there <= planned
            assert there == planned or ((name, comm) == BROKEN_OFF and len(there) > len(planned) / 2)
    assert all(setting.env["NCCL_NVLS_ENABLE"] == "0" for setting in cal.comm.values())


@pytest.mark.parametrize("name", ["h200-llama-3.1-8b", "h200-qwen3-30b-a3b"])
def test_one_machine_and_shape_take_less_than_ten_minutes(name):
    content = read_samples(MEASURED / f"{name}.samples.json.gz")
    begin, end = (datetime.fromisoformat(content["run"][key]) for key in ("started", "finished"))
    assert 0 < (end - begin).total_seconds() < 540
    verify = [point for point in content["points"] if point["kind"] == "verify"]
    assert {point["batch"] for point in verify} == {1, 4, 16, 64}
    assert max(point["tokens"] for point in verify) >= 512
    assert {point["num_steps"] for point in content["points"] if point["kind"] == "cycle"} == {0, 1, 2, 3, 5, 7, 10}


def test_passes_that_are_faster_than_shorter_ones_are_said():
    """Real ones: 13 tokens of the dense shape take less than 12. Made-up ones: only what exceeds noise and 0.5 %."""
    content = read_samples(MEASURED / "h200-llama-3.1-8b.samples.json.gz")
    share, before, after, point = falls(content)[0]
    assert (before, after, point["batch"]) == (12, 13, 1)
    assert 0.03 < share < 0.06
    caveats = calibration_of(content, name="a", samples_name="a", samples_sha256="0" * 64).provenance.caveats
    assert sum("12 to 13 tokens, batch 1" in text for text in caveats) == 1

    def line(*medians_ms, sd_ms=0.001):
        where = {"kind": "verify", "comm": "default", "batch": 1, "context_tokens": 1024, "cuda_graph": True}
        summaries = ({"median_ms": ms, "sd_ms": sd_ms, "effective_samples": 25} for ms in medians_ms)
        return {
            "points": [
                {**where, "disposition": "ok", "part": "all", "tokens": 1 + i, "summary": summary}
                for i, summary in enumerate(summaries)
            ]
        }

    assert falls(line(4.0, 4.0, 4.1)) == []
    assert falls(line(4.0, 3.99)) == []  # 0.25 %
    assert [fall[1:3] for fall in falls(line(4.0, 3.9, 3.7))] == [(2, 3), (1, 2)]
    assert falls(line(4.0, 3.9, 3.7, sd_ms=0.5)) == []  # standard errors of 0.1 ms
    apart = line(4.0, 3.0)
    apart["points"][1]["comm"] = "ring-ll"
    assert falls(apart) == []
