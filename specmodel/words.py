"""What a calibration gave and what was decided, in words."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specmodel.contradictions import only_falls
from specmodel.findings import findings_of
from specmodel.launch.plan import shell_env, shell_flags
from specmodel.measured import extrapolation
from specmodel.notices import unit_notices
from specmodel.report import chance, change, interval, rate, spans

if TYPE_CHECKING:
    from specmodel.calibration import Calibration, CommSetting, CycleRow
    from specmodel.model import FittedModel
    from specmodel.optimum import Candidate, NextMeasurement, Optimum, Plain
    from specmodel.schedule import ScheduleStep

_CHAINS = re.compile(r"num_steps up to ([0-9][0-9.]*) ")


def setting_name(num_steps: int, topk: int, num_draft_tokens: int) -> str:
    """Name a chain by its steps and a tree by its three numbers; no steps are plain decoding."""
    if num_steps == 0:
        return "plain decoding"
    if topk > 1:
        return f"tree {num_steps}x{topk}x{num_draft_tokens}"
    return "1 step" if num_steps == 1 else f"{num_steps} steps"


def name_of(c: Candidate) -> str:
    """Name a candidate without its communication setting."""
    return setting_name(c.num_steps, c.topk, c.num_draft_tokens)


def counted(count: int, noun: str) -> str:
    """Write a number with its noun: 1 row, 2 rows, 2 passes."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}es" if noun.endswith("s") else f"{count} {noun}s"


def given(cal: Calibration) -> str:
    """Say what a calibration holds, in the order in which it helps."""
    m = cal.measurements
    speeds = [r for r in m.cycles if r.tok_s_at_most is None]
    parts = []
    plain = [r for r in speeds if not r.speculating]
    if plain:
        parts.append(f"plain decoding{_at_batches(plain)}")
    drafted = [r for r in speeds if r.num_steps and r.topk == 1]
    if drafted:
        parts.append(f"cycles of {steps_text(r.num_steps for r in drafted)}{_at_batches(drafted)}")
    trees = {(r.num_steps, r.topk, r.verify_tokens) for r in speeds if r.topk > 1}
    if trees:
        parts.append(counted(len(trees), "draft tree"))
    if any(r.speculating and not r.num_steps for r in speeds):
        parts.append("a cycle with nothing drafted")
    bounds = [r.num_steps for r in m.cycles if r.tok_s_at_most is not None]
    if bounds:
        parts.append(f"upper bounds for {steps_text(bounds)}")
    if m.verify:
        parts.append(f"{counted(len(m.verify), 'verify pass')} of {spans({r.tokens for r in m.verify})} tokens")
    if m.draft:
        parts.append(f"{counted(len(m.draft), 'draft time')} of {steps_text(r.num_steps for r in m.draft)}")
    if m.allreduce:
        parts.append(counted(len(m.allreduce), "all-reduce time"))
    workloads = {a.workload for a in cal.acceptance}
    workloads |= {r.workload for r in m.cycles if r.acceptance_length is not None and r.num_steps}
    if workloads:
        parts.append("acceptance" + (f" of {len(workloads)} workloads" if len(workloads) > 1 else ""))
    return "; ".join(parts) or "nothing that the model can use"


def absent(cal: Calibration) -> str:
    """Name the kinds of measurement that a calibration lacks altogether."""
    m = cal.measurements
    missing = [
        ("plain decoding", any(r.num_steps == 0 and not r.speculating for r in m.cycles)),
        ("a cycle with speculation", any(r.num_steps for r in m.cycles if r.tok_s_at_most is None)),
        ("verify passes", bool(m.verify)),
        ("draft times", bool(m.draft)),
        ("acceptance", bool(cal.acceptance) or any(r.acceptance_length for r in m.cycles if r.num_steps)),
    ]
    return ", ".join(name for name, there in missing if not there)


def steps_text(steps: Iterable[int]) -> str:
    """Write step counts: 1 step, 2 to 5, 7 steps; empty where there are none."""
    text = spans(steps)
    return f"{text} step" if text == "1" else f"{text} steps" if text else ""


