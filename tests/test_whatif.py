"""What-ifs: no change changes nothing, known answers of the seed case, identities, and honest intervals."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm
from specmodel.acceptance import constant_acceptance_length
from specmodel.errors import UsageError
from specmodel.parts import verify_terms
from specmodel.whatif import situation, suppose, sweep, whatif

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

COUNTED = [{"num_steps": 4, "drafts": 5000, "accepted_per_position": [3500, 2200, 1300, 700]}]
SEED = cases.committed(cases.SEED)
RICH = fitted(
    [
        plain(context_tokens=2048),
        spec(3, 170.0, 2.4, context_tokens=2048),
        spec(5, 160.0, context_tokens=2048),
        spec(3, 500.0, 2.4, batch=4, context_tokens=4096),
        spec(3, 190.0, 2.4, comm="ring", context_tokens=2048),
        spec(3, 180.0, 2.6, topk=4, num_draft_tokens=9, context_tokens=2048),
    ],
    verify=[{"tokens": 4, "time_ms": 11.0, "context_tokens": 2048}],
    draft=[{"num_steps": 5, "time_ms": 4.0}],
    acceptance=COUNTED,
    comm={"ring": {}},
    model={"num_experts": 64, "experts_per_token": 4},
)
PLAIN_ONLY = fitted([plain()])
NOTHING = fitted()
MIXED = fitted(
    [spec(3, 170.0, 2.9, workload="code"), spec(3, 130.0, 2.0, workload="chat")],
    acceptance=[{**COUNTED[0], "workload": "chat"}],
)
SITUATIONS = {
    "seed": situation(SEED),
    "seed-default": situation(SEED, comm="default"),
    "rich": situation(RICH),
    "plain-only": situation(PLAIN_ONLY),
    "nothing": situation(NOTHING),
    "mixed": situation(MIXED, workload={"code": 0.4, "chat": 0.6}),
}
NO_CHANGE = ((), ("verify*=1", "draft*=1"), ("acceptance+=0", "acceptance_length*=1"), ("bandwidth*=1",))


def find(outcome: Any, num_steps: int, comm: str, topk: int = 1) -> Any:
    (found,) = [c for c in outcome.table if (c.num_steps, c.comm, c.topk) == (num_steps, comm, topk)]
    return found


# ------------------------------------------------------------------------------------------------------- no change
@pytest.mark.parametrize("changes", NO_CHANGE, ids=str)
@pytest.mark.parametrize("name", SITUATIONS)
def test_no_change_gives_the_answer_of_optimize(name: str, changes: tuple[str, ...]) -> None:
    before = SITUATIONS[name]
    result = suppose(before, changes)
    assert (result.after.best.num_steps, result.after.best.comm) == (
        before.optimum.best.num_steps,
        before.optimum.best.comm,
    )
    for c, same in zip(before.optimum.table, result.after.table, strict=True):
        assert same.tok_s == pytest.approx(c.tok_s, rel=1e-6)
        assert same.tok_s_interval == pytest.approx(c.tok_s_interval, rel=1e-6)
        assert same.probability_best == pytest.approx(c.probability_best, abs=2e-3)
        assert same.speedup == pytest.approx(c.speedup, rel=1e-6)
    assert result.speedup == pytest.approx(1.0, rel=1e-6)
    assert result.interval == pytest.approx((1.0, 1.0), rel=1e-6)


def test_before_is_what_optimize_says() -> None:
    assert whatif(SEED, "draft=0").before.table == sm.optimize(SEED).table


@pytest.mark.parametrize("batch", [4, 32])
def test_a_change_of_place_is_the_answer_there(batch: int) -> None:
    there, result = sm.optimize(RICH, batch=batch), whatif(RICH, f"batch={batch}")
    assert result.after.best.num_steps == there.best.num_steps
    assert result.after.best.tok_s == pytest.approx(there.best.tok_s, rel=1e-9)
    assert result.after.best.tok_s_interval == pytest.approx(there.best.tok_s_interval, rel=1e-6)
    assert result.after.batch == batch
    assert result.after.best.extrapolated == there.best.extrapolated
    ring = whatif(RICH, "comm=ring").after
    assert {c.comm for c in ring.table} == {"ring"}
    assert ring.best.tok_s == pytest.approx(sm.optimize(RICH, comm="ring").best.tok_s)


def test_fixed_steps_are_kept() -> None:
    result = suppose(SITUATIONS["seed"], "num_steps=4")
    assert result.after.best.num_steps == 4
    assert result.after.best == result.kept
    assert suppose(SITUATIONS["seed"], "num_steps+=1").after.best.num_steps == 3
    long = suppose(SITUATIONS["seed"], "num_steps=14")
    assert long.after.best.num_steps == 14
    with pytest.raises(UsageError, match="num_steps"):
        suppose(SITUATIONS["seed"], "num_steps-=3")


# ------------------------------------------------------------------------------------------------------- the seed case
def test_even_a_free_draft_model_brings_at_most_3_7_percent() -> None:
    """The case study: "infinitely fast draft: +3.7 %", a closed path; that is at five steps, and less at two."""
    five = whatif(SEED, ["num_steps=5", "draft=0"], comm="default")
    own = whatif(SEED, ["num_steps=5"], comm="default")
    assert five.after.best.tok_s / own.after.best.tok_s == pytest.approx(1.0 / (1.0 - 0.87 / 27.0), rel=0.002)
    chosen = whatif(SEED, "draft=0")
    assert 1.0 < chosen.kept_gain.speedup < chosen.kept_gain.interval[1] < 1.037
    assert chosen.speedup >= chosen.kept_gain.speedup


def test_a_verify_pass_of_0_73_explains_what_the_tuned_setting_brings() -> None:
    """Five steps lose to plain decoding under the default setting and draw level when verify takes 27 % less.

    In the study verify takes 95 % of 27 ms there: the cycle becomes 27 * (1 - 0.27 * 0.95) = 20 ms.
    """
    default = situation(SEED, comm="default")
    before = find(default.optimum, 5, "default")
    result = suppose(default, ["num_steps=5", "verify*=0.73"])
    after = result.kept
    assert before.cycle_ms == pytest.approx(27.0, rel=0.01)
    assert after.cycle_ms == pytest.approx(27.0 * (1.0 - 0.27 * 0.95), rel=0.02)
    assert before.speedup < 0.8
    assert 0.95 < after.speedup < 1.06
    measured = find(sm.optimize(SEED), 5, "ring-ll-sys")
    assert after.tok_s_interval[0] < measured.tok_s_interval[1]
    assert measured.tok_s_interval[0] < after.tok_s_interval[1]


def test_better_acceptance_pays_more_steps() -> None:
    result = suppose(SITUATIONS["seed"], "acceptance+=0.2")
    assert result.after.best.num_steps > result.before.best.num_steps
    assert result.speedup >= result.kept_gain.speedup > 1.1


# ------------------------------------------------------------------------------------------------------- identities
@pytest.mark.parametrize("name", SITUATIONS)
@pytest.mark.parametrize("factor", [0.0, 0.5, 0.73, 2.0])
@pytest.mark.parametrize("part", ["verify", "draft", "overhead"])
def test_amdahl(name: str, part: str, factor: float) -> None:
    """At kept steps a part of share s that takes f of its time brings ``1 / (1 - s + s f)``."""
    before = SITUATIONS[name]
    result = suppose(before, f"{part}*={factor}")
    for c, after in zip(before.optimum.table, result.after.table, strict=True):
        share = getattr(c, f"{part}_ms") / c.cycle_ms if c.num_steps else 0.0
        assert after.tok_s / c.tok_s == pytest.approx(1.0 / (1.0 - share * (1.0 - factor)), rel=1e-9)


@pytest.mark.parametrize("name", ["seed", "rich", "mixed"])
def test_one_acceptance_everywhere_has_the_closed_form(name: str) -> None:
    for alpha in (0.0, 0.3, 0.9, 1.0):
        result = suppose(SITUATIONS[name], f"acceptance={alpha}")
        for c in result.after.table:
            if c.topk == 1:
                expected = float(constant_acceptance_length(alpha, c.num_steps))
                assert c.acceptance_length == pytest.approx(expected, rel=1e-9)
    assert suppose(SITUATIONS[name], "acceptance=0").after.best.num_steps == 0


def test_lengths_stay_possible() -> None:
    for change in ("acceptance_length=9", "acceptance_length*=10", "acceptance=1", "acceptance+=1"):
        for name in ("seed", "rich"):
            for c in suppose(SITUATIONS[name], change).after.table:
                most = min(c.num_steps + 1, c.num_draft_tokens) if c.num_steps else 1
                assert 1.0 <= c.acceptance_length <= most + 1e-9
    for c in suppose(SITUATIONS["seed"], "acceptance_length-=5").after.table:
        assert c.acceptance_length == 1.0


def test_a_value_that_is_set_is_that_of_the_chosen_steps() -> None:
    before = SITUATIONS["seed"].optimum
    result = suppose(SITUATIONS["seed"], ["verify=25", "draft=1", "overhead=0.5", "acceptance_length=2"])
    kept = result.kept
    assert (kept.verify_ms, kept.draft_ms, kept.overhead_ms) == pytest.approx((25.0, 1.0, 0.5))
    assert kept.acceptance_length == pytest.approx(2.0)
    factor = 25.0 / before.best.verify_ms
    for c, after in zip(before.table, result.after.table, strict=True):
        if c.num_steps:
            assert after.verify_ms == pytest.approx(c.verify_ms * factor)
    # Everything is set: nothing is left to be uncertain of.
    assert kept.cycle_ms == pytest.approx(26.5)


def test_changes_act_in_their_order() -> None:
    twice = suppose(SITUATIONS["seed"], ["verify=20", "verify*=2", "verify-=10"]).kept
    assert twice.verify_ms == pytest.approx(30.0)
    other = suppose(SITUATIONS["seed"], ["verify-=10", "verify*=2", "verify=20"]).kept
    assert other.verify_ms == pytest.approx(20.0)


def test_what_was_taken_away_can_be_set_again() -> None:
    result = suppose(SITUATIONS["seed"], ["overhead=0", "overhead=2", "draft*=0", "draft=0.5"])
    assert (result.kept.overhead_ms, result.kept.draft_ms) == pytest.approx((2.0, 0.5))
    assert find(result.after, 0, "default").draft_ms == 0.0


def test_plain_decoding_changes_with_the_machine_only() -> None:
    for name in ("seed", "rich"):
        before = SITUATIONS[name]
        for change in ("verify*=0.5", "draft=0", "overhead=0", "acceptance=0.9", "acceptance_length*=2"):
            result = suppose(before, change)
            assert result.after.plain_tok_s == before.optimum.plain.tok_s
            assert find(result.after, 0, "default").tok_s == find(before.optimum, 0, "default").tok_s
        faster = suppose(before, "bandwidth*=2")
        assert faster.after.plain_tok_s > 1.2 * before.optimum.plain.tok_s
        assert find(faster.after, 0, "default").speedup == pytest.approx(
            find(before.optimum, 0, "default").speedup, rel=0.2
        )


def test_terms_of_the_machine() -> None:
    """At the posterior mean the terms are those of `verify_terms`, scaled to the measured pass."""
    before = SITUATIONS["rich"]
    request = before.middle.request
    terms = verify_terms(RICH, request)
    shown = sum(terms[n] for n in terms if n not in ("residual", "padding"))
    table = before.optimum.table
    verify = np.array([c.verify_ms for c in table])
    without = np.array([c.verify_ms for c in suppose(before, "allreduce=0").after.table])
    np.testing.assert_allclose(without, verify * (1.0 - terms["allreduce"] / shown), rtol=1e-6)
    half = np.array([c.verify_ms for c in suppose(before, "bandwidth*=2").after.table])
    read = (terms["fixed_pass"] + terms["experts"] + terms["attention_kv"]) / shown
    assert np.all(half >= verify * (1.0 - read) + 0.5 * verify * read - 1e-9)
    assert np.all(half < verify)
    far = np.array([c.verify_ms for c in suppose(before, "bandwidth*=1000000").after.table])
    assert np.all(far < half)
    faster = suppose(before, "compute*=2").after.table
    assert all(a.verify_ms <= c.verify_ms + 1e-12 for a, c in zip(faster, table, strict=True))


def test_trees_change_with_acceptance_too() -> None:
    before = SITUATIONS["rich"]
    tree = find(before.optimum, 3, "default", topk=4)
    better = find(suppose(before, "acceptance+=0.1").after, 3, "default", topk=4)
    worse = find(suppose(before, "acceptance-=0.1").after, 3, "default", topk=4)
    assert worse.acceptance_length < tree.acceptance_length < better.acceptance_length <= 4.0


# ------------------------------------------------------------------------------------------------------- intervals
def test_the_interval_of_a_change_is_that_of_the_ratio() -> None:
    """The speed is uncertain by some percent; what a change of acceptance brings at kept steps is not."""
    result = suppose(SITUATIONS["seed"], "acceptance+=0.1")
    low, high = result.kept_gain.interval
    marginal = result.kept.tok_s_interval[1] / result.kept.tok_s_interval[0]
    assert high / low < 0.1 * (marginal - 1.0) + 1.0
    assert low <= result.kept_gain.speedup <= high


def test_pairs_across_places_share_their_parameters() -> None:
    """A ratio across batches is known better than two independent speeds would let it be."""
    result = whatif(RICH, "batch=4")
    now, then = (np.log(c.tok_s_interval[1] / c.tok_s_interval[0]) for c in (result.before.best, result.after.best))
    low, high = result.interval
    assert np.log(high / low) < np.hypot(now, then)
    assert low < result.speedup < high


def test_setting_a_part_takes_its_uncertainty_away() -> None:
    before = suppose(SITUATIONS["nothing"], "num_steps=3").kept
    result = suppose(
        SITUATIONS["nothing"], ["num_steps=3", "verify=20", "draft=2", "overhead=1", "acceptance_length=2"]
    )
    wide, narrow = (np.log(c.tok_s_interval[1] / c.tok_s_interval[0]) for c in (before, result.kept))
    assert narrow < 0.3 * wide
    assert result.kept.tok_s == pytest.approx(1000.0 * 2.0 / 23.0)


def test_what_is_supposed_was_not_measured() -> None:
    before = SITUATIONS["seed"]
    assert before.optimum.best.measured
    assert not suppose(before, "draft=0").after.best.measured
    assert suppose(before, ()).after.best.measured


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        (["bandwidth*=2"], "at most"),
        (["draft=0", "bandwidth*=2"], "at most"),
        (["bandwidth/=2"], "at worst"),
        (["compute*=2"], ""),
        (["verify*=0.8"], ""),
    ],
)
def test_a_bound_is_called_one(changes: list[str], bound: str) -> None:
    result = suppose(SITUATIONS["seed"], changes)
    assert result.bound == bound
    assert bool(bound) == any("the most that it" in w for w in result.warnings)


# ------------------------------------------------------------------------------------------------------- warnings
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["verify=15"], "verify=15: ms at 2 steps, 0."),
        (["verify-=100"], "less than nothing would be left"),
        (["acceptance+=0.7"], "a probability would leave 0 to 1"),
        (["acceptance_length=7"], "clipped to what is possible, 1 to 3 tokens"),
        (["bandwidth*=2"], "count as bound by memory"),
        (["draft=0", "overhead=0", "acceptance=1"], "longest chain looked at"),
        (["batch=64"], "batch 64 is outside the measured"),
        (["context_tokens=8192"], "the file states no context"),
    ],
)
def test_what_a_reader_has_to_know_is_said(changes: list[str], words: str) -> None:
    result = suppose(SITUATIONS["seed"], changes)
    assert any(words in w for w in result.warnings), result.warnings


def test_a_batch_with_another_context_says_so() -> None:
    assert any("set context_tokens to compare alike" in w for w in whatif(RICH, "batch=4").warnings)
    alike = whatif(RICH, "batch=4", context_tokens=2048)
    assert not any("compare alike" in w for w in alike.warnings)
    assert alike.after.context_tokens == 2048


def test_a_point_far_from_what_was_measured_is_marked() -> None:
    assert whatif(SEED, "batch=64").after.best.extrapolated
    assert not whatif(SEED, "draft=0").after.best.extrapolated


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing would be left of a cycle"):
        suppose(SITUATIONS["seed"], ["verify=0", "draft=0", "overhead=0"])
    with pytest.raises(UsageError, match="use one of: default, ring-ll-sys"):
        suppose(SITUATIONS["seed"], "comm=tree")
    with pytest.raises(UsageError, match="no context is known"):
        suppose(SITUATIONS["seed"], "context_tokens*=2")
    with pytest.raises(UsageError, match="batch must"):
        suppose(SITUATIONS["seed"], "batch-=1")
    with pytest.raises(UsageError, match="one batch"):
        whatif(SEED, "draft=0", batch={1: 0.5, 2: 0.5})  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- any change
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["verify", "draft", "overhead", "allreduce"]), st.just("*="), st.floats(0.05, 20.0)),
        st.tuples(st.sampled_from(["verify", "draft"]), st.just("="), st.floats(0.1, 100.0)),
        st.tuples(st.sampled_from(["verify", "overhead"]), st.sampled_from(["+=", "-="]), st.floats(0.0, 5.0)),
        st.tuples(st.sampled_from(["bandwidth", "compute"]), st.just("*="), st.floats(0.1, 10.0)),
        st.tuples(st.just("acceptance"), st.sampled_from(["=", "+=", "-=", "*="]), st.floats(0.0, 1.0)),
        st.tuples(st.just("acceptance_length"), st.sampled_from(["=", "+=", "*="]), st.floats(1.0, 5.0)),
    ),
    max_size=3,
)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(SITUATIONS)), CHANGES)
def test_any_change_keeps_the_identities(name: str, parts: list[tuple[str, str, float]]) -> None:
    changes = [f"{t}{op}{v:.6g}" for t, op, v in parts]
    result = suppose(SITUATIONS[name], changes, every=10)
    for c in result.after.table:
        assert c.cycle_ms == pytest.approx(c.verify_ms + c.draft_ms + c.overhead_ms, rel=1e-9)
        assert c.tok_s == pytest.approx(1000.0 * c.batch * c.acceptance_length / c.cycle_ms, rel=1e-9)
        assert min(c.verify_ms, c.draft_ms, c.overhead_ms) >= 0.0
        assert 1.0 <= c.acceptance_length <= (min(c.num_steps + 1, c.num_draft_tokens) if c.num_steps else 1) + 1e-9
        assert 0.0 < c.tok_s_interval[0] <= c.tok_s * (1 + 1e-9)
        assert c.tok_s <= c.tok_s_interval[1] * (1 + 1e-9)
        assert np.isfinite(c.tok_s_interval[1])
    assert sum(c.probability_best for c in result.after.table) == pytest.approx(1.0)
    assert result.interval[0] <= result.speedup <= result.interval[1]
    plain_rows = [c for c in result.after.table if c.num_steps == 0]
    assert all(c.acceptance_length == 1.0 and c.draft_ms == 0.0 for c in plain_rows)


@pytest.mark.parametrize("name", sorted(SITUATIONS))
@pytest.mark.parametrize("taken", [0.5, 2.0, 4.0, 8.0, 16.0])
def test_what_was_taken_away_in_some_draws_can_be_set_again(name: str, taken: float) -> None:
    result = suppose(SITUATIONS[name], [f"verify-={taken}", "verify=1"], every=10)
    chosen = next(c for c in result.after.table if c.num_steps == result.kept.num_steps)
    assert all(c.verify_ms >= 0.0 and np.isfinite(c.tok_s) for c in result.after.table)
    assert chosen.cycle_ms == pytest.approx(chosen.verify_ms + chosen.draft_ms + chosen.overhead_ms, rel=1e-9)


# ------------------------------------------------------------------------------------------------------- sweeps
def test_a_sweep_is_the_what_ifs_of_its_values() -> None:
    result = sweep(SEED, "acceptance+=-0.1:0.2:0.1", ["draft*=0.5"])
    assert [c.values for c in result.cells] == [(-0.1,), (0.0,), (0.1,), (0.2,)]
    one = suppose(SITUATIONS["seed"], ["draft*=0.5", "acceptance+=0.1"], every=4)
    assert result.cells[2].best == one.after.best
    assert result.cells[2].gain == one.gain
    speedups = [c.speculative.speedup for c in result.cells]
    assert speedups == sorted(speedups)
    assert result.before.best == SITUATIONS["seed"].optimum.best


def test_two_axes_run_over_every_pair() -> None:
    result = sweep(SEED, ["verify*=0.8,1.2", "num_steps=1,2,5"])
    assert [c.values for c in result.cells] == [(v, k) for v in (0.8, 1.2) for k in (1.0, 2.0, 5.0)]
    assert all(c.best.num_steps == c.values[1] for c in result.cells)
    across = sweep(RICH, ["batch=1,4", "acceptance+=0,0.1"])
    assert [c.best.batch for c in across.cells] == [1.0, 1.0, 4.0, 4.0]


def test_what_is_no_sweep_is_refused() -> None:
    for axes in (
        [],
        ["batch=1,2", "draft*=0,1", "verify*=1,2"],
        ["verify*=1,2", "verify*=1,2"],
        ["verify*=1,2", "verify+=1,2"],
    ):
        with pytest.raises(UsageError):
            sweep(SEED, axes)
    with pytest.raises(UsageError, match="at most 625"):
        sweep(SEED, ["verify*=0:1:0.01", "draft*=0:1:0.1"])
    with pytest.raises(UsageError, match="batch is set twice"):
        sweep(SEED, "batch=1,2", ["batch=4"])
