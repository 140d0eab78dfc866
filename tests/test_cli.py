"""The command line as processes: exit codes, the two output streams, stdin, pipes, help, colour, encodings."""

import argparse
import contextlib
import functools
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specmodel import cli
from specmodel.cli import main
from specmodel.commands.output import page

ROOT = Path(__file__).parents[1]
LOG = "tests/data/engines/sglang_v0518_eagle3_tp8_clean.log"
SEED = "calibrations/seed/kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
BATCHES = "calibrations/field/vllm_44697_mtp_pp4_pcie.yaml"
COMMANDS = ("optimize", "predict", "fit", "validate", "diagnose", "simulate", "compare", "schema")
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "optimize": ("optimize", SEED),
    "predict": ("predict", SEED),
    "fit": ("fit", SEED),
    "validate": ("validate", SEED),
    "diagnose": ("diagnose", SEED),
    "simulate": (
        "simulate",
        SEED,
        "--policy",
        "plain,fixed:2",
        "--comm",
        "ring-ll-sys",
        "--requests",
        "30",
        "--seeds",
        "2",
    ),
    "compare": ("compare", SEED, SEED),
    "schema": ("schema",),
}
QUIET_ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM", "COLUMNS")}


def run(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "specmodel", *arguments],
        cwd=ROOT,
        env={**QUIET_ENVIRONMENT, "PYTHONIOENCODING": "utf-8", "OPENBLAS_NUM_THREADS": "1", **environment},
        input=stdin,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )


cached = functools.cache(run)


class Inside:
    """What a command that ran in this process returned and wrote: the same code, without the time to start it."""

    def __init__(self, *arguments: str, stdin: str = "", columns: int = 80) -> None:
        streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(streams[0]):
            patch.chdir(ROOT)
            patch.setenv("COLUMNS", str(columns))
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
            with contextlib.redirect_stderr(streams[1]):
                try:
                    self.returncode = main(arguments)
                except SystemExit as end:
                    self.returncode = int(end.code or 0)
        for stream in streams:
            stream.flush()
        self.stdout, self.stderr = (stream.buffer.getvalue().decode() for stream in streams)  # type: ignore[attr-defined]


def document(*arguments: str) -> dict[str, Any]:
    done = cached(*arguments)
    assert done.stderr == ""
    found: dict[str, Any] = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_an_answer_is_on_stdout_alone_and_plain_when_piped(command: str) -> None:
    done = cached(*ARGUMENTS[command])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\n")
    assert not done.stdout.endswith("\n\n")
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "schema"])
def test_json_is_one_versioned_object(command: str) -> None:
    found = document(*ARGUMENTS[command], "--json")
    assert found["schema"].startswith("specmodel.")
    assert found["schema"].endswith("/1")


def test_the_last_line_is_the_recommendation_with_its_interval() -> None:
    last = cached(*ARGUMENTS["optimize"]).stdout.splitlines()[-1]
    best = document(*ARGUMENTS["optimize"], "--json")["optima"][0]["best"]
    low, high = best["tok_s_interval"]
    assert last.startswith("Recommendation: 2 steps (3 draft tokens) with ring-ll-sys: ")
    assert f"{best['tok_s']:.1f} tok/s" in last
    assert f"{low:.1f} to {high:.1f}" in last


@pytest.mark.parametrize("command", cli.COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_begins_with_examples_and_ends_with_exit_codes(command: str, flag: str) -> None:
    done = Inside(command, flag)
    assert done.returncode == 0
    assert done.stdout.startswith(f"examples:\n  specmodel {command}")
    assert done.stdout.index("examples:") < done.stdout.index("usage:") < done.stdout.index("exit codes:")


def test_help_of_the_whole() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("examples:\n")
    assert all(f"\n  {command} " in done.stdout for command in COMMANDS)
    for code in ("0", "1", "2", "3"):
        assert f"\n  {code}  " in done.stdout


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_exit_codes_name_only_options_that_are_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "-h"])
    options, codes = capsys.readouterr().out.split("exit codes:")
    assert all(name in options for name in re.findall(r"--\w+", codes))


def test_no_arguments_show_how_to_begin_and_are_a_usage_error() -> None:
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("examples:\n")


