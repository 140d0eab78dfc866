"""A short run of the fuzzer over every format (tests/fuzz/fuzz_ingest.py runs longer), and texts of hypothesis."""

import importlib.util
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specmodel.engines.reading import Given

SCRIPT = Path(__file__).parent / "fuzz" / "fuzz_ingest.py"
spec = importlib.util.spec_from_file_location("fuzz_ingest", SCRIPT)
fuzzer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fuzzer)
SEEDS = fuzzer.seeds()


@pytest.mark.parametrize("name", SEEDS)
def test_mutated_outputs_neither_crash_nor_break_an_invariant(name):
    outcomes = fuzzer.fuzz(name, SEEDS[name], 40, seed=fuzzer.SEED)
    assert outcomes["failed"] == 0
    assert outcomes["accepted"] > 0


@pytest.mark.parametrize("name", fuzzer.MEASURING)
def test_one_harmed_number_is_dropped_or_outvoted_never_believed(name):
    data = (fuzzer.DATA / fuzzer.FORMATS[name]).read_bytes()
    before = fuzzer.ingest_bytes(data, Given())
    for number in range(60):
        harmed = fuzzer.harm_a_number(data, fuzzer.MEASURING[name], random.Random(f"{name} {number}"))
        after = fuzzer.ingest_bytes(harmed, Given())
        assert fuzzer.silently_wrong(before, after) == []


def test_the_fuzzer_sees_what_it_looks_for():
    assert fuzzer.mutate(b"1 2 3", random.Random(1)) != fuzzer.mutate(b"1 2 3", random.Random(2))
    data = SEEDS["sglang-bench-speculative"]
    calibration = fuzzer.ingest_bytes(data, Given())
    assert fuzzer.broken(calibration) == []
    wrong = fuzzer.ingest_bytes(data.replace(b'"step_time": 0.0079, "speed": 126.582', b'"step_time": 0.0179'), Given())
    assert fuzzer.silently_wrong(calibration, wrong)


anchors = st.sampled_from(
    [
        b"Decode batch, ",
        b"#running-req: ",
        b"accept len: ",
        b"gen throughput (token/s): ",
        b"#queue-req: 0",
        b"server_args=ServerArgs(tp_size=8, speculative_num_steps=3, speculative_algorithm='EAGLE3', ",
        b"Capture draft cuda graph end. avail mem=",
        b"SpecDecoding metrics: Mean acceptance length: ",
        b"Per-position acceptance rate: 0.7, 0.5",
        b"Accepted: 5 tokens, Drafted: 9 tokens",
        b"Iteration(7): 0 context requests, 0 context tokens, ",
        b"iter = 5, host_step_time = 3ms, states = {'num_ctx_requests': 0}",
        b"eval time = 5.00 ms / 9 tokens",
        b"draft acceptance = 0.5 (",
        b"NCCL INFO NCCL_ALGO set by environment to ",
        b"1024 512 half sum -1 8.0 0.1 0.1 0 8.0 0.1 0.1 0",
        b"sglang:gen_throughput 5\n",
        b'{"timings": {"predicted_n": 5, "predicted_ms": 7}}',
        b"\n",
        b"\r",
        b", ",
    ]
)
pieces = st.one_of(anchors, anchors, st.binary(max_size=12), st.integers(-9, 10**9).map(lambda n: str(n).encode()))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(pieces, max_size=30).map(b"".join))
def test_texts_made_of_the_engines_own_words(text):
    outcome, faults = fuzzer.run_one(text, Given())
    assert outcome in ("accepted", "refused")
    assert faults == []
