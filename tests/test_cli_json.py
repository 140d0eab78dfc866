"""The objects of ``--json``: exactly the keys of the interface, unrounded, and what the Python interface says."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.cli import main
from specmodel.commands import output

ROOT = Path(__file__).parents[1]
SEED = str(ROOT / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml")
BATCHES = str(ROOT / "calibrations" / "field" / "lmsys_dsv3_mtp_mi300x8.yaml")
VALIDATED = str(ROOT / "calibrations" / "measured" / "h200x2_tp2_transfer.yaml")

BEST = {
    "num_steps",
    "num_draft_tokens",
    "topk",
    "comm",
    "tok_s",
    "tok_s_interval",
    "tpot_ms",
    "cycle_ms",
    "verify_ms",
    "draft_ms",
    "overhead_ms",
    "acceptance_length",
    "speedup",
    "probability_best",
    "extrapolated",
    "measured",
}
LAUNCH = {"engine", "version", "version_assumed", "env", "command", "files", "notes", "validation"} | {
    "capture_sizes",
    "capture_tokens",
}
OPTIMUM = {"batch", "best", "ties", "table", "plain", "ceilings", "expected_regret", "measure_next", "unmeasured"}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == code
    said = capsys.readouterr()
    assert said.err == ""
    found: dict[str, Any] = json.loads(said.out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    return found


def check_candidate(found: dict[str, Any]) -> None:
    assert set(found) == BEST
    assert all(isinstance(found[key], int) for key in ("num_steps", "num_draft_tokens", "topk"))
    assert all(isinstance(found[key], bool) for key in ("extrapolated", "measured"))
    low, high = found["tok_s_interval"]
    assert low < found["tok_s"] < high
    assert 0.0 <= found["probability_best"] <= 1.0
    parts = found["verify_ms"] + found["draft_ms"] + found["overhead_ms"]
    assert math.isclose(parts, found["cycle_ms"], rel_tol=1e-9)
    assert math.isclose(1000.0 * found["acceptance_length"] / found["cycle_ms"] * batch_of(found), found["tok_s"])


def batch_of(found: dict[str, Any]) -> float:
    return float(found["tok_s"] * found["tpot_ms"] / 1000.0)


@pytest.mark.parametrize(
    "arguments",
    [(SEED,), (BATCHES, "--max-steps", "4"), (SEED, "--trees", "5x4x8"), (SEED, "--workload", "wiring-fault")],
)
def test_optimize(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    found = answer(capsys, "optimize", *arguments)
    assert set(found) == {"schema", "optima", "schedule", "comm_settings", "launch", "warnings"}
    assert found["launch"] is None or set(found["launch"]) == LAUNCH
    assert found["schema"] == "specmodel.optimum/1"
    for optimum in found["optima"]:
        assert set(optimum) == OPTIMUM
        for candidate in (optimum["best"], *optimum["ties"], *optimum["table"]):
            check_candidate(candidate)
            assert math.isclose(batch_of(candidate), optimum["batch"])
        assert optimum["best"] in optimum["table"]
        assert set(optimum["plain"]) == {"comm", "tok_s", "tok_s_interval", "measured"}
        assert set(optimum["ceilings"]) == {"draft", "verify", "acceptance"}
        for ceiling in optimum["ceilings"].values():
            assert set(ceiling) == {"speedup", "interval"}
        if optimum["measure_next"] is not None:
            assert set(optimum["measure_next"]) == {"kind", "row", "reason", "gain_tok_s"}
            assert optimum["measure_next"]["kind"] in ("cycles", "verify", "draft", "allreduce", "acceptance")
        assert all(isinstance(text, str) for text in optimum["unmeasured"])
    for step in found["schedule"]:
        assert set(step) == {"batch_from", "batch_to", "num_steps", "topk", "num_draft_tokens", "comm"}
    assert found["schedule"][0]["batch_from"] == 1
    assert found["schedule"][-1]["batch_to"] is None
    for setting in found["comm_settings"].values():
        assert set(setting) == {"env", "flags"}


def test_optimize_says_what_python_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "optimize", SEED)["optima"][0]
    optimum = sm.optimize(sm.fit(sm.load(SEED)))
    for key in BEST:
        expected = getattr(optimum.best, key)
        assert found["best"][key] == (list(expected) if isinstance(expected, tuple) else expected)
    assert len(found["table"]) == len(optimum.table)
    assert found["expected_regret"] == optimum.expected_regret
    assert found["plain"]["tok_s"] == optimum.plain.tok_s


def test_every_measured_batch_is_answered_unless_some_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert [o["batch"] for o in answer(capsys, "optimize", BATCHES, "--max-steps", "4")["optima"]] == [
        1,
        2,
        4,
        8,
        16,
        32,
        64,
    ]
    named = answer(capsys, "optimize", BATCHES, "--max-steps", "4", "--batch", "3,12")
    assert [o["batch"] for o in named["optima"]] == [3, 12]


def test_speculation_is_not_recommended_where_only_plain_decoding_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Speculation at batch 1, plain decoding at 32 to 128: no answer for those but plain decoding or none."""
    path = str(ROOT / "calibrations" / "field" / "vllm_recipes_qwen38_2p4t_nvfp4.yaml")
    found = answer(capsys, "optimize", path, code=1)
    for optimum in found["optima"]:
        best = optimum["best"]
        assert optimum["batch"] == 1 or best["num_steps"] == 0 or best["extrapolated"]


