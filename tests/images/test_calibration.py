"""Calibration images: synthetic ones have the statistics of photographs, and each network gets a
fitting default. Images without labels: attacks and certificates of the network's own answer, and the
photographs that come with certvit.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.images import calibration, datasets
from certcli.images.labelled import CACHE_BYTES, OWN, at_once
from certcli.system.errors import DataError
from tests.helpers.commands import attempt, certvit, document

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
    done = attempt(name, colour, "--dataset", photos, *words)
    assert done.exit_code == 0, done.exception
    assert "--quiet" in words or "3 images without labels" in done.stderr
    found = document(name, colour, "--dataset", photos, *words)
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
