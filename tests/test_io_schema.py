"""The JSON Schema: valid, committed as the code states it, and of use to an editor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from specmodel import io
from specmodel.fields import LEAST_NUMBER, MOST_NUMBER

COMMITTED = Path(__file__).resolve().parents[1] / "docs" / "schema" / "calibration-1.json"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return io.json_schema()


def test_the_committed_schema_is_current(schema: dict[str, Any]) -> None:
    assert COMMITTED.read_text(encoding="utf-8") == json.dumps(schema, indent=2) + "\n"


def test_it_is_a_schema_of_draft_2020_12(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema)


def test_every_key_is_described_and_closed(schema: dict[str, Any]) -> None:
    sections = [schema, *schema["$defs"].values()]
    assert len(sections) == 15
    for section in sections:
        assert section["additionalProperties"] is False
        assert section["description"]
        for key, described in section["properties"].items():
            assert described["description"], key
            assert described.get("default", ...) is not None, key


def test_choices_and_ranges_are_for_the_editor(schema: dict[str, Any]) -> None:
    row = schema["$defs"]["CycleRow"]["properties"]
    assert row["graph_scope"]["enum"] == ["step", "cycle"]
    assert row["tok_s"]["exclusiveMinimum"] == LEAST_NUMBER
    assert row["tok_s"]["maximum"] == MOST_NUMBER
    assert row["batch"]["minimum"] == 1
    assert schema["properties"]["schema"]["const"] == "specmodel.calibration/1"
    assert schema["properties"]["name"]["pattern"]
    assert schema["required"] == ["schema", "name"]
    assert "eagle3" in schema["$defs"]["ModelShape"]["properties"]["method"]["enum"]


def test_the_example_is_valid_commented_and_names_the_schema(schema: dict[str, Any], tmp_path: Path) -> None:
    text = io.example()
    assert text.startswith("# yaml-language-server: $schema=")
    assert text.count("#") > 15
    (tmp_path / "example.yaml").write_text(text, encoding="utf-8")
    jsonschema.Draft202012Validator(schema).validate(io.read_document(tmp_path / "example.yaml"))
    calibration = io.load(tmp_path / "example.yaml")
    measured = calibration.measurements
    assert measured.cycles
    assert measured.verify
    assert measured.draft
    assert calibration.acceptance
    assert calibration.evidence
    assert calibration.validation.cycles


def test_the_schema_is_not_shared_between_calls(schema: dict[str, Any]) -> None:
    other = io.json_schema()
    other["$defs"]["CycleRow"]["properties"].clear()
    assert io.json_schema() == schema
