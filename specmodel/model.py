"""The fitted model and its equation: tok/s = batch * E[tokens] / (verify + draft + overhead), with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from specmodel.calibration import Calibration
from specmodel.cost import parameter_names
from specmodel.deployment import Deployment, as_settings
from specmodel.errors import UsageError
from specmodel.measured import Measured, extrapolation
from specmodel.observations import Noise, Observations, Shape
from specmodel.posterior import RATE, Combination, Layout, Moments, Posterior, covariance, lengths, moments
from specmodel.residual import ResidualPoints

__all__ = ["QUANTITIES", "FittedModel", "Prediction", "Term"]

Array = NDArray[np.float64]
CHUNK = 1 << 14
QUANTITIES = {
    "tok_s": RATE,
    "cycle_ms": Combination(cycle=1.0),
    "verify_ms": Combination(verify=1.0),
    "draft_ms": Combination(draft=1.0),
    "acceptance_length": Combination(length=1.0),
    "verify_share": Combination(verify=1.0, cycle=-1.0),
    "draft_share": Combination(draft=1.0, cycle=-1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says about one configuration or an array of them; scalars in, scalars out.

    ``tok_s = 1000 * batch * acceptance_length / cycle_ms`` and ``cycle_ms = verify_ms + draft_ms + overhead_ms`` hold
    exactly.
    """

    tok_s: Array
    tpot_ms: Array
    cycle_ms: Array
    verify_ms: Array
    draft_ms: Array
    overhead_ms: Array
    acceptance_length: Array
    speedup: Array
    """Over the best plain decoding at the same batch and context; which one, `plain` says."""
    extrapolated: NDArray[np.bool_]
    """Too far from what was measured for a recommendation."""
    warnings: tuple[str, ...]
    log_means: Array
    """Mean of ln tok/s under each mode of the posterior, shape (modes, ...)."""
    log_sds: Array
    """Standard deviation of ln tok/s under each mode, the noise of one measurement included, shape (modes, ...)."""
    degrees: Array
    """Degrees of freedom of the Student distribution of each mode."""
    weights: Array
    """Probability of each mode."""

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Central interval of tok/s into which one new measurement falls with probability `level`."""
        if not 0.0 < level < 1.0:
            raise UsageError(f"interval level must lie between 0 and 1, got {level!r}")
        return self.quantile(0.5 - level / 2.0), self.quantile(0.5 + level / 2.0)

    def quantile(self, probability: float) -> Array:
        """Quantile of tok/s for one new measurement: a mixture of Student distributions in its logarithm."""
        t = np.asarray(stdtrit(self.degrees, probability))
        shape = (-1,) + (1,) * (self.log_means.ndim - 1)
        each = self.log_means + t.reshape(shape) * self.log_sds
        low, high = each.min(axis=0), each.max(axis=0)
        if len(self.weights) > 1:
            degrees = self.degrees.reshape(shape)
            for _ in range(30):
                middle = 0.5 * (low + high)
                below = np.tensordot(
                    self.weights, stdtr(degrees, (middle - self.log_means) / self.log_sds), axes=(0, 0)
                )
                low, high = np.where(below < probability, middle, low), np.where(below < probability, high, middle)
        return _plain(np.exp(0.5 * (low + high)))


def _plain(x: Any) -> Any:
    """A Python scalar for a 0-d array, anything else as it is."""
    return x.item() if isinstance(x, np.ndarray | np.generic) and x.ndim == 0 else x


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One fitted parameter in words: its value with a 90 % interval, and how much the data moved it."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    informed: float
    """Share of the prior's variance that the data removed, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """The joint posterior of cost and acceptance of one deployment: what `fit` returns."""

    calibration: Calibration
    deployment: Deployment
    observations: Observations
    layout: Layout
    measured: Measured
    posteriors: tuple[Posterior, ...]
    """Modes of the posterior, the likeliest first."""
    weights: tuple[float, ...]
    warnings: tuple[str, ...]
    """Findings about the numbers themselves."""

    def comm_index(self, comm: str) -> int:
        """Index of a communication setting.

        Raises
        ------
        UsageError
            For a setting that the file lacks.
        """
        names = self.deployment.structure.comm_names
        if comm not in names:
            raise UsageError(f"comm {comm!r} is not in {self.calibration.name}; use one of: {', '.join(names)}")
        return names.index(comm)

    def mixture(self, workload: str | Mapping[str, float] | None) -> tuple[dict[int, float], tuple[str, ...]]:
        """Shares of the workloads that a call means, by index, and a warning that names a mixture nobody asked for.

        Raises
        ------
        UsageError
            For a workload that the file lacks, or shares that are not positive numbers.
        """
        names = self.layout.workloads
        if workload is None:
            if "default" in names or len(names) == 1:
                return {names.index("default") if "default" in names else 0: 1.0}, ()
            stated = {n: self.calibration.workloads[n].weight for n in names if n in self.calibration.workloads}
            weights = {n: w for n, w in stated.items() if w} or dict.fromkeys(names, 1.0)
            total = sum(weights.values())
            text = ", ".join(f"{n} {w / total:.0%}" for n, w in weights.items())
            warning = f"no workload was named and the file has none called default: taken as the mixture {text}"
            return {names.index(n): w / total for n, w in weights.items()}, (warning,)
        wanted = {workload: 1.0} if isinstance(workload, str) else {str(n): float(w) for n, w in workload.items()}
        known = {*names, *(c.workload for c in self.calibration.measurements.cycles), "default"}
        if "default" not in names and (self.observations.shapes or len(names) > 1):
            known -= {"default"} - {c.workload for c in self.calibration.measurements.cycles}
        for name, share in wanted.items():
            if name not in known:
                raise UsageError(
                    f"workload {name!r} is not in {self.calibration.name}; use one of: {', '.join(sorted(known))}"
                )
            if not (np.isfinite(share) and share > 0):
                raise UsageError(f"workload {name!r}: its share must be a number above 0, got {share!r}")
        total = sum(wanted.values())
        shares: dict[int, float] = {}
        for name, share in wanted.items():
            index = names.index(name) if name in names else 0
            shares[index] = shares.get(index, 0.0) + share / total
        return shares, ()

    def predict(
        self,
        num_steps: ArrayLike,
        batch: ArrayLike = 1,
        comm: str = "default",
        topk: ArrayLike = 1,
        num_draft_tokens: ArrayLike | None = None,
        context_tokens: ArrayLike | None = None,
        workload: str | Mapping[str, float] | None = None,
        cuda_graph: ArrayLike = True,
        verify_cuda_graph: ArrayLike = True,
        acceptance_length: ArrayLike | None = None,
    ) -> Prediction:
        """Predict tok/s, its parts and its interval for any configuration.

        Numeric arguments broadcast against each other; a scalar call is the same code and gives scalars.

        Parameters
        ----------
        num_steps : array_like
            K, draft tokens proposed per sequence and cycle; 0 is plain decoding.
        batch : array_like
            Running sequences of all data-parallel ranks together.
        comm : str
            A communication setting of the file.
        topk, num_draft_tokens : array_like
            Shape of a tree as SGLang defines it; a chain (1, num_steps + 1) by default.
        context_tokens : array_like, optional
            Tokens in the KV cache per sequence; the reference context of the file by default.
        workload : str or mapping of name to share, optional
            By default `default` if the file has it, else the mixture by `weight`, and a warning names it.
        cuda_graph, verify_cuda_graph : array_like of bool
            Whether drafts and verify passes run in CUDA graphs.
        acceptance_length : array_like, optional
            Use this instead of the fitted acceptance.

        Returns
        -------
        Prediction
            Finite however far a point lies; then the interval is wide and `extrapolated` is true.

        Raises
        ------
        UsageError
            For an unknown comm setting or workload, and for numbers outside their domain.
        """
        K = _domain("num_steps", num_steps, 0.0)
        tokens = K + 1.0 if num_draft_tokens is None else _domain("num_draft_tokens", num_draft_tokens, 1.0)
        B = _domain("batch", batch, 1.0)
        width = _domain("topk", topk, 1.0)
        context = np.float64(np.nan) if context_tokens is None else _domain("context_tokens", context_tokens, 0.0)
        given = np.float64(np.nan) if acceptance_length is None else _domain("acceptance_length", acceptance_length, 1.0)
        graph, verify_graph = np.asarray(cuda_graph, dtype=bool), np.asarray(verify_cuda_graph, dtype=bool)
        arrays = np.broadcast_arrays(K, tokens, B, width, context, graph, verify_graph, given)
        shape = arrays[0].shape
        flat = [np.ascontiguousarray(a).ravel() for a in arrays]
        shares, warnings = self.mixture(workload)
        comm_index = self.comm_index(comm)
        size = flat[0].shape[0]
        modes = len(self.posteriors)
        times, log_lengths = np.zeros((3, size)), np.zeros(size)
        means, sds = np.zeros((modes, size)), np.zeros((modes, size))
        for start in range(0, size, CHUNK):
            piece = slice(start, start + CHUNK)
            for m, weight in enumerate(self.weights):
                at, log_length, noise, _ = self._moments(m, [a[piece] for a in flat], comm_index, shares)
                times[0, piece] += weight * at.latent.verify_ms
                times[1, piece] += weight * at.latent.draft_ms
                times[2, piece] += weight * at.latent.overhead_ms
                log_lengths[piece] += weight * log_length
                means[m, piece] = at.mean + np.log(1000.0 * flat[2][piece])
                sds[m, piece] = np.sqrt(at.variance + noise**2)
        length, cycle = np.exp(log_lengths), times.sum(axis=0)
        tok_s = 1000.0 * flat[2] * length / cycle
        names = tuple(self.layout.workloads[i] for i in shares)
        plain, plain_warnings = self._plain_rates(flat[2], flat[4], names, comm)
        far, far_warnings = extrapolation(self.measured, self.deployment, flat[0], flat[1], flat[2])

        def back(x: Array) -> Any:
            return _plain(x.reshape(shape))

        return Prediction(
            tok_s=back(tok_s),
            tpot_ms=back(1000.0 * flat[2] / tok_s),
            cycle_ms=back(cycle),
            verify_ms=back(times[0]),
            draft_ms=back(times[1]),
            overhead_ms=back(times[2]),
            acceptance_length=back(length),
            speedup=back(tok_s / plain),
            extrapolated=back(far),
            warnings=(*self.warnings, *warnings, *plain_warnings, *far_warnings),
            log_means=means.reshape(modes, *shape),
            log_sds=sds.reshape(modes, *shape),
            degrees=np.array([p.degrees for p in self.posteriors]),
            weights=np.array(self.weights),
        )

    def interval_of(
        self,
        quantity: str,
        num_steps: int,
        batch: float = 1,
        comm: str = "default",
        topk: int = 1,
        num_draft_tokens: int | None = None,
        context_tokens: float | None = None,
        workload: str | Mapping[str, float] | None = None,
        cuda_graph: bool = True,
        verify_cuda_graph: bool = True,
        level: float = 0.9,
    ) -> tuple[float, float, float]:
        """Median and central interval of one part of a configuration, measurement noise left out.

        Parameters
        ----------
        quantity : str
            One of `QUANTITIES`: verify_ms, draft_ms, cycle_ms, acceptance_length, verify_share, draft_share, tok_s.
        num_steps, batch, comm, topk, num_draft_tokens, context_tokens, workload, cuda_graph, verify_cuda_graph
            As in `predict`, scalars.
        level : float
            Probability of the interval.
        """
        if quantity not in QUANTITIES:
            raise UsageError(f"quantity must be one of {', '.join(QUANTITIES)}, got {quantity!r}")
        shares, _ = self.mixture(workload)
        tokens = num_steps + 1 if num_draft_tokens is None else num_draft_tokens
        context = np.nan if context_tokens is None else context_tokens
        flat = [np.array([float(x)]) for x in (num_steps, tokens, batch, topk, context)]
        flat += [np.array([cuda_graph]), np.array([verify_cuda_graph]), np.array([np.nan])]
        scale = np.log(1000.0 * batch) if quantity == "tok_s" else 0.0
        low, middle, high = 0.0, 0.0, 0.0
        for mode, weight in enumerate(self.weights):
            post = self.posteriors[mode]
            at, _, _, _ = self._moments(mode, flat, self.comm_index(comm), shares, of=QUANTITIES[quantity])
            half = float(stdtrit(post.degrees, 0.5 + level / 2.0) * np.sqrt(at.variance[0]))
            mean = float(at.mean[0]) + scale
            low, middle, high = low + weight * (mean - half), middle + weight * mean, high + weight * (mean + half)
        return float(np.exp(middle)), float(np.exp(low)), float(np.exp(high))

    def draws(
        self,
        num_steps: Array,
        batch: float,
        comms: tuple[str, ...],
        topk: Array,
        num_draft_tokens: Array,
        context_tokens: float | None,
        count: int,
        *,
        workload: str | Mapping[str, float] | None = None,
        cuda_graph: bool = True,
        verify_cuda_graph: bool = True,
    ) -> Array:
        """Joint draws of the latent tok/s of many candidates at one batch, shape (count, comms x shapes).

        The same parameters and residuals stand behind all candidates of a draw, so differences between candidates
        are known better than each is. Deterministic: the same call gives the same draws.
        """
        shares, _ = self.mixture(workload)
        size = len(num_steps)
        context = np.nan if context_tokens is None else float(context_tokens)
        flat = [np.asarray(num_steps, float), np.asarray(num_draft_tokens, float), np.full(size, float(batch))]
        flat += [np.asarray(topk, float), np.full(size, context), np.full(size, cuda_graph)]
        flat += [np.full(size, verify_cuda_graph), np.full(size, np.nan)]
        flat = [np.tile(a, len(comms)) for a in flat]
        comm = np.repeat([self.comm_index(name) for name in comms], size)
        random = np.random.default_rng(20260226)
        counts = np.floor(np.array(self.weights) * count).astype(int)
        counts[0] += count - counts.sum()
        out = []
        for mode, n in enumerate(counts):
            post = self.posteriors[mode]
            at, _, _, right = self._moments(mode, flat, comm, shares)
            spread = covariance(post, right, at)
            values, vectors = np.linalg.eigh(0.5 * (spread + spread.T))
            # The symmetric root does not depend on the basis that LAPACK picks: the same draws everywhere.
            root = (vectors * np.sqrt(np.maximum(values, 0.0))) @ vectors.T
            scale = np.sqrt(post.degrees / random.chisquare(post.degrees, size=(n, 1)))
            normal = random.standard_normal((n, len(values)))
            out.append(at.mean + np.log(1000.0 * batch) + scale * (normal @ root.T))
        return np.exp(np.concatenate(out))

    def _moments(
        self, mode: int, flat: list[Array], comm: ArrayLike, shares: dict[int, float], spread: bool = True,
        of: Combination = RATE,
    ) -> tuple[Moments, Array, float, ResidualPoints]:
        """Moments under one mode, the log acceptance length, and the sd of one measurement."""
        K, tokens, B, width, context, graph, verify_graph, given = flat
        post = self.posteriors[mode]
        drafting = K > 0
        settings = as_settings(
            num_steps=K,
            verify_tokens=np.where(drafting, tokens, 1.0),
            batch=B,
            context_tokens=context,
            comm=comm,
            speculating=drafting,
            topk=np.where(drafting, width, 1.0),
            draft_mode=np.where(graph | ~drafting, 0, 2),
            verify_eager=~np.asarray(verify_graph, dtype=bool),
        )
        points, right = self.deployment.points(settings)
        kinds, inverse = np.unique(np.stack([K, width, tokens]), axis=1, return_inverse=True)
        log_length, gradient = self._lengths(post, shares, kinds)
        log_length, gradient = log_length[inverse], gradient[inverse]
        known = ~np.isnan(given)
        if known.any():
            log_length = np.where(known, np.log(np.where(known, given, 1.0)), log_length)
            gradient[known] = 0.0
        at = moments(
            post, self.observations, self.layout, self.deployment, points, right, log_length, gradient, of, spread
        )
        return at, log_length, Noise().cycle * float(np.sqrt(max(post.noise_scale, 1.0))), right

    def _lengths(self, post: Posterior, shares: dict[int, float], kinds: Array) -> tuple[Array, Array]:
        """Log acceptance length of the mixture for each (steps, topk, tokens) column, and its derivative.

        Shares are of tokens, so the lengths of the parts average harmonically.
        """
        inverse_length = np.zeros(kinds.shape[1])
        gradient = np.zeros((kinds.shape[1], self.layout.size))
        for index, share in shares.items():
            shapes = tuple(
                Shape(workload=index, num_steps=int(round(k)), topk=int(round(t)), verify_tokens=int(round(n)))
                for k, t, n in kinds.T
            )
            value, jac = lengths(post.theta, self.layout, shapes)
            part = share * np.exp(-value)
            inverse_length += part
            gradient += part[:, None] * jac
        return -np.log(inverse_length), gradient / inverse_length[:, None]

    def _plain_rates(
        self, batch: Array, context: Array, workloads: tuple[str, ...], comm: str
    ) -> tuple[Array, tuple[str, ...]]:
        """The plain rate that each point is compared with, and a warning where none was measured."""
        places, inverse = np.unique(np.stack([batch, np.nan_to_num(context, nan=-1.0)]), axis=1, return_inverse=True)
        rates = np.zeros(places.shape[1])
        missing: list[float] = []
        for i, (b, c) in enumerate(places.T):
            rate = self.measured.plain_rate(float(b), None if c < 0 else float(c), workloads)
            if rate is not None:
                rates[i] = rate.tok_s
                continue
            missing.append(float(b))
            rates[i] = max(self._plain_prediction(float(b), float(c), name) for name in self._comms())
        if not missing:
            return rates[inverse], ()
        shown = ", ".join(f"{b:g}" for b in sorted(set(missing))[:5]) + (", ..." if len(set(missing)) > 5 else "")
        return rates[inverse], (f"plain decoding was not measured at batch {shown}: speedup is over its prediction",)

    def _comms(self) -> tuple[str, ...]:
        return self.deployment.structure.comm_names

    def _plain_prediction(self, batch: float, context: float, comm: str) -> float:
        flat = [np.array([x]) for x in (0.0, 1.0, batch, 1.0, np.nan if context < 0 else context)]
        flat += [np.array([True]), np.array([True]), np.array([np.nan])]
        cycle = 0.0
        for mode, weight in enumerate(self.weights):
            at, _, _, _ = self._moments(mode, flat, self.comm_index(comm), {0: 1.0}, spread=False)
            cycle += weight * float(at.latent.cycle_ms[0])
        return 1000.0 * batch / cycle

    @property
    def terms(self) -> tuple[Term, ...]:
        """The fitted parameters of the likeliest mode, with 90 % intervals, in natural units."""
        post = self.posteriors[0]
        names = [*parameter_names(self._comms()), "logit_rank_ratio"]
        names += [f"conditional[{w}][{k + 1}]" for w in self.layout.workloads for k in range(self.layout.positions)]
        half_prior = post.jacobian @ post.prior_cov
        whitened = np.linalg.solve(post.factor, half_prior)
        prior_variance = np.diag(post.prior_cov)
        variance = np.maximum(prior_variance - np.sum(whitened**2, axis=0), 0.0)
        t = float(stdtrit(post.degrees, 0.95))
        out = []
        for name, mean, before, after in zip(names, post.theta, prior_variance, variance, strict=True):
            if before <= 0.0:
                continue
            half = t * np.sqrt(after)
            value, low, high, unit, label = _natural(name, np.array([mean, mean - half, mean + half]))
            out.append(
                Term(name=label, value=value, low=low, high=high, unit=unit, informed=float(1.0 - after / before))
            )
        return tuple(out)

    def summary(self) -> str:
        """What was fitted to what, and every term that the data moved, as text of a few lines."""
        lines = [f"{self.calibration.name}: {len(self.observations)} observations, {len(self.posteriors)} mode(s)"]
        for term in self.terms:
            if term.informed > 0.05:
                lines.append(
                    f"  {term.name:32} {term.value:10.4g} [{term.low:.4g}, {term.high:.4g}] {term.unit}".rstrip()
                )
        lines += [f"  warning: {w}" for w in self.warnings]
        return "\n".join(lines)


