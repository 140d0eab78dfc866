"""Runs a plan: pass after pass, each in fresh processes, written down as it goes so that a broken run continues.

A pass is one repeat of all points under one communication setting. Passes are interleaved and points shuffled, so that
drift of the machine does not look like a difference between settings. Everything is kept in one folder until the
output is written: the plan's fingerprint, a diary of passes, and the records of every process.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specmodel.errors import SpecModelError, UsageError
from specmodel.harness.environment import CommPlan, child_environment, setting_text
from specmodel.harness.group import GroupResult, Progress, read_records, run_group
from specmodel.harness.nccl_log import parse_nccl_log
from specmodel.harness.plan import Plan, Point, order

__all__ = ["Run", "finished_keys", "job_of", "open_folder", "read_diary", "run_plan"]

_ATTEMPTS = 3  # of a pass, each without the point that hung or crashed the one before
_OVERRUN = 1.05
_CYCLES_SHARE = 0.8  # of a point's time limit
# What NCCL says of an algorithm or protocol that cannot run here; since 2.24 it fails instead of falling back.
_UNSUPPORTED = ("invalid usage", "no algorithm/protocol available")
_PROBES_AT_ONCE = 4
_POLL_MS = 200
_PROBE_LIMITS = {"min_samples": 3, "max_samples": 3, "min_ms": 0, "max_ms": 500, "warmup_ms": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Where and with what a plan is run."""

    plan: Plan
    binary: Path
    folder: Path
    nccl_library: str | None = None
    cpus: tuple[frozenset[int], ...] = ()
    say: Callable[[str], None] = print
    on_progress: Callable[[Progress], None] | None = None
    # Tells the parts of a continued run apart, which may be of different machines.
    sitting: str = field(default_factory=lambda: uuid.uuid4().hex[:8])


