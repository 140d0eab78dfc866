"""The screens, word for word; their numbers within what linear algebra differs by from one machine to another.

A screen that was changed on purpose is written anew by ``python tests/golden/screens.py``.
"""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

GOLDEN = Path(__file__).parent / "golden"


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"golden_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


screens = loaded(GOLDEN / "screens.py")

NUMBER = re.compile(r"(?<![\w.])[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")


def words(screen: str) -> tuple[list[str], list[tuple[str, bool]]]:
    """The text of a screen without its numbers and the length of its bars; and the numbers, with what follows each."""
    screen = screen.replace("<1 %", "0 %").replace(">99 %", "100 %")
    lines = [re.sub(r"[├─┤┊◂▸|:<>-]+", " ", line) for line in screen.splitlines()]
    text = " ".join(" ".join(lines).split())
    numbers = [(m.group().replace(",", ""), text[m.end() :].startswith(" %")) for m in NUMBER.finditer(text)]
    return NUMBER.split(text), numbers


def close(kept: str, now: str, percent: bool) -> bool:
    last_digit = 10.0 ** -len(kept.partition(".")[2])
    allowed = max(0.02 * abs(float(kept)), 1.5 * last_digit, 3.0 if percent else 0.0)
    return abs(float(kept) - float(now)) <= allowed


@pytest.mark.parametrize("name", screens.SCREENS)
def test_screen(name: str) -> None:
    kept, now = screens.path_of(name).read_text(encoding="utf-8"), screens.taken(name)
    (kept_words, kept_numbers), (now_words, now_numbers) = words(kept), words(now)
    remedy = "if that is meant, run `python tests/golden/screens.py` and read the difference"
    assert now_words == kept_words, remedy
    pairs = zip(kept_numbers, now_numbers, strict=True)
    far = [f"{old} -> {new}" for (old, percent), (new, _) in pairs if not close(old, new, percent)]
    assert not far, remedy


def test_no_screen_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(screens.SCREENS)


def test_the_comparison_sees_words_and_numbers() -> None:
    kept = screens.path_of("optimize").read_text(encoding="utf-8")
    last = kept.splitlines()[-1]
    tok_s = re.search(r"([0-9.]+) tok/s", last)
    assert tok_s is not None
    other = words(kept.replace(tok_s.group(), "104.9 tok/s"))[1]
    assert not all(close(a, b, p) for (a, p), (b, _) in zip(words(kept)[1], other, strict=True))
    assert words(kept.replace("Recommendation", "Recommend"))[0] != words(kept)[0]
    # A bar that is one cell longer is the same screen.
    assert words(kept.replace("├──", "├───")) == words(kept)
