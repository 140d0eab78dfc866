"""``--engine``: for which engine and version a recommendation is written."""

from __future__ import annotations

import argparse
import re

NAMES = ("sglang", "vllm", "trtllm", "llamacpp")
_ALIASES = {"tensorrt-llm": "trtllm", "tensorrtllm": "trtllm", "llama.cpp": "llamacpp", "llama-cpp": "llamacpp"}


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add ``--engine``."""
    parser.add_argument(
        "--engine",
        type=engine_version,
        metavar="NAME[:VERSION]",
        help=f"write the recommendation for this engine ({', '.join(NAMES)}) and version; by default for those that "
        "the file names",
    )


def engine_version(text: str) -> tuple[str, str | None]:
    """Read ``vllm`` or ``vllm:0.24.0``."""
    name, colon, version = text.partition(":")
    engine = _ALIASES.get(name.strip().lower(), name.strip().lower())
    if engine not in NAMES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(NAMES)}, or NAME:VERSION, got {text!r}")
    if colon and not re.fullmatch(r"[vb]?[0-9][0-9A-Za-z.+-]{0,39}", version.strip()):
        raise argparse.ArgumentTypeError(f"a version must begin with a number, such as {engine}:1.2, got {text!r}")
    return engine, version.strip() or None
