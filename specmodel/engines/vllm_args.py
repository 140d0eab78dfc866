"""What vLLM prints of its configuration at start-up, read by name from `key=value` and `'key': value` alike."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from specmodel.engines.reading import CUSTOM_ALLREDUCE, NCCL_ALLREDUCE, Reading
from specmodel.engines.redact import model_name, version_of

__all__ = ["METHODS", "VllmArgs", "read_into"]

METHODS = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "mtp": "mtp",
    "draft_model": "draft_model",
    "ngram": "ngram",
    "ngram_gpu": "ngram",
    "suffix": "ngram",
    "dflash": "parallel",
    "dspark": "parallel",
}
"""vLLM's speculative methods in the words of the calibration file; `*_mtp` is mtp."""


def _setting(name: str, value: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w.])['\"]?{name}['\"]?\s*[=:]\s*{value}")


_VERSION = re.compile(r"(?:LLM engine \(|API server version:? )v?(\d[\w.+]{0,40})")
_COUNTS = {
    "tensor_parallel": _setting("tensor_parallel_size", r"(\d{1,4})\b"),
    "data_parallel": _setting("data_parallel_size", r"(\d{1,4})\b"),
    "pipeline_parallel": _setting("pipeline_parallel_size", r"(\d{1,4})\b"),
}
_STEPS = re.compile(r"num_spec(?:ulative)?_tokens['\"]?\s*[=:]\s*(\d{1,3})\b")
_METHOD = re.compile(r"\bmethod['\"]?\s*[=:]\s*['\"](\w+)['\"]")
_NO_SPECULATION = _setting("speculative_config", "None")
_SPECULATION = re.compile(r"speculative_config['\"]?\s*[=:]\s*['\"]?(SpeculativeConfig\([^)]*\)|\{[^}]*\})")
_MODEL = _setting("model", r"['\"]([^'\"]+)['\"]")
_SIZES = _setting("cudagraph_capture_sizes", r"\[([\d, ]*)\]")
_EAGER = _setting("enforce_eager", "(True|False)")
_CUSTOM = _setting("disable_custom_all_reduce", "(True|False)")


@dataclass(slots=True)
class VllmArgs:
    """What of the configuration matters here; None where it was not printed."""

    version: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    model: dict[str, str] = field(default_factory=dict)
    speculating: bool | None = None
    num_steps: int | None = None
    synthetic: bool = False
    by_batch: bool = False
    eager: bool | None = None
    custom_allreduce: bool | None = None
    graph_sizes: tuple[int, ...] = ()

    @property
    def data_parallel(self) -> int:
        """Return the number of engines that share the load."""
        return self.counts.get("data_parallel", 1)

    def into(self, reading: Reading) -> None:
        """Put the facts into a reading."""
        reading.system["engine"] = "vllm"
        if self.version:
            reading.system["engine_version"] = self.version
        if "tensor_parallel" in self.counts:
            tensor = self.counts["tensor_parallel"]
            gpus = tensor * self.data_parallel * self.counts.get("pipeline_parallel", 1)
            reading.system |= {"num_gpus": gpus, "tensor_parallel": tensor, "data_parallel": self.data_parallel}
        reading.model.update(self.model)
        if self.speculating is False:
            reading.model["method"] = "none"
        if self.graph_sizes:
            reading.model.update(cuda_graph_sizes=list(self.graph_sizes), cuda_graph_unit="tokens")
        if self.by_batch:
            reading.caveats.append(f"{reading.source}: the number of drafts depends on the batch")
        self._allreduce(reading)

    def _allreduce(self, reading: Reading) -> None:
        ranks = self.counts.get("tensor_parallel", 1)
        reading.settings_known = self.custom_allreduce is not None
        if self.custom_allreduce is False:
            reading.flags = ["--disable-custom-all-reduce"]
        if ranks > 1 and self.custom_allreduce is not None:
            words = CUSTOM_ALLREDUCE if self.custom_allreduce else NCCL_ALLREDUCE
            reading.saw("allreduce_implementation", words, "engine configuration", ranks)


def read_into(args: VllmArgs, words: str) -> None:
    """Add what one line of the start-up states."""
    if version := _VERSION.search(words):
        args.version = version_of(version[1].rstrip("."))
    for key, pattern in _COUNTS.items():
        if (found := pattern.search(words)) and int(found[1]):
            args.counts[key] = int(found[1])
    speculation = _SPECULATION.search(words)
    outside = words.replace(speculation[0], "") if speculation else words
    if (model := _MODEL.search(outside)) and (name := model_name(model[1])):
        args.model["target"] = name
    if speculation is not None:
        _read_speculation(args, speculation[1])
    elif _NO_SPECULATION.search(words):
        args.speculating = False
    if found := _EAGER.search(words):
        args.eager = found[1] == "True"
    if found := _CUSTOM.search(words):
        args.custom_allreduce = found[1] == "False"
    if (sizes := _SIZES.search(words)) and (numbers := re.findall(r"\d{1,6}", sizes[1])):
        args.graph_sizes = tuple(sorted({int(n) for n in numbers} - {0}))


def _read_speculation(args: VllmArgs, words: str) -> None:
    args.speculating = True
    if (steps := _STEPS.search(words)) and int(steps[1]):
        args.num_steps = int(steps[1])
    if method := _METHOD.search(words):
        word = "mtp" if method[1].endswith("mtp") else method[1]
        if word in METHODS:
            args.model["method"] = METHODS[word]
    if (draft := _MODEL.search(words)) and (draft_name := model_name(draft[1])):
        args.model["draft"] = draft_name
    args.synthetic = (
        args.synthetic
        or re.search(r"['\"]synthetic['\"]|synthetic_acceptance_\w+['\"]?\s*[=:]\s*[\d\[]", words) is not None
    )
    by_batch = re.search(r"num_speculative_tokens_per_batch_size['\"]?\s*[=:]\s*\[", words)
    args.by_batch = args.by_batch or by_batch is not None
