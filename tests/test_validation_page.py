"""The validation page: nothing held out leaks into a fit, arithmetic on known numbers, and the committed page."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import specmodel as sm
from specmodel.calibration import Calibration, CycleRow
from specmodel.errors import UsageError
from specmodel.heldout.figures import binned
from specmodel.heldout.markdown import grid
from specmodel.heldout.points import LEVELS, Decision, HeldOut, Results, length_of, settings_of
from specmodel.heldout.summary import aims_of, likely_reason, summary_of, worst_of
from specmodel.heldout.sweeps import hold_out
from specmodel.heldout.tables import (
    SPARSE_TOKENS,
    allreduce_shares,
    from_tables,
    has_tables,
    other_widths,
    settings_gain,
    sparse,
    transfers,
)
from specmodel.heldout.text import every_file
from specmodel.validation_page import gather, page_of, write_page

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "validation.md"
COMMITTED = sorted((ROOT / "calibrations").glob("*/*.yaml"))
COMMAND = "specmodel validate --page docs/validation.md calibrations/*/*.yaml"
QUICK = ("club3090_1052_qwen38_27b_3090x2", "koboldcpp_2262_gemma4_12b_3060", "sglang_21599_eagle_steps")


def examples() -> ModuleType:
    """How examples in the documentation are compared: numbers may differ as linear algebra libraries do."""
    path = ROOT / "tests" / "docs_examples.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def calibration(name: str = "synthetic", **sections: Any) -> Calibration:
    return sm.from_dict({"schema": "specmodel.calibration/1", "name": name, **sections})


# ------------------------------------------------------------------------------------------------ published sweeps
def cycle_ms(steps: int, batch: float) -> float:
    return 10.0 + 0.4 * batch + steps * (1.0 + 0.05 * batch)


def length(steps: int) -> float:
    return float(sum(0.7**k for k in range(steps + 1)))


def sweep(workloads: tuple[str, ...] = ("chat",), **more: Any) -> Calibration:
    """Three lengths at four batches, and a tree; acceptance is known of `chat` alone."""
    cycles = []
    for workload in workloads:
        for batch in (1, 2, 4, 8):
            for steps in (0, 1, 2, 4) if batch == 1 else (0, 2):
                row = {"num_steps": steps, "batch": batch, "workload": workload}
                row["tok_s"] = round(1000.0 * batch * length(steps) / cycle_ms(steps, batch), 2)
                known = workload == "chat" and steps
                cycles.append({**row, **({"acceptance_length": length(steps)} if known else {})})
    tree = {"num_steps": 3, "topk": 2, "num_draft_tokens": 5, "workload": "chat"}
    cycles.append({**tree, "tok_s": 165.0, "acceptance_length": 2.6})
    cycles.append({"num_steps": 3, "tok_s_at_most": 150.0, "workload": workloads[-1]})
    return calibration(measurements={"cycles": cycles}, **more)


BOTH = ("chat", "code")
APART = {"cycles": [{"num_steps": 2, "tok_s": 175.0, "acceptance_length": 2.1}]}


def key(p: HeldOut) -> tuple[object, ...]:
    row = p.row
    return p.task, p.group, row.workload, row.num_steps, row.topk, row.batch


@pytest.fixture(scope="module")
def swept() -> Results:
    """Everything held out of both workloads."""
    return hold_out(sweep(BOTH, validation=APART))


def test_every_task_is_made_and_only_measured_settings_are_judged(swept: Results) -> None:
    counts: dict[str, int] = {}
    for p in swept.points:
        counts[p.task] = counts.get(p.task, 0) + 1
    assert counts == {
        "length, given": 3,
        "length, not given": 3,
        "length, blind": 3,
        "between, given": 1,
        "between, not given": 1,
        "between, blind": 1,
        "tree": 1,
        "batch": 16,
        "all of a batch": 21,
        "kept apart": 1,
    }
    assert [d.blind for d in swept.decisions] == [False, True]
    assert not swept.failures
    assert all(p.row.tok_s_at_most is None for p in swept.points)


def test_a_smooth_deployment_is_predicted_well(swept: Results) -> None:
    assert np.median([abs(p.error) for p in swept.points if p.row.topk == 1]) < 0.03
    # A straight line of cycle times is what this deployment is: arithmetic finds it.
    lines = [p.simple_error for p in swept.points if p.task in ("length, given", "between, given")]
    np.testing.assert_allclose(np.array(lines, dtype=float), 0.0, atol=1e-3)


@pytest.mark.parametrize("task", ["length", "between", "tree", "batch", "kept apart"])
def test_what_is_held_out_does_not_reach_the_fit(task: str) -> None:
    """A prediction stays the same whatever the measurement that it is compared with."""
    cal = sweep(validation=APART)
    before = {key(p): p for p in hold_out(cal).points}
    seen = 0
    some = [p for p in before.values() if p.task.startswith(task)]
    for p in some[:: max(len(some) // 3, 1)]:
        section = cal.validation if p.task == "kept apart" else cal.measurements
        cycles = tuple(replace(r, tok_s=1.3 * r.tok_s) if r == p.row and r.tok_s else r for r in section.cycles)
        changed = replace(section, cycles=cycles)
        other = replace(cal, **{"validation" if p.task == "kept apart" else "measurements": changed})
        after = {key(q): q for q in hold_out(other).points}[key(p)]
        assert after.measured_tok_s == pytest.approx(1.3 * p.measured_tok_s)
        assert after.predicted_tok_s == pytest.approx(p.predicted_tok_s, rel=1e-9)
        np.testing.assert_allclose(after.intervals, p.intervals, rtol=1e-9)
        seen += 1
    assert seen


def test_the_acceptance_of_a_held_out_length_is_not_given_unless_it_says_so() -> None:
    """Neither by the row nor by an entry of its shape."""
    entries = [{"num_steps": k, "workload": "code", "acceptance_length": length(k)} for k in (1, 2, 4)]
    cal = sweep(BOTH, acceptance=entries)
    doubtful = tuple(replace(a, acceptance_length=1.05) if a.num_steps == 2 else a for a in cal.acceptance)
    before, after = ({key(p): p for p in hold_out(c).points} for c in (cal, replace(cal, acceptance=doubtful)))
    held = [k for k in before if k[0] == "length, not given" and k[2:4] == ("code", 2)]
    assert held
    for k in held:
        assert after[k].predicted_tok_s == pytest.approx(before[k].predicted_tok_s, rel=1e-9)
    others = [k for k in before if k[0] == "length, not given" and k[2:4] == ("code", 4)]
    assert any(abs(after[k].predicted_tok_s / before[k].predicted_tok_s - 1.0) > 1e-3 for k in others)


def test_another_workload_does_not_reach_the_fit(swept: Results) -> None:
    cal = sweep(BOTH, validation=APART)
    cycles = tuple(
        replace(r, tok_s=1.2 * r.tok_s) if r.workload == "chat" and r.tok_s else r for r in cal.measurements.cycles
    )
    other = replace(cal, measurements=replace(cal.measurements, cycles=cycles))
    before, after = ({key(p): p for p in r.points} for r in (swept, hold_out(other)))
    for k, p in before.items():
        if k[2] == "code":
            assert after[k].predicted_tok_s == pytest.approx(p.predicted_tok_s, rel=1e-9)


def test_repeats_count_once_and_forms_of_a_speed_agree() -> None:
    rows = [
        {"num_steps": 2, "batch": 2, "tok_s": 100.0, "acceptance_length": 2.0},
        {"num_steps": 2, "batch": 2, "tpot_ms": 20.0, "acceptance_length": 2.2},
        {"num_steps": 2, "batch": 2, "cycle_ms": 40.0, "acceptance_length": 2.4},
        {"num_steps": 3, "batch": 2, "cycle_ms": 40.0},
        {"num_steps": 0, "speculation": True, "tok_s": 90.0},
    ]
    cal = calibration(measurements={"cycles": rows})
    (setting,) = settings_of(cal, cal.measurements.cycles)
    assert setting.rows == (0, 1, 2)
    assert setting.tok_s == pytest.approx((100.0 + 100.0 + 1000.0 * 2 * 2.4 / 40.0) / 3)
    assert setting.acceptance_length == pytest.approx(2.2)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"acceptance_length": 2.5}, 2.5),
        ({"survival": [0.8, 0.5]}, 2.3),
        ({"conditional": [0.8, 0.5]}, 2.2),
        ({"drafts": 100, "accepted_per_position": [80, 40]}, 2.2),
        ({"drafts": 100, "accepted_by_rank": [[60, 10], [30, 5]]}, 2.05),
        ({"survival": [0.8]}, None),
    ],
)
def test_length_of_an_entry(form: dict[str, Any], expected: float | None) -> None:
    entry = calibration(acceptance=[{"num_steps": 2, **form}]).acceptance[0]
    assert length_of(entry) == (None if expected is None else pytest.approx(expected))


# ------------------------------------------------------------------------------------------------- measured tables
LAYERS, HIDDEN = 16, 4096
STEPS = (1, 3, 7)
SETTINGS = {"default": (0.010, 1e-8), "slow": (0.025, 1e-8), "thin": (0.010, 1.2e-7)}
EXTRA = {"default": 0.0, "slow": 0.003, "thin": 0.003}


def reduce_ms(comm: str, size_bytes: float) -> float:
    alpha, beta = SETTINGS[comm]
    return alpha + beta * size_bytes


def verify_ms(tokens: int, comm: str) -> float:
    each = reduce_ms(comm, tokens * HIDDEN * 2) + EXTRA[comm]
    return 5.0 + 0.01 * tokens + 2 * LAYERS * each


def tables(name: str = "tables", width: int = 2, scope: str | None = None, **system: Any) -> Calibration:
    """Tables of a machine whose cycles are exactly their sum, under three settings; drafts in graphs and eager."""
    counts = (*range(1, 9), 16, 32, 64)
    verify = [
        {"tokens": n, "comm": c, "time_ms": verify_ms(n, c), "sd_ms": 0.005, "samples": 30}
        for c in SETTINGS
        for n in counts
    ]
    scopes: list[dict[str, Any]] = [{}, {"cuda_graph": False}, *([{"graph_scope": scope}] if scope else [])]
    each = {"": 0.4, "cycle": 0.3, "eager": 0.9}

    def step_ms(how: dict[str, Any]) -> float:
        return each["eager" if how.get("cuda_graph") is False else how.get("graph_scope", "")]

    draft = [
        {"num_steps": k, "comm": c, "time_ms": k * step_ms(how), **how}
        for c in SETTINGS
        for how in scopes
        for k in STEPS
    ]
    allreduce = [
        {"size_bytes": n * HIDDEN * 2, "comm": c, "in_graph": True, "time_ms": reduce_ms(c, n * HIDDEN * 2)}
        for c in SETTINGS
        for n in counts
    ]
    cycles = [{"num_steps": 0, "comm": c, "cycle_ms": verify_ms(1, c)} for c in SETTINGS]
    cycles += [
        {
            "num_steps": k,
            "comm": c,
            "cycle_ms": verify_ms(k + 1, c) + k * step_ms(how),
            "acceptance_length": length(k),
            **how,
        }
        for c in SETTINGS
        for how in scopes
        for k in STEPS
    ]
    return calibration(
        name,
        system={"gpu": "H200", "num_gpus": width, "tensor_parallel": width, "engine": "harness", **system},
        model={"method": "eagle3", "hidden_size": HIDDEN, "num_layers": LAYERS},
        comm={c: {"env": {"NCCL_PROTO": c}} for c in SETTINGS},
        measurements={"verify": verify, "draft": draft, "allreduce": allreduce},
        acceptance=[{"num_steps": 5, "conditional": [0.7] * 5}],
        validation={"cycles": cycles},
    )


def test_cycles_are_the_sum_of_their_tables() -> None:
    cal = tables(scope="cycle")
    assert has_tables(cal)
    points = list(from_tables(cal))
    full = [p for p in points if p.task == "full table"]
    assert len(full) == len(points) / 2 == len(cal.validation.cycles)
    np.testing.assert_allclose([float(p.simple_error or 0.0) for p in full], 0.0, atol=1e-9)
    assert {p.mode for p in full} == {"plain", "one graph a step", "one graph a cycle", "eager"}
    for mode in ("plain", "one graph a step", "one graph a cycle", "eager"):
        errors = [abs(p.error) for p in full if p.mode == mode]
        assert np.median(errors) < 0.01, mode
    rough = [abs(p.error) for p in points if p.task == "sparse table"]
    assert np.median(rough) < 0.02


def test_the_cycles_apart_do_not_reach_the_fit() -> None:
    cal = tables()
    slower = tuple(replace(r, cycle_ms=1.5 * (r.cycle_ms or 0.0)) for r in cal.validation.cycles)
    other = replace(cal, validation=replace(cal.validation, cycles=slower))
    for before, after in zip(from_tables(cal), from_tables(other), strict=True):
        assert after.predicted_tok_s == pytest.approx(before.predicted_tok_s, rel=1e-9)
        assert after.measured_tok_s == pytest.approx(before.measured_tok_s / 1.5)


def test_the_sparse_table_holds_few_token_counts_and_says_what_lies_beyond() -> None:
    cal = tables()
    kept = sparse(cal).measurements
    assert {r.tokens for r in kept.verify} == set(SPARSE_TOKENS)
    assert kept.draft == cal.measurements.draft
    far = replace(
        cal, validation=replace(cal.validation, cycles=tuple(replace(r, batch=8) for r in cal.validation.cycles))
    )
    for p in from_tables(far):
        assert p.interior == (p.task == "full table" or 8 * (p.row.num_steps + 1) <= SPARSE_TOKENS[-1])
        assert p.simple_tok_s is None  # nothing was timed at that batch


def test_drafts_timed_once_a_step_are_added_up() -> None:
    cal = tables()
    once = tuple(r for r in cal.measurements.draft if r.num_steps == 1)
    points = from_tables(replace(cal, measurements=replace(cal.measurements, draft=once)))
    errors = [p.simple_error for p in points if p.task == "full table"]
    np.testing.assert_allclose(np.array(errors, dtype=float), 0.0, atol=1e-9)


def test_a_setting_is_predicted_from_the_table_of_the_default() -> None:
    cal = tables()
    passes, cycles = transfers(cal)
    assert {t.comm for t in passes} == {p.group for p in cycles} == {"slow", "thin"}
    assert all(t.tokens != 4 for t in passes)
    assert np.quantile([abs(t.error) for t in passes], 0.95) < 0.02
    # What each operation costs more inside a graph is not in the curves: one point finds it.
    with_point, without = (
        float(np.mean([abs(getattr(t, name)) for t in passes])) for name in ("error", "error_without_point")
    )
    assert with_point < without
    assert np.mean([t.inside for t in passes]) > 0.8
    assert np.median([abs(p.error) for p in cycles]) < 0.01


def test_the_passes_of_a_setting_do_not_reach_its_prediction() -> None:
    cal = tables()
    m = cal.measurements
    slower = tuple(
        replace(r, time_ms=1.4 * (r.time_ms or 0.0)) if r.comm != "default" and r.tokens != 4 else r for r in m.verify
    )
    other = replace(cal, measurements=replace(m, verify=slower))
    for before, after in zip(transfers(cal)[0], transfers(other)[0], strict=True):
        assert after.predicted_ms == pytest.approx(before.predicted_ms, rel=1e-9)
        assert after.measured_ms == pytest.approx(1.4 * before.measured_ms)


def test_settings_that_miss_their_aim_alone_stand_first() -> None:
    """Settings pooled may keep an aim that one of them misses: it is named, and is the first of the table."""
    cal = tables()
    m = cal.measurements
    wide = tuple(
        replace(r, time_ms=1.2 * (r.time_ms or 0.0)) if r.comm == "thin" and r.tokens > 4 else r for r in m.verify
    )
    for verify, first, bold in ((m.verify, "slow", 0), (wide, "thin", 1)):
        page = page_of(gather([replace(cal, measurements=replace(m, verify=verify))]), {}, COMMAND)
        table = page.partition("\n## Communication settings\n")[2].partition("###")[0]
        rows = [line for line in table.splitlines() if line.startswith(("| tables", "| all"))]
        assert [row.split(" | ")[1] for row in rows] == [first, *({"slow", "thin"} - {first}), "all"]
        assert [("**" in row) for row in rows[:-1]] == [bool(bold), False]
        assert ("alone miss the aim of their passes: 1 of 2" in page) == bool(bold)
        assert ("- tables, thin: median" in page) == bool(bold)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 4, 24])
def test_where_the_one_point_of_a_setting_lies_matters_little(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """What docs/measure.md says of a point anywhere from 1 to 24 tokens."""
    monkeypatch.setattr("specmodel.heldout.tables.POINT_TOKENS", tokens)
    cals = [sm.load(path) for path in COMMITTED if path.name.startswith("h200x2")]
    errors = np.abs([t.error for cal in cals for t in transfers(cal)[0]])
    assert len(errors) > 400
    assert 0.0075 < np.median(errors) < 0.0115
    assert 0.0305 < np.quantile(errors, 0.95) < 0.0445


def test_shares_of_the_all_reduces_and_what_settings_bring() -> None:
    cal = tables()
    for s in allreduce_shares(cal):
        assert s.width == 2
        for n, share in s.shares.items():
            expected = 2 * LAYERS * reduce_ms(s.comm, n * HIDDEN * 2) / verify_ms(n, s.comm)
            assert share == pytest.approx(expected, rel=1e-9)
    comm, tokens, gain = settings_gain(cal) or ("", 0, 0.0)
    assert gain < 0.0  # the default is the fastest
    assert gain == pytest.approx(1.0 - verify_ms(tokens, comm) / verify_ms(tokens, "default"))
    assert settings_gain(sweep()) is None
    assert allreduce_shares(sweep()) == []


def test_curves_of_another_width() -> None:
    """A ring's latency grows as its width less one, its time a byte as (R - 1) / R."""
    two = tables("two", width=2)
    rows = tuple(
        replace(r, time_ms=3.0 * SETTINGS[r.comm][0] + 1.5 * SETTINGS[r.comm][1] * r.size_bytes)
        for r in two.measurements.allreduce
    )
    four = replace(tables("four", width=4), measurements=replace(tables("four", width=4).measurements, allreduce=rows))
    found = other_widths([two, four])
    assert {(w.of_gpus, w.from_gpus, w.comm) for w in found} == {
        (a, b, c) for a, b in ((2, 4), (4, 2)) for c in SETTINGS
    }
    assert max(abs(e) for w in found for e in w.errors) < 1e-6
    elsewhere = replace(four, system=replace(four.system, gpu="B200"))
    renamed = replace(four, comm={c: replace(s, env={"NCCL_PROTO": "other"}) for c, s in four.comm.items()})
    assert other_widths([two, elsewhere]) == other_widths([two, renamed]) == other_widths([two]) == []


