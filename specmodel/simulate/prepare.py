"""From a model and a scenario to what its lanes need: requests, times, curves, plans. Everything by name is checked."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import UsageError
from specmodel.measured import default_context
from specmodel.model import FittedModel
from specmodel.simulate.classes import AcceptanceClasses, classes_of
from specmodel.simulate.costs import (
    CostTable,
    Draws,
    Prefill,
    cost_table,
    draws_of,
    prefill_of,
    survival_of,
    with_draws,
)
from specmodel.simulate.policies import chain_schedule, oracle_depths, planned_steps, steps_by_batch
from specmodel.simulate.scenario import (
    MOST_BATCH,
    Arrivals,
    Lengths,
    Policy,
    Scenario,
    arrivals_of,
    checked_scenario,
    lengths_of,
    limits_of,
    policy_of,
)

__all__ = ["Prepared", "prepared"]

Array = NDArray[np.float64]
Cache = dict[Hashable, Any]
DEFAULT_CLIENTS = 8
DEFAULT_OUTPUT, DEFAULT_PROMPT, DEFAULT_REQUESTS, BATCHES_OF_REQUESTS = 256, 512, 200, 8
_FAR_TAIL = 1.0 - 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A scenario with everything stated, and what its lanes look up."""

    scenario: Scenario
    """Every option as it was taken."""
    arrivals: Arrivals
    policies: tuple[Policy, ...]
    names: tuple[str, ...]
    """Workloads."""
    shares: tuple[float, ...]
    output: tuple[Lengths, ...]
    prompt: tuple[Lengths, ...]
    requests: int
    first_counted: int
    limits: dict[str, float]
    costs: CostTable
    """One table, or one for each seed."""
    classes: tuple[tuple[AcceptanceClasses, ...], ...]
    """Of each table, of each workload."""
    prefill: Prefill | None
    rows: tuple[NDArray[np.int64], ...]
    """Of each policy, its steps by batch (of `oracle` of each table); empty where it has none."""
    plans: NDArray[np.uint8]
    """Of each table, of each batch, of each curve in the order of `classes`; empty without the policy `optimal`."""
    start: int
    """Steps at which an adaptive rule starts."""
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]


def prepared(model: FittedModel, scenario: Scenario, cache: Cache | None = None) -> Prepared:
    """Fill in what a scenario leaves open and compute what its lanes look up.

    Parameters
    ----------
    model : FittedModel
    scenario : Scenario
    cache : dict, optional
        Kept between scenarios of one model, for what they share.

    Raises
    ------
    UsageError
        For names that the file lacks and options that contradict each other or what the file can answer.
    """
    cache = {} if cache is None else cache
    checked_scenario(scenario)
    arrivals, limits = _arrivals(model, scenario), limits_of(scenario.slo)
    names, shares, warnings = _workloads(model, scenario)
    output, prompt, assumptions = _lengths(model, scenario, names)
    max_batch = _max_batch(model, scenario, arrivals)
    mean_context = _mean_context(scenario, output, prompt, shares)
    policies, steps, comm, start, trees = _policies(model, scenario, max_batch, names, shares, mean_context, cache)
    if trees and any(policy.kind == "schedule" for policy in policies):
        where = ", ".join(f"{b:g}" for b in trees)
        warnings += (f"`optimize` recommends a tree at batch {where}; the schedule here has the fastest chain there",)
    prefill = prefill_of(model, comm)
    if prefill is None:
        _require_prefill(model, limits, output, scenario)
        assumptions.append("the file has no prefill rows: prompts cost no time, and no time to first token is reported")
    else:
        assumptions.append("a prefill pass takes all admitted prompts at once, and decoding waits for it")
    if scenario.trace:
        requests = len(scenario.trace)
    else:
        requests = scenario.requests or max(DEFAULT_REQUESTS, BATCHES_OF_REQUESTS * max_batch)
    warmup = scenario.warmup if scenario.warmup is not None else (0.0 if scenario.trace else 0.1)
    longest = max([s.num_steps for s in policies] + [int(s.max()) for s in steps if len(s)] + [_most(model, scenario)])
    context = _contexts(scenario, output, prompt)
    mix: dict[str, float] | str = dict(zip(names, shares, strict=True)) if len(names) > 1 else names[0]
    key = ("costs", comm, longest, max_batch, context, str(mix))
    costs = _kept(cache, key, lambda: cost_table(model, comm, longest, max_batch, context, mix))
    draws = None
    if scenario.model_draws:
        draws = _kept(
            cache,
            ("draws", *key[1:], scenario.seeds),
            lambda: draws_of(model, comm, longest, max_batch, context, mix, names, scenario.seeds),
        )
        costs = with_draws(costs, draws)
    classes = tuple(
        tuple(_classes(model, scenario, name, longest, draws, table, cache) for name in names)
        for table in range(len(costs.verify_ms))
    )
    plans, rows = _plans(policies, steps, costs, classes, shares, cache, min(_most(model, scenario), longest))
    assumptions += _acceptance_words(scenario)
    stated = Scenario(
        schedule=scenario.schedule,
        arrivals=str(arrivals),
        trace=scenario.trace,
        requests=requests,
        output_tokens=None if scenario.trace else ", ".join(dict.fromkeys(map(str, output))),
        prompt_tokens=None if scenario.trace else ", ".join(dict.fromkeys(map(str, prompt))),
        workload=mix,
        policies=tuple(map(str, policies)),
        max_batch=max_batch,
        comm=comm,
        slo=scenario.slo,
        seeds=scenario.seeds,
        first_seed=scenario.first_seed,
        max_steps=longest,
        acceptance_spread=scenario.acceptance_spread,
        acceptance_wander=scenario.acceptance_wander,
        acceptance_persistence=scenario.acceptance_persistence,
        warmup=warmup,
        model_draws=scenario.model_draws,
    )
    return Prepared(
        scenario=stated,
        arrivals=arrivals,
        policies=policies,
        names=names,
        shares=shares,
        output=output,
        prompt=prompt,
        requests=requests,
        first_counted=min(int(warmup * requests), requests - 1),
        limits=limits,
        costs=costs,
        classes=classes,
        prefill=prefill,
        rows=rows,
        plans=plans,
        start=start,
        assumptions=tuple(assumptions),
        warnings=warnings,
    )


