"""Outputs: what others put there stays, pipes and devices get the bytes, and files of killed runs are
deleted.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from certcli.checkpoint.file import read_tensors, write_shards
from certcli.checkpoint.outputs import Outputs
from certcli.checkpoint.tensor_files import INDEX, shards_of_index
from certcli.system import errors, files
from tests.helpers import commands, runs
from tests.helpers.grids import EVERY


@pytest.fixture
def folder(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(workshop / "plain.safetensors", tmp_path / runs.M)
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read_all(path: Path, found: dict[str, bytes]) -> threading.Thread:
    """Read a pipe to its end in another thread."""

    def read() -> None:
        found[path.name] = path.read_bytes()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("name", runs.WRITING)
def test_no_output_is_written_through_a_link(folder: Path, name: str) -> None:
    """The law over all output options, with --force: the link is replaced, its target stays."""
    options = runs.named_words(name)
    for _, file in options:
        (folder / "there" / file).write_bytes(b"old")
        (folder / file).symlink_to(Path("there", file))
    commands.certvit(*runs.RUNS[name], *[word for pair in options for word in pair])
    for _, file in options:
        assert not (folder / file).is_symlink()
        assert (folder / file).stat().st_size
        assert (folder / "there" / file).read_bytes() == b"old"


@pytest.mark.parametrize("turn", range(2 if EVERY else 1))
@pytest.mark.parametrize("name", runs.WRITING)
def test_what_appears_during_a_run_stays(
    folder: Path, name: str, turn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The law over all output options, without --force: another program takes the name after the
    command has looked, and neither its file nor what its link points to is touched: files and links
    in turn, each option by both under CERTVIT_SOUNDNESS.
    """
    check = Outputs.check

    def then_plant(outputs: Outputs) -> None:
        check(outputs)
        (folder / "theirs").write_bytes(b"precious")
        for _, file in options:
            if by_link:
                (folder / file).symlink_to("theirs")
            else:
                (folder / file).write_bytes(b"precious")

    monkeypatch.setattr(Outputs, "check", then_plant)
    words = [word for word in runs.RUNS[name] if word != "--force"]
    for place, option in enumerate(runs.named_words(name), len(name)):
        options = [option]
        by_link = place % 2 == turn
        done = commands.attempt(*words, *option)
        assert getattr(done.exception, "code", 0) in (2, 8), (option, done.output)
        assert (folder / option[1]).read_bytes() == b"precious"
        assert (folder / "theirs").read_bytes() == b"precious"
        assert not list(folder.glob(".*.tmp"))


def test_a_folder_without_hard_links_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    page = tmp_path / "page.html"
    for force in (False, True):
        files.require_absent(page, force)
        with files.atomic_file(page) as made:
            made.write_text("page")
    files.require_absent(tmp_path / "other.html", force=False)
    (tmp_path / "other.html").write_text("precious")
    with (
        pytest.raises(errors.OutputError, match="appeared"),
        files.atomic_file(tmp_path / "other.html") as made,
    ):
        made.write_text("page")
    assert (tmp_path / "other.html").read_text() == "precious"


@pytest.mark.parametrize(
    "name", [name for name in runs.WRITING if name not in ("adapt", "finetune")]
)
def test_every_output_streams_into_a_pipe_and_a_device(folder: Path, name: str) -> None:
    """The same bytes as in a file, and no --force; adapt and finetune keep a state beside their
    output, and refuse.
    """
    words = [word for word in runs.RUNS[name] if word != "--force"]
    options = runs.named_words(name)
    found = dict[str, bytes]()
    for _, file in options:
        os.mkfifo(folder / file)
    threads = [read_all(folder / file, found) for _, file in options]
    commands.certvit(*words, *[word for pair in options for word in pair])
    for thread in threads:
        thread.join()
    for _, file in options:
        assert found[file]
        assert files.is_stream(folder / file)
    if name in ("init", "lipschitz", "certify"):  # no wall time in what they write
        plain = [word for option, file in options for word in (option, f"there/{file}")]
        commands.certvit(*words, *plain)
        for option, file in options:
            if option not in ("--html", "--plot"):
                assert (folder / "there" / file).read_bytes() == found[file]


