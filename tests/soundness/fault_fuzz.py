"""Faults by the hundred: `python -m tests.soundness.fault_fuzz --count 1000`.

A command that writes is killed, finds the disk full, meets a second run, gets no memory or a clock
that jumps. Its input stays, each output is the old file or the new one, whole, and the same command
again makes what it makes undisturbed.
"""

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from certcli.checkpoint.file import read_tensors
from certcli.checkpoint.record import KEY
from certcli.system.errors import CertvitError
from tests.helpers.commands import console
from tests.helpers.runs import (
    CHANGING,
    OTHER,
    RESUMABLE,
    WRITING,
    M,
    Plan,
    Starved,
    Watch,
    frozen,
    named_words,
    start_run,
)
from tests.helpers.workshop import Workshop
from tests.soundness.edits import run_edits

UNLIKE = (
    r'"threads":"\d"|\\"threads\\":\\"\d\\"| --resume|\n<p>\d+ records were read[^<]*</p>'
    r'|[\d-]{10}[T ][\d:]{8}(?: UTC)?|"(?:computed|seconds)": [\d.]+'
)
"""Parts of files that a repeated run writes otherwise: its threads, the date, CPU seconds, and in pages the typed command and
how much was resumed."""
ENDS = {"verify": (0, 7)}
"""Exit codes of whole runs: the second network carries nothing that could be verified."""
YEAR = 365.25 * 86400


def output_contents(folder: Path) -> dict[str, Any]:
    """Return the bytes of each output; of an index what it leads to, since its files may have other
    names.
    """
    found: dict[str, Any] = {}
    parts: set[str] = set()
    for path in folder.glob("*.index.json"):
        about = json.loads(path.read_text())
        parts |= set(about["weight_map"].values())
        tensors, _ = read_tensors(path)
        plain = {name: value.numpy().tobytes() for name, value in tensors.items()}
        record = re.sub(UNLIKE, "", about["metadata"].pop(KEY))
        found[path.name] = about["metadata"], record, plain, len(set(about["weight_map"].values()))
    for path in folder.iterdir():
        if path.name not in found and path.name not in parts:
            held = path.read_bytes() if path.is_file() else b"a folder"
            found[path.name] = re.sub(UNLIKE.encode(), b"", held)
    return found


def is_output(name: str) -> bool:
    """Tell whether this is a file that the command line names."""
    return name.startswith("out") and "state" not in name and "-of-" not in name


def weights_of(value: Any) -> Any:
    """Return the tensors' bytes of a checkpoint as `output_contents` has it."""
    if isinstance(value, tuple):
        return value[2]
    ends = [int(end) for end in re.findall(rb'"data_offsets":\[\d+,(\d+)\]', value)]
    return value[-max(ends) :] if ends else value


class Undisturbed(NamedTuple):
    """What a plan leaves without a fault, and beside a mode of torch; its changes of the file
    system, operations, seconds.
    """

    files: dict[str, Any]
    beside_mode: dict[str, Any]
    changes: int
    operations: int
    seconds: float


class Laboratory:
    """Runs in folders of their own, and what each plan makes undisturbed."""

    def __init__(
        self, folder: Path, nets: dict[str, Path], commands: Sequence[str] = WRITING
    ) -> None:
        self.root = folder
        self.nets = nets
        self.commands = commands
        self.number = 0
        self.training = False
        self.known: dict[Plan, Undisturbed] = {}
        for name in commands:  # what each imports is then there in all forks
            plan = Plan(name)
            code, _, err = console(*plan.words(), folder=self.place())
            if code:
                raise RuntimeError(f"{plan}: {err}")

    def place(self) -> Path:
        self.number += 1
        folder = self.root / f"run{self.number}"
        folder.mkdir()
        for name, net in self.nets.items():
            shutil.copy(net, folder / name)
        return folder

    def undisturbed(self, plan: Plan) -> Undisturbed:
        """Return what a plan leaves and takes; RuntimeError where it leaves something else the
        second time.
        """
        plan = plan._replace(resume=False)
        if plan not in self.known:
            counts = self.root / "counts"

            def count() -> None:
                frozen()
                watch, mode = Watch(lambda _: None), Starved(0)
                mode.__enter__()
                leave = os._exit
                os._exit = lambda code: (
                    counts.write_text(f"{watch.count} {mode.count}"),
                    leave(code),
                )[1]

            made = []
            began = time.monotonic()
            for prepare in (frozen, frozen, count):
                folder = self.place()
                done = start_run(folder, plan, prepare).wait()
                made.append(output_contents(folder))
                shutil.rmtree(folder)
                if done.code not in ENDS.get(plan.name, (0,)):
                    raise RuntimeError(f"{plan}: {done}")
            if made[0] != made[1]:
                raise RuntimeError(
                    f"{plan} leaves {[name for name in made[0] if made[0][name] != made[1].get(name)]} anew"
                )
            changes, operations = (int(word) for word in counts.read_text().split())
            self.known[plan] = Undisturbed(
                made[0], made[2], changes, operations, (time.monotonic() - began) / 3
            )
        return self.known[plan]


