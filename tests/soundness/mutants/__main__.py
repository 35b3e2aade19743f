"""Mutants of the sound rooms: `python -m tests.soundness.mutants --seconds 600`.

Each mutant lives in a forked process alone, in which the tests of its room that run its line are run until one fails. No
file of certcli is written. The answers are JSON lines, from which a later run goes on.
"""

import argparse
import collections
import gc
import importlib
import json
import os
import random
import resource
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.soundness.mutants.operators import CHECKS, Mutant, mutants, mutated
from tests.soundness.mutants.rooms import ROOMS, ROOT, Room

CRASHES = (TypeError, AttributeError, NameError, LookupError, RuntimeError)
"""Of one of these a mutant dies at once: it never had a bound, so it is not counted (except where a check is gone)."""
EQUIVALENT = Path(__file__).with_name("equivalent.tsv")
"""Mutant, tab, why no law can or should see it."""
Lines = dict[str, list[list[Any]]]
"""`file:line` -> name and seconds of each test that runs it."""


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def functions_by_file() -> dict[str, list[FunctionType]]:
    """Return all functions of this process, by the file of their code."""
    gc.unfreeze()  # what is frozen cannot be found
    found = collections.defaultdict(list)
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            found[function.__code__.co_filename].append(function)
    gc.freeze()  # no fork copies what a collection would write to
    return found


def place(mutant: Mutant, functions: list[FunctionType]) -> bool:
    """Give the functions of the mutant's file its code. False where it fits none of them."""
    tree = mutated(mutant)
    new = {(code.co_qualname, code.co_firstlineno): code for code in codes(compile(tree, str(mutant.path), "exec"))}
    changed = False
    for function in functions:
        old = function.__code__
        code = new.get((old.co_qualname, old.co_firstlineno))
        if code is not None and code != old and len(code.co_freevars) == len(old.co_freevars):
            function.__code__, changed = code, True
    return changed


