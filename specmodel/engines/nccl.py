"""NCCL: tables and JSON of nccl-tests (all-reduce times), and what `NCCL_DEBUG=INFO` says was in force.

A row's time is that of one operation, averaged over iterations; out-of-place and in-place are two measurements of it,
and their difference over all sizes is its spread. The bandwidth columns serve to tell which collective it was.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from specmodel.engines.reading import Given, Reading, mapping, number, rounded, sequence, whole
from specmodel.engines.redact import gpu_name, tuning_variable
from specmodel.engines.stream import Handler, Source, strip_ansi

__all__ = ["NcclDebug", "NcclTable", "tests_json", "tests_table"]

ALGORITHMS = ("TREE", "RING", "COLLNET_DIRECT", "COLLNET_CHAIN", "NVLS", "NVLS_TREE", "PAT")
PROTOCOLS = ("LL", "LL128", "SIMPLE")
MAX_DECISIONS = 64
MAX_LINES = 2**18
MAX_KINDS = 2**14

_ROW = re.compile(
    r"(?:^|[\s>:|])(\d{1,15})\s+(\d{1,15})\s+([a-z]\w*)\s+(\w+)(?:\s+(-?\d+))?((?:\s+(?:\d\S*|N/A|nan|inf)){8,20})(?:\s.*)?$"
)
_RANK = re.compile(r"#\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+ on \S+ device\s+\d+ \[[^\]]+\] (.{1,80}?)\s*$")
_GRAPH = re.compile(r"\bgraph: (\d+)")
_COLLECTIVE = re.compile(r"# Collective test starting: (\w+)")
_VERSION = re.compile(r"nccl-library=(\d{4,6})")


class NcclTable:
    """Reads the lines of an nccl-tests run, one by one, wherever they stand."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._groups: dict[str, int] = {}
        self._graph: int | None = None
        self._collective: str | None = None
        self._version: str | None = None
        self._rows: list[Any] = []

    def line(self, raw: bytes) -> None:
        """Take a line: of the header, of the table, or any other."""
        line = strip_ansi(raw).decode("utf-8", "replace")
        if found := _RANK.search(line):
            self._groups[found[2] or "0"] = self._groups.get(found[2] or "0", 0) + 1
            self.reading.system["gpu"] = gpu_name(found[3])
        elif found := _COLLECTIVE.search(line):
            self._collective = found[1]
        elif "#" in line:
            self._graph = int(found[1]) if (found := _GRAPH.search(line)) else self._graph
            self._version = found[1] if (found := _VERSION.search(line)) else self._version
        elif found := _ROW.search(line):
            _table_row(self.reading, self._rows, found)

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor, where a run was pasted into the log of an engine."""
        return dict.fromkeys((b"# nThread ", b"#  Rank ", b" sum "), self._pasted)

    def _pasted(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if complete and len(self._rows) < MAX_LINES:
            self.line(prefix + text)

    def finish(self) -> Reading | None:
        """Add the rows to the reading; None where there was no table."""
        if not (self._rows or self._groups or self.reading.dropped):
            return None
        if self._version is not None:
            self.reading.saw("nccl_setting", f"NCCL {_version(int(self._version))}", "header")
        ranks = next(iter(self._groups.values())) if self._groups else None
        _add_rows(self.reading, self._rows, ranks, self._graph, self._collective)
        return self.reading


def tests_table(reading: Reading, source: Source, debug: NcclDebug) -> None:
    """Read the output of an nccl-tests run, with the NCCL debug lines that stand among it."""
    table = NcclTable(reading)
    for place, raw in enumerate(_lines(source), 1):
        if place > MAX_LINES:
            reading.dropped["lines beyond the first quarter of a million"] += 1
            break
        if b"NCCL INFO" in raw:
            debug.line(raw, place)
        else:
            table.line(raw)
    table.finish()


def _lines(source: Source) -> Iterable[bytes]:
    carry = b""
    for block in source.blocks():
        *lines, carry = (carry + block).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        yield from lines
        carry = carry[-(2**16) :]
    if carry:
        yield carry


def _table_row(reading: Reading, rows: list[Any], found: re.Match[str]) -> None:
    size, columns = int(found[1]), found[6].split()
    width = 4 if len(columns) < 16 else 8  # latency statistics follow each side from 2026 on
    if len(columns) not in (8, 10, 16, 18) or found[4] not in ("sum", "prod", "max", "min", "avg", "all", "mulsum"):
        reading.dropped["rows of other collectives, or with other columns"] += 1
        return
    sides = columns[:4], columns[width : width + 4]
    times, ratios = [], []
    for time, algbw, busbw, _ in sides:
        ms = _float(time)
        ms = ms / 1e3 if ms else None  # printed in microseconds
        times.append(ms)
        bandwidth, bus = _float(algbw), _float(busbw)
        if ms and bandwidth and bandwidth > 1 and abs(size / ms / 1e6 / bandwidth - 1) > 0.02:
            reading.dropped["rows whose time and bandwidth contradict each other"] += 1
            return
        if bandwidth and bus and bandwidth > 1:
            ratios.append(bus / bandwidth)
    rows.append((size, (times[0], times[1]), sum(ratios) / len(ratios) if ratios else None))


def _float(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 1e12 else None


def _add_rows(reading: Reading, rows: list[Any], ranks: int | None, graph: int | None, collective: str | None) -> None:
    """Turn sizes and times into rows, if the bandwidths are those of an all-reduce."""
    ratios = [ratio for _, _, ratio in rows if ratio is not None]
    ratio = sorted(ratios)[len(ratios) // 2] if ratios else None
    if ranks is None and ratio is not None and 1 <= ratio < 2:
        ranks = round(2 / (2 - ratio))
    if ranks == 1:
        reading.dropped["rows of one rank, which communicates with nobody"] += len(rows)
        return
    expected = 2 * (ranks - 1) / ranks if ranks else None
    if collective is not None and not collective.startswith("all_reduce"):
        reading.dropped[f"rows of {re.sub(r'[^a-z_]', '', collective)[:40]}"] += len(rows)
        return
    if ratio is not None and expected is not None and abs(ratio / expected - 1) > 0.02:
        reading.dropped["rows whose bandwidths are not those of an all-reduce"] += len(rows)
        return
    if collective is None and ratio is None and rows:
        reading.questions.append("the table has neither a name nor bandwidths: was it all_reduce_perf? It is left out")
        return
    apart = sorted(abs(math.log(a / b)) for _, (a, b), _ in rows if a and b)
    # The two sides differ by sqrt(2) spreads; 1.4826 medians of a normal are one.
    noise = 1.4826 * apart[len(apart) // 2] / math.sqrt(2) if len(apart) >= 4 else 0.02
    sound = [row for row in rows if not all(row[1]) or abs(math.log(row[1][0] / row[1][1])) <= max(0.25, 6 * noise)]
    reading.dropped["sizes whose two sides differ by far more than the others"] += len(rows) - len(sound)
    rows = sound
    if ranks:
        reading.system["num_gpus"] = ranks
    for size, times, _ in sorted(rows, key=lambda row: row[0]):
        for side, ms in zip(("out-of-place", "in-place"), times, strict=True):
            if ms is None or size < 1:
                reading.dropped["sizes without a time"] += 1
                continue
            row: dict[str, Any] = {"size_bytes": size, "time_ms": rounded(ms)}
            row |= {"sd_ms": rounded(max(noise, 0.005) * ms, 3), "samples": 1}
            row |= {"num_gpus": ranks} if ranks else {}
            row |= {"in_graph": graph > 0} if graph is not None else {}
            reading.allreduce.append(row | {"note": f"{reading.source}: {side}"})
            reading.used["sizes"] += side == "out-of-place"
    if graph == 0:
        reading.caveats.append(f"{reading.source}: measured outside CUDA graphs, so launch overhead is in the times")


def _version(code: int) -> str:
    """Spell an NCCL version: 10000 * major + 100 * minor + patch from 2.9 on, 1000 * major before."""
    base = 10000 if code >= 10000 else 1000
    return f"{code // base}.{code % base // 100}.{code % 100}"


def tests_json(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read the JSON of nccl-tests. Of the environment that it holds only variables that tune NCCL are looked at."""
    for document in documents:
        config = mapping(document, "config")
        devices = [d for d in sequence(config, "devices") if isinstance(d, dict)]
        ranks = len([d for d in devices if d.get("group", 0) == devices[0].get("group", 0)]) or None
        names = [d["device_info"] for d in devices if isinstance(d.get("device_info"), str)]
        if names:
            reading.system["gpu"] = gpu_name(names[0])
        for item in sequence(document, "env"):
            name, _, value = item.partition("=") if isinstance(item, str) else ("", "", "")
            if tuning_variable(name, value):
                reading.env[name] = value
                reading.saw("nccl_setting", f"{name}={value}", "env", ranks)
        if (version := whole(document, "nccl_version", high=10**6)) is not None:
            reading.saw("nccl_setting", f"NCCL {_version(version)}", "nccl_version")
        rows: list[Any] = []
        for result in sequence(document, "results"):
            size = whole(result, "size", high=10**15)
            sides = [mapping(result, side) for side in ("out_of_place", "in_place")] if size else []
            if not sides or result.get("redop") in ("none", None, []):
                reading.dropped["results of other collectives, or without a size"] += 1
                continue
            if any("cpu_time" in side for side in sides):
                reading.dropped["results in CPU time"] += 1
                continue
            times = [t / 1e3 if (t := number(side, "time")) else None for side in sides]  # in microseconds
            bandwidths = [(number(side, "alg_bw"), number(side, "bus_bw")) for side in sides]
            pairs = zip(times, bandwidths, strict=True)
            if size and any(ms and alg and abs(size / ms / 1e6 / alg - 1) > 0.02 for ms, (alg, _) in pairs):
                reading.dropped["results whose time and bandwidth contradict each other"] += 1
                continue
            ratios = [bus / alg for alg, bus in bandwidths if alg and bus]
            rows.append((size, (times[0], times[1]), sum(ratios) / len(ratios) if ratios else None))
        _add_rows(reading, rows, ranks, whole(config, "graph", low=0), None)


