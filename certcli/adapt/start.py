"""Closed-form starts: each new part as close to the part it replaces as linear algebra makes it."""

import torch
from timm.layers.attention import Attention
from torch import Tensor, nn

from certcli.nn.l2_attention import L2Attention
from certcli.nn.norms import CenterNorm


def tie_queries(new: L2Attention, old: Attention) -> None:
    """W_h with 2 W_h^T W_h the best positive approximation of rank dh to the logits' form W_Q,h^T W_K,h.

    L2 logits are 2 q_i.q_j - |q_j|^2 up to a constant of the row; dot-product logits are q_i.k_j. The nearest symmetric
    matrix to A is (A + A^T) / 2, its nearest positive semidefinite one of rank dh keeps the dh largest positive
    eigenvalues (Eckart-Young for symmetric matrices).
    """
    heads, width = new.num_heads, new.head_dim
    weight = old.qkv.weight.detach().double()
    inner = heads * width
    rows = []
    for h in range(heads):
        query = weight[h * width : (h + 1) * width]
        key = weight[inner + h * width : inner + (h + 1) * width]
        product = query.T @ key
        values, vectors = torch.linalg.eigh((product + product.T) / 2)
        top, directions = values[-width:].clamp_min(0), vectors[:, -width:]
        # a direction that the logits do not use still carries values: give it a small weight instead of none
        floor = 1e-2 * top.max().clamp_min(1e-12)
        rows.append((top.clamp_min(floor) / 2).sqrt().unsqueeze(1) * directions.T)
    new.query.weight.data.copy_(torch.cat(rows).to(new.query.weight))
    if new.query.bias is not None:
        new.query.bias.data.zero_()


def center_norm_start(new: CenterNorm, inputs: Tensor, targets: Tensor) -> None:
    """Per feature, the least-squares gain and offset from the centred inputs to the old norm's outputs: (t, d) x 2."""
    centred = inputs.double() - inputs.double().mean(dim=-1, keepdim=True)
    wanted = targets.double()
    offset = wanted.mean(dim=0)
    middle = centred.mean(dim=0)
    spread = centred - middle
    gain = (spread * (wanted - offset)).sum(0) / spread.square().sum(0).clamp_min(1e-12)
    width = new.width
    new.weight.data.copy_((gain * (width - 1) / width).to(new.weight))
    new.bias.data.copy_((offset - gain * middle).to(new.bias))


class LeastSquares:
    """min over (W, b) of sum |W x + b - y|^2, accumulated in float64 from batches of rows x (t, m), y (t, n)."""

    def __init__(self, inputs: int, outputs: int, device: torch.device) -> None:
        self.gram = torch.zeros(inputs + 1, inputs + 1, dtype=torch.float64, device=device)
        self.cross = torch.zeros(inputs + 1, outputs, dtype=torch.float64, device=device)

    def add(self, x: Tensor, y: Tensor) -> None:
        rows = torch.cat([x.double(), torch.ones(len(x), 1, dtype=torch.float64, device=x.device)], dim=1)
        self.gram += rows.T @ rows
        self.cross += rows.T @ y.double()

    def solve_into(self, layer: nn.Linear, ridge: float = 1e-4) -> None:
        """Write the solution into `layer`. The ridge is relative to the mean eigenvalue.

        It keeps directions quiet that the images hardly excite: on a digits ViT 1e-4 costs one point of relative error a
        block against 1e-6, and the network's bound is 400 to 4,000 times smaller.
        """
        size = len(self.gram)
        strength = ridge * self.gram.diagonal().mean().clamp_min(1e-30)
        solution = torch.linalg.solve(self.gram + strength * torch.eye(size).to(self.gram), self.cross)
        layer.weight.data.copy_(solution[:-1].T.to(layer.weight))
        if layer.bias is not None:
            layer.bias.data.copy_(solution[-1].to(layer.bias))


def fold_center_norm(norm: CenterNorm, layer: nn.Linear) -> None:
    """W <- d/(d-1) W diag(weight) P, b <- b + W bias: the same function with the norm multiplied into the next map."""
    weight = layer.weight.detach().double()
    scaled = weight * norm.weight.detach().double() * (norm.width / (norm.width - 1))
    if layer.bias is not None:
        layer.bias.data.copy_((layer.bias.detach().double() + weight @ norm.bias.detach().double()).to(layer.bias))
    layer.weight.data.copy_((scaled - scaled.mean(dim=1, keepdim=True)).to(layer.weight))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """|found - wanted|_F / |wanted|_F."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))
