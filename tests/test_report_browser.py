"""The report in a real browser: its sliders, its looks, its keys, its silence on the network.

Skipped where no Chromium is installed (`apt-get install chromium`), which says so.
"""

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import specmodel as sm
from specmodel.report import change, factor, interval, rate

ROOT = Path(__file__).parents[1]


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cases = loaded("report_cases")
browsers = loaded("report_browser")

pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[test]'")
if browsers.chromium() is None:
    pytest.skip("no Chromium is installed: apt-get install chromium, or SPECMODEL_CHROMIUM", allow_module_level=True)

PAGES = ("seed", "hostile")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browsers.launched() as running:
        yield running


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    out = {name: folder / f"{name}.html" for name in PAGES}
    for name, path in out.items():
        path.write_text(cases.page(name), encoding="utf-8")
    return out


class Shown:
    """A page that is open, everything it said on the console and everything it asked the network for."""

    def __init__(self, browser: Any, file: Path, **options: Any) -> None:
        options.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())

    def text(self, name: str) -> str:
        return str(self.page.locator(f"#{name}").inner_text()).replace("\xa0", " ")

    def __enter__(self) -> "Shown":
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def moved(shown: Shown, name: str, steps: int) -> None:
    """Move a slider by the keyboard."""
    shown.page.locator(f"#slider-{name}").focus()
    for _ in range(abs(steps)):
        shown.page.keyboard.press("ArrowRight" if steps > 0 else "ArrowLeft")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_and_asks_for_nothing(browser: Any, files: dict[str, Path], name: str) -> None:
    with Shown(browser, files[name]) as shown:
        moved(shown, "acceptance", 2)
        moved(shown, "batch", 1)
        shown.page.wait_for_timeout(100)
        assert shown.said == []
        assert shown.asked == [files[name].as_uri()]
        assert shown.page.evaluate("window.pwned") is None


def test_even_what_got_into_the_page_would_not_run(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["seed"]) as shown:
        shown.page.evaluate(
            """() => {
                document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='window.pwned=1'>");
                const script = document.createElement("script");
                script.textContent = "window.pwned = 2";
                document.body.append(script);
            }"""
        )
        shown.page.wait_for_timeout(100)
        assert shown.page.evaluate("window.pwned") is None


SLIDERS = [
    ({"acceptance": 2}, ["acceptance+=0.1"]),
    ({"verify": -3}, ["verify*=0.7"]),
    ({"draft": -3}, ["draft=0"]),
    ({"acceptance": -1, "verify": 1, "draft": 2}, ["acceptance-=0.05", "verify*=1.1", "draft*=2"]),
    ({"batch": 1, "acceptance": 4}, ["batch", "acceptance+=0.2"]),
]


@pytest.mark.parametrize("name", PAGES)
def test_sliders_show_what_the_model_says(browser: Any, files: dict[str, Path], name: str) -> None:
    model = getattr(cases, name)()
    with Shown(browser, files[name]) as shown:
        grid = json.loads(shown.page.locator("#report-data").text_content())["whatif"]
        batches, first = grid["batch"], grid["start"][0]
        for moves, changes in SLIDERS:
            shown.page.locator("#reset").press("Enter")
            for slider, steps in moves.items():
                moved(shown, slider, steps)
            batch = batches[first + moves.get("batch", 0)]
            asked = [c for c in changes if c != "batch"]
            after = sm.whatif(model, asked, batch=batch, comm=grid["comm"]).after
            before = sm.optimize(model, batch=batch, comm=grid["comm"]).best
            named = shown.text("whatif-steps")
            rows = shown.page.locator("#whatif-rows tr")
            for i, shape in enumerate(grid["shapes"]):
                c = next(c for c in after.table if [c.num_steps, c.topk, c.num_draft_tokens] == shape)
                # Four digits are kept; the last of those that are shown may round the other way.
                value = float(rows.nth(i).locator("td").last.inner_text().replace(",", ""))
                assert value == pytest.approx(c.tok_s, rel=1e-3, abs=0.06)
            c = next(c for c in after.table if cases_name(c) == named)
            if c.extrapolated:
                assert shown.text("whatif-speedup") == "not known"
                assert "no recommendation" in shown.text("whatif-note")
                continue
            assert shown.text("whatif-rate") in {f"{rate(c.tok_s * (1 + d))} tok/s" for d in (0.0, 6e-4, -6e-4)}
            speedup = c.speedup
            assert shown.text("whatif-speedup") in {factor(speedup * (1 + d)) for d in (0.0, 6e-4, -6e-4)}
            gain = c.tok_s / before.tok_s - 1.0
            assert shown.text("whatif-gain") in {change(gain + d).replace("\xa0", " ") for d in (0.0, 6e-4, -6e-4)}
            assert re.fullmatch(r"90 % interval \S+ to \S+", shown.text("whatif-rate-detail"))


