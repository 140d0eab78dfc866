"""SGLang's `/metrics`: device timers, graph replays, and the gauges of the last interval."""

from __future__ import annotations

from specmodel.engines.prometheus import Scrape
from specmodel.engines.reading import Given, Reading, Shape, add_length, rounded
from specmodel.engines.redact import model_name
from specmodel.engines.sglang_args import DEFAULT_LOG_INTERVAL

__all__ = ["metrics"]


def metrics(reading: Reading, scrape: Scrape, given: Given) -> None:
    """Read `/metrics`: verify and draft time of the device timers, what replayed a graph, the last interval's cycle."""
    reading.system["engine"] = "sglang"
    names = [labels["model_name"] for labels, _ in scrape.each("sglang:gen_throughput") if "model_name" in labels]
    if names and (name := model_name(names[0])):
        reading.model["target"] = name
    steps, tokens = scrape.mean("sglang:spec_num_steps"), scrape.mean("sglang:spec_num_draft_tokens")
    shape = given.shape
    if steps is not None and steps >= 1 and tokens in (None, steps + 1):
        shape = Shape(num_steps=round(steps))
    reading.shape = shape
    _graph_passes(reading, scrape)
    running = scrape.total("sglang:num_running_reqs")
    batch = given.batch or (running if running and running >= 1 else None)
    timer = "sglang:forward_execution_seconds"
    timer = timer if scrape.each(timer) else "sglang:gpu_execution_seconds"
    passes = scrape.total("sglang:cuda_graph_passes", mode="decode_cuda_graph") or 0.0
    passes += scrape.total("sglang:cuda_graph_passes", mode="decode_none") or 0.0
    where = f"{reading.source}: {timer.removeprefix('sglang:')} over {passes:.0f} decode passes"
    since = "between two scrapes" if scrape.differenced else "since the start"
    verify = scrape.total(timer, category="target_verify")
    drafts = [scrape.total(timer, category=name) for name in ("eagle_draft", "eagle_draft_extend", "frozen_kv_draft")]
    if passes > 0 and verify:
        _span(reading, "verify", 1e3 * verify / passes, passes, f"{where}, target_verify, {since}", shape, batch)
        if any(drafts):
            shown = ", ".join(
                f"{name} {1e3 * (t or 0) / passes:.4g} ms"
                for name, t in zip(("draft", "draft extend"), drafts, strict=False)
            )
            note = f"{where}, {shown}, {since}"
            _span(reading, "draft", 1e3 * sum(t or 0 for t in drafts) / passes, passes, note, shape, batch)
    _last_interval(reading, scrape, shape, batch)


def _graph_passes(reading: Reading, scrape: Scrape) -> None:
    on = scrape.total("sglang:cuda_graph_passes", mode="decode_cuda_graph")
    off = scrape.total("sglang:cuda_graph_passes", mode="decode_none") or 0.0
    if on is not None and on + off > 0:
        note = f"{on:.0f} of {on + off:.0f} decode passes replayed a graph"
        reading.saw("decode_with_cuda_graph", on >= off, "cuda_graph_passes_total", None, note)


def _span(
    reading: Reading, part: str, ms: float, count: float, note: str, shape: Shape | None, batch: float | None
) -> None:
    """Add a verify or draft time: as a row where shape and batch are known, else for the user to place."""
    time = {"time_ms": rounded(ms), "sd_ms": rounded(0.005 * ms, 3), "samples": 1, "note": note}
    reading.used[f"{part} passes"] += round(count)
    reading.spans.append({"part": part, **time, "shape": shape, "batch": batch})


def _last_interval(reading: Reading, scrape: Scrape, shape: Shape | None, batch: float | None) -> None:
    """Add the cycle of the last decode interval, as the gauges give it, and the acceptance length."""
    length, speed = scrape.mean("sglang:spec_accept_length"), scrape.total("sglang:gen_throughput")
    if shape is None or not shape.num_steps or length is None or not 1 <= length <= shape.num_steps + 1.005:
        return
    note = f"{reading.source}: gauge spec_accept_length, of the last {DEFAULT_LOG_INTERVAL} rounds"
    add_length(reading, shape, length, note, DEFAULT_LOG_INTERVAL * (batch or 1))
    gpu = sum(span["time_ms"] for span in reading.spans)
    if speed and batch:
        cycle = 1e3 * batch * length / speed
        if not 0.98 * gpu <= cycle <= (3 * gpu or 1e5):
            reading.dropped["gauges of different moments (their cycle is not that of the device timers)"] += 1
            return
        row = shape.row() | {
            "batch": batch,
            "cycle_ms": rounded(cycle),
            "sd_cycle_ms": rounded(0.02 * cycle, 3),
            "samples": 1,
        }
        context = scrape.total("sglang:decode_sum_seq_lens")
        if context and context > batch:
            row["context_tokens"] = round(context / batch)
        row["note"] = (
            f"{reading.source}: gauges of the last interval, num_running_reqs * spec_accept_length / gen_throughput"
        )
        reading.cycles.append(row)
