"""Continuous batching, round by round: many lanes at once, each with its own clock, requests and policy.

A lane is one seed of one scenario under one policy. All lanes take a step together (admit what has arrived, prefill
it, run one cycle, let go of what has ended), so a step is a few dozen array operations whatever their number. No lane
sees another: what it does depends on its own rows alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmodel.simulate.classes import BUCKETS_BITS, Lookup, accepted
from specmodel.simulate.costs import CostTable, Prefill
from specmodel.simulate.policies import AdaptiveState, adapt
from specmodel.simulate.randoms import chances, next_words

__all__ = ["Block", "Outcome", "run_block"]

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
BY_BATCH, ADAPTIVE, OPTIMAL, ORACLE = range(4)
_STATE_BIT = np.uint64(1 << 24)
_REPORT_EVERY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Lanes that run together: L lanes, at most R requests in each."""

    arrival_ms: Array
    """Increasing, shape (L, R + 1), infinite past the last and where it depends on the service; it is written to."""
    output_tokens: NDArray[np.int32]
    """Shape (L, R), as the next three."""
    prompt_tokens: NDArray[np.int32]
    curve: NDArray[np.int64]
    """Row of the survival curves; with states it is even, and the next row is the other state."""
    key: NDArray[np.uint64]
    count: Ints
    """Requests of each lane, shape (L,), as what follows."""
    max_batch: Ints
    clients: Ints
    """Of a closed loop, 0 for arrivals of their own."""
    first_counted: Ints
    """First request that is counted."""
    switch: Array
    """Chance that a request's state is drawn anew after a round."""
    table: NDArray[np.intp]
    """Row of the cost table."""
    prefill: Ints
    """Row of `prefills`."""
    first_curve: Ints
    """First row of the lane's own curves."""
    kind: Ints
    """`BY_BATCH`, `ADAPTIVE`, `OPTIMAL` or `ORACLE`."""
    row: NDArray[np.intp]
    """Row in `steps` (BY_BATCH and ORACLE), in `adaptive` or in `plans`."""
    lookup: Lookup
    costs: CostTable
    prefills: tuple[Prefill | None, ...]
    steps: NDArray[np.int64]
    """Steps at every batch, shape (rows, batch + 1)."""
    adaptive: AdaptiveState | None
    plans: NDArray[np.uint8]
    """Steps at every batch of every curve of its own, shape (rows, batch + 1, curves)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened: times in ms on the lane's clock, NaN for requests that do not exist."""

    arrival_ms: Array
    """Shape (L, R), as what follows."""
    admitted_ms: Array
    first_ms: Array
    """When the prefill that emits the first token ended."""
    finish_ms: Array
    cycles: NDArray[np.int32]
    overshoot: NDArray[np.int32]
    """Tokens that the last cycle had accepted beyond the end of the output."""
    time_at_ms: Array
    """Time at every number of steps (the longest of the batch) and batch, shape (L, steps + 1, batch + 1)."""
    prefill_ms: Array
    """Shape (L,), as what follows."""
    tokens: Ints
    request_rounds: Ints
    window_ms: Array
    """From the first counted admission to the last admission; 0 where there is none."""
    window_tokens: Ints
    context_low: Array
    """Least and largest mean context of a cycle."""
    context_high: Array


class _Lanes:
    """The arrays that change, by row; rows of lanes that have ended are let go."""

    __slots__ = (
        "base", "batch", "completed", "context", "ended", "lane", "left", "next", "now", "request", "start", "width",
        "word",
    )  # fmt: skip

    def __init__(self, lanes: int, slots: int) -> None:
        self.lane = np.arange(lanes)
        self.now = np.zeros(lanes)
        self.next = np.zeros(lanes, dtype=np.int64)
        self.batch = np.zeros(lanes, dtype=np.int64)
        self.completed = np.zeros(lanes, dtype=np.int64)
        self.context = np.zeros(lanes)
        self.left = np.zeros((lanes, slots), dtype=np.int32)
        self.word = np.zeros((lanes, slots), dtype=np.uint64)
        self.base = np.zeros((lanes, slots), dtype=np.int64)
        self.request = np.zeros((lanes, slots), dtype=np.int64)
        self.start = np.zeros((lanes, slots), dtype=np.int32)
        self.width = 1

    def keep(self, rows: NDArray[np.bool_]) -> None:
        for name in ("lane", "now", "next", "batch", "completed", "context"):
            setattr(self, name, getattr(self, name)[rows])
        for name in ("left", "word", "base", "request", "start"):
            setattr(self, name, getattr(self, name)[rows])


