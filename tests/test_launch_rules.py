"""Whatever is decided, what is written for an engine parses and keeps the engine's rules; else there is no command."""

import json
import shlex
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specmodel.documents import parse
from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given
from specmodel.launch import BatchRange, Plan, launch

VERSIONS = {
    "sglang": ["0.4.9", "0.5.12", "0.5.13", "0.5.14", "0.5.18", "v0.6.1.post2", None],
    "vllm": ["0.10.1", "0.23.0", "0.24.0", "0.26.1rc2", "1.0", None],
    "trtllm": ["0.21.0", "1.0.0", "1.2.0", "1.3.0rc1", None],
    "llamacpp": ["b8000", "b9149", "b9150", "b10472", None],
}
METHODS = ["eagle3", "eagle", "mtp", "draft_model", "ngram", "parallel", None]
NAMES = st.sampled_from([None, "D", "org/Model name", "x'; reboot", "a\nEOF\nb", "$(x)", "a: #b"])


@st.composite
def schedules(draw, trees):
    ends = sorted(draw(st.sets(st.integers(1, 200), max_size=4)))
    ranges, start = [], 1
    for end in [*ends, None]:
        steps = draw(st.integers(0, 9))
        topk = draw(st.sampled_from([1, 1, 1, 4])) if trees and steps else 1
        tokens = draw(st.integers(2, 12)) if topk > 1 else steps + 1
        ranges.append(BatchRange(batch_from=start, batch_to=end, num_steps=steps, topk=topk, num_draft_tokens=tokens))
        start = 1 + end if end is not None else 0
    return tuple(ranges) if len(ranges) > 1 else ()


@st.composite
def plans(draw):
    steps = draw(st.integers(0, 9))
    topk = draw(st.sampled_from([1, 1, 1, 2, 4])) if steps else 1
    falling = sorted((draw(st.floats(0, 1)) for _ in range(10)), reverse=True)
    return Plan(
        num_steps=steps,
        topk=topk,
        num_draft_tokens=draw(st.integers(2, 40)) if topk > 1 else steps + 1,
        max_batch=draw(st.integers(1, 300)),
        env=draw(st.sampled_from([{}, {"NCCL_ALGO": "Ring"}, {"A B": "x"}, {"HF_TOKEN": "s3cret"}])),
        flags=draw(st.sampled_from([(), ("--disable-custom-all-reduce",), ("--enable-dp-attention",), ("--x a'b",)])),
        schedule=draw(schedules(trees=True)),
        target=draw(NAMES),
        draft=draw(NAMES),
        method=draw(st.sampled_from(METHODS)),
        tensor_parallel=draw(st.sampled_from([1, 8])),
        data_parallel=draw(st.sampled_from([1, 1, 2, 3])),
        survival=tuple(falling[: draw(st.integers(0, 10))]),
        step_ms=draw(st.sampled_from([{}, {4: 9.0, 8: 9.5, 64: 12.0}])),
        captured=draw(st.sampled_from([(), (1, 2, 4, 8, 12, 16, 24, 32), (5, 1000)])),
        captured_unit=draw(st.sampled_from(["tokens", "sequences"])),
    )


def words(text):
    return shlex.split(text.replace("\\\n", " "))


def options(command):
    """Every option of a command with the words that follow it."""
    out, name = {}, ""
    for word in words(command)[1:]:
        if word.startswith("-") and len(word) > 1 and not word[1].isdigit():
            assert word not in out, word
            name, out[word] = word, []
        elif name:
            out[name].append(word)
    return out


def one(found, name):
    (value,) = found[name]
    return value