# --------------------------------------------------------------------------------------------------------- numbers
def held(measured: float, predicted: float, half: float = 0.1, **more: Any) -> HeldOut:
    """A prediction with an interval of ± `half` at 90 %, narrower and wider ones in proportion."""
    intervals = tuple((predicted * (1 - half * level / 0.9), predicted * (1 + half * level / 0.9)) for level in LEVELS)
    whole: dict[str, Any] = {"task": "length, given", "file": "f", "group": "g", "interior": True}
    whole["row"] = more.pop("row", CycleRow(num_steps=2, tok_s=measured))
    return HeldOut(**whole | more, measured_tok_s=measured, predicted_tok_s=predicted, intervals=intervals)


def test_errors_intervals_and_misses_of_a_point() -> None:
    p = held(100.0, 120.0)
    assert p.error == pytest.approx(0.2)
    assert p.width == pytest.approx(0.24)
    assert p.miss == pytest.approx(0.08)
    assert not p.inside()
    assert held(100.0, 108.0).inside(0.9)
    assert not held(100.0, 108.0).inside(0.5)
    assert held(100.0, 108.0).miss == 0.0
    assert held(100.0, 80.0).miss == pytest.approx(0.12)


def test_a_summary_counts_what_it_is_given() -> None:
    points = [held(100.0, 100.0 + e, group=f"{e}") for e in range(11)]
    s = summary_of([*points, held(100.0, 150.0, simple_tok_s=140.0)])
    assert s is not None
    assert (s.count, s.groups) == (12, 12)
    assert s.median == pytest.approx(0.055)
    assert s.worst == pytest.approx(0.5)
    assert s.inside == pytest.approx(11 / 12)
    assert s.simple == pytest.approx(0.4)
    assert s.beside == pytest.approx(0.5)
    assert summary_of([]) is None


