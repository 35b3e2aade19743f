"""Bad input: one line, the documented exit code, inputs untouched, nothing half-written; run by a
shell, as users do.
"""

import errno
import gc
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

from certcli.checkpoint import file, outputs
from certcli.checkpoint.tensor_files import INDEX
from certcli.cli.finetune import ending
from certcli.cli.finetune import run as training
from certcli.lipschitz.context import rules
from certcli.system.errors import NoBoundError, OutputError, UsageError
from tests.helpers import commands, runs

Spoil = Callable[[Path], object]
"""It spoils the folder of `m.safetensors`."""
FOREIGN = "/etc/c.safetensors"


def saved(folder: Path, tensors: dict[str, torch.Tensor], record: str | None = None) -> None:
    good = folder / "m.safetensors"
    metadata = {"certvit": record or file.Checkpoint.read(good).record.to_json()}
    safetensors.torch.save_file(
        {name: value.clone() for name, value in tensors.items()}, good, metadata
    )


def changed(**changes: torch.Tensor | None) -> Spoil:
    """The checkpoint with these tensors changed, or left out."""

    def spoil(folder: Path) -> None:
        tensors = file.Checkpoint.read(folder / "m.safetensors").tensors | {
            k.replace("__", "."): v for k, v in changes.items()
        }
        saved(folder, {name: value for name, value in tensors.items() if value is not None})

    return spoil


def unknown_architecture(folder: Path) -> None:
    checkpoint = file.Checkpoint.read(folder / "m.safetensors")
    text = checkpoint.record.to_json().replace("certvit_vit_digits", "vit_of_nobody")
    saved(folder, dict(checkpoint.tensors), text)


def cut(name: str) -> Spoil:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-1000])


def two_classes(folder: Path) -> None:
    for name in ("a", "b"):
        (folder / "two" / name).mkdir(parents=True)
        for index in range(3):
            Image.new("L", (8, 8), 9 * index).save(folder / "two" / name / f"{index}.png")


