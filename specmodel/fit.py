"""Calibration -> model: likelihood, priors and the joint posterior of cost and acceptance.

One Gaussian prior on all parameters, a Gaussian process on the log-residuals of verify and draft, and observations
that are smooth functions of both: the mode is found by Gauss-Newton steps in the dual (observation) form, the
posterior around it is the Laplace approximation. Counts enter by their binomial likelihood and upper bounds by the
normal cumulative, both as re-weighted observations at every step (Rasmussen and Williams, chapter 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from scipy.special import log_ndtr

from specmodel.acceptance import prior_of, sigmoid
from specmodel.calibration import Calibration
from specmodel.cost import parameter_names
from specmodel.deployment import Deployment, deployment_of
from specmodel.findings import findings_of
from specmodel.measured import measured_of
from specmodel.model import FittedModel
from specmodel.observations import Observations, observations_of
from specmodel.posterior import Layout, Posterior, lengths, parts
from specmodel.residual import Residuals, draft_covariance, verify_covariance
from specmodel.speeds import Noise

__all__ = ["CostPrior", "fit"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPrior:
    """Median (or mean) and standard deviation of each cost parameter; positive terms in units of the plain pass."""

    pass_log_sd: float = 1.5
    tax: tuple[float, float] = (0.05, 0.10)
    tax_degrees: float = 1.0
    expert_share_logit: tuple[float, float] = (-0.5, 1.0)
    overlap_logit: tuple[float, float] = (-2.0, 1.0)
    token: tuple[float, float] = (0.01, 1.5)
    knee_tokens: tuple[float, float] = (300.0, 1.2)
    kv: tuple[float, float] = (0.01, 1.5)
    kv_multi: tuple[float, float] = (0.1, 0.7)
    overhead: tuple[float, float] = (0.06, 1.5)
    overhead_loop: tuple[float, float] = (0.003, 1.2)
    """Of a bare benchmark loop, which has no scheduler, sampler or detokenizer."""
    draft_base: tuple[float, float] = (0.002, 1.0)
    draft_step: tuple[float, float] = (0.10, 0.9)
    draft_sequence: tuple[float, float] = (0.015, 1.5)
    draft_width: tuple[float, float] = (0.01, 1.5)
    tree: tuple[float, float] = (0.15, 1.4)
    verify_eager: tuple[float, float] = (0.3, 0.5)
    draft_graph_cycle: tuple[float, float] = (-0.05, 0.15)
    draft_eager: tuple[float, float] = (0.5, 0.6)
    comm_base: tuple[float, float] = (0.05, 1.2)
    comm_token: tuple[float, float] = (0.01, 1.5)
    comm_offset_sd: float = 0.05
    draft_comm_sd: float = 0.15
    rank_ratio_logit: tuple[float, float] = (-1.4, 0.7)


# Drafts of one pass: the cost is in the pass, hardly in the steps.
_DRAFT_OF_METHOD: dict[str, dict[str, Any]] = {
    "parallel": {"draft_base": (0.10, 0.9), "draft_step": (0.01, 1.2)},
    "ngram": {"draft_base": (0.01, 1.2), "draft_step": (0.003, 1.2)},
}
# Engines that are no servers: nothing but the passes and a host synchronisation in a cycle.
_BARE_LOOPS = ("loop", "harness", "benchmark")
_STEPS = 40
_POSITIONS_BEYOND = 16


def _prior(
    cal: Calibration, dep: Deployment, layout: Layout, obs: Observations, settings: CostPrior
) -> tuple[Array, Array]:
    """Mean and covariance of all parameters."""
    prior = replace(settings, **_DRAFT_OF_METHOD.get(cal.model.method or "", {}))
    if any(word in (cal.system.engine or "").lower() for word in _BARE_LOOPS):
        prior = replace(prior, overhead=prior.overhead_loop)
    log = {
        "log_token": prior.token,
        "log_knee_tokens": prior.knee_tokens,
        "log_kv": prior.kv,
        "log_overhead": prior.overhead,
        "log_draft_base": prior.draft_base,
        "log_draft_step": prior.draft_step,
        "log_draft_sequence": prior.draft_sequence,
        "log_draft_width": prior.draft_width,
        "log_tree": prior.tree,
        "log_comm_base": prior.comm_base,
        "log_comm_token": prior.comm_token,
    }
    linear = {
        "tax": prior.tax,
        "logit_expert_share": prior.expert_share_logit,
        "logit_overlap": prior.overlap_logit,
        "kv_multi": prior.kv_multi,
        "verify_eager": prior.verify_eager,
        "draft_graph_cycle": prior.draft_graph_cycle,
        "draft_eager": prior.draft_eager,
        "comm_offset": (0.0, prior.comm_offset_sd),
        "draft_comm": (0.0, prior.draft_comm_sd),
    }
    mean, sd = np.zeros(layout.size), np.zeros(layout.size)
    several = len(dep.structure.comm_names) > 1
    any_curve = any(dep.own_curve)
    for i, full in enumerate(parameter_names(dep.structure.comm_names)):
        name, _, comm = full.partition("[")
        if name == "log_pass_ms":
            mean[i], sd[i] = _start_pass(obs) - 0.1, prior.pass_log_sd
        elif name in log:
            mean[i], sd[i] = np.log(log[name][0]), log[name][1]
        else:
            mean[i], sd[i] = linear[name]
        if comm:
            c = dep.structure.comm_names.index(comm[:-1])
            # A setting with a curve differs by a constant; one without by a fixed and a per-token share; the first is
            # the reference that the pass itself stands for.
            curve = dep.own_curve[c]
            if name in ("log_comm_base", "log_comm_token") and (not several or curve or (any_curve and c == 0)):
                mean[i], sd[i] = -60.0, 0.0
            if name == "comm_offset" and (c == 0 or not curve):
                sd[i] = 0.0
            if name == "draft_comm" and c == 0:
                sd[i] = 0.0
    if dep.structure.num_experts == 0:
        for i in (2, 3):
            sd[i] = 0.0
    cov = np.diag(sd**2)
    r = layout.rank_ratio
    mean[r], cov[r, r] = prior.rank_ratio_logit[0], prior.rank_ratio_logit[1] ** 2
    curve_prior = prior_of(cal.model.method)
    base = curve_prior.covariance(layout.positions)
    for w in range(len(layout.workloads)):
        mean[layout.curve(w)] = curve_prior.mean(layout.positions)
        for v in range(len(layout.workloads)):
            cov[layout.curve(w), layout.curve(v)] = base * (1.0 if v == w else curve_prior.shared)
    return mean, cov


def _start_pass(obs: Observations) -> float:
    """Logarithm of the least time seen of a pass or a cycle, ms."""
    timed = (obs.verify > 0) | (obs.cycle > 0)
    rates = (obs.cycle < 0) & ~obs.bound
    times = np.concatenate([obs.value[timed], -obs.value[rates]])
    if len(times):
        return float(times.min())
    bounds = -obs.value[obs.bound]
    drafts = obs.value[obs.draft > 0]
    if len(bounds):
        return float(bounds.min())
    return float(drafts.min()) + 2.0 if len(drafts) else np.log(20.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """What a search for a mode needs and does not change."""

    obs: Observations
    dep: Deployment
    layout: Layout
    mean: Array
    cov: Array
    tax_scale: float
    tax_degrees: float
    verify_cov: Array
    draft_cov: Array
    residuals: Residuals
    noise_scale: float


@dataclass(slots=True)
class _State:
    theta: Array
    verify_residual: Array
    draft_residual: Array


def _linearise(problem: _Problem, state: _State) -> tuple[Array, Array, Array, Array]:
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
        jac[here, : layout.num_cost] = (
            cycle * at.d_log_cycle[:, i] + verify * at.d_log_verify[:, i] + draft * at.d_log_draft[:, i]
        ).T
        verify_weight[here] = verify + cycle * (at.verify_ms / at.cycle_ms)[i]
        draft_weight[here] = draft + cycle * (at.draft_ms / at.cycle_ms)[i]
    shaped = obs.shape >= 0
    if shaped.any():
        length, gradient = lengths(state.theta, layout, obs.shapes)
        value[shaped] += obs.length[shaped] * length[obs.shape[shaped]]
        jac[shaped] += obs.length[shaped, None] * gradient[obs.shape[shaped]]
    placed = obs.position >= 0
    if placed.any():
        column = layout.num_cost + 1 + obs.workload[placed] * layout.positions + obs.position[placed]
        value[placed] += state.theta[column]
        jac[np.flatnonzero(placed), column] = 1.0
    return value, jac, verify_weight, draft_weight


def _working(problem: _Problem, latent: Array) -> tuple[Array, Array]:
    """Value and variance of the Gaussian that stands for each observation's likelihood at its latent value."""
    obs = problem.obs
    value = obs.value.copy()
    variance = obs.sd**2 * np.where(obs.sampled, problem.noise_scale, 1.0)
    counted = obs.trials > 0
    if counted.any():
        p = np.clip(sigmoid(latent[counted]), 1e-6, 1.0 - 1e-6)
        weight = obs.trials[counted] * p * (1.0 - p)
        value[counted] = latent[counted] + (obs.hits[counted] - obs.trials[counted] * p) / weight
        variance[counted] = 1.0 / weight
    if obs.bound.any():
        b = obs.bound
        sd = np.sqrt(variance[b])
        z = (obs.value[b] - latent[b]) / sd
        hazard = np.exp(-0.5 * z * z - 0.5 * np.log(2.0 * np.pi) - log_ndtr(z))
        weight = np.maximum(hazard * (z + hazard), 1e-12)
        value[b] = latent[b] - sd * hazard / weight
        variance[b] = sd * sd / weight
    return value, variance


