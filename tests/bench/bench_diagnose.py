"""How long a diagnosis and a report take after the imports: the seed case, and every committed file.

    python tests/bench/bench_diagnose.py

Reading and fitting are timed apart; the limit on the seed is one second for all three.
"""

import statistics
import sys
import time
from pathlib import Path

import specmodel as sm

ROOT = Path(__file__).parents[2]
SEED = ROOT / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
LIMIT_MS = 1000.0


def timed_ms(path: Path) -> tuple[float, float, float, float]:
    """Reading, fitting, diagnosing and reporting one file."""
    start = time.perf_counter()
    cal = sm.load(path)
    read = time.perf_counter()
    model = sm.fit(cal)
    fitted = time.perf_counter()
    sm.diagnose(model)
    diagnosed = time.perf_counter()
    sm.report(model)
    done = time.perf_counter()
    return 1e3 * (read - start), 1e3 * (fitted - read), 1e3 * (diagnosed - fitted), 1e3 * (done - diagnosed)


def main() -> int:
    """Print the times; 1 where the seed takes longer than the limit."""
    timed_ms(SEED)  # imports
    seed = [timed_ms(SEED) for _ in range(5)]
    read_ms, fit_ms, diagnose_ms, report_ms = (statistics.median(each) for each in zip(*seed, strict=True))
    total_ms = read_ms + fit_ms + diagnose_ms
    sys.stdout.write(f"seed: read {read_ms:.0f} ms, fit {fit_ms:.0f} ms, diagnose {diagnose_ms:.0f} ms")
    sys.stdout.write(f", report {report_ms:.0f} ms\n")
    taken_ms = {path.stem: timed_ms(path)[2:] for path in sorted((ROOT / "calibrations").glob("*/*.yaml"))}
    for i, what in enumerate(("diagnose", "report")):
        slowest = max(taken_ms, key=lambda name: taken_ms[name][i])
        middle_ms = statistics.median(each[i] for each in taken_ms.values())
        sys.stdout.write(f"{what}: {len(taken_ms)} files, median {middle_ms:.0f} ms")
        sys.stdout.write(f", {slowest} {taken_ms[slowest][i]:.0f} ms\n")
    return int(total_ms > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())
