"""Checkpoints that many tests share, each made by the command line when a test first names it."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from tests.helpers.commands import certvit

TINY = {"embed_dim": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
STAGES: dict[str, tuple[str, tuple[object, ...]]] = {
    "plain": ("init", ("finetune", "--dataset", "digits", "--loss", "ce", "--epochs", 6, "--lr", 5e-3)),
    "adapted": (
        "plain",
        (
            "adapt", "--goal", "certify", "--norm", "fold", "--activation", "maxmin", "--head", "32,32", "--epochs", 1,
            "--limit", 300,
        ),
    ),
    "constrained": ("adapted", ("constrain", "--beta", 0.01, "--limit", 200)),
    "certified": (
        "constrained",
        (
            "finetune", "--loss", "margin", "--epsilon", 0.3, "--optimiser", "stiefel", "--lr", 0.01, "--epochs", 6,
        ),
    ),
}  # fmt: skip
"""Checkpoint -> the one that it is made of, and the command."""


def shape(**changes: object) -> list[str]:
    """Return the options of `init` for a tiny ViT."""
    return [
        word
        for key, value in {**TINY, **changes}.items()
        for word in ("--arch-arg", f"{key}={value}")
    ]


class Workshop(type(Path())):  # type: ignore[misc]
    """A folder whose `/ "plain.safetensors"` makes that checkpoint, and those before it, once for
    all processes.
    """

    def __truediv__(self, name: Any) -> Path:
        path = Path(self, name)
        if path.stem in ("init", *STAGES) and not path.exists():
            making = Path(self, ".making")
            making.mkdir(exist_ok=True)
            with FileLock(making / f"{path.stem}.lock"):
                if not path.exists():
                    self._make(path, making)
        return path

    def _make(self, path: Path, making: Path) -> None:
        generators = torch.get_rng_state(), np.random.get_state(), random.getstate()
        command: tuple[object, ...] = ("init", "certvit_vit_digits", *shape())
        if path.stem != "init":
            parent, (name, *words) = STAGES[path.stem]
            command = (name, self / f"{parent}.safetensors", *words)
        with TemporaryDirectory(
            dir=making
        ) as folder:  # another process must not see a state of training beside its own
            certvit(*command, "-o", Path(folder, path.name))
            Path(folder, path.name).replace(path)
        torch.set_rng_state(generators[0])
        np.random.set_state(generators[1])
        random.setstate(generators[2])
