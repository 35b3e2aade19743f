"""Datasets: fixed splits, fixed order, honest labels, clear refusals. Which number a class has, and which
files are left out and counted. Calibration images, which have the statistics of photographs; images
without labels, and the photographs that come with certvit.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.images import calibration, datasets
from certcli.images.folders import image_files, load_folder
from certcli.images.labelled import CACHE_BYTES, OWN, Images, at_once
from certcli.system.errors import DataError
from tests.helpers.commands import attempt, certvit, document

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


SIZES = [(3, 96, 96), (3, 32, 32), (1, 28, 28), (4, 40, 56)]


def spec(size: tuple[int, int, int]) -> InputSpec:
    return InputSpec(size, (0.5,) * size[0], (0.5,) * size[0])


def power_slope(images: torch.Tensor) -> float:
    """d log power / d log frequency of the mean spectrum: (n, c, h, w) square -> a number. White
    noise has 0.
    """
    grey = images.double().mean(1).numpy()
    side = grey.shape[-1]
    window = np.hanning(side)
    spectrum = (
        np.abs(np.fft.fft2((grey - grey.mean((1, 2), keepdims=True)) * window * window[:, None]))
        ** 2
    ).mean(0)
    across = np.fft.fftfreq(side)
    frequency = np.hypot(across[:, None], across[None])
    chosen = (frequency > 2.5 / side) & (frequency < 0.4)
    return float(np.polyfit(np.log(frequency[chosen]), np.log(spectrum[chosen]), 1)[0])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_synthetic_photographs_are_pixels_of_the_input_size(size: tuple[int, int, int]) -> None:
    images = calibration.synthetic_photographs(spec(size), 12)
    pixels, _ = images.tensors()
    assert pixels.shape == (12, *size)
    assert 0 <= float(pixels.min()) <= float(pixels.max()) <= 1
    assert torch.equal((pixels * 255).round() / 255, pixels)
    assert float(pixels.flatten(1).std(1).min()) > 0.02  # none is blank
    assert images.classes == ()


def test_their_power_falls_with_frequency_as_that_of_photographs_does() -> None:
    """Photographs: -2, and steeper where optics blur; 200 of Imagenette at 224 px, windowed alike,
    -2.7 to -3.3.
    """
    pixels, _ = calibration.synthetic_photographs(spec((3, 96, 96)), 24).tensors()
    assert -3.5 < power_slope(pixels) < -1.7
    assert (
        abs(power_slope(torch.rand(24, 3, 96, 96, generator=torch.Generator().manual_seed(0))))
        < 0.3
    )


def test_equal_arguments_give_equal_images_and_the_count_changes_none() -> None:
    first, again, more = (
        calibration.synthetic_photographs(spec((3, 32, 32)), n, 5).tensors()[0] for n in (4, 4, 6)
    )
    assert torch.equal(first, again)
    assert torch.equal(first, more[:4])
    assert not torch.equal(
        first, calibration.synthetic_photographs(spec((3, 32, 32)), 4, 6).tensors()[0]
    )


@pytest.mark.parametrize(
    ("size", "remembers", "expected"),
    [
        ((1, 8, 8), None, "digits"),
        ((1, 28, 28), "torch/mnist", "digits"),
        ((1, 28, 28), None, calibration.PHOTOGRAPHS),
        ((3, 32, 32), None, calibration.PHOTOGRAPHS),
        ((3, 32, 32), "torch/cifar10", calibration.PHOTOGRAPHS),
        ((3, 32, 32), "digits", "digits"),
        ((3, 32, 32), "a-folder-that-is-not-here", calibration.PHOTOGRAPHS),
    ],
)
def test_the_default_fits_the_network(
    tiny: Checkpoint, size: tuple[int, int, int], remembers: str | None, expected: str
) -> None:
    record = replace(tiny.record, input=spec(size), dataset=remembers)
    found = calibration.calibration_images(record, 10)
    assert (found.name, len(found)) == (expected, 10)
    assert next(found.batches(10))[1].shape == (10, *size)


def test_a_named_dataset_is_never_replaced(tiny: Checkpoint) -> None:
    with pytest.raises(DataError, match="unknown dataset"):
        calibration.calibration_images(tiny.record, 10, dataset="not-there")
    with pytest.raises(DataError, match="leaves none"):
        calibration.synthetic_photographs(tiny.record.input, 0)


@pytest.mark.parametrize(
    ("count", "most", "out"),
    [(3, None, 0), (9, 5, 4), (10, None, 2), (11, None, 3), (50, 60, 10), (50, 20, 30)],
)
def test_every_fifth_image_is_held_out_or_more(
    tiny: Checkpoint, count: int, most: int | None, out: int
) -> None:
    images = datasets.load_dataset("digits", tiny.record.input, "train").limit(count)
    seen, unseen = calibration.hold_out(images, limit=most)
    assert (len(seen), len(unseen)) == (count - out, out)
    assert not set(seen.indices.tolist()) & set(unseen.indices.tolist())


@pytest.mark.parametrize("side", [8, 224, 5000])
def test_what_runs_at_once_fits_the_cache_of_a_cpu_and_fills_a_gpu(side: int) -> None:
    count = at_once(50, (3, side, side), "cpu")
    assert 1 <= count <= 50
    assert count == 1 or count * 3 * side * side * 4 <= CACHE_BYTES
    assert count == 50 or (count + 1) * 3 * side * side * 4 > CACHE_BYTES
    assert at_once(50, (3, side, side), "cuda") == 50


ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "certcli" / "embedded" / "photographs"
QUICK = ("--method", "lipschitz", "--method", "smoothing")
SMALL = ("img_size=32", "patch_size=8", "embed_dim=16", "depth=1", "num_heads=2", "num_classes=5")


@pytest.fixture(scope="module")
def colour(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh network of colour images that remembers no dataset."""
    path = tmp_path_factory.mktemp("colour") / "c.safetensors"
    words = [word for pair in SMALL for word in ("--arch-arg", pair)]
    certvit("init", "vit_tiny_patch16_224", *words, "-o", path)
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("cat", "coffee", "rocket"):
        shutil.copy(SHIPPED / f"{name}.jpg", folder)
    return folder


