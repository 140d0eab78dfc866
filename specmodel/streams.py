"""Standard output, for every room that answers on it; and what is no file to read."""

from __future__ import annotations

import os
import stat
import sys

__all__ = ["DEVICE_REMEDY", "discard_output", "is_device", "write"]

DEVICE_REMEDY = "name a file, or pipe the text in and name it -"


def is_device(path: str) -> bool:
    """Whether a path is a device, which may never end; a pipe is none. Raises `OSError` where there is nothing."""
    mode = os.stat(path).st_mode
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def discard_output() -> None:
    """Let what standard output still buffers go nowhere, as it cannot be written when the interpreter ends either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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

        discard_output()
        raise SpecModelError(f"standard output cannot be written: {error.strerror}") from error
