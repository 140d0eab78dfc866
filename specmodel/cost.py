"""The named terms of the cycle time, with analytic derivatives; pure numpy.

One cycle of speculative decoding costs ``verify + draft + overhead``. Each part is a sum of a few positive physical
terms, expressed in units of one plain pass (``pass_ms``) and parametrised by logarithms or logits, so that a weak
Gaussian prior on the parameters is a weak multiplicative prior on the terms:

    verify   = pass * ( ((dense + experts)^4 + knee^4)^(1/4) + tokens + kv ) * eager + all-reduces
    dense    = (1 - rho) * exp(tax * speculating)                   weights that every pass reads
    experts  = rho * distinct(t) / distinct(t_reference)            expert weights touched by t tokens
    knee     = n / n_knee                                           compute-bound passes (a soft maximum)
    tokens   = token * (n - 1)
    kv       = kv * b * context / context_reference * exp(kv_multi * [several query rows])
    draft    = pass * (draft_base + draft_step * steps * per_step)
    per_step = 1 + draft_sequence * (b - 1) + draft_width * b * (topk - 1) + draft_kv * b * context / context_reference
    overhead = pass * (overhead * speculating + tree * [topk > 1])

Distinct experts: E * (1 - (1 - k/E)^t) of E experts, k a token, t tokens (MoESD, arXiv 2505.19645).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "COMM_PARAMETERS",
    "PARAMETERS",
    "CostPoints",
    "CostStructure",
    "CostValues",
    "cost",
    "distinct_experts",
    "draft_terms",
    "parameter_names",
    "verify_terms",
]

Array = NDArray[np.float64]

# What every deployment has, in the order of the parameter vector. `log_` terms are positive, `logit_` are shares.
PARAMETERS = (
    "log_pass_ms",
    "tax",
    "logit_expert_share",
    "logit_overlap",
    "log_token",
    "log_knee_tokens",
    "log_kv",
    "kv_multi",
    "log_overhead",
    "log_draft_base",
    "log_draft_step",
    "log_draft_sequence",
    "log_draft_width",
    "log_draft_kv",
    "log_tree",
    "verify_eager",
    "draft_graph_cycle",
    "draft_eager",
)
# What each communication setting adds: a fixed and a per-token share of the pass where no all-reduce curve is known,
# a constant offset in units of the pass where one is, and a factor on the draft.
COMM_PARAMETERS = ("log_comm_base", "log_comm_token", "comm_offset", "draft_comm")

_INDEX = {name: i for i, name in enumerate(PARAMETERS)}


def parameter_names(comm_names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of the cost parameters of a file with these communication settings, in order."""
    return PARAMETERS + tuple(f"{name}[{comm}]" for comm in comm_names for name in COMM_PARAMETERS)


