"""What drafters of each kind reach and what a cycle usually costs in published deployments: yardsticks of a verdict.

The figures are quantiles over the deployments of `calibrations/field` (one number each: the median of its rows),
rounded to two digits; a test computes them again from those files. They judge what stands out, never a prediction.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["STEP_COST", "Reach", "acceptance_a_draft", "chain_length", "reach_of_kind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Acceptance of one draft (given those before it, the same at every position) of the drafters of one kind."""

    kind: str
    """As people write it."""
    low: float
    """Nine deployments in ten reach more."""
    typical: float
    """Median."""
    high: float
    """One deployment in ten reaches more."""
    deployments: int


_REACH = {
    "eagle3": Reach(kind="EAGLE-3", low=0.56, typical=0.74, high=0.82, deployments=11),
    "mtp": Reach(kind="MTP", low=0.61, typical=0.84, high=0.88, deployments=25),
    "parallel": Reach(kind="parallel", low=0.66, typical=0.72, high=0.78, deployments=5),
    # Four field deployments are few: the six models of EAGLE's Table 2 (arXiv 2401.15077) count too.
    "eagle": Reach(kind="EAGLE", low=0.58, typical=0.69, high=0.76, deployments=10),
    # The twelve settings of Leviathan et al. 2023 (arXiv 2211.17192), Table 2.
    "draft_model": Reach(kind="draft-model", low=0.55, typical=0.70, high=0.80, deployments=12),
}

# Cycle in plain steps beyond the first, per step of a chain at batch 4 or less.
STEP_COST = Reach(kind="cycle", low=0.10, typical=0.19, high=0.52, deployments=30)


def reach_of_kind(method: str | None) -> Reach | None:
    """What the drafters of a kind reach; None for n-gram drafters, which depend on the text, and unknown kinds."""
    return _REACH.get(method or "")


def chain_length(acceptance: float, num_steps: int) -> float:
    """Acceptance length of a chain each of whose drafts is accepted with the same probability: 1 + a + a^2 + ..."""
    return float(sum(acceptance**k for k in range(num_steps + 1)))


def acceptance_a_draft(length: float, num_steps: int) -> float:
    """The one acceptance a draft that gives an acceptance length on a chain; 0 to 1, and 1 where none is enough."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if chain_length(middle, num_steps) < length else (low, middle)
    return 0.5 * (low + high)
