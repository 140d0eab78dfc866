"""The launch line of a recommendation: for the engine of the file, with its settings, copied and run as it stands."""

import argparse
import dataclasses
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.cli import main
from specmodel.commands.launching import engine_version
from specmodel.launch.lines import launch_lines, launch_of
from specmodel.model import FittedModel

ROOT = Path(__file__).parents[1]


def fitted(engine: str | None, version: str | None = None, batches: tuple[float, ...] = (1,)) -> FittedModel:
    system: dict[str, Any] = {"tensor_parallel": 2}
    system |= {"engine": engine} if engine else {}
    system |= {"engine_version": version} if version else {}
    cycles = []
    for batch in batches:
        # The larger the batch, the less is gained by drafting.
        for k, gain in ((0, 1.0), (1, 1.3 - 0.02 * batch), (2, 1.5 - 0.05 * batch), (3, 1.6 - 0.08 * batch)):
            cycles.append({"num_steps": k, "batch": batch, "comm": "tuned", "tok_s": 100.0 * batch * gain})
    document = {
        "schema": "specmodel.calibration/1",
        "name": "x",
        "system": system,
        "model": {"target": "org/Model name", "draft": "org/draft", "method": "eagle3"},
        "comm": {"tuned": {"env": {"NCCL_ALGO": "Ring", "NCCL_OTHER": "a b"}, "flags": ["--some-flag"]}},
        "measurements": {"cycles": cycles},
    }
    return sm.fit(sm.from_dict(document))


def lines_of(model: FittedModel, width: int = 80) -> tuple[list[str], list[str]]:
    optima = [sm.optimize(model, batch=batch, comm="tuned") for batch in model.measured.batches]
    return launch_lines(model, optima, sm.schedule(optima), width)


@pytest.mark.parametrize(
    ("engine", "program"),
    [
        ("sglang", "sglang.launch_server"),
        ("SGLang", "sglang.launch_server"),
        ("vllm", "vllm"),
        ("TensorRT-LLM", "trtllm-serve"),
        ("llama.cpp", "llama-server"),
        ("llama.cpp Vulkan", "llama-server"),
    ],
)
def test_known_engines(engine: str, program: str) -> None:
    lines, notes = lines_of(fitted(engine))
    assert program in " ".join(lines)
    assert "assumed" in notes[0]


@pytest.mark.parametrize("engine", [None, "sglang-jax", "mlx", "vllm-fork of mine"])
def test_unknown_engines_have_no_launch_line(engine: str | None) -> None:
    assert lines_of(fitted(engine)) == ([], [])


@pytest.mark.parametrize(
    ("version", "assumed"), [("0.5.9", False), ("v0.5.9", False), ("main@1a2b", True), (None, True)]
)
def test_the_version_of_the_file_is_used_where_it_is_one(version: str | None, assumed: bool) -> None:
    _, notes = lines_of(fitted("sglang", version))
    assert any("assumed" in note for note in notes) == assumed


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_line_is_one_shell_command_with_the_environment_before_it(width: int) -> None:
    lines, _ = lines_of(fitted("sglang"), width)
    assert all(len(line) <= width or len(line.split()) <= 2 for line in lines)
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
    assert words[:2] == ["NCCL_ALGO=Ring", "NCCL_OTHER=a b"]
    assert words[words.index("--model-path") + 1] == "org/Model name"
    assert words[words.index("--speculative-num-steps") + 1] == "3"
    assert "--some-flag" in words
    assert words[words.index("--tp-size") + 1] == "2"


def test_a_schedule_over_batches_is_in_it() -> None:
    model = fitted("sglang", batches=(1, 4, 16.5))
    optima = [sm.optimize(model, batch=batch, comm="tuned") for batch in model.measured.batches]
    steps = sm.schedule(optima)
    assert len(steps) > 1
    lines, _ = launch_lines(model, optima, steps, 80)
    text = "\n".join(lines)
    assert "cat > adaptive.json" in text
    assert "--max-running-requests 17" in text.replace(" \\\n ", "")


def answer(model: FittedModel, engine: tuple[str, str | None] | None = None) -> Any:
    optima = [sm.optimize(model, batch=batch, comm="tuned") for batch in model.measured.batches]
    return optima, launch_of(model, optima, sm.schedule(optima), engine)


def test_another_engine_is_written_with_what_is_to_be_known_of_it() -> None:
    model = fitted("sglang", "0.5.13")
    _, made = answer(model, ("vllm", None))
    assert (made.engine, made.version, made.assumed) == ("vllm", "0.26.0", True)
    assert "--some-flag" not in made.command
    assert "measured under sglang" in made.notes[0]
    assert "flags of sglang are left out: --some-flag" in made.notes[1]
    _, made = answer(model, ("sglang", None))
    assert (made.version, made.assumed) == ("0.5.13", False)
    assert "--some-flag" in made.command
    _, made = answer(model, ("sglang", "0.5.18"))
    assert made.version == "0.5.18"
    _, made = answer(fitted(None), ("trtllm", "1.3.0"))
    assert "config.yaml" in made.files


def test_acceptance_is_pinned_to_the_curve_of_the_answer() -> None:
    optima, made = answer(fitted("vllm"))
    lengths = {c.num_steps: c.acceptance_length for c in optima[0].table if c.topk == 1}
    (line,) = made.validation
    rates = json.loads(shlex.split(line)[1])["synthetic_acceptance_rates"]
    assert rates == pytest.approx([lengths[k] - lengths[k - 1] for k in range(1, len(rates) + 1)], abs=1e-4)
    _, made = answer(fitted("sglang"))
    assert f"SGLANG_SIMULATE_ACC_LEN={lengths[3]:.4g} " in made.validation[0]


