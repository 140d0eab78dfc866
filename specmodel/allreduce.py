"""All-reduce curves: time by size, their alpha-beta regimes, where a protocol gives way to another, other widths."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = ["AllreduceCurve", "Regime", "cutoffs", "other_width", "regimes"]

Array = NDArray[np.float64]
STEP = 0.10
"""Least relative jump between two regimes that is called a cutoff."""
ROUGHNESS = 0.03
"""Relative scatter of one point that is no sign of another regime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceCurve:
    """Time of one all-reduce by size, measured at increasing sizes."""

    size_bytes: Array
    time_ms: Array

    def at(self, size_bytes: Array) -> Array:
        """Time at any size: log-log between measured sizes, flat below, the last per-byte cost above; ms."""
        x, y = np.log(self.size_bytes), np.log(self.time_ms)
        inside = np.exp(np.interp(np.log(np.maximum(size_bytes, 1.0)), x, y))
        beyond = np.maximum(size_bytes / self.size_bytes[-1], 1.0)
        if len(x) < 2:
            return np.asarray(inside)
        # Bytes cost at most what they cost on average at the largest measured size.
        slope = min(max((y[-1] - y[-2]) / (x[-1] - x[-2]), 0.0), 1.0)
        return np.asarray(inside * beyond**slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Sizes of one straight line ``alpha_ms + size_bytes * beta_ms_per_byte`` (the alpha-beta model, Hockney 1994)."""

    from_bytes: float
    to_bytes: float
    alpha_ms: float
    beta_ms_per_byte: float

    def at(self, size_bytes: float) -> float:
        """Time by this regime's line, ms."""
        return self.alpha_ms + size_bytes * self.beta_ms_per_byte


def _line(size_bytes: Array, time_ms: Array) -> tuple[float, float, float]:
    """Non-negative alpha and beta of least relative error, and its sum of squares."""
    weight = 1.0 / time_ms
    columns = np.stack([weight, size_bytes * weight], axis=1)
    target = np.ones(len(time_ms))
    (alpha, beta), *_ = np.linalg.lstsq(columns, target, rcond=None)
    if alpha < 0.0:
        alpha, beta = 0.0, float(columns[:, 1] @ target / (columns[:, 1] @ columns[:, 1]))
    elif beta < 0.0:
        alpha, beta = float(columns[:, 0] @ target / (columns[:, 0] @ columns[:, 0])), 0.0
    rest = target - columns @ np.array([alpha, beta])
    return float(alpha), float(beta), float(rest @ rest)


def regimes(curve: AllreduceCurve, most: int = 4) -> tuple[Regime, ...]:
    """The fewest straight lines that explain a curve: one a protocol or algorithm.

    Dynamic programme over the break points; a further line must lower the misfit, in units of `ROUGHNESS`, by more
    than a Bayesian information criterion asks for its three numbers (alpha, beta and the break).

    Parameters
    ----------
    curve : AllreduceCurve
        Measured curve.
    most : int
        Largest number of lines.
    """
    x, y = curve.size_bytes, curve.time_ms
    n = len(x)
    if n < 2:
        return (Regime(from_bytes=float(x[0]), to_bytes=float(x[-1]), alpha_ms=float(y[0]), beta_ms_per_byte=0.0),)
    lines = {(i, j): _line(x[i:j], y[i:j]) for i in range(n) for j in range(i + 2, n + 1)}
    misfit = {key: line[2] / ROUGHNESS**2 for key, line in lines.items()}
    # best[m][j]: least misfit of the first j points by m lines, and where the last of them begins.
    best: list[dict[int, tuple[float, int]]] = [{j: (misfit[0, j], 0) for j in range(2, n + 1)}]
    for _ in range(1, most):
        before, here = best[-1], {}
        for j in range(4, n + 1):
            options = [(before[i][0] + misfit[i, j], i) for i in range(2, j - 1) if i in before]
            if options:
                here[j] = min(options)
        best.append(here)
    price = 3.0 * np.log(n)
    count = min((m for m in range(most) if n in best[m]), key=lambda m: best[m][n][0] + m * price)
    breaks, j = [n], n
    for m in range(count, 0, -1):
        j = best[m][j][1]
        breaks.append(j)
    edges = [0, *reversed(breaks)]
    out = []
    for i, j in pairwise(edges):
        alpha, beta, _ = lines[i, j]
        out.append(Regime(from_bytes=float(x[i]), to_bytes=float(x[j - 1]), alpha_ms=alpha, beta_ms_per_byte=beta))
    return tuple(out)


def cutoffs(curve: AllreduceCurve) -> tuple[tuple[float, float], ...]:
    """Where one regime gives way to the next with a step: (largest size before, relative jump of the time).

    A kink without a step is no cutoff: nothing is won or lost by staying on one side of it.
    """
    found = regimes(curve)
    out = []
    for left, right in pairwise(found):
        # The change lies somewhere between two measured sizes; lines that cross there meet in a kink.
        jumps = [right.at(size) / left.at(size) - 1.0 for size in (left.to_bytes, right.from_bytes)]
        jump = 0.0 if jumps[0] * jumps[1] <= 0.0 else min(jumps, key=abs)
        if abs(jump) > STEP:
            out.append((left.to_bytes, jump))
    return tuple(out)


def other_width(curve: AllreduceCurve, num_gpus: int, wanted_gpus: int) -> AllreduceCurve:
    """A ring all-reduce of another number of GPUs by the alpha-beta model.

    A ring takes ``2 (R - 1)`` steps of ``size / R`` bytes: the latency grows as ``R - 1``, the time a byte as
    ``(R - 1) / R`` (Thakur et al. 2005; NCCL's own tuning model has the same form).

    Parameters
    ----------
    curve : AllreduceCurve
        Measured on `num_gpus`.
    num_gpus, wanted_gpus : int
        2 or more.
    """
    latency = (wanted_gpus - 1) / (num_gpus - 1)
    per_byte = latency * num_gpus / wanted_gpus
    time_ms = np.empty(len(curve.time_ms))
    for regime in regimes(curve):
        here = (curve.size_bytes >= regime.from_bytes) & (curve.size_bytes <= regime.to_bytes)
        scaled = regime.alpha_ms * latency + curve.size_bytes[here] * regime.beta_ms_per_byte * per_byte
        # What the line does not say of a point goes with it.
        own = curve.time_ms[here] / (regime.alpha_ms + curve.size_bytes[here] * regime.beta_ms_per_byte)
        time_ms[here] = scaled * own
    return AllreduceCurve(size_bytes=curve.size_bytes, time_ms=time_ms)
