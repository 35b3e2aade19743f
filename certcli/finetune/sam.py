"""Sharpness-aware minimisation: the gradient at the worst weights nearby moves the current ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def length_of(parts: Sequence[Tensor]) -> Tensor:
    """Return the l2 norm of all the tensors together: ()."""
    return torch.stack([part.norm() for part in parts]).norm()


@contextmanager
def climbed(
    parameters: Sequence[Tensor],
    rho: float,
    length_of: Callable[[Sequence[Tensor]], Tensor] = length_of,
) -> Iterator[None]:
    """Move w to w + rho g / |g|_2 inside the block, g the parameters' gradients, and back to the
    same bits after it.

    Orthogonal matrices move in the ambient space. Source: Foret et al. 2021, eq. 2.

    Args:
        length_of: the l2 norm of a list of tensors, where other processes hold parts of them.
    """
    saved = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters]
    moving = [(parameter, w, gradient) for parameter, w, gradient in saved if gradient is not None]
    with torch.no_grad():
        length = length_of([gradient for _, _, gradient in moving]).clamp_min(1e-12)
        for parameter, _, gradient in moving:
            parameter.add_(rho / length * gradient)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, w, _ in moving:
                parameter.copy_(w)
