"""What each engine is told: the flags of the version, schedules by batch, constraints respected or named."""

import json
import math
import shlex

import pytest

from specmodel.errors import UsageError
from specmodel.launch import ENGINES, BatchRange, Plan, capture_sizes, launch

SCHEDULE = (
    BatchRange(batch_from=1, batch_to=7, num_steps=5),
    BatchRange(batch_from=8, batch_to=23, num_steps=3),
    BatchRange(batch_from=24, batch_to=None, num_steps=0),
)
CURVE = (0.72, 0.5, 0.33, 0.2, 0.1)


def plan(**changes):
    values = {"num_steps": 3, "max_batch": 16, "target": "T", "draft": "D", "method": "eagle3", "tensor_parallel": 8}
    return Plan(**(values | changes))


def words(text):
    return shlex.split(text.replace("\\\n", " "))


def option(text, name):
    parts = words(text)
    return parts[parts.index(name) + 1]


def config_of(vllm):
    return json.loads(option(vllm.command, "--speculative-config"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", [(), SCHEDULE], ids=["one shape", "schedule"])
@pytest.mark.parametrize("steps", [0, 1, 3, 8])
@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model", "ngram", "parallel", None])
def test_every_command_is_a_command_and_names_its_version(engine, schedule, steps, method):
    made = launch(plan(num_steps=steps, schedule=schedule, method=method, survival=(0.5,) * 8), engine)
    assert made.assumed
    assert made.version in made.lines()[0]
    assert "assumed" in made.lines()[0]
    parts = words(made.command)
    assert all(part.isprintable() for part in parts)
    speculating = [part for part in parts if "spec" in part or "draft" in part]
    if not steps and (not schedule or engine == "llamacpp"):
        assert not speculating
        assert not any("speculative_config" in text for text in made.files.values())
    assert json.loads(json.dumps(made.to_dict()))["command"] == made.command


def test_sglang_chain_verifies_one_token_more_than_it_drafts():
    made = launch(plan(num_steps=3), "sglang", "0.5.18")
    assert option(made.command, "--speculative-num-steps") == "3"
    assert option(made.command, "--speculative-num-draft-tokens") == "4"
    assert option(made.command, "--speculative-eagle-topk") == "1"
    assert option(made.command, "--cuda-graph-max-bs-decode") == "16"
    assert option(made.command, "--max-running-requests") == "16"
    assert not made.assumed
    # The shorter names of the graphs' options are the only ones before 0.5.15.
    assert option(launch(plan(), "sglang", "0.5.13").command, "--cuda-graph-max-bs") == "16"


def test_sglang_names_what_a_tree_needs_and_the_default_cap():
    made = launch(plan(num_steps=5, topk=4, num_draft_tokens=60, max_batch=64), "sglang")
    assert option(made.command, "--speculative-num-draft-tokens") == "60"
    text = "\n".join(made.notes)
    assert "trtllm_mha" in text
    assert "more than a tree of 5 steps by 4 uses (21)" in text
    assert "caps the batch at 48" in text


def test_sglang_schedule_is_a_fixed_adaptive_configuration():
    made = launch(plan(num_steps=5, schedule=SCHEDULE, max_batch=32), "sglang", "0.5.18")
    config = json.loads(made.files["adaptive.json"])
    assert {key: entry["candidate_steps"] for key, entry in config.items()} == {"1": [5], "8": [3], "24": [0]}
    steps = int(option(made.command, "--speculative-num-steps"))
    assert steps in {k for entry in config.values() for k in entry["candidate_steps"]}
    # A batch is padded up before its range is looked up: within every range the padded batch is in the range too.
    sizes = [int(s) for s in made.command.split("--cuda-graph-bs-decode ")[1].split(" --")[0].split()]
    assert made.capture_sizes == tuple(sizes)
    for batch in range(1, 33):
        padded = next(size for size in sizes if size >= batch)
        ranges = [next(r for r in SCHEDULE if r.batch_from <= b <= (r.batch_to or b)) for b in (batch, padded)]
        assert ranges[0] is ranges[1]


@pytest.mark.parametrize(
    ("changes", "version", "why"),
    [
        ({}, "0.5.12", "need SGLang 0.5.13"),
        ({}, "0.5.13", "zero steps"),
        ({"method": "draft_model"}, "0.5.18", "for EAGLE and EAGLE3"),
        ({"data_parallel": 2}, "0.5.18", "data-parallel"),
        ({"flags": ("--enable-dp-attention",)}, "0.5.18", "data-parallel"),
    ],
)
def test_sglang_says_what_keeps_a_schedule_from_being_deployed(changes, version, why):
    made = launch(plan(num_steps=5, schedule=SCHEDULE, max_batch=32, **changes), "sglang", version)
    assert not made.files
    assert "--speculative-adaptive" not in made.command
    assert any(why in note for note in made.notes)


def test_sglang_dspark_takes_a_step_time_table():
    made = launch(plan(num_steps=7, method="parallel", step_ms={8: 8.0, 64: 10.0}), "sglang")
    table = json.loads(made.files["sps.json"])
    assert table == {"sample_batch_tokens": [8, 64], "sample_steps_per_sec": [125.0, 100.0], "max_batch_tokens": 64}
    assert option(made.command, "--speculative-dspark-sps-table-path") == "sps.json"
    assert option(made.command, "--speculative-dspark-block-size") == "7"


def test_vllm_config_and_schedule():
    made = launch(plan(num_steps=5, schedule=SCHEDULE, max_batch=32), "vllm", "0.26.0")
    config = config_of(made)
    assert config["num_speculative_tokens"] == 5  # every entry is clamped to it
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 7, 5], [8, 23, 3], [24, 32, 0]]
    for changes, version, why in (({}, "0.23.0", "0.24"), ({"data_parallel": 2}, "0.26.0", "data parallelism")):
        made = launch(plan(num_steps=3, schedule=SCHEDULE, max_batch=32, **changes), "vllm", version)
        assert "num_speculative_tokens_per_batch_size" not in config_of(made)
        assert config_of(made)["num_speculative_tokens"] == 3
        assert any(why in note for note in made.notes)


