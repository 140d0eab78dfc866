"""`specmodel ingest`: its arguments, its messages, its file. Only the standard library is imported at the top."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from specmodel.calibration import Calibration
    from specmodel.engines.reading import Given, Reading

__all__ = ["EXAMPLES", "add_arguments", "run"]

FAMILY_NAMES = ("sglang", "vllm", "trtllm", "llamacpp", "nccl", "nsys", "torch", "inferencex")

EXAMPLES = """\
  specmodel ingest server.log -o calib.yaml            a server's log: SGLang, vLLM, TensorRT-LLM, llama.cpp
  specmodel ingest k1.log k3.log k5.log.gz plain.log -o calib.yaml
                                                       a sweep: one log a step count, one without speculation
  kubectl logs pod | specmodel ingest - -o calib.yaml
  specmodel ingest before.prom after.prom server.log -o calib.yaml
                                                       two scrapes of /metrics count by their difference
  specmodel ingest server.log nccl.txt trace.json.gz --batch 1 -o calib.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `specmodel ingest`."""
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="what an engine printed; - is stdin; .gz .xz .bz2 .zst too"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="the calibration, YAML or (.json) JSON; without it on stdout"
    )
    parser.add_argument(
        "--from", dest="family", choices=FAMILY_NAMES, help="what the sources are, if not told by content"
    )
    parser.add_argument("--name", help="the calibration's name (default: that of the output or of the first source)")
    parser.add_argument(
        "--num-steps", type=_count(0), metavar="K", help="draft tokens a cycle, where no source states them"
    )
    parser.add_argument("--topk", type=_count(1), metavar="N", help="branching of a tree, with --num-draft-tokens")
    parser.add_argument(
        "--num-draft-tokens", type=_count(1), metavar="N", help="tokens verified a sequence, root included"
    )
    parser.add_argument("--batch", type=_batch, metavar="B", help="running sequences, where no source states them")
    parser.add_argument("--context-tokens", type=_count(0), metavar="N", help="context of all rows")
    parser.add_argument("--workload", metavar="NAME", help="workload of all cycles and acceptance")
    parser.add_argument("--comm", metavar="NAME", help="name of the communication setting of all sources")
    parser.add_argument("--gpu", metavar="NAME", help="the GPU, which few logs name")
    parser.add_argument("--json", action="store_true", help="write JSON on stdout instead of YAML")


def _count(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if not least <= value < 10**9:
            raise argparse.ArgumentTypeError(f"must be {least} or more, got {text}")
        return value

    parse.__name__ = "whole number"
    return parse


def _batch(text: str) -> float:
    value = float(text)
    if not 1 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def run(args: argparse.Namespace) -> int:
    """What engines, profilers and NCCL printed, as one calibration file.

    Returns
    -------
    int
        0.

    Raises
    ------
    CalibrationError
        A source that cannot be read, sources that contradict each other, or nothing measured.
    UsageError
        Options that do not go together, or a source named twice.
    """
    from specmodel import io, streams
    from specmodel.engines.ingest import ingest
    from specmodel.errors import UsageError

    if len(set(args.sources)) < len(args.sources):
        raise UsageError("a source is named twice; name each once (its records would count double)")
    given = _given(args)
    calibration, readings = ingest(args.sources, given, _name(args), args.family)
    if not getattr(args, "quiet", False):
        _report(readings)
        _report_seen(calibration)
        sys.stderr.write(_lacking(calibration))
    if args.output is not None:
        try:
            io.dump(calibration, args.output)
        except OSError as error:
            raise UsageError(f"{args.output} cannot be written: {error.strerror or error}") from None
        if not getattr(args, "quiet", False):
            sys.stderr.write(f"wrote {args.output}; next: specmodel optimize {args.output}\n")
    else:
        streams.write(io.dumps(calibration, "json" if args.json else "yaml"))
    return 0


def _given(args: argparse.Namespace) -> Given:
    from specmodel.engines.reading import Given, Shape
    from specmodel.errors import UsageError

    shape = None
    tree = args.topk is not None and args.topk > 1
    if args.num_steps is not None:
        if tree and (args.num_draft_tokens is None or args.num_draft_tokens < 2 or args.num_steps < 1):
            raise UsageError(
                "a tree (--topk above 1) needs --num-steps of 1 or more and --num-draft-tokens of 2 or more"
            )
        if not tree and args.num_draft_tokens not in (None, args.num_steps + 1):
            raise UsageError(
                f"a chain of {args.num_steps} steps verifies {args.num_steps + 1} tokens; for a tree add --topk"
            )
        tokens = args.num_draft_tokens if tree else None
        shape = Shape(num_steps=args.num_steps, topk=args.topk if tree else 1, num_draft_tokens=tokens)
    elif args.topk is not None or args.num_draft_tokens is not None:
        raise UsageError("--topk and --num-draft-tokens need --num-steps")
    return Given(
        shape=shape,
        batch=args.batch,
        context_tokens=args.context_tokens,
        workload=args.workload,
        comm=args.comm,
        gpu=args.gpu,
    )


def _name(args: argparse.Namespace) -> str:
    from specmodel.engines.redact import clean

    path = args.name or args.output or next((s for s in args.sources if s != "-"), "ingested")
    stem = re.sub(r"(\.(gz|xz|bz2|zst|log|txt|jsonl?|prom|csv|ya?ml))+$", "", os.path.basename(path))
    return re.sub(r"[^A-Za-z0-9._-]+", "-", clean(stem)).strip("-.") or "ingested"


def _lacking(calibration: Calibration) -> str:
    """Say what a decision needs beside the speeds of one step count; empty where there is more."""
    m = calibration.measurements
    shapes = {(r.num_steps, r.topk, r.verify_tokens) for r in m.cycles if r.tok_s_at_most is None}
    if len(shapes) != 1 or m.verify or m.draft or not max(shapes)[0]:
        return ""
    steps = max(shapes)[0]
    return (
        f"all speeds are of {steps} step{'s' if steps > 1 else ''}: add a log without speculation, or one of another "
        "step count, so that `optimize` has something to compare\n"
    )


def _report(readings: list[Reading]) -> None:
    """Say on stderr what was used, what was left out and why, and what only the user can answer."""
    from specmodel.engines.redact import clean

    lines = []
    for reading in readings:
        used = ", ".join(f"{count} {what}" for what, count in reading.used.items() if count)
        lines.append(f"{reading.source}: {reading.kind}: {used or 'no measurement used'}")
        lines += [f"  left out: {count} {reason}" for reason, count in reading.dropped.items() if count > 0]
        lines += [f"  note: {caveat.removeprefix(f'{reading.source}: ')}" for caveat in reading.caveats]
        lines += [f"  question: {question}" for question in reading.questions]
    sys.stderr.write("".join(f"{clean(line)}\n" for line in lines))


def _report_seen(calibration: Calibration) -> None:
    """Say on stderr what the sources show of graphs, communication and memory; `specmodel diagnose` says the same."""
    from specmodel.engines.redact import clean
    from specmodel.engines.seen import seen_sentences

    if calibration.evidence:
        lines = seen_sentences(calibration.evidence, calibration.model.cuda_graph_sizes)
        sys.stderr.write("".join(f"  seen: {clean(line)}\n" for line in lines))
