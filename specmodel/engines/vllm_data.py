"""vLLM's documents: `vllm bench serve` results, `/metrics`, and the print-out of its offline example."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from specmodel.engines.identities import counts_at_positions, fraction, serving_cycle, steps_of
from specmodel.engines.prometheus import Scrape
from specmodel.engines.reading import Given, Reading, Shape, add_length, number, rounded, whole
from specmodel.engines.redact import model_name
from specmodel.engines.stream import Handler, strip_ansi

__all__ = ["VllmOffline", "bench_serve", "metrics"]


def bench_serve(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read `vllm bench serve --save-result`: a cycle at the concurrency, and acceptance counts where they are given."""
    for place, document in enumerate(documents, 1):
        where = f"{reading.source} row {place}"
        reading.system["engine"] = "vllm"
        if isinstance(name := document.get("model_id"), str) and (short := model_name(name)):
            reading.model["target"] = short
        if isinstance(date := document.get("date"), str) and (found := re.match(r"(\d{4})(\d\d)(\d\d)-", date)):
            reading.date = "-".join(found.groups())
        steps, length = _bench_acceptance(reading, document, where)
        shape = given.shape or (Shape(num_steps=steps) if steps else None)
        batch = given.batch or number(document, "max_concurrency")
        itl, tpot = number(document, "mean_itl_ms"), number(document, "mean_tpot_ms")
        if length is None and shape is None:
            if itl is None or tpot is None or abs(itl / tpot - 1) > 0.03:
                ratio = f" (events are {itl / tpot:.3g} tokens long)" if itl and tpot else ""
                reading.questions.append(
                    f"{where}: no acceptance counts{ratio}: say --num-steps (0 for plain decoding)"
                )
                continue
            shape = Shape(num_steps=0)
        if length is None and shape is not None and shape.num_steps and itl and tpot:
            length = itl / tpot  # an event is a cycle, so its tokens are the acceptance length
            if not 0.95 <= length <= 1.02 * (shape.num_steps + 1):
                reading.questions.append(
                    f"{where}: events of {length:.3g} tokens cannot be cycles of {shape.num_steps} steps"
                )
                continue
            length = min(max(length, 1.0), shape.num_steps + 1.0)
        if batch is None and tpot is not None and (throughput := number(document, "output_throughput")):
            batch = throughput * tpot / 1e3  # Little's law: requests that decode at a time
        row = serving_cycle(reading, document, length if shape is None or shape.num_steps else None, where)
        if row is None or batch is None:
            continue
        inputs, outputs = whole(document, "total_input_tokens"), whole(document, "total_output_tokens")
        done = whole(document, "completed")
        row = {"batch": max(rounded(batch), 1.0), **row}
        if inputs and outputs and done:
            row["context_tokens"] = round((inputs + outputs / 2) / done)
        reading.used["rows"] += 1
        if shape is None:
            reading.shapeless.append({"table": "cycles", **row})
            continue
        if steps and "cycle_ms" in row:
            del row["acceptance_length"]  # the counts stand in an entry of their own
        reading.cycles.append(shape.row() | row)


def _bench_acceptance(reading: Reading, document: Any, where: str) -> tuple[int | None, float | None]:
    """Read the counts of a result; return the steps of the chain and the acceptance length."""
    drafts, drafted = whole(document, "spec_decode_num_drafts"), whole(document, "spec_decode_draft_tokens")
    accepted = whole(document, "spec_decode_accepted_tokens", low=0)
    if drafts is None or drafted is None or accepted is None:
        return None, None
    rates = document.get("spec_decode_per_position_acceptance_rates")
    listed = [number({"r": r}, "r", low=-1e-9, high=1 + 1e-9) for r in rates] if isinstance(rates, list) else []
    steps = steps_of(drafted, drafts, len(listed))
    length = 1 + accepted / drafts
    stated, rate = number(document, "spec_decode_acceptance_length"), number(document, "spec_decode_acceptance_rate")
    agree = stated is None or abs(stated - length) < 0.006
    agree &= rate is None or fraction(rate, accepted, drafted) is not None
    if steps is None or not agree or length > steps + 1 or None in listed:
        reading.questions.append(f"{where}: the acceptance fields contradict each other; acceptance is left out")
        return None, None
    counts = counts_at_positions([r or 0.0 for r in listed], drafts, accepted, 1e-6) if listed else None
    if counts is not None:
        note = f"{where}: counts of spec_decode_num_drafts and the rates by position"
        entry = {"drafts": drafts, "accepted_per_position": counts, "note": note}
        reading.acceptance.append(Shape(num_steps=steps).row() | entry)
    return steps, length