def open_folder(folder: Path, plan: Plan, *, resume: bool) -> None:
    """Make the folder of a run, or find the one of the same plan.

    Raises
    ------
    UsageError
        There is one already and `resume` is false, or it is of another plan.
    """
    path = folder / "plan.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8")).get("plan_hash")
        if not resume:
            raise UsageError(f"{folder} holds a run that did not end; continue it with --resume, or remove it")
        if found != plan.hash:
            raise UsageError(
                f"{folder} holds a run of another plan (other options, shapes, sources or GPU); give the same options "
                "to continue it, or another output"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    _write(path, json.dumps({"plan_hash": plan.hash, "started": started}) + "\n")


def _write(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def read_diary(folder: Path) -> list[dict[str, Any]]:
    """Read the entries of the diary: what was started, what was lost, how each pass ended."""
    return read_records(folder / "diary.jsonl")


def _note(folder: Path, entry: Mapping[str, Any]) -> None:
    path = folder / "diary.jsonl"
    # A line that a broken run left unfinished must not swallow this one.
    torn = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps(entry) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def finished_keys(folder: Path) -> dict[tuple[str, int], set[str]]:
    """Return, by setting and repeat, the keys of the points that need not be measured again."""
    done: dict[tuple[str, int], set[str]] = {}
    for entry in read_diary(folder):
        if entry.get("entry") == "pass":
            keys = done.setdefault((entry["comm"], entry["repeat"]), set())
            records = read_records(folder / f"{entry['stem']}.rank0.jsonl")
            keys.update(str(record["key"]) for record in records if record.get("record") == "point")
        elif entry.get("entry") == "lost":
            done.setdefault((entry["comm"], entry["repeat"]), set()).add(entry["key"])
    return done


def job_of(run: Run, points: Iterable[Point]) -> dict[str, Any]:
    """Make the job file's content for some points of the plan."""
    plan, request = run.plan, run.plan.request
    job: dict[str, Any] = {
        "protocol": "specmodel.harness-job/1",
        "seed": request.seed,
        "allow_nvls": request.allow_nvls,
        "gemm_cache": str(run.folder / "gemm-algorithms.txt"),
        "model": request.target.job_block(request.world),
        "limits": plan.limits(),
        "points": [{"key": point.key, **point.fields, **_own_limits(run, point)} for point in points],
    }
    if run.nccl_library is not None:
        job["nccl_library"] = run.nccl_library
    if request.draft is not None:
        job["draft"] = request.draft.job_block(request.world, request.first_step_rows)
        job["conditional"] = list(request.conditional)
    return job


def _own_limits(run: Run, point: Point) -> dict[str, Any]:
    """State the limits of a point that differ from the plan's: cycles are counted, so their time is not cut short."""
    return {"limits": {"max_ms": _CYCLES_SHARE * run.plan.request.timeout_ms}} if point.kind == "cycle" else {}


def _environment(run: Run, setting: CommPlan, *, debug_file: str | None = None) -> dict[str, str]:
    empty = run.folder / "nccl.conf"
    empty.touch()
    allow = run.plan.request.allow_nvls
    return child_environment(os.environ, setting, empty_config=str(empty), allow_nvls=allow, debug_file=debug_file)


def _next_stem(folder: Path) -> str:
    used = sum(1 for entry in read_diary(folder) if entry.get("entry") in ("pass", "probe"))
    return f"pass-{used:03d}"


def _group(
    run: Run,
    setting: CommPlan,
    stem: str,
    job: Mapping[str, Any],
    *,
    deadline_ms: float | None = None,
    stop: threading.Event | None = None,
) -> GroupResult:
    request = run.plan.request
    debug = str(run.folder / f"{stem}.nccl.%p.log") if stem.startswith("probe") else None
    return run_group(
        [str(run.binary), "run"],
        job=job,
        stem=run.folder / stem,
        world=request.world,
        env=_environment(run, setting, debug_file=debug),
        timeout_ms=request.timeout_ms,
        cpus=run.cpus,
        deadline_ms=deadline_ms,
        stop=stop,
        on_progress=None if debug else run.on_progress,
    )


def _probe(run: Run, setting: CommPlan, stop: threading.Event) -> tuple[GroupResult, dict[str, Any]]:
    """Run every size once under `setting`, untimed, and read what NCCL says it chose."""
    stem = f"probe-{setting.name}"
    for stale in run.folder.glob(f"{stem}.*"):
        stale.unlink()
    points = {
        point.fields["size_bytes"]: dataclasses.replace(point, fields={**point.fields, "in_graph": False})
        for point in run.plan.points
        if point.kind == "allreduce"
    }
    job = job_of(run, points.values())
    job["limits"] = {**job["limits"], **_PROBE_LIMITS}
    result = _group(run, setting, stem, job, stop=stop)
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in run.folder.glob(f"{stem}.nccl.*.log")]
    log = parse_nccl_log("\n".join(texts))
    selected = {str(size_bytes): dataclasses.asdict(choice) for size_bytes, choice in sorted(log.choices.items())}
    facts = {"version": log.version, "channels": log.channels, "environment": log.environment, "selected": selected}
    return result, {"nccl": facts, "warnings": list(log.warnings)}


def _probe_all(run: Run, settings: list[CommPlan], at_once: int) -> None:
    """Ask what NCCL chooses under each setting; several at once, since nothing of it is timed."""
    known = {entry["comm"] for entry in read_diary(run.folder) if entry.get("entry") in ("probe", "setting")}
    unknown = [setting for setting in settings if setting.name not in known]
    for setting in unknown:
        run.say(f"what NCCL chooses under {setting_text(setting)} (untimed)")
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=at_once) as pool:
        try:
            probes = [pool.submit(_probe, run, setting, stop) for setting in unknown]
            for setting, probe in zip(unknown, probes, strict=True):
                # In short waits: a signal that comes just before a wait without end is never heard.
                while wait([probe], timeout=_POLL_MS / 1000).not_done:
                    pass
                result, facts = probe.result()
                entry = {"entry": "probe", "comm": setting.name, "outcome": result.outcome, **facts}
                errors = [_public(error) for error in result.errors]
                _note(run.folder, {**entry, "errors": errors, "elapsed_ms": result.elapsed_ms})
                if result.outcome != "finished":
                    _give_up(run, setting, result)
        finally:
            stop.set()  # after Ctrl-C, what the other threads have started ends too
            pool.shutdown(cancel_futures=True)


def _give_up(run: Run, setting: CommPlan, result: GroupResult) -> None:
    """Write off a setting that cannot be measured here, or end the run if there is nothing else to measure."""
    disposition = {"timeout": "timeout", "refused": "not_supported"}.get(result.outcome, "not_run")
    if any(text in error for text in _UNSUPPORTED for error in result.errors):
        disposition = "not_supported"
    reason = "; ".join(result.errors) or f"exit codes {', '.join(map(str, result.exit_codes))}"
    if len(run.plan.request.comm) == 1:
        raise SpecModelError(f"the measuring binary could not measure anything ({disposition}): {reason}")
    _note(
        run.folder, {"entry": "setting", "comm": setting.name, "disposition": disposition, "reasons": [_public(reason)]}
    )
    run.say(f"{setting.name}: {disposition} ({reason}); left out from here on")


def _public(text: str) -> str:
    """Leave out words with paths in them: reasons are written to files that people share."""
    return " ".join("…" if "/" in word else word for word in text.split())


