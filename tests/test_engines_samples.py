"""Every sample of an engine: what it prints is read to the digits, and its ground truth lies in the intervals."""

import json
import math
from pathlib import Path

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given, Shape

DATA = Path(__file__).parent / "data" / "engines"
EXPECTED = json.loads((DATA / "expected.json").read_text())
Z90 = 1.645


def read(*names, **given):
    calibration, readings = ingest([str(DATA / name) for name in names], Given(**given), "sample")
    return calibration, readings


def cycles_by_batch(calibration):
    return {row.batch: row for row in calibration.measurements.cycles}


def assert_inside(value, sd, samples, truth):
    assert abs(value - truth) <= Z90 * sd / math.sqrt(samples), (value, sd, samples, truth)


def assert_cycles_hold(calibration, truth_ms):
    rows = cycles_by_batch(calibration)
    assert set(truth_ms) <= set(rows)
    for batch, truth in truth_ms.items():
        assert_inside(rows[batch].cycle_ms, rows[batch].sd_cycle_ms, rows[batch].samples, truth)


def truth_of(name):
    return {int(batch): 1e3 * t for batch, t in EXPECTED[name]["truth_round_time_s"].items()}


@pytest.mark.parametrize(
    "name",
    [
        "sglang_v0518_eagle3_tp8_clean.log",
        "sglang_v0510_eagle3_tree_tp8_noisy_truncated.log",
        "sglang_v0518_server_info.json",
        "vllm_v1_eagle3.log",
    ],
)
def test_cycle_times_hold_the_truth(name):
    calibration, _ = read(name)
    assert_cycles_hold(calibration, truth_of(name))
    assert calibration.system.tensor_parallel == 8


def test_sglang_clean_log():
    name = "sglang_v0518_eagle3_tp8_clean.log"
    calibration, (reading,) = read(name)
    expected = EXPECTED[name]
    (entry,) = calibration.acceptance
    assert entry.acceptance_length == pytest.approx(expected["pooled_accept_len"], abs=5e-4)
    assert entry.drafts == 40 * 304
    assert_inside(entry.acceptance_length, entry.sd, 1, expected["truth_accept_len"])
    assert "drafts only" in entry.note
    assert (calibration.model.method, entry.num_steps) == ("eagle3", 3)
    assert list(calibration.model.cuda_graph_sizes) == expected["captured_bs"]
    assert calibration.model.cuda_graph_unit == "sequences"
    assert reading.dropped["not timed: after a prefill"] == 5
    facts = {row.about: row for row in calibration.evidence}
    assert facts["target_cuda_graph"].value is True
    assert facts["target_cuda_graph"].ranks == 8
    assert facts["draft_cuda_graph"].value is True
    assert facts["decode_with_cuda_graph"].value is True
    assert facts["free_memory_bytes"].value == round(19.39 * 2**30)
    assert "custom" in facts["allreduce_implementation"].value


def test_sglang_noisy_truncated_tree_log():
    name = "sglang_v0510_eagle3_tree_tp8_noisy_truncated.log"
    calibration, (reading,) = read(name)
    expected = EXPECTED[name]
    (entry,) = calibration.acceptance
    assert entry.acceptance_length == pytest.approx(expected["pooled_accept_len_complete_lines"], abs=5e-4)
    survival, truth = 1.0, 1.0
    for conditional in expected["truth_depth_conditional"]:
        survival *= conditional
        truth += survival
    assert_inside(entry.acceptance_length, entry.sd, 1, truth)
    assert (entry.num_steps, entry.topk, entry.num_draft_tokens) == (5, 4, 8)
    assert "bonus in both" in entry.note
    assert "29 decode lines" in entry.note
    assert reading.dropped["decode line cut off"] == 1
    assert reading.dropped["not timed: the verify pass ran without its CUDA graph"] == 1
    facts = {row.about: row for row in calibration.evidence}
    assert facts["draft_cuda_graph"].ranks == expected["draft_capture_ranks"]
    assert facts["target_cuda_graph"].ranks == expected["target_capture_ranks"]
    assert "28 of 29" in facts["decode_with_cuda_graph"].note
    assert calibration.comm["ring"].env == {"NCCL_ALGO": "Ring"}
    assert {row.comm for row in calibration.measurements.cycles} == {"ring"}


