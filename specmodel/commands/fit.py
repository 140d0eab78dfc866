"""``specmodel fit``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specmodel.commands import options, output

if TYPE_CHECKING:
    from specmodel.model import FittedModel
    from specmodel.prediction import Term
    from specmodel.report import Block, Screen

EXAMPLES = """\
  specmodel fit calib.yaml
  specmodel fit calib.yaml --json | jq '.terms[] | select(.name == "pass_ms")'
"""

# What a term means, by its name without the index.
MEANING = {
    "pass_ms": "one plain pass of the target at the reference batch",
    "tax": "weights read by a pass with speculation on, over one without",
    "expert_share": "share of the pass that reads expert weights",
    "overlap": "overlap of the experts that tokens of a pass choose",
    "token": "one verified token more",
    "knee_tokens": "tokens at which passes become compute-bound",
    "kv": "KV cache of one sequence at the reference context",
    "kv_multi": "KV cache read with several query rows, over one",
    "overhead": "host work of a cycle",
    "draft_base": "fixed part of a draft",
    "draft_step": "one draft step",
    "draft_sequence": "one sequence more in a draft step",
    "draft_width": "one branch more in a draft step",
    "tree": "building a draft tree",
    "verify_eager": "a verify pass without CUDA graph, over one with",
    "draft_graph_cycle": "a draft in one graph, over one graph a step",
    "draft_eager": "a draft without CUDA graph, over one with",
    "comm_base": "communication of a pass, fixed part",
    "comm_token": "communication of a pass, for each token",
    "comm_offset": "communication of a pass beyond its all-reduce times",
    "draft_comm": "drafts under this setting, over `default`",
    "rank_ratio": "acceptance of one rank over that of the rank before",
    "conditional": "P(this draft is accepted, given those before it)",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel fit`."""
    options.add_calibration(parser)
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """The fitted terms of the cost model and the acceptance, with 90 % intervals, and what they were fitted to.

    Returns
    -------
    int
        0.

    Raises
    ------
    CalibrationError
        For a malformed file.
    """
    model = output.fitted(args.calibration, args)
    from specmodel.words import absent, given

    if args.json:
        document: dict[str, Any] = {
            "schema": "specmodel.fit/1",
            "name": model.calibration.name,
            "observations": len(model.observations),
            "given": given(model.calibration),
            "not_given": absent(model.calibration),
            "terms": [
                {"name": t.name, "value": t.value, "interval": [t.low, t.high], "unit": t.unit, "informed": t.informed}
                for t in model.terms
            ],
            "warnings": list(model.warnings),
        }
        output.write_json(document)
    else:
        output.write_screen(_screen(model, args), output.page(args))
    return 0


def _screen(model: FittedModel, args: argparse.Namespace) -> Screen:
    from specmodel.report import Column, Entries, Grid, Screen
    from specmodel.words import absent, given, warning_items

    cal = model.calibration
    lacking = absent(cal)
    facts = [("given", given(cal))] + ([("not given", lacking)] if lacking else [])
    terms = [t for t in model.terms if t.informed > 0.05 and _in_reach(t, model)]

    ranges = [f"{number(t.low, t)} to {number(t.high, t)}" for t in terms]
    columns = [
        Column(heading="term", cells=[t.name for t in terms], left=True),
        Column(heading="value", cells=[number(t.value, t) for t in terms]),
        Column(heading="90 % interval", cells=ranges, priority=1),
        Column(heading="unit", cells=[t.unit for t in terms], left=True, priority=2),
        Column(heading="known", cells=[f"{100 * t.informed:.0f} %" for t in terms], priority=3),
        Column(heading="what", cells=[MEANING.get(t.name.partition("[")[0], "") for t in terms], left=True, priority=4),
    ]
    legend = "passes: in units of one plain pass, pass_ms; known: how much of the prior's variance the data removed"
    blocks: list[Block] = [
        f"{cal.name}: {cal.description}" if cal.description else cal.name,
        Entries(items=facts),
        Grid(columns=columns, legend=legend),
    ]
    items = warning_items(model.warnings)
    if len(model.weights) > 1:
        weights = " and ".join(f"{100 * w:.0f} %" for w in model.weights)
        items.append(
            ("explained", f"in {len(model.weights)} ways, both kept, of probability {weights}; the first is shown")
        )
    file = "CALIB" if args.calibration == "-" else args.calibration
    blocks += [Entries(items=items)] if items else []
    dull = len(model.terms) - len(terms)
    return Screen(
        blocks=blocks,
        last=f"{len(model.observations)} observations; {dull} more terms, which the data hardly move, are in --json; "
        f"next: specmodel optimize {file}",
    )


def _in_reach(term: Term, model: FittedModel) -> bool:
    """Whether an acceptance lies within what was measured; any other term does."""
    if not term.name.startswith("conditional["):
        return True
    workload, _, position = term.name.removeprefix("conditional[").removesuffix("]").rpartition("][")
    return int(position) <= (model.measured.positions.get(workload, 0) or model.measured.largest_steps)


def number(value: float, term: Term) -> str:
    """Write the value of a term: probabilities with three decimals, all others with three digits."""
    return f"{value:.3f}" if term.unit == "" else f"{value:#.3g}".rstrip(".")
