"""Times of every cycle that a scenario may run, looked up by steps, batch and context; and of prefill passes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.calibration import Calibration
from specmodel.model import FittedModel
from specmodel.parts import chain_lengths, curves_of, draw_with_parameters
from specmodel.request import Workload

__all__ = ["CostTable", "Draws", "Prefill", "cost_table", "draws_of", "prefill_of", "survival_of", "with_draws"]

Array = NDArray[np.float64]
CONTEXTS = 9
_COARSE_BATCHES, _COARSE_CONTEXTS = 6, 2
_BESIDE = 1e-6  # of a context: next to it, but not where something was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Times of a cycle in ms, of shape (tables, steps + 1, batch + 1, contexts); 0 at batch 0."""

    verify_ms: Array
    rest_ms: Array
    """Draft and overhead."""
    context_low: Array
    """First context of each table, tokens, shape (tables,); the others follow at equal distances."""
    context_step: Array

    @property
    def longest(self) -> int:
        """Most steps."""
        return int(self.verify_ms.shape[1]) - 1

    def place(self, table: NDArray[np.intp], context: Array) -> tuple[NDArray[np.intp], Array]:
        """Index of the context below each context and how far the next one is; what lies outside is held."""
        last = self.verify_ms.shape[3] - 1
        if not last:
            return np.zeros(context.shape, dtype=np.intp), np.zeros(context.shape)
        at = (context - self.context_low[table]) / self.context_step[table]
        at = np.clip(at, 0.0, last)
        below = np.minimum(at.astype(np.intp), last - 1)
        return below, at - below

    def cycle_ms(
        self, table: NDArray[np.intp], steps: NDArray[np.intp], batch: NDArray[np.intp], context: Array
    ) -> Array:
        """Time of a cycle in which every request drafts as many steps; arrays of one shape."""
        below, part = self.place(table, context)
        both = self.verify_ms, self.rest_ms
        if self.verify_ms.shape[3] == 1:
            return np.asarray(sum(x[table, steps, batch, below] for x in both))
        low = sum(x[table, steps, batch, below] for x in both)
        high = sum(x[table, steps, batch, below + 1] for x in both)
        return np.asarray(low + part * (high - low))

    def ragged_ms(
        self, table: NDArray[np.intp], mean: Array, longest: NDArray[np.intp], batch: NDArray[np.intp], context: Array
    ) -> Array:
        """Time of a cycle whose requests draft `mean` steps on average and `longest` at most.

        The pass verifies the tokens of all; the drafter runs as long as the longest. Below a mean of one step the
        line through one and two goes on: speculation is on for the whole pass.
        """
        below, part = self.place(table, context)
        last = self.longest
        foot = np.clip(np.floor(mean).astype(np.intp), min(1, last), max(last - 1, 0))
        head = np.minimum(foot + 1, last)

        def at(x: Array, steps: NDArray[np.intp]) -> Array:
            low = x[table, steps, batch, below]
            if x.shape[3] == 1:
                return np.asarray(low)
            return np.asarray(low + part * (x[table, steps, batch, below + 1] - low))

        first = at(self.verify_ms, foot)
        verify = first + (mean - foot) * (at(self.verify_ms, head) - first)
        verify = np.maximum(verify, 0.2 * first)
        plain = at(self.verify_ms, np.zeros_like(foot))
        verify = np.where(longest > 0, np.maximum(verify, np.minimum(plain, first)), plain)
        return np.asarray(verify + at(self.rest_ms, longest))


def stacked(tables: list[CostTable]) -> CostTable:
    """Several tables as one; shorter ones hold their last values, which are never looked up."""
    shape = tuple(max(t.verify_ms.shape[i] for t in tables) for i in (1, 2, 3))

    def widened(x: Array) -> Array:
        missing = [(0, 0)] + [(0, want - have) for want, have in zip(shape, x.shape[1:], strict=True)]
        return np.pad(x, missing, mode="edge") if any(b for _, b in missing) else x

    return CostTable(
        verify_ms=np.concatenate([widened(t.verify_ms) for t in tables]),
        rest_ms=np.concatenate([widened(t.rest_ms) for t in tables]),
        context_low=np.concatenate([t.context_low for t in tables]),
        context_step=np.concatenate([t.context_step for t in tables]),
    )


