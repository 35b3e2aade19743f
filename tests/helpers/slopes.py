"""Searches for the steepest slope of a network: what no bound may lie below."""

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.lipschitz.network import bound_network
from tests.helpers.grids import EVERY

IMAGE = (2, 4, 4)


def slope_at(net: nn.Module, image: Tensor, last: bool = False) -> tuple[float, Tensor | None]:
    """Return the largest singular value of the Jacobian J at one image, and its gradient, None
    where it has none or nobody ascends from this one, the last.

    d sigma = u^T dJ v for the leading singular vectors u and v, so that only one product with J is
    differentiated.
    """
    image = image.detach().requires_grad_(True)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        result = net(image.unsqueeze(0)).flatten()
        if not result.requires_grad:
            return 0.0, None
        (rows,) = torch.autograd.grad(
            result,
            image,
            torch.eye(len(result), dtype=result.dtype),
            retain_graph=True,
            is_grads_batched=True,
        )
        left, values, right = torch.linalg.svd(rows.flatten(1), full_matrices=False)
        if last:
            return float(values[0]), None
        (pulled,) = torch.autograd.grad(result, image, left[:, 0], create_graph=True)
        gradient = None
        if pulled.requires_grad:
            with suppress(RuntimeError):  # torch has no second derivative of hard sigmoid
                (gradient,) = torch.autograd.grad(
                    pulled.flatten() @ right[0], image, allow_unused=True
                )
    return float(values[0]), gradient


def steepest_jacobian(
    net: nn.Module, shape: tuple[int, ...] = IMAGE, steps: int = 4, seed: int = 0
) -> float:
    """Return the largest slope found from random, nearly constant and saturated images by gradient
    ascent.
    """
    noise = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    steepest_slope = 0.0
    starts = [noise, 0.5 + 0.003 * noise, (noise > 0.5).double()]
    if not EVERY:  # the steepest alone is climbed from
        slopes = [slope_at(net, image, last=True)[0] for image in starts]
        starts = [starts[slopes.index(max(slopes))]]
    for image in starts:
        for step in range(1, steps + 1):
            value, gradient = slope_at(net, image, last=step == steps)
            steepest_slope = max(steepest_slope, value)
            if gradient is None or not gradient.isfinite().all() or not gradient.any():
                break
            image = (image + 0.2 * gradient / gradient.norm()).clamp(0, 1)
    return steepest_slope


HALVINGS = 12
NOISE = 2.0**-21
"""Rounding of a result relative to its length: some rows compute in float32."""


@torch.no_grad()
def steepest_segment(net: nn.Module, shape: tuple[int, ...] = IMAGE, segments: int = 3) -> float:
    """Return the largest slope over segments of the box that are halved, each time towards the
    steeper half.

    The slope over a segment is at most the larger one over its halves, so a jump of the network is
    enclosed: its slope doubles with each halving, though no Jacobian shows it.
    """
    noise = torch.rand(
        segments, 2, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    ends = torch.cat([noise[1:], noise[:1].round()])
    largest = 0.0
    for low, high in ends:
        first = net(low[None])
        last = net(high[None])
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            between = net(middle[None])
            before = float((between - first).norm())
            after = float((last - between).norm())
            if before > after:
                high = middle
                last = between
            else:
                low = middle
                first = between
            moved = max(before, after)
            noise_of_both = NOISE * float(first.norm() + last.norm())
            largest = max(largest, (moved - noise_of_both) / float((high - low).norm()))
    return largest


def steepest_pair(net: nn.Module) -> float:
    """Return the largest slope between two images of the network as it is called, in batches of one
    and two.
    """
    generator = torch.Generator().manual_seed(0)
    dtype = next(
        (t.dtype for t in [*net.parameters(), *net.buffers()] if t.is_floating_point()),
        torch.float64,
    )
    noise = torch.rand(12, *IMAGE, generator=generator, dtype=dtype)
    starts = torch.cat(
        [noise, noise.round(), torch.full((1, *IMAGE), 0.99, dtype=dtype), noise * 0.02 + 0.5]
    )
    steepest_slope = 0.0
    with torch.no_grad():
        for step in (0.3, 1e-2) if dtype == torch.float32 else (0.3, 1e-2, 1e-6, 1e-9):
            for start in starts:
                direction = torch.randn(IMAGE, generator=generator, dtype=dtype)
                for towards in (direction, torch.ones(IMAGE, dtype=dtype)):
                    other = (start + step * towards / towards.norm()).clamp(0, 1)
                    distance = float((start - other).norm())
                    if not distance:
                        continue
                    moved = float((net(start[None]) - net(other[None])).norm())
                    steepest_slope = max(steepest_slope, (moved - 1e-13) / distance)
                    if net(torch.stack([start, other])).shape[0] == 2:
                        a, b = net(torch.stack([start, other]))
                        steepest_slope = max(
                            steepest_slope, (float((a - b).norm()) - 1e-13) / distance
                        )
    return steepest_slope


def require_no_slope_above(net: nn.Module, reason: str | None) -> None:
    """Demand no bound, for this reason, or (None) a bound that no two images exceed."""
    result = bound_network(net, IMAGE, 3)
    if reason is not None:
        assert not result.upper.finite, f"{result.upper} for a slope of {steepest_pair(net):.4g}"
        assert reason in result.bound.why
        return
    assert result.upper.finite, result.bound.why
    assert steepest_pair(net) <= float(result.upper) * (
        1 + 1e-9
    )  # rounding of the measured ratio, in float64
