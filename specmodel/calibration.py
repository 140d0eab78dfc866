"""The nouns of the calibration file, format 1, and their invariants.

Plain frozen dataclasses: what was measured about one deployment. Every dimensional field ends in its unit: times are
milliseconds (``_ms``), throughput is tokens per second (``tok_s``), sizes are bytes (``_bytes``). Ranges of single
fields are stated as metadata of their types and checked where a file is read (`specmodel.io`); rules over several
fields (`specmodel.invariants`) are checked whenever a row is built, in a file or in Python, and raise `FormError`.
What each field means is said once, in `specmodel.schema`, and shown by editors and by ``specmodel schema``.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Gt, Le, Len

from specmodel import invariants
from specmodel.errors import Fault, FormError

__all__ = [
    "SCHEMA",
    "AcceptanceEntry",
    "AllreduceRow",
    "Calibration",
    "CommSetting",
    "CycleRow",
    "DraftRow",
    "Evidence",
    "Measurements",
    "ModelShape",
    "PrefillRow",
    "Provenance",
    "System",
    "Validation",
    "VerifyRow",
    "Workload",
]

SCHEMA = "specmodel.calibration/1"

# Largest whole number that a file may state: beyond any count or size in bytes, and exact as a double.
MAX_INTEGER = 10**15


class _Strict:
    """Metadata for the validator: no text for a number, no number for a flag."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        schema = handler(source)
        schema["strict"] = True
        return schema


class _NotNull:
    """Metadata for the validator: the key may be absent, but not null."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(source)["schema"]


class _Matching:
    """Metadata for the validator: text that matches a pattern throughout."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {"type": "str", "strict": True, "pattern": self.pattern}


