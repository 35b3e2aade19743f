"""Sharpness-aware minimisation: the gradient at the worst weights nearby moves the current ones."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def climbed(parameters: Sequence[Tensor], rho: float) -> Iterator[None]:
    """Move w to w + rho g / |g|_2 inside the block, g the parameters' gradients, and back to the
    same bits after it.

    Orthogonal matrices move in the ambient space. Source: Foret et al. 2021, eq. 2.
    """
    saved = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters]
    moving = [(parameter, w, gradient) for parameter, w, gradient in saved if gradient is not None]
    with torch.no_grad():
        length: Any = torch.nn.utils.get_total_norm([gradient for _, _, gradient in moving])
        length = length.full_tensor() if hasattr(length, "full_tensor") else length
        step = rho / float(length.clamp_min(1e-12))
        for parameter, _, gradient in moving:
            parameter.add_(gradient, alpha=step)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, w, _ in moving:
                parameter.copy_(w)
