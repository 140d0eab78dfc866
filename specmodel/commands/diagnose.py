"""``specmodel diagnose``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from specmodel.commands import options, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specmodel.calibration import Calibration
    from specmodel.diagnosis import Diagnosis, Lever, Status
    from specmodel.report import Block, Grid, Screen

EXAMPLES = """\
  specmodel diagnose calib.yaml                   is it the drafter or the engine, and what is worth working on
  specmodel diagnose calib.yaml server.log        with what the engine's log shows of graphs and communication
  specmodel diagnose calib.yaml --batch 8 --worth 5%
  specmodel diagnose calib.yaml --json | jq '.levers[] | select(.status == "open")'
"""
_MOST_FINDINGS = 5
_MOST_BATCHES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel diagnose`."""
    options.add_calibration(parser)
    parser.add_argument(
        "logs", nargs="*", metavar="LOG", help="logs of the same deployment's engine, as `specmodel ingest` takes them"
    )
    parser.add_argument(
        "--batch", type=_batch, metavar="N", help="running sequences (default: 1 if measured, else the smallest)"
    )
    parser.add_argument("--comm", action="append", metavar="NAME,...", help="communication settings (default: all)")
    parser.add_argument(
        "--workload",
        type=options.workload_shares,
        metavar="NAME[=SHARE],...",
        help="kind of traffic, or a mixture (default: `default`, else the mixture that the file states)",
    )
    parser.add_argument(
        "--context-tokens",
        type=options.whole_number(0, 10**9),
        metavar="N",
        help="tokens of context per sequence (default: the context with most rows at that batch)",
    )
    parser.add_argument(
        "--worth",
        type=_percent,
        default=0.02,
        metavar="PERCENT",
        help="a lever that brings less than this at most is closed (default: 2%%)",
    )
    options.add_json(parser)


def _batch(text: str) -> float:
    sizes = options.batch_shares(text)
    if len(sizes) != 1 or None not in sizes.values():
        raise argparse.ArgumentTypeError(f"must be one number, such as 8, got {text!r}; ask for others one by one")
    return next(iter(sizes))


def _percent(text: str) -> float:
    value = options.positive_number(text.strip().removesuffix("%").strip() or "none")
    if value >= 1000.0 or (value < 0.1 and "%" not in text):
        raise argparse.ArgumentTypeError(f"must be a percentage below 1000, such as 2%, got {text!r}")
    return value / 100.0


def run(args: argparse.Namespace) -> int:
    """Whether speculation pays and what holds it back: drafter, engine or nothing; and what each lever could bring.

    The fastest measured speculative setting is diagnosed. A lever is closed where the most that it could bring is below
    ``--worth``, open where it is above, and to be measured where the file cannot tell.

    Returns
    -------
    int
        0.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file or a log that cannot be read; for names that the calibration lacks.
    """
    from specmodel.errors import UsageError

    if [args.calibration, *args.logs].count("-") > 1:
        raise UsageError("standard input can be only one of the files")
    calibration = output.load(args.calibration, args)
    logged = _logged(args.logs)
    doubts = () if logged is None else _of_another(calibration, logged, args.calibration)
    output.one_thread()
    from dataclasses import replace

    from specmodel.diagnose import diagnose, diagnosis_document
    from specmodel.engines.redact import clean
    from specmodel.engines.seen import seen_sentences
    from specmodel.fit import fit

    if logged is not None and logged.model.cuda_graph_sizes and not calibration.model.cuda_graph_sizes:
        sizes = {name: getattr(logged.model, name) for name in ("cuda_graph_sizes", "cuda_graph_unit")}
        calibration = replace(calibration, model=replace(calibration.model, **sizes))
    evidence = () if logged is None else logged.evidence
    model = fit(calibration)
    found = diagnose(
        model,
        batch=args.batch,
        workload=args.workload,
        comm=options.comm_names(args.comm, model),
        worth=args.worth,
        runtime=evidence,
        context_tokens=args.context_tokens,
    )
    everything = (*evidence, *calibration.evidence)
    if everything:
        seen = seen_sentences(everything, calibration.model.cuda_graph_sizes, missing=logged is not None)
        found = replace(found, runtime=tuple(map(clean, seen)), warnings=(*found.warnings, *map(clean, doubts)))
    if args.json:
        output.write_json(diagnosis_document(found))
    else:
        output.write_screen(_screen(calibration, found), output.page(args))
    return 0


def _logged(logs: Sequence[str]) -> Calibration | None:
    """Read the logs as `specmodel ingest` does; None where there are none."""
    if not logs:
        return None
    from specmodel.engines.ingest import ingest
    from specmodel.engines.reading import Given

    calibration, _ = ingest(logs, Given(), "logs")
    return calibration


