"""Contradictions in the numbers of a file: flags and findings by arithmetic on its rows, before any model is asked.

Each check states its tolerance. A claim holds only where both ends of every range agree with it, and where a number is
missing nothing is claimed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specmodel.calibration import Calibration
from specmodel.contradictions import SAME_LENGTH, contradictions_of, miscounted, place_text, rows_at
from specmodel.diagnosis import FLAGS, Finding
from specmodel.expectations import (
    Facts,
    facts_of,
    fastest_plain,
    plain_by_place,
    shape_text,
    zero_draft_base,
)

__all__ = ["consistency_of", "flags_of"]

NOISE = 1.005
"""Ratio below which two speeds are taken for equal."""


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
        *_slower_everywhere(facts),
        *_zero_draft(facts),
        *_lengths_that_differ(facts),
        *contradictions_of(cal, facts),
    )


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
        name = f"{shape_text(*f.shape)} at {place_text(f.row)}"
        if f.length is not None and speedup > NOISE * f.length:
            text = (
                f"{name}: {speedup:.2f} times plain decoding with an acceptance length of {f.length:g}: a cycle would "
                "be shorter than a plain step; the plain rate was measured under other conditions, or one is wrong"
            )
            flag = "speedup_exceeds_acceptance_length"
            out.append(Finding(flag=flag, where=rows_at(f.index), message=text, impossible=True))
        elif f.length is None and speedup > NOISE * most:
            text = (
                f"{name}: {speedup:.2f} times plain decoding, and {shape_text(*f.shape)} cannot emit more than "
                f"{most} tokens a cycle; the plain rate was measured under other conditions, or one is wrong"
            )
            out.append(Finding(flag="", where=rows_at(f.index), message=text, impossible=True))
    return out


def _too_short(f: Facts, plain: tuple[float, float]) -> list[Finding]:
    """A cycle time, without an acceptance length, below that of a plain step: no acceptance makes it possible."""
    step_ms = 1000.0 * f.row.batch / plain[1]
    if f.cycle_ms is None or step_ms <= NOISE * f.cycle_ms[1]:
        return []
    text = (
        f"{shape_text(*f.shape)} at {place_text(f.row)}: a cycle of {f.cycle_ms[1]:.4g} ms would be shorter than a "
        f"plain step of {step_ms:.4g} ms; the plain rate was measured under other conditions, or one is wrong"
    )
    return [Finding(flag="", where=rows_at(f.index), message=text, impossible=True)]


def _too_long(cal: Calibration, facts: Sequence[Facts]) -> list[Finding]:
    out = []
    flag = "acceptance_length_exceeds_steps_plus_one"
    for f in facts:
        row, length = f.row, f.length
        if row.num_steps and (row.mean_draft_tokens or 0.0) > max(row.num_steps, row.verify_tokens - 1):
            text = f"mean_draft_tokens {row.mean_draft_tokens:g} is above what {shape_text(*f.shape)} can draft"
            out.append(Finding(flag="", where=rows_at(f.index), message=text))
        if not row.num_steps or length is None:
            continue
        if length > row.num_steps + 1 + 1e-9:
            name = shape_text(*f.shape)
            advice = miscounted(length, row.num_steps + 1)
            text = f"an acceptance length of {length:g} with {name} is above {row.num_steps + 1}; {advice}"
            out.append(Finding(flag=flag, where=rows_at(f.index), message=text, impossible=True))
        elif length > row.verify_tokens + 1e-9:
            advice = miscounted(length, row.verify_tokens, tree=True)
            text = f"an acceptance length of {length:g}, but only {row.verify_tokens} tokens are verified; {advice}"
            out.append(Finding(flag="", where=rows_at(f.index), message=text, impossible=True))
    told = {(f.row.workload, *f.shape) for f in facts if f.length and f.length > f.row.num_steps + 1}
    for i, entry in enumerate(cal.acceptance):
        length = entry.acceptance_length
        if length is None or (entry.workload, entry.num_steps, entry.topk, entry.verify_tokens) in told:
            continue
        if length > entry.num_steps + 1 + 1e-9:
            advice = miscounted(length, entry.num_steps + 1)
            text = f"an acceptance length of {length:g} with {entry.num_steps} steps is above {entry.num_steps + 1}"
            out.append(Finding(flag=flag, where=f"acceptance[{i}]", message=f"{text}; {advice}"))
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
    return [Finding(flag="slower_than_plain_everywhere", where=rows_at(*(f.index for f in drafting[:4])), message=text)]


def _zero_draft(facts: Sequence[Facts]) -> list[Finding]:
    out = []
    for f in facts:
        plain = zero_draft_base(f, facts) if f.row.num_steps == 0 and f.row.speculating else None
        if plain is None or plain.tok_s is None or f.tok_s is None:
            continue
        ratio = plain.tok_s[0] / f.tok_s[1]
        if ratio > NOISE:
            text = (
                f"at {place_text(f.row)} a step with speculation on and nothing drafted takes {ratio:.3f} plain "
                "steps: that much is lost before a draft is made"
            )
            out.append(
                Finding(flag="zero_draft_step_slower_than_plain", where=rows_at(f.index, plain.index), message=text)
            )
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
        out.append(Finding(flag="", where=rows_at(low.index, high.index), message=text))
    return out
