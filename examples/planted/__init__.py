"""Planted counterexamples: networks of plain torch, each with an image inside a radius that a
careless certifier grants.

    python -m examples.planted FOLDER     # every case as safetensors, and cases.json

A certifier is wrong if, for the image of a case, it claims a radius of at least `distance`:
`adversary` lies there and has another class. `careless` is the radius that the named mistake
grants, computed from the same weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy.special import lambertw
from torch import Tensor, nn

SIZE = (1, 2, 2)


class Planted(NamedTuple):
    """A network of pixels in [0, 1], two images (1, 2, 2), and the radius that a mistake grants the
    first.
    """

    net: nn.Module
    image: Tensor
    adversary: Tensor
    careless: float

    @property
    def distance(self) -> float:
        return float((self.image - self.adversary).norm())


@dataclass(frozen=True)
class Case:
    """A mistake and the network that it fails on."""

    mistake: str
    make: Callable[[], Planted]


class Step(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    """Return a linear layer in float64 with this matrix."""
    values = torch.tensor(weight, dtype=torch.float64)
    layer = nn.Linear(values.shape[1], len(values), dtype=torch.float64)
    layer.weight.data = values
    layer.bias.data = torch.tensor(bias or [0.0] * len(values), dtype=torch.float64)
    return layer


def _network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers).eval().requires_grad_(False)


def _image(*pixels: float) -> Tensor:
    return torch.tensor(pixels, dtype=torch.float64).view(SIZE)


def _margin(net: nn.Module, image: Tensor) -> float:
    with torch.no_grad():
        logits = net(image[None])[0]
    return float(logits[0] - logits[1:].max())


_MARGIN = [[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]
"""z_0 - z_1 = 2 x_0, with |w_0 - w_1| = 2."""


def _layer_norm() -> Planted:
    """LayerNorm counted by its gain, max |gamma| = 1. At a token of deviation s its slope is 1 / s."""
    net = _network(nn.LayerNorm(4, dtype=torch.float64), linear([[1, -1, 0, 0], [-1, 1, 0, 0]]))
    image = _image(0.501, 0.499, 0.5, 0.5)
    adversary = _image(0.499, 0.501, 0.5, 0.5)
    return Planted(net, image, adversary, _margin(net, image) / math.sqrt(8))


class _Normalised(nn.Module):
    """(x - 0.5) / 0.1, as most classifiers begin."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.5) / 0.1


def _pixels() -> Planted:
    """The pixels' normalisation left out: radii of normalised images are 10 times those of pixels."""
    net = _network(_Normalised(), linear(_MARGIN))
    return Planted(
        net, _image(0.52, 0.5, 0.5, 0.5), _image(0.45, 0.5, 0.5, 0.5), (2 * 0.02 / 0.1) / 2
    )


class _Attention(nn.Module):
    """Two keys and values, -1 and 1, and the first pixel as query: its output is tanh(s (x_0 -
    0.5)).
    """

    def forward(self, x: Tensor) -> Tensor:
        query = 1000.0 * (x[:, :1] - 0.5)
        keys = torch.tensor([[-1.0, 1.0]], dtype=x.dtype)
        weights = (query * keys).softmax(dim=-1)
        return (weights * keys).sum(dim=-1, keepdim=True)


def _attention() -> Planted:
    """Attention counted by its values, as though the weights did not move with the image."""
    net = _network(_Attention(), linear([[1.0], [-1.0]]))
    return Planted(net, _image(0.505, 0.5, 0.5, 0.5), _image(0.495, 0.5, 0.5, 0.5), 0.99)


class _L2Attention(nn.Module):
    """Two tokens (a, b) of two pixels; softmax of -|q_i - q_j|^2 with q = 10000 a, and values b
    that are not tied to q.
    """

    query = 1e4

    def forward(self, x: Tensor) -> Tensor:
        q = self.query * x[:, 0::2]
        values = x[:, 1::2]
        difference = q.unsqueeze(2) - q.unsqueeze(1)
        weights = (difference * difference * -1.0).softmax(dim=-1)
        return (weights * values.unsqueeze(1)).sum(dim=-1)


