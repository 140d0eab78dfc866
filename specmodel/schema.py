"""The format as a schema: pydantic's validator over the dataclasses, the JSON Schema for editors, what each key means.

Pydantic is imported where it is needed, here alone.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any

from specmodel import invariants
from specmodel.calibration import (
    AcceptanceEntry,
    AllreduceRow,
    Calibration,
    CommSetting,
    CycleRow,
    DraftRow,
    Evidence,
    Measurements,
    ModelShape,
    PrefillRow,
    Provenance,
    System,
    Validation,
    VerifyRow,
    Workload,
)

if TYPE_CHECKING:
    from pydantic import TypeAdapter
    from pydantic_core import ErrorDetails

# What holds at each place of a document; "[]" stands for each row of a table, "*" for each name.
SECTIONS: dict[tuple[str, ...], type[Any]] = {
    (): Calibration,
    ("provenance",): Provenance,
    ("system",): System,
    ("model",): ModelShape,
    ("comm", "*"): CommSetting,
    ("workloads", "*"): Workload,
    ("measurements",): Measurements,
    ("measurements", "verify", "[]"): VerifyRow,
    ("measurements", "draft", "[]"): DraftRow,
    ("measurements", "allreduce", "[]"): AllreduceRow,
    ("measurements", "prefill", "[]"): PrefillRow,
    ("measurements", "cycles", "[]"): CycleRow,
    ("acceptance", "[]"): AcceptanceEntry,
    ("evidence", "[]"): Evidence,
    ("validation",): Validation,
    ("validation", "cycles", "[]"): CycleRow,
}


@cache
def _adapter() -> TypeAdapter[Calibration]:
    from pydantic import TypeAdapter

    return TypeAdapter(Calibration)


def check(value: dict[Any, Any]) -> tuple[Calibration | None, list[ErrorDetails]]:
    """Validate a document; return the calibration, or None and what pydantic found wrong."""
    from pydantic import ValidationError

    try:
        return _adapter().validate_python(value), []
    except ValidationError as error:
        return None, error.errors(include_url=False)


# What each key means, by its name, or by Class.name where one name means several things.
MEANING = {
    "schema": "The version of the format: specmodel.calibration/1.",
    "name": "A short name of this calibration, safe as a file's name.",
    "description": "One line that says what was measured.",
    "provenance": "Where the numbers come from.",
    "system": "The machine and the engine.",
    "model": "The target model, the drafter, and sizes that sharpen the cost model.",
    "comm": "The name of the communication setting of this row; `default` or one listed under `comm`.",
    "Calibration.comm": "Named communication settings. `default` always exists; any other must be listed here.",
    "workloads": "Kinds of traffic and how much of it each is; names used by rows need not be listed.",
    "measurements": "Everything that was timed.",
    "acceptance": "Acceptance of drafts, one entry per workload and draft shape at which it was measured.",
    "evidence": "Facts that close or open a path, with where they were seen.",
    "validation": "Whole cycles that are never used to fit, only to check.",
    "source": "Where this is said or was seen.",
    "url": "Where to find the source.",
    "date": "The day of the measurement, YYYY-MM-DD.",
    "caveats": "What a reader must know before trusting the numbers.",
    "gpu": "The GPU's name.",
    "num_gpus": "GPUs of the deployment.",
    "AllreduceRow.num_gpus": "GPUs that took part.",
    "nodes": "Machines that the GPUs are in.",
    "tensor_parallel": "Ranks that share one layer.",
    "data_parallel": "Copies of the attention that each serve their part of the batch; default 1.",
    "expert_parallel": "Ranks among which the experts are spread.",
    "engine": "The inference engine, for example sglang or vllm.",
    "engine_version": "The engine's version, quoted.",
    "target": "The target model.",
    "ModelShape.draft": "The drafter.",
    "method": "How drafts are made.",
    "hidden_size": "Width of the target's hidden state; with activation_bytes it gives the size of an all-reduce.",
    "num_layers": "Layers of the target.",
    "activation_bytes": "Bytes of one number in an all-reduce message; default 2.",
    "num_experts": "Routed experts of the target; absent for a dense model.",
    "experts_per_token": "Routed experts that one token uses.",
    "cuda_graph_sizes": "Sizes for which the engine captured a CUDA graph, in cuda_graph_unit, increasing.",
    "cuda_graph_unit": "What cuda_graph_sizes count: tokens (default) or sequences.",
    "env": "Environment variables; values are quoted strings.",
    "flags": "Engine flags.",
    "weight": "Share of the traffic; shares need not add to 1.",
    "output_tokens": "Mean output length.",
    "verify": "Times of one target pass.",
    "Measurements.draft": "Times of all draft passes of one cycle.",
    "allreduce": "Times of one all-reduce.",
    "prefill": "Times of one prefill pass.",
    "cycles": "Whole cycles (draft, verify, accept) as an engine or the harness saw them.",
    "tokens": "Tokens of the pass, all sequences of one rank together.",
    "batch": "Sequences of one rank; default 1.",
    "CycleRow.batch": "Mean running sequences over all data-parallel ranks, 1 or more, need not be whole; default 1.",
    "context_tokens": "Tokens of context per sequence.",
    "cuda_graph": "Whether the drafter ran in CUDA graphs; default true.",
    "VerifyRow.cuda_graph": "Whether the pass ran in a CUDA graph; default true.",
    "verify_cuda_graph": "Whether the target's pass ran in a CUDA graph; default true.",
    "graph_scope": "One CUDA graph for each draft step (step, the default) or one for all of them (cycle).",
    "time_ms": "Time in milliseconds. Give this or range_ms.",
    "range_ms": "[low, high]: between what the time was seen to vary, in milliseconds. Replaces time_ms.",
    "sd_ms": "Standard deviation of one sample of time_ms, in milliseconds.",
    "samples": "How many samples the value comes from.",
    "note": "One line for the reader.",
    "size_bytes": "Size of the message in bytes.",
    "in_graph": "Whether it ran within a CUDA graph.",
    "num_steps": "Draft tokens proposed per sequence and cycle on a chain (K); 0 is plain decoding.",
    "topk": "Branches per step of a draft tree; 1 (default) is a chain.",
    "num_draft_tokens": "Tokens that the target verifies per sequence, the root included; num_steps + 1 on a chain.",
    "speculation": "Whether the machinery is on; default num_steps > 0. true at num_steps 0: on, but nothing drafted.",
    "workload": "The kind of traffic; default `default`.",
    "mean_draft_tokens": "Mean drafts per sequence and cycle, where drafting may stop early.",
    "acceptance_length": "Mean tokens emitted per sequence and cycle, the bonus token included.",
    "tok_s": "Tokens per second over the whole batch and all data-parallel ranks. Exactly one form of speed.",
    "tpot_ms": "Milliseconds per output token of one sequence. Exactly one form of speed.",
    "cycle_ms": "Milliseconds of one cycle. Exactly one form of speed.",
    "tok_s_at_most": "Tried, and not faster than this many tokens per second. Exactly one form of speed.",
    "sd_tok_s": "Standard deviation of one sample of tok_s.",
    "sd_tpot_ms": "Standard deviation of one sample of tpot_ms.",
    "sd_cycle_ms": "Standard deviation of one sample of cycle_ms.",
    "range_tok_s": "[low, high]: between what tok_s was seen to vary. Replaces tok_s.",
    "range_tpot_ms": "[low, high]: between what tpot_ms was seen to vary. Replaces tpot_ms.",
    "range_cycle_ms": "[low, high]: between what cycle_ms was seen to vary. Replaces cycle_ms.",
    "drafts": "Drafts (sequence-cycles) that the counts come from.",
    "prompts": "Independent prompts that the counts come from.",
    "accepted_per_position": "How many drafts were accepted up to at least this position; over drafts, the survival.",
    "drafted_per_position": "Attempts at each position, where drafting may stop early.",
    "accepted_by_rank": "Accepted counts of a tree, for each depth a list by rank.",
    "survival": "P(at least k drafts accepted), unconditional, for k = 1, 2, ...",
    "conditional": "P(draft k accepted given that those before it were), for k = 1, 2, ...",
    "sd": "Standard deviation of the stated acceptance.",
    "about": "What the fact is about.",
    "value": "true, false, a number or text.",
    "ranks": "On how many ranks it was seen.",
}


def meaning(section: type[Any], key: str) -> str:
    """Return what a key of a section means."""
    return MEANING.get(f"{section.__name__}.{key}") or MEANING[key]


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the format, with what each key means and the rules of each row."""
    document = _adapter().json_schema()
    definitions: dict[str, Any] = document.pop("$defs")
    for section in SECTIONS.values():
        described = document if section is Calibration else definitions[section.__name__]
        described.pop("title", None)
        described["description"] = str(section.__doc__)
        for item in dataclasses.fields(section):
            key = described["properties"][item.name]
            key.pop("title", None)
            if key.get("default", ...) is None:
                del key["default"]
            key["description"] = meaning(section, item.name)
        described.update(ROW_RULES.get(section, {}))
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "specmodel calibration, format 1"}
    return {**head, **document, "$defs": definitions}


