"""Changes applied to drawn parts of the cycle: what verify, draft, overhead and acceptance would be.

A `Situation` is drawn once; any number of suppositions are then arithmetic on its draws. A change acts on every draw
and on the central values alike.

Memory-bound is what a pass reads: of verify the fixed pass, the expert weights and the KV cache, of drafting what each
step takes. All-reduces, what each verified token adds, what drafting takes once a cycle, and the overhead do not depend
on the bandwidth. Compute-bound is the knee of the verify pass and what each verified token adds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specmodel.acceptance import logit
from specmodel.changes import Change
from specmodel.cost import draft_terms
from specmodel.cost import verify_terms as cost_terms
from specmodel.deployment import flattened
from specmodel.errors import UsageError
from specmodel.model import FittedModel
from specmodel.observations import Shape
from specmodel.parts import Parts, chain_lengths, curves_of, draw_with_parameters, split
from specmodel.posterior import lengths
from specmodel.request import Request

__all__ = ["MEMORY_TERMS", "Drawn", "central", "changed", "drawn", "thinned"]

Array = NDArray[np.float64]
MEMORY_TERMS = ("fixed_pass", "experts", "attention_kv")
LEAST = 1e-9
"""Share of its cycle that a draw keeps at least."""
Table = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Draws of the parts of N points, and what changes of them need to know; the central values are one such draw."""

    model: FittedModel = field(repr=False)
    request: Request
    shares: dict[int, float]
    parts: Parts
    parameters: Array
    """Shape (draws, parameters)."""
    num_steps: Array
    """Shape (N,), as the next two."""
    topk: Array
    verify_tokens: Array

    @property
    def drafting(self) -> NDArray[np.bool_]:
        """Points that draft."""
        return np.asarray(self.num_steps > 0)

    def name(self, point: int) -> str:
        """Name a point by its steps."""
        steps = round(self.num_steps[point])
        tree = f"tree {steps}x{self.topk[point]:.0f}x{self.verify_tokens[point]:.0f}"
        return tree if self.topk[point] > 1 else "1 step" if steps == 1 else f"{steps} steps"

    @property
    def most(self) -> Array:
        """Tokens that a cycle of each point can emit at most."""
        return np.asarray(np.where(self.drafting, np.minimum(self.num_steps + 1.0, self.verify_tokens), 1.0))


def drawn(model: FittedModel, request: Request, count: int) -> Drawn:
    """Draw the parts of every point of a request (flattened)."""
    parts, parameters = draw_with_parameters(model, request, count)
    return _of(model, request, parts, parameters)


def _of(model: FittedModel, request: Request, parts: Parts, parameters: Array) -> Drawn:
    steps, topk, tokens = (
        np.broadcast_to(x, request.shape).ravel()
        for x in (request.num_steps, request.settings.topk, request.verify_tokens)
    )
    return Drawn(
        model=model,
        request=request,
        shares=request.shares,
        parts=parts,
        parameters=parameters,
        num_steps=steps,
        topk=topk,
        verify_tokens=tokens,
    )


def central(model: FittedModel, request: Request, parts: Parts) -> Drawn:
    """Return the central values of the points, as `FittedModel.predict` gives them, as one draw."""
    parameters = np.asarray(
        sum(weight * post.theta for post, weight in zip(model.posteriors, model.weights, strict=True))
    )
    return _of(model, request, parts, parameters[None, :])


def thinned(of: Drawn, every: int) -> Drawn:
    """Return every `every`-th draw."""
    p = of.parts
    parts = Parts(
        verify_ms=p.verify_ms[::every],
        draft_ms=p.draft_ms[::every],
        overhead_ms=p.overhead_ms[::every],
        acceptance_length=p.acceptance_length[::every],
        batch=p.batch,
    )
    return _of(of.model, of.request, parts, of.parameters[::every])


