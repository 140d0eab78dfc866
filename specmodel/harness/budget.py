"""How long a plan takes, and what is given up when it must take less.

Only effort is traded, never points: how many samples a point gets, how often the whole sweep is repeated, and whether
whole cycles are repeated with it. What was given up is said.
"""

from __future__ import annotations

import dataclasses
import math

from specmodel.errors import UsageError
from specmodel.harness.plan import Effort, Plan, Point, Request, build_points, check_memory
from specmodel.harness.roofline import Gpu

__all__ = ["efforts", "make_plan", "pass_ms", "point_ms", "total_ms"]

TOTAL_MIN_SAMPLES = 30  # of one point, over all repeats
TOTAL_MIN_MS = 500.0
_START_MS = 4_000.0  # of a process: context, reference problems, a second of steady load
_NCCL_START_MS = 4_000.0
_POINT_SETUP_MS = 130.0  # capture, check, warm-up, and waiting out the heat of the point before
_TUNING_MS = 250.0  # choice of the matrix products' algorithms, once for each number of rows
_HEAVY_TOKENS = 256  # with so many rows half of the time goes into pauses, so that the power limit lowers no clock
_FILL_BYTES_PER_MS = 4e8  # random weights
_SAMPLE_OVERHEAD_MS = 0.1
_ALLREDUCES_A_SAMPLE = 32


def point_ms(point: Point, effort: Effort, cycles: int) -> float:
    """Estimate the time of one point in one pass, its preparation included."""
    rows = point.fields.get("tokens") or point.fields.get("batch", 1) * (point.fields.get("num_steps", 0) + 1)
    pauses = 1.0 + min(1.0, rows / _HEAVY_TOKENS) if point.kind in ("verify", "cycle") else 1.0
    if point.kind == "cycle":
        return _POINT_SETUP_MS + 1.05 * pauses * cycles * point.estimate_ms
    operations = _ALLREDUCES_A_SAMPLE if point.kind == "allreduce" else 1
    sample_ms = operations * point.estimate_ms
    samples = max(effort.min_samples, math.ceil(effort.min_ms / sample_ms))
    series = 2 if point.kind == "verify" else 1  # by GPU events and by the host's clock, in turn
    return _POINT_SETUP_MS + pauses * series * (samples + 3) * (sample_ms + _SAMPLE_OVERHEAD_MS)


def pass_ms(plan: Plan, points: tuple[Point, ...]) -> float:
    """Estimate one pass: the start of its processes, and its points."""
    start = _START_MS + plan.memory_bytes.get("weights", 0.0) / _FILL_BYTES_PER_MS
    if plan.request.world > 1:
        start += _NCCL_START_MS
    return start + sum(point_ms(point, plan.effort, plan.request.cycles) for point in points)


def total_ms(plan: Plan) -> float:
    """Estimate the whole run, without building the binary."""
    request = plan.request
    tuned = {point.fields["tokens"] for point in plan.points if point.kind == "verify"}
    passes = sum(
        pass_ms(plan, plan.points_of(setting, repeat))
        for setting in request.comm
        for repeat in range(plan.effort.repeats)
    )
    probes = len(request.comm) * (_START_MS + _NCCL_START_MS) if request.world > 1 else 0.0
    return passes + probes + _TUNING_MS * len(tuned)


def efforts(request: Request) -> tuple[Effort, ...]:
    """List the efforts to choose from, the fullest first, each with what it gives up."""
    repeats = request.repeats

    def effort(runs: int, cycle_runs: int, share: float, *cut: str, samples: int = TOTAL_MIN_SAMPLES) -> Effort:
        return Effort(
            repeats=runs,
            cycle_repeats=cycle_runs,
            min_samples=max(10, math.ceil(samples / runs)),
            min_ms=share * TOTAL_MIN_MS / runs,
            max_ms=(5_000.0 if share == 1.0 else 1_000.0),
            cut=cut,
        )

    once = "cycles in one repeat only"
    less = "at least 0.15 s instead of 0.5 s of samples a point"
    listed = [effort(repeats, repeats, 1.0)]
    if repeats > 1:
        listed += [effort(repeats, 1, 1.0, once), effort(repeats, 1, 0.3, once, less)]
    if repeats > 2:
        listed.append(effort(2, 1, 0.3, once, less, f"2 instead of {repeats} repeats"))
    single = (f"1 instead of {repeats} repeats: no spread between runs",) if repeats > 1 else ()
    least = (less.replace("0.15", "0.05"), f"at least 12 instead of {TOTAL_MIN_SAMPLES} samples a point")
    return (*listed, effort(1, 1, 0.3, less, *single), effort(1, 1, 0.1, *least, *single, samples=12))


def make_plan(request: Request, gpu: Gpu, *, source_hash: str = "") -> Plan:
    """Make the plan of a request that fits its budget.

    Raises
    ------
    UsageError
        The request cannot be measured, does not fit the memory, or not even its least effort fits the budget.
    """
    points = build_points(request, gpu)
    memory = check_memory(request, gpu)
    plan = Plan(
        request=request,
        points=points,
        effort=efforts(request)[0],
        gpu=gpu,
        estimate_ms=0.0,
        memory_bytes=memory,
        source_hash=source_hash,
    )
    for effort in efforts(request):
        plan = dataclasses.replace(plan, effort=effort)
        plan = dataclasses.replace(plan, estimate_ms=total_ms(plan))
        if request.budget_ms is None or plan.estimate_ms <= request.budget_ms:
            return plan
    least, budget = plan.estimate_ms / 1000, (request.budget_ms or 0.0) / 1000
    raise UsageError(
        f"--budget {budget:.0f}: even one repeat with the fewest samples takes about {least:.0f} s; ask for fewer "
        "--tokens, --batches, --contexts, --steps or settings"
    )
