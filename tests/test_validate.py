"""Validation: verdicts by kind, what is compared with what, leave-one-out without a leak, honest sums."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.calibration import CycleRow
from specmodel.errors import UsageError
from specmodel.validate import ValidationReport, cross_validate, validate


def calibration(**more: Any) -> sm.Calibration:
    document: dict[str, Any] = {
        "schema": "specmodel.calibration/1",
        "name": "x",
        "measurements": {
            "cycles": [
                {"num_steps": 0, "tok_s": 100.0},
                {"num_steps": 1, "tok_s": 135.0, "acceptance_length": 1.7},
                {"num_steps": 3, "tok_s": 160.0, "acceptance_length": 2.4},
                {"num_steps": 5, "tok_s": 150.0, "acceptance_length": 2.7},
            ]
        },
    }
    document["measurements"] |= more.pop("measurements", {})
    found: sm.Calibration = sm.from_dict({**document, **more})
    return found


MODEL = sm.fit(calibration())


def row(**fields: Any) -> CycleRow:
    return CycleRow(**{"num_steps": 3, "acceptance_length": 2.4, **fields})


def only(report: ValidationReport) -> Any:
    (found,) = report.rows
    return found


PREDICTED = float(MODEL.predict(3, acceptance_length=2.4).tok_s)


@pytest.mark.parametrize(
    ("fields", "verdict"),
    [
        ({"tok_s": PREDICTED}, "inside"),
        ({"tok_s": 0.5 * PREDICTED}, "slower"),
        ({"tok_s": 1.3 * PREDICTED}, "faster"),
        ({"tok_s": 300.0}, "impossible"),  # three times plain decoding with 2.4 tokens a cycle
        ({"tok_s": PREDICTED, "acceptance_length": 4.5}, "impossible"),  # more than num_steps + 1
        ({"tpot_ms": 1000.0 / PREDICTED}, "inside"),
        ({"tpot_ms": 2000.0 / PREDICTED}, "slower"),
        ({"cycle_ms": 2400.0 / PREDICTED}, "inside"),
        ({"cycle_ms": 4800.0 / PREDICTED}, "slower"),
        ({"cycle_ms": 1.0}, "impossible"),
        ({"range_tok_s": (0.5 * PREDICTED, PREDICTED)}, "inside"),  # it varied, and reached what is predicted
        ({"range_tok_s": (0.5 * PREDICTED, 0.6 * PREDICTED)}, "slower"),
        ({"range_cycle_ms": (2400.0 / PREDICTED, 9600.0 / PREDICTED)}, "inside"),
        ({"tok_s_at_most": 2.0 * PREDICTED}, "inside"),  # a bound that the prediction keeps
        ({"tok_s_at_most": 0.5 * PREDICTED}, "slower"),
    ],
)
def test_verdicts(fields: dict[str, Any], verdict: str) -> None:
    found = only(validate(MODEL, [row(**fields)]))
    assert found.verdict == verdict
    assert bool(found.reason) == (verdict == "impossible")


def test_a_row_without_acceptance_length_is_impossible_above_what_any_acceptance_allows() -> None:
    assert only(validate(MODEL, [row(tok_s=390.0, acceptance_length=None)])).verdict == "faster"
    found = only(validate(MODEL, [row(tok_s=410.0, acceptance_length=None)]))
    assert found.verdict == "impossible"
    assert "4 tokens" in found.reason


def test_speedups_are_over_the_plain_decoding_that_was_measured_with_them() -> None:
    slow_day = [row(num_steps=0, acceptance_length=None, tok_s=50.0), row(tok_s=130.0)]
    assert [r.verdict for r in validate(MODEL, slow_day).rows] == ["slower", "impossible"]
    fast_day = [row(num_steps=0, acceptance_length=None, tok_s=200.0), row(tok_s=300.0)]
    assert [r.verdict for r in validate(MODEL, fast_day).rows] == ["faster", "faster"]


def test_the_stated_acceptance_is_used_unless_it_is_to_be_predicted_too() -> None:
    measured = row(tok_s=120.0, acceptance_length=1.8)
    stated, fitted = (only(validate(MODEL, [measured], acceptance=kind)) for kind in ("stated", "fitted"))
    assert stated.predicted_tok_s == MODEL.predict(3, acceptance_length=1.8).tok_s
    assert fitted.predicted_tok_s == MODEL.predict(3).tok_s
    assert stated.fitted_tok_s == fitted.predicted_tok_s
    assert stated.tok_s_interval == MODEL.predict(3, acceptance_length=1.8).interval(0.9)


def test_a_cycle_time_is_compared_as_a_time() -> None:
    # Whatever the acceptance length, a cycle that takes as long as predicted is predicted without error.
    cycle_ms = float(MODEL.predict(3).cycle_ms)
    for length in (None, 1.5, 3.5):
        assert only(validate(MODEL, [row(cycle_ms=cycle_ms, acceptance_length=length)])).error == pytest.approx(0.0)


def test_what_the_model_does_not_predict_is_said() -> None:
    report = validate(MODEL, [row(num_steps=0, acceptance_length=None, speculation=True, tok_s=95.0)])
    assert report.rows == ()
    assert report.coverage is None
    assert len(report.skipped) == 1


def test_unknown_names_are_refused_only_where_they_matter() -> None:
    with pytest.raises(UsageError, match="comm 'ring'"):
        validate(MODEL, [row(tok_s=100.0, comm="ring")])
    with pytest.raises(UsageError, match="workload 'code'"):
        validate(MODEL, [row(tok_s=100.0, workload="code", acceptance_length=None)])
    # With its acceptance length a workload is known well enough, and plain decoding does not depend on it.
    rows = [row(tok_s=100.0, workload="code"), row(num_steps=0, tok_s=100.0, workload="code", acceptance_length=None)]
    assert len(validate(MODEL, rows).rows) == 2


def test_sums_leave_out_what_cannot_be() -> None:
    rows = [row(tok_s=PREDICTED), row(tok_s=0.5 * PREDICTED), row(tok_s=1000.0)]
    report = validate(MODEL, rows)
    assert report.coverage == 0.5
    assert report.errors == pytest.approx([0.0, 1.0])
    assert [r.row.tok_s for r in report.beyond(50.0)] == [0.5 * PREDICTED]
    assert report.beyond(200.0) == ()
    assert ValidationReport(rows=()).coverage is None


def test_a_bound_that_is_kept_is_no_error() -> None:
    report = validate(MODEL, [row(tok_s_at_most=2 * PREDICTED), row(tok_s_at_most=PREDICTED / 1.25)])
    assert report.errors == pytest.approx([0.0, 0.25])


def test_leave_one_out_predicts_from_the_rest_alone() -> None:
    cal = calibration()
    report = cross_validate(cal)
    cycles = cal.measurements.cycles
    assert [r.row for r in report.rows] == list(cycles)
    for i, found in enumerate(report.rows):
        rest = dataclasses.replace(cal.measurements, cycles=cycles[:i] + cycles[i + 1 :])
        model = sm.fit(dataclasses.replace(cal, measurements=rest))
        length = cycles[i].acceptance_length if cycles[i].num_steps else None
        p = model.predict(cycles[i].num_steps, acceptance_length=length)
        assert found.predicted_tok_s == p.tok_s
        assert found.tok_s_interval == p.interval(0.9)


@pytest.mark.parametrize(
    "repeat", [{"num_steps": 3, "tok_s": 161.0, "acceptance_length": 2.4}, {"num_steps": 3, "tok_s_at_most": 162.0}]
)
def test_repeats_and_bounds_of_a_setting_do_not_stand_in_for_it(repeat: dict[str, Any]) -> None:
    cal = calibration()
    more = dataclasses.replace(cal.measurements, cycles=(*cal.measurements.cycles, CycleRow(**repeat)))
    alone = {r.row: r.predicted_tok_s for r in cross_validate(cal).rows}
    with_repeat = {r.row: r.predicted_tok_s for r in cross_validate(dataclasses.replace(cal, measurements=more)).rows}
    three = cal.measurements.cycles[2]
    assert with_repeat[three] == pytest.approx(alone[three])
    assert len(with_repeat) == len(alone) + (repeat.get("tok_s") is not None)


def test_what_nothing_is_left_to_predict_from_is_said() -> None:
    single = calibration(measurements={"cycles": [{"num_steps": 0, "tok_s": 100.0}]})
    report = cross_validate(single)
    assert (report.rows, len(report.skipped)) == ((), 1)
    lone = {"num_steps": 3, "tok_s": 160.0, "workload": "code"}
    cycles = [{"num_steps": 0, "tok_s": 100.0}, {"num_steps": 2, "tok_s": 140.0, "workload": "chat"}, lone]
    report = cross_validate(calibration(measurements={"cycles": cycles}))
    assert len(report.rows) == 1
    assert all("workload" in text for text in report.skipped)


def test_only_so_many_settings_where_that_is_asked_for_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    report = cross_validate(calibration(), most_settings=2, progress=lambda done, total: told.append((done, total)))
    assert [r.row.num_steps for r in report.rows] == [0, 5]
    assert told == [(1, 2), (2, 2)]
    assert "2 of 4" in report.skipped[0]


def test_the_validation_section_is_checked_and_not_fitted() -> None:
    held = {"num_steps": 2, "tok_s": 155.0, "acceptance_length": 2.1}
    cal = calibration(validation={"cycles": [held]})
    found = only(validate(sm.fit(cal), cal.validation.cycles))
    assert found.predicted_tok_s == only(validate(MODEL, cal.validation.cycles)).predicted_tok_s


def test_intervals_cover_what_a_known_model_makes() -> None:
    # Cycles made from a plain pass of 10 ms, a verified token of 0.3 ms and a draft step of 1 ms, with 1 % noise.
    random = np.random.default_rng(7)
    inside, count = 0, 0
    for _ in range(20):
        rows = []
        for k in range(7):
            length = sum(0.7**i for i in range(k + 1))
            cycle_ms = (10.0 + 0.3 * k + 1.0 * k) * math.exp(0.01 * random.standard_normal())
            more = {"acceptance_length": length} if k else {}
            rows.append({"num_steps": k, "tok_s": 1000.0 * length / cycle_ms, **more})
        report = cross_validate(calibration(measurements={"cycles": rows}))
        inside += sum(r.verdict == "inside" for r in report.rows)
        count += len(report.rows)
    assert inside / count > 0.85


def test_names_of_functions_and_modules_do_not_hide_each_other() -> None:
    assert sm.cross_validate(calibration()).rows
    assert callable(sm.fit)
    assert callable(sm.validate)