@pytest.mark.parametrize(("off", "kept"), [(0.01, True), (0.2, False)])
def test_aims_are_kept_or_missed(off: float, kept: bool) -> None:
    points = [held(100.0, 100.0 * (1 + off))]
    decision = Decision(
        file="f",
        group="g",
        blind=False,
        picked=1,
        judged_as=1,
        best=2,
        regret=off / 10,
        right=False,
        probability_best=0.4,
        probability=0.5,
        complete=True,
    )
    aims = aims_of(points, [decision], [], [])
    assert {a.what for a in aims} == {"length, given", "chain length chosen, acceptance known"}
    assert {a.kept for a in aims if a.what == "length, given"} == {kept}
    assert [a.kept for a in aims] == sorted(a.kept for a in aims)


def test_the_worst_of_each_group_come_first() -> None:
    rows = [CycleRow(num_steps=k, tok_s=100.0) for k in (1, 2, 3)]
    points = [held(100.0, 100.0 + e, row=r, group=g) for e, r, g in zip((30, 20, 25), rows, "aab", strict=True)]
    points.append(held(100.0, 101.0, group="c"))
    worst = worst_of(points, lambda p: abs(p.error), 0.1, 5)
    assert [(p.group, more) for p, more in worst] == [("a", 1), ("b", 0)]
    assert worst_of(points, lambda p: abs(p.error), 0.1, 1) == worst[:1]


