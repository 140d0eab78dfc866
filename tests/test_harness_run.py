"""The runner against a small program that speaks the protocol, and misbehaves on request."""

import argparse
import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from specmodel import io
from specmodel.errors import SpecModelError, UsageError
from specmodel.harness import command, group, runner
from specmodel.harness.budget import make_plan
from specmodel.harness.environment import CommPlan
from specmodel.harness.gpus import parse_gpus
from specmodel.harness.plan import Request
from specmodel.harness.results import addition_errors, calibration_of
from specmodel.harness.roofline import known_gpu
from specmodel.harness.samples import document, json_schema, read_samples, write_samples
from specmodel.harness.shapes import read_draft, read_shape

FAKE = Path(__file__).parent / "data" / "harness" / "fake_harness.py"
FAKE_MEASURE = FAKE.with_name("fake_measure.py")
H200 = known_gpu("NVIDIA H200")
LLAMA = read_shape("Llama-3.1-8B")
REQUEST = Request(
    target=LLAMA,
    draft=read_draft("EAGLE3-Llama-3.1-8B", LLAMA),
    tokens=(1, 2, 4),
    batches=(1, 4),
    contexts=(1024,),
    steps=(0, 1, 2),
    conditional=(0.7, 0.6),
    repeats=2,
    timeout_ms=60_000,
)
RING = CommPlan(name="ring-ll", env={"NCCL_PROTO": "LL"})
SIMPLE = CommPlan(name="simple", env={"NCCL_PROTO": "Simple"}, last=True)
TWO = dataclasses.replace(REQUEST, world=2, comm=(CommPlan(name="default"), RING, SIMPLE), steps=(0, 1))
FINISHED = "2026-01-31T12:00:00Z"


@pytest.fixture
def fake(tmp_path):
    """Make a program that stands for the binary and behaves as told."""

    def make(**behaviour):
        told = tmp_path / "behaviour.json"
        told.write_text(json.dumps(behaviour))
        program = tmp_path / "fake"
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE}" "{told}" "$@"\n')
        program.chmod(0o755)
        return program

    return make


def run_of(plan, binary, folder, *, resume=False, said=None):
    runner.open_folder(folder, plan, resume=resume)
    say = (lambda _: None) if said is None else said.append
    return runner.Run(plan=plan, binary=binary, folder=folder, say=say)


def content_of(plan, folder, left_out=()):
    return document(plan, folder, tool="specmodel 0.0.0", left_out=left_out, finished=FINISHED)


def shorten(monkeypatch, milliseconds=300):
    for name in ("_START_GRACE_MS", "_POINT_GRACE_MS", "_OTHERS_GRACE_MS", "_TERMINATE_GRACE_MS"):
        monkeypatch.setattr(group, name, milliseconds)


def test_a_run_measures_every_point_in_every_repeat_and_makes_a_calibration(fake, tmp_path):
    plan = make_plan(REQUEST, H200)
    folder = tmp_path / "run"
    assert runner.run_plan(run_of(plan, fake(), folder)) == ()
    content = content_of(plan, folder)
    jsonschema.validate(content, json_schema())
    assert {point["key"] for point in content["points"]} == {point.key for point in plan.points}
    for point in content["points"]:
        assert point["disposition"] == "ok", point["key"]
        assert sorted(run["repeat"] for run in point["runs"]) == [0, 1]
        assert point["summary"]["runs"] == 2
    calibration = calibration_of(content, name="a", samples_name="a.samples.json.gz", samples_sha256="0" * 64)
    rows = calibration.measurements
    assert len(rows.verify) == sum(1 for point in plan.points if point.kind == "verify")
    assert len(rows.draft) == sum(1 for point in plan.points if point.kind == "draft")
    assert rows.cycles == ()
    assert len(calibration.validation.cycles) == sum(1 for point in plan.points if point.kind == "cycle")
    assert {row.acceptance_length for row in calibration.validation.cycles} == {None, 2.0}
    assert calibration.acceptance[0].conditional == (0.7, 0.6)
    assert calibration.system.gpu == "H200"
    by_tokens = {(row.tokens, row.batch): row for row in rows.verify}
    assert by_tokens[4, 1].time_ms == pytest.approx(4.041, rel=1e-3)
    assert by_tokens[4, 1].sd_ms == pytest.approx(0.004, rel=0.6)
    eager = [row for row in rows.draft if not row.cuda_graph]
    assert all(row.time_ms == pytest.approx(0.6 * row.num_steps, rel=1e-2) for row in eager)
    assert max(abs(error) for _, error in addition_errors(content)) < 0.01


