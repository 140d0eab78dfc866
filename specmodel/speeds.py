"""One stated number as a value and a relative standard deviation, and what is assumed where a file states none."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specmodel.calibration import CycleRow

__all__ = ["Noise", "spread", "stated_speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Relative standard deviations of one measurement where the file states none, and the least that is believed."""

    cycle: float = 0.008
    """A tok/s or cycle time from run to run."""
    cycle_floor: float = 0.004
    """What repeats within one run do not show."""
    verify: float = 0.002
    verify_floor: float = 0.001
    draft: float = 0.004
    draft_floor: float = 0.002
    length: float = 0.015
    """Of the accepted tokens, acceptance_length - 1."""
    probability: float = 0.01
    """Of a stated survival or conditional, absolute."""


def spread(
    value: float | None,
    bounds: tuple[float, float] | None,
    sd: float | None,
    samples: int | None,
    default: float,
    floor: float,
) -> tuple[float, float] | None:
    """Value and relative standard deviation of a number given as a value or as the range it was seen to vary in."""
    if bounds is not None:
        low, high = bounds
        # Read as a 90 % range of what was seen.
        return float(np.sqrt(low) * np.sqrt(high)), max(float(np.log(high) - np.log(low)) / 3.29, default)
    if value is None:
        return None
    if sd is None:
        return value, default
    # Beyond a factor of e^20 either way a wider one says no less, and its exponential would have no number.
    return value, min(max(sd / value / np.sqrt(samples or 1), floor), 20.0)


def stated_speed(row: CycleRow, noise: Noise) -> tuple[str, float, float] | None:
    """Which form states the speed, its value (a rate as total tok/s), and its relative sd."""
    for form in ("tok_s", "tpot_ms", "cycle_ms"):
        got = spread(
            getattr(row, form),
            getattr(row, "range_" + form),
            getattr(row, "sd_" + form),
            row.samples,
            noise.cycle,
            noise.cycle_floor,
        )
        if got is not None:
            value, sd = got
            return ("tok_s", 1000.0 * row.batch / value, sd) if form == "tpot_ms" else (form, value, sd)
    return None
