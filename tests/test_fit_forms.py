"""Every form of a number informs the model as the format says, and equal statements in different forms agree."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

LENGTH = {"num_steps": 3, "acceptance_length": 2.5}
BATCH, RATE = 8, 1400.0
PLAIN = plain(800.0, batch=BATCH)


def at(model: Any, num_steps: int = 3, batch: float = BATCH, **more: Any) -> tuple[float, float]:
    """Prediction and relative width of its 90 % interval."""
    p = model.predict(num_steps, batch, **more)
    low, high = p.interval(0.9)
    return p.tok_s, float(np.log(high / low))


def with_speed(**speed: Any) -> Any:
    rows = [PLAIN, {"num_steps": 3, "batch": BATCH, "acceptance_length": 2.5, **speed}] if speed else [PLAIN]
    return fitted(rows, acceptance=[LENGTH])


WITHOUT = with_speed()
SPEEDS = {
    "tok_s": {"tok_s": RATE},
    "tpot_ms": {"tpot_ms": 1000.0 * BATCH / RATE},
    "cycle_ms": {"cycle_ms": 1000.0 * BATCH * 2.5 / RATE},
}
RANGES = {
    "range_tok_s": [RATE / 1.05, RATE * 1.05],
    "range_tpot_ms": [1000.0 * BATCH / RATE / 1.05, 1000.0 * BATCH / RATE * 1.05],
    "range_cycle_ms": [2500.0 * BATCH / RATE / 1.05, 2500.0 * BATCH / RATE * 1.05],
}


@pytest.mark.parametrize("speed", SPEEDS.values(), ids=SPEEDS)
def test_a_speed_is_learnt_in_every_form(speed: dict[str, float]) -> None:
    value, width = at(with_speed(**speed))
    assert value == pytest.approx(RATE, rel=0.02)
    assert width < 0.4 * at(WITHOUT)[1]
    assert value == pytest.approx(at(with_speed(tok_s=RATE))[0], rel=1e-6)


@pytest.mark.parametrize("form", RANGES)
def test_a_range_is_its_middle_with_less_certainty(form: str) -> None:
    value, width = at(with_speed(**{form: RANGES[form]}))
    assert value == pytest.approx(RATE, rel=0.03)
    assert at(with_speed(tok_s=RATE))[1] < width < at(WITHOUT)[1]
    wide = [RATE / 1.5, RATE * 1.5]
    assert width < at(with_speed(range_tok_s=wide))[1]


def test_a_range_without_width_is_a_value() -> None:
    assert at(with_speed(range_tok_s=[RATE, RATE])) == pytest.approx(at(with_speed(tok_s=RATE)), rel=1e-6)


@pytest.mark.parametrize("form", SPEEDS)
def test_sd_and_samples_say_how_sure(form: str) -> None:
    value = SPEEDS[form][form]
    said = {}
    for relative, samples in ((0.2, 1), (0.2, 16), (0.05, 1), (0.0, 1)):
        said[relative, samples] = at(with_speed(**{form: value, f"sd_{form}": relative * value, "samples": samples}))[1]
    assert said[0.2, 1] > said[0.2, 16]
    assert said[0.2, 16] == pytest.approx(said[0.05, 1], rel=1e-3)
    assert said[0.05, 1] > said[0.0, 1]
    assert said[0.2, 1] < at(WITHOUT)[1]


def test_an_upper_bound_moves_the_rate_below_it() -> None:
    free, width = at(WITHOUT)
    for share in (0.5, 0.8, 0.95):
        model = with_speed(tok_s_at_most=share * free)
        value, bounded = at(model)
        assert value < 1.01 * share * free
        assert bounded < width
        assert model.predict(3, BATCH).interval(0.5)[0] < share * free


def test_a_bound_that_is_not_reached_changes_nothing() -> None:
    far = with_speed(tok_s_at_most=50.0 * RATE)
    for num_steps in (0, 1, 3, 6):
        assert at(far, num_steps) == pytest.approx(at(WITHOUT, num_steps), rel=1e-3)


def test_bounds_do_not_state_a_speed() -> None:
    model = with_speed(tok_s_at_most=0.8 * at(WITHOUT)[0])
    rows = {(c.num_steps, c.measured) for c in sm.optimize(model, batch=BATCH).table}
    assert (0, True) in rows
    assert (3, False) in rows


def test_a_rate_without_acceptance_informs_the_ratio_only() -> None:
    """Neither the cycle nor the length is known better than their ratio."""
    model = fitted([PLAIN, spec(3, RATE, batch=BATCH)])
    _, width = at(model)
    _, low, high = model.interval_of("cycle_ms", 3, BATCH)
    _, short, long = model.interval_of("acceptance_length", 3, BATCH)
    assert np.log(high / low) > 2.0 * width
    assert np.log(long / short) > 2.0 * width
    assert at(model)[0] == pytest.approx(RATE, rel=0.02)


CONDITIONAL = (0.8, 0.75, 0.7, 0.66, 0.63)
SURVIVAL = tuple(float(x) for x in np.cumprod(CONDITIONAL))
ENTRIES = {
    "counts": {"drafts": 10**6, "accepted_per_position": [round(1e6 * s) for s in SURVIVAL]},
    "survival": {"survival": list(SURVIVAL), "sd": 0.0005},
    "conditional": {"conditional": list(CONDITIONAL), "sd": 0.0005},
    "length": {"acceptance_length": 1.0 + sum(SURVIVAL), "sd": 0.001},
}


@pytest.mark.parametrize("form", ENTRIES)
def test_acceptance_is_learnt_in_every_form(form: str) -> None:
    model = fitted([plain()], acceptance=[{"num_steps": 5, **ENTRIES[form]}])
    assert model.predict(5).acceptance_length == pytest.approx(1.0 + sum(SURVIVAL), rel=0.01)
    middle, low, high = model.interval_of("acceptance_length", 5)
    assert low < middle < high
    assert np.log(high / low) < 0.05
    if form != "length":
        for k in range(1, 6):
            assert model.predict(k).acceptance_length == pytest.approx(1.0 + sum(SURVIVAL[:k]), rel=0.01)


def test_positions_say_more_of_short_chains_than_the_length_of_a_long_one() -> None:
    widths = {}
    for form in ("counts", "length"):
        model = fitted([plain()], acceptance=[{"num_steps": 5, **ENTRIES[form]}])
        _, low, high = model.interval_of("acceptance_length", 2)
        widths[form] = np.log(high / low)
    assert widths["counts"] < 0.5 * widths["length"]


def test_more_drafts_more_certainty_and_fewer_prompts_less() -> None:
    def width(**more: Any) -> float:
        drafts = more["drafts"]
        counts = [round(drafts * s) for s in SURVIVAL]
        model = fitted([plain()], acceptance=[{"num_steps": 5, "accepted_per_position": counts, **more}])
        _, low, high = model.interval_of("acceptance_length", 5)
        return float(np.log(high / low))

    assert width(drafts=50) > width(drafts=500) > width(drafts=5000)
    assert width(drafts=5000, prompts=5) > 1.5 * width(drafts=5000, prompts=5000)
    assert width(drafts=5000, prompts=5000) == pytest.approx(width(drafts=5000), rel=0.02)


def test_counts_have_their_binomial_width() -> None:
    """Against the known answer: with a vast prior, sd of ln E[N] from independent conditionals (delta method)."""
    drafts = 400
    counts = [round(drafts * s) for s in SURVIVAL]
    model = fitted([plain()], acceptance=[{"num_steps": 5, "drafts": drafts, "accepted_per_position": counts}])
    survival = np.array(counts) / drafts
    length = 1.0 + survival.sum()
    covariance = (np.minimum.outer(survival, survival) - np.outer(survival, survival)) / drafts
    _, low, high = model.interval_of("acceptance_length", 5, level=0.6826894921370859)
    assert np.log(high / low) / 2 == pytest.approx(np.sqrt(covariance.sum()) / length, rel=0.25)


def test_where_drafting_stops_early_attempts_are_the_trials() -> None:
    """Four in five are accepted at every position, but only 40 and 10 % of the cycles draft a second and a third."""
    reach = (1.0, 0.4, 0.1)
    accepted = [round(1e5 * r * 0.8**k) for k, r in enumerate(reach, start=1)]
    early = {"drafted_per_position": [round(1e5 * r) for r in reach]}
    length = 1.0 + sum(accepted) / 1e5
    got = {}
    for name, more in (("early", early), ("always", {})):
        entry = {"num_steps": 3, "drafts": 100_000, "accepted_per_position": accepted, **more}
        model = fitted([plain()], acceptance=[entry])
        assert model.predict(3).acceptance_length == pytest.approx(length, rel=0.01), "what was counted is predicted"
        terms = {t.name: t.value for t in model.terms}
        got[name] = [terms[f"conditional[default][{k}]"] for k in (1, 2, 3)]
    assert got["early"] == pytest.approx([0.8, 0.8, 0.8], abs=0.02), "a draft that was made is as good as the first"
    assert got["always"] == pytest.approx([0.8, 0.4 * 0.8, 0.25 * 0.8], abs=0.02)


@pytest.mark.parametrize(
    "entry",
    [
        {"drafts": 100, "accepted_per_position": [0, 0, 0]},
        {"drafts": 100, "accepted_per_position": [100, 100, 100]},
        {"drafts": 1, "accepted_per_position": [0]},
        {"drafts": 5, "drafted_per_position": [5, 0, 0], "accepted_per_position": [5, 0, 0]},
        {"survival": [0.0, 0.0, 0.0]},
        {"survival": [1.0, 1.0, 1.0], "sd": 0.0},
        {"survival": [0.5, 0.52, 0.53]},
        {"conditional": [1.0, 0.0, 1.0]},
        {"conditional": [0.5], "sd": 5.0},
        {"acceptance_length": 1.0},
        {"acceptance_length": 4.0, "sd": 0.0},
    ],
    ids=lambda e: "-".join(f"{k}={v}" for k, v in e.items()).replace(" ", ""),
)
def test_extreme_acceptance_is_finite_and_within_bounds(entry: dict[str, Any]) -> None:
    model = fitted([plain()], acceptance=[{"num_steps": 3, **entry}])
    p = model.predict(np.arange(12))
    cases.identities(p, 1)
    assert np.all(p.acceptance_length <= np.arange(12) + 1 + 1e-9)
    assert all(q.converged for q in model.posteriors)
    sm.optimize(model)


def test_nothing_accepted_nothing_gained_and_all_accepted_all_gained() -> None:
    none, everything = (
        fitted([plain()], acceptance=[{"num_steps": 4, "drafts": 5000, "accepted_per_position": [n] * 4}])
        for n in (0, 5000)
    )
    assert none.predict(4).acceptance_length == pytest.approx(1.0, abs=0.01)
    assert everything.predict(4).acceptance_length == pytest.approx(5.0, abs=0.05)
    assert sm.optimize(none).best.num_steps == 0
    assert sm.optimize(everything, max_steps=4).best.num_steps >= 3


def test_trees_by_rank_and_depth() -> None:
    """A wider tree accepts more than its first ranks alone, and is compared with chains on one scale."""
    counts = {"drafts": 10_000, "accepted_by_rank": [[6000, 1500, 400, 100], [4000, 700, 200, 50], [2500, 300]]}
    entry = {"num_steps": 3, "topk": 4, "num_draft_tokens": 12, **counts}
    model = fitted([plain(), spec(3, 160.0, topk=4, num_draft_tokens=12)], acceptance=[entry])
    stated = 1.0 + (8000 + 4950 + 2800) / 10_000
    tree = model.predict(3, topk=4, num_draft_tokens=12)
    assert tree.acceptance_length == pytest.approx(stated, rel=0.05)
    assert tree.acceptance_length > model.predict(3).acceptance_length
    assert tree.tok_s == pytest.approx(160.0, rel=0.03)
    optimum = sm.optimize(model, trees=[(3, 4, 12)])
    [row] = [c for c in optimum.table if c.topk == 4]
    assert (row.num_steps, row.num_draft_tokens, row.measured) == (3, 12, True)


def test_what_speculation_costs_when_nothing_is_drafted() -> None:
    """`speculation: true` at K = 0 is the machinery's own cost: it informs drafting settings, not plain decoding."""
    rows = [plain(), spec(3, 110.0, 2.5)]
    cheap, costly = (fitted([*rows, {"num_steps": 0, "speculation": True, "tok_s": t}]) for t in (99.0, 70.0))
    assert costly.predict(0).tok_s == pytest.approx(100.0, rel=0.02)
    one = [m.predict(1, acceptance_length=1.7).cycle_ms for m in (cheap, costly)]
    assert one[1] > 1.03 * one[0]
    assert one[1] > 0.98 * 1000.0 / 70.0  # drafting comes on top
    widths = [np.diff(np.log(m.predict(1, acceptance_length=1.7).interval())) for m in (fitted(rows), costly)]
    assert widths[1] < widths[0]
    assert costly.measured.plain_rate(1.0, None, ("default",)).tok_s == pytest.approx(100.0)
    alone = fitted([{"num_steps": 0, "speculation": True, "tok_s": 70.0}])
    assert alone.measured.plain_rate(1.0, None, ("default",)) is None


