"""Random transforms of torchvision, each image by its own draws, which depend on a seed alone."""

from collections.abc import Callable

import torch
from torch import Tensor


def transform_each(images: Tensor, transform: Callable[[Tensor], Tensor], seed: int) -> Tensor:
    """Return transform(image) of each image (b, c, h, w); torchvision draws from global generators."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return torch.stack([transform(image) for image in images])
