"""Requests of llama.cpp, and what many of them say together: cycles, acceptance, the length of their chain.

The first token of a request comes from the prompt pass: a request of n tokens with a accepted drafts made n - a - 1
cycles. Cycles whose draft came out empty (below p_min) are among them, but not among those that `mean len` counts. An
answer that ends within what was accepted in its last cycle has fewer tokens than that: there the cycles are those that
`mean len` counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from specmodel.engines.identities import counts_at_positions, stray_steps
from specmodel.engines.reading import Lengths, Reading, Shape, rounded, summarise

__all__ = ["Request", "add_group", "agree", "group"]


@dataclass(slots=True)
class Request:
    """One request: its evaluation, and what was drafted."""

    eval_ms: float = 0.0
    tokens: int = 0
    accepted: int | None = None
    drafted: int = 0
    mean: float | None = None
    rates: tuple[float, ...] = ()
    half_digit: float = 0.0005
    shared: bool = False
    line: int = 0
    released: bool = False
    """Whether its slot was released after its lines: nothing of it can be missing."""
    limit: int | None = None

    @property
    def chain(self) -> int | None:
        """The steps of its chain, where the log states them."""
        return len(self.rates) or self.limit

    @property
    def cycles(self) -> int:
        """Return the cycles of the request: the prompt pass made its first token.

        Drafts accepted beyond the end of the answer are counted as accepted but are no tokens of it.
        """
        told = self.tokens - (self.accepted or 0) - 1
        if not self.accepted or self.chain is None:
            return told
        passes = -(-self.drafted // self.chain)
        if self.mean is not None and self.mean > 1.02 and self.accepted / (self.mean - 1 + 0.0051) > told:
            passes = max(passes, round(self.accepted / (self.mean - 1)))
        return passes if told < passes <= told + self.chain else told

    def possible(self) -> bool:
        """Whether its counts can be: a cycle emits a token and drafts no more than the chain."""
        if self.accepted and self.cycles < 1:
            return False
        return not self.drafted or self.chain is None or self.drafted <= self.chain * self.cycles

    def verify_steps(self) -> int | None:
        """Return the cycles that verified a draft; None where the numbers contradict each other."""
        accepted, cycles = self.accepted or 0, self.cycles
        if self.mean is None or self.mean <= 1.02 or not accepted:
            return cycles
        low, high = accepted / (self.mean - 1 + 0.0051), accepted / max(self.mean - 1 - 0.0051, 1e-3)
        if low - 1e-9 <= cycles <= high + 1e-9:
            return cycles
        return min(round(accepted / (self.mean - 1)), cycles) if low <= cycles else None

    def full_chain(self) -> int | None:
        """Return the steps of a chain never cut short, but for the answer's last cycle: a guess from counts alone."""
        steps = -(-self.drafted // self.cycles) if self.cycles > 0 else 0
        return steps if steps and steps * self.cycles - self.drafted <= steps else None

    def whole(self, steps: int) -> bool:
        """Whether drafts were cut only as an answer's limit of tokens came near: at most 1 + 2 + ... + steps tokens."""
        return steps * self.cycles - self.drafted <= steps * (steps + 1) / 2


def agree(tokens: int, eval_ms: float, rate: float) -> bool:
    """Whether a printed rate is that of its tokens and time, the first token counted (older builds) or not."""
    if eval_ms <= 0:
        return False
    own, slack = 1e3 * tokens / eval_ms, 0.006 + 0.0005 * rate
    return abs(own - rate) <= slack or abs(own - 1e3 / eval_ms - rate) <= slack


def group(requests: list[Request], known: int | None, groups: dict[tuple[int, bool], list[Request]]) -> int:
    """Sort requests by the steps of their chain (0: plain decoding), whole or not; return how many have none known.

    What each says itself comes first, then the engine's or the user's number, then that of requests never cut short.
    """
    own = Counter(steps for r in requests if r.drafted and (steps := r.full_chain()))
    strays = stray_steps(own)
    longest = max(own.keys() - strays, default=0)
    for request in requests:
        # An answer's end cuts its last drafts short: of a few cycles alone the chain cannot be told.
        if request.chain is None and known is None and request.full_chain() in (None, *strays):
            request.limit = longest or None
    unknown = 0
    for request in requests:
        steps = 0
        if request.accepted is not None:
            if not request.drafted:
                continue
            steps = len(request.rates) or request.limit or known or request.full_chain() or longest
            if request.drafted > steps * request.cycles:  # what the other requests show, not this one
                steps = request.full_chain() or 0
            if not steps:
                unknown += 1
                continue
        groups.setdefault((steps, request.whole(steps)), []).append(request)
    return unknown


def add_group(reading: Reading, steps: int, members: list[Request]) -> None:
    """Add the cycle and acceptance of requests that drafted alike."""
    alone = [r for r in members if not r.shared]
    reading.dropped["not timed: several slots were busy"] += len(members) - len(alone)
    reading.used["requests"] += len(members)
    cycles, accepted = sum(r.cycles for r in members), sum(r.accepted or 0 for r in members)
    if alone:
        summary = summarise([r.eval_ms / r.cycles for r in alone], band=2.0)
        near = [r for r in alone if summary.value / 2 <= r.eval_ms / r.cycles <= 2 * summary.value]
        reading.dropped["not timed: far from the median"] += len(alone) - len(near)
        row: dict[str, Any] = {"num_steps": steps, "batch": 1}
        drafted, verified = sum(r.drafted for r in near), sum(r.cycles for r in near)
        if steps * verified - drafted > steps * len(near):  # more than the last cycle of each answer was cut
            row["mean_draft_tokens"] = rounded(drafted / verified)
        row |= summary.row("cycle_ms")
        what = "tokens - accepted - 1" if steps else "tokens - 1"
        row["note"] = f"{reading.source}: eval time over {what}, median of {len(near)} requests"
        reading.cycles.append(row)
    if not steps:
        return
    note = f"{reading.source}: {len(members)} requests"
    by_position = _by_position(members, steps)
    if by_position is not None:
        entry = {"drafts": cycles, "prompts": len(members), "accepted_per_position": by_position, "note": note}
        reading.acceptance.append({"num_steps": steps} | entry)
        return
    lengths = Lengths()
    for r in members:
        lengths.add(1 + (r.accepted or 0) / r.cycles, r.cycles)
    entry = lengths.row(Shape(num_steps=steps)) | {"prompts": len(members)}
    empty = cycles - sum(r.verify_steps() or r.cycles for r in members)
    note += f": 1 + {accepted} accepted / {cycles} cycles"
    entry["note"] = note + (f", of which {empty} drafted nothing" if empty > 0 else "")
    reading.acceptance.append(entry)


def _by_position(members: list[Request], steps: int) -> list[int] | None:
    """Return pooled counts by position, if every request lists them; an empty draft accepts nothing at any position."""
    total = [0] * steps
    for r in members:
        tried = r.verify_steps()
        if not r.rates or len(r.rates) != steps or tried is None:
            return None
        counts = counts_at_positions(r.rates, tried, r.accepted, r.half_digit)
        if counts is None:
            return None
        total = [a + b for a, b in zip(total, counts, strict=True)]
    return total