def test_where_drafts_stop_early_a_cycle_costs_what_it_drafts() -> None:
    """Eight allowed, 2.5 drafted on average: a cycle like that of a chain of two or three, not of eight."""
    row = {"num_steps": 8, "tok_s": 180.0, "acceptance_length": 2.5, "mean_draft_tokens": 2.5}
    model = fitted([plain(), row])
    cycle = 1000.0 * 2.5 / 180.0
    two, three, eight = (model.predict(k).cycle_ms for k in (2, 3, 8))
    assert 0.9 * two < cycle < 1.1 * three
    assert eight > 1.1 * cycle
    full = fitted([plain(), {**row, "mean_draft_tokens": 8}])
    assert full.predict(8).cycle_ms == pytest.approx(cycle, rel=0.05)
    zero = fitted([plain(), {**row, "mean_draft_tokens": 0}])
    cases.identities(zero.predict(np.arange(9)), 1)


@pytest.mark.parametrize("trigger", [0.9, 0.45, 0.1])
def test_an_ngram_drafter_finds_a_match_now_and_then_and_offers_mixed_widths(trigger: float) -> None:
    """Cycles without a match verify one token, those with one as many as the match was long, up to the limit.

    The rate is tokens over time, each averaged over the cycles one by one: the truth is their enumeration.
    """
    widths, c, limit = np.array([1, 2, 4, 6]), 0.8, 6

    def truth(most: int) -> tuple[float, float]:
        """Mean tokens and mean time of a cycle that offers at most so many drafts."""
        offered = np.append(np.minimum(widths, most), 0)
        share = np.append(np.full(len(widths), trigger / len(widths)), 1.0 - trigger)
        tokens = np.array([1.0 + sum(c**k for k in range(1, w + 1)) for w in offered])
        cycle_ms = 20.0 * (1.0 + 0.02 * offered) + 0.05 * offered
        return float(share @ tokens), float(share @ cycle_ms)

    drafted = [trigger * float(np.mean(widths >= k)) for k in range(1, limit + 1)]
    entry = {
        "num_steps": limit,
        "drafts": 100_000,
        "drafted_per_position": [round(1e5 * r) for r in drafted],
        "accepted_per_position": [round(1e5 * r * c**k) for k, r in enumerate(drafted, start=1)],
    }
    rows = [plain(50.0), *({"num_steps": k, "cycle_ms": truth(k)[1]} for k in (1, limit))]
    model = fitted(rows, acceptance=[entry], model={"method": "ngram"}, system={"engine": cases.LOOP})
    for most in (2, 3, 4, 5):
        tokens, cycle_ms = truth(most)
        p = model.predict(most)
        assert p.acceptance_length == pytest.approx(tokens, rel=0.005)
        assert p.cycle_ms == pytest.approx(cycle_ms, rel=0.01)
        low, high = p.interval(0.9)
        assert low < 1000.0 * tokens / cycle_ms < high
    # A drafter that seldom finds anything costs what plain decoding does, and gains as little.
    assert model.predict(limit).tok_s / 50.0 - 1.0 == pytest.approx(
        20.0 * truth(limit)[0] / truth(limit)[1] - 1.0, abs=0.02
    )


