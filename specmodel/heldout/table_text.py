"""The sections of the page on measured tables: whole cycles from them, communication settings, widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from specmodel.calibration import Calibration
from specmodel.heldout.markdown import grid, percent, signed
from specmodel.heldout.points import HeldOut
from specmodel.heldout.summary import TABLE_AIMS, TRANSFER_AIMS, WORSE, summary_of, worse_than_simple
from specmodel.heldout.tables import EAGER, SPARSE_TOKENS, AllreduceShare, OtherWidth, Transfer, settings_gain

__all__ = ["communication", "tables"]


def tables(points: Sequence[HeldOut], images: Mapping[str, str]) -> list[str]:
    """Whole cycles from measured tables, by file and by how the drafts ran."""
    if not points:
        return []
    titles = ["file", "table", "drafts", "n", "median", "mean", "90 % below", "95 % below", "worst", "inside", "width"]
    rows, added = [], []
    for name in dict.fromkeys(p.file for p in points):
        here = [p for p in points if p.file == name]
        for task in ("full table", "sparse table"):
            every = [p for p in here if p.task == task]
            kinds = [(mode, [p for p in every if p.mode == mode]) for mode in dict.fromkeys(p.mode for p in every)]
            within = [p for p in every if p.interior]
            kinds += [("all", every)] if len(kinds) > 1 else []
            kinds += [(f"all, to {SPARSE_TOKENS[-1]} tokens", within)] if len(within) < len(every) else []
            rows += [[name, task, mode, *_wide(some)] for mode, some in kinds if some]
        added += _against_sum(name, [p for p in here if p.task == "full table" and p.simple_error is not None])
    for task in ("full table", "sparse table"):
        some = [p for p in points if p.task == task]
        kinds = [(mode, [p for p in some if p.mode == mode]) for mode in dict.fromkeys(p.mode for p in some)]
        kinds += [("all", some)]
        within = [p for p in some if p.interior]
        kinds += [(f"all, to {SPARSE_TOKENS[-1]} tokens", within)] if len(within) < len(some) else []
        rows += [["all files", task, mode, *_wide(here)] for mode, here in kinds if here]
    lines = [
        "## Whole cycles from measured tables",
        "",
        "Verify and draft passes are timed alone, whole cycles (draft, verify, accept, read back) beside them; the fit "
        "sees the first, the page compares the second, each cycle at its own acceptance length. Drafts run eagerly, in "
        f"one CUDA graph a step, or in one graph for all. A sparse table ends at {SPARSE_TOKENS[-1]} tokens: passes of "
        "more are extrapolated from it, and the rows that say so leave them out.",
        "",
        *grid(titles, rows, 3),
    ]
    if added:
        titles = ["file", "n", "model: median", "95 % below", "sum: median", "95 % below", "model worse", "by at most"]
        lines += [
            "",
            "Against adding the measured verify time of exactly these tokens and the measured draft time: a model must "
            "not be worse where both are known. *Model worse* counts the cycles whose error is larger by more than "
            f"{100 * WORSE:.1f} points.",
            "",
            *grid(titles, added),
        ]
    for name, words in (
        ("verify", "Verify time by tokens: measured, and predicted from the sparse table"),
        ("drafting", "Cycle time by draft steps, drafts eager and in graphs"),
    ):
        if name in images:
            lines += ["", f"![{words}]({images[name]})"]
            lines += [
                "",
                "Circles are measured, with two standard deviations of one sample as bars; the filled ones are the "
                "sparse table, from which lines and 90 % bands predict the rest; bands are cut at the top."
                if name == "verify"
                else "Points are measured cycles, lines and 90 % bands what the full table predicts.",
            ]
    return lines


def _wide(points: Sequence[HeldOut]) -> list[str]:
    s = summary_of(points)
    if s is None:
        return []
    numbers = [percent(x, 2) for x in (s.median, s.mean, s.p90, s.p95, s.worst)]
    return [f"{s.count}", *numbers, percent(s.inside, 0), percent(s.width)]


def _against_sum(name: str, points: Sequence[HeldOut]) -> list[list[str]]:
    if not points:
        return []
    own, simple = (np.abs(x) for x in ([p.error for p in points], [p.simple_error or 0.0 for p in points]))
    worse = [p for p in points if worse_than_simple(p)]
    numbers = [percent(float(np.quantile(e, q)), 2) for e in (own, simple) for q in (0.5, 0.95)]
    return [[name, f"{len(points)}", *numbers, f"{len(worse)}", percent(max(float((own - simple).max()), 0.0), 2)]]


def communication(
    cals: Sequence[Calibration],
    passes: Sequence[Transfer],
    cycles: Sequence[HeldOut],
    points: Sequence[HeldOut],
    shares: Sequence[AllreduceShare],
    widths: Sequence[OtherWidth],
) -> list[str]:
    """Settings from the table of the default and from their own, all-reduces in verify, other widths.

    `passes` and `cycles` are predicted from the table of the default, `points` from all tables of their file.
    """
    gains = [(c, gain) for c in cals if (gain := settings_gain(c)) is not None]
    if not (passes or cycles or shares or gains):
        return []
    lines = ["## Communication settings"]
    if passes or cycles:
        lines += ["", *_transfers(passes, cycles, [p for p in points if p.task == "full table" and p.mode != EAGER])]
    if shares or gains:
        lines += ["", *_shares(shares, gains)]
    return [*lines, "", *_widths(widths)]


def _quantiles(errors: Sequence[float], limits: Mapping[str, float] | None = None) -> list[str]:
    """Median and 95th percentile without their sign; bold above a limit."""
    if not errors:
        return ["-", "-"]
    found = [float(np.quantile(np.abs(errors), q)) for q in (0.5, 0.95)]
    most = [np.inf, np.inf] if limits is None else [limits["median"], limits["p95"]]
    return [f"**{percent(x, 2)}**" if x > limit else percent(x, 2) for x, limit in zip(found, most, strict=True)]


def _transfers(passes: Sequence[Transfer], cycles: Sequence[HeldOut], own: Sequence[HeldOut]) -> list[str]:
    rows = []
    places = dict.fromkeys([(t.file, t.comm) for t in passes] + [(p.file, p.group) for p in cycles])
    timed = {(t.file, t.comm) for t in passes}  # where one point is all, there is no table of its own
    for file, comm in [*places, ("all", "all")]:
        some = [t for t in passes if (t.file, t.comm) == (file, comm) or file == "all"]
        whole = [p for p in cycles if (p.file, p.group) == (file, comm) or file == "all"]
        here = timed if file == "all" else timed & {(file, comm)}
        tables = [p for p in own if (p.file, p.group) in here]
        inside = percent(float(np.mean([t.inside for t in some])), 0) if some else "-"
        covered = percent(float(np.mean([p.inside() for p in whole])), 0) if whole else "-"
        rows.append(
            [
                file,
                comm,
                f"{len(some)}",
                *_quantiles([t.error for t in some], TRANSFER_AIMS),
                inside,
                *_quantiles([t.error_without_point for t in some]),
                f"{len(whole)}",
                *_quantiles([p.error for p in whole]),
                covered,
                *_quantiles([p.error for p in tables], TABLE_AIMS),
            ]
        )
    rows.sort(key=lambda row: (row[0] == "all", not any("**" in cell for cell in row)))
    titles = ["file", "setting", "passes", "median", "95 % below", "inside", "without the point: median", "95 % below"]
    titles += ["cycles", "median", "95 % below", "inside", "cycles from its own table: median", "95 % below"]
    return [
        "Each setting is predicted from the verify table of `default`, its own all-reduce curve, and one verify pass "
        "of its own (of 4 tokens, or the nearest): verify times of its other passes, and its whole cycles with its "
        "draft times. *Without the point* uses the curves alone: what an all-reduce costs more inside a graph than "
        "alone is then unknown. The last two columns are its cycles from its own verify table. Settings that alone "
        "miss an aim stand first, their figures in bold (passes: median "
        f"{percent(TRANSFER_AIMS['median'])}, 95 % below {percent(TRANSFER_AIMS['p95'])}; cycles from its own table "
        f"{percent(TABLE_AIMS['median'])} and {percent(TABLE_AIMS['p95'])}).",
        "",
        *grid(titles, rows, 2),
    ]


def _shares(shares: Sequence[AllreduceShare], gains: Sequence[tuple[Calibration, tuple[str, int, float]]]) -> list[str]:
    columns = [n for n in SPARSE_TOKENS if any(n in s.shares for s in shares)]
    rows = [
        [s.file, f"{s.width}", s.comm, *(percent(s.shares[n]) if n in s.shares else "-" for n in columns)]
        for s in sorted(shares, key=lambda s: s.width)
        if len(s.shares) > 1
    ]
    titles = ["file", "width", "setting", *(f"{n} token{'s' if n > 1 else ''}" for n in columns)]
    lines = [
        "### All-reduces in the verify pass",
        "",
        "Two all-reduces a layer, each as long as it takes alone, over the time of the verify pass.",
        "",
        *(grid(titles, rows, 3) if rows else ["No all-reduce curve is committed."]),
    ]
    if gains:
        found = []
        for cal, (comm, tokens, gain) in gains:
            telling = [" ".join(c.split()) for c in cal.provenance.caveats if comm in c and "computed" in c]
            width = f"{cal.system.tensor_parallel or cal.system.num_gpus or '-'}"
            change = signed(-gain) if gain > 0.0 else "none is faster"
            found.append([cal.name, width, comm, f"{tokens}", change, telling[0] if telling else "-"])
        lines += [
            "",
            "What the best other setting does to the verify pass, against `default`: the largest difference in each "
            "file. What a setting takes away was at least the share of the all-reduces before.",
            "",
            *grid(["file", "width", "best setting", "tokens", "verify time", "the file says"], found, 3, 1),
        ]
    return lines


def _widths(widths: Sequence[OtherWidth]) -> list[str]:
    lines = ["### All-reduce curves of another width", ""]
    if not widths:
        return [*lines, "Curves of two widths of one machine and setting are not committed: nothing to compare."]
    rows = []
    for w in widths:
        e = np.abs(w.errors)
        bias = signed(float(np.median(w.errors)))
        quantiles = [percent(float(np.quantile(e, q))) for q in (0.5, 0.95)]
        rows.append([w.of, f"{w.of_gpus}", f"{w.from_gpus}", w.comm, f"{len(e)}", *quantiles, bias])
    e = np.abs([x for w in widths for x in w.errors])
    bias = signed(float(np.median([x for w in widths for x in w.errors])))
    quantiles = [percent(float(np.quantile(e, q))) for q in (0.5, 0.95)]
    rows.append(["all", "", "", "", f"{len(e)}", *quantiles, bias])
    return [
        *lines,
        "By the alpha-beta model of a ring from the curve of another number of GPUs, at the sizes that both cover.",
        "",
        *grid(["file", "GPUs", "from GPUs", "setting", "sizes", "median", "95 % below", "median, signed"], rows, 4),
    ]
