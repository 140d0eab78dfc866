"""The joint posterior of cost and acceptance: where its parameters stand, and moments of what it predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular

from specmodel.acceptance import best_tree, log_length_gradient, sigmoid
from specmodel.cost import CostPoints, cost, parameter_names
from specmodel.deployment import Deployment
from specmodel.observations import Observations, Shape
from specmodel.residual import (
    ResidualPoints,
    Residuals,
    draft_covariance,
    draft_mean,
    draft_variance,
    verify_covariance,
    verify_mean,
    verify_variance,
)

__all__ = [
    "MOST_POSITIONS",
    "RATE",
    "Combination",
    "Latent",
    "Layout",
    "LengthTable",
    "Moments",
    "Posterior",
    "covariance",
    "lengths",
    "moments",
    "parts",
    "times",
    "tree_paths",
]

Array = NDArray[np.float64]
MOST_POSITIONS = 64
"""Positions of an acceptance curve that are parameters of their own at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the parameters of each kind stand in the vector."""

    num_cost: int
    positions: int
    """Positions of the acceptance curve that are parameters; later ones repeat the last."""
    workloads: tuple[str, ...]
    trees: tuple[tuple[int, int, int], ...] = ()
    """(steps, topk, verified tokens) of the trees with data; each has a gain of its own."""
    reach: tuple[Array | None, ...] = ()
    """Per workload, the share of cycles that draft at each position, shape (positions,); None where all do."""

    def reach_of(self, workload: int) -> Array | None:
        """Share of the cycles of a workload that draft at each position; None where all do."""
        return self.reach[workload] if workload < len(self.reach) else None

    @property
    def rank_ratio(self) -> int:
        """Index of the logit of the acceptance of one rank over that of the rank before."""
        return self.num_cost

    @property
    def tree_gain(self) -> int:
        """Index of the gain that all trees share: log of accepted drafts over those of the best static tree."""
        return self.num_cost + 1

    def own_gain(self, tree: tuple[int, int, int]) -> int:
        """Index of what one tree gains beyond the others; trees without data share the last."""
        return self.num_cost + 2 + (self.trees.index(tree) if tree in self.trees else len(self.trees))

    def curve(self, workload: int) -> slice:
        """Indices of the logits of a workload's conditional acceptances."""
        start = self.first_curve + workload * self.positions
        return slice(start, start + self.positions)

    @property
    def first_curve(self) -> int:
        """Index of the first logit of the first workload."""
        return self.num_cost + 3 + len(self.trees)

    @property
    def size(self) -> int:
        """Length of the parameter vector."""
        return self.first_curve + len(self.workloads) * self.positions

    def names(self, cost_names: tuple[str, ...]) -> tuple[str, ...]:
        """Names of all parameters, in order."""
        trees = [f"tree_gain[{k}x{t}x{n}]" for k, t, n in self.trees]
        curves = [f"conditional[{w}][{k + 1}]" for w in self.workloads for k in range(self.positions)]
        return (*cost_names, "logit_rank_ratio", "tree_gain", *trees, "tree_gain[other]", *curves)


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
    """Solution of that covariance for what the prior mean leaves of the observations."""
    verify_pull: Array
    """Weights of the points whose combination of covariances is the mean log-residual of verify."""
    draft_pull: Array
    residuals: Residuals
    noise_scale: float
    """Factor on the variance of a timing whose noise is guessed."""
    guessed: tuple[float, float]
    """Misfit of the timings whose noise is guessed (about 1 each), and their degrees of freedom."""
    stated: tuple[float, float]
    """The same of the timings whose noise is stated."""
    degrees: float
    log_evidence: float
    converged: bool


TreePaths = dict[Shape, tuple[tuple[int, ...], ...]]


def tree_paths(theta: Array, layout: Layout, shapes: tuple[Shape, ...]) -> TreePaths:
    """The nodes of the best tree of each tree among the shapes at `theta`."""
    ratio = float(sigmoid(theta[layout.rank_ratio]))
    out = {}
    for shape in shapes:
        if shape.topk > 1 and shape.num_steps:
            first = _extended(sigmoid(theta[layout.curve(shape.workload)]), shape.num_steps)
            out[shape] = best_tree(first, ratio, shape.num_steps, shape.topk, shape.verify_tokens).paths
    return out


