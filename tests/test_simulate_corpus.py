"""Closed loops at the batches that were published: equal to the model's steady state, and near what was measured."""

import math
from pathlib import Path

import numpy as np
import pytest

import specmodel as sm
from specmodel.acceptance import acceptance_variance, cycles_for_tokens
from specmodel.simulate import Scenario, simulate_all
from specmodel.simulate.costs import survival_of

CALIBRATIONS = Path(__file__).parent.parent / "calibrations"
TOKENS = 160
# Every published sweep over three batches or more of plain decoding or chains: its file, and how far the fitted model
# may be from a row at most (the median over all rows is held far lower).
SWEEPS = {
    "field/lmsys_dsv3_mtp_mi300x8": 0.10,
    "field/sglang_22246_qwen3_235b": 0.10,
    "field/sglangjax_1632_qwen3_8b_tpu7x_tp8": 0.15,
    "field/angelslim_163_qwen3_30b_a3b_h100x4": 0.15,
    "field/specforge_339_qwen3_30b_a3b_h100x2": 0.15,
    "measured/h200_dense8b_ctx1024": 0.15,
}


@pytest.mark.parametrize("name", SWEEPS)
def test_a_closed_loop_is_the_steady_state_and_near_what_was_measured(name: str) -> None:
    model = sm.fit(sm.load(CALIBRATIONS / f"{name}.yaml"))
    cal = model.calibration
    rows = [r for r in (*cal.measurements.cycles, *cal.validation.cycles) if r.topk == 1 and r.tok_s_at_most is None]
    steps_at: dict[int, set[int]] = {}
    for row in rows:
        if row.batch == int(row.batch):
            steps_at.setdefault(int(row.batch), set()).add(row.num_steps)
    assert len(steps_at) >= 3
    context = next((r.context_tokens for r in rows if r.context_tokens), 512)
    scenarios = [
        Scenario(
            arrivals=f"closed:{batch}",
            policies=tuple(f"fixed:{k}" for k in sorted(steps)),
            output_tokens=str(TOKENS),
            prompt_tokens=str(max(context - TOKENS // 2, 1)),
            requests=max(6 * batch, 24),
            seeds=4,
            comm="default",
            acceptance_spread=0.0,
        )
        for batch, steps in steps_at.items()
    ]
    answers = {a.scenario.max_batch: a for a in simulate_all(model, scenarios)}
    workload = next(iter(model.layout.workloads))
    errors = []
    for row in rows:
        if row.batch != int(row.batch):
            continue
        batch, k = int(row.batch), row.num_steps
        simulated = answers[batch]["plain" if k == 0 else f"fixed:{k}"]
        p = model.predict(k, batch, context_tokens=row.context_tokens)
        curve = survival_of(model, workload, k)
        # Outputs end: the tokens after the first take this many cycles, the last of them cut.
        cycles = cycles_for_tokens(TOKENS - 1, float(p.acceptance_length), float(acceptance_variance(curve)))
        expected = 1000.0 * batch * TOKENS / (cycles * float(p.cycle_ms))
        values = simulated.seed_values["tok_s"]
        error = 4.0 * values.std(ddof=1) / math.sqrt(len(values))
        assert simulated.tok_s.mean == pytest.approx(expected, abs=error + 0.012 * expected), (batch, k)
        # To what was measured: without the ends of outputs, which the measured runs had elsewhere or not at all.
        length = row.acceptance_length if row.cycle_ms is not None and row.acceptance_length else p.acceptance_length
        measured = row.tok_s or (1000.0 * batch / row.tpot_ms if row.tpot_ms else 0.0)
        measured = measured or 1000.0 * batch * float(length) / float(row.cycle_ms or math.nan)
        steady = simulated.tok_s.mean * float(p.tok_s) / expected
        errors.append(abs(math.log(steady * float(length) / float(p.acceptance_length) / measured)))
    assert max(errors) < SWEEPS[name]
    assert float(np.median(errors)) < 0.04
