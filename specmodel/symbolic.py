"""The derivations, by computer algebra: what the numeric code computes, as formulas that can be read and checked.

Every function derives its result from the definitions (sums, ratios, derivatives); tests hold them equal to the numeric
code. sympy is imported inside: only who asks for a formula pays for it.

Symbols: `alpha` acceptance of every draft, `K` steps, `c` the time of one more step over the rest of the cycle, `r` the
cycle over the plain step, `S` survival, `beta_k` conditional acceptance, `V`, `D`, `O` verify, draft and overhead, `T`
their sum, `B` batch, `s` the share of a part in the cycle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Derivation",
    "acceptance_ceiling",
    "acceptance_elasticity",
    "best_speedup",
    "best_steps",
    "break_even_acceptance",
    "chain_tokens",
    "cycle_terms",
    "derivations",
    "elasticity",
    "expected_tokens",
    "part_ceiling",
    "partial_gain",
    "speedup",
    "stationarity",
    "step_gain",
    "symbol",
    "throughput",
    "variance",
    "with_numbers",
]

Expression = Any  # a sympy expression: importing its type would import sympy


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """One result: what it says, and its formula."""

    name: str
    title: str
    words: str
    left: str
    """Left-hand side of the formula, as LaTeX."""
    expression: Expression

    @property
    def latex(self) -> str:
        """The formula as LaTeX."""
        import sympy

        return f"{self.left} = {sympy.latex(self.expression)}"


def symbol(name: str) -> Expression:
    """Return a positive symbol."""
    import sympy

    return sympy.Symbol(name, positive=True)


# ------------------------------------------------------------------------------------------------------- tokens
def _power_sum(weight: Expression, index: Expression) -> Expression:
    """Sum of ``weight(k) alpha^k`` over k = 0..K, for alpha other than 1."""
    import sympy

    total = sympy.summation(weight * symbol("alpha") ** index, (index, 0, symbol("K")))
    return total.replace(lambda e: isinstance(e, sympy.Piecewise), lambda e: e.args[-1][0])


def expected_tokens() -> Expression:
    """Tokens a cycle under one acceptance: ``E[N] = sum_k P(N > k) = sum_k alpha^k``, k = 0..K.

    Equal to `acceptance.constant_acceptance_length` (Leviathan et al. 2023, arXiv 2211.17192, equation 1).
    """
    import sympy

    return _power_sum(sympy.Integer(1), sympy.Symbol("k", integer=True))


def variance() -> Expression:
    """Variance of the tokens a cycle: ``sum_k (2k + 1) alpha^k - E[N]^2``.

    Equal to `closed_forms.constant_acceptance_variance`.
    """
    import sympy

    k = sympy.Symbol("k", integer=True)
    return sympy.factor(sympy.simplify(_power_sum(2 * k + 1, k) - expected_tokens() ** 2))


def chain_tokens(num_steps: int) -> Expression:
    """Tokens a cycle of a chain with a conditional acceptance of its own at each position: ``1 + b_1 + b_1 b_2 + ...``.

    Equal to `acceptance.acceptance_length` of the running product.
    """
    import sympy

    total, survival = sympy.Integer(1), sympy.Integer(1)
    for k in range(1, num_steps + 1):
        survival = survival * symbol(f"beta_{k}")
        total = total + survival
    return total


# ------------------------------------------------------------------------------------------------------- speed
def throughput() -> Expression:
    """tok/s of the batch: ``1000 B E[N] / (V + D + O)``, times in ms; the equation of `FittedModel.predict`."""
    B, N, V, D, O = (symbol(name) for name in ("B", "N", "V", "D", "O"))  # noqa: E741
    return 1000 * B * N / (V + D + O)


def speedup() -> Expression:
    """Over plain decoding, one acceptance and linear cost: ``E[N] / (1 + c K)``; `closed_forms.walltime_factor`."""
    return expected_tokens() / (1 + symbol("c") * symbol("K"))


def break_even_acceptance(num_steps: int | None) -> Expression:
    """Acceptance at which the tokens equal the cycle over the plain step, r: 1 or 2 steps, or endless ones (None).

    Longer chains have no closed form; `closed_forms.break_even_acceptance` finds them by bisection.
    """
    import sympy

    alpha, r = symbol("alpha"), symbol("r")
    tokens = 1 / (1 - alpha) if num_steps is None else sum(alpha**k for k in range(num_steps + 1))
    roots = sympy.solve(sympy.Eq(tokens, r), alpha)
    # Of the roots the one that rises from 0 at r = 1.
    return next(root for root in roots if sympy.simplify(root.subs(r, 1)) == 0)


# ------------------------------------------------------------------------------------------------------- steps
def stationarity() -> Expression:
    """Return what is 0 at the real number of steps that is best: the numerator of the derivative of `speedup` by K."""
    import sympy

    return sympy.numer(sympy.together(sympy.diff(speedup(), symbol("K"))))


def best_steps() -> Expression:
    """Real K that maximises `speedup`, by the Lambert W function (its lower branch).

    Equal to `closed_forms.continuous_best_steps`. With ``L = -ln alpha`` the stationarity reads
    ``y - ln y = 1 + L (1 - c) / c`` for ``y = 1 + L (K + 1 / c)``, so ``-y exp(-y) = -exp(-1 - L (1 - c) / c)`` and y
    is minus W of the right-hand side.
    """
    import sympy

    alpha, c = symbol("alpha"), symbol("c")
    log = -sympy.log(alpha)
    y = -sympy.LambertW(-sympy.exp(-1 - log * (1 - c) / c), -1)
    return (y - 1) / log - 1 / c


def best_speedup() -> Expression:
    """Speedup at `best_steps`: ``L / (c (1 - alpha) y)`` with ``alpha^(K + 1) = 1 / y``."""
    import sympy

    alpha, c = symbol("alpha"), symbol("c")
    log = -sympy.log(alpha)
    y = -sympy.LambertW(-sympy.exp(-1 - log * (1 - c) / c), -1)
    return log / (c * (1 - alpha) * y)


def step_gain() -> Expression:
    """Change of tokens over time by one step more: ``(E + S) / (T + d) - E / T``, factored; the stopping rule.

    Its sign is that of ``S / d - E / T``: a step more pays while its survival over its time is above the ratio that is
    reached (`closed_forms.first_stop`).
    """
    import sympy

    N, S, T, d = (symbol(name) for name in ("N", "S", "T", "d"))
    return sympy.factor((N + S) / (T + d) - N / T)


# ------------------------------------------------------------------------------------------------------- ceilings
def elasticity(of: Expression, by: Expression) -> Expression:
    """Relative change of one quantity by that of another: ``d ln f / d ln x``."""
    import sympy

    return sympy.simplify(by * sympy.diff(of, by) / of)


def partial_gain() -> Expression:
    """Gain when a part of share s takes f of its time: the ratio of the two cycles, ``1 / (1 - s + s f)``."""
    import sympy

    T, s, f = (symbol(name) for name in ("T", "s", "f"))
    return sympy.simplify(T / (T - s * T + f * s * T))


def part_ceiling() -> Expression:
    """Most that a part of share s can bring at kept steps: `partial_gain` at f = 0 (Amdahl 1967); `amdahl_ceiling`."""
    return partial_gain().subs(symbol("f"), 0)


def acceptance_ceiling() -> Expression:
    """Most that acceptance can bring at kept steps: the tokens as alpha goes to 1, over those there are."""
    import sympy

    alpha = symbol("alpha")
    return sympy.limit(expected_tokens(), alpha, 1) / symbol("N")


def acceptance_elasticity(num_steps: int, position: int) -> Expression:
    """Relative change of a chain's tokens by that of the acceptance at one position: ``(S_k + ... + S_K) / E[N]``."""
    import sympy

    tokens, by = chain_tokens(num_steps), symbol(f"beta_{position}")
    return sympy.expand(by * sympy.diff(tokens, by)) / tokens


