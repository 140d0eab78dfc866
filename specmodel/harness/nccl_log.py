"""What NCCL did, read from its own log (`NCCL_DEBUG=INFO`, subsystems INIT, ENV and TUNING).

Only decisions are taken from the log: versions, the algorithm, protocol and channels of each size, and the values of
known variables. The host name and process ids that begin each line are never kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specmodel.harness.environment import recorded_environment

__all__ = ["NcclChoice", "NcclLog", "parse_nccl_log"]

_ALGORITHMS = ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT")
_PROTOCOLS = ("LL", "LL128", "Simple")
_VERSION = re.compile(r"NCCL version (\d+(?:\.\d+)+)")
_ENV = re.compile(r"(NCCL_[A-Z0-9_]+) set by environment to ([^\s]+?)\.?\s*$")
_CHANNELS = re.compile(r"(\d+) coll channels")
_CHOICE = re.compile(
    r"(?:AllReduce: )?(?P<size>\d+) Bytes -> Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)"
    r"(?:.*?channel\{Lo\.\.Hi\}=\{(?P<low>\d+)\.\.(?P<high>\d+)\})?(?:.*?time (?P<time>[\d.]+))?"
)
_OTHERS = re.compile(r"\b(Broadcast|Reduce|AllGather|ReduceScatter|SendRecv|Send|Recv|AlltoAll|Gather|Scatter):")
_WARNING = re.compile(r"NCCL WARN (.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclChoice:
    """What NCCL chose for one size of all-reduce."""

    algorithm: str
    protocol: str
    channels: int | None = None
    estimate_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclLog:
    """The facts of one log; `choices` by size in bytes."""

    version: str | None
    environment: dict[str, str]
    channels: int | None
    choices: dict[int, NcclChoice]
    warnings: tuple[str, ...]


def _named(value: str, names: tuple[str, ...]) -> str:
    """Return NCCL's own spelling of an algorithm or protocol, from any spelling or the number of older releases."""
    if value.isdigit():
        return names[int(value)] if int(value) < len(names) else value
    return next((name for name in names if name.lower() == value.lower()), value)


def parse_nccl_log(text: str) -> NcclLog:
    """Read the log of one rank, or of several in any order.

    The last decision for a size wins: the decisions of the first calls of a process may be made before all of its
    connections exist. Sizes of other collectives are left out. `time` in a decision is NCCL's own estimate, which it
    prints in microseconds.
    """
    version: str | None = None
    channels: int | None = None
    environment: dict[str, str] = {}
    choices: dict[int, NcclChoice] = {}
    warnings: list[str] = []
    for line in text.splitlines():
        if found := _VERSION.search(line):
            version = found.group(1)
        elif found := _ENV.search(line):
            environment[found.group(1)] = found.group(2)
        elif found := _CHANNELS.search(line):
            channels = int(found.group(1))
        elif found := _WARNING.search(line):
            warnings.append(_without_paths(found.group(1)))
        elif (found := _CHOICE.search(line)) and not _OTHERS.search(line):
            size_bytes = int(found.group("size"))
            low, high, estimate = found.group("low"), found.group("high"), found.group("time")
            earlier = choices.get(size_bytes)
            choices[size_bytes] = NcclChoice(
                algorithm=_named(found.group("algorithm"), _ALGORITHMS),
                protocol=_named(found.group("protocol"), _PROTOCOLS),
                channels=int(high) - int(low) + 1 if low is not None else (earlier.channels if earlier else None),
                estimate_ms=float(estimate) / 1000 if estimate else (earlier.estimate_ms if earlier else None),
            )
    return NcclLog(
        version=version,
        environment=recorded_environment(environment),
        channels=channels,
        choices=choices,
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _without_paths(text: str) -> str:
    """Return a warning without paths, addresses or host names: only its plain words."""
    return re.sub(r"\S*[/@<>\\]\S*|\d+\.\d+\.\d+\.\d+\S*", "…", text).strip()
