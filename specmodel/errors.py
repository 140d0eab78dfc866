"""The errors that specmodel raises on purpose, and how a fault of an input is worded.

The command line maps each kind of error to an exit code.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["CalibrationError", "Fault", "FormError", "SpecModelError", "UsageError", "brief", "key_path", "shown"]

MAX_FAULTS_SHOWN = 50
MAX_FAULTS_WORDED = 1000  # of fields, and again of rules; how many more there are is not counted
MAX_VALUE_SHOWN = 80  # characters of a value that a message repeats
MAX_WORD_SHOWN = 240  # characters of a name or path that a message or a screen repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong with an input: where, what is allowed, what was found, what to do."""

    path: str = ""
    must: str
    got: str
    remedy: str

    def under(self, prefix: str) -> Fault:
        """Return the same fault as seen from the document that holds the faulty part at `prefix`."""
        joint = "." if self.path and prefix else ""
        return replace(self, path=f"{prefix}{joint}{self.path}")

    def __str__(self) -> str:
        return f"{self.path + ': ' if self.path else ''}must be {self.must}, got {self.got}; {self.remedy}"


class SpecModelError(Exception):
    """Base of every error that specmodel raises on purpose."""


class CalibrationError(SpecModelError):
    """An input file is malformed.

    The message names the file, the key path, the value found, what is allowed and the remedy; a file with several
    faults lists them all, one a line.

    Attributes
    ----------
    faults : tuple of Fault
        Every fault, also those beyond the number that the message lists; empty where the message is free text.
    """

    def __init__(self, message: str, *, faults: Sequence[Fault] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults)

    @classmethod
    def of(cls, faults: Sequence[Fault], source: str = "") -> CalibrationError:
        """Return the error that lists `faults`, one a line, each beginning with `source`, the file's name."""
        prefix = f"{source}: " if source else ""
        lines = [f"{prefix}{fault}" for fault in faults[:MAX_FAULTS_SHOWN]]
        if len(faults) > MAX_FAULTS_SHOWN:
            least = " at least" if len(faults) >= MAX_FAULTS_WORDED else ""
            lines.append(f"{prefix}and {len(faults) - MAX_FAULTS_SHOWN} more{least}")
        return cls("\n".join(lines), faults=faults)

    @classmethod
    def single(cls, source: str, must: str, got: str, remedy: str) -> CalibrationError:
        """Return the error of a file with which one thing is wrong as a whole."""
        return cls.of([Fault(must=must, got=got, remedy=remedy)], source)


class FormError(CalibrationError, ValueError):
    """A row breaks a rule over several of its fields; raised when the row is built."""


class UsageError(SpecModelError):
    """A call asks for what cannot be: an unknown workload or comm setting, a range that is empty."""


def key_path(keys: Iterable[str | int]) -> str:
    """Write keys as a path, ``measurements.cycles[3].tok_s``; a key that is no plain word is quoted and cut short."""
    path = ""
    for key in keys:
        if isinstance(key, int):
            path += f"[{key}]"
        else:
            word = key if re.fullmatch(r"[A-Za-z0-9_.<>-]{1,60}", key) else shown(key)
            path += f".{word}" if path else word
    return path


def brief(text: str) -> str:
    """Cut what nobody can read out of a text for people: the middle of every word beyond 240 characters."""
    if len(text) <= MAX_WORD_SHOWN:
        return text
    keep = MAX_WORD_SHOWN // 3
    return re.sub(
        rf"\S{{{MAX_WORD_SHOWN + 1},}}",
        lambda word: f"{word[0][:keep]}...({len(word[0])} characters)...{word[0][-keep:]}",
        text,
    )


def shown(value: Any) -> str:
    """Write a value for a message: about 80 characters at most, and of a mapping or list only what it is."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return f"a mapping of {len(value)} key{'s' * (len(value) > 1)}" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of about {int(value.bit_length() * 0.30103) + 1} digits"
    if isinstance(value, str):
        text = (
            ascii(value[:MAX_VALUE_SHOWN])
            if not value[:MAX_VALUE_SHOWN].isprintable()
            else repr(value[:MAX_VALUE_SHOWN])
        )
        return (
            text
            if len(value) <= MAX_VALUE_SHOWN and len(text) <= MAX_VALUE_SHOWN + 2
            else f"{text[: MAX_VALUE_SHOWN - 4]}..."
        )
    if isinstance(value, int | float | datetime.date):
        return str(value)
    return f"a {type(value).__name__}"
