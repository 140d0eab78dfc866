"""What is simulated: the arrivals, the requests, the policies and the limits, from text to checked values."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import UsageError, shown
from specmodel.request import number
from specmodel.schedule import ScheduleStep

__all__ = [
    "LIMITS",
    "Arrivals",
    "Lengths",
    "Policy",
    "Scenario",
    "TraceRequest",
    "arrivals_of",
    "lengths_of",
    "limits_of",
    "policy_of",
    "scenario_from",
    "trace_from",
]

Array = NDArray[np.float64]
MOST_BATCH, MOST_REQUESTS, MOST_SEEDS, MOST_STEPS, MOST_TOKENS = 4096, 1_000_000, 4096, 100, 1_000_000
LIMITS = ("tpot", "ttft", "latency")
"""What a service-level objective may limit, of each request."""
_UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """How requests arrive: `closed` clients that ask again at once, `poisson` per second, or a `trace`."""

    kind: Literal["closed", "poisson", "trace"]
    value: float = 0.0
    """Clients, or requests per second."""

    def __str__(self) -> str:
        return "trace" if self.kind == "trace" else f"{self.kind}:{self.value:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts, by its quantiles."""

    kind: Literal["fixed", "uniform", "geometric", "lognormal"]
    first: float
    second: float = 0.0
    """The upper end of `uniform`, the coefficient of variation of `lognormal`."""

    def of(self, quantile: Array) -> NDArray[np.int32]:
        """Token counts at quantiles in [0, 1), 1 or more."""
        from scipy.special import ndtri

        if self.kind == "fixed":
            value = np.full(quantile.shape, self.first)
        elif self.kind == "uniform":
            value = np.floor(self.first + quantile * (self.second - self.first + 1.0))
        elif self.kind == "geometric":
            value = np.ones(quantile.shape)
            if self.first > 1.0:
                value = np.ceil(np.log1p(-quantile) / np.log1p(-1.0 / self.first))
        else:
            sigma = math.sqrt(math.log1p(self.second**2))
            mean = math.log(self.first) - 0.5 * sigma**2
            value = np.round(np.exp(mean + sigma * ndtri(np.clip(quantile, 1e-12, 1.0 - 1e-12))))
        return np.asarray(np.clip(value, 1, MOST_TOKENS), dtype=np.int32)

    @property
    def mean(self) -> float:
        """Expected tokens (of `lognormal` before rounding)."""
        return 0.5 * (self.first + self.second) if self.kind == "uniform" else self.first

    def __str__(self) -> str:
        if self.kind == "fixed":
            return f"{self.first:g}"
        if self.kind == "uniform":
            return f"uniform:{self.first:g}-{self.second:g}"
        return f"{self.kind}:{self.first:g}" + (f":{self.second:g}" if self.kind == "lognormal" else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Who chooses the number of draft steps."""

    kind: Literal["fixed", "schedule", "adaptive", "optimal", "oracle"]
    num_steps: int = 0

    @property
    def deployable(self) -> bool:
        """Whether an engine can do it: the other two know what nobody knows beforehand."""
        return self.kind in ("fixed", "schedule", "adaptive")

    def __str__(self) -> str:
        if self.kind != "fixed":
            return self.kind
        return f"fixed:{self.num_steps}" if self.num_steps else "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace."""

    arrival_ms: float
    output_tokens: int
    prompt_tokens: int
    workload: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One load and how it is served; every policy of it sees the same requests.

    What is None is taken from the calibration when it is simulated.
    """

    arrivals: str | None = None
    """``closed:N`` clients, ``poisson:RATE`` requests per second, or ``trace``; by default 8 clients, or the largest
    measured batch where that is smaller."""
    trace: tuple[TraceRequest, ...] = field(default=(), repr=False)
    requests: int | None = None
    """Requests of each seed; by default the larger of 200 and eight batches. A trace has its own."""
    output_tokens: str | None = None
    """A number, ``uniform:LOW-HIGH``, ``geometric:MEAN`` or ``lognormal:MEAN:CV``; by default that of the workload in
    the file, else 256."""
    prompt_tokens: str | None = None
    """In the same forms; by default such that the mean context is the one with most rows."""
    workload: str | Mapping[str, float] | None = None
    """Shares of the requests."""
    schedule: tuple[ScheduleStep, ...] = field(default=(), repr=False)
    """What the policy `schedule` runs, chains; by default what `optimize` gives for every measured batch."""
    policies: tuple[str, ...] = ()
    """``fixed:K``, ``schedule``, ``adaptive``, ``optimal``, ``oracle``; by default one of each kind."""
    max_batch: int | None = None
    """Requests that run at once; by default the largest measured batch."""
    comm: str | None = None
    """By default the setting of the schedule."""
    slo: str | None = None
    """Limits that a request must keep, such as ``tpot=20ms,ttft=500ms``."""
    seeds: int = 16
    first_seed: int = 0
    max_steps: int | None = None
    acceptance_spread: float = 0.05
    """Intraclass correlation of acceptance between requests: 0 makes them alike."""
    acceptance_wander: float = 0.0
    """The same between stretches of one request."""
    acceptance_persistence: float = 0.9
    """Correlation of a request's state from one round to the next, where it wanders."""
    warmup: float | None = None
    """Share of the requests that are not counted; by default 0.1, of a trace 0."""
    model_draws: bool = False
    """Simulate every seed with another draw of the model's posterior, so that intervals hold its uncertainty too."""


def arrivals_of(text: str) -> Arrivals:
    """Read ``closed:N``, ``poisson:RATE`` or ``trace``; raises `UsageError`."""
    kind, _, value = str(text).strip().partition(":")
    if kind == "trace" and not value:
        return Arrivals(kind="trace")
    rate = _number(value)
    if kind == "closed" and rate is not None and 1 <= rate <= MOST_REQUESTS and rate == int(rate):
        return Arrivals(kind="closed", value=rate)
    if kind == "poisson" and rate is not None and 0.0 < rate <= 1e6:
        return Arrivals(kind="poisson", value=rate)
    raise UsageError(
        "arrivals must be closed:N (N clients, a whole number from 1), poisson:RATE (requests per second, above 0 and "
        f"at most 1e6) or a trace, got {text!r}"
    )


def lengths_of(name: str, text: str | float) -> Lengths:
    """Read a number or ``uniform:LOW-HIGH``, ``geometric:MEAN``, ``lognormal:MEAN:CV``; raises `UsageError`."""
    word = str(text).strip()
    kind, _, rest = word.partition(":")
    found = None
    if re.fullmatch(r"[0-9.eE+]+", word):
        found = Lengths(kind="fixed", first=_number(word) or 0.0)
        if found.first != int(found.first):
            found = None
    elif kind == "uniform" and re.fullmatch(r"[0-9]+-[0-9]+", rest):
        low, high = (float(x) for x in rest.split("-"))
        found = Lengths(kind="uniform", first=low, second=high) if low <= high else None
    elif kind == "geometric":
        found = Lengths(kind="geometric", first=_number(rest) or 0.0)
    elif kind == "lognormal" and rest.count(":") == 1:
        mean, spread = (_number(x) for x in rest.split(":"))
        if mean is not None and spread is not None and 0.0 < spread <= 10.0:
            found = Lengths(kind="lognormal", first=mean, second=spread)
    ends = [] if found is None else [found.first, *([found.second] if found.kind == "uniform" else [])]
    if found is None or not all(1 <= x <= MOST_TOKENS for x in ends):
        raise UsageError(
            f"{name} must be a whole number, uniform:LOW-HIGH, geometric:MEAN or lognormal:MEAN:CV, of 1 to "
            f"{MOST_TOKENS} tokens (CV, the standard deviation over the mean, above 0 and at most 10), got {text!r}"
        )
    return found


def policy_of(text: str) -> Policy:
    """Read ``fixed:K`` or one of the other names; ``plain`` is ``fixed:0``. Raises `UsageError`."""
    word = str(text).strip()
    kind, _, value = word.partition(":")
    if word == "plain":
        return Policy(kind="fixed", num_steps=0)
    if kind == "fixed" and re.fullmatch(r"[0-9]{1,3}", value) and int(value) <= MOST_STEPS:
        return Policy(kind="fixed", num_steps=int(value))
    if word in ("schedule", "adaptive", "optimal", "oracle"):
        return Policy(kind=word)  # type: ignore[arg-type]
    raise UsageError(
        f"a policy is plain, fixed:K (K from 0 to {MOST_STEPS}), schedule, adaptive, optimal or oracle, got {text!r}"
    )


def limits_of(text: str | None) -> dict[str, float]:
    """Read ``tpot=20ms,ttft=0.5s`` into milliseconds; raises `UsageError`."""
    out: dict[str, float] = {}
    for part in [] if text is None else str(text).split(","):
        found = re.fullmatch(r"\s*([a-z_]+)\s*=\s*([0-9.eE+-]+)\s*(us|ms|s|)\s*", part)
        value = _number(found.group(2)) if found else None
        if found is None or value is None or not value > 0 or found.group(1) not in LIMITS:
            raise UsageError(
                "slo must be limits of a request's time per token, time to first token or latency, such as "
                f"tpot=20ms,ttft=500ms,latency=30s, got {text!r}"
            )
        if found.group(1) in out:
            raise UsageError(f"slo: {found.group(1)} is limited twice in {text!r}")
        out[found.group(1)] = value * _UNITS_MS[found.group(3)]
    return out


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def checked_scenario(scenario: Scenario) -> Scenario:
    """Return the scenario if its numbers are within their domains; raises `UsageError`."""
    arrivals = arrivals_of("closed:8" if scenario.arrivals is None else scenario.arrivals)
    if (arrivals.kind == "trace") != bool(scenario.trace):
        raise UsageError(
            "arrivals: the trace has no request" if arrivals.kind == "trace" else "a trace was given beside arrivals"
        )
    for name in ("output_tokens", "prompt_tokens"):
        value = getattr(scenario, name)
        if value is not None:
            lengths_of(name, value)
            if arrivals.kind == "trace":
                raise UsageError(f"{name}: a trace states the tokens of its requests; leave {name} out")
    if arrivals.kind == "trace" and scenario.requests is not None:
        raise UsageError("requests: a trace has its own; leave requests out")
    if scenario.requests is not None:
        number("requests", scenario.requests, 1.0, MOST_REQUESTS, whole=True)
    number("seeds", scenario.seeds, 1.0, MOST_SEEDS, whole=True)
    number("first_seed", scenario.first_seed, 0.0, 2.0**31, whole=True)
    for name in ("max_batch", "max_steps"):
        if getattr(scenario, name) is not None:
            most = MOST_BATCH if name == "max_batch" else MOST_STEPS
            number(name, getattr(scenario, name), 1.0 if name == "max_batch" else 0.0, most, whole=True)
    for name, top in (("acceptance_spread", 0.9), ("acceptance_wander", 0.9), ("acceptance_persistence", 1.0)):
        number(name, getattr(scenario, name), 0.0, top)
    if scenario.warmup is not None:
        number("warmup", scenario.warmup, 0.0, 0.9)
    limits_of(scenario.slo)
    for policy in scenario.policies:
        policy_of(policy)
    for step in scenario.schedule:
        if step.topk > 1 or step.num_steps > MOST_STEPS:
            raise UsageError(f"schedule: chains of up to {MOST_STEPS} steps only, got {step}")
    if len({str(policy_of(p)) for p in scenario.policies}) < len(scenario.policies):
        raise UsageError(f"policies: one of {', '.join(scenario.policies)} is named twice")
    return scenario


def scenario_from(options: Mapping[str, Any], source: str = "scenario") -> Scenario:
    """Return a scenario from plain values, as a grid file or a program states them.

    Raises
    ------
    UsageError
        For an option that does not exist, or a value that it does not allow; it names the option.
    """
    known = {f.name for f in fields(Scenario)} - {"trace", "schedule"}
    values = dict(options)
    if "policy" in values:
        values["policies"] = values.pop("policy")
    for name in values:
        if name not in known:
            allowed = ", ".join(sorted({*known - {"policies"}, "policy"}))
            raise UsageError(f"{source}: {name!r} is no option of a scenario; use {allowed}")
    for name, value in values.items():
        if name == "policies":
            words = (value,) if isinstance(value, str) else value
            if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
                raise UsageError(f"{source}: policy must be a name or a list of names, got {shown(value)}")
            values[name] = tuple(words)
        elif name == "workload" and not isinstance(value, str | Mapping | None):
            raise UsageError(f"{source}: workload must be a name or shares by name, got {shown(value)}")
        elif name in ("arrivals", "comm", "slo") and not isinstance(value, str | None):
            raise UsageError(f"{source}: {name} must be text, got {shown(value)}{_meant(value)}")
        elif name in ("output_tokens", "prompt_tokens") and value is not None:
            values[name] = str(lengths_of(f"{source}: {name}", value))
        elif name == "model_draws" and not isinstance(value, bool):
            raise UsageError(f"{source}: model_draws must be true or false, got {value!r}")
        elif name not in ("workload", "arrivals", "comm", "slo", "model_draws") and value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{source}: {name} must be a number, got {value!r}")
            if isinstance(value, float) and value == int(value if math.isfinite(value) else 0):
                values[name] = int(value) if name not in ("acceptance_persistence",) else value
    try:
        return checked_scenario(Scenario(**values))
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None


def _meant(value: Any) -> str:
    """Return what to write where YAML made a mapping of ``closed: 4``; empty where it did not."""
    if not isinstance(value, Mapping) or len(value) != 1:
        return ""
    ((key, inner),) = value.items()
    if not isinstance(inner, str | int | float):
        return ""
    return f'; write "{key}:{inner}", without a space after the colon'


def trace_from(rows: Sequence[Any], source: str) -> tuple[tuple[TraceRequest, ...], tuple[str, ...]]:
    """Return the requests of a trace in the order of their arrival, and warnings.

    Parameters
    ----------
    rows : sequence of mapping
        Each with ``arrival_ms``, ``output_tokens``, and where known ``prompt_tokens`` (else 0) and ``workload``.
    source : str
        What messages call it by; the row's number, from 1, is added.

    Raises
    ------
    UsageError
        It names the row, what it holds and what is allowed.
    """
    out = []
    for i, row in enumerate(rows, start=1):
        where = f"{source}, line {i}"
        if not isinstance(row, Mapping):
            raise UsageError(f"{where}: must be an object such as {_EXAMPLE_ROW}, got {shown(row)}")
        extra = set(row) - {"arrival_ms", "output_tokens", "prompt_tokens", "workload"}
        if extra:
            raise UsageError(f"{where}: {sorted(map(str, extra))[0]!r} is no key of a request; write {_EXAMPLE_ROW}")
        arrival = _row_number(where, row, "arrival_ms", 0.0, 1e12, whole=False)
        output = _row_number(where, row, "output_tokens", 1, MOST_TOKENS)
        prompt = _row_number(where, row, "prompt_tokens", 0, MOST_TOKENS) if "prompt_tokens" in row else 0
        workload = row.get("workload")
        if workload is not None and not isinstance(workload, str):
            raise UsageError(f"{where}: workload must be a name, got {workload!r}")
        out.append(
            TraceRequest(arrival_ms=arrival, output_tokens=int(output), prompt_tokens=int(prompt), workload=workload)
        )
    if not out:
        raise UsageError(f"{source}: the trace has no request; write one a line, such as {_EXAMPLE_ROW}")
    if len(out) > MOST_REQUESTS:
        raise UsageError(f"{source}: at most {MOST_REQUESTS} requests, got {len(out)}; cut the trace")
    late = sum(b.arrival_ms < a.arrival_ms for a, b in itertools.pairwise(out))
    warnings: tuple[str, ...] = (
        (f"{source}: {late} line(s) arrive before the line above; taken in the order of arrival",) if late else ()
    )
    if any(r.prompt_tokens == 0 for r in out):
        warnings += (f"{source}: requests without prompt_tokens are taken with none: no prefill, no context to read",)
    return tuple(sorted(out, key=lambda r: r.arrival_ms)), warnings


_EXAMPLE_ROW = '{"arrival_ms": 250, "prompt_tokens": 800, "output_tokens": 200}'


def _row_number(where: str, row: Mapping[str, Any], key: str, least: float, most: float, whole: bool = True) -> float:
    value = row.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        number_ = float(value)
        if not whole or number_ == int(number_):
            return number_
    kind = "a whole number" if whole else "a number"
    raise UsageError(
        f"{where}: {key} must be {kind} from {least:g} to {most:g}, got {shown(value)}; see {_EXAMPLE_ROW}"
    )
