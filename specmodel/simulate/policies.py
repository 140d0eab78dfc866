"""Who chooses the steps: by the batch (fixed, schedule), by what was accepted (adaptive), or by knowing the requests.

`optimal` knows how easily the drafts of each request are accepted and plans its steps for every batch; `oracle` knows
how many drafts of a cycle will be accepted and makes no other. Engines can do neither: they bound what can be gained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specmodel.decide import optimize
from specmodel.model import FittedModel
from specmodel.request import Workload
from specmodel.schedule import ScheduleStep, schedule
from specmodel.simulate.classes import AcceptanceClasses

__all__ = [
    "SGLANG_TIERS",
    "AdaptiveState",
    "Tier",
    "adapt",
    "adaptive_state",
    "chain_schedule",
    "oracle_depths",
    "planned_steps",
    "rate_of_plan",
    "steps_by_batch",
]

Array = NDArray[np.float64]
Ints = NDArray[np.intp]


# ----------------------------------------------------------------------------------------------------------- by batch
def chain_schedule(
    model: FittedModel, comm: str | None, workload: Workload, max_steps: int | None, max_batch: int, context: float
) -> tuple[tuple[ScheduleStep, ...], tuple[float, ...]]:
    """Return the schedule that ``optimize`` gives for every measured batch, and where a chain stands in for a tree.

    At the measured context that is nearest to the mean one of the requests. Only chains are simulated: where `optimize`
    recommends a tree, the fastest chain takes its place.
    """
    known = model.measured.contexts
    nearest = min(known, key=lambda c: abs(np.log(max(c, 1) / max(context, 1.0)))) if known else None
    batches = [b for b in model.measured.batches if b <= max_batch] or [1.0]
    above = [b for b in model.measured.batches if b > max_batch]
    answers, trees = [], []
    for b in [*batches, *above[:1]]:
        answer = optimize(model, batch=b, comm=comm, workload=workload, max_steps=max_steps, context_tokens=nearest)
        chains = tuple(c for c in answer.table if c.topk == 1)
        best = answer.best
        if best.topk > 1:
            best = max(chains, key=lambda c: c.tok_s)
            trees.append(b)
        answers.append(replace(answer, table=chains, best=best))
    return schedule(answers, model, workload, nearest), tuple(b for b in trees if b <= max_batch)


def steps_by_batch(steps: Sequence[ScheduleStep], max_batch: int) -> NDArray[np.int64]:
    """Steps at every batch from 0 to `max_batch`."""
    out = np.zeros(max_batch + 1, dtype=np.int64)
    for step in steps:
        top = max_batch if step.batch_to is None else min(int(np.floor(step.batch_to)), max_batch)
        out[int(np.ceil(step.batch_from)) : top + 1] = step.num_steps
    return out


# ------------------------------------------------------------------------------------------------- by what was accepted
@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """Step counts that SGLang's rule chooses from at batches from `batch_from`, and how slowly it changes them."""

    batch_from: int
    candidates: tuple[int, ...]
    down: float = 0.0
    up: float = 0.0


SGLANG_TIERS = (
    Tier(batch_from=1, candidates=(1, 3, 5, 7), down=-0.25),
    Tier(batch_from=8, candidates=(0, 1, 3)),
    Tier(batch_from=32, candidates=(0, 1)),
    Tier(batch_from=64, candidates=(0,)),
)
"""Defaults of SGLang ``--speculative-adaptive``."""
_MEMORY, _WARMUP, _INTERVAL = 0.2, 10, 5
_MOST_TRIED = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveState:
    """What the rule remembers, a row a lane and a column a tier; `position`, `mean` and `rounds` are written to."""

    candidates: Ints
    """Shape (tiers, most candidates); the last one of a tier is repeated."""
    last: Ints
    """Index of the last candidate of each tier."""
    down: Array
    up: Array
    tier_of_batch: Ints
    position: Ints
    """Index of the current candidate."""
    mean: Array
    """Moving average of the accepted drafts, the bonus token not counted."""
    rounds: Ints

    def steps(self, lane: Ints, batch: Ints) -> Ints:
        """Steps that lanes would run at their batch."""
        tier = self.tier_of_batch[batch]
        return np.asarray(self.candidates[tier, self.position[lane, tier]])


