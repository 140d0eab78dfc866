"""From the rows of a calibration to observations: what each number says about the model, and how surely."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specmodel.acceptance import conditional_from_survival, design_effect, logit, mean_drafts, reach_of
from specmodel.calibration import AcceptanceEntry, Calibration, CycleRow
from specmodel.cost import CostPoints
from specmodel.deployment import Deployment, Settings, as_settings, draft_mode_of, flattened
from specmodel.findings import findings_of
from specmodel.residual import ResidualPoints
from specmodel.speeds import Noise, spread, stated_speed

__all__ = ["Observations", "Shape", "observations_of"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """What is drafted for whom: workload index, steps, topk, verified tokens."""

    workload: int
    num_steps: int
    topk: int
    verify_tokens: int


class SettingKey(NamedTuple):
    """One measured setting; sequences are those of one rank, a context of -1 is not stated."""

    steps: float = 0.0
    query_tokens: float = 1.0
    sequences: float = 1.0
    context_tokens: float = -1.0
    comm: int = 0
    speculating: float = 0.0
    topk: float = 1.0
    draft_mode: int = 0
    verify_eager: float = 0.0
    workload: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """n observations, each ``cycle * ln T + verify * ln V + draft * ln D + length * ln E[N] (+ logit)``.

    `cycle`, `verify`, `draft` and `length` are the coefficients, 0 or +-1; `point` indexes `points` and `shape`
    `shapes` (-1: none); `position` is the (workload, position) of an observed logit (-1: none).
    """

    value: Array
    sd: Array
    cycle: Array
    verify: Array
    draft: Array
    length: Array
    point: NDArray[np.intp]
    shape: NDArray[np.intp]
    workload: NDArray[np.intp]
    position: NDArray[np.intp]
    hits: Array
    trials: Array
    """Binomial counts of a logit observation, already divided by the design effect; 0 where it is none."""
    bound: NDArray[np.bool_]
    """The value is an upper bound of tok/s."""
    sampled: NDArray[np.bool_]
    """The noise is that of timing; counts and acceptances know theirs."""
    scaled: NDArray[np.bool_]
    """Timing whose noise is a guess and has its scale learnt: no standard deviation is stated."""
    source: tuple[tuple[str, int], ...]
    """Section and row of each observation."""
    points: CostPoints
    residual_points: ResidualPoints
    settings: tuple[SettingKey, ...]
    """Of each point."""
    shapes: tuple[Shape, ...]
    workloads: tuple[str, ...]
    """Workloads with an acceptance curve of their own."""
    drafted: dict[int, tuple[tuple[float, ...], float]]
    """Counts of drafts made by position, and cycles, of the workloads where drafting may not happen or stop early."""
    places: tuple[str, ...]
    """Those and the workloads with plain rows only: what `ResidualPoints.workload` indexes."""

    def __len__(self) -> int:
        return int(self.value.shape[0])

    def thinned(self, most: int) -> Observations:
        """At most `most` of the observations, evenly spread over the rows; the points stay.

        Where noise has its scale learnt they come two by two, as configurations have them: only what repeats one tells
        noise from a cost of its own.
        """
        size = 1
        order = np.arange(len(self))
        if (self.sampled & self.scaled).any():
            size = 2
            at = self.residual_points
            same = np.stack([at.log_tokens, at.log_sequences, at.log_context, at.speculating, at.topk])
            _, first, configuration = np.unique(same, axis=1, return_index=True, return_inverse=True)
            # Configurations in the order of their first point; what has no point comes last.
            order = np.argsort(np.append(first[configuration], len(self) + len(first))[self.point], kind="stable")
        if len(self) <= most:
            index = np.arange(len(self))
        else:
            groups = np.linspace(0, len(self) - size, most // size).astype(np.intp)
            groups -= groups % size
            index = np.unique(order[groups[:, None] + np.arange(size)])
        names = ("value", "sd", *_DEFAULTS)
        some = {name: getattr(self, name)[index] for name in names}
        return replace(self, **some, source=tuple(self.source[i] for i in index))


class _Builder:
    """Collects observations while the rows are read."""

    def __init__(
        self, dep: Deployment, workloads: tuple[str, ...], places: tuple[str, ...], drafted: dict[int, Any]
    ) -> None:
        self.dep = dep
        self.drafted = drafted
        self.workloads = workloads
        self.places = places
        self.rows: list[dict[str, Any]] = []
        self.settings: dict[SettingKey, int] = {}
        self.shapes: dict[Shape, int] = {}

    def setting(self, key: SettingKey) -> int:
        return self.settings.setdefault(key, len(self.settings))

    def shape(self, shape: Shape) -> int:
        return self.shapes.setdefault(shape, len(self.shapes))

    def add(self, section: str, index: int, value: float, sd: float, **more: Any) -> None:
        # A number whose logarithm is beyond these says nothing that arithmetic could use.
        value, sd = float(np.clip(value, -50.0, 50.0)), float(np.clip(sd, 1e-4, 5.0))
        self.rows.append({"source": (section, index), "value": value, "sd": sd, **more})


def comm_index(dep: Deployment, name: str) -> int:
    """Index of a communication setting."""
    return dep.structure.comm_names.index(name)


def _nan(value: float | None) -> float:
    return float("nan") if value is None else float(value)


def setting_key(
    dep: Deployment, row: CycleRow, workload: int, drafted: tuple[tuple[float, ...], float] | None = None
) -> SettingKey:
    """The setting of a cycle; `drafted` are the counts of its workload where drafting may not happen or stop early."""
    steps = float(row.num_steps)
    tokens = float(row.verify_tokens)
    if row.topk == 1 and row.num_steps:
        # Drafting that stops early costs what it drafts on average (linear in the steps to first order).
        if row.mean_draft_tokens is not None:
            steps = min(max(row.mean_draft_tokens, 1e-3), steps)
        elif drafted is not None:
            steps = float(mean_drafts(reach_of(*drafted, positions=len(drafted[0])), steps))
        tokens = steps + 1.0
    return SettingKey(
        steps=steps,
        query_tokens=tokens,
        sequences=max(row.batch / dep.data_parallel, 1.0),
        context_tokens=-1.0 if row.context_tokens is None else float(row.context_tokens),
        comm=comm_index(dep, row.comm),
        speculating=float(row.speculating),
        topk=float(row.topk),
        draft_mode=draft_mode_of(row.cuda_graph, row.graph_scope) if row.num_steps else 0,
        verify_eager=float(not row.verify_cuda_graph),
        workload=workload,
    )


def settings_of(keys: list[SettingKey]) -> Settings:
    """Arrays of settings from keys."""
    columns = {name: np.array([getattr(k, name) for k in keys], dtype=float) for name in SettingKey._fields}
    for name in ("steps", "query_tokens", "sequences", "context_tokens", "topk"):
        columns[name] = np.minimum(columns[name], 1e9)
    context = columns["context_tokens"]
    return as_settings(
        num_steps=columns["steps"],
        verify_tokens=columns["query_tokens"],
        batch=columns["sequences"],
        context_tokens=np.where(context < 0, np.nan, context),
        comm=columns["comm"],
        speculating=columns["speculating"],
        topk=columns["topk"],
        draft_mode=columns["draft_mode"],
        verify_eager=columns["verify_eager"],
        workload=columns["workload"],
    )


def _length_sd(length: float, noise: Noise) -> float:
    return max(noise.length * (length - 1.0) / length, 0.002)


def observations_of(cal: Calibration, dep: Deployment, noise: Noise | None = None) -> Observations:
    """All that the measurements of a calibration say, as observations of logarithms and logits."""
    noise = noise or Noise()
    names = dict.fromkeys(["default"] if not cal.measurements.cycles and not cal.acceptance else [])
    names.update(dict.fromkeys(a.workload for a in cal.acceptance))
    names.update(dict.fromkeys(c.workload for c in cal.measurements.cycles if c.num_steps > 0))
    workloads = tuple(names) or ("default",)
    drafted = {
        workloads.index(a.workload): (tuple(map(float, a.drafted_per_position)), float(a.drafts))
        for a in cal.acceptance
        if a.drafted_per_position and a.drafts
    }
    others = [c.workload for c in cal.measurements.cycles if c.workload not in names]
    build = _Builder(dep, workloads, (*workloads, *dict.fromkeys(others)), drafted)
    _verify(cal, build, noise)
    _draft(cal, build, noise)
    doubts: dict[int, float] = {}
    findings = findings_of(cal)
    for finding in findings:
        for j in finding.doubtful:
            doubts[j] = max(doubts.get(j, 0.0), finding.sd)
    for i, row in enumerate(cal.measurements.cycles):
        # A row that cannot be is kept, but so wide that it cannot outweigh the others.
        wide = doubts.get(i)
        _cycle(row, i, build, noise if wide is None else replace(noise, cycle=wide, cycle_floor=wide, length=wide))
    doubtful = {f.row: f.sd for f in findings if f.section == "acceptance"}
    for i, entry in enumerate(cal.acceptance):
        _acceptance(entry, i, build, noise, doubtful.get(i, 0.0))
    return _finish(build)


def _verify(cal: Calibration, build: _Builder, noise: Noise) -> None:
    for i, r in enumerate(cal.measurements.verify):
        got = spread(r.time_ms, r.range_ms, r.sd_ms, r.samples, noise.verify, noise.verify_floor)
        if got is None:
            continue
        batch = min(r.batch, float(r.tokens))
        q = r.tokens / batch
        context = -1.0 if r.context_tokens is None else float(r.context_tokens)
        key = SettingKey(
            query_tokens=q,
            sequences=batch,
            context_tokens=context,
            comm=comm_index(build.dep, r.comm),
            speculating=float(q > 1),
            verify_eager=float(not r.cuda_graph),
        )
        scaled = r.sd_ms is None
        build.add("verify", i, np.log(got[0]), got[1], verify=1.0, point=build.setting(key), scaled=scaled)


def _draft(cal: Calibration, build: _Builder, noise: Noise) -> None:
    for i, r in enumerate(cal.measurements.draft):
        got = spread(r.time_ms, r.range_ms, r.sd_ms, r.samples, noise.draft, noise.draft_floor)
        if got is None:
            continue
        context = -1.0 if r.context_tokens is None else float(r.context_tokens)
        q = float(r.num_draft_tokens or r.num_steps + 1)
        key = SettingKey(
            steps=float(r.num_steps),
            query_tokens=q,
            sequences=r.batch,
            context_tokens=context,
            comm=comm_index(build.dep, r.comm),
            speculating=1.0,
            topk=float(r.topk),
            draft_mode=draft_mode_of(r.cuda_graph, r.graph_scope),
        )
        scaled = r.sd_ms is None
        build.add("draft", i, np.log(got[0]), got[1], draft=1.0, point=build.setting(key), scaled=scaled)


def _cycle(row: CycleRow, i: int, build: _Builder, noise: Noise) -> None:
    place = build.places.index(row.workload)
    point = build.setting(setting_key(build.dep, row, place, build.drafted.get(place)))
    drafting = row.num_steps > 0
    early_stop = row.mean_draft_tokens is not None and row.mean_draft_tokens < row.num_steps
    workload = build.workloads.index(row.workload) if drafting else -1
    shape = build.shape(Shape(workload, row.num_steps, row.topk, row.verify_tokens)) if drafting else -1
    length = row.acceptance_length if drafting else 1.0
    if drafting and length is not None and not early_stop:
        build.add("cycles", i, np.log(length), _length_sd(length, noise), length=1.0, shape=shape, sampled=False)
    if row.tok_s_at_most is not None:
        value = np.log(row.tok_s_at_most / (1000.0 * row.batch))
        if length is not None:
            build.add("cycles", i, value - np.log(length), noise.cycle, cycle=-1.0, point=point, bound=True)
        else:
            build.add("cycles", i, value, noise.cycle, cycle=-1.0, length=1.0, point=point, shape=shape, bound=True)
        return
    stated = stated_speed(row, noise)
    if stated is None:
        return
    form, value, sd = stated
    scaled = getattr(row, f"sd_{row.form}", None) is None
    if form == "cycle_ms":
        build.add("cycles", i, np.log(value), sd, cycle=1.0, point=point, scaled=scaled)
    elif length is not None:
        # The run's own acceptance length turns its rate into a cycle time, whatever it accepted.
        build.add("cycles", i, np.log(1000.0 * row.batch * length / value), sd, cycle=1.0, point=point, scaled=scaled)
    else:
        build.add(
            "cycles",
            i,
            np.log(value / (1000.0 * row.batch)),
            sd,
            cycle=-1.0,
            length=1.0,
            point=point,
            shape=shape,
            scaled=scaled,
        )


def _acceptance(entry: AcceptanceEntry, i: int, build: _Builder, noise: Noise, doubt: float) -> None:
    workload = build.workloads.index(entry.workload)
    common: dict[str, Any] = {"workload": workload, "sampled": False}
    if entry.acceptance_length is not None or entry.accepted_by_rank is not None:
        if entry.acceptance_length is not None:
            length = entry.acceptance_length
            sd = entry.sd / length if entry.sd is not None else _length_sd(length, noise)
        else:
            drafts = float(entry.drafts or 1)
            length = 1.0 + sum(sum(ranks) for ranks in entry.accepted_by_rank or ()) / drafts
            sd = _length_sd(length, noise)
        shape = build.shape(Shape(workload, entry.num_steps, entry.topk, entry.verify_tokens))
        build.add("acceptance", i, np.log(length), max(sd, 3.0 * doubt), length=1.0, shape=shape, sampled=False)
        return
    if entry.accepted_per_position is not None:
        drafts = float(entry.drafts or 0)
        effect = design_effect(drafts, entry.prompts) if entry.prompts else 1.0
        accepted = np.array(entry.accepted_per_position, dtype=float)
        before = np.concatenate([[drafts], accepted[:-1]])
        if entry.drafted_per_position is not None:
            # Where drafting may stop early, a position is tried only as often as it was drafted.
            reach = reach_of(entry.drafted_per_position, drafts, len(accepted))
            before = before * reach / np.concatenate([[1.0], reach[:-1]])
        for k, (hits, trials) in enumerate(zip(accepted, before, strict=True)):
            if trials > 0:
                build.add(
                    "acceptance",
                    i,
                    0.0,
                    1.0,
                    position=k,
                    hits=min(hits, trials) / effect,
                    trials=trials / effect,
                    **common,
                )
        return
    if entry.survival is not None:
        survival = np.array(entry.survival)
        conditional = np.minimum(conditional_from_survival(survival), 1.0)
        before = np.concatenate([[1.0], survival[:-1]])
    else:
        conditional = np.array(entry.conditional or ())
        before = np.ones(len(conditional))
    sd = entry.sd if entry.sd is not None else noise.probability
    for k, (c, reach) in enumerate(zip(conditional, before, strict=True)):
        if reach < 1e-6:
            break  # nothing is known of what hardly ever happens
        # A stated probability counts as so many trials as would give it its standard deviation.
        spread = min(max(sd, 1e-4), 1.0) / reach
        inside = min(max(float(c), 0.5 * spread), 1.0 - 0.5 * spread) if spread < 0.5 else 0.5
        trials = max(inside * (1.0 - inside) / spread**2, 0.5)
        build.add("acceptance", i, float(logit(inside)), 1.0, position=k, hits=inside * trials, trials=trials, **common)


_DEFAULTS: dict[str, Any] = {
    "cycle": 0.0,
    "verify": 0.0,
    "draft": 0.0,
    "length": 0.0,
    "point": -1,
    "shape": -1,
    "workload": -1,
    "position": -1,
    "hits": 0.0,
    "trials": 0.0,
    "bound": False,
    "sampled": True,
    "scaled": True,
}


def _pooled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with all acceptance lengths of one draft shape pooled into one: they measure the same number.

    Weighted by precision, and less sure where they scatter more than they should (Birge's ratio).
    """
    groups: dict[int, list[dict[str, Any]]] = {}
    out = []
    for row in rows:
        if row.get("length") == 1.0 and "point" not in row:
            group = groups.setdefault(row["shape"], [])
            group.append(row)
            if len(group) > 1:
                continue
        out.append(row)
    for group in groups.values():
        if len(group) > 1:
            value, weight = np.array([r["value"] for r in group]), np.array([r["sd"] for r in group]) ** -2.0
            mean = float(weight @ value / weight.sum())
            excess = float(weight @ (value - mean) ** 2) / (len(group) - 1)
            group[0].update(value=mean, sd=max(float(np.sqrt(max(excess, 1.0) / weight.sum())), 0.001))
    return out


def _finish(build: _Builder) -> Observations:
    columns: dict[str, Any] = {name: [] for name in ("value", "sd", *_DEFAULTS)}
    rows = _pooled(build.rows)
    for row in rows:
        for name, column in columns.items():
            column.append(row.get(name, _DEFAULTS.get(name)))
    integers = ("point", "shape", "workload", "position")
    flags = ("bound", "sampled", "scaled")
    arrays: dict[str, Any] = {
        name: np.array(column, dtype=np.intp if name in integers else bool if name in flags else float)
        for name, column in columns.items()
    }
    points, residual_points = build.dep.points(settings_of(list(build.settings)), rank_batch=True)
    size = len(build.settings)
    points, residual_points = flattened(points, (size,)), flattened(residual_points, (size,))
    return Observations(
        **arrays,
        source=tuple(row["source"] for row in rows),
        points=points,
        residual_points=residual_points,
        settings=tuple(build.settings),
        shapes=tuple(build.shapes),
        workloads=build.workloads,
        places=build.places,
        drafted=build.drafted,
    )
