"""Datasets: fixed splits, fixed order, honest labels, clear refusals. Which number a class has, and which
files are left out and counted.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from certcli.checkpoint.record import InputSpec
from certcli.images import datasets
from certcli.images.folders import image_files, load_folder
from certcli.images.labelled import Images
from certcli.system.errors import DataError

DIGITS = InputSpec((1, 8, 8), (0.5,), (0.5,))
COLOUR = InputSpec((3, 16, 16), (0.5,) * 3, (0.5,) * 3)


def make_folder(root: Path, classes: dict[str, int]) -> Path:
    for number, (name, count) in enumerate(classes.items()):
        (root / name).mkdir(parents=True)
        for index in range(count):
            Image.new("RGB", (20, 24), (number * 40, index * 20, 7)).save(
                root / name / f"{index}.png"
            )
    return root


def test_digits_split_is_fixed_and_disjoint() -> None:
    parts = {
        split: datasets.load_dataset("digits", DIGITS, split) for split in ("train", "val", "test")
    }
    assert {split: len(images) for split, images in parts.items()} == {
        "train": 1261,
        "val": 140,
        "test": 396,
    }
    seen = [
        tuple(image.flatten().tolist()) for part in parts.values() for image in part.tensors()[0]
    ]
    assert len(set(seen)) == len(seen), "an image is in two splits"
    for part in parts.values():
        counts = torch.bincount(part.labels, minlength=10)
        assert int(counts.max() - counts.min()) <= 0.1 * len(part)
        pixels, _ = part.tensors()
        assert (float(pixels.min()), float(pixels.max())) == (0.0, 1.0)


def test_limit_is_seeded_balanced_and_keeps_indices() -> None:
    images = datasets.load_dataset("digits", DIGITS, "test")
    chosen = images.limit(50, seed=1)
    assert torch.equal(chosen.indices, images.limit(50, seed=1).indices)
    assert not torch.equal(chosen.indices, images.limit(50, seed=2).indices)
    assert torch.bincount(chosen.labels).tolist() == [5] * 10
    (index, pixels, label), *_ = [(i, p, y) for i, p, y in chosen.batches(1)]
    whole, labels = images.tensors()
    assert torch.equal(pixels[0], whole[int(index)])
    assert int(label) == int(labels[int(index)])
    few = images.limit(5, seed=3).labels.tolist()
    assert len(set(few)) == 5
    assert {tuple(sorted(images.limit(5, seed=s).labels.tolist())) for s in range(5)} != {
        (0, 1, 2, 3, 4)
    }


def test_images_of_another_size_are_resized_with_a_note() -> None:
    images = datasets.load_dataset("digits", COLOUR, "val")
    pixels, _ = images.tensors()
    assert pixels.shape[1:] == (3, 16, 16)
    assert "resized" in images.note
    assert 0 <= float(pixels.min()) <= float(pixels.max()) <= 1


def test_folder_of_classes(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pets", {"cat": 4, "dog": 6})
    images = datasets.load_dataset(str(folder), COLOUR)
    assert images.classes == ("cat", "dog")
    assert images.labels.tolist() == [0] * 4 + [1] * 6
    pixels, _ = images.tensors()
    assert pixels.shape == (10, 3, 16, 16)
    train, val = (datasets.load_dataset(str(folder), COLOUR, split) for split in ("train", "val"))
    assert len(train) + len(val) == 10
    assert not set(train.indices.tolist()) & set(val.indices.tolist())


def test_threads_that_read_ahead_change_nothing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"cat": 5, "dog": 4})
    broken = folder / "dog" / "zz.png"
    broken.write_bytes(b"no image")

    def read_by(workers: int) -> datasets.Images:
        images = datasets.load_dataset(str(folder), COLOUR)
        images.ahead.workers = workers
        return images

    def pixels(workers: int) -> torch.Tensor:
        images = read_by(workers).select([8, 2, 2, 7, 0, 1])
        found = [images.fetch([4])]
        images.expect([0, 1])  # then only the second is fetched, with others
        found += [images.fetch([1, 3]), *(batch for _, batch, _ in images.batches(4))]
        return torch.cat(found)

    for workers in (1, 3):
        assert torch.equal(pixels(workers), pixels(0))
    images = read_by(2)
    images.expect([9])  # the broken one raises only where it is fetched
    assert len(images.fetch([8])) == 1
    for _ in range(2):
        with pytest.raises(DataError, match="zz"):
            images.fetch([9])
    assert images.digests_at([0, 1]) == read_by(0).digests_at([0, 1])


def test_folder_with_splits(tmp_path: Path) -> None:
    for split, count in (("train", 10), ("test", 2)):
        make_folder(tmp_path / "set" / split, {"a": count, "b": count})
    root = str(tmp_path / "set")
    assert len(datasets.load_dataset(root, COLOUR)) == 4
    assert len(datasets.load_dataset(root, COLOUR, "val")) == 2
    assert len(datasets.load_dataset(root, COLOUR, "train")) == 18
    with pytest.raises(DataError, match="no split"):
        datasets.load_dataset(root, COLOUR, "holdout")


def test_synset_folders_are_mapped_to_imagenet_indices(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "in", {"n02102040": 1, "n01440764": 1})
    images = datasets.require_classes(datasets.load_dataset(str(folder), COLOUR), 1000)
    assert sorted(images.labels.tolist()) == [0, 217]
    make_folder(tmp_path / "odd", {"n99999999": 1})
    with pytest.raises(DataError, match="n99999999"):
        datasets.require_classes(datasets.load_dataset(str(tmp_path / "odd"), COLOUR), 1000)


def spoilt(folder: Path, spoil: Callable[[Path], object]) -> str:
    make_folder(folder, {"a": 1, "b": 1})
    spoil(folder)
    return str(folder)


REFUSED: dict[str, Callable[[Path], object]] = {
    "nowhere": lambda here: datasets.load_dataset(str(here / "nowhere"), COLOUR),
    "holds no images": lambda here: datasets.load_dataset(
        spoilt(here, lambda folder: (folder / "c").mkdir()), COLOUR
    ),
    "no class folders": lambda here: datasets.load_dataset(str(here), COLOUR),
    "0.png": lambda here: datasets.load_dataset(
        spoilt(here, lambda folder: (folder / "a" / "0.png").write_bytes(b"no image")), COLOUR
    ).tensors(),
    "--data-dir": lambda here: datasets.load_dataset("torch/mnist", DIGITS),
    "MNIST": lambda here: datasets.load_dataset("torch/mnist", DIGITS, "test", here),
    "10 classes": lambda here: datasets.require_classes(
        datasets.load_dataset("digits", DIGITS), 100
    ),
    "'cat' is not among dog, apple": lambda here: datasets.require_classes(
        folders(here, ["cat", "apple"]), 2, ("dog", "apple")
    ),
    "two classes of one name": lambda here: datasets.require_classes(
        folders(here, ["a b", "a_b"]), 2, ("a b", "c")
    ),
}


@pytest.mark.parametrize("named", REFUSED)
def test_refusals_name_the_problem(tmp_path: Path, named: str) -> None:
    with pytest.raises(DataError) as caught:
        REFUSED[named](tmp_path)
    assert named in caught.value.message
    assert caught.value.code == 6


@pytest.mark.parametrize(
    ("classes", "order"),
    [
        (("dog", "cat", "Ape"), ("Ape", "cat", "dog")),
        (("10", "2", "0"), ("0", "2", "10")),
        (("10", "2", "0x"), ("0x", "10", "2")),
        (("9" * 5000, "2", "02"), ("02", "2", "9" * 5000)),
    ],
)
def test_classes_of_a_table_stand_in_the_order_of_names_or_numbers(
    tmp_path: Path, classes: tuple[str, ...], order: tuple[str, ...]
) -> None:
    for number, _ in enumerate(classes):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    rows = (f"{number}.png,x,{name}\n" for number, name in enumerate(classes))
    (tmp_path / "labels.csv").write_text("Image,other,label\n" + "".join(rows))
    images = datasets.load_dataset(str(tmp_path), DIGITS)
    assert images.classes == order
    assert [images.classes[label] for label in images.labels.tolist()] == list(classes)
    assert list(images.file_of.values()) == ["0.png", "1.png", "2.png"]


@pytest.mark.parametrize("header", ["index,file,class", "label,file,class", "class,file,class"])
def test_columns_that_number_the_classes_otherwise_are_refused(tmp_path: Path, header: str) -> None:
    """The rows' numbers in a column called index were taken for classes."""
    classes = ("dog", "ape", "cat")
    for number, _ in enumerate(classes):
        Image.new("L", (8, 8), number).save(tmp_path / f"{number}.png")
    rows = [f"{number},{number}.png,{name}\n" for number, name in enumerate(classes)]
    (tmp_path / "labels.csv").write_text(f"{header}\n" + "".join(rows))
    with pytest.raises(DataError, match="two columns of classes that disagree"):
        datasets.load_dataset(str(tmp_path), DIGITS)
    alike = [
        f"{sorted(classes).index(name)},{number}.png,{name}\n"
        for number, name in enumerate(classes)
    ]
    (tmp_path / "labels.csv").write_text("index,file,class\n" + "".join(alike))
    assert datasets.load_dataset(str(tmp_path), DIGITS).labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    "name", ["valid", "Dev", "eval", "validate", "Val", "hold-out", "Testing", "unseen_2"]
)
def test_no_training_image_is_judged_beside_another_split(tmp_path: Path, name: str) -> None:
    """Whatever the other is called: its folders are of the same classes."""
    for split, count in (("train", 10), (name, 3)):
        make_folder(tmp_path / split, {"a": count, "b": count})
    images = datasets.load_dataset(str(tmp_path), COLOUR)
    assert {Path(file).parts[0] for file in images.file_of.values()} == {name}
    assert len(datasets.load_dataset(str(tmp_path), COLOUR, name)) == 6


