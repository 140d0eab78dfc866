"""`specmodel simulate`: what it prints, what it refuses and how, and that text and JSON say the same."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specmodel.cli import main
from specmodel.report import rate
from specmodel.simulate.scenario import Scenario

CALIB = """\
schema: specmodel.calibration/1
name: small
comm: {ring: {}}
measurements:
  cycles:
    - {num_steps: 0, cycle_ms: 10.0}
    - {num_steps: 2, cycle_ms: 12.0, acceptance_length: 2.1}
    - {num_steps: 0, batch: 8, cycle_ms: 12.0}
    - {num_steps: 2, batch: 8, cycle_ms: 30.0, acceptance_length: 2.1}
  prefill:
    - {tokens: 500, time_ms: 25.0}
"""
QUICK = ("--policy", "plain,fixed:2", "--comm", "default", "--requests", "30", "--seeds", "2", "--output-tokens", "12")


@pytest.fixture
def calib(tmp_path: Path) -> str:
    path = tmp_path / "calib.yaml"
    path.write_text(CALIB)
    return str(path)


class Ran:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*words: str) -> Ran:
        try:
            code = main(["simulate", *words])
        except SystemExit as end:
            code = int(end.code or 0)
        done = capsys.readouterr()
        return Ran(code, done.out, done.err)

    return call


def test_screen_and_json_say_the_same(run: Any, calib: str) -> None:
    screen, document = run(calib, *QUICK), run(calib, *QUICK, "--json")
    assert (screen.code, document.code, screen.err, document.err) == (0, 0, "", "")
    answer = json.loads(document.out)
    assert answer["schema"] == "specmodel.simulation/1"
    (simulation,) = answer["simulations"]
    assert simulation["recommended"] is True
    assert [r["policy"] for r in simulation["results"]] == ["plain", "fixed:2"]
    for result in simulation["results"]:
        shown = f"{result['tok_s']['mean']:.1f}"
        assert re.search(rf"{re.escape(result['policy'])} +{re.escape(shown)} ", screen.out), screen.out
        assert result["tok_s"]["interval"] is not None
        assert result["ttft_ms"]["p50"]["mean"] > 20.0
        assert sum(at["share"] for at in result["time_at"]) == pytest.approx(1.0)
    assert screen.out.rstrip().splitlines()[-1].startswith(f"Best: {simulation['best']} at closed:8: ")
    assert "TTFT" in screen.out
    assert "chance alone" in screen.out


def test_the_default_is_one_policy_of_each_kind(run: Any, calib: str) -> None:
    done = run(calib, "--requests", "20", "--seeds", "1", "--output-tokens", "8", "--json")
    (simulation,) = json.loads(done.out)["simulations"]
    names = [r["policy"] for r in simulation["results"]]
    assert names[0] == "plain"
    assert names[-4:] == ["schedule", "adaptive", "optimal", "oracle"]
    assert simulation["schedule"][0]["batch_from"] == 1
    assert simulation["schedule"][-1]["batch_to"] == 8
    assert "NaN" not in done.out


def test_bounds_alone_are_called_a_bound_and_not_recommended(run: Any, calib: str) -> None:
    words = (calib, *QUICK[2:], "--policy", "optimal,oracle")
    assert run(*words).out.rstrip().splitlines()[-1].startswith("A bound, no engine can: ")
    (simulation,) = json.loads(run(*words, "--json").out)["simulations"]
    assert simulation["recommended"] is False


def test_policies_that_come_to_the_same_are_named_together(run: Any, calib: str) -> None:
    done = run(calib, *QUICK[2:], "--arrivals", "closed:1", "--max-steps", "2", "--policy", "plain,fixed:2,schedule")
    assert "the same as schedule; +" in done.out


def test_several_loads_are_several_answers_and_a_front(run: Any, calib: str, tmp_path: Path) -> None:
    done = run(calib, *QUICK, "--arrivals", "closed:1, 8", "--plot", str(tmp_path / "front.svg"))
    assert done.code == 0
    assert "1 client, at most 1 at once" in done.out
    assert "8 clients, at most 8 at once" in done.out
    assert done.out.rstrip().splitlines()[-1] == "Best: fixed:2 at closed:1; plain at closed:8"
    svg = (tmp_path / "front.svg").read_text()
    assert "tok/s of one user" in svg
    assert "closed:8" in svg


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_screens_fit_their_width(run: Any, calib: str, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    done = run(calib, *QUICK, "--slo", "tpot=11ms,latency=2s", "--arrivals", "poisson:3")
    lines = done.out.rstrip("\n").split("\n")
    assert max(map(len, lines[:-1])) <= columns
    assert "goodput" in done.out


def test_a_trace_is_read_from_a_file(run: Any, calib: str, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"arrival_ms": 100 * i, "prompt_tokens": 100, "output_tokens": 5} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    done = run(calib, "--arrivals", str(path), "--policy", "plain", "--comm", "default", "--seeds", "1", "--json")
    (simulation,) = json.loads(done.out)["simulations"]
    assert simulation["scenario"]["arrivals"] == "trace"
    assert simulation["scenario"]["requests"] == 12
    assert simulation["results"][0]["cycles"]["mean"] == 4.0


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 3, "the trace has no request"),
        ("hello\n", 3, "line 1: must be a line of JSON"),
        (
            '{"arrival_ms": 0, "output_tokens": 2}\n{"arrival_ms": NaN, "output_tokens": 2}\n',
            3,
            "line 2: arrival_ms must be",
        ),
        ("[" * 100_000 + "\n", 3, "line 1: must be a line of JSON"),
        ('{"arrival_ms": 0, "output_tokens": 1}\n', 0, ""),
    ],
)
def test_a_faulty_trace_is_a_bad_file(run: Any, calib: str, tmp_path: Path, text: str, code: int, said: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    done = run(calib, "--arrivals", str(path), "--policy", "plain", "--comm", "default", "--seeds", "1")
    assert (done.code, said in done.err) == (code, True)
    assert len(done.err) < 400


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arrivals", "often"), "must be closed:N, poisson:RATE or the file of a trace"),
        (("--arrivals", "closed:1,1"), "a load is given twice"),
        (("--arrivals", "closed:1,x"), "arrivals must be closed:N"),
        (("--arrivals", "poisson:0"), "above 0"),
        (("--arrivals", "closed:" + ",".join(map(str, range(1, 80)))), "at most 64 loads"),
        (("--policy", "fastest"), "a policy is plain, fixed:K"),
        (("--policy", "plain,"), "a policy is plain, fixed:K"),
        (("--output-tokens", "many"), "output_tokens must be"),
        (("--slo", "fast"), "slo must be limits"),
        (("--comm", "nvls"), "use one of: default, ring"),
        (("--mix", "poem"), "'poem' is not in small"),
        (("--seeds", "0"), "must be a whole number from 1"),
        (("--requests", "1e3"), "must be a whole number"),
        (("--max-batch", "-1"), "must be a whole number"),
        (("--acceptance-spread", "2"), "from 0 to 0.9"),
        (("--acceptance-spread", "nan"), "above 0"),
        (("--plot", "front.gif"), "must end in"),
        (("--out", "a.jsonl"), "--out belongs to --sweep"),
        (("--workers", "2"), "--workers belongs to --sweep"),
        (("--scheduler", "tcp://127.0.0.1:1"), "--scheduler belongs to --sweep"),
        (("--sweep", "g.yaml"), "--sweep needs --out"),
        (("--sweep", "g.yaml", "--out", "a", "--policy", "plain"), "--policy cannot be given beside --sweep"),
        (("--sweep", "g.yaml", "--out", "a", "--mix", "chat"), "--mix cannot be given beside --sweep"),
        (("--sweep", "g.yaml", "--out", "a", "--seeds", "16"), "--seeds cannot be given beside --sweep"),
        (("--sweep", "g.yaml", "--out", "a", "--acceptance-spread", "0"), "--acceptance-spread cannot be given beside"),
        (("--sweep", "g.yaml", "--out", "a", "--model-draws"), "--model-draws cannot be given beside --sweep"),
        (("--sweep", "g.yaml", "--out", "a", "--workers", "2", "--scheduler", "x"), "exclude each other"),
        (("--arrival", "closed:1"), "did you mean `--arrivals`?"),
    ],
    ids=str,
)
def test_wrong_usage_is_named_and_nothing_is_printed(run: Any, calib: str, words: tuple[str, ...], said: str) -> None:
    done = run(calib, *words)
    assert (done.code, done.out) == (2, "")
    assert said in done.err
    assert done.err.startswith("specmodel simulate: error: ")


def test_goodput_stands_beside_its_own_interval(run: Any, calib: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    words = (*QUICK, "--arrivals", "poisson:8", "--max-batch", "8", "--slo", "latency=110ms", "--requests", "100")
    done, document = run(calib, *words), json.loads(run(calib, *words, "--json").out)
    (simulation,) = document["simulations"]
    best = next(r for r in simulation["results"] if r["policy"] == simulation["best"])
    low, high = best["goodput_tok_s"]["interval"]
    assert best["goodput_tok_s"]["mean"] < best["tok_s"]["mean"]
    (row,) = [line for line in done.out.splitlines() if line.startswith(">")]
    assert row.split()[2] == f"±{rate(0.5 * (high - low))}"
    assert f"tok/s of goodput, 90 % interval {rate(low)} to {rate(high)}" in done.out.splitlines()[-1]
    none = run(calib, *words, "--slo", "tpot=10.5ms")
    assert "inf" not in none.out


def test_policies_that_do_the_same_are_said_to_be_the_same(run: Any, calib: str) -> None:
    done = run(calib, *QUICK, "--policy", "schedule", "--max-steps", "2", "--arrivals", "closed:1")
    assert "the same as schedule" in done.out
    assert "+0.0 %" not in done.out


def test_what_is_too_far_is_declined(run: Any, calib: str) -> None:
    words = (*QUICK, "--arrivals", "closed:60", "--requests", "70", "--seeds", "1")
    done, trusted = run(calib, *words), run(calib, *words, "--extrapolate")
    assert (done.code, trusted.code) == (1, 0)
    assert done.out.rstrip().splitlines()[-1].startswith("No recommendation: ")
    assert "batch 60 is outside the measured 1 to 8" in done.out
    assert json.loads(run(calib, *words, "--json").out)["simulations"][0]["recommended"] is False


def test_a_sweep_from_the_command_line(run: Any, calib: str, tmp_path: Path) -> None:
    grid, out = tmp_path / "grid.yaml", tmp_path / "a.jsonl"
    grid.write_text(
        "arrivals:\n  - closed:1\n  - closed:2\npolicy: [plain, 'fixed:2']\ncomm: default\nrequests: 10\nseeds: 2\n"
        "output_tokens: 6\n"
    )
    words = (calib, "--sweep", str(grid), "--out", str(out), "--workers", "1")
    first = run(*words)
    assert (first.code, first.err) == (0, "")
    assert first.out == f"4 scenarios in {out}\n"
    before = out.read_bytes()
    again = run(*words, "--json")
    assert json.loads(again.out) == {
        "schema": "specmodel.sweep-count/1",
        "out": str(out),
        "scenarios": 4,
        "kept": 4,
        "failed": 0,
    }
    assert out.read_bytes() == before
    grid.write_text("arrivals: [closed:1, closed:x]\n")
    done = run(*words)
    assert (done.code, "grid.yaml: arrivals[1]: arrivals must be closed:N" in done.err) == (3, True)
    grid.write_text("arrivals:\n- closed: 4\n")
    done = run(*words)
    assert (done.code, 'write "closed:4", without a space after the colon' in done.err) == (3, True)
    grid.write_text("arrivals: ['closed:1'\n")
    assert run(*words).code == 3
    out.unlink()
    grid.write_text("workload: [chat, {poem: 1}]\npolicy: plain\ncomm: default\nrequests: 10\nseeds: 2\n")
    done = run(*words)
    assert done.code == 1
    assert done.out.startswith(f"2 scenarios in {out}; 2 failed, the first because workload 'chat' is not in small")
    out.unlink()
    out.write_bytes(before)
    grid.write_text("policy: plain\nseeds: 2\n")
    done = run(*words)
    assert (done.code, "holds other things" in done.err) == (2, True)
    for bad in (tmp_path, tmp_path / "none" / "x"):
        assert run(calib, "--sweep", str(grid), "--out", str(bad)).code == 2


def test_a_person_who_waits_sees_a_bar_on_standard_error(
    calib: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import io
    import sys

    from specmodel.commands import simulate as command

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for shown_after_s, quiet, seen in ((0.0, (), True), (0.0, ("-q",), False), (60.0, (), False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setattr(command, "_SHOWN_AFTER_S", shown_after_s)
        monkeypatch.setenv("TERM", "xterm")
        words = ("--policy", "plain", "--comm", "default", "--requests", "60", "--seeds", "1", *quiet)
        assert main(["simulate", calib, *words]) == 0
        assert ("simulating" in terminal.getvalue()) is seen
    assert "simulating" not in capsys.readouterr().out


def test_every_option_of_a_scenario_can_be_given(run: Any) -> None:
    """The help names each one, or it is for grids and programs and the page says so."""
    text = run("-h").out
    page = (Path(__file__).parent.parent / "docs" / "howto" / "simulate.md").read_text(encoding="utf-8")
    from dataclasses import fields

    for item in fields(Scenario):
        option = {"policies": "policy", "workload": "mix", "trace": "arrivals", "schedule": "policy"}.get(
            item.name, item.name
        )
        assert f"--{option.replace('_', '-')}" in text or f"`{item.name}`" in page, item.name
    assert text.startswith("examples:\n")
    assert max(map(len, text.splitlines())) <= 130
