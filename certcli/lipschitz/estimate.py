"""Measured slopes at images: lower bounds of the constant, always an `Estimate`."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from certcli.lipschitz.bound import Estimate
from certcli.system.torch_modes import OperationMode

SCOUTING = 2
"""Power iterations of every image of a batch; the steepest image then goes on."""

Copies = dict[torch.dtype, nn.Module]

UNITS = 2.0**-29
"""Unit roundoff of float64 over that of float32."""
SAFETY = 2.0**10
"""Times the error of float64 that the error of float32 suggests: sums of a thousand terms in the
worst order."""
LEAST_ERROR = 2.0**-36
"""Relative error of J v that is counted at least, for networks that compute in float64 whatever
they get."""
LEAST_NARROW = 2.0**-14
"""The same where the network itself rounds to float32 or less: then both copies round alike, and
do not differ."""

CONVERGED = 1e-4
"""Relative growth of a norm in one iteration below which `measure` stops."""


def jacobian_norms(model: nn.Module, images: Tensor, iterations: int = 20, seed: int = 0) -> Tensor:
    """Return |J(x)|_2 from below, by power iteration on J^T J, without forming the Jacobian J: (b,
    c, h, w) -> (b,).

    Each value is |J v| / |v| at the last direction v, rounded down by `slopes_below`.
    """
    _, direction, _ = _iterated(model, images, _random(images, seed), iterations, 0.0)
    return slopes_below(copies_of(model), images, direction)


def slopes_below(copies: Copies, images: Tensor, direction: Tensor) -> Tensor:
    """Return |w| - e for w = J(x) v / |v|, rounded down: every `Estimate` comes from here. -> (b,)

    w is computed in float64, and in float32 beside it. To first order a rounding error is a unit
    roundoff times a number of the network, so float64's is about UNITS times the difference of both
    results. e counts SAFETY times as much, and LEAST_ERROR |w| at least: a measured error, no proof.
    The lengths of w and of v / |v| are roots of sums of squares, each off by a unit a term at most
    (proven).
    """
    with _Narrow() as narrow:
        *_, precise = _iterated(copies[torch.float64], images.double(), direction.double(), 1, 0.0)
    *_, rough = _iterated(copies[torch.float32], images.float(), direction.float(), 1, 0.0)
    length = precise.flatten(1).norm(dim=1)
    difference = (precise - rough.double()).flatten(1).norm(dim=1)
    # what a network rounds in float32 by itself, float64 does not lose less of
    units, least_error = (1.0, LEAST_NARROW) if narrow.rounds else (UNITS, LEAST_ERROR)
    error = torch.maximum(SAFETY * units * difference, least_error * length)
    terms = precise[0].numel() + direction[0].numel() + 6
    slopes = (length - error) * (1 - terms * torch.finfo(torch.float64).eps)
    return slopes.nan_to_num(0.0, 0.0, 0.0).clamp_min(0.0)


class _Narrow(OperationMode):
    """Notes whether an operation gives floating numbers of less than float64."""

    rounds = False

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and part.is_floating_point():
                self.rounds = self.rounds or part.dtype != torch.float64
        return result


def copies_of(model: nn.Module) -> Copies:
    """Return the network in float64 and in float32: itself where it is."""
    return {
        dtype: model
        if all(parameter.dtype == dtype for parameter in model.parameters())
        else copy.deepcopy(model).to(dtype)
        for dtype in (torch.float64, torch.float32)
    }


def _random(images: Tensor, seed: int) -> Tensor:
    return torch.randn(images.shape, generator=torch.Generator().manual_seed(seed)).to(images)


def _iterated(
    model: Callable[[Tensor], Tensor],
    images: Tensor,
    direction: Tensor,
    iterations: int,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Iterate from this direction: the largest |J v| (not rounded down), the last v, their J v."""
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
        # linear in probe
        (pulled,) = torch.autograd.grad((logits * probe).sum(), images, create_graph=True)
        norms = torch.zeros(len(images), dtype=torch.float64, device=images.device)
        for iteration in range(iterations):
            direction = direction / direction.flatten(1).norm(dim=1).clamp_min(1e-30).view(shape)
            # J direction
            (pushed,) = torch.autograd.grad((pulled * direction).sum(), probe, retain_graph=True)
            before = norms
            norms = torch.maximum(norms, pushed.detach().double().flatten(1).norm(dim=1))
            converged = tolerance > 0 and bool((norms <= (1 + tolerance) * before).all())
            if converged or iteration + 1 == iterations:  # the next direction is not needed
                break
            (direction,) = torch.autograd.grad(
                (logits * pushed.detach()).sum(), images, retain_graph=True
            )
    return norms, direction, pushed.detach()


def measure(
    model: nn.Module, batches: Iterator[Tensor], iterations: int = 20, seed: int = 0
) -> Iterator[Estimate]:
    """Yield the largest Jacobian norm so far, after each batch: the network's constant is at least
    this.

    Of several images each gets SCOUTING iterations, and the steepest goes on with up to
    `iterations` more. The number is that of `slopes_below` at the direction that was reached.
    """
    copies = copies_of(model)
    largest = 0.0
    count = 0
    for images in batches:
        direction = _random(images, seed)
        if len(images) > 1:
            scouted, direction, _ = _iterated(
                model, images, direction, min(SCOUTING, iterations), 0.0
            )
            steepest = int(scouted.argmax())
            chosen = images[steepest][None]
            direction = direction[steepest][None]
        else:
            chosen = images
        _, direction, _ = _iterated(model, chosen, direction, iterations, CONVERGED)
        largest = max(largest, float(slopes_below(copies, chosen, direction)))
        count += len(images)
        yield Estimate(
            largest, "Jacobian power iteration", {"images": count, "iterations": iterations}
        )
