"""What a pass must move and compute, and so about how long it takes: for plans, time estimates and memory checks.

Nothing here enters a calibration; these are the estimates that a plan is printed with before anything is measured.
"""

from __future__ import annotations

from specmodel.gpus import Gpu, known_gpu
from specmodel.harness.shapes import DraftShape, Shape

__all__ = [
    "Gpu",
    "cycle_ms",
    "draft_ms",
    "known_gpu",
    "kv_bytes_per_token",
    "memory_bytes",
    "verify_ms",
    "weight_bytes",
]

_BYTES = 2  # bf16
# Of the datasheet's rates, what whole passes reach in practice.
_BANDWIDTH_SHARE = 0.75
_FLOPS_SHARE = 0.6
_KERNEL_MS = 0.0025  # start of a kernel inside a graph
_EAGER_KERNEL_MS = 0.004  # launch of a kernel from the host
_KERNELS_PER_LAYER = 11
_CYCLE_HOST_MS = 0.05
_ALLREDUCE_MS = 0.015
_RESERVE_BYTES = 2 << 30


def _experts_touched(shape: Shape, tokens: int) -> float:
    """Return the mean number of distinct experts that `tokens` uniformly routed tokens touch: E (1 - (1 - k/E)^n)."""
    share = shape.experts_per_token / shape.num_experts
    return shape.num_experts * (1.0 - (1.0 - share) ** tokens)


def _attention_weights(shape: Shape, input_size: int) -> int:
    heads = shape.num_attention_heads + 2 * shape.num_key_value_heads
    return input_size * heads * shape.head_dim + shape.num_attention_heads * shape.head_dim * shape.hidden_size


def _mlp_weights(shape: Shape, experts: float) -> float:
    if not shape.num_experts:
        return 3.0 * shape.hidden_size * shape.intermediate_size
    routed = experts * 3.0 * shape.hidden_size * shape.moe_intermediate_size
    shared = 3.0 * shape.hidden_size * shape.shared_expert_intermediate_size
    return routed + shared + shape.hidden_size * shape.num_experts


def weight_bytes(shape: Shape, *, tokens: int | None = None) -> float:
    """Return the bytes of the weights that a pass over `tokens` reads; all of them, with the embedding, for None."""
    experts = float(shape.num_experts) if tokens is None or not shape.num_experts else _experts_touched(shape, tokens)
    layer = _attention_weights(shape, shape.hidden_size) + _mlp_weights(shape, experts)
    vocab = shape.vocab_size * shape.hidden_size
    return _BYTES * (shape.num_layers * layer + vocab * (2 if tokens is None else 1))


def _draft_weight_bytes(draft: DraftShape, *, first: bool) -> float:
    """Return the bytes of the weights that one draft step reads; the first step of an EAGLE-3 head reads its fc too."""
    shape = draft.shape
    if draft.kind == "model":
        return weight_bytes(shape, tokens=1)
    layer = _attention_weights(shape, 2 * shape.hidden_size) + _mlp_weights(shape, 0)
    head = (draft.draft_vocab_size or shape.vocab_size) * shape.hidden_size
    fused = 3 * shape.hidden_size * shape.hidden_size if first else 0
    return _BYTES * (layer + head + fused)


def kv_bytes_per_token(shape: Shape, world: int) -> int:
    """Return the bytes of keys and values of one token on one of `world` GPUs."""
    heads = max(1, shape.num_key_value_heads // world)
    return 2 * _BYTES * shape.num_layers * heads * shape.head_dim


def _pass_ms(gpu: Gpu, read_bytes: float, flops: float) -> float:
    bandwidth = _BANDWIDTH_SHARE * gpu.bandwidth_bytes_per_ms
    return max(read_bytes / bandwidth, flops / (_FLOPS_SHARE * gpu.flops_per_ms))


def verify_ms(gpu: Gpu, shape: Shape, *, tokens: int, batch: int, context_tokens: int, world: int) -> float:
    """Estimate one target pass: weights and KV read once, two flops a weight and token, the start of every kernel.

    Parameters
    ----------
    tokens
        Rows of the pass, all sequences together.
    batch, context_tokens
        Sequences, and what each has in its KV cache.
    world
        GPUs that share the pass; above 1, two all-reduces a layer are added.
    """
    read = weight_bytes(shape, tokens=tokens) / world
    active = weight_bytes(shape, tokens=1) / world
    kv = float(batch * context_tokens * kv_bytes_per_token(shape, world))
    attention_flops = 4.0 * tokens * context_tokens * shape.num_attention_heads * shape.head_dim * shape.num_layers
    flops = active * tokens + attention_flops / world
    total = _pass_ms(gpu, read, flops) + kv / (_BANDWIDTH_SHARE * gpu.bandwidth_bytes_per_ms)
    total += shape.num_layers * _KERNELS_PER_LAYER * _KERNEL_MS
    if world > 1:
        total += 2 * shape.num_layers * _ALLREDUCE_MS
    return total


def draft_ms(
    gpu: Gpu, draft: DraftShape, *, num_steps: int, batch: int, context_tokens: int, world: int, eager: bool
) -> float:
    """Estimate all draft passes of one cycle; `eager` adds the launches that a graph saves."""
    shape = draft.shape
    kv = batch * context_tokens * kv_bytes_per_token(shape, world)
    kernels = (shape.num_layers * _KERNELS_PER_LAYER + 4) * (_EAGER_KERNEL_MS if eager else _KERNEL_MS)
    total = 0.0
    for step in range(num_steps):
        read = _draft_weight_bytes(draft, first=step == 0) / world
        total += max(_pass_ms(gpu, read + kv, batch * read), kernels)
    return total


def cycle_ms(verify_part_ms: float, draft_part_ms: float) -> float:
    """Estimate one whole cycle from its parts and the work of the host."""
    return verify_part_ms + draft_part_ms + _CYCLE_HOST_MS


def memory_bytes(
    shape: Shape, draft: DraftShape | None, *, cached_tokens: int, tokens: int, world: int
) -> dict[str, float]:
    """Return what one GPU must hold, by part.

    Parameters
    ----------
    cached_tokens
        The largest batch times context (with room to move) of any point.
    tokens
        The most rows of any pass.
    """
    weights = weight_bytes(shape) / world
    kv = float(cached_tokens * kv_bytes_per_token(shape, world))
    if draft is not None:
        kv += cached_tokens * kv_bytes_per_token(draft.shape, world)
        if draft.kind == "model":
            weights += weight_bytes(draft.shape) / world
        else:
            weights += _draft_weight_bytes(draft, first=True) / world
    widest = max(shape.intermediate_size, shape.moe_intermediate_size * max(1, shape.experts_per_token))
    activations = float(tokens) * (8 * shape.hidden_size + 4 * widest + 3 * shape.vocab_size / world) * _BYTES
    return {"weights": weights, "kv cache": kv, "activations": activations, "reserve": float(_RESERVE_BYTES)}