def cases_name(c: Any) -> str:
    from specmodel.words import name_of

    return name_of(c)


def test_sliders_say_where_they_stand(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["seed"]) as shown:
        slider = shown.page.locator("#slider-acceptance")
        moved(shown, "acceptance", 2)
        assert shown.text("value-acceptance") == "+0.10"
        assert slider.get_attribute("aria-valuetext") == "+0.10"
        shown.page.keyboard.press("Home")
        assert shown.text("value-acceptance") == "\u22120.20"
        moved(shown, "draft", -3)
        assert shown.text("value-draft") == "free"
        shown.page.locator("#reset").click()
        assert shown.text("value-acceptance") == shown.text("value-draft") == "as it is"
        assert shown.text("whatif-gain") == "+0.0 %"


def test_a_batch_that_was_not_measured_is_said_to_be_none(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["seed"]) as shown:
        moved(shown, "batch", 1)
        assert "not measured" in shown.text("value-batch")
        assert "was not measured" in shown.text("whatif-note")


@pytest.mark.parametrize("name", PAGES)
def test_every_control_has_a_name_and_is_reached_by_the_keyboard(
    browser: Any, files: dict[str, Path], name: str
) -> None:
    with Shown(browser, files[name]) as shown:
        tree = shown.context.new_cdp_session(shown.page).send("Accessibility.getFullAXTree")["nodes"]
        roles = {"slider", "button", "link", "radio", "DisclosureTriangle"}
        controls = [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree
            if not node.get("ignored") and node.get("role", {}).get("value") in roles
        ]
        assert sum(role == "slider" for role, _ in controls) == 4
        assert all(said.strip() for _, said in controls), controls
        # One radio button of a group takes the focus; its arrows reach the others.
        wanted = shown.page.evaluate(
            """() => [...document.querySelectorAll("a[href], button, input, summary, pre")]
                .filter((e) => e.offsetParent && !e.disabled && !(e.type === "radio" && !e.checked)).length"""
        )
        reached = set()
        for _ in range(wanted + 3):
            shown.page.keyboard.press("Tab")
            reached.add(
                shown.page.evaluate(
                    """() => document.activeElement === document.body ? -1
                        : [...document.querySelectorAll("*")].indexOf(document.activeElement)"""
                )
            )
        assert len(reached - {-1}) == wanted
        # Whatever has the focus shows it.
        shown.page.locator("#slider-verify").focus()
        shown.page.keyboard.press("Tab")
        style = shown.page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"


def test_the_batch_that_is_shown_is_chosen_by_keyboard(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["hostile"]) as shown:
        seen = shown.page.locator(".panel:visible")
        assert [seen.nth(i).get_attribute("data-batch") for i in range(seen.count())] == ["1", "1"]
        shown.page.locator(".picker input:checked").focus()
        shown.page.keyboard.press("ArrowRight")
        assert [seen.nth(i).get_attribute("data-batch") for i in range(seen.count())] == ["4", "4"]


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_window(browser: Any, files: dict[str, Path], name: str) -> None:
    with Shown(browser, files[name], viewport={"width": 360, "height": 800}) as shown:
        open_all(shown)
        for width in (320, 360, 768, 1280):
            shown.page.set_viewport_size({"width": width, "height": 800})
            assert shown.page.evaluate("document.documentElement.scrollWidth") <= width
            assert shown.page.evaluate(BEYOND, width) == []


BEYOND = """(width) => [...document.querySelectorAll("body *")]
  .filter((e) => !e.closest("svg") && e.getClientRects().length)
  .filter((e) => e.getBoundingClientRect().right > width + 1)
  .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`)"""

