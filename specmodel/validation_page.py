"""The validation page: every number from committed calibrations, the failures first.

`gather` holds out and predicts, `page_of` writes what came of it as Markdown, `write_page` puts the page and its
figures where they belong.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specmodel.calibration import Calibration
from specmodel.errors import UsageError
from specmodel.heldout import figures
from specmodel.heldout.points import Decision, HeldOut, Results
from specmodel.heldout.sweeps import hold_out
from specmodel.heldout.table_text import communication, tables
from specmodel.heldout.tables import (
    AllreduceShare,
    OtherWidth,
    Transfer,
    allreduce_shares,
    from_tables,
    has_tables,
    other_widths,
    transfers,
)
from specmodel.heldout.text import every_file, failures, field, head, regenerate
from specmodel.plot import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Evidence", "figures_of", "gather", "page_of", "write_page"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that the page shows, from one set of calibrations."""

    calibrations: tuple[Calibration, ...]
    field: tuple[Results, ...]
    """One for each published sweep that something was held out of."""
    tables: tuple[HeldOut, ...]
    transfers: tuple[Transfer, ...]
    transferred_cycles: tuple[HeldOut, ...]
    shares: tuple[AllreduceShare, ...]
    widths: tuple[OtherWidth, ...]

    @property
    def points(self) -> list[HeldOut]:
        """Every held-out cycle."""
        return [p for r in self.field for p in r.points] + list(self.tables)

    @property
    def decisions(self) -> list[Decision]:
        """Every decision."""
        return [d for r in self.field for d in r.decisions]


def gather(cals: Sequence[Calibration], progress: Callable[[int, int], None] | None = None) -> Evidence:
    """Hold out and predict everything that a set of calibrations allows.

    Parameters
    ----------
    cals : sequence of Calibration
        Files with verify tables and whole cycles under `validation` test the sum of the parts; all others are taken
        as published sweeps.
    progress : callable of (done, total), optional
        Called after each file.

    Returns
    -------
    Evidence
        In the order of the names; the same files give the same evidence.

    Raises
    ------
    UsageError
        For two calibrations of one name.
    """
    ordered = sorted(cals, key=lambda c: c.name)
    names = [c.name for c in ordered]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two of the calibrations are named {twice!r}; a page tells them apart by their names")
    published: list[Results] = []
    points: list[HeldOut] = []
    passes: list[Transfer] = []
    cycles: list[HeldOut] = []
    for done, cal in enumerate(ordered):
        if has_tables(cal):
            points += from_tables(cal)
            more, whole = transfers(cal)
            passes += more
            cycles += whole
        else:
            published.append(hold_out(cal))
        if progress is not None:
            progress(done + 1, len(ordered))
    return Evidence(
        calibrations=tuple(ordered),
        field=tuple(published),
        tables=tuple(points),
        transfers=tuple(passes),
        transferred_cycles=tuple(cycles),
        shares=tuple(s for cal in ordered for s in allreduce_shares(cal)),
        widths=tuple(other_widths(ordered)),
    )


def figures_of(evidence: Evidence) -> dict[str, Figure]:
    """The figures that the evidence has data for, by name."""
    out: dict[str, Figure] = {}
    points, decisions = evidence.points, evidence.decisions
    measured = [c for c in evidence.calibrations if len(c.measurements.verify) >= 5]
    if points:
        out["reliability"] = figures.reliability(points)
        out["scatter"] = figures.scatter(points)
    if any(d.right is not None for d in decisions):
        out["decisions"] = figures.decisions(decisions)
    if measured:
        out["verify"] = figures.verify(measured)
    drafting = figures.drafting(evidence.tables)
    if drafting is not None:
        out["drafting"] = drafting
    return out


def page_of(evidence: Evidence, images: dict[str, str], command: str) -> str:
    """The page as Markdown.

    Parameters
    ----------
    evidence : Evidence
        From `gather`.
    images : dict of str to str
        Where each figure lies, as seen from the page.
    command : str
        What makes the page.
    """
    points, decisions = evidence.points, evidence.decisions
    by_name = {c.name: c for c in evidence.calibrations}
    problems = [text for r in evidence.field for text in r.failures]
    parts = [
        head(evidence.calibrations, points),
        failures(by_name, points, decisions, evidence.transfers, evidence.widths, problems),
        field(points, decisions, images),
        tables(evidence.tables, images),
        communication(
            evidence.calibrations,
            evidence.transfers,
            evidence.transferred_cycles,
            evidence.tables,
            evidence.shares,
            evidence.widths,
        ),
        every_file(points, decisions),
        regenerate(command),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def write_page(
    cals: Sequence[Calibration],
    path: str | os.PathLike[str],
    command: str,
    progress: Callable[[int, int], None] | None = None,
) -> Evidence:
    """Make the page and its figures, ``images/NAME-*.svg`` beside it; each file is written whole or not at all.

    Parameters
    ----------
    cals : sequence of Calibration
        What the page is made of.
    path : path
        The page; its folder must exist.
    command : str
        What makes the page, for its last section.
    progress : callable of (done, total), optional
        Called after each file.

    Raises
    ------
    UsageError
        For two calibrations of one name.
    OSError
        A file cannot be written; those that were there are untouched.
    """
    page = Path(path)
    evidence = gather(cals, progress)
    drawn = figures_of(evidence)
    (page.parent / "images").mkdir(exist_ok=True)
    images = {name: f"images/{page.stem}-{name}.svg" for name in drawn}
    text = page_of(evidence, images, command)
    for name, figure in drawn.items():
        save(figure, page.parent / images[name])
    partial = page.with_name(f".{page.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(page)
    finally:
        partial.unlink(missing_ok=True)
    return evidence