def _arrivals(model: FittedModel, scenario: Scenario) -> Arrivals:
    if scenario.arrivals is not None:
        return arrivals_of(scenario.arrivals)
    measured = model.measured.batches
    return Arrivals(kind="closed", value=float(max(min(DEFAULT_CLIENTS, int(measured[-1])), 1)) if measured else 1.0)


def _kept(cache: Cache, key: Hashable, make: Any) -> Any:
    if key not in cache:
        if len(cache) > 512:
            cache.clear()
        cache[key] = make()
    return cache[key]


def _workloads(model: FittedModel, scenario: Scenario) -> tuple[tuple[str, ...], tuple[float, ...], tuple[str, ...]]:
    if scenario.trace and scenario.workload is None:
        named = [r.workload for r in scenario.trace]
        known = dict.fromkeys(w for w in named if w is not None)
        for name in known:
            model.mixture(name)
            if name not in model.layout.workloads:
                raise UsageError(f"trace: workload {name!r} has no acceptance in {model.calibration.name}")
        if known and None not in named:
            names = tuple(known)
            return names, tuple(named.count(name) / len(named) for name in names), ()
        if known:
            raise UsageError("trace: name the workload of every request or of none")
    elif scenario.trace and any(r.workload is not None for r in scenario.trace):
        raise UsageError("workload: the trace names the workloads of its requests; leave workload out")
    mixture, warnings = model.mixture(scenario.workload)
    return tuple(model.layout.workloads[i] for i in mixture), tuple(mixture.values()), warnings


def _lengths(
    model: FittedModel, scenario: Scenario, names: tuple[str, ...]
) -> tuple[tuple[Lengths, ...], tuple[Lengths, ...], list[str]]:
    if scenario.trace:
        return (), (), []
    said: list[str] = []
    if scenario.output_tokens is not None:
        output = tuple(lengths_of("output_tokens", scenario.output_tokens) for _ in names)
    else:
        stated = {n: model.calibration.workloads.get(n) for n in names}
        counts = [w.output_tokens if w is not None and w.output_tokens else None for w in stated.values()]
        output = tuple(lengths_of("output_tokens", round(max(c or DEFAULT_OUTPUT, 1))) for c in counts)
        if None in counts:
            said.append(f"outputs of {DEFAULT_OUTPUT} tokens: neither the call nor the file states any")
    if scenario.prompt_tokens is not None:
        return output, tuple(lengths_of("prompt_tokens", scenario.prompt_tokens) for _ in names), said
    measured = [default_context(model.calibration, b) for b in model.measured.batches]
    known = [c for c in measured if c is not None]
    if known:
        centre = max(set(known), key=lambda c: (known.count(c), -c))
        prompt = tuple(Lengths(kind="fixed", first=float(max(round(centre - 0.5 * n.mean), 1))) for n in output)
        said.append(f"prompts such that the mean context is the measured {centre} tokens")
    else:
        prompt = tuple(Lengths(kind="fixed", first=float(DEFAULT_PROMPT)) for _ in names)
        said.append(f"prompts of {DEFAULT_PROMPT} tokens; the file states no context, so times do not depend on it")
    return output, prompt, said


