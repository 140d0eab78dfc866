"""The sections of a report, from top to bottom: the answer, the figures, the ledger, what it rests on."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specmodel.calibration import Calibration
from specmodel.optimum import Optimum
from specmodel.report import chance, change, interval, rate
from specmodel.report_page.content import Content
from specmodel.report_page.figures import (
    batch_rows,
    cycle_figure,
    plain_ms,
    throughput_figure,
)
from specmodel.report_page.markup import Child, Markup, fragment, tag
from specmodel.words import (
    answer_line,
    best_speculative,
    loss,
    name_of,
    range_text,
    schedule_line,
    setting_lines,
    ties_text,
    to_win,
    warning_items,
)

__all__ = ["MOST_WARNINGS", "answer", "by_batch", "capital", "head", "notes", "schedule_of", "section", "warnings_of"]

MOST_WARNINGS = 12


def section(name: str, title: str, *children: Child, class_: str | None = None) -> Markup:
    """Write a section with its heading and the anchor that leads to it."""
    return tag(
        "section",
        tag("h2", title, id=f"{name}-title"),
        *children,
        id=name,
        aria_labelledby=f"{name}-title",
        class_=class_,
    )


def capital(words: str) -> str:
    """Begin with a capital letter."""
    return words[:1].upper() + words[1:]


def notes(texts: Sequence[Child]) -> Markup | None:
    """List short texts; nothing where there are none."""
    return tag("ul", [tag("li", text) for text in texts], class_="notes") if texts else None


def head(cal: Calibration) -> Markup:
    """The name of the deployment and what it is."""
    s, m = cal.system, cal.model
    gpus = f"{s.num_gpus} × {s.gpu}" if s.num_gpus and s.gpu else s.gpu
    engine = " ".join(x for x in (s.engine, s.engine_version) if x)
    facts = [
        ("target", m.target),
        ("draft", m.draft or m.method),
        ("hardware", gpus),
        ("parallel", _parallel(cal)),
        ("engine", engine),
    ]
    shown = [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if value]
    return fragment(
        tag("h1", _breakable(cal.name)),
        tag("p", cal.description, class_="description") if cal.description else None,
        tag("dl", shown, class_="system") if shown else None,
    )


def _breakable(name: str) -> list[Child]:
    """A name that may be broken after its hyphens and underscores."""
    return [part for piece in re.split(r"(?<=[-_.])", name) for part in (piece, tag("wbr"))][:-1]


def _parallel(cal: Calibration) -> str:
    s = cal.system
    sizes = [
        ("TP", s.tensor_parallel),
        ("DP", s.data_parallel if s.data_parallel > 1 else None),
        ("EP", s.expert_parallel),
    ]
    return ", ".join(f"{name} {size}" for name, size in sizes if size)


def answer(content: Content) -> Markup:
    """The verdict, the recommendation, and how it is launched."""
    optimum = content.first
    refused = content.refusals[content.optima.index(optimum)]
    several = len(content.optima) > 1
    facts = _facts(optimum, refused)
    where = f"at batch {optimum.batch:g}" if several or optimum.batch != 1.0 else None
    line = answer_line(content.model, content.optima, content.steps, content.refusals)
    said = several or any(content.refusals)  # else the figures above say as much
    return tag(
        "section",
        tag("h2", "Verdict", id="answer-title", class_="eyebrow"),
        tag("p", capital(content.diagnosis.verdict), class_="verdict"),
        tag("div", tag("p", where, class_="where") if where else None, tag("dl", facts, class_="facts"), class_="card"),
        tag("p", line, class_="line declined" if all(content.refusals) else "line") if said else None,
        _launch(content),
        id="answer",
        aria_labelledby="answer-title",
    )


def _facts(optimum: Optimum, refused: str | None) -> list[Markup]:
    best, plain = optimum.best, optimum.plain
    base = f"plain decoding {rate(plain.tok_s)} tok/s, {'measured' if plain.measured else 'predicted'}"
    sure = ("chance that it is best", chance(best.probability_best), f"expected regret {_percent(optimum)}")
    if refused:
        # What is declined is no figure to remember: its interval is shown, not its middle.
        entries = [
            ("recommended", "nothing yet", f"fastest predicted: {name_of(best)}"),
            ("throughput of that", f"{interval(best.tok_s_interval)} tok/s", "90 % interval, not recommended"),
            ("over plain decoding", "not known", base),
            sure,
        ]
    elif best.num_steps == 0:
        second = best_speculative(optimum)
        entries = [
            ("recommended", "no speculation", "plain decoding is fastest"),
            ("throughput", f"{rate(best.tok_s)} tok/s", f"90 % interval {interval(best.tok_s_interval)}"),
            ("best with speculation", "not known", "nothing near enough to judge")
            if second is None
            else ("best with speculation", loss(second, best), f"{name_of(second)}, {rate(second.tok_s)} tok/s"),
            sure,
        ]
    else:
        with_comm = len({c.comm for c in optimum.table}) > 1 or best.comm != "default"
        tokens = f"{best.num_draft_tokens} draft tokens"
        entries = [
            ("recommended", name_of(best), f"{tokens}, {best.comm}" if with_comm else tokens),
            ("throughput", f"{rate(best.tok_s)} tok/s", f"90 % interval {interval(best.tok_s_interval)}"),
            ("over plain decoding", change(best.speedup - 1.0), base),
            sure,
        ]
    return [tag("div", tag("dt", a), tag("dd", b), tag("dd", c, class_="detail")) for a, b, c in entries]


def _percent(optimum: Optimum) -> str:
    return f"{100 * optimum.expected_regret:.1f}\xa0%"


def _launch(content: Content) -> Markup | None:
    if any(content.refusals):
        # Of one batch the line above says it all.
        texts = dict.fromkeys(text for text in content.refusals if text) if len(content.optima) > 1 else {}
        return notes([f"Declined: {text}" for text in texts])
    below = notes(content.launch_notes)
    if content.launch:
        code = tag("pre", tag("code", "\n".join(content.launch), id="launch-line"), tabindex=0, aria_label="launch")
        copy = tag("button", "Copy", type="button", class_="copy", hidden=True)
        return fragment(tag("div", tag("h3", "Launch"), copy, class_="row"), code, below)
    best = content.first.best
    if len(content.optima) > 1:
        return below
    lines = setting_lines(best, content.model.calibration.comm.get(best.comm))
    return fragment(tag("h3", "Settings"), notes(lines), below)


def warnings_of(content: Content) -> Markup | None:
    """What is wrong with the numbers, and what the model warns of."""
    found = (
        [f"{f.where}: {f.message}" if f.where else f.message for f in content.diagnosis.findings]
        if content.diagnosis
        else []
    )
    texts = [w for o in content.optima for w in o.warnings] + list(
        content.diagnosis.warnings if content.diagnosis else ()
    )
    seen = "\n".join(found)
    said = [text for _, text in warning_items(dict.fromkeys(w for w in texts if w not in seen), most=MOST_WARNINGS)]
    if not found and not said:
        return None
    items = [tag("li", text, class_="finding") for text in found] + [tag("li", text) for text in said]
    return section("warnings", "Warnings", tag("ul", items), class_="callout")


def _panels(content: Content, figures: Sequence[Child]) -> list[Markup]:
    """One figure a batch; the page shows the one that is chosen."""
    several = len(content.optima) > 1
    return [
        tag(
            "div",
            tag("h3", f"batch {o.batch:g}", class_="panel-name") if several else None,
            figure,
            class_="panel",
            data_batch=f"{o.batch:g}",
        )
        for o, figure in zip((content.optima[i] for i in content.drawn), figures, strict=True)
    ]


def by_batch(content: Content) -> Markup:
    """Throughput over the steps and the parts of a cycle, for the batch that is chosen."""
    chosen = content.first
    drawn = [content.optima[i] for i in content.drawn]
    picker = None
    if len(content.optima) > 1:
        buttons = [
            tag(
                "label",
                tag("input", type="radio", name="batch", value=f"{o.batch:g}", checked=o is chosen),
                tag("span", f"{o.batch:g}"),
            )
            for o in drawn
        ]
        picker = tag("fieldset", tag("legend", "Batch shown below"), buttons, class_="picker", hidden=True)
    curves = [
        fragment(throughput_figure(o, p), tag("p", _tied(o), class_="caption"))
        for o, p in zip(drawn, (content.points[i] for i in content.drawn), strict=True)
    ]
    cycles = [fragment(cycle_figure(o), tag("p", _cycle_words(o), class_="caption")) for o in drawn]
    return fragment(
        picker,
        tag(
            "div",
            section("throughput", "Throughput by draft steps", _panels(content, curves)),
            section("cycle", "Where a cycle goes", _panels(content, cycles)),
            class_="pair",
        ),
    )


def _tied(optimum: Optimum) -> str:
    words = ties_text(optimum)
    return f"{capital(words.removeprefix('none: '))}." if words.startswith("none: ") else f"Ties: {words}."


def _cycle_words(optimum: Optimum) -> str:
    c, step = optimum.best, plain_ms(optimum)
    if c.num_steps == 0:
        return f"Speculation pays where the bar ends left of its mark; here it does nowhere, {to_win(optimum)}."
    share = c.verify_ms / c.cycle_ms
    return (
        f"A step count pays where its bar ends left of its mark. At {name_of(c)} a cycle takes {c.cycle_ms / step:.2f} "
        f"plain steps and emits {c.acceptance_length:.2f} tokens; {100 * share:.0f}\xa0% of it is the verify pass."
    )


def schedule_of(content: Content) -> Markup | None:
    """The best for each batch and the schedule that comes of it."""
    if len(content.optima) < 2:
        return None
    if all(content.refusals):
        return section("schedule", "By batch", batch_rows(content))
    steps = [tag("li", tag("strong", f"{range_text(s)}: "), schedule_line(s).partition(": ")[2]) for s in content.steps]
    comm = content.steps[0].comm
    words = (
        "An engine keeps one communication setting while it runs; the step count changes only where that brings more "
        f"than 0.5\xa0%{'' if comm == 'default' else f'. Under {comm}'}:"
    )
    return section(
        "schedule",
        "Schedule by batch",
        batch_rows(content),
        tag("p", words, class_="caption"),
        tag("ul", steps, class_="notes"),
    )
