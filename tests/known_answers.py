"""Reports of the kind of `tests/data/reports`, made up, with answers worked out by hand."""

HEAD = "schema: specmodel.calibration/1\nname: invented\n"

# Name: (the body of the file, what follows from it).
INVENTED: dict[str, tuple[str, dict]] = {
    "tpot_of_one_sequence_at_batch_4": (
        """
measurements:
  cycles:
    - {num_steps: 0, batch: 4, tpot_ms: 20}
    - {num_steps: 3, batch: 4, tpot_ms: 12.5, acceptance_length: 2.4}
""",
        {
            "cycle_plain_steps": [{"select": {"num_steps": 3, "batch": 4}, "value": 1.5}],
            "cycle_ms": [{"select": {"num_steps": 3}, "value": 30.0}, {"select": {"num_steps": 0}, "value": 20.0}],
            "beats_plain": [{"select": {"num_steps": 3}, "value": True}],
            "best_measured": [{"select": {"batch": 4}, "value": {"num_steps": 3, "num_draft_tokens": 4}}],
            "max_speedup": [{"select": {"num_steps": 3}, "value": 4}],
            "flags": [],
        },
    ),
    "ranges_that_agree": (
        """
measurements:
  cycles:
    - {num_steps: 0, range_tok_s: [95, 105]}
    - {num_steps: 2, range_tok_s: [118, 122], acceptance_length: 2.0}
""",
        {
            "cycle_plain_steps": [{"select": {"num_steps": 2}, "low": 2 * 95 / 122, "high": 2 * 105 / 118}],
            "beats_plain": [{"select": {"num_steps": 2}, "value": True}],
            "best_measured": [{"select": {"batch": 1}, "value": {"num_steps": 2}}],
            "flags": [],
        },
    ),
    "a_range_across_plain_claims_nothing": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 1, range_tok_s: [94, 104], acceptance_length: 1.5}
""",
        {
            "beats_plain": [],
            "cycle_plain_steps": [{"select": {"num_steps": 1}, "low": 150 / 104, "high": 150 / 94}],
            "best_measured": [{"select": {"batch": 1}, "value": {"num_steps": 0}}],
            "flags": [],
        },
    ),
    "a_range_below_plain": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 1, range_tpot_ms: [10.5, 11.0], acceptance_length: 1.5}
""",
        {
            "beats_plain": [{"select": {"num_steps": 1}, "value": False}],
            "cycle_ms": [{"select": {"num_steps": 1}, "low": 15.75, "high": 16.5}],
            "flags": ["slower_than_plain_everywhere"],
        },
    ),
    "nothing_drafted_at_three_batches": (
        """
measurements:
  cycles:
    - {num_steps: 0, batch: 1, tok_s: 50}
    - {num_steps: 0, batch: 8, tok_s: 400}
    - {num_steps: 0, batch: 32, tok_s: 800}
    - {num_steps: 0, batch: 1, speculation: true, tok_s: 49.9}
    - {num_steps: 0, batch: 8, speculation: true, tok_s: 320}
    - {num_steps: 0, batch: 32, speculation: true, tpot_ms: 50}
""",
        {
            "zero_draft_ratio": [
                {
                    "select": {"num_steps": 0, "batch": 8, "speculation": True},
                    "plain": {"num_steps": 0, "batch": 8, "speculation": False},
                    "value": 1.25,
                },
                {"select": {"batch": 32, "speculation": True}, "plain": {"speculation": False}, "value": 1.25},
                {"select": {"batch": 1, "speculation": True}, "plain": {"batch": 1}, "value": 50 / 49.9},
            ],
            "beats_plain": [{"select": {"batch": 8, "speculation": True}, "value": False}],
            "flags": ["zero_draft_step_slower_than_plain"],
        },
    ),
    "nothing_drafted_costs_nothing": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 0, speculation: true, tok_s: 99.7}
""",
        {"zero_draft_ratio": [{"select": {"speculation": True}, "plain": {}, "value": 100 / 99.7}], "flags": []},
    ),
    "nothing_drafted_under_another_setting": (
        """
comm: {ring: {}}
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 0, comm: ring, speculation: true, tok_s: 80}
""",
        {"zero_draft_ratio": [], "beats_plain": [{"select": {"comm": "ring"}, "value": False}], "flags": []},
    ),
    "every_draft_accepted": (
        """
measurements: {cycles: [{num_steps: 2, tok_s: 500}]}
acceptance: [{num_steps: 2, survival: [1, 1]}]
""",
        {
            "cycle_plain_steps": [],
            "cycle_plain_steps_range": [],
            "flags": [],
        },
    ),
    "the_total_falls": (
        """
measurements:
  cycles:
    - {num_steps: 2, batch: 8, tok_s: 500}
    - {num_steps: 2, batch: 16, tok_s: 480}
    - {num_steps: 3, batch: 8, tok_s: 500}
    - {num_steps: 3, batch: 16, tok_s: 492}
""",
        {
            "best_measured": [{"select": {"batch": 16}, "value": {"num_steps": 3}}],
            "cycle_plain_steps": [],
            "cycle_plain_steps_range": [],
            "flags": ["aggregate_falls_with_batch"],
        },
    ),
    "the_total_falls_within_noise_or_range": (
        """