def _at_batches(rows: Sequence[CycleRow]) -> str:
    batches = {r.batch for r in rows}
    if len(batches) == 1:
        return "" if batches == {1} else f" at batch {min(batches):g}"
    return f" at {len(batches)} batches from {min(batches):g} to {max(batches):g}"


def setting_lines(c: Candidate, setting: CommSetting | None) -> list[str]:
    """Say how to run a candidate: steps, draft tokens, environment, flags."""
    if c.num_steps == 0:
        lines = ["speculation off"]
    else:
        topk = f", topk {c.topk}" if c.topk > 1 else ""
        lines = [f"{setting_name(c.num_steps, 1, 0)}, {c.num_draft_tokens} draft tokens{topk}"]
    return lines + comm_lines(c.comm, setting)


def comm_lines(name: str, setting: CommSetting | None) -> list[str]:
    """Say what a communication setting is: its environment and flags, by name where it states neither."""
    lines = []
    if setting is not None and setting.env:
        env, left_out = shell_env(setting.env)
        if env:
            lines.append("env " + " ".join(f"{key}={shlex.quote(value)}" for key, value in env.items()))
        lines += left_out
    if setting is not None and setting.flags:
        flags, left_out = shell_flags(setting.flags)
        lines += ["flags " + " ".join(shlex.quote(flag) for flag in flags)] if flags else []
        lines += left_out
    return lines or ([] if name == "default" else [f"communication {name}"])


def warning_items(warnings: Iterable[str], most: int = 6) -> list[tuple[str, str]]:
    """Label warnings, and count what is beyond `most`.

    Those that differ only in their batch are one, and of those on chains beyond the longest measured the farthest.
    """
    every = list(dict.fromkeys(warnings))
    chains = {text: float(found.group(1)) for text in every if (found := _CHAINS.match(text))}
    farthest = max(chains, key=lambda text: chains[text], default="")
    batches: dict[str, list[str]] = {}
    for text in (w for w in every if w not in chains or w == farthest):
        found = re.search(r"\bbatch ([0-9][0-9.]*)", text)
        pattern = text if found is None else f"{text[: found.start(1)]}\0{text[found.end(1) :]}"
        batches.setdefault(pattern, []).append("" if found is None else found.group(1))
    texts = [pattern.replace("\0", ", ".join(dict.fromkeys(given))) for pattern, given in batches.items()]
    items = [("warning", text) for text in texts[:most]]
    return items + ([("warning", f"and {len(texts) - most} more, all of them in --json")] if len(texts) > most else [])


def doubtful_alone(model: FittedModel, best: Candidate) -> str | None:
    """Say which impossible row a choice rests on, where it rests on such rows alone; None where it does not.

    A choice with a speed of its own rests on the rows that state it; any other on the rows of its kind (speculative or
    plain) at its batch and communication setting. One that only tables of passes speak for rests on no cycle.
    """
    cycles = model.calibration.measurements.cycles
    findings = findings_of(model.calibration)
    # Where a speedup cannot be, either of the two rows that it compares may be the wrong one.
    doubtful = {row for finding in findings for row in (finding.row, *finding.doubtful)}
    rows = [
        i
        for i, r in enumerate(cycles)
        if r.tok_s_at_most is None
        and (r.num_steps > 0) == (best.num_steps > 0)
        and r.batch == best.batch
        and r.comm == best.comm
    ]
    shape = (best.num_steps, best.topk, best.num_draft_tokens)
    own = [i for i in rows if (cycles[i].num_steps, cycles[i].topk, cycles[i].verify_tokens) == shape]
    rests_on = own or rows
    if not rests_on or not doubtful.issuperset(rests_on):
        return None
    return next(f.text for f in findings if {f.row, *f.doubtful} & set(rests_on))


