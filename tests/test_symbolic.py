"""The derivations equal the numeric code, to 1e-12, and the formulas shown with numbers are those numbers."""

from __future__ import annotations

import runpy
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from specmodel import acceptance, closed_forms, symbolic
from specmodel.cost import CostPoints, CostStructure, cost, parameter_names
from specmodel.explain import explanation
from specmodel.symbolic import symbol, with_numbers
from specmodel.whatif import whatif

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
SEED = cases.committed(cases.SEED)
EXACT = pytest.approx
TOKENS, VARIANCE, SPEEDUP = symbolic.expected_tokens(), symbolic.variance(), symbolic.speedup()
STEPS, BEST = symbolic.best_steps(), symbolic.best_speedup()
ACCEPTANCE = st.floats(0.02, 0.98)
COST = st.floats(0.005, 0.9)
QUICK = settings(max_examples=30, deadline=None)


def value(expression: Any, **numbers: float) -> float:
    """Evaluate with 60 digits, the numbers taken exactly."""
    names = sorted(expression.free_symbols, key=str)
    function = sympy.lambdify(names, expression, "mpmath")
    with mpmath.workdps(60):
        return float(mpmath.re(function(*(mpmath.mpf(numbers[str(name)]) for name in names))))


def near(x: Any) -> Any:
    return pytest.approx(float(x), rel=1e-12, abs=1e-12)


# ------------------------------------------------------------------------------------------------------- tokens
@QUICK
@given(ACCEPTANCE, st.integers(0, 20))
def test_tokens_and_their_variance(alpha: float, num_steps: int) -> None:
    assert value(TOKENS, alpha=alpha, K=num_steps) == near(acceptance.constant_acceptance_length(alpha, num_steps))
    numeric = float(closed_forms.constant_acceptance_variance(alpha, num_steps))
    assert value(VARIANCE, alpha=alpha, K=num_steps) == near(numeric)
    survival = alpha ** np.arange(1, num_steps + 1)
    assert value(VARIANCE, alpha=alpha, K=num_steps) == near(acceptance.acceptance_variance(survival))


@QUICK
@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_tokens_of_a_chain(conditional: list[float]) -> None:
    numbers = {f"beta_{k + 1}": b for k, b in enumerate(conditional)}
    expected = acceptance.acceptance_length(acceptance.survival_from_conditional(conditional))
    assert value(symbolic.chain_tokens(len(conditional)), **numbers) == near(expected)


@QUICK
@given(st.lists(ACCEPTANCE, min_size=3, max_size=3), st.integers(1, 3))
def test_elasticity_of_a_position(conditional: list[float], position: int) -> None:
    """``d ln E / d ln b_k`` is that by the logit over ``1 - b_k``: `log_length_gradient`."""
    _, gradient = acceptance.log_length_gradient(np.array(conditional))
    expected = gradient[3, position - 1] / (1.0 - conditional[position - 1])
    numbers = {f"beta_{k + 1}": b for k, b in enumerate(conditional)}
    assert value(symbolic.acceptance_elasticity(3, position), **numbers) == near(expected)


# ------------------------------------------------------------------------------------------------------- speed, steps
@QUICK
@given(ACCEPTANCE, COST, st.integers(0, 15))
def test_speedup(alpha: float, step_cost: float, num_steps: int) -> None:
    numeric = closed_forms.walltime_factor(alpha, num_steps, step_cost)
    assert value(SPEEDUP, alpha=alpha, c=step_cost, K=num_steps) == near(numeric)


@QUICK
@given(ACCEPTANCE, COST)
def test_the_best_number_of_steps(alpha: float, step_cost: float) -> None:
    steps, best = closed_forms.continuous_best_steps(alpha, step_cost)
    real = value(STEPS, alpha=alpha, c=step_cost)
    if float(steps) == 0.0:
        assert real <= 1e-9  # no positive number of steps helps
        return
    assert real == near(steps)
    assert value(BEST, alpha=alpha, c=step_cost) == near(best)
    # There the derivative of the speedup is 0.
    slope = symbolic.stationarity().subs(
        {symbol("alpha"): sympy.Rational(alpha), symbol("c"): sympy.Rational(step_cost)}
    )
    assert abs(float(sympy.N(slope.subs(symbol("K"), sympy.Float(real, 40)), 40))) < 1e-10


@pytest.mark.parametrize(
    ("alpha", "step_cost", "steps"),
    [
        (0.6, 0.05, 4.065),
        (0.7, 0.05, 5.480),
        (0.8, 0.02, 11.020),
        (0.8, 0.2, 3.904),
        (0.9, 0.1, 9.646),
        (0.5, 0.3, 1.002),
    ],
)
def test_published_optima(alpha: float, step_cost: float, steps: float) -> None:
    assert value(STEPS, alpha=alpha, c=step_cost) == pytest.approx(steps, abs=6e-4)