measurements:
  cycles:
    - {num_steps: 2, batch: 8, tok_s: 500}
    - {num_steps: 2, batch: 16, tok_s: 491}
    - {num_steps: 4, batch: 8, tok_s: 500}
    - {num_steps: 4, batch: 16, range_tok_s: [470, 495]}
    - {num_steps: 0, batch: 8, tok_s: 400}
    - {num_steps: 0, batch: 16, tok_s: 300}
""",
        {"flags": []},
    ),
    "more_accepted_than_there_is": (
        """
measurements:
  cycles:
    - {num_steps: 2, tok_s: 150, acceptance_length: 3.4}
    - {num_steps: 4, tok_s: 170, acceptance_length: 3.6}
""",
        {
            "cycle_ms": [{"select": {"num_steps": 2}, "value": 3400 / 150}],
            "max_speedup": [{"select": {"num_steps": 2}, "value": 3}],
            "flags": ["acceptance_length_exceeds_steps_plus_one"],
        },
    ),
    "more_accepted_than_there_is_in_an_entry": (
        """
acceptance:
  - {num_steps: 2, acceptance_length: 3.2}
""",
        {"flags": ["acceptance_length_exceeds_steps_plus_one"]},
    ),
    "faster_than_its_acceptance": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 50}
    - {num_steps: 1, tok_s: 110, acceptance_length: 1.9}
""",
        {
            "cycle_plain_steps": [{"select": {"num_steps": 1}, "value": 95 / 110}],
            "beats_plain": [{"select": {"num_steps": 1}, "value": True}],
            "flags": ["speedup_exceeds_acceptance_length"],
        },
    ),
    "as_fast_as_its_acceptance_within_noise": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 1, tok_s: 190.5, acceptance_length: 1.9}
""",
        {"cycle_plain_steps": [{"select": {"num_steps": 1}, "value": 190 / 190.5}], "flags": []},
    ),
    "plain_of_the_same_workload_or_of_any": (
        """
measurements:
  cycles:
    - {num_steps: 0, workload: code, tok_s: 100}
    - {num_steps: 0, workload: chat, tok_s: 80}
    - {num_steps: 2, workload: chat, tok_s: 90, acceptance_length: 1.8}
    - {num_steps: 2, workload: poem, tok_s: 95, acceptance_length: 2.0}
""",
        {
            "cycle_plain_steps": [
                {"select": {"workload": "chat", "num_steps": 2}, "value": 1.6},
                {"select": {"workload": "poem"}, "value": 200 / 95},
            ],
            "beats_plain": [
                {"select": {"workload": "chat"}, "value": True},
                {"select": {"workload": "poem"}, "value": False},
            ],
            "best_measured": [
                {"select": {"batch": 1}, "value": {"num_steps": 0, "workload": "code"}},
                {"select": {"batch": 1, "workload": "chat"}, "value": {"num_steps": 2}},
                {"select": {"workload": "code"}, "value": {"num_steps": 0}},
            ],
            "flags": [],
        },
    ),
    "plain_at_another_context": (
        """
measurements:
  cycles:
    - {num_steps: 0, context_tokens: 1024, tok_s: 100}
    - {num_steps: 2, context_tokens: 8192, tok_s: 60, acceptance_length: 2.0}
""",
        {
            "cycle_plain_steps": [],
            "beats_plain": [],
            "best_measured": [{"select": {"context_tokens": 8192}, "value": {"num_steps": 2}}],
            "flags": [],
        },
    ),
    "the_fastest_plain_under_any_setting": (
        """
comm: {ring: {}}
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 0, comm: ring, tok_s: 120}
    - {num_steps: 1, tok_s: 110, acceptance_length: 1.5}
    - {num_steps: 1, comm: ring, tok_s: 118, acceptance_length: 1.5}
""",
        {
            "cycle_plain_steps": [
                {"select": {"comm": "default", "num_steps": 1}, "value": 180 / 110},
                {"select": {"comm": "ring", "num_steps": 1}, "value": 180 / 118},
            ],
            "best_measured": [
                {"select": {"batch": 1}, "value": {"num_steps": 0, "comm": "ring"}},
                {"select": {"comm": "default"}, "value": {"num_steps": 1}},
            ],
            "flags": ["slower_than_plain_everywhere"],
        },
    ),
    "a_cycle_time_with_counts": (
        """
measurements:
  cycles:
    - {num_steps: 0, tpot_ms: 10}
    - {num_steps: 3, cycle_ms: 20}
acceptance:
  - {num_steps: 3, drafts: 100, accepted_per_position: [70, 49, 28]}
