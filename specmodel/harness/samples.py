"""The raw samples of a measuring run, as one versioned JSON document (`specmodel.samples/1`).

It holds everything that the calibration was made from, every sample of every run with its disposition, and what was
asked for and not measured. It is versioned apart from the tool: keys are only ever added within version 1.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from specmodel.harness.environment import CommPlan, recorded_environment
from specmodel.harness.group import read_records
from specmodel.harness.plan import Plan
from specmodel.harness.pooling import PRIMARY, pool
from specmodel.harness.runner import read_diary

__all__ = ["DISPOSITIONS", "SCHEMA", "document", "json_schema", "read_samples", "write_samples"]

SCHEMA = "specmodel.samples/1"
DISPOSITIONS = (
    "ok",
    "noisy",
    "throttled",
    "skewed",
    "wrong",
    "impossible",
    "not_supported",
    "timeout",
    "not_run",
    "not_measured",
)
_POINT_FIELDS = (
    "kind",
    "tokens",
    "num_steps",
    "size_bytes",
    "batch",
    "context_tokens",
    "cuda_graph",
    "graph_scope",
    "verify_cuda_graph",
    "part",
    "in_graph",
    "regime",
    "cycles",
)
_RUN_FIELDS = (
    "disposition",
    "reasons",
    "samples",
    "dropped",
    "clocks",
    "skew",
    "check",
    "steps",
    "parts",
    "operations",
    "tokens_emitted",
    "accepted_per_position",
    "drafts",
    "acceptance_length",
    "tok_s",
    "gap_ms",
    "elapsed_ms",
)
_SAMPLE_DIGITS = 6  # of a millisecond: a nanosecond, below any timer here
_DIGITS = 7


def _rounded(value: Any, digits: int | None = None) -> Any:
    """Round numbers: samples to the nanosecond, others to seven significant digits; what is not finite becomes null."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, digits) if digits is not None else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item, digits) for item in value]
    return value


def _run_of(record: Mapping[str, Any], repeat: int) -> dict[str, Any]:
    run = {"repeat": repeat, **{key: record[key] for key in _RUN_FIELDS if key in record}}
    run["samples"] = _rounded(run.get("samples", {}), _SAMPLE_DIGITS)
    return {key: value if key == "samples" else _rounded(value) for key, value in run.items()}


def _collect(folder: Path) -> dict[tuple[str, str], list[tuple[int, dict[str, Any]]]]:
    """Gather the point records and the lost points of all passes, by setting and key."""
    found: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
    for entry in read_diary(folder):
        if entry.get("entry") == "pass":
            for record in read_records(folder / f"{entry['stem']}.rank0.jsonl"):
                if record.get("record") == "point":
                    found.setdefault((entry["comm"], record["key"]), []).append((entry["repeat"], record))
        elif entry.get("entry") == "lost":
            found.setdefault((entry["comm"], entry["key"]), []).append((entry["repeat"], {**entry, "samples": {}}))
    return found


def _points(plan: Plan, folder: Path) -> list[dict[str, Any]]:
    """List every planned point under every setting, with its runs, or with why it has none."""
    found = _collect(folder)
    given_up = {entry["comm"]: entry for entry in read_diary(folder) if entry.get("entry") == "setting"}
    points = []
    for setting in plan.request.comm:
        for point in plan.points_of(setting, 0):
            runs = found.get((setting.name, point.key), [])
            records = [{"kind": point.kind, **record} for _, record in runs]
            entry: dict[str, Any] = {"key": point.key, "comm": setting.name}
            entry |= {key: point.fields[key] for key in _POINT_FIELDS if key in point.fields}
            pooled = pool(records)
            disposition: str = pooled.disposition
            reasons = [reason for record in records for reason in record.get("reasons", ())]
            if not runs and setting.name in given_up:
                disposition = given_up[setting.name]["disposition"]
                reasons = given_up[setting.name]["reasons"]
            summary = {key: value for key, value in dataclasses.asdict(pooled).items() if key != "disposition"}
            entry |= {
                "disposition": disposition,
                "reasons": list(dict.fromkeys(reasons)),
                "summary": _rounded({"series": PRIMARY[point.kind], **summary}),
                "work": _rounded(next((record["work"] for record in records if "work" in record), {})),
                "runs": [_run_of(record, repeat) for repeat, record in runs],
            }
            points.append(entry)
    return points


