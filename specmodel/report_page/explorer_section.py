"""The sliders of a report and what they start with; the script looks every other position up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specmodel.report import change, factor, interval, rate
from specmodel.report_page.charts import interval_bar, scale_of
from specmodel.report_page.explorer import ACCEPTANCE, DRAFT, VERIFY, Explorer
from specmodel.report_page.figures import short_name
from specmodel.report_page.markup import Child, Markup, tag
from specmodel.report_page.sections import section
from specmodel.words import setting_name

__all__ = ["explorer_document", "explorer_section"]


def _shift(value: float) -> str:
    return "as it is" if value == 0.0 else f"{value:+.2f}".replace("-", "\u2212")


def _part(value: float) -> str:
    return (
        "as it is"
        if value == 1.0
        else "free"
        if value == 0.0
        else change(value - 1.0).replace(".0", "").replace("-", "\u2212")
    )


def _batch(value: float, outside: bool) -> str:
    return f"{value:g}" + (", not measured" if outside else "")


def words_of(explorer: Explorer) -> dict[str, list[str]]:
    """What each position of each slider means."""
    return {
        "batch": [_batch(b, bool(o)) for b, o in zip(explorer.batches, explorer.outside, strict=True)],
        "acceptance": [_shift(x) for x in ACCEPTANCE],
        "verify": [_part(x) for x in VERIFY],
        "draft": [_part(x) for x in DRAFT],
    }


_LABELS = {
    "acceptance": ("Acceptance", "added to the chance that each draft is accepted"),
    "verify": ("Verify pass", "its time in speculative cycles; plain decoding stays as it is"),
    "draft": ("Drafting", "its time"),
    "batch": ("Batch", "running sequences"),
}


FAR = "This is extrapolated and no recommendation."


def explorer_section(explorer: Explorer | None) -> Markup | None:
    """The sliders, and the answer at the position where they stand."""
    if explorer is None:
        return None
    words = words_of(explorer)
    start = dict(zip(("batch", "acceptance", "verify", "draft"), explorer.start, strict=True))
    sliders = [_slider(name, words[name], start[name]) for name in _LABELS]
    comm = "" if explorer.comm == "default" else f", all under {explorer.comm}"
    caption = (
        "Each position was computed by the model beforehand, the step count chosen anew; the page only looks it up"
        f"{comm}."
    )
    controls = tag(
        "div",
        sliders,
        tag("button", "As things are", type="button", id="reset"),
        class_="controls",
    )
    return section(
        "whatif",
        "What if",
        tag("p", caption, class_="caption"),
        tag("p", "The sliders need JavaScript; shown is the answer as things are.", class_="caption", id="scriptless"),
        tag("div", controls, _result(explorer), class_="explorer"),
    )


def _slider(name: str, words: Sequence[str], at: int) -> Markup:
    label, detail = _LABELS[name]
    return tag(
        "div",
        tag("label", label, for_=f"slider-{name}"),
        tag("output", words[at], id=f"value-{name}", for_=f"slider-{name}"),
        tag(
            "input",
            type="range",
            id=f"slider-{name}",
            min=0,
            max=len(words) - 1,
            step=1,
            value=at,
            disabled=len(words) < 2,
            aria_valuetext=words[at],
            aria_describedby=f"about-{name}",
        ),
        tag("p", detail, id=f"about-{name}", class_="detail"),
        class_="slider",
    )


def _result(e: Explorer) -> Markup:
    at = e.start
    best = int(e.best[at])
    value, low, high = (float(x[(*at, best)]) for x in (e.tok_s, e.low, e.high))
    far = bool(e.extrapolated[at[0], best])
    ends = interval((low, high))
    # What is extrapolated is no figure to remember: its interval is shown, not its middle.
    facts = [
        ("best", setting_name(*e.shapes[best]), "steps", None),
        (
            "throughput",
            f"{ends if far else rate(value)} tok/s",
            "rate",
            "90 % interval" if far else f"90 % interval {ends}",
        ),
        ("over plain decoding", "not known" if far else factor(float(e.speedup[at])), "speedup", None),
        ("change from now", "not known" if far else change(float(e.gain[at])), "gain", None),
    ]
    answer = tag(
        "dl",
        [
            tag(
                "div",
                tag("dt", a),
                tag("dd", b, id=f"whatif-{key}"),
                tag("dd", detail, id=f"whatif-{key}-detail", class_="detail") if detail else None,
            )
            for a, b, key, detail in facts
        ],
        class_="facts small",
        aria_live="polite",
    )
    rows = []
    scale = scale_of([float(x) for x in e.tok_s[at]], [float(x) for side in (e.low, e.high) for x in side[at]])
    for i, shape in enumerate(e.shapes):
        v, a, b = (float(x[(*at, i)]) for x in (e.tok_s, e.low, e.high))
        cells: list[Child] = [
            tag("th", short_name(*shape), scope="row"),
            tag("td", interval_bar(v, a, b, scale, kind="unseen", arrows=False), class_="wide"),
            tag("td", rate(v)),
        ]
        rows.append(tag("tr", cells, class_="best" if i == best else None))
    head = tag(
        "tr",
        tag("th", "steps", scope="col"),
        tag("th", "with its 90 % interval", scope="col", class_="wide"),
        tag("th", "tok/s", scope="col"),
    )
    table = tag("table", tag("thead", head), tag("tbody", rows, id="whatif-rows"), class_="bars")
    note = tag("p", FAR if far else "", id="whatif-note", class_="caption", aria_live="polite")
    return tag("div", answer, note, table, class_="result")


def explorer_document(e: Explorer) -> dict[str, Any]:
    """Return the grid as plain values: tok/s of four digits, nested as batch, acceptance, verify, draft, shape."""
    return {
        "comm": e.comm,
        "axes": ["batch", "acceptance", "verify", "draft", "shape"],
        "batch": list(e.batches),
        "acceptance": list(ACCEPTANCE),
        "verify": list(VERIFY),
        "draft": list(DRAFT),
        "shapes": [list(shape) for shape in e.shapes],
        "names": [setting_name(*shape) for shape in e.shapes],
        "words": words_of(e),
        "start": list(e.start),
        "tok_s": _digits(e.tok_s),
        "low": _digits(e.low),
        "high": _digits(e.high),
        "best": e.best.ravel().tolist(),
        "speedup": _digits(e.speedup),
        "gain": [round(float(x), 4) for x in e.gain.ravel()],
        "extrapolated": e.extrapolated.tolist(),
        "outside": e.outside.tolist(),
    }


def _digits(values: Any) -> list[float]:
    """Flat, in the order of the axes, rounded to four significant digits."""
    return [float(f"{x:.4g}") for x in values.ravel()]
