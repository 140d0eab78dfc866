"""What no system can do is not recommended, whichever of the numbers is to blame: exit code 1 and the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.cli import main
from specmodel.contradictions import only_falls

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


def totals(*rows: tuple[int, float, float]) -> list[dict[str, Any]]:
    """Rows of (steps, batch, tok/s)."""
    accepted = {0: {}, 3: LENGTH}
    return [{"num_steps": k, "batch": b, "tok_s": rate, **accepted[k]} for k, b, rate in rows]


EACH = totals((0, 1, 100.0), (3, 1, 200.0), (3, 8, 180.0), (3, 32, 120.0))
FALLS: dict[str, tuple[list[dict[str, Any]], float | None]] = {
    "rates of one request": (EACH, 1.0),
    "of plain decoding as well": ([*EACH, *totals((0, 8, 90.0), (0, 32, 70.0))], 1.0),
    "level before it falls": (totals((3, 1, 200.0), (3, 2, 199.0), (3, 4, 170.0)), 2.0),
    "plain decoding rises": ([*EACH, *totals((0, 8, 600.0), (0, 32, 1500.0))], None),
    "it rises before it falls": (totals((3, 1, 200.0), (3, 8, 900.0), (3, 32, 700.0)), None),
    "a full system": (totals((3, 32, 5000.0), (3, 64, 4880.0)), None),
    "one batch": (totals((0, 8, 100.0), (3, 8, 90.0)), None),
}


@pytest.mark.parametrize("name", FALLS)
def test_no_batch_is_believed_above_which_totals_only_fall(name: str) -> None:
    rows, above = FALLS[name]
    found = only_falls(
        sm.from_dict({"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": rows}})
    )
    assert (None if found is None else found[0]) == above


@pytest.mark.parametrize("name", ["rates of one request", "plain decoding rises"])
def test_a_total_that_falls_is_warned_of_and_declined_where_all_fall(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / "calib.json"
    rows, above = FALLS[name]
    document = {"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": rows}}
    path.write_text(json.dumps(document), encoding="utf-8")
    assert main(["optimize", str(path), "--batch", "8"]) == (1 if above else 0)
    found = " ".join(capsys.readouterr().out.split())
    assert "3 steps: the total falls from 180 tok/s at batch 8 to 120 at batch 32" in found
    assert ("No recommendation: batch 8: every total falls" in found) == bool(above)
    assert main(["optimize", str(path)]) == (1 if above else 0)
    last = capsys.readouterr().out.splitlines()[-1]
    assert (" and more; " in last) != bool(above)


def test_the_last_line_has_every_entry_of_a_schedule_that_nothing_declines(capsys: pytest.CaptureFixture[str]) -> None:
    """Also those that lie between two answered batches."""
    path = str(Path(__file__).parent.parent / "calibrations/measured/h200-llama-3.1-8b.yaml")
    assert main(["optimize", path, "--json"]) == 0
    steps = json.loads(capsys.readouterr().out)["schedule"]
    assert main(["optimize", path]) == 0
    plan = capsys.readouterr().out.splitlines()[-1].rsplit("; ", 1)[0]
    assert plan.count(" for batch ") == len(steps) > 2
