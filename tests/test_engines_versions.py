"""Logs of older and newer versions, written from a known truth: readers go by name and meaning, not by position."""

import json
import math
import random

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given, Shape
from specmodel.errors import CalibrationError

CYCLE_MS = {1: 9.0, 2: 9.3, 8: 11.0}
CURVE = (0.75, 0.55, 0.4)  # survival
LENGTH = 1 + sum(CURVE)
ARGS = (
    "server_args=ServerArgs(model_path='org/Example-8B', tp_size={tp}, dp_size={dp}, decode_log_interval=40, "
    "speculative_algorithm='EAGLE3', speculative_num_steps={k}, speculative_eagle_topk={topk}, "
    "speculative_num_draft_tokens={nd}, disable_cuda_graph=False)"
)


def read(tmp_path, text, name="server.log", **given):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return ingest([str(path)], Given(**given), "made")


def accepted(rng, rounds):
    """Accepted drafts of so many rounds, drawn from the curve."""
    draws = [rng.random() for _ in range(rounds)]
    return sum(sum(draw < survival for survival in CURVE) for draw in draws)


def sglang_lines(
    fields, *, dot="Decode batch, ", rate=None, prefix="[2026-05-01 10:00:00{dp}] ", dp=("",), seed=1, lines=14
):
    """Decode lines at each batch; `fields` writes one from its values."""
    rng = random.Random(seed)
    for batch, cycle in CYCLE_MS.items():
        for i in range(lines):
            for rank in dp:
                length = 1 + accepted(rng, 40 * batch) / (40 * batch)
                speed = 1e3 * batch * length / (cycle * rng.gauss(1, 0.003))
                values = {
                    "batch": batch,
                    "length": f"{length:.2f}",
                    "rate": f"{rate(round(length, 2)):.2f}" if rate else "",
                    "speed": f"{speed:.2f}",
                    "tokens": batch * (1000 + 40 * i),
                }
                yield prefix.format(dp=rank) + dot + fields.format(**values)