def several(spoil: Spoil) -> Spoil:
    """The checkpoint in three files and their index, then spoilt."""

    def made(folder: Path) -> None:
        checkpoint = file.Checkpoint.read(folder / "m.safetensors")
        size = sum(each.nbytes for each in checkpoint.tensors.values())
        checkpoint.write(folder / INDEX, shard_bytes=2 * size // 5)
        spoil(folder)

    return made


def index_of(**changes: object) -> Spoil:
    """The index with these entries of its weight_map."""

    def spoil(folder: Path) -> None:
        raw = json.loads((folder / INDEX).read_text())
        raw["weight_map"] |= changes
        (folder / INDEX).write_text(json.dumps(raw))

    return several(spoil)


def in_two(folder: Path) -> None:
    first, second = (safetensors.torch.load_file(folder / SHARD.replace("3", n, 1)) for n in "12")
    safetensors.torch.save_file(first | second, folder / SHARD.replace("3", "2", 1))


def nothing(folder: Path) -> None:
    pass


SHARD = "model-00003-of-00003.safetensors"
OUT = "-o out.safetensors"
CASES: list[tuple[str, Spoil, str, int, str]] = [
    ("missing file", lambda f: (f / "m.safetensors").unlink(), "lipschitz m.safetensors", 3, "m.safetensors"),
    ("truncated", cut("m.safetensors"), "certify m.safetensors --dataset digits", 3, "complete"),
    ("not safetensors", lambda f: (f / "m.safetensors").write_text("weights, honestly"),
     "attack m.safetensors --dataset digits", 3, "m.safetensors"),
    ("NaN weights", changed(pos_embed=torch.full((1, 5, 16), torch.nan)), "lipschitz m.safetensors", 3, "pos_embed"),
    ("no file", several(lambda f: (f / SHARD).unlink()), f"lipschitz {INDEX}", 3, "-00003-of"),
    ("file truncated", several(cut(SHARD)), f"constrain . {OUT}", 3, "model-00003-of-00003"),
    ("file above", index_of(a="../c.safetensors"), "lipschitz .", 3, "same folder"),
    ("file of another", index_of(a=FOREIGN), f"adapt {INDEX} -o {INDEX[6:]}", 3, "weight_map"),
    ("tensor nowhere", index_of(a=SHARD), f"lipschitz {INDEX}", 3, "lacks"),
    ("tensor twice", several(in_two), f"lipschitz {INDEX}", 3, "also holds"),
    ("no index", several(lambda f: (f / INDEX).write_text("weights")), f"lipschitz {INDEX}", 3, "malformed"),
    ("deep index", several(lambda f: (f / INDEX).write_text('{"a":' + "[" * 10**5)), "lipschitz .", 3, INDEX),
    ("many files", index_of(**{f"t{n}": f"{n}.safetensors" for n in range(10**4)}), "lipschitz .", 3, INDEX),
    ("one shard", several(nothing), f"lipschitz {SHARD}", 4, "model-00003-of-00003"),
    ("tensor missing", changed(head__bias=None), "lipschitz m.safetensors", 4, "head.bias"),
    ("wrong shape", changed(head__bias=torch.zeros(11)), f"adapt m.safetensors {OUT}", 4, "head.bias"),
    ("unknown architecture", unknown_architecture, "lipschitz m.safetensors", 4, "vit_of_nobody"),
    ("unknown dataset", nothing, "certify m.safetensors --dataset mnist3000", 6, "mnist3000"),
    ("unknown init", nothing, f"init vit_of_nobody {OUT}", 4, "vit_of_nobody"),
    ("existing output", lambda f: (f / "out.safetensors").write_text("precious"),
     f"constrain m.safetensors {OUT}", 2, "--force"),
    ("output is input", nothing, "constrain m.safetensors -o m.safetensors --force", 2, "never modified"),
    ("other classes", two_classes, "certify m.safetensors --dataset two", 6, "2 classes"),
    ("no folder", nothing, "adapt m.safetensors -o no/where.safetensors", 8, "no/where"),
    ("beta", nothing, f"constrain m.safetensors --beta -1 {OUT}", 2, "beta"),
    ("eta", nothing, f"constrain m.safetensors --eta 0 {OUT}", 2, "eta"),
    ("loss", nothing, f"finetune m.safetensors --loss magic {OUT}", 2, "magic"),
    ("attack name", nothing, "attack m.safetensors -a magic", 2, "magic"),
    ("prox", nothing, f"constrain m.safetensors --prox magic {OUT}", 2, "magic"),
    ("device", nothing, "lipschitz m.safetensors --device abacus", 2, "abacus"),
    ("option", nothing, "lipschitz m.safetensors --frobnicate", 2, "frobnicate"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "words", "code", "named"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_bad_input(
    workshop: Path, tmp_path: Path, spoil: Spoil, words: str, code: int, named: str
) -> None:
    shutil.copy(workshop / "plain.safetensors", tmp_path / "m.safetensors")
    spoil(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = commands.console(*words.split(), folder=tmp_path)
    assert done.code == code, (done.out, done.err)
    assert named in done.err
    assert "Traceback" not in done.err
    assert "regex" not in done.err
    assert done.err.count("certvit:") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_read_only_folder(
    workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is tried before any work is done; root, for whom every folder is writable, is told so
    here.
    """
    good = tmp_path / "m.safetensors"
    shutil.copy(workshop / "plain.safetensors", good)

    def refused(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if Path("/proc/self").exists():  # root may write there, by its permissions
        done = commands.console(
            "constrain", "m.safetensors", "-o", "/proc/x.safetensors", folder=tmp_path
        )
        assert (done.code, done.err.count("\n")) == (8, 2), done.err
        assert "/proc takes no files" in done.err
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    failure = commands.attempt("constrain", good).exception
    assert isinstance(failure, OutputError)
    assert failure.code == 8
    assert "read-only" in failure.message
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_network_without_a_bound_certifies_nothing(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 5 where a finite bound is demanded; a report that says why, and exit 0, where it is not."""
    path = str(workshop / "plain.safetensors")
    monkeypatch.delitem(rules.modules, torch.nn.GELU)
    monkeypatch.delitem(rules.functions, torch.nn.functional.gelu)
    report = commands.document("lipschitz", path, "--no-estimate")
    assert report["upper"] == "inf"
    assert "gelu" in report["why"]
    for words in (["certify", path], ["lipschitz", path, "--no-estimate", "--max", "1e300"]):
        failure = commands.attempt(*words).exception
        assert isinstance(failure, NoBoundError)
        assert failure.code == 5
        assert "mlp" in failure.message


ENDED = {
    "finetune": (
        "adapted",
        "--loss margin --optimiser stiefel --epochs 2 --limit 100",
        ending,
        "prove_trained",
    ),
    "adapt": (
        "plain",
        "--dataset digits --limit 20 --epochs 1 --distill 1",
        outputs,
        "discard_state",
    ),
}
"""The start of a run, its options, and what it does when its weights are on disk and its state is."""


@pytest.mark.parametrize("command", ENDED)
def test_a_run_that_ends_between_its_weights_and_its_evidence_is_resumed(
    command: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are on disk then, and plain --resume replaces them; another file stays."""
    source, given, module, next_step = ENDED[command]
    words = [command, str(workshop / f"{source}.safetensors"), *given.split(), "--quiet", "-o"]
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(module, next_step, stop)
        commands.attempt(*words, parts)
    gc.collect()  # the frames that hold the state's lock: a process that ends has none
    assert parts.exists()
    assert (tmp_path / "parts.state.safetensors").exists()
    assert commands.attempt(*words, parts).exit_code
    weights = parts.read_bytes()
    parts.write_bytes((workshop / "plain.safetensors").read_bytes())
    assert isinstance(commands.attempt(*words, parts, "--resume").exception, UsageError)
    parts.write_bytes(weights)
    resumed = commands.attempt(*words, parts, "--resume")
    assert resumed.exit_code == commands.attempt(*words, whole).exit_code
    assert parts.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [parts, whole]


def test_ctrl_c_leaves_the_last_good_state_and_resume_ends_where_one_run_ends(
    workshop: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A real SIGINT after the first epoch: exit 130, no output, a state that --resume goes on from."""
    given = "--loss margin --optimiser stiefel --epochs 2 --limit 100 --quiet"
    words = ["finetune", str(workshop / "adapted.safetensors"), *given.split(), "-o"]
    whole = tmp_path / "whole.safetensors"
    parts = tmp_path / "parts.safetensors"
    talk = runs.interrupted(
        tmp_path_factory.mktemp("streams"),
        [*words, str(parts)],
        training.state,
        "save_training_state",
    )
    assert "interrupted" in talk
    assert "Traceback" not in talk
    assert [path.name for path in tmp_path.iterdir()] == ["parts.state.safetensors"]
    # so short a training may end near chance, which is an exit code of its own
    resumed = commands.attempt(*words, parts, "--resume")
    assert resumed.exit_code == commands.attempt(*words, whole).exit_code
    assert parts.read_bytes() == whole.read_bytes()
    assert sorted(tmp_path.iterdir()) == [parts, whole]
