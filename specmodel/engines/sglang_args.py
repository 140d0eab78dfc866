"""SGLang's server arguments, as a log prints them (`server_args=ServerArgs(...)`) or as `/server_info` returns them.

Read by name: the order of fields changes between releases and nested values come and go. Nothing is evaluated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specmodel.engines.reading import CUSTOM_ALLREDUCE, NCCL_ALLREDUCE, Reading, Shape
from specmodel.engines.redact import model_name, version_of

__all__ = ["ServerArgs", "from_mapping", "from_text", "shape_of"]

METHODS = {
    "EAGLE3": "eagle3",
    "EAGLE": "eagle",
    "NEXTN": "mtp",
    "MTP": "mtp",
    "STANDALONE": "draft_model",
    "NGRAM": "ngram",
    "DFLASH": "parallel",
    "DSPARK": "parallel",
}
"""SGLang's speculative algorithms in the words of the calibration file."""

COMM_FLAGS = {
    "disable_custom_all_reduce": "--disable-custom-all-reduce",
    "enable_nccl_nvls": "--enable-nccl-nvls",
    "enable_symm_mem": "--enable-symm-mem",
    "enable_torch_symm_mem": "--enable-torch-symm-mem",
    "enable_mscclpp": "--enable-mscclpp",
    "enable_flashinfer_allreduce_fusion": "--enable-flashinfer-allreduce-fusion",
}

DEFAULT_LOG_INTERVAL = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerArgs:
    """What of the server's arguments matters here."""

    system: tuple[tuple[str, Any], ...]
    model: tuple[tuple[str, Any], ...]
    shape: Shape | None
    """None when the arguments name no speculative algorithm, or not its step counts."""
    speculating: bool | None
    """None where the algorithm is not among what is there, as in a line that was cut."""
    adaptive: bool
    flags: tuple[str, ...]
    log_interval: int
    graph_sizes: tuple[int, ...]
    graphs_disabled: bool
    tensor_parallel: int
    data_parallel: int

    def into(self, reading: Reading) -> None:
        """Put the facts into a reading."""
        reading.system.update(self.system)
        reading.model.update(self.model)
        reading.flags, reading.settings_known = list(self.flags), True
        reading.shape = self.shape
        if self.graph_sizes:
            reading.model["cuda_graph_sizes"] = list(self.graph_sizes)
            reading.model["cuda_graph_unit"] = "sequences"

    def allreduce(self) -> str | None:
        """Name the all-reduce in force, as far as the arguments say it; None on one GPU."""
        if self.tensor_parallel < 2:
            return None
        if "--disable-custom-all-reduce" in self.flags:
            return NCCL_ALLREDUCE
        other = next((flag for flag in self.flags if "symm-mem" in flag or "mscclpp" in flag or "fusion" in flag), None)
        if other:
            return f"the engine's own, with {other}: NCCL settings matter only for messages above its limit"
        return CUSTOM_ALLREDUCE


_FIELD = re.compile(
    r"(?<![\w.])['\"]?(\w+)['\"]?\s*[=:]\s*"
    r"('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[^\]]*\]|[^,\s()\[\]{}'\"]+)(?=\s*[,)}\]])"
)


def from_text(text: str) -> ServerArgs:
    """Read the arguments from the text of a log line; what a cut line lacks is unknown."""
    fields: dict[str, str] = {}
    for name, value in _FIELD.findall(text):
        fields.setdefault(name, value)

    return _read({name: _plain(value) for name, value in fields.items()})


def from_mapping(args: dict[str, Any]) -> ServerArgs:
    """Read the arguments from the mapping that `/server_info` returns."""
    return _read(args)


