"""One group of measuring processes, one a GPU: started together, watched, and ended together.

A group measures one communication setting. Whatever happens to it (a hang, a crash, a refusal) costs only what it had
not yet written: its records are whole lines in files that stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

__all__ = ["GroupResult", "Progress", "parse_progress", "read_records", "run_group"]

Outcome = Literal["finished", "stopped", "timeout", "refused", "failed"]
_POLL_MS = 200
_START_GRACE_MS = 45_000  # of silence before the first point: weights, reference problems, warm-up
_POINT_GRACE_MS = 15_000  # beyond the binary's own watchdog, which should act first
_OTHERS_GRACE_MS = 15_000  # for the other ranks, once one has failed
_TERMINATE_GRACE_MS = 5_000
_WATCHDOG_EXIT = 124
_REFUSED_EXIT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One line of progress of a running group."""

    done: int
    total: int
    key: str
    disposition: str
    median_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """How a group ended: in which way, the exit code of each rank, and what it said was wrong."""

    outcome: Outcome
    exit_codes: tuple[int, ...]
    errors: tuple[str, ...]
    elapsed_ms: float


def parse_progress(line: str) -> Progress | None:
    """Parse `progress DONE TOTAL KEY DISPOSITION MEDIAN_MS ELAPSED_MS`; None for any other line."""
    words = line.split()
    if len(words) < 5 or words[0] != "progress" or not (words[1].isdigit() and words[2].isdigit()):
        return None
    median_ms: float | None = None
    with contextlib.suppress(ValueError, IndexError):
        median_ms = float(words[5])
    return Progress(done=int(words[1]), total=int(words[2]), key=words[3], disposition=words[4], median_ms=median_ms)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Read the whole records of a file of JSON lines; a broken last line (of a killed process) is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


def _listen(rank: int, stream: IO[str], lines: queue.SimpleQueue[tuple[int, str]]) -> None:
    for line in stream:
        lines.put((rank, line.rstrip("\n")))


