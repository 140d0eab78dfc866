"""The formulas behind a what-if with the user's numbers in them, from the acceptance to the best number of steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmodel import symbolic
from specmodel.closed_forms import break_even_acceptance, continuous_best_steps
from specmodel.optimum import Candidate
from specmodel.situations import Outcome
from specmodel.whatif import WhatIf

__all__ = ["Formula", "explanation"]

_MOST_SURVIVALS = 8
_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """One formula, in symbols and with numbers."""

    name: str
    title: str
    text: str
    """Plain text: left-hand side, symbols, numbers, value."""
    latex: str
    value: float
    note: str = ""


def explanation(result: WhatIf) -> tuple[Formula, ...]:
    """Explain what is best after the changes; the best that drafts, where that is plain decoding.

    Every value is that of the numbers as the model has them, not of the rounded ones that are shown.

    Parameters
    ----------
    result : WhatIf

    Returns
    -------
    tuple of Formula
        Empty where no candidate drafts.
    """
    after = result.after
    c = after.best if after.best.num_steps else after.speculative
    if c is None:
        return ()
    s = symbolic.symbol
    V, D, O = s("V"), s("D"), s("O")  # noqa: E741
    numbers = {
        "B": c.batch,
        "N": c.acceptance_length,
        "V": c.verify_ms,
        "D": c.draft_ms,
        "O": c.overhead_ms,
        "K": float(c.num_steps),
        "T": c.cycle_ms,
    }
    plain_ms = 1000.0 * c.batch / after.plain_tok_s
    out = [*_tokens(after, c)]
    out.append(_formula("cycle", "time of a cycle, ms", "T", V + D + O, numbers, c.cycle_ms, "verify, draft, overhead"))
    out.append(_formula("tok_s", "tokens per second", "X", symbolic.throughput(), numbers, c.tok_s, "N tokens a cycle"))
    ratio = c.cycle_ms / plain_ms
    needed = "enough" if c.acceptance_length > ratio else "too few"
    out.append(
        _formula(
            "break_even",
            "tokens a cycle needed to break even",
            "r",
            s("T") / s("T0"),
            {**numbers, "T0": plain_ms},
            ratio,
            f"a cycle over a plain step of {plain_ms:.4g} ms; there are {c.acceptance_length:.4g}: {needed}",
        )
    )
    out.append(_gain(result))
    for name, part in (("verify", V), ("draft", D), ("overhead", O)):
        expression = symbolic.elasticity(symbolic.throughput(), part)
        share = getattr(c, f"{name}_ms") / c.cycle_ms
        if share <= 0.0:
            continue
        value = -share
        note = f"1\xa0% more {name} costs {share:.3g}\xa0%"
        out.append(_formula(f"{name}_elasticity", f"elasticity of {name}", "e", expression, numbers, value, note))
        if share < 1.0 - 1e-9:
            title = f"most that {name} could bring at these steps"
            out.append(
                _formula(f"{name}_ceiling", title, "g", symbolic.part_ceiling(), {"s": share}, 1.0 / (1.0 - share), "")
            )
    if c.topk == 1:
        most = (c.num_steps + 1.0) / c.acceptance_length
        title = "most that acceptance could bring at these steps"
        out.append(_formula("acceptance_ceiling", title, "g", symbolic.acceptance_ceiling(), numbers, most, ""))
        out += _next_step(after, c)
        out += _real_steps(after, c)
    return tuple(out)


def _formula(
    name: str, title: str, left: str, expression: Any, numbers: Mapping[str, float], value: float, note: str
) -> Formula:
    symbols, latex = symbolic.with_numbers(expression, {})
    filled, filled_latex = symbolic.with_numbers(expression, numbers, _DIGITS)
    shown = f"{value:.{_DIGITS}g}"
    return Formula(
        name=name,
        title=title,
        text=f"{left} = {symbols} = {filled} = {shown}",
        latex=f"{left} = {latex} = {filled_latex} = {shown}",
        value=float(value),
        note=note,
    )


def _chains(outcome: Outcome, comm: str) -> dict[int, Candidate]:
    return {c.num_steps: c for c in outcome.table if c.comm == comm and c.topk == 1}


def _tokens(outcome: Outcome, c: Candidate) -> list[Formula]:
    """1 for the bonus token, and the survival of each draft."""
    chains = _chains(outcome, c.comm)
    if c.topk > 1 or c.num_steps > _MOST_SURVIVALS or any(k not in chains for k in range(c.num_steps)):
        return []
    survival = {
        f"S_{k}": chains[k].acceptance_length - chains[k - 1].acceptance_length for k in range(1, c.num_steps + 1)
    }
    total = 1 + sum(symbolic.symbol(name) for name in survival)
    note = "the bonus token, and the probability that each draft is reached and accepted"
    return [_formula("tokens", "tokens a cycle", "N", total, survival, c.acceptance_length, note)]


def _gain(result: WhatIf) -> Formula:
    """More tokens a cycle, and a shorter cycle."""
    s = symbolic.symbol
    now, then = result.before.best, result.after.best
    expression = s("N_after") / s("N") * s("T") / s("T_after")
    numbers = {
        "N": now.acceptance_length,
        "N_after": then.acceptance_length,
        "T": now.cycle_ms,
        "T_after": then.cycle_ms,
    }
    value = then.acceptance_length / now.acceptance_length * now.cycle_ms / then.cycle_ms
    if then.batch != now.batch:
        expression = expression * s("B_after") / s("B")
        numbers |= {"B": now.batch, "B_after": then.batch}
        value *= then.batch / now.batch
    return _formula("gain", "what the change brings", "X_after/X", expression, numbers, value, "steps chosen again")


def _next_step(outcome: Outcome, c: Candidate) -> list[Formula]:
    """Whether one step more would pay."""
    following = _chains(outcome, c.comm).get(c.num_steps + 1)
    if following is None or following.cycle_ms <= c.cycle_ms:
        return []
    numbers = {
        "N": c.acceptance_length,
        "S": following.acceptance_length - c.acceptance_length,
        "T": c.cycle_ms,
        "d": following.cycle_ms - c.cycle_ms,
    }
    value = following.acceptance_length / following.cycle_ms - c.acceptance_length / c.cycle_ms
    ratio, reached = numbers["S"] / numbers["d"], c.acceptance_length / c.cycle_ms
    verb = "pays" if value > 0.0 else "does not pay"
    note = (
        f"one step more {verb}: it would bring S/d = {ratio:.3g} tokens per ms of its own time, and N/T = "
        f"{reached:.3g} are reached already"
    )
    return [
        _formula(
            "next_step", "what one step more brings, tokens per ms", "gain", symbolic.step_gain(), numbers, value, note
        )
    ]


def _real_steps(outcome: Outcome, c: Candidate) -> list[Formula]:
    """The best real number of steps by the law of one acceptance and a cycle that grows linearly."""
    chains = _chains(outcome, c.comm)
    last = max(c.num_steps + 1, 3)
    if any(k not in chains for k in range(1, last + 1)):
        return []
    alpha = float(break_even_acceptance(c.acceptance_length, c.num_steps))
    steps = np.arange(1, last + 1)
    slope, fixed_ms = np.polyfit(steps, [chains[int(k)].cycle_ms for k in steps], 1)
    cost = float(slope / fixed_ms) if fixed_ms > 0.0 else 0.0
    best = float(continuous_best_steps(alpha, cost)[0]) if 0.0 < alpha < 1.0 and 0.0 < cost < 1.0 else np.inf
    if not np.isfinite(best) or best <= 0.0:
        return []
    note = (
        f"the law of one acceptance (alpha = {alpha:.3g}, the same tokens) and a cycle that grows by c = {cost:.3g} of "
        f"its fixed part a step, fitted to 1 to {last} steps; the model, which needs neither, chose {c.num_steps}"
    )
    numbers = {"alpha": alpha, "c": cost}
    return [_formula("best_steps", "best number of steps", "K", symbolic.best_steps(), numbers, best, note)]
