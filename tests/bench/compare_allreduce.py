"""Compare the harness's all-reduces with PyTorch's on the GPUs of this machine, one process a GPU, captured in graphs.

Usage: python compare_allreduce.py BINARY. Prints one table; nothing here passes or fails. Both use the same NCCL
library with its own choices. PyTorch reduces in place and takes the mean, so that values stay finite; the harness sums
out of place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing

from specmodel.harness.build import find_nccl
from specmodel.harness.environment import CommPlan, child_environment
from specmodel.harness.group import read_records, run_group

SIZES = [1 << n for n in (14, 16, 18, 20, 22)]
OPERATIONS, REPLAYS = 20, 60
MODEL = {
    "hidden_size": 1024, "intermediate_size": 1024, "num_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 1024,
}  # fmt: skip


def torch_rank(rank: int, world: int, folder: str) -> None:
    """Time PyTorch's all-reduces on one rank; rank 0 writes the medians of the slowest rank."""
    torch.cuda.set_device(rank)
    store = f"file://{folder}/meeting"
    dist.init_process_group(
        "nccl", init_method=store, rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    found = {}
    for size_bytes in SIZES:
        data = torch.randn(size_bytes // 2, device="cuda", dtype=torch.bfloat16)
        for _ in range(5):
            dist.all_reduce(data, op=dist.ReduceOp.AVG)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(OPERATIONS):
                dist.all_reduce(data, op=dist.ReduceOp.AVG)
        times = []
        for _ in range(REPLAYS + 5):
            dist.barrier()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(400_000)
            first.record()
            graph.replay()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / OPERATIONS)
        worst = torch.tensor(times[5:], device="cuda")
        dist.all_reduce(worst, op=dist.ReduceOp.MIN)  # the rank that starts last waits for nobody
        found[size_bytes] = statistics.median(worst.tolist())
        del graph
    if rank == 0:
        Path(folder, "torch.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def harness_ms(binary: str, world: int, folder: str) -> dict[int, float]:
    """Time the same sizes with the harness."""
    points = [{"key": str(size), "kind": "allreduce", "size_bytes": size, "in_graph": True} for size in SIZES]
    job = {"protocol": "specmodel.harness-job/1", "model": MODEL, "points": points, "limits": {"min_ms": 200}}
    library = find_nccl()
    if library:
        job["nccl_library"] = library
    empty = Path(folder, "nccl.conf")
    empty.touch()
    env = child_environment(os.environ, CommPlan(name="default"), empty_config=str(empty), allow_nvls=False)
    stem = Path(folder, "harness")
    result = run_group([binary, "run"], job=job, stem=stem, world=world, env=env, timeout_ms=60_000)
    if result.outcome != "finished":
        raise SystemExit(f"{result.outcome}: {'; '.join(result.errors)}")
    records = read_records(stem.with_name("harness.rank0.jsonl"))
    return {int(r["key"]): r["summary"]["gpu_ms"]["median"] for r in records if r.get("record") == "point"}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    arguments = parser.parse_args()
    world = torch.cuda.device_count()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    with tempfile.TemporaryDirectory() as folder:
        ours = harness_ms(arguments.binary, world, folder)
        multiprocessing.spawn(torch_rank, args=(world, folder), nprocs=world)
        theirs = {int(k): v for k, v in json.loads(Path(folder, "torch.json").read_text(encoding="utf-8")).items()}
    version = ".".join(map(str, torch.cuda.nccl.version()))
    sys.stdout.write(f"torch {torch.__version__}, NCCL {version}, {world} x {torch.cuda.get_device_name()}\n")
    sys.stdout.write(f"{'bytes':>9} {'torch ms':>9} {'harness ms':>10} {'ratio':>6}\n")
    for size in SIZES:
        sys.stdout.write(f"{size:9} {theirs[size]:9.5f} {ours[size]:10.5f} {ours[size] / theirs[size]:6.3f}\n")


if __name__ == "__main__":
    main()
