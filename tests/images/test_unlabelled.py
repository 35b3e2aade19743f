"""Images without labels: attacks and certificates of the network's own answer, and photographs that
come with certvit.
"""

import shutil
from pathlib import Path

import pytest

from certcli.checkpoint.record import InputSpec
from certcli.images import datasets
from certcli.images.labelled import OWN
from certcli.system.errors import DataError
from tests.helpers.commands import attempt, certvit, document

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
