"""What follows from the rows of a file by arithmetic: cycles in plain steps, break-even, the fastest measured setting.

No model, no fit: only quotients of numbers that the file states. Where one of them is a range both of its ends are
kept, and where one is missing nothing is claimed. One cycle in plain steps is ``acceptance_length * plain tok/s /
speculative tok/s`` (theory: speedup = acceptance_length / cycle in plain steps), which is at once the acceptance length
at which speculation breaks even.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from specmodel.calibration import AcceptanceEntry, Calibration, CycleRow, VerifyRow
from specmodel.diagnosis import Expectation

__all__ = [
    "Facts",
    "as_document",
    "expectations_of",
    "facts_of",
    "fastest_plain",
    "plain_by_place",
    "plain_of",
    "shape_of",
    "shape_text",
    "survival_of",
    "zero_draft_base",
]

Ends = tuple[float, float]
_PLACE = ("batch", "workload", "comm", "context_tokens")
_EXACT = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One measured cycle and what its row (and the acceptance of its shape) states, ranges as (least, greatest)."""

    index: int
    """Of `measurements.cycles`."""
    row: CycleRow
    length: float | None
    """Acceptance length: stated, or that of the acceptance entry of the same shape and workload; 1 for plain."""
    tok_s: Ends | None
    """None for a bound, and for a cycle time without an acceptance length."""
    cycle_ms: Ends | None

    @property
    def rate(self) -> float | None:
        """The middle of `tok_s`."""
        return None if self.tok_s is None else (self.tok_s[0] + self.tok_s[1]) / 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_steps, topk, num_draft_tokens)."""
        return shape_of(self.row)

    @property
    def setting(self) -> dict[str, Any]:
        """Where and how it was measured, defaults filled in."""
        row = self.row
        steps, topk, tokens = self.shape
        out: dict[str, Any] = {
            "num_steps": steps,
            "topk": topk,
            "num_draft_tokens": tokens,
            "speculation": row.speculating,
            "batch": _whole(row.batch),
            "comm": row.comm,
            "workload": row.workload,
            "context_tokens": row.context_tokens,
        }
        return out | {name: False for name in ("cuda_graph", "verify_cuda_graph") if not getattr(row, name)}


def shape_of(row: CycleRow) -> tuple[int, int, int]:
    """(num_steps, topk, num_draft_tokens) of a row, defaults filled in."""
    return row.num_steps, row.topk, row.verify_tokens


def shape_text(num_steps: int, topk: int, num_draft_tokens: int) -> str:
    """Name a chain by its steps and a tree by its three numbers."""
    if topk > 1:
        return f"tree {num_steps}x{topk}x{num_draft_tokens}"
    return "1 step" if num_steps == 1 else f"{num_steps} steps"


def facts_of(cal: Calibration) -> tuple[Facts, ...]:
    """Every row of `measurements.cycles` with what it states."""
    return tuple(_facts(i, row, cal.acceptance) for i, row in enumerate(cal.measurements.cycles))


def survival_of(entry: AcceptanceEntry) -> tuple[float, ...] | None:
    """P(at least k drafts accepted) as far as it is listed; None where only a mean is known."""
    if entry.survival is not None:
        return tuple(entry.survival)
    if entry.accepted_per_position is not None and entry.drafts:
        return tuple(count / entry.drafts for count in entry.accepted_per_position)
    if entry.accepted_by_rank is not None and entry.drafts:
        return tuple(sum(counts) / entry.drafts for counts in entry.accepted_by_rank)
    if entry.conditional is None:
        return None
    out, run = [], 1.0
    for share in entry.conditional:
        run *= share
        out.append(run)
    return tuple(out)


def _facts(index: int, row: CycleRow, acceptance: Sequence[AcceptanceEntry]) -> Facts:
    length = _length(row, acceptance)
    tok_s = cycle_ms = None
    if (rate := _ends(row.tok_s, row.range_tok_s)) is not None:
        tok_s = rate
    elif (tpot := _ends(row.tpot_ms, row.range_tpot_ms)) is not None:
        tok_s = (1000.0 * row.batch / tpot[1], 1000.0 * row.batch / tpot[0])
    elif (cycle := _ends(row.cycle_ms, row.range_cycle_ms)) is not None:
        cycle_ms = cycle
        if length is not None:
            tok_s = (1000.0 * row.batch * length / cycle[1], 1000.0 * row.batch * length / cycle[0])
    if cycle_ms is None and tok_s is not None and length is not None:
        cycle_ms = (1000.0 * row.batch * length / tok_s[1], 1000.0 * row.batch * length / tok_s[0])
    return Facts(index=index, row=row, length=length, tok_s=tok_s, cycle_ms=cycle_ms)


def _length(row: CycleRow, acceptance: Sequence[AcceptanceEntry]) -> float | None:
    if row.num_steps == 0:
        return 1.0
    if row.acceptance_length is not None:
        return row.acceptance_length
    for entry in acceptance:
        shape = (entry.num_steps, entry.topk, entry.verify_tokens, entry.workload)
        if shape != (row.num_steps, row.topk, row.verify_tokens, row.workload):
            continue
        if entry.acceptance_length is not None:
            return entry.acceptance_length
        survival = survival_of(entry)
        if survival is not None and len(survival) == entry.num_steps:
            return 1.0 + sum(survival)
    return None


def plain_of(facts: Sequence[Facts], like: Facts) -> Ends | None:
    """Fastest plain decoding at the batch and context of a row, tok/s, under any communication setting.

    Of the row's workload where one was measured, else of any: plain decoding does not depend on acceptance.
    """
    return fastest_plain(plain_by_place(facts), like)


Place = tuple[float, int | None]


def plain_by_place(facts: Sequence[Facts]) -> dict[Place, list[Facts]]:
    """Plain rows with a rate by batch and context."""
    out: dict[Place, list[Facts]] = {}
    for f in facts:
        if not f.row.speculating and f.tok_s is not None:
            out.setdefault((f.row.batch, f.row.context_tokens), []).append(f)
    return out


def fastest_plain(plain: dict[Place, list[Facts]], like: Facts) -> Ends | None:
    """What `plain_of` says, of rows that are sorted already."""
    here = plain.get((like.row.batch, like.row.context_tokens), [])
    same = [f for f in here if f.row.workload == like.row.workload]
    best = max(same or here, key=lambda f: f.rate or 0.0, default=None)
    return None if best is None else best.tok_s


def _same(one: Facts, other: Facts) -> bool:
    return one.row.batch == other.row.batch and one.row.context_tokens == other.row.context_tokens


def expectations_of(cal: Calibration, facts: Sequence[Facts] | None = None) -> tuple[Expectation, ...]:
    """All that the rows of a file say by themselves, row by row, then by group.

    Returns
    -------
    tuple of Expectation
        For each measured cycle ``cycle_plain_steps`` (or, where no acceptance length is known,
        ``cycle_plain_steps_range``), ``cycle_ms``, ``beats_plain`` and ``max_speedup``; for each verify row
        ``verify_plain_steps``; for each row with speculation on and nothing drafted ``zero_draft_ratio``; for each
        group of rows ``best_measured``.
    """
    facts = facts_of(cal) if facts is None else facts
    plain = plain_by_place(facts)
    out: list[Expectation] = []
    for fact in facts:
        out += _of_row(fact, fastest_plain(plain, fact))
        if fact.row.num_steps == 0 and fact.row.speculating:
            out += _zero_draft(fact, facts)
    for row in cal.measurements.verify:
        out += _of_verify(row, cal, facts)
    out += _best(facts)
    return tuple(out)


def _of_row(fact: Facts, plain: Ends | None) -> list[Expectation]:
    row, select = fact.row, fact.setting
    out = []
    if fact.cycle_ms is not None:
        out.append(_number("cycle_ms", select, fact.cycle_ms))
    if not row.speculating:
        return out
    if plain is not None:
        base = (plain[0] / row.batch, plain[1] / row.batch)
        if fact.cycle_ms is not None:
            ends = (fact.cycle_ms[0] * base[0] / 1000.0, fact.cycle_ms[1] * base[1] / 1000.0)
            out.append(_number("cycle_plain_steps", select, ends))
        elif fact.tok_s is not None:
            most = row.num_steps + 1
            ends = (plain[0] / fact.tok_s[1], most * plain[1] / fact.tok_s[0])
            out.append(
                Expectation(
                    quantity="cycle_plain_steps_range", select=select, ends=ends, acceptance_length=(1.0, float(most))
                )
            )
        if fact.tok_s is not None and (beats := _above(fact.tok_s, plain)) is not None:
            out.append(Expectation(quantity="beats_plain", select=select, value=beats))
    if row.num_steps:
        out.append(Expectation(quantity="max_speedup", select=select, value=row.num_steps + 1))
    return out


def _zero_draft(fact: Facts, facts: Sequence[Facts]) -> list[Expectation]:
    plain = zero_draft_base(fact, facts)
    if plain is None or plain.tok_s is None or fact.tok_s is None:
        return []
    ends = (plain.tok_s[0] / fact.tok_s[1], plain.tok_s[1] / fact.tok_s[0])
    found = _number("zero_draft_ratio", fact.setting, ends)
    return [
        Expectation(
            quantity=found.quantity, select=found.select, value=found.value, ends=found.ends, plain=plain.setting
        )
    ]


def zero_draft_base(fact: Facts, facts: Sequence[Facts]) -> Facts | None:
    """The fastest plain row at the batch, workload, context and communication setting of a row that drafts nothing."""
    here = [
        f
        for f in facts
        if not f.row.speculating
        and f.tok_s is not None
        and _same(f, fact)
        and (f.row.comm, f.row.workload) == (fact.row.comm, fact.row.workload)
    ]
    return max(here, key=lambda f: f.rate or 0.0, default=None)


def _of_verify(row: VerifyRow, cal: Calibration, facts: Sequence[Facts]) -> list[Expectation]:
    time_ms = _ends(row.time_ms, row.range_ms)
    batch = row.batch * cal.system.data_parallel
    contexts = {row.context_tokens, None}
    here = [f for f in facts if not f.row.speculating and f.tok_s is not None and f.row.batch == batch]
    # At the same context; where one of the two is not stated, at that one.
    here = [f for f in here if row.context_tokens is None or f.row.context_tokens in contexts]
    here = [f for f in here if f.row.context_tokens == row.context_tokens] or here
    here = [f for f in here if f.row.comm == row.comm] or here
    plain = max(here, key=lambda f: f.rate or 0.0, default=None)
    if time_ms is None or plain is None or plain.cycle_ms is None:
        return []
    select: dict[str, Any] = {
        "tokens": row.tokens,
        "batch": _whole(row.batch),
        "comm": row.comm,
        "context_tokens": row.context_tokens,
    }
    if not row.cuda_graph:
        select["cuda_graph"] = False
    ends = (time_ms[0] / plain.cycle_ms[1], time_ms[1] / plain.cycle_ms[0])
    return [_number("verify_plain_steps", select, ends)]


def _best(facts: Sequence[Facts]) -> list[Expectation]:
    """The fastest measured setting of every group of rows, the coarsest groups first."""
    timed = [(f.rate, f.setting) for f in facts if f.rate is not None]
    out: dict[tuple[Any, ...], Expectation] = {}
    for size in range(len(_PLACE) + 1):
        # A batch is the first thing that a group has in common: rates of different batches are different questions.
        for keys in sorted(combinations(_PLACE, size), key=lambda names: "batch" not in names):
            groups: dict[tuple[Any, ...], list[tuple[float, dict[str, Any]]]] = {}
            for rate, setting in timed:
                groups.setdefault(tuple(setting[k] for k in keys), []).append((rate, setting))
            for rows in groups.values():
                common = {k: rows[0][1][k] for k in _PLACE if len({setting[k] for _, setting in rows}) == 1}
                if tuple(common.items()) not in out:
                    _, best = max(rows, key=lambda row: row[0])
                    out[tuple(common.items())] = Expectation(quantity="best_measured", select=common, value=best)
    return list(out.values())


def as_document(expectations: Iterable[Expectation]) -> dict[str, list[dict[str, Any]]]:
    """Expectations by quantity, for JSON; an item has the keys that it needs and no other."""
    out: dict[str, list[dict[str, Any]]] = {}
    for e in expectations:
        item: dict[str, Any] = {"select": e.select}
        if e.plain is not None:
            item["plain"] = e.plain
        if e.acceptance_length is not None:
            item["acceptance_length"] = list(e.acceptance_length)
        if e.value is not None:
            item["value"] = e.value
        if e.ends is not None:
            item |= {"low": e.ends[0], "high": e.ends[1]}
        out.setdefault(e.quantity, []).append(item)
    return out


def _number(quantity: str, select: dict[str, Any], ends: Ends) -> Expectation:
    """The middle, and the ends where they are apart."""
    apart = ends[1] > ends[0] * (1.0 + _EXACT)
    return Expectation(quantity=quantity, select=select, value=(ends[0] + ends[1]) / 2.0, ends=ends if apart else None)


def _above(one: Ends, other: Ends) -> bool | None:
    """Whether one is above the other, at every combination of their ends; None where they say different things."""
    answers = {a > b for a, b in product(one, other)}
    return answers.pop() if len(answers) == 1 else None


def _ends(value: float | None, bounds: Ends | None) -> Ends | None:
    if bounds is not None:
        return float(bounds[0]), float(bounds[1])
    return None if value is None else (float(value), float(value))


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
