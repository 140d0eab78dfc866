"""`specmodel diagnose` on the command line: its object, its options, and what it takes from an engine's logs."""

import json
from pathlib import Path

import pytest

import specmodel as sm
from specmodel.cli import main
from specmodel.diagnose import diagnosis_document

ROOT = Path(__file__).parents[1]
SEED = str(ROOT / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml")
REPORTS = Path(__file__).parent / "data" / "reports"
LOGS = Path(__file__).parent / "data" / "engines"
NOISY = str(LOGS / "sglang_v0510_eagle3_tree_tp8_noisy_truncated.log")

DOCUMENT = {
    *("schema", "verdict", "culprit", "setting", "worth", "flags", "findings", "expectations", "levers", "seen"),
    *("cycle_plain_steps", "cycle_plain_steps_interval", "acceptance_length", "acceptance_length_interval"),
    *("speedup", "speedup_interval", "other_batches", "warnings", "measure_first"),
}
LEVER = {"name", "title", "bound", "bound_optimised", "interval", "status", "evidence", "decided_by"}

# Eight ranks, as `grep "draft cuda graph" server.log` gives them, the last line cut short.
BEGIN = (
    "[2026-02-20 11:05:08 TP{r}] Capture draft cuda graph begin. This can take up to several minutes. avail mem=8.67 GB"
)
END = (
    "[2026-02-20 11:05:12 TP{r}] Capture draft cuda graph end. Time elapsed: 3.61 s. mem usage=0.24 GB. "
    "avail mem={m:.2f} GB."
)


def answer(capsys, *arguments):
    assert main(["diagnose", *arguments, "--json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return json.loads(said.out, parse_constant=lambda word: pytest.fail(f"{word} in JSON"))


def screen(capsys, *arguments):
    assert main(["diagnose", *arguments]) == 0
    return capsys.readouterr().out


def ledger(found):
    return {x["name"]: x for x in found["levers"]}


def grep(cut=30):
    lines = [BEGIN.format(r=r) for r in range(8)] + [END.format(r=r, m=8.43 + 0.01 * r) for r in range(8)]
    return "\n".join(lines)[:-cut]


def test_the_object_is_what_python_says(capsys):
    found = answer(capsys, SEED)
    assert set(found) == DOCUMENT
    assert found["schema"] == "specmodel.diagnosis/1"
    assert all(set(x) == LEVER for x in found["levers"])
    same = json.loads(json.dumps(diagnosis_document(sm.diagnose(sm.fit(sm.load(SEED))))))
    same["seen"] = found["seen"]
    assert found == same


@pytest.mark.parametrize("name", ["angelslim_163", "ds4_835", "specbundle_scout_financeqa"])
def test_expectations_of_reports_on_the_command_line(capsys, name):
    found = answer(capsys, str(REPORTS / f"{name}.yaml"))
    expected = json.loads((REPORTS / f"{name}.expect.json").read_text(encoding="utf-8"))
    assert sorted(found["flags"]) == sorted(expected["flags"])
    for quantity in ("cycle_plain_steps", "verify_plain_steps"):
        for item in expected.get(quantity, ()):
            here = [i for i in found["expectations"][quantity] if item["select"].items() <= i["select"].items()]
            assert [i["value"] for i in here] == pytest.approx([item["value"]] * len(here), rel=0.03)
            assert here


def test_the_verdict_is_first_and_the_last_line_says_what_next(capsys):
    lines = screen(capsys, SEED).splitlines()
    assert lines[2].startswith("verdict    One cycle of 2 steps (ring-ll-sys) costs 1.60 plain steps")
    assert lines[-1].startswith("work on next: ")
    assert all(len(line) <= 80 for line in lines[:-1])


def test_the_last_line_of_a_loss_turns_speculation_off(capsys, tmp_path):
    file = tmp_path / "slow.yaml"
    head = "schema: specmodel.calibration/1\nname: slow\nmodel: {method: eagle3}\nmeasurements:\n  cycles:\n"
    drafts = "    - {num_steps: 3, tok_s: 60, acceptance_length: 3.1}\n"
    file.write_text(f"{head}    - {{num_steps: 0, tok_s: 100}}\n{drafts}", encoding="utf-8")
    assert screen(capsys, str(file)).splitlines()[-1].startswith("turn speculation off, 1.67x at batch 1; ")
    file.write_text(head + drafts, encoding="utf-8")
    assert screen(capsys, str(file)).splitlines()[-1].startswith("measure first: plain decoding ({num_steps: 0}); ")


def test_eight_ranks_by_one_grep_with_a_truncated_last_line(capsys, tmp_path):
    log = tmp_path / "grep.txt"
    log.write_text(grep(), encoding="utf-8")
    calibration = tmp_path / "bare.yaml"
    calibration.write_text(
        "schema: specmodel.calibration/1\nname: bare\nmodel: {method: eagle3}\nmeasurements:\n"
        "  draft: [{num_steps: 3, time_ms: 0.4}]\n  cycles:\n"
        "    - {num_steps: 0, tok_s: 100}\n    - {num_steps: 3, tok_s: 150, acceptance_length: 2.4}\n",
        encoding="utf-8",
    )
    bare = answer(capsys, str(calibration), "--worth", "3%")
    seen = answer(capsys, str(calibration), str(log), "--worth", "3%")
    assert ledger(bare)["draft_graph"]["status"] == "measure"
    assert ledger(seen)["draft_graph"]["status"] == "closed"
    assert "captured on 8 ranks" in ledger(seen)["draft_graph"]["evidence"]
    # A free draft would bring 2.6 %, 5 % with longer chains; graphs captured, half of its time at most is left to gain.
    assert ledger(bare)["draft"]["status"] != "closed"
    assert ledger(seen)["draft"]["status"] == "closed"
    assert any("memory left: 8.43 GiB, the least of 7 ranks" in text for text in seen["seen"])
    assert bare["seen"] == []
    assert main(["ingest", str(log)]) == 0
    said = capsys.readouterr().err
    for text in seen["seen"]:
        assert text in said


def test_a_whole_log_answers_every_question(capsys):
    found = answer(capsys, SEED, NOISY)
    text = "\n".join(found["seen"])
    for words in (
        "CUDA graphs of the target: captured on 8 ranks",
        "CUDA graphs of the drafter: captured on 8 ranks",
        "captured sizes: 1, 2, 4, 8, 12, 16",
        "decode with CUDA graphs: yes",
        "all-reduce: ",
        "NCCL settings in force: NCCL_ALGO=Ring",
        "memory left: 7.85 GiB",  # the least of what the file and the log say
    ):
        assert words in text
    assert ledger(found)["verify_graph"]["status"] == "closed"
    assert ledger(found)["graph_padding"]["status"] != "measure"
    assert "in force: " in ledger(found)["comm"]["evidence"]


def test_what_a_log_does_not_show_is_said(capsys):
    found = answer(capsys, SEED, str(LOGS / "nccl_debug_info.log"))
    assert "decode with CUDA graphs: not shown" in found["seen"]


def test_secrets_of_a_log_stay_in_it(capsys, tmp_path):
    text = Path(NOISY).read_text(encoding="utf-8", errors="replace")
    secret = "sk-live0123456789abcdefABCDEF"
    log = tmp_path / "server.log"
    planted = f"[2026-02-20 11:05:00] server_args=ServerArgs(model_path='m', api_key='{secret}', tp_size=8)\n"
    log.write_text(planted + text, encoding="utf-8")
    assert secret not in screen(capsys, SEED, str(log))
    assert main(["diagnose", SEED, str(log), "--json"]) == 0
    assert secret not in capsys.readouterr().out


def test_options(capsys):
    eight = str(ROOT / "calibrations" / "field" / "specforge_339_qwen3_30b_a3b_h100x2.yaml")
    found = answer(capsys, eight, "--batch", "4")
    assert found["setting"]["batch"] == 4
    assert found["other_batches"][0]["batch"] == 1
    assert answer(capsys, SEED, "--comm", "default")["setting"]["num_steps"] == 5
    assert answer(capsys, SEED, "--workload", "wiring-fault")["culprit"] == "drafter"
    assert answer(capsys, SEED, "--worth", "5%")["worth"] == answer(capsys, SEED, "--worth", "5")["worth"] == 0.05


@pytest.mark.parametrize(
    "arguments",
    [
        ("--worth", "0.02"),
        ("--worth", "0"),
        ("--worth", "%"),
        ("--worth", "-2%"),
        ("--batch", "1,2"),
        ("--batch", "0"),
        ("--batch", "1=0.5"),
        ("--comm", "nvls"),
        ("--workload", "nobody"),
        ("-",),
    ],
)
def test_wrong_usage(capsys, arguments):
    first = "-" if arguments == ("-",) else SEED
    try:
        code = main(["diagnose", first, *arguments])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err.count("error") == 1


def test_bad_files(capsys, tmp_path):
    nothing = tmp_path / "empty.log"
    nothing.write_text("", encoding="utf-8")
    other = tmp_path / "prose.log"
    other.write_text("it was a dark and stormy night\n" * 3, encoding="utf-8")
    for log in (nothing, other, tmp_path / "absent.log"):
        assert main(["diagnose", SEED, str(log)]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert log.name in said.err
    assert main(["diagnose", str(other)]) == 3


def test_a_log_of_another_deployment_is_not_evidence(tmp_path, capsys):
    """Another engine or another number of GPUs is refused; names may be anybody's words, so they are asked about."""
    system = "system: {engine: ENGINE, tensor_parallel: WIDTH}\nmeasurements: {cycles: ROWS}\n"
    head = "schema: specmodel.calibration/1\nname: own\nmodel: {target: T}\n" + system
    rows = "[{num_steps: 0, tok_s: 100}, {num_steps: 3, tok_s: 150, acceptance_length: 2.4}]"
    path = tmp_path / "own.yaml"
    for engine, width, code, said in (
        ("SGLang", 8, 0, "names another target"),
        ("vllm", 8, 3, "must be of engine vllm"),
        ("SGLang", 1, 3, "must be of tensor_parallel 1"),
        ("an engine of our own", 8, 0, "names another target"),
    ):
        path.write_text(head.replace("ENGINE", engine).replace("WIDTH", str(width)).replace("ROWS", rows))
        assert main(["diagnose", str(path), NOISY]) == code
        shown = capsys.readouterr()
        assert said in " ".join((shown.out + shown.err).split())