def test_a_calibration_survives_its_file(fake, tmp_path):
    plan = make_plan(REQUEST, H200)
    runner.run_plan(run_of(plan, fake(), tmp_path / "run"))
    content = content_of(plan, tmp_path / "run")
    digest = write_samples(content, tmp_path / "a.samples.json.gz")
    assert read_samples(tmp_path / "a.samples.json.gz") == content
    assert write_samples(content, tmp_path / "b.samples.json.gz") == digest
    calibration = calibration_of(content, name="a", samples_name="a.samples.json.gz", samples_sha256=digest)
    io.dump(calibration, tmp_path / "a.yaml")
    assert io.load(tmp_path / "a.yaml") == calibration
    assert digest in (tmp_path / "a.yaml").read_text()


def test_the_schema_in_the_documentation_is_the_one_in_the_package():
    root = Path(__file__).resolve().parents[1]
    jsonschema.Draft202012Validator.check_schema(json_schema())
    assert json.loads((root / "docs" / "schema" / "samples-1.json").read_text()) == json_schema()


def test_every_setting_has_processes_of_its_own_and_its_own_environment(fake, tmp_path, monkeypatch):
    secrets = {"HF_TOKEN": "hf_abc", "AWS_SECRET_ACCESS_KEY": "xyz", "NCCL_DEBUG": "TRACE", "NCCL_PROTO": "LL128"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    plan = make_plan(TWO, H200)
    folder = tmp_path / "run"
    runner.run_plan(run_of(plan, fake(), folder))
    passes = [entry for entry in runner.read_diary(folder) if entry["entry"] == "pass"]
    assert [entry["comm"] for entry in passes].count("ring-ll") == 2
    assert [entry["comm"] for entry in passes][-2:] == ["simple", "simple"]
    for entry in passes:
        starts = [group.read_records(folder / f"{entry['stem']}.rank{rank}.jsonl")[0] for rank in range(2)]
        assert [start["rank"] for start in starts] == [0, 1]
        protocol = {"default": None, "ring-ll": "LL", "simple": "Simple"}[entry["comm"]]
        for start in starts:
            assert start["environment"].get("NCCL_PROTO") == protocol
            assert start["environment"]["NCCL_NVLS_ENABLE"] == "0"
            assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NCCL_DEBUG", "HOME", "USER"} & set(start["seen"])
    content = content_of(plan, folder)
    jsonschema.validate(content, json_schema())
    assert content["comm"]["ring-ll"]["nccl"]["version"] == "2.28.9"
    size = str(2 * LLAMA.hidden_size)
    chosen = content["comm"]["ring-ll"]["nccl"]["selected"][size]
    assert (chosen["algorithm"], chosen["protocol"], chosen["channels"]) == ("Ring", "LL", 4)
    calibration = calibration_of(content, name="a", samples_name="s", samples_sha256="0" * 64)
    assert calibration.comm["ring-ll"].env == {"NCCL_NVLS_ENABLE": "0", "NCCL_PROTO": "LL"}
    assert {row.comm for row in calibration.measurements.allreduce} == {"default", "ring-ll", "simple"}
    assert "Ring LL on 4 channels" in str(calibration.evidence[0].value)


def test_nothing_of_the_user_or_the_machine_reaches_an_output(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/home/somebody/lib")
    plan = make_plan(TWO, H200)
    folder = tmp_path / "somebody"
    runner.run_plan(run_of(plan, fake(), folder))
    content = content_of(plan, folder)
    calibration = calibration_of(content, name="a", samples_name="s", samples_sha256="0" * 64)
    text = json.dumps(content) + io.dumps(calibration)
    forbidden = ["hf_secret", "secret-host", "/home/", "somebody", str(tmp_path), "LD_LIBRARY_PATH", "nccl.conf"]
    assert [word for word in forbidden if word in text] == []


def test_a_setting_that_hangs_costs_only_itself(fake, tmp_path, monkeypatch):
    shorten(monkeypatch)
    plan = make_plan(dataclasses.replace(TWO, timeout_ms=1_500), H200)
    folder, said = tmp_path / "run", []
    runner.run_plan(run_of(plan, fake(silent_start="NCCL_PROTO=LL"), folder, said=said))
    content = content_of(plan, folder)
    jsonschema.validate(content, json_schema())
    found = {(point["comm"], point["disposition"]) for point in content["points"]}
    assert found == {("default", "ok"), ("simple", "ok"), ("ring-ll", "timeout")}
    assert content["comm"]["ring-ll"]["disposition"] == "timeout"
    assert [line for line in said if "ring-ll: timeout" in line]
    calibration = calibration_of(content, name="a", samples_name="s", samples_sha256="0" * 64)
    assert set(calibration.comm) == {"default", "simple"}
    assert [fact for fact in calibration.evidence if fact.value == "ring-ll: timeout"]


@pytest.mark.parametrize("refusal_exit", [1, 3])
def test_a_setting_that_nccl_refuses_is_not_supported(fake, tmp_path, refusal_exit):
    plan = make_plan(TWO, H200)
    program = fake(refuse="NCCL_PROTO=Simple", refusal_exit=refusal_exit)
    runner.run_plan(run_of(plan, program, tmp_path / "run"))
    content = content_of(plan, tmp_path / "run")
    assert content["comm"]["simple"]["disposition"] == "not_supported"
    assert "invalid usage" in content["comm"]["simple"]["reasons"][0]


def test_if_the_only_setting_is_refused_the_run_says_why(fake, tmp_path):
    plan = make_plan(REQUEST, H200)
    with pytest.raises(SpecModelError, match="invalid usage"):
        runner.run_plan(run_of(plan, fake(refuse="NCCL_NVLS_ENABLE=0"), tmp_path / "run"))


@pytest.mark.parametrize(("trouble", "disposition"), [("hang", "timeout"), ("crash", "not_run")])
def test_a_point_that_hangs_or_crashes_costs_only_itself(fake, tmp_path, monkeypatch, trouble, disposition):
    shorten(monkeypatch)
    culprit = "draft/k2/b1/c1024/eager"
    plan = make_plan(dataclasses.replace(REQUEST, timeout_ms=1_000, repeats=1), H200)
    runner.run_plan(run_of(plan, fake(**{trouble: culprit}), tmp_path / "run"))
    content = content_of(plan, tmp_path / "run")
    jsonschema.validate(content, json_schema())
    assert {point["key"]: point["disposition"] for point in content["points"] if point["disposition"] != "ok"} == {
        culprit: disposition
    }


def test_a_broken_run_continues_where_it_broke(fake, tmp_path):
    plan = make_plan(REQUEST, H200)
    folder = tmp_path / "run"
    binary = fake()
    runner.run_plan(run_of(plan, binary, folder))
    whole = content_of(plan, folder)
    # As if the machine had gone off in the second pass: half of its lines, the last one broken.
    second = folder / "pass-001.rank0.jsonl"
    lines = second.read_text().splitlines()
    second.write_text("\n".join(lines[:9]) + "\n" + lines[9][:40])
    diary = (folder / "diary.jsonl").read_text().splitlines()
    (folder / "diary.jsonl").write_text("\n".join(diary[:3]) + "\n" + diary[3][:10])
    assert runner.run_plan(run_of(plan, binary, folder, resume=True)) == ()
    passes = [entry for entry in runner.read_diary(folder) if entry["entry"] == "pass"]
    assert len(passes) == 3
    kept = sum(1 for line in lines[:9] if json.loads(line)["record"] == "point")
    assert len(passes[2]["keys"]) == len(plan.points) - kept
    content = content_of(plan, folder)
    assert [point["disposition"] for point in content["points"]] == [p["disposition"] for p in whole["points"]]
    assert all(len(point["runs"]) == 2 for point in content["points"])
    assert (whole["run"]["sittings"], content["run"]["sittings"]) == (1, 2)
    caveats = [
        calibration_of(c, name="x", samples_name="x.json.gz", samples_sha256="0" * 64).provenance.caveats
        for c in (whole, content)
    ]
    assert [any("2 sittings" in text for text in texts) for texts in caveats] == [False, True]
    again = len(runner.read_diary(folder))
    runner.run_plan(run_of(plan, binary, folder, resume=True))
    assert len(runner.read_diary(folder)) == again


def test_a_run_is_only_continued_by_the_same_plan(fake, tmp_path):
    plan = make_plan(REQUEST, H200)
    runner.open_folder(tmp_path / "run", plan, resume=False)
    with pytest.raises(UsageError, match="--resume"):
        runner.open_folder(tmp_path / "run", plan, resume=False)
    other = make_plan(dataclasses.replace(REQUEST, seed=9), H200)
    with pytest.raises(UsageError, match="another plan"):
        runner.open_folder(tmp_path / "run", other, resume=True)
    runner.open_folder(tmp_path / "run", plan, resume=True)


def test_a_used_up_budget_leaves_out_repeats_and_says_so(fake, tmp_path):
    plan = dataclasses.replace(make_plan(REQUEST, H200), request=dataclasses.replace(REQUEST, budget_ms=1.0))
    left_out = runner.run_plan(run_of(plan, fake(), tmp_path / "run"))
    assert left_out == ("repeat 2 of default left out: the budget was used up",)
    content = content_of(plan, tmp_path / "run", left_out)
    assert {point["summary"]["runs"] for point in content["points"]} == {1}
    assert content["run"]["cut"] == list(left_out)


def test_killing_the_runner_kills_its_processes(fake, tmp_path):
    binary = fake(hang="verify")
    script = tmp_path / "script.py"
    script.write_text(
        "import pathlib\n"
        "from specmodel.harness.group import run_group\n"
        f"job = {{'seed': 1, 'limits': {{'min_samples': 3}}, 'points': [{{'key': 'verify', 'kind': 'verify'}}]}}\n"
        f"run_group(['{binary}', 'run'], job=job, stem=pathlib.Path('{tmp_path}') / 'x', world=1, env={{}},"
        " timeout_ms=60000)\n"
    )
    child = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.DEVNULL)
    wait_for(lambda: group.read_records(tmp_path / "x.rank0.jsonl"))
    child.send_signal(signal.SIGINT)
    child.wait(timeout=120)
    assert not processes_of(str(tmp_path / "x"))


# A variable that only the untimed runs have, and a part of a key: what is running when the signal comes.
@pytest.mark.parametrize("trouble", [{"silent_start": "NCCL_DEBUG=INFO"}, {"hang": "verify"}], ids=["probes", "points"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_whatever_ends_a_measurement_ends_what_it_started(fake, tmp_path, number, trouble):
    settings = tmp_path / "settings.yaml"
    settings.write_text("ring-ll: {env: {NCCL_PROTO: LL}}\n")
    shapes = ["--model", "Llama-3.1-8B", "--draft", "EAGLE3-Llama-3.1-8B", "--tensor-parallel", "2"]
    sizes = [
        "--tokens",
        "1,2",
        "--batches",
        "1",
        "--steps",
        "0,1",
        "--comm",
        str(settings),
        "-o",
        str(tmp_path / "a.yaml"),
    ]
    words = [sys.executable, str(FAKE_MEASURE), str(fake(**trouble)), *shapes, *sizes]
    child = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    wait_for(lambda: len(processes_of(f"{tmp_path}/a.partial")) >= 2)
    child.send_signal(number)
    assert child.wait(timeout=120) in (130, 128 + number)
    assert not processes_of(str(tmp_path))


@pytest.mark.parametrize("ignored", [True, False])
def test_a_signal_that_was_ignored_stays_ignored(ignored):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
    try:
        with command._ended_in_order():
            assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == ignored
        assert signal.getsignal(signal.SIGHUP) is (signal.SIG_IGN if ignored else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGHUP, before)


def processes_of(text):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(path)
        except OSError:
            continue
    return found


def wait_for(condition, seconds=120):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


SMI = "0, NVIDIA H200, 580.159.04, 143771, 143000, Disabled, 00000000:04:00.0, 9.0, GPU-12ab\n"


@pytest.fixture
def machine(fake, monkeypatch):
    """Pretend to be a machine with one H200 whose binary is the fake."""
    monkeypatch.setattr("specmodel.harness.gpus.read_gpus", lambda: parse_gpus(SMI))
    monkeypatch.setattr("specmodel.harness.build.find_toolchain", lambda: None)
    program = fake()
    monkeypatch.setattr("specmodel.harness.build.build", lambda *_, **__: program)
    monkeypatch.setattr("specmodel.harness.build.find_nccl", lambda: None)


def measure(*options):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    shapes = ("--model", "Llama-3.1-8B", "--draft", "EAGLE3-Llama-3.1-8B")
    sizes = ("--tokens", "1,2", "--batches", "1", "--steps", "0,1", "--repeats", "1")
    return command.run(parser.parse_args([*shapes, *sizes, *options]))


@pytest.mark.usefixtures("machine")
def test_measure_writes_a_calibration_and_its_samples_and_overwrites_neither(tmp_path, capsys):
    path = tmp_path / "one.yaml"
    assert measure("-o", str(path)) == 0
    out, err = capsys.readouterr()
    assert "ok" in out
    assert "against the sum of their parts" in out
    assert "points" in err
    assert sorted(p.name for p in tmp_path.glob("one*")) == ["one.samples.json.gz", "one.yaml"]
    before = path.read_bytes()
    for options in ((), ("--resume", "--seed", "2")):
        with pytest.raises(UsageError, match="never overwritten"):
            measure("-o", str(path), *options)
    assert measure("-o", str(path), "--resume") == 0
    assert path.read_bytes() == before
    path.unlink()
    with pytest.raises(UsageError, match="never overwritten"):
        measure("-o", str(path))
    assert gzip.decompress((tmp_path / "one.samples.json.gz").read_bytes())


@pytest.mark.usefixtures("machine")
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("kind", ["folder_is_a_file", "folder_of_the_system", "partial_is_a_file"])
def test_an_output_that_cannot_be_written_is_said_before_anything_runs(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("specmodel.harness.runner.run_plan", lambda _: pytest.fail("it was measured"))
    output = {"folder_of_the_system": Path("/proc/a.yaml"), "folder_is_a_file": tmp_path / "b" / "a.yaml"}.get(
        kind, tmp_path / "a.yaml"
    )
    (tmp_path / "b").write_text("")
    (tmp_path / "a.partial").write_text("")
    with pytest.raises(SpecModelError, match="cannot be written"):
        measure("-o", str(output))


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("found", [b"", b"\x1f\x8b broken", b"{}", b"[]", b"{", b"\x00"])
def test_files_of_another_kind_are_neither_continued_nor_overwritten(tmp_path, found):
    output, samples = tmp_path / "a.yaml", tmp_path / "a.samples.json.gz"
    for options in ((), ("--resume",)):
        output.write_bytes(found)
        samples.write_bytes(found)
        with pytest.raises(UsageError, match="never overwritten"):
            measure("-o", str(output), *options)
        assert output.read_bytes() == samples.read_bytes() == found


def test_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    assert measure("--dry-run", "-o", str(tmp_path / "x.yaml")) == 0
    out, _ = capsys.readouterr()
    for word in ("points", "time", "memory", "effort", "Llama-3.1-8B with EAGLE3-Llama-3.1-8B on 1 x NVIDIA H200"):
        assert word in out
    assert list(tmp_path.glob("x*")) == []


def test_without_a_gpu_measuring_says_so_and_planning_works(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("specmodel.harness.gpus.read_gpus", tuple)
    with pytest.raises(SpecModelError, match="no NVIDIA GPU"):
        measure("-o", str(tmp_path / "x.yaml"))
    assert measure("--dry-run") == 0
    assert "planned as for" in capsys.readouterr().err.replace("the plan is made as for", "planned as for")
    with pytest.raises(SpecModelError, match="no NVIDIA GPU"):
        measure("--selftest")


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("exit_code", "last"), [(0, "end"), (1, "end"), (0, "start")])
def test_the_self_test_says_whether_all_passed(tmp_path, monkeypatch, exit_code, last):
    """A failed row is exit 1, a process that did not write its last record an error."""
    program = tmp_path / "selftest"
    record = json.dumps({"record": last})
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' '{record}' > \"$3\"\nexit {exit_code}\n")
    program.chmod(0o755)
    monkeypatch.setattr("specmodel.harness.build.build", lambda *_, **__: program)
    if last == "end":
        assert measure("--selftest") == exit_code
    else:
        with pytest.raises(SpecModelError, match="did not end well"):
            measure("--selftest")


def test_the_sources_write_the_last_record_of_every_subcommand_that_is_waited_for():
    main = (Path(command.__file__).parent / "src" / "main.cpp").read_text(encoding="utf-8")
    for name in ("int run(", "int run_selftest("):
        body = main[main.index(name) :].split("\n}\n")[0]
        assert '.set("record", "end")' in body


def test_the_environment_of_this_process_is_left_alone(fake, tmp_path):
    before = dict(os.environ)
    plan = make_plan(REQUEST, H200)
    runner.run_plan(run_of(plan, fake(), tmp_path / "run"))
    assert dict(os.environ) == before