# Of every text that is drawn: its colour on what is behind it, as WCAG 2 measures contrast.
CONTRASTS = """() => {
  const parse = (text) => {
    const n = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith("color(srgb") ? 255 : 1;
    return [n[0] * scale, n[1] * scale, n[2] * scale, n[3] ?? 1];
  };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3]));
  const light = (c) => {
    const [r, g, b] = c.map((x) => x / 255).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) {
      if (e instanceof SVGElement) continue;
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] > 0) layers.push(c);
      if (c[3] === 1) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255]);
  };
  const out = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !e.getClientRects().length || e.closest("script, style, title")) continue;
    const style = getComputedStyle(e);
    if (style.visibility === "hidden") continue;
    const behind = ground(e);
    const front = over(parse(e instanceof SVGElement ? style.fill : style.color), behind);
    const [a, b] = [light(front), light(behind)].sort((x, y) => y - x);
    out.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
  }
  return out;
}"""


def open_all(shown: Shown) -> None:
    shown.page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")


@pytest.mark.parametrize("name", PAGES)
def test_every_text_stands_out(browser: Any, files: dict[str, Path], name: str) -> None:
    with Shown(browser, files[name]) as shown:
        open_all(shown)
        for media, scheme in product(("screen", "print"), ("light", "dark")):
            shown.page.emulate_media(media=media, color_scheme=scheme)
            found = shown.page.evaluate(CONTRASTS)
            assert len(found) > 200
            assert [x for x in found if x[0] < 4.5] == [], f"{media}, {scheme}"


def test_the_measure_of_contrast_sees_what_is_pale(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["seed"]) as shown:
        shown.page.evaluate("document.querySelector('h1').style.color = 'rgb(150, 150, 150)'")
        assert min(shown.page.evaluate(CONTRASTS))[0] == pytest.approx(2.9, abs=0.2)


def test_dark_is_dark_and_paper_is_white(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["seed"], color_scheme="dark") as shown:
        ground = "getComputedStyle(document.body).backgroundColor"
        dark = [int(x) for x in re.findall(r"\d+", shown.page.evaluate(ground))]
        assert max(dark[:3]) < 40
        shown.page.emulate_media(media="print", color_scheme="dark")
        assert shown.page.evaluate(ground) == "rgb(255, 255, 255)"
        assert not shown.page.locator("#slider-verify").is_visible()
        assert not shown.page.locator(".download").is_visible()
        assert shown.page.locator("#launch-line").is_visible()
        paper = shown.page.pdf(format="A4")
        assert paper.startswith(b"%PDF")
        assert shown.page.evaluate("[...document.querySelectorAll('details')].every((d) => d.open)")


def test_the_numbers_can_be_taken_along(browser: Any, files: dict[str, Path], tmp_path: Path) -> None:
    with Shown(browser, files["hostile"], accept_downloads=True) as shown:
        with shown.page.expect_download() as waiting:
            shown.page.locator("#download").press("Enter")
        taken = waiting.value
        assert taken.suggested_filename == "planted-report.json"
        taken.save_as(tmp_path / "taken.json")
        document = json.loads((tmp_path / "taken.json").read_text(encoding="utf-8"))
        assert document["schema"] == "specmodel.report/1"
        best = sm.optimize(cases.hostile(), batch=1).best
        assert document["answer"]["optima"][0]["best"]["tok_s"] == best.tok_s
        assert shown.said == []


def test_the_launch_line_can_be_copied(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["seed"], permissions=["clipboard-read", "clipboard-write"]) as shown:
        shown.page.get_by_role("button", name="Copy").press("Enter")
        shown.page.get_by_text("Copied").wait_for()
        copied = shown.page.evaluate("navigator.clipboard.readText()")
        assert copied == shown.page.locator("#launch-line").text_content()
        assert "--speculative-num-steps 2" in copied


SELECTED = """(what) => {
  getSelection().selectAllChildren(document.querySelector(what));
  return `${getSelection()}`;
}"""


def test_numbers_can_be_selected(browser: Any, files: dict[str, Path]) -> None:
    best = sm.optimize(cases.seed()).best
    with Shown(browser, files["seed"]) as shown:
        selected = shown.page.evaluate(SELECTED, "#numbers table")
        assert rate(best.tok_s) in selected
        assert interval(best.tok_s_interval) in selected
        assert f"2 steps, {rate(best.tok_s)}" in shown.page.evaluate(SELECTED, "svg.plot")


def test_without_scripts_everything_but_the_sliders_is_there(browser: Any, files: dict[str, Path]) -> None:
    with Shown(browser, files["hostile"], java_script_enabled=False) as shown:
        assert shown.page.locator(".panel:visible").count() == 6
        assert shown.page.get_by_text("The sliders need JavaScript").is_visible()
        assert not shown.page.locator(".copy").is_visible()
        assert not shown.page.locator("#download").is_visible()