def lengths(
    theta: Array, layout: Layout, shapes: tuple[Shape, ...], paths: TreePaths | None = None
) -> tuple[Array, Array]:
    """Log acceptance length of each shape and its derivative, shapes (m,) and (m, parameters).

    A tree has the nodes that `paths` gives it, or the best ones.
    """
    value = np.zeros(len(shapes))
    jac = np.zeros((len(shapes), layout.size))
    curves: dict[int, tuple[Array, Array, Array]] = {}
    for i, shape in enumerate(shapes):
        if shape.num_steps == 0:
            continue
        if shape.workload not in curves:
            conditional = sigmoid(theta[layout.curve(shape.workload)])
            curves[shape.workload] = (conditional, *log_length_gradient(conditional, layout.reach_of(shape.workload)))
        conditional, log_length, gradient = curves[shape.workload]
        where = layout.curve(shape.workload)
        K = shape.num_steps
        if shape.topk > 1:
            first = _extended(conditional, K)
            ratio = float(sigmoid(theta[layout.rank_ratio]))
            nodes = paths.get(shape) if paths else None
            tree = best_tree(first, ratio, K, shape.topk, shape.verify_tokens, nodes)
            # Engines grow their trees by the drafter's confidence, at a fixed width: more or less than the best static
            # tree would get, the same for all workloads to first order.
            own = layout.own_gain((K, shape.topk, shape.verify_tokens))
            gain = float(np.exp(theta[layout.tree_gain] + theta[own]))
            most = min(K + 1.0, float(shape.verify_tokens))
            gained = (tree.length - 1.0) * gain
            # A soft minimum: no tree emits more than its depth and its tokens allow, and the slope has no break.
            accepted = gained / (1.0 + (gained / (most - 1.0)) ** 8) ** 0.125
            length = 1.0 + accepted
            by_gain = accepted / (1.0 + (gained / (most - 1.0)) ** 8)
            scale = by_gain / (tree.length - 1.0) if tree.length > 1.0 else 0.0
            by_logit = scale * tree.by_log_first * (1.0 - first) / length
            inside = min(K, layout.positions)
            value[i] = np.log(length)
            jac[i, where][:inside] += by_logit[:inside]
            jac[i, where.stop - 1] += by_logit[inside:].sum()
            jac[i, layout.rank_ratio] = scale * tree.by_log_ratio * (1.0 - ratio) / length
            jac[i, [layout.tree_gain, own]] = by_gain / length
        elif layout.positions >= K:
            value[i] = log_length[K]
            jac[i, where] = gradient[K]
        else:
            length, slope = _long_chain(conditional, K, layout.reach_of(shape.workload))
            value[i] = np.log(length)
            jac[i, where] = slope / length
    return value, jac


def _extended(conditional: Array, num_steps: int) -> Array:
    """The curve to `num_steps` positions; past its end the last acceptance holds."""
    extra = min(num_steps, MOST_POSITIONS) - len(conditional)
    return conditional[:num_steps] if extra <= 0 else np.concatenate([conditional, np.full(extra, conditional[-1])])


def _long_chain(conditional: Array, num_steps: int, reach: Array | None) -> tuple[float, Array]:
    """Acceptance length of a chain longer than the curve, whose last acceptance c goes on, and its derivative.

    The tail is the geometric sum ``S_n (c + c^2 + ... + c^m)``, m steps past the n of the curve.
    """
    n, c, m = len(conditional), float(conditional[-1]), num_steps - len(conditional)
    log_length, gradient = log_length_gradient(conditional, reach)
    length = float(np.exp(log_length[n]))
    survived = float(np.prod(conditional)) * (1.0 if reach is None else float(reach[-1]))
    powers = np.arange(1, min(m, MOST_POSITIONS * 64) + 1, dtype=float)
    terms = np.exp(powers * np.log(max(c, 1e-300)))
    tail, tail_slope = float(terms.sum()), float((powers * terms).sum())  # the slope by ln c
    slope = length * gradient[n] + survived * tail * (1.0 - conditional)
    slope[-1] += survived * tail_slope * (1.0 - c)
    return length + survived * tail, slope


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
    cost_gradient: Array
    """Derivative by the cost parameters, shape (cost parameters, N)."""
    length_gradient: Array
    """Derivative by all parameters of the acceptance part of each draft shape, shape (U, parameters)."""
    table: LengthTable
    verify_weight: Array
    draft_weight: Array

    @property
    def variance(self) -> Array:
        """Posterior variance of the latent quantity: without the noise of one measurement."""
        return np.asarray(np.maximum(self.prior_variance - np.einsum("ij,ij->j", self.cross, self.cross), 1e-12))


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthTable:
    """Log acceptance length of U different (steps, topk, tokens) and which of them each of N points has."""

    value: Array
    gradient: Array
    """Derivative by all parameters, shape (U, parameters)."""
    index: NDArray[np.intp]
    known: NDArray[np.bool_]
    """Points whose acceptance length the caller gave: nothing of it is uncertain."""


def residual_means(post: Posterior, obs: Observations, right: ResidualPoints) -> tuple[Array, Array]:
    """Posterior mean of the log-residuals of verify and draft at new points."""
    if not len(obs.points):
        return np.zeros(()), np.zeros(())
    left, scale = obs.residual_points, post.residuals
    return verify_mean(post.verify_pull, left, right, scale), draft_mean(post.draft_pull, left, right, scale)


