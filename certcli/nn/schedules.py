"""Noise schedules of diffusion models: step t -> alpha_bar_t, how much of the image's variance is
left.

Source: Ho, Jain & Abbeel 2020 (linear); Rombach et al. 2022 (scaled linear); Nichol & Dhariwal 2021
(cosine); Lin et al. 2024 (no signal at the last step). The names are diffusers'.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def _linear_betas(start: float, end: float, steps: int) -> Tensor:
    return torch.linspace(start, end, steps, dtype=torch.float64)


def _scaled_linear(start: float, end: float, steps: int) -> Tensor:
    return _linear_betas(start**0.5, end**0.5, steps).square()


def _sigmoid(start: float, end: float, steps: int) -> Tensor:
    return torch.sigmoid(_linear_betas(-6, 6, steps)) * (end - start) + start


def _cosine_betas(start: float, end: float, steps: int) -> Tensor:
    times = torch.arange(steps + 1, dtype=torch.float64) / steps
    left = torch.cos((times + 0.008) / 1.008 * math.pi / 2).square()
    return (1 - left[1:] / left[:-1]).clamp_max(0.999)


BETAS: Mapping[str, Callable[[float, float, int], Tensor]] = {
    "linear": _linear_betas,
    "scaled_linear": _scaled_linear,
    "squaredcos_cap_v2": _cosine_betas,
    "sigmoid": _sigmoid,
}
"""Name -> (first beta, last beta, number of steps) -> beta of each step. The cosine reads the number alone."""


def alpha_bars(betas: Tensor, zero_snr: bool = False) -> Tensor:
    """prod_{s <= t} (1 - beta_s), float64; `zero_snr`: its root, moved and scaled, ends at 0."""
    left = (1 - betas.double()).cumprod(0)
    if not zero_snr:
        return left
    root = left.sqrt()
    return ((root - root[-1]) * root[0] / (root[0] - root[-1])).square()


def noise_to_signal(alphas: Tensor) -> Tensor:
    """sqrt((1 - alpha_bar) / alpha_bar): the noise's deviation at each step, images in [-1, 1]."""
    return ((1 - alphas) / alphas).sqrt()
