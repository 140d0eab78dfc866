"""What a calibration has measured: ranges, settings with a speed, the plain rate; the ground of every warning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmodel.calibration import Calibration, CycleRow
from specmodel.deployment import Deployment
from specmodel.findings import findings_of
from specmodel.speeds import Noise, stated_speed

__all__ = [
    "Measured",
    "PlainRate",
    "beyond_longest",
    "default_context",
    "extrapolation",
    "measured_of",
    "row_context",
]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRate:
    """The fastest measured plain decoding (num_steps 0, speculation off) at one place."""

    comm: str
    tok_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Ranges and settings that were measured.

    A setting is (num_steps, topk, verified tokens per sequence, batch, comm, context or -1, workload, cuda_graph,
    verify_cuda_graph).
    """

    largest_steps: int
    """Longest chain or tree with a speed or an acceptance; 0 where there is none."""
    batches: tuple[float, ...]
    drafting_batches: tuple[float, ...]
    """Batches with a speculative cycle, or a verify pass of several tokens a sequence."""
    contexts: tuple[int, ...]
    speeds: frozenset[tuple[int, int, int, float, str, int, str, bool, bool]]
    verify: frozenset[tuple[float, float, str]]
    """(tokens of one rank, sequences of one rank, comm) of verify passes seen alone or inside a cycle with its time."""
    draft: frozenset[tuple[int, int, str]]
    """(num_steps, topk, comm) of drafts seen alone or inside a cycle."""
    positions: dict[str, int]
    """Longest chain with acceptance data, by workload."""
    plain: tuple[tuple[float, int, str, str, float], ...]
    """(batch, context or -1, workload, comm, tok/s) of plain decoding."""
    comms: frozenset[str]
    """Communication settings of which there is a row of any kind."""
    only_shape: tuple[int, int, int] | None
    """The one (num_steps, topk, verified tokens) that all speeds are of, where no plain decoding and no pass or draft
    alone says what a step costs: none other can be told from it."""

    @property
    def plain_first(self) -> str:
        """Why plain decoding is to be measured before anything else; empty where something else may be."""
        if self.batches and self.only_shape is None:
            return ""
        why = "speeds of one length alone do not say what a step costs" if self.batches else "nothing was timed yet"
        return f"{why}: plain decoding comes first, it gives every other number its scale"

    @property
    def any_tree(self) -> bool:
        """Whether the speed of any draft tree was measured."""
        return any(topk > 1 for _, topk, *_ in self.speeds)

    def plain_rate(self, batch: float, context_tokens: float | None, workloads: tuple[str, ...]) -> PlainRate | None:
        """Best measured plain rate at a batch and context: of these workloads if measured, else of any."""
        here = [p for p in self.plain if abs(p[0] - batch) < 1e-9]
        if context_tokens is not None and not np.isnan(context_tokens):
            here = [p for p in here if p[1] in (-1, int(context_tokens))]
        same = [p for p in here if p[2] in workloads]
        best = max(same or here, key=lambda p: p[4], default=None)
        return None if best is None else PlainRate(comm=best[3], tok_s=best[4])

    def plain_places(self, workloads: tuple[str, ...]) -> tuple[tuple[float, int, float], ...]:
        """(batch, context or -1, best tok/s) of every place where plain decoding was measured, as `plain_rate` says."""
        places = dict.fromkeys((b, c) for b, c, *_ in self.plain)
        out = []
        for b, c in places:
            rate = self.plain_rate(b, None if c < 0 else c, workloads)
            if rate is not None:
                out.append((b, c, rate.tok_s))
        return tuple(out)

    def has_speed(
        self,
        shape: tuple[int, int, int],
        batch: float,
        comm: str,
        context_tokens: float | None,
        workloads: tuple[str, ...],
        cuda_graph: bool = True,
        verify_cuda_graph: bool = True,
    ) -> bool:
        """Whether a row states the speed of this setting (a bound does not)."""
        graphs = (cuda_graph, verify_cuda_graph)
        if shape[0] == 0:
            workloads = tuple({*workloads, *(s[6] for s in self.speeds)})
            graphs = (True, verify_cuda_graph)
        contexts = (
            {-1, *self.contexts} if context_tokens is None or np.isnan(context_tokens) else {-1, int(context_tokens)}
        )
        return any((*shape, batch, comm, c, w, *graphs) in self.speeds for c in contexts for w in workloads)


