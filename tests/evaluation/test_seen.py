"""Images that a network has seen: left out by default, and their share said where they are judged
all the same. Names of image files: beside their indexes wherever a dataset is a folder, and hostile
ones stay text.
"""

import json
import os
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
from certcli.images import datasets, folders, labelled
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
    images = datasets.load_dataset(str(tmp_path / "mixed"), Checkpoint.read(net).record.input)
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
    words = (*ATTACK[:1], workshop / "plain.safetensors", *ATTACK[1:], "--limit", 20)
    found = document(*words)
    assert (found["dataset"]["split"], found["seen"], found["doubts"]) == ("test", {}, [])
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


HOSTILE = ("=1+2.png", "<script>$\\x$.png", "a\x1b[31m\n\u202eb.png", os.fsdecode(b"\xff.png"))
"""A formula, a tag and mathematics, escapes, bytes that are no text."""
SHOWN = ("=1+2.png", "<script>$\\x$.png", "a\\x1b[31m\\n\\u202eb.png", "\\udcff.png")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory, certified: Checkpoint) -> Path:
    """Digits as files below test/CLASS; the first four have hostile names."""
    root = tmp_path_factory.mktemp("pictures") / "digits files"
    images = datasets.load_dataset("digits", certified.record.input, "test").limit(30)
    names = iter(HOSTILE)
    pairs = sorted(
        zip(*images.tensors(), strict=True), key=lambda pair: int(pair[1])
    )  # class 0 has three of the names
    for index, (pixels, label) in enumerate(pairs):
        folder = root / "test" / str(int(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels[0] * 255).round().byte().numpy()).save(
            folder / next(names, f"{index}.png"), "PNG"
        )
    return root


@pytest.fixture(scope="module")
def records(workshop: Path, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("named") / "certified.jsonl"
    document(
        "certify", workshop / "certified.safetensors", "--dataset", pictures, "--records", made
    )
    return made


def rows_of(records: Path) -> list[dict]:
    return [json.loads(line) for line in records.read_text().splitlines()[1:]]


def test_names_are_relative_printable_and_short(
    pictures: Path, certified: Checkpoint, tmp_path: Path
) -> None:
    images = datasets.load_dataset(str(pictures), certified.record.input)
    names = images.file_of
    assert list(names) == list(range(30))
    assert all(name.isprintable() and name.startswith("test/") for name in names.values())
    assert {name.split("/", 2)[2] for name in names.values()} >= set(SHOWN)
    part = images.limit(7)
    assert part.file_of == {index: names[index] for index in part.indices.tolist()}
    assert part.select([3]).file_of == {int(part.indices[3]): names[int(part.indices[3])]}
    below = datasets.load_dataset(str(pictures / "test"), certified.record.input)
    assert {index: f"test/{name}" for index, name in below.file_of.items()} == names
    assert datasets.load_dataset("digits", certified.record.input).file_of == {}
    deep = Path(*["d" * 200] * 4)
    for label in "ab":
        (tmp_path / label / deep).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / label / deep / "x.png")
    long = datasets.load_dataset(str(tmp_path), certified.record.input).file_of.values()
    assert {len(name) for name in long} == {folders.LONGEST_NAME}
    assert all(name.startswith("…") and name.endswith("/x.png") for name in long)


def test_records_name_their_files_and_an_edited_name_is_refused(
    workshop: Path, pictures: Path, records: Path, tmp_path: Path
) -> None:
    checkpoint = workshop / "certified.safetensors"
    rows = rows_of(records)
    about = (checkpoint, "--dataset", pictures)
    assert all(
        pictures.joinpath(row["file"]).is_file()
        for row in rows
        if row["file"].rpartition("/")[2].isalnum()
    )
    assert {row["file"].rpartition("/")[2] for row in rows} >= set(SHOWN)
    named = {row["index"]: row["file"] for row in rows}
    assert all(
        named[claim["number"]] in claim["entry"]
        for claim in document("verify", records, *about, "--sample", 2)["claims"]
    )
    attacked = tmp_path / "attacked.jsonl"
    words = (
        "attack",
        checkpoint,
        "--dataset",
        pictures,
        "-a",
        "fgsm",
        "-e",
        2,
        "--no-checks",
        "--records",
        attacked,
    )
    document(*words, "--plot", tmp_path / "gallery.svg")  # a name with dollars is no mathematics
    assert (tmp_path / "gallery.svg").stat().st_size > 10_000
    assert [row["file"] for row in rows_of(attacked)] == [row["file"] for row in rows]
    # a folder of splits and one of them are the same images
    document(
        "attack",
        checkpoint,
        "--dataset",
        pictures / "test",
        "-a",
        "fgsm",
        "--only-certified",
        records,
        "--no-checks",
    )
    edited = tmp_path / "edited.jsonl"
    old = tmp_path / "old.jsonl"
    edited.write_text(records.read_text().replace(rows[9]["file"], "test/0/other.png"))
    old.write_text("".join(json.dumps({k: v for k, v in json.loads(line).items() if k != "file"}) + "\n"
                           for line in records.read_text().splitlines()))  # fmt: skip
    failure = attempt("verify", edited, *about).exception
    assert "image 9 is test/0/other.png; its pixels are those of test/" in str(failure)
    assert document("verify", old, *about, "--sample", 1)["counts"]["refuted"] == 0
