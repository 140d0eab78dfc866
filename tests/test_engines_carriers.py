"""What stands around and between the lines of an engine changes no number: carriers, encodings, noise, damage.

Every sample is dressed in every way and read again: each quantity is the one that the plain sample has, or is left out.
"""

import bz2
import csv
import functools
import gzip
import io
import json
import lzma
import re
from pathlib import Path

import pytest

from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given, Shape
from specmodel.errors import CalibrationError
from specmodel.io import to_dict

DATA = Path(__file__).parent / "data" / "engines"
TEXTS = (
    *(path.name for path in sorted(DATA.glob("*.log"))),
    "llamacpp_speculative_simple.txt",
    "vllm_spec_decode_offline.txt",
    "nccl_all_reduce_2gpu.txt",
    "nccl_all_reduce_8gpu.txt",
)
DOCUMENTS = tuple(path.name for path in sorted(DATA.glob("*.json*")) if path.name != "expected.json")
SCRAPES = tuple(path.name for path in sorted(DATA.glob("*.prom")))


def facts(calibration):
    """Every row without its note, every fact, what is said of system and model."""
    document = to_dict(calibration)
    rows = {
        (table, tuple(sorted((k, v) for k, v in row.items() if k != "note")))
        for table, listed in document.get("measurements", {}).items()
        for row in listed
    }
    rows |= {
        ("acceptance", tuple((k, str(row[k])) for k in sorted(row) if k != "note"))
        for row in document.get("acceptance", ())
    }
    rows |= {(row["about"], str(row["value"]), row.get("ranks")) for row in document.get("evidence", ())}
    for part in ("system", "model"):
        rows |= {(part, key, str(value)) for key, value in document.get(part, {}).items()}
    return rows


def read(path, **given):
    try:
        return facts(ingest([str(path)], Given(**given), "x")[0])
    except CalibrationError as error:
        return str(error)


@functools.cache
def plain(name):
    return read(DATA / name)


def each_line(dress):
    """Dress every line of a text; a last line without an end stays without one."""

    def all_lines(text):
        *lines, last = text.split(b"\n")
        return b"".join(dress(line) + b"\n" for line in lines) + (dress(last) if last else b"")

    return all_lines


def before(prefix):
    return each_line(lambda line: prefix + line)


def after(suffix):
    return each_line(lambda line: line + suffix)


def records(key, **more):
    """JSON records, one a line; Docker keeps the line's end in its text."""

    def wrap(text):
        lines = re.findall(rb"[^\n]*\n|[^\n]+$", text)
        texts = (line.decode("utf-8", "replace") for line in lines)
        return b"".join(
            json.dumps({**more, key: line if key == "log" else line.rstrip("\n")}).encode() + b"\n" for line in texts
        )

    return wrap


def docker(text):
    """Records as Docker writes them, the text first and no blanks; what it escapes, it escapes as Go does."""
    lines = (line.decode("utf-8", "replace") for line in re.findall(rb"[^\n]*\n|[^\n]+$", text))
    records = ({"log": line, "stream": "stderr", "time": "2026-08-19T09:14:02.123456789Z"} for line in lines)
    return b"".join(json.dumps(one, separators=(",", ":"), ensure_ascii=False).encode() + b"\n" for one in records)


def long_record(text):
    """Docker's records of limited length: a longer line comes in several, all but the last without an end."""
    out = []
    for line in re.findall(rb"[^\n]*\n|[^\n]+$", text):
        for i in range(0, len(line), 997):
            piece = line[i : i + 997].decode("utf-8", "replace")
            out.append(json.dumps({"log": piece, "stream": "stderr"}).encode() + b"\n")
    return b"".join(out)


def comma_separated(text):
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(["time", "line"])
    writer.writerows(["2026-01-01T00:00:00Z", line.decode("utf-8", "replace")] for line in text.split(b"\n") if line)
    return table.getvalue().encode()


def utf16(encoding, mark=b""):
    return lambda text: mark + text.decode("utf-8", "replace").encode(encoding)


