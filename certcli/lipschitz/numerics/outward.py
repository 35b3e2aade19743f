"""Rounding outward in float64: the constant of sums, the next number above, Frobenius norms, and
scaling by powers of two."""

import math

import torch
from torch import Tensor

from certcli.system.errors import CheckpointError, UsageError

UNIT = 2.0**-53
"""Unit roundoff of float64."""


def gamma(terms: int) -> float:
    """n u / (1 - n u), rounded up: the relative error of a sum of n products in float64.

    Errors: UsageError beyond 2^52 terms, where the constant loses its meaning.
    """
    if terms * UNIT > 0.5:
        raise UsageError(f"a sum of {terms} products is too long for float64 error bounds")
    return up(terms * UNIT / (1.0 - terms * UNIT), 3)


def up(x: float, steps: int = 1) -> float:
    """Return the float64 `steps` ulps above x, one for each rounded operation; inf stays inf."""
    for _ in range(steps):
        x = math.nextafter(x, math.inf)
    return x


def root_up(x: float) -> float:
    """sqrt(x), rounded up."""
    return up(math.sqrt(x))


def frobenius_norm(tensor: Tensor) -> float:
    """|T|_F <= value: sum of squares in float64, any shape, one rounding constant for the whole
    sum.

    Errors: CheckpointError on NaN or infinite entries.
    """
    if tensor.is_floating_point() and tensor.device.type != "mps":
        plain = tensor.detach().reshape(-1).double()
        square = float(torch.dot(plain, plain))
        # of ordinary size: what products lose by underflow, 2^-1022 each of fewer than 2^60, is far
        # below the last ulp
        if 1e-200 < square < 1e200:
            return root_up(up(square * (1.0 + 2.0 * gamma(plain.numel() + 2)), 3))
    scaled, exponent = scale_to_unit(tensor)
    if scaled is None:
        return 0.0
    flat = scaled.reshape(-1)
    square = float(torch.dot(flat, flat))
    return unscale(root_up(up(square * (1.0 + 2.0 * gamma(flat.numel() + 2)), 2)), exponent)


def unit_exponent(tensor: Tensor) -> int | None:
    """e with max |2^-e * tensor| in [1/2, 1); None for a zero or empty tensor.

    Errors: CheckpointError on NaN or infinite entries, UsageError on a dtype that is not real
    floating point.
    """
    if not tensor.is_floating_point():
        raise UsageError(f"a norm needs a real floating point tensor, not {tensor.dtype}")
    if tensor.numel() == 0:
        return None
    low, high = (float(extreme) for extreme in torch.aminmax(tensor.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(
            "the weights hold NaN or infinite values", "train again, or read another checkpoint"
        )
    largest = max(-low, high)
    return math.frexp(largest)[1] if largest > 0.0 else None


def scale_to_unit(tensor: Tensor) -> tuple[Tensor | None, int]:
    """tensor = 2^e * scaled with max |scaled| in [1/2, 1), a fresh float64 tensor; (None, 0) for a
    zero or empty one.

    Exact, but for entries 2^1000 times smaller than the largest. MPS has no float64: computed on
    the CPU there. Errors: those of `unit_exponent`.
    """
    exponent = unit_exponent(tensor)
    if exponent is None:
        return None, 0
    return scaled_to_double(tensor.detach().unsqueeze(0), [exponent]).squeeze(0), exponent


def unscale(value: float, exponent: int) -> float:
    """2^e * value, rounded up; inf beyond float64."""
    try:
        return up(math.ldexp(value, exponent))
    except OverflowError:
        return math.inf


def scaled_to_double(stacked: Tensor, exponents: list[int]) -> Tensor:
    """2^-e_i * stacked_i as a fresh float64 tensor, (b, ...), in two steps: 2^-e may overflow."""
    source = stacked.to(float64_device(stacked.device))
    scaled = source.to(torch.float64, copy=True)
    if max(abs(exponent) for exponent in exponents) <= 1000:
        steps = [[-exponent for exponent in exponents]]
    else:
        steps = [
            [-exponent // 2 for exponent in exponents],
            [-(exponent // 2) for exponent in exponents],
        ]
    for powers in steps:
        factors = torch.tensor(
            [2.0**power for power in powers], dtype=torch.float64, device=scaled.device
        )
        scaled.mul_(factors.view((-1,) + (1,) * (scaled.ndim - 1)))
    return scaled


def float64_device(device: torch.device) -> torch.device:

    return torch.device("cpu") if device.type == "mps" else device