PLAIN = "#running-req: {batch}, #token: {tokens}, token usage: 0.01, "
LAYOUTS = {
    "0.4.3, a dot and largest-len": (
        "Decode batch. ",
        PLAIN + "accept len: {length}, gen throughput (token/s): {speed}, largest-len: 7, #queue-req: 0",
        None,
    ),
    "0.4.9, no rate": (
        "Decode batch. ",
        PLAIN + "accept len: {length}, cuda graph: True, gen throughput (token/s): {speed}, #queue-req: 0, ",
        None,
    ),
    "0.5.4, forward counter": (
        "Decode batch [1234], ",
        PLAIN + "accept len: {length}, accept rate: {rate}, cuda graph: True, "
        "gen throughput (token/s): {speed}, #queue-req: 3, ",
        lambda length: length / 4,
    ),
    "0.5.18, drafts only": (
        "Decode batch, ",
        PLAIN + "accept len: {length}, accept rate: {rate}, cuda graph: True, "
        "gen throughput (token/s): {speed}, #queue-req: 0",
        lambda length: (length - 1) / 3,
    ),
    "newer fields after and before": (
        "Decode batch, ",
        "new field: 7, gen throughput (token/s): {speed}, #running-req: {batch}, est. read BW: 1.2 TB/s, "
        "accept rate: {rate}, npu graph: True, accept len: {length}, #queue-req: 0, fwd occupancy: 97.1%",
        lambda length: (length - 1) / 3,
    ),
    "hybrid model": (
        "Decode batch, ",
        "#running-req: {batch}, #full token: {tokens}, full token usage: 0.01, #swa token: 12, swa token usage: 0.00, "
        "accept len: {length}, cuda graph: True, gen throughput (token/s): {speed}, #queue-req: 0",
        None,
    ),
    "disaggregated decode server": (
        "Decode batch, ",
        PLAIN + "accept len: {length}, pre-allocated usage: 0.00, #prealloc-req: 0, #transfer-req: 0, "
        "#retracted-req: 0, cuda graph: True, gen throughput (token/s): {speed}, #queue-req: 0",
        None,
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_sglang_layouts_of_every_version_give_the_same_truth(name, tmp_path):
    dot, fields, rate = LAYOUTS[name]
    head = "[2026-05-01 09:59:00] " + ARGS.format(tp=1, dp=1, k=3, topk=1, nd=4)
    text = "\n".join([head, *sglang_lines(fields, dot=dot, rate=rate)]) + "\n"
    calibration, _ = read(tmp_path, text)
    rows = {row.batch: row for row in calibration.measurements.cycles}
    assert set(rows) == set(CYCLE_MS)
    for batch, truth in CYCLE_MS.items():
        assert rows[batch].cycle_ms == pytest.approx(truth, rel=0.005)
        assert rows[batch].num_steps == 3
    (entry,) = calibration.acceptance
    assert abs(entry.acceptance_length - LENGTH) < 2.5 * entry.sd
    assert entry.drafts == 14 * 40 * sum(CYCLE_MS)


def test_sglang_lines_glued_coloured_prefixed_and_split_by_carriage_returns(tmp_path):
    _, fields, _ = LAYOUTS["0.4.9, no rate"]
    lines = list(sglang_lines(fields.rstrip(", "), dot="Decode batch. "))
    head = "[2026-05-01 09:59:00] " + ARGS.format(tp=1, dp=1, k=3, topk=1, nd=4)
    wrapped = []
    for i, line in enumerate(lines):
        dressed = [line, f"\x1b[32m{line}\x1b[0m", f"sglang-0  | {line}", f" 12%|#  | 3/64\r{line}"][i % 4]
        wrapped.append(dressed + ("" if i % 5 == 0 and i + 1 < len(lines) else "\r\n" if i % 7 == 0 else "\n"))
    plain, _ = read(tmp_path, "\n".join([head, *lines]) + "\n")
    dressed, _ = read(tmp_path, head + "\n" + "".join(wrapped))
    for one, other in zip(plain.measurements.cycles, dressed.measurements.cycles, strict=True):
        assert (one.batch, one.cycle_ms) == (other.batch, other.cycle_ms)
    assert plain.acceptance[0].acceptance_length == dressed.acceptance[0].acceptance_length


def test_sglang_data_parallel_ranks_count_once_each(tmp_path):
    _, fields, rate = LAYOUTS["0.5.18, drafts only"]
    ranks = (" DP0 TP0", " DP1 TP4")
    head = "[2026-05-01 09:59:00] " + ARGS.format(tp=8, dp=2, k=3, topk=1, nd=4)
    text = "\n".join([head, *sglang_lines(fields, rate=rate, dp=ranks)]) + "\n"
    calibration, (reading,) = read(tmp_path, text)
    rows = {row.batch: row for row in calibration.measurements.cycles}
    assert set(rows) == {2 * batch for batch in CYCLE_MS}
    assert rows[16].cycle_ms == pytest.approx(CYCLE_MS[8], rel=0.005)
    assert reading.dropped["not timed: first decode line"] == 2
    assert calibration.system.data_parallel == 2


def test_sglang_plain_decoding_has_no_length(tmp_path):
    rng = random.Random(3)
    lines = ["[2026-05-01 09:59:00] server_args=ServerArgs(model_path='m', tp_size=1, speculative_algorithm=None)"]
    for batch, cycle in CYCLE_MS.items():
        for _ in range(8):
            speed = 1e3 * batch / (cycle * rng.gauss(1, 0.002))
            lines.append(
                f"[2026-05-01 10:00:00] Decode batch, #running-req: {batch}, #token: 99, token usage: 0.01, "
                f"cuda graph: True, gen throughput (token/s): {speed:.2f}, #queue-req: 0"
            )
    calibration, _ = read(tmp_path, "\n".join(lines) + "\n")
    assert {row.num_steps for row in calibration.measurements.cycles} == {0}
    assert {row.batch: row.cycle_ms for row in calibration.measurements.cycles} == pytest.approx(CYCLE_MS, rel=0.005)
    assert not calibration.acceptance


def test_sglang_rate_that_fits_no_definition_is_refused_with_a_question(tmp_path):
    _, fields, _ = LAYOUTS["0.5.18, drafts only"]
    head = "[2026-05-01 09:59:00] " + ARGS.format(tp=1, dp=1, k=3, topk=1, nd=4)
    text = "\n".join([head, *sglang_lines(fields, rate=lambda length: length / 3)]) + "\n"
    calibration, (reading,) = read(tmp_path, text)
    assert any("by none of the definitions" in question for question in reading.questions)
    assert not calibration.measurements.cycles
    assert not calibration.acceptance


def test_sglang_without_arguments_asks_for_the_steps_it_found(tmp_path):
    _, fields, rate = LAYOUTS["0.5.18, drafts only"]
    text = "\n".join(sglang_lines(fields, rate=rate)) + "\n"
    calibration, (reading,) = read(tmp_path, text)
    assert not calibration.measurements.cycles
    (question,) = reading.questions
    assert "4 tokens a sequence" in question
    assert "--num-steps 3" in question
    calibration, _ = read(tmp_path, text, shape=Shape(num_steps=3))
    assert {row.num_steps for row in calibration.measurements.cycles} == {3}


def test_sglang_adaptive_steps_go_with_their_lines(tmp_path):
    line = (
        "[2026-05-01 10:00:00] Decode batch, #running-req: 4, #token: 99, token usage: 0.01, accept len: {length}, "
        "accept rate: 0.44, cuda graph: True, gen throughput (token/s): {speed}, #queue-req: 0"
    )
    text = ["[2026-05-01 09:59:00] " + ARGS.format(tp=1, dp=1, k=3, topk=1, nd=4)[:-1] + ", speculative_adaptive=True)"]
    for steps, length, cycle in ((3, 2.4, 10.0), (1, 1.7, 8.0), (3, 2.4, 10.0)):
        text.append(
            f"[2026-05-01 10:00:00] Switch adaptive runtime state: steps 9 -> {steps}, draft_tokens 9 -> {steps + 1}"
        )
        text += [line.format(length=length, speed=4e3 * length / cycle)] * 6
    calibration, (reading,) = read(tmp_path, "\n".join(text) + "\n")
    rows = {row.num_steps: row for row in calibration.measurements.cycles}
    assert {steps: row.cycle_ms for steps, row in rows.items()} == pytest.approx({3: 10.0, 1: 8.0}, rel=1e-4)
    assert {row.num_steps: row.acceptance_length for row in calibration.acceptance} == {3: 2.4, 1: 1.7}
    assert reading.dropped["not timed: the step count changed"] == 2


def test_sglang_two_servers_of_different_size_in_one_log_are_a_question(tmp_path):
    _, fields, rate = LAYOUTS["0.5.18, drafts only"]
    parts = []
    for tp in (4, 8):
        parts += [
            "[2026-05-01 09:59:00] " + ARGS.format(tp=tp, dp=1, k=3, topk=1, nd=4),
            *sglang_lines(fields, rate=rate),
        ]
    with pytest.raises(CalibrationError, match="another server starts here"):
        read(tmp_path, "\n".join(parts) + "\n")


def test_sglang_generate_histogram_is_the_curve(tmp_path):
    replies = [
        {"text": "x", "meta_info": {"spec_verify_ct": 10, key: [2, 3, 1, 4], "spec_num_proposed_drafts": 30}}
        for key in ("spec_accept_histogram", "spec_correct_drafts_histogram")
    ]
    calibration, _ = read(tmp_path, json.dumps(replies), "replies.json")
    (entry,) = calibration.acceptance
    assert (entry.num_steps, entry.drafts, entry.prompts) == (3, 20, 2)
    assert entry.accepted_per_position == (16, 10, 8)


def test_sglang_decode_moments(tmp_path):
    sizes, times = [4] * 50 + [8] * 50, [10_000.0] * 50 + [11_000.0] * 50
    moments = [100, sum(sizes), sum(times), sum(b * b for b in sizes), 0, round(2.5 * sum(sizes))]
    document = {"accelerator": "NVIDIA H200", "num_accelerators": 8, "loads": [{"decode_moments": moments}]}
    calibration, _ = read(tmp_path, json.dumps(document), "loads.json", shape=Shape(num_steps=3))
    (row,), (entry,) = calibration.measurements.cycles, calibration.acceptance
    assert (row.batch, row.cycle_ms, entry.acceptance_length) == (6, 10.5, 2.5)
    assert (calibration.system.gpu, calibration.system.num_gpus) == ("NVIDIA H200", 8)


def vllm_scrape(drafts, per_position, iterations, seconds, start=1.0):
    lines = ["# TYPE vllm:spec_decode_num_drafts_total counter", f"process_start_time_seconds {start}"]
    label = '{engine="0",model_name="org/Example-8B"}'
    lines += [
        f"vllm:spec_decode_num_drafts_total{label} {drafts}",
        f"vllm:spec_decode_num_drafts_created{label} 1.7e9",
        f"vllm:spec_decode_num_draft_tokens_total{label} {3 * drafts}",
        f"vllm:spec_decode_num_accepted_tokens_total{label} {sum(per_position)}",
        f"vllm:iteration_tokens_total_count{label} {iterations}",
        f"vllm:inter_token_latency_seconds_count{label} {drafts}",
        f"vllm:inter_token_latency_seconds_sum{label} {seconds * drafts / iterations}",
        f"vllm:generation_tokens_total{label} {drafts + sum(per_position)}",
    ]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{engine="0",position="{i}"}} {count}' for i, count in enumerate(per_position)]
    return "\n".join(lines) + "\n"


def test_vllm_scrapes_of_one_process_count_by_their_difference(tmp_path):
    before, after = tmp_path / "before.prom", tmp_path / "after.prom"
    before.write_text(vllm_scrape(1000, [500, 300, 100], 1000, 9.0))
    after.write_text(vllm_scrape(9000, [6500, 4300, 2500], 2000, 21.0))
    for pair in ([before, after], [after, before]):
        calibration, readings = ingest([str(path) for path in pair], Given(), "pair")
        assert len(readings) == 1
        (entry,), (cycle,) = calibration.acceptance, calibration.measurements.cycles
        assert (entry.drafts, entry.accepted_per_position) == (8000, (6000, 4000, 2400))
        assert (cycle.batch, cycle.num_steps) == (8, 3)
        assert cycle.cycle_ms == pytest.approx(1e3 * (9000 * 21 / 2000 - 9) / 8000)
    other = tmp_path / "other.prom"
    other.write_text(vllm_scrape(9000, [6500, 4300, 2500], 2000, 21.0, start=2.0))
    _, readings = ingest([str(before), str(other)], Given(), "apart")
    assert len(readings) == 2


def test_vllm_intervals_without_iteration_lines(tmp_path):
    lines = []
    for running, drafts in ((8, 6838), (8, 6838), (8, 6840), (1, 990), (1, 3911), (1, 990), (1, 991)):
        accepted_tokens = round(1.6 * drafts)
        rates = ", ".join(f"{r:.3f}" for r in (0.75, 0.5, 0.35))
        lines.append(
            f"INFO 08-18 10:00:00 [loggers.py:1] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation "
            f"throughput: {(drafts + accepted_tokens) / 10:.1f} tokens/s, Running: {running} reqs, Waiting: 0 reqs"
        )
        lines.append(
            f"INFO 08-18 10:00:00 [metrics.py:1] SpecDecoding metrics: Mean acceptance length: 2.60, Accepted "
            f"throughput: {accepted_tokens / 10:.2f} tokens/s, Drafted throughput: {3 * drafts / 10:.2f} tokens/s, "
            f"Accepted: {accepted_tokens} tokens, Drafted: {3 * drafts} tokens, Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: 53.3%"
        )
    calibration, (reading,) = read(tmp_path, "\n".join(lines) + "\n")
    rows = {row.batch: row for row in calibration.measurements.cycles}
    assert rows[8].cycle_ms == pytest.approx(8e4 / 6838, rel=1e-3)
    assert rows[1].cycle_ms == pytest.approx(1e4 / 990, rel=2e-3)  # the mixed interval says 2.6 ms
    assert reading.dropped["far from the median of its batch"] == 1


def test_vllm_synthetic_acceptance_is_not_taken_for_real(tmp_path):
    config = (
        "INFO 08-18 10:02:11 [utils.py:1] non-default args: {'model': 'm', 'speculative_config': {'method': 'eagle3', "
        "'num_speculative_tokens': 3, 'rejection_sample_method': 'synthetic', 'synthetic_acceptance_length': 2.5}}"
    )
    line = (
        "INFO 08-18 10:02:21 [metrics.py:1] SpecDecoding metrics: Mean acceptance length: 2.50, Accepted: 900 tokens, "
        "Drafted: 1800 tokens, Per-position acceptance rate: 1.000, 0.500, 0.000"
    )
    iteration = (
        "INFO Iteration(5): 0 context requests, 0 context tokens, 2 generation requests, 8 generation tokens, "
        "iteration elapsed time: 9.5 ms"
    )
    calibration, (reading,) = read(tmp_path, "\n".join([config, line, *[iteration] * 4]) + "\n")
    assert not calibration.acceptance
    assert reading.dropped["synthetic acceptance: it was set, not measured"] == 1
    assert calibration.measurements.cycles[0].cycle_ms == 9.5


LLAMA_DRAFTS = {
    "before mid-2026": "draft acceptance rate = 0.57000 (  171 accepted /   300 generated)",
    "PR 24536": "draft acceptance = 0.57000 (  171 accepted /   300 generated), mean acceptance length =  2.71, "
    "acceptance rate per position = (0.810, 0.560, 0.340)",
    "b10472": "draft acceptance = 0.57000 (  171 accepted /   300 generated), mean len =  2.71",
}


@pytest.mark.parametrize("version", LLAMA_DRAFTS)
def test_llamacpp_versions(version, tmp_path):
    task = "slot print_timing: id  0 | task 0 | "
    text = (
        f"{task}\nprompt eval time =     210.44 ms /   512 tokens (    0.41 ms per token,  2433.00 tokens per second)\n"
        f"       eval time =    3000.00 ms /   272 tokens (   11.03 ms per token,    90.67 tokens per second)\n"
        f"      total time =    3210.44 ms /   784 tokens\n{task}{LLAMA_DRAFTS[version]}\n"
    )
    calibration, _ = read(tmp_path, text)
    (row,), (entry,) = calibration.measurements.cycles, calibration.acceptance
    assert (row.num_steps, row.cycle_ms, entry.drafts) == (3, 30.0, 100)
    if version == "PR 24536":
        assert entry.accepted_per_position == (81, 56, 34)
    else:
        assert entry.acceptance_length == pytest.approx(2.71)


def test_llamacpp_slots_that_share_the_machine_are_not_timed(tmp_path):
    lines = [f"slot launch_slot_: id  {task} | task {task} | processing task" for task in (0, 1)]
    for task in (0, 1):
        head = f"slot print_timing: id  {task} | task {task} | "
        lines.append(f"{head}prompt eval time =     10.00 ms /   10 tokens (")
        lines.append(f"{head}       eval time =    3000.00 ms /   272 tokens (")
        lines.append(f"{head}{LLAMA_DRAFTS['b10472']}")
    calibration, (reading,) = read(tmp_path, "\n".join(lines) + "\n")
    assert not calibration.measurements.cycles
    assert reading.dropped["not timed: several slots were busy"] == 2
    assert calibration.acceptance


def nccl_row(size, us, factor, tail="", root="-1 "):
    gigabytes = size / us / 1e3
    side = f"{us:8.2f} {gigabytes:7.2f} {gigabytes * factor:7.2f} 0 {tail}"
    return f"{size:12d} {size // 2:10d} half sum {root}{side}{side}"


@pytest.mark.parametrize(
    ("tail", "end", "root"),
    [("", "", "-1 "), ("8.1 9.9 9.5 2.1 ", "", "-1 "), ("", "2026-08-18 09:00:00", "-1 "), ("", "", "")],
    ids=["2.16", "with latency statistics", "with a time stamp", "oldest, no root"],
)
def test_nccl_tests_layouts(tail, end, root, tmp_path):
    ranks = "\n".join(f"#  Rank  {r} Group  0 Pid  {r} on host device  {r} [0x18] NVIDIA H100" for r in range(4))
    rows = [nccl_row(2**i, 10.0 * 1.5 ** max(i - 20, 0), 1.5, tail, root) + end for i in range(10, 26)]
    text = f"# nThread 1 nGpus 4 iters: 20 graph: 20\n{ranks}\n" + "\n".join(rows) + "\n"
    calibration, _ = read(tmp_path, text, "nccl.txt")
    table = calibration.measurements.allreduce
    assert len(table) == 32
    assert {(row.num_gpus, row.in_graph) for row in table} == {(4, True)}
    assert table[0].time_ms == 0.01


@pytest.mark.parametrize("factor", [0.75, 1.0])
def test_nccl_tests_of_other_collectives_are_left_out(factor, tmp_path):
    ranks = "\n".join(f"#  Rank  {r} Group  0 Pid  {r} on host device  {r} [0x18] NVIDIA H100" for r in range(4))
    rows = [nccl_row(2**i, 10.0 * 1.5 ** max(i - 20, 0), factor) for i in range(10, 28)]
    with pytest.raises(CalibrationError, match="not those of an all-reduce"):
        read(tmp_path, f"# nThread 1 nGpus 4\n{ranks}\n" + "\n".join(rows) + "\n", "nccl.txt")


def test_nsys_spans_projected_to_the_gpu(tmp_path):
    text = (
        "Processing [r.sqlite] with [nvtx_gpu_proj_sum.py]...\n\n"
        "Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns),Proj Med (ns),"
        "Proj Min (ns),Proj Max (ns),Proj StdDev (ns),Total GPU Ops,Avg GPU Ops\n"
        ":verify,PushPop,69000000,1000000,10,6900000.0,6890000.0,6800000,7000000,50000.0,1000,100.0\n"
        ":draft,PushPop,15000000,1000000,10,1500000.0,1505000.0,1400000,1600000,20000.0,500,50.0\n"
    )
    calibration, _ = read(tmp_path, text, "nsys.csv", shape=Shape(num_steps=3), batch=2)
    (verify,), (draft,) = calibration.measurements.verify, calibration.measurements.draft
    assert (verify.tokens, verify.time_ms) == (8, 6.89)
    assert (draft.num_steps, draft.time_ms) == (3, 1.505)


def test_trtllm_prometheus_by_position(tmp_path):
    lines = ['trtllm_model_config_info{model="org/Example",gpu_type="NVIDIA H200"} 1']
    lines += ['trtllm_speculative_config_info{spec_method="Eagle3",spec_num_tokens="3"} 1']
    for i, (drafted, hits) in enumerate(((1000, 700), (1000, 500), (800, 300))):
        lines.append(f'trtllm_spec_decode_drafted_tokens_total{{token_position="{i}"}} {drafted}')
        lines.append(f'trtllm_spec_decode_accepted_tokens_total{{token_position="{i}"}} {hits}')
    calibration, _ = read(tmp_path, "\n".join(lines) + "\n", "trt.prom")
    (entry,) = calibration.acceptance
    assert (entry.drafts, entry.accepted_per_position) == (1000, (700, 500, 300))
    assert entry.drafted_per_position == (1000, 1000, 800)
    assert calibration.system.gpu == "NVIDIA H200"


def test_intervals_cover_the_truth_over_many_logs(tmp_path):
    """90 % intervals of cycle times and acceptance lengths hold the truth at least that often, over seeds."""
    _, fields, rate = LAYOUTS["0.5.18, drafts only"]
    head = "[2026-05-01 09:59:00] " + ARGS.format(tp=1, dp=1, k=3, topk=1, nd=4)
    inside = total = 0
    for seed in range(25):
        text = "\n".join([head, *sglang_lines(fields, rate=rate, seed=seed, lines=5)]) + "\n"
        calibration, _ = read(tmp_path, text)
        for row in calibration.measurements.cycles:
            inside += abs(row.cycle_ms - CYCLE_MS[row.batch]) <= 1.645 * row.sd_cycle_ms / math.sqrt(row.samples)
            total += 1
        (entry,) = calibration.acceptance
        inside += abs(entry.acceptance_length - LENGTH) <= 1.645 * entry.sd
        total += 1
    assert inside / total >= 0.9
