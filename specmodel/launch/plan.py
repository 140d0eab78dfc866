"""What is to be launched, in plain values, and what every engine's text has in common."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = [
    "BatchRange",
    "Launch",
    "Parts",
    "Plan",
    "cap_note",
    "capture_list",
    "capture_note",
    "capture_sizes",
    "capture_tokens",
    "captured_tokens",
    "expected_length",
    "join",
    "model_word",
    "no_schedule",
    "pinned_lengths",
    "ranges_of",
    "safe_for_shell",
    "shell_env",
    "shell_flags",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRange:
    """One entry of a schedule: the draft shape for batches from `batch_from` to `batch_to`, both inclusive."""

    batch_from: int
    batch_to: int | None
    num_steps: int
    topk: int = 1
    num_draft_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be launched, in the words of the calibration file.

    Attributes
    ----------
    num_steps, topk, num_draft_tokens : int
        The draft shape, the best one for all batches where there is a schedule; num_steps 0 is plain decoding.
    max_batch : int
        The most sequences that will run at a time, over all data-parallel ranks.
    env, flags
        The communication setting.
    schedule : sequence of BatchRange
        Shapes by batch, where one shape is not best for all.
    survival : sequence of float
        P(at least k drafts accepted), k = 1 on, for the settings that pin acceptance.
    step_ms : mapping of int to float
        Whole-cycle time by tokens verified together, for engines that take such a table (SGLang's DSPARK).
    captured : sequence of int
        Sizes of one rank that graphs were captured for when this was measured.
    captured_unit : str
        What they count: tokens or sequences.
    """

    num_steps: int
    topk: int = 1
    num_draft_tokens: int | None = None
    max_batch: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()
    schedule: Sequence[BatchRange] = ()
    target: str | None = None
    draft: str | None = None
    method: str | None = None
    tensor_parallel: int = 1
    data_parallel: int = 1
    survival: Sequence[float] = ()
    step_ms: Mapping[int, float] = field(default_factory=dict)
    captured: Sequence[int] = ()
    captured_unit: str = "tokens"

    @property
    def verify_tokens(self) -> int:
        """Tokens that the target verifies per sequence, the root included."""
        return self.num_steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The text that deploys a plan on one engine.

    Attributes
    ----------
    command : str or None
        The launch line; None where the engine cannot do what is asked for.
    files : mapping of str to str
        Configuration files that the command names, by name.
    notes : tuple of str
        Constraints that were respected, and what the engine cannot do.
    validation : tuple of str
        Lines that pin acceptance to the calibrated one, so that the cost model alone is checked; not for production.
    """

    engine: str
    version: str
    assumed: bool
    env: Mapping[str, str]
    command: str | None
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    validation: tuple[str, ...] = ()
    capture_sizes: tuple[int, ...] = ()
    """Sequences of one rank that CUDA graphs are needed for, and below the tokens that each of them verifies."""
    capture_tokens: tuple[int, ...] = ()

    def lines(self) -> list[str]:
        """Write everything as one pasteable block."""
        word = f"assumed; --engine {self.engine}:VERSION names another" if self.assumed else "as given"
        out = [f"# {self.engine} {self.version} ({word})"]
        for name, text in self.files.items():
            out += [f"cat > {name} <<'EOF'", *text.rstrip("\n").split("\n"), "EOF"]
        out += [f"export {name}={shlex.quote(value)}" for name, value in sorted(self.env.items())]
        out += self.command.split("\n") if self.command is not None else []
        out += [f"# {note}" for note in self.notes]
        if self.validation:
            out += ["# to check the cost model with acceptance pinned (never in production):"]
            out += [f"#   {line}" for line in self.validation]
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "engine": self.engine,
            "version": self.version,
            "version_assumed": self.assumed,
            "env": dict(self.env),
            "command": self.command,
            "files": dict(self.files),
            "notes": list(self.notes),
            "validation": list(self.validation),
            "capture_sizes": list(self.capture_sizes),
            "capture_tokens": list(self.capture_tokens),
        }


def capture_sizes(plan: Plan) -> tuple[int, ...]:
    """Return the batch sizes of one rank that graphs are needed for: powers of two, every range's end, the largest.

    A batch is padded up to the next captured size before a schedule looks it up, so each range's last batch must be
    captured itself.
    """
    largest = -(-plan.max_batch // plan.data_parallel)
    ends = {step.batch_to for step in plan.schedule if step.batch_to is not None}
    sizes = {2**i for i in range(largest.bit_length())} | {-(-end // plan.data_parallel) for end in ends} | {largest}
    return tuple(sorted(size for size in sizes if 1 <= size <= largest))


def capture_tokens(plan: Plan, ranges: Sequence[BatchRange]) -> tuple[int, ...]:
    """Return the tokens that the target verifies at each of `capture_sizes`, by the schedule that is deployed."""
    return tuple(size * _width(plan, ranges, size) for size in capture_sizes(plan))


def _width(plan: Plan, ranges: Sequence[BatchRange], size: int) -> int:
    """Return the tokens that the target verifies per sequence where one rank has so many of them."""
    step = next((r for r in ranges if r.batch_to is None or size * plan.data_parallel <= r.batch_to), None)
    if step is None:
        return plan.verify_tokens
    return step.num_steps + 1 if step.topk == 1 else step.num_draft_tokens or plan.verify_tokens


def capture_list(plan: Plan, ranges: Sequence[BatchRange]) -> tuple[int, ...]:
    """Return the batch sizes of one rank to capture: `capture_sizes`, and those captured before up to the largest.

    The times were measured with those, and without them a batch would be padded further. A size in tokens is the most
    sequences that it holds.
    """
    needed = capture_sizes(plan)
    kept = set(plan.captured)
    if plan.captured_unit == "tokens":
        widths = {_width(plan, ranges, size) for size in needed}
        held = {(tokens // width, width) for tokens in plan.captured for width in widths}
        kept = {size for size, width in held if _width(plan, ranges, size) == width}
    return tuple(sorted({*needed, *(size for size in kept if 1 <= size <= needed[-1])}))


def captured_tokens(plan: Plan, ranges: Sequence[BatchRange]) -> tuple[int, ...]:
    """Return the sizes in tokens captured before, as far as the recommendation verifies so many."""
    largest = max(capture_tokens(plan, ranges))
    sizes = plan.captured
    if plan.captured_unit == "sequences":
        sizes = [size * _width(plan, ranges, size) for size in capture_list(plan, ranges)]
    return tuple(tokens for tokens in sizes if tokens <= largest)


def ranges_of(plan: Plan) -> list[BatchRange]:
    """Return the schedule as far as batches go, where it asks for more than one shape."""
    used = [step for step in plan.schedule if step.batch_from <= plan.max_batch]
    shapes = {(step.num_steps, step.topk, step.num_draft_tokens) for step in used}
    return used if len(shapes) > 1 else []


def no_schedule(plan: Plan, why: str) -> str:
    """Say why a schedule is not deployed, and what is instead."""
    instead = f"{plan.num_steps} steps" if plan.num_steps != 1 else "1 step"
    return (
        f"no schedule by batch: {why}; {instead if plan.num_steps else 'no speculation'} at every batch, the best one"
    )


def expected_length(plan: Plan, num_steps: int) -> float | None:
    """Return the acceptance length that the survival curve gives for a chain."""
    curve = list(plan.survival[:num_steps])
    return 1.0 + sum(curve) if num_steps and len(curve) == num_steps else None


def pinned_lengths(plan: Plan, steps: int, ranges: Sequence[BatchRange]) -> list[tuple[float, str]]:
    """Return the acceptance length to pin and for which batches: one number forces all, so each range has its own."""
    if plan.topk > 1:
        return []
    asked: list[tuple[int, str]] = [(steps, "")]
    if ranges:
        asked = [(r.num_steps, f"batch {r.batch_from} to {r.batch_to or plan.max_batch}; ") for r in ranges]
    found = [(expected_length(plan, k), where) for k, where in asked]
    return [(length, where) for length, where in found if length is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a writer makes of a plan; `ranges` is the schedule as far as the engine takes it."""

    command: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    validation: Sequence[str] = ()
    ranges: Sequence[BatchRange] = ()


