"""``specmodel schema``."""

from __future__ import annotations

import argparse
import json

from specmodel.commands import output

EXAMPLES = """\
  specmodel schema --example > calib.yaml       a commented starter file
  specmodel schema > calibration-1.json         for editors: completes and checks keys
  specmodel schema --samples                    the raw samples that `specmodel measure` writes
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel schema`."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--example", action="store_true", help="a commented starter calibration, in YAML")
    which.add_argument("--samples", action="store_true", help="the JSON Schema of raw samples")


def run(args: argparse.Namespace) -> int:
    """The JSON Schema of calibration files, or a commented starter file.

    Returns
    -------
    int
        0.
    """
    if args.samples:
        from specmodel.harness import samples

        text = json.dumps(samples.json_schema(), indent=2) + "\n"
    else:
        from specmodel import io

        text = io.example() if args.example else json.dumps(io.json_schema(), indent=2) + "\n"
    output.write(text)
    return 0
