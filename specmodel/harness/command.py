"""`specmodel measure`: plan, build, run, and write the calibration with its raw samples."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from specmodel import streams
from specmodel.errors import SpecModelError, UsageError
from specmodel.harness.options import add_arguments, output_of, request_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from specmodel.harness.group import Progress
    from specmodel.harness.plan import Plan, Request
    from specmodel.harness.roofline import Gpu

__all__ = ["EXAMPLES", "add_arguments", "run"]

EXAMPLES = """\
  specmodel measure --selftest                        is this machine fit to be measured: a minute
  specmodel measure --model Llama-3.1-8B --draft EAGLE3-Llama-3.1-8B --dry-run
                                                      what would be measured, and how long it takes
  specmodel measure --model Llama-3.1-8B --draft EAGLE3-Llama-3.1-8B -o calib.yaml
  specmodel measure --model target/config.json --draft head/ --tensor-parallel 2 --comm settings.yaml -o tp2.yaml
"""

_ASSUMED_GPU = "NVIDIA H200"
_TIMEOUT_MS = 120_000


def run(args: argparse.Namespace) -> int:
    """Verify passes, draft steps, all-reduces and whole cycles, timed on this machine's GPUs with random weights.

    Returns
    -------
    int
        0, or 1 where a check failed or something planned was not measured.

    Raises
    ------
    UsageError, CalibrationError, SpecModelError
        As for the command line: wrong options, a malformed file, a machine that cannot measure.
    """
    if args.selftest:
        with _ended_in_order():
            return _selftest(args)
    request = request_of(args)
    output = None if args.dry_run and not args.output else output_of(args)
    plan = _plan(request, dry_run=args.dry_run, allow_busy=args.allow_busy)
    text = describe(plan)
    if args.dry_run:
        streams.write(text + "\n")
        return 0
    if output is None:
        raise UsageError("give -o FILE: the calibration to write")
    _say(text)
    try:
        with _ended_in_order():
            return _measure(plan, output, resume=args.resume, keep_noisy=args.keep_noisy)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = error.filename or output
        raise SpecModelError(f"{where} cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let a request to end (SIGTERM of `timeout` or a scheduler, SIGHUP of a terminal) do what Ctrl-C does.

    A process that such a signal ends at once would leave its measuring processes on the GPUs. A signal that is ignored
    already (`nohup`) stays so.
    """

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    main = threading.current_thread() is threading.main_thread()
    taken = [number for number in numbers if main and signal.getsignal(number) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _gpu_here(request: Request, *, dry_run: bool, allow_busy: bool) -> Gpu:
    from specmodel.harness.gpus import check_gpus, read_gpus
    from specmodel.harness.roofline import known_gpu

    gpus = read_gpus()
    if dry_run and len(gpus) < request.world:
        _say(f"not enough GPUs here: the plan is made as for {request.world} x {_ASSUMED_GPU}")
        return known_gpu(_ASSUMED_GPU)
    chosen = check_gpus(gpus, request.world, allow_busy=allow_busy or dry_run)
    return known_gpu(chosen[0].name, min(gpu.free_bytes for gpu in chosen))


def _plan(request: Request, *, dry_run: bool, allow_busy: bool) -> Plan:
    from specmodel.harness.budget import make_plan
    from specmodel.harness.build import source_hash

    return make_plan(request, _gpu_here(request, dry_run=dry_run, allow_busy=allow_busy), source_hash=source_hash())


def describe(plan: Plan) -> str:
    """Describe a plan for people: what, how much, how long, and what was cut for time."""
    request, effort = plan.request, plan.effort
    kinds = Counter(point.kind for point in plan.points)
    drafter = f" with {request.draft.name}" if request.draft else ""
    seconds = plan.estimate_ms / 1000
    lines = [
        f"{request.target.name}{drafter} on {request.world} x {plan.gpu.name}",
        f"  points     {', '.join(f'{count} {kind}' for kind, count in kinds.items())}",
        f"  batches    {', '.join(map(str, request.batches))}; contexts {', '.join(map(str, request.contexts))}; "
        f"steps {', '.join(map(str, request.steps))}",
        f"  settings   {', '.join(setting.name for setting in request.comm)}",
        f"  effort     {effort.repeats} x in fresh processes (cycles {effort.cycle_repeats} x), at least "
        f"{effort.min_samples} samples and {effort.min_ms / 1000:.2f} s a point each",
        f"  memory     {sum(plan.memory_bytes.values()) / 1e9:.1f} of {plan.gpu.memory_bytes / 1e9:.1f} GB a GPU",
        f"  time       about {seconds:.0f} s" + (f" of {request.budget_ms / 1000:.0f}" if request.budget_ms else ""),
    ]
    return "\n".join(lines + [f"  cut        {cut}" for cut in effort.cut])


def _say_progress(say: Callable[[str], None]) -> Callable[[Progress], None]:
    """Return what shows progress: one line that is rewritten on a terminal, a line now and then elsewhere."""
    live = sys.stderr.isatty()

    def show(progress: Progress) -> None:
        value = "" if progress.median_ms is None else f" {progress.median_ms:.4f} ms"
        text = f"[{progress.done}/{progress.total}] {progress.key}{value} {progress.disposition}"
        if live:
            sys.stderr.write(f"\r\x1b[K{text}" + ("\n" if progress.done == progress.total else ""))
            sys.stderr.flush()
        elif progress.done % 20 == 0 or progress.done == progress.total or progress.disposition != "ok":
            say(text)

    return show


def _samples_path(output: Path) -> Path:
    return output.with_name(f"{output.stem}.samples.json.gz")


def _is_complete(plan: Plan, output: Path, samples_path: Path, *, resume: bool) -> bool:
    """Whether both outputs are there, of this very plan; anything else that is there stops the run."""
    there = [path for path in (output, samples_path) if path.exists()]
    if not there or (resume and there == [samples_path]):
        return False
    if resume and len(there) == 2 and _plan_of(samples_path) == plan.hash:
        return True
    raise UsageError(f"{there[0]} exists and is never overwritten; give another -o, or move it away")


def _plan_of(samples_path: Path) -> str | None:
    """Return the plan that samples were taken by; None for a file of another kind."""
    import zlib

    from specmodel.harness.samples import read_samples

    try:
        return str(read_samples(samples_path)["run"]["id"])
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error):
        return None