def test_eager_passes_are_a_mode_of_their_own() -> None:
    """Rows outside CUDA graphs inform the eager prediction, and do not slow the captured one."""
    rows = [plain(), spec(3, 180.0, 2.5), spec(3, 120.0, 2.5, cuda_graph=False), plain(60.0, verify_cuda_graph=False)]
    model = fitted(rows)
    assert model.predict(3).tok_s == pytest.approx(180.0, rel=0.03)
    assert model.predict(3, cuda_graph=False).tok_s == pytest.approx(120.0, rel=0.03)
    assert model.predict(0).tok_s == pytest.approx(100.0, rel=0.03)
    assert model.predict(0, verify_cuda_graph=False).tok_s == pytest.approx(60.0, rel=0.03)
    slower = model.predict(5, cuda_graph=[True, False], verify_cuda_graph=[True, False]).tok_s
    assert slower[1] < slower[0]
    drafts = fitted(
        [plain()], draft=[{"num_steps": 3, "time_ms": 2.0}, {"num_steps": 3, "time_ms": 6.0, "cuda_graph": False}]
    )
    np.testing.assert_allclose(drafts.predict(3, cuda_graph=[True, False]).draft_ms, [2.0, 6.0], rtol=0.02)


@pytest.mark.parametrize("scope", ["step", "cycle"])
def test_drafts_of_either_graph_scope_are_predicted(scope: str) -> None:
    """A file whose drafter runs one graph a step, or one a cycle, is predicted as it ran."""
    rows = [plain(), *[spec(k, t, a, graph_scope=scope) for k, t, a in ((1, 140, 1.7), (3, 180, 2.5), (5, 190, 3.0))]]
    draft = [{"num_steps": k, "time_ms": 0.3 + 0.5 * k, "graph_scope": scope} for k in (1, 3, 5)]
    model = fitted(rows, draft=draft)
    np.testing.assert_allclose(model.predict([1, 3, 5]).draft_ms, [0.8, 1.8, 2.8], rtol=0.02)
    low, high = model.predict(3).interval()
    assert np.log(high / low) < 0.1


