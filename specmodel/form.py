"""The form of a calibration: plain mappings and lists to a `Calibration`, or one line of text for every fault.

The types and ranges of fields are checked by the validator of `specmodel.schema`; where it finds faults, the rules over
several fields are tried on what is usable of each row, so that a file's faults are all reported at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from specmodel import invariants, schema
from specmodel.calibration import (
    SCHEMA,
    AcceptanceEntry,
    AllreduceRow,
    Calibration,
    CycleRow,
    DraftRow,
    ModelShape,
    PrefillRow,
    VerifyRow,
)
from specmodel.errors import MAX_FAULTS_WORDED, CalibrationError, Fault, FormError, key_path, shown
from specmodel.fields import LEAST_NUMBER, MOST_NUMBER
from specmodel.schema import SECTIONS

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Keys = tuple[str | int, ...]

INGEST = "of what an engine printed, `specmodel ingest` makes a calibration"
BEGIN = f"begin with `schema: {SCHEMA}` and `name:`, as `specmodel schema --example` does; {INGEST}"
"""What to do with a text that is no calibration at all."""

RULES: dict[type[Any], Callable[[Any], list[Fault]]] = {
    ModelShape: invariants.model_faults,
    VerifyRow: invariants.time_faults,
    DraftRow: invariants.draft_faults,
    AllreduceRow: invariants.time_faults,
    PrefillRow: invariants.time_faults,
    CycleRow: invariants.cycle_faults,
    AcceptanceEntry: invariants.acceptance_faults,
}

# Words of the engines and of habit, for the word of the format.
ALSO_KNOWN_AS = {
    "accept_length": "acceptance_length",
    "accept_len": "acceptance_length",
    "acceptance_rate": "conditional",
    "batch_size": "batch",
    "concurrency": "batch",
    "draft_tokens": "num_draft_tokens",
    "gpus": "num_gpus",
    "k": "num_steps",
    "latency_ms": "time_ms",
    "max_draft_len": "num_steps",
    "num_speculative_tokens": "num_steps",
    "output_throughput": "tok_s",
    "speculative_num_draft_tokens": "num_draft_tokens",
    "speculative_num_steps": "num_steps",
    "steps": "num_steps",
    "throughput": "tok_s",
    "throughput_tok_s": "tok_s",
    "tokens_per_second": "tok_s",
    "tp": "tensor_parallel",
    "tps": "tok_s",
}


def validate(value: Any, source: str, faults: Sequence[Fault] = ()) -> Calibration:
    """Return the calibration that plain mappings and lists state.

    Parameters
    ----------
    value : mapping
        The document.
    source : str
        What messages call it by: its file.
    faults : sequence of Fault
        What is already known to be wrong with it; reported together with the rest.

    Raises
    ------
    CalibrationError
        Every fault of the document, one a line.
    """
    if not isinstance(value, dict):
        remedy = BEGIN
        raise CalibrationError.single(source, "a mapping of keys", shown(value), remedy)
    calibration, details = schema.check(value)
    found = [*faults, *_document_faults(value, details)]
    if calibration is None or found:
        raise CalibrationError.of(found, source)
    return calibration


def _document_faults(value: dict[Any, Any], details: list[ErrorDetails]) -> list[Fault]:
    """List faults of single fields, then those of rules over several, trying each row with what is usable of it."""
    if not details:
        return []
    of_fields: dict[Keys, Fault] = {}
    unusable: set[Keys] = set()
    for detail in details:
        keys = _keys(value, detail)
        if not _of_rules(detail):
            unusable |= {keys[:length] for length in range(2, len(keys) + 1)}
            if len(of_fields) < MAX_FAULTS_WORDED and not (detail["type"] == "too_short" and detail["input"]):
                of_fields.setdefault(keys, _field_fault(keys, detail))
    paths = {fault.path for fault in of_fields.values()}
    of_rules = (fault for fault in _rule_faults(value, details, unusable) if fault.path not in paths)
    return [*of_fields.values(), *islice(dict.fromkeys(islice(of_rules, 2 * MAX_FAULTS_WORDED)), MAX_FAULTS_WORDED)]


def _of_rules(detail: ErrorDetails) -> FormError | None:
    error = detail.get("ctx", {}).get("error")
    return error if isinstance(error, FormError) else None


def _rule_faults(value: dict[Any, Any], details: list[ErrorDetails], unusable: set[Keys]) -> Iterator[Fault]:
    """List faults of rules over several fields: those that the rows raised, and those of rows with other faults."""
    for detail in details:
        if error := _of_rules(detail):
            path = key_path(_keys(value, detail))
            yield from (fault.under(path) for fault in error.faults)
    for place, section in SECTIONS.items():
        if section in RULES:
            for keys, part in _parts(value, place):
                if isinstance(part, dict):
                    path = key_path(keys)
                    yield from (fault.under(path) for fault in RULES[section](_stand_in(section, part, keys, unusable)))
    comm = value.get("comm")
    yield from invariants.comm_faults(comm if isinstance(comm, dict) else (), _tables(value))


def _keys(value: Any, detail: ErrorDetails) -> Keys:
    """Return the path of a fault as far as the document goes: a validator's path goes on into its own alternatives."""
    node, keys = value, list[Any]()
    for key in detail["loc"]:
        if isinstance(node, dict) and key in node:
            keys.append(key if isinstance(key, str) else shown(key))
        elif isinstance(node, list | tuple) and isinstance(key, int) and key < len(node):
            keys.append(key)
        else:
            if detail["type"] in ("invalid_key", "unexpected_keyword_argument") or (
                detail["type"] == "missing" and isinstance(key, str)
            ):
                keys.append(str(key))
            break
        node = node[key]
    return tuple(keys)