def test_a_distribution_of_batches_is_one_answer(capsys: pytest.CaptureFixture[str]) -> None:
    limit = ("--objective", "goodput", "--max-tpot-ms", "1000")
    given = answer(capsys, "optimize", BATCHES, "--batch", "1=0.2,32=0.8", *limit)
    assert [o["batch"] for o in given["optima"]] == [32]
    assert len(answer(capsys, "optimize", BATCHES, *limit)["optima"]) == 1


def test_options_restrict_the_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "optimize", SEED, "--comm", "default", "--max-steps", "3", "--trees", "4x2x6")
    table = found["optima"][0]["table"]
    shapes = [(c["num_steps"], c["topk"], c["num_draft_tokens"]) for c in table]
    assert shapes == [(0, 1, 1), (1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 2, 6)]
    assert {c["comm"] for c in table} == {"default"}
    mixed = answer(capsys, "optimize", SEED, "--workload", "default=0.5,wiring-fault=0.5")["optima"][0]
    alone = answer(capsys, "optimize", SEED)["optima"][0]
    assert mixed["table"][5]["acceptance_length"] < alone["table"][5]["acceptance_length"]


def test_a_limit_leaves_slower_candidates_no_chance(capsys: pytest.CaptureFixture[str]) -> None:
    table = answer(capsys, "optimize", SEED, "--max-tpot-ms", "12")["optima"][0]["table"]
    assert all(c["probability_best"] == 0.0 for c in table if c["tpot_ms"] > 12.5)


def test_predict(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "predict", SEED, "--steps", "0-2,5", "--comm", "default")
    assert set(found) == {"schema", "predictions"}
    assert found["schema"] == "specmodel.prediction/1"
    assert [p["num_steps"] for p in found["predictions"]] == [0, 1, 2, 5]
    model = sm.fit(sm.load(SEED))
    for prediction in found["predictions"]:
        check_candidate(prediction)
        assert prediction["tok_s"] == pytest.approx(float(model.predict(prediction["num_steps"]).tok_s), rel=1e-12)
    # The same chances as in the choice.
    table = answer(capsys, "optimize", SEED, "--comm", "default")["optima"][0]["table"]
    assert found["predictions"] == [table[k] for k in (0, 1, 2, 5)]


def test_predict_covers_every_setting_and_batch_and_the_trees_it_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    everything = answer(capsys, "predict", SEED, "--steps", "1", "--trees", "2x2x4")["predictions"]
    assert [(p["comm"], p["topk"]) for p in everything] == [
        ("default", 1),
        ("default", 2),
        ("ring-ll-sys", 1),
        ("ring-ll-sys", 2),
    ]
    several = answer(capsys, "predict", BATCHES, "--steps", "0,2")["predictions"]
    assert [round(batch_of(p)) for p in several] == [b for b in (1, 2, 4, 8, 16, 32, 64) for _ in range(2)]


def test_predict_beyond_the_usual_steps(capsys: pytest.CaptureFixture[str]) -> None:
    (far,) = answer(capsys, "predict", SEED, "--steps", "40", "--comm", "default", code=1)["predictions"]
    assert far["extrapolated"]
    check_candidate(far)


def test_validate(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "validate", VALIDATED)
    assert set(found) == {"schema", "rows", "coverage", "exceeded"}
    assert found["schema"] == "specmodel.validation/1"
    assert found["exceeded"] is False
    cal = sm.load(VALIDATED)
    rows = [r["row"] for r in found["rows"]]
    read = sm.from_dict(
        {"schema": cal.schema, "name": "x", "comm": {c: {} for c in cal.comm_names}, "measurements": {"cycles": rows}}
    )
    assert read.measurements.cycles == cal.validation.cycles
    for each in found["rows"]:
        assert set(each) == {"row", "predicted_tok_s", "tok_s_interval", "measured_tok_s", "verdict"}
        assert each["verdict"] in ("inside", "slower", "faster", "impossible")
    inside = sum(r["verdict"] == "inside" for r in found["rows"])
    assert found["coverage"] == inside / len(found["rows"])


