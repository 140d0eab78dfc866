"""The logs beside this file, which the how-to pages feed to `specmodel ingest`: made up, in the words of each engine.

    python docs/howto/samples/make.py

Cycle times, acceptance and noise are stated here, so that what comes out can be compared with what went in.
"""

# ruff: noqa: E501, S311
from __future__ import annotations

import json
import random
from itertools import accumulate
from pathlib import Path

HERE = Path(__file__).parent
STEPS, BATCHES = (0, 1, 3, 5), (1, 16, 64)
CONDITIONAL = (0.72, 0.65, 0.6, 0.54, 0.47)
SURVIVAL = tuple(accumulate(CONDITIONAL, lambda a, b: a * b))
NOISE = 0.003


CONFIG = """\
speculative_config:
  decoding_type: Eagle3
  max_draft_len: 3
  speculative_model: /models/Example-8B-EAGLE3
cuda_graph_config:
  enable_padding: true
  batch_sizes: [1, 2, 4, 8, 16, 32, 64]
enable_iter_perf_stats: true
"""


def cycle_ms(num_steps: int, batch: int) -> float:
    """Time of a cycle: a pass, what speculation costs, a draft step, a verified token."""
    started = 8.0 if not num_steps else 8.6 + 0.42 * num_steps
    return started + 0.05 * batch + 0.06 * batch * num_steps


def accepted(rng: random.Random, num_steps: int, rounds: int) -> list[int]:
    """How many of so many rounds accepted at least one draft, at least two, and so on."""
    counts = [0] * num_steps
    for _ in range(rounds):
        for k in range(num_steps):
            if rng.random() >= CONDITIONAL[k]:
                break
            counts[k] += 1
    return counts


def sglang(num_steps: int) -> str:
    """SGLang 0.5.18: server arguments, captures, decode lines of 40 rounds each."""
    rng = random.Random(f"sglang {num_steps}")
    spec = "speculative_algorithm=None, "
    if num_steps:
        spec = "speculative_algorithm='EAGLE3', speculative_draft_model_path='example/Example-8B-EAGLE3', "
        spec += f"speculative_num_steps={num_steps}, speculative_eagle_topk=1, "
        spec += f"speculative_num_draft_tokens={num_steps + 1}, "
    stamp = "[2026-08-20 10:00:00] "
    lines = [
        f"{stamp}server_args=ServerArgs(model_path='example/Example-8B', tp_size=1, dp_size=1, {spec}"
        "decode_log_interval=40, disable_cuda_graph=False)",
        f"{stamp}Capture target {'verify' if num_steps else 'decode'} CUDA graph begin. backend=full, "
        f"num_tokens_per_req={num_steps + 1}, bs=[1, 2, 4, 8, 16, 32, 64], avail mem=60.12 GB",
        f"{stamp}Capture target {'verify' if num_steps else 'decode'} CUDA graph end. elapsed=4.20 s, mem usage=1.10 GB, "
        "avail mem=59.02 GB.",
    ]
    if num_steps > 1:
        lines.append(
            f"{stamp}Capture draft decode CUDA graph begin. backend=full, bs=[1, 2, 4, 8, 16, 32, 64], avail mem=59 GB"
        )
        lines.append(
            f"{stamp}Capture draft decode CUDA graph end. elapsed=2.10 s, mem usage=0.20 GB, avail mem=58.82 GB."
        )
    for batch in BATCHES:
        lines.append(
            f"{stamp}Prefill batch, #new-seq: {batch}, #new-token: {batch * 512}, #running-req: 0, #queue-req: 0"
        )
        for i in range(9):
            length = 1 + sum(accepted(rng, num_steps, 40 * batch)) / (40 * batch)
            speed = 1e3 * batch * length / (cycle_ms(num_steps, batch) * rng.gauss(1, NOISE))
            spec = f"accept len: {length:.2f}, accept rate: {(length - 1) / num_steps:.2f}, " if num_steps else ""
            lines.append(
                f"{stamp}Decode batch, #running-req: {batch}, #token: {batch * (700 + 40 * i)}, token usage: 0.01, {spec}"
                f"cuda graph: True, gen throughput (token/s): {speed if i else speed / 9:.2f}, #queue-req: 0"
            )
    return "\n".join(lines) + "\n"