def test_sglang_server_info_drops_the_outlier_and_keeps_the_version():
    calibration, (reading,) = read("sglang_v0518_server_info.json")
    assert reading.dropped["outliers (more than twice the median)"] == 1
    assert calibration.system.engine_version == "0.5.18"
    assert calibration.acceptance[0].acceptance_length == pytest.approx(2.483224)


def test_sglang_metrics_split_verify_and_draft():
    calibration, _ = read("sglang_v0518_metrics.prom")
    expected = EXPECTED["sglang_v0518_metrics.prom"]
    (verify,), (draft,) = calibration.measurements.verify, calibration.measurements.draft
    assert (verify.tokens, verify.time_ms) == (4, pytest.approx(expected["verify_ms"]))
    assert (draft.num_steps, draft.time_ms) == (3, pytest.approx(expected["draft_ms"] + expected["draft_extend_ms"]))
    (cycle,) = calibration.measurements.cycles
    assert cycle.cycle_ms == pytest.approx(9.4, rel=0.003)
    assert calibration.acceptance[0].acceptance_length == 2.4925


def test_sglang_bench_speculative_row_by_row():
    calibration, _ = read("sglang_bench_speculative.jsonl")
    rows = [json.loads(line) for line in (DATA / "sglang_bench_speculative.jsonl").read_text().splitlines()]
    assert len(calibration.measurements.cycles) == EXPECTED["sglang_bench_speculative.jsonl"]["rows"] == len(rows)
    for cycle, row in zip(calibration.measurements.cycles, rows, strict=True):
        assert cycle.cycle_ms == pytest.approx(1e3 * row["step_time"])
        assert (cycle.num_steps, cycle.batch) == (row["steps"], row["batch_size"])
        if row["steps"]:
            assert cycle.acceptance_length == row["acc_length"]
            assert (cycle.topk, cycle.verify_tokens) == (row["topk"], row["num_draft_tokens"])


def test_sglang_bench_one_batch_server():
    name = "sglang_bench_one_batch_server.jsonl"
    calibration, _ = read(name)
    for cycle, truth in zip(calibration.measurements.cycles, EXPECTED[name]["round_time_s"], strict=True):
        assert 1e3 * cycle.batch * cycle.acceptance_length / cycle.tok_s == pytest.approx(1e3 * truth)
        assert cycle.num_steps == 3
    assert [row.tokens for row in calibration.measurements.prefill] == [1024, 8192, 32768]


def test_sglang_bench_serving_takes_the_cycle_from_itl():
    calibration, _ = read("sglang_bench_serving.jsonl")
    (cycle,) = calibration.measurements.cycles
    assert (cycle.cycle_ms, cycle.acceptance_length, cycle.batch, cycle.num_steps) == (11.02, 2.4903, 7.94, 3)


def test_sglang_step_time_tables():
    flat, _ = read("sglang_dspark_sps_flat.json")
    expected = EXPECTED["sglang_dspark_sps_flat.json"]["step_time_s"]
    assert {row.tokens: row.time_ms for row in flat.measurements.verify} == pytest.approx(
        {int(tokens): 1e3 * t for tokens, t in expected.items()}
    )
    as_cycles, _ = read("sglang_dspark_sps_flat.json", shape=Shape(num_steps=3))
    assert [(row.batch, row.num_steps) for row in as_cycles.measurements.cycles[:3]] == [(1, 3), (2, 3), (4, 3)]
    additive, _ = read("sglang_dspark_sps_additive.json")
    example = EXPECTED["sglang_dspark_sps_additive.json"]["example"]
    steps = example["budget"] // example["num_reqs"]
    (row,) = [r for r in additive.measurements.cycles if (r.batch, r.num_steps) == (example["num_reqs"], steps)]
    assert row.cycle_ms == pytest.approx(1e3 * example["step_time_s"])
    records, _ = read("sglang_dspark_sps.records.jsonl")
    (row,) = records.measurements.cycles
    assert (row.batch, row.num_steps) == (8, 3)
    assert row.cycle_ms == pytest.approx(1e3 * EXPECTED["sglang_dspark_sps.records.jsonl"]["median_step_time_s"])


