"""What-if grid of a report: every slider position computed by the model, so that the page only looks values up.

A position is the supposition ``acceptance+=a, verify*=v, draft*=d`` at one batch, answered as `whatif` answers it: the
same central values, the same choice, on as many of the same joint draws as a cell of `sweep`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.changes import Change
from specmodel.choice import REGRET_TOLERANCE
from specmodel.model import FittedModel
from specmodel.optimum import Optimum
from specmodel.suppose import changed, thinned
from specmodel.whatif import THIN, Situation, situation

__all__ = ["ACCEPTANCE", "DRAFT", "VERIFY", "Explorer", "explore"]

Array = NDArray[np.float64]
ACCEPTANCE = (-0.2, -0.15, -0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2)
VERIFY = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25)
DRAFT = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0)
_HERE = (ACCEPTANCE.index(0.0), VERIFY.index(1.0), DRAFT.index(1.0))
_MOST_BATCHES = 6
_MOST_SHAPES = 13
_LEVELS = (0.05, 0.5, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explorer:
    """The grid: axes batch, acceptance, verify, draft, and where there is one more, the shape."""

    comm: str
    batches: tuple[float, ...]
    shapes: tuple[tuple[int, int, int], ...]
    """(num_steps, topk, num_draft_tokens) of the candidates; the first is plain decoding."""
    tok_s: Array
    low: Array
    high: Array
    """Ends of the 90 % interval of one new measurement."""
    best: NDArray[np.intp]
    """Index of the shape of least expected regret."""
    speedup: Array
    """Of the best over plain decoding under the same change."""
    gain: Array
    """Of the best over what is best at that batch as things are."""
    extrapolated: NDArray[np.bool_]
    """Of each batch and shape."""
    outside: NDArray[np.bool_]
    """Of each batch: whether it lies outside the measured ones."""
    start: tuple[int, int, int, int]
    """Where the sliders stand: as things are."""


def explore(model: FittedModel, optima: Sequence[Optimum], comm: str, **place: Any) -> Explorer | None:
    """Compute the grid under one communication setting; None where there is nothing to choose from.

    Parameters
    ----------
    model : FittedModel
    optima : sequence of Optimum
        Answers for the batches of the report; their shapes are the candidates.
    comm : str
        The communication setting.
    **place
        Further keyword arguments of `whatif`, such as the workload.
    """
    shapes = _shapes(optima, comm)
    if len(shapes) < 2:
        return None
    batches = _batches([o.batch for o in optima])
    slices = [_slice(situation(model, batch=batch, comm=comm, **place), shapes) for batch in batches]
    known = model.measured.batches
    first = next((b for b in batches if b == 1.0), optima[0].batch)
    return Explorer(
        comm=comm,
        batches=tuple(batches),
        shapes=tuple(shapes),
        tok_s=np.stack([s.tok_s for s in slices]),
        low=np.stack([s.low for s in slices]),
        high=np.stack([s.high for s in slices]),
        best=np.stack([s.best for s in slices]),
        speedup=np.stack([s.speedup for s in slices]),
        gain=np.stack([s.gain for s in slices]),
        extrapolated=np.stack([s.extrapolated for s in slices]),
        outside=np.array([not known or b < known[0] or b > known[-1] for b in batches]),
        start=(batches.index(first), *_HERE),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """The grid at one batch."""

    tok_s: Array
    low: Array
    high: Array
    best: NDArray[np.intp]
    speedup: Array
    gain: Array
    extrapolated: NDArray[np.bool_]


def _slice(at: Situation, shapes: Sequence[tuple[int, int, int]]) -> _Slice:
    everything = [(c.num_steps, c.topk, c.num_draft_tokens) for c in at.optimum.table]
    index = np.array([everything.index(shape) for shape in shapes])
    rows = [at.optimum.table[i] for i in index]
    of = thinned(at.of, THIN)
    drafting = of.drafting[index]
    shifts = [(Change(target="acceptance", operator="+=", value=a),) for a in ACCEPTANCE]
    logs, middle = (
        _log_tok_s(
            np.stack([changed(drawn, shift, 0).acceptance_length[:, index] for shift in shifts]),
            drawn.parts.verify_ms[:, index],
            drawn.parts.draft_ms[:, index],
            drawn.parts.overhead_ms[:, index],
            drafting,
            at.optimum.batch,
        )
        for drawn in (of, at.middle)
    )
    tok_s = np.exp(middle[..., 0, :])
    low, high = _intervals(logs, tok_s, np.array([c.tok_s_interval for c in rows]), np.array([c.tok_s for c in rows]))
    regret = np.expm1((logs.max(axis=-1, keepdims=True) - logs).mean(axis=-2))
    # Where nothing is changed the regrets are those of the answer itself, on its many more draws.
    regret = regret + (np.array([c.expected_regret for c in rows]) - regret[_HERE])
    order = sorted(range(len(rows)), key=lambda i: (not rows[i].measured, rows[i].num_steps, rows[i].num_draft_tokens))
    close = regret <= regret.min(axis=-1, keepdims=True) + REGRET_TOLERANCE
    best = np.array(order)[np.argmax(close[..., order], axis=-1)]
    of_best = np.take_along_axis(tok_s, best[..., None], axis=-1)[..., 0]
    plain = np.array([c.tok_s / c.speedup for c in rows])
    return _Slice(
        tok_s=tok_s,
        low=low,
        high=high,
        best=best,
        speedup=of_best / plain[best],
        gain=of_best / of_best[_HERE] - 1.0,
        extrapolated=np.array([c.extrapolated for c in rows]),
    )


def _log_tok_s(
    length: Array, verify: Array, draft: Array, overhead: Array, drafting: NDArray[np.bool_], batch: float
) -> Array:
    """Logarithm of tok/s, shape (acceptance, verify, draft, draws, shapes); plain decoding stays as it is."""
    verify_factor = np.where(drafting, np.array(VERIFY)[:, None, None, None], 1.0)
    draft_factor = np.array(DRAFT)[:, None, None]
    cycle = verify_factor * verify + draft_factor * draft + overhead
    return np.asarray(np.log(1000.0 * batch * length)[:, None, None] - np.log(cycle))


def _intervals(logs: Array, tok_s: Array, stated: Array, level: Array) -> tuple[Array, Array]:
    """Ends for one new measurement: those of the draws, widened by what the stated ones are wider by unchanged."""
    low, middle, high = np.quantile(logs, _LEVELS, axis=-2)
    out = []
    for side, sign, end in ((0, -1.0, low), (1, 1.0, high)):
        spread = sign * (end - middle)
        half = sign * np.log(stated[:, side] / level)
        noise = np.maximum(half**2 - spread[_HERE] ** 2, 0.0)
        wide = np.sqrt(noise + spread**2)
        wide = np.where(spread == spread[_HERE], half, wide)
        out.append(tok_s * np.exp(sign * wide))
    return out[0], out[1]


def _shapes(optima: Sequence[Optimum], comm: str) -> list[tuple[int, int, int]]:
    """Candidates that every answer has: plain decoding, the best and their ties, what was measured, the shortest."""
    tables = [{(c.num_steps, c.topk, c.num_draft_tokens): c for c in o.table if c.comm == comm} for o in optima]
    common = [shape for shape in tables[0] if all(shape in table for table in tables)]
    wanted = {(c.num_steps, c.topk, c.num_draft_tokens) for o in optima for c in (o.best, *o.ties)}

    def rank(shape: tuple[int, int, int]) -> tuple[bool, bool, bool, int]:
        measured = any(table[shape].measured for table in tables)
        return shape[0] > 0, shape not in wanted, not measured, shape[0]

    return sorted(sorted(common, key=rank)[:_MOST_SHAPES], key=lambda s: (s[1] > 1, *s))


def _batches(answered: Sequence[float]) -> list[float]:
    """Positions of the batch slider: the answered ones, thinned where they are many, and doublings around few."""
    known = sorted(set(answered))
    if len(known) > _MOST_BATCHES:
        keep = np.unique(np.round(np.linspace(0, len(known) - 1, _MOST_BATCHES)).astype(int))
        return [known[i] for i in keep]
    near = [b for b in (2.0 * known[-1], 4.0 * known[-1], 0.5 * known[0]) if b >= 1.0 and b == int(b)]
    return sorted({*known, *near[: _MOST_BATCHES - len(known)]})
