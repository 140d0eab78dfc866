"""The verdict: what a cycle costs in plain steps, what is accepted, and which of the two is the problem.

Where the rows state the speeds and the acceptance length these are quotients of measured numbers, with the noise of
those; elsewhere they come from the posterior. A culprit is named only where the interval allows no other answer, or
where a number lies outside what nine published deployments in ten show (`specmodel.drafters`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmodel.diagnosed import Case, harmonic, interval_90
from specmodel.diagnosis import Culprit, Finding
from specmodel.drafters import STEP_COST, Reach, acceptance_a_draft, chain_length, reach_of_kind
from specmodel.expectations import shape_text
from specmodel.levers import KNOWN
from specmodel.parts import verify_terms
from specmodel.speeds import Noise, stated_speed

__all__ = ["Balance", "Quantity", "balance_of", "percent", "verdict_of"]

Array = NDArray[np.float64]
NORMAL_90 = 1.645
MARGIN = 0.97
"""A number is out of the usual where it is so even by this factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A value with its 90 % interval."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough to judge by."""
        return self.high <= KNOWN * self.low

    @property
    def interval(self) -> tuple[float, float]:
        """Both ends."""
        return self.low, self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What stands on both sides: cost of a cycle in plain steps, and tokens that it emits."""

    cycle: Quantity
    length: Quantity
    speedup: Quantity
    length_stated: bool
    plain_measured: bool
    experts: Array
    """Plain steps that the experts touched by further tokens cost, of every point: the target's, not the engine's."""


def balance_of(case: Case) -> Balance:
    """Quotients of measured numbers where they are there, else of the posterior."""
    parts, at, base = case.parts, case.chosen, case.plain
    cycle_draws = parts.cycle_ms[:, at] / parts.cycle_ms[:, base]
    length_draws = parts.acceptance_length[:, at]
    speedup_draws = parts.tok_s[:, at] / parts.tok_s[:, base]
    cycle, length, speedup = (_of_draws(x) for x in (cycle_draws, length_draws, speedup_draws))
    known = case.model.measured.positions
    stated = all(known.get(w, 0) >= case.shape[0] for w in case.workloads)
    rows = case.rows
    if rows and all(f.length is not None for _, f in rows):
        stated = True
    quotient = case.measured_speedup
    if quotient is not None:
        sd = _speed_sd(case)
        length_sd = _length_sd(case, float(np.std(np.log(length_draws))))
        speedup = _around(quotient, sd)
        emitted = harmonic([(share, f.length) for share, f in rows])
        if emitted is not None:
            length = _around(emitted, length_sd)
            cycle = _around(emitted / quotient, float(np.hypot(sd, length_sd)))
    elif case.fact is not None and case.fact.cycle_ms is not None and case.plain_of(case.fact) is not None:
        # A cycle time without an acceptance length: what it costs is known, what it brings is not.
        plain_ms = 1000.0 * case.batch / (case.plain_of(case.fact) or 1.0)
        cycle = _around(sum(case.fact.cycle_ms) / 2.0 / plain_ms, _speed_sd(case))
    return Balance(
        cycle=cycle,
        length=Quantity(value=length.value, low=max(length.low, 1.0), high=length.high),
        speedup=speedup,
        length_stated=stated,
        plain_measured=case.plain_tok_s is not None,
        experts=_experts(case),
    )


def _of_draws(draws: Array) -> Quantity:
    low, high = interval_90(draws)
    return Quantity(value=float(np.median(draws)), low=low, high=high)


def _around(value: float, sd: float) -> Quantity:
    factor = float(np.exp(min(NORMAL_90 * sd, 20.0)))  # a wider one says no less
    return Quantity(value=value, low=value / factor, high=value * factor)


def _speed_sd(case: Case) -> float:
    """Relative standard deviation of the quotient of the two speeds, as noisy as the file has proved to be."""
    noise, model = Noise(), case.model
    own = [(stated_speed(f.row, noise) or ("", 0.0, noise.cycle))[2] for _, f in case.rows]
    out = max(own, default=noise.cycle) ** 2
    plain = [
        stated[2]
        for row in model.calibration.measurements.cycles
        if not row.speculating and row.batch == case.batch and (stated := stated_speed(row, noise)) is not None
    ]
    out += min(plain, default=noise.cycle) ** 2
    return float(np.sqrt(out * max(model.posteriors[0].noise_scale, 1.0)))


def _length_sd(case: Case, posterior_sd: float) -> float:
    """Of the acceptance length: where drafting may stop early the curve does not say it, and what is stated does."""
    rows = [f.row for _, f in case.rows]
    if any(row.acceptance_length is None or row.mean_draft_tokens is None for row in rows):
        return posterior_sd
    own = max(Noise().length * (1.0 - 1.0 / (row.acceptance_length or 1.0)) for row in rows)
    return min(posterior_sd, float(own * np.sqrt(max(case.model.posteriors[0].noise_scale, 1.0))))


def _experts(case: Case) -> Array:
    """Of every point."""
    if case.model.deployment.structure.num_experts == 0:
        return np.zeros(len(case.far))
    experts = verify_terms(case.model, case.request)["experts"]
    plain_ms = float(np.median(case.parts.cycle_ms[:, case.plain]))
    return np.asarray(np.maximum(experts - experts[case.plain], 0.0) / plain_ms)


def verdict_of(case: Case, balance: Balance, findings: Sequence[Finding]) -> tuple[str, Culprit]:
    """The verdict in one sentence, and who is the problem."""
    steps, topk, tokens = case.shape
    name = shape_text(steps, topk, tokens) + ("" if case.comm == "default" else f" ({case.comm})")
    impossible = _impossible(case, findings)
    if impossible is not None:
        return f"the numbers contradict each other, so no verdict rests on them: {impossible}", "measurement"
    zero = _nothing_drafted(case)
    if zero is not None:
        return zero
    if not balance.plain_measured and not balance.speedup.known:
        return _without_plain(case, balance, name), "unknown"
    if not case.measured and not balance.speedup.known:
        return _unmeasured(case, balance, name), "unknown"
    if not balance.length_stated and not balance.length.known:
        return _without_length(case, balance, name)
    have = f"you have {balance.length.value:.2f}"
    if not balance.length_stated:
        have = f"by the speeds you have about {balance.length.value:.2f}"
    at = balance.cycle
    head = (
        f"one cycle of {name} costs {at.value:.2f} plain steps ({at.low:.2f} to {at.high:.2f}), you need an "
        f"acceptance length above {at.value:.2f}, {have}"
    )
    tail, culprit = _who(case, balance)
    told = "" if case.measured else "; predicted, not measured"
    if case.measured and not balance.plain_measured:
        told = "; plain decoding at this batch is predicted, not measured"
    return f"{head}: {tail}{told}", culprit


def _impossible(case: Case, findings: Sequence[Finding]) -> str | None:
    """The finding that makes the numbers of the diagnosed rows impossible."""
    bad = [f for f in findings if f.impossible]
    rows = [f.index for _, f in case.rows] or [f.index for f in case.facts]
    for finding in bad:
        if any(f"cycles[{i}]" in finding.where for i in rows if case.facts[i].row.batch == case.batch):
            return finding.message
    return None


def _nothing_drafted(case: Case) -> tuple[str, Culprit] | None:
    """Where the only speculative rows draft nothing: what having speculation on costs."""
    if any(f.row.num_steps for f in case.facts) or case.model.calibration.acceptance:
        return None
    zero = [f for f in case.facts if f.row.speculating and f.rate is not None and f.row.batch == case.batch]
    if not zero or case.plain_tok_s is None:
        return None
    ratio = case.plain_tok_s / max(f.rate or 0.0 for f in zero)
    text = (
        f"a step with speculation on and nothing drafted costs {ratio:.3f} plain steps, so you need an acceptance "
        f"length above {ratio:.3f} before a draft is paid for; with drafts nothing was measured: which of drafter and "
        "engine is the problem cannot be told"
    )
    return text, "unknown"


def _without_plain(case: Case, balance: Balance, name: str) -> str:
    most = case.shape[0] + 1
    length = balance.length
    stated = balance.length_stated or length.known
    have = (
        f"you have an acceptance length of {length.value:.2f}, so speculation cannot gain more than {length.value:.2f} "
        f"times"
        if stated
        else f"{name} cannot gain more than {most} times"
    )
    reach = reach_of_kind(case.model.calibration.model.method)
    lower = stated and reach is not None and length.high < MARGIN * chain_length(reach.low, case.shape[0])
    rider = f"; the drafter stands out: {_drafter_text(case, balance, reach)}" if lower else ""
    return (
        f"plain decoding was not measured at {_place_text(case)}, so what a cycle costs in plain steps, and whether "
        f"drafter or engine is the problem, cannot be told: {have}; measure plain decoding there (num_steps: 0){rider}"
    )


def _place_text(case: Case) -> str:
    """Name the batch, and the context where plain decoding was measured at another one."""
    other = any(not f.row.speculating and f.row.batch == case.batch for f in case.facts)
    context = f" and a context of {case.context_tokens} tokens" if other and case.context_tokens is not None else ""
    return f"batch {case.batch:g}{context}"


def _unmeasured(case: Case, balance: Balance, name: str) -> str:
    at, length = balance.cycle, balance.length
    have = f"and the acceptance length about {length.value:.2f}" if length.known else "and acceptance is not known"
    return (
        f"no cycle with drafts was measured at batch {case.batch:g}: one cycle of {name} is predicted to cost "
        f"{max(at.low, 1.0):.2f} to {at.high:.2f} plain steps, which is the acceptance length you need, {have}: "
        "whether drafter or engine is the problem cannot be told before one is measured"
    )


def _without_length(case: Case, balance: Balance, name: str) -> tuple[str, Culprit]:
    """Speeds alone: their ratio is known, what it is made of is not, unless one end decides."""
    if case.fact is not None and case.fact.tok_s is None:
        return _cycle_alone(case, balance, name)
    speedup, gain = balance.speedup, _gain_text(balance.speedup)
    low, high = max(1.0 / speedup.value, 1.0), (case.shape[0] + 1.0) / speedup.value
    if speedup.low > 1.0:
        return (
            f"one cycle of {name} costs {low:.2f} to {high:.2f} plain steps, you need an acceptance length above that "
            f"and have it, though it is not stated: nothing is the problem, {gain}",
            "nothing",
        )
    start = f"one cycle of {name} costs {low:.2f} to {high:.2f} plain steps, you need an acceptance length above that"
    if low > _usual(case, balance, STEP_COST.high):
        return f"{start}, and have none stated: the engine is the problem, {gain}", "engine"
    text = f"{start}, and none is stated: {gain}, and whether the drafter or the engine is the problem cannot be told"
    return f"{text}; state the acceptance length", "unknown"


def _cycle_alone(case: Case, balance: Balance, name: str) -> tuple[str, Culprit]:
    """A cycle time alone: what must be accepted is known, what is accepted is not."""
    at, most = balance.cycle, min(case.shape[0] + 1, case.shape[2])
    head = (
        f"one cycle of {name} costs {at.value:.2f} plain steps ({at.low:.2f} to {at.high:.2f}), you need an "
        f"acceptance length above {at.value:.2f}"
    )
    if at.low > most:
        return f"{head}, and a cycle cannot emit more than {most} tokens: the engine is the problem", "engine"
    if at.low > _usual(case, balance, STEP_COST.high):
        engine = _engine_text(case, balance, case.chosen, at.value)
        return f"{head}, and have none stated: the engine is the problem: {engine}", "engine"
    text = "and none is stated: whether the drafter or the engine is the problem cannot be told"
    return f"{head}, {text}; state the acceptance length", "unknown"


def _usual(case: Case, balance: Balance, per_step: float, point: int | None = None) -> float:
    """Plain steps of a cycle at so much a step, and what the target's experts add."""
    at = case.chosen if point is None else point
    return 1.0 + per_step * case.shapes[at % len(case.shapes)][0] + float(balance.experts[at])


