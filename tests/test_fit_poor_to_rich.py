"""From nothing to a full file: always an answer, as sure as what it rests on, and it says what that is."""

from __future__ import annotations

import itertools
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
ACCEPTANCE = [{"num_steps": 5, "drafts": 4000, "accepted_per_position": [3200, 2368, 1657, 1110, 721]}]
TABLES = cases.tables(TRUTH, range(6))


def run(num_steps: int, *, blind: bool = False) -> dict[str, Any]:
    return spec(num_steps, TRUTH.tok_s(num_steps), None if blind or not num_steps else TRUTH.length(num_steps))


# From poor to rich: each has what the one before it in its line has, and more.
FILES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "only a prefill": {"prefill": [{"tokens": 1000, "time_ms": 10.0}]},
    "only an all-reduce": {"allreduce": [{"size_bytes": 1000, "time_ms": 0.01}]},
    "only drafts": {"draft": TABLES["draft"]},
    "only acceptance": {"acceptance": ACCEPTANCE},
    "only one pass": {"verify": TABLES["verify"][:1]},
    "only a bound": {"cycles": [{"num_steps": 3, "tok_s_at_most": 200.0}]},
    "only plain": {"cycles": [run(0)]},
    "plain and a blind run": {"cycles": [run(0), run(3, blind=True)]},
    "plain and one run": {"cycles": [run(0), run(3)]},
    "plain and two runs": {"cycles": [run(0), run(1), run(5)]},
    "a sweep": {"cycles": [run(k) for k in range(6)]},
    "a sweep and counts": {"cycles": [run(k) for k in range(6)], "acceptance": ACCEPTANCE},
    "only passes": {"verify": TABLES["verify"]},
    "passes and drafts": TABLES,
    "passes, drafts and acceptance": {**TABLES, "acceptance": ACCEPTANCE},
    "everything": {**TABLES, "cycles": [run(k) for k in range(6)], "acceptance": ACCEPTANCE},
}
MODELS = {name: fitted(**sections) for name, sections in FILES.items()}


@pytest.mark.parametrize("name", FILES)
def test_there_is_always_an_answer(name: str) -> None:
    model = MODELS[name]
    cases.identities(model.predict(np.arange(15), [[1], [64]]), [[1], [64]])
    optimum = sm.optimize(model)
    best = optimum.best
    assert all(p.converged for p in model.posteriors)
    assert np.isfinite([best.tok_s, *best.tok_s_interval, best.expected_regret, optimum.plain.tok_s]).all()
    assert best.tok_s_interval[0] < best.tok_s < best.tok_s_interval[1]
    assert 0.0 <= optimum.probability_best <= 1.0
    assert sum(c.probability_best for c in optimum.table) == pytest.approx(1.0)
    assert all(np.isfinite([c.speedup, *c.interval]).all() for c in optimum.ceilings.values())
    model.summary()


LINES = (
    ("only plain", "plain and one run", "plain and two runs", "a sweep", "a sweep and counts"),
    ("nothing", "only one pass", "passes and drafts", "passes, drafts and acceptance", "everything"),
    ("plain and a blind run", "plain and one run", "a sweep"),
    ("only drafts", "passes and drafts"),
    ("nothing", "only acceptance", "passes, drafts and acceptance"),
    ("only a bound", "plain and one run"),
)


@pytest.mark.parametrize(("poor", "rich"), sorted({pair for line in LINES for pair in itertools.pairwise(line)}))
def test_more_is_known_of_a_richer_file(poor: str, rich: str) -> None:
    """Over one to eight steps the interval of the richer file is narrower, on the whole."""
    widths = []
    for name in (poor, rich):
        low, high = MODELS[name].predict(np.arange(1, 9)).interval()
        widths.append(float(np.mean(np.log(high / low))))
    assert widths[1] < 1.02 * widths[0]


def test_what_is_hardly_known_is_wide() -> None:
    """Three times up or down where no time was measured; tens of percent where no acceptance was."""
    for name in ("nothing", "only a prefill", "only an all-reduce", "only acceptance", "only drafts"):
        low, high = MODELS[name].predict(3).interval()
        assert high / low > 9.0
    for name in ("only plain", "only one pass", "only passes", "only a bound"):
        low, high = MODELS[name].predict(5).interval()
        assert high / low > 1.3


def test_what_is_known_is_narrow() -> None:
    for name in ("a sweep", "a sweep and counts", "everything"):
        low, high = MODELS[name].predict(np.arange(6)).interval()
        assert np.all(high / low < 1.1)
        truth = np.array([TRUTH.tok_s(k) for k in range(6)])
        assert np.all((low < truth) & (truth < high))


