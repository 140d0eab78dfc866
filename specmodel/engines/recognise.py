"""Which format a source has: told by its content, by names that only that format uses."""

from __future__ import annotations

import re

from specmodel.engines import llama_bench
from specmodel.engines.stream import failure

__all__ = ["FAMILIES", "format_of", "logged"]

FAMILIES = {
    "sglang": "SGLang",
    "vllm": "vLLM",
    "trtllm": "TensorRT-LLM",
    "llamacpp": "llama.cpp",
    "nccl": "NCCL and nccl-tests",
    "nsys": "nsys stats",
    "torch": "PyTorch profiler",
    "inferencex": "InferenceX golden acceptance lengths",
}
"""What `--from` takes."""

# Each format of a JSON document with keys that all stand in its first part, most telling first.
_JSON: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    ("torch", (("traceEvents",),)),
    ("nccl-json", (("out_of_place", "in_place"),)),
    ("trtllm-metrics", (("iterLatencyMS", "inflightBatchingStats"), ("iterLatencyMS", "specDecodingStats"))),
    ("trtllm-bench", (("world_info", "performance"), ("world_info", "decoding_stats"))),
    ("sglang-dspark-table", (("sample_batch_tokens", "sample_steps_per_sec"), ("bias_seconds", "theta_seconds"))),
    ("sglang-dspark-records", (("num_verify_tokens", "step_time"),)),
    ("sglang-schedule", (("candidate_steps",),)),
    ("sglang-bench-speculative", (("acc_length", "step_time"),)),
    ("sglang-bench-one-batch", (("batch_size", "last_gen_throughput"), ("batch_size", "overall_throughput"))),
    (
        "vllm-bench",
        (("spec_decode_num_drafts",), ("endpoint_type", "median_tpot_ms"), ("burstiness", "median_tpot_ms")),
    ),
    ("sglang-bench-serving", (("accept_length", "median_tpot_ms"), ("total_output_tokens_retokenized",))),
    ("vllm-bench", (("mean_tpot_ms", "output_throughput"),)),
    ("sglang-loads", (("decode_moments",), ("loads", "accelerator"))),
    ("sglang-server-info", (("internal_states",), ("avg_spec_accept_length",), ("step_time_dict",))),
    ("sglang-server-info", (("tp_size", "speculative_algorithm"),)),
    (
        "sglang-generate",
        (("meta_info",), ("spec_accept_histogram",), ("spec_correct_drafts_histogram",), ("spec_verify_ct",)),
    ),
    ("llamacpp-bench", (("n_gen", "avg_ns"), ("n_gen", "avg_ts"))),
    ("llamacpp-timings", (("predicted_n", "predicted_ms"),)),
)

_KEY = re.compile(rb'"([A-Za-z_]\w{0,80})"\s*:')
_SAMPLE = re.compile(rb"(?m)^(sglang[:_]|vllm[:_]|llamacpp[:_]|trtllm_)[\w:]+(?:\{[^}\n]*\})?\s+[-+]?[\d.]")
_TABLE = re.compile(rb"(?m)^.{0,200}(?:# *nThread \d|#\s+Rank\s+\d+ .*Pid|redop\s+(?:root\s+)?time)")
_NSYS = re.compile(rb'(?m)^"?(?:Time \(%\)|Range)"?,.{0,40}Total (?:Proj )?Time \(')
_LLAMA_BENCH = re.compile(llama_bench.FORMAT.pattern.encode())
_TRTLLM_YAML = re.compile(rb"(?m)^(?:speculative_config|cuda_graph_config|enable_iter_perf_stats|print_iter_log):")
_GOLDEN = re.compile(
    rb"(?m)^[\w.\"'/-]+:[ \t]*\r?\n(?:[ \t]*#.*\n)*[ \t]+[\w.\"'-]+:[ \t]*\r?\n[ \t]+[\"']?\d+[\"']?:[ \t]*\d"
)


_LOG = re.compile(
    rb"Decode batch[., ]|Prefill batch[., ]|server_args=|SpecDecoding metrics:|Avg prompt throughput:|iter = \d+, "
    rb"|eval time =|Initializing a V\d"
)


def logged(text: bytes) -> bool:
    """Whether lines of an engine's log stand in a text, whatever was pasted into it."""
    return _LOG.search(text) is not None


def format_of(head: bytes, source: str, family: str | None) -> str:
    """Return the name of the format of a source, told by its first bytes; `log` where none of the documents fits.

    Raises
    ------
    CalibrationError
        It is of another family than the one that the user names.
    """
    found = _format(head)
    if family is not None and found != "log" and not found.startswith(family):
        remedy = f"leave --from {family} away, or name another file"
        raise failure(source, FAMILIES[family], f"the format {found}", remedy)
    return found


def _format(head: bytes) -> str:
    start = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if re.match(rb'\{|\[\s*[\[{"]', start):
        keys = {key.decode() for key in _KEY.findall(start)}
        for name, choices in _JSON:
            if any(all(key in keys for key in choice) for choice in choices):
                return name
        return "log"
    if logged(start):
        return "log"
    if found := _SAMPLE.search(start):
        return f"{found[1][:-1].decode()}-prometheus"
    if _TABLE.search(start):
        return "nccl-table"
    if _LLAMA_BENCH.search(start):
        return "llamacpp-bench-text"
    if _NSYS.search(start):
        return "nsys"
    if _GOLDEN.search(start):
        return "inferencex"
    return "trtllm-yaml" if _TRTLLM_YAML.search(start) else "log"
