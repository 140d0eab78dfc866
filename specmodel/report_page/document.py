"""The numbers of a report as plain values: what the page offers for download."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specmodel.answer import answer_document
from specmodel.optimum import Optimum
from specmodel.report_page.content import Content
from specmodel.report_page.explorer_section import explorer_document

__all__ = ["document_of"]


_MOST_ROWS = 900


def _thinned(optima: Sequence[Optimum]) -> tuple[list[Optimum], int]:
    """The same answers; where their tables are very long, only with the rows of the best setting of each."""
    total = sum(len(o.table) for o in optima)
    if total <= _MOST_ROWS:
        return list(optima), 0
    kept = [dataclasses.replace(o, table=tuple(c for c in o.table if c.comm == o.best.comm), ties=()) for o in optima]
    return kept, total - sum(len(o.table) for o in kept)


def document_of(content: Content, version: str) -> dict[str, Any]:
    """Return everything that the page shows as ``specmodel.report/1``."""
    cal = content.model.calibration
    curve = content.acceptance
    optima, left_out = _thinned(content.optima)
    return {
        "schema": "specmodel.report/1",
        "specmodel": version,
        "name": cal.name,
        "description": cal.description,
        "answer": answer_document(content.model, optima, content.steps, content.refusals, content.launched),
        "rows_left_out": left_out,
        "launch_lines": list(content.launch),
        # What follows by arithmetic from each row is in `diagnose --json`.
        "diagnosis": dataclasses.asdict(dataclasses.replace(content.diagnosis, expectations=())),
        "acceptance": None
        if curve is None
        else {
            "workload": curve.workload,
            "survival": curve.survival.tolist(),
            "conditional": curve.conditional.tolist(),
            "measured_survival": list(curve.measured),
            "rows": ["low", "median", "high"],
        },
        "whatif": None if content.explorer is None else explorer_document(content.explorer),
        "provenance": {
            "source": cal.provenance.source,
            "url": cal.provenance.url,
            "date": None if cal.provenance.date is None else str(cal.provenance.date),
            "caveats": list(cal.provenance.caveats),
        },
    }