def _search(problem: _Problem, state: _State) -> tuple[Posterior, _State]:
    """Gauss-Newton from a start to a mode, and the Laplace approximation there."""
    obs = problem.obs
    state = replace(state)
    i = np.maximum(obs.point, 0)
    verify_cov, draft_cov = problem.verify_cov[np.ix_(i, i)], problem.draft_cov[np.ix_(i, i)]
    cov = problem.cov.copy()
    converged = False
    for step in range(_STEPS):
        tax = state.theta[1] - problem.mean[1]
        cov[1, 1] = _tax_variance(tax, problem)
        expected, jac, gv, gd = _linearise(problem, state)
        value, variance = _working(problem, expected)
        shift = jac @ (state.theta - problem.mean)
        if len(obs.points):
            shift += gv * state.verify_residual[i] + gd * state.draft_residual[i]
        spread = jac @ cov
        residual_cov = np.outer(gv, gv) * verify_cov + np.outer(gd, gd) * draft_cov
        residual_cov[np.diag_indices_from(residual_cov)] += variance
        total = spread @ jac.T + residual_cov
        factor = cholesky(total, lower=True, check_finite=False)
        rest = value - expected + shift
        alpha = cho_solve((factor, True), rest, check_finite=False)
        if converged or step == _STEPS - 1:
            break
        move = problem.mean + spread.T @ alpha - state.theta
        largest = float(np.max(np.abs(move[: problem.layout.num_cost]), initial=0.0))
        damp = min(1.0, 1.5 / largest) if largest > 0 else 1.0
        if step > 12:
            damp *= 0.5
        state.theta = state.theta + damp * move
        if len(obs.points):
            new_verify = problem.verify_cov[:, i] @ (gv * alpha)
            new_draft = problem.draft_cov[:, i] @ (gd * alpha)
            state.verify_residual = state.verify_residual + damp * (new_verify - state.verify_residual)
            state.draft_residual = state.draft_residual + damp * (new_draft - state.draft_residual)
        converged = float(np.max(np.abs(move), initial=0.0)) < 1e-4
    log_evidence = -0.5 * float(rest @ alpha) - float(np.sum(np.log(np.diag(factor))))
    log_evidence += _tax_correction(tax, float(cov[1, 1]), problem)
    timed = obs.sampled & ~obs.bound
    inverse = cho_solve((factor, True), residual_cov, check_finite=False)
    degrees = float(np.sum(np.diag(inverse)[timed]))
    misfit = float(np.sum((alpha * (residual_cov @ alpha))[timed]))
    posterior = Posterior(
        theta=state.theta,
        prior_cov=cov,
        jacobian=jac,
        verify_weight=gv,
        draft_weight=gd,
        factor=factor,
        alpha=alpha,
        residuals=problem.residuals,
        noise_scale=(4.0 + misfit) / (4.0 + degrees),
        degrees=4.0 + degrees,
        log_evidence=log_evidence,
        converged=converged,
    )
    return posterior, state


