"""Matrices kept orthogonal while they learn: momentum on the Stiefel manifold, orthogonalised steps, cubic retraction.

W (m, n) with m >= n and W^T W = I (else its transpose). One step:
  tangent projection   U = M - W sym(W^T M)                                  of the momentum M
  orthogonalised step  U <- U Q, Q ~ (U^T U)^(-1/2) by four quintic Newton-Schulz steps on the small Gram matrix
  retraction           W <- W - lr U, then W <- W (1.5 I - 0.5 W^T W)
Coefficients of the quintic: Jordan et al. 2024 (Muon). The retraction is Newton-Schulz's cubic for the polar factor.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from certcli.nn.heads import FlatHead
from certcli.nn.norms import CenterNorm

_QUINTIC = (3.4445, -4.7750, 2.0315)


def polar_factor(weight: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns: U V^T of the singular value decomposition."""
    flat = weight.detach().double().reshape(weight.shape[0], -1)
    left, _, right = torch.linalg.svd(flat, full_matrices=False)
    return (left @ right).reshape(weight.shape).to(weight)


def retract(weight: Tensor, steps: int = 1) -> None:
    """In place: `steps` cubic Newton-Schulz steps towards the polar factor."""
    flat = weight.reshape(weight.shape[0], -1)
    tall = flat if flat.shape[0] >= flat.shape[1] else flat.T
    for _ in range(steps):
        tall = 1.5 * tall - 0.5 * tall @ (tall.T @ tall)
    weight.copy_((tall if flat.shape[0] >= flat.shape[1] else tall.T).reshape(weight.shape))


def orthogonal_parameters(net: nn.Module) -> list[nn.Parameter]:
    """Weights of the linear layers and patch embeddings, all but the last layer, which stays free."""
    last = last_layer(net)
    found = []
    for module in net.modules():
        linear = isinstance(module, nn.Linear)
        patches = (
            isinstance(module, nn.Conv2d)
            and module.kernel_size == module.stride
            and module.padding in ((0, 0), 0)
            and module.groups == 1
        )
        if (linear or patches) and module is not last:
            found.append(module.weight)
    return found  # type: ignore[return-value]


def last_layer(net: nn.Module) -> nn.Module | None:
    """The classifier, whose rows set the margins."""
    head: Any = getattr(net, "head", None)
    return head.out if isinstance(head, FlatHead) else head


def orthogonalise(net: nn.Module) -> None:
    """Every matrix becomes its polar factor, every centre norm plain centring (constant 1), for good."""
    with torch.no_grad():
        for weight in orthogonal_parameters(net):
            weight.copy_(polar_factor(weight))
        for module in net.modules():
            if isinstance(module, CenterNorm):
                module.weight.fill_((module.width - 1) / module.width)
                module.weight.requires_grad_(False)


class StiefelMuon(torch.optim.Optimizer):
    """The update of the module's docstring for parameters that start orthogonal."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["momentum"])

    def _update(self, parameter: Tensor, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        flat = parameter.reshape(parameter.shape[0], -1)
        wide = flat.shape[0] < flat.shape[1]
        weight = flat.T if wide else flat
        gradient = parameter.grad.reshape(flat.shape)  # type: ignore[union-attr]
        moment = state.get("momentum_buffer")
        moment = torch.zeros_like(weight) if moment is None else moment
        moment = momentum * moment + (gradient.T if wide else gradient)
        inner = weight.T @ moment
        tangent = moment - weight @ ((inner + inner.T) / 2)
        state["momentum_buffer"] = tangent
        gram = tangent.T @ tangent
        size = gram.diagonal().sum() + 1e-20
        gram = gram / size
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        whiten: Tensor | None = None
        for _ in range(4):
            factor = _QUINTIC[0] * identity + _QUINTIC[1] * gram + _QUINTIC[2] * (gram @ gram)
            whiten = factor if whiten is None else whiten @ factor
            gram = factor @ gram @ factor
        assert whiten is not None
        moved = weight - (lr / size.sqrt()) * (tangent @ whiten)
        moved = 1.5 * moved - 0.5 * moved @ (moved.T @ moved)
        parameter.copy_((moved.T if wide else moved).reshape(parameter.shape))
