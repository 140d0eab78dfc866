"""Several readings into one calibration: facts that agree, rows under their communication setting, one vocabulary.

What two sources state differently is a question to the user, not a choice of this module: sources of two deployments do
not belong into one file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from specmodel.calibration import SCHEMA
from specmodel.engines.pinned import without_pinned
from specmodel.engines.reading import Given, Reading, Shape, rounded
from specmodel.engines.redact import sweep
from specmodel.errors import CalibrationError, Fault

__all__ = ["calibration_of", "setting_name"]

TABLES = ("verify", "draft", "allreduce", "prefill", "cycles")
SAME_CONTEXT = 1.5
"""Contexts within this factor of each other count as one, so that plain and speculative rows of one sweep compare."""
ENGINE_DEFAULTS = {"sglang": {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}}
"""Variables that an engine sets itself: no setting of the user's."""


def calibration_of(readings: Sequence[Reading], given: Given, name: str) -> dict[str, Any]:
    """Merge readings into the mapping of a calibration file.

    Parameters
    ----------
    readings : sequence of Reading
        One for each source; their questions grow by what the merged whole cannot place.
    given : Given
        What the user states.
    name : str
        The calibration's name.

    Raises
    ------
    CalibrationError
        Sources contradict each other, or nothing is left to write.
    """
    without_pinned(readings)
    system, model = _agreed(readings, "system"), _agreed(readings, "model")
    if given.gpu is not None:
        system["gpu"] = given.gpu
    shapes = {r.shape for r in readings if r.shape is not None and r.shape.num_steps}
    shape = given.shape or (shapes.pop() if len(shapes) == 1 else None)
    for reading in readings:
        _place(reading, shape, given)
    comm, names = _settings(readings, given)
    out: dict[str, Any] = {"schema": SCHEMA, "name": name}
    tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    acceptance: list[dict[str, Any]] = []
    for reading, setting in zip(readings, names, strict=True):
        for table in TABLES:
            rows = [row for row in getattr(reading, table) if _possible(row)]
            reading.dropped["times that cannot be"] += len(getattr(reading, table)) - len(rows)
            tables[table] += [_placed(row, table, setting, given) for row in rows]
        acceptance += [row | ({"workload": given.workload} if given.workload else {}) for row in reading.acceptance]
    _one_context([*tables["cycles"], *tables["verify"], *tables["draft"]], given)
    out["provenance"] = _provenance(readings)
    out["system"], out["model"] = system, model
    if len(comm) > 1 or comm["default"]:
        out["comm"] = comm
    workloads = sorted({row["workload"] for row in acceptance if row.get("workload", "default") != "default"})
    if workloads:
        out["workloads"] = {workload: {} for workload in workloads}
    out["measurements"] = {table: rows for table, rows in tables.items() if rows}
    out["acceptance"] = _pooled(acceptance)
    out["evidence"] = [row for reading in readings for row in reading.evidence]
    kept = {key: value for key, value in out.items() if value or key in ("schema", "name")}
    if not {"measurements", "acceptance", "evidence"} & kept.keys():
        raise _nothing(readings)
    return dict(sweep(kept))


def _nothing(readings: Sequence[Reading]) -> CalibrationError:
    faults = []
    for reading in readings:
        why = [*reading.questions, *(f"{count} x {reason}" for reason, count in reading.dropped.items() if count)]
        got = "; ".join(why) or f"a {reading.kind} without measurements"
        faults.append(
            Fault(path=reading.source, must="something measured", got=got, remedy="see `specmodel ingest -h`")
        )
    return CalibrationError.of(faults, "ingest")


def _agreed(readings: Sequence[Reading], part: str) -> dict[str, Any]:
    """Unite the facts of all readings; what is stated twice must be the same.

    Raises
    ------
    CalibrationError
        Two sources differ.
    """
    merged: dict[str, Any] = {}
    said: dict[str, str] = {}
    faults, unlike = [], list[Reading]()
    # The server's own word on the number of GPUs counts; a link test may have used fewer.
    for reading in sorted(readings, key=lambda r: "engine" not in r.system):
        for key, value in getattr(reading, part).items():
            if value is None:
                continue
            before = merged.get(key)
            if before is None or before == value:
                merged[key] = value
                said.setdefault(key, reading.source)
            elif key == "gpu" and (longer := _same_gpu(before, value)):
                merged[key] = longer
            elif key == "num_gpus" and "engine" not in reading.system:
                continue
            elif key == "method" and "none" in (before, value):
                merged[key] = before if value == "none" else value
            elif key in ("cuda_graph_sizes", "cuda_graph_unit"):
                unlike.append(reading)
            else:
                must = f"one {key.replace('_', ' ')}, as {said[key]} says: {before}"
                remedy = "ingest the sources of each deployment into a file of its own"
                faults.append(Fault(path=reading.source, must=must, got=str(value)[:80], remedy=remedy))
    if faults:
        raise CalibrationError.of(faults, "ingest")
    for reading in unlike:
        # Padding differs between the sources: no one list is right for all rows.
        merged.pop("cuda_graph_sizes", None)
        merged.pop("cuda_graph_unit", None)
        caveat = f"{reading.source}: captured other sizes than the sources before it; sizes are left out"
        reading.caveats = list(dict.fromkeys([*reading.caveats, caveat]))
    return merged


