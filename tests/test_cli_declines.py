"""What no system can do is not recommended, whichever of the numbers is to blame: exit code 1 and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specmodel.cli import main

PLAIN, ROW = {"num_steps": 0, "tok_s": 200.0}, {"num_steps": 3, "tok_s": 352.0}
LENGTH = {"acceptance_length": 2.39}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, Any]], str]] = {
    "fractions of a percentage": (
        {"cycles": [PLAIN, ROW]},
        [{"num_steps": 3, "survival": [0.0071, 0.0044, 0.0024]}],
        "shorter than a plain step",
    ),
    "plain decoding at another context": (
        {"cycles": [{**PLAIN, "tok_s": 60.0, "context_tokens": 128000}, {**ROW, **LENGTH, "context_tokens": 1000}]},
        [],
        "shorter than a plain step",
    ),
    "tables in seconds": (
        {"verify": [{"tokens": n, "time_ms": 0.005 + 1e-4 * n} for n in (1, 4)], "cycles": [PLAIN, {**ROW, **LENGTH}]},
        [],
        "check the unit",
    ),
    "cycles in seconds": (
        {"cycles": [{"num_steps": 0, "tpot_ms": 0.005}, {"num_steps": 3, "tpot_ms": 0.00284, **LENGTH}]},
        [],
        "check the unit",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("command", ["optimize", "report"])
def test_what_cannot_be_is_declined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    measurements, acceptance, said = CASES[name]
    path = tmp_path / "calib.json"
    document = {"schema": "specmodel.calibration/1", "name": "x", "measurements": measurements}
    path.write_text(json.dumps({**document, "acceptance": acceptance}), encoding="utf-8")
    assert main([command, str(path), *(["--format", "md"] if command == "report" else [])]) == 1
    found = " ".join(capsys.readouterr().out.split())
    assert "No recommendation" in found
    assert said in found
    assert "Recommendation:" not in found
