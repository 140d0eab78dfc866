"""The examples in README.md and docs/: found, run, compared, and written anew.

    python tests/docs_examples.py            check them all, as tests/test_docs.py does
    python tests/docs_examples.py --write    put what the commands print now into the pages

What a fenced block means by its language:

- ``console``: lines that start with ``$ `` are commands (``> `` continues one), the lines after them what they print; a
  line ``...`` stands for any lines. A command must succeed unless ``$ echo $?`` comes next.
- ``pycon``: a doctest; the blocks of one page share their names.
- ``yaml``: a calibration, or part of one; it must load. With ``:caption: NAME`` (a ``{code-block}``) the file NAME is
  there for the commands of the page.
- ``json``: must be JSON.
- ``sh``: needs a GPU, a server or minutes, so it is not run; it must be shell, and the arguments of each ``specmodel``
  command in it must be ones that the command takes.
- ``text``, ``ini``, ``dockerfile`` and ``math``: not run.

Printed numbers may differ by two percent or by one in their last digit, as they do from one linear algebra library to
another.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import importlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
LANGUAGES = {"console", "pycon", "yaml", "json", "sh"}
NOT_RUN = {"text", "ini", "dockerfile", "math"}
TIMEOUT_MS = 120_000
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
DRAWN = re.compile(r"[\u2190-\u21ff\u2500-\u28ff]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block of a page: its language, where its text starts, and its text."""

    language: str
    caption: str
    line: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command of a console block: the line of its prompt in the page, and the output that the page shows."""

    line: int
    code: str
    shown: tuple[str, ...]


def pages() -> list[Path]:
    """Every page that holds examples."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "_build" not in page.parts]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a page that say what language they are in, directives other than code-block left out."""
    lines = text.split("\n")
    i = 0
    while i < len(lines):
        opened = re.fullmatch(r"( *)(`{3,})(?:\{code-block\} *)?([A-Za-z+-]*|\{[a-z-]+\}.*)", lines[i])
        if opened is None:
            i += 1
            continue
        close = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == opened[2])
        start, caption = i + 1, ""
        while start < close and (option := re.fullmatch(r" *:([a-z-]+): *(.*)", lines[start])):
            caption = option[2] if option[1] == "caption" else caption
            start += 1
        start += start > i + 1 and not lines[start].strip()
        if not opened[3].startswith("{"):
            body = [line.removeprefix(opened[1]) for line in lines[start:close]]
            yield Block(language=opened[3], caption=caption, line=start, text="\n".join(body) + "\n")
        i = close + 1


def commands(block: Block) -> Iterator[Command]:
    """The commands of a console block."""
    lines = block.text.rstrip("\n").split("\n")
    starts = [i for i, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        body = start + 1
        while body < end and lines[body].startswith("> "):
            body += 1
        code = "\n".join(line[2:] for line in lines[start:body])
        yield Command(line=block.line + start, code=code, shown=tuple(lines[body:end]))


def same(shown: tuple[str, ...], printed: list[str]) -> bool:
    """Whether a page shows what was printed; ``...`` alone on a line stands for any lines."""
    if not shown:
        return not printed
    if shown[0].strip() == "...":
        return any(same(shown[1:], printed[i:]) for i in range(len(printed) + 1))
    return bool(printed) and same_line(shown[0], printed[0]) and same(shown[1:], printed[1:])


def same_line(shown: str, printed: str) -> bool:
    """Whether two lines are the same but for the last digits of numbers and the cells of a drawing."""
    (left, a), (right, b) = words(shown), words(printed)
    return left == right and all(near(x, y) for x, y in zip(a, b, strict=True))


def words(line: str) -> tuple[list[str], list[str]]:
    """The words of a line with its numbers left out, and the numbers."""
    text = DRAWN.sub(" ", line).replace("<1 %", "1 %")
    return NUMBER.sub("#", text).split(), NUMBER.findall(text)


def renewed(shown: tuple[str, ...], printed: list[str]) -> list[str]:
    """The lines that a page shows, cut where they are cut, as they are printed now; all lines if that fails."""
    lines: list[str] = []
    at = 0
    for cut, part in groupby(shown, key=lambda line: line.strip() == "..."):
        run = list(part)
        if cut:
            lines.append("...")
            continue
        first = most_alike(run[0], printed, at)
        at = most_alike(run[-1], printed, first) + 1
        lines += printed[first:at]
    return lines if same(tuple(lines), printed) else printed


def most_alike(line: str, printed: list[str], start: int) -> int:
    """Index from `start` on of the printed line that is most like a shown one, the first of equals."""
    wanted = words(line)[0]
    likeness = [SequenceMatcher(None, wanted, words(other)[0]).ratio() for other in printed[start:]]
    return start + likeness.index(max(likeness)) if likeness else start


def near(shown: str, printed: str) -> bool:
    """Whether two printed numbers agree within 2 % or one in the last digit."""
    digits = len(shown.partition("e")[0].partition(".")[2])
    a, b = float(shown), float(printed)
    return abs(a - b) <= max(0.02 * abs(a), 1.01 * 10.0**-digits)


def environment() -> dict[str, str]:
    """The environment of the commands: this Python's programs first, and nothing that colours or widens output."""
    keep = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "FORCE_COLOR", "PYTHONPATH")}
    path = os.pathsep.join([str(Path(sys.executable).parent), keep.get("PATH", "")])
    return keep | {"PATH": path, "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8", "MPLBACKEND": "agg", "LC_ALL": "C.UTF-8"}


