"""`simulate`: scenarios to lanes, lanes to answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import UsageError
from specmodel.measured import extrapolation
from specmodel.model import FittedModel
from specmodel.simulate.classes import lookup_of
from specmodel.simulate.costs import Prefill, stacked
from specmodel.simulate.policies import SGLANG_TIERS, adaptive_state
from specmodel.simulate.prepare import Cache, Prepared, prepared
from specmodel.simulate.rounds import ADAPTIVE, BY_BATCH, OPTIMAL, ORACLE, Block, Outcome, run_block
from specmodel.simulate.scenario import Scenario
from specmodel.simulate.streams import Streams, streams_of
from specmodel.simulate.summary import Served, Simulation, compared, summarised

__all__ = ["simulate", "simulate_all"]

Array = NDArray[np.float64]
MOST_CELLS = 30_000_000
"""Most requests of all seeds and policies together, and most places of their times: what fits into memory."""
MOST_ROUNDS = 1_000_000
"""Most rounds of one lane: some minutes."""
_KINDS = {"fixed": BY_BATCH, "schedule": BY_BATCH, "adaptive": ADAPTIVE, "optimal": OPTIMAL, "oracle": ORACLE}


def simulate(
    model: FittedModel, scenario: Scenario | None = None, *, report: Callable[[float], None] | None = None
) -> Simulation:
    """Simulate one scenario under each of its policies.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    scenario : Scenario, optional
        What arrives and how it is served; what it leaves open is taken from the calibration.
    report : callable, optional
        Told now and then what share of the requests has ended.

    Returns
    -------
    Simulation
        The same for the same scenario, on any machine and beside any other.

    Raises
    ------
    UsageError
        For options outside their domain, names that the file lacks, more requests than fit into memory, or more
        rounds than end within minutes.
    """
    return simulate_all(model, [Scenario() if scenario is None else scenario], report=report)[0]


def simulate_all(
    model: FittedModel,
    scenarios: Sequence[Scenario],
    *,
    report: Callable[[float], None] | None = None,
    cache: Cache | None = None,
) -> list[Simulation]:
    """Simulate several scenarios of one model as lanes of one block; as `simulate` answers each."""
    cache = {} if cache is None else cache
    ready = [prepared(model, scenario, cache) for scenario in scenarios]
    lanes = sum(p.scenario.seeds * len(p.policies) for p in ready)
    places = max((p.costs.longest + 3) * (int(p.scenario.max_batch or 1) + 1) for p in ready)
    if lanes * max(p.requests for p in ready) > MOST_CELLS or lanes * places > MOST_CELLS:
        raise UsageError(
            f"{lanes} seeds and policies together, each of up to {max(p.requests for p in ready)} requests and batches "
            f"of {max(p.scenario.max_batch or 1 for p in ready)}, do not fit into memory; ask for fewer, or sweep"
        )
    for p in ready:
        _require_end(p)
    streams = [_streams(p) for p in ready]
    outcome = run_block(_block(model, ready, streams), report)
    out, lane = [], 0
    for p, s in zip(ready, streams, strict=True):
        count = len(p.policies) * p.scenario.seeds
        out.append(_answer(model, p, s, _rows(outcome, slice(lane, lane + count))))
        lane += count
    return out


def _require_end(p: Prepared) -> None:
    """Refuse what would take many minutes: plain decoding takes a round for each token of a whole batch."""
    if p.scenario.trace:
        mean = sum(r.output_tokens for r in p.scenario.trace) / p.requests
    else:
        mean = sum(share * n.mean for share, n in zip(p.shares, p.output, strict=True))
    width = float(p.scenario.max_batch or 1)
    if p.arrivals.kind == "closed":
        width = min(width, p.arrivals.value)
    rounds = p.requests * mean / min(width, p.requests)
    if rounds > MOST_ROUNDS:
        raise UsageError(
            f"{p.requests} requests of {mean:,.0f} output tokens, at most {width:g} at once, take about {rounds:,.0f} "
            f"rounds, and more than {MOST_ROUNDS:,} would run for many minutes; ask for fewer requests or tokens"
        )


def _streams(p: Prepared) -> Streams:
    first = int(p.scenario.first_seed)
    return streams_of(
        range(first, first + p.scenario.seeds),
        p.requests,
        p.arrivals,
        p.output,
        p.prompt,
        p.shares,
        p.scenario.trace,
        p.names,
    )


def _block(model: FittedModel, ready: Sequence[Prepared], streams: Sequence[Streams]) -> Block:
    """Lay the seeds of every policy of every scenario out as lanes, in that order."""
    most = max(p.requests for p in ready)
    width = max(int(p.scenario.max_batch or 1) for p in ready)
    columns: dict[str, list[NDArray[np.generic]]] = {}
    curves: list[Array] = []
    known: dict[bytes, int] = {}
    steps = [np.zeros(width + 1, dtype=np.int64)]
    plans: list[NDArray[np.uint8]] = []
    starts: list[int] = []
    prefills: list[Prefill | None] = []
    of_setting: dict[str, int] = {}
    table = 0

    def add(name: str, values: NDArray[np.generic]) -> None:
        columns.setdefault(name, []).append(values)

    def padded(values: NDArray[np.generic], size: int, fill: float) -> NDArray[np.generic]:
        return np.pad(values, ((0, 0), (0, size - values.shape[1])), constant_values=fill)

    for p, s in zip(ready, streams, strict=True):
        seeds = p.scenario.seeds
        tables = len(p.costs.verify_ms)
        of_seed = np.arange(seeds) % tables
        bases = []  # of each table, where its curves begin
        for own in p.classes:
            joined = np.concatenate([c.survival.reshape(c.survival.shape[0] * c.survival.shape[1], -1) for c in own])
            key = joined.tobytes()
            if key not in known:
                known[key] = sum(map(len, curves))
                curves.append(joined if len(joined) % 2 == 0 else np.concatenate([joined, joined[-1:]]))
            bases.append(known[key])
        curve = _curves(p, s, of_seed) + np.array(bases)[of_seed][:, None]
        switch = 1.0 - max(c.persistence for c in p.classes[0]) if p.scenario.acceptance_wander else 0.0
        comm = str(p.scenario.comm)
        if comm not in of_setting:
            of_setting[comm] = len(prefills)
            prefills.append(p.prefill)
        plan_rows = len(plans) + of_seed
        plans += list(p.plans)
        for policy, row in zip(p.policies, p.rows, strict=True):
            add("arrival_ms", padded(s.arrival_ms, most + 1, np.inf))
            add("output_tokens", padded(s.output_tokens, most, 1))
            add("prompt_tokens", padded(s.prompt_tokens, most, 0))
            add("curve", padded(curve, most, 0))
            add("key", padded(s.key, most, 0))
            add("count", np.full(seeds, p.requests))
            add("max_batch", np.full(seeds, int(p.scenario.max_batch or 1)))
            add("clients", np.full(seeds, int(p.arrivals.value) if p.arrivals.kind == "closed" else 0))
            add("first_counted", np.full(seeds, p.first_counted))
            add("switch", np.full(seeds, switch))
            add("table", table + of_seed)
            add("prefill", np.full(seeds, of_setting[comm]))
            add("first_curve", np.array(bases)[of_seed])
            add("kind", np.full(seeds, _KINDS[policy.kind]))
            if policy.kind == "adaptive":
                add("row", len(starts) + np.arange(seeds))
                starts += [p.start] * seeds
            elif policy.kind == "optimal":
                add("row", plan_rows)
            else:
                rows = np.atleast_2d(row)
                add("row", len(steps) + (of_seed if len(rows) > 1 else np.zeros(seeds, dtype=np.intp)))
                steps += [np.pad(r, (0, width + 1 - len(r)), mode="edge") for r in rows]
        table += tables
    positions = max(c.shape[1] for c in curves)
    survival = np.concatenate([np.pad(c, ((0, 0), (0, positions - c.shape[1]))) for c in curves])
    plan = np.zeros((max(len(plans), 1), width + 1, max([x.shape[1] for x in plans] + [1])), dtype=np.uint8)
    for i, x in enumerate(plans):
        plan[i, : x.shape[0], : x.shape[1]] = x
    by_sequences = model.deployment.graph_unit == "sequences" and model.deployment.data_parallel == 1
    sizes = model.deployment.graph_sizes if by_sequences else np.zeros(0)
    return Block(
        **{name: np.concatenate(values) for name, values in columns.items()},
        lookup=lookup_of(survival),
        costs=stacked([p.costs for p in ready]),
        prefills=tuple(prefills),
        steps=np.stack(steps),
        adaptive=adaptive_state(SGLANG_TIERS, starts, width, sizes) if starts else None,
        plans=plan,
    )


def _curves(p: Prepared, s: Streams, of_seed: NDArray[np.intp]) -> NDArray[np.int64]:
    """Row of every request's curve among those of its table."""
    out = np.zeros(s.ease.shape, dtype=np.int64)
    offset = 0
    for w in range(len(p.names)):
        share, states = p.classes[0][w].share, p.classes[0][w].survival.shape[1]
        for t in range(len(p.classes)):
            seeds = np.flatnonzero(of_seed == t)
            here = s.workload[seeds] == w
            ease = np.searchsorted(np.cumsum(p.classes[t][w].share), s.ease[seeds], side="right")
            ease = np.minimum(ease, len(share) - 1)
            state = np.minimum((s.state[seeds] * states).astype(np.int64), states - 1)
            out[seeds] = np.where(here, offset + ease * states + state, out[seeds])
        offset += len(share) * states
    return out