_SET = re.compile(rb"(NCCL_\w+) set (?:by environment )?to (\S+)")
_NCCL_VERSION = re.compile(rb"NCCL version (\d+\.\d+(?:\.\d+)?)")
_CHANNELS = re.compile(rb"(\d{1,4}) coll channels,(?: \d+ collnet channels,)?(?: (\d{1,4}) nvls channels,)?")
_COMPLETE = re.compile(rb"rank (\d{1,6}) nranks (\d{1,6}) .*Init COMPLETE")
_CHOICE = re.compile(
    rb"(?:(\w+): )?(\d{1,15}) Bytes -> Algo (\w+) proto (\w+)(?: channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\})?"
)
_LINK = re.compile(rb" via ([A-Z0-9]{2,8})(?:/(CUMEM|IPC|direct pointer))?")
_PROCESS = re.compile(rb"(\S+:\d+):\d+ \[")


class NcclDebug:
    """Reads `NCCL INFO` lines: settings, channels, communicators and choices by size."""

    def __init__(self, source: str, given: Given) -> None:
        self.reading = Reading(source=source, kind="NCCL debug log")
        self._settings: dict[tuple[str, str], set[bytes]] = {}
        self._said: set[bytes] = set()
        self._set_by: dict[bytes, set[bytes]] = {}
        self._choices: dict[tuple[str, int], str] = {}
        self._counted_by: dict[bytes, tuple[Counter[bytes], bytes]] = {}
        self._channels: Counter[bytes] = Counter()
        self._ranks: dict[int, set[int]] = {}
        self._version = b""
        self._links: Counter[bytes] = Counter()
        self._first = 0
        self._cut = 0

    @property
    def seen(self) -> bool:
        """Whether any line was NCCL's."""
        return self._first > 0

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor."""
        return {b"NCCL INFO ": self._info}

    def line(self, raw: bytes, place: int) -> None:
        """Take a whole line of a text that another reader reads."""
        at = raw.find(b"NCCL INFO ")
        if at >= 0:
            self._info(raw[:at], raw[at:], place, True)

    def _info(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        self._first = self._first or line
        # Every rank and every call says the same: what was read once is not read again.
        if text in self._said:
            return
        if complete and (processes := self._set_by.get(text)) is not None:
            processes.add(_process(prefix))
            return
        if (counted := self._counted_by.get(text)) is not None:
            counts, words = counted
            counts[words] += 1
            return
        plain = strip_ansi(text)
        # Plain substrings first, the most frequent line before the others: a run prints thousands of connections.
        at = plain.find(b" via ")
        if at >= 0 and (found := _LINK.match(plain, at)):
            self._count(text, self._links, found[1] if found[2] is None else found[1] + b"/" + found[2])
            return
        if b" set " in plain and (found := _SET.search(plain)):
            self._set(prefix, text, found, complete or len(plain) > found.end())
            return
        if b"coll channels" in plain and (found := _CHANNELS.search(plain)):
            words = found[1] + b" channels of collectives"
            self._count(text, self._channels, words + (b", " + found[2] + b" of NVLS" if found[2] is not None else b""))
            return
        if b" -> Algo " in plain and (found := _CHOICE.search(plain)):
            self._choose(found)
        elif b"NCCL version" in plain and (found := _NCCL_VERSION.search(plain)):
            self._version = found[1]
        elif b"Init COMPLETE" in plain and (found := _COMPLETE.search(plain)):
            self._ranks.setdefault(int(found[2]), set()).add(int(found[1]))
        if len(self._said) < MAX_KINDS:
            self._said.add(text)

    def _count(self, text: bytes, counts: Counter[bytes], words: bytes) -> None:
        counts[words] += 1
        if len(self._counted_by) < MAX_KINDS:
            self._counted_by[text] = counts, words

    def _set(self, prefix: bytes, text: bytes, found: re.Match[bytes], ended: bool) -> None:
        name, value = found[1].decode(), found[2].rstrip(b".,").decode("utf-8", "replace")
        if not ended or not tuning_variable(name, value):
            self.reading.dropped["variables that name no tuning, or cut off"] += 1
            return
        processes = self._settings.setdefault((name, value), set())
        processes.add(_process(prefix))
        if len(self._set_by) < MAX_KINDS:
            self._set_by[text] = processes

    def _choose(self, found: re.Match[bytes]) -> None:
        function = (found[1] or b"").decode("ascii", "replace")
        algorithm, protocol = _word(found[3], ALGORITHMS), _word(found[4], PROTOCOLS)
        if algorithm is None or protocol is None or len(self._choices) >= MAX_DECISIONS:
            return
        words = f"{algorithm} {protocol}"
        if found[5] is not None:
            words += f", channels {int(found[5])}-{int(found[6])}"
        # Older spellings name no function; they do not replace one that does.
        if function or ("AllReduce", int(found[2])) not in self._choices:
            self._choices.setdefault((function or "collective", int(found[2])), words)

    def into(self, reading: Reading) -> bool:
        """Put what was in force into a reading; return whether anything was seen."""
        if not self._first:
            return False
        where = f"NCCL INFO from line {self._first}"
        if self._version:
            reading.saw("nccl_setting", f"NCCL {self._version.decode()}", where)
        for (name, value), processes in sorted(self._settings.items()):
            reading.saw("nccl_setting", f"{name}={value}", where, len(processes))
            reading.env.setdefault(name, value)
        for ranks, seen in sorted(self._ranks.items()):
            reading.saw("other", f"communicator of {ranks} ranks", where, len(seen))
        for words, ranks in self._channels.items():
            reading.saw("other", words.decode(), where, ranks)
        for words, count in sorted(self._links.items()):
            reading.saw("other", f"connections via {words.decode()}", where, None, f"{count} lines")
        for (function, size), choice in sorted(self._choices.items()):
            reading.saw("nccl_setting", f"{function} of {size} bytes: {choice}", where)
        if any(function == "AllReduce" for function, _ in self._choices):
            reading.saw("allreduce_implementation", "NCCL for the sizes that it reports a choice for", where)
        reading.dropped.update(self.reading.dropped)
        return True

    def finish(self) -> Reading | None:
        """Return what was in force; None if no line was NCCL's."""
        reading = Reading(source=self.reading.source, kind=self.reading.kind)
        return reading if self.into(reading) else None


def _process(prefix: bytes) -> bytes:
    """Return host and process of a line, which tell its rank from the others."""
    found = _PROCESS.search(prefix)
    return found[1] if found is not None else b""


def _word(text: bytes, names: tuple[str, ...]) -> str | None:
    """Return the name of an algorithm or protocol that is printed as a name or as its number."""
    word = text.decode("ascii", "replace").upper()
    if word.isdigit() and len(word) < 3:
        return names[int(word)] if int(word) < len(names) else None
    return word if word in names else None
