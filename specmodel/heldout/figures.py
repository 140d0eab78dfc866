"""The figures of the validation page: reliability, predicted against measured, decisions, verify passes, drafting.

Every function makes a figure from what was held out; `specmodel.plot.save` writes it. The colours are of Okabe and
Ito's colour-blind safe set.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from specmodel.calibration import Calibration, VerifyRow
from specmodel.fit import fit
from specmodel.heldout.points import LEVELS, Decision, HeldOut
from specmodel.heldout.tables import SPARSE_TOKENS, sparse, verify_interval, verify_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["DECISION_BINS", "KINDS", "binned", "decisions", "drafting", "reliability", "scatter", "verify"]

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_GREY = "#8C8C8C"
DECISION_BINS = (0.0, 0.4, 0.6, 0.8, 1.0)
KINDS = {
    "chain lengths": ("length, given", "length, not given", "length, blind"),
    "between the ends": ("between, given", "between, not given", "between, blind"),
    "trees": ("tree",),
    "batches": ("batch", "all of a batch"),
    "full table": ("full table",),
    "sparse table": ("sparse table",),
}
_MODE_COLOURS = {"one graph a step": _COLOURS[0], "one graph a cycle": _COLOURS[2], "eager": _COLOURS[1]}
_MOST_PANELS = 6
_HEADROOM = 1.5


def _figure(columns: int, rows: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for ax in axes:
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _of_kind(points: Sequence[HeldOut], kind: str) -> list[HeldOut]:
    return [p for p in points if p.task in KINDS[kind]]


def reliability(points: Sequence[HeldOut]) -> Figure:
    """Share of measurements inside intervals of each nominal level, by what was held out."""
    figure, (ax,) = _figure(1, 1, 5.2, 4.4)
    ax.plot([0.5, 1.0], [0.5, 1.0], color=_GREY, linewidth=1, linestyle=(0, (4, 3)), label="as stated")
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        some = _of_kind(points, kind)
        if some:
            actual = [np.mean([p.inside(level) for p in some]) for level in LEVELS]
            ax.plot(
                LEVELS, actual, marker="o", markersize=4, linewidth=1.4, color=colour, label=f"{kind} ({len(some)})"
            )
    ax.set_xlabel("nominal level of the interval", fontsize=9)
    ax.set_ylabel("share of measurements inside", fontsize=9)
    ax.set_ylim(0.4, 1.02)
    ax.legend(fontsize=7.5, frameon=False, loc="lower right")
    return figure


def scatter(points: Sequence[HeldOut]) -> Figure:
    """Predicted over measured tok/s against measured tok/s."""
    figure, (ax,) = _figure(1, 1, 6.4, 4.0)
    ax.axhline(1.0, color=_GREY, linewidth=1)
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        some = _of_kind(points, kind)
        if some:
            x, y = [p.measured_tok_s for p in some], [p.predicted_tok_s / p.measured_tok_s for p in some]
            ax.plot(
                x, y, linestyle="", marker="o", markersize=2.6, alpha=0.6, markeredgewidth=0, color=colour, label=kind
            )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ticks = [0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75]
    ax.set_yticks(ticks, [f"{t:g}" for t in ticks])
    ax.yaxis.minorticks_off()
    ax.set_xlabel("measured tok/s", fontsize=9)
    ax.set_ylabel("predicted / measured", fontsize=9)
    ax.legend(fontsize=7.5, frameon=False, loc="lower right", ncols=2)
    return figure


def binned(decisions: Sequence[Decision]) -> list[tuple[float, float, int, float, float]]:
    """Judged decisions by their stated probability: bin from, to, count, mean stated, share right."""
    judged = [d for d in decisions if d.right is not None]
    out = []
    for low, high in pairwise(DECISION_BINS):
        last = high == DECISION_BINS[-1]
        here = [d for d in judged if low <= d.probability < high or (last and d.probability == high)]
        if here:
            stated = float(np.mean([d.probability for d in here]))
            out.append((low, high, len(here), stated, float(np.mean([bool(d.right) for d in here]))))
    return out


def decisions(found: Sequence[Decision]) -> Figure:
    """How often a chosen length is the best, against its stated probability; bars are 90 % intervals of the share."""
    from scipy.special import betaincinv

    figure, (ax,) = _figure(1, 1, 4.6, 4.2)
    ax.plot([0.0, 1.0], [0.0, 1.0], color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
    for _, _, count, stated, right in binned(found):
        hits = right * count
        # Jeffreys interval of a proportion.
        low, high = (float(betaincinv(hits + 0.5, count - hits + 0.5, q)) for q in (0.05, 0.95))
        ax.plot([stated, stated], [low, high], color=_COLOURS[0], linewidth=1.2)
        ax.plot([stated], [right], marker="o", color=_COLOURS[0])
        ax.annotate(f"{count}", (stated, right), xytext=(6, -3), textcoords="offset points", fontsize=8)
    ax.set_xlim(0.0, 1.02)
    ax.set_ylim(0.0, 1.02)
    ax.set_xlabel("stated probability that the chosen length is the best", fontsize=9)
    ax.set_ylabel("share that was the best", fontsize=9)
    return figure


def _by_batch(rows: Sequence[VerifyRow]) -> dict[float, list[VerifyRow]]:
    out: dict[float, list[VerifyRow]] = {}
    for row in sorted(rows, key=lambda r: r.tokens):
        if row.tokens % row.batch == 0:
            out.setdefault(row.batch, []).append(row)
    return {b: out[b] for b in sorted(out)}


def verify(cals: Sequence[Calibration]) -> Figure:
    """Verify times as measured, and the 90 % band of what a few of them predict of the rest."""
    some = list(cals)[:_MOST_PANELS]
    columns = min(len(some), 2)
    figure, axes = _figure(columns, -(-len(some) // columns), 4.6, 3.4)
    for ax, cal in zip(axes, some, strict=False):
        contexts = [r.context_tokens for r in cal.measurements.verify if r.comm == "default" and r.cuda_graph]
        context = min((c for c in contexts if c is not None), default=None)
        rows = [
            r
            for r in cal.measurements.verify
            if r.comm == "default" and r.cuda_graph and r.context_tokens in (None, context)
        ]
        model, batches = fit(sparse(cal)), _by_batch(rows)
        wanted = list(batches) if len(batches) <= 4 else [b for b in batches if b in (1, 4, 16, 64)]
        for batch, colour in zip(wanted, _COLOURS, strict=False):
            here = batches[batch]
            x = [r.tokens for r in here]
            middle, low, high = np.array([verify_interval(model, r) for r in here]).T
            ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
            ax.plot(x, middle, color=colour, linewidth=1)
            given = [r.tokens in SPARSE_TOKENS for r in here]
            sd = [2.0 * (r.sd_ms or 0.0) for r in here]
            ax.errorbar(
                x,
                [verify_ms(r) for r in here],
                yerr=sd,
                linestyle="",
                marker="o",
                markersize=3,
                color=colour,
                markerfacecolor="none",
                elinewidth=0.8,
                label=f"batch {batch:g}",
            )
            seen = [(r.tokens, verify_ms(r)) for r, known in zip(here, given, strict=True) if known]
            if seen:
                ax.plot(*zip(*seen, strict=True), linestyle="", marker="o", markersize=3, color=colour)
        ax.set_xscale("log", base=2)
        ax.set_xticks([2**i for i in range(10) if 2**i <= max(r.tokens for r in rows)])
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.set_title(cal.name, fontsize=9, loc="left")
        ax.set_xlabel("tokens of the pass", fontsize=8)
        ax.set_ylabel("verify, ms", fontsize=8)
        # A band that widens without end would flatten what was measured.
        ax.set_ylim(0.0, _HEADROOM * max(verify_ms(r) for r in rows))
        ax.legend(fontsize=7, frameon=False)
    for ax in axes[len(some) :]:
        ax.set_visible(False)
    return figure


def _draw_cycles(ax: Axes, points: Sequence[HeldOut], colour: str, label: str) -> None:
    """Cycle times by steps: measured as points, predicted as a line with its 90 % band."""
    x = [p.row.num_steps for p in points]
    tokens = np.array([1000.0 * p.row.batch * (p.row.acceptance_length or 1.0) for p in points])
    fastest, slowest = np.array([p.intervals[LEVELS.index(0.9)] for p in points]).T[::-1]
    ax.fill_between(x, tokens / fastest, tokens / slowest, color=colour, alpha=0.15, linewidth=0)
    ax.plot(x, tokens / np.array([p.predicted_tok_s for p in points]), color=colour, linewidth=1)
    measured = tokens / np.array([p.measured_tok_s for p in points])
    ax.plot(x, measured, linestyle="", marker="o", markersize=4, color=colour, label=label)


def drafting(points: Sequence[HeldOut]) -> Figure | None:
    """Whole cycles at the smallest batch with drafts in graphs and without; None where only one kind was measured."""
    panels = []
    for name in dict.fromkeys(p.file for p in points):
        full = [p for p in points if p.file == name and p.task == "full table" and p.row.num_steps and p.row.topk == 1]
        for comm in dict.fromkeys(p.row.comm for p in full):
            here = [p for p in full if p.row.comm == comm]
            least = (min(p.row.batch for p in here), min(p.row.context_tokens or 0 for p in here))
            here = [p for p in here if (p.row.batch, p.row.context_tokens or 0) == least]
            if len({p.mode for p in here}) > 1:
                panels.append((f"{name}, {comm}" if comm != "default" else name, here))
    if not panels:
        return None
    panels = panels[:_MOST_PANELS]
    columns = min(len(panels), 2)
    figure, axes = _figure(columns, -(-len(panels) // columns), 4.6, 3.4)
    for ax, (title, here) in zip(axes, panels, strict=False):
        for mode, colour in _MODE_COLOURS.items():
            some = sorted((p for p in here if p.mode == mode), key=lambda p: p.row.num_steps)
            if some:
                _draw_cycles(ax, some, colour, mode)
        ax.set_title(title, fontsize=9, loc="left")
        ax.set_xlabel("draft steps", fontsize=8)
        ax.set_ylabel("cycle, ms", fontsize=8)
        ax.legend(fontsize=7, frameon=False)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    return figure
