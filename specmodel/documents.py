"""Text of YAML 1.2 and JSON documents to plain mappings, lists and scalars, and back; nothing of the format is known here.

YAML is built from the parser's events rather than by the library's constructor, because a file may come from anyone: so
aliases and depth are bounded before memory is spent, tags never make objects, plain scalars follow the YAML 1.2 core
schema exactly (``NO`` and ``on`` are text, ``1e-3`` is a number), and duplicate keys are all found, not only the first.
The C parser is used where it is installed. It is some twenty times faster than the one in Python.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from specmodel.errors import CalibrationError, Fault

MAX_BYTES = 256 * 2**20
MAX_DEPTH = 64
MAX_ALIAS_NODES = 100_000
SLOW_YAML_BYTES = 2**20

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"([-+]?)\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_MAX_DIGITS = 400  # of a number; more cannot be meant, and time to convert grows with the square


@dataclass(slots=True)
class Document:
    """A document's value, and the keys that are stated twice: (the mapping, the key, the line where known)."""

    value: Any
    duplicates: list[tuple[dict[Any, Any], Any, int | None]] = field(default_factory=list)

    def faults(self) -> list[Fault]:
        """One fault for each key that is stated twice, with its path."""
        if not self.duplicates:
            return []
        wanted = {id(mapping) for mapping, _, _ in self.duplicates}
        paths = dict(_paths(self.value, wanted))
        out = []
        for mapping, key, line in self.duplicates:
            at = f" again on line {line}" if line is not None else " twice"
            path = key_path((*paths.get(id(mapping), ()), key))
            out.append(Fault(path=path, must="stated once", got=f"the key{at}", remedy="delete one of the two"))
        return out


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> tuple[str, str]:
    """The text of a file, or of stdin for ``-``, and the name that messages call it by.

    Raises
    ------
    CalibrationError
        The file is missing, a directory, unreadable, too large, or not UTF-8 (a byte order mark is fine).
    """
    name = os.fspath(path)
    source = "<stdin>" if name == "-" else name
    try:
        if name == "-":
            data = sys.stdin.buffer.read(max_bytes + 1)
        else:
            if stat.S_ISDIR(os.stat(name).st_mode):
                raise _unreadable(source, "a file", "a directory", "name a file in it")
            with open(name, "rb") as stream:
                data = stream.read(max_bytes + 1)
    except FileNotFoundError:
        raise _unreadable(source, "an existing file", "no such file", "check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise _unreadable(source, "a readable file", reason, "check the path and its permissions") from None
    if len(data) > max_bytes:
        remedy = "split it, or keep the medians instead of every sample"
        raise _unreadable(source, f"at most {max_bytes // 2**20} MiB", "more", remedy)
    try:
        return data.decode("utf-8-sig"), source
    except UnicodeDecodeError as error:
        found = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise _unreadable(source, "UTF-8 text", found, "save it as UTF-8") from None


def parse(text: str, source: str) -> Document:
    """Parse one JSON or YAML document; which of the two is seen from the text, then from the suffix of `source`.

    Raises
    ------
    CalibrationError
        The text is neither, empty, holds several documents, a tag, a merge key, or aliases or depth beyond bounds.
    """
    text = text.removeprefix("\ufeff")
    start = text.lstrip(" \t\r\n")
    if not start:
        raise _empty(source)
    named_json = source.lower().endswith(".json")
    if named_json or re.match(r'[{\[][ \t\r\n]*["{\[\]}]', start):
        try:
            return _parse_json(text, source)
        except _NotJsonError as error:
            if named_json:
                raise _unreadable(
                    source, "JSON", str(error), "correct the text there, or name the file .yaml"
                ) from None
            try:
                return _parse_yaml(text, source)
            except CalibrationError:
                raise _unreadable(source, "JSON or YAML", str(error), "correct the text there") from None
    return _parse_yaml(text, source)


def key_path(keys: tuple[Any, ...]) -> str:
    """``measurements.cycles[3].tok_s`` for its keys; keys that are no plain words are quoted and cut short."""
    out = ""
    for key in keys:
        if isinstance(key, int) and not isinstance(key, bool):
            out += f"[{key}]"
        else:
            plain = isinstance(key, str) and re.fullmatch(r"[A-Za-z0-9_.<>-]{1,60}", key)
            word = key if plain else _cut(repr(key[:80]) if isinstance(key, str) else type(key).__name__)
            out += f".{word}" if out else word
    return out


def shown(value: Any) -> str:
    """A value for a message: at most about 80 characters, of containers only what they are."""
    if isinstance(value, dict):
        return f"a mapping of {len(value)} keys" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, str):
        return _cut(repr(value[:80]), more=len(value) > 80)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of about {int(value.bit_length() * 0.30103) + 1} digits"
    if value is None:
        return "null"
    return _cut(repr(value))


def _cut(text: str, more: bool = False) -> str:
    return f"{text[:76]}..." if len(text) > 80 or more else text


def _unreadable(source: str, must: str, got: str, remedy: str) -> CalibrationError:
    return CalibrationError.of([Fault(must=must, got=got, remedy=remedy)], source)


def _empty(source: str) -> CalibrationError:
    return _unreadable(source, "a calibration", "an empty document", "start from `specmodel schema --example`")


def _paths(value: Any, wanted: set[int]) -> list[tuple[int, tuple[Any, ...]]]:
    found, pending = [], [(value, ())]
    while pending:
        node, keys = pending.pop()
        if isinstance(node, dict):
            if id(node) in wanted:
                found.append((id(node), keys))
            pending += [(inner, (*keys, key)) for key, inner in node.items() if isinstance(inner, dict | list)]
        elif isinstance(node, list):
            pending += [(inner, (*keys, i)) for i, inner in enumerate(node) if isinstance(inner, dict | list)]
    return found


