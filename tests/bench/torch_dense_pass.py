"""The same dense verify pass in PyTorch, captured in a CUDA graph, to compare the harness with (needs torch and a GPU).

    python tests/bench/torch_dense_pass.py [SAMPLES.json.gz]

Prints, for each point, the median of PyTorch's graph replays and, with a samples file of `specmodel measure`, the
harness's `gpu_ms` of the same point and their ratio. Then the matrix products of the pass alone, over all layers.
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812

POINTS = ((1, 1), (4, 1), (8, 1), (16, 1), (64, 1), (16, 16), (64, 64), (512, 64))  # tokens, batch
CONTEXT_TOKENS = 1024
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4096, 14336, 32, 32, 8, 128, 128256
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
REPLAYS = 60


def random_matrix(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (HIDDEN,), weight, 1e-5)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class DensePass:
    """Random weights and KV caches of the shape, and one pass over them."""

    def __init__(self) -> None:
        self.layers = [
            (
                random_matrix(QKV, HIDDEN),
                random_matrix(HIDDEN, HEADS * HEAD_DIM),
                random_matrix(2 * INTERMEDIATE, HIDDEN),
                random_matrix(HIDDEN, INTERMEDIATE),
                torch.ones(HIDDEN, device="cuda", dtype=torch.bfloat16),
            )
            for _ in range(LAYERS)
        ]
        self.head = random_matrix(VOCAB, HIDDEN)

    def prepare(self, tokens: int, batch: int) -> None:
        rows = tokens // batch
        length = CONTEXT_TOKENS + rows
        shape = (LAYERS, 2, batch, KV_HEADS, length, HEAD_DIM)
        self.cache = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
        self.x = random_matrix(tokens, HIDDEN)
        angle = torch.rand(1, 1, rows, HEAD_DIM // 2, device="cuda")
        self.cos, self.sin = angle.cos().bfloat16(), angle.sin().bfloat16()
        allowed = torch.ones(rows, length, dtype=torch.bool, device="cuda").tril(CONTEXT_TOKENS)
        self.mask = allowed if rows > 1 else None
        self.rows, self.batch = rows, batch

    def run(self) -> torch.Tensor:
        rows, batch, x = self.rows, self.batch, self.x
        for number, (qkv, out, up, down, weight) in enumerate(self.layers):
            mixed = (norm(x, weight) @ qkv.T).view(batch, rows, HEADS + 2 * KV_HEADS, HEAD_DIM).transpose(1, 2)
            query, key, value = mixed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            keys, values = self.cache[number, 0], self.cache[number, 1]
            keys[:, :, CONTEXT_TOKENS:] = rotated(key, self.cos, self.sin)
            values[:, :, CONTEXT_TOKENS:] = value
            query = rotated(query, self.cos, self.sin)
            seen = F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask, enable_gqa=True)
            x = x + seen.transpose(1, 2).reshape(batch * rows, HEADS * HEAD_DIM) @ out.T
            gate, lift = (norm(x, weight) @ up.T).chunk(2, dim=-1)
            x = x + (F.silu(gate) * lift) @ down.T
        return (norm(x, weight) @ self.head.T).argmax(-1)

    def products(self) -> torch.Tensor:
        """Only the matrix products, over all layers."""
        wide, inner = self.x, self.inner
        for qkv, out, up, down, _ in self.layers:
            wide @ qkv.T
            wide @ out.T
            wide @ up.T
            inner @ down.T
        return wide @ self.head.T


def median_ms(call) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(4_000_000)  # the launch must not be timed
        start.record()
        graph.replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def harness_ms(path: str | None) -> dict[tuple[int, int], float]:
    if path is None:
        return {}
    content = json.loads(gzip.decompress(Path(path).read_bytes()))
    found = {}
    for point in content["points"]:
        here = point["kind"] == "verify" and point["context_tokens"] == CONTEXT_TOKENS and point["runs"]
        if here:
            runs = [run["samples"]["gpu_ms"][0] for run in point["runs"]]
            found[point["tokens"], point["batch"]] = statistics.median(map(statistics.median, runs))
    return found


def main() -> None:
    measured = harness_ms(sys.argv[1] if len(sys.argv) > 1 else None)
    model = DensePass()
    with torch.no_grad():
        for tokens, batch in POINTS:
            model.prepare(tokens, batch)
            model.inner = random_matrix(tokens, INTERMEDIATE)
            whole, products = median_ms(model.run), median_ms(model.products)
            ours = measured.get((tokens, batch))
            ratio = "" if ours is None else f" harness {ours:.4f} ms ratio {ours / whole:.3f}"
            sys.stdout.write(
                f"tokens {tokens:4d} batch {batch:3d}: torch {whole:.4f} ms, products {products:.4f} ms{ratio}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