def test_two_graph_scopes_in_one_file_do_not_contradict_each_other() -> None:
    model = fitted(
        [plain(), spec(3, 180.0, 2.5)],
        draft=[{"num_steps": 3, "time_ms": 2.0}, {"num_steps": 3, "time_ms": 1.6, "graph_scope": "cycle"}],
    )
    assert model.predict(3).draft_ms == pytest.approx(2.0, rel=0.02)


def test_ranks_share_the_batch() -> None:
    """Sixteen sequences on eight ranks pass through a rank as two do; tok_s counts all ranks."""
    truth = cases.Truth()
    rows = [
        spec(k, 4 * truth.tok_s(k, b), batch=4 * b, acceptance_length=truth.length(k)) for k in (0, 3) for b in (1, 4)
    ]
    model = fitted(rows, system={"data_parallel": 4})
    alone = fitted([{**r, "batch": r["batch"] / 4, "tok_s": r["tok_s"] / 4} for r in rows])
    for k in (0, 2, 3):
        for b in (1, 2, 4):
            p, q = model.predict(k, 4 * b), alone.predict(k, b)
            assert p.cycle_ms == pytest.approx(q.cycle_ms, rel=1e-3)
            assert p.tok_s == pytest.approx(4 * q.tok_s, rel=1e-3)
    fewer = model.predict(3, [1, 2, 4])
    np.testing.assert_allclose(fewer.cycle_ms, fewer.cycle_ms[2], rtol=1e-9)
    verify = fitted((), verify=[{"tokens": 4, "batch": 1, "time_ms": 7.0}], system={"data_parallel": 4})
    assert verify.predict(3, 4).verify_ms == pytest.approx(7.0, rel=0.02)