ACCESS = b'\n[2026-08-19 09:15:57] INFO:     10.0.0.6:50294 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
CARRIERS = {
    "line ends of Windows": lambda text: text.replace(b"\n", b"\r\n"),
    "UTF-16 of PowerShell": utf16("utf-16-le", b"\xff\xfe"),
    "UTF-16, big end first": utf16("utf-16-be", b"\xfe\xff"),
    "UTF-16 without a mark": utf16("utf-16-le"),
    "a byte-order mark": lambda text: b"\xef\xbb\xbf" + text,
    "milliseconds": lambda text: re.sub(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)", rb"[\1.123", text),
    "stamps of ISO 8601": lambda text: re.sub(rb"\[(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d)", rb"[\1T\2", text),
    "compose": before(b"engine-1  | "),
    "compose in colour": before(b"\x1b[36mengine-1  | \x1b[0m"),
    "containerd": before(b"2026-08-19T09:14:02.123456789Z stderr F "),
    "kubectl logs --prefix": before(b"[pod/engine-0/engine] "),
    "journald": before(b"Aug 19 09:14:02 somewhere python3[4242]: "),
    "Ray": before(b"(Actor pid=4242, ip=10.0.0.3) "),
    "mpirun": before(b"[1,0]<stdout>:"),
    "torchrun": before(b"[rank0]: "),
    "srun --label": before(b"  12: "),
    "Python's logging": before(b"INFO:engine.srt.worker:"),
    "another logger": before(b"2026-08-19 09:14:02,123 - INFO - "),
    "Actions": before(b"2026-08-19T09:14:02.1234567Z "),
    "a quotation": before(b"> "),
    "a patch": before(b"+"),
    "Docker's records": docker,
    "Docker's records, keys in another order": records("log", stream="stderr", time="2026-08-19T09:14:02.123456789Z"),
    "Docker's records, long lines in pieces": long_record,
    "a structured logger": records("message", level="INFO", timestamp="2026-08-19T09:14:02Z"),
    "journalctl -o json": records("MESSAGE", _HOSTNAME="somewhere", PRIORITY="6"),
    "a structured logger in a container": lambda text: records("log")(records("msg", level="info")(text)),
    "comma-separated": comma_separated,
    "colour": each_line(lambda line: b"\x1b[32m" + line + b"\x1b[0m"),
    "cursor movements": each_line(lambda line: b"\x1b[2K\x1b[1G" + line + b"\x1b[K"),
    "numbers in colour": lambda text: re.sub(
        rb"(?<=[ =])\d+\.\d+", lambda found: b"\x1b[1m" + found[0] + b"\x1b[0m", text
    ),
    "blanks at the end": after(b"   \t"),
    "blanks at the start": before(b"\t  "),
    "bytes that are no text": after(b"\n\xff\xfe\x00\x01garbage \x80\x81"),
    "zero bytes": after(b"\n\x00\x00\x00"),
    "Latin-1": after(b"\ncaf\xe9 na\xefve"),
    "empty lines": after(b"\n\n"),
    "long lines between": after(b"\n" + b"x" * 5000),
    "progress bars": before(b"  5%|#    | 3/64 [00:01<00:20,  3.0it/s]\r"),
    "requests between": after(ACCESS),
    "a shell's prompt": lambda text: b"$ tail -f engine.log\n" + text,
    "a fence": lambda text: b"```\n" + text + b"\n```\n",
    "the level after the rank": lambda text: re.sub(rb"(TP\d+)\]", rb"\1] INFO", text),
}
LOST = {"comma-separated": 1}
"""Facts that a carrier may cost: a quote ends what a line states last."""


@pytest.mark.parametrize("name", TEXTS)
def test_carriers_of_a_text_change_nothing(name, tmp_path):
    path, text, wrong = tmp_path / name, (DATA / name).read_bytes(), []
    for carrier, dress in CARRIERS.items():
        path.write_bytes(dress(text))
        found = read(path)
        if isinstance(found, str):
            wrong.append((carrier, found[:200]))
        elif found - plain(name) or len(plain(name) - found) > LOST.get(carrier, 0):
            wrong.append((carrier, sorted(map(str, found ^ plain(name)))[:4]))
    assert not wrong


DAMAGE = {
    "the start is missing": lambda text: text[37:],
    "the end is missing": lambda text: text[:-25],
    "every line cut at 400": each_line(lambda line: line[:400]),
    "every line cut at 90": each_line(lambda line: line[:90]),
    "no stamps": lambda text: re.sub(rb"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] ", b"", text),
    "HTML": lambda text: text.replace(b"&", b"&amp;").replace(b"<", b"&lt;").replace(b">", b"&gt;"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_damage_leaves_is_right_or_left_out(name, damage, tmp_path):
    path = tmp_path / name
    path.write_bytes(DAMAGE[damage]((DATA / name).read_bytes()))
    found = read(path)
    if isinstance(found, str):
        return
    for fact in found - plain(name):
        # What is new is a known row with fewer columns, or as many ranks as are told.
        near = [known for known in plain(name) if known[0] == fact[0]]
        if isinstance(fact[1], tuple):
            rounds = [{pair for pair in known[1] if pair[0] in ("num_steps", "drafts")} for known in near]
            same = fact[0] == "acceptance" and any(counts <= set(fact[1]) for counts in rounds)
            assert same or any(set(fact[1]) <= set(known[1]) for known in near), fact
        else:
            assert any(known[1].startswith(fact[1]) and fact[2] in (None, known[2]) for known in near), fact


def documents(text):
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def turned(value):
    if isinstance(value, dict):
        return {key: turned(item) for key, item in reversed(value.items())}
    return [turned(item) for item in value] if isinstance(value, list) else value


def enriched(value):
    if isinstance(value, dict):
        return {"zz": {"a": [1, 2]}, **{key: enriched(item) for key, item in value.items()}, "zz_new": 3.5, "zy": None}
    return [enriched(item) for item in value] if isinstance(value, list) else value


def as_records(text):
    return [item for one in documents(text) for item in (one if isinstance(one, list) else [one])]


DRESSES = {
    "compact": lambda text: "\n".join(json.dumps(one, separators=(",", ":")) for one in documents(text)),
    "indented": lambda text: "\n".join(json.dumps(one, indent=4) for one in documents(text)),
    "keys in another order": lambda text: "\n".join(json.dumps(turned(one)) for one in documents(text)),
    "keys that nobody knows": lambda text: "\n".join(json.dumps(enriched(one)) for one in documents(text)),
    "a list": lambda text: json.dumps(as_records(text)),
    "one after the other": lambda text: "".join(json.dumps(one) for one in as_records(text)),
    "one a line": lambda text: "\n".join(json.dumps(one) for one in as_records(text)),
    "a byte-order mark": lambda text: "\ufeff" + text,
    "line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    "UTF-16": lambda text: text.encode("utf-16"),
    "blank lines before": lambda text: "\n\n  \n" + text,
    "headers of the reply": lambda text: "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + text,
    "a shell around": lambda text: "$ curl localhost:30000/x\n" + text + "\nbash-5.2$ exit\n",
    "a fence": lambda text: "```json\n" + text + "\n```\n",
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_dresses_of_a_document_change_nothing(name, tmp_path):
    path, text, wrong = tmp_path / name, (DATA / name).read_text(), []
    for dress, make in DRESSES.items():
        made = make(text)
        path.write_bytes(made if isinstance(made, bytes) else made.encode())
        found = read(path)
        if found != plain(name):
            wrong.append((dress, found if isinstance(found, str) else sorted(map(str, found ^ plain(name)))[:3]))
    assert not wrong


SERIES = {
    "no comments": lambda text: "\n".join(line for line in text.splitlines() if not line.startswith("#")),
    "stamps": lambda text: re.sub(r"(?m)^([^#\n].*)$", r"\1 1755594842123", text),
    "stamps of OpenMetrics": lambda text: re.sub(r"(?m)^([^#\n].*)$", r"\1 1755594842.123", text) + "# EOF\n",
    "another order": lambda text: "\n".join(sorted(text.splitlines())),
    "exponents": lambda text: re.sub(r"(?m) (\d+\.\d+)$", lambda m: f" {float(m[1]):.9e}", text),
    "series of others": lambda text: "go_goroutines 3\nprocess_start_time_seconds 1.7e9\n" + text,
    "more labels": lambda text: text.replace("{", '{pod="a-b",namespace="x y",'),
    "times of creation": lambda text: (
        text
        + "".join(
            re.sub("_total", "_created", line) + "\n"
            for line in text.splitlines()
            if "_total" in line and not line.startswith("#")
        )
    ),
    "headers of the reply": DRESSES["headers of the reply"],
    "UTF-16": DRESSES["UTF-16"],
}


@pytest.mark.parametrize("name", SCRAPES)
@pytest.mark.parametrize("dress", SERIES)
def test_dresses_of_a_scrape_change_nothing(name, dress, tmp_path):
    made = SERIES[dress]((DATA / name).read_text())
    path = tmp_path / name
    path.write_bytes(made if isinstance(made, bytes) else made.encode())
    assert read(path) == plain(name)


@pytest.mark.parametrize(
    ("ending", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_compressed_records_of_a_container(ending, compress, tmp_path):
    name = TEXTS[-3]
    path = tmp_path / (name + ending)
    path.write_bytes(compress(CARRIERS["Docker's records"]((DATA / name).read_bytes())))
    assert read(path) == plain(name)


def without(name, *keys):
    """The sample's documents without a key, wherever it stands."""

    def prune(value):
        if isinstance(value, dict):
            return {key: prune(item) for key, item in value.items() if key not in keys}
        return [prune(item) for item in value] if isinstance(value, list) else value

    return "\n".join(json.dumps(prune(one)) for one in documents((DATA / name).read_text()))


MISSING = [
    ("llamacpp_timings.json", "draft_n_accepted", "counts of drafts are incomplete"),
    ("sglang_bench_one_batch_server.jsonl", "acc_length", "no acc_length"),
    ("sglang_v0518_server_info.json", "speculative_algorithm", "was it speculating"),
    ("trtllm_metrics.json", "specDecodingStats", "no record tells whether it speculated"),
    ("sglang_bench_serving.jsonl", "accept_length", "no accept_length though the server speculates"),
]


@pytest.mark.parametrize(("name", "key", "why"), MISSING)
def test_speculation_that_is_not_told_is_no_plain_decoding(name, key, why, tmp_path):
    path = tmp_path / name
    path.write_text(without(name, key))
    found = read(path)
    if isinstance(found, str):
        assert why in found
        return
    assert not any(fact[0] == "cycles" for fact in found)
    _, (reading,) = ingest([str(path)], Given(), "x")
    assert why in " ".join([*reading.questions, *reading.dropped])


def test_a_report_without_decoding_stats_is_plain_only_where_its_version_would_have_them(tmp_path):
    path = tmp_path / "report.json"
    path.write_text(without("trtllm_bench_report.json", "decoding_stats"))
    calibration, (reading,) = ingest([str(path)], Given(), "x")
    assert calibration.measurements.cycles[0].num_steps == 0
    assert any("taken for plain decoding" in caveat for caveat in reading.caveats)
    path.write_text(without("trtllm_bench_report.json", "decoding_stats", "version"))
    assert "no decoding_stats: say --num-steps" in read(path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('"average": 304.9', '"average": 3.049', "tokens a cycle, the mean over requests"),
        ('"avg_ptpot_ms": 4.376', '"avg_ptpot_ms": 0.004376', "do not belong together"),
        ('"avg_num_concurrent_requests": 7.91', '"avg_num_concurrent_requests": 791', "do not belong together"),
    ],
)
def test_a_report_whose_numbers_do_not_belong_together_is_left_out(old, new, why, tmp_path):
    text = (DATA / "trtllm_bench_report.json").read_text()
    assert old in text
    path = tmp_path / "report.json"
    path.write_text(text.replace(old, new))
    assert why in read(path)


def test_a_line_without_accept_len_of_a_server_that_speculates_is_no_plain_decoding(tmp_path):
    name = "sglang_v0518_eagle3_tp8_clean.log"
    text = (DATA / name).read_text()
    path = tmp_path / "x.log"
    path.write_text(re.sub(r"accept len: [\d.]+, accept rate: [\d.]+, ", "", text))
    assert not any(fact[0] in ("cycles", "acceptance") for fact in read(path))
    # Without the arguments: some lines have it, some have not.
    lines = text.splitlines(keepends=True)
    half = [
        re.sub(r"accept len: [\d.]+, accept rate: [\d.]+, ", "", line) if i % 2 else line
        for i, line in enumerate(lines)
    ]
    path.write_text("".join(line for line in half if "server_args" not in line))
    found = read(path, shape=Shape(num_steps=3))
    assert all(dict(fact[1]).get("num_steps") == 3 for fact in found if fact[0] == "cycles")


def test_arguments_that_are_cut_say_nothing_of_speculation(tmp_path):
    name = "sglang_v0518_eagle3_tp8_clean.log"
    path = tmp_path / "x.log"
    text = (DATA / name).read_text()
    path.write_text(re.sub(r", enable_nccl_nvls=.*", "", text, count=1))
    assert ("model", "method", "none") not in read(path)
    cycles = {fact for fact in plain(name) if fact[0] == "cycles"}
    assert cycles <= read(path, shape=Shape(num_steps=3))


def test_sizes_that_cannot_be_read_are_not_one(tmp_path):
    text = (DATA / "sglang_v0518_server_info.json").read_text()
    path = tmp_path / "info.json"
    path.write_text(text.replace('"tp_size": 8', '"tp_size": "8"'))
    assert ("system", "tensor_parallel", "8") in read(path)
    path.write_text(text.replace('"tp_size": 8', '"tp_size": 0.08'))
    assert not any(fact[:2] == ("system", "tensor_parallel") for fact in read(path))


def test_a_list_of_positions_that_is_cut_makes_no_shorter_chain(tmp_path):
    text = (DATA / "vllm_spec_decode_offline.txt").read_text()
    path = tmp_path / "x.txt"
    path.write_text(text[: text.index("acceptance at token 2")])
    (entry,) = [dict(fact[1]) for fact in read(path) if fact[0] == "acceptance"]
    assert (entry["num_steps"], entry["acceptance_length"]) == ("3", "2.584229")
    path.write_text(re.sub("num_draft_tokens.*\n", "", text[: text.index("acceptance at token 2")]))
    assert "is the list cut" in read(path)


def test_workers_are_told_apart_by_rank_before_process(tmp_path):
    name = "vllm_v1_eagle3.log"
    path = tmp_path / "x.log"
    path.write_bytes(CARRIERS["Ray"]((DATA / name).read_bytes()))
    assert ("target_cuda_graph", "True", 8) in read(path)


SCRAPE = (DATA / "sglang_v0518_metrics.prom").read_text()
TABLE = (DATA / "nccl_all_reduce_8gpu.txt").read_text()
SERVER = (DATA / "sglang_v0518_eagle3_tp8_clean.log").read_text()


@pytest.mark.parametrize("prefix", ["", "sglang-1  | "])
@pytest.mark.parametrize("place", ["before", "within", "after"])
@pytest.mark.parametrize("pasted", [SCRAPE, TABLE, SCRAPE + TABLE], ids=["scrape", "table", "both"])
def test_a_scrape_or_a_link_test_pasted_into_a_log_is_read_beside_it(pasted, place, prefix, tmp_path):
    lines = SERVER.splitlines(keepends=True)
    at = {"before": 0, "within": 60, "after": len(lines)}[place]
    text = "".join(prefix + line for line in [*lines[:at], *pasted.splitlines(keepends=True), *lines[at:]])
    both, apart = tmp_path / "both.log", []
    both.write_text(text)
    for i, part in enumerate((SERVER, *(p for p in (SCRAPE, TABLE) if p in pasted))):
        apart.append(tmp_path / f"{i}.txt")
        apart[-1].write_text(part)

    def numbers(*paths):
        found = to_dict(ingest([str(path) for path in paths], Given(), "x")[0])["measurements"]
        return {
            table: sorted(str({k: v for k, v in row.items() if k != "note"}) for row in rows)
            for table, rows in found.items()
        }

    assert numbers(both) == numbers(*apart)


def test_two_pasted_scrapes_count_by_their_difference(tmp_path):
    later = re.sub(r"(?m)^(sglang:\S*_total\S*) (\S+)$", lambda m: f"{m[1]} {2 * float(m[2])}", SCRAPE)
    log = tmp_path / "server.log"
    log.write_text(SCRAPE + SERVER + later)
    _, readings = ingest([str(log)], Given(), "x")
    assert len(readings) == 2
    assert not any("one scrape" in caveat for caveat in readings[1].caveats)