def refusal(model: FittedModel, optimum: Optimum, *, extrapolate: bool) -> str | None:
    """Say why the best of an answer is not recommended; None where it is."""
    best = optimum.best
    reasons = [refusal_of(model, best, extrapolate=extrapolate), *unit_notices(model.calibration)]
    if best.num_steps and best.speedup > 1.05 * best.acceptance_length:
        reasons.append(
            f"{name_of(best)} at batch {best.batch:g} would be {best.speedup:.3g} times plain decoding with "
            f"{best.acceptance_length:.3g} tokens a cycle: a cycle would be shorter than a plain step; the acceptance "
            "or plain decoding was measured otherwise than the cycles, or is in another unit (a fraction, not percent)"
        )
    fall = only_falls(model.calibration)
    if fall is not None and best.batch > fall[0]:
        reasons.append(f"batch {best.batch:g}: {fall[1]}")
    return "; ".join(reason for reason in reasons if reason) or None


def refusal_of(model: FittedModel, best: Candidate, *, extrapolate: bool) -> str | None:
    """Say why a candidate that was chosen is not recommended; None where it is."""
    reasons = []
    if best.extrapolated and not extrapolate:
        far = _how_far(model, best)
        reasons.append(f"{name_of(best)} at batch {best.batch:g} is too far from what was measured ({far})")
    if best.topk > 1 and not model.measured.any_tree and not extrapolate:
        reasons.append(f"{name_of(best)} rests on guesses, as no draft tree was measured")
    if (shape := model.measured.only_shape) is not None and not extrapolate:
        reasons.append(
            f"all speeds are of {setting_name(*shape)}, and neither plain decoding nor a pass or a draft alone says "
            "what a step costs: whether another length is faster is a guess; measure plain decoding"
        )
    text = doubtful_alone(model, best)
    if text is not None:
        reasons.append(f"{name_of(best)} rests only on a row that cannot be: {text}")
    return "; ".join(reasons) or None


def _how_far(model: FittedModel, c: Candidate) -> str:
    steps, tokens, batch = (np.array([float(x)]) for x in (c.num_steps, c.num_draft_tokens, c.batch))
    _, warnings = extrapolation(model.measured, model.deployment, steps, tokens, batch)
    return "; ".join(w.removesuffix(": extrapolated").replace("num_steps up to", "num_steps") for w in warnings)


def over_plain(c: Candidate, plain: Plain) -> str:
    """Compare a candidate with plain decoding, and say where that is a prediction itself."""
    gain = c.speedup - 1.0
    text = f"{100 * abs(gain):.1f} % {'above' if gain >= 0 else 'below'} plain decoding"
    return text if plain.measured else f"{text} as predicted ({interval(plain.tok_s_interval)})"


def recommendation(c: Candidate, plain: Plain, *, several_settings: bool) -> str:
    """The answer in one line."""
    where = f" with {c.comm}" if several_settings or c.comm != "default" else ""
    tokens = f" ({c.num_draft_tokens} draft tokens)" if c.num_steps else " (speculation off)"
    gain = f", {over_plain(c, plain)}" if c.num_steps else ""
    return f"{name_of(c)}{tokens}{where}: {rate(c.tok_s)} tok/s, 90 % interval {interval(c.tok_s_interval)}{gain}"