def metrics(reading: Reading, scrape: Scrape, given: Given) -> None:
    """Read `/metrics`: acceptance counts, and the mean cycle while the server was busy."""
    reading.system["engine"] = "vllm"
    names = [labels["model_name"] for labels, _ in scrape.each("vllm:generation_tokens") if "model_name" in labels]
    if names and (name := model_name(names[0])):
        reading.model["target"] = name
    since = "between two scrapes" if scrape.differenced else "since the start"
    drafts = scrape.total("vllm:spec_decode_num_drafts") or 0.0
    drafted = scrape.total("vllm:spec_decode_num_draft_tokens") or 0.0
    accepted = scrape.total("vllm:spec_decode_num_accepted_tokens") or 0.0
    by_position = scrape.positions("vllm:spec_decode_num_accepted_tokens_per_pos", "position")
    if not drafts and scrape.total("vllm:spec_decode_num_emitted_tokens"):
        _v0(reading, scrape, given, since)
        return
    steps = steps_of(drafted, drafts, len(by_position))
    if not drafts or steps is None:
        reading.dropped["scrape in which nothing was drafted"] += 1
        return
    falling = all(a >= b for a, b in zip([drafts, *by_position], by_position, strict=False))
    tokens = scrape.total("vllm:generation_tokens")
    odd = drafted > steps * drafts or (tokens is not None and tokens < 0.98 * (drafts + accepted))
    if (
        accepted > drafted
        or odd
        or not falling
        or (by_position and abs(sum(by_position) - accepted) > 0.001 * accepted + 2)
    ):
        reading.questions.append("the acceptance counters contradict each other; they are left out")
        return
    shape = reading.shape = Shape(num_steps=steps)
    note = f"{reading.source}: spec_decode counters {since}"
    reading.used["drafts"] += round(drafts)
    if by_position:
        if drafted < 0.999 * steps * drafts:
            note += f"; {drafted / drafts:.3g} drafts a cycle, later positions were tried less often"
        entry = {"drafts": round(drafts), "accepted_per_position": [round(n) for n in by_position], "note": note}
        reading.acceptance.append(shape.row() | entry)
    else:
        add_length(reading, shape, 1 + accepted / drafts, note, drafts)
    _metrics_cycle(reading, scrape, shape, drafts, accepted, since)


def _metrics_cycle(reading: Reading, scrape: Scrape, shape: Shape, drafts: float, accepted: float, since: str) -> None:
    """Add the mean time between output events, at the mean number of drafts an engine step."""
    events = scrape.total("vllm:inter_token_latency_seconds_count") or 0.0
    waited = scrape.total("vllm:inter_token_latency_seconds_sum")
    iterations = scrape.total("vllm:iteration_tokens_total_count")
    if not events or not waited or not iterations or drafts < iterations:
        return
    tokens = scrape.total("vllm:request_time_per_output_token_seconds_sum")
    requests = scrape.total("vllm:request_time_per_output_token_seconds_count")
    cycle, length = 1e3 * waited / events, 1 + accepted / drafts
    if tokens and requests and abs(cycle / (1e3 * tokens / requests * length) - 1) > 0.25:
        reading.dropped["not timed: time between events is not time per token * acceptance length"] += 1
        return
    note = f"{reading.source}: mean inter-token latency {since} (an event is a cycle; stalls by prefill included)"
    engines = len({labels.get("engine") for labels, _ in scrape.each("vllm:iteration_tokens_total_count")}) or 1
    row = shape.row() | {"batch": max(rounded(engines * drafts / iterations, 4), 1.0), "cycle_ms": rounded(cycle)}
    reading.cycles.append(row | {"sd_cycle_ms": rounded(0.05 * cycle, 3), "samples": 1, "note": note})


