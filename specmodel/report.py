"""Answers for people: numbers and intervals as text, tables with an error-bar plot in them, screens of a given width.

A screen is data: headings, grids, labelled entries, and one last line that is never broken. What is known of the
terminal is in `Page`; `render` lays a screen out on it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specmodel.errors import brief

__all__ = [
    "GLYPHS",
    "Axis",
    "Bar",
    "Block",
    "Column",
    "Entries",
    "Grid",
    "Page",
    "Screen",
    "Verbatim",
    "axis_of",
    "chance",
    "change",
    "draw",
    "factor",
    "interval",
    "milliseconds",
    "printable",
    "rate",
    "render",
    "spans",
]

GLYPHS = "├─┤●○┊◂▸"
_ASCII = str.maketrans(GLYPHS, "|-|*o:<>")
_GAP = 2
_LABEL = 11
_MOST_PLOT, _LEAST_PLOT = 60, 24
_NO_BREAK = "\xa0"  # a space that no line ends at


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the output can show."""

    width: int = 80
    unicode: bool = True
    colour: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The range of a text plot, in the unit of what is plotted, and where its reference line stands."""

    low: float
    high: float
    unit: str
    reference: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A value with its interval, as a text plot shows it."""

    value: float
    low: float
    high: float
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a grid: its heading and a cell for each row; `priority` 0 is always shown."""

    heading: str
    cells: Sequence[str]
    left: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table; as many columns as fit, those of small priority first; one plot fills what is left of the width."""

    columns: Sequence[Column]
    marks: Sequence[str] = ()
    """One character before each row."""
    bars: Sequence[Bar] = ()
    axis: Axis | None = None
    plot_priority: int = 1
    strong: frozenset[int] = frozenset()
    """Rows that stand out where there is colour."""
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Labelled paragraphs; a label is shown at the first of its paragraphs."""

    items: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verbatim:
    """Lines that are shown as they are, to be copied."""

    lines: Sequence[str]


Block = str | Grid | Entries | Verbatim


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What is shown: blocks from top to bottom, an empty line between them, and the last line."""

    blocks: Sequence[Block] = field(default=())
    last: str = ""


def printable(text: str) -> str:
    """Escape what would move the cursor or change the terminal: control characters of any kind."""
    text = text.replace(_NO_BREAK, " ")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def rate(value: float) -> str:
    """Write a throughput: 8.25, 94.2, 1,234."""
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def milliseconds(value: float) -> str:
    """Write a time in ms: 0.0123, 0.38, 17.46, 123.4."""
    return f"{value:.1f}" if value >= 99.995 else f"{value:.2f}" if value >= 0.0995 or value == 0 else f"{value:.3g}"


def interval(bounds: tuple[float, float]) -> str:
    """Write an interval of throughputs: 91.6 to 96.8."""
    return f"{rate(bounds[0])} to {rate(bounds[1])}"


def chance(probability: float) -> str:
    """Write a probability in whole percent, without rounding what may be to never or always."""
    if 0.0 < probability < 0.005:
        return f"<1{_NO_BREAK}%"
    if 0.995 <= probability < 1.0:
        return f">99{_NO_BREAK}%"
    return f"{100 * probability:.0f}{_NO_BREAK}%"


def factor(value: float) -> str:
    """Write a ratio: 1.06x; what is above a hundred says no more than that."""
    return f"{value:.2f}x" if value < 9.995 else f"{value:.1f}x" if value < 99.95 else ">100x"


def change(value: float) -> str:
    """Write a relative difference with its sign: +5.8 %."""
    return f"{100 * value:+z.1f}{_NO_BREAK}%" if abs(value) < 9.995 else f"{100 * value:+,.0f}{_NO_BREAK}%"


def spans(values: Iterable[float]) -> str:
    """Write numbers as ranges: 1, 3 to 5, 10."""
    ordered = sorted(set(values))
    runs: list[list[float]] = []
    for value in ordered:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    parts = []
    for run in runs:
        parts += [f"{run[0]:g} to {run[-1]:g}"] if len(run) > 2 else [f"{value:g}" for value in run]
    return ", ".join(parts)


def axis_of(bars: Sequence[Bar], unit: str, reference: float | None = None) -> Axis:
    """Choose the range of a plot: all intervals, but not so much of a very wide one that the rest shrinks to a dot."""
    values = [bar.value for bar in bars] + ([] if reference is None else [reference])
    low = max(min(bar.low for bar in bars), 0.5 * min(values))
    high = min(max(bar.high for bar in bars), 1.5 * max(values))
    low, high = min(low, *values), max(high, *values)
    if high <= low:
        low, high = 0.9 * low, 1.1 * high
    return Axis(low=low, high=high, unit=unit, reference=reference)


