"""Before any work, the outputs of a command are compared with its inputs, with --force too; what is damaged
or edited of a state resumes nothing.
"""

import contextlib
import fcntl
import inspect
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from certcli.checkpoint import outputs as outputs_module
from certcli.checkpoint.outputs import (
    Outputs,
    discard_state,
    last_command,
    require_own_state,
)
from certcli.checkpoint.tensor_files import INDEX, PART_OF, orphans, read_metadata
from certcli.cli.main import COMMANDS
from certcli.cli.shared.command import Reads, Writes, info_of, spelling
from certcli.system.errors import UsageError
from tests.helpers.commands import attempt, certvit

M = "m.safetensors"


@pytest.fixture
def folder(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every kind of input, each under a name of its own, and the folder as the current one."""
    shutil.copy(workshop / "plain.safetensors", tmp_path / M)
    shutil.copy(workshop / "plain.safetensors", tmp_path / "other.safetensors")
    (tmp_path / "lines.jsonl").write_text("{}\n")
    (tmp_path / "photos" / "a").mkdir(parents=True)
    (tmp_path / "photos" / "a" / "1.png").write_bytes(b"an image")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and not p.is_symlink()
    }


def refused(folder: Path, words: list[str], named: str) -> None:
    """The command raises UsageError and changes no file."""
    before = contents(folder)
    outcome = attempt(*words, "--quiet")
    assert isinstance(outcome.exception, UsageError), (words, outcome.output, outcome.exception)
    assert named in outcome.exception.message, outcome.exception.message
    assert contents(folder) == before


def linked(targets: dict[str, str]) -> Callable[[Path], object]:
    """Return what makes links of these names."""
    return lambda folder: [(folder / name).symlink_to(to) for name, to in targets.items()]


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.safetensors")


def port(folder: Path) -> None:
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as made:
        made.bind("port.png")


def index_elsewhere(folder: Path) -> None:
    (folder / "there").mkdir()
    (folder / "there" / INDEX).write_text("{}")
    (folder / INDEX).symlink_to(folder / "there" / INDEX)


def renamed(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / M).rename(folder / name)


def existing(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"precious")


def from_the_hub(folder: Path) -> None:
    """A folder with model.safetensors and config.json, as downloads are."""
    (folder / "hub").mkdir()
    shutil.copy(folder / M, folder / "hub" / "model.safetensors")
    (folder / "hub" / "config.json").write_text("{}")


CASES: list[tuple[Callable[[Path], object], list[str], str]] = [
    # a state file beside the output would replace or delete an input
    (
        renamed("x.state.safetensors"),
        ["finetune", "x.state.safetensors", "-o", "x.safetensors"],
        "x.state",
    ),
    (
        renamed("z.state.safetensors"),
        ["adapt", "z.state.safetensors", "-o", "z.safetensors"],
        "z.state",
    ),
    (
        renamed("y.last.safetensors"),
        ["finetune", "y.last.safetensors", "-o", "y.safetensors", "--force"],
        "y.last",
    ),
    (
        existing("x.state.safetensors"),
        ["finetune", M, "-o", "x.safetensors", "--force"],
        "is not a state file",
    ),
    (
        existing("x.state.safetensors"),
        ["adapt", M, "-o", "x.safetensors", "--force"],
        "is not a state file",
    ),
    (existing("x.last.safetensors"), ["finetune", M, "-o", "x.safetensors"], "exists already"),
    # links and files of a hub's folder; the laws below check each option against each
    (str, ["lipschitz", M, "--plot", M], "m.safetensors"),
    (
        linked({"link.jsonl": M}),
        ["certify", M, "--records", "link.jsonl", "--force"],
        "is the input",
    ),
    (
        lambda folder: os.link(M, folder / "hard.png"),
        ["lipschitz", M, "--plot", "hard.png", "--force"],
        "is the input",
    ),
    (str, ["attack", M, "--records", M, "--resume"], "is the input"),
    (from_the_hub, ["constrain", "hub", "-o", "hub/model.safetensors", "--force"], "is the input"),
    (from_the_hub, ["lipschitz", "hub", "--plot", "hub/config.json", "--force"], "is the input"),
    (
        from_the_hub,
        ["lipschitz", "hub/model.safetensors", "--plot", "hub/../hub/config.json", "--force"],
        "the input",
    ),
    # two outputs, one file
    (str, ["certify", M, "--plot", "new.png", "--records", "./new.png"], "would both write"),
    # no files
    (port, ["lipschitz", M, "--plot", "port.png", "--force"], "is a socket"),
    (pipe, ["finetune", M, "-o", "pipe.safetensors"], "keeps others beside"),
    (pipe, ["adapt", M, "-o", "pipe.safetensors"], "keeps others beside"),
    (pipe, ["certify", M, "--records", "pipe.safetensors", "--resume"], "is no file"),
    (index_elsewhere, ["constrain", M, "-o", INDEX, "--force"], "out of its folder"),
    (str, ["lipschitz", M, "--plot", "photos", "--force"], "is a folder"),
    (
        linked({"gone.png": "nowhere.png"}),
        ["lipschitz", M, "--plot", "gone.png", "--force"],
        "leads nowhere",
    ),
    (
        linked({"one.png": "two.png", "two.png": "one.png"}),
        ["lipschitz", M, "--plot", "one.png", "--force"],
        "leads nowhere",
    ),
    (str, ["lipschitz", M, "--plot", "x" * 300 + ".png"], "too long"),
    (str, ["lipschitz", M, "--plot", "p.txt"], "a figure's name ends in .png"),
    # the same rule as for checkpoints: new, or --force
    (existing("p.png"), ["attack", M, "--plot", "p.png"], "exists already"),
]


@pytest.mark.parametrize(
    ("spoil", "words", "named"), CASES, ids=[" ".join(words) for _, words, _ in CASES]
)
def test_refused_before_any_work(
    folder: Path, spoil: Callable[[Path], object], words: list[str], named: str
) -> None:
    spoil(folder)
    refused(folder, words, named)


def options_marked(name: str, kind: type) -> list[tuple[str, object]]:
    return [
        (spelling(parameter.name, info_of(parameter.annotation))[-1], note)
        for parameter in inspect.signature(COMMANDS[name]).parameters.values()
        for note in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(note, kind)
    ]


def together(output: str, source: str) -> bool:
    """A query writes its answer and nothing else, and reads a network and the query alone."""
    query = ("--result", "--vnnlib")
    return source == "CKPT" or (output in query) == (source in query)


PAIRS = [
    (name, output, source)
    for name in COMMANDS
    for output, _ in options_marked(name, Writes)
    for source, note in options_marked(name, Reads)
    if not note.folder and together(output, source)
]


@pytest.mark.parametrize(
    ("name", "output", "source"), PAIRS, ids=[" ".join(pair) for pair in PAIRS]
)
def test_no_output_of_any_command_is_an_input_of_it(
    folder: Path, name: str, output: str, source: str
) -> None:
    """The law over every command: each option that writes against each that reads, --force given."""
    read = (
        M
        if source == "CKPT"
        else "lines.jsonl"
        if "record" in source or "certified" in source
        else "other.safetensors"
    )
    needs = {
        "certify": {"--denoiser": ["--method", "smoothing", "--sigma", "0.25"]},
        "finetune": {"--denoiser": ["--loss", "ce", "--noise", "0.25"]},
    }.get(name, {})
    second = ["photos"] if name == "merge" else []
    named = [] if source == "CKPT" else [source, read]
    second = ["--vnnlib", "lines.jsonl"] if (output, source) == ("--result", "CKPT") else second
    words = [name, M, *second, *named, output, read, "--force"]
    refused(
        folder,
        words + (needs.get(source, []) if (name, output) != ("attack", "--plot") else []),
        "is the input",
    )


FOLDERS = [
    (name, output, source)
    for name in COMMANDS
    for output, _ in options_marked(name, Writes)
    for source, note in options_marked(name, Reads)
    if note.folder and together(output, source)
]


@pytest.mark.parametrize(
    ("name", "output", "source"), FOLDERS, ids=[" ".join(words) for words in FOLDERS]
)
def test_no_output_of_any_command_is_one_of_its_images(
    folder: Path, name: str, output: str, source: str
) -> None:
    named = ["photos"] if source == "ADAPTER" else [source, "photos"]
    said = "among" if source != "ADAPTER" else "photos"
    refused(folder, [name, M, *named, output, "photos/a/1.png", "--force"], said)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_path_of_a_command_is_marked(name: str) -> None:
    """An option with a path is marked as read or written, so that it is compared."""
    for parameter in inspect.signature(COMMANDS[name]).parameters.values():
        if "Path" in str(parameter.annotation) and name != "log":
            notes = getattr(parameter.annotation, "__metadata__", ())
            assert any(isinstance(note, (Reads, Writes)) for note in notes), (name, parameter.name)


def test_an_index_is_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody finds the files beside it. A pipe in its place would be read for ever where this is
    not asked.
    """
    monkeypatch.setattr(outputs_module, "is_stream", lambda path: True)
    outputs = Outputs()
    outputs.writes("-o", tmp_path / INDEX)
    with pytest.raises(UsageError, match="no file"):
        outputs.check()


def state(path: Path, key: str, identity: str) -> None:
    safetensors.torch.save_file(
        {"a": torch.zeros(1)}, path, {key: json.dumps({"identity": identity})}
    )


def test_a_state_is_replaced_and_deleted_by_its_own_run_only(tmp_path: Path) -> None:
    path = tmp_path / "x.state.safetensors"
    require_own_state(path, "key", "mine", force=False)
    state(path, "key", "theirs")
    with pytest.raises(UsageError, match="another run"):
        require_own_state(path, "key", "mine", force=False)
    require_own_state(path, "key", "mine", force=True)
    discard_state(path, "key", "mine")
    assert path.exists()
    outputs = Outputs()
    outputs.keeps_state(path, "key")
    with pytest.raises(UsageError, match="is not a state file"):
        outputs.keeps_state(path, "other key")
    state(path, "key", "mine")
    require_own_state(path, "key", "mine", force=False)
    discard_state(path, "key", "mine")
    assert not path.exists()


def test_a_last_epoch_is_deleted_only_where_a_training_run_wrote_it(folder: Path) -> None:
    """--force replaces the files of an earlier run, and no other file of such a name."""
    words = ["finetune", M, "--dataset", "digits", "--loss", "ce", "--steps", "1", "--limit", "40"]
    words += ["--validation-limit", "20", "-o", "x.safetensors", "--force", "--quiet"]
    last = folder / "x.last.safetensors"
    last.write_bytes(b"precious")
    certvit(*words)
    assert last.read_bytes() == b"precious"
    assert last_command(last) is None
    shutil.copy(M, last)  # of a training run, by its lineage
    assert last_command(last) == "finetune"
    certvit(*words)
    assert not last.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"12345678",
        b"\xff" * 16,
        (2**40).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[[[[",
    ],
)
def test_metadata_of_other_files_is_empty(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    assert read_metadata(path) == {}
    assert read_metadata(tmp_path) == {}
    assert read_metadata(tmp_path / "missing") == {}


def test_orphans_are_a_killed_runs_files_and_nobody_elses(tmp_path: Path) -> None:
    """Of its own index, in no other one, and only where no living run writes the index."""

    def part(name: str, index: str) -> Path:
        path = tmp_path / name
        safetensors.torch.save_file({"x": torch.zeros(1)}, path, {PART_OF: index})
        return path

    killed = part("model-00001-of-00002.safetensors", INDEX)
    part("model-00002-of-00002.safetensors", "other.safetensors.index.json")
    part("photos-00001-of-00002.safetensors", INDEX)
    index = tmp_path / INDEX
    assert orphans(index) == [killed]
    running = tmp_path / f".{INDEX}.abcdefgh.tmp"
    running.mkdir()
    number = os.open(running, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        assert orphans(index) == []
    finally:
        os.close(number)
    assert orphans(index) == [killed]
    assert not running.exists()
    named = {"metadata": {}, "weight_map": {"x": killed.name}}
    (tmp_path / "other.safetensors.index.json").write_text(json.dumps(named))
    assert orphans(index) == []