def test_reasons_come_from_the_numbers_the_row_and_the_file() -> None:
    caveats = ["prefill included", "ten prompts", "before a fix: a stall every round"]
    cycles = [{"num_steps": 0, "tok_s": 100}, {"num_steps": 1, "tok_s": 300, "acceptance_length": 2.5, "note": "odd"}]
    cal = calibration(measurements={"cycles": cycles}, provenance={"source": "s", "caveats": caveats})
    p = held(300.0, 200.0, row=cal.measurements.cycles[1], interior=False, simple_tok_s=210.0)
    reason = likely_reason(cal, p)
    for part in ("extrapolation", "-30 % too", "its note: odd", "can emit", "a stall", "prefill"):
        assert part in reason, part
    assert reason.index("a stall") < reason.index("prefill")
    assert "ten prompts" not in reason


def test_bins_of_stated_probabilities() -> None:
    whole: dict[str, Any] = {"file": "f", "group": "g", "blind": False, "picked": 1, "judged_as": 1, "best": 1}
    whole |= {"regret": 0.0, "probability_best": 0.1, "complete": True}
    stated = [(0.1, True), (0.3, False), (0.4, True), (1.0, True), (0.9, None)]
    found = binned([Decision(**whole, probability=p, right=right) for p, right in stated])
    assert found == [
        (0.0, 0.4, 2, pytest.approx(0.2), 0.5),
        (0.4, 0.6, 1, pytest.approx(0.4), 1.0),
        (0.8, 1.0, 1, pytest.approx(1.0), 1.0),
    ]


