"""Times of the estimator on one core: fits, predictions over large grids, decisions.

    python tests/bench/bench_model.py

The best of several repeats of each beside what is aimed at. Nothing passes or fails: the machine is whatever it is.
"""

from __future__ import annotations

import os

# Many small factorisations: threads only get in each other's way. Before numpy loads.
os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).resolve().parents[1] / "estimator_cases.py")))


def best_ms(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def line(what: str, ms: float, aim_ms: float | None = None) -> None:
    aim = "" if aim_ms is None else f"   aim {aim_ms:>7.0f} ms"
    sys.stdout.write(f"{what:<72}{ms:>10.1f} ms{aim}\n")


def sweep(rows: int, **sections: Any) -> Any:
    """About so many rows of one deployment: steps, batches, settings, each with its acceptance length."""
    truth = cases.Truth(comm={"default": (0.0, 0.0), "ring": (0.1, 0.01)})
    places = [(k, b, c) for c in truth.comm for k in (0, 1, 2, 3, 4, 5, 6, 7) for b in np.geomspace(1, 64, 40).round(1)]
    step = max(len(places) // max(rows // 2, 1), 1)
    measured = cases.measured_cycles(truth, np.random.default_rng(0), places[::step])
    count = cases.counted(truth, np.random.default_rng(0), 6, 4000, 80)
    return cases.calibration(measured, acceptance=[count], **{**truth.sections(), **sections})


def blind(rows: int) -> Any:
    """As many observations as rows: rates only."""
    truth = cases.Truth(comm={"default": (0.0, 0.0), "ring": (0.1, 0.01)})
    places = [(k, b, c) for c in truth.comm for k in range(7) for b in np.geomspace(1, 64, max(rows // 14, 1)).round(2)]
    measured = cases.measured_cycles(truth, np.random.default_rng(0), places, lengths=False)
    return cases.calibration(measured, **truth.sections())


def main() -> None:
    seed = sm.load(cases.SEED)
    files = {
        "seed file": (seed, 20, 20.0),
        "70 observations": (blind(70), 10, 20.0),
        "70 observations, experts": (sweep(110, model={"num_experts": 128, "experts_per_token": 8}), 10, 20.0),
        "specbundle_ling_flash (trees of seven workloads)": (
            sm.load(cases.CALIBRATIONS / "field" / "specbundle_ling_flash.yaml"),
            5,
            None,
        ),
        "h200x2_tp2_dense (complete tables of six settings)": (
            sm.load(cases.CALIBRATIONS / "measured" / "h200x2_tp2_dense.yaml"),
            5,
            None,
        ),
        "1,000 observations": (blind(1000), 3, 500.0),
    }
    models = {}
    for name, (calibration, repeats, aim_ms) in files.items():
        models[name] = sm.fit(calibration)
        text = f"fit: {name} ({len(models[name].observations)} observations)"
        line(text, best_ms(lambda: sm.fit(calibration), repeats), aim_ms)  # noqa: B023  (called at once)
    line("optimize: seed file", best_ms(lambda: sm.optimize(models["seed file"]), 20))
    line("optimize: 1,000 observations", best_ms(lambda: sm.optimize(models["1,000 observations"]), 5))

    steps, batch, context = np.meshgrid(np.arange(10), np.arange(1, 101), np.arange(1000) * 64, sparse=True)
    grids = {
        "1e6 configurations (steps x batch x context)": {"num_steps": steps, "batch": batch, "context_tokens": context},
        "1e6 configurations (steps x fractional batch)": {
            "num_steps": np.arange(10)[:, None],
            "batch": np.geomspace(1, 128, 100_000),
        },
    }
    for grid, arguments in grids.items():
        for name in ("seed file", "70 observations", "1,000 observations"):
            model = models[name]
            aims = (500.0, 2000.0) if name != "1,000 observations" else (None, None)
            line(f"predict: {grid}, {name}", best_ms(lambda: model.predict(**arguments), 3), aims[0])  # noqa: B023
            if name != "1,000 observations":
                both = best_ms(lambda: model.predict(**arguments).interval(), 1)  # noqa: B023
                line("  ... with intervals", both, aims[1])


if __name__ == "__main__":
    main()
