"""Thousands of scenarios on every core or on a Dask cluster: each answer is a line, and what is there is kept."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specmodel.errors import SpecModelError, UsageError
from specmodel.model import FittedModel
from specmodel.simulate.grid import Job, blocks_of, jobs_of
from specmodel.simulate.run import simulate_all

__all__ = ["SweepCount", "answers_of", "sweep"]

MOST_RESTARTS = 5
"""Times that a pool is started again without an answer in between."""
LINE_SCHEMA = "specmodel.scenario/1"
_START = b'{"schema": "specmodel.scenario/'
Block = Sequence[Job]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCount:
    """What a sweep did."""

    total: int
    kept: int
    """Answers that were there already."""
    failed: int
    """Scenarios whose line is an error."""
    reason: str = ""
    """Error of the first of them."""


def sweep(
    model: FittedModel,
    document: Any,
    path: str | os.PathLike[str],
    *,
    source: str = "grid",
    workers: int | None = None,
    scheduler: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> SweepCount:
    """Simulate every scenario of a grid; write each answer as a line of JSON as it comes, in order at the end.

    Lines that an interrupted sweep left in the file are kept. A worker that is lost costs time, not answers.

    Parameters
    ----------
    model : FittedModel
    document : mapping
        As `grid.jobs_of` takes it.
    path : path or str
        The file of lines.
    source : str
        What messages call the grid by.
    workers : int, optional
        Processes on this machine; by default one a core.
    scheduler : str, optional
        Address of a Dask scheduler, whose workers are used instead.
    report : callable, optional
        Told how many scenarios of how many have an answer.

    Raises
    ------
    UsageError
        For a faulty grid, a file of another sweep, what is no file, or a cluster that cannot be used.
    SpecModelError
        Workers keep dying, the scheduler is lost, or the file cannot be written.
    """
    jobs = jobs_of(document, model, source)
    target = Path(os.path.realpath(path))  # a link stays one
    if target.exists() and not target.is_file():
        raise UsageError(f"{path}: is no file; a sweep goes on from what its file holds, so name one")
    try:
        places = _kept_lines(target, {job.key for job in jobs})
        left = [job for job in jobs if job.key not in places]
        kept = len(places)
        if report is not None:
            report(kept, len(jobs))
        with target.open("ab") as stream:
            for lines in _answered(model, left, workers or _cores(), scheduler):
                for line in lines:
                    data = line.encode() + b"\n"
                    places[json.loads(line)["key"]] = stream.tell(), len(data)
                    stream.write(data)
                stream.flush()
                if report is not None:
                    report(len(places), len(jobs))
        failed, reason = _write_sorted(target, [places[job.key] for job in jobs])
    except OSError as error:
        raise SpecModelError(f"{path}: cannot be written or read: {error.strerror or error}") from error
    return SweepCount(total=len(jobs), kept=kept, failed=failed, reason=reason)


def _answered(model: FittedModel, jobs: list[Job], workers: int, scheduler: str | None) -> Iterator[list[str]]:
    if not jobs:
        return iter(())
    packed = pickle.dumps(model)
    if scheduler is not None:
        from specmodel.simulate.cluster import on_cluster

        return on_cluster(scheduler, packed, lambda threads: blocks_of(jobs, model, threads))
    blocks = blocks_of(jobs, model, workers)
    if workers == 1 or len(blocks) == 1:
        return (answers_of(packed, block) for block in blocks)
    return _on_cores(packed, blocks, min(workers, len(blocks)))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1


# --------------------------------------------------------------------------------------------------------- in a worker
@lru_cache(maxsize=2)
def _unpacked(packed: bytes) -> tuple[FittedModel, dict[Any, Any]]:
    """Return the model and what its scenarios share; kept by the process."""
    return pickle.loads(packed), {}  # noqa: S301  (what this program packed)


def answers_of(packed: bytes, block: Block) -> list[str]:
    """Return the line of every job of a block; a scenario that cannot be is a line with its error."""
    model, cache = _unpacked(packed)
    try:
        answers = [a.as_dict() for a in simulate_all(model, [job.scenario for job in block], cache=cache)]
    except UsageError:
        answers = []
        for job in block:
            try:
                answers.append(simulate_all(model, [job.scenario], cache=cache)[0].as_dict())
            except UsageError as error:
                answers.append({"error": str(error)})
    return [
        json.dumps(
            {"schema": LINE_SCHEMA, "index": job.index, "key": job.key, "options": job.options, **answer},
            allow_nan=False,
        )
        for job, answer in zip(block, answers, strict=True)
    ]


# ------------------------------------------------------------------------------------------------------ on this machine
def _on_cores(
    packed: bytes,
    blocks: list[list[Job]],
    workers: int,
    work: Callable[[bytes, Block], list[str]] = answers_of,
) -> Iterator[list[str]]:
    """Run the blocks in a pool of processes; where one dies, the pool is started again for what is left."""
    left = dict(enumerate(blocks))
    restarts = 0
    others = set(multiprocessing.active_children())
    while left:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_leave_interrupts)
        futures = {pool.submit(work, packed, block): i for i, block in left.items()}
        try:
            waiting = set(futures)
            while waiting:
                ended, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in ended:
                    lines = future.result()
                    del left[futures[future]]
                    restarts = 0
                    yield lines
        except BrokenProcessPool:
            restarts += 1
            if restarts > MOST_RESTARTS:
                scenarios = sum(map(len, left.values()))
                raise SpecModelError(
                    f"worker processes keep dying, perhaps for want of memory; {scenarios} scenarios are left: run "
                    "the same command again to go on, with fewer --workers"
                ) from None
        finally:
            if left:
                # Interrupted, or broken: what still runs would only be waited for.
                for process in set(multiprocessing.active_children()) - others:
                    process.terminate()
            pool.shutdown(wait=True, cancel_futures=True)


def _leave_interrupts() -> None:
    """In a worker: Ctrl-C is for the process that asked; it ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# -------------------------------------------------------------------------------------------------------- the file
Place = tuple[int, int]
"""Where a line begins in the file and how long it is, bytes."""


def _kept_lines(path: Path, wanted: set[str]) -> dict[str, Place]:
    """Return where the answers in the file are, by key; a last line that was cut short is taken off the file.

    Raises
    ------
    UsageError
        The file holds something else.
    """
    other = UsageError(
        f"{path}: holds other things than answers of this grid and calibration; name another file, or delete it"
    )
    places: dict[str, Place] = {}
    end = 0
    with path.open("a+b") as stream:
        stream.seek(0)
        for raw in stream:
            if not raw.endswith(b"\n"):
                if not raw.startswith(_START[: len(raw)]):
                    raise other
                break
            try:
                line = json.loads(raw)
                key = line["key"] if line["schema"] == LINE_SCHEMA else None
            except (ValueError, TypeError, KeyError):
                raise other from None
            if key not in wanted:
                raise other
            places[key] = end, len(raw)
            end += len(raw)
        stream.truncate(end)
    return places


def _write_sorted(path: Path, places: Sequence[Place]) -> tuple[int, str]:
    """Bring the lines into the order of the scenarios; return how many say an error, and the first."""
    errors = 0
    reason = ""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with path.open("rb") as source, partial.open("wb") as target:
            for start, size in places:
                source.seek(start)
                line = source.read(size)
                error = json.loads(line).get("error") if b'"error": ' in line else None
                if error is not None:
                    errors += 1
                    reason = reason or error
                target.write(line)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return errors, reason