def row_text(row: dict[str, Any]) -> str:
    """Write a row as it stands in a file: {num_steps: 1, batch: 1}."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in row.items()) + "}"


def best_speculative(optimum: Optimum) -> Candidate | None:
    """Return the fastest predicted candidate that drafts and is not extrapolated, if there is one."""
    drafting = [c for c in optimum.table if c.num_steps and not c.extrapolated]
    return max(drafting, key=lambda c: c.tok_s, default=None)


def loss(c: Candidate, best: Candidate) -> str:
    """How much slower a candidate is than the best."""
    return change(c.tok_s / best.tok_s - 1.0)


def ties_text(optimum: Optimum) -> str:
    """Say what has a good chance of being faster than the best, and how sure the best is."""
    best = optimum.best
    regret = f"P(best)\xa0{chance(best.probability_best)}, expected regret {100 * optimum.expected_regret:.1f}\xa0%"
    if not optimum.ties:
        return f"none: nothing else has more than a 25\xa0% chance of being faster; {regret}"
    several = len({c.comm for c in (best, *optimum.ties)}) > 1
    each = "each has" if len(optimum.ties) > 1 else "it has"
    return (
        f"{_tied_names(optimum)}: {each} more than a 25\xa0% chance of being faster than {name_of(best)}"
        f"{' with ' + best.comm if several else ''}; {regret}"
    )


def ties_by_batch(optima: Sequence[Optimum]) -> str:
    """Say at which batches something else has a good chance of being faster, and how sure the least sure choice is."""
    batches: dict[str, list[str]] = {}
    for optimum in optima:
        if optimum.ties:
            batches.setdefault(_tied_names(optimum), []).append(f"{optimum.batch:g}")
    tied = "; ".join(f"{names} at batch {', '.join(at)}" for names, at in batches.items())
    least = max(optima, key=lambda optimum: optimum.expected_regret)
    return (
        f"{tied or 'none'}: {'each with' if tied else 'nothing else has'} more than a 25\xa0% chance of being faster; "
        f"expected regret at most {100 * least.expected_regret:.1f}\xa0%, at batch {least.batch:g}"
    )


def _tied_names(optimum: Optimum) -> str:
    several = len({c.comm for c in (optimum.best, *optimum.ties)}) > 1
    names = []
    for comm in dict.fromkeys(c.comm for c in optimum.ties):
        here = [c for c in optimum.ties if c.comm == comm]
        chains = steps_text(c.num_steps for c in here if c.topk == 1 and c.num_steps)
        kinds = [name_of(c) for c in here if not c.num_steps] + ([chains] if chains else [])
        kinds += [name_of(c) for c in here if c.topk > 1]
        names.append(", ".join(kinds) + (f" with {comm}" if several else ""))
    return "; ".join(names)


def to_win(optimum: Optimum) -> str:
    """Say what speculation lacks where plain decoding is best."""
    c = best_speculative(optimum)
    if c is None:
        return "plain decoding has none"
    lacking = 1.0 - c.tok_s / optimum.best.tok_s
    needed = c.acceptance_length * optimum.best.tok_s / max(c.tok_s, 1e-300)
    return (
        f"plain decoding has none; to draw level, {name_of(c)} with {c.comm} needs a cycle {100 * lacking:.1f}\xa0% "
        f"shorter, or {needed:.2f} tokens a cycle instead of {c.acceptance_length:.2f}"
    )


def schedule_line(step: ScheduleStep) -> str:
    """Write one entry of a schedule: its batches and what to run."""
    return f"{range_text(step)}: {_step_name(step)}"


def range_text(step: ScheduleStep) -> str:
    """Write the batches of a schedule's entry."""
    if step.batch_to is None:
        return "every batch" if step.batch_from <= 1 else f"batch {step.batch_from:g} and more"
    last = f" to {step.batch_to:g}" if step.batch_to > step.batch_from else ""
    return f"batch {step.batch_from:g}{last}"


def _step_name(step: ScheduleStep) -> str:
    if step.num_steps == 0:
        return "plain decoding"
    kind = f"{step.num_steps} step{'s' if step.num_steps > 1 else ''}"
    return f"{kind}, {step.num_draft_tokens} draft tokens" + (f", topk {step.topk}" if step.topk > 1 else "")


def adaptive_lines(optimum: Optimum) -> list[str]:
    """Say what a draft length that adapts could bring; nothing where that is not known."""
    a = optimum.adaptivity
    if a is None:
        return []
    lines = [f"drafting stopped by confidence could bring at most {100 * a.stopping_gain:.0f} %, with a perfect one"]
    if a.workload_gain is not None:
        steps = ", ".join(f"{name} {k}" for name, k in list(a.workload_steps.items())[:6])
        more = len(a.workload_steps) - 6
        steps += f" and {more} more" if more > 0 else ""
        lines.append(f"a step count for each workload ({steps}) would bring {100 * a.workload_gain:.1f} %")
    return lines


