"""What a simulation says: throughput, latencies and goodput of every policy, with intervals, and who wins."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.simulate.scenario import Policy, Scenario

__all__ = [
    "LEVEL",
    "Comparison",
    "Estimate",
    "PolicyResult",
    "Simulation",
    "Spread",
    "compared",
    "estimate",
    "summarised",
]

Array = NDArray[np.float64]
LEVEL = 0.9
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over the seeds and its 90 % interval."""

    mean: float
    low: float
    high: float
    """NaN where there is one seed only, as is `low`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A quantity of the requests: its mean and percentiles, each with an interval over the seeds."""

    mean: Estimate
    p50: Estimate
    p90: Estimate
    p99: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """One policy under one load."""

    policy: str
    deployable: bool
    tok_s: Estimate
    """Output tokens per second of all requests together."""
    user_tok_s: Estimate
    """1000 over the mean time per token: what one user sees."""
    tpot_ms: Spread | None
    """Time per token after the first, of requests with more than one."""
    ttft_ms: Spread | None
    """Time to the first token; None where the file has no prefill rows."""
    latency_ms: Spread
    """From arrival to the last token; without prefill rows, no prefill in it."""
    wait_ms: Spread
    """From arrival to admission."""
    request_rate: Estimate
    """Requests per second."""
    goodput_tok_s: Estimate | None
    """Tokens per second of requests that keep every limit; None without limits."""
    good_share: Estimate | None
    acceptance_length: Estimate
    mean_batch: Estimate
    """Over the time in cycles."""
    mean_steps: Estimate
    cycles: Estimate
    """Cycles of a request."""
    time_at: tuple[tuple[int, int, float], ...]
    """(num_steps, batch, share of the time in cycles): of policies that differ by request, the longest of the batch."""
    prefill_share: float
    extrapolated_share: float
    """Share of the time in cycles at points too far from what was measured."""
    queue_grows: bool
    seed_values: dict[str, Array] = field(repr=False)
    """By seed: tok_s, latency_ms, goodput_tok_s, good_share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One policy against another over the same requests: a factor above 1 is better."""

    policy: str
    baseline: str
    quantity: str
    factor: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The answer of `simulate`: every policy of a scenario under the same requests."""

    scenario: Scenario
    objective: str
    """goodput_tok_s with limits, unless all of an open load keeps them; else tok_s if closed, latency_ms if open."""
    results: tuple[PolicyResult, ...]
    schedule: tuple[tuple[int, int, int], ...]
    """(first batch, last batch, num_steps) of the policy `schedule`; empty without it."""
    best: str
    """The best policy that an engine can run."""
    tied: tuple[str, ...]
    """Policies that an engine can run and that are not surely worse."""
    comparisons: tuple[Comparison, ...]
    model_interval: tuple[float, float] | None
    """90 % interval of the model's own tok/s where the best policy spends most time, as factors of its mean."""
    interval_covers: str
    assumptions: tuple[str, ...]
    warnings: tuple[str, ...]

    def __getitem__(self, policy: str) -> PolicyResult:
        """Result of a policy by its name."""
        for result in self.results:
            if result.policy == policy:
                return result
        raise KeyError(policy)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; what does not exist is None."""
        out: dict[str, Any] = _plain(dataclasses.asdict(self))
        del out["scenario"]["trace"], out["scenario"]["schedule"]
        out["schedule"] = [dict(zip(("batch_from", "batch_to", "num_steps"), s, strict=True)) for s in self.schedule]
        for result in out["results"]:
            result["time_at"] = [{"num_steps": k, "batch": b, "share": share} for k, b, share in result["time_at"]]
            del result["seed_values"]
        return out


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"mean", "low", "high"}:
            interval = None if math.isnan(value["low"]) else [value["low"], value["high"]]
            return {"mean": _plain(value["mean"]), "interval": interval}
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def estimate(values: Array, *, of_each: bool = False) -> Estimate:
    """Mean over the seeds with Student's interval of the mean, or with `of_each` of one further seed."""
    from scipy.special import stdtrit

    good = values[np.isfinite(values)]
    if not len(good):
        return Estimate(mean=math.nan, low=math.nan, high=math.nan)
    mean = float(good.mean())
    if len(good) < 2:
        return Estimate(mean=mean, low=math.nan, high=math.nan)
    sd = float(good.std(ddof=1)) * math.sqrt(1.0 / len(good) + (1.0 if of_each else 0.0))
    half = float(stdtrit(len(good) - 1, 0.5 + LEVEL / 2.0)) * sd
    return Estimate(mean=mean, low=mean - half, high=mean + half)


