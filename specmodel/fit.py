"""Calibration -> model: likelihood, priors and the joint posterior of cost and acceptance.

One Gaussian prior on all parameters (Student for the tax of having speculation on), a Gaussian process on the
log-residuals of verify and draft, and observations that are smooth functions of both. `search` finds the modes; the
noise scale is learnt from the first search of each, and the modes are weighted by their evidence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.acceptance import prior_of, reach_of
from specmodel.calibration import Calibration
from specmodel.cost import parameter_names
from specmodel.deployment import Deployment, deployment_of
from specmodel.findings import findings_of
from specmodel.gpus import datasheet
from specmodel.measured import measured_of
from specmodel.model import FittedModel
from specmodel.notices import acceptance_notices, contradiction_notices, unit_notices
from specmodel.observations import Observations, observations_of
from specmodel.posterior import MOST_POSITIONS, Layout, Posterior
from specmodel.residual import Residuals, draft_covariance, verify_covariance
from specmodel.search import Problem, Scales, State, different, rescaled, search, start
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
    knee_log_sd_of_gpu: float = 0.7
    """Of dense models, around FLOP/s over bytes/s of a GPU whose data sheet is known."""
    kv: tuple[float, float] = (0.01, 1.5)
    kv_multi: tuple[float, float] = (0.1, 0.7)
    overhead: tuple[float, float] = (0.10, 1.5)
    overhead_loop: tuple[float, float] = (0.002, 1.2)
    """Of a bare benchmark loop, which has no scheduler, sampler or detokenizer."""
    draft_base: tuple[float, float] = (0.001, 1.0)
    draft_step: tuple[float, float] = (0.09, 0.9)
    draft_sequence: tuple[float, float] = (0.015, 1.5)
    draft_width: tuple[float, float] = (0.01, 1.5)
    draft_kv: tuple[float, float] = (0.005, 1.5)
    tree: tuple[float, float] = (0.15, 1.4)
    verify_eager: tuple[float, float] = (0.3, 0.5)
    draft_graph_cycle: tuple[float, float] = (-0.05, 0.15)
    draft_eager: tuple[float, float] = (0.5, 0.6)
    comm_base: tuple[float, float] = (0.05, 1.2)
    comm_token: tuple[float, float] = (0.01, 1.5)
    comm_offset_sd: float = 0.05
    draft_comm_sd: float = 0.15
    rank_ratio_logit: tuple[float, float] = (-1.4, 0.7)
    tree_gain: tuple[float, float] = (-0.1, 0.2)
    tree_own_gain_sd: float = 0.1


# Drafts of one pass: the cost is in the pass, hardly in the steps.
_DRAFT_OF_METHOD: dict[str, dict[str, Any]] = {
    "parallel": {"draft_base": (0.10, 0.9), "draft_step": (0.01, 1.2)},
    "ngram": {"draft_base": (0.01, 1.2), "draft_step": (0.003, 1.2)},
}
# Engines that are no servers: nothing but the passes and a host synchronisation in a cycle.
_BARE_LOOPS = ("loop", "harness", "benchmark")
_ROUGH_OBSERVATIONS = 160
_ROUNDS = 5
_ROUGHLY = 1e-3
"""How well the first search ends, which only finds the noise scale."""


def _prior(
    cal: Calibration, dep: Deployment, layout: Layout, obs: Observations, settings: CostPrior
) -> tuple[Array, Array]:
    """Mean and covariance of all parameters."""
    prior = replace(settings, **_DRAFT_OF_METHOD.get(cal.model.method or "", {}))
    if any(word in (cal.system.engine or "").lower() for word in _BARE_LOOPS):
        prior = replace(prior, overhead=prior.overhead_loop)
    gpu = datasheet(cal.system.gpu or "")
    # The tokens of a mixture of experts are spread over weights that are each at a ridge of its own.
    if gpu is not None and not cal.model.num_experts:
        # 2 n P operations take as long as reading P weights of two bytes: n = FLOP/s over bytes/s (a roofline's ridge).
        ridge = gpu.flops_per_ms / gpu.bandwidth_bytes_per_ms
        prior = replace(prior, knee_tokens=(ridge, prior.knee_log_sd_of_gpu))
    log = {
        "log_token": prior.token,
        "log_knee_tokens": prior.knee_tokens,
        "log_kv": prior.kv,
        "log_overhead": prior.overhead,
        "log_draft_base": prior.draft_base,
        "log_draft_step": prior.draft_step,
        "log_draft_sequence": prior.draft_sequence,
        "log_draft_width": prior.draft_width,
        "log_draft_kv": prior.draft_kv,
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
    g = layout.tree_gain
    mean[g], cov[g, g] = prior.tree_gain[0], prior.tree_gain[1] ** 2
    for own in range(g + 1, layout.first_curve):
        cov[own, own] = prior.tree_own_gain_sd**2
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
    if len({c.workload for c in cal.measurements.cycles}) < 2:
        scale = replace(scale, workload=0.0)
    longest = max([s.num_steps for s in obs.shapes] + [int(p) + 1 for p in obs.position], default=0)
    positions = min(max(longest, 8) + 4, MOST_POSITIONS)
    layout = Layout(
        num_cost=len(parameter_names(dep.structure.comm_names)),
        positions=positions,
        workloads=obs.workloads,
        trees=tuple(sorted({(x.num_steps, x.topk, x.verify_tokens) for x in obs.shapes if x.topk > 1})),
        reach=tuple(
            reach_of(*obs.drafted[w], positions=positions) if w in obs.drafted else None
            for w in range(len(obs.workloads))
        ),
    )
    mean, cov = _prior(cal, dep, layout, obs, settings)
    base = Problem(
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
    # A part of a large file finds the modes and the noise scale as well as all of it.
    rough = replace(base, obs=obs.thinned(_ROUGH_OBSERVATIONS)) if len(obs) > _ROUGH_OBSERVATIONS else base
    first = different([search(rough, start(rough, tax), _ROUGHLY) for tax in (settings.tax[0], 0.8)])
    found = [_settled(base, rough, posterior, state) for posterior, state in first]
    kept, weights = _modes([posterior for posterior, _ in different(found)])
    return FittedModel(
        calibration=cal,
        deployment=dep,
        observations=obs,
        layout=layout,
        measured=measured_of(cal, dep),
        posteriors=kept,
        weights=weights,
        warnings=(
            *(f.text for f in findings_of(cal)),
            *unit_notices(cal),
            *acceptance_notices(cal),
            *contradiction_notices(cal),
        ),
    )


def _settled(base: Problem, rough: Problem, posterior: Posterior, state: State) -> tuple[Posterior, State]:
    """Search again under the scales that the last search speaks for, until they no longer change; then to the end.

    `rough` is the problem, or the part of it, that the first search saw.
    """
    before = Scales()
    scales = before.after(posterior)
    for _ in range(_ROUNDS):
        problem, state = rescaled(rough, scales, state, before)
        posterior, state = search(problem, state, _ROUGHLY)
        before, scales = scales, scales.after(posterior)
        if not scales.differ(before):
            break
    problem, state = rescaled(base, scales, state, before)
    return search(problem, state)


def _modes(kept: list[Posterior]) -> tuple[tuple[Posterior, ...], tuple[float, ...]]:
    """The modes that are not hopeless, likeliest first, with their probabilities by evidence."""
    weights = np.exp([p.log_evidence - kept[0].log_evidence for p in kept])
    pairs = [(p, float(w)) for p, w in zip(kept, weights / weights.sum(), strict=True) if w > 0.01 * weights.sum()]
    total = sum(w for _, w in pairs)
    return tuple(p for p, _ in pairs), tuple(w / total for _, w in pairs)
