"""Charts as inline SVG that keep the size of their text at every width and take their colours from the page.

Lines and bands are drawn in a nested drawing that stretches; points, labels and bars stand at percentages of the width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specmodel.report_page.markup import Markup, fragment, tag

__all__ = ["Band", "Frame", "Point", "Scale", "Segment", "chart", "interval_bar", "scale_of", "stacked_bar", "ticks"]

_PLOT_PX = 290
_AXIS_PX = 46
_EDGE = 4.0  # percent of the width that is left free on both sides
_BAR_PX = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values that stand at 0 and at 100 percent."""

    low: float
    high: float

    def percent(self, value: float) -> float:
        """Place of a value, kept inside."""
        share = (value - self.low) / (self.high - self.low)
        return 100.0 * min(max(share, 0.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A line with its interval over whole numbers."""

    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    kind: str = "own"
    """Class that gives it its colour and dashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A marked value, with its interval where it has one, and what is said where the pointer rests on it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    kind: str = "measured"
    title: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What a chart is drawn in."""

    x: Sequence[float]
    """Every value of the horizontal axis that may be named."""
    y: Scale
    x_title: str
    y_title: str
    unit: str = ""
    """After the numbers of the vertical axis."""
    reference: float | None = None
    reference_label: str = ""
    shade_from: float | None = None
    shade_label: str = ""
    label: str = ""
    """What the chart shows, for those who do not see it."""


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers within [low, high], at most about `most`."""
    span = high - low
    if not span > 0.0 or not math.isfinite(span):
        return [low]
    raw = span / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1.0, 2.0, 2.5, 5.0, 10.0) if power * m >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], ends: Sequence[float] = (), headroom: float = 0.06) -> Scale:
    """Choose a range: every value, and of very wide intervals only the part near the values; with room above."""
    low = max(min([*ends, *values]), 0.6 * min(values))
    high = min(max([*ends, *values]), 1.35 * max(values))
    low, high = min(low, *values), max(high, *values)
    pad = 0.06 * (high - low) or 0.1 * max(abs(high), 1e-9)
    return Scale(low=max(low - pad, 0.0), high=high + max(pad, headroom * (high - low)))


def _number(value: float, unit: str) -> str:
    return f"{value:,.10g}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where values of a frame stand."""

    frame: Frame

    def across(self, x: float) -> float:
        """Percent of the width."""
        first, last = min(self.frame.x), max(self.frame.x)
        share = 0.5 if last == first else (x - first) / (last - first)
        return _EDGE + share * (100.0 - 2.0 * _EDGE)

    def down(self, y: float) -> float:
        """Pixels from the top."""
        return _PLOT_PX * (1.0 - self.frame.y.percent(y) / 100.0)


def chart(frame: Frame, bands: Sequence[Band], points: Sequence[Point]) -> Markup:
    """Draw lines with bands and points over whole numbers, as a pair of drawings: the axis, and what stretches."""
    place = _Place(frame=frame)
    marks = ticks(frame.y.low, frame.y.high)
    axis = tag(
        "svg",
        [tag("text", _number(y, frame.unit), x=_AXIS_PX - 8, y=place.down(y) + 4.0, text_anchor="end") for y in marks],
        class_="axis",
        width=_AXIS_PX,
        height=_PLOT_PX + 42,
        aria_hidden="true",
    )
    shapes = tag(
        "svg",
        [_band(band, place) for band in bands],
        [_line(band, place) for band in bands],
        viewBox=f"0 0 100 {_PLOT_PX}",
        preserveAspectRatio="none",
        width="100%",
        height=_PLOT_PX,
    )
    plot = tag(
        "svg",
        _shade(frame, place),
        [tag("line", x1=0, x2="100%", y1=place.down(y), y2=place.down(y), class_="grid") for y in marks],
        shapes,
        _reference(frame, place),
        [_point(p, place) for p in points],
        _across_labels(frame, place),
        class_="plot",
        height=_PLOT_PX + 42,
        role="img",
        aria_label=frame.label,
    )
    drawing = tag("div", axis, plot, class_="drawing")
    return tag("div", tag("p", frame.y_title, class_="y-title"), drawing, class_="chart")


def _across_labels(frame: Frame, place: _Place) -> Markup:
    step = max(1, math.ceil(len(frame.x) / 12))
    named = [x for i, x in enumerate(sorted(frame.x)) if i % step == 0]
    return fragment(
        tag("line", x1=0, x2="100%", y1=_PLOT_PX, y2=_PLOT_PX, class_="base"),
        [tag("text", f"{x:g}", x=_percent(place.across(x)), y=_PLOT_PX + 18, text_anchor="middle") for x in named],
        tag("text", frame.x_title, x="50%", y=_PLOT_PX + 38, text_anchor="middle"),
    )


def _percent(value: float) -> str:
    return f"{round(value, 2):g}%"


def _shade(frame: Frame, place: _Place) -> Markup | None:
    if frame.shade_from is None:
        return None
    left = place.across(frame.shade_from)
    return fragment(
        tag("rect", x=_percent(left), y=0, width=_percent(100.0 - left), height=_PLOT_PX, class_="shade"),
        tag("text", frame.shade_label, x="99%", y=_PLOT_PX - 8, text_anchor="end", class_="halo"),
    )


