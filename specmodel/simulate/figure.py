"""The Pareto front: what one user sees against what all get together, a line for each policy over its loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specmodel.simulate.summary import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_front", "figure_of_front", "front"]

# Okabe and Ito's colour-blind safe set.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#404040")
_MARKS = "osD^vP*"
Point = tuple[float, float, str]


def front(simulations: Sequence[Simulation]) -> dict[str, list[Point]]:
    """Points (tok/s of one user, tok/s of all, load) of every policy, in the order of the loads."""
    out: dict[str, list[Point]] = {}
    for s in simulations:
        for r in s.results:
            if r.user_tok_s.mean == r.user_tok_s.mean:  # outputs of one token have no time per token
                point = (r.user_tok_s.mean, r.tok_s.mean, str(s.scenario.arrivals))
                out.setdefault(r.policy, []).append(point)
    return out


def draw_front(ax: Axes, simulations: Sequence[Simulation]) -> dict[str, Any]:
    """Draw the front on axes that are given; return its lines by policy."""
    artists: dict[str, Any] = {}
    able = {r.policy: r.deployable for s in simulations for r in s.results}
    for i, (policy, points) in enumerate(front(simulations).items()):
        users, totals = [p[0] for p in points], [p[1] for p in points]
        (artists[policy],) = ax.plot(
            users,
            totals,
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKS[i % len(_MARKS)],
            markersize=4,
            linewidth=1.4,
            linestyle="-" if able[policy] else (0, (2, 2)),
            label=policy if able[policy] else f"{policy} (bound)",
        )
    first = next(iter(front(simulations).values()), [])
    for user, total, load in first:
        ax.annotate(load, (user, total), textcoords="offset points", xytext=(4, -9), fontsize=6, color="#606060")
    ax.set_xlabel("tok/s of one user (1000 / mean time per token)")
    ax.set_ylabel("tok/s of all")
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.grid(visible=True, color="#E0E0E0", linewidth=0.6)
    ax.set_axisbelow(True)
    if artists:
        ax.legend(frameon=False, fontsize=8)
    return artists


def figure_of_front(simulations: Sequence[Simulation], title: str = "") -> Figure:
    """Return a figure of the front."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    ax = figure.add_subplot()
    draw_front(ax, simulations)
    if title:
        ax.set_title(title, fontsize=9)
    return figure
