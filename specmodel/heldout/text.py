"""The sections of the page on published deployments, and its head: lines of Markdown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from specmodel.calibration import Calibration
from specmodel.heldout.figures import KINDS, binned
from specmodel.heldout.markdown import grid, percent, rate, signed
from specmodel.heldout.points import Decision, HeldOut, Task
from specmodel.heldout.summary import (
    TRANSFER_AIMS,
    Aim,
    Summary,
    aims_of,
    likely_reason,
    summary_of,
    worse_than_simple,
    worst_of,
)
from specmodel.heldout.tables import SPARSE_TOKENS, OtherWidth, Transfer, has_tables

__all__ = ["every_file", "failures", "field", "head", "regenerate"]

_TASKS: dict[Task, str] = {
    "length, given": "one chain length; its acceptance length is given",
    "length, not given": "the same; only the acceptance at the other lengths is known",
    "length, blind": "the same; the group has no acceptance data at all, only speeds",
    "between, given": "every length between the shortest and the longest, which are kept with plain decoding; "
    "acceptance length given",
    "between, not given": "the same; only the acceptance at the two ends is known",
    "between, blind": "the same; only speeds are known",
    "tree": "one draft tree; its acceptance length is given, the other trees and chains are known",
    "batch": "one batch of a chain or tree measured at four batches or more",
    "all of a batch": "every row of one batch of a family, of three batches or more; all other batches are known",
    "kept apart": "cycles that a file keeps under `validation`",
    "full table": "whole cycles from all verify and draft times of the file, at the cycle's own acceptance length",
    "sparse table": "the same from verify passes of " + ", ".join(map(str, SPARSE_TOKENS)) + " tokens alone",
}
_FIELD: tuple[Task, ...] = tuple(t for t in _TASKS if not t.endswith("table"))
_MOST_WORST = 12
_LARGE = 0.10
_SLACK = 0.05
"""How far from its level the share inside an interval may lie."""
LEAST_JUDGED = 20
_BAD_REGRET = 0.02


def _place(p: HeldOut) -> str:
    row = p.row
    tree = row.topk > 1 or row.verify_tokens != row.num_steps + 1
    name = f"tree {row.num_steps}x{row.topk}x{row.verify_tokens}" if tree else f"{row.num_steps} steps"
    name = "plain" if row.num_steps == 0 else "1 step" if name == "1 steps" else name
    words = [name, f"batch {row.batch:g}"]
    words += [x for x in (row.workload, row.comm) if x != "default"]
    words += [f"context {row.context_tokens}"] if row.context_tokens else []
    return ", ".join(words + ([] if row.cuda_graph else ["drafts eager"]))


def head(cals: Sequence[Calibration], points: Sequence[HeldOut]) -> list[str]:
    """What is predicted from what, and what the columns mean."""
    measured, names = [c.name for c in cals if has_tables(c)], {p.file for p in points}
    swept, idle = len(names - set(measured)), len(cals) - len(names)
    tasks = [f"- **{task}**: {_TASKS[task]}." for task in _TASKS if any(p.task == task for p in points)]
    rest = f" From {idle} more nothing can be held out: too few lengths and batches, or tables alone." if idle else ""
    return [
        "# Validation",
        "",
        f"Predicted against measured, from committed calibrations: {swept} deployments, nearly all of which others "
        f"published, and {len(measured)} sets of tables measured on GPUs with whole cycles beside them.{rest} "
        f"{len(points):,} predictions, each of something that the fit did not see. One command makes this page, every "
        "number and figure of it; what went wrong comes first.",
        "",
        "## What is predicted from what",
        "",
        "A *group* is what one source measured of one workload at one batch, communication setting and context. Of a "
        "published deployment a fit sees the rest of the group, plain decoding at the same place and the tables of the "
        "file, and nothing else of it. Held out are:",
        "",
        *tasks,
        "",
        "Errors are of tok/s, relative to what was measured, without their sign unless one is shown (+ is predicted "
        "too fast). *Inside* is the share of measurements inside the 90 % interval for one new measurement: 90 % is "
        "right, less is overconfident, more is too careful. *Width* is the mean width of that interval relative to the "
        "measurement. *Interior* leaves out the shortest and longest, or smallest and largest, which are "
        "extrapolations. *Arithmetic* is what one would compute without a model: the straight line of cycle times "
        "through the two nearest lengths at the given acceptance lengths, or the sum of the measured verify and draft "
        "times; the numbers in brackets are the model's on the same rows. *Regret* is the share of the best measured "
        "tok/s that is lost with the length that `optimize` chooses knowing the two ends alone.",
        "",
        "Published numbers carry a noise of 2 to 5 % from run to run, many include prefill, and a stated concurrency "
        "is not always the mean batch: an error of that size says little of the model.",
    ]


def failures(
    by_name: Mapping[str, Calibration],
    points: Sequence[HeldOut],
    decisions: Sequence[Decision],
    passes: Sequence[Transfer],
    widths: Sequence[OtherWidth],
    problems: Sequence[str],
) -> list[str]:
    """Aims missed, the worst predictions, misses and decisions, by name."""
    aims = aims_of(points, decisions, passes, widths)
    missed = [a for a in aims if not a.kept]
    lines = ["## What went wrong", ""]
    if problems:
        lines += ["Could not be fitted or predicted:", "", *(f"- {p}" for p in problems), ""]
    else:
        lines += ["Every group could be fitted and predicted.", ""]
    if aims:
        lines += [f"### Aims: {len(missed)} of {len(aims)} missed", "", *_aims(aims), ""]
    lines += [*_dishonest(points), *_outside_tables(points), *_worse_than_sum(points), *_settings_alone(passes)]
    lines += [
        "### The largest errors",
        "",
        f"Of each group with errors above {percent(_LARGE, 0)} the worst, and how many more of its settings are that "
        "far off. The last column is what the numbers around it, its note and the caveats of its file say.",
        "",
        *_worst(by_name, worst_of(points, lambda p: abs(p.error), _LARGE, _MOST_WORST)),
        "",
        "### The farthest outside their 90 % interval",
        "",
        "Of each group the measurement farthest outside, and how many more of its settings lie outside.",
        "",
        *_worst(by_name, worst_of(points, lambda p: p.miss, 0.0, _MOST_WORST)),
    ]
    bad = sorted((d for d in decisions if d.regret > _BAD_REGRET), key=lambda d: -d.regret)
    if bad:
        rows = [
            [
                d.file,
                d.group,
                f"{d.picked}" if d.picked == d.judged_as else f"{d.picked} (judged as {d.judged_as})",
                f"{d.best}",
                percent(d.regret),
                f"{d.probability_best:.2f}",
                "no" if d.blind else "yes",
            ]
            for d in bad[:_MOST_WORST]
        ]
        titles = ["file", "group", "chosen steps", "best measured", "regret", "stated P(best)", "acceptance known"]
        lines += ["", f"### Choices that lose more than {percent(_BAD_REGRET, 0)}", "", *grid(titles, rows, 2)]
    return lines


def _dishonest(points: Sequence[HeldOut]) -> list[str]:
    """Say which intervals promise too much, and which are wider than they need to be."""
    lines = []
    for kind, tasks in KINDS.items():
        some = [p for p in points if p.task in tasks]
        if len(some) < LEAST_JUDGED:
            continue
        half, most = (float(np.mean([p.inside(level) for p in some])) for level in (0.5, 0.9))
        if most < 0.9 - _SLACK:
            lines.append(f"- {kind}: {percent(most, 0)} inside the 90 % interval: it promises too much.")
        if half > 0.5 + 2.0 * _SLACK:
            lines.append(f"- {kind}: {percent(half, 0)} inside the 50 % interval: it is wider than it needs to be.")
    return ["### Intervals that are not what they say", "", *lines, ""] if lines else []


def _outside_tables(points: Sequence[HeldOut]) -> list[str]:
    """Say of which cycles from full tables too many lie outside their intervals."""
    lines = []
    full = [p for p in points if p.task == "full table"]
    for name, mode in dict.fromkeys((p.file, p.mode) for p in full):
        here = [p for p in full if (p.file, p.mode) == (name, mode)]
        outside = [p for p in here if not p.inside()]
        if len(outside) > (0.1 + _SLACK) * len(here):
            worst = max(outside, key=lambda p: p.miss)
            text = f"- {name}, {mode}: {len(outside)} of {len(here)} outside, at worst {_place(worst)}: "
            simple = worst.simple_error
            text += f"{signed(worst.error)}" + (f", the sum of the table entries {signed(simple)}" if simple else "")
            lines.append(text + ".")
    return ["### Cycles from full tables outside their intervals", "", *lines, ""] if lines else []


def _worse_than_sum(points: Sequence[HeldOut]) -> list[str]:
    """Say for which files the model is worse than adding two measured numbers."""
    lines = []
    both = [p for p in points if p.task == "full table" and p.simple_error is not None]
    for name in dict.fromkeys(p.file for p in both):
        here = [p for p in both if p.file == name]
        worse = [p for p in here if worse_than_simple(p)]
        if worse:
            most = max(abs(p.error) - abs(p.simple_error or 0.0) for p in worse)
            lines.append(f"- {name}: {len(worse)} of {len(here)} cycles, by up to {percent(most)}.")
    return ["### Worse than adding two measured times", "", *lines, ""] if lines else []


def _settings_alone(passes: Sequence[Transfer]) -> list[str]:
    """Communication settings whose own passes miss the aims that hold for all of them together."""
    errors: dict[tuple[str, str], list[float]] = {}
    for t in passes:
        errors.setdefault((t.file, t.comm), []).append(abs(t.error))
    found = {place: [float(np.quantile(e, q)) for q in (0.5, 0.95)] for place, e in errors.items()}
    missed = {
        place: (middle, far)
        for place, (middle, far) in found.items()
        if middle > TRANSFER_AIMS["median"] or far > TRANSFER_AIMS["p95"]
    }
    if not missed:
        return []
    lines = [
        f"- {file}, {comm}: median {percent(middle, 2)}, 95 % below {percent(far, 2)}."
        for (file, comm), (middle, far) in sorted(missed.items(), key=lambda item: -item[1][1])
    ]
    return [
        f"### Communication settings that alone miss the aim of their passes: {len(missed)} of {len(found)}",
        "",
        *lines,
        "",
    ]


def _aims(aims: Sequence[Aim]) -> list[str]:
    rows = [
        [
            a.what,
            a.figure,
            ("at least " if a.least else "at most ") + percent(a.limit, 2),
            percent(a.value, 2),
            "kept" if a.kept else "**missed**",
        ]
        for a in aims
    ]
    return grid(["of", "figure", "aim", "found", ""], rows, 2, 1)


def _worst(by_name: Mapping[str, Calibration], points: Sequence[tuple[HeldOut, int]]) -> list[str]:
    rows = []
    for p, more in points:
        low, high = p.intervals[4]
        simple = "-" if p.simple_error is None else signed(p.simple_error)
        rows.append(
            [
                p.file,
                _place(p),
                p.task,
                rate(p.measured_tok_s),
                f"{rate(p.predicted_tok_s)} ({rate(low)} to {rate(high)})",
                signed(p.error),
                simple,
                f"{more}",
                likely_reason(by_name[p.file], p) or "-",
            ]
        )
    titles = ["file", "setting", "held out", "measured tok/s", "predicted", "error", "arithmetic", "more"]
    return grid([*titles, "what is known of it"], rows, 3, 1)


_COLUMNS = ["n", "median", "mean", "90 % below", "worst", "inside", "width", "arithmetic, mean"]


def _cells(s: Summary, digits: int = 1) -> list[str]:
    simple = "-" if s.simple is None else f"{percent(s.simple, digits)} ({percent(s.beside or 0.0, digits)})"
    numbers = [percent(x, digits) for x in (s.median, s.mean, s.p90, s.worst)]
    return [f"{s.count}", *numbers, percent(s.inside, 0), percent(s.width, digits), simple]


def field(points: Sequence[HeldOut], decisions: Sequence[Decision], images: Mapping[str, str]) -> list[str]:
    """Published deployments, pooled: predictions, decisions, and whether probabilities come true."""
    some = [p for p in points if p.task in _FIELD]
    if not some:
        return []
    source = _largest_source([p.file for p in some])
    filters: list[tuple[str, Callable[[HeldOut], bool]]] = [
        ("", lambda p: True),
        (", interior", lambda p: p.interior),
        (f", without {source}", lambda p: not p.file.startswith(source)),
    ]
    rows = []
    for task in _FIELD:
        every = [p for p in some if p.task == task]
        for words, chosen in filters:
            here = [p for p in every if chosen(p)]
            summary = summary_of(here)
            if summary is not None and (not words or len(here) < len(every)):
                rows.append([task + words, f"{summary.groups}", *_cells(summary)])
    lines = [
        "## Published deployments",
        "",
        f"All files together. One source, `{source}`, fills most groups: the rows without it leave it out. File by "
        "file it stands [below](#every-file).",
        "",
        *grid(["held out", "groups", *_COLUMNS], rows),
    ]
    if "reliability" in images:
        lines += [
            "",
            f"![Share of measurements inside intervals of each level]({images['reliability']})",
            "",
            "A line above the dashed one means intervals that are wider than they need to be, below it intervals that "
            "promise too much.",
        ]
    if "scatter" in images:
        lines += ["", f"![Predicted over measured tok/s]({images['scatter']})"]
    return lines + _decisions(decisions, images)


def _largest_source(files: Sequence[str]) -> str:
    """The first word of the names that most predictions share: one source."""
    words = [f.split("_")[0] for f in files]
    return max(sorted(set(words)), key=words.count)


def _decisions(decisions: Sequence[Decision], images: Mapping[str, str]) -> list[str]:
    if not decisions:
        return []
    rows = []
    for words, some in (
        ("all", list(decisions)),
        ("acceptance known", [d for d in decisions if not d.blind]),
        ("blind", [d for d in decisions if d.blind]),
    ):
        if some:
            regrets = np.array([d.regret for d in some])
            free, close = float(np.mean(regrets < 1e-9)), float(np.mean(regrets <= 0.01))
            numbers = [percent(free, 0), percent(close, 0), percent(float(regrets.mean()), 2), percent(regrets.max())]
            rows.append([words, f"{len(some)}", *numbers])
    lines = [
        "",
        "### The chain length that is chosen",
        "",
        "From plain decoding, the shortest and the longest chain; judged by what was measured. A choice that was not "
        "measured is judged by the model's best among the measured lengths.",
        "",
        *grid(["groups", "n", "nothing lost", "at most 1 % lost", "mean regret", "largest"], rows),
    ]
    judged = [d for d in decisions if d.right is not None]
    if judged:
        full = [d for d in judged if d.complete]
        bins = [[f"{low:.1f} to {high:.1f}", f"{n}", f"{p:.2f}", f"{r:.2f}"] for low, high, n, p, r in binned(judged)]
        for words, some in (("all", judged), ("every length measured", full)):
            if some:
                stated = float(np.mean([d.probability for d in some]))
                right = float(np.mean([bool(d.right) for d in some]))
                bins.append([words, f"{len(some)}", f"{stated:.2f}", f"{right:.2f}"])
        lines += [
            "",
            "How often the chosen length is the best measured one (within 0.5 %), by the probability that was stated. "
            "`optimize` counts every length up to the longest; here the stated probabilities of the lengths that were "
            "measured are taken to add up to one.",
            "",
            *grid(["stated P(best)", "n", "stated, mean", "right"], bins),
        ]
    if "decisions" in images:
        lines += ["", f"![Stated probability of the choice against how often it is right]({images['decisions']})"]
    return lines


def every_file(points: Sequence[HeldOut], decisions: Sequence[Decision]) -> list[str]:
    """One row for each published file and task, and the decisions of each."""
    lines = ["## Every file", ""]
    rows = []
    for name in dict.fromkeys(p.file for p in points):
        for task in _FIELD:
            some = [p for p in points if p.file == name and p.task == task]
            summary = summary_of(some)
            if summary is not None:
                rows.append([name, task, *_cells(summary)])
    lines += grid(["file", "held out", *_COLUMNS], rows, 2) if rows else ["No published sweep."]
    chosen = []
    for name in dict.fromkeys(d.file for d in decisions):
        here = [d for d in decisions if d.file == name]
        regrets = np.array([d.regret for d in here])
        kind = "no" if all(d.blind for d in here) else "yes" if not any(d.blind for d in here) else "in part"
        numbers = [percent(float(regrets.mean()), 2), percent(float(regrets.max()))]
        chosen.append([name, kind, f"{len(here)}", f"{int((regrets < 1e-9).sum())}", *numbers])
    if chosen:
        titles = ["file", "acceptance known", "choices", "nothing lost", "mean regret", "largest"]
        lines += ["", "The chain length chosen from the ends:", "", *grid(titles, chosen, 2)]
    return lines


def regenerate(command: str) -> list[str]:
    """How to make the page again."""
    return [
        "## Make this page again",
        "",
        "```sh",
        command,
        "```",
        "",
        "It reads the calibrations that it is given and nothing else, and writes this page and its figures. A new "
        "calibration appears by itself: with verify times and whole cycles under `validation` among the tables, "
        "without among the published deployments. The same files give the same page, but for the last digits where "
        "linear algebra libraries differ; a test compares the two.",
    ]
