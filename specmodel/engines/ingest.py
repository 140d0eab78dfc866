"""From paths to one calibration: each source opened, recognised and read, then merged."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Protocol

from specmodel import documents
from specmodel.calibration import Calibration
from specmodel.engines import (
    llama_bench,
    llamacpp,
    llamacpp_data,
    nccl,
    profilers,
    prometheus,
    sglang_data,
    sglang_live,
    sglang_metrics,
    sglang_tables,
    trtllm,
    vllm_data,
)
from specmodel.engines.merge import calibration_of
from specmodel.engines.reading import Given, Reading
from specmodel.engines.recognise import FAMILIES, format_of, logged
from specmodel.engines.sglang_log import SglangLog
from specmodel.engines.stream import Handler, Source, failure, json_items, open_source, read_records, whole_text
from specmodel.engines.unwrap import records_of, without_preamble, without_utf16
from specmodel.engines.vllm_log import VllmLog
from specmodel.io import from_dict

__all__ = ["ingest", "read_opened", "read_sources"]

NCCL_ALONE_BLOCKS = 256
"""Blocks (64 MiB) after which a log of NCCL's lines in which no engine has spoken is taken for NCCL's alone."""

_Scrapes = list[tuple[str, str, prometheus.Scrape]]
JsonReader = Callable[[Reading, Iterable[Any], Given], None]


class _LogReader(Protocol):
    @property
    def sure(self) -> bool: ...

    def handlers(self) -> dict[bytes, Handler]: ...

    def finish(self) -> Reading | None: ...


_LOGS: dict[str, tuple[Callable[[str, Given], _LogReader], ...]] = {
    "sglang": (SglangLog,),
    "vllm": (VllmLog, vllm_data.VllmOffline),
    "trtllm": (trtllm.TrtllmLog,),
    "llamacpp": (llamacpp.LlamaLog,),
}

_BEGINNINGS = {"sglang": b"sglang:", "vllm": b"vllm:", "trtllm": b"trtllm_", "llamacpp": b"llamacpp:"}
"""How the names of an engine's metrics begin."""

_JSON: dict[str, tuple[str, JsonReader]] = {
    "sglang-server-info": ("SGLang server_info", sglang_data.server_info),
    "sglang-loads": ("SGLang loads", sglang_live.loads),
    "sglang-generate": ("SGLang replies", sglang_live.generate),
    "sglang-bench-speculative": ("SGLang bench_speculative", sglang_data.bench_speculative),
    "sglang-bench-one-batch": ("SGLang bench_one_batch_server", sglang_data.bench_one_batch),
    "sglang-bench-serving": ("SGLang bench_serving", sglang_data.bench_serving),
    "sglang-dspark-table": ("SGLang step-time table", sglang_tables.dspark_table),
    "sglang-dspark-records": ("SGLang step-time records", sglang_tables.dspark_records),
    "sglang-schedule": ("SGLang adaptive configuration", sglang_tables.adaptive_schedule),
    "vllm-bench": ("vLLM bench serve", vllm_data.bench_serve),
    "trtllm-metrics": ("TensorRT-LLM iteration records", trtllm.iterations),
    "trtllm-bench": ("trtllm-bench report", trtllm.bench_report),
    "llamacpp-bench": ("llama-bench", llama_bench.bench),
    "llamacpp-timings": ("llama.cpp timings", llamacpp_data.timings),
    "nccl-json": ("nccl-tests JSON", nccl.tests_json),
}

_SCRAPES: dict[str, tuple[str, Callable[[Reading, prometheus.Scrape, Given], None]]] = {
    "sglang-prometheus": ("SGLang metrics", sglang_metrics.metrics),
    "vllm-prometheus": ("vLLM metrics", vllm_data.metrics),
    "trtllm-prometheus": ("TensorRT-LLM metrics", trtllm.metrics),
    "llamacpp-prometheus": ("llama.cpp metrics", llamacpp_data.metrics),
}


