"""The screens that are kept as text beside this file, and how they are made.

    python tests/golden/screens.py            writes them anew: read the difference before committing it

Run it from anywhere after a change that is meant to be seen, of words or of numbers.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SEED = "calibrations/seed/kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
FIELD = "calibrations/field"
LOG = "tests/data/engines/sglang_v0510_eagle3_tree_tp8_noisy_truncated.log"

# Name of the file, and what is run: the arguments, the width, the encoding of the output.
SCREENS: dict[str, tuple[tuple[str, ...], int, str]] = {
    "optimize": (("optimize", SEED), 80, "utf-8"),
    "optimize-ascii": (("optimize", SEED), 80, "ascii"),
    "optimize-wide": (("optimize", SEED, "--comm", "default", "--max-steps", "5"), 120, "utf-8"),
    "optimize-fault": (("optimize", SEED, "--workload", "wiring-fault"), 80, "utf-8"),
    "optimize-trees": (("optimize", SEED, "--comm", "default", "--trees", "5x4x8", "--max-steps", "4"), 80, "utf-8"),
    "optimize-batches": (("optimize", f"{FIELD}/vllm_44697_mtp_pp4_pcie.yaml", "--max-steps", "4"), 80, "utf-8"),
    "predict": (("predict", SEED, "--steps", "0-3,5"), 80, "utf-8"),
    "fit": (("fit", SEED), 100, "utf-8"),
    "validate": (("validate", SEED, "--tolerance", "50"), 80, "utf-8"),
    "diagnose": (("diagnose", SEED), 80, "utf-8"),
    "diagnose-ascii": (("diagnose", f"{FIELD}/specforge_339_qwen3_30b_a3b_h100x2.yaml"), 80, "ascii"),
    "diagnose-log": (("diagnose", SEED, LOG), 100, "utf-8"),
    "whatif": (("whatif", SEED, "--set", "acceptance+=0.1", "--set", "verify*=0.8"), 80, "utf-8"),
    "whatif-explain": (("whatif", SEED, "--set", "draft=0", "--explain"), 80, "ascii"),
    "whatif-batch": (("whatif", SEED, "--set", "batch=64"), 80, "utf-8"),
    "whatif-sweep": (("whatif", SEED, "--sweep", "acceptance+=-0.1:0.2:0.05"), 100, "utf-8"),
    "whatif-map": (
        ("whatif", SEED, "--sweep", "acceptance+=-0.1:0.3:0.1", "--sweep", "verify*=0.5:1.5:0.25"),
        80,
        "utf-8",
    ),
    "report": (("report", SEED, "--format", "md"), 80, "utf-8"),
    "simulate": (
        (
            *("simulate", "calibrations/measured/h200_dense8b_ctx1024.yaml", "--arrivals", "closed:1,64"),
            *("--policy", "plain,fixed:3,optimal,oracle", "--requests", "80", "--seeds", "4"),
        ),
        80,
        "utf-8",
    ),
    "compare": (("compare", f"{FIELD}/qwen38mtp_5090_450w.yaml", f"{FIELD}/qwen38mtp_5090_600w.yaml"), 80, "utf-8"),
}


@contextlib.contextmanager
def _place(columns: int) -> Iterator[None]:
    before, environment = Path.cwd(), dict(os.environ)
    os.environ["COLUMNS"] = str(columns)
    os.chdir(ROOT)
    try:
        yield
    finally:
        os.chdir(before)
        os.environ.clear()
        os.environ.update(environment)


def taken(name: str) -> str:
    """Run a command in this process and return its screen."""
    from specmodel.cli import main

    arguments, columns, encoding = SCREENS[name]
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    with _place(columns), contextlib.redirect_stdout(stream):
        main(arguments)
    stream.flush()
    return buffer.getvalue().decode(encoding)


def path_of(name: str) -> Path:
    """The file that holds a screen."""
    return HERE / f"{name}.txt"


if __name__ == "__main__":
    for each in SCREENS:
        path_of(each).write_text(taken(each), encoding="utf-8")
        sys.stdout.write(f"{path_of(each).relative_to(ROOT)}\n")
