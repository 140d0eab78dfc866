"""Joint draws of the parts of the cycle: the same draws as those of tok/s, taken apart."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specmodel.cost import cost, draft_terms, parameter_names, verify_terms
from specmodel.deployment import flattened
from specmodel.errors import UsageError
from specmodel.parts import TERMS, chain_lengths, conditional_draws, curves_of, draw_parts, draw_with_parameters
from specmodel.parts import verify_terms as terms_of_model

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec, fitted = cases.plain, cases.spec, cases.fitted

COUNTED = [{"num_steps": 4, "drafts": 5000, "accepted_per_position": [3500, 2200, 1300, 700]}]
MODELS = {
    "seed": cases.committed(cases.SEED),
    "rich": fitted(
        [plain(), spec(3, 170.0, 2.4), spec(5, 160.0), spec(3, 500.0, 2.4, batch=4), spec(3, 190.0, 2.4, comm="ring")],
        verify=[{"tokens": 4, "time_ms": 11.0, "context_tokens": 2048}],
        draft=[{"num_steps": 5, "time_ms": 4.0}],
        acceptance=COUNTED,
        comm={"ring": {}},
        model={"num_experts": 64, "experts_per_token": 4},
    ),
    "trees": fitted(
        [plain(), spec(3, 150.0, 2.3, topk=4, num_draft_tokens=9), spec(5, 140.0, 2.6, topk=2, num_draft_tokens=8)]
    ),
    "nothing": fitted(),
    "workloads": fitted(
        [spec(3, 170.0, 2.9, workload="code"), spec(3, 130.0, 2.0, workload="chat")],
        acceptance=[{**COUNTED[0], "workload": "chat"}],
    ),
    "padded": fitted(
        [plain(), spec(2, 150.0, 2.2), spec(4, 170.0, 2.6)],
        model={"cuda_graph_sizes": [4, 8, 16], "cuda_graph_unit": "tokens"},
    ),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def request_of(model: Any) -> Any:
    return model.request(np.arange(7), [[1.0], [4.0]], model.comm_names)[0]


def test_tok_s_of_a_draw_is_that_of_the_model(model: Any) -> None:
    request = request_of(model)
    parts = draw_parts(model, request, 300)
    np.testing.assert_allclose(parts.tok_s, model.draws(request, 300), rtol=1e-10)
    np.testing.assert_allclose(parts.cycle_ms, parts.verify_ms + parts.draft_ms + parts.overhead_ms, rtol=1e-14)


def test_parts_are_positive_and_what_is_absent_is_zero(model: Any) -> None:
    parts = draw_parts(model, request_of(model), 200)
    drafting = np.tile(np.arange(7) > 0, 2 * len(model.comm_names))
    assert np.all(parts.verify_ms > 0.0)
    assert np.all(parts.draft_ms[:, drafting] > 0.0)
    assert np.all(parts.draft_ms[:, ~drafting] == 0.0)
    assert np.all(parts.overhead_ms[:, ~drafting] == 0.0)
    assert np.all(parts.acceptance_length[:, ~drafting] == 1.0)
    assert all(np.all(np.isfinite(x)) for x in (parts.verify_ms, parts.draft_ms, parts.overhead_ms, parts.tok_s))


def test_the_same_call_gives_the_same_draws(model: Any) -> None:
    request = request_of(model)
    first, again = draw_parts(model, request, 50), draw_parts(model, request, 50)
    assert np.array_equal(first.verify_ms, again.verify_ms)
    assert np.array_equal(first.at(np.array([1, 3])).draft_ms, first.draft_ms[:, [1, 3]])


def test_parts_that_the_data_fix_have_the_models_intervals() -> None:
    model = MODELS["seed"]
    request, _ = model.request(np.arange(6), 1.0, "default")
    parts = draw_parts(model, request, 4000)
    for quantity in ("cycle_ms", "draft_ms", "acceptance_length"):
        middle, low, high = model.interval_of(quantity, 3)
        drawn = np.quantile(getattr(parts, quantity)[:, 3], (0.5, 0.05, 0.95))
        np.testing.assert_allclose(np.log(drawn / middle), np.log(np.array([middle, low, high]) / middle), atol=4e-3)


def test_parts_that_only_a_sum_fixes_move_against_each_other() -> None:
    """The cycle is measured and its parts are not: their draws differ far more than their sum does."""
    model = fitted([plain(), *(spec(3, 170.0, 2.5) for _ in range(3))])
    parts = draw_parts(model, model.request(3)[0], 2000)
    spread = {name: np.std(np.log(getattr(parts, name)[:, 0])) for name in ("verify_ms", "draft_ms", "cycle_ms")}
    assert spread["cycle_ms"] < 0.5 * spread["verify_ms"]
    assert spread["draft_ms"] > spread["verify_ms"]
    assert np.corrcoef(parts.verify_ms[:, 0], parts.draft_ms[:, 0] + parts.overhead_ms[:, 0])[0, 1] < -0.7


def test_a_ratio_that_only_speeds_fix_is_known_better_than_its_parts() -> None:
    """A tok/s whose acceptance length is unknown fixes the ratio: length and cycle of a draw go together."""
    model = fitted([plain(), spec(3, 170.0), spec(3, 171.0), spec(3, 169.0)])
    parts = draw_parts(model, model.request(3)[0], 2000)
    length, cycle = np.log(parts.acceptance_length[:, 0]), np.log(parts.cycle_ms[:, 0])
    assert np.corrcoef(length, cycle)[0, 1] > 0.8
    assert np.std(length - cycle) < 0.5 * np.std(length)


def test_tables_are_reproduced() -> None:
    """Verify and draft tables: the draws stand at their entries, within the noise of a table entry."""
    verify = [{"tokens": n, "time_ms": t, "sd_ms": 0.01} for n, t in ((1, 10.0), (2, 10.6), (3, 12.4), (4, 12.5))]
    draft = [{"num_steps": k, "time_ms": t, "sd_ms": 0.005} for k, t in ((1, 0.9), (2, 1.7), (3, 2.6))]
    model = fitted([plain()], verify=verify, draft=draft, acceptance=COUNTED)
    parts = draw_parts(model, model.request(np.arange(4))[0], 2000)
    np.testing.assert_allclose(np.median(parts.verify_ms, axis=0), [10.0, 10.6, 12.4, 12.5], rtol=0.01)
    np.testing.assert_allclose(np.median(parts.draft_ms, axis=0)[1:], [0.9, 1.7, 2.6], rtol=0.01)
    # Most draws; the linear cycle of a few lies below verify and draft, as nothing is known of the overhead.
    low, high = np.quantile(parts.draft_ms[:, 1:], (0.25, 0.75), axis=0)
    assert np.all(high / low < 1.02)


def test_conditional_draws_make_the_acceptance_length_of_a_chain() -> None:
    for name in ("seed", "rich"):
        model = MODELS[name]
        request, _ = model.request(np.arange(1, 5))
        conditional = conditional_draws(model, None, 4, 400)
        assert conditional.shape == (400, 4)
        length = 1.0 + np.cumsum(np.cumprod(conditional, axis=1), axis=1)
        np.testing.assert_allclose(length, draw_parts(model, request, 400).acceptance_length, rtol=4e-3)


def test_conditional_draws_of_a_mixture_give_its_harmonic_length() -> None:
    model = MODELS["workloads"]
    mixture = {"code": 0.3, "chat": 0.7}
    request, _ = model.request(np.arange(1, 4), workload=mixture)
    conditional = conditional_draws(model, mixture, 3, 200, request)
    assert np.all((conditional >= 0.0) & (conditional <= 1.0))
    _, parameters = draw_with_parameters(model, request, 200)
    shares, _ = model.mixture(mixture)
    each = {
        w: chain_lengths(model, curves_of(model, parameters, {w: 1.0}, 3), {w: 1.0})
        for w in curves_of(model, parameters, shares, 3)
    }
    expected = 1.0 / sum(shares[w] / each[w] for w in shares)
    length = 1.0 + np.cumsum(np.cumprod(conditional, axis=1), axis=1)
    np.testing.assert_allclose(length, expected[:, 1:], rtol=1e-12)


def test_conditional_draws_past_the_curve_repeat_its_end_and_none_are_refused() -> None:
    model = MODELS["rich"]
    request, _ = model.request(2)
    positions = model.layout.positions + 3
    conditional = conditional_draws(model, None, positions, 50, request)
    np.testing.assert_allclose(conditional[:, -1], conditional[:, model.layout.positions - 1], rtol=1e-9)
    with pytest.raises(UsageError, match="positions must be at least 1"):
        conditional_draws(model, None, 0)


def test_a_length_that_the_caller_gives_is_taken() -> None:
    model = MODELS["rich"]
    request, _ = model.request([2, 3], acceptance_length=[2.0, 2.5])
    parts = draw_parts(model, request, 100)
    np.testing.assert_allclose(parts.acceptance_length, np.broadcast_to([2.0, 2.5], (100, 2)), rtol=1e-14)
    np.testing.assert_allclose(parts.tok_s, model.draws(request, 100), rtol=1e-10)


# ------------------------------------------------------------------------------------------------------ verify terms
def test_verify_terms_sum_to_the_verify_time(model: Any) -> None:
    request = request_of(model)
    terms = terms_of_model(model, request)
    assert tuple(terms) == TERMS
    expected = np.concatenate(
        [model.predict(np.arange(7), [[1.0], [4.0]], comm).verify_ms.ravel() for comm in model.comm_names]
    )
    np.testing.assert_allclose(sum(terms.values()), expected, rtol=1e-12)
    for name in set(TERMS) - {"residual", "allreduce"}:
        assert np.all(terms[name] >= -1e-12)


def test_verify_terms_of_random_parameters_sum_to_the_cost() -> None:
    random = np.random.default_rng(3)
    for name in ("seed", "padded", "trees"):
        model = MODELS[name]
        request, _ = model.request(np.arange(7), [[1.0], [8.0]], model.comm_names, verify_cuda_graph=False)
        points = flattened(model.deployment.points(request.settings)[0], request.shape)
        for _ in range(20):
            size = len(parameter_names(model.comm_names))
            theta = model.posteriors[0].theta[:size] + random.normal(0.0, 0.5, size)
            terms = verify_terms(theta, points, model.deployment.structure)
            expected = cost(theta, points, model.deployment.structure).verify_ms
            np.testing.assert_allclose(sum(terms.values()), expected, rtol=1e-12)


def test_terms_of_many_parameter_vectors_are_those_of_each() -> None:
    """One call for all draws, and the terms of drafting sum to its time."""
    random = np.random.default_rng(5)
    for name in ("rich", "trees"):
        model = MODELS[name]
        request, _ = model.request(np.arange(5), 2.0, model.comm_names, cuda_graph=np.arange(5) % 2 > 0)
        points = flattened(model.deployment.points(request.settings)[0], request.shape)
        size, structure = len(parameter_names(model.comm_names)), model.deployment.structure
        theta = model.posteriors[0].theta[:size] + random.normal(0.0, 0.3, (4, size))
        verify, draft = verify_terms(theta, points, structure), draft_terms(theta, points, structure)
        for i, one in enumerate(theta):
            values = cost(one, points, structure)
            np.testing.assert_allclose(sum(draft.values())[i], values.draft_ms, rtol=1e-12)
            np.testing.assert_allclose(sum(verify.values())[i], values.verify_ms, rtol=1e-12)
            for name_, alone in draft_terms(one, points, structure).items():
                np.testing.assert_allclose(draft[name_][i], alone, rtol=1e-12)


def test_padding_is_named_where_a_pass_is_padded() -> None:
    model = MODELS["padded"]
    terms = terms_of_model(model, model.request([3, 4, 7])[0])
    assert terms["padding"][1] > 0.0  # 5 tokens run as 8
    assert terms["padding"][0] == pytest.approx(0.0)
    assert terms["padding"][2] == pytest.approx(0.0)


def test_terms_name_what_a_deployment_has() -> None:
    experts = terms_of_model(MODELS["rich"], MODELS["rich"].request([1, 3])[0])["experts"]
    assert 0.0 < experts[0] < experts[1]
    assert np.all(terms_of_model(MODELS["trees"], MODELS["trees"].request([1, 3])[0])["experts"] == 0.0)
    eager = MODELS["rich"].request(3, verify_cuda_graph=False)[0]
    assert terms_of_model(MODELS["rich"], eager)["eager"][0] > 0.0