class Page:
    """Runs the examples of one page in a folder of its own, in which `calibrations` and `docs` lie."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name
        self.text = path.read_text(encoding="utf-8")
        self.folder = folder
        self.status = 0
        self.faults: list[str] = []
        self.printed: dict[int, list[str]] = {}
        self.names: dict[str, object] = {}
        for name in ("calibrations", "docs"):
            (folder / name).symlink_to(ROOT / name)

    def run(self) -> None:
        """Run every block: faults go to `faults`, what commands print to `printed`, by the line of the prompt."""
        for block in blocks(self.text):
            if block.language in LANGUAGES:
                if block.caption:
                    (self.folder / block.caption).write_text(block.text, encoding="utf-8")
                getattr(self, block.language)(block)
            elif block.language not in NOT_RUN:
                self.fault(
                    block.line, f"a block in the language {block.language!r} is neither run nor known to need no run"
                )

    def fault(self, line: int, text: str) -> None:
        """Note what is wrong, with the place."""
        self.faults.append(f"{self.name}:{line}: {text}")

    def console(self, block: Block) -> None:
        """Run the commands of a console block and compare what they print."""
        listed = list(commands(block))
        for command, following in zip(listed, [*listed[1:], None], strict=True):
            done = subprocess.run(
                ["bash", "-c", f"(exit {self.status})\n{command.code}"],
                cwd=self.folder,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                timeout=TIMEOUT_MS / 1000,
                check=False,
            )
            self.status = done.returncode
            printed = [line.rstrip() for line in done.stdout.rstrip("\n").split("\n")] if done.stdout.strip() else []
            self.printed[command.line] = printed
            if self.status and not (following and following.code == "echo $?"):
                self.fault(command.line + 1, f"{command.code}\nended with {self.status} and printed\n{done.stdout}")
            elif not same(command.shown, printed):
                shown = "\n".join(command.shown)
                self.fault(command.line + 1, f"{command.code}\nprints\n{done.stdout}\nbut the page shows\n{shown}")

    def pycon(self, block: Block) -> None:
        """Run a doctest with the names of the page."""
        test = doctest.DocTestParser().get_doctest(block.text, self.names, self.name, self.name, block.line)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
        said: list[str] = []
        here = Path.cwd()
        os.chdir(self.folder)
        try:
            runner.run(test, out=said.append, clear_globs=False)
        finally:
            os.chdir(here)
        self.names = test.globs
        if runner.failures:
            self.fault(block.line + 1, "".join(said))

    def yaml(self, block: Block) -> None:
        """Load a calibration; a part of one is completed."""
        from specmodel import CalibrationError, loads

        text = block.text
        for key, value in (("schema", "specmodel.calibration/1"), ("name", "example")):
            if not re.search(rf"^{key}:", text, re.MULTILINE):
                text = f"{key}: {value}\n{text}"
        try:
            loads(text, self.name)
        except CalibrationError as error:
            self.fault(block.line + 1, str(error))

    def json(self, block: Block) -> None:
        """Parse a JSON document."""
        try:
            json.loads(block.text)
        except ValueError as error:
            self.fault(block.line + 1, str(error))

    def sh(self, block: Block) -> None:
        """Check that a block is shell, and that its commands of this package take the arguments that they are given."""
        done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, check=False)
        if done.returncode:
            self.fault(block.line + 1, done.stderr)
            return
        for command in own_commands(block.text):
            if (said := refused(command)) is not None:
                self.fault(block.line + 1, f"specmodel {shlex.join(command)}\n{said}")

    def rewritten(self) -> str:
        """The page with what its commands print now; an output that is cut with ``...`` stays cut."""
        lines = self.text.split("\n")
        for block in reversed(list(blocks(self.text))):
            if block.language != "console":
                continue
            for command in reversed(list(commands(block))):
                start = command.line + len(command.code.split("\n"))
                if not same(command.shown, self.printed[command.line]):
                    lines[start : start + len(command.shown)] = renewed(command.shown, self.printed[command.line])
        return "\n".join(lines)


def own_commands(text: str) -> Iterator[list[str]]:
    """The words after each ``specmodel`` of a shell text."""
    for line in text.replace("\\\n", " ").split("\n"):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, "#"
        for cut, part in groupby(lexer, key=lambda word: set(word) <= set("();<>|&")):
            words = list(part)
            names = [i for i, word in enumerate(words) if Path(word).name == "specmodel"]
            if not cut and names and (names[0] == 0 or "=" in words[names[0] - 1]):
                yield words[names[0] + 1 :]


def refused(words: list[str]) -> str | None:
    """What is said of arguments that a command of this package does not take; None where it takes them."""
    from specmodel.cli import COMMANDS

    if not words or words[0] not in COMMANDS:
        return f"{' '.join(words[:1]) or 'nothing'} is no command"
    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve", exit_on_error=False)
    importlib.import_module(COMMANDS[words[0]][0]).add_arguments(parser)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_args(words[1:])
    except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
        return str(error)
    except SystemExit:
        return said.getvalue()
    return None


def check(path: Path) -> Page:
    """Run the examples of one page."""
    with tempfile.TemporaryDirectory() as folder:
        page = Page(path, Path(folder))
        page.run()
    return page


def main(arguments: list[str]) -> int:
    """Check or rewrite the given pages, or all."""
    write = "--write" in arguments
    given = [Path(a).resolve() for a in arguments if a != "--write"]
    faulty = 0
    for path in given or pages():
        page = check(path)
        if write:
            path.write_text(page.rewritten(), encoding="utf-8")
            page = check(path)
        for fault in page.faults:
            sys.stdout.write(fault + "\n")
        faulty += bool(page.faults)
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
