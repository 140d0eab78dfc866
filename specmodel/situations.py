"""Where a what-if starts from and where it arrives: decisions with their draws, and the choice made again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.changes import Change
from specmodel.choice import choose, judge
from specmodel.decide import optimize
from specmodel.errors import UsageError
from specmodel.measured import default_context
from specmodel.model import FittedModel
from specmodel.optimum import Candidate, Optimum
from specmodel.parts import Parts
from specmodel.request import number
from specmodel.shapes import Trees
from specmodel.suppose import Drawn, central, changed, drawn

__all__ = [
    "Gain",
    "Outcome",
    "Situation",
    "chosen",
    "gain_of",
    "kept_of",
    "moved",
    "outcome_of",
    "ratios_of",
    "reference_of",
    "situation",
]

Array = NDArray[np.float64]
DRAWS = 2000
"""As many as `optimize` takes: they are the same draws."""
_PARTS = ("verify_ms", "draft_ms", "overhead_ms", "acceptance_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One place (batch, context, settings) with its decision and its draws: what suppositions start from."""

    model: FittedModel = field(repr=False)
    optimum: Optimum
    context_tokens: int | None
    of: Drawn = field(repr=False)
    middle: Drawn = field(repr=False)
    call: dict[str, Any] = field(repr=False)
    """What `optimize` was called with."""

    def index(self, c: Candidate | None) -> int | None:
        """Where a candidate's shape and setting stand in the table; None where they do not."""
        for i, other in enumerate(self.optimum.table):
            if c is not None and _key(other) == _key(c):
                return i
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is best at one place, and everything that it was chosen from."""

    batch: float
    context_tokens: int | None
    best: Candidate
    plain_tok_s: float
    """Plain decoding that speedups are over."""
    table: tuple[Candidate, ...]

    @property
    def speculative(self) -> Candidate | None:
        """The fastest candidate that drafts, as predicted."""
        return max((c for c in self.table if c.num_steps), key=lambda c: c.tok_s, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A ratio of two throughputs with its 90 % interval, from paired draws."""

    speedup: float
    interval: tuple[float, float]


def situation(
    model: FittedModel,
    *,
    batch: float | None = None,
    comm: str | Sequence[str] | None = None,
    max_steps: int | None = None,
    workload: str | Mapping[str, float] | None = None,
    context_tokens: int | None = None,
    trees: Trees = (),
) -> Situation:
    """Decide and draw at one place; `suppose` then costs little. Arguments as those of `whatif`."""
    if isinstance(batch, Mapping):
        raise UsageError("batch must be one number here: a what-if is asked of one batch")
    call: dict[str, Any] = {
        "batch": batch,
        "comm": comm,
        "max_steps": max_steps,
        "workload": workload,
        "context_tokens": context_tokens,
        "trees": trees if trees == "auto" else tuple(trees),
    }
    optimum = optimize(model, **call)
    call["batch"] = optimum.batch
    context = default_context(model.calibration, optimum.batch) if context_tokens is None else context_tokens
    comms = tuple(dict.fromkeys(c.comm for c in optimum.table))
    chains = [c for c in optimum.table if c.comm == comms[0]]
    request, _ = model.request(
        np.array([c.num_steps for c in chains]),
        optimum.batch,
        comms,
        np.array([c.topk for c in chains]),
        np.array([c.num_draft_tokens for c in chains]),
        context,
        workload,
    )
    return Situation(
        model=model,
        optimum=optimum,
        context_tokens=context,
        of=drawn(model, request, DRAWS),
        middle=central(model, request, _central_parts(optimum.table)),
        call=call,
    )


