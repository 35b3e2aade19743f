"""Keep matrices orthogonal in training: momentum on the Stiefel manifold, orthogonalised steps,
cubic retraction.

W (m, n) with m >= n and W^T W = I (else its transpose). One step:
  tangent projection   M <- M - W sym(W^T M)                        of the momentum M
  orthogonalised step  U = M Q, Q ~ (M^T M)^(-1/2) by four quintic Newton-Schulz steps on the small
                       Gram matrix, and U <- U - W sym(W^T U), for M Q need not be tangent
  retraction           W <- (W - lr U) / sqrt(1 + lr^2), and every `RETRACT_EVERY`th step W <- W (1.5 I - 0.5 W^T W)
U is tangent with singular values near 1, so (W - lr U)^T (W - lr U) = I + lr^2 U^T U is near (1 +
lr^2) I, and the cubic step removes the rest. Coefficients of the quintic: Jordan et al. 2024
(Muon). The cubic step is Newton-Schulz's for the polar factor.

Products of two tall matrices and U are in bfloat16 where the machine multiplies that fastest (AMX,
AVX512-BF16, tensor cores). Weights, momentum, retractions and the Newton-Schulz steps keep the
parameters' precision: rounded to bfloat16, M^T M has negative eigenvalues, which each quintic step
multiplies by 12, and U had a singular value of up to 50 in place of 1.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from certcli.models.build import multiplies_bf16
from certcli.nn.blocks import CenterNorm
from certcli.nn.layers import FlatHead

_QUINTIC = (3.4445, -4.7750, 2.0315)
_QUINTIC_STEPS = 4

RETRACT_EVERY = 8
"""Steps between two cubic retractions: at lr 0.05 the error is below 1 % by then, and 1e-4 after
the cubic step."""

STACKED = 1 << 22
"""Most entries of equally shaped matrices that move together: more would only cost memory."""

_HALF_WIDTH = 128
"""Least n at which a bfloat16 product, conversions included, beats a float32 one on a CPU with
AMX."""


def polar_factor(weight: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal rows or columns: U V^T of the SVD."""
    flat = weight.detach().double().reshape(weight.shape[0], -1)
    rows, _, columns = torch.linalg.svd(flat, full_matrices=False)
    return (rows @ columns).reshape(weight.shape).to(weight)


def retract(weight: Tensor, steps: int = 1) -> None:
    """Move the weight by `steps` cubic Newton-Schulz steps towards its polar factor, in place."""
    iterate = _stack_tall([weight])
    for _ in range(steps):
        iterate = _cubic(iterate)
    weight.copy_((iterate if iterate.shape[1] == len(weight) else iterate.mT).reshape(weight.shape))


