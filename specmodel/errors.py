"""The errors that specmodel raises on purpose; the command line maps each to an exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = ["CalibrationError", "Fault", "FormError", "SpecModelError", "UsageError"]

MAX_FAULTS_SHOWN = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing wrong with an input: where, what is allowed, what was found, what to do."""

    path: str = ""
    must: str
    got: str
    remedy: str

    def under(self, prefix: str) -> Fault:
        """The same fault seen from the document that holds the faulty part at `prefix`."""
        joint = "" if not self.path or not prefix or self.path.startswith("[") else "."
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
    def of(cls, faults: Sequence[Fault], source: str) -> CalibrationError:
        """The error that lists `faults`, one a line, each beginning with `source` (the file's name)."""
        lines = [f"{source}: {fault}" for fault in faults[:MAX_FAULTS_SHOWN]]
        if len(faults) > MAX_FAULTS_SHOWN:
            lines.append(f"{source}: and {len(faults) - MAX_FAULTS_SHOWN} more")
        return cls("\n".join(lines), faults=faults)


class FormError(CalibrationError, ValueError):
    """A row breaks a rule over several of its fields; raised when the row is built."""


class UsageError(SpecModelError):
    """A call asks for what cannot be: an unknown workload or comm setting, a range that is empty."""