def run_block(block: Block, report: Callable[[float], None] | None = None) -> Outcome:
    """Simulate every lane of a block to the end of its last request.

    Parameters
    ----------
    block : Block
    report : callable, optional
        Told now and then what share of the requests has ended.
    """
    lanes, requests = block.output_tokens.shape
    nan = np.full((lanes, requests), np.nan)
    out = Outcome(
        arrival_ms=block.arrival_ms[:, :requests],
        admitted_ms=nan,
        first_ms=nan.copy(),
        finish_ms=nan.copy(),
        cycles=np.zeros((lanes, requests), dtype=np.int32),
        overshoot=np.zeros((lanes, requests), dtype=np.int32),
        time_at_ms=np.zeros((lanes, block.costs.longest + 1, block.costs.verify_ms.shape[2])),
        prefill_ms=np.zeros(lanes),
        tokens=np.zeros(lanes, dtype=np.int64),
        request_rounds=np.zeros(lanes, dtype=np.int64),
        window_ms=np.zeros(lanes),
        window_tokens=np.zeros(lanes, dtype=np.int64),
        context_low=np.full(lanes, np.inf),
        context_high=np.zeros(lanes),
    )
    s = _Lanes(lanes, int(block.max_batch.max()))
    opened = np.full(lanes, np.nan)
    opened_tokens = np.zeros(lanes, dtype=np.int64)
    iteration, total = 0, int(block.count.sum())
    while len(s.lane):
        upcoming = block.arrival_ms[s.lane, s.next]
        jump = (s.batch == 0) & (upcoming > s.now) & np.isfinite(upcoming)
        if jump.any():
            s.now = np.where(jump, upcoming, s.now)
        if ((upcoming <= s.now) & (s.batch < block.max_batch[s.lane])).any():
            _admit(block, s, out, iteration, opened, opened_tokens)
        _cycle(block, s, out, iteration)
        iteration += 1
        ended = (s.batch == 0) & (s.next >= block.count[s.lane])
        gone = int(np.count_nonzero(ended))
        if gone and gone >= len(ended) // 4:
            s.keep(~ended)
        if iteration % 512 == 0 and len(s.lane):
            used = np.flatnonzero((s.left[:, : s.width] > 0).any(axis=0))
            s.width = int(used[-1]) + 1 if len(used) else 1
        if report is not None and iteration % _REPORT_EVERY == 0:
            report(1.0 - float((block.count[s.lane] - s.completed).sum()) / total)
    return out