def cost_table(
    model: FittedModel,
    comm: str,
    longest: int,
    max_batch: int,
    context: tuple[float, float],
    workload: Workload,
) -> CostTable:
    """Times of chains of 0 to `longest` steps at batches up to `max_batch` and contexts between two, one table.

    At the contexts that were measured they are those of `predict`. What a pass measured there is off the smooth terms
    (a step of the kernels at its size) is taken to hold at the contexts around as well.
    """
    depends = bool(np.isfinite(model.deployment.context_reference)) and context[1] > context[0]
    contexts = np.linspace(*context, CONTEXTS) if depends else np.array([context[0]])
    known = np.isfinite(model.deployment.context_reference)

    def times(at: Array) -> tuple[Array, Array]:
        p = model.predict(
            np.arange(longest + 1)[:, None, None],
            np.arange(1, max_batch + 1)[None, :, None],
            comm,
            context_tokens=at[None, None, :] if known else None,
            workload=workload,
        )
        shape = (longest + 1, max_batch, len(at))
        return np.broadcast_to(p.verify_ms, shape), np.broadcast_to(p.draft_ms + p.overhead_ms, shape)

    verify, rest = times(contexts * (1.0 + _BESIDE) if depends else contexts)
    measured = np.array(model.measured.contexts, dtype=float)
    if depends and len(measured):
        there, beside = times(measured), times(measured * (1.0 + _BESIDE))
        own = [
            np.log(x / np.where(y > 0.0, y, 1.0), where=y > 0.0, out=np.zeros(x.shape))
            for x, y in zip(there, beside, strict=True)
        ]
        verify, rest = (
            x * np.exp(between(f, np.log1p(measured), np.log1p(contexts), 2))
            for x, f in zip((verify, rest), own, strict=True)
        )
    idle = np.zeros((longest + 1, 1, len(contexts)))
    return CostTable(
        verify_ms=np.concatenate([idle, verify], axis=1)[None],
        rest_ms=np.concatenate([idle, rest], axis=1)[None],
        context_low=contexts[:1].astype(float),
        context_step=np.array([contexts[1] - contexts[0] if depends else 1.0]),
    )


def between(values: Array, places: Array, at: Array, axis: int) -> Array:
    """Values at increasing places along an axis, interpolated to others; the ends are held."""
    if len(places) == 1:
        return np.repeat(values, len(at), axis=axis)
    low = np.clip(np.searchsorted(places, at, side="right") - 1, 0, len(places) - 2)
    part = np.clip((at - places[low]) / (places[low + 1] - places[low]), 0.0, 1.0)
    part = part.reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    first = np.take(values, low, axis=axis)
    return np.asarray(first + part * (np.take(values, low + 1, axis=axis) - first))


def survival_of(model: FittedModel, workload: str, longest: int) -> Array:
    """P(at least k drafts of a cycle are accepted), k = 1 to `longest`: what `FittedModel.predict` adds up."""
    lengths = model.predict(np.arange(longest + 1), workload=workload).acceptance_length
    return np.minimum.accumulate(np.clip(np.diff(lengths), 0.0, 1.0))


