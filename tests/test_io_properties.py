"""What holds for every calibration and for every document: round trips, and no error but the one that is meant."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from specmodel import io, yaml_text
from specmodel.calibration import SCHEMA, Calibration
from specmodel.errors import CalibrationError

counts = st.integers(1, 10**6)
positive = st.floats(2e-15, 1e15)
at_least_one = st.floats(1, 1e6) | counts
word = st.text(st.characters(exclude_categories=("Cs", "Cc", "Zl", "Zp")), min_size=1, max_size=12).filter(
    lambda text: text.strip() and text.isprintable()
)
any_text = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
pair = st.tuples(positive, positive).map(lambda ends: sorted(ends))
setting = st.sampled_from(["default", "ring", "NO", "1"])


def some(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A mapping with any subset of the fields."""
    return st.fixed_dictionaries({}, optional=fields)


def merged(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda mappings: {k: v for mapping in mappings for k, v in mapping.items()})


def alone(key: str, value: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({key: value})


time = merged(alone("time_ms", positive), some(sd_ms=st.floats(0, 1e9))) | alone("range_ms", pair)
place = some(comm=setting, context_tokens=st.integers(0, 10**6), samples=counts, note=word)
speed = st.one_of(
    *[merged(alone(q, positive), some(**{f"sd_{q}": st.floats(0, 9)})) for q in ("tok_s", "tpot_ms", "cycle_ms")],
    *[alone(f"range_{q}", pair) for q in ("tok_s", "tpot_ms", "cycle_ms")],
    alone("tok_s_at_most", positive),
)
chain = alone("num_steps", st.integers(1, 12))
tree = st.fixed_dictionaries({"num_steps": counts, "topk": st.integers(2, 9), "num_draft_tokens": st.integers(2, 99)})
plain = some(speculation=st.booleans()).map(lambda row: {"num_steps": 0, **row})
cycles = merged(
    chain | tree | plain,
    place,
    speed,
    some(
        batch=at_least_one,
        workload=word,
        acceptance_length=at_least_one,
        mean_draft_tokens=st.floats(0, 20),
        cuda_graph=st.just(True),
        graph_scope=st.sampled_from(["step", "cycle"]),
        verify_cuda_graph=st.booleans(),
    ),
)
falling = st.lists(st.floats(0, 1), min_size=1, max_size=6).map(lambda values: sorted(values, reverse=True))
acceptance = st.one_of(
    falling.map(lambda values: {"num_steps": len(values), "survival": values}),
    st.lists(st.floats(0, 1), min_size=1, max_size=6).map(lambda v: {"num_steps": len(v) + 1, "conditional": v}),
    st.lists(st.integers(0, 500), min_size=1, max_size=6).map(
        lambda v: {"num_steps": len(v), "drafts": 500, "accepted_per_position": sorted(v, reverse=True)}
    ),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=4).map(
        lambda v: {"num_steps": 4, "topk": 3, "num_draft_tokens": 9, "drafts": 30, "accepted_by_rank": v}
    ),
    alone("acceptance_length", at_least_one).map(lambda entry: {"num_steps": 3, **entry}),
)
documents = st.fixed_dictionaries(
    {"schema": st.just(SCHEMA), "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)},
    optional={
        "description": word,
        "provenance": some(
            source=word,
            url=word,
            date=st.dates().map(lambda day: day.isoformat()),
            caveats=st.lists(any_text.filter(str.strip), min_size=1, max_size=3),
        ),
        "system": some(gpu=word, num_gpus=counts, data_parallel=counts, engine=word, engine_version=word),
        "model": some(
            target=word,
            method=st.sampled_from(["eagle3", "none"]),
            hidden_size=counts,
            cuda_graph_sizes=st.lists(counts, min_size=1, unique=True).map(lambda sizes: sorted(sizes)),
            cuda_graph_unit=st.sampled_from(["tokens", "sequences"]),
        ),
        "workloads": st.dictionaries(word, some(weight=st.floats(0, 9), output_tokens=positive), max_size=3),
        "measurements": some(
            verify=st.lists(merged(alone("tokens", counts), time, place, some(batch=at_least_one)), max_size=3),
            draft=st.lists(merged(chain, time, place, some(cuda_graph=st.booleans())), max_size=3),
            allreduce=st.lists(
                merged(alone("size_bytes", counts), time, some(comm=setting, in_graph=st.booleans(), note=word)),
                max_size=3,
            ),
            prefill=st.lists(merged(alone("tokens", counts), time, place), max_size=3),
            cycles=st.lists(cycles, max_size=4),
        ),
        "acceptance": st.lists(merged(acceptance, some(workload=word, sd=st.floats(0, 1), prompts=counts)), max_size=3),
        "evidence": st.lists(
            merged(
                st.fixed_dictionaries(
                    {
                        "about": st.sampled_from(["draft_cuda_graph", "other"]),
                        "value": st.booleans() | st.integers(-9, 10**15) | st.floats(-1e300, 1e300) | any_text,
                    }
                ),
                some(ranks=counts, source=word),
            ),
            max_size=3,
        ),
        "validation": some(cycles=st.lists(cycles, max_size=2)),
    },
).map(
    lambda document: {
        **document,
        "comm": {"ring": {"env": {"NCCL_ALGO": "Ring", "A": "0", "B": "no"}, "flags": ["--x=1"]}, "NO": {}, "1": {}},
    }
)

VALIDATOR = jsonschema.Draft202012Validator(io.json_schema())


@given(documents)
@settings(max_examples=150, deadline=None)
def test_round_trip(document: dict[str, Any]) -> None:
    calibration = io.from_dict(document)
    assert io.from_dict(io.to_dict(calibration)) == calibration
    assert io.loads(io.dumps(calibration, "yaml")) == calibration
    assert io.loads(io.dumps(calibration, "json")) == calibration
    assert io.loads(json.dumps(document)) == calibration


@given(documents)
@settings(max_examples=60, deadline=None)
def test_what_is_written_reads_the_same_elsewhere(document: dict[str, Any]) -> None:
    """An independent YAML reader sees what is meant, and the JSON Schema takes what the validator takes."""
    plain = io.to_dict(io.from_dict(document))
    reader = YAML(typ="safe", pure=True)
    reader.constructor.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: node.value)
    assert reader.load(io.dumps(io.from_dict(document))) == plain
    VALIDATOR.validate(document)
    VALIDATOR.validate(plain)


