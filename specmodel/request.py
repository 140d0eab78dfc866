"""The arguments of a prediction, checked and turned into arrays that broadcast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmodel.acceptance import MOST_TREE_TOKENS
from specmodel.deployment import Settings, as_settings
from specmodel.errors import UsageError
from specmodel.residual import distinct

__all__ = ["Request", "Workload", "checked", "number", "request_of", "shares_of"]

Array = NDArray[np.float64]
Workload = str | Mapping[str, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One call of `FittedModel.predict`, checked: arrays that broadcast, and the shares of the workloads."""

    settings: Settings
    """What a cycle costs: drafts made on average where drafting may not happen or stop early."""
    num_steps: Array
    """Drafts asked for."""
    verify_tokens: Array
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
        small = np.broadcast_arrays(self.num_steps, self.settings.topk, self.verify_tokens)
        code = np.zeros(small[0].shape, dtype=np.intp)
        for array in small:
            values, index = distinct(array)
            if len(values) > 1:
                code = code * len(values) + index
        codes, index = distinct(code)
        # One point of each code: the last that is written stays.
        first = np.empty(len(codes), dtype=np.intp)
        first[index.ravel()] = np.arange(code.size)
        return np.stack([array.ravel()[first] for array in small]), index


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
    drafts_made: Callable[[Array], Array] | None = None,
    graph_mode: int = 0,
    place: int = -1,
) -> Request:
    """Check the numeric arguments of a prediction; several comm settings broadcast along a new first axis.

    Raises
    ------
    UsageError
        For a number outside its domain; it names the argument.
    """
    K = checked("num_steps", num_steps, 0.0, whole=True)
    B = checked("batch", batch, 1.0)
    width = checked("topk", topk, 1.0, whole=True)
    drafting = K > 0
    tokens = K + 1.0
    if num_draft_tokens is not None:
        tokens = checked("num_draft_tokens", num_draft_tokens, 1.0, most=float(MOST_TREE_TOKENS), whole=True)
    _check_shapes(K, width, tokens)
    context = np.asarray(np.nan) if context_tokens is None else checked("context_tokens", context_tokens, 0.0)
    given = np.asarray(np.nan) if acceptance_length is None else checked("acceptance_length", acceptance_length, 1.0)
    graph, verify_graph = np.asarray(cuda_graph, dtype=bool), np.asarray(verify_cuda_graph, dtype=bool)
    try:
        shape = np.broadcast_shapes(*(a.shape for a in (K, tokens, B, width, context, graph, verify_graph, given)))
    except ValueError:
        raise UsageError(
            "the arrays of a prediction do not broadcast against each other; give them matching shapes"
        ) from None
    comms = np.asarray(comm)
    if comms.ndim:
        comms = comms.reshape(-1, *(1,) * len(shape))
        shape = (comms.shape[0], *shape)
    tokens = np.where(drafting, tokens, 1.0)
    # On a chain that is not always drafted to its end, what is made and verified on average.
    made = K if drafts_made is None else np.where(width > 1, K, drafts_made(K))
    settings = as_settings(
        num_steps=made,
        verify_tokens=tokens if drafts_made is None else np.where(width > 1, tokens, made + 1.0),
        batch=B,
        context_tokens=context,
        comm=comms,
        speculating=drafting,
        topk=np.where(drafting, width, 1.0),
        draft_mode=np.where(graph | ~drafting, graph_mode, 2),
        verify_eager=~verify_graph,
        workload=place,
    )
    # Plain decoding emits one token a cycle, whatever the caller says of the drafter.
    given = np.where(drafting, given, np.nan)
    return Request(settings=settings, num_steps=K, verify_tokens=tokens, shares=shares, given=given, shape=shape)


def _check_shapes(K: Array, topk: Array, tokens: Array) -> None:
    """A chain verifies num_steps + 1 tokens, a tree at least 2; raises `UsageError`."""
    try:
        K, topk, tokens = np.broadcast_arrays(K, topk, tokens)
    except ValueError:
        return  # said of all arrays together
    wrong = (K > 0) & np.where(topk > 1, tokens < 2, tokens != K + 1)
    if np.any(wrong):
        k, t, n = (int(a[wrong].ravel()[0]) for a in (K, topk, tokens))
        allowed = "at least 2" if t > 1 else f"num_steps + 1 = {k + 1}"
        raise UsageError(f"num_draft_tokens must be {allowed} for {k} steps with topk {t}, got {n}")


def checked(name: str, value: ArrayLike, least: float, most: float = 1e9, whole: bool = False) -> Array:
    """A finite array of numbers within [`least`, `most`], or a `UsageError` that names the argument."""
    try:
        x = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a number or an array of numbers, got {value!r}") from None
    good = np.isfinite(x) & (x >= least) & (x <= most)
    if not np.all(good):
        raise UsageError(f"{name} must lie between {least:g} and {most:g}, got {x[~good].ravel()[0]:g}")
    if whole and np.any(x != np.floor(x)):
        raise UsageError(f"{name} must be a whole number, got {x[x != np.floor(x)].ravel()[0]:g}")
    return x


def number(name: str, value: ArrayLike, least: float, most: float = 1e9, whole: bool = False) -> float:
    """One finite number within [`least`, `most`], or a `UsageError` that names the argument."""
    x = checked(name, value, least, most, whole)
    if x.ndim:
        raise UsageError(f"{name} must be one number, got {value!r}")
    return float(x)


def shares_of(workload: str | Mapping[str, float]) -> dict[str, float]:
    """A workload or a mixture as names and shares; raises `UsageError` for anything else."""
    if isinstance(workload, str):
        return {workload: 1.0}
    try:
        return {str(name): float(share) for name, share in workload.items()}
    except (AttributeError, TypeError, ValueError):
        raise UsageError(f"workload must be a name or a mapping of name to share, got {workload!r}") from None
