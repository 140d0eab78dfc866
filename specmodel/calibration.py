"""The nouns of the calibration file, format 1, and their invariants.

Plain frozen dataclasses: what was measured about one deployment. Every dimensional field ends in its unit. Ranges of
single fields are stated as `annotated_types` metadata, rules over several fields in ``__post_init__``; `specmodel.io`
turns both into messages with a file and a key path.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Len

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

Count = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Probability = Annotated[float, Ge(0), Le(1)]
Range = tuple[Positive, Positive]
Batch = Annotated[float, Ge(1)]
Text = Annotated[str, Len(1)]
Method = Literal["eagle3", "eagle", "mtp", "draft_model", "ngram", "parallel", "none"]

_CONFIG: dict[str, Any] = {"extra": "forbid", "allow_inf_nan": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where the numbers come from."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    source: Text | None = None
    url: Text | None = None
    date: datetime.date | None = None
    caveats: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The machine and the engine."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    gpu: Text | None = None
    num_gpus: Count | None = None
    nodes: Count | None = None
    tensor_parallel: Count | None = None
    data_parallel: Count = 1
    expert_parallel: Count | None = None
    engine: Text | None = None
    engine_version: Text | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The target, the drafter and the sizes that sharpen the cost model."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    target: Text | None = None
    draft: Text | None = None
    method: Method | None = None
    hidden_size: Count | None = None
    num_layers: Count | None = None
    activation_bytes: Count = 2
    num_experts: Count | None = None
    experts_per_token: Count | None = None
    cuda_graph_sizes: tuple[Count, ...] = ()
    cuda_graph_unit: Literal["tokens", "sequences"] = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommSetting:
    """One communication setting: environment variables and engine flags."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    env: dict[str, str] = field(default_factory=dict)
    flags: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One kind of traffic: its share and how long its outputs are."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    weight: NonNegative | None = None
    output_tokens: Positive | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyRow:
    """The time of one target pass over `tokens` tokens, all sequences of one rank together."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    tokens: Count
    batch: Batch = 1
    context_tokens: NonNegativeInt | None = None
    comm: str = "default"
    cuda_graph: bool = True
    time_ms: Positive | None = None
    sd_ms: NonNegative | None = None
    samples: Count | None = None
    range_ms: Range | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """The time of all draft passes of one cycle."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    num_steps: Count
    topk: Count = 1
    num_draft_tokens: Count | None = None
    batch: Batch = 1
    context_tokens: NonNegativeInt | None = None
    comm: str = "default"
    cuda_graph: bool = True
    graph_scope: Literal["step", "cycle"] | None = None
    time_ms: Positive | None = None
    sd_ms: NonNegative | None = None
    samples: Count | None = None
    range_ms: Range | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllreduceRow:
    """The time of one all-reduce of `size_bytes`."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    size_bytes: Count
    comm: str = "default"
    num_gpus: Count | None = None
    in_graph: bool | None = None
    batch: Batch = 1
    context_tokens: NonNegativeInt | None = None
    time_ms: Positive | None = None
    sd_ms: NonNegative | None = None
    samples: Count | None = None
    range_ms: Range | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillRow:
    """The time of one prefill pass."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    tokens: Count
    batch: Batch = 1
    context_tokens: NonNegativeInt | None = None
    comm: str = "default"
    time_ms: Positive | None = None
    sd_ms: NonNegative | None = None
    samples: Count | None = None
    range_ms: Range | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleRow:
    """Whole cycles (draft, verify, accept) as an engine or the harness saw them; exactly one form of speed."""

    __pydantic_config__: ClassVar[dict[str, Any]] = _CONFIG

    num_steps: NonNegativeInt
    topk: Count = 1
    num_draft_tokens: Count | None = None
    speculation: bool | None = None
    batch: Batch = 1
    comm: str = "default"
    workload: str = "default"
    context_tokens: NonNegativeInt | None = None
    cuda_graph: bool = True
    graph_scope: Literal["step", "cycle"] | None = None
    verify_cuda_graph: bool = True
    mean_draft_tokens: NonNegative | None = None
    acceptance_length: Annotated[float, Ge(1)] | None = None
    tok_s: Positive | None = None
    tpot_ms: Positive | None = None
    cycle_ms: Positive | None = None
    tok_s_at_most: Positive | None = None
    sd_tok_s: NonNegative | None = None
    sd_tpot_ms: NonNegative | None = None
    sd_cycle_ms: NonNegative | None = None
    range_tok_s: Range | None = None
    range_tpot_ms: Range | None = None
    range_cycle_ms: Range | None = None
    samples: Count | None = None
    note: str | None = None

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
    workload: str = "default"
    topk: Count = 1
    num_draft_tokens: Count | None = None
    drafts: Count | None = None
    drafted_per_position: tuple[NonNegative, ...] | None = None
    prompts: Count | None = None
    sd: NonNegative | None = None
    accepted_per_position: tuple[NonNegative, ...] | None = None
    accepted_by_rank: tuple[tuple[NonNegative, ...], ...] | None = None
    survival: tuple[Probability, ...] | None = None
    conditional: tuple[Probability, ...] | None = None
    acceptance_length: Annotated[float, Ge(1)] | None = None
    note: str | None = None

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
    value: bool | int | float | str
    ranks: Count | None = None
    source: Text | None = None
    note: str | None = None


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
    name: str
    description: str | None = None
    provenance: Provenance = field(default_factory=Provenance)
    system: System = field(default_factory=System)
    model: ModelShape = field(default_factory=ModelShape)
    comm: dict[str, CommSetting] = field(default_factory=dict)
    workloads: dict[str, Workload] = field(default_factory=dict)
    measurements: Measurements = field(default_factory=Measurements)
    acceptance: tuple[AcceptanceEntry, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    validation: Validation = field(default_factory=Validation)
