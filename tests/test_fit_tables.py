"""A complete table is looked up: the fitted cycle is the sum of two measured numbers, whatever the kernels do."""

from __future__ import annotations

import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))


@dataclass(frozen=True, kw_only=True)
class Stepped(cases.Truth):
    """Kernels with row blocks of four, of which every third is slow, and one size that is an outlier."""

    def verify_ms(self, tokens: float, batch: float = 1, comm: str = "default") -> float:
        block = 1.0 + 0.05 * (np.ceil(tokens / 4.0) % 3)
        return float(super().verify_ms(tokens, batch, comm) * block * (1.12 if tokens == 7 else 1.0))


MOE = {"num_experts": 128, "experts_per_token": 8}
COMM = {"comm": {"default": (0.0, 0.0), "ring": (0.2, 0.02), "tree": (0.05, 0.005)}}
TRUTHS = {
    "dense": cases.Truth(overhead=0.0),
    "dense in steps": Stepped(overhead=0.0),
    "experts": cases.Truth(overhead=0.0, **MOE),
    "experts in steps": Stepped(overhead=0.0, **MOE),
    "three settings in steps": Stepped(overhead=0.0, **COMM),
}
STEPS = range(9)


def measured(truth: Any, batches: Any, relative_sd: float | None, **sections: Any) -> Any:
    rows = cases.tables(truth, STEPS, batches, relative_sd)
    given = {"num_steps": 8, "conditional": list(truth.conditional[:8])}
    system = {"system": {"engine": cases.LOOP}}
    return cases.fitted((), **rows, **truth.sections(), **system, acceptance=[given], **sections)


@pytest.mark.parametrize(("batches", "relative_sd"), [((1,), None), ((1,), 0.001), ((1, 8), None)])
@pytest.mark.parametrize("name", TRUTHS)
def test_a_complete_table_is_looked_up(name: str, batches: tuple[int, ...], relative_sd: float | None) -> None:
    truth = TRUTHS[name]
    model = measured(truth, batches, relative_sd)
    steps, batch = np.arange(9), np.array(batches)[:, None]
    for comm in truth.comm:
        p = model.predict(steps, batch, comm)
        low, high = p.interval(0.9)
        cycle = np.array([[truth.cycle_ms(k, b, comm) for k in STEPS] for b in batches])
        np.testing.assert_allclose(p.cycle_ms, cycle, rtol=0.003)
        rate = 1000.0 * batch * p.acceptance_length / cycle
        assert np.all((low < rate) & (rate < high))
        assert np.median(high / low) < 1.15
        assert not p.extrapolated.any()


def test_the_parts_of_the_table_are_kept_apart() -> None:
    """Verify and draft are measured alone: neither may pay for the other."""
    truth = TRUTHS["dense in steps"]
    model = measured(truth, (1,), 0.001)
    p = model.predict(np.arange(1, 9))
    np.testing.assert_allclose(p.verify_ms, [truth.verify_ms(k + 1) for k in range(1, 9)], rtol=0.003)
    np.testing.assert_allclose(p.draft_ms, [truth.draft_ms(k) for k in range(1, 9)], rtol=0.01)


def test_a_step_that_was_not_measured_widens_the_interval() -> None:
    """Around a missing size the interval is wider than at the measured ones, and on a bumpy table more so."""
    widths = {}
    for name in ("dense", "dense in steps"):
        rows = cases.tables(TRUTHS[name], STEPS)
        rows["verify"] = [r for r in rows["verify"] if r["tokens"] not in (6, 7, 8)]
        model = cases.fitted((), **rows, system={"engine": cases.LOOP})
        low, high = model.predict(np.arange(1, 9), acceptance_length=2.0).interval()
        widths[name] = np.log(high / low)
        assert widths[name][5] > 1.5 * widths[name][2]
    assert widths["dense in steps"][5] > widths["dense"][5]


def test_never_worse_than_adding_two_noisy_numbers() -> None:
    """With noise in the tables the model may smooth, and must not lose to the sum by more than the noise."""
    noise = 0.01
    lost = []
    for seed in range(6):
        random = np.random.default_rng(seed)
        truth = [TRUTHS["dense"], TRUTHS["experts in steps"]][seed % 2]
        rows = cases.tables(truth, STEPS, relative_sd=noise)
        for row in (*rows["verify"], *rows["draft"]):
            row["time_ms"] = cases.noisy(random, row["time_ms"], noise)
        model = cases.fitted((), **rows, **truth.sections(), system={"engine": cases.LOOP})
        drafts = [0.0, *(r["time_ms"] for r in rows["draft"])]
        added = np.array([v["time_ms"] + d for v, d in zip(rows["verify"], drafts, strict=True)])
        cycle = np.array([truth.cycle_ms(k) for k in STEPS])
        ours = np.abs(model.predict(np.arange(9)).cycle_ms / cycle - 1.0)
        lost.append(ours.mean() - np.abs(added / cycle - 1.0).mean())
    assert np.mean(lost) < noise / 2
    assert max(lost) < noise


MEASURED = [path for path in cases.COMMITTED if path.parent.name == "measured"]


def loops(calibration: Any) -> list[tuple[Any, float, float]]:
    """Validation cycles whose verify pass and draft stand in the file's tables: row, cycle and sum of the two, ms."""
    verify = {(r.tokens, r.batch, r.comm, r.context_tokens): r.time_ms for r in calibration.measurements.verify}
    draft = {(r.num_steps, r.batch, r.comm): r.time_ms for r in calibration.measurements.draft if r.cuda_graph}
    out = []
    for row in calibration.validation.cycles:
        key = (row.batch * row.verify_tokens, row.batch, row.comm, row.context_tokens)
        # Where one pass was timed alone, a cycle replays it.
        one = draft.get((1, row.batch, row.comm), np.nan) * row.num_steps
        drafted = draft.get((row.num_steps, row.batch, row.comm), one) if row.num_steps else 0.0
        if row.cycle_ms and key in verify and np.isfinite(drafted):
            out.append((row, row.cycle_ms, verify[key] + drafted))
    return out


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_measured_loops_are_predicted_no_worse_than_by_their_tables(path: Path) -> None:
    calibration = sm.load(path)
    model = cases.committed(path)
    ours, sums = [], []
    for row, cycle, added in loops(calibration):
        length = row.acceptance_length or 1.0
        p = model.predict(
            row.num_steps, row.batch, row.comm, context_tokens=row.context_tokens, acceptance_length=length
        )
        ours.append(abs(p.cycle_ms / cycle - 1.0))
        sums.append(abs(added / cycle - 1.0))
    assert not ours or np.mean(ours) < np.mean(sums) + 0.004


def test_some_measured_loops_have_complete_tables() -> None:
    assert sum(len(loops(sm.load(path))) for path in MEASURED) > 20
