"""``specmodel optimize``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specmodel.commands import options, output

if TYPE_CHECKING:
    from specmodel.model import FittedModel
    from specmodel.optimum import Candidate, Optimum
    from specmodel.schedule import ScheduleStep

EXAMPLES = """\
  specmodel optimize calib.yaml
  specmodel optimize calib.yaml --batch 1,2,4,8           one answer a batch, and a schedule
  specmodel optimize calib.yaml --comm ring-ll --workload chat=0.7,code=0.3
  specmodel optimize calib.yaml --trees 5x4x8,3x2x6       draft trees beside the chains
  specmodel optimize calib.yaml --objective goodput --max-tpot-ms 25 --batch 1=0.2,8=0.5,32=0.3
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
    from specmodel.commands import words
    from specmodel.schedule import schedule

    optima = answers(model, args)
    steps = schedule(optima)
    refusals = [words.refusal(model, optimum, extrapolate=args.extrapolate) for optimum in optima]
    if args.plot is not None:
        _plot(args, model, optima)
    if args.json:
        output.write_json(document(model, optima, steps, refusals))
    else:
        from specmodel.commands.optimize_screen import screen

        page = output.page(args)
        output.write_screen(screen(args, model, optima, steps, refusals, page.width), page)
    return 1 if any(refusals) else 0


def answers(model: FittedModel, args: argparse.Namespace) -> list[Optimum]:
    """Return one optimum for each batch, or one for the distribution of batches that is meant."""
    from specmodel.decide import optimize

    shares = options.distribution(args.batch, args.objective, model)
    batches: list[Any] = [shares] if shares is not None else list(options.batches(args.batch, model))
    return [
        optimize(
            model,
            batch=batch,
            comm=options.comm_names(args.comm, model),
            max_steps=args.max_steps,
            workload=args.workload,
            context_tokens=args.context_tokens,
            trees=args.trees,
            objective=args.objective,
            max_tpot_ms=args.max_tpot_ms,
        )
        for batch in batches
    ]


def _plot(args: argparse.Namespace, model: FittedModel, optima: list[Optimum]) -> None:
    from specmodel.errors import UsageError
    from specmodel.plot import figure_of_optima, save

    try:
        save(figure_of_optima(model, optima, workload=args.workload), args.plot)
    except OSError as error:
        raise UsageError(f"--plot {args.plot}: {error.strerror or error}") from error


CANDIDATE_KEYS = (
    "num_steps",
    "num_draft_tokens",
    "topk",
    "comm",
    "tok_s",
    "tok_s_interval",
    "tpot_ms",
    "cycle_ms",
    "verify_ms",
    "draft_ms",
    "overhead_ms",
    "acceptance_length",
    "speedup",
    "probability_best",
    "extrapolated",
    "measured",
)


def candidate_document(c: Candidate) -> dict[str, Any]:
    """Return a candidate with the keys of the interface."""
    return {key: getattr(c, key) for key in CANDIDATE_KEYS}


def document(
    model: FittedModel, optima: list[Optimum], steps: tuple[ScheduleStep, ...], refusals: list[str | None]
) -> dict[str, Any]:
    """Return the answer as ``specmodel.optimum/1``."""
    warnings = dict.fromkeys(w for optimum in optima for w in optimum.warnings)
    warnings |= dict.fromkeys(f"not recommended: {text}" for text in refusals if text)
    return {
        "schema": "specmodel.optimum/1",
        "optima": [_optimum_document(optimum) for optimum in optima],
        "schedule": [
            {
                "batch_from": output.whole(step.batch_from),
                "batch_to": None if step.batch_to is None else output.whole(step.batch_to),
                "num_steps": step.num_steps,
                "topk": step.topk,
                "num_draft_tokens": step.num_draft_tokens,
                "comm": step.comm,
            }
            for step in steps
        ],
        "comm_settings": comm_settings(model),
        "warnings": list(warnings),
    }


def _optimum_document(optimum: Optimum) -> dict[str, Any]:
    plain, following = optimum.plain, optimum.measure_next
    return {
        "batch": output.whole(optimum.batch),
        "best": candidate_document(optimum.best),
        "ties": [candidate_document(c) for c in optimum.ties],
        "table": [candidate_document(c) for c in optimum.table],
        "plain": {
            "comm": plain.comm,
            "tok_s": plain.tok_s,
            "tok_s_interval": plain.tok_s_interval,
            "measured": plain.measured,
        },
        "ceilings": {
            name: {"speedup": ceiling.speedup, "interval": ceiling.interval}
            for name, ceiling in optimum.ceilings.items()
        },
        "expected_regret": optimum.expected_regret,
        "measure_next": None
        if following is None
        else {
            "kind": following.kind,
            "row": following.row,
            "reason": following.reason,
            "gain_tok_s": following.gain_tok_s,
        },
        "unmeasured": list(optimum.unmeasured),
    }


def comm_settings(model: FittedModel) -> dict[str, Any]:
    """Return every communication setting of the file, `default` included, with its environment and flags."""
    from specmodel.launch.plan import shell_env

    stated = model.calibration.comm
    return {
        name: {"env": shell_env(stated[name].env)[0], "flags": list(stated[name].flags)}
        if name in stated
        else {"env": {}, "flags": []}
        for name in model.calibration.comm_names
    }
