"""Speculation under load: continuous batching in time, on the fitted model's costs and acceptance.

Design
------
- A *lane* is one seed of one scenario under one policy, with its own clock. All lanes step together (`rounds`): admit
  what has arrived first come first served up to the batch limit, prefill it in one pass, run one cycle, let go of what
  has ended. State is arrays of shape (lanes, slots); a step is a few dozen array operations whatever their number.
- Times come from a table of the model over steps, batch and context, filled before the loop (`costs`); verify passes
  are padded to captured sizes there, as in `predict`. Between contexts the times are linear. The mean context of a
  batch grows with what its requests emit.
- Acceptance is drawn for every request and round from the curve of the request's class (`classes`): requests differ by
  a Beta distribution at its quadrature nodes and may wander between two states from round to round. Together the
  cycles show the curve that was measured. The first token comes from the prefill; the last cycle is cut at the end of
  the output.
- Random numbers depend on (seed, request, round of the request) and nothing else (`randoms`): a result is the same
  whatever runs beside it or how many workers there are, and policies are compared over the same requests and luck.
- Policies (`policies`): fixed steps, the emitted schedule, SGLang's adaptive rule; and two bounds that know what no
  engine knows, the best steps for every request and the oracle that drafts only what will be accepted.
- Intervals are over the seeds; with `model_draws` every seed has another draw of the model's posterior.
- `sweep` cuts thousands of scenarios into blocks of lanes for a pool of processes or a Dask cluster, writes each
  answer as a line, and goes on where it was interrupted.
"""

from __future__ import annotations

from specmodel.simulate.run import simulate, simulate_all
from specmodel.simulate.scenario import Scenario, TraceRequest, scenario_from, trace_from
from specmodel.simulate.summary import Comparison, Estimate, PolicyResult, Simulation

__all__ = [
    "Comparison",
    "Estimate",
    "PolicyResult",
    "Scenario",
    "Simulation",
    "TraceRequest",
    "scenario_from",
    "simulate",
    "simulate_all",
    "trace_from",
]
