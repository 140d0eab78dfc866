"""The screen of ``specmodel optimize``: everything that a decision needs, and the recommendation as its last line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from specmodel.decide import REGRET_TOLERANCE
from specmodel.launch.lines import launch_lines
from specmodel.model import FittedModel
from specmodel.optimum import Candidate, Optimum
from specmodel.report import (
    Bar,
    Block,
    Column,
    Entries,
    Grid,
    Screen,
    Verbatim,
    axis_of,
    chance,
    factor,
    interval,
    milliseconds,
    rate,
)
from specmodel.schedule import ScheduleStep
from specmodel.words import (
    absent,
    adaptive_lines,
    answer_line,
    comm_lines,
    given,
    most_wanted,
    name_of,
    row_text,
    schedule_line,
    setting_lines,
    ties_by_batch,
    ties_text,
    to_win,
    warning_items,
)

_MOST_ROWS = 18
_MOST_OTHERS = 4

Items = list[tuple[str, str]]


def screen(
    args: argparse.Namespace,
    model: FittedModel,
    optima: Sequence[Optimum],
    steps: Sequence[ScheduleStep],
    refusals: Sequence[str | None],
    width: int,
) -> Screen:
    """Lay out the answer of one call; `width` is that of the page, for the launch line."""
    cal = model.calibration
    head = f"{cal.name}: {cal.description}" if cal.description else cal.name
    lacking = absent(cal)
    facts: Items = [("given", given(cal))] + ([("not given", lacking)] if lacking else [])
    blocks: list[Block] = [head, Entries(items=facts)]
    lines: list[str] = []
    if any(refusals):
        notes = ["none, as nothing is recommended"] if args.engine is not None else []
    else:
        lines, notes = launch_lines(model, optima, steps, width, args.engine)
    if len(optima) == 1:
        blocks += _one(model, optima[0], launched=bool(lines))
    else:
        blocks += _several(model, optima, steps, launched=bool(lines))
    blocks += [Verbatim(lines=lines)] if lines else []
    items = [("launch", note) for note in notes] + _unsure(model, optima)
    items += [("declined", f"{text}") for text in dict.fromkeys(refusals) if text]
    if args.plot is not None:
        items.append(("plot", f"wrote {args.plot}"))
    items += _following(args, optima)
    blocks.append(Entries(items=items))
    return Screen(blocks=blocks, last=answer_line(model, optima, steps, refusals))


def _one(model: FittedModel, optimum: Optimum, *, launched: bool) -> list[Block]:
    best = optimum.best
    names = list(dict.fromkeys(c.comm for c in optimum.table))
    shown = [c for c in optimum.table if c.comm == best.comm]
    title = f"batch {best.batch:g}"
    if len(names) > 1:
        title += f", {best.comm}: the best of {len(names)} communication settings"
    elif best.comm != "default":
        title += f", {best.comm}"
    rows, left_out = _rows(shown, optimum)
    grid = candidate_grid(rows, optimum, legend=_legend(optimum, rows, left_out))
    items: Items = [("others", text) for text in _others(optimum)]
    items.append(("ties", ties_text(optimum)))
    items.append(("cycle", _cycle(best)))
    items.append(("ceilings", _ceilings(optimum) if best.num_steps else to_win(optimum)))
    items += [("adaptive", text) for text in adaptive_lines(optimum)]
    # The launch line below states environment and flags itself.
    comm = None if launched else model.calibration.comm.get(best.comm)
    items += [("settings", line) for line in setting_lines(best, comm)]
    return [title, grid, Entries(items=items)]


def _rows(shown: list[Candidate], optimum: Optimum) -> tuple[list[Candidate], int]:
    """Choose the rows of a long table: the best and its ties, what was measured, plain decoding, and the shortest."""
    if len(shown) <= _MOST_ROWS:
        return shown, 0
    wanted = [optimum.best, *optimum.ties]
    ranked = sorted(shown, key=lambda c: (c not in wanted, c.num_steps > 0, not c.measured, c.num_steps))
    kept = ranked[:_MOST_ROWS]
    return [c for c in shown if c in kept], len(shown) - _MOST_ROWS


def candidate_grid(
    rows: Sequence[Candidate], optimum: Optimum | None, *, with_batch: bool = False, legend: str = ""
) -> Grid:
    """Lay candidates out as a table with a plot of their intervals."""
    trees = any(c.topk > 1 for c in rows)
    columns = []
    if with_batch:
        columns.append(Column(heading="batch", cells=[f"{c.batch:g}" for c in rows]))
    columns.append(Column(heading="steps", cells=[str(c.num_steps) for c in rows]))
    if trees:
        columns.append(Column(heading="topk", cells=[str(c.topk) for c in rows]))
        columns.append(Column(heading="tokens", cells=[str(c.num_draft_tokens) for c in rows]))
    columns += [
        Column(heading="tok/s", cells=[rate(c.tok_s) for c in rows]),
        Column(heading="90 % interval", cells=[interval(c.tok_s_interval) for c in rows]),
        Column(heading="speedup", cells=[factor(c.speedup) for c in rows], priority=1),
        Column(heading="P(best)", cells=[chance(c.probability_best) for c in rows], priority=2),
        Column(heading="accepted", cells=[f"{c.acceptance_length:.2f}" for c in rows], priority=3),
        Column(heading="cycle ms", cells=[milliseconds(c.cycle_ms) for c in rows], priority=4),
        Column(heading="verify", cells=[milliseconds(c.verify_ms) for c in rows], priority=5),
        Column(heading="draft", cells=[milliseconds(c.draft_ms) for c in rows], priority=6),
    ]
    bars = [bar_of(c) for c in rows]
    best = [] if optimum is None else [i for i, c in enumerate(rows) if c == optimum.best]
    return Grid(
        columns=columns,
        marks=[_mark(c, optimum) for c in rows],
        bars=bars,
        axis=axis_of(bars, "tok/s", None if optimum is None else optimum.plain.tok_s),
        strong=frozenset(best),
        legend=legend,
    )


def bar_of(c: Candidate) -> Bar:
    """Return a candidate's tok/s as a text plot shows it."""
    return Bar(value=c.tok_s, low=c.tok_s_interval[0], high=c.tok_s_interval[1], measured=c.measured)


