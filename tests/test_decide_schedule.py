"""From several optima to one schedule: ranges without gaps, one setting, and no change that is not worth it."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))

REAL = sm.optimize(cases.fitted([cases.plain(), cases.spec(3, 170.0, 2.4)]), max_steps=1)


def candidate(batch: float, num_steps: int, tok_s: float, comm: str = "default", **more: Any) -> Any:
    [one] = [c for c in REAL.table if c.num_steps == 0]
    new = {"batch": batch, "num_steps": num_steps, "num_draft_tokens": num_steps + 1, "tok_s": tok_s, "comm": comm}
    return cases.replace(one, **{**new, "extrapolated": False, **more})


def optimum(batch: float, rates: dict[Any, float], far: tuple[Any, ...] = ()) -> Any:
    """The optimum of a table of rates by number of steps, or by (number of steps, comm)."""
    named = {key if isinstance(key, tuple) else (key, "default"): rate for key, rate in rates.items()}
    apart = [key if isinstance(key, tuple) else (key, "default") for key in far]
    table = tuple(candidate(batch, k, rate, c, extrapolated=(k, c) in apart) for (k, c), rate in named.items())
    return cases.replace(REAL, batch=batch, table=table, best=max(table, key=lambda c: c.tok_s), ties=())


def steps_of(schedule: Any) -> list[tuple[float, float | None, int]]:
    return [(s.batch_from, s.batch_to, s.num_steps) for s in schedule]


def test_one_batch_is_one_range() -> None:
    assert steps_of(sm.schedule([optimum(8, {0: 100, 3: 180})])) == [(1, None, 3)]
    assert sm.schedule([]) == ()


def test_a_change_lies_between_the_batches_that_show_it() -> None:
    got = steps_of(sm.schedule([optimum(1, {0: 100, 3: 180}), optimum(16, {0: 900, 3: 800})]))
    assert [s[2] for s in got] == [3, 0]
    (_, end, _), (start, last, _) = got
    assert 1 <= end < 16
    assert start == end + 1
    assert last is None


def test_a_change_that_gains_little_is_not_made() -> None:
    first = optimum(1, {2: 180, 3: 181})
    assert len(sm.schedule([first, optimum(4, {2: 500.0, 3: 499.0})])) == 1
    assert len(sm.schedule([first, optimum(4, {2: 500.0, 3: 490.0})])) == 2
    # Small steps in one direction do not add up unseen: each is measured against the best of its own batch.
    drift = [optimum(b, {2: 100.0 * b, 3: 100.3 * b * (1 - 0.002 * i)}) for i, b in enumerate((1, 2, 4, 8, 16))]
    assert [s.num_steps for s in sm.schedule(drift)] == [3, 2]


def test_the_order_of_the_optima_does_not_matter() -> None:
    optima = [optimum(b, {0: 100 * b, 1: (140 - b) * b, 3: (180 - 4 * b) * b}) for b in (1, 4, 16, 32, 64)]
    want = sm.schedule(optima)
    assert len(want) == 3
    for order in itertools.islice(itertools.permutations(optima), 0, 120, 7):
        assert sm.schedule(order) == want


def test_one_setting_for_all_batches_the_one_that_loses_least() -> None:
    low = optimum(1, {(0, "default"): 100, (3, "default"): 180, (0, "ring"): 100, (3, "ring"): 190})
    high = optimum(16, {(0, "default"): 1000, (3, "default"): 900, (0, "ring"): 600, (3, "ring"): 500})
    got = sm.schedule([low, high])
    assert {s.comm for s in got} == {"default"}
    assert [s.num_steps for s in got] == [3, 0]
    mild = optimum(16, {(0, "default"): 1000, (3, "default"): 900, (0, "ring"): 990, (3, "ring"): 500})
    assert {s.comm for s in sm.schedule([low, mild])} == {"ring"}


def test_what_lies_too_far_is_not_scheduled() -> None:
    optima = [optimum(1, {0: 100, 3: 180, 9: 200}, far=(9,)), optimum(4, {0: 300, 3: 400, 9: 450}, far=(9,))]
    assert [s.num_steps for s in sm.schedule(optima)] == [3]


def test_trees_are_scheduled_as_trees() -> None:
    chain = optimum(1, {0: 100, 3: 170})
    tree = candidate(1, 3, 190.0, topk=4, num_draft_tokens=9)
    first = cases.replace(chain, table=(*chain.table, tree), best=tree)
    [step] = sm.schedule([first])
    assert (step.num_steps, step.topk, step.num_draft_tokens) == (3, 4, 9)


BATCHES = st.lists(st.one_of(st.integers(1, 300), st.floats(1, 300)), min_size=1, max_size=8)


@given(batches=BATCHES, seed=st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_ranges_are_contiguous_from_one_without_end(batches: list[float], seed: int) -> None:
    """Whatever batches were asked: sorted or not, equal, fractional, next to each other."""
    random = np.random.default_rng(seed)
    optima = [
        optimum(float(b), {(k, c): float(random.uniform(50, 200)) for k in (0, 1, 3) for c in ("default", "ring")})
        for b in batches
    ]
    got = sm.schedule(optima)
    assert got[0].batch_from == 1
    assert got[-1].batch_to is None
    for one, two in itertools.pairwise(got):
        assert one.batch_to is not None
        assert one.batch_from <= one.batch_to
        assert two.batch_from == one.batch_to + 1
        assert one.batch_to == int(one.batch_to)
        assert (one.num_steps, one.topk) != (two.num_steps, two.topk)
    assert len({s.comm for s in got}) == 1
    assert len(got) <= len(set(batches))


def test_of_a_real_deployment_the_schedule_falls_with_the_batch() -> None:
    """Verifying costs more where passes are compute-bound: fewer steps at larger batches, near the best at each."""
    truth = cases.Truth(knee_tokens=40.0, draft_step=0.04)
    places = [(k, b, "default") for b in (1, 8, 32, 96) for k in (0, 1, 3, 6)]
    model = cases.fitted(cases.measured_cycles(truth, np.random.default_rng(2), places, relative_sd=0.003))
    optima = [sm.optimize(model, batch=b) for b in (96, 1, 32, 8)]
    got = sm.schedule(optima)
    assert [s.num_steps for s in got] == sorted((s.num_steps for s in got), reverse=True)
    assert got[0].num_steps > got[-1].num_steps
    for b in (1, 8, 32, 96):
        [here] = [s for s in got if s.batch_from <= b and (s.batch_to is None or b <= s.batch_to)]
        assert truth.tok_s(here.num_steps, b) > 0.97 * max(truth.tok_s(k, b) for k in range(11))


def test_every_step_is_a_candidate() -> None:
    optima = [optimum(b, {0: 100 * b, 2: (150 - 2 * b) * b}) for b in (1, 50)]
    for s in sm.schedule(optima):
        assert (s.num_steps, s.comm) in {(c.num_steps, c.comm) for c in optima[0].table}


def test_equal_batches_are_one() -> None:
    twice = [optimum(4, {0: 100, 3: 180}), optimum(4, {0: 180, 3: 100})]
    assert steps_of(sm.schedule(twice))[0][0] == 1
    assert len(sm.schedule(twice)) == 1


def test_ranges_too_narrow_for_a_batch_are_left_out() -> None:
    """Three answers between two and three sequences: no whole batch lies between the first two changes."""
    optima = [
        optimum(b, {k: 200.0 if k == best else 100.0 for k in (0, 1, 2, 3)})
        for b, best in ((1, 0), (2.2, 1), (2.4, 2), (2.6, 3))
    ]
    got = sm.schedule(optima)
    assert got[0].batch_from == 1
    assert got[-1].num_steps == 3
    for one, two in itertools.pairwise(got):
        assert two.batch_from == one.batch_to + 1


def test_answers_without_a_common_setting_are_refused() -> None:
    apart = [optimum(1, {(0, "default"): 100}), optimum(4, {(0, "ring"): 100})]
    with pytest.raises(sm.UsageError, match="setting"):
        sm.schedule(apart)
    partly = [optimum(1, {(0, "default"): 100, (3, "ring"): 180}), optimum(4, {(0, "default"): 100})]
    assert {s.comm for s in sm.schedule(partly)} == {"default"}


def truth_and_model() -> tuple[Any, Any]:
    """A deployment whose best step count falls with the batch, measured at few batches."""
    truth = cases.Truth(knee_tokens=40.0, draft_step=0.04)
    places = [(k, b, "default") for b in (1, 8, 32, 96) for k in (0, 1, 2, 3, 4, 6)]
    return truth, cases.fitted(cases.measured_cycles(truth, np.random.default_rng(2), places, relative_sd=0.001))


def loss_at(truth: Any, got: Any, batch: int) -> float:
    [here] = [s for s in got if s.batch_from <= batch and (s.batch_to is None or batch <= s.batch_to)]
    return 1.0 - float(truth.tok_s(here.num_steps, batch) / max(truth.tok_s(k, batch) for k in range(7)))


def test_asking_the_model_between_batches_loses_less_beside_an_edge() -> None:
    truth, model = truth_and_model()
    optima = [sm.optimize(model, batch=b, max_steps=6) for b in (1, 8, 32, 96)]
    asked = sm.schedule(optima, model)
    losses = {
        name: [loss_at(truth, got, b) for b in range(1, 97)]
        for name, got in (("middle", sm.schedule(optima)), ("asked", asked))
    }
    assert max(losses["asked"]) < 0.5 * max(losses["middle"])
    assert float(np.mean(losses["asked"])) < 0.5 * float(np.mean(losses["middle"]))
    assert max(losses["asked"]) < 0.02


def test_at_the_answered_batches_the_model_changes_nothing() -> None:
    _, model = truth_and_model()
    optima = [sm.optimize(model, batch=b, max_steps=6) for b in (1, 8, 32, 96)]
    plainly, asked = sm.schedule(optima), sm.schedule(optima, model)
    for o in optima:
        held = [s for s in asked if s.batch_from <= o.batch and (s.batch_to is None or o.batch <= s.batch_to)]
        assert len(held) == 1
        rates = {c.num_steps: c.tok_s for c in o.table}
        assert rates[held[0].num_steps] >= 0.99 * o.best.tok_s
    assert plainly[0].batch_from == asked[0].batch_from == 1
    for one, two in itertools.pairwise(asked):
        assert two.batch_from == one.batch_to + 1
        assert one.num_steps != two.num_steps


def test_too_far_from_the_measured_batches_the_middle_is_kept() -> None:
    """Between batch 1 and 400 the model knows what lies within four times of either."""
    truth = cases.Truth(knee_tokens=40.0, draft_step=0.04)
    places = [(k, b, "default") for b in (1, 400) for k in (0, 1, 3)]
    model = cases.fitted(cases.measured_cycles(truth, np.random.default_rng(2), places, relative_sd=0.001))
    got = sm.schedule([sm.optimize(model, batch=b, max_steps=6) for b in (1, 400)], model)
    assert len(got) >= 2
    for s in got[1:]:
        assert s.batch_from <= 4 or s.batch_from == 21 or s.batch_from >= 100


def test_between_fractional_and_neighbouring_batches_nothing_is_asked() -> None:
    _, model = truth_and_model()
    for sizes in ((1.0, 2.0), (30.2, 30.7), (30.5, 31.0, 32.0), (1.0, 1.0)):
        got = sm.schedule([sm.optimize(model, batch=b, max_steps=6) for b in sizes], model)
        assert got[0].batch_from == 1
        assert got[-1].batch_to is None
