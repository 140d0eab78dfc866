"""The posterior is at a mode, its derivatives are those of the model, and its Laplace variances are the curvature's."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import expit, log_ndtr

import specmodel as sm
from specmodel.cost import PARAMETERS
from specmodel.posterior import lengths, parts

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec = cases.plain, cases.spec

TAX = PARAMETERS.index("tax")
STEMS = (
    "kimi-k2.5-eagle3-8x-rtx-pro-6000",  # bounds, ranges, two settings
    "mlxcel_1782_qwen35_4b_dflash_gb10",  # a fixed cost of several plain steps
    "strixhalo_llamacpp_qwen35_9b",  # long chains
    "vllm_44697_mtp_pp4_pcie",  # two explanations
    "specbundle_qwen3_coder_30b",  # trees
    "specforge_339_qwen3_30b_a3b_h100x2",  # trees and experts
    "h200x2_tp2_transfer",  # tables and all-reduce curves
)
PATHS = {path.stem: path for path in cases.COMMITTED}
EVERY_FORM = cases.document(
    [
        plain(100.0),
        plain(340.0, batch=4, context_tokens=2048),
        plain(50.0, verify_cuda_graph=False),
        {"num_steps": 0, "speculation": True, "tok_s": 90.0},
        spec(1, 140.0, 1.7, comm="ring"),
        spec(3, 180.0),
        spec(3, 140.0, 2.3, cuda_graph=False),
        spec(4, 170.0, 2.6, topk=4, num_draft_tokens=8),
        {"num_steps": 2, "tok_s_at_most": 150.0},
        {"num_steps": 6, "tok_s_at_most": 170.0, "acceptance_length": 3.0},
        {"num_steps": 4, "batch": 8, "range_tpot_ms": [9.0, 11.0], "acceptance_length": 2.6},
        {"num_steps": 2, "cycle_ms": 12.5, "workload": "code"},
        {"num_steps": 8, "tok_s": 180.0, "acceptance_length": 2.5, "mean_draft_tokens": 2.5},
    ],
    verify=[{"tokens": 4, "time_ms": 10.9}, {"tokens": 6, "time_ms": 11.4, "comm": "ring"}],
    draft=[{"num_steps": 3, "time_ms": 2.1}, {"num_steps": 5, "time_ms": 3.0, "comm": "ring", "graph_scope": "cycle"}],
    allreduce=[{"size_bytes": 8192 * n, "time_ms": 0.01 + 0.001 * n} for n in (1, 2, 8)],
    acceptance=[
        {"num_steps": 5, "drafts": 2000, "prompts": 40, "accepted_per_position": [1440, 1010, 690, 450, 0]},
        {"workload": "code", "num_steps": 3, "survival": [0.85, 0.71, 0.6]},
        {"workload": "code", "num_steps": 14, "acceptance_length": 4.0},
        {
            "num_steps": 3,
            "topk": 4,
            "num_draft_tokens": 9,
            "drafts": 500,
            "accepted_by_rank": [[320, 60, 9], [200, 30]],
        },
    ],
    comm={"default": {}, "ring": {}},
    model={"num_experts": 64, "experts_per_token": 8, "hidden_size": 4096, "num_layers": 20},
)


def modes(calibration: Any) -> list[tuple[Any, Any, Any]]:
    """Problem, posterior and state of every last search of a fit that ended in a kept mode."""
    module = sys.modules[sm.fit.__module__]
    seen: list[tuple[Any, Any, Any]] = []
    inner = module.search

    def noted(problem: Any, *rest: Any) -> Any:
        posterior, state = inner(problem, *rest)
        seen.append((problem, posterior, state))
        return posterior, state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "search", noted)
        model = sm.fit(calibration)
    kept = [next(s for s in seen if s[1].theta is p.theta) for p in model.posteriors]
    assert kept
    return kept


@pytest.fixture(scope="module", params=[*STEMS, "every form"])
def searched(request: pytest.FixtureRequest) -> list[tuple[Any, Any, Any]]:
    name = request.param
    return modes(sm.from_dict(EVERY_FORM) if name == "every form" else sm.load(PATHS[name]))


def expected(problem: Any, theta: Any, verify_residual: Any, draft_residual: Any) -> Any:
    """What each observation should be, by the words of `Observations`, one observation after the other."""
    obs, layout = problem.obs, problem.layout
    at = parts(theta[: layout.num_cost], obs.points, problem.dep, verify_residual, draft_residual)
    log_length, _ = lengths(theta, layout, obs.shapes)
    out = []
    for i in range(len(obs)):
        total, point, shape = 0.0, obs.point[i], obs.shape[i]
        if obs.cycle[i]:
            total += obs.cycle[i] * np.log(at.verify_ms[point] + at.draft_ms[point] + at.overhead_ms[point])
        if obs.verify[i]:
            total += obs.verify[i] * np.log(at.verify_ms[point])
        if obs.draft[i]:
            total += obs.draft[i] * np.log(at.draft_ms[point])
        if obs.length[i]:
            total += obs.length[i] * log_length[shape]
        if obs.position[i] >= 0:
            total += theta[layout.curve(obs.workload[i])][obs.position[i]]
        out.append(total)
    return np.array(out)


def log_likelihood(problem: Any, latent: Any) -> float:
    """Normal, binomial or a bound, by the kind of each observation."""
    obs, total = problem.obs, 0.0
    for i, eta in enumerate(latent):
        sd = obs.sd[i] * np.sqrt(problem.noise_scale if obs.sampled[i] and obs.scaled[i] else 1.0)
        if obs.trials[i] > 0:
            p = np.clip(expit(eta), 1e-300, 1.0)
            total += obs.hits[i] * np.log(p) + (obs.trials[i] - obs.hits[i]) * np.log(np.clip(expit(-eta), 1e-300, 1.0))
        elif obs.bound[i]:
            total += log_ndtr((obs.value[i] - eta) / sd)
        else:
            total -= 0.5 * ((obs.value[i] - eta) / sd) ** 2
    return float(total)


def roots(problem: Any) -> tuple[Any, Any, Any]:
    """Square roots of the prior covariances of parameters, verify and draft residuals; the tax has a unit one."""

    def root(covariance: Any) -> Any:
        values, vectors = np.linalg.eigh(covariance)
        return vectors * np.sqrt(np.maximum(values, 0.0))

    cov = problem.cov.copy()
    cov[TAX, TAX] = 1.0
    return root(cov), root(problem.verify_cov), root(problem.draft_cov)


def whitened(problem: Any, state: Any) -> tuple[Any, Callable[[Any], float], Callable[[Any], Any]]:
    """A state in coordinates in which the prior is standard normal, the log posterior and the latent values there."""
    L, Lv, Ld = roots(problem)
    sizes = np.cumsum([L.shape[1], Lv.shape[1]])
    z = np.concatenate(
        [
            np.linalg.lstsq(root, x, rcond=1e-13)[0]
            for root, x in zip(
                (L, Lv, Ld),
                (state.theta - problem.mean, state.verify_residual, state.draft_residual),
                strict=True,
            )
        ]
    )

    def latent(at: Any) -> Any:
        a, b, c = np.split(at, sizes)
        return expected(problem, problem.mean + L @ a, Lv @ b, Ld @ c)

    def log_posterior(at: Any) -> float:
        tax = float((L @ at[: sizes[0]])[TAX])
        nu, scale = problem.tax_degrees, problem.tax_scale
        normal = -0.5 * float(at @ at) + 0.5 * tax * tax
        student = -0.5 * (nu + 1.0) * float(np.log1p((tax / scale) ** 2 / nu))
        return normal + student + log_likelihood(problem, latent(at))

    return z, log_posterior, latent


def test_the_mode_is_a_stationary_point(searched: Any) -> None:
    """By the finite-difference gradient of a log posterior written here, the top lies within 0.2 standard deviations.

    Half the square of that distance is what a Newton step would still gain.
    """
    for problem, posterior, state in searched:
        assert posterior.converged
        z, log_posterior, latent = whitened(problem, state)
        h = 1e-5
        size = len(z)
        gradient = np.array([(log_posterior(z + h * e) - log_posterior(z - h * e)) / (2 * h) for e in np.eye(size)])
        jacobian = np.array([(latent(z + h * e) - latent(z - h * e)) / (2 * h) for e in np.eye(size)]).T
        weight = np.where(problem.obs.trials > 0, 0.25 * problem.obs.trials, problem.obs.sd**-2.0)
        curvature = np.eye(size) + jacobian.T @ (weight[:, None] * jacobian)
        step = np.linalg.solve(curvature, gradient)
        rise = 0.5 * float(gradient @ step)
        assert rise < 0.02
        assert max(log_posterior(z + s * step) for s in (0.1, 0.5, 1.0, 2.0)) < log_posterior(z) + 0.01


def test_jacobians_are_those_of_finite_differences(searched: Any) -> None:
    for problem, posterior, state in searched:
        h = 1e-6
        theta, v, d = state.theta, state.verify_residual, state.draft_residual
        free = np.flatnonzero((np.diag(problem.cov) > 0) | (np.arange(len(theta)) == TAX))
        by_theta = np.array(
            [
                (expected(problem, theta + h * e, v, d) - expected(problem, theta - h * e, v, d)) / (2 * h)
                for e in np.eye(len(theta))[free]
            ]
        ).T
        np.testing.assert_allclose(posterior.jacobian[:, free], by_theta, atol=2e-5)
        for residual, weight in ((v, posterior.verify_weight), (d, posterior.draft_weight)):
            other = [(r + h if r is residual else r, r - h if r is residual else r) for r in (v, d)]
            up, down = ([pair[side] for pair in other] for side in (0, 1))
            slope = (expected(problem, theta, *up) - expected(problem, theta, *down)) / (2 * h)
            np.testing.assert_allclose(np.where(problem.obs.point >= 0, weight, 0.0), slope, atol=2e-5)


def test_the_covariance_of_the_observations_is_that_of_its_parts(searched: Any) -> None:
    """factor factor' = J C J' + residual processes + noise, observation by observation."""
    for problem, p, _ in searched:
        obs = problem.obs
        i = np.maximum(obs.point, 0)
        on = obs.point >= 0
        total = p.jacobian @ p.prior_cov @ p.jacobian.T
        for weight, covariance in ((p.verify_weight, problem.verify_cov), (p.draft_weight, problem.draft_cov)):
            w = np.where(on, weight, 0.0)
            total += np.outer(w, w) * covariance[np.ix_(i, i)]
        rest = p.factor @ p.factor.T - total
        off = rest - np.diag(np.diag(rest))
        scale = np.sqrt(np.outer(np.diag(total), np.diag(total)) + 1.0)
        assert np.max(np.abs(off) / scale) < 1e-9
        measured = (obs.trials == 0) & ~obs.bound
        noise = obs.sd**2 * np.where(obs.sampled & obs.scaled, problem.noise_scale, 1.0)
        np.testing.assert_allclose(np.diag(rest)[measured], noise[measured], rtol=1e-5, atol=1e-10)
        assert np.all(np.diag(rest) > 0.0)


def test_posterior_variance_of_a_prediction_is_the_curvature(searched: Any) -> None:
    """The dual form against the primal: d' (1 + J'WJ)^-1 d in whitened coordinates, for ln tok/s of several points."""
    for problem, posterior, state in searched[:1]:
        if np.any(problem.obs.bound) or len(problem.obs.points) > 60:
            continue
        z, _, latent = whitened(problem, state)
        h = 1e-5
        # Latent values of the observations themselves are as good points of prediction as any.
        jacobian = np.array([(latent(z + h * e) - latent(z - h * e)) / (2 * h) for e in np.eye(len(z))]).T
        cov_tax = posterior.prior_cov[TAX, TAX]
        L, *_ = roots(problem)
        prior = np.eye(len(z))
        t = np.concatenate([L[TAX], np.zeros(len(z) - L.shape[1])])
        prior += np.outer(t, t) * (1.0 / cov_tax - 1.0)
        p = expit(latent(z))
        obs = problem.obs
        noise = obs.sd**2 * np.where(obs.sampled & obs.scaled, problem.noise_scale, 1.0)
        weight = np.where(obs.trials > 0, obs.trials * p * (1.0 - p), 1.0 / noise)
        primal = jacobian @ np.linalg.solve(prior + jacobian.T @ (weight[:, None] * jacobian), jacobian.T)
        total = posterior.factor @ posterior.factor.T
        gain = total - np.diag(1.0 / weight)
        dual = gain - gain @ np.linalg.solve(total, gain)
        np.testing.assert_allclose(np.diag(primal), np.diag(dual), rtol=2e-3, atol=1e-9)


def test_noise_is_learnt_in_both_directions() -> None:
    """Rows that agree better or worse than they say: the noise scale falls below one, or rises far above."""
    truth = cases.Truth()
    scales = []
    for relative_sd in (0.0, 0.01, 0.10):
        random = np.random.default_rng(3)
        places = [(k, b, "default") for k in (0, 1, 2, 3, 5) for b in (1, 2, 4)]
        rows = cases.measured_cycles(truth, random, places * 2, relative_sd=relative_sd)
        scales.append(cases.fitted(rows).posteriors[0].noise_scale)
    assert scales[0] < 0.7
    assert scales[0] < scales[1] < scales[2]
    assert scales[2] > 10.0


@pytest.mark.parametrize("seed", range(3))
def test_rates_alone_of_two_settings_and_many_batches_converge_in_few_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts by sequence and tokens of a setting trade for each other: a valley that is bent in logarithms."""
    truth = cases.Truth(comm={"default": (0.0, 0.0), "ring": (0.1, 0.01)})
    places = [(k, b, c) for c in truth.comm for k in range(7) for b in np.geomspace(1, 64, 5).round(2)]
    rows = cases.measured_cycles(truth, np.random.default_rng(seed), places, lengths=False)
    monkeypatch.setattr(sys.modules["specmodel.search"], "STEPS", 30)
    assert all(p.converged for p in cases.fitted(rows, **truth.sections()).posteriors)


def test_noise_of_a_large_file_is_learnt_from_what_repeats_a_configuration() -> None:
    """Every shape under two settings, whose own costs are smooth: what the pairs differ by is noise."""
    truth = cases.Truth(comm={"default": (0.0, 0.0), "ring": (0.1, 0.01)})
    places = [(k, b, c) for c in truth.comm for k in range(7) for b in np.geomspace(1, 64, 30).round(2)]
    rows = cases.measured_cycles(truth, np.random.default_rng(0), places, lengths=False)
    posterior = cases.fitted(rows, **truth.sections()).posteriors[0]
    assert posterior.converged
    guess = 0.008
    assert 0.5 < guess * np.sqrt(posterior.noise_scale) / 0.01 < 1.5
