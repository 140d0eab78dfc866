"""What of a deployment is constant: graph padding, all-reduce curves, contexts; and configurations as cost points."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.allreduce import AllreduceCurve
from specmodel.calibration import Calibration
from specmodel.cost import CostPoints, CostStructure
from specmodel.residual import ResidualPoints

__all__ = [
    "Deployment",
    "Settings",
    "as_settings",
    "deployment_of",
    "draft_mode_of",
    "flattened",
    "part_of",
]

Array = NDArray[np.float64]
MODES = {"step": 0, "cycle": 1, None: 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Configurations as arrays that broadcast against each other: what a user varies."""

    num_steps: Array
    verify_tokens: Array
    """Verified tokens per sequence, root included."""
    batch: Array
    context_tokens: Array
    """NaN where none is stated."""
    comm: NDArray[np.intp]
    speculating: Array
    topk: Array
    draft_mode: NDArray[np.intp]
    verify_eager: Array
    workload: NDArray[np.intp]
    """Index of the workload, -1 for none or a mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Constants of one deployment."""

    structure: CostStructure
    data_parallel: int
    graph_sizes: Array
    graph_unit: str
    context_reference: float
    """Tokens; the median of the stated contexts, NaN where none is stated."""
    curves: tuple[AllreduceCurve | None, ...]
    """All-reduce curve of each communication setting; that of `default` where a setting has none of its own."""
    own_curve: tuple[bool, ...]
    message_bytes_per_token: float
    allreduces_per_pass: int
    graph_mode: int
    """How drafts in CUDA graphs were mostly measured: 0 one graph a step, 1 one graph a cycle."""

    def points(self, settings: Settings, rank_batch: bool = False) -> tuple[CostPoints, ResidualPoints]:
        """Cost and residual points of settings; `rank_batch` says that `batch` is already that of one rank.

        Arrays keep their own shapes: they broadcast against each other, and what does not vary is computed once.
        """
        K, q, comm, topk, mode = (
            settings.num_steps,
            settings.verify_tokens,
            settings.comm,
            settings.topk,
            settings.draft_mode,
        )
        b = settings.batch if rank_batch else np.maximum(settings.batch / self.data_parallel, 1.0)
        padded_b, padded_n, uncaptured = self._pad(b, b * q)
        if np.any(settings.verify_eager):
            # Padding is what a captured graph costs; without one a pass runs at its own size.
            padded_b = np.where(settings.verify_eager > 0, b, padded_b)
            padded_n = np.where(settings.verify_eager > 0, b * q, padded_n)
        context = settings.context_tokens
        ratio = np.maximum(context, 1.0) / self.context_reference
        ratio = np.where(np.isnan(ratio), 1.0, ratio)
        allreduce_ms = np.zeros(())
        for c, curve in enumerate(self.curves):
            if curve is not None and np.any(comm == c):
                time_ms = self.allreduces_per_pass * curve.at(padded_n * self.message_bytes_per_token)
                allreduce_ms = allreduce_ms + np.where(comm == c, time_ms, 0.0)
        cost_points = CostPoints(
            steps=K,
            query_tokens=q,
            sequences=padded_b,
            context_ratio=ratio,
            comm=comm,
            speculating=settings.speculating,
            topk=topk,
            draft_mode=mode,
            verify_eager=np.maximum(settings.verify_eager, uncaptured),
            allreduce_ms=np.asarray(allreduce_ms),
            padded_tokens=padded_n,
        )
        residual_points = ResidualPoints(
            log_tokens=np.log(padded_n),
            log_sequences=np.log(padded_b),
            log_context=np.log(ratio),
            log_steps=np.log(np.maximum(K, 0.5)),
            speculating=settings.speculating,
            comm=comm,
            draft_mode=mode,
            topk=topk,
            workload=settings.workload,
        )
        return cost_points, residual_points

    def _pad(self, sequences: Array, tokens: Array) -> tuple[Array, Array, Array]:
        """Sequences and tokens padded to captured sizes, and 1.0 where a pass is larger than any captured one."""
        if not len(self.graph_sizes):
            return sequences, tokens, np.zeros(())
        by_tokens = self.graph_unit == "tokens"
        size = tokens if by_tokens else sequences
        index = np.searchsorted(self.graph_sizes, size - 1e-9)
        beyond = index >= len(self.graph_sizes)
        captured = np.where(beyond, size, self.graph_sizes[np.minimum(index, len(self.graph_sizes) - 1)])
        if by_tokens:
            return sequences, captured, beyond.astype(float)
        return captured, captured * tokens / sequences, beyond.astype(float)

    def graph_limit_tokens(self, query_tokens: Array) -> Array:
        """Largest number of tokens of one rank that runs in a captured graph; infinite where sizes are unknown."""
        if not len(self.graph_sizes):
            return np.asarray(np.inf)
        limit = float(self.graph_sizes[-1])
        return np.asarray(query_tokens * limit if self.graph_unit == "sequences" else limit)