@dataclass(slots=True, kw_only=True)
class _State:
    """The parts while changes act on them, one after the other."""

    of: Drawn
    reference: int
    verify: Array
    draft: Array
    overhead: Array
    length: Array
    shares: Table = field(default_factory=dict)
    """Share of each term in verify and in draft, once one of them is changed."""
    curves: dict[int, Array] = field(default_factory=dict)
    """Conditional acceptances by workload, once they are changed."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the central values has to know."""


def changed(of: Drawn, changes: Sequence[Change], reference: int, notes: list[str] | None = None) -> Parts:
    """Parts after the changes, in their order; those of places (batch, comm, ...) are not looked at.

    Parameters
    ----------
    of : Drawn
    changes : sequence of Change
    reference : int
        The point that ``=`` speaks of: there the part becomes the value, elsewhere it changes by the same factor
        (the accepted drafts, for an acceptance length).
    notes : list of str, optional
        Takes what was clipped, and what a change rests on.

    Raises
    ------
    UsageError
        Where nothing would be left of a cycle, or the reference has nothing of what is to be set.
    """
    p = of.parts
    state = _State(
        of=of,
        reference=reference,
        verify=p.verify_ms,
        draft=p.draft_ms,
        overhead=p.overhead_ms,
        length=p.acceptance_length,
        notes=[] if notes is None else notes,
    )
    for change in changes:
        act = _ACTIONS.get(change.target)
        if act is not None:
            act(state, change)
    out = Parts(
        verify_ms=state.verify,
        draft_ms=state.draft,
        overhead_ms=state.overhead,
        acceptance_length=state.length,
        batch=p.batch,
    )
    left = out.cycle_ms / p.cycle_ms
    if np.any(np.median(left, axis=0) <= LEAST):
        raise UsageError(f"{', '.join(map(str, changes))}: nothing would be left of a cycle; leave it some time")
    # A draw may hold next to nothing but what was taken away.
    return replace(out, verify_ms=out.verify_ms + p.cycle_ms * np.maximum(LEAST - left, 0.0))


def _new_time(state: _State, change: Change, before: Array) -> Array:
    """Times after a change of them; `before` has shape (draws, N)."""
    if change.operator != "=":
        new = np.asarray(_applied(change, before))
        if np.any(new[:, state.of.drafting] < 0.0):
            state.notes.append(f"{change}: less than nothing would be left at some step counts; taken as 0 there")
        return np.maximum(new, 0.0)
    here = before[:, [state.reference]]
    if float(change.value) == 0.0:
        return np.zeros_like(before)
    none_left = bool(np.all(here <= 0.0))
    if not before.any() or (none_left and state.of.drafting[state.reference]):
        return np.full_like(before, float(change.value))
    if none_left:
        raise UsageError(f"change {str(change)!r}: there is no {change.target} time at the setting to set it for")
    where = state.of.name(state.reference)
    state.notes.append(
        f"{change}: ms at {where}, {float(change.value) / here.mean():.3g} times what it is; so elsewhere"
    )
    # Of a draw from which all was taken away at the setting there is no proportion left: the same everywhere.
    left = here > 0.0
    return np.where(left, before * (float(change.value) / np.where(left, here, 1.0)), float(change.value))


def _applied(change: Change, before: Array) -> Array:
    """`Change.of` for arrays."""
    amount = float(change.value) * (before if change.relative else 1.0)
    if change.operator == "=":
        return np.broadcast_to(np.asarray(amount), before.shape)
    if change.operator in ("*=", "/="):
        return before * amount if change.operator == "*=" else before / amount
    return before + amount if change.operator == "+=" else before - amount


def _verify(state: _State, change: Change) -> None:
    new = _new_time(state, change, state.verify)
    state.verify = np.where(state.of.drafting, new, state.verify)


def _draft(state: _State, change: Change) -> None:
    state.draft = np.where(state.of.drafting, _new_time(state, change, state.draft), 0.0)


