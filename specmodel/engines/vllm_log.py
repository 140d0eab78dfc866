"""vLLM logs: acceptance counts, iteration times, intervals of the statistics logger, and what was configured.

Counts are recovered from the printed rates and their sums and pooled over intervals; throughputs are not used for
acceptance, because after idling the logger divides by the whole gap. Whether a printed mean holds the bonus token is
told by the rates by position, whose sum is the mean without it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from specmodel.engines import vllm_args
from specmodel.engines.identities import counts_at_positions, steps_of, stray_steps
from specmodel.engines.reading import REPEAT_SD, Given, Lengths, Reading, Samples, Shape, pooled_sd, summarise
from specmodel.engines.stream import Handler, strip_ansi
from specmodel.engines.vllm_args import VllmArgs

__all__ = ["VllmLog"]

NOMINAL_INTERVAL_MS = 10_000.0
ITERATION_SD = 0.005
"""Relative error of iteration times as cycle times: the clock is the CPU's wait for one step's result."""
BAND = 1.25
MAX_KINDS = 2**14
CONTRADICTION = "metrics line whose numbers contradict each other"

_ACCEPTED = re.compile(rb"Accepted: (\d{1,12}) tokens")
_DRAFTED = re.compile(rb"Drafted: (\d{1,12}) tokens")
_MEAN = re.compile(rb"Mean acceptance length: (\d{1,4}\.\d+)")
_RATES = re.compile(rb"Per-position acceptance rate: \[?(\d{1,3}\.\d+%?(?:, \d{1,3}\.\d+%?)*)")
_THROUGHPUT = re.compile(rb"Accepted throughput: (\d+\.\d+) tokens/s")
_STATS = re.compile(
    rb"Avg prompt throughput: (?P<prompt>\d+\.\d+) tokens/s.*?"
    rb"Avg generation throughput: (?P<generation>\d+\.\d+) tokens/s, Running: (?P<running>\d{1,6}) reqs"
)
_ITERATION = re.compile(
    rb"Iteration\(\d+\): (\d{1,7}) context requests, \d+ context tokens, (\d{1,7}) generation requests, "
    rb"(\d{1,8}) generation tokens, iteration elapsed time: (\d{1,7}\.\d+) ms(?P<dummy> \(dummy\))?"
)
_COUNTED = re.compile(rb"(\d{1,8}) (context requests|generation requests|generation tokens)\b")
_COUNTS = (b"context requests", b"generation requests", b"generation tokens")
_ELAPSED = re.compile(rb"elapsed(?: time)?: (\d{1,7}\.\d+) ?(ms|s)\b")
_V0 = {
    name: re.compile(rb"%s: (\d+(?:\.\d+)?)" % name.encode())
    for name in (
        "System efficiency",
        "Number of speculative tokens",
        "Number of draft tokens",
        "Number of emitted tokens",
    )
}
_ENGINE = re.compile(rb"(?:Engine \d+|\d+ Engines Aggregated)(?=: $)")
_RANKS = (re.compile(rb"(?<![A-Za-z])TP(\d+)"), re.compile(rb"\brank ?[=:]? ?(\d+)"), re.compile(rb"\bpid=(\d+)"))
"""How a worker's line tells which one it is, the most telling first."""
_DATE = re.compile(rb"\b(\d{4}-\d\d-\d\d)[ T]")


@dataclass(slots=True)
class _Counts:
    """Acceptance counts pooled over intervals."""

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    lines: int = 0
    first_line: int = 0
    last_line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metrics:
    """What one metrics line states; no counts where it prints totals only."""

    accepted: int
    drafted: int
    drafts: int = 0
    counts: tuple[int, ...] = ()
    bonus: str | None = None
    """Whether the printed mean is with or without the bonus token."""
    elapsed_ms: float = NOMINAL_INTERVAL_MS


