"""Files of many workloads and settings: the same numbers by the quick ways, and times that do not run away."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import specmodel as sm
from specmodel import search

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))


def many(rows: int, workloads: int, settings: int) -> dict:
    random = np.random.default_rng(1)
    cycles = []
    for i in range(rows):
        k, batch = int(random.choice([0, 1, 2, 3, 5, 7])), int(random.choice([1, 2, 4, 8]))
        row = {"num_steps": k, "batch": batch, "comm": f"c{i % settings}", "workload": f"w{i % workloads}"}
        row["tok_s"] = float(batch * (100 + 20 * k) * np.exp(0.01 * random.standard_normal()))
        cycles.append({**row, "acceptance_length": 1.0 + 0.4 * k} if k else row)
    return cases.document(cycles, comm={f"c{i}": {} for i in range(settings)})


def test_zeros_left_out_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cal = sm.from_dict(many(60, 8, 4))
    dense = sm.fit(cal)
    monkeypatch.setattr(search, "MANY_PARAMETERS", 0)
    sparse = sm.fit(cal)
    for a, b in zip(dense.posteriors, sparse.posteriors, strict=True):
        np.testing.assert_allclose(a.theta, b.theta, atol=1e-6)
    for model in (dense, sparse):
        low, high = model.predict(np.arange(8), workload="w1").interval()
        np.testing.assert_allclose(low, dense.predict(np.arange(8), workload="w1").interval()[0], rtol=1e-6)
        np.testing.assert_allclose(high, dense.predict(np.arange(8), workload="w1").interval()[1], rtol=1e-6)


def test_few_points_and_many_have_the_same_intervals() -> None:
    model = cases.fitted([cases.plain(), cases.spec(2, 150.0, 2.1), cases.spec(5, 160.0, 2.9), cases.spec(3, 170.0)])
    few = np.array(model.predict(np.arange(6)).interval())
    grid = np.array(model.predict(np.tile(np.arange(6), 200)).interval())
    np.testing.assert_allclose(grid.reshape(2, 200, 6), np.repeat(few[:, None], 200, axis=1), rtol=1e-9)
    # And of all settings at once those of each.
    optimum = sm.optimize(model, max_steps=5)
    np.testing.assert_allclose([c.tok_s_interval for c in optimum.table], few.T, rtol=1e-9)


@pytest.mark.slow
def test_many_workloads_and_settings_are_answered() -> None:
    cal = sm.from_dict(many(1000, 200, 50))
    model = sm.fit(cal)
    optimum = sm.optimize(model, batch=1)
    assert len({c.comm for c in optimum.table}) == 50
