"""Model shapes, from a Hugging Face `config.json` or shipped; what cannot be represented is refused by name.

The shape of a model is all that its speed depends on: the harness fills the weights with random numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specmodel.errors import CalibrationError, UsageError

__all__ = ["DraftShape", "Shape", "check_tensor_parallel", "read_draft", "read_shape", "shipped_names"]

_SHAPES_DIR = Path(__file__).parent / "shapes"
_EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_MODEL_TYPES = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_MOE_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")
_QK_NORM_TYPES = ("qwen3", "qwen3_moe")
_HALF_TYPES = ("bfloat16", "float16")
_HEAD_DIMS = (64, 128)
_MAX_EXPERTS = 512
_MAX_EXPERTS_PER_TOKEN = 16
_TILE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a decoder: grouped-query attention and a dense or routed SwiGLU, in bf16."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    sliding_window: int | None = None
    notes: tuple[str, ...] = ()

    def job_block(self, world: int) -> dict[str, Any]:
        """Make the `model` block of a job file, with the vocabulary padded to a multiple of 8 `world`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        block = {key: value for key, value in fields.items() if key not in ("name", "sliding_window", "notes")}
        block["vocab_size"] = _padded_vocab(self.vocab_size, world)
        return block


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """The drafter: an EAGLE-3 head, or a whole small model."""

    kind: Literal["eagle3", "model"]
    shape: Shape
    draft_vocab_size: int | None = None

    @property
    def name(self) -> str:
        """The name of the drafter's shape."""
        return self.shape.name

    def job_block(self, world: int, first_step_rows: str) -> dict[str, Any]:
        """Make the `draft` block of a job file; its keys are those of a model, without the experts."""
        block = self.shape.job_block(world)
        for key in [key for key in block if "expert" in key or key in ("moe_intermediate_size", "norm_topk_prob")]:
            del block[key]
        block = {"kind": self.kind, "first_step_rows": first_step_rows, **block}
        if self.draft_vocab_size is not None:
            block["draft_vocab_size"] = _padded_vocab(self.draft_vocab_size, world)
        return block


def shipped_names() -> tuple[str, ...]:
    """List the names of the shapes that come with specmodel."""
    return tuple(sorted(path.stem for path in _SHAPES_DIR.glob("*.json")))


def read_shape(source: str, *, num_layers: int | None = None) -> Shape:
    """Read the shape of a target model.

    Parameters
    ----------
    source
        A path to a Hugging Face `config.json` (or to the folder that holds one), or the name of a shipped shape.
    num_layers
        Take only so many of its layers; None takes all.

    Returns
    -------
    Shape

    Raises
    ------
    CalibrationError
        The file cannot be read, lacks a size, or describes what the harness cannot represent.
    UsageError
        No such file or shipped shape, or `num_layers` is out of range.
    """
    where, name, config = _read_config(source)
    if _is_eagle3(config):
        raise CalibrationError(f"{where}: is an EAGLE-3 head, not a whole model; give it as the draft shape")
    shape = _shape_from(where, name, config)
    if num_layers is not None:
        if not 1 <= num_layers <= shape.num_layers:
            raise UsageError(f"{name} has {shape.num_layers} layers; asked for {num_layers}")
        if num_layers < shape.num_layers:
            label = f"{name}, {num_layers} of {shape.num_layers} layers"
            shape = dataclasses.replace(shape, num_layers=num_layers, name=label)
    return shape


