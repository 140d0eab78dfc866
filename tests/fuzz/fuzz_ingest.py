"""Mutated engine outputs against the readers: no crash, no hang, nothing accepted that breaks an invariant.

    python tests/fuzz/fuzz_ingest.py                       a short run over every format
    python tests/fuzz/fuzz_ingest.py --count 100000        the bounded run; one process takes some hours
    python tests/fuzz/fuzz_ingest.py --formats sglang-log,vllm-log --seed 7 --count 1000

The seed decides everything. A failure prints format, number and seed, and is saved beside `--save`.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import re
import sys
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from specmodel.calibration import Calibration
from specmodel.engines import stream
from specmodel.engines.ingest import read_opened
from specmodel.engines.merge import calibration_of
from specmodel.engines.reading import Given, Shape
from specmodel.errors import CalibrationError
from specmodel.io import from_dict, to_dict

DATA = Path(__file__).parents[1] / "data" / "engines"
SEED = 20260501
SLOW_MS = 1000.0
GIVEN = Given(shape=Shape(num_steps=3), batch=1)
FORMATS = {
    "sglang-log": "sglang_v0518_eagle3_tp8_clean.log",
    "sglang-log-tree": "sglang_v0510_eagle3_tree_tp8_noisy_truncated.log",
    "sglang-server-info": "sglang_v0518_server_info.json",
    "sglang-metrics": "sglang_v0518_metrics.prom",
    "sglang-bench-speculative": "sglang_bench_speculative.jsonl",
    "sglang-bench-one-batch": "sglang_bench_one_batch_server.jsonl",
    "sglang-bench-serving": "sglang_bench_serving.jsonl",
    "sglang-dspark-flat": "sglang_dspark_sps_flat.json",
    "sglang-dspark-additive": "sglang_dspark_sps_additive.json",
    "sglang-dspark-records": "sglang_dspark_sps.records.jsonl",
    "sglang-schedule": "sglang_adaptive_static_schedule.json",
    "vllm-log": "vllm_v1_eagle3.log",
    "vllm-log-variants": "vllm_log_variants.txt",
    "vllm-bench": "vllm_bench_serve.json",
    "vllm-offline": "vllm_spec_decode_offline.txt",
    "trtllm-log": "trtllm_iter.log",
    "trtllm-metrics": "trtllm_metrics.json",
    "trtllm-bench": "trtllm_bench_report.json",
    "trtllm-yaml": "trtllm_config_eagle3.yaml",
    "llamacpp-log": "llamacpp_server_new.log",
    "llamacpp-simple": "llamacpp_speculative_simple.txt",
    "llamacpp-timings": "llamacpp_timings.json",
    "llamacpp-metrics": "llamacpp_metrics.prom",
    "nccl-table": "nccl_all_reduce_8gpu.txt",
    "nccl-table-old": "nccl_all_reduce_2gpu.txt",
    "nccl-json": "nccl_all_reduce_2gpu.json",
    "nccl-debug": "nccl_debug_info.log",
    "nsys": "nsys_cuda_gpu_kern_sum.csv",
    "torch": "torch_trace_min.json",
    "inferencex": "inferencex_golden.yaml",
}
SHORT = {
    "sglang-log": ((b"server_args", 1), (b"apture", 6), (b"nccl==", 1), (b"Prefill", 1), (b"Decode", 9)),
    "sglang-log-tree": ((b"server_args", 1), (b"apture", 6), (b"NCCL", 1), (b"Prefill", 1), (b"Decode", 9)),
    "vllm-log": (
        (b"non-default", 1),
        (b"Initializing", 1),
        (b"apturing", 3),
        (b"Iteration(", 6),
        (b"metrics.py", 3),
        (b"loggers.py", 3),
    ),
    "trtllm-log": ((b"iter = ", 9),),
    "nccl-table": ((b"#", 20), (b"half", 12)),
    "nccl-table-old": ((b"#", 20), (b"half", 12)),
    "nccl-debug": (
        (b"NCCL version", 1),
        (b"set by", 3),
        (b"via", 1),
        (b"coll channels", 1),
        (b"COMPLETE", 2),
        (b"Bytes", 6),
    ),
}
WORDS = {
    "sglang-generate": json.dumps(
        [
            {
                "text": "x",
                "meta_info": {"spec_verify_ct": 10, "spec_accept_histogram": [2, 3, 1, 4], "e2e_latency": 1.5},
            },
            {"text": "y", "meta_info": {"spec_verify_ct": 7, "spec_accept_histogram": [1, 2, 2, 2]}},
        ]
    ),
    "sglang-loads": json.dumps(
        {
            "accelerator": "H200",
            "loads": [{"decode_moments": [100, 600, 1.05e6, 4000, 6.4e6, 1500]}],
            "speculative_x": 1,
        }
    ),
    "vllm-metrics": "".join(
        f'vllm:{name}{{engine="0",model_name="m"}} {value}\n'
        for name, value in (
            ("spec_decode_num_drafts_total", 1000),
            ("spec_decode_num_draft_tokens_total", 3000),
            ("spec_decode_num_accepted_tokens_total", 1600),
            ("iteration_tokens_total_count", 500),
            ("inter_token_latency_seconds_count", 1000),
            ("inter_token_latency_seconds_sum", 11.0),
            ("generation_tokens_total", 2610),
        )
    )
    + "".join(
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{i}"}} {n}\n'
        for i, n in enumerate((750, 500, 350))
    ),
    "trtllm-prometheus": "".join(
        f'trtllm_spec_decode_{kind}_tokens_total{{token_position="{i}"}} {n}\n'
        for i in range(3)
        for kind, n in (("drafted", 1000), ("accepted", 700 - 200 * i))
    ),
    "llamacpp-bench": json.dumps(
        [
            {
                "build_number": 5163,
                "model_filename": "m.gguf",
                "n_batch": 512,
                "n_threads": 8,
                "test_time": "2025-04-24",
            }
            | {"n_prompt": prompt, "n_gen": generated, "n_depth": depth, "avg_ns": ns, "stddev_ns": ns // 99}
            | {"avg_ts": (prompt or generated) * 1e9 / ns, "stddev_ts": 0.5, "samples_ns": [ns, ns + 9, ns - 9]}
            for prompt, generated, depth, ns in ((512, 0, 0, 10**8), (0, 128, 0, 10**9), (0, 128, 4096, 1200000000))
        ]
    ),
    "llamacpp-bench-table": "| model | size | params | backend | ngl | test | t/s |\n"
    "| --- | ---: | ---: | --- | --: | ---: | --: |\n"
    "| q 7B Q4_K | 4.36 GiB | 7.62 B | CUDA | 99 | pp512 | 7111.11 ± 35.10 |\n"
    "| q 7B Q4_K | 4.36 GiB | 7.62 B | CUDA | 99 | tg128 | 100.00 ± 0.50 |\n"
    "| q 7B Q4_K | 4.36 GiB | 7.62 B | CUDA | 99 | tg128 @ d4096 | 83.33 ± 0.42 |\n\nbuild: 8cf427ff (5163)\n",
    "sglang-log-pasted": "[2026-08-19 09:15:57] server_args=ServerArgs(tp_size=1, speculative_algorithm='EAGLE3', "
    "speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)\n"
    + "[2026-08-19 09:15:58] Decode batch, #running-req: 1, #token: 500, token usage: 0.01, accept len: 2.50, "
    "accept rate: 0.50, cuda graph: True, gen throughput (token/s): 250.00, #queue-req: 0\n"
    * 4
    + "# HELP sglang:spec_accept_length x\n"
    'sglang:spec_accept_length{tp_rank="0"} 2.5\nsglang:num_running_reqs{tp_rank="0"} 1\n'
    "# nThread 1 nGpus 2 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 graph: 0\n"
    "#  Rank  0 Group  0 Pid  9 on a device  0 [0000:18:00] NVIDIA H200\n"
    "#  Rank  1 Group  0 Pid  9 on a device  1 [0000:2a:00] NVIDIA H200\n"
    "  1048576   262144  float  sum  -1  12.50  83.89  83.89  0  12.60  83.22  83.22  0\n",
    "llamacpp-log-old": "slot print_timing: id  0 | task 0 | \n"
    "prompt eval time =     210.44 ms /   512 tokens (    0.41 ms per token,  2433.00 tokens per second)\n"
    "       eval time =    3000.00 ms /   272 tokens (   11.03 ms per token,    90.67 tokens per second)\n"
    "draft acceptance rate = 0.57000 (  171 accepted /   300 generated)\n",
}
TOKENS = [
    *(b'0 -1 1e308 1e-308 nan inf 99999999999999999999 0.5 true null [] {} "" \\u0000 , : ; = | # % / ( )'.split()),
    *(b"\n", b"\r", b"\r\n", b"\x1b[31m", b"\x00", b"\xff\xfe", b"  ", b"\t"),
    *(b"Decode batch, ", b"Prefill batch, ", b"SpecDecoding metrics: ", b"Iteration(1): ", b"iter = 1, "),
    *(
        b"[2026-08-19 09:15:57 TP0] ",
        b"#running-req: 3, ",
        b"accept len: 2.50, ",
        b"server_args=ServerArgs(",
        b"NCCL INFO ",
    ),
]
DIGITS = b"0123456789"


def seeds() -> dict[str, bytes]:
    """The unmutated text of every format; long logs keep their start and a part of their lines."""
    out = {}
    for name, file in FORMATS.items():
        lines = (DATA / file).read_bytes().splitlines(keepends=True)
        marks = SHORT.get(name)
        if marks:
            # Some of each kind of line: what is mutated a hundred thousand times should be short.
            lines = [line for mark, most in marks for line in [line for line in lines if mark in line][:most]]
        out[name] = b"".join(lines)
    return out | {name: text.encode() for name, text in WORDS.items()}


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four small harms: bytes, digits, numbers, spans, lines; of JSON every other time the values themselves."""
    if re.match(rb'\[\s*[\[{]|\{\s*"', data) and rng.random() < 0.5:
        return _restructure(data, rng)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        if not data:
            return data
        at, kind = rng.randrange(len(data)), rng.randrange(12)
        span = min(rng.choice((1, 2, 5, 20, 100, 1000)), len(data) - at)
        if kind == 0:
            data = data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif kind == 2:
            data = data[:at] + data[at + span :]
        elif kind == 3:
            data = data[:at] + data[at : at + span] * rng.choice((2, 2, 3, 50)) + data[at + span :]
        elif kind == 4:
            data = data[:at]
        elif kind == 5:
            data = data[:at] + rng.choice(TOKENS) + data[at:]
        elif kind == 6:
            to = rng.randrange(len(data))
            data = data[:to] + data[at : at + span] + data[to:]
        elif kind in (7, 8, 9):
            data = _renumber(data, at, rng, whole=kind == 9)
        else:
            lines = data.splitlines(keepends=True)
            i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
            if kind == 10:
                lines[i], lines[j] = lines[j], lines[i]
            else:
                lines.insert(i, lines[j])
            data = b"".join(lines)
    return data