def orthogonal_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Return the weights of linear layers and patch embeddings; the last layer stays free."""
    last = last_layer(net)
    parameters = []
    for module in net.modules():
        linear = isinstance(module, nn.Linear)
        patches = (
            isinstance(module, nn.Conv2d)
            and module.kernel_size == module.stride
            and module.padding in ((0, 0), 0)
            and module.groups == 1
        )
        if (linear or patches) and module is not last:
            parameters.append(module.weight)
    return parameters  # type: ignore[return-value]


def last_layer(net: nn.Module) -> nn.Module | None:
    """Return the classifier, whose rows set the margins."""
    head: Any = getattr(net, "head", None)
    return head.out if isinstance(head, FlatHead) else head


def orthogonalise(net: nn.Module) -> None:
    """Set every matrix to its polar factor, every centre norm to plain centring (constant 1)."""
    with torch.no_grad():
        for weight in orthogonal_parameters(net):
            weight.copy_(polar_factor(weight))
        for module in net.modules():
            if isinstance(module, CenterNorm):
                module.weight.fill_((module.width - 1) / module.width)
                module.weight.requires_grad_(False)


class StiefelMuon(torch.optim.Optimizer):
    """The update of the module docstring, from orthogonal starts; equal shapes in a batch."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    flat = _as_matrix(parameter)
                    state = self.state[parameter]
                    state.setdefault("step", 0)
                    alike[flat.shape, flat.dtype, flat.device, state["step"]].append(parameter)
            for (shape, *_), parameters in alike.items():
                together = max(1, STACKED // shape.numel())
                for start in range(0, len(parameters), together):
                    self._update(
                        parameters[start : start + together], group["lr"], group["momentum"]
                    )

    def _update(self, parameters: list[Tensor], lr: float, momentum: float) -> None:
        """Step matrices of one shape, stacked: (c, m, n)."""
        states = [self.state[parameter] for parameter in parameters]
        weight = _stack_tall(parameters)
        moment = _stack_tall([parameter.grad for parameter in parameters])  # type: ignore[misc]
        if "momentum" in states[0]:
            moment = torch.add(
                moment, _stack_tall([state["momentum"] for state in states]), alpha=momentum
            )
        large = weight.device.type != "cpu" or weight.shape[-1] >= _HALF_WIDTH
        half = large and weight.dtype == torch.float32 and multiplies_bf16(weight.device)
        fast = torch.bfloat16 if half else weight.dtype
        narrow = weight.to(fast)
        moment = _tangent(narrow, moment)
        step = states[0]["step"] + 1
        tangent = _tangent(narrow, orthogonalised_direction(moment, fast))
        weight = torch.sub(weight, tangent, alpha=lr).div_((1 + lr * lr) ** 0.5)
        if step % RETRACT_EVERY == 0:
            weight = _cubic(weight)
        wide = len(parameters[0]) != weight.shape[1]
        for parameter, state, moved_weight, new in zip(
            parameters, states, weight, moment, strict=True
        ):
            # in the parameter's own layout: products of other layouts may round otherwise after
            # --resume
            state["step"], state["momentum"] = step, (new.T if wide else new).contiguous()
            parameter.copy_((moved_weight.T if wide else moved_weight).reshape(parameter.shape))


def orthogonalised_direction(tangent: Tensor, fast: torch.dtype) -> Tensor:
    """Return T Q with Q ~ (T^T T)^(-1/2), whose singular values are near 1: (c, m, n).

    The Gram matrix G is divided by its trace and then by ||G^2||_F^(1/2) >= ||G||_2, which bounds
    the norm far more closely where many singular values are alike: the iteration starts near 1
    without another product.

    Args:
        fast: dtype of the product with Q.
    """
    gram = tangent.mT @ tangent
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None] + 1e-20
    gram = gram / trace
    square = gram @ gram
    scale = torch.linalg.matrix_norm(square)[:, None, None].sqrt().clamp_min(1e-10)
    gram = gram / scale
    first = _QUINTIC[1] * gram + (_QUINTIC[2] / scale**2) * square
    whiten: Tensor | None = None
    for steps_left in reversed(range(_QUINTIC_STEPS)):
        factor = (
            first
            if whiten is None
            else torch.baddbmm(gram, gram, gram, beta=_QUINTIC[1], alpha=_QUINTIC[2])
        )
        factor.diagonal(dim1=-2, dim2=-1).add_(_QUINTIC[0])
        whiten = factor if whiten is None else whiten @ factor
        if steps_left:
            gram = factor @ gram @ factor
    assert whiten is not None
    whiten = whiten / (trace * scale).sqrt()
    return _tall_product(tangent.to(fast), whiten.to(fast))


def _as_matrix(weight: Tensor) -> Tensor:
    return weight.reshape(weight.shape[0], -1)


def _stack_tall(weights: list[Tensor]) -> Tensor:
    """Return same-shaped tensors as (c, m, n), m >= n; where possible, a view of one."""
    flats = [_as_matrix(weight) for weight in weights]
    stack = flats[0][None] if len(flats) == 1 else torch.stack(flats)
    return stack if stack.shape[1] >= stack.shape[2] else stack.mT


def _tangent(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return X - W sym(W^T X), the products in the precision of W."""
    inner = weight.mT @ gradient.to(weight)
    return gradient - _tall_product(weight, (inner + inner.mT) / 2)


def _tall_product(tall: Tensor, small: Tensor) -> Tensor:
    """Return the product in `tall`'s memory layout: mixed layouts take five times as long."""
    return tall @ small if tall.stride(-1) == 1 else (small.mT @ tall.mT).mT


def _cubic(tall: Tensor) -> Tensor:
    """Return W (1.5 I - 0.5 W^T W), one Newton-Schulz step towards the polar factor."""
    return 1.5 * tall - 0.5 * _tall_product(tall, tall.mT @ tall)
