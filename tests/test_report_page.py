"""The report as text: what it says, what it refuses to say, and that nothing of a file can become more than text."""

import contextlib
import html
import importlib
import importlib.util
import io
import itertools
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel import report_page
from specmodel.cli import main
from specmodel.report import chance, interval, rate
from specmodel.report_page import gather, written
from specmodel.report_page.charts import Scale, scale_of, ticks
from specmodel.report_page.explorer import ACCEPTANCE, DRAFT, VERIFY
from specmodel.report_page.markdown import fenced, plain
from specmodel.report_page.markup import embedded_json, shown, tag
from specmodel.report_page.redact import MARK, without_secrets

ROOT = Path(__file__).parents[1]
FIELD = ROOT / "calibrations" / "field"
MEASURED = ROOT / "calibrations" / "measured"
MOST_BYTES = 1_500_000


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


cases = loaded(ROOT / "tests" / "report_cases.py")
PAGES = ("seed", "hostile")
VOID = {"br", "input", "link", "meta", "wbr"}


class Read(HTMLParser):
    """What a browser would see of a page: its elements with their attributes, and its text; it checks the nesting."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def visible(self) -> str:
        return " ".join(text for tag, text in self.texts if tag not in ("script", "style"))

    def attributes(self, name: str) -> list[str]:
        return [str(a[name]) for _, a in self.elements if name in a]


def document_in(page: str) -> dict[str, Any]:
    found = re.findall(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert len(found) == 1
    out: dict[str, Any] = json.loads(found[0], parse_constant=lambda word: pytest.fail(f"{word} in JSON"))
    return out


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_needs_nothing_else(name: str) -> None:
    page = cases.page(name)
    read = Read(page)
    assert page.startswith("<!doctype html>\n<html lang=")
    assert {t for t, _ in read.elements}.isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form", "use"})
    assert read.attributes("src") == []
    assert "@import" not in page
    assert "url(" not in page
    for target in read.attributes("href"):
        assert target == "#report-data" or re.match(r"https?://", target)
    policy = next(a["content"] for t, a in read.elements if t == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", PAGES)
def test_names_within_a_page_lead_somewhere(name: str) -> None:
    read = Read(cases.page(name))
    ids = read.attributes("id")
    assert len(set(ids)) == len(ids)
    wanted = [word for key in ("for", "aria-labelledby", "aria-describedby") for word in read.attributes(key)]
    assert {word for words in wanted for word in words.split()} <= set(ids)
    inputs = [a for t, a in read.elements if t == "input" and a["type"] == "range"]
    assert {a["id"] for a in inputs} <= set(read.attributes("for"))
    levels = [int(t[1]) for t, _ in read.elements if re.fullmatch("h[1-6]", t)]
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels)), "a level of headings is skipped"


def test_nothing_of_a_file_becomes_more_than_text() -> None:
    page = cases.page("hostile")
    read = Read(page)
    assert sum(t == "script" for t, _ in read.elements) == 2
    assert page.lower().count("</script") == 2
    assert not [key for _, a in read.elements for key in a if key.startswith("on")]
    assert not [x for x in read.attributes("href") if x.startswith("javascript")]
    assert "javascript:window.pwned=4" in read.visible
    assert read.visible.count(cases.EVIL) >= 10
    assert document_in(page)["description"] == cases.EVIL


@pytest.mark.parametrize("kind", ["html", "md"])
def test_secrets_stay_where_they_are(kind: Any) -> None:
    text = sm.report(cases.hostile(), kind=kind)
    assert cases.SECRET not in html.unescape(text)
    assert "HF_TOKEN" not in text
    assert f"key {MARK}" in html.unescape(text).replace("\\", "")


def test_markdown_of_a_file_stays_text() -> None:
    text = sm.report(cases.hostile(), kind="md")
    fence = re.compile(r"^(`{3,})[a-z]*\n.*?^\1$", re.MULTILINE | re.DOTALL)
    outside = fence.sub("", text)
    assert re.findall(r"(?<!\\)<(?!/?(?:details|summary)\b)(?=[a-zA-Z/!?])", outside) == []
    assert re.findall(r"(?<!\\)[\[\]`@]", outside) == []


def test_the_page_says_what_optimize_says() -> None:
    model = cases.seed()
    page = cases.page("seed")
    best = sm.optimize(model).best
    seen = Read(page).visible.replace("\xa0", " ")
    for words in (
        f"{rate(best.tok_s)} tok/s",
        interval(best.tok_s_interval),
        chance(best.probability_best).replace("\xa0", " "),
        "--speculative-num-steps 2",
        sm.diagnose(model).verdict[1:],
    ):
        assert words in seen
    document = document_in(page)
    assert document["schema"] == "specmodel.report/1"
    assert document["answer"]["optima"][0]["best"]["tok_s"] == best.tok_s
    assert document["diagnosis"]["verdict"] == sm.diagnose(model).verdict
    for c in sm.optimize(model).table:
        assert interval(c.tok_s_interval) in seen


def test_the_name_is_the_function_whatever_was_imported() -> None:
    module = importlib.import_module("specmodel.report")
    assert module.rate is rate
    assert sm.report is report_page.report


def test_the_same_model_gives_the_same_page() -> None:
    assert sm.report(cases.seed()) == cases.page("seed")


@pytest.mark.parametrize("name", PAGES)
def test_where_the_sliders_start_is_the_answer(name: str) -> None:
    model = getattr(cases, name)()
    grid = document_in(cases.page(name))["whatif"]
    batch = grid["batch"][grid["start"][0]]
    optimum = sm.optimize(model, batch=batch, comm=grid["comm"])
    best, values = position(grid, tuple(grid["start"]))
    assert grid["shapes"][best] == [optimum.best.num_steps, optimum.best.topk, optimum.best.num_draft_tokens]
    for shape, (tok_s, low, high) in zip(grid["shapes"], values, strict=True):
        c = next(c for c in optimum.table if [c.num_steps, c.topk, c.num_draft_tokens] == shape)
        assert (tok_s, low, high) == pytest.approx((c.tok_s, *c.tok_s_interval), rel=6e-4)


def position(grid: dict[str, Any], at: tuple[int, ...]) -> tuple[int, list[tuple[float, float, float]]]:
    """The best at one position of the sliders, and (tok/s, low, high) of every shape: as the page looks them up."""
    sizes = [len(grid[axis]) for axis in ("batch", "acceptance", "verify", "draft")]
    point = int(np.ravel_multi_index(at, sizes))
    count = len(grid["shapes"])
    part = slice(point * count, (point + 1) * count)
    return grid["best"][point], list(zip(grid["tok_s"][part], grid["low"][part], grid["high"][part], strict=True))


POSITIONS = [(0, 4, 5, 0), (0, 8, 5, 3), (0, 0, 0, 5), (1, 6, 2, 3), (-1, 5, 7, 1), (-1, 2, 4, 4)]


@pytest.mark.parametrize("name", PAGES)
def test_a_position_of_the_sliders_is_what_the_model_says(name: str) -> None:
    model = getattr(cases, name)()
    grid = document_in(cases.page(name))["whatif"]
    for b, a, v, d in POSITIONS:
        b %= len(grid["batch"])
        changes = [f"acceptance+={ACCEPTANCE[a]}", f"verify*={VERIFY[v]}", f"draft*={DRAFT[d]}"]
        after = sm.whatif(model, changes, batch=grid["batch"][b], comm=grid["comm"]).after
        best, values = position(grid, (b, a, v, d))
        rows = {(c.num_steps, c.topk, c.num_draft_tokens): c for c in after.table}
        for shape, (tok_s, low, high) in zip(grid["shapes"], values, strict=True):
            c = rows[tuple(shape)]
            assert tok_s == pytest.approx(c.tok_s, rel=6e-4)
            # Fewer draws stand behind the ends.
            for end, exact in zip((low, high), c.tok_s_interval, strict=True):
                assert abs(np.log(end / exact)) < 0.25 * abs(np.log(exact / c.tok_s)) + 0.002
        chosen = rows[tuple(grid["shapes"][best])]
        assert chosen.expected_regret <= after.best.expected_regret + 0.01


def test_what_is_declined_is_no_figure_to_remember(tmp_path: Path) -> None:
    rows = [{"num_steps": 0, "tok_s": 100.0}, {"num_steps": 0, "batch": 8, "tok_s": 640.0}]
    document = {"schema": "specmodel.calibration/1", "name": "plain", "measurements": {"cycles": rows}}
    model = sm.fit(sm.from_dict(document))
    content = gather(model)
    made = written(content)
    assert not made.recommended
    read = Read(made.text)
    seen, best = read.visible, sm.optimize(model).best
    assert "nothing yet" in seen
    assert "No recommendation" in seen
    figures = [text for tag, text in read.texts if tag == "dd"]
    assert f"{interval(best.tok_s_interval)} tok/s" in figures
    assert not [text for text in figures if rate(best.tok_s) in text]
    assert "Launch" not in seen
    assert "No recommendation" in written(content, "md").text


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"measurements": {"cycles": [{"num_steps": 3, "tok_s": 100.0, "acceptance_length": 2.0}]}},
        {"measurements": {"verify": [{"tokens": 4, "time_ms": 20.0}]}},
        {"measurements": {"draft": [{"num_steps": 3, "time_ms": 2.0}]}},
        {"acceptance": [{"num_steps": 1, "survival": [0.6]}]},
        {"measurements": {"cycles": [{"num_steps": 64, "tok_s": 100.0}, {"num_steps": 0, "batch": 2.5, "tok_s": 9.0}]}},
        {"measurements": {"cycles": [{"num_steps": 1, "tok_s": 500.0}, {"num_steps": 0, "tok_s": 1e-3}]}},
    ],
)
def test_a_poor_file_has_a_page_too(document: dict[str, Any]) -> None:
    model = sm.fit(sm.from_dict({"schema": "specmodel.calibration/1", "name": "poor", **document}))
    page = sm.report(model)
    Read(page)
    document_in(page)
    assert sm.report(model, kind="md").startswith("### poor\n")


PICKED = (
    FIELD / "sglang_22246_qwen3_235b.yaml",
    FIELD / "specforge_339_qwen3_30b_a3b_h100x2.yaml",
    FIELD / "specbundle_qwen3_235b_original.yaml",
    FIELD / "lmsys_dsv3_mtp_h200x16.yaml",
    FIELD / "vllm_44697_mtp_pp4_pcie.yaml",
    MEASURED / "h200-qwen3-30b-a3b.yaml",
    MEASURED / "h200x2-llama-3.3-70b-nccl.yaml",
    ROOT / cases.SEED,
)


@pytest.mark.slow
@pytest.mark.parametrize("path", PICKED, ids=lambda p: p.stem)
def test_pages_are_small(path: Path) -> None:
    """Trees, experts, many batches, tables alone: each within what a mail bears."""
    page = sm.report(sm.fit(sm.load(path)))
    Read(page)
    assert len(page.encode()) < MOST_BYTES


@pytest.mark.slow
def test_many_batches_and_settings_still_fit_into_a_mail() -> None:
    names = [f"setting-{i}" for i in range(6)]
    cycles = []
    for batch in range(1, 31):
        for i, comm in enumerate(names):
            for steps in (0, 2):
                tok_s = 100.0 * batch * (1.0 - 0.01 * i) * (1.0 + 0.2 * steps)
                length = {"acceptance_length": 2.0} if steps else {}
                cycles.append({"num_steps": steps, "batch": batch, "comm": comm, "tok_s": tok_s, **length})
    document = {"name": "large", "comm": {name: {} for name in names}, "measurements": {"cycles": cycles}}
    page = sm.report(sm.fit(sm.from_dict({"schema": "specmodel.calibration/1", **document})))
    Read(page)
    assert len(page.encode()) < MOST_BYTES
    assert len(document_in(page)["answer"]["optima"]) == 30
    assert document_in(page)["rows_left_out"] == 30 * 5 * 11


# ------------------------------------------------------------------------------------------------------ command line
def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def test_the_command_writes_a_file_and_says_what_is_in_it(tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    code, out, err = run("report", cases.SEED, "-o", str(target))
    assert (code, err) == (0, "")
    assert out.startswith(f"{target}: Recommendation: 2 steps")
    assert target.read_text(encoding="utf-8") == cases.page("seed")
    assert list(tmp_path.iterdir()) == [target]


def test_the_name_of_the_file_decides_what_is_written(tmp_path: Path) -> None:
    target = tmp_path / "report.md"
    assert run("report", cases.SEED, "-o", str(target))[0] == 0
    text = target.read_text(encoding="utf-8")
    assert text == sm.report(cases.seed(), kind="md")
    assert run("report", cases.SEED, "--format", "md") == (0, text, "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", "nowhere/report.html"), "no directory"),
        (("-o", "tests"), "is a directory"),
        (("--format", "pdf"), "invalid choice"),
        (("--batch", "1=0.5,4=0.5"), "each batch for itself"),
        (("--comm", "nvls"), "use one of: default, ring-ll-sys"),
        (("--workload", "chat"), "workload 'chat'"),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...], said: str) -> None:
    code, out, err = run("report", cases.SEED, *arguments)
    assert (code, out) == (2, "")
    assert said in err


def test_help_begins_with_examples() -> None:
    code, out, err = run("report", "-h")
    assert (code, err) == (0, "")
    assert out.startswith("examples:\n  specmodel report")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "report.html"
    target.write_text("before")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    code, out, err = run("report", cases.SEED, "-o", str(target))
    assert (code, out) == (2, "")
    assert "No space left" in err
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_declined_answer_exits_1_and_is_written(tmp_path: Path) -> None:
    calibration, target = tmp_path / "plain.yaml", tmp_path / "report.html"
    calibration.write_text(
        "schema: specmodel.calibration/1\nname: p\nmeasurements: {cycles: [{num_steps: 0, tok_s: 9}]}\n"
    )
    code, out, _ = run("report", str(calibration), "-o", str(target))
    assert code == 1
    assert "No recommendation" in out
    assert target.exists()


# ------------------------------------------------------------------------------------------------------------ pieces
@given(st.text())
def test_any_text_is_shown_as_it_is(value: str) -> None:
    read = Read(tag("p", value, title=value))
    assert "".join(text for _, text in read.texts) == shown(value)
    assert read.attributes("title") == [shown(value)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
@settings(max_examples=50)
def test_embedded_json_cannot_leave_its_element(value: Any) -> None:
    dumped = embedded_json({"x": value})
    assert not set(dumped) & set("<>&")
    json.loads(dumped, parse_constant=lambda word: pytest.fail(word))


@pytest.mark.parametrize("value", ["\x1b[2Jgone", "\u202egnorw", "a\x00b", "\ufeffx"])
def test_what_would_turn_or_hide_text_is_written_out(value: str) -> None:
    assert shown(value).isprintable()
    assert "\\" in shown(value)


@given(st.text(alphabet="ab`*_<>[]()|#~@&!\\\n:/", max_size=40))
def test_markdown_text_has_nothing_left_to_close(value: str) -> None:
    assert re.search(r"(?<!\\)(?:\\\\)*[`*_<>\[\]|#~@&!]", plain(value)) is None
    lines = fenced(value.split("\n"))
    assert lines[0] == lines[-1]
    assert not any(line.lstrip().startswith(lines[0]) for line in lines[1:-1])


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("--api-key abc123def", f"--api-key {MARK}"),
        ("--api-key \\\n  abc123def", f"--api-key \\\n  {MARK}"),
        ("API_KEY=hunter22", f"API_KEY={MARK}"),
        ("password: hunter2", f"password: {MARK}"),
        ("Authorization: Bearer abcd1234efgh", f"Authorization: Bearer {MARK}"),
        ("see https://joe:pw@host/x", "see https://host/x"),
        ("hf_abcdefghijklmnopqrstuv", MARK),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc", MARK),
    ],
)
def test_secrets_are_marked(value: str, kept: str) -> None:
    assert without_secrets(value) == kept


@pytest.mark.parametrize(
    "value",
    [
        "tokens: 6, batch: 1", "max_tokens=256", "acceptance of 5 tokens", "hf-internal-testing/tiny", "a basic idea",
        "https://github.com/sgl-project/sglang/pull/22246", "sk-learn models", "secrets stay where they are",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(value: str) -> None:
    assert without_secrets(value) == value


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_inside(low: float, width: float) -> None:
    found = ticks(low, low + width)
    assert len(found) <= 8
    slack = 1e-6 * max(abs(low), width)
    assert all(low - slack <= x <= low + width + slack for x in found)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=8), st.floats(0.0, 1e7))
def test_scales_hold_every_value(values: list[float], end: float) -> None:
    scale = scale_of(values, [end])
    assert scale.low < scale.high
    assert all(scale.low <= x <= scale.high for x in values)
    assert all(0.0 <= scale.percent(x) <= 100.0 for x in (*values, end))
    assert Scale(low=0.0, high=1.0).percent(2.0) == 100.0


def test_the_function_writes_for_the_engine_that_is_asked_for() -> None:
    model = sm.fit(sm.load(Path(__file__).parent.parent / "calibrations/seed/kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"))
    assert "vllm serve" in sm.report(model, kind="md", engine=("vllm", None))
    assert "vllm serve" not in sm.report(model, kind="md")
