"""Pictures of an audit: how large the radius is, a patch at the place where it was tried, images that were fooled."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from certcli.audit.findings import Findings
from certcli.audit.headline import grey_levels
from certcli.images.labelled import Images
from certcli.report.page import Figure, Gallery
from certcli.report.pixels import LARGEST, data_uri, triple

EACH = "Each: the image, what changes (around grey, magnified), the changed image."


def pictures_of(findings: Findings, names: Sequence[str], radius: float) -> dict[str, Gallery]:
    """Return galleries under "scale" and "fooled". names: of the classes; radius: the smallest of the plan."""
    found: dict[str, Gallery] = {}
    examples: list[Figure] = []
    if findings.sample is not None:
        image, levels = findings.sample, grey_levels(radius, findings.sample.shape)
        pair = [
            (data_uri(image), "an image"),
            (data_uri(moved(image, radius)), f"the image moved by l2 {radius:g}"),
        ]
        same = " After rounding to 8 bits the two are alike." if levels < 0.5 else ""
        caption = f"l2 {radius:g}: an image, and every pixel value moved by {levels:.2g} of 255 grey levels.{same}"
        examples.append(Figure(caption, pair, _large(image)))
    if findings.patched_pair is not None and findings.patch_attack is not None:
        before, after = findings.patched_pair
        size = findings.patch_attack.patch.replace("x", " x ")
        pair = [
            (data_uri(before), "an image"),
            (data_uri(after), f"the image with a patch of {size} pixels"),
        ]
        caption = f"A patch of {size} pixels: at this place it changes the class that the network gives without masks."
        examples.append(Figure(caption, pair, _large(before)))
    if examples:
        found["scale"] = Gallery("What such changes look like", "", examples)
    if findings.exhibits:
        fooled = [_fooled(row, names, findings.images) for row in findings.exhibits]
        found["fooled"] = Gallery("Images that were fooled", EACH, fooled)
    return found


def moved(image: Tensor, radius: float) -> Tensor:
    """Return the image with each pixel value moved by radius / sqrt(d), up or down at random, away from 0 and 1.

    The change has l2 length `radius` as long as no value leaves [0, 1], so as long as it is at most sqrt(d) / 2.
    """
    step = min(0.5, radius / math.sqrt(image.numel()))
    signs = torch.randint(0, 2, image.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    signs = torch.where(image < step, 1, torch.where(image > 1 - step, -1, signs))
    return image + step * signs


def _fooled(row: Any, names: Sequence[str], images: Images | None) -> Figure:
    uris, factor = triple(row.image, row.adversarial)
    before, after = names[row.prediction], names[row.adversarial_prediction]
    image = f"image {row.index}" if images is None else images.named(row.index)
    words = (
        f"{image}, classified {before}",
        "what changes, magnified",
        f"changed image, classified {after}",
    )
    files = "also as an 8-bit file" if row.as_8bit else f"as an 8-bit file {before} again"
    caption = f"{image}: {before}, then {after} ({files}); l2 {row.norm:.3g}, change shown {factor:.3g} times"
    return Figure(caption, list(zip(uris, words, strict=True)), _large(row.image))


def _large(image: Tensor) -> bool:
    return max(image.shape[1:]) > LARGEST // 2
