"""Acceptance that was set for benchmarking is said and never taken for measured; the times under it are kept."""

import json
from pathlib import Path

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given

DATA = Path(__file__).parent / "data" / "engines"
SGLANG = (DATA / "sglang_v0518_eagle3_tp8_clean.log").read_text()
SCRAPE = (DATA / "sglang_v0518_metrics.prom").read_text()
BENCH = json.dumps(
    {
        "backend": "sglang",
        "accept_length": 3.0,
        "output_throughput": 280.0,
        "median_tpot_ms": 4.0,
        "median_itl_ms": 12.0,
        "mean_tpot_ms": 4.0,
        "concurrency": 1.0,
        "max_concurrent_requests": 1,
        "total_output_tokens_retokenized": 2,
        "server_info": {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4},
    }
)
SET = "SGLANG_SIMULATE_ACC_LEN=3.61\n"


def read(folder, *texts):
    paths = []
    for i, text in enumerate(texts):
        paths.append(folder / f"source{i}.txt")
        paths[-1].write_text(text)
    return ingest([str(path) for path in paths], Given(), "x")


def cycles(calibration):
    return {(row.num_steps, row.batch): row.cycle_ms for row in calibration.measurements.cycles}


@pytest.mark.parametrize(
    "line",
    [
        SET,
        "+ export SGLANG_SIMULATE_ACC_LEN=2.5\n",
        "docker run -e SIMULATE_ACC_LEN=2.5 -e SGLANG_SIMULATE_ACC_METHOD=match-expected image\n",
        "environ({'HOME': '/root', 'SGLANG_SIMULATE_ACC_LEN': '3.61'})\n",
        '  "SGLANG_SIMULATE_ACC_LEN": "3.61",\n',
        "\x1b[32mSGLANG_SIMULATE_ACC_LEN\x1b[0m: 3.61\n",
    ],
)
def test_a_variable_in_a_log_of_sglang(tmp_path, line):
    plain, _ = read(tmp_path, SGLANG)
    for text in (line + SGLANG, SGLANG + line):
        calibration, (reading,) = read(tmp_path, text)
        assert cycles(calibration) == cycles(plain)
        assert plain.acceptance
        assert not calibration.acceptance
        assert reading.dropped["synthetic acceptance: it was set, not measured"] == 1
        assert any("SIMULATE_ACC_LEN" in str(fact.value) for fact in calibration.evidence)


@pytest.mark.parametrize(
    "line",
    [
        "SGLANG_SIMULATE_ACC_LEN=-1\n",
        "SGLANG_SIMULATE_ACC_LEN=0\n",
        "unset SGLANG_SIMULATE_ACC_LEN\n",
        "SIMULATE_ACC_LEN=\n",
    ],
)
def test_a_variable_that_is_off_changes_nothing(tmp_path, line):
    assert read(tmp_path, line + "\n" + SGLANG)[0].acceptance


def test_a_print_of_the_environment_speaks_for_the_log_beside_it(tmp_path):
    for texts in ((SET, SGLANG), (SGLANG, "A=1\n" + SET)):
        calibration, _ = read(tmp_path, *texts)
        assert calibration.measurements.cycles
        assert not calibration.acceptance


def test_counters_and_benchmarks_belong_to_the_server_that_says_it(tmp_path):
    plain, _ = read(tmp_path, SGLANG, SCRAPE, BENCH)
    assert plain.acceptance
    assert any(row.acceptance_length for row in plain.measurements.cycles)
    calibration, _ = read(tmp_path, SET + SGLANG, SCRAPE, BENCH)
    assert not calibration.acceptance
    assert not any(row.acceptance_length or row.tpot_ms or row.tok_s for row in calibration.measurements.cycles)
    assert any("bench" in (row.note or "") or row.cycle_ms == 12.0 for row in calibration.measurements.cycles)


def test_a_log_of_another_run_keeps_what_it_measured(tmp_path):
    calibration, (pinned, real) = read(tmp_path, SET + SGLANG, SGLANG)
    assert [entry.num_steps for entry in calibration.acceptance] == [3]
    assert pinned.dropped["synthetic acceptance: it was set, not measured"] == 1
    assert not real.dropped["synthetic acceptance: it was set, not measured"]


@pytest.mark.parametrize("value", ["2.1", "1"])
def test_a_variable_in_a_log_of_tensorrt_llm(tmp_path, value):
    log = (DATA / "trtllm_iter.log").read_text()
    counters = "".join(
        f'trtllm_spec_decode_{kind}_tokens_total{{token_position="{i}"}} {n}\n'
        for i in range(3)
        for kind, n in (("drafted", 1000), ("accepted", 700 - 200 * i))
    )
    assert read(tmp_path, log, counters)[0].acceptance
    calibration, _ = read(tmp_path, f"TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={value}\n" + log, counters)
    assert calibration.measurements.cycles
    assert not calibration.acceptance


@pytest.mark.parametrize(
    "line", ["llama-server -m T -md D --spec-synth-len 2.5 -np 1\n", "LLAMA_ARG_SPEC_SYNTH_RATES=0.7,0.5,0.3\n"]
)
def test_a_command_line_or_variable_of_llamacpp(tmp_path, line):
    log = (DATA / "llamacpp_server_new.log").read_text()
    calibration, _ = read(tmp_path, line + log)
    assert calibration.measurements.cycles
    assert not calibration.acceptance
