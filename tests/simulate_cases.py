"""Lanes made by hand, for what is known in closed form: times that are linear in the steps, curves that are given."""

from __future__ import annotations

from typing import Any

import numpy as np

from specmodel.simulate.classes import AcceptanceClasses, lookup_of
from specmodel.simulate.costs import CostTable, Prefill
from specmodel.simulate.policies import SGLANG_TIERS, adaptive_state, oracle_depths, planned_steps
from specmodel.simulate.randoms import request_random
from specmodel.simulate.rounds import ADAPTIVE, BY_BATCH, OPTIMAL, ORACLE, Block

KINDS = {"fixed": BY_BATCH, "adaptive": ADAPTIVE, "optimal": OPTIMAL, "oracle": ORACLE}


def constant(alpha: float, positions: int) -> AcceptanceClasses:
    """One acceptance at every position."""
    return AcceptanceClasses(survival=alpha ** np.arange(1.0, positions + 1)[None, None, :], share=np.ones(1))


def mixed(alpha: Any, share: Any, positions: int) -> AcceptanceClasses:
    """Requests of several constant acceptances."""
    curves = np.asarray(alpha, dtype=float)[:, None, None] ** np.arange(1.0, positions + 1)
    return AcceptanceClasses(survival=curves, share=np.asarray(share, dtype=float) / np.sum(share))


def linear_costs(step_cost: float, longest: int, batch: int = 1, plain_ms: float = 10.0) -> CostTable:
    """A plain pass, and a part of it for every step, half of it verify and half draft."""
    steps = np.arange(longest + 1.0)[:, None]
    on = np.concatenate([[0.0], np.ones(batch)])
    verify = plain_ms * (1.0 + 0.5 * step_cost * steps) * on
    rest = plain_ms * 0.5 * step_cost * steps * on
    return CostTable(
        verify_ms=verify[None, :, :, None],
        rest_ms=rest[None, :, :, None],
        context_low=np.zeros(1),
        context_step=np.ones(1),
    )


def block(
    classes: AcceptanceClasses,
    costs: CostTable,
    *,
    kind: str = "fixed",
    num_steps: int = 0,
    output_tokens: int = 129,
    requests: int = 100,
    seeds: int = 8,
    batch: int = 1,
    clients: int = 1,
    arrival_ms: Any = None,
    prompt_tokens: int = 0,
    prefill: Prefill | None = None,
    first_seed: int = 0,
    start: int = 3,
) -> Block:
    """Lanes of one scenario by hand; a closed loop unless arrivals are given."""
    shape = (seeds, requests)
    arrival = np.full((seeds, requests + 1), np.inf)
    if arrival_ms is None:
        arrival[:, :clients] = 0.0
    else:
        arrival[:, :requests] = arrival_ms
    states = classes.survival.shape[1]
    ease = np.stack([request_random(s, 4).random(requests) for s in range(first_seed, first_seed + seeds)])
    curve = np.minimum(np.searchsorted(np.cumsum(classes.share), ease, side="right"), len(classes.share) - 1) * states
    key = np.stack(
        [
            request_random(s, 6).integers(0, 2**64, size=requests, dtype=np.uint64)
            for s in range(first_seed, first_seed + seeds)
        ]
    )
    survival = classes.survival.reshape(-1, classes.survival.shape[2])
    verify, rest = costs.verify_ms[0, :, :, 0], costs.rest_ms[0, :, :, 0]
    steps = np.full((1, batch + 1), num_steps)
    plans = np.zeros((1, 1, 1), dtype=np.uint8)
    if kind == "oracle":
        steps = oracle_depths(verify, rest, classes)[None]
    elif kind == "optimal":
        plans = np.repeat(planned_steps(verify, rest, classes), states, axis=1)[None].astype(np.uint8)

    def each(value: Any) -> Any:
        return np.full(seeds, value)

    return Block(
        arrival_ms=arrival,
        output_tokens=np.full(shape, output_tokens, dtype=np.int32),
        prompt_tokens=np.full(shape, prompt_tokens, dtype=np.int32),
        curve=curve,
        key=key,
        count=each(requests),
        max_batch=each(batch),
        clients=each(clients if arrival_ms is None else 0),
        first_counted=each(0),
        switch=each(1.0 - classes.persistence),
        table=each(0),
        prefill=each(0),
        first_curve=each(0),
        kind=each(KINDS[kind]),
        row=np.arange(seeds) if kind == "adaptive" else each(0),
        lookup=lookup_of(survival),
        costs=costs,
        prefills=(prefill,),
        steps=steps,
        adaptive=adaptive_state(SGLANG_TIERS, [start] * seeds, batch, np.zeros(0)) if kind == "adaptive" else None,
        plans=plans,
    )


def within(values: Any, expected: float, *, errors: float = 4.0, also: float = 0.0) -> bool:
    """Whether the mean of independent values is as expected, to so many standard errors and a stated slack."""
    x = np.asarray(values, dtype=float).ravel()
    return bool(abs(x.mean() - expected) <= errors * x.std(ddof=1) / np.sqrt(len(x)) + also + 1e-12 * abs(expected))
