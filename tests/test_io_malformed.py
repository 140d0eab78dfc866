"""Every kind of malformed calibration is refused with the key's path, what is allowed and what to do."""

# ruff: noqa: E501  (a table: one case a line)

from __future__ import annotations

from dataclasses import dataclass

import jsonschema
import pytest

from specmodel import io
from specmodel.errors import CalibrationError

HEAD = "schema: specmodel.calibration/1\nname: x\n"


@dataclass(frozen=True, kw_only=True)
class Malformed:
    kind: str
    text: str
    path: str  # "" where the file as a whole is at fault
    must: str
    remedy: str
    by_schema: bool  # whether JSON Schema can express it


def cycle(row: str, kind: str, key: str, must: str, remedy: str, by_schema: bool = True) -> Malformed:
    text = f"{HEAD}measurements:\n  cycles:\n    - {{num_steps: 0, tok_s: 90}}\n    - {row}\n"
    path = f"measurements.cycles[1]{key and '.'}{key}"
    return Malformed(kind=kind, text=text, path=path, must=must, remedy=remedy, by_schema=by_schema)


def table(name: str, row: str, kind: str, key: str, must: str, remedy: str, by_schema: bool = True) -> Malformed:
    text = f"{HEAD}measurements:\n  {name}:\n    - {row}\n"
    path = f"measurements.{name}[0]{key and '.'}{key}"
    return Malformed(kind=kind, text=text, path=path, must=must, remedy=remedy, by_schema=by_schema)


def acceptance(row: str, kind: str, key: str, must: str, remedy: str, by_schema: bool = True) -> Malformed:
    path = f"acceptance[0]{key and '.'}{key}"
    text = f"{HEAD}acceptance:\n  - {row}\n"
    return Malformed(kind=kind, text=text, path=path, must=must, remedy=remedy, by_schema=by_schema)


def section(text: str, kind: str, path: str, must: str, remedy: str, by_schema: bool = True) -> Malformed:
    return Malformed(kind=kind, text=HEAD + text, path=path, must=must, remedy=remedy, by_schema=by_schema)


def whole(text: str, kind: str, must: str, remedy: str) -> Malformed:
    return Malformed(kind=kind, text=text, path="", must=must, remedy=remedy, by_schema=False)