def cycle_terms() -> dict[str, Expression]:
    """The cycle of the model in its named terms, ms: those of `cost.cost`, in its parameters.

    Symbols: `pass_ms`, `tax`, `rho`, `touched` (experts touched over those of the reference pass), `n_knee`, `token`,
    `n` (tokens of the pass), `kv`, `b` (sequences), `context` (over the reference), `kv_multi`, `comm_base`,
    `comm_token`, `offset`, `allreduce_ms`, `draft_base`, `draft_step`, `K`, `sequence`, `width`, `topk`, `draft_kv`,
    `draft_factor`, `overhead`, `tree`.
    """
    import sympy

    p = symbol
    dense = (1 - p("rho")) * sympy.exp(p("tax"))
    weights = dense + p("rho") * p("touched")
    roof = (weights**4 + (p("n") / p("n_knee")) ** 4) ** sympy.Rational(1, 4)
    kv = p("kv") * p("b") * p("context") * sympy.exp(p("kv_multi"))
    shares = p("token") * (p("n") - 1) + kv + p("comm_base") + p("comm_token") * (p("n") - 1) + p("offset")
    per_step = 1 + p("sequence") * (p("b") - 1) + p("width") * p("b") * (p("topk") - 1)
    per_step = per_step + p("draft_kv") * p("b") * p("context")
    return {
        "verify": p("pass_ms") * (roof + shares) + p("allreduce_ms"),
        "draft": p("pass_ms") * p("draft_factor") * (p("draft_base") + p("draft_step") * p("K") * per_step),
        "overhead": p("pass_ms") * (p("overhead") + p("tree")),
    }


