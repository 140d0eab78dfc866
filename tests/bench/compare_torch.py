"""Compare the harness with PyTorch on the same GPU: matrix products, and a whole dense verify pass in a CUDA graph.

Usage: python compare_torch.py BINARY [--layers 32]. Prints one table of products (the harness's first choice and its
tuned one over PyTorch's) and one of passes; nothing here passes or fails. Both sides rest 10 ms before each sample of a
product, so that neither is at the card's power limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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
ROWS = (1, 4, 8, 16, 32, 64, 512)
PASSES = ((1, 1, 1024), (1, 8, 1024), (8, 1, 1024), (64, 1, 1024), (1, 64, 1024), (16, 4, 1024))  # batch, rows, context


def say(line: str) -> None:
    """Write one line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def graph_ms(body, replays: int = 40) -> float:
    """Median milliseconds of one replay of `body` captured in a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    for _ in range(5):
        graph.replay()
    times = []
    for _ in range(replays):
        time.sleep(0.01)
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # about 0.1 ms: the replay is queued before it may start
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def torch_products() -> dict[tuple[int, int, int], float]:
    """Milliseconds of one product of each shape, weights cold."""
    result = {}
    for _, outer, inner in PRODUCTS:
        copies = min(max(5 * 60 * 2**20 // (2 * outer * inner) + 1, 3), 64)
        weights = [torch.randn(outer, inner, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
        for rows in ROWS:
            x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)

            def body(x=x, weights=weights) -> None:
                for weight in weights:
                    functional.linear(x, weight)

            result[rows, outer, inner] = graph_ms(body) / copies
    return result


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
        subprocess.run([binary, "run", "--job", str(job), "--output", str(output)], check=True)
        records = [json.loads(line) for line in output.read_text().splitlines()]
    return {tuple(int(n) for n in r["key"].split("-")): r for r in records if r["record"] == "point"}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("binary")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    shapes = ",".join(f"{rows}x{outer}x{inner}" for _, outer, inner in PRODUCTS for rows in ROWS)
    lines = subprocess.run(
        [arguments.binary, "products", "--shapes", shapes], check=True, capture_output=True, text=True
    ).stdout
    ours = {(p["rows"], p["outer"], p["inner"]): p for p in map(json.loads, lines.splitlines())}
    passes = harness_passes(arguments.binary, arguments.layers)
    theirs = torch_products()
    say(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    say(f"{'product':10} {'rows':>5} {'torch_ms':>9} {'first_ms':>9} {'ratio':>6} {'tuned_ms':>9} {'ratio':>6}")
    for name, outer, inner in PRODUCTS:
        for rows in ROWS:
            p, t = ours[rows, outer, inner], theirs[rows, outer, inner]
            first, tuned = p["first_choice_ms"], p["tuned_ms"]
            say(f"{name:10} {rows:5} {t:9.5f} {first:9.5f} {first / t:6.3f} {tuned:9.5f} {tuned / t:6.3f}")
    decoder = Decoder(arguments.layers)
    say(f"{'batch':>5} {'rows':>5} {'context':>8} {'torch_ms':>9} {'harness_ms':>10} {'ratio':>6}  disposition")
    for batch, rows, context in PASSES:
        record = passes[batch, rows, context]
        t, h = decoder.pass_ms(batch, rows, context), record["summary"]["gpu_ms"]["median"]
        say(f"{batch:5} {rows:5} {context:8} {t:9.4f} {h:10.4f} {h / t:6.3f}  {record['disposition']}")


if __name__ == "__main__":
    main()