def percent(value: float) -> str:
    """Write a share in percent."""
    return f"{100 * value:.1f} %"


def _gain_text(speedup: Quantity) -> str:
    """Write a gain or a loss with its interval."""
    low, high = speedup.low - 1.0, speedup.high - 1.0
    if speedup.low > 1.0:
        return f"speculation gains {percent(speedup.value - 1.0)} ({100 * low:.1f} to {percent(high)})"
    if speedup.high < 1.0:
        return f"speculation loses {percent(1.0 - speedup.value)} ({-100 * high:.1f} to {percent(-low)})"
    return f"speculation neither gains nor loses clearly ({100 * low:+.1f} to {100 * high:+.1f} %)"


def _who(case: Case, balance: Balance) -> tuple[str, Culprit]:
    steps, _, _ = case.shape
    gain = _gain_text(balance.speedup)
    reach = reach_of_kind(case.model.calibration.model.method)
    lower = reach is not None and balance.length.high < MARGIN * chain_length(reach.low, steps)
    dear = _dear(case, balance)
    drafter = _drafter_text(case, balance, reach)
    engine = dear or _engine_text(case, balance, case.chosen, balance.cycle.value)
    if balance.speedup.low > 1.0:
        rider = f"; the drafter could be better: {drafter}" if lower else ""
        rider = rider or (f"; the engine could be better: {dear}" if dear else "")
        return f"nothing is the problem, {gain}{rider}", "nothing"
    if not balance.speedup.known:
        return f"{gain}: which of drafter and engine is the problem cannot be told", "unknown"
    other = _another_length(case)
    if other is not None:
        return f"the number of steps is the problem, {gain}; {other} would gain", "steps"
    if lower and dear:
        return f"drafter and engine are both the problem, {gain}: {drafter}, and {engine}", "both"
    if lower:
        return f"the drafter is the problem, {gain}: {drafter}", "drafter"
    if dear:
        return f"the engine is the problem, {gain}: {engine}", "engine"
    usual = _usual(case, balance, STEP_COST.typical)
    if reach is None:
        if balance.cycle.high < 1.1 * usual:
            text = f"the drafter is the problem, {gain}: a cycle costs no more than usual ({usual:.2f} plain steps)"
            return f"{text}, what is accepted of this text is too little", "drafter"
        text = f"{gain}: whether drafter or engine is the problem cannot be told; neither is out of the usual"
        return text, "unknown"
    # Neither stands out by itself: what each would bring as an ordinary one of its kind.
    by_drafter = float(np.log(chain_length(reach.typical, steps) / balance.length.value))
    by_engine = float(np.log(balance.cycle.value / usual))
    gap = -float(np.log(balance.speedup.value))
    if max(by_drafter, by_engine) <= 0.0 or by_drafter + by_engine < gap:
        return f"{gain}, and neither drafter nor engine is out of the usual: speculation does not pay here", "unknown"
    if min(by_drafter, by_engine) > max(by_drafter, by_engine) / 2.0:
        return f"drafter and engine are both the problem, {gain}: {drafter}; {engine}", "both"
    if by_drafter > by_engine:
        return f"the drafter more than the engine is the problem, {gain}: {drafter}", "drafter"
    return f"the engine more than the drafter is the problem, {gain}: {engine}", "engine"


