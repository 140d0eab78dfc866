"""Findings about the numbers of a file: each holds where it should, and not just beside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import specmodel as sm
from specmodel.consistency import consistency_of, flags_of

HEAD = "schema: specmodel.calibration/1\nname: made\n"


def findings(body):
    return consistency_of(sm.loads(HEAD + body))


def cycles(*rows, rest=""):
    return "measurements:\n  cycles:\n" + "".join(f"    - {{{row}}}\n" for row in rows) + rest


def accepted(shape, length, listed):
    row = f"{shape}, tok_s: 9, acceptance_length: {length}"
    return cycles(row, rest=f"acceptance:\n  - {{{shape}, {listed}}}\n")


def two_lengths(first, second, more, before=""):
    """Two rows of three steps that differ in `more`."""
    return before + cycles(
        f"num_steps: 3, tok_s: 9, acceptance_length: {first}",
        f"num_steps: 3, tok_s: 9, acceptance_length: {second}, {more}",
    )


# Name: (a file with the fault, one without it that is nearly the same, words of the message, rows it is about)
PAIRS = {
    "faster than num_steps + 1 allows": (
        cycles("num_steps: 0, tok_s: 10", "num_steps: 2, tok_s: 31"),
        cycles("num_steps: 0, tok_s: 10", "num_steps: 2, tok_s: 30"),
        "cannot emit more than 3 tokens",
        "measurements.cycles[1]",
    ),
    "more accepted than verified": (
        cycles("num_steps: 7, topk: 4, num_draft_tokens: 4, tok_s: 100, acceptance_length: 4.5"),
        cycles("num_steps: 7, topk: 4, num_draft_tokens: 5, tok_s: 100, acceptance_length: 4.5"),
        "only 4 tokens are verified",
        "measurements.cycles[0]",
    ),
    "more drafted than asked for": (
        cycles("num_steps: 3, tok_s: 100, mean_draft_tokens: 3.5"),
        cycles("num_steps: 3, tok_s: 100, mean_draft_tokens: 3.0"),
        "mean_draft_tokens",
        "measurements.cycles[0]",
    ),
    "a verify pass longer than its cycle": (
        cycles("num_steps: 3, cycle_ms: 20", rest="  verify:\n    - {tokens: 4, time_ms: 21}\n"),
        cycles("num_steps: 3, cycle_ms: 20", rest="  verify:\n    - {tokens: 4, time_ms: 19}\n"),
        "cannot contain",
        "measurements.verify[0]",
    ),
    "a draft longer than its cycle": (
        cycles("num_steps: 3, cycle_ms: 20", rest="  draft:\n    - {num_steps: 3, range_ms: [22, 25]}\n"),
        cycles("num_steps: 3, cycle_ms: 20", rest="  draft:\n    - {num_steps: 3, range_ms: [19, 25]}\n"),
        "cannot contain",
        "measurements.draft[0]",
    ),
    "plain decoding falls with the batch": (
        cycles("num_steps: 0, batch: 8, tok_s: 100", "num_steps: 0, batch: 16, tok_s: 90"),
        cycles("num_steps: 0, batch: 8, tok_s: 100", "num_steps: 0, batch: 16, tok_s: 99"),
        "plain decoding: the total falls",
        "measurements.cycles[0], measurements.cycles[1]",
    ),
    "acceptance depends on the communication setting": (
        two_lengths(2.0, 2.3, "comm: ring", "comm: {ring: {}}\n"),
        two_lengths(2.0, 2.1, "comm: ring", "comm: {ring: {}}\n"),
        "comm default) and 2.3 (comm ring)",
        "measurements.cycles[0], measurements.cycles[1]",
    ),
    "acceptance depends on the batch": (
        two_lengths(2.5, 2.0, "batch: 8"),
        two_lengths(2.5, 2.4, "batch: 8"),
        "depends on models and text alone",
        "measurements.cycles[1], measurements.cycles[0]",
    ),
    "acceptance depends on graphs": (
        two_lengths(2.5, 2.0, "cuda_graph: false"),
        two_lengths(2.5, 2.5, "cuda_graph: false"),
        "cuda_graph False",
        "measurements.cycles[1], measurements.cycles[0]",
    ),
    "plain decoding contradicts itself": (
        cycles("num_steps: 0, tok_s: 200", "num_steps: 0, tok_s: 330", "num_steps: 3, tok_s: 352"),
        cycles("num_steps: 0, tok_s: 200", "num_steps: 0, tok_s: 215", "num_steps: 0, batch: 4, tok_s: 500"),
        "plain decoding is 200 and 330 tok/s in 2 rows of one setting",
        "measurements.cycles[0], measurements.cycles[1]",
    ),
    "half of the rows were throttled": (
        cycles(*(f"num_steps: 3, tok_s: {rate}, acceptance_length: 2" for rate in (200, 201, 140, 141))),
        cycles(*(f"num_steps: 3, tok_s: {rate}, acceptance_length: {rate / 100}" for rate in (200, 201, 140, 141))),
        "3 steps: a cycle takes 9.95 and 14.29 ms in 4 rows",
        "measurements.cycles[2], measurements.cycles[3]",
    ),
    "steps counted one too few": (
        cycles("num_steps: 2, tok_s: 300, acceptance_length: 3.4"),
        cycles("num_steps: 2, tok_s: 300, acceptance_length: 4.1"),
        "likely num_steps is 3",
        "measurements.cycles[0]",
    ),
    "tokens of a tree counted without its root": (
        cycles("num_steps: 7, topk: 4, num_draft_tokens: 4, tok_s: 100, acceptance_length: 4.5"),
        cycles("num_steps: 7, topk: 4, num_draft_tokens: 4, tok_s: 100, acceptance_length: 5.5"),
        "without the root",
        "measurements.cycles[0]",
    ),
    "a longer chain is accepted less": (
        cycles("num_steps: 3, tok_s: 9, acceptance_length: 2.5", "num_steps: 5, tok_s: 9, acceptance_length: 2.2"),
        cycles("num_steps: 3, tok_s: 9, acceptance_length: 2.5", "num_steps: 5, tok_s: 9, acceptance_length: 2.45"),
        "more drafts cannot be accepted less",
        "measurements.cycles[0], measurements.cycles[1]",
    ),
    "a baseline that varies by workload": (
        cycles("num_steps: 0, workload: code, tok_s: 100", "num_steps: 0, workload: chat, tok_s: 115"),
        cycles("num_steps: 0, workload: code, tok_s: 100", "num_steps: 0, workload: chat, tok_s: 108"),
        "does not depend on the text",
        "measurements.cycles[0], measurements.cycles[1]",
    ),
    "the bonus token is not counted": (
        accepted("num_steps: 2", 1.3, "survival: [0.8, 0.5]"),
        accepted("num_steps: 2", 2.3, "survival: [0.8, 0.5]"),
        "the bonus token of each cycle is not counted",
        "acceptance[0], measurements.cycles[0]",
    ),
    "conditional given as survival": (
        accepted("num_steps: 2", 2.19, "survival: [0.7, 0.7]"),
        accepted("num_steps: 2", 2.4, "survival: [0.7, 0.7]"),
        "2.19 if the list were conditional",
        "acceptance[0], measurements.cycles[0]",
    ),
    "survival given as conditional": (
        accepted("num_steps: 3", 2.6, "conditional: [0.8, 0.5, 0.3]"),
        accepted("num_steps: 3", 2.4, "conditional: [0.8, 0.5, 0.3]"),
        "2.6 if the list were survival",
        "acceptance[0], measurements.cycles[0]",
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_is_found_and_not_where_it_is_not(name):
    bad, good, words, where = PAIRS[name]
    (found,) = [f for f in findings(bad) if words in f.message]
    assert found.where.endswith(where)
    assert found.flag == ("acceptance_length_exceeds_steps_plus_one" if "num_steps is" in words else "")
    assert not [f for f in findings(good) if words in f.message]


ACCEPTED = {
    "lengths": (cycles("num_steps: 3, tok_s: 9, acceptance_length: 4"), "measurements.cycles[0]"),
    "a length of a tree": (
        cycles("num_steps: 2, topk: 2, num_draft_tokens: 6, tok_s: 9, acceptance_length: 3"),
        "measurements.cycles[0]",
    ),
    "survival": ("acceptance: [{num_steps: 2, survival: [1, 1]}]\n", "acceptance[0]"),
    "conditional": ("acceptance: [{num_steps: 2, conditional: [1, 0.9999]}]\n", "acceptance[0]"),
    "counts": ("acceptance: [{num_steps: 2, drafts: 90, accepted_per_position: [90, 90]}]\n", "acceptance[0]"),
    "a mean": ("acceptance: [{num_steps: 2, acceptance_length: 3}]\n", "acceptance[0]"),
    "rounded": ("acceptance: [{num_steps: 2, acceptance_length: 2.95}]\n", ""),
    "not the last": ("acceptance: [{num_steps: 2, survival: [1, 0.95]}]\n", ""),
    "impossible": (cycles("num_steps: 3, tok_s: 9, acceptance_length: 4.2"), ""),
    "nothing drafted": (cycles("num_steps: 0, tok_s: 9"), ""),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_every_draft_accepted_is_no_usual_measurement(name):
    body, where = ACCEPTED[name]
    found = [f for f in findings(body) if "every draft is accepted" in f.message]
    assert [f.where for f in found] == ([where] if where else [])
    warned = [w for w in sm.fit(sm.loads(HEAD + body)).warnings if "every draft is accepted" in w]
    assert len(warned) == bool(where)


@pytest.mark.parametrize("name", PAIRS)
def test_what_diagnose_says_of_the_numbers_optimize_warns_of_once(name):
    """Where a warning of the same rows is not there already."""
    bad, _, words, where = PAIRS[name]
    cal = sm.loads(HEAD + bad)
    about = [w for w in sm.fit(cal).warnings if words in w]
    assert len(about) == len(set(about))
    unsaid = ("cannot emit", "are verified", "mean_draft", "default) and 2.3", "models and text", "cuda_graph False")
    if not any(word in words for word in unsaid):
        assert about
        assert where.split(", ")[0] in " ".join(about)


@given(st.lists(st.floats(50.0, 90.0), min_size=2, max_size=6), st.floats(0.0, 0.3))
def test_ranges_across_a_limit_claim_nothing(rates, width):
    """A range so wide that its other end says the opposite: no flag rests on it."""
    rows = ["num_steps: 0, tok_s: 100"]
    rows += [f"num_steps: {k + 1}, range_tok_s: [{rate}, {101 + width}]" for k, rate in enumerate(rates)]
    assert flags_of(findings(cycles(*rows))) == ()


def test_an_impossible_row_is_named_once_and_first():
    found = findings(
        cycles(
            "num_steps: 0, tok_s: 50",
            "num_steps: 1, tok_s: 120, acceptance_length: 2.5",
            "num_steps: 3, batch: 8, tok_s: 60, acceptance_length: 3.0",
            "num_steps: 3, batch: 16, tok_s: 50, acceptance_length: 3.0",
        )
    )
    flags = [f.flag for f in found]
    assert flags == ["acceptance_length_exceeds_steps_plus_one", "aggregate_falls_with_batch"]
    assert found[0].where == "measurements.cycles[1]"


def test_nothing_is_found_in_nothing():
    assert findings("") == ()
    assert findings("measurements: {verify: [{tokens: 2, time_ms: 3}]}\n") == ()