def _same_gpu(one: str, other: str) -> str | None:
    """Return the longer of two names of one GPU: the words of the shorter all stand in it."""
    short, long = sorted((one, other), key=len)
    return long if set(short.upper().split()) <= set(long.upper().split()) else None


def _place(reading: Reading, shape: Shape | None, given: Given) -> None:
    """Turn what a source could not place by itself into rows, with what the others or the user state."""
    for row in reading.shapeless:
        table = row["table"]
        columns = {key: value for key, value in row.items() if key != "table"}
        if shape is None:
            question = "the draft shape is not stated: say --num-steps (and --topk, --num-draft-tokens of a tree)"
            reading.questions.append(question)
            reading.dropped[f"rows of {table} without a draft shape"] += 1
        elif columns.get("acceptance_length", 1.0) > shape.num_steps + 1.005:
            reading.dropped["acceptance length impossible for its steps"] += 1
        elif table == "cycles" or shape.num_steps:
            getattr(reading, table).append(shape.row() | columns)
    spans = _whole_drafts(reading.spans)
    for span in spans:
        part, batch = span["part"], given.batch or span.get("batch")
        own = span.get("shape") or shape
        time = {key: span[key] for key in ("time_ms", "sd_ms", "samples", "note")}
        if own is None or batch is None:
            missing = [] if own is not None else ["--num-steps"]
            missing += [] if batch is not None else ["--batch"]
            reading.questions.append(
                f"a {part} time of {span['time_ms']:g} ms was found; to use it say {' and '.join(missing)}"
            )
            reading.saw("other", f"{part} {span['time_ms']:g} ms on the GPU", span["note"].partition(": ")[2])
        elif part == "verify":
            tokens = round(batch * own.verify_tokens)
            reading.verify.append({"tokens": tokens, "batch": batch} | time)
        else:
            reading.draft.append(own.row() | {"batch": batch} | time)
    reading.questions[:] = list(dict.fromkeys(reading.questions))


