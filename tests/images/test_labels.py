"""Which number a class has: that of the folder's name, by the network's own names, or by its
number.
"""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certcli.checkpoint.record import InputSpec
from certcli.images import datasets
from certcli.images.labelled import Images
from certcli.system.errors import DataError

SPEC = InputSpec((1, 8, 8), (0.5,), (0.5,))


def folders(folder: Path, names: list[str]) -> Images:
    """Return a dataset in which the class called names[k] is the grey level 10 k."""
    for number, name in enumerate(names):
        (folder / "d" / name).mkdir(parents=True)
        pixels = np.full((8, 8), 10 * number, np.uint8)
        Image.fromarray(pixels).save(folder / "d" / name / "x.png")
    return datasets.load_dataset(str(folder / "d"), SPEC, "all")


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
    note = datasets.require_classes(images, count).note
    assert ("order of the numbers" in note) == (count > 10)


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


def test_other_names_are_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'cat' is not among dog, apple") as caught:
        datasets.require_classes(folders(tmp_path, ["cat", "apple"]), 2, ("dog", "apple"))
    assert "0 to 1" in caught.value.hint


def test_two_folders_of_one_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="two classes of one name"):
        datasets.require_classes(folders(tmp_path, ["a b", "a_b"]), 2, ("a b", "c"))


def test_thirty_thousand_classes_are_counted_once(tmp_path: Path) -> None:
    """A lookup for each row in the list of all classes took a minute."""
    Image.new("L", (8, 8)).save(tmp_path / "y.png")
    rows = "".join(f"y.png,c{number:05}\n" for number in range(30_000))
    (tmp_path / "labels.csv").write_text("file,class\n" + rows)
    images = datasets.load_dataset(str(tmp_path), SPEC, "all")
    assert images.labels.tolist() == list(range(30_000))