def _tax_variance(tax: float, problem: _Problem) -> float:
    """Variance of the Gaussian that stands for the Student prior of the tax at its present value."""
    nu, scale = problem.tax_degrees, problem.tax_scale
    return scale * scale * (nu + (tax / scale) ** 2) / (nu + 1.0)


def _tax_correction(tax: float, variance: float, problem: _Problem) -> float:
    """Log of the Student density over the Gaussian that stood for it; constants that all modes share left out."""
    nu, scale = problem.tax_degrees, problem.tax_scale
    student = -0.5 * (nu + 1.0) * np.log1p((tax / scale) ** 2 / nu)
    return float(student + 0.5 * np.log(variance) + 0.5 * tax * tax / variance)


def fit(
    cal: Calibration,
    *,
    prior: CostPrior | None = None,
    residuals: Residuals | None = None,
    noise: Noise | None = None,
) -> FittedModel:
    """Joint posterior of cost and acceptance given everything in a calibration but its `validation`.

    Parameters
    ----------
    cal : Calibration
        What was measured; the `validation` section is not looked at.
    prior, residuals, noise : optional
        Other constants than the defaults, for studies of the estimator.

    Returns
    -------
    FittedModel
    """
    dep = deployment_of(cal)
    obs = observations_of(cal, dep, noise)
    settings = prior or CostPrior()
    scale = residuals or Residuals()
    longest = max([s.num_steps for s in obs.shapes] + [int(p) + 1 for p in obs.position], default=0)
    layout = Layout(
        num_cost=len(parameter_names(dep.structure.comm_names)),
        positions=min(max(longest, 8) + 4, max(longest, 64)),
        workloads=obs.workloads,
    )
    mean, cov = _prior(cal, dep, layout, obs, settings)
    base = _Problem(
        obs=obs,
        dep=dep,
        layout=layout,
        mean=mean,
        cov=cov,
        tax_scale=settings.tax[1],
        tax_degrees=settings.tax_degrees,
        verify_cov=verify_covariance(obs.residual_points, obs.residual_points, scale),
        draft_cov=draft_covariance(obs.residual_points, obs.residual_points, scale),
        residuals=scale,
        noise_scale=1.0,
    )
    # A fixed tax and a steep slope can both explain one point: a start near each, and both are kept until data decide.
    first = []
    for tax in (settings.tax[0], 0.8):
        start = _State(mean.copy(), np.zeros(len(obs.points)), np.zeros(len(obs.points)))
        start.theta[1] = tax
        first.append(_search(base, start))
    found = []
    for posterior, state in _different(first):
        scaled = _rescaled(base, posterior.noise_scale)
        again, _ = _search(scaled, state)
        found.append(replace(again, noise_scale=scaled.noise_scale))
    kept, weights = _modes(found)
    return FittedModel(
        calibration=cal,
        deployment=dep,
        observations=obs,
        layout=layout,
        measured=measured_of(cal, dep),
        posteriors=kept,
        weights=weights,
        warnings=tuple(f.text for f in findings_of(cal)),
    )