def test_passes_are_padded_to_captured_tokens() -> None:
    model = fitted([plain(), spec(3, 170.0, 2.5)], model={"cuda_graph_sizes": [1, 4, 8, 16]})
    verify = model.predict(np.arange(16)).verify_ms
    assert len(set(verify[4:8])) == 1
    assert len(set(verify[8:])) == 1
    assert verify[8] > verify[7]
    beyond = model.predict([15, 16])
    assert list(beyond.extrapolated) == [True, True]  # sixteen steps are more than twice the three measured
    assert beyond.verify_ms[1] > beyond.verify_ms[0]


def test_passes_are_padded_to_captured_sequences() -> None:
    sizes = {"cuda_graph_sizes": [1, 4, 8], "cuda_graph_unit": "sequences"}
    model = fitted([plain(), spec(3, 500.0, 2.5, batch=4)], model=sizes)
    p = model.predict(3, [2, 3, 4, 5, 8, 9])
    assert len(set(p.cycle_ms[:3])) == 1
    assert len(set(p.cycle_ms[3:5])) == 1
    assert list(p.extrapolated) == [False, False, False, False, False, True]
    assert any("captured" in w for w in p.warnings)


def test_an_eager_pass_is_not_padded() -> None:
    """Padding is what a captured graph costs; without graphs a pass runs at its own size."""
    model = fitted([plain(), spec(3, 170.0, 2.5)], model={"cuda_graph_sizes": [1, 8]})
    verify = model.predict(np.arange(1, 8), verify_cuda_graph=False).verify_ms
    assert np.all(np.diff(verify) > 0)