def _section(keys: Keys) -> type[Any] | None:
    """Return the dataclass that describes the mapping at `keys`."""
    place = tuple("[]" if isinstance(key, int) else key for key in keys)
    return SECTIONS.get(place) or SECTIONS.get((*place[:-1], "*"))


def _parts(value: Any, place: tuple[str, ...], keys: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """List every part of the document at `place`, with its keys."""
    if not place:
        yield keys, value
    elif place[0] == "[]":
        if isinstance(value, list | tuple):
            for i, row in enumerate(value):
                yield from _parts(row, place[1:], (*keys, i))
    elif isinstance(value, dict):
        for name in list(value) if place[0] == "*" else [place[0]] if place[0] in value else []:
            yield from _parts(value[name], place[1:], (*keys, name))


def _stand_in(section: type[Any], part: dict[Any, Any], keys: Keys, unusable: set[Keys]) -> SimpleNamespace:
    """Return what is usable of a faulty row; see `specmodel.invariants`."""
    row = SimpleNamespace()
    for item in dataclasses.fields(section):
        fallback = math.nan if item.default is dataclasses.MISSING else item.default
        value = part.get(item.name, fallback)
        if (*keys, item.name) in unusable:
            value = math.nan if item.name not in invariants.LIST_FIELDS else _blank(value, item.name)
        setattr(row, item.name, value)
    return row


def _blank(value: Any, name: str) -> list[Any]:
    """Return a list as long as a faulty one, of which nothing can be said."""
    entries = value if isinstance(value, list | tuple) else ()
    return [() if name == "accepted_by_rank" else math.nan for _ in entries]


def _tables(value: dict[Any, Any]) -> list[tuple[str, list[Any]]]:
    """List every table whose rows name a communication setting."""
    out = []
    for place, section in SECTIONS.items():
        if place[-1:] == ("[]",) and any(item.name == "comm" for item in dataclasses.fields(section)):
            for keys, rows in _parts(value, place[:-1]):
                if isinstance(rows, list | tuple):
                    named = [row.get("comm", "default") if isinstance(row, dict) else "default" for row in rows]
                    out.append((key_path(keys), [SimpleNamespace(comm=name) for name in named]))
    return out


def _field_fault(keys: Keys, detail: ErrorDetails) -> Fault:
    """Word one fault of one field."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    path, key = key_path(keys), keys[-1] if keys else None
    if kind in ("unexpected_keyword_argument", "invalid_key"):
        return Fault(path=path, must="a key of the format", got=shown(key), remedy=_meant(keys))
    if kind == "missing":
        if isinstance(detail["loc"][-1], int):
            return Fault(path=path, must="[low, high]", got=shown(value), remedy="give both ends")
        remedy = f"add `{key}: {SCHEMA}`; {INGEST}" if key == "schema" else f"add `{key}:`"
        return Fault(path=path, must="given", got="nothing", remedy=remedy)
    must, remedy = _expectation(kind, key, value, context, keys)
    if value is None:
        remedy = "give it a value, or delete the key"
    return Fault(path=path, must=must, got=shown(value), remedy=remedy)


def _meant(keys: Keys) -> str:
    """Word the remedy for an unknown key: the known one that was probably meant, else those that are."""
    section = _section(keys[:-1])
    allowed = [item.name for item in dataclasses.fields(section)] if section else []
    word = str(keys[-1])
    if word.isdecimal() and len(word) == 3:  # what follows the comma of 1,310
        return "write a number without commas between its digits: 1310"
    known = ALSO_KNOWN_AS.get(word.lower().replace("-", "_"))
    meant = known if known in allowed else invariants.nearest(word[:80].lower(), allowed)
    return f"did you mean `{meant}`?" if meant else f"allowed here: {', '.join(allowed)}"


_OUT_OF_RANGE = {
    "acceptance_length": "the bonus token is counted, so it is 1 at least",
    "batch": "a batch is one sequence at least",
    "survival": "probabilities are fractions: 0.71 for 71 %",
    "conditional": "probabilities are fractions: 0.71 for 71 %",
}


def _expectation(kind: str, key: Any, value: Any, context: dict[str, Any], keys: tuple[Any, ...]) -> tuple[str, str]:
    """Word what must be there and what to do, for a fault of type or range."""
    word = next((k for k in reversed(keys) if isinstance(k, str)), "")
    if keys[:1] == ("evidence",) and word == "value":
        return "true, false, a finite number or text", "give one of these"
    if kind in ("greater_than", "greater_than_equal", "less_than_equal"):
        sign, name = {"greater_than": (">", "gt"), "greater_than_equal": (">=", "ge"), "less_than_equal": ("<=", "le")}[
            kind
        ]
        limit = context[name]
        if limit == MOST_NUMBER:
            return f"{sign} {limit:g}", "correct it, or delete the row"
        if limit == LEAST_NUMBER and value <= 0.0:
            limit = 0
        return f"{sign} {limit:g}", _OUT_OF_RANGE.get(word, "correct it, or delete the row")
    if kind == "int_type":
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            return "a whole number", f"write {int(value)}, without the decimal point"
        return "a whole number", "remove the quotes" if isinstance(value, str) else "round it, or correct it"
    if kind == "float_type":
        return "a number", "remove the quotes, or correct it" if isinstance(value, str) else "give a number"
    if kind == "finite_number":
        return "a finite number", "delete the key, or measure it again"
    if kind == "bool_type":
        return "true or false", "write true or false, without quotes"
    if kind == "string_type" and "env" in keys[2:3]:
        return "a quoted string", "quote it: environment values are text"
    if kind == "string_type":
        return "text", "quote it"
    if kind == "string_pattern_mismatch" and keys == ("name",):
        return "letters, digits, . _ and - (a file's name)", "rename it"
    if kind == "string_pattern_mismatch":
        return "one line of text, not blank", "join the lines, or delete the key"
    if kind == "literal_error":
        choices = [word.strip("' ") for word in str(context["expected"]).replace(" or ", ",").split(",")]
        meant = invariants.nearest(value, choices) if isinstance(value, str) else None
        must = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
        return must, f"did you mean `{meant}`?" if meant else "write one of these"
    if kind == "tuple_type":
        return "a list", "begin each entry with `- `, or write [..., ...]"
    if kind in ("dataclass_type", "dict_type"):
        return "a mapping of keys", "write `key: value` below it, or {key: value}"
    if kind == "too_short":
        return "a list that is not empty", "give its entries, or delete the key"
    if kind == "too_long":
        return "[low, high]", "give two ends"
    if word == "date":
        return "a date YYYY-MM-DD", "write it like 2026-02-26"
    if kind == "string_unicode":
        return "valid Unicode", "correct the escapes"
    return "valid", "see `specmodel schema`"
