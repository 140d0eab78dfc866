"""SGLang's documents: `/server_info`, and the results of its benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specmodel.engines import sglang_args
from specmodel.engines.identities import serving_cycle
from specmodel.engines.reading import (
    Given,
    Reading,
    Shape,
    add_length,
    mapping,
    number,
    rounded,
    sequence,
    summarise,
    whole,
)

__all__ = ["bench_one_batch", "bench_serving", "bench_speculative", "server_info"]

STEP_QUANTILE = 0.2
"""Of repeated steps a low quantile is taken, as bench_speculative does: a step only ever waits."""


def server_info(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read `/server_info`: arguments, mean acceptance length, and step times where they are recorded."""
    for document in documents:
        args = sglang_args.from_mapping(document if isinstance(document, dict) else {})
        args.into(reading)
        states = sequence(document, "internal_states")
        state = (
            states[0] if states and isinstance(states[0], dict) else mapping(document, "internal_states") or document
        )
        shape = _active_shape(state, args) or given.shape
        reading.shape = shape
        if allreduce := args.allreduce():
            reading.saw("allreduce_implementation", allreduce, "server arguments", args.tensor_parallel)
        _memory(reading, state)
        length = number(state, "avg_spec_accept_length")
        if args.speculating is not True and length is not None and length > 1:
            reading.questions.append(
                "avg_spec_accept_length is stated, but no speculative_algorithm: was it speculating? Say --num-steps; "
                "its times are left out"
            )
            shape = given.shape
            if shape is None:
                continue
        elif args.speculating is False:
            shape = Shape(num_steps=0)
        if shape is None:
            reading.questions.append("no step counts of the speculation: say --num-steps; its times are left out")
            continue
        if length is not None and shape.num_steps:
            add_length(reading, shape, length, f"{reading.source}: avg_spec_accept_length, cumulative, rounds unknown")
        steps = mapping(state, "step_time_dict")
        if steps and (question := _other_unit(state, steps, length or 1.0)):
            reading.questions.append(question)
            continue
        for key in sorted(steps, key=lambda key: (len(key), key)):
            batch = int(key) if key.isascii() and key.isdigit() and len(key) < 7 else 0
            listed = [number({"t": t}, "t", high=100) for t in sequence(steps, key)]
            step_times = [t for t in listed if t] if batch else []
            if not step_times:
                reading.dropped["step times without a batch or a number"] += 1
                continue
            summary = summarise([1e3 * t for t in step_times], quantile=STEP_QUANTILE, band=2.0)
            reading.dropped["outliers (more than twice the median)"] += summary.outliers
            reading.used["step times"] += summary.count
            note = f"{reading.source}: step_time_dict, 20th percentile of {summary.count} rounds"
            row = shape.row() | {"batch": batch * args.data_parallel} | summary.row("cycle_ms") | {"note": note}
            reading.cycles.append(row)


def _other_unit(state: Any, steps: dict[str, Any], length: float) -> str | None:
    """Say where step times are not in seconds by the throughput beside them, which is that of one of their batches."""
    throughput = number(state, "last_gen_throughput")
    listed = [(key, number({"t": t}, "t")) for key in steps for t in sequence(steps, key)]
    speeds = [int(key) * length / t for key, t in listed if t and key.isascii() and key.isdigit() and len(key) < 7]
    if throughput is None or not speeds or throughput < 20 * max(speeds):
        return None
    return (
        f"step_time_dict gives at most {max(speeds):.3g} tok/s, last_gen_throughput is {throughput:g}: are its "
        "times in seconds, as SGLang has them? They are left out"
    )