def _one_pass(run: Run, setting: CommPlan, repeat: int, points: list[Point], deadline_ms: float | None) -> bool:
    """Measure `points`, again without the culprit if one hangs or crashes; False once the setting is given up."""
    left = points
    for attempt in range(_ATTEMPTS):
        stem = _next_stem(run.folder)
        opening = {"entry": "pass", "stem": stem, "comm": setting.name, "repeat": repeat, "sitting": run.sitting}
        _note(run.folder, {**opening, "keys": [point.key for point in left]})
        result = _group(run, setting, stem, job_of(run, left), deadline_ms=deadline_ms)
        ending = {"entry": "end", "stem": stem, "outcome": result.outcome, "exit_codes": list(result.exit_codes)}
        errors = [_public(error) for error in result.errors]
        _note(run.folder, {**ending, "errors": errors, "elapsed_ms": result.elapsed_ms})
        if result.outcome in ("finished", "stopped"):
            return True
        records = read_records(run.folder / f"{stem}.rank0.jsonl")
        written = {record["key"]: record["disposition"] for record in records if record.get("record") == "point"}
        remaining = [point for point in left if point.key not in written]
        if (not written and attempt == 0) or result.outcome == "refused":
            _give_up(run, setting, result)
            return False
        if not remaining:
            return True
        if "timeout" not in written.values():
            disposition = "timeout" if result.outcome == "timeout" else "not_run"
            lost = {"entry": "lost", "comm": setting.name, "repeat": repeat, "key": remaining[0].key}
            _note(run.folder, {**lost, "disposition": disposition, "reasons": errors})
            run.say(f"{remaining[0].key}: {disposition}; going on without it")
            remaining = remaining[1:]
        left = remaining
        if not left:
            return True
    return True


def _expected_ms(folder: Path, setting: str, keys: set[str]) -> float:
    """Return how long a pass over `keys` should take, from how long the first pass of the setting took."""
    entries = read_diary(folder)
    stems = {entry["stem"] for entry in entries if entry.get("entry") == "pass" and entry["comm"] == setting}
    whole = sum(entry["elapsed_ms"] for entry in entries if entry.get("entry") == "end" and entry["stem"] in stems)
    records = [record for stem in stems for record in read_records(folder / f"{stem}.rank0.jsonl")]
    points = [record for record in records if record.get("record") == "point"]
    inside = sum(record.get("elapsed_ms", 0.0) for record in points)
    elapsed = {record["key"]: record.get("elapsed_ms", 0.0) for record in points}
    return float(sum(elapsed.get(key, 0.0) for key in keys) + max(0.0, whole - inside) / max(1, len(stems)))


def run_plan(run: Run) -> tuple[str, ...]:
    """Run every pass of the plan that its folder does not hold yet.

    Returns
    -------
    tuple of str
        What was left out for lack of time, in sentences.

    Raises
    ------
    SpecModelError
        Nothing can be measured; the message holds what the binary said.
    """
    started_ms = time.monotonic() * 1000
    left_out: list[str] = []
    for last in (False, True):
        settings = [setting for setting in run.plan.request.comm if setting.last == last]
        if run.plan.request.world > 1:
            _probe_all(run, settings, at_once=1 if last else _PROBES_AT_ONCE)
        left_out += _passes(run, settings, started_ms)
    return tuple(left_out)


def _passes(run: Run, settings: list[CommPlan], started_ms: float) -> list[str]:
    """Run every repeat of `settings`, interleaved; return what was left out for lack of time."""
    plan, request = run.plan, run.plan.request
    left_out: list[str] = []
    for repeat in range(plan.effort.repeats):
        shuffled = list(settings)
        random.Random(f"{request.seed}/{repeat}").shuffle(shuffled)  # noqa: S311
        for setting in shuffled:
            diary = read_diary(run.folder)
            if setting.name in {entry["comm"] for entry in diary if entry.get("entry") == "setting"}:
                continue
            done = finished_keys(run.folder).get((setting.name, repeat), set())
            wanted = order(plan, plan.points_of(setting, repeat), repeat=repeat, setting=setting)
            points = [point for point in wanted if point.key not in done]
            if not points:
                continue
            deadline_ms = None
            if request.budget_ms is not None and repeat > 0:
                deadline_ms = started_ms + _OVERRUN * request.budget_ms
                expected_ms = _expected_ms(run.folder, setting.name, {point.key for point in points})
                if time.monotonic() * 1000 + expected_ms > deadline_ms:
                    left_out.append(f"repeat {repeat + 1} of {setting.name} left out: the budget was used up")
                    continue
            run.say(f"repeat {repeat + 1} of {plan.effort.repeats}, {setting_text(setting)}: {len(points)} points")
            _one_pass(run, setting, repeat, points, deadline_ms)
    return left_out
