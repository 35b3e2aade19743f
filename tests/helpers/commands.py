"""Run certvit in the process of a test: `certvit`, `document`, `attempt` through typer, `console` as the
console script; what is wrong with a document by its schema; names that are there and cannot be read.
"""

import contextlib
import inspect
import io
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from certcli.cli.main import program, run

_build = typer.main.get_command
_PROGRAMS: dict[tuple[Any, ...], Any] = {}


def built_program(app: typer.Typer) -> Any:
    """Return the program as Typer builds it, once for the same functions: anew for each call, it
    would take as long as many a command.
    """
    functions = [(one.name, inspect.unwrap(one.callback)) for one in app.registered_commands]
    key = (*functions, app.rich_markup_mode, str(app.info.context_settings))
    if key not in _PROGRAMS:
        _PROGRAMS[key] = _build(app)
    return _PROGRAMS[key]


typer.main.get_command = typer.testing._get_command = built_program


class Done(NamedTuple):
    """What the console script left: its exit code and its two streams."""

    code: int
    out: str
    err: str


def words_typed(line: str) -> list[str]:
    """Return the words of a command line."""
    return shlex.split(line)


def attempt(*words: object) -> Result:
    """Run a command that may fail; `exception` of the result is the error before it becomes a
    message.
    """
    texts = [str(word) for word in words]
    return CliRunner().invoke(program(texts), texts)


def certvit(*words: object, code: int = 0) -> Result:
    """Run a command that ends with this exit code."""
    done = attempt(*words)
    assert getattr(done.exception, "code", done.exit_code) == code, (
        words,
        done.output,
        done.exception,
    )
    return done


def document(*words: object, code: int = 0) -> dict[str, Any]:
    """Return the one JSON document of a command."""
    (line,) = certvit(*words, "--json", code=code).stdout.splitlines()
    return json.loads(line)


def record_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file, without its header."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def console(*words: object, folder: Path | None = None) -> Done:
    """Run the console script's function: a process for each case would take minutes to start."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    arguments = sys.argv
    sys.argv = ["certvit", *map(str, words)]
    try:
        with (
            contextlib.chdir(folder or "."),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            run()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = arguments
    return Done(code, out.getvalue(), err.getvalue())


def problems(value: Any, schema: dict[str, Any]) -> list[str]:
    """What is wrong with a value by a JSON schema; skips where `jsonschema`, a test dependency, is
    not installed.
    """
    kind = pytest.importorskip("jsonschema").validators.validator_for(schema)
    kind.check_schema(schema)
    return [error.message for error in kind(schema).iter_errors(value)]


def write_a_terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


UNREADABLE: dict[str, Callable[[Path], object]] = {
    "a terabyte": write_a_terabyte,
    "a pipe": os.mkfifo,
    "a broken link": lambda path: path.symlink_to("no-such-file"),
    "a folder": Path.mkdir,
}
"""What makes each at a path. A folder is the last: some readers look for folders themselves."""
