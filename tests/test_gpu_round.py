"""tests/bench/gpu_round.py, with programs that stand for what it runs on GPUs."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specmodel import io
from specmodel.harness.samples import read_samples

SCRIPT = Path(__file__).parent / "bench" / "gpu_round.py"
DATA = Path(__file__).parent / "data" / "harness"


@pytest.fixture
def gpu_round(monkeypatch):
    """Load the script as a module of its own."""
    spec = importlib.util.spec_from_file_location("gpu_round", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_round", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def fake(tmp_path):
    """Make a measuring binary that behaves as told."""

    def make(**behaviour):
        told = tmp_path / "behaviour.json"
        told.write_text(json.dumps(behaviour))
        program = tmp_path / "binary"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{DATA / "fake_harness.py"}" "{told}" "$@"\n')
        program.chmod(0o755)
        return [sys.executable, str(DATA / "fake_measure.py"), str(program)]

    return make


def running(folder):
    """Command lines of the processes that name something in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in text and int(path.parent.name) != os.getpid():
            found.append(text)
    return found


@pytest.mark.slow
def test_every_step_fits_its_time(tmp_path):
    """Each measurement, as planned for H200, leaves time to start within its limit, or within that of some calls."""
    words = [sys.executable, str(SCRIPT), str(tmp_path), "one", "two", "--dry-run"]
    ran = subprocess.run(words, capture_output=True, text=True, check=True)
    steps = dict.fromkeys(re.findall(r"^== (\S+): \d GPU, at most (\d+) s$", ran.stdout, re.MULTILINE))
    assert [name for name, _ in steps] == ["selftest", "products", "dense", "selftest-2", "layers-80", "layers-16"]
    assert all(int(limit_s) < 600 for _, limit_s in steps)
    planned = re.findall(r"time +about (\d+) s of (\d+)", ran.stdout)
    assert [int(budget) for _, budget in planned] == [540, 1000, 540]
    assert all(int(needed) <= int(budget) for needed, budget in planned)
    assert "2 x in fresh processes" in ran.stdout  # two whole sweeps of the dense shape
    rings = [f"{ring}{end}" for end in ("", "-1cta") for ring in ("ring-ll", "ring-ll128", "ring-simple")]
    assert f"settings   {', '.join(['default', *rings])}\n" in ran.stdout


@pytest.mark.slow
def test_a_step_that_is_broken_off_frees_the_gpus_and_continues(gpu_round, fake, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_round, "MEASURE", [*fake(pause_ms=15), "--allow-busy"])
    step = gpu_round.STEPS["layers-80"]
    monkeypatch.setitem(
        gpu_round.STEPS, "layers-80", gpu_round.Step(gpus=2, limit_s=8, command=step.command, planned=True)
    )
    log = tmp_path / "layers-80.log"
    codes = []
    while not codes or codes[-1] == "124":
        assert len(codes) < 12, log.read_text()
        gpu_round.run("layers-80", tmp_path, dry=False)
        assert running(tmp_path) == []
        codes = re.findall(r"^ended with (\d+) ", log.read_text(), re.MULTILINE)
    assert len(codes) > 1, "it was never broken off"
    assert codes[-1] == "0", log.read_text()
    samples = read_samples(tmp_path / "h200x2-llama-3.3-70b.samples.json.gz")
    calibration = io.load(tmp_path / "h200x2-llama-3.3-70b.yaml")
    one = {"NCCL_MIN_CTAS": "1", "NCCL_MAX_CTAS": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_ALGO": "Ring"}
    assert len(calibration.comm) == 7
    assert dict(calibration.comm["ring-ll128-1cta"].env) == {**one, "NCCL_PROTO": "LL128"}
    assert {point["disposition"] for point in samples["points"]} == {"ok"}
    assert {len(point["runs"]) for point in samples["points"]} == {1}  # nothing twice
    assert samples["run"]["sittings"] > 1
    capsys.readouterr()
    gpu_round.run("layers-80", tmp_path, dry=False)
    assert "has been run" in capsys.readouterr().out


@pytest.mark.parametrize("ignored", [False, True], ids=["", "started_with_sigint_ignored"])
def test_a_step_is_asked_to_end_before_it_is_killed(gpu_round, tmp_path, monkeypatch, ignored):
    """Also where the whole round was started in the background of a script, which ignores SIGINT for all it starts."""
    monkeypatch.setattr(gpu_round, "GRACE_S", 20)
    program = (
        "import pathlib, sys, time\n"
        "try:\n    pathlib.Path(sys.argv[1], 'began').touch()\n    time.sleep(600)\n"
        "except KeyboardInterrupt:\n    pathlib.Path(sys.argv[1], 'tidied').touch()\n"
    )
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        code = gpu_round.finish([sys.executable, "-c", program, str(tmp_path)], subprocess.DEVNULL, 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 124
    assert (tmp_path / "tidied").exists()
    assert running(tmp_path) == []


def test_what_does_not_end_when_asked_is_killed_with_all_that_it_started(gpu_round, tmp_path, monkeypatch):
    """A step that hears nothing, and a rank of it in a process group of its own that hears nothing either."""
    monkeypatch.setattr(gpu_round, "GRACE_S", 1)
    deaf = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; "
    rank = [sys.executable, "-c", deaf + "time.sleep(600)", str(tmp_path)]
    program = f"import subprocess; {deaf}subprocess.Popen({rank!r}, start_new_session=True).wait()"
    seen = []
    real = gpu_round.stop

    def stop(process):
        seen.extend(running(tmp_path))
        real(process)

    monkeypatch.setattr(gpu_round, "stop", stop)
    assert gpu_round.finish([sys.executable, "-c", program, str(tmp_path)], subprocess.DEVNULL, 2) == 124
    assert len(seen) == 2
    assert running(tmp_path) == []
