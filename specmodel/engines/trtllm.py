"""TensorRT-LLM: iteration logs and `/metrics` records, `trtllm-bench` reports, Prometheus counters, its YAML.

The time of an iteration is what the next record calls the previous device step; under the overlap scheduler the
record's own latency spans two loops, and a draft latency of zero means unknown.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from specmodel.engines.identities import stray_steps
from specmodel.engines.pinned import ANCHORS, pins_acceptance
from specmodel.engines.prometheus import Scrape
from specmodel.engines.reading import (
    MOST_STEPS,
    Given,
    Lengths,
    Reading,
    Samples,
    Shape,
    add_length,
    mapping,
    number,
    pooled_sd,
    rounded,
    summarise,
    whole,
)
from specmodel.engines.redact import gpu_name, model_name, version_of
from specmodel.engines.stream import Handler, strip_ansi

__all__ = ["METHODS", "TrtllmLog", "bench_report", "configuration", "iterations", "metrics"]

METHODS = {
    "eagle3": "eagle3",
    "eagle": "eagle",
    "mtp": "mtp",
    "ngram": "ngram",
    "drafttarget": "draft_model",
    "pard": "parallel",
    "dflash": "parallel",
    "sa": "ngram",
}
"""TensorRT-LLM's decoding types in the words of the calibration file."""
BAND = 1.25


class _Steps:
    """Device times by steps and batch, each told by the record after the one that it belongs to."""

    def __init__(self) -> None:
        self.times: dict[tuple[int, int], Samples] = {}
        self.contexts: dict[tuple[int, int], float] = {}
        self._place: tuple[int, int] | None = None
        self._iteration: int | None = None

    def previous(self, reading: Reading, iteration: int | None, device_ms: float | None, line: int) -> None:
        """Book the time that this record states for the one before it."""
        follows = iteration is not None and self._iteration is not None and iteration == self._iteration + 1
        if self._place is not None:
            if device_ms is not None and 0 < device_ms < 1e7 and follows:
                (self.times.get(self._place) or self.times.setdefault(self._place, Samples())).add(device_ms, line)
            else:
                reading.dropped["not timed: the next iteration does not follow, or has no device time"] += 1
        self._iteration = iteration

    def now(self, place: tuple[int, int] | None, context: float | None = None) -> None:
        """Say what this record ran: steps and batch, or None where prefill was mixed in."""
        self._place = place
        if place is not None and context:
            self.contexts[place] = context

    def rows(self, reading: Reading, what: str) -> None:
        """Put the cycles into the reading."""
        counts: Counter[int] = Counter()
        for (steps, _), samples in self.times.items():
            counts[steps] += samples.seen
        strays = stray_steps(counts)
        prior_sd = pooled_sd((s.values for s in self.times.values()), BAND)
        for (steps, batch), samples in sorted(self.times.items()):
            if steps in strays:
                reading.dropped["not timed: a lone iteration with another number of drafts"] += samples.seen
                continue
            summary = summarise(samples.values, band=BAND, prior_sd=prior_sd)
            reading.dropped["not timed: idle (far from the median of its batch)"] += summary.outliers
            reading.used["iterations"] += summary.count
            row: dict[str, Any] = {"num_steps": steps, "batch": batch}
            if (context := self.contexts.get((steps, batch))) is not None:
                row["context_tokens"] = round(context)
            row |= summary.row("cycle_ms")
            row["note"] = f"{reading.source}: median of {summary.count} iterations, {what}"
            reading.cycles.append(row)


_ITER = re.compile(rb"iter = (\d{1,12})\b")
_RANK = re.compile(rb"\s*[=:]\s*(\d+)")
_COUNT = re.compile(rb"['\"]?\s*[=:]\s*(\d{1,8})\b")
_DEVICE = re.compile(rb"\s*[=:]\s*(\d{1,9}(?:\.\d+)? ?(?:ms|us|s))\b")
_STAMP = re.compile(rb"\[(\d\d)/(\d\d)/(\d{4})-")


