"""What servers of older and newer versions answer and print beyond their decode lines: names by meaning."""

import json
import re
from pathlib import Path

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given, Shape
from specmodel.errors import CalibrationError

DATA = Path(__file__).parent / "data" / "engines"


def read(tmp_path, text, name="x.log", **given):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return ingest([str(path)], Given(**given), "made")


ROUNDS, ACCEPTED = 100, 160
TOKENS = ROUNDS + ACCEPTED + 1
REPLIES = {
    "0.5.3": {"spec_verify_ct": ROUNDS},
    "0.5.5": {"spec_verify_ct": ROUNDS, "spec_accept_rate": 0.5333, "spec_accept_length": 2.61},
    "0.5.8": {"spec_verify_ct": ROUNDS, "spec_accept_token_num": ACCEPTED, "spec_draft_token_num": 3 * ROUNDS},
    "0.5.11": {"spec_verify_ct": ROUNDS, "spec_accepted_drafts": ACCEPTED, "spec_proposed_drafts": 3 * ROUNDS},
    "0.5.12": {"spec_verify_ct": ROUNDS, "spec_num_correct_drafts": ACCEPTED, "spec_num_proposed_drafts": 3 * ROUNDS},
    "0.5.12, a histogram": {"spec_verify_ct": ROUNDS, "spec_correct_drafts_histogram": [20, 25, 30, 25]},
}


@pytest.mark.parametrize("version", REPLIES)
def test_replies_of_every_version_have_the_same_length(version, tmp_path):
    """Tokens cut at a stop string, the first one of the prompt pass, the bonus in or out: one acceptance length."""
    replies = [{"text": "x", "meta_info": {"completion_tokens": TOKENS, **REPLIES[version]}}] * 3
    shape = Shape(num_steps=3) if version == "0.5.3" else None
    calibration, (reading,) = read(tmp_path, replies, "replies.json", shape=shape)
    (entry,) = calibration.acceptance
    assert (entry.num_steps, entry.prompts, entry.drafts) == (3, 3, 3 * ROUNDS)
    length = entry.acceptance_length or 1 + sum(entry.accepted_per_position) / entry.drafts
    assert length == pytest.approx(1 + ACCEPTED / ROUNDS)
    assert reading.used["replies"] == 3


def test_replies_that_do_not_tell_their_steps_are_asked_for(tmp_path):
    replies = [{"meta_info": {"completion_tokens": TOKENS, **REPLIES["0.5.3"]}}] * 3
    with pytest.raises(CalibrationError, match="say --num-steps"):
        read(tmp_path, replies, "replies.json")
    # More accepted than drafted is no reply of three steps.
    replies = [{"meta_info": {"completion_tokens": 900, **REPLIES["0.5.3"]}}]
    with pytest.raises(CalibrationError, match="counts cannot be"):
        read(tmp_path, replies, "replies.json", shape=Shape(num_steps=3))


def test_loads_before_decode_moments(tmp_path):
    document = {"accelerator": "NVIDIA H200", "loads": [{"speculative": {"accept_length": 2.5, "accept_rate": 0.5}}]}
    calibration, _ = read(tmp_path, document, "loads.json", shape=Shape(num_steps=3))
    (entry,) = calibration.acceptance
    assert (entry.num_steps, entry.acceptance_length) == (3, 2.5)
    with pytest.raises(CalibrationError, match="say --num-steps"):
        read(tmp_path, document, "loads.json")


ARGS = (
    "server_args=ServerArgs(model_path='m', tp_size=2, pp_size={pp}, speculative_algorithm='EAGLE3', "
    "speculative_num_steps={k}, speculative_eagle_topk={topk}, speculative_num_draft_tokens={tokens})"
)


def decode(length, rate, speed, prefix="", extra=""):
    return (
        f"[2026-05-01 10:00:00{prefix}] Decode batch, #running-req: 4, #token: 400, token usage: 0.01, accept len: "
        f"{length:.2f}, accept rate: {rate:.2f}, {extra}cuda graph: True, gen throughput (token/s): {speed:.2f}, "
        "#queue-req: 0"
    )


def test_a_pipeline_prints_each_line_once_more(tmp_path):
    lines = [ARGS.format(pp=2, k=3, topk=1, tokens=4)]
    for _ in range(6):
        lines += [decode(2.5, 0.5, 1000.0, " PP0"), decode(2.5, 0.5, 400.0, " PP1")]
    calibration, (reading,) = read(tmp_path, "\n".join(lines) + "\n")
    (row,) = calibration.measurements.cycles
    assert row.cycle_ms == pytest.approx(10.0)
    assert calibration.system.num_gpus == 4
    assert calibration.acceptance[0].drafts == 6 * 40 * 4
    assert sum(n for reason, n in reading.dropped.items() if "later pipeline stage" in reason) == 6