def vllm(num_steps: int) -> str:
    """vLLM 0.26: the engine's configuration, iterations, and acceptance counts every ten seconds."""
    rng = random.Random(f"vllm {num_steps}")
    spec = "None"
    if num_steps:
        spec = f"SpeculativeConfig(method='eagle3', model='example/Example-8B-EAGLE3', num_spec_tokens={num_steps})"
    prefix = "(EngineCore pid=4188) INFO 08-20 10:00:00 [core.py:112] "
    lines = [
        f"{prefix}Initializing a V1 LLM engine (v0.26.0) with config: model='example/Example-8B', speculative_config={spec}, "
        "tensor_parallel_size=1, data_parallel_size=1, disable_custom_all_reduce=False, enforce_eager=False"
    ]
    iteration = 0
    for batch in BATCHES:
        for _ in range(9):
            iteration += 97
            lines.append(
                f"{prefix}Iteration({iteration}): 0 context requests, 0 context tokens, {batch} generation requests, "
                f"{batch * (num_steps + 1)} generation tokens, iteration elapsed time: "
                f"{cycle_ms(num_steps, batch) * rng.gauss(1, NOISE):.2f} ms"
            )
        if num_steps:
            drafts = batch * 900
            counts = accepted(rng, num_steps, drafts)
            rates = ", ".join(f"{count / drafts:.3f}" for count in counts)
            lines.append(
                f"(APIServer pid=4101) INFO 08-20 10:00:10 [metrics.py:108] SpecDecoding metrics: Mean acceptance length: "
                f"{1 + sum(counts) / drafts:.2f}, Accepted throughput: {sum(counts) / 10:.2f} tokens/s, Drafted throughput: "
                f"{num_steps * drafts / 10:.2f} tokens/s, Accepted: {sum(counts)} tokens, Drafted: {num_steps * drafts} "
                f"tokens, Per-position acceptance rate: {rates}, Avg Draft acceptance rate: "
                f"{100 * sum(counts) / drafts / num_steps:.1f}%"
            )
    return "\n".join(lines) + "\n"


def trtllm(num_steps: int) -> str:
    """TensorRT-LLM 1.3: what /metrics returns of iterations, device times one record later."""
    rng = random.Random(f"trtllm {num_steps}")
    records, before = [], None
    for batch in BATCHES:
        for _ in range(9):
            counts = accepted(rng, num_steps, batch)
            records.append(
                {
                    "iter": len(records) + 400,
                    "iterLatencyMS": round(2 * cycle_ms(num_steps, batch), 3),
                    "numActiveRequests": batch,
                    "inflightBatchingStats": {
                        "numScheduledRequests": batch,
                        "numContextRequests": 0,
                        "numGenRequests": batch,
                    },
                    "specDecodingStats": {
                        "numDraftTokens": num_steps * batch,
                        "numAcceptedTokens": sum(counts),
                        "numRequestsWithDraftTokens": batch if num_steps else 0,
                        "acceptanceLength": round(1 + sum(counts) / batch, 4) if num_steps else 0.0,
                        "iterLatencyMS": 0.0,
                    },
                    "scheduledSumDecodeKvTokens": 800 * batch,
                    "prevDeviceStepTimeMS": before,
                    "schedulerMode": "overlap",
                }
            )
            before = round(cycle_ms(num_steps, batch) * rng.gauss(1, NOISE), 3)
    return "[\n" + ",\n".join(json.dumps(record) for record in records) + "\n]\n"