def test_what_is_judged_of_folders_that_are_no_splits_is_said(tmp_path: Path) -> None:
    make_folder(tmp_path / "one" / "train", {"a": 10, "b": 10})
    make_folder(tmp_path / "one" / "held", {"c": 2})
    note = datasets.load_dataset(str(tmp_path / "one"), COLOUR).note
    assert "training images are judged" in note
    assert "held beside train is no split that is known" in note
    make_folder(tmp_path / "classes", {"train": 1, "bus": 1})
    assert datasets.load_dataset(str(tmp_path / "classes"), COLOUR).classes == ("bus", "train")
    for split in ("valid", "eval"):
        make_folder(tmp_path / "two" / split, {"a": 1, "b": 1})
    assert "--split names another" in datasets.load_dataset(str(tmp_path / "two"), COLOUR).note


def folders(folder: Path, names: list[str]) -> Images:
    """Return a dataset in which the class called names[k] is the grey level 10 k."""
    for number, name in enumerate(names):
        (folder / "d" / name).mkdir(parents=True)
        Image.fromarray(np.full((8, 8), 10 * number, np.uint8)).save(folder / "d" / name / "x.png")
    return datasets.load_dataset(str(folder / "d"), DIGITS, "all")


def levels(images: Images) -> list[int]:
    """Return the grey level, in tens, of the image of each label."""
    pixels, labels = images.tensors()
    found = {int(k): round(float(x[0, 0, 0]) * 25.5) for x, k in zip(pixels, labels, strict=True)}
    return [found[number] for number in sorted(found)]


