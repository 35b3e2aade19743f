"""Mutants of the sound rooms: `python -m tests.soundness.mutants --seconds 600`.

Each mutant lives in a forked process of its own, in which the tests of its room that run its line
are run until one fails. No file of certcli is written. The answers are JSON lines, from which a
later run goes on.
"""

import argparse
import functools
import gc
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.helpers.workshop import Workshop
from tests.soundness.edits import asked_for
from tests.soundness.mutants.operators import CHECKS, Mutant, mutants, mutated
from tests.soundness.mutants.rooms import ROOMS, ROOT

CRASHES = (TypeError, AttributeError, NameError, LookupError, RuntimeError)
"""Of one of these a mutant dies at once: it never had a bound, so it is not counted (except where a check is gone)."""
EQUIVALENT = Path(__file__).with_name("equivalent.tsv")
"""Mutant, tab, why no law can or should see it."""
LONGEST = 3.0
"""CPU seconds of a test; a longer one is left out."""
TESTS = 10.0
"""CPU seconds of tests a mutant, the quickest first."""
Json = dict[str, Any]


class TooLong(BaseException):
    """A test took more than LONGEST."""


def too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def functions_by_file() -> dict[str, list[FunctionType]]:
    """Return all functions of this process, by the file of their code."""
    gc.unfreeze()  # what is frozen cannot be found
    found = defaultdict(list)
    for function in gc.get_objects():
        if isinstance(function, FunctionType):
            found[function.__code__.co_filename].append(function)
    gc.freeze()  # no fork copies what a collection would write to
    return found


def by_name(whole: CodeType) -> dict[tuple[str, int], list[CodeType]]:
    """Return the code of a file's functions by name and line; several lambdas of a line in their
    order.
    """
    found = defaultdict(list)
    for code in codes(whole):
        found[code.co_qualname, code.co_firstlineno].append(code)
    return found


def place_of(whole: CodeType, functions: list[FunctionType]) -> bool:
    """Give the functions of a file its new code. False where it fits none of them."""
    path = Path(whole.co_filename)
    olds = by_name(compile(path.read_text(), str(path), "exec"))
    news = by_name(whole)
    changed = False
    for function in functions:
        old = function.__code__
        name = old.co_qualname, old.co_firstlineno
        alike = olds.get(name, [])
        new = news.get(name, [])
        if len(alike) != len(new) or old not in alike:
            continue
        code = new[alike.index(old)]
        if code != old and len(code.co_freevars) == len(old.co_freevars):
            function.__code__ = code
            changed = True
    return changed


def forked(work: Callable[[], Json], seconds: float) -> Json:
    """Return what `work` returns in a fork of this process, which dies of more CPU seconds than
    these, or of waiting.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 5))
        signal.alarm(60 + 20 * int(seconds))  # one that waits, of a pipe say, takes no CPU time
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


def forget() -> None:
    """Empty the caches of functions: what an earlier test left there, a test would not run."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("tests", "certcli"):
            for function in vars(module).values():
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()


