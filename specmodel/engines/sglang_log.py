"""SGLang server logs: decode lines to cycle times and acceptance, start-up lines to what was captured and in force.

A decode line gives ``T = #running-req * accept len / gen throughput``. The count of tokens cancels in it, so it is good
to a fraction of a percent, but its wall time also holds idle time and prefills: such lines are dropped, by reason.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from specmodel.engines import sglang_args
from specmodel.engines.graphs import GIB, Captures
from specmodel.engines.pinned import ANCHORS, pins_acceptance
from specmodel.engines.reading import Given, Lengths, Reading, Samples, Shape, Summary, pooled_sd, summarise
from specmodel.engines.sglang_args import DEFAULT_LOG_INTERVAL, ServerArgs
from specmodel.engines.sglang_lines import HALF_CENT, Layout, definitions, fitting_tokens, layout_of
from specmodel.engines.stream import Handler, strip_ansi

__all__ = ["SglangLog"]

AFTER_DAMAGE = "after a damaged line"
AFTER_SWITCH = "the step count changed"
MAX_KINDS = 2**16
BAND = 1.25  # a line further from the median of its batch holds idle time, or another batch for a while

_DATE = re.compile(rb"\[(\d{4}-\d\d-\d\d)[ T]")
_DP = re.compile(rb" DP(\d+)")
_PP = re.compile(rb" PP(\d+)")
_STEPS = re.compile(rb"steps(?:=| )(\d+)(?: -> (\d+))?")
_TOKENS = re.compile(rb"draft_tokens (?:\d+ -> )?(\d+)")


@dataclass(slots=True)
class _Group:
    """The decode lines of one shape, batch and graph mode."""

    shape: Shape | None
    batch: int
    graph: bytes | None
    times_ms: Samples = field(default_factory=Samples)
    tokens: int = 0
    """Tokens in the cache, summed over the lines."""


@dataclass(slots=True)
class _Kind:
    """Decode lines that print the same batch, lengths and graph mode: parsed and checked once."""

    batch: int
    mean: float | None
    """Accept len, 1 without speculation; None where it cannot be."""
    group: _Group
    tokens_ms: float
    """Batch times accept len times 1000: over the throughput it is the cycle time."""
    count: int = 0


Key = tuple[bytes | Any, ...]
"""Accept len, accept rate, #running-req and graph mode as printed; None where a layout lacks one."""


def _later_stage(prefix: bytes) -> bool:
    found = _PP.findall(prefix[max(prefix.rfind(b"["), 0) :])
    return bool(found) and found[-1] != b"0"


