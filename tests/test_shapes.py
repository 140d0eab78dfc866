"""Which shapes are candidates, and the trees that the model proposes for numbers of tokens."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel import words
from specmodel.acceptance import best_tree
from specmodel.cli import main
from specmodel.shapes import BUDGETS, DEPTHS, PROPOSALS, WIDTHS, proposed_trees

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

CHAINS = fitted([plain(), spec(1, 140.0, 1.75), spec(3, 175.0, 2.5), spec(5, 180.0, 2.9)])
TREES = fitted(
    [plain(), spec(3, 175.0, 2.5), spec(3, 190.0, 2.9, topk=4, num_draft_tokens=8)],
)
# A pass costs the same for any number of tokens: the more the better.
WIDE = fitted(
    [plain(), spec(5, 150.0, 1.8)],
    verify=[{"tokens": t, "time_ms": 10.0} for t in (1, 2, 4, 8, 16, 32)],
    draft=[{"num_steps": k, "time_ms": 0.05 * k} for k in (1, 3, 5)],
    system={"engine": cases.LOOP},
)


@pytest.mark.parametrize("model", [CHAINS, TREES, WIDE], ids=["chains", "trees", "wide"])
def test_proposed_trees_are_the_fastest_of_their_size(model: Any) -> None:
    trees = proposed_trees(model, (1.0,))
    assert 1 <= len(trees) <= PROPOSALS
    assert len({n for _, _, n in trees}) == len(trees)
    for k, t, n in trees:
        assert n in BUDGETS
        assert t in WIDTHS
        assert k < n <= 1 + t + (k - 1) * t * t
        chosen = model.predict(k, topk=t, num_draft_tokens=n).tok_s
        others = [
            model.predict(depth, topk=width, num_draft_tokens=n).tok_s
            for depth in DEPTHS
            for width in WIDTHS
            if depth < n <= 1 + width + (depth - 1) * width * width and width < n and depth <= 2 * 5
        ]
        if model is not TREES:  # there depths end at 6, twice the longest measured
            assert chosen == pytest.approx(max(others), rel=1e-9)
    largest = max(s[2] for s in model.measured.speeds)
    if model is not WIDE:
        assert max(n for *_, n in trees) <= max(2 * largest, 8)


def test_a_proposed_tree_is_filled_by_the_largest_products() -> None:
    """The length that is predicted is that of the greedy tree, times the gain that trees share."""
    model = CHAINS
    k, t, n = proposed_trees(model, (1.0,))[-1]
    theta, layout = model.posteriors[0].theta, model.layout
    conditional = 1.0 / (1.0 + np.exp(-theta[layout.curve(0)]))
    ratio = float(1.0 / (1.0 + np.exp(-theta[layout.rank_ratio])))
    accepted = best_tree(conditional, ratio, k, t, n).length - 1.0
    length = model.predict(k, topk=t, num_draft_tokens=n).acceptance_length
    assert length - 1.0 == pytest.approx(accepted * np.exp(theta[layout.tree_gain]), rel=0.05)


def test_auto_adds_them_to_the_candidates_and_says_what_they_rest_on() -> None:
    optimum = sm.optimize(CHAINS, trees="auto")
    proposed = [(c.num_steps, c.topk, c.num_draft_tokens) for c in optimum.table if c.topk > 1]
    assert tuple(proposed) == proposed_trees(CHAINS, (1.0,), max_steps=10)
    assert not any(c.measured for c in optimum.table if c.topk > 1)
    assert any("no draft tree was measured" in w for w in optimum.warnings)
    assert not any("no draft tree" in w for w in sm.optimize(TREES, trees="auto").warnings)
    assert not any("no draft tree" in w for w in sm.optimize(CHAINS).warnings)
    # Nothing is known of second choices: the interval of a tree is wider than that of the chain of its depth.
    widths = {
        c.topk > 1: np.log(c.tok_s_interval[1] / c.tok_s_interval[0])
        for c in optimum.table
        if c.num_steps == proposed[0][0]
    }
    assert widths[True] > 1.5 * widths[False]


def test_trees_are_a_list_or_auto() -> None:
    for wrong in ("5x4x8", "all", 3):
        with pytest.raises(sm.UsageError, match="auto"):
            sm.optimize(CHAINS, trees=wrong)


def test_a_tree_is_not_recommended_while_none_was_measured() -> None:
    """Whatever the guesses say: where one comes out best, the answer is to measure it, and which chain is best."""
    for model, refused in ((CHAINS, True), (TREES, False)):
        optimum = sm.optimize(model, trees="auto")
        tree = next(c for c in optimum.table if c.topk > 1 and not c.measured)
        optimum = dataclasses.replace(optimum, best=tree)
        text = words.refusal(model, optimum, extrapolate=False)
        assert (text is not None) == refused
        assert words.refusal(model, optimum, extrapolate=True) is None
        if refused:
            assert "no draft tree was measured" in text
            last = words.answer_line(model, [optimum], (), [text])
            chain = max((c for c in optimum.table if c.topk == 1), key=lambda c: c.tok_s)
            assert last.startswith("No recommendation: tree ")
            assert f"of the chains, {words.name_of(chain)} is best" in last
            assert last.endswith("measure it, or trust it with --extrapolate")


def test_all_batches_choose_from_the_same_trees(capsys: pytest.CaptureFixture[str]) -> None:
    path = cases.CALIBRATIONS / "field" / "vllm_44697_mtp_pp4_pcie.yaml"
    for command in ("optimize", "predict"):
        main([command, str(path), "--trees", "auto", "--json"])
        answer = json.loads(capsys.readouterr().out)
        if command == "optimize":
            tables = [o["table"] for o in answer["optima"]]
            assert {c["topk"] for c in tables[0]} > {1}
            shapes = [[(c["num_steps"], c["topk"], c["num_draft_tokens"]) for c in table] for table in tables]
            assert all(s == shapes[0] for s in shapes)
        else:
            assert any(c["topk"] > 1 for c in answer["predictions"])
