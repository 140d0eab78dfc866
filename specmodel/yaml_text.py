"""YAML 1.2 text to plain mappings, lists and scalars, and back.

Reading builds from the parser's events rather than with the library's constructor, because a file may come from anyone:
so aliases and depth are bounded before memory is spent, tags never make objects, plain scalars follow the core schema
of YAML 1.2 exactly (``NO`` and ``on`` are text, ``1e-3`` is a number), and duplicate keys are all found, not only the
first. Writing keeps to what readers of YAML 1.1 and 1.2 agree on: a table's row is one line, text that could be taken
for something else is quoted.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specmodel.errors import CalibrationError, shown

MAX_DEPTH = 64
MAX_ALIAS_NODES = 100_000
MAX_DIGITS = 400  # of a number: more is beyond any double, and the time to convert them grows with their square
SLOW_CHARACTERS = 2**20

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")

# Text that every reader takes for text without quotes, inside braces too; no word that YAML 1.1 takes for a flag.
_PLAIN_TEXT = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null)\Z)[A-Za-z_](?:[A-Za-z0-9_./()+-]| (?! |\Z))*", re.ASCII | re.IGNORECASE
)
_ISO_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


@dataclass(frozen=True, slots=True)
class DuplicateKey:
    """A key that a mapping states again, and the line where it does (unknown in JSON)."""

    mapping: dict[Any, Any]
    key: Any
    line: int | None = None


def parse_yaml(text: str, source: str) -> tuple[Any, list[DuplicateKey]]:
    """Parse one YAML document; return its value and the keys that it states twice.

    Raises
    ------
    CalibrationError
        The text is not YAML, or holds several documents, a tag, a merge key, or aliases or depth beyond the bounds.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    if len(text) > SLOW_CHARACTERS:
        sys.stderr.write(f"specmodel: {source}: {len(text) / 2**20:.1f} MiB of YAML; as JSON it would be read faster\n")
    try:
        # typ="safe" parses in C where ruamel.yaml.clib is installed, else in Python; the events are the same
        try:
            return _build(YAML(typ="safe").parse(text), source)
        except MarkedYAMLError as error:
            # but for [closed:1, closed:8]: text in YAML 1.2, which the parser in C does not know
            if error.problem != "found unexpected ':'":
                raise
            return _build(YAML(typ="safe", pure=True).parse(text), source)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        problem = next(filter(None, (getattr(error, name, None) for name in ("problem", "reason"))), "cannot be read")
        tab = mark is not None and _tab_before(text, mark.line, mark.column)
        remedy = "indent with spaces, not tabs" if tab else "correct it there; quote text that holds : # { } [ ] or ,"
        raise CalibrationError.single(source, "YAML", f"{shown(str(problem))}{where}", remedy) from None
    except RecursionError:
        raise too_deep(source) from None


def _tab_before(text: str, line: int, column: int) -> bool:
    lines = text.split("\n")
    return line < len(lines) and "\t" in lines[line].split("#")[0][: column + 1]


def too_deep(source: str) -> CalibrationError:
    """Return the error of a document that is nested beyond any use."""
    must = f"nested at most {MAX_DEPTH} levels deep"
    return CalibrationError.single(source, must, "deeper nesting", "a calibration needs six levels at most")


def plain_scalar(text: str) -> Any:
    """Return what an unquoted scalar means in YAML 1.2's core schema (section 10.3.2): null, a flag, a number, text."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if text[0] not in "0123456789+-.":
        return text
    if _INTEGER.fullmatch(text):
        return integer(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _BASED.fullmatch(text):
        return int(text, 0) if len(text) <= MAX_DIGITS else math.inf
    if special := _SPECIAL.fullmatch(text):
        return math.nan if special[1] is None else float(f"{special[1]}inf")
    return text


def integer(digits: str) -> int | float:
    """Read a whole number; one of absurd length becomes infinity, which no field accepts."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not been seen."""

    value: Any
    anchor: str | None
    nodes_before: int
    key: Any = None
    has_key: bool = False


