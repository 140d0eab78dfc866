"""The requests of every seed: when they arrive, how long they are, how easily their drafts are accepted.

Each property has a random stream of its own, read by quantile: a longer run begins like a shorter one, and what one
option changes leaves the other properties as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmodel.simulate.randoms import request_random
from specmodel.simulate.scenario import Arrivals, Lengths, TraceRequest

__all__ = ["Streams", "streams_of"]

Array = NDArray[np.float64]
_ARRIVAL, _OUTPUT, _PROMPT, _WORKLOAD, _EASE, _STATE, _KEY = range(7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Streams:
    """Requests of several seeds; every array has shape (seeds, requests)."""

    arrival_ms: Array
    """Infinite where the arrival depends on the service: closed clients ask again when they are answered."""
    output_tokens: NDArray[np.int32]
    prompt_tokens: NDArray[np.int32]
    workload: NDArray[np.int64]
    """Index into the workloads of the scenario."""
    ease: Array
    """Quantile of the request's acceptance among those of its workload."""
    state: Array
    """Quantile of the state in which it begins."""
    key: NDArray[np.uint64]


def streams_of(
    seeds: Sequence[int],
    requests: int,
    arrivals: Arrivals,
    output_tokens: Sequence[Lengths],
    prompt_tokens: Sequence[Lengths],
    shares: Sequence[float],
    trace: Sequence[TraceRequest] = (),
    names: Sequence[str] = (),
) -> Streams:
    """Draw the requests of every seed.

    Parameters
    ----------
    seeds : sequence of int
    requests : int
        Of each seed; of a trace its length.
    arrivals : Arrivals
    output_tokens, prompt_tokens : sequence of Lengths
        Of each workload.
    shares : sequence of float
        Of each workload among the requests, summing to 1.
    trace, names : sequence
        The requests of a trace, and the workloads by name; a request without a name draws its workload.
    """
    shape = (len(seeds), requests)

    def quantiles(purpose: int) -> Array:
        return np.stack([request_random(seed, purpose).random(requests) for seed in seeds])

    workload = np.minimum(
        np.searchsorted(np.cumsum(shares), quantiles(_WORKLOAD), side="right"), len(shares) - 1
    ).astype(np.int64)
    if trace:
        arrival = np.broadcast_to([r.arrival_ms for r in trace], shape)
        output = np.broadcast_to(np.array([r.output_tokens for r in trace], dtype=np.int32), shape)
        prompt = np.broadcast_to(np.array([r.prompt_tokens for r in trace], dtype=np.int32), shape)
        named = np.array([-1 if r.workload is None else names.index(r.workload) for r in trace])
        workload = np.where(named >= 0, named, workload)
    else:
        arrival = np.full(shape, np.inf)
        if arrivals.kind == "poisson":
            gaps = -np.log1p(-quantiles(_ARRIVAL)) * (1000.0 / arrivals.value)
            arrival = np.cumsum(gaps, axis=1)
        else:
            arrival[:, : int(arrivals.value)] = 0.0
        by_output, by_prompt = quantiles(_OUTPUT), quantiles(_PROMPT)
        output, prompt = np.zeros(shape, dtype=np.int32), np.zeros(shape, dtype=np.int32)
        for w in range(len(shares)):
            here = workload == w
            output[here] = output_tokens[w].of(by_output[here])
            prompt[here] = prompt_tokens[w].of(by_prompt[here])
    key = np.stack([request_random(seed, _KEY).integers(0, 2**64, size=requests, dtype=np.uint64) for seed in seeds])
    return Streams(
        arrival_ms=np.array(arrival, dtype=float),
        output_tokens=output,
        prompt_tokens=prompt,
        workload=workload,
        ease=quantiles(_EASE),
        state=quantiles(_STATE),
        key=key,
    )