def _reference(frame: Frame, place: _Place) -> Markup | None:
    if frame.reference is None:
        return None
    y = place.down(frame.reference)
    return fragment(
        tag("line", x1=0, x2="100%", y1=y, y2=y, class_="reference"),
        tag("text", frame.reference_label, x="99.5%", y=y - 6.0, text_anchor="end", class_="halo"),
    )


def _path(pairs: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.2f} {y:.1f}" for x, y in pairs)


def _band(band: Band, place: _Place) -> Markup | None:
    if not band.low:
        return None
    upper = [(place.across(x), place.down(y)) for x, y in zip(band.x, band.high, strict=True)]
    lower = [(place.across(x), place.down(y)) for x, y in zip(band.x, band.low, strict=True)]
    return tag("path", d=_path([*upper, *reversed(lower)]) + "Z", class_=f"band {band.kind}")


def _line(band: Band, place: _Place) -> Markup:
    pairs = [(place.across(x), place.down(y)) for x, y in zip(band.x, band.y, strict=True)]
    return tag("path", d=_path(pairs), class_=f"line {band.kind}")


_MARKS = {
    "bound": "M-5.5-4.5h11l-5.5 9z",
    "tree": "M0-6l6 6-6 6-6-6z",
}


def _point(p: Point, place: _Place) -> Markup:
    x, y = _percent(place.across(p.x)), place.down(p.y)
    whisker = None
    if p.low is not None and p.high is not None:
        whisker = tag("line", x1=x, x2=x, y1=place.down(p.high), y2=place.down(p.low), class_=f"whisker {p.kind}")
    title = tag("title", p.title) if p.title else None
    if p.kind in _MARKS:
        # A shape cannot stand at a percentage; a drawing of no size that holds it can.
        mark = tag("svg", tag("path", title, d=_MARKS[p.kind], class_=f"mark {p.kind}"), x=x, y=y, class_="free")
    else:
        radius = {"best": 9.0, "hover": 11.0, "predicted": 3.0}.get(p.kind, 4.5)
        mark = tag("circle", title, cx=x, cy=y, r=radius, class_=f"mark {p.kind}")
    return fragment(whisker, mark, _label(p, place) if p.label else None)


def _label(p: Point, place: _Place) -> Markup:
    across, y = place.across(p.x), place.down(p.y)
    anchor = "start" if across < 20.0 else "end" if across > 80.0 else "middle"
    top = y if p.high is None else min(y, place.down(p.high))
    return tag("text", p.label, x=_percent(across), y=max(top - 15.0, 10.0), text_anchor=anchor, class_="halo strong")


def interval_bar(
    value: float,
    low: float,
    high: float,
    scale: Scale,
    *,
    reference: float | None = None,
    kind: str = "",
    arrows: bool = True,
) -> Markup:
    """Draw one interval with its value on a scale, as wide as its cell; an arrow says that it goes on."""
    left, right = _percent(scale.percent(low)), _percent(scale.percent(high))
    middle = _BAR_PX / 2.0
    return tag(
        "svg",
        None
        if reference is None
        else tag(
            "line",
            x1=_percent(scale.percent(reference)),
            x2=_percent(scale.percent(reference)),
            y1=0,
            y2=_BAR_PX,
            class_="reference",
        ),
        tag("line", x1=left, x2=right, y1=middle, y2=middle, class_="whisker"),
        _end(scale, low, left, middle, -1) if arrows else tag("line", x1=left, x2=left, y1=7, y2=15, class_="whisker"),
        _end(scale, high, right, middle, 1)
        if arrows
        else tag("line", x1=right, x2=right, y1=7, y2=15, class_="whisker"),
        tag("circle", cx=_percent(scale.percent(value)), cy=middle, r=4.5, class_="mark"),
        class_=f"bar {kind}".strip(),
        height=_BAR_PX,
        aria_hidden="true",
    )


def _end(scale: Scale, value: float, at: str, middle: float, side: int) -> Markup:
    if side == 0 or scale.low <= value <= scale.high:
        return tag("line", x1=at, x2=at, y1=middle - 4.0, y2=middle + 4.0, class_="whisker")
    arrow = f"M{-5 * side} -4L0 0L{-5 * side} 4"
    return tag("svg", tag("path", d=arrow, class_="whisker"), x=at, y=middle, class_="free")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One part of a stacked bar."""

    value: float
    kind: str
    title: str = ""


def stacked_bar(segments: Sequence[Segment], most: float, mark: float | None = None) -> Markup:
    """Draw parts one after the other, `most` being the whole width, and a mark on the same scale."""
    scale = Scale(low=0.0, high=most)
    rects, start = [], 0.0
    for segment in segments:
        width = scale.percent(start + segment.value) - scale.percent(start)
        rects.append(
            tag(
                "rect",
                tag("title", segment.title) if segment.title else None,
                x=_percent(scale.percent(start)),
                width=_percent(width),
                y=4,
                height=_BAR_PX - 8,
                class_=f"part {segment.kind}",
            )
        )
        start += segment.value
    line = None
    if mark is not None:
        at = _percent(scale.percent(mark))
        line = tag("line", x1=at, x2=at, y1=0, y2=_BAR_PX, class_="even")
    return tag("svg", rects, line, class_="bar", height=_BAR_PX, aria_hidden="true")
