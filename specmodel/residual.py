"""The residual process: what the named terms cannot say, kept where it was measured.

Kernels step at tile edges and graph sizes, so a measured pass is off the smooth terms by a few percent, and so is its
neighbour. A Gaussian process over the logarithm of a pass models that: it reproduces measured steps and widens the
interval between and beyond them. All components are products of a Matern-3/2 correlation of one variable and
indicators, so a prediction needs no more than sums over measured points.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ResidualPoints",
    "Residuals",
    "distinct",
    "draft_covariance",
    "draft_mean",
    "draft_variance",
    "matern32",
    "verify_covariance",
    "verify_mean",
    "verify_variance",
]

Array = NDArray[np.float64]
DRAFT_LENGTH = 1.0
"""Correlation length of the draft residual in the logarithm of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Standard deviations (natural log units) and lengths of the residual process of verify and draft."""

    tokens: float = 0.105
    tokens_length: float = 1.2
    batch: float = 0.03
    batch_speculating: float = 0.03
    batch_length: float = 1.0
    context: float = 0.05
    context_length: float = 1.0
    comm: float = 0.02
    workload: float = 0.08
    """What the cycles of one workload have in common (its contexts, above all); 0 in a file of one workload."""
    configuration: float = 0.017
    draft_steps: float = 0.025
    draft_batch: float = 0.03
    draft_context: float = 0.03
    draft_configuration: float = 0.008


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualPoints:
    """Coordinates of passes in the residual process; arrays that broadcast against each other."""

    log_tokens: Array
    log_sequences: Array
    log_context: Array
    log_steps: Array
    speculating: Array
    comm: NDArray[np.intp]
    draft_mode: NDArray[np.intp]
    topk: Array
    workload: NDArray[np.intp]
    """Index of the workload whose cycles these are; -1 for a pass alone and for a mixture."""


def matern32(distance: Array, length: float) -> Array:
    """Matern correlation with smoothness 3/2: ``(1 + a) exp(-a)``, ``a = sqrt(3) |d| / length``.

    Rasmussen and Williams, Gaussian Processes for Machine Learning, equation 4.17.
    """
    a = np.abs(distance) * (np.sqrt(3.0) / length)
    return np.asarray((1.0 + a) * np.exp(-a))


# From this many points on, a correlation is computed once for each distinct value of its variable.
_MANY = 4096


def distinct(x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.intp]]:
    """Distinct values of an array, increasing, and which of them each element is, in the shape of the array."""
    values = np.unique(x)
    # A search among few values is much quicker than the sort that numpy's own inverse takes.
    return values, np.asarray(np.searchsorted(values, x))


def _correlation(left: Array, right: Array, length: float) -> Array:
    """Matern correlation of every left value with every right value, shape (left, right)."""
    if right.size > _MANY:
        few, row = distinct(left)
        values, column = distinct(right)
        if values.size < right.size:
            return np.asarray(matern32(few[:, None] - values[None, :], length)[:, column][row])
        return np.asarray(matern32(few[:, None] - right[None, :], length)[row])
    return matern32(left[:, None] - right[None, :], length)


def _smooth_mean(weights: Array, left: Array, right: Array, length: float) -> Array:
    """Weighted sum over the left values of the correlation with each right value, shape of `right`."""
    used = weights != 0.0
    if not used.any():
        return np.zeros(right.shape)
    values, index = distinct(right) if right.size > _MANY else (right.ravel(), None)
    left, row = distinct(left[used])
    weights = np.asarray(np.bincount(row, weights[used]), dtype=float)
    total = np.empty(values.size)
    for start in range(0, values.size, _MANY):
        piece = values[start : start + _MANY]
        total[start : start + _MANY] = weights @ matern32(left[:, None] - piece[None, :], length)
    return np.asarray(total.reshape(right.shape) if index is None else total[index])


def verify_mean(weights: Array, left: ResidualPoints, right: ResidualPoints, scale: Residuals) -> Array:
    """``weights @ verify_covariance(left, right, scale)``, for right-hand coordinates of any broadcastable shapes."""
    on = right.speculating > 0
    left_on = left.speculating > 0
    out = np.zeros(np.broadcast_shapes(right.log_tokens.shape, right.log_sequences.shape, right.log_context.shape))
    for flag in (False, True):
        here = np.where(left_on == flag, weights, 0.0)
        out = out + np.where(
            on == flag,
            scale.tokens**2 * _smooth_mean(here, left.log_tokens, right.log_tokens, scale.tokens_length),
            0.0,
        )
    batch = scale.batch**2 * _smooth_mean(weights, left.log_sequences, right.log_sequences, scale.batch_length)
    both = scale.batch_speculating**2 * _smooth_mean(
        weights * left_on, left.log_sequences, right.log_sequences, scale.batch_length
    )
    out = out + batch + np.where(on, both, 0.0)
    if np.any(left.log_context) or np.any(right.log_context):
        out = out + scale.context**2 * _smooth_mean(weights, left.log_context, right.log_context, scale.context_length)
    else:
        out = out + scale.context**2 * weights.sum()
    for c in np.unique(right.comm):
        own = np.where(left.comm == c, weights, 0.0)
        smooth = _smooth_mean(own, left.log_tokens, right.log_tokens, scale.tokens_length)
        out = out + np.where(right.comm == c, scale.comm**2 * smooth, 0.0)
    if scale.workload:
        for w in np.unique(right.workload[right.workload >= 0]):
            total = float(weights[left.workload == w].sum())
            out = out + np.where(right.workload == w, scale.workload**2 * total, 0.0)
    for i in np.flatnonzero(weights):
        same = [
            right.log_tokens == left.log_tokens[i],
            right.log_sequences == left.log_sequences[i],
            right.log_context == left.log_context[i],
            on == left_on[i],
            right.topk == left.topk[i],
        ]
        if all(s.any() for s in same):
            out = out + weights[i] * scale.configuration**2 * (same[0] & same[1] & same[2] & same[3] & same[4])
    return out


def draft_mean(weights: Array, left: ResidualPoints, right: ResidualPoints, scale: Residuals) -> Array:
    """``weights @ draft_covariance(left, right, scale)``, for right-hand coordinates of any broadcastable shapes."""
    out = np.zeros(np.broadcast_shapes(right.log_steps.shape, right.log_sequences.shape, right.log_context.shape))
    for mode in np.unique(right.draft_mode):
        for c in np.unique(right.comm):
            own = np.where((left.draft_mode == mode) & (left.comm == c), weights, 0.0)
            if not own.any():
                continue
            here = (right.draft_mode == mode) & (right.comm == c)
            batch = _smooth_mean(own, left.log_sequences, right.log_sequences, scale.batch_length)
            context = _smooth_mean(own, left.log_context, right.log_context, scale.context_length)
            part = scale.draft_batch**2 * batch + scale.draft_context**2 * context
            for width in np.unique(left.topk[own != 0.0]):
                narrow = np.where(left.topk == width, own, 0.0)
                smooth = scale.draft_steps**2 * _smooth_mean(narrow, left.log_steps, right.log_steps, DRAFT_LENGTH)
                part = part + np.where(right.topk == width, smooth, 0.0)
            for i in np.flatnonzero(own):
                same = [
                    right.log_steps == left.log_steps[i],
                    right.log_sequences == left.log_sequences[i],
                    right.log_context == left.log_context[i],
                    right.topk == left.topk[i],
                ]
                if all(s.any() for s in same):
                    match = same[0] & same[1] & same[2] & same[3]
                    part = part + own[i] * scale.draft_configuration**2 * match
            out = out + np.where(here, part, 0.0)
    return out


def verify_covariance(left: ResidualPoints, right: ResidualPoints, scale: Residuals) -> Array:
    """Covariance of the log-residual of verify passes, shape (len(left), len(right))."""
    tokens = _correlation(left.log_tokens, right.log_tokens, scale.tokens_length)
    batch = _correlation(left.log_sequences, right.log_sequences, scale.batch_length)
    context = _correlation(left.log_context, right.log_context, scale.context_length)
    same_on = left.speculating[:, None] == right.speculating[None, :]
    both_on = left.speculating[:, None] * right.speculating[None, :]
    same_comm = left.comm[:, None] == right.comm[None, :]
    same_tree = left.topk[:, None] == right.topk[None, :]
    same_sequences = left.log_sequences[:, None] == right.log_sequences[None, :]
    same_tokens = left.log_tokens[:, None] == right.log_tokens[None, :]
    same_context = left.log_context[:, None] == right.log_context[None, :]
    out = scale.tokens**2 * tokens * same_on
    out += (scale.batch**2 + scale.batch_speculating**2 * both_on) * batch
    out += scale.context**2 * context
    out += scale.comm**2 * tokens * same_comm
    if scale.workload:
        same_workload = left.workload[:, None] == right.workload[None, :]
        out += scale.workload**2 * (same_workload & (left.workload >= 0)[:, None])
    out += scale.configuration**2 * (same_tokens & same_sequences & same_context & same_on & same_tree)
    return np.asarray(out)


def draft_covariance(left: ResidualPoints, right: ResidualPoints, scale: Residuals) -> Array:
    """Covariance of the log-residual of the drafts of a cycle, shape (len(left), len(right))."""
    steps = _correlation(left.log_steps, right.log_steps, DRAFT_LENGTH)
    batch = _correlation(left.log_sequences, right.log_sequences, scale.batch_length)
    same_mode = (left.draft_mode[:, None] == right.draft_mode[None, :]) & (left.comm[:, None] == right.comm[None, :])
    same_width = left.topk[:, None] == right.topk[None, :]
    context = _correlation(left.log_context, right.log_context, scale.context_length)
    same = (left.log_steps[:, None] == right.log_steps[None, :]) & (
        left.log_sequences[:, None] == right.log_sequences[None, :]
    )
    same &= left.log_context[:, None] == right.log_context[None, :]
    # In place: of many points every array is large.
    out = scale.draft_steps**2 * steps
    out *= same_width
    batch *= scale.draft_batch**2
    out += batch
    context *= scale.draft_context**2
    out += context
    out += scale.draft_configuration**2 * (same & same_width)
    out *= same_mode
    return np.asarray(out)


def verify_variance(points: ResidualPoints, scale: Residuals) -> Array:
    """Diagonal of ``verify_covariance(points, points, scale)``."""
    fixed = scale.tokens**2 + scale.batch**2 + scale.context**2 + scale.comm**2 + scale.configuration**2
    own = scale.workload**2 * (points.workload >= 0)
    return np.asarray(fixed + scale.batch_speculating**2 * points.speculating**2 + own)


def draft_variance(points: ResidualPoints, scale: Residuals) -> Array:
    """Diagonal of ``draft_covariance(points, points, scale)``."""
    total = scale.draft_steps**2 + scale.draft_batch**2 + scale.draft_context**2 + scale.draft_configuration**2
    return np.full(points.log_tokens.shape, total)
