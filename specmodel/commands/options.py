"""Options that several commands share, from text to checked values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from specmodel.model import FittedModel

MOST_STEPS = 500
"""Longest chain that is looked at; real drafters propose at most a few dozen."""
FIGURE_KINDS = (".png", ".svg", ".pdf")


def add_calibration(parser: argparse.ArgumentParser, name: str = "calibration", metavar: str = "CALIB") -> None:
    """Add the calibration file as a positional argument."""
    parser.add_argument(name, metavar=metavar, help="calibration file, YAML or JSON; - is standard input")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output, unrounded")


def add_candidates(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which configurations there are to choose from."""
    which = parser.add_argument_group("which configurations")
    which.add_argument(
        "--batch",
        type=batch_shares,
        metavar="N,...",
        help="running sequences, each answered for itself (default: every measured one); "
        "N=SHARE,... is one distribution of batches",
    )
    which.add_argument(
        "--comm", action="append", metavar="NAME,...", help="communication settings (default: every one with a row)"
    )
    which.add_argument(
        "--workload",
        type=workload_shares,
        metavar="NAME[=SHARE],...",
        help="kind of traffic, or a mixture (default: `default`, else the mixture that the file states)",
    )
    which.add_argument(
        "--context-tokens",
        type=whole_number(0, 10**9),
        metavar="N",
        help="tokens of context per sequence (default: the context with most rows at that batch)",
    )
    which.add_argument(
        "--max-steps",
        type=whole_number(0, MOST_STEPS),
        metavar="K",
        help="longest chain (default: 10, or the longest measured where that is longer)",
    )
    which.add_argument(
        "--trees",
        type=tree_list,
        default=(),
        metavar="KxTxN,...",
        help="draft trees beside the chains, as SGLang counts them: num_steps x topk x num_draft_tokens, e.g. 5x4x8; "
        "`auto` proposes the best few",
    )


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which configurations are meant, and what is best: of `optimize` and `predict`."""
    add_candidates(parser)
    goal = parser.add_argument_group("what is best")
    goal.add_argument(
        "--objective",
        choices=("tok_s", "tpot_ms", "goodput"),
        default="tok_s",
        help="throughput; time per token of one sequence; or throughput counting only where --max-tpot-ms is kept",
    )
    goal.add_argument(
        "--max-tpot-ms", type=positive_number, metavar="MS", help="limit of the time per token of one sequence"
    )
    add_extrapolate(goal)


def add_extrapolate(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add ``--extrapolate``."""
    parser.add_argument(
        "--extrapolate", action="store_true", help="trust points far from anything that was measured as well"
    )


def whole_number(least: int, most: int) -> _Whole:
    """Return a reader of whole numbers from `least` to `most`."""
    return _Whole(least, most)


class _Whole:
    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most

    def __call__(self, text: str) -> int:
        if not re.fullmatch(r"[+-]?[0-9]{1,12}", text) or not self.least <= int(text) <= self.most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {self.least} to {self.most}, got {text!r}")
        return int(text)


_NUMBER = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?\s*")


def _finite(text: str) -> float:
    # Plain digits only: `float` also takes 1_0 and digits of other scripts.
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    return value if math.isfinite(value) else math.nan


def _add_up(shares: Iterable[float], text: str) -> None:
    total = sum(shares)
    if not math.isfinite(total):
        raise argparse.ArgumentTypeError(f"shares must add up to a finite number, got {text!r}")


