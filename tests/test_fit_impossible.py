"""Physics that cannot be: the row is warned of and widened, and the decision of the rest stands."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

TRUTH = cases.Truth()
SWEEP = [spec(k, TRUTH.tok_s(k), TRUTH.length(k) if k else None) for k in (0, 1, 2, 3, 5, 7)]
HONEST = fitted(SWEEP)
SPEEDS = np.array([TRUTH.tok_s(k) for k in range(8)])

# One row that cannot be, where it stands among the honest ones, and what the warning says of it.
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "longer than a cycle can emit": (spec(2, 160.0, 5.0), "acceptance_length 5"),
    "much longer": (spec(2, 160.0, 1e6), "acceptance_length 1e+06"),
    "a tree longer than what it verifies": (
        spec(6, 160.0, 5.5, topk=4, num_draft_tokens=5),
        "acceptance_length 5.5",
    ),
    "a cycle shorter than a plain step": (spec(4, 600.0, 3.0), "speedup"),
    "a cycle far shorter than a plain step": (spec(4, 6e6, 3.0), "speedup"),
    "the same as a cycle time": ({"num_steps": 4, "acceptance_length": 3.0, "cycle_ms": 2.0}, "speedup"),
    "the same as a time per token": ({"num_steps": 4, "acceptance_length": 3.0, "tpot_ms": 1.0}, "speedup"),
    "the same as a range": ({"num_steps": 4, "acceptance_length": 3.0, "range_tok_s": [600, 700]}, "speedup"),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_cannot_be_is_warned_of_and_does_not_decide(name: str) -> None:
    row, words = ROWS[name]
    for where in (0, len(SWEEP)):
        rows = [*SWEEP[:where], row, *SWEEP[where:]]
        model = fitted(rows)
        [warning] = model.warnings
        assert words in warning
        assert f"measurements.cycles[{where}]" in warning
        assert warning in model.predict(3).warnings
        optimum = sm.optimize(model, max_steps=7)
        assert warning in optimum.warnings
        best = TRUTH.tok_s(optimum.best.num_steps)
        assert best > 0.985 * SPEEDS.max()
        # The other rows are predicted as before, each by its own length.
        for r in SWEEP:
            p, q = (
                m.predict(r["num_steps"], acceptance_length=r.get("acceptance_length")).tok_s for m in (model, HONEST)
            )
            assert p == pytest.approx(q, rel=0.05)
        low, high = model.predict(np.arange(8)).interval(0.98)
        assert np.all((low < SPEEDS) & (high > SPEEDS))


def test_without_any_such_row_there_is_no_warning() -> None:
    assert HONEST.warnings == ()
    edge = [plain(100.0), spec(2, 300.0, 3.0), spec(3, 402.0, 4.01)]  # as fast as can be, and rounded
    assert not [w for w in fitted(edge).warnings if "every draft is accepted" not in w]


def test_a_plain_row_that_makes_all_others_too_fast_is_the_doubtful_one() -> None:
    """Every run beats its acceptance length over one slow plain row: that row is measured wrongly."""
    slow = [{**SWEEP[0], "tok_s": 0.4 * TRUTH.tok_s(0)}, *SWEEP[1:]]
    model = fitted(slow)
    assert len(model.warnings) >= 2
    assert all("plain" in w for w in model.warnings)
    for r in SWEEP[1:]:
        p = model.predict(r["num_steps"], acceptance_length=r["acceptance_length"])
        assert p.tok_s == pytest.approx(r["tok_s"], rel=0.04)
    low, high = model.predict(0).interval(0.95)
    assert low < TRUTH.tok_s(0) < high


def test_a_speedup_is_judged_at_its_own_batch_and_context() -> None:
    rows = [plain(100.0, context_tokens=1024), plain(700.0, batch=8, context_tokens=1024)]
    assert fitted([*rows, spec(3, 600.0, 3.0, context_tokens=9000)]).warnings == ()
    assert fitted([*rows, spec(3, 600.0, 3.0, batch=2, context_tokens=1024)]).warnings == ()
    assert len(fitted([*rows, spec(3, 600.0, 3.0, context_tokens=1024)]).warnings) == 1
    assert len(fitted([*rows, spec(3, 3000.0, 3.0, batch=8, context_tokens=1024)]).warnings) == 1


def test_the_speedup_is_over_the_best_setting() -> None:
    """Over a slow setting's plain rate it would be impossible; over the best it is not."""
    rows = [plain(40.0), plain(100.0, comm="ring"), spec(3, 190.0, 2.4)]
    assert fitted(rows, comm={"ring": {}}).warnings == ()
    assert len(fitted([rows[0], rows[2]]).warnings) == 1


@pytest.mark.parametrize(
    "entry",
    [
        {"num_steps": 3, "acceptance_length": 6.0},
        {"num_steps": 3, "acceptance_length": 1e9, "sd": 0.0},
        {"num_steps": 6, "topk": 4, "num_draft_tokens": 5, "acceptance_length": 6.0},
    ],
)
def test_an_acceptance_entry_that_cannot_be_is_warned_of_and_does_not_decide(entry: dict[str, Any]) -> None:
    model = fitted(SWEEP, acceptance=[entry])
    assert any("acceptance[0]" in w and "acceptance_length" in w for w in model.warnings)
    np.testing.assert_allclose(
        model.predict(np.arange(8)).acceptance_length, HONEST.predict(np.arange(8)).acceptance_length, rtol=0.05
    )
    assert TRUTH.tok_s(sm.optimize(model, max_steps=7).best.num_steps) > 0.985 * SPEEDS.max()


def test_where_only_impossible_rows_are_there_is_still_an_answer() -> None:
    rows = [spec(3, 1e9, 40.0), plain(1e-6)]
    model = fitted(rows)
    assert model.warnings
    optimum = sm.optimize(model)
    assert np.isfinite([optimum.best.tok_s, *optimum.best.tok_s_interval]).all()
    cases.identities(model.predict(np.arange(9)), 1)


def test_contradicting_rows_widen_the_interval() -> None:
    """Two plain rates of one setting, far apart: neither is believed alone."""
    calm = fitted([plain(100.0), plain(101.0), spec(3, 180.0, 2.4)])
    torn = fitted([plain(60.0), plain(160.0), spec(3, 180.0, 2.4)])
    widths = [np.diff(np.log(m.predict(0).interval()))[0] for m in (calm, torn)]
    assert widths[1] > 4.0 * widths[0]
    low, high = torn.predict(0).interval()
    assert low < 80.0
    assert high > 125.0


def test_one_wild_row_among_many_does_not_hurt_the_others() -> None:
    """A wrong rate that physics allows: the noise scale rises, the honest rows still stand."""
    wild = {**SWEEP[4], "tok_s": 0.6 * SWEEP[4]["tok_s"]}
    model = fitted([*SWEEP[:4], wild, SWEEP[5]])
    for r in (*SWEEP[:4], SWEEP[5]):
        p = model.predict(r["num_steps"], acceptance_length=r.get("acceptance_length"))
        low, high = p.interval(0.95)
        assert low < r["tok_s"] < high
