"""Reports with the verdict and the flags that follow from them, worked out by hand."""

# Name: (the body of the file, its flags, who is the problem, what the verdict must say).
VERDICTS: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "engine_dear": (
        """
model: {method: eagle3}
system: {engine: vllm, gpu: A100, num_gpus: 2, tensor_parallel: 2}
measurements: {cycles: [
    {num_steps: 0, tok_s: 80},
    {num_steps: 3, tok_s: 70, acceptance_length: 2.6}
]}
""",
        ("slower_than_plain_everywhere",),
        "engine",
        "2.97",
    ),
    "drafter_poor": (
        """
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 3, tok_s: 80, acceptance_length: 1.25}
]}
""",
        ("slower_than_plain_everywhere",),
        "drafter",
        "1.56",
    ),
    "both": (
        """
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, tpot_ms: 10},
    {num_steps: 3, tpot_ms: 21, acceptance_length: 1.3}
]}
""",
        ("slower_than_plain_everywhere",),
        "both",
        "2.73",
    ),
    "gains": (
        """
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, tpot_ms: 10},
    {num_steps: 2, tpot_ms: 5, acceptance_length: 2.4}
]}
""",
        (),
        "nothing",
        "1.20",
    ),
    "no_baseline": (
        """
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 3, tok_s: 120, acceptance_length: 2.2},
    {num_steps: 5, tok_s: 118, acceptance_length: 2.5}
]}
""",
        (),
        "unknown",
        "plain",
    ),
    "baseline_other_batch": (
        """
measurements: {cycles: [
    {num_steps: 0, batch: 16, tok_s: 900},
    {num_steps: 3, batch: 4, tok_s: 300, acceptance_length: 2.2}
]}
""",
        (),
        "unknown",
        "batch",
    ),
    "impossible": (
        """
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, tok_s: 40},
    {num_steps: 1, tok_s: 84, acceptance_length: 1.8}
]}
""",
        ("speedup_exceeds_acceptance_length",),
        "measurement",
        "2.10",
    ),
    "near_speedup": (
        """
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, tok_s: 50},
    {num_steps: 2, tok_s: 120.48, acceptance_length: 2.4}
]}
""",
        (),
        "nothing",
        "",
    ),
    "al_exactly_k1": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 50},
    {num_steps: 2, tok_s: 130, acceptance_length: 3.0}
]}
""",
        (),
        "nothing",
        "",
    ),
    "al_above": (
        """
workloads: {chat: {}, code: {}}
measurements: {cycles: [
    {num_steps: 0, workload: chat, tok_s: 50},
    {num_steps: 2, workload: chat, tok_s: 80, acceptance_length: 1.9},
    {num_steps: 2, workload: code, tok_s: 120, acceptance_length: 3.1}
]}
""",
        ("acceptance_length_exceeds_steps_plus_one",),
        "measurement",
        "",
    ),
    "fall_19": (
        """
measurements: {cycles: [
    {num_steps: 3, batch: 8, tok_s: 1000, acceptance_length: 2},
    {num_steps: 3, batch: 16, tok_s: 981, acceptance_length: 2}
]}
""",
        (),
        "unknown",
        "",
    ),
    "fall_21": (
        """
measurements: {cycles: [
    {num_steps: 3, batch: 8, tok_s: 1000, acceptance_length: 2},
    {num_steps: 3, batch: 16, tok_s: 979, acceptance_length: 2}
]}
""",
        ("aggregate_falls_with_batch",),
        "unknown",
        "",
    ),
    "fall_tpot": (
        """
measurements: {cycles: [
    {num_steps: 0, batch: 8, tpot_ms: 16},
    {num_steps: 0, batch: 32, tpot_ms: 30},
    {num_steps: 2, batch: 8, tpot_ms: 10, acceptance_length: 2},
    {num_steps: 2, batch: 32, tpot_ms: 45, acceptance_length: 2}
]}
""",
        ("aggregate_falls_with_batch",),
        "nothing",
        "",
    ),
    "no_fall_other_steps": (
        """
measurements: {cycles: [
    {num_steps: 5, batch: 8, tok_s: 1000, acceptance_length: 3},
    {num_steps: 2, batch: 16, tok_s: 900, acceptance_length: 2}
]}
""",
        (),
        "unknown",
        "",
    ),
    "plain_falls": (
        """
measurements: {cycles: [
    {num_steps: 0, batch: 1, tok_s: 100},
    {num_steps: 0, batch: 2, tok_s: 80},
    {num_steps: 2, batch: 1, tok_s: 130, acceptance_length: 2},
    {num_steps: 2, batch: 2, tok_s: 150, acceptance_length: 2}
]}
""",
        (),
        "nothing",
        "1.54",
    ),
    "zero_04": (
        """
