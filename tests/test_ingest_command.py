"""`specmodel ingest` as a command: options, merging, questions, errors, files whole or not at all."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specmodel import io
from specmodel.engines import command
from specmodel.engines.ingest import ingest
from specmodel.engines.merge import setting_name
from specmodel.engines.reading import Given, Shape, summarise
from specmodel.errors import CalibrationError, UsageError

DATA = Path(__file__).parent / "data" / "engines"
LOG = DATA / "sglang_v0518_eagle3_tp8_clean.log"


def run(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


def test_the_file_is_written_whole_and_named_after_itself(tmp_path, capsys):
    for suffix in ("yaml", "json"):
        out = tmp_path / f"calib.{suffix}"
        assert run(LOG, "-o", out) == 0
        calibration = io.load(out)
        assert calibration.name == "calib"
        assert len(calibration.measurements.cycles) == 5
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "25 decode lines" in captured.err
    assert "left out: 5 not timed: after a prefill" in captured.err
    assert f"specmodel optimize {out}" in captured.err


def test_one_step_count_alone_is_said_to_decide_nothing(tmp_path, capsys):
    run(LOG, "-o", tmp_path / "a.yaml")
    assert "add a log without speculation" in capsys.readouterr().err
    run(LOG, DATA / "sglang_bench_speculative.jsonl", "-o", tmp_path / "b.yaml")
    assert "add a log without speculation" not in capsys.readouterr().err
    run(DATA / "nccl_all_reduce_8gpu.txt", "-o", tmp_path / "c.yaml")
    assert "add a log without speculation" not in capsys.readouterr().err


def test_without_an_output_the_calibration_goes_to_stdout(capsys):
    assert run(LOG) == 0
    yaml = capsys.readouterr().out
    assert run(LOG, "--json") == 0
    text = capsys.readouterr().out
    assert io.to_dict(io.loads(yaml)) == json.loads(text)


def test_an_error_leaves_no_file(tmp_path):
    out = tmp_path / "calib.yaml"
    out.write_text("before")
    bad = tmp_path / "x.log"
    bad.write_text("nothing of the kind\n")
    with pytest.raises(CalibrationError):
        run(bad, "-o", out)
    assert out.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.yaml", "x.log"]


def test_an_output_that_cannot_be_written_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        run(LOG, "-o", tmp_path / "no" / "calib.yaml")


@pytest.mark.parametrize(
    "words",
    [
        (LOG, LOG),
        (LOG, "--topk", 4),
        (LOG, "--num-steps", 3, "--num-draft-tokens", 9),
        (LOG, "--num-steps", 3, "--topk", 4),
        (LOG, "--num-steps", 0, "--topk", 4, "--num-draft-tokens", 4),
    ],
)
def test_options_that_do_not_go_together(words):
    with pytest.raises(UsageError):
        run(*words)


@pytest.mark.parametrize(
    "words", [("--num-steps", -1), ("--batch", 0), ("--topk", 0), ("--from", "mlc"), ("--batch", "x")]
)
def test_options_out_of_range_are_argparse_errors(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(LOG, *words)
    assert stopped.value.code == 2
    assert "error" in capsys.readouterr().err


def test_from_names_the_family_and_refuses_another(tmp_path):
    with pytest.raises(CalibrationError, match="leave --from vllm away"):
        ingest([str(DATA / "sglang_bench_speculative.jsonl")], Given(), "x", "vllm")
    with pytest.raises(CalibrationError, match="something of vLLM"):
        ingest([str(LOG)], Given(), "x", "vllm")
    calibration, _ = ingest([str(LOG)], Given(), "x", "sglang")
    assert calibration.measurements.cycles


def sweep_log(tmp_path, steps, cycle_ms, flags="", name=None):
    args = (
        f"server_args=ServerArgs(model_path='m/Example', tp_size=8, speculative_algorithm='EAGLE3', "
        f"speculative_num_steps={steps}, speculative_eagle_topk=1, disable_custom_all_reduce={flags == 'nccl'})"
        if steps
        else f"server_args=ServerArgs(model_path='m/Example', tp_size=8, speculative_algorithm=None, "
        f"disable_custom_all_reduce={flags == 'nccl'})"
    )
    length = 1 + 0.5 * steps
    accept = f"accept len: {length:.2f}, " if steps else ""
    line = (
        f"[2026-05-01 10:00:00] Decode batch, #running-req: 1, #token: {1000 + 30 * steps}, token usage: 0.01, {accept}"
        f"cuda graph: True, gen throughput (token/s): {1e3 * length / cycle_ms:.3f}, #queue-req: 0"
    )
    path = tmp_path / (name or f"k{steps}{flags}.log")
    path.write_text("\n".join([f"[2026-05-01 09:00:00] {args}", *[line] * 6]) + "\n")
    return str(path)


def test_a_sweep_is_a_set_of_logs(tmp_path):
    paths = [sweep_log(tmp_path, steps, 8.0 + steps) for steps in (0, 1, 2, 3)]
    calibration, _ = ingest(paths, Given(), "sweep")
    rows = {row.num_steps: row for row in calibration.measurements.cycles}
    assert {steps: row.cycle_ms for steps, row in rows.items()} == pytest.approx(
        {k: 8.0 + k for k in range(4)}, rel=1e-3
    )
    # Nearly equal contexts count as one, so that plain and speculative rows compare; each keeps its own in its note.
    assert len({row.context_tokens for row in rows.values()}) == 1
    assert "mean context 1030 tokens" in rows[1].note
    assert {row.num_steps: row.acceptance_length for row in calibration.acceptance} == {1: 1.5, 2: 2.0, 3: 2.5}
    assert calibration.model.method == "eagle3"


def test_settings_of_the_sources_become_communication_settings(tmp_path):
    paths = [sweep_log(tmp_path, 3, 11.0), sweep_log(tmp_path, 3, 9.0, flags="nccl")]
    calibration, _ = ingest(paths, Given(), "sweep")
    rows = {row.comm: row.cycle_ms for row in calibration.measurements.cycles}
    assert rows == pytest.approx({"default": 11.0, "disable-custom-all-reduce": 9.0}, rel=1e-3)
    named, _ = ingest(paths[1:], Given(comm="nccl"), "named")
    assert {row.comm for row in named.measurements.cycles} == {"nccl"}
    assert named.comm["nccl"].flags == ("--disable-custom-all-reduce",)
    with pytest.raises(CalibrationError, match="one communication setting under the name"):
        ingest([paths[1], sweep_log(tmp_path, 3, 9.0, name="other.log"), paths[0]], Given(comm="nccl"), "named")


def test_metrics_share_the_setting_of_the_log_beside_them(tmp_path):
    log = sweep_log(tmp_path, 3, 9.0, flags="nccl")
    calibration, _ = ingest([log, str(DATA / "sglang_bench_speculative.jsonl")], Given(), "both")
    assert {row.comm for row in calibration.measurements.cycles} == {"disable-custom-all-reduce"}


@pytest.mark.parametrize(
    ("other", "what"),
    [("vllm_v1_eagle3.log", "engine"), ("sglang_v0510_eagle3_tree_tp8_noisy_truncated.log", "target")],
)
def test_sources_of_two_deployments_are_refused(other, what):
    with pytest.raises(CalibrationError, match=f"one {what}"):
        ingest([str(LOG), str(DATA / other)], Given(), "x")


def test_a_link_test_on_fewer_gpus_does_not_contradict_the_server():
    calibration, _ = ingest([str(LOG), str(DATA / "nccl_all_reduce_2gpu.txt")], Given(), "x")
    assert calibration.system.num_gpus == 8
    assert {row.num_gpus for row in calibration.measurements.allreduce} == {2}


def test_what_the_user_states_goes_onto_the_rows():
    given = Given(workload="chat", context_tokens=2048, gpu="H200", comm="tuned")
    calibration, _ = ingest([str(LOG)], given, "x")
    rows = calibration.measurements.cycles
    assert {(row.workload, row.context_tokens, row.comm) for row in rows} == {("chat", 2048, "tuned")}
    assert calibration.acceptance[0].workload == "chat"
    assert calibration.system.gpu == "H200"
    assert set(calibration.workloads) == {"chat"}


def test_counts_of_one_workload_and_shape_are_pooled(tmp_path):
    reply = {"meta_info": {"spec_verify_ct": 10, "spec_accept_histogram": [2, 3, 1, 4]}}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(reply))
    calibration, _ = ingest([str(tmp_path / "a.json"), str(tmp_path / "b.json")], Given(), "x")
    (entry,) = calibration.acceptance
    assert (entry.drafts, entry.prompts, entry.accepted_per_position) == (20, 2, (16, 10, 8))


def test_setting_names_say_the_values():
    assert setting_name({"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"}, ()) == "ring-ll-sys"
    assert setting_name({"NCCL_MIN_NCHANNELS": "8"}, ("--enable-nccl-nvls",)) == "min-nchannels-8-enable-nccl-nvls"
    assert setting_name({}, ()) == "default"


def test_summaries_are_worth_what_their_spread_says():
    import random

    rng = random.Random(5)
    values = [10 * rng.gauss(1, 0.02) for _ in range(400)]
    many, few = summarise(values), summarise(values[:3])
    assert many.value == pytest.approx(10, rel=0.005)
    assert many.sd / many.samples**0.5 < few.sd / few.samples**0.5
    assert many.sd / many.samples**0.5 >= 0.003 * 10 * 0.999  # the next run differs, however many samples
    low = summarise(values, quantile=0.2)
    assert low.value < many.value
    idle = summarise([*values, *[400.0] * 30], band=1.25)
    assert idle.outliers == 30
    assert idle.value == pytest.approx(many.value, rel=1e-9)


def test_a_shape_is_a_chain_or_a_tree():
    assert Shape(num_steps=3).row() == {"num_steps": 3}
    assert Shape(num_steps=3, topk=4, num_draft_tokens=8).verify_tokens == 8


def test_starting_up_imports_nothing_heavy():
    heavy = "('numpy', 'pydantic', 'ruamel.yaml', 'specmodel.engines.ingest')"
    code = f"import sys, specmodel.engines.command; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
