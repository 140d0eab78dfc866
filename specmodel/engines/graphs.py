"""Whether CUDA graphs were captured, by rank: from the lines that SGLang prints when it captures.

A line is about the target (the verify pass), the draft steps or the draft extension; ranks are told by the prefix. The
last line of a log may be cut: a rank that began and whose cut line can only be its end counts, and the note says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from specmodel.engines.reading import Reading
from specmodel.engines.stream import strip_ansi

__all__ = ["Captures"]

GIB = 2**30
MAX_KNOWN = 2**12
_LINE = re.compile(
    rb"apture\s+(?P<what>[a-z ]*?)cuda graph(?:\s+(?P<event>begin|end|failed|bs\b)|\s*(?P<rest>[a-z]*)$)", re.I
)
_RANK = re.compile(rb"\b((?:ATTN_CP|MOE_DP|DP|PP|TP|EP)\d+)\b")
_MEMORY = re.compile(rb"avail mem\s*=\s*(\d+(?:\.\d+)?) GB")
_SIZES = re.compile(rb"\bbs\s*=?\s*\[([\d, ]*)\]", re.I)
_TOKENS = re.compile(rb"num_tokens_per_(?:req|bs)=(\d+)")
_STAMP = re.compile(rb"\[\d{4}-\d\d-\d\d ")
PARTS = {"": "target", "target verify": "target", "target decode": "target", "draft": "draft", "draft decode": "draft"}


@dataclass(slots=True)
class Captures:
    """What was seen of captures, by part (target, draft, draft extend) and rank."""

    begun: dict[str, set[bytes]] = field(default_factory=dict)
    ended: dict[str, set[bytes]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    cut: set[str] = field(default_factory=set)
    free_bytes: dict[bytes, float] = field(default_factory=dict)
    left_bytes: float | None = None
    """What SGLang prints as available_gpu_mem once all is loaded and captured; rank 0."""
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    verify_tokens: int | None = None
    lines: list[int] = field(default_factory=lambda: [0, 0])
    nameless: bool = False
    """Whether a line tells no rank, which is right on one GPU alone."""
    _known: set[tuple[bytes, bytes]] = field(default_factory=set)

    def feed(self, prefix: bytes, text: bytes, line: int, complete: bool) -> None:
        """Take one line in which something is captured."""
        prefix = strip_ansi(prefix)
        stated = b" ".join(_RANK.findall(prefix[max(prefix.rfind(b"["), 0) :]))
        rank = stated or b"TP0"
        self.nameless = self.nameless or not stated
        key = (rank, text)
        if complete and key in self._known:
            self.lines[1] = line  # a log of many starts
            return
        if len(self._known) < MAX_KNOWN:
            self._known.add(key)
        text = strip_ansi(text)
        if stamp := _STAMP.search(text):
            text, complete = text[: stamp.start()], True
        found = _LINE.match(text.rstrip())
        if found is None or (found["event"] is None and complete):
            return
        what = b" ".join(found["what"].lower().split()).decode()
        part = "draft extend" if what.startswith("draft extend") else PARTS.get(what)
        if part is None:
            return
        self.lines = [self.lines[0] or line, line]
        event = self._event(found, part, rank)
        if event == "begin":
            self.begun.setdefault(part, set()).add(rank)
            if (sizes := _SIZES.search(text)) and (numbers := re.findall(rb"\d+", sizes[1])):
                self.sizes[part] = tuple(sorted({int(number) for number in numbers if len(number) < 7} - {0}))
            if part == "target" and (tokens := _TOKENS.search(text)):
                self.verify_tokens = int(tokens[1])
        elif event == "end":
            self.ended.setdefault(part, set()).add(rank)
        elif event == "bs" and (sizes := _SIZES.search(text)):
            self.sizes.setdefault(
                part, tuple(sorted({int(n) for n in re.findall(rb"\d+", sizes[1]) if len(n) < 7} - {0}))
            )
        elif event == "failed":
            self.failed.add(part)
        if event == "end" and (memory := _MEMORY.search(text)):
            self.free_bytes[rank] = float(memory[1]) * GIB

    def _event(self, found: re.Match[bytes], part: str, rank: bytes) -> str | None:
        """Tell begin from end, where the last line of the log is cut by what can still follow."""
        if found["event"] is not None:
            return found["event"].lower().decode()
        rest = found["rest"].lower()
        if rest and b"begin".startswith(rest):
            return "begin"
        may_be_end = bool(rest) and b"end".startswith(rest)
        if may_be_end or (not rest and rank in self.begun.get(part, ())):
            self.cut.add(part)
            return "end"
        return None

    def state(self, part: str) -> bool | None:
        """Whether the part was captured; None where no line says so."""
        if self.ended.get(part):
            return True
        return False if part in self.failed else None

    def report(self, reading: Reading) -> None:
        """Put what was seen into the evidence of a reading."""
        where = f"lines {self.lines[0]}-{self.lines[1]}, capture of CUDA graphs"
        unranked = self.nameless and reading.system.get("tensor_parallel") != 1
        for part, about in (("target", "target_cuda_graph"), ("draft", "draft_cuda_graph")):
            captured = self.state(part)
            if captured is None:
                continue
            ranks, begun = len(self.ended.get(part, ())), len(self.begun.get(part, ()))
            note = self._note(part, ranks, begun)
            note += "; on how many ranks is not told: the lines name none" if unranked else ""
            reading.saw(about, captured, where, None if unranked else ranks or None, note)
        if self.free_bytes:
            least, most = min(self.free_bytes.values()), max(self.free_bytes.values())
            span = f"{least / GIB:g} to {most / GIB:g} GB as printed (2^30 bytes)"
            note = f"after each rank's last capture: {span}; the least is given"
            seen_on = None if unranked else len(self.free_bytes)
            reading.saw("free_memory_bytes", round(least), where, seen_on, note)
        elif self.left_bytes is not None:
            reading.saw(
                "free_memory_bytes", round(self.left_bytes), where, 1, "available_gpu_mem at the end of start-up"
            )

    def _note(self, part: str, ranks: int, begun: int) -> str:
        parts = []
        if begun > ranks and ranks:
            parts.append(f"begun on {begun} ranks, ended on {ranks}")
        if part in self.cut:
            parts.append("the last line is cut, and can only be that of an end")
        if part in self.failed:
            parts.append("a capture failed")
        if sizes := self.sizes.get(part):
            shown = ", ".join(map(str, sizes[:40])) + (", ..." if len(sizes) > 40 else "")
            parts.append(f"batch sizes {shown}")
        if part == "target" and self.verify_tokens:
            parts.append(f"{self.verify_tokens} tokens a sequence")
        if part == "draft":
            extended = self.state("draft extend")
            parts.append("the draft extension too" if extended else "no capture line of the draft extension")
            if ranks == 1 and len(self.ended.get("target", ())) > 1:
                parts.append("from v0.5.12 on only rank 0 prints this line")
        return "; ".join(parts)
