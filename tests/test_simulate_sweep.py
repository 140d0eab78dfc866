"""Sweeps: grids, blocks, lines that are kept, processes that die, and a real Dask cluster that loses a worker."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.errors import SpecModelError, UsageError
from specmodel.model import FittedModel
from specmodel.simulate import sweep as sweeping
from specmodel.simulate.grid import blocks_of, jobs_of
from specmodel.simulate.sweep import SweepCount, sweep

GRID: dict[str, Any] = {
    "arrivals": ["closed:1", "closed:3", "poisson:4"],
    "policy": ["plain", "fixed:2"],
    "output_tokens": [8, 12],
    "prompt_tokens": 100,
    "requests": 20,
    "seeds": 2,
    "max_batch": 4,
}


@pytest.fixture(scope="module")
def model() -> FittedModel:
    document = {
        "schema": "specmodel.calibration/1",
        "name": "small",
        "measurements": {
            "cycles": [
                {"num_steps": k, "batch": b, "cycle_ms": 10 + b + k, "acceptance_length": 1.0 + 0.5 * k}
                for k in (0, 2)
                for b in (1, 4)
            ]
        },
    }
    return sm.fit(sm.from_dict(document))


@pytest.fixture(scope="module")
def answers(model: FittedModel, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sweep") / "one.jsonl"
    assert sweep(model, GRID, path, workers=1) == SweepCount(total=12, kept=0, failed=0)
    return path.read_bytes()


# ---------------------------------------------------------------------------------------------------------- the grid
def test_a_grid_is_every_combination_in_order(model: FittedModel) -> None:
    jobs = jobs_of(GRID, model, "g")
    assert [j.index for j in jobs] == list(range(12))
    assert [(j.options["arrivals"], j.options["policy"], j.options["output_tokens"]) for j in jobs][:3] == [
        ("closed:1", "plain", 8),
        ("closed:1", "plain", 12),
        ("closed:1", "fixed:2", 8),
    ]
    assert len({j.key for j in jobs}) == 12
    assert jobs_of({"policy": [["plain", "fixed:1"], "plain"]}, model, "g")[0].scenario.policies == ("plain", "fixed:1")


def test_keys_tell_the_calibration(model: FittedModel) -> None:
    other = sm.fit(sm.from_dict({"schema": "specmodel.calibration/1", "name": "other"}))
    assert not {j.key for j in jobs_of(GRID, model, "g")} & {j.key for j in jobs_of(GRID, other, "g")}


@pytest.mark.parametrize(
    ("grid", "said"),
    [
        ([], "g.yaml: must map options"),
        ({}, "must map options"),
        ({"arrivals": []}, "arrivals is an empty list"),
        ({"arrivals": ["closed:1", "closed:x"]}, r"g.yaml: arrivals\[1\]: arrivals must be closed:N"),
        ({"clients": [1]}, "'clients' is no option of a scenario; use"),
        ({"seeds": [1, [2]]}, r"seeds\[1\]: must be a value, got a list"),
        ({"arrivals": "trace"}, "a trace cannot be swept"),
        ({"schema": "specmodel.sweep/2"}, "schema must be specmodel.sweep/1"),
        ({"seeds": list(range(1, 1001)), "requests": list(range(1, 1002))}, "1001000 scenarios are more"),
        ({"seeds": [3, 3]}, "stated twice"),
        ({3: [1]}, "'3' is no option"),
    ],
    ids=str,
)
def test_a_faulty_grid_names_the_option_and_the_place(model: FittedModel, grid: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        jobs_of(grid, model, "g.yaml")


def test_blocks_hold_every_job_once_and_none_is_too_large(model: FittedModel) -> None:
    grid = {
        "arrivals": [f"closed:{n}" for n in (1, 2, 7, 64, 500)],
        "output_tokens": list(range(2, 42)),
        "seeds": 16,
        "policy": "plain",
    }
    jobs = jobs_of(grid, model, "g")
    for workers in (1, 2, 50):
        blocks = blocks_of(jobs, model, workers)
        assert sorted(j.index for b in blocks for j in b) == list(range(200))
        for block in blocks:
            assert len(block) * 16 <= 1024
            assert len(block) == 1 or len(block) <= max(200 // (4 * workers), 1)


# ------------------------------------------------------------------------------------------------------ what is written
def test_lines_are_what_simulate_answers(model: FittedModel, answers: bytes) -> None:
    lines = [json.loads(line) for line in answers.splitlines()]
    assert [line["index"] for line in lines] == list(range(12))
    for job, line in zip(jobs_of(GRID, model, "g"), lines, strict=True):
        expected = sm.simulate(model, job.scenario).as_dict()
        expected = json.loads(json.dumps(expected))
        assert {key: line[key] for key in expected} == expected
        assert line["schema"] == "specmodel.scenario/1"
        assert line["options"] == job.options


def test_an_interrupted_sweep_goes_on_where_it_was(model: FittedModel, answers: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = answers.splitlines(keepends=True)
    done: list[int] = []
    for kept in (0, 1, 5, 12):
        for torn in (b"", lines[-1][:1], lines[-1][:70], lines[-1][:-1]):
            # In any order, and the last line cut off in the middle, as a killed process leaves it.
            path.write_bytes(b"".join(lines[:kept][::-1]) + (torn if kept < 12 else b""))
            count = sweep(model, GRID, path, workers=1, report=lambda n, total: done.append(n))
            assert count == SweepCount(total=12, kept=kept, failed=0)
            assert path.read_bytes() == answers
    assert list(tmp_path.iterdir()) == [path]
    assert max(done) == 12


@pytest.mark.parametrize(
    "other", [b"hello", b"hello\n", b'{"key": 3}\n', b'{"schema": "specmodel.scenario/1"}\n', b"[]\n"]
)
def test_a_file_of_something_else_is_left_alone(model: FittedModel, tmp_path: Path, other: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(other)
    with pytest.raises(UsageError, match="holds other things"):
        sweep(model, GRID, path, workers=1)
    assert path.read_bytes() == other


def test_answers_of_another_grid_are_not_mixed_in(model: FittedModel, answers: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(answers)
    with pytest.raises(UsageError, match="holds other things"):
        sweep(model, GRID | {"seeds": 3}, path, workers=1)
    assert path.read_bytes() == answers


def test_a_scenario_that_cannot_be_is_a_line_with_its_reason(model: FittedModel, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    grid = GRID | {"policy": "plain", "output_tokens": 8, "workload": ["default", "poem"]}
    assert sweep(model, grid, path, workers=1) == SweepCount(
        total=6, kept=0, failed=3, reason="workload 'poem' is not in small; use one of: default"
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [("error" in line) for line in lines] == [False, True] * 3
    assert "'poem' is not in small" in lines[1]["error"]


def test_only_a_file_holds_answers_and_a_link_stays_one(model: FittedModel, answers: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no file"):
        sweep(model, GRID, os.devnull, workers=1)
    link, real = tmp_path / "link.jsonl", tmp_path / "real.jsonl"
    real.write_bytes(answers)
    link.symlink_to(real)
    assert sweep(model, GRID, link, workers=1).kept == 12
    assert link.is_symlink()
    assert real.read_bytes() == answers


def test_a_folder_that_is_not_there_is_said(model: FittedModel, tmp_path: Path) -> None:
    with pytest.raises(SpecModelError, match="cannot be written"):
        sweep(model, GRID, tmp_path / "none" / "a.jsonl", workers=1)


# ----------------------------------------------------------------------------------------------------------- processes
def _dies_once(packed: bytes, block: Any) -> list[str]:
    """In a worker: the first block that is begun anywhere kills its process."""
    marker = Path(os.environ["SPECMODEL_TEST_MARKER"])
    try:
        marker.touch(exist_ok=False)
    except FileExistsError:
        return sweeping.answers_of(packed, block)
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def _always_dies(packed: bytes, block: Any) -> list[str]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Workers that know this module (a fresh interpreter cannot import it) and start at once."""
    import multiprocessing

    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("no fork on this system")
    real = multiprocessing.get_context("fork")
    monkeypatch.setattr(sweeping.multiprocessing, "get_context", lambda method: real)
    return monkeypatch


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_worker_that_dies_costs_no_answer(
    model: FittedModel, answers: bytes, tmp_path: Path, forked: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "marker"
    forked.setenv("SPECMODEL_TEST_MARKER", str(marker))
    forked.setattr(sweeping, "_on_cores", partial(sweeping._on_cores, work=_dies_once))
    path = tmp_path / "a.jsonl"
    assert sweep(model, GRID, path, workers=2) == SweepCount(total=12, kept=0, failed=0)
    assert marker.exists()
    assert path.read_bytes() == answers


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_workers_that_keep_dying_are_given_up(model: FittedModel, tmp_path: Path, forked: pytest.MonkeyPatch) -> None:
    forked.setattr(sweeping, "_on_cores", partial(sweeping._on_cores, work=_always_dies))
    forked.setattr(sweeping, "MOST_RESTARTS", 1)
    with pytest.raises(SpecModelError, match=r"keep dying.*12 scenarios are left: run the same command again"):
        sweep(model, GRID, tmp_path / "a.jsonl", workers=2)


@pytest.mark.slow
def test_the_same_lines_from_any_number_of_processes(model: FittedModel, answers: bytes, tmp_path: Path) -> None:
    for workers in (2, 3):
        path = tmp_path / f"{workers}.jsonl"
        assert sweep(model, GRID, path, workers=workers).total == 12
        assert path.read_bytes() == answers


@pytest.mark.slow
def test_an_interrupt_ends_the_workers_and_keeps_the_answers(tmp_path: Path) -> None:
    """Ctrl-C on a real sweep: gone at once, without a word, and what was answered stays."""
    calib, grid, out = tmp_path / "calib.json", tmp_path / "grid.json", tmp_path / "a.jsonl"
    rows = [{"num_steps": k, "cycle_ms": 10.0 + k, "acceptance_length": 1.0 + 0.4 * k} for k in (0, 2)]
    calib.write_text(
        json.dumps({"schema": "specmodel.calibration/1", "name": "small", "measurements": {"cycles": rows}})
    )
    lengths = list(range(500, 540))
    options = {"arrivals": "closed:1", "policy": "plain", "output_tokens": lengths, "requests": 50, "seeds": 2}
    grid.write_text(json.dumps(options))
    command = [sys.executable, "-m", "specmodel", "simulate", str(calib), "--sweep", str(grid), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--workers", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_hear_interrupts
    )
    for _ in range(600):
        if process.poll() is not None or (out.exists() and out.stat().st_size):
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=120)
    assert (process.returncode, said, errors) == (130, b"", b"")
    assert 1 <= len(out.read_bytes().splitlines()) < len(lengths)


