"""From the samples of several runs of one point to one number with an honest error.

A run is one process. Samples of one run share its placement, clocks and chosen kernels, so that the spread between
runs, not the number of samples, limits what is known.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["PRIMARY", "Pooled", "kept_samples", "median_interval", "pool", "quantile"]

Disposition = Literal[
    "ok", "noisy", "throttled", "skewed", "wrong", "impossible", "not_supported", "timeout", "not_run", "not_measured"
]
PRIMARY = {"verify": "host_ms", "draft": "gpu_ms", "cycle": "cycle_ms", "allreduce": "gpu_ms"}
_USABLE = ("ok", "noisy")
# A point whose runs disagree is judged by the first of these that any run has.
_FATAL = ("wrong", "impossible")
_CLOCKED = ("gpu_ms", "cycle_ms")  # taken together with the clocks
_SLOW_CLOCK = 0.97
_Z95 = 1.959964
_Z90_RANGE = 2.563103  # the standard normal's 90th minus its 10th percentile
HALF_WIDTH = 0.005
HALF_WIDTH_FLOOR_MS = 0.0002


@dataclass(frozen=True, slots=True, kw_only=True)
class Pooled:
    """One point over all of its runs.

    `sd_ms` is of one sample, the difference between runs included; `effective_samples` is how many independent samples
    of that spread know the median as well as these runs do, so that sd_ms / sqrt(effective_samples) is its standard
    error. `between_runs_ms` is the standard deviation of the runs' medians, None for one run.
    """

    disposition: Disposition
    median_ms: float | None = None
    sd_ms: float | None = None
    effective_samples: int | None = None
    samples: int = 0
    runs: int = 0
    half_width_ms: float | None = None
    between_runs_ms: float | None = None


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation between order statistics."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the distribution-free 95 % interval of the median, from order statistics (normal approximation).

    With n samples its ends are the order statistics of ranks n/2 - 1.96 sqrt(n)/2 and 1 + n/2 + 1.96 sqrt(n)/2, rounded
    (Conover, Practical Nonparametric Statistics, section 3.2).
    """
    ordered = sorted(values)
    count = len(ordered)
    reach = _Z95 * math.sqrt(count) / 2
    low = max(0, round(count / 2 - reach) - 1)
    high = min(count - 1, round(count / 2 + reach))
    return ordered[low], ordered[high]


def kept_samples(record: Mapping[str, Any], series: str) -> list[float]:
    """Return one series of a point's record: the slowest rank of each sample, without samples of slow clocks.

    A sample is dropped when the clock of any rank was under 97 % of the point's median clock; a series that was not
    taken together with the clocks is kept whole.
    """
    samples = record.get("samples", {})
    taken = samples.get(series) or []
    if not taken:
        return []
    ranks = taken if isinstance(taken[0], list) else [taken]
    worst = [max(values) for values in zip(*ranks, strict=False)]
    clocks = samples.get("sm_clock_mhz") or []
    slowest = [min(values) for values in zip(*clocks, strict=False)]
    if series not in _CLOCKED or len(slowest) != len(worst):
        return worst
    limit = _SLOW_CLOCK * statistics.median(slowest)
    return [value for value, clock in zip(worst, slowest, strict=True) if clock >= limit]


def pool(records: Sequence[Mapping[str, Any]], series: str | None = None) -> Pooled:
    """Pool the records of one point, one a run.

    Parameters
    ----------
    records
        Its `point` records.
    series
        Which of the samples; that of the point's kind in `PRIMARY` by default.

    Returns
    -------
    Pooled
        The median of the runs' medians. Runs that were throttled, skewed or not finished are left out; a wrong or an
        impossible run makes the whole point so. Where every run was throttled, the samples at the full clock are pooled
        and the point stays `throttled`.
    """
    dispositions = [str(record.get("disposition", "not_run")) for record in records]
    for fatal in _FATAL:
        if fatal in dispositions:
            return Pooled(disposition=fatal)  # type: ignore[arg-type]
    throttled = not set(_USABLE) & set(dispositions)
    wanted = ("throttled",) if throttled else _USABLE
    usable = [record for record, name in zip(records, dispositions, strict=True) if name in wanted]
    runs = [kept_samples(record, series or PRIMARY[str(record["kind"])]) for record in usable]
    runs = [run for run in runs if run]
    if not runs:
        return Pooled(disposition=dispositions[0] if dispositions else "not_measured")  # type: ignore[arg-type]
    medians = [statistics.median(run) for run in runs]
    median_ms = statistics.median(medians)
    within = statistics.fmean(((quantile(run, 0.9) - quantile(run, 0.1)) / _Z90_RANGE) ** 2 for run in runs)
    between_ms = statistics.stdev(medians) if len(medians) > 1 else None
    errors = [(high - low) / (2 * _Z95) for low, high in map(median_interval, runs)]
    standard_error = math.sqrt(statistics.fmean(error**2 for error in errors) / len(runs))
    if between_ms is not None:
        standard_error = max(standard_error, between_ms / math.sqrt(len(runs)))
    total = sum(len(run) for run in runs)
    sd_ms = math.sqrt(within + (between_ms or 0.0) ** 2)
    everything = [sample for run in runs for sample in run]
    low, high = median_interval(everything)
    half_width_ms = (high - low) / 2
    precise = half_width_ms <= max(HALF_WIDTH * median_ms, HALF_WIDTH_FLOOR_MS)
    return Pooled(
        disposition="throttled" if throttled else "ok" if precise else "noisy",
        median_ms=median_ms,
        sd_ms=sd_ms,
        effective_samples=_effective(sd_ms, standard_error, total),
        samples=total,
        runs=len(runs),
        half_width_ms=half_width_ms,
        between_runs_ms=between_ms,
    )


def _effective(sd_ms: float, standard_error: float, total: int) -> int:
    if standard_error <= 0.0 or sd_ms <= 0.0:
        return total
    return max(1, min(total, round((sd_ms / standard_error) ** 2)))
