"""llama.cpp as it really ran: its own counters agree with what is read, and held-out lengths are predicted."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import specmodel as sm
from specmodel.engines import llamacpp
from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given, Shape

REAL = Path(__file__).parent / "data" / "llamacpp"
MEASURED = Path(__file__).parents[1] / "calibrations" / "measured" / "cpu-smollm2-135m-llamacpp.yaml"
STEPS = range(9)
REQUESTS = 25  # 24 prompts and a short one at first


def read(*paths, **given):
    calibration, readings = ingest([str(path) for path in paths], Given(**given), "real")
    return calibration, readings


def counters(path):
    lines = [line.rsplit(" ", 1) for line in path.read_text().splitlines() if not line.startswith("#")]
    return {name.removeprefix("llamacpp:"): float(value) for name, value in lines}


@pytest.fixture(scope="module")
def sweep():
    return read(*(REAL / f"k{k}.log.gz" for k in STEPS))


def test_every_request_of_the_sweep_is_read_and_none_makes_another_length(sweep):
    calibration, readings = sweep
    assert [row.num_steps for row in calibration.measurements.cycles] == list(STEPS)
    assert [row.num_steps for row in calibration.measurements.draft] == list(STEPS)[1:]
    assert [entry.prompts for entry in calibration.acceptance] == [REQUESTS] * 8
    assert all(reading.used["requests"] == REQUESTS for reading in readings)
    assert not any(sum(reading.dropped.values()) or reading.questions for reading in readings)
    assert calibration.model.target == "SmolLM2-135M-Instruct.F32.gguf"
    assert calibration.model.draft == "SmolLM2-135M-Instruct.Q3_K_M.gguf"
    assert (calibration.model.method, calibration.model.hidden_size, calibration.model.num_layers) == (
        "draft_model",
        576,
        30,
    )


@pytest.mark.parametrize("k", list(STEPS)[1:])
def test_cycles_and_acceptance_are_those_that_the_server_counted(sweep, k):
    """The log does not print cycles; passes of the target, less one for each prompt, are counted by /metrics."""
    (entry,) = (e for e in sweep[0].acceptance if e.num_steps == k)
    counted = counters(REAL / f"k{k}.after.prom")
    assert entry.drafts == counted["n_decode_total"] - REQUESTS
    by_position = [counted[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{i}"}}'] for i in range(k)]
    assert list(entry.accepted_per_position) == by_position


def test_held_out_lengths_are_predicted(sweep):
    report = sm.cross_validate(sweep[0])
    errors = {r.row.num_steps: abs(r.error) for r in report.rows}
    speculative = [errors[k] for k in STEPS if k]
    assert np.median(list(errors.values())) < 0.05
    assert np.median(speculative) < 0.03
    assert max(speculative) < 0.06


def test_held_out_lengths_are_predicted_with_their_acceptance_unknown(sweep):
    report = sm.cross_validate(sweep[0], acceptance="fitted")
    assert np.median([abs(r.error) for r in report.rows if r.row.num_steps]) < 0.05


def test_here_speculation_does_not_pay_and_it_is_said(sweep):
    answer = sm.optimize(sm.fit(sweep[0]))
    assert answer.best.num_steps == 0
    assert answer.probability_best > 0.99
    most = max(c.speedup for c in answer.table if c.num_steps)
    assert 0.8 < most < 0.92


def test_the_committed_calibration_is_what_the_logs_say(sweep):
    committed = sm.load(MEASURED)
    assert committed.measurements == sweep[0].measurements
    assert committed.acceptance == sweep[0].acceptance
    assert committed.model == sweep[0].model


@pytest.mark.parametrize("k", [1, 8])
@pytest.mark.parametrize("stated", [True, False])
def test_replies_say_the_same_whether_the_length_is_stated_or_not(sweep, k, stated):
    given = {"shape": Shape(num_steps=k)} if stated else {}
    calibration, (reading,) = read(REAL / f"replies_k{k}.jsonl", **given)
    (row,), (entry,) = calibration.measurements.cycles, calibration.acceptance
    logged = sweep[0].measurements.cycles[k]
    assert (row.num_steps, reading.used["requests"]) == (k, 24)
    assert row.cycle_ms == pytest.approx(logged.cycle_ms, rel=0.02)
    # The log has one more request, of eight tokens; an answer that ended early tells its cycles by drafts alone.
    counted = counters(REAL / f"k{k}.after.prom"), counters(REAL / f"k{k}.before.prom")
    passes = counted[0]["n_decode_total"] - counted[1]["n_decode_total"] - 24
    assert entry.drafts == pytest.approx(passes, abs=2)


def test_replies_without_drafts_are_plain_decoding(sweep):
    calibration, _ = read(REAL / "replies_k0.jsonl")
    (row,) = calibration.measurements.cycles
    assert row.num_steps == 0
    assert row.cycle_ms == pytest.approx(sweep[0].measurements.cycles[0].cycle_ms, rel=0.02)


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_two_scrapes_agree_with_the_log(sweep, k):
    calibration, _ = read(REAL / f"k{k}.before.prom", REAL / f"k{k}.after.prom")
    for row in calibration.measurements.cycles:
        # A mean of all, beside a median over requests.
        assert row.cycle_ms == pytest.approx(sweep[0].measurements.cycles[k].cycle_ms, rel=0.05)
        assert row.num_steps == k
    for entry in calibration.acceptance:
        assert entry.drafts == pytest.approx(sweep[0].acceptance[k - 1].drafts, rel=0.05)


def test_speculative_simple_agrees_with_the_server(sweep):
    calibration, _ = read(*(REAL / f"simple_k{k}.txt" for k in STEPS if k))
    assert [row.num_steps for row in calibration.measurements.cycles] == list(STEPS)[1:]
    for row in calibration.measurements.cycles:
        assert row.cycle_ms == pytest.approx(sweep[0].measurements.cycles[row.num_steps].cycle_ms, rel=0.1)


def test_two_slots_at_the_usual_verbosity():
    """The length is told from counts alone; requests that shared the machine are counted but not timed."""
    calibration, (reading,) = read(REAL / "two_slots.log.gz")
    (row,), (entry,) = calibration.measurements.cycles, calibration.acceptance
    assert (row.num_steps, row.batch, entry.num_steps, entry.prompts) == (3, 1, 3, 4)
    assert reading.dropped["not timed: several slots were busy"] == 2
    counted = counters(REAL / "two_slots.prom")
    assert entry.drafts == counted["spec_decode_num_drafts_total"]
    accepted = counted["spec_decode_num_accepted_tokens_total"]
    assert entry.acceptance_length == pytest.approx(1 + accepted / entry.drafts, abs=1e-5)


def test_json_lines_hold_the_same_words():
    calibration, _ = read(REAL / "k3_json_lines.log.gz")
    (row,), (entry,), (draft,) = (
        calibration.measurements.cycles,
        calibration.acceptance,
        calibration.measurements.draft,
    )
    assert (row.num_steps, entry.accepted_per_position, draft.num_steps) == (3, (9, 6, 3), 3)
    assert draft.time_ms == pytest.approx(7.4926 * 3, rel=1e-3)


def test_drafts_cut_short_say_how_many_were_drafted_and_give_no_draft_time():
    calibration, (reading,) = read(REAL / "k4_p_min_075.log.gz")
    (row,), (entry,) = calibration.measurements.cycles, calibration.acceptance
    assert row.mean_draft_tokens == pytest.approx(8 / 23, abs=1e-4)
    assert (entry.drafts, entry.accepted_per_position) == (23, (6, 2, 0, 0))
    assert not calibration.measurements.draft
    assert reading.dropped["draft times of drafts that were mostly cut short"] == 1


def request(rounds, chain, shown, *, mean=True):
    """Lines of one request: accepted drafts of each cycle, and how many tokens of the last cycle the answer has."""
    accepted = sum(rounds)
    tokens = 1 + sum(a + 1 for a in rounds[:-1]) + shown
    drafted, ms = chain * len(rounds), 10.0 * len(rounds)
    head = "slot print_timing: id  0 | task 7 | "
    tail = f", mean len = {1 + accepted / len(rounds):5.2f}" if mean else ""
    rates = ", ".join(f"{sum(a >= i for a in rounds) / len(rounds):.3f}" for i in range(1, chain + 1))
    return (
        f"{head}prompt eval time =      10.00 ms /    10 tokens (    1.00 ms per token,  1000.00 tokens per second)\n"
        f"{head}       eval time = {ms:10.2f} ms / {tokens:5d} tokens (\n"
        f"{head}draft acceptance = {accepted / drafted:.5f} ({accepted:5d} accepted / {drafted:5d} generated){tail}\n"
        + (f"{head}     acc per pos = ({rates})\n" if mean else "")
    )


@pytest.mark.parametrize("chain", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", range(4))
def test_an_answer_that_ends_within_what_was_accepted_still_tells_its_cycles(tmp_path, chain, seed):
    rng = np.random.default_rng([chain, seed])
    rounds = [int(a) for a in rng.integers(0, chain + 1, size=12)] + [chain]
    for shown in range(1, chain + 2):  # the whole last cycle is chain + 1 tokens
        log = tmp_path / "server.log"
        log.write_text(request(rounds, chain, shown))
        calibration, (reading,) = read(log)
        (row,), (entry,) = calibration.measurements.cycles, calibration.acceptance
        assert (row.num_steps, row.cycle_ms, entry.drafts) == (chain, 10.0, 13), (shown, reading.dropped)
        assert sum(entry.accepted_per_position) == sum(rounds)


@pytest.mark.parametrize("chain", [2, 4])
def test_a_stated_length_is_never_replaced_by_what_one_request_seems_to_have(tmp_path, chain):
    stated = f"spec common_specu: - n_max={chain}, n_min=0, p_min=0.000000\n"
    # Drafts that no number of cycles up to the tokens of the answer can hold: a damaged count.
    damaged = request([1] * 5, 3 * chain, 2, mean=False)
    log = tmp_path / "server.log"
    log.write_text(stated + request([chain] * 6, chain, chain + 1) + damaged)
    calibration, (reading,) = read(log)
    assert [row.num_steps for row in calibration.measurements.cycles] == [chain]
    assert reading.dropped["requests whose counts contradict each other, or the steps"] == 1


@pytest.mark.parametrize(
    "line",
    [
        "W spec common_specu: synthetic speculative acceptance is enabled for benchmarking; generated output is",
        "I spec common_specu: synthetic acceptance: n_max = 3, mean length = 2.500000, rates = [0.70, 0.49, 0.31]",
    ],
)
def test_acceptance_that_was_set_is_not_taken_for_measured(tmp_path, line):
    log = tmp_path / "server.log"
    log.write_text(f"0.00.500.000 {line}\n" + request([1, 2, 3, 0, 3], 3, 4))
    calibration, (reading,) = read(log)
    (row,) = calibration.measurements.cycles
    assert (row.num_steps, row.cycle_ms) == (3, 10.0)
    assert not calibration.acceptance
    assert reading.dropped["synthetic acceptance: it was set, not measured"] == 1


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("build: 3962 (1a2b3c4d) with gcc", "b3962"),
        ("build_info: b10472-1a2b3c4d5", "b10472"),
        ("cmn  common_param: common_params_print_info: build 11434 (1a2b3c4d5) with GNU 12.2.0 for Linux", "b11434"),
        ("cmn  common_param: common_params_print_info: build 0 (unknown) with GNU 12.2.0 for Linux", None),
    ],
)
def test_the_build_is_read_where_it_is_known(tmp_path, line, version):
    log = tmp_path / "server.log"
    log.write_text(f"0.00.012.345 I {line}\n" + request([1, 2, 3], 3, 4))
    calibration, _ = read(log)
    assert calibration.system.engine_version == version


def test_sizes_are_those_of_the_target_not_of_the_drafter(tmp_path):
    def info(hidden, layers, experts, used):
        sizes = {"n_embd_inp": 1, "n_embd": hidden, "n_layer": layers, "n_layer_all": 1, "n_expert": experts}
        sizes["n_expert_used"] = used
        return "".join(f"0.01.000.000 I print_info: {key:21} = {value}\n" for key, value in sizes.items())

    draft = "0.02.000.000 I common_speculative_init_result: loading draft model '/models/small.gguf'\n"
    log = tmp_path / "server.log"
    log.write_text(info(2048, 48, 128, 8) + draft + info(512, 4, 0, 0) + request([1, 2, 3], 3, 4))
    model = read(log)[0].model
    assert (model.hidden_size, model.num_layers, model.num_experts, model.experts_per_token) == (2048, 48, 128, 8)
    assert model.draft == "small.gguf"


def test_the_recording_names_no_machine():
    import gzip

    for path in REAL.iterdir():
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        assert not re.search(r"/(?:tmp|home|root|work|usr|mnt)/|https?://(?!github\.com|127\.0\.0\.1)", text), path.name
    assert all(json.loads(line)["timings"] for line in (REAL / "replies_k1.jsonl").read_text().splitlines())


def test_a_log_of_very_many_requests_says_how_many_it_used(tmp_path, monkeypatch):
    monkeypatch.setattr(llamacpp, "MOST_REQUESTS", 5)
    log = tmp_path / "server.log"
    log.write_text(request([1, 2, 3, 0, 3], 3, 4) * 9)
    calibration, (reading,) = read(log)
    assert reading.used["requests"] == 5
    assert reading.dropped["requests beyond the first 5"] == 4
    assert calibration.acceptance[0].prompts == 5
