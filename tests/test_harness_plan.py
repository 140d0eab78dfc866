import argparse
import dataclasses
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmodel.errors import CalibrationError, UsageError
from specmodel.harness.budget import efforts, make_plan, total_ms
from specmodel.harness.environment import CommPlan
from specmodel.harness.options import add_arguments, conditional_of, numbers, output_of, request_of
from specmodel.harness.plan import MAX_ROWS, Request, build_points, check_memory, order
from specmodel.harness.roofline import draft_ms, known_gpu, verify_ms, weight_bytes
from specmodel.harness.shapes import read_draft, read_shape

H200 = known_gpu("NVIDIA H200")
LLAMA = read_shape("Llama-3.1-8B")
HEAD = read_draft("EAGLE3-Llama-3.1-8B", LLAMA)
ROUTED = read_shape("Qwen3-30B-A3B")
REQUEST = Request(
    target=LLAMA,
    draft=HEAD,
    tokens=(1, 2, 3, 4, 8, 16, 64, 512),
    batches=(1, 4, 64),
    contexts=(1024, 8192),
    steps=(0, 1, 3),
    conditional=(0.7, 0.6),
)
SETTINGS = (CommPlan(name="default"), CommPlan(name="ring-ll", env={"NCCL_PROTO": "LL"}))
TWO = dataclasses.replace(REQUEST, world=2, comm=SETTINGS)


def test_every_cycle_has_the_parts_that_predict_it():
    points = {point.key: point.fields for point in build_points(REQUEST, H200)}
    cycles = [fields for fields in points.values() if fields["kind"] == "cycle"]
    assert {(c["batch"], c["context_tokens"], c["num_steps"]) for c in cycles} == {
        (batch, context, steps) for batch in (1, 4, 64) for context in (1024, 8192) for steps in (0, 1, 3)
    }
    for cycle in cycles:
        batch, context, steps = cycle["batch"], cycle["context_tokens"], cycle["num_steps"]
        assert f"verify/n{batch * (steps + 1)}/b{batch}/c{context}/graph/all" in points
        if steps:
            mode = cycle["graph_scope"] if cycle["cuda_graph"] else "eager"
            assert f"draft/k{steps}/b{batch}/c{context}/{mode}" in points


def test_verify_tokens_are_shared_evenly_and_no_sequence_has_too_many():
    for point in build_points(REQUEST, H200):
        if point.kind == "verify":
            rows, rest = divmod(point.fields["tokens"], point.fields["batch"])
            assert rest == 0
            assert 1 <= rows <= MAX_ROWS


def test_with_one_gpu_nothing_of_communication_is_planned():
    assert not [
        p
        for p in build_points(REQUEST, H200)
        if p.kind == "allreduce" or (p.fields.get("part") != "all" and p.kind == "verify")
    ]


def test_with_two_gpus_all_reduces_cover_every_size_that_occurs():
    points = build_points(TWO, H200)
    sizes = {p.fields["size_bytes"] for p in points if p.kind == "allreduce" and p.fields["in_graph"]}
    passes = {2 * LLAMA.hidden_size * p.fields["tokens"] for p in points if p.kind == "verify"}
    assert passes <= sizes
    parts = {p.fields["part"] for p in points if p.kind == "verify"}
    assert parts == {"all", "comm", "compute"}
    plan = make_plan(TWO, H200)
    ring = {p.fields.get("part") for p in plan.points_of(SETTINGS[1], 0) if p.kind == "verify"}
    assert ring == {"all", "comm"}


def test_keys_are_unique_and_hold_no_blanks():
    points = build_points(dataclasses.replace(TWO, verify_eager=True), H200)
    assert len({point.key for point in points}) == len(points)
    assert not [point.key for point in points if " " in point.key]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"draft": None}, "--draft"),
        ({"conditional": ()}, "--conditional"),
        ({"steps": (0, MAX_ROWS)}, "--steps"),
        ({"world": 3}, "3 GPUs"),
        ({"target": dataclasses.replace(LLAMA, sliding_window=4096)}, "sliding_window 4096"),
        ({"batches": (1, 16_384)}, r"65,536 tokens is wider .*\(65,535\)"),
        ({"target": ROUTED, "batches": (1, 2048)}, r"8,192 tokens, each to 8 experts, is wider .*\(8,191\)"),
        ({"target": ROUTED, "tokens": (1, 8192)}, "8,192 tokens, each to 8 experts"),
    ],
)
def test_requests_that_cannot_be_measured(changes, named):
    with pytest.raises(UsageError, match=named):
        build_points(dataclasses.replace(REQUEST, **changes), H200)


def test_a_window_longer_than_every_context_does_not_matter():
    wide = dataclasses.replace(REQUEST, target=dataclasses.replace(LLAMA, sliding_window=32768))
    assert len(build_points(wide, H200)) == len(build_points(REQUEST, H200))


