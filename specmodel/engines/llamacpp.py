"""llama.cpp: server logs and the print-out of speculative-simple."""

from __future__ import annotations

import re
from collections import OrderedDict

from specmodel.engines.llamacpp_requests import Request, add_group, agree, group
from specmodel.engines.pinned import ANCHORS, pins_acceptance
from specmodel.engines.reading import Given, Reading, Shape, rounded, summarise
from specmodel.engines.redact import gpu_name, model_name
from specmodel.engines.stream import Handler, strip_ansi

__all__ = ["LlamaLog"]

_TASK = re.compile(rb"id\s+(\d+)\s*\|\s*task\s+(-?\d+)\s*\|")
_EVAL = re.compile(
    rb"eval time =\s*(\d+\.\d+) (ms|s) /\s*(\d{1,9})\s+(?:tokens|runs)"
    rb"(?:\s*\(\s*[\d.]+ ms per token,\s*(?P<rate>\d+\.\d+) tokens per)?"
)
_DRAFT = re.compile(
    rb"draft acceptance(?: rate)? = (\d{1,3}\.\d+)(%?) \(\s*(\d{1,9}) accepted /\s*(\d{1,9}) generated\)"
)
_MEAN = re.compile(rb"mean (?:len|acceptance length) =\s*(\d{1,4}\.\d+)")
_RATES = re.compile(rb"acc(?:eptance rate)? per pos(?:ition)? = \((\d\.\d+(?:, \d\.\d+)*)\)")
_STATISTICS = re.compile(
    rb"statistics\s+(?P<name>[\w-]+):.*?#calls\(b,g,a\) =\s*\d+\s+(?P<calls>\d+)\s+\d+.*?"
    rb"#gen tokens =\s*(?P<tokens>\d+).*?dur\(b,g,a\) =\s*[\d.]+,\s*(?P<ms>\d+\.\d+),"
)
_LIMIT = re.compile(rb"n_max=(\d{1,3}), n_min=\d+, p_min=\d")
_LOADING = re.compile(rb"loading (draft )?model '([^']{1,500})'")
_KIND = re.compile(rb"implementation '(?:draft-)?([a-z0-9]+)")
_METHODS = {
    b"simple": "draft_model",
    b"eagle3": "eagle3",
    b"mtp": "mtp",
    b"dflash": "parallel",
    b"dspark": "parallel",
    b"ngram": "ngram",
}
_SIMPLE = re.compile(rb"n_(draft|predict|drafted|accept)\s*=\s*(\d{1,9})(?=\s|$)")
_DECODED = re.compile(rb"decoded\s+(\d{1,9}) tokens in\s+(\d+\.\d+) seconds")
_DEVICE = re.compile(rb"Device \d+: ([^,]{2,60}), compute capability")
_BUILD = re.compile(rb"build(?:_info:|:)? (?:b?([1-9]\d{3,5}))(?:-| \()")
_SIZE = re.compile(rb"print_info: n_(embd|layer|expert|expert_used)\s*=\s*([1-9]\d{0,6})\s*$")
_PINNED = re.compile(rb"synthetic (?:speculative )?acceptance")
_PINNED_LIMIT = re.compile(rb"synthetic acceptance: n_max = ([1-9]\d{0,2}),")
_SIZES = {
    b"embd": "hidden_size",
    b"layer": "num_layers",
    b"expert": "num_experts",
    b"expert_used": "experts_per_token",
}
_PASS_A_TOKEN = (b"draft-simple", b"draft-eagle3", b"draft-mtp")
"""Drafters that make one pass for each token: a draft cut short took that much less."""
MOST_REQUESTS = 2**15
MOST_OPEN = 2**12
"""Requests whose lines may still come."""
WHOLE_DRAFTS = 0.8
"""Share of the chain that drafts must have on average for their time to tell that of whole ones."""


