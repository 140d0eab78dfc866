"""``specmodel validate``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmodel.commands import options, output

if TYPE_CHECKING:
    from specmodel.calibration import Calibration, CycleRow
    from specmodel.report import Block, Grid, Screen
    from specmodel.validate import ValidatedRow, ValidationReport

EXAMPLES = """\
  specmodel validate calib.yaml measured.yaml                 field measurements, in the same format
  specmodel validate calib.yaml measured.yaml --tolerance 5   exit code 1 where a row is off by more than 5 %
  specmodel validate calib.yaml        the file's own `validation`, and each of its cycles left out in turn
  specmodel validate --page docs/validation.md calibrations/*/*.yaml   a page on all of them, with figures
"""
_MOST_SETTINGS = 200
_WORTH_SHOWING_MS = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel validate`."""
    options.add_calibration(parser)
    parser.add_argument(
        "measured", nargs="*", metavar="MEASURED", help="measured cycles, in the same format; - is standard input"
    )
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="write a Markdown page on every given calibration, failures first, and its figures to images/ beside it",
    )
    parser.add_argument(
        "--tolerance",
        type=options.positive_number,
        metavar="PERCENT",
        help="exit with 1 where the tok/s of a row is off by more than this (impossible rows do not count)",
    )
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Predicted against measured: per row the interval, what was measured, and a verdict.

    Where a row states its acceptance length, the prediction uses it: that tests the cost of a cycle. How far it is off
    with the acceptance predicted as well is said below the table.

    Returns
    -------
    int
        0, or 1 where a row is beyond ``--tolerance``.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file or one without cycles; for names that the calibration lacks.
    """
    from specmodel.errors import UsageError

    if args.page is not None:
        return _page(args)
    if len(args.measured) > 1:
        raise UsageError("one MEASURED file is compared with a calibration; more than two files are for --page FILE")
    measured = args.measured[0] if args.measured else None
    if args.calibration == measured == "-":
        raise UsageError("standard input can be only one of the two files")
    cal = output.load(args.calibration, args)
    output.one_thread()
    reports = _measured(cal, measured, args) if measured is not None else _own(cal, args)
    rows = [row for _, report in reports for row in report.rows]
    beyond = [] if args.tolerance is None else [r for _, report in reports for r in report.beyond(args.tolerance)]
    if args.json:
        from specmodel.validate import ValidationReport

        document: dict[str, Any] = {
            "schema": "specmodel.validation/1",
            "rows": [
                {
                    "row": output.row_of(r.row),
                    "predicted_tok_s": r.predicted_tok_s,
                    "tok_s_interval": r.tok_s_interval,
                    "measured_tok_s": r.measured_tok_s,
                    "verdict": r.verdict,
                }
                for r in rows
            ],
            "coverage": ValidationReport(rows=tuple(rows)).coverage,
            "exceeded": bool(beyond),
        }
        output.write_json(document)
    else:
        output.write_screen(_screen(cal, reports, beyond, args), output.page(args))
    return 1 if beyond else 0


def _page(args: argparse.Namespace) -> int:
    from specmodel.errors import SpecModelError, UsageError

    page, files = Path(args.page), [args.calibration, *args.measured]
    if args.json or args.tolerance is not None:
        raise UsageError("--page goes with neither --json nor --tolerance")
    if page.is_dir() or not page.parent.is_dir():
        raise UsageError(f"--page {args.page}: name a file in a directory that exists")
    cals = [output.load(path, args) for path in files]
    output.one_thread()
    from specmodel.validation_page import write_page

    try:
        evidence = write_page(cals, page, f"specmodel validate --page {args.page} {_pattern(files)}", _progress(args))
    except OSError as error:
        raise SpecModelError(f"{error.filename or args.page} cannot be written: {error.strerror}") from error
    inside = sum(p.inside() for p in evidence.points)
    text = f"{args.page}: {len(cals)} calibrations, {inside} of {len(evidence.points)} predictions inside their 90 %"
    output.write(f"{text} interval\n")
    return 0


def _pattern(files: Sequence[str]) -> str:
    """Name many files as the shell pattern that they probably came from."""
    folders = sorted({str(Path(f).parent) for f in files})
    above = {str(Path(f).parent) for f in folders}
    if len(files) < 4:
        return " ".join(files)
    if len(folders) > 1 and len(above) == 1:
        return f"{above.pop()}/*/*.yaml"
    return " ".join(f"{folder}/*.yaml" for folder in folders)


def _measured(cal: Calibration, path: str, args: argparse.Namespace) -> list[tuple[str, ValidationReport]]:
    from specmodel.fit import fit
    from specmodel.validate import validate

    other = output.load(path, args)
    cycles: tuple[CycleRow, ...] = (*other.measurements.cycles, *other.validation.cycles)
    if not cycles:
        from specmodel.errors import CalibrationError

        raise CalibrationError.single(
            "<stdin>" if path == "-" else path,
            "a file with cycles",
            "one without",
            "put what was measured under measurements.cycles",
        )
    return [(f"measured: {other.name}", validate(fit(cal), cycles))]


def _own(cal: Calibration, args: argparse.Namespace) -> list[tuple[str, ValidationReport]]:
    from specmodel.fit import fit
    from specmodel.validate import cross_validate, validate

    reports = []
    if cal.validation.cycles:
        reports.append(("validation: cycles of the file that no fit sees", validate(fit(cal), cal.validation.cycles)))
    if cal.measurements.cycles:
        report = cross_validate(cal, most_settings=_MOST_SETTINGS, progress=_progress(args))
        reports.append(("leave-one-out: each cycle predicted from the rest of the file", report))
    if not reports:
        from specmodel.errors import UsageError

        raise UsageError(f"{cal.name} has no cycles to check; give a MEASURED file")
    return reports


