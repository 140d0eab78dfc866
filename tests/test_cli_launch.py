"""The launch line of a recommendation: for the engine of the file, with its settings, copied and run as it stands."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.launch.lines import launch_lines
from specmodel.model import FittedModel


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
