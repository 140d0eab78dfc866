"""The command line: finds the command, reads its options, and turns errors into exit codes.

Only the standard library is imported here; each command is a module of its own (`specmodel.commands`, and the
commands of `specmodel.engines` and `specmodel.harness`) that is imported when it is asked for and imports what is heavy
when it runs.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from specmodel import streams

__all__ = ["main"]

ANSWERED, NOT_GOOD_ENOUGH, USAGE, BAD_INPUT = 0, 1, 2, 3
INTERRUPTED, PIPE_CLOSED = 130, 141  # as a shell reports a program that SIGINT or SIGPIPE ended

# Module and summary of each command, in the order of the help.
COMMANDS = {
    "optimize": ("specmodel.commands.optimize", "the best configuration, how sure that is, and what to measure next"),
    "predict": ("specmodel.commands.predict", "tok/s and its parts for any configuration, with intervals"),
    "fit": ("specmodel.commands.fit", "the fitted terms of the cost model and the acceptance, with intervals"),
    "validate": ("specmodel.commands.validate", "predicted against measured, row by row"),
    "diagnose": ("specmodel.commands.diagnose", "is it the drafter or the engine; what to work on, and what is closed"),
    "whatif": ("specmodel.commands.whatif", "what would be best, and how fast, if something were different"),
    "compare": ("specmodel.commands.compare", "what changed between two calibrations, term by term"),
    "report": ("specmodel.commands.report", "all of it on one page, to read, print, mail or paste into an issue"),
    "simulate": (
        "specmodel.commands.simulate",
        "latencies and goodput under load, by policy; sweeps of many scenarios",
    ),
    "ingest": ("specmodel.engines.command", "a calibration from what an engine printed: logs, metrics, traces"),
    "measure": ("specmodel.harness.command", "a calibration from this machine's GPUs, without an engine"),
    "schema": ("specmodel.commands.schema", "the file format: JSON Schema, or a commented starter file"),
}

_EXIT_CODES = """\
exit codes:
  0  answered
  1  answered, but not well enough (no recommendation{beyond}), or a crash
  2  wrong usage
  3  an input file is malformed or cannot be read
130  interrupted"""

EXAMPLES = """\
examples:
  specmodel schema --example > calib.yaml     a commented starter file: fill in what you measured
  specmodel optimize calib.yaml               the best configuration, with error bars
  specmodel optimize calib.yaml --batch 1,8,32 --plot tok_s.svg
  specmodel validate calib.yaml measured.yaml"""


class _Parser(argparse.ArgumentParser):
    """A parser whose help shows examples first, and that knows what was probably meant."""

    examples = ""

    def format_help(self) -> str:
        if self.epilog and not self.examples:
            self.examples, self.epilog = self.epilog.removeprefix("examples:\n").rstrip("\n"), None
        head = f"examples:\n{self.examples}\n\n" if self.examples else ""
        codes = _exit_codes(tolerance="--tolerance" in self._option_string_actions)
        return f"{head}{super().format_help()}\n{codes}\n"

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if unknown and message.startswith("unrecognized"):
            options = [name for action in self._actions for name in action.option_strings]
            message += _did_you_mean(unknown[0].partition("=")[0], options)
        from specmodel.errors import brief

        sys.stderr.write(f"{self.prog}: error: {brief(message)}\n{self.prog} -h shows examples and every option\n")
        sys.exit(USAGE)


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean `{close[0]}`?" if close else ""


def _exit_codes(*, tolerance: bool) -> str:
    """The exit codes of a command, or of all of them."""
    return _EXIT_CODES.format(beyond="; beyond --tolerance" if tolerance else "")


def _help(short: bool) -> str:
    summaries = "\n".join(f"  {name:10}{summary}" for name, (_, summary) in COMMANDS.items())
    text = f"{EXAMPLES}\n\nusage: specmodel COMMAND [options]\n\ncommands:\n{summaries}\n"
    if short:
        return text + "\n`specmodel -h` says more, `specmodel COMMAND -h` everything about a command\n"
    return f"""{text}
From a handful of measurements to the best speculative-decoding configuration, with error bars. A command reads one
calibration file, YAML or JSON (`-` is standard input), writes its answer to standard output and talks on standard
error. `specmodel COMMAND -h` shows examples and every option of a command.

options, before or after the command:
  -h, --help   this text
  --version    the version
  -q, --quiet  do not talk on standard error (errors are still shown)
  --no-color   no colour; nor where the output is piped, NO_COLOR is set, or TERM is dumb

{_exit_codes(tolerance=False)}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; by default those of the process.

    Returns
    -------
    int
        The exit code: 0 answered, 1 answered but not well enough, 2 wrong usage, 3 malformed input file; 130 after
        Ctrl-C and 141 where the reader of the output has gone.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stderr.write("specmodel: error: standard output is closed: there is nowhere to answer to\n")
        return NOT_GOOD_ENOUGH
    for stream in (sys.stdout, sys.stderr):
        # A name that the terminal cannot show must not end a run.
        if stream is not None and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        streams.discard_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        streams.discard_output()
        sys.stderr.write(f"specmodel: error: standard output cannot be written: {error.strerror}\n")
        return NOT_GOOD_ENOUGH
    return code


def _main(words: list[str]) -> int:
    command = next((word for word in words if not word.startswith("-")), None)
    if command is None:
        return _without_command(words)
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        hint = _did_you_mean(command, list(COMMANDS))
        from specmodel.errors import brief

        sys.stderr.write(f"specmodel: error: no command {brief(repr(command))}{hint}\ncommands: {known}\n")
        return USAGE
    words.remove(command)
    return _run(command, words)


def _without_command(words: list[str]) -> int:
    if "-h" in words or "--help" in words:
        sys.stdout.write(_help(short=False))
        return ANSWERED
    if "--version" in words:
        sys.stdout.write(f"specmodel {_version()}\n")
        return ANSWERED
    from specmodel.errors import brief

    unknown = [word for word in words if word not in ("-q", "--quiet", "--no-color")]
    said = f"specmodel: error: no option {brief(repr(unknown[0]))} without a command\n\n" if unknown else ""
    sys.stderr.write(said + _help(short=True))
    return USAGE


def _version() -> str:
    from specmodel import __version__

    return __version__


def _run(command: str, words: list[str]) -> int:
    module = importlib.import_module(COMMANDS[command][0])
    parser = _Parser(
        prog=f"specmodel {command}",
        description=(module.run.__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        conflict_handler="resolve",
    )
    parser.examples = getattr(module, "EXAMPLES", "").rstrip("\n")
    module.add_arguments(parser)
    shared = parser.add_argument_group("everywhere")
    shared.add_argument("-q", "--quiet", action="store_true", help="do not talk on standard error")
    shared.add_argument("--no-color", action="store_true", help="no colour; nor where the output is piped")
    shared.add_argument("--version", action="version", version=f"specmodel {_version()}")
    args = parser.parse_args(words)

    from specmodel.errors import CalibrationError, SpecModelError, UsageError, brief

    try:
        code: int = module.run(args)
    except CalibrationError as error:
        sys.stderr.write(f"{brief(str(error))}\n")
        return BAD_INPUT
    except UsageError as error:
        sys.stderr.write(f"specmodel {command}: error: {brief(str(error))}\n")
        return USAGE
    except SpecModelError as error:
        sys.stderr.write(f"specmodel {command}: error: {brief(str(error))}\n")
        return NOT_GOOD_ENOUGH
    return code