def moved(
    before: Situation, changes: tuple[Change, ...], cache: dict[tuple[Any, ...], Situation]
) -> tuple[Situation, int | None]:
    """The situation at the place that the changes name, and the steps that they fix."""
    call, steps = dict(before.call), before.optimum.best.num_steps
    fixed = False
    for change in changes:
        if change.target == "batch":
            call["batch"] = number("batch", change.of(call["batch"]), 1.0)
        elif change.target == "context_tokens":
            at = call["context_tokens"] if call["context_tokens"] is not None else before.context_tokens
            if at is None and change.operator != "=":
                raise UsageError(
                    f"change {str(change)!r}: no context is known to start from; write context_tokens=NUMBER"
                )
            call["context_tokens"] = round(number("context_tokens", change.of(float(at or 0)), 0.0))
        elif change.target == "comm":
            before.model.comm_index(str(change.value))
            call["comm"] = str(change.value)
        elif change.target == "num_steps":
            steps, fixed = int(number("num_steps", change.of(float(steps)), 0.0, 256.0, whole=True)), True
    if fixed and all(c.num_steps != steps for c in before.optimum.table):
        call["max_steps"] = steps
    if call == before.call:
        return before, steps if fixed else None
    key = tuple(str(call[name]) for name in ("batch", "context_tokens", "comm", "max_steps"))
    if key not in cache:
        cache[key] = situation(before.model, **call)
    return cache[key], steps if fixed else None


def kept_of(now: Candidate, changes: tuple[Change, ...], steps: int | None) -> Candidate:
    """The best before, with the steps and the setting that the changes fix."""
    for change in changes:
        if change.target == "comm":
            now = replace(now, comm=str(change.value))
    if steps is not None and steps != now.num_steps:
        now = replace(now, num_steps=steps, topk=1, num_draft_tokens=steps + 1)
    return now


def reference_of(there: Situation, kept: int | None) -> int:
    """The candidate that `=` speaks of: the one that was best if it drafts, else the fastest that does."""
    table = there.optimum.table
    if kept is not None and table[kept].num_steps:
        return kept
    drafting = [i for i, c in enumerate(table) if c.num_steps]
    return max(drafting, key=lambda i: table[i].tok_s, default=0)


def chosen(there: Situation, of: Drawn, after: Parts, middle: Parts, steps: int | None) -> Outcome:
    """Choose again, by the rule of `optimize`, from what the candidates would be."""
    table = there.optimum.table
    allowed = np.array([steps is None or c.num_steps == steps for c in table])
    score = after.tok_s
    probability, regret = judge(score, allowed)
    shapes = [(c.num_steps, c.topk, c.num_draft_tokens) for c in table]
    best = choose(shapes, regret, allowed, np.array([c.measured for c in table]))
    low, high = _intervals(table, of.parts.tok_s, score, middle.tok_s[0])
    plain = there.optimum.plain.tok_s * _plain_change(table, middle)
    untouched = np.array([np.array_equal(getattr(of.parts, n), getattr(after, n)) for n in _PARTS]).all()
    moved = tuple(
        replace(
            c,
            tok_s=float(middle.tok_s[0, i]),
            tok_s_interval=(float(low[i]), float(high[i])),
            tpot_ms=float(middle.cycle_ms[0, i] / middle.acceptance_length[0, i]),
            cycle_ms=float(middle.cycle_ms[0, i]),
            verify_ms=float(middle.verify_ms[0, i]),
            draft_ms=float(middle.draft_ms[0, i]),
            overhead_ms=float(middle.overhead_ms[0, i]),
            acceptance_length=float(middle.acceptance_length[0, i]),
            speedup=c.speedup * float(middle.tok_s[0, i]) / c.tok_s * there.optimum.plain.tok_s / plain,
            probability_best=float(probability[i]),
            expected_regret=float(regret[i]),
            # What is supposed was not measured.
            measured=bool(c.measured and untouched),
        )
        for i, c in enumerate(table)
    )
    return Outcome(
        batch=there.optimum.batch,
        context_tokens=there.context_tokens,
        best=moved[best],
        plain_tok_s=plain,
        table=moved,
    )