def test_memory_that_does_not_suffice_is_said_before_the_start():
    parts = check_memory(REQUEST, H200)
    assert parts["weights"] == pytest.approx(weight_bytes(LLAMA), rel=0.1)
    with pytest.raises(UsageError, match="GB on each GPU"):
        check_memory(dataclasses.replace(REQUEST, contexts=(65536,)), H200)
    with pytest.raises(UsageError, match="layers"):
        check_memory(dataclasses.replace(REQUEST, target=read_shape("Llama-3.3-70B")), H200)


def test_the_budget_gives_up_more_the_less_time_there_is():
    full = make_plan(REQUEST, H200)
    assert full.effort.cut == ()
    assert full.effort.repeats == 3
    assert full.effort.min_samples * full.effort.repeats >= 30
    assert full.effort.min_ms * full.effort.repeats >= 500
    times = [total_ms(dataclasses.replace(full, effort=effort)) for effort in efforts(REQUEST)]
    assert times == sorted(times, reverse=True)
    for below in times[:-1]:
        plan = make_plan(dataclasses.replace(REQUEST, budget_ms=below - 1), H200)
        assert plan.estimate_ms < below
        assert plan.effort.cut
        assert {point.key for point in plan.points} == {point.key for point in full.points}
    with pytest.raises(UsageError, match="--budget"):
        make_plan(dataclasses.replace(REQUEST, budget_ms=times[-1] - 1), H200)


def test_cycles_are_repeated_only_as_often_as_the_effort_says():
    full = make_plan(REQUEST, H200)
    plan = make_plan(dataclasses.replace(REQUEST, budget_ms=0.8 * full.estimate_ms), H200)
    assert plan.effort.cycle_repeats == 1
    kinds = [{point.kind for point in plan.points_of(SETTINGS[0], repeat)} for repeat in range(2)]
    assert "cycle" in kinds[0]
    assert "cycle" not in kinds[1]


def test_one_shape_at_four_batches_fits_ten_minutes():
    tokens = (*range(1, 17), 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    request = dataclasses.replace(
        REQUEST, tokens=tokens, batches=(1, 4, 16, 64), contexts=(1024,), steps=tuple(range(11)), budget_ms=540_000
    )
    plan = make_plan(request, H200)
    assert plan.estimate_ms < 540_000
    assert plan.effort.repeats == 3
    assert plan.effort.min_samples * plan.effort.repeats >= 30


def test_the_order_differs_between_passes_and_repeats_with_the_seed():
    plan = make_plan(TWO, H200)
    points = plan.points_of(SETTINGS[0], 0)
    orders = [
        tuple(point.key for point in order(plan, points, repeat=repeat, setting=setting))
        for setting in SETTINGS
        for repeat in range(3)
    ]
    assert len(set(orders)) == len(orders)
    assert all(sorted(keys) == sorted(orders[0]) for keys in orders)
    again = tuple(point.key for point in order(plan, points, repeat=0, setting=SETTINGS[0]))
    assert again == orders[0]


def test_the_fingerprint_follows_everything_that_is_measured():
    plan = make_plan(TWO, H200)
    same = make_plan(dataclasses.replace(TWO), H200)
    assert plan.hash == same.hash
    others = [
        dataclasses.replace(TWO, seed=2),
        dataclasses.replace(TWO, tokens=(1, 2)),
        dataclasses.replace(TWO, conditional=(0.5,)),
        dataclasses.replace(TWO, comm=SETTINGS[:1]),
        dataclasses.replace(TWO, first_step_rows="one"),
        dataclasses.replace(TWO, repeats=2),
        dataclasses.replace(TWO, cycles=300),
        dataclasses.replace(TWO, target=dataclasses.replace(LLAMA, num_layers=31)),
    ]
    hashes = {make_plan(other, H200).hash for other in others}
    hashes.add(make_plan(TWO, H200, source_hash="other").hash)
    assert len(hashes) == len(others) + 1
    assert plan.hash not in hashes


@given(
    tokens=st.integers(1, 512),
    batch=st.integers(1, 64),
    context=st.integers(128, 32768),
    world=st.sampled_from([1, 2, 4]),
)
def test_estimates_grow_with_the_work(tokens, batch, context, world):
    def time_of(**changes):
        sizes = {"tokens": tokens, "batch": batch, "context_tokens": context, **changes}
        return verify_ms(H200, LLAMA, world=world, **sizes)

    assert 0 < time_of() <= time_of(tokens=tokens + 1)
    assert time_of() <= time_of(batch=batch + 1)
    assert time_of() <= time_of(context_tokens=context + 1)
    drafts = [
        draft_ms(H200, HEAD, num_steps=k, batch=batch, context_tokens=context, world=world, eager=False)
        for k in range(4)
    ]
    assert drafts == sorted(drafts)


def test_experts_touched_grow_towards_all_of_them():
    qwen = read_shape("Qwen3-30B-A3B")
    sizes = [weight_bytes(qwen, tokens=n) for n in (1, 2, 8, 64, 512)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.15 * sizes[-1]
    assert sizes[-1] == pytest.approx(weight_bytes(qwen), rel=0.02)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", (3,)), ("1-4", (1, 2, 3, 4)), ("8,1-3, 2", (1, 2, 3, 8)), ("0-2", (0, 1, 2))],
)
def test_numbers(text, expected):
    assert numbers(text, "--steps", least=0) == expected


@pytest.mark.parametrize("text", ["", "a", "1,,2", "4-1", "1-", "-1", "1.5", "5000", "1-99999999999", "1;2"])
def test_malformed_numbers_are_usage_errors(text):
    with pytest.raises(UsageError, match="--tokens"):
        numbers(text, "--tokens", least=1)


def parsed(*options):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(list(options))


def test_options_have_their_defaults():
    request = request_of(parsed("--model", "Llama-3.1-8B", "--draft", "EAGLE3-Llama-3.1-8B"))
    assert request.steps == tuple(range(11))
    assert request.batches == (1, 4, 16, 64)
    assert request.first_step_rows == "accepted"
    assert request.budget_ms == 540_000
    assert request_of(parsed("--model", "Llama-3.1-8B")).steps == (0,)
    assert request_of(parsed("--model", "Llama-3.1-8B", "--budget", "0")).budget_ms is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((), "--model"),
        (("--model", "Llama-3.1-8B", "--repeats", "0"), "--repeats"),
        (("--model", "Llama-3.1-8B", "--cycles", "10"), "--cycles"),
        (("--model", "Llama-3.1-8B", "--budget", "-5"), "--budget"),
        (("--model", "Llama-3.1-8B", "--conditional", "0.5,x"), "--conditional"),
        (("--model", "Llama-3.1-8B", "--conditional", "1.5"), "--conditional"),
        (("--model", "Llama-3.1-8B", "--draft-modes", "fast"), "--draft-modes"),
        (("--model", "Llama-3.1-8B", "--cycle-modes", "step,step"), "--cycle-modes"),
        (("--model", "Llama-3.1-8B", "--contexts", "0"), "--contexts"),
    ],
)
def test_wrong_options_are_usage_errors(options, named):
    with pytest.raises(UsageError, match=named):
        request_of(parsed(*options))