def test_longer_contexts_cost_more() -> None:
    rows = [plain(), plain(60.0, context_tokens=32_768), plain(96.0, context_tokens=1024), spec(3, 180.0, 2.5)]
    model = fitted([{"context_tokens": 1024, **r} if "context_tokens" not in r else r for r in rows[1:]])
    p = model.predict(0, context_tokens=[0, 1024, 8192, 32_768])
    assert np.all(np.diff(p.tok_s) < 0)
    np.testing.assert_allclose(p.tok_s[[1, 3]], [96.0, 60.0], rtol=0.03)
    assert model.predict(3, context_tokens=32_768).tok_s < model.predict(3, context_tokens=1024).tok_s
    low, high = model.predict(3, context_tokens=[1024, 32_768]).interval()
    assert np.log(high / low)[1] > np.log(high / low)[0]


def test_a_context_says_nothing_where_none_is_stated() -> None:
    model = fitted([plain(), spec(3, 180.0, 2.5)])
    p = model.predict(3, context_tokens=[0, 1, 10_000])
    assert len(set(p.tok_s)) == 1


def test_an_all_reduce_curve_transfers_a_pass_between_settings() -> None:
    """Two settings differ by their all-reduces: the pass of one, and the curves, predict the pass of the other."""
    sizes = {"hidden_size": 8192, "num_layers": 40}
    each = {"default": 0.030, "ring": 0.012}
    rows = [
        {"size_bytes": 16_384 * n, "comm": comm, "time_ms": time_ms * (1 + 0.02 * n)}
        for comm, time_ms in each.items()
        for n in (1, 2, 4, 8, 16)
    ]
    verify = [{"tokens": n, "time_ms": 20.0 + 0.1 * n + 80 * 0.030 * (1 + 0.02 * n)} for n in (1, 2, 4, 8)]
    model = fitted((), verify=verify, allreduce=rows, model=sizes, comm={"ring": {}}, system={"engine": cases.LOOP})
    expected = np.array([20.0 + 0.1 * n + 80 * 0.012 * (1 + 0.02 * n) for n in (1, 2, 4, 8)])
    p = model.predict([0, 1, 3, 7], comm="ring", acceptance_length=1.0)
    np.testing.assert_allclose(p.verify_ms, expected, rtol=0.04)
    low, high = (1000.0 / x for x in p.interval())
    assert np.all((high < expected + p.draft_ms + p.overhead_ms) & (expected < low))


def test_workloads_share_the_cost_and_differ_in_acceptance() -> None:
    rows = [plain(), spec(3, 150.0, 2.0, workload="chat"), spec(3, 255.0, 3.4, workload="code")]
    model = fitted(rows, workloads={"chat": {"weight": 3}, "code": {"weight": 1}})
    chat, code = (model.predict(3, workload=w) for w in ("chat", "code"))
    assert (chat.acceptance_length, code.acceptance_length) == pytest.approx((2.0, 3.4), rel=0.02)
    both = model.predict(3, workload={"chat": 3, "code": 1})
    harmonic = 1.0 / (0.75 / chat.acceptance_length + 0.25 / code.acceptance_length)
    assert both.acceptance_length == pytest.approx(harmonic, rel=1e-6)
    default = model.predict(3)
    assert default.acceptance_length == pytest.approx(both.acceptance_length, rel=1e-9)
    assert any("chat 75%" in w and "code 25%" in w for w in default.warnings)
    assert not both.warnings


def test_acceptance_does_not_depend_on_the_machine() -> None:
    """What one batch or setting says of acceptance holds for the others."""
    rows = [plain(), plain(350.0, batch=4), spec(3, 200.0, 3.1, batch=1)]
    model = fitted(rows, comm={"ring": {}})
    lengths = [model.predict(3, b, c).acceptance_length for b in (1, 4, 16) for c in ("default", "ring")]
    assert len(set(lengths)) == 1
    assert lengths[0] == pytest.approx(3.1, rel=0.02)
