"""The screen of ``specmodel optimize``: everything that a decision needs, and the recommendation as its last line."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence

from specmodel.commands.launching import launch_lines
from specmodel.commands.words import (
    absent,
    best_speculative,
    comm_lines,
    given,
    loss,
    name_of,
    recommendation,
    row_text,
    setting_lines,
    setting_name,
    steps_text,
    warning_items,
)
from specmodel.decide import REGRET_TOLERANCE
from specmodel.model import FittedModel
from specmodel.optimum import Candidate, NextMeasurement, Optimum
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
    lines, notes = ([], []) if any(refusals) else launch_lines(model, optima, steps, width)
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
    return Screen(blocks=blocks, last=_last(model, optima, steps, refusals))


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
    items.append(("ties", _ties(optimum)))
    items.append(("cycle", _cycle(best)))
    items.append(("ceilings", _ceilings(optimum) if best.num_steps else _to_win(optimum)))
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


def _ties(optimum: Optimum) -> str:
    best = optimum.best
    regret = f"P(best)\xa0{chance(best.probability_best)}, expected regret {100 * optimum.expected_regret:.1f}\xa0%"
    if not optimum.ties:
        return f"none: nothing else has more than a 25\xa0% chance of being faster; {regret}"
    several = len({c.comm for c in (best, *optimum.ties)}) > 1
    names = []
    for comm in dict.fromkeys(c.comm for c in optimum.ties):
        here = [c for c in optimum.ties if c.comm == comm]
        chains = steps_text(c.num_steps for c in here if c.topk == 1 and c.num_steps)
        kinds = [name_of(c) for c in here if not c.num_steps] + ([chains] if chains else [])
        kinds += [name_of(c) for c in here if c.topk > 1]
        names.append(", ".join(kinds) + (f" with {comm}" if several else ""))
    each = "each has" if len(optimum.ties) > 1 else "it has"
    return (
        f"{'; '.join(names)}: {each} more than a 25\xa0% chance of being faster than {name_of(best)}"
        f"{' with ' + best.comm if several else ''}; {regret}"
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


def _to_win(optimum: Optimum) -> str:
    """What speculation lacks where plain decoding is best."""
    c = best_speculative(optimum)
    if c is None:
        return "plain decoding has none"
    lacking = 1.0 - c.tok_s / optimum.best.tok_s
    needed = c.acceptance_length * optimum.best.tok_s / max(c.tok_s, 1e-300)
    return (
        f"plain decoding has none; to draw level, {name_of(c)} with {c.comm} needs a cycle {100 * lacking:.1f}\xa0% "
        f"shorter, or {needed:.2f} tokens a cycle instead of {c.acceptance_length:.2f}"
    )


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
        Column(heading="tied", cells=[_tied_steps(o) for o in optima], left=True, priority=3),
        Column(heading="free draft", cells=[factor(o.ceilings["draft"].speedup) for o in optima], priority=4),
        Column(heading="all accepted", cells=[factor(o.ceilings["acceptance"].speedup) for o in optima], priority=5),
    ]
    if len(settings) > 1:
        columns.insert(2, Column(heading="comm", cells=[c.comm for c in best], left=True, priority=2))
    marks = ["!" if c.extrapolated else " " for c in best]
    legend = "● measured   ○ not measured   ┊ plain decoding" + ("   ! extrapolated" if "!" in marks else "")
    grid = Grid(columns=columns, marks=marks, bars=bars, axis=axis_of(bars, "speedup", 1.0), legend=legend)
    items: Items = [("schedule", _schedule_line(step)) for step in steps]
    if len(steps) > 1:
        items.append(("schedule", f"it changes only where that brings more than {100 * REGRET_TOLERANCE:g}\xa0%"))
    comm = steps[0].comm
    setting = None if launched else model.calibration.comm.get(comm)
    items += [("settings", line) for line in comm_lines(comm, setting)]
    return ["the best for each batch" + ("" if len(settings) > 1 else f", {best[0].comm}"), grid, Entries(items=items)]


def _tied_steps(optimum: Optimum) -> str:
    return ", ".join(str(c.num_steps) if c.topk == 1 else name_of(c) for c in optimum.ties) or "-"


def _schedule_line(step: ScheduleStep) -> str:
    return f"{_range(step)}: {_step_name(step)}"


def _range(step: ScheduleStep) -> str:
    if step.batch_to is None:
        return "every batch" if step.batch_from <= 1 else f"batch {step.batch_from:g} and more"
    last = f" to {step.batch_to:g}" if step.batch_to > step.batch_from else ""
    return f"batch {step.batch_from:g}{last}"


def _step_name(step: ScheduleStep) -> str:
    if step.num_steps == 0:
        return "plain decoding"
    kind = f"{step.num_steps} step{'s' if step.num_steps > 1 else ''}"
    return f"{kind}, {step.num_draft_tokens} draft tokens" + (f", topk {step.topk}" if step.topk > 1 else "")


def _unsure(model: FittedModel, optima: Sequence[Optimum]) -> Items:
    """What the answer rests on without a measurement, and what cannot be right."""
    items: Items = []
    rests = dict.fromkeys(text for optimum in optima for text in optimum.unmeasured)
    if rests:
        shown = list(rests)[:6]
        more = f"; and {len(rests) - len(shown)} more" if len(rests) > len(shown) else ""
        items.append(("unmeasured", "; ".join(shown) + more))
    return items + warning_items(w for optimum in optima for w in optimum.warnings)


def most_wanted(optima: Sequence[Optimum]) -> NextMeasurement | None:
    """Return the measurement that brings most, relative to the throughput of its batch."""
    wanted = [(o.measure_next.gain_tok_s / o.best.tok_s, i) for i, o in enumerate(optima) if o.measure_next is not None]
    return optima[max(wanted)[1]].measure_next if wanted else None


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


def _last(
    model: FittedModel, optima: Sequence[Optimum], steps: Sequence[ScheduleStep], refusals: Sequence[str | None]
) -> str:
    several = len(model.calibration.comm_names) > 1
    if len(optima) == 1:
        return _last_of_one(optima[0], refusals[0], several)
    good = [optimum for optimum, text in zip(optima, refusals, strict=True) if text is None]
    if not good:
        return f"No recommendation for any batch: {refusals[0]}"
    plan = "; ".join(f"{setting_name(s.num_steps, s.topk, s.num_draft_tokens)} for {_range(s)}" for s in steps)
    comm = f" with {steps[0].comm}" if several else ""
    ends = good[:1] if len(good) == 1 else [good[0], good[-1]]
    speeds = ", ".join(_speed_at(optimum, steps) for optimum in ends)
    bad = [f"{o.batch:g}" for o, text in zip(optima, refusals, strict=True) if text]
    but = f", except at batch {', '.join(bad)} (see declined)" if bad else ""
    return f"Recommendation{but}: {plan}{comm}; {speeds}"


def _speed_at(optimum: Optimum, steps: Sequence[ScheduleStep]) -> str:
    step = next(s for s in reversed(steps) if s.batch_from <= optimum.batch or s is steps[0])
    shape = (step.num_steps, step.topk, step.num_draft_tokens, step.comm)
    c = next(c for c in optimum.table if (c.num_steps, c.topk, c.num_draft_tokens, c.comm) == shape)
    return f"{rate(c.tok_s)} tok/s (90 % interval {interval(c.tok_s_interval)}) at batch {optimum.batch:g}"


def _last_of_one(optimum: Optimum, refused: str | None, several: bool) -> str:
    best = optimum.best
    if refused is not None:
        inside = [c for c in optimum.table if not c.extrapolated]
        hint = ""
        if best.extrapolated and inside:
            c = max(inside, key=lambda c: c.tok_s)
            hint = f"; nearer by, {name_of(c)} is best, {rate(c.tok_s)} tok/s ({interval(c.tok_s_interval)})"
        if best.extrapolated:
            hint += "; measure closer to it, or trust it with --extrapolate"
        return f"No recommendation: {refused}{hint}"
    text = f"Recommendation: {recommendation(best, several_settings=several)}"
    if best.num_steps == 0:
        second = best_speculative(optimum)
        if second is not None:
            text += f"; the best with speculation, {name_of(second)}, is at {rate(second.tok_s)} ({loss(second, best)})"
    return text