# ------------------------------------------------------------------------------------------------- draws of the model
@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Draws of the posterior: factors on the times at a few places, and survival curves of every workload."""

    verify: Array
    """Factor on the posterior mean, shape (draws, steps, batches, contexts)."""
    rest: Array
    steps: Array
    """The few places: step counts, logarithms of batches, contexts."""
    log_batch: Array
    contexts: Array
    survival: dict[str, Array]
    """Shape (draws, positions)."""


def draws_of(
    model: FittedModel,
    comm: str,
    longest: int,
    max_batch: int,
    context: tuple[float, float],
    workload: Workload,
    names: tuple[str, ...],
    count: int,
) -> Draws:
    """Joint draws of times and acceptance; times between the few places are interpolated."""
    batches = np.unique(np.round(np.geomspace(1, max_batch, _COARSE_BATCHES)))
    steps = np.unique(np.round(np.concatenate([np.arange(min(longest, 4) + 1), np.geomspace(1, max(longest, 1), 6)])))
    steps = steps[steps <= longest]
    depends = bool(np.isfinite(model.deployment.context_reference)) and context[1] > context[0]
    contexts = np.linspace(*context, _COARSE_CONTEXTS) if depends else np.array([context[0]])
    request, _ = model.request(
        steps[:, None, None],
        batches[None, :, None],
        comm,
        context_tokens=contexts[None, None, :] if np.isfinite(model.deployment.context_reference) else None,
        workload=workload,
    )
    shape = (len(steps), len(batches), len(contexts))
    drawn, parameters = draw_with_parameters(model, request, count)
    p = model.predict(
        request.num_steps,
        request.batch,
        comm,
        context_tokens=contexts[None, None, :] if np.isfinite(model.deployment.context_reference) else None,
        workload=workload,
    )
    rest = np.broadcast_to(p.draft_ms + p.overhead_ms, shape)
    drawn_rest = (drawn.draft_ms + drawn.overhead_ms).reshape(-1, *shape)
    survival = {}
    for name in names:
        shares, _ = model.mixture(name)
        lengths = chain_lengths(model, curves_of(model, parameters, shares, longest), shares)
        survival[name] = np.minimum.accumulate(np.clip(np.diff(lengths, axis=1), 0.0, 1.0), axis=1)
    return Draws(
        verify=drawn.verify_ms.reshape(-1, *shape) / np.broadcast_to(p.verify_ms, shape),
        rest=np.where(rest > 0.0, drawn_rest / np.where(rest > 0.0, rest, 1.0), 1.0),
        steps=steps,
        log_batch=np.log(batches),
        contexts=contexts,
        survival=survival,
    )


def with_draws(table: CostTable, draws: Draws) -> CostTable:
    """One table for every draw."""
    _, longest, width, count = table.verify_ms.shape
    batch = np.log(np.maximum(np.arange(width), 1))
    contexts = table.context_low[0] + table.context_step[0] * np.arange(count)

    def factors(values: Array) -> Array:
        known = between(np.log(values), draws.steps, np.arange(longest, dtype=float), 1)
        return np.exp(between(between(known, draws.log_batch, batch, 2), draws.contexts, contexts, 3))

    count = len(draws.verify)
    return CostTable(
        verify_ms=table.verify_ms * factors(draws.verify),
        rest_ms=table.rest_ms * factors(draws.rest),
        context_low=np.repeat(table.context_low, count),
        context_step=np.repeat(table.context_step, count),
    )


# ------------------------------------------------------------------------------------------------------------ prefill
@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """Time of a prefill pass by its tokens: measured, straight lines between, and on from the last two."""

    tokens: Array
    time_ms: Array
    least_ms: float
    """No pass is quicker: that of one token."""
    ranks: int
    """Data-parallel ranks that share the tokens."""

    def at(self, tokens: ArrayLike) -> Array:
        """Time of passes over so many tokens of all ranks, ms; 0 for none."""
        n = np.asarray(tokens, dtype=float) / self.ranks
        slope = self.time_ms[-1] / self.tokens[-1]
        if len(self.tokens) > 1:
            slope = max(np.diff(self.time_ms)[-1] / np.diff(self.tokens)[-1], 0.0)
        inside = np.interp(n, np.concatenate([[0.0], self.tokens]), np.concatenate([[0.0], self.time_ms]))
        time = inside + np.maximum(n - self.tokens[-1], 0.0) * slope
        return np.asarray(np.where(n > 0.0, np.maximum(time, self.least_ms), 0.0))


def prefill_of(model: FittedModel, comm: str) -> Prefill | None:
    """Times of prefill passes from the rows of the file, of this setting where it has any; None without rows."""
    cal: Calibration = model.calibration
    rows = [r for r in cal.measurements.prefill if r.comm == comm] or list(cal.measurements.prefill)
    times: dict[int, list[float]] = {}
    for row in rows:
        low, high = row.range_ms or (row.time_ms, row.time_ms)
        if low is not None and high is not None:
            times.setdefault(row.tokens, []).append(0.5 * (low + high))
    if not times:
        return None
    tokens = sorted(times)
    return Prefill(
        tokens=np.array(tokens, dtype=float),
        time_ms=np.array([float(np.median(times[n])) for n in tokens]),
        least_ms=float(model.predict(0, 1, comm).verify_ms),
        ranks=cal.system.data_parallel,
    )
