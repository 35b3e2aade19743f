"""Why images may say little: few, grey, of another size, or with another network's labels."""

from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_INCEPTION_MEAN,
    IMAGENET_INCEPTION_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from timm.models.vision_transformer import Block

from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import evidence, intervals
from certcli.images.labelled import Images, sent
from certcli.system.errors import one_line

_LOOKED_AT = 8
_UNSURE = 2 / 3
"""A share of right answers from which on nobody asks where the norms of a network stand."""
_LEVEL = 1e-3
"""Chance at most that a network read as it was trained is asked about all the same, were both readings equally good."""
_STATISTICS = {
    "ImageNet's": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "Inception's": (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD),
    "CLIP's": (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "no": ((0.0,) * 3, (1.0,) * 3),
}
"""(mean, std) in common use, as timm names them."""
_FAR = 0.1
"""Smallest distance of the whole interval below an earlier accuracy that makes a doubt."""


def image_doubts(images: Images, channels: int) -> list[str]:
    """Sentences about the images alone; `channels` of the network."""
    doubts = []
    if len(images) == 1:
        doubts.append("one image: every share is 0 % or 100 %, and says little about the network")
    if channels == 3 and images.classes:
        _, pixels, _ = next(images.batches(min(len(images), _LOOKED_AT)))
        if bool((pixels == pixels[:, :1]).all()):
            doubts.append(f"the images of {images.name} are grey, the network sees colour")
    return doubts


def right_of(
    model: nn.Module, images: Images, batch_size: int = 32, labels: Tensor | None = None
) -> list[bool]:
    """Tell of each image whether its label, or that of `labels` (n,), is the top logit."""
    weight = next(model.parameters(), torch.zeros(()))
    with torch.inference_mode():
        predictions = [
            model(sent(pixels, weight.device).to(weight.dtype)).argmax(1).cpu()
            for _, pixels, _ in images.batches(batch_size)
        ]
    correct: list[bool] = (
        torch.cat(predictions) == (images.labels if labels is None else labels)
    ).tolist()
    return correct


def chance_doubt(right: int, count: int, classes: int) -> str | None:
    """Return a doubt about an accuracy that is about that of guessing."""
    if not intervals.chance_level(right, count, classes):
        return None
    if intervals.share_interval(right, count)[1] < 1 / classes:
        return (
            f"the network is right on {right} of {count} images, fewer than by chance: is this a permutation of the classes "
            "of its training? Folders named 0, 1, ... fix an order"
        )
    return (
        f"the network is right on {right} of {count} images, about chance: are these its classes, its mean and std, and is "
        "it the network it is taken for?"
    )


def accuracy_doubts(right: int, count: int, checkpoint: Checkpoint) -> list[str]:
    """Near chance, or far below what the checkpoint's own record has found of this very network."""
    chance = chance_doubt(right, count, checkpoint.record.classes)
    if chance is not None:
        return [chance]
    fresh = (
        evidence.understood(entry)
        for entry in checkpoint.record.evidence
        if entry.digest == checkpoint.digest
    )
    accuracies = [
        (entry.command, entry.result.clean)
        for entry in fresh
        if entry and hasattr(entry.result, "clean")
    ]
    high = intervals.share_interval(right, count)[1]
    return [
        f"the network is right on {right} of {count} images, its record on {100 * clean:.0f} % ({command}): are these images "
        "like those?"
        for command, clean in accuracies
        if high < clean - _FAR
    ][:1]


def permutation_doubt(images: Images, predictions: Sequence[int], classes: int) -> str | None:
    """Whether another numbering of the classes makes the network right on significantly more images.

    The numbering that agrees with most answers is fitted on every second image of each class, and
    judged on the others, by a sign test: on the same ones it would always seem better.
    """
    labels = images.labels[: len(predictions)]
    answers = torch.tensor(predictions)
    fitted = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        fitted[(labels == label).nonzero().flatten()[::2]] = True
    right = (labels == answers)[~fitted].tolist()
    if not right or sum(right) >= _UNSURE * len(right):
        return None
    from scipy.optimize import linear_sum_assignment  # a second of a busy machine

    counts = torch.zeros(classes, classes)
    counts.index_put_((labels[fitted], answers[fitted]), torch.tensor(1.0), accumulate=True)
    # a class without answers stays where it is
    weights = counts * (classes + 1) + torch.eye(classes)
    number = torch.from_numpy(linear_sum_assignment(weights.numpy(), maximize=True)[1])
    renumbered = (number[labels] == answers)[~fitted].tolist()
    if sum(renumbered) < len(right) / 2 or not _significantly_better(right, renumbered, _LEVEL):
        return None
    changed = [label for label in labels.unique().tolist() if number[label] != label]
    names = one_line(", ".join(f"{images.classes[k]} {int(number[k])}" for k in changed[:6]))[:160]
    return (
        f"the network is right on {int((labels == answers).sum())} of {len(labels)} images, and on "
        f"{int((number[labels] == answers).sum())} if the classes are numbered in another order ({names}"
        f"{', ...' * (len(changed) > 6)}): name the folders, or the classes in labels.csv, by the numbers of its training"
    )


def order_doubt(model: nn.Module, images: Images, right: list[bool]) -> str | None:
    """Whether the same tensors, with each norm after what it stands before, are right on
    significantly more of the images.

    None for networks without timm's pre-norm blocks, and for those that are right on most images: a
    network of the other order would not be. Of the images on which only one reading is right, n in
    all, k favour the other: P[Binomial(n, 1/2) >= k] <= 1e-3 (a sign test).

    Args:
        right: of the first len(right) images, which the network as it is read gets right.
    """
    blocks = [module for module in model.modules() if type(module) is Block]
    if not blocks or sum(right) >= _UNSURE * len(right):
        return None
    try:  # the network itself for a while: a copy of one larger than memory would be too much
        for block in blocks:
            block.forward = MethodType(_post_norm, block)  # type: ignore[method-assign]
        as_post = right_of(model, images.select(range(len(right))))
    finally:
        for block in blocks:
            vars(block).pop("forward", None)
    if not _significantly_better(right, as_post, _LEVEL):
        return None
    return (
        f"read as a post-norm network (each norm after attention or MLP, not before) it is right on {sum(as_post)} of "
        f"{len(as_post)} images, as it is read on {sum(right)}: all figures here are of the wrong network if it is one, and "
        "certvit reads no such network"
    )


def better_statistics(
    model: nn.Module, images: Images, right: list[bool]
) -> Iterator[tuple[str, list[str]]]:
    """Yield pixel statistics in common use that are right on significantly more of the images (a
    sign test), each better than those before: a sentence about them, and the options that give
    them.

    model.normalize holds `mean` and `std`, (c, 1, 1). right: of the first len(right) images, which
    the network as it is read gets right.
    """
    normalize: Any = model.normalize
    mean = normalize.mean
    std = normalize.std
    if sum(right) >= _UNSURE * len(right) or len(mean) != 3:
        return
    best = sum(right)
    for name, statistics in _STATISTICS.items():
        try:
            normalize.mean, normalize.std = (
                mean.new_tensor(values).view(-1, 1, 1) for values in statistics
            )
            correct = right_of(model, images.select(range(len(right))))
        finally:
            normalize.mean, normalize.std = mean, std
        if sum(correct) > best and _significantly_better(right, correct, _LEVEL / len(_STATISTICS)):
            best = sum(correct)
            options = [
                "--mean",
                _typed_statistics(statistics[0]),
                "--std",
                _typed_statistics(statistics[1]),
            ]
            yield (
                f"with {name} pixel statistics the network is right on {best} of {len(correct)} images, as it is read on "
                f"{sum(right)}: its mean and std seem to be wrong (try {' '.join(options)})",
                options,
            )


def _typed_statistics(values: Sequence[float]) -> str:
    return ",".join(str(value) for value in (values[:1] if len(set(values)) == 1 else values))


def _significantly_better(right: list[bool], other: list[bool], level: float) -> bool:
    """P[Binomial(n, 1/2) >= k] <= level: of n images that one reading gets right, k are one's."""
    from scipy.special import betainc

    better = sum(b and not a for a, b in zip(right, other, strict=True))
    worse = sum(a and not b for a, b in zip(right, other, strict=True))
    return better > 0 and float(betainc(better, worse + 1, 0.5)) <= level


def _post_norm(block: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The block of Vaswani et al. 2017 from the parts of timm's."""
    x = block.norm1(x + block.drop_path1(block.ls1(block.attn(x))))
    output: Tensor = block.norm2(x + block.drop_path2(block.ls2(block.mlp(x))))
    return output
