"""Bad input: one line, the documented exit code, inputs untouched, nothing half-written; run by a shell, as users do."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.shards import INDEX
from certcli.lipschitz.table import rules
from certcli.system.errors import NoBoundError, OutputError
from tests.helpers.commands import attempt, console, document
from tests.helpers.interrupted import interrupted


def missing(folder: Path, good: Path) -> None:
    good.unlink()


def truncated(folder: Path, good: Path) -> None:
    good.write_bytes(good.read_bytes()[:-1000])


def not_safetensors(folder: Path, good: Path) -> None:
    good.write_text("weights, honestly")


def nan_weights(folder: Path, good: Path) -> None:
    checkpoint = Checkpoint.read(good)
    tensors = {name: value.clone() for name, value in checkpoint.tensors.items()}
    tensors["pos_embed"][0, 0, 0] = torch.nan
    safetensors.torch.save_file(tensors, good, {"certvit": checkpoint.record.to_json()})


def without(name: str) -> Callable[[Path, Path], None]:
    def spoil(folder: Path, good: Path) -> None:
        checkpoint = Checkpoint.read(good)
        tensors = {key: value.clone() for key, value in checkpoint.tensors.items() if key != name}
        safetensors.torch.save_file(tensors, good, {"certvit": checkpoint.record.to_json()})

    return spoil


def wrong_shape(folder: Path, good: Path) -> None:
    checkpoint = Checkpoint.read(good)
    tensors = {**checkpoint.tensors, "head.bias": torch.zeros(11)}
    safetensors.torch.save_file(tensors, good, {"certvit": checkpoint.record.to_json()})


def unknown_architecture(folder: Path, good: Path) -> None:
    checkpoint = Checkpoint.read(good)
    text = checkpoint.record.to_json().replace("certvit_vit_digits", "vit_of_nobody")
    safetensors.torch.save_file(dict(checkpoint.tensors), good, {"certvit": text})


def existing_output(folder: Path, good: Path) -> None:
    (folder / "out.safetensors").write_text("precious")


def two_classes(folder: Path, good: Path) -> None:
    from PIL import Image

    for name in ("a", "b"):
        (folder / "two" / name).mkdir(parents=True)
        for index in range(3):
            Image.new("L", (8, 8), 9 * index).save(folder / "two" / name / f"{index}.png")


def several(spoil: Callable[[Path], object]) -> Callable[[Path, Path], None]:
    """The checkpoint in three files and their index, then spoilt."""

    def made(folder: Path, good: Path) -> None:
        checkpoint = Checkpoint.read(good)
        checkpoint.write(folder / INDEX, shard_bytes=2 * sum(each.nbytes for each in checkpoint.tensors.values()) // 5)
        spoil(folder)

    return made


def index_of(**changes: object) -> Callable[[Path], object]:
    """The index with these entries of its weight_map."""

    def spoil(folder: Path) -> None:
        raw = json.loads((folder / INDEX).read_text())
        raw["weight_map"] |= changes
        (folder / INDEX).write_text(json.dumps(raw))

    return spoil


def in_two(folder: Path) -> None:
    first, second = (safetensors.torch.load_file(folder / f"model-0000{n}-of-00003.safetensors") for n in (1, 2))
    safetensors.torch.save_file(first | second, folder / "model-00002-of-00003.safetensors")


def shortened(folder: Path) -> None:
    truncated(folder, folder / "model-00003-of-00003.safetensors")


def nothing(folder: Path, good: Path) -> None:
    pass


CASES: list[tuple[str, Callable[[Path, Path], None], list[str], int, str]] = [
    ("missing file", missing, ["lipschitz", "m.safetensors"], 3, "m.safetensors"),
    ("truncated", truncated, ["certify", "m.safetensors", "--dataset", "digits"], 3, "complete"),
    ("not safetensors", not_safetensors, ["attack", "m.safetensors", "--dataset", "digits"], 3, "m.safetensors"),
    ("NaN weights", nan_weights, ["lipschitz", "m.safetensors"], 3, "pos_embed"),
    (
        "no file",
        several(lambda f: (f / "model-00002-of-00003.safetensors").unlink()),
        ["lipschitz", INDEX],
        3,
        "-00002-of",
    ),
    ("file truncated", several(shortened), ["constrain", ".", "-o", "out.safetensors"], 3, "model-00003-of-00003"),
    ("file above", several(index_of(a="../c.safetensors")), ["lipschitz", "."], 3, "same folder"),
    ("file of another", several(index_of(a="/etc/c.safetensors")), ["adapt", INDEX, "-o", INDEX[6:]], 3, "weight_map"),
    ("tensor nowhere", several(index_of(a="model-00001-of-00003.safetensors")), ["lipschitz", INDEX], 3, "lacks"),
    ("tensor twice", several(in_two), ["lipschitz", INDEX], 3, "also holds"),
    ("no index", several(lambda f: (f / INDEX).write_text("weights")), ["lipschitz", INDEX], 3, "malformed"),
    ("deep index", several(lambda f: (f / INDEX).write_text('{"a":' + "[" * 10**5)), ["lipschitz", "."], 3, INDEX),
    (
        "many files",
        several(index_of(**{f"t{n}": f"{n}.safetensors" for n in range(10**4)})),
        ["lipschitz", "."],
        3,
        INDEX,
    ),
    (
        "one shard",
        several(lambda f: None),
        ["lipschitz", "model-00001-of-00003.safetensors"],
        4,
        "model-00001-of-00003",
    ),
    ("tensor missing", without("head.bias"), ["lipschitz", "m.safetensors"], 4, "head.bias"),
    ("wrong shape", wrong_shape, ["adapt", "m.safetensors", "-o", "out.safetensors"], 4, "head.bias"),
    ("unknown architecture", unknown_architecture, ["lipschitz", "m.safetensors"], 4, "vit_of_nobody"),
    ("unknown dataset", nothing, ["certify", "m.safetensors", "--dataset", "mnist3000"], 6, "mnist3000"),
    ("unknown init", nothing, ["init", "vit_of_nobody", "-o", "out.safetensors"], 4, "vit_of_nobody"),
    ("existing output", existing_output, ["constrain", "m.safetensors", "-o", "out.safetensors"], 2, "--force"),
    ("output is input", nothing, ["constrain", "m.safetensors", "-o", "m.safetensors", "--force"], 2, "never modified"),
    ("other classes", two_classes, ["certify", "m.safetensors", "--dataset", "two"], 6, "2 classes"),
    ("no folder", nothing, ["adapt", "m.safetensors", "-o", "no/where.safetensors"], 8, "no/where"),
    ("beta", nothing, ["constrain", "m.safetensors", "--beta", "-1", "-o", "out.safetensors"], 2, "beta"),
    ("eta", nothing, ["constrain", "m.safetensors", "--eta", "0", "-o", "out.safetensors"], 2, "eta"),
    ("loss", nothing, ["finetune", "m.safetensors", "--loss", "magic", "-o", "out.safetensors"], 2, "magic"),
    ("attack name", nothing, ["attack", "m.safetensors", "-a", "magic"], 2, "magic"),
    ("prox", nothing, ["constrain", "m.safetensors", "--prox", "magic", "-o", "out.safetensors"], 2, "magic"),
    ("device", nothing, ["lipschitz", "m.safetensors", "--device", "abacus"], 2, "abacus"),
    ("option", nothing, ["lipschitz", "m.safetensors", "--frobnicate"], 2, "frobnicate"),
    ("max gate", nothing, ["lipschitz", "m.safetensors", "--no-estimate", "--max", "1"], 7, "--max"),
    ("certified gate", nothing, ["certify", "m.safetensors", "-e", "0.5", "--min-certified", "0.9"], 7, "0.9"),
    ("robust gate", nothing, ["attack", "m.safetensors", "-a", "fgsm", "-e", "2", "--min-robust", "0.99"], 7, "0.99"),
]


@pytest.mark.parametrize(("name", "spoil", "words", "code", "named"), CASES, ids=[case[0] for case in CASES])
def test_bad_input(
    workshop: Path,
    tmp_path: Path,
    name: str,
    spoil: Callable[[Path, Path], None],
    words: list[str],
    code: int,
    named: str,
) -> None:
    good = tmp_path / "m.safetensors"
    shutil.copy(workshop / "plain.safetensors", good)
    spoil(tmp_path, good)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = console(*words, folder=tmp_path)
    assert done.code == code, (done.out, done.err)
    assert named in done.err
    assert "Traceback" not in done.err
    assert "regex" not in done.err
    if code != 2 or name not in ("option",):
        assert done.err.count("certvit:") == 1
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


def test_json_errors_are_one_object_on_stdout(tmp_path: Path) -> None:
    done = console("lipschitz", "nowhere.safetensors", "--json", folder=tmp_path)
    assert done.code == 3
    error = json.loads(done.out)
    assert error["code"] == 3
    assert "nowhere" in error["error"]


def test_a_read_only_folder(workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is tried before any work is done; root, for whom every folder is writable, is told so here."""
    good = tmp_path / "m.safetensors"
    shutil.copy(workshop / "plain.safetensors", good)

    def refused(dir: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    if Path("/proc/self").exists():  # root may write there, by its permissions
        done = console("constrain", "m.safetensors", "-o", "/proc/x.safetensors", folder=tmp_path)
        assert (done.code, done.err.count("\n")) == (8, 2), done.err
        assert "/proc takes no files" in done.err
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    failure = attempt("constrain", good).exception
    assert isinstance(failure, OutputError)
    assert failure.code == 8
    assert "read-only" in failure.message
    assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"]


def test_a_network_without_a_bound_certifies_nothing(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 5 where a finite bound is demanded; a report that says why, and exit 0, where it is not."""
    monkeypatch.delitem(rules.modules, torch.nn.GELU)
    monkeypatch.delitem(rules.functions, torch.nn.functional.gelu)
    path = str(workshop / "plain.safetensors")
    report = document("lipschitz", path, "--no-estimate")
    assert report["upper"] == "inf"
    assert "gelu" in report["why"]
    for words in (["certify", path], ["lipschitz", path, "--no-estimate", "--max", "1e300"]):
        failure = attempt(*words).exception
        assert isinstance(failure, NoBoundError)
        assert failure.code == 5
        assert "mlp" in failure.message


def test_ctrl_c_leaves_the_last_good_state_and_resume_ends_where_one_run_ends(workshop: Path, tmp_path: Path) -> None:
    """A real process, a real SIGINT after the first epoch: exit 130, no output file, a state that --resume goes on from."""
    words = [
        "finetune",
        str(workshop / "adapted.safetensors"),
        "--loss",
        "margin",
        "--optimiser",
        "stiefel",
        "--epochs",
        "2",
        "--limit",
        "300",
    ]
    whole, parts = tmp_path / "whole.safetensors", tmp_path / "parts.safetensors"
    state = tmp_path / "parts.state.safetensors"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shell = [sys.executable, "-c", "from certcli.cli.main import run; run()", *words, "--quiet"]
    talk = interrupted("certcli.finetune.state", [*words, "--quiet", "-o", str(parts)])
    assert "interrupted" in talk
    assert "Traceback" not in talk
    assert sorted(path.name for path in tmp_path.iterdir()) == [state.name]
    for arguments in ([*shell, "-o", str(parts), "--resume"], [*shell, "-o", str(whole)]):
        subprocess.run(arguments, check=True, env=environment)
    assert parts.read_bytes() == whole.read_bytes()
    assert not state.exists()
