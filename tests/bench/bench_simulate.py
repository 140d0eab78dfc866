"""Speed of the simulator on one core, beside a plain Python loop and the closed form; and a large sweep.

    python tests/bench/bench_simulate.py                 request-rounds a second, and how time grows
    python tests/bench/bench_simulate.py --sweep         1,000 scenarios x 16 seeds of 500 requests as well

Processor time of this process (the machine may have other work); the sweep is timed by the clock, and its memory is the
most that this process and its workers held. A request-round is one request in one cycle. Nothing passes or fails.
"""

from __future__ import annotations

import os

os.environ |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import argparse
import copy
import dataclasses
import resource
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import specmodel as sm
from specmodel.acceptance import cycles_for_tokens
from specmodel.closed_forms import constant_acceptance_length, constant_acceptance_variance
from specmodel.simulate import Scenario
from specmodel.simulate.prepare import prepared
from specmodel.simulate.rounds import Block, run_block
from specmodel.simulate.run import _block, _streams
from specmodel.simulate.sweep import sweep

TESTS = Path(__file__).resolve().parents[1]
CALIBRATION = TESTS.parent / "calibrations" / "measured" / "h200_dense8b_ctx1024.yaml"
reference = runpy.run_path(str(TESTS / "simulate_reference.py"))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def lanes(model: Any, **options: Any) -> Block:
    ready = [prepared(model, Scenario(comm="default", **options), {})]
    return _block(model, ready, [_streams(ready[0])])


def timed(block: Block, repeats: int = 3) -> tuple[float, int]:
    """Best processor time of a run and its request-rounds."""
    best, rounds = np.inf, 0
    for _ in range(repeats):
        fresh = dataclasses.replace(block, arrival_ms=block.arrival_ms.copy(), adaptive=copy.deepcopy(block.adaptive))
        start = time.process_time()
        out = run_block(fresh)
        best = min(best, time.process_time() - start)
        rounds = int(out.request_rounds.sum())
    return best, rounds


def rates(model: Any) -> None:
    base: dict[str, Any] = {"arrivals": "closed:64", "seeds": 64, "requests": 512}
    kinds = {
        "3 steps": {"policies": ("fixed:3",)},
        "3 steps, acceptance that wanders": {"policies": ("fixed:3",), "acceptance_wander": 0.05},
        "schedule": {"policies": ("schedule",)},
        "adaptive": {"policies": ("adaptive",)},
        "optimal": {"policies": ("optimal",)},
        "oracle": {"policies": ("oracle",)},
        "3 steps, poisson:60, at most 64": {"policies": ("fixed:3",), "arrivals": "poisson:60", "max_batch": 64},
        "3 steps, batch 8": {"policies": ("fixed:3",), "arrivals": "closed:8", "requests": 128},
        "3 steps, batch 1": {"policies": ("fixed:3",), "arrivals": "closed:1", "requests": 16},
    }
    say("64 seeds, one core, outputs of 256 tokens        million request-rounds a second (aim at batch 64: 5)")
    for name, more in kinds.items():
        seconds, rounds = timed(lanes(model, **(base | more)))
        say(f"  {name:45} {rounds / seconds / 1e6:8.2f}   ({rounds / 1e6:.2f} million in {seconds:.2f} s)")


def against_python(model: Any) -> None:
    block = lanes(model, arrivals="closed:64", seeds=64, requests=128, policies=("fixed:3",))
    plain = dataclasses.replace(block, arrival_ms=block.arrival_ms.copy())
    seconds, rounds = timed(block)
    start = time.process_time()
    found = [reference["run_lane"](plain, lane, []) for lane in range(2)]
    loop = time.process_time() - start
    loop_rounds = sum(sum(lane["cycles"]) for lane in found)
    ratio = (rounds / seconds) / (loop_rounds / loop)
    say(f"plain Python loop, the same requests {loop_rounds / loop / 1e6:21.3f}   ({ratio:.0f} times slower)")


def against_closed_form() -> None:
    """Mean cycles of an output: the formula, and how long it takes to reach its accuracy by simulation."""
    cases = runpy.run_path(str(TESTS / "simulate_cases.py"))
    start = time.process_time()
    mean, variance = (float(f(0.8, 5)) for f in (constant_acceptance_length, constant_acceptance_variance))
    expected = cycles_for_tokens(128, mean, variance)
    formula = time.process_time() - start
    block = cases["block"](
        cases["constant"](0.8, 5), cases["linear_costs"](0.05, 5, 64), num_steps=5, seeds=64, requests=512, batch=64,
        clients=64,
    )  # fmt: skip
    start = time.process_time()
    cycles = run_block(block).cycles
    seconds = time.process_time() - start
    error = cycles.std() / np.sqrt(cycles.size)
    say(
        f"cycles of 128 tokens: formula {expected:.4f} in {1e6 * formula:.0f} us, simulated {cycles.mean():.4f} "
        f"+- {error:.4f} in {seconds:.2f} s"
    )


def growth(model: Any) -> None:
    say("time against work (closed:32, 3 steps): linear is a constant ratio")
    for seeds, requests in ((16, 200), (32, 200), (64, 200), (64, 400), (64, 800), (128, 800)):
        seconds, rounds = timed(
            lanes(model, arrivals="closed:32", seeds=seeds, requests=requests, policies=("fixed:3",)), 1
        )
        say(f"  {seeds:4} seeds x {requests:4} requests {seconds:8.2f} s {1e9 * seconds / rounds:7.1f} ns each")


def large_sweep(model: Any, workers: int, scenarios: int) -> None:
    batches = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96)
    grid: dict[str, Any] = {
        "arrivals": [f"closed:{b}" for b in batches],
        "policy": ["plain", "fixed:2", "fixed:3", "schedule", "adaptive"],
        "output_tokens": [64, 128, "geometric:128", "uniform:64-256", 256],
        "prompt_tokens": [512, 960, "uniform:200-1800", "lognormal:900:0.5"],
        "requests": 500,
        "seeds": 16,
        "max_steps": 6,
        "comm": "default",
    }
    if scenarios < 1000:
        grid["arrivals"] = grid["arrivals"][: max(scenarios // 100, 1)]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        count = sweep(model, grid, Path(folder) / "a.jsonl", workers=workers)
        seconds = time.perf_counter() - start
        size = (Path(folder) / "a.jsonl").stat().st_size
    own, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    busy = theirs.ru_utime + theirs.ru_stime
    memory = (own.ru_maxrss + workers * theirs.ru_maxrss) / 2**20
    say(
        f"sweep: {count.total} scenarios x 16 seeds x 500 requests, {workers} processes: {seconds:.0f} s by the clock, "
        f"{busy:.0f} s of processor (aim 600 s on two cores), {memory:.2f} GiB at most (aim 2), {size / 2**20:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="run the large sweep too: some minutes")
    parser.add_argument("--scenarios", type=int, default=1000, help="fewer for a quick look")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    model = sm.fit(sm.load(CALIBRATION))
    rates(model)
    against_python(model)
    against_closed_form()
    growth(model)
    if args.sweep:
        large_sweep(model, args.workers, args.scenarios)


if __name__ == "__main__":
    main()
