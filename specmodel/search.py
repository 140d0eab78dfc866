"""Search for a mode of the joint posterior, and the Laplace approximation there.

Gauss-Newton steps in the dual (observation) form with back-tracking on the log posterior. Counts enter by their
binomial likelihood and upper bounds by the normal cumulative, both as re-weighted observations at every step
(Rasmussen and Williams, Gaussian Processes for Machine Learning, section 3.4). The state is kept in dual form too:
acceptance ``theta = mean + prior_cov @ pull`` and residuals ``covariance @ weight``, so that no covariance is inverted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from scipy.special import log_ndtr

from specmodel.acceptance import sigmoid
from specmodel.cost import parameter_names
from specmodel.deployment import Deployment
from specmodel.observations import Observations
from specmodel.posterior import Layout, Posterior, TreePaths, lengths, parts, tree_paths
from specmodel.residual import Residuals

__all__ = ["Problem", "Scales", "State", "different", "log_posterior", "rescaled", "search", "start"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
PASS, TAX = 0, 1
"""Indices of the plain pass, and of the tax, whose prior is not Gaussian but Student."""
STEPS = 100
HALVINGS = 12
ENOUGH = 1e-4
"""Slope of the log posterior along the full step, relative to the misfit, below which the search ends."""
STALLS = 3
"""Steps in a row that hardly rise after which it ends, too."""
FIRST = ("log_token", "log_kv", "log_overhead", "log_draft_base", "log_draft_step", "log_tree")
"""Cost parameters in whose terms, not logarithms, a search begins to step."""
UNITS = dict.fromkeys((*FIRST, "log_comm_base", "log_comm_token"), "log_pass_ms") | dict.fromkeys(
    ("log_draft_sequence", "log_draft_width", "log_draft_kv"), "log_draft_step"
)
"""All that are logarithms of terms of a sum, and the term that each is in units of."""
SLOW = 12
"""Steps of a search after which its valley is bent in the other terms, too: it steps in them all."""
MOST_WIDENING = 16.0
"""Factor on the variance of the residual process at most: noisy runs are no sign of rougher kernels."""
MANY_PARAMETERS = 600
"""From this many on, products with the Jacobian leave out its zeros."""
PRIOR_DEGREES = 4.0
"""Degrees of freedom that the prior of the noise scale is worth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a search needs and does not change."""

    obs: Observations
    dep: Deployment
    layout: Layout
    mean: Array
    cov: Array
    """Prior covariance; that of the tax is set by its present value."""
    tax_scale: float
    tax_degrees: float
    verify_cov: Array
    draft_cov: Array
    residuals: Residuals
    noise_scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Parameters and residuals, in dual form and as values."""

    theta: Array
    pull: Array
    verify_weight: Array
    draft_weight: Array
    verify_residual: Array
    draft_residual: Array

    def toward(self, other: State, share: float, terms: Terms) -> State:
        """The state a share of the way to another.

        The cycle time is a sum of terms: the plain pass, and those that `terms` indexes with their units. A step is
        taken in the terms, not in their logarithms: a trade of one term for another then keeps the sum, where
        logarithms would leave the valley.
        """
        values = {name: (1.0 - share) * getattr(self, name) + share * getattr(other, name) for name in self.__slots__}
        whole = values["theta"] - self.theta
        own, unit = terms
        for k, of in zip(own, unit, strict=True):  # a unit comes before what is measured in it
            whole[k] += whole[of]
        scaled = _step_of_term(whole)
        values["theta"][PASS] = self.theta[PASS] + scaled[PASS]
        values["theta"][own] = self.theta[own] + scaled[own] - scaled[unit]
        return State(**values)


Terms = tuple[Index, Index]
"""Indices of parameters that are terms of a sum, and of their units."""


def _terms(problem: Problem, these: Collection[str]) -> Terms:
    names = [name.partition("[")[0] for name in parameter_names(problem.dep.structure.comm_names)]
    own = [k for k, name in enumerate(names) if name in these]
    return np.array(own, dtype=np.intp), np.array([names.index(UNITS[names[k]]) for k in own], dtype=np.intp)