def broken_laws(
    folder: Path, wholes: list[dict[str, Any]], lab: Laboratory, killed: bool
) -> list[str]:
    """Return the laws that a folder breaks after a fault: files that are none of those of whole
    runs.

    Args:
        killed: the run had no time to clear away; a file of records may then end early.
    """
    laws = [f"the input {name} changed" for name, net in lab.nets.items()
            if (folder / name).read_bytes() != net.read_bytes()]  # fmt: skip
    try:
        found = output_contents(folder)
    except CertvitError as failure:
        return [*laws, f"an index leads nowhere: {failure}"]
    for name, value in found.items():
        if name in lab.nets:
            continue
        if is_output(name):
            early = name.endswith(".jsonl") and any(
                whole.get(name, b"").startswith(value) for whole in wholes
            )
            # a training writes its weights first, then measures them and writes what it measured
            measured_later = lab.training and any(
                name in whole and weights_of(whole[name]) == weights_of(value) for whole in wholes
            )
            whole_file = any(whole.get(name) == value for whole in wholes)
            if not (early or measured_later or whole_file):
                laws.append(f"{name} is no whole file of any run")
        elif name.endswith(".state.safetensors") and not name.startswith("."):
            try:
                read_tensors(folder / name)
            except CertvitError as failure:
                laws.append(f"{name}: {failure}")
        elif not killed:
            laws.append(f"{name} was left behind")
    return laws