class LlamaLog:
    """Reads the lines of one log of llama-server, or the print-out of llama-speculative-simple."""

    def __init__(self, source: str, given: Given) -> None:
        self.reading = Reading(source=source, kind="llama.cpp log")
        self.given = given
        self._requests: list[Request] = []
        self._open: OrderedDict[bytes, Request] = OrderedDict()
        self._busy: set[bytes] = set()
        self._shared: set[bytes] = set()
        self._latest = b""
        self._simple: dict[bytes, int] = {}
        self._decoded: tuple[int, float] | None = None
        self._drafting: dict[bytes, tuple[int, int, float, int | None]] = {}
        self._limit: int | None = None
        self._seen = self._full = False
        self._drafter_loads = False

    @property
    def sure(self) -> bool:
        """Whether this is a log of llama.cpp beyond doubt."""
        return self._seen

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor; a server prints none of speculative-simple's."""
        simple = () if self._requests else (b"n_draft", b"n_predict", b"n_accept", b"decoded ")
        return {
            b"eval time =": self._evaluated,
            b"draft acceptance": self._drafted,
            b"acc per pos": self._positions,
            b"statistics ": self._statistics,
            b" processing": self._processing,
            b"compute capability": self._device,
            b"build": self._build,
            b", p_min=": self._limited,
            b"print_info: n_": self._size,
            b" model '": self._loading,
            b"speculative implementation '": self._implementation,
            **dict.fromkeys(simple, self._printed),
            **dict.fromkeys(ANCHORS["llamacpp"], self._pinned),
        }

    def _key(self, prefix: bytes) -> bytes:
        found = _TASK.search(prefix)
        return b"/".join(found.groups()) if found else self._latest

    def _processing(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if prefix.endswith(b"stop"):
            self._stopped(prefix)
        elif text.startswith(b" processing task"):
            self._started(prefix)

    def _started(self, prefix: bytes) -> None:
        if found := _TASK.search(prefix):
            self._busy.add(b"/".join(found.groups()))
            if len(self._busy) > 1:
                self._shared |= self._busy

    def _stopped(self, prefix: bytes) -> None:
        if found := _TASK.search(prefix):
            key = b"/".join(found.groups())
            self._busy.discard(key)
            if key in self._open:
                self._open[key].released = True

    def _evaluated(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if prefix.rstrip().endswith(b"prompt"):
            task = _TASK.search(prefix)
            self._latest = b"/".join(task.groups()) if task else b"line %d" % line
            return
        if len(self._requests) >= MOST_REQUESTS:
            self._full = True
            self.reading.dropped[f"requests beyond the first {MOST_REQUESTS}"] += 1
            return
        found = _EVAL.match(strip_ansi(text))
        task = _TASK.search(prefix)
        if found is None or (task is None and (b"perf" in prefix or b"llama_print_timings" in prefix)):
            return
        self._seen = True
        key = b"/".join(task.groups()) if task else self._latest
        if (before := self._open.get(key)) is not None and before.line < line - 2:
            before.shared |= key in self._shared
        eval_ms = float(found[1]) * (1e3 if found[2] == b"s" else 1)
        request = Request(eval_ms=eval_ms, tokens=int(found[3]), line=line, shared=key in self._shared)
        request.limit = self._limit
        if found["rate"] and not agree(request.tokens, request.eval_ms, float(found["rate"])):
            request.tokens = 0  # counted as damaged at the end
        self._open[key] = request
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        self._requests.append(request)

    def _drafted(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if self._full:
            return
        text = strip_ansi(text)
        # Older builds name slot and task on some lines of a request only.
        found, request = _DRAFT.match(text), self._open.get(self._key(prefix)) or self._open.get(self._latest)
        if found is None or request is None:
            self.reading.dropped["draft line cut off, or without its request"] += 1
            if request is not None:
                request.tokens = 0  # it drafted: it must not pass for plain decoding
            return
        accepted, drafted = int(found[3]), int(found[4])
        scale = 0.01 if found[2] else 1.0
        digit = scale * 10.0 ** -len(found[1].partition(b".")[2])
        if accepted > drafted or abs(accepted / max(drafted, 1) - scale * float(found[1])) > 0.6 * digit:
            self.reading.dropped["draft line whose numbers contradict each other"] += 1
            request.tokens = 0
            return
        request.accepted, request.drafted = accepted, drafted
        if mean := _MEAN.search(text):
            request.mean = float(mean[1])
        self._rates(request, text)

    def _positions(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if not self._full and (request := self._open.get(self._key(prefix))) is not None:
            self._rates(request, strip_ansi(text))

    def _rates(self, request: Request, text: bytes) -> None:
        if found := _RATES.search(text):
            rates = found[1].split(b", ")
            request.rates = tuple(float(rate) for rate in rates)
            request.half_digit = 0.5 * 10.0 ** -len(rates[0].partition(b".")[2])

    def _statistics(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        # Cumulative over a server's life: the last line holds all the others.
        if (found := _STATISTICS.match(strip_ansi(text))) and int(found["calls"]):
            self._drafting[found["name"]] = (int(found["calls"]), int(found["tokens"]), float(found["ms"]), self._limit)

    def _device(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := _DEVICE.search(strip_ansi(prefix + text[:20])):
            self.reading.system["gpu"] = gpu_name(found[1].decode("utf-8", "replace"))
            self._seen = True

    def _build(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := _BUILD.match(strip_ansi(text)):
            self.reading.system["engine_version"] = f"b{found[1].decode()}"

    def _size(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if complete and not self._drafter_loads and (found := _SIZE.match(strip_ansi(text))):
            self.reading.model[_SIZES[found[1]]] = int(found[2])

    def _pinned(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        set_to = not text.startswith(b"SPEC_SYNTH_") or pins_acceptance(strip_ansi(text))
        said = not text.startswith(b"synthetic ") or _PINNED.match(text) is not None
        if self.reading.pinned is None and set_to and said:
            self.reading.pinned = True
            words = "acceptance is set by --spec-synth-len or --spec-synth-rates"
            self.reading.saw("other", words, f"line {line}")
        if found := _PINNED_LIMIT.match(strip_ansi(text)):
            self._limit = int(found[1])

    def _limited(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if (found := _LIMIT.search(strip_ansi(prefix[-40:] + text[:20]))) and 0 < int(found[1]) <= 256:
            self._limit = int(found[1])

    def _loading(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        found = _LOADING.search(strip_ansi(prefix[-20:] + text))
        if found is not None and (name := model_name(found[2].decode("utf-8", "replace"))):
            self.reading.model["draft" if found[1] else "target"] = name
            self._drafter_loads = bool(found[1])

    def _implementation(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if (found := _KIND.search(strip_ansi(text))) and (method := _METHODS.get(found[1])):
            self.reading.model["method"] = method

    def _printed(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        text = strip_ansi(text)
        if found := _SIMPLE.match(text):
            self._simple[found[1]] = int(found[2])
        elif found := _DECODED.match(text):
            self._decoded = (int(found[1]), 1e3 * float(found[2]))

    def finish(self) -> Reading | None:
        """Return what was printed; None if it is nothing of llama.cpp."""
        reading = self.reading
        if not self._seen and not reading.pinned and not (self._decoded and self._simple):
            return None
        reading.system["engine"] = "llama.cpp"
        reading.pinned = bool(reading.pinned)
        if self._decoded is not None and {b"draft", b"predict", b"drafted", b"accept"} <= self._simple.keys():
            self._speculative_simple(*self._decoded)
        self._server()
        return reading

    def _speculative_simple(self, decoded: int, decode_ms: float) -> None:
        reading = self.reading
        steps, predicted, drafted, accepted = (
            self._simple[name] for name in (b"draft", b"predict", b"drafted", b"accept")
        )
        cycles = predicted - accepted
        if (
            cycles < 1
            or accepted > drafted
            or steps < 1
            or abs(decoded - predicted) > 1
            or decode_ms <= 0
            or drafted > steps * cycles
        ):
            reading.dropped["print-out whose numbers contradict each other"] += 1
            return
        reading.used["print-outs"] += 1
        cycle = decode_ms / cycles
        note = f"{reading.source}: decoded in {decode_ms:g} ms over n_predict - n_accept = {cycles} cycles"
        row = {"num_steps": steps, "batch": 1, "acceptance_length": rounded(predicted / cycles, 7)}
        if steps * cycles - drafted > steps:
            row["mean_draft_tokens"] = rounded(drafted / cycles)
        spread = summarise([cycle]).row("cycle_ms")
        reading.cycles.append(row | spread | {"note": note})

    def _server(self) -> None:
        reading, given = self.reading, self.given
        drafted = [request.released for request in self._requests if request.drafted]
        if drafted and all(drafted) and self._requests[-1].accepted is None and not self._requests[-1].released:
            reading.dropped["the last request, of which the log ends before it says whether it drafted"] += 1
            self._requests.pop()
        requests = [r for r in self._requests if r.tokens > 1 and r.eval_ms > 0]
        reading.dropped["requests of one token, or damaged"] += len(self._requests) - len(requests)
        known = given.shape.num_steps if given.shape is not None else self._limit
        for request in requests:
            request.limit = request.limit or known or None
        usable = [r for r in requests if r.possible()]
        reading.dropped["requests whose counts contradict each other, or the steps"] += len(requests) - len(usable)
        groups: dict[tuple[int, bool], list[Request]] = {}
        reading.dropped["requests of an unknown number of steps"] += group(usable, known, groups)
        if reading.dropped["requests of an unknown number of steps"]:
            reading.questions.append("drafts stop early and the log does not say where: say --num-steps")
        known = known or max((steps for steps, _ in groups), default=0) or None
        if known is not None:
            reading.shape = Shape(num_steps=known)
        for (steps, _), members in sorted(groups.items()):
            add_group(reading, steps, members)
        self._draft_times(known)

    def _draft_times(self, steps: int | None) -> None:
        for name, (calls, tokens, ms, limit) in self._drafting.items():
            chain = limit or steps
            if chain is None or tokens > calls * chain:
                self.reading.dropped["draft times of an unknown number of steps"] += 1
                continue
            mean, time_ms = tokens / calls, ms / calls
            if mean < WHOLE_DRAFTS * chain:
                self.reading.dropped["draft times of drafts that were mostly cut short"] += 1
                continue
            note = f"{self.reading.source}: statistics of {name.decode('ascii', 'replace')}"
            note += f", {calls} drafts of {mean:.3g} tokens"
            if mean < chain and name in _PASS_A_TOKEN:
                note += f", {time_ms:.4g} ms each; here that of {chain}"
                time_ms *= chain / mean
            row = {"num_steps": chain, "batch": 1} | summarise([time_ms]).row("time_ms")
            self.reading.draft.append(row | {"note": note})
