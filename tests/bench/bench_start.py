"""Whole-process times of the command line, beside what they are measured by.

    python tests/bench/bench_start.py [PAIRS]

Each command is run in turn with its reference, PAIRS times (15 by default); the median ratio of the pairs is shown
beside the ratio that is aimed at. Nothing passes or fails: the machine is whatever it is.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

SEED = Path(__file__).parents[2] / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
BARE = ("a bare interpreter", ["-c", "pass"])
IMPORTS = ("import numpy, scipy.optimize, pydantic, ruamel.yaml",)
LIBRARIES = ("import of the libraries", ["-c", *IMPORTS])
PROGRAM = ["-m", "specmodel"]

# What is run, its reference, and the ratio that is aimed at.
RUNS = (
    (("specmodel --help", [*PROGRAM, "--help"]), BARE, 4.0),
    (("specmodel optimize -h", [*PROGRAM, "optimize", "-h"]), BARE, 4.0),
    (("specmodel optimize SEED", [*PROGRAM, "optimize", str(SEED)]), LIBRARIES, 1.6),
    (("specmodel optimize SEED --json", [*PROGRAM, "optimize", str(SEED), "--json"]), LIBRARIES, 1.6),
    (("specmodel predict SEED", [*PROGRAM, "predict", str(SEED)]), LIBRARIES, 1.6),
    (("specmodel fit SEED", [*PROGRAM, "fit", str(SEED)]), LIBRARIES, 1.6),
)


def elapsed_ms(arguments: list[str]) -> float:
    """Run a process of this interpreter and return how long it took."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return 1000.0 * (time.perf_counter() - start)


def main(pairs: int) -> None:
    """Print the table."""
    sys.stdout.write(f"{'command':32} {'ms':>7} {'reference':>26} {'ms':>7} {'ratio':>6} {'aim':>5}\n")
    for (name, arguments), (reference, bare), aim in RUNS:
        elapsed_ms(arguments), elapsed_ms(bare)  # the first run fills the caches of the file system
        times = [(elapsed_ms(arguments), elapsed_ms(bare)) for _ in range(pairs)]
        own, other = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        sys.stdout.write(f"{name:32} {own:7.1f} {reference:>26} {other:7.1f} {ratio:6.2f} {aim:5.1f}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
