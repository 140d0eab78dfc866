"""Check values on the cost of one verify pass: experts touched, weight bytes, tiles, captured graph sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmodel
from specmodel import cost, verify_forms
from specmodel.deployment import as_settings, deployment_of

DATA = Path(__file__).parent / "data" / "theory"
EXPERTS = json.loads((DATA / "distinct_experts.json").read_text())
VLLM_SIZES = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def printed(*texts: str) -> Any:
    """Values as printed: each may be off by half a unit of the last digit of the first."""
    half = 0.5000001 * 10.0 ** -len(texts[0].partition(".")[2])
    values = [float(text) for text in texts]
    return pytest.approx(values if len(values) > 1 else values[0], rel=0, abs=half)


# ----------------------------------------------------------------------------------------------------------- experts
@pytest.mark.parametrize("row", EXPERTS["rows"], ids=lambda row: f"{row['num_experts']}/{row['experts_per_token']}")
def test_distinct_experts(row: dict[str, Any]) -> None:
    touched = cost.distinct_experts(np.array(EXPERTS["tokens"]), row["num_experts"], row["experts_per_token"])
    assert list(touched) == printed(row["distinct"][0] + ".000", *row["distinct"][1:])


def test_every_expert_where_a_token_takes_all() -> None:
    assert list(cost.distinct_experts(np.array([1.0, 5.0]), 4, 4)) == [4.0, 4.0]
    assert verify_forms.distinct_experts_sd(3, 4, 4) == 0.0
    assert verify_forms.distinct_experts_sd(3, 1, 1) == 0.0


def test_spread_of_the_distinct_experts() -> None:
    assert verify_forms.distinct_experts_sd(8, 256, 8) == printed("2.193")


def touched_by_draws(probability: np.ndarray, tokens: int, per_token: int, rounds: int) -> np.ndarray:
    """Distinct experts over `rounds` passes whose tokens each draw without replacement, by Gumbel's trick."""
    rng = np.random.default_rng(7)
    keys = np.log(probability) + rng.gumbel(size=(rounds, tokens, len(probability)))
    chosen = np.argpartition(-keys, per_token, axis=-1)[..., :per_token].reshape(rounds, -1)
    chosen.sort(axis=1)
    return 1 + np.sum(np.diff(chosen, axis=1) > 0, axis=1)


@pytest.mark.parametrize(("num_experts", "per_token", "tokens"), [(256, 8, 8), (64, 8, 4), (8, 2, 3)])
def test_distinct_experts_of_drawn_tokens(num_experts: int, per_token: int, tokens: int) -> None:
    rounds = 4000
    touched = touched_by_draws(np.full(num_experts, 1.0 / num_experts), tokens, per_token, rounds)
    sd = float(verify_forms.distinct_experts_sd(tokens, num_experts, per_token))
    assert touched.mean() == pytest.approx(
        cost.distinct_experts(tokens, num_experts, per_token), abs=4.0 * sd / np.sqrt(rounds)
    )
    # The standard error of a variance of nearly normal counts is sqrt(2 / n) of it.
    assert touched.var() == pytest.approx(sd**2, rel=4.0 * np.sqrt(2.0 / rounds))


@pytest.mark.parametrize(
    ("exponent", "tokens", "touched"),
    [(0.5, 4, "29.65"), (0.5, 8, "54.30"), (1.0, 4, "23.60"), (1.0, 8, "39.51"), (1.0, 32, "99.53")],
)
def test_skewed_routing_touches_fewer(exponent: float, tokens: int, touched: str) -> None:
    popularity = verify_forms.power_law_popularity(256, 8, exponent)
    assert popularity.sum() == pytest.approx(8.0)
    assert popularity.max() <= 1.0
    assert verify_forms.distinct_experts_skewed(tokens, popularity) == printed(touched)
    assert verify_forms.distinct_experts_skewed(tokens, popularity) < cost.distinct_experts(tokens, 256, 8)


def test_even_popularity_is_uniform_routing() -> None:
    tokens = np.arange(1, 40)
    even = verify_forms.distinct_experts_skewed(tokens, verify_forms.power_law_popularity(128, 8, 0.0))
    assert even == pytest.approx(cost.distinct_experts(tokens, 128, 8), rel=1e-12)


