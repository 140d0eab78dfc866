"""The setting that a diagnosis is about, and joint draws of the parts of its cycle and of those around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specmodel.errors import UsageError
from specmodel.expectations import Facts, facts_of, plain_of
from specmodel.measured import default_context
from specmodel.model import FittedModel
from specmodel.parts import Parts, draw_with_parameters
from specmodel.request import Request, number

__all__ = ["Case", "case_of", "harmonic", "interval_90"]

Array = NDArray[np.float64]
DRAWS = 500
MOST_POINTS = 120
MOST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One speculative setting at one batch, and draws of every chain (and measured tree) under every setting there."""

    model: FittedModel
    batch: float
    context_tokens: int | None
    workloads: tuple[str, ...]
    workload: str | Mapping[str, float] | None
    """As it was asked for."""
    shapes: tuple[tuple[int, int, int], ...]
    """(num_steps, topk, num_draft_tokens); plain decoding first."""
    comms: tuple[str, ...]
    request: Request = field(repr=False)
    parts: Parts = field(repr=False)
    """Point ``c * len(shapes) + i`` is shape i under setting c."""
    parameters: Array = field(repr=False)
    """Of each draw, shape (draws, parameters)."""
    far: NDArray[np.bool_] = field(repr=False)
    """Points that are extrapolated, shape (points,)."""
    chosen: int
    """The point that is diagnosed."""
    plain: int
    """The point of plain decoding that it is compared with."""
    plain_tok_s: float | None
    """Measured; None where it is predicted."""
    measured: bool
    rows: tuple[tuple[float, Facts], ...]
    """(share, row) of each workload at the diagnosed setting; empty where not every workload was measured there."""
    facts: tuple[Facts, ...] = field(repr=False)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the setting that is diagnosed."""
        return self.shapes[self.chosen % len(self.shapes)]

    @property
    def fact(self) -> Facts | None:
        """The row that is diagnosed, where it is one row."""
        return self.rows[0][1] if len(self.rows) == 1 else None

    @property
    def comm(self) -> str:
        """Communication setting that is diagnosed."""
        return self.comms[self.chosen // len(self.shapes)]

    @property
    def measured_speedup(self) -> float | None:
        """Quotient of the measured rates, of all workloads together; None where one is missing."""
        rate = harmonic([(share, f.rate) for share, f in self.rows])
        plain = harmonic([(share, self.plain_of(f)) for share, f in self.rows])
        return None if rate is None or plain is None else rate / plain

    def plain_of(self, fact: Facts) -> float | None:
        """Plain rate that a row is compared with."""
        ends = plain_of(self.facts, fact)
        return self.plain_tok_s if ends is None else sum(ends) / 2

    def points(self, comm: str | None = None, *, chains: bool = False) -> list[int]:
        """Points that draft and are not extrapolated, of one setting or all; the diagnosed one is always among them."""
        out = []
        for j, far in enumerate(self.far):
            steps, topk, _ = self.shapes[j % len(self.shapes)]
            here = comm is None or self.comms[j // len(self.shapes)] == comm
            if j == self.chosen or (steps and here and not far and (topk == 1 or not chains)):
                out.append(j)
        return out

    def ratio(self, after: Array, point: int) -> Array:
        """Draws of a changed tok/s, shape (draws,), over that of a point as it is."""
        return np.asarray(after / self.parts.tok_s[:, point])


def interval_90(draws: Array) -> tuple[float, float]:
    """Central 90 % interval of draws."""
    low, high = np.quantile(draws, (0.05, 0.95))
    return float(low), float(high)


def case_of(
    model: FittedModel,
    batch: float | None = None,
    workload: str | Mapping[str, float] | None = None,
    comm: str | Sequence[str] | None = None,
    context_tokens: int | None = None,
) -> Case:
    """Find the setting to diagnose: the fastest measured one that drafts, else the one predicted to be fastest.

    Raises
    ------
    UsageError
        For names that the file lacks and numbers outside their domain.
    """
    cal, known = model.calibration, model.measured
    batch = _batch(model) if batch is None else number("batch", batch, 1.0)
    context = default_context(cal, batch) if context_tokens is None else context_tokens
    allowed = _comms(model, comm)
    shares = {model.layout.workloads[i]: share for i, share in model.mixture(workload)[0].items()}
    workloads = tuple(shares)
    facts = facts_of(cal)
    here = [f for f in facts if _is_here(f, batch, context, allowed, workloads)]
    graphs = _graphs(here)
    here = [f for f in here if (f.row.cuda_graph, f.row.verify_cuda_graph) == graphs]
    shapes = _shapes(model, here)
    names = _with_plain(model, allowed, len(shapes), batch, context, workloads)
    K, topk, tokens = (np.array(x, dtype=float) for x in zip(*shapes, strict=True))
    request, _ = model.request(K, batch, names, topk, tokens, context, workload, *graphs)
    parts, parameters = draw_with_parameters(model, request, DRAWS)
    far = np.concatenate(
        [
            np.atleast_1d(model.predict(K, batch, name, topk, tokens, context, workload, *graphs).extrapolated)
            for name in names
        ]
    )
    mean = np.log(parts.tok_s).mean(axis=0)
    chosen, rows = _chosen(here, shapes, names, mean, shares)
    drafting = [j for j in range(len(mean)) if shapes[j % len(shapes)][0] and names[j // len(shapes)] in allowed]
    if chosen is None:
        near = [j for j in drafting if not far[j]]
        # Where nothing is near anything measured: the shortest chain.
        chosen = max(near, key=lambda j: mean[j]) if near else drafting[0]
    rate = known.plain_rate(batch, context, workloads)
    plain_comm = names[int(np.argmax([mean[c * len(shapes)] for c in range(len(names))]))]
    if rate is not None and rate.comm in names:
        plain_comm = rate.comm
    return Case(
        model=model,
        batch=batch,
        context_tokens=context,
        workloads=workloads,
        workload=workload,
        shapes=tuple(shapes),
        comms=names,
        request=request,
        parts=parts,
        parameters=parameters,
        far=far,
        chosen=chosen,
        plain=names.index(plain_comm) * len(shapes),
        plain_tok_s=None if rate is None else rate.tok_s,
        measured=bool(here),
        rows=rows,
        facts=facts,
    )


def _batch(model: FittedModel) -> float:
    """1 if measured, else the smallest measured with speculation, else the smallest measured."""
    known = model.measured
    if 1.0 in known.drafting_batches or not known.batches:
        return 1.0
    return (known.drafting_batches or known.batches)[0]


def _comms(model: FittedModel, comm: str | Sequence[str] | None) -> tuple[str, ...]:
    if comm is None:
        used = tuple(name for name in model.comm_names if name in model.measured.comms)
        return used or model.comm_names[:1]
    names = (comm,) if isinstance(comm, str) else tuple(comm)
    if not names:
        raise UsageError("comm: no setting is left to choose from; name at least one")
    for name in names:
        model.comm_index(name)
    return tuple(dict.fromkeys(names))


def _is_here(
    fact: Facts, batch: float, context: int | None, comms: tuple[str, ...], workloads: tuple[str, ...]
) -> bool:
    row = fact.row
    timed = fact.tok_s is not None or fact.cycle_ms is not None
    return (
        row.num_steps > 0
        and timed
        and abs(row.batch - batch) < 1e-9
        and row.context_tokens in (context, None)
        and row.comm in comms
        and row.workload in workloads
    )


def _graphs(here: Sequence[Facts]) -> tuple[bool, bool]:
    """Whether drafts and passes run in graphs: as the fastest measured row has it."""
    best = max(here, key=lambda f: f.rate or 0.0, default=None)
    return (True, True) if best is None else (best.row.cuda_graph, best.row.verify_cuda_graph)


def _shapes(model: FittedModel, here: Sequence[Facts]) -> list[tuple[int, int, int]]:
    longest = max(MOST_STEPS, model.measured.largest_steps)
    chains = set(range(min(longest, MOST_STEPS) + 1)) | {f.row.num_steps for f in here if f.row.topk == 1}
    trees = dict.fromkeys(f.shape for f in here if f.row.topk > 1)
    return [(k, 1, k + 1) for k in sorted(chains)] + sorted(trees)


def _with_plain(
    model: FittedModel,
    allowed: tuple[str, ...],
    shapes: int,
    batch: float,
    context: int | None,
    workloads: tuple[str, ...],
) -> tuple[str, ...]:
    """The settings that are drawn: those allowed, and that of the plain decoding that all are compared with."""
    rate = model.measured.plain_rate(batch, context, workloads)
    names = tuple(dict.fromkeys((*allowed, *([] if rate is None else [rate.comm]))))
    return names[: max(MOST_POINTS // shapes, 1)]


def _chosen(
    here: Sequence[Facts],
    shapes: list[tuple[int, int, int]],
    names: tuple[str, ...],
    mean: Array,
    shares: Mapping[str, float],
) -> tuple[int | None, tuple[tuple[float, Facts], ...]]:
    """The fastest measured point; by the model where no point has a rate of every workload."""
    here = [f for f in here if f.row.comm in names]
    if not here:
        return None, ()
    best: dict[int, dict[str, Facts]] = {}
    for f in here:
        rows = best.setdefault(names.index(f.row.comm) * len(shapes) + shapes.index(f.shape), {})
        before = rows.get(f.row.workload)
        if before is None or (f.rate or 0.0) > (before.rate or 0.0):
            rows[f.row.workload] = f
    whole = {
        j: harmonic([(share, rows[w].rate if w in rows else None) for w, share in shares.items()])
        for j, rows in best.items()
    }
    timed = {j: rate for j, rate in whole.items() if rate is not None}
    point = max(timed, key=lambda j: timed[j]) if timed else max(best, key=lambda j: float(mean[j]))
    complete = set(best[point]) == set(shares)
    return point, tuple((share, best[point][w]) for w, share in shares.items()) if complete else ()


def harmonic(values: Sequence[tuple[float, float | None]]) -> float | None:
    """Harmonic mean by shares of tokens; None where a value is missing, or there is none."""
    known = [(share, value) for share, value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    least = min(value for _, value in known)  # in units of it nothing overflows
    return least / sum(share * (least / value) for share, value in known)