def _restructure(data: bytes, rng: random.Random) -> bytes:
    """Give one to three nodes of a JSON document, or of one line of them, another value or no key."""
    lines = data.splitlines() if data.count(b"\n{") else [data]
    i = rng.randrange(len(lines))
    document = json.loads(lines[i])
    for _ in range(rng.choice((1, 1, 2, 3))):
        parent, key = _any_node(document, rng)
        if parent is None:
            break
        if rng.random() < 0.25:
            del parent[key]
        elif isinstance(parent[key], int | float) and rng.random() < 0.6:
            parent[key] = rng.choice(
                (0, -parent[key], parent[key] * 10, parent[key] + 1, 0.5, 1e300, 10**30, 1e-300, True)
            )
        else:
            parent[key] = rng.choice((None, [], {}, "", "x", [1], [[]], {"a": {}}, 3, 2.5, -1, True, "7", [None, "x"]))
    lines[i] = json.dumps(document).encode()
    return b"\n".join(lines)


def _any_node(document: object, rng: random.Random) -> tuple[Any, Any]:
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending:
        node = pending.pop()
        inside = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in inside:
            places.append((node, key))
            if isinstance(value, dict | list):
                pending.append(value)
    return rng.choice(places) if places else (None, None)


def _renumber(data: bytes, at: int, rng: random.Random, whole: bool) -> bytes:
    """Change one digit of the next number, or put another number in its place."""
    while at < len(data) and data[at] not in DIGITS:
        at += 1
    if at == len(data):
        return data
    if not whole:
        return data[:at] + bytes([rng.choice(DIGITS)]) + data[at + 1 :]
    end = at
    while end < len(data) and data[end] in b"0123456789.":
        end += 1
    number = rng.choice((b"0", b"1", b"-3", b"1e9", b"0.0001", b"7", b"99999999999", b"2.5", b"1e400", b"NaN"))
    return data[:at] + number + data[end:]