def _mark(c: Candidate, optimum: Optimum | None) -> str:
    if optimum is not None and c == optimum.best:
        return ">"
    if optimum is not None and c in optimum.ties:
        return "~"
    return "!" if c.extrapolated else " "


def _legend(optimum: Optimum, rows: Sequence[Candidate], left_out: int) -> str:
    marks = {_mark(c, optimum) for c in rows}
    parts = ["> best"] if ">" in marks else []
    parts += ["~ tied with it"] if "~" in marks else []
    parts += ["! extrapolated"] if "!" in marks else []
    parts += ["● measured", "○ not measured", f"┊ plain decoding, {_plain(optimum)}"]
    parts += [f"{left_out} longer or unmeasured rows are in --json only"] if left_out else []
    return "   ".join(parts)


def _plain(optimum: Optimum) -> str:
    plain = optimum.plain
    how = "measured" if plain.measured else f"predicted, {interval(plain.tok_s_interval)}"
    return f"{rate(plain.tok_s)} tok/s ({how}{', ' + plain.comm if plain.comm != 'default' else ''})"


def _others(optimum: Optimum) -> list[str]:
    """One line for each of the other communication settings, the fastest first."""
    best: dict[str, Candidate] = {}
    for c in optimum.table:
        if c.comm != optimum.best.comm and (c.comm not in best or c.tok_s > best[c.comm].tok_s):
            best[c.comm] = c
    ordered = sorted(best.values(), key=lambda c: -c.tok_s)
    lines = [_other(c) for c in ordered[:_MOST_OTHERS]]
    slower = ordered[_MOST_OTHERS:]
    if slower:
        lines.append(f"{', '.join(c.comm for c in slower)}: slower, at best {rate(slower[0].tok_s)} tok/s")
    return lines


def _other(c: Candidate) -> str:
    far = ", extrapolated" if c.extrapolated else ""
    return (
        f"{c.comm}: at best {name_of(c)}, {rate(c.tok_s)} tok/s ({interval(c.tok_s_interval)}), "
        f"P(best)\xa0{chance(c.probability_best)}{far}"
    )


def _cycle(c: Candidate) -> str:
    parts = f"{milliseconds(c.cycle_ms)} ms = verify {milliseconds(c.verify_ms)}"
    if c.num_steps:
        parts += f" + draft {milliseconds(c.draft_ms)} + overhead {milliseconds(c.overhead_ms)}"
    emitted = f"{c.acceptance_length:.2f} tokens a cycle" if c.num_steps else "1 token a pass"
    return f"{parts}; {emitted}; {milliseconds(c.tpot_ms)} ms a token of one sequence"


