"""The rounding of the last linear layer, logit by logit."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401 (before timm)
from certcli.engine.table import runs_known_code
from certcli.engine.trace import Trace, last_of
from certcli.lipschitz.numerics.real import Real
from certcli.rounding.precisions import Precision
from certcli.rounding.stored import LinearMap


@dataclass(frozen=True)
class Head:
    """The last linear layer: its rounding, logit by logit."""

    layer: LinearMap
    exact: Tensor

    def pairs(self, error: Real, total: Real, whole: Real) -> Tensor:
        """Return bounds on the rounding of z_i - z_j: (k, k).

        |w_i - w_j| e of the features' error e, and of each logit gamma (|w_i| |x| + |b_i|) and what storing w_i moves.

        Args:
            total: The norm of the executed features.
            whole: The error of all logits; infinite where they may overflow.
        """
        p = self.layer.precision
        layer = self.layer
        up = 1 + 2.0**-30
        if not (whole.finite and float(total) < 1e150 and float(error) < 1e150):
            return torch.full((layer.out, layer.out), math.inf, dtype=torch.float64)
        size = float(total)
        gamma = float(p.products(layer.terms))
        norm = torch.linalg.vector_norm(layer.weight.number, dim=1)
        rounding = norm * (size * gamma) + float(p.lost(layer.terms, 1.0))
        rounding = (
            rounding
            + (torch.linalg.vector_norm(layer.weight.difference, dim=1) + layer.weight.flushed)
            * size
        )
        if layer.bias is not None:
            rounding = (
                rounding
                + layer.bias.number.abs() * gamma
                + layer.bias.difference.abs()
                + layer.bias.flushed
            )
        distances = torch.cdist(self.exact, self.exact, compute_mode="donot_use_mm_for_euclid_dist")
        return (distances * float(error) + rounding[:, None] + rounding[None, :]) * up + 1e-300


def head_of(traced: Trace, precision: Precision) -> Head | None:
    """Return the linear layer that makes the logits, where one does."""
    node = last_of(traced)
    if node.op != "call_module" or len(node.meta["shape"]) != 2:
        return None
    module = traced.root.get_submodule(str(node.target))
    if (
        not runs_known_code(module, nn.Linear)
        or not isinstance(module, nn.Linear)
        or module.out_features > 4096
    ):
        return None
    return Head(LinearMap(module.weight, module.bias, precision), module.weight.detach().double())
