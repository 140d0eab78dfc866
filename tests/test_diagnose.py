"""The diagnosis: verdicts that an expert would sign, none where data cannot tell, and a ledger that closes paths."""

import itertools
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import specmodel as sm
from specmodel.calibration import Evidence
from specmodel.diagnose import diagnosis_document
from specmodel.drafters import STEP_COST, acceptance_a_draft, chain_length, reach_of_kind
from specmodel.engines.seen import seen_sentences
from specmodel.expectations import facts_of, plain_of

ROOT = Path(__file__).parents[1]
SEED = ROOT / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
FIELD = ROOT / "calibrations" / "field"
REPORTS = Path(__file__).parent / "data" / "reports"
CASES = runpy.run_path(str(Path(__file__).with_name("known_answers.py")))
VERDICTS = runpy.run_path(str(Path(__file__).with_name("verdict_answers.py")))["VERDICTS"]
HEAD = "schema: specmodel.calibration/1\nname: made\n"
EAGLE = HEAD + "system: {tensor_parallel: 1}\nmodel: {method: eagle3}\n"


@pytest.fixture(scope="module")
def seed():
    return sm.fit(sm.load(SEED))


def made(body, **options):
    return sm.diagnose(sm.fit(sm.loads(body)), **options)


def levers(found):
    return {x.name: x for x in found.levers}


def well_formed(found):
    """What holds of every diagnosis."""
    text = json.dumps(diagnosis_document(found), allow_nan=False)
    assert json.loads(text)["schema"] == "specmodel.diagnosis/1"
    assert "\n" not in found.verdict
    assert found.verdict.strip()
    order = {"open": 0, "measure": 1, "closed": 2}
    ranks = [order[x.status] for x in found.levers]
    assert ranks == sorted(ranks)
    for a, b in itertools.pairwise(found.levers):
        if a.status == b.status:
            assert (a.bound_optimised or 0.0) >= (b.bound_optimised or 0.0)
    assert len({x.name for x in found.levers}) == len(found.levers)
    for x in found.levers:
        assert x.evidence
        assert (x.bound is None) == (x.interval is None) == (x.bound_optimised is None)
        if x.bound is not None:
            low, high = x.interval
            assert 1.0 <= low <= high
            assert 1.0 <= x.bound <= x.bound_optimised <= high + 1e-9
        if x.status == "measure":
            assert x.decided_by
        if x.status == "closed" and x.name != "draft":
            assert x.interval is None or x.bound_optimised < 1.0 + found.worth
    words = {"drafter": "the drafter", "engine": "the engine", "nothing": "nothing is the problem"}
    assert words.get(found.culprit, "") in found.verdict
    if found.culprit == "unknown":
        assert re.search("cannot be told|does not pay here", found.verdict)


# ------------------------------------------------------------------------------------------------- known deployments
def test_the_seed_case(seed):
    found = sm.diagnose(seed)
    well_formed(found)
    assert found.culprit == "nothing"
    assert (found.num_steps, found.comm, found.measured) == (2, "ring-ll-sys", True)
    assert found.speedup == pytest.approx(94 / 89, rel=1e-3)
    ledger = levers(found)
    draft = ledger["draft"]
    assert draft.status == "closed"
    assert 1.0 < draft.bound <= 1.037
    assert "captured on 8 ranks" in draft.evidence
    assert ledger["draft_graph"].status == "closed"
    assert ledger["comm"].status == "closed"
    assert "-27 % on a verify pass of 6 tokens against default" in ledger["comm"].evidence
    assert ledger["num_steps"].status == "closed"
    assert ledger["acceptance_wiring"].status == "open"
    assert ledger["verify_graph"].status == "measure"
    assert ledger["graph_padding"].status == "measure"
    assert ledger["batch_schedule"].status == "measure"


