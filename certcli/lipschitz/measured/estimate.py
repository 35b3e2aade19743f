"""Measured slopes at images: lower bounds of the constant, always an `Estimate`."""

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.lipschitz.bound import Estimate

SCOUTING = 2
"""Power iterations of every image of a batch; the steepest image then goes on."""

ROUNDED_DOWN = 1 - 2.0**-36
"""Times a slope computed in float64: the slope of real arithmetic is larger, but where a network cancels 5 digits or more."""

CONVERGED = 1e-4
"""Relative growth of a norm in one iteration below which `measure` stops."""


def jacobian_norms(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    iterations: int = 20,
    seed: int = 0,
    tolerance: float = 0.0,
) -> Tensor:
    """Return |J(x)|_2 from below, by power iteration on J^T J, without forming the Jacobian J: (b,
    c, h, w) -> (b,).

    Each value is |J v| for a unit v, hence at most the largest singular value at that image, up to
    the rounding of the network's own precision.

    Args:
        tolerance: Stop when no image's value grows by more in one iteration, relative; 0: run all
            iterations.
    """
    return _iterated(model, images, _random(images, seed), iterations, tolerance)[0]


def _random(images: Tensor, seed: int) -> Tensor:
    return torch.randn(images.shape, generator=torch.Generator().manual_seed(seed)).to(images)


def _iterated(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    direction: Tensor,
    iterations: int,
    tolerance: float,
) -> tuple[Tensor, Tensor]:
    """Return what `jacobian_norms` does, from this direction on, and the unit directions of the
    last iteration.
    """
    images = images.detach().clone().requires_grad_(True)
    shape = (-1, *[1] * (images.dim() - 1))
    with (
        torch.enable_grad(),
        sdpa_kernel(SDPBackend.MATH),
    ):  # the fused kernels have no second derivative
        logits = model(images)
        probe = torch.zeros_like(logits, requires_grad=True)
        # sums, because autograd loads sympy for a gradient that begins with a tensor: d <logits,
        # probe> = J^T probe
        (pulled,) = torch.autograd.grad(
            (logits * probe).sum(), images, create_graph=True
        )  # linear in probe
        norms = torch.zeros(len(images), dtype=torch.float64, device=images.device)
        for iteration in range(iterations):
            direction = direction / direction.flatten(1).norm(dim=1).clamp_min(1e-30).view(shape)
            (pushed,) = torch.autograd.grad(
                (pulled * direction).sum(), probe, retain_graph=True
            )  # J direction
            before = norms
            norms = torch.maximum(norms, pushed.detach().double().flatten(1).norm(dim=1))
            converged = tolerance > 0 and bool((norms <= (1 + tolerance) * before).all())
            if converged or iteration + 1 == iterations:  # the next direction is not needed
                break
            (direction,) = torch.autograd.grad(
                (logits * pushed.detach()).sum(), images, retain_graph=True
            )
    return norms, direction


def measure(
    model: nn.Module, batches: Iterator[Tensor], iterations: int = 20, seed: int = 0
) -> Iterator[Estimate]:
    """Yield the largest Jacobian norm so far, after each batch: the network's constant is at least
    this.

    Of several images each gets SCOUTING iterations, and the steepest goes on with up to
    `iterations` more. The number is
    |J v| / |v| in float64 at the image and the direction v that were reached, rounded down.
    """
    exact = copy.deepcopy(model).double()
    largest = 0.0
    count = 0
    for images in batches:
        direction = _random(images, seed)
        if len(images) > 1:
            scouted, direction = _iterated(model, images, direction, min(SCOUTING, iterations), 0.0)
            steepest = int(scouted.argmax())
            chosen = images[steepest][None]
            direction = direction[steepest][None]
        else:
            chosen = images
        _, direction = _iterated(model, chosen, direction, iterations, CONVERGED)
        reached, _ = _iterated(exact, chosen.double(), direction.double(), 1, 0.0)
        largest = max(largest, float(reached) * ROUNDED_DOWN)
        count += len(images)
        yield Estimate(
            largest, "Jacobian power iteration", {"images": count, "iterations": iterations}
        )
