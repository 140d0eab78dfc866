"""Continuous batching in plain Python, one lane at a time: what the array code is checked against, and raced with.

Written from what a scheduler does, not from the array code; only the random words are the same.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import Any

MASK = (1 << 64) - 1


def word_at(key: int, place: int) -> int:
    """The word of a request's round, from 1: SplitMix64."""
    z = (key + place * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@dataclass
class Running:
    request: int
    left: int
    rounds: int = 0
    curve: int = 0


@dataclass
class Rule:
    """SGLang's adaptive rule, as its documentation and log lines tell it."""

    start: int
    tiers: list[tuple[int, list[int], float]]
    sizes: tuple[int, ...] = ()
    state: dict[int, dict[str, Any]] = field(default_factory=dict)

    def tier(self, batch: int) -> int:
        batch = next((size for size in self.sizes if size >= batch), batch)
        return max(bisect.bisect_right([t[0] for t in self.tiers], batch) - 1, 0)

    def slot(self, batch: int) -> dict[str, Any]:
        i = self.tier(batch)
        if i not in self.state:
            steps = self.tiers[i][1]
            first = self.start if self.start in steps else steps[len(steps) // 2]
            self.state[i] = {"steps": first, "mean": first - 1.0, "count": 0}
        return self.state[i]

    def steps(self, batch: int) -> int:
        return int(self.slot(batch)["steps"])

    def tell(self, batch: int, accepted: list[int]) -> None:
        s, (_, steps, down) = self.slot(batch), self.tiers[self.tier(batch)]
        if s["steps"] > 0:
            s["mean"] = 0.8 * s["mean"] + 0.2 * (sum(accepted) / len(accepted))
        s["count"] += 1
        if s["count"] <= 10 or (s["count"] - 10) % 5:
            return
        i = steps.index(s["steps"])
        if s["steps"] == 0:
            i = min(i + 1, len(steps) - 1)
            if steps[i] > 0 and s["mean"] < 0:
                s["mean"] = steps[i] - 1.0
        else:
            old = i
            while i > 0 and s["mean"] <= (0.5 if steps[i - 1] == 0 else steps[i - 1] - 0.5) + down:
                i -= 1
            if i == old:
                while i < len(steps) - 1 and s["mean"] > steps[i] - 0.5:
                    i += 1
        s["steps"] = steps[i]


def run_lane(
    block: Any, lane: int, tiers: list[tuple[int, list[int], float]], start: int = 0, sizes: tuple[int, ...] = ()
) -> dict[str, Any]:
    """Simulate one lane of a `rounds.Block` (of which nothing is changed): finish and first-token times, cycles."""
    count, most = int(block.count[lane]), int(block.max_batch[lane])
    arrival = block.arrival_ms[lane].tolist()
    output, prompt = block.output_tokens[lane].tolist(), block.prompt_tokens[lane].tolist()
    survival, table = block.lookup.survival.tolist(), int(block.table[lane])
    kind, row, clients = int(block.kind[lane]), int(block.row[lane]), int(block.clients[lane])
    finish, first, cycles, over = [None] * count, [None] * count, [0] * count, [0] * count
    rule = Rule(start=start, tiers=tiers, sizes=sizes)
    now, following, done, running = 0.0, 0, 0, list[Running]()

    def complete(request: int) -> None:
        nonlocal done
        finish[request] = now
        if clients and clients + done < count:
            arrival[clients + done] = now
        done += 1

    while done < count:
        if not running and arrival[following] > now:
            now = arrival[following]
        room, admitted = most - len(running), []
        while following < count and room and arrival[following] <= now:
            admitted.append(following)
            following, room = following + 1, room - 1
        if admitted:
            prefill = block.prefills[int(block.prefill[lane])]
            if prefill is not None:
                now += float(prefill.at(sum(prompt[r] for r in admitted)))
            for r in admitted:
                first[r] = now
                if output[r] > 1:
                    running.append(Running(request=r, left=output[r] - 1, curve=int(block.curve[lane, r])))
                else:
                    complete(r)
        if not running:
            continue
        batch = len(running)
        context = sum(prompt[q.request] + output[q.request] - q.left for q in running) / batch
        words = []
        for q in running:
            q.rounds += 1
            words.append(word_at(int(block.key[lane, q.request]), q.rounds))
        drawn = [sum((w >> 24) * 2.0**-40 < s for s in survival[q.curve]) for q, w in zip(running, words, strict=True)]
        if kind == 0:
            steps = [int(block.steps[row, batch])] * batch
        elif kind == 1:
            steps = [rule.steps(batch)] * batch
        elif kind == 2:
            steps = [int(block.plans[row, batch, q.curve - int(block.first_curve[lane])]) for q in running]
        else:
            steps = [min(int(block.steps[row, batch]), n) for n in drawn]
        accepted = [min(n, k) for n, k in zip(drawn, steps, strict=True)]
        spent = cycle_ms(block.costs, table, steps, batch, context)
        if kind == 1:
            rule.tell(batch, accepted)
        now += spent
        for q, n, w in zip(list(running), accepted, words, strict=True):
            emitted = min(n + 1, q.left)
            q.left -= emitted
            cycles[q.request] += 1
            if (w & ((1 << 24) - 1)) * 2.0**-24 < block.switch[lane]:
                q.curve = (q.curve & ~1) | (w >> 24 & 1)
            if not q.left:
                over[q.request] = n + 1 - emitted
                running.remove(q)
                complete(q.request)
    return {"finish_ms": finish, "first_ms": first, "cycles": cycles, "overshoot": over, "arrival_ms": arrival[:count]}


def cycle_ms(costs: Any, table: int, steps: list[int], batch: int, context: float) -> float:
    """Time of a cycle: verify at the mean steps, draft and overhead at the longest; straight between contexts."""
    size = costs.verify_ms.shape[3]
    place = min(max((context - costs.context_low[table]) / costs.context_step[table], 0.0), size - 1.0)
    below = min(int(place), max(size - 2, 0))
    part = place - below if size > 1 else 0.0

    def at(x: Any, k: int) -> float:
        low = float(x[table, k, batch, below])
        return low + part * (float(x[table, k, batch, below + 1]) - low) if size > 1 else low

    mean, longest, last = sum(steps) / batch, max(steps), costs.verify_ms.shape[1] - 1
    if not longest:
        return at(costs.verify_ms, 0) + at(costs.rest_ms, 0)
    foot = min(max(int(mean), min(1, last)), max(last - 1, 0))
    first, second = at(costs.verify_ms, foot), at(costs.verify_ms, min(foot + 1, last))
    verify = first + (mean - foot) * (second - first)
    if min(steps) < longest or mean < 1:
        verify = max(verify, 0.2 * first, min(at(costs.verify_ms, 0), first))
    return verify + at(costs.rest_ms, longest)