@pytest.mark.parametrize(("overlap", "distinct"), [(0.38, "12.96"), (0.12, "15.04")])
def test_two_adjacent_tokens_that_share_experts(overlap: float, distinct: str) -> None:
    # Of 8 experts a token, both together touch 8 (2 - overlap): as many as this many tokens that share none.
    assert 8.0 * verify_forms.effective_tokens(2, overlap) == printed(distinct)


@pytest.mark.parametrize(
    ("share", "tokens", "ratio"),
    [
        (0.5, 2, "1.484"), (0.5, 4, "2.408"), (0.5, 8, "4.089"),
        (0.9, 2, "1.872"), (0.9, 4, "3.535"), (0.9, 8, "6.560"),
    ],
)  # fmt: skip
def test_weight_bytes_of_a_pass(share: float, tokens: int, ratio: str) -> None:
    assert verify_forms.weight_bytes_ratio(tokens, 256, 8, share) == printed(ratio)


@pytest.mark.parametrize(
    ("num_experts", "per_token", "tokens"),
    [(8, 2, "8"), (64, 8, "17.2"), (128, 8, "35.7"), (256, 8, "72.5"), (128, 4, "72.5"), (512, 10, "116.7")],
)
def test_tokens_that_touch_nine_tenths(num_experts: int, per_token: int, tokens: str) -> None:
    needed = verify_forms.tokens_to_touch(0.9, num_experts, per_token)
    assert needed == printed(tokens)
    assert cost.distinct_experts(needed, num_experts, per_token) == pytest.approx(0.9 * num_experts, rel=1e-12)


# ------------------------------------------------------------------------------------------------------ tiles, graphs
@pytest.mark.parametrize(
    ("width", "tokens", "rounds", "utilisation"),
    [
        (28672, 1, 2, ""), (28672, 64, 2, ""), (28672, 65, 4, ""), (28672, 128, 4, ""), (28672, 129, 6, ""),
        (28672, 192, 6, ""), (8192, 64, 1, ".485"), (8192, 128, 1, ".970"), (8192, 129, 2, ""),
    ],
)  # fmt: skip
def test_waves_of_tiles(width: int, tokens: int, rounds: int, utilisation: str) -> None:
    count = verify_forms.tiles(tokens, width, 64, 128)
    assert verify_forms.waves(count, 132) == rounds
    if utilisation:
        assert count / (132 * rounds) == printed(utilisation)


def padded(batch: float, num_steps: int, sizes: tuple[int, ...] = VLLM_SIZES) -> tuple[float, float]:
    """Tokens after padding to captured sizes, and 1.0 where the pass runs outside a graph."""
    model = {"cuda_graph_sizes": list(sizes), "cuda_graph_unit": "tokens"} if sizes else {}
    calibration = specmodel.from_dict({"schema": "specmodel.calibration/1", "name": "sizes", "model": model})
    settings = as_settings(
        num_steps=num_steps, verify_tokens=num_steps + 1, batch=batch, context_tokens=None, comm=0,
        speculating=1.0, topk=1, draft_mode=0, verify_eager=0.0,
    )  # fmt: skip
    points, _ = deployment_of(calibration).points(settings)
    return float(np.ravel(points.padded_tokens)[0]), float(np.ravel(points.verify_eager)[0])


@pytest.mark.parametrize(
    ("tokens", "size"),
    [(3, 4), (5, 8), (6, 8), (7, 8), (8, 8), (9, 16), (17, 24), (33, 40), (257, 272), (512, 512)],
)
def test_a_pass_is_padded_to_the_next_captured_size(tokens: int, size: int) -> None:
    assert len(VLLM_SIZES) == 51
    assert padded(tokens, 0) == (size, 0.0)


def test_a_pass_larger_than_any_captured_one_runs_eagerly_and_unpadded() -> None:
    assert padded(513, 0) == (513.0, 1.0)
    assert padded(171, 2) == (513.0, 1.0)


def test_nothing_is_padded_where_no_size_is_known() -> None:
    assert padded(513, 0, ()) == (513.0, 0.0)


@pytest.mark.parametrize(("num_steps", "size"), list(enumerate((8, 16, 16, 24, 32, 32, 40, 40, 48))))
def test_steps_that_cost_no_larger_graph(num_steps: int, size: int) -> None:
    assert padded(5, num_steps)[0] == size
    full = verify_forms.full_size_steps(5, VLLM_SIZES, 8)
    assert {2, 5, 7} <= set(full)  # one step more for the same graph than 1, 4 and 6
    assert (num_steps in full) == (num_steps == 8 or padded(5, num_steps + 1)[0] > size)