def _rows(outcome: Outcome, lanes: slice) -> dict[str, NDArray[np.generic]]:
    return {name: getattr(outcome, name)[lanes] for name in Outcome.__slots__}


def _answer(model: FittedModel, p: Prepared, s: Streams, rows: dict[str, NDArray[np.generic]]) -> Simulation:
    seeds, width = p.scenario.seeds, int(p.scenario.max_batch or 1)
    shape = p.costs.longest + 1, width + 1
    far = _far(model, shape)
    whole = bool(p.scenario.trace) or (p.arrivals.kind == "closed" and p.requests <= p.arrivals.value)
    results = []
    for i, policy in enumerate(p.policies):
        own = {name: values[i * seeds : (i + 1) * seeds] for name, values in rows.items()}
        served = Served(
            **{n: own[n][:, : p.requests] for n in ("arrival_ms", "admitted_ms", "first_ms", "finish_ms")},  # type: ignore[arg-type]
            output_tokens=s.output_tokens,
            cycles=own["cycles"][:, : p.requests],  # type: ignore[arg-type]
            overshoot=own["overshoot"][:, : p.requests],  # type: ignore[arg-type]
            time_at_ms=own["time_at_ms"][:, : shape[0], : shape[1]],  # type: ignore[arg-type]
            **{n: own[n] for n in ("prefill_ms", "tokens", "request_rounds", "window_ms", "window_tokens")},  # type: ignore[arg-type]
        )
        results.append(
            summarised(
                policy,
                served,
                first_counted=0 if whole and not p.scenario.trace else p.first_counted,
                whole_run=whole,
                has_prefill=p.prefill is not None,
                limits=p.limits,
                far=far,
                open_loop=p.arrivals.kind == "poisson",
                of_each=p.scenario.model_draws,
            )
        )
    able = [r for r in results if r.deployable] or results
    # Where every request of every policy keeps the limits, goodput is tok/s; of an open load that is what arrives.
    closed = p.arrivals.kind == "closed"
    told = bool(p.limits) and (closed or any(bool(np.any(r.seed_values["good_share"] < 1.0)) for r in able))
    objective = "goodput_tok_s" if told else "tok_s" if closed else "latency_ms"
    best, tied, comparisons = compared(results, objective)
    from specmodel.simulate.notices import model_interval, notices

    return Simulation(
        scenario=p.scenario,
        objective=objective,
        results=tuple(results),
        schedule=_spans(p),
        best=best,
        tied=tied,
        comparisons=comparisons,
        model_interval=model_interval(model, p, next(r for r in results if r.policy == best)),
        interval_covers=(
            "chance (the seeds) and the model's uncertainty: where one further seed lies"
            if p.scenario.model_draws
            else "chance alone: the mean over the seeds; the model's own uncertainty is not in it"
        ),
        assumptions=p.assumptions,
        warnings=notices(model, p, results, rows, whole),
    )


def _spans(p: Prepared) -> tuple[tuple[int, int, int], ...]:
    """Return the schedule as ranges of batches with their steps."""
    for policy, row in zip(p.policies, p.rows, strict=True):
        if policy.kind == "schedule":
            starts = [1, *(b for b in range(2, len(row)) if row[b] != row[b - 1])]
            ends = [*(b - 1 for b in starts[1:]), len(row) - 1]
            return tuple((first, last, int(row[first])) for first, last in zip(starts, ends, strict=True))
    return ()


def _far(model: FittedModel, shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Points too far from what was measured for a recommendation, shape (steps + 1, batch + 1)."""
    steps, batch = np.arange(shape[0], dtype=float)[:, None], np.maximum(np.arange(shape[1], dtype=float), 1)[None, :]
    far, _ = extrapolation(model.measured, model.deployment, steps, steps + 1.0, batch)
    return np.broadcast_to(far, shape)
