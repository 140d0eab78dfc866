"""Figures: tok/s over the number of draft steps, the model as a line with its band, what was measured as points.

Functions draw on an `ax` that they are given and return their artists. matplotlib is imported inside, without pyplot
and its state: a figure is made, written and forgotten. The colours are of Okabe and Ito's colour-blind safe set.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmodel.calibration import CycleRow
from specmodel.measured import default_context
from specmodel.model import FittedModel
from specmodel.optimum import Candidate, Optimum
from specmodel.speeds import Noise, stated_speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MeasuredPoint", "draw_optimum", "figure_of_optima", "measured_points", "save"]

_BEST, _OTHER, _MEASURED, _PLAIN = "#0072B2", "#8C8C8C", "#D55E00", "#404040"
_DASHES = ("-", (0, (5, 2)), (0, (2, 2)), (0, (6, 2, 1, 2)), (0, (1, 1)))
_PANEL_INCHES = (6.4, 4.2)
_SMALL_PANEL_INCHES = (3.8, 2.9)
_MOST_COLUMNS = 4
_LEVEL_SD = 1.645  # half a 90 % interval of a normal


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPoint:
    """One measured cycle as a figure shows it: total tok/s with a 90 % interval, or an upper bound."""

    num_steps: int
    comm: str
    tok_s: float
    tok_s_interval: tuple[float, float]
    bound: bool


def measured_points(
    model: FittedModel, optimum: Optimum, workload: str | Mapping[str, float] | None = None
) -> tuple[MeasuredPoint, ...]:
    """Collect the measured chains that a figure of this optimum can show.

    They are those of its batch, its context and its workload; where that is a mixture only plain decoding, which does
    not depend on it. A cycle time becomes tok/s by the acceptance length of its row, else by the predicted one.
    """
    shares, _ = model.mixture(workload)
    names = {model.layout.workloads[i] for i in shares}
    context = default_context(model.calibration, optimum.batch)
    lengths = {(c.num_steps, c.comm): c.acceptance_length for c in optimum.table if c.topk == 1}
    points = []
    for row in model.calibration.measurements.cycles:
        fits = row.num_steps == 0 or (len(names) == 1 and row.workload in names)
        placed = row.batch == optimum.batch and row.context_tokens in (None, context)
        shown = row.topk == 1 and (row.num_steps, row.comm) in lengths and row.speculating == (row.num_steps > 0)
        if fits and placed and shown:
            points.append(_point(row, lengths[row.num_steps, row.comm]))
    return tuple(points)


def _point(row: CycleRow, acceptance_length: float) -> MeasuredPoint:
    stated = stated_speed(row, Noise())
    if stated is None:
        value, half, bound = float(row.tok_s_at_most or math.nan), 0.0, True
    else:
        form, value, sd = stated
        half, bound = _LEVEL_SD * sd, False
        if form == "cycle_ms":
            value = 1000.0 * row.batch * (row.acceptance_length or acceptance_length) / value
    return MeasuredPoint(
        num_steps=row.num_steps,
        comm=row.comm,
        tok_s=value,
        tok_s_interval=(value * math.exp(-half), value * math.exp(half)),
        bound=bound,
    )


def draw_optimum(ax: Axes, optimum: Optimum, points: Sequence[MeasuredPoint] = ()) -> dict[str, Any]:
    """Draw tok/s over num_steps: a line with its 90 % band for each communication setting, and what was measured.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Where to draw.
    optimum : Optimum
        From `optimize`; its best is ringed.
    points : sequence of MeasuredPoint
        From `measured_points`.

    Returns
    -------
    dict of str to artist or list of artists
        ``line`` and ``band`` by communication setting, ``measured``, ``bounds``, ``trees``, ``plain``, ``best``.
    """
    comms = list(dict.fromkeys(c.comm for c in optimum.table))
    comms.sort(key=lambda name: name == optimum.best.comm)  # the best setting is drawn last, on top
    artists: dict[str, Any] = {"line": {}, "band": {}, "measured": [], "bounds": [], "trees": []}
    ends = []
    for i, comm in enumerate(comms):
        own = comm == optimum.best.comm
        colour, dash = (_BEST, "-") if own else (_OTHER, _DASHES[(i + 1) % len(_DASHES)])
        chains = [c for c in optimum.table if c.comm == comm and c.topk == 1]
        steps = [c.num_steps for c in chains]
        (artists["line"][comm],) = ax.plot(steps, [c.tok_s for c in chains], color=colour, linestyle=dash, zorder=2)
        if own or len(comms) < 3:
            low, high = ([c.tok_s_interval[side] for c in chains] for side in (0, 1))
            artists["band"][comm] = ax.fill_between(
                steps, low, high, color=colour, alpha=0.20 if own else 0.12, linewidth=0, zorder=1
            )
        trees = [c for c in optimum.table if c.comm == comm and c.topk > 1]
        artists["trees"] += [_draw_tree(ax, c, colour) for c in trees]
        ends.append((comm if len(comms) > 1 else "", chains[-1].tok_s, colour))
    artists["measured"] = [_draw_point(ax, p, p.comm == optimum.best.comm) for p in points if not p.bound]
    bounds = [p for p in points if p.bound]
    if bounds:
        artists["bounds"] = ax.scatter(
            [p.num_steps for p in bounds], [p.tok_s for p in bounds], marker="v", s=26, color=_MEASURED, zorder=3
        )
    artists["plain"] = ax.axhline(optimum.plain.tok_s, color=_PLAIN, linewidth=0.8, linestyle=":", zorder=1)
    best = optimum.best
    (artists["best"],) = ax.plot(
        [best.num_steps], [best.tok_s], "o", markersize=13, markerfacecolor="none", markeredgecolor=_BEST, zorder=4
    )
    _limits(ax, optimum, points)
    _label_ends(ax, [*ends, ("plain", optimum.plain.tok_s, _PLAIN)])
    _shade_extrapolated(ax, optimum)
    ax.set_xlabel("draft steps, num_steps")
    ax.set_ylabel("throughput, tok/s")
    return artists


def _draw_tree(ax: Axes, c: Candidate, colour: str) -> Any:
    half = [[c.tok_s - c.tok_s_interval[0]], [c.tok_s_interval[1] - c.tok_s]]
    ax.annotate(
        f"tree {c.num_steps}x{c.topk}x{c.num_draft_tokens}",
        (c.num_steps, c.tok_s),
        xytext=(6, 4),
        textcoords="offset points",
        fontsize=7,
        color=colour,
    )
    return ax.errorbar([c.num_steps], [c.tok_s], yerr=half, fmt="D", markersize=5, color=colour, capsize=2, zorder=3)


def _draw_point(ax: Axes, p: MeasuredPoint, own: bool) -> Any:
    half = [[p.tok_s - p.tok_s_interval[0]], [p.tok_s_interval[1] - p.tok_s]]
    fill = _MEASURED if own else "white"
    return ax.errorbar(
        [p.num_steps],
        [p.tok_s],
        yerr=half,
        fmt="o",
        markersize=5,
        color=_MEASURED,
        markerfacecolor=fill,
        capsize=2.5,
        zorder=3,
    )


def _limits(ax: Axes, optimum: Optimum, points: Sequence[MeasuredPoint]) -> None:
    """Show every prediction and measurement, and of very wide bands only the part near them."""
    from matplotlib.ticker import MaxNLocator

    values = [c.tok_s for c in optimum.table] + [p.tok_s for p in points] + [optimum.plain.tok_s]
    ends = [x for c in optimum.table for x in c.tok_s_interval] + [x for p in points for x in p.tok_s_interval]
    low = max(min([*ends, *values]), 0.6 * min(values))
    high = min(max([*ends, *values]), 1.35 * max(values))
    pad = 0.05 * (high - low)
    ax.set_ylim(max(low - pad, 0.0), high + pad)
    steps = [c.num_steps for c in optimum.table]
    ax.set_xlim(min(steps) - 0.5, max(steps) + 0.5)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=11))
    ax.grid(True, axis="y", color="#E6E6E6", linewidth=0.6)
    ax.set_axisbelow(True)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)


def _label_ends(ax: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Name each line at its right end, pushed apart where ends are close."""
    low, high = ax.get_ylim()
    apart = 0.055 * (high - low)
    named = sorted((end for end in ends if end[0]), key=lambda end: end[1])
    places: list[float] = []
    for _, value, _ in named:
        places.append(max([min(max(value, low), high), *(place + apart for place in places[-1:])]))
    # Pushing goes upwards only: move all of them back by what that came to on average.
    moved = sum(place - value for place, (_, value, _) in zip(places, named, strict=True)) / max(len(named), 1)
    for place, (name, _, colour) in zip(places, named, strict=True):
        ax.annotate(
            name,
            (1.0, place - max(moved, 0.0)),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=colour,
            annotation_clip=False,
        )


