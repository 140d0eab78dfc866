"""The joint posterior of cost and acceptance: where its parameters stand, and moments of what it predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from specmodel.acceptance import best_tree, log_length_gradient, sigmoid
from specmodel.cost import CostPoints, cost
from specmodel.deployment import Deployment
from specmodel.observations import Observations, Shape
from specmodel.residual import (
    ResidualPoints,
    Residuals,
    draft_covariance,
    draft_variance,
    verify_covariance,
    verify_variance,
)

__all__ = [
    "RATE",
    "Combination",
    "Latent",
    "Layout",
    "Moments",
    "Posterior",
    "covariance",
    "lengths",
    "moments",
    "parts",
]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the parameters of each kind stand in the vector."""

    num_cost: int
    positions: int
    """Positions of the acceptance curve that are parameters; later ones repeat the last."""
    workloads: tuple[str, ...]

    @property
    def rank_ratio(self) -> int:
        """Index of the logit of the acceptance of one rank over that of the rank before."""
        return self.num_cost

    def curve(self, workload: int) -> slice:
        """Indices of the logits of a workload's conditional acceptances."""
        start = self.num_cost + 1 + workload * self.positions
        return slice(start, start + self.positions)

    @property
    def size(self) -> int:
        """Length of the parameter vector."""
        return self.num_cost + 1 + len(self.workloads) * self.positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Posterior:
    """Laplace approximation of the joint posterior around one mode, in the dual (observation) form."""

    theta: Array
    prior_cov: Array
    jacobian: Array
    """d observation / d parameter, shape (n, parameters)."""
    verify_weight: Array
    """d observation / d log verify residual of its point."""
    draft_weight: Array
    factor: Array
    """Lower Cholesky factor of the covariance of the observations."""
    alpha: Array
    residuals: Residuals
    noise_scale: float
    degrees: float
    log_evidence: float
    converged: bool


def lengths(theta: Array, layout: Layout, shapes: tuple[Shape, ...]) -> tuple[Array, Array]:
    """Log acceptance length of each shape and its derivative, shapes (m,) and (m, parameters)."""
    value = np.zeros(len(shapes))
    jac = np.zeros((len(shapes), layout.size))
    curves: dict[int, tuple[Array, Array, Array]] = {}
    for i, shape in enumerate(shapes):
        if shape.num_steps == 0:
            continue
        if shape.workload not in curves:
            conditional = sigmoid(theta[layout.curve(shape.workload)])
            curves[shape.workload] = (conditional, *log_length_gradient(conditional))
        conditional, log_length, gradient = curves[shape.workload]
        where = layout.curve(shape.workload)
        K = shape.num_steps
        if shape.topk > 1:
            first = _extended(conditional, K)
            ratio = float(sigmoid(theta[layout.rank_ratio]))
            tree = best_tree(first, ratio, K, shape.topk, shape.verify_tokens)
            by_logit = tree.by_log_first * (1.0 - first) / tree.length
            inside = min(K, layout.positions)
            value[i] = np.log(tree.length)
            jac[i, where][:inside] += by_logit[:inside]
            jac[i, where.stop - 1] += by_logit[inside:].sum()
            jac[i, layout.rank_ratio] = tree.by_log_ratio * (1.0 - ratio) / tree.length
        elif layout.positions >= K:
            value[i] = log_length[K]
            jac[i, where] = gradient[K]
        else:
            full, slope = log_length_gradient(_extended(conditional, K))
            value[i] = full[K]
            jac[i, where] = slope[K, : layout.positions]
            jac[i, where.stop - 1] += slope[K, layout.positions :].sum()
    return value, jac