def _one_of(*forms: str) -> dict[str, Any]:
    return {"oneOf": [{"required": [form]} for form in forms]}


def _when(key: str, holds: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"required": [key], "properties": {key: holds}}, "then": then}


# Rules over several keys of a row that JSON Schema can state; those that compare numbers it cannot.
_TREE = _when(
    "topk",
    {"type": "integer", "minimum": 2},
    {
        "required": ["num_draft_tokens"],
        "properties": {"num_draft_tokens": {"minimum": 2}, "num_steps": {"minimum": 1}},
    },
)
_SCOPE = _when("graph_scope", {}, {"properties": {"cuda_graph": {"const": True}}})
_TIME = {**_one_of(*invariants.TIME_FORMS), "dependentRequired": {"sd_ms": ["time_ms"]}}
ROW_RULES: dict[type[Any], dict[str, Any]] = {
    VerifyRow: _TIME,
    AllreduceRow: _TIME,
    PrefillRow: _TIME,
    DraftRow: {**_TIME, "allOf": [_TREE, _SCOPE]},
    CycleRow: {
        **_one_of(*invariants.SPEED_FORMS),
        "dependentRequired": {f"sd_{quantity}": [quantity] for quantity in invariants.SPEED_QUANTITIES},
        "allOf": [
            _TREE,
            _SCOPE,
            _when("speculation", {"const": False}, {"properties": {"num_steps": {"maximum": 0}}}),
        ],
    },
    AcceptanceEntry: {
        **_one_of(*invariants.ACCEPTANCE_FORMS),
        "dependentRequired": {
            "accepted_per_position": ["drafts"],
            "accepted_by_rank": ["drafts"],
            "drafted_per_position": ["accepted_per_position"],
        },
        "allOf": [_TREE],
    },
}

