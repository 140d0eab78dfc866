"""vLLM: the speculative configuration, with its schedule by batch."""

from __future__ import annotations

import json
import shlex
from typing import Any

from specmodel.launch.plan import (
    Parts,
    Plan,
    capture_note,
    capture_sizes,
    join,
    model_word,
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


def write(plan: Plan, version: tuple[int, ...]) -> Parts:
    """Write the command, files, notes and validation lines of vLLM."""
    notes: list[str] = []
    if max(plan.topk, *(step.topk for step in plan.schedule), 1) > 1:
        return (
            None,
            {},
            ["vLLM verifies chains only (trees were removed in May 2026): decide again without --trees"],
            [],
        )
    words = [f"vllm serve {model_word(plan.target, 'MODEL')}"]
    words += [f"--tensor-parallel-size {plan.tensor_parallel}"] if plan.tensor_parallel > 1 else []
    words += [f"--data-parallel-size {plan.data_parallel}"] if plan.data_parallel > 1 else []
    words += [f"--max-num-seqs {-(-plan.max_batch // plan.data_parallel)}"]
    ranges = ranges_of(plan)
    if ranges and version < (0, 24):
        notes.append("no schedule by batch: it needs vLLM 0.24 (June 2026)")
        ranges = []
    if ranges and plan.data_parallel > 1:
        notes.append("no schedule by batch: vLLM has none under data parallelism")
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
        if plan.method == "mtp":
            notes.append("MTP: where there are more steps than trained heads, a multiple of the heads is needed")
        words += [f"--speculative-config {shlex.quote(json.dumps(config))}"]
    batches = capture_sizes(plan)
    if steps and batches[-1] * (steps + 1) > DEFAULT_CAPTURE_TOKENS:
        sizes = [batch * (steps + 1) for batch in batches]
        config_text = json.dumps({"cudagraph_capture_sizes": sizes})
        words += [f"--compilation-config {shlex.quote(config_text)}"]
        notes.append(
            f"by default vLLM captures up to {DEFAULT_CAPTURE_TOKENS} tokens; these sizes are batch * (steps + 1)"
        )
    words += plan.flags
    notes += capture_note(plan, steps, batches, "verify graphs")
    validation = []
    if steps and len(plan.survival) >= steps:
        pinned = {"rejection_sample_method": "synthetic"}
        rates = {"synthetic_acceptance_rates": [round(min(max(float(s), 0.0), 1.0), 4) for s in plan.survival[:steps]]}
        validation = [f"--speculative-config {shlex.quote(json.dumps(config | pinned | rates))}"]
    return join(words), {}, notes, validation
