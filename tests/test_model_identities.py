"""What holds of every prediction, whatever was measured: the equation, scalars and arrays, units, order, repetition."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtr

import specmodel as sm

cases = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("estimator_cases.py"))))
plain, spec = cases.plain, cases.spec

CYCLES = [
    plain(100.0),
    plain(340.0, batch=4, context_tokens=2048),
    plain(95.0, comm="ring"),
    spec(1, 140.0, 1.7, comm="ring"),
    spec(3, 180.0, 2.4),
    spec(5, 176.0, 2.8),
    spec(3, 520.0, 2.4, batch=4, context_tokens=2048),
    spec(4, 170.0, 2.5, topk=4, num_draft_tokens=8),
    {"num_steps": 2, "tok_s_at_most": 200.0},
    {"num_steps": 4, "batch": 8, "range_tpot_ms": [9.0, 11.0], "acceptance_length": 2.6},
    {"num_steps": 2, "cycle_ms": 12.5, "workload": "code"},
]
RICH = cases.document(
    CYCLES,
    verify=[{"tokens": 4, "time_ms": 10.9}, {"tokens": 6, "time_ms": 11.4, "comm": "ring"}],
    draft=[{"num_steps": 3, "time_ms": 2.1}, {"num_steps": 5, "time_ms": 3.6, "comm": "ring"}],
    acceptance=[
        {"num_steps": 5, "drafts": 2000, "prompts": 40, "accepted_per_position": [1440, 1010, 690, 450, 300]},
        {"workload": "code", "num_steps": 3, "survival": [0.85, 0.71, 0.6]},
    ],
    comm={"default": {}, "ring": {"env": {"NCCL_ALGO": "Ring"}}},
    workloads={"default": {"weight": 3}, "code": {"weight": 1}},
)
FOUR = {340.0: 100.0, 520.0: 180.0}
MOE = {"num_experts": 128, "experts_per_token": 8}
DEPLOYMENTS = {
    "dense": RICH,
    "experts": {**RICH, "model": MOE},
    "graphs by tokens": {**RICH, "model": {"cuda_graph_sizes": [1, 2, 4, 8, 16, 32]}},
    "graphs by sequences": {**RICH, "model": {"cuda_graph_sizes": [1, 2, 4, 8], "cuda_graph_unit": "sequences"}},
    # Four ranks run four sequences as fast as one rank runs one.
    "data parallel": {
        **RICH,
        "system": {"data_parallel": 4},
        "measurements": {
            **RICH["measurements"],
            "cycles": [{**r, "tok_s": 4.0 * rate} if (rate := FOUR.get(r.get("tok_s"))) else r for r in CYCLES],
        },
    },
    "two explanations": cases.document([plain(100.0), spec(3, 80.0, 2.4)]),
    "nothing": cases.document(),
}
MODELS = {name: sm.fit(sm.from_dict(d)) for name, d in DEPLOYMENTS.items()}


@pytest.fixture(params=MODELS, ids=lambda name: name.replace(" ", "-"))
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def test_the_equation_holds_on_a_grid(model: Any) -> None:
    K, batch = np.meshgrid(np.arange(12), [1.0, 2.5, 8.0, 100.0], indexing="ij")
    for comm in model.deployment.structure.comm_names:
        for context in (None, 0, 4096):
            p = model.predict(K, batch, comm, context_tokens=context)
            cases.identities(p, batch)
            assert p.tok_s.shape == K.shape


def test_plain_decoding_drafts_nothing_and_emits_one_token(model: Any) -> None:
    p = model.predict(0, batch=[1, 2, 4], topk=4, num_draft_tokens=9)
    assert list(p.draft_ms) == [0.0, 0.0, 0.0]
    assert list(p.overhead_ms) == [0.0, 0.0, 0.0]
    assert list(p.acceptance_length) == [1.0, 1.0, 1.0]
    assert list(p.tok_s) == list(model.predict(0, batch=[1, 2, 4]).tok_s)


def test_longer_chains_accept_more_and_cost_more_to_draft(model: Any) -> None:
    p = model.predict(np.arange(30))
    assert np.all(np.diff(p.acceptance_length) > 0.0)
    assert np.all(np.diff(p.draft_ms) > 0.0)
    assert np.all(p.acceptance_length <= np.arange(30) + 1)


def test_a_scalar_is_the_same_as_its_place_in_an_array(model: Any) -> None:
    """One by one and all at once, so also far beyond the size of one piece of work."""
    K, batch, context = [0, 1, 3, 7, 3], [1.0, 2.0, 4.0, 8.0, 4.0], [1000, 2048, 2048, 9000, 100]
    graph, verify_graph = [True, False, True, False, True], [True, True, False, False, True]
    together = model.predict(
        K, batch, context_tokens=context, cuda_graph=graph, verify_cuda_graph=verify_graph, acceptance_length=None
    )
    bounds = together.interval(0.8)
    for i in range(len(K)):
        one = model.predict(
            K[i], batch[i], context_tokens=context[i], cuda_graph=graph[i], verify_cuda_graph=verify_graph[i]
        )
        for name in ("tok_s", "tpot_ms", "cycle_ms", "verify_ms", "draft_ms", "overhead_ms", "acceptance_length"):
            value = getattr(one, name)
            assert isinstance(value, float)
            assert value == pytest.approx(getattr(together, name)[i], rel=1e-12)
        assert isinstance(one.extrapolated, bool)
        assert one.extrapolated == together.extrapolated[i]
        assert one.speedup == pytest.approx(together.speedup[i], rel=1e-12)
        low, high = one.interval(0.8)
        assert isinstance(low, float)
        assert (low, high) == pytest.approx((bounds[0][i], bounds[1][i]), rel=1e-9)


def test_every_numeric_argument_broadcasts(model: Any) -> None:
    axes = {
        "num_steps": np.array([1, 2, 3]).reshape(3, 1, 1, 1, 1, 1, 1),
        "batch": np.array([1.0, 4.0]).reshape(2, 1, 1, 1, 1, 1),
        "num_draft_tokens": np.array([4, 6]).reshape(2, 1, 1, 1, 1),
        "context_tokens": np.array([100.0, 9000.0]).reshape(2, 1, 1, 1),
        "cuda_graph": np.array([True, False]).reshape(2, 1, 1),
        "verify_cuda_graph": np.array([True, False]).reshape(2, 1),
        "acceptance_length": np.array([1.0, 2.0, 2.5]),
    }
    p = model.predict(topk=2, **axes)
    assert p.tok_s.shape == (3, 2, 2, 2, 2, 2, 3)
    batch = np.broadcast_to(axes["batch"], p.tok_s.shape)
    cases.identities(p, batch)
    at = (2, 1, 1, 0, 1, 0, 2)
    one = model.predict(
        3, 4.0, topk=2, num_draft_tokens=6, context_tokens=100.0, cuda_graph=False, acceptance_length=2.5
    )
    assert p.tok_s[at] == pytest.approx(one.tok_s, rel=1e-12)
    assert p.interval()[1][at] == pytest.approx(one.interval()[1], rel=1e-9)


def test_the_given_acceptance_length_is_used_and_sure(model: Any) -> None:
    lengths = np.array([1.0, 1.5, 2.0, 2.5])
    p = model.predict(3, acceptance_length=lengths)
    np.testing.assert_allclose(p.acceptance_length, lengths, rtol=1e-12)
    np.testing.assert_allclose(p.tok_s / lengths, p.tok_s[0], rtol=1e-9)
    low, high = p.interval()
    np.testing.assert_allclose(low / lengths, low[0], rtol=1e-6)
    np.testing.assert_allclose(high / lengths, high[0], rtol=1e-6)


def test_a_given_acceptance_length_does_not_speed_up_plain_decoding(model: Any) -> None:
    p = model.predict([0, 3], acceptance_length=2.2)
    assert p.acceptance_length == pytest.approx([1.0, 2.2])
    assert p.tok_s[0] == pytest.approx(model.predict(0).tok_s)


def test_wider_level_wider_interval_around_the_same_middle(model: Any) -> None:
    p = model.predict([0, 3, 9], batch=3)
    low, high = np.array([p.interval(level) for level in (0.2, 0.5, 0.9, 0.99)]).transpose(1, 0, 2)
    assert np.all(np.diff(low, axis=0) < 0)
    assert np.all(np.diff(high, axis=0) > 0)
    middle = p.quantile(0.5)
    assert np.all((low[0] < middle) & (middle < high[0]))
    np.testing.assert_allclose(p.quantile(0.05), low[2], rtol=1e-6)
    np.testing.assert_allclose(p.quantile(0.95), high[2], rtol=1e-6)


def test_a_quantile_is_exceeded_as_often_as_it_says() -> None:
    """Of the mixture of two explanations: the probability below a quantile, added up over the modes."""
    model = MODELS["two explanations"]
    assert len(model.posteriors) >= 1
    p = model.predict([1, 6])
    d = p.distribution()
    for probability in (0.02, 0.3, 0.5, 0.95):
        x = np.log(p.quantile(probability))
        below = sum(
            w * stdtr(nu, (x - m) / s) for w, m, s, nu in zip(d.weights, d.means, d.sds, d.degrees, strict=True)
        )
        np.testing.assert_allclose(below, probability, atol=1e-6)


def scaled(document: dict[str, Any], factor: float) -> dict[str, Any]:
    """Every time of the file times a factor, every rate divided by it."""
    out = copy.deepcopy(document)
    for section in ("verify", "draft", "allreduce", "cycles"):
        for row in out["measurements"].get(section, ()):
            for key, value in row.items():
                times = key.endswith("_ms")
                rate = key in ("tok_s", "tok_s_at_most", "range_tok_s", "sd_tok_s")
                if times or rate:
                    by = factor if times else 1.0 / factor
                    row[key] = [x * by for x in value] if isinstance(value, list) else value * by
    return out


@pytest.mark.parametrize("factor", [1e-4, 0.3, 1e3])
@pytest.mark.parametrize("name", ["dense", "experts", "two explanations"])
def test_the_unit_of_time_does_not_matter(name: str, factor: float) -> None:
    before, after = MODELS[name], sm.fit(sm.from_dict(scaled(DEPLOYMENTS[name], factor)))
    K = np.arange(11)
    p, q = before.predict(K, [[1], [4]]), after.predict(K, [[1], [4]])
    np.testing.assert_allclose(q.cycle_ms, factor * p.cycle_ms, rtol=2e-4)
    np.testing.assert_allclose(q.tok_s * factor, p.tok_s, rtol=2e-4)
    np.testing.assert_allclose(np.array(q.interval()) * factor, p.interval(), rtol=1e-3)
    np.testing.assert_allclose(q.speedup, p.speedup, rtol=2e-4)
    first, second = sm.optimize(before), sm.optimize(after)
    assert (first.best.num_steps, first.best.comm) == (second.best.num_steps, second.best.comm)
    assert second.probability_best == pytest.approx(first.probability_best, abs=0.01)


@pytest.mark.parametrize("name", ["dense", "experts", "two explanations"])
def test_the_order_of_the_rows_does_not_matter(name: str) -> None:
    document = copy.deepcopy(DEPLOYMENTS[name])
    for section in document["measurements"].values():
        section.reverse()
    document["acceptance"] = list(reversed(document.get("acceptance", [])))
    before, after = MODELS[name], sm.fit(sm.from_dict(document))
    K = np.arange(11)
    for workload in (None, *DEPLOYMENTS[name].get("workloads", ())):
        p, q = (m.predict(K, [[1], [4]], workload=workload) for m in (before, after))
        np.testing.assert_allclose(q.tok_s, p.tok_s, rtol=2e-4)
        np.testing.assert_allclose(q.interval(), p.interval(), rtol=1e-3)
    first, second = sm.optimize(before), sm.optimize(after)
    assert (first.best.num_steps, first.best.comm) == (second.best.num_steps, second.best.comm)
    assert second.probability_best == pytest.approx(first.probability_best, abs=0.01)
    assert sorted(first.warnings) == sorted(second.warnings)


def test_the_same_input_gives_the_same_output() -> None:
    one, two = (sm.fit(sm.from_dict(RICH)) for _ in range(2))
    assert [list(p.theta) for p in one.posteriors] == [list(p.theta) for p in two.posteriors]
    assert sm.optimize(one, trees=[(4, 4, 8)]) == sm.optimize(two, trees=[(4, 4, 8)])
    assert one.summary() == two.summary()


def test_a_row_stated_twice_counts_more_than_once() -> None:
    """Repetition is evidence: the interval may not widen, and the value moves towards what is repeated."""
    once = cases.fitted([plain(), spec(3, 150.0, 2.2)])
    often = cases.fitted([plain(), *[spec(3, 150.0, 2.2)] * 8])
    (a, b), (c, d) = (m.predict(3).interval() for m in (once, often))
    assert d / c < b / a
    assert abs(often.predict(3).tok_s - 150.0) <= abs(once.predict(3).tok_s - 150.0) + 1e-6


def test_what_was_measured_is_predicted(model: Any) -> None:
    """A prediction of a measured row lies within three of its standard deviations of 1 %, in the median of the rows."""
    rows = [r for r in model.calibration.measurements.cycles if r.tok_s and r.acceptance_length and r.topk == 1]
    ratios = [
        model.predict(
            r.num_steps, r.batch, r.comm, context_tokens=r.context_tokens, acceptance_length=r.acceptance_length
        ).tok_s
        / r.tok_s
        for r in rows
    ]
    assert not rows or np.median(np.abs(np.log(ratios))) < 0.03


def test_terms_and_summary_say_what_the_data_moved(model: Any) -> None:
    terms = {term.name: term for term in model.terms}
    assert len(terms) == len(model.terms)
    for term in terms.values():
        assert term.low <= term.value <= term.high
        assert -1e-9 <= term.informed <= 1.0
        assert np.isfinite([term.value, term.low, term.high]).all()
    text = model.summary()
    assert model.calibration.name in text
    informed = terms["pass_ms"].informed
    assert ("pass_ms" in text) == (informed > 0.05) == bool(model.calibration.measurements.cycles)
