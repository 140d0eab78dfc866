"""llama-bench: its table, CSV, SQL, JSON and JSON lines, each with the same columns by name.

A `tg` row generates token after token without speculation: its time a token is a plain pass at batch 1, at the depth of
the row and half of what it generates. A `pp` row reads a prompt and is prefill; a row that does both is neither.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from specmodel.engines.reading import Given, Reading, Shape, number, rounded, sequence, summarise, whole
from specmodel.engines.redact import gpu_name, model_name, version_of

__all__ = ["FORMAT", "bench", "rows_of_text"]

FORMAT = re.compile(
    r"(?m)^.{0,80}\|\s*model\s*\|.*\|\s*test\s*\|\s*t/s\s*\|"
    r"|^\"?build_commit\"?,.*\bavg_ts\b|^INSERT INTO \w+ \(build_commit,.*\bavg_ts\b"
)
"""Its table, its CSV, its SQL; JSON is told by its keys."""

_TEST = re.compile(r"(?:pp ?(?P<pp>\d{1,7}))?(?:\s*\+\s*)?(?:tg ?(?P<tg>\d{1,7}))?(?:\s*@ ?d ?(?P<depth>\d{1,9}))?")
_RATE = re.compile(r"([\d.]{1,20})(?:\s*(?:±|\+/?-)\s*([\d.]{1,20}))?")
_SEPARATOR = re.compile(r"[-:\s]+")
_BUILD = re.compile(r"^build: [0-9a-f]{6,40} \((\d{1,6})\)", re.MULTILINE)
_DEVICE = re.compile(r"Device \d+: ([^,\n]{2,60}), compute capability")
_INSERT = re.compile(r"^INSERT INTO \w+ \(([^)]*)\) VALUES \((.*)\);", re.MULTILINE)
_RESULTS = ("n_prompt", "n_gen", "n_depth", "test", "test_time", "t/s")
_RESULT = re.compile(r"(?:avg|stddev|samples)_(?:ns|ts)")
_OF_PROMPTS = ("n_batch", "n_ubatch")
"""Columns that cut a prompt into passes, and change nothing for generation."""
_TWO_SIDES = 0.02
"""Rates are means of rates, times means of times: they agree as far as repetitions do."""


def rows_of_text(text: str) -> list[dict[str, Any]]:
    """Return the rows of a table, of CSV or of SQL, by the names of their columns."""
    found = FORMAT.search(text)
    if found is None:
        return []
    if found[0].startswith("INSERT"):
        rows = []
        for names, values in _INSERT.findall(text):
            cells = next(csv.reader([values], quotechar="'", skipinitialspace=True))
            rows.append(dict(zip([name.strip() for name in names.split(",")], cells, strict=False)))
    elif "|" not in found[0]:
        rows = [dict(row) for row in csv.DictReader(io.StringIO(text[found.start() :]))]
    else:
        rows = _table(text)
    return [{key: _value(cell) for key, cell in row.items() if key is not None} for row in rows]


def _value(cell: Any) -> Any:
    try:
        return json.loads(cell) if isinstance(cell, str) and re.fullmatch(r"-?\d[\d.eE+-]*", cell) else cell
    except ValueError:
        return cell


def _table(text: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    names: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.partition("|")[2].rstrip().removesuffix("|").split("|")]
        if cells[-2:] == ["test", "t/s"]:
            names = cells
        elif names and len(cells) == len(names) and not all(_SEPARATOR.fullmatch(cell) for cell in cells):
            row: dict[str, Any] = dict(zip(names, cells, strict=True))
            test, rate = _TEST.fullmatch(row["test"]), _RATE.fullmatch(row["t/s"])
            if test is not None and rate is not None:
                row |= {"n_prompt": test["pp"] or "0", "n_gen": test["tg"] or "0", "n_depth": test["depth"] or "0"}
                row |= {"avg_ts": rate[1]} | ({"stddev_ts": rate[2]} if rate[2] else {})
            rows.append(row)
    for row in rows:
        build, device = _BUILD.search(text), _DEVICE.search(text)
        row |= ({"build_number": build[1]} if build else {}) | ({"gpu_info": device[1]} if device else {})
    return rows


def bench(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read its rows; of several configurations in one file none is chosen."""
    reading.system["engine"] = "llama.cpp"
    reading.shape = Shape(num_steps=0)
    rows = [row for row in documents if isinstance(row, dict)]
    for row in rows:
        if (build := whole(row, "build_number")) is not None:
            reading.system["engine_version"] = version_of(f"b{build}") or f"b{build}"
        if isinstance(gpu := row.get("gpu_info"), str) and gpu:
            reading.system["gpu"] = gpu_name(gpu.split(",")[0])
        if isinstance(path := row.get("model_filename"), str) and (name := model_name(path)):
            reading.model["target"] = name
        if reading.date is None and isinstance(stamp := row.get("test_time"), str):
            reading.date = stamp[:10]
    if (apart := _apart(rows)) and rows:
        reading.questions.append(
            f"the rows are of several configurations ({', '.join(apart)}): keep those of one; they are left out"
        )
        reading.dropped["rows of several configurations"] += len(rows)
        return
    for row in rows:
        _row(reading, row)


