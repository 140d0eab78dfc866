"""Calibration files in and out: YAML or JSON, from a path, stdin, text or plain mappings.

A file is read once and validated once; every fault of it is reported at once, with file, key path, what is allowed,
what was found and the remedy. Files are written whole or not at all.
"""

from __future__ import annotations

import os
from typing import Any

from specmodel import documents, schema
from specmodel.calibration import Calibration
from specmodel.errors import CalibrationError

__all__ = ["from_dict", "load", "loads", "read_document"]


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
    document = documents.parse(text, source)
    return schema.validate(document.value, source, document.faults())


def from_dict(document: dict[str, Any], source: str = "<dict>") -> Calibration:
    """The calibration that plain mappings and lists state, as a JSON or YAML reader gives them.

    Raises
    ------
    CalibrationError
        The mapping is malformed; the message lists every fault.
    """
    return schema.validate(document, source)


def read_document(path: str | os.PathLike[str], *, max_bytes: int = documents.MAX_BYTES) -> Any:
    """Read any YAML or JSON document as plain mappings, lists and scalars; ``-`` is stdin.

    Raises
    ------
    CalibrationError
        The file cannot be read, or is neither, or states a key twice.
    """
    text, source = documents.read_text(path, max_bytes=max_bytes)
    document = documents.parse(text, source)
    if faults := document.faults():
        raise CalibrationError.of(faults, source)
    return document.value