@given(st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_any_text_survives_as_a_value(text: str) -> None:
    if text.encode("utf-8", "ignore").decode() == text:
        written = yaml_text.to_yaml({"a": {text: [text]}, "b": [{"c": text}]})
        assert yaml_text.parse_yaml(written, "x") == ({"a": {text: [text]}, "b": [{"c": text}]}, [])


scalars = [None, True, 0, -1, 1, 2, 3.0, 1.5, 1e999, float("nan"), "", "x", " ", "\ud800", "default", 10**20, 10**400]
containers = [[], {}, [[]], [None], {"a": {}}, {1: 2}, {None: 1}, [1, 2, 3], ["a"], {"num_steps": 1}, [{"tokens": 1}]]
odd = st.sampled_from([*scalars, *containers, (), object(), b"x"]).map(copy.deepcopy)
keys = st.sampled_from(
    [
        "tok_s",
        "num_steps",
        "topk",
        "comm",
        "survival",
        "drafts",
        "range_tok_s",
        "sd_ms",
        "x",
        "",
        1,
        None,
        True,
        (1, 2),
        "\x1b",
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A calibration's document with a few of its parts replaced, deleted or added."""
    document: Any = [copy.deepcopy(draw(documents))]
    for _ in range(draw(st.integers(1, 4))):
        places = []
        pending = [document]
        while pending:
            node = pending.pop()
            for key in list(node) if isinstance(node, dict) else range(len(node)):
                places.append((node, key))
                if isinstance(node[key], dict | list):
                    pending.append(node[key])
        node, key = (
            draw(st.sampled_from(places)) if len(places) < 200 else places[draw(st.integers(0, len(places) - 1))]
        )
        change = draw(st.sampled_from(["replace", "delete", "add"]))
        if change == "delete" and node is not document:
            del node[key]
        elif change == "add" and isinstance(node[key], dict):
            node[key][draw(keys)] = draw(odd)
        elif change == "add" and isinstance(node[key], list):
            node[key].append(draw(odd))
        else:
            node[key] = draw(odd)
    return document[0]


def refusal(read: Callable[..., Calibration], document: Any) -> CalibrationError | None:
    try:
        read(document, source="d")
    except CalibrationError as error:
        return error
    return None


@given(mutated())
@settings(max_examples=400, deadline=None)
def test_a_mutated_document_loads_or_is_refused(document: Any) -> None:
    error = refusal(io.from_dict, document)
    lines = str(error).split("\n") if error else []
    assert all(line.startswith("d: ") and line.isprintable() and len(line) < 700 for line in lines)
    assert error is None or error.faults
    if error is None:  # the JSON Schema is never stricter
        VALIDATOR.validate(json.loads(json.dumps(document)))


EXAMPLE = io.example()
EXAMPLE_JSON = io.dumps(io.loads(EXAMPLE), "json")


@given(
    st.sampled_from([EXAMPLE, EXAMPLE_JSON]),
    st.lists(
        st.tuples(
            st.integers(0, len(EXAMPLE)),
            st.integers(0, 6),
            st.text(max_size=4) | st.sampled_from([*"{}[]:,#&*!|>'\"%@`-?\t\n\0\ufeff", "<<: ", "---\n", "&a "]),
        ),
        min_size=1,
        max_size=5,
    ),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_mutated_text_loads_or_is_refused(text: str, changes: list[tuple[int, int, str]]) -> None:
    for at, length, new in changes:
        text = text[:at] + new + text[at + length :]
    error = refusal(io.loads, text)
    lines = str(error).split("\n") if error else []
    assert all(line.startswith("d: ") and line.isprintable() and len(line) < 700 for line in lines)
    assert error is None or error.faults
