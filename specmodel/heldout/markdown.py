"""Markdown: tables, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["grid", "percent", "rate", "signed"]


def percent(x: float, digits: int = 1) -> str:
    """A fraction as percent."""
    return f"{100.0 * x:.{digits}f} %"


def signed(x: float, digits: int = 1) -> str:
    """A fraction as percent, with its sign."""
    return f"{100.0 * x:+.{digits}f} %"


def rate(x: float) -> str:
    """A rate, tok/s."""
    return f"{x:,.0f}" if x >= 1000 else f"{x:.4g}"


def grid(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, words: int = 0) -> list[str]:
    """A Markdown table; the first `left` and the last `words` columns are words, the others numbers."""
    numbers = range(left, len(headings) - words)
    marks = ["--:" if i in numbers else "---" for i in range(len(headings))]
    cells = [[c.replace("|", "\\|").replace("\n", " ") for c in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (headings, marks, *cells)]
