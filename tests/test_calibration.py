"""The nouns of the file as Python objects: their rules hold however they are built."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from specmodel import calibration, schema
from specmodel.calibration import (
    SCHEMA,
    AcceptanceEntry,
    Calibration,
    CommSetting,
    CycleRow,
    DraftRow,
    Measurements,
    ModelShape,
    Validation,
    VerifyRow,
)
from specmodel.errors import CalibrationError, Fault, FormError, SpecModelError, UsageError, key_path, shown

SECTIONS = sorted(set(schema.SECTIONS.values()), key=lambda section: section.__name__)


@pytest.mark.parametrize(
    ("build", "arguments", "path"),
    [
        (CycleRow, {"num_steps": 1}, ""),
        (CycleRow, {"num_steps": 1, "tok_s": 3.0, "cycle_ms": 3.0}, ""),
        (CycleRow, {"num_steps": 3, "tok_s": 3.0, "num_draft_tokens": 3}, "num_draft_tokens"),
        (CycleRow, {"num_steps": 1, "tok_s": 3.0, "speculation": False}, "speculation"),
        (CycleRow, {"num_steps": 1, "range_tok_s": (4.0, 3.0)}, "range_tok_s"),
        (VerifyRow, {"tokens": 1}, ""),
        (VerifyRow, {"tokens": 1, "range_ms": (1.0, 2.0), "sd_ms": 0.1}, "sd_ms"),
        (DraftRow, {"num_steps": 1, "time_ms": 1.0, "topk": 2}, "num_draft_tokens"),
        (DraftRow, {"num_steps": 1, "time_ms": 1.0, "cuda_graph": False, "graph_scope": "step"}, "graph_scope"),
        (AcceptanceEntry, {"num_steps": 1, "survival": (0.5, 0.4)}, "survival"),
        (AcceptanceEntry, {"num_steps": 2, "survival": (0.5, 0.6)}, "survival[1]"),
        (AcceptanceEntry, {"num_steps": 2, "accepted_per_position": (3, 2)}, "drafts"),
        (AcceptanceEntry, {"num_steps": 2, "drafts": 2, "accepted_per_position": (3, 2)}, "accepted_per_position[0]"),
        (ModelShape, {"num_experts": 8, "experts_per_token": 9}, "experts_per_token"),
        (ModelShape, {"cuda_graph_sizes": (2, 1)}, "cuda_graph_sizes[1]"),
    ],
)
def test_rules_hold_when_built_in_python(build: Any, arguments: dict[str, Any], path: str) -> None:
    with pytest.raises(FormError, match=r"must be .*, got .*; ") as caught:
        build(**arguments)
    assert [fault.path for fault in caught.value.faults] == [path]


@pytest.mark.parametrize("section", ["measurements", "validation"])
def test_a_setting_must_be_listed(section: str) -> None:
    rows = (CycleRow(num_steps=1, tok_s=3.0), CycleRow(num_steps=1, tok_s=3.0, comm="rings"))
    held: dict[str, Any] = {section: (Measurements if section == "measurements" else Validation)(cycles=rows)}
    with pytest.raises(FormError, match=rf"{section}.cycles\[1\].comm: must be default or .*, or did you mean `ring`"):
        Calibration(schema=SCHEMA, name="x", comm={"ring": CommSetting()}, **held)
    assert Calibration(schema=SCHEMA, name="x", comm={"rings": CommSetting()}, **held).comm_names == (
        "default",
        "rings",
    )


def test_default_is_always_a_setting_and_comes_first() -> None:
    assert Calibration(schema=SCHEMA, name="x").comm_names == ("default",)
    listed = Calibration(
        schema=SCHEMA, name="x", comm={"b": CommSetting(), "default": CommSetting(), "a": CommSetting()}
    )
    assert listed.comm_names == ("default", "b", "a")


@pytest.mark.parametrize(
    ("row", "speculating", "verify_tokens"),
    [
        (CycleRow(num_steps=0, tok_s=1.0), False, 1),
        (CycleRow(num_steps=0, tok_s=1.0, speculation=True), True, 1),
        (CycleRow(num_steps=3, tok_s=1.0), True, 4),
        (CycleRow(num_steps=3, topk=4, num_draft_tokens=16, tok_s=1.0), True, 16),
    ],
)
def test_what_a_cycle_verifies(row: CycleRow, speculating: bool, verify_tokens: int) -> None:
    assert row.speculating is speculating
    assert row.verify_tokens == verify_tokens


def test_form_names_the_field_that_was_stated() -> None:
    assert CycleRow(num_steps=1, range_cycle_ms=(1.0, 2.0)).form == "range_cycle_ms"
    assert CycleRow(num_steps=1, tok_s_at_most=9.0).form == "tok_s_at_most"
    entry = AcceptanceEntry(num_steps=2, conditional=(0.4, 0.3))
    assert entry.form == "conditional"
    assert entry.verify_tokens == 3


def test_survival_may_rise_by_noise() -> None:
    AcceptanceEntry(num_steps=2, survival=(0.5, 0.52))
    AcceptanceEntry(num_steps=2, drafts=100, accepted_per_position=(50, 52))
    AcceptanceEntry(num_steps=2, conditional=(0.1, 0.9))


def test_data_are_frozen_slotted_and_by_keyword() -> None:
    for section in SECTIONS:
        assert section.__dataclass_params__.frozen
        assert all(item.kw_only for item in dataclasses.fields(section))
        assert "__slots__" in vars(section)
        assert section.__name__ in calibration.__all__


def test_every_dimensional_field_ends_in_its_unit() -> None:
    """A name that speaks of a time, a rate or a size says which unit; and no other unit of time exists."""
    dimensional = re.compile(r"(time|tpot|cycle|latency|throughput|sd_ms|range_ms)(?!s)")
    other_units = re.compile(r"(?<!tok)_(s|us|ns|sec|seconds|kb|mb|gb|kib|mib|gib)$")
    names = {item.name for section in SECTIONS for item in dataclasses.fields(section)}
    assert len(names) > 70
    for name in names - {"cycles", "graph_scope"}:
        assert not other_units.search(name), name
        if dimensional.search(name):
            assert name.endswith(("_ms", "_ms_at_most")), name
    assert {"tok_s", "tok_s_at_most", "range_tok_s", "sd_tok_s", "size_bytes", "activation_bytes"} < names


def test_every_key_has_a_meaning_and_no_meaning_is_idle() -> None:
    used = set()
    for section in SECTIONS:
        for item in dataclasses.fields(section):
            assert schema.meaning(section, item.name).endswith((".", "...")), item.name
            own = f"{section.__name__}.{item.name}"
            used.add(own if own in schema.MEANING else item.name)
    assert used == set(schema.MEANING)


def test_errors_are_one_family() -> None:
    assert issubclass(CalibrationError, SpecModelError)
    assert issubclass(UsageError, SpecModelError)
    assert issubclass(FormError, CalibrationError)
    assert str(CalibrationError("said plainly")) == "said plainly"
    assert CalibrationError("said plainly").faults == ()


def test_a_fault_is_one_line() -> None:
    fault = Fault(path="tok_s", must="> 0", got="-1", remedy="correct it")
    assert str(fault) == "tok_s: must be > 0, got -1; correct it"
    assert str(fault.under("measurements.cycles[3]")) == "measurements.cycles[3].tok_s: must be > 0, got -1; correct it"
    assert Fault(must="a", got="b", remedy="c").under("x").path == "x"
    assert str(CalibrationError.single("f.yaml", "a", "b", "c")) == "f.yaml: must be a, got b; c"


def test_key_path_and_shown() -> None:
    assert key_path(("a", 3, "b", "c d", 0)) == "a[3].b.'c d'[0]"
    assert [shown(value) for value in (None, True, 1.5, "a", [], {}, [1], {"a": 1}, (1, 2))] == [
        "null",
        "true",
        "1.5",
        "'a'",
        "an empty list",
        "an empty mapping",
        "a list of 1",
        "a mapping of 1 key",
        "a list of 2",
    ]
    assert shown(10**50) == "an integer of about 51 digits"
    assert shown("x" * 80) == repr("x" * 80)
    assert len(shown("x" * 81)) <= 80