def ingest(
    paths: Sequence[str], given: Given, name: str, family: str | None = None
) -> tuple[Calibration, list[Reading]]:
    """Read sources into one calibration.

    Parameters
    ----------
    paths : sequence of str
        Files, compressed or not; ``-`` is stdin.
    given : Given
        What the user states because the sources do not.
    name : str
        The calibration's name.
    family : str, optional
        One of `FAMILIES`, where the content should not decide.

    Returns
    -------
    calibration : Calibration
    readings : list of Reading
        What each source gave, what was left out and what is open.

    Raises
    ------
    CalibrationError
        A source that cannot be read or recognised, sources that contradict each other, or nothing measured.
    """
    readings = read_sources(paths, given, family)
    return from_dict(calibration_of(readings, given, name), source=name), readings


def read_sources(paths: Sequence[str], given: Given, family: str | None = None) -> list[Reading]:
    """Open and read each source; two scrapes of one process count as one source, by their difference.

    Raises
    ------
    CalibrationError
        A source that cannot be read or recognised.
    """
    return read_opened((open_source(path) for path in paths), given, family)


def read_opened(sources: Iterable[Source], given: Given, family: str | None = None) -> list[Reading]:
    """Read opened sources, as `read_sources` does, and close each."""
    readings: list[Reading] = []
    scrapes: _Scrapes = []
    for source in sources:
        with closing(source):
            kind, source = _recognised(source, family)
            if kind in _SCRAPES:
                text = whole_text(source)
                if not logged(text.encode()):
                    found_scrapes = prometheus.parse(text)
                    if not found_scrapes:
                        raise failure(source.name, "series with finite values", "none", "scrape it again")
                    scrapes += [(kind, source.name, scrape) for scrape in found_scrapes]
                    continue
                # A scrape at the beginning of a log.
                kind, source = "log", replace(source, head=text.encode(), stream=io.BytesIO())
            found = _read(source, kind, given, family, scrapes)
        for reading in found:
            reading.caveats += [f"{source.name}: {warning}" for warning in source.warnings]
        readings += found
    return readings + _read_scrapes(scrapes, given)


def _recognised(source: Source, family: str | None) -> tuple[str, Source]:
    """Return a source's format, and the source without what carried it."""
    source = without_utf16(source)
    for _ in range(3):  # a structured logger's records may themselves stand in a container's
        kind = format_of(source.head, source.name, family)
        if kind != "log":
            return kind, source
        document = without_preamble(source.head)
        if document is not source.head and format_of(document, source.name, None) != "log":
            source = replace(source, head=document)
        elif (carried := records_of(source)) is not None:
            source = carried
        else:
            break
    return format_of(source.head, source.name, family), source


def _read(source: Source, kind: str, given: Given, family: str | None, scrapes: _Scrapes) -> list[Reading]:
    if kind == "log":
        return _read_log(source, given, family, scrapes)
    reading = Reading(source=source.name, kind=kind)
    if kind in _JSON:
        reading.kind, read = _JSON[kind]
        read(reading, _mappings(json_items(source), reading), given)
    elif kind == "llamacpp-bench-text":
        reading.kind = "llama-bench"
        llama_bench.bench(reading, llama_bench.rows_of_text(whole_text(source)), given)
    elif kind == "nccl-table":
        reading.kind = "nccl-tests table"
        debug = nccl.NcclDebug(source.name, given)
        nccl.tests_table(reading, source, debug)
        debug.into(reading)
    elif kind == "nsys":
        reading.kind = "nsys stats"
        profilers.nsys(reading, source, given)
    elif kind == "torch":
        reading.kind = "PyTorch profiler trace"
        profilers.torch_trace(reading, source, given)
    else:
        text = whole_text(source)
        document, faults = documents.parse(text, source.name)
        if faults or not isinstance(document, dict):
            raise failure(source.name, "a mapping of keys, each stated once", "something else", "check the file")
        if kind == "inferencex":
            reading.kind = "InferenceX golden acceptance lengths"
            profilers.golden(reading, document, text, given)
        else:
            reading.kind = "TensorRT-LLM configuration"
            trtllm.configuration(reading, document, given)
    return [reading]