def _natural(name: str, values: Array) -> tuple[float, float, float, str, str]:
    """Value, low and high of a parameter in the unit that people read, that unit, and the parameter's plain name."""
    if name.startswith("log_"):
        v, label = np.exp(values), name.removeprefix("log_")
        bare = label.partition("[")[0]
        unit = "ms" if bare == "pass_ms" else "tokens" if bare == "knee_tokens" else "passes"
    elif name.startswith(("logit_", "conditional")):
        v, unit, label = 0.5 * (1.0 + np.tanh(0.5 * values)), "", name.removeprefix("logit_")
    elif name.startswith("comm_offset"):
        v, unit, label = values, "passes", name
    else:
        v, unit, label = np.exp(values), "factor", name
    return float(v[0]), float(v[1]), float(v[2]), unit, label


def _domain(name: str, value: ArrayLike, least: float) -> Array:
    """A finite array of numbers from `least`, or a `UsageError` that names the argument."""
    try:
        x = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        raise UsageError(f"{name} must be a number or an array of numbers, got {value!r}") from None
    if not np.all(np.isfinite(x)) or np.any(x < least):
        bad = x[~(np.isfinite(x) & (x >= least))].ravel()[0]
        raise UsageError(f"{name} must be finite and {least:g} or more, got {bad:g}")
    return x
