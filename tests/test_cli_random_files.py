"""Any valid file, however odd, through every command: an answer or a sentence, JSON without NaN, never a traceback."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings

from specmodel.cli import main

HERE = Path(__file__).parent
cases = SimpleNamespace(**runpy.run_path(str(HERE / "estimator_cases.py")))
documents = SimpleNamespace(**runpy.run_path(str(HERE / "test_fit_random_files.py"))).documents

COMMANDS = (
    ("optimize", "--trees", "auto", "--json"),
    ("optimize", "--engine", "vllm"),
    ("diagnose",),
    ("diagnose", "--json"),
    ("report",),
    ("report", "--format", "md"),
    ("whatif", "--set", "draft=0", "--explain"),
    ("whatif", "--set", "allreduce=0", "--set", "acceptance+=0.5", "--json"),
    ("whatif", "--set", "bandwidth*=1e9", "--json"),
    ("whatif", "--sweep", "acceptance+=-0.1:0.3:0.2", "--json"),
    ("simulate", "--requests", "10", "--seeds", "1", "--policy", "plain,fixed:2", "--json"),
)
Run = Callable[[dict[str, Any]], None]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Answer a document by every command."""

    def answer(document: dict[str, Any]) -> None:
        path = tmp_path / "calib.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        for command, *options in COMMANDS:
            try:
                code = main([command, str(path), *options])
            except SystemExit as stop:
                code = int(stop.code or 0)
            said = capsys.readouterr()
            assert code in (0, 1, 2), (command, said.err)
            assert said.out or said.err
            if "--json" in options and said.out:
                json.loads(said.out, parse_constant=lambda name: pytest.fail(name))

    return answer


ROW = {"num_steps": 3, "tok_s": 150.0, "acceptance_length": 2.2}
ODD = {
    "a spread without end": cases.document([cases.plain(sd_tok_s=1e15), {**ROW, "sd_tok_s": 1e15}]),
    "numbers as far apart as they may be": cases.document([cases.plain(2e-15), {**ROW, "tok_s": 1e15}]),
    "no all-reduce and no cycle": cases.document(
        draft=[{"num_steps": 1, "range_ms": [1.0, 1.0]}],
        acceptance=[{"num_steps": 1, "drafts": 7, "accepted_per_position": [0]}],
    ),
    "nothing accepted in the list, much in the row": cases.document(
        [cases.plain(), {"num_steps": 1, "tok_s": 90.0, "acceptance_length": 1.9}],
        acceptance=[{"num_steps": 1, "drafts": 1000, "accepted_per_position": [0]}],
    ),
    "a context of nothing": cases.document([cases.plain(context_tokens=0), {**ROW, "context_tokens": 300}]),
    "outputs without end": cases.document(
        [cases.plain(), ROW], workloads={"default": {"weight": 1, "output_tokens": 1e15}}
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_every_command_answers(run: Run, name: str) -> None:
    run(ODD[name])


SLOWLY = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.slow
@given(document=documents())
@settings(max_examples=int(os.environ.get("SPECMODEL_RANDOM_FILES", "12")), derandomize=True, **SLOWLY)
@example(document=cases.document())
def test_every_command_answers_any_file(run: Run, document: dict[str, Any]) -> None:
    run(document)