measurements: {cycles: [
    {num_steps: 0, tpot_ms: 10},
    {num_steps: 0, speculation: true, tpot_ms: 10.04},
    {num_steps: 2, tpot_ms: 8, acceptance_length: 1.9}
]}
""",
        (),
        "nothing",
        "",
    ),
    "zero_06": (
        """
measurements: {cycles: [
    {num_steps: 0, tpot_ms: 10},
    {num_steps: 0, speculation: true, tpot_ms: 10.06},
    {num_steps: 2, tpot_ms: 8, acceptance_length: 1.9}
]}
""",
        ("zero_draft_step_slower_than_plain",),
        "nothing",
        "",
    ),
    "zero_alone": (
        """
measurements: {cycles: [
    {num_steps: 0, batch: 4, tok_s: 400},
    {num_steps: 0, batch: 4, speculation: true, tok_s: 340}
]}
""",
        ("zero_draft_step_slower_than_plain",),
        "unknown",
        "1.176",
    ),
    "first_049": (
        """
acceptance: [
    {num_steps: 2, conditional: [0.70, 0.6]},
    {num_steps: 5, drafts: 1000, accepted_per_position: [749, 400, 200, 100, 50]}
]
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 2, tok_s: 130}
]}
""",
        (),
        "nothing",
        "",
    ),
    "first_06": (
        """
acceptance: [
    {num_steps: 2, conditional: [0.70, 0.6]},
    {num_steps: 5, drafts: 1000, accepted_per_position: [761, 400, 200, 100, 50]}
]
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 2, tok_s: 130}
]}
""",
        ("first_position_acceptance_differs",),
        "nothing",
        "",
    ),
    "first_workloads": (
        """
acceptance: [
    {workload: chat, num_steps: 2, conditional: [0.60, 0.6]},
    {workload: code, num_steps: 5, survival: [0.85, 0.7, 0.6, 0.5, 0.4]}
]
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 2, workload: chat, tok_s: 120},
    {num_steps: 5, workload: code, tok_s: 190}
]}
""",
        (),
        "nothing",
        "",
    ),
    "tree_tp4": (
        """
model: {method: eagle3}
system: {gpu: L40S, num_gpus: 4, tensor_parallel: 4, engine: sglang}
measurements: {cycles: [
    {num_steps: 0, tok_s: 90},
    {num_steps: 5, topk: 4, num_draft_tokens: 16, tok_s: 75, acceptance_length: 2.9}
]}
""",
        ("slower_than_plain_everywhere",),
        "engine",
        "3.48",
    ),
    "tree_few_tokens": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 90},
    {num_steps: 6, topk: 2, num_draft_tokens: 4, tok_s: 200, acceptance_length: 4.5}
]}
""",
        (),
        "measurement",
        "",
    ),
    "steps_choice": (
        """
model: {method: draft_model}
measurements: {cycles: [
    {num_steps: 0, tok_s: 60},
    {num_steps: 2, tok_s: 78, acceptance_length: 2.0},
    {num_steps: 7, tok_s: 52, acceptance_length: 2.6}
]}
""",
        (),
        "nothing",
        "1.54",
    ),
    "batch_crossover": (
        """
model: {method: eagle3, num_experts: 128, experts_per_token: 8}
measurements: {cycles: [
    {num_steps: 0, batch: 1, tok_s: 150},
    {num_steps: 3, batch: 1, tok_s: 240, acceptance_length: 2.5},
    {num_steps: 0, batch: 64, tok_s: 4000},
    {num_steps: 3, batch: 64, tok_s: 3300, acceptance_length: 2.5}
]}
""",
        (),
        "nothing",
        "1.56",
    ),
    "speeds_only_slow": (
        """
system: {engine: llama.cpp, gpu: RTX 3060}
model: {method: draft_model}
measurements: {cycles: [
    {num_steps: 0, tok_s: 31},
    {num_steps: 8, tok_s: 22},
    {num_steps: 4, tok_s: 25}
]}
""",
        ("slower_than_plain_everywhere",),
        "unknown",
        "1.24",
    ),
    "speeds_only_engine": (
        """
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, tok_s: 30},
    {num_steps: 1, tok_s: 15}
]}
""",
        ("slower_than_plain_everywhere",),
        "engine",
        "2.00",
    ),
    "speeds_only_impossible": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 30},
    {num_steps: 1, tok_s: 66}
]}
""",
        (),
        "measurement",
        "",
    ),
    "ngram": (
        """
