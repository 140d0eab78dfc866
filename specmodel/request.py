"""The arguments of a prediction, checked and turned into arrays that broadcast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.deployment import Settings, as_settings
from specmodel.errors import UsageError

__all__ = ["Request", "Workload", "checked", "request_of"]

Array = NDArray[np.float64]
Workload = str | Mapping[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `FittedModel.predict`, checked: arrays that broadcast, and the shares of the workloads."""

    settings: Settings
    shares: dict[int, float]
    given: Array
    """Acceptance length that the caller gave, NaN where it is the model's."""
    shape: tuple[int, ...]

    @property
    def batch(self) -> Array:
        """Sequences of all data-parallel ranks together."""
        return self.settings.batch

    def kinds(self) -> tuple[Array, NDArray[np.intp]]:
        """The different (steps, topk, verified tokens), shape (3, U), and which of them each point has."""
        s = self.settings
        small = np.broadcast_arrays(s.num_steps, s.topk, s.verify_tokens)
        kinds, index = np.unique(np.stack([a.ravel() for a in small]), axis=1, return_inverse=True)
        return kinds, np.asarray(index.reshape(small[0].shape), dtype=np.intp)


def request_of(
    *,
    num_steps: ArrayLike,
    batch: ArrayLike,
    comm: int | list[int],
    topk: ArrayLike,
    num_draft_tokens: ArrayLike | None,
    context_tokens: ArrayLike | None,
    shares: dict[int, float],
    cuda_graph: ArrayLike,
    verify_cuda_graph: ArrayLike,
    acceptance_length: ArrayLike | None,
    place: int = -1,
) -> Request:
    """Check the numeric arguments of a prediction; several comm settings broadcast along a new first axis.

    Raises
    ------
    UsageError
        For a number outside its domain; it names the argument.
    """
    K = checked("num_steps", num_steps, 0.0)
    if np.any(np.floor(K) != K):
        raise UsageError(f"num_steps must be whole numbers, got {K[np.floor(K) != K].ravel()[0]:g}")
    tokens = K + 1.0 if num_draft_tokens is None else checked("num_draft_tokens", num_draft_tokens, 1.0)
    B = checked("batch", batch, 1.0)
    width = checked("topk", topk, 1.0)
    context = np.asarray(np.nan) if context_tokens is None else checked("context_tokens", context_tokens, 0.0)
    given = np.asarray(np.nan) if acceptance_length is None else checked("acceptance_length", acceptance_length, 1.0)
    graph, verify_graph = np.asarray(cuda_graph, dtype=bool), np.asarray(verify_cuda_graph, dtype=bool)
    shape = np.broadcast_shapes(*(a.shape for a in (K, tokens, B, width, context, graph, verify_graph, given)))
    comms = np.asarray(comm)
    if comms.ndim:
        comms = comms.reshape(-1, *(1,) * len(shape))
        shape = (comms.shape[0], *shape)
    drafting = K > 0
    settings = as_settings(
        num_steps=K,
        verify_tokens=np.where(drafting, tokens, 1.0),
        batch=B,
        context_tokens=context,
        comm=comms,
        speculating=drafting,
        topk=np.where(drafting, width, 1.0),
        draft_mode=np.where(graph | ~drafting, 0, 2),
        verify_eager=~verify_graph,
        workload=place,
    )
    return Request(settings=settings, shares=shares, given=given, shape=shape)


def checked(name: str, value: ArrayLike, least: float) -> Array:
    """A finite array of numbers from `least`, or a `UsageError` that names the argument."""
    try:
        x = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a number or an array of numbers, got {value!r}") from None
    if not np.all(np.isfinite(x)) or np.any(x < least):
        bad = x[~(np.isfinite(x) & (x >= least))].ravel()[0]
        raise UsageError(f"{name} must be finite and {least:g} or more, got {bad:g}")
    return x