def _l2_attention() -> Planted:
    """L2 attention without A_h, by sqrt(n / d) (4 W(n / e) + 1) sqrt(|W_Q| + |W_V|), with n = 2, d
    = 1 and |W_V| = 1.
    """
    net = _network(_L2Attention(), linear([[1.0, 0], [-1.0, 0]], [-0.75, 0.75]))
    image = _image(0.50015, 1.0, 0.5, 0.0)
    adversary = _image(0.50006, 1.0, 0.5, 0.0)
    slope = (
        math.sqrt(2)
        * (4 * float(lambertw(2 / math.e).real) + 1)
        * math.sqrt(_L2Attention.query + 1)
    )
    return Planted(net, image, adversary, _margin(net, image) / (2 * slope))


class _Masked(nn.Module):
    """Scores s and s of two equal keys, of which a mask sets the second to 0: the weights move with
    s after all.
    """

    def forward(self, x: Tensor) -> Tensor:
        scores = 1000.0 * (x[:, :1] - 0.5) * torch.ones(1, 2, dtype=x.dtype)
        weights = scores.masked_fill(torch.tensor([[False, True]]), 0.0).softmax(dim=-1)
        return (weights * torch.tensor([[1.0, -1.0]], dtype=x.dtype)).sum(dim=-1, keepdim=True)


def _mask() -> Planted:
    """A score replaced by a number, counted as a number added: equal keys would have equal weights,
    whatever the image.
    """
    net = _network(_Masked(), linear([[1.0], [-1.0]]))
    return Planted(net, _image(0.505, 0.5, 0.5, 0.5), _image(0.495, 0.5, 0.5, 0.5), math.inf)


def _tie() -> Planted:
    """A margin that is nowhere below 0 taken for a proof: beyond the kink both logits are 0, and
    class 0 comes first.
    """
    net = _network(linear([[0.0, 0, 0, 0], [1.0, 0, 0, 0]], [0.0, -0.5]), nn.ReLU())
    return Planted(net, _image(0.55, 0.5, 0.5, 0.5), _image(0.48, 0.5, 0.5, 0.5), math.inf)


def _power_iteration() -> Planted:
    """A norm by power iteration, which starts orthogonal to the largest singular vector: 1 in place
    of 10.
    """
    root = math.sqrt(0.5)
    rotation = [[root, root, 0, 0], [10 * root, -10 * root, 0, 0]]
    net = _network(linear(rotation), linear([[0, 1], [0, -1]]))
    weight = net[1].weight.detach()
    start = torch.ones(4, dtype=torch.float64)
    for _ in range(100):
        start = weight.T @ (weight @ start)
        start = start / start.norm()
    norm = float((weight @ start).norm())
    image = _image(0.53, 0.5, 0.5, 0.5)
    adversary = _image(0.47, 0.5, 0.5, 0.5)
    return Planted(net, image, adversary, _margin(net, image) / (norm * 2))


class _Twice(nn.Module):
    """The same features, concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x], dim=-1)


def _concatenation() -> Planted:
    """Concatenated branches counted by the largest of them, 1 in place of sqrt(2)."""
    net = _network(_Twice(), linear([[1, 0, 0, 0] * 2, [-1, 0, 0, 0] * 2], [-1.0, 1.0]))
    image = _image(0.6, 0.5, 0.5, 0.5)
    adversary = _image(0.48, 0.5, 0.5, 0.5)
    return Planted(net, image, adversary, 4 * 0.1 / (2 * math.sqrt(2)))


class _Residual(nn.Module):
    """x + f(x) with f(x) = x."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x


def _residual() -> Planted:
    """A residual counted by its branch, max(1, L) in place of 1 + L."""
    net = _network(_Residual(), linear(_MARGIN, [-1.0, 1.0]))
    return Planted(net, _image(0.6, 0.5, 0.5, 0.5), _image(0.45, 0.5, 0.5, 0.5), 4 * 0.1 / 2)


class _OnTheBatch(nn.Module):
    """Nine copies of the image, as a batch of nine, and their sum."""

    def forward(self, x: Tensor) -> Tensor:
        copies = x.repeat_interleave(9, dim=0)
        return (copies * 1.0).reshape(-1, 9, 4).sum(dim=1)


