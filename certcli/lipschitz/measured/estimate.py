"""Measured slopes at images: lower bounds of the constant, always an `Estimate`."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.lipschitz.bound import Estimate

SCOUTING = 2
"""Iterations of every image of a batch; the steepest image is then measured. One chose an image of 2/3 the slope."""

CONVERGED = 1e-4
"""Relative growth of a norm in one iteration below which a measurement stops."""


def jacobian_norms(
    model: Callable[[Tensor], Tensor], images: Tensor, iterations: int = 20, seed: int = 0, tolerance: float = 0.0
) -> Tensor:
    """Return |J(x)|_2 from below, by Lanczos iteration on J J^T, without forming the Jacobian J: (b, c, h, w) -> (b,).

    Each value is |J v| for a unit v, along J^T u for the u with the longest J^T u in the span of the iteration's directions.
    It is at most the largest singular value at that image, up to the rounding of the network's own precision.

    Args:
        tolerance: Stop when no image's value grows by more in one iteration, relative; 0: when none grows.
    """
    images = images.detach().clone().requires_grad_(True)
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        logits = model(images)
        probe = torch.zeros_like(logits, requires_grad=True)
        # sums, because autograd loads sympy for a gradient that begins with a tensor: d <logits, probe> = J^T probe
        (pulled,) = torch.autograd.grad((logits * probe).sum(), images, create_graph=True)  # linear in probe
        norms = torch.zeros(len(images), dtype=torch.float64, device=images.device)
        # directions and their images under J J^T: (b, iterations so far, outputs)
        basis = torch.empty(len(images), 0, logits[0].numel(), dtype=torch.float64, device=images.device)
        mapped, direction = basis, _unit(_random(logits, seed).flatten(1).double())
        for iteration in range(iterations):
            along = direction.to(logits.dtype).view_as(logits)
            (back,) = torch.autograd.grad((logits * along).sum(), images, retain_graph=True)  # J^T direction
            (forth,) = torch.autograd.grad((pulled * back).sum(), probe, retain_graph=True)  # J J^T direction
            forth = forth.double().flatten(1)[:, None]
            basis = torch.cat([basis, direction[:, None]], 1)
            # an image whose derivative overflows has no measured slope: 0
            mapped = torch.cat([mapped, torch.where(forth.isfinite().all(2, keepdim=True), forth, 0.0)], 1)
            small = basis @ mapped.mT
            squares, vectors = torch.linalg.eigh((small + small.mT) / 2)
            ahead = (vectors[:, :, -1:].mT @ mapped).squeeze(1)  # J J^T u
            length = squares[:, -1].clamp_min(0.0).sqrt()  # |J^T u|
            before, norms = norms, torch.where(length > 0.0, ahead.norm(dim=1) / length, 0.0)
            if iteration + 1 == iterations or bool((norms <= (1 + tolerance) * before).all()):
                break
            direction = _outside(basis, ahead)
    return norms


def _random(logits: Tensor, seed: int) -> Tensor:
    """Return the same random direction for every image."""
    return torch.randn(logits[:1].shape, generator=torch.Generator().manual_seed(seed)).to(logits).expand_as(logits)


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-300)


def _outside(basis: Tensor, vectors: Tensor) -> Tensor:
    """Return the unit vectors of the parts of (b, m) that are orthogonal to (b, k, m); 0 for a vector in their span.

    The second round removes what the first one's rounding left. A vector that loses half of its length in it was rounding.
    """
    for _ in range(2):
        vectors = _unit(vectors)
        vectors = vectors - ((vectors[:, None] @ basis.mT) @ basis).squeeze(1)
    return torch.where(vectors.norm(dim=1, keepdim=True) > 0.5, _unit(vectors), 0.0)


def measure(model: nn.Module, batches: Iterator[Tensor], iterations: int = 20, seed: int = 0) -> Iterator[Estimate]:
    """Yield the largest Jacobian norm so far, after each batch: the network's constant is at least this.

    Of several images each gets SCOUTING iterations, and the steepest gets up to `iterations`.
    """
    largest, seen = 0.0, 0
    for images in batches:
        chosen = images
        if len(images) > 1:
            chosen = images[int(jacobian_norms(model, images, min(SCOUTING, iterations), seed).argmax())][None]
        largest = max(largest, float(jacobian_norms(model, chosen, iterations, seed, CONVERGED)))
        seen += len(images)
        yield Estimate(largest, "Lanczos iteration on the Jacobian", {"images": seen, "iterations": iterations})