def _dear(case: Case, balance: Balance) -> str | None:
    """What says that a cycle costs more than nearly all published ones: the diagnosed, or another chain beside it."""
    worst, text = 1.0, None
    first = case.comms.index(case.comm) * len(case.shapes)
    for f in case.facts:
        row = f.row
        beside = row.num_steps and row.topk == 1 and (row.batch, row.comm) == (case.batch, case.comm)
        plain = case.plain_of(f)
        if not beside or row.workload not in case.workloads or f.shape not in case.shapes:
            continue
        if f.cycle_ms is None or plain is None or row.context_tokens not in (case.context_tokens, None):
            continue
        at = first + case.shapes.index(f.shape)
        cycle = f.cycle_ms[0] * plain / (1000.0 * row.batch)
        ratio = MARGIN * cycle / _usual(case, balance, STEP_COST.high, at)
        if ratio > worst:
            worst, text = ratio, _engine_text(case, balance, at, cycle)
    if text is None and balance.cycle.low > _usual(case, balance, STEP_COST.high):
        return _engine_text(case, balance, case.chosen, balance.cycle.value)
    return text


def _drafter_text(case: Case, balance: Balance, reach: Reach | None) -> str:
    steps, topk, _ = case.shape
    if topk > 1 and reach is not None:
        low, high = chain_length(reach.low, steps), chain_length(reach.high, steps)
        return (
            f"this tree gets {balance.length.value:.2f} tokens a cycle, and chains of {reach.kind} drafters of as many "
            f"steps mostly {low:.2f} to {high:.2f}"
        )
    each = acceptance_a_draft(balance.length.value, steps)
    if reach is None:
        return f"{each:.2f} of its drafts are accepted"
    return f"{each:.2f} a draft is accepted, and {reach.kind} drafters mostly reach {reach.low:.2f} to {reach.high:.2f}"


def _engine_text(case: Case, balance: Balance, point: int, cycle: float) -> str:
    low, high = (_usual(case, balance, cost, point) for cost in (STEP_COST.low, STEP_COST.high))
    name = shape_text(*case.shapes[point % len(case.shapes)])
    return f"a cycle of {name} mostly costs {low:.2f} to {high:.2f} plain steps, and {cycle:.2f} here"


def _another_length(case: Case) -> str | None:
    """Another number of steps, under the same setting, that gains for sure."""
    best, name = 1.0, None
    for j in case.points(case.comm):
        low, _ = interval_90(case.parts.tok_s[:, j] / case.parts.tok_s[:, case.plain])
        if j != case.chosen and low > best:
            best, name = low, shape_text(*case.shapes[j % len(case.shapes)])
    return name
