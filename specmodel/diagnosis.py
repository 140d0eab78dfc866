"""What a diagnosis is: a verdict, the ledger of levers, findings about the numbers, and what follows by arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["FLAGS", "Culprit", "Diagnosis", "Expectation", "Finding", "Lever", "Status"]

Status = Literal["open", "measure", "closed"]
Culprit = Literal["nothing", "drafter", "engine", "both", "steps", "measurement", "unknown"]

FLAGS = (
    "speedup_exceeds_acceptance_length",
    "acceptance_length_exceeds_steps_plus_one",
    "aggregate_falls_with_batch",
    "zero_draft_step_slower_than_plain",
    "first_position_acceptance_differs",
    "slower_than_plain_everywhere",
)
"""What arithmetic on the rows of a file can find; other findings have no flag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A contradiction in the numbers, or something about them that a reader would trip over."""

    flag: str
    """One of `FLAGS`, or empty where the finding is not one of those."""
    where: str
    """The rows it is about, as key paths: ``measurements.cycles[3]``."""
    message: str
    impossible: bool = False
    """Whether the numbers of the row cannot all be right, so that no verdict rests on them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One number that follows from the rows of a file by arithmetic, without any model.

    Every speculative row gets those that its numbers allow; where a number is missing nothing is claimed.
    """

    quantity: str
    """What it is, for example ``cycle_plain_steps``."""
    select: dict[str, Any]
    """Setting of the rows it is about, defaults filled in."""
    value: Any = None
    """The number, truth value or setting; None where only `ends` are known."""
    ends: tuple[float, float] | None = None
    """Where the file states a range (or no acceptance length): what both ends give."""
    acceptance_length: tuple[float, float] | None = None
    """The acceptance lengths that `ends` assume, where the file states none."""
    plain: dict[str, Any] | None = None
    """Setting of the plain row that a ratio is over, where it is not evident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One thing that could be worked on: the most that it could bring, and whether that is worth while."""

    name: str
    """For programs: ``draft``, ``verify_allreduce``, ``acceptance``, ``num_steps``."""
    title: str
    """For people."""
    bound: float | None
    """The most that it could bring, a factor on tok/s, with the setting as it is; None where nothing is known."""
    bound_optimised: float | None
    """The same with the number of steps chosen again, beyond what choosing them brings alone; at least `bound`."""
    interval: tuple[float, float] | None
    """90 %: from the lower end of the one to the upper end of the other."""
    status: Status
    """`closed`: at most `--worth`. `open`: more than that. `measure`: the file cannot tell."""
    evidence: str
    decided_by: str = ""
    """What measurement or fact would decide it; empty where nothing is left to decide."""


_OF_DRAFTER = ("acceptance",)
_OF_ENGINE = ("draft", "overhead", "verify", "comm", "graph_padding")
_LEVERS_OF: dict[Culprit, tuple[str, ...]] = {
    "drafter": _OF_DRAFTER,
    "engine": _OF_ENGINE,
    "both": (*_OF_DRAFTER, *_OF_ENGINE),
    "steps": ("num_steps", "tree"),
}
"""How the names of the levers begin with which each culprit is mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict on one setting at one batch, and the ledger of what could make it faster."""

    batch: float
    num_steps: int
    topk: int
    num_draft_tokens: int
    comm: str
    """The speculative setting that is diagnosed: the fastest measured one, else the best predicted one."""
    measured: bool
    """Whether that setting was measured."""
    worth: float
    """Gain below which a lever is closed, a fraction."""
    verdict: str
    """One sentence."""
    culprit: Culprit
    cycle_plain_steps: float | None
    """One cycle in plain steps: the acceptance length at which speculation breaks even."""
    cycle_plain_steps_interval: tuple[float, float] | None
    """90 %."""
    acceptance_length: float | None
    acceptance_length_interval: tuple[float, float] | None
    speedup: float | None
    """Over plain decoding at the same batch; None where the file cannot tell."""
    speedup_interval: tuple[float, float] | None
    flags: tuple[str, ...]
    """Those of `FLAGS` that hold."""
    findings: tuple[Finding, ...]
    expectations: tuple[Expectation, ...]
    levers: tuple[Lever, ...]
    """What brings most first; closed ones last."""
    warnings: tuple[str, ...] = ()
    runtime: tuple[str, ...] = ()
    """What the engine's logs say of graphs, communication and memory, one sentence each."""
    other_batches: tuple[tuple[float, str], ...] = field(default=())
    """(batch, one clause) of the other measured batches."""
    measure_first: str = ""
    """Why plain decoding is to be measured before anything else; empty where something else may be."""

    @property
    def off(self) -> Lever | None:
        """Speculation off, where that is the thing to do."""
        if self.culprit in ("steps", "measurement"):
            return None
        return next((x for x in self.levers if x.name == "speculation_off" and x.status == "open"), None)

    @property
    def work_on(self) -> Lever | None:
        """What to work on: the first lever of the culprit that is not closed, else the first that is open."""
        levers = [x for x in self.levers if x.status != "closed" and x.name != "speculation_off"]
        own = [x for x in levers if x.bound is not None and x.name.startswith(_LEVERS_OF.get(self.culprit, ()))]
        # The fixed pass is what plain decoding pays too, so it is nobody's fault.
        own = [x for x in own if x.name != "verify_fixed_pass"]
        return next((x for x in (*own, *levers) if x in own or x.status == "open"), None)