def scrape(seconds: float) -> str:
    """vLLM's /metrics of a server with 3 drafts that has decoded one request for so long."""
    rounds = round(1e3 * seconds / cycle_ms(3, 1))
    counts = [round(rounds * share) for share in SURVIVAL[:3]]
    label = '{engine="0",model_name="example/Example-8B"}'
    values = {
        "vllm:spec_decode_num_drafts_total": rounds,
        "vllm:spec_decode_num_draft_tokens_total": 3 * rounds,
        "vllm:spec_decode_num_accepted_tokens_total": sum(counts),
        "vllm:iteration_tokens_total_count": rounds,
        "vllm:inter_token_latency_seconds_count": rounds,
        "vllm:inter_token_latency_seconds_sum": round(seconds, 3),
        "vllm:generation_tokens_total": rounds + sum(counts),
    }
    lines = ["process_start_time_seconds 1755594842", *(f"{name}{label} {value}" for name, value in values.items())]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    lines += [f'{name}{{engine="0",position="{i}"}} {count}' for i, count in enumerate(counts)]
    return "\n".join(lines) + "\n"


def llamacpp(num_steps: int) -> str:
    """llama.cpp b10472: requests one after the other, with acceptance by position and draft times (-lv 4)."""
    rng = random.Random(f"llamacpp {num_steps}")
    lines = [
        "0.00.012.345 I build_info: b10472-1a2b3c4d5",
        "0.00.100.000 I srv    load_model: loading model 'example-8b-q8_0.gguf'",
    ]
    calls = drafted = total = 0
    for task in range(8):
        rounds = 150
        counts = accepted(rng, num_steps, rounds)
        tokens = 1 + rounds + sum(counts)
        ms = rounds * cycle_ms(num_steps, 1) * rng.gauss(1, NOISE)
        head = f"1.00.000.000 I slot print_timing: id  0 | task {task} | "
        lines += [
            f"{head}prompt eval time =     100.00 ms /   200 tokens (    0.50 ms per token,  2000.00 tokens per second)",
            f"{head}       eval time = {ms:10.2f} ms / {tokens:5d} tokens ({ms / tokens:8.2f} ms per token, "
            f"{1e3 * tokens / ms:8.2f} tokens per second)",
        ]
        if num_steps:
            drafted, calls, total = drafted + num_steps * rounds, calls + rounds, total + sum(counts)
            rates = ", ".join(f"{count / rounds:.3f}" for count in counts)
            lines += [
                f"{head}draft acceptance = {sum(counts) / num_steps / rounds:.5f} ({sum(counts):5d} accepted / "
                f"{num_steps * rounds:5d} generated), mean len = {1 + sum(counts) / rounds:5.2f}",
                f"1.00.000.000 D slot print_timing: id  0 | task {task} |      acc per pos = ({rates})",
                f"1.00.000.000 D spec  statistics    draft-simple: #calls(b,g,a) = {task + 1:4d} {calls:5d} {calls:5d}, "
                f"#gen drafts = {calls:6d}, #acc drafts = {calls:6d}, #gen tokens = {drafted:6d}, #acc tokens = {total:6d}, "
                f"dur(b,g,a) = 0.400, {calls * 0.42 * num_steps:.3f}, 0.200 ms",
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write them all."""
    for engine, ending in ((sglang, "log"), (vllm, "log"), (trtllm, "json"), (llamacpp, "log")):
        for num_steps in STEPS:
            name = f"{engine.__name__}-{'plain' if not num_steps else f'k{num_steps}'}.{ending}"
            (HERE / name).write_text(engine(num_steps), encoding="utf-8")
    for name, seconds in (("before", 100.0), ("after", 400.0)):
        (HERE / f"vllm-{name}.prom").write_text(scrape(seconds), encoding="utf-8")
    (HERE / "trtllm-config.yaml").write_text(CONFIG, encoding="utf-8")


if __name__ == "__main__":
    main()