def _require_prefill(
    model: FittedModel, limits: dict[str, float], output: tuple[Lengths, ...], scenario: Scenario
) -> None:
    if "ttft" in limits:
        raise UsageError(
            f"slo: ttft cannot be judged without prefill times; add measurements.prefill rows to "
            f"{model.calibration.name}, or leave ttft out"
        )
    longest = max([r.output_tokens for r in scenario.trace] + [int(n.of(np.array([_FAR_TAIL]))[0]) for n in output])
    if longest <= 1:
        raise UsageError(
            "output_tokens: outputs of 1 token come from the prefill alone, and the file has no prefill rows: there is "
            "nothing to simulate; ask for longer outputs"
        )


def _max_batch(model: FittedModel, scenario: Scenario, arrivals: Arrivals) -> int:
    if scenario.max_batch is not None:
        return int(scenario.max_batch)
    if arrivals.kind == "closed":
        if arrivals.value > MOST_BATCH:
            raise UsageError(f"arrivals: {arrivals} needs max_batch; how many of them run at once?")
        return int(arrivals.value)
    return int(min(model.measured.batches[-1], MOST_BATCH)) if model.measured.batches else 1


def _most(model: FittedModel, scenario: Scenario) -> int:
    if scenario.max_steps is not None:
        return int(scenario.max_steps)
    return min(max(10, model.measured.largest_steps), 64)


def _policies(
    model: FittedModel,
    scenario: Scenario,
    max_batch: int,
    names: tuple[str, ...],
    shares: tuple[float, ...],
    context: float,
    cache: Cache,
) -> tuple[tuple[Policy, ...], list[NDArray[np.int64]], str, int, tuple[float, ...]]:
    """Policies, the steps of each by batch, the communication setting, the schedule's steps at batch 1, its trees."""
    wanted = tuple(policy_of(p) for p in scenario.policies)
    most = None if scenario.max_steps is None else int(scenario.max_steps)
    for policy in wanted:
        if most is not None and policy.num_steps > most:
            raise UsageError(f"policies: {policy} drafts more than max_steps {most}")
    if scenario.comm is not None:
        model.comm_index(scenario.comm)
    needed = not wanted or any(p.kind in ("schedule", "adaptive") for p in wanted)
    comm = scenario.comm or (model.comm_names[0] if len(model.comm_names) == 1 else None)
    by_batch, start = np.zeros(0, dtype=np.int64), 0
    trees: tuple[float, ...] = ()
    if needed or comm is None:
        mix: Any = dict(zip(names, shares, strict=True)) if len(names) > 1 else names[0]
        key = ("schedule", comm, str(mix), most, max_batch, context)
        steps = scenario.schedule
        if not steps:
            steps, trees = _kept(cache, key, lambda: chain_schedule(model, comm, mix, most, max_batch, context))
        comm = comm or steps[0].comm
        by_batch = steps_by_batch(steps, max_batch)
        start = int(by_batch[1])
    if not wanted:
        fixed = sorted({0, start} | {int(by_batch[max_batch])})
        kinds = [f"fixed:{k}" for k in fixed] + ["schedule", "adaptive", "optimal", "oracle"]
        wanted = tuple(policy_of(k) for k in kinds)
    rows = []
    for policy in wanted:
        if policy.kind == "fixed":
            rows.append(np.full(max_batch + 1, policy.num_steps, dtype=np.int64))
        elif policy.kind == "schedule":
            rows.append(by_batch)
        elif policy.kind == "adaptive":
            rows.append(np.full(max_batch + 1, 7, dtype=np.int64))  # the most that its tiers name
        else:
            rows.append(np.zeros(0, dtype=np.int64))
    return wanted, rows, str(comm), start, trees


