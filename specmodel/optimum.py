"""What a decision is: candidates, the chosen one, its rivals and ceilings, and the next measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Adaptivity", "Candidate", "Ceiling", "NextMeasurement", "Objective", "Optimum", "Plain"]

Objective = Literal["tok_s", "tpot_ms", "goodput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One configuration: what is predicted of it and how good it is among the others."""

    num_steps: int
    num_draft_tokens: int
    topk: int
    comm: str
    batch: float
    tok_s: float
    tok_s_interval: tuple[float, float]
    tpot_ms: float
    cycle_ms: float
    verify_ms: float
    draft_ms: float
    overhead_ms: float
    acceptance_length: float
    speedup: float
    probability_best: float
    expected_regret: float
    """Expected loss against the best candidate, as a fraction of this one's tok_s."""
    extrapolated: bool
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """Plain decoding that speedups are over."""

    comm: str
    tok_s: float
    tok_s_interval: tuple[float, float]
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """The most that perfecting one lever could bring at the chosen steps, with a 90 % interval."""

    speedup: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adaptivity:
    """What a draft length that adapts could bring over the chosen chain, as fractions of its tok_s."""

    stopping_gain: float
    """At most, where drafting is stopped by the drafter's confidence: a bound, no promise."""
    workload_gain: float | None
    """Where every workload has the K that is best for it alone; None where there is only one."""
    workload_steps: dict[str, int]
    """That K of each workload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextMeasurement:
    """The measurement whose result is expected to bring most for what it takes."""

    kind: Literal["cycles", "verify", "draft", "allreduce", "acceptance"]
    row: dict[str, Any]
    reason: str
    gain_tok_s: float
    """Expected gain of knowing it, without weighing what it takes."""
    effort: float
    """What it takes, relative to one point of a table of passes (see `next_measurement.EFFORT`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """The answer for one batch (or one distribution of batches)."""

    batch: float
    best: Candidate
    ties: tuple[Candidate, ...]
    table: tuple[Candidate, ...]
    plain: Plain
    ceilings: dict[str, Ceiling]
    measure_next: NextMeasurement | None
    stop_reason: str
    """Why nothing is to be measured, empty where something is."""
    unmeasured: tuple[str, ...]
    """What the answer rests on without a measurement, in words."""
    warnings: tuple[str, ...]
    objective: Objective = "tok_s"
    adaptivity: Adaptivity | None = None
    """What a length that adapts could bring; None where that is not known."""

    @property
    def probability_best(self) -> float:
        """Probability that no other candidate of the call is faster than the chosen one."""
        return self.best.probability_best

    @property
    def expected_regret(self) -> float:
        """Expected loss of the chosen one against the best, as a fraction of its tok_s."""
        return self.best.expected_regret
