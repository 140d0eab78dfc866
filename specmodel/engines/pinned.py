"""Acceptance that was set for benchmarking: its times are those of a cycle, its acceptance is nobody's measurement.

SGLang takes SGLANG_SIMULATE_ACC_LEN (before: SIMULATE_ACC_LEN), vLLM `rejection_sample_method: synthetic`, TensorRT-LLM
TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS, llama.cpp --spec-synth-len and --spec-synth-rates. Lines of metrics do not
tell such acceptance from real one; a start-up line, a print of the environment or a command line does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from specmodel.engines.reading import Reading, rounded

__all__ = ["ANCHORS", "pins_acceptance", "without_pinned"]

ANCHORS = {
    "sglang": (b"SIMULATE_ACC_LEN",),
    "trtllm": (b"FORCE_NUM_ACCEPTED_TOKENS",),
    "llamacpp": (b"--spec-synth-", b"SPEC_SYNTH_", b"synthetic "),
}
"""Words that stand for it in a log, by engine; vLLM's stands in its configuration."""

_VALUE = re.compile(rb"[A-Z_]*['\"]?(?:\s*[=:]\s*|,\s*)['\"]?(\d[\d.]*)")
DROPPED = "synthetic acceptance: it was set, not measured"


def pins_acceptance(text: bytes) -> bool:
    """Whether an assignment of a variable, from its name on, sets a value above 0: -1 and 0 leave acceptance alone."""
    found = _VALUE.match(text)
    return found is not None and any(digit in b"123456789" for digit in found[1])


def without_pinned(readings: Sequence[Reading]) -> None:
    """Take acceptance that was set out of readings; of a speed made by it the time of a cycle is kept.

    A source that cannot tell belongs to the server of its engine that does; a source without measurements, such as a
    print of the environment, speaks for all of its engine.
    """
    for reading in readings:
        peers = [r for r in readings if r.pinned and r.system.get("engine") == reading.system.get("engine")]
        if reading.pinned or any(reading.pinned is None or not (r.cycles or r.acceptance) for r in peers):
            _clear(reading)


def _clear(reading: Reading) -> None:
    before = len(reading.acceptance) + len(reading.shapeless)
    reading.acceptance.clear()
    reading.shapeless[:] = [row for row in reading.shapeless if row["table"] == "cycles"]
    reading.dropped[DROPPED] += before - len(reading.shapeless)
    for table in (reading.cycles, reading.shapeless):
        kept = [_timed(row) for row in table]
        reading.dropped["speeds under synthetic acceptance"] += kept.count(None)
        table[:] = [row for row in kept if row is not None]


def _timed(row: dict[str, Any]) -> dict[str, Any] | None:
    """Return the row with the time of its cycle for its speed; None where the speed alone is known."""
    length = row.get("acceptance_length")
    speed = next((key for key in ("tpot_ms", "tok_s") if key in row), None)
    if speed is None or not row.get("num_steps", 1):
        return {key: value for key, value in row.items() if not key.endswith("acceptance_length")}
    if length is None:
        return None
    cycle_ms = row["tpot_ms"] * length if speed == "tpot_ms" else 1e3 * row["batch"] * length / row["tok_s"]
    out = {key: value for key, value in row.items() if not key.endswith(("acceptance_length", speed))}
    if (sd := row.get(f"sd_{speed}")) is not None:
        out["sd_cycle_ms"] = rounded(sd / row[speed] * cycle_ms, 3)
    return out | {"cycle_ms": rounded(cycle_ms)}