def _parse_metrics(text: bytes) -> _Metrics | str:
    """Read a metrics line; or say why not."""
    accepted_text, drafted_text = _ACCEPTED.search(text), _DRAFTED.search(text)
    if accepted_text is None or drafted_text is None:
        return "metrics line cut off"
    accepted, drafted = int(accepted_text[1]), int(drafted_text[1])
    if drafted == 0 or accepted > drafted:
        return "nothing drafted, or more accepted than drafted"
    rates_text, mean_text = _RATES.search(text), _MEAN.search(text)
    if rates_text is None and mean_text is None:
        return _Metrics(accepted=accepted, drafted=drafted)
    printed = rates_text[1].split(b", ") if rates_text else []
    percent = bool(printed) and printed[0].endswith(b"%")
    decimals = {len(rate.partition(b".")[2]) for rate in printed}
    if len(decimals) != 1 or any(rate.endswith(b"%") != percent for rate in printed):
        return "metrics line cut off"
    # Above 1 they are percent, with a sign or without; the sum and the mean tell whether that is so.
    scale = 0.01 if percent or any(float(rate) > 1 for rate in printed) else 1.0
    rates = [scale * float(rate.rstrip(b"%")) for rate in printed]
    half_digit = 0.5 * scale * 10.0 ** -(decimals.pop() - percent)
    total, slack = sum(rates), len(rates) * half_digit + 0.006
    bonus = None
    if mean_text is not None:
        words = [word for word, b in (("with", 1), ("without", 0)) if abs(float(mean_text[1]) - b - total) <= slack]
        if not words:
            return CONTRADICTION
        bonus = words[0]
    drafts = drafted // len(rates) if drafted % len(rates) == 0 else 0
    if not drafts or abs(accepted / drafts - total) > slack:
        drafts = round(accepted / total) if total > 0 else 0  # shorter drafts now and then
    counts = counts_at_positions(rates, drafts, accepted, half_digit) if drafts * len(rates) >= drafted else None
    if counts is None:
        return CONTRADICTION
    rate = _THROUGHPUT.search(text)
    elapsed_ms = 1e3 * accepted / float(rate[1]) if rate and float(rate[1]) > 0 else NOMINAL_INTERVAL_MS
    return _Metrics(
        accepted=accepted, drafted=drafted, drafts=drafts, counts=tuple(counts), bonus=bonus, elapsed_ms=elapsed_ms
    )


