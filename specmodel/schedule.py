"""From the best configuration at several batches to one schedule that an engine accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmodel.decide import REGRET_TOLERANCE
from specmodel.errors import UsageError
from specmodel.measured import default_context
from specmodel.model import FittedModel
from specmodel.optimum import Candidate, Optimum
from specmodel.request import Workload

__all__ = ["ScheduleStep", "schedule"]

Shape = tuple[int, int, int]
"""num_steps, topk, num_draft_tokens."""
MOST_BETWEEN = 256
"""Batches between two answers at which the model is asked: all, or so many in geometric steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """What to run for batches from `batch_from` to `batch_to` (None: any larger one)."""

    batch_from: float
    batch_to: float | None
    num_steps: int
    topk: int
    num_draft_tokens: int
    comm: str


def schedule(
    optima: Sequence[Optimum],
    model: FittedModel | None = None,
    workload: Workload = None,
    context_tokens: int | None = None,
    cuda_graph: bool = True,
    verify_cuda_graph: bool = True,
) -> tuple[ScheduleStep, ...]:
    """One step count for each range of batches, under one communication setting.

    An engine cannot change its communication setting while it runs, so the one that loses least over all batches is
    taken; going up in batch, a decision is kept while it costs less than 0.5 % (hysteresis), since every change of
    step count costs a graph switch. Where two answers differ, the change lies at the batch between them at which the
    model says so; without a model, or where that would be an extrapolation, at their geometric middle.

    Parameters
    ----------
    optima : sequence of Optimum
        Answers for several batches, from the same candidates.
    model : FittedModel, optional
        The model that gave the answers, to be asked between their batches.
    workload, context_tokens, cuda_graph, verify_cuda_graph
        What the answers were asked for, as in `optimize`.
    """
    # Of two answers for one batch the later one counts.
    ordered = [o for _, o in sorted({o.batch: o for o in optima}.items())]
    if not ordered:
        return ()
    comms = [c for c in dict.fromkeys(c.comm for c in ordered[0].table) if all(_of(o, c) for o in ordered)]
    if not comms:
        raise UsageError("no communication setting is in every answer; optimise all batches with the same settings")

    def loss(optimum: Optimum, comm: str) -> float:
        own = max(c.tok_s for c in _of(optimum, comm))
        return float(np.log(max(c.tok_s for c in optimum.table) / own))

    comm = min(comms, key=lambda name: sum(loss(o, name) for o in ordered))
    options: dict[str, Any] = {
        "workload": workload,
        "cuda_graph": cuda_graph,
        "verify_cuda_graph": verify_cuda_graph,
    }
    changes: list[tuple[float, Shape]] = []
    before = 0.0
    for o in ordered:
        table = [c for c in _of(o, comm) if not c.extrapolated] or _of(o, comm)
        best = o.best if o.best.comm == comm and not o.best.extrapolated else max(table, key=lambda c: c.tok_s)
        rates = {_shape(c): c.tok_s for c in table}
        if not changes:
            changes.append((1.0, _shape(best)))
        elif not _holds(changes[-1][1], rates, best.tok_s):
            asked = (
                [] if model is None else _between(model, before, o.batch, tuple(rates), comm, context_tokens, options)
            )
            changes += _changes(changes[-1][1], _shape(best), before, o.batch, asked)
            if not _holds(changes[-1][1], rates, best.tok_s):
                changes.append((float(np.ceil(o.batch)), _shape(best)))
        before = o.batch
    ranges = _ranges(changes)
    ends = [first - 1.0 for first, _ in ranges[1:]]
    return tuple(
        ScheduleStep(
            batch_from=first, batch_to=last, num_steps=shape[0], topk=shape[1], num_draft_tokens=shape[2], comm=comm
        )
        for (first, shape), last in zip(ranges, [*ends, None], strict=True)
    )


def _of(optimum: Optimum, comm: str) -> list[Candidate]:
    """Candidates of an answer under one communication setting."""
    return [c for c in optimum.table if c.comm == comm]


def _shape(c: Candidate) -> Shape:
    return c.num_steps, c.topk, c.num_draft_tokens


def _holds(held: Shape, rates: Mapping[Shape, float], most: float) -> bool:
    """Whether what runs already costs so little that no change is worth it."""
    return rates.get(held, 0.0) >= (1.0 - REGRET_TOLERANCE) * most


def _between(
    model: FittedModel,
    before: float,
    after: float,
    shapes: tuple[Shape, ...],
    comm: str,
    context_tokens: int | None,
    options: dict[str, Any],
) -> list[tuple[float, dict[Shape, float]]]:
    """Predicted tok/s of the candidates at whole batches between two answers, what is extrapolated left out."""
    first, last = np.floor(before) + 1.0, np.ceil(after) - 1.0
    if last < first:
        return []
    count = int(min(last - first + 1.0, MOST_BETWEEN))
    batches = (
        np.unique(np.round(np.geomspace(first, last, count))) if count == MOST_BETWEEN else first + np.arange(count)
    )
    cal = model.calibration
    contexts = [default_context(cal, b) if context_tokens is None else context_tokens for b in batches]
    K, topk, tokens = (np.array(x, dtype=float)[:, None] for x in zip(*shapes, strict=True))
    out = []
    for context in dict.fromkeys(contexts):
        here = batches[[c == context for c in contexts]]
        p = model.predict(K, here, comm, topk, tokens, context, **options)
        for j, b in enumerate(here):
            near = np.flatnonzero(~p.extrapolated[:, j])
            out.append((float(b), {shapes[i]: float(p.tok_s[i, j]) for i in near}))
    return sorted(out, key=lambda item: item[0])


def _changes(
    held: Shape,
    wanted: Shape,
    before: float,
    after: float,
    asked: Sequence[tuple[float, Mapping[Shape, float]]],
) -> list[tuple[float, Shape]]:
    """Between two answers, the batches from which something else than `held` runs, `wanted` at last, and what."""
    middle = float(np.sqrt(before * after))
    if not asked:
        # The change lies somewhere between; the geometric middle is as good as any.
        edge = max(min(np.floor(middle), np.ceil(after) - 1.0), np.floor(before))
        return [(float(edge) + 1.0, wanted)]
    out = []
    for batch, rates in asked:
        if held in rates and wanted in rates:
            fastest = max(rates, key=lambda shape: rates[shape])
            if _holds(held, rates, rates[fastest]):
                continue
            # What is wanted next anyway comes before a third that hardly gains.
            held = wanted if _holds(wanted, rates, rates[fastest]) else fastest
        elif batch > middle and held != wanted:
            held = wanted
        else:
            continue
        out.append((batch, held))
    return out


def _ranges(changes: Sequence[tuple[float, Shape]]) -> list[tuple[float, Shape]]:
    """Changes without those that leave no batch to what ran before, and without those that change nothing."""
    out: list[tuple[float, Shape]] = []
    for start, shape in changes:
        first = start
        if out and start <= out[-1][0]:
            first = out.pop()[0]
        if not out or out[-1][1] != shape:
            out.append((first, shape))
    return out