def _intervals(table: tuple[Candidate, ...], before: Array, after: Array, tok_s: Array) -> tuple[Array, Array]:
    """Intervals of one new measurement: that of the draws after, widened by what it is wider by before."""
    out = []
    for side, sign in ((0, -1.0), (1, 1.0)):
        stated = np.array([sign * np.log(c.tok_s_interval[side] / c.tok_s) for c in table])
        spreads = [
            sign * np.log(np.quantile(x, 0.5 + 0.45 * sign, axis=0) / np.median(x, axis=0)) for x in (before, after)
        ]
        # The noise of a measurement stays; where draws and interval disagree by chance, none is taken for less than it.
        scaled = stated * np.minimum(spreads[1] / np.maximum(spreads[0], 1e-300), 1.0)
        half = np.sqrt(np.maximum(stated**2 + spreads[1] ** 2 - spreads[0] ** 2, scaled**2))
        out.append(tok_s * np.exp(sign * half))
    return out[0], out[1]


def _plain_change(table: tuple[Candidate, ...], middle: Parts) -> float:
    """What the best plain decoding changes by."""
    plain = [i for i, c in enumerate(table) if c.num_steps == 0]
    return float(max(middle.tok_s[0, plain]) / max(table[i].tok_s for i in plain)) if plain else 1.0


def ratios_of(
    before: Situation,
    there: Situation,
    changes: tuple[Change, ...],
    reference: int,
    targets: list[int],
    of: Drawn,
    after: Parts,
) -> list[Array]:
    """Draws of tok/s after over the best before, for each target: both from the same parameters and residuals."""
    now = before.index(before.optimum.best)
    if now is None:
        raise RuntimeError("the best candidate is not in its own table")
    if there is before:
        return [after.tok_s[:, i] / of.parts.tok_s[:, now] for i in targets]
    points = [before.optimum.best, *(there.optimum.table[i] for i in (*targets, reference))]
    contexts = [before.context_tokens, *[there.context_tokens] * (len(points) - 1)]
    known = [c for c in contexts if c is not None]
    middle = before.model.deployment.context_reference
    stand_in = middle if np.isfinite(middle) else known[0] if known else None
    comms = tuple(dict.fromkeys(c.comm for c in points))
    request, _ = before.model.request(
        np.array([c.num_steps for c in points]),
        np.array([before.optimum.batch, *[there.optimum.batch] * (len(points) - 1)]),
        comms,
        np.array([c.topk for c in points]),
        np.array([c.num_draft_tokens for c in points]),
        None if stand_in is None else np.array([stand_in if c is None else c for c in contexts]),
        before.call["workload"],
    )
    both = drawn(before.model, request, len(of.parts.verify_ms))
    places = [comms.index(c.comm) * len(points) + i for i, c in enumerate(points)]
    moved = changed(both, changes, places[-1]).tok_s
    return [moved[:, places[1 + i]] / both.parts.tok_s[:, places[0]] for i in range(len(targets))]


def gain_of(speedup: float, ratios: Array) -> Gain:
    """A gain with the 90 % interval of its draws."""
    low, high = np.quantile(ratios, (0.05, 0.95))
    return Gain(speedup=speedup, interval=(min(float(low), speedup), max(float(high), speedup)))


def outcome_of(of: Situation) -> Outcome:
    """Return what is best in a situation as it is."""
    return Outcome(
        batch=of.optimum.batch,
        context_tokens=of.context_tokens,
        best=of.optimum.best,
        plain_tok_s=of.optimum.plain.tok_s,
        table=of.optimum.table,
    )


def _central_parts(table: tuple[Candidate, ...]) -> Parts:
    arrays = {name: np.array([[getattr(c, name) for c in table]]) for name in _PARTS}
    return Parts(**arrays, batch=np.array([c.batch for c in table]))


def _key(c: Candidate) -> tuple[int, int, int, str]:
    return c.num_steps, c.topk, c.num_draft_tokens, c.comm
