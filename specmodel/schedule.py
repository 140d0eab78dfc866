"""From the best configuration at several batches to one schedule that an engine accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specmodel.decide import REGRET_TOLERANCE
from specmodel.errors import UsageError
from specmodel.optimum import Candidate, Optimum

__all__ = ["ScheduleStep", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleStep:
    """What to run for batches from `batch_from` to `batch_to` (None: any larger one)."""

    batch_from: float
    batch_to: float | None
    num_steps: int
    topk: int
    num_draft_tokens: int
    comm: str


def schedule(optima: Sequence[Optimum]) -> tuple[ScheduleStep, ...]:
    """One step count for each range of batches, under one communication setting.

    An engine cannot change its communication setting while it runs, so the one that loses least over all batches is
    taken; going up in batch, a decision is kept while it costs less than 0.5 % (hysteresis), since every change of
    step count costs a graph switch.

    Parameters
    ----------
    optima : sequence of Optimum
        Answers for several batches, from the same candidates.
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
    steps: list[ScheduleStep] = []
    before = 0.0
    for o in ordered:
        table = [c for c in _of(o, comm) if not c.extrapolated] or _of(o, comm)
        best = o.best if o.best.comm == comm and not o.best.extrapolated else max(table, key=lambda c: c.tok_s)
        held = steps[-1] if steps else None
        step = ScheduleStep(
            batch_from=1.0,
            batch_to=None,
            num_steps=best.num_steps,
            topk=best.topk,
            num_draft_tokens=best.num_draft_tokens,
            comm=comm,
        )
        if held is None:
            steps.append(step)
        elif not _holds(held, table, best):
            # The change lies somewhere between two answered batches; the geometric middle is as good as any.
            edge = float(np.floor(np.sqrt(before * o.batch)))
            edge = max(min(edge, np.ceil(o.batch) - 1.0), np.floor(before))
            if edge < held.batch_from:
                steps[-1] = replace(step, batch_from=held.batch_from)
            else:
                steps[-1] = replace(held, batch_to=edge)
                steps.append(replace(step, batch_from=edge + 1.0))
        before = o.batch
    return tuple(steps)


def _of(optimum: Optimum, comm: str) -> list[Candidate]:
    """Candidates of an answer under one communication setting."""
    return [c for c in optimum.table if c.comm == comm]


def _holds(held: ScheduleStep, table: list[Candidate], best: Candidate) -> bool:
    """Whether what runs already costs so little that no change is worth it."""
    shape = (held.num_steps, held.topk, held.num_draft_tokens)
    same = [c for c in table if (c.num_steps, c.topk, c.num_draft_tokens) == shape]
    return bool(same) and same[0].tok_s >= (1.0 - REGRET_TOLERANCE) * best.tok_s
