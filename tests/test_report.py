"""Screens as data: numbers in words, what fits a width, bars in their place, nothing that a terminal would obey."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmodel.report import (
    GLYPHS,
    Bar,
    Column,
    Entries,
    Grid,
    Page,
    Screen,
    Verbatim,
    axis_of,
    chance,
    change,
    draw,
    factor,
    interval,
    milliseconds,
    printable,
    rate,
    render,
    spans,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rate(94.155), "94.2"),
        (rate(9.994), "9.99"),
        (rate(9.996), "10.0"),
        (rate(999.9), "999.9"),
        (rate(999.96), "1,000"),
        (rate(1234567.0), "1,234,567"),
        (interval((91.63, 1200.0)), "91.6 to 1,200"),
        (milliseconds(0.0), "0.00"),
        (milliseconds(0.01234), "0.0123"),
        (milliseconds(17.461), "17.46"),
        (milliseconds(123.45), "123.5"),
        (chance(0.0), "0\xa0%"),
        (chance(0.0004), "<1\xa0%"),
        (chance(0.614), "61\xa0%"),
        (chance(0.9996), ">99\xa0%"),
        (chance(1.0), "100\xa0%"),
        (change(0.0584), "+5.8\xa0%"),
        (change(-0.5), "-50.0\xa0%"),
        (change(25.0), "+2,500\xa0%"),
        (factor(1.058), "1.06x"),
        (factor(15.57), "15.6x"),
        (factor(1e6), ">100x"),
        (spans([3]), "3"),
        (spans([1, 2]), "1, 2"),
        (spans([10, 3, 4, 5, 1, 5]), "1, 3 to 5, 10"),
        (spans([]), ""),
        (spans([1.5, 2.5]), "1.5, 2.5"),
    ],
)
def test_numbers(text: str, expected: str) -> None:
    assert text == expected


@given(st.text())
def test_nothing_reaches_the_terminal_that_it_would_obey(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


BARS = [Bar(value=90.0, low=80.0, high=100.0, measured=True), Bar(value=70.0, low=60.0, high=75.0, measured=False)]


def test_bars_stand_where_their_values_are() -> None:
    axis = axis_of(BARS, "tok/s", 80.0)
    assert (axis.low, axis.high) == (60.0, 100.0)
    assert draw(BARS[0], axis, 41) == " " * 20 + "├" + "─" * 9 + "●" + "─" * 9 + "┤"
    assert draw(BARS[1], axis, 41) == "├" + "─" * 9 + "○" + "─" * 4 + "┤" + " " * 4 + "┊" + " " * 20


def test_a_very_wide_interval_is_cut_with_an_arrow() -> None:
    wide = Bar(value=90.0, low=1.0, high=9000.0, measured=False)
    axis = axis_of([*BARS, wide], "tok/s")
    assert (axis.low, axis.high) == (35.0, 135.0)
    drawn = draw(wide, axis, 30)
    assert (drawn[0], drawn[-1]) == ("◂", "▸")


def test_an_axis_of_one_value_has_a_width() -> None:
    same = Bar(value=5.0, low=5.0, high=5.0, measured=True)
    axis = axis_of([same], "tok/s", 5.0)
    assert axis.low < 5.0 < axis.high
    assert draw(same, axis, 21)[10] == "●"


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(0, 1e6), st.floats(0, 1e6)), min_size=1, max_size=5),
    st.integers(20, 60),
)
def test_every_bar_is_as_long_as_the_plot(values: list[tuple[float, float, float]], width: int) -> None:
    bars = [Bar(value=v, low=max(v - a, 0.0), high=v + b, measured=True) for v, a, b in values]
    axis = axis_of(bars, "tok/s")
    for bar in bars:
        drawn = draw(bar, axis, width)
        assert len(drawn) == width
        assert drawn.count("●") == 1


def grid() -> Grid:
    columns = [
        Column(heading="steps", cells=["0", "1"]),
        Column(heading="name", cells=["a", "long name"], left=True, priority=1),
        Column(heading="more", cells=["x" * 30, "y"], priority=2),
    ]
    return Grid(columns=columns, marks=[">", " "], bars=BARS, axis=axis_of(BARS, "tok/s"), strong=frozenset([0]))


@pytest.mark.parametrize(
    ("width", "headings"), [(8, ["steps"]), (20, ["steps", "name"]), (34, ["steps"]), (44, ["steps", "name"])]
)
def test_columns_and_plot_go_in_the_order_of_their_priority(width: int, headings: list[str]) -> None:
    lines = render(Screen(blocks=[grid()]), Page(width=width)).splitlines()
    assert [word for word in lines[0].split() if word in ("steps", "name", "more")] == headings
    assert ("●" in lines[1]) == (width > 30)
    assert all(len(line) <= width for line in lines)


@pytest.mark.parametrize("width", range(40, 121, 10))
def test_text_is_wrapped_and_the_last_line_is_not(width: int) -> None:
    text = "words of several lengths " * 20
    screen = Screen(blocks=[text, Entries(items=[("label", text), ("label", text)]), grid()], last=text.strip())
    lines = render(screen, Page(width=width)).splitlines()
    assert all(len(line) <= width for line in lines[:-1])
    assert lines[-1] == text.strip()
    assert sum(line.startswith("label") for line in lines) == 1


def test_a_number_is_not_parted_from_its_unit() -> None:
    for width in range(40, 60):
        lines = render(Screen(blocks=[f"about {chance(0.5)} " * 20]), Page(width=width)).splitlines()
        assert not any(line.startswith("%") for line in lines)


def test_what_is_to_be_copied_is_left_as_it_is() -> None:
    line = "command " + "x" * 200
    assert line in render(Screen(blocks=[Verbatim(lines=[line])]), Page(width=40)).splitlines()


def test_colour_and_unicode_only_where_the_page_has_them() -> None:
    screen = Screen(blocks=[grid()], last="the end")
    plain = render(screen, Page())
    assert "\x1b" not in plain
    coloured = render(screen, Page(colour=True))
    assert coloured.splitlines()[1].startswith("\x1b[1m>")
    assert coloured.endswith("\x1b[1mthe end\x1b[0m\n")
    bare = coloured.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert bare == plain
    assert render(screen, Page(unicode=False)).isascii()
    assert set(GLYPHS) & set(plain)
