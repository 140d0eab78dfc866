"""The decision: the best configuration, its ties, how costly a mistake would be, and what to measure next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.adaptivity import adaptivity
from specmodel.choice import REGRET_TOLERANCE, choose, judge
from specmodel.errors import UsageError
from specmodel.measured import beyond_longest, default_context
from specmodel.model import FittedModel
from specmodel.next_measurement import next_measurement
from specmodel.notices import cutoff_notices, step_notices
from specmodel.optimum import Candidate, Ceiling, NextMeasurement, Objective, Optimum, Plain
from specmodel.prediction import Prediction
from specmodel.request import Request, number
from specmodel.shapes import Trees, shapes_of

__all__ = ["REGRET_TOLERANCE", "Candidate", "Ceiling", "NextMeasurement", "Optimum", "Plain", "optimize"]

Array = NDArray[np.float64]
DRAWS = 2000
TIE_PROBABILITY = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    """All candidates of a call, as parallel lists, with draws of their tok_s."""

    shapes: list[tuple[int, int, int]]
    comms: list[str]
    predictions: dict[str, Prediction]
    rows: list[tuple[str, int]]
    """Per candidate: its comm and its index in that prediction."""
    request: Request
    """The same candidates as one request."""
    draws: Array = field(repr=False)
    """Latent tok/s, shape (draws, candidates)."""

    def value(self, name: str) -> Array:
        """One attribute of the predictions over all candidates."""
        return np.array([getattr(self.predictions[comm], name)[i] for comm, i in self.rows])


def optimize(
    model: FittedModel,
    batch: float | Mapping[float, float] | None = None,
    comm: str | Sequence[str] | None = None,
    max_steps: int | None = None,
    workload: str | Mapping[str, float] | None = None,
    context_tokens: int | None = None,
    cuda_graph: bool = True,
    verify_cuda_graph: bool = True,
    trees: Trees = (),
    objective: Objective = "tok_s",
    max_tpot_ms: float | None = None,
) -> Optimum:
    """Choose the configuration of least expected regret.

    Every step count from 0 (plain decoding) to `max_steps` and every given tree is a candidate under every
    communication setting. Among those whose expected regret is within 0.005 of the least, measured ones come before
    unmeasured ones, then the fewest steps.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    batch : float or mapping of batch to share, optional
        Running sequences; by default 1 if measured, else the smallest measured. A distribution for `goodput`.
    comm : str or sequence of str, optional
        Restrict the communication settings; by default every setting of which the file has a row.
    max_steps : int, optional
        By default the larger of 10 and the longest measured.
    workload, context_tokens, cuda_graph, verify_cuda_graph
        As in `FittedModel.predict`; the context is by default the one with most rows at that batch.
    trees : iterable of (num_steps, topk, num_draft_tokens), or "auto"
        Trees to compare with the chains, besides those that were measured; "auto" takes the best few by the model.
    objective : {"tok_s", "tpot_ms", "goodput"}
        Throughput at a batch; the time per token of one sequence at a batch; or throughput over a distribution of
        batches counting only those where `max_tpot_ms` is kept.
    max_tpot_ms : float, optional
        Limit of the time per token; candidates that are more likely above than below it are left out.

    Returns
    -------
    Optimum

    Raises
    ------
    UsageError
        For names that the file lacks, numbers outside their domain, or a limit that no candidate keeps.
    """
    if objective not in ("tok_s", "tpot_ms", "goodput"):
        raise UsageError(f"objective must be tok_s, tpot_ms or goodput, got {objective!r}")
    if objective == "goodput" and max_tpot_ms is None:
        raise UsageError("objective goodput needs max_tpot_ms: the time per token that counts as good")
    if max_tpot_ms is not None:
        max_tpot_ms = number("max_tpot_ms", max_tpot_ms, 1e-9)
    shares = _batches(model, batch)
    names = _comms(model, comm)
    options: dict[str, Any] = {
        "workload": workload,
        "cuda_graph": cuda_graph,
        "verify_cuda_graph": verify_cuda_graph,
    }
    shapes = shapes_of(model, max_steps, trees, tuple(shares), names, options)
    fields = {
        b: _candidates(
            model,
            b,
            names,
            shapes,
            default_context(model.calibration, b) if context_tokens is None else context_tokens,
            options,
        )
        for b in shares
    }
    main = max(shares, key=lambda b: (shares[b], -b))
    here = fields[main]
    score, allowed = _scores(fields, shares, objective, max_tpot_ms)
    if not allowed.any():
        fastest = float(np.min(here.value("tpot_ms")))
        raise UsageError(
            f"no configuration keeps max_tpot_ms {max_tpot_ms:g} at batch {main:g}: the fastest is predicted at "
            f"{fastest:.4g} ms a token; raise the limit or lower the batch"
        )
    context = default_context(model.calibration, main) if context_tokens is None else context_tokens
    workloads = tuple(model.layout.workloads[i] for i in model.mixture(workload)[0])
    graphs = (bool(cuda_graph), bool(verify_cuda_graph))
    known = model.measured
    measured = np.array([known.has_speed(x, main, c, context, workloads, *graphs) for c in names for x in shapes])
    probability, regret = judge(score, allowed)
    best = choose(here.shapes, regret, allowed, measured)
    table = _table(model, here, main, probability, regret, measured)
    better = (score > score[:, [best]]).mean(axis=0)
    ties = tuple(table[i] for i in np.flatnonzero(allowed & (better > TIE_PROBABILITY)) if i != best)
    plain = _plain(model, main, context, workloads)
    # What lies too far out could not be recommended after one measurement either.
    near = np.array([not c.extrapolated for c in table])
    if near.any():
        near[best] = True
    else:
        near[:] = True  # nothing is near anything measured: any measurement is a first one
    following, reason = next_measurement(
        model,
        table,
        best,
        score,
        allowed & near & ~measured,
        here.request if objective != "goodput" else None,
        context,
        workloads,
    )
    unmeasured = _unmeasured(model, table[best], workloads)
    warnings = dict.fromkeys(w for p in here.predictions.values() for w in p.warnings)
    # Every table goes on past what was measured: that concerns nobody unless the choice or a tie does.
    for text in beyond_longest(known, max(shape[0] for shape in shapes)):
        warnings.pop(text, None)
    warnings |= dict.fromkeys(beyond_longest(known, max(c.num_steps for c in (table[best], *ties))))
    warnings |= dict.fromkeys(_notices(model, table[best]))
    return Optimum(
        batch=main,
        best=table[best],
        ties=ties,
        table=table,
        plain=plain,
        ceilings=_ceilings(model, table[best], main, context, options),
        measure_next=following,
        stop_reason=reason,
        unmeasured=unmeasured,
        warnings=tuple(warnings),
        objective=objective,
        adaptivity=adaptivity(model, table, best, workload, context) if len(shares) == 1 else None,
    )


def _comms(model: FittedModel, comm: str | Sequence[str] | None) -> tuple[str, ...]:
    """The communication settings of the call; raises `UsageError` for one that the file lacks.

    By default those of which the file has a row of any kind, or all where it has none: what a setting costs that is
    only named is a guess, and no ground for choosing it.
    """
    if comm is None:
        return tuple(c for c in model.comm_names if c in model.measured.comms) or model.comm_names
    try:
        names = (comm,) if isinstance(comm, str) else tuple(comm)
    except TypeError:
        raise UsageError(f"comm must be a name or several, got {comm!r}") from None
    if not names:
        raise UsageError("comm: no setting is left to choose from; name at least one")
    for name in names:
        model.comm_index(name)
    return tuple(dict.fromkeys(names))


def _batches(model: FittedModel, batch: float | Mapping[float, float] | None) -> dict[float, float]:
    if batch is None:
        measured = model.measured.batches
        return {1.0 if 1.0 in measured or not measured else measured[0]: 1.0}
    if not isinstance(batch, Mapping):
        return {number("batch", batch, 1.0): 1.0}
    if not batch:
        raise UsageError("batch: an empty distribution; give at least one size and its share")
    out = {number("batch", size, 1.0): number(f"share of batch {size}", share, 1e-12) for size, share in batch.items()}
    total = sum(out.values())
    return {b: s / total for b, s in out.items()}


def _candidates(
    model: FittedModel,
    batch: float,
    names: Sequence[str],
    shapes: list[tuple[int, int, int]],
    context: int | None,
    options: dict[str, Any],
) -> _Field:
    """Predictions and joint draws of every shape under every setting at one batch."""
    K, topk, tokens = (np.array(x, dtype=float) for x in zip(*shapes, strict=True))
    predictions = {
        name: model.predict(K, batch, name, topk, tokens, context, **options)  # one call a setting
        for name in names
    }
    rows = [(name, i) for name in names for i in range(len(shapes))]
    request, _ = model.request(K, batch, tuple(names), topk, tokens, context, **options)
    draws = model.draws(request, DRAWS)
    return _Field(
        shapes=shapes * len(names),
        comms=[name for name in names for _ in shapes],
        predictions=predictions,
        rows=rows,
        request=request,
        draws=draws,
    )


def _scores(
    fields: dict[float, _Field], shares: dict[float, float], objective: Objective, max_tpot_ms: float | None
) -> tuple[Array, NDArray[np.bool_]]:
    """What is to be maximised, per draw and candidate, and which candidates are allowed."""
    total = np.zeros_like(next(iter(fields.values())).draws)
    allowed = np.ones(total.shape[1], dtype=bool)
    for b, share in shares.items():
        tok_s = fields[b].draws
        if objective == "goodput":
            total += share * tok_s * (1000.0 * b / tok_s <= float(max_tpot_ms or 0.0))
        else:
            total += share * tok_s
            if max_tpot_ms is not None:
                allowed &= (1000.0 * b / tok_s <= max_tpot_ms).mean(axis=0) >= 0.5
    if objective == "goodput":
        allowed = total.mean(axis=0) > 0.0
    return total, allowed


def _table(
    model: FittedModel,
    here: _Field,
    batch: float,
    probability: Array,
    regret: Array,
    measured: NDArray[np.bool_],
) -> tuple[Candidate, ...]:
    # All at once: what is solved for does not depend on the setting.
    distribution = model.distribution(here.request)
    low, high = (np.exp(distribution.quantile(x)).ravel() for x in (0.05, 0.95))
    out = []
    for j, (comm, i) in enumerate(here.rows):
        p = here.predictions[comm]
        K, topk, tokens = here.shapes[j]
        out.append(
            Candidate(
                num_steps=K,
                num_draft_tokens=tokens,
                topk=topk,
                comm=comm,
                batch=batch,
                tok_s=float(p.tok_s[i]),
                tok_s_interval=(float(low[j]), float(high[j])),
                tpot_ms=float(p.tpot_ms[i]),
                cycle_ms=float(p.cycle_ms[i]),
                verify_ms=float(p.verify_ms[i]),
                draft_ms=float(p.draft_ms[i]),
                overhead_ms=float(p.overhead_ms[i]),
                acceptance_length=float(p.acceptance_length[i]),
                speedup=float(p.speedup[i]),
                probability_best=float(probability[j]),
                expected_regret=float(regret[j]),
                extrapolated=bool(p.extrapolated[i]),
                measured=bool(measured[j]),
            )
        )
    return tuple(out)


def _plain(
    model: FittedModel,
    batch: float,
    context: int | None,
    workloads: tuple[str, ...],
) -> Plain:
    """The plain decoding that the speedups of this call are over."""
    rate = model.measured.plain_rate(batch, context, workloads)
    if rate is not None:
        low, high = model.predict(0, batch, rate.comm, context_tokens=context).interval(0.9)
        return Plain(comm=rate.comm, tok_s=rate.tok_s, tok_s_interval=(float(low), float(high)), measured=True)
    # As for the speedups: the best under any setting of the file, whatever settings the call may choose from.
    predicted = {name: model.predict(0, batch, name, context_tokens=context) for name in model.comm_names}
    name = max(predicted, key=lambda n: float(predicted[n].tok_s))
    low, high = predicted[name].interval(0.9)
    return Plain(
        comm=name, tok_s=float(predicted[name].tok_s), tok_s_interval=(float(low), float(high)), measured=False
    )


def _notices(model: FittedModel, best: Candidate) -> tuple[str, ...]:
    """What the measurements say about the verify pass of the chosen candidate besides its time."""
    sequences = max(best.batch / model.deployment.data_parallel, 1.0)
    tokens = sequences * (best.num_draft_tokens if best.num_steps else 1)
    return (
        *step_notices(model.calibration, tokens, sequences, best.comm),
        *cutoff_notices(model.deployment, sequences, tokens, best.comm),
    )


def _unmeasured(model: FittedModel, best: Candidate, workloads: tuple[str, ...]) -> tuple[str, ...]:
    """What the prediction of the chosen candidate rests on without a measurement."""
    m = model.measured
    sequences = max(best.batch / model.deployment.data_parallel, 1.0)
    tokens = sequences * best.num_draft_tokens
    out = []
    if (tokens, sequences, best.comm) not in m.verify:
        where = f"batch {best.batch:g}, comm {best.comm}"
        kind = "plain decoding" if best.num_steps == 0 else f"the verify pass of {tokens:g} tokens"
        out.append(f"{kind} at {where}")
    if best.num_steps and (best.num_steps, best.topk, best.comm) not in m.draft:
        out.append(f"the draft of {best.num_steps} steps under comm {best.comm}")
    if best.num_steps:
        short = [w for w in workloads if m.positions.get(w, 0) < best.num_steps]
        if short:
            known = min(m.positions.get(w, 0) for w in short)
            past = f"past position {known}" if known else "at any position"
            out.append(f"acceptance {past} of workload {', '.join(short)}")
    return tuple(out)


def _ceilings(
    model: FittedModel,
    chosen: Candidate,
    batch: float,
    context: int | None,
    options: dict[str, Any],
) -> dict[str, Ceiling]:
    """Amdahl ceilings at the chosen steps: 1 / (1 - share) for draft and verify, (K + 1) / E[N] for acceptance."""
    place = (batch, chosen.comm, chosen.topk, chosen.num_draft_tokens, context)
    most = min(chosen.num_steps + 1, chosen.num_draft_tokens)
    out: dict[str, Ceiling] = {}
    for name in ("draft", "verify"):
        if name == "draft" and chosen.num_steps == 0:
            out[name] = Ceiling(speedup=1.0, interval=(1.0, 1.0))
            continue
        share = model.interval_of(name + "_share", chosen.num_steps, *place, **options)
        speedup, low, high = (1.0 / (1.0 - min(x, 1.0 - 1e-6)) for x in share)
        out[name] = Ceiling(speedup=speedup, interval=(low, high))
    length, low, high = model.interval_of("acceptance_length", chosen.num_steps, *place, **options)
    out["acceptance"] = Ceiling(speedup=most / length, interval=(max(most / high, 1.0), most / low))
    return out