def _after(text: bytes, name: bytes, value: re.Pattern[bytes]) -> bytes | None:
    """Return the value that follows a name; a plain search for the name is several times faster than a pattern."""
    at = text.find(name)
    found = value.match(text, at + len(name)) if at >= 0 else None
    return found[1] if found is not None else None


def _ms(time: bytes) -> float:
    """Return milliseconds of a time with its unit."""
    value = float(time.rstrip(b" mus"))
    return value if time.endswith(b"ms") else value / 1e3 if time.endswith(b"us") else value * 1e3


class TrtllmLog:
    """Reads the lines of one iteration log, one by one."""

    def __init__(self, source: str, given: Given) -> None:
        self.reading = Reading(source=source, kind="TensorRT-LLM iteration log")
        self._steps: dict[bytes, _Steps] = {}
        self._seen = False

    @property
    def sure(self) -> bool:
        """Whether this is a log of TensorRT-LLM beyond doubt."""
        return self._seen

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor."""
        return {b"iter = ": self._line, **dict.fromkeys(ANCHORS["trtllm"], self._pinned)}

    def _pinned(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if not self.reading.pinned and pins_acceptance(strip_ansi(text)):
            self.reading.pinned = self._seen = True
            name = "TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS"
            self.reading.saw("other", f"acceptance is set by {name}", f"line {line}")

    def _line(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        text = strip_ansi(text)
        if b"host_step_time" not in text and b"states" not in text:
            return
        self._seen = True
        if self.reading.date is None and (stamp := _STAMP.search(prefix)):
            self.reading.date = b"-".join((stamp[3], stamp[1], stamp[2])).decode()
        name = _after(text, b"global_rank", _RANK) or b"0"
        steps = self._steps.get(name) or self._steps.setdefault(name, _Steps())
        found = _ITER.match(text)
        generated = _after(text, b"num_generation_tokens", _COUNT)
        scheduled = _after(text, b"num_scheduled_requests", _COUNT)
        prefilled = _after(text, b"num_ctx_requests", _COUNT)
        if found is None or generated is None or scheduled is None or prefilled is None or b"}" not in text:
            self.reading.dropped["iteration line cut off"] += 1
            steps.now(None)
            return
        tokens, requests, contexts = int(generated), int(scheduled), int(prefilled)
        device = _after(text, b"prev_device_step_time", _DEVICE)
        steps.previous(self.reading, int(found[1]), _ms(device) if device else None, line)
        if contexts or requests < 1 or tokens % requests or tokens < requests or tokens > 100 * requests:
            self.reading.dropped["not timed: prefill, or drafts of different lengths"] += 1
            steps.now(None)
            return
        steps.now((tokens // requests - 1, requests))

    def finish(self) -> Reading | None:
        """Return what the log states; None if it is none of TensorRT-LLM."""
        if not self._seen:
            return None
        self.reading.system["engine"] = "tensorrt-llm"
        self.reading.pinned = bool(self.reading.pinned)
        if self._steps:
            # Every rank prints the same iterations, where more than rank 0 prints at all.
            first = min(self._steps)
            self._steps[first].rows(self.reading, "prev_device_step_time of the next")
            steps = {place[0] for place in self._steps[first].times}
            self.reading.shape = Shape(num_steps=steps.pop()) if len(steps) == 1 else None
        return self.reading


def iterations(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read `/metrics` records: device time of each iteration without prefill, and pooled acceptance counts."""
    reading.system["engine"] = "tensorrt-llm"
    steps, pooled = _Steps(), dict[int, list[Lengths]]()
    drafts_ms: dict[tuple[int, int], Samples] = {}
    for place, record in enumerate(documents, 1):
        if not isinstance(record, dict) or "iter" not in record:
            reading.dropped["records without an iteration"] += 1
            steps.now(None)
            continue
        batching, speculation = record.get("inflightBatchingStats"), record.get("specDecodingStats")
        told = isinstance(speculation, dict) and bool(speculation)
        steps.previous(reading, whole(record, "iter", low=0), number(record, "prevDeviceStepTimeMS", high=1e7), place)
        requests = whole(batching, "numGenRequests", low=0)
        contexts = whole(batching, "numContextRequests", low=0)
        drafting = whole(speculation, "numRequestsWithDraftTokens", low=0) or 0
        drafted, accepted = (
            whole(speculation, "numDraftTokens", low=0) or 0,
            whole(speculation, "numAcceptedTokens", low=0) or 0,
        )
        if drafting:
            _pool(reading, pooled, speculation, drafting, drafted, accepted)
        if requests is None or contexts is None or contexts or requests < 1:
            reading.dropped["not timed: prefill, or no request"] += 1
            steps.now(None)
            continue
        if drafting and (drafting != requests or drafted % drafting or drafted > MOST_STEPS * drafting):
            reading.dropped["not timed: requests without drafts, or drafts of different lengths"] += 1
            steps.now(None)
            continue
        if not told and given.shape is None:
            reading.dropped["not timed: nothing is told of speculation (specDecodingStats is absent or empty)"] += 1
            steps.now(None)
            continue
        at = (drafted // drafting if drafting else given.shape.num_steps if given.shape and not told else 0, requests)
        tokens = number(record, "scheduledSumDecodeKvTokens")
        steps.now(at, tokens / requests if tokens else None)
        alone = record.get("schedulerMode") == "non_overlap" and "prevDeviceStepTimeMS" not in record
        if alone and (latency := number(record, "iterLatencyMS", high=1e7)):
            steps.times.setdefault(at, Samples()).add(latency, place)
            steps.now(None)
        if drafting and (draft := number(speculation, "iterLatencyMS", high=1e7)):
            drafts_ms.setdefault(at, Samples()).add(draft, place)
    if any(reason.startswith("not timed: nothing is told") for reason in reading.dropped) and not steps.times:
        reading.questions.append("no record tells whether it speculated: say --num-steps (0 for plain decoding)")
    steps.rows(reading, "prevDeviceStepTimeMS of the next")
    for (k, batch), samples in sorted(drafts_ms.items()):
        row = {"num_steps": k, "batch": batch} | summarise(samples.values, band=BAND).row("time_ms")
        reading.draft.append(row | {"note": f"{reading.source}: specDecodingStats.iterLatencyMS (two-model engine)"})
    for k, (lengths,) in sorted(pooled.items()):
        note = f"{reading.source}: 1 + accepted / requests, pooled over {lengths.count} iterations"
        reading.acceptance.append(lengths.row(Shape(num_steps=k)) | {"note": note})
    reading.shape = Shape(num_steps=next(iter(pooled))) if len(pooled) == 1 else None


def _pool(
    reading: Reading, pooled: dict[int, list[Lengths]], stats: Any, drafting: int, drafted: int, accepted: int
) -> None:
    stated = number(stats, "acceptanceLength")
    if (
        accepted > drafted
        or drafted % drafting
        or drafted > MOST_STEPS * drafting
        or (stated and abs(stated - 1 - accepted / drafting) > 0.006)
    ):
        reading.dropped["speculation counts that contradict each other"] += 1
        return
    lengths = pooled.setdefault(drafted // drafting, [Lengths()])[0]
    lengths.add(1 + accepted / drafting, drafting)
    reading.used["rounds"] += drafting


def bench_report(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read a `trtllm-bench` report: time per token and pooled acceptance at the mean concurrency."""
    for document in documents:
        system: dict[str, Any] = {"engine": "tensorrt-llm"}
        engine, world, machine = (mapping(document, key) for key in ("engine", "world_info", "machine"))
        if isinstance(stated := engine.get("version"), str) and (version := version_of(stated)) is not None:
            system["engine_version"] = version
        for key, name in (("tensor_parallel", "tp_size"), ("num_gpus", "world_size"), ("expert_parallel", "ep_size")):
            if (size := whole(world, name)) is not None:
                system[key] = size
        if isinstance(gpu := machine.get("name"), str) and gpu:
            system["gpu"] = gpu_name(gpu)
        reading.system.update(system)
        path = engine.get("model_path") or engine.get("model")
        if isinstance(path, str) and (short := model_name(path)):
            reading.model["target"] = short
        stats = document.get("decoding_stats")
        if stats is None and given.shape is None:
            # From 1.0 on a report of a speculating run has them; before, none has.
            if not re.match(r"[1-9]", str(system.get("engine_version", "0"))):
                question = "the report has no decoding_stats: say --num-steps (0 for plain decoding); it is left out"
                reading.questions.append(question)
                continue
            reading.caveats.append(f"{reading.source}: no decoding_stats, so this is taken for plain decoding")
        shape, length = _bench_acceptance(reading, stats, given)
        requests, streaming = mapping(document, "request_info"), mapping(document, "streaming_metrics")
        tpot = number(streaming, "avg_ptpot_ms", "avg_tpot_ms")
        batch = given.batch or number(requests, "avg_num_concurrent_requests")
        throughput = number(mapping(document, "performance"), "system_output_throughput_tok_s")
        if tpot and throughput and batch and not 0.3 <= throughput * tpot / 1e3 / batch <= 1.5:
            reading.questions.append(
                f"{throughput:g} tok/s, {tpot:g} ms a token and {batch:g} concurrent requests do not belong together; "
                "the report's speed is left out"
            )
            continue
        if shape is None or tpot is None or batch is None or (shape.num_steps and length is None):
            reading.dropped["report without time per token, concurrency or draft shape"] += 1
            continue
        row: dict[str, Any] = shape.row() | {"batch": max(rounded(batch), 1.0)}
        inputs, outputs = number(requests, "avg_input_length"), number(requests, "avg_output_length")
        if inputs and outputs:
            row["context_tokens"] = round(inputs + outputs / 2)
        if length is not None and shape.num_steps:
            row["acceptance_length"] = rounded(length, 7)
        reading.used["reports"] += 1
        note = f"{reading.source}: streaming_metrics, time per token after the first"
        reading.cycles.append(row | {"tpot_ms": tpot, "note": note})


def _bench_acceptance(reading: Reading, stats: Any, given: Given) -> tuple[Shape | None, float | None]:
    """Return the draft shape and the pooled length: steps from what requests' lengths and rates have in common."""
    if not isinstance(stats, dict):
        return given.shape or Shape(num_steps=0), None
    if isinstance(mode := stats.get("mode"), str) and mode.lower() in METHODS:
        reading.model["method"] = METHODS[mode.lower()]
    tables = [stats.get(f"{name}_percentiles") for name in ("acceptance_length", "draft_acceptance_rate")]
    drafted = number(stats.get("num_draft_tokens_percentiles"), "average")
    accepted = number(stats.get("num_accepted_draft_tokens_percentiles"), "average", low=-1)
    # A request's length is 1 + steps * rate; so are the percentiles and averages of the two.
    ratios = []
    for key in ("p50", "p90", "average"):
        length, rate = number(tables[0], key), number(tables[1], key)
        if length is not None and rate:
            ratios.append((length - 1) / rate)
    steps = round(sum(ratios) / len(ratios)) if ratios else 0
    if ratios and (steps < 1 or any(abs(ratio / steps - 1) > 0.03 for ratio in ratios)):
        steps = 0
    shape = given.shape or (Shape(num_steps=steps) if steps else None)
    if shape is None or not drafted or accepted is None or accepted > drafted:
        reading.questions.append("the report's draft shape does not follow from its percentiles: say --num-steps")
        return None, None
    mean = number(tables[0], "average")
    length = 1 + shape.num_steps * accepted / drafted
    if mean is not None and abs(mean / length - 1) > 0.3:
        reading.questions.append(
            f"accepted over drafted tokens say {length:.3g} tokens a cycle, the mean over requests {mean:.3g}; "
            "the acceptance of the report is left out"
        )
        return None, None
    return shape, length


def configuration(reading: Reading, document: Any, given: Given) -> None:
    """Read the YAML of `trtllm-serve`: draft shape, drafter and captured sizes; nothing measured."""
    reading.system["engine"] = "tensorrt-llm"
    speculation, graphs = document.get("speculative_config"), document.get("cuda_graph_config")
    if isinstance(speculation, dict):
        if isinstance(kind := speculation.get("decoding_type"), str) and kind.lower() in METHODS:
            reading.model["method"] = METHODS[kind.lower()]
        draft = speculation.get("speculative_model") or speculation.get("speculative_model_dir")
        if isinstance(draft, str) and (short := model_name(draft)):
            reading.model["draft"] = short
        steps = whole(speculation, "max_draft_len", "num_nextn_predict_layers", high=999)
        if steps is not None and speculation.get("use_dynamic_tree") is not True:
            reading.shape = Shape(num_steps=steps)
            reading.saw("other", f"max_draft_len {steps}: {steps + 1} tokens verified a request", "speculative_config")
    if isinstance(graphs, dict):
        sizes = graphs.get("batch_sizes")
        if isinstance(sizes, list) and all(isinstance(n, int) and n > 0 for n in sizes) and sizes:
            reading.model.update(cuda_graph_sizes=sorted(set(sizes)), cuda_graph_unit="sequences")
    elif "cuda_graph_config" in document:
        reading.saw("decode_with_cuda_graph", False, "cuda_graph_config: null")
    for key, name in (("tensor_parallel", "tensor_parallel_size"), ("expert_parallel", "moe_expert_parallel_size")):
        if (size := whole(document, name)) is not None:
            reading.system[key] = size


def metrics(reading: Reading, scrape: Scrape, given: Given) -> None:
    """Read `/prometheus/metrics`: acceptance by position with its attempts, or pooled."""
    reading.system["engine"] = "tensorrt-llm"
    since = "between two scrapes" if scrape.differenced else "since the start"
    for labels, _ in scrape.each("trtllm_model_config_info"):
        if gpu := labels.get("gpu_type"):
            reading.system["gpu"] = gpu_name(gpu)
        if name := model_name(labels.get("model", "")):
            reading.model["target"] = name
    for labels, _ in scrape.each("trtllm_parallel_config_info"):
        for key, name in (("tensor_parallel", "tensor_parallel_size"), ("num_gpus", "gpu_count")):
            if (size := labels.get(name, "")).isdigit() and int(size):
                reading.system[key] = int(size)
    steps = None
    for labels, _ in scrape.each("trtllm_speculative_config_info"):
        count = labels.get("spec_num_tokens", "")
        steps = int(count) if count.isdigit() and 0 < int(count) < 1000 else steps
        if (method := METHODS.get(labels.get("spec_method", "").lower())) is not None:
            reading.model["method"] = method
    drafted = scrape.positions("trtllm_spec_decode_drafted_tokens", "token_position")
    accepted = scrape.positions("trtllm_spec_decode_accepted_tokens", "token_position")
    if (
        drafted
        and len(drafted) == len(accepted)
        and drafted[0] > 0
        and all(a <= d for a, d in zip(accepted, drafted, strict=True))
        and accepted == sorted(accepted, reverse=True)
    ):
        shape = reading.shape = Shape(num_steps=max(steps or 0, len(drafted)))
        entry = {"drafts": round(drafted[0]), "accepted_per_position": [round(a) for a in accepted]}
        if drafted[-1] < 0.999 * drafted[0]:
            entry["drafted_per_position"] = [round(d) for d in drafted]
        note = f"{reading.source}: drafted and accepted tokens by position {since}"
        reading.acceptance.append(shape.row() | entry | {"note": note})
        reading.used["drafts"] += round(drafted[0])
        return
    total, hits = (
        scrape.total("trtllm_spec_decode_num_draft_tokens"),
        scrape.total("trtllm_spec_decode_num_accepted_tokens"),
    )
    steps = given.shape.num_steps if given.shape is not None else steps
    if total and hits is not None and hits <= total:
        if steps is None:
            reading.questions.append("draft tokens without a draft length: say --num-steps; they are left out")
            return
        shape = reading.shape = Shape(num_steps=steps)
        note = f"{reading.source}: accepted over drafted tokens {since}, {steps} a round"
        add_length(reading, shape, 1 + steps * hits / total, note, total / steps)
