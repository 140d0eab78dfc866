"""SGLang: flags of its server, and the adaptive configuration that is a fixed schedule by batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

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

__all__ = ["dspark_table", "write"]

ALGORITHMS = {
    "eagle3": "EAGLE3",
    "eagle": "EAGLE",
    "mtp": "NEXTN",
    "draft_model": "STANDALONE",
    "ngram": "NGRAM",
    "parallel": "DFLASH",
}
DECODE_SUFFIX = (0, 5, 15)
"""First release whose sizes of graphs are named for decoding; the older names are deprecated there."""
NO_DP_ATTENTION = ("STANDALONE", "NGRAM", "DFLASH")
DEFAULT_RUNNING = 48
"""--max-running-requests that SGLang assumes under speculation."""


def write(plan: Plan, version: tuple[int, ...]) -> Parts:
    """Write the command, files, notes and validation lines of SGLang."""
    words = ["python -m sglang.launch_server", f"--model-path {model_word(plan.target, 'MODEL')}"]
    words += [f"--tp-size {plan.tensor_parallel}"] if plan.tensor_parallel > 1 else []
    words += [f"--dp-size {plan.data_parallel}"] if plan.data_parallel > 1 else []
    notes: list[str] = []
    files: dict[str, str] = {}
    ranges, steps = ranges_of(plan), plan.num_steps
    algorithm = ALGORITHMS.get(plan.method or "eagle3", "EAGLE3")
    if ranges and (why := _no_schedule(plan, ranges, algorithm, version)):
        notes.append(no_schedule(plan, why))
        ranges = []
    if ranges:
        steps = max(step.num_steps for step in ranges)
        files["adaptive.json"] = _adaptive_json(ranges, plan.data_parallel)
        notes.append(
            "a batch is padded to the next captured size before its range is looked up: every range's end is captured"
        )
    speculating = steps > 0
    if speculating and algorithm in NO_DP_ATTENTION and "--enable-dp-attention" in plan.flags:
        return Parts(
            notes=[f"SGLang has no {algorithm} under --enable-dp-attention: leave the flag or speculation out"]
        )
    if speculating:
        words += _shape(plan, steps, algorithm, notes)
    if speculating and algorithm == "DFLASH" and plan.step_ms:
        files["sps.json"] = dspark_table(plan.step_ms)
    if ranges:
        words += ["--speculative-adaptive", "--speculative-adaptive-config adaptive.json"]
    sizes, suffix = capture_list(plan, ranges), "-decode" if version >= DECODE_SUFFIX else ""
    listed = " ".join(map(str, sizes))
    by_size = bool(ranges or plan.captured)
    words += [f"--cuda-graph-bs{suffix} {listed}" if by_size else f"--cuda-graph-max-bs{suffix} {sizes[-1]}"]
    words += [f"--max-running-requests {plan.max_batch}"]
    notes.append(cap_note(plan, "--max-running-requests"))
    if speculating and plan.max_batch > DEFAULT_RUNNING:
        notes.append(f"without --max-running-requests, speculation caps the batch at {DEFAULT_RUNNING}")
    words += plan.flags
    notes += capture_note(plan, ranges, "verify graphs")
    validation = _pinned(plan, steps, ranges, algorithm, notes) if speculating else []
    return Parts(command=join(words), files=files, notes=notes, validation=validation, ranges=ranges)


def _pinned(plan: Plan, steps: int, ranges: Sequence[BatchRange], algorithm: str, notes: list[str]) -> list[str]:
    """Return what forces the calibrated acceptance length, of each range of a schedule; say where nothing does."""
    if plan.topk > 1 or algorithm in ("NGRAM", "STANDALONE"):
        notes.append("acceptance can be pinned for chains of EAGLE, EAGLE3, NEXTN, DFLASH and DSPARK alone")
        return []
    lengths = pinned_lengths(plan, steps, ranges)
    older = "SIMULATE_ACC_LEN in older releases"
    lines = [f"export SGLANG_SIMULATE_ACC_LEN={length:.4g}   # {where}{older}" for length, where in lengths]
    method = "export SGLANG_SIMULATE_ACC_METHOD=match-expected SGLANG_SIMULATE_ACC_TOKEN_MODE=real-draft-token"
    return [*lines, method] if lines else []


def _shape(plan: Plan, steps: int, algorithm: str, notes: list[str]) -> list[str]:
    words = [f"--speculative-algorithm {algorithm}"]
    if algorithm not in ("NGRAM", "NEXTN") or plan.draft:
        words += [f"--speculative-draft-model-path {model_word(plan.draft, 'DRAFT')}"]
    if algorithm == "DFLASH" and plan.step_ms:
        # DSPARK drafts steps tokens and verifies the root as well; its table says what a pass of any size costs.
        words[0] = "--speculative-algorithm DSPARK"
        return [*words, f"--speculative-dspark-block-size {steps}", "--speculative-dspark-sps-table-path sps.json"]
    if algorithm == "DFLASH":
        notes.append(
            f"DSPARK instead of DFLASH: --speculative-algorithm DSPARK --speculative-dspark-block-size {steps}"
        )
        return [*words, f"--speculative-dflash-block-size {steps + 1}"]
    if algorithm == "NGRAM":
        return [*words, f"--speculative-num-draft-tokens {plan.verify_tokens}"]
    topk, tokens = plan.topk, steps + 1 if plan.topk == 1 else plan.verify_tokens
    if topk > 1:
        notes.append(
            "topk above 1: not with the trtllm_mha backend; page sizes above 1 only with flashinfer, fa3 or triton"
        )
        if tokens > steps * topk + 1:
            notes.append(
                f"{tokens} draft tokens are more than a tree of {steps} steps by {topk} uses ({steps * topk + 1})"
            )
    return [
        *words,
        f"--speculative-num-steps {steps}",
        f"--speculative-eagle-topk {topk}",
        f"--speculative-num-draft-tokens {tokens}",
    ]


def _no_schedule(plan: Plan, ranges: list[BatchRange], algorithm: str, version: tuple[int, ...]) -> str | None:
    """Say what keeps SGLang from adapting steps to the batch; it would stay static in silence."""
    if version < (0, 5, 13):
        return "adaptive steps by batch need SGLang 0.5.13"
    if any(step.num_steps == 0 for step in ranges) and version < (0, 5, 14):
        return "zero steps in an adaptive configuration need SGLang 0.5.14"
    if algorithm not in ("EAGLE", "EAGLE3", "NEXTN"):
        return f"adaptive steps are for EAGLE and EAGLE3, not {algorithm}"
    if any(step.topk > 1 for step in ranges):
        return "adaptive steps are for chains (topk 1)"
    if plan.data_parallel > 1 or "--enable-dp-attention" in plan.flags:
        return "adaptive steps are off under data-parallel attention"
    return None


def _adaptive_json(ranges: list[BatchRange], data_parallel: int) -> str:
    entries = {str(-(-step.batch_from // data_parallel)): {"candidate_steps": [step.num_steps]} for step in ranges}
    return json.dumps(entries)


def dspark_table(step_ms: Mapping[int, float]) -> str:
    """Write the flat step-rate table of DSPARK: whole-step times by tokens verified together, looked up downwards."""
    tokens = sorted(step_ms)
    table = {
        "sample_batch_tokens": tokens,
        "sample_steps_per_sec": [round(1e3 / step_ms[count], 6) for count in tokens],
        "max_batch_tokens": tokens[-1],
    }
    return json.dumps(table)