def times(
    post: Posterior, obs: Observations, dep: Deployment, points: CostPoints, right: ResidualPoints
) -> tuple[Array, Array, Array]:
    """Verify, draft and overhead in ms under one mode; points of any shapes that broadcast."""
    verify_residual, draft_residual = residual_means(post, obs, right)
    num_cost = len(parameter_names(dep.structure.comm_names))
    values = cost(post.theta[:num_cost], points, dep.structure)
    return (
        values.verify_ms * np.exp(verify_residual),
        values.draft_ms * np.exp(draft_residual),
        np.asarray(values.overhead_ms),
    )


def moments(
    post: Posterior,
    obs: Observations,
    layout: Layout,
    dep: Deployment,
    points: CostPoints,
    right: ResidualPoints,
    table: LengthTable,
    of: Combination = RATE,
) -> Moments:
    """Moments of a log-quantity at N points under one mode.

    Cost and acceptance are independent a priori, and the prior of the cost is diagonal: the acceptance part is
    computed once for each different draft shape.

    Parameters
    ----------
    points, right : CostPoints, ResidualPoints
        The N points, every array of shape (N,).
    table : LengthTable
        Acceptance lengths of the N points.
    of : Combination
        The quantity; tokens per ms of one sequence by default.
    """
    verify_residual, draft_residual = residual_means(post, obs, right)
    latent = parts(post.theta[: layout.num_cost], points, dep, verify_residual, draft_residual)
    cycle = latent.cycle_ms
    mean = of.length * table.value[table.index] + of.cycle * np.log(cycle)
    gv, gd = of.cycle * latent.verify_ms / cycle + of.verify, of.cycle * latent.draft_ms / cycle + of.draft
    if of.verify:
        mean = mean + of.verify * np.log(latent.verify_ms)
    if of.draft:
        mean = mean + of.draft * np.log(np.maximum(latent.draft_ms, 1e-300))
    c = layout.num_cost
    cost_gradient = of.cycle * latent.d_log_cycle
    if of.verify:
        cost_gradient = cost_gradient + of.verify * latent.d_log_verify
    if of.draft:
        cost_gradient = cost_gradient + of.draft * latent.d_log_draft
    length_gradient = of.length * table.gradient
    cost_prior = np.diag(post.prior_cov)[:c]
    varies = np.where(table.known, 0.0, 1.0)
    length_cov = post.prior_cov @ length_gradient.T
    prior = cost_prior @ cost_gradient**2
    prior += varies * np.einsum("ij,ji->i", length_gradient, length_cov)[table.index]
    prior += gv**2 * verify_variance(right, post.residuals) + gd**2 * draft_variance(right, post.residuals)

    def whitened(x: Array) -> Array:
        return np.asarray(solve_triangular(post.factor, x, lower=True, check_finite=False))

    count = len(cycle)
    by_cost, by_length = post.jacobian[:, :c] * cost_prior, post.jacobian @ length_cov
    used = np.flatnonzero(obs.point >= 0)
    at, left = obs.point[used], obs.residual_points
    residual_parts = []
    if len(obs.points):
        residual_parts.append((post.verify_weight, verify_covariance(left, right, post.residuals) * gv))
        if post.draft_weight.any():
            residual_parts.append((post.draft_weight, draft_covariance(left, right, post.residuals) * gd))
    if count <= by_cost.shape[1] + by_length.shape[1] + len(obs.points):
        # Few points: one system with a column for each of them.
        total = by_cost @ cost_gradient + by_length[:, table.index] * varies
        for weight, part in residual_parts:
            total[used] += weight[used, None] * part[at]
        cross = whitened(total)
    else:
        # Many: what does not depend on them is solved for, and combined.
        cross = whitened(by_cost) @ cost_gradient + whitened(by_length)[:, table.index] * varies
        for weight, part in residual_parts:
            scattered = np.zeros((len(obs), len(obs.points)))
            scattered[used, at] = weight[used]
            cross += whitened(scattered) @ part
    return Moments(
        latent=latent,
        mean=mean,
        prior_variance=prior,
        cross=cross,
        cost_gradient=cost_gradient,
        length_gradient=length_gradient,
        table=table,
        verify_weight=gv,
        draft_weight=gd,
    )


def covariance(post: Posterior, right: ResidualPoints, at: Moments, other: Moments | None = None) -> Array:
    """Posterior covariance of the latent quantity at N points, shape (N, N).

    With `other`, the moments of another quantity at the same points: that of the first (rows) with it (columns).
    """
    other = at if other is None else other
    cost_prior = np.diag(post.prior_cov)[: at.cost_gradient.shape[0]]
    prior = (at.cost_gradient.T * cost_prior) @ other.cost_gradient
    varies = np.where(at.table.known, 0.0, 1.0)
    length = at.length_gradient @ post.prior_cov @ other.length_gradient.T
    prior += length[np.ix_(at.table.index, at.table.index)] * np.outer(varies, varies)
    prior += np.outer(at.verify_weight, other.verify_weight) * verify_covariance(right, right, post.residuals)
    prior += np.outer(at.draft_weight, other.draft_weight) * draft_covariance(right, right, post.residuals)
    return np.asarray(prior - at.cross.T @ other.cross)
