"""The figures of a report: tok/s over steps, the parts of a cycle, the acceptance curve, and one bar for each batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specmodel.optimum import Candidate, Optimum
from specmodel.plot import MeasuredPoint
from specmodel.report import chance, factor, interval, milliseconds, rate
from specmodel.report_page.charts import (
    Band,
    Frame,
    Point,
    Scale,
    Segment,
    chart,
    interval_bar,
    scale_of,
    stacked_bar,
)
from specmodel.report_page.content import Acceptance, Content, shown_chains
from specmodel.report_page.markup import Child, Markup, fragment, tag
from specmodel.words import name_of

__all__ = [
    "acceptance_figure",
    "batch_rows",
    "candidate_table",
    "cycle_figure",
    "plain_ms",
    "short_name",
    "throughput_figure",
]

_MOST_SETTINGS = 4


def plain_ms(optimum: Optimum) -> float:
    """Time of one plain step of the batch."""
    return 1000.0 * optimum.batch / optimum.plain.tok_s


def throughput_figure(optimum: Optimum, points: Sequence[MeasuredPoint]) -> Markup:
    """Draw tok/s over the number of draft steps for the best settings, with what was measured."""
    best = optimum.best
    comms = _settings(optimum)
    chains = {comm: [c for c in optimum.table if c.comm == comm and c.topk == 1] for comm in comms}
    trees = [c for c in optimum.table if c.topk > 1 and c.comm == best.comm]
    shown = [c for comm in comms for c in chains[comm]] + trees
    points = [p for p in points if p.comm in comms]
    values = [c.tok_s for c in shown] + [p.tok_s for p in points] + [optimum.plain.tok_s]
    ends = [end for c in chains[best.comm] + trees for end in c.tok_s_interval] + [
        end for p in points for end in p.tok_s_interval
    ]
    far, near = _apart(chains[best.comm])
    frame = Frame(
        x=sorted({c.num_steps for c in shown}),
        y=scale_of(values, ends, headroom=0.16),
        x_title="draft steps (0 is plain decoding)",
        y_title="throughput, tok/s",
        reference=optimum.plain.tok_s,
        reference_label=f"plain decoding {rate(optimum.plain.tok_s)}",
        shade_from=(far + near) / 2.0 if far is not None and near is not None else None,
        shade_label="extrapolated",
        label=f"Throughput over draft steps at batch {optimum.batch:g}; the table of all numbers has the same values.",
    )
    bands = [
        Band(
            x=[c.num_steps for c in chains[comm]],
            y=[c.tok_s for c in chains[comm]],
            low=[c.tok_s_interval[0] for c in chains[comm]] if comm == best.comm else (),
            high=[c.tok_s_interval[1] for c in chains[comm]] if comm == best.comm else (),
            kind="own" if comm == best.comm else f"other other-{i}",
        )
        for i, comm in enumerate(comms)
        if chains[comm]
    ]
    marks = [_predicted(c, optimum) for c in chains[best.comm] if not c.measured]
    marks += [_tree(c) for c in trees]
    marks += [_measured(p, own=p.comm == best.comm) for p in points]
    label = f"{name_of(best)}, {rate(best.tok_s)}"
    low, high = best.tok_s_interval
    marks.append(Point(x=best.num_steps, y=best.tok_s, low=low, high=high, kind="best", label=label, title=_said(best)))
    drawn = chart(frame, list(reversed(bands)), marks)
    return tag("div", drawn, _throughput_key(optimum, comms, points, trees), class_="figure")


def _settings(optimum: Optimum) -> list[str]:
    """The setting of the best, then the others by what they reach, the slowest left out."""
    reached: dict[str, float] = {}
    for c in optimum.table:
        reached[c.comm] = max(reached.get(c.comm, 0.0), c.tok_s)
    ordered = sorted(reached, key=lambda comm: (comm != optimum.best.comm, -reached[comm]))
    return ordered[:_MOST_SETTINGS]


def _apart(chains: Sequence[Candidate]) -> tuple[float | None, float | None]:
    """The first step count that is extrapolated and the last that is not, where all longer ones are."""
    far = [c.num_steps for c in chains if c.extrapolated]
    near = [c.num_steps for c in chains if not c.extrapolated]
    return (min(far), max(near)) if far and near and min(far) > max(near) else (None, None)


def _said(c: Candidate) -> str:
    how = "measured" if c.measured else "not measured"
    return (
        f"{name_of(c)}: {rate(c.tok_s)} tok/s, 90 % interval {interval(c.tok_s_interval)}, {how}; "
        f"{factor(c.speedup)} of plain decoding; P(best) {chance(c.probability_best)}"
    )


def _predicted(c: Candidate, optimum: Optimum) -> Point:
    return Point(x=c.num_steps, y=c.tok_s, kind="predicted", title=_said(c))


def _tree(c: Candidate) -> Point:
    low, high = c.tok_s_interval
    return Point(x=c.num_steps, y=c.tok_s, low=low, high=high, kind="tree", title=_said(c))


def _measured(p: MeasuredPoint, *, own: bool) -> Point:
    name = "plain decoding" if p.num_steps == 0 else f"{p.num_steps} step{'s' if p.num_steps > 1 else ''}"
    if p.bound:
        return Point(
            x=p.num_steps, y=p.tok_s, kind="bound", title=f"{name}, {p.comm}: measured, at most {rate(p.tok_s)} tok/s"
        )
    low, high = p.tok_s_interval
    title = f"{name}, {p.comm}: measured {rate(p.tok_s)} tok/s ({interval(p.tok_s_interval)})"
    return Point(x=p.num_steps, y=p.tok_s, low=low, high=high, kind="measured" if own else "elsewhere", title=title)


def _throughput_key(
    optimum: Optimum, comms: Sequence[str], points: Sequence[MeasuredPoint], trees: Sequence[Candidate]
) -> Markup:
    several = len(comms) > 1
    entries: list[Child] = [
        _key("line own", f"{comms[0]}, with its 90 % band" if several else "model, with its 90 % band")
    ]
    entries += [_key(f"line other other-{i}", comm) for i, comm in enumerate(comms) if i]
    if any(not p.bound and p.comm == comms[0] for p in points):
        entries.append(_key("mark measured", "measured"))
    if any(not p.bound and p.comm != comms[0] for p in points):
        entries.append(_key("mark elsewhere", "measured under another setting"))
    if any(p.bound for p in points):
        entries.append(_key("mark bound", "measured: at most this"))
    if trees:
        entries.append(_key("mark tree", "draft tree"))
    left = len({c.comm for c in optimum.table}) - len(comms)
    if left:
        entries.append(tag("li", f"{left} slower settings are in the downloaded numbers"))
    return tag("ul", entries, class_="key")


def _key(kind: str, label: str) -> Markup:
    if kind.startswith("line"):
        shape = tag("line", x1=0, x2=22, y1=6, y2=6, class_=kind)
    elif kind.endswith("bound"):
        shape = tag("path", d="M5.5 2h11l-5.5 9z", class_=kind)
    elif kind.endswith("tree"):
        shape = tag("path", d="M11 0l6 6-6 6-6-6z", class_=kind)
    elif kind.startswith("part"):
        shape = tag("rect", x=4, y=0, width=14, height=12, class_=kind)
    elif kind == "even":
        shape = tag("line", x1=11, x2=11, y1=-1, y2=13, class_=kind)
    else:
        shape = tag("circle", cx=11, cy=6, r=4.5, class_=kind)
    return tag("li", tag("svg", shape, width=22, height=12, aria_hidden="true", class_="swatch"), label)


def cycle_figure(optimum: Optimum) -> Markup:
    """Draw the parts of a cycle for each step count, with the time that plain decoding takes for as many tokens."""
    rows = shown_chains(optimum)
    step = plain_ms(optimum)
    most = 1.02 * max(max(c.cycle_ms, c.acceptance_length * step) for c in rows)
    body = []
    for c in rows:
        even = c.acceptance_length * step
        bar = stacked_bar(
            [
                Segment(value=c.verify_ms, kind="verify", title=f"verify {milliseconds(c.verify_ms)} ms"),
                Segment(value=c.draft_ms, kind="draft", title=f"draft {milliseconds(c.draft_ms)} ms"),
                Segment(value=c.overhead_ms, kind="overhead", title=f"overhead {milliseconds(c.overhead_ms)} ms"),
            ],
            most,
            even,
        )
        cells = [
            tag("th", _short_name(c), scope="row"),
            tag("td", bar, class_="wide"),
            tag("td", milliseconds(c.cycle_ms)),
            tag("td", f"{c.cycle_ms / step:.2f}"),
            tag("td", f"{c.acceptance_length:.2f}"),
        ]
        body.append(tag("tr", cells, class_="best" if c == optimum.best else None))
    head = tag(
        "tr",
        tag("th", "steps", scope="col"),
        tag("th", "where its time goes", scope="col", class_="wide"),
        tag("th", "cycle ms", scope="col"),
        tag("th", "in plain steps", scope="col"),
        tag("th", "tokens", scope="col"),
    )
    table = tag("table", tag("thead", head), tag("tbody", body), class_="bars")
    key = tag(
        "ul",
        _key("part verify", "verify"),
        _key("part draft", "draft"),
        _key("part overhead", "overhead of having speculation on"),
        _key("even", "plain decoding takes this long for as many tokens"),
        class_="key",
    )
    return tag("div", table, key, class_="figure")


def short_name(num_steps: int, topk: int, num_draft_tokens: int) -> str:
    """Name a shape in a table: by its steps, a tree by its three numbers."""
    if topk > 1:
        return f"{num_steps}x{topk}x{num_draft_tokens}"
    return str(num_steps) if num_steps else "plain"


def _short_name(c: Candidate) -> str:
    return short_name(c.num_steps, c.topk, c.num_draft_tokens)


def acceptance_figure(curve: Acceptance) -> Markup:
    """Draw the survival and the conditional acceptance over the positions of a chain."""
    positions = list(range(1, curve.survival.shape[1] + 1))
    frame = Frame(
        x=positions,
        y=Scale(low=0.0, high=min(20.0 * math.ceil(5.5 * float(curve.conditional.max())), 100.0)),
        x_title="position in the chain of drafts",
        y_title="probability",
        unit=" %",
        label="Acceptance by position; the table of the chances has the same values.",
    )
    low, middle, high = (100.0 * row for row in curve.survival)
    under, chances, above = (100.0 * row for row in curve.conditional)
    bands = [
        Band(x=positions, y=list(chances), low=list(under), high=list(above), kind="conditional"),
        Band(x=positions, y=list(middle), low=list(low), high=list(high), kind="own"),
    ]
    marks = [
        Point(x=k, y=float(m), kind="predicted", title=f"at least {k} accepted: {m:.0f} % ({a:.0f} to {b:.0f})")
        for k, a, m, b in zip(positions, low, middle, high, strict=True)
    ]
    marks += [
        Point(x=k, y=100.0 * s, kind="measured", title=f"at least {k} accepted: {100 * s:.1f} %, as the file states")
        for k, s in enumerate(curve.measured, 1)
    ]
    key = tag(
        "ul",
        _key("line own", "at least this many drafts are accepted"),
        _key("line conditional", "this draft is accepted, given that those before it were"),
        _key("mark measured", "as the file states it") if curve.measured else None,
        class_="key",
    )
    return tag("div", chart(frame, bands, marks), key, class_="figure")


def candidate_table(optimum: Optimum, rows: Sequence[Candidate]) -> Markup:
    """Write candidates of one communication setting with their numbers, and their intervals as bars."""
    scale = _speed_scale(optimum)
    body = []
    for c in rows:
        low, high = c.tok_s_interval
        bar = interval_bar(
            c.tok_s, low, high, scale, reference=optimum.plain.tok_s, kind="seen" if c.measured else "unseen"
        )
        said = tag("span", " measured", class_="aloud") if c.measured else None
        cells = [
            tag("th", _short_name(c), " !" if c.extrapolated else None, said, scope="row"),
            tag("td", bar, class_="wide"),
            tag("td", rate(c.tok_s)),
            tag("td", interval(c.tok_s_interval), class_="interval"),
            tag("td", factor(c.speedup)),
            tag("td", chance(c.probability_best), class_="chance"),
        ]
        body.append(tag("tr", cells, class_="best" if c == optimum.best else None))
    heads = [
        tag("th", "steps", scope="col"),
        tag("th", "", scope="col", class_="wide"),
        tag("th", "tok/s", scope="col"),
        tag("th", "90 % interval", scope="col", class_="interval"),
        tag("th", "speedup", scope="col"),
        tag("th", "P(best)", scope="col", class_="chance"),
    ]
    return tag("table", tag("thead", tag("tr", heads)), tag("tbody", body), class_="bars numbers")


def _speed_scale(optimum: Optimum) -> Scale:
    """One scale for all settings of a batch."""
    values = [c.tok_s for c in optimum.table] + [optimum.plain.tok_s]
    return scale_of(values, [end for c in optimum.table for end in c.tok_s_interval])


def batch_rows(content: Content) -> Markup:
    """One row for each batch: the best, its throughput, and its speedup as a bar."""
    best = [o.best for o in content.optima]
    ratios = [tuple(c.speedup * end / c.tok_s for end in c.tok_s_interval) for c in best]
    scale = scale_of([c.speedup for c in best] + [1.0], [end for pair in ratios for end in pair])
    several = len({c.comm for c in best}) > 1
    body = []
    for optimum, c, (low, high), refused in zip(content.optima, best, ratios, content.refusals, strict=True):
        bar = interval_bar(c.speedup, low, high, scale, reference=1.0, kind="seen" if c.measured else "unseen")
        cells: list[Child] = [
            tag("th", f"{optimum.batch:g}", scope="row"),
            tag("td", name_of(c).removesuffix(" decoding"), " (declined)" if refused else None, class_="name"),
            tag("td", c.comm, class_="name") if several else None,
            tag("td", bar, class_="wide"),
            tag("td", factor(c.speedup)),
            tag("td", rate(c.tok_s)),
            tag("td", interval(c.tok_s_interval), class_="interval"),
            tag("td", chance(c.probability_best), class_="chance"),
        ]
        body.append(tag("tr", cells))
    heads: list[Child] = [
        tag("th", "batch", scope="col"),
        tag("th", "best", scope="col", class_="name"),
        tag("th", "setting", scope="col", class_="name") if several else None,
        tag("th", "over plain decoding", scope="col", class_="wide"),
        tag("th", "speedup", scope="col"),
        tag("th", "tok/s", scope="col"),
        tag("th", "90 % interval", scope="col", class_="interval"),
        tag("th", "P(best)", scope="col", class_="chance"),
    ]
    return fragment(tag("table", tag("thead", tag("tr", heads)), tag("tbody", body), class_="bars numbers batches"))
