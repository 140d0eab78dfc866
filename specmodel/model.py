"""The fitted model and its equation: tok/s = batch * E[tokens] / (verify + draft + overhead), with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtrit

from specmodel.acceptance import mean_drafts
from specmodel.calibration import Calibration
from specmodel.cost import CostPoints, parameter_names
from specmodel.deployment import Deployment, flattened, part_of
from specmodel.errors import UsageError
from specmodel.measured import Measured, extrapolation
from specmodel.observations import Observations, Shape
from specmodel.posterior import (
    RATE,
    Combination,
    Layout,
    LengthTable,
    Moments,
    Posterior,
    covariance,
    lengths,
    moments,
    times,
)
from specmodel.prediction import Distribution, Prediction, Term, scalar, terms_of
from specmodel.request import Request, Workload, number, request_of, shares_of
from specmodel.residual import ResidualPoints, distinct
from specmodel.sampling import Sample, symmetric_root
from specmodel.speeds import Noise

__all__ = ["QUANTITIES", "FittedModel"]

Array = NDArray[np.float64]
CHUNK = 1 << 14
WHOLE = frozenset(("mixed", "mixture", "all", "overall", "aggregate", "average", "total"))
"""Names of a workload that the other workloads of a file are parts of."""
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

    @property
    def comm_names(self) -> tuple[str, ...]:
        """The communication settings of the file."""
        return self.deployment.structure.comm_names

    def comm_index(self, comm: str) -> int:
        """Index of a communication setting; `UsageError` for one that the file lacks."""
        if not isinstance(comm, str) or comm not in self.comm_names:
            raise UsageError(
                f"comm {comm!r} is not in {self.calibration.name}; use one of: {', '.join(self.comm_names)}"
            )
        return self.comm_names.index(comm)

    def mixture(self, workload: Workload) -> tuple[dict[int, float], tuple[str, ...]]:
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
            # What is named after the whole is no part of it beside the others.
            whole = [n for n in names if n.lower() in WHOLE]
            weights = {n: w for n, w in stated.items() if w} or dict.fromkeys(whole[:1] or names, 1.0)
            total = sum(weights.values())
            text = ", ".join(f"{n} {w / total:.0%}" for n, w in weights.items())
            what = f"{whole[0]}, the whole of the others" if list(weights) == whole[:1] else f"the mixture {text}"
            warning = f"no workload was named and the file has none called default: taken as {what}"
            return {names.index(n): w / total for n, w in weights.items()}, (warning,)
        wanted = shares_of(workload)
        if not wanted:
            raise UsageError("workload: an empty mixture; name at least one workload and its share")
        in_rows = {c.workload for c in self.calibration.measurements.cycles}
        known = {*names, *in_rows} or {"default"}
        for name, share in wanted.items():
            if name not in known:
                raise UsageError(
                    f"workload {name!r} is not in {self.calibration.name}; use one of: {', '.join(sorted(known))}"
                )
            if not (np.isfinite(share) and share > 0):
                raise UsageError(f"workload {name!r}: its share must be a number above 0, got {share!r}")
        if any(name not in names for name in wanted):
            # A workload with plain rows only has no acceptance of its own.
            return self.mixture(None)
        total = sum(wanted.values())
        if not np.isfinite(total):
            raise UsageError("workload: the shares of a mixture must add up to a finite number; scale them down")
        return {names.index(name): share / total for name, share in wanted.items()}, ()

    def predict(
        self,
        num_steps: ArrayLike,
        batch: ArrayLike = 1,
        comm: str = "default",
        topk: ArrayLike = 1,
        num_draft_tokens: ArrayLike | None = None,
        context_tokens: ArrayLike | None = None,
        workload: Workload = None,
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
        request, warnings = self.request(
            num_steps,
            batch,
            comm,
            topk,
            num_draft_tokens,
            context_tokens,
            workload,
            cuda_graph,
            verify_cuda_graph,
            acceptance_length,
        )
        points, right = self.deployment.points(request.settings)
        kinds, index = request.kinds()
        verify: Array = np.zeros(())
        draft: Array = np.zeros(())
        overhead: Array = np.zeros(())
        log_length = np.zeros(kinds.shape[1])
        for post, weight in zip(self.posteriors, self.weights, strict=True):
            parts = times(post, self.observations, self.deployment, points, right)
            verify, draft, overhead = (
                total + weight * part for total, part in zip((verify, draft, overhead), parts, strict=True)
            )
            log_length = log_length + weight * self._lengths(post, request.shares, kinds)[0]
        length = np.exp(log_length)[index]
        length = np.where(np.isnan(request.given), length, request.given)
        cycle = verify + draft + overhead
        tok_s = 1000.0 * request.batch * length / cycle
        plain, plain_warnings = self._plain_rates(request)
        far, far_warnings = extrapolation(
            self.measured,
            self.deployment,
            request.num_steps,
            request.verify_tokens,
            request.batch,
            request.settings.topk,
        )

        def full(x: Any) -> Any:
            return scalar(np.broadcast_to(x, request.shape) if np.shape(x) != request.shape else x)

        return Prediction(
            tok_s=full(tok_s),
            tpot_ms=full(cycle / length),
            cycle_ms=full(cycle),
            verify_ms=full(verify),
            draft_ms=full(draft),
            overhead_ms=full(overhead),
            acceptance_length=full(length),
            speedup=full(tok_s / plain),
            extrapolated=full(far),
            warnings=(*self.warnings, *warnings, *plain_warnings, *far_warnings),
            distribution=lambda: self.distribution(request),
        )

    def request(
        self,
        num_steps: ArrayLike,
        batch: ArrayLike = 1,
        comm: str | tuple[str, ...] = "default",
        topk: ArrayLike = 1,
        num_draft_tokens: ArrayLike | None = None,
        context_tokens: ArrayLike | None = None,
        workload: Workload = None,
        cuda_graph: ArrayLike = True,
        verify_cuda_graph: ArrayLike = True,
        acceptance_length: ArrayLike | None = None,
    ) -> tuple[Request, tuple[str, ...]]:
        """The arguments of `predict`, checked, and warnings about them; several settings add a first axis."""
        shares, warnings = self.mixture(workload)
        request = request_of(
            num_steps=num_steps,
            batch=batch,
            comm=[self.comm_index(c) for c in comm] if isinstance(comm, tuple) else self.comm_index(comm),
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            context_tokens=context_tokens,
            shares=shares,
            cuda_graph=cuda_graph,
            verify_cuda_graph=verify_cuda_graph,
            acceptance_length=acceptance_length,
            drafts_made=self._drafts_made(shares),
            graph_mode=self.deployment.graph_mode,
            place=self._place(workload, shares),
        )
        return request, warnings

    def _drafts_made(self, shares: dict[int, float]) -> Callable[[Array], Array] | None:
        """Drafts made in a cycle on average by drafts asked for; None where they are the same."""
        if all(self.layout.reach_of(w) is None for w in shares):
            return None
        every = np.ones(self.layout.positions)
        reaches = [(every if (r := self.layout.reach_of(w)) is None else r, share) for w, share in shares.items()]
        return lambda K: np.asarray(sum(share * mean_drafts(reach, K) for reach, share in reaches))

    def _place(self, workload: Workload, shares: dict[int, float]) -> int:
        """Index of the one workload whose cycles are meant, -1 for a mixture."""
        places = self.observations.places
        if isinstance(workload, str) and workload in places:
            return places.index(workload)
        return next(iter(shares)) if len(shares) == 1 else -1

    def distribution(self, request: Request) -> Distribution:
        """Distribution of ln tok/s of every point of a request, for one new measurement."""
        size = int(np.prod(request.shape))
        means, sds = np.zeros((len(self.weights), size)), np.zeros((len(self.weights), size))
        log_batch = np.log(1000.0 * np.broadcast_to(request.batch, request.shape).ravel())
        for mode, post in enumerate(self.posteriors):
            noise_variance = Noise().cycle ** 2 * max(post.noise_scale, 1.0)
            for piece, at, _ in self.moments(mode, request):
                means[mode, piece] = at.mean + log_batch[piece]
                sds[mode, piece] = np.sqrt(at.variance + noise_variance)
        return Distribution(
            means=means.reshape(len(means), *request.shape),
            sds=sds.reshape(len(sds), *request.shape),
            degrees=np.array([p.degrees for p in self.posteriors]),
            weights=np.array(self.weights),
        )

    def moments(
        self, mode: int, request: Request, of: Combination = RATE
    ) -> Iterator[tuple[slice, Moments, ResidualPoints]]:
        """Moments of a quantity under one mode, piece by piece of the flattened request."""
        post = self.posteriors[mode]
        broad_points, broad_right = self.deployment.points(request.settings)
        points: CostPoints = flattened(broad_points, request.shape)
        right: ResidualPoints = flattened(broad_right, request.shape)
        kinds, index = request.kinds()
        value, gradient = self._lengths(post, request.shares, kinds)
        index = np.broadcast_to(index, request.shape).ravel()
        given = np.broadcast_to(request.given, request.shape).ravel()
        known = ~np.isnan(given)
        for start in range(0, len(index), CHUNK):
            piece = slice(start, start + CHUNK)
            table = LengthTable(value=value, gradient=gradient, index=index[piece], known=known[piece])
            some, there = part_of(points, piece), part_of(right, piece)
            at = moments(post, self.observations, self.layout, self.deployment, some, there, table, of)
            if table.known.any():
                shift = np.log(np.where(table.known, given[piece], 1.0)) - value[table.index]
                at.mean[table.known] += of.length * shift[table.known]
            yield piece, at, there

    def interval_of(
        self,
        quantity: str,
        num_steps: int,
        batch: float = 1,
        comm: str = "default",
        topk: int = 1,
        num_draft_tokens: int | None = None,
        context_tokens: float | None = None,
        workload: Workload = None,
        cuda_graph: bool = True,
        verify_cuda_graph: bool = True,
        level: float = 0.9,
    ) -> tuple[float, float, float]:
        """Median and central interval of one part of a configuration, measurement noise left out.

        Parameters
        ----------
        quantity : str
            One of `QUANTITIES`: tok_s, cycle_ms, verify_ms, draft_ms, acceptance_length, verify_share, draft_share.
        num_steps, batch, comm, topk, num_draft_tokens, context_tokens, workload, cuda_graph, verify_cuda_graph
            As in `predict`, scalars.
        level : float
            Probability of the interval.
        """
        if quantity not in QUANTITIES:
            raise UsageError(f"quantity must be one of {', '.join(QUANTITIES)}, got {quantity!r}")
        level = number("level", level, 1e-9, 1.0 - 1e-9)
        if num_steps == 0 and quantity.startswith("draft_"):
            return 0.0, 0.0, 0.0
        request, _ = self.request(
            num_steps, batch, comm, topk, num_draft_tokens, context_tokens, workload, cuda_graph, verify_cuda_graph
        )
        logs = np.zeros(3)
        for mode, weight in enumerate(self.weights):
            ((_, at, _),) = self.moments(mode, request, QUANTITIES[quantity])
            half = float(stdtrit(self.posteriors[mode].degrees, 0.5 + level / 2.0) * np.sqrt(at.variance[0]))
            mean = min(float(at.mean[0]), -1e-6) if quantity.endswith("_share") else float(at.mean[0])
            if quantity.endswith("_share"):
                # A share stays below 1: the interval is taken in its log odds.
                share = np.exp(mean)
                odds = np.log(share / (1.0 - share)) + half / (1.0 - share) * np.array([0.0, -1.0, 1.0])
                logs += weight * -np.logaddexp(0.0, -odds)
            else:
                logs += weight * (mean + half * np.array([0.0, -1.0, 1.0]))
        middle, low, high = np.exp(logs) * (1000.0 * batch if quantity == "tok_s" else 1.0)
        return float(middle), float(low), float(high)

    def draws(self, request: Request, count: int) -> Array:
        """Joint draws of the latent tok/s of every point of a request, shape (count, points).

        The same parameters and residuals stand behind all points of a draw, so differences between candidates are
        known better than each is. Deterministic: the same call gives the same draws.
        """
        logs = [sample.log_tok_s for sample in self.samples(request, count)]
        return np.asarray(np.exp(np.clip(np.concatenate(logs), -300.0, 300.0)))

    def samples(self, request: Request, count: int) -> Iterator[Sample]:
        """What `draws` is made of, mode by mode."""
        random = np.random.default_rng(20260226)
        counts = np.floor(np.array(self.weights) * count).astype(int)
        counts[0] += count - counts.sum()
        log_batch = np.log(1000.0 * np.broadcast_to(request.batch, request.shape).ravel())
        for mode, n in enumerate(counts):
            post = self.posteriors[mode]
            ((_, at, right),) = self.moments(mode, request)
            root = symmetric_root(covariance(post, right, at))
            scale = np.sqrt(post.degrees / random.chisquare(post.degrees, size=(n, 1)))
            normal = random.standard_normal((n, len(root)))
            yield Sample(mode=mode, at=at, right=right, mean=at.mean + log_batch, root=root, scale=scale, normal=normal)

    def _lengths(self, post: Posterior, shares: dict[int, float], kinds: Array) -> tuple[Array, Array]:
        """Log acceptance length of the mixture for each (steps, topk, tokens) column, and its derivative.

        Shares are of tokens, so the lengths of the parts average harmonically.
        """
        inverse_length = np.zeros(kinds.shape[1])
        gradient = np.zeros((kinds.shape[1], self.layout.size))
        whole = np.rint(kinds.T).astype(int).tolist()
        for index, share in shares.items():
            shapes = tuple(Shape(workload=index, num_steps=k, topk=t, verify_tokens=n) for k, t, n in whole)
            value, jac = lengths(post.theta, self.layout, shapes)
            part = share * np.exp(-value)
            inverse_length += part
            gradient += part[:, None] * jac
        return -np.log(inverse_length), gradient / inverse_length[:, None]

    def _plain_rates(self, request: Request) -> tuple[Array, tuple[str, ...]]:
        """The plain rate that each point is compared with, and a warning where none was measured."""
        names = tuple(self.layout.workloads[i] for i in request.shares)
        # Each different place once: a grid over steps asks for the same plain decoding again and again.
        batches, at_batch = distinct(request.batch)
        contexts, at_context = distinct(request.settings.context_tokens)
        if batches.size * contexts.size <= max(at_batch.size, at_context.size):
            rates, warnings = self._plain_rates_at(batches[:, None], contexts[None, :], names)
            return rates[at_batch, at_context], warnings
        return self._plain_rates_at(request.batch, request.settings.context_tokens, names)

    def _plain_rates_at(
        self, batch: Array, context: Array, workloads: tuple[str, ...]
    ) -> tuple[Array, tuple[str, ...]]:
        """Plain rates at batches and contexts that broadcast."""
        rates: Array = np.full(np.broadcast_shapes(batch.shape, context.shape), np.nan)
        for b, c, tok_s in self.measured.plain_places(workloads):
            here = np.abs(batch - b) < 1e-9
            if c >= 0:
                here = here & (np.isnan(context) | (context == c))
            rates = np.fmax(rates, np.where(here, tok_s, np.nan))
        missing = np.isnan(rates)
        if not missing.any():
            return rates, ()
        settings = self.request(0, np.broadcast_to(batch, rates.shape), self.comm_names)[0].settings
        points, right = self.deployment.points(replace(settings, context_tokens=context))
        cycle: Array = np.zeros(())
        for post, weight in zip(self.posteriors, self.weights, strict=True):
            cycle = cycle + weight * sum(times(post, self.observations, self.deployment, points, right))
        predicted = (1000.0 * batch / cycle).max(axis=0).reshape(rates.shape)
        sizes = np.unique(np.broadcast_to(batch, rates.shape)[missing])
        shown = ", ".join(f"{b:g}" for b in sizes[:5]) + (", ..." if len(sizes) > 5 else "")
        text = f"plain decoding was not measured at batch {shown}: speedup is over its prediction"
        return np.where(missing, predicted, rates), (text,)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The fitted parameters of the likeliest mode, with 90 % intervals, in natural units."""
        return terms_of(self.posteriors[0], self.layout.names(parameter_names(self.comm_names)))

    def summary(self) -> str:
        """What was fitted to what, and every term that the data moved, as text of a few lines."""
        lines = [f"{self.calibration.name}: {len(self.observations)} observations, {len(self.posteriors)} mode(s)"]
        for term in self.terms:
            if term.informed > 0.05:
                interval = f"[{term.low:.4g}, {term.high:.4g}]"
                lines.append(f"  {term.name:32} {term.value:10.4g} {interval} {term.unit}".rstrip())
        lines += [f"  warning: {w}" for w in self.warnings]
        return "\n".join(lines)