def _host(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the processor, its cores and the kernel's version; a kernel's suffix names who built it."""
    kept = {key: facts[key] for key in ("cpu", "cores", "load_average") if key in facts}
    version = re.match(r"\d+(\.\d+)*", str(facts.get("kernel", "")))
    return {**kept, **({"kernel": version.group()} if version else {})}


def _comm(plan: Plan, setting: CommPlan, folder: Path, starts: Mapping[str, Any]) -> dict[str, Any]:
    diary = read_diary(folder)
    probe: dict[str, Any] = next(
        (entry for entry in diary if entry.get("entry") == "probe" and entry["comm"] == setting.name), {}
    )
    lost: dict[str, Any] = next(
        (entry for entry in diary if entry.get("entry") == "setting" and entry["comm"] == setting.name), {}
    )
    start = starts.get(setting.name, {})
    nccl = probe.get("nccl", {}) if plan.request.world > 1 else {}
    if not lost and plan.request.world > 1 and not start:
        lost = {"disposition": "not_run", "reasons": ["the run ended before its turn"]}
    return {
        "env": setting.env,
        "flags": list(setting.flags),
        "environment": recorded_environment(start.get("environment", {})),
        "disposition": lost.get("disposition", "ok" if plan.request.world > 1 else "not_measured"),
        "reasons": lost.get("reasons", []),
        "nccl": nccl,
    }


def document(plan: Plan, folder: Path, *, tool: str, left_out: Iterable[str] = (), finished: str) -> dict[str, Any]:
    """Make the document of a finished run from its folder.

    Parameters
    ----------
    plan
        What was asked for.
    folder
        Where `runner.run_plan` kept its records.
    tool
        Name and version of the program.
    left_out
        What the budget left out while running.
    finished
        When, in UTC, as `YYYY-MM-DDTHH:MM:SSZ`.
    """
    request = plan.request
    passes = [entry for entry in read_diary(folder) if entry.get("entry") == "pass"]
    starts: dict[str, dict[str, Any]] = {}
    devices: dict[int, dict[str, Any]] = {}
    checks: dict[str, dict[str, Any]] = {}
    first: dict[str, Any] = {}
    for entry in passes:
        for rank in range(request.world):
            for record in read_records(folder / f"{entry['stem']}.rank{rank}.jsonl"):
                if record.get("record") == "start":
                    first = first or record
                    starts.setdefault(entry["comm"], record)
                    devices.setdefault(rank, {"rank": rank, **record.get("device", {})})
                elif record.get("record") == "check" and rank == 0:
                    worst = checks.setdefault(str(record.get("name")), record)
                    if (record.get("max_relative_error") or 0.0) > (worst.get("max_relative_error") or 0.0):
                        checks[str(record.get("name"))] = record
    opening = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    effort = dataclasses.asdict(plan.effort)
    return {
        "schema": SCHEMA,
        "run": {
            "id": plan.hash,
            "tool": tool,
            "source_sha256": plan.source_hash,
            "started": opening.get("started"),
            "finished": finished,
            "seed": request.seed,
            "world": request.world,
            "passes": len(passes),
            "sittings": len({entry.get("sitting") for entry in passes}),
            "effort": {key: value for key, value in effort.items() if key != "cut"},
            "cut": [*plan.effort.cut, *left_out],
            "estimate_ms": _rounded(plan.estimate_ms),
            "budget_ms": request.budget_ms,
        },
        "target": _rounded(dataclasses.asdict(request.target)),
        "draft": None
        if request.draft is None
        else {**_rounded(dataclasses.asdict(request.draft)), "first_step_rows": request.first_step_rows},
        "conditional": list(request.conditional),
        "host": _host(first.get("host", {})),
        "software": first.get("software", {}),
        "devices": [_rounded(devices[rank]) for rank in sorted(devices)],
        "measured": _rounded(first.get("measured", {})),
        "overhead": _rounded(first.get("overhead", {})),
        "flags": first.get("flags", []),
        "comm": {setting.name: _comm(plan, setting, folder, starts) for setting in request.comm},
        "checks": [_rounded({k: v for k, v in check.items() if k != "record"}) for check in checks.values()],
        "points": _points(plan, folder),
    }


def write_samples(content: Mapping[str, Any], path: Path) -> str:
    """Write the document, compact and gzipped, whole or not at all; return the sha256 of the file."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    data = gzip.compress(text.encode(), compresslevel=9, mtime=0)
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)
    return hashlib.sha256(data).hexdigest()


def read_samples(path: Path) -> dict[str, Any]:
    """Read a document, gzipped or plain."""
    data = path.read_bytes()
    text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    content: dict[str, Any] = json.loads(text)
    return content


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of the document."""
    schema: dict[str, Any] = json.loads(
        (Path(__file__).parent / "schema" / "samples-1.json").read_text(encoding="utf-8")
    )
    return schema
