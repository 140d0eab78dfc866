"""Long names, odd numbers, quoted paths, and warnings that say only what concerns the answer."""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.cli import main
from specmodel.errors import MAX_WORD_SHOWN, brief

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted
LONG = "n" * 10_000


def run(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


@given(st.lists(st.text(max_size=600), max_size=4).map(" ".join))
def test_what_can_be_read_is_kept_and_what_cannot_is_cut(text: str) -> None:
    short = brief(text)
    assert all(len(word) <= MAX_WORD_SHOWN for word in short.split())
    words = text.split()
    if all(len(word) <= MAX_WORD_SHOWN for word in words):
        assert short == text
    assert len(short.split()) >= len(words)


@pytest.mark.parametrize("command", [("optimize",), ("predict", "--steps", "3", "--batch", "1")])
def test_a_gain_over_what_was_not_measured_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    for rows, predicted in (([], True), ([plain(200.0)], False)):
        path = tmp_path / "calib.json"
        cycles = [spec(k, rate, length) for k, rate, length in ((1, 260.0, 1.66), (3, 352.0, 2.39), (5, 340.0, 2.6))]
        document = {"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": [*rows, *cycles]}}
        path.write_text(json.dumps(document), encoding="utf-8")
        assert run(command[0], str(path), *command[1:]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert "% above plain decoding" in last
        assert ("above plain decoding as predicted (" in last) == predicted


OPTIONS = [
    (LONG,),
    (f"--{LONG}",),
    ("optimize", LONG),
    ("optimize", str(cases.SEED), "--comm", LONG),
    ("optimize", str(cases.SEED), "--workload", LONG),
    ("optimize", str(cases.SEED), "--batch", LONG),
    ("optimize", str(cases.SEED), "--trees", LONG),
    ("optimize", str(cases.SEED), "--plot", f"{LONG}.png"),
    ("optimize", str(cases.SEED), f"--{LONG}"),
    ("optimize", str(cases.SEED), "--objective", LONG),
    ("predict", str(cases.SEED), "--steps", LONG),
    ("compare", str(cases.SEED), LONG),
    ("ingest", LONG),
]


@pytest.mark.parametrize("arguments", OPTIONS, ids=lambda a: a[0][:10] + (a[2][:10] if len(a) > 2 else ""))
def test_a_long_argument_is_not_repeated_whole(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) in (2, 3)
    said = capsys.readouterr()
    assert 0 < max(map(len, said.err.splitlines())) < 1000
    assert "nnn" in said.err
    assert said.out == ""


@pytest.mark.parametrize("command", ["optimize", "predict", "fit", "validate", "diagnose"])
def test_a_long_name_in_a_file_is_not_repeated_whole(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = cases.document(
        [
            plain(comm=LONG),
            spec(2, 150.0, 2.1, workload=LONG, comm=LONG),
            spec(4, 160.0, 2.6, workload=LONG, comm=LONG),
        ],
        comm={LONG: {}},
        description=LONG,
    )
    path = tmp_path / "long.json"
    path.write_text(json.dumps({**document, "name": LONG}))
    run(command, str(path))
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert max(map(len, (said.out + said.err).splitlines())) < 1200


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--batch", "1_0"),
        ("--batch", "４"),
        ("--batch", "١"),
        ("--batch", "nan"),
        ("--batch", "inf"),
        ("--batch", "0x10"),
        ("--batch", "1e999"),
        ("--batch", "1=1_0"),
        ("--batch", "1=1e308,2=1e308"),
        ("--workload", "a=1_0"),
        ("--workload", "a=1e308,b=1e308"),
        ("--max-tpot-ms", "1_0"),
        ("--max-tpot-ms", "٣"),
        ("--max-steps", "１"),
        ("--context-tokens", "1_000"),
        ("--trees", "５x4x8"),
    ],
)
def test_odd_digits_and_shares_without_a_sum_are_wrong_usage(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("optimize", str(cases.SEED), option, value) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert option in said


def test_shares_without_a_sum_are_wrong_usage_of_the_functions() -> None:
    model = fitted([plain(), spec(3, 170.0, 2.4, workload="a"), spec(3, 180.0, 2.6, workload="b")])
    with pytest.raises(sm.UsageError, match="finite"):
        model.predict(3, workload={"a": 1e308, "b": 1e308})
    with pytest.raises(sm.UsageError, match="share"):
        sm.optimize(model, batch={1: 1e308, 2: 1e308}, objective="goodput", max_tpot_ms=50)


def test_the_command_to_run_next_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "it's here; $HOME"
    folder.mkdir()
    path = folder / "a file.json"
    path.write_text(json.dumps(cases.document([plain(), spec(3, 170.0, 2.4)])))
    for command in ("predict", "optimize"):
        main([command, str(path)])
        shown = " ".join(capsys.readouterr().out.split())
        assert shlex.quote(str(path)) in shown
        assert shown.count(str(path)) == 0


BEYOND = "beyond the longest measured"
SHORT = [plain(), spec(1, 150.0, 1.7), spec(2, 140.0, 2.0), spec(3, 120.0, 2.1)]
RISING = [plain(), spec(1, 150.0, 1.8), spec(2, 190.0, 2.55), spec(3, 230.0, 3.2)]


def test_what_lies_beyond_is_said_where_it_concerns_the_choice() -> None:
    assert not any(BEYOND in w for w in sm.optimize(fitted(SHORT)).warnings)
    rising = sm.optimize(fitted(RISING))
    assert max(c.num_steps for c in (rising.best, *rising.ties)) > 3
    assert sum(BEYOND in w for w in rising.warnings) == 1
    # A prediction says so of what it was asked for.
    assert any(BEYOND in w for w in fitted(SHORT).predict(5).warnings)


def test_what_lies_beyond_is_said_of_rows_that_were_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.json"
    path.write_text(json.dumps(cases.document(SHORT)))
    for arguments, times in (((), 0), (("--steps", "0-3"), 0), (("--steps", "5"), 1), (("--steps", "2-9"), 1)):
        main(["predict", str(path), *arguments])
        assert " ".join(capsys.readouterr().out.split()).count(BEYOND) == times, arguments


def test_several_batches_say_what_is_tied_and_how_far_they_reach_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [plain(), spec(3, 230.0, 2.5), plain(3000.0, batch=32), spec(3, 4900.0, 2.5, batch=32)]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(cases.document(rows)))
    optima = [sm.optimize(fitted(rows), batch=b) for b in (1, 32)]
    reached = {w for optimum in optima for w in optimum.warnings if BEYOND in w}
    assert any(optimum.ties for optimum in optima)
    assert len(reached) > 1
    main(["optimize", str(path)])
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(BEYOND) == 1
    assert shown.count("than a 25 % chance of being faster") == 1
    for optimum in optima:
        assert not optimum.ties or f"at batch {optimum.batch:g}" in shown.partition(" ties ")[2].partition(":")[0]
    least = max(optimum.expected_regret for optimum in optima)
    assert f"expected regret at most {100 * least:.1f} %" in shown


def shares(model: Any) -> dict[str, float]:
    found, _ = model.mixture(None)
    return {model.layout.workloads[i]: share for i, share in found.items()}


def test_what_is_named_after_the_whole_is_not_weighed_beside_its_parts() -> None:
    rows = [plain(), *(spec(3, 170.0, 2.4, workload=w) for w in ("chat", "code", "Mixed"))]
    model = fitted(rows)
    assert shares(model) == {"Mixed": 1.0}
    [warning] = model.mixture(None)[1]
    assert "Mixed, the whole of the others" in warning
    assert shares(fitted(rows[:3])) == {"chat": 0.5, "code": 0.5}
    stated = fitted(rows, workloads={"chat": {"weight": 3}, "code": {"weight": 1}})
    assert shares(stated) == {"chat": 0.75, "code": 0.25}
    # Asked for by name, any mixture is taken.
    named, _ = model.mixture({"chat": 1.0, "Mixed": 1.0})
    assert len(named) == 2


def test_closed_streams_end_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's `>&-` leaves no stream at all."""
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", None)
        assert main(["fit", str(cases.SEED)]) == 1
    assert "standard output is closed" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr("sys.stderr", None)
        assert main(["fit", "no such file"]) == 3
        sys.stderr.close()
