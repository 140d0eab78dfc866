"""The report: one self-contained page, or Markdown for an issue thread, with everything that a decision needs.

`gather` computes (`content`), the sections, figures and the grid of the sliders are written from what it computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specmodel import __version__
from specmodel.errors import UsageError
from specmodel.model import FittedModel
from specmodel.report_page.content import Content, gather
from specmodel.report_page.document import document_of
from specmodel.report_page.markdown import markdown
from specmodel.report_page.page import page
from specmodel.request import Workload
from specmodel.shapes import Trees
from specmodel.words import answer_line

__all__ = ["Report", "gather", "report", "written"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A report and its answer in one line."""

    text: str
    answer: str
    recommended: bool
    """Whether there is a recommendation for every batch."""


def report(
    model: FittedModel,
    batch: float | Sequence[float] | None = None,
    comm: str | Sequence[str] | None = None,
    max_steps: int | None = None,
    workload: Workload = None,
    context_tokens: int | None = None,
    trees: Trees = (),
    *,
    kind: Literal["html", "md"] = "html",
    extrapolate: bool = False,
    engine: tuple[str, str | None] | None = None,
) -> str:
    """Write a report on a deployment: verdict, recommendation, figures, ledger of levers, what it all rests on.

    Parameters
    ----------
    model : FittedModel
        From `fit`.
    batch : number or sequence of numbers, optional
        Running sequences, each answered for itself; by default every measured batch.
    comm, max_steps, workload, context_tokens, trees
        As in `optimize`.
    kind : {"html", "md"}
        One HTML page that needs no network and no other file, or Markdown.
    extrapolate : bool
        Recommend a point far from anything measured as well.
    engine : (str, str or None), optional
        The engine that the launch line is for, one of `specmodel.launch.ENGINES`, and its version; by default those
        of the file.

    Returns
    -------
    str
        The page; the same model gives the same text.

    Raises
    ------
    UsageError
        For names that the file lacks, numbers outside their domain, or another kind.
    """
    content = gather(
        model,
        batch,
        comm=comm,
        max_steps=max_steps,
        workload=workload,
        context_tokens=context_tokens,
        trees=trees,
        extrapolate=extrapolate,
        engine=engine,
    )
    return written(content, kind).text


def written(content: Content, kind: Literal["html", "md"] = "html") -> Report:
    """Write what `gather` computed, and keep its answer beside it."""
    if kind not in ("html", "md"):
        raise UsageError(f"kind must be html or md, got {kind!r}")
    text = page(content, document_of(content, __version__), __version__) if kind == "html" else markdown(content)
    return Report(
        text=text,
        answer=answer_line(content.model, content.optima, content.steps, content.refusals),
        recommended=not any(content.refusals),
    )
