"""``specmodel compare``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from specmodel.commands import options, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specmodel.compare import Change, Comparison, ConfigurationChange, TermChange
    from specmodel.report import Block, Grid, Screen

EXAMPLES = """\
  specmodel compare before.yaml after.yaml
  specmodel compare before.yaml after.yaml --json | jq '.terms[] | select(.clear)'
"""
_MOST_ROWS = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel compare`."""
    options.add_calibration(parser, "before", "A")
    options.add_calibration(parser, "after", "B")
    options.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """What changed between two calibrations, before and after a fix: term by term, with intervals, and in tok/s.

    The two are taken as measured independently. A change is clear where its 90 % interval leaves zero out.

    Returns
    -------
    int
        0.

    Raises
    ------
    CalibrationError, UsageError
        For a malformed file; where both are standard input.
    """
    from specmodel.errors import UsageError

    if args.before == args.after == "-":
        raise UsageError("standard input can be only one of the two files")
    before, after = output.fitted(args.before, args), output.fitted(args.after, args)
    from specmodel.compare import compare

    comparison = compare(before, after)
    if args.json:
        output.write_json(_document(comparison))
    else:
        output.write_screen(_screen(comparison), output.page(args))
    return 0


def _change_document(change: Change) -> dict[str, Any]:
    return {
        "before": change.before,
        "before_interval": change.before_interval,
        "after": change.after,
        "after_interval": change.after_interval,
        "kind": change.kind,
        "change": change.change,
        "change_interval": change.change_interval,
        "clear": change.clear,
    }


def _document(comparison: Comparison) -> dict[str, Any]:
    from specmodel.answer import candidate_document, whole

    return {
        "schema": "specmodel.comparison/1",
        "before": comparison.before,
        "after": comparison.after,
        "terms": [{"name": t.name, "unit": t.unit, **_change_document(t.change)} for t in comparison.terms],
        "configurations": [
            {
                "num_steps": c.num_steps,
                "batch": whole(c.batch),
                "comm": c.comm,
                "workload": c.workload,
                "context_tokens": c.context_tokens,
                "tok_s": _change_document(c.tok_s),
                "cycle_ms": _change_document(c.cycle_ms),
                "acceptance_length": _change_document(c.acceptance_length),
            }
            for c in comparison.configurations
        ],
        "best": [
            {"batch": whole(a.batch), "before": candidate_document(a), "after": candidate_document(b)}
            for a, b in comparison.best
        ],
        "warnings": list(comparison.warnings),
    }


def _screen(comparison: Comparison) -> Screen:
    from specmodel.report import Entries, Screen
    from specmodel.words import warning_items

    blocks: list[Block] = [f"before {comparison.before}, after {comparison.after}"]
    if comparison.terms:
        blocks += ["terms", _terms_grid(comparison.terms)]
    rows = sorted(comparison.configurations, key=lambda c: not c.tok_s.clear)[:_MOST_ROWS]
    rows = [c for c in comparison.configurations if c in rows]
    left_out = len(comparison.configurations) - len(rows)
    if rows:
        blocks += ["tok/s at the same configuration", _configurations_grid(rows, left_out)]
    items = [("best", _best(comparison, i)) for i in range(len(comparison.best))]
    items += warning_items(comparison.warnings)
    blocks += [Entries(items=items)] if items else []
    return Screen(blocks=blocks, last=_last(comparison))


def _signed(change: Change, value: float) -> str:
    from specmodel.report import change as percent

    return percent(value) if change.kind == "ratio" else f"{value:+z.3f}"


def _terms_grid(every: Sequence[TermChange]) -> Grid:
    from specmodel.report import Column, Grid

    terms = every
    if len(terms) > _MOST_ROWS:
        terms = [t for t in every if t.change.clear or not t.name.startswith("conditional[")]
    left_out = len(every) - len(terms)
    changes = [t.change for t in terms]

    def values(which: str) -> list[str]:
        numbers = [(getattr(c, which), t.unit) for c, t in zip(changes, terms, strict=True)]
        return [f"{value:.3f}" if unit == "" else f"{value:#.3g}".rstrip(".") for value, unit in numbers]

    ranges = [f"{_signed(c, c.change_interval[0])} to {_signed(c, c.change_interval[1])}" for c in changes]
    columns = [
        Column(heading="term", cells=[t.name for t in terms], left=True),
        Column(heading="before", cells=values("before"), priority=1),
        Column(heading="after", cells=values("after"), priority=1),
        Column(heading="change", cells=[_signed(c, c.change) for c in changes]),
        Column(heading="90 % interval", cells=ranges, priority=2),
        Column(heading="unit", cells=[t.unit for t in terms], left=True, priority=3),
    ]
    return Grid(
        columns=columns,
        marks=["*" if c.clear else " " for c in changes],
        strong=frozenset(i for i, c in enumerate(changes) if c.clear),
        legend="* clear: the 90 % interval of the change leaves zero out"
        + (f"; {left_out} acceptances without a clear change are in --json" if left_out else ""),
    )


