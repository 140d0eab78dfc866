"""llama.cpp: flags of its server, which were renamed in May 2026."""

from __future__ import annotations

from specmodel.launch.plan import (
    Parts,
    Plan,
    join,
    model_word,
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


def write(plan: Plan, version: tuple[int, ...]) -> Parts:
    """Write the command, files, notes and validation lines of llama.cpp."""
    notes: list[str] = []
    steps = plan.num_steps
    if plan.topk > 1:
        return None, {}, ["llama-server verifies chains only: decide again without --trees"], []
    if ranges_of(plan):
        notes.append(f"no schedule by batch: llama.cpp drafts the same number at every batch ({steps} here)")
    renamed = version[0] >= RENAMED
    words = [f"llama-server -m {model_word(plan.target, 'MODEL')}.gguf"]
    if steps:
        kind = TYPES.get(plan.method or "draft_model")
        if kind is None:
            return None, {}, [f"llama.cpp has no drafter of the kind {plan.method}"], []
        if not kind.startswith("ngram") and kind != "draft-mtp":
            words += [f"-md {model_word(plan.draft, 'DRAFT')}.gguf"]
        words += [f"--spec-type {kind}", f"--spec-draft-n-max {steps}"] if renamed else [f"--draft-max {steps}"]
        # Unless it is 0, drafting stops early where the drafter is unsure, and the cycle is not the calibrated one.
        words += ["--spec-draft-p-min 0" if renamed else "--draft-p-min 0"]
        other = "--draft-max" if renamed else "--spec-type and --spec-draft-n-max"
        notes.append(f"builds {'before' if renamed else 'since'} about b{RENAMED} (13 May 2026) spell it {other}")
        if not renamed and kind != "draft-simple":
            notes.append("builds before that know a separate draft model only")
    words += [f"-np {plan.max_batch}", "--metrics"]
    if plan.flags:
        notes.append(f"flags of other engines are left out: {' '.join(plan.flags)}")
    return join(words), {}, notes, []