def test_vllm_captures_what_the_recommendation_needs_beyond_its_default():
    assert "--compilation-config" not in launch(plan(max_batch=64), "vllm").command
    made = launch(plan(max_batch=256), "vllm")
    sizes = json.loads(option(made.command, "--compilation-config"))["cudagraph_capture_sizes"]
    assert sizes == [4 * batch for batch in capture_sizes(plan(max_batch=256))]
    assert max(sizes) == 256 * 4


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("schedule", [(), SCHEDULE], ids=["one shape", "schedule"])
def test_captures_are_sequences_times_tokens_of_what_is_deployed(engine, schedule):
    made = launch(plan(num_steps=3, schedule=schedule, max_batch=32), engine)
    assert made.capture_sizes[-1] == 32
    for size, tokens in zip(made.capture_sizes, made.capture_tokens, strict=True):
        steps = next(r.num_steps for r in SCHEDULE if r.batch_to is None or size <= r.batch_to)
        assert tokens == size * (1 + (steps if schedule and engine != "llamacpp" else 3))
    assert made.to_dict()["capture_tokens"] == list(made.capture_tokens)


def test_the_sizes_that_vllm_captures_follow_its_schedule():
    falling = (
        BatchRange(batch_from=1, batch_to=64, num_steps=5),
        BatchRange(batch_from=65, batch_to=None, num_steps=1),
    )
    made = launch(plan(num_steps=5, schedule=falling, max_batch=512), "vllm", "0.26.0")
    sizes = json.loads(option(made.command, "--compilation-config"))["cudagraph_capture_sizes"]
    assert sizes == sorted(set(made.capture_tokens))
    assert {64 * 6, 512 * 2} <= set(sizes)
    assert 512 * 6 not in sizes


