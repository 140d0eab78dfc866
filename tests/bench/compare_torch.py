"""Compare the harness with PyTorch on the same GPU: matrix products, and a whole dense verify pass in a CUDA graph.

Usage: python compare_torch.py BINARY [--layers 32] [--rounds 20] [--logs FOLDER]. Prints one table of products and one
of passes; nothing here passes or fails. Products are sampled in turn, a round of the harness and a round of PyTorch,
each sample after a rest of 10 ms, so that both run at the same clocks. PyTorch is asked for its products twice: as it
comes, and through cuBLASLt with the harness's workspace, which is what the harness's first choice is compared with.

What must be equal for that is made so, or shown: both load the same cuBLASLt; a graph is queued whole before it may
start, as behind the harness's gate, and samples that were not are counted; a graph of one empty kernel shows what a
start costs; --logs keeps what cuBLASLt says of the algorithm of each product in both programs (its own log, of an
untimed run).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["CUBLASLT_WORKSPACE_SIZE"] = "32768"  # KiB, as the harness gives

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

HIDDEN, SIZE, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
PRODUCTS = [
    ("qkv", 6144, 4096),
    ("output", 4096, 4096),
    ("gate_up", 28672, 4096),
    ("down", 4096, 14336),
    ("head", 128256, 4096),
]
ROWS = (1, 8, 16, 64, 512)
PASSES = ((1, 1, 1024), (1, 8, 1024), (8, 1, 1024), (64, 1, 1024), (1, 64, 1024), (16, 4, 1024))  # batch, rows, context
LIBRARIES = ("default", "cublaslt")
HOLD_MS = 2.0  # queueing a graph takes Python a tenth of it, and more after a rest
late: list[float] = []  # milliseconds of the samples whose graph was not queued in time


def say(line: str) -> None:
    """Write one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def captured(body) -> torch.cuda.CUDAGraph:
    """Capture `body` in a graph, warmed."""
    torch.cuda.synchronize()  # what it reads is ready
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def cublaslt() -> tuple[str, str]:
    """Where the cuBLASLt lies that this program has loaded, and its version as the harness writes it."""
    torch.mm(*(torch.ones(16, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2)))
    found = re.search(r"(/\S*/libcublasLt\.so\S*)", Path("/proc/self/maps").read_text(encoding="utf-8"))
    if found is None:
        raise SystemExit("PyTorch has loaded no cuBLASLt")
    library = ctypes.CDLL(found.group(1))
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    version = library.cublasLtGetVersion()
    return str(Path(found.group(1)).parent), f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def harness_environment() -> dict[str, str]:
    """The environment in which the harness loads the cuBLASLt of PyTorch."""
    paths = [cublaslt()[0], *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths)}


def replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    """Milliseconds of one replay, after a rest; queued whole before it may start, as behind the harness's gate."""
    time.sleep(0.01)
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin = time.perf_counter()
    torch.cuda._sleep(round(2e6 * HOLD_MS))  # cycles; no SM clock is above 2 GHz
    first.record()
    graph.replay()
    last.record()
    queued_ms = 1000 * (time.perf_counter() - begin)
    if first.query():
        late.append(queued_ms)
    torch.cuda.synchronize()
    return first.elapsed_time(last)


def graph_ms(body, replays: int = 30) -> float:
    """Median milliseconds of one replay of `body` captured in a graph."""
    graph = captured(body)
    for _ in range(5):
        replay_ms(graph)
    return statistics.median(replay_ms(graph) for _ in range(replays))


