"""The numbers of a report as plain values: what the page offers for download."""

from __future__ import annotations

import dataclasses
from typing import Any

from specmodel.answer import answer_document
from specmodel.report_page.content import Content
from specmodel.report_page.explorer_section import explorer_document

__all__ = ["document_of"]


def document_of(content: Content, version: str) -> dict[str, Any]:
    """Return everything that the page shows as ``specmodel.report/1``."""
    cal = content.model.calibration
    curve = content.acceptance
    return {
        "schema": "specmodel.report/1",
        "specmodel": version,
        "name": cal.name,
        "description": cal.description,
        "answer": answer_document(content.model, content.optima, content.steps, content.refusals, content.launched),
        "launch_lines": list(content.launch),
        "diagnosis": dataclasses.asdict(content.diagnosis),
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
