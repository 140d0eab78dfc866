"""What drafting a length that adapts could bring to a chosen chain: stopped by confidence, or one K a workload."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specmodel.model import FittedModel
from specmodel.optimum import Adaptivity, Candidate
from specmodel.request import Workload

__all__ = ["adaptivity"]

Array = NDArray[np.float64]
MOST_WORKLOADS = 20


def adaptivity(
    model: FittedModel, table: tuple[Candidate, ...], best: int, workload: Workload, context: int | None
) -> Adaptivity | None:
    """Gains over the chosen chain of a length that adapts; None where they are not known.

    They are known for one sequence (in a batch a cycle lasts as long as its longest draft), of a chain whose every
    position has acceptance data for every workload of the mixture, under a drafter that always drafts. Chains that are
    extrapolated, or longer than the acceptance that is known, are not counted on.

    **Stopped by confidence**: the bound is a drafter that stops exactly before its first wrong token, but makes one
    at least: ``sum_j p_j T(max(j, 1))`` for its cycle, p_j the probability that j drafts are accepted. No rule that
    looks at confidences does better.

    **One K a workload**: workloads share time by tokens, so the times per token of their own best K add up.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    table : tuple of Candidate
        All candidates of a call; `best` is the index of the chosen one.
    workload, context
        Of the call.
    """
    chosen = table[best]
    shares, _ = model.mixture(workload)
    names = [model.layout.workloads[i] for i in shares]
    known = min((model.measured.positions.get(name, 0) for name in names), default=0)
    stops_already = any(model.layout.reach_of(i) is not None for i in shares)
    if (
        not model.measured.batches
        or chosen.topk > 1
        or not 0 < chosen.num_steps <= known
        or chosen.extrapolated
        or chosen.batch != 1.0
        or stops_already
    ):
        return None
    chains = [c for c in table if c.topk == 1 and c.comm == chosen.comm and c.num_steps <= known and not c.extrapolated]
    chains = sorted(chains, key=lambda c: c.num_steps)
    if len(names) > MOST_WORKLOADS or len(chains) < 2 or [c.num_steps for c in chains] != list(range(len(chains))):
        return None
    cycle_ms = np.array([c.cycle_ms for c in chains])
    K = np.arange(len(chains))
    lengths = np.array(
        [model.predict(K, 1, chosen.comm, context_tokens=context, workload=name).acceptance_length for name in names]
    )
    share = np.array(list(shares.values()))
    time_ms = cycle_ms / lengths  # of one token, by workload and K
    fixed = share @ time_ms
    own = time_ms.argmin(axis=1)
    at = chosen.num_steps
    gain = float(fixed[at] / (share @ time_ms.min(axis=1)) - 1.0)
    return Adaptivity(
        stopping_gain=max(float(fixed[at] / np.min(_stopped(cycle_ms, lengths, share)[1:]) - 1.0), 0.0),
        workload_gain=gain if len(names) > 1 else None,
        workload_steps=dict(zip(names, own.tolist(), strict=True)),
    )


def _stopped(cycle_ms: Array, lengths: Array, share: Array) -> Array:
    """Time of one token where drafting stops before the first wrong token, by the longest draft that is allowed."""
    survival = np.diff(lengths, axis=1)
    total = np.full(len(cycle_ms), np.inf)
    for longest in range(1, len(cycle_ms)):
        # Accepting exactly j: S_j - S_{j+1}, with S_0 = 1 and nothing beyond the longest.
        alive = np.concatenate([np.ones((len(share), 1)), survival[:, :longest], np.zeros((len(share), 1))], axis=1)
        accepted = -np.diff(alive, axis=1)
        drafted = np.maximum(np.arange(longest + 1), 1)
        total[longest] = float(share @ ((accepted @ cycle_ms[drafted]) / lengths[:, longest]))
    return total