def ingest_bytes(data: bytes, given: Given = GIVEN, name: str = "fuzz") -> Calibration:
    """Read bytes as the command reads a file of that content."""
    raw = io.BytesIO(data[stream.HEAD_BYTES :])
    head = data[: stream.HEAD_BYTES]
    if not head.strip():
        raise CalibrationError("nothing")
    readings = read_opened([stream.Source(name, head, raw, raw)], given)
    return from_dict(calibration_of(readings, given, name), source=name)


def broken(calibration: Calibration) -> list[str]:
    """What of an accepted calibration cannot be, beyond what the file format itself checks."""
    faults = []
    for row in calibration.measurements.cycles:
        speed = row.cycle_ms or row.tpot_ms or row.tok_s
        if row.acceptance_length is not None and row.acceptance_length > row.num_steps + 1.006:
            faults.append(f"acceptance length {row.acceptance_length} at {row.num_steps} steps")
        if speed is None or not math.isfinite(speed) or not 1e-9 < speed < 1e12:
            faults.append(f"a speed of {speed}")
        if row.cycle_ms is not None and row.sd_cycle_ms is not None and not 0 < row.sd_cycle_ms < 3 * row.cycle_ms:
            faults.append(f"a spread of {row.sd_cycle_ms} of {row.cycle_ms}")
        if not row.note:
            faults.append("a cycle without its origin")
    for entry in calibration.acceptance:
        if entry.acceptance_length is not None and not 1 <= entry.acceptance_length <= entry.num_steps + 1.006:
            faults.append(f"acceptance length {entry.acceptance_length} at {entry.num_steps} steps")
        counts = entry.accepted_per_position or ()
        if list(counts) != sorted(counts, reverse=True) or (counts and counts[0] > (entry.drafts or 0)):
            faults.append(f"counts {counts} of {entry.drafts}")
    rows = (*calibration.measurements.allreduce, *calibration.measurements.verify, *calibration.measurements.draft)
    faults += [f"a time of {row.time_ms} ms" for row in rows if row.time_ms is None or not 0 < row.time_ms < 1e9]
    faults += [f"a fact without its origin: {fact.about}" for fact in calibration.evidence if not fact.source]
    return faults