def draw(bar: Bar, axis: Axis, width: int) -> str:
    """Draw one interval with its value on an axis, `width` characters wide; an arrow says that it goes on."""

    def place(value: float) -> int:
        return round((value - axis.low) / (axis.high - axis.low) * (width - 1))

    cells = [" "] * width
    if axis.reference is not None:
        cells[place(axis.reference)] = "┊"
    left, right = max(place(bar.low), 0), min(place(bar.high), width - 1)
    cells[left : right + 1] = "─" * (right + 1 - left)
    cells[left] = "├" if place(bar.low) >= 0 else "◂"
    cells[right] = "┤" if place(bar.high) < width else "▸"
    cells[min(max(place(bar.value), 0), width - 1)] = "●" if bar.measured else "○"
    return "".join(cells)


def _heading(axis: Axis, width: int) -> str:
    low, high = rate(axis.low), rate(axis.high)
    inner = width - len(low) - len(high)
    return f"{low}{axis.unit.center(inner)}{high}" if inner > len(axis.unit) + 1 else axis.unit.center(width)


def _chosen(grid: Grid, width: int) -> tuple[list[Column], int]:
    """Return the columns that fit, and the width that is left for the plot (0: none)."""
    sizes = [max([len(c.heading), *(len(brief(cell)) for cell in c.cells)]) + _GAP for c in grid.columns]
    left = width + _GAP - (1 if grid.marks else 0)
    kept, plotted = set[int](), False
    plot = (grid.plot_priority, -1)  # before the columns of its priority
    wanted = sorted([(c.priority, i) for i, c in enumerate(grid.columns)] + ([plot] if grid.axis else []))
    for priority, i in wanted:
        size = _LEAST_PLOT + _GAP if i < 0 else sizes[i]
        if size > left and priority:
            if i < 0:
                continue
            break
        left -= size
        kept.add(i)
        plotted = plotted or i < 0
    size = min(_LEAST_PLOT + max(left, 0), _MOST_PLOT) if plotted else 0
    return [column for i, column in enumerate(grid.columns) if i in kept], size


def _lay_grid(grid: Grid, page: Page) -> list[tuple[str, bool]]:
    columns, size = _chosen(grid, page.width)
    count = len(columns[0].cells)
    rows = [[column.heading, *map(brief, column.cells)] for column in columns]
    if size and grid.axis is not None:
        rows.append([_heading(grid.axis, size), *(draw(bar, grid.axis, size) for bar in grid.bars)])
    lines = []
    for i in range(count + 1):
        cells = []
        for cell, column in zip(rows, [*columns, None], strict=False):
            width = max(map(len, cell))
            cells.append(cell[i].ljust(width) if column is None or column.left else cell[i].rjust(width))
        mark = (" " if i == 0 else grid.marks[i - 1]) if grid.marks else ""
        lines.append((mark + (" " * _GAP).join(cells), i - 1 in grid.strong))
    return lines


def _bold(text: str, page: Page) -> str:
    return f"\x1b[1m{text}\x1b[0m" if page.colour and text.strip() else text


def _wrapped(text: str, width: int, label: str = "", indent: int = 0) -> list[str]:
    lines = textwrap.wrap(
        brief(text),
        width,
        initial_indent=label.ljust(indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [printable(line) for line in lines]


def _lay(block: Block, page: Page) -> list[str]:
    if isinstance(block, Verbatim):
        return [printable(line) for line in block.lines]
    if isinstance(block, str):
        return _wrapped(block, page.width)
    if isinstance(block, Grid):
        laid = [(printable(line.rstrip()), strong) for line, strong in _lay_grid(block, page)]
        lines = [_bold(line, page) if strong else line for line, strong in laid]
        return lines + _wrapped(block.legend, page.width, "", 1 if block.marks else 0)
    lines, before = [], ""
    for label, text in block.items:
        lines += _wrapped(text, page.width, "" if label == before else label, _LABEL)
        before = label
    return lines


def render(screen: Screen, page: Page) -> str:
    """Lay a screen out; the text ends with a line break, and only the last line may be wider than the page."""
    blocks = ["\n".join(_lay(block, page)) for block in screen.blocks]
    if screen.last:
        blocks.append(_bold(printable(brief(screen.last)), page))
    text = "\n\n".join(blocks) + "\n"
    return text if page.unicode else text.translate(_ASCII)
