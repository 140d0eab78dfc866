"""What a reader of a simulation must know before trusting it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmodel.measured import extrapolation
from specmodel.model import FittedModel
from specmodel.simulate.prepare import Prepared
from specmodel.simulate.summary import PolicyResult

__all__ = ["FAR_SHARE", "model_interval", "notices"]

FAR_SHARE = 0.05
"""A policy that spends more of its time too far from what was measured is not recommended."""


def model_interval(model: FittedModel, p: Prepared, result: PolicyResult) -> tuple[float, float] | None:
    """90 % interval of the model's tok/s where a policy spends most of its time, as factors of the mean."""
    if not result.time_at:
        return None
    steps, batch, _ = max(result.time_at, key=lambda at: at[2])
    known = np.isfinite(model.deployment.context_reference)
    middle = float(p.costs.context_low[0] + p.costs.context_step[0] * (p.costs.verify_ms.shape[3] // 2))
    predicted = model.predict(
        steps,
        max(batch, 1),
        str(p.scenario.comm),
        context_tokens=middle if known else None,
        workload=p.scenario.workload,
    )
    low, high = predicted.interval(0.9)
    return float(low / predicted.tok_s), float(high / predicted.tok_s)


def notices(
    model: FittedModel,
    p: Prepared,
    results: Sequence[PolicyResult],
    rows: dict[str, NDArray[Any]],
    whole: bool,
) -> tuple[str, ...]:
    """Warnings of the model about the points that were visited, and of the simulation about itself."""
    out = [*model.warnings, *p.warnings]
    visited = {(k, b) for r in results for k, b, share in r.time_at if share > 1e-3 and r.deployable}
    if visited:
        steps, batch = (np.array(x, dtype=float) for x in zip(*sorted(visited), strict=True))
        out += extrapolation(model.measured, model.deployment, steps, steps + 1.0, batch)[1]
    far = [r for r in results if r.extrapolated_share > FAR_SHARE]
    if far:
        low, high = (pick(r.extrapolated_share for r in far) for pick in (min, max))
        share = f"{low:.0%}" if high - low < 0.01 else f"{low:.0%} to {high:.0%}"
        out.append(f"too far from what was measured {share} of the time: {', '.join(r.policy for r in far)}")
    contexts = model.measured.contexts
    high = float(rows["context_high"].max(initial=0.0))
    low = float(np.min(rows["context_low"], initial=np.inf))
    if contexts and np.isfinite(low) and (high > 1.25 * contexts[-1] or low < 0.5 * contexts[0]):
        known = f"{contexts[0]}" if len(contexts) == 1 else f"{contexts[0]} to {contexts[-1]}"
        out.append(f"contexts of {low:.0f} to {high:.0f} tokens are simulated, {known} measured")
    if p.prefill is not None and len(p.prefill.tokens) == 1:
        out.append(f"one prefill time ({p.prefill.tokens[0]:g} tokens) stands for all: taken in proportion")
    growing = [r.policy for r in results if r.queue_grows]
    if growing:
        out.append(
            f"the queue grows without end under {', '.join(growing)}: more arrives than is served, and waiting times "
            "depend on how long it is simulated"
        )
    if whole and not p.scenario.trace:
        out.append(
            f"{p.requests} requests of {p.arrivals.value:g} clients: all start at once and the batch drains; ask for "
            "more requests to see a steady state"
        )
    if p.scenario.seeds == 1:
        out.append("one seed: no interval")
    elif p.scenario.model_draws and p.scenario.seeds < 8:
        out.append(f"{p.scenario.seeds} draws of the model say little of its uncertainty; use 16 seeds or more")
    return tuple(dict.fromkeys(out))
