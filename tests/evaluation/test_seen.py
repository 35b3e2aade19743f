"""Images that a network has seen: left out by default, and their share said where they are judged
all the same.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import SEEN, LineageStep
from certcli.evaluation import image_doubts
from certcli.images import datasets, labelled
from tests.helpers.commands import attempt, certvit, document
from tests.helpers.workshop import shape


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flat folder of ten classes of five images: training takes 45, and leaves 5 out."""
    root = tmp_path_factory.mktemp("images") / "flat"
    generator = torch.Generator().manual_seed(0)
    for label in range(10):
        (root / str(label)).mkdir(parents=True)
        for number in range(5):
            pixels = torch.randint(256, (8, 8), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(root / str(label) / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def net(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("nets")
    certvit("init", "certvit_vit_digits", *shape(), "-o", where / "i.safetensors")
    words = ("finetune", where / "i.safetensors", "--dataset", folder, "--loss", "ce", "--steps", 2)
    certvit(*words, "-o", where / "n.safetensors")
    return where / "n.safetensors"


ATTACK = ("attack", "-a", "fgsm", "-e", 0.1, "--no-checks")
CERTIFY = ("certify", "--method", "smoothing", "--n0", 4, "--samples", 20, "-e", 0.01)
AUDIT = ("audit", "--time-budget", "10m", "-a", "fgsm", "-e", 0.1, "--method", "lipschitz")
JUDGES = {"attack": ATTACK, "certify": CERTIFY, "audit": AUDIT}


def judged(command: str, net: Path, *words: object) -> dict[str, Any]:
    name, *usual = JUDGES[command]
    return document(name, net, *usual, *words)


@pytest.mark.parametrize("command", JUDGES)
def test_what_training_left_out_is_judged_and_else_the_share_is_said(
    net: Path, folder: Path, command: str
) -> None:
    found = judged(command, net, "--dataset", folder)
    assert (found["dataset"]["split"], found["dataset"]["images"]) == ("val", 5)
    assert not any("training image" in line for line in found["doubts"])
    for split, count, of in (("all", 45, 50), ("train", 45, 45)):
        found = judged(command, net, "--dataset", folder, "--split", split)
        assert found["dataset"]["images"] == of
        told = f"{count} of these {of} images are training images"
        assert found["doubts"][0].startswith(told)
        assert command == "audit" or found["seen"] == {"training": {"images": count, "exact": True}}
    name, *usual = JUDGES[command]
    assert attempt(name, net, *usual, "--dataset", folder, "--split", split).stdout.startswith(told)


def test_another_folder_with_some_of_the_files(net: Path, folder: Path, tmp_path: Path) -> None:
    """Known by their pixels, whatever they are called, and in another format."""
    generator = torch.Generator().manual_seed(1)
    trained = datasets.load_dataset(str(folder), Checkpoint.read(net).record.input, "train")
    paths = sorted(folder.glob("*/*.png"))
    for label in range(10):
        (tmp_path / "mixed" / str(label)).mkdir(parents=True)
        mine = [path for path in paths if path.parent.name == str(label)]
        Image.open(mine[0]).save(tmp_path / "mixed" / str(label) / "old.bmp")
        pixels = torch.randint(256, (8, 8), generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(tmp_path / "mixed" / str(label) / "new.png")
    record = Checkpoint.read(net).record
    images = datasets.load_dataset(str(tmp_path / "mixed"), record.input)
    known = set(trained.pixel_digests.values())
    count = sum(digest in known for digest in images.pixel_digests.values())
    assert 5 <= count <= 10
    found = judged("attack", net, "--dataset", tmp_path / "mixed")
    assert found["dataset"]["images"] == 20
    assert found["seen"] == {"training": {"images": count, "exact": True}}


@pytest.mark.parametrize("command", ["adapt", "constrain"])
def test_calibration_images_are_said(net: Path, folder: Path, tmp_path: Path, command: str) -> None:
    given = {"adapt": ("--goal", "certify", "--epochs", 1), "constrain": ("--eta", 0.1)}[command]
    made = tmp_path / "m.safetensors"
    done = attempt(command, net, "--dataset", folder, "--limit", 20, *given, "-o", made)
    assert done.exit_code == 0, (done.output, done.exception)
    kept = Checkpoint.read(made).record.lineage[-1].parameters[SEEN]
    found = judged("attack", made, "--dataset", folder, "--split", "all")
    assert found["seen"]["calibration"] == {"images": kept["images"], "exact": True}
    assert found["seen"]["training"] == {"images": 45, "exact": True}


def spoilt(step: LineageStep, kept: object) -> LineageStep:
    return replace(step, parameters={**step.parameters, SEEN: kept})


UNREADABLE: dict[str, Callable[[LineageStep], LineageStep]] = {
    "an old file": lambda step: replace(
        step, parameters={k: v for k, v in step.parameters.items() if k != SEEN}
    ),
    "a number": lambda step: spoilt(step, 3),
    "no digests": lambda step: spoilt(step, {**step.parameters[SEEN], "digests": "?"}),
    "a field too many": lambda step: spoilt(step, {**step.parameters[SEEN], "x": 1}),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_lineage_without_readable_digests(
    net: Path, folder: Path, tmp_path: Path, kind: str
) -> None:
    """The dataset's name is what is left: the same default, and a doubt instead of a share."""
    checkpoint = Checkpoint.read(net)
    *before, last = checkpoint.record.lineage
    record = replace(checkpoint.record, lineage=(*before, UNREADABLE[kind](last)))
    replace(checkpoint, record=record).write(tmp_path / "old.safetensors")
    found = judged("attack", tmp_path / "old.safetensors", "--dataset", folder)
    assert (found["dataset"]["images"], found["doubts"]) == (5, [])
    found = judged("attack", tmp_path / "old.safetensors", "--dataset", folder, "--split", "all")
    assert (found["seen"], len(found["doubts"])) == ({}, 1)
    assert "was trained on 45 images of flat" in found["doubts"][0]


def test_built_in_splits_are_judged_as_before(workshop: Path) -> None:
    found = document(
        "attack",
        workshop / "plain.safetensors",
        "-a",
        "fgsm",
        "-e",
        0.1,
        "--no-checks",
        "--limit",
        20,
    )
    assert (found["dataset"]["split"], found["seen"], found["doubts"]) == ("test", {}, [])
    words = (
        "attack",
        workshop / "plain.safetensors",
        "-a",
        "fgsm",
        "-e",
        0.1,
        "--no-checks",
        "--limit",
        20,
    )
    found = document(*words, "--split", "train")
    assert found["seen"] == {"training": {"images": 20, "exact": True}}


def test_of_many_images_a_sample_is_kept_and_the_share_is_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 2,000 training images 500 are listed; of 1,000 others, half of them seen, about 500 are
    said to be.
    """
    monkeypatch.setattr(image_doubts, "LISTED", 500)
    pixels = torch.rand(2500, 1, 2, 2, generator=torch.Generator().manual_seed(2))
    labels = torch.arange(2500) % 10
    every = labelled.Images(
        "many",
        "all",
        tuple("0123456789"),
        labels,
        torch.arange(2500),
        lambda asked: pixels[list(asked)],
    )
    kept = image_doubts.kept_of(every.select(range(2000)))
    assert (kept["images"], len(json.dumps(kept)) < 500 * 8 + 100) == (2000, True)
    step = image_doubts.Seen(
        "finetune", "many", "train", 2000, image_doubts.listed_in(kept["digests"])
    )
    (share,) = image_doubts.seen_shares([step], every.select(range(1500, 2500)))
    assert not share.exactly
    assert (
        abs(share.images - 500) < 150
    )  # 125 of 500 are expected to be found, with a deviation of 9
    assert str(share).startswith("about ")
    assert image_doubts.seen_shares([step], every.select(range(2000, 2500))) == []
