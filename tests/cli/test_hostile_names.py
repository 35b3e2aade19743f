"""Names of strangers are text: no name of a file, class, key or config makes a line of its own or
commands a program.
"""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from certcli.cli.main import COMMANDS
from certcli.system.errors import CertvitError, plain_lines, plain_text
from tests.helpers.commands import Done, console

FORGED = "Proven 200 of 200"
NAMES = (
    f"x\n::error file=a::{FORGED}\n.png",
    f"::error::{FORGED}.png",
    "##[error]x.png",
    "a ##vso[task.complete]x.png",
    "x\x1b[31m\x1b]0;title\x07.png",
    "x\r::warning::y.png",
    "x\u202egnp.\u2066y.png",
    "x\u2028::error::y.png",
    "x\x85y\u200bz.png",
    "[red]x[bold] :smile:.png",
)
HOSTILE = "".join(name.removesuffix(".png") for name in NAMES)


def require_text(done: Done) -> None:
    """Assert that no line of the output is forged, and none commands a terminal or the program of a
    workflow.
    """
    for line in (done.out + done.err).split("\n"):
        assert line.isprintable(), line
        assert not line.lstrip().startswith("::"), line
        assert not re.search(r"##([a-z]*)\[", line), line
        assert not line.strip().startswith(FORGED), line


@pytest.mark.parametrize("name", NAMES)
def test_a_name_becomes_one_plain_line(name: str) -> None:
    shown = plain_text(name)
    assert shown.isprintable()
    assert plain_text(shown) == shown, "escaped twice is escaped once"
    assert plain_lines(f"{name}\nb").endswith("\nb")
    failure = CertvitError(f"no file {name}", f"give {name}")
    assert failure.message == str(failure) == plain_text(f"no file {name}")
    assert failure.hint.isprintable()


PLAIN = {
    **{
        text: text
        for text in ("a photo.png", "torchvision::nms", "a, b: c", "# 12 [x]", "≥ 1, 中文, é")
    },
    "a\x1bb\x9bc\udcff": "a\\x1bb\\x9bc\\udcff",
    "a\tc\x85": "a\\tc\\x85",
}
"""Text, and how it is shown."""


@pytest.mark.parametrize("text", PLAIN)
def test_plain_text_stays(text: str) -> None:
    assert plain_text(text) == PLAIN[text]
    assert plain_lines(f"{text}\nb") == f"{PLAIN[text]}\nb"


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"doctor"}))
@pytest.mark.parametrize("name", [NAMES[0], NAMES[1], HOSTILE], ids=["lines", "first", "all"])
@pytest.mark.parametrize("as_json", [False, True])
def test_no_command_is_forged_by_the_name_of_its_file(
    command: str, name: str, as_json: bool, workshop: Path, tmp_path: Path
) -> None:
    path = tmp_path / name.replace("/", "_")
    words = [command, str(path.name), *(["-o", "x.safetensors"] if command == "init" else [])]
    words += [str(path.name)] if command in ("predict", "merge") else []
    words += ["--json"] if as_json else []
    done = console(*words, folder=tmp_path)
    assert done.code != 0
    require_text(done)
    done = console(command, workshop / "plain.safetensors", f"--{name}", name, folder=tmp_path)
    require_text(done)


@pytest.fixture
def hostile_folder(workshop: Path, tmp_path: Path) -> Path:
    """A network and images, all of hostile names."""
    shutil.copy(workshop / "certified.safetensors", tmp_path / f"{HOSTILE}.safetensors")
    for label in ("0", "1"):
        for number, name in enumerate(NAMES):
            path = tmp_path / "d" / label / name
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 20 * number).save(path, format="PNG")
    return tmp_path


RUNS = {
    "lipschitz": ("--no-estimate",),
    "certify": ("--dataset", "digits", "--limit", 2, "-e", 0.1),
    "log": (),
    "predict": ("d",),
    "predict --json": ("d", "--json"),
    "attack": ("--dataset", "digits", "--limit", 2, "--steps", 1),
    "constrain": ("--dataset", "digits", "--limit", 8, "--beta", 0.1, "-o", "y\n::error::z.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("columns", [None, "40"])
@pytest.mark.parametrize("run", RUNS)
def test_no_output_is_forged_by_the_names_that_it_shows(
    run: str, columns: str | None, hostile_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    words = (run.split()[0], f"{HOSTILE}.safetensors", *RUNS[run])
    done = console(*words, folder=hostile_folder)
    assert done.code == 0, done.err
    require_text(done)


def test_the_images_of_predict_have_a_row_each(hostile_folder: Path) -> None:
    done = console("predict", f"{HOSTILE}.safetensors", "d", "--json", folder=hostile_folder)
    found = json.loads(done.out)["predictions"]
    assert {Path(row["image"]).name for row in found} == set(NAMES)
    done = console("predict", f"{HOSTILE}.safetensors", "d", folder=hostile_folder)
    assert "[red]x[bold] :smile:.png" in done.out
    assert sum("d/" in line for line in done.out.split("\n")) == len(found)


def test_configs_and_keys_are_text(tmp_path: Path) -> None:
    """Texts of a config.json, names of tensors and of keys in a file of torch.save."""
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for field in ("architecture", HOSTILE):
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "x", field: HOSTILE}))
        require_text(console("lipschitz", ".", folder=tmp_path))
    torch.save({HOSTILE: 3, "b": "x"}, tmp_path / "x.pth")
    require_text(console("lipschitz", "x.pth", folder=tmp_path))
    torch.save({HOSTILE: torch.zeros(3)}, tmp_path / "x.pth")
    require_text(console("lipschitz", "x.pth", folder=tmp_path))
