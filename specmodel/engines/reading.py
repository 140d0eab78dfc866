"""What one source states, and how many samples stand behind a number.

A `Reading` is filled by a reader and emptied by `merge`: rows in the words of the calibration file, facts of the
system, and what was used, dropped and left open. Its rows are plain mappings; the file layer validates them.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "CUSTOM_ALLREDUCE",
    "NCCL_ALLREDUCE",
    "REPEAT_SD",
    "Given",
    "Lengths",
    "Reading",
    "Samples",
    "Shape",
    "Summary",
    "lengths_sd",
    "mapping",
    "mean_of",
    "rounded",
    "sequence",
    "summarise",
]

REPEAT_SD = 0.003
"""Relative sd between two runs of the same thing: loops of captured graphs repeat within 0.03 to 0.6 %."""
LONE_SD = 0.01
"""Relative sd of one sample where nothing else tells."""
DESIGN_EFFECT = 2.0
"""Variance of pooled acceptance over that of independent rounds: rounds of one request resemble each other."""
NCCL_ALLREDUCE = "NCCL: the custom all-reduce is disabled"
CUSTOM_ALLREDUCE = (
    "the engine's custom one where the links allow it: NCCL settings matter only for messages above its limit"
)
PRIOR_WEIGHT = 4.0
MOST_STEPS = 512
"""Longest chain that a source is believed to have drafted."""
MAX_SAMPLES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A draft shape: a chain of num_steps drafts, or a tree."""

    num_steps: int
    topk: int = 1
    num_draft_tokens: int | None = None

    @property
    def verify_tokens(self) -> int:
        """Tokens that the target verifies per sequence, the root included."""
        return self.num_steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens

    def row(self) -> dict[str, Any]:
        """Return the keys of a row; a chain needs num_steps only."""
        if self.topk == 1:
            return {"num_steps": self.num_steps}
        return {"num_steps": self.num_steps, "topk": self.topk, "num_draft_tokens": self.verify_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What the user states because the sources do not."""

    shape: Shape | None = None
    batch: float | None = None
    context_tokens: int | None = None
    workload: str | None = None
    comm: str | None = None
    gpu: str | None = None


@dataclass(slots=True, kw_only=True)
class Reading:
    """What one source states.

    Attributes
    ----------
    shape : Shape or None
        The draft shape that the source was made with, for sources that do not state it themselves.
    spans : list of dict
        Verify and draft times whose tokens or steps the source does not state: ``part`` (verify or draft) and the time
        columns of a row.
    shapeless : list of dict
        Rows of ``cycles`` and ``acceptance`` whose draft shape the source does not state; ``table`` names which.
    settings_known : bool
        Whether `env` and `flags` are all there is: the source would have shown more.
    pinned : bool or None
        Whether acceptance was set for benchmarking; None where the source would not tell.
    used, dropped : Counter
        Records by what they were, and by why they were left out.
    questions : list of str
        What only the user can answer; the numbers that depend on it are left out.
    """

    source: str
    kind: str
    system: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    settings_known: bool = False
    pinned: bool | None = None
    date: str | None = None
    shape: Shape | None = None
    verify: list[dict[str, Any]] = field(default_factory=list)
    draft: list[dict[str, Any]] = field(default_factory=list)
    allreduce: list[dict[str, Any]] = field(default_factory=list)
    prefill: list[dict[str, Any]] = field(default_factory=list)
    cycles: list[dict[str, Any]] = field(default_factory=list)
    acceptance: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    shapeless: list[dict[str, Any]] = field(default_factory=list)
    used: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    caveats: list[str] = field(default_factory=list)
    questions: list[str] = field(default_factory=list)

    def saw(self, about: str, value: Any, where: str, ranks: int | None = None, note: str | None = None) -> None:
        """Add a row of evidence, seen at `where` in the source."""
        row = {"about": about, "value": value, "ranks": ranks, "source": f"{self.source}: {where}", "note": note}
        self.evidence.append({key: item for key, item in row.items() if item not in (None, "")})

    def empty(self) -> bool:
        """Whether the source stated nothing that a calibration holds."""
        rows = (self.verify, self.draft, self.allreduce, self.prefill, self.cycles, self.acceptance, self.evidence)
        return not any(rows) and not self.spans and not self.shapeless


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A value with the spread of one sample and the number of independent samples that it is worth."""

    value: float
    sd: float
    samples: int
    count: int
    """Samples that went into it."""
    outliers: int = 0

    def row(self, key: str) -> dict[str, Any]:
        """Return three columns of a row: the value under `key` (time_ms, cycle_ms, ...), its spread, its samples."""
        spread = "sd_ms" if key == "time_ms" else f"sd_{key}"
        value = rounded(self.value)
        return {key: value, spread: rounded(self.sd, 3), "samples": self.samples}


class Samples:
    """Numbers seen one by one; beyond a million of them every second one is kept, over the whole."""

    __slots__ = ("_stride", "first_line", "last_line", "seen", "values")

    def __init__(self) -> None:
        self.values = array("d")
        self.first_line = self.last_line = self.seen = 0
        self._stride = 1

    def add(self, value: float, line: int = 0) -> None:
        """Add one, seen on `line`."""
        if not self.seen:
            self.first_line = line
        self.seen += 1
        self.last_line = line
        if self.seen % self._stride:
            return
        self.values.append(value)
        if len(self.values) > MAX_SAMPLES:
            self.values = self.values[::2]
            self._stride *= 2


@dataclass(slots=True)
class Lengths:
    """A weighted mean of acceptance lengths seen one by one, with the scatter between them."""

    weight: float = 0.0
    first: float = 0.0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    count: int = 0

    def add(self, length: float, weight: float, count: int = 1) -> None:
        """Add a length that `weight` rounds stand behind, seen `count` times."""
        self.weight += count * weight
        self.first += count * weight * length
        w2 = count * weight * weight
        a, b, c = self.squares
        self.squares = (a + w2, b + w2 * length, c + w2 * length * length)
        self.count += count

    def row(self, shape: Shape, per_weight: float = 1.0) -> dict[str, Any]:
        """Return the columns of an acceptance entry; a unit of weight is `per_weight` rounds."""
        mean, (a, b, c) = self.first / self.weight, self.squares
        scatter = 0.0
        if self.count > 2:
            variance = max(c - 2 * mean * b + mean * mean * a, 0.0) * self.count / (self.count - 1)
            scatter = math.sqrt(variance) / self.weight
        drafts = max(round(self.weight * per_weight), 1)
        sd = lengths_sd(mean, shape.num_steps, drafts, scatter)
        return shape.row() | {"acceptance_length": rounded(mean), "sd": rounded(sd, 3), "drafts": drafts}


def pooled_sd(groups: Iterable[Sequence[float]], band: float | None = None) -> float:
    """Return the relative spread of one sample within groups, pooled; `LONE_SD` where too few repeat."""
    import numpy as np

    squares = freedom = 0.0
    for values in groups:
        kept = _near(np.asarray(values, dtype=float), band)
        if len(kept) > 1:
            squares += (len(kept) - 1) * (_spread(kept) / float(np.median(kept))) ** 2
            freedom += len(kept) - 1
    return max(math.sqrt(squares / freedom), 0.001) if freedom >= 4 else LONE_SD


def summarise(
    values: Sequence[float],
    *,
    quantile: float = 0.5,
    band: float | None = None,
    prior_sd: float = LONE_SD,
    method_sd: float = REPEAT_SD,
) -> Summary:
    """Summarise repeated measurements by a quantile, its spread, and how many independent samples it is worth.

    Parameters
    ----------
    values : sequence of float
        At least one, all above 0.
    quantile : float
        0.5, or lower where waiting only ever adds.
    band : float, optional
        Drop what is more than this factor away from the median: idle time, another batch.
    prior_sd : float
        Relative spread of one sample as known from elsewhere; weighs as much as four samples.
    method_sd : float
        Relative error that all samples share: the next run, or what the engine's clock does not see.

    Returns
    -------
    Summary
        The standard error of a sample quantile of a normal distribution, sqrt(q (1 - q) / n) / density, widened by
        `method_sd`; ``samples`` is chosen so that sd / sqrt(samples) is that error.
    """
    import numpy as np

    data = np.asarray(values, dtype=float)
    kept = _near(data, band)
    value, count = float(np.quantile(kept, quantile)), len(kept)
    own = _spread(kept) if count > 1 else 0.0
    sd = math.sqrt(((count - 1) * own**2 + PRIOR_WEIGHT * (prior_sd * value) ** 2) / (count - 1 + PRIOR_WEIGHT))
    # sqrt(q (1 - q)) / density of the standard normal at its quantile: 1.2533 at the median, 1.43 at a fifth.
    factor = math.sqrt(quantile * (1 - quantile)) / _density_at(quantile) if count > 2 else 1.0
    error = math.hypot(factor * sd / math.sqrt(count), method_sd * value)
    samples = max(1, math.floor((sd / error) ** 2))
    return Summary(value=value, sd=error * math.sqrt(samples), samples=samples, count=count, outliers=len(data) - count)


def _near(data: NDArray[np.float64], band: float | None) -> NDArray[np.float64]:
    import numpy as np

    if band is None:
        return data
    middle = float(np.sort(data)[(len(data) - 1) // 2])  # the lower one of two: idle time only ever adds
    return data[(data <= middle * band) & (data >= middle / band)]


def _spread(data: NDArray[np.float64]) -> float:
    """Return the standard deviation; from five samples on by the median deviation, which strays do not move."""
    import numpy as np

    if len(data) < 5:
        return float(np.std(data, ddof=1))
    return 1.4826 * float(np.median(np.abs(data - np.median(data))))


def _density_at(quantile: float) -> float:
    from statistics import NormalDist

    normal = NormalDist()
    return normal.pdf(normal.inv_cdf(quantile))


def number(mapping: Any, *keys: str, low: float = 0.0, high: float = 1e12) -> float | None:
    """Return the first of the keys that holds a number above `low` and below `high`."""
    for key in keys:
        value = mapping.get(key) if isinstance(mapping, dict) else None
        if isinstance(value, int | float) and not isinstance(value, bool) and low < value < high:
            return float(value)
    return None


def whole(mapping: Any, *keys: str, low: int = 1, high: int = 10**9) -> int | None:
    """Return the first of the keys that holds a whole number from `low` to `high`."""
    value = number(mapping, *keys, low=low - 0.5, high=high + 0.5)
    return int(value) if value is not None and value.is_integer() else None


def mapping(document: Any, key: str) -> dict[str, Any]:
    """Return the mapping under a key; an empty one where there is none."""
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, dict) else {}


def sequence(document: Any, key: str) -> list[Any]:
    """Return the list under a key; an empty one where there is none."""
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, list) else []


def mean_of(pairs: Iterable[tuple[float, float]]) -> float | None:
    """Return the weighted mean of (value, weight); None where there is no weight."""
    total = weight_sum = 0.0
    for value, weight in pairs:
        total += value * weight
        weight_sum += weight
    return total / weight_sum if weight_sum > 0 else None


def lengths_sd(acceptance_length: float, num_steps: int, drafts: float, scatter: float = 0.0) -> float:
    """Estimate the standard deviation of a pooled acceptance length.

    Parameters
    ----------
    acceptance_length : float
        The pooled mean, bonus included.
    num_steps : int
        The longest possible chain or depth.
    drafts : float
        Rounds (of one request each) that were pooled.
    scatter : float
        The standard error that the scatter between lines or requests shows.

    Returns
    -------
    float
        The larger of `scatter` and the error of independent rounds, whose accepted lengths are geometric and cut at
        num_steps, times sqrt(DESIGN_EFFECT).
    """
    num_steps = min(num_steps, MOST_STEPS)  # beyond that nothing is left to accept, and damaged numbers have no end
    drafted = min(max(acceptance_length - 1, 0.0), float(num_steps))
    low, high = 0.0, 1.0
    for _ in range(60):  # one acceptance rate a with a + a^2 + ... + a^K equal to the mean of accepted drafts
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(1, num_steps + 1)) < drafted else (low, middle)
    second = sum((2 * k - 1) * low**k for k in range(1, num_steps + 1))
    variance = max(second - drafted**2, 0.05 * max(num_steps, 1))
    return max(scatter, math.sqrt(DESIGN_EFFECT * variance / max(drafts, 1.0)))


def add_length(reading: Reading, shape: Shape, length: float, note: str, drafts: float | None = None) -> None:
    """Add an acceptance length whose rounds may be unknown; then as uncertain as a thousand rounds are."""
    if not 1 <= length <= shape.num_steps + 1.005:
        reading.dropped["acceptance length impossible for its steps"] += 1
        return
    sd = lengths_sd(length, shape.num_steps, drafts or 1000)
    entry = shape.row() | {"acceptance_length": rounded(length, 7), "sd": rounded(sd, 3), "note": note}
    if drafts:
        entry["drafts"] = round(drafts)
    reading.acceptance.append(entry)


def rounded(value: float, digits: int = 6) -> float:
    """Round the value to `digits` significant digits, which is more than any source prints."""
    return float(f"{value:.{digits}g}")
