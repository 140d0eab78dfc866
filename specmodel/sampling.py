"""Draws of ln tok/s, and what they were made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmodel.posterior import Moments
from specmodel.residual import ResidualPoints

__all__ = ["Sample", "symmetric_root"]

Array = NDArray[np.float64]


def symmetric_root(covariance: Array) -> Array:
    """Symmetric square root of a covariance, what rounding made negative left out.

    It does not depend on the basis that LAPACK picks: the same draws everywhere.
    """
    values, vectors = np.linalg.eigh(0.5 * (covariance + covariance.T))
    return np.asarray((vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Draws of ln tok/s of N points under one mode, and what they were made of."""

    mode: int
    at: Moments
    right: ResidualPoints
    mean: Array
    """Shape (N,)."""
    root: Array
    """Symmetric root of the posterior covariance, shape (N, N)."""
    scale: Array
    """Factor that makes a normal draw one of Student's, shape (n, 1)."""
    normal: Array
    """Standard normal draws, shape (n, N)."""

    @property
    def log_tok_s(self) -> Array:
        """The draws, shape (n, N)."""
        return np.asarray(self.mean + self.scale * (self.normal @ self.root))