def _active_shape(state: Any, args: sglang_args.ServerArgs) -> Shape | None:
    """Return the shape in use, which adaptive steps may have changed from that of the arguments."""
    method = dict(args.model).get("method")
    if method in ("parallel", "ngram") or not isinstance(state, dict):
        return args.shape
    values = [state.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens")]
    return sglang_args.shape_of(None, *values) or args.shape


def _memory(reading: Reading, state: Any) -> None:
    usage = mapping(state, "memory_usage")
    if (left := number(usage, "startup_available")) is not None:
        reading.saw("free_memory_bytes", round(left * 2**30), "memory_usage.startup_available", 1, "GB of 2^30 bytes")
    for part, about in (("target_verify", "target_cuda_graph"), ("draft_decode", "draft_cuda_graph")):
        if (size := number(mapping(usage, "graph"), part)) is not None:
            reading.saw(about, True, f"memory_usage.graph.{part}", 1, f"its graphs take {size:g} GB")


def bench_speculative(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read bench_speculative.py: a round's time and acceptance length for each shape and batch; (0, 0, 0) is plain."""
    reading.system["engine"] = "sglang"
    for place, document in enumerate(documents, 1):
        batch, step = whole(document, "batch_size"), number(document, "step_time", high=1000)
        length, speed = number(document, "acc_length"), number(document, "speed")
        steps = whole(document, "steps", low=0)
        if batch is None or step is None or length is None or steps is None:
            reading.dropped["rows without batch_size, steps, acc_length or step_time"] += 1
            continue
        shape = (
            Shape(num_steps=0) if steps == 0 else _tree(document.get("topk"), steps, document.get("num_draft_tokens"))
        )
        if shape is None or (shape.num_steps and not 1 <= length <= shape.num_steps + 1.005):
            reading.dropped["rows whose acceptance length or tree cannot be"] += 1
            continue
        if speed is not None and min(abs(speed * step / length - n) for n in (1, batch)) > 0.02:
            reading.dropped["rows whose speed is not acc_length / step_time"] += 1
            continue
        reading.used["rows"] += 1
        row = shape.row() | {"batch": batch}
        if shape.num_steps:
            row["acceptance_length"] = length
        row |= {"cycle_ms": rounded(1e3 * step), "note": f"{reading.source} row {place}: step_time, 20th percentile"}
        reading.cycles.append(row)


def _tree(topk: Any, steps: int, tokens: Any) -> Shape | None:
    return sglang_args.shape_of(None, steps, topk, tokens)


def bench_one_batch(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read bench_one_batch_server: throughput and acceptance length at one batch, and the prefill before it."""
    reading.system["engine"] = "sglang"
    for place, document in enumerate(documents, 1):
        batch, speed = whole(document, "batch_size"), number(document, "last_gen_throughput", "output_throughput")
        length = number(document, "acc_length", low=-2)
        if batch is None or speed is None:
            reading.dropped["rows without batch_size or throughput"] += 1
            continue
        where = f"{reading.source} row {place}"
        inputs, outputs = whole(document, "input_len"), whole(document, "output_len")
        if not _latency_holds(document, batch, outputs):
            reading.dropped["rows whose latency is not that of their prefill and throughput"] += 1
            continue
        row: dict[str, Any] = {"batch": batch}
        if inputs and outputs:
            row["context_tokens"] = inputs + outputs // 2
        row |= {"tok_s": speed, "note": f"{where}: last_gen_throughput"}
        ttft, rate = number(document, "last_ttft", high=1e5), number(document, "input_throughput")
        if inputs and ttft and rate and abs(batch * inputs / (rate * ttft) - 1) < 0.1:
            note = f"{where}: last_ttft of the whole batch"
            reading.prefill.append(
                {"tokens": batch * inputs, "batch": batch, "time_ms": rounded(1e3 * ttft), "note": note}
            )
        if length is None and given.shape is None:
            reading.questions.append(f"{where}: no acc_length (-1 is plain decoding): say --num-steps; it is left out")
            continue
        if length is None and given.shape is not None and given.shape.num_steps:
            reading.questions.append(f"{where}: no acc_length though it speculates; its speed is left out")
            continue
        if length is None or length <= 0:
            reading.used["rows"] += 1
            reading.cycles.append({"num_steps": 0} | row)
            continue
        shape = given.shape or _named(document.get("run_name"), length)
        row = {**row, "acceptance_length": rounded(length)}
        reading.used["rows"] += 1
        if shape is None:
            reading.shapeless.append({"table": "cycles", **row})
        elif 1 <= length <= shape.num_steps + 1.005:
            reading.cycles.append(shape.row() | row)
            if given.shape is None:
                reading.cycles[-1]["note"] += "; draft shape as the run's name gives it"
        else:
            reading.dropped["rows whose acceptance length cannot be"] += 1


def _latency_holds(document: Any, batch: int, outputs: int | None) -> bool:
    """Whether latency = time to first token + output tokens / throughput, where all are given."""
    latency, ttft = number(document, "latency"), number(document, "last_ttft")
    rates = number(document, "output_throughput"), number(document, "last_gen_throughput")
    if latency is None or ttft is None or outputs is None or rates[0] is None:
        return True
    whole_run = abs((ttft + batch * outputs / rates[0]) / latency - 1) <= 0.05
    return whole_run and (rates[1] is None or 0.7 <= rates[1] / rates[0] <= 1.5)


def _named(name: Any, length: float) -> Shape | None:
    """Return the shape that a run's name ends in, as steps-topk-tokens, if the three belong together."""
    found = re.search(r"(?<!\d)(\d{1,2})[-_](\d{1,2})[-_](\d{1,3})$", name) if isinstance(name, str) else None
    if found is None:
        return None
    steps, topk, tokens = (int(part) for part in found.groups())
    fits = tokens == steps + 1 if topk == 1 else topk > 1 and tokens <= steps * topk + 1
    return _tree(topk, steps, tokens) if fits and length <= steps + 1.005 else None


def bench_serving(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read bench_serving results: a cycle at the mean concurrency."""
    reading.system["engine"] = "sglang"
    for place, document in enumerate(documents, 1):
        where = f"{reading.source} row {place}"
        info = document.get("server_info")
        args = sglang_args.from_mapping(info) if isinstance(info, dict) else None
        length = number(document, "accept_length")
        shape = given.shape
        if args is not None:
            args.into(reading)
            shape = args.shape or shape
            if args.speculating is False and length is None:
                shape = Shape(num_steps=0)
        elif length is None and shape is None:
            reading.questions.append(
                f"{where}: no acceptance length and no server_info: was it plain decoding? Say --num-steps"
            )
            continue
        batch = given.batch or number(document, "concurrency", "max_concurrency")
        if batch is None:
            reading.questions.append(f"{where}: no concurrency: say --batch")
            continue
        if length is None and (shape is None or shape.num_steps):
            reading.questions.append(f"{where}: no accept_length though the server speculates; its speed is left out")
            continue
        if length is not None and shape is not None and shape.num_steps and not 1 <= length <= shape.num_steps + 1.005:
            reading.questions.append(f"{where}: {length:g} tokens a cycle cannot be of {shape.num_steps} steps")
            continue
        row = serving_cycle(reading, document, length if shape is None or shape.num_steps else None, where)
        if row is None:
            continue
        row = {"batch": max(rounded(batch), 1.0), **row}
        inputs, outputs = whole(document, "random_input_len"), whole(document, "random_output_len")
        done = number(document, "completed")
        if (
            done
            and (total_in := number(document, "total_input_tokens"))
            and (out := number(document, "total_output_tokens"))
        ):
            row["context_tokens"] = round((total_in + out / 2) / done)
        elif inputs and outputs:
            row["context_tokens"] = inputs + outputs // 2
        reading.used["rows"] += 1
        if shape is not None:
            reading.cycles.append(shape.row() | row)
        else:
            reading.shapeless.append({"table": "cycles", **row})