def read_draft(source: str, target: Shape) -> DraftShape:
    """Read the shape of a drafter for `target`; see `read_shape` for `source` and the errors."""
    where, name, config = _read_config(source)
    if not _is_eagle3(config):
        shape = _shape_from(where, name, config)
        if shape.num_experts:
            raise CalibrationError(f"{where}: a drafter with routed experts cannot be measured; give a dense one")
        return DraftShape(kind="model", shape=shape)
    layer = config.get("transformer_layer_config", config)
    if not isinstance(layer, Mapping):
        raise CalibrationError(f"{where}: transformer_layer_config must be an object")
    if any(layer.get(key) for key in _EXPERT_COUNT_KEYS):
        raise CalibrationError(f"{where}: an EAGLE-3 head with routed experts cannot be measured; give a dense one")
    shape = _shape_from(where, name, {"model_type": "llama", **layer})
    if shape.num_layers != 1:
        raise CalibrationError(f"{where}: an EAGLE-3 head has one layer, num_hidden_layers is {shape.num_layers}")
    fused = config.get("target_hidden_size") or layer.get("target_hidden_size") or shape.hidden_size
    if fused != target.hidden_size:
        raise CalibrationError(
            f"{where}: the head is for a target of hidden size {fused}, {target.name} has {target.hidden_size}; "
            "give a head of this target"
        )
    vocab = config.get("draft_vocab_size") or layer.get("draft_vocab_size") or shape.vocab_size
    return DraftShape(kind="eagle3", shape=shape, draft_vocab_size=_whole(where, "draft_vocab_size", vocab))


def check_tensor_parallel(shape: Shape, world: int) -> None:
    """Raise UsageError unless `shape` can be sliced over `world` GPUs, as the binary slices it."""
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if heads % world or (kv_heads % world and world % kv_heads):
        raise UsageError(
            f"{shape.name}: {heads} attention and {kv_heads} key-value heads cannot be shared by {world} GPUs; "
            "give --tensor-parallel a divisor of both"
        )
    for label in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        size = getattr(shape, label)
        if (label == "intermediate_size" and shape.num_experts) or size == 0:
            continue
        if size % (world * _TILE):
            raise UsageError(f"{shape.name}: {label} {size} over {world} GPUs is not a multiple of {_TILE} each")


def _padded_vocab(vocab_size: int, world: int) -> int:
    step = 8 * world
    return math.ceil(vocab_size / step) * step