model: {method: ngram}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 8, tok_s: 85, acceptance_length: 1.3}
]}
""",
        ("slower_than_plain_everywhere",),
        "drafter",
        "1.53",
    ),
    "equal": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 2, tok_s: 100, acceptance_length: 1.6}
]}
""",
        ("slower_than_plain_everywhere",),
        "unknown",
        "1.60",
    ),
    "not_everywhere": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 2, tok_s: 90, acceptance_length: 1.6},
    {num_steps: 2, batch: 8, tok_s: 300, acceptance_length: 1.6}
]}
""",
        (),
        "unknown",
        "1.78",
    ),
    "range_slow": (
        """
measurements: {cycles: [
    {num_steps: 0, range_tok_s: [98, 102]},
    {num_steps: 2, range_tok_s: [85, 90], acceptance_length: 1.6}
]}
""",
        ("slower_than_plain_everywhere",),
        "unknown",
        "1.83",
    ),
    "dp2": (
        """
system: {num_gpus: 2, data_parallel: 2}
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, batch: 2, tok_s: 100},
    {num_steps: 1, batch: 2, tpot_ms: 12.5, acceptance_length: 1.8}
]}
""",
        (),
        "nothing",
        "1.12",
    ),
    "cycle_survival": (
        """
acceptance: [
    {num_steps: 2, survival: [0.8, 0.6]}
]
measurements: {cycles: [
    {num_steps: 0, cycle_ms: 20},
    {num_steps: 2, cycle_ms: 30}
]}
""",
        (),
        "nothing",
        "1.50",
    ),
    "cycle_too_short": (
        """
acceptance: [
    {num_steps: 2, survival: [0.8, 0.6]}
]
measurements: {cycles: [
    {num_steps: 0, cycle_ms: 20},
    {num_steps: 2, cycle_ms: 15}
]}
""",
        ("speedup_exceeds_acceptance_length",),
        "measurement",
        "",
    ),
    "everything": (
        """
acceptance: [
    {num_steps: 1, conditional: [0.5]},
    {num_steps: 3, conditional: [0.6, 0.5, 0.5]}
]
measurements: {cycles: [
    {num_steps: 0, batch: 1, tok_s: 100},
    {num_steps: 0, batch: 8, tok_s: 500},
    {num_steps: 0, batch: 1, speculation: true, tok_s: 90},
    {num_steps: 3, batch: 1, tok_s: 490, acceptance_length: 4.5},
    {num_steps: 3, batch: 8, tok_s: 400, acceptance_length: 2.0}
]}
""",
        (
            "speedup_exceeds_acceptance_length",
            "acceptance_length_exceeds_steps_plus_one",
            "aggregate_falls_with_batch",
            "zero_draft_step_slower_than_plain",
            "first_position_acceptance_differs",
        ),
        "measurement",
        "",
    ),
    "speedups_only": (
        """
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 0, tok_s: 1.0},
    {num_steps: 5, tok_s: 1.8, acceptance_length: 3.1},
    {num_steps: 5, workload: math, tok_s: 2.4, acceptance_length: 3.9}
]}
""",
        (),
        "nothing",
        "1.72",
    ),
    "plain_only": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 70}
]}
""",
        (),
        "unknown",
        "",
    ),
    "empty": (
        """

""",
        (),
        "unknown",
        "",
    ),
    "bounds_only": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 70},
    {num_steps: 3, tok_s_at_most: 70, acceptance_length: 2.0}
]}
""",
        (),
        "unknown",
        "",
    ),
    "validation_only": (
        """
validation: {cycles: [
    {num_steps: 0, tok_s: 70},
    {num_steps: 3, tok_s: 90, acceptance_length: 2.0}
]}
""",
        (),
        "unknown",
        "",
    ),
    "zero_without_plain": (
        """
measurements: {cycles: [
    {num_steps: 0, speculation: true, tok_s: 70},
    {num_steps: 3, tok_s: 90, acceptance_length: 2.0}
]}
""",
        (),
        "unknown",
        "",
    ),
    "two_comms": (
        """
comm: {ring: {}}
system: {num_gpus: 8, tensor_parallel: 8}
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 0, tok_s: 90},
    {num_steps: 3, tok_s: 66, acceptance_length: 1.9},
    {num_steps: 3, comm: ring, tok_s: 99, acceptance_length: 1.9}
]}
""",
        (),
        "nothing",
        "1.73",
    ),
    "two_comms_al": (
        """
comm: {ring: {}}
measurements: {cycles: [
    {num_steps: 0, tok_s: 90},
    {num_steps: 3, tok_s: 85, acceptance_length: 1.9},
    {num_steps: 3, comm: ring, tok_s: 99, acceptance_length: 2.3}
]}
""",
        (),
        "nothing",
        "2.09",
    ),
    "contexts": (
        """
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, context_tokens: 1024, tok_s: 100},
    {num_steps: 2, context_tokens: 1024, tok_s: 140, acceptance_length: 2.2},
    {num_steps: 0, context_tokens: 32768, tok_s: 60},
    {num_steps: 2, context_tokens: 32768, tok_s: 55, acceptance_length: 2.2}
]}
""",
        (),
        "nothing",
        "1.57",
    ),
    "mixture": (
        """
