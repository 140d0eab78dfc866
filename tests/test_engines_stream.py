"""Sources: compressed or not, from a pipe, cut anywhere, with long lines, in bounded memory."""

import bz2
import gzip
import io
import json
import lzma
import os
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from specmodel import io as files
from specmodel.engines import ingest as engines_ingest
from specmodel.engines import stream
from specmodel.engines.ingest import ingest
from specmodel.engines.reading import Given
from specmodel.errors import CalibrationError

DATA = Path(__file__).parent / "data" / "engines"
LOG = (DATA / "sglang_v0518_eagle3_tp8_clean.log").read_bytes()


def rows(path):
    calibration, _ = ingest([str(path)], Given(), "x")
    return files.to_dict(calibration)["measurements"]["cycles"]


def numbers(path):
    return [{key: value for key, value in row.items() if key != "note"} for row in rows(path)]


@pytest.fixture
def plain():
    return numbers(DATA / "sglang_v0518_eagle3_tp8_clean.log")


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress, bz2.compress], ids=["gz", "xz", "bz2"])
def test_compressed_files_are_told_by_content_not_by_name(compress, plain, tmp_path):
    path = tmp_path / "log.txt"
    path.write_bytes(compress(LOG))
    assert numbers(path) == plain


def test_a_pipe(plain, monkeypatch):
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(gzip.compress(LOG)))

    monkeypatch.setattr(sys, "stdin", Stdin)
    assert numbers("-") == plain


def test_zstd_without_a_reader_names_the_way_out(tmp_path, monkeypatch):
    path = tmp_path / "log.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 64)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "compression.zstd", None)
    with pytest.raises(CalibrationError, match="zstd -dc"):
        numbers(path)


@pytest.mark.parametrize("cut", [0.6, 0.8, 0.95])
def test_a_cut_compressed_stream_is_used_as_far_as_it_goes(cut, tmp_path):
    data = gzip.compress(LOG * 30)
    path = tmp_path / "cut.gz"
    path.write_bytes(data[: int(cut * len(data))])
    calibration, _ = ingest([str(path)], Given(), "x")
    assert calibration.measurements.cycles
    assert any("ends early" in caveat for caveat in calibration.provenance.caveats)


@pytest.mark.parametrize(
    "content", [b"", b"\n \n", b"hello\n", b"\x00\x01\x02" * 99, b'{"a": 1}', b"[1, 2", b"\x1f\x8b\x08broken"]
)
def test_what_is_no_engines_output_is_refused_in_words(content, tmp_path):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"^x: must be") as caught:
        ingest([str(path)], Given(), "x")
    assert len(str(caught.value)) < 700


def test_a_directory_and_a_missing_file_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "none.log"):
        with pytest.raises(CalibrationError, match="must be"):
            ingest([str(path)], Given(), "x")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_a_device_is_refused_unread(device, tmp_path):
    link = tmp_path / "server.log"
    link.symlink_to(device)
    for path in (device, str(link)):
        for read in (lambda path: ingest([path], Given(), "x"), files.load):
            with pytest.raises(CalibrationError, match=r"must be a file, got a device; .* pipe the text in"):
                read(path)


def test_a_pipe_is_read_as_a_file(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    text = "schema: specmodel.calibration/1\nname: piped\n"
    writer = threading.Thread(target=path.write_text, args=(text,))
    writer.start()
    assert files.load(path).name == "piped"
    writer.join()


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_blocks_cut_anywhere_give_the_same(size, plain, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", size)
    monkeypatch.setattr(stream, "HEAD_BYTES", 3000)
    assert numbers(DATA / "sglang_v0518_eagle3_tp8_clean.log") == plain


def test_memory_is_bounded_by_blocks_not_by_the_log(tmp_path):
    path = tmp_path / "long.log"
    with path.open("wb") as log:
        for _ in range(500):
            log.write(LOG)
    numbers(DATA / "sglang_v0518_eagle3_tp8_clean.log")  # what is imported and compiled once
    tracemalloc.start()
    numbers(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 7e6
    assert peak < 3e6


def test_a_line_without_an_end_does_not_fill_memory(tmp_path):
    path = tmp_path / "line.log"
    path.write_bytes(LOG + b"x" * 8_000_000 + LOG.replace(b"\n", b" ")[:200_000])
    tracemalloc.start()
    calibration, _ = ingest([str(path)], Given(), "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert calibration.measurements.cycles
    assert peak < 12e6


def items(text, key=None):
    rest = io.BytesIO(text[50:])
    source = stream.Source("x", text[:50], rest, rest)
    return list(stream.json_items(source, key)), source.warnings


@pytest.mark.parametrize("block", [1, 16, 4096])
def test_json_comes_item_by_item_whatever_its_frame(block, monkeypatch):
    monkeypatch.setattr(stream, "BLOCK_BYTES", block)
    values = [{"a": i, "b": "ü" * i, "c": [i, {"d": None}]} for i in range(40)]
    for text in (
        json.dumps(values),
        json.dumps(values, indent=1),
        "\n".join(map(json.dumps, values)),
        "\n".join(map(json.dumps, values)) + "\n",
    ):
        assert items(text.encode())[0] == values
    framed = json.dumps({"first": {"events": 1}, "events": values, "last": [1]})
    assert items(framed.encode(), b"events")[0] == values
    assert items(json.dumps(values[5]).encode())[0] == [values[5]]


def test_json_that_is_cut_gives_what_came_before_and_says_so():
    values = [{"a": i} for i in range(40)]
    text = json.dumps(values).encode()
    for cut in range(200, len(text) - 2, 7):
        got, warnings = items(text[:cut])
        assert got == values[: len(got)]
        assert len(got) >= text[:cut].count(b"}") - 1
        assert warnings or text[:cut].rstrip(b", ").endswith(b"}")


def test_json_that_is_broken_or_too_deep_is_refused():
    with pytest.raises(CalibrationError, match="JSON"):
        items(b'[{"a": 1}, {"a" 2}, {"a": 3}, {"a": 4}, {"a": 5}, {"a": 6}, {"a": 7}]')
    with pytest.raises(CalibrationError, match="depth"):
        items(b"[" * 200_000)


def test_a_log_that_is_nccls_alone_for_long_is_searched_for_nothing_else_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(engines_ingest, "NCCL_ALONE_BLOCKS", 2)
    lines = (DATA / "nccl_debug_info.log").read_bytes() * 200
    log = tmp_path / "x.log"
    log.write_bytes(lines + LOG)
    calibration, _ = ingest([str(log)], Given(), "x")
    assert not calibration.measurements.cycles
    assert any("only NCCL's are read" in caveat for caveat in calibration.provenance.caveats)
    log.write_bytes(LOG + lines)
    calibration, _ = ingest([str(log)], Given(), "x")
    assert calibration.measurements.cycles
    assert not any("only NCCL's" in caveat for caveat in calibration.provenance.caveats)
