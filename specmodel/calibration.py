"""The nouns of the calibration file, format 1, and their invariants.

Plain frozen dataclasses: what was measured about one deployment. Every dimensional field ends in its unit: times are
milliseconds (``_ms``), throughput is tokens per second (``tok_s``), sizes are bytes (``_bytes``). Ranges of single
fields are stated by their types (`specmodel.fields`) and checked where a file is read (`specmodel.io`); rules over
several fields (`specmodel.invariants`) are checked whenever a row is built, in a file or in Python, and raise
`FormError`.
What each field means is said once, in `specmodel.schema`, and shown by editors and by ``specmodel schema``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from specmodel import invariants
from specmodel.errors import Fault, FormError
from specmodel.fields import (
    AtLeastOne,
    Count,
    Counts,
    CountsByRank,
    Date,
    EnvironmentValue,
    FactValue,
    FileSafeName,
    Flag,
    GraphScope,
    Increasing,
    Maybe,
    Method,
    Name,
    NonNegative,
    NonNegativeInt,
    Paragraph,
    Positive,
    Probabilities,
    Range,
    Text,
)

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
    cuda_graph_sizes: Increasing = ()
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
    batch: AtLeastOne = 1
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
    batch: AtLeastOne = 1
    context_tokens: Maybe[NonNegativeInt] = None
    comm: Name = "default"
    cuda_graph: Flag = True
    graph_scope: Maybe[GraphScope] = None
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
    batch: AtLeastOne = 1
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
    batch: AtLeastOne = 1
    comm: Name = "default"
    workload: Name = "default"
    context_tokens: Maybe[NonNegativeInt] = None
    cuda_graph: Flag = True
    graph_scope: Maybe[GraphScope] = None
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

    @property
    def form(self) -> str:
        """The field that states the speed, for example ``tok_s`` or ``range_tok_s``."""
        return next(name for name in invariants.SPEED_FORMS if getattr(self, name) is not None)


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
    accepted_by_rank: Maybe[CountsByRank] = None
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

    @property
    def form(self) -> str:
        """The field that states the acceptance."""
        return next(name for name in invariants.ACCEPTANCE_FORMS if getattr(self, name) is not None)


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
    def comm_names(self) -> tuple[str, ...]:
        """Every communication setting, `default` first, then in the order of the file."""
        return tuple(dict.fromkeys(("default", *self.comm)))

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
