"""Reading and writing calibrations: the ways in, the ways out, and what each of them promises."""

# ruff: noqa: E501  (tables: one row a line)

from __future__ import annotations

import datetime
import io as streams
import json
import os
import stat
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from specmodel import documents, io, yaml_text
from specmodel.calibration import SCHEMA, Calibration, CycleRow, Measurements
from specmodel.errors import CalibrationError
from specmodel.yaml_text import parse_yaml

MINIMAL = {"schema": SCHEMA, "name": "x", "measurements": {"cycles": [{"num_steps": 2, "tok_s": 300.5}]}}
MINIMAL_YAML = f"schema: {SCHEMA}\nname: x\nmeasurements:\n  cycles:\n    - {{num_steps: 2, tok_s: 300.5}}\n"


@pytest.fixture
def loaded() -> Calibration:
    return io.from_dict(MINIMAL)


def piped(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", streams.TextIOWrapper(streams.BytesIO(data)))


# the ways in


@pytest.mark.parametrize("text", [MINIMAL_YAML, json.dumps(MINIMAL), json.dumps(MINIMAL, indent=4)])
@pytest.mark.parametrize("name", ["calib.yaml", "calib.yml", "calib", "calib.txt"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
def test_language_is_seen_from_the_text(text: str, name: str, mark: bytes, tmp_path: Path, loaded: Calibration) -> None:
    path = tmp_path / name
    path.write_bytes(mark + text.encode())
    assert io.load(path) == io.load(str(path)) == loaded


def test_stdin(monkeypatch: pytest.MonkeyPatch, loaded: Calibration) -> None:
    piped(monkeypatch, MINIMAL_YAML.encode())
    assert io.load("-") == loaded
    piped(monkeypatch, json.dumps(MINIMAL).encode())
    assert io.load("-") == loaded
    piped(monkeypatch, b"name: x\n")
    with pytest.raises(CalibrationError, match=r"^<stdin>: schema: must be given"):
        io.load("-")


def test_yaml_flow_document_is_not_taken_for_json(loaded: Calibration) -> None:
    assert (
        io.loads(f"{{schema: {SCHEMA}, name: x, measurements: {{cycles: [{{num_steps: 2, tok_s: 300.5}}]}}}}") == loaded
    )
    assert (
        io.loads(f'{{"schema": {SCHEMA}, "name": x, measurements: {{cycles: [{{num_steps: 2, tok_s: 300.5}}]}}}}')
        == loaded
    )


def test_json_by_suffix_says_where_the_json_ends(tmp_path: Path) -> None:
    path = tmp_path / "calib.json"
    path.write_text(MINIMAL_YAML)
    with pytest.raises(
        CalibrationError, match=r"calib.json: must be JSON, got .* at line 1 column 1; .* name the file .yaml"
    ):
        io.load(path)


def test_dates_may_be_text_or_dates() -> None:
    day = datetime.date(2026, 2, 26)
    for value in (day, "2026-02-26"):
        assert io.from_dict({**MINIMAL, "provenance": {"date": value}}).provenance.date == day
    assert io.loads(MINIMAL_YAML + "provenance: {date: 2026-02-26}\n").provenance.date == day
    with pytest.raises(CalibrationError, match="YYYY-MM-DD"):
        io.from_dict({**MINIMAL, "provenance": {"date": datetime.datetime(2026, 2, 26, 10)}})


def test_from_dict_keeps_nothing_of_its_argument() -> None:
    env = {"NCCL_ALGO": "Ring"}
    document = {"schema": SCHEMA, "name": "x", "comm": {"ring": {"env": env}}}
    loaded = io.from_dict(document)
    env["NCCL_ALGO"] = "Tree"
    assert loaded.comm["ring"].env == {"NCCL_ALGO": "Ring"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[(text, text) for text in ("NO", "no", "on", "yes", "y", "1_000", "0b11", "1:30", "+", "-", ".", "1e", "e1", "2026-02-26")],
        *[(text, None) for text in ("", "~", "null", "Null", "NULL")],
        *[(text, True) for text in ("true", "True", "TRUE")],
        *[(text, 12) for text in ("12", "+12", "012", "0xc", "0o14")],
        *[(text, 0.001) for text in ("1e-3", "1E-3", "0.001", ".001", "+.001", "1.e-3")],
        *[(text, 3.2e6) for text in ("3.2e6", "3.2e+6", "3200000.0")],
        *[(text, float("inf")) for text in (".inf", "+.Inf", ".INF", "1e999")],
        ("-.inf", float("-inf")),
    ],
)  # fmt: skip
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    assert yaml_text.plain_scalar(text) == value
    assert type(yaml_text.plain_scalar(text)) is type(value)


def test_nan_is_read_as_what_it_is() -> None:
    assert str(yaml_text.plain_scalar(".NaN")) == "nan"


def test_aliases_are_values() -> None:
    text = f"schema: {SCHEMA}\nname: x\ncomm: {{a: &env {{env: {{A: B}}}}, b: *env}}\n"
    comm = io.loads(text).comm
    assert comm["a"] == comm["b"]


def test_read_document_reads_any_document(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- {a: 1e-3, b: [NO, ~]}\n- text\n")
    (tmp_path / "b.json").write_text('[{"a": 1e-3, "b": ["NO", null]}, "text"]')
    assert (
        io.read_document(tmp_path / "a.yaml")
        == io.read_document(tmp_path / "b.json")
        == [{"a": 0.001, "b": ["NO", None]}, "text"]
    )
    (tmp_path / "c.yaml").write_text("a: {b: 1, b: 2}\n")
    with pytest.raises(CalibrationError, match=r"c.yaml: a.b: must be stated once, got it again on line 1"):
        io.read_document(tmp_path / "c.yaml")


# what cannot be read


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        CalibrationError, match=r"none.yaml: must be an existing file, got no such file; check the path"
    ):
        io.load(tmp_path / "none.yaml")


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"must be a file, got a directory; name a file in it"):
        io.load(tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "file/under/file"])