def test_cells_of_a_table_cannot_break_it() -> None:
    lines = grid(["a", "b"], [["x|y\nz", "1"]])
    assert lines == ["| a | b |", "| --- | --: |", "| x\\|y z | 1 |"]


# ------------------------------------------------------------------------------------------------------------ page
@pytest.fixture(scope="module")
def small() -> list[Calibration]:
    four = tables("four", width=4)
    return [sweep(BOTH), tables("two"), four]


@pytest.mark.slow
def test_the_page_is_written_with_its_figures_and_the_same_again(tmp_path: Path, small: list[Calibration]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_page(small if name == "a" else small[::-1], tmp_path / name / "validation.md", COMMAND)
    text = (tmp_path / "a" / "validation.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((images/[^)]+)\)", text)
    assert len(links) == 5
    files = {str(p.relative_to(tmp_path / "a")) for p in (tmp_path / "a").rglob("*") if p.is_file()}
    assert files == {"validation.md", *links}
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    assert COMMAND in text
    assert not re.search(r"\b(nan|inf|None)\b", text)
    # The failures stand before everything that went well.
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[:3] == ["What is predicted from what", "What went wrong", "Published deployments"]


def test_every_table_of_the_page_is_whole(small: list[Calibration]) -> None:
    widths: list[int] = []
    for line in page_of(gather(small), {}, COMMAND).splitlines():
        cells = re.findall(r"(?<!\\)\|", line) if line.startswith("|") else []
        if cells and widths:
            assert len(cells) == widths[-1], line
        widths = [*widths, len(cells)] if cells else []


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_a_page_of_one_kind_of_file(kind: int, small: list[Calibration]) -> None:
    text = page_of(gather([small[kind]]), {}, COMMAND)
    assert ("## Published deployments" in text) == (kind == 0)
    assert ("## Communication settings" in text) == (kind != 0)


def test_two_files_of_one_name_are_refused(small: list[Calibration]) -> None:
    with pytest.raises(UsageError, match="synthetic"):
        gather([small[0], small[0]])


def test_a_page_that_cannot_be_written_leaves_the_old_one(tmp_path: Path, small: list[Calibration]) -> None:
    page = tmp_path / "page.md"
    page.write_text("old")
    (tmp_path / "images").write_text("no directory")
    with pytest.raises(OSError, match="images"):
        write_page(small[:1], page, COMMAND)
    assert page.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["images", "page.md"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specmodel", "validate", *words], capture_output=True, text=True, check=False
    )


def test_the_command(tmp_path: Path) -> None:
    files = [str(path) for path in COMMITTED if path.stem in QUICK]
    done = run("--page", str(tmp_path / "page.md"), *files)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert f"{len(files)} calibrations" in done.stdout
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert all(name in text for name in QUICK)
    assert (tmp_path / "images" / "page-scatter.svg").is_file()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (lambda f, d: ["--page", str(d / "no" / "page.md"), f], 2, "a directory that exists"),
        (lambda f, d: ["--page", str(d), f], 2, "name a file"),
        (lambda f, d: ["--page", str(d / "p.md"), f, "--json"], 2, "--json"),
        (lambda f, d: ["--page", str(d / "p.md"), f, f], 2, "two of the calibrations"),
        (lambda f, d: [f, f, f], 2, "--page"),
        (lambda f, d: ["--page", str(d / "p.md"), f, str(d / "none.yaml")], 3, "none.yaml"),
    ],
)
def test_wrong_words_of_the_command(
    tmp_path: Path, words: Callable[[str, Path], list[str]], code: int, says: str
) -> None:
    done = run(*words(str(next(p for p in COMMITTED if p.stem == QUICK[0])), tmp_path))
    assert done.returncode == code
    assert says in done.stderr
    assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------- committed page
