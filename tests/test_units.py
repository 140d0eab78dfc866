"""Numbers in another unit: seconds for milliseconds, thousands of tokens: said, and no ground of a choice."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specmodel as sm
from specmodel import words
from specmodel.findings import findings_of
from specmodel.notices import unit_notices

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted
TRUTH = cases.Truth()
SWEEP = [spec(k, TRUTH.tok_s(k), TRUTH.length(k) if k else None) for k in (0, 1, 3, 5)]
AT = TRUTH.cycle_ms(0)


@pytest.mark.parametrize(
    "row",
    [
        {"num_steps": 0, "cycle_ms": AT / 1000.0},
        {"num_steps": 0, "tpot_ms": AT / 1000.0},
        {"num_steps": 0, "tok_s": TRUTH.tok_s(0) / 1000.0},
        {"num_steps": 0, "cycle_ms": AT * 1000.0},
        {"num_steps": 0, "range_tok_s": [TRUTH.tok_s(0) / 1000.0, TRUTH.tok_s(0) / 900.0]},
    ],
)
def test_plain_decoding_in_another_unit_is_said_and_not_believed(row: dict[str, Any]) -> None:
    model = fitted([row, *SWEEP[1:]])
    [warning] = model.warnings
    assert warning.startswith("measurements.cycles[0]: its cycle is ")
    assert "milliseconds" in warning
    optimum = sm.optimize(model, max_steps=6)
    assert optimum.best.num_steps == sm.optimize(fitted(SWEEP), max_steps=6).best.num_steps
    assert optimum.best.tok_s == pytest.approx(sm.optimize(fitted(SWEEP), max_steps=6).best.tok_s, rel=0.03)
    # Nor is it what speedups are over.
    assert not optimum.plain.measured
    assert 1.0 < optimum.best.speedup < 3.0


def test_where_one_stands_against_one_neither_is_a_ground() -> None:
    model = fitted([{"num_steps": 0, "cycle_ms": 0.0105}, spec(3, 170.0, 2.4)])
    assert len(model.warnings) == 2
    optimum = sm.optimize(model)
    assert words.refusal(model, optimum, extrapolate=False) is not None


def test_a_speculative_row_in_another_unit() -> None:
    slow = fitted([*SWEEP[:3], spec(5, TRUTH.tok_s(5) / 1000.0, TRUTH.length(5))])
    [warning] = slow.warnings
    assert re.match(r"measurements\.cycles\[3\]: its cycle is [0-9,]+ times longer", warning)
    assert sm.optimize(slow, max_steps=6).best.num_steps in (3, 4)


def test_what_is_only_a_large_batch_or_a_long_chain_is_no_unit() -> None:
    rows = [spec(k, TRUTH.tok_s(k, b), TRUTH.length(k) if k else None, batch=b) for k in (0, 3) for b in (1, 64, 512)]
    assert findings_of(cases.calibration(rows)) == ()
    assert unit_notices(cases.calibration(rows)) == ()
    for path in cases.COMMITTED:
        cal = sm.load(path)
        assert not any(f.other_unit for f in findings_of(cal)), path.name
        assert unit_notices(cal) == (), path.name


@pytest.mark.parametrize("scale", [1e-4, 1e5])
def test_a_whole_file_in_another_unit_is_said(scale: float) -> None:
    rows = [{"num_steps": k, "cycle_ms": TRUTH.cycle_ms(k) * scale} for k in (0, 2, 4)]
    [warning] = unit_notices(cases.calibration(rows))
    assert "check the unit" in warning
    assert any(warning in w for w in fitted(rows).predict(2).warnings)
    tables = cases.tables(TRUTH, (0, 1, 3))
    for row in tables["verify"]:
        row["time_ms"] *= scale
    assert any("verify" in w for w in unit_notices(cases.calibration(SWEEP, verify=tables["verify"])))


ONE_LENGTH = {
    "one row": [spec(3, 170.0, 2.4)],
    "blind": [spec(3, 170.0)],
    "several batches": [spec(3, 170.0, 2.4), spec(3, 600.0, 2.4, batch=4)],
    "several workloads": [spec(3, 170.0, 2.4, workload="a"), spec(3, 190.0, 2.8, workload="b")],
    "a tree": [spec(3, 170.0, 2.4, topk=4, num_draft_tokens=8)],
}


@pytest.mark.parametrize("name", ONE_LENGTH)
def test_one_length_without_plain_decoding_decides_nothing(name: str) -> None:
    """It cannot tell what a step costs from what a pass costs: no recommendation, and plain decoding comes next."""
    model = fitted(ONE_LENGTH[name])
    optimum = sm.optimize(model)
    text = words.refusal(model, optimum, extrapolate=False)
    assert "measure plain decoding" in text
    assert words.answer_line(model, [optimum], (), [text]).startswith("No recommendation: ")
    assert optimum.measure_next.row["num_steps"] == 0
    assert words.refusal(model, optimum, extrapolate=True) is None


@pytest.mark.parametrize(
    "more",
    [
        {"cycles": [plain()]},
        {"cycles": [spec(1, 140.0, 1.7)]},
        {"cycles": [], "verify": [{"tokens": 1, "time_ms": 10.0}]},
        {"cycles": [], "draft": [{"num_steps": 3, "time_ms": 2.0}]},
        {"cycles": [{"num_steps": 0, "speculation": True, "tok_s": 95.0}]},
    ],
)
def test_whatever_tells_a_step_from_a_pass_makes_it_an_answer(more: dict[str, Any]) -> None:
    more = dict(more)
    model = fitted([spec(3, 170.0, 2.4), *more.pop("cycles")], **more)
    assert words.refusal(model, sm.optimize(model), extrapolate=False) is None
