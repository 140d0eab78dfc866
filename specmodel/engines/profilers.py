"""Profiles of the GPU side: `nsys stats` CSV and PyTorch profiler traces.

Spans of the CPU side (NVTX push/pop, `user_annotation`) are launch times and are not read. A profile knows neither the
batch nor the draft shape: its verify and draft times become rows where another source or the user states them.
"""

from __future__ import annotations

import csv
import io
import re
from itertools import pairwise
from typing import Any

from specmodel.engines.reading import Given, Reading, Samples, mapping, number, rounded, summarise, whole
from specmodel.engines.redact import gpu_name, model_name
from specmodel.engines.stream import Source, json_items, whole_text

__all__ = ["nsys", "torch_trace"]

METHODS = {"eagle3": "eagle3", "eagle": "eagle", "mtp": "mtp", "dspark": "parallel", "dflash": "parallel"}
"""InferenceX's words for drafters in those of the calibration file, the most telling first."""
SPANS = {
    "target_verify": "verify",
    "verify": "verify",
    "gpu_model_runner: forward": "verify",
    "draft": "draft",
    "eagle_draft": "draft",
    "gpu_model_runner: draft": "draft",
    "draft_extend": "draft_extend",
    "eagle_draft_extend": "draft_extend",
}
"""Names of spans, in SGLang, vLLM, or put there by users, in the words of a cycle."""

_HEADER = re.compile(r"Total (?:Proj )?Time \((?:ns|us|ms|s)\)")
_UNITS_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}
_IMPLEMENTATIONS = (
    (re.compile(r"ncclDevKernel_AllReduce|ncclKernel_AllReduce|ncclDevKernel_\w*AllReduce"), "NCCL"),
    (re.compile(r"cross_device_reduce"), "the custom all-reduce (cross_device_reduce)"),
    (re.compile(r"multimem_\w*all_?reduce|two_shot_all_reduce|one_shot_all_reduce", re.I), "symmetric memory"),
    (re.compile(r"all_?reduce_fusion|lamport", re.I), "a fused all-reduce (FlashInfer or TensorRT-LLM)"),
    (re.compile(r"userbuffers|mscclpp", re.I), "MSCCL++ or user buffers"),
)


def nsys(reading: Reading, source: Source, given: Given) -> None:
    """Read `nsys stats --format csv`: kernels by implementation of the all-reduce, and spans projected to the GPU."""
    lines = whole_text(source).splitlines()
    starts = [i for i, line in enumerate(lines) if _HEADER.search(line)]
    projected = False
    for start, end in pairwise([*starts, len(lines)]):
        # A report's name stands in the line before its header, or in none: then the last one holds.
        named = [line for line in lines[max(start - 4, 0) : start] if "sum" in line]
        projected = "gpu_proj" in named[-1] if named else projected
        table = list(csv.reader(io.StringIO("\n".join(lines[start:end]))))
        header = [name.strip() for name in table[0]]
        rows = [dict(zip(header, row, strict=True)) for row in table[1:] if len(row) == len(header)]
        unit = next(
            (m[1] for name in header if (m := re.fullmatch(r"Total (?:Proj )?Time \((ns|us|ms|s)\)", name))), None
        )
        if unit is None or not rows:
            continue
        cut = len([row for row in table[1:] if row and len(row) != len(header)])
        if cut:
            reading.dropped["rows cut off"] += cut
        projected = projected or any("Proj" in name for name in header)
        if "Style" in header and not projected:
            reading.dropped["spans of the CPU side (they are launch times)"] += len(rows)
        elif "Range" in header:
            _projected(reading, rows, header, unit)
        elif "Name" in header and "Num Calls" not in header:
            _kernels(reading, rows, unit)


def _kernels(reading: Reading, rows: list[dict[str, str]], unit: str) -> None:
    total = sum(_value(row, "Total", unit) or 0.0 for row in rows)
    for row in rows:
        ms, count = _value(row, "Total", unit), _value(row, "Instances", None)
        if ms is None or not count or not total:
            reading.dropped["rows without a time or a count"] += 1
            continue
        reading.used["kernels"] += 1
        name = row["Name"]
        used = next((word for pattern, word in _IMPLEMENTATIONS if pattern.search(name)), None)
        each = _value(row, "Med", unit) or ms / count
        shown = f"{1e3 * each:.5g} us each (median), {count:.0f} times, {100 * ms / total:.3g} % of kernel time"
        if used is not None:
            reading.saw("allreduce_implementation", used, "kernel names", None, shown)
        elif found := re.match(r"nccl(?:Dev)?Kernel_(\w+?)_(RING|TREE|NVLS\w*|COLLNET\w*|PAT)_(\w+)", name):
            words = f"NCCL {found[1]}: {found[2]} {found[3]}"
            reading.saw("nccl_setting", words, "kernel names", None, shown)


