"""Published sweeps with a part held out: chain lengths, what lies between the ends, draft trees, batches, decisions.

A *group* is what one source measured of one workload under one batch, communication setting and context. A fit sees
the rest of the group, plain decoding at the same place and the tables of the file, and nothing else of it: what other
workloads or batches would have said is left out too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

from specmodel.calibration import Calibration, CycleRow, Validation
from specmodel.decide import optimize
from specmodel.errors import SpecModelError
from specmodel.fit import fit
from specmodel.heldout.points import (
    Decision,
    HeldOut,
    Results,
    Setting,
    Task,
    around_of,
    place_of,
    point,
    settings_of,
    shape_of,
)
from specmodel.model import FittedModel
from specmodel.validate import prediction_of

__all__ = ["hold_out"]

LEAST_LENGTHS = 3
LEAST_BATCHES = 4
LEAST_BATCHES_OF_FAMILY = 3
TIE = 0.005
"""Rates this close are equally good."""


def _label(row: CycleRow, batch: bool = True) -> str:
    """Name a group: what differs from the ordinary."""
    words = [row.workload] if row.workload != "default" else []
    words += [f"batch {row.batch:g}"] if batch else []
    words += [row.comm] if row.comm != "default" else []
    words += [f"context {row.context_tokens}"] if row.context_tokens else []
    words += [] if row.cuda_graph else ["drafts eager"]
    return ", ".join(words + ([] if row.verify_cuda_graph else ["verify eager"]))


def _only(cal: Calibration, keep: Iterable[Setting], hidden: Iterable[Setting], workload: str) -> Calibration:
    """The tables of a file with the cycles of some settings alone, and no acceptance of the hidden shapes."""
    m = cal.measurements
    # Plain decoding of another workload serves this one: it does not depend on acceptance.
    cycles = tuple(replace(m.cycles[i], workload=workload) for s in keep for i in s.rows)
    shapes = {s.shape for s in hidden}
    acceptance = tuple(a for a in cal.acceptance if a.workload == workload and shape_of(a) not in shapes)
    return replace(
        cal,
        measurements=replace(m, cycles=cycles),
        acceptance=acceptance,
        workloads={},
        validation=Validation(),
    )


def _line(setting: Setting, others: Sequence[Setting]) -> float | None:
    """Rate by the straight line of cycle times through the two nearest lengths; None without acceptance lengths."""
    near = sorted(others, key=lambda s: (abs(s.shape[0] - setting.shape[0]), s.shape[0]))
    below, above = (
        [s for s in near if s.shape[0] < setting.shape[0]],
        [s for s in near if s.shape[0] > setting.shape[0]],
    )
    two = [below[0], above[0]] if below and above else near[:2]
    if len(two) < 2 or any(s.acceptance_length is None for s in (setting, *two)):
        return None
    (x0, y0), (x1, y1) = ((float(s.shape[0]), float(s.acceptance_length or 0.0) / s.tok_s) for s in two)
    cycle = y0 + (y1 - y0) * (setting.shape[0] - x0) / (x1 - x0)
    return float(setting.acceptance_length or 0.0) / cycle if cycle > 0.0 else None


def _informed(cal: Calibration, rest: Iterable[Setting], hidden: Iterable[Setting], workload: str) -> bool:
    """Whether a fit knows any acceptance of a workload."""
    shapes = {s.shape for s in hidden}
    known = any(s.shape[0] and s.acceptance_length is not None for s in rest)
    return known or any(a.workload == workload and shape_of(a) not in shapes for a in cal.acceptance)


def hold_out(cal: Calibration) -> Results:
    """Hold out everything that the cycles of a file allow, one thing at a time.

    Parameters
    ----------
    cal : Calibration
        A published sweep; its own `validation` is predicted from all the rest.

    Returns
    -------
    Results
        The same input gives the same results.
    """
    settings = settings_of(cal, cal.measurements.cycles)
    drafting = [s for s in settings if s.shape[0]]
    points: list[HeldOut] = []
    decisions: list[Decision] = []
    failures: list[str] = []

    def attempt(group: str, work: Iterator[HeldOut | Decision]) -> None:
        try:
            for found in work:
                if isinstance(found, Decision):
                    decisions.append(found)
                else:
                    points.append(found)
        except SpecModelError as error:
            failures.append(f"{cal.name}, {group}: {error}")

    for group in _groups(drafting, lambda s: (s.row.workload, place_of(s.row))):
        label = _label(group[0].row)
        plain = _plain(settings, group[0].row)
        chains = sorted((s for s in group if s.chain), key=lambda s: s.shape[0])
        if len(chains) >= LEAST_LENGTHS:
            attempt(label, _lengths(cal, label, chains, plain))
            attempt(label, _between(cal, label, chains, plain))
        if len(group) >= LEAST_LENGTHS:
            attempt(label, _trees(cal, label, group, plain))
    for group in _groups(settings, lambda s: (s.row.workload, s.shape, around_of(s.row))):
        if len(group) >= LEAST_BATCHES:
            attempt(_label(group[0].row, False), _batches(cal, group, "batch"))
    for group in _groups(settings, lambda s: (s.row.workload, around_of(s.row))):
        batches, shapes = {s.row.batch for s in group}, {s.shape for s in group}
        if len(batches) >= LEAST_BATCHES_OF_FAMILY and len(shapes) > 1:
            attempt(_label(group[0].row, False), _batches(cal, group, "all of a batch"))
    if cal.validation.cycles:
        attempt("validation", _apart(cal))
    return Results(points=tuple(points), decisions=tuple(decisions), failures=tuple(failures))


def _groups(settings: Iterable[Setting], key: Callable[[Setting], Hashable]) -> list[list[Setting]]:
    out: dict[Hashable, list[Setting]] = {}
    for s in settings:
        out.setdefault(key(s), []).append(s)
    return list(out.values())


def _plain(settings: Iterable[Setting], row: CycleRow) -> list[Setting]:
    """Plain decoding at the place of a row: of its workload, else of any."""
    place = (row.batch, row.comm, row.context_tokens, row.verify_cuda_graph)
    same = [s for s in settings if not s.shape[0] and place_of(s.row)[:4] == place]
    return ([s for s in same if s.row.workload == row.workload] or same)[:1]


def _lengths(cal: Calibration, label: str, chains: list[Setting], plain: list[Setting]) -> Iterator[HeldOut]:
    workload = chains[0].row.workload
    for i, s in enumerate(chains):
        rest = chains[:i] + chains[i + 1 :]
        model = fit(_only(cal, plain + rest, [s], workload))
        inside, simple = 0 < i < len(chains) - 1, _line(s, rest)
        known = sum(r.acceptance_length is not None for r in rest)
        if s.acceptance_length is not None and known > 1:
            p = prediction_of(model, s.row, s.acceptance_length)
            yield point(p, s, "length, given", cal.name, label, interior=inside, simple_tok_s=simple)
        task: Task = "length, not given" if _informed(cal, rest, [s], workload) else "length, blind"
        yield point(prediction_of(model, s.row, None), s, task, cal.name, label, interior=inside, simple_tok_s=simple)


def _between(cal: Calibration, label: str, chains: list[Setting], plain: list[Setting]) -> Iterator[HeldOut | Decision]:
    workload, ends, middle = chains[0].row.workload, [chains[0], chains[-1]], chains[1:-1]
    model = fit(_only(cal, plain + ends, middle, workload))
    informed = _informed(cal, ends, middle, workload)
    for s in middle:
        simple = _line(s, ends)
        if all(x.acceptance_length is not None for x in (s, *ends)):
            p = prediction_of(model, s.row, s.acceptance_length)
            yield point(p, s, "between, given", cal.name, label, interior=True, simple_tok_s=simple)
        task: Task = "between, not given" if informed else "between, blind"
        yield point(prediction_of(model, s.row, None), s, task, cal.name, label, interior=True, simple_tok_s=simple)
    yield _decision(cal, model, label, chains, plain, blind=not informed)


def _decision(
    cal: Calibration, model: FittedModel, label: str, chains: list[Setting], plain: list[Setting], *, blind: bool
) -> Decision:
    measured = {s.shape[0]: s for s in (*plain, *chains)}
    row, longest = chains[0].row, chains[-1].shape[0]
    optimum = optimize(
        model,
        batch=row.batch,
        comm=row.comm,
        max_steps=longest,
        workload=row.workload if row.workload in model.layout.workloads else None,
        context_tokens=row.context_tokens,
        cuda_graph=row.cuda_graph,
        verify_cuda_graph=row.verify_cuda_graph,
    )
    picked = optimum.best.num_steps
    rates = {c.num_steps: c.tok_s for c in optimum.table}
    judged = picked if picked in measured else max(sorted(measured), key=lambda k: rates[k])
    best = max(sorted(measured), key=lambda k: measured[k].tok_s)
    among = sum(c.probability_best for c in optimum.table if c.num_steps in measured)
    return Decision(
        file=cal.name,
        group=label,
        blind=blind,
        picked=picked,
        judged_as=judged,
        best=best,
        regret=1.0 - measured[judged].tok_s / measured[best].tok_s,
        right=measured[picked].tok_s >= (1.0 - TIE) * measured[best].tok_s if picked in measured else None,
        probability_best=optimum.best.probability_best,
        probability=optimum.best.probability_best / among if picked in measured and among > 0.0 else 0.0,
        complete=all(k in measured for k in range(longest + 1)),
    )


def _trees(cal: Calibration, label: str, group: list[Setting], plain: list[Setting]) -> Iterator[HeldOut]:
    workload = group[0].row.workload
    for s in group:
        if not s.chain and s.acceptance_length is not None:
            model = fit(_only(cal, plain + [x for x in group if x is not s], [s], workload))
            p = prediction_of(model, s.row, s.acceptance_length)
            yield point(p, s, "tree", cal.name, label, interior=True)


def _batches(cal: Calibration, group: list[Setting], task: Task) -> Iterator[HeldOut]:
    """Each batch left out, with all rows of it; acceptance stays known, for it does not depend on the batch."""
    workload, label = group[0].row.workload, _label(group[0].row, False)
    batches = sorted({s.row.batch for s in group})
    for batch in batches:
        hidden = [s for s in group if s.row.batch == batch]
        model = fit(_only(cal, [s for s in group if s.row.batch != batch], (), workload))
        for s in hidden:
            p = prediction_of(model, s.row, s.acceptance_length if s.shape[0] else None)
            yield point(p, s, task, cal.name, label, interior=batch not in (batches[0], batches[-1]))


def _apart(cal: Calibration) -> Iterator[HeldOut]:
    """Cycles that a file keeps apart, from everything else in it."""
    model = fit(cal)
    for s in settings_of(cal, cal.validation.cycles):
        p = prediction_of(model, s.row, s.acceptance_length if s.shape[0] else None)
        yield point(p, s, "kept apart", cal.name, _label(s.row), interior=True)