def _spread(values: Array, *, of_each: bool) -> Spread | None:
    """Mean and percentiles of each seed (a row), NaN left out."""
    if np.isnan(values).any():
        rows = [row[np.isfinite(row)] for row in values]
        rows = [row if len(row) else np.array([np.nan]) for row in rows]
        if all(np.isnan(row).all() for row in rows):
            return None
        means = np.array([row.mean() for row in rows])
        points = np.stack([np.percentile(row, PERCENTILES) for row in rows], axis=1)
    else:
        means, points = values.mean(axis=1), np.percentile(values, PERCENTILES, axis=1)
    return Spread(
        mean=estimate(means, of_each=of_each),
        p50=estimate(points[0], of_each=of_each),
        p90=estimate(points[1], of_each=of_each),
        p99=estimate(points[2], of_each=of_each),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What `summarised` needs of the lanes of one policy, a row a seed; of an `Outcome`, cut to its requests."""

    arrival_ms: Array
    admitted_ms: Array
    first_ms: Array
    finish_ms: Array
    output_tokens: NDArray[np.int32]
    cycles: NDArray[np.int32]
    overshoot: NDArray[np.int32]
    time_at_ms: Array
    prefill_ms: Array
    tokens: NDArray[np.int64]
    request_rounds: NDArray[np.int64]
    window_ms: Array
    window_tokens: NDArray[np.int64]


def summarised(
    policy: Policy,
    served: Served,
    *,
    first_counted: int,
    whole_run: bool,
    has_prefill: bool,
    limits: dict[str, float],
    far: NDArray[np.bool_],
    open_loop: bool,
    of_each: bool,
) -> PolicyResult:
    """Return the result of one policy.

    Parameters
    ----------
    policy, served
    first_counted : int
        Requests before it are warm-up.
    whole_run : bool
        Count all time from the first arrival to the last token, not the part while requests still wait.
    has_prefill : bool
    limits : dict
        Milliseconds by name.
    far : numpy.ndarray of bool, shape (steps + 1, batch + 1)
        Points too far from what was measured.
    open_loop : bool
        Requests arrive by themselves.
    of_each : bool
        Intervals are those of one further seed.
    """
    counted = slice(first_counted, None)
    arrival, finish = served.arrival_ms[:, counted], served.finish_ms[:, counted]
    first, admitted = served.first_ms[:, counted], served.admitted_ms[:, counted]
    output = served.output_tokens[:, counted]
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (finish - first) / np.maximum(output - 1, 1), np.nan)
    ttft, latency, wait = first - arrival, finish - arrival, admitted - arrival
    span = served.finish_ms.max(axis=1) - served.arrival_ms.min(axis=1)
    window = np.zeros(len(span), dtype=bool) if whole_run else served.window_ms > 0.0
    time = np.where(window, served.window_ms, span)
    tokens = np.where(window, served.window_tokens, served.tokens)
    with np.errstate(divide="ignore", invalid="ignore"):
        tok_s = np.where(time > 0.0, 1000.0 * tokens / time, np.nan)
    good = np.ones(output.shape, dtype=bool)
    for name, limit in limits.items():
        value = {"tpot": tpot, "ttft": ttft, "latency": latency}[name]
        good &= ~(value > limit)  # a request of one token has no time per token to exceed
    good_tokens = (output * good).sum(axis=1) / output.sum(axis=1)
    good_share = good.mean(axis=1)
    in_cycles = served.time_at_ms.sum(axis=(1, 2))
    busy = np.maximum(in_cycles, 1e-300)
    steps, sizes = np.arange(served.time_at_ms.shape[1]), np.arange(served.time_at_ms.shape[2])
    rounds = np.maximum(served.request_rounds, 1)
    emitted = served.tokens - served.output_tokens.shape[1] + served.overshoot.sum(axis=1)
    share = (served.time_at_ms / busy[:, None, None]).mean(axis=0)
    mean_tpot = np.array([np.nanmean(row) if np.isfinite(row).any() else np.nan for row in tpot])

    def over_seeds(values: Array) -> Estimate:
        return estimate(np.asarray(values, dtype=float), of_each=of_each)

    def spread(values: Array) -> Spread | None:
        return _spread(values, of_each=of_each)

    spread_latency, spread_wait = spread(latency), spread(wait)
    if spread_latency is None or spread_wait is None:
        raise RuntimeError("a request did not end")
    with np.errstate(divide="ignore"):
        user = 1000.0 / mean_tpot
    return PolicyResult(
        policy=str(policy),
        deployable=policy.deployable,
        tok_s=over_seeds(tok_s),
        user_tok_s=over_seeds(np.where(np.isfinite(user), user, np.nan)),
        tpot_ms=spread(tpot),
        ttft_ms=spread(ttft) if has_prefill else None,
        latency_ms=spread_latency,
        wait_ms=spread_wait,
        request_rate=over_seeds(tok_s / output.mean(axis=1)),
        goodput_tok_s=over_seeds(tok_s * good_tokens) if limits else None,
        good_share=over_seeds(good_share) if limits else None,
        acceptance_length=over_seeds(np.where(served.request_rounds > 0, emitted / rounds, np.nan)),
        mean_batch=over_seeds(served.time_at_ms.sum(axis=1) @ sizes / busy),
        mean_steps=over_seeds(served.time_at_ms.sum(axis=2) @ steps / busy),
        cycles=over_seeds(served.cycles[:, counted].mean(axis=1)),
        time_at=tuple((int(k), int(b), float(share[k, b])) for k, b in np.argwhere(share > 0.0)),
        prefill_share=float(np.mean(served.prefill_ms / np.maximum(span, 1e-300))),
        extrapolated_share=float(share[far].sum()),
        queue_grows=open_loop and _grows(wait, latency),
        seed_values={
            "tok_s": tok_s,
            "latency_ms": latency.mean(axis=1),
            "goodput_tok_s": tok_s * good_tokens,
            "good_share": good_share,
        },
    )


def _grows(wait: Array, latency: Array) -> bool:
    """Whether later requests wait ever longer: the last quarter against the second, beyond a request's own time."""
    quarter = wait.shape[1] // 4
    if quarter < 5:
        return False
    early, late = wait[:, quarter : 2 * quarter].mean(axis=1), wait[:, -quarter:].mean(axis=1)
    service = (latency - wait).mean()
    return bool(np.median(late - early) > 0.5 * service and np.median(late) > 1.5 * np.median(early))


def compared(results: Sequence[PolicyResult], objective: str) -> tuple[str, tuple[str, ...], tuple[Comparison, ...]]:
    """Return the best policy that can be deployed, those not surely worse, and the paired comparisons with it.

    Every other policy is the baseline of one comparison. Policies share their seeds, so the luck of a seed cancels.
    """

    def values(result: PolicyResult) -> Array:
        return result.seed_values[objective]

    sign = -1.0 if objective == "latency_ms" else 1.0
    able = [r for r in results if r.deployable] or list(results)
    best = max(able, key=lambda r: _score(values(r), sign))
    comparisons, tied = [], []
    for r in results:
        if r is best:
            continue
        own, other = values(best), values(r)
        if np.all(own > 0.0) and np.all(other > 0.0):
            ratio = estimate(sign * np.log(own / other))
            factor = Estimate(mean=math.exp(ratio.mean), low=math.exp(ratio.low), high=math.exp(ratio.high))
        else:
            # Nothing of one of the two is good in some seed: there is no ratio seed by seed.
            factor = Estimate(
                mean=float(own.mean() / other.mean()) if other.mean() > 0.0 else math.inf, low=math.nan, high=math.nan
            )
        comparisons.append(Comparison(policy=best.policy, baseline=r.policy, quantity=objective, factor=factor))
        # Without an interval a twentieth decides.
        if r.deployable and (factor.mean < 1.05 if math.isnan(factor.low) else factor.low <= 1.0):
            tied.append(r.policy)
    return best.policy, tuple(tied), tuple(comparisons)


def _score(values: Array, sign: float) -> float:
    mean = float(np.mean(values))
    return sign * mean if math.isfinite(mean) else -math.inf