def test_sglang_schedule_is_evidence():
    calibration, _ = read("sglang_adaptive_static_schedule.json")
    (fact,) = calibration.evidence
    assert "batch 1-7: 5 steps; batch 8-23: 3 steps; batch 24-47: 1 steps; batch 48 and more: 0 steps" in fact.value


def test_vllm_log_pools_the_counts_of_all_intervals():
    calibration, (reading,) = read("vllm_v1_eagle3.log")
    expected = EXPECTED["vllm_v1_eagle3.log"]
    (entry,) = calibration.acceptance
    drafts = sum(interval["num_drafts"] for interval in expected["intervals"])
    assert entry.drafts == drafts
    for i in range(3):
        truth = sum(interval["per_pos_counts"][i] for interval in expected["intervals"])
        assert entry.accepted_per_position[i] == pytest.approx(truth, abs=0.0005 * drafts)
        p = expected["truth_per_position_unconditional"][i]
        sd = math.sqrt(p * (1 - p) / drafts) * math.sqrt(2)
        assert abs(entry.accepted_per_position[i] / drafts - p) <= Z90 * sd
    assert sum(entry.accepted_per_position) == sum(interval["accepted"] for interval in expected["intervals"])
    assert reading.used["metrics lines"] == expected["n_spec_lines"]
    assert calibration.system.engine_version == "0.26.0"
    facts = {row.about: row for row in calibration.evidence}
    assert facts["target_cuda_graph"].ranks == 8
    assert facts["decode_with_cuda_graph"].value is True


VARIANTS = (DATA / "vllm_log_variants.txt").read_text().splitlines()


@pytest.mark.parametrize("line", range(1, 6))
def test_vllm_variants_agree_on_counts_whatever_the_mean_holds(line, tmp_path):
    log = tmp_path / "one.log"
    log.write_text(VARIANTS[line] + "\n")
    calibration, _ = ingest([str(log)], Given(), "one")
    (entry,) = calibration.acceptance
    expected = EXPECTED["vllm_log_variants.txt"][line]
    assert entry.drafts == 600
    assert sum(entry.accepted_per_position) == expected["accepted"]
    assert [n / 600 for n in entry.accepted_per_position] == pytest.approx(expected["per_pos"], abs=1e-3)
    assert ("without the bonus" in entry.note) is (expected["mal_includes_bonus"] is False)


def test_vllm_totals_without_rates_need_the_steps(tmp_path):
    log = tmp_path / "one.log"
    log.write_text(VARIANTS[0] + "\n")
    with pytest.raises(Exception, match="--num-steps"):
        ingest([str(log)], Given(), "one")
    calibration, _ = ingest([str(log)], Given(shape=Shape(num_steps=3)), "one")
    assert calibration.acceptance[0].acceptance_length == pytest.approx(1 + 1103 / 600, abs=1e-4)


def test_vllm_v0_engine_gives_a_length_and_no_curve(tmp_path):
    log = tmp_path / "one.log"
    log.write_text(VARIANTS[9] + "\n")
    calibration, _ = ingest([str(log)], Given(), "one")
    (entry,) = calibration.acceptance
    assert entry.acceptance_length == pytest.approx(6372 / 3000)
    assert entry.accepted_per_position is None


def test_vllm_bench_serve_percent_and_fractions_in_one_object():
    calibration, _ = read("vllm_bench_serve.json")
    (cycle,), (entry,) = calibration.measurements.cycles, calibration.acceptance
    assert (cycle.cycle_ms, cycle.batch, cycle.num_steps) == (11.72, 8, 3)
    expected = EXPECTED["vllm_bench_serve.json"]
    assert [n / entry.drafts for n in entry.accepted_per_position] == pytest.approx(
        expected["per_pos_unconditional"], abs=1e-6
    )


