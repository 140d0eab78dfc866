"""The screens of ``specmodel whatif``: before and after side by side, or a table over one or two axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from specmodel.changes import TARGETS, Axis, Change
from specmodel.commands.optimize_screen import bar_of, candidate_grid
from specmodel.model import FittedModel
from specmodel.optimum import Candidate
from specmodel.report import (
    Bar,
    Block,
    Column,
    Entries,
    Grid,
    Screen,
    axis_of,
    change,
    factor,
    interval,
    milliseconds,
    rate,
)
from specmodel.situations import Gain, Outcome
from specmodel.whatif import Cell, Sweep, WhatIf
from specmodel.words import name_of, warning_items

if TYPE_CHECKING:
    from specmodel.explain import Formula

_CELL = 8
_PLAIN_LEFT_ALONE = ("verify", "draft", "overhead", "acceptance", "acceptance_length")

Items = list[tuple[str, str]]


def screen_of_whatif(
    model: FittedModel,
    result: WhatIf,
    refused: str | None,
    explained: Sequence[Formula] | None,
    plot: Path | None,
) -> Screen:
    """Lay out one supposition."""
    several = len(model.calibration.comm_names) > 1
    head = f"{model.calibration.name}: {_place(result.before)}"
    items: Items = [("supposed", _supposed(c)) for c in result.changes]
    blocks: list[Block] = [head, Entries(items=items), _before_and_after(result, several)]
    best = result.after.best
    comm = f", {best.comm}" if several or best.comm != "default" else ""
    blocks.append(f"after, for every number of steps: {_place(result.after)}{comm}")
    blocks.append(_table(result.after))
    bound = f"{result.bound} " if result.bound else ""
    notes: Items = [("gain", f"{bound}{_gain(result.gain)}, steps{' and setting' if several else ''} chosen again")]
    if result.kept is not None and result.kept_gain is not None and not _same(result.kept, best):
        notes.append(("gain", f"{bound}{_gain(result.kept_gain)} with {_full_name(result.kept, several)} kept"))
    notes.append(("cycle", _cycle(best)))
    notes += _of_plain(result)
    notes += warning_items(result.warnings)
    notes += [("declined", refused)] if refused else []
    notes += [("plot", f"wrote {plot}")] if plot is not None else []
    blocks.append(Entries(items=notes))
    if explained:
        blocks.append(Entries(items=[("explained", _formula_text(f)) for f in explained]))
    return Screen(blocks=blocks, last=_last(result, refused, several))


def _formula_text(formula: Formula) -> str:
    note = f" ({formula.note})" if formula.note else ""
    return f"{formula.title}: {formula.text}{note}"


def _place(outcome: Outcome) -> str:
    context = "" if outcome.context_tokens is None else f", {outcome.context_tokens:,} tokens of context"
    return f"batch {outcome.batch:g}{context}"


def _supposed(supposed: Change) -> str:
    target = TARGETS[supposed.target]
    if supposed.target in ("comm", "batch", "context_tokens", "num_steps"):
        return f"{supposed}: {target.meaning}"
    value = float(supposed.value)
    amount = f"{100 * value:.4g} %" if supposed.relative else f"{value:.4g}{f' {target.unit}' if target.unit else ''}"
    how = {"=": f"is {amount}", "+=": f"{amount} more", "-=": f"{amount} less"}.get(supposed.operator)
    if how is None:
        how = f"{'times' if supposed.operator == '*=' else 'divided by'} {value:.4g}"
    return f"{supposed}: {target.meaning}, {how}"


def _before_and_after(result: WhatIf, several: bool) -> Grid:
    rows = [("now", result.before.best), ("after", result.after.best)]
    if result.kept is not None and not _same(result.kept, result.after.best):
        rows.insert(1, ("kept", result.kept))
    if result.after.batch != result.before.batch:
        rows = [(f"{label}, batch {c.batch:g}", c) for label, c in rows]
    found = [c for _, c in rows]
    comms = len({c.comm for c in found}) > 1
    bars = [bar_of(c) for c in found]
    columns = [
        Column(heading="", cells=[label for label, _ in rows], left=True),
        Column(heading="best", cells=[name_of(c).replace("plain decoding", "plain") for c in found], left=True),
        Column(heading="tok/s", cells=[rate(c.tok_s) for c in found]),
        Column(heading="90 % interval", cells=[interval(c.tok_s_interval) for c in found]),
        Column(heading="speedup", cells=[factor(c.speedup) for c in found], priority=2),
        Column(heading="accepted", cells=[f"{c.acceptance_length:.2f}" for c in found], priority=4),
        Column(heading="cycle ms", cells=[milliseconds(c.cycle_ms) for c in found], priority=4),
        Column(heading="verify", cells=[milliseconds(c.verify_ms) for c in found], priority=5),
        Column(heading="draft", cells=[milliseconds(c.draft_ms) for c in found], priority=5),
        Column(heading="overhead", cells=[milliseconds(c.overhead_ms) for c in found], priority=6),
    ]
    if several and comms:
        columns.insert(2, Column(heading="comm", cells=[c.comm for c in found], left=True, priority=1))
    unlike = result.after.batch != result.before.batch  # speeds of different batches are no plot
    return Grid(
        columns=columns,
        bars=[] if unlike else bars,
        axis=None if unlike else axis_of(bars, "tok/s"),
        plot_priority=3,
        legend="speedup: over plain decoding",
    )


def _table(after: Outcome) -> Grid:
    rows = [c for c in after.table if c.comm == after.best.comm and c.topk == 1]
    if after.best.topk > 1:
        rows.append(after.best)
    grid = candidate_grid(rows, None)
    marks = [">" if c == after.best else "!" if c.extrapolated else " " for c in rows]
    legend = "> best" + ("   ! extrapolated" if "!" in marks else "") + "   ┊ plain decoding"
    return replace(
        grid, marks=marks, legend=legend, axis=axis_of(grid.bars, "tok/s", after.plain_tok_s), strong=_strong(marks)
    )


def _strong(marks: Sequence[str]) -> frozenset[int]:
    return frozenset(i for i, mark in enumerate(marks) if mark == ">")


def _gain(gain: Gain) -> str:
    low, high = (change(x - 1.0) for x in gain.interval)
    return f"{change(gain.speedup - 1.0)} tok/s ({low} to {high})"


def _cycle(c: Candidate) -> str:
    text = f"{milliseconds(c.cycle_ms)} ms after = verify {milliseconds(c.verify_ms)}"
    if c.num_steps:
        text += f" + draft {milliseconds(c.draft_ms)} + overhead {milliseconds(c.overhead_ms)}"
    return f"{text}; {c.acceptance_length:.2f} tokens a cycle" if c.num_steps else text


def _of_plain(result: WhatIf) -> Items:
    """Say what becomes of plain decoding."""
    before, after = result.before.plain_tok_s, result.after.plain_tok_s
    if abs(after / before - 1.0) > 1e-9:
        return [("plain", f"{rate(after)} tok/s after, {rate(before)} now")]
    if any(c.target in _PLAIN_LEFT_ALONE for c in result.changes):
        return [("plain", f"{rate(before)} tok/s, as now: what was changed is of speculative cycles")]
    return []


def _same(a: Candidate, b: Candidate) -> bool:
    return (a.num_steps, a.topk, a.num_draft_tokens, a.comm) == (b.num_steps, b.topk, b.num_draft_tokens, b.comm)


def _full_name(c: Candidate, several: bool) -> str:
    return name_of(c) + (f" with {c.comm}" if several else "")


def _last(result: WhatIf, refused: str | None, several: bool) -> str:
    best = result.after.best
    supposed = ", ".join(map(str, result.changes))
    if refused:
        far = "; trust it with --extrapolate" if best.extrapolated else ""
        return f"What if {supposed}: no recommendation: {refused}{far}"
    low, high = (change(x - 1.0) for x in result.gain.interval)
    bound = f"{result.bound} " if result.bound else ""
    compared = f"{bound}{change(result.gain.speedup - 1.0)} against now (90 % interval {low} to {high})"
    return (
        f"What if {supposed}: {_full_name(best, several)}, {bound}{rate(best.tok_s)} tok/s, 90 % interval "
        f"{interval(best.tok_s_interval)}; {compared}; supposed, not measured"
    )


# ------------------------------------------------------------------------------------------------------- sweeps
def screen_of_sweep(model: FittedModel, result: Sweep, plot: Path | None, width: int) -> Screen:
    """Lay out a sweep over one axis as a table with a plot, over two as a map of speedups."""
    several = len(model.calibration.comm_names) > 1
    best = result.before.best
    now = f"now: {_full_name(best, several)}, {rate(best.tok_s)} tok/s, {factor(best.speedup)} plain decoding"
    items: Items = [("supposed", _supposed(c)) for c in result.changes]
    items.append(("now", now.removeprefix("now: ")))
    blocks: list[Block] = [f"{model.calibration.name}: {_place(result.before)}", Entries(items=items)]
    blocks += [_line(result)] if len(result.axes) == 1 else _map(result, width)
    notes = warning_items(result.warnings)
    notes += [("plot", f"wrote {plot}")] if plot is not None else []
    blocks += [Entries(items=notes)] if notes else []
    return Screen(blocks=blocks, last=_crossing(result))


def _line(result: Sweep) -> Grid:
    cells = result.cells
    bars = [
        Bar(
            value=c.best.speedup,
            low=c.best.speedup * c.best.tok_s_interval[0] / c.best.tok_s,
            high=c.best.speedup * c.best.tok_s_interval[1] / c.best.tok_s,
            measured=c.best.measured,
        )
        for c in cells
    ]
    comms = len({c.best.comm for c in cells}) > 1
    columns = [
        Column(heading=result.axes[0].name, cells=[_value(result.axes[0], c.values[0]) for c in cells]),
        Column(heading="best", cells=[_short(c.best) for c in cells], left=True),
        Column(heading="tok/s", cells=[rate(c.best.tok_s) for c in cells]),
        Column(heading="90 % interval", cells=[interval(c.best.tok_s_interval) for c in cells], priority=1),
        Column(heading="speedup", cells=[factor(c.best.speedup) for c in cells]),
        Column(heading="gain", cells=[change(c.gain.speedup - 1.0) for c in cells], priority=2),
        Column(heading="speculating", cells=[_speculating(c) for c in cells], priority=3),
    ]
    if comms:
        columns.insert(2, Column(heading="comm", cells=[c.best.comm for c in cells], left=True, priority=4))
    marks = ["!" if c.best.extrapolated else " " for c in cells]
    legend = "speedup over plain decoding (┊); gain over the best now; speculating: the best that drafts"
    return Grid(
        columns=columns,
        marks=marks,
        bars=bars,
        axis=axis_of(bars, "speedup", 1.0),
        plot_priority=3,
        legend=legend + ("   ! extrapolated" if "!" in marks else ""),
    )


def _map(result: Sweep, width: int) -> list[Block]:
    rows, across = result.axes
    left = width - max(len(rows.name), 8)
    shown = _thinned(across, max(left // _CELL, 2))
    count = len(across.values)
    columns = [Column(heading=rows.name, cells=[_value(rows, v) for v in rows.values])]
    for j in shown:
        cells = [result.cells[i * count + j] for i in range(len(rows.values))]
        columns.append(Column(heading=_value(across, across.values[j]), cells=[_in_map(c) for c in cells]))
    legend = "speedup of the best that drafts over plain decoding, and its steps; - where plain decoding is better"
    if any(c.speculative is not None and c.speculative.extrapolated for c in result.cells):
        legend += "; ! extrapolated"
    if len(shown) < count:
        legend += f"; {count - len(shown)} more columns in --json and --plot"
    return [f"{rows.name} downwards, {across.name} across", Grid(columns=columns, legend=legend)]


def _thinned(axis: Axis, most: int) -> list[int]:
    """Indices of at most `most` values of an axis; the one that changes nothing is among them."""
    count = len(axis.values)
    every = -(-count // most)
    neutral = 0.0 if axis.operator in ("+=", "-=") else 1.0
    start = axis.values.index(neutral) % every if neutral in axis.values else 0
    return list(range(start, count, every))


def _in_map(c: Cell) -> str:
    if c.speculative is None:
        return "-"
    name = f"{c.speculative.num_steps}" if c.speculative.topk == 1 else "tree"
    far = "!" if c.speculative.extrapolated else ""
    return f"{c.speculative.speedup:.2f} {name if c.speculative.speedup > 1.0 else '-'}{far}"


def _value(axis: Axis, value: float) -> str:
    return f"{value:+.6g}" if axis.operator in ("+=", "-=") and value else f"{value:.6g}"


def _short(c: Candidate) -> str:
    return name_of(c).replace("plain decoding", "plain")


def _speculating(c: Cell) -> str:
    return "-" if c.speculative is None else f"{factor(c.speculative.speedup)} {_short(c.speculative)}"


def _crossing(result: Sweep) -> str:
    """The answer of a sweep in one line: where speculation begins or ends to pay."""
    better = [c.speculative is not None and c.speculative.speedup > 1.0 for c in result.cells]
    names = " and ".join(a.name for a in result.axes)
    if all(better):
        low, high = min(c.best.speedup for c in result.cells), max(c.best.speedup for c in result.cells)
        return f"Speculation beats plain decoding at every {names} looked at: {factor(low)} to {factor(high)}"
    if not any(better):
        return f"Plain decoding is at least as fast at every {names} looked at"
    if len(result.axes) == 1:
        axis = result.axes[0]
        cells = result.cells
        for before, after in pairwise(cells):
            a, b = (0.0 if c.speculative is None else c.speculative.speedup - 1.0 for c in (before, after))
            if (a > 0.0) != (b > 0.0):
                at = before.values[0] + (after.values[0] - before.values[0]) * a / (a - b)
                verb = "beats" if b > 0.0 else "loses to"
                where = f"{axis.target}{'' if axis.operator == '=' else ' ' + axis.operator} {at:.3g}"
                return f"Break-even: from {where} on speculation {verb} plain decoding"
    count = sum(better)
    return f"Speculation beats plain decoding at {count} of {len(better)} points of {names}"
