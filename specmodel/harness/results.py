"""From the samples of a run to its calibration: tables to fit, and whole cycles that are only ever checked against."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

from specmodel.calibration import Calibration

__all__ = ["addition_errors", "calibration_of", "dispositions", "falls", "unmeasured"]

_METHODS = {"eagle3": "eagle3", "model": "draft_model"}
_DIGITS = 6
_NOISE = 0.005  # of a median: what counts as known
_HEALTHY = ("ok", "not_measured")  # of a setting: with one GPU there is nothing to measure
_USABLE = ("ok", "noisy", "throttled")
_NOTES = {
    "noisy": "noisy: the 95 % half-width of the median is above 0.5 %",
    "throttled": "throttled: over a tenth of the samples ran at a lower clock and were dropped",
}


def _row(point: Mapping[str, Any], value: str, *keys: str) -> dict[str, Any]:
    """Make a row: where the point lies, its value, its spread, and how many independent samples it rests on."""
    summary = point["summary"]
    row = {key: point[key] for key in keys if key in point}
    row["comm"] = point["comm"]
    row[value] = float(f"{summary['median_ms']:.{_DIGITS}g}")
    row["sd_cycle_ms" if value == "cycle_ms" else "sd_ms"] = float(f"{summary['sd_ms']:.3g}")
    row["samples"] = summary["effective_samples"]
    if point["disposition"] in _NOTES:
        row["note"] = _NOTES[point["disposition"]]
    return row


def _graph(point: Mapping[str, Any]) -> dict[str, Any]:
    """State how the drafter ran, where it differs from the format's default (one graph a step)."""
    if not point.get("cuda_graph", True):
        return {"cuda_graph": False}
    return {"graph_scope": "cycle"} if point.get("graph_scope") == "cycle" else {}


def _cycle_row(point: Mapping[str, Any]) -> dict[str, Any]:
    row = _row(point, "cycle_ms", "num_steps", "batch", "context_tokens")
    if point["num_steps"] == 0:
        return row
    runs = [run for run in point["runs"] if run.get("disposition") in _USABLE and run.get("drafts")]
    emitted, drafts = sum(run["tokens_emitted"] for run in runs), sum(run["drafts"] for run in runs)
    return {**row, **_graph(point), **({"acceptance_length": round(emitted / drafts, 5)} if drafts else {})}