class VllmLog:
    """Reads the lines of one log, one by one."""

    def __init__(self, source: str, given: Given) -> None:
        self.reading = Reading(source=source, kind="vLLM log")
        self.given = given
        self.args = VllmArgs()
        self._counts: dict[int, _Counts] = {}
        self._unplaced: list[tuple[int, int]] = []
        self._v0: dict[int, Lengths] = {}
        self._iterations: dict[tuple[int, int], Samples] = {}
        self._intervals: dict[tuple[int, int], Samples] = {}
        self._stats: dict[bytes, tuple[int, float]] = {}
        self._latest: tuple[int, float] | None = None
        self._steady = self._aggregated = False
        self._captured: set[bytes] = set()
        self._capture_line = 0
        self._bonus: Counter[str] = Counter()
        self._parsed: dict[bytes, _Metrics | str] = {}
        self._config_texts: set[bytes] = set()
        self._seen = False

    @property
    def sure(self) -> bool:
        """Whether this is a log of vLLM beyond doubt."""
        return self._seen

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor."""
        return {
            b"SpecDecoding metrics:": self._metrics,
            b"Avg prompt throughput:": self._statistics,
            b"Iteration(": self._iteration,
            b"Initializing a V": self._config,
            b"non-default args:": self._config,
            b"API server version": self._config,
            b"Graph capturing finished": self._graphs,
            b"Speculative metrics:": self._v0_metrics,
        }

    # start-up

    def _config(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        self._seen = True
        self._date(prefix)
        if text in self._config_texts:
            return
        self._config_texts.add(text)
        vllm_args.read_into(self.args, strip_ansi(text).decode("utf-8", "replace"))

    def _graphs(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        plain = strip_ansi(prefix)
        ranks = next((found for pattern in _RANKS if (found := pattern.findall(plain))), [b"0"])
        self._captured.add(ranks[-1])
        self._capture_line = self._capture_line or line
        self._seen = True

    # acceptance

    def _metrics(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        self._seen = True
        self._date(prefix)
        dropped = self.reading.dropped
        parsed = self._parsed.get(text)
        if parsed is None:
            if len(self._parsed) >= MAX_KINDS:
                self._parsed.clear()
            parsed = self._parsed[text] = _parse_metrics(strip_ansi(text))
        if isinstance(parsed, str):
            dropped[parsed] += 1
            return
        if not parsed.counts:
            # v0.8.3 printed totals only; they wait until the number of steps is known.
            if len(self._unplaced) < MAX_KINDS:
                self._unplaced.append((parsed.accepted, parsed.drafted))
            return
        steps = len(parsed.counts)
        if parsed.bonus:
            self._bonus[parsed.bonus] += 1
        pooled = self._counts.setdefault(steps, _Counts(accepted=[0] * steps, first_line=line))
        pooled.drafts += parsed.drafts
        pooled.accepted = [a + b for a, b in zip(pooled.accepted, parsed.counts, strict=True)]
        pooled.lines += 1
        pooled.last_line = line
        self._interval(parsed, line)

    def _v0_metrics(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        """Read the V0 engine's line: of it only the emitted tokens tell the acceptance length."""
        self._seen = True
        found = {name: pattern.search(text) for name, pattern in _V0.items()}
        values = [float(match[1]) if match is not None else 0.0 for match in found.values()]
        efficiency, steps, drafted, emitted = values
        if not (steps >= 1 and drafted > 0 and emitted > 0 and (complete or text.rstrip().endswith(b"."))):
            self.reading.dropped["V0 metrics line cut off"] += 1
            return
        drafts = drafted / steps
        if abs(emitted / (drafts * (steps + 1)) - efficiency) > 0.0015:
            self.reading.dropped["V0 metrics line whose numbers contradict each other"] += 1
            return
        # The counters run from the start of the engine: the last line holds all the others.
        lengths = self._v0[round(steps)] = Lengths()
        lengths.add(emitted / drafts, drafts)

    # times

    def _statistics(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        self._seen = True
        found = _STATS.match(strip_ansi(text))
        engine = _ENGINE.search(prefix)
        name = engine[0] if engine else b""
        if found is None:
            self.reading.dropped["statistics line cut off"] += 1
            self._latest = None
            self._stats.pop(name, None)
            return
        # Lines of one engine state its own batch, aggregated lines that of all.
        running = int(found["running"]) * (1 if b"Aggregated" in name else self.args.data_parallel)
        prompt, generation = float(found["prompt"]), float(found["generation"])
        before = self._stats.get(name)
        self._steady = before is not None and before[0] == running and running > 0
        self._stats[name] = self._latest = (running, generation)
        self._aggregated = b"Aggregated" in name
        if self.args.speculating is False and generation > 0 and running > 0:
            if not self._steady:
                self.reading.dropped["not timed: interval in which the batch changed"] += 1
            elif prompt > 0.02 * generation:
                self.reading.dropped["not timed: interval with prefill"] += 1
            else:
                rate = generation * (1 if b"Aggregated" in name else self.args.data_parallel)
                self._intervals.setdefault((0, running), Samples()).add(1e3 * running / rate, line)

    def _interval(self, parsed: _Metrics, line: int) -> None:
        """Turn an interval of the statistics logger into the time of a cycle, if the batch was constant over it."""
        dropped = self.reading.dropped
        if self._latest is None or not self._steady:
            dropped["not timed: interval in which the batch changed"] += 1
            return
        running, generation = self._latest
        elapsed_ms = parsed.elapsed_ms
        if abs(elapsed_ms / NOMINAL_INTERVAL_MS - 1) > 0.05:
            dropped["not timed: interval after idling"] += 1
        elif generation <= 0 or abs((parsed.drafts + parsed.accepted) / generation * 1e3 / elapsed_ms - 1) > 0.02:
            dropped["not timed: interval with first tokens or steps without drafts"] += 1
        else:
            place = (len(parsed.counts), running)
            rounds = parsed.drafts * (1 if self._aggregated else self.args.data_parallel)
            self._intervals.setdefault(place, Samples()).add(elapsed_ms * running / rounds, line)

    def _iteration(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        self._seen = True
        plain = strip_ansi(text)
        found = _ITERATION.match(plain)
        if found is not None:
            context, requests, tokens = int(found[1]), int(found[2]), int(found[3])
            time_ms, dummy = float(found[4]), found["dummy"] is not None
        else:
            # Another order, other fields between, another unit.
            counts = {name: int(count) for count, name in _COUNTED.findall(plain)}
            elapsed = _ELAPSED.search(plain)
            if elapsed is None or len(counts) < 3:
                self.reading.dropped["iteration line cut off"] += 1
                return
            context, requests, tokens = (counts[name] for name in _COUNTS)
            time_ms, dummy = float(elapsed[1]) * (1e3 if elapsed[2] == b"s" else 1), b"(dummy)" in plain
        if context or dummy or requests < 1:
            self.reading.dropped["not timed: iteration with prefill, or without requests"] += 1
        elif tokens < requests or tokens % requests or tokens // requests > 100:
            self.reading.dropped["not timed: iteration with drafts of different lengths"] += 1
        else:
            place = (tokens // requests - 1, requests * self.args.data_parallel)
            (self._iterations.get(place) or self._iterations.setdefault(place, Samples())).add(time_ms, line)

    def _date(self, prefix: bytes) -> None:
        if self.reading.date is None and (found := _DATE.search(prefix)):
            self.reading.date = found[1].decode()

    # the end

    def finish(self) -> Reading | None:
        """Return what the log states; None if it is no log of vLLM."""
        reading = self.reading
        if not self._seen:
            return None
        args = self.args
        args.into(reading)
        reading.pinned = args.synthetic
        known = sorted({*self._counts, *(k for k, _ in self._iterations if k)})
        if args.num_steps is None:
            shape = self.given.shape
            args.num_steps = shape.num_steps if shape is not None else known[0] if len(known) == 1 else None
        reading.shape = Shape(num_steps=args.num_steps) if args.num_steps is not None else None
        self._acceptance()
        self._cycles()
        if self._captured:
            note = "one line a rank; it does not say which of target and drafter"
            reading.saw(
                "target_cuda_graph",
                True,
                f"line {self._capture_line}, Graph capturing finished",
                len(self._captured),
                note,
            )
        if self.args.eager is not None:
            reading.saw(
                "decode_with_cuda_graph", not self.args.eager, f"engine configuration, enforce_eager={self.args.eager}"
            )
        return reading

    def _acceptance(self) -> None:
        reading = self.reading
        bonus = self._bonus.most_common(1)[0][0] if self._bonus else None
        for steps, counts in sorted(self._counts.items()):
            note = (
                f"{reading.source} lines {counts.first_line}-{counts.last_line}: counts of {counts.lines} metrics lines"
            )
            note += f"; the printed mean is {bonus} the bonus token" if bonus else ""
            entry = {"drafts": counts.drafts, "accepted_per_position": counts.accepted, "note": note}
            reading.acceptance.append(Shape(num_steps=steps).row() | entry)
            reading.used["metrics lines"] += counts.lines
        if self._unplaced and not self._counts:
            self._place_totals()
        elif self._unplaced:
            reading.dropped["metrics line without rates by position"] += len(self._unplaced)
        for steps, lengths in sorted(self._v0.items()):
            note = f"{reading.source}: V0 engine, emitted tokens over drafts; its acceptance rate is no probability"
            reading.acceptance.append(lengths.row(Shape(num_steps=steps)) | {"note": note})
            reading.used["V0 metrics lines"] += 1

    def _place_totals(self) -> None:
        reading, steps = self.reading, self.args.num_steps
        if steps is None:
            reading.questions.append(
                "the log prints totals only, and no number of speculative tokens: say --num-steps; they are left out"
            )
            return
        lengths = Lengths()
        for accepted, drafted in self._unplaced:
            if steps_of(drafted, drafted / steps, steps):
                lengths.add(1 + accepted / (drafted / steps), drafted / steps)
        note = f"{reading.source}: accepted over drafted of {lengths.count} metrics lines, {steps} drafts each"
        reading.acceptance.append(lengths.row(Shape(num_steps=steps)) | {"note": note})
        reading.used["metrics lines"] += lengths.count

    def _cycles(self) -> None:
        reading = self.reading
        counts: Counter[int] = Counter()
        for (steps, _), times in self._iterations.items():
            counts[steps] += times.seen
        strays = stray_steps(counts)
        if self.args.speculating or self._counts or any(counts[k] for k in counts if k):
            strays.add(0)  # steps in which nothing could be drafted are no plain decoding
        if self.args.num_steps is not None and not self.args.by_batch:
            strays |= set(counts) - {self.args.num_steps, 0}
        reading.dropped["not timed: iteration with another number of drafts, or none"] += sum(counts[k] for k in strays)
        prior_sd = pooled_sd((s.values for s in self._iterations.values()), BAND)
        places = sorted(place for place in {*self._iterations, *self._intervals} if place[0] not in strays)
        for steps, batch in places:
            samples = self._iterations.get((steps, batch))
            what, method_sd = "iterations, elapsed time", ITERATION_SD
            if samples is None:
                samples, method_sd = self._intervals[steps, batch], REPEAT_SD
                what = f"intervals, elapsed time * Running / {'drafts' if steps else 'tokens'}"
            summary = summarise(samples.values, band=BAND, prior_sd=prior_sd, method_sd=method_sd)
            reading.dropped["far from the median of its batch"] += summary.outliers
            reading.used[what.partition(",")[0]] += summary.count
            lines = f"lines {samples.first_line}-{samples.last_line}"
            row = {"num_steps": steps, "batch": batch} | summary.row("cycle_ms")
            if self.args.eager:
                row |= {"verify_cuda_graph": False} | ({"cuda_graph": False} if steps else {})
            row["note"] = f"{reading.source} {lines}: median of {summary.count} {what}"
            reading.cycles.append(row)
