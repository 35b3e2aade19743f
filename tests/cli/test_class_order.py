"""A network whose classes are numbered in another order than a dataset's folders is told from one
that guesses.
"""

from pathlib import Path

import pytest
from PIL import Image

from certcli.checkpoint.file import Checkpoint
from certcli.images import datasets
from tests.helpers.commands import certvit

PER_CLASS = 12


@pytest.fixture(scope="module")
def numbered(workshop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in folders c1 to c10, which torchvision and timm number differently."""
    folder = tmp_path_factory.mktemp("numbered")
    spec = Checkpoint.read(workshop / "plain.safetensors").record.input
    digits = datasets.load_dataset("digits", spec, "test")
    pixels, labels = digits.tensors()
    for label in range(10):
        (inside := folder / f"c{label + 1}").mkdir()
        for place, image in enumerate(pixels[labels == label][:PER_CLASS]):
            grey = (image[0] * 255).round().byte().numpy()
            Image.fromarray(grey).save(inside / f"{place:02}.png")
    return folder


ORDER = "classes are numbered by name, capitals first, as torchvision has them"
COMMANDS = {
    "certify": ("--method", "lipschitz", "-e", 0.01),
    "attack": ("-a", "fgsm", "-e", 0.01, "--no-checks"),
    "finetune": ("--epochs", 1, "--loss", "ce", "--lr", 1e-9),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_permutation_of_the_classes_is_named(
    command: str, workshop: Path, numbered: Path, tmp_path: Path
) -> None:
    words = [*COMMANDS[command], "--dataset", numbered, "-o", tmp_path / "o.safetensors"]
    said = certvit(command, workshop / "plain.safetensors", *words).stderr
    assert ORDER in " ".join(said.split())
    if command != "finetune":
        assert "if the classes are numbered in another order (c10 " in " ".join(said.split())
