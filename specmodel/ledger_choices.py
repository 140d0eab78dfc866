"""The levers that are choices: steps, tree, batch schedule, communication setting, graphs and their sizes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specmodel.calibration import VerifyRow
from specmodel.diagnosed import Case
from specmodel.diagnosis import Lever, Status
from specmodel.expectations import shape_text
from specmodel.levers import Bound, Ledger, bound_of, judged, lever, on_ranks, percent_gain, settled
from specmodel.measured import default_context
from specmodel.parts import draw_parts, verify_terms
from specmodel.speeds import Noise, spread

__all__ = ["choices"]

Array = NDArray[np.float64]
_MOST_BATCHES = 6
_LOG = "the engine's log (diagnose CALIB LOG)"


def choices(book: Ledger) -> list[Lever]:
    """Every lever that is a choice."""
    off = _off(book)
    plain = off.status == "open"
    return [off, _steps(book), *_tree(book), _schedule(book, plain=plain), _comm(book), *_graphs(book), _padding(book)]


def _ratio(draws: Array, *, fixed: bool = False) -> Bound:
    """What another choice brings; with the steps as they are only where it leaves them alone."""
    low, middle, high = (max(float(q), 1.0) for q in np.quantile(draws, (0.05, 0.5, 0.95)))
    return Bound(fixed=middle if fixed else 1.0, optimised=middle, low=low, high=high)


def _name(case: Case, point: int) -> str:
    shape = case.shapes[point % len(case.shapes)]
    return shape_text(*shape) if shape[0] else "plain decoding"


def _settled_points(case: Case) -> set[int]:
    """Chains that were tried under the diagnosed setting and were not faster: a speed, or a bound on it."""
    if case.fact is None or case.fact.tok_s is None:
        return set()
    best = 1.005 * case.fact.tok_s[1]
    first = case.comms.index(case.comm) * len(case.shapes)
    out = set()
    for f in case.facts:
        row = f.row
        same = (row.batch, row.comm, row.workload) == (case.batch, case.comm, case.fact.row.workload)
        if same and row.context_tokens == case.fact.row.context_tokens and f.shape in case.shapes:
            most = row.tok_s_at_most if row.tok_s_at_most is not None else f.tok_s[1] if f.tok_s else None
            if most is not None and most <= best:
                out.add(first + case.shapes.index(f.shape))
    return out


def _off(book: Ledger) -> Lever:
    """Plain decoding instead."""
    case, tok_s = book.case, book.case.parts.tok_s
    draws = tok_s[:, case.plain] / tok_s[:, case.chosen]
    if case.measured_speedup is not None:
        draws = draws / (case.measured_speedup * float(np.median(draws)))
    bound, text = _ratio(draws), f"plain decoding {100 * (float(np.median(draws)) - 1.0):+.1f} %"
    if case.plain_tok_s is None and case.measured:
        text += ", predicted"
    status = judged(bound, book.worth, decidable=True)
    if not case.measured:
        status, text = "measure", f"{text}, predicted"
    by = "plain decoding at this batch: {num_steps: 0}" if case.plain_tok_s is None else "both again, repeated"
    by = by if case.measured else "a cycle with drafts at this batch"
    return lever("speculation_off", "speculation off", bound, status, text, by)


def _steps(book: Ledger) -> Lever:
    case, tok_s = book.case, book.case.parts.tok_s
    title, plain_first = "number of steps", case.model.measured.plain_first
    if case.shape[1] > 1:
        trees = [f for f in case.facts if f.row.topk > 1 and f.rate is not None and f.row.batch == case.batch]
        measured = f"the fastest of {len(trees)} trees measured" if len(trees) > 1 else "the only tree measured"
        text = f"{shape_text(*case.shape)} is {measured}; one step more or less brings no more than this"
        bound = _one_step(case)
        status: Status = "closed" if bound.high < 1.0 + book.worth else "measure"
        return lever("num_steps", title, bound, status, text, plain_first or "trees of other depths")
    tried = _settled_points(case)
    others = [j for j in case.points(case.comm, chains=True) if j != case.chosen and j not in tried]
    here = shape_text(*case.shape)
    if not others and tried - {case.chosen}:
        text = f"{here}: every other length within reach was tried and is no faster"
        return settled("num_steps", title, text)
    if not others:
        text = f"{here}: no other length is near anything measured"
        return lever("num_steps", title, None, "measure", text, plain_first or "cycles of two lengths or more")
    ratios = {j: tok_s[:, j] / tok_s[:, case.chosen] for j in others}
    middle = max(others, key=lambda j: float(np.log(ratios[j]).mean()))
    upper = max(others, key=lambda j: float(np.quantile(ratios[j], 0.95)))
    bound = _ratio(ratios[middle])
    if upper != middle:
        high = max(float(np.quantile(ratios[upper], 0.95)), bound.high)
        bound = Bound(fixed=1.0, optimised=bound.optimised, low=bound.low, high=high)
    status = judged(bound, book.worth, decidable=True)
    was = "measured" if case.measured else "predicted best"
    expected = np.exp(float(np.log(ratios[middle]).mean())) - 1.0
    text = f"{here} {was}; next best of those not tried {_name(case, middle)}, {100 * expected:+.1f} %"
    steps = case.shapes[upper % len(case.shapes)][0]
    by = plain_first or f"a cycle of {shape_text(steps, 1, steps + 1)}"
    return lever("num_steps", title, bound, status, text, by)


def _one_step(case: Case) -> Bound:
    """Bound what a tree one step deeper or shallower brings.

    Survival falls with depth, so that one position more is reached no more often than those before it are on average:
    ``(length - 1) / steps`` tokens, at no cost. One step less saves its draft, at no loss of tokens.
    """
    steps, at = case.shape[0], case.chosen
    length, cycle = case.parts.acceptance_length[:, at], case.parts.cycle_ms[:, at]
    deeper = 1.0 + (length - 1.0) / (steps * length)
    shallower = cycle / np.maximum(cycle - case.parts.draft_ms[:, at] / steps, 0.5 * cycle)
    return _ratio(np.maximum(deeper, shallower))


def _tree(book: Ledger) -> list[Lever]:
    case, tok_s = book.case, book.case.parts.tok_s
    method, title = case.model.calibration.model.method, "draft tree"
    trees = [j for j in case.points(case.comm) if case.shapes[j % len(case.shapes)][1] > 1]
    if case.shape[1] > 1:
        chains = [j for j in case.points(case.comm, chains=True) if j != case.chosen]
        if not chains:
            return []
        best = max(chains, key=lambda j: float(np.log(tok_s[:, j]).mean()))
        bound = _ratio(tok_s[:, best] / tok_s[:, case.chosen])
        text = f"{shape_text(*case.shape)} measured; the best chain is {_name(case, best)}"
        status = judged(bound, book.worth, decidable=True)
        return [lever("tree", f"{title}: a chain instead", bound, status, text, f"a cycle of {_name(case, best)}")]
    if trees:
        best = max(trees, key=lambda j: float(np.log(tok_s[:, j]).mean()))
        bound = _ratio(tok_s[:, best] / tok_s[:, case.chosen])
        text = f"of {len(trees)} measured the best is {_name(case, best)}"
        return [lever("tree", title, bound, judged(bound, book.worth, decidable=False), text)]
    if method in ("ngram", "parallel"):
        return []
    steps = case.shape[0]
    most = case.parts.tok_s * (steps + 1.0) / case.parts.acceptance_length
    bound = _ratio(most[:, case.chosen] / tok_s[:, case.chosen], fixed=True)
    text = f"none was measured; a tree of {shape_text(steps, 1, 0)} cannot emit more than {steps + 1} tokens a cycle"
    by = "a tree of as many steps, for example topk 2, and its acceptance length"
    status = judged(bound, book.worth, decidable=True)
    return [lever("tree", title, bound, "closed" if status == "closed" else "measure", text, by)]


def _schedule(book: Ledger, *, plain: bool) -> Lever:
    """Other batches that were measured with speculation, and what the diagnosed steps lose there.

    Where plain decoding is best at the diagnosed batch (`plain`) and at every other, that is no schedule.
    """
    case, model = book.case, book.case.model
    title = "batch schedule"
    batches = [b for b in model.measured.drafting_batches if abs(b - case.batch) > 1e-9]
    by = "cycles at the other batches that are served"
    if not batches:
        text = f"only batch {case.batch:g} was measured with speculation"
        return lever("batch_schedule", title, None, "measure", text, by)
    batches = [batches[i] for i in sorted({round(x) for x in np.linspace(0, len(batches) - 1, _MOST_BATCHES)})]
    graphs = bool(np.all(case.request.settings.draft_mode < 2)), not bool(np.any(case.request.settings.verify_eager))
    shapes = [case.shapes[0], *(s for s in case.shapes if s[0] and s[1] == 1)]
    if case.shape not in shapes:
        shapes.append(case.shape)
    K, topk, tokens = (np.array(x, dtype=float) for x in zip(*shapes, strict=True))
    bounds, said, drafting = [], [], not plain
    for b in batches:
        context = default_context(model.calibration, b) if case.context_tokens is None else case.context_tokens
        request, _ = model.request(K, b, case.comm, topk, tokens, context, case.workload, *graphs)
        far = model.predict(K, b, case.comm, topk, tokens, context, case.workload, *graphs).extrapolated
        tok_s = draw_parts(model, request, 200).tok_s
        mean = np.where(np.atleast_1d(far), -np.inf, np.log(tok_s).mean(axis=0))
        best = int(np.argmax(mean)) if np.isfinite(mean).any() else shapes.index(case.shape)
        bounds.append(_ratio(tok_s[:, best] / tok_s[:, shapes.index(case.shape)]))
        drafting = drafting or shapes[best][0] > 0
        if shapes[best] != case.shape:
            name = shape_text(*shapes[best]) if shapes[best][0] else "plain decoding"
            said.append(f"{name} at {b:g} ({percent_gain(bounds[-1].optimised)})")
    most = max(bounds, key=lambda x: x.optimised)
    top = Bound(fixed=1.0, optimised=most.optimised, low=most.low, high=max(x.high for x in bounds))
    better = f"{', '.join(said[:4])}{', ...' if len(said) > 4 else ''}" or "nothing is faster at the other batches"
    text = f"against {shape_text(*case.shape)} everywhere: {better}"
    if not drafting:
        return settled("batch_schedule", title, f"{text}: plain decoding at every batch is speculation off")
    return lever("batch_schedule", title, top, judged(top, book.worth, decidable=True), text, by)


def _comm(book: Ledger) -> Lever:
    case, cal = book.case, book.case.model.calibration
    title, tok_s = "NCCL setting", book.case.parts.tok_s
    width = cal.system.tensor_parallel
    if width == 1 or cal.system.num_gpus == 1:
        return settled("comm", title, "one GPU a replica: nothing is sent")
    here = case.points(case.comm)
    others = [j for j in case.points() if j not in here]
    seen = ", ".join(dict.fromkeys(str(e.value) for about in _COMM_FACTS for e in book.facts.get(about, ())[:2]))
    force = f"; in force: {seen}" if seen else ""
    if not others:
        return _only_setting(book, title, force)
    old = max(here, key=lambda j: float(np.log(tok_s[:, j]).mean()))
    new = max(others, key=lambda j: float(np.log(tok_s[:, j]).mean()))
    low, middle, high = (max(float(q), 1.0) for q in np.quantile(tok_s[:, new] / tok_s[:, old], (0.05, 0.5, 0.95)))
    same = [j for j in others if j % len(case.shapes) == case.chosen % len(case.shapes)]
    best = max(float(np.median(tok_s[:, j] / tok_s[:, case.chosen])) for j in same) if same else 1.0
    bound = Bound(fixed=max(best, 1.0), optimised=max(middle, best, 1.0), low=low, high=max(high, best))
    brought = _brought(case)
    name = case.comms[new // len(case.shapes)]
    text = f"{case.comm} is the best of {len(case.comms)}" if middle <= 1.0 else f"{name} against {case.comm}"
    by = f"{_name(case, new)} under {name}"
    status = judged(bound, book.worth, decidable=True)
    return lever("comm", title, bound, status, f"{text}{brought}{force}", by)


_COMM_FACTS = ("allreduce_implementation", "nccl_setting")


def _only_setting(book: Ledger, title: str, force: str) -> Lever:
    """One setting alone: others bring at most what its all-reduces cost, where a table says what that is."""
    case = book.case
    system = case.model.calibration.system
    width = system.tensor_parallel or system.num_gpus
    gpus = f"{width} GPUs" if width else "how many GPUs share a replica is not stated"
    text = f"only {case.comm} was measured; {gpus}{force}"
    by = "an all-reduce table for each setting (specmodel measure, or nccl-tests), or a cycle under another one"
    if not case.model.calibration.measurements.allreduce:
        return lever("comm", title, None, "measure", text, by)
    terms = verify_terms(case.model, case.request)["allreduce"]
    left = np.maximum(case.parts.cycle_ms - np.maximum(terms, 0.0), 1e-3 * case.parts.cycle_ms)
    bound = bound_of(case, 1000.0 * case.parts.batch * case.parts.acceptance_length / left)
    status: Status = "closed" if bound.high < 1.0 + book.worth else "measure"
    return lever("comm", title, bound, status, f"{text}; at most what its all-reduces cost", by)


def _brought(case: Case) -> str:
    """What the diagnosed setting takes off the verify pass against the others, as measured."""
    noise, said = Noise(), []
    times: dict[tuple[object, ...], dict[str, float]] = {}
    for row in case.model.calibration.measurements.verify:
        got = _time(row, noise)
        if got is not None:
            times.setdefault((row.tokens, row.batch, row.context_tokens), {}).setdefault(row.comm, got)
    for (tokens, *_), by_comm in times.items():
        for name, other_ms in by_comm.items():
            if name != case.comm and case.comm in by_comm:
                change = by_comm[case.comm] / other_ms - 1.0
                said.append((abs(change), f"{100 * change:+.0f} % on a verify pass of {tokens} tokens against {name}"))
    return f": {max(said)[1]}" if said else ""


def _time(row: VerifyRow, noise: Noise) -> float | None:
    got = spread(row.time_ms, row.range_ms, row.sd_ms, row.samples, noise.verify, noise.verify_floor)
    return None if got is None else got[0]


def _graphs(book: Ledger) -> list[Lever]:
    case, out = book.case, []
    settings = case.request.settings
    eager = {
        "draft": bool(np.any(settings.draft_mode == 2)),
        "verify": bool(np.any(settings.verify_eager)),
    }
    parts = {"draft": case.parts.draft_ms, "verify": None}
    decoded = book.seen("decode_with_cuda_graph")
    for part, about in (("draft", "draft_cuda_graph"), ("verify", "target_cuda_graph")):
        title, name = f"CUDA graphs: {part}", f"{part}_graph"
        seen, part_ms = book.seen(about), parts[part]
        bound = None
        if part_ms is not None:
            left = np.maximum(case.parts.cycle_ms - part_ms, 1e-3 * case.parts.cycle_ms)
            bound = bound_of(case, 1000.0 * case.parts.batch * case.parts.acceptance_length / left)
        if part == "draft" and case.model.calibration.model.method == "ngram":
            out.append(settled(name, title, "n-gram drafts run no model"))
        elif part == "verify" and decoded is not None and decoded.value is False:
            text = f"decode ran without them{_source(decoded)}"
            advice = "sizes to capture that cover batch x draft tokens"
            out.append(lever(name, title, bound, "open", text, advice=advice))
        elif eager[part] or (seen is not None and seen.value is False):
            text = "not captured" + (_source(seen) if seen is not None else ": the row says so")
            out.append(lever(name, title, bound, "open", text, advice="a run with them"))
        elif seen is not None and seen.value is True:
            ran = ", and decode ran with them" if decoded is not None and decoded.value is True else ""
            out.append(settled(name, title, f"captured{on_ranks(seen)}{ran}{_source(seen)}"))
        elif bound is not None and bound.high < 1.0 + book.worth:
            out.append(lever(name, title, bound, "closed", "even a free draft brings no more"))
        else:
            out.append(lever(name, title, bound, "measure", "nothing says whether they were captured", _LOG))
    return out


def _source(evidence: object) -> str:
    source = getattr(evidence, "source", None)
    return f" ({source})" if source else ""


def _padding(book: Ledger) -> Lever:
    case, model = book.case, book.case.model.calibration.model
    title = "graph sizes and padding"
    sizes = model.cuda_graph_sizes
    tokens = case.batch / case.model.deployment.data_parallel * case.shape[2]
    if not sizes:
        text = f"which sizes were captured is not stated; a pass has {tokens:g} tokens a rank"
        return lever("graph_padding", title, None, "measure", text, _LOG)
    limit = float(case.model.deployment.graph_limit_tokens(np.array(float(case.shape[2]))))
    if tokens > limit:
        text = f"a pass has {tokens:g} tokens a rank, the largest captured graph {limit:g}: it runs without one"
        return lever("graph_padding", title, None, "open", text, advice=f"a run with a size of {tokens:g} captured")
    terms = verify_terms(case.model, case.request)["padding"]
    left = case.parts.cycle_ms - np.clip(terms, 0.0, 0.9 * case.parts.verify_ms)
    bound = bound_of(case, 1000.0 * case.parts.batch * case.parts.acceptance_length / left)
    text = f"{float(terms[case.chosen]):.2g} ms of padding at {tokens:g} tokens a rank; {len(sizes)} sizes captured"
    return lever("graph_padding", title, bound, judged(bound, book.worth, decidable=False), text)
