"""The fitted model and its equation: tok/s = batch * E[tokens] / (verify + draft + overhead), with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import stdtr, stdtrit

from specmodel.calibration import Calibration
from specmodel.deployment import Deployment, as_settings
from specmodel.errors import UsageError
from specmodel.observations import Observations, Shape
from specmodel.posterior import Layout, Posterior, lengths, moments

__all__ = ["FittedModel", "Prediction"]

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the model says about one configuration or an array of them; scalars in, scalars out."""

    tok_s: Array
    tpot_ms: Array
    cycle_ms: Array
    verify_ms: Array
    draft_ms: Array
    overhead_ms: Array
    acceptance_length: Array
    speedup: Array
    extrapolated: NDArray[np.bool_]
    warnings: tuple[str, ...]
    log_means: Array
    """Mean of ln tok/s under each mode, shape (modes, ...)."""
    log_sds: Array
    """Predictive standard deviation of ln tok/s under each mode, noise of one measurement included."""
    degrees: Array
    weights: Array

    def interval(self, level: float = 0.9) -> tuple[Array, Array]:
        """Central interval of tok/s that one new measurement falls into with probability `level`."""
        return self.quantile(0.5 - level / 2.0), self.quantile(0.5 + level / 2.0)

    def quantile(self, probability: float) -> Array:
        """Quantile of the predictive distribution of tok/s, a mixture of Student distributions in its logarithm."""
        t = stdtrit(self.degrees, probability)
        shape = (-1,) + (1,) * (self.log_means.ndim - 1)
        each = self.log_means + t.reshape(shape) * self.log_sds
        low, high = each.min(axis=0), each.max(axis=0)
        if len(self.weights) > 1:
            for _ in range(40):
                middle = 0.5 * (low + high)
                below = np.tensordot(
                    self.weights,
                    stdtr(self.degrees.reshape(shape), (middle - self.log_means) / self.log_sds),
                    axes=(0, 0),
                )
                low, high = np.where(below < probability, middle, low), np.where(below < probability, high, middle)
        return _plain(np.exp(0.5 * (low + high)))


