"""``specmodel optimize``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specmodel.commands import launching, options, output

if TYPE_CHECKING:
    from specmodel.model import FittedModel
    from specmodel.optimum import Optimum

EXAMPLES = """\
  specmodel optimize calib.yaml
  specmodel optimize calib.yaml --batch 1,2,4,8           one answer a batch, and a schedule
  specmodel optimize calib.yaml --comm ring-ll --workload chat=0.7,code=0.3
  specmodel optimize calib.yaml --trees 5x4x8,3x2x6       draft trees beside the chains
  specmodel optimize calib.yaml --trees auto              the best few trees by the model, too
  specmodel optimize calib.yaml --objective goodput --max-tpot-ms 25 --batch 1=0.2,8=0.5,32=0.3
  specmodel optimize calib.yaml --engine vllm:0.26        its flags or files, for the version named
  specmodel optimize calib.yaml --plot tok_s.svg
  specmodel optimize calib.yaml --json | jq .optima[0].best
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel optimize`."""
    options.add_calibration(parser)
    options.add_configuration(parser)
    parser.add_argument(
        "--plot", type=options.figure_path, metavar="FILE", help="write a figure too: .png, .svg or .pdf"
    )
    launching.add_engine(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """The best number of draft steps and communication setting, how sure that is, and what to measure next.

    Returns
    -------
    int
        0, or 1 where the best is not recommended: it is extrapolated, or rests on a row that cannot be.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file; for names that it lacks, or a limit that nothing keeps.
    """
    options.require_limit(args.objective, args.max_tpot_ms)
    model = output.fitted(args.calibration, args)
    from specmodel import words
    from specmodel.answer import answer_document
    from specmodel.launch.lines import launch_of
    from specmodel.schedule import schedule

    optima = answers(model, args)
    steps = schedule(optima, model, args.workload, args.context_tokens)
    refusals = [words.refusal(model, optimum, extrapolate=args.extrapolate) for optimum in optima]
    if args.plot is not None:
        _plot(args, model, optima)
    if args.json:
        launch = None if any(refusals) else launch_of(model, optima, steps, args.engine)
        output.write_json(answer_document(model, optima, steps, refusals, launch))
    else:
        from specmodel.commands.optimize_screen import screen

        page = output.page(args)
        output.write_screen(screen(args, model, optima, steps, refusals, page.width), page)
    return 1 if any(refusals) else 0


def answers(model: FittedModel, args: argparse.Namespace) -> list[Optimum]:
    """Return one optimum for each batch, or one for the distribution of batches that is meant."""
    from specmodel.decide import optimize

    shares = options.distribution(args.batch, args.objective, model)
    sizes = options.batches(args.batch, model) if shares is None else tuple(shares)
    batches: list[Any] = [shares] if shares is not None else list(sizes)
    trees = options.trees(args, model, sizes)
    return [
        optimize(
            model,
            batch=batch,
            comm=options.comm_names(args.comm, model),
            max_steps=args.max_steps,
            workload=args.workload,
            context_tokens=args.context_tokens,
            trees=trees,
            objective=args.objective,
            max_tpot_ms=args.max_tpot_ms,
        )
        for batch in batches
    ]


def _plot(args: argparse.Namespace, model: FittedModel, optima: list[Optimum]) -> None:
    from specmodel.plot import figure_of_optima, save

    with output.writing(args.plot):
        save(figure_of_optima(model, optima, workload=args.workload), args.plot)
