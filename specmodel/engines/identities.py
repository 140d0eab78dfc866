"""Definitions told apart by what must hold between the numbers of one source."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from specmodel.engines.reading import Reading, number, rounded

__all__ = ["counts_at_positions", "fraction", "serving_cycle", "steps_of", "stray_steps"]

MAX_STEPS = 512
LATENCY_SLACK = 0.15  # medians of token times against each other: stalls by prefill, skew between requests


def fraction(rate: float, part: float, whole: float) -> float | None:
    """Return a rate as a fraction: as printed or as a percentage, whichever equals part / whole; None if neither."""
    if whole <= 0:
        return None
    share = part / whole
    for scale in (1.0, 0.01):
        if abs(rate * scale - share) <= 0.006 * max(share, 0.05):
            return share
    return None


def counts_at_positions(
    rates: Sequence[float], drafts: int, accepted: int | None, half_digit: float
) -> list[int] | None:
    """Recover the counts behind printed rates of acceptance by position.

    Parameters
    ----------
    rates : sequence of float
        Share of the drafts of which position i was accepted, unconditional.
    drafts : int
        Number of drafts.
    accepted : int or None
        All accepted tokens; the counts must sum to it within what rounding allows, and are adjusted to do so.
    half_digit : float
        Half a unit of the last printed digit of the rates.

    Returns
    -------
    list of int or None
        None where the rates cannot be those of the counts: not between 0 and 1, rising, or another sum.
    """
    slack = half_digit * drafts + 0.5
    counts = [round(rate * drafts) for rate in rates]
    if any(not 0 <= count <= drafts for count in counts):
        return None
    if any(later > earlier + 2 * slack for earlier, later in pairwise(counts)):
        return None
    if accepted is not None:
        missing = accepted - sum(counts)
        if abs(missing) > slack * len(counts):
            return None
        each, rest = divmod(missing, len(counts))
        counts = [count + each + (i < rest) for i, count in enumerate(counts)]
    # What rounding made rise by a count or two is levelled.
    for i in range(1, len(counts)):
        counts[i] = min(counts[i], counts[i - 1])
    return [max(count, 0) for count in counts]


def steps_of(drafted: float, drafts: float, listed: int) -> int | None:
    """Return the steps of a chain: drafted tokens over drafts where whole, or as many as positions are listed.

    Drafts may be cut short, so that more positions are listed than the mean has; fewer are a list that was cut.
    """
    if drafts <= 0 or drafted / drafts > MAX_STEPS:
        return None
    mean = drafted / drafts
    if abs(mean - round(mean)) < 1e-9 and listed <= round(mean):
        return round(mean) or None
    return listed if listed > mean else None


def stray_steps(counts: dict[int, int]) -> set[int]:
    """Return the step counts that a log shows so seldom beside another that they are damage, not a schedule."""
    total = sum(counts.values())
    return {steps for steps, count in counts.items() if count < max(2, 0.01 * total) and total >= 10}


def serving_cycle(reading: Reading, result: dict[str, Any], length: float | None, where: str) -> dict[str, Any] | None:
    """Return the cycle of a serving benchmark from its token times.

    The time between two events of a stream (ITL) is a cycle where an event is a cycle, a token where the client counted
    tokens again; the time per token (TPOT) times the acceptance length is a cycle in either case. What ITL is, is told
    by which of the two it equals; where it equals neither the speed is left out.
    """
    itl, tpot = number(result, "median_itl_ms"), number(result, "median_tpot_ms")
    if itl is None or tpot is None:
        itl, tpot = number(result, "mean_itl_ms"), number(result, "mean_tpot_ms")
    row: dict[str, Any] = {} if length is None else {"acceptance_length": rounded(length, 7)}
    if tpot is None:
        reading.dropped["no time per token"] += 1
        return None
    per_token = length or 1.0
    if itl is None or abs(itl / tpot - 1) <= LATENCY_SLACK:
        # An event is one token, or no time of an event is given: a token's time is all that is known of the cycle.
        row |= {"tpot_ms": tpot, "note": f"{where}: median_tpot_ms"}
    elif abs(itl / (tpot * per_token) - 1) <= LATENCY_SLACK:
        row |= {"cycle_ms": itl, "note": f"{where}: median_itl_ms, which is a cycle (TPOT * acceptance length agrees)"}
    else:
        reading.questions.append(
            f"{where}: the median time between events, {itl:g} ms, is neither the time per token, {tpot:g} ms, nor "
            f"that times the acceptance length ({per_token:.4g}); what did the client count? The speed is left out"
        )
        return None
    throughput = number(result, "output_throughput")
    if throughput is not None:
        row["note"] += f"; output_throughput {throughput:g} tok/s includes prefill and ramps"
    return row
