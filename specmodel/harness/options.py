"""The options of `specmodel measure`, from text to a checked request."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specmodel.errors import CalibrationError, UsageError

if TYPE_CHECKING:
    from specmodel.harness.environment import CommPlan
    from specmodel.harness.plan import Request

__all__ = ["add_arguments", "conditional_of", "numbers", "output_of", "request_of"]

_TOKENS = "1-16,24,32,48,64,96,128,192,256,384,512"
# A typical EAGLE-3 head on chat; it decides how many tokens a cycle emits, hardly how long it takes.
_CONDITIONAL = "0.75,0.70,0.66,0.63,0.61,0.60"
_LONGEST = 4096
_MODES = ("step", "cycle", "eager")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `specmodel measure` to `parser`."""
    what = parser.add_argument_group("what is measured")
    what.add_argument("--model", metavar="SHAPE", help="the target: a Hugging Face config.json, or a shipped shape")
    what.add_argument("--draft", metavar="SHAPE", help="the drafter: an EAGLE-3 head or a small model, likewise")
    what.add_argument("--layers", type=int, metavar="N", help="only so many of the target's layers (default: all)")
    what.add_argument("--tokens", default=_TOKENS, help=f"tokens of a verify pass, all sequences (default {_TOKENS})")
    what.add_argument("--batches", default="1,4,16,64", help="sequences (default 1,4,16,64)")
    what.add_argument("--contexts", default="1024", help="tokens in each sequence's KV cache (default 1024)")
    what.add_argument("--steps", default=None, help="numbers of draft steps K (default 0-10, without --draft 0)")
    curve = what.add_mutually_exclusive_group()
    curve.add_argument("--conditional", metavar="P,...", help=f"acceptance by position (default {_CONDITIONAL})")
    curve.add_argument("--acceptance", metavar="CALIB", help="take the acceptance from a calibration file")
    what.add_argument("--workload", metavar="NAME", help="which workload of --acceptance (default: 'default')")
    what.add_argument("--draft-modes", default="step,cycle,eager", help="how the drafter runs: step, cycle, eager")
    what.add_argument("--cycle-modes", default="step,cycle,eager", help="the same for whole cycles")
    what.add_argument("--first-step-rows", choices=("one", "accepted"), help="rows of the first draft step (see docs)")
    what.add_argument("--verify-eager", action="store_true", help="measure verify passes without graphs too")
    machine = parser.add_argument_group("on which machine")
    machine.add_argument("--tensor-parallel", type=int, default=1, metavar="N", help="GPUs that share the model")
    machine.add_argument("--comm", metavar="SETTINGS", help="YAML: communication settings by name, each with its env")
    machine.add_argument("--allow-nvls", action="store_true", help="let NCCL use NVLink multicast")
    machine.add_argument("--allow-busy", action="store_true", help="measure although somebody else uses the GPU")
    how = parser.add_argument_group("how")
    how.add_argument("-o", "--output", metavar="FILE", help="the calibration to write; never overwritten")
    how.add_argument(
        "--budget",
        type=float,
        default=540,
        metavar="SECONDS",
        help="give up samples and repeats to end by then (default 540: with the build ten minutes; 0: no limit)",
    )
    how.add_argument("--repeats", type=int, default=3, help="of the whole sweep, in fresh processes (default 3)")
    how.add_argument("--cycles", type=int, default=200, help="cycles of one point and repeat (default 200)")
    how.add_argument("--seed", type=int, default=1, help="of weights, acceptance and order (default 1)")
    how.add_argument("--timeout", type=float, default=60, metavar="SECONDS", help="for one point (default 60)")
    how.add_argument("--keep-noisy", action="store_true", help="keep rows that are noisy or throttled, with a note")
    how.add_argument("--resume", action="store_true", help="continue a broken run with the same options")
    how.add_argument("--dry-run", action="store_true", help="print the plan and the estimated time, measure nothing")
    how.add_argument("--selftest", action="store_true", help="check the harness against this machine, print its table")