def _batch_axis() -> Planted:
    """Tokens on the batch axis counted as though they were other images: 1 in place of 9."""
    net = _network(_OnTheBatch(), linear(_MARGIN, [-4.5, 4.5]))
    return Planted(net, _image(0.55, 0.5, 0.5, 0.5), _image(0.45, 0.5, 0.5, 0.5), 2 * 9 * 0.05 / 2)


def _reordered() -> Planted:
    """Pairs of rows read before the logits are reordered: |w_0 - w_1| = 0.2 in place of |w_2 - w_0|
    = 2.
    """
    net = _network(
        linear([[1, 0, 0, 0], [0.8, 0, 0, 0], [-1, 0, 0, 0]], [-0.5, -5, 0.5]),
        Step(lambda z: z[:, [0, 2, 1]]),
    )
    return Planted(net, _image(0.52, 0.5, 0.5, 0.5), _image(0.45, 0.5, 0.5, 0.5), 2 * 0.02 / 0.2)


def _cancelling() -> Planted:
    """Rounding left out: biases of 2^55 absorb the image, and cancel in the head."""
    large = 2.0**55
    net = _network(
        linear([[16.0, 0, 0, 0]], [large]),
        linear([[1.0], [-1.0]], [-large, large]),
        linear([[1.0, 0.0], [0.0, 1.0]], [-4.0, 4.0]),
    )
    image = _image(0.251, 0.5, 0.5, 0.5)
    return Planted(net, image, _image(0.249, 0.5, 0.5, 0.5), _margin(net, image) / 32)


def _underflow() -> Planted:
    """Norms multiplied in float32: 1e-30 1e-30 is 0, and so is the constant of the network."""
    tiny = [[1e-30 if row == column else 0.0 for column in range(4)] for row in range(4)]
    huge = [[1e60 * entry for entry in row] for row in _MARGIN]
    net = _network(linear(tiny), linear(tiny), linear(huge, [-0.5, 0.5]))
    image = _image(0.52, 0.5, 0.5, 0.5)
    constant = torch.tensor(1.0)
    for layer in (net[1], net[2], net[3]):
        constant = constant * torch.linalg.matrix_norm(layer.weight, 2).float()
    radius = (
        math.inf
        if float(constant) == 0 or not constant.isfinite()
        else _margin(net, image) / float(constant)
    )
    return Planted(net, image, _image(0.45, 0.5, 0.5, 0.5), radius)


def _slope() -> Planted:
    """The gradient at the image in place of a bound: 0 on the flat side of a ReLU."""
    net = _network(
        linear([[50.0, 0, 0, 0]], [-30.0]), nn.ReLU(), linear([[-1.0], [1.0]], [0.5, -0.5])
    )
    image = _image(0.55, 0.5, 0.5, 0.5).requires_grad_()
    logits = net(image[None])[0]
    (gradient,) = torch.autograd.grad(logits[0] - logits[1], image)
    margin = float((logits[0] - logits[1]).detach())
    length = float(gradient.norm())
    return Planted(
        net, image.detach(), _image(0.62, 0.5, 0.5, 0.5), margin / length if length else math.inf
    )


CASES: dict[str, Case] = {
    "layer-norm": Case("LayerNorm counted as 1", _layer_norm),
    "pixels": Case("the pixels' normalisation left out", _pixels),
    "attention": Case("attention's weights taken for constants", _attention),
    "l2-attention": Case("L2 attention without the factor A_h", _l2_attention),
    "mask": Case("a score replaced by a mask, counted as a number added", _mask),
    "power-iteration": Case("a norm by power iteration", _power_iteration),
    "concatenation": Case("concatenated branches by the largest of them", _concatenation),
    "residual": Case("a residual by max(1, L)", _residual),
    "batch-axis": Case("tokens on the batch axis taken for images", _batch_axis),
    "reordered": Case("rows of the head read before a reordering", _reordered),
    "cancelling": Case("rounding left out", _cancelling),
    "underflow": Case("norms multiplied in float32", _underflow),
    "tie": Case("a margin of 0 counted as won", _tie),
    "slope": Case("the gradient at the image taken for a bound", _slope),
}
