"""The errors that specmodel raises on purpose; the command line maps each to an exit code."""

from __future__ import annotations

__all__ = ["CalibrationError", "SpecModelError", "UsageError"]


class SpecModelError(Exception):
    """Base of every error that specmodel raises on purpose."""


class CalibrationError(SpecModelError):
    """An input file is malformed.

    The message names the file, the key path, the value found, what is allowed and the remedy; a file with several
    faults lists them all, one a line.
    """


class UsageError(SpecModelError):
    """A call asks for what cannot be: an unknown workload or comm setting, a range that is empty."""
