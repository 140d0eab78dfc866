"""The tables of the pages that say what the code says: keys of the format, priors, scales of noise, accuracy.

    python docs/tables.py             fail if a page is not what the code says
    python docs/tables.py --write     write the tables anew

A table stands between ``<!-- keys: PART -->``, ``<!-- values: NAME -->``,
``<!-- formulas: derivations -->`` or ``<!-- rows: accuracy -->`` and
``<!-- end -->``. The accuracy is taken from validation.md, which `specmodel validate --page` writes.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from specmodel import json_schema
from specmodel.acceptance import AcceptancePrior
from specmodel.fields import LEAST_NUMBER
from specmodel.fit import CostPrior
from specmodel.residual import Residuals
from specmodel.speeds import Noise
from specmodel.symbolic import derivations

HERE = Path(__file__).parent
PAGES = (
    HERE / "reference" / "format.md",
    HERE / "explanation" / "model.md",
    HERE / "explanation" / "derivations.md",
    HERE.parent / "README.md",
)
TABLE = re.compile(r"(<!-- (keys|values|rows|formulas): (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
# Rows of validation.md that the README shows, by their first cells, and in which words.
ACCURACY = {
    ("length, given",): "one chain length of a published sweep, its acceptance length given",
    ("length, not given",): "the same, its acceptance predicted too",
    ("between, not given",): "all lengths between the shortest and the longest, acceptance predicted too",
    ("tree",): "one draft tree",
    ("batch",): "one batch",
    ("all files", "full table", "all"): "whole cycles on an H200, from tables of verify and draft times",
}

VALUES = {cls.__name__: cls for cls in (AcceptancePrior, CostPrior, Noise, Residuals)}
# What each value is. A pair is a median (or mean) and a standard deviation; all are in units of the plain pass.
MEANING = {
    "CostPrior": {
        "pass_log_sd": "width of ln `pass`; its centre is the shortest time in the file",
        "tax": "mean and scale of `tax`, what having speculation on changes of a pass, natural log",
        "tax_degrees": "degrees of freedom of its Student distribution: far out is unlikely, not impossible",
        "expert_share_logit": "logit of `rho`, the share of a plain pass that reads expert weights",
        "overlap_logit": "logit of how far the tokens of one sequence share experts beyond chance",
        "token": "`token`, one more verified token",
        "knee_tokens": "`n_knee` in tokens, where passes become compute-bound",
        "knee_log_sd_of_gpu": "log-sd of `n_knee` of a dense model, around FLOP/s over bytes/s of a GPU that is known",
        "kv": "`kv`, reading the cache of one sequence at the reference context",
        "kv_multi": "`kv_multi`, the same for several query rows, natural log",
        "overhead": "`overhead`, what a cycle costs beside its passes",
        "overhead_loop": "the same of a bare benchmark loop, which has no scheduler, sampler or detokenizer",
        "draft_base": "`draft_base`, launching the drafts of a cycle",
        "draft_step": "`draft_step`, one draft step",
        "draft_sequence": "`draft_sequence`, one more sequence in a draft step, over the step",
        "draft_width": "`draft_width`, one more branch of a tree in a draft step, over the step",
        "draft_kv": "`draft_kv`, reading the drafter's cache of one sequence at the reference context, over the step",
        "tree": "`tree`, what a tree costs beside its passes",
        "verify_eager": "factor of a verify pass outside CUDA graphs, natural log",
        "draft_graph_cycle": "factor of drafts in one graph a cycle over one a step, natural log",
        "draft_eager": "factor of drafts outside CUDA graphs, natural log",
        "comm_base": "`comm_base`, what a communication setting adds to every pass",
        "comm_token": "`comm_token`, what it adds for every token",
        "comm_offset_sd": "width of the offset of a setting from its all-reduce table",
        "draft_comm_sd": "width of the factor of a setting on drafts, natural log",
        "rank_ratio_logit": "logit of the acceptance of one rank of a tree over that of the rank before",
        "tree_gain": "accepted drafts of trees over those of the best static tree, natural log, common to all trees",
        "tree_own_gain_sd": "how far one tree may differ from the others in this",
    },
    "AcceptancePrior": {
        "level": "mean of the logit at position 1",
        "decay": "how fast it falls with the logarithm of the position",
        "level_sd": "width of the level",
        "decay_sd": "width of the decay",
        "walk_sd": "how far one position may differ from the one before",
        "shared": "correlation of the curves of two workloads",
    },
    "Noise": {
        "cycle": "tok/s or time of a cycle, from run to run",
        "cycle_floor": "what repeats within one run do not show",
        "verify": "time of a verify pass",
        "verify_floor": "least that is believed",
        "draft": "time of the drafts of a cycle",
        "draft_floor": "least that is believed",
        "length": "accepted tokens, `acceptance_length` - 1",
        "probability": "a stated survival or conditional, absolute",
    },
    "Residuals": {
        "tokens": "verify, over the logarithm of the tokens",
        "tokens_length": "its length",
        "batch": "verify, over the logarithm of the batch",
        "batch_speculating": "the same where speculation is on",
        "batch_length": "its length",
        "context": "verify, over the logarithm of the context",
        "context_length": "its length",
        "comm": "verify, of one communication setting over the tokens",
        "workload": "verify, of one workload alone (its contexts, above all); 0 where a file has one workload",
        "configuration": "verify, of one configuration alone",
        "draft_steps": "draft, over the logarithm of the steps",
        "draft_batch": "draft, over the logarithm of the batch",
        "draft_context": "draft, over the logarithm of the context",
        "draft_configuration": "draft, of one configuration alone",
    },
}


def page(text: str) -> str:
    """Return a page with its tables as the code says."""
    schema = json_schema()
    parts = schema["$defs"] | {"Calibration": schema}

    def table(found: re.Match[str]) -> str:
        match found[2]:
            case "keys":
                body = keys(parts[found[3]])
            case "values":
                body = values(VALUES[found[3]])
            case "formulas":
                body = formulas()
            case _:
                body = accuracy((HERE / "validation.md").read_text(encoding="utf-8"))
        return f"{found[1]}{body}{found[4]}"

    return TABLE.sub(table, text)


def missing(texts: list[str]) -> set[str]:
    """Return what no page has a table of."""
    there = {found[3] for text in texts for found in TABLE.finditer(text)}
    return {"Calibration", *json_schema()["$defs"], *VALUES, "accuracy", "derivations"} - there


def formulas() -> str:
    """Return every derivation as computer algebra has it."""
    parts = [f"**{d.title}** ({d.words})\n\n```{{math}}\n{d.latex}\n```\n" for d in derivations()]
    return "\n" + "\n".join(parts) + "\n"


def values(cls: type[Any]) -> str:
    """Return the default values of a dataclass, with what each is."""
    rows = ["| name | default | what it is |", "|---|---|---|"]
    for field in dataclasses.fields(cls):
        value = field.default if isinstance(field.default, tuple) else (field.default,)
        shown = ", ".join(f"{x:g}" for x in value if isinstance(x, int | float))
        rows.append(f"| `{field.name}` | {shown} | {MEANING[cls.__name__][field.name]} |")
    return "\n".join(rows) + "\n"


def accuracy(validation: str) -> str:
    """Return the rows of the validation page that the README shows."""
    shown = ("n", "median", "90 % below", "inside")
    rows = [
        "| predicted | n | median error | 90 % of errors below | inside the 90 % interval |",
        "|---|--:|--:|--:|--:|",
    ]
    head: list[str] = []
    found: dict[tuple[str, ...], str] = {}
    for line in validation.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or set(cells[0]) <= set(":-"):
            continue
        if set(shown) <= set(cells):
            head = cells
            continue
        for first, words in ACCURACY.items():
            if len(head) == len(cells) and tuple(cells[: len(first)]) == first and first not in found:
                found[first] = f"| {words} | " + " | ".join(cells[head.index(name)] for name in shown) + " |"
    return "\n".join([*rows, *(found[first] for first in ACCURACY)]) + "\n"


def keys(part: dict[str, Any]) -> str:
    """Return one row for each key of a part: the key, what it takes, what it means."""
    rows = ["| key | takes | meaning |", "|---|---|---|"]
    for name, key in part["properties"].items():
        required = " (required)" if name in part.get("required", ()) else ""
        meaning = key["description"].replace("|", "\\|")
        rows.append(f"| `{name}`{required} | {takes(key)} | {meaning} |")
    return "\n".join(rows) + "\n"


def takes(key: dict[str, Any]) -> str:
    """Return what a key takes, in words."""
    if "$ref" in key:
        return part_name(key["$ref"])
    if "const" in key:
        return f"`{key['const']}`"
    if "enum" in key:
        return ", ".join(f"`{value}`" for value in key["enum"])
    if "anyOf" in key:
        return " or ".join(dict.fromkeys(takes(one) for one in key["anyOf"]))
    match key["type"]:
        case "array":
            return "[low, high]" if "prefixItems" in key else f"a list of {many(key['items'])}"
        case "object":
            inner = key.get("patternProperties") or {"": key["additionalProperties"]}
            return f"names, each with {takes(*inner.values())}"
        case "boolean":
            return "`true` or `false`"
        case "string":
            return "a date" if key.get("format") == "date" else "text"
        case _:
            return number(key)


def part_name(reference: str) -> str:
    """Return a link to the table of a part."""
    name = reference.rpartition("/")[2]
    words = re.sub(r"(?<!^)([A-Z])", r" \1", name).lower()
    return f"[{words}](#{words.replace(' ', '-')})"


def many(key: dict[str, Any]) -> str:
    """Return what a list holds, in words."""
    words = takes(key)
    for one, several in (("a number", "numbers"), ("a whole number", "whole numbers"), ("a list", "lists")):
        words = words.replace(one, several)
    return words


def number(key: dict[str, Any]) -> str:
    """Return which numbers are allowed, in words."""
    kind = "a whole number" if key["type"] == "integer" else "a number"
    low, above, high = key.get("minimum"), key.get("exclusiveMinimum"), key.get("maximum")
    if above is not None:
        return f"{kind} above {0 if above == LEAST_NUMBER else above:g}"
    if low == 0 and high == 1:
        return f"{kind} from 0 to 1"
    return kind if low is None or low < 0 else f"{kind} from {low:g}"


def main(arguments: list[str]) -> str:
    """Write the tables or say which pages differ from the code; return what is wrong, or nothing."""
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    wrong = [f"no table of {name}" for name in sorted(missing(list(texts.values())))]
    for path, text in texts.items():
        if "--write" in arguments:
            path.write_text(page(text), encoding="utf-8")
        elif page(text) != text:
            wrong.append(f"{path.name} is not what the code says: python docs/tables.py --write")
    return "\n".join(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or None)