@pytest.mark.parametrize("name", ["", "a.txt", "a b.yaml", "-o.yaml", "a"])
def test_outputs_that_are_no_calibration_file(name):
    with pytest.raises(UsageError, match="-o"):
        output_of(parsed(f"--output={name}"))


def test_settings_need_several_gpus(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text("ring-ll: {env: {NCCL_PROTO: LL}}\n")
    with pytest.raises(UsageError, match="--tensor-parallel"):
        request_of(parsed("--model", "Llama-3.1-8B", "--comm", str(path)))
    request = request_of(parsed("--model", "Llama-3.1-8B", "--tensor-parallel", "2", "--comm", str(path)))
    assert [setting.name for setting in request.comm] == ["default", "ring-ll"]


ACCEPTANCE = """schema: specmodel.calibration/1
name: a
acceptance:
  - {workload: chat, num_steps: 3, %s}
  - {workload: chat, num_steps: 2, survival: [0.1, 0.1]}
  - {workload: code, num_steps: 1, survival: [0.5]}
"""


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("conditional: [0.8, 0.7, 0.6]", (0.8, 0.7, 0.6)),
        ("survival: [0.8, 0.4, 0.2]", (0.8, 0.5, 0.5)),
        ("survival: [0.8, 0.0, 0.0]", (0.8, 0.0, 0.0)),
        ("drafts: 1000, accepted_per_position: [800, 400, 200]", (0.8, 0.5, 0.5)),
        (
            "drafts: 1000, drafted_per_position: [1000, 800, 200], accepted_per_position: [800, 400, 50]",
            (0.8, 0.5, 0.25),
        ),
        ("acceptance_length: 1.875", (0.5,)),
    ],
)
def test_acceptance_comes_from_every_form_of_a_calibration(tmp_path, form, expected):
    path = tmp_path / "a.yaml"
    path.write_text(ACCEPTANCE % form)
    options = ("--model", "Llama-3.1-8B", "--acceptance", str(path), "--workload", "chat")
    assert request_of(parsed(*options)).conditional == pytest.approx(expected)
    with pytest.raises(UsageError, match="chat, code"):
        request_of(parsed("--model", "Llama-3.1-8B", "--acceptance", str(path)))


def test_acceptance_by_rank_alone_is_of_a_tree():
    entry = argparse.Namespace(
        conditional=None, survival=None, accepted_per_position=None, acceptance_length=None, num_steps=2
    )
    with pytest.raises(CalibrationError, match="tree"):
        conditional_of(entry, "a.yaml")


def test_the_command_imports_only_the_standard_library():
    code = (
        "import sys, specmodel.harness.command\n"
        "bad = {'numpy', 'pydantic', 'ruamel', 'rich', 'scipy'} & {name.partition('.')[0] for name in sys.modules}\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=dict(os.environ)
    )
    assert (done.returncode, done.stderr) == (0, "")
