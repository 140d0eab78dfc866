"""Hostile files end in an error, in little time and memory: each is read in a process whose limits would kill it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# ruff: noqa: E501  (a table: one case a line)

HEAD = "schema: specmodel.calibration/1\nname: x\n"

READ = """
import resource, sys
from specmodel import form, io                     # what is read is limited, not what reading needs
io.loads("schema: specmodel.calibration/1\\nname: x\\n")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
cpu = resource.getrusage(resource.RUSAGE_SELF)
limit = int(cpu.ru_utime + cpu.ru_stime) + 10
resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
try:
    io.load(sys.argv[1])
except io.CalibrationError as error:
    print(error)
    sys.exit(3)
"""


def bomb(levels: int, each: int) -> str:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * each)}]" for i in range(1, levels)]
    return "\n".join(lines) + "\n"


HOSTILE = {
    "alias bomb": (HEAD + bomb(12, 9), "values by alias"),
    "alias bomb of mappings": (
        f"{HEAD}a0: &a0 {{k: v}}\n" + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 60)),
        "values by alias",
    ),
    "many aliases of one list": (f"{HEAD}a: &a [{'1, ' * 1000}]\nb: [{'*a, ' * 5000}]\n", "values by alias"),
    "deep lists in YAML": (f"{HEAD}description: {'[' * 200_000}", "nested at most"),
    "deep mappings in YAML": (f"{HEAD}system: {'{a: ' * 100_000}", "nested at most"),
    "deep blocks in YAML": (HEAD + "".join(f"{' ' * i}a:\n" for i in range(800)), "nested at most"),
    "deep dashes in YAML": (f"{HEAD}a:\n  {'- ' * 100_000}x\n", "nested at most"),
    "deep lists in JSON": ('{"schema": ' + "[" * 500_000, "nested at most"),
    "deep closed lists in JSON": ('{"schema": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested at most"),
    "deep mappings in JSON": ('{"schema":' * 200_000, "nested at most"),
    "integer of a million digits in JSON": (
        f'{{"schema": "specmodel.calibration/1", "name": {"9" * 2**20}}}',
        "name: must be text",
    ),
    "integer of a million digits in YAML": (f"{HEAD}system: {{num_gpus: {'9' * 2**20}}}\n", "must be a whole number"),
    "hexadecimal of a million digits": (f"{HEAD}system: {{num_gpus: 0x{'f' * 2**20}}}\n", "must be a whole number"),
    "text of a megabyte": (f"{HEAD}system: {{num_gpus: '{'x' * 2**20}'}}\n", "must be a whole number, got 'xxx"),
    "a hundred thousand faults": (
        f"{HEAD}measurements:\n  verify: [{'{tokens: 0}, ' * 100_000}]\n",
        "and 1950 more at least",
    ),
    "a key twice ten thousand times": ("a: 1\n" * 10_000, "and 9952 more"),
    "a key twice ten thousand times in JSON": (
        "{" + ", ".join(f'"k{i}": 1, "k{i}": 2' for i in range(10_000)) + "}",
        "more",
    ),
    "unknown keys of great length": (HEAD + "".join(f"{'k' * 900}{i}: 1\n" for i in range(1000)), "and 950 more"),
    "a name that resembles many": (
        f"{HEAD}comm: {{{', '.join(f'{chr(97 + i % 26) * 500}{i}: {{}}' for i in range(2000))}}}\n"
        f"measurements: {{verify: [{'{tokens: 1, time_ms: 1, comm: ' + 'b' * 400 + '}, '} {'{tokens: 1, time_ms: 1, comm: q}, ' * 500}]}}\n",
        "list it under comm",
    ),
    "thirty thousand unknown settings": (
        f"{HEAD}comm: {{{', '.join(f'{chr(97 + i % 26) * 60}{i}: {{}}' for i in range(300))}}}\n"
        f"measurements: {{verify: [{', '.join(f'{{tokens: 1, time_ms: 1, comm: {chr(97 + i % 26) * 50}{i}}}' for i in range(30_000))}]}}\n",
        "and 950 more at least",
    ),
    "a megabyte of brackets": (f"{HEAD}description: {'[]' * 2**19}", "must be YAML"),
    "a megabyte of question marks": (HEAD + "? " * 2**19, "nested at most"),
    "a megabyte of anchors": (f"{HEAD}a: {'&a ' * 2**18}", "must be YAML"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_file_is_refused_within_limits(kind: str, tmp_path: Path) -> None:
    text, expected = HOSTILE[kind]
    path = tmp_path / "hostile"
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", READ, str(path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 3, done.stderr[-2000:]
    assert expected in done.stdout
    assert len(done.stdout) < 100_000


def test_endless_file_is_refused() -> None:
    code = "import sys\nfrom specmodel import io\ntry:\n    io.read_document('-', max_bytes=2**20)\nexcept io.CalibrationError as e:\n    sys.exit(str(e))"
    with open("/dev/zero", "rb") as zeros:
        done = subprocess.run(
            [sys.executable, "-c", code], stdin=zeros, capture_output=True, text=True, timeout=120, check=False
        )
    assert "must be at most 1 MiB" in done.stderr
