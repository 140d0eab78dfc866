"""Logs of one truth in many spellings: other prefixes, orders, names, units and damage; each says the truth or nothing.

Three draft steps, each accepted with 0.7; 11 ms a cycle at batch 4, 12 ms at batch 8.
"""

import json
import random
import re
from pathlib import Path

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given, Shape
from specmodel.errors import CalibrationError

DATA = Path(__file__).parent / "data" / "engines"
CYCLES = {4: 11.0, 8: 12.0}
CURVE = (0.7, 0.49, 0.343)
LENGTH = 1 + sum(CURVE)
ARGS = (
    "server_args=ServerArgs(model_path='/models/M', tp_size=1, speculative_algorithm='EAGLE3', "
    "speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4, api_key='sk-planted')"
)
DICT = {"tp_size": 1, "speculative_algorithm": "EAGLE3", "speculative_num_steps": 3, "speculative_eagle_topk": 1}
DICT |= {"speculative_num_draft_tokens": 4}
NAMED = (
    "Decode batch, #running-req: {b}, #token: {t}, token usage: 0.10, accept len: {l:.2f}, accept rate: {r:.2f}, "
    "cuda graph: True, gen throughput (token/s): {s:.2f}, #queue-req: 0"
)
LINES = {
    "0.4.3": "Decode batch. #running-req: {b}, #token: {t}, token usage: 0.10, accept len: {l:.2f}, "
    "gen throughput (token/s): {s:.2f}, largest-len: 0, #queue-req: 0",
    "0.4.10": "Decode batch. #running-req: {b}, #token: {t}, token usage: 0.10, accept len: {l:.2f}, cuda graph: True, "
    "gen throughput (token/s): {s:.2f}, #queue-req: 0, ",
    "iteration": NAMED.replace("batch,", "batch [40],"),
    "hybrid": NAMED.replace("#token: {t}, token usage", "#full token: {t}, #swa token: 9, mamba num: 3, mamba usage"),
    "disaggregated": NAMED.replace(", cuda", ", pre-allocated usage: 0.01, #prealloc-req: 0, #transfer-req: 0, cuda")
    + ", est. decode TFLOPS/s (per GPU): 3.11, est. read BW (GB/s): 99.2",
    "another device": NAMED.replace("cuda graph", "npu graph"),
    "another order, a count last": "Decode batch, #running-req: {b}, #queue-req: 0, accept len: {l:.2f}, new: 3, "
    "gen throughput (token/s): {s:.2f}, cuda graph: True, #token: {t}",
    "another order, a speed last": "Decode batch, #queue-req: 0, #token: {t}, cuda graph: True, accept len: {l:.2f}, "
    "#running-req: {b}, gen throughput (token/s): {s:.2f}",
    "percent": NAMED.replace("{r:.2f}", "{p:.1f}%"),
    "renamed": NAMED.replace("#running-req", "#running_reqs").replace("accept len", "accept length")
    .replace("(token/s)", "(tok/s)").replace("#queue-req", "#queue-reqs").replace("#token", "#tokens"),
    "colour in values": NAMED.replace("{l:.2f}", "\x1b[33m{l:.2f}\x1b[0m").replace("True", "\x1b[32mTrue\x1b[0m"),
}  # fmt: skip
PREFIXES = {
    "kubernetes": "2026-08-19T09:15:01.123456789Z stderr F [node-0] [2026-08-19 09:15:01] ",
    "ray": "\x1b[36m(SGLangActor pid=123, ip=10.0.0.3)\x1b[0m [2026-08-19 09:15:01 TP0] ",
    "level": "[2026-08-19 09:15:01,123] INFO scheduler.py:222: ",
    "syslog": "Aug 19 09:15:01 host python[123]: [2026-08-19 09:15:01] ",
    "compose": "sglang-1  | [2026-08-19 09:15:01.123 DP0 PP0 TP0 EP0] ",
}


def decode_lines(line=NAMED, batches=(4, 8), count=8):
    rng = random.Random(5)
    for batch in batches:
        for _ in range(count):
            length = round(LENGTH + rng.gauss(0, 0.05), 2)
            speed = batch * length / (CYCLES[batch] * (1 + rng.gauss(0, 0.002))) * 1e3
            rate = (length - 1) / 3
            yield line.format(b=batch, t=1000 * batch, l=length, r=rate, p=100 * rate, s=speed)


def prefixed(lines, prefix="[2026-08-19 09:15:01 TP0] "):
    return "".join(f"{prefix}{line}\n" for line in lines)


def read(tmp_path, text, **given):
    path = tmp_path / "x.log"
    path.write_text(text, newline="")
    calibration, (reading,) = ingest([str(path)], Given(**given), "x")
    assert "planted" not in str(calibration)
    return calibration, reading


