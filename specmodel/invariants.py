"""Rules over several fields of one row, and over rows and names, as plain functions that list what is wrong.

They read attributes only. So they serve the frozen dataclasses of `specmodel.calibration` when one is built, and, where
a file has other faults too, a stand-in for the row in which each unusable number is NaN (no comparison with it holds)
and each entry of an unusable list, too: a file's faults are then reported all at once, and each of them once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from specmodel.errors import Fault, key_path, shown

SURVIVAL_TOLERANCE = 0.02  # a rise of P(at least k accepted) up to this is noise of counting; more cannot be
MAX_HINTS = 50  # wrong names that a right one is sought for: the search is slow, and more are not read
SPEED_QUANTITIES = ("tok_s", "tpot_ms", "cycle_ms")
SPEED_FORMS = ("tok_s", "tpot_ms", "cycle_ms", "tok_s_at_most", "range_tok_s", "range_tpot_ms", "range_cycle_ms")
ACCEPTANCE_FORMS = ("accepted_per_position", "accepted_by_rank", "survival", "conditional", "acceptance_length")
LIST_FIELDS = {*ACCEPTANCE_FORMS[:4], "drafted_per_position", "cuda_graph_sizes", "range_ms", *SPEED_FORMS[4:]}
TIME_FORMS = ("time_ms", "range_ms")


def names_of(names: Iterable[str]) -> str:
    """Write names as a list for people: ``a, b and c``."""
    listed = list(names)
    return " and ".join(filter(None, [", ".join(listed[:-1]), listed[-1]])) if listed else "none"


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """Return the allowed word that `word` was most likely meant to be, of the first 200: in bounded time."""
    words = [name for name in islice(allowed, 200) if isinstance(name, str) and len(name) <= 80]
    return next(iter(difflib.get_close_matches(word[:80], words, n=1, cutoff=0.6)), None)


def time_faults(row: Any) -> list[Fault]:
    """Rules of a timed row: one of time_ms and range_ms; the range in order; no spread without its value."""
    faults = _one_form(row, TIME_FORMS, "time")
    faults += _order(row.range_ms, "range_ms")
    if row.sd_ms is not None and row.time_ms is None:
        faults.append(_spread_alone("sd_ms", "time_ms"))
    return faults


def shape_faults(row: Any) -> list[Fault]:
    """Rules of a draft shape: a chain verifies num_steps + 1 tokens, a tree says how many."""
    k, tokens = row.num_steps, row.num_draft_tokens
    if row.topk == 1 and tokens is not None and (tokens < k + 1 or tokens > k + 1):
        remedy = "delete it, or give topk of 2 or more if this is a tree"
        must = f"num_steps + 1 = {k + 1} on a chain (topk 1)"
        return [Fault(path="num_draft_tokens", must=must, got=str(tokens), remedy=remedy)]
    if row.topk > 1:
        if k < 1:
            return [
                Fault(path="num_steps", must="1 or more for a tree", got=str(k), remedy="delete topk to mean a chain")
            ]
        if tokens is None or tokens < 2:
            remedy = "state how many tokens the target verifies per sequence, the root included, or delete topk"
            got = "nothing" if tokens is None else str(tokens)
            return [Fault(path="num_draft_tokens", must="2 or more for a tree (topk above 1)", got=got, remedy=remedy)]
    return []


def scope_faults(row: Any) -> list[Fault]:
    """Rule of graph_scope: it says something of a drafter that runs in a CUDA graph."""
    if row.graph_scope is None or row.cuda_graph is not False:
        return []
    remedy = "delete graph_scope, or cuda_graph: false"
    return [Fault(path="graph_scope", must="absent where cuda_graph is false", got=str(row.graph_scope), remedy=remedy)]


def draft_faults(row: Any) -> list[Fault]:
    """Rules of a draft row."""
    return [*shape_faults(row), *time_faults(row), *scope_faults(row)]


def cycle_faults(row: Any) -> list[Fault]:
    """Rules of a cycle: one form of speed, a shape that can be, no spread without its value."""
    faults = [*_one_form(row, SPEED_FORMS, "speed"), *shape_faults(row), *scope_faults(row)]
    for quantity in SPEED_QUANTITIES:
        faults += _order(getattr(row, f"range_{quantity}"), f"range_{quantity}")
        if getattr(row, f"sd_{quantity}") is not None and getattr(row, quantity) is None:
            faults.append(_spread_alone(f"sd_{quantity}", quantity))
    if row.speculation is False and row.num_steps > 0:
        remedy = "plain decoding is num_steps: 0; delete speculation to keep the drafts"
        faults.append(Fault(path="speculation", must="true where num_steps is above 0", got="false", remedy=remedy))
    return faults


def acceptance_faults(row: Any) -> list[Fault]:
    """Rules of an acceptance entry: one form; counts with their trials; survival that does not rise."""
    faults = [*_one_form(row, ACCEPTANCE_FORMS, "acceptance"), *shape_faults(row)]
    for form in ("accepted_per_position", "accepted_by_rank"):
        if getattr(row, form) is not None and row.drafts is None:
            remedy = "add drafts: how many drafts the counts come from"
            faults.append(Fault(path="drafts", must=f"given with {form}", got="nothing", remedy=remedy))
    if row.drafted_per_position is not None and row.accepted_per_position is None:
        remedy = "add accepted_per_position, or delete it"
        must = "given only with accepted_per_position"
        faults.append(Fault(path="drafted_per_position", must=must, got="it alone", remedy=remedy))
    for form in ("accepted_per_position", "accepted_by_rank", "survival", "conditional", "drafted_per_position"):
        values = getattr(row, form)
        if values is not None and len(values) > row.num_steps:
            must = f"a list of at most num_steps = {row.num_steps} positions"
            got = f"{len(values)} of them"
            faults.append(Fault(path=form, must=must, got=got, remedy="correct num_steps or shorten the list"))
    faults += _count_faults(row)
    survival = row.survival
    if row.accepted_per_position and row.drafts:
        survival = [count / row.drafts for count in row.accepted_per_position]
    for i in range(1, len(survival or ())):
        if survival[i] > survival[i - 1] + SURVIVAL_TOLERANCE:
            form = "survival" if row.survival else "accepted_per_position"
            must = f"at most position {i - 1} (+{SURVIVAL_TOLERANCE}): k + 1 accepted drafts imply k"
            got = f"{survival[i]:.6g} after {survival[i - 1]:.6g}"
            remedy = "survival is unconditional; for P(draft k accepted given the earlier ones) use conditional"
            faults.append(Fault(path=f"{form}[{i}]", must=must, got=got, remedy=remedy))
    return faults


def model_faults(model: Any) -> list[Fault]:
    """Rules of the model's sizes."""
    faults, experts, used = [], model.num_experts, model.experts_per_token
    if experts is not None and used is not None and used > experts:
        must = f"at most num_experts = {experts}"
        faults.append(Fault(path="experts_per_token", must=must, got=str(used), remedy="correct one of the two"))
    sizes = model.cuda_graph_sizes
    for i in range(1, len(sizes)):
        if sizes[i] <= sizes[i - 1]:
            must, got = f"above the size before it ({sizes[i - 1]})", str(sizes[i])
            remedy = "list each captured size once, in increasing order"
            faults.append(Fault(path=f"cuda_graph_sizes[{i}]", must=must, got=got, remedy=remedy))
            break
    return faults