def test_vllm_offline_example():
    calibration, _ = read("vllm_spec_decode_offline.txt")
    (entry,) = calibration.acceptance
    expected = EXPECTED["vllm_spec_decode_offline.txt"]
    assert (entry.drafts, sum(entry.accepted_per_position)) == (expected["num_drafts"], expected["accepted"])
    for count, truth in zip(entry.accepted_per_position, expected["per_pos_counts"], strict=True):
        assert abs(count - truth) <= 0.005 * entry.drafts


def test_trtllm_metrics_device_time_of_the_next_record():
    calibration, (reading,) = read("trtllm_metrics.json")
    truth = {}
    for record in EXPECTED["trtllm_metrics.json"]["truth_device_ms"]:
        if not record["ctx"]:
            truth[record["gen"]] = record["device_ms"]
    assert_cycles_hold(calibration, truth)
    (entry,) = calibration.acceptance
    assert entry.acceptance_length == pytest.approx(
        EXPECTED["trtllm_metrics.json"]["pooled_acceptance_length"], abs=1e-5
    )
    assert entry.drafts == EXPECTED["trtllm_metrics.json"]["num_requests"]
    assert not calibration.measurements.draft
    assert reading.dropped["not timed: prefill, or no request"] == 2


def test_trtllm_iteration_log():
    calibration, (reading,) = read("trtllm_iter.log")
    (row,) = calibration.measurements.cycles
    expected = EXPECTED["trtllm_iter.log"]
    assert (row.batch, row.num_steps) == (expected["batch"], expected["tokens_per_request"] - 1)
    assert_inside(row.cycle_ms, row.sd_cycle_ms, row.samples, expected["device_ms_median"])
    assert reading.dropped["not timed: idle (far from the median of its batch)"] == 1


def test_trtllm_bench_report_and_configuration():
    calibration, _ = read("trtllm_bench_report.json", "trtllm_config_eagle3.yaml")
    (row,) = calibration.measurements.cycles
    expected = EXPECTED["trtllm_bench_report.json"]
    assert row.acceptance_length == pytest.approx(expected["pooled_accept_len"], abs=1e-6)
    assert (row.num_steps, row.tpot_ms, row.batch) == (expected["max_draft_len"], 4.376, 7.91)
    assert (calibration.system.gpu, calibration.system.tensor_parallel) == (expected["gpu"], expected["tp"])
    assert calibration.model.draft == "eagle3-llama3.3-70b"


def test_llamacpp_server_log():
    calibration, _ = read("llamacpp_server_new.log")
    first, second, plain = EXPECTED["llamacpp_server_new.log"]["requests"]
    rows = {(row.num_steps, row.mean_draft_tokens is None): row for row in calibration.measurements.cycles}
    assert rows[3, True].cycle_ms == pytest.approx(first["round_ms"], abs=1e-3)
    assert rows[3, False].cycle_ms == pytest.approx(2882.04 / 120, abs=1e-3)
    assert rows[3, False].mean_draft_tokens == pytest.approx(second["drafted"] / 120, abs=1e-4)
    assert rows[0, True].cycle_ms == pytest.approx(896 / 39, abs=1e-3)
    assert plain["no_spec"]
    (draft,) = calibration.measurements.draft
    assert draft.time_ms == pytest.approx(first["draft_ms_per_round"])
    counts = next(e for e in calibration.acceptance if e.accepted_per_position)
    assert (counts.drafts, sum(counts.accepted_per_position)) == (first["verify_steps"], first["accepted"])
    assert [n / counts.drafts for n in counts.accepted_per_position] == pytest.approx(first["per_pos"])
    early = next(e for e in calibration.acceptance if e.acceptance_length)
    assert early.acceptance_length == pytest.approx(1 + 171 / 120)
    assert "20 drafted nothing" in early.note
    assert calibration.system.gpu == "NVIDIA H200"
    assert calibration.system.engine_version == "b10472"