def _step_of_term(relative: Array) -> Array:
    """Change of the logarithm of a term that grows by this share of itself; a term may not vanish."""
    low = -0.8
    return np.asarray(np.log1p(np.maximum(relative, low)) + np.minimum(relative - low, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """Observations linearised at a state."""

    value: Array
    jacobian: Array
    verify_weight: Array
    draft_weight: Array


def start(problem: Problem, tax: float) -> State:
    """The prior mean with another tax."""
    theta = problem.mean.copy()
    theta[TAX] = tax
    zero = np.zeros(len(problem.obs.points))
    return State(
        theta=theta,
        pull=np.zeros(len(theta)),
        verify_weight=zero,
        draft_weight=zero,
        verify_residual=zero,
        draft_residual=zero,
    )


def _linearise(problem: Problem, state: State, paths: TreePaths) -> _Linear:
    """Expected value of each observation, its Jacobian, and its weights on the residuals of its point."""
    obs, layout = problem.obs, problem.layout
    n = len(obs)
    value, jac = np.zeros(n), np.zeros((n, layout.size))
    verify_weight, draft_weight = np.zeros(n), np.zeros(n)
    if len(obs.points):
        at = parts(state.theta[: layout.num_cost], obs.points, problem.dep, state.verify_residual, state.draft_residual)
        here = obs.point >= 0
        i = obs.point[here]
        cycle, verify, draft = obs.cycle[here], obs.verify[here], obs.draft[here]
        log_draft = np.log(np.maximum(at.draft_ms, 1e-300))
        value[here] = cycle * np.log(at.cycle_ms)[i] + verify * np.log(at.verify_ms)[i] + draft * log_draft[i]
        by_cost = cycle * at.d_log_cycle[:, i]
        for share, slopes in ((verify, at.d_log_verify), (draft, at.d_log_draft)):
            if share.any():
                by_cost += share * slopes[:, i]
        jac[here, : layout.num_cost] = by_cost.T
        verify_weight[here] = verify + cycle * (at.verify_ms / at.cycle_ms)[i]
        draft_weight[here] = draft + cycle * (at.draft_ms / at.cycle_ms)[i]
    shaped = obs.shape >= 0
    if shaped.any():
        length, gradient = lengths(state.theta, layout, obs.shapes, paths)
        value[shaped] += obs.length[shaped] * length[obs.shape[shaped]]
        jac[shaped] += obs.length[shaped, None] * gradient[obs.shape[shaped]]
    placed = obs.position >= 0
    if placed.any():
        position = np.minimum(obs.position[placed], layout.positions - 1)
        column = layout.first_curve + obs.workload[placed] * layout.positions + position
        value[placed] += state.theta[column]
        jac[np.flatnonzero(placed), column] = 1.0
    return _Linear(value=value, jacobian=jac, verify_weight=verify_weight, draft_weight=draft_weight)


def _variance(problem: Problem) -> Array:
    obs = problem.obs
    return np.asarray(obs.sd**2 * np.where(obs.sampled & obs.scaled, problem.noise_scale, 1.0))


def _working(problem: Problem, latent: Array) -> tuple[Array, Array]:
    """Value and variance of the Gaussian that stands for each observation's likelihood at its latent value."""
    obs = problem.obs
    value, variance = obs.value.copy(), _variance(problem)
    counted = obs.trials > 0
    if counted.any():
        p = np.clip(sigmoid(latent[counted]), 1e-9, 1.0 - 1e-9)
        weight = obs.trials[counted] * p * (1.0 - p)
        value[counted] = latent[counted] + (obs.hits[counted] - obs.trials[counted] * p) / weight
        variance[counted] = 1.0 / weight
    if obs.bound.any():
        b = obs.bound
        sd = np.sqrt(variance[b])
        z = (obs.value[b] - latent[b]) / sd
        hazard = np.exp(-0.5 * z * z - 0.5 * np.log(2.0 * np.pi) - log_ndtr(z))
        # z + hazard -> -1/z far on the forbidden side, where the difference cancels.
        slack = np.maximum(z + hazard, np.where(z < -1.0, -1.0 / np.minimum(z - 1.0, -1.0), 1e-12))
        weight = np.maximum(hazard * slack, 1e-12)
        value[b] = latent[b] - sd * hazard / weight
        variance[b] = sd * sd / weight
    return value, variance


def _misfit(problem: Problem, latent: Array) -> float:
    """Half the sum of squares of the observations with Gaussian noise, in units of their noise."""
    obs = problem.obs
    gaussian = (obs.trials == 0) & ~obs.bound
    return 0.5 * float(np.sum((obs.value - latent)[gaussian] ** 2 / _variance(problem)[gaussian]))


def _log_likelihood(problem: Problem, latent: Array) -> float:
    """Log likelihood of all observations at their latent values, constants left out."""
    obs = problem.obs
    rest = (obs.value - latent) / np.sqrt(_variance(problem))
    counted, bound = obs.trials > 0, obs.bound
    total = -0.5 * float(np.sum(rest[~counted & ~bound] ** 2)) + float(np.sum(log_ndtr(rest[bound])))
    if counted.any():
        eta = latent[counted]
        total += float(np.sum(obs.hits[counted] * eta - obs.trials[counted] * np.logaddexp(0.0, eta)))
    return total


def _tax_variance(problem: Problem, tax: float) -> float:
    """Variance of the Gaussian that stands for the Student prior of the tax at its present value."""
    nu, scale = problem.tax_degrees, problem.tax_scale
    return scale * scale * (nu + (tax / scale) ** 2) / (nu + 1.0)


def log_posterior(problem: Problem, state: State, latent: Array) -> float:
    """Log posterior of parameters and residuals, constants left out."""
    nu, scale = problem.tax_degrees, problem.tax_scale
    tax = float(state.theta[TAX] - problem.mean[TAX])
    num_cost = problem.layout.num_cost
    variance = np.diag(problem.cov)[:num_cost]
    free = variance > 0.0
    free[TAX] = False  # Student, below
    cost = (state.theta[:num_cost] - problem.mean[:num_cost])[free]
    pull = state.pull[num_cost:]
    total = _log_likelihood(problem, latent) - 0.5 * float(np.sum(cost**2 / variance[free]))
    total -= 0.5 * float(pull @ problem.cov[num_cost:, num_cost:] @ pull)
    total -= 0.5 * (nu + 1.0) * float(np.log1p((tax / scale) ** 2 / nu))
    total -= 0.5 * float(state.verify_weight @ state.verify_residual)
    return total - 0.5 * float(state.draft_weight @ state.draft_residual)


def search(problem: Problem, state: State, enough: float = ENOUGH) -> tuple[Posterior, State]:
    """From a state to the mode that it leads to, and the Laplace approximation there.

    Parameters
    ----------
    problem, state : Problem, State
        What is fitted, and where to start.
    enough : float
        The search ends where a step promises less than this share of the misfit (or of 1).
    """
    obs = problem.obs
    i = np.maximum(obs.point, 0)
    on_point = (obs.point >= 0).astype(float)
    some = len(obs.points) > 0
    verify_cov = problem.verify_cov[np.ix_(i, i)] if some else np.zeros((len(obs), len(obs)))
    draft_cov = problem.draft_cov[np.ix_(i, i)] if some else verify_cov
    cov = problem.cov.copy()
    # The nodes of the trees are held during a search: the length of the best tree has a kink wherever they change.
    paths = tree_paths(state.theta, problem.layout, obs.shapes)
    linear = _linearise(problem, state, paths)
    reached = log_posterior(problem, state, linear.value)
    first_terms, all_terms = _terms(problem, FIRST), _terms(problem, UNITS)
    converged, stalls = False, 0
    for step in range(STEPS + 1):
        cov[TAX, TAX] = _tax_variance(problem, float(state.theta[TAX] - problem.mean[TAX]))
        jac, gv, gd = linear.jacobian, linear.verify_weight, linear.draft_weight
        value, variance = _working(problem, linear.value)
        shift = jac @ (state.theta - problem.mean)
        if some:
            shift += on_point * (gv * state.verify_residual[i] + gd * state.draft_residual[i])
        spread = _product(jac, cov)
        residual_cov, of_draft = np.outer(gv, gv), np.outer(gd, gd)
        residual_cov *= verify_cov
        of_draft *= draft_cov
        residual_cov += of_draft
        residual_cov[np.diag_indices_from(residual_cov)] += variance
        # Few parameters in this order: where numbers cannot be true, rounding decides which valley is searched.
        few = jac.shape[1] < MANY_PARAMETERS
        total = spread @ jac.T if few else _product(jac, spread.T)
        total += residual_cov
        factor = cholesky(total, lower=True, check_finite=False)
        alpha = cho_solve((factor, True), value - linear.value + shift, check_finite=False)
        if stalls >= STALLS or step == STEPS:
            converged = stalls >= STALLS
            break
        target = _full_step(problem, cov, jac, gv, gd, alpha, i)
        slope = _slope(problem, state, target, cov, jac, gv, gd, (value - linear.value) / variance, i)
        little = enough * max(1.0, _misfit(problem, linear.value))
        if slope < little:
            converged = True
            break
        # No parameter moves by more than a few units of its logarithm at once.
        largest = float(np.max(np.abs(target.theta - state.theta), initial=0.0))
        share = min(1.0, 3.0 / largest) if largest > 0 else 1.0
        for _ in range(HALVINGS):
            tried = state.toward(target, share, first_terms if step < SLOW else all_terms)
            tried_linear = _linearise(problem, tried, paths)
            gained = log_posterior(problem, tried, tried_linear.value) - reached
            if gained > -1e-9:
                break
            # The top of the parabola through here and there, of which the linearised problem gives the slope.
            share *= min(max(0.5 * slope * share / max(slope * share - gained, 1e-300), 0.1), 0.6)
        else:
            converged = True  # no way up: this is the top as far as numbers can tell
            break
        state, linear, reached = tried, tried_linear, reached + gained
        stalls = stalls + 1 if gained < little else 0
    timed = obs.sampled & ~obs.bound
    # Share of each observation that the parameters do not take up: the diagonal of residual_cov @ total^-1.
    taken = np.einsum("ij,ij->i", spread, cho_solve((factor, True), jac, check_finite=False))
    free, misfit = 1.0 - taken, alpha * (residual_cov @ alpha)
    guessed, stated = timed & obs.scaled, timed & ~obs.scaled
    evidence = reached - float(np.sum(np.log(np.diag(factor)))) + 0.5 * float(np.sum(np.log(variance)))
    posterior = Posterior(
        theta=state.theta,
        prior_cov=cov,
        jacobian=jac,
        verify_weight=gv,
        draft_weight=gd,
        factor=factor,
        alpha=alpha,
        verify_pull=state.verify_weight,
        draft_pull=state.draft_weight,
        residuals=problem.residuals,
        noise_scale=problem.noise_scale,
        guessed=(_least_zero(misfit[guessed]), _least_zero(free[guessed])),
        stated=(_least_zero(misfit[stated]), _least_zero(free[stated])),
        degrees=PRIOR_DEGREES + _least_zero(free[timed]),
        log_evidence=evidence,
        converged=converged,
    )
    return posterior, state


def _product(jac: Array, x: Array) -> Array:
    """``jac @ x``; of many parameters an observation depends on those of the cost and of one workload only."""
    if jac.shape[1] < MANY_PARAMETERS:
        return np.asarray(jac @ x)
    from scipy.sparse import csr_array

    return np.asarray(csr_array(jac) @ x)


def _least_zero(x: Array) -> float:
    """A sum that is negative only by rounding, where the numbers of a file differ by many orders of magnitude."""
    return max(float(x.sum()), 0.0)


def _full_step(problem: Problem, cov: Array, jac: Array, gv: Array, gd: Array, alpha: Array, i: Index) -> State:
    """Where the linearised problem has its mode."""
    pull = jac.T @ alpha
    verify, draft = np.zeros(len(problem.obs.points)), np.zeros(len(problem.obs.points))
    if len(verify):
        np.add.at(verify, i, gv * alpha)
        np.add.at(draft, i, gd * alpha)
    return State(
        theta=problem.mean + cov @ pull,
        pull=pull,
        verify_weight=verify,
        draft_weight=draft,
        verify_residual=problem.verify_cov @ verify,
        draft_residual=problem.draft_cov @ draft,
    )


def _slope(
    problem: Problem, state: State, target: State, cov: Array, jac: Array, gv: Array, gd: Array, pull: Array, i: Index
) -> float:
    """Derivative of the log posterior along the full step, at its start; not below 0."""
    num_cost = problem.layout.num_cost
    move = target.theta - state.theta
    change = jac @ move
    if len(state.verify_residual):
        verify = target.verify_residual - state.verify_residual
        draft = target.draft_residual - state.draft_residual
        change = change + np.where(problem.obs.point >= 0, gv * verify[i] + gd * draft[i], 0.0)
        back = float(state.verify_weight @ verify + state.draft_weight @ draft)
    else:
        back = 0.0
    variance = np.diag(cov)[:num_cost]
    free = variance > 0.0
    cost = (state.theta - problem.mean)[:num_cost][free] / variance[free]
    back += float(cost @ move[:num_cost][free]) + float(state.pull[num_cost:] @ move[num_cost:])
    return max(float(pull @ change) - back, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Factors on variances that are learnt: of the noise of timings that is guessed, and of the residual process."""

    noise: float = 1.0
    process: float = 1.0

    def after(self, post: Posterior) -> Scales:
        """The scales that the misfit of a search under these ones speaks for.

        The noise is compared in units of the guess, so that what its prior is worth does not grow with it. Timings that
        state their noise leave their misfit to the process; without them the process widens with the noise. It never
        narrows, and not beyond `MOST_WIDENING`.
        """
        misfit, degrees = post.guessed
        noise = (PRIOR_DEGREES + self.noise * misfit) / (PRIOR_DEGREES + degrees)
        misfit, degrees = post.stated
        process = self.process * (PRIOR_DEGREES + misfit) / (PRIOR_DEGREES + degrees) if degrees >= 1.0 else noise
        return Scales(noise=noise, process=min(max(process, 1.0), MOST_WIDENING))

    def differ(self, other: Scales) -> bool:
        """Whether two pairs of scales differ by more than a tenth."""
        ratios = np.log([self.noise / other.noise, self.process / other.process])
        return bool(np.max(np.abs(ratios)) > 0.1)


def rescaled(base: Problem, scales: Scales, state: State, before: Scales) -> tuple[Problem, State]:
    """The problem under other scales, and the state that a search under `before` ended in.

    Parameters
    ----------
    base : Problem
        With scales of 1.
    """
    wide = {name: getattr(base.residuals, name) * float(np.sqrt(scales.process)) for name in AMPLITUDES}
    problem = replace(
        base,
        noise_scale=scales.noise,
        verify_cov=base.verify_cov * scales.process,
        draft_cov=base.draft_cov * scales.process,
        residuals=replace(base.residuals, **wide),
    )
    # The same residuals from a wider process.
    shrink = before.process / scales.process
    moved = replace(state, verify_weight=state.verify_weight * shrink, draft_weight=state.draft_weight * shrink)
    return problem, moved


AMPLITUDES = tuple(field.name for field in fields(Residuals) if "length" not in field.name)


def different(found: list[tuple[Posterior, State]]) -> list[tuple[Posterior, State]]:
    """Searches that ended in different modes, the likeliest first."""
    kept: list[tuple[Posterior, State]] = []
    for posterior, state in sorted(found, key=lambda pair: -pair[0].log_evidence):
        if all(np.max(np.abs(posterior.theta - other.theta)) > 0.05 for other, _ in kept):
            kept.append((posterior, state))
    return kept