@QUICK
@given(st.floats(1.001, 1.999))
def test_break_even(ratio: float) -> None:
    for num_steps in (1, 2, None):
        formula = value(symbolic.break_even_acceptance(num_steps), r=ratio)
        steps = np.inf if num_steps is None else num_steps
        assert formula == pytest.approx(float(closed_forms.break_even_acceptance(ratio, steps)), rel=1e-12, abs=1e-12)


@QUICK
@given(st.floats(1.0, 5.0), st.floats(0.01, 1.0), st.floats(5.0, 50.0), st.floats(0.1, 5.0))
def test_the_stopping_rule(tokens: float, survival: float, cycle_ms: float, step_ms: float) -> None:
    numbers = {"N": tokens, "S": survival, "T": cycle_ms, "d": step_ms}
    gain = value(symbolic.step_gain(), **numbers)
    # Two rates that are nearly equal: their difference by fractions, which lose no digit.
    n, s, t, d = (Fraction(x) for x in (tokens, survival, cycle_ms, step_ms))
    assert gain == pytest.approx(float((n + s) / (t + d) - n / t), rel=1e-12, abs=0.0)
    rule = survival / step_ms - tokens / cycle_ms
    if abs(rule) > 1e-9:
        assert (gain > 0.0) == (rule > 0.0)
        stop = closed_forms.first_stop([tokens, tokens + survival], [cycle_ms, cycle_ms + step_ms])
        assert stop == int(gain > 0.0)


# ------------------------------------------------------------------------------------------------------- ceilings
@QUICK
@given(st.floats(0.0, 0.99), st.floats(0.0, 3.0))
def test_ceilings_and_gains(share: float, factor: float) -> None:
    assert value(symbolic.part_ceiling(), s=share) == near(closed_forms.amdahl_ceiling(share))
    assert value(symbolic.partial_gain(), s=share, f=factor) == near(1.0 / (1.0 - share + share * factor))
    assert value(symbolic.acceptance_ceiling(), N=1.0 + share, K=3.0) == near(
        closed_forms.acceptance_ceiling(1.0 + share, 3.0)
    )


@QUICK
@given(st.floats(0.1, 50.0), st.floats(0.01, 20.0), st.floats(0.01, 5.0))
def test_elasticities_are_minus_the_shares(verify: float, draft: float, overhead: float) -> None:
    numbers = {"V": verify, "D": draft, "O": overhead}
    total = verify + draft + overhead
    for name, part in numbers.items():
        formula = symbolic.elasticity(symbolic.throughput(), symbol(name))
        assert value(formula, **numbers) == near(-part / total)
    assert symbolic.elasticity(symbolic.throughput(), symbol("N")) == 1


