"""Pictures of an audit: images that were fooled, and a patch at the place where it was tried."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from certcli.audit.findings import AuditFindings
from certcli.evaluation.radii import attacked_radius
from certcli.images.labelled import Images
from certcli.report.page import LARGEST, Figure, Gallery, data_uri, triple

EACH = "Each: the image, what changes (around grey, magnified), the changed image."


def pictures_of(
    findings: AuditFindings, names: Sequence[str], anonymous: bool = False
) -> dict[str, Gallery]:
    """Return galleries: a fooled image ("first"), a patch ("patch"), all ("fooled").

    anonymous: without the names of files.
    """
    images = None if anonymous else findings.images
    galleries: dict[str, Gallery] = {}
    examples: list[Figure] = []
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
        galleries["patch"] = Gallery("What such a patch looks like", "", examples)
    if findings.exhibits:
        shown = next((row for row in findings.exhibits if row.as_8bit), findings.exhibits[0])
        galleries["first"] = Gallery("", "", [_first_figure(shown, names)])
        fooled = [_fooled(row, names, images) for row in findings.exhibits]
        galleries["fooled"] = Gallery("Images that were fooled", EACH, fooled)
    return galleries


def _first_figure(row: Any, names: Sequence[str]) -> Figure:
    """Return one image and its changed copy, with both answers."""
    before = names[row.prediction]
    after = names[row.adversarial_prediction]
    files = "" if row.as_8bit else f" Saved with 8 bits a value it is answered {before} again."
    caption = f"An image, and a copy changed by l2 {attacked_radius(row.norm, 3)}.{files}"
    pair = [
        (data_uri(row.image), f"answer: {before}"),
        (data_uri(row.adversarial), f"answer: {after}"),
    ]
    return Figure(caption, pair, _large(row.image))


def _fooled(row: Any, names: Sequence[str], images: Images | None) -> Figure:
    uris, factor = triple(row.image, row.adversarial)
    before = names[row.prediction]
    after = names[row.adversarial_prediction]
    image = f"image {row.index}" if images is None else images.named(row.index)
    words = (
        f"{image}, classified {before}",
        "what changes, magnified",
        f"changed image, classified {after}",
    )
    files = "also as an 8-bit file" if row.as_8bit else f"as an 8-bit file {before} again"
    caption = f"{image}: {before}, then {after} ({files}); l2 {attacked_radius(row.norm, 3)}, change shown {factor:.3g} times"
    return Figure(caption, list(zip(uris, words, strict=True)), _large(row.image))


def _large(image: Tensor) -> bool:
    return max(image.shape[1:]) > LARGEST // 2
