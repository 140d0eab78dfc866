"""``specmodel report``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Literal

from specmodel.commands import launching, options, output

EXAMPLES = """\
  specmodel report calib.yaml -o report.html              one page to read, print or mail: no network needed
  specmodel report calib.yaml -o report.html --batch 1,8,32 --workload chat=0.7,code=0.3
  specmodel report calib.yaml --format md                 for an issue thread
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel report`."""
    options.add_calibration(parser)
    parser.add_argument(
        "-o",
        "--output",
        type=options.output_path,
        metavar="FILE",
        help="where the report goes (default, and -: standard output)",
    )
    parser.add_argument(
        "--format", choices=("html", "md"), help="a page or Markdown (default: by the name of the file, else html)"
    )
    options.add_candidates(parser)
    options.add_extrapolate(parser)
    launching.add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Everything that a decision needs on one page: verdict, figures, launch line, ledger, sliders, provenance.

    Returns
    -------
    int
        0, or 1 where no batch has a recommendation; the report is written all the same.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file; for names that it lacks, or a report that cannot be written.
    """
    from specmodel.errors import UsageError

    if args.batch is not None and any(share is not None for share in args.batch.values()):
        raise UsageError(
            "--batch N=SHARE is for `optimize --objective goodput`; a report answers each batch for itself"
        )
    target: Path | None = None if args.output in (None, Path("-")) else args.output
    named = target is not None and target.suffix.lower() in (".md", ".markdown")
    kind: Literal["html", "md"] = args.format or ("md" if named else "html")
    if target is None and kind == "html" and sys.stdout is not None and sys.stdout.isatty():
        raise UsageError("a page is no reading for a terminal: name a file with -o report.html, or use --format md")
    model = output.fitted(args.calibration, args)
    from specmodel.report_page import gather, written

    content = gather(
        model,
        tuple(args.batch) if args.batch is not None else None,
        comm=options.comm_names(args.comm, model),
        max_steps=args.max_steps,
        workload=args.workload,
        context_tokens=args.context_tokens,
        trees=args.trees,
        extrapolate=args.extrapolate,
        engine=args.engine,
    )
    made = written(content, kind)
    if target is None:
        output.write(made.text)
    else:
        from specmodel.documents import write_text
        from specmodel.report import printable

        with output.writing(target):
            write_text(target, made.text)
        output.write(f"{target}: {printable(made.answer)}\n")
    return 0 if made.recommended else 1