class Campaign:
    """A pytest plugin: in place of its loop over the collected tests come the mutants."""

    def __init__(self, room: str, options: argparse.Namespace, seconds: float) -> None:
        self.room = room
        self.options = options
        self.seconds = seconds
        self.state = Path(options.state) / f"{room}.jsonl"
        self.failed: Json | None = None
        self.timed = False
        self.lines: set[str] = set()  # that the running test or fixture has run
        self.fixtures: dict[str, set[str]] = defaultdict(set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report = yield
        if report.failed and self.failed is None and call.excinfo is not None:
            crash = issubclass(call.excinfo.type, CRASHES)
            self.failed = {"status": "crash" if crash else "killed", "by": item.nodeid}
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        if self.timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        before = set(self.lines)
        self.lines.clear()
        try:
            return (yield)
        finally:
            self.fixtures[fixturedef.argname] |= self.lines
            self.lines |= before

    def run(self, items: list[pytest.Item]) -> Json:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed is not None:
                return self.failed
        return {"status": "survived", "by": f"{len(items)} tests"}

    def tracing(self, items: list[pytest.Item], files: list[Path]) -> Json:
        """Run all tests once; return `file:line` -> [name, seconds] of each test that runs it."""
        ran = defaultdict(list)
        names = {str(file): str(file.relative_to(ROOT)) for file in files}

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            name = names.get(frame.f_code.co_filename)
            if name is not None and event == "line":
                self.lines.add(f"{name}:{frame.f_lineno}")
            return None if name is None else trace

        sys.settrace(trace)
        signal.signal(signal.SIGVTALRM, too_long)
        self.timed = True
        for item, following in zip(items, [*items[1:], None], strict=True):
            forget()
            self.lines.clear()
            self.failed, start = None, time.process_time()
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            except TypeError as error:  # pytest's words for a line that has no number, where TooLong happened to fall
                self.failed = {"by": str(error)}
            if (
                self.failed is None
            ):  # a test that fails or takes too long without a mutant kills none
                own = [self.fixtures[name] for name in getattr(item, "fixturenames", ())]
                for line in self.lines.union(*own):
                    ran[line].append([item.nodeid, time.process_time() - start])
        return ran

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        room = ROOMS[self.room]
        options = self.options
        for (
            file
        ) in room.files():  # before a fork: a later import would bring the code without its mutant
            importlib.import_module(
                ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            )
        made = session.config._tmp_path_factory.getbasetemp() / "workshop"  # type: ignore[attr-defined]
        made.symlink_to(
            self.state.with_name("workshop").resolve()
        )  # networks that no mutant has a part in
        functions = functions_by_file()
        self.state.parent.mkdir(parents=True, exist_ok=True)
        alike = [name for name in ROOMS if ROOMS[name].tests == room.tests]  # traced together
        mapped = self.state.with_name("+".join(alike) + ".lines.json")
        if not mapped.exists():
            files = sorted({file for name in alike for file in ROOMS[name].files()})
            mapped.write_text(json.dumps(forked(lambda: self.tracing(session.items, files), 3000)))
        ran = json.loads(mapped.read_text())
        lines_run = Counter(
            (line.rpartition(":")[0], name) for line, tests in ran.items() for name, _ in tests
        )
        items = {item.nodeid: item for item in session.items}
        done = {row["key"]: row["status"] for row in answers(self.state)}
        deadline = time.monotonic() + self.seconds
        drawn = chosen_rooms(self.room, options)
        for mutant in [mutant for mutant in drawn if mutant.key not in done]:
            if time.monotonic() > deadline:
                break
            first, second = (f"{mutant.path.relative_to(ROOT)}:{line}" for line in mutant.lines)
            tests = dict(ran.get(first, ran.get(second, [])))
            picked: list[pytest.Item] = []
            cost = 0.0
            for name, seconds in in_turn(tests, mutant, lines_run):
                if name in items and (not picked or cost + seconds <= TESTS):
                    picked.append(items[name])
                    cost += seconds

            def trial(mutant: Mutant = mutant, picked: list[pytest.Item] = picked) -> Json:
                whole = compile(mutated(mutant), str(mutant.path), "exec")
                return (
                    self.run(picked)
                    if place_of(whole, functions[str(mutant.path)])
                    else {"status": "misfit"}
                )

            start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            answer = (
                forked(trial, 4 * cost + 5) if picked else {"status": "survived", "by": "no test"}
            )
            spent = round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start, 2)
            if answer["status"] == "crash" and mutant.operator in CHECKS:
                answer["status"] = "killed"
            with self.state.open("a") as out:
                out.write(
                    json.dumps(
                        {"key": mutant.key, "operator": mutant.operator, **answer, "seconds": spent}
                    )
                    + "\n"
                )
        return True


def in_turn(
    tests: dict[str, float], mutant: Mutant, lines_run: Counter[tuple[str, str]]
) -> list[tuple[str, float]]:
    """Return one case of each test, then a second case of each, and so on: first those that run most
    of the mutant's file, of equal ones the quickest.

    A case that names the mutant's file is about the rounding there: of a rounding it comes first.

    Args:
        tests: Name -> CPU seconds.
        mutant: The mutant that they run.
        lines_run: (file, test) -> how many lines of the file the test runs.
    """
    file = "/".join(mutant.path.parts[-2:])
    path = str(mutant.path.relative_to(ROOT))
    ranked = sorted((-lines_run[path, name], seconds, name) for name, seconds in tests.items())
    seen = Counter[str]()
    turns = []
    for place, (_, seconds, name) in enumerate(ranked):
        seen[name.split("[")[0]] += 1
        about_rounding = file in name and mutant.operator.startswith("rounding")
        turns.append((0 if about_rounding else seen[name.split("[")[0]], place, name, seconds))
    return [(name, seconds) for _, _, name, seconds in sorted(turns)]


