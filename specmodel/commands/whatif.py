"""``specmodel whatif``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specmodel.commands import options, output

if TYPE_CHECKING:
    from specmodel.model import FittedModel
    from specmodel.situations import Gain, Outcome
    from specmodel.whatif import Sweep, WhatIf

EXAMPLES = """\
  specmodel whatif calib.yaml --set draft=0                       what a free drafter would bring
  specmodel whatif calib.yaml --set 'verify*=0.73' --set 'acceptance+=0.1'
  specmodel whatif calib.yaml --set batch=32 --set 'bandwidth*=2'
  specmodel whatif calib.yaml --set draft=0 --explain             the formulas, with your numbers
  specmodel whatif calib.yaml --sweep acceptance+=-0.1:0.2:0.05
  specmodel whatif calib.yaml --sweep acceptance+=-0.1:0.3:0.1 --sweep 'verify*=0.5:1.5:0.25' --plot map.svg
  specmodel whatif calib.yaml --set draft=0 --json | jq .gain
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel whatif`."""
    from specmodel.changes import targets_help

    parser.epilog = targets_help()
    options.add_calibration(parser)
    what = parser.add_argument_group("what is changed")
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="CHANGE",
        help="TARGET=VALUE, or *=, /=, += or -= in place of =; again for each change, made in this order",
    )
    what.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="AXIS",
        help="a change with several values: FIRST:LAST:STEP, or values with commas; once or twice",
    )
    options.add_candidates(parser)
    parser.add_argument(
        "--batch",
        type=_one_batch,
        metavar="N",
        help="running sequences now (default: 1 if measured, else the smallest measured); several: --sweep batch=1,8",
    )
    shown = parser.add_argument_group("what is shown")
    shown.add_argument(
        "--explain", action="store_true", help="the formulas behind the answer, with the numbers in them"
    )
    shown.add_argument(
        "--plot", type=options.figure_path, metavar="FILE", help="write a figure too: .png, .svg or .pdf"
    )
    options.add_extrapolate(shown)
    options.add_json(parser)


def _one_batch(text: str) -> float:
    shares = options.batch_shares(text)
    if len(shares) > 1 or "=" in text:
        raise argparse.ArgumentTypeError(f"one number: for several batches write --sweep batch=1,8,32, got {text!r}")
    return next(iter(shares))


def run(args: argparse.Namespace) -> int:
    """What would be best, and how fast, if something were different: before and after, decided again.

    Returns
    -------
    int
        0, or 1 where what would be best is not recommended: it is extrapolated, or rests on a row that cannot be.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file; for a change that means nothing, and names that the file lacks.
    """
    from specmodel.errors import UsageError

    if not args.set and not args.sweep:
        raise UsageError("nothing is changed: give --set CHANGE or --sweep AXIS, such as --set draft=0")
    if args.explain and args.sweep:
        raise UsageError("--explain is of one supposition: leave --sweep out")
    from specmodel.changes import changes_of, parse_axis

    changes, axes = changes_of(args.set), [parse_axis(text) for text in args.sweep]
    model = output.fitted(args.calibration, args)
    place = _place(args, model)
    from specmodel.whatif import sweep, whatif

    if axes:
        return _swept(args, model, sweep(model, axes, changes, **place))
    return _changed(args, model, whatif(model, changes, **place))


def _place(args: argparse.Namespace, model: FittedModel) -> dict[str, Any]:
    """Where the question is asked: the keyword arguments of `whatif`."""
    return {
        "batch": args.batch,
        "comm": options.comm_names(args.comm, model),
        "max_steps": args.max_steps,
        "workload": args.workload,
        "context_tokens": args.context_tokens,
        "trees": args.trees,
    }


def _changed(args: argparse.Namespace, model: FittedModel, result: WhatIf) -> int:
    from specmodel.words import refusal_of

    refused = refusal_of(model, result.after.best, extrapolate=args.extrapolate)
    explained = None
    if args.explain:
        from specmodel.explain import explanation

        explained = explanation(result)
    if args.plot is not None:
        from specmodel.whatif_plot import figure_of_whatif

        _save(figure_of_whatif(result, model.calibration.name), args)
    if args.json:
        document: dict[str, Any] = {
            "schema": "specmodel.whatif/1",
            "changes": [_change_document(c) for c in result.changes],
            "before": _outcome_document(result.before),
            "after": _outcome_document(result.after),
            "gain": _gain_document(result.gain),
            "kept": None
            if result.kept is None or result.kept_gain is None
            else {"candidate": _candidate(result.kept), "gain": _gain_document(result.kept_gain)},
            "recommended": refused is None,
            "warnings": [*result.warnings, *([f"not recommended: {refused}"] if refused else [])],
        }
        if explained is not None:
            document["explanation"] = [
                {"name": f.name, "title": f.title, "text": f.text, "latex": f.latex, "value": f.value, "note": f.note}
                for f in explained
            ]
        output.write_json(document)
    else:
        from specmodel.commands.whatif_screen import screen_of_whatif

        page = output.page(args)
        output.write_screen(screen_of_whatif(model, result, refused, explained, args.plot), page)
    return 1 if refused else 0


def _swept(args: argparse.Namespace, model: FittedModel, result: Sweep) -> int:
    if args.plot is not None:
        from specmodel.whatif_plot import figure_of_sweep

        _save(figure_of_sweep(result, model.calibration.name), args)
    far = all(c.best.extrapolated for c in result.cells) and not args.extrapolate
    if args.json:
        output.write_json(
            {
                "schema": "specmodel.whatif/1",
                "changes": [_change_document(c) for c in result.changes],
                "before": _outcome_document(result.before),
                "sweep": {
                    "axes": [{"target": a.target, "operator": a.operator, "values": a.values} for a in result.axes],
                    "cells": [
                        {
                            "values": c.values,
                            "best": _candidate(c.best),
                            "speculative": None if c.speculative is None else _candidate(c.speculative),
                            "plain_tok_s": c.plain_tok_s,
                            "gain": _gain_document(c.gain),
                        }
                        for c in result.cells
                    ],
                },
                "recommended": not far,
                "warnings": list(result.warnings),
            }
        )
    else:
        from specmodel.commands.whatif_screen import screen_of_sweep

        page = output.page(args)
        output.write_screen(screen_of_sweep(model, result, args.plot, page.width), page)
    return 1 if far else 0


def _save(figure: Any, args: argparse.Namespace) -> None:
    from specmodel.plot import save

    with output.writing(args.plot):
        save(figure, args.plot)


def _change_document(change: Any) -> dict[str, Any]:
    return {
        "target": change.target,
        "operator": change.operator,
        "value": change.value,
        "relative": change.relative,
        "text": str(change),
    }


def _candidate(c: Any) -> dict[str, Any]:
    from specmodel.answer import candidate_document

    return candidate_document(c)


def _outcome_document(outcome: Outcome) -> dict[str, Any]:
    from specmodel.answer import whole

    return {
        "batch": whole(outcome.batch),
        "context_tokens": outcome.context_tokens,
        "plain_tok_s": outcome.plain_tok_s,
        "best": _candidate(outcome.best),
        "table": [_candidate(c) for c in outcome.table],
    }


def _gain_document(gain: Gain) -> dict[str, Any]:
    return {"speedup": gain.speedup, "interval": gain.interval}
