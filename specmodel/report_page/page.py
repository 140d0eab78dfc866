"""The page: sections, styles, script and the numbers, in one file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from specmodel.report_page import evidence, sections
from specmodel.report_page.content import Content
from specmodel.report_page.explorer_section import explorer_section
from specmodel.report_page.markup import Child, Markup, embedded_json, tag

__all__ = ["page"]


def page(content: Content, document: dict[str, Any], version: str) -> str:
    """Write the whole page; `document` is what it offers for download."""
    cal = content.model.calibration
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    top = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"specmodel {version}"),
        tag("title", f"{cal.name} - speculative decoding report"),
        tag("style", Markup(style)),
    )
    body: list[Child] = [
        tag("header", _bar(), sections.head(cal)),
        tag(
            "main",
            sections.answer(content),
            sections.warnings_of(content),
            sections.schedule_of(content),
            sections.by_batch(content),
            evidence.ledger(content),
            explorer_section(content.explorer),
            evidence.acceptance(content),
            evidence.measure(content),
            evidence.every_number(content),
            evidence.rests_on(content),
        ),
        tag("footer", tag("p", f"Made by specmodel {version}. Intervals are 90 % and for one new measurement.")),
        tag("script", embedded_json(document), type="application/json", id="report-data"),
        tag("script", Markup(script)),
    ]
    return "<!doctype html>\n" + tag("html", top, tag("body", body), lang="en") + "\n"


def _bar() -> Markup:
    return tag(
        "div",
        tag("p", "Speculative decoding report", class_="eyebrow"),
        tag("a", "Download the numbers (JSON)", class_="download", id="download", href="#report-data", hidden=True),
        class_="bar-top",
    )


def _asset(name: str) -> str:
    return (files("specmodel.report_page") / name).read_text(encoding="utf-8")


def _digest(source: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