def _build(events: Iterator[Any], source: str) -> tuple[Any, list[DuplicateKey]]:
    """Build plain values from parser events, without recursion."""
    from ruamel.yaml import events as kinds

    duplicates = list[DuplicateKey]()
    stack, anchors = [_Open([], None, 0)], dict[str, tuple[Any, int]]()
    nodes = alias_nodes = documents = 0
    for event in events:
        kind = type(event)
        line = event.start_mark.line + 1
        if kind is kinds.ScalarEvent:
            _refuse_tag(event, source, line)
            value = plain_scalar(event.value) if event.implicit[0] else event.value
            nodes += 1
            if event.anchor is not None:
                anchors[event.anchor] = (value, 1)
        elif kind is kinds.MappingStartEvent or kind is kinds.SequenceStartEvent:
            _refuse_tag(event, source, line)
            if len(stack) > MAX_DEPTH:
                raise too_deep(source)
            stack.append(_Open({} if kind is kinds.MappingStartEvent else [], event.anchor, nodes))
            nodes += 1
            continue
        elif kind is kinds.MappingEndEvent or kind is kinds.SequenceEndEvent:
            closed = stack.pop()
            value = closed.value
            if closed.anchor is not None:
                anchors[closed.anchor] = (value, nodes - closed.nodes_before)
        elif kind is kinds.AliasEvent:
            if event.anchor not in anchors:
                remedy = "define the anchor before it is used, and not around itself"
                got = f"{shown('*' + event.anchor)} on line {line}"
                raise CalibrationError.single(source, "free of unknown anchors", got, remedy)
            value, size = anchors[event.anchor]
            nodes += size
            alias_nodes += size
            if alias_nodes > MAX_ALIAS_NODES:
                must = f"at most {MAX_ALIAS_NODES} values by alias"
                raise CalibrationError.single(source, must, f"more on line {line}", "write the values out")
        elif kind is kinds.DocumentStartEvent:
            documents += 1
            if documents > 1:
                got = f"a second one on line {line}"
                raise CalibrationError.single(source, "one document", got, "put each document in a file of its own")
            continue
        else:
            continue
        _place(stack[-1], value, duplicates, source, line)
    return (stack[0].value[0] if stack[0].value else None), duplicates


def _refuse_tag(event: Any, source: str, line: int) -> None:
    if event.tag is not None:
        got = f"{shown(str(event.tag))} on line {line}"
        raise CalibrationError.single(source, "free of tags", got, "delete the tag; quote a value to make it text")


def _place(parent: _Open, value: Any, duplicates: list[DuplicateKey], source: str, line: int) -> None:
    if isinstance(parent.value, list):
        parent.value.append(value)
    elif parent.has_key:
        if parent.key in parent.value:
            duplicates.append(DuplicateKey(parent.value, parent.key, line))
        parent.value[parent.key] = value
        parent.has_key = False
    elif isinstance(value, dict | list):
        got = f"{shown(value)} as a key on line {line}"
        raise CalibrationError.single(source, "keyed by plain words", got, "write a plain word, then a colon")
    elif value == "<<":
        must = "free of merge keys (YAML 1.2 has none)"
        raise CalibrationError.single(source, must, f"<< on line {line}", "write the keys out")
    else:
        parent.key, parent.has_key = value, True


def to_yaml(document: dict[str, Any]) -> str:
    """Write a mapping of sections as YAML: sections as blocks, every row of a table on one line."""
    return "\n".join(_block(document, 0)) + "\n"


def _block(section: dict[str, Any], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for key, value in section.items():
        if isinstance(value, dict) and value and depth < 2 and not (depth == 1 and _is_row(value)):
            yield f"{indent}{_scalar(key)}:"
            yield from _block(value, depth + 1)
        elif isinstance(value, list) and value and (isinstance(value[0], dict) or key == "caveats"):
            yield f"{indent}{_scalar(key)}:"
            yield from (f"{indent}  - {_flow(row)}" for row in value)
        elif key == "date" and isinstance(value, str) and _ISO_DATE.fullmatch(value):
            yield f"{indent}date: {value}"
        else:
            yield f"{indent}{_scalar(key)}: {_flow(value)}"


def _is_row(mapping: dict[str, Any]) -> bool:
    return not any(isinstance(value, list) and value and isinstance(value[0], dict) for value in mapping.values())


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_flow, value)) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        if _PLAIN_TEXT.fullmatch(value):
            return value
        return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(value, ensure_ascii=False))
    if isinstance(value, float):
        text = repr(value)
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return json.dumps(value)
