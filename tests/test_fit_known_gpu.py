"""What the data sheet of a GPU says of passes larger than any that was measured."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from specmodel.gpus import datasheet

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
TABLE = [{"tokens": n, "time_ms": 10.0 + 0.005 * n} for n in (1, 4, 8, 16, 64)]


def verify(tokens: int, gpu: str | None, **model: int) -> tuple[float, float]:
    """Predicted time of a pass, and the upper over the lower end of its interval."""
    system = {} if gpu is None else {"gpu": gpu}
    fitted = cases.fitted(verify=TABLE, system=system, model=model)
    middle, low, high = fitted.interval_of("verify_ms", tokens - 1, 1)
    return middle, high / low


@pytest.mark.parametrize(
    ("gpu", "tokens"), [("NVIDIA A100-SXM4-80GB", 153), ("NVIDIA H100 80GB HBM3", 295), ("H200", 206), ("B200", 281)]
)
def test_ridges_as_published(gpu: str, tokens: float) -> None:
    sheet = datasheet(gpu)
    assert sheet is not None
    assert sheet.flops_per_ms / sheet.bandwidth_bytes_per_ms == pytest.approx(tokens, abs=0.6)


def test_large_passes_become_slow_where_the_gpu_does() -> None:
    assert verify(1024, "H200")[0] > verify(1024, "H100")[0] > verify(64, "H100")[0]
    assert verify(1024, "H100")[1] < verify(1024, None)[1]


def test_what_is_measured_does_not_depend_on_the_name_of_the_gpu() -> None:
    assert verify(16, "H200")[0] == pytest.approx(verify(16, None)[0], rel=0.005)


@pytest.mark.parametrize(
    ("gpu", "model"), [("an accelerator", {}), ("H200", {"num_experts": 64, "experts_per_token": 4})]
)
def test_of_unknown_gpus_and_mixtures_of_experts_nothing_more_is_expected(gpu: str, model: dict[str, int]) -> None:
    np.testing.assert_allclose(verify(1024, gpu, **model), verify(1024, None, **model))
