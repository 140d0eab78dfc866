"""``specmodel predict``."""

from __future__ import annotations

import argparse
import shlex
from typing import TYPE_CHECKING, Any

from specmodel.commands import options, output

if TYPE_CHECKING:
    from specmodel.model import FittedModel
    from specmodel.optimum import Candidate, Optimum
    from specmodel.report import Block, Screen

EXAMPLES = """\
  specmodel predict calib.yaml                            every step count, batch and communication setting
  specmodel predict calib.yaml --steps 0-10 --comm default
  specmodel predict calib.yaml --steps 2,4 --batch 16
  specmodel predict calib.yaml --steps 5 --json | jq .predictions[0].tok_s_interval
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel predict`."""
    options.add_calibration(parser)
    parser.add_argument(
        "--steps", type=options.step_list, metavar="K,...", help="step counts, such as 0-10 or 1,3,5-8 (default: all)"
    )
    options.add_configuration(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Predicted tok/s and its parts for any configuration, with intervals.

    P(best) is among the configurations that `specmodel optimize` would choose from, at the same batch.

    Returns
    -------
    int
        0, or 1 where every point asked for is extrapolated, unless ``--extrapolate``.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file; for names that it lacks, or a limit that nothing keeps.
    """
    options.require_limit(args.objective, args.max_tpot_ms)
    model = output.fitted(args.calibration, args)
    optima = answers(model, args)
    rows = [(optimum, c) for optimum in optima for c in optimum.table if _asked(c, args)]
    if args.json:
        from specmodel.answer import candidate_document

        document: dict[str, Any] = {
            "schema": "specmodel.prediction/1",
            "predictions": [candidate_document(c) for _, c in rows],
        }
        output.write_json(document)
    else:
        page = output.page(args)
        output.write_screen(_screen(model, rows, args), page)
    far = all(c.extrapolated for _, c in rows)
    return 1 if far and not args.extrapolate else 0


def answers(model: FittedModel, args: argparse.Namespace) -> list[Optimum]:
    """Return what `optimize` says of every configuration asked for, one answer a batch."""
    from specmodel.decide import optimize

    longest = args.max_steps
    if args.steps:
        longest = max(args.steps[-1], 10, model.measured.largest_steps, args.max_steps or 0)
    batches = options.batches(args.batch, model)
    args.trees = options.trees(args, model, batches)
    return [
        optimize(
            model,
            batch=batch,
            comm=options.comm_names(args.comm, model),
            max_steps=longest,
            workload=args.workload,
            context_tokens=args.context_tokens,
            trees=args.trees,
            objective=args.objective,
            max_tpot_ms=args.max_tpot_ms,
        )
        for batch in batches
    ]


def _asked(c: Candidate, args: argparse.Namespace) -> bool:
    if args.steps is None or (c.num_steps, c.topk, c.num_draft_tokens) in args.trees:
        return True
    return c.topk == 1 and c.num_steps in args.steps


def _screen(model: FittedModel, rows: list[tuple[Optimum, Candidate]], args: argparse.Namespace) -> Screen:
    from specmodel.commands.optimize_screen import candidate_grid
    from specmodel.measured import beyond_longest
    from specmodel.report import Entries, Screen
    from specmodel.words import name_of, recommendation, warning_items

    cal = model.calibration
    blocks: list[Block] = [f"{cal.name}: {cal.description}" if cal.description else cal.name]
    comms = list(dict.fromkeys(c.comm for _, c in rows))
    batches = list(dict.fromkeys(c.batch for _, c in rows))
    for comm in comms:
        here = [c for _, c in rows if c.comm == comm]
        place = "" if len(batches) > 1 else f"batch {batches[0]:g}, "
        marks = "   ! extrapolated" if any(c.extrapolated for c in here) else ""
        legend = f"● measured   ○ not measured{marks}"
        blocks.append(f"{place}{comm}")
        blocks.append(candidate_grid(here, None, with_batch=len(batches) > 1, legend=legend))
    optima = list({id(optimum): optimum for optimum, _ in rows}.values())
    asked = max(args.steps, default=0) if args.steps else 0
    beyond = beyond_longest(model.measured, asked)
    known = [w for optimum in optima for w in optimum.warnings if not beyond or not w.startswith("num_steps up to ")]
    items = warning_items([*beyond, *known])
    blocks += [Entries(items=items)] if items else []
    last = ""
    if len(rows) == 1:
        optimum, c = rows[0]
        last = recommendation(c, optimum.plain, several_settings=len(cal.comm_names) > 1)
        last = f"Prediction: {last}"
    elif rows:
        c = max((c for _, c in rows), key=lambda c: c.speedup)
        last = f"Largest speedup here: {name_of(c)} with {c.comm} at batch {c.batch:g}, {c.speedup:.2f}x; "
        file = "CALIB" if args.calibration == "-" else shlex.quote(args.calibration)
        last += f"`specmodel optimize {file}` decides"
    return Screen(blocks=blocks, last=last)
