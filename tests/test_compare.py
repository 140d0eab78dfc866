"""Comparison of two calibrations: what changed is clear of zero, what did not is not, and each is named once."""

import json
import math
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.compare import Comparison, compare
from specmodel.model import FittedModel


def fitted(
    *,
    plain_ms: float = 10.0,
    draft_ms: float = 1.0,
    acceptance: float = 0.7,
    batch: float = 1,
    comm: str = "default",
    workload: str = "default",
    context_tokens: int | None = None,
    seed: int = 1,
) -> FittedModel:
    """A model of cycles with known parts: a pass, 0.3 ms a verified token more, a draft, and 0.2 % noise."""
    random = np.random.default_rng(seed)

    def noisy(value: float) -> float:
        return value * math.exp(0.002 * random.standard_normal())

    place: dict[str, Any] = {"batch": batch, "comm": comm}
    place |= {} if context_tokens is None else {"context_tokens": context_tokens}
    cycles, verify, draft = [], [], []
    for k in range(6):
        length = sum(acceptance**i for i in range(k + 1))
        verify.append({"tokens": (k + 1) * int(batch), **place, "time_ms": noisy(plain_ms + 0.3 * k)})
        if k:
            draft.append({"num_steps": k, **place, "time_ms": noisy(draft_ms * k)})
        cycle_ms = noisy(plain_ms + 0.3 * k + draft_ms * k)
        known = {"acceptance_length": length, "workload": workload} if k else {}
        cycles.append({"num_steps": k, **place, "tok_s": 1000.0 * batch * length / cycle_ms, **known})
    document = {
        "schema": "specmodel.calibration/1",
        "name": f"seed-{seed}",
        "comm": {} if comm == "default" else {comm: {}},
        "measurements": {"cycles": cycles, "verify": verify, "draft": draft},
        "acceptance": [
            {"num_steps": 5, "workload": workload, "drafts": 20000, "accepted_per_position": counts(acceptance)}
        ],
    }
    return sm.fit(sm.from_dict(document))


def counts(acceptance: float) -> list[int]:
    return [round(20000 * acceptance**k) for k in range(1, 6)]


BEFORE = fitted()


def clear_terms(comparison: Comparison) -> set[str]:
    return {t.name.partition("[")[0] for t in comparison.terms if t.change.clear}


def at(comparison: Comparison, num_steps: int) -> Any:
    (found,) = [c for c in comparison.configurations if c.num_steps == num_steps]
    return found


def test_the_same_calibration_did_not_change() -> None:
    same = compare(BEFORE, BEFORE)
    assert all(t.change.change == 0.0 and not t.change.clear for t in same.terms)
    assert all(c.tok_s.change == 0.0 and not c.tok_s.clear for c in same.configurations)
    assert same.warnings == ()
    (pair,) = same.best
    assert pair[0] == pair[1]


def test_noise_alone_is_no_change() -> None:
    other = compare(BEFORE, fitted(seed=2))
    assert not clear_terms(other)
    assert sum(c.tok_s.clear for c in other.configurations) <= 1


def test_a_slower_draft_is_seen_where_it_is_and_not_elsewhere() -> None:
    found = compare(BEFORE, fitted(draft_ms=2.0, seed=3))
    assert "draft_step" in clear_terms(found)
    assert not clear_terms(found) & {"pass_ms", "conditional"}
    (step,) = [t for t in found.terms if t.name == "draft_step"]
    assert step.change.kind == "ratio"
    low, high = step.change.change_interval
    assert low < 1.0 < high  # twice as slow
    assert at(found, 0).tok_s.change == pytest.approx(0.0, abs=0.01)
    five = at(found, 5)
    assert five.tok_s.clear
    # 10 ms a pass, 1.5 ms for five verified tokens more, and 5 or 10 ms of drafts
    assert five.cycle_ms.change == pytest.approx(21.5 / 16.5 - 1.0, abs=0.01)
    assert five.acceptance_length.change == pytest.approx(0.0, abs=0.01)


def test_a_better_drafter_is_seen_in_the_acceptance_as_a_difference() -> None:
    found = compare(BEFORE, fitted(acceptance=0.8, seed=4))
    first = next(t for t in found.terms if t.name == "conditional[default][1]")
    assert first.change.kind == "difference"
    assert first.change.change == pytest.approx(0.1, abs=0.03)
    assert first.change.clear
    assert at(found, 5).acceptance_length.clear
    assert not at(found, 5).cycle_ms.clear


def test_changes_turn_round_with_their_order() -> None:
    other = fitted(draft_ms=2.0, seed=3)
    there, back = compare(BEFORE, other), compare(other, BEFORE)
    for a, b in zip(there.configurations, back.configurations, strict=True):
        assert math.log1p(a.tok_s.change) == pytest.approx(-math.log1p(b.tok_s.change))
        assert math.log1p(a.tok_s.change_interval[0]) == pytest.approx(-math.log1p(b.tok_s.change_interval[1]))
        assert a.tok_s.clear == b.tok_s.clear


def test_the_interval_of_a_change_is_wider_than_that_of_either() -> None:
    found = compare(BEFORE, fitted(seed=2))
    for c in found.configurations:
        low, high = (math.log1p(x) for x in c.tok_s.change_interval)
        for own in (c.tok_s.before_interval, c.tok_s.after_interval):
            assert high - low > math.log(own[1] / own[0])


def test_acceptance_is_compared_only_as_far_as_it_was_measured() -> None:
    positions = [t.name for t in compare(BEFORE, fitted(seed=2)).terms if t.name.startswith("conditional")]
    assert positions == [f"conditional[default][{k}]" for k in range(1, 6)]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"comm": "ring"}, "communication setting ring: only after"),
        ({"batch": 4}, "batch 1: only before"),
        ({"batch": 4}, "batch 4: only after"),
        ({"workload": "chat"}, "workload chat: only after"),
        ({"workload": "chat"}, "no workload is in both"),
        ({"context_tokens": 4096}, "context of None before and of 4096 after"),
    ],
)
def test_what_only_one_has_is_said(other: dict[str, Any], said: str) -> None:
    found = compare(BEFORE, fitted(seed=5, **other))
    assert any(said in text for text in found.warnings)
    assert found.configurations
    assert all(math.isfinite(c.tok_s.change) for c in found.configurations)


def test_the_best_before_and_after_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from specmodel.cli import main

    slow = fitted(draft_ms=6.0, acceptance=0.4, seed=6)
    (pair,) = compare(BEFORE, slow).best
    assert pair[0].num_steps > pair[1].num_steps
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for model, file in zip((BEFORE, slow), files, strict=True):
        sm.dump(model.calibration, file)
    assert main(["compare", *map(str, files), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"][0]["before"]["num_steps"] == pair[0].num_steps
    assert document["best"][0]["after"]["num_steps"] == pair[1].num_steps
    assert set(document) == {"schema", "before", "after", "terms", "configurations", "best", "warnings"}
    assert {t["name"] for t in document["terms"] if t["clear"]} >= {"draft_step"}
