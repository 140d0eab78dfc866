"""Where an answer goes: the fitted model of a file, one JSON object, or a screen for people."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmodel.streams import write as write

if TYPE_CHECKING:
    from specmodel.calibration import Calibration
    from specmodel.model import FittedModel
    from specmodel.report import Page, Screen

_NARROWEST, _WIDEST, _PIPED = 40, 120, 80


def load(path: str, args: argparse.Namespace) -> Calibration:
    """Read a calibration; say so where a person would otherwise wonder what is waited for.

    Raises
    ------
    CalibrationError
        The file is malformed or cannot be read.
    """
    from specmodel import io

    if path == "-" and not args.quiet and sys.stdin is not None and sys.stdin.isatty():
        sys.stderr.write("reading a calibration from standard input; end it with Ctrl-D\n")
    return io.load(path)


def fitted(path: str, args: argparse.Namespace) -> FittedModel:
    """Read and fit a calibration.

    Raises
    ------
    CalibrationError
        The file is malformed or cannot be read.
    """
    calibration = load(path, args)
    one_thread()
    from specmodel.fit import fit

    return fit(calibration)


def one_thread() -> None:
    """Keep linear algebra on one thread, unless the environment says otherwise; call it before numpy is imported.

    The matrices are small: a second thread gains nothing, and on a busy machine waiting for it costs a hundred times
    what the work does.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


def write_json(document: Mapping[str, Any]) -> None:
    """Write one JSON object: numbers unrounded, what is not finite as null."""
    write(json.dumps(_finite(document), allow_nan=False, indent=2) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Say in one sentence that a file cannot be written.

    Raises
    ------
    UsageError
        For an `OSError` inside.
    """
    from specmodel.errors import UsageError

    try:
        yield
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from error


def row_of(row: Any) -> dict[str, Any]:
    """Return a row of a calibration with the keys of the format, without what is absent or at its default."""
    import dataclasses

    out = {}
    for item in dataclasses.fields(row):
        value = getattr(row, item.name)
        if value != item.default:
            out[item.name] = list(value) if isinstance(value, tuple) else value
    return out


def page(args: argparse.Namespace) -> Page:
    """Return what the terminal can show: its width, whether it has more than ASCII, whether it has colour."""
    from specmodel.report import GLYPHS, Page

    colour = (
        not args.no_color
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
        and sys.stdout.isatty()
    )
    columns = shutil.get_terminal_size((_PIPED, 24)).columns
    return Page(width=min(max(columns, _NARROWEST), _WIDEST), unicode=_can_show(GLYPHS), colour=colour)


def _can_show(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def write_screen(screen: Screen, on: Page) -> None:
    """Write a screen for people; its last line is never broken, so that ``tail -1`` gives all of it."""
    from specmodel.report import render

    write(render(screen, on))
