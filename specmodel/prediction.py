"""What a prediction is: times, rates and their distribution, and fitted terms in units that people read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.special import stdtr, stdtrit

from specmodel.errors import UsageError
from specmodel.posterior import Posterior

__all__ = ["Distribution", "Prediction", "Term", "natural", "scalar", "terms_of"]

Array = NDArray[np.float64]


def scalar(x: Any) -> Any:
    """A Python scalar for a 0-d array, anything else as it is."""
    return x.item() if isinstance(x, np.ndarray | np.generic) and x.ndim == 0 else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Distribution of ln tok/s for one new measurement: a mixture of Student distributions, one a mode."""

    means: Array
    """Shape (modes, ...)."""
    sds: Array
    """The noise of one measurement included, shape (modes, ...)."""
    degrees: Array
    weights: Array

    def quantile(self, probability: float) -> Array:
        """Quantile of ln tok/s, shape (...)."""
        shape = (-1,) + (1,) * (self.means.ndim - 1)
        degrees = self.degrees.reshape(shape)
        each = self.means + np.asarray(stdtrit(degrees, probability)) * self.sds
        if len(self.weights) == 1:
            return np.asarray(each[0])
        # The quantile of the mixture lies between those of its parts.
        low, high = each.min(axis=0), each.max(axis=0)
        for _ in range(30):
            middle = 0.5 * (low + high)
            below = np.tensordot(self.weights, stdtr(degrees, (middle - self.means) / self.sds), axes=(0, 0))
            low, high = np.where(below < probability, middle, low), np.where(below < probability, high, middle)
        return np.asarray(0.5 * (low + high))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says about one configuration or an array of them; scalars in, scalars out.

    ``tok_s = 1000 * batch * acceptance_length / cycle_ms`` and ``cycle_ms = verify_ms + draft_ms + overhead_ms`` hold
    exactly.
    """

    tok_s: Array
    tpot_ms: Array
    cycle_ms: Array
    verify_ms: Array
    draft_ms: Array
    overhead_ms: Array
    acceptance_length: Array
    speedup: Array
    """Over the best plain decoding at the same batch and context, measured if there is one."""
    extrapolated: NDArray[np.bool_]
    """Too far from what was measured for a recommendation."""
    warnings: tuple[str, ...]
    distribution: Callable[[], Distribution] = field(repr=False)
    """Computes the distribution of ln tok/s; only a call that asks for an interval pays for it."""

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Central interval of tok/s into which one new measurement falls with probability `level`."""
        if not isinstance(level, float | int) or not 0.0 < level < 1.0:
            raise UsageError(f"interval level must lie between 0 and 1, got {level!r}")
        distribution = self.distribution()
        low, high = (np.exp(distribution.quantile(0.5 + sign * level / 2.0)) for sign in (-1.0, 1.0))
        return scalar(low), scalar(high)

    def quantile(self, probability: float) -> Array:
        """Quantile of tok/s for one new measurement."""
        if not isinstance(probability, float | int) or not 0.0 < probability < 1.0:
            raise UsageError(f"quantile must lie between 0 and 1, got {probability!r}")
        quantile: Array = scalar(np.exp(self.distribution().quantile(probability)))
        return quantile


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One fitted parameter in words: its value with a 90 % interval, and how much the data moved it."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    informed: float
    """Share of the prior's variance that the data removed, 0 to 1."""


def natural(name: str, values: Array) -> tuple[Array, str, str]:
    """Values of a parameter in the unit that people read, that unit, and the parameter's plain name."""
    if name.startswith("log_"):
        label = name.removeprefix("log_")
        bare = label.partition("[")[0]
        return np.exp(values), "ms" if bare == "pass_ms" else "tokens" if bare == "knee_tokens" else "passes", label
    if name.startswith(("logit_", "conditional")):
        return 0.5 * (1.0 + np.tanh(0.5 * values)), "", name.removeprefix("logit_")
    if name.startswith("comm_offset"):
        return values, "passes", name
    return np.exp(values), "factor", name


def terms_of(post: Posterior, names: tuple[str, ...]) -> tuple[Term, ...]:
    """The parameters of one mode that are free, with 90 % intervals, in natural units."""
    whitened = solve_triangular(post.factor, post.jacobian @ post.prior_cov, lower=True)
    prior_variance = np.diag(post.prior_cov)
    variance = np.maximum(prior_variance - np.sum(whitened**2, axis=0), 0.0)
    t = float(stdtrit(post.degrees, 0.95))
    out = []
    for name, mean, before, after in zip(names, post.theta, prior_variance, variance, strict=True):
        if before <= 0.0:
            continue
        half = t * np.sqrt(after)
        (value, low, high), unit, label = natural(name, np.array([mean, mean - half, mean + half]))
        informed = float(1.0 - after / before)
        out.append(Term(name=label, value=float(value), low=float(low), high=float(high), unit=unit, informed=informed))
    return tuple(out)