TABLE = [
    # types
    cycle('{num_steps: 1, tok_s: "3"}', "text for a number", "tok_s", "a number", "remove the quotes"),
    cycle('{num_steps: "1", tok_s: 3}', "text for a whole number", "num_steps", "a whole number", "remove the quotes"),
    cycle("{num_steps: true, tok_s: 3}", "flag for a whole number", "num_steps", "a whole number", "correct it"),
    cycle("{num_steps: 1, tok_s: true}", "flag for a number", "tok_s", "a number", "give a number"),
    cycle("{num_steps: 1.5, tok_s: 3}", "fraction for a whole number", "num_steps", "a whole number", "round it"),
    cycle("{num_steps: 2.0, tok_s: 3}", "decimal point in a whole number", "num_steps", "a whole number", "write 2", False),
    cycle("{num_steps: 1, tok_s: [3]}", "list for a number", "tok_s", "a number", "give a number"),
    cycle("{num_steps: 1, tok_s: {mean: 3}}", "mapping for a number", "tok_s", "a number", "give a number"),
    cycle("{num_steps: 1, tok_s: 1e300}", "speed beyond all", "tok_s", "<= 1e+15", "correct it"),
    cycle("{num_steps: 1, tok_s: 1e-300}", "speed of nothing", "tok_s", "> 1e-15", "correct it"),
    cycle("{num_steps: 1, tok_s: 3, sd_tok_s: 1e300}", "spread beyond all", "sd_tok_s", "<= 1e+15", "correct it"),
    cycle("{num_steps: 1, tok_s: 3, batch: 1e300}", "batch beyond all", "batch", "<= 1e+15", "correct it"),
    cycle("{num_steps: 1, tok_s: 3 tok/s}", "unit with a number", "tok_s", "a number", "remove the quotes, or correct"),
    cycle("{num_steps: 1, tok_s: 1_000}", "underscore in a number", "tok_s", "a number", "correct it"),
    cycle("{num_steps: 1, tok_s: 3, cuda_graph: yes}", "yes for true", "cuda_graph", "true or false", "write true or false"),
    cycle("{num_steps: 1, tok_s: 3, cuda_graph: 1}", "1 for true", "cuda_graph", "true or false", "write true or false"),
    cycle("{num_steps: 1, tok_s: 3, workload: 7}", "number for text", "workload", "text", "quote it"),
    cycle("{num_steps: 1, tok_s: 3, note: 2026}", "number for a note", "note", "text", "quote it"),
    cycle("{num_steps: 1, tok_s: null}", "null", "tok_s", "a number", "give it a value, or delete the key"),
    cycle("{num_steps: 1, tok_s: }", "key without a value", "tok_s", "a number", "give it a value, or delete the key"),
    cycle("7", "number for a row", "", "a mapping of keys", "write `key: value`"),
    cycle("[1, 2]", "list for a row", "", "a mapping of keys", "write `key: value`"),
    section("measurements: []\n", "list for a section", "measurements", "a mapping of keys", "write `key: value`"),
    section("system:\n", "section left empty", "system", "a mapping of keys", "give it a value, or delete the key"),
    section("measurements: {cycles: {}}\n", "mapping for a table", "measurements.cycles", "a list", "begin each entry"),
    section("measurements: {cycles: 3}\n", "number for a table", "measurements.cycles", "a list", "begin each entry"),
    section("measurements:\n  cycles:\n", "table left empty", "measurements.cycles", "a list", "give it a value"),
    section("acceptance: {num_steps: 1}\n", "mapping for acceptance", "acceptance", "a list", "begin each entry"),
    section("comm: [a]\n", "list for comm", "comm", "a mapping of keys", "write `key: value`"),
    section("comm: {a: }\n", "setting left empty", "comm.a", "a mapping of keys", "give it a value"),
    section("comm: {a: {env: {NCCL_X: 0}}}\n", "number for an environment value", "comm.a.env.NCCL_X", "a quoted string", "quote it"),
    section("comm: {a: {env: {NCCL_X: true}}}\n", "flag for an environment value", "comm.a.env.NCCL_X", "a quoted string", "quote it"),
    section("comm: {a: {env: {NCCL_X: 1e3}}}\n", "float for an environment value", "comm.a.env.NCCL_X", "a quoted string", "quote it"),
    section("comm: {a: {env: [A]}}\n", "list for the environment", "comm.a.env", "a mapping of keys", "write `key: value`"),
    section("comm: {a: {flags: --x}}\n", "text for flags", "comm.a.flags", "a list", "write [..., ...]"),
    section("comm: {a: {flags: [1]}}\n", "number for a flag", "comm.a.flags[0]", "text", "quote it"),
    section("comm: {1: {}}\n", "number for a setting's name", "comm.1", "text", "quote it", False),
    section("workloads: {2: {}}\n", "number for a workload's name", "workloads.2", "text", "quote it", False),
    section("system: {engine_version: 0.5}\n", "number for a version", "system.engine_version", "text", "quote it"),
    section("provenance: {caveats: none}\n", "text for caveats", "provenance.caveats", "a list", "begin each entry"),
    section("evidence: [{about: other, value: [1]}]\n", "list for a fact", "evidence[0].value", "true, false", "give one of these"),
    section("evidence: [{about: other, value: null}]\n", "null for a fact", "evidence[0].value", "true, false", "give it a value"),
    # ranges
    cycle("{num_steps: 1, tok_s: 0}", "zero speed", "tok_s", "> 0", "correct it"),
    cycle("{num_steps: 1, tpot_ms: -1.5}", "negative time", "tpot_ms", "> 0", "correct it"),
    cycle("{num_steps: -1, tok_s: 3}", "negative steps", "num_steps", ">= 0", "correct it"),
    cycle("{num_steps: 1, tok_s: 3, batch: 0.5}", "batch below one", "batch", ">= 1", "one sequence at least"),
    cycle("{num_steps: 1, tok_s: 3, acceptance_length: 0.9}", "acceptance length below one", "acceptance_length", ">= 1", "bonus"),
    cycle("{num_steps: 1, tok_s: 3, sd_tok_s: -1}", "negative spread", "sd_tok_s", ">= 0", "correct it"),
    cycle("{num_steps: 1, tok_s: 3, samples: 0}", "no samples", "samples", ">= 1", "correct it"),
    cycle("{num_steps: 1, tok_s: 3, context_tokens: -1}", "negative context", "context_tokens", ">= 0", "correct it"),
    cycle("{num_steps: 1, tok_s: 3, mean_draft_tokens: -1}", "negative drafts", "mean_draft_tokens", ">= 0", "correct it"),
    cycle("{num_steps: 1, tok_s: .nan}", "NaN", "tok_s", "a finite number", "delete the key", False),
    cycle("{num_steps: 1, tok_s: .inf}", "infinity", "tok_s", "a finite number", "delete the key", False),
    cycle("{num_steps: 1, tok_s: -.inf}", "negative infinity", "tok_s", "a finite number", "delete the key"),
    cycle("{num_steps: 1, tok_s: 1e999}", "number beyond a double", "tok_s", "a finite number", "delete the key", False),
    cycle(f"{{num_steps: 1{'0' * 30}, tok_s: 3}}", "huge integer", "num_steps", "<= 1e+15", "correct it"),
    cycle(f"{{num_steps: 1, tok_s: 1{'0' * 350}}}", "integer beyond a double", "tok_s", "a number", "give a number", False),
    cycle(f"{{num_steps: 1{'0' * 9999}, tok_s: 3}}", "integer of 10000 digits", "num_steps", "a whole number", "correct it", False),
    section("evidence: [{about: other, value: .nan}]\n", "NaN for a fact", "evidence[0].value", "finite", "give one", False),
    section("workloads: {a: {weight: -1}}\n", "negative weight", "workloads.a.weight", ">= 0", "correct it"),
    section("workloads: {a: {output_tokens: 0}}\n", "no output", "workloads.a.output_tokens", "> 0", "correct it"),
    section("system: {num_gpus: 0}\n", "no GPUs", "system.num_gpus", ">= 1", "correct it"),
    table("verify", "{tokens: 0, time_ms: 1}", "no tokens", "tokens", ">= 1", "correct it"),
    table("verify", "{tokens: 1, time_ms: 0}", "zero time", "time_ms", "> 0", "correct it"),
    table("draft", "{num_steps: 0, time_ms: 1}", "draft of no steps", "num_steps", ">= 1", "correct it"),
    table("allreduce", "{size_bytes: 0, time_ms: 1}", "empty message", "size_bytes", ">= 1", "correct it"),
    acceptance("{num_steps: 1, survival: [1.2]}", "probability above one", "survival[0]", "<= 1", "fractions"),
    acceptance("{num_steps: 1, conditional: [71]}", "percent for a fraction", "conditional[0]", "<= 1", "0.71 for 71 %"),
    acceptance("{num_steps: 1, survival: [-0.1]}", "negative probability", "survival[0]", ">= 0", "fractions"),
    acceptance("{num_steps: 0, acceptance_length: 1}", "acceptance of no drafts", "num_steps", ">= 1", "correct it"),
    acceptance("{num_steps: 1, drafts: 0, accepted_per_position: [0]}", "no drafts", "drafts", ">= 1", "correct it"),
    acceptance("{num_steps: 1, drafts: 9, accepted_per_position: [-1]}", "negative count", "accepted_per_position[0]", ">= 0", "correct"),
    acceptance("{num_steps: 1, drafts: 9, accepted_per_position: [1.5]}", "fraction of a count", "accepted_per_position[0]", "a whole", "round"),
    # words
    cycle("{num_steps: 1, tok_s: 3, graph_scope: steps}", "unknown choice", "graph_scope", "one of step, cycle", "did you mean `step`"),
    section("model: {method: Eagle-3}\n", "choice in another spelling", "model.method", "one of eagle3", "did you mean `eagle3`"),
    section("model: {method: medusa}\n", "choice that is not there", "model.method", "one of eagle3, eagle, mtp", "one of these"),
    section("model: {cuda_graph_unit: requests}\n", "unknown unit", "model.cuda_graph_unit", "one of tokens, sequences", "one of these"),
    section("evidence: [{about: cuda_graph, value: 1}]\n", "unknown subject", "evidence[0].about", "one of draft_cuda_graph", "did you mean"),
    section("provenance: {date: 26.2.2026}\n", "date in another order", "provenance.date", "YYYY-MM-DD", "2026-02-26", False),
    section("provenance: {date: 2026-02-30}\n", "day that is not there", "provenance.date", "YYYY-MM-DD", "2026-02-26", False),
    section("provenance: {date: '2026-02-26T10:00:00'}\n", "time in a date", "provenance.date", "YYYY-MM-DD", "2026-02-26", False),
    section("provenance: {date: 20260226}\n", "number for a date", "provenance.date", "YYYY-MM-DD", "2026-02-26"),
    section('description: "two\\nlines"\n', "two lines for one", "description", "one line of text", "join the lines"),
    section('description: " "\n', "blank text", "description", "one line of text", "delete the key"),
    section('system: {gpu: "\\e[31mred"}\n', "control character", "system.gpu", "one line of text", "join the lines"),
    section("provenance: {caveats: ['']}\n", "blank caveat", "provenance.caveats[0]", "not blank", "delete the key"),
    # keys
    cycle("{num_steps: 1, tok_s: 3, accept_length: 2}", "an engine's word", "accept_length", "a key", "`acceptance_length`"),
    cycle("{num_speculative_tokens: 1, num_steps: 1, tok_s: 3}", "another engine's word", "num_speculative_tokens", "a key", "`num_steps`"),
    cycle("{num_steps: 1, tok_s: 3, batchh: 2}", "misspelt key", "batchh", "a key", "did you mean `batch`?"),
    cycle("{num_steps: 1, tok_s: 3, zzz: 2}", "unknown key", "zzz", "a key", "allowed here: num_steps"),
    cycle("{num_steps: 1, tok_s: 3, 7: 2}", "number for a key", "7", "a key", "allowed here: num_steps", False),
    cycle("{num_steps: 1, tok_s: 1,310: 2}", "comma between digits", "310", "a key", "without commas", False),
    section("measurement: {}\n", "misspelt section", "measurement", "a key", "did you mean `measurements`?"),
    section("comm: {a: {environment: {}}}\n", "misspelt key of a setting", "comm.a.environment", "a key", "allowed here: env"),
    section("validation: {verify: []}\n", "table that is not there", "validation.verify", "a key", "allowed here: cycles"),
    cycle("{tok_s: 3}", "missing key", "num_steps", "given", "add `num_steps:`"),
    table("verify", "{time_ms: 3}", "missing tokens", "tokens", "given", "add `tokens:`"),
    section("evidence: [{value: true}]\n", "missing subject", "evidence[0].about", "given", "add `about:`"),
    cycle("{num_steps: 1, tok_s: 3, tok_s: 4}", "key twice on a line", "tok_s", "stated once", "delete one", False),
    section("system: {}\nsystem: {}\n", "section twice", "system", "stated once", "delete one", False),
    section("comm: {a: {}, 'a': {}}\n", "name twice, quoted once", "comm.a", "stated once", "delete one", False),
    # rules over several keys
    cycle("{num_steps: 1, tok_s: 3, tpot_ms: 4}", "two forms of speed", "", "exactly one form of speed", "keep one of tok_s and tpot_ms"),
    cycle("{num_steps: 1, tok_s: 3, tok_s_at_most: 4}", "a speed and a bound", "", "exactly one form of speed", "keep one of"),
    cycle("{num_steps: 1, cycle_ms: 3, range_cycle_ms: [2, 4]}", "a value and its range", "", "exactly one form", "keep one of"),
    cycle("{num_steps: 1}", "no form of speed", "", "exactly one form of speed", "add one, for example tok_s"),
    cycle("{num_steps: 1, range_tok_s: [4, 3]}", "range the wrong way round", "range_tok_s", "[low, high]", "swap", False),
    cycle("{num_steps: 1, range_tok_s: [3]}", "range of one end", "range_tok_s", "[low, high]", "give both ends"),
    cycle("{num_steps: 1, range_tok_s: [3, 4, 5]}", "range of three ends", "range_tok_s", "[low, high]", "give two ends"),
    cycle("{num_steps: 1, range_tok_s: [0, 4]}", "range from zero", "range_tok_s[0]", "> 0", "correct it"),
    cycle("{num_steps: 1, range_tok_s: [3, 4], sd_tok_s: 1}", "spread of a range", "sd_tok_s", "only with tok_s", "delete sd_tok_s"),
    cycle("{num_steps: 1, tok_s: 3, sd_cycle_ms: 1}", "spread of another form", "sd_cycle_ms", "only with cycle_ms", "add cycle_ms"),
    cycle("{num_steps: 1, tok_s: 3, speculation: false}", "drafts without speculation", "speculation", "true", "num_steps: 0"),
    cycle("{num_steps: 3, num_draft_tokens: 3, tok_s: 3}", "tokens of no chain", "num_draft_tokens", "num_steps + 1 = 4", "topk", False),
    cycle("{num_steps: 3, topk: 4, tok_s: 3}", "tree of unknown size", "num_draft_tokens", "2 or more", "the root included"),
    cycle("{num_steps: 3, topk: 4, num_draft_tokens: 1, tok_s: 3}", "tree of a root", "num_draft_tokens", "2 or more", "the root"),
    cycle("{num_steps: 0, topk: 4, num_draft_tokens: 8, tok_s: 3}", "tree of no steps", "num_steps", "1 or more", "delete topk"),
    cycle("{num_steps: 1, tok_s: 3, graph_scope: cycle, cuda_graph: false}", "scope of no graph", "graph_scope", "absent", "delete"),
    cycle("{num_steps: 1, tok_s: 3, comm: ring}", "setting that is not listed", "comm", "listed under comm", "list it", False),
    table("draft", "{num_steps: 1, time_ms: 1, cuda_graph: false, graph_scope: step}", "eager draft with a scope", "graph_scope", "absent", "delete"),
    table("verify", "{tokens: 1}", "no time", "", "exactly one form of time", "add one, for example time_ms"),
    table("verify", "{tokens: 1, time_ms: 1, range_ms: [1, 2]}", "a time and its range", "", "exactly one form of time", "keep one"),
    table("prefill", "{tokens: 1, range_ms: [1, 2], sd_ms: 1}", "spread of a range of times", "sd_ms", "only with time_ms", "delete sd_ms"),
    table("allreduce", "{size_bytes: 1, range_ms: [2, 1]}", "times the wrong way round", "range_ms", "[low, high]", "swap", False),
    acceptance("{num_steps: 2}", "no form of acceptance", "", "exactly one form of acceptance", "add one"),
    acceptance("{num_steps: 2, survival: [0.5], conditional: [0.5]}", "two forms of acceptance", "", "exactly one form", "keep one"),
    acceptance("{num_steps: 1, accepted_per_position: [5]}", "counts of unknown trials", "drafts", "accepted_per_position", "how many drafts"),
    acceptance("{num_steps: 1, drafts: 4, accepted_per_position: [5]}", "more accepted than drafted", "accepted_per_position[0]", "drafts = 4", "correct the count", False),
    acceptance("{num_steps: 2, drafts: 9, drafted_per_position: [9, 2], accepted_per_position: [5, 3]}", "more accepted than tried", "accepted_per_position[1]", "drafted_per_position[1] = 2", "correct the count", False),
    acceptance("{num_steps: 2, drafts: 9, drafted_per_position: [9], accepted_per_position: [5, 3]}", "attempts of too few positions", "drafted_per_position", "as long as", "the attempts at each", False),
    acceptance("{num_steps: 1, drafts: 9, drafted_per_position: [10], accepted_per_position: [5]}", "more tried than drafts", "drafted_per_position[0]", "drafts = 9", "correct", False),
    acceptance("{num_steps: 1, drafts: 9, drafted_per_position: [9], survival: [0.5]}", "attempts without counts", "drafted_per_position", "accepted_per_position", "delete it"),
    acceptance("{num_steps: 2, drafts: 9, topk: 2, num_draft_tokens: 5, accepted_by_rank: [[5, 5]]}", "ranks that add to too much", "accepted_by_rank[0]", "drafts = 9", "correct", False),
    acceptance("{num_steps: 1, drafts: 9, accepted_by_rank: [[]]}", "depth without ranks", "accepted_by_rank[0]", "not empty", "give its entries"),
    acceptance("{num_steps: 1, survival: []}", "empty curve", "survival", "not empty", "delete the key"),
    acceptance("{num_steps: 1, survival: [0.5, 0.4]}", "curve beyond its steps", "survival", "at most num_steps = 1", "shorten", False),
    acceptance("{num_steps: 2, survival: [0.5, 0.6]}", "survival that rises", "survival[1]", "at most position 0", "use conditional", False),
    acceptance("{num_steps: 2, drafts: 10, accepted_per_position: [5, 6]}", "counts that rise", "accepted_per_position[1]", "at most position 0", "conditional", False),
    section("model: {num_experts: 8, experts_per_token: 9}\n", "more experts used than there are", "model.experts_per_token", "num_experts = 8", "correct one", False),
    section("model: {cuda_graph_sizes: [1, 4, 2]}\n", "sizes out of order", "model.cuda_graph_sizes[2]", "above the size before it", "increasing", False),
    section("model: {cuda_graph_sizes: [1, 1]}\n", "size twice", "model.cuda_graph_sizes[1]", "above the size before it", "each captured size once", False),
    section("model: {cuda_graph_sizes: []}\n", "no sizes", "model.cuda_graph_sizes", "not empty", "delete the key"),
    # the document
    whole("", "empty file", "a document", "schema --example"),
    whole(" \n\t\n", "blank file", "a document", "schema --example"),
    whole("# nothing yet\n", "only comments", "a calibration", "schema --example"),
    whole("null\n", "null document", "a calibration", "schema --example"),
    whole("- a\n- b\n", "list at the top", "a mapping of keys", "begin with"),
    whole("[]", "JSON list at the top", "a mapping of keys", "begin with"),
    whole("just text\n", "text at the top", "a mapping of keys", "begin with"),
    whole("3.5\n", "number at the top", "a mapping of keys", "begin with"),
    whole(f"{HEAD}---\n{HEAD}", "two documents", "one document", "a file of its own"),
    whole(f"{HEAD}system: !!python/object:os.system {{}}\n", "object tag", "free of tags", "delete the tag"),
    whole(f"{HEAD}description: !!python/name:os.system x\n", "name tag", "free of tags", "delete the tag"),
    whole(f"{HEAD}description: !!str 5\n", "core tag", "free of tags", "quote a value"),
    whole(f"{HEAD}system: !mine {{}}\n", "local tag", "free of tags", "delete the tag"),
    whole(f"{HEAD}comm:\n  a: &a {{}}\n  b: {{<<: *a}}\n", "merge key", "free of merge keys", "write the keys out"),
    whole(f"{HEAD}description: *nowhere\n", "alias of nothing", "free of unknown anchors", "define the anchor"),
    whole(f"{HEAD}comm: &a {{b: *a}}\n", "alias of what it is in", "free of unknown anchors", "not around itself"),
    whole(f"{HEAD}? [a, b]\n: 3\n", "list for a key", "keyed by plain words", "write a plain word"),
    whole(f"{HEAD}system:\n\tgpu: H200\n", "tab to indent", "YAML", "spaces, not tabs"),
    whole(f"{HEAD}system: {{gpu: H200\n", "brace left open", "YAML", "correct it there"),
    whole(f"{HEAD}description: a: b\n", "colon in plain text", "YAML", "quote text"),
    whole(f'{HEAD}description: "open\n', "quote left open", "YAML", "correct it there"),
    whole(f"{HEAD}description: @x\n", "reserved character", "YAML", "quote text"),
    whole(f"{HEAD}description: \x01\n", "character that YAML forbids", "YAML", "correct it there"),
    whole('{"schema": "specmodel.calibration/1", "name": "x"', "JSON left open", "JSON", "correct the text"),
    whole('{"schema": "specmodel.calibration/1", "name": NaN}', "NaN in JSON", "numbers are finite", "delete the key"),
    whole('{"schema": "specmodel.calibration/1", "name": -Infinity}', "infinity in JSON", "numbers are finite", "delete the key"),
    Malformed(kind="key twice in JSON", text='{"schema": "specmodel.calibration/1", "name": "x", "comm": {"a": {}, "a": {}}}', path="comm.a", must="stated once", remedy="delete one", by_schema=False),
    Malformed(kind="lone surrogate in JSON", text='{"schema": "specmodel.calibration/1", "name": "x", "description": "\\ud800"}', path="description", must="Unicode", remedy="escapes", by_schema=False),
    Malformed(kind="no schema", text="name: x\n", path="schema", must="given", remedy="add `schema: specmodel.calibration/1`", by_schema=True),
    Malformed(kind="no name", text="schema: specmodel.calibration/1\n", path="name", must="given", remedy="add `name:`", by_schema=True),
    Malformed(kind="format of another version", text="schema: specmodel.calibration/2\nname: x\n", path="schema", must="specmodel.calibration/1", remedy="did you mean", by_schema=True),
    Malformed(kind="name that is a path", text="schema: specmodel.calibration/1\nname: ../x\n", path="name", must="letters, digits", remedy="rename it", by_schema=True),
    Malformed(kind="name that is a number", text="schema: specmodel.calibration/1\nname: 2026\n", path="name", must="text", remedy="quote it", by_schema=True),
]  # fmt: skip


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.kind)
def test_one_line_names_file_key_allowed_and_remedy(case: Malformed) -> None:
    with pytest.raises(CalibrationError) as caught:
        io.loads(case.text, source="calib.yaml")
    [fault] = caught.value.faults
    line = str(caught.value)
    assert "\n" not in line
    assert len(line) < 600
    assert fault.path == case.path
    assert line.startswith(f"calib.yaml: {case.path}: must be " if case.path else "calib.yaml: must be ")
    assert case.must in fault.must
    assert case.remedy in fault.remedy