POINT = {
    "tax": 0.11,
    "rho": 0.4,
    "n_knee": 90.0,
    "token": 0.01,
    "kv": 0.02,
    "kv_multi": 0.3,
    "overhead": 0.05,
    "tree": 0.03,
    "draft_base": 0.02,
    "draft_step": 0.06,
    "sequence": 0.02,
    "width": 0.01,
    "draft_kv": 0.004,
    "comm_base": 0.05,
    "comm_token": 0.006,
    "offset": 0.01,
}


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(3, 1, 4), (5, 4, 9), (1, 2, 3)])
@pytest.mark.parametrize("pass_ms", [2.5, 11.2])
def test_every_named_term_is_that_of_the_model_and_so_is_its_elasticity(
    steps: int, topk: int, tokens: int, pass_ms: float
) -> None:
    """The cycle of `cost.cost` as one formula; its elasticities are the derivatives that the fit uses."""
    batch, context, allreduce_ms = 2.0, 1.5, 0.7
    structure = CostStructure(num_experts=64, experts_per_token=4)
    names = parameter_names(structure.comm_names)
    logs = {
        "log_pass_ms": pass_ms,
        "log_token": POINT["token"],
        "log_knee_tokens": POINT["n_knee"],
        "log_kv": POINT["kv"],
        "log_overhead": POINT["overhead"],
        "log_tree": POINT["tree"],
        "log_draft_base": POINT["draft_base"],
        "log_draft_step": POINT["draft_step"],
        "log_draft_sequence": POINT["sequence"],
        "log_draft_width": POINT["width"],
        "log_draft_kv": POINT["draft_kv"],
        "log_comm_base[default]": POINT["comm_base"],
        "log_comm_token[default]": POINT["comm_token"],
    }
    theta = np.array([np.log(logs[n]) if n in logs else 0.0 for n in names])
    theta[names.index("tax")], theta[names.index("kv_multi")] = POINT["tax"], POINT["kv_multi"]
    theta[names.index("logit_expert_share")] = np.log(POINT["rho"] / (1.0 - POINT["rho"]))
    theta[names.index("logit_overlap")] = -1.0
    theta[names.index("comm_offset[default]")] = POINT["offset"]
    one = np.ones(1)
    points = CostPoints(
        steps=steps * one,
        query_tokens=tokens * one,
        sequences=batch * one,
        context_ratio=context * one,
        comm=np.zeros(1, dtype=np.intp),
        speculating=one,
        topk=topk * one,
        draft_mode=np.zeros(1, dtype=np.intp),
        verify_eager=0.0 * one,
        allreduce_ms=allreduce_ms * one,
        padded_tokens=batch * tokens * one,
    )
    numeric = cost(theta, points, structure, derivatives=True)
    overlap = 1.0 / (1.0 + np.e)
    touched = lambda t: 1.0 - (1.0 - 4.0 / 64.0) ** t  # noqa: E731
    distinct = batch + batch * (tokens - 1) * (1.0 - overlap)
    numbers = {
        **POINT,
        "pass_ms": pass_ms,
        "touched": touched(distinct) / touched(1.0),
        "n": batch * tokens,
        "b": batch,
        "context": context,
        "allreduce_ms": allreduce_ms,
        "K": steps,
        "topk": topk,
        "draft_factor": 1.0,
        "tree": POINT["tree"] if topk > 1 else 0.0,
    }
    terms = symbolic.cycle_terms()
    total = sum(terms.values())
    for name in ("verify", "draft", "overhead"):
        assert value(terms[name], **numbers) == pytest.approx(getattr(numeric, f"{name}_ms")[0], rel=1e-12)
    assert numeric.d_verify is not None
    assert numeric.d_draft is not None
    assert numeric.d_overhead is not None
    slopes = numeric.d_verify[:, 0] + numeric.d_draft[:, 0] + numeric.d_overhead[:, 0]
    cycle_ms = float(numeric.cycle_ms[0])
    for plain_name, parameter in (
        ("token", "log_token"),
        ("kv", "log_kv"),
        ("n_knee", "log_knee_tokens"),
        ("comm_base", "log_comm_base[default]"),
        ("comm_token", "log_comm_token[default]"),
        ("draft_base", "log_draft_base"),
        ("draft_step", "log_draft_step"),
        ("sequence", "log_draft_sequence"),
        ("draft_kv", "log_draft_kv"),
        ("overhead", "log_overhead"),
    ):
        by = symbol(plain_name)
        elasticity = by * sympy.diff(total, by) / total
        assert value(elasticity, **numbers) == pytest.approx(slopes[names.index(parameter)] / cycle_ms, rel=1e-12)


# ------------------------------------------------------------------------------------------------------- reading
def test_numbers_take_the_place_of_symbols() -> None:
    text, latex = with_numbers(symbolic.throughput(), {"B": 1, "N": 1.689, "V": 16.58, "D": 0.36, "O": 1.01})
    assert text == "1000*1*1.689/(0.36 + 1.01 + 16.58)"
    assert eval(text) == pytest.approx(94.1, abs=0.1)
    assert "1.689" in latex
    assert r"\frac" in latex
    left, _ = with_numbers(symbolic.throughput(), {"B": 1})
    assert "N" in left
    assert with_numbers(symbol("x") - symbol("y"), {"x": 1e-9, "y": -2.0})[0] == "1e-09 - (-2)"


@pytest.mark.parametrize("changes", [["draft=0"], ["acceptance+=0.2"], ["verify*=3"], ["acceptance=0"], ["batch=2"]])
def test_an_explanation_evaluates_to_what_it_says(changes: list[str]) -> None:
    result = whatif(SEED, changes)
    formulas = explanation(result)
    assert {"cycle", "tok_s", "break_even", "gain"} <= {f.name for f in formulas}
    for f in formulas:
        *_, numbers, shown = f.text.split(" = ")
        if "LambertW" not in numbers:
            assert eval(numbers.replace("^", "**")) == pytest.approx(float(shown), rel=5e-3, abs=2e-4), f.text
        assert f.value == pytest.approx(float(shown), rel=1e-3)
        assert "nan" not in f.text
    by_name = {f.name: f for f in formulas}
    assert by_name["gain"].value == pytest.approx(result.speedup, rel=1e-12)
    best = result.after.best if result.after.best.num_steps else result.after.speculative
    assert best is not None
    assert by_name["tok_s"].value == pytest.approx(best.tok_s, rel=1e-12)
    assert best.acceptance_length / by_name["break_even"].value == pytest.approx(best.speedup, rel=1e-12)


def test_the_page_of_derivations_holds_the_formulas_of_the_code() -> None:
    page = (Path(__file__).parents[1] / "docs" / "explanation" / "derivations.md").read_text(encoding="utf-8")
    for d in symbolic.derivations():
        assert f"{{#{d.name}}}" not in page
        assert d.title in page
        assert d.latex in page, f"python docs/tables.py --write: {d.name}"