def _admit(block: Block, s: _Lanes, out: Outcome, iteration: int, opened: Array, opened_tokens: Ints) -> None:
    """Admit what has arrived, first come first served, and prefill it in one pass while the others wait."""
    room = block.max_batch[s.lane] - s.batch
    before = s.next.copy()
    columns = min(max(2 * s.width, 8), s.left.shape[1])
    rows_of, requests_of = [], []
    while True:
        ready = np.flatnonzero((block.arrival_ms[s.lane, s.next] <= s.now) & (room > 0))
        if not len(ready):
            break
        free = s.left[ready, :columns] == 0
        spare = np.minimum(np.count_nonzero(free, axis=1), room[ready])
        if columns < s.left.shape[1] and (spare < room[ready]).any() and not spare.all():
            columns = min(2 * columns, s.left.shape[1])
            continue
        flat = np.flatnonzero(free)
        at = flat // columns
        starts = np.cumsum(np.count_nonzero(free, axis=1)) - np.count_nonzero(free, axis=1)
        rank = np.arange(len(flat)) - starts[at]
        keep = rank < spare[at]
        at, slot, rank = at[keep], (flat % columns)[keep], rank[keep]
        row = ready[at]
        lane, request = s.lane[row], s.next[row] + rank
        inside = request < block.count[lane]
        inside[inside] = block.arrival_ms[lane[inside], request[inside]] <= s.now[row[inside]]
        row, slot, lane, request = row[inside], slot[inside], lane[inside], request[inside]
        left = block.output_tokens[lane, request] - 1  # the prefill emits the first
        s.left[row, slot] = left
        s.word[row, slot] = block.key[lane, request]
        s.base[row, slot] = block.curve[lane, request] << BUCKETS_BITS
        s.request[row, slot] = request
        s.start[row, slot] = iteration
        size = len(s.lane)
        taken = np.bincount(row, minlength=size)
        running = left > 0
        s.next += taken
        room -= taken
        s.batch += np.bincount(row[running], minlength=size)
        tokens = block.prompt_tokens[lane, request] + 1.0
        s.context += np.bincount(row[running], weights=tokens[running], minlength=size)
        s.width = max(s.width, int(slot.max()) + 1)
        rows_of.append(row)
        requests_of.append(request)
        columns = min(max(2 * s.width, 8), s.left.shape[1])
    row, request = np.concatenate(rows_of), np.concatenate(requests_of)
    lane, size = s.lane[row], len(s.lane)
    _open_window(block, s, out, before, opened, opened_tokens)
    out.admitted_ms[lane, request] = s.now[row]
    prompts = np.bincount(row, weights=block.prompt_tokens[lane, request], minlength=size)
    for i, prefill in enumerate(block.prefills):
        if prefill is not None:
            spent = np.where(block.prefill[s.lane] == i, prefill.at(prompts), 0.0)
            s.now = s.now + spent
            out.prefill_ms[s.lane] += spent
    out.first_ms[lane, request] = s.now[row]
    out.tokens[s.lane] += np.bincount(row, minlength=size)
    single = block.output_tokens[lane, request] == 1
    if single.any():
        order = np.argsort(row[single], kind="stable")
        _complete(block, s, out, row[single][order], request[single][order])


def _open_window(block: Block, s: _Lanes, out: Outcome, before: Ints, opened: Array, opened_tokens: Ints) -> None:
    """Note where the counted part of a lane begins, and how long it is once the last request is admitted."""
    first = block.first_counted[s.lane]
    begins = (before <= first) & (s.next > first)
    if begins.any():
        lane = s.lane[begins]
        opened[lane], opened_tokens[lane] = s.now[begins], out.tokens[lane]
    ends = (before < block.count[s.lane]) & (s.next == block.count[s.lane])
    if ends.any():
        lane = s.lane[ends]
        out.window_ms[lane] = s.now[ends] - opened[lane]
        out.window_tokens[lane] = out.tokens[lane] - opened_tokens[lane]


def _complete(block: Block, s: _Lanes, out: Outcome, row: Ints, request: Ints) -> None:
    """Requests end, sorted by row; clients of a closed loop ask again."""
    lane = s.lane[row]
    out.finish_ms[lane, request] = s.now[row]
    ended = np.bincount(row, minlength=len(s.lane))
    clients = block.clients[lane]
    if clients.any():
        rank = np.arange(len(row)) - (np.cumsum(ended) - ended)[row]
        following = clients + s.completed[row] + rank
        asks = (clients > 0) & (following < block.count[lane])
        block.arrival_ms[lane[asks], following[asks]] = s.now[row[asks]]
    s.completed += ended


