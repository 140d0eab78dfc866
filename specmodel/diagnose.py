"""The diagnosis: is it the drafter or the engine, what is worth working on, and what is closed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specmodel.calibration import Evidence
from specmodel.consistency import consistency_of, flags_of
from specmodel.diagnosed import Case, case_of
from specmodel.diagnosis import Diagnosis
from specmodel.expectations import as_document, expectations_of, plain_of, shape_text
from specmodel.ledger import ledger_of
from specmodel.model import FittedModel
from specmodel.request import number
from specmodel.verdict import balance_of, verdict_of

__all__ = ["diagnose", "diagnosis_document"]


def diagnose(
    model: FittedModel,
    batch: float | None = None,
    workload: str | Mapping[str, float] | None = None,
    comm: str | Sequence[str] | None = None,
    worth: float = 0.02,
    runtime: Iterable[Evidence] | None = None,
    context_tokens: int | None = None,
) -> Diagnosis:
    """Say whether speculation pays and what holds it back, and rank what could be worked on.

    The fastest measured speculative setting at the batch is diagnosed; where none was measured, the one predicted to be
    fastest.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    batch : float, optional
        Running sequences; by default 1 if it was measured with speculation, else the smallest that was.
    workload, context_tokens
        As in `FittedModel.predict`; the context is by default the one with most rows at that batch.
    comm : str or sequence of str, optional
        Restrict the communication settings; by default every setting with a row.
    worth : float
        Gain, a fraction, below which a lever is closed.
    runtime : iterable of Evidence, optional
        What the engine's logs say of graphs, communication and memory, besides the file's own evidence.

    Returns
    -------
    Diagnosis

    Raises
    ------
    UsageError
        For names that the file lacks and numbers outside their domain.
    """
    worth = number("worth", worth, 0.0, 10.0)
    evidence = tuple(runtime or ())
    case = case_of(model, batch, workload, comm, context_tokens)
    findings = consistency_of(model.calibration, case.facts)
    balance = balance_of(case)
    verdict, culprit = verdict_of(case, balance, findings)
    steps, topk, tokens = case.shape
    known = balance.plain_measured or balance.speedup.known
    return Diagnosis(
        batch=case.batch,
        num_steps=steps,
        topk=topk,
        num_draft_tokens=tokens,
        comm=case.comm,
        measured=case.measured,
        worth=worth,
        verdict=verdict,
        culprit=culprit,
        cycle_plain_steps=balance.cycle.value,
        cycle_plain_steps_interval=balance.cycle.interval,
        acceptance_length=balance.length.value,
        acceptance_length_interval=balance.length.interval,
        speedup=balance.speedup.value if known else None,
        speedup_interval=balance.speedup.interval if known else None,
        flags=flags_of(findings),
        findings=findings,
        expectations=expectations_of(model.calibration, case.facts),
        levers=ledger_of(case, worth, evidence),
        warnings=model.warnings,
        measure_first=model.measured.plain_first,
        other_batches=_other_batches(case),
    )


def _other_batches(case: Case) -> tuple[tuple[float, str], ...]:
    """The fastest measured speculative setting of each other batch, by arithmetic."""
    out = []
    for batch in sorted({f.row.batch for f in case.facts} - {case.batch}):
        here = [
            f
            for f in case.facts
            if f.row.batch == batch
            and f.row.num_steps
            and f.rate is not None
            and f.row.workload in case.workloads
            and f.row.comm in case.comms
        ]
        best = max(here, key=lambda f: f.rate or 0.0, default=None)
        ends = None if best is None else plain_of(case.facts, best)
        if best is None or best.rate is None or ends is None:
            continue
        plain = sum(ends) / 2
        text = f"{shape_text(*best.shape)}, {best.rate / plain:.2f}x plain decoding"
        if best.length is not None:
            text += f": {best.length * plain / best.rate:.2f} plain steps a cycle, {best.length:.2f} tokens"
        out.append((float(batch), text))
    return tuple(out)


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as ``specmodel.diagnosis/1``: plain values, unrounded; `expectations` by quantity."""
    d = diagnosis
    batch = int(d.batch) if d.batch == int(d.batch) else d.batch
    return {
        "schema": "specmodel.diagnosis/1",
        "verdict": d.verdict,
        "culprit": d.culprit,
        "setting": {
            "num_steps": d.num_steps,
            "topk": d.topk,
            "num_draft_tokens": d.num_draft_tokens,
            "batch": batch,
            "comm": d.comm,
            "measured": d.measured,
        },
        "cycle_plain_steps": d.cycle_plain_steps,
        "cycle_plain_steps_interval": d.cycle_plain_steps_interval,
        "acceptance_length": d.acceptance_length,
        "acceptance_length_interval": d.acceptance_length_interval,
        "speedup": d.speedup,
        "speedup_interval": d.speedup_interval,
        "worth": d.worth,
        "flags": list(d.flags),
        "findings": [{"flag": f.flag or None, "where": f.where, "message": f.message} for f in d.findings],
        "expectations": as_document(d.expectations),
        "levers": [
            {
                "name": x.name,
                "title": x.title,
                "bound": x.bound,
                "bound_optimised": x.bound_optimised,
                "interval": x.interval,
                "status": x.status,
                "evidence": x.evidence,
                "decided_by": x.decided_by or None,
            }
            for x in d.levers
        ],
        "measure_first": d.measure_first or None,
        "seen": list(d.runtime),
        "other_batches": [{"batch": b, "text": text} for b, text in d.other_batches],
        "warnings": list(d.warnings),
    }
