"""What the measurements say beside their times: steps of kernels, gaps, cutoffs that are crossed, contradictions."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

ACCEPTING = [{"num_steps": 8, "conditional": [0.9] * 8}]


def warned(times: dict[int, float], *, steps: int = 8, **more: Any) -> tuple[Any, str]:
    """The optimum over a table of verify passes, and its warnings as one text."""
    verify = [{"tokens": n, "time_ms": t, **more} for n, t in times.items()]
    draft = [{"num_steps": k, "time_ms": 0.1 * k} for k in range(1, 9)]
    optimum = sm.optimize(fitted(verify=verify, draft=draft, acceptance=ACCEPTING), max_steps=steps)
    return optimum, " | ".join(optimum.warnings)


SMOOTH = {n: 10.0 + 0.05 * n for n in range(1, 10)}


def test_a_smooth_table_says_nothing() -> None:
    _, text = warned(SMOOTH)
    assert not any(word in text for word in ("cost", "step,", "not measured under"))


def test_a_size_that_is_cheaper_than_a_smaller_one_is_said() -> None:
    optimum, text = warned({**SMOOTH, 8: 9.2})
    assert optimum.best.num_steps >= 7
    assert "8 tokens cost 11% less than 7: measured, kept" in text


def test_a_step_up_is_said() -> None:
    _, text = warned({n: t * (1.0 if n < 8 else 1.2) for n, t in SMOOTH.items()})
    assert "8 tokens cost 21% more than 7: a step" in text


def test_a_difference_within_the_noise_is_no_step() -> None:
    times = {n: t * (1.0 if n != 8 else 0.95) for n, t in SMOOTH.items()}
    assert "cost" not in warned(times, sd_ms=1.0, samples=1)[1]
    assert "cost" in warned(times)[1]


def test_sizes_that_were_not_measured_are_named() -> None:
    optimum, text = warned({n: t for n, t in SMOOTH.items() if n not in (4, 5, 6)}, steps=4)
    assert optimum.best.num_steps == 4
    assert "verify passes of 4 to 6 tokens were not measured under default" in text
    _, text = warned({n: t for n, t in SMOOTH.items() if n != 5}, steps=4)
    assert "verify passes of 5 tokens were not measured" in text


def reduced(at_bytes: int, factor: float) -> list[dict[str, Any]]:
    return [
        {"size_bytes": 2**i, "time_ms": (0.01 + 2**i * 1e-8) * (factor if 2**i > at_bytes else 1.0)}
        for i in range(10, 20)
    ]


@pytest.mark.parametrize(("factor", "word"), [(2.0, "slower"), (0.5, "faster")])
def test_a_cutoff_between_plain_decoding_and_the_verify_pass_is_said(factor: float, word: str) -> None:
    """Messages of 8 KiB a token: nine tokens cross a cutoff at 32 KiB, and at 1 KiB or 512 KiB none does."""
    model = {"hidden_size": 4096, "num_layers": 8}
    verify = [{"tokens": n, "time_ms": t} for n, t in SMOOTH.items()]

    def text(at_bytes: int) -> str:
        m = fitted(verify=verify, allreduce=reduced(at_bytes, factor), acceptance=ACCEPTING, model=model)
        optimum = sm.optimize(m, max_steps=8)
        assert optimum.best.num_steps >= 5
        return " | ".join(optimum.warnings)

    assert "past a cutoff of default at 32 KiB" in text(2**15)
    assert word in text(2**15)
    assert "cutoff" not in text(2**18)


def test_acceptance_that_depends_on_the_batch_is_said() -> None:
    rows = [plain(), spec(3, 170.0, 2.4), spec(3, 520.0, 2.9, batch=4)]
    [notice] = fitted(rows).warnings
    assert "acceptance of workload default at 3 steps" in notice
    assert "2.4 (batch 1" in notice
    assert "2.9 (batch 4" in notice
    assert fitted([*rows[:2], spec(3, 520.0, 2.45, batch=4)]).warnings == ()
    assert fitted([*rows[:2], spec(3, 230.0, 2.9, workload="code", batch=4)]).warnings == ()
    tree = [spec(3, 100.0 * b, 2.0 + 0.1 * b, batch=b, topk=2, num_draft_tokens=6) for b in (1, 8)]
    assert any("tree 3x2x6" in w for w in fitted(tree).warnings)


def test_repeats_at_one_place_are_no_contradiction() -> None:
    assert fitted([plain(), spec(3, 170.0, 2.2), spec(3, 180.0, 2.6)]).warnings == ()
