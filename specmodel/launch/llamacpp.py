"""llama.cpp: flags of its server, which were renamed in May 2026."""

from __future__ import annotations

from specmodel.launch.plan import (
    Parts,
    Plan,
    cap_note,
    capture_sizes,
    expected_length,
    join,
    model_word,
    no_schedule,
    ranges_of,
)

__all__ = ["write"]

TYPES = {
    "eagle3": "draft-eagle3",
    "mtp": "draft-mtp",
    "draft_model": "draft-simple",
    "ngram": "ngram-simple",
    "parallel": "draft-dflash",
}
RENAMED = 9150
"""Build of about 13 May 2026, in which llama.cpp removed --draft-max."""
PINNED = 10649
"""Build of 27 August 2026, the first that can set acceptance for benchmarking."""


def write(plan: Plan, version: tuple[int, ...]) -> Parts:
    """Write the command, files, notes and validation lines of llama.cpp."""
    notes: list[str] = []
    validation: list[str] = []
    steps = plan.num_steps
    if plan.topk > 1:
        return Parts(notes=["llama-server verifies chains only: decide again without --trees"])
    if ranges_of(plan):
        notes.append(no_schedule(plan, "llama.cpp drafts the same number at every batch"))
    renamed = version[0] >= RENAMED
    words = [f"llama-server -m {_file(plan.target, 'MODEL')}"]
    if steps:
        kind = TYPES.get(plan.method or "draft_model")
        if kind is None:
            return Parts(notes=[f"llama.cpp has no drafter of the kind {plan.method}"])
        if not renamed and kind != "draft-simple":
            return Parts(notes=[f"builds before about b{RENAMED} (13 May 2026) know a separate draft model only"])
        if not kind.startswith("ngram") and kind != "draft-mtp":
            words += [f"-md {_file(plan.draft, 'DRAFT')}"]
        words += [f"--spec-type {kind}", f"--spec-draft-n-max {steps}"] if renamed else [f"--draft-max {steps}"]
        # Unless it is 0, drafting stops early where the drafter is unsure, and the cycle is not the calibrated one.
        words += ["--spec-draft-p-min 0" if renamed else "--draft-p-min 0"]
        other = "--draft-max" if renamed else "--spec-type and --spec-draft-n-max"
        notes.append(f"builds {'before' if renamed else 'since'} about b{RENAMED} (13 May 2026) spell it {other}")
    words += [f"-np {plan.max_batch}", "--metrics"]
    notes.append(cap_note(plan, "-np"))
    if plan.flags:
        notes.append(f"flags of other engines are left out: {' '.join(plan.flags)}")
    if steps:
        largest = capture_sizes(plan)[-1]
        notes.append(f"graphs are made as batches come: the largest has {largest} * {steps + 1} tokens")
        if version[0] < PINNED:
            notes.append(f"acceptance can be pinned from b{PINNED} on (27 August 2026), by --spec-synth-rates")
        elif expected_length(plan, steps) is not None:
            # Unconditional, by position, one for each of the drafts.
            validation = ["--spec-synth-rates " + ",".join(f"{rate:.4g}" for rate in plan.survival[:steps])]
    return Parts(command=join(words), notes=notes, validation=validation)


def _file(name: str | None, default: str) -> str:
    """Return the word of a GGUF file; the ending is added where a name lacks it."""
    return model_word(name if name is None or name.endswith(".gguf") else f"{name}.gguf", f"{default}.gguf")