def answers(state: Path) -> list[Json]:
    """Return the last answer for each mutant."""
    rows = [json.loads(line) for line in state.read_text().splitlines()] if state.exists() else []
    return list({row["key"]: row for row in rows}.values())


def every(room: str) -> list[Mutant]:
    return [mutant for file in ROOMS[room].files() for mutant in mutants(file, ROOT)]


def chosen_rooms(room: str, options: argparse.Namespace) -> list[Mutant]:
    """Return a sample in which every operator has its turn.

    A mutant's place among those of its operator is a hash of its name: code that comes or goes
    moves no other one's.
    """
    of: dict[str, list[Mutant]] = defaultdict(list)
    for mutant in every(room):
        of[mutant.operator].append(mutant)
    for found in of.values():
        found.sort(
            key=lambda mutant: hashlib.sha256(f"{options.seed} {mutant.key}".encode()).digest()
        )
    turns = [
        (turn, operator, mutant)
        for operator in sorted(of)
        for turn, mutant in enumerate(of[operator])
    ]
    return [mutant for _, _, mutant in sorted(turns, key=lambda turn: turn[:2])][: options.count]


def score(state: Path) -> None:
    """Print the score of each room, the survivors that the table does not explain, and those of its
    lines whose code is gone.
    """
    known = dict(line.split("\t", 1) for line in EQUIVALENT.read_text().splitlines())
    stale = set(known)
    left = []
    counts = {"all": Counter[str]()}
    spent = {"all": 0.0}
    for room in ROOMS:
        there = {mutant.key for mutant in every(room)}
        stale -= there
        rows = [row for row in answers(state / f"{room}.jsonl") if row["key"] in there]
        for row in rows:
            if row["status"] == "survived" and row["key"] in known:
                row["status"] = "equivalent"
        spent[room] = sum(row["seconds"] for row in rows)
        spent["all"] += spent[room]
        counts[room] = Counter(row["status"] for row in rows)
        left += [row for row in rows if row["status"] == "survived"]
        counts["all"] += counts[room]
    print(
        f"{'room':<14}{'counted':>8}{'killed':>8}{'survived':>9}{'score':>7}   equivalent, crashed at once, seconds each"
    )
    for room in (*ROOMS, "all"):
        killed, survived, equivalent = (
            counts[room][name] for name in ("killed", "survived", "equivalent")
        )
        counted = killed + survived
        share = f"{killed / counted:.0%}" if counted else "-"
        crashed = counts[room].total() - counted - equivalent
        each = spent[room] / max(1, counts[room].total())
        print(
            f"{room:<14}{counted:>8}{killed:>8}{survived:>9}{share:>7}   {equivalent}, {crashed}, {each:.1f}"
        )
    for row in left:
        print(f"{row['operator']:<26} {row['key']}")
    for key in sorted(stale):
        print(f"no such mutant any more    {key}")


def main() -> None:
    options = asked_for(
        __doc__ or "",
        room=[],  # these rooms only
        seconds=600.0,  # of mutants, divided among the rooms
        count=66,  # mutants of a room, drawn with --seed
        state="build/mutants",  # the folder of the answers
    )
    rooms = options.room or list(ROOMS)
    workshop = Workshop(options.state, "workshop")
    workshop.mkdir(parents=True, exist_ok=True)
    workshop / "certified.safetensors"
    for room in rooms:
        process = os.fork()  # a pytest of its own for each room
        if process == 0:
            tests = [str(ROOT / "tests" / test) for test in ROOMS[room].tests]
            quiet = ["-o", "addopts=", "--import-mode=importlib"]
            quiet += [
                word
                for name in ("terminal", "xdist", "cacheprovider")
                for word in ("-p", f"no:{name}")
            ]
            pytest.main(
                [*tests, *quiet], plugins=[Campaign(room, options, options.seconds / len(rooms))]
            )
            os._exit(0)
        os.waitpid(process, 0)
    score(Path(options.state))


if __name__ == "__main__":
    main()
