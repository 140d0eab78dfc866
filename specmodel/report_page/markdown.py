"""The report as Markdown, for an issue thread: nothing of the file can become markup, a mention or a link."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from specmodel.optimum import Optimum
from specmodel.report import chance, factor, interval, milliseconds, printable, rate
from specmodel.report_page.content import Content, shown_chains
from specmodel.report_page.evidence import ceiling_of
from specmodel.report_page.figures import plain_ms
from specmodel.report_page.redact import without_secrets
from specmodel.report_page.sections import MOST_WARNINGS, capital
from specmodel.words import (
    absent,
    answer_line,
    given,
    most_wanted,
    name_of,
    row_text,
    schedule_line,
    setting_lines,
    ties_text,
    warning_items,
)

__all__ = ["markdown"]

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~@&!])")


def plain(text: str) -> str:
    """Escape what Markdown, or a site that shows it, would take for more than text."""
    return _SPECIAL.sub(r"\\\1", " ".join(printable(without_secrets(text)).split())).replace("://", ":\u200b//")


def fenced(lines: Sequence[str], language: str = "") -> list[str]:
    """Put lines between fences that no line of them can close."""
    shown = [printable(without_secrets(line)) for line in lines]
    longest = max((len(run) for line in shown for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence + language, *shown, fence]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: int = 1) -> list[str]:
    """Write a table; the columns from `right` on are of numbers."""
    ruler = ["--" if i < right else "--:" for i in range(len(heads))]
    return [f"| {' | '.join(cells)} |" for cells in (heads, ruler, *rows)]


def markdown(content: Content) -> str:
    """Write the whole report."""
    cal = content.model.calibration
    diagnosis = content.diagnosis
    blocks: list[list[str]] = [[f"### {plain(cal.name)}"]]
    if cal.description:
        blocks.append([plain(cal.description)])
    line = answer_line(content.model, content.optima, content.steps, content.refusals)
    blocks += [[f"**{plain(capital(diagnosis.verdict))}**"], [plain(line)]]
    blocks += _launch(content)
    if len(content.optima) > 1:
        blocks += _by_batch(content)
    blocks += _chains(content.first)
    if diagnosis.levers:
        rows = [
            [plain(lever.title), lever.status, *ceiling_of(lever), plain(lever.evidence)] for lever in diagnosis.levers
        ]
        blocks.append(["What is left to gain, at most:"])
        blocks.append(table(("lever", "status", "bound", "90 % interval", "evidence"), rows, right=5))
    blocks += _rest(content)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _launch(content: Content) -> list[list[str]]:
    if content.launch:
        return [fenced(content.launch, "sh"), *([_list(content.launch_notes)] if content.launch_notes else [])]
    if any(content.refusals) or len(content.optima) > 1:
        return []
    best = content.first.best
    return [_list(setting_lines(best, content.model.calibration.comm.get(best.comm)))]


def _list(texts: Iterable[str]) -> list[str]:
    return [f"- {plain(text)}" for text in texts]


def _by_batch(content: Content) -> list[list[str]]:
    rows = []
    for optimum, refused in zip(content.optima, content.refusals, strict=True):
        c = optimum.best
        name = name_of(c) + (" (declined)" if refused else "")
        rows.append(
            [
                f"{optimum.batch:g}",
                name,
                plain(c.comm),
                rate(c.tok_s),
                interval(c.tok_s_interval),
                factor(c.speedup),
                chance(c.probability_best),
            ]
        )
    heads = ("batch", "best", "setting", "tok/s", "90 % interval", "speedup", "P(best)")
    return [table(heads, rows, right=3), _list(schedule_line(step) for step in content.steps)]


def _chains(optimum: Optimum) -> list[list[str]]:
    step = plain_ms(optimum)
    rows = []
    for c in shown_chains(optimum):
        name = "plain" if c.num_steps == 0 else str(c.num_steps) if c.topk == 1 else name_of(c)
        name += " !" if c.extrapolated else ""
        rows.append(
            [
                f"**{name}**" if c == optimum.best else name,
                rate(c.tok_s),
                interval(c.tok_s_interval),
                factor(c.speedup),
                chance(c.probability_best),
                milliseconds(c.cycle_ms),
                f"{c.cycle_ms / step:.2f}",
                f"{c.acceptance_length:.2f}",
                "yes" if c.measured else "",
            ]
        )
    heads = (
        "steps", "tok/s", "90 % interval", "speedup", "P(best)", "cycle ms", "in plain steps", "tokens", "measured"
    )  # fmt: skip
    best = optimum.best
    comm = "" if best.comm == "default" else f", {plain(best.comm)}"
    title = f"Batch {optimum.batch:g}{comm}. Ties: {plain(ties_text(optimum))}."
    return [[title], table(heads, rows)]


def _rest(content: Content) -> list[list[str]]:
    cal = content.model.calibration
    blocks: list[list[str]] = []
    found = [f.message for f in content.diagnosis.findings] if content.diagnosis else []
    texts = [w for o in content.optima for w in o.warnings] + list(
        content.diagnosis.warnings if content.diagnosis else ()
    )
    said = found + [text for _, text in warning_items(dict.fromkeys(texts), most=MOST_WARNINGS) if text not in found]
    if said:
        blocks += [["Warnings:"], _list(said)]
    wanted = most_wanted(content.optima)
    if wanted is not None:
        row = row_text({**wanted.row, "tok_s": "..."} if wanted.kind == "cycles" else wanted.row)
        blocks += [[f"To measure next: {plain(wanted.reason)}."], fenced([f"- {row}"], "yaml")]
    lacking = absent(cal)
    rests = f"Given: {plain(given(cal))}." + (f" Not given: {plain(lacking)}." if lacking else "")
    source = f" Source: {plain(cal.provenance.source)}." if cal.provenance.source else ""
    blocks.append([rests + source])
    if cal.provenance.caveats:
        body = ["<details><summary>Caveats of the file</summary>", "", *_list(cal.provenance.caveats), "", "</details>"]
        blocks.append(body)
    return blocks
