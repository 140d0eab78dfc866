"""Arithmetic on the rows of a file: known answers of published reports, and of invented ones, worked out by hand."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.consistency import consistency_of, flags_of
from specmodel.diagnosis import FLAGS
from specmodel.expectations import as_document, expectations_of, facts_of, plain_of

CASES = runpy.run_path(str(Path(__file__).with_name("known_answers.py")))
HEAD, INVENTED = CASES["HEAD"], CASES["INVENTED"]
REPORTS = sorted((Path(__file__).parent / "data" / "reports").glob("*.yaml"))


def selected(document: dict[str, list[dict[str, Any]]], quantity: str, select: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a quantity whose setting has all that is selected."""
    items = document.get(quantity, [])
    return [i for i in items if all(k in i["select"] and i["select"][k] == v for k, v in select.items())]


def check(cal: sm.Calibration, expected: dict[str, Any]) -> None:
    document = json.loads(json.dumps(as_document(expectations_of(cal)), allow_nan=False))
    assert set(flags_of(consistency_of(cal))) == set(expected["flags"])
    for quantity, items in expected.items():
        if quantity == "flags":
            continue
        if not items:
            assert quantity not in document
        for item in items:
            found = selected(document, quantity, item["select"])
            assert found, (quantity, item["select"])
            # Of groups the first is the coarsest: that of just the rows that are selected.
            for got in found[:1] if quantity == "best_measured" else found:
                agrees(got, item)


def agrees(got: dict[str, Any], item: dict[str, Any]) -> None:
    tolerance = item.get("relative_tolerance", 0.002)
    for key, value in item.items():
        if key in ("select", "relative_tolerance"):
            continue
        if isinstance(value, dict):
            assert got[key] == {**got[key], **value}
        elif isinstance(value, bool):
            assert got[key] is value
        elif isinstance(value, list):
            assert got[key] == value
        else:
            assert got[key] == pytest.approx(value, rel=tolerance)


@pytest.mark.parametrize("path", REPORTS, ids=lambda p: p.stem)
def test_published_reports(path: Path) -> None:
    expected = json.loads(path.with_name(f"{path.stem}.expect.json").read_text(encoding="utf-8"))
    check(sm.load(path), expected)


def test_every_published_report_is_here() -> None:
    assert len(REPORTS) == 12


@pytest.mark.parametrize("name", INVENTED)
def test_invented_reports(name: str) -> None:
    body, expected = INVENTED[name]
    check(sm.loads(HEAD + body), expected)


def test_every_quantity_and_flag_is_expected_somewhere() -> None:
    expected = [e for _, e in INVENTED.values()]
    quantities = {q for e in expected for q, items in e.items() if items and q != "flags"}
    assert len(quantities) == 8
    assert {flag for e in expected for flag in e["flags"]} == set(FLAGS)


rates = st.floats(5.0, 5000.0)


@given(plain=rates, speed=rates, steps=st.integers(1, 15), share=st.floats(0.0, 1.0), batch=st.integers(1, 256))
def test_a_cycle_in_plain_steps_is_the_break_even(
    plain: float, speed: float, steps: int, share: float, batch: int
) -> None:
    length = 1.0 + share * steps
    cycles = [
        {"num_steps": 0, "batch": batch, "tok_s": plain},
        {"num_steps": steps, "batch": batch, "tok_s": speed, "acceptance_length": length},
    ]
    cal = sm.from_dict({"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": cycles}})
    document = as_document(expectations_of(cal))
    (item,) = document["cycle_plain_steps"]
    assert item["value"] * speed / plain == pytest.approx(length)
    (beats,) = document["beats_plain"]
    assert beats["value"] is (speed > plain)
    # Time in other units changes nothing.
    for row in cycles:
        row["tok_s"] *= 7.0  # type: ignore[operator]
    other = as_document(
        expectations_of(
            sm.from_dict({"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": cycles}})
        )
    )
    assert other["cycle_plain_steps"][0]["value"] == pytest.approx(item["value"])
    assert other["best_measured"] == document["best_measured"]


@given(steps=st.integers(1, 9), share=st.floats(0.05, 1.0), speed=rates, batch=st.integers(1, 64))
def test_forms_of_a_speed_say_the_same(steps: int, share: float, speed: float, batch: int) -> None:
    length = 1.0 + share * steps
    forms = {"tok_s": speed, "tpot_ms": 1000.0 * batch / speed, "cycle_ms": 1000.0 * batch * length / speed}
    answers = []
    for form, value in forms.items():
        row = {"num_steps": steps, "batch": batch, form: value, "acceptance_length": length}
        plain = {"num_steps": 0, "batch": batch, "tok_s": 100.0}
        cal = sm.from_dict({"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": [plain, row]}})
        fact = facts_of(cal)[1]
        assert fact.rate == pytest.approx(speed)
        assert plain_of(facts_of(cal), fact) == (100.0, 100.0)
        answers.append(next(e.value for e in expectations_of(cal) if e.quantity == "cycle_plain_steps"))
    assert answers == pytest.approx([answers[0]] * 3)
