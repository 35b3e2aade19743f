"""Short runs of training on digits: their images, their network, and their trainer."""

from typing import Any

from certcli.checkpoint.file import Checkpoint
from certcli.finetune.loop import Trainer
from certcli.finetune.objective import Teacher
from certcli.finetune.settings import FinetuneSettings
from certcli.images import datasets
from certcli.models import build

LIPSCHITZ: dict[str, Any] = {"patch": 4, "width": 16, "depth": 1, "head": [16]}
"""Arguments of `certvit_lip_digits` for a small network with a bound."""


def digit_sets(checkpoint: Checkpoint, train: int, val: int) -> list[datasets.Images]:
    """Return this many images to train on and to validate by."""
    counts = {"train": train, "val": val}
    return [
        datasets.load_dataset("digits", checkpoint.record.input, split).limit(count)
        for split, count in counts.items()
    ]


def trainer_of(checkpoint: Checkpoint, taught: Teacher | None = None, **settings: Any) -> Trainer:
    model = build.load(checkpoint, writable=True)
    return Trainer(model, FinetuneSettings(**settings), 10, "test", taught)
