"""The verdict on an attack: clipped, re-evaluated and measured here, whatever the attack says;
images of 8 bits a value; and certificates of `certify`: which images may be attacked, and how far,
so that none may fall."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor, nn

from certcli.evaluation import perturbation, records, threat
from certcli.evaluation.image_records import Certificate
from certcli.images.labelled import Images
from certcli.system import errors, torch_modes

# A float32 sum image + delta rounds by up to 6e-8 a pixel, so a point on the sphere may come to lie
# just outside it. The first shrink is one part in a million; each further one is twice as strong;
# sixteen reach 6 %.
_FIRST_SHRINK = 1e-6
_SHRINKS = 16


@dataclass(frozen=True)
class Judgement:
    """What is true of a batch after an attack; every tensor has one row an image.

    Attributes:
        success: the image was classified correctly, and a point inside ball and box is not.
        robust: it was, and none was shown.
        adversarial: that point, else the image itself.
        prediction, adversarial_prediction: classes of the image and of `adversarial`.
        norm: |adversarial - image| in the region's norm, float64; 0 for an image that is
            misclassified as it stands, inf where nothing was found.
    """

    success: Tensor
    robust: Tensor
    adversarial: Tensor
    prediction: Tensor
    adversarial_prediction: Tensor
    norm: Tensor


@torch.no_grad()
def predict_classes(model: nn.Module, images: Tensor, samples: int = 1) -> Tensor:
    """argmax_j of the logits, averaged over `samples` forward passes: (b, c, h, w) -> (b,).

    Raises ArchitectureError when the model does not return (b, k >= 2) logits or returns NaN: no
    verdict exists then.
    """
    if not len(images):
        return torch.zeros(0, dtype=torch.long, device=images.device)
    with torch_modes.plain_products():
        logits = model(images)
        for _ in range(samples - 1):
            logits = logits + model(images)
    if logits.dim() != 2 or logits.shape[0] != len(images) or logits.shape[1] < 2:
        raise errors.ArchitectureError(
            f"the model returns {tuple(logits.shape)} for {len(images)} images, not (b, k) logits of 2 classes or more"
        )
    if logits.isnan().any():
        raise errors.ArchitectureError(
            "the model returns NaN logits for an image in [0, 1]", "check weights and precision"
        )
    return logits.argmax(dim=1)


def tuck_in(adversarial: Tensor, images: Tensor, region: perturbation.Region) -> Tensor:
    """Nearest point of ball and box (`Region.contains`): (b, c, h, w) x 2 -> (b, c, h, w).

    Clipping rounds, and may leave a point 1e-8 outside the ball; there the perturbation is shrunk
    by a factor slightly below 1 until it is inside. A point that never is, such as one with a NaN,
    becomes the image itself.
    """
    point = region.project(adversarial.to(images.dtype), images)
    shrink = _FIRST_SHRINK
    for _ in range(_SHRINKS):
        inside = region.contains(point, images)
        if inside.all():
            return point
        shrunk = (images + (point - images) * (1 - shrink)).clamp(0.0, 1.0)
        point = torch.where(perturbation.beside_pixels(inside, images), point, shrunk)
        shrink *= 2
    return torch.where(
        perturbation.beside_pixels(region.contains(point, images), images), point, images
    )


@torch.no_grad()
def judge_points(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    adversarial: Tensor,
    region: perturbation.Region,
    *,
    prediction: Tensor | None = None,
    samples: int = 1,
    exactly: bool = False,
) -> Judgement:
    """Is argmax f(x') != y for the clipped x', |x' - x| <= radius? (b, c, h, w) x 2, labels (b,).

    `prediction` (b,) spares the forward pass on the clean images when their classes are known
    already; `samples` forward passes are averaged for nets that are random. exactly: a point
    outside the region is none, and is not clipped: clipping would leave the images with 8 bits.
    Raises DataError when images leave [0, 1] or shapes disagree.
    """
    if adversarial.shape != images.shape or labels.shape != images.shape[:1]:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (images, adversarial, labels))
        raise errors.DataError(
            f"the shapes of images, adversarial images and labels disagree: {shapes}"
        )
    if not ((images >= 0) & (images <= 1)).all():
        raise errors.DataError(
            "an image has pixels outside [0, 1]",
            "attack pixel images; normalisation belongs to the model",
        )
    labels = labels.to(images.device)
    if prediction is None:
        prediction = predict_classes(model, images, samples)
    correct = prediction == labels
    point = adversarial.detach().to(images.device)
    if not exactly:
        point = tuck_in(point, images, region)
    success = correct & region.contains(point, images)
    adversarial_prediction = prediction.clone()
    adversarial_prediction[success] = predict_classes(model, point[success], samples)
    success = success & (adversarial_prediction != labels)
    point = torch.where(perturbation.beside_pixels(success, images), point, images)
    norm = torch.where(
        success,
        perturbation.image_norms(point.double() - images.double(), region.norm),
        float("inf"),
    )
    return Judgement(
        success=success,
        robust=correct & ~success,
        adversarial=point,
        prediction=prediction,
        adversarial_prediction=torch.where(success, adversarial_prediction, prediction),
        norm=torch.where(correct, norm, 0.0),
    )


LEVELS = 255
HALVINGS = 16
LONGEST = 256.0
"""Factor of a change, at most, before it is rounded: an even change far below one level becomes a
change of some values."""


def rounded_to_8bit(images: Tensor) -> Tensor:
    """Return the nearest 8-bit images: (b, c, h, w) in [0, 1] -> multiples of 1 / 255."""
    return (images * LEVELS).round() / LEVELS


def nearest_within(candidates: Tensor, images: Tensor, region: perturbation.Region) -> Tensor:
    """Return 8-bit images in the region, towards the candidates: (b, c, h, w) x 2 -> (b, c, h, w).

    x + round(s 255 (x' - x)) / 255 with the largest factor s, by bisection, that stays in the
    region. A change that is spread below half a level would vanish; a larger factor keeps its
    largest values.

    Args:
        images: with 8 bits a value.
    """
    change = (candidates.to(images.dtype) - images) * LEVELS
    base = (images * LEVELS).round()

    def point(factor: Tensor) -> Tensor:
        furthest = (base + (perturbation.beside_pixels(factor, images) * change).round()).clamp(
            0, LEVELS
        )
        return furthest / LEVELS

    low = torch.zeros(len(images), dtype=images.dtype, device=images.device)
    high = torch.full_like(low, LONGEST)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        inside = region.contains(point(middle), images)
        low = torch.where(inside, middle, low)
        high = torch.where(inside, high, middle)
    return point(low)


def read_certified(path: Path, checkpoint: str) -> tuple[perturbation.Norm, dict[int, Certificate]]:
    """Records of `certify` -> norm of their radii; index -> certificate, of correct predictions.

    DataError when they are no such records, or of another network than `checkpoint` (its digest).
    UsageError for statements with a chance of failure (smoothing): they speak of the smoothed
    classifier, which is not the network that is attacked.
    """
    run, rows = records.read_records(path, "certify")
    records.require_same_network(run, checkpoint, path)
    norm = next((norm for norm in get_args(perturbation.Norm) if norm == run.norm), None)
    if norm is None:
        raise errors.DataError(
            f"{path} certifies in a norm that no attack knows: {errors.one_line(run.norm)[:40]}",
            "certify in l2 or linf; --norm patch attacks within patches",
        )
    certified: dict[int, Certificate] = {}
    for number, row in enumerate(rows, start=2):
        if row.failure > 0:
            raise errors.UsageError(
                f"line {number} of {path} holds with probability {threat.confidence(row.failure)}, of the "
                "smoothed classifier",
                "attack with records of certify --method lipschitz or local",
            )
        if row.index in certified:
            raise errors.DataError(f"{path} has two records of image {row.index}")
        if row.correct:
            certified[row.index] = row
    return norm, certified


def select_certified(
    images: Images, certificates: Mapping[int, Certificate], radius: float
) -> Images:
    """Return the images certified beyond `radius`; DataError when pixels or label disagree."""
    records.require_same_images(certificates.values(), images, "the certified records")
    beyond = {index for index, certificate in certificates.items() if certificate.radius > radius}
    return images.select(
        [place for place, index in enumerate(images.indices.tolist()) if index in beyond]
    )
