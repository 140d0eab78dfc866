"""Synthetic deployments of known truth, and the calibration files that measuring them would give.

The truth is written out here on its own, not with the functions of the package: a pass with experts, a compute-bound
knee, KV bytes and steps of its kernels, a drafter, communication settings that cost a fixed and a per-token share, and
an acceptance curve that falls along the chain. Measurements of it carry the noise that they state.

Test modules read this file by ``SimpleNamespace(**runpy.run_path(...))``: tests/ is no package.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import specmodel as sm

CALIBRATIONS = Path(__file__).resolve().parents[1] / "calibrations"
COMMITTED = tuple(sorted(CALIBRATIONS.glob("*/*.yaml")))
SEED = CALIBRATIONS / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
LOOP = "benchmark loop"
"""An engine name that says that nothing but the passes stands in a cycle."""


def document(cycles: Any = (), *, acceptance: Any = (), **sections: Any) -> dict[str, Any]:
    """A calibration file with these rows; `verify`, `draft`, `allreduce` and `prefill` are measurements, too."""
    measurements = {
        name: list(sections.pop(name)) for name in ("verify", "draft", "allreduce", "prefill") if name in sections
    }
    if cycles:
        measurements["cycles"] = list(cycles)
    whole = {"schema": "specmodel.calibration/1", "name": "synthetic", "measurements": measurements, **sections}
    if acceptance:
        whole["acceptance"] = list(acceptance)
    return whole


def calibration(cycles: Any = (), **sections: Any) -> Any:
    return sm.from_dict(document(cycles, **sections))


def fitted(cycles: Any = (), **sections: Any) -> Any:
    return sm.fit(calibration(cycles, **sections))


@functools.cache
def committed(path: Path) -> Any:
    """The model of a committed file; fitted once in a run."""
    return sm.fit(sm.load(path))


def plain(tok_s: float = 100.0, **more: Any) -> dict[str, Any]:
    return {"num_steps": 0, "tok_s": tok_s, **more}


def spec(
    num_steps: int, tok_s: float | None = None, acceptance_length: float | None = None, **more: Any
) -> dict[str, Any]:
    row: dict[str, Any] = {"num_steps": num_steps, **more}
    if tok_s is not None:
        row["tok_s"] = tok_s
    if acceptance_length is not None:
        row["acceptance_length"] = acceptance_length
    return row


@dataclass(frozen=True, kw_only=True)
class Truth:
    """One deployment, known exactly. Times in ms; shares are of the plain pass at batch 1."""

    pass_ms: float = 10.0
    tax: float = 0.04
    token: float = 0.01
    knee_tokens: float = 300.0
    kv: float = 0.01
    num_experts: int = 0
    experts_per_token: int = 0
    expert_share: float = 0.4
    overhead: float = 0.06
    draft_base: float = 0.003
    draft_step: float = 0.10
    draft_sequence: float = 0.01
    comm: dict[str, tuple[float, float]] = field(default_factory=lambda: {"default": (0.0, 0.0)})
    """What each communication setting adds: fixed, and per token after the first."""
    conditional: tuple[float, ...] = (0.8, 0.74, 0.70, 0.67, 0.65, 0.63, 0.62, 0.61, 0.60, 0.59, 0.58, 0.57)
    bumps: tuple[float, ...] = ()
    """Amplitudes of waves in ln(tokens): what kernels do beyond the named terms."""

    def verify_ms(self, tokens: float, batch: float = 1, comm: str = "default") -> float:
        """One pass over `tokens` of `batch` sequences."""
        on = tokens > batch
        weights = np.exp(self.tax * on)
        if self.num_experts:
            unused = 1.0 - self.experts_per_token / self.num_experts
            touched = (1.0 - unused**tokens) / (1.0 - unused)
            weights = (1.0 - self.expert_share) * np.exp(self.tax * on) + self.expert_share * touched
        roof = (weights**4 + (tokens / self.knee_tokens) ** 4) ** 0.25
        fixed, each = self.comm[comm]
        pass_ = roof + self.token * (tokens - 1) + self.kv * batch + fixed + each * (tokens - 1)
        wave = sum(a * np.sin((i + 1) * 1.7 * np.log(tokens) + i) for i, a in enumerate(self.bumps))
        return float(self.pass_ms * pass_ * np.exp(wave))

    def draft_ms(self, num_steps: int, batch: float = 1) -> float:
        """All draft passes of one cycle."""
        if num_steps == 0:
            return 0.0
        step = self.draft_step * num_steps * (1.0 + self.draft_sequence * (batch - 1))
        return float(self.pass_ms * (self.draft_base + step))

    def cycle_ms(self, num_steps: int, batch: float = 1, comm: str = "default") -> float:
        """One whole cycle."""
        overhead = self.pass_ms * self.overhead * (num_steps > 0)
        return self.verify_ms(batch * (num_steps + 1), batch, comm) + self.draft_ms(num_steps, batch) + overhead

    def length(self, num_steps: int) -> float:
        """Mean tokens of a cycle, the bonus token included."""
        return float(1.0 + np.cumprod(self.conditional[:num_steps]).sum())

    def tok_s(self, num_steps: int, batch: float = 1, comm: str = "default") -> float:
        """Total rate."""
        return 1000.0 * batch * self.length(num_steps) / self.cycle_ms(num_steps, batch, comm)

    def sections(self) -> dict[str, Any]:
        """What a file says of the deployment itself."""
        model: dict[str, Any] = {"method": "eagle3"}
        if self.num_experts:
            model |= {"num_experts": self.num_experts, "experts_per_token": self.experts_per_token}
        return {"model": model, "comm": {name: {} for name in self.comm}}


def drawn(random: np.random.Generator, *, moe: bool = False, settings: int = 1) -> Truth:
    """A deployment as the field has them."""

    def between(low: float, high: float) -> float:
        return float(np.exp(random.uniform(np.log(low), np.log(high))))

    level, fall = random.uniform(0.5, 0.85), random.uniform(0.0, 0.06)
    conditional = tuple(float(np.clip(level - fall * np.log(k), 0.05, 0.98)) for k in range(1, 25))
    comm = {"default": (0.0, 0.0)}
    comm |= {f"setting-{i}": (between(0.02, 0.2), between(0.003, 0.02)) for i in range(1, settings)}
    return Truth(
        pass_ms=between(2, 40),
        tax=random.uniform(0.0, 0.12),
        token=between(0.004, 0.025),
        knee_tokens=between(150, 600),
        kv=between(0.003, 0.03),
        num_experts=int(random.choice([64, 128, 256])) if moe else 0,
        experts_per_token=8 if moe else 0,
        expert_share=random.uniform(0.25, 0.6),
        overhead=between(0.02, 0.15),
        draft_base=between(0.001, 0.006),
        draft_step=between(0.04, 0.22),
        draft_sequence=between(0.006, 0.03),
        comm=comm,
        conditional=conditional,
        bumps=tuple(random.normal(0.0, 0.012, size=3)),
    )


def noisy(random: np.random.Generator, value: float, relative_sd: float) -> float:
    return float(value * np.exp(relative_sd * random.standard_normal()))


def measured_cycles(
    truth: Truth, random: np.random.Generator, places: Any, *, relative_sd: float = 0.01, lengths: bool = True
) -> list[dict[str, Any]]:
    """Rows of `measurements.cycles` at (num_steps, batch, comm) places; blind to acceptance without `lengths`."""
    rows = []
    for num_steps, batch, comm in places:
        row = {"num_steps": num_steps, "batch": batch, "comm": comm}
        length = truth.length(num_steps)
        if num_steps and lengths:
            # A run accepts what it accepts: its own length and its rate vary together.
            length = 1.0 + noisy(random, length - 1.0, 0.015)
            row["acceptance_length"] = max(length, 1.0)
        rate = 1000.0 * batch * length / truth.cycle_ms(num_steps, batch, comm)
        rows.append({**row, "tok_s": noisy(random, rate, relative_sd)})
    return rows


def counted(truth: Truth, random: np.random.Generator, num_steps: int, drafts: int, prompts: int) -> dict[str, Any]:
    """An acceptance entry of counts from prompts that differ from each other (intraclass correlation about 0.05)."""
    alive = np.repeat(random.normal(0.0, 1.0, size=prompts), drafts // prompts)
    accepted, running = [], np.ones(len(alive), dtype=bool)
    for k in range(num_steps):
        p = truth.conditional[k]
        shift = alive * np.sqrt(0.05 * p * (1.0 - p))
        running &= random.uniform(size=len(alive)) < np.clip(p + shift, 0.0, 1.0)
        accepted.append(int(running.sum()))
    return {"num_steps": num_steps, "drafts": len(alive), "prompts": prompts, "accepted_per_position": accepted}


def tables(truth: Truth, steps: Any, batches: Any = (1,), relative_sd: float | None = None) -> dict[str, Any]:
    """Exact verify and draft tables over all settings, as rows of `measurements`."""
    spread = {} if relative_sd is None else {"samples": 1}

    def row(time_ms: float, **more: Any) -> dict[str, Any]:
        sd = {} if relative_sd is None else {"sd_ms": time_ms * relative_sd}
        return {**more, "time_ms": time_ms, **sd, **spread}

    verify = [
        row(truth.verify_ms(b * (k + 1), b, c), tokens=b * (k + 1), batch=b, comm=c)
        for c in truth.comm
        for b in batches
        for k in steps
    ]
    draft = [
        row(truth.draft_ms(k, b), num_steps=k, batch=b, comm=c) for c in truth.comm for b in batches for k in steps if k
    ]
    return {"verify": verify, "draft": draft}


def identities(prediction: Any, batch: Any) -> None:
    """What holds of every prediction, exactly."""
    p = prediction
    numbers = [p.tok_s, p.tpot_ms, p.cycle_ms, p.verify_ms, p.overhead_ms, p.acceptance_length, p.speedup, p.draft_ms]
    assert all(np.all(np.isfinite(x)) for x in numbers)
    assert all(np.all(np.asarray(x) > 0.0) for x in numbers if x is not p.draft_ms and x is not p.overhead_ms)
    assert np.all(np.asarray(p.draft_ms) >= 0.0)
    assert np.all(np.asarray(p.overhead_ms) >= 0.0)
    assert np.all(np.asarray(p.acceptance_length) >= 1.0)
    np.testing.assert_allclose(p.cycle_ms, np.asarray(p.verify_ms) + p.draft_ms + p.overhead_ms, rtol=1e-9)
    np.testing.assert_allclose(p.tok_s, 1000.0 * np.asarray(batch) * p.acceptance_length / p.cycle_ms, rtol=1e-9)
    np.testing.assert_allclose(p.tpot_ms, 1000.0 * np.asarray(batch) / p.tok_s, rtol=1e-9)
    low, high = p.interval(0.9)
    assert np.all(np.isfinite(low) & np.isfinite(high))
    assert np.all(np.asarray(low) < np.asarray(high))
    assert np.all(np.asarray(low) > 0.0)


__all__ = [
    "CALIBRATIONS",
    "COMMITTED",
    "LOOP",
    "SEED",
    "Truth",
    "calibration",
    "committed",
    "counted",
    "document",
    "drawn",
    "fitted",
    "identities",
    "measured_cycles",
    "noisy",
    "plain",
    "replace",
    "spec",
    "tables",
]