# not blank, no line break and no other control character
_ONE_LINE = _Matching(r"^[^\x00-\x08\x0a-\x1f\x7f]*[^\s\x00-\x1f\x7f][^\x00-\x08\x0a-\x1f\x7f]*$")
_FILE_SAFE = _Matching(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class _IsoDate:
    """Metadata for the validator: a date, or YYYY-MM-DD as JSON and YAML 1.2 state it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        function = {"type": "no-info", "function": self.read}
        return {"type": "function-before", "function": function, "schema": {"type": "date", "strict": True}}

    @staticmethod
    def read(value: Any) -> Any:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", value):
            return datetime.date.fromisoformat(value)
        if isinstance(value, datetime.datetime) or not isinstance(value, datetime.date):
            raise ValueError("not a date")
        return value


_T = TypeVar("_T")
Maybe = Annotated[_T | None, _NotNull()]

Count = Annotated[int, _Strict(), Ge(1), Le(MAX_INTEGER)]
NonNegativeInt = Annotated[int, _Strict(), Ge(0), Le(MAX_INTEGER)]
Number = Annotated[float, _Strict()]
Positive = Annotated[Number, Gt(0)]
NonNegative = Annotated[Number, Ge(0)]
Probability = Annotated[Number, Ge(0), Le(1)]
AtLeastOne = Annotated[Number, Ge(1)]
Flag = Annotated[bool, _Strict()]
Range = tuple[Positive, Positive]
Batch = AtLeastOne
Text = Annotated[str, _ONE_LINE]
Paragraph = Annotated[str, _Strict(), Len(1)]
Date = Annotated[datetime.date, _IsoDate()]
Name = Text
EnvironmentValue = Annotated[str, _Strict()]
FactValue = Flag | Annotated[int, _Strict(), Ge(-MAX_INTEGER), Le(MAX_INTEGER)] | Number | Annotated[str, _Strict()]
FileSafeName = Annotated[str, _FILE_SAFE]
Counts = Annotated[tuple[NonNegativeInt, ...], Len(1)]
Probabilities = Annotated[tuple[Probability, ...], Len(1)]
Method = Literal["eagle3", "eagle", "mtp", "draft_model", "ngram", "parallel", "none"]

_CONFIG: dict[str, Any] = {"extra": "forbid", "allow_inf_nan": False}


def _require(faults: list[Fault]) -> None:
    if faults:
        raise FormError("\n".join(map(str, faults)), faults=faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the numbers come from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    source: Maybe[Text] = None
    url: Maybe[Text] = None
    date: Maybe[Date] = None
    caveats: tuple[Paragraph, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The machine and the engine."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    gpu: Maybe[Text] = None
    num_gpus: Maybe[Count] = None
    nodes: Maybe[Count] = None
    tensor_parallel: Maybe[Count] = None
    data_parallel: Count = 1
    expert_parallel: Maybe[Count] = None
    engine: Maybe[Text] = None
    engine_version: Maybe[Text] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The target, the drafter and the sizes that sharpen the cost model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    target: Maybe[Text] = None
    draft: Maybe[Text] = None
    method: Maybe[Method] = None
    hidden_size: Maybe[Count] = None
    num_layers: Maybe[Count] = None
    activation_bytes: Count = 2
    num_experts: Maybe[Count] = None
    experts_per_token: Maybe[Count] = None
    cuda_graph_sizes: Annotated[tuple[Count, ...], Len(1)] = ()
    cuda_graph_unit: Literal["tokens", "sequences"] = "tokens"

    def __post_init__(self) -> None:
        _require(invariants.model_faults(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSetting:
    """One communication setting: environment variables and engine flags."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    env: dict[Name, EnvironmentValue] = field(default_factory=dict)
    flags: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of traffic: its share and how long its outputs are."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    weight: Maybe[NonNegative] = None
    output_tokens: Maybe[Positive] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """The time of one target pass over `tokens` tokens, all sequences of one rank together."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    tokens: Count
    batch: Batch = 1
    context_tokens: Maybe[NonNegativeInt] = None
    comm: Name = "default"
    cuda_graph: Flag = True
    time_ms: Maybe[Positive] = None
    sd_ms: Maybe[NonNegative] = None
    samples: Maybe[Count] = None
    range_ms: Maybe[Range] = None
    note: Maybe[Text] = None

    def __post_init__(self) -> None:
        _require(invariants.time_faults(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """The time of all draft passes of one cycle."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    num_steps: Count
    topk: Count = 1
    num_draft_tokens: Maybe[Count] = None
    batch: Batch = 1
    context_tokens: Maybe[NonNegativeInt] = None
    comm: Name = "default"
    cuda_graph: Flag = True
    graph_scope: Maybe[Literal["step", "cycle"]] = None
    time_ms: Maybe[Positive] = None
    sd_ms: Maybe[NonNegative] = None
    samples: Maybe[Count] = None
    range_ms: Maybe[Range] = None
    note: Maybe[Text] = None

    def __post_init__(self) -> None:
        _require(invariants.draft_faults(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceRow:
    """The time of one all-reduce of `size_bytes`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    size_bytes: Count
    comm: Name = "default"
    num_gpus: Maybe[Count] = None
    in_graph: Maybe[Flag] = None
    batch: Batch = 1
    context_tokens: Maybe[NonNegativeInt] = None
    time_ms: Maybe[Positive] = None
    sd_ms: Maybe[NonNegative] = None
    samples: Maybe[Count] = None
    range_ms: Maybe[Range] = None
    note: Maybe[Text] = None

    def __post_init__(self) -> None:
        _require(invariants.time_faults(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """The time of one prefill pass."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    tokens: Count
    batch: Batch = 1
    context_tokens: Maybe[NonNegativeInt] = None
    comm: Name = "default"
    time_ms: Maybe[Positive] = None
    sd_ms: Maybe[NonNegative] = None
    samples: Maybe[Count] = None
    range_ms: Maybe[Range] = None
    note: Maybe[Text] = None

    def __post_init__(self) -> None:
        _require(invariants.time_faults(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleRow:
    """Whole cycles (draft, verify, accept) as an engine or the harness saw them; exactly one form of speed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    num_steps: NonNegativeInt
    topk: Count = 1
    num_draft_tokens: Maybe[Count] = None
    speculation: Maybe[Flag] = None
    batch: Batch = 1
    comm: Name = "default"
    workload: Name = "default"
    context_tokens: Maybe[NonNegativeInt] = None
    cuda_graph: Flag = True
    graph_scope: Maybe[Literal["step", "cycle"]] = None
    verify_cuda_graph: Flag = True
    mean_draft_tokens: Maybe[NonNegative] = None
    acceptance_length: Maybe[AtLeastOne] = None
    tok_s: Maybe[Positive] = None
    tpot_ms: Maybe[Positive] = None
    cycle_ms: Maybe[Positive] = None
    tok_s_at_most: Maybe[Positive] = None
    sd_tok_s: Maybe[NonNegative] = None
    sd_tpot_ms: Maybe[NonNegative] = None
    sd_cycle_ms: Maybe[NonNegative] = None
    range_tok_s: Maybe[Range] = None
    range_tpot_ms: Maybe[Range] = None
    range_cycle_ms: Maybe[Range] = None
    samples: Maybe[Count] = None
    note: Maybe[Text] = None

    def __post_init__(self) -> None:
        _require(invariants.cycle_faults(self))

    @property
    def speculating(self) -> bool:
        """Whether the speculation machinery is on; by default when something is drafted."""
        return self.num_steps > 0 if self.speculation is None else self.speculation

    @property
    def verify_tokens(self) -> int:
        """Tokens that the target verifies per sequence, the root included (num_steps + 1 on a chain)."""
        return self.num_steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceEntry:
    """The acceptance of one workload at one draft shape, in exactly one form."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    num_steps: Count
    workload: Name = "default"
    topk: Count = 1
    num_draft_tokens: Maybe[Count] = None
    drafts: Maybe[Count] = None
    drafted_per_position: Maybe[Counts] = None
    prompts: Maybe[Count] = None
    sd: Maybe[NonNegative] = None
    accepted_per_position: Maybe[Counts] = None
    accepted_by_rank: Maybe[Annotated[tuple[Counts, ...], Len(1)]] = None
    survival: Maybe[Probabilities] = None
    conditional: Maybe[Probabilities] = None
    acceptance_length: Maybe[AtLeastOne] = None
    note: Maybe[Text] = None

    def __post_init__(self) -> None:
        _require(invariants.acceptance_faults(self))

    @property
    def verify_tokens(self) -> int:
        """Tokens that the target verifies per sequence, the root included (num_steps + 1 on a chain)."""
        return self.num_steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A fact that closes or opens a path, with where it was seen."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    about: Literal[
        "draft_cuda_graph",
        "target_cuda_graph",
        "decode_with_cuda_graph",
        "allreduce_implementation",
        "nccl_setting",
        "free_memory_bytes",
        "other",
    ]
    value: FactValue
    ranks: Maybe[Count] = None
    source: Maybe[Text] = None
    note: Maybe[Text] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Everything that was timed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    verify: tuple[VerifyRow, ...] = ()
    draft: tuple[DraftRow, ...] = ()
    allreduce: tuple[AllreduceRow, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    cycles: tuple[CycleRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Cycles that are never used to fit, only to check."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    cycles: tuple[CycleRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One deployment: what it is and what was measured of it."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    schema: Literal["specmodel.calibration/1"]
    name: FileSafeName
    description: Maybe[Text] = None
    provenance: Provenance = field(default_factory=Provenance)
    system: System = field(default_factory=System)
    model: ModelShape = field(default_factory=ModelShape)
    comm: dict[Name, CommSetting] = field(default_factory=dict)
    workloads: dict[Name, Workload] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)
    acceptance: tuple[AcceptanceEntry, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    validation: Validation = field(default_factory=Validation)

    def __post_init__(self) -> None:
        _require(invariants.comm_faults(self.comm, self.tables))

    @property
    def tables(self) -> tuple[tuple[str, Sequence[Any]], ...]:
        """Every table whose rows name a communication setting: its key path and its rows."""
        measured = self.measurements
        return (
            ("measurements.verify", measured.verify),
            ("measurements.draft", measured.draft),
            ("measurements.allreduce", measured.allreduce),
            ("measurements.prefill", measured.prefill),
            ("measurements.cycles", measured.cycles),
            ("validation.cycles", self.validation.cycles),
        )