def test_name_that_is_no_path(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CalibrationError, match="check the path"):
        io.load(os.fspath(tmp_path) + "/" + name)


@pytest.mark.parametrize("data", [MINIMAL_YAML.encode("utf-16"), b"name: \xe9t\xe9\n", b"\x80\x81", b"\xff\xfe"])
def test_not_utf_8(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "calib.yaml").write_bytes(data)
    with pytest.raises(CalibrationError, match=r"must be UTF-8 text, got byte 0x.. at offset \d+; save it as UTF-8"):
        io.load(tmp_path / "calib.yaml")


def test_too_large(tmp_path: Path) -> None:
    (tmp_path / "calib.yaml").write_bytes(b"#" * 2000)
    with pytest.raises(CalibrationError, match=r"must be at most 0.00095\S* MiB, got more"):
        io.read_document(tmp_path / "calib.yaml", max_bytes=1000)


# large files


def test_yaml_above_a_megabyte_is_read_in_c_and_said_to_be_slow(capsys: pytest.CaptureFixture[str]) -> None:
    from ruamel.yaml.main import CParser

    rows = "".join(f"    - {{num_steps: {i % 11}, tok_s: {i + 0.5}, note: {'x' * 90}}}\n" for i in range(9000))
    text = f"schema: {SCHEMA}\nname: x\nmeasurements:\n  cycles:\n{rows}"
    assert len(text) > 2**20
    assert len(io.loads(text, source="big.yaml").measurements.cycles) == 9000
    assert (
        capsys.readouterr().err
        == f"specmodel: big.yaml: {len(text) / 2**20:.1f} MiB of YAML; as JSON it would be read faster\n"
    )
    assert YAML(typ="safe").Parser is CParser
    assert CParser is not None
    with pytest.raises(CalibrationError, match="stated once"):
        io.loads(text + "name: y\n")


def test_nothing_is_said_of_a_small_file(capsys: pytest.CaptureFixture[str]) -> None:
    io.loads(MINIMAL_YAML)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("document", [MINIMAL_YAML, io.example()], ids=["minimal", "example"])
def test_the_parser_in_python_gives_the_same(document: str, monkeypatch: pytest.MonkeyPatch) -> None:
    in_c = io.loads(document)
    monkeypatch.setattr("ruamel.yaml.main.CParser", None)
    assert io.loads(document) == in_c


