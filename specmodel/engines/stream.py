"""Sources of text, compressed or not, in blocks; and records found in them by plain substring search.

A log is never held: blocks of 256 KiB go by, each is searched for the readers' anchors at memory speed, and only what
an anchor begins is looked at further. Records are cut at line feeds and at the carriage returns of progress bars.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import IO, Any, cast

from specmodel.engines.redact import clean
from specmodel.errors import CalibrationError, Fault
from specmodel.streams import DEVICE_REMEDY, is_device

__all__ = ["Handler", "Source", "failure", "json_items", "open_source", "read_records", "strip_ansi", "whole_text"]

BLOCK_BYTES = 2**18
HEAD_BYTES = 2**16
MAX_RECORD_BYTES = 2**16
MAX_PREFIX_BYTES = 2**8
MAX_DOCUMENT_BYTES = 2**26

Handler = Callable[[bytes, bytes, int, bool], None]
"""Takes what precedes an anchor on its line, the record from the anchor on, its line number, and whether it ended."""

_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
_BROKEN = (EOFError, OSError, zlib.error, lzma.LZMAError)
_ANSI = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


def failure(source: str, must: str, got: str, remedy: str) -> CalibrationError:
    """Make the error of one fault of a source."""
    return CalibrationError.of([Fault(must=must, got=got, remedy=remedy)], source)


def strip_ansi(text: bytes) -> bytes:
    """Return the text without colour codes."""
    return _ANSI.sub(b"", text) if b"\x1b" in text else text


@dataclass(slots=True)
class Source:
    """An opened source: the name that notes call it by (no folders), its first bytes, and the rest to come."""

    name: str
    head: bytes
    stream: IO[bytes]
    raw: IO[bytes]
    """What `stream` decompresses, or `stream` itself."""
    warnings: list[str] = field(default_factory=list)

    def blocks(self) -> Iterator[bytes]:
        """Yield the decompressed bytes, once; a damaged or cut compressed stream ends early, with a warning."""
        try:
            if self.head:
                yield self.head
            while block := self.stream.read(BLOCK_BYTES):
                yield block
        except _BROKEN as error:
            self.warnings.append(f"the stream ends early ({type(error).__name__}); what came before it is used")

    def close(self) -> None:
        """Close the file; stdin stays open."""
        if self.raw is not sys.stdin.buffer:
            self.stream.close()
            self.raw.close()


def open_source(path: str) -> Source:
    """Open a file, or stdin for ``-``; gzip, xz, bzip2 and zstd are recognised by their first bytes.

    Raises
    ------
    CalibrationError
        Missing, a directory, unreadable, empty, or compressed in a way that this Python cannot read.
    """
    name = "<stdin>" if path == "-" else clean(os.path.basename(os.path.normpath(path)) or path)
    try:
        if path != "-" and os.path.isdir(path):
            raise failure(name, "a file", "a directory", "name the files in it")
        if path != "-" and is_device(path):
            raise failure(name, "a file", "a device", DEVICE_REMEDY)
        raw: Any = sys.stdin.buffer if path == "-" else open(path, "rb")  # noqa: SIM115
    except FileNotFoundError:
        raise failure(name, "an existing file", "no such file", "check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise failure(name, "a readable file", _reason(error), "check the file and its permissions") from None
    try:
        buffered = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)
        magic = buffered.peek(8)[:8]
        kind = next((kind for start, kind in _MAGIC.items() if magic.startswith(start)), None)
        stream = _decompressed(buffered, kind, name)
        head = _read_full(stream, HEAD_BYTES)
        if not head.strip():
            raise failure(name, "text that an engine printed", "nothing", "check that the log was written there")
    except _BROKEN as error:
        raw.close()
        raise failure(name, "a readable file", _reason(error), "check the file and its permissions") from None
    except CalibrationError:
        raw.close()
        raise
    return Source(name, head, stream, raw)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or type(error).__name__


def _decompressed(raw: io.BufferedReader, kind: str | None, name: str) -> IO[bytes]:
    if kind == "gzip":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if kind == "xz":
        return lzma.LZMAFile(raw)
    if kind == "bzip2":
        return bz2.BZ2File(raw)
    if kind == "zstd":
        # The standard library has it from Python 3.14 on, the package `zstandard` before.
        for module, reader in (("compression.zstd", "ZstdFile"), ("zstandard", "open")):
            try:
                opener: Any = getattr(importlib.import_module(module), reader)
            except ImportError:
                continue
            stream: IO[bytes] = opener(raw)
            return stream
        remedy = f"install the package zstandard, or pipe it: zstd -dc {name} | specmodel ingest -"
        raise failure(name, "gzip, xz, bzip2 or plain text", "zstd, which this Python cannot read", remedy)
    return raw


def _read_full(stream: IO[bytes], size: int) -> bytes:
    """Up to `size` bytes: what there is when a compressed stream breaks off after its first bytes."""
    parts: list[bytes] = []
    missing = size
    while missing > 0:
        try:
            part = stream.read(min(missing, 4096))
        except _BROKEN:
            if not parts:
                raise
            break
        if not part:
            break
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def whole_text(source: Source) -> str:
    """Read the whole of a document, at most 64 MiB.

    Raises
    ------
    CalibrationError
        Too large, or not UTF-8.
    """
    parts, size = [], 0
    for block in source.blocks():
        parts.append(block)
        size += len(block)
        if size > MAX_DOCUMENT_BYTES:
            remedy = "cut it to the part that was measured"
            raise failure(source.name, f"a document of at most {MAX_DOCUMENT_BYTES // 2**20} MiB", "more", remedy)
    try:
        return b"".join(parts).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise failure(source.name, "UTF-8 text", f"another byte at offset {error.start}", "save it as UTF-8") from None


def read_records(
    source: Source, handlers: dict[bytes, Handler], narrow: Callable[[], dict[bytes, Handler] | None] | None = None
) -> None:
    """Feed every record that begins with one of the anchors to its handler, in the order of the text.

    `narrow` is asked after each block for the fewer anchors that are enough from there on, until it names them: the
    search for anchors is most of the time.
    """
    anchors = list(handlers.items())
    carry, line = b"", 1
    for block in source.blocks():
        text = carry + block
        end = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        if not end and len(text) < MAX_RECORD_BYTES * 4:
            carry = text
            continue
        end = end or len(text)
        body, carry = text[:end], text[end:]
        _scan(body, anchors, line, True)
        line += body.count(b"\n")
        if narrow is not None and (fewer := narrow()) is not None:
            anchors, narrow = list(fewer.items()), None
    if carry:
        _scan(carry, anchors, line, False)


def _scan(body: bytes, anchors: list[tuple[bytes, Handler]], line: int, complete: bool) -> None:
    hits: list[tuple[int, Handler]] = []
    for anchor, handler in anchors:
        at = body.find(anchor)
        while at >= 0:
            hits.append((at, handler))
            at = body.find(anchor, at + 1)
    if not hits:
        return
    import numpy as np

    hits.sort(key=itemgetter(0))
    # Where the lines of all hits begin and end, at once: one by one it would cost as much as reading them.
    size, places = len(body), np.fromiter((at for at, _ in hits), np.int64, len(hits))
    characters = np.frombuffer(body, np.uint8)
    feeds = np.flatnonzero(characters == ord("\n"))
    after = np.searchsorted(feeds, places)
    lines = (line + after).tolist()
    if b"\r" in body:
        # A line ends at a carriage return too, but counts only with its line feed.
        feeds = np.flatnonzero((characters == ord("\n")) | (characters == ord("\r")))
        after = np.searchsorted(feeds, places)
    bounds = np.concatenate(([-1], feeds, [size]))
    starts = np.maximum(bounds[after] + 1, places - MAX_PREFIX_BYTES).tolist()
    ends = bounds[after + 1].tolist()
    for (at, handler), place, start, end in zip(hits, lines, starts, ends, strict=True):
        if end - at <= MAX_RECORD_BYTES:
            handler(body[start:at], body[at:end], place, complete or end < size)
        else:
            handler(body[start:at], body[at : at + MAX_RECORD_BYTES], place, False)


def json_items(source: Source, key: bytes | None = None) -> Iterator[Any]:
    """Yield the elements of a JSON list, or the values of a JSON-lines file, one at a time.

    Parameters
    ----------
    source : Source
        The text; a list is entered, whatever else is read value after value.
    key : bytes, optional
        Enter the list that follows this key instead, wherever it stands.

    Raises
    ------
    CalibrationError
        A value that is no JSON, other than one that the end of the text cuts off, or lines after or between values that
        begin none (a warning then).
    """
    decoder = json.JSONDecoder()
    blocks = source.blocks()
    buffer = next(blocks, b"").removeprefix(b"\xef\xbb\xbf")
    listed, values, strange = key is not None, 0, 0
    if key is not None:
        while (found := re.search(b'"' + re.escape(key) + rb'"\s*:\s*\[', buffer)) is None:
            if not (block := next(blocks, b"")):
                return
            buffer = buffer[-256:] + block
        buffer = buffer[found.end() :]
    elif buffer.lstrip()[:1] == b"[":
        buffer, listed = buffer.lstrip()[1:], True
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    text, at, more = decode(buffer), 0, True
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        if not listed and values and at < len(text) and text[at] not in "{[":
            end = text.find("\n", at)
            if end < 0 and more:
                block = next(blocks, b"")
                more, text, at = bool(block), text[at:] + decode(block, not block), 0
                continue
            strange += 1
            if strange == 1:
                source.warnings.append("lines that are no JSON stand after or between the values; they are left out")
            at = len(text) if end < 0 else end
            continue
        try:
            value, end = decoder.raw_decode(text, at)
            if end == len(text) and more:
                raise json.JSONDecodeError("a value that may go on", text, end)
        except (json.JSONDecodeError, RecursionError) as error:
            if isinstance(error, RecursionError):
                raise failure(source.name, "JSON of moderate depth", "deeper nesting", "check the file") from None
            if more:
                # Read as much again as is pending, so that a long value is not parsed once for every block.
                pending, wanted = [text[at:]], max(len(text) - at, 1)
                while more and wanted > 0:
                    block = next(blocks, b"")
                    more = bool(block)
                    pending.append(decode(block, not more))
                    wanted -= len(block)
                text, at = "".join(pending), 0
                if len(text) > MAX_DOCUMENT_BYTES:
                    remedy = "cut the file to the part that was measured"
                    raise failure(source.name, "JSON values of at most 64 MiB", "a longer one", remedy) from None
                continue
            if at >= len(text):
                return
            if error.pos >= len(text) - 1 or "Unterminated" in error.msg:
                source.warnings.append("the last JSON value is cut off; what came before it is used")
                return
            raise failure(source.name, "JSON", f"{error.msg} at character {error.pos}", "check the file") from None
        yield value
        at, values = end, values + 1
