"""The sections of a report that the answer rests on: acceptance, ledger, next measurement, numbers, provenance."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specmodel.diagnosis import Diagnosis, Lever
from specmodel.report import factor
from specmodel.report_page.charts import Scale, interval_bar
from specmodel.report_page.content import Content
from specmodel.report_page.figures import acceptance_figure, candidate_table
from specmodel.report_page.markup import Child, Markup, fragment, tag
from specmodel.report_page.sections import MOST_WARNINGS, capital, section
from specmodel.words import absent, adaptive_lines, given, most_wanted, name_of, row_text, setting_name

__all__ = ["acceptance", "ceiling_of", "every_number", "ledger", "measure", "rests_on"]

_MOST_ROWS = 40
_MOST_TABLES = 16
_LINK = re.compile(r"https?://[!-~]+")


def acceptance(content: Content) -> Markup | None:
    """The acceptance curve."""
    curve = content.acceptance
    if curve is None:
        return None
    best = content.first.best
    first, *_ = curve.conditional[1]
    words = f"Of 100 cycles {100 * first:.0f} accept their first draft"
    if len(curve.survival[1]) > 1:
        words += f", {100 * curve.survival[1][1]:.0f} two or more"
    if best.num_steps:
        verb = "emits" if best.num_steps == 1 or best.topk > 1 else "emit"
        words += (
            f"; {name_of(best)} {verb} {best.acceptance_length:.2f} tokens a cycle, the one it always emits included"
        )
    rows = [
        tag(
            "tr",
            tag("th", k, scope="row"),
            tag("td", f"{100 * m:.1f} %"),
            tag("td", f"{100 * a:.0f} to {100 * b:.0f} %"),
            tag("td", f"{100 * c:.1f} %"),
        )
        for k, a, m, b, c in zip(
            range(1, 1 + curve.survival.shape[1]), *curve.survival, curve.conditional[1], strict=True
        )
    ]
    heads = ("position", "at least this many", "90 % interval", "given those before")
    table = tag(
        "details",
        tag("summary", "The same as a table"),
        tag(
            "table",
            tag("thead", tag("tr", [tag("th", h, scope="col") for h in heads])),
            tag("tbody", rows),
            class_="plain",
        ),
    )
    title = "Acceptance by position" if curve.workload == "default" else f"Acceptance by position: {curve.workload}"
    return section("acceptance", title, acceptance_figure(curve), tag("p", f"{words}.", class_="caption"), table)


def ledger(content: Content) -> Markup | None:
    """The levers, what each could bring at most, and whether that is worth while."""
    diagnosis = content.diagnosis
    if not diagnosis.levers:
        return None
    bounds = [x for lever in diagnosis.levers for x in (lever.bound_optimised or lever.bound, 1.0) if x is not None]
    scale = Scale(low=0.95, high=min(max(max(bounds) * 1.05, 1.1), 2.5))
    words = (
        f"The most that each could bring at {_setting_of(diagnosis)}, the number of steps chosen again, with its 90 % "
        f"interval. Closed: at most {100 * diagnosis.worth:g}\xa0%, not worth work. Measure: the file cannot tell."
    )
    closed = [lever for lever in diagnosis.levers if lever.status == "closed"]
    names = ", ".join(lever.title for lever in closed)
    lines = adaptive_lines(content.first)
    return section(
        "levers",
        "What is left to gain",
        tag("p", words, class_="caption"),
        _ledger_of([lever for lever in diagnosis.levers if lever.status != "closed"], scale),
        tag("details", tag("summary", f"Closed, {len(closed)}: {names}"), _ledger_of(closed, scale))
        if closed
        else None,
        tag("p", f"Draft lengths that adapt: {'; '.join(lines)}.", class_="caption") if lines else None,
    )


def _ledger_of(levers: Sequence[Lever], scale: Scale) -> Markup:
    rows = [tag("li", _lever(lever, scale), class_=f"lever {lever.status}") for lever in levers]
    return tag("ul", rows, class_="ledger")


def _setting_of(d: Diagnosis) -> str:
    comm = "" if d.comm == "default" else f" with {d.comm}"
    return f"{setting_name(d.num_steps, d.topk, d.num_draft_tokens)}{comm}, batch {d.batch:g}"


def ceiling_of(lever: Lever) -> tuple[str, str]:
    """The most that a lever could bring and its interval, in words."""
    value = lever.bound_optimised if lever.bound_optimised is not None else lever.bound
    if value is None:
        return "not known", ""
    detail = "" if lever.interval is None else f"{factor(lever.interval[0])} to {factor(lever.interval[1])}"
    return factor(value), detail


def _lever(lever: Lever, scale: Scale) -> Markup:
    value = lever.bound_optimised if lever.bound_optimised is not None else lever.bound
    number, detail = ceiling_of(lever)
    bar, same = None, None
    if value is not None:
        low, high = lever.interval or (value, value)
        bar = interval_bar(value, low, high, scale, reference=1.0, kind="seen")
        if lever.bound is not None and factor(lever.bound) != number:
            same = tag("span", f"same steps: {factor(lever.bound)}", class_="detail")
    return fragment(
        tag("p", tag("span", lever.status, class_=f"chip {lever.status}"), class_="status"),
        tag("h3", capital(lever.title)),
        tag("div", bar, class_="wide"),
        tag("p", tag("strong", number), tag("span", detail, class_="range") if detail else None, same, class_="most"),
        tag(
            "p",
            capital(lever.evidence),
            tag("span", f"Decided by: {lever.decided_by}", class_="decided") if lever.decided_by else None,
            class_="evidence",
        ),
    )


def measure(content: Content) -> Markup:
    """What to measure next, and what the answer rests on without a measurement."""
    wanted = most_wanted(content.optima)
    if wanted is None:
        reason = max((o.stop_reason for o in content.optima), key=len, default="")
        first: Child = tag("p", f"Nothing more: {reason.removeprefix('stop: ')}.")
    else:
        row = row_text({**wanted.row, "tok_s": "..."} if wanted.kind == "cycles" else wanted.row)
        first = fragment(
            tag("p", f"{capital(wanted.reason)}."),
            tag("p", f"Add to measurements.{wanted.kind}:"),
            tag("pre", tag("code", f"- {row}"), tabindex=0, aria_label="row to measure"),
        )
    rests = dict.fromkeys(text for o in content.optima for text in o.unmeasured)
    rest = [tag("li", text) for text in list(rests)[:MOST_WARNINGS]]
    more = len(rests) - len(rest)
    return section(
        "measure",
        "What to measure next",
        first,
        fragment(
            tag("h3", "Not measured, and relied on"),
            tag("ul", rest, tag("li", f"and {more} more") if more > 0 else None, class_="notes"),
        )
        if rest
        else None,
    )


def every_number(content: Content) -> Markup:
    """The tables: every candidate of the best settings."""
    parts: list[Child] = []
    most = max(min(_MOST_TABLES // len(content.drawn), 4), 1)
    for o in (content.optima[i] for i in content.drawn):
        comms = dict.fromkeys([o.best.comm, *(c.comm for c in sorted(o.table, key=lambda c: -c.tok_s))])
        shown = list(comms)[:most]
        for comm in shown:
            rows = [c for c in o.table if c.comm == comm][:_MOST_ROWS]
            name = "" if len(comms) == 1 and comm == "default" else f", {comm}"
            parts += [tag("h3", f"batch {o.batch:g}{name}"), candidate_table(o, rows)]
        left = len(o.table) - sum(min(_MOST_ROWS, sum(c.comm == comm for c in o.table)) for comm in shown)
        if left:
            parts.append(tag("p", f"{left} more rows are in the downloaded numbers.", class_="caption"))
    absent_batches = len(content.optima) - len(content.drawn)
    if absent_batches:
        parts.append(tag("p", f"{absent_batches} more batches are in the downloaded numbers.", class_="caption"))
    far = " ! marks what is extrapolated." if any(c.extrapolated for o in content.optima for c in o.table) else ""
    key = f"Filled dots were measured, hollow ones are predicted only; the dashed line is plain decoding.{far}"
    return section("numbers", "Every number", tag("p", key, class_="caption"), parts)


def rests_on(content: Content) -> Markup:
    """Provenance: what was given, by whom, with which caveats."""
    cal = content.model.calibration
    p = cal.provenance
    lacking = absent(cal)
    facts: list[tuple[str, Child]] = [("given", given(cal))]
    facts += [("not given", lacking)] if lacking else []
    facts += [("source", p.source)] if p.source else []
    facts += [("address", _address(p.url))] if p.url else []
    facts += [("date", str(p.date))] if p.date else []
    evidence = [f"{e.about.replace('_', ' ')}: {_said(e.value)}{_where(e.source)}" for e in cal.evidence]
    evidence += content.diagnosis.runtime
    return section(
        "provenance",
        "What this rests on",
        tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts], class_="facts-list"),
        fragment(tag("h3", "Caveats"), tag("ul", [tag("li", c) for c in p.caveats], class_="notes"))
        if p.caveats
        else None,
        fragment(tag("h3", "Facts"), tag("ul", [tag("li", e) for e in evidence], class_="notes")) if evidence else None,
    )


def _said(value: object) -> str:
    return (
        ("yes" if value else "no")
        if isinstance(value, bool)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def _where(source: str | None) -> str:
    return f" ({source})" if source else ""


def _address(url: str) -> Markup | str:
    """A link where it can only be one of the web."""
    if not _LINK.fullmatch(url):
        return url
    return tag("a", url, href=url, rel="noopener noreferrer")
