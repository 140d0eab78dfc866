"""Contradictions in the numbers of a file: flags and findings by arithmetic on its rows, before any model is asked.

Each check states its tolerance. A claim holds only where both ends of every range agree with it, and where a number is
missing nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from specmodel.calibration import Calibration, CycleRow
from specmodel.diagnosis import FLAGS, Finding
from specmodel.expectations import (
    Facts,
    facts_of,
    fastest_plain,
    plain_by_place,
    shape_of,
    shape_text,
    survival_of,
    zero_draft_base,
)

__all__ = ["consistency_of", "flags_of"]

NOISE = 1.005
"""Ratio below which two speeds are taken for equal."""
FALL = 0.98
"""Ratio of one total to the one at the batch before below which it falls."""
FIRST_POSITION = 0.05
"""Least difference of two first-position acceptances that is one."""
SAME_LENGTH = 0.08
"""Least relative difference of two acceptance lengths that should be equal that is one."""
SAME_PLAIN = 0.10
"""Least relative difference of plain rates of two workloads at one place that is one."""


def flags_of(findings: Iterable[Finding]) -> tuple[str, ...]:
    """The flags that hold, each once, in their usual order."""
    found = {finding.flag for finding in findings}
    return tuple(flag for flag in FLAGS if flag in found)


def consistency_of(cal: Calibration, facts: Sequence[Facts] | None = None) -> tuple[Finding, ...]:
    """Everything that does not fit together in a file, the impossible first."""
    facts = facts_of(cal) if facts is None else facts
    return (
        *_too_fast(facts),
        *_too_long(cal, facts),
        *_parts_above_whole(cal, facts),
        *_slower_everywhere(facts),
        *_zero_draft(facts),
        *_falls_with_batch(facts),
        *_first_positions(cal),
        *_lengths_that_differ(facts),
        *_lengths_that_fall(facts),
        *_two_accounts(cal),
        *_plain_by_workload(facts),
    )


def _at(*indices: int) -> str:
    return ", ".join(f"measurements.cycles[{i}]" for i in indices)


def _place_text(row: CycleRow) -> str:
    parts = [f"batch {row.batch:g}"]
    if row.workload != "default":
        parts.append(row.workload)
    if row.comm != "default":
        parts.append(f"comm {row.comm}")
    if row.context_tokens is not None:
        parts.append(f"context {row.context_tokens}")
    return ", ".join(parts)


def _too_fast(facts: Sequence[Facts]) -> list[Finding]:
    out, places = [], plain_by_place(facts)
    for f in facts:
        plain = fastest_plain(places, f)
        if not f.row.num_steps or plain is None:
            continue
        if f.tok_s is None:
            out += _too_short(f, plain)
            continue
        speedup = f.tok_s[0] / plain[1]
        most = f.row.num_steps + 1
        name = f"{shape_text(*f.shape)} at {_place_text(f.row)}"
        if f.length is not None and speedup > NOISE * f.length:
            text = (
                f"{name}: {speedup:.2f} times plain decoding with an acceptance length of {f.length:g}: a cycle would "
                "be shorter than a plain step; the plain rate was measured under other conditions, or one is wrong"
            )
            flag = "speedup_exceeds_acceptance_length"
            out.append(Finding(flag=flag, where=_at(f.index), message=text, impossible=True))
        elif f.length is None and speedup > NOISE * most:
            text = (
                f"{name}: {speedup:.2f} times plain decoding, and {shape_text(*f.shape)} cannot emit more than "
                f"{most} tokens a cycle; the plain rate was measured under other conditions, or one is wrong"
            )
            out.append(Finding(flag="", where=_at(f.index), message=text, impossible=True))
    return out


def _too_short(f: Facts, plain: tuple[float, float]) -> list[Finding]:
    """A cycle time, without an acceptance length, below that of a plain step: no acceptance makes it possible."""
    step_ms = 1000.0 * f.row.batch / plain[1]
    if f.cycle_ms is None or step_ms <= NOISE * f.cycle_ms[1]:
        return []
    text = (
        f"{shape_text(*f.shape)} at {_place_text(f.row)}: a cycle of {f.cycle_ms[1]:.4g} ms would be shorter than a "
        f"plain step of {step_ms:.4g} ms; the plain rate was measured under other conditions, or one is wrong"
    )
    return [Finding(flag="", where=_at(f.index), message=text, impossible=True)]


def _too_long(cal: Calibration, facts: Sequence[Facts]) -> list[Finding]:
    out = []
    advice = "count the bonus token once, and drafts as the engine makes them"
    flag = "acceptance_length_exceeds_steps_plus_one"
    for f in facts:
        row, length = f.row, f.length
        if row.num_steps and (row.mean_draft_tokens or 0.0) > max(row.num_steps, row.verify_tokens - 1):
            text = f"mean_draft_tokens {row.mean_draft_tokens:g} is above what {shape_text(*f.shape)} can draft"
            out.append(Finding(flag="", where=_at(f.index), message=text))
        if not row.num_steps or length is None:
            continue
        if length > row.num_steps + 1 + 1e-9:
            name = shape_text(*f.shape)
            text = f"an acceptance length of {length:g} with {name} is above {row.num_steps + 1}; {advice}"
            out.append(Finding(flag=flag, where=_at(f.index), message=text, impossible=True))
        elif length > row.verify_tokens + 1e-9:
            text = f"an acceptance length of {length:g}, but only {row.verify_tokens} tokens are verified; {advice}"
            out.append(Finding(flag="", where=_at(f.index), message=text, impossible=True))
    told = {(f.row.workload, *f.shape) for f in facts if f.length and f.length > f.row.num_steps + 1}
    for i, entry in enumerate(cal.acceptance):
        length = entry.acceptance_length
        if length is None or (entry.workload, entry.num_steps, entry.topk, entry.verify_tokens) in told:
            continue
        if length > entry.num_steps + 1 + 1e-9:
            text = f"an acceptance length of {length:g} with {entry.num_steps} steps is above {entry.num_steps + 1}"
            out.append(Finding(flag=flag, where=f"acceptance[{i}]", message=f"{text}; {advice}"))
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
                    f"{shape_text(*f.shape)} at {_place_text(row)}: a cycle of {f.cycle_ms[1]:.4g} ms cannot contain "
                    f"a part of {time_ms:.4g} ms; the part was timed apart, or the acceptance length is of another run"
                )
                out.append(Finding(flag="", where=f"{_at(f.index)}, {where}", message=text))
    return out


def _slower_everywhere(facts: Sequence[Facts]) -> list[Finding]:
    drafting = [f for f in facts if f.row.num_steps and f.tok_s is not None]
    best, places = 0.0, plain_by_place(facts)
    for f in drafting:
        plain = fastest_plain(places, f)
        if plain is None or f.tok_s is None or f.tok_s[1] > plain[0]:
            return []
        best = max(best, f.tok_s[1] / plain[0])
    if not drafting:
        return []
    several = f"each of the {len(drafting)} speculative rows" if len(drafting) > 1 else "the one speculative row"
    which = "the fastest" if len(drafting) > 1 else "it"
    text = f"{several} is slower than plain decoding, {which} by {100 * (1 - best):.1f} %"
    return [Finding(flag="slower_than_plain_everywhere", where=_at(*(f.index for f in drafting[:4])), message=text)]


def _zero_draft(facts: Sequence[Facts]) -> list[Finding]:
    out = []
    for f in facts:
        plain = zero_draft_base(f, facts) if f.row.num_steps == 0 and f.row.speculating else None
        if plain is None or plain.tok_s is None or f.tok_s is None:
            continue
        ratio = plain.tok_s[0] / f.tok_s[1]
        if ratio > NOISE:
            text = (
                f"at {_place_text(f.row)} a step with speculation on and nothing drafted takes {ratio:.3f} plain "
                "steps: that much is lost before a draft is made"
            )
            out.append(Finding(flag="zero_draft_step_slower_than_plain", where=_at(f.index, plain.index), message=text))
    return out


def _falls_with_batch(facts: Sequence[Facts]) -> list[Finding]:
    groups: dict[tuple[tuple[str, object], ...], dict[float, tuple[float, float, int]]] = {}
    for f in facts:
        if f.tok_s is None:
            continue
        key = tuple((k, v) for k, v in f.setting.items() if k != "batch")
        low, high, index = groups.setdefault(key, {}).get(f.row.batch, (*f.tok_s, f.index))
        groups[key][f.row.batch] = (min(low, f.tok_s[0]), max(high, f.tok_s[1]), index)
    out = []
    for group in groups.values():
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
            out.append(Finding(flag=flag, where=_at(group[small][2], group[large][2]), message=text))
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


def _lengths_that_differ(facts: Sequence[Facts]) -> list[Finding]:
    """What is accepted depends on the two models and the text: not on batch, communication, backend or graphs."""
    groups: dict[tuple[object, ...], list[Facts]] = {}
    for f in facts:
        if f.row.num_steps and f.row.acceptance_length is not None:
            groups.setdefault((f.row.workload, f.row.context_tokens, *f.shape), []).append(f)
    out = []
    for group in groups.values():
        low, high = (pick(group, key=lambda f: f.row.acceptance_length or 0.0) for pick in (min, max))
        a, b = low.row.acceptance_length or 1.0, high.row.acceptance_length or 1.0
        names = ("batch", "comm", "cuda_graph", "verify_cuda_graph", "graph_scope")
        differ = [n for n in names if getattr(low.row, n) != getattr(high.row, n)]
        if b / a - 1.0 <= SAME_LENGTH:
            continue
        ours, theirs = (", ".join(f"{n} {getattr(f.row, n)}" for n in differ) for f in (low, high))
        where = f"{a:g} ({ours}) and {b:g} ({theirs})" if differ else f"{a:g} and {b:g}"
        text = (
            f"acceptance length of {shape_text(*low.shape)}"
            f"{'' if low.row.workload == 'default' else f', {low.row.workload}'} is {where}: what is "
            "accepted depends on models and text alone; the runs differ in prompts, sampling or numerics too"
        )
        out.append(Finding(flag="", where=_at(low.index, high.index), message=text))
    return out


def _lengths_that_fall(facts: Sequence[Facts]) -> list[Finding]:
    """A longer chain of the same drafter cannot be accepted less."""
    groups: dict[tuple[object, ...], dict[int, Facts]] = {}
    for f in facts:
        if f.row.num_steps and f.row.topk == 1 and f.row.acceptance_length is not None:
            key = (f.row.workload, f.row.context_tokens, f.row.batch, f.row.comm)
            groups.setdefault(key, {}).setdefault(f.row.num_steps, f)
    out = []
    for group in groups.values():
        for short, long in pairwise(sorted(group)):
            a, b = group[short].length or 1.0, group[long].length or 1.0
            if b < a / (1.0 + SAME_LENGTH):
                text = (
                    f"acceptance length falls from {a:g} at {shape_text(*group[short].shape)} to {b:g} at "
                    f"{shape_text(*group[long].shape)} ({_place_text(group[long].row)}): more drafts cannot be "
                    "accepted less; the prompts differed, or one was counted otherwise"
                )
                out.append(Finding(flag="", where=_at(group[short].index, group[long].index), message=text))
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
            out.append(Finding(flag="", where=f"acceptance[{i}], {_at(j)}", message=text))
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
            out.append(Finding(flag="", where=_at(low.index, high.index), message=text))
    return out
