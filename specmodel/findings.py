"""Numbers that physics forbids: they load, but they may not outweigh the others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specmodel.calibration import Calibration
from specmodel.contradictions import miscounted
from specmodel.speeds import Noise, stated_speed

__all__ = ["Finding", "findings_of"]

_UNIT = float(np.log(100.0))
"""Distance of logarithms from which on another unit is likelier than another speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A row whose physics cannot be, in one sentence, and how wide its noise must be to allow for that."""

    section: Literal["cycles", "acceptance"] = "cycles"
    row: int
    text: str
    sd: float
    """Relative standard deviation, natural log."""
    doubtful: tuple[int, ...]
    """Rows of `measurements.cycles` whose noise is widened: this one, or the plain rows that it is compared with."""
    other_unit: bool = False
    """Whether the row is off by so much that another unit is likelier than another speed."""


def findings_of(cal: Calibration) -> tuple[Finding, ...]:
    """Cycle rows whose physics cannot be.

    An acceptance length above num_steps + 1 (or the tokens verified), or a speedup over the best plain decoding of the
    same place above the acceptance length (a cycle cannot be shorter than a plain step). Where most speculative rows
    of a place are too fast, the plain row that makes them all so is the doubtful one. A row whose cycle is a hundred
    times longer or shorter than those of the others is in another unit.
    """
    noise = Noise()
    units = _other_units(cal, noise)
    rates: dict[int, float] = {}
    plain: dict[tuple[float, int | None], list[int]] = {}
    for i, row in enumerate(cal.measurements.cycles):
        stated = stated_speed(row, noise)
        length = 1.0 if row.num_steps == 0 else row.acceptance_length
        if stated is None:
            continue
        form, value, _ = stated
        if form == "tok_s":
            rates[i] = value
        elif length is not None:
            rates[i] = 1000.0 * row.batch * length / value
        if row.num_steps == 0 and not row.speculating and i not in units:
            plain.setdefault((row.batch, row.context_tokens), []).append(i)
    compared: dict[tuple[float, int | None], int] = {}
    excess: dict[int, float] = {}
    found: list[Finding] = []
    for i, row in enumerate(cal.measurements.cycles):
        length = row.acceptance_length
        if length is None:
            continue
        most = min(row.num_steps + 1, row.verify_tokens)
        place = (row.batch, row.context_tokens)
        if length > most * 1.005:
            advice = miscounted(length, most, tree=row.verify_tokens <= row.num_steps)
            text = f"acceptance_length {length:g} is above the {most} tokens that a cycle can emit; {advice}"
            found.append(
                Finding(row=i, text=f"measurements.cycles[{i}]: {text}", sd=_doubt(length / most), doubtful=(i,))
            )
        elif row.num_steps and place in plain and i in rates:
            compared[place] = compared.get(place, 0) + 1
            over = rates[i] / _best(plain[place], rates) / length
            if over > 1.005:
                excess[i] = over
    too_fast = Counter((cal.measurements.cycles[i].batch, cal.measurements.cycles[i].context_tokens) for i in excess)
    for i, over in excess.items():
        row = cal.measurements.cycles[i]
        place = (row.batch, row.context_tokens)
        base = _best(plain[place], rates)
        here = too_fast[place]
        text = (
            f"a speedup of {rates[i] / base:.2f} over plain decoding ({base:g} tok/s) is above the acceptance length "
            f"{row.acceptance_length:g}; measure plain decoding again under the same conditions"
        )
        common = here >= 2 and 2 * here > compared[place]
        found.append(
            Finding(
                row=i,
                text=f"measurements.cycles[{i}]: {text}",
                sd=_doubt(over),
                doubtful=tuple(plain[place]) if common else (i,),
            )
        )
    known = {f.row for f in found}
    found += [
        Finding(
            row=i,
            text=f"measurements.cycles[{i}]: {text}; times are milliseconds and speeds tokens per second, state it so",
            sd=sd,
            doubtful=(i,),
            other_unit=True,
        )
        for i, (text, sd) in units.items()
        if i not in known
    ]
    for i, entry in enumerate(cal.acceptance):
        most = min(entry.num_steps + 1, entry.verify_tokens)
        if entry.acceptance_length is not None and entry.acceptance_length > most * 1.005:
            advice = miscounted(entry.acceptance_length, most, tree=entry.verify_tokens <= entry.num_steps)
            text = (
                f"acceptance[{i}]: acceptance_length {entry.acceptance_length:g} is above the {most} tokens that a "
                f"cycle can emit; {advice}"
            )
            sd = _doubt(entry.acceptance_length / most)
            found.append(Finding(section="acceptance", row=i, text=text, sd=sd, doubtful=()))
    return tuple(sorted(found, key=lambda f: (f.section != "cycles", f.row)))


def _other_units(cal: Calibration, noise: Noise) -> dict[int, tuple[str, float]]:
    """Rows whose cycle takes a hundred times what those of the others do, or a hundredth: in words, and the log ratio.

    Where there are as many on one side as on the other, all of them. Where a row states no acceptance length, the
    middle of what is possible is taken; a cycle grows with the batch by something between nothing and its factor.
    """
    logs: dict[int, float] = {}
    for i, row in enumerate(cal.measurements.cycles):
        stated = stated_speed(row, noise)
        if stated is None:
            continue
        form, value, _ = stated
        if form == "tok_s":
            length = row.acceptance_length or float(np.sqrt(row.num_steps + 1.0))
            value = 1000.0 * row.batch * (length if row.num_steps else 1.0) / value
        logs[i] = float(np.log(value) - 0.5 * np.log(max(row.batch / cal.system.data_parallel, 1.0)))
    ordered = sorted(logs.values())
    if len(ordered) < 2 or ordered[-1] - ordered[0] < _UNIT:
        return {}
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    out: dict[int, tuple[str, float]] = {}
    for i, log in logs.items():
        if high - low >= _UNIT:
            out[i] = f"half of the cycles take {np.exp(high - low):,.0f} times what the other half does", high - low
        elif abs(log - 0.5 * (low + high)) >= _UNIT:
            off = abs(log - 0.5 * (low + high))
            word = "longer" if log > high else "shorter"
            out[i] = f"its cycle is {np.exp(off):,.0f} times {word} than those of the other rows", off
    return out


def _best(rows: list[int], rates: dict[int, float]) -> float:
    return max(rates[i] for i in rows)


def _doubt(ratio: float) -> float:
    """Noise under which a row that is wrong by `ratio` is nothing special."""
    return max(0.05, float(np.log(ratio)))
