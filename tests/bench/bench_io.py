"""Times of the file layer: python tests/bench/bench_io.py

Large files are made here, of rows as a harness writes them; the start-up times are those of a fresh interpreter.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specmodel import documents, form, io, schema

MEBIBYTE = 2**20
SEED = Path(__file__).resolve().parents[2] / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"


def cycles_row(draw: random.Random) -> dict[str, Any]:
    return {
        "num_steps": draw.randint(0, 10),
        "batch": draw.randint(1, 64),
        "comm": "default",
        "context_tokens": 2048,
        "acceptance_length": round(1 + draw.random(), 4),
        "tok_s": round(1000 * draw.random() + 1, 3),
        "samples": 30,
    }


def verify_row(draw: random.Random) -> dict[str, Any]:
    return {"tokens": draw.randint(1, 512), "time_ms": round(draw.random() + 1, 4)}


def document(kind: str, row: Callable[[random.Random], dict[str, Any]], size_bytes: int) -> dict[str, Any]:
    draw, rows, length = random.Random(1), list[dict[str, Any]](), 0
    while length < size_bytes:
        rows.append(row(draw))
        length += len(json.dumps(rows[-1])) + 2
    return {"schema": "specmodel.calibration/1", "name": "bench", "measurements": {kind: rows}}


def best_ms(call: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def fresh_ms(code: str, repeats: int = 7) -> float:
    """Median time of a fresh interpreter that runs `code`."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def line(what: str, ms: float) -> None:
    sys.stdout.write(f"{what:<66}{ms:>10.1f} ms\n")


def main() -> None:
    io.load(SEED)
    for kind, row in (("cycles", cycles_row), ("verify", verify_row)):
        made = document(kind, row, 10 * MEBIBYTE)
        rows = len(made["measurements"][kind])
        text = json.dumps(made)
        what = f"{len(text) / MEBIBYTE:.1f} MiB of JSON, {rows} rows of {kind}"
        line(f"{what}: parse", best_ms(lambda: documents.parse(text, "x.json")))  # noqa: B023  (called at once)
        line(f"{what}: validate", best_ms(lambda: form.validate(made, "x")))  # noqa: B023
        line(f"{what}: loads", best_ms(lambda: io.loads(text, "x.json")))  # noqa: B023
    made = document("cycles", cycles_row, 2 * MEBIBYTE)
    calibration = io.from_dict(made)
    text = io.dumps(calibration)
    line(f"{len(text) / MEBIBYTE:.1f} MiB of YAML: loads", best_ms(lambda: io.loads(text), 2))
    line(f"{len(text) / MEBIBYTE:.1f} MiB of YAML: dumps", best_ms(lambda: io.dumps(calibration), 2))
    line("seed file: load", best_ms(lambda: io.load(SEED), 50))
    line("seed file: from_dict", best_ms(lambda: io.from_dict(io.read_document(SEED)), 50))
    line("JSON Schema", best_ms(schema.json_schema))

    libraries = "import numpy, scipy.optimize, pydantic, ruamel.yaml"
    bare = fresh_ms("")
    base = fresh_ms(libraries)
    line("interpreter", bare)
    line(f"{libraries} (above the interpreter)", base - bare)
    line("  ... and import specmodel.io", fresh_ms(f"{libraries}; import specmodel.io") - base)
    line(
        "  ... and load the seed file",
        fresh_ms(f"{libraries}; import specmodel.io as io; io.load({str(SEED)!r})") - base,
    )
    line("import specmodel.io alone (above the interpreter)", fresh_ms("import specmodel.io") - bare)


if __name__ == "__main__":
    main()
