"""TensorRT-LLM: the YAML of `trtllm-serve`, whose schedule changed its meaning in 1.3."""

from __future__ import annotations

from specmodel.launch.plan import (
    BatchRange,
    Parts,
    Plan,
    capture_note,
    capture_sizes,
    expected_length,
    join,
    model_word,
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
        notes.append(f"no schedule by batch: {why}")
        ranges = []
    if ranges:
        steps = ranges[0].num_steps
    lines: list[str] = []
    if steps:
        lines += ["speculative_config:", f"  decoding_type: {TYPES.get(plan.method or 'eagle3', 'Eagle3')}"]
        lines += [f"  max_draft_len: {steps}"]
        if plan.method not in ("ngram", "mtp"):
            key = "speculative_model" if version >= (1, 0) else "speculative_model_dir"
            lines += [f"  {key}: {model_word(plan.draft, 'DRAFT')}"]
        if plan.topk > 1:
            total = plan.verify_tokens - 1
            lines += [
                "  use_dynamic_tree: true",
                f"  dynamic_tree_max_topK: {plan.topk}",
                f"  max_total_draft_tokens: {total}",
            ]
            notes.append("dynamic trees: not with sliding-window or MLA attention")
            if not steps <= total <= plan.topk * steps:
                notes.append(f"max_total_draft_tokens must be between {steps} and {plan.topk * steps}, got {total}")
        if ranges:
            lines += ["  draft_len_schedule:", *(f"    {key}: {k}" for key, k in _entries(ranges, version))]
            edge = (
                "largest batch of each entry, none beyond the last" if version >= (1, 3) else "smallest batch of each"
            )
            notes.append(
                f"the keys of draft_len_schedule are the {edge} (this changed in 1.3: check `trtllm-serve --help`)"
            )
    sizes = capture_sizes(plan)
    lines += ["cuda_graph_config:", "  enable_padding: true", f"  batch_sizes: [{', '.join(map(str, sizes))}]"]
    option = "--config" if version >= (1, 2) else "--extra_llm_api_options"
    words = [f"trtllm-serve {model_word(plan.target, 'MODEL')}"]
    words += [f"--tp_size {plan.tensor_parallel}"] if plan.tensor_parallel > 1 else []
    words += [f"--max_batch_size {-(-plan.max_batch // plan.data_parallel)}", f"{option} config.yaml"]
    if plan.flags:
        notes.append(f"flags of other engines are left out: {' '.join(plan.flags)}")
    notes += capture_note(plan, steps, sizes, "graphs")
    length = expected_length(plan, steps)
    # TensorRT-LLM counts accepted drafts only, so the bonus token is not in its value.
    validation = [f"export TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={length - 1:.4g}"] if length is not None else []
    return join(words), {"config.yaml": "\n".join(lines) + "\n"}, notes, validation


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
