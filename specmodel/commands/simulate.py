"""``specmodel simulate``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmodel.commands import options, output

if TYPE_CHECKING:
    from collections.abc import Callable

    from specmodel.model import FittedModel
    from specmodel.simulate.scenario import Scenario
    from specmodel.simulate.summary import Simulation

EXAMPLES = """\
  specmodel simulate calib.yaml                              some clients; every kind of policy
  specmodel simulate calib.yaml --arrivals closed:1,8,64 --policy plain,fixed:3,schedule
  specmodel simulate calib.yaml --arrivals poisson:4 --max-batch 32 --slo tpot=20ms
  specmodel simulate calib.yaml --arrivals trace.jsonl --json
  specmodel simulate calib.yaml --arrivals closed:1,2,4,8,16,32 --plot front.svg
  specmodel simulate calib.yaml --sweep grid.yaml --out answers.jsonl
  specmodel simulate calib.yaml --sweep grid.yaml --out answers.jsonl --scheduler tcp://127.0.0.1:8786
"""
_PLAIN = (
    "requests", "output_tokens", "prompt_tokens", "workload", "max_batch", "max_steps", "comm", "slo", "seeds",
    "acceptance_spread", "acceptance_wander",
)  # fmt: skip
"""Options that are those of a scenario, by the same names."""
_MOST_LOADS = 64
_SHOWN_AFTER_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel simulate`."""
    options.add_calibration(parser)
    load = parser.add_argument_group("what arrives")
    load.add_argument(
        "--arrivals",
        metavar="closed:N,... | poisson:RATE,... | FILE",
        help="N clients that ask again at once, RATE requests per second, or a trace: a line of JSON for each request, "
        '{"arrival_ms": 250, "prompt_tokens": 800, "output_tokens": 200, "workload": "chat"}; several loads are '
        "answered one by one (default: closed:8, or the largest measured batch where that is smaller)",
    )
    load.add_argument(
        "--requests",
        type=options.whole_number(1, 10**6),
        metavar="N",
        help="requests of each seed (default: the larger of 200 and eight batches)",
    )
    length = "a number, uniform:LOW-HIGH, geometric:MEAN or lognormal:MEAN:CV"
    load.add_argument(
        "--output-tokens", metavar="LENGTH", help=f"{length} (default: that of the workload in the file, else 256)"
    )
    load.add_argument(
        "--prompt-tokens", metavar="LENGTH", help="in the same forms (default: for the measured context, else 512)"
    )
    load.add_argument(
        "--mix",
        "--workload",
        dest="workload",
        type=options.workload_shares,
        metavar="NAME[=SHARE],...",
        help="kind of traffic, or shares of the requests (default: `default`, else the mixture that the file states)",
    )
    how = parser.add_argument_group("how it is served")
    how.add_argument(
        "--policy",
        action="append",
        metavar="NAME,...",
        help="plain, fixed:K, schedule (what `optimize` emits), adaptive (SGLang's rule), and two bounds: optimal (the "
        "best steps for each request) and oracle (drafts only what is accepted); default: one of each",
    )
    how.add_argument(
        "--max-batch",
        type=options.whole_number(1, 4096),
        metavar="N",
        help="requests that run at once (default: the clients, else the largest measured batch)",
    )
    how.add_argument(
        "--max-steps", type=options.whole_number(0, 100), metavar="K", help="longest chain (default: as `optimize`)"
    )
    how.add_argument("--comm", metavar="NAME", help="communication setting (default: that of the schedule)")
    how.add_argument(
        "--slo", metavar="LIMITS", help="what a request must keep to count, such as tpot=20ms,ttft=500ms,latency=30s"
    )
    chance = parser.add_argument_group("chance")
    chance.add_argument("--seeds", type=options.whole_number(1, 4096), metavar="N", help="repetitions (default: 16)")
    chance.add_argument(
        "--acceptance-spread",
        type=_share,
        metavar="R",
        help="intraclass correlation of acceptance between requests, 0 to 0.9 (default: 0.05)",
    )
    chance.add_argument(
        "--acceptance-wander",
        type=_share,
        metavar="R",
        help="the same between stretches of one request (default: 0)",
    )
    chance.add_argument(
        "--model-draws",
        action="store_true",
        help="give every seed another draw of the model, so that intervals hold its uncertainty as well",
    )
    many = parser.add_argument_group("many scenarios")
    many.add_argument(
        "--sweep", metavar="GRID.yaml", help="options with lists of values: every combination is simulated"
    )
    many.add_argument(
        "--out",
        type=options.output_path,
        metavar="FILE",
        help="where the answers go, a line of JSON each; what is there is kept",
    )
    many.add_argument(
        "--workers", type=options.whole_number(1, 1024), metavar="N", help="processes (default: one a core)"
    )
    many.add_argument("--scheduler", metavar="ADDRESS", help="a Dask scheduler whose workers are used instead")
    parser.add_argument(
        "--plot",
        type=options.figure_path,
        metavar="FILE",
        help="write a figure too: tok/s of one user against tok/s of all",
    )
    parser.add_argument(
        "--extrapolate", action="store_true", help="trust points far from anything that was measured as well"
    )
    options.add_json(parser)