MEASURING = {
    "sglang-log": b"Decode batch",
    "sglang-log-tree": b"Decode batch",
    "vllm-log": b"eneration",
    "trtllm-log": b"host_step_time",
}
"""Logs whose numbers stand behind each other, and what marks the lines that measure."""


def harm_a_number(data: bytes, mark: bytes, rng: random.Random) -> bytes:
    """Put another digit or another number into one of the lines that measure."""
    lines = data.splitlines(keepends=True)
    i = rng.choice([i for i, line in enumerate(lines) if mark in line])
    at = lines[i].index(mark) + rng.randrange(len(lines[i]) - lines[i].index(mark))
    lines[i] = _renumber(lines[i], at, rng, whole=rng.random() < 0.3)
    return b"".join(lines)


def silently_wrong(before: Calibration, after: Calibration) -> list[str]:
    """Values that one harmed number moved though others stand beside it: rows may go, and may not lie."""
    faults = []
    rows = {(r.num_steps, r.topk, r.batch): r.cycle_ms for r in before.measurements.cycles}
    for row in after.measurements.cycles:
        known = rows.get((row.num_steps, row.topk, row.batch))
        if known is None or (row.cycle_ms and abs(row.cycle_ms / known - 1) > 0.03):
            faults.append(f"{row.cycle_ms} ms for {known} at batch {row.batch}")
    lengths = {(e.num_steps, e.topk): e for e in before.acceptance}
    for entry in after.acceptance:
        old = lengths.get((entry.num_steps, entry.topk))
        if old is not None and entry.acceptance_length is not None and old.acceptance_length is not None:
            if abs(entry.acceptance_length - old.acceptance_length) > 2 * (old.sd or 0.0):
                faults.append(f"acceptance length {entry.acceptance_length} for {old.acceptance_length}")
        elif old is not None and entry.accepted_per_position and old.accepted_per_position:
            shares = [[n / (e.drafts or 1) for n in e.accepted_per_position or ()] for e in (entry, old)]
            if any(abs(a - b) > 0.02 for a, b in zip(*shares, strict=True)):
                faults.append(f"survival {shares[0]} for {shares[1]}")
    return faults