def numbers(text: str, option: str, *, least: int, most: int = _LONGEST) -> tuple[int, ...]:
    """Parse a list of whole numbers and ranges (`0-3,5,8`) into sorted distinct numbers.

    Raises
    ------
    UsageError
        It is malformed, empty, or out of range.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise UsageError(f"{option} {text!r}: give whole numbers and ranges, for example 1-4,8,16")
        low, high = int(match.group(1)), int(match.group(2) or match.group(1))
        if not least <= low <= high <= most:
            raise UsageError(f"{option} {part.strip()!r}: numbers from {least} to {most}, the smaller first")
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def _probabilities(text: str, option: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"{option} {text!r}: give probabilities, for example 0.75,0.7,0.66") from error
    if not all(0.0 <= value <= 1.0 for value in values):
        raise UsageError(f"{option} {text!r}: probabilities lie within 0 and 1")
    return values


def _modes(text: str, option: str) -> tuple[Any, ...]:
    modes = tuple(part.strip() for part in text.split(","))
    if not set(modes) <= set(_MODES) or len(set(modes)) < len(modes):
        raise UsageError(f"{option} {text!r}: choose from {', '.join(_MODES)}, each once")
    return modes


def conditional_of(entry: Any, source: str) -> tuple[float, ...]:
    """Return the conditional acceptance of an entry of a calibration file, from any of its forms.

    A known acceptance length alone gives the one constant probability a with 1 + a + ... + a^K equal to it.

    Raises
    ------
    CalibrationError
        The entry is of a tree by rank, which a chain cannot follow.
    """
    if entry.conditional is not None:
        return tuple(entry.conditional)
    survival = entry.survival
    if survival is None and entry.accepted_per_position is not None:
        if not entry.drafts:
            raise CalibrationError(f"{source}: acceptance: accepted_per_position without drafts")
        attempts = entry.drafted_per_position
        if attempts is not None:
            pairs = zip(entry.accepted_per_position, attempts, strict=False)
            return tuple(min(1.0, accepted / tried) if tried else 0.0 for accepted, tried in pairs)
        survival = tuple(accepted / entry.drafts for accepted in entry.accepted_per_position)
    if survival is not None:
        before = (1.0, *survival[:-1])
        return tuple(min(1.0, now / then) if then > 0 else 0.0 for now, then in zip(survival, before, strict=True))
    if entry.acceptance_length is not None:
        return (_constant(float(entry.acceptance_length), int(entry.num_steps)),)
    raise CalibrationError(f"{source}: acceptance by rank is of a tree; a chain's is needed")


def _constant(acceptance_length: float, num_steps: int) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**k for k in range(num_steps + 1)) < acceptance_length:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _acceptance(path: str, workload: str | None) -> tuple[float, ...]:
    from specmodel import io

    entries = [entry for entry in io.load(path).acceptance if entry.topk == 1]
    names = sorted({entry.workload for entry in entries})
    wanted = workload or ("default" if "default" in names else None)
    if wanted is None and len(names) == 1:
        wanted = names[0]
    matching = [entry for entry in entries if entry.workload == wanted]
    if not matching:
        listed = ", ".join(names) or "none"
        raise UsageError(f"{path}: no acceptance of a chain for workload {wanted or 'default'}; it has {listed}")
    return conditional_of(max(matching, key=lambda entry: entry.num_steps), path)


def _settings(args: argparse.Namespace) -> tuple[CommPlan, ...]:
    from specmodel.harness.environment import CommPlan, parse_settings

    if args.comm is None:
        return (CommPlan(name="default"),)
    from specmodel import io

    document: Mapping[str, Any] = io.read_document(args.comm)
    settings = parse_settings(document, source=args.comm, allow_nvls=args.allow_nvls)
    if args.tensor_parallel == 1 and len(settings) > 1:
        raise UsageError("--comm: communication settings differ only between GPUs; give --tensor-parallel 2 or more")
    return settings


def request_of(args: argparse.Namespace) -> Request:
    """Make the request that the options state.

    Raises
    ------
    UsageError
        An option is missing, malformed or out of range.
    CalibrationError
        A file that an option names is malformed.
    """
    from specmodel.harness.plan import Request
    from specmodel.harness.shapes import read_draft, read_shape

    if not args.model:
        raise UsageError("give --model: a Hugging Face config.json, or a shipped shape such as Llama-3.1-8B")
    for option, least, most in (("repeats", 1, 20), ("cycles", 200, 100_000), ("tensor_parallel", 1, 64)):
        if not least <= getattr(args, option) <= most:
            raise UsageError(f"--{option.replace('_', '-')} {getattr(args, option)}: from {least} to {most}")
    if args.timeout <= 0 or args.budget < 0:
        raise UsageError("--timeout and --budget are seconds: --timeout above 0, --budget 0 for no limit")
    target = read_shape(args.model, num_layers=args.layers)
    draft = read_draft(args.draft, target) if args.draft else None
    steps = args.steps if args.steps is not None else ("0-10" if draft else "0")
    if args.acceptance:
        conditional = _acceptance(args.acceptance, args.workload)
    else:
        conditional = _probabilities(args.conditional or _CONDITIONAL, "--conditional")
    rows: Any = args.first_step_rows or ("accepted" if draft is not None and draft.kind == "eagle3" else "one")
    return Request(
        target=target,
        draft=draft,
        tokens=numbers(args.tokens, "--tokens", least=1),
        batches=numbers(args.batches, "--batches", least=1),
        contexts=numbers(args.contexts, "--contexts", least=128, most=1 << 20),
        steps=numbers(steps, "--steps", least=0, most=127),
        conditional=conditional,
        comm=_settings(args),
        world=args.tensor_parallel,
        draft_modes=_modes(args.draft_modes, "--draft-modes"),
        cycle_modes=_modes(args.cycle_modes, "--cycle-modes"),
        verify_eager=args.verify_eager,
        first_step_rows=rows,
        repeats=args.repeats,
        cycles=args.cycles,
        seed=args.seed,
        timeout_ms=int(args.timeout * 1000),
        budget_ms=args.budget * 1000 or None,
        allow_nvls=args.allow_nvls,
    )


def output_of(args: argparse.Namespace) -> Path:
    """Return the path to write, which must be a calibration file's.

    Raises
    ------
    UsageError
        It is missing, of another kind, or not safe as a name.
    """
    if not args.output:
        raise UsageError("give -o FILE: the calibration to write")
    path = Path(args.output)
    if path.suffix not in (".yaml", ".yml", ".json") or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", path.stem):
        raise UsageError(f"-o {args.output}: a .yaml or .json file with a plain name (letters, digits, '.', '_', '-')")
    return path