def check(calibration, lengths=True):
    assert {row.num_steps for row in calibration.measurements.cycles} == {3}
    assert {row.batch: row.cycle_ms for row in calibration.measurements.cycles} == pytest.approx(CYCLES, rel=0.006)
    found = [
        e.acceptance_length or 1 + sum(e.accepted_per_position) / e.drafts
        for e in calibration.acceptance
        if e.num_steps == 3
    ]
    assert found == ([pytest.approx(LENGTH, abs=0.05)] if lengths else [])


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_decode_lines_of_sglang(line, tmp_path):
    check(read(tmp_path, prefixed([ARGS, *decode_lines(line)]))[0])


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_prefixes_and_ends_of_lines(prefix, end, tmp_path):
    check(read(tmp_path, prefixed([ARGS, *decode_lines()], prefix).replace("\n", end))[0])


@pytest.mark.parametrize("args", [f"server_args={json.dumps(DICT)}", f"server_args={DICT}", "server_args: lost"])
def test_server_arguments_in_other_forms_or_none(args, tmp_path):
    given = {"shape": Shape(num_steps=3)} if "lost" in args else {}
    check(read(tmp_path, prefixed([args, *decode_lines()]), **given)[0])


@pytest.mark.parametrize("name", LINES)
def test_a_decode_line_cut_anywhere_is_dropped_or_whole(name, tmp_path):
    lines = list(decode_lines(LINES[name]))
    # A cut line is one that another follows, or the end of the log; the newline may be there or not.
    for cut in range(20, len(lines[2]), 7):
        middle = [*lines[:2], lines[2][:cut], *lines[3:]]
        check(read(tmp_path, prefixed([ARGS, *middle]))[0])
        check(read(tmp_path, prefixed([ARGS, *lines]) + prefixed([lines[3][:cut]])[:-1])[0])


def test_ranks_interleave_by_data_and_repeat_by_pipeline(tmp_path):
    lines = list(decode_lines(batches=(4,), count=12))
    args = ARGS.replace("tp_size=1", "tp_size=8, dp_size=2")
    data = "".join(
        prefixed([line], f"[2026-08-19 09:15:01 DP{rank} TP{4 * rank}] ") for line in lines for rank in (0, 1)
    )
    calibration, _ = read(tmp_path, prefixed([args]) + data)
    (row,) = calibration.measurements.cycles
    assert (row.batch, row.cycle_ms) == (8, pytest.approx(11, rel=0.006))
    stages = "".join(
        prefixed([line], f"[2026-08-19 09:15:01 PP{stage} TP0] ") for line in decode_lines() for stage in (0, 1)
    )
    check(read(tmp_path, prefixed([ARGS]) + stages)[0])


VLLM = (
    "INFO 08-18 10:02:11 [core.py:60] Initializing a V1 LLM engine (v0.11.0) with config: model='/m/M', "
    "speculative_config=SpeculativeConfig(method='eagle3', model='/m/D', num_spec_tokens=3), tensor_parallel_size=1\n"
)
METRICS = {
    "fractions": ("{:.3f}", 1, "Per-position acceptance rate: {}, Avg Draft acceptance rate: 50.0%"),
    "percent": ("{:.1f}%", 100, "Per-position acceptance rate: {}"),
    "percent without a sign": ("{:.1f}", 100, "Per-position acceptance rate: {}"),
    "brackets": ("{:.3f}", 1, "Per-position acceptance rate: [{}], Avg Draft acceptance rate: 50.0%"),
}


@pytest.mark.parametrize("form", METRICS.values(), ids=METRICS)
@pytest.mark.parametrize("bonus", [1, 0])
@pytest.mark.parametrize(
    "prefix",
    [
        "(APIServer pid=1) INFO 08-18 10:02:21 [loggers.py:127] ",
        "\x1b[36m(x pid=1)\x1b[0m INFO 2026-08-18 10:02:21 [v1/x.py:1] ",
    ],
)
def test_metrics_of_vllm(form, bonus, prefix, tmp_path):
    rate, scale, words = form
    lines, rng = [], random.Random(3)
    for batch, cycle_ms in CYCLES.items():
        for _ in range(8):
            drafts = round(1e4 / cycle_ms) * batch
            counts = [round(drafts * p) + rng.randint(-9, 9) for p in CURVE]
            printed = ", ".join(rate.format(scale * n / drafts) for n in counts)
            lines.append(
                "Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
                f"{(drafts + sum(counts)) / 10:.1f} tokens/s, Running: {batch} reqs, Waiting: 0 reqs"
            )
            lines.append(
                f"SpecDecoding metrics: Mean acceptance length: {bonus + sum(counts) / drafts:.2f}, "
                f"Accepted: {sum(counts)} tokens, Drafted: {3 * drafts} tokens, {words.format(printed)}"
            )
    check(read(tmp_path, VLLM + prefixed(lines, prefix))[0])


