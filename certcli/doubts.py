"""Why images may say little about a network: few, grey, of another size, or with labels of another network's classes."""

from certcli.checkpoint import Checkpoint
from certcli.images import Images
from certcli.intervals import share_interval

_LOOKED_AT = 8
_FAR = 0.1
"""How far below an earlier accuracy the whole interval has to lie before it is said."""


def image_doubts(images: Images, channels: int) -> list[str]:
    """Sentences about the images alone; `channels` of the network."""
    found = []
    if len(images) == 1:
        found.append("one image: every share is 0 % or 100 %, and says little about the network")
    if channels == 3 and images.classes and grey(images):
        found.append(f"the images of {images.name} are grey, the network sees colour")
    return found


def grey(images: Images) -> bool:
    """Whether the first images of a colour network have one value a pixel."""
    _, pixels, _ = next(images.batches(min(len(images), _LOOKED_AT)))
    return bool((pixels == pixels[:, :1]).all())


def chance_doubt(right: int, count: int, classes: int) -> str | None:
    """An accuracy about that of guessing; few images have to exclude one halfway between guessing and always right."""
    low, high = share_interval(right, count)
    if classes < 2 or low > 1 / classes or high >= 0.5 + 0.5 / classes:
        return None
    return (
        f"the network is right on {right} of {count} images, about chance: are these its classes, its mean and std, and is "
        "it the network it is taken for?"
    )


def accuracy_doubts(right: int, count: int, checkpoint: Checkpoint) -> list[str]:
    """Near chance, or far below what the checkpoint's own record has found of this very network."""
    chance = chance_doubt(right, count, checkpoint.record.classes)
    if chance is not None:
        return [chance]
    known = [
        (entry.command, float(entry.result["clean"]))
        for entry in checkpoint.record.evidence
        if entry.digest == checkpoint.digest and isinstance(entry.result.get("clean"), float)
    ]
    high = share_interval(right, count)[1]
    return [
        f"the network is right on {right} of {count} images, its record on {100 * clean:.0f} % ({command}): are these images "
        "like those?"
        for command, clean in known
        if high < clean - _FAR
    ][:1]