def test_kinds_are_many_and_distinct() -> None:
    assert len({case.kind for case in TABLE}) == len({case.text for case in TABLE}) == len(TABLE) >= 60


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(io.json_schema())


@pytest.mark.parametrize("case", [case for case in TABLE if case.by_schema], ids=lambda case: case.kind)
def test_the_json_schema_refuses_it_too(
    case: Malformed, validator: jsonschema.Draft202012Validator, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("malformed") / "calib.yaml"
    path.write_text(case.text, encoding="utf-8")
    assert not validator.is_valid(io.read_document(path))


def test_all_faults_of_a_file_at_once() -> None:
    text = """\
name: a b
measurements:
  cycles:
    - {num_steps: 1, tok_s: "3", tpot_ms: 4, accept_length: 2, comm: ring}
    - {num_steps: 2, tok_s: 3, tok_s: 4, sd_tpot_ms: 1}
  verify: 3
acceptance:
  - {num_steps: 1, survival: [0.5, 0.9, 2]}
"""
    with pytest.raises(CalibrationError) as caught:
        io.loads(text, source="calib.yaml")
    assert sorted(fault.path for fault in caught.value.faults) == [
        "acceptance[0].survival",
        "acceptance[0].survival[2]",
        "measurements.cycles[0]",
        "measurements.cycles[0].accept_length",
        "measurements.cycles[0].comm",
        "measurements.cycles[0].tok_s",
        "measurements.cycles[1].sd_tpot_ms",
        "measurements.cycles[1].tok_s",
        "measurements.verify",
        "name",
        "schema",
    ]
    assert str(caught.value).count("\n") == 10


def test_many_faults_are_counted_not_listed() -> None:
    rows = [{"num_steps": 1, "tok_s": -i} for i in range(170)]
    with pytest.raises(CalibrationError) as caught:
        io.from_dict({"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": rows}}, source="d")
    lines = str(caught.value).splitlines()
    assert len(lines) == 51
    assert lines[-1] == "d: and 120 more"
    assert len(caught.value.faults) == 170