TREE_RATES = {
    "to 0.5.5.post2": ("accept len / (num_steps + 1)", lambda length: length / 6),
    "to 0.5.10": ("accept len / num_draft_tokens", lambda length: length / 8),
    "from 0.5.11": ("(accept len - 1) / (num_draft_tokens - 1)", lambda length: (length - 1) / 7),
}


@pytest.mark.parametrize("version", TREE_RATES)
def test_definitions_of_the_rate_of_a_tree_are_told_apart(version, tmp_path):
    words, rate = TREE_RATES[version]
    lengths = [2.8, 3.1, 3.4, 2.95, 3.05, 3.25]
    lines = [ARGS.format(pp=1, k=5, topk=4, tokens=8), *(decode(n, rate(n), 400 * n) for n in lengths)]
    calibration, _ = read(tmp_path, "\n".join(lines) + "\n")
    (entry,) = calibration.acceptance
    assert entry.acceptance_length == pytest.approx(sum(lengths) / 6, abs=1e-5)
    assert words in entry.note


def test_names_of_later_drafters_are_passed_over(tmp_path):
    args = "server_args=ServerArgs(model_path='m', tp_size=1, speculative_algorithm='DSPARK', speculative_num_steps=1, "
    args += "speculative_eagle_topk=1, speculative_num_draft_tokens=6, speculative_dspark_block_size=5)"
    line = decode(3.4, 0.2, 1360.0, extra="cap len: 4.20, block accept len: 3.90, ")
    calibration, _ = read(tmp_path, "\n".join([args, *[line] * 5]) + "\n")
    (row,), (entry,) = calibration.measurements.cycles, calibration.acceptance
    assert (row.num_steps, row.cycle_ms, entry.acceptance_length) == (5, 10.0, 3.4)
    assert calibration.model.method == "parallel"


def test_an_older_list_of_a_server_s_states_is_flat(tmp_path):
    document = json.loads((DATA / "sglang_v0518_server_info.json").read_text())
    (state,) = document.pop("internal_states")
    flat, _ = read(tmp_path, document | state, "flat.json")
    nested, _ = read(tmp_path, document | {"internal_states": state}, "nested.json")
    listed, _ = ingest([str(DATA / "sglang_v0518_server_info.json")], Given(), "made")
    for found in (flat, nested):
        assert [row.cycle_ms for row in found.measurements.cycles] == [
            row.cycle_ms for row in listed.measurements.cycles
        ]


def test_a_benchmark_of_serving_with_an_impossible_length_is_left_out(tmp_path):
    text = (DATA / "sglang_bench_serving.jsonl").read_text()
    text = text.replace('"speculative_num_steps": 3', '"speculative_num_steps": 1')
    with pytest.raises(CalibrationError, match="cannot be of 1 steps"):
        read(tmp_path, text, "bench.jsonl")


def test_events_longer_than_a_cycle_s_tokens_are_no_cycles(tmp_path):
    result = json.loads((DATA / "vllm_bench_serve.json").read_text())
    result = {key: value for key, value in result.items() if not key.startswith("spec_decode")}
    result |= {"mean_itl_ms": 118.6, "median_itl_ms": 118.6}
    with pytest.raises(CalibrationError, match="cannot be cycles of 3 steps"):
        read(tmp_path, result, "bench.json", shape=Shape(num_steps=3))
    with pytest.raises(CalibrationError, match=r"events are 25\.9 tokens long"):
        read(tmp_path, result, "bench.json")


def test_iterations_without_a_time_are_not_timed(tmp_path):
    text = re.sub(
        r"prev_device_step_time = [\d.]+ms", "prev_device_step_time = 0.0ms", (DATA / "trtllm_iter.log").read_text()
    )
    with pytest.raises(CalibrationError, match="has no device time"):
        read(tmp_path, text)