def _overhead(state: _State, change: Change) -> None:
    state.overhead = np.where(state.of.drafting, _new_time(state, change, state.overhead), state.overhead)


def _allreduce(state: _State, change: Change) -> None:
    _terms(state)
    before = state.shares["allreduce"] * state.verify
    if change.operator != "+=" and np.all(before <= 1e-6 * state.verify):
        state.notes.append(f"{change}: the model has no all-reduce here, so this changes nothing")
    _set_terms(state, {"allreduce": _new_time(state, change, before)})


def _bandwidth(state: _State, change: Change) -> None:
    _terms(state)
    speed = float(_applied(change, np.ones(1))[0])
    times = {name: state.shares[name] * state.verify for name in state.shares if not name.startswith("draft")}
    bound = float(np.mean([sum(state.shares[name][:, state.reference] for name in MEMORY_TERMS)]))
    drafts = state.shares["draft_steps"][:, state.reference].mean() if state.of.drafting[state.reference] else 0.0
    verb = "brings" if speed >= 1.0 else "costs"
    state.notes.append(
        f"{change}: {bound:.0%} of verify and {drafts:.0%} of draft at {state.of.name(state.reference)} count as bound "
        f"by memory; launch times inside them would not change, so this is the most that it {verb}"
    )
    weights = times["fixed_pass"] + times["experts"]
    knee = np.maximum((weights + times["compute_knee"]) ** 4 - weights**4, 0.0)
    new = {name: times[name] / speed for name in MEMORY_TERMS}
    lighter = weights / speed
    new["compute_knee"] = (lighter**4 + knee) ** 0.25 - lighter
    _set_terms(state, new)
    _set_draft(state, speed)


def _compute(state: _State, change: Change) -> None:
    _terms(state)
    speed = float(_applied(change, np.ones(1))[0])
    times = {name: state.shares[name] * state.verify for name in state.shares if not name.startswith("draft")}
    weights = times["fixed_pass"] + times["experts"]
    knee = np.maximum((weights + times["compute_knee"]) ** 4 - weights**4, 0.0) / speed**4
    _set_terms(
        state,
        {
            "verified_tokens": times["verified_tokens"] / speed,
            "compute_knee": (weights**4 + knee) ** 0.25 - weights,
        },
    )


def _terms(state: _State) -> None:
    """Split verify and draft of every draw into their terms: by the parameters of the draw, with the sums kept."""
    if state.shares:
        return
    of = state.of
    structure = of.model.deployment.structure
    points = flattened(of.model.deployment.points(of.request.settings)[0], of.request.shape)
    for terms, total in ((cost_terms, of.parts.verify_ms), (draft_terms, of.parts.draft_ms)):
        means = terms(of.parameters.mean(axis=0), points, structure)
        each = terms(of.parameters, points, structure)
        middle = np.maximum(np.stack(list(means.values())), 0.0)
        logs = np.log(np.maximum(np.stack(list(each.values())), 1e-300) / np.maximum(middle, 1e-300)[:, None, :])
        there = np.any(middle > 0.0, axis=0)
        middle[0, ~there] = 1.0  # nothing to split
        whole = np.where(there, total, 1.0)
        split_ms = split(middle, np.clip(np.where(middle[:, None, :] > 0.0, logs, 0.0), -50.0, 50.0), whole)
        state.shares |= dict(zip(means, split_ms / whole, strict=True))


def _set_terms(state: _State, new: Table) -> None:
    """Set some of the terms of verify, of plain passes too; the others stay."""
    names = [name for name in state.shares if not name.startswith("draft")]
    times = {name: new.get(name, state.shares[name] * state.verify) for name in names}
    state.verify = np.asarray(sum(times.values()))
    whole = np.maximum(state.verify, 1e-300)
    state.shares |= {name: value / whole for name, value in times.items()}