def _hear_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# ------------------------------------------------------------------------------------------------------------- cluster
@pytest.fixture
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=3,
        threads_per_worker=1,
        processes=True,
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=50,
        memory_limit=0,
    ) as made:
        yield made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_cluster_that_loses_a_worker_loses_no_answer(
    model: FittedModel, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes; one is killed once the first answer is there, while all have work."""
    grid = GRID | {"requests": 150, "output_tokens": [40, 44, 48, 52], "seeds": 4}
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    sweep(model, grid, one, workers=1)
    victims = [w.pid for w in cluster.workers.values()]
    killed = threading.Event()
    seen: list[int] = []

    asked: list[int] = []

    def blocks(jobs: Any, model: FittedModel, threads: int) -> Any:
        asked.append(threads)
        return blocks_of(jobs, model, threads)

    monkeypatch.setattr(sweeping, "blocks_of", blocks)

    def report(done: int, total: int) -> None:
        seen.append(done)
        if 0 < done < total and not killed.is_set():
            os.kill(victims[0], signal.SIGKILL)
            killed.set()

    count = sweep(model, grid, many, scheduler=cluster.scheduler_address, report=report)
    assert killed.is_set()
    assert asked == [3]  # work for each thread of the cluster, however many this machine has
    assert seen[1] < count.total  # it was killed midway
    assert count == SweepCount(total=24, kept=0, failed=0)
    assert many.read_bytes() == one.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_no_scheduler_is_said_and_nothing_is_lost(
    model: FittedModel, answers: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    from specmodel.simulate import cluster as clustering

    monkeypatch.setattr(clustering, "_ANSWER_S", 1)
    path = tmp_path / "a.jsonl"
    first = answers.splitlines(keepends=True)[0]
    for address in ("tcp://127.0.0.1:9", "nonsense://x"):
        path.write_bytes(first)
        with pytest.raises(UsageError, match="no Dask scheduler answers at"):
            sweep(model, GRID, path, scheduler=address)
        assert path.read_bytes() == first


_WITHOUT_SPECMODEL = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "specmodel":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Lacking())
from dask.__main__ import main
main()
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_what_a_cluster_lacks_or_loses_is_said_in_a_sentence(
    model: FittedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Processes as a user starts them: a worker without specmodel, then a scheduler that is killed midway."""
    pytest.importorskip("distributed")
    place = tmp_path / "scheduler.json"
    running: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> subprocess.Popen[bytes]:
        words = (*words, "--scheduler-file", str(place), "--no-dashboard")
        running.append(subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        return running[-1]

    try:
        scheduler = start("-m", "dask", "scheduler", "--host", "tcp://127.0.0.1", "--port", "0")
        for _ in range(300):
            if place.exists() and place.stat().st_size:
                break
            time.sleep(0.1)
        address = json.loads(place.read_text())["address"]
        worker = "worker", "--nthreads", "1", "--no-nanny"
        lacking = start("-c", _WITHOUT_SPECMODEL, *worker)
        grid = GRID | {"requests": 150, "output_tokens": [40, 44, 48, 52], "seeds": 4}
        out, one = tmp_path / "a.jsonl", tmp_path / "one.jsonl"
        with pytest.raises(UsageError, match=r"the worker tcp://.* has no specmodel; install specmodel"):
            sweep(model, grid, out, scheduler=address)
        lacking.kill()
        lacking.wait()
        start("-m", "dask", *worker)

        def report(done: int, total: int) -> None:
            if done:
                scheduler.kill()
                scheduler.wait()

        with pytest.raises(SpecModelError, match=r"scheduler at .* is gone; start it and run the same command again"):
            sweep(model, grid, out, scheduler=address, report=report)
        assert capfd.readouterr().err == ""  # nothing of what Dask logs
        assert out.read_bytes()
        assert sweep(model, grid, out, workers=1).kept > 0
        assert sweep(model, grid, one, workers=1).total == 24
        assert out.read_bytes() == one.read_bytes()
    finally:
        for process in running:
            process.kill()
            process.wait()
