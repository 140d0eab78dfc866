"""The seed case, from its file alone: each sentence about it is a test."""

from pathlib import Path
from typing import Any

import pytest

import specmodel as sm
from specmodel.decide import Candidate, Optimum
from specmodel.io import to_dict
from specmodel.model import FittedModel

SEED = Path(__file__).parents[1] / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
TUNED = "ring-ll-sys"


@pytest.fixture(scope="module")
def model() -> FittedModel:
    return sm.fit(sm.load(SEED))


@pytest.fixture(scope="module")
def optimum(model: FittedModel) -> Optimum:
    return sm.optimize(model)


def without(**row: Any) -> FittedModel:
    """The model of the file without the one cycle that has these values."""
    document = to_dict(sm.load(SEED))
    cycles = document["measurements"]["cycles"]
    kept = [c for c in cycles if any(c.get(key) != value for key, value in row.items())]
    assert len(kept) == len(cycles) - 1
    document["measurements"]["cycles"] = kept
    return sm.fit(sm.from_dict(document))


def candidate(optimum: Optimum, num_steps: int, comm: str) -> Candidate:
    (found,) = [c for c in optimum.table if (c.num_steps, c.topk, c.comm) == (num_steps, 1, comm)]
    return found


def test_it_recommends_two_steps_with_the_tuned_setting(optimum: Optimum) -> None:
    assert (optimum.best.num_steps, optimum.best.num_draft_tokens, optimum.best.comm) == (2, 3, TUNED)
    assert not optimum.best.extrapolated


def test_94_tok_s_lies_within_an_interval_of_at_most_ten_percent(optimum: Optimum) -> None:
    low, high = optimum.best.tok_s_interval
    assert low <= 94.0 <= high
    assert (high - low) / 94.0 <= 0.10


def test_it_is_about_six_percent_above_plain_decoding(optimum: Optimum) -> None:
    assert 1.045 <= optimum.best.speedup <= 1.075


def test_five_steps_with_the_default_setting_lose_to_plain_decoding(model: FittedModel, optimum: Optimum) -> None:
    five = candidate(optimum, 5, "default")
    assert five.tok_s_interval[1] < 88.0
    assert five.speedup < 1.0
    assert model.predict(5).tok_s < model.predict(0).tok_s


def test_a_free_draft_brings_three_to_four_percent_there(model: FittedModel) -> None:
    p = model.predict(5)
    assert 0.03 <= p.draft_ms / (p.cycle_ms - p.draft_ms) <= 0.04
    share, _, _ = model.interval_of("draft_share", 5)
    assert 0.03 <= 1.0 / (1.0 - share) - 1.0 <= 0.04


def test_with_the_wiring_fault_every_step_count_loses(model: FittedModel) -> None:
    faulty = sm.optimize(model, workload="wiring-fault")
    assert faulty.best.num_steps == 0
    assert all(c.speedup < 1.0 for c in faulty.table if c.num_steps)
    assert {c.comm for c in faulty.table} == {"default", TUNED}


def test_without_the_winning_row_its_interval_still_holds_it_and_the_gap_is_named() -> None:
    blind = without(num_steps=2, tok_s=94)
    low, high = blind.predict(2, comm=TUNED).interval(0.9)
    assert low <= 94.0 <= high
    answer = sm.optimize(blind)
    assert any("verify pass of 3 tokens" in text for text in answer.unmeasured)


def test_without_the_tuned_plain_row_that_row_is_to_be_measured_next() -> None:
    answer = sm.optimize(without(num_steps=0, comm=TUNED))
    assert answer.measure_next is not None
    assert answer.measure_next.kind == "cycles"
    assert answer.measure_next.row["num_steps"] == 0
    assert answer.measure_next.row["comm"] == TUNED
    assert answer.measure_next.gain_tok_s > 0.0
