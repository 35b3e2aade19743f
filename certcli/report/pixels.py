"""Image tensors as small PNG data URIs."""

import base64
import io

import torch
from PIL import Image
from torch import Tensor

LARGEST = 160
"""Pixels a side of a picture on a page; larger images are made smaller."""


def data_uri(image: Tensor) -> str:
    """(c, h, w) in [0, 1], c = 1 or 3 (else the first channel) -> data:image/png;base64,..."""
    pixels = image.detach().cpu().double().clamp(0, 1)
    pixels = pixels if pixels.shape[0] in (1, 3) else pixels[:1]
    rows = (pixels * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    picture = (
        Image.fromarray(rows[:, :, 0], "L") if rows.shape[2] == 1 else Image.fromarray(rows, "RGB")
    )
    if max(picture.size) > LARGEST:
        picture.thumbnail((LARGEST, LARGEST))
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def triple(image: Tensor, adversarial: Tensor) -> tuple[tuple[str, str, str], float]:
    """The image, what changes (`magnified`), the changed image; and the factor."""
    shown, factor = magnified(image, adversarial)
    return (data_uri(image), data_uri(shown), data_uri(adversarial)), factor


def magnified(image: Tensor, adversarial: Tensor) -> tuple[Tensor, float]:
    """The change around grey, times a factor that fills the range; and the factor."""
    delta = (adversarial - image).double()
    peak = float(delta.abs().max())
    factor = 0.5 / peak if peak > 0 else 1.0
    return 0.5 + factor * delta, factor
