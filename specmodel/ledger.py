"""The ledger of levers: what each part of the cycle and of the acceptance could bring at most, and what is closed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specmodel.calibration import Evidence
from specmodel.cost import parameter_names
from specmodel.cost import verify_terms as smooth_terms
from specmodel.deployment import flattened
from specmodel.diagnosed import Case
from specmodel.diagnosis import Lever, Status
from specmodel.drafters import acceptance_a_draft, chain_length, reach_of_kind
from specmodel.expectations import shape_text
from specmodel.gpus import datasheet
from specmodel.ledger_choices import choices
from specmodel.levers import KNOWN, Bound, Ledger, bound_of, judged, lever, on_ranks, percent_gain, settled
from specmodel.parts import chain_lengths, curves_of

__all__ = ["ledger_of"]

Array = NDArray[np.float64]
_TERM_DRAWS = 200
_FEW_TOKENS = 16
"""A pass of that many tokens is bound by memory on every accelerator that serves language models."""
_ORDER = {"open": 0, "measure": 1, "closed": 2}


def ledger_of(case: Case, worth: float, evidence: Iterable[Evidence] = ()) -> tuple[Lever, ...]:
    """Every lever, open ones first, then those that want a measurement, each by what it could bring.

    Parameters
    ----------
    case : Case
        The setting, from `diagnosed.case_of`.
    worth : float
        Gain, a fraction, below which a lever is closed.
    evidence : iterable of Evidence
        Facts from logs, besides those of the file.
    """
    facts: dict[str, tuple[Evidence, ...]] = {}
    for fact in (*evidence, *case.model.calibration.evidence):
        facts[fact.about] = (*facts.get(fact.about, ()), fact)
    book = Ledger(case=case, worth=worth, facts=facts)
    found = [_draft(book), _overhead(book), *_verify(book), *_acceptance(book), *choices(book)]
    return tuple(sorted(found, key=lambda x: (_ORDER[x.status], -(x.bound_optimised or 0.0), x.name)))


def _after(case: Case, saved_ms: Array) -> Array:
    """Draws of tok/s with some milliseconds of the cycle saved; a cycle keeps a thousandth of itself."""
    cycle = case.parts.cycle_ms
    left = np.maximum(cycle - saved_ms, 1e-3 * cycle)
    return np.asarray(1000.0 * case.parts.batch * case.parts.acceptance_length / left)


def _middle(draws: Array) -> str:
    value = float(np.median(draws))
    return f"{value:.1f}" if value >= 99.95 else f"{value:.2f}" if value >= 0.0995 else f"{max(value, 0.001):.1g}"


def _of_cycle(case: Case, part_ms: Array) -> str:
    return f"{_middle(part_ms)} of {_middle(case.parts.cycle_ms[:, case.chosen])} ms a cycle"


def _draft(book: Ledger) -> Lever:
    case, draft_ms = book.case, book.case.parts.draft_ms
    bound = bound_of(case, _after(case, draft_ms))
    title, part = "draft: free", _of_cycle(case, draft_ms[:, case.chosen])
    graphs = book.seen("draft_cuda_graph")
    half = bound_of(case, _after(case, 0.5 * draft_ms))
    if bound.high >= 1.0 + book.worth and graphs is not None and graphs.value is True:
        ranks = on_ranks(graphs)
        if half.high < 1.0 + book.worth:
            text = f"{part}; its CUDA graphs are captured{ranks}; even at half the time {percent_gain(half.optimised)}"
            return lever("draft", title, bound, "closed", text)
        part += f"; its CUDA graphs are captured{ranks}"
    timed = bool(case.model.calibration.measurements.draft)
    status = judged(bound, book.worth, decidable=True) if timed else "measure"
    by = "the time of the draft alone (measurements.draft)"
    if graphs is None:
        by += ", and whether its CUDA graphs are captured (give the engine's log)"
    return lever("draft", title, bound, status, part + ("" if timed else _NOT_APART), by)


_NOT_APART = ", a guess: it was not timed apart"


def _overhead(book: Ledger) -> Lever:
    """Overhead of the cycle, and what having speculation on adds to every pass."""
    case, m = book.case, book.case.model.calibration.measurements
    title, by = "overhead of speculation", "a row with nothing drafted: {num_steps: 0, speculation: true}"
    zero = [
        f.rate
        for f in case.facts
        if f.row.num_steps == 0 and f.row.speculating and f.rate is not None and f.row.batch == case.batch
    ]
    if zero and case.plain_tok_s is not None:
        lost_ms = max(1000.0 * case.batch * (1.0 / max(zero) - 1.0 / case.plain_tok_s), 0.0)
        saved = np.minimum(np.full_like(case.parts.cycle_ms, lost_ms), 0.9 * case.parts.cycle_ms)
        bound = bound_of(case, _after(case, saved))
        part = f"{_of_cycle(case, saved[:, case.chosen])}, as measured with nothing drafted"
        return lever("overhead", title, bound, judged(bound, book.worth, decidable=False), part)
    names = parameter_names(case.model.comm_names)
    tax = case.parameters[:, names.index("tax")][:, None]
    pass_ms = np.exp(case.parameters[:, names.index("log_pass_ms")])[:, None]
    # Of a pass that reads the same weights; what speculation cannot do without, verifying, is not in it.
    taxed = np.clip(pass_ms * np.expm1(np.maximum(tax, 0.0)), 0.0, 0.5 * case.parts.verify_ms)
    saved = case.parts.overhead_ms + taxed
    bound = bound_of(case, _after(case, saved))
    part = _of_cycle(case, saved[:, case.chosen])
    apart = bool(m.verify and m.draft and case.fact is not None)
    status = judged(bound, book.worth, decidable=True) if apart else "measure"
    part += ", what passes and drafts leave of the cycle" if apart else _NOT_APART
    return lever("overhead", title, bound, status, part, by)


_TERMS = {
    "fixed_pass": (
        "verify: fixed pass",
        "weight bytes over memory bandwidth against the time of a plain pass",
    ),
    "verified_tokens": ("verify: tokens", "passes of 1 and of many tokens (measurements.verify)"),
    "experts": ("verify: experts", "verify passes of several sizes (measurements.verify)"),
    "attention_kv": ("verify: attention", "passes at two contexts (context_tokens)"),
    "allreduce": ("verify: all-reduces", "an all-reduce table (measurements.allreduce; nccl-tests)"),
    "compute_knee": ("verify: compute", "verify passes of more tokens (measurements.verify)"),
}


def _verify(book: Ledger) -> list[Lever]:
    case = book.case
    points, _ = case.model.deployment.points(case.request.settings)
    flat = flattened(points, case.request.shape)
    structure, num_cost = case.model.deployment.structure, case.model.layout.num_cost
    every = np.arange(0, len(case.parameters), max(len(case.parameters) // _TERM_DRAWS, 1))
    few = _some(case, every)
    drawn = [smooth_terms(theta[:num_cost], flat, structure) for theta in few.parameters]
    out = []
    for name, (title, by) in _TERMS.items():
        if name == "experts" and structure.num_experts == 0:
            continue
        if name == "allreduce" and _width(book) == 1:
            out.append(settled("verify_allreduce", title, "one GPU a replica: there are none"))
            continue
        apart, why = _told_apart(book, name)
        if not apart and name == "allreduce":
            out.append(lever("verify_allreduce", title, None, "measure", why, by))
            continue
        term = np.clip(np.array([d[name] for d in drawn]), 0.0, 0.98 * few.parts.verify_ms)
        if name == "experts":
            # What one token touches is read by plain decoding too.
            term = np.maximum(term - term[:, [case.plain]], 0.0)
        bound = bound_of(few, _after(few, term))
        status = judged(bound, book.worth, decidable=True) if apart else "measure"
        part = f"{_of_cycle(few, term[:, case.chosen])}{why}"
        if name == "fixed_pass":
            by = _weights_text(case, by)
        out.append(lever(f"verify_{name}", title, bound, status, part, by))
    return out


def _weights_text(case: Case, otherwise: str) -> str:
    """How much the GPUs of one replica read in the time of a plain step: the weights are to be held against it."""
    system = case.model.calibration.system
    gpu = datasheet(system.gpu or "")
    width = system.tensor_parallel or system.num_gpus
    if gpu is None or width is None:
        return otherwise
    plain_ms = float(np.median(case.parts.cycle_ms[:, case.plain]))
    most_gb = width * gpu.bandwidth_bytes_per_ms * plain_ms / 1e9
    who = f"{width} {gpu.name}" if width > 1 else f"one {gpu.name}"
    return (
        f"the bytes of weights that a plain step reads (of experts, those touched): {who} can read {most_gb:.3g} GB in "
        f"its {plain_ms:.3g} ms, and the nearer the weights are to that, the less is left"
    )


def _told_apart(book: Ledger, name: str) -> tuple[bool, str]:
    """Whether the file tells a term of the verify pass from the others, and in words what is missing."""
    case, m = book.case, book.case.model.calibration.measurements
    tokens = case.batch / case.model.deployment.data_parallel * case.shape[2]
    sizes = {float(r.tokens) for r in m.verify if r.comm == case.comm}
    if case.plain_tok_s is not None:
        sizes.add(case.batch / case.model.deployment.data_parallel)
    if name == "fixed_pass":
        return False, "; plain decoding pays it too"
    if name == "attention_kv":
        return len(case.model.measured.contexts) > 1, (
            "" if len(case.model.measured.contexts) > 1 else "; one context, so not told from the pass itself"
        )
    if name == "allreduce":
        several = len({*(r.comm for r in m.verify), *(r.comm for r in m.cycles)}) > 1
        if m.allreduce or several:
            return True, "" if m.allreduce else ", by the difference of the settings"
        return False, "no table of all-reduces and only one setting: not told from the pass itself"
    if name == "compute_knee" and tokens <= _FEW_TOKENS:
        return True, f"; {tokens:g} tokens a pass do not fill a GPU"
    enough = len(sizes) > 2
    return enough, "" if enough else ", a guess: passes of more sizes are missing"


def _some(case: Case, draws: NDArray[np.intp]) -> Case:
    """The same case with fewer draws."""
    parts = case.parts
    few = replace(
        parts,
        verify_ms=parts.verify_ms[draws],
        draft_ms=parts.draft_ms[draws],
        overhead_ms=parts.overhead_ms[draws],
        acceptance_length=parts.acceptance_length[draws],
    )
    return replace(case, parts=few, parameters=case.parameters[draws])


def _width(book: Ledger) -> int | None:
    """GPUs that share one replica, None where the file does not say."""
    system = book.case.model.calibration.system
    if system.tensor_parallel is not None:
        return system.tensor_parallel
    return 1 if system.num_gpus == 1 else None


# ------------------------------------------------------------------------------------------------------- acceptance
def _acceptance(book: Ledger) -> list[Lever]:
    case, cal = book.case, book.case.model.calibration
    steps, topk, _ = case.shape
    lengths = case.parts.acceptance_length
    length = lengths[:, case.chosen]
    reach = reach_of_kind(cal.model.method)
    known = _length_known(case)
    each = acceptance_a_draft(float(np.median(length)), steps)
    have = f"{_middle(length)} tokens a cycle of {shape_text(*case.shape)}" + (
        f", {each:.2f} a draft" if topk == 1 else ""
    )
    ends = np.quantile(length, (0.05, 0.95))
    if not known:
        by_speeds = case.fact is not None and case.fact.rate is not None
        have = f"no acceptance is stated; by the speeds {have}" if by_speeds else "no acceptance is stated"
    known = known or bool(ends[1] <= KNOWN * ends[0])
    by = "the acceptance of each position (acceptance; the engine's log or /metrics)"
    out = []
    if reach is None:
        most = _after_lengths(case, lambda k: k + 1.0)
        text = f"{have}; what such drafters reach depends on the text"
        out.append(lever("acceptance", "acceptance: all drafts", bound_of(case, most), "measure", text, by))
    else:
        usual = f"{reach.kind} drafters mostly reach {reach.low:.2f} to {reach.high:.2f} a draft"
        typical = bound_of(case, _after_lengths(case, lambda k: chain_length(reach.typical, k)))
        low = chain_length(reach.low, steps)
        if not known:
            out.append(lever("acceptance_wiring", _WIRING, typical, "measure", f"{have}; {usual}", by))
        elif ends[1] < low:
            text = f"{have}, far below its kind: {usual}; a layer, a norm or a vocabulary may be wired wrongly"
            advice = "compare drafts with the target's own next tokens on a few prompts, layer by layer"
            status = judged(typical, book.worth, decidable=False)
            out.append(lever("acceptance_wiring", _WIRING, typical, status, text, advice=advice))
        elif ends[0] > low:
            out.append(settled("acceptance_wiring", _WIRING, f"{have}, as its kind: {usual}"))
        else:
            out.append(lever("acceptance_wiring", _WIRING, typical, "measure", f"{have}, at the low end: {usual}", by))
        best = bound_of(case, _after_lengths(case, lambda k: chain_length(reach.high, k)))
        status = judged(best, book.worth, decidable=not known)
        status = status if known else "measure"
        text = f"{have}; one {reach.kind} drafter in ten has {reach.high:.2f} a draft or more"
        title = "acceptance: best drafter"
        out.append(lever("acceptance", title, best, status, text, "" if known else by))
    return [*out, *_positions(book, have, by)]


_WIRING = "acceptance: wiring"


def _length_known(case: Case) -> bool:
    positions = case.model.measured.positions
    if case.fact is not None and case.fact.length is not None:
        return True
    return all(positions.get(w, 0) >= case.shape[0] for w in case.workloads)


def _after_lengths(case: Case, length_of: Callable[[int], float]) -> Array:
    """Draws of tok/s with the acceptance length of each point raised to what `length_of` says of its steps."""
    steps = np.array([case.shapes[j % len(case.shapes)][0] for j in range(case.parts.verify_ms.shape[1])])
    target = np.array([length_of(int(k)) for k in steps])
    raised = np.maximum(case.parts.acceptance_length, target)
    return np.asarray(case.parts.tok_s * raised / case.parts.acceptance_length)


def _positions(book: Ledger, have: str, by: str) -> list[Lever]:
    """The first position, and those after it, on chains."""
    case = book.case
    steps, topk, _ = case.shape
    titles = (
        ("acceptance_first", "acceptance: first draft"),
        ("acceptance_tail", "acceptance: tail"),
    )
    if topk > 1:
        text = "a tree: its acceptance is not told apart by position; at most what every draft accepted would bring"
        ceiling = _every_draft(case)
        of_tree: Status = "closed" if ceiling.high < 1.0 + book.worth else "measure"
        return [lever(name, title, ceiling, of_tree, text, by) for name, title in titles]
    most = max(k for k, t, _ in case.shapes if t == 1)
    shares, _ = case.model.mixture(case.workload)
    curves = curves_of(case.model, case.parameters, shares, most)
    reach = reach_of_kind(case.model.calibration.model.method)
    goal = 1.0 if reach is None else reach.high
    first = {w: np.concatenate([np.maximum(c[:, :1], goal), c[:, 1:]], axis=1) for w, c in curves.items()}
    flat = {w: np.maximum(c, c[:, :1]) for w, c in curves.items()}
    base = chain_lengths(case.model, curves, shares)
    by_position = _by_position(case)
    out = []
    for (name, title), changed in zip(titles, (first, flat), strict=True):
        if name == "acceptance_tail" and steps == 1:
            continue
        factor = chain_lengths(case.model, changed, shares) / base
        chains = np.array([case.shapes[j % len(case.shapes)][0] for j in range(case.parts.verify_ms.shape[1])])
        after = case.parts.tok_s * factor[:, np.minimum(chains, most)]
        bound = bound_of(case, after, case.points(case.comm, chains=True))
        c = [float(np.mean([np.median(curve[:, k]) for curve in curves.values()])) for k in range(steps)]
        text = f"accepted {c[0]:.2f} at the first position" + (
            f", {c[-1]:.2f} at position {steps}" if steps > 1 else ""
        )
        if name == "acceptance_tail":
            text += "; were later drafts accepted as the first"
        if name == "acceptance_first":
            text += "" if reach is None else f"; the best {reach.kind} drafters have {goal:.2f}"
        decided = by_position and (name == "acceptance_tail" or reach is not None)
        status = judged(bound, book.worth, decidable=False) if decided else "measure"
        if not by_position:
            text = "no acceptance of a position is stated"
        decided_by = "model.method: which kind of drafter this is" if by_position else by
        out.append(lever(name, title, bound, status, text, decided_by))
    return out


def _every_draft(case: Case) -> Bound:
    """What the diagnosed setting would bring with every draft accepted."""
    steps, _, tokens = case.shape
    factor = np.maximum(min(steps + 1, tokens) / case.parts.acceptance_length[:, case.chosen], 1.0)
    low, middle, high = (float(q) for q in np.quantile(factor, (0.05, 0.5, 0.95)))
    return Bound(fixed=middle, optimised=middle, low=low, high=high)


def _by_position(case: Case) -> bool:
    """Whether the file states the acceptance of each position, or the lengths of two chains or more."""
    cal = case.model.calibration
    for w in case.workloads:
        stated = any(a.workload == w and a.form != "acceptance_length" for a in cal.acceptance)
        chains = {f.row.num_steps for f in case.facts if f.row.workload == w and f.row.acceptance_length is not None}
        chains |= {a.num_steps for a in cal.acceptance if a.workload == w}
        if not stated and len(chains - {0}) < 2:
            return False
    return True
