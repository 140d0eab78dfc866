"""Standard output, for every room that answers on it."""

from __future__ import annotations

import os
import sys

__all__ = ["write"]


def write(text: str) -> None:
    """Write to standard output, to its end.

    Raises
    ------
    SpecModelError
        It cannot be written, such as to a full disk. A reader that has gone is a `BrokenPipeError`.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        from specmodel.errors import SpecModelError  # not above: `--help` is to import nothing heavy

        # What is still buffered cannot be written at exit either: let it go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SpecModelError(f"standard output cannot be written: {error.strerror}") from error