def _measure(plan: Plan, output: Path, *, resume: bool, keep_noisy: bool) -> int:
    from datetime import UTC, datetime

    from specmodel import __version__, io
    from specmodel.harness.build import build, find_nccl, find_toolchain
    from specmodel.harness.gpus import local_cpus, read_gpus
    from specmodel.harness.results import addition_errors, calibration_of, dispositions
    from specmodel.harness.runner import Run, open_folder, run_plan
    from specmodel.harness.samples import document, write_samples

    samples_path = _samples_path(output)
    if _is_complete(plan, output, samples_path, resume=resume):
        _say(f"{output} is complete")
        return 0
    gpus = read_gpus()[: plan.request.world]
    binary = build(find_toolchain(), architecture=gpus[0].architecture or None, say=_say)
    folder = output.with_name(f"{output.stem}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    open_folder(folder, plan, resume=resume)
    left_out = run_plan(
        Run(
            plan=plan,
            binary=binary,
            folder=folder,
            nccl_library=find_nccl(),
            cpus=tuple(local_cpus(gpu) for gpu in gpus),
            say=_say,
            on_progress=_say_progress(_say),
        )
    )
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    content = document(plan, folder, tool=f"specmodel {__version__}", left_out=left_out, finished=now)
    digest = write_samples(content, samples_path)
    calibration = calibration_of(
        content, name=output.stem, samples_name=samples_path.name, samples_sha256=digest, keep_noisy=keep_noisy
    )
    io.dump(calibration, output)
    shutil.rmtree(folder)
    counts = dispositions(content)
    streams.write(f"{output}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}\n")
    errors = sorted(abs(error) for _, error in addition_errors(content))
    if errors:
        middle, far = errors[len(errors) // 2], errors[min(len(errors) - 1, int(0.95 * len(errors)))]
        streams.write(
            f"{len(errors)} measured cycles against the sum of their parts: median error {100 * middle:.2f} %, "
            f"95th percentile {100 * far:.2f} %\n"
        )
    return 0 if set(counts) <= {"ok", "noisy"} else 1


def _selftest(args: argparse.Namespace) -> int:
    import os

    from specmodel.harness.build import build, find_nccl, find_toolchain
    from specmodel.harness.environment import CommPlan, child_environment
    from specmodel.harness.gpus import check_gpus, read_gpus
    from specmodel.harness.group import run_group

    gpus = check_gpus(read_gpus(), args.tensor_parallel, allow_busy=args.allow_busy)
    binary = build(find_toolchain(), architecture=gpus[0].architecture or None, say=_say)
    library = find_nccl()
    with tempfile.TemporaryDirectory(prefix="specmodel-") as name:
        empty = Path(name) / "nccl.conf"
        empty.touch()
        env = child_environment(
            os.environ, CommPlan(name="default"), empty_config=str(empty), allow_nvls=args.allow_nvls
        )
        result = run_group(
            [str(binary), "selftest", *(["--nccl-library", library] if library else [])],
            job=None,
            stem=Path(name) / "selftest",
            world=args.tensor_parallel,
            env=env,
            timeout_ms=_TIMEOUT_MS,
            show_output=True,
        )
    if result.outcome != "finished":
        raise SpecModelError(f"the self-test did not end well ({result.outcome}): {'; '.join(result.errors)}")
    return 0 if all(code == 0 for code in result.exit_codes) else 1