def comm_faults(settings: Iterable[str], tables: Iterable[tuple[str, Sequence[Any]]]) -> list[Fault]:
    """Rule of communication settings: a row names one that the file lists, or `default`.

    Parameters
    ----------
    settings : iterable of str
        The names under ``comm``.
    tables : iterable of (key path, rows)
        Every table whose rows name a setting.
    """
    known: dict[Any, None] = dict.fromkeys(["default", *settings])
    names = ", ".join(key_path((str(name)[:40],)) for name in islice(known, 8))
    faults = list[Fault]()
    for path, rows in tables:
        for i, row in enumerate(rows):
            name = row.comm
            if isinstance(name, str) and name not in known:
                meant = nearest(name, known) if len(faults) < MAX_HINTS else None
                remedy = f"list it under comm{f', or did you mean `{meant}`?' if meant else ''}"
                must = f"default or a name listed under comm ({names}{', ...' if len(known) > 8 else ''})"
                faults.append(Fault(path=f"{path}[{i}].comm", must=must, got=shown(name), remedy=remedy))
    return faults


def _one_form(row: Any, forms: tuple[str, ...], what: str) -> list[Fault]:
    found = [form for form in forms if getattr(row, form) is not None]
    if len(found) == 1:
        return []
    must = f"given in exactly one form of {what}: {', '.join(forms)}"
    remedy = f"keep one of {names_of(found)}" if found else f"add one, for example {forms[0]}"
    return [Fault(must=must, got=names_of(found), remedy=remedy)]


def _order(pair: Any, path: str) -> list[Fault]:
    if not pair or len(pair) != 2 or not pair[0] > pair[1]:
        return []
    return [Fault(path=path, must="[low, high]", got=f"[{pair[0]:g}, {pair[1]:g}]", remedy="swap the two ends")]


def _spread_alone(spread: str, quantity: str) -> Fault:
    remedy = f"add {quantity}, or delete {spread} (a range replaces both)"
    return Fault(path=spread, must=f"given only with {quantity}", got=f"no {quantity}", remedy=remedy)


def _count_faults(row: Any) -> list[Fault]:
    """Compare counts with their trials, which they cannot exceed."""
    drafts = row.drafts
    faults = list[Fault]()
    if drafts is None:
        return faults
    tried = row.drafted_per_position
    for i, count in enumerate(tried or ()):
        if count > drafts:
            faults.append(_too_many(f"drafted_per_position[{i}]", count, f"drafts = {drafts}"))
    accepted = row.accepted_per_position or ()
    if tried and len(tried) < len(accepted):
        must, got = f"as long as accepted_per_position ({len(accepted)})", f"{len(tried)} positions"
        faults.append(
            Fault(path="drafted_per_position", must=must, got=got, remedy="give the attempts at each position")
        )
    for i, count in enumerate(accepted):
        limit, name = (tried[i], f"drafted_per_position[{i}]") if tried and i < len(tried) else (drafts, "drafts")
        if count > limit:
            faults.append(_too_many(f"accepted_per_position[{i}]", count, f"{name} = {limit}"))
    for i, counts in enumerate(row.accepted_by_rank or ()):
        if sum(counts) > drafts:
            faults.append(_too_many(f"accepted_by_rank[{i}]", sum(counts), f"drafts = {drafts}"))
    return faults


def _too_many(path: str, count: float, limit: str) -> Fault:
    return Fault(path=path, must=f"at most {limit}", got=str(count), remedy="correct the count or its trials")