def test_llamacpp_speculative_simple_timings_and_metrics():
    simple, _ = read("llamacpp_speculative_simple.txt")
    (row,) = simple.measurements.cycles
    expected = EXPECTED["llamacpp_speculative_simple.txt"]
    assert (row.num_steps, row.cycle_ms) == (expected["draft_max"], pytest.approx(expected["round_ms"], abs=1e-4))
    assert row.acceptance_length == pytest.approx(expected["accept_len"], abs=1e-6)
    timings, _ = read("llamacpp_timings.json")
    (row,), (entry,) = timings.measurements.cycles, timings.acceptance
    expected = EXPECTED["llamacpp_timings.json"]
    assert (row.num_steps, entry.drafts) == (expected["draft_max"], expected["rounds"])
    assert entry.acceptance_length == pytest.approx(expected["accept_len"], abs=1e-5)
    metrics, _ = read("llamacpp_metrics.prom")
    (entry,) = metrics.acceptance
    expected = EXPECTED["llamacpp_metrics.prom"]
    assert entry.drafts == expected["num_drafts"]
    assert [n / entry.drafts for n in entry.accepted_per_position] == pytest.approx(expected["per_pos"])


@pytest.mark.parametrize("name", ["nccl_all_reduce_2gpu.txt", "nccl_all_reduce_8gpu.txt"])
def test_nccl_tests_tables(name):
    calibration, _ = read(name)
    expected = EXPECTED[name]
    rows = calibration.measurements.allreduce
    assert len({row.size_bytes for row in rows}) == expected["rows"]
    assert {row.num_gpus for row in rows} == {expected["nranks"]}
    assert {row.in_graph for row in rows} == {False}
    for size, *times_us in (expected["first_row"], expected["last_row"]):
        assert [row.time_ms for row in rows if row.size_bytes == size] == pytest.approx([t / 1e3 for t in times_us])
    floor = expected.get("truth_latency_us", expected.get("truth_small_latency_us"))
    small = [row for row in rows if row.size_bytes <= 512]
    mean = sum(row.time_ms for row in small) / len(small)
    assert_inside(mean, small[0].sd_ms, 1, floor / 1e3)
    assert calibration.system.gpu == expected["gpu"]


def test_nccl_tests_json_keeps_tuning_variables_only():
    calibration, _ = read("nccl_all_reduce_2gpu.json")
    assert calibration.comm["ring"].env == EXPECTED["nccl_all_reduce_2gpu.json"]["env_NCCL"]
    rows = calibration.measurements.allreduce
    assert len({row.size_bytes for row in rows}) == EXPECTED["nccl_all_reduce_2gpu.json"]["rows"]
    assert_inside(rows[0].time_ms, rows[0].sd_ms, 1, EXPECTED["nccl_all_reduce_2gpu.json"]["truth_latency_us"] / 1e3)


def test_nccl_debug_log():
    calibration, _ = read("nccl_debug_info.log")
    expected = EXPECTED["nccl_debug_info.log"]
    facts = {str(row.value): row for row in calibration.evidence}
    assert f"NCCL {expected['nccl_version']}" in facts
    for name, value in expected["env"].items():
        assert facts[f"{name}={value}"].ranks == expected["nranks"]
    for size, algorithm, protocol, (low, high) in expected["tuning"]:
        assert f"AllReduce of {size} bytes: {algorithm} {protocol}, channels {low}-{high}" in facts
    assert any(key.startswith(f"{expected['coll_channels']} channels") for key in facts)


