"""`specmodel measure` on a pretended machine of two H200, whose measuring binary is another program.

Usage: fake_measure.py PROGRAM [OPTIONS of specmodel measure]
"""

import sys
from pathlib import Path

from specmodel.cli import main
from specmodel.harness import build, gpus

CARDS = "".join(
    f"{i}, NVIDIA H200, 580.159.04, 143771, 143000, Disabled, 00000000:0{i}:00.0, 9.0, GPU-{i}\n" for i in range(2)
)

if __name__ == "__main__":
    program = Path(sys.argv[1])
    gpus.read_gpus = lambda: gpus.parse_gpus(CARDS)
    build.find_toolchain = lambda: None
    build.build = lambda *_, **__: program
    build.find_nccl = lambda: None
    sys.exit(main(["measure", *sys.argv[2:]]))
