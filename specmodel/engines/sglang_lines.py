"""SGLang's decode line: its layout, which changes over versions, and the definitions of its accept rate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from specmodel.engines.reading import Shape
from specmodel.engines.stream import strip_ansi

__all__ = ["WANTED", "Layout", "definitions", "fitting_tokens", "layout_of"]

WANTED = ("length", "rate", "running", "graph", "tokens", "throughput")
NAMES = {
    "running-req": "running",
    "token": "tokens",
    "full-token": "tokens",
    "accept-len": "length",
    "accept-rate": "rate",
    "gen-throughput-(token/s)": "throughput",
    "cuda-graph": "graph",
    "npu-graph": "graph",
    "musa-graph": "graph",
    "cpu-graph": "graph",
    "queue-req": "queue",
}
"""Names in one spelling: see `_spelling`."""
LAST = "queue"
"""The last field of every version; a line without it is cut off."""
HALF_CENT = 0.0051
"""Half of the last printed digit, and a little."""

_START = re.compile(rb"Decode batch(?: ?\[\d+\])?[.,] ")
_STAMP = re.compile(rb"\[\d{4}-\d\d-\d\d[ T]")
_ABSENT = rb"(?:(\x00))?"  # the group of what a layout does not print

ERAS: dict[str, Callable[[float, Shape], float]] = {
    "accept len / num_draft_tokens, bonus in both": lambda length, shape: length / shape.verify_tokens,
    "accept len / (num_steps + 1), bonus in both": lambda length, shape: length / (shape.num_steps + 1),
    "(accept len - 1) / (num_draft_tokens - 1), drafts only": lambda length, shape: (
        (length - 1) / max(shape.verify_tokens - 1, 1)
    ),
}
"""What accept rate was, by version: the middle one to 0.5.5.post2, the first to 0.5.10, the last since."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The order of names in a log's decode lines, as a pattern, and which of its groups holds what is `WANTED`."""

    pattern: re.Pattern[bytes]
    places: tuple[int, ...]
    must_end: bool
    """Whether its last value is a count, in which a cut does not show: a line that no other follows is not read."""


def layout_of(text: bytes) -> Layout | None:
    """Read the names of a decode line in whatever order, and make a pattern of it; None where the line is cut off."""
    text = strip_ansi(text)
    if stamp := _STAMP.search(text):
        text = text[: stamp.start()]
    start = _START.match(text)
    if start is None:
        return None
    names: list[bytes] = []
    fields: list[str | None] = []
    for part in text[start.end() :].split(b", "):
        name, colon, _ = part.partition(b": ")
        known = NAMES.get(_spelling(name))
        if not colon or (known is not None and known in fields):
            break
        names.append(name)
        fields.append(known)
    while fields and fields[-1] is None:
        names.pop()
        fields.pop()
    if not {"throughput", "running", LAST} <= set(fields):
        return None
    value = rb"[^,\r\n\[\x1b]*"
    parts = [
        re.escape(name) + b": " + (b"(" + value + b")" if known else value)
        for name, known in zip(names, fields, strict=True)
    ]
    # A cut shows in the last value: no one reads all of #queue-req, decimals are two, words are whole; counts must end.
    end = {LAST: rb"(\d)", "graph": rb"(True|False)\b", "running": rb"(\d+),?\s*$", "tokens": rb"(\d+),?\s*$"}
    parts[-1] = re.escape(names[-1]) + b": " + end.get(str(fields[-1]), rb"(\d+\.\d\d)\b")
    captured = [known for known in fields if known]
    places = (captured.index(name) + 1 if name in captured else len(captured) + 1 for name in WANTED)
    pattern = re.compile(_START.pattern + b", ".join(parts) + _ABSENT)
    if not pattern.match(text):
        return None
    return Layout(pattern, tuple(places), fields[-1] in ("running", "tokens"))


def _spelling(name: bytes) -> str:
    """Return a name as `NAMES` spells it: without #, plural and underscore, units and lengths in one way."""
    plain = name.decode("utf-8", "replace").lower().lstrip("#").replace("_", "-").replace(" ", "-")
    plain = plain.replace("length", "len").replace("tokens/s", "token/s").replace("tok/s", "token/s")
    return plain.removesuffix("s")


def definitions(length: float, rate: float, shape: Shape) -> list[str]:
    """Name the definitions of accept rate that hold for a line, to the digits printed."""
    slack = HALF_CENT + HALF_CENT / max(shape.verify_tokens - 1, 1)
    return [name for name, define in ERAS.items() if abs(define(length, shape) - rate) <= slack]


def fitting_tokens(pairs: Iterable[tuple[float, float]]) -> int | None:
    """Return the one number of verified tokens with which one definition holds for all but a few pairs of a log."""
    numbers = list(pairs)
    if len(numbers) < 5:
        return None
    fits = set()
    for tokens in range(2, 65):
        shape = Shape(num_steps=tokens - 1)
        held = [definitions(length, rate, shape) for length, rate in numbers]
        if any(sum(name in names for names in held) >= 0.98 * len(held) for name in ERAS):
            fits.add(tokens)
    return fits.pop() if len(fits) == 1 else None