@pytest.mark.parametrize("arguments", [("--version",), ("optimize", "--version"), ("--version", "fit")])
def test_version(arguments: tuple[str, ...]) -> None:
    import specmodel

    done = Inside(*arguments)
    assert (done.returncode, done.stdout) == (0, f"specmodel {specmodel.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("optimise", SEED), "did you mean `optimize`?"),
        (("--nonsense",), "--nonsense"),
        (("optimize",), "CALIB"),
        (("optimize", SEED, "--bacth", "1"), "did you mean `--batch`?"),
        (("optimize", SEED, "--json=1"), "--json"),
        (("optimize", SEED, "extra"), "extra"),
        (("optimize", SEED, "--comm", "nvls"), "use one of: default, ring-ll-sys"),
        (("optimize", SEED, "--workload", "chat"), "workload 'chat'"),
        (("optimize", SEED, "--objective", "goodput"), "--max-tpot-ms"),
        (("optimize", SEED, "--max-tpot-ms", "0.1"), "no configuration keeps"),
        (("optimize", SEED, "--plot", "nowhere/figure.svg"), "no directory"),
        (("optimize", SEED, "--plot", "figure.gif"), ".png, .svg, .pdf"),
        (("predict", SEED, "--steps", "5-2"), "--steps"),
        (("validate", "-", "-"), "standard input"),
        (("compare", "-", "-"), "standard input"),
        (("validate", "calibrations/measured/h200_moe_128x8_tables.yaml"), "no cycles to check"),
        (("validate", SEED, "--tolerance", "-1"), "--tolerance"),
        (("schema", "--example", "--samples"), "not allowed with"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(arguments: tuple[str, ...], said: str) -> None:
    done = Inside(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["optimize", "predict", "fit", "validate"])
def test_a_malformed_file_exits_3_with_every_fault(command: str) -> None:
    text = "schema: specmodel.calibration/1\nname: x\nmeasurements:\n  cycles:\n    - {num_step: 1, tok_s: -2}\n"
    done = Inside(command, "-", stdin=text)
    assert (done.returncode, done.stdout) == (3, "")
    assert "<stdin>: measurements.cycles[0]" in done.stderr
    assert "num_steps" in done.stderr
    assert "tok_s" in done.stderr


@pytest.mark.parametrize("name", ["no such file.yaml", "calibrations", "LICENSE"])
def test_what_is_no_calibration_exits_3(name: str) -> None:
    done = Inside("optimize", name)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith(f"{name}: ")


def test_a_file_without_cycles_cannot_be_what_was_measured() -> None:
    done = Inside("validate", SEED, "calibrations/measured/h200_moe_128x8_tables.yaml")
    assert (done.returncode, done.stdout) == (3, "")
    assert "cycles" in done.stderr


def test_stdin_is_read_for_a_dash() -> None:
    text = (ROOT / SEED).read_text(encoding="utf-8")
    done = run("optimize", "-", "--json", stdin=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == document("optimize", SEED, "--json")


def test_the_starter_file_is_answered() -> None:
    example = Inside("schema", "--example").stdout
    done = Inside("optimize", "-", stdin=example)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("Recommendation: ")


def test_the_schemas_are_json_schemas() -> None:
    for arguments in (("schema",), ("schema", "--samples")):
        found = json.loads(Inside(*arguments).stdout)
        assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"


def test_exit_codes_of_processes() -> None:
    assert run("optimise", SEED).returncode == 2
    assert run("optimize", SEED, "--comm", "nvls").returncode == 2
    assert run("optimize", "no such file.yaml").returncode == 3


def test_global_options_stand_before_or_after_the_command() -> None:
    expected = Inside("fit", SEED, "--json").stdout
    assert Inside("--quiet", "fit", "--json", SEED, "--no-color").stdout == expected
    assert Inside("fit", "-q", SEED, "--json").stdout == expected


def decline(cycles: str) -> str:
    return f"{{schema: specmodel.calibration/1, name: x, measurements: {{cycles: [{cycles}]}}}}"


IMPOSSIBLE = (
    # one speculative row, 5 times as fast as plain decoding with 2.4 tokens a cycle
    "{num_steps: 0, tok_s: 100}, {num_steps: 3, tok_s: 500, acceptance_length: 2.4}",
    # several: then it is plain decoding that is doubted, and the speculative rows cannot be right either
    "{num_steps: 0, tok_s: 100}, {num_steps: 2, tok_s: 480, acceptance_length: 2.1},"
    "{num_steps: 3, tok_s: 500, acceptance_length: 2.4}",
    # more tokens than a cycle can emit
    "{num_steps: 0, tok_s: 100}, {num_steps: 2, tok_s: 300, acceptance_length: 4.5}",
)


@pytest.mark.parametrize("cycles", IMPOSSIBLE)
def test_a_best_that_rests_on_an_impossible_row_is_declined(cycles: str) -> None:
    done = Inside("optimize", "-", "--extrapolate", stdin=decline(cycles))
    assert (done.returncode, done.stderr) == (1, "")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("No recommendation: ")
    assert "cannot be: measurements.cycles[" in last
    done = Inside("optimize", "-", "--json", stdin=decline(cycles))
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    assert found["optima"][0]["best"]["num_steps"] > 0
    assert any("not recommended" in text for text in found["warnings"])


def test_an_impossible_row_beside_good_ones_is_a_warning() -> None:
    good = ", ".join(f"{{num_steps: {k}, tok_s: {100 * s}}}" for k, s in ((0, 1.0), (1, 1.3), (2, 1.5), (4, 1.2)))
    done = Inside("optimize", "-", stdin=decline(f"{good}, {{num_steps: 6, tok_s: 80, acceptance_length: 7.5}}"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "measurements.cycles[4]" in done.stdout


def test_an_extrapolated_best_is_declined_unless_it_is_asked_for() -> None:
    text = decline("{num_steps: 0, tok_s: 100}, {num_steps: 2, tok_s: 260, acceptance_length: 2.95}")
    done = Inside("optimize", "-", "--max-steps", "12", stdin=text)
    assert (done.returncode, done.stderr) == (1, "")
    last = done.stdout.splitlines()[-1]
    assert last.startswith("No recommendation: ")
    assert "--extrapolate" in last
    done = Inside("optimize", "-", "--max-steps", "12", "--json", stdin=text)
    assert done.returncode == 1
    assert json.loads(done.stdout)["optima"][0]["best"]["extrapolated"]
    done = Inside("optimize", "-", "--max-steps", "12", "--extrapolate", stdin=text)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("Recommendation: ")


def test_predictions_that_are_all_extrapolated_exit_1_unless_they_are_asked_for() -> None:
    assert Inside("predict", SEED, "--steps", "40").returncode == 1
    assert Inside("predict", SEED, "--steps", "40", "--extrapolate").returncode == 0
    assert Inside("predict", SEED, "--steps", "2,40").returncode == 0
    assert "! extrapolated" in Inside("predict", SEED, "--steps", "40").stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    line = f"{sys.executable} -m specmodel {' '.join(ARGUMENTS['optimize'])} | head -c 1"
    done = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (len(done.stdout), done.stderr) == (1, "")


WRITERS = [
    ("schema",),
    ("--help",),
    ("optimize", SEED),
    ("fit", SEED, "--json"),
    ("ingest", LOG, "-q"),
    ("measure", "--dry-run", "--model", "Llama-3.1-8B", "--steps", "0"),
]
"""One command of each room that answers on standard output."""


@pytest.mark.parametrize("arguments", WRITERS, ids=" ".join)
def test_a_reader_that_was_never_there_is_no_error(arguments: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "specmodel", *arguments]
    gone = subprocess.run(command, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert gone.returncode == 141
    assert "Traceback" not in gone.stderr


@pytest.mark.parametrize("arguments", WRITERS, ids=" ".join)
def test_a_full_disk_is_said_in_one_line(arguments: tuple[str, ...]) -> None:
    if not os.path.exists("/dev/full"):
        pytest.fail("this machine has no /dev/full to write to")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "specmodel", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "cannot be written" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_it_quietly() -> None:
    arguments = [sys.executable, "-m", "specmodel", "optimize", "-"]
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(1.5)  # by then it waits for its input
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, b"", b"")


def on_terminal(arguments: tuple[str, ...], **environment: str) -> str:
    """What a process writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "specmodel", *arguments],
        cwd=ROOT,
        env={**QUIET_ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=subprocess.DEVNULL,
    )
    os.close(follower)
    parts = []
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # a terminal whose other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(leader)
    assert process.wait(timeout=60) == 0
    return b"".join(parts).decode("utf-8")


def test_colour_is_for_terminals_that_want_it() -> None:
    assert "\x1b[1m" in on_terminal(("fit", SEED))
    assert "\x1b" not in on_terminal(("fit", SEED), NO_COLOR="1")
    assert "\x1b" not in on_terminal(("fit", SEED, "--no-color"), TERM="dumb")


@pytest.mark.parametrize(
    ("environment", "no_color", "terminal", "colour"),
    [
        ({}, False, True, True),
        ({"NO_COLOR": ""}, False, True, True),  # empty is as good as absent (no-color.org)
        ({"NO_COLOR": "0"}, False, True, False),
        ({"TERM": "dumb"}, False, True, False),
        ({}, True, True, False),
        ({"FORCE_COLOR": "1"}, False, False, False),
    ],
)
def test_when_a_page_has_colour(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], no_color: bool, terminal: bool, colour: bool
) -> None:
    for name in ("NO_COLOR", "TERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(stream, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    assert page(argparse.Namespace(no_color=no_color)).colour == colour


def test_an_output_that_cannot_show_unicode_gets_ascii() -> None:
    done = run("optimize", SEED, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert re.search(r"\|-+\*-*\|", done.stdout)
    assert "●" in cached("optimize", SEED).stdout


def test_names_that_an_output_cannot_show_or_a_terminal_would_obey_are_escaped() -> None:
    name = "caf\u00e9 \u202e reversed"
    text = decline(f"{{num_steps: 0, tok_s: 100}}, {{num_steps: 2, tok_s: 130, workload: '{name}'}}")
    done = Inside("fit", "-", stdin=text)
    assert done.returncode == 0
    assert "\u202e" not in done.stdout
    assert "caf\u00e9 \\u202e reversed" in done.stdout
    done = run("fit", "-", stdin=text, PYTHONIOENCODING="ascii:strict", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120])
@pytest.mark.parametrize("command", ["optimize", "predict", "fit", "validate", "compare"])
def test_screens_keep_to_the_width_of_the_terminal(command: str, columns: int) -> None:
    lines = Inside(*ARGUMENTS[command], columns=columns).stdout.splitlines()
    # The last line is never broken, and neither is a word, such as the name of a file.
    assert not [line for line in lines[:-1] if len(line) > columns and len(line.split()) > 2]


def test_an_unexpected_error_is_a_traceback_and_exit_1() -> None:
    program = (
        "import sys, specmodel.cli, specmodel.commands.schema as schema\n"
        "schema.run = lambda args: 1 / 0\n"
        "sys.exit(specmodel.cli.main(['schema']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


def test_help_imports_nothing_heavy() -> None:
    for arguments in (["--help"], ["optimize", "--help"], ["predict", "-h"], ["validate", "-h"]):
        program = (
            "import contextlib, io, sys, specmodel.cli\n"
            "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
            f"    specmodel.cli.main({arguments!r})\n"
            "print(*(name for name in sys.modules if '.' not in name))\n"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
        heavy = {"numpy", "scipy", "pydantic", "pydantic_core", "ruamel", "rich", "matplotlib", "sympy", "dataclasses"}
        assert not heavy & set(done.stdout.split())


def test_a_decision_needs_no_optimiser_no_statistics_and_no_plotting() -> None:
    program = (
        f"import sys, specmodel.cli\nspecmodel.cli.main(['optimize', {SEED!r}, '--json'])\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"scipy.stats", "scipy.optimize", "sympy", "matplotlib", "rich"} & set(done.stderr.split())


@pytest.mark.parametrize("file", sorted((ROOT / "tests/data/engines").iterdir()), ids=lambda file: file.name)
def test_what_an_engine_printed_is_sent_to_ingest(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", str(file)]) == 3
    assert "`specmodel ingest` makes a calibration" in capsys.readouterr().err
