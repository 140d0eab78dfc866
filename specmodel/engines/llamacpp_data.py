"""llama.cpp's documents: `timings` of replies, and `/metrics`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from specmodel.engines.llamacpp_requests import Request, add_group, agree, group
from specmodel.engines.prometheus import Scrape
from specmodel.engines.reading import REPEAT_SD, Given, Reading, Shape, add_length, number, rounded, summarise, whole
from specmodel.engines.redact import model_name

__all__ = ["metrics", "timings"]

MOST = 256
"""Drafts a token beyond which counts cannot be."""

_FIRST_TOKENS = 0.01
"""Relative error of a time per token where the first token of each request, made by the prompt pass, is counted too."""


def timings(reading: Reading, documents: Iterable[Any], given: Given) -> None:
    """Read replies of `/completion`: the `timings` of each."""
    reading.system["engine"] = "llama.cpp"
    requests: list[Request] = []
    known = (given.shape.num_steps or None) if given.shape is not None else None
    for document in documents:
        for reply in document if isinstance(document, list) else [document]:
            times = reply.get("timings", reply) if isinstance(reply, dict) else None
            tokens, ms = whole(times, "predicted_n"), number(times, "predicted_ms")
            drafted, accepted = whole(times, "draft_n", low=0), whole(times, "draft_n_accepted", low=0)
            if tokens is None or ms is None or tokens < 2:
                reading.dropped["replies without timings, or of one token"] += 1
                continue
            if (drafted and accepted is None) or (accepted or 0) > (drafted or 0) or (drafted or 0) > MOST * tokens:
                reading.dropped["replies whose counts of drafts are incomplete or contradict each other"] += 1
                continue
            if (rate := number(times, "predicted_per_second")) and not agree(tokens, ms, rate):
                reading.dropped["replies whose rate is not that of their tokens and time"] += 1
                continue
            if isinstance(reply, dict) and isinstance(name := reply.get("model"), str) and (short := model_name(name)):
                reading.model["target"] = short
            request = Request(eval_ms=ms, tokens=tokens, accepted=accepted if drafted else None, drafted=drafted or 0)
            request.limit = known
            if request.cycles < 1 or not request.possible():
                reading.dropped["replies whose counts contradict each other"] += 1
            else:
                requests.append(request)
    groups: dict[tuple[int, bool], list[Request]] = {}
    if unknown := group(requests, known, groups):
        reading.dropped["replies of an unknown number of steps"] += unknown
        reading.questions.append("drafts stop early and the replies do not say where: say --num-steps")
    if known := known or max((steps for steps, _ in groups), default=0):
        reading.shape = Shape(num_steps=known)
    for (steps, _), members in sorted(groups.items()):
        add_group(reading, steps, members)


def metrics(reading: Reading, scrape: Scrape, given: Given) -> None:
    """Read `/metrics`: acceptance counts by position; the mean cycle where every cycle drafted."""
    reading.system["engine"] = "llama.cpp"
    since = "between two scrapes" if scrape.differenced else "since the start"
    drafts, drafted, accepted = (
        scrape.total(f"llamacpp:spec_decode_num_{name}") or 0.0
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    by_position = scrape.positions("llamacpp:spec_decode_num_accepted_tokens_per_pos", "position")
    tokens = scrape.total("llamacpp:tokens_predicted")
    predict_ms = 1e3 * (scrape.total("llamacpp:tokens_predicted_seconds") or 0.0)
    busy = scrape.mean("llamacpp:n_busy_slots_per_decode") or 1.0
    if drafts < 1:
        if tokens and predict_ms and busy < 1.05:
            note = f"{reading.source}: tokens_predicted_seconds over tokens_predicted {since}, first tokens counted too"
            spread = summarise([predict_ms / tokens], method_sd=_FIRST_TOKENS).row("cycle_ms")
            reading.cycles.append({"num_steps": 0, "batch": 1} | spread | {"note": note})
        return
    falling = all(a >= b for a, b in zip([drafts, *by_position], by_position, strict=False))
    odd = drafted > len(by_position or [1] * 1000) * drafts or (tokens is not None and tokens < drafts + accepted)
    if accepted > drafted or odd or not falling or (by_position and abs(sum(by_position) - accepted) > 0.5):
        reading.questions.append("the acceptance counters contradict each other; they are left out")
        return
    steps = len(by_position) or (
        given.shape.num_steps if given.shape is not None else -(-round(drafted) // round(drafts))
    )
    shape = reading.shape = Shape(num_steps=steps)
    reading.used["drafts"] += round(drafts)
    note = f"{reading.source}: spec_decode counters {since}, {drafted / drafts:.3g} of at most {steps} drafts a pass"
    if by_position:
        entry = {"drafts": round(drafts), "accepted_per_position": [round(n) for n in by_position], "note": note}
        reading.acceptance.append(shape.row() | entry)
    else:
        add_length(reading, shape, 1 + accepted / drafts, note, drafts)
    if tokens and predict_ms and busy < 1.05:
        # The first token of each request took no cycle, and a cycle at the end of a request may draft nothing: how many
        # there were of either is not told, so the cycles lie between the two counts.
        most = tokens - accepted
        if drafts < 0.95 * most:
            reading.dropped["not timed: passes without drafts are in the same counters"] += round(most - drafts)
            return
        cycles = (drafts + most) / 2
        row: dict[str, Any] = shape.row() | {"batch": 1}
        if drafted < 0.98 * steps * drafts:
            row["mean_draft_tokens"] = rounded(drafted / cycles)
        note = f"{reading.source}: tokens_predicted_seconds over {drafts:.0f} to {most:.0f} cycles {since}"
        error = math.hypot(REPEAT_SD, (most - drafts) / cycles / math.sqrt(12))
        reading.cycles.append(row | summarise([predict_ms / cycles], method_sd=error).row("cycle_ms") | {"note": note})
