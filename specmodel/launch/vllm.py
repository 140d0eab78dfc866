"""vLLM: the speculative configuration, with its schedule by batch."""

from __future__ import annotations

import json
import shlex
from typing import Any

from specmodel.launch.plan import (
    Parts,
    Plan,
    cap_note,
    capture_note,
    capture_tokens,
    captured_tokens,
    expected_length,
    join,
    model_word,
    no_schedule,
    ranges_of,
)

__all__ = ["write"]

METHODS = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "mtp": "mtp",
    "draft_model": "draft_model",
    "ngram": "ngram",
    "parallel": "dflash",
}
DEFAULT_CAPTURE_TOKENS = 512
DEFAULT_CAPTURES = {1, 2, 4, *range(8, 256, 8), *range(256, DEFAULT_CAPTURE_TOKENS + 1, 16)}


def write(plan: Plan, version: tuple[int, ...]) -> Parts:
    """Write the command, files, notes and validation lines of vLLM."""
    notes: list[str] = []
    if max(plan.topk, *(step.topk for step in plan.schedule), 1) > 1:
        return Parts(notes=["vLLM verifies chains only (trees were removed in May 2026): decide again without --trees"])
    words = [f"vllm serve {model_word(plan.target, 'MODEL')}"]
    words += [f"--tensor-parallel-size {plan.tensor_parallel}"] if plan.tensor_parallel > 1 else []
    words += [f"--data-parallel-size {plan.data_parallel}"] if plan.data_parallel > 1 else []
    words += [f"--max-num-seqs {-(-plan.max_batch // plan.data_parallel)}"]
    notes.append(cap_note(plan, "--max-num-seqs"))
    ranges = ranges_of(plan)
    if ranges and version < (0, 24):
        notes.append(no_schedule(plan, "it needs vLLM 0.24 (June 2026)"))
        ranges = []
    if ranges and plan.data_parallel > 1:
        notes.append(no_schedule(plan, "vLLM has none under data parallelism"))
        ranges = []
    steps = max((step.num_steps for step in ranges), default=plan.num_steps)
    config: dict[str, Any] = {}
    if steps:
        config["method"] = METHODS.get(plan.method or "eagle3", "eagle3")
        if plan.method not in ("ngram", "mtp"):
            config["model"] = plan.draft or "DRAFT"
        config["num_speculative_tokens"] = steps
        if ranges:
            table = [[s.batch_from, s.batch_to or plan.max_batch, s.num_steps] for s in ranges]
            config["num_speculative_tokens_per_batch_size"] = table
            notes.append("every entry is clamped to num_speculative_tokens, which is therefore the largest of them")
            notes.append(
                "a schedule costs vLLM part of its CUDA graphs: compare it with one step count for every batch"
            )
        if plan.method == "mtp":
            notes.append("MTP: where there are more steps than trained heads, a multiple of the heads is needed")
        words += [f"--speculative-config {shlex.quote(json.dumps(config))}"]
    before = captured_tokens(plan, ranges)
    tokens = sorted({*capture_tokens(plan, ranges), *before})
    own_sizes = plan.captured_unit == "tokens" and not DEFAULT_CAPTURES.issuperset(before)
    beyond = steps > 0 and tokens[-1] > DEFAULT_CAPTURE_TOKENS
    if own_sizes or beyond:
        config_text = json.dumps({"cudagraph_capture_sizes": tokens})
        words += [f"--compilation-config {shlex.quote(config_text)}"]
    if beyond:
        kept = ", with those of the file" if before else ""
        notes.append(
            f"by default vLLM captures up to {DEFAULT_CAPTURE_TOKENS} tokens; these sizes are batch * (steps + 1){kept}"
        )
    words += plan.flags
    notes += capture_note(plan, ranges, "verify graphs")
    validation = []
    if steps and expected_length(plan, steps) is not None:
        pinned = {"rejection_sample_method": "synthetic"}
        rates = {"synthetic_acceptance_rates": [round(min(max(float(s), 0.0), 1.0), 4) for s in plan.survival[:steps]]}
        validation = [f"--speculative-config {shlex.quote(json.dumps(config | pinned | rates))}"]
    return Parts(command=join(words), notes=notes, validation=validation, ranges=ranges)
