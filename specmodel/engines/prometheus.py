"""The Prometheus text format: one scrape or two, and the difference of two scrapes of one process."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from specmodel.engines.stream import Handler

__all__ = ["Pasted", "Scrape", "difference", "parse"]

MAX_PASTED = 2**17

_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+([-+]?[\w.+-]+)(?:\s+-?\d+(?:\.\d+)?)?\s*(?:#.*)?$")
_UNDERSCORED = re.compile(r"^(sglang|vllm|llamacpp)_")
"""OpenTelemetry and some databases take no colon in a name."""
_LABEL = re.compile(r'([A-Za-z_]\w*)\s*=\s*"((?:[^"\\]|\\.)*)"')

Series = tuple[str, frozenset[tuple[str, str]]]


@dataclass(slots=True)
class Scrape:
    """The series of one scrape; whether their counters are a difference of two."""

    series: dict[Series, float] = field(default_factory=dict)
    differenced: bool = False
    damaged_lines: int = 0

    def each(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of every series of that name, with or without `_total`."""
        names = (name, f"{name}_total")
        return [(dict(labels), value) for (found, labels), value in self.series.items() if found in names]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum the series of that name and those labels over all others; of tensor-parallel ranks the first only."""
        values = self._values(name, labels)
        return sum(values) if values else None

    def mean(self, name: str, **labels: str) -> float | None:
        """Average the series of that name and those labels, as one does with settings and ratios of several ranks."""
        values = self._values(name, labels)
        return sum(values) / len(values) if values else None

    def _values(self, name: str, labels: dict[str, str]) -> list[float]:
        return [
            value
            for found, value in self.each(name)
            if all(found.get(key) == wanted for key, wanted in labels.items()) and found.get("tp_rank", "0") == "0"
        ]

    def positions(self, name: str, label: str) -> list[float]:
        """Return a counter by position, 0 first, summed over all other labels; empty where a position is missing."""
        sums: dict[int, float] = {}
        for found, value in self.each(name):
            position = found.get(label, "")
            if position.isascii() and position.isdigit() and len(position) < 4:
                sums[int(position)] = sums.get(int(position), 0.0) + value
        return [sums[i] for i in range(len(sums))] if sorted(sums) == list(range(len(sums))) else []


def parse(text: str) -> list[Scrape]:
    """Read the scrapes of a text; a series that is stated again begins the next scrape.

    The series named `_created` are times, not counts, and are left out; so are NaN and infinities.
    """
    scrapes = [Scrape()]
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        found = _LINE.match(line.strip())
        if found is None:
            scrapes[-1].damaged_lines += 1
            continue
        name, labels, number = found.groups()
        name = _UNDERSCORED.sub(r"\1:", name)
        if name.endswith("_created"):
            continue
        try:
            value = float(number)
        except ValueError:
            scrapes[-1].damaged_lines += 1
            continue
        key = (name, frozenset(_LABEL.findall(labels or "")))
        if not math.isfinite(value):
            continue
        if key in scrapes[-1].series:
            scrapes.append(Scrape())
        scrapes[-1].series[key] = value
    return [scrape for scrape in scrapes if scrape.series]


class Pasted:
    """Collects the samples of a scrape that was pasted into a log, by how their names begin."""

    def __init__(self, beginning: bytes) -> None:
        self._beginning = beginning
        self._lines: list[str] = []

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor."""
        return {self._beginning: self._sample}

    def _sample(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        # Comments name a series too, and so does a query in an access log.
        if complete and len(self._lines) < MAX_PASTED and not prefix.rstrip().endswith((b"HELP", b"TYPE")):
            sample = text.decode("utf-8", "replace")
            if _LINE.match(sample.strip()):
                self._lines.append(sample)

    def scrapes(self) -> list[Scrape]:
        """Return the scrapes that the samples make."""
        return parse("\n".join(self._lines))


def counts(name: str) -> bool:
    """Whether a series only grows."""
    return name.endswith(("_total", "_count", "_sum", "_bucket"))


def difference(first: Scrape, second: Scrape) -> Scrape | None:
    """Return what was counted between two scrapes of one process, with the gauges of the later one.

    None where they cannot be two scrapes of one process: another start time, other series, or one counter that rose
    while another fell. The order is told by the counters.
    """
    shared = [key for key in first.series if counts(key[0]) and key in second.series]
    if not shared:
        return None
    starts = [{v for (n, _), v in s.series.items() if n == "process_start_time_seconds"} for s in (first, second)]
    if all(starts) and starts[0] != starts[1]:
        return None
    changes = [second.series[key] - first.series[key] for key in shared]
    if all(change <= 0 for change in changes) and any(changes):
        first, second, changes = second, first, [-change for change in changes]
    if any(change < 0 for change in changes) or any(counts(k[0]) and k not in second.series for k in first.series):
        return None
    out = Scrape(differenced=True, damaged_lines=first.damaged_lines + second.damaged_lines)
    for key, value in second.series.items():
        out.series[key] = value - first.series.get(key, 0.0) if counts(key[0]) else value
    return out
