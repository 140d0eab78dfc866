"""Suppositions as text, checked before anything is computed: `verify*=0.73`, `draft=0`, `acceptance+=0.1`."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specmodel.errors import UsageError

__all__ = [
    "PLACES",
    "TARGETS",
    "Axis",
    "Change",
    "Target",
    "changes_of",
    "checked_change",
    "parse_axis",
    "parse_change",
    "targets_help",
    "targets_text",
]

MOST_VALUES = 101
"""Values of one axis of a sweep at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What may be changed: what it is, its unit, and which operators mean something for it."""

    meaning: str
    unit: str = ""
    operators: tuple[str, ...] = ("=", "*=", "/=", "+=", "-=")
    least: float = 0.0
    most: float = 1e9
    """Range of a value that `=` sets."""
    bound: bool = False
    """Whether a change of it is followed as far as it could go: less may come of it."""


_FACTOR = ("*=", "/=")
TARGETS: Mapping[str, Target] = {
    "verify": Target(meaning="time of the verify pass", unit="ms"),
    "draft": Target(meaning="time of drafting, all steps of a cycle together", unit="ms"),
    "overhead": Target(meaning="what a cycle takes besides verify and draft", unit="ms"),
    "allreduce": Target(meaning="time of all all-reduces of one verify pass", unit="ms"),
    "bandwidth": Target(meaning="memory bandwidth of the GPU", operators=_FACTOR, bound=True),
    "compute": Target(meaning="arithmetic speed of the GPU", operators=_FACTOR),
    "acceptance": Target(meaning="every conditional acceptance probability", most=1.0),
    "acceptance_length": Target(meaning="length that a cycle emits, the bonus token counted", unit="tokens", least=1.0),
    "num_steps": Target(meaning="draft steps, instead of the best number", operators=("=", "+=", "-="), most=256.0),
    "comm": Target(meaning="communication setting, by name", operators=("=",)),
    "batch": Target(meaning="running sequences", least=1.0, most=1e6),
    "context_tokens": Target(meaning="tokens of context per sequence", most=1e8),
}
PLACES = ("batch", "context_tokens", "comm", "num_steps")
"""Targets that say where, instead of what things cost there."""
_WORDS = {
    "steps": "num_steps",
    "k": "num_steps",
    "ctx": "context_tokens",
    "tau": "acceptance_length",
    "accept_length": "acceptance_length",
    "alpha": "acceptance",
    "nccl": "comm",
    "batch_size": "batch",
}
_FORM = re.compile(r"\s*([A-Za-z][A-Za-z_ -]*?)\s*(\*=|/=|\+=|-=|=)\s*(\S.*?)\s*")
_CHANGE_FORM = "TARGET=VALUE, or *=, /=, += or -= in place of ="


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One supposition: what is changed, how, and by how much."""

    target: str
    operator: str
    value: float | str
    relative: bool = False
    """Whether the value of += or -= was given in percent of what it changes: 0.27 for `verify-=27%`."""

    def __str__(self) -> str:
        value = self.value
        if isinstance(value, float | int):
            value = f"{100 * value:.10g}%" if self.relative else f"{value:.10g}"
        return f"{self.target}{self.operator}{value}"

    def of(self, before: float) -> float:
        """Return the value after the change; only for changes that hold a number."""
        amount = float(self.value)
        if self.relative:
            amount *= before
        if self.operator == "=":
            return amount
        if self.operator == "*=":
            return before * amount
        if self.operator == "/=":
            return before / amount
        return before + amount if self.operator == "+=" else before - amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis of a sweep: a change whose value runs through several."""

    target: str
    operator: str
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        """Target and operator, as they were written; the target alone where values are set."""
        return self.target if self.operator == "=" else f"{self.target} {self.operator}"

    def change(self, value: float) -> Change:
        """Return the change for one value."""
        return checked_change(Change(target=self.target, operator=self.operator, value=value))


def targets_text() -> str:
    """Return what may be changed, with units, in one sentence."""
    parts = [f"{name}{f' ({t.unit})' if t.unit else ''}" for name, t in TARGETS.items()]
    return ", ".join(parts)


def targets_help() -> str:
    """Return what may be changed as a list, one line each, for the help."""
    lines = [
        f"  {name:<18}{t.meaning}{f', {t.unit}' if t.unit else ''}"
        + ("" if len(t.operators) > 3 else f" ({' or '.join(t.operators)})")
        for name, t in TARGETS.items()
    ]
    return "targets of --set and --sweep:\n" + "\n".join(lines)


def parse_change(text: str) -> Change:
    """Read a change: a target, an operator and a value, such as ``verify*=0.73``, ``draft=0`` or ``verify-=27%``.

    Times are in ms. A value in percent is a factor after ``*=`` and ``/=``, and a share of what is changed after ``+=``
    and ``-=``.

    Raises
    ------
    UsageError
        The text is no change, the target is unknown, or the value is none that the target can have.
    """
    target, operator, value = _split(text)
    if target == "comm":
        return checked_change(Change(target=target, operator=operator, value=value))
    number, percent = _number(target, operator, value, text)
    relative = percent and operator in ("+=", "-=")
    return checked_change(Change(target=target, operator=operator, value=number, relative=relative))


def parse_axis(text: str) -> Axis:
    """Read one axis of a sweep: ``acceptance+=-0.1:0.2:0.05`` (first, last, step) or ``batch=1,2,4,8``.

    Raises
    ------
    UsageError
        As `parse_change`; and for a range without an end or with too many values.
    """
    target, operator, value = _split(text)
    if target == "comm":
        raise UsageError(f"sweep {text!r}: comm is a name; sweep a number, and compare settings with --set comm=NAME")
    if ":" in value:
        values = _range(value, target, operator, text)
    else:
        values = [_number(target, operator, part.strip(), text)[0] for part in value.split(",")]
    if len(values) > MOST_VALUES:
        raise UsageError(f"sweep {text!r}: {len(values)} values; at most {MOST_VALUES}, take a larger step")
    if len(set(values)) < len(values):
        raise UsageError(f"sweep {text!r}: a value is given twice")
    axis = Axis(target=target, operator=operator, values=tuple(values))
    for value_ in values:
        axis.change(value_)
    return axis


def _split(text: str) -> tuple[str, str, str]:
    """Target, operator and value of a change; raises `UsageError` where it is none."""
    if not isinstance(text, str):
        raise UsageError(f"a change is text such as 'verify*=0.73', or a Change, got {text!r}")
    found = _FORM.fullmatch(text)
    if not found:
        raise UsageError(f"change {text!r} must be {_CHANGE_FORM}; TARGET is one of: {targets_text()}")
    word = re.sub(r"[ -]+", "_", found.group(1).strip()).lower()
    for unit in ("_ms", "_tokens"):
        if word not in TARGETS and word.removesuffix(unit) in TARGETS:
            word = word.removesuffix(unit)
    if f"{word}_tokens" in TARGETS:
        word = f"{word}_tokens"
    if word not in TARGETS:
        close = difflib.get_close_matches(word, TARGETS, n=1, cutoff=0.6)
        meant = _WORDS.get(word) or (close[0] if close else "")
        hint = f"; did you mean `{meant}`?" if meant else ""
        raise UsageError(f"change {text!r}: {word!r} cannot be changed{hint}; allowed are: {targets_text()}")
    return word, found.group(2), found.group(3)


def _number(target: str, operator: str, value: str, text: str) -> tuple[float, bool]:
    """A number and whether it was in percent; raises `UsageError` for what is neither."""
    bare, percent = value, value.endswith("%")
    if percent:
        bare = value[:-1].strip()
    elif TARGETS[target].unit == "ms" and operator in ("=", "+=", "-="):
        bare = re.sub(r"\s*ms$", "", value)
    elif operator in _FACTOR:
        bare = re.sub(r"\s*x$", "", value)
    try:
        number = float(bare) if "_" not in bare else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        unit = TARGETS[target].unit
        kind = f"a number of {unit}" if unit and operator not in _FACTOR else "a number"
        raise UsageError(f"change {text!r}: the value of {target}{operator} must be {kind}, got {value!r}")
    if percent and operator in ("=", "+=", "-="):
        if operator == "=" and target != "acceptance":
            raise UsageError(f"change {text!r}: % of what? Write {target}*={number / 100:g} for a factor")
        if operator != "=" and target == "acceptance":
            points, factor = number / 100, 1 + (number if operator == "+=" else -number) / 100
            raise UsageError(
                f"change {text!r} may mean two things: write acceptance{operator}{points:g} for that many points, or "
                f"acceptance*={factor:g} for that share"
            )
    return number / 100.0 if percent else number, percent


def _range(value: str, target: str, operator: str, text: str) -> list[float]:
    parts = value.split(":")
    if len(parts) not in (2, 3):
        raise UsageError(f"sweep {text!r}: a range is FIRST:LAST:STEP, such as -0.1:0.2:0.05, or values with commas")
    first, last = (_number(target, operator, part.strip(), text)[0] for part in parts[:2])
    step = _number(target, operator, parts[2].strip(), text)[0] if len(parts) == 3 else 1.0
    if step <= 0.0 or last < first:
        raise UsageError(f"sweep {text!r}: the last value must not be below the first, and the step above 0")
    count = (last - first) / step
    if count > MOST_VALUES:
        raise UsageError(f"sweep {text!r}: more than {MOST_VALUES} values; take a larger step")
    # Rounded so that -0.1 + 2 * 0.05 is 0.
    return [round(first + i * step, 12) + 0.0 for i in range(math.floor(count + 1e-9) + 1)]


def checked_change(change: Change) -> Change:
    """Return the change, its value as a float, or raise `UsageError` where it means nothing."""
    if change.target not in TARGETS:
        raise UsageError(f"change {change}: {change.target!r} cannot be changed; allowed are: {targets_text()}")
    target, text = TARGETS[change.target], f"change {str(change)!r}"
    if change.operator not in target.operators:
        example = "comm=NAME" if change.target == "comm" else f"{change.target}{target.operators[0]}2"
        raise UsageError(
            f"{text}: {change.target} is changed by {' or '.join(target.operators)} only, such as {example}"
        )
    if change.target == "comm":
        if not isinstance(change.value, str):
            raise UsageError(f"{text}: comm is the name of a communication setting of the file")
        return change
    try:
        value = float(change.value)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise UsageError(f"{text}: the value must be a number")
    if change.operator in _FACTOR:
        least_open = change.operator == "/=" or change.target in ("bandwidth", "compute", "batch", "context_tokens")
        if value < 0.0 or (least_open and value == 0.0):
            raise UsageError(f"{text}: the factor must be {'above 0' if least_open else '0 or more'}")
        if value > 1e6:
            raise UsageError(f"{text}: the factor must be at most 1,000,000")
    elif change.operator == "=":
        _check_set(change.target, target, value, text)
    elif abs(value) > target.most:
        raise UsageError(f"{text}: at most {target.most:g} more or less{f' {target.unit}' if target.unit else ''}")
    if change.target == "num_steps" and value != math.floor(value):
        raise UsageError(f"{text}: num_steps is a whole number")
    return replace(change, value=value)


def _check_set(name: str, target: Target, value: float, text: str) -> None:
    if target.least <= value <= target.most:
        return
    hint = ""
    if name == "acceptance" and value > 1.0:
        hint = f"; for {value:g} tokens a cycle write acceptance_length={value:g}"
        if value > 20.0:
            hint = f"; for {value:g} % write acceptance={value / 100:g}"
    elif name == "acceptance_length" and 0.0 <= value < 1.0:
        hint = f"; the bonus token counts; for a probability write acceptance={value:g}"
    unit = f" {target.unit}" if target.unit else ""
    most = f" and {target.most:,.10g}" if target.most < 1e9 or value > target.most else ""
    allowed = f"between {target.least:g}{most}{unit}" if most else f"{target.least:g}{unit} or more"
    raise UsageError(f"{text}: must be {allowed}{hint}")


def changes_of(changes: Sequence[Change | str] | Change | str) -> tuple[Change, ...]:
    """Return changes from text or from `Change` objects, checked.

    Raises
    ------
    UsageError
        As `parse_change`; and where one place is set twice.
    """
    if isinstance(changes, str | Change):
        changes = (changes,)
    out = tuple(parse_change(c) if not isinstance(c, Change) else checked_change(c) for c in changes)
    for name in PLACES:
        if sum(c.target == name and c.operator == "=" for c in out) > 1:
            raise UsageError(f"{name} is set twice: {', '.join(str(c) for c in out if c.target == name)}")
    return out