def positive_number(text: str) -> float:
    """Read a number above 0."""
    value = _finite(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return value


def _share(part: str) -> float:
    share = _finite(part.rpartition("=")[2])
    if not share > 0:
        raise argparse.ArgumentTypeError(f"a share must be a number above 0, got {part.strip()!r}")
    return share


def batch_shares(text: str) -> dict[float, float | None]:
    """Read ``1,4,8`` or ``1=0.5,8=0.5``: each batch with its share, or all without one."""
    out: dict[float, float | None] = {}
    for part in text.split(","):
        size, equals, _ = part.partition("=")
        value = _finite(size)
        if not 1 <= value <= 1e9:
            raise argparse.ArgumentTypeError(f"must be numbers from 1, such as 1,4,8, got {text!r}")
        if value in out:
            raise argparse.ArgumentTypeError(f"batch {size.strip()} is given twice in {text!r}")
        out[value] = _share(part) if equals else None
    if len({share is None for share in out.values()}) > 1:
        raise argparse.ArgumentTypeError(f"give every batch a share or none, got {text!r}")
    _add_up((share or 0.0 for share in out.values()), text)
    return out


def workload_shares(text: str) -> dict[str, float]:
    """Read ``chat`` or ``chat=0.7,code=0.3``; a name without a share weighs 1."""
    out: dict[str, float] = {}
    for part in text.split(","):
        name = part.rpartition("=")[0].strip() if "=" in part else part.strip()
        if not name:
            raise argparse.ArgumentTypeError(f"must be names, such as chat=0.7,code=0.3, got {text!r}")
        if name in out:
            raise argparse.ArgumentTypeError(f"workload {name!r} is given twice in {text!r}")
        out[name] = _share(part) if "=" in part else 1.0
    _add_up(out.values(), text)
    return out


def tree_list(text: str) -> tuple[tuple[int, int, int], ...] | Literal["auto"]:
    """Read ``5x4x8,...``: num_steps x topk x num_draft_tokens of each tree; or ``auto``."""
    if text.strip() == "auto":
        return "auto"
    trees = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,4})x([0-9]{1,4})x([0-9]{1,5})\s*", part)
        if not found:
            message = f"must be num_steps x topk x num_draft_tokens, such as 5x4x8,3x2x6, or auto, got {text!r}"
            raise argparse.ArgumentTypeError(message)
        steps, topk, tokens = (int(group) for group in found.groups())
        if not 1 <= steps <= MOST_STEPS or topk < 1 or tokens < 2 or (topk == 1 and tokens != steps + 1):
            message = (
                f"{part.strip()}: a tree has 1 to {MOST_STEPS} steps, topk from 1 and at least 2 draft tokens "
                "(the root counts; num_steps + 1 where topk is 1)"
            )
            raise argparse.ArgumentTypeError(message)
        trees.append((steps, topk, tokens))
    return tuple(dict.fromkeys(trees))


def step_list(text: str) -> tuple[int, ...]:
    """Read ``0-10`` or ``1,3,5-8`` into increasing step counts."""
    steps: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*", part)
        low, high = (int(found.group(1)), int(found.group(2) or found.group(1))) if found else (1, 0)
        if not low <= high <= MOST_STEPS:
            message = f"must be step counts from 0 to {MOST_STEPS}, such as 0-10 or 1,3,5-8, got {text!r}"
            raise argparse.ArgumentTypeError(message)
        steps.update(range(low, high + 1))
    return tuple(sorted(steps))


def figure_path(text: str) -> Path:
    """Read where a figure goes, and check before any computation that it can be written there."""
    if Path(text).suffix.lower() not in FIGURE_KINDS:
        raise argparse.ArgumentTypeError(f"must end in {', '.join(FIGURE_KINDS)}, got {text!r}")
    return output_path(text)


def output_path(text: str) -> Path:
    """Read where a file goes, and check before any computation that it can be written there."""
    path = Path(text)
    if len(path.name.encode()) > 255:
        raise argparse.ArgumentTypeError(f"a file name has at most 255 bytes, got {text!r}")
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a directory; name a file in it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"no directory {str(path.parent)!r}; make it first")
    import os

    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"the directory {str(path.parent)!r} cannot be written")
    return path


def comm_names(given: list[str] | None, model: FittedModel) -> tuple[str, ...] | None:
    """Return the settings that ``--comm`` names; None where it was not given.

    Raises
    ------
    UsageError
        For a setting that the file lacks.
    """
    if given is None:
        return None
    known = model.calibration.comm_names
    names: dict[str, None] = {}
    for text in given:
        # A name may itself hold a comma.
        for name in [text] if text in known else [part.strip() for part in text.split(",")]:
            model.comm_index(name)
            names[name] = None
    return tuple(names)


def batches(given: dict[float, float | None] | None, model: FittedModel) -> tuple[float, ...]:
    """Return the batches to answer for: those given, else every measured one, else 1."""
    return tuple(given) if given is not None else model.measured.batches or (1.0,)


def trees(args: argparse.Namespace, model: FittedModel, batches: Iterable[float]) -> tuple[tuple[int, int, int], ...]:
    """Return the trees that ``--trees`` means, the same for all batches: those given, or the best few by the model."""
    if args.trees != "auto":
        return tuple(args.trees)
    from specmodel.shapes import proposed_trees

    return proposed_trees(model, tuple(batches), comm_names(args.comm, model), args.max_steps, workload=args.workload)


def distribution(
    given: dict[float, float | None] | None, objective: str, model: FittedModel
) -> dict[float, float] | None:
    """Return the one distribution of batches that is meant, or None where each batch is a question of its own."""
    if given is not None and None not in given.values():
        return {size: share for size, share in given.items() if share is not None}
    return dict.fromkeys(batches(given, model), 1.0) if objective == "goodput" else None


def require_limit(objective: str, max_tpot_ms: float | None) -> None:
    """Goodput is defined by a limit.

    Raises
    ------
    UsageError
        Where there is none.
    """
    if objective == "goodput" and max_tpot_ms is None:
        from specmodel.errors import UsageError

        raise UsageError("--objective goodput needs --max-tpot-ms: the time per token that counts as good")
