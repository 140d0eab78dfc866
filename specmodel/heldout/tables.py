"""Measured tables put to the test: whole cycles from them, other communication settings, other widths.

A calibration with verify and draft tables and whole cycles under `validation` shows whether the parts make up the
whole; one with several communication settings, whether a setting is known from another's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from specmodel.allreduce import AllreduceCurve, other_width
from specmodel.calibration import Calibration, CycleRow, VerifyRow
from specmodel.deployment import deployment_of, draft_mode_of
from specmodel.fit import fit
from specmodel.heldout.points import HeldOut, Setting, Task, point, settings_of
from specmodel.model import FittedModel
from specmodel.speeds import Noise, spread
from specmodel.validate import prediction_of

__all__ = [
    "EAGER",
    "SPARSE_TOKENS",
    "AllreduceShare",
    "OtherWidth",
    "Transfer",
    "allreduce_shares",
    "from_tables",
    "has_tables",
    "other_widths",
    "settings_gain",
    "sparse",
    "transfers",
    "verify_interval",
    "verify_ms",
]

SPARSE_TOKENS = (1, 4, 8, 16, 64)
LEAST_OF_DEFAULT, LEAST_OF_OTHER = 5, 3
POINT_TOKENS = 4
"""Tokens of the one verify point that a setting is given, or the nearest measured."""
EAGER = "eager"
MODES = ("one graph a step", "one graph a cycle", EAGER)


def has_tables(cal: Calibration) -> bool:
    """Whether whole cycles can be predicted from verify times of the file."""
    return bool(cal.measurements.verify and cal.validation.cycles and len(cal.measurements.verify) >= LEAST_OF_DEFAULT)


def verify_ms(row: VerifyRow) -> float:
    """Time of a verify row; the geometric middle of a range."""
    value, _ = spread(row.time_ms, row.range_ms, None, None, 0.0, 0.0) or (float("nan"), 0.0)
    return value


def sparse(cal: Calibration) -> Calibration:
    """The same calibration with verify rows of a few token counts alone."""
    rows = tuple(r for r in cal.measurements.verify if r.tokens in SPARSE_TOKENS)
    return replace(cal, measurements=replace(cal.measurements, verify=rows))


def _of_mode(cal: Calibration, mode: int) -> Calibration:
    """The calibration without the drafts that ran in graphs of another scope."""
    draft = tuple(r for r in cal.measurements.draft if draft_mode_of(r.cuda_graph, r.graph_scope) in (mode, 2))
    graph = any(r.cuda_graph for r in draft)
    return replace(cal, measurements=replace(cal.measurements, draft=draft)) if mode < 2 and graph else cal


def _mode(row: CycleRow) -> int:
    return draft_mode_of(row.cuda_graph, row.graph_scope)


def from_tables(cal: Calibration) -> Iterator[HeldOut]:
    """Predict the cycles under `validation` from the full verify table and from a sparse one.

    Each with its own acceptance length, so that the cost alone is tested. Cycles whose drafts ran in another kind of
    graph are predicted from draft times of that kind.
    """
    settings = settings_of(cal, cal.validation.cycles)
    tables: tuple[tuple[Task, Calibration], ...] = (("full table", cal), ("sparse table", sparse(cal)))
    for task, table in tables:
        models: dict[int, FittedModel] = {}
        for s in settings:
            mode = _mode(s.row)
            if mode not in models:
                models[mode] = fit(_of_mode(table, mode))
            p = prediction_of(models[mode], s.row, s.acceptance_length if s.shape[0] else None)
            tokens = s.row.batch / cal.system.data_parallel * s.row.verify_tokens
            yield point(
                p,
                s,
                task,
                cal.name,
                s.row.comm,
                interior=task == "full table" or tokens <= SPARSE_TOKENS[-1],
                simple_tok_s=_added(cal, s),
                mode=MODES[mode] if s.shape[0] else "plain",
            )


def _added(cal: Calibration, setting: Setting) -> float | None:
    """Rate by adding the measured verify and draft times of exactly this cycle; None where one was not measured.

    Drafts measured one step at a time count once a step.
    """
    row, sequences = setting.row, setting.row.batch / cal.system.data_parallel
    verify = [
        verify_ms(r)
        for r in cal.measurements.verify
        if (r.tokens, r.batch, r.comm, r.cuda_graph)
        == (sequences * row.verify_tokens, sequences, row.comm, row.verify_cuda_graph)
        and r.context_tokens in (None, row.context_tokens)
    ]
    draft = {
        r.num_steps: r.time_ms
        for r in cal.measurements.draft
        if (r.topk, r.batch, r.comm) == (row.topk, sequences, row.comm)
        and draft_mode_of(r.cuda_graph, r.graph_scope) == _mode(row)
        and (r.context_tokens is None or r.context_tokens == row.context_tokens)
        and r.time_ms is not None
    }
    once = draft.get(row.num_steps)
    one = draft.get(1) if len(draft) == 1 else None
    drafts = 0.0 if row.num_steps == 0 else once if once is not None else one * row.num_steps if one else None
    if not verify or drafts is None or setting.acceptance_length is None:
        return None
    return 1000.0 * row.batch * setting.acceptance_length / (float(np.median(verify)) + drafts)


def verify_interval(model: FittedModel, row: VerifyRow) -> tuple[float, float, float]:
    """Median and 90 % interval of one new measurement of a verify pass, ms."""
    steps = round(row.tokens / row.batch) - 1
    middle, low, high = model.interval_of(
        "verify_ms", steps, row.batch, row.comm, context_tokens=row.context_tokens, verify_cuda_graph=row.cuda_graph
    )
    noise = float(ndtri(0.95)) * Noise().verify
    lower, upper = np.hypot(np.log(middle / low), noise), np.hypot(np.log(high / middle), noise)
    return middle, middle * float(np.exp(-lower)), middle * float(np.exp(upper))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One verify pass under a communication setting, predicted from the table of `default`."""

    file: str
    comm: str
    tokens: int
    measured_ms: float
    predicted_ms: float
    interval_ms: tuple[float, float]
    without_point_ms: float
    """Prediction from the all-reduce curves alone, without a verify point of the setting's own."""

    @property
    def error(self) -> float:
        """Relative error, positive where the predicted time is too long."""
        return self.predicted_ms / self.measured_ms - 1.0

    @property
    def error_without_point(self) -> float:
        """Relative error without a verify point of the setting's own."""
        return self.without_point_ms / self.measured_ms - 1.0

    @property
    def inside(self) -> bool:
        """Whether the measurement lies in the 90 % interval."""
        return self.interval_ms[0] <= self.measured_ms <= self.interval_ms[1]