def _mean_context(
    scenario: Scenario, output: tuple[Lengths, ...], prompt: tuple[Lengths, ...], shares: tuple[float, ...]
) -> float:
    """Mean context of a request in the middle of its output, tokens."""
    if scenario.trace:
        return float(np.mean([r.prompt_tokens + 0.5 * r.output_tokens for r in scenario.trace]))
    return float(sum(s * (p.mean + 0.5 * o.mean) for s, p, o in zip(shares, prompt, output, strict=True)))


def _contexts(scenario: Scenario, output: tuple[Lengths, ...], prompt: tuple[Lengths, ...]) -> tuple[float, float]:
    if scenario.trace:
        low = min(r.prompt_tokens for r in scenario.trace)
        high = max(r.prompt_tokens + r.output_tokens for r in scenario.trace)
    else:
        ends = np.array([0.0, _FAR_TAIL])
        low = min(int(n.of(ends)[0]) for n in prompt)
        high = max(int(p.of(ends)[1] + o.of(ends)[1]) for p, o in zip(prompt, output, strict=True))
    return float(max(low, 1)), float(max(high, low + 1, 2))


def _classes(
    model: FittedModel,
    scenario: Scenario,
    name: str,
    longest: int,
    draws: Draws | None,
    table: int,
    cache: Cache,
) -> AcceptanceClasses:
    spread = scenario.acceptance_spread, scenario.acceptance_wander, scenario.acceptance_persistence
    measured = min(model.measured.positions.get(name, longest) or longest, longest)
    if draws is not None:
        return classes_of(draws.survival[name][table], measured, *spread)
    key = ("classes", name, longest, spread)
    return _kept(cache, key, lambda: classes_of(survival_of(model, name, longest), measured, *spread))  # type: ignore[no-any-return]


def _plans(
    policies: tuple[Policy, ...],
    steps: list[NDArray[np.int64]],
    costs: CostTable,
    classes: tuple[tuple[AcceptanceClasses, ...], ...],
    shares: tuple[float, ...],
    cache: Cache,
    most: int,
) -> tuple[NDArray[np.uint8], tuple[NDArray[np.int64], ...]]:
    """Plans of `optimal` and depths of `oracle` of at most `most` steps at the middle context, for every table."""
    kinds = {p.kind for p in policies}
    plans, depths = [], []
    middle = costs.verify_ms.shape[3] // 2
    for table, own in enumerate(classes):
        verify, rest = (x[table, : most + 1, :, middle] for x in (costs.verify_ms, costs.rest_ms))
        joint = AcceptanceClasses(
            survival=np.concatenate([c.survival.mean(axis=1, keepdims=True)[..., :most] for c in own]),
            share=np.concatenate([share * c.share for share, c in zip(shares, own, strict=True)]),
        )
        key = (verify.tobytes(), rest.tobytes(), joint.survival.tobytes(), joint.share.tobytes())
        if "optimal" in kinds:
            by_ease = _kept(cache, ("plan", *key), lambda v=verify, r=rest, j=joint: planned_steps(v, r, j))
            states = [np.repeat(np.arange(len(c.share)), c.survival.shape[1]) for c in own]
            offsets = np.cumsum([0, *[len(c.share) for c in own]])
            plans.append(by_ease[:, np.concatenate([s + o for s, o in zip(states, offsets, strict=False)])])
        if "oracle" in kinds:
            depths.append(_kept(cache, ("depth", *key), lambda v=verify, r=rest, j=joint: oracle_depths(v, r, j)))
    rows = tuple(np.stack(depths) if p.kind == "oracle" else s for p, s in zip(policies, steps, strict=True))
    return np.stack(plans).astype(np.uint8) if plans else np.zeros((0, 0, 0), dtype=np.uint8), rows


def _acceptance_words(scenario: Scenario) -> list[str]:
    if not scenario.acceptance_spread and not scenario.acceptance_wander:
        return ["all requests of a workload are alike"]
    text = f"acceptance differs between requests (intraclass correlation {scenario.acceptance_spread:g}"
    if scenario.acceptance_wander:
        text += f", {scenario.acceptance_wander:g} within, persistence {scenario.acceptance_persistence:g}"
    return [text + "; assumed, not measured)"]