def _read_config(source: str) -> tuple[str, str, dict[str, Any]]:
    """Find `source`: the label for messages, the model's name, and the parsed object."""
    path = Path(source)
    shipped = {name.lower(): name for name in shipped_names()}
    if path.is_dir():
        path, name = path / "config.json", path.resolve().name
    elif path.is_file():
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
    elif source.lower() in shipped:
        name = shipped[source.lower()]
        path = _SHAPES_DIR / f"{name}.json"
    else:
        raise UsageError(f"no file and no shipped shape '{source}'; shipped are {', '.join(shipped_names())}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CalibrationError(f"{source}: not a readable JSON file ({error})") from error
    if not isinstance(config, dict):
        raise CalibrationError(f"{source}: a config.json holds one object")
    return source, name, config


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures") or []
    named = any("eagle3" in str(item).lower() for item in architectures)
    return named or config.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in config


def _refusals(config: Mapping[str, Any]) -> list[str]:
    """Everything in `config` that the harness cannot represent, each named with its key."""
    found = []
    for key in ("kv_lora_rank", "q_lora_rank"):
        if config.get(key):
            found.append(f"{key}: multi-head latent attention (MLA)")
            break
    for key in ("quantization_config", "compression_config"):
        scheme = config.get(key)
        if scheme:
            method = scheme.get("quant_method", "quantised") if isinstance(scheme, Mapping) else "quantised"
            found.append(f"{key}: number format {method} (weights are bf16)")
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    if dtype not in _HALF_TYPES:
        found.append(f"torch_dtype: {dtype} (weights are bf16)")
    if "text_config" in config:
        found.append("text_config: a multimodal model; save its text_config as a file and give that")
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        found.append(f"layer_types: {', '.join(sorted(map(str, kinds)))}")
    softcaps = ("attn_logit_softcapping", "final_logit_softcapping")
    found.extend(f"{key}: logit soft-capping" for key in softcaps if config.get(key))
    dense_first = config.get("mlp_only_layers") or config.get("first_k_dense_replace")
    if dense_first or config.get("decoder_sparse_step", 1) != 1:
        found.append("mlp_only_layers, decoder_sparse_step: dense and routed layers mixed")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        found.append(f"hidden_act: {activation} (SwiGLU only)")
    model_type = config.get("model_type")
    if model_type not in _MODEL_TYPES and not found:
        found.append(f"model_type: {model_type} (known are {', '.join(_MODEL_TYPES)})")
    return found


def _shape_from(where: str, name: str, config: Mapping[str, Any]) -> Shape:
    refused = _refusals(config)
    if refused:
        raise CalibrationError(f"{where}: cannot be represented: {'; '.join(refused)}")
    hidden_size = _size(where, config, "hidden_size")
    heads = _size(where, config, "num_attention_heads")
    head_dim = config.get("head_dim") or hidden_size // heads
    kv_heads = _whole(where, "num_key_value_heads", config.get("num_key_value_heads") or heads)
    if head_dim not in _HEAD_DIMS or hidden_size % _TILE or heads % kv_heads:
        raise CalibrationError(
            f"{where}: cannot be represented: head_dim {head_dim} (64 or 128), hidden_size {hidden_size} (a multiple "
            f"of {_TILE}), {heads} attention heads over {kv_heads} key-value heads (a whole number each)"
        )
    rope = config.get("rope_parameters")
    theta = config.get("rope_theta") or (rope.get("rope_theta") if isinstance(rope, Mapping) else None) or 10000.0
    dtype = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    notes = []
    if dtype == "float16":
        notes.append(f"{name}: float16 in its config.json, measured in bf16")
    if config.get("attention_bias") or config.get("model_type") in ("qwen2", "qwen2_moe"):
        notes.append(f"{name}: attention biases left out")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    return Shape(
        name=name,
        hidden_size=hidden_size,
        num_layers=_size(where, config, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_size(where, config, "vocab_size"),
        rope_theta=float(theta),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        qk_norm=config.get("model_type") in _QK_NORM_TYPES,
        sliding_window=window,
        notes=tuple(notes),
        **_mlp(where, config),
    )


def _mlp(where: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the sizes of the dense or routed MLP: families differ only in the names of the keys."""
    experts = next((config[key] for key in _EXPERT_COUNT_KEYS if config.get(key)), 0)
    if not experts or config.get("model_type") not in _MOE_TYPES:
        if experts:
            raise CalibrationError(f"{where}: cannot be represented: experts in model_type {config.get('model_type')}")
        return {"intermediate_size": _size(where, config, "intermediate_size")}
    per_token = _size(where, config, "num_experts_per_tok")
    if experts > _MAX_EXPERTS or per_token > min(experts, _MAX_EXPERTS_PER_TOKEN):
        raise CalibrationError(
            f"{where}: cannot be represented: {per_token} of {experts} experts per token (at most "
            f"{_MAX_EXPERTS_PER_TOKEN} of {_MAX_EXPERTS})"
        )
    mixtral = config.get("model_type") == "mixtral"
    return {
        "intermediate_size": 0,
        "num_experts": _whole(where, "num_experts", experts),
        "experts_per_token": per_token,
        "moe_intermediate_size": _size(where, config, "intermediate_size" if mixtral else "moe_intermediate_size"),
        "shared_expert_intermediate_size": config.get("shared_expert_intermediate_size") or 0,
        "norm_topk_prob": bool(config.get("norm_topk_prob", mixtral)),
    }


def _size(where: str, config: Mapping[str, Any], key: str) -> int:
    if key not in config:
        raise CalibrationError(f"{where}: {key} is missing; a Hugging Face config.json states it")
    return _whole(where, key, config[key])


def _whole(where: str, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CalibrationError(f"{where}: {key} is {value!r}; a whole number of 1 or more is allowed")
    return value