@pytest.mark.parametrize(
    "value",
    [
        "x" * 5000,
        "\x1b[31m" * 50,
        "\u202e\ud800" * 60,
        ["y" * 5000] * 9,
        {"z" * 500: 1},
        10**3000,
        -(10**200),
        object(),
    ],
    ids=["long", "escape", "unprintable", "list", "mapping", "huge", "negative", "object"],
)
def test_a_value_is_shown_short_and_printable(value: object) -> None:
    document = {"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": [{"num_steps": value}]}}
    with pytest.raises(CalibrationError) as caught:
        io.from_dict(document)
    assert all(len(fault.got) <= 84 for fault in caught.value.faults)
    assert all(line.isprintable() for line in str(caught.value).splitlines())


@pytest.mark.parametrize("key", ["k" * 4000, "\x1b[31m", "a b\n", "", "ключ"])
def test_a_key_is_shown_short_and_printable(key: str) -> None:
    with pytest.raises(CalibrationError) as caught:
        io.from_dict({"schema": "specmodel.calibration/1", "name": "x", key: 1})
    [fault] = caught.value.faults
    assert len(fault.path) <= 84
    assert fault.path.isprintable()


@pytest.mark.parametrize(
    "row",
    [
        {"num_steps": 2, "tok_s": 300, "acceptance_length": 9},  # above K + 1
        {"num_steps": 0, "tok_s": 300, "acceptance_length": 2},
        {"num_steps": 3, "tok_s": 9000, "acceptance_length": 1.5},  # a speedup above the acceptance length
        {"num_steps": 2, "tok_s": 300, "mean_draft_tokens": 5},
        {"num_steps": 0, "tok_s": 300, "speculation": True},
        {"num_steps": 4, "tok_s": 3, "batch": 1.5},
    ],
)
def test_impossible_physics_is_no_fault_of_form(row: dict[str, object]) -> None:
    rows = [{"num_steps": 0, "tok_s": 90}, row]
    loaded = io.from_dict({"schema": "specmodel.calibration/1", "name": "x", "measurements": {"cycles": rows}})
    assert len(loaded.measurements.cycles) == 2
