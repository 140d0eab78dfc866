"""Calibration files in and out: YAML or JSON, from a path, stdin, text or plain mappings.

A file is read once and validated once; every fault of it is reported at once, with file, key path, what is allowed,
what was found and the remedy. Files are written whole or not at all, and never what could not be read again.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
import re
from typing import Any, Literal

from specmodel import documents, form, schema, yaml_text
from specmodel.calibration import Calibration
from specmodel.errors import CalibrationError

__all__ = ["dump", "dumps", "example", "from_dict", "json_schema", "load", "loads", "read_document", "to_dict"]

_EXACT_AS_INTEGER = 10**15  # whole numbers up to here are written without a decimal point
_STATES_SCHEMA = re.compile(r"""(?:^|[{,])\s*["']?schema["']?\s*:""", re.MULTILINE)


def load(path: str | os.PathLike[str]) -> Calibration:
    """Read a calibration file, YAML or JSON.

    Parameters
    ----------
    path : path or str
        The file; ``-`` is stdin.

    Raises
    ------
    CalibrationError
        The file cannot be read or is malformed; the message lists every fault.
    """
    text, source = documents.read_text(path)
    return loads(text, source=source)


def loads(text: str, source: str = "<text>") -> Calibration:
    """Read a calibration from text, YAML or JSON; `source` is what messages call it by.

    Raises
    ------
    CalibrationError
        The text is malformed; the message lists every fault.
    """
    try:
        document, faults = documents.parse(text, source)
    except CalibrationError:
        if not text.strip() or _STATES_SCHEMA.search(text):
            raise
        # A log, counters or a benchmark's lines: where its syntax ends helps nobody.
        raise CalibrationError.single(source, "a calibration", "text that states no `schema`", form.BEGIN) from None
    return form.validate(document, source, faults)


def from_dict(document: dict[str, Any], source: str = "<dict>") -> Calibration:
    """Validate plain mappings and lists, as a JSON or YAML reader gives them; dates may be text or dates.

    Raises
    ------
    CalibrationError
        The mapping is malformed; the message lists every fault.
    """
    return form.validate(document, source)


def read_document(path: str | os.PathLike[str], *, max_bytes: int = documents.MAX_BYTES) -> Any:
    """Read any YAML or JSON document as plain mappings, lists and scalars; ``-`` is stdin.

    Raises
    ------
    CalibrationError
        The file cannot be read, is neither, or states a key twice.
    """
    text, source = documents.read_text(path, max_bytes=max_bytes)
    document, faults = documents.parse(text, source)
    if faults:
        raise CalibrationError.of(faults, source)
    return document


def to_dict(calibration: Calibration) -> dict[str, Any]:
    """Return a calibration as plain mappings, lists and scalars, without what is absent or at its default.

    `from_dict` gives back an equal calibration. Dates are ISO text; whole numbers have no decimal point.
    """
    out: dict[str, Any] = _plain(calibration)
    return out


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        out = {}
        for item in dataclasses.fields(value):
            inner = getattr(value, item.name)
            default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
            if inner != default:
                out[item.name] = _plain(inner)
        return out
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_AS_INTEGER:
        return int(value)
    return value


def dumps(calibration: Calibration, language: Literal["yaml", "json"] = "yaml") -> str:
    """Write a calibration as text that `loads` reads back to an equal one; every row of a table is one line.

    Raises
    ------
    CalibrationError
        A value that was set in Python is one that no file may hold, such as a time of zero.
    """
    document = to_dict(calibration)
    form.validate(document, calibration.name)
    return documents.to_json(document) if language == "json" else yaml_text.to_yaml(document)


def dump(calibration: Calibration, path: str | os.PathLike[str]) -> None:
    """Write a calibration file, whole or not at all: JSON where the name ends in ``.json``, else YAML.

    Raises
    ------
    CalibrationError
        As for `dumps`; nothing is written.
    OSError
        The file cannot be written; one that was there is untouched.
    """
    language: Literal["yaml", "json"] = "json" if os.fspath(path).lower().endswith(".json") else "yaml"
    documents.write_text(path, dumps(calibration, language))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the format, by which editors complete and check keys."""
    return schema.json_schema()


def example() -> str:
    """Return a commented starter file, in YAML."""
    return schema.EXAMPLE