def distinct_experts(tokens: Array | float, num_experts: int, experts_per_token: int) -> Array:
    """Expected number of distinct experts that `tokens` tokens touch when routing is uniform.

    ``E * (1 - (1 - k/E)^t)`` (MoESD, arXiv 2505.19645, section 3); exact when each token draws k distinct experts.

    Parameters
    ----------
    tokens : array_like
        Tokens in one pass, any shape, 0 or more.
    num_experts, experts_per_token : int
        E routed experts in all and k of them a token, k <= E.

    Returns
    -------
    numpy.ndarray
        Experts touched, same shape as `tokens`.
    """
    share = experts_per_token / num_experts
    if share >= 1.0:
        return np.full(np.shape(tokens), float(num_experts))
    return np.asarray(-num_experts * np.expm1(np.asarray(tokens, dtype=float) * np.log1p(-share)))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStructure:
    """What of a deployment decides which terms there are; constants, never fitted."""

    comm_names: tuple[str, ...] = ("default",)
    num_experts: int = 0
    experts_per_token: int = 0
    reference_tokens: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPoints:
    """Configurations as arrays that broadcast against each other; sequences and tokens are those of one rank.

    For derivatives all must have the one shape (N,).
    """

    steps: Array
    """Draft passes of one cycle."""
    query_tokens: Array
    """Verified tokens per sequence."""
    sequences: Array
    """Sequences in the batch of one rank, after graph padding."""
    context_ratio: Array
    """Context over the reference context; 1 where none is stated."""
    comm: NDArray[np.intp]
    """Index into `CostStructure.comm_names`."""
    speculating: Array
    """1.0 where the speculation machinery is on."""
    topk: Array
    draft_mode: NDArray[np.intp]
    """0 one CUDA graph a step, 1 one graph a cycle, 2 eager."""
    verify_eager: Array
    """1.0 where the verify pass runs outside a CUDA graph."""
    allreduce_ms: Array
    """All all-reduces of the verify pass by the setting's measured curve; 0 where none is known."""
    padded_tokens: Array
    """Tokens of the verify pass after graph padding."""

    def __len__(self) -> int:
        return int(self.steps.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class CostValues:
    """The parts of the cycle time in ms, shape (N,), and their derivatives, shape (parameters, N)."""

    verify_ms: Array
    draft_ms: Array
    overhead_ms: Array
    d_verify: Array | None = None
    d_draft: Array | None = None
    d_overhead: Array | None = None

    @property
    def cycle_ms(self) -> Array:
        """Draft, verify and overhead together, ms."""
        return self.verify_ms + self.draft_ms + self.overhead_ms


def _sigmoid(x: float) -> float:
    return float(0.5 * (1.0 + np.tanh(0.5 * x)))


def cost(theta: Array, points: CostPoints, structure: CostStructure, derivatives: bool = False) -> CostValues:
    """Verify, draft and overhead time of each point.

    Parameters
    ----------
    theta : numpy.ndarray
        Parameters in the order of `parameter_names`, shape (parameters,).
    points : CostPoints
        N configurations.
    structure : CostStructure
        Constants of the deployment.
    derivatives : bool
        Whether to return derivatives by `theta` too.

    Returns
    -------
    CostValues
        Times in ms; derivatives in ms per unit of the (logarithmic) parameter.
    """
    p = {name: float(theta[i]) for name, i in _INDEX.items()}
    n_comm = len(structure.comm_names)
    per_comm = np.asarray(theta[len(PARAMETERS) :]).reshape(n_comm, len(COMM_PARAMETERS))
    n, b, on = points.padded_tokens, points.sequences, points.speculating
    multi = points.query_tokens > 1

    pass_ms = float(np.exp(p["log_pass_ms"]))
    moe = structure.num_experts > 0
    rho = _sigmoid(p["logit_expert_share"]) if moe else 0.0
    tax = np.exp(p["tax"] * on)
    dense = (1.0 - rho) * tax
    touched, d_touched_overlap = _experts(p["logit_overlap"], points, structure)
    weights = dense + rho * touched
    knee = n * np.exp(-p["log_knee_tokens"])
    weights4, knee4 = np.square(np.square(weights)), np.square(np.square(knee))
    roof = np.sqrt(np.sqrt(weights4 + knee4))
    tokens = np.exp(p["log_token"]) * (n - 1.0)
    kv = np.exp(p["log_kv"]) * b * points.context_ratio * np.exp(p["kv_multi"] * multi)
    comm_base = np.exp(per_comm[:, 0])[points.comm]
    comm_token = np.exp(per_comm[:, 1])[points.comm] * (n - 1.0)
    offset_ms = pass_ms * per_comm[:, 2][points.comm]
    eager = np.exp(p["verify_eager"] * points.verify_eager)
    scaled = pass_ms * eager
    computed_ms = scaled * (roof + tokens + kv + comm_base + comm_token)
    # An offset may be negative (a setting cheaper than its curve says) but may not eat the pass.
    held = computed_ms + points.allreduce_ms + offset_ms < 0.05 * computed_ms
    verify_ms = np.where(held, 0.05 * computed_ms, computed_ms + points.allreduce_ms + offset_ms)

    drafting = points.steps > 0
    mode = np.array([0.0, p["draft_graph_cycle"], p["draft_eager"]])[points.draft_mode]
    draft_scale = pass_ms * np.exp(mode + per_comm[:, 3][points.comm]) * drafting
    base, step = np.exp(p["log_draft_base"]), np.exp(p["log_draft_step"])
    sequence = np.exp(p["log_draft_sequence"]) * (b - 1.0)
    width = np.exp(p["log_draft_width"]) * b * (points.topk - 1.0)
    draft_kv = np.exp(p["log_draft_kv"]) * b * points.context_ratio
    draft_ms = draft_scale * (base + step * points.steps * (1.0 + sequence + width + draft_kv))

    tree_on = points.topk > 1
    overhead_ms = pass_ms * (np.exp(p["log_overhead"]) * on + np.exp(p["log_tree"]) * tree_on)
    if not derivatives:
        return CostValues(verify_ms=verify_ms, draft_ms=draft_ms, overhead_ms=overhead_ms)

    size = (len(theta), len(points))
    d_verify, d_draft, d_overhead = np.zeros(size), np.zeros(size), np.zeros(size)
    d_roof = scaled * weights4 / np.maximum(weights, 1e-300) * roof**-3  # by `weights`
    i = _INDEX
    d_verify[i["log_pass_ms"]] = computed_ms + offset_ms * ~held
    d_verify[i["tax"]] = d_roof * dense * on
    if moe:
        d_verify[i["logit_expert_share"]] = d_roof * rho * (1.0 - rho) * (touched - tax)
        d_verify[i["logit_overlap"]] = d_roof * rho * d_touched_overlap
    d_verify[i["log_token"]] = scaled * tokens
    d_verify[i["log_knee_tokens"]] = -scaled * knee4 * roof**-3
    d_verify[i["log_kv"]] = scaled * kv
    d_verify[i["kv_multi"]] = scaled * kv * multi
    d_verify[i["verify_eager"]] = computed_ms * points.verify_eager
    d_draft[i["log_pass_ms"]] = draft_ms
    d_draft[i["log_draft_base"]] = draft_scale * base
    d_draft[i["log_draft_step"]] = draft_ms - draft_scale * base
    d_draft[i["log_draft_sequence"]] = draft_scale * step * points.steps * sequence
    d_draft[i["log_draft_width"]] = draft_scale * step * points.steps * width
    d_draft[i["log_draft_kv"]] = draft_scale * step * points.steps * draft_kv
    d_draft[i["draft_graph_cycle"]] = draft_ms * (points.draft_mode == 1)
    d_draft[i["draft_eager"]] = draft_ms * (points.draft_mode == 2)
    d_overhead[i["log_pass_ms"]] = overhead_ms
    d_overhead[i["log_overhead"]] = pass_ms * np.exp(p["log_overhead"]) * on
    d_overhead[i["log_tree"]] = pass_ms * np.exp(p["log_tree"]) * tree_on
    for c in range(n_comm):
        here = points.comm == c
        row = len(PARAMETERS) + c * len(COMM_PARAMETERS)
        d_verify[row] = scaled * comm_base * here
        d_verify[row + 1] = scaled * comm_token * here
        d_verify[row + 2] = pass_ms * (here & ~held)
        d_draft[row + 3] = draft_ms * here
    d_verify[:, held] *= 0.05
    return CostValues(
        verify_ms=verify_ms,
        draft_ms=draft_ms,
        overhead_ms=overhead_ms,
        d_verify=d_verify,
        d_draft=d_draft,
        d_overhead=d_overhead,
    )


def verify_terms(theta: Array, points: CostPoints, structure: CostStructure) -> dict[str, Array]:
    """Return the terms of the verify pass in ms, by name; they sum to `CostValues.verify_ms`.

    `allreduce` holds the offset of its setting (and the floor under both), `eager` what running outside a CUDA graph
    adds to the others. Other arguments as those of `cost`.

    Parameters
    ----------
    theta : numpy.ndarray
        Parameters, shape (parameters,); or (draws, parameters), which makes the terms (draws, N).
    """
    p = _columns(theta)
    per_comm = _comm_columns(theta, structure)[..., points.comm]
    rho = 0.5 * (1.0 + np.tanh(0.5 * p["logit_expert_share"])) if structure.num_experts > 0 else 0.0
    pass_ms = np.exp(p["log_pass_ms"])
    dense = (1.0 - rho) * np.exp(p["tax"] * points.speculating)
    experts = rho * _experts(p["logit_overlap"], points, structure)[0]
    knee = points.padded_tokens * np.exp(-p["log_knee_tokens"])
    roof = ((dense + experts) ** 4 + knee**4) ** 0.25
    multi = points.query_tokens > 1
    kv = np.exp(p["log_kv"]) * points.sequences * points.context_ratio * np.exp(p["kv_multi"] * multi)
    by_share = np.exp(per_comm[0]) + np.exp(per_comm[1]) * (points.padded_tokens - 1.0)
    terms = {
        "fixed_pass": pass_ms * dense,
        "verified_tokens": pass_ms * np.exp(p["log_token"]) * (points.padded_tokens - 1.0),
        "experts": pass_ms * experts,
        "attention_kv": pass_ms * kv,
        "compute_knee": pass_ms * (roof - dense - experts),
    }
    eager = np.exp(p["verify_eager"] * points.verify_eager)
    inside = sum(terms.values()) + pass_ms * by_share
    computed = inside * eager
    # The floor of `cost`: an offset may not eat the pass.
    total = np.maximum(computed + points.allreduce_ms + pass_ms * per_comm[2], 0.05 * computed)
    terms["eager"] = computed - inside
    terms["allreduce"] = total - computed + pass_ms * by_share
    shape = np.broadcast_shapes(*(np.shape(value) for value in terms.values()), points.padded_tokens.shape)
    return {name: np.broadcast_to(value, shape) for name, value in terms.items()}


def draft_terms(theta: Array, points: CostPoints, structure: CostStructure) -> dict[str, Array]:
    """Return what drafting takes once a cycle, and what it takes by step, ms: they sum to `CostValues.draft_ms`.

    Arguments as those of `verify_terms`.
    """
    p = _columns(theta)
    mode = np.stack([np.zeros_like(p["draft_eager"]), p["draft_graph_cycle"], p["draft_eager"]])
    by_mode = mode[..., 0][points.draft_mode] if theta.ndim == 1 else mode[points.draft_mode, :, 0].T
    scale = np.exp(p["log_pass_ms"] + by_mode + _comm_columns(theta, structure)[..., points.comm][3])
    scale = scale * (points.steps > 0)
    b = points.sequences
    per_step = (
        1.0
        + np.exp(p["log_draft_sequence"]) * (b - 1.0)
        + np.exp(p["log_draft_width"]) * b * (points.topk - 1.0)
        + np.exp(p["log_draft_kv"]) * b * points.context_ratio
    )
    return {
        "draft_base": scale * np.exp(p["log_draft_base"]),
        "draft_steps": scale * np.exp(p["log_draft_step"]) * points.steps * per_step,
    }


def _columns(theta: Array) -> dict[str, Array]:
    """Each parameter by name, with a last axis of one that stands for the points."""
    return {name: theta[..., i, None] for name, i in _INDEX.items()}


def _comm_columns(theta: Array, structure: CostStructure) -> Array:
    """The parameters of the settings, shape (COMM_PARAMETERS, ..., settings)."""
    shape = (*theta.shape[:-1], len(structure.comm_names), len(COMM_PARAMETERS))
    last = len(PARAMETERS) + shape[-2] * shape[-1]
    return np.moveaxis(theta[..., len(PARAMETERS) : last].reshape(shape), -1, 0)


def _experts(logit_overlap: Array | float, points: CostPoints, structure: CostStructure) -> tuple[Array, Array]:
    """Experts touched over those of the reference pass, and the derivative by the logit of the overlap.

    The tokens of one sequence share experts more often than chance says: each after the first counts as
    ``1 - overlap`` of a token (the one-parameter form of theory on adjacent-token overlap).
    """
    if structure.num_experts == 0:
        zero = np.zeros(())
        return zero, zero
    E, k = structure.num_experts, structure.experts_per_token
    overlap = 0.5 * (1.0 + np.tanh(0.5 * logit_overlap))
    sequences = points.padded_tokens / points.query_tokens
    extra = sequences * (points.query_tokens - 1.0)
    t = sequences + extra * (1.0 - overlap)
    reference = float(distinct_experts(structure.reference_tokens, E, k))
    touched = distinct_experts(t, E, k) / reference
    rate = np.log1p(-k / E) if k < E else -np.inf
    d_touched_t = np.zeros(()) if k >= E else -E * rate * np.exp(t * rate) / reference
    return touched, -d_touched_t * extra * overlap * (1.0 - overlap)