EXAMPLE = """\
# yaml-language-server: $schema=calibration-1.json
# A calibration: what was measured of one deployment. Get the schema that the first line names with
# `specmodel schema > calibration-1.json`; editors then complete and check keys.
# Only `schema` and `name` are needed; delete what you have not measured.
# Times are milliseconds (_ms), throughput is tokens per second over the whole batch (tok_s), sizes are bytes (_bytes).
schema: specmodel.calibration/1
name: my-deployment                # safe as a file's name
description: Example-8B with an EAGLE-3 head on one H200
provenance:
  source: "own measurement"
  date: 2026-02-26
  caveats:
    - "batch 1 only"
system: {gpu: H200, num_gpus: 1, tensor_parallel: 1, engine: sglang, engine_version: "0.5.9"}
model:
  target: Example-8B
  draft: EAGLE-3 head
  method: eagle3                   # eagle3 | eagle | mtp | draft_model | ngram | parallel | none
  hidden_size: 4096
  num_layers: 32
  # num_experts: 128               # for a mixture of experts
  # experts_per_token: 8

# Communication settings to choose among, where several GPUs share a model; a row without `comm` ran under `default`.
# comm:
#   ring-ll: {env: {NCCL_ALGO: Ring, NCCL_PROTO: LL}, flags: []}     # quote values that are numbers: "0"

measurements:
  # Whole cycles, the numbers to begin with: plain decoding (num_steps 0) and one run with speculation are enough.
  # One form of speed a row: tok_s, tpot_ms, cycle_ms, a range of one of them (range_tok_s: [low, high]),
  # or tok_s_at_most for "tried, and not faster than this". With more than one running sequence every row says so:
  # {num_steps: 0, batch: 8, tok_s: 1310}; without `batch` it is 1.
  cycles:
    - {num_steps: 0, tok_s: 200.0}
    - {num_steps: 3, tok_s: 352.0, acceptance_length: 2.39}
    - {num_steps: 5, tok_s_at_most: 352.0}
  # One target pass over so many tokens (num_steps + 1 for each sequence); optional, and the most useful table.
  verify:
    - {tokens: 1, time_ms: 4.91}
    - {tokens: 4, time_ms: 5.46, sd_ms: 0.02, samples: 30}
    - {tokens: 6, range_ms: [5.4, 5.6]}
  # All draft passes of one cycle.
  draft:
    - {num_steps: 3, time_ms: 1.31}

# Acceptance, one form an entry: accepted_per_position (counts, with drafts), survival, conditional or
# acceptance_length.
acceptance:
  - {num_steps: 3, drafts: 1000, prompts: 80, accepted_per_position: [710, 440, 240]}

# Facts that close or open a path: draft_cuda_graph, target_cuda_graph, decode_with_cuda_graph,
# allreduce_implementation, nccl_setting, free_memory_bytes or other.
evidence:
  - {about: draft_cuda_graph, value: true, source: "server log, start-up"}

# Cycles that are never used to fit, only to check the model against: `specmodel validate`.
validation:
  cycles:
    - {num_steps: 4, tok_s: 361.0, acceptance_length: 2.55}
"""