def _whole_drafts(spans: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the draft extension, which is the first draft pass of a cycle, to the draft steps."""
    out = [dict(span) for span in spans if span["part"] != "draft_extend"]
    drafts = [span for span in out if span["part"] == "draft"]
    for span in spans:
        if span["part"] != "draft_extend":
            continue
        if len(drafts) != 1:
            out.append({**span, "part": "draft"})
            continue
        (draft,) = drafts
        draft["note"] += f"; draft {draft['time_ms']:g} ms and draft extend {span['time_ms']:g} ms"
        error = math.hypot(*(s["sd_ms"] / math.sqrt(s["samples"]) for s in (draft, span)))
        draft["time_ms"] = rounded(draft["time_ms"] + span["time_ms"])
        draft["sd_ms"], draft["samples"] = rounded(error, 3), 1
    return out


def setting_name(env: dict[str, str], flags: Sequence[str]) -> str:
    """Name a communication setting by its values: ring-ll-sys, disable-custom-all-reduce."""
    telling = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_LEVEL")
    words = [env[variable] for variable in telling if variable in env]
    rest = sorted(variable for variable in env if variable not in telling)
    words += [f"{variable.removeprefix('NCCL_')}-{env[variable]}" for variable in rest]
    words += [flag.lstrip("-") for flag in flags]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")[:60] or "default"


def _settings(readings: Sequence[Reading], given: Given) -> tuple[dict[str, Any], list[str]]:
    """Return every communication setting by name, and the name of each reading's."""
    stated = [_setting(reading) for reading in readings]
    known = {
        setting_name(*setting): setting
        for setting, reading in zip(stated, readings, strict=True)
        if reading.settings_known
    }
    comm: dict[str, Any] = {"default": {}}
    said: dict[str, Any] = {}
    names = []
    for reading, (env, flags) in zip(readings, stated, strict=True):
        if not reading.settings_known and "engine" in reading.system and len(known) == 1:
            # Counters and benchmarks of a server whose log says what it ran with.
            ((env, flags),) = known.values()
        name = given.comm or setting_name(env, flags)
        setting = ({"env": env} if env else {}) | ({"flags": flags} if flags else {})
        if (setting or reading.settings_known) and said.setdefault(name, setting) != setting:
            must = f"one communication setting under the name {name}"
            fault = Fault(path=reading.source, must=must, got="another", remedy="give --comm to one source at a time")
            raise CalibrationError.of([fault], "ingest")
        comm[name] = said.get(name, {})
        names.append(name)
    return comm, names


def _setting(reading: Reading) -> tuple[dict[str, str], list[str]]:
    own = ENGINE_DEFAULTS.get(reading.system.get("engine", ""), {})
    return {name: value for name, value in reading.env.items() if own.get(name) != value}, reading.flags


def _possible(row: dict[str, Any]) -> bool:
    """Whether a row's time is one that a GPU and a network can take: a nanosecond to three hours."""
    times = [row[key] for key in ("time_ms", "cycle_ms", "tpot_ms") if key in row]
    return all(1e-6 <= t <= 1e7 for t in times) and 1e-4 <= row.get("tok_s", 1.0) <= 1e9


def _placed(row: dict[str, Any], table: str, setting: str, given: Given) -> dict[str, Any]:
    """Return a row in the order of the format, with its setting and what the user states of it."""
    out = dict(row)
    if setting != "default":
        out["comm"] = setting
    if given.workload and table == "cycles":
        out["workload"] = given.workload
    first = (
        "num_steps",
        "topk",
        "num_draft_tokens",
        "speculation",
        "tokens",
        "size_bytes",
        "batch",
        "comm",
        "workload",
    )
    order = {key: i for i, key in enumerate((*first, "context_tokens"))}
    return dict(sorted(out.items(), key=lambda item: (item[0] == "note", order.get(item[0], len(order)))))


def _one_context(rows: list[dict[str, Any]], given: Given) -> None:
    """Give rows of nearly the same context the same one, so that they compare; each keeps its own in its note."""
    if given.context_tokens is not None:
        for row in rows:
            row["context_tokens"] = given.context_tokens
        return
    stated = sorted((row for row in rows if row.get("context_tokens")), key=lambda row: int(row["context_tokens"]))
    groups: list[list[dict[str, Any]]] = []
    for row in stated:
        if groups and row["context_tokens"] <= SAME_CONTEXT * groups[-1][0]["context_tokens"]:
            groups[-1].append(row)
        else:
            groups.append([row])
    for group in groups:
        if len({row["context_tokens"] for row in group}) == 1:
            continue
        common = float(f"{math.exp(sum(math.log(row['context_tokens']) for row in group) / len(group)):.2g}")
        for row in group:
            own = row["context_tokens"]
            if own != common:
                row["note"] = f"{row.get('note', '')}; mean context {own} tokens"
            row["context_tokens"] = round(common)


def _pooled(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pool counts of one workload and draft shape; other entries stay as they are."""
    out: list[dict[str, Any]] = []
    places: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in entries:
        counts = entry.get("accepted_per_position")
        key = tuple(entry.get(k) for k in ("workload", "num_steps", "topk", "num_draft_tokens"))
        before = places.get(key)
        if (
            counts is None
            or "drafted_per_position" in entry
            or before is None
            or len(before["accepted_per_position"]) != len(counts)
        ):
            out.append(dict(entry))
            if counts is not None and "drafted_per_position" not in entry:
                places.setdefault(key, out[-1])
            continue
        before["accepted_per_position"] = [a + b for a, b in zip(before["accepted_per_position"], counts, strict=True)]
        before["drafts"] += entry["drafts"]
        if "prompts" in before and "prompts" in entry:
            before["prompts"] += entry["prompts"]
        else:
            before.pop("prompts", None)
        before["note"] = f"{before['note']}; {entry['note']}"
    for entry in out:
        entry["note"] = entry.get("note", "")[:600]
    order = {key: i for i, key in enumerate(("workload", "num_steps", "topk", "num_draft_tokens", "drafts", "prompts"))}
    return [dict(sorted(e.items(), key=lambda item: (item[0] == "note", order.get(item[0], len(order))))) for e in out]


def _provenance(readings: Sequence[Reading]) -> dict[str, Any]:
    sources = ", ".join(dict.fromkeys(f"{reading.source} ({reading.kind})" for reading in readings))
    dates = sorted(
        date for reading in readings if (date := reading.date) and re.fullmatch(r"[12]\d{3}-\d\d-\d\d", date)
    )
    caveats = [caveat for reading in readings for caveat in reading.caveats]
    for reading in readings:
        left = {reason: count for reason, count in sorted(reading.dropped.items()) if count > 0}
        if left:
            words = "; ".join(f"{count} {reason}" for reason, count in left.items())
            caveats.append(f"{reading.source}: left out: {words}")
        caveats += [f"{reading.source}: open: {question}" for question in reading.questions]
    out: dict[str, Any] = {"source": sources[:600]}
    if dates:
        out["date"] = dates[-1]
    if caveats:
        out["caveats"] = list(dict.fromkeys(caveats))
    return out