def test_validate_against_another_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "measured.yaml"
    row = "{num_steps: 2, comm: ring-ll-sys, tok_s: %s}"
    text = "{schema: specmodel.calibration/1, name: m, comm: {ring-ll-sys: {}}, measurements: {cycles: [%s]}}"
    file.write_text(text % (row % 94.2))
    found = answer(capsys, "validate", SEED, str(file), "--tolerance", "5")
    assert [r["verdict"] for r in found["rows"]] == ["inside"]
    file.write_text(text % (row % 60))
    found = answer(capsys, "validate", SEED, str(file), "--tolerance", "5", code=1)
    assert (found["rows"][0]["verdict"], found["exceeded"], found["coverage"]) == ("slower", True, 0.0)
    assert answer(capsys, "validate", SEED, str(file), "--tolerance", "80")["exceeded"] is False
    file.write_text(text % (row % 500))
    found = answer(capsys, "validate", SEED, str(file), "--tolerance", "5")
    assert (found["rows"][0]["verdict"], found["exceeded"], found["coverage"]) == ("impossible", False, None)


def test_validate_leaves_each_cycle_out(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "validate", SEED)
    measured = sorted(round(r["measured_tok_s"], 1) for r in found["rows"])
    assert measured[1:] == [88.8, 89.0, 94.0]
    assert answer(capsys, "validate", SEED, "--tolerance", "0.01", code=1)["exceeded"] is True


def test_fit(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "fit", SEED)
    assert set(found) == {"schema", "name", "observations", "given", "not_given", "terms", "warnings"}
    terms = {t["name"]: t for t in found["terms"]}
    assert set(terms) == {t.name for t in sm.fit(sm.load(SEED)).terms}
    for term in terms.values():
        assert set(term) == {"name", "value", "interval", "unit", "informed"}
        assert term["interval"][0] <= term["value"] <= term["interval"][1]


def test_what_is_not_finite_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_json({"a": [1.5, math.inf, {"b": math.nan}], "c": (-math.inf, 2)})
    assert json.loads(capsys.readouterr().out) == {"a": [1.5, None, {"b": None}], "c": [None, 2]}


@pytest.mark.parametrize("name", ["", "\u202e", "x" * 300])
def test_names_are_as_they_stand_in_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.json"
    comm = f"a{name}"
    cycles = [{"num_steps": 0, "tok_s": 100.0}, {"num_steps": 2, "tok_s": 150.0, "comm": comm}]
    document = {"schema": "specmodel.calibration/1", "name": "x", "comm": {comm: {"env": {"A": "\u00e9"}}}}
    file.write_text(json.dumps({**document, "measurements": {"cycles": cycles}}))
    found = answer(capsys, "optimize", str(file), "--extrapolate")
    assert found["comm_settings"][comm] == {"env": {"A": "\u00e9"}, "flags": []}
    assert comm in {c["comm"] for c in found["optima"][0]["table"]}


class Terminal:
    """A standard error that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize(("each_ms", "shown"), [(1.0, False), (1000.0, True)])
def test_progress_is_shown_where_it_takes_long_and_is_gone_at_the_end(
    monkeypatch: pytest.MonkeyPatch, each_ms: float, shown: bool
) -> None:
    import argparse
    import sys
    import time

    from specmodel.commands import validate

    clock = iter(range(1000))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock) * each_ms / 1000.0)
    monkeypatch.setattr(sys, "stderr", Terminal())
    show = validate._progress(argparse.Namespace(quiet=False))
    assert show is not None
    for done in (1, 2, 3):
        show(done, 3)
    text = sys.stderr.text
    assert ("left out 1 of 3" in text) == shown
    assert text == "" or text.endswith("\r\x1b[K")
    assert validate._progress(argparse.Namespace(quiet=True)) is None


def differences(shown: Any, real: Any, path: str = "") -> list[str]:
    """Where a shortened object differs from the real one: other keys, other values, numbers off by 5 % or more."""
    if shown == "..." and isinstance(real, str):
        return []
    if shown == ["..."] and isinstance(real, list):
        return [] if real else [f"{path}: nothing is left out of an empty list"]
    if type(shown) is not type(real) and not (isinstance(shown, int | float) and isinstance(real, int | float)):
        return [f"{path}: {shown!r} is shown, {real!r} is real"]
    if isinstance(real, dict):
        if list(shown) != list(real):
            return [f"{path}: keys {list(shown)} are shown, {list(real)} are real"]
        return [text for key in real for text in differences(shown[key], real[key], f"{path}.{key}")]
    if isinstance(real, list):
        if len(shown) != len(real):
            return [f"{path}: {len(shown)} are shown, {len(real)} are real"]
        pairs = enumerate(zip(shown, real, strict=True))
        return [text for i, (a, b) in pairs for text in differences(a, b, f"{path}[{i}]")]
    same = math.isclose(shown, real, rel_tol=0.05) if isinstance(real, float) else shown == real
    return [] if same else [f"{path}: {shown!r} is shown, {real!r} is real"]


def test_the_object_that_the_reference_shows_is_the_one_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    [block] = [b for b in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if "specmodel.optimum/1" in b]
    assert differences(json.loads(block), answer(capsys, "optimize", SEED)) == []