def run_one(data: bytes, given: Given) -> tuple[str, list[str]]:
    """Ingest mutated bytes; return what came of it, and what is wrong with that."""
    began = time.process_time()
    try:
        calibration = ingest_bytes(data, given)
    except CalibrationError as error:
        outcome, faults = "refused", [] if str(error) else ["an error without a word"]
    else:
        outcome, faults = "accepted", broken(calibration)
        json.dumps(to_dict(calibration), allow_nan=False)
    took_ms = 1e3 * (time.process_time() - began)
    if took_ms > SLOW_MS:
        faults.append(f"{took_ms:.0f} ms")
    return outcome, faults


def fuzz(name: str, data: bytes, count: int, seed: int, save: Path | None = None) -> Counter[str]:
    """Run `count` mutations of one format; return how they ended, failures counted as `failed`."""
    outcomes: Counter[str] = Counter()
    for number in range(count):
        rng = random.Random(zlib.crc32(f"{name}/{seed}/{number}".encode()))
        mutated = mutate(data, rng)
        try:
            outcome, faults = run_one(mutated, GIVEN if number % 2 else Given())
        except Exception as error:
            outcome, faults = "failed", [f"{type(error).__name__}: {error}"]
        if faults:
            outcome = "failed"
            sys.stderr.write(f"{name} {number} seed {seed}: {'; '.join(faults)[:300]}\n")
            if save is not None:
                save.mkdir(parents=True, exist_ok=True)
                (save / f"{name}-{seed}-{number}").write_bytes(mutated)
        outcomes[outcome] += 1
    return outcomes


def main() -> int:
    """Run the formats that are asked for and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="mutations a format")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--formats", help="comma-separated; all by default")
    parser.add_argument("--save", type=Path, help="a folder for inputs that fail")
    args = parser.parse_args()
    texts = seeds()
    names = args.formats.split(",") if args.formats else list(texts)
    failed = 0
    sys.stdout.write(f"{'format':26}{'mutated':>9}{'accepted':>9}{'refused':>9}{'failed':>8}{'ms each':>9}\n")
    for name in names:
        began = time.process_time()
        outcomes = fuzz(name, texts[name], args.count, args.seed, args.save)
        each = 1e3 * (time.process_time() - began) / args.count
        failed += outcomes["failed"]
        columns = f"{outcomes['accepted']:9}{outcomes['refused']:9}{outcomes['failed']:8}{each:9.2f}"
        sys.stdout.write(f"{name:26}{args.count:9}{columns}\n")
        sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
