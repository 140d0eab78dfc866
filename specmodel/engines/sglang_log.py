"""SGLang server logs: decode lines to cycle times and acceptance, start-up lines to what was captured and in force.

A decode line gives ``T = #running-req * accept len / gen throughput``. The count of tokens cancels in it, so it is good
to a fraction of a percent, but its wall time also holds idle time and prefills: such lines are dropped, by reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specmodel.engines import sglang_args
from specmodel.engines.graphs import Captures
from specmodel.engines.reading import Given, Lengths, Reading, Samples, Shape, Summary, pooled_sd, summarise
from specmodel.engines.sglang_args import DEFAULT_LOG_INTERVAL, ServerArgs
from specmodel.engines.stream import Handler, strip_ansi

__all__ = ["SglangLog"]

WANTED = ("running", "tokens", "length", "rate", "graph", "throughput")
NAMES = {
    "#running-req": "running",
    "#token": "tokens",
    "#full token": "tokens",
    "accept len": "length",
    "accept rate": "rate",
    "gen throughput (token/s)": "throughput",
    "cuda graph": "graph",
    "npu graph": "graph",
    "musa graph": "graph",
    "cpu graph": "graph",
}
HALF_CENT = 0.0051  # numbers are printed with two decimals
BAND = 1.25  # a line further from the median of its batch holds idle time, or another batch for a while

_START = re.compile(rb"Decode batch(?: ?\[\d+\])?[.,] ")
_STAMP = re.compile(rb"\[\d{4}-\d\d-\d\d[ T]")
_DATE = re.compile(rb"\[(\d{4}-\d\d-\d\d)[ T]")
_DP = re.compile(rb" DP(\d+)")
_STEPS = re.compile(rb"steps(?:=| )(\d+)(?: -> (\d+))?")
_TOKENS = re.compile(rb"draft_tokens (?:\d+ -> )?(\d+)")

ERAS: dict[str, Callable[[float, Shape], float]] = {
    "accept len / num_draft_tokens, bonus in both": lambda length, shape: length / shape.verify_tokens,
    "accept len / (num_steps + 1), bonus in both": lambda length, shape: length / (shape.num_steps + 1),
    "(accept len - 1) / (num_draft_tokens - 1), drafts only": lambda length, shape: (
        (length - 1) / max(shape.verify_tokens - 1, 1)
    ),
}


@dataclass(slots=True)
class _Group:
    """The decode lines of one shape, batch and graph mode."""

    times: Samples = field(default_factory=Samples)
    context: float = 0.0
    contexts: int = 0


class SglangLog:
    """Reads the lines of one log, one by one."""

    def __init__(self, source: str, given: Given) -> None:
        self.reading = Reading(source=source, kind="SGLang server log")
        self.given = given
        self.args: ServerArgs | None = None
        self.captures = Captures()
        self._shape: Shape | None = given.shape
        self._layout: re.Pattern[bytes] | None = None
        self._order: tuple[int | None, ...] = ()
        self._groups: dict[tuple[Shape | None, int, bytes | None], _Group] = {}
        self._lengths: dict[Shape | None, Lengths] = {}
        self._pairs: dict[tuple[Shape | None, bytes, bytes], float | None] = {}
        self._eras: Counter[str] = Counter()
        self._ranks: dict[bytes, list[Any]] = {}
        self._graph = [0, 0]
        self._decode_lines = [0, 0]

    def handlers(self) -> dict[bytes, Handler]:
        """Return what to call for each anchor."""
        return {
            b"Decode batch": self._decode,
            b"Prefill batch": self._prefill,
            b"apture ": self.captures.feed,
            b"server_args=": self._args,
            b"daptive": self._adaptive,
            b"sglang is using nccl==": self._nccl,
            b"available_gpu_mem=": self._memory,
        }

    def _rank(self, prefix: bytes) -> bytes:
        if b" DP" not in prefix:
            return b""
        found = _DP.findall(prefix[max(prefix.rfind(b"["), 0) :])
        return found[-1] if found else b""

    def _prefill(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        self._ranks.setdefault(self._rank(prefix), [0, "first decode line"])[1] = "after a prefill"

    def _decode(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        dropped = self.reading.dropped
        found = self._layout.match(text) if self._layout is not None else None
        if found is None:
            found = self._learn(text, complete)
            if found is None:
                dropped["decode line cut off"] += 1
                self._ranks.setdefault(self._rank(prefix), [0, ""])[1] = "after a line that was cut off"
                return
        groups = found.groups()
        running, tokens, length, rate, graph, throughput = [None if i is None else groups[i] for i in self._order]
        rank = self._ranks.setdefault(self._rank(prefix), [0, "first decode line"])
        reason, rank[1] = rank[1], ""
        try:
            batch, speed = int(running or b""), float(throughput or b"")
        except ValueError:
            dropped["decode line with a damaged number"] += 1
            rank[1] = "after a line that was cut off"
            return
        if not self._decode_lines[0]:
            self._decode_lines[0] = line
            if date := _DATE.search(prefix):
                self.reading.date = date[1].decode()
        self._decode_lines[1] = line
        previous, rank[0] = rank[0], batch
        if graph is not None:
            self._graph[graph == b"True"] += 1
        mean = 1.0
        if length is not None:
            key = (self._shape, length, rate or b"")
            checked = self._pairs[key] if key in self._pairs else self._check(key)
            if checked is None:
                dropped["accept len impossible, or at odds with accept rate"] += 1
                return
            mean = checked
            if batch > 0 and reason != "a switch of the step count":
                self._lengths.setdefault(self._shape, Lengths()).add(mean, batch)
        if batch < 1 or not 0 < speed < 1e8:
            dropped["not timed: no running request, or no throughput"] += 1
        elif reason or batch != previous:
            dropped[f"not timed: {reason or 'batch changed'}"] += 1
        else:
            place = (self._shape if length is not None else Shape(num_steps=0), batch, graph)
            group = self._groups.get(place) or self._groups.setdefault(place, _Group())
            group.times.add(1e3 * batch * mean / speed, line)
            if tokens is not None and tokens.isdigit() and len(tokens) < 12:
                group.context += int(tokens) / batch
                group.contexts += 1

    def _learn(self, text: bytes, complete: bool) -> re.Match[bytes] | None:
        """Read a line by its names in whatever order, and make of that order a pattern for the lines to come."""
        text = strip_ansi(text)
        if stamp := _STAMP.search(text):
            text = text[: stamp.start()]
        start = _START.match(text)
        if start is None:
            return None
        names, fields = [], []
        for part in text[start.end() :].split(b", "):
            name, colon, _ = part.partition(b": ")
            if not colon:
                break
            known = NAMES.get(name.decode("utf-8", "replace"))
            if known is not None and known in fields:
                return None
            names.append(name)
            fields.append(known)
            if name == b"#queue-req":
                break
        if "throughput" not in fields or "running" not in fields or names[-1] != b"#queue-req":
            return None
        number = rb"([^,\r\n\[\x1b]*)"
        parts = [
            re.escape(name) + b": " + (number if known else number[1:-1])
            for name, known in zip(names, fields, strict=True)
        ]
        pattern = re.compile(_START.pattern + b", ".join(parts[:-1]) + rb", \#queue-req: \d")
        captured = [known for known in fields if known]
        match = pattern.match(text)
        if match is not None:
            self._layout = pattern
            self._order = tuple(captured.index(name) if name in captured else None for name in WANTED)
        return match

    def _check(self, key: tuple[Shape | None, bytes, bytes]) -> float | None:
        """Return the accept len of a line if it can be, else None; remember which definitions of accept rate hold."""
        shape, length_text, rate_text = key
        value: float | None = None
        try:
            length = float(length_text)
            rate = float(rate_text) if rate_text else None
        except ValueError:
            rate, length = None, 0.0
        longest = (shape.num_steps if shape else 1000) + 1
        if 1 - HALF_CENT <= length <= longest + HALF_CENT:
            value = max(length, 1.0)
            if rate is not None and shape is not None and self._rate_is_defined():
                slack = HALF_CENT + HALF_CENT / max(shape.verify_tokens - 1, 1)
                holds = [name for name, define in ERAS.items() if abs(define(length, shape) - rate) <= slack]
                self._eras.update(holds or ("none",))
                value = value if holds else None
        self._pairs[key] = value
        return value

    def _args(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        cut = text if complete else text[: max(text.rfind(b","), 0)] + b",)"
        args = sglang_args.from_text(strip_ansi(cut).decode("utf-8", "replace"))
        if (
            self.args is not None
            and args != self.args
            and (self.args.system != args.system or self.args.flags != args.flags)
        ):
            self.reading.questions.append(
                f"line {line}: another server starts here, with other parallel sizes or all-reduce flags than before; "
                "split the log there and ingest the parts one by one"
            )
        self.args = args
        self._shape = self.given.shape if args.shape is None and args.speculating else args.shape
        self._ranks.clear()
        self.reading.used["server arguments"] += 1

    def _adaptive(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if not complete or (found := _STEPS.search(text)) is None or len(found[0]) > 40:
            return
        steps = int(found[2] or found[1])
        tokens = _TOKENS.search(text)
        self._shape = Shape(num_steps=steps) if tokens is None or int(tokens[1]) == steps + 1 else self._shape
        for rank in self._ranks.values():
            rank[1] = "a switch of the step count"

    def _nccl(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := re.match(rb"sglang is using nccl==(\d+(?:\.\d+)+)", text):
            self.reading.saw("nccl_setting", f"NCCL {found[1].decode()}", f"line {line}")

    def _memory(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := re.match(rb"available_gpu_mem=(\d+(?:\.\d+)?) GB", text):
            self.captures.left_gib = float(found[1])
            self.captures.lines = [self.captures.lines[0] or line, line]

    def _rate_is_defined(self) -> bool:
        """Whether accept rate follows from accept len: not while steps change, and not for block or n-gram drafts."""
        method = dict(self.args.model).get("method") if self.args is not None else None
        return not (self.args is not None and self.args.adaptive) and method not in ("parallel", "ngram")

    def finish(self) -> Reading | None:
        """Return what the log states; None if it is no log of SGLang."""
        reading, captures = self.reading, self.captures
        seen = self._decode_lines[0] or self.args is not None or captures.begun or captures.ended or reading.evidence
        if not seen:
            return None
        if self.args is not None:
            self.args.into(reading)
        reading.system.setdefault("engine", "sglang")
        if sizes := captures.sizes.get("target"):
            reading.model.update(cuda_graph_sizes=list(sizes), cuda_graph_unit="sequences")
        self._evidence()
        if None in self._lengths:
            self._ask_shape()
        elif self._eras["none"] > 0.5 * sum(self._eras.values()):
            reading.questions.append(
                "accept rate follows from accept len by none of the definitions of SGLang's versions: was one of them "
                "changed, or do the lines belong to another server than the arguments? Times and lengths are left out"
            )
            return reading
        self._rows()
        return reading

    def _ask_shape(self) -> None:
        """Say what the log shows of the draft shape that it does not state; leave its numbers out."""
        tokens = self.captures.verify_tokens
        if tokens is None:
            pairs = [key[1:] for key, value in self._pairs.items() if key[0] is None and value and key[2]]
            fits = {nd for nd in range(2, 65) for era in ERAS.values() if len(pairs) >= 5 and _fit(pairs, nd, era)}
            tokens = fits.pop() if len(fits) == 1 else None
        shown = f"{tokens} tokens a sequence are verified; if that is a chain, " if tokens else ""
        steps = tokens - 1 if tokens else "K"
        self.reading.questions.append(
            f"the log states no draft shape (no server_args line): {shown}say --num-steps {steps}; "
            "for a tree also --topk and --num-draft-tokens. Its decode lines are left out"
        )
        for key in [key for key in self._groups if key[0] is None]:
            self.reading.dropped["draft shape unknown"] += len(self._groups.pop(key).times.values)
        self._lengths.pop(None)

    def _rows(self) -> None:
        reading, args = self.reading, self.args
        data_parallel = args.data_parallel if args is not None else 1
        interval = args.log_interval if args is not None else DEFAULT_LOG_INTERVAL
        where = f"lines {self._decode_lines[0]}-{self._decode_lines[1]}"
        for shape, lengths in self._lengths.items():
            if shape is not None:
                note = f"{reading.source} {where}: accept len of {lengths.count} decode lines, weighted by #running-req"
                era = self._eras.most_common(1)
                note += f"; accept rate is {era[0][0]}" if era and era[0][1] >= 3 else ""
                reading.acceptance.append(lengths.row(shape, interval) | {"note": note})
        prior_sd = pooled_sd((group.times.values for group in self._groups.values()), BAND)
        summaries = {
            key: summarise(group.times.values, band=BAND, prior_sd=prior_sd) for key, group in self._groups.items()
        }
        for key, group in sorted(self._groups.items(), key=lambda item: item[0][1]):
            shape, batch, graph = key
            other = summaries.get((shape, batch, b"True"))
            if shape is None or (graph == b"False" and other is not None and other.count >= summaries[key].count):
                reading.dropped["not timed: the verify pass ran without its CUDA graph"] += len(group.times.values)
                continue
            summary = summaries[key]
            reading.dropped["not timed: idle or another batch for a while (far from the median)"] += summary.outliers
            reading.used["decode lines"] += summary.count
            reading.cycles.append(self._cycle(shape, batch * data_parallel, graph, group, summary))
        reading.dropped += Counter()

    def _cycle(self, shape: Shape, batch: int, graph: bytes | None, group: _Group, summary: Summary) -> dict[str, Any]:
        disabled = self.args is not None and self.args.graphs_disabled
        row = shape.row() | {"batch": batch}
        if group.contexts:
            row["context_tokens"] = round(group.context / group.contexts)
        row |= summary.row("cycle_ms")
        if shape.num_steps and self._draft_graph() is False:
            row["cuda_graph"] = False
        if graph == b"False" or (graph is None and disabled):
            row["verify_cuda_graph"] = False
        formula = f"#running-req{' * accept len' if shape.num_steps else ''} / gen throughput"
        times = group.times
        lines = f"lines {times.first_line}-{times.last_line}"
        row["note"] = f"{self.reading.source} {lines}: median of {summary.count} decode lines, {formula}"
        return row

    def _draft_graph(self) -> bool | None:
        """Whether the draft steps were captured; not, where the target was and no line speaks of the drafter."""
        state = self.captures.state("draft")
        if state is not None:
            return state
        args = self.args
        if args is None or not args.speculating:
            return None
        if args.graphs_disabled:
            return False
        drafts = (
            args.shape is not None
            and args.shape.num_steps > 1
            and dict(args.model).get("method") in ("eagle", "eagle3", "mtp")
        )
        return False if drafts and self.captures.state("target") and self._decode_lines[0] else None

    def _evidence(self) -> None:
        reading, captures, args = self.reading, self.captures, self.args
        captures.report(reading)
        if args is not None and args.graphs_disabled and captures.state("target") is None:
            reading.saw("target_cuda_graph", False, "server arguments, disable_cuda_graph")
        if captures.state("draft") is None and self._draft_graph() is False:
            reading.saw("draft_cuda_graph", False, "start-up", None, "no line says that the draft steps were captured")
        off, on = self._graph
        if on or off:
            where = f"decode lines {self._decode_lines[0]}-{self._decode_lines[1]}"
            note = f"{on} of {on + off} lines replayed the graph of the verify pass"
            reading.saw("decode_with_cuda_graph", on >= off, where, None, note)
        if args is not None and (allreduce := args.allreduce()):
            reading.saw("allreduce_implementation", allreduce, "server arguments", args.tensor_parallel)


def _fit(pairs: list[tuple[bytes, bytes]], tokens: int, define: Callable[[float, Shape], float]) -> bool:
    """Whether one definition of accept rate holds for all but a few of the lines with so many verified tokens."""
    shape = Shape(num_steps=tokens - 1)
    slack = HALF_CENT + HALF_CENT / max(tokens - 1, 1)
    misses = sum(abs(define(float(length), shape) - float(rate)) > slack for length, rate in pairs)
    return misses <= 0.02 * len(pairs)