class SglangLog:
    """Reads the lines of one log, one by one."""

    def __init__(self, source: str, given: Given) -> None:
        self.reading = Reading(source=source, kind="SGLang server log")
        self.given = given
        self.args: ServerArgs | None = None
        self.captures = Captures()
        self._args_text = b""
        self._shape: Shape | None = given.shape
        self._layout: Layout | None = None
        self._kinds: dict[Shape | None, dict[Key, _Kind]] = {}
        self._here: dict[Key, _Kind] = self._kinds.setdefault(self._shape, {})
        self._groups: dict[tuple[Shape | None, int, bytes | None], _Group] = {}
        self._lengths: dict[Shape | None, Lengths] = {}
        self._pairs: list[tuple[float, float]] = []
        self._eras: Counter[str] = Counter()
        self._ranks: dict[bytes, list[Any]] = {}
        self._graph = [0, 0]
        self._decode_lines = [0, 0]
        self._mixed = False

    @property
    def sure(self) -> bool:
        """Whether this is a log of SGLang beyond doubt."""
        return self.args is not None or self._layout is not None

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
            **dict.fromkeys(ANCHORS["sglang"], self._pinned),
        }

    def _rank(self, prefix: bytes) -> bytes:
        if b" DP" not in prefix:
            return b""
        found = _DP.findall(prefix[max(prefix.rfind(b"["), 0) :])
        return found[-1] if found else b""

    def _prefill(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        self._ranks.setdefault(self._rank(prefix), [0, "first decode line"])[1] = "after a prefill"

    def _decode(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        layout = self._layout
        readable = layout is not None and (complete or not layout.must_end)
        found = layout.pattern.match(text) if layout is not None and readable else None
        if layout is None or found is None:
            layout = layout_of(text)
            found = layout.pattern.match(strip_ansi(text)) if layout is not None else None
            if layout is None or found is None or (layout.must_end and not complete):
                self.reading.dropped["decode line cut off"] += 1
                self._ranks.setdefault(self._rank(prefix), [0, ""])[1] = AFTER_DAMAGE
                return
            self._layout = layout
        if b" PP" in prefix and _later_stage(prefix):
            self.reading.dropped["decode line of a later pipeline stage, which repeats the first one's"] += 1
            return
        length, rate, running, graph, tokens, throughput = found.group(*layout.places)
        key = (length, rate, running, graph)
        kind = self._here.get(key) or self._new_kind(key, prefix, line)
        kind.count += 1
        self._decode_lines[1] = line
        name = b"" if b" DP" not in prefix else self._rank(prefix)
        rank = self._ranks.get(name) or self._ranks.setdefault(name, [0, "first decode line"])
        if rank[1] or kind.batch != rank[0] or kind.mean is None:
            self._untimed(kind, rank)
            return
        group = kind.group
        try:
            speed = float(throughput)
            group.tokens += int(tokens[:12]) if tokens else 0
        except ValueError:
            speed = 0.0
        if 0 < speed < 1e8:
            group.times_ms.add(kind.tokens_ms / speed, line)
        else:
            self.reading.dropped["decode line with a damaged number"] += 1
            rank[1] = AFTER_DAMAGE

    def _untimed(self, kind: _Kind, rank: list[Any]) -> None:
        """Say why a line gives no time, and what the next line of its rank follows."""
        dropped, reason = self.reading.dropped, rank[1]
        changed = kind.batch != rank[0]
        rank[:] = kind.batch, ""
        if kind.mean is None:
            dropped["decode line with a damaged number, or an accept len that cannot be"] += 1
            rank[1] = AFTER_DAMAGE
        elif reason:
            dropped[f"not timed: {reason}"] += 1
            if reason == AFTER_SWITCH:
                kind.count -= 1
        elif changed:
            dropped["not timed: batch changed"] += 1

    def _new_kind(self, key: Key, prefix: bytes, line: int) -> _Kind:
        """Parse and check what lines of one kind have in common."""
        length, rate, running, graph = key
        if not self._decode_lines[0]:
            self._decode_lines[0] = line
            if date := _DATE.search(prefix):
                self.reading.date = date[1].decode()
        try:
            batch = int(running or b"")
            mean = self._check(length, rate) if length is not None else None if self._speculates() else 1.0
        except ValueError:
            batch, mean = 0, None
        if not 1 <= batch < 10**6:
            batch, mean = 0, None
        shape = self._shape if length is not None else Shape(num_steps=0)
        place = (shape, batch, graph)
        group = self._groups.get(place) or self._groups.setdefault(place, _Group(*place))
        if len(self._here) >= MAX_KINDS:
            self._fold()
        kind = self._here[key] = _Kind(batch, mean, group, 1e3 * batch * (mean or 0.0))
        return kind

    def _speculates(self) -> bool:
        """Whether every decode line states an accept len, as those of a server that speculates do."""
        return self.args is not None and self.args.speculating is True

    def _fold(self) -> None:
        """Pool the lengths of the kinds seen so far, and forget them."""
        for shape, kinds in self._kinds.items():
            for (length, _, _, graph), kind in kinds.items():
                if graph is not None:
                    self._graph[graph == b"True"] += kind.count
                if length is not None and kind.mean is not None and kind.count:
                    self._lengths.setdefault(shape, Lengths()).add(kind.mean, kind.batch, kind.count)
            kinds.clear()

    def _check(self, length_text: bytes, rate_text: bytes | None) -> float | None:
        """Return accept len if it can be, else None; remember which definitions of accept rate hold."""
        shape, length = self._shape, float(length_text)
        if not 1 - HALF_CENT <= length <= (shape.num_steps if shape else 1000) + 1 + HALF_CENT:
            return None
        if rate_text is None:
            return max(length, 1.0)
        rate = float(rate_text.rstrip(b"%")) / (100 if rate_text.endswith(b"%") else 1)
        if shape is None:
            self._pairs += [(length, rate)] * (len(self._pairs) < MAX_KINDS)
        elif self._rate_is_defined():
            holds = definitions(length, rate, shape)
            self._eras.update(holds or ("none",))
            if not holds:
                return None
        return max(length, 1.0)

    def _switch(self, shape: Shape | None) -> None:
        self._shape = shape
        self._here = self._kinds.setdefault(shape, {})

    def _args(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if text == self._args_text:
            self._ranks.clear()
            return
        self._args_text = text
        cut = text if complete else text[: max(text.rfind(b","), 0)] + b",)"
        args = sglang_args.from_text(strip_ansi(cut).decode("utf-8", "replace"))
        if (
            self.args is not None
            and args != self.args
            and (self.args.system != args.system or self.args.flags != args.flags)
        ):
            self._mixed = True
            self.reading.questions.append(
                f"line {line}: another server starts here, with other parallel sizes or all-reduce flags than before; "
                "split the log there and ingest the parts one by one. Its numbers are left out"
            )
        self.args = args
        self._switch(self.given.shape if args.shape is None and args.speculating is not False else args.shape)
        self._ranks.clear()
        self.reading.used["server arguments"] += 1

    def _adaptive(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if not complete or (found := _STEPS.search(text)) is None or len(found[0]) > 40:
            return
        steps = int(found[2] or found[1])
        tokens = _TOKENS.search(text)
        if tokens is None or int(tokens[1]) == steps + 1:
            self._switch(Shape(num_steps=steps))
        for rank in self._ranks.values():
            rank[1] = AFTER_SWITCH

    def _nccl(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := re.match(rb"sglang is using nccl==(\d+(?:\.\d+)+)", strip_ansi(text)):
            self.reading.saw("nccl_setting", f"NCCL {found[1].decode()}", f"line {line}")

    def _memory(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if found := re.match(rb"available_gpu_mem=(\d+(?:\.\d+)?) GB", strip_ansi(text)):
            self.captures.left_bytes = float(found[1]) * GIB
            self.captures.lines = [self.captures.lines[0] or line, line]

    def _pinned(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        if not self.reading.pinned and pins_acceptance(strip_ansi(text)):
            self.reading.pinned = True
            self.reading.saw("other", "acceptance is set by SGLANG_SIMULATE_ACC_LEN", f"line {line}")

    def _rate_is_defined(self) -> bool:
        """Whether accept rate follows from accept len: not while steps change, and not for block or n-gram drafts."""
        method = dict(self.args.model).get("method") if self.args is not None else None
        return not (self.args is not None and self.args.adaptive) and method not in ("parallel", "ngram")

    def finish(self) -> Reading | None:
        """Return what the log states; None if it is no log of SGLang."""
        self._fold()
        reading, captures = self.reading, self.captures
        seen = self._decode_lines[0] or self.args is not None or captures.lines[0] or reading.evidence
        if not seen:
            return None
        if self._mixed:
            return reading
        reading.pinned = bool(reading.pinned)
        if self.args is not None:
            self.args.into(reading)
        reading.system.setdefault("engine", "sglang")
        if sizes := captures.sizes.get("target"):
            reading.model.update(cuda_graph_sizes=list(sizes), cuda_graph_unit="sequences")
        self._evidence()
        if self.args is None and self._lengths:
            # One server's lines all have an accept len or none has.
            for key in [key for key in self._groups if key[0] is not None and not key[0].num_steps]:
                reading.dropped["decode line without accept len among others with it"] += self._groups.pop(
                    key
                ).times_ms.seen
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
            tokens = fitting_tokens(self._pairs)
        shown = f"{tokens} tokens a sequence are verified; if that is a chain, " if tokens else ""
        steps = tokens - 1 if tokens else "K"
        self.reading.questions.append(
            f"the log states no draft shape (no server_args line): {shown}say --num-steps {steps}; "
            "for a tree also --topk and --num-draft-tokens. Its decode lines are left out"
        )
        for key in [key for key in self._groups if key[0] is None]:
            self.reading.dropped["draft shape unknown"] += len(self._groups.pop(key).times_ms.values)
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
        groups = [group for group in self._groups.values() if group.times_ms.values]
        prior_sd = pooled_sd((group.times_ms.values for group in groups), BAND)
        summaries = {
            (g.shape, g.batch, g.graph): summarise(g.times_ms.values, band=BAND, prior_sd=prior_sd) for g in groups
        }
        for group in sorted(groups, key=lambda group: group.batch):
            summary = summaries[group.shape, group.batch, group.graph]
            graphed = summaries.get((group.shape, group.batch, b"True"))
            if group.graph == b"False" and graphed is not None and graphed.count >= summary.count:
                reading.dropped["not timed: the verify pass ran without its CUDA graph"] += len(group.times_ms.values)
                continue
            reading.dropped["not timed: idle or another batch for a while (far from the median)"] += summary.outliers
            reading.used["decode lines"] += summary.count
            if group.shape is not None:
                reading.cycles.append(self._cycle(group.shape, group, summary, data_parallel))

    def _cycle(self, shape: Shape, group: _Group, summary: Summary, data_parallel: int) -> dict[str, Any]:
        disabled = self.args is not None and self.args.graphs_disabled
        row = shape.row() | {"batch": group.batch * data_parallel}
        times = group.times_ms
        if group.tokens:
            row["context_tokens"] = round(group.tokens / group.batch / times.seen)
        row |= summary.row("cycle_ms")
        if shape.num_steps and self._draft_graph() is False:
            row["cuda_graph"] = False
        if group.graph == b"False" or (group.graph is None and disabled):
            row["verify_cuda_graph"] = False
        formula = f"#running-req{' * accept len' if shape.num_steps else ''} / gen throughput"
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