@pytest.mark.parametrize("count", [3, 10, 11, 25])
def test_folders_named_by_numbers_are_those_classes(count: int, tmp_path: Path) -> None:
    images = folders(tmp_path, [str(number) for number in range(count)])
    assert levels(datasets.require_classes(images, count)) == list(range(count))
    assert images.classes == tuple(map(str, range(count)))
    assert ("order of the numbers" in datasets.require_classes(images, count).note) == (count > 10)


@pytest.mark.parametrize(
    ("names", "differ"),
    [(["benign", "Malignant"], True), (["c1", "c2", "c10"], True), (["Cat", "Dog"], False)],
)
def test_the_order_taken_is_said_where_timm_and_torchvision_differ(
    names: list[str], differ: bool, tmp_path: Path
) -> None:
    images = folders(tmp_path, names)
    note = datasets.require_classes(images, len(names)).note
    assert ("as torchvision has them" in note and ", ".join(sorted(names)) in note) == differ
    assert "as torchvision" not in datasets.require_classes(images, len(names), tuple(names)).note


@pytest.mark.parametrize(
    "own",
    [("dog", "apple", "eel"), ("Dog", "APPLE", "eel"), ("d_og", "apple", "e el")],
)
def test_the_networks_names_of_classes_give_the_numbers(
    own: tuple[str, ...], tmp_path: Path
) -> None:
    names = ["dog", "apple", "eel"] if own[0].lower() == "dog" else ["d og", "apple", "e-el"]
    images = datasets.require_classes(folders(tmp_path, names), 3, own)
    assert levels(images) == [0, 1, 2]
    assert images.classes == tuple(names)
    assert "the network's numbers" in images.note


@pytest.mark.parametrize("classes", [("a", "b"), ()])
def test_files_left_out_are_counted(tmp_path: Path, classes: tuple[str, ...]) -> None:
    for folder in [tmp_path / name for name in classes] or [tmp_path]:
        folder.mkdir(exist_ok=True)
        Image.new("L", (8, 8), 100).save(folder / "1.png")
        (folder / "._1.png").write_bytes(b"\0\5\x16\7Mac OS X")
        (folder / "notes.gif").write_bytes(b"GIF89a")
    images = load_folder(tmp_path, DIGITS, None)
    count = max(1, len(classes))
    assert len(images) == count
    assert torch.allclose(images.tensors()[0], torch.tensor(100 / 255))
    assert f"{count} of {3 * count} files are images (left out: ._1.png, ...)" in images.note
    files, _, note = image_files([tmp_path])  # of predict
    assert [path.name for path in files] == ["1.png"] * count
    assert note in images.note
    assert note


@pytest.mark.parametrize("name", ["metadata.csv", "train.json", "list.TXT", "x.parquet"])
@pytest.mark.parametrize("where", [".", "images"])
def test_files_that_may_state_labels_are_named(tmp_path: Path, name: str, where: str) -> None:
    (tmp_path / where).mkdir(exist_ok=True)
    Image.new("L", (8, 8), 100).save(tmp_path / where / "1.png")
    (tmp_path / name).write_text("1.png,0")
    assert (
        f"{name} is not read: labels come from class folders, or from labels.csv"
        in load_folder(tmp_path, DIGITS, None).note
    )


def test_a_table_beside_a_folder_of_images_is_read(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("L", (8, 8), 100).save(tmp_path / "images" / "1.png")
    (tmp_path / "labels.csv").write_text("file,class\nimages/1.png,cat\n")
    images = load_folder(tmp_path, DIGITS, None)
    assert images.classes == ("cat",)
    assert images.note == "the labels of images are those of labels.csv"