# ------------------------------------------------------------------------------------------------------- reading
def with_numbers(expression: Expression, values: Mapping[str, float], digits: int = 4) -> tuple[str, str]:
    """Return a formula with numbers in place of its symbols, nothing computed: plain text and LaTeX.

    Parameters
    ----------
    expression : sympy expression
    values : mapping of symbol name to number
        Symbols that are not named stay.
    digits : int
        Significant digits of a number.
    """
    from sympy.printing.latex import LatexPrinter
    from sympy.printing.str import StrPrinter

    texts = {name: f"{value:.{digits}g}" for name, value in values.items()}
    wrapped = {name: f"({text})" if text.startswith("-") else text for name, text in texts.items()}

    class Plain(StrPrinter):  # type: ignore[misc]
        def _print_Symbol(self, expr: Any) -> str:  # noqa: N802
            return wrapped.get(str(expr.name), str(expr.name))

    class Tex(LatexPrinter):  # type: ignore[misc]
        def _print_Symbol(self, expr: Any, style: str = "plain") -> str:  # noqa: N802
            if expr.name in wrapped:
                return f"{{{_exponent(wrapped[expr.name])}}}"
            shown: str = super()._print_Symbol(expr, style)
            return shown

    plain = Plain({"order": "none"}).doprint(expression).replace("**", "^")
    return str(plain), str(Tex({"order": "none", "mul_symbol": "dot"}).doprint(expression))


def _exponent(text: str) -> str:
    """1e-05 as LaTeX writes it."""
    mantissa, e, power = text.partition("e")
    return rf"{mantissa} \cdot 10^{{{int(power.rstrip(')'))}}}" if e else text


def derivations() -> tuple[Derivation, ...]:
    """Every result, in the order in which one follows from the other."""
    return (
        _of("expected-tokens", "Tokens of a cycle", expected_tokens(), r"E[N]", "one acceptance for every draft"),
        _of(
            "chain-tokens",
            "Tokens of a chain of three steps",
            chain_tokens(3),
            r"E[N]",
            "an acceptance at each position",
        ),
        _of("variance", "Variance of the tokens of a cycle", variance(), r"\mathrm{Var}[N]", "one acceptance"),
        _of("throughput", "Throughput", throughput(), r"X", "times in ms, X in tokens per second"),
        _of("speedup", "Speedup over plain decoding", speedup(), r"R(K)", "a cycle of 1 + c K plain steps"),
        _of(
            "break-even-1",
            "Break-even of one step",
            break_even_acceptance(1),
            r"\alpha",
            "acceptance needed at one step",
        ),
        _of("break-even-2", "Break-even of two steps", break_even_acceptance(2), r"\alpha", "acceptance needed at two"),
        _of("break-even", "Break-even of any chain", break_even_acceptance(None), r"\alpha", "less is never enough"),
        _of("stationarity", "Where the best number of steps lies", stationarity(), "0", "derivative of the speedup"),
        _of("best-steps", "The best number of steps", best_steps(), r"K^*", "W is Lambert's function"),
        _of("best-speedup", "The speedup there", best_speedup(), r"R(K^*)", "the same"),
        _of("step-gain", "What one step more brings", step_gain(), r"\Delta R", "S its survival, d its time"),
        _of(
            "partial-gain",
            "What a faster part brings",
            partial_gain(),
            r"X'/X",
            "share s of the cycle takes f of its time",
        ),
        _of("part-ceiling", "Ceiling of a part", part_ceiling(), r"X'/X", "the part costs nothing any more"),
        _of("acceptance-ceiling", "Ceiling of acceptance", acceptance_ceiling(), r"X'/X", "every draft is accepted"),
        _of(
            "verify-elasticity",
            "Elasticity of verify",
            elasticity(throughput(), symbol("V")),
            r"\varepsilon_V",
            "minus its share",
        ),
        _of(
            "draft-elasticity",
            "Elasticity of draft",
            elasticity(throughput(), symbol("D")),
            r"\varepsilon_D",
            "minus its share",
        ),
        _of(
            "overhead-elasticity",
            "Elasticity of overhead",
            elasticity(throughput(), symbol("O")),
            r"\varepsilon_O",
            "minus its share",
        ),
        _of(
            "length-elasticity",
            "Elasticity of the acceptance length",
            elasticity(throughput(), symbol("N")),
            r"\varepsilon_N",
            "one percent longer is one percent faster",
        ),
        _of(
            "position-elasticity",
            "Elasticity of the first position of three",
            acceptance_elasticity(3, 1),
            r"\varepsilon_{\beta_1}",
            "the first position matters most",
        ),
    )


def _of(name: str, title: str, expression: Expression, left: str, words: str) -> Derivation:
    return Derivation(name=name, title=title, words=words, left=left, expression=expression)