def _apart(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Name the columns, other than of tests and results, in which rows of generation differ, or of prompts alone."""
    generating = [row for row in rows if row.get("n_gen")]
    same = (*_RESULTS, *_OF_PROMPTS) if generating else _RESULTS
    compared = generating or rows
    columns = dict.fromkeys(key for row in compared for key in row if key not in same and not _RESULT.fullmatch(key))
    return [key for key in columns if len({json.dumps(row.get(key), sort_keys=True) for row in compared}) > 1]


def _row(reading: Reading, row: dict[str, Any]) -> None:
    prompt, generated, depth = (whole(row, key, low=0) for key in ("n_prompt", "n_gen", "n_depth"))
    tokens = generated or prompt
    if prompt is None or generated is None or not tokens:
        reading.dropped["rows cut off, or without a test"] += 1
        return
    if prompt and generated:
        reading.dropped["rows that read a prompt and generate: neither of the two times is told"] += 1
        return
    each, sd, samples = _time_ms(row, tokens)
    rate = number(row, "avg_ts")
    if each is None or sd > each or (rate and abs(rate * each / 1e3 - 1) > _TWO_SIDES + sd / each):
        reading.dropped["rows without a time, or whose time, spread and rate contradict each other"] += 1
        return
    where = f"{reading.source}: llama-bench {'tg' if generated else 'pp'}{tokens}"
    context = (depth or 0) + (generated // 2 if generated else 0)
    if generated:
        reading.used["rows of generation"] += 1
        columns = {"cycle_ms": rounded(each), "sd_cycle_ms": rounded(sd, 3), "samples": samples}
        note = f"{where}, a token at a time"
        reading.cycles.append({"num_steps": 0, "batch": 1, "context_tokens": context} | columns | {"note": note})
        return
    reading.used["rows of prefill"] += 1
    columns = {"time_ms": rounded(each * tokens), "sd_ms": rounded(sd * tokens, 3), "samples": samples}
    reading.prefill.append({"tokens": tokens, "context_tokens": context} | columns | {"note": where})


def _time_ms(row: dict[str, Any], tokens: int) -> tuple[float | None, float, int]:
    """Return the time of one token, the spread of one sample of it, and the number of samples."""
    each = [ns / 1e6 / tokens for ns in sequence(row, "samples_ns") if isinstance(ns, int | float) and 0 < ns < 1e18]
    if each:
        summary = summarise(each, band=2.0)
        return summary.value, summary.sd, summary.samples
    nanoseconds, rate = number(row, "avg_ns", high=1e18), number(row, "avg_ts")
    if nanoseconds:
        ms, relative = nanoseconds / 1e6 / tokens, (number(row, "stddev_ns", high=1e18) or 0.0) / nanoseconds
    elif rate:
        ms, relative = 1e3 / rate, (number(row, "stddev_ts") or 0.0) / rate
    else:
        return None, 0.0, 1
    # How often a test was repeated is not told: the spread counts as that of the mean.
    summary = summarise([ms])
    return ms, max(summary.sd, relative * ms), 1