def row_context(row: CycleRow) -> int:
    """Context of a row, -1 where none is stated."""
    return -1 if row.context_tokens is None else row.context_tokens


def measured_of(cal: Calibration, dep: Deployment) -> Measured:
    """Collect what was measured."""
    noise = Noise()
    m = cal.measurements
    speeds, verify, draft = set(), set(), set()
    plain: dict[tuple[float, int, str, str], list[float]] = {}
    steps = [0]
    positions: dict[str, int] = {}
    batches = {float(r.batch) * dep.data_parallel for r in m.verify}
    drafting = {float(r.batch) * dep.data_parallel for r in m.verify if r.tokens > r.batch}
    other_unit = {f.row for f in findings_of(cal) if f.other_unit}
    for i, row in enumerate(m.cycles):
        stated = stated_speed(row, noise)
        if stated is None:
            continue
        shape = (row.num_steps, row.topk, row.verify_tokens)
        # Plain decoding drafts nothing: the drafter's graphs are no matter.
        graphs = (row.cuda_graph or row.num_steps == 0, row.verify_cuda_graph)
        speeds.add((*shape, float(row.batch), row.comm, row_context(row), row.workload, *graphs))
        batches.add(float(row.batch))
        if row.num_steps:
            drafting.add(float(row.batch))
        steps.append(row.num_steps)
        if row.num_steps and row.acceptance_length is not None:
            positions[row.workload] = max(positions.get(row.workload, 0), row.num_steps)
        sequences = max(row.batch / dep.data_parallel, 1.0)
        if row.num_steps == 0 and not row.speculating and i not in other_unit:
            form, value, _ = stated
            rate = value if form == "tok_s" else 1000.0 * row.batch / value
            plain.setdefault((float(row.batch), row_context(row), row.workload, row.comm), []).append(rate)
        verify.add((sequences * row.verify_tokens, sequences, row.comm))
        draft.add((row.num_steps, row.topk, row.comm))
    for r in m.verify:
        verify.add((float(r.tokens), min(r.batch, float(r.tokens)), r.comm))
    shapes = {s[:3] for s in speeds}
    contexts = {r.context_tokens for r in m.cycles if r.context_tokens is not None}
    contexts |= {r.context_tokens for r in m.verify if r.context_tokens is not None}
    for d in m.draft:
        draft.add((d.num_steps, d.topk, d.comm))
    for a in cal.acceptance:
        steps.append(a.num_steps)
        stated_positions = a.accepted_per_position or a.survival or a.conditional
        known = len(stated_positions) if stated_positions else a.num_steps
        positions[a.workload] = max(positions.get(a.workload, 0), known)
    if max(steps) == 0:
        # Only tables: the chains whose verify pass they cover.
        steps += [int(r.tokens / r.batch) - 1 for r in m.verify if r.tokens >= r.batch]
    return Measured(
        largest_steps=max(steps),
        batches=tuple(sorted(batches)),
        drafting_batches=tuple(sorted(drafting)),
        contexts=tuple(sorted(contexts)),
        speeds=frozenset(speeds),
        verify=frozenset(verify),
        draft=frozenset(draft),
        positions=positions,
        plain=tuple((*key, float(np.mean(rates))) for key, rates in sorted(plain.items())),
        only_shape=next(iter(shapes)) if len(shapes) == 1 and not (m.verify or m.draft) and max(shapes)[0] else None,
        comms=frozenset(row.comm for _, rows in cal.tables for row in rows),
    )


