"""Clean image, magnified perturbation, adversarial image, and what the network calls the two."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli.report.canvas import BLUE, VERMILION, figure
from certcli.report.pixels import magnified


@dataclass(frozen=True)
class AttackedImage:
    """One image before one network: images (c, h, w) in [0, 1], c = 1 or 3, and the words below
    them.

    Attributes:
        as_file: whether the adversarial class is that of the image as an 8-bit file, too.
    """

    image: Tensor
    adversarial: Tensor
    heading: str
    clean_class: str
    clean_right: bool
    adversarial_class: str
    adversarial_right: bool
    norm: str
    file: str = ""
    as_file: bool = True


def draw_gallery(rows: Sequence[Sequence[AttackedImage]], path: Path, title: str) -> None:
    """One row an image, three columns a network: the image, what changes, the sum. Every row has as
    many networks.

    Each perturbation is drawn around grey, magnified until its largest change of a pixel fills the
    range.
    """
    networks = len(rows[0])
    # a second line above each image
    height = 2.75 if any(picture.file for row in rows for picture in row) else 2.5
    with figure(path, (1.0 + 2.1 * 3 * networks, 0.9 + height * len(rows)), title) as whole:
        canvas = whole.figure
        whole.remove()
        for pictures, axes in zip(
            rows, canvas.subplots(len(rows), 3 * networks, squeeze=False), strict=True
        ):
            for number, picture in enumerate(pictures):
                _show_triple(picture, axes[3 * number : 3 * number + 3])


def _show_triple(picture: AttackedImage, axes: Sequence[Any]) -> None:
    left, middle, right = axes
    change, factor = magnified(picture.image, picture.adversarial)
    _show_image(left, picture.image)
    _show_image(middle, change)
    _show_image(right, picture.adversarial)
    heading = "\n".join(
        filter(None, (_cut_text(picture.heading), _cut_text(picture.file, from_the_left=True)))
    )
    left.set_title(heading, fontsize=10, loc="left")
    middle.set_title(f"shown {factor:.3g} times", fontsize=10, loc="left")
    _caption(left, picture.clean_class, BLUE if picture.clean_right else VERMILION)
    _caption(middle, picture.norm, "#333333")
    as_file = picture.adversarial_right or picture.as_file
    shown = picture.adversarial_class if as_file else f"{picture.adversarial_class} (not as 8 bits)"
    _caption(right, shown, BLUE if picture.adversarial_right else VERMILION)


def _show_image(axes: Any, image: Tensor) -> None:
    pixels = image.double().clamp(0, 1).cpu().permute(1, 2, 0).numpy()
    if pixels.shape[2] not in (1, 3):
        pixels = pixels[:, :, :1]
    if pixels.shape[2] == 1:
        axes.imshow(pixels[:, :, 0], cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    else:
        axes.imshow(pixels, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])


def _caption(axes: Any, text: str, colour: str) -> None:
    axes.set_xlabel(_cut_text(text), fontsize=10, color=colour)


def _cut_text(text: str, *, from_the_left: bool = False) -> str:
    """Return at most 34 characters, the width of an image."""
    if len(text) <= 34:
        return text
    return f"…{text[-33:]}" if from_the_left else f"{text[:33]}…"