def _of_another(cal: Calibration, logged: Calibration, source: str) -> tuple[str, ...]:
    """Say where the logs name other models than the file, whose names may be anybody's words.

    Raises
    ------
    CalibrationError
        The logs are of another engine, or of another number of GPUs.
    """
    from specmodel.errors import CalibrationError, Fault
    from specmodel.launch.lines import engine_of

    facts = [
        ("engine", engine_of(cal.system.engine), engine_of(logged.system.engine)),
        ("tensor_parallel", cal.system.tensor_parallel, logged.system.tensor_parallel),
    ]
    remedy = "give the logs of the same deployment"
    faults = [
        Fault(path="", must=f"of {key} {stated}, as {source} says", got=str(got), remedy=remedy)
        for key, stated, got in facts
        if stated is not None and got is not None and stated != got
    ]
    if faults:
        raise CalibrationError.of(faults, "LOG")
    out = []
    for key in ("target", "draft"):
        stated, got = getattr(cal.model, key), getattr(logged.model, key)
        if stated is not None and got is not None and stated != got:
            out.append(f"the log names another {key} ({got}) than the file ({stated}): is it of the same deployment?")
    return tuple(out)


def _screen(cal: Calibration, found: Diagnosis) -> Screen:
    from specmodel.report import Entries, Screen
    from specmodel.words import warning_items

    verdict = found.verdict[0].upper() + found.verdict[1:]
    blocks: list[Block] = [f"{cal.name}, batch {found.batch:g}", Entries(items=[("verdict", verdict)])]
    ranked = [x for x in found.levers if x.status != "closed"]
    if ranked:
        blocks.append(_grid(ranked, found.worth))
    items = [("open", f"{x.title}: {_told(x)}") for x in ranked if x.status == "open"]
    deciding: dict[str, list[str]] = {}
    for x in ranked:
        if x.status == "measure":
            deciding.setdefault(x.decided_by or x.evidence, []).append(x.title)
    items += [("measure", f"{', '.join(titles)}: {by}") for by, titles in deciding.items()]
    items += [("closed", _closed(x)) for x in found.levers if x.status == "closed"]
    blocks.append(Entries(items=items))
    rest = [("numbers", f"{f.message} ({f.where})") for f in found.findings[:_MOST_FINDINGS]]
    if len(found.findings) > _MOST_FINDINGS:
        rest.append(("numbers", f"and {len(found.findings) - _MOST_FINDINGS} more, all of them in --json"))
    rest += [("batches", f"{b:g}: {text}") for b, text in found.other_batches[:_MOST_BATCHES]]
    rest += [("seen", text) for text in found.runtime]
    told = " ".join(f.message for f in found.findings)
    fresh = [w for w in found.warnings if not any(f.where in w for f in found.findings if f.where)]
    rest += warning_items(w for w in fresh if w not in told)
    blocks += [Entries(items=rest)] if rest else []
    return Screen(blocks=blocks, last=_last(found))


def _told(x: Lever) -> str:
    return x.evidence + (f"; {x.decided_by}" if x.decided_by else "")


def _closed(x: Lever) -> str:
    from specmodel.report import factor

    brings = "" if x.interval is None or x.interval[1] < 1.0005 else f" (at most {factor(x.interval[1])})"
    return f"{x.title}{brings}: {x.evidence}"


def _grid(levers: Sequence[Lever], worth: float) -> Grid:
    from specmodel.report import Column, Grid, factor

    def cell(value: float | None) -> str:
        return "?" if value is None else factor(value)

    def span(x: Lever) -> str:
        return "" if x.interval is None else f"{factor(x.interval[0])} to {factor(x.interval[1])}"

    marks: dict[Status, str] = {"open": "*", "measure": "?", "closed": " "}
    return Grid(
        columns=[
            Column(heading="lever", cells=[x.title for x in levers], left=True),
            Column(heading="at most", cells=[cell(x.bound) for x in levers], priority=1),
            Column(heading="K again", cells=[cell(x.bound_optimised) for x in levers]),
            Column(heading="90 % interval", cells=[span(x) for x in levers], priority=2),
        ],
        marks=[marks[x.status] for x in levers],
        strong=frozenset(i for i, x in enumerate(levers) if x.status == "open"),
        legend=f"* open: brings more than {100 * worth:g} %   ? a measurement decides   K again: steps chosen anew",
    )


def _last(found: Diagnosis) -> str:
    from specmodel.report import factor

    open_levers = [x for x in found.levers if x.status == "open"]
    unknown = [x for x in found.levers if x.status == "measure"]
    closed = len(found.levers) - len(open_levers) - len(unknown)
    parts = []
    off, first = found.off, found.work_on
    if found.measure_first:
        parts.append("measure first: plain decoding ({num_steps: 0})")
        first = None
    elif off is not None:
        brings = "" if off.bound_optimised is None else f", {factor(off.bound_optimised)} at batch {found.batch:g}"
        parts.append(f"turn speculation off{brings}")
    if first is not None:
        most = "" if first.bound_optimised is None else f", at most {factor(first.bound_optimised)}"
        parts.append(f"{'work on' if first.status == 'open' else 'measure'} next: {first.title}{most}")
    elif not parts:
        parts.append("nothing is open" + ("" if unknown else ": stop here"))
    if unknown:
        parts.append(f"{len(unknown)} to be measured")
    parts.append(f"{closed} closed")
    return "; ".join(parts)