def _rows(content: Mapping[str, Any], accepted: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """Make the rows of every table, in the order of the plan."""
    allowed, world = set(accepted), content["run"]["world"]
    rows: dict[str, list[dict[str, Any]]] = {"verify": [], "draft": [], "allreduce": [], "cycles": []}
    for point in content["points"]:
        kind, disposition = point["kind"], point["disposition"]
        if kind == "cycle" and disposition in _USABLE:
            rows["cycles"].append(_cycle_row(point))
        elif disposition not in allowed:
            continue
        elif kind == "verify" and point.get("part", "all") == "all":
            graph = {} if point["cuda_graph"] else {"cuda_graph": False}
            rows["verify"].append({**_row(point, "time_ms", "tokens", "batch", "context_tokens"), **graph})
        elif kind == "draft":
            rows["draft"].append({**_row(point, "time_ms", "num_steps", "batch", "context_tokens"), **_graph(point)})
        elif kind == "allreduce" and point["regime"] == "hot":
            rows["allreduce"].append({**_row(point, "time_ms", "size_bytes", "in_graph"), "num_gpus": world})
    return rows


def _chosen(selected: Mapping[str, Mapping[str, Any]]) -> str:
    """Describe what NCCL chose, as ranges of sizes with one choice each."""
    parts: list[tuple[str, int]] = []
    for size, choice in sorted(selected.items(), key=lambda item: int(item[0])):
        channels = choice.get("channels")
        label = f"{choice['algorithm']} {choice['protocol']}" + (f" on {channels} channels" if channels else "")
        if parts and parts[-1][0] == label:
            parts[-1] = (label, int(size))
        else:
            parts.append((label, int(size)))
    return "; ".join(f"{label} to {size} bytes" for label, size in parts)


def _evidence(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = []
    world = content["run"]["world"]
    for name, setting in content["comm"].items():
        chosen = _chosen(setting["nccl"].get("selected", {}))
        if setting["disposition"] == "not_run":
            continue
        if setting["disposition"] not in _HEALTHY:
            text = f"{name}: {setting['disposition']}"
        elif chosen:
            text = f"{name}: {chosen}"
        else:
            continue
        fact = {"about": "nccl_setting", "value": text, "ranks": world, "source": "NCCL's log of an untimed run"}
        entries.append(fact)
    version = content["software"].get("nccl")
    if world > 1 and version:
        entries.append({"about": "allreduce_implementation", "value": f"NCCL {version}", "ranks": world})
    return entries


def _caveats(content: Mapping[str, Any], accepted: Iterable[str]) -> list[str]:
    software, measured, effort = content["software"], content["measured"], content["run"]["effort"]
    world = content["run"]["world"]
    devices = content["devices"]
    name = devices[0].get("name", "unknown GPU") if devices else "unknown GPU"
    versions = [f"{label} {software[key]}" for key, label in _VERSIONS.items() if software.get(key)]
    lines = [
        f"{world} x {name}; {', '.join(versions)}",
        f"harness sources sha256 {content['run']['source_sha256']}",
        "random weights of the real shapes in bf16; acceptance is drawn from the stated curve, so acceptance_length is "
        "that of the drawn run; no tokenizer, sampler or scheduler",
        "verify: by the host's clock, from the upload of positions to the result read back, as a cycle pays for it; "
        "draft and all-reduce: by GPU events",
        "time_ms is the median of the medians of separate processes; sd_ms / sqrt(samples) is its standard error, "
        "differences between processes included",
        f"whole sweeps in fresh processes, shuffled: {_sweeps(content)}; cycles in {effort['cycle_repeats']}",
    ]
    if measured.get("copy_bytes_per_ms"):
        copy, gemm = measured["copy_bytes_per_ms"] / 1e9, (measured.get("gemm_flops_per_ms") or 0.0) / 1e9
        lines.append(f"this card, measured at the start: copy {copy:.2f} TB/s, bf16 matrix product {gemm:.0f} TFLOP/s")
    if content["run"].get("sittings", 1) > 1:
        lines.append(
            f"measured in {content['run']['sittings']} sittings: cards of one name differ by some percent, should the "
            "machine have changed between them"
        )
    if fallen := falls(content):
        share, before, after, point = fallen[0]
        where = f"batch {point['batch']}, context {point['context_tokens']}, {point['comm']}"
        lines.append(
            f"{len(fallen)} verify passes take less time than with fewer tokens, up to {100 * share:.1f} % "
            f"({before} to {after} tokens, {where}): the libraries choose their kernels by size"
        )
    lines += [f"cut for time: {cut}" for cut in content["run"]["cut"]]
    lines += [f"flagged by the machine: {flag}" for flag in content.get("flags", [])]
    shapes = [content["target"], *([content["draft"]["shape"]] if content["draft"] else [])]
    lines += [note for shape in shapes for note in shape.get("notes", ())]
    lines += [f"left out, {text}" for text in unmeasured(content, 8, accepted)]
    return lines


def _sweeps(content: Mapping[str, Any]) -> int:
    """Count the repeats that were run, of those that the effort allowed."""
    return len({run["repeat"] for point in content["points"] for run in point["runs"]})


_VERSIONS = {
    "driver": "driver",
    "cuda_runtime": "CUDA",
    "cublaslt": "cuBLASLt",
    "nccl": "NCCL",
    "compiler": "compiler",
}


def dispositions(content: Mapping[str, Any]) -> Counter[str]:
    """Count the points of a run by disposition."""
    return Counter(point["disposition"] for point in content["points"])


def unmeasured(content: Mapping[str, Any], limit: int, accepted: Iterable[str] = ("ok", "noisy")) -> list[str]:
    """Name the settings and points that ended in no accepted number, with why; at most `limit` points."""
    lost = {name: setting for name, setting in content["comm"].items() if setting["disposition"] not in _HEALTHY}
    texts = [f"setting {name}: {', '.join([s['disposition'], *s['reasons'][:1]])}" for name, s in lost.items()]
    bad = [point for point in content["points"] if point["disposition"] not in set(accepted)]
    bad = [point for point in bad if point["comm"] not in lost]
    texts += [
        f"{point['key']} ({point['comm']}): {', '.join([point['disposition'], *point['reasons'][:1]])}"
        for point in bad[:limit]
    ]
    return texts + ([f"and {len(bad) - limit} more"] if len(bad) > limit else [])


def falls(content: Mapping[str, Any]) -> list[tuple[float, int, int, dict[str, Any]]]:
    """List the verify passes that take less time than the next one of fewer tokens, beyond noise, the largest first.

    Such a time is no fault (libraries choose their kernels by size), but whoever reads a table should know.

    Returns
    -------
    list of (share, tokens before, tokens after, point)
        By how much the time falls, as a share of the time before, if by more than 0.5 % and two standard errors.
    """
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for point in content["points"]:
        if point["kind"] == "verify" and point.get("part", "all") == "all" and point["disposition"] in _USABLE:
            where = (point["comm"], point["batch"], point["context_tokens"], point["cuda_graph"])
            lines.setdefault(where, []).append(point)
    found = []
    for line in lines.values():
        for less, more in pairwise(sorted(line, key=lambda point: int(point["tokens"]))):
            a, b = less["summary"], more["summary"]
            noise_ms = 2 * math.hypot(*(s["sd_ms"] / math.sqrt(s["effective_samples"]) for s in (a, b)))
            if a["median_ms"] - b["median_ms"] > max(noise_ms, _NOISE * a["median_ms"]):
                found.append((1 - b["median_ms"] / a["median_ms"], less["tokens"], more["tokens"], more))
    return sorted(found, key=lambda fall: -fall[0])


def addition_errors(content: Mapping[str, Any]) -> list[tuple[dict[str, Any], float]]:
    """Compare every measured cycle with the sum of its measured parts.

    Returns
    -------
    list of (point, error)
        The error is (verify(batch (K+1)) + draft(K)) / cycle - 1, for every cycle whose parts were measured.
    """
    medians = {
        (point["comm"], point["key"]): point["summary"]["median_ms"]
        for point in content["points"]
        if point["disposition"] in _USABLE
    }
    found = []
    for point in content["points"]:
        if point["kind"] != "cycle" or point["disposition"] not in _USABLE:
            continue
        batch, context, num_steps = point["batch"], point["context_tokens"], point["num_steps"]
        mode = point["key"].rsplit("/", 1)[1]
        verify = medians.get((point["comm"], f"verify/n{batch * (num_steps + 1)}/b{batch}/c{context}/graph/all"))
        draft = medians.get((point["comm"], f"draft/k{num_steps}/b{batch}/c{context}/{mode}")) if num_steps else 0.0
        if verify is not None and draft is not None:
            found.append((point, (verify + draft) / point["summary"]["median_ms"] - 1.0))
    return found


def calibration_of(
    content: Mapping[str, Any], *, name: str, samples_name: str, samples_sha256: str, keep_noisy: bool = False
) -> Calibration:
    """Make the calibration of a run from its samples document.

    Parameters
    ----------
    content
        The document (see `samples.document`).
    name
        The calibration's name.
    samples_name, samples_sha256
        The file of the raw samples and its fingerprint, for the provenance.
    keep_noisy
        Take tables' points whose median is not known to 0.5 %, or that lost samples to low clocks, too, with a note.

    Raises
    ------
    CalibrationError
        The document does not make a well-formed calibration.
    """
    from specmodel import io

    accepted = _USABLE if keep_noisy else ("ok",)
    rows = _rows(content, accepted)
    target, draft, world = content["target"], content["draft"], content["run"]["world"]
    steps = [point["num_steps"] for point in content["points"] if point["kind"] == "cycle"]
    device = content["devices"][0].get("name", "unknown") if content["devices"] else "unknown"
    gpu = str(device).removeprefix("NVIDIA ")
    tool = content["run"]["tool"]
    longest, curve = max(steps, default=0), list(content["conditional"])
    curve = (curve + curve[-1:] * longest)[:longest]  # the harness repeats the last value for later positions
    model: dict[str, Any] = {
        "target": target["name"],
        "method": "none" if draft is None else _METHODS[draft["kind"]],
        "hidden_size": target["hidden_size"],
        "num_layers": target["num_layers"],
        "activation_bytes": 2,
    }
    if draft is not None:
        model["draft"] = draft["shape"]["name"]
    if target["num_experts"]:
        model |= {"num_experts": target["num_experts"], "experts_per_token": target["experts_per_token"]}
    nvls_off = {"NCCL_NVLS_ENABLE": "0"} if world > 1 else {}
    used = {point["comm"] for point in content["points"] if point["disposition"] in _USABLE} | {"default"}
    settings = {
        key: {"env": {**nvls_off, **setting["env"]}, "flags": list(setting["flags"])}
        for key, setting in content["comm"].items()
        if key in used
    }
    document: dict[str, Any] = {
        "schema": "specmodel.calibration/1",
        "name": name,
        "description": " with ".join([target["name"], *([model["draft"]] if draft else [])]) + f" on {world} x {gpu}",
        "provenance": {
            "source": f"{tool} measure; raw samples {samples_name}, sha256 {samples_sha256}",
            "date": content["run"]["started"][:10],
            "caveats": _caveats(content, accepted),
        },
        "system": {
            "gpu": gpu,
            "num_gpus": world,
            "nodes": 1,
            "tensor_parallel": world,
            "engine": "specmodel harness",
            "engine_version": tool.rpartition(" ")[2],
        },
        "model": model,
        "comm": settings,
        "measurements": {key: rows[key] for key in ("verify", "draft", "allreduce")},
        "acceptance": [{"num_steps": len(curve), "conditional": curve}] if curve else [],
        "evidence": _evidence(content),
        "validation": {"cycles": rows["cycles"]},
    }
    return io.from_dict(document, name)
