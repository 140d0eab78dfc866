"""What stands around a text: UTF-16, a container's JSON records, a shell's prompt, a reply's headers, a fence.

Readers see the text that an engine printed, whatever carried it. Line numbers stay those of the carrier: one of its
records is one line.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import IO, TYPE_CHECKING, cast

if TYPE_CHECKING:
    from specmodel.engines.stream import Source

__all__ = ["records_of", "without_preamble", "without_utf16"]

HEAD_BYTES = 2**16
MAX_LINE_BYTES = 2**22
_TEXT_KEYS = ("log", "message", "msg", "MESSAGE", "line", "text", "textPayload", "body")
"""Keys under which Docker, journald, Loki, Cloud Logging and structured loggers put a line."""
_PREAMBLE = re.compile(
    rb"\s*(?:(?:HTTP/[\d.]+ \d+|[A-Za-z][\w-]{0,40}: |[$#>%] |```|~~~)[^\n]*\r?\n|[ \t]*\r?\n){1,60}\s*(?=[\[{])"
)
_DOCKER = b'{"log":"'
_DECODE = json.JSONDecoder().raw_decode
_BOMS = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class _Pieces(io.RawIOBase):
    """A readable stream of what an iterator yields."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._left = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(view), len(self._left))
        view[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _carried(source: Source, pieces: Iterator[bytes]) -> Source:
    """Return the source with other bytes, its first ones read ahead."""
    stream = cast(IO[bytes], io.BufferedReader(_Pieces(pieces), buffer_size=HEAD_BYTES))
    head = b""
    while len(head) < HEAD_BYTES and (part := stream.read(HEAD_BYTES - len(head))):
        head += part
    # The list of warnings is shared: those of the carrier are those of the text.
    return replace(source, head=head, stream=stream)


def without_utf16(source: Source) -> Source:
    """Return the source in UTF-8, where it is UTF-16 by its first bytes: a mark, or every second byte zero."""
    head = source.head
    encoding = next((name for mark, name in _BOMS if head.startswith(mark)), None)
    sample = head[:400]
    if encoding is None and len(sample) >= 8:
        even, odd = sample[::2].count(0), sample[1::2].count(0)
        if odd > 0.8 * len(sample[1::2]) and not even:
            encoding = "utf-16-le"
        elif even > 0.8 * len(sample[::2]) and not odd:
            encoding = "utf-16-be"
    if encoding is None:
        return source
    decode = codecs.getincrementaldecoder(encoding)("replace").decode
    return _carried(source, (decode(block).lstrip("\ufeff").encode("utf-8", "replace") for block in source.blocks()))


def without_preamble(head: bytes) -> bytes:
    """Return the start of a document without a prompt, headers of a reply or a fence before it; else as it is."""
    found = _PREAMBLE.match(head.removeprefix(codecs.BOM_UTF8))
    return head if found is None else head.removeprefix(codecs.BOM_UTF8)[found.end() :]


def records_of(source: Source) -> Source | None:
    """Return the lines that JSON records carry, as containers and structured loggers write them; None if it is none."""
    lines = [line for line in source.head.removeprefix(codecs.BOM_UTF8).split(b"\n")[:40] if line.strip()]
    if len(source.head) >= HEAD_BYTES and len(lines) > 1:
        lines.pop()  # may be cut
    carried = [_record(line) for line in lines]
    found = [key for key, _ in filter(None, carried)]
    if not found or len(found) < 0.8 * len(carried):
        return None
    # Docker ends each line itself, and a long one comes in several records without an end.
    ended = any(text.endswith("\n") for _, text in filter(None, carried))
    return _carried(source, _texts(source.blocks(), ended))


def _record(line: bytes) -> tuple[str, str] | None:
    """Return the key and the text that a record carries; None if it is no record."""
    text = line.decode("utf-8", "replace").strip()
    if not text.startswith("{"):
        return None
    try:
        record, end = _DECODE(text)
    except (ValueError, RecursionError):
        return None
    if end < len(text):
        return None
    for key in _TEXT_KEYS:
        if isinstance(record.get(key), str):
            return key, record[key]
    return None


def _texts(blocks: Iterable[bytes], ended: bool) -> Iterator[bytes]:
    carry = b""
    for block in blocks:
        *lines, carry = (carry + block).split(b"\n")
        yield b"".join(_plain(line, ended) for line in lines)
        if len(carry) > MAX_LINE_BYTES:
            yield carry
            carry = b""
    if carry:
        yield _plain(carry, ended)


def _plain(line: bytes, ended: bool) -> bytes:
    if ended and line.startswith(_DOCKER):
        # Docker's own order of keys: a text without escapes but for the end of its line needs no parser.
        end = line.find(b'"', len(_DOCKER))
        if line.find(b"\\", len(_DOCKER), end) == end - 2 and line[end - 1 : end + 2] == b'n",':
            return line[len(_DOCKER) : end - 2] + b"\n"
    found = _record(line)
    if found is None:
        return line + b"\n"
    text = found[1].encode("utf-8", "replace")
    return text if ended else text + b"\n"