def transfers(cal: Calibration) -> tuple[list[Transfer], list[HeldOut]]:
    """Predict each setting from the verify table of `default`, its own all-reduce curve and one verify point.

    Returns
    -------
    verify : list of Transfer
        The other verify passes of each setting.
    cycles : list of HeldOut
        Its whole cycles, draft times of the setting given.
    """
    m = cal.measurements
    curves = {r.comm for r in m.allreduce}
    plain = [r for r in m.verify if r.comm == "default" and r.cuda_graph]
    if "default" not in curves or len(plain) < LEAST_OF_DEFAULT:
        return [], []
    settings = settings_of(cal, cal.validation.cycles)
    passes: list[Transfer] = []
    cycles: list[HeldOut] = []
    for comm in cal.comm_names[1:]:
        own = [r for r in m.verify if r.comm == comm and r.cuda_graph]
        here = [s for s in settings if s.row.comm == comm]
        if comm not in curves or not own or not (len(own) >= LEAST_OF_OTHER or here):
            continue
        # One setting at a time: what other settings showed would help.
        alone = replace(
            cal,
            comm={name: cal.comm[name] for name in ("default", comm) if name in cal.comm},
            measurements=replace(
                m,
                verify=tuple(plain),
                draft=tuple(r for r in m.draft if r.comm in ("default", comm)),
                allreduce=tuple(r for r in m.allreduce if r.comm in ("default", comm)),
                prefill=(),
                cycles=tuple(r for r in m.cycles if r.comm == "default"),
            ),
            validation=replace(cal.validation, cycles=()),
        )
        given = min(own, key=lambda r: (r.batch, abs(np.log(r.tokens / POINT_TOKENS))))
        model = fit(replace(alone, measurements=replace(alone.measurements, verify=(*plain, given))))
        without = fit(alone)
        for r in own:
            if r is not given and r.tokens % r.batch == 0:
                middle, low, high = verify_interval(model, r)
                passes.append(
                    Transfer(
                        file=cal.name,
                        comm=comm,
                        tokens=r.tokens,
                        measured_ms=verify_ms(r),
                        predicted_ms=middle,
                        interval_ms=(low, high),
                        without_point_ms=verify_interval(without, r)[0],
                    )
                )
        for s in here:
            p = prediction_of(model, s.row, s.acceptance_length if s.shape[0] else None)
            cycles.append(point(p, s, "full table", cal.name, comm, interior=True, mode=MODES[_mode(s.row)]))
    return passes, cycles


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceShare:
    """Share of the all-reduces in the verify passes of one setting, by tokens."""

    file: str
    width: int
    comm: str
    batch: float
    shares: dict[int, float]


