"""From the best configuration at several batches to one schedule that an engine accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specmodel.decide import REGRET_TOLERANCE
from specmodel.optimum import Optimum

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
    ordered = sorted(optima, key=lambda o: o.batch)
    if not ordered:
        return ()
    comms = dict.fromkeys(c.comm for c in ordered[0].table)

    def loss(optimum: Optimum, comm: str) -> float:
        own = [c.tok_s for c in optimum.table if c.comm == comm]
        return float(np.log(max(c.tok_s for c in optimum.table) / max(own)))

    comm = min(comms, key=lambda name: sum(loss(o, name) for o in ordered))
    steps: list[ScheduleStep] = []
    for o in ordered:
        table = [c for c in o.table if c.comm == comm and not c.extrapolated] or [c for c in o.table if c.comm == comm]
        best = o.best if o.best.comm == comm and not o.best.extrapolated else max(table, key=lambda c: c.tok_s)
        if steps:
            held = (steps[-1].num_steps, steps[-1].topk, steps[-1].num_draft_tokens)
            same = [c for c in table if (c.num_steps, c.topk, c.num_draft_tokens) == held]
            if same and same[0].tok_s >= (1.0 - REGRET_TOLERANCE) * best.tok_s:
                continue
            # The change lies somewhere between two measured batches; the geometric middle is as good as any.
            edge = float(np.floor(np.sqrt(_previous(ordered, o) * o.batch)))
            edge = min(max(edge, _previous(ordered, o)), o.batch - 1.0)
            steps[-1] = replace(steps[-1], batch_to=edge)
            start = edge + 1.0
        else:
            start = 1.0
        steps.append(
            ScheduleStep(
                batch_from=start,
                batch_to=None,
                num_steps=best.num_steps,
                topk=best.topk,
                num_draft_tokens=best.num_draft_tokens,
                comm=comm,
            )
        )
    return tuple(steps)


def _previous(ordered: list[Optimum], here: Optimum) -> float:
    return ordered[ordered.index(here) - 1].batch