def torch_products() -> tuple[dict[tuple[str, int, int, int], tuple[torch.cuda.CUDAGraph, int]], list]:
    """Capture the products of each shape over as many weights as keep them cold; with how many, and what is read."""
    graphs, kept = {}, []
    for _, outer, inner in PRODUCTS:
        copies = min(max(5 * 60 * 2**20 // (2 * outer * inner) + 1, 3), 64)
        weights = [torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        for rows in ROWS:
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)

            def body(x=x, weights=weights) -> None:
                for weight in weights:
                    functional.linear(x, weight)

            for library in LIBRARIES:
                torch.backends.cuda.preferred_blas_library(library)
                graphs[library, rows, outer, inner] = captured(body), copies
                kept.append((x, weights))  # a graph does not keep what it reads
    torch.backends.cuda.preferred_blas_library("default")
    return graphs, kept


def product_command(binary: str) -> tuple[list[tuple[int, int, int]], list[str]]:
    """The shapes of all products, and the command that times them in the harness."""
    shapes = [(rows, outer, inner) for _, outer, inner in PRODUCTS for rows in ROWS]
    return shapes, [binary, "products", "--shapes", ",".join(f"{r}x{o}x{i}" for r, o, i in shapes)]


def keep_logs(binary: str, folder: Path) -> None:
    """Write what cuBLASLt says of the algorithms in both programs; nothing is timed."""
    folder.mkdir(parents=True, exist_ok=True)
    this = [sys.executable, str(Path(__file__).resolve()), binary, "--products-once"]
    for name, command in (("harness", product_command(binary)[1]), ("torch", this)):
        env = {**harness_environment(), "CUBLASLT_LOG_LEVEL": "5", "CUBLASLT_LOG_FILE": str(folder / f"{name}.log")}
        subprocess.run(command, env=env, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def compare_products(binary: str, rounds: int) -> None:
    """Sample the products of both programs in turn and print their medians."""
    shapes, command = product_command(binary)
    env = harness_environment()
    theirs = json.loads(subprocess.run([binary, "version"], env=env, check=True, capture_output=True).stdout)
    say(f"cuBLASLt: harness {theirs['cublaslt']}, PyTorch {cublaslt()[1]}")
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdin
        assert harness.stdout
        harness.stdout.readline()  # all algorithms are chosen
        graphs, _kept = torch_products()
        one = torch.zeros(1, device="cuda")
        empty = captured(lambda: one.add_(1))
        samples: dict[tuple, list[float]] = {}
        time.sleep(2)  # choosing algorithms has heated the card
        late.clear()
        for _ in range(rounds):
            harness.stdin.write("\n")
            harness.stdin.flush()
            for shape in shapes:
                answer = json.loads(harness.stdout.readline())
                for key in ("first_choice_ms", "tuned_ms", "first_choice_mhz"):
                    samples.setdefault((key, *shape), []).append(answer[key])
            for (library, *shape), (graph, copies) in graphs.items():
                samples.setdefault((library, *shape), []).append(replay_ms(graph) / copies)
            samples.setdefault(("empty",), []).append(replay_ms(empty))
        harness.stdin.close()
    empty_ms, replays = statistics.median(samples["empty",]), rounds * (len(graphs) + 1)
    say(f"PyTorch: a graph of one small kernel {empty_ms:.4f} ms; {len(late)} of {replays} graphs queued too late")
    say(f"{'product':8} {'rows':>4} | {'torch':>8} {'torch Lt':>8} {'first':>8} {'tuned':>8} ms | "
        f"{'first/Lt':>8} {'tuned/best':>10} | {'MHz':>5}")  # fmt: skip
    equal, best = [], []
    for name, outer, inner in PRODUCTS:
        for rows in ROWS:

            def median(key: str, shape=(rows, outer, inner)) -> float:
                return statistics.median(samples[key, *shape])

            plain, lt, first, tuned = (median(k) for k in ("default", "cublaslt", "first_choice_ms", "tuned_ms"))
            equal.append(first / lt)
            best.append(tuned / min(plain, lt))
            say(f"{name:8} {rows:4} | {plain:8.5f} {lt:8.5f} {first:8.5f} {tuned:8.5f}    | {equal[-1]:8.3f} "
                f"{best[-1]:10.3f} | {median('first_choice_mhz'):5.0f}")  # fmt: skip
    say(f"first/Lt {min(equal):.3f} to {max(equal):.3f}, median {statistics.median(equal):.3f}; "
        f"tuned/best {min(best):.3f} to {max(best):.3f}, median {statistics.median(best):.3f}")  # fmt: skip


class Decoder:
    """The layers of a dense decoder with random weights, as plain PyTorch operations."""

    def __init__(self, layers: int) -> None:
        def weight(outer: int, inner: int) -> torch.Tensor:
            return torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * inner**-0.5

        shapes = {name: (outer, inner) for name, outer, inner in PRODUCTS}
        self.layers = [
            {name: weight(*shapes[name]) for name in ("qkv", "output", "gate_up", "down")} for _ in range(layers)
        ]
        self.norm = torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.head = weight(VOCAB, HIDDEN)
        self.embedding = torch.randn(VOCAB, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def products_ms(self, rows: int) -> float:
        """Median milliseconds of the matrix products of a pass alone: no pass through PyTorch is shorter."""
        inputs = {name: torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16) for name, _, inner in PRODUCTS}

        def body() -> None:
            for layer in self.layers:
                for name, weight in layer.items():
                    functional.linear(inputs[name], weight)
            functional.linear(inputs["head"], self.head)

        return graph_ms(body)

    def pass_ms(self, batch: int, rows: int, context: int) -> float:
        """Median milliseconds of one pass of `rows` new rows for each of `batch` sequences."""
        length = context + rows
        cache = [torch.randn(2, batch, KV_HEADS, length, DIM, device="cuda", dtype=torch.bfloat16) for _ in self.layers]
        tokens = torch.randint(0, VOCAB, (batch * rows,), device="cuda")
        angle = torch.arange(context, length, device="cuda")[:, None] * 500000.0 ** (
            -torch.arange(0, DIM, 2, device="cuda") / DIM
        )
        cosine, sine = (f(angle).to(torch.bfloat16).repeat(1, 2)[None, None] for f in (torch.cos, torch.sin))
        mask = causal_lower_right(rows, length) if rows > 1 else None

        def rotate(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, dim=-1)
            return x * cosine + torch.cat((-high, low), dim=-1) * sine

        def body() -> None:
            x = self.embedding[tokens]
            for layer, kv in zip(self.layers, cache, strict=True):
                qkv = functional.linear(functional.rms_norm(x, (HIDDEN,), self.norm), layer["qkv"])
                q, k, v = (
                    qkv.view(batch, rows, HEADS + 2 * KV_HEADS, DIM)
                    .transpose(1, 2)
                    .split((HEADS, KV_HEADS, KV_HEADS), dim=1)
                )
                kv[0, :, :, context:] = rotate(k)
                kv[1, :, :, context:] = v
                out = functional.scaled_dot_product_attention(rotate(q), kv[0], kv[1], attn_mask=mask, enable_gqa=True)
                x = x + functional.linear(out.transpose(1, 2).reshape(batch * rows, HIDDEN), layer["output"])
                gate, up = functional.linear(functional.rms_norm(x, (HIDDEN,), self.norm), layer["gate_up"]).chunk(
                    2, dim=-1
                )
                x = x + functional.linear(functional.silu(gate) * up, layer["down"])
            functional.linear(functional.rms_norm(x, (HIDDEN,), self.norm), self.head).argmax(dim=-1)

        return graph_ms(body)


def harness_passes(binary: str, layers: int) -> dict[tuple[int, int, int], dict]:
    """The same passes through the harness."""
    points = [
        {"key": f"{b}-{r}-{c}", "kind": "verify", "tokens": b * r, "batch": b, "context_tokens": c}
        for b, r, c in PASSES
    ]
    model = {
        "hidden_size": HIDDEN, "intermediate_size": SIZE, "num_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": DIM, "vocab_size": VOCAB, "rope_theta": 500000.0,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        job, output = Path(folder, "job.json"), Path(folder, "points.jsonl")
        job.write_text(
            json.dumps(
                {"protocol": "specmodel.harness-job/1", "model": model, "points": points, "limits": {"min_ms": 300}}
            )
        )
        command = [binary, "run", "--job", str(job), "--output", str(output)]
        subprocess.run(command, env=harness_environment(), check=True)
        records = [json.loads(line) for line in output.read_text().splitlines()]
    return {tuple(int(n) for n in r["key"].split("-")): r for r in records if r["record"] == "point"}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--logs", type=Path, help="folder for what cuBLASLt says of the algorithms")
    parser.add_argument("--products-once", action="store_true", help="capture PyTorch's products, time nothing")
    arguments = parser.parse_args()
    if arguments.products_once:
        torch_products()
        return
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    if arguments.logs:
        keep_logs(arguments.binary, arguments.logs)
    compare_products(arguments.binary, arguments.rounds)
    torch.cuda.empty_cache()
    passes = harness_passes(arguments.binary, arguments.layers)
    decoder = Decoder(arguments.layers)
    say(f"{'batch':>5} {'rows':>5} {'context':>8} | {'products':>8} {'torch':>8} {'harness':>8} ms | "
        f"{'/torch':>6} {'/products':>9}  disposition")  # fmt: skip
    for batch, rows, context in PASSES:
        record = passes[batch, rows, context]
        alone, h = decoder.products_ms(batch * rows), record["summary"]["gpu_ms"]["median"]
        t = decoder.pass_ms(batch, rows, context)
        say(f"{batch:5} {rows:5} {context:8} | {alone:8.4f} {t:8.4f} {h:8.4f}    | {h / t:6.3f} {h / alone:9.3f}  "
            f"{record['disposition']}")  # fmt: skip


if __name__ == "__main__":
    main()