class Campaign:
    """A pytest plugin: in place of its loop over the collected tests come the mutants."""

    def __init__(self, room: str, options: argparse.Namespace, deadline: float) -> None:
        self.room, self.options, self.deadline = room, options, deadline
        self.state = Path(options.state) / f"{room}.jsonl"
        self.reported: tuple[str, str] | None = None
        self.fixtures: dict[str, set[str]] = collections.defaultdict(set)
        self.lines: set[str] | None = None

    # what the tests tell

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.failed and self.reported is None and call.excinfo is not None:
            crash = issubclass(call.excinfo.type, CRASHES)
            self.reported = item.nodeid, "crash" if crash else "killed"
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        before, self.lines = self.lines, set()
        try:
            return (yield)
        finally:
            self.fixtures[fixturedef.argname] |= self.lines
            self.lines = before

    # each in a process of its own

    def forked(self, work: Any, seconds: float) -> dict[str, Any]:
        """Return what `work` returns in a fork of this process, which dies of more CPU seconds than these."""
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 5))
            resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
            try:
                answer = work()
            except BaseException as error:  # said to the parent, whatever it is
                answer = {"status": "broken", "by": f"{type(error).__name__}: {error}"[:200]}
            with os.fdopen(writing, "w") as pipe:
                json.dump(answer, pipe)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            text = pipe.read()
        os.waitpid(process, 0)
        return json.loads(text) if text else {"status": "killed", "by": "out of time or memory"}

    def run(self, items: list[pytest.Item]) -> dict[str, Any]:
        for item, following in zip(items, [*items[1:], None]):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.reported is not None:
                return {"status": self.reported[1], "by": self.reported[0]}
        return {"status": "survived", "by": f"{len(items)} tests"}

    def tracing(self, items: list[pytest.Item], files: set[str]) -> Lines:
        """Run all tests once; return which of them run each line."""
        ran: Lines = collections.defaultdict(list)

        def local(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line" and self.lines is not None:
                self.lines.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return local

        def traced(frame: FrameType, event: str, argument: object) -> Any:
            return local if frame.f_code.co_filename in files else None

        threading.settrace(traced)
        for item, following in zip(items, [*items[1:], None]):
            self.lines, self.reported, start = set(), None, time.process_time()
            sys.settrace(traced)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            sys.settrace(None)
            if self.reported is not None:
                continue  # a test that fails without a mutant kills none
            for name in getattr(item, "fixturenames", ()):
                self.lines |= self.fixtures[name]
            for line in self.lines:
                ran[line].append([item.nodeid, time.process_time() - start])
        return ran

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        room: Room = ROOMS[self.room]
        for file in room.files():  # before a fork: a later import would bring the code without its mutant
            importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all forks
        functions = functions_by_file()
        self.state.parent.mkdir(parents=True, exist_ok=True)
        alike = [name for name in ROOMS if ROOMS[name].tests == room.tests]  # traced together
        mapped = self.state.with_name("+".join(alike) + ".lines.json")
        files = {str(file) for name in alike for file in ROOMS[name].files()}
        if not mapped.exists() or self.options.trace:
            mapped.write_text(json.dumps(self.forked(lambda: self.tracing(session.items, files), 3000)))
        lines: Lines = json.loads(mapped.read_text())
        items = {item.nodeid: item for item in session.items}
        done = {row["key"]: row["status"] for row in answers(self.state)}
        for mutant in chosen(room, self.options):
            if self.options.survivors != (done.get(mutant.key) == "survived") or (
                not self.options.survivors and mutant.key in done
            ):
                continue
            if time.monotonic() > self.deadline:
                break
            tests = {name: cost for line in mutant.lines for name, cost in lines.get(f"{mutant.path}:{line}", [])}
            picked, cost = [], 0.0
            for name, seconds in sorted(tests.items(), key=lambda test: test[1]):
                if name in items and cost + seconds <= max(self.options.tests, seconds if not picked else 0):
                    picked.append(items[name])
                    cost += seconds

            def trial(mutant: Mutant = mutant, picked: list[pytest.Item] = picked) -> dict[str, Any]:
                return (
                    self.run(picked) if place(mutant, functions[str(mutant.path)]) else {"status": "misfit", "by": ""}
                )

            start = time.monotonic()
            answer = self.forked(trial, 10 * cost + 20) if picked else {"status": "survived", "by": "no test"}
            if answer["status"] == "crash" and mutant.operator in CHECKS:
                answer["status"] = "killed"
            row = {"key": mutant.key, "operator": mutant.operator, "line": mutant.lines[0], **answer}
            with self.state.open("a") as out:
                out.write(json.dumps({**row, "seconds": round(time.monotonic() - start, 1)}) + "\n")
        return True


def answers(state: Path) -> list[dict[str, Any]]:
    """Return the last answer for each mutant."""
    rows = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    return list({row["key"]: row for row in rows}.values())


def chosen(room: Room, options: argparse.Namespace) -> list[Mutant]:
    """Return a sample in which every operator has its turn, or the mutants whose name contains `--only`."""
    of: dict[str, list[Mutant]] = collections.defaultdict(list)
    for file in room.files():
        for mutant in mutants(file, ROOT):
            if options.only in mutant.key:
                of[mutant.operator].append(mutant)
    draw = random.Random(options.seed)
    for operator in sorted(of):
        draw.shuffle(of[operator])
    turns = [(turn, operator, mutant) for operator in sorted(of) for turn, mutant in enumerate(of[operator])]
    return [mutant for _, _, mutant in sorted(turns, key=lambda turn: turn[:2])][: options.count]


def score(state: Path) -> None:
    """Print the score of each room, and the survivors that the table does not explain."""
    known = dict(line.split("\t", 1) for line in EQUIVALENT.read_text().splitlines() if "\t" in line)
    print(f"{'room':<14}{'counted':>8}{'killed':>8}{'survived':>9}{'score':>7}   equivalent, crashed at once")
    left, total = [], collections.Counter[str]()
    for room in ROOMS:
        rows = answers(state / f"{room}.jsonl")
        count = collections.Counter("equivalent" if row["key"] in known else row["status"] for row in rows)
        left += [
            f"{row['operator']:<24} {row['key']}"
            for row in rows
            if row["status"] == "survived" and row["key"] not in known
        ]
        total += count
        _line(room, count)
    _line("all", total)
    print("\n".join(left))


def _line(name: str, count: collections.Counter[str]) -> None:
    counted = count["killed"] + count["survived"]
    share = f"{count['killed'] / counted:.0%}" if counted else "-"
    print(
        f"{name:<14}{counted:>8}{count['killed']:>8}{count['survived']:>9}{share:>7}   "
        f"{count['equivalent']}, {count['crash'] + count['misfit'] + count['broken']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", choices=ROOMS, action="append", help="these rooms only")
    parser.add_argument("--seconds", type=float, default=600, help="stop after this time, divided among the rooms")
    parser.add_argument("--count", type=int, default=60, help="mutants of a room, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="only mutants whose name contains this")
    parser.add_argument("--survivors", action="store_true", help="try again those that survived")
    parser.add_argument(
        "--tests", type=float, default=10, help="CPU seconds of tests for one mutant, the quickest first"
    )
    parser.add_argument("--trace", action="store_true", help="ask again which tests run which line")
    parser.add_argument("--state", default="build/mutants", help="the folder of the answers")
    options = parser.parse_args()
    rooms = options.room or list(ROOMS)
    for _number, room in enumerate(rooms):
        process = os.fork()  # a pytest of its own for each room
        if process == 0:
            deadline = time.monotonic() + options.seconds / len(rooms)
            tests = [str(ROOT / "tests" / test) for test in ROOMS[room].tests]
            quiet = [
                "-o",
                "addopts=",
                "--import-mode=importlib",
                "-p",
                "no:terminal",
                "-p",
                "no:xdist",
                "-p",
                "no:cacheprovider",
            ]
            pytest.main([*tests, *quiet], plugins=[Campaign(room, options, deadline)])
            os._exit(0)
        os.waitpid(process, 0)
    score(Path(options.state))


if __name__ == "__main__":
    main()