def adaptive_state(tiers: Sequence[Tier], start: Sequence[int], max_batch: int, sizes: Array) -> AdaptiveState:
    """Return the state of the rule at the start.

    Parameters
    ----------
    tiers : sequence of Tier
    start : sequence of int
        Of each lane, the steps at the start where they are a candidate of a tier; else its middle candidate.
    max_batch : int
    sizes : numpy.ndarray
        Captured graph sizes in sequences, empty where unknown: the tier is that of the padded batch.
    """
    most = max(len(t.candidates) for t in tiers)
    table = np.array([[*t.candidates, *[t.candidates[-1]] * (most - len(t.candidates))] for t in tiers], dtype=np.intp)
    batch = np.arange(max_batch + 1)
    if len(sizes):
        at = np.searchsorted(sizes, batch)
        batch = np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], batch).astype(np.intp)
    tier = np.maximum(np.searchsorted([t.batch_from for t in tiers], batch, side="right") - 1, 0)
    position = np.array(
        [[t.candidates.index(s) if s in t.candidates else len(t.candidates) // 2 for t in tiers] for s in start],
        dtype=np.intp,
    )
    return AdaptiveState(
        candidates=table,
        last=np.array([len(t.candidates) - 1 for t in tiers], dtype=np.intp),
        down=np.array([t.down for t in tiers]),
        up=np.array([t.up for t in tiers]),
        tier_of_batch=tier.astype(np.intp),
        position=position,
        mean=table[np.arange(len(tiers)), position].astype(float) - 1.0,
        rounds=np.zeros(position.shape, dtype=np.intp),
    )


def adapt(state: AdaptiveState, lane: Ints, batch: Ints, accepted: Array) -> None:
    """Tell the rule of some lanes how many drafts a request accepted on average in the cycle that ended.

    SGLang's rule: a moving average of weight 0.2; after 10 cycles of a tier, every 5, down past each candidate whose
    predecessor less a half (a half, where that is 0) plus the hysteresis is not below the average, else up while the
    average is above the current candidate less a half plus the hysteresis; from 0 always one up, to try again.
    """
    tier = state.tier_of_batch[batch]
    position = state.position[lane, tier]
    current = state.candidates[tier, position]
    mean = state.mean[lane, tier]
    mean = np.where(current > 0, (1.0 - _MEMORY) * mean + _MEMORY * accepted, mean)
    rounds = state.rounds[lane, tier] + 1
    due = (rounds > _WARMUP) & ((rounds - _WARMUP) % _INTERVAL == 0)
    if due.any():
        plain = current == 0
        moved = position.copy()
        for _ in range(state.candidates.shape[1]):
            before = state.candidates[tier, np.maximum(moved - 1, 0)]
            threshold = np.where(before == 0, 0.5, before - 0.5) + state.down[tier]
            moved = np.where(~plain & (moved > 0) & (mean <= threshold), moved - 1, moved)
        rose = moved == position
        for _ in range(state.candidates.shape[1]):
            here = state.candidates[tier, moved]
            rise = ~plain & rose & (moved < state.last[tier]) & (mean > here - 0.5 + state.up[tier])
            moved = np.where(rise, moved + 1, moved)
        moved = np.where(plain, np.minimum(position + 1, state.last[tier]), moved)
        target = state.candidates[tier, moved]
        mean = np.where(due & plain & (target > 0) & (mean < 0.0), target - 1.0, mean)
        state.position[lane, tier] = np.where(due, moved, position)
    state.mean[lane, tier], state.rounds[lane, tier] = mean, rounds


# --------------------------------------------------------------------------------------------- by knowing the requests
def rate_of_plan(verify: Array, rest: Array, lengths: Array, share: Array, steps: Ints, batch: Ints) -> Array:
    """Tokens per ms of each batch when requests of each class run their own steps.

    Requests emit equally many tokens, so those of a class are in service in proportion to one over its length. At
    batch 1 this is exact; above, the verify pass is taken at the mean number of tokens, and the drafter at the longest
    of independent requests.

    Parameters
    ----------
    verify, rest : numpy.ndarray, shape (steps + 1, batches)
        Times in ms.
    lengths : numpy.ndarray, shape (classes, steps + 1)
        Acceptance length of each class.
    share : numpy.ndarray, shape (classes,)
    steps : numpy.ndarray, shape (..., batches, classes)
        Steps of each class at each batch.
    batch : numpy.ndarray, shape (batches,)
    """
    classes, longest = np.arange(len(share)), lengths.shape[1] - 1
    each = lengths[classes, steps]
    present = share / each
    rate = 1.0 / present.sum(axis=-1)
    present = present * rate[..., None]
    # The longest of B requests has at most d steps with probability F(d)^B.
    depth = np.arange(longest + 1)
    below = np.sum(present[..., None, :] * (steps[..., None, :] <= depth[:, None]), axis=-1)
    powered = np.minimum(below, 1.0) ** batch[:, None]
    chance = np.diff(powered, axis=-1, prepend=0.0)
    rest_ms = np.einsum("...bd,db->...b", chance, rest)
    mean = np.sum(present * steps, axis=-1)
    foot = np.clip(np.floor(mean).astype(np.intp), min(1, longest), max(longest - 1, 0))
    head = np.minimum(foot + 1, longest)
    place = np.arange(len(batch))
    low, high = verify[foot, place], verify[head, place]
    verify_ms = np.where(mean > 0.0, np.maximum(low + (mean - foot) * (high - low), 0.2 * low), verify[0])
    for alone in np.flatnonzero(batch == 1):
        verify_ms[..., alone] = np.sum(present[..., alone, :] * verify[steps[..., alone, :], alone], axis=-1)
    return np.asarray(batch * rate / (verify_ms + rest_ms))


def planned_steps(verify: Array, rest: Array, classes: AcceptanceClasses) -> NDArray[np.int64]:
    """Steps of each class of requests at every batch, shape (batch + 1, classes): the best plan by coordinate ascent.

    Parameters
    ----------
    verify, rest : numpy.ndarray, shape (steps + 1, batch + 1)
        Times in ms, the first column unused.
    classes : AcceptanceClasses
    """
    lengths, share = classes.lengths, classes.share
    count = lengths.shape[1]
    # So many batches at once that what is tried stays within memory.
    size = max(_MOST_TRIED // (3 * count * count * len(share)), 1)
    parts = [np.zeros((1, len(share)), dtype=np.int64)]
    for start in range(1, verify.shape[1], size):
        batch = np.arange(start, min(start + size, verify.shape[1]))
        parts.append(_plan_of(verify[:, batch], rest[:, batch], lengths, share, batch))
    return np.concatenate(parts)


def _plan_of(verify: Array, rest: Array, lengths: Array, share: Array, batch: Ints) -> NDArray[np.int64]:
    """Plan some batches: from the best numbers for all and from each class's best alone, one class at a time."""
    starts = np.arange(lengths.shape[1])
    uniform = np.broadcast_to(starts[:, None, None], (len(starts), len(batch), len(share)))
    alone = np.argmax(lengths[None] / (verify + rest).T[:, None, :], axis=2)
    plans = np.concatenate([uniform, alone[None]]).astype(np.intp)
    rates = rate_of_plan(verify, rest, lengths, share, plans, batch)
    order = np.argsort(-rates, axis=0)[:3]
    plans = np.take_along_axis(plans, order[..., None], axis=0)
    rates = np.take_along_axis(rates, order, axis=0)
    for _ in range(8 if len(share) > 1 else 0):
        before = rates
        for j in range(len(share)):
            tried = np.repeat(plans[None], len(starts), axis=0)
            tried[..., j] = starts[:, None, None]
            found = rate_of_plan(verify, rest, lengths, share, tried, batch)
            best = np.argmax(found, axis=0)
            value = np.take_along_axis(found, best[None], axis=0)[0]
            better = value > rates * (1.0 + 1e-12)
            plans[..., j] = np.where(better, best, plans[..., j])
            rates = np.where(better, value, rates)
        if np.all(rates <= before * (1.0 + 1e-9)):
            break
    best = np.argmax(rates, axis=0)
    return np.asarray(np.take_along_axis(plans, best[None, :, None], axis=0)[0], dtype=np.int64)


def oracle_depths(verify: Array, rest: Array, classes: AcceptanceClasses) -> NDArray[np.int64]:
    """Most drafts that the oracle makes at every batch, shape (batch + 1,): more would not pay even if accepted."""
    lengths, share = classes.lengths, classes.share
    longest, width = lengths.shape[1] - 1, verify.shape[1] - 1
    batch = np.arange(1, width + 1)
    survival = np.diff(lengths, axis=1)
    best, depth = np.full(width, -np.inf), np.zeros(width, dtype=np.int64)
    for most in range(longest + 1):
        each = lengths[:, most]
        rate = 1.0 / np.sum(share / each)
        present = share / each * rate
        # P(accepted <= d) of one request, for d = 0 to most.
        reached = np.concatenate([1.0 - present @ survival[:, :most], [1.0]])
        point = np.diff(reached, prepend=0.0)
        chance = np.diff(reached[:, None] ** batch, axis=0, prepend=0.0)
        rest_ms = np.sum(chance * rest[: most + 1, 1:], axis=0)
        mean = float(present @ (each - 1.0))
        foot = min(max(int(mean), min(1, longest)), max(longest - 1, 0))
        head = min(foot + 1, longest)
        low, high = verify[foot, 1:], verify[head, 1:]
        verify_ms = np.maximum(low + (mean - foot) * (high - low), 0.2 * low) if most else verify[0, 1:].copy()
        verify_ms[0] = point @ verify[: most + 1, 1]
        found = batch * rate / (verify_ms + rest_ms)
        depth = np.where(found > best, most, depth)
        best = np.maximum(found, best)
    return np.concatenate([[0], depth])
