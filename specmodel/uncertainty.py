"""Closed results on uncertainty: how tokens and prompts vary, what counts say, what a measurement is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, betaln, ndtr, ndtri

from specmodel.acceptance import SurvivalEstimate, acceptance_length, constant_acceptance_length
from specmodel.adaptive import beta_nodes
from specmodel.closed_forms import broadcast_floats, constant_acceptance_variance

__all__ = [
    "ModulatedAcceptance",
    "beta_length",
    "beta_pooled_survival",
    "beta_survival",
    "binomial_interval",
    "censored_acceptance",
    "corrected_aic",
    "cycles_for_precision",
    "cycles_variance",
    "d_optimal_weights",
    "effective_sample_size",
    "expected_excess",
    "jeffreys_length",
    "knowledge_gradient",
    "latency_cv",
    "leave_one_out_errors",
    "modulated_acceptance",
    "ocba_shares",
    "perfect_information",
    "prediction_variance",
    "product_limit",
    "ratio_sd",
    "slowest_of_batch",
]

Array = NDArray[np.float64]


# ----------------------------------------------------------------------------------------------------------- renewal
def cycles_variance(num_tokens: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> Array:
    """Variance of the cycles that `num_tokens` tokens take: ``L v / m^3`` (Smith 1955), for many tokens."""
    L, m, v = broadcast_floats(num_tokens, mean, variance)
    return np.asarray(L * v / m**3)


def latency_cv(num_tokens: ArrayLike, mean: ArrayLike, variance: ArrayLike) -> Array:
    """Coefficient of variation of the time of `num_tokens` tokens at a fixed cycle time: ``sqrt(v / (m L))``."""
    L, m, v = broadcast_floats(num_tokens, mean, variance)
    return np.asarray(np.sqrt(v / (m * L)))


def cycles_for_precision(mean: ArrayLike, variance: ArrayLike, relative: float, level: float = 0.95) -> Array:
    """Independent cycles after which the acceptance length is known to ``+- relative`` at `level`.

    ``(z sd / (relative m))^2``; multiply by the design effect of few prompts (`acceptance.design_effect`).
    """
    m, v = broadcast_floats(mean, variance)
    return np.asarray(v * (ndtri(0.5 + level / 2.0) / (relative * m)) ** 2)


def slowest_of_batch(mean: ArrayLike, sd: ArrayLike, batch: ArrayLike) -> Array:
    """Upper bound of the expected largest of B normal variables: ``m + sd sqrt(2 ln B)``; loose for small B.

    The cycles of a batch whose sequences all emit the same number of tokens and which ends with the last of them.
    """
    m, s, B = broadcast_floats(mean, sd, batch)
    return np.asarray(m + s * np.sqrt(2.0 * np.log(B)))


def effective_sample_size(samples: ArrayLike, correlation: ArrayLike) -> Array:
    """Independent samples worth as much as n samples of an AR(1) process: ``n (1 - r) / (1 + r)``."""
    n, r = broadcast_floats(samples, correlation)
    return np.asarray(n * (1.0 - r) / (1.0 + r))


# ---------------------------------------------------------------------------------------- acceptance that differs
def beta_survival(a: float, b: float, num_steps: int) -> Array:
    """Survival of cycles whose acceptance is Beta(a, b) distributed: ``S_k = B(a + k, b) / B(a, b)``.

    Its conditionals ``(a + k - 1) / (a + b + k - 1)`` rise: what survives is the easy part (Jensen's inequality).
    """
    k = np.arange(1, num_steps + 1)
    return np.asarray(np.exp(betaln(a + k, b) - betaln(a, b)))


def beta_pooled_survival(a: float, b: float, num_steps: int, measured_steps: int) -> Array:
    """Survival pooled over cycles of Beta(a, b) prompts that emit equally many tokens with K = `measured_steps`.

    A prompt contributes cycles in proportion to one over its acceptance length at that K, so the pooled curve depends
    on the K it was measured at.
    """
    alpha, weight = beta_nodes(a, b)
    weight = weight / constant_acceptance_length(alpha, measured_steps)
    return np.asarray((weight / weight.sum()) @ alpha[:, None] ** np.arange(1, num_steps + 1))


def beta_length(a: float, b: float, num_steps: int) -> float:
    """Return the acceptance length over Beta(a, b) prompts that emit equally many tokens: ``1 / E[1 / E[N_K]]``."""
    alpha, weight = beta_nodes(a, b)
    return float(1.0 / (weight @ (1.0 / constant_acceptance_length(alpha, num_steps))))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulatedAcceptance:
    """Moments of the tokens a cycle where the acceptance wanders between states from cycle to cycle."""

    length: float
    variance: float
    """Of one cycle."""
    long_run_variance: float
    """Of the mean of n cycles, times n, for large n."""
    lag_one: float
    """Correlation of the tokens of neighbouring cycles."""

    @property
    def inflation(self) -> float:
        """Long-run over marginal variance: the design effect of the order in time."""
        return self.long_run_variance / self.variance


def modulated_acceptance(alpha: ArrayLike, stay: float, num_steps: int) -> ModulatedAcceptance:
    """Moments where the acceptance of a cycle follows a symmetric Markov chain over equally likely states.

    With probability `stay` the state is kept, else each other state is as likely. The chain's correlation is
    ``r = (m stay - 1) / (m - 1)``, and the long-run variance ``within + between (1 + r) / (1 - r)``.

    Parameters
    ----------
    alpha : array_like, shape (m,), m >= 2
        Acceptance in each state.
    stay : float
        Within [0, 1).
    num_steps : int
        K.
    """
    a = np.asarray(alpha, dtype=float)
    length = constant_acceptance_length(a, num_steps)
    within = float(np.mean(constant_acceptance_variance(a, num_steps)))
    between = float(np.var(length))
    r = (len(a) * stay - 1.0) / (len(a) - 1.0)
    return ModulatedAcceptance(
        length=float(np.mean(length)),
        variance=within + between,
        long_run_variance=within + between * (1.0 + r) / (1.0 - r),
        lag_one=between * r / (within + between),
    )


# ------------------------------------------------------------------------------------------------------- estimation
def product_limit(accepted: ArrayLike, num_steps: ArrayLike) -> SurvivalEstimate:
    """Survival from cycles of different length, where the drafts of a cycle are accepted or cut off at its K.

    Kaplan and Meier's estimate (1958) with Greenwood's variance: position k is judged by the cycles that accepted
    k - 1 and drafted k. The length is that of a cycle which drafts to the longest K seen.

    Parameters
    ----------
    accepted, num_steps : array_like of int, shape (cycles,)
        Accepted drafts of each cycle and how many it drafted.
    """
    n, K = np.broadcast_arrays(np.asarray(accepted, dtype=np.int64), np.asarray(num_steps, dtype=np.int64))
    k = np.arange(1, int(K.max()) + 1)[:, None]
    at_risk = np.sum((n >= k - 1) & (k <= K), axis=1).astype(float)
    hits = np.sum((n >= k) & (k <= K), axis=1).astype(float)
    conditional = np.divide(hits, at_risk, out=np.zeros(len(at_risk)), where=at_risk > 0)
    survival = np.cumprod(conditional)
    # Where nothing survives, neither does its variance.
    terms = np.divide(1.0 - conditional, conditional * at_risk, out=np.zeros(len(hits)), where=hits > 0)
    greenwood = np.cumsum(terms)
    earlier = np.minimum.outer(np.arange(len(k)), np.arange(len(k)))
    covariance = np.outer(survival, survival) * greenwood[earlier]
    return SurvivalEstimate(
        conditional=conditional,
        survival=survival,
        survival_sd=survival * np.sqrt(greenwood),
        length=float(acceptance_length(survival)),
        length_sd=float(np.sqrt(covariance.sum())),
    )


def censored_acceptance(accepted: float, rejected: float) -> tuple[float, float]:
    """Maximum-likelihood constant acceptance and its standard error.

    Accepted drafts over accepted and rejected ones; a cycle that accepts all it drafted has no rejection, and what
    was drafted after one was never judged.

    Parameters
    ----------
    accepted : float
        Accepted drafts in all.
    rejected : float
        Cycles that accepted fewer than they drafted.
    """
    judged = accepted + rejected
    alpha = accepted / judged
    return alpha, float(np.sqrt(alpha * (1.0 - alpha) / judged))


def jeffreys_length(hits: ArrayLike, judged: ArrayLike) -> tuple[float, float]:
    """Posterior mean and standard deviation of the acceptance length under Jeffreys' prior of each conditional.

    The conditionals are independent Beta(1/2 + hits, 1/2 + misses), since the counts are nested, so the moments of
    their products are products of moments.

    Parameters
    ----------
    hits, judged : array_like, shape (K,)
        Accepted drafts at each position, of how many that the positions before accepted.
    """
    a = 0.5 + np.asarray(hits, dtype=float)
    total = np.asarray(judged, dtype=float) + 1.0
    first = np.cumprod(a / total)
    ratio = (a + 1.0) / (total + 1.0)  # E[x^2] / E[x] of a Beta(a, total - a)
    # E[S_j S_k], j <= k, is the product of second moments up to j and of first moments from j + 1 to k.
    second = np.outer(np.cumprod(ratio), first)
    joint = np.triu(second) + np.triu(second, 1).T
    return float(acceptance_length(first)), float(np.sqrt(np.sum(joint - np.outer(first, first))))


def binomial_interval(
    hits: ArrayLike,
    trials: ArrayLike,
    level: float = 0.95,
    method: Literal["clopper-pearson", "wilson", "jeffreys"] = "wilson",
) -> tuple[Array, Array]:
    """Confidence interval of a proportion (Brown, Cai and DasGupta 2001, Statistical Science 16).

    Parameters
    ----------
    hits, trials : array_like
        Successes of how many.
    level : float
        Nominal coverage.
    method : str
        ``clopper-pearson`` never covers less than `level`; ``wilson`` and ``jeffreys`` cover it on average.

    Returns
    -------
    low, high : numpy.ndarray
        0 and 1 at the ends for no hits and no misses (Wilson's ends are so by themselves).
    """
    x, n = broadcast_floats(hits, trials)
    tail = (1.0 - level) / 2.0
    if method == "wilson":
        z = float(ndtri(1.0 - tail))
        centre = (x + z * z / 2.0) / (n + z * z)
        half = z / (n + z * z) * np.sqrt(x * (n - x) / n + z * z / 4.0)
        low, high = centre - half, centre + half
    else:
        shift = 0.5 if method == "jeffreys" else 0.0
        one = 0.5 if method == "jeffreys" else 1.0
        low = betaincinv(np.maximum(x + shift, 1e-300), n - x + one, tail)
        high = betaincinv(x + one, np.maximum(n - x + shift, 1e-300), 1.0 - tail)
    return np.asarray(np.where(x <= 0, 0.0, low)), np.asarray(np.where(x >= n, 1.0, high))


def ratio_sd(mean: tuple[float, float], sd: tuple[float, float], correlation: float = 0.0) -> tuple[float, float]:
    """Value and standard deviation of ``A / C`` by the delta method, for numerator and denominator in turn.

    ``Var(ln A/C) = Var(A)/A^2 + Var(C)/C^2 - 2 Cov(A, C) / (A C)``.
    """
    ratio = mean[0] / mean[1]
    a, c = sd[0] / mean[0], sd[1] / mean[1]
    return ratio, float(abs(ratio) * np.sqrt((a - c) ** 2 + 2.0 * (1.0 - correlation) * a * c))


def corrected_aic(residual_sum: ArrayLike, observations: ArrayLike, parameters: ArrayLike) -> Array:
    """Akaike's criterion for few observations: ``n ln(RSS / n) + 2 k + 2 k (k + 1) / (n - k - 1)``.

    k counts the noise variance too; infinite where ``n <= k + 1`` (Hurvich and Tsai 1989, Biometrika 76).
    """
    rss, n, k = broadcast_floats(residual_sum, observations, parameters)
    left = np.maximum(n - k - 1.0, 0.0)
    with np.errstate(divide="ignore"):
        return np.asarray(n * np.log(rss / n) + 2.0 * k + 2.0 * k * (k + 1.0) / left)


def leave_one_out_errors(design: ArrayLike, values: ArrayLike) -> Array:
    """Errors of least squares at each row when that row is left out: ``e_i / (1 - h_ii)``, h the hat matrix.

    Parameters
    ----------
    design : array_like, shape (n, p)
        Of full column rank also without any one row.
    values : array_like, shape (n,)
    """
    q, _ = np.linalg.qr(np.asarray(design, dtype=float))
    y = np.asarray(values, dtype=float)
    return np.asarray((y - q @ (q.T @ y)) / (1.0 - np.sum(q * q, axis=1)))


# ------------------------------------------------------------------------------------------------- what to measure
def prediction_variance(features: ArrayLike, weights: ArrayLike) -> Array:
    """Variance of the prediction at every candidate under a design, in units of the noise over the sample size.

    Parameters
    ----------
    features : array_like, shape (candidates, p)
        Regressors of each candidate.
    weights : array_like, shape (candidates,)
        Share of the measurements that each gets.
    """
    x, w = np.asarray(features, dtype=float), np.asarray(weights, dtype=float)
    information = (x * w[:, None]).T @ x
    return np.asarray(np.einsum("ij,ij->i", x, np.linalg.solve(information, x.T).T))


def d_optimal_weights(features: ArrayLike, tolerance: float = 1e-6) -> Array:
    """Shares of the measurements that say most about a linear model: the D-optimal design over candidates.

    Multiplicative algorithm of Titterington (Silvey, Titterington and Torsney 1978), ended when no candidate's
    prediction variance exceeds p by more than `tolerance` (the equivalence theorem of Kiefer and Wolfowitz 1960).
    """
    x = np.asarray(features, dtype=float)
    p = x.shape[1]
    weights = np.full(len(x), 1.0 / len(x))
    variance = prediction_variance(x, weights)
    while variance.max() > p * (1.0 + tolerance):
        weights = weights * variance / p
        variance = prediction_variance(x, weights)
    return np.asarray(weights / weights.sum())


def expected_excess(z: ArrayLike) -> Array:
    """``f(z) = z Phi(z) + phi(z)``: expected excess over 0 of a normal variable with mean z and sd 1."""
    x = np.asarray(z, dtype=float)
    return np.asarray(x * ndtr(x) + np.exp(-0.5 * x * x) / np.sqrt(2.0 * np.pi))


def knowledge_gradient(mean: ArrayLike, sd: ArrayLike, noise_sd: ArrayLike) -> Array:
    """Return the expected rise of the best mean by one more noisy measurement of each independent alternative.

    ``s_i f(-|m_i - max_{j != i} m_j| / s_i)`` with ``s_i = sd_i^2 / sqrt(sd_i^2 + noise_i^2)`` (Frazier, Powell and
    Dayanik 2008, SIAM Journal on Control and Optimization 47).
    """
    m, s, noise = broadcast_floats(mean, sd, noise_sd)
    others = np.array([np.max(np.delete(m, i)) for i in range(len(m))])
    total = np.hypot(s, noise)
    spread = np.divide(s * s, total, out=np.zeros(m.shape), where=total > 0)
    z = np.divide(-np.abs(m - others), spread, out=np.full(m.shape, -1e3), where=spread > 0)
    return np.asarray(spread * expected_excess(np.maximum(z, -1e3)))


def perfect_information(mean: ArrayLike, sd: ArrayLike, points: int = 4001) -> tuple[float, Array]:
    """Value of knowing independent normal alternatives exactly before choosing, and P(best) of each.

    ``E[max] - max E`` (Howard 1966) by quadrature; for two it is ``s f(-|m_1 - m_2| / s)``, ``s^2 = sd_1^2 + sd_2^2``.

    Parameters
    ----------
    mean, sd : array_like, shape (alternatives,)
        The sds above 0, and of one order of magnitude.
    points : int
        Nodes of the quadrature for each alternative.
    """
    m, s = broadcast_floats(mean, sd)
    z = np.linspace(-9.0, 9.0, points)
    density = np.exp(-0.5 * z * z)
    density /= density.sum()
    value, best = 0.0, np.zeros(len(m))
    for i in range(len(m)):
        x = m[i] + s[i] * z
        others = np.delete(np.arange(len(m)), i)
        win = density * np.prod(ndtr((x[:, None] - m[others]) / s[others]), axis=1)
        best[i] = win.sum()
        value += float(win @ x)
    return value - float(m.max()), best


def ocba_shares(mean: ArrayLike, sd: ArrayLike) -> Array:
    """Shares of a measuring budget that make the best alternative (largest mean) most surely found.

    ``N_i ~ (sd_i / d_i)^2`` with d_i the distance to the best, and ``N_best = sd_best sqrt(sum N_i^2 / sd_i^2)``
    (Chen, Lin, Yuecesan and Chick 2000, Discrete Event Dynamic Systems 10). The best must be alone at the top.
    """
    m, s = broadcast_floats(mean, sd)
    best = int(np.argmax(m))
    others = np.arange(len(m)) != best
    shares = np.zeros(len(m))
    shares[others] = (s[others] / (m[best] - m[others])) ** 2
    shares[best] = s[best] * np.sqrt(np.sum((shares[others] / s[others]) ** 2))
    return np.asarray(shares / shares.sum())
