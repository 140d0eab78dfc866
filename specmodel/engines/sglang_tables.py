"""SGLang's step-time tables and profiles, and its adaptive schedules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specmodel.engines.reading import Given, Reading, mapping, number, rounded, summarise, whole

__all__ = ["adaptive_schedule", "dspark_records", "dspark_table"]

LONGEST_BLOCK = 16
"""Verified tokens a sequence beyond which entries of a step-time table are left out."""


def dspark_records(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read a step-time profile: rounds by running requests and verified tokens."""
    reading.system["engine"], reading.model["method"] = "sglang", "parallel"
    times: dict[tuple[int, int], list[float]] = {}
    for document in documents:
        running, tokens = whole(document, "num_running_reqs"), whole(document, "num_verify_tokens")
        step = number(document, "step_time", high=1000)
        if running is None or tokens is None or step is None or tokens % running:
            reading.dropped["records without times, or with unequal tokens a request"] += 1
            continue
        times.setdefault((running, tokens // running), []).append(1e3 * step)
    for (running, tokens), values in sorted(times.items()):
        summary = summarise(values, band=2.0)
        reading.dropped["outliers (more than twice the median)"] += summary.outliers
        reading.used["rounds"] += summary.count
        note = f"{reading.source}: median of {summary.count} rounds, {tokens} verified tokens a request"
        reading.cycles.append(_block(tokens) | {"batch": running} | summary.row("cycle_ms") | {"note": note})


def _block(tokens: int) -> dict[str, Any]:
    return {"num_steps": tokens - 1} if tokens > 1 else {"num_steps": 0, "speculation": True}


def dspark_table(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read a step-time table, flat (by verified tokens) or additive (by requests and verified tokens)."""
    reading.system["engine"], reading.model["method"] = "sglang", "parallel"
    for document in documents:
        if "bias_seconds" in document:
            _additive(reading, document)
        else:
            _flat(reading, document, given)


def _numbers(document: Any, key: str) -> list[float]:
    values = document.get(key)
    checked = [number({"v": v}, "v", low=-1e-12, high=1e6) for v in values] if isinstance(values, list) else []
    return [v for v in checked if v is not None] if None not in checked else []


def _additive(reading: Reading, document: Any) -> None:
    bias = number(document, "bias_seconds", high=100)
    batches, alpha = _numbers(document, "bs_probes"), _numbers(document, "alpha_seconds")
    tokens, theta = _numbers(document, "m_probes"), _numbers(document, "theta_seconds")
    if bias is None or not batches or len(batches) != len(alpha) or not tokens or len(tokens) != len(theta):
        reading.questions.append("the step-time table lacks probes or their times; it is left out")
        return
    for batch, by_batch in zip(batches, alpha, strict=True):
        for total, by_tokens in zip(tokens, theta, strict=True):
            if batch < 1 or total < batch or total % batch or total / batch > LONGEST_BLOCK:
                reading.dropped["entries that are no whole block of each request"] += 1
                continue
            note = f"{reading.source}: bias + alpha({batch:.0f}) + theta({total:.0f})"
            row = _block(round(total / batch)) | {
                "batch": round(batch),
                "cycle_ms": rounded(1e3 * (bias + by_batch + by_tokens)),
            }
            reading.cycles.append(row | {"note": note})
            reading.used["entries"] += 1


def _flat(reading: Reading, document: Any, given: Given) -> None:
    tokens, rates = _numbers(document, "sample_batch_tokens"), _numbers(document, "sample_steps_per_sec")
    if not tokens or len(tokens) != len(rates) or min(rates) <= 0:
        reading.questions.append("the step-rate table lacks tokens or rates; it is left out")
        return
    width = given.shape.verify_tokens if given.shape is not None else None
    for total, rate in zip(tokens, rates, strict=True):
        reading.used["entries"] += 1
        if width is not None and total % width == 0:
            note = f"{reading.source}: step rate at {total:.0f} verified tokens"
            reading.cycles.append(
                _block(width) | {"batch": round(total / width), "cycle_ms": rounded(1e3 / rate), "note": note}
            )
        else:
            note = f"{reading.source}: the whole step at {total:.0f} verified tokens, drafting included"
            reading.verify.append({"tokens": round(total), "time_ms": rounded(1e3 / rate), "note": note})
    if reading.verify:
        reading.caveats.append(
            f"{reading.source}: verify times of a step-rate table are whole steps, drafting and overhead included; "
            "with --num-steps (the block less one) they become cycles"
        )


def adaptive_schedule(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read an adaptive configuration: no measurement, but what is deployed."""
    reading.system["engine"] = "sglang"
    for document in documents:
        keys = sorted((key for key in document if key.isascii() and key.isdigit() and len(key) < 7), key=int)
        parts = []
        for i, key in enumerate(keys):
            steps = mapping(document, key).get("candidate_steps")
            if isinstance(steps, list) and all(isinstance(k, int) for k in steps):
                to = f"-{int(keys[i + 1]) - 1}" if i + 1 < len(keys) else " and more"
                parts.append(f"batch {key}{to}: {' or '.join(map(str, steps))} steps")
        if parts:
            reading.saw("other", "adaptive schedule: " + "; ".join(parts), "candidate_steps")
