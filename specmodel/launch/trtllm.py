"""TensorRT-LLM: the YAML of `trtllm-serve`, whose schedule changed its meaning in 1.3."""

from __future__ import annotations

import json

from specmodel.launch.plan import (
    BatchRange,
    Parts,
    Plan,
    cap_note,
    capture_list,
    capture_note,
    join,
    model_word,
    no_schedule,
    pinned_lengths,
    ranges_of,
)

__all__ = ["write"]

TYPES = {
    "eagle3": "Eagle3",
    "eagle": "Eagle",
    "mtp": "MTP",
    "draft_model": "DraftTarget",
    "ngram": "NGram",
    "parallel": "DFlash",
}


def write(plan: Plan, version: tuple[int, ...]) -> Parts:
    """Write the command, files, notes and validation lines of TensorRT-LLM."""
    notes: list[str] = []
    ranges, steps = ranges_of(plan), plan.num_steps
    if ranges and (why := _no_schedule(ranges)):
        notes.append(no_schedule(plan, why))
        ranges = []
    if ranges:
        steps = ranges[0].num_steps
    lines: list[str] = []
    if steps:
        lines += ["speculative_config:", f"  decoding_type: {TYPES.get(plan.method or 'eagle3', 'Eagle3')}"]
        lines += [f"  max_draft_len: {steps}"]
        if plan.method not in ("ngram", "mtp"):
            key = "speculative_model" if version >= (1, 0) else "speculative_model_dir"
            # A JSON string is a YAML string, whatever stands in it.
            lines += [f"  {key}: {json.dumps(plan.draft or 'DRAFT')}"]
        if plan.topk > 1:
            total = plan.verify_tokens - 1
            lines += [
                "  use_dynamic_tree: true",
                f"  dynamic_tree_max_topK: {plan.topk}",
                f"  max_total_draft_tokens: {total}",
            ]
            notes.append("dynamic trees: not with sliding-window or MLA attention")
            if not steps <= total <= plan.topk * steps:
                least, most = steps + 1, plan.topk * steps + 1
                return Parts(
                    notes=[f"a tree of {steps} steps by {plan.topk} verifies {least} to {most} tokens, not {total + 1}"]
                )
        if ranges:
            lines += ["  draft_len_schedule:", *(f"    {key}: {k}" for key, k in _entries(ranges, version))]
            edge = (
                "largest batch of each entry, none beyond the last" if version >= (1, 3) else "smallest batch of each"
            )
            notes.append(
                f"the keys of draft_len_schedule are the {edge} (this changed in 1.3: check `trtllm-serve --help`)"
            )
    sizes = capture_list(plan, ranges)
    lines += ["cuda_graph_config:", "  enable_padding: true", f"  batch_sizes: [{', '.join(map(str, sizes))}]"]
    option = "--config" if version >= (1, 2) else "--extra_llm_api_options"
    words = [f"trtllm-serve {model_word(plan.target, 'MODEL')}"]
    words += [f"--tp_size {plan.tensor_parallel}"] if plan.tensor_parallel > 1 else []
    words += [f"--max_batch_size {-(-plan.max_batch // plan.data_parallel)}", f"{option} config.yaml"]
    notes.append(cap_note(plan, "--max_batch_size"))
    if plan.flags:
        notes.append(f"flags of other engines are left out: {' '.join(plan.flags)}")
    notes += capture_note(plan, ranges, "graphs")
    # TensorRT-LLM counts accepted drafts only, so the bonus token is not in its value.
    validation = [
        f"export TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={length - 1:.4g}" + (f"   # {where}" if where else "")
        for length, where in pinned_lengths(plan, steps, ranges)
    ]
    files = {"config.yaml": "\n".join(lines) + "\n"}
    return Parts(command=join(words), files=files, notes=notes, validation=validation, ranges=ranges)


def _no_schedule(ranges: list[BatchRange]) -> str | None:
    if any(step.topk > 1 for step in ranges):
        return "draft_len_schedule is for chains"
    if ranges[0].num_steps < max(step.num_steps for step in ranges):
        return "the smallest batch must draft the most (max_draft_len)"
    return None


def _entries(ranges: list[BatchRange], version: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the entries: by the largest batch of each range from 1.3 on, by the smallest before."""
    if version < (1, 3):
        return [(step.batch_from, step.num_steps) for step in ranges]
    last = ranges[-1]
    out = [(step.batch_to, step.num_steps) for step in ranges if step.batch_to is not None]
    if last.batch_to is None and last.num_steps:
        out.append((max(2**14, 2 * last.batch_from), last.num_steps))
    while out and out[-1][1] == 0:
        out.pop()  # beyond the last entry nothing is drafted anyway
    return out
