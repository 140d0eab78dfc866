"""What logs show of a running server, one sentence a question: graphs, communication, memory; and what they do not.

`specmodel ingest` and `specmodel diagnose` print the same sentences.
"""

from __future__ import annotations

from collections.abc import Iterable

from specmodel.calibration import Evidence

__all__ = ["seen_sentences"]

GIB = 2**30
_GRAPHS = (
    ("target_cuda_graph", "CUDA graphs of the target"),
    ("draft_cuda_graph", "CUDA graphs of the drafter"),
)


def seen_sentences(evidence: Iterable[Evidence], graph_sizes: Iterable[int] = (), *, missing: bool = True) -> list[str]:
    """Say what was seen; with `missing` what nothing shows is named too.

    Parameters
    ----------
    evidence : iterable of Evidence
        Of one deployment.
    graph_sizes : iterable of int
        Captured sizes, where the logs list them.
    missing : bool
        Whether to name what nothing shows; of a file without logs nobody expects it.
    """
    facts: dict[str, list[Evidence]] = {}
    for fact in evidence:
        facts.setdefault(fact.about, []).append(fact)
    out = [_captured(name, facts.get(about, ())) for about, name in _GRAPHS if missing or about in facts]
    sizes = sorted(set(graph_sizes))
    if sizes:
        shown = ", ".join(map(str, sizes[:12])) + (f", ... {sizes[-1]}" if len(sizes) > 12 else "")
        out.append(f"captured sizes: {shown}")
    if missing or "decode_with_cuda_graph" in facts:
        out.append(_decoded(facts.get("decode_with_cuda_graph", ())))
    out += [f"all-reduce: {fact.value}{_where(fact)}" for fact in _once(facts.get("allreduce_implementation", ()))]
    settings = list(dict.fromkeys(str(fact.value) for fact in facts.get("nccl_setting", ())))
    if settings:
        out.append(f"NCCL settings in force: {', '.join(settings)}")
    elif missing:
        out.append("NCCL settings in force: not shown (NCCL_DEBUG=INFO prints them)")
    memory = facts.get("free_memory_bytes", ())
    out += [_memory(min(memory, key=_least))] if memory else []
    return out


def _once(facts: Iterable[Evidence]) -> list[Evidence]:
    return list({str(fact.value): fact for fact in facts}.values())


def _where(fact: Evidence) -> str:
    return f" ({fact.source})" if fact.source else ""


def _captured(name: str, facts: Iterable[Evidence]) -> str:
    """One line for each part; captured only where no source says otherwise."""
    said = list(facts)
    if not said:
        return f"{name}: not shown whether they were captured"
    fact = next((f for f in said if f.value is False), said[0])
    if fact.value is False:
        return f"{name}: not captured{_where(fact)}"
    ranks = f" on {fact.ranks} rank{'s' if fact.ranks > 1 else ''}" if fact.ranks else ""
    note = f": {fact.note}" if fact.note else ""
    return f"{name}: captured{ranks}{_where(fact)}{note}"


def _decoded(facts: Iterable[Evidence]) -> str:
    said = list(facts)
    if not said:
        return "decode with CUDA graphs: not shown"
    if any(fact.value is False for fact in said):
        return f"decode with CUDA graphs: no{_where(next(f for f in said if f.value is False))}"
    fact = said[0]
    value = "yes" if fact.value is True else str(fact.value)
    note = f": {fact.note}" if fact.note else ""
    return f"decode with CUDA graphs: {value}{_where(fact)}{note}"


def _least(fact: Evidence) -> float:
    """What to compare memory by: what is no number is no less than any."""
    return float(fact.value) if isinstance(fact.value, int | float) else float("inf")


def _memory(fact: Evidence) -> str:
    amount = f"{float(fact.value) / GIB:.2f} GiB" if isinstance(fact.value, int | float) else str(fact.value)
    ranks = f", the least of {fact.ranks} ranks" if fact.ranks and fact.ranks > 1 else ""
    return f"memory left: {amount}{ranks}{_where(fact)}"