def test_the_committed_page_says_what_the_files_give() -> None:
    """Every row of a few files; the slow test below compares the whole page."""
    results = [hold_out(sm.load(path)) for path in COMMITTED if path.stem in QUICK]
    lines = every_file([p for r in results for p in r.points], [d for r in results for d in r.decisions])
    made = [line for line in lines if any(f"| {name} " in line for name in QUICK)]
    section = PAGE.read_text(encoding="utf-8").partition("## Every file")[2]
    shown = [line for line in section.splitlines() if any(f"| {name} " in line for name in QUICK)]
    assert len(made) > 10
    assert examples().same(tuple(shown), made), "regenerate it: " + COMMAND + "\n" + "\n".join(made)


def test_the_committed_page_knows_every_calibration_and_figure() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"```sh\n{COMMAND}\n```" in text
    for path in COMMITTED:
        if has_tables(sm.load(path)):
            assert f"| {path.stem} | full table |" in text, f"regenerate it: {COMMAND}"
    figures = set(re.findall(r"\]\(images/(validation-[^)]+)\)", text))
    assert figures == {p.name for p in (PAGE.parent / "images").glob("validation-*")}
    for name in figures:
        assert "<dc:date>" not in (PAGE.parent / "images" / name).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_whole_committed_page_is_what_the_command_gives(tmp_path: Path) -> None:
    write_page([sm.load(path) for path in COMMITTED], tmp_path / "validation.md", COMMAND)
    made = (tmp_path / "validation.md").read_text(encoding="utf-8").splitlines()
    shown = PAGE.read_text(encoding="utf-8").splitlines()
    checker = examples()
    wrong = [(a, b) for a, b in zip(shown, made, strict=False) if not checker.same_line(a, b)]
    assert len(shown) == len(made), f"regenerate it: {COMMAND}"
    assert not wrong, f"regenerate it: {COMMAND}\n" + "\n".join(f"{a}\n{b}" for a, b in wrong[:5])
