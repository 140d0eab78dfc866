"""What a running SGLang server answers: `/v1/loads`, and `/generate` replies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specmodel.engines.reading import (
    Given,
    Lengths,
    Reading,
    Shape,
    add_length,
    mapping,
    number,
    rounded,
    sequence,
    whole,
)
from specmodel.engines.redact import gpu_name

__all__ = ["generate", "loads"]


def loads(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read `/v1/loads`: the moments of back-to-back decode steps, and the GPU's name."""
    reading.system["engine"] = "sglang"
    for document in documents:
        if isinstance(name := document.get("accelerator"), str) and name:
            reading.system["gpu"] = gpu_name(name)
        if (gpus := whole(document, "num_accelerators")) is not None:
            reading.system["num_gpus"] = gpus
        entries = document.get("loads")
        for load in entries if isinstance(entries, list) else [document]:
            moments = load.get("decode_moments") if isinstance(load, dict) else None
            if moments is None and (length := number(mapping(load, "speculative"), "accept_length")) is not None:
                _length_alone(reading, given, length)
                continue
            if (
                not isinstance(moments, list)
                or len(moments) < 6
                or not all(number({"m": m}, "m", low=-1, high=1e30) is not None for m in moments[:6])
            ):
                reading.dropped["loads without decode moments"] += 1
                continue
            steps, batches, times, squares, _, tokens = (float(m) for m in moments[:6])
            if steps < 1 or batches < steps or times <= 0 or squares * steps < batches**2 * (1 - 1e-9):
                reading.dropped["decode moments that cannot be"] += 1
                continue
            length = max(tokens / batches, 1.0)
            where = f"{reading.source}: decode_moments of {steps:.0f} steps"
            row: dict[str, Any] = {"batch": rounded(batches / steps), "cycle_ms": rounded(times / steps / 1e3)}
            row |= {"sd_cycle_ms": rounded(0.01 * times / steps / 1e3, 3), "samples": 1}
            row["note"] = f"{where}: mean time at the mean batch"
            reading.used["decode steps"] += int(steps)
            if given.shape is not None:
                reading.cycles.append(given.shape.row() | row)
                if given.shape.num_steps:
                    add_length(reading, given.shape, length, where, batches)
            else:
                reading.shapeless.append({"table": "cycles", **row})
                reading.shapeless.append(
                    {
                        "table": "acceptance",
                        "acceptance_length": rounded(length),
                        "drafts": round(batches),
                        "note": where,
                    }
                )


def _length_alone(reading: Reading, given: Given, length: float) -> None:
    """Add the acceptance length of a load without times, as releases before 0.5.17 answer."""
    note = f"{reading.source}: speculative.accept_length, cumulative, rounds unknown"
    if given.shape is not None and given.shape.num_steps:
        add_length(reading, given.shape, length, note)
    elif length >= 1:
        row = {
            "table": "acceptance",
            "acceptance_length": rounded(length),
            "sd": rounded(0.05 * length, 3),
            "note": note,
        }
        reading.shapeless.append(row)


def generate(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read `/generate` replies: the histogram of accepted drafts, pooled; else the counts that there are."""
    reading.system["engine"] = "sglang"
    pooled: dict[int, list[float]] = {}
    prompts: dict[int, int] = {}
    counted: dict[int, list[tuple[int, float]]] = {}
    for document in documents:
        for reply in document if isinstance(document, list) else [document]:
            meta = mapping(reply, "meta_info") or reply
            counts = sequence(meta, "spec_correct_drafts_histogram") or sequence(meta, "spec_accept_histogram")
            rounds = whole(meta, "spec_verify_ct")
            if not counts:
                _count(reading, meta, rounds, given, counted)
                continue
            values = [number({"c": c}, "c", low=-0.5) for c in counts]
            if any(v is None for v in values) or (
                rounds is not None and abs(sum(v or 0 for v in values) - rounds) > max(1, 0.02 * rounds)
            ):
                reading.dropped["replies whose histogram is not that of spec_verify_ct rounds"] += 1
                continue
            steps = _steps(meta, rounds, given) or len(counts) - 1
            if steps < 1 or len(counts) > steps + 1:
                reading.dropped["replies whose histogram is longer than their steps"] += 1
                continue
            total = pooled.setdefault(steps, [0.0] * (steps + 1))
            for i, value in enumerate(values):
                total[i] += value or 0.0
            prompts[steps] = prompts.get(steps, 0) + 1
            reading.used["replies"] += 1
    for steps, histogram in sorted(pooled.items()):
        shape = given.shape or Shape(num_steps=steps)
        accepted = [round(sum(histogram[k:])) for k in range(1, steps + 1)]
        note = f"{reading.source}: histogram of accepted drafts, {prompts[steps]} replies"
        entry = {
            "drafts": round(sum(histogram)),
            "prompts": prompts[steps],
            "accepted_per_position": accepted,
            "note": note,
        }
        if entry["drafts"]:
            reading.acceptance.append(shape.row() | entry)
    for steps, replies in sorted(counted.items()):
        lengths = Lengths()
        for rounds, accepted_tokens in replies:
            lengths.add(1 + accepted_tokens / rounds, rounds)
        note = f"{reading.source}: accepted drafts over rounds, pooled over {len(replies)} replies without a histogram"
        shape = given.shape or Shape(num_steps=steps)
        reading.acceptance.append(lengths.row(shape) | {"prompts": len(replies), "note": note})
        reading.used["replies"] += len(replies)


_PROPOSED = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")
_ACCEPTED = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
"""Names of one count over versions, the newest first."""


def _steps(meta: Any, rounds: int | None, given: Given) -> int | None:
    """Return the steps of a reply: the user's, or drafts over rounds where they are a whole number."""
    if given.shape is not None:
        return given.shape.num_steps
    proposed = whole(meta, *_PROPOSED)
    return proposed // rounds if proposed and rounds and proposed % rounds == 0 else None


def _count(
    reading: Reading, meta: Any, rounds: int | None, given: Given, counted: dict[int, list[tuple[int, float]]]
) -> None:
    """Book the accepted drafts of a reply without a histogram (releases before 0.5.9)."""
    if rounds is None:
        reading.dropped["replies without speculation"] += 1
        return
    accepted = number(meta, *_ACCEPTED, low=-0.5)
    tokens = whole(meta, "completion_tokens")
    if accepted is None and tokens is not None:
        accepted = float(tokens - 1 - rounds)  # the first token comes from the prompt pass, each round adds its bonus
    steps = _steps(meta, rounds, given)
    rate = number(meta, "spec_accept_rate", high=1.0)
    if steps is None and accepted and rate:
        mean = accepted / (rounds * rate)
        steps = round(mean) if abs(mean - round(mean)) < 0.1 else None
    if steps is None:
        question = "replies without a histogram do not tell the number of steps: say --num-steps; they are left out"
        reading.questions[:] = list(dict.fromkeys([*reading.questions, question]))
        reading.dropped["replies without a histogram"] += 1
    elif accepted is None or not -0.5 < accepted <= steps * rounds + 0.5 or steps < 1:
        reading.dropped["replies whose counts cannot be"] += 1
    else:
        counted.setdefault(steps, []).append((rounds, max(accepted, 0.0)))