def _ceilings(optimum: Optimum) -> str:
    words = {"draft": "a free draft", "verify": "a free verify pass", "acceptance": "every draft accepted"}
    parts = []
    for name, ceiling in optimum.ceilings.items():
        low, high = ceiling.interval
        parts.append(f"{words[name]} {factor(ceiling.speedup)} ({factor(low)} to {factor(high)})")
    return "at most, at these steps: " + ", ".join(parts)


def _several(
    model: FittedModel, optima: Sequence[Optimum], steps: Sequence[ScheduleStep], *, launched: bool
) -> list[Block]:
    best = [optimum.best for optimum in optima]
    settings = {c.comm for c in best}
    bars = [
        Bar(
            value=c.speedup,
            low=c.speedup * c.tok_s_interval[0] / c.tok_s,
            high=c.speedup * c.tok_s_interval[1] / c.tok_s,
            measured=c.measured,
        )
        for c in best
    ]
    columns = [
        Column(heading="batch", cells=[f"{o.batch:g}" for o in optima]),
        Column(heading="best", cells=[name_of(c).replace("plain decoding", "plain") for c in best], left=True),
        Column(heading="tok/s", cells=[rate(c.tok_s) for c in best]),
        Column(heading="90 % interval", cells=[interval(c.tok_s_interval) for c in best]),
        Column(heading="speedup", cells=[factor(c.speedup) for c in best]),
        Column(heading="P(best)", cells=[chance(c.probability_best) for c in best], priority=1),
        Column(heading="free draft", cells=[factor(o.ceilings["draft"].speedup) for o in optima], priority=4),
        Column(heading="all accepted", cells=[factor(o.ceilings["acceptance"].speedup) for o in optima], priority=5),
    ]
    if len(settings) > 1:
        columns.insert(2, Column(heading="comm", cells=[c.comm for c in best], left=True, priority=2))
    marks = ["!" if c.extrapolated else " " for c in best]
    legend = "● measured   ○ not measured   ┊ plain decoding" + ("   ! extrapolated" if "!" in marks else "")
    grid = Grid(columns=columns, marks=marks, bars=bars, axis=axis_of(bars, "speedup", 1.0), legend=legend)
    items: Items = [("schedule", schedule_line(step)) for step in steps]
    if len(steps) > 1:
        items.append(("schedule", f"it changes only where that brings more than {100 * REGRET_TOLERANCE:g}\xa0%"))
    items.append(("ties", ties_by_batch(optima)))
    comm = steps[0].comm
    setting = None if launched else model.calibration.comm.get(comm)
    items += [("settings", line) for line in comm_lines(comm, setting)]
    return ["the best for each batch" + ("" if len(settings) > 1 else f", {best[0].comm}"), grid, Entries(items=items)]


def _unsure(model: FittedModel, optima: Sequence[Optimum]) -> Items:
    """What the answer rests on without a measurement, and what cannot be right."""
    items: Items = []
    rests = dict.fromkeys(text for optimum in optima for text in optimum.unmeasured)
    if rests:
        shown = list(rests)[:6]
        more = f"; and {len(rests) - len(shown)} more" if len(rests) > len(shown) else ""
        items.append(("unmeasured", "; ".join(shown) + more))
    return items + warning_items(w for optimum in optima for w in optimum.warnings)


def _following(args: argparse.Namespace, optima: Sequence[Optimum]) -> Items:
    """What to measure and what to run next."""
    file = "CALIB" if args.calibration == "-" else shlex.quote(args.calibration)
    wanted = most_wanted(optima)
    if wanted is None:
        reason = max((o.stop_reason for o in optima), key=len, default="")
        return [("measure", reason), ("next", f"specmodel validate {file} MEASURED   (what you measure when it runs)")]
    if wanted.kind == "cycles":
        row = row_text({**wanted.row, "tok_s": "..."})
        how = f"add - {row} to measurements.cycles of {file}, and run this again"
    else:
        how = f"add - {row_text(wanted.row)} with its time to measurements.{wanted.kind} of {file}, and run this again"
    return [("measure", wanted.reason), ("next", how)]