@pytest.mark.parametrize("parser", ["C", "Python"])
def test_a_colon_within_text_needs_no_quotes_in_brackets(
    parser: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YAML 1.2 allows it, and so does every grid that is written a line a value; libyaml does not."""
    if parser == "Python":
        monkeypatch.setattr("ruamel.yaml.main.CParser", None)
    (tmp_path / "a.yaml").write_text("a: [closed:1, closed:20]\nb: [64, lognormal:64:0.5, [x, fixed:2]]\nc: closed:4\n")
    assert io.read_document(tmp_path / "a.yaml") == {
        "a": ["closed:1", "closed:20"],
        "b": [64, "lognormal:64:0.5", ["x", "fixed:2"]],
        "c": "closed:4",
    }
    (tmp_path / "a.yaml").write_text("a: [closed:1, {b: 2]\n")
    with pytest.raises(CalibrationError, match=r"a.yaml: must be YAML, got .* at line 1 column 20"):
        io.read_document(tmp_path / "a.yaml")


# the ways out


def test_to_dict_omits_what_is_absent_or_default(loaded: Calibration) -> None:
    assert io.to_dict(loaded) == MINIMAL
    assert io.from_dict(io.to_dict(loaded)) == loaded


def test_rows_are_one_line_each() -> None:
    text = io.dumps(io.loads(io.example()))
    assert "    - {num_steps: 3, acceptance_length: 2.39, tok_s: 352}\n" in text
    assert "  date: 2026-02-26\n" in text
    assert '  engine_version: "0.5.9"\n' in text
    as_json = io.dumps(io.loads(io.example()), "json")
    assert '      {"num_steps": 3, "acceptance_length": 2.39, "tok_s": 352},\n' in as_json


@pytest.mark.parametrize("text", ["NO", "on", "null", "", " x", "x ", "1e-3", "0x1F", ".5", "2026-02-26", "a: b", "a #b", "- a", "{a}", "a\nb", "é", "\u2028", "😀", "\x7f", "'", '"', "\\", "*a", "&a", "!a", "%a", "@a", "`a", "?", ":", "-", "a,b", "[", "=", "<<"])  # fmt: skip
@pytest.mark.parametrize("language", ["yaml", "json"])
def test_any_text_survives(text: str, language: str) -> None:
    document = {"schema": SCHEMA, "name": "x", "comm": {"a": {"env": {"KEY": text}}}}
    written = io.dumps(io.from_dict(document), language)  # type: ignore[arg-type]
    assert io.to_dict(io.loads(written)) == document
    other = json.loads(written) if language == "json" else YAML(typ="safe", pure=True).load(written)
    assert other == document  # another reader agrees


@pytest.mark.parametrize(
    "text", ["[closed:1, b:2]", "{a: b:c, d: 1}", "[http://x/y]", "[a:1, [b:2:3]]", "[a:]", "{b:c}"]
)
def test_a_colon_within_a_word_is_text_with_either_parser(text: str) -> None:
    """The parser in C refuses some of these in brackets, where YAML 1.2 has them."""
    found, duplicates = parse_yaml(f"key: {text}", "x.yaml")
    assert (found, duplicates) == (YAML(typ="safe", pure=True).load(f"key: {text}"), [])


def test_suffix_decides_the_language(tmp_path: Path, loaded: Calibration) -> None:
    io.dump(loaded, tmp_path / "a.json")
    io.dump(loaded, tmp_path / "a.yaml")
    assert json.loads((tmp_path / "a.json").read_text()) == MINIMAL
    assert (tmp_path / "a.yaml").read_text() == MINIMAL_YAML
    assert io.load(tmp_path / "a.json") == io.load(tmp_path / "a.yaml") == loaded


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("before")
    wrong = Calibration(schema=SCHEMA, name="x", measurements=Measurements(cycles=(CycleRow(num_steps=1, tok_s=-1.0),)))
    with pytest.raises(CalibrationError, match=r"measurements.cycles\[0\].tok_s: must be > 0"):
        io.dump(wrong, path)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.yaml"]


def test_a_failed_write_leaves_the_file_and_no_remains(
    tmp_path: Path, loaded: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("before")

    def full(self: Path, *_: object, **__: object) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        io.dump(loaded, path)
    monkeypatch.undo()
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["a.yaml"]


def test_a_written_file_has_usual_permissions_and_a_link_stays_one(tmp_path: Path, loaded: Calibration) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "a.yaml")
    before = os.umask(0o022)
    try:
        io.dump(loaded, tmp_path / "link.yaml")
    finally:
        os.umask(before)
    assert (tmp_path / "link.yaml").is_symlink()
    assert stat.S_IMODE((tmp_path / "a.yaml").stat().st_mode) == 0o644


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    documents.write_text(pipe, "é\n")
    assert os.read(reader, 99) == "é\n".encode()
    os.close(reader)
    assert pipe.is_fifo()


def test_write_text_is_whole(tmp_path: Path) -> None:
    documents.write_text(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