def _plain(text: str) -> Any:
    if text[0] in "'\"":
        return text[1:-1]
    if text[0] == "[":
        numbers = re.findall(r"\d+", text)
        return [int(number) for number in numbers if len(number) < 10]
    if text in ("True", "true"):
        return True
    if text in ("False", "false"):
        return False
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _read(args: Mapping[str, Any]) -> ServerArgs:
    get = args.get

    def count(*names: str) -> int | None:
        for name in names:
            value = _number(get(name))
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**6:
                return value
        return None

    algorithm = get("speculative_algorithm")
    algorithm = algorithm.upper() if isinstance(algorithm, str) and algorithm.lower() not in ("none", "") else None
    speculating = algorithm is not None or (False if "speculative_algorithm" in args else None)
    stated_tensor = count("tp_size", "tensor_parallel_size")
    tensor, data = stated_tensor or 1, count("dp_size", "data_parallel_size") or 1
    pipeline, nodes, expert = count("pp_size") or 1, count("nnodes"), count("ep_size")
    attention_dp = get("enable_dp_attention") is True
    system: dict[str, Any] = {"engine": "sglang"}
    if stated_tensor is not None:
        # Under DP attention the data-parallel ranks share the tensor-parallel GPUs.
        system |= {"num_gpus": tensor * pipeline * (1 if attention_dp else data), "tensor_parallel": tensor}
        system["data_parallel"] = data
    if nodes is not None and nodes > 1:
        system["nodes"] = nodes
    if expert is not None and expert > 1:
        system["expert_parallel"] = expert
    stated = get("version")
    if isinstance(stated, str) and (version := version_of(stated)) is not None:
        system["engine_version"] = version
    model: dict[str, Any] = {}
    for key, name in (("target", "model_path"), ("draft", "speculative_draft_model_path")):
        value = get(name)
        if isinstance(value, str) and (short := model_name(value)):
            model[key] = short
    if algorithm is not None:
        model["method"] = METHODS.get(algorithm)
    elif speculating is False:
        model["method"] = "none"
    sizes = get("cuda_graph_bs_decode") or get("cuda_graph_bs")
    return ServerArgs(
        system=tuple(system.items()),
        model=tuple((key, value) for key, value in model.items() if value),
        shape=shape_of(
            algorithm,
            *(_number(get(f"speculative_{name}")) for name in ("num_steps", "eagle_topk", "num_draft_tokens")),
        ),
        speculating=speculating,
        adaptive=get("speculative_adaptive") is True,
        flags=tuple(flag for name, flag in COMM_FLAGS.items() if get(name) is True),
        log_interval=count("decode_log_interval") or DEFAULT_LOG_INTERVAL,
        graph_sizes=tuple(sorted({n for n in sizes if isinstance(n, int) and n > 0}))
        if isinstance(sizes, list)
        else (),
        graphs_disabled=get("disable_cuda_graph") is True or get("disable_decode_cuda_graph") is True,
        tensor_parallel=tensor,
        data_parallel=data,
    )


def _number(value: Any) -> Any:
    """Return a whole number that is stated as text as a number; anything else as it is."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 7 else value


def shape_of(algorithm: str | None, steps: Any, topk: Any, draft_tokens: Any) -> Shape | None:
    """Return the draft shape of SGLang's three numbers.

    A chain (topk 1) verifies steps + 1 tokens whatever else was asked for. DFLASH and DSPARK draft one block, n-gram
    drafting a tree without depth: there the verified tokens, less the root, are the longest possible chain.
    """
    numbers = [
        n if isinstance(n, int) and not isinstance(n, bool) and 0 < n < 1000 else None
        for n in (steps, topk, draft_tokens)
    ]
    depth, width, tokens = numbers
    if algorithm in ("DFLASH", "DSPARK", "NGRAM"):
        return Shape(num_steps=tokens - 1) if tokens is not None and tokens > 1 else None
    if depth is None:
        return None
    if width is None or width == 1:
        return Shape(num_steps=depth)
    if tokens is None or tokens < 2:
        return None
    return Shape(num_steps=depth, topk=width, num_draft_tokens=tokens)
