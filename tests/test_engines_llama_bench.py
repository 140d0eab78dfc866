"""llama-bench in every format it prints: generation is plain decoding at its depth, prompts are prefill."""

import json
import re

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given
from specmodel.errors import CalibrationError

TESTS = ((512, 0, 0, 72e6), (0, 128, 0, 1.28e9), (0, 64, 4096, 0.768e9), (512, 128, 0, 1.4e9))
FACTORS = (1.0, 1.004, 0.996, 1.002, 0.998)


def records(**changed):
    for prompt, generated, depth, ns in TESTS:
        rate = (prompt + generated) * 1e9 / ns
        row = {"build_commit": "8cf427ff", "build_number": 5163, "gpu_info": "NVIDIA GeForce RTX 4080", "n_batch": 512}
        row |= {"model_filename": "/home/ann/models/Q-7B.gguf", "n_threads": 8, "flash_attn": False, "type_k": "f16"}
        row |= {"n_prompt": prompt, "n_gen": generated, "n_depth": depth, "test_time": "2025-04-24T11:58:50Z"}
        row |= {"avg_ns": int(ns), "stddev_ns": int(0.005 * ns), "avg_ts": rate, "stddev_ts": 0.005 * rate}
        yield row | {"samples_ns": [int(ns * f) for f in FACTORS], "samples_ts": [rate / f for f in FACTORS]} | changed


def flat():
    return [{key: value for key, value in row.items() if not key.startswith("samples")} for row in records()]


def as_csv():
    rows = flat()
    return "\n".join([",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]) + "\n"


def as_sql(table="test"):
    create = f"CREATE TABLE IF NOT EXISTS {table} (\n  build_commit TEXT\n);\n\n"
    return create + "".join(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(repr(str(value)) for value in row.values())});\n"
        for row in flat()
    )


def as_table(sign="±", space="", **columns):
    names = ["model", "size", "params", "backend", *columns, "test", "t/s"]
    lines = ["  Device 0: NVIDIA GeForce RTX 4080, compute capability 8.9, VMM: yes", f"| {' | '.join(names)} |"]
    lines.append(f"| {' | '.join('---:' for _ in names)} |")
    for prompt, generated, depth, ns in TESTS:
        test = "+".join(f"{word}{space}{n}" for word, n in (("pp", prompt), ("tg", generated)) if n)
        rate = (prompt + generated) * 1e9 / ns
        cells = ["qwen2 7B Q4_K - Medium", "4.36 GiB", "7.62 B", "CUDA", *map(str, columns.values())]
        cells += [test + (f" @ d{depth}" if depth else ""), f"{rate:.2f} {sign} {0.005 * rate:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "build: 8cf427ff (5163)", ""])


def read(tmp_path, text):
    path = tmp_path / "bench.txt"
    path.write_text(text)
    calibration, (reading,) = ingest([str(path)], Given(), "x")
    return calibration, reading


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(list(records()), indent=2),
        "\n".join(map(json.dumps, records())),
        as_csv(),
        as_sql(),
        as_sql("llama_bench"),
        as_table(ngl=99),
        as_table("+/-", " ", threads=8, fa=1),
    ],
    ids=["json", "jsonl", "csv", "sql", "sql new", "table", "table old"],
)
def test_every_format_says_the_same(tmp_path, text):
    calibration, reading = read(tmp_path, text)
    plain, deep = calibration.measurements.cycles
    assert (plain.num_steps, plain.batch, plain.context_tokens, deep.context_tokens) == (0, 1, 64, 4128)
    assert (plain.cycle_ms, deep.cycle_ms) == pytest.approx((10, 12), rel=1e-3)
    (prefill,) = calibration.measurements.prefill
    assert (prefill.tokens, prefill.time_ms) == (512, pytest.approx(72, rel=1e-3))
    assert not calibration.measurements.verify
    assert calibration.system.engine_version == "b5163"
    assert calibration.system.gpu == "NVIDIA GeForce RTX 4080"
    assert [count for why, count in reading.dropped.items() if "read a prompt and generate" in why] == [1]
    assert plain.sd_cycle_ms == pytest.approx(0.08, rel=0.5)
    assert "ann" not in str(calibration)


def test_of_several_configurations_none_is_chosen(tmp_path):
    for text in (
        "\n".join(json.dumps(row) for threads in (4, 8) for row in records(n_threads=threads)),
        as_table(ngl=10) + as_table(ngl=99),
    ):
        with pytest.raises(CalibrationError, match="several configurations"):
            read(tmp_path, text)
    same = "\n".join(json.dumps(row) for size in (128, 256) for row in records(n_batch=size))
    assert all(row.cycle_ms < 13 for row in read(tmp_path, same)[0].measurements.cycles)


def test_contradictions_and_damage_are_left_out(tmp_path):
    rows = list(records())
    rows[1]["avg_ts"] *= 3
    del rows[2]["n_gen"]
    calibration, reading = read(tmp_path, "\n".join(map(json.dumps, rows)))
    assert not calibration.measurements.cycles
    assert reading.dropped["rows without a time, or whose time, spread and rate contradict each other"] == 1
    assert reading.dropped["rows cut off, or without a test"] == 1
    rows = [row | {"samples_ns": [*row["samples_ns"][:4], 10**15]} for row in records()]
    plain, _ = read(tmp_path, json.dumps(rows))[0].measurements.cycles
    assert (plain.cycle_ms, plain.sd_cycle_ms) == (pytest.approx(10, rel=1e-2), pytest.approx(0.08, rel=0.6))
    calibration, reading = read(tmp_path, re.sub(r"± [\d.]+", "± 99999.5", as_table(ngl=99)) + as_table(ngl=99))
    assert len(calibration.measurements.cycles) == 2
    calibration, _ = read(tmp_path, as_table(ngl=99).replace("| test |", "| tesu |") + as_table(ngl=99))
    assert len(calibration.measurements.cycles) == 2
    calibration, _ = read(tmp_path, as_table(ngl=99)[:-80])
    assert [row.context_tokens for row in calibration.measurements.cycles] == [64, 4128]
