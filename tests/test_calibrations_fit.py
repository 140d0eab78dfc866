"""Every committed calibration loads, fits, predicts and optimises; what must hold of any answer holds of each."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))


def test_there_are_many() -> None:
    assert len(cases.COMMITTED) >= 72
    assert cases.SEED in cases.COMMITTED


@pytest.mark.parametrize("path", cases.COMMITTED, ids=lambda path: path.stem)
def test_fits_predicts_and_optimises(path: Path) -> None:
    model = cases.committed(path)
    calibration = model.calibration
    # The search ended at a mode; modes are weighted by their evidence, the likeliest first.
    assert all(p.converged for p in model.posteriors)
    assert sum(model.weights) == pytest.approx(1.0)
    assert list(model.weights) == sorted(model.weights, reverse=True)
    evidence = np.array([p.log_evidence for p in model.posteriors])
    np.testing.assert_allclose(np.diff(np.log(model.weights)), np.diff(evidence), atol=1e-6)

    steps, batches = np.arange(17), np.array(model.measured.batches)[:, None]
    workloads = {c.workload for c in calibration.measurements.cycles} | {a.workload for a in calibration.acceptance}
    calls = [(comm, None) for comm in model.deployment.structure.comm_names]
    for comm, workload in [*calls, *(("default", w) for w in sorted(workloads))]:
        p = model.predict(steps, batches, comm, workload=workload)
        cases.identities(p, batches)
        assert np.all(p.acceptance_length <= steps + 1 + 1e-9)
    assert not model.predict(0, batches[:, 0]).extrapolated.any()

    optimum = sm.optimize(model)
    best = optimum.best
    assert best in optimum.table
    assert best not in optimum.ties
    assert sum(c.probability_best for c in optimum.table) == pytest.approx(1.0)
    assert best.expected_regret <= min(c.expected_regret for c in optimum.table) + 0.005 + 1e-12
    assert np.isfinite([c.expected_regret for c in optimum.table]).all()
    assert optimum.plain.tok_s > 0.0
    assert best.speedup == pytest.approx(best.tok_s / optimum.plain.tok_s, rel=1e-6)
    for ceiling in optimum.ceilings.values():
        assert ceiling.interval[0] <= ceiling.speedup <= ceiling.interval[1]
        assert 1.0 <= ceiling.speedup < np.inf
    assert bool(optimum.measure_next) != bool(optimum.stop_reason)


@pytest.mark.parametrize("path", cases.COMMITTED, ids=lambda path: path.stem)
def test_measured_rows_are_reproduced_unless_warned_of(path: Path) -> None:
    """By their own acceptance lengths and at their own places: most of a file's rates lie in the 90 % interval."""
    model = cases.committed(path)
    places: dict[tuple[Any, ...], list[Any]] = {}
    for row in model.calibration.measurements.cycles:
        if row.tok_s and row.speculating == (row.num_steps > 0) and row.mean_draft_tokens is None:
            sure = row.num_steps == 0 or row.acceptance_length is not None
            key = (row.comm, row.workload, row.context_tokens, row.cuda_graph, row.verify_cuda_graph, sure)
            places.setdefault(key, []).append(row)
    inside, total = 0, 0
    for (comm, workload, context, graph, verify_graph, sure), rows in places.items():
        K, batch, topk, tokens, tok_s, length = np.array(
            [(r.num_steps, r.batch, r.topk, r.verify_tokens, r.tok_s, r.acceptance_length or 1.0) for r in rows]
        ).T
        own = length if sure else None
        low, high = model.predict(
            K, batch, comm, topk, tokens, context, workload, graph, verify_graph, acceptance_length=own
        ).interval(0.9)
        inside += np.sum((low <= tok_s) & (tok_s <= high))
        total += len(rows)
    assert inside >= 0.8 * total