def allreduce_shares(cal: Calibration) -> list[AllreduceShare]:
    """Time of the all-reduces (two a layer, each as measured alone) over the measured verify time.

    The curve is of all-reduces that follow each other at once; what waiting for the slowest rank costs beside is not
    in it.
    """
    dep = deployment_of(cal)
    least = min((r.batch for r in cal.measurements.verify), default=1)
    out = []
    for comm, curve, own in zip(dep.structure.comm_names, dep.curves, dep.own_curve, strict=True):
        if curve is None or not own:
            continue
        shares = {}
        for r in cal.measurements.verify:
            if r.comm == comm and r.cuda_graph and r.batch == least:
                reduce_ms = dep.allreduces_per_pass * curve.at(np.array(r.tokens * dep.message_bytes_per_token))
                shares[r.tokens] = float(reduce_ms) / verify_ms(r)
        if shares:
            width = cal.system.tensor_parallel or cal.system.num_gpus or 1
            out.append(AllreduceShare(file=cal.name, width=width, comm=comm, batch=least, shares=shares))
    return out


def settings_gain(cal: Calibration) -> tuple[str, int, float] | None:
    """The communication setting that shortens a verify pass most: its name, the tokens, and by what share.

    None where no pass was timed under `default` and another setting.
    """

    def place(r: VerifyRow) -> tuple[object, ...]:
        return r.tokens, r.batch, r.context_tokens, r.cuda_graph

    default = {place(r): verify_ms(r) for r in cal.measurements.verify if r.comm == "default"}
    gains = [
        (1.0 - verify_ms(r) / default[place(r)], r.comm, r.tokens)
        for r in cal.measurements.verify
        if r.comm != "default" and place(r) in default
    ]
    if not gains:
        return None
    gain, comm, tokens = max(gains)
    return comm, tokens, gain


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherWidth:
    """The all-reduce curve of one width predicted from that of another, under one setting."""

    of: str
    of_gpus: int
    predicted_from: str
    from_gpus: int
    comm: str
    errors: tuple[float, ...]
    """Relative, one a common size, positive where the predicted time is too long."""


def other_widths(cals: Sequence[Calibration]) -> list[OtherWidth]:
    """Predict the all-reduce curves of each width from each other width of the same machine and setting."""
    known = [(cal, name, curve) for cal in cals for name, curve in _own_curves(cal)]
    out = []
    for cal, comm, curve in known:
        for other, name, other_curve in known:
            width, from_width = cal.system.tensor_parallel or 1, other.system.tensor_parallel or 1
            if width == from_width or _machine(cal, comm) != _machine(other, name):
                continue
            predicted = other_width(other_curve, from_width, width)
            low, high = predicted.size_bytes[0], predicted.size_bytes[-1]
            errors = tuple(
                float(predicted.at(size)) / time_ms - 1.0
                for size, time_ms in zip(curve.size_bytes, curve.time_ms, strict=True)
                if low <= size <= high
            )
            if errors:
                out.append(
                    OtherWidth(
                        of=cal.name,
                        of_gpus=width,
                        predicted_from=other.name,
                        from_gpus=from_width,
                        comm=comm,
                        errors=errors,
                    )
                )
    return out


def _own_curves(cal: Calibration) -> list[tuple[str, AllreduceCurve]]:
    dep = deployment_of(cal)
    if (cal.system.tensor_parallel or 1) < 2:
        return []
    every = zip(dep.structure.comm_names, dep.curves, dep.own_curve, strict=True)
    return [(comm, curve) for comm, curve, own in every if own and curve is not None]


def _machine(cal: Calibration, comm: str) -> tuple[object, ...]:
    """What two curves must share to be of one kind: GPU, nodes, and the environment of the setting."""
    setting = cal.comm.get(comm)
    return cal.system.gpu, cal.system.nodes or 1, tuple(sorted(setting.env.items())) if setting else ()