def test_the_seed_case_at_the_outset(seed):
    """Five steps under the default setting: a free draft brings 3.3 to 3.7 %, the NCCL setting more."""
    found = sm.diagnose(seed, comm="default")
    assert found.cycle_plain_steps == pytest.approx(27 * 89 / 1000, rel=0.01)
    ledger = levers(found)
    assert ledger["draft"].bound == pytest.approx(1.035, abs=0.004)
    assert ledger["draft"].status == "closed"
    both = levers(sm.diagnose(seed, comm=("default",)))
    assert both["draft"] == ledger["draft"]


def test_the_wiring_fault_is_the_drafter(seed):
    found = sm.diagnose(seed, workload="wiring-fault")
    well_formed(found)
    assert found.culprit == "drafter"
    assert levers(found)["acceptance_wiring"].status == "open"
    assert "0.19 a draft" in found.verdict


CULPRITS = {
    "angelslim_163": "drafter",
    "club3090_1052": "nothing",
    "ds4_835": "engine",
    "llamacpp_22673_a": "engine",
    "llamacpp_3649": "nothing",
    "rmlx_516_qwen38_27b": "unknown",
    "sglang_11948": "unknown",
    "spark_docker_343": "unknown",
    "specbundle_scout_financeqa": "measurement",
    "specforge_339": "drafter",
    "vllm_49548": "unknown",
    "vllm_8439": "unknown",
}


@pytest.mark.parametrize("name", CULPRITS)
def test_published_reports(name):
    found = sm.diagnose(sm.fit(sm.load(REPORTS / f"{name}.yaml")))
    well_formed(found)
    assert found.culprit == CULPRITS[name], found.verdict
    document = diagnosis_document(found)
    expected = json.loads((REPORTS / f"{name}.expect.json").read_text(encoding="utf-8"))
    assert sorted(document["flags"]) == sorted(expected["flags"])
    assert {q for q in expected if q != "flags"} <= set(document["expectations"])


FIELD_CULPRITS = {
    "inferencex_1737_minimax_m3_b300": "nothing",
    "mlxcel_1782_qwen35_4b_dflash_gb10": "engine",
    "mlxcel_1799_laguna_moe_gb10_before": "engine",
    "qwen38mtp_m3ultra_metal": "nothing",
    "vllm_44697_mtp_pp4_pcie": "unknown",
    "sglang_22246_qwen3_235b": "unknown",
    "vllm_blog_kimi_k3_gb300x8": "nothing",
    "ik_llama_2156_qwen36_35b_a3b_cpu_moe": "nothing",
}


@pytest.mark.parametrize("name", FIELD_CULPRITS)
def test_published_deployments(name):
    found = sm.diagnose(sm.fit(sm.load(FIELD / f"{name}.yaml")))
    well_formed(found)
    assert found.culprit == FIELD_CULPRITS[name], found.verdict


# ----------------------------------------------------------------------------------------------------- sparse data
def plain(*rows, head=EAGLE):
    return head + "measurements:\n  cycles:\n" + "".join(f"    - {{{row}}}\n" for row in rows)