def _shade_extrapolated(ax: Axes, optimum: Optimum) -> None:
    """Shade the long chains that are too far from what was measured, and say so."""
    far = [c.num_steps for c in optimum.table if c.extrapolated and c.topk == 1]
    near = [c.num_steps for c in optimum.table if not c.extrapolated and c.topk == 1]
    if not far or not near or min(far) < max(near):
        return
    ax.axvspan(max(near) + 0.5, max(far) + 0.5, color="#F2F2F2", linewidth=0, zorder=0)
    ax.annotate(
        "extrapolated",
        (max(near) + 0.6, 0.02),
        xycoords=("data", "axes fraction"),
        fontsize=7,
        color=_OTHER,
    )


def _title(optimum: Optimum) -> str:
    best = optimum.best
    low, high = best.tok_s_interval
    name = "plain decoding" if best.num_steps == 0 else f"{best.num_steps} step{'s' if best.num_steps > 1 else ''}"
    if best.topk > 1:
        name = f"tree {best.num_steps}x{best.topk}x{best.num_draft_tokens}"
    return f"batch {optimum.batch:g}: {name}, {best.tok_s:.4g} tok/s ({low:.4g} to {high:.4g})"


def figure_of_optima(
    model: FittedModel, optima: Sequence[Optimum], workload: str | Mapping[str, float] | None = None
) -> Figure:
    """Draw one panel for each batch.

    Parameters
    ----------
    model : FittedModel
        What the optima come from.
    optima : sequence of Optimum
        One or more.
    workload : str or mapping, optional
        What `optimize` was given.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(optima), _MOST_COLUMNS)
    rows = math.ceil(len(optima) / columns)
    width, height = _PANEL_INCHES if len(optima) == 1 else _SMALL_PANEL_INCHES
    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, optimum in zip(axes, optima, strict=False):
        draw_optimum(ax, optimum, measured_points(model, optimum, workload))
        ax.set_title(_title(optimum), fontsize=9, loc="left")
    for ax in axes[len(optima) :]:
        ax.set_visible(False)
    key = "line and band: model with 90 % interval; orange: measured (triangle: at most); dotted: plain decoding"
    figure.suptitle(model.calibration.name, fontsize=10, x=0.01, ha="left")
    figure.supxlabel(key, fontsize=7, color=_PLAIN, x=0.01, ha="left")
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure whole or not at all: PNG, SVG or PDF by the ending of the name; the same figure, the same bytes.

    Raises
    ------
    OSError
        The file cannot be written; one that was there is untouched.
    """
    import matplotlib as mpl

    target = Path(os.path.realpath(path))
    kind = target.suffix.lower().removeprefix(".")
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    metadata: dict[str, Any] = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    try:
        with mpl.rc_context({"svg.hashsalt": "specmodel", "svg.fonttype": "none"}):
            figure.savefig(partial, format=kind, dpi=160, metadata=metadata)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
