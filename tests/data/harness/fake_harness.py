"""Speaks the protocol of the measuring binary, with made-up times, and misbehaves on request.

Usage: fake_harness.py BEHAVIOUR.json run --job JOB --output FILE [--rank R --world N --rendezvous DIR]
BEHAVIOUR is an object: hang, crash, refuse (a part of a key, or of a variable as NAME=VALUE), silent_start;
pause_ms before every point; stubborn: no signal but SIGKILL ends it.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path


def options(arguments):
    found = dict(zip(arguments[::2], arguments[1::2], strict=True))
    return found, int(found.get("--rank", 0)), int(found.get("--world", 1))


def base_ms(point):
    kind = point["kind"]
    if kind == "verify":
        return 4.0 + 0.01 * point["tokens"] + 1e-6 * point["batch"] * point["context_tokens"]
    if kind == "draft":
        return 0.2 * point["num_steps"] * (3.0 if not point["cuda_graph"] else 1.0)
    if kind == "cycle":
        tokens = point["batch"] * (point["num_steps"] + 1)
        verify = {
            "kind": "verify",
            "tokens": tokens,
            "batch": point["batch"],
            "context_tokens": point["context_tokens"],
        }
        draft = {"kind": "draft", "num_steps": point["num_steps"], "cuda_graph": point["cuda_graph"]}
        return base_ms(verify) + base_ms(draft)
    return 0.01 + point["size_bytes"] / 3e8


def record_of(point, job, world, rng):
    count = job["limits"]["min_samples"]
    base = base_ms(point)

    def series(scale, number=count):
        return [base * scale * (1.0 + rng.gauss(0.0, 0.001)) for _ in range(number)]

    record = {"record": "point", **point, "disposition": "ok", "reasons": [], "elapsed_ms": base * count}
    record["dropped"] = {"clock": 0}
    if point["kind"] == "cycle":
        cycles = point["cycles"]
        record["samples"] = {"cycle_ms": series(1.0, cycles), "gpu_busy_ms": series(0.97, cycles)}
        record["drafts"] = cycles * point["batch"]
        record["tokens_emitted"] = 2 * record["drafts"] if point["num_steps"] else record["drafts"]
        return record
    samples = {"gpu_ms": [series(0.98) for _ in range(world)], "enqueue_ms": [series(0.01) for _ in range(world)]}
    samples["sm_clock_mhz"] = [[1980] * count for _ in range(world)]
    if point["kind"] == "verify":
        samples["host_ms"] = [series(1.0) for _ in range(world)]
    if point["kind"] in ("draft", "allreduce"):
        samples["gpu_ms"] = [series(1.0) for _ in range(world)]
    return {**record, "samples": samples}


def main():
    behaviour = json.loads(Path(sys.argv[1]).read_text())
    found, rank, world = options(sys.argv[3:])
    job = json.loads(Path(found["--job"]).read_text())
    if behaviour.get("stubborn"):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    variables = " ".join(f"{key}={value}" for key, value in os.environ.items())
    output = Path(found["--output"])
    output.touch(exist_ok=False)

    def append(text):
        with output.open("a", encoding="utf-8") as stream:
            stream.write(text)

    def write(record):
        append(json.dumps(record) + "\n")

    def tell(line):
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

    if "refuse" in behaviour and behaviour["refuse"] in variables:
        tell("error NCCL says: invalid usage")
        return behaviour.get("refusal_exit", 3)
    if "silent_start" in behaviour and behaviour["silent_start"] in variables:
        time.sleep(600)
    if os.environ.get("NCCL_DEBUG_FILE"):
        path = os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))
        with open(path, "w", encoding="utf-8") as log:
            log.write("secret-host:1:1 [0] NCCL INFO NCCL version 2.28.9+cuda13.0\n")
            for point in job["points"]:
                size = point["size_bytes"]
                log.write(f"secret-host:1:1 [0] NCCL INFO AllReduce: {size} Bytes -> Algo RING proto LL")
                log.write(" channel{Lo..Hi}={0..3}\n")
    write(
        {
            "record": "start",
            "rank": rank,
            "world": world,
            "software": {"driver": "580.1", "cuda_runtime": "13.0", "cublaslt": "13.1.0", "compiler": "nvcc 13.0"},
            "device": {"name": "NVIDIA H200", "architecture": "sm_90"},
            "measured": {"copy_bytes_per_ms": 4.3e9, "gemm_flops_per_ms": 7.8e11},
            "host": {"cpu": "CPU", "cores": 16, "kernel": "6.18.44-secret-host"},
            "overhead": {"event_pair_ms": 0.002},
            "environment": {key: value for key, value in os.environ.items() if key.startswith("NCCL_")},
            "seen": sorted(os.environ),
            "flags": [],
        }
    )
    write({"record": "check", "name": "dense", "max_relative_error": 0.004, "limit": 0.02, "passed": True})
    rng = random.Random(f"{job['seed']}/{os.getpid()}")
    for number, point in enumerate(job["points"]):
        time.sleep(behaviour.get("pause_ms", 0) / 1000)
        if behaviour.get("hang") and behaviour["hang"] in point["key"]:
            time.sleep(600)
        if behaviour.get("crash") and behaviour["crash"] in point["key"]:
            append('{"record": "point", "key": "bro')
            os._exit(139)
        if rank == 0:
            write(record_of(point, job, world, rng))
            median = base_ms(point)
            tell(f"progress {number + 1} {len(job['points'])} {point['key']} ok {median} 1.0")
    write({"record": "end", "points": len(job["points"]), "wrong": 0, "elapsed_ms": 1.0, "exit_code": 0})
    return 0


if __name__ == "__main__":
    sys.exit(main())
