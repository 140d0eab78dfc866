"""The parts of the cycle drawn together: verify, draft, overhead and acceptance of the same parameters and residuals.

`FittedModel.draws` gives tok/s alone. A what-if changes one part and leaves the others, so it needs to know how they
vary together: a file with speeds alone knows their ratio far better than the parts. Here the parameters and the
residuals of each of those same draws are drawn given its tok/s (the posterior is Gaussian in them, to the order in
which the model works: linear in the logarithms), and the parts follow from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import block_diag, solve_triangular

from specmodel.acceptance import sigmoid
from specmodel.cost import verify_terms as smooth_terms
from specmodel.deployment import flattened
from specmodel.errors import UsageError
from specmodel.model import FittedModel
from specmodel.posterior import residual_means
from specmodel.request import Request, Workload
from specmodel.residual import draft_covariance, verify_covariance
from specmodel.sampling import Sample, symmetric_root

__all__ = [
    "TERMS",
    "Parts",
    "chain_lengths",
    "conditional_draws",
    "curves_of",
    "draw_parts",
    "draw_with_parameters",
    "split",
    "verify_terms",
]

Array = NDArray[np.float64]
TERMS = (
    "fixed_pass",
    "verified_tokens",
    "experts",
    "attention_kv",
    "allreduce",
    "compute_knee",
    "eager",
    "padding",
    "residual",
)
"""Names of the terms of the verify pass, in the order in which people read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Draws of the parts of the cycle of N points; a row is one draw, the same for all of its points and parts."""

    verify_ms: Array
    """Shape (draws, N), as all but `batch`."""
    draft_ms: Array
    overhead_ms: Array
    acceptance_length: Array
    batch: Array
    """Shape (N,)."""

    @property
    def cycle_ms(self) -> Array:
        """Verify, draft and overhead together."""
        return np.asarray(self.verify_ms + self.draft_ms + self.overhead_ms)

    @property
    def tok_s(self) -> Array:
        """Tokens per second of the whole batch."""
        return np.asarray(1000.0 * self.batch * self.acceptance_length / self.cycle_ms)

    def at(self, points: NDArray[np.intp] | NDArray[np.bool_] | slice) -> Parts:
        """Return the same draws of some of the points."""
        return Parts(
            verify_ms=self.verify_ms[:, points],
            draft_ms=self.draft_ms[:, points],
            overhead_ms=self.overhead_ms[:, points],
            acceptance_length=self.acceptance_length[:, points],
            batch=self.batch[points],
        )


def draw_parts(model: FittedModel, request: Request, count: int = 500) -> Parts:
    """Joint draws of the parts of every point of a request (flattened); its tok_s is ``model.draws(request, count)``.

    Latent values, as those: the noise of one measurement is not in them. Deterministic. The work grows with the cube
    of the points: some hundred at once are quick.

    Parameters
    ----------
    model : FittedModel
    request : Request
        From `FittedModel.request`.
    count : int
        Number of draws.
    """
    return draw_with_parameters(model, request, count)[0]


def draw_with_parameters(model: FittedModel, request: Request, count: int = 500) -> tuple[Parts, Array]:
    """`draw_parts`, and the parameters that stand behind each draw, shape (count, parameters)."""
    # A stream of its own: that of `FittedModel.draws` stays as it is.
    random = np.random.default_rng(20261129)
    drawn = [_drawn(model, request, sample, random) for sample in model.samples(request, count)]
    size = int(np.prod(request.shape))
    parts = Parts(
        verify_ms=np.concatenate([p.verify_ms for p, _ in drawn]),
        draft_ms=np.concatenate([p.draft_ms for p, _ in drawn]),
        overhead_ms=np.concatenate([p.overhead_ms for p, _ in drawn]),
        acceptance_length=np.concatenate([p.acceptance_length for p, _ in drawn]),
        batch=np.broadcast_to(request.batch, request.shape).reshape(size),
    )
    return parts, np.concatenate([theta for _, theta in drawn])


def _drawn(model: FittedModel, request: Request, sample: Sample, random: np.random.Generator) -> tuple[Parts, Array]:
    """Parts and parameters of the draws of one mode.

    With x the parameters and the residuals, all jointly normal, ``x | ln tok/s = mean + A z + B z'``: z stands behind
    the draws of tok/s, z' is new, ``A = Cov(x, ln tok/s) root^-1`` and ``B B = Cov(x) - A A'``.
    """
    post, at = model.posteriors[sample.mode], sample.at
    p, points = len(post.theta), len(sample.mean)
    spread = _spread(model, sample)
    length_gradient = at.table.gradient[at.table.index] * ~at.table.known[:, None]
    to_rate = length_gradient.T.copy()
    to_rate[: model.layout.num_cost] += at.cost_gradient
    with_rate = (
        spread[:, :p] @ to_rate
        + spread[:, p : p + points] * at.verify_weight
        + spread[:, p + points :] * at.draft_weight
    )
    known = with_rate @ np.linalg.pinv(sample.root, rcond=1e-5, hermitian=True)
    rest = symmetric_root(spread - known @ known.T)
    new = random.standard_normal((len(sample.normal), len(rest)))
    moved = sample.scale * (sample.normal @ known.T + new @ rest)
    theta, verify, draft = moved[:, :p], moved[:, p : p + points], moved[:, p + points :]

    latent, c = at.latent, model.layout.num_cost
    drafting, burdened = latent.draft_ms > 0.0, latent.overhead_ms > 1e-9 * latent.cycle_ms
    by_overhead = (
        at.latent.d_log_cycle * latent.cycle_ms
        - latent.d_log_verify * latent.verify_ms
        - latent.d_log_draft * latent.draft_ms
    ) / np.where(burdened, latent.overhead_ms, 1.0)
    given = np.broadcast_to(request.given, request.shape).ravel()
    length_at = np.where(at.table.known, np.log(np.where(at.table.known, given, 1.0)), at.table.value[at.table.index])
    length = np.exp(length_at + theta @ length_gradient.T)
    logs = np.stack(
        [
            theta[:, :c] @ latent.d_log_verify + verify,
            np.where(drafting, theta[:, :c] @ latent.d_log_draft + draft, 0.0),
            np.where(burdened, theta[:, :c] @ by_overhead, 0.0),
        ]
    )
    means = np.stack([latent.verify_ms, latent.draft_ms, latent.overhead_ms])
    # The cycle of a draw is the one behind its tok/s.
    batch = np.broadcast_to(request.batch, request.shape).ravel()
    cycle = 1000.0 * batch * length / np.exp(np.clip(sample.log_tok_s, -300.0, 300.0))
    divided = split(means, np.clip(logs, -50.0, 50.0), cycle)
    parts = Parts(
        verify_ms=divided[0],
        draft_ms=divided[1],
        overhead_ms=divided[2],
        acceptance_length=length,
        batch=batch,
    )
    return parts, post.theta + theta


def split(means: Array, logs: Array, cycle: Array) -> Array:
    """Draws of the parts, shape (parts, draws, N), from those of their logarithms about their means, with given sums.

    To first order the sums agree already. What is left goes to the parts by how little is known of each: the move of
    least weight in units of their variances is ``variance * share`` each.
    """
    by = np.var(logs, axis=1) * means / means.sum(axis=0)
    by = np.maximum(by, 1e-9) * (means > 0.0)
    by = np.broadcast_to((by / by.max(axis=0))[:, None, :], logs.shape).reshape(len(means), -1)
    parts = (means[:, None, :] * np.exp(logs)).reshape(len(means), -1)
    wanted = np.broadcast_to(cycle, logs.shape[1:]).ravel()
    # ln sum(part * exp(move * by)) rises with the move and is convex: Newton's steps come from above after the first.
    open_ = np.arange(len(wanted))
    for _ in range(50):
        here = parts[:, open_]
        total = here.sum(axis=0)
        missing = np.log(wanted[open_] / total)
        off = np.abs(missing) > 1e-9
        if not off.any():
            break
        open_, here, missing, total = open_[off], here[:, off], missing[off], total[off]
        slope = by[:, open_]
        parts[:, open_] = here * np.exp(np.clip(missing * total / (here * slope).sum(axis=0), -20.0, 20.0) * slope)
    # A part that is there keeps a share: a draw far from the mean must not make it nothing, which has no logarithm.
    parts = np.maximum(parts, 1e-12 * parts.sum(axis=0) * (by > 0.0))
    return np.asarray((parts * (wanted / parts.sum(axis=0))).reshape(logs.shape))


def _spread(model: FittedModel, sample: Sample) -> Array:
    """Posterior covariance of the parameters and of the residuals of verify and of draft at the points."""
    post, right, obs = model.posteriors[sample.mode], sample.right, model.observations
    prior = block_diag(
        post.prior_cov,
        verify_covariance(right, right, post.residuals),
        draft_covariance(right, right, post.residuals),
    )
    points = len(sample.mean)
    verify, draft = np.zeros((len(obs), points)), np.zeros((len(obs), points))
    used = np.flatnonzero(obs.point >= 0)
    if len(obs.points):
        left = obs.residual_points
        verify[used] = (
            post.verify_weight[used, None] * (verify_covariance(left, right, post.residuals)[obs.point[used]])
        )
        draft[used] = post.draft_weight[used, None] * (draft_covariance(left, right, post.residuals)[obs.point[used]])
    cross = solve_triangular(
        post.factor, np.hstack([post.jacobian @ post.prior_cov, verify, draft]), lower=True, check_finite=False
    )
    return np.asarray(prior - cross.T @ cross)


# ------------------------------------------------------------------------------------------------------- acceptance
def curves_of(model: FittedModel, parameters: Array, workloads: dict[int, float], positions: int) -> dict[int, Array]:
    """Conditional acceptance of each workload at positions 1..`positions`; past the curve the last one goes on.

    Parameters
    ----------
    parameters : numpy.ndarray, shape (draws, parameters)
        From `draw_with_parameters`.
    workloads : dict of index to share
        As `FittedModel.mixture` gives them.
    positions : int

    Returns
    -------
    dict of index to array of shape (draws, positions)
    """
    last = np.minimum(np.arange(positions), model.layout.positions - 1)
    return {w: sigmoid(parameters[:, model.layout.curve(w)])[:, last] for w in workloads}


def chain_lengths(model: FittedModel, curves: dict[int, Array], shares: dict[int, float]) -> Array:
    """Acceptance length of the mixture for chains of 0, 1, ... steps, shape (draws, positions + 1).

    Shares are of tokens, so lengths average harmonically; drafts count where the drafter makes them.
    """
    inverse = sum(shares[w] / length for w, (_, length) in _survivals(model, curves).items())
    return np.asarray(1.0 / inverse)


def _survivals(model: FittedModel, curves: dict[int, Array]) -> dict[int, tuple[Array, Array]]:
    """Survival at positions 1, 2, ... of each workload, and its acceptance lengths from 0 steps on."""
    out: dict[int, tuple[Array, Array]] = {}
    for w, conditional in curves.items():
        survival = np.cumprod(conditional, axis=1)
        reach = model.layout.reach_of(w)
        if reach is not None:
            survival = survival * reach[np.minimum(np.arange(survival.shape[1]), len(reach) - 1)]
        nothing = np.ones_like(survival[:, :1])
        length = np.concatenate([nothing, 1.0 + np.cumsum(survival, axis=1)], axis=1)
        out[w] = np.asarray(survival), np.asarray(length)
    return out


def conditional_draws(
    model: FittedModel, workload: Workload, positions: int, count: int = 500, request: Request | None = None
) -> Array:
    """Draws of the conditional acceptance of a workload or a mixture, shape (count, positions).

    The conditional acceptances of a mixture are those of its survival curve (``S_k = E[N_k] - E[N_{k-1}]``); where a
    drafter does not always draft, they count what it does not draft as not accepted. Their lengths are those of
    `draw_parts` to the order in which the model is linear.

    Parameters
    ----------
    model : FittedModel
    workload : str, mapping or None
        As in `FittedModel.predict`.
    positions : int
        Positions wanted, 1 or more.
    count : int
        Number of draws.
    request : Request, optional
        The request whose `draw_parts` they belong to; by default chains of 1 to `positions` steps at batch 1.
    """
    if positions < 1:
        raise UsageError(f"positions must be at least 1, got {positions!r}")
    shares, _ = model.mixture(workload)
    if request is None:
        request, _ = model.request(np.arange(1, positions + 1), workload=workload)
    _, parameters = draw_with_parameters(model, request, count)
    each = _survivals(model, curves_of(model, parameters, shares, positions))
    mixed = 1.0 / np.asarray(sum(shares[w] / length for w, (_, length) in each.items()))
    # E[N_k] - E[N_{k-1}], without the difference of two numbers that are nearly equal.
    falls = np.asarray(sum(shares[w] * s / (length[:, :-1] * length[:, 1:]) for w, (s, length) in each.items()))
    survival = falls * mixed[:, :-1] * mixed[:, 1:]
    before = np.concatenate([np.ones_like(survival[:, :1]), survival[:, :-1]], axis=1)
    return np.asarray(np.clip(survival / np.maximum(before, 1e-300), 0.0, 1.0))


# ------------------------------------------------------------------------------------------------------ verify terms
def verify_terms(model: FittedModel, request: Request) -> dict[str, Array]:
    """Named parts of the verify pass of every point of a request (flattened), ms; they sum to its `verify_ms`.

    At the posterior mean. `fixed_pass` is what every pass reads, `experts` the expert weights touched,
    `verified_tokens` what each further token adds, `attention_kv` reading the KV cache, `allreduce` the all-reduces,
    `compute_knee` what compute adds where a pass is no longer bound by memory, `eager` running outside a CUDA graph,
    `padding` what captured sizes add to all of these, and `residual` what the terms do not say.
    """
    broad_points, broad_right = model.deployment.points(request.settings)
    points, right = flattened(broad_points, request.shape), flattened(broad_right, request.shape)
    bare = replace(model.deployment, graph_sizes=np.zeros(0)).points(request.settings)[0]
    unpadded = replace(flattened(bare, request.shape), verify_eager=points.verify_eager)
    num_cost, structure = model.layout.num_cost, model.deployment.structure
    total = {name: np.zeros(len(points)) for name in TERMS}
    for post, weight in zip(model.posteriors, model.weights, strict=True):
        theta = post.theta[:num_cost]
        padded, terms = smooth_terms(theta, points, structure), smooth_terms(theta, unpadded, structure)
        padded_ms, unpadded_ms = np.asarray(sum(padded.values())), np.asarray(sum(terms.values()))
        terms["padding"] = padded_ms - unpadded_ms
        terms["residual"] = padded_ms * np.expm1(residual_means(post, model.observations, right)[0])
        for name, value in terms.items():
            total[name] = total[name] + weight * value
    return total
