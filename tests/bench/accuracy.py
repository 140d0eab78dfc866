"""Accuracy on the committed calibrations, held out: the table of the README.

    python tests/bench/accuracy.py            print the table
    python tests/bench/accuracy.py --write    put it into README.md

Each setting of `calibrations/field` is left out in turn and predicted from the rest of its file; the whole cycles of
`calibrations/measured` stand under `validation` and are predicted from the tables of their files. Errors are of tok/s.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # many small factorisations

import numpy as np

from specmodel import Calibration, cross_validate, fit, load, validate
from specmodel.validate import ValidatedRow

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- accuracy -->\n).*?(<!-- end -->)", re.DOTALL)
MOST_SETTINGS = 6  # of one file, evenly spread; more change the numbers little and take long


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table."""

    what: str
    files: int
    cycles: int
    median: float
    ninth_decile: float
    coverage: float

    def __str__(self) -> str:
        numbers = f"{self.median:.1%} | {self.ninth_decile:.1%} | {self.coverage:.0%}".replace("%", " %")
        return f"| {self.what} | {self.files} | {self.cycles} | {numbers} |"


def row(what: str, reports: list[list[ValidatedRow]]) -> Row:
    """Summarise what was held out of several files; rows that cannot be are left out."""
    rows = [r for report in reports for r in report if r.verdict != "impossible"]
    errors = np.abs([r.error for r in rows])
    return Row(
        what=what,
        files=sum(bool(report) for report in reports),
        cycles=len(rows),
        median=float(np.median(errors)),
        ninth_decile=float(np.quantile(errors, 0.9)),
        coverage=float(np.mean([r.verdict == "inside" for r in rows])),
    )


def table() -> list[Row]:
    """Hold out, predict and summarise; a minute or two."""
    field, measured = list(loaded("field")), list(loaded("measured"))
    left_out = [cross_validate(cal, most_settings=MOST_SETTINGS).rows for cal in field]
    alone = [cross_validate(cal, most_settings=MOST_SETTINGS, acceptance="fitted").rows for cal in field]
    cycles = [validate(fit(cal), cal.validation.cycles).rows for cal in measured]
    return [
        row("published sweeps, one setting left out, its acceptance length given", [list(r) for r in left_out]),
        row("the same, acceptance predicted too", [list(r) for r in alone]),
        row("own GPU runs, whole cycles from tables of verify and draft times", [list(r) for r in cycles]),
    ]


def loaded(folder: str) -> Iterator[Calibration]:
    """Load the committed calibrations of a folder."""
    for path in sorted((ROOT / "calibrations" / folder).glob("*.yaml")):
        yield load(path)


def markdown(rows: list[Row]) -> str:
    """Write the table."""
    head = [
        "| held out | files | cycles | median error | 90 % below | inside the 90 % interval |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*head, *map(str, rows)]) + "\n"


if __name__ == "__main__":
    text = markdown(table())
    if "--write" in sys.argv:
        README.write_text(TABLE.sub(lambda found: found[1] + text + found[2], README.read_text()))
    sys.stdout.write(text)