def check_sglang(plan, made, tmp):
    found = options(made.command)
    algorithm = found.get("--speculative-algorithm")
    shape = [name for name in ("num-steps", "eagle-topk", "num-draft-tokens") if f"--speculative-{name}" in found]
    if algorithm is None:
        assert not shape
        assert not made.files
    elif algorithm[0] in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE"):
        steps, topk, tokens = (
            int(one(found, f"--speculative-{name}")) for name in ("num-steps", "eagle-topk", "num-draft-tokens")
        )
        assert topk > 1 or tokens == steps + 1
        assert steps >= 1
    if "--speculative-adaptive" in found:
        assert one(found, "--speculative-algorithm") in ("EAGLE", "EAGLE3", "NEXTN")
        assert plan.data_parallel == 1
        assert "--enable-dp-attention" not in found
        table = json.loads(made.files["adaptive.json"])
        keys = [int(key) for key in table]
        assert keys[0] == 1
        assert keys == sorted(set(keys))
        asked = {k for entry in table.values() for k in entry["candidate_steps"]}
        assert int(one(found, "--speculative-num-steps")) in asked
        assert all(len(entry["candidate_steps"]) == 1 for entry in table.values())
        graphs = next(value for name, value in found.items() if name.startswith("--cuda-graph-bs"))
        sizes = [int(size) for size in graphs]
        for below in keys[1:]:
            if below <= plan.max_batch:
                assert below - 1 in sizes  # a batch is padded up: no range reaches into the next
        path = tmp / "adaptive.json"
        path.write_text(made.files["adaptive.json"])
        _, (reading,) = ingest([str(path)], Given(), "x")
        assert "adaptive schedule" in reading.evidence[0]["value"]
    if "sps.json" in made.files:
        table = json.loads(made.files["sps.json"])
        assert table["sample_batch_tokens"] == sorted(set(table["sample_batch_tokens"]))
        assert all(rate > 0 for rate in table["sample_steps_per_sec"])


def check_vllm(plan, made, tmp):
    found = options(made.command)
    if "--speculative-config" in found:
        config = json.loads(one(found, "--speculative-config"))
        most = config["num_speculative_tokens"]
        assert most > 0
        assert "tensor_parallel_size" not in config
        if (table := config.get("num_speculative_tokens_per_batch_size")) is not None:
            assert plan.data_parallel == 1
            assert table[0][0] == 1
            for (_, last, k), (first, _, _) in pairwise(table):
                assert first == last + 1
                assert 0 <= k <= most
            assert all(first <= last for first, last, _ in table)
            assert max(k for _, _, k in table) == most
        for line in made.validation:
            pinned = json.loads(words(line)[1])
            rates = pinned["synthetic_acceptance_rates"]
            assert len(rates) == most
            assert rates == sorted(rates, reverse=True)
            assert all(0 <= rate <= 1 for rate in rates)
    if "--compilation-config" in found:
        sizes = json.loads(one(found, "--compilation-config"))["cudagraph_capture_sizes"]
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == max(made.capture_tokens)


def check_trtllm(plan, made, tmp):
    document, faults = parse(made.files["config.yaml"], "config.yaml")
    assert not faults
    sizes = document["cuda_graph_config"]["batch_sizes"]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == -(-plan.max_batch // plan.data_parallel)
    speculation = document.get("speculative_config")
    if speculation is not None:
        most = speculation["max_draft_len"]
        assert most > 0
        if speculation.get("use_dynamic_tree"):
            assert most <= speculation["max_total_draft_tokens"] <= most * speculation["dynamic_tree_max_topK"]
        if (table := speculation.get("draft_len_schedule")) is not None:
            assert list(table) == sorted(table)
            assert all(0 <= k <= most for k in table.values())
        if not speculation.get("use_dynamic_tree"):
            path = tmp / "config.yaml"
            path.write_text(made.files["config.yaml"])
            _, (reading,) = ingest([str(path)], Given(), "x")
            assert reading.shape.num_steps == most


def check_llamacpp(plan, made, tmp):
    found = options(made.command)
    old, new = "--draft-max" in found, "--spec-draft-n-max" in found
    assert not (old and new)
    assert (old or new) == (plan.num_steps > 0)
    assert one(found, "-np") == str(plan.max_batch)


CHECKS = {"sglang": check_sglang, "vllm": check_vllm, "trtllm": check_trtllm, "llamacpp": check_llamacpp}


@pytest.mark.parametrize("engine", CHECKS)
def test_what_is_written_keeps_the_rules_of_its_engine(engine, tmp_path_factory):
    tmp = tmp_path_factory.mktemp(engine)

    @settings(max_examples=120, deadline=None)
    @given(plan=plans(), version=st.sampled_from(VERSIONS[engine]))
    def check(plan, version):
        made = launch(plan, engine, version)
        assert made.assumed == (version is None)
        assert "s3cret" not in json.dumps(made.to_dict())
        assert all(note.isprintable() for note in made.notes)
        if made.command is None:
            assert made.notes
            assert not made.files
            return
        assert list(made.capture_sizes) == sorted(set(made.capture_sizes))
        assert len(made.capture_sizes) == len(made.capture_tokens)
        CHECKS[engine](plan, made, tmp)
        for name, text in made.files.items():
            assert name.isascii()
            assert "EOF" not in text.split("\n")

    check()