def _v0(reading: Reading, scrape: Scrape, given: Given, since: str) -> None:
    """Read the V0 engine's counters: emitted tokens over drafts is the acceptance length, its rate no probability."""
    emitted = scrape.total("vllm:spec_decode_num_emitted_tokens") or 0.0
    drafted = scrape.total("vllm:spec_decode_num_draft_tokens") or 0.0
    efficiency = scrape.mean("vllm:spec_decode_efficiency")
    fits = [
        k for k in range(1, 33) if drafted and efficiency and abs(emitted / (drafted / k * (k + 1)) - efficiency) < 5e-4
    ]
    shape = given.shape or (Shape(num_steps=fits[0]) if len(fits) == 1 else None)
    if shape is None or not drafted:
        reading.questions.append("counters of the V0 engine: say --num-steps; they are left out")
        return
    drafts = drafted / shape.num_steps
    add_length(
        reading, shape, emitted / drafts, f"{reading.source}: V0 engine, emitted tokens over drafts {since}", drafts
    )


class VllmOffline:
    """Reads the print-out of the offline speculative decoding example."""

    def __init__(self, source: str, given: Given) -> None:
        self.reading = Reading(source=source, kind="vLLM offline example")
        self._values: dict[bytes, float] = {}
        self._rates: dict[int, tuple[float, int]] = {}

    @property
    def sure(self) -> bool:
        """Whether it is this print-out beyond doubt: it may stand at the end of a log, so never."""
        return False

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor."""
        names = (b"num_drafts:", b"num_draft_tokens:", b"num_accepted_tokens:", b"mean acceptance length:")
        return {**dict.fromkeys(names, self._value), b"acceptance at token": self._position}

    def _value(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := re.match(rb"([a-z_ ]+): (\d{1,15}(?:\.\d+)?)(?=\s|$)", strip_ansi(text)):
            self._values[found[1]] = float(found[2])

    def _position(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := re.match(rb"acceptance at token (\d{1,2}): ?(\d\.(\d+))(?=\s|$)", strip_ansi(text)):
            self._rates[int(found[1])] = (float(found[2]), len(found[3]))

    def finish(self) -> Reading | None:
        """Return what was printed; None if it is no such print-out."""
        reading, values = self.reading, self._values
        drafts, drafted = round(values.get(b"num_drafts", 0)), values.get(b"num_draft_tokens", 0.0)
        accepted = values.get(b"num_accepted_tokens")
        if not drafts or accepted is None:
            return None
        reading.system["engine"] = "vllm"
        steps = steps_of(drafted, drafts, len(self._rates)) if drafted else len(self._rates) or None
        if sorted(self._rates) != list(range(steps or 0)) and steps is not None and self._rates:
            # The example lists a fixed number of positions, or was cut: those beyond the drafts are zero.
            self._rates = {i: r for i, r in self._rates.items() if i < steps}
        rates = [self._rates[i][0] for i in range(steps or 0) if i in self._rates]
        mean = values.get(b"mean acceptance length", 1 + accepted / drafts)
        if steps is None or abs(mean - 1 - accepted / drafts) > 0.006 or accepted > steps * drafts:
            reading.questions.append("the numbers of the print-out contradict each other; they are left out")
            return reading
        note = f"{reading.source}: num_drafts, num_accepted_tokens and acceptance at each token"
        digits = min((d for _, d in self._rates.values()), default=2)
        half_digit = 0.5 * 10.0**-digits
        whole_list = len(rates) == steps
        counts = counts_at_positions(rates, drafts, round(accepted), half_digit) if whole_list else None
        if counts is None and not drafted and rates:
            # How many positions there are is told by the list alone, which was cut or is of something else.
            reading.questions.append("the rates do not sum to the accepted tokens: is the list cut? It is left out")
            return reading
        reading.used["print-outs"] += 1
        if counts is not None:
            entry = {"drafts": drafts, "accepted_per_position": counts, "note": note}
            reading.acceptance.append(Shape(num_steps=steps).row() | entry)
        else:
            add_length(reading, Shape(num_steps=steps), 1 + accepted / drafts, note, drafts)
        return reading