Points = TypeVar("Points", CostPoints, ResidualPoints)


def flattened(points: Points, shape: tuple[int, ...]) -> Points:
    """The same points broadcast to `shape` and flattened: every array of one length."""
    arrays = {f.name: np.broadcast_to(getattr(points, f.name), shape).ravel() for f in fields(points)}
    return replace(points, **arrays)


def part_of(points: Points, piece: slice) -> Points:
    """Some of the points, every array of which has one length."""
    return replace(points, **{f.name: getattr(points, f.name)[piece] for f in fields(points)})


def draft_mode_of(cuda_graph: bool, graph_scope: str | None) -> int:
    """Index of the drafter's mode: 0 one graph a step, 1 one graph a cycle, 2 eager."""
    return 2 if not cuda_graph else MODES[graph_scope]


def _curve(cal: Calibration, comm: str) -> AllreduceCurve | None:
    rows = [r for r in cal.measurements.allreduce if r.comm == comm]
    in_graph = [r for r in rows if r.in_graph]
    rows = in_graph or rows
    width = cal.system.tensor_parallel
    rows = [r for r in rows if r.num_gpus is None or width is None or r.num_gpus == width]
    times: dict[int, list[float]] = {}
    for r in rows:
        low, high = r.range_ms or (r.time_ms, r.time_ms)
        if low is not None and high is not None:
            times.setdefault(r.size_bytes, []).append(float(np.sqrt(low * high)))
    if not times:
        return None
    sizes = sorted(times)
    return AllreduceCurve(
        size_bytes=np.array(sizes, dtype=float), time_ms=np.array([float(np.median(times[s])) for s in sizes])
    )


def deployment_of(cal: Calibration) -> Deployment:
    """Constants of the deployment that a calibration describes."""
    model, system = cal.model, cal.system
    names = ("default", *[name for name in cal.comm if name != "default"])
    contexts = [r.context_tokens for r in cal.measurements.cycles if r.context_tokens]
    contexts += [r.context_tokens for r in cal.measurements.verify if r.context_tokens]
    moe = bool(model.num_experts and model.experts_per_token)
    # A curve helps only where it can be turned into a time: sizes of the model known.
    sized = bool(model.hidden_size and model.num_layers)
    curves = [_curve(cal, name) if sized else None for name in names]
    batches = [r.batch / system.data_parallel for r in cal.measurements.cycles]
    batches += [r.batch for r in cal.measurements.verify]
    scopes = [r.graph_scope for r in cal.measurements.draft if r.cuda_graph]
    scopes += [r.graph_scope for r in cal.measurements.cycles if r.cuda_graph and r.num_steps]
    structure = CostStructure(
        comm_names=names,
        num_experts=model.num_experts or 0 if moe else 0,
        experts_per_token=model.experts_per_token or 0 if moe else 0,
        reference_tokens=max(min(batches, default=1.0), 1.0),
    )
    return Deployment(
        structure=structure,
        data_parallel=system.data_parallel,
        graph_sizes=np.array(model.cuda_graph_sizes, dtype=float),
        graph_unit=model.cuda_graph_unit,
        context_reference=float(np.median(contexts)) if contexts else float("nan"),
        curves=tuple(curve if curve is not None else curves[0] for curve in curves),
        own_curve=tuple(curve is not None for curve in curves),
        message_bytes_per_token=float((model.hidden_size or 0) * model.activation_bytes),
        allreduces_per_pass=2 * (model.num_layers or 0),
        graph_mode=int(2 * scopes.count("cycle") > len(scopes)),
    )


def as_settings(
    *,
    num_steps: ArrayLike,
    verify_tokens: ArrayLike,
    batch: ArrayLike,
    context_tokens: ArrayLike,
    comm: ArrayLike,
    speculating: ArrayLike,
    topk: ArrayLike,
    draft_mode: ArrayLike,
    verify_eager: ArrayLike,
    workload: ArrayLike = -1,
) -> Settings:
    """`Settings` from anything that broadcasts; a context of None is unknown."""
    return Settings(
        num_steps=np.asarray(num_steps, dtype=float),
        verify_tokens=np.asarray(verify_tokens, dtype=float),
        batch=np.asarray(batch, dtype=float),
        context_tokens=np.asarray(np.nan if context_tokens is None else context_tokens, dtype=float),
        comm=np.asarray(comm, dtype=np.intp),
        speculating=np.asarray(speculating, dtype=float),
        topk=np.asarray(topk, dtype=float),
        draft_mode=np.asarray(draft_mode, dtype=np.intp),
        verify_eager=np.asarray(verify_eager, dtype=float),
        workload=np.asarray(workload, dtype=np.intp),
    )
