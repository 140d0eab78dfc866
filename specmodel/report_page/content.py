"""Everything that a report says, computed once: answers by batch, launch line, diagnosis, acceptance, what-if grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmodel.calibration import AcceptanceEntry
from specmodel.decide import optimize
from specmodel.diagnose import diagnose
from specmodel.diagnosis import Diagnosis
from specmodel.errors import UsageError
from specmodel.launch import Launch
from specmodel.launch.lines import launch_lines, launch_of
from specmodel.model import FittedModel
from specmodel.optimum import Candidate, Optimum
from specmodel.parts import conditional_draws
from specmodel.plot import MeasuredPoint, measured_points
from specmodel.report_page.explorer import Explorer, explore
from specmodel.report_page.redact import without_secrets
from specmodel.request import Workload
from specmodel.schedule import ScheduleStep, schedule
from specmodel.shapes import Trees, proposed_trees
from specmodel.words import refusal

__all__ = ["MOST_DRAWN", "Acceptance", "Content", "gather"]

Array = NDArray[np.float64]
_WIDTH = 88
"""Characters of a line of the launch command; the page breaks it anew where it is narrower."""
MOST_DRAWN = 7
"""Batches with figures of their own."""
_DRAWS = 400
_MOST_POSITIONS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """The acceptance curve of what the report is about: positions 1, 2, ..., medians with 90 % intervals."""

    workload: str
    """In words."""
    survival: Array
    """P(at least k drafts accepted): low, median, high; shape (3, positions)."""
    conditional: Array
    """P(draft k accepted, given those before it): the same."""
    measured: tuple[float, ...]
    """Survival that the file states for the longest chain of the one workload; empty where it states none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What is to be shown."""

    model: FittedModel
    optima: tuple[Optimum, ...]
    """By batch, the smallest first."""
    steps: tuple[ScheduleStep, ...]
    refusals: tuple[str | None, ...]
    points: tuple[tuple[MeasuredPoint, ...], ...]
    launch: tuple[str, ...]
    launch_notes: tuple[str, ...]
    launched: Launch | None
    """The same as an object; None where nothing is recommended, or for no engine that is known."""
    diagnosis: Diagnosis
    acceptance: Acceptance | None
    explorer: Explorer | None

    @property
    def first(self) -> Optimum:
        """The answer that the report is about first: that of the batch of the diagnosis."""
        return _first(self.model, self.optima)

    @property
    def drawn(self) -> tuple[int, ...]:
        """Which answers have figures and tables of their own: all, or of many some from the first to the last."""
        count = len(self.optima)
        if count <= MOST_DRAWN:
            return tuple(range(count))
        spread = {round(i * (count - 1) / (MOST_DRAWN - 1)) for i in range(MOST_DRAWN)}
        return tuple(sorted({*spread, self.optima.index(self.first)}))


def gather(
    model: FittedModel,
    batch: float | Sequence[float] | None = None,
    *,
    comm: str | Sequence[str] | None = None,
    max_steps: int | None = None,
    workload: Workload = None,
    context_tokens: int | None = None,
    trees: Trees = (),
    extrapolate: bool = False,
    engine: tuple[str, str | None] | None = None,
) -> Content:
    """Answer every question of a report, for each batch; by default every measured one.

    Raises
    ------
    UsageError
        For names that the file lacks and numbers outside their domain, as `optimize`.
    """
    batches = (model.measured.batches or (1.0,)) if batch is None else batch
    ordered = sorted({batches} if isinstance(batches, int | float) else set(batches))
    if not ordered:
        raise UsageError("batch: an empty list; name at least one")
    if trees == "auto":
        # One set for all batches, so that a schedule can choose among them.
        trees = proposed_trees(
            model, tuple(ordered), (comm,) if isinstance(comm, str) else comm, max_steps, workload=workload
        )
    trees = tuple(trees)
    optima = tuple(
        optimize(
            model,
            batch=batch,
            comm=comm,
            max_steps=max_steps,
            workload=workload,
            context_tokens=context_tokens,
            trees=trees,
        )
        for batch in ordered
    )
    steps = schedule(optima, model, workload, context_tokens)
    refusals = tuple(refusal(model, optimum, extrapolate=extrapolate) for optimum in optima)
    lines, notes = ([], []) if any(refusals) else launch_lines(model, optima, steps, _WIDTH, engine)
    first = _first(model, optima)
    diagnosis = diagnose(model, first.batch, workload, comm, context_tokens=context_tokens)
    return Content(
        model=model,
        optima=optima,
        steps=steps,
        refusals=refusals,
        points=tuple(measured_points(model, optimum, workload) for optimum in optima),
        launch=tuple(without_secrets("\n".join(lines)).split("\n")) if lines else (),
        launch_notes=tuple(notes),
        launched=None if any(refusals) else launch_of(model, optima, steps, engine),
        diagnosis=diagnosis,
        acceptance=_acceptance(model, first, workload),
        explorer=explore(
            model,
            optima,
            steps[0].comm if len(optima) > 1 else first.best.comm,
            max_steps=max_steps,
            workload=workload,
            context_tokens=context_tokens,
            trees=trees,
        ),
    )


def _first(model: FittedModel, optima: Sequence[Optimum]) -> Optimum:
    """The answer at batch 1 if that is among them, else at the smallest measured one."""
    known = [o for o in optima if o.batch in model.measured.batches]
    return next((o for o in optima if o.batch == 1.0), (known or list(optima))[0])


def _acceptance(model: FittedModel, optimum: Optimum, workload: Workload) -> Acceptance | None:
    """The curve over the positions that the chains of an answer have; None where nothing drafts."""
    chains = [c.num_steps for c in optimum.table if c.topk == 1]
    positions = min(max(chains, default=0), _MOST_POSITIONS)
    if positions == 0:
        return None
    conditional = conditional_draws(model, workload, positions, _DRAWS)
    survival = np.cumprod(conditional, axis=1)
    shares, _ = model.mixture(workload)
    names = [model.layout.workloads[i] for i in shares]
    parts = list(shares.values())
    levels = (0.05, 0.5, 0.95)
    mixture = ", ".join(f"{name} {part:.0%}" for name, part in zip(names, parts, strict=True))
    return Acceptance(
        workload=names[0] if len(names) == 1 else mixture,
        survival=np.quantile(survival, levels, axis=0),
        conditional=np.quantile(conditional, levels, axis=0),
        measured=_stated(model.calibration.acceptance, names[0], positions) if len(names) == 1 else (),
    )


def _stated(entries: Sequence[AcceptanceEntry], workload: str, positions: int) -> tuple[float, ...]:
    """Survival of the longest chain that the file states by position."""
    curves = [_survival(a) for a in entries if a.workload == workload and a.topk == 1]
    return tuple(float(x) for x in max(curves, key=len, default=())[:positions])


def _survival(entry: AcceptanceEntry) -> Sequence[float]:
    if entry.survival:
        return entry.survival
    if entry.conditional:
        return [float(x) for x in np.cumprod(entry.conditional)]
    if entry.accepted_per_position and entry.drafts and not entry.drafted_per_position:
        return [n / entry.drafts for n in entry.accepted_per_position]
    return ()


def shown_chains(optimum: Optimum, most: int = 12) -> list[Candidate]:
    """Choose what a table has room for, of the setting of the best: it, its ties, what was measured, the shortest."""
    here = [c for c in optimum.table if c.comm == optimum.best.comm]
    wanted = [optimum.best, *optimum.ties]
    ranked = sorted(here, key=lambda c: (c not in wanted, c.num_steps > 0, not c.measured, c.num_steps))
    kept = ranked[:most]
    return [c for c in here if c in kept]