def most_wanted(optima: Sequence[Optimum]) -> NextMeasurement | None:
    """Return the measurement that brings most for what it takes, relative to the throughput of its batch."""
    wanted = [
        (o.measure_next.gain_tok_s / o.best.tok_s / o.measure_next.effort, i)
        for i, o in enumerate(optima)
        if o.measure_next is not None
    ]
    return optima[max(wanted)[1]].measure_next if wanted else None


def answer_line(
    model: FittedModel, optima: Sequence[Optimum], steps: Sequence[ScheduleStep], refusals: Sequence[str | None]
) -> str:
    """The recommendation with its interval, or why there is none: one line."""
    several = len(model.calibration.comm_names) > 1
    if len(optima) == 1:
        return _answer_of_one(optima[0], refusals[0], several)
    good = [optimum for optimum, text in zip(optima, refusals, strict=True) if text is None]
    if not good:
        return f"No recommendation for any batch: {refusals[0]}"
    told = [s for s in steps if _believed(s, {o.batch: text is None for o, text in zip(optima, refusals, strict=True)})]
    plan = "; ".join(f"{setting_name(s.num_steps, s.topk, s.num_draft_tokens)} for {range_text(s)}" for s in told)
    comm = f" with {steps[0].comm}" if several else ""
    ends = good[:1] if len(good) == 1 else [good[0], good[-1]]
    speeds = ", ".join(_speed_at(optimum, steps) for optimum in ends)
    bad = [f"{o.batch:g}" for o, text in zip(optima, refusals, strict=True) if text]
    but = f", except at batch {', '.join(bad)} (see declined)" if bad else ""
    return f"Recommendation{but}: {plan}{comm}; {speeds}"


def _believed(step: ScheduleStep, good: Mapping[float, bool]) -> bool:
    """Whether a schedule's entry rests on an answer that is recommended; one between answers, on both of them."""
    last = float("inf") if step.batch_to is None else step.batch_to
    inside = [ok for batch, ok in good.items() if step.batch_from <= batch <= last]
    below = max((batch for batch in good if batch < step.batch_from), default=None)
    above = min((batch for batch in good if batch > last), default=None)
    return any(inside) if inside else all(good[batch] for batch in (below, above) if batch is not None)


def _step_at(batch: float, steps: Sequence[ScheduleStep]) -> ScheduleStep:
    return next(s for s in reversed(steps) if s.batch_from <= batch or s is steps[0])


def _speed_at(optimum: Optimum, steps: Sequence[ScheduleStep]) -> str:
    step = _step_at(optimum.batch, steps)
    shape = (step.num_steps, step.topk, step.num_draft_tokens, step.comm)
    c = next(c for c in optimum.table if (c.num_steps, c.topk, c.num_draft_tokens, c.comm) == shape)
    return f"{rate(c.tok_s)} tok/s (90 % interval {interval(c.tok_s_interval)}) at batch {optimum.batch:g}"


def _answer_of_one(optimum: Optimum, refused: str | None, several: bool) -> str:
    best = optimum.best
    if refused is not None:
        guessed_tree = best.topk > 1 and not best.measured
        inside = [c for c in optimum.table if not c.extrapolated and (c.topk == 1 or not guessed_tree)]
        hint = ""
        if (best.extrapolated or guessed_tree) and inside:
            c = max(inside, key=lambda c: c.tok_s)
            where = "nearer by" if best.extrapolated else "of the chains"
            hint = f"; {where}, {name_of(c)} is best, {rate(c.tok_s)} tok/s ({interval(c.tok_s_interval)})"
        if best.extrapolated or guessed_tree:
            hint += f"; measure {'closer to it' if best.extrapolated else 'it'}, or trust it with --extrapolate"
        return f"No recommendation: {refused}{hint}"
    text = f"Recommendation: {recommendation(best, optimum.plain, several_settings=several)}"
    if best.num_steps == 0:
        second = best_speculative(optimum)
        if second is not None:
            text += f"; the best with speculation, {name_of(second)}, is at {rate(second.tok_s)} ({loss(second, best)})"
    return text