def _share(text: str) -> float:
    value = 0.0 if text.strip() in ("0", "0.0") else options.positive_number(text)
    if value > 0.9:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 0.9, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Throughput, latencies and goodput under load: requests arrive, batches breathe, outputs end.

    Rounds of continuous batching on the fitted costs and acceptance; every policy sees the same requests. Intervals are
    over the seeds, not of the model, unless --model-draws.

    Returns
    -------
    int
        0, or 1 where the best policy spends its time too far from what was measured, or a scenario of a sweep failed.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file; for options that are wrong or contradict each other.
    """
    _require_consistent(args)
    model = output.fitted(args.calibration, args)
    if args.sweep is not None:
        return _sweep(model, args)
    from specmodel.simulate import simulate
    from specmodel.simulate.notices import FAR_SHARE

    answers: list[Simulation] = []
    scenarios, notes = _scenarios(args)
    with _progress(args, "simulating") as report:
        for i, scenario in enumerate(scenarios):
            answers.append(
                simulate(model, scenario, report=lambda share, i=i: report(i + share, len(scenarios)))  # type: ignore[misc]
            )
    if args.plot is not None:
        _plot(args, model, answers)
    far = [a for a in answers if a[a.best].extrapolated_share > FAR_SHARE and not args.extrapolate]
    if args.json:
        document: dict[str, Any] = {
            "schema": "specmodel.simulation/1",
            "simulations": [a.as_dict() | {"recommended": a not in far and a[a.best].deployable} for a in answers],
            "warnings": list(dict.fromkeys([*notes, *(w for a in answers for w in a.warnings)])),
        }
        output.write_json(document)
    else:
        from specmodel.commands.simulate_screen import screen

        output.write_screen(screen(args, model, answers, notes, far), output.page(args))
    return 1 if far else 0


def _require_consistent(args: argparse.Namespace) -> None:
    from specmodel.errors import UsageError

    if args.sweep is None:
        for name in ("out", "workers", "scheduler"):
            if getattr(args, name) is not None:
                raise UsageError(f"--{name} belongs to --sweep GRID.yaml")
        return
    if args.out is None:
        raise UsageError("--sweep needs --out FILE: where the answers go")
    if args.workers is not None and args.scheduler is not None:
        raise UsageError("--workers and --scheduler exclude each other: the cluster has its own workers")
    if args.sweep == "-" == args.calibration:
        raise UsageError("standard input can be only one of the files")
    for name in [*_PLAIN, "arrivals", "policy", "plot", "model_draws"]:
        value = getattr(args, name)
        if value is not None and value is not False:
            option = "--mix" if name == "workload" else f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} cannot be given beside --sweep: state it in {args.sweep}")


def _scenarios(args: argparse.Namespace) -> tuple[list[Scenario], tuple[str, ...]]:
    """One scenario for each load, and notes on the trace."""
    from specmodel.errors import UsageError
    from specmodel.simulate.scenario import Scenario, arrivals_of, checked_scenario, policy_of

    given = args.arrivals or ""
    kind, _, values = given.partition(":")
    trace: tuple[Any, ...] = ()
    notes: tuple[str, ...] = ()
    loads: list[str | None] = [None]
    if kind in ("closed", "poisson") and values:
        loads = [str(arrivals_of(f"{kind}:{value.strip()}")) for value in values.split(",")]
        if len(loads) > _MOST_LOADS:
            raise UsageError(f"--arrivals: at most {_MOST_LOADS} loads, got {len(loads)}; use --sweep for more")
        if len(set(loads)) < len(loads):
            raise UsageError(f"--arrivals: a load is given twice in {given!r}")
    elif args.arrivals is not None:
        loads = ["trace"]
        trace, notes = _trace(given)
    words = [word.strip() for text in args.policy or [] for word in text.split(",")]
    return [
        checked_scenario(
            Scenario(
                arrivals=load,
                trace=trace,
                policies=tuple(str(policy_of(word)) for word in words),
                model_draws=args.model_draws,
                **{name: getattr(args, name) for name in _PLAIN if getattr(args, name) is not None},
            )
        )
        for load in loads
    ], notes


def _trace(path: str) -> tuple[Any, tuple[str, ...]]:
    """Read a trace, a line of JSON for each request."""
    import json

    from specmodel.documents import read_text
    from specmodel.errors import CalibrationError, UsageError
    from specmodel.simulate import trace_from

    if path != "-" and not Path(path).exists() and not any(c in path for c in "./\\"):
        raise UsageError(f"--arrivals must be closed:N, poisson:RATE or the file of a trace, got {path!r}")
    text, source = read_text(path)
    rows = []
    for i, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError):
                raise CalibrationError.single(
                    f"{source}, line {i}", "a line of JSON", "something else", "write one object a line"
                ) from None
    try:
        trace, notes = trace_from(rows, source)
    except UsageError as error:
        raise CalibrationError(str(error)) from None
    return trace, notes


def _plot(args: argparse.Namespace, model: FittedModel, answers: list[Simulation]) -> None:
    from specmodel.plot import save
    from specmodel.simulate.figure import figure_of_front

    with output.writing(args.plot):
        save(figure_of_front(answers, model.calibration.name), args.plot)


def _sweep(model: FittedModel, args: argparse.Namespace) -> int:
    from specmodel.errors import CalibrationError, UsageError
    from specmodel.io import read_document
    from specmodel.simulate.sweep import sweep

    source = "<stdin>" if args.sweep == "-" else args.sweep
    document = read_document(args.sweep)
    try:
        with _progress(args, "scenarios") as report:
            count = sweep(
                model,
                document,
                args.out,
                source=source,
                workers=args.workers,
                scheduler=args.scheduler,
                report=lambda done, total: report(done, total),
            )
    except UsageError as error:
        if str(error).startswith(f"{source}: "):
            raise CalibrationError(str(error)) from None
        raise
    if args.json:
        output.write_json(
            {
                "schema": "specmodel.sweep-count/1",
                "out": str(args.out),
                "scenarios": count.total,
                "kept": count.kept,
                "failed": count.failed,
            }
        )
    else:
        kept = f", {count.kept} of them from before" if count.kept else ""
        failed = f"; {count.failed} failed, the first because {count.reason}" if count.failed else ""
        output.write(f"{count.total} scenario{'s' * (count.total > 1)} in {args.out}{kept}{failed}\n")
    return 1 if count.failed else 0


@contextmanager
def _progress(args: argparse.Namespace, what: str) -> Iterator[Callable[[float, float], None]]:
    """Show a bar on standard error once the work takes longer than a second, and a person is looking."""
    if args.quiet or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    start, last = time.monotonic(), 0.0
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        console=Console(stderr=True, no_color=args.no_color or None),
        transient=True,
        auto_refresh=False,
    )
    task = bar.add_task(what, total=1.0)
    shown = False

    def report(done: float, total: float) -> None:
        nonlocal shown, last
        now = time.monotonic()
        if now - start < _SHOWN_AFTER_S or now - last < 0.1:
            return
        if not shown:
            bar.start()
            shown = True
        last = now
        bar.update(task, completed=done, total=total, refresh=True)

    try:
        yield report
    finally:
        if shown:
            bar.stop()