def _projected(reading: Reading, rows: list[dict[str, str]], header: list[str], unit: str) -> None:
    for row in rows:
        name = row["Range"].lstrip(":").strip()
        part, count = SPANS.get(name), _value(row, "Range Instances", None) or _value(row, "Instances", None)
        total = _value(row, "Total Proj", unit) or _value(row, "Total", unit)
        each = _value(row, "Proj Med", unit) or _value(row, "Med", unit) or (total / count if total and count else None)
        spread = _value(row, "Proj StdDev", unit) or _value(row, "StdDev", unit)
        if part is None or each is None:
            reading.dropped["spans of other names"] += 1
            continue
        sd = max(spread or 0.0, 0.005 * each)
        note = f"{reading.source}: span {name}, projected to the GPU, {count or 0:.0f} times"
        time = {"time_ms": rounded(each), "sd_ms": rounded(sd, 3), "samples": 1, "note": note}
        reading.spans.append({"part": part, **time})
        reading.used["spans"] += round(count or 1)


def _value(row: dict[str, str], start: str, unit: str | None) -> float | None:
    """Return the column whose name begins so, in ms where it has a unit."""
    for name, text in row.items():
        plain = name.partition(" (")[0]
        if plain not in (start, f"{start} Time") and not plain.startswith(f"{start} "):
            continue
        try:
            value = float(text.replace(",", ""))
        except ValueError:
            continue
        if 0 < value < 1e18:
            return value * (_UNITS_MS[unit] if unit else 1.0)
    return None


def torch_trace(reading: Reading, source: Source, given: Given) -> None:
    """Read a PyTorch profiler trace event by event: the GPU's spans of verify and draft."""
    head = source.head.decode("utf-8", "replace")
    if found := re.search(
        r'"deviceProperties"\s*:\s*\[(?:(?!\]\s*,?\s*")(?s:.)){0,2000}?"name"\s*:\s*"([^"]{1,80})"', head
    ):
        reading.system["gpu"] = gpu_name(found[1])
    if found := re.search(r'"world_size"\s*:\s*(\d{1,5})', head):
        reading.system["num_gpus"] = max(int(found[1]), 1)
    spans: dict[str, Samples] = {}
    kernels: dict[str, int] = {}
    for place, event in enumerate(json_items(source, b"traceEvents"), 1):
        if not isinstance(event, dict):
            continue
        kind, name = event.get("cat"), event.get("name")
        if not isinstance(name, str):
            continue
        if kind == "kernel":
            used = next((word for pattern, word in _IMPLEMENTATIONS if pattern.search(name)), None)
            if used is not None:
                kernels[used] = kernels.get(used, 0) + 1
        elif kind == "gpu_user_annotation" and (part := SPANS.get(name)) is not None:
            duration = number(event, "dur", high=1e9)
            if duration is not None:
                spans.setdefault(part, Samples()).add(duration / 1e3, place)
        elif kind == "user_annotation" and name in SPANS:
            reading.dropped["spans of the CPU side (they are launch times)"] += 1
    for used, count in kernels.items():
        reading.saw("allreduce_implementation", used, "kernel names", None, f"{count} launches")
    for part, samples in spans.items():
        summary = summarise(samples.values, band=3.0)
        reading.dropped["spans far from the median"] += summary.outliers
        reading.used["spans"] += summary.count
        note = f"{reading.source}: gpu_user_annotation {part}, median of {summary.count}"
        time = summary.row("time_ms") | {"note": note}
        reading.spans.append({"part": part, **time})


def golden(reading: Reading, document: Any, text: str, given: Given) -> None:
    """Read InferenceX's golden acceptance lengths: by model, thinking mode, and number of speculative tokens.

    They are measured on the coding prompts of SPEED-Bench, each number of tokens in a run of its own, the bonus token
    included and rounded to two digits. Keys that begin with an underscore hold what is known of the drafter; the rest
    stands in comments.
    """
    models = {key: value for key, value in document.items() if not str(key).startswith("_")}
    if len(models) != 1:
        reading.questions.append(f"{len(models)} models in one file; a calibration holds one: split it")
        return
    ((name, modes),) = models.items()
    if (target := model_name(str(name))) is not None:
        reading.model["target"] = target
    draft = mapping(document, "_metadata").get("draft-model")
    if isinstance(draft, str) and (short := model_name(draft)):
        reading.model["draft"] = short
    # The comment on the keys is the most telling; others name methods in passing.
    level = re.search(r"num_speculative_tokens \((\w+) level\)", text)
    for method in METHODS:
        if re.search(rf"\b{method}\b", level[1] if level is not None else text, re.I):
            reading.model["method"] = METHODS[method]
            break
    if (setup := re.search(r"(?m)^# *(dataset: [\w.|: -]{1,150})$", text)) is not None:
        reading.caveats.append(f"{reading.source}: {setup[1].strip()}")
    for mode, lengths in modes.items() if isinstance(modes, dict) else ():
        for steps, length in lengths.items() if isinstance(lengths, dict) else ():
            plain = int(steps) if isinstance(steps, str) and re.fullmatch(r"[0-9]{1,3}", steps) else steps
            k = whole({"k": plain}, "k", high=999)
            value = number({"l": length}, "l")
            if k is None or value is None or not 1 <= value <= k + 1:
                reading.dropped["lengths that cannot be"] += 1
                continue
            workload = re.sub(r"[^\w.-]", "_", str(mode))[:60]
            entry = {"workload": workload, "num_steps": k, "acceptance_length": rounded(value)}
            reading.acceptance.append(entry | {"note": f"{reading.source}: golden acceptance length"})
            reading.used["lengths"] += 1
