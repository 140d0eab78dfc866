"""What does not fit together in the rows of a file, by arithmetic: said of every answer that rests on them.

Each check states its tolerance. A claim holds only where both ends of every range agree with it, and where a number is
missing nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from specmodel.calibration import Calibration, CycleRow
from specmodel.diagnosis import Finding
from specmodel.expectations import Facts, facts_of, shape_of, shape_text, survival_of

__all__ = ["SAME_LENGTH", "contradictions_of", "miscounted", "only_falls", "place_text", "rows_at"]

FALL = 0.98
"""Ratio of one total to the one at the batch before below which it falls."""
FALLS_MUCH = 0.90
"""The same of the last total to the first below which no larger batch is believed, where nothing else rises."""
ALL_ACCEPTED = 0.999
"""Share of the drafts from which on all of them are accepted."""
MOST_NAMED = 8
"""Rows of one setting that are named, of more the first."""
SAME_CYCLE = 0.15
"""Least relative difference of cycles of one setting that is one: other prompts are other lengths and contexts."""
FIRST_POSITION = 0.05
"""Least difference of two first-position acceptances that is one."""
SAME_LENGTH = 0.08
"""Least relative difference of two acceptance lengths that should be equal that is one."""
SAME_PLAIN = 0.10
"""Least relative difference of plain rates of two workloads at one place that is one."""


def contradictions_of(cal: Calibration, facts: Sequence[Facts] | None = None) -> tuple[Finding, ...]:
    """What does not fit together, or is no measurement of what it seems: said wherever an answer rests on it."""
    facts = facts_of(cal) if facts is None else facts
    return (
        *_all_accepted(cal, facts),
        *_repeats_that_differ(facts),
        *_falls_with_batch(facts),
        *_parts_above_whole(cal, facts),
        *_first_positions(cal),
        *_lengths_that_fall(facts),
        *_two_accounts(cal),
        *_plain_by_workload(facts),
    )


def only_falls(cal: Calibration) -> tuple[float, str] | None:
    """The batch above which no total is believed, and why: one falls by much with the batch, and none rises.

    A larger batch brings more until the GPU is full, and then no less; totals that do nothing but fall are most likely
    rates of one request.
    """
    worst: tuple[float, str] | None = None
    for group in _totals(facts_of(cal)):
        batches = sorted(group)
        pairs = list(pairwise(batches))
        if any(group[large][0] * FALL > group[small][1] for small, large in pairs):
            return None
        fallen = [small for small, large in pairs if group[large][1] < FALL * group[small][0]]
        first, last = batches[0], batches[-1]
        if fallen and group[last][1] < FALLS_MUCH * group[first][0] and (worst is None or fallen[0] < worst[0]):
            text = (
                f"every total falls with the batch ({group[first][0]:.4g} tok/s at batch {first:g}, "
                f"{group[last][1]:.4g} at {last:g}), as rates of one request do: tok_s is that of all requests "
                "together, so multiply by the batch, or state tpot_ms"
            )
            worst = (fallen[0], text)
    return worst


def miscounted(length: float, most: int, *, tree: bool = False) -> str:
    """What is likely wrong where an acceptance length is above the `most` tokens that a cycle can emit.

    `tree` says that they are as few as a tree verifies, fewer than its steps allow.
    """
    if not most < length <= most + 1:
        return "count the bonus token once, and drafts as the engine makes them"
    if tree:
        return "likely num_draft_tokens was stated without the root, or the bonus token counted twice"
    return (
        f"likely num_steps is {most} (it counts the drafts, and num_draft_tokens is one more), or the bonus token was "
        "counted twice"
    )


def rows_at(*indices: int) -> str:
    """Name rows of `measurements.cycles` by their key paths."""
    return ", ".join(f"measurements.cycles[{i}]" for i in indices)


def place_text(row: CycleRow) -> str:
    """Say where a row was measured."""
    parts = [f"batch {row.batch:g}"]
    if row.workload != "default":
        parts.append(row.workload)
    if row.comm != "default":
        parts.append(f"comm {row.comm}")
    if row.context_tokens is not None:
        parts.append(f"context {row.context_tokens}")
    return ", ".join(parts)


def _all_accepted(cal: Calibration, facts: Sequence[Facts]) -> list[Finding]:
    """Acceptance of 1 at every position: no drafter guesses so well but where it has seen the answer."""
    lengths: list[tuple[str, tuple[str, int, int, int], int, float | None]] = [
        (rows_at(f.index), (f.row.workload, *f.shape), f.row.num_steps, f.row.acceptance_length)
        for f in facts
        if f.row.num_steps and f.row.acceptance_length is not None
    ]
    for i, entry in enumerate(cal.acceptance):
        survival = survival_of(entry)
        length = entry.acceptance_length if survival is None else 1.0 + sum(survival)
        drafts = entry.num_steps if survival is None else len(survival)
        shape = (entry.workload, entry.num_steps, entry.topk, entry.verify_tokens)
        lengths.append((f"acceptance[{i}]", shape, drafts, length))
    seen: dict[tuple[str, int, int, int], str] = {}
    for where, shape, drafts, length in lengths:
        if length is not None and drafts and ALL_ACCEPTED * drafts <= length - 1.0 <= drafts + 1e-9:
            seen.setdefault(shape, where)
    if not seen:
        return []
    names = ", ".join(dict.fromkeys(shape_text(*shape[1:]) for shape in seen))
    text = (
        f"every draft is accepted at {names}: as with a repeated or cached prompt, an output that repeats itself, or "
        "acceptance that was set; other text is accepted less, so measure on what is served"
    )
    return [Finding(flag="", where=", ".join(seen.values()), message=text)]


def _possible(f: Facts) -> bool:
    """Whether a cycle can emit as many tokens as stated; a row where it cannot is told by itself."""
    return f.length is None or f.length <= min(f.row.num_steps + 1, f.row.verify_tokens) + 1e-9


def _repeats_that_differ(facts: Sequence[Facts]) -> list[Finding]:
    """Rows of one setting that cannot all be right: of plain decoding the rate, of the others the time of a cycle."""
    groups: dict[tuple[object, ...], list[Facts]] = {}
    for f in facts:
        if f.cycle_ms is not None and _possible(f):
            groups.setdefault((*f.setting.values(), f.row.graph_scope, f.row.mean_draft_tokens), []).append(f)
    out = []
    for group in groups.values():
        shortest = min(f.cycle_ms[1] for f in group if f.cycle_ms)
        longest = max(f.cycle_ms[0] for f in group if f.cycle_ms)
        plain = not group[0].row.speculating
        if longest / shortest - 1.0 <= (SAME_PLAIN if plain else SAME_CYCLE):
            continue
        if plain:
            step_ms = 1000.0 * group[0].row.batch
            values = f"plain decoding is {step_ms / longest:.4g} and {step_ms / shortest:.4g} tok/s"
        else:
            values = f"{shape_text(*group[0].shape)}: a cycle takes {shortest:.4g} and {longest:.4g} ms"
        text = (
            f"{values} in {len(group)} rows of one setting ({place_text(group[0].row)}): clocks, load, context or what "
            "else is not stated differed; keep the rows of one condition"
        )
        out.append(Finding(flag="", where=rows_at(*(f.index for f in group[:MOST_NAMED])), message=text))
    return out


Totals = dict[float, tuple[float, float, int]]


def _totals(facts: Sequence[Facts]) -> list[Totals]:
    """Least and largest total at each batch, and a row that has it, of every setting."""
    groups: dict[tuple[tuple[str, object], ...], Totals] = {}
    for f in facts:
        if f.tok_s is None:
            continue
        key = tuple((k, v) for k, v in f.setting.items() if k != "batch")
        low, high, index = groups.setdefault(key, {}).get(f.row.batch, (*f.tok_s, f.index))
        groups[key][f.row.batch] = (min(low, f.tok_s[0]), max(high, f.tok_s[1]), index)
    return list(groups.values())


def _falls_with_batch(facts: Sequence[Facts]) -> list[Finding]:
    out = []
    for group in _totals(facts):
        for small, large in pairwise(sorted(group)):
            if group[large][1] >= FALL * group[small][0]:
                continue
            row = facts[group[small][2]].row
            drafts = row.num_steps > 0
            what = shape_text(*shape_of(row)) if drafts else "plain decoding"
            text = (
                f"{what}: the total falls from {group[small][0]:.4g} tok/s at batch {small:g} to "
                f"{group[large][1]:.4g} at batch {large:g}; more sequences at once should not bring less: look for "
                "graphs that were not captured, a rate of one request, or a queue"
            )
            flag = "aggregate_falls_with_batch" if drafts else ""
            out.append(Finding(flag=flag, where=rows_at(group[small][2], group[large][2]), message=text))
    return out


def _parts_above_whole(cal: Calibration, facts: Sequence[Facts]) -> list[Finding]:
    """A pass or a draft that takes longer than the cycle of which it is a part."""
    out = []
    ranks = cal.system.data_parallel
    passes: dict[tuple[object, ...], list[tuple[str, float]]] = {}
    for i, v in enumerate(cal.measurements.verify):
        passed = ("verify", v.batch * ranks, v.comm, v.context_tokens, v.tokens / v.batch, v.cuda_graph)
        time_ms = v.range_ms[0] if v.range_ms else v.time_ms or 0.0
        passes.setdefault(passed, []).append((f"measurements.verify[{i}]", time_ms))
    for i, d in enumerate(cal.measurements.draft):
        drafted = ("draft", d.batch * ranks, d.comm, d.context_tokens, d.num_steps, d.topk, d.cuda_graph)
        time_ms = d.range_ms[0] if d.range_ms else d.time_ms or 0.0
        passes.setdefault(drafted, []).append((f"measurements.draft[{i}]", time_ms))
    for f in facts:
        if f.cycle_ms is None or not f.row.speculating:
            continue
        row = f.row
        at = (row.batch, row.comm, row.context_tokens)
        parts = [
            *passes.get(("verify", *at, row.verify_tokens, row.verify_cuda_graph), ()),
            *passes.get(("draft", *at, row.num_steps, row.topk, row.cuda_graph), ()),
        ]
        for where, time_ms in parts:
            if time_ms > 1.02 * f.cycle_ms[1]:
                text = (
                    f"{shape_text(*f.shape)} at {place_text(row)}: a cycle of {f.cycle_ms[1]:.4g} ms cannot contain "
                    f"a part of {time_ms:.4g} ms; the part was timed apart, or the acceptance length is of another run"
                )
                out.append(Finding(flag="", where=f"{rows_at(f.index)}, {where}", message=text))
    return out


def _first_positions(cal: Calibration) -> list[Finding]:
    seen: dict[str, dict[int, tuple[float, int]]] = {}
    for i, entry in enumerate(cal.acceptance):
        survival = survival_of(entry)
        if survival and entry.topk == 1:
            seen.setdefault(entry.workload, {}).setdefault(entry.num_steps, (survival[0], i))
    out = []
    for workload, group in seen.items():
        low, high = (pick(group, key=lambda k, g=group: g[k]) for pick in (min, max))  # type: ignore[misc]
        if group[high][0] - group[low][0] <= FIRST_POSITION:
            continue
        where = f"acceptance[{group[low][1]}], acceptance[{group[high][1]}]"
        of = "" if workload == "default" else f" of {workload}"
        text = (
            f"the first draft{of} is accepted with {group[low][0]:.3f} at {low} steps and {group[high][0]:.3f} at "
            f"{high}: it does not know how many follow; the prompts or the sampling differed"
        )
        out.append(Finding(flag="first_position_acceptance_differs", where=where, message=text))
    return out


def _lengths_that_fall(facts: Sequence[Facts]) -> list[Finding]:
    """A longer chain of the same drafter cannot be accepted less."""
    groups: dict[tuple[object, ...], dict[int, Facts]] = {}
    for f in facts:
        if f.row.num_steps and f.row.topk == 1 and f.row.acceptance_length is not None and _possible(f):
            key = (f.row.workload, f.row.context_tokens, f.row.batch, f.row.comm)
            groups.setdefault(key, {}).setdefault(f.row.num_steps, f)
    out = []
    for group in groups.values():
        for short, long in pairwise(sorted(group)):
            a, b = group[short].length or 1.0, group[long].length or 1.0
            if b < a / (1.0 + SAME_LENGTH):
                text = (
                    f"acceptance length falls from {a:g} at {shape_text(*group[short].shape)} to {b:g} at "
                    f"{shape_text(*group[long].shape)} ({place_text(group[long].row)}): more drafts cannot be "
                    "accepted less; the prompts differed, or one was counted otherwise"
                )
                out.append(Finding(flag="", where=rows_at(group[short].index, group[long].index), message=text))
    return out


def _two_accounts(cal: Calibration) -> list[Finding]:
    """An acceptance list against the acceptance length of a row of the same shape: bonus token, form of the list."""
    out = []
    for i, entry in enumerate(cal.acceptance):
        survival = survival_of(entry)
        if survival is None or len(survival) != entry.num_steps:
            continue
        stated = entry.survival or entry.conditional or survival
        run, conditional_sum = 1.0, 0.0
        for share in stated:
            run *= share
            conditional_sum += run
        for j, row in enumerate(cal.measurements.cycles):
            shape = (row.workload, row.num_steps, row.topk, row.verify_tokens)
            length = row.acceptance_length
            if length is None or shape != (entry.workload, entry.num_steps, entry.topk, entry.verify_tokens):
                continue
            here = 1.0 + sum(survival)
            if abs(length / here - 1.0) <= SAME_LENGTH:
                continue
            name = shape_text(*shape_of(row))
            text = f"{name}: the row states an acceptance length of {length:g}, the list gives {here:.3g}"
            other = 1.0 + (sum(stated) if entry.conditional is not None else conditional_sum)
            if abs(length - sum(survival)) < 0.02 * sum(survival):
                text += "; it is the sum of the list: the bonus token of each cycle is not counted in it"
            elif entry.form in ("survival", "conditional") and abs(length / other - 1.0) < 0.02:
                real = "conditional" if entry.form == "survival" else "survival"
                text += f"; {other:.3g} if the list were {real}"
            out.append(Finding(flag="", where=f"acceptance[{i}], {rows_at(j)}", message=text))
            break
    return out


def _plain_by_workload(facts: Sequence[Facts]) -> list[Finding]:
    """Plain decoding does not depend on what is generated."""
    groups: dict[tuple[object, ...], list[Facts]] = {}
    for f in facts:
        if not f.row.speculating and f.tok_s is not None:
            key = (f.row.batch, f.row.context_tokens, f.row.comm, f.row.verify_cuda_graph)
            groups.setdefault(key, []).append(f)
    out = []
    for group in groups.values():
        low, high = (pick(group, key=lambda f: f.rate or 0.0) for pick in (min, max))
        if low.row.workload == high.row.workload or low.tok_s is None or high.tok_s is None:
            continue
        apart = high.tok_s[0] / low.tok_s[1] - 1.0
        if apart > SAME_PLAIN:
            text = (
                f"plain decoding at batch {low.row.batch:g} is {low.rate:.4g} tok/s on {low.row.workload} and "
                f"{high.rate:.4g} on {high.row.workload}: a plain step does not depend on the text; the rates include "
                "prefill or idle time, or other lengths, and each speedup inherits that"
            )
            out.append(Finding(flag="", where=rows_at(low.index, high.index), message=text))
    return out