def _plain(x: Array) -> Array:
    return x if np.ndim(x) else np.float64(x)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedModel:
    """The joint posterior of one deployment."""

    calibration: Calibration
    deployment: Deployment
    observations: Observations
    layout: Layout
    posteriors: tuple[Posterior, ...]
    weights: tuple[float, ...]

    @classmethod
    def of(
        cls,
        cal: Calibration,
        dep: Deployment,
        obs: Observations,
        layout: Layout,
        found: list[Posterior],
    ) -> FittedModel:
        """Model from the modes that were found: equal ones merged, hopeless ones dropped, weighted by evidence."""
        kept: list[Posterior] = []
        for p in sorted(found, key=lambda p: -p.log_evidence):
            if all(np.max(np.abs(p.theta - q.theta)) > 0.05 for q in kept):
                kept.append(p)
        evidence = np.array([p.log_evidence for p in kept])
        weights = np.exp(evidence - evidence.max())
        weights /= weights.sum()
        pairs = [(p, w) for p, w in zip(kept, weights, strict=True) if w > 0.01]
        total = sum(w for _, w in pairs)
        return cls(
            calibration=cal,
            deployment=dep,
            observations=obs,
            layout=layout,
            posteriors=tuple(p for p, _ in pairs),
            weights=tuple(float(w / total) for _, w in pairs),
        )

    def comm_index(self, comm: str) -> int:
        """Index of a communication setting; raises `UsageError` for one that the file lacks."""
        names = self.deployment.structure.comm_names
        if comm not in names:
            raise UsageError(f"comm {comm!r} is not in {self.calibration.name}: use one of {', '.join(names)}")
        return names.index(comm)

    def mixture(self, workload: str | Mapping[str, float] | None) -> tuple[dict[int, float], tuple[str, ...]]:
        """Shares of the workloads that a call means, by index, and warnings about the choice."""
        names = self.layout.workloads
        if workload is None:
            if "default" in names or len(names) == 1:
                return {names.index("default") if "default" in names else 0: 1.0}, ()
            stated = {n: self.calibration.workloads[n].weight for n in names if n in self.calibration.workloads}
            weights = {n: w for n, w in stated.items() if w}
            if not weights:
                weights = dict.fromkeys(names, 1.0)
            total = sum(weights.values())
            text = ", ".join(f"{n} {w / total:.0%}" for n, w in weights.items())
            return {names.index(n): w / total for n, w in weights.items()}, (f"workload mixture: {text}",)
        wanted = {workload: 1.0} if isinstance(workload, str) else dict(workload)
        unknown = [n for n in wanted if n not in names]
        if unknown and not (unknown == ["default"] and len(wanted) == 1 and not self.observations.shapes):
            raise UsageError(
                f"workload {unknown[0]!r} is not in {self.calibration.name}: use one of {', '.join(names)}"
            )
        total = sum(wanted.values())
        return {names.index(n) if n in names else 0: w / total for n, w in wanted.items()}, ()

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
        """Predict configurations."""
        K = np.asarray(num_steps, dtype=float)
        tokens = K + 1.0 if num_draft_tokens is None else np.asarray(num_draft_tokens, dtype=float)
        context = np.nan if context_tokens is None else np.asarray(context_tokens, dtype=float)
        given = np.nan if acceptance_length is None else np.asarray(acceptance_length, dtype=float)
        arrays = np.broadcast_arrays(K, tokens, np.asarray(batch, dtype=float), np.asarray(topk, dtype=float), context,
            np.asarray(cuda_graph, dtype=bool), np.asarray(verify_cuda_graph, dtype=bool), given)
        shape = arrays[0].shape
        K, tokens, B, width, context, graph, verify_graph, given = (a.ravel() for a in arrays)
        shares, warnings = self.mixture(workload)
        settings = as_settings(num_steps=K, verify_tokens=tokens, batch=B, context_tokens=context, comm=np.full(len(K), self.comm_index(comm)),
            speculating=K > 0, topk=np.where(K > 0, width, 1), draft_mode=np.where(graph | (K == 0), 0, 2), verify_eager=~verify_graph)
        points, right = self.deployment.points(settings)
        kinds, inverse = np.unique(np.stack([K, width, tokens]), axis=1, return_inverse=True)
        means, sds, parts_, log_lengths = [], [], [], []
        noise = 0.010
        for post in self.posteriors:
            log_length, gradient = self._lengths(post, shares, kinds)
            log_length, gradient = log_length[inverse], gradient[inverse]
            known = ~np.isnan(given)
            log_length = np.where(known, np.log(np.where(known, given, 1.0)), log_length)
            gradient[known] = 0.0
            at = moments(post, self.observations, self.layout, self.deployment, points, right, log_length, gradient)
            means.append(at.log_rate + np.log(1000.0 * B))
            sds.append(np.sqrt(at.variance + noise**2 * max(post.noise_scale, 1.0)))
            parts_.append(at.latent)
            log_lengths.append(log_length)
        w = np.array(self.weights)
        mix = lambda name: np.tensordot(w, np.stack([getattr(p, name) for p in parts_]), axes=(0, 0)).reshape(shape)
        verify, draft, overhead = mix("verify_ms"), mix("draft_ms"), mix("overhead_ms")
        length = np.exp(np.tensordot(w, np.stack(log_lengths), axes=(0, 0))).reshape(shape)
        cycle = verify + draft + overhead
        tok_s = 1000.0 * B.reshape(shape) * length / cycle
        return Prediction(tok_s=tok_s, tpot_ms=1000.0*B.reshape(shape)/tok_s, cycle_ms=cycle, verify_ms=verify, draft_ms=draft, overhead_ms=overhead,
            acceptance_length=length, speedup=np.full(shape, np.nan), extrapolated=np.zeros(shape, bool), warnings=warnings,
            log_means=np.stack(means).reshape((-1, *shape)), log_sds=np.stack(sds).reshape((-1, *shape)),
            degrees=np.array([p.degrees for p in self.posteriors]), weights=w)

    def _lengths(self, post: Posterior, shares: dict[int, float], kinds: Array) -> tuple[Array, Array]:
        """Log acceptance length of the mixture for each (steps, topk, tokens) column, and its derivative."""
        inverse_length, gradient = 0.0, 0.0
        for index, share in shares.items():
            shapes = tuple(Shape(index, int(k), int(t), int(n)) for k, t, n in kinds.T)
            value, jac = lengths(post.theta, self.layout, shapes)
            part = share * np.exp(-value)
            inverse_length = inverse_length + part
            gradient = gradient + part[:, None] * jac
        return -np.log(inverse_length), np.asarray(gradient / np.asarray(inverse_length)[:, None])