def test_profiles_name_the_allreduce_and_wait_for_a_shape():
    calibration, _ = read("nsys_cuda_gpu_kern_sum.csv")
    facts = {row.about: row for row in calibration.evidence}
    assert "cross_device_reduce" in facts["allreduce_implementation"].value
    assert "AllGather" in facts["nccl_setting"].value
    waiting, (reading,) = read("torch_trace_min.json")
    assert not waiting.measurements.verify
    assert any("--num-steps and --batch" in question for question in reading.questions)
    calibration, _ = read("torch_trace_min.json", shape=Shape(num_steps=3), batch=1)
    expected = EXPECTED["torch_trace_min.json"]
    (verify,), (draft,) = calibration.measurements.verify, calibration.measurements.draft
    assert verify.tokens == 4
    assert min(expected["verify_us"]) / 1e3 <= verify.time_ms <= max(expected["verify_us"]) / 1e3
    assert draft.time_ms == pytest.approx(1.503 + 0.480, abs=1e-6)
    assert calibration.system.gpu == expected["gpu"]
    assert calibration.system.num_gpus == expected["world_size"]


def test_profile_takes_its_shape_from_a_log_beside_it():
    calibration, _ = read("sglang_v0518_eagle3_tp8_clean.log", "torch_trace_min.json", batch=1)
    (verify,), (draft,) = calibration.measurements.verify, calibration.measurements.draft
    assert (verify.tokens, draft.num_steps) == (4, 3)
    assert calibration.system.gpu == "NVIDIA H200"


def test_golden_acceptance_lengths():
    calibration, _ = read("inferencex_golden.yaml")
    lengths = {(row.workload, row.num_steps): row.acceptance_length for row in calibration.acceptance}
    assert lengths["thinking_on", 3] == 2.86
    assert lengths["thinking_off", 4] == 3.01
    assert len(lengths) == 8
    model = calibration.model
    assert (model.target, model.draft, model.method) == ("example-70b-fp8", "Example-70B-EAGLE3", "eagle3")
    assert set(calibration.workloads) == {"thinking_on", "thinking_off"}
    assert any("dataset: coding" in caveat for caveat in calibration.provenance.caveats)


GOLDEN = {
    "no metadata": (
        "# Values provided by hand\n# key = num_speculative_tokens (DSpark level); value = golden AL\n",
        "parallel",
    ),
    "a lone length": ("# Native MTP head. coding, 80 successful requests.\n", "mtp"),
    "metadata of other kinds": ("_metadata:\n  draft-model: null\n  note: [1, 2]\n", None),
    "quoted keys": ("# (MTP level)\n", "mtp"),
}


@pytest.mark.parametrize("form", GOLDEN)
def test_forms_of_golden_acceptance_lengths(form, tmp_path):
    comments, method = GOLDEN[form]
    key = '"7"' if form == "quoted keys" else "7"
    path = tmp_path / "golden.yaml"
    path.write_text(f"{comments}qwen3.8-27b:\n  thinking_on:\n    {key}: 3.67\n")
    calibration, (reading,) = ingest([str(path)], Given(), "golden")
    (entry,) = calibration.acceptance
    assert (entry.workload, entry.num_steps, entry.acceptance_length) == ("thinking_on", 7, 3.67)
    assert (calibration.model.target, calibration.model.method) == ("qwen3.8-27b", method)
    path.write_text(f"{comments}qwen3.8-27b:\n  thinking_on:\n    7: 3.67\nother:\n  thinking_on:\n    1: 1.5\n")
    with pytest.raises(Exception, match="2 models in one file"):
        ingest([str(path)], Given(), "golden")
    path.write_text(f"{comments}qwen3.8-27b:\n  thinking_on:\n    7: 36.7\n    3: 2.5\n")
    calibration, (reading,) = ingest([str(path)], Given(), "golden")
    assert [e.num_steps for e in calibration.acceptance] == [3]
    assert reading.dropped["lengths that cannot be"] == 1


SAMPLES = sorted(path.name for path in DATA.iterdir() if path.name not in ("README.md", "expected.json"))


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_has_a_calibration_with_its_origin(name):
    calibration, readings = read(name)
    assert calibration.provenance.source.startswith(name)
    rows = [*calibration.measurements.cycles, *calibration.measurements.verify, *calibration.acceptance]
    assert all(row.note and name in row.note for row in rows)
    assert all(fact.source and name in fact.source for fact in calibration.evidence)
    assert all(reading.source == name for reading in readings)
