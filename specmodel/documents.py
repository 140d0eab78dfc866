"""Documents in and out: a file or stdin to plain mappings, lists and scalars; text to a file, whole or not at all.

JSON is told from YAML by how the text begins, then by the file's suffix. The calibration format is not known here.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from specmodel import yaml_text
from specmodel.errors import CalibrationError, Fault, key_path, shown
from specmodel.streams import DEVICE_REMEDY, is_device
from specmodel.yaml_text import DuplicateKey

MAX_BYTES = 64 * 2**20


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> tuple[str, str]:
    """Read a file, or stdin for ``-``; return its text and the name that messages call it by.

    Raises
    ------
    CalibrationError
        The file is missing, a directory, unreadable, too large, or not UTF-8 (a byte order mark is fine).
    """
    name = os.fspath(path)
    source = "<stdin>" if name == "-" else name
    try:
        if name == "-":
            data = _read(sys.stdin.buffer, max_bytes + 1)
        elif stat.S_ISDIR(os.stat(name).st_mode):
            raise CalibrationError.single(source, "a file", "a directory", "name a file in it")
        elif is_device(name):
            raise CalibrationError.single(source, "a file", "a device", DEVICE_REMEDY)
        else:
            with open(name, "rb") as stream:
                data = _read(stream, max_bytes + 1)
    except FileNotFoundError:
        raise CalibrationError.single(source, "an existing file", "no such file", "check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        remedy = "check the path and its permissions"
        raise CalibrationError.single(source, "a readable file", reason, remedy) from None
    if len(data) > max_bytes:
        remedy = "split it, or keep medians instead of every sample"
        raise CalibrationError.single(source, f"at most {max_bytes / 2**20:g} MiB", "more", remedy)
    try:
        return data.decode("utf-8-sig"), source
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise CalibrationError.single(source, "UTF-8 text", found, "save it as UTF-8") from None


def _read(stream: BinaryIO, limit: int) -> bytes:
    """Read in chunks: to ask for all of `limit` at once would reserve as much memory."""
    data = bytearray()
    while len(data) < limit and (chunk := stream.read(min(limit - len(data), 2**20))):
        data += chunk
    return bytes(data)


def parse(text: str, source: str) -> tuple[Any, list[Fault]]:
    """Parse one JSON or YAML document; return its value, and a fault for every key that is stated twice.

    Raises
    ------
    CalibrationError
        The text is neither, or empty, or nested too deep, or holds what neither format needs (see `yaml_text`).
    """
    text = text.removeprefix("\ufeff")
    start = text.lstrip(" \t\r\n")
    named_json = source.lower().endswith(".json")
    value, duplicates = None, list[DuplicateKey]()
    if start and (named_json or re.match(r'[{\[]\s*["{\[\]}]', start)):
        try:
            value, duplicates = _parse_json(text, source)
        except json.JSONDecodeError as error:
            got = f"'{error.msg}' at line {error.lineno} column {error.colno}"
            if named_json:
                remedy = "correct the text there, or name the file .yaml"
                raise CalibrationError.single(source, "JSON", got, remedy) from None
            try:
                value, duplicates = yaml_text.parse_yaml(text, source)
            except CalibrationError:
                raise CalibrationError.single(source, "JSON or YAML", got, "correct the text there") from None
    elif start:
        value, duplicates = yaml_text.parse_yaml(text, source)
    if value is None:
        remedy = "start from `specmodel schema --example`"
        raise CalibrationError.single(source, "a document", "an empty one", remedy)
    return value, _duplicate_faults(value, duplicates)


def _parse_json(text: str, source: str) -> tuple[Any, list[DuplicateKey]]:
    duplicates = list[DuplicateKey]()

    def mapping(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            times = Counter(key for key, _ in items)
            duplicates.extend(DuplicateKey(out, key) for key, count in times.items() if count > 1)
        return out

    def constant(word: str) -> float:
        must = "JSON, whose numbers are finite"
        raise CalibrationError.single(source, must, word, "delete the key, or give a number")

    try:
        value = json.loads(text, object_pairs_hook=mapping, parse_constant=constant, parse_int=yaml_text.integer)
    except RecursionError:
        raise yaml_text.too_deep(source) from None
    return value, duplicates


def _duplicate_faults(value: Any, duplicates: list[DuplicateKey]) -> list[Fault]:
    """Find the path of each mapping that states a key twice: a parser knows it only when the mapping is complete."""
    if not duplicates:
        return []
    wanted = {id(duplicate.mapping) for duplicate in duplicates}
    paths = dict[int, tuple[Any, ...]]()
    pending: list[tuple[Any, tuple[Any, ...]]] = [(value, ())]
    while pending:
        node, keys = pending.pop()
        if id(node) in wanted:
            paths.setdefault(id(node), keys)
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, inner in items:
            if isinstance(inner, dict | list):
                pending.append((inner, (*keys, key if isinstance(node, list) else _word(key))))
    faults = []
    for duplicate in duplicates:
        path = key_path((*paths.get(id(duplicate.mapping), ()), _word(duplicate.key)))
        again = "twice" if duplicate.line is None else f"again on line {duplicate.line}"
        faults.append(Fault(path=path, must="stated once", got=f"it {again}", remedy="delete one of the two"))
    return faults


def _word(key: Any) -> str:
    return key if isinstance(key, str) else shown(key)


def to_json(document: dict[str, Any]) -> str:
    """Write a mapping of sections as JSON, every row of a table on one line."""
    return _json_section(document, 0) + "\n"


def _json_section(section: dict[str, Any], depth: int) -> str:
    inner, lines = "  " * (depth + 1), []
    for key, value in section.items():
        if isinstance(value, dict) and value and depth == 0:
            text = _json_section(value, 1)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            rows = ",\n".join(f"{inner}  {_compact(row)}" for row in value)
            text = f"[\n{rows}\n{inner}]"
        else:
            text = _compact(value)
        lines.append(f"{inner}{_compact(key)}: {text}")
    return "{\n" + ",\n".join(lines) + f"\n{'  ' * depth}}}"


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file whole or not at all: to a new file beside it, which then takes its place.

    What is there and is no file, such as a device or a pipe, is written to as it is: nothing may take its place.

    Raises
    ------
    OSError
        The directory cannot be written; a file that was there is untouched.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_text(text, encoding="utf-8", newline="\n")
        return
    partial = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
