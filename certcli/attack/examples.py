"""Adversarial examples: as tensors, to be saved and checked by others, and a few to look at."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from certcli.attack.run import AttackRecord


def collect(
    records: Iterable[AttackRecord], size: tuple[int, int, int] = (1, 1, 1)
) -> dict[str, Tensor]:
    """Records of fallen images with pixels -> tensors by name, a row an image, in order.

    images, adversarial, perturbations (n, c, h, w); labels, predictions, adversarial_predictions,
    indices (n,) int64; norms, l2_norms, epsilons (n,) float64. norms are measured in float64 on
    exactly the saved tensors, so the perturbation (a float32 difference, which rounds) is for the
    eye and `adversarial` for the proof.

    as_8bit (n,) bool: whether the image, rounded to 8 bits a value, still has another class than
    its label.

    Of several records of one image (a curve) the first, that of the smallest radius. size: of
    images where there are none.
    """
    first_records: dict[int, AttackRecord] = {}
    for record in records:
        first_records.setdefault(record.index, record)
    rows = list(first_records.values())
    images = _stacked((row.image for row in rows), size)
    adversarial = _stacked((row.adversarial for row in rows), size)
    return {
        "images": images,
        "adversarial": adversarial,
        "perturbations": adversarial - images,
        "labels": torch.tensor([row.label for row in rows]),
        "predictions": torch.tensor([row.prediction for row in rows]),
        "adversarial_predictions": torch.tensor([row.adversarial_prediction for row in rows]),
        "indices": torch.tensor([row.index for row in rows]),
        "as_8bit": torch.tensor([row.as_8bit is True for row in rows]),
        "norms": _float64(row.norm for row in rows),
        "l2_norms": _float64(row.l2 for row in rows),
        "epsilons": _float64(row.epsilon for row in rows),
    }


def _stacked(images: Iterable[Tensor | None], size: tuple[int, int, int]) -> Tensor:
    """Return the images that are there, (n, c, h, w)."""
    present = [image for image in images if image is not None]
    return torch.stack(present) if present else torch.empty(0, *size)


def _float64(values: Iterable[float | None]) -> Tensor:
    """None, nothing was found, becomes inf."""
    return torch.tensor(
        [float("inf") if value is None else value for value in values], dtype=torch.float64
    )


ROWS = 4


def choose_exhibits(records: Sequence[AttackRecord], count: int = ROWS) -> list[AttackRecord]:
    """The first `count` images that fell, at that radius; those that fall as 8-bit files lead."""
    chosen: dict[int, AttackRecord] = {}
    for record in sorted(records, key=lambda record: record.as_8bit is not True):
        if record.fell and record.image is not None:
            chosen.setdefault(record.index, record)
    return list(chosen.values())[:count]