def test_the_shipped_photographs_are_few_small_and_named() -> None:
    files = sorted(SHIPPED.glob("*"))
    assert len(files) == 12
    assert sum(file.stat().st_size for file in files) < 300_000
    page = (ROOT / "certcli" / "embedded" / "README.md").read_text()
    assert [file.name for file in files if f"| `{file.name}` |" not in page] == []
    spec = InputSpec((3, 32, 32), (0.5,) * 3, (0.5,) * 3)
    images = datasets.load_dataset("photographs", spec)
    assert images.unlabelled
    assert images.fetch([0, 11]).shape == (2, 3, 32, 32)


def test_an_audit_without_images_gives_a_first_answer(colour: Path) -> None:
    words = ("-a", "fgsm", "-e", 0.1, "--quiet", "--time-budget", "10m", *QUICK)
    audit = document("audit", colour, *words)
    assert audit["headline"].startswith(
        "A first answer, about the network's own answers on 12 photographs that come with certvit: "
    )
    assert (audit["dataset"]["name"], audit["dataset"]["split"]) == ("photographs", OWN)
    assert audit["clean"] is None  # accuracy is not known
    assert audit["attack"]["clean"]["hits"] == 12
    assert "correct images" not in " ".join([audit["headline"], *audit["verdict"]])
    assert audit["next"] == [f"certvit audit {colour} --dataset FOLDER"]


def test_accuracy_is_no_gate_without_labels(colour: Path, photos: Path) -> None:
    words = ("audit", colour, "--dataset", photos, "-a", "fgsm", "-e", 0.1, "--quiet", *QUICK)
    found = document(*words, "--fail-on", "clean<0.1", code=7)
    assert found["gate"]["judged"][0]["measured"] is None


@pytest.mark.parametrize(
    "command",
    [
        ("audit", "-a", "fgsm", "-e", "0.1", "--quiet", *QUICK),
        ("attack", "-a", "fgsm", "-e", "0.1", "--no-checks"),
        ("certify", "-e", "0.001"),
    ],
    ids=lambda words: words[0],
)
def test_a_folder_of_photos_is_judged_by_its_own_answers(
    colour: Path, photos: Path, command: tuple[str, ...]
) -> None:
    name, *words = command
    done = attempt(name, colour, "--dataset", photos, *words, "--json")
    assert done.exit_code == 0, done.exception
    assert "--quiet" in words or "3 images without labels" in done.stderr
    found = json.loads(done.stdout)
    assert found["dataset"]["split"] == OWN
    assert found["dataset"]["images"] == 3
    assert found["clean"] in (None, 1.0)


@pytest.mark.parametrize(
    "command",
    [
        ("finetune", "--loss", "ce"),
        ("attack", "--norm", "patch", "--patch", "4"),
        ("verify", "records.jsonl"),
    ],
    ids=lambda words: words[0],
)
def test_what_needs_labels_says_so(
    colour: Path, photos: Path, command: tuple[str, ...], tmp_path: Path
) -> None:
    name, *words = command
    if "records.jsonl" in words:
        words[-1] = str(tmp_path / "records.jsonl")
        certvit("certify", colour, "--dataset", photos, "-e", 0.001, "--records", words[-1])
    files = [words[-1], colour] if name == "verify" else [colour, *words]
    refused = attempt(name, *files, "--dataset", photos)
    assert isinstance(refused.exception, DataError)
    assert "no labels" in refused.exception.message