def _set_draft(state: _State, speed: float) -> None:
    steps, base = state.shares["draft_steps"] / speed, state.shares["draft_base"]
    state.draft = state.draft * np.where(state.of.drafting, steps + base, 1.0)
    whole = np.maximum(steps + base, 1e-300)
    state.shares |= {"draft_steps": steps / whole, "draft_base": base / whole}


def _acceptance_length(state: _State, change: Change) -> None:
    of, before = state.of, state.length
    if change.operator == "=":
        here = before[:, [state.reference]]
        if not of.drafting[state.reference]:
            raise UsageError(f"change {str(change)!r}: plain decoding has no acceptance length to set")
        new = 1.0 + (before - 1.0) * ((float(change.value) - 1.0) / np.maximum(here - 1.0, 1e-12))
    else:
        new = _applied(change, before)
    beyond = of.drafting & np.any((new > of.most + 1e-9) | (new < 1.0 - 1e-9), axis=0)
    if beyond[state.reference]:
        most = of.most[state.reference]
        state.notes.append(f"{change}: clipped to what is possible, 1 to {most:g} tokens at {of.name(state.reference)}")
    state.length = np.where(of.drafting, _possible(of, new, before), before)


def _possible(of: Drawn, length: Array, before: Array) -> Array:
    """Lengths clipped to what a cycle can emit; a draw that lay beyond, being linear, may stay where it was."""
    return np.clip(length, np.minimum(1.0, before), np.maximum(of.most, before))


def _acceptance(state: _State, change: Change) -> None:
    """Change every conditional probability; the length of a draw changes by what the chain's does."""
    of, model = state.of, state.of.model
    longest = int(max(of.num_steps.max(initial=1.0), model.layout.positions))
    before = state.curves or curves_of(model, of.parameters, of.shares, longest)
    after = {w: np.clip(_applied(change, curve), 0.0, 1.0) for w, curve in before.items()}
    whole = [w for w, curve in before.items() if np.any(np.abs(_applied(change, curve) - after[w]) > 1e-9)]
    if whole:
        state.notes.append(f"{change}: a probability would leave 0 to 1 at some positions; clipped there")
    at = of.num_steps.astype(np.intp)
    old, new = (chain_lengths(model, curves, of.shares)[:, at] for curves in (before, after))
    # The model is linear in its logarithms, so a length is that of its curve to first order only: the ratio is exact.
    ratio = np.ones_like(new) if change.operator == "=" else state.length / old
    length = np.where(of.topk > 1, state.length * _tree_ratio(of, before, after), ratio * new)
    state.length = np.where(of.drafting, _possible(of, length, state.length), state.length)
    state.curves = after


def _tree_ratio(of: Drawn, before: dict[int, Array], after: dict[int, Array]) -> Array:
    """What the length of the best tree of each point changes by, at the middle of the draws; 1 for chains."""
    out = np.ones(len(of.num_steps))
    layout = of.model.layout
    for i in np.flatnonzero((of.topk > 1) & of.drafting):
        inverse = []
        for curves in (before, after):
            theta = of.parameters.mean(axis=0)
            for w, curve in curves.items():
                theta[layout.curve(w)] = logit(curve.mean(axis=0)[: layout.positions])
            shapes = [
                Shape(
                    workload=w,
                    num_steps=round(of.num_steps[i]),
                    topk=round(of.topk[i]),
                    verify_tokens=round(of.verify_tokens[i]),
                )
                for w in curves
            ]
            value, _ = lengths(theta, layout, tuple(shapes))
            inverse.append(sum(of.shares[w] * np.exp(-v) for w, v in zip(curves, value, strict=True)))
        out[i] = inverse[0] / inverse[1]
    return out


_ACTIONS: dict[str, Callable[[_State, Change], None]] = {
    "verify": _verify,
    "draft": _draft,
    "overhead": _overhead,
    "allreduce": _allreduce,
    "bandwidth": _bandwidth,
    "compute": _compute,
    "acceptance": _acceptance,
    "acceptance_length": _acceptance_length,
}