def captured_by(made):
    """What an engine is told to capture, by its own count, or what it captures by default."""
    if made.engine == "trtllm":
        return yaml_of(made)["cuda_graph_config"]["batch_sizes"]
    if made.engine == "sglang":
        return [
            int(s) for s in made.command.split("--cuda-graph-bs-decode ")[1].split(" --")[0].replace("\\", "").split()
        ]
    if "--compilation-config" not in made.command:
        return [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return json.loads(option(made.command, "--compilation-config"))["cudagraph_capture_sizes"]


def padded(size, sizes):
    return next((s for s in sizes if s >= size), math.inf)


@pytest.mark.parametrize("engine", ["sglang", "vllm", "trtllm"])
@pytest.mark.parametrize("unit", ["tokens", "sequences"])
@pytest.mark.parametrize("schedule", [(), SCHEDULE], ids=["one shape", "schedule"])
@pytest.mark.parametrize(("max_batch", "data_parallel"), [(32, 1), (256, 1), (250, 2)])
@pytest.mark.parametrize("file", [(1, 2, 4, 8, 12, 16, 24, 32), (3, 5, 7, 29, 41, 100, 900), tuple(range(1, 130))])
def test_no_batch_is_padded_further_than_by_the_sizes_of_the_file(
    engine, unit, schedule, max_batch, data_parallel, file
):
    values = {"schedule": schedule, "max_batch": max_batch, "data_parallel": data_parallel}
    made = launch(plan(captured=file, captured_unit=unit, **values), engine)
    sizes = captured_by(made)
    assert sizes == sorted(set(sizes))
    followed = schedule and (data_parallel == 1 or engine == "trtllm")
    largest = -(-max_batch // data_parallel)
    own = unit == ("tokens" if engine == "vllm" else "sequences")
    needed = made.capture_tokens if engine == "vllm" else made.capture_sizes
    if own:
        assert {size for size in file if size <= max(needed)} <= set(sizes)
    for batch in range(1, largest + 1):
        steps = next(r.num_steps for r in SCHEDULE if r.batch_to is None or batch * data_parallel <= r.batch_to)
        width = 1 + (steps if followed else 3)
        before = padded(batch * width, file) if unit == "tokens" else width * padded(batch, file)
        # Beyond the largest size nothing is padded, nor is a graph replayed.
        now = padded(batch * width, sizes) if engine == "vllm" else width * padded(batch, sizes)
        # vLLM's own list is finer than any that is worth naming; what another engine captured is not named for it.
        assert now <= before or (engine == "vllm" and not own and "--compilation-config" not in made.command)


def test_sizes_of_the_file_beyond_the_recommendation_are_left_out():
    made = launch(plan(schedule=SCHEDULE, max_batch=26, captured=(1, 12, 24, 48), captured_unit="sequences"), "sglang")
    assert captured_by(made) == [1, 2, 4, 7, 8, 12, 16, 23, 24, 26]
    (note,) = [note for note in made.notes if "verify graphs are needed" in note]
    assert "12 *" not in note
    # Without sizes in the file the engine fills in its own up to the largest.
    assert "--cuda-graph-max-bs-decode 26" in launch(plan(max_batch=26), "sglang").command.replace(" \\\n ", "")


@pytest.mark.parametrize("engine", ENGINES)
def test_the_line_is_said_to_be_the_settings_of_the_recommendation_alone(engine):
    made = launch(plan(), engine)
    assert sum("beside the server's own other flags" in note for note in made.notes) == 1
    refused = launch(plan(topk=4, num_draft_tokens=40), "vllm")
    assert not any("beside the server's" in note for note in refused.notes)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cap_of_the_server_is_said(engine):
    made = launch(plan(max_batch=24), engine)
    (note,) = [note for note in made.notes if "caps the server at the largest batch" in note]
    name = note.split()[0]
    assert option(made.command, name) == "24"


@pytest.mark.parametrize(
    ("engine", "version", "changes"),
    [
        ("sglang", "0.5.12", {}),
        ("vllm", "0.23.0", {}),
        ("llamacpp", "b10472", {}),
        ("vllm", "0.26", {"data_parallel": 2}),
    ],
)
def test_without_a_schedule_the_best_single_shape_is_deployed(engine, version, changes):
    """The plan's own steps are those that lose least over all batches; the longest of the ranges are not."""
    made = launch(plan(num_steps=1, schedule=SCHEDULE, max_batch=32, **changes), engine, version)
    name = {"sglang": "--speculative-num-steps", "llamacpp": "--spec-draft-n-max"}.get(engine)
    steps = int(option(made.command, name)) if name else config_of(made)["num_speculative_tokens"]
    assert steps == 1
    assert any("no schedule by batch" in note and "1 step at every batch" in note for note in made.notes)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_engines_without_trees_say_so_and_give_no_command(engine):
    made = launch(plan(num_steps=3, topk=4, num_draft_tokens=8), engine)
    assert made.command is None
    assert any("chains only" in note for note in made.notes)
    assert not any(line.startswith(("vllm", "llama")) for line in made.lines())


def yaml_of(made):
    from specmodel.documents import parse

    return parse(made.files["config.yaml"], "config.yaml")[0]


def test_trtllm_schedule_by_version():
    new = yaml_of(launch(plan(num_steps=5, schedule=SCHEDULE, max_batch=32), "trtllm", "1.3.0"))
    assert new["speculative_config"]["draft_len_schedule"] == {7: 5, 23: 3}
    assert new["speculative_config"]["max_draft_len"] == 5
    old = yaml_of(launch(plan(num_steps=5, schedule=SCHEDULE, max_batch=32), "trtllm", "1.2.0"))
    assert old["speculative_config"]["draft_len_schedule"] == {1: 5, 8: 3, 24: 0}
    assert old["cuda_graph_config"]["batch_sizes"] == [1, 2, 4, 7, 8, 16, 23, 32]


def test_trtllm_refuses_a_schedule_that_drafts_more_at_larger_batches():
    rising = (BatchRange(batch_from=1, batch_to=3, num_steps=1), BatchRange(batch_from=4, batch_to=None, num_steps=3))
    made = launch(plan(num_steps=3, schedule=rising), "trtllm")
    assert "draft_len_schedule" not in yaml_of(made)["speculative_config"]
    assert any("smallest batch must draft the most" in note for note in made.notes)


def test_trtllm_refuses_a_tree_that_its_engine_would():
    made = launch(plan(num_steps=3, topk=2, num_draft_tokens=12), "trtllm")
    assert made.command is None
    assert "verifies 4 to 7 tokens" in made.notes[0]


@pytest.mark.parametrize("name", ["a: b", "x\nEOF\ntouch INJECTED", 'quo"te', "it's", "- x", "{a}", "#c", "\u2028"])
def test_trtllm_names_are_yaml_strings(name):
    made = launch(plan(draft=name), "trtllm")
    assert yaml_of(made)["speculative_config"]["speculative_model"] == name
    assert "EOF" not in made.files["config.yaml"].split("\n")


def test_sglang_has_no_standalone_drafter_under_data_parallel_attention():
    made = launch(plan(method="draft_model", flags=("--enable-dp-attention",)), "sglang")
    assert made.command is None
    assert "no STANDALONE under --enable-dp-attention" in made.notes[0]


def test_trtllm_trees_and_older_spellings():
    tree = yaml_of(launch(plan(num_steps=3, topk=4, num_draft_tokens=9), "trtllm"))["speculative_config"]
    assert (tree["use_dynamic_tree"], tree["dynamic_tree_max_topK"], tree["max_total_draft_tokens"]) == (True, 4, 8)
    made = launch(plan(), "trtllm", "0.21.0")
    assert "--extra_llm_api_options" in made.command
    assert "speculative_model_dir" in yaml_of(made)["speculative_config"]


def test_llamacpp_by_build():
    new, old = (
        launch(plan(method="draft_model"), "llamacpp", "b10472"),
        launch(plan(method="draft_model"), "llamacpp", "b8000"),
    )
    assert option(new.command, "--spec-draft-n-max") == option(old.command, "--draft-max") == "3"
    assert "--spec-type" not in old.command
    assert any("--draft-max" in note for note in new.notes)
    # Drafting that stops early is another cycle than the calibrated one.
    assert option(new.command, "--spec-draft-p-min") == "0"
    assert any("no schedule" in note for note in launch(plan(schedule=SCHEDULE), "llamacpp").notes)


def test_pinned_acceptance_of_each_engine_is_the_calibrated_one():
    steps = 4
    length = 1 + sum(CURVE[:steps])
    made = {engine: launch(plan(num_steps=steps, survival=CURVE), engine) for engine in ENGINES}
    assert f"SGLANG_SIMULATE_ACC_LEN={length:.4g}" in made["sglang"].validation[0]
    (line,) = made["vllm"].validation
    config = json.loads(shlex.split(line)[1])
    assert config["synthetic_acceptance_rates"] == list(CURVE[:steps])
    assert config["rejection_sample_method"] == "synthetic"
    assert made["trtllm"].validation == (f"export TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS={length - 1:.4g}",)
    assert made["llamacpp"].validation == ()
    for one in made.values():
        production = [line for line in one.lines() if not line.startswith("#")]
        assert not any("SIMULATE" in line or "synthetic" in line or "FORCE" in line for line in production)


def test_llamacpp_pins_the_curve_by_position_from_the_build_that_can():
    for steps in (1, 3, 5):
        made = launch(plan(num_steps=steps, survival=CURVE, method="draft_model"), "llamacpp", "b10649")
        (line,) = made.validation
        name, rates = line.split()
        assert name == "--spec-synth-rates"
        assert [float(rate) for rate in rates.split(",")] == pytest.approx(CURVE[:steps], rel=1e-3)
        assert not any("synth" in line for line in made.lines() if not line.startswith("#"))
    assert launch(plan(survival=CURVE), "llamacpp", "b10648").validation == ()


def test_each_range_of_a_schedule_pins_its_own_length():
    made = {e: launch(plan(num_steps=5, schedule=SCHEDULE, survival=CURVE, max_batch=32), e) for e in ENGINES}
    lengths = [1 + sum(CURVE[:5]), 1 + sum(CURVE[:3])]
    sglang = [line for line in made["sglang"].validation if "ACC_LEN" in line]
    assert [f"ACC_LEN={length:.4g} " in line for length, line in zip(lengths, sglang, strict=True)] == [True, True]
    assert ["batch 1 to 7" in sglang[0], "batch 8 to 23" in sglang[1]] == [True, True]
    trtllm = made["trtllm"].validation
    assert [f"TOKENS={length - 1:.4g} " in line for length, line in zip(lengths, trtllm, strict=True)] == [True, True]
    (line,) = made["vllm"].validation
    assert json.loads(shlex.split(line)[1])["synthetic_acceptance_rates"] == list(CURVE)


def test_where_nothing_pins_acceptance_it_is_said():
    tree = launch(plan(num_steps=3, topk=4, num_draft_tokens=8, survival=CURVE), "sglang")
    assert tree.validation == ()
    assert any("pinned for chains" in note for note in tree.notes)
    llama = launch(plan(method="draft_model", survival=CURVE), "llamacpp")
    assert llama.validation == ()
    assert any("pinned from b10649 on" in note for note in llama.notes)


def test_a_curve_too_short_pins_nothing():
    assert all(launch(plan(num_steps=8, survival=CURVE), engine).validation == () for engine in ENGINES)


def test_environment_and_its_caveats():
    made = launch(plan(env={"NCCL_PROTO": "LL", "NCCL_NVLS_ENABLE": "0"}), "sglang", "0.5.4")
    assert "export NCCL_PROTO=LL" in made.lines()
    text = "\n".join(made.notes)
    assert "change nothing where the engine's own all-reduce" in text
    assert "overwrites NCCL_NVLS_ENABLE" in text
    calm = launch(plan(env={"NCCL_PROTO": "LL"}, flags=("--disable-custom-all-reduce",)), "sglang", "0.5.18")
    assert "--disable-custom-all-reduce" in calm.command
    assert not any("NCCL" in note for note in calm.notes)


def test_shell_words_are_quoted():
    made = launch(plan(target="a b; rm -rf x", env={"X": "1; reboot"}), "sglang")
    assert "a b; rm -rf x" in words(made.command)
    assert "export X='1; reboot'" in made.lines()


@pytest.mark.parametrize(
    ("first", "last", "message"),
    [
        ((2, 3), (4, None), "at batch 1"),
        ((1, 3), (5, None), "at batch 4"),
        ((1, None), (4, None), "after the open end"),
    ],
)
def test_schedules_with_gaps_are_refused(first, last, message):
    ranges = [BatchRange(batch_from=a, batch_to=b, num_steps=1) for a, b in (first, last)]
    with pytest.raises(UsageError, match=message):
        launch(plan(schedule=ranges), "sglang")


@pytest.mark.parametrize(("engine", "version"), [("mlc", None), ("sglang", "main"), ("llamacpp", "")])
def test_unknown_engines_and_versions_are_refused(engine, version):
    with pytest.raises(UsageError, match=r"no engine|must begin with a number"):
        launch(plan(), engine, version)