def _end(processes: list[subprocess.Popen[str]]) -> None:
    """End every process still running, and whatever it started: politely first, then not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
        wait_until = _now_ms() + _TERMINATE_GRACE_MS
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, (wait_until - _now_ms()) / 1000))


def _now_ms() -> float:
    return time.monotonic() * 1000


def _watch(
    processes: list[subprocess.Popen[str]],
    lines: queue.SimpleQueue[tuple[int, str]],
    hear: Callable[[int, str], None],
    timeout_ms: float,
    deadline_ms: float | None,
    stop: threading.Event | None,
) -> Literal["ended", "timeout", "stopped"]:
    """Wait until every process has ended, one hangs, the deadline passes, or `stop` is set."""
    heard_ms, limit_ms = _now_ms(), timeout_ms + _START_GRACE_MS
    failed_ms: float | None = None
    while True:
        try:
            rank, line = lines.get(timeout=_POLL_MS / 1000)
        except queue.Empty:
            pass
        else:
            heard_ms = _now_ms()
            if parse_progress(line) is not None:
                limit_ms = timeout_ms + _POINT_GRACE_MS
            hear(rank, line)
        codes = [process.poll() for process in processes]
        if lines.empty() and all(code is not None for code in codes):
            return "ended"
        if failed_ms is None and any(code not in (None, 0) for code in codes):
            failed_ms = _now_ms()
        if _now_ms() - heard_ms > limit_ms:
            return "timeout"
        if failed_ms is not None and _now_ms() - failed_ms > _OTHERS_GRACE_MS:
            return "ended"
        if (deadline_ms is not None and _now_ms() > deadline_ms) or (stop is not None and stop.is_set()):
            return "stopped"


def run_group(
    command: Collection[str],
    *,
    job: Mapping[str, Any] | None,
    stem: Path,
    world: int,
    env: Mapping[str, str],
    timeout_ms: float,
    cpus: Collection[Collection[int]] = (),
    deadline_ms: float | None = None,
    stop: threading.Event | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    show_output: bool = False,
) -> GroupResult:
    """Run one group to its end.

    Parameters
    ----------
    command
        The binary and its subcommand; the options of the protocol are added.
    job
        The job, written beside the records; None for a subcommand without one.
    stem
        Where records go: `STEM.rankR.jsonl` for every rank R, which must not exist.
    world
        Processes in the group; with more than one they meet in a private directory, deleted afterwards.
    env
        Their whole environment.
    timeout_ms
        How long one point may take; the group is ended if it is silent for somewhat longer.
    cpus
        For each rank, the processors to keep it on; none or empty leaves it free.
    deadline_ms
        A time of the monotonic clock at which the group is ended, with what it has.
    stop
        Ends the group, with what it has, once it is set: for a group that is watched by another thread than the main
        one, which alone hears Ctrl-C.
    on_progress
        Told of every finished point.
    show_output
        Pass the first rank's standard output through (a table for people).

    Returns
    -------
    GroupResult
        `finished` if every rank ended by itself with exit 0 or 1 and wrote its last record, `refused` for exit 3.
    """
    started_ms = _now_ms()
    errors: list[str] = []
    lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def hear(rank: int, line: str) -> None:
        progress = parse_progress(line)
        if progress is not None and on_progress is not None:
            on_progress(progress)
        elif line.startswith("error "):
            errors.append(f"rank {rank}: {line.removeprefix('error ')}" if world > 1 else line.removeprefix("error "))

    processes: list[subprocess.Popen[str]] = []
    meeting = tempfile.mkdtemp(prefix="specmodel-") if world > 1 else None
    try:
        arguments = [*command]
        if job is not None:
            path = stem.with_name(f"{stem.name}.job.json")
            path.write_text(json.dumps(job, indent=1) + "\n", encoding="utf-8")
            arguments += ["--job", str(path)]
        for rank in range(world):
            options = ["--output", str(stem.with_name(f"{stem.name}.rank{rank}.jsonl"))]
            if meeting is not None:
                options += ["--rank", str(rank), "--world", str(world), "--rendezvous", meeting]
            processes.append(
                subprocess.Popen(  # noqa: S603
                    [*arguments, *options],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=None if show_output and rank == 0 else subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    start_new_session=True,
                )
            )
            _keep_on(processes[rank].pid, list(cpus)[rank] if rank < len(cpus) else ())
        listeners = [
            threading.Thread(target=_listen, args=(rank, process.stderr, lines), daemon=True)
            for rank, process in enumerate(processes)
        ]
        for listener in listeners:
            listener.start()
        ending = _watch(processes, lines, hear, timeout_ms, deadline_ms, stop)
    finally:
        _end(processes)
        if meeting is not None:
            shutil.rmtree(meeting, ignore_errors=True)
    for listener in listeners:
        listener.join(timeout=_TERMINATE_GRACE_MS / 1000)
    while not lines.empty():
        hear(*lines.get())
    for process in processes:
        if process.stderr is not None:
            process.stderr.close()
    codes = tuple(process.returncode for process in processes)
    return GroupResult(
        outcome=_outcome(ending, codes, stem),
        exit_codes=codes,
        errors=tuple(dict.fromkeys(errors)),
        elapsed_ms=_now_ms() - started_ms,
    )


def _keep_on(process_id: int, cpus: Collection[int]) -> None:
    if cpus and hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(process_id, cpus)


def _outcome(ending: str, codes: tuple[int, ...], stem: Path) -> Outcome:
    if ending == "timeout" or (ending == "ended" and _WATCHDOG_EXIT in codes):
        return "timeout"
    if ending == "stopped":
        return "stopped"
    if _REFUSED_EXIT in codes:
        return "refused"
    records = read_records(stem.with_name(f"{stem.name}.rank0.jsonl"))
    ended = any(record.get("record") == "end" for record in records)
    return "finished" if all(code in (0, 1) for code in codes) and ended else "failed"
