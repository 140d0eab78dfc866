"""The residual process: what the named terms cannot say, kept where it was measured.

Kernels step at tile edges and graph sizes, so a measured pass is off the smooth terms by a few percent, and so is its
neighbour. A Gaussian process over the logarithm of a pass models that: it reproduces measured steps and widens the
interval between and beyond them. All components are products of a Matern-3/2 correlation of one variable and
indicators, so a prediction needs no more than sums over measured points.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["ResidualPoints", "Residuals", "draft_covariance", "draft_variance", "matern32", "verify_covariance", "verify_variance"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """Standard deviations (natural log units) and lengths of the residual process of verify and draft."""

    tokens: float = 0.075
    tokens_length: float = 1.2
    batch: float = 0.03
    batch_speculating: float = 0.03
    batch_length: float = 1.0
    context: float = 0.05
    context_length: float = 1.0
    comm: float = 0.02
    configuration: float = 0.018
    draft_steps: float = 0.025
    draft_batch: float = 0.03
    draft_configuration: float = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualPoints:
    """Coordinates of N passes in the residual process."""

    log_tokens: Array
    log_sequences: Array
    log_context: Array
    log_steps: Array
    speculating: Array
    comm: NDArray[np.intp]
    draft_mode: NDArray[np.intp]
    topk: Array
    verify_tokens: Array


def matern32(distance: Array, length: float) -> Array:
    """Matern correlation with smoothness 3/2: ``(1 + a) exp(-a)``, ``a = sqrt(3) |d| / length``.

    Rasmussen and Williams, Gaussian Processes for Machine Learning, equation 4.17.
    """
    a = np.abs(distance) * (np.sqrt(3.0) / length)
    return np.asarray((1.0 + a) * np.exp(-a))


def _differences(x: Array, y: Array) -> Array:
    return x[:, None] - y[None, :]


def verify_covariance(left: ResidualPoints, right: ResidualPoints, scale: Residuals) -> Array:
    """Covariance of the log-residual of verify passes, shape (len(left), len(right))."""
    tokens = matern32(_differences(left.log_tokens, right.log_tokens), scale.tokens_length)
    batch = matern32(_differences(left.log_sequences, right.log_sequences), scale.batch_length)
    context = matern32(_differences(left.log_context, right.log_context), scale.context_length)
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
    out += scale.configuration**2 * (same_tokens & same_sequences & same_context & same_on & same_tree)
    return np.asarray(out)


def draft_covariance(left: ResidualPoints, right: ResidualPoints, scale: Residuals) -> Array:
    """Covariance of the log-residual of the drafts of a cycle, shape (len(left), len(right))."""
    steps = matern32(_differences(left.log_steps, right.log_steps), 1.0)
    batch = matern32(_differences(left.log_sequences, right.log_sequences), scale.batch_length)
    same_mode = (left.draft_mode[:, None] == right.draft_mode[None, :]) & (left.comm[:, None] == right.comm[None, :])
    same_width = left.topk[:, None] == right.topk[None, :]
    same = (left.log_steps[:, None] == right.log_steps[None, :]) & (
        left.log_sequences[:, None] == right.log_sequences[None, :]
    )
    out = scale.draft_steps**2 * steps * same_mode * same_width
    out += scale.draft_batch**2 * batch * same_mode
    out += scale.draft_configuration**2 * (same & same_mode & same_width)
    return np.asarray(out)


def verify_variance(points: ResidualPoints, scale: Residuals) -> Array:
    """Diagonal of ``verify_covariance(points, points, scale)``."""
    fixed = scale.tokens**2 + scale.batch**2 + scale.context**2 + scale.comm**2 + scale.configuration**2
    return np.asarray(fixed + scale.batch_speculating**2 * points.speculating**2)


def draft_variance(points: ResidualPoints, scale: Residuals) -> Array:
    """Diagonal of ``draft_covariance(points, points, scale)``."""
    return np.full(points.log_tokens.shape, scale.draft_steps**2 + scale.draft_batch**2 + scale.draft_configuration**2)