ITERATIONS = (
    "0 context requests, 0 context tokens, {b} generation requests, {n} generation tokens, "
    "iteration elapsed time: {t:.2f} ms",
    "0 context requests, 0 context tokens, {b} generation requests, {n} generation tokens, 0 inputs, "
    "iteration elapsed time: {t:.2f} ms",
    "iteration elapsed time: {t:.2f} ms, {n} generation tokens, {b} generation requests, 0 context requests",
    "0 context requests, 0 context tokens, {b} generation requests, {n} generation tokens, elapsed time: {s:.5f} s",
)


@pytest.mark.parametrize("words", ITERATIONS)
def test_iterations_of_vllm(words, tmp_path):
    lines = [
        f"Iteration({i}): " + words.format(b=b, n=4 * b, t=t + 0.01 * (i % 3 - 1), s=t / 1e3)
        for b, t in CYCLES.items()
        for i in range(9)
    ]
    check(read(tmp_path, VLLM + prefixed(lines, "INFO 08-18 10:02:21 [loggers.py:127] "))[0], lengths=False)


@pytest.mark.parametrize(("unit", "scale"), [("ms", 1), (" ms", 1), ("s", 1e-3), (" us", 1e3)])
def test_units_of_tensorrt_llm(unit, scale, tmp_path):
    lines, number, before = [], 0, 11.0
    for batch, cycle_ms in CYCLES.items():
        for i in range(9):
            number += 1
            lines.append(
                f"iter = {number}, global_rank = 0, host_step_time = {scale * 14:.7f}{unit}, "
                f"prev_device_step_time = {scale * before:.7f}{unit}, num_scheduled_requests = {batch}, "
                f"states = {{'num_ctx_requests': 0, 'num_ctx_tokens': 0, 'num_generation_tokens': {4 * batch}}}"
            )
            before = cycle_ms * (1 + 0.001 * (i % 3 - 1))
    check(read(tmp_path, prefixed(lines, "[05/20/2026-14:03:07] [TRT-LLM] [I] [RANK 0] "))[0], lengths=False)


LLAMA = (DATA / "llamacpp_server_new.log").read_text()


@pytest.mark.parametrize(
    ("pattern", "by"),
    [
        (r"(?m)^", "Aug 19 09:15:01 box llama-server[12]: "),
        (r"(?<=\d) tokens(?= \( )", "  runs"),
        (r" \(\s+[\d.]+ ms per token[^)]*\)", ""),
        (r"(?<=eval time = ) *([\d.]+) ms", lambda found: f"{float(found[1]) / 1e3:.5f} s"),
        (r"(?<=draft acceptance = )(0\.\d+)", lambda found: f"{100 * float(found[1]):.3f}%"),
        (r"id  ", "id "),
    ],
)
def test_lines_of_llamacpp(pattern, by, tmp_path):
    rows = read(tmp_path, LLAMA)[0].measurements.cycles
    assert read(tmp_path, re.sub(pattern, by, LLAMA))[0].measurements.cycles[0].cycle_ms == rows[0].cycle_ms
    again = read(tmp_path, re.sub(pattern, by, LLAMA))[0].measurements.cycles
    assert [(row.num_steps, row.cycle_ms) for row in again] == [(row.num_steps, row.cycle_ms) for row in rows]


def test_a_request_whose_draft_line_is_damaged_or_missing_is_not_plain_decoding(tmp_path):
    start, _, rest = LLAMA.partition("draft acceptance = 0.63636")
    for text in (start + "draft acceptance = ?" + rest, start + "draft acceptance = 0.6"):
        try:
            calibration, _ = read(tmp_path, text)
        except CalibrationError:
            continue
        plain = [row.cycle_ms for row in calibration.measurements.cycles if not row.num_steps]
        assert plain in ([], [pytest.approx(22.974, rel=1e-3)])
    first = LLAMA.partition("id  1 | task 91")[0]
    again = first.replace("task 0", "task 7").partition("draft acceptance")[0]
    calibration, reading = read(tmp_path, first + again)
    assert [row.num_steps for row in calibration.measurements.cycles] == [3]
    assert reading.dropped["the last request, of which the log ends before it says whether it drafted"] == 1


def test_names_of_metrics_without_colons(tmp_path):
    text = (DATA / "sglang_v0518_metrics.prom").read_text()
    with_colons, without = (read(tmp_path, t)[0] for t in (text, text.replace("sglang:", "sglang_")))
    assert without.acceptance == with_colons.acceptance
    assert len(without.measurements.verify) == len(with_colons.measurements.verify) > 0


def test_step_times_in_another_unit_than_the_throughput_beside_them(tmp_path):
    document = json.loads((DATA / "sglang_v0518_server_info.json").read_text())
    for state in document["internal_states"]:
        state["step_time_dict"] = {k: [1e3 * t for t in times] for k, times in state["step_time_dict"].items()}
    calibration, reading = read(tmp_path, json.dumps(document))
    assert not calibration.measurements.cycles
    assert "in seconds" in reading.questions[0]