workloads: {chat: {weight: 0.5}, code: {weight: 0.5}}
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100, workload: chat},
    {num_steps: 3, workload: chat, tok_s: 80, acceptance_length: 1.4},
    {num_steps: 3, workload: code, tok_s: 160, acceptance_length: 2.8}
]}
""",
        (),
        "nothing",
        "",
    ),
    "moe_batch16": (
        """
system: {gpu: H100, num_gpus: 4, tensor_parallel: 4}
model: {method: mtp, num_experts: 256, experts_per_token: 8}
measurements: {cycles: [
    {num_steps: 0, batch: 16, tok_s: 1600},
    {num_steps: 1, batch: 16, tok_s: 1500, acceptance_length: 1.7}
]}
""",
        ("slower_than_plain_everywhere",),
        "engine",
        "1.81",
    ),
    "eager": (
        """
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 3, cuda_graph: false, tok_s: 62, acceptance_length: 2.3}
]}
evidence: [{about: draft_cuda_graph, value: false, source: log}]
""",
        ("slower_than_plain_everywhere",),
        "engine",
        "3.71",
    ),
    "k15": (
        """
model: {method: draft_model}
measurements: {cycles: [
    {num_steps: 0, tok_s: 20},
    {num_steps: 15, tok_s: 30, acceptance_length: 5.5}
]}
""",
        (),
        "nothing",
        "3.67",
    ),
    "parts": (
        """
model: {method: draft_model}
measurements: {
  verify: [{tokens: 5, time_ms: 60}], draft: [{num_steps: 4, time_ms: 20}],
  cycles: [{num_steps: 0, tpot_ms: 50}, {num_steps: 4, cycle_ms: 82, acceptance_length: 2.5}]}
""",
        (),
        "nothing",
        "1.64",
    ),
    "part_above": (
        """
measurements: {
  verify: [{tokens: 5, time_ms: 90}],
  cycles: [{num_steps: 0, tpot_ms: 50}, {num_steps: 4, cycle_ms: 82, acceptance_length: 2.5}]}
""",
        (),
        "nothing",
        "1.64",
    ),
    "poor_and_shorter_unmeasured": (
        """
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 8, tok_s: 60, acceptance_length: 1.9}
]}
""",
        ("slower_than_plain_everywhere",),
        "drafter",
        "3.17",
    ),
    "fractional_batch": (
        """
measurements: {cycles: [
    {num_steps: 0, batch: 7.4, tok_s: 500},
    {num_steps: 2, batch: 7.4, tok_s: 640, acceptance_length: 2.0}
]}
""",
        (),
        "nothing",
        "1.56",
    ),
    "mdt": (
        """
model: {method: ngram}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 8, mean_draft_tokens: 1.2, tok_s: 140, acceptance_length: 1.6}
]}
""",
        (),
        "nothing",
        "1.14",
    ),
    "al_one": (
        """
model: {method: eagle3}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 3, tok_s: 70, acceptance_length: 1.0}
]}
""",
        ("slower_than_plain_everywhere",),
        "drafter",
        "1.43",
    ),
    "tree_impossible": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 3, topk: 4, num_draft_tokens: 16, tok_s: 430}
]}
""",
        (),
        "measurement",
        "",
    ),
    "cycle_no_al": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 2, cycle_ms: 40}
]}
""",
        (),
        "engine",
        "",
    ),
    "cycle_no_al_cheap": (
        """
measurements: {cycles: [
    {num_steps: 0, tok_s: 100},
    {num_steps: 2, cycle_ms: 8}
]}
""",
        (),
        "measurement",
        "",
    ),
    "al_only": (
        """
model: {method: mtp}
acceptance: [
    {num_steps: 3, acceptance_length: 2.1}
]
measurements: {cycles: [
    {num_steps: 0, tok_s: 100}
]}
""",
        (),
        "unknown",
        "",
    ),
    "noisy": (
        """
model: {method: mtp}
measurements: {cycles: [
    {num_steps: 0, tok_s: 100, sd_tok_s: 12},
    {num_steps: 3, tok_s: 104, sd_tok_s: 12, acceptance_length: 2.0}
]}
""",
        (),
        "unknown",
        "neither",
    ),
    "zero_beats_neg": (
        """
measurements: {cycles: [
    {num_steps: 0, batch: 8, tok_s: 400},
    {num_steps: 0, batch: 8, speculation: true, tok_s: 410},
    {num_steps: 1, batch: 8, tok_s: 520, acceptance_length: 1.6}
]}
""",
        (),
        "nothing",
        "1.23",
    ),
}