@pytest.mark.parametrize(("target", "code"), [("/dev/null", 0), ("/dev/full", 8)])
def test_a_device_is_written_to_and_stays(folder: Path, target: str, code: int) -> None:
    """Through a link of the test's own: what replaced the device would replace that link."""
    (folder / "device").symlink_to(target)
    commands.certvit("constrain", runs.M, *runs.FEW, "-o", "device", code=code)
    assert os.readlink(folder / "device") == target
    commands.certvit("certify", runs.M, *runs.FEW, "--records", "device", code=code)


@pytest.mark.parametrize("target", ["/proc/self/fd/1", "/dev/fd/1", "/dev/stdout"])
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors have no names here")
def test_an_open_descriptor_is_written_to_in_order(folder: Path, target: str) -> None:
    """stdout in a file: the page follows earlier text, and the file stays the one that the shell
    opened.
    """
    (folder / "link").symlink_to(target)
    told = folder / "told.txt"
    file = os.open(folder / "told.txt", os.O_WRONLY | os.O_CREAT)
    code = (
        "from pathlib import Path; from certcli.system.files import atomic_file\n"
        "print('before')\n"
        "with atomic_file(Path('link')) as made: made.write_text('page\\n')\n"
        "print('after')\n"
    )
    inode = told.stat().st_ino
    subprocess.run([sys.executable, "-c", code], stdout=file, check=True, cwd=folder)
    os.close(file)
    assert told.read_text() == "before\npage\nafter\n"
    assert told.stat().st_ino == inode
    assert (folder / "link").is_symlink()


def test_a_descriptor_that_is_only_read_and_a_reader_that_left(tmp_path: Path) -> None:
    source, sink = os.pipe()
    try:
        with pytest.raises(errors.OutputError, match="only be read"):
            files.require_absent(Path(f"/dev/fd/{source}"), force=True)
        os.close(source)
        with (
            pytest.raises(errors.OutputError, match="reader has left"),
            files.atomic_file(Path(f"/dev/fd/{sink}")) as made,
        ):
            made.write_text("page")
    finally:
        os.close(sink)


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_force_deletes_the_files_of_a_killed_run(tmp_path: Path) -> None:
    """A real SIGKILL between two files of an index; files of others with such names stay, and so
    does the last index's.
    """
    tensors = {f"t{number}": torch.full((8,), float(number)) for number in range(3)}
    index = tmp_path / INDEX
    write_shards(index, tensors, {}, shard_bytes=32)
    before = left(tmp_path)

    class Deadly(torch.Tensor):
        def cpu(self) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    others = {"t0": torch.zeros(8), "t1": torch.zeros(8).as_subclass(Deadly), "t2": torch.zeros(8)}
    killed = runs.fork(
        lambda: write_shards(index, others, {}, True, 32), Path(os.devnull), Path(os.devnull)
    )
    assert runs.exit_of_fork(killed) == -signal.SIGKILL
    assert len(left(tmp_path) - before) == 3, "a whole file, a torn one, and the index's"
    foreign = tmp_path / "model-00007-of-00009.safetensors"
    shutil.copy(next(tmp_path.glob("model-00001-of-*")), foreign)
    foreign.write_bytes(foreign.read_bytes().replace(b"certvit.part-of", b"certvit.part_of"))
    assert read_tensors(index)[0]["t2"][0] == 2
    write_shards(index, tensors, {}, True, 32)
    assert left(tmp_path) == {INDEX, foreign.name, *(path.name for path in shards_of_index(index))}
    assert len(shards_of_index(index)) == 3


def test_an_orphan_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    """A file of a killed run as an input is refused beside the index that would sweep it."""
    write_shards(tmp_path / INDEX, {"t": torch.zeros(8)}, {})
    (tmp_path / INDEX).unlink()
    part = next(tmp_path.glob("*.safetensors"))
    outputs = Outputs(force=True)
    outputs.reads("CKPT", part)
    outputs.writes("-o", tmp_path / INDEX)
    with pytest.raises(errors.UsageError, match="belongs to"):
        outputs.check()
