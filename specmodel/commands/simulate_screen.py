"""The screen of ``specmodel simulate``: every policy under each load, who wins by how much, and where time went."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from specmodel.model import FittedModel
from specmodel.report import Block, Column, Entries, Grid, Screen, change, factor, interval, milliseconds, rate, spans
from specmodel.simulate.scenario import Scenario
from specmodel.simulate.summary import Comparison, Estimate, PolicyResult, Simulation, Spread

Items = list[tuple[str, str]]
_MOST_WARNINGS = 8
_QUANTITY = {"tok_s": "tok/s", "latency_ms": "mean latency", "goodput_tok_s": "goodput"}


def screen(
    args: argparse.Namespace,
    model: FittedModel,
    answers: Sequence[Simulation],
    notes: Sequence[str],
    far: Sequence[Simulation],
) -> Screen:
    """Lay out the answers of one call."""
    cal = model.calibration
    first = answers[0]
    blocks: list[Block] = [f"{cal.name}: {cal.description}" if cal.description else cal.name]
    items: Items = [("load", _load(first.scenario))]
    items += [("assumed", text) for text in first.assumptions]
    widest = max(answers, key=lambda a: a.scenario.max_batch or 0)
    if widest.schedule:
        items.append(("schedule", "; ".join(_span(*s) for s in widest.schedule)))
    blocks.append(Entries(items=items))
    for answer in answers:
        blocks.append(_title(answer))
        blocks.append(_grid(answer))
        lines: Items = [("best", _best(answer))]
        bounds = _bounds(answer)
        lines += [("bounds", bounds)] if bounds else []
        lines.append(("time", _time(answer[answer.best])))
        blocks.append(Entries(items=lines))
    last: Items = [("intervals", _intervals(first))]
    if args.plot is not None:
        last.append(("plot", f"wrote {args.plot}"))
    warnings = list(dict.fromkeys([*notes, *(w for a in answers for w in a.warnings)]))
    last += [("warning", text) for text in warnings[:_MOST_WARNINGS]]
    if len(warnings) > _MOST_WARNINGS:
        last.append(("warning", f"and {len(warnings) - _MOST_WARNINGS} more, all of them in --json"))
    last += [
        ("declined", f"{a.scenario.arrivals}: {a.best} spends its time too far from what was measured; --extrapolate")
        for a in far
    ]
    blocks.append(Entries(items=last))
    return Screen(blocks=blocks, last=_last(answers, far))


def _load(s: Scenario) -> str:
    if s.arrivals == "trace":
        what = "a trace"
    else:
        what = f"outputs of {s.output_tokens} tokens after prompts of {s.prompt_tokens}"
    return f"{what}, {s.seeds} seed{'s' * (s.seeds > 1)}, {s.comm}"


def _span(first: int, last: int, steps: int) -> str:
    batches = f"batch {first}" if first == last else f"batch {first} to {last}"
    return f"{batches}: {'plain' if steps == 0 else f'{steps} steps' if steps > 1 else '1 step'}"


def _title(answer: Simulation) -> str:
    s = answer.scenario
    kind, _, value = str(s.arrivals).partition(":")
    what = {
        "closed": f"{value} client{'s' * (value != '1')}",
        "poisson": f"{value} requests per second",
        "trace": "the trace",
    }[kind]
    limits = f", {s.slo}" if s.slo else ""
    return f"{what}, at most {s.max_batch} at once, {s.requests} requests{limits}"


def _grid(answer: Simulation) -> Grid:
    rows = answer.results
    ttft = any(r.ttft_ms for r in rows)
    columns = [
        Column(heading="policy", cells=[r.policy for r in rows], left=True),
        Column(heading="tok/s", cells=[_rate(r.tok_s.mean) for r in rows]),
        Column(heading="90 %", cells=[_half(r.tok_s) for r in rows], priority=3),
        Column(heading="per user", cells=[_rate(r.user_tok_s.mean) for r in rows], priority=2),
        Column(heading="TPOT p50", cells=[_ms(r.tpot_ms, 50) for r in rows], priority=1),
        Column(heading="p99", cells=[_ms(r.tpot_ms, 99) for r in rows], priority=1),
    ]
    if ttft:
        columns += [
            Column(heading="TTFT p50", cells=[_ms(r.ttft_ms, 50) for r in rows], priority=1),
            Column(heading="p99", cells=[_ms(r.ttft_ms, 99) for r in rows], priority=2),
        ]
    columns += [
        Column(heading="latency p50", cells=[_ms(r.latency_ms, 50) for r in rows], priority=2),
        Column(heading="p99", cells=[_ms(r.latency_ms, 99) for r in rows], priority=2),
    ]
    if any(r.goodput_tok_s for r in rows):
        good = [f"{100 * r.good_share.mean:.0f}\xa0%" if r.good_share else "" for r in rows]
        goodput = [_rate(r.goodput_tok_s.mean) if r.goodput_tok_s else "" for r in rows]
        columns.insert(1, Column(heading="goodput", cells=goodput))
        half = [_half(r.goodput_tok_s) if r.goodput_tok_s else "" for r in rows]
        columns.insert(2, Column(heading="90 %", cells=half, priority=3))
        columns.insert(3, Column(heading="good", cells=good, priority=1))
    columns += [
        Column(heading="accepted", cells=[_number(r.acceptance_length.mean) for r in rows], priority=4),
        Column(heading="batch", cells=[f"{r.mean_batch.mean:.1f}" for r in rows], priority=5),
    ]
    marks = [_mark(answer, r) for r in rows]
    legend = "> best" + ("   ~ not surely worse" if "~" in marks else "")
    legend += "   * a bound, no engine can" if "*" in marks else ""
    legend += "   ! extrapolated" if "!" in marks else ""
    return Grid(
        columns=columns,
        marks=marks,
        strong=frozenset(i for i, r in enumerate(rows) if r.policy == answer.best),
        legend=f"{legend}   times in ms",
    )


def _mark(answer: Simulation, r: PolicyResult) -> str:
    if r.policy == answer.best:
        return ">"
    if r.policy in answer.tied:
        return "~"
    return "*" if not r.deployable else "!" if r.extrapolated_share > 0.05 else " "


def _rate(value: float) -> str:
    return rate(value) if math.isfinite(value) else ""


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ""


def _ms(value: Spread | None, percentile: int) -> str:
    mean = math.nan if value is None else (value.p50 if percentile == 50 else value.p99).mean
    return milliseconds(mean) if math.isfinite(mean) else ""


def _half(value: Estimate) -> str:
    return "" if math.isnan(value.low) else f"±{_rate(0.5 * (value.high - value.low))}"


def _gain(c: Comparison) -> str:
    if not math.isfinite(c.factor.mean):
        return f"{c.baseline} has none"
    text = change(c.factor.mean - 1.0)
    if not math.isnan(c.factor.low):
        text += f" ({change(c.factor.low - 1.0)} to {change(c.factor.high - 1.0)})"
    return f"{text} over {c.baseline}"


def _best(answer: Simulation) -> str:
    able = {r.policy for r in answer.results if r.deployable}
    ordered = sorted((c for c in answer.comparisons if c.baseline in able), key=lambda c: c.factor.mean)
    if not ordered:
        return f"{answer.best}, the only one"
    same = [c.baseline for c in ordered if c.factor.mean == 1.0 and not c.factor.high > c.factor.low]
    gains = [f"the same as {', '.join(same)}"] if same else []
    gains += [_gain(c) for c in ordered if c.baseline not in same]
    kept = "; every policy keeps the limits" if answer.scenario.slo and answer.objective == "latency_ms" else ""
    return f"{answer.best} by {_QUANTITY[answer.objective]}{kept}: {'; '.join(gains)}"


def _bounds(answer: Simulation) -> str:
    able = {r.policy for r in answer.results if r.deployable}
    if answer.best not in able:
        return ""
    parts = [
        f"{c.baseline} is {change(1.0 / c.factor.mean - 1.0)} better"
        for c in answer.comparisons
        if c.baseline not in able and c.factor.mean > 0.0
    ]
    return "; ".join(parts)


def _time(result: PolicyResult) -> str:
    """Say where time went: at which steps, and at which batches those."""
    by_steps: dict[int, list[tuple[int, float]]] = {}
    for k, b, share in result.time_at:
        by_steps.setdefault(k, []).append((b, share))
    parts = []
    for k, at in sorted(by_steps.items(), key=lambda pair: -sum(s for _, s in pair[1])):
        total = sum(share for _, share in at)
        if total >= 0.005:
            batches = spans(b for b, share in at if share >= 0.01 * total)
            steps = "plain" if k == 0 else f"{k} step{'s' * (k > 1)}"
            parts.append(f"{steps} {100 * total:.0f}\xa0% (batch {batches})")
    prefill = f"; prefill {100 * result.prefill_share:.0f}\xa0% of the run" if result.prefill_share > 0.005 else ""
    return "; ".join(parts) + prefill if parts else "no cycle was run"


def _intervals(answer: Simulation) -> str:
    text = f"90\xa0%, {answer.interval_covers}"
    if answer.model_interval is not None and not answer.scenario.model_draws:
        low, high = answer.model_interval
        text += f" ({change(low - 1.0)} to {change(high - 1.0)} where {answer.best} spends most time)"
    return text


def _last(answers: Sequence[Simulation], far: Sequence[Simulation]) -> str:
    def one(a: Simulation) -> str:
        r = a[a.best]
        plain = next((c for c in a.comparisons if c.baseline == "plain" and math.isfinite(c.factor.mean)), None)
        gain = f", {factor(plain.factor.mean)} plain decoding by {_QUANTITY[a.objective]}" if plain else ""
        value, unit = r.tok_s, "tok/s"
        if a.objective == "goodput_tok_s" and r.goodput_tok_s is not None:
            value, unit = r.goodput_tok_s, "tok/s of goodput"
        bounds = "" if math.isnan(value.low) else f", 90 % interval {interval((value.low, value.high))}"
        return f"{a.best} at {a.scenario.arrivals}: {_rate(value.mean)} {unit}{bounds}{gain}"

    good = [a for a in answers if a not in far]
    if not good:
        return "No recommendation: the simulated points are too far from what was measured"
    found = one(good[0]) if len(good) == 1 else "; ".join(f"{a.best} at {a.scenario.arrivals}" for a in good)
    return f"{'Best' if good[0][good[0].best].deployable else 'A bound, no engine can'}: {found}"