SPARSE = {
    "only plain rows": (plain("num_steps: 0, tok_s: 100", "num_steps: 0, batch: 8, tok_s: 500"), "unknown"),
    "no plain row": (plain("num_steps: 3, tok_s: 200, acceptance_length: 2.4"), "unknown"),
    "no acceptance, slower": (plain("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s: 80"), "unknown"),
    "no acceptance, faster": (plain("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s: 180"), "nothing"),
    "nothing at all": (EAGLE, "unknown"),
    "acceptance alone": (EAGLE + "acceptance: [{num_steps: 3, survival: [0.8, 0.6, 0.4]}]\n", "unknown"),
    "a cycle time alone": (plain("num_steps: 3, cycle_ms: 20"), "unknown"),
    "a bound alone": (plain("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s_at_most: 120"), "unknown"),
    "passes alone": (
        EAGLE + "measurements: {verify: [{tokens: 1, time_ms: 9}, {tokens: 4, time_ms: 11}]}\n",
        "unknown",
    ),
    "break even": (
        plain("num_steps: 0, tok_s: 100", "num_steps: 3, range_tok_s: [90, 112], acceptance_length: 1.9"),
        None,
    ),
    "n-gram without acceptance": (
        plain("num_steps: 0, tok_s: 100", "num_steps: 4, tok_s: 90", head=HEAD + "model: {method: ngram}\n"),
        "unknown",
    ),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_files_get_no_confident_verdict(name):
    body, culprit = SPARSE[name]
    found = made(body)
    well_formed(found)
    assert found.culprit == culprit or culprit is None, found.verdict


def test_everything_slower_is_told_apart():
    slow_engine = made(plain("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s: 60, acceptance_length: 3.1"))
    assert slow_engine.culprit == "engine"
    assert levers(slow_engine)["acceptance_wiring"].status == "closed"
    assert levers(slow_engine)["speculation_off"].status == "open"
    bad_drafter = made(plain("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s: 80, acceptance_length: 1.2"))
    assert bad_drafter.culprit == "drafter"
    assert levers(bad_drafter)["acceptance_wiring"].status == "open"
    both = made(plain("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s: 30, acceptance_length: 1.2"))
    assert both.culprit == "both"


@pytest.mark.parametrize("name", CASES["INVENTED"])
def test_invented_reports_are_diagnosed(name):
    body, expected = CASES["INVENTED"][name]
    found = made(CASES["HEAD"] + body)
    well_formed(found)
    assert sorted(found.flags) == sorted(expected["flags"])
    if found.measured and "speedup_exceeds_acceptance_length" in found.flags:
        assert found.culprit == "measurement"


# ----------------------------------------------------------------------------------------------------- the ledger
BASE = ("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s: 150, acceptance_length: 2.4")


def test_a_lever_without_information_is_to_be_measured():
    ledger = levers(made(plain(*BASE, head=HEAD + "system: {tensor_parallel: 4}\nmodel: {method: eagle3}\n")))
    for name in ("draft", "overhead", "comm", "verify_allreduce", "verify_tokens", "tree", "batch_schedule"):
        if name in ledger:
            assert ledger[name].status == "measure", name
    assert ledger["verify_allreduce"].bound is None
    assert ledger["comm"].bound is None
    assert ledger["verify_graph"].status == ledger["graph_padding"].status == "measure"


def test_one_gpu_closes_communication():
    ledger = levers(made(plain(*BASE)))
    assert ledger["comm"].status == ledger["verify_allreduce"].status == "closed"


def test_worth_closes_and_opens(seed):
    strict, loose = levers(sm.diagnose(seed, worth=0.0001)), levers(sm.diagnose(seed, worth=9.0))
    assert strict["draft"].status != "closed"
    assert not [x.name for x in loose.values() if x.status == "open"]
    for bad in (-0.1, float("nan"), 11):
        with pytest.raises(sm.UsageError):
            sm.diagnose(seed, worth=bad)


def test_timed_drafts_and_passes_decide():
    rest = "  verify:\n"
    rest += "".join(f"    - {{tokens: {n}, time_ms: {ms}}}\n" for n, ms in ((1, 10), (2, 10.1), (4, 10.3)))
    cheap = made(plain(*BASE) + rest + "  draft:\n    - {num_steps: 3, time_ms: 0.05}\n")
    dear = made(plain(*BASE) + rest + "  draft:\n    - {num_steps: 3, time_ms: 5.4}\n")
    assert levers(cheap)["draft"].status == "closed"
    assert levers(dear)["draft"].status == "open"
    assert levers(dear)["draft"].bound == pytest.approx(16 / (16 - 5.4), rel=0.05)
    # What passes and drafts leave of the cycle is overhead: 16 - 10.3 - 0.05 ms.
    assert levers(cheap)["overhead"].status == "open"
    assert levers(cheap)["overhead"].bound == pytest.approx(16 / 10.35, rel=0.1)


def test_nothing_drafted_measures_the_overhead():
    ledger = levers(made(plain(*BASE, "num_steps: 0, speculation: true, tok_s: 80")))
    # 12.5 - 10 ms of a cycle of 16.
    assert ledger["overhead"].bound == pytest.approx(16 / 13.5, rel=0.02)
    assert ledger["overhead"].status == "open"


def test_steps_that_were_not_tried():
    found = made(plain("num_steps: 0, tok_s: 100", "num_steps: 8, tok_s: 101, acceptance_length: 2.4"))
    steps = levers(found)["num_steps"]
    assert steps.status in ("open", "measure")
    assert steps.bound_optimised > 1.05
    tried = plain(
        "num_steps: 0, tok_s: 100",
        "num_steps: 2, tok_s: 150, acceptance_length: 2.0",
        *(f"num_steps: {k}, tok_s_at_most: 150" for k in (1, 3, 4)),
    )
    assert levers(made(tried))["num_steps"].status == "closed"


def test_graphs_by_what_was_seen():
    model = sm.fit(sm.loads(plain(*BASE)))

    def graphs(*facts):
        ledger = levers(sm.diagnose(model, runtime=facts))
        return ledger["draft_graph"].status, ledger["verify_graph"].status

    yes = [Evidence(about=a, value=True, ranks=8) for a in ("draft_cuda_graph", "target_cuda_graph")]
    assert graphs() == ("measure", "measure")
    assert graphs(*yes) == ("closed", "closed")
    assert graphs(*yes, Evidence(about="draft_cuda_graph", value=False)) == ("open", "closed")
    assert graphs(*yes, Evidence(about="decode_with_cuda_graph", value=False)) == ("closed", "open")
    eager = sm.fit(sm.loads(plain(BASE[0], BASE[1] + ", cuda_graph: false")))
    assert levers(sm.diagnose(eager))["draft_graph"].status == "open"


def test_what_was_seen_is_said_once():
    model = sm.fit(sm.loads(plain(*BASE, head=HEAD + "system: {num_gpus: 8, tensor_parallel: 8}\n")))
    communication = Evidence(about="allreduce_implementation", value="the custom one")
    facts = [communication, Evidence(about="draft_cuda_graph", value=True, ranks=1)]
    ledger = levers(sm.diagnose(model, runtime=[*facts, *facts]))
    assert ledger["comm"].evidence.count("the custom one") == 1
    assert "captured on 1 rank" in ledger["draft"].evidence
    assert "1 ranks" not in ledger["draft"].evidence


def test_a_schedule_names_the_batches_where_it_changes():
    rows = "num_steps: 0, batch: 32, tok_s: 3100", "num_steps: 3, batch: 32, tok_s: 6200, acceptance_length: 2.4"
    same = levers(made(plain(*BASE[:1], "num_steps: 3, tok_s: 200, acceptance_length: 2.4", *rows)))["batch_schedule"]
    assert "3 steps at" not in same.evidence


SLOW = [
    f"num_steps: {k}, batch: {b}, tok_s: {rate}" + (", acceptance_length: 2.5" if k else "")
    for b, plain_rate in ((1, 140), (8, 1000), (32, 3000))
    for k, rate in ((0, plain_rate), (3, plain_rate * 0.8))
]


def test_plain_decoding_at_every_batch_is_speculation_off_and_no_schedule():
    found = made(plain(*SLOW))
    ledger = levers(found)
    assert ledger["batch_schedule"].status == "closed"
    assert "plain decoding at every batch is speculation off" in ledger["batch_schedule"].evidence
    assert found.off is ledger["speculation_off"]
    # Where one batch gains, plain decoding at the others is a schedule.
    mixed = made(plain("num_steps: 0, tok_s: 100", "num_steps: 3, tok_s: 190, acceptance_length: 2.5", *SLOW[2:]))
    assert levers(mixed)["batch_schedule"].status == "open"
    assert mixed.off is None


@pytest.mark.parametrize(
    ("length", "culprit", "begin"),
    [(3.1, "engine", ("draft", "overhead", "verify", "comm", "graph")), (1.2, "drafter", ("acceptance",))],
)
def test_what_to_work_on_is_what_is_to_blame(length, culprit, begin):
    rate = 60 if culprit == "engine" else 80
    found = made(plain("num_steps: 0, tok_s: 100", f"num_steps: 3, tok_s: {rate}, acceptance_length: {length}"))
    assert found.culprit == culprit
    assert found.off is levers(found)["speculation_off"]
    assert found.work_on.name.startswith(begin)
    assert found.work_on.name != "verify_fixed_pass"


@pytest.mark.parametrize("name", SPARSE)
def test_optimize_and_diagnose_ask_first_for_the_same(name):
    model = sm.fit(sm.loads(SPARSE[name][0]))
    found, asked = sm.diagnose(model), sm.optimize(model).measure_next
    assert bool(found.measure_first) == (asked is not None and "comes first" in asked.reason)
    if found.measure_first:
        assert asked.row["num_steps"] == 0
        assert asked.reason.startswith(found.measure_first)
        steps = levers(found)["num_steps"]
        assert steps.decided_by in ("", found.measure_first)


def test_memory_left_is_the_least_of_all_logs():
    facts = [Evidence(about="free_memory_bytes", value=v * 2**30, source=s) for v, s in ((9, "a"), (7, "b"), (8, "c"))]
    said = [text for text in seen_sentences(facts) if "memory left" in text]
    assert said == ["memory left: 7.00 GiB (b)"]


def test_sizes_of_graphs():
    sizes = HEAD + "model: {{method: eagle3, cuda_graph_sizes: [{}]}}\n"
    fits = levers(made(plain(*BASE, head=sizes.format("1, 4, 8"))))["graph_padding"]
    beyond = levers(made(plain(*BASE, head=sizes.format("1, 2"))))["graph_padding"]
    assert fits.status == "closed"
    assert beyond.status == "open"


def test_batches(seed):
    rows = ("num_steps: 0, batch: 32, tok_s: 1500", "num_steps: 3, batch: 32, tok_s: 1200, acceptance_length: 2.4")
    found = made(plain(*BASE, *rows))
    assert found.batch == 1.0
    ((batch, text),) = found.other_batches
    assert batch == 32.0
    assert "0.80x plain decoding: 3.00 plain steps a cycle, 2.40 tokens" in text
    assert levers(found)["batch_schedule"].status == "open"
    other = made(plain(*BASE, *rows), batch=32)
    assert other.batch == 32.0
    assert other.cycle_plain_steps == pytest.approx(3.0)
    with pytest.raises(sm.UsageError):
        sm.diagnose(seed, batch=0)
    with pytest.raises(sm.UsageError):
        sm.diagnose(seed, comm="nothing-of-the-kind")


def test_numbers_of_the_verdict_are_those_of_the_rows():
    for path in sorted(REPORTS.glob("*.yaml")):
        found = sm.diagnose(sm.fit(sm.load(path)))
        if not found.measured or found.cycle_plain_steps is None or found.culprit == "unknown":
            continue
        stated = [
            e.value
            for e in found.expectations
            if e.quantity == "cycle_plain_steps"
            and e.select["num_steps"] == found.num_steps
            and e.select["topk"] == found.topk
            and e.select["num_draft_tokens"] == found.num_draft_tokens
            and e.select["batch"] == found.batch
        ]
        assert not stated or found.cycle_plain_steps in [pytest.approx(x) for x in stated]


def test_the_same_file_gives_the_same_diagnosis(seed):
    assert sm.diagnose(seed) == sm.diagnose(seed)


# ------------------------------------------------------------------------------------------------------ yardsticks
def test_yardsticks_are_those_of_the_committed_deployments():
    """Quantiles over the deployments of the field files, one number each: the median of its rows."""
    each, cost = {}, []
    for path in sorted(FIELD.glob("*.yaml")):
        cal = sm.load(path)
        facts = facts_of(cal)
        chains = [f for f in facts if f.row.num_steps and f.row.topk == 1 and f.length is not None]
        known = {
            (f.row.workload, f.row.num_steps, round(acceptance_a_draft(f.length, f.row.num_steps), 3))
            for f in chains
            if f.length < f.row.num_steps + 1
        }
        if known:
            each.setdefault(cal.model.method, []).append(float(np.median([k[2] for k in known])))
        slopes = [
            (f.length * plain_of(facts, f)[0] / f.rate - 1.0) / f.row.num_steps
            for f in chains
            if plain_of(facts, f) is not None and f.rate and f.row.batch <= 4
        ]
        if slopes:
            cost.append(float(np.median(slopes)))
    for method in ("eagle3", "mtp", "parallel"):
        reach = reach_of_kind(method)
        assert reach.deployments == len(each[method])
        found = np.quantile(each[method], (0.1, 0.5, 0.9))
        np.testing.assert_allclose((reach.low, reach.typical, reach.high), found, atol=0.011)
    assert STEP_COST.deployments == len(cost)
    found = np.quantile(cost, (0.1, 0.5, 0.9))
    np.testing.assert_allclose((STEP_COST.low, STEP_COST.typical, STEP_COST.high), found, atol=0.011)


def test_acceptance_a_draft_inverts_the_length():
    for a in (0.0, 0.19, 0.5, 0.83, 1.0):
        for k in (1, 3, 10):
            assert acceptance_a_draft(chain_length(a, k), k) == pytest.approx(a, abs=1e-9)
    assert reach_of_kind("ngram") is None
    assert reach_of_kind(None) is None


def test_texts_have_no_trailing_noise(seed):
    for x in sm.diagnose(seed).levers:
        assert not re.search(r"nan|inf|  |;$|,$", x.evidence + x.decided_by), x


@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts_worked_out_by_hand(name):
    body, flags, culprit, said = VERDICTS[name]
    found = made(HEAD + body)
    well_formed(found)
    assert found.flags == flags
    assert found.culprit == culprit
    assert said in found.verdict
    # A range never runs backwards.
    for low, high in re.findall(r"costs ([0-9.]+) to ([0-9.]+) plain steps", found.verdict):
        assert float(low) <= float(high)


def test_levers_of_a_tree_are_bounded():
    """What every draft accepted brings bounds its positions; a position more is reached no more than those before."""
    tree = "{num_steps: 4, topk: 4, num_draft_tokens: 16, tok_s: 110, acceptance_length: 2.6}"
    found = levers(made(EAGLE + f"measurements: {{cycles: [{{num_steps: 0, tok_s: 100}}, {tree}]}}\n"))
    for name in ("acceptance_first", "acceptance_tail"):
        assert found[name].status == "measure"
        assert found[name].bound == pytest.approx(5 / 2.6, rel=0.02)
    steps = found["num_steps"]
    assert steps.status == "measure"
    assert steps.bound == 1.0
    assert steps.bound_optimised >= (1.0 + 1.6 / 4 / 2.6) * 0.99
    assert "only tree measured" in steps.evidence


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("{gpu: NVIDIA H200, tensor_parallel: 2}", "2 H200 can read 9"),
        ("{gpu: H100 SXM, num_gpus: 1}", "one H100 can read 33"),
        ("{gpu: Abacus 9000, tensor_parallel: 2}", "weight bytes over memory bandwidth"),
        ("{gpu: H200}", "weight bytes over memory bandwidth"),
        ("{tensor_parallel: 2}", "weight bytes over memory bandwidth"),
    ],
)
def test_what_decides_the_fixed_pass(system, said):
    """How many bytes the GPUs read in a plain step, where the file says which and how many."""
    rows = "{num_steps: 0, tok_s: 100}, {num_steps: 2, tok_s: 130, acceptance_length: 2.0}"
    found = levers(made(HEAD + f"system: {system}\nmeasurements: {{cycles: [{rows}]}}\n"))["verify_fixed_pass"]
    assert found.status == "measure"
    assert said in found.decided_by