def _different(found: list[tuple[Posterior, _State]]) -> list[tuple[Posterior, _State]]:
    """Searches that ended in different modes, the likeliest first."""
    kept: list[tuple[Posterior, _State]] = []
    for posterior, state in sorted(found, key=lambda pair: -pair[0].log_evidence):
        if all(np.max(np.abs(posterior.theta - other.theta)) > 0.05 for other, _ in kept):
            kept.append((posterior, state))
    return kept


def _modes(found: list[Posterior]) -> tuple[tuple[Posterior, ...], tuple[float, ...]]:
    """The modes that differ and are not hopeless, likeliest first, with their probabilities by evidence."""
    kept: list[Posterior] = []
    for p in sorted(found, key=lambda p: -p.log_evidence):
        if all(np.max(np.abs(p.theta - q.theta)) > 0.05 for q in kept):
            kept.append(p)
    weights = np.exp([p.log_evidence - kept[0].log_evidence for p in kept])
    pairs = [(p, float(w)) for p, w in zip(kept, weights / weights.sum(), strict=True) if w > 0.01]
    total = sum(w for _, w in pairs)
    return tuple(p for p, _ in pairs), tuple(w / total for _, w in pairs)


def _rescaled(problem: _Problem, noise_scale: float) -> _Problem:
    """The problem with the noise scale that a first fit found; the residual process is widened, never narrowed."""
    up = max(noise_scale, 1.0)
    r = problem.residuals
    wide = replace(r, **{name: getattr(r, name) * np.sqrt(up) for name in _AMPLITUDES})
    return replace(
        problem,
        noise_scale=noise_scale,
        verify_cov=problem.verify_cov * up,
        draft_cov=problem.draft_cov * up,
        residuals=wide,
    )


_AMPLITUDES = (
    "tokens",
    "batch",
    "batch_speculating",
    "context",
    "comm",
    "configuration",
    "draft_steps",
    "draft_batch",
    "draft_configuration",
)
