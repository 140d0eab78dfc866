"""Figures of suppositions: before and after over the steps, a sweep as a line with its band, two axes as a map.

matplotlib is imported inside, as in `specmodel.plot`; the colours are of Okabe and Ito's colour-blind safe set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from specmodel.situations import Outcome
from specmodel.whatif import Sweep, WhatIf

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_map", "draw_sweep", "draw_whatif", "figure_of_sweep", "figure_of_whatif"]

_AFTER, _BEFORE, _PLAIN, _MARK = "#0072B2", "#8C8C8C", "#404040", "#D55E00"


def draw_whatif(ax: Axes, result: WhatIf) -> dict[str, Any]:
    """Draw tok/s over num_steps before and after, each with its 90 % band; the best of each is ringed.

    Returns
    -------
    dict of str to artist
        ``before``, ``after``, and their ``band``, ``best`` and ``plain`` by the same names.
    """
    artists: dict[str, Any] = {"band": {}, "best": {}, "plain": {}}
    for name, outcome, colour, dash in (
        ("before", result.before, _BEFORE, (0, (5, 2))),
        ("after", result.after, _AFTER, "-"),
    ):
        chains = [c for c in outcome.table if c.comm == outcome.best.comm and c.topk == 1]
        steps = [c.num_steps for c in chains]
        label = f"{name}, {outcome.best.comm}"
        (artists[name],) = ax.plot(steps, [c.tok_s for c in chains], color=colour, linestyle=dash, label=label)
        low, high = ([c.tok_s_interval[side] for c in chains] for side in (0, 1))
        artists["band"][name] = ax.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
        (artists["best"][name],) = ax.plot(
            [outcome.best.num_steps], [outcome.best.tok_s], "o", color=colour, markerfacecolor="none", markersize=10
        )
        artists["plain"][name] = ax.axhline(outcome.plain_tok_s, color=colour, linestyle=(0, (1, 1)), linewidth=1)
    _limits(ax, (result.before, result.after))
    ax.set_xlabel("num_steps")
    ax.set_ylabel("tok/s")
    ax.legend(fontsize=8, frameon=False)
    return artists


def _limits(ax: Axes, outcomes: tuple[Outcome, ...]) -> None:
    """All values, and of the bands no more than does not make them flat."""
    values = [c.tok_s for o in outcomes for c in o.table if c.comm == o.best.comm]
    bounds = [x for o in outcomes for c in o.table if c.comm == o.best.comm for x in c.tok_s_interval]
    ax.set_ylim(max(min(bounds), 0.5 * min(values)), min(max(bounds), 1.4 * max(values)))


def draw_sweep(ax: Axes, result: Sweep) -> dict[str, Any]:
    """Draw the speedup over plain decoding along one axis: the best, and the best that drafts where it is below.

    Returns
    -------
    dict of str to artist
        ``best``, ``band``, ``speculative``, ``even``, and ``labels``, the steps along the line.
    """
    x = np.array([c.values[0] for c in result.cells])
    best = np.array([c.best.speedup for c in result.cells])
    low, high = (
        np.array([c.best.speedup * c.best.tok_s_interval[side] / c.best.tok_s for c in result.cells]) for side in (0, 1)
    )
    drafting = np.array([np.nan if c.speculative is None else c.speculative.speedup for c in result.cells])
    artists: dict[str, Any] = {"even": ax.axhline(1.0, color=_PLAIN, linewidth=1, linestyle=(0, (1, 1)))}
    artists["band"] = ax.fill_between(x, low, high, color=_AFTER, alpha=0.18, linewidth=0)
    (artists["speculative"],) = ax.plot(x, drafting, color=_MARK, linestyle=(0, (5, 2)), label="best that drafts")
    (artists["best"],) = ax.plot(x, best, color=_AFTER, marker="o", markersize=3, label="best")
    artists["labels"] = []
    before = None
    for c in result.cells:
        name = "plain" if c.best.num_steps == 0 else f"K={c.best.num_steps}"
        if name != before:
            artists["labels"].append(
                ax.annotate(name, (c.values[0], c.best.speedup), xytext=(0, 8), textcoords="offset points", fontsize=8)
            )
        before = name
    ax.set_xlabel(result.axes[0].name)
    ax.set_ylabel("speedup over plain decoding")
    ax.legend(fontsize=8, frameon=False)
    return artists


def draw_map(ax: Axes, result: Sweep) -> dict[str, Any]:
    """Draw the speedup of the best that drafts over plain decoding, two axes: colours, the line of break-even, steps.

    Returns
    -------
    dict of str to artist
        ``image``, ``even`` (the contour at 1; None where it is nowhere), ``regions`` (between different steps) and
        ``labels``.
    """
    from matplotlib.colors import TwoSlopeNorm

    rows, across = result.axes
    shape = (len(rows.values), len(across.values))
    speedup = np.array(
        [np.nan if c.speculative is None else c.speculative.speedup for c in result.cells], dtype=float
    ).reshape(shape)
    steps = np.array([c.best.num_steps for c in result.cells]).reshape(shape)
    reach = max(float(np.nanmax(np.abs(speedup - 1.0), initial=0.0)), 0.01)
    # Places on the grid, not values: an axis of batches is 1, 8, 32.
    x, y = np.arange(shape[1]), np.arange(shape[0])
    artists: dict[str, Any] = {"labels": [], "even": None, "regions": None}
    artists["image"] = ax.imshow(
        speedup,
        origin="lower",
        aspect="auto",
        cmap="PuOr_r",
        norm=TwoSlopeNorm(1.0, max(1.0 - reach, -0.01), 1.0 + reach),
        extent=(-0.5, shape[1] - 0.5, -0.5, shape[0] - 0.5),
    )
    if min(shape) > 1 and np.nanmin(speedup) < 1.0 < np.nanmax(speedup):
        artists["even"] = ax.contour(x, y, speedup, levels=[1.0], colors=_PLAIN, linewidths=2)
    for i in range(shape[0]):
        for j in range(shape[1]):
            near = [(i, j + 1), (i + 1, j)]
            for k, (m, n) in enumerate(near):
                if m < shape[0] and n < shape[1] and steps[m, n] != steps[i, j]:
                    line = (
                        ([j + 0.5, j + 0.5], [i - 0.5, i + 0.5]) if k == 0 else ([j - 0.5, j + 0.5], [i + 0.5, i + 0.5])
                    )
                    ax.plot(*line, color="white", linewidth=1)
    for value in np.unique(steps):
        ii, jj = np.nonzero(steps == value)
        middle = int(np.argmin((ii - ii.mean()) ** 2 + (jj - jj.mean()) ** 2))
        name = "plain" if value == 0 else f"K={value}"
        artists["labels"].append(
            ax.text(jj[middle], ii[middle], name, ha="center", va="center", fontsize=8, color="black")
        )
    ax.set_xticks(_few(shape[1]), [f"{across.values[j]:.6g}" for j in _few(shape[1])])
    ax.set_yticks(_few(shape[0]), [f"{rows.values[i]:.6g}" for i in _few(shape[0])])
    ax.set_xlabel(across.name)
    ax.set_ylabel(rows.name)
    return artists


def _few(count: int, most: int = 9) -> list[int]:
    """Indices of at most `most` ticks."""
    return sorted(
        {round(i * (count - 1) / (min(count, most) - 1)) for i in range(min(count, most))} if count > 1 else {0}
    )


def figure_of_whatif(result: WhatIf, name: str) -> Figure:
    """Make the figure of one supposition; `name` is that of the calibration."""
    figure, ax = _figure()
    draw_whatif(ax, result)
    low, high = result.gain.interval
    supposed = ", ".join(map(str, result.changes))
    ax.set_title(f"what if {supposed}: {result.gain.speedup:.3f}x ({low:.3f} to {high:.3f})", fontsize=9, loc="left")
    figure.suptitle(name, fontsize=10, x=0.01, ha="left")
    figure.supxlabel("bands: 90 % interval; dotted: plain decoding; rings: the best", fontsize=7, x=0.01, ha="left")
    return figure


def figure_of_sweep(result: Sweep, name: str) -> Figure:
    """Make the figure of a sweep over one or two axes; `name` is that of the calibration."""
    figure, ax = _figure()
    fixed = f", with {', '.join(map(str, result.changes))}" if result.changes else ""
    if len(result.axes) == 1:
        draw_sweep(ax, result)
        key = "band: 90 % interval of the best; dotted: plain decoding; K: steps of the best from there on"
    else:
        artists = draw_map(ax, result)
        figure.colorbar(artists["image"], ax=ax, label="speedup over plain decoding, best that drafts")
        key = "dark line: break-even; white lines: between different best steps; K: the best steps"
    ax.set_title(f"batch {result.before.batch:g}{fixed}", fontsize=9, loc="left")
    figure.suptitle(name, fontsize=10, x=0.01, ha="left")
    figure.supxlabel(key, fontsize=7, x=0.01, ha="left")
    return figure


def _figure() -> tuple[Figure, Axes]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()
