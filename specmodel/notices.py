"""What no interval says about the numbers: steps in kernels, cutoffs that are crossed, contradictions."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from specmodel.allreduce import cutoffs
from specmodel.calibration import Calibration, VerifyRow
from specmodel.contradictions import contradictions_of
from specmodel.deployment import Deployment
from specmodel.speeds import Noise, spread, stated_speed

__all__ = ["acceptance_notices", "contradiction_notices", "cutoff_notices", "step_notices", "unit_notices"]

STEP = 0.05
"""Least relative change from one token count to the next larger one that is called a step."""
PLAUSIBLE_MS = (0.05, 100_000.0)
"""Times of one pass that systems are known to need, from the smallest models to the slowest offloading, with room."""
DIFFERENCE = 0.08
"""Least relative difference of two acceptance lengths that should be equal that is called a contradiction."""


def acceptance_notices(cal: Calibration) -> tuple[str, ...]:
    """Acceptance lengths of one workload and draft shape that differ by batch or communication setting.

    What is accepted depends on the two models and the text, not on the batch, the width or the clocks: where a file
    says otherwise, the engine, the sampling or the prompts changed with them.
    """
    seen: dict[tuple[str, int, int, int], list[tuple[float, str]]] = {}
    for row in cal.measurements.cycles:
        if row.num_steps and row.acceptance_length is not None:
            shape = (row.workload, row.num_steps, row.topk, row.verify_tokens)
            seen.setdefault(shape, []).append((row.acceptance_length, f"batch {row.batch:g}, comm {row.comm}"))
    out = []
    for (workload, steps, topk, tokens), values in seen.items():
        (low, where_low), (high, where_high) = min(values), max(values)
        if high / low - 1.0 > DIFFERENCE and where_low != where_high:
            shape_text = f"{steps} steps" if topk == 1 else f"tree {steps}x{topk}x{tokens}"
            out.append(
                f"acceptance of workload {workload} at {shape_text} is {low:g} ({where_low}) but {high:g} "
                f"({where_high}): it should depend on neither; the two runs differ in something else"
            )
    return tuple(out)


def contradiction_notices(cal: Calibration) -> tuple[str, ...]:
    """What does not fit together in the rows of a file, with the rows: as `diagnose` says it."""
    return tuple(f"{found.message} ({found.where})" for found in contradictions_of(cal))


def unit_notices(cal: Calibration) -> tuple[str, ...]:
    """Times that are probably in another unit: no system has such passes, or the tables and the cycles do not agree."""
    noise = Noise()
    cycles = []
    for row in cal.measurements.cycles:
        stated = stated_speed(row, noise)
        if stated is not None:
            form, value, _ = stated
            length = (row.acceptance_length or float(np.sqrt(row.num_steps + 1.0))) if row.num_steps else 1.0
            cycles.append(1000.0 * row.batch * length / value if form == "tok_s" else value)
    small = [row for row in cal.measurements.verify if row.tokens <= 64]
    passes = [got[0] for row in small if (got := spread(row.time_ms, row.range_ms, None, None, 0.0, 0.0)) is not None]
    out = []
    units = "times are milliseconds and speeds tokens per second of the whole batch; check the unit"
    for what, times in (("a cycle", cycles), ("a verify pass", passes)):
        middle = float(np.median(times)) if times else 10.0
        if not PLAUSIBLE_MS[0] <= middle <= PLAUSIBLE_MS[1]:
            out.append(f"{what} takes {middle:.3g} ms here, which no system is known to need: {units}")
    if cycles and passes:
        ratio = float(np.median(passes) / np.median(cycles))
        if not 0.01 < ratio < 100.0:
            factor = f"{ratio:,.0f} times" if ratio > 1.0 else f"1/{1.0 / ratio:,.0f} of"
            out.append(f"verify passes alone take {factor} what whole cycles do: {units}")
    return tuple(out)


def step_notices(cal: Calibration, tokens: float, sequences: float, comm: str) -> tuple[str, ...]:
    """Steps of the measured verify passes around a pass of `tokens` tokens, and gaps that may hide one.

    Parameters
    ----------
    tokens, sequences : float
        Of the pass in question, of one rank.
    comm : str
        Its communication setting.
    """
    table = _table(row for row in cal.measurements.verify if row.comm == comm and row.batch == sequences)
    sizes = sorted(table)
    out = []
    for left, right in pairwise(sizes):
        change = table[right][0] / table[left][0] - 1.0
        noise = 3.0 * float(np.hypot(table[left][1], table[right][1]))
        if left > 2.0 * tokens or right < 0.5 * tokens:
            continue
        if change < -max(0.01, noise):
            out.append(f"{right:g} tokens cost {-change:.0%} less than {left:g}: measured, kept")
        elif change > max(STEP, noise) and right - left <= 1.0 and left > 1.0:
            out.append(f"{right:g} tokens cost {change:.0%} more than {left:g}: a step, measured, kept")
        if left < tokens < right:
            text = f"{left + 1:g}" if right - left <= 2.0 else f"{left + 1:g} to {right - 1:g}"
            out.append(f"verify passes of {text} tokens were not measured under {comm}: the interval is wider there")
    return tuple(out)


def _table(rows: Iterable[VerifyRow]) -> dict[float, tuple[float, float]]:
    """Time and relative standard deviation by tokens; of repeated rows the first."""
    noise = Noise()
    table: dict[float, tuple[float, float]] = {}
    for row in rows:
        got = spread(row.time_ms, row.range_ms, row.sd_ms, row.samples, noise.verify, noise.verify_floor)
        if got is not None:
            table.setdefault(float(row.tokens), got)
    return table


def cutoff_notices(dep: Deployment, plain_tokens: float, tokens: float, comm: str) -> tuple[str, ...]:
    """Protocol cutoffs of the all-reduce curve that verifying `tokens` instead of `plain_tokens` crosses."""
    index = dep.structure.comm_names.index(comm)
    curve = dep.curves[index]
    if curve is None or not dep.own_curve[index]:
        return ()
    small, large = plain_tokens * dep.message_bytes_per_token, tokens * dep.message_bytes_per_token
    out = []
    for size_bytes, jump in cutoffs(curve):
        if small <= size_bytes < large:
            word = "slower" if jump > 0 else "faster"
            out.append(
                f"verifying {tokens:g} tokens sends {large / 1024:.0f} KiB an all-reduce, past a cutoff of {comm} at "
                f"{size_bytes / 1024:.0f} KiB where it becomes {abs(jump):.0%} {word}"
            )
    return tuple(out)