def _progress(args: argparse.Namespace) -> Callable[[int, int], None] | None:
    """Return what shows progress on a terminal, once it is clear that it takes more than about a second."""
    if args.quiet or not sys.stderr.isatty():
        return None
    start_ms = 1000.0 * time.monotonic()

    def show(done: int, total: int) -> None:
        past_ms = 1000.0 * time.monotonic() - start_ms
        if past_ms * total / done > _WORTH_SHOWING_MS:
            sys.stderr.write(f"\r\x1b[Kleft out {done} of {total}" if done < total else "\r\x1b[K")
            sys.stderr.flush()

    return show


def _screen(
    cal: Calibration,
    reports: Sequence[tuple[str, ValidationReport]],
    beyond: Sequence[ValidatedRow],
    args: argparse.Namespace,
) -> Screen:
    from specmodel.report import Entries, Screen

    blocks: list[Block] = [f"{cal.name}: {cal.description}" if cal.description else cal.name]
    for title, report in reports:
        blocks.append(title)
        if report.rows:
            blocks.append(_grid(report))
        items = [("errors", _errors(report))] if report.possible else []
        items += [("impossible", f"{_place(r.row)}: {r.reason}") for r in report.rows if r.reason]
        items += [("left out", text) for text in report.skipped]
        blocks += [Entries(items=items)] if items else []
    if beyond:
        worst = max(beyond, key=lambda r: abs(r.error))
        text = f"{len(beyond)} rows are" if len(beyond) > 1 else "1 row is"
        blocks.append(f"{text} off by more than {args.tolerance:g} %, the most {_place(worst.row)}")
    return Screen(blocks=blocks, last=_last([r for _, report in reports for r in report.rows], args))


def _grid(report: ValidationReport) -> Grid:
    from specmodel.report import Bar, Column, Grid, axis_of, change, interval, rate

    rows = report.rows
    cycles = [r.row for r in rows]
    columns = [Column(heading="steps", cells=[str(c.num_steps) for c in cycles])]
    if any(c.topk > 1 for c in cycles):
        columns.append(Column(heading="topk", cells=[str(c.topk) for c in cycles]))
        columns.append(Column(heading="tokens", cells=[str(c.verify_tokens) for c in cycles]))
    for name, heading, left in (
        ("batch", "batch", False),
        ("context_tokens", "context", False),
        ("comm", "comm", True),
        ("workload", "workload", True),
    ):
        values = [getattr(c, name) for c in cycles]
        if len(set(values)) > 1:
            cells = ["-" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in values]
            columns.append(Column(heading=heading, cells=cells, left=left, priority=1))
    most = ["at most " if c.tok_s_at_most is not None else "" for c in cycles]
    columns += [
        Column(heading="predicted", cells=[rate(r.predicted_tok_s) for r in rows]),
        Column(heading="90 % interval", cells=[interval(r.tok_s_interval) for r in rows], priority=2),
        Column(heading="measured", cells=[m + rate(r.measured_tok_s) for m, r in zip(most, rows, strict=True)]),
        Column(heading="error", cells=[change(r.error) for r in rows], priority=3),
        Column(heading="verdict", cells=[r.verdict for r in rows], left=True),
    ]
    bars = [
        Bar(
            value=r.measured_tok_s / r.predicted_tok_s,
            low=r.tok_s_interval[0] / r.predicted_tok_s,
            high=r.tok_s_interval[1] / r.predicted_tok_s,
            measured=True,
        )
        for r in rows
    ]
    return Grid(
        columns=columns,
        marks=["!" if r.extrapolated else " " for r in rows],
        bars=bars,
        axis=axis_of(bars, "measured/predicted", 1.0),
        plot_priority=4,
        strong=frozenset(i for i, r in enumerate(rows) if r.verdict != "inside"),
        legend="! extrapolated" if any(r.extrapolated for r in rows) else "",
    )


def _place(row: CycleRow) -> str:
    from specmodel.words import setting_name

    name = setting_name(row.num_steps, row.topk, row.verify_tokens)
    where = [f"batch {row.batch:g}"] + [x for x in (row.comm, row.workload) if x != "default"]
    return f"{name} ({', '.join(where)})"


def _errors(report: ValidationReport) -> str:
    import statistics

    errors = [100.0 * abs(e) for e in report.errors]
    text = f"of tok/s: mean {statistics.fmean(errors):.1f} %, median {statistics.median(errors):.1f} %, "
    text += f"largest {max(errors):.1f} %"
    fitted = [100.0 * abs(r.fitted_error) for r in report.possible]
    if any(r.row.acceptance_length is not None for r in report.possible):
        text += f"; with the acceptance predicted as well, mean {statistics.fmean(fitted):.1f} %"
    return text


def _last(rows: Sequence[ValidatedRow], args: argparse.Namespace) -> str:
    counts = {verdict: sum(r.verdict == verdict for r in rows) for verdict in ("inside", "slower", "faster")}
    possible = sum(counts.values())
    impossible = len(rows) - possible
    words = {"slower": "slower than predicted", "faster": "faster than predicted"}
    text = f"{counts['inside']} of {possible} rows lie inside their 90 % interval"
    outside = [f"{counts[verdict]} {words[verdict]}" for verdict in words if counts[verdict]]
    outside += [f"{impossible} impossible"] if impossible else []
    text += f"; {', '.join(outside)}" if outside else ""
    if args.tolerance is not None:
        errors = [100.0 * abs(r.error) for r in rows if r.verdict != "impossible"]
        worst = max(errors, default=0.0)
        text += f"; the largest error is {worst:.1f} %, {'beyond' if worst > args.tolerance else 'within'} "
        text += f"{args.tolerance:g} %"
    return text
