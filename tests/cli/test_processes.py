"""Several processes find what one finds, byte for byte, and end as one: two of gloo, and teams of
threads.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

from certcli.audit.schedule import run_by_team as in_turns
from certcli.checkpoint.file import Checkpoint
from certcli.cli import main
from certcli.cli.shared.output import Sink
from certcli.lipschitz.network import prove_checkpoint
from certcli.system import errors, processes
from tests.cli.several import run_plan
from tests.helpers import commands, grids, runs

CERTIFY = commands.words_typed("certify certified.safetensors --batch-size 32 -e 0.1 --limit 100")
SMOOTHING = commands.words_typed(
    "certify certified.safetensors --batch-size 32 -e 0.1 --method smoothing --limit 5"
)
SMOOTHING += commands.words_typed("-n 100 --n0 20 --sigma 0.1")
PATCH = commands.words_typed(
    "certify plain.safetensors --dataset digits --limit 8 --method patch --patch 1"
)
ATTACK = commands.words_typed(
    "attack plain.safetensors -a pgd-3 -a margin-pgd-3 -e 0.3 -e 1 --limit 28 --batch-size 12"
)
FINETUNE = commands.words_typed(
    "finetune certified.safetensors --dataset digits --loss margin -e 0.2 --json -q --epochs 2"
)
FINETUNE += commands.words_typed(
    "--limit 61 --batch-size 20"
)  # the last batch: one image for two processes
LIPSCHITZ = commands.words_typed(
    "lipschitz certified.safetensors --limit 5 --batch-size 1 --json -q"
)
AUDIT = commands.words_typed(
    "audit certified.safetensors --limit 6 --batch-size 2 -e 0.1 -a fgsm --json -q --method lipschitz"
)
AUDIT += commands.words_typed("--method smoothing --time-budget 10m")
ADAPT = commands.words_typed(
    "adapt plain.safetensors --dataset digits --limit 30 --keep 0.7 --json -q"
)
REFIT = commands.words_typed(
    "adapt plain.safetensors --dataset digits --limit 50 --goal certify --norm floor --batch-size 25"
)
REFIT += commands.words_typed("--epochs 1 --distill 1 --json -q")
CONSTRAIN = {
    "kept": commands.words_typed("constrain certified.safetensors --limit 30 --keep 0.9"),
    "met": commands.words_typed(
        "constrain plain.safetensors --limit 30 --eta 0.1 --layers head* --layers *mlp*"
    ),
}
"""Commands by the name of their output."""
RECORDS = {"certify": CERTIFY, "smoothing": SMOOTHING, "patch": PATCH, "attack": ATTACK}
"""Commands by the name of their file of records."""


def together(size: int, work: Callable[[processes.Team], Any]) -> list[Any]:
    """Return the result of `work`, or its exception, in each of `size` threads that are a team."""
    store = distributed.HashStore()
    found = [None] * size

    def one(rank: int) -> None:
        try:
            found[rank] = work(processes.Team(rank, size, store))
        except Exception as failure:
            found[rank] = failure  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize(
    ("size", "pieces", "stored"),
    [(1, 5, 2), (2, 7, 0), (3, 20, 6), (3, 2, 0), (2, 3, 3), (2, 0, 0)],
)
def test_pieces_come_back_in_order_each_found_once(size: int, pieces: int, stored: int) -> None:
    found: list[int] = []

    def find(piece: int) -> list[int]:
        found.append(piece)
        return [piece * piece]

    def work(team: processes.Team) -> list[tuple[bool, list[int]]]:
        first = list(
            team.deal(
                range(pieces), find, lambda piece: [piece * piece] if piece < stored else None
            )
        )
        assert team.agree(lambda: ["said", 1.5]) == ["said", 1.5]
        second = list(
            team.deal(range(3), lambda piece: [-piece])
        )  # another turn meets nothing of the first
        team.finish()
        return first + second

    leader, *others = together(size, work)
    assert leader == [(n >= stored, [n * n]) for n in range(pieces)] + [
        (True, [-n]) for n in range(3)
    ]
    assert others == [[]] * (size - 1)
    assert sorted(found) == list(range(stored, pieces))


def test_the_first_to_fail_speaks_and_all_end_with_its_code() -> None:
    def work(team: processes.Team) -> int | None:
        if team.rank == 1:
            code = team.fail(6)
            team.said()
            return code
        try:
            list(team.deal(range(10**6), lambda piece: piece))
        except processes.Ended as end:
            return team.fail(end.code)
        return None

    assert together(3, work) == [6, None, 6]
    assert processes.ALONE.fail(6) is None
    with pytest.raises(errors.UsageError):
        processes.Team(2, 2)


def test_a_process_that_was_killed_is_no_bug_of_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(**options: object) -> None:
        raise RuntimeError(
            "[/pytorch/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer"
        )

    monkeypatch.setattr(main, "program", lambda words: broken)
    monkeypatch.setattr(
        main, "_team_or_alone", lambda: processes.Team(0, 2, distributed.HashStore())
    )
    with pytest.raises(SystemExit) as end:
        main.run()
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("certvit: another process ended without a word\n")


def test_a_stage_of_an_audit_ends_for_all_alike() -> None:
    """What lies behind a piece that was broken off is dropped; what one process refuses, all
    refuse.
    """

    def late(team: processes.Team) -> tuple[list[int], bool]:
        return in_turns(team, 0.0 if team.rank == 1 else 60.0, lambda: team.rank)

    assert together(3, late) == [([0], True)] * 3

    def refused(team: processes.Team) -> int:
        if team.rank == 2:
            raise errors.DataError("image 7 is broken", "remove it")
        return team.rank

    found = together(3, lambda team: in_turns(team, 60.0, lambda: refused(team)))
    assert [(type(one), one.message, one.hint) for one in found] == [
        (errors.DataError, "image 7 is broken", "remove it")
    ] * 3


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@contextmanager
def two_processes(plan: list[list[str]], folder: Path) -> Iterator[None]:
    """Run the plan in two processes beside the block: under torchrun, and by default in forks,
    which import nothing anew.
    """
    if grids.EVERY:
        (folder / "plan.json").write_text(json.dumps(plan))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            running = subprocess.Popen(
                [*torchrun, Path(__file__).with_name("several.py"), "plan.json", "."],
                cwd=folder,
                stdout=out,
                stderr=err,
            )
            yield
            running.wait()
        return
    store = distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # as torchrun's agent has one
    place = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }

    def act(rank: int) -> None:
        os.environ.update(
            {name: str(value) for name, value in (place | {"RANK": rank, "WORLD_SIZE": 2}).items()}
        )
        os.chdir(folder)
        run_plan(plan, Path("."))

    numbers = [
        runs.fork(partial(act, rank), folder / "stdout", folder / "stderr") for rank in (0, 1)
    ]
    yield
    for number in numbers:
        runs.exit_of_fork(number)


@pytest.fixture(scope="module")
def both(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """Folders in which one process and two did the same, and the stderr of the two."""
    one = tmp_path_factory.mktemp("one")
    two = tmp_path_factory.mktemp("two")
    for folder in (one, two):
        for name in ("plain", "certified"):
            (folder / f"{name}.safetensors").symlink_to(workshop / f"{name}.safetensors")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(one)
        commands.certvit(*CERTIFY, "--records", "certify.jsonl")
        begun = (one / "certify.jsonl").read_bytes().splitlines(keepends=True)
        (two / "resumed.jsonl").write_bytes(
            b"".join(begun[:50]) + begun[50][:20]
        )  # interrupted in the midst of a line
        plan = [
            *([*words, "--records", f"{name}.jsonl", "-q"] for name, words in RECORDS.items()),
            [*CERTIFY, "--records", "resumed.jsonl", "--resume", "-q"],
            *([*words, "-o", f"{name}.safetensors", "-q"] for name, words in CONSTRAIN.items()),
            LIPSCHITZ,
            AUDIT,
            [*ADAPT, "-o", "adapted.safetensors"],
            [*REFIT, "-o", "refitted.safetensors"],
            [*FINETUNE, "-o", "tuned.safetensors"],
            [*FINETUNE, "-o", "resumed.safetensors", "--resume"],
            ["FAIL", *CERTIFY, "--records", "failed.jsonl", "-q", "--json"],
        ]
        record = Sink.record
        patch.setattr(Sink, "record", interrupt)
        assert isinstance(
            commands.attempt(*FINETUNE, "-o", "resumed.safetensors").exception, errors.Interrupted
        )
        patch.setattr(Sink, "record", record)
        shutil.copy("resumed.state.safetensors", two)
        with two_processes(plan, two):
            for name in ("smoothing", "patch", "attack"):
                commands.certvit(*RECORDS[name], "--records", f"{name}.jsonl", "-q")
            for name, words in CONSTRAIN.items():
                commands.certvit(*words, "-o", f"{name}.safetensors", "-q")
            for name, words in {
                "lipschitz": LIPSCHITZ, "audit": AUDIT, "adapted": [*ADAPT, "-o", "adapted.safetensors"],
                "refitted": [*REFIT, "-o", "refitted.safetensors"], "finetune": [*FINETUNE, "-o", "tuned.safetensors"],
            }.items():  # fmt: skip
                (one / f"{name}.json").write_text(commands.certvit(*words).stdout)
    return one, two, (two / "stderr").read_text()


def test_two_processes_write_the_bytes_of_one(both: tuple[Path, Path, str]) -> None:
    one, two, said = both
    for rank in (0, 1):
        assert json.loads((two / f"codes.{rank}.json").read_text()) == [0] * 13 + [6], said
    for name in RECORDS:
        texts = [(folder / f"{name}.jsonl").read_text() for folder in (one, two)]
        if name in ("smoothing", "patch"):  # what an image took is not what was found
            texts = [re.sub(r', "seconds": [0-9.e-]+', "", text) for text in texts]
        assert texts[0] == texts[1], name
    assert (two / "resumed.jsonl").read_bytes() == (one / "certify.jsonl").read_bytes()


def test_two_processes_constrain_to_the_bit(both: tuple[Path, Path, str]) -> None:
    one, two, _ = both
    start = (one / "certified.safetensors").read_bytes()
    for name in CONSTRAIN:
        written = (one / f"{name}.safetensors").read_bytes()
        assert (two / f"{name}.safetensors").read_bytes() == written != start, name


def test_two_processes_tell_the_same_bound_and_slope(both: tuple[Path, Path, str]) -> None:
    one, two, _ = both
    assert said_by(two, "lipschitz") == json.loads((one / "lipschitz.json").read_text())


def said_by(two: Path, command: str, output: str | None = None) -> dict:
    """The document of this command, of which there is one with this output."""
    lines = [
        json.loads(line)
        for line in (two / "stdout").read_text().splitlines()
        if line.startswith("{")
    ]
    (found,) = [
        each
        for each in lines
        if each.get("command") == command and output in (None, each.get("output"))
    ]
    return found


def without(document: Any, *names: str) -> Any:
    """The document without these keys, at any depth."""
    if isinstance(document, dict):
        return {key: without(value, *names) for key, value in document.items() if key not in names}
    return (
        [without(value, *names) for value in document] if isinstance(document, list) else document
    )


def test_two_processes_audit_as_one(both: tuple[Path, Path, str]) -> None:
    """All that fits into the budget; not what it took, nor how many images an attack takes
    together, which time decides.
    """
    one, two, _ = both
    alone = json.loads((one / "audit.json").read_text())
    measured = (
        "seconds",
        "computed",
        "attack",
        "withstood",
        "norm",
        "adversarial_prediction",
        "verdict",
        "headline",
        "date",
    )
    assert without(said_by(two, "audit"), *measured) == without(alone, *measured)
    found = said_by(two, "audit")["attack"]
    wanted = alone["attack"]
    assert found["clean"] == wanted["clean"]
    assert found["dataset"] == wanted["dataset"]
    if found["settings"] == wanted["settings"]:
        assert without(found, "seconds") == without(wanted, "seconds")


def test_two_processes_adapt_to_the_bit(both: tuple[Path, Path, str]) -> None:
    """Parts chosen for what they cost."""
    one, two, _ = both
    written = (one / "adapted.safetensors").read_bytes()
    assert (
        (two / "adapted.safetensors").read_bytes()
        == written
        != (one / "plain.safetensors").read_bytes()
    )
    found = said_by(two, "adapt", "adapted.safetensors")
    alone = json.loads((one / "adapted.json").read_text())
    assert without(found, "peak_memory_bytes") == without(alone, "peak_memory_bytes")


def test_two_processes_refit_as_one(both: tuple[Path, Path, str]) -> None:
    """Block by block with AdamW, then distilled. Equal bytes in nearly every run; a gradient of the
    patches' convolution has once ended in another digit (2e-9 of .3), as sums do where memory lies
    otherwise."""
    one, two, _ = both
    found, alone = (Checkpoint.read(folder / "refitted.safetensors") for folder in (two, one))
    assert (
        found.tensors.keys()
        == alone.tensors.keys()
        != Checkpoint.read(one / "plain.safetensors").tensors.keys()
    )
    for name, tensor in found.tensors.items():
        torch.testing.assert_close(tensor, alone.tensors[name], rtol=0, atol=1e-6)


def test_two_processes_learn_what_one_learns(both: tuple[Path, Path, str]) -> None:
    """Up to sums of float32 in another order: measured, 4e-8 of the loss and 3e-6 in the weights
    after 20 steps.
    """
    one, two, _ = both
    alone = [json.loads(line) for line in (one / "finetune.json").read_text().splitlines()]
    found = [
        json.loads(line)
        for line in (two / "stdout").read_text().splitlines()
        if line.startswith("{")
    ][4:9]
    first, second, done, resumed_second, resumed = found
    assert [first["loss"], second["loss"]] == pytest.approx(
        [epoch["loss"] for epoch in alone[:2]], rel=1e-5
    )
    assert resumed_second["loss"] == pytest.approx(alone[1]["loss"], rel=1e-5)
    wanted = Checkpoint.read(one / "tuned.safetensors").tensors
    for report in (done, resumed):
        written = Checkpoint.read(two / report["output"])
        for name, tensor in written.tensors.items():
            torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=1e-4)
        assert str(prove_checkpoint(written).upper) == report["upper_text"]
    assert not list(two.glob("*.state.safetensors"))


def test_two_processes_speak_once(both: tuple[Path, Path, str]) -> None:
    _, two, said = both
    assert said.count("image 7 is broken") == 1
    *results, failure = (two / "stdout").read_text().strip().splitlines()
    assert json.loads(failure) == {"error": "image 7 is broken", "hint": "remove it", "code": 6}
    assert sum("average radius" in line for line in results) == 3


def test_what_was_found_before_a_failure_is_gone_on_with(
    both: tuple[Path, Path, str], monkeypatch: Any
) -> None:
    one, two, _ = both
    monkeypatch.chdir(two)
    commands.certvit(*CERTIFY, "--records", "failed.jsonl", "--resume")
    assert Path("failed.jsonl").read_bytes() == (one / "certify.jsonl").read_bytes()