def capture_note(plan: Plan, ranges: Sequence[BatchRange], what: str) -> list[str]:
    """Say how many tokens each captured batch verifies, which graphs must have been captured for."""
    sizes, tokens = capture_sizes(plan), capture_tokens(plan, ranges)
    if all(count == size for size, count in zip(sizes, tokens, strict=True)):
        return []
    each = ", ".join(f"{size} * {count // size} = {count}" for size, count in zip(sizes, tokens, strict=True))
    return [f"{what} are needed for sequences * tokens: {each}"]


def cap_note(plan: Plan, option: str) -> str:
    """Say that an option keeps the server to the largest batch of the answer."""
    return f"{option} caps the server at the largest batch of this answer, {plan.max_batch}; ask for more with --batch"


def model_word(name: str | None, default: str) -> str:
    """Quote a model's name for a shell, or return the word that stands for it."""
    return shlex.quote(name) if name else default


def join(words: Sequence[str]) -> str:
    """Join words into lines of a shell command of a readable length."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) > 100:
            lines.append(f"  {word}")
        else:
            lines[-1] += f" {word}"
    return " \\\n".join(lines)


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SECRET_VALUE = re.compile(
    r"\b(?:sk|hf|gh[opsu]|github_pat|glpat|xox[abprs]|nvapi)[-_][A-Za-z0-9_-]{12,}|\b(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|\beyJ[A-Za-z0-9_-]{8,}\.|://[^\s/@]+@|-----BEGIN "
)
"""Keys and tokens that tell what they are by how they begin, and logins within addresses."""
_SECRET_FLAG = re.compile(
    r"api[-_]?keys?\b|secret|passw|credential|(?:hf|auth|access|api|bearer)[-_]token\b", re.IGNORECASE
)
_SECRET = re.compile(r"token|secret|passw|credential|api_?key|(^|_)key$", re.IGNORECASE)


def shell_env(env: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Environment variables that may be shown and pasted, and how many of which kind were left out, in words.

    A calibration is a file that people exchange: a name that is no name would be read by a shell as a command, a
    control character would not survive, and a secret is nobody else's to read.
    """
    kept, odd, secret = {}, 0, 0
    for name, value in env.items():
        if _SECRET.search(name) or _SECRET_VALUE.search(value):
            secret += 1
        elif not _NAME.fullmatch(name) or any(ord(c) < 32 or ord(c) == 127 for c in value):
            odd += 1
        else:
            kept[name] = value
    notes = []
    if odd:
        notes.append(f"environment entries left out, whose name or value no shell takes: {odd}")
    if secret:
        notes.append(f"environment entries left out, whose name or value says that they are secret: {secret}")
    return kept, tuple(notes)


def shell_flags(flags: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the flags that may be shown, and how many were left out because their name says that they are secret."""
    kept = tuple(flag for flag in flags if not _SECRET_FLAG.search(flag) and not _SECRET_VALUE.search(flag))
    left = len(flags) - len(kept)
    return kept, (f"flags left out, whose name or value says that they are secret: {left}",) if left else ()


def safe_for_shell(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """The plan with flags quoted word by word and only environment variables that may be pasted, and notes."""
    env, notes = shell_env(plan.env)
    flags, left_out = shell_flags(plan.flags)
    return replace(plan, env=env, flags=tuple(_quoted(flag) for flag in flags)), (*notes, *left_out)


def _quoted(flag: str) -> str:
    try:
        words = shlex.split(flag)
    except ValueError:
        words = [flag]
    return " ".join(shlex.quote(word) for word in words)