def _configurations_grid(rows: list[ConfigurationChange], left_out: int) -> Grid:
    from specmodel.report import Bar, Column, Grid, axis_of, rate

    columns = [Column(heading="steps", cells=[str(c.num_steps) for c in rows])]
    for name, left in (("batch", False), ("comm", True), ("workload", True)):
        values = [getattr(c, name) for c in rows]
        if len(set(values)) > 1:
            cells = ["-" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in values]
            columns.append(Column(heading=name, cells=cells, left=left, priority=1))
    changes = [c.tok_s for c in rows]
    ranges = [f"{_signed(c, c.change_interval[0])} to {_signed(c, c.change_interval[1])}" for c in changes]
    columns += [
        Column(heading="before", cells=[rate(c.before) for c in changes]),
        Column(heading="after", cells=[rate(c.after) for c in changes]),
        Column(heading="change", cells=[_signed(c, c.change) for c in changes]),
        Column(heading="90 % interval", cells=ranges, priority=2),
        Column(heading="cycle", cells=[_signed(c.cycle_ms, c.cycle_ms.change) for c in rows], priority=3),
        Column(
            heading="accepted",
            cells=[_signed(c.acceptance_length, c.acceptance_length.change) for c in rows],
            priority=4,
        ),
    ]
    bars = [
        Bar(value=1 + c.change, low=1 + c.change_interval[0], high=1 + c.change_interval[1], measured=True)
        for c in changes
    ]
    more = f"; {left_out} more are in --json" if left_out else ""
    return Grid(
        columns=columns,
        marks=["*" if c.clear else " " for c in changes],
        bars=bars,
        axis=axis_of(bars, "after / before", 1.0),
        plot_priority=3,
        strong=frozenset(i for i, c in enumerate(changes) if c.clear),
        legend=f"* clear{more}",
    )


def _best(comparison: Comparison, index: int) -> str:
    from specmodel.report import interval, rate
    from specmodel.words import name_of

    pair = comparison.best[index]
    comm = {c.comm for b in comparison.best for c in b} != {"default"}
    parts = [
        f"{name_of(c)}{' with ' + c.comm if comm else ''}, {rate(c.tok_s)} tok/s ({interval(c.tok_s_interval)})"
        for c in pair
    ]
    workloads = list(dict.fromkeys(c.workload for c in comparison.configurations))
    where = f" ({workloads[0]})" if len(workloads) > 1 else ""
    return f"batch {pair[0].batch:g}{where}: before {parts[0]}; after {parts[1]}"


def _last(comparison: Comparison) -> str:
    from specmodel.report import change as percent

    clear = [t.name for t in comparison.terms if t.change.clear]
    fastest = [c for c in comparison.configurations if c.tok_s.clear]
    text = f"clear of zero: {', '.join(_grouped(clear))}" if clear else "no term changed clearly"
    if not fastest:
        return f"{text}; tok/s of no configuration changed clearly"
    changes = [c.tok_s.change for c in fastest]
    span = percent(changes[0]) if len(changes) == 1 else f"{percent(min(changes))} to {percent(max(changes))}"
    count = len(comparison.configurations)
    return f"{text}; tok/s of {len(fastest)} of {count} configuration{'s' if count > 1 else ''}, {span}"


def _grouped(names: Sequence[str]) -> list[str]:
    """Write the acceptances of one workload as one name with its positions."""
    from specmodel.report import spans

    out: dict[str, list[int]] = {}
    for name in names:
        kind, _, position = name.removesuffix("]").rpartition("][")
        grouped = kind.startswith("conditional[")
        out.setdefault(f"{kind}]" if grouped else name, []).extend([int(position)] if grouped else [])
    return [f"{name}[{spans(positions)}]" if positions else name for name, positions in out.items()]