def _mappings(items: Iterable[Any], reading: Reading) -> Iterable[Any]:
    """Yield what readers of JSON can take: mappings, and lists of them as `/generate` returns for a batch."""
    for item in items:
        if isinstance(item, dict):
            yield item
        elif isinstance(item, list):
            yield from (inner for inner in item if isinstance(inner, dict))
        else:
            reading.dropped["values that are no mapping"] += 1


def _read_log(source: Source, given: Given, family: str | None, scrapes: _Scrapes) -> list[Reading]:
    """Read a log of any engine; what NCCL printed among it belongs to the engine whose log it is.

    Scrapes that were pasted into it are added to `scrapes`, an nccl-tests run is a reading of its own.
    """
    engines = {
        name: [factory(source.name, given) for factory in logs]
        for name, logs in _LOGS.items()
        if family in (None, name)
    }
    debug = nccl.NcclDebug(source.name, given)
    table = nccl.NcclTable(Reading(source=source.name, kind="nccl-tests table"))
    pasted = {name: prometheus.Pasted(_BEGINNINGS[name]) for name in engines}

    def handlers_of(names: Iterable[str]) -> dict[bytes, Handler]:
        handlers = debug.handlers() | table.handlers()
        for name in names:
            handlers |= pasted[name].handlers()
            for reader in engines[name]:
                handlers.update(reader.handlers())
        return handlers

    blocks = 0

    def one_engine() -> dict[bytes, Handler] | None:
        nonlocal blocks
        blocks += 1
        sure = [name for name, readers in engines.items() if any(reader.sure for reader in readers)]
        if debug.seen and not sure and blocks >= NCCL_ALONE_BLOCKS:
            source.warnings.append("begins with very many lines of NCCL and none of an engine: only NCCL's are read")
            return handlers_of(())
        return handlers_of(sure) if len(sure) == 1 else None

    read_records(source, handlers_of(engines), one_engine)
    readers = [reader for members in engines.values() for reader in members]
    found = [reading for reader in readers if (reading := reader.finish()) is not None]
    if len(found) == 1:
        debug.into(found[0])
    elif (alone := debug.finish()) is not None:
        found.append(alone)
    if (measured := table.finish()) is not None:
        found.append(measured)
    samples = [
        (f"{name}-prometheus", source.name, scrape) for name, part in pasted.items() for scrape in part.scrapes()
    ]
    scrapes += samples
    if not found and not samples:
        known = FAMILIES[family] if family is not None else ", ".join(FAMILIES.values())
        remedy = "name a log, a result or a scrape of one of these, or say which with --from"
        raise failure(source.name, f"something of {known}", "nothing of the kind", remedy)
    return found


def _read_scrapes(scrapes: _Scrapes, given: Given) -> list[Reading]:
    readings = []
    pending = list(scrapes)
    while pending:
        kind, name, scrape = pending.pop(0)
        label, read = _SCRAPES[kind]
        for i, (other_kind, other_name, other) in enumerate(pending):
            pair = prometheus.difference(scrape, other) if other_kind == kind else None
            if pair is not None:
                scrape, name = pair, name if name == other_name else f"{name} and {other_name}"
                del pending[i]
                break
        reading = Reading(source=name, kind=label)
        if scrape.damaged_lines:
            reading.dropped["damaged lines"] += scrape.damaged_lines
        if not scrape.differenced:
            reading.caveats.append(f"{name}: one scrape, so all since the start of the server; two scrapes are better")
        read(reading, scrape, given)
        readings.append(reading)
    return readings
