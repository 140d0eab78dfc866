"""`specmodel whatif` as a newcomer uses it: what it prints, its JSON, figures, exit codes, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specmodel.cli import main

ROOT = Path(__file__).parents[1]
SEED = str(ROOT / "calibrations/seed/kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml")
FIELD = ROOT / "calibrations/field"
FILES = (
    "ik_llama_2156_qwen36_35b_a3b_cpu_moe",
    "specforge_339_qwen3_30b_a3b_h100x2",
    "vllm_44697_mtp_pp4_pcie",
    "qwen38mtp_3090_mtp",
    "lmsys_dsv3_mtp_mi300x8",
    "llamacpp_3649_v100",
)
CANDIDATE = {"num_steps", "tok_s", "tok_s_interval", "comm", "speedup", "measured", "extrapolated"}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code and what was written to standard output and standard error."""
    try:
        code = main(["whatif", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert found["schema"] == "specmodel.whatif/1"
    return found


def test_the_last_line_says_where_its_gain_is_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    for change, bound in (("bandwidth*=2", "at most +"), ("bandwidth/=2", "at worst -"), ("draft=0", "")):
        _, out, _ = run(capsys, SEED, "--set", change)
        last = out.splitlines()[-1]
        assert bound in last
        assert bool(bound) == ("at most" in last or "at worst" in last)


def test_the_json_of_a_supposition(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, SEED, "--set", "draft=0", "--set", "verify-=10%", "--explain")
    assert [c["text"] for c in found["changes"]] == ["draft=0", "verify-=10%"]
    assert found["changes"][1] | {"text": ""} == {
        "target": "verify",
        "operator": "-=",
        "value": 0.1,
        "relative": True,
        "text": "",
    }
    for side in ("before", "after"):
        assert {"batch", "context_tokens", "plain_tok_s", "best", "table"} == set(found[side])
        assert set(found[side]["best"]) >= CANDIDATE
        assert found[side]["best"] in found[side]["table"]
    low, high = found["gain"]["interval"]
    assert low <= found["gain"]["speedup"] <= high
    assert found["gain"]["speedup"] == pytest.approx(found["after"]["best"]["tok_s"] / found["before"]["best"]["tok_s"])
    assert set(found["kept"]) == {"candidate", "gain"}
    assert found["recommended"] is True
    assert {"name", "title", "text", "latex", "value", "note"} == set(found["explanation"][0])


def test_the_json_of_a_sweep(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, SEED, "--sweep", "acceptance+=0,0.1", "--sweep", "num_steps=1,2,3")
    assert [a["values"] for a in found["sweep"]["axes"]] == [[0.0, 0.1], [1.0, 2.0, 3.0]]
    assert [c["values"] for c in found["sweep"]["cells"]][:4] == [[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.1, 1.0]]
    assert all(c["best"]["num_steps"] == c["values"][1] for c in found["sweep"]["cells"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "changes",
    [
        ("--set", "draft=0"),
        ("--set", "acceptance+=0.1", "--set", "verify*=0.8", "--explain"),
        ("--set", "batch*=4", "--set", "bandwidth*=2"),
        ("--sweep", "acceptance=0.3:0.9:0.3", "--sweep", "verify*=0.5,1"),
    ],
    ids=" ".join,
)
def test_field_files(capsys: pytest.CaptureFixture[str], name: str, changes: tuple[str, ...]) -> None:
    code, out, err = run(capsys, str(FIELD / f"{name}.yaml"), *changes)
    assert err == ""
    lines = out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert not re.search(r"\b(nan|inf)\b", out)
    assert code == (1 if "no recommendation" in lines[-1] else 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "nothing is changed: give --set CHANGE or --sweep AXIS"),
        (("--set", "verify"), "must be TARGET=VALUE"),
        (("--set", "verfy*=2"), "did you mean `verify`?"),
        (("--set", "draft=fast"), "must be a number of ms"),
        (("--set", "comm=tree"), "use one of: default, ring-ll-sys"),
        (("--set", "verify=0", "--set", "draft=0", "--set", "overhead=0"), "nothing would be left of a cycle"),
        (("--set", "draft=0", "--batch", "1,2"), "for several batches write --sweep batch=1,8,32"),
        (("--set", "num_steps=400"), "between 0 and 256"),
        (("--sweep", "draft*=0:1:0.0001"), "take a larger step"),
        (("--sweep", "draft*=0,1", "--sweep", "draft*=0,1"), "both axes change draft"),
        (("--sweep", "draft*=0,1", "--explain"), "--explain is of one supposition"),
        (("--set", "\x1b[31m=1"), "must be TARGET=VALUE"),
        (("--set", "draft=0", "--plot", "a.gif"), "must end in .png, .svg, .pdf"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(capsys, SEED, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "\x1b" not in err
    assert "Traceback" not in err


def test_far_points_are_declined_unless_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, SEED, "--set", "batch=64")
    assert code == 1
    assert out.splitlines()[-1].startswith("What if batch=64: no recommendation")
    code, out, _ = run(capsys, SEED, "--set", "batch=64", "--extrapolate")
    assert code == 0
    assert "supposed, not measured" in out.splitlines()[-1]
    code, out, _ = run(capsys, SEED, "--set", "batch=64", "--json")
    assert code == 1
    assert json.loads(out)["recommended"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        ("--set", "draft=0"),
        ("--sweep", "acceptance+=-0.1,0,0.1"),
        ("--sweep", "acceptance+=-0.1,0,0.1", "--sweep", "verify*=0.5,1,1.5"),
        ("--sweep", "verify*=0.5", "--sweep", "draft*=1"),
    ],
    ids=" ".join,
)
def test_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...]) -> None:
    file = tmp_path / "figure.svg"
    code, out, err = run(capsys, SEED, *arguments, "--plot", str(file))
    assert (code, err) == (0, "")
    assert f"wrote {file}" in " ".join(out.split())
    first = file.read_bytes()
    assert b"kimi-k2.5" in first
    run(capsys, SEED, *arguments, "--plot", str(file))
    assert file.read_bytes() == first


def test_the_map_draws_the_break_even() -> None:
    from matplotlib.figure import Figure

    import specmodel as sm
    from specmodel.whatif_plot import draw_map, draw_sweep, draw_whatif

    model = sm.fit(sm.load(SEED))
    result = sm.sweep(model, ["acceptance+=-0.1,0,0.1", "verify*=0.5,1,1.5"])
    artists = draw_map(Figure().subplots(), result)
    assert artists["even"] is not None
    assert artists["image"].get_array().shape == (3, 3)
    assert {t.get_text() for t in artists["labels"]} >= {"plain", "K=2"}
    line = draw_sweep(Figure().subplots(), sm.sweep(model, "acceptance+=0,0.1,0.2"))
    assert list(line["best"].get_xdata()) == [0.0, 0.1, 0.2]
    both = draw_whatif(Figure().subplots(), sm.whatif(model, "draft=0"))
    assert both["after"].get_ydata()[2] > both["before"].get_ydata()[2]