def default_context(cal: Calibration, batch: float) -> int | None:
    """The context with most rows at a batch, or at the nearest that states one; None where none is stated.

    So that answers for neighbouring batches, measured or not, are for one context.
    """
    counts: dict[float, dict[int, int]] = {}
    rows = [(r.batch, r.context_tokens) for r in cal.measurements.cycles]
    rows += [(r.batch * cal.system.data_parallel, r.context_tokens) for r in cal.measurements.verify]
    seen = False
    for at, context in rows:
        seen = seen or abs(at - batch) < 1e-9
        if context is not None:
            here = counts.setdefault(float(at), {})
            here[context] = here.get(context, 0) + 1
    if not counts or (seen and not any(abs(at - batch) < 1e-9 for at in counts)):
        return None  # what was measured at this batch states no context
    near = counts[min(counts, key=lambda at: (abs(np.log(at / batch)), at))]
    return max(near, key=lambda c: (near[c], -c))


def beyond_longest(measured: Measured, num_steps: float) -> tuple[str, ...]:
    """A warning where a chain is longer than any that was measured."""
    largest = measured.largest_steps
    if num_steps <= largest:
        return ()
    text = f"num_steps up to {num_steps:g} is beyond the longest measured ({largest})"
    return (text + (": extrapolated" if num_steps > 2 * largest else ""),)


def extrapolation(
    measured: Measured,
    dep: Deployment,
    num_steps: Array,
    verify_tokens: Array,
    batch: Array,
    topk: Array | None = None,
) -> tuple[NDArray[np.bool_], tuple[str, ...]]:
    """Which points lie so far out that no recommendation may rest on them, and warnings in words.

    Far: num_steps above twice the largest measured, batch more than four times from the nearest measured (with
    speculation, where speculation is asked for), or a pass of more tokens than the largest captured graph that was not
    measured itself. Between the measured range and that there is a warning only.
    """
    warnings: list[str] = []
    largest = measured.largest_steps
    far = num_steps > 2 * largest
    warnings += beyond_longest(measured, float(np.max(num_steps, initial=0.0)))
    if measured.batches:
        known = np.array(measured.batches)
        nearest = np.min(np.abs(np.log(np.asarray(batch)[..., None] / known)), axis=-1)
        if measured.drafting_batches:
            # Plain decoding at a batch says little of what speculation does there.
            drafted = np.array(measured.drafting_batches)
            apart = np.min(np.abs(np.log(np.asarray(batch)[..., None] / drafted)), axis=-1)
            nearest = np.where(num_steps > 0, apart, nearest)
        gap = nearest > np.log(4.0) + 1e-9
        far = far | gap
        if np.any(batch > known[-1]) or np.any(batch < known[0]):
            worst = float(np.max(batch) if np.any(batch > known[-1]) else np.min(batch))
            warnings.append(f"batch {worst:g} is outside the measured {known[0]:g} to {known[-1]:g}")
        elif np.any(gap):
            at = np.broadcast_to(batch, gap.shape)[gap].max()
            seen, how = (measured.drafting_batches, " with speculation") if measured.drafting_batches else (known, "")
            sizes = ", ".join(f"{b:g}" for b in seen[:6]) + (", ..." if len(seen) > 6 else "")
            warnings.append(f"batch {at:g} is more than four times from every batch measured{how} ({sizes})")
    else:
        far = far | True
        warnings.append("no pass and no cycle was measured: every time is a guess from priors")
    if topk is not None and np.any(np.asarray(topk) > 1) and not measured.any_tree:
        warnings.append("no draft tree was measured: what second choices bring, and what a tree costs, are guesses")
    sequences = np.maximum(batch / dep.data_parallel, 1.0)
    limit = dep.graph_limit_tokens(verify_tokens)
    tokens = sequences * verify_tokens
    over = tokens > limit + 1e-9
    if np.any(over):
        # What a pass costs without a graph is a guess, unless that pass was measured.
        for size, rows in {(t, b) for t, b, _ in measured.verify}:
            over = over & ~((np.abs(tokens - size) < 1e-9) & (np.abs(sequences - rows) < 1e-9))
    if np.any(over):
        far = far | over
        warnings.append("the verify pass is larger than the largest captured CUDA graph")
    return np.asarray(far), tuple(warnings)