@pytest.mark.parametrize("name", FILES)
def test_the_truth_is_inside(name: str) -> None:
    """One plain deployment: every interval down to the poorest file contains what it would measure."""
    low, high = MODELS[name].predict(np.arange(8)).interval(0.98)
    truth = np.array([TRUTH.tok_s(k) for k in range(8)])
    assert np.all((low < truth) & (truth < high))


@pytest.mark.parametrize("name", FILES)
def test_it_says_what_it_rests_on(name: str) -> None:
    sections = FILES[name]
    optimum = sm.optimize(MODELS[name])
    said = " ".join(optimum.warnings)
    timed = "verify" in sections or any("tok_s" in r for r in sections.get("cycles", ()))
    assert ("guess" in said) == (not timed)
    has_plain = any(r["num_steps"] == 0 for r in sections.get("cycles", ()))
    assert ("speedup is over its prediction" in said) == (not has_plain)
    assert optimum.plain.measured == has_plain
    best = optimum.best
    if (
        best.num_steps
        and "acceptance" not in sections
        and not any("acceptance_length" in r for r in sections.get("cycles", ()))
    ):
        assert any("acceptance" in text for text in optimum.unmeasured)
    if best.num_steps and "draft" not in sections and not best.measured:
        assert any("draft of" in text for text in optimum.unmeasured)
    assert optimum.measure_next is not None or optimum.stop_reason


def test_plain_and_one_run_says_that_a_second_run_would_help() -> None:
    optimum = sm.optimize(MODELS["plain and one run"])
    assert optimum.measure_next is not None
    assert optimum.measure_next.kind == "cycles"
    assert optimum.measure_next.row["num_steps"] not in (0, 3)


def test_a_fixed_tax_and_a_steep_slope_are_both_kept_until_data_decide() -> None:
    """One slow point has two explanations; a second point at another length takes one of them away."""
    slow = [plain(), spec(3, 75.0, 2.4)]
    one = fitted(slow)
    first_step, last_step = (np.diff(np.log(one.predict(k, acceptance_length=2.0).interval()))[0] for k in (1, 9))
    assert first_step > 0.15
    assert last_step > 0.15
    taxed = fitted([*slow, spec(8, 75.0 * 3.4 / 2.4, 3.4)])  # as slow a cycle at eight steps: a fixed cost
    steep = fitted([*slow, spec(1, 100.0 * 1.6 / 1.7, 1.6)])  # a first step that costs what steps cost
    cost = [m.predict(1, acceptance_length=2.0).cycle_ms for m in (taxed, steep)]
    assert cost[0] > 1.2 * cost[1]
    cost = [m.predict(8, acceptance_length=2.0).cycle_ms for m in (taxed, steep)]
    assert cost[1] > 1.2 * cost[0]


def test_a_prefill_informs_nothing_of_decoding() -> None:
    rows = [run(0), run(3)]
    without, with_prefill = fitted(rows), fitted(rows, prefill=[{"tokens": 4096, "time_ms": 500.0}])
    assert list(with_prefill.predict(np.arange(5)).tok_s) == list(without.predict(np.arange(5)).tok_s)


def test_validation_rows_are_never_looked_at() -> None:
    rows = [run(0), run(3)]
    checked = fitted(rows, validation={"cycles": [spec(5, 1.0, 1.1), plain(1.0)]})
    assert list(checked.predict(np.arange(5)).tok_s) == list(fitted(rows).predict(np.arange(5)).tok_s)
    assert checked.measured == fitted(rows).measured


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp", "draft_model", "ngram", "parallel", "none", None])
def test_every_kind_of_drafter_has_a_start(method: str | None) -> None:
    """With data all kinds agree; without, a parallel drafter is flat in its steps and n-gram is nearly free."""
    section = {} if method is None else {"model": {"method": method}}
    rich = fitted([run(k) for k in range(6)], acceptance=ACCEPTANCE, **section)
    np.testing.assert_allclose(rich.predict(np.arange(6)).tok_s, [TRUTH.tok_s(k) for k in range(6)], rtol=0.03)
    poor = fitted([run(0)], **section)
    draft = poor.predict([1, 8]).draft_ms
    cases.identities(poor.predict(np.arange(9)), 1)
    if method == "parallel":
        assert draft[1] < 3.0 * draft[0]
    elif method == "ngram":
        assert draft[1] < 0.2 * poor.predict(0).cycle_ms
    else:
        assert draft[1] > 4.0 * draft[0]
