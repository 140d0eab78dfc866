"""Every committed calibration loads, names the schema that it keeps to, and says where it comes from."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from specmodel import io

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "calibrations").glob("*/*.yaml"))
SEED = ROOT / "calibrations" / "seed" / "kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
SCHEMA_FILE = ROOT / "docs" / "schema" / "calibration-1.json"


def test_all_are_there() -> None:
    assert {path.parent.name for path in FILES} == {"seed", "field", "measured"}
    assert len(FILES) >= 72
    assert all(path.suffix in (".yaml", ".md", ".gz") for path in (ROOT / "calibrations").rglob("*.*"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_loads_and_says_where_it_comes_from(path: Path) -> None:
    first = path.read_text(encoding="utf-8").split("\n")[0]
    assert first == "# yaml-language-server: $schema=../../docs/schema/calibration-1.json"
    assert (path.parent / first.partition("=")[2]).resolve() == SCHEMA_FILE
    loaded = io.load(path)
    assert loaded.name == path.stem
    assert loaded.provenance.source
    assert any(rows for _, rows in loaded.tables)
    assert io.loads(io.dumps(loaded)) == loaded == io.loads(io.dumps(loaded, "json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_keeps_to_the_committed_schema(path: Path) -> None:
    jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).validate(io.read_document(path))


def test_seed_is_entered_as_it_was_stated() -> None:
    seed = io.load(SEED)
    ring = seed.comm["ring-ll-sys"]
    assert ring.env == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring", "NCCL_P2P_LEVEL": "SYS"}
    assert (seed.system.num_gpus, seed.system.tensor_parallel, seed.system.engine) == (8, 8, "sglang")
    model = seed.model
    assert (model.num_layers, model.hidden_size, model.num_experts, model.experts_per_token) == (61, 7168, 384, 8)
    assert model.method == "eagle3"
    assert seed.provenance.date is None
    assert len(seed.provenance.caveats) >= 4

    cycles = {(row.num_steps, row.comm): row for row in seed.measurements.cycles}
    assert len(cycles) == len(seed.measurements.cycles) == 13
    assert cycles[0, "default"].range_tok_s == (88, 90)
    assert cycles[0, "ring-ll-sys"].tok_s == 88.8
    assert cycles[5, "default"].cycle_ms == 27
    assert cycles[2, "ring-ll-sys"].tok_s == 94
    assert all(cycles[k, "ring-ll-sys"].tok_s_at_most == 94 for k in (1, 3, 4, 5, 6, 7, 8, 9, 10))
    assert all(row.batch == 1 and row.workload == "default" for row in cycles.values())

    ranges = {row.comm: (row.tokens, row.range_ms) for row in seed.measurements.verify}
    assert ranges == {"default": (6, (25, 29)), "ring-ll-sys": (6, (18.25, 21.17))}
    [draft] = seed.measurements.draft
    assert (draft.num_steps, draft.time_ms, draft.cuda_graph) == (5, 0.87, True)
    stated = {entry.workload: (entry.num_steps, entry.conditional) for entry in seed.acceptance}
    assert stated == {"default": (5, (0.47,) * 5), "wiring-fault": (5, (0.19,) * 5)}
    facts = {fact.about: fact.value for fact in seed.evidence}
    assert facts == {"draft_cuda_graph": True, "free_memory_bytes": 8.43e9}
    assert next(fact.ranks for fact in seed.evidence if fact.about == "draft_cuda_graph") == 8


def test_seed_teaches_the_format() -> None:
    """Comments stand beside the numbers: it is the first file that a user reads."""
    lines = SEED.read_text(encoding="utf-8").splitlines()
    assert sum("#" in line for line in lines) > 20
    assert max(map(len, lines)) <= 120