class Faults:
    """The faults, each with the laws that hold after it. Every method returns how the run ended,
    and the broken laws.
    """

    def __init__(self, lab: Laboratory) -> None:
        self.lab = lab

    def __call__(self, rng: random.Random) -> tuple[str, list[str]]:
        name = rng.choice(self.lab.commands)
        fault = rng.choice(FAULTS)
        self.lab.training = name == "finetune"
        plan = Plan(name, "--output" in dict(named_words(name)) and rng.random() < 0.4)
        folder = self.lab.place()
        wholes = [self.lab.undisturbed(plan).files]
        if rng.random() < 0.3:  # files of an earlier run are there
            before = plan._replace(other=True)
            wholes.append(self.lab.undisturbed(before).files)
            start_run(folder, before).wait()
        seed = rng.random()
        outcome, laws = getattr(self, fault)(random.Random(seed), plan, folder, wholes)
        shutil.rmtree(folder)
        place = f"{fault} {name}{' sharded' if plan.sharded else ''}"
        return f"{place}: {outcome}", [f"{place}, {seed}: {law}" for law in laws]

    def again(
        self,
        plan: Plan,
        folder: Path,
        wholes: list[dict[str, Any]],
        prepare: Callable[[], None] = frozen,
        resume: bool = True,
    ) -> list[str]:
        """Return what is not as without the fault when the command is repeated, with --resume where
        it has that.

        Where it has another number of threads, sums of training have other last digits: the same
        files are there.
        """
        resume = (
            resume and plan.name in RESUMABLE and len(wholes) == 1
        )  # --resume refuses files of an earlier, other run
        done = start_run(folder, plan._replace(resume=resume), prepare).wait()
        if done.code:
            return [f"again: {done}"]
        found = output_contents(folder)
        if found == wholes[0] or (prepare is not frozen and found.keys() == wholes[0].keys()):
            return []
        other = [
            name
            for name in found.keys() | wholes[0].keys()
            if found.get(name) != wholes[0].get(name)
        ]
        return [f"again: {sorted(other)} differ"]

    def kill(self, rng: random.Random, plan: Plan, folder: Path, wholes: list[dict[str, Any]],
             resumed: Callable[[], None] = frozen) -> tuple[str, list[str]]:  # fmt: skip
        """SIGKILL before a change of the file system, or at any moment; now and then the repeated
        run dies too.
        """
        usual = self.lab.undisturbed(plan)
        laws: list[str] = []
        ended = "finished first"
        for resume in (False, plan.name in RESUMABLE and len(wholes) == 1)[: rng.choice((1, 1, 2))]:
            last = rng.randrange(1, usual.changes + 1)

            def deadly(last: int = last) -> None:
                frozen()
                Watch(
                    lambda change: os.kill(os.getpid(), signal.SIGKILL) if change == last else None
                )

            if rng.random() < 0.5:
                running = start_run(folder, plan._replace(resume=resume), deadly)
            else:
                running = start_run(folder, plan._replace(resume=resume))
                time.sleep(rng.random() * usual.seconds)
                os.kill(running.number, signal.SIGKILL)
            done = running.wait()
            ended = "killed" if done.code == -signal.SIGKILL else ended
            if done.code not in (0, -signal.SIGKILL):
                laws.append(f"ended by itself: {done}")
            laws += broken_laws(folder, wholes, self.lab, True)
        return ended, laws + self.again(plan, folder, wholes, resumed)

    def threads(
        self, rng: random.Random, plan: Plan, folder: Path, wholes: list[dict[str, Any]]
    ) -> tuple[str, list[str]]:
        """A killed run is continued by one with two threads."""

        def two() -> None:
            frozen()
            torch.set_num_threads(2)

        return self.kill(rng, plan, folder, wholes, two)

    def full(
        self, rng: random.Random, plan: Plan, folder: Path, wholes: list[dict[str, Any]]
    ) -> tuple[str, list[str]]:
        """The disk is full at one change of the file system, from one on, or beyond some bytes a
        file.
        """
        first, lasting = (
            rng.randrange(1, self.lab.undisturbed(plan).changes + 1),
            rng.random() < 0.5,
        )
        largest = rng.choice([0, 100, 2000, 5000, 20_000, 50_000])

        def fail(number: int) -> None:
            if number == first or (lasting and number > first):
                raise OSError(errno.ENOSPC, "No space left on device")

        def no_room() -> None:
            frozen()
            if rng.random() < 0.6:
                Watch(fail, CHANGING)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

        done = start_run(folder, plan, no_room).wait()
        laws = broken_laws(folder, wholes, self.lab, False)
        if done.code not in (0, 8) or (done.code and not done.one_line()):
            laws.append(f"{first}, {lasting}, {largest}: {done}")
        return str(done.code), laws + self.again(plan, folder, wholes)

    def two(
        self, rng: random.Random, plan: Plan, folder: Path, wholes: list[dict[str, Any]]
    ) -> tuple[str, list[str]]:
        """Two runs with other inputs and the same outputs at the same time."""
        second = plan._replace(other=True)
        wholes = [*wholes, self.lab.undisturbed(second).files]
        both = [start_run(folder, plan)]
        time.sleep(rng.choice((0, rng.random())) * self.lab.undisturbed(plan).seconds)
        both.append(start_run(folder, second))
        ends = [each.wait() for each in both]
        laws = broken_laws(folder, wholes, self.lab, False)
        laws += [
            str(done)
            for done in ends
            if done.code not in (2, 8, *ENDS.get(plan.name, (0,)))
            or (done.code and not done.one_line())
        ]
        if all(done.code for done in ends):
            laws.append(f"neither run has a result: {ends}")
        return " ".join(str(done.code) for done in ends), laws

    def memory(
        self, rng: random.Random, plan: Plan, folder: Path, wholes: list[dict[str, Any]]
    ) -> tuple[str, list[str]]:
        """An operation of torch gets no memory."""
        failing = rng.randrange(1, self.lab.undisturbed(plan).operations + 1)

        def starve() -> None:
            frozen()
            Starved(failing).__enter__()

        done = start_run(folder, plan, starve).wait()
        laws = broken_laws(
            folder, [*wholes, self.lab.undisturbed(plan).beside_mode], self.lab, False
        )
        if done.code and (
            "certvit: out of memory" not in done.err or done.code != 1 or not done.one_line()
        ):
            laws.append(f"operation {failing}: {done}")
        # records beside a mode have other last digits: the run begins anew
        return str(done.code), laws + self.again(plan, folder, wholes, resume=False)

    def clock(
        self, rng: random.Random, plan: Plan, folder: Path, wholes: list[dict[str, Any]]
    ) -> tuple[str, list[str]]:
        """The wall clock jumps by years, forwards and backwards, whenever it is read."""
        usual = time.time

        def jumping() -> None:
            frozen()
            time.time = lambda: usual() + rng.choice((-YEAR, 0, YEAR))

        done = start_run(folder, plan, jumping).wait()
        laws = broken_laws(folder, wholes[:1], self.lab, False)
        return str(done.code), laws + [str(done)] * bool(done.code)


FAULTS = ("kill", "kill", "full", "two", "memory", "clock", "threads")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        shop, work = Workshop(name), Path(name, "runs")
        work.mkdir()
        nets = {M: shop / "plain.safetensors", OTHER: shop / "init.safetensors"}
        sys.exit(run_edits(__doc__, contextlib.nullcontext(Faults(Laboratory(work, nets)))))