def _extended(conditional: Array, num_steps: int) -> Array:
    """The curve to `num_steps` positions; past its end the last acceptance holds."""
    extra = num_steps - len(conditional)
    return conditional[:num_steps] if extra <= 0 else np.concatenate([conditional, np.full(extra, conditional[-1])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Times of N points with the residuals applied, and the derivatives of ln T, ln V, ln D by the parameters."""

    verify_ms: Array
    draft_ms: Array
    overhead_ms: Array
    d_log_cycle: Array
    d_log_verify: Array
    d_log_draft: Array

    @property
    def cycle_ms(self) -> Array:
        """Verify, draft and overhead together."""
        return self.verify_ms + self.draft_ms + self.overhead_ms


def parts(theta: Array, points: CostPoints, dep: Deployment, verify_residual: Array, draft_residual: Array) -> Latent:
    """Times of N points at `theta` and given log-residuals; derivatives have shape (cost parameters, N)."""
    values = cost(theta, points, dep.structure, derivatives=True)
    if values.d_verify is None or values.d_draft is None or values.d_overhead is None:
        raise RuntimeError("cost() returned no derivatives")
    up_verify, up_draft = np.exp(verify_residual), np.exp(draft_residual)
    verify, draft = values.verify_ms * up_verify, values.draft_ms * up_draft
    cycle = verify + draft + values.overhead_ms
    d_log_verify = values.d_verify / values.verify_ms
    d_log_draft = values.d_draft / np.maximum(values.draft_ms, 1e-300)
    d_log_cycle = (values.d_verify * up_verify + values.d_draft * up_draft + values.d_overhead) / cycle
    return Latent(
        verify_ms=verify,
        draft_ms=draft,
        overhead_ms=values.overhead_ms,
        d_log_cycle=d_log_cycle,
        d_log_verify=d_log_verify,
        d_log_draft=d_log_draft,
    )



@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """Coefficients of a quantity ``cycle ln T + verify ln V + draft ln D + length ln E[N]``."""

    cycle: float = 0.0
    verify: float = 0.0
    draft: float = 0.0
    length: float = 0.0


RATE = Combination(cycle=-1.0, length=1.0)
"""Tokens per ms of one sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What one mode says about a log-quantity at N points: times, its mean, and how it varies."""

    latent: Latent
    mean: Array
    prior_variance: Array
    cross: Array
    """Whitened covariance with the observations, shape (n, N): posterior variance = prior_variance - sum(cross^2)."""
    gradient: Array
    verify_weight: Array
    draft_weight: Array

    @property
    def variance(self) -> Array:
        """Posterior variance of the latent quantity: without the noise of one measurement."""
        return np.maximum(self.prior_variance - np.einsum("ij,ij->j", self.cross, self.cross), 1e-12)


def residual_means(post: Posterior, obs: Observations, right: ResidualPoints) -> tuple[Array, Array]:
    """Posterior mean of the log-residuals of verify and draft at new points."""
    used = obs.point >= 0
    size = len(obs.points)
    verify = np.bincount(obs.point[used], weights=(post.verify_weight * post.alpha)[used], minlength=size)
    draft = np.bincount(obs.point[used], weights=(post.draft_weight * post.alpha)[used], minlength=size)
    left = obs.residual_points
    if not size:
        zero = np.zeros(right.log_tokens.shape)
        return zero, zero
    return (
        verify @ verify_covariance(left, right, post.residuals),
        draft @ draft_covariance(left, right, post.residuals),
    )


def moments(
    post: Posterior,
    obs: Observations,
    layout: Layout,
    dep: Deployment,
    points: CostPoints,
    right: ResidualPoints,
    log_length: Array,
    length_gradient: Array,
    of: Combination = RATE,
    spread: bool = True,
) -> Moments:
    """Moments of a log-quantity at N points under one mode.

    Parameters
    ----------
    points, right : CostPoints, ResidualPoints
        The N points.
    log_length, length_gradient : numpy.ndarray, shapes (N,) and (N, parameters)
        Log acceptance length of each and its derivative.
    of : Combination
        The quantity; tokens per ms of one sequence by default.
    spread : bool
        Whether variances are needed; without, only means are computed.
    """
    verify_residual, draft_residual = residual_means(post, obs, right)
    latent = parts(post.theta[: layout.num_cost], points, dep, verify_residual, draft_residual)
    cycle = latent.cycle_ms
    mean = of.length * log_length + of.cycle * np.log(cycle)
    gv, gd = of.cycle * latent.verify_ms / cycle + of.verify, of.cycle * latent.draft_ms / cycle + of.draft
    if of.verify:
        mean = mean + of.verify * np.log(latent.verify_ms)
    if of.draft:
        mean = mean + of.draft * np.log(np.maximum(latent.draft_ms, 1e-300))
    empty = np.zeros((0, 0))
    if not spread:
        zero = np.zeros(len(points))
        return Moments(
            latent=latent,
            mean=mean,
            prior_variance=zero,
            cross=empty,
            gradient=empty,
            verify_weight=gv,
            draft_weight=gd,
        )
    gradient = of.length * length_gradient
    gradient[:, : layout.num_cost] += (
        of.cycle * latent.d_log_cycle + of.verify * latent.d_log_verify + of.draft * latent.d_log_draft
    ).T
    prior = np.einsum("ij,ij->i", gradient @ post.prior_cov, gradient)
    prior += gv**2 * verify_variance(right, post.residuals) + gd**2 * draft_variance(right, post.residuals)
    cross = post.jacobian @ post.prior_cov @ gradient.T
    if len(obs.points):
        i = np.maximum(obs.point, 0)
        left = obs.residual_points
        cross += post.verify_weight[:, None] * verify_covariance(left, right, post.residuals)[i] * gv
        cross += post.draft_weight[:, None] * draft_covariance(left, right, post.residuals)[i] * gd
    return Moments(
        latent=latent,
        mean=mean,
        prior_variance=prior,
        cross=solve_triangular(post.factor, cross, lower=True, check_finite=False),
        gradient=gradient,
        verify_weight=gv,
        draft_weight=gd,
    )


def covariance(post: Posterior, right: ResidualPoints, at: Moments) -> Array:
    """Posterior covariance of the latent quantity at N points, shape (N, N)."""
    prior = at.gradient @ post.prior_cov @ at.gradient.T
    prior += np.outer(at.verify_weight, at.verify_weight) * verify_covariance(right, right, post.residuals)
    prior += np.outer(at.draft_weight, at.draft_weight) * draft_covariance(right, right, post.residuals)
    return np.asarray(prior - at.cross.T @ at.cross)