# JSON


class _NotJsonError(Exception):
    pass


def _parse_json(text: str, source: str) -> Document:
    document = Document(None)

    def mapping(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            keys = [key for key, _ in items]
            document.duplicates += [(out, key, None) for key in out if keys.count(key) > 1]
        return out

    def constant(word: str) -> Any:
        raise _unreadable(source, "JSON with finite numbers", word, "delete the key, or give a number")

    try:
        document.value = json.loads(text, object_pairs_hook=mapping, parse_constant=constant, parse_int=_integer)
    except json.JSONDecodeError as error:
        raise _NotJsonError(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise _too_deep(source) from None
    return document


def _too_deep(source: str) -> CalibrationError:
    remedy = "a calibration needs six levels at most"
    return _unreadable(source, f"nested at most {MAX_DEPTH} levels deep", "deeper nesting", remedy)


# YAML


def _parse_yaml(text: str, source: str) -> Document:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    if len(text) > SLOW_YAML_BYTES:
        sys.stderr.write(f"specmodel: {source}: {len(text) / 2**20:.1f} MiB of YAML; JSON would be read faster\n")
    try:
        # typ="safe" parses in C where ruamel.yaml.clib is installed, else in Python; the events are the same
        return _build(YAML(typ="safe").parse(text), source)
    except YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1} column {mark.column + 1}" if mark is not None else ""
        problem = next(filter(None, (getattr(error, name, None) for name in ("problem", "reason"))), "cannot be read")
        problem = " ".join(str(problem).split())
        tab = "\\t" in problem or "tab" in problem
        remedy = "indent with spaces, not tabs" if tab else "correct the text there (quote text that holds : # { } [ ])"
        raise _unreadable(source, "YAML", f"{_cut(problem)}{where}", remedy) from None
    except RecursionError:
        raise _too_deep(source) from None


@dataclass(slots=True)
class _Open:
    """A mapping or list whose end has not been seen."""

    value: Any
    anchor: str | None
    nodes_before: int
    key: Any = None
    has_key: bool = False


def _build(events: Iterator[Any], source: str) -> Document:
    """Build plain values from parser events, without recursion."""
    from ruamel.yaml import events as kinds

    document, stack, anchors = Document(None), [_Open([], None, 0)], dict[str, tuple[Any, int]]()
    nodes = alias_nodes = documents = 0
    for event in events:
        kind = type(event)
        line = event.start_mark.line + 1
        if kind is kinds.ScalarEvent:
            _no_tag(event, source, line)
            value = plain_scalar(event.value) if event.implicit[0] else event.value
            nodes += 1
            if event.anchor is not None:
                anchors[event.anchor] = (value, 1)
        elif kind is kinds.MappingStartEvent or kind is kinds.SequenceStartEvent:
            _no_tag(event, source, line)
            if len(stack) > MAX_DEPTH:
                raise _too_deep(source)
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
                remedy = "define the anchor before it is used, outside itself"
                raise _unreadable(source, "an anchor that is known", f"*{event.anchor} on line {line}", remedy)
            value, size = anchors[event.anchor]
            nodes += size
            alias_nodes += size
            if alias_nodes > MAX_ALIAS_NODES:
                remedy = "write the values out"
                raise _unreadable(source, f"at most {MAX_ALIAS_NODES} values by alias", "more", remedy)
        elif kind is kinds.DocumentStartEvent:
            documents += 1
            if documents > 1:
                remedy = "put each document in a file of its own"
                raise _unreadable(source, "one document", f"a second one on line {line}", remedy)
            continue
        else:
            continue
        _place(stack[-1], value, document, source, line)
    document.value = stack[0].value[0] if stack[0].value else None
    if document.value is None:
        raise _empty(source)
    return document


def _no_tag(event: Any, source: str, line: int) -> None:
    if event.tag is not None:
        remedy = "delete the tag; quote a value to make it text"
        raise _unreadable(source, "free of tags", f"{shown(str(event.tag))} on line {line}", remedy)


def _place(parent: _Open, value: Any, document: Document, source: str, line: int) -> None:
    if isinstance(parent.value, list):
        parent.value.append(value)
    elif parent.has_key:
        if parent.key in parent.value:
            document.duplicates.append((parent.value, parent.key, line))
        parent.value[parent.key] = value
        parent.has_key = False
    elif isinstance(value, dict | list):
        remedy = "write a plain word, then a colon"
        raise _unreadable(source, "keys that are plain words", f"{shown(value)} as a key on line {line}", remedy)
    elif value == "<<":
        remedy = "write the keys out"
        raise _unreadable(source, "free of merge keys (YAML 1.2 has none)", f"<< on line {line}", remedy)
    else:
        parent.key, parent.has_key = value, True


def plain_scalar(text: str) -> Any:
    """What an unquoted scalar means in the core schema of YAML 1.2 (section 10.3.2): null, bool, int, float or text."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if text[0] not in "0123456789+-.":
        return text
    if _INTEGER.fullmatch(text):
        return _integer(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _BASED.fullmatch(text):
        return int(text, 0) if len(text) <= _MAX_DIGITS else math.inf
    if special := _SPECIAL.fullmatch(text):
        return math.nan if special[1] is None else float(f"{special[1]}inf")
    return text


def _integer(digits: str) -> int | float:
    return float(digits) if len(digits) > _MAX_DIGITS else int(digits)