def _cycle(block: Block, s: _Lanes, out: Outcome, iteration: int) -> None:
    """Run one cycle of every lane that has something to run."""
    lane, batch, width = s.lane, s.batch, s.width
    left = s.left[:, :width]
    shape = left.shape
    word = np.empty(shape, dtype=np.uint64)
    next_words(s.word[:, :width], word, np.empty(shape, dtype=np.uint64))
    drawn = accepted(block.lookup, s.base[:, :width], word)
    kind = block.kind[lane]
    steps = block.steps[np.where((kind == BY_BATCH) | (kind == ORACLE), block.row[lane], 0), batch]
    adaptive = np.flatnonzero((kind == ADAPTIVE) & (batch > 0))
    if len(adaptive) and block.adaptive is not None:
        steps[adaptive] = block.adaptive.steps(block.row[lane[adaptive]], batch[adaptive])
    raw = np.minimum(drawn, steps.astype(np.uint8)[:, None])
    ragged = np.flatnonzero((kind >= OPTIMAL) & (batch > 0))
    mean = np.zeros(0)
    if len(ragged):
        mean, longest = _own_steps(block, s, drawn, raw, ragged, kind)
        steps[ragged] = longest
    raw += np.uint8(1)
    emitted = np.minimum(raw, left).astype(np.int32)
    active = np.maximum(batch, 1)
    context = s.context / active
    spent = block.costs.cycle_ms(block.table[lane], steps, batch, context)
    if len(ragged):
        spent[ragged] = block.costs.ragged_ms(
            block.table[lane[ragged]], mean, steps[ragged], batch[ragged], context[ragged]
        )
    if len(adaptive) and block.adaptive is not None:
        made = np.where(left[adaptive] > 0, raw[adaptive], 1).sum(axis=1) - float(width)
        adapt(block.adaptive, block.row[lane[adaptive]], batch[adaptive], made / batch[adaptive])
    switching = np.flatnonzero(block.switch[lane] > 0.0)
    if len(switching):
        _wander(block, s, word, switching)
    left -= emitted
    tokens = emitted.sum(axis=1)
    s.now = s.now + spent
    out.time_at_ms[lane, steps, batch] += spent
    out.tokens[lane] += tokens
    out.request_rounds[lane] += batch
    busy = batch > 0
    out.context_low[lane] = np.where(busy, np.minimum(out.context_low[lane], context), out.context_low[lane])
    out.context_high[lane] = np.maximum(out.context_high[lane], context)
    s.context = s.context + tokens
    ended = np.flatnonzero((left == 0) & (emitted > 0))
    if len(ended):
        row, slot = ended // width, ended % width
        request = s.request[row, slot]
        of = lane[row]
        out.cycles[of, request] = iteration + 1 - s.start[row, slot]
        out.overshoot[of, request] = raw.ravel()[ended].astype(np.int32) - emitted.ravel()[ended]
        size = len(lane)
        s.batch = batch - np.bincount(row, minlength=size)
        held = block.prompt_tokens[of, request] + block.output_tokens[of, request]
        s.context = s.context - np.bincount(row, weights=held, minlength=size)
        _complete(block, s, out, row, request)


def _own_steps(
    block: Block, s: _Lanes, drawn: NDArray[np.uint8], raw: NDArray[np.uint8], rows: NDArray[np.intp], kind: Ints
) -> tuple[Array, Ints]:
    """Steps of every request of the lanes that plan them one by one: their mean, the longest; `raw` is cut to them."""
    width = drawn.shape[1]
    running = s.left[rows, :width] > 0
    own = raw[rows]  # the oracle drafts what will be accepted
    planned = np.flatnonzero(kind[rows] == OPTIMAL)
    if len(planned):
        at = rows[planned]
        curve = (s.base[at, :width] >> BUCKETS_BITS) - block.first_curve[s.lane[at]][:, None]
        curve = np.maximum(curve, 0)  # of an empty slot
        own[planned] = block.plans[block.row[s.lane[at]][:, None], s.batch[at][:, None], curve]
        raw[at] = np.minimum(drawn[at], own[planned])
    own = np.where(running, own, 0).astype(np.int64)
    return own.sum(axis=1) / s.batch[rows], own.max(axis=1)


def _wander(block: Block, s: _Lanes, word: NDArray[np.uint64], rows: NDArray[np.intp]) -> None:
    """Draw the state of some requests anew."""
    words = word[rows]
    base = s.base[rows, : word.shape[1]]
    anew = chances(words) < block.switch[s.lane[rows]][:, None]
    pair = np.int64(1 << BUCKETS_BITS)
    drawn = (base & ~pair) | np.where(words & _STATE_BIT, pair, 0)
    s.base[rows, : word.shape[1]] = np.where(anew, drawn, base)