""",
        {
            "cycle_plain_steps": [{"select": {"num_steps": 3}, "value": 2.0}],
            "cycle_ms": [{"select": {"num_steps": 3}, "value": 20.0}],
            "beats_plain": [{"select": {"num_steps": 3}, "value": True}],
            "best_measured": [{"select": {"batch": 1}, "value": {"num_steps": 3}}],
            "flags": [],
        },
    ),
    "a_cycle_time_alone": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 3, range_cycle_ms: [24, 26]}
""",
        {
            "cycle_plain_steps": [{"select": {"num_steps": 3}, "low": 2.4, "high": 2.6, "value": 2.5}],
            "cycle_plain_steps_range": [],
            "beats_plain": [],
            "best_measured": [{"select": {"batch": 1}, "value": {"num_steps": 0}}],
            "flags": [],
        },
    ),
    "a_tree_by_rank": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 2, topk: 2, num_draft_tokens: 5, tok_s: 110}
acceptance:
  - {num_steps: 2, topk: 2, num_draft_tokens: 5, drafts: 100, accepted_by_rank: [[60, 20], [30, 10]]}
""",
        {
            "cycle_plain_steps": [{"select": {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}, "value": 2.0}],
            "best_measured": [{"select": {"batch": 1}, "value": {"num_steps": 2, "topk": 2, "num_draft_tokens": 5}}],
            "flags": [],
        },
    ),
    "trees_of_one_depth": (
        """
measurements:
  cycles:
    - {num_steps: 0, batch: 2, tok_s: 200}
    - {num_steps: 3, batch: 2, tok_s: 240, acceptance_length: 2.1}
    - {num_steps: 3, topk: 4, num_draft_tokens: 16, batch: 2, tok_s: 230, acceptance_length: 2.6}
""",
        {
            "cycle_plain_steps": [
                {"select": {"num_steps": 3, "topk": 1}, "value": 1.75},
                {"select": {"topk": 4, "num_draft_tokens": 16}, "value": 520 / 230},
            ],
            "best_measured": [{"select": {"batch": 2}, "value": {"num_steps": 3, "topk": 1, "num_draft_tokens": 4}}],
            "flags": [],
        },
    ),
    "bounds_are_no_rates": (
        """
measurements:
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 2, tok_s_at_most: 90, acceptance_length: 2.0}
""",
        {
            "cycle_plain_steps": [],
            "beats_plain": [],
            "max_speedup": [{"select": {"num_steps": 2}, "value": 3}],
            "best_measured": [{"select": {"batch": 1}, "value": {"num_steps": 0}}],
            "flags": [],
        },
    ),
    "first_positions_apart": (
        """
acceptance:
  - {num_steps: 2, conditional: [0.50, 0.50]}
  - {num_steps: 4, survival: [0.56, 0.30, 0.15, 0.08]}
  - {workload: code, num_steps: 2, survival: [0.80, 0.60]}
  - {workload: code, num_steps: 4, survival: [0.84, 0.62, 0.40, 0.30]}
""",
        {"flags": ["first_position_acceptance_differs"]},
    ),
    "first_positions_together": (
        """
acceptance:
  - {num_steps: 2, drafts: 1000, accepted_per_position: [500, 250]}
  - {num_steps: 4, survival: [0.54, 0.30, 0.15, 0.08]}
  - {workload: code, num_steps: 2, survival: [0.80, 0.60]}
""",
        {"flags": []},
    ),
    "a_verify_pass_of_two_ranks": (
        """
system: {data_parallel: 2}
measurements:
  verify:
    - {tokens: 4, batch: 1, range_ms: [29, 31]}
    - {tokens: 8, batch: 2, time_ms: 40}
  cycles:
    - {num_steps: 0, batch: 2, tok_s: 100}
""",
        {
            "verify_plain_steps": [{"select": {"tokens": 4}, "value": 1.5, "low": 1.45, "high": 1.55}],
            "flags": [],
        },
    ),
    "a_verify_pass_in_steps_of_its_own_setting": (
        """
comm: {ring: {}}
measurements:
  verify:
    - {tokens: 4, time_ms: 15}
    - {tokens: 4, comm: ring, time_ms: 15}
  cycles:
    - {num_steps: 0, tok_s: 100}
    - {num_steps: 0, comm: ring, tok_s: 125}
""",
        {
            "verify_plain_steps": [
                {"select": {"tokens": 4, "comm": "default"}, "value": 1.5},
                {"select": {"tokens": 4, "comm": "ring"}, "value": 1.875},
            ],
            "flags": [],
        },
    ),
    "no_acceptance_at_all": (
        """
measurements:
  cycles:
    - {num_steps: 0, batch: 4, tok_s: 200}
    - {num_steps: 4, batch: 4, tok_s: 250}
    - {num_steps: 6, batch: 4, tok_s: 190}
""",
        {
            "cycle_plain_steps_range": [
                {"select": {"num_steps": 4}, "acceptance_length": [1, 5], "low": 0.8, "high": 4.0},
                {"select": {"num_steps": 6}, "acceptance_length": [1, 7], "low": 200 / 190, "high": 1400 / 190},
            ],
            "cycle_ms": [{"select": {"num_steps": 0}, "value": 20.0}],
            "cycle_plain_steps": [],
            "beats_plain": [
                {"select": {"num_steps": 4}, "value": True},
                {"select": {"num_steps": 6}, "value": False},
            ],
            "flags": [],
        },
    ),
}
