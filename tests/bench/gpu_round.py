"""What is run on real GPUs before figures are published, in steps of at most ten minutes.

Usage: python gpu_round.py FOLDER STEP... (`one` and `two` are all steps of so many GPUs); --dry-run tells how long each
takes. Every step writes FOLDER/STEP.log and its files beside it; one that has ended well is not run again, and a
measurement that was broken off continues: `layers-80` takes several calls. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HERE = Path(__file__).resolve().parent
MEASURE = [sys.executable, "-m", "specmodel", "measure"]
GRACE_S = 25  # for a measurement to end its ranks, which have 10 s
RINGS = {"ring-ll": "LL", "ring-ll128": "LL128", "ring-simple": "Simple"}
WIDE = "tokens 1-16,24,32,64,128 batches 1 draft-modes step cycle-modes step timeout 30 repeats 1"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command: on how many GPUs, within how many seconds, and whether `specmodel measure --dry-run` plans it."""

    gpus: int
    limit_s: int
    command: Callable[[Path], list[str]]
    planned: bool = True


def options(text: str) -> list[str]:
    """Options from words: a name and its value in turn."""
    words = text.split()
    return [word if i % 2 else f"--{word}" for i, word in enumerate(words)]


def settings(folder: Path, name: str, *ctas: int | None, host_staged: bool = False) -> list[str]:
    """Write communication settings, and name them in the options: every ring with each number of CTAs.

    None leaves the number to NCCL; `default` is always measured too.
    """
    lines = []
    for count in ctas:
        bound = "" if count is None else f', NCCL_MIN_CTAS: "{count}", NCCL_MAX_CTAS: "{count}"'
        end = "" if count is None else f"-{count}cta"
        lines += [f"{ring}{end}: {{env: {{NCCL_ALGO: Ring, NCCL_PROTO: {RINGS[ring]}{bound}}}}}" for ring in RINGS]
    if host_staged:
        lines.append('host-staged: {env: {NCCL_P2P_DISABLE: "1"}, last: true}')
    path = folder / f"{name}.settings.yaml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["--comm", str(path)]


def dense(folder: Path) -> list[str]:
    """Llama-3.1-8B on one GPU, two sweeps."""
    shape = "model Llama-3.1-8B draft EAGLE3-Llama-3.1-8B contexts 1024,8192 steps 0-3,5,7,10 repeats 2 budget 540"
    return [*MEASURE, *options(shape), "--resume", "-o", str(folder / "h200-llama-3.1-8b.yaml")]


def large(folder: Path, name: str, layers: int, budget_s: int, comm: list[str]) -> list[str]:
    """Llama-3.3-70B on two GPUs under some settings."""
    shape = f"model Llama-3.3-70B draft EAGLE3-Llama-3.3-70B layers {layers} tensor-parallel 2 budget {budget_s} {WIDE}"
    return [*MEASURE, *options(shape), *comm, "--resume", "-o", str(folder / f"{name}.yaml")]


def products(folder: Path) -> list[str]:
    """Matrix products and passes beside PyTorch."""
    from specmodel.harness.build import build, find_toolchain
    from specmodel.harness.gpus import read_gpus

    binary = build(find_toolchain(), architecture=read_gpus()[0].architecture or None)
    return [sys.executable, str(HERE / "compare_torch.py"), str(binary), "--logs", str(folder / "cublaslt")]


STEPS = {
    "selftest": Step(gpus=1, limit_s=300, command=lambda _: [*MEASURE, "--selftest"], planned=False),
    "products": Step(gpus=1, limit_s=400, command=products, planned=False),
    "dense": Step(gpus=1, limit_s=590, command=dense),
    "selftest-2": Step(
        gpus=2, limit_s=300, command=lambda _: [*MEASURE, "--selftest", "--tensor-parallel", "2"], planned=False
    ),
    # Seven settings of all layers: about twice what one call may take, so it is continued.
    "layers-80": Step(
        gpus=2,
        limit_s=590,
        command=lambda f: large(f, "h200x2-llama-3.3-70b", 80, 1000, settings(f, "layers-80", None, 1)),
    ),
    "layers-16": Step(
        gpus=2,
        limit_s=590,
        command=lambda f: large(
            f, "h200x2-llama-3.3-70b-nccl", 16, 540, settings(f, "layers-16", 16, host_staged=True)
        ),
    ),
}


def say(text: str) -> None:
    """Write one line."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def started_by(leader: int) -> list[int]:
    """Process ids of what `leader` started, and of what that started (by /proc; elsewhere none)."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parent = int(path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [leader]
    for process in found:
        found += children.get(process, [])
    return found[1:]


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a step and all that it started: SIGINT, on which a measurement ends its ranks, then SIGKILL.

    The ranks of a measurement lead process groups of their own, which no signal to the step's group reaches.
    """
    started = started_by(process.pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=GRACE_S)
    groups = set(started) | set(started_by(process.pid)) | {process.pid}
    until = time.monotonic() + GRACE_S
    while groups and time.monotonic() < until:
        for group in list(groups):
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                groups.discard(group)
        process.poll()
        time.sleep(0.05)


def finish(command: list[str], log: IO[str] | int, limit_s: float) -> int:
    """Run a command in a process group of its own; 124 if it was stopped at its limit."""
    # Were SIGINT ignored here, as it is for what a script starts in its background, the command would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        if process.poll() is None:
            stop(process)


def run(name: str, folder: Path, *, dry: bool) -> None:
    """Run one step, unless it has ended well before, or say how long it takes."""
    step, log = STEPS[name], folder / f"{name}.log"
    say(f"== {name}: {step.gpus} GPU, at most {step.limit_s} s")
    if dry:
        if step.planned:
            command = [word for word in step.command(folder) if word != "--resume"]
            subprocess.run([*command[:-2], "--dry-run"], check=True)
        return
    if log.exists() and "\nended with 0 " in log.read_text(encoding="utf-8"):
        say("has been run")
        return
    begin = time.monotonic()
    with log.open("a", encoding="utf-8") as stream:
        code = finish(step.command(folder), stream, step.limit_s)
        stream.write(f"\nended with {code} after {time.monotonic() - begin:.0f} s\n")
    lines = log.read_text(encoding="utf-8").splitlines()
    say("\n".join(lines[-30:]))


def main() -> None:
    """Run the named steps in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", nargs="+", choices=[*STEPS, "one", "two"])
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    groups = {"one": 1, "two": 2}
    names = [
        name
        for word in arguments.steps
        for name, step in STEPS.items()
        if word == name or groups.get(word) == step.gpus
    ]
    for name in dict.fromkeys(names):
        run(name, arguments.folder, dry=arguments.dry_run)


if __name__ == "__main__":
    main()
