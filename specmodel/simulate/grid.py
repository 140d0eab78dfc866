"""A grid of scenarios: what a sweep file states, one scenario for every combination of its lists."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specmodel.errors import UsageError
from specmodel.model import FittedModel
from specmodel.simulate.scenario import Scenario, arrivals_of, scenario_from

__all__ = ["SCHEMA", "Job", "blocks_of", "jobs_of"]

SCHEMA = "specmodel.sweep/1"
MOST_SCENARIOS = 1_000_000
_MOST_LANES, _MOST_SLOTS, _MOST_REQUESTS = 1024, 1 << 17, 1 << 20
_EXAMPLE = "arrivals: [closed:1, closed:8]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One scenario of a sweep."""

    index: int
    key: str
    """Tells the options, the calibration and the version: a result that is already there is not computed again."""
    options: dict[str, Any]
    scenario: Scenario


def jobs_of(document: Any, model: FittedModel, source: str) -> list[Job]:
    """Return the scenarios of a grid in the order of its lists, the last one running fastest.

    Parameters
    ----------
    document : mapping
        Options of a scenario (`Scenario`; ``policy`` for ``policies``), each a value or a list of values, and
        optionally ``schema``. A list within a list is one value.
    model : FittedModel
    source : str
        What messages call it by.

    Raises
    ------
    UsageError
        For an unknown option or a value that it does not allow; it names the option and the place in its list.
    """
    if not isinstance(document, Mapping) or not document:
        raise UsageError(f"{source}: must map options to a value or a list of values, such as {_EXAMPLE}")
    options = dict(document)
    stated = options.pop("schema", SCHEMA)
    if stated != SCHEMA:
        raise UsageError(f"{source}: schema must be {SCHEMA}, got {stated!r}")
    axes: dict[str, list[Any]] = {}
    for name, value in options.items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        if not values:
            raise UsageError(f"{source}: {name} is an empty list; give at least one value, or delete it")
        for i, item in enumerate(values):
            where = f"{source}: {name}[{i}]" if len(values) > 1 else source
            if isinstance(item, list | tuple) and name not in ("policy", "policies"):
                raise UsageError(f"{where}: must be a value, got a list")
            if isinstance(item, str) and item.strip() == "trace":
                raise UsageError(f"{where}: a trace cannot be swept; simulate it with --arrivals FILE")
            scenario_from({str(name): item}, where)
        axes[str(name)] = values
    count = math.prod(map(len, axes.values()))
    if count > MOST_SCENARIOS:
        raise UsageError(f"{source}: {count} scenarios are more than {MOST_SCENARIOS}; shorten a list")
    from specmodel import __version__

    fingerprint = hashlib.sha256(f"{__version__} {model.calibration!r}".encode()).hexdigest()
    jobs: dict[str, Job] = {}
    for index, combination in enumerate(itertools.product(*axes.values())):
        one = dict(zip(axes, combination, strict=True))
        text = json.dumps(one, sort_keys=True)
        key = hashlib.sha256(f"{fingerprint} {text}".encode()).hexdigest()[:20]
        if key in jobs:
            raise UsageError(f"{source}: scenario {text} is stated twice; delete one of the equal values")
        jobs[key] = Job(index=index, key=key, options=one, scenario=scenario_from(one, source))
    return list(jobs.values())


def blocks_of(jobs: Sequence[Job], model: FittedModel, workers: int) -> list[list[Job]]:
    """Cut the jobs into blocks that are computed at once: alike in size, none too large, enough for every worker."""
    measured = model.measured.batches[-1] if model.measured.batches else 1.0

    def slots(job: Job) -> int:
        arrivals = arrivals_of(job.scenario.arrivals or "closed:8")
        default = arrivals.value if arrivals.kind == "closed" else measured
        return int(job.scenario.max_batch or default)

    def requests(job: Job) -> int:
        return int(job.scenario.requests or max(200, 8 * slots(job)))

    most = max(len(jobs) // (4 * workers), 1)
    blocks: list[list[Job]] = []
    lanes, wide, long = 0, 0, 0
    # Large ones first: what is begun last should be short.
    for job in sorted(jobs, key=lambda j: (-slots(j), -requests(j), j.index)):
        own = job.scenario.seeds * max(len(job.scenario.policies), 7 if not job.scenario.policies else 1)
        wide, long = max(wide, slots(job)), max(long, requests(job))
        lanes += own
        if (
            not blocks
            or len(blocks[-1]) >= most
            or lanes > _MOST_LANES
            or lanes * wide > _MOST_SLOTS
            or (lanes * long > _MOST_REQUESTS)
        ):
            blocks.append([])
            lanes, wide, long = own, slots(job), requests(job)
        blocks[-1].append(job)
    return blocks
