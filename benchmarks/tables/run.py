"""Runs rows: each step in a forked process, its CPU time counted, its document kept so that a row
can be resumed.
"""

import contextlib
import json
import os
import runpy
import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

from benchmarks.tables import results
from benchmarks.tables.layout import Row
from benchmarks.tables.rows import BY_NAME

torch.set_num_threads(1)  # and none are started before a fork


JUDGING = ("certify", "attack")
"""Steps that judge a network which others made."""


class RowFailed(Exception):
    """A step of a row did not end well; the message has its command and the end of what it said."""


def arguments(command: str, names: Mapping[str, str]) -> tuple[str, list[str]]:
    """A documented command as a module to run and its arguments: `certvit` is `python -m certcli`."""
    words = [_filled(word, names) for word in shlex.split(command)]
    if words[0] == "certvit":
        return "certcli", [*words[1:], "--json", "--quiet"]
    if words[:2] == ["python", "-m"]:
        return words[2], words[3:]
    raise ValueError(f"not a command of these tables: {command}")


def _filled(word: str, names: Mapping[str, str]) -> str:
    for name, value in names.items():
        word = word.replace("{" + name + "}", value)
    if "{" in word:
        raise ValueError(f"nothing is known of {word}")
    return word


def missing_data(row: Row, data: Mapping[str, str], names: tuple[str, ...]) -> list[str]:
    """Data sets that the row needs and that were not given."""
    return [
        name
        for name in names
        if name not in data and any("{" + name + "}" in step for step in row.steps.values())
    ]


def step(
    commands: Sequence[str], names: Mapping[str, str], folder: Path, name: str
) -> dict[str, Any]:
    """{"commands", "document", "cpu_seconds"} of the last of the commands, from its file when all
    were the same there.

    commands: those that made the files which the step reads, then its own.
    """
    output_file = folder / f"{name}.json"
    command = commands[-1]
    if output_file.exists():
        earlier = json.loads(output_file.read_text())
        if earlier.get("commands") == list(commands):
            return dict(earlier)
    out = folder / f"{name}.out"
    err = folder / f"{name}.err"
    # torch is imported once, here: a process started anew spends more on that than most steps take
    child = os.fork()
    if child == 0:
        _child(*arguments(command, names), folder, out, err)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise RowFailed(
            f"{command}\nended with {code}: {(err.read_text() or out.read_text())[-800:]}"
        )
    record = {
        "commands": list(commands),
        "document": json.loads(out.read_text().strip().splitlines()[-1]),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
    }
    partial = output_file.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    os.replace(partial, output_file)  # whole or not at all: a run may be interrupted here as well
    return record


def _child(module: str, words: list[str], folder: Path, out: Path, err: Path) -> NoReturn:
    """The forked process: runs the module in the folder as `python -m` would, its output in files,
    and ends.
    """
    code: Any = 1
    try:
        for path, number in ((out, 1), (err, 2)):
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        os.chdir(folder)
        sys.argv = [module, *words]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


def figure(documents: Mapping[str, Any], where: str) -> Any:
    """A figure by step and keys: "certify/certified/1.58"; of a list by its index, or * for the
    mean over it.
    """
    value: Any = documents
    parts = where.split("/")
    for place, part in enumerate(parts):
        if part == "*":
            values = [figure({"": entry}, "/".join(["", *parts[place + 1 :]])) for entry in value]
            return sum(values) / len(values)
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def made_by(row: Row) -> list[str]:
    """All commands of the rows whose files the row reads, then its own."""
    return [command for other in row.after for command in made_by(BY_NAME[other])] + list(
        row.steps.values()
    )


def run_row(row: Row, seed: int, data: Mapping[str, str], work: Path) -> dict[str, Any]:
    """One row with one seed; its run, as results.json keeps it. RowFailed names the step."""
    folder = work / row.name / str(seed)
    folder.mkdir(parents=True, exist_ok=True)
    names = {**data, "seed": str(seed)}
    names |= {other: os.path.relpath(work / other / str(seed), folder) for other in row.after}
    commands = made_by(row)
    first = len(commands) - len(row.steps)
    steps = {
        name: step(commands[: first + place], names, folder, name)
        for place, name in enumerate(row.steps, start=1)
    }
    documents = {name: record["document"] for name, record in steps.items()}
    seconds = {name: record["cpu_seconds"] for name, record in steps.items()}
    training = round(sum(spent for name, spent in seconds.items() if name not in JUDGING), 1)
    whole = documents | {"cpu_seconds": {"training": training}}
    return {
        "figures": {column: figure(whole, where) for column, where in row.figures.items()},
        "images": {
            name: document["images"] for name, document in documents.items() if "images" in document
        },
        "commands": dict(row.steps),
        "cpu_seconds": seconds,
        "machine": results.machine(),
    }
