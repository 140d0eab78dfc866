"""The plan of a measuring run: which points, in which order, with which limits, for about how long.

A plan is made whole before anything runs, printed, hashed (so that a broken run can be continued and never mixed with
another) and checked against the memory of the GPU.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from specmodel.errors import UsageError
from specmodel.harness import roofline
from specmodel.harness.environment import CommPlan
from specmodel.harness.roofline import Gpu
from specmodel.harness.shapes import DraftShape, Shape, check_tensor_parallel

__all__ = ["DRAFT_MODES", "Effort", "Plan", "Point", "Request", "build_points", "check_memory", "order", "plan_hash"]

DraftMode = Literal["step", "cycle", "eager"]
DRAFT_MODES: tuple[DraftMode, ...] = ("step", "cycle", "eager")
MAX_ROWS = 128  # of one sequence in one pass: more than any tree of drafts in use
_MAX_SLOTS = 65_535  # rows times experts of a token, in one pass: the harness counts them in 16 bits
_CONTEXT_ROOM = 64  # tokens by which a context moves during cycles
_MEMORY_SHARE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked to be measured, checked by `build_points`."""

    target: Shape
    draft: DraftShape | None
    tokens: tuple[int, ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: tuple[int, ...]
    conditional: tuple[float, ...]
    comm: tuple[CommPlan, ...] = (CommPlan(name="default"),)
    world: int = 1
    draft_modes: tuple[DraftMode, ...] = DRAFT_MODES
    cycle_modes: tuple[DraftMode, ...] = DRAFT_MODES
    verify_eager: bool = False
    first_step_rows: Literal["one", "accepted"] = "accepted"
    repeats: int = 3
    cycles: int = 200
    seed: int = 1
    timeout_ms: int = 60_000
    budget_ms: float | None = None
    allow_nvls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing to measure: its key, the fields of its job entry, and about how long one operation takes."""

    key: str
    fields: dict[str, Any]
    estimate_ms: float
    default_comm_only: bool = False

    @property
    def kind(self) -> str:
        """The kind of the point: verify, draft, cycle or allreduce."""
        return str(self.fields["kind"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is spent on every point; `cut` says what was given up for time."""

    repeats: int
    cycle_repeats: int
    min_samples: int
    min_ms: float
    max_ms: float
    cut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request made concrete."""

    request: Request
    points: tuple[Point, ...]
    effort: Effort
    gpu: Gpu
    estimate_ms: float
    memory_bytes: dict[str, float] = field(default_factory=dict)
    source_hash: str = ""

    @property
    def hash(self) -> str:
        """The fingerprint of everything that decides what is measured and how."""
        return plan_hash(self)

    def limits(self) -> dict[str, Any]:
        """Make the `limits` block of a job."""
        return {
            "min_samples": self.effort.min_samples,
            "min_ms": self.effort.min_ms,
            "max_ms": self.effort.max_ms,
            "timeout_ms": self.request.timeout_ms,
        }

    def points_of(self, setting: CommPlan, repeat: int) -> tuple[Point, ...]:
        """Return the points of one pass: under `setting`, in `repeat` (counted from 0)."""
        return tuple(
            point
            for point in self.points
            if (setting.name == "default" or not point.default_comm_only)
            and (point.kind != "cycle" or repeat < self.effort.cycle_repeats)
        )


def _verify_point(request: Request, gpu: Gpu, *, tokens: int, batch: int, context_tokens: int, **extra: Any) -> Point:
    mode = {"cuda_graph": True, "part": "all", **extra}
    estimate = roofline.verify_ms(
        gpu, request.target, tokens=tokens, batch=batch, context_tokens=context_tokens, world=request.world
    )
    graph = "graph" if mode["cuda_graph"] else "eager"
    return Point(
        key=f"verify/n{tokens}/b{batch}/c{context_tokens}/{graph}/{mode['part']}",
        fields={"kind": "verify", "tokens": tokens, "batch": batch, "context_tokens": context_tokens, **mode},
        estimate_ms=estimate,
        default_comm_only=mode["part"] == "compute",
    )


def _power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _verify_points(request: Request, gpu: Gpu) -> Iterable[Point]:
    for context_tokens in request.contexts:
        for batch in request.batches:
            needed = {batch * (num_steps + 1) for num_steps in request.steps}
            listed = {n for n in request.tokens if n % batch == 0 and n <= batch * MAX_ROWS}
            for tokens in sorted(listed | needed):
                sizes = {"tokens": tokens, "batch": batch, "context_tokens": context_tokens}
                yield _verify_point(request, gpu, **sizes)
                if request.verify_eager and tokens in needed:
                    yield _verify_point(request, gpu, **sizes, cuda_graph=False)
    if request.world > 1:
        # What communication costs inside the pass depends smoothly on its bytes alone: some token counts are enough.
        batch, context_tokens = min(request.batches), min(request.contexts)
        for tokens in (n for n in request.tokens if n % batch == 0 and n <= batch * MAX_ROWS and _power_of_two(n)):
            for part in ("comm", "compute"):
                sizes = {"tokens": tokens, "batch": batch, "context_tokens": context_tokens}
                yield _verify_point(request, gpu, **sizes, part=part)


def _draft_mode(mode: DraftMode) -> dict[str, Any]:
    return {"cuda_graph": False} if mode == "eager" else {"cuda_graph": True, "graph_scope": mode}


def _modes_at(modes: tuple[DraftMode, ...], context_tokens: int, request: Request) -> tuple[DraftMode, ...]:
    """Return the modes measured at a context: all at the first, elsewhere the first mode alone.

    What one graph for all steps saves, and what eager launches cost, is host work that no context changes.
    """
    return modes if context_tokens == request.contexts[0] else modes[:1]


def _draft_ms(request: Request, gpu: Gpu, draft: DraftShape, mode: DraftMode, **sizes: int) -> float:
    eager = mode == "eager"
    num_steps, batch, context_tokens = sizes["num_steps"], sizes["batch"], sizes["context_tokens"]
    return roofline.draft_ms(
        gpu, draft, num_steps=num_steps, batch=batch, context_tokens=context_tokens, world=request.world, eager=eager
    )


def _draft_points(request: Request, gpu: Gpu) -> Iterable[Point]:
    draft = request.draft
    if draft is None:
        return
    for context_tokens in request.contexts:
        for mode in _modes_at(request.draft_modes, context_tokens, request):
            for batch in request.batches:
                for num_steps in (k for k in request.steps if k > 0):
                    sizes = {"num_steps": num_steps, "batch": batch, "context_tokens": context_tokens}
                    estimate = _draft_ms(request, gpu, draft, mode, **sizes)
                    yield Point(
                        key=f"draft/k{num_steps}/b{batch}/c{context_tokens}/{mode}",
                        fields={"kind": "draft", **sizes, **_draft_mode(mode)},
                        estimate_ms=estimate,
                    )


def _cycle_points(request: Request, gpu: Gpu) -> Iterable[Point]:
    for context_tokens in request.contexts:
        for batch in request.batches:
            for num_steps in request.steps:
                modes = _modes_at(request.cycle_modes, context_tokens, request) if num_steps else ("step",)
                # The other modes differ by host work, which counts for most at the smallest batch.
                for mode in modes if batch == min(request.batches) else modes[:1]:
                    sizes = {"batch": batch, "context_tokens": context_tokens}
                    estimate = roofline.verify_ms(
                        gpu, request.target, tokens=batch * (num_steps + 1), world=request.world, **sizes
                    )
                    if request.draft is not None and num_steps:
                        estimate += _draft_ms(request, gpu, request.draft, mode, num_steps=num_steps, **sizes)
                    yield Point(
                        key=f"cycle/k{num_steps}/b{batch}/c{context_tokens}/{mode}",
                        fields={
                            "kind": "cycle",
                            "num_steps": num_steps,
                            **sizes,
                            **_draft_mode(mode),
                            "verify_cuda_graph": True,
                            "cycles": request.cycles,
                        },
                        estimate_ms=roofline.cycle_ms(estimate, 0.0),
                    )


def _allreduce_points(request: Request) -> Iterable[Point]:
    if request.world == 1:
        return
    rows = set(request.tokens) | {b * (k + 1) for b in request.batches for k in request.steps}
    for tokens in sorted(rows):
        size_bytes = 2 * tokens * request.target.hidden_size
        variants = [(True, "hot")]
        if _power_of_two(tokens):
            variants += [(True, "cold"), (False, "hot")]
        for in_graph, regime in variants:
            yield Point(
                key=f"allreduce/{size_bytes}/{'graph' if in_graph else 'eager'}/{regime}",
                fields={"kind": "allreduce", "size_bytes": size_bytes, "in_graph": in_graph, "regime": regime},
                estimate_ms=0.02 + size_bytes / 3e8,
                default_comm_only=(in_graph, regime) != (True, "hot"),
            )


def build_points(request: Request, gpu: Gpu) -> tuple[Point, ...]:
    """Expand a request into its points.

    Parameters
    ----------
    request
        What is asked for.
    gpu
        The rates that the estimates are made with.

    Raises
    ------
    UsageError
        The request cannot be measured: no drafter for its steps, a window shorter than a context, a shape that the
        GPUs cannot share, or a number out of range.
    """
    if max(request.steps) > 0 and request.draft is None:
        raise UsageError("steps above 0 need a drafter; give --draft, or --steps 0")
    if max(request.steps) + 1 > MAX_ROWS:
        raise UsageError(f"--steps {max(request.steps)}: at most {MAX_ROWS - 1}")
    if max(request.steps) > 0 and not request.conditional:
        raise UsageError("cycles with steps above 0 need an acceptance curve; give --conditional or --acceptance")
    for shape in (request.target, *((request.draft.shape,) if request.draft else ())):
        check_tensor_parallel(shape, request.world)
        if shape.sliding_window is not None and shape.sliding_window < max(request.contexts) + _CONTEXT_ROOM:
            raise UsageError(
                f"{shape.name}: sliding_window {shape.sliding_window} is shorter than a context of "
                f"{max(request.contexts)}, which cannot be represented; ask for shorter --contexts"
            )
    rows = max(max(request.batches) * (max(request.steps) + 1), max(request.tokens))
    top = max(1, request.target.experts_per_token)
    if rows * top > _MAX_SLOTS:
        each = f", each to {top} experts," if top > 1 else ""
        raise UsageError(
            f"a pass of {rows:,} tokens{each} is wider than the harness is made for ({_MAX_SLOTS // top:,}); ask for "
            "smaller --batches or fewer --steps"
        )
    points = (
        *_verify_points(request, gpu),
        *_draft_points(request, gpu),
        *_cycle_points(request, gpu),
        *_allreduce_points(request),
    )
    return tuple({point.key: point for point in points}.values())


def check_memory(request: Request, gpu: Gpu) -> dict[str, float]:
    """Return what one GPU must hold, by part.

    Raises
    ------
    UsageError
        It does not fit.
    """
    rows = max(max(request.batches) * (max(request.steps) + 1), max(request.tokens))
    cached = max(request.batches) * (max(request.contexts) + 2 * _CONTEXT_ROOM + MAX_ROWS)
    parts = roofline.memory_bytes(request.target, request.draft, cached_tokens=cached, tokens=rows, world=request.world)
    needed, there = sum(parts.values()), _MEMORY_SHARE * gpu.memory_bytes
    if needed > there:
        listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
        raise UsageError(
            f"needs {needed / 1e9:.1f} GB on each GPU ({listed}) and {there / 1e9:.1f} GB are free; ask for fewer "
            "--layers, smaller --batches or --contexts, or more GPUs (--tensor-parallel)"
        )
    return parts


def order(plan: Plan, points: Iterable[Point], *, repeat: int, setting: CommPlan) -> list[Point]:
    """Shuffle points: another order in every pass, the same for the same seed."""
    shuffled = list(points)
    random.Random(f"{plan.request.seed}/{repeat}/{setting.name}").shuffle(shuffled)  # noqa: S311
    return shuffled


def plan_hash(plan: Plan) -> str:
    """Fingerprint (sha256) what is measured and how: shapes, points, settings, effort, seed and sources."""
    request = plan.request
    content = {
        "target": dataclasses.asdict(request.target),
        "draft": None if request.draft is None else dataclasses.asdict(request.draft),
        "points": [(point.key, point.fields) for point in plan.points],
        "comm": [dataclasses.asdict(setting) for setting in request.comm],
        "conditional": request.conditional,
        "world": request.world,
        "first_step_rows": request.first_step_rows,
        "seed": request.seed,
        "effort": dataclasses.asdict(dataclasses.replace(plan.effort, cut=())),
        "gpu": plan.gpu.name,
        "source": plan.source_hash,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