def test_older_records_of_the_overlap_scheduler_have_no_time_of_their_own(tmp_path):
    """Before May 2026 neither the device's time nor the scheduler is told: a loop's latency may span two."""
    records = json.loads((DATA / "trtllm_metrics.json").read_text())
    new = ("hostStepTimeMS", "prevDeviceStepTimeMS", "schedulerMode", "scheduledNumDecodeRequests")
    old = [{key: value for key, value in record.items() if key not in new} for record in records]
    calibration, _ = read(tmp_path, old, "metrics.json")
    assert not calibration.measurements.cycles
    assert calibration.acceptance[0].acceptance_length == pytest.approx(2.38298, abs=1e-5)
    alone = [record | {"schedulerMode": "non_overlap"} for record in old]
    calibration, _ = read(tmp_path, alone, "metrics.json")
    rows = {row.batch: row.cycle_ms for row in calibration.measurements.cycles}
    assert rows[4] == pytest.approx(records[1]["iterLatencyMS"], rel=0.1)


def test_drafts_without_end_are_damage_and_take_no_time(tmp_path):
    records = json.loads((DATA / "trtllm_metrics.json").read_text())
    for record in records[1:]:
        record["specDecodingStats"] |= {"numDraftTokens": 4 * 10**8, "numRequestsWithDraftTokens": 4}
    with pytest.raises(CalibrationError, match="contradict each other"):
        read(tmp_path, records, "metrics.json")


def test_trtllm_counters_before_they_were_counters(tmp_path):
    """Gauges of the same names; without a draft length they are asked for."""
    text = "trtllm_spec_decode_num_draft_tokens 3000\ntrtllm_spec_decode_num_accepted_tokens 1500\n"
    calibration, _ = read(tmp_path, text, "trt.prom", shape=Shape(num_steps=3))
    assert calibration.acceptance[0].acceptance_length == pytest.approx(2.5)
    with pytest.raises(CalibrationError, match="say --num-steps"):
        read(tmp_path, text, "trt.prom")


def test_sglang_device_timers_of_their_first_releases(tmp_path):
    text = (
        (DATA / "sglang_v0518_metrics.prom").read_text().replace("forward_execution_seconds", "gpu_execution_seconds")
    )
    text = "\n".join(line for line in text.splitlines() if "eagle_draft" not in line)
    calibration, _ = read(tmp_path, text, "old.prom")
    assert calibration.measurements.verify[0].time_ms == pytest.approx(6.95)
    assert not calibration.measurements.draft


def test_sglang_timers_of_every_rank_count_once(tmp_path):
    text = (DATA / "sglang_v0518_metrics.prom").read_text()
    doubled = text + "\n".join(
        line.replace('tp_rank="0"', 'tp_rank="1"') for line in text.splitlines() if 'tp_rank="0"' in line
    )
    one, _ = read(tmp_path, text, "one.prom")
    two, _ = read(tmp_path, doubled + "\n", "two.prom")
    assert [row.time_ms for row in two.measurements.verify] == [row.time_ms for row in one.measurements.verify]
    assert [row.batch for row in two.measurements.cycles] == [row.batch for row in one.measurements.cycles]


def test_vllm_bench_before_its_spec_fields_tells_plain_from_drafted_by_its_times(tmp_path):
    result = json.loads((DATA / "vllm_bench_serve.json").read_text())
    old = {key: value for key, value in result.items() if not key.startswith("spec_decode")}
    with pytest.raises(CalibrationError, match="say --num-steps"):
        read(tmp_path, old, "bench.json")
    calibration, _ = read(tmp_path, old, "bench.json", shape=Shape(num_steps=3))
    (row,) = calibration.measurements.cycles
    assert row.cycle_ms == pytest.approx(11.72)
    plain = old | {"mean_itl_ms": 9.0, "median_itl_ms": 9.0, "mean_tpot_ms": 9.05, "median_tpot_ms": 9.0}
    calibration, _ = read(tmp_path, plain, "bench.json")
    assert calibration.measurements.cycles[0].num_steps == 0


@pytest.mark.parametrize("drafts", ["0.3", "1e-9"])
def test_a_part_of_a_draft_is_none(drafts, tmp_path):
    text = (DATA / "llamacpp_metrics.prom").read_text()
    text = re.sub(r"(?m)^(llamacpp:spec_decode_num_drafts_total\S*) .*$", rf"\1 {drafts}", text)
    try:
        calibration, _ = read(tmp_path, text, "x.prom")
    except CalibrationError:
        return
    assert not calibration.acceptance


def test_counts_by_position_that_rise_are_left_out(tmp_path):
    lines = [
        f'trtllm_spec_decode_{kind}_tokens_total{{token_position="{i}"}} {n}'
        for i, hits in enumerate((700, 500, 700))
        for kind, n in (("drafted", 1000), ("accepted", hits))
    ]
    with pytest.raises(CalibrationError):
        read(tmp_path, "\n".join(lines) + "\n", "trt.prom")
