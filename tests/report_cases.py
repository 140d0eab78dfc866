"""Calibrations that the tests of the report share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import specmodel as sm
from specmodel.model import FittedModel

ROOT = Path(__file__).parents[1]
SEED = "calibrations/seed/kimi-k2.5-eagle3-8x-rtx-pro-6000.yaml"
EVIL = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=2>\"'><svg onload=window.pwned=3>"
"""What a file would say to run a script, to close an attribute, or to load something."""
SECRET = "sk-abcdef0123456789abcdef"


@functools.cache
def seed() -> FittedModel:
    """The case that specmodel began with."""
    return sm.fit(sm.load(ROOT / SEED))


def hostile_document() -> dict[str, Any]:
    """Several batches, a tree, two settings, and in every text of the file what must not be obeyed."""
    cycles: list[dict[str, Any]] = []
    for batch in (1, 4, 16):
        for steps, gain in ((0, 1.0), (1, 1.3 - 0.02 * batch), (3, 1.6 - 0.06 * batch)):
            row = {"num_steps": steps, "batch": batch, "tok_s": 90.0 * batch * gain, "note": EVIL, "workload": EVIL}
            if steps:
                row["acceptance_length"] = 1.0 + 0.45 * steps
            cycles.append(row)
        cycles.append({"num_steps": 0, "batch": batch, "tok_s": 88.0 * batch, "comm": EVIL, "workload": EVIL})
    tree = {"num_steps": 3, "topk": 2, "num_draft_tokens": 6, "batch": 1, "tok_s": 150.0, "acceptance_length": 2.6}
    cycles.append({**tree, "workload": EVIL})
    return {
        "schema": "specmodel.calibration/1",
        "name": "planted",
        "description": EVIL,
        "provenance": {"source": EVIL, "url": "javascript:window.pwned=4", "caveats": [EVIL, f"key {SECRET}"]},
        "system": {"gpu": EVIL, "num_gpus": 2, "tensor_parallel": 2, "engine": "sglang", "engine_version": "0.5.18"},
        "model": {"target": EVIL, "draft": EVIL, "method": "eagle3"},
        "comm": {
            "default": {"env": {"NCCL_ALGO": EVIL, "HF_TOKEN": SECRET}, "flags": [f"--api-key {SECRET}", EVIL]},
            EVIL: {"env": {"NCCL_PROTO": EVIL}},
        },
        "workloads": {EVIL: {"weight": 1}},
        "measurements": {"cycles": cycles},
        "acceptance": [{"num_steps": 3, "workload": EVIL, "survival": [0.6, 0.35, 0.2], "note": EVIL}],
        "evidence": [{"about": "other", "value": EVIL, "source": EVIL, "note": EVIL}],
    }


@functools.cache
def hostile() -> FittedModel:
    """`hostile_document`, fitted."""
    return sm.fit(sm.from_dict(hostile_document()))


@functools.cache
def page(name: str) -> str:
    """The page of one of the cases, made once."""
    return sm.report({"seed": seed, "hostile": hostile}[name]())