def test_an_engine_without_a_schedule_gets_the_steps_that_lose_least() -> None:
    model = fitted("llama.cpp", "b10472", batches=(1, 4, 8, 16))
    optima = [sm.optimize(model, batch=batch, comm="tuned") for batch in model.measured.batches]
    steps = sm.schedule(optima)
    made = launch_of(model, optima, steps)
    assert made is not None
    assert made.command is not None
    words = shlex.split(made.command.replace("\\\n", " "))
    chosen = int(words[words.index("--spec-draft-n-max") + 1]) if "--spec-draft-n-max" in words else 0

    def lost(k: int) -> float:
        tables = [{c.num_steps: c.tok_s for c in o.table} for o in optima]
        return sum(math.log(max(table.values()) / table[k]) for table in tables)

    assert len({s.num_steps for s in steps}) > 1
    assert chosen == min((c.num_steps for c in optima[0].table if c.num_steps <= 3), key=lost)


def test_a_table_of_step_times_for_parallel_drafters() -> None:
    model = fitted("sglang", "0.5.18", batches=(1, 4, 16))
    cal = dataclasses.replace(model.calibration, model=dataclasses.replace(model.calibration.model, method="parallel"))
    optima, made = answer(sm.fit(cal))
    table = json.loads(made.files["sps.json"])
    tokens, rates = table["sample_batch_tokens"], table["sample_steps_per_sec"]
    assert tokens == sorted(set(tokens))
    assert rates == sorted(rates, reverse=True)
    largest = max(o.batch for o in optima)
    (c,) = [c for c in optima[-1].table if largest * c.num_draft_tokens == tokens[-1] and c.num_steps]
    assert rates[-1] == pytest.approx(1e3 / c.cycle_ms, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("vllm", ("vllm", None)),
        ("SGLang:0.5.18", ("sglang", "0.5.18")),
        ("tensorrt-llm:1.3.0rc1", ("trtllm", "1.3.0rc1")),
        ("llama.cpp:b10472", ("llamacpp", "b10472")),
    ],
)
def test_engines_by_name_and_version(text: str, read: tuple[str, str | None]) -> None:
    assert engine_version(text) == read


@pytest.mark.parametrize("text", ["", "mlc", "vllm:", "vllm:main", "vllm:1;reboot", ":1.2"])
def test_engines_that_are_none(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        engine_version(text)


def test_the_screen_and_the_object_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    sm.dump(fitted("sglang", "0.5.18").calibration, path)
    assert main(["optimize", str(path), "--engine", "vllm:0.26.0"]) == 0
    screen = capsys.readouterr().out
    assert "vllm serve" in screen
    assert "# to check the cost model with acceptance pinned (never in production):" in screen
    (pinned,) = [line for line in screen.splitlines() if line.startswith("#   ")]
    json.loads(shlex.split(pinned.removeprefix("#   "))[1])
    assert main(["optimize", str(path), "--engine", "vllm:0.26.0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["launch"]
    assert (found["engine"], found["version"], found["version_assumed"]) == ("vllm", "0.26.0", False)
    assert found["capture_tokens"] == [size * 4 for size in found["capture_sizes"]]
    assert main(["optimize", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["launch"]["engine"] == "sglang"


def test_what_is_not_recommended_is_not_launched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log of one server with speculation on: nothing tells whether another length is faster."""
    log = ROOT / "tests" / "data" / "engines" / "sglang_v0518_eagle3_tp8_clean.log"
    out = tmp_path / "calib.yaml"
    assert main(["ingest", str(log), "-q", "-o", str(out)]) == 0
    for words in ([], ["--engine", "sglang"]):
        assert main(["optimize", str(out), *words]) == 1
        screen = capsys.readouterr().out
        assert "sglang.launch_server" not in screen
        assert screen.splitlines()[-1].startswith("No recommendation")
    assert "launch     none, as nothing is recommended" in screen
    assert main(["optimize", str(out), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["launch"] is None


@pytest.mark.parametrize("engine", ["sglang", "vllm", "trtllm", "llamacpp"])
def test_a_file_cannot_put_words_into_a_shell(engine: str, tmp_path: Path) -> None:
    """Names, values and flags of a calibration come out as the words that they are, and secrets not at all."""
    evil = {"A;touch INJECTED;B": "v", "HF_TOKEN": "hf_planted", "NCCL_ALGO": "Ring $(touch INJECTED)"}
    setting = {"env": evil, "flags": ["--x $(touch INJECTED)", "`touch INJECTED`", "--y 'open"]}
    document = {
        "schema": "specmodel.calibration/1",
        "name": "evil",
        "system": {"engine": engine},
        "model": {"target": "T;touch INJECTED", "draft": "D$(touch INJECTED)", "method": "eagle3"},
        "comm": {"default": setting},
        "measurements": {
            "cycles": [{"num_steps": 0, "tok_s": 100.0}, {"num_steps": 3, "tok_s": 170.0, "acceptance_length": 2.6}]
        },
    }
    path = tmp_path / "evil.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    for more in ((), ("--json",)):
        done = subprocess.run(
            [sys.executable, "-m", "specmodel", "optimize", str(path), *more], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "hf_planted" not in done.stdout + done.stderr
    screen = subprocess.run(
        [sys.executable, "-m", "specmodel", "optimize", str(path)], capture_output=True, text=True
    ).stdout
    # Run what is pasted with every program replaced by nothing: nothing of the file may have run on its own.
    block = screen.split("settings", 1)[1].split("\nlaunch ", 1)[0].split("\n\n", 1)[-1]
    subprocess.run(
        ["bash", "-c", "python() { :; }; " + block], cwd=tmp_path, capture_output=True, env={"PATH": "/bin:/usr/bin"}
    )
    assert not (tmp_path / "INJECTED").exists()
