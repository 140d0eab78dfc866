"""Suppositions as text: what is read, and what is refused in one clear sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmodel.changes import TARGETS, Axis, Change, changes_of, checked_change, parse_axis, parse_change
from specmodel.errors import UsageError


@pytest.mark.parametrize(
    ("text", "target", "operator", "value"),
    [
        ("verify*=0.73", "verify", "*=", 0.73),
        ("verify=25", "verify", "=", 25.0),
        ("verify = 25 ms", "verify", "=", 25.0),
        ("verify+=2ms", "verify", "+=", 2.0),
        ("verify_ms=25", "verify", "=", 25.0),
        ("draft=0", "draft", "=", 0.0),
        ("acceptance+=0.1", "acceptance", "+=", 0.1),
        ("acceptance=90%", "acceptance", "=", 0.9),
        ("acceptance*=110%", "acceptance", "*=", 1.1),
        ("acceptance-length=2.5", "acceptance_length", "=", 2.5),
        ("acceptance length += .2", "acceptance_length", "+=", 0.2),
        ("bandwidth*=2", "bandwidth", "*=", 2.0),
        ("bandwidth*=2x", "bandwidth", "*=", 2.0),
        ("BATCH=32", "batch", "=", 32.0),
        ("context=8192", "context_tokens", "=", 8192.0),
        ("num_steps-=1", "num_steps", "-=", 1.0),
        ("comm=ring-ll-sys", "comm", "=", "ring-ll-sys"),
    ],
)
def test_a_change_is_read(text: str, target: str, operator: str, value: float | str) -> None:
    assert parse_change(text) == Change(target=target, operator=operator, value=value)


def test_a_share_of_what_is_changed() -> None:
    change = parse_change("verify-=27%")
    assert change.relative
    assert change.of(20.0) == pytest.approx(14.6)
    assert str(change) == "verify-=27%"


@pytest.mark.parametrize(
    ("operator", "expected"), [("=", 3.0), ("*=", 30.0), ("/=", 10.0 / 3.0), ("+=", 13.0), ("-=", 7.0)]
)
def test_operators(operator: str, expected: float) -> None:
    assert Change(target="verify", operator=operator, value=3.0).of(10.0) == pytest.approx(expected)


HOSTILE = {
    "": "must be TARGET=VALUE",
    "verify": "must be TARGET=VALUE",
    "verify*": "must be TARGET=VALUE",
    "=3": "must be TARGET=VALUE",
    "verify=": "must be TARGET=VALUE",
    "verify==25": "must be a number of ms",
    "verify=fast": "must be a number of ms, got 'fast'",
    "verify=nan": "must be a number",
    "verify*=inf": "must be a number",
    "verify=1e400": "must be a number",
    "verify=1_000": "must be a number",
    "verify=-3": "must be 0 ms or more",
    "verify=1e300": "between 0 and ",
    "verify*=-1": "0 or more",
    "verify/=0": "above 0",
    "verify=73%": "% of what? Write verify*=0.73",
    "verifi*=0.7": "did you mean `verify`?",
    "steps=3": "did you mean `num_steps`?",
    "tau=2": "did you mean `acceptance_length`?",
    "temperature=0.7": "allowed are: verify (ms), draft (ms)",
    "acceptance=1.5": "for 1.5 tokens a cycle write acceptance_length=1.5",
    "acceptance=90": "for 90 % write acceptance=0.9",
    "acceptance=-0.1": "between 0 and 1",
    "acceptance+=10%": "write acceptance+=0.1 for that many points, or acceptance*=1.1",
    "acceptance_length=0.8": "for a probability write acceptance=0.8",
    "acceptance+=7": "at most 1",
    "bandwidth=2": "changed by *= or /= only",
    "bandwidth*=0": "above 0",
    "bandwidth+=1": "only, such as bandwidth*=2",
    "comm*=2": "changed by = only, such as comm=NAME",
    "batch=0": "between 1 and 1,000,000",
    "batch=1e12": "between 1 and 1,000,000",
    "num_steps=2.5": "whole number",
    "num_steps=-1": "between 0 and 256",
    "num_steps*=2": "only, such as num_steps=2",
    "verify*=1e9": "at most 1,000,000",
}


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_no_change_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_change(text)
    assert HOSTILE[text] in str(error.value)
    assert "\n" not in str(error.value)


@given(st.text(max_size=30))
def test_any_text_is_a_change_or_a_usage_error(text: str) -> None:
    for read in (parse_change, parse_axis):
        try:
            read(text)
        except UsageError:
            continue


@given(
    st.sampled_from(sorted(set(TARGETS) - {"comm"})),
    st.sampled_from(["=", "*=", "/=", "+=", "-="]),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_a_checked_change_reads_back_from_its_own_text(target: str, operator: str, value: float) -> None:
    try:
        change = checked_change(Change(target=target, operator=operator, value=value))
    except UsageError:
        return
    again = parse_change(str(change))
    assert (again.target, again.operator) == (change.target, change.operator)
    assert float(again.value) == pytest.approx(float(change.value), rel=1e-9, abs=1e-300)


def test_what_is_no_change_from_python_is_refused() -> None:
    for bad in (
        3,
        None,
        Change(target="cycle", operator="=", value=1.0),
        Change(target="comm", operator="=", value=1.0),
    ):
        with pytest.raises(UsageError):
            changes_of([bad])
    with pytest.raises(UsageError, match="batch is set twice"):
        changes_of(["batch=2", "batch=4"])
    assert changes_of("draft=0") == changes_of(["draft=0"]) == (parse_change("draft=0"),)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("acceptance+=-0.1:0.2:0.05", (-0.1, -0.05, 0.0, 0.05, 0.1, 0.15, 0.2)),
        ("batch=1,2,4", (1.0, 2.0, 4.0)),
        ("num_steps=0:4", (0.0, 1.0, 2.0, 3.0, 4.0)),
        ("verify*=50%,100%", (0.5, 1.0)),
        ("draft=2:2:1", (2.0,)),
    ],
)
def test_an_axis_is_read(text: str, values: tuple[float, ...]) -> None:
    axis = parse_axis(text)
    assert axis.values == pytest.approx(values)
    assert axis.change(values[0]).target == axis.target


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("verify*=1:0:0.1", "last value must not be below the first"),
        ("verify*=0:1:0", "the step above 0"),
        ("verify*=0:1:-0.1", "the step above 0"),
        ("verify*=0:1:1e-9", "more than 101 values"),
        ("verify*=0:1:0.1:3", "a range is FIRST:LAST:STEP"),
        ("verify*=a:b", "must be a number"),
        ("batch=1,2,2", "given twice"),
        ("batch=1,,2", "must be a number"),
        ("batch=0:4", "between 1 and"),
        ("comm=a,b", "comm is a name"),
        ("acceptance=0:2:0.5", "between 0 and 1"),
        ("bandwidth=1,2", "only"),
    ],
)
def test_what_is_no_axis_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_axis(text)
    assert message in str(error.value)


def test_an_axis_names_itself() -> None:
    assert Axis(target="batch", operator="=", values=(1.0,)).name == "batch"
    assert Axis(target="verify", operator="*=", values=(1.0,)).name == "verify *="
