"""Constants of attention computed once more from the statements in docs/bounds.md: bounds far above
slopes keep each term.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.norm import SimpleNorm

from certcli.lipschitz.network import bound_network
from certcli.lipschitz.rules.lipschitz_attention import _with_bias
from certcli.nn.norms import FloorNorm
from tests.helpers.lipschitz_cases import f, of_tokens
from tests.helpers.slopes import IMAGE
from tests.nn.test_attention import PLACES, SHIFTED, WIDTH, Lone, replacement, stir

FLOOR = 0.125
RADIUS = WIDTH**0.5
N = 4
Term = tuple[Tensor, Tensor]
"""c_h, one number a head, and W_h, (heads, dh, width)."""


def norms(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 2)


def together(terms: list[Term], pairs: list[Term] | None = None) -> float:
    """Section 5.4; pairs: of these, the two largest count."""
    every = terms + (pairs or [])
    by_term = sum(float(norms((c[:, None, None] * w).flatten(0, 1))) for c, w in every)
    heads = torch.stack([c * norms(w) for c, w in terms]).sum(0)
    if pairs:
        heads = heads + torch.stack([c * norms(w) for c, w in pairs]).topk(2, 0).values.sum(0)
    return min(by_term, float(heads.norm()))


def lambert(z: Tensor) -> Tensor:
    w = z.log1p()
    for _ in range(60):
        w = w - (w * w.exp() - z) / (w.exp() * (1 + w))
    return w


class Layer:
    """What the theorems speak of: the maps of the heads, B, its softmax, and the gates."""

    def __init__(self, module: Any, mask: Tensor | None) -> None:
        self.module = module
        heads = module.num_heads
        bias = torch.zeros(1, heads, N, N, dtype=torch.float64)
        bias = bias if module.window_size is None else bias + module.position_bias()
        self.bias = bias if mask is None else bias + mask[:, None]
        pi = self.bias.softmax(-1)
        self.columns, self.peak = pi.sum(-2).amax((0, 2)), pi.amax((0, 2, 3))
        self.root = pi.square().sum(-2).sqrt().amax((0, 2))
        self.keep, self.fixed = torch.ones(heads).double(), torch.zeros(heads).double()
        if module.gated:
            gate = module.gating_param.sigmoid()
            positions = (
                module.pos_proj(module.get_rel_indices(N).double())
                .permute(0, 3, 1, 2)
                .softmax(-1)[0]
            )
            self.keep, self.fixed = 1 - gate, gate * norms(positions)

    def map(self, name: str) -> Tensor:
        return getattr(self.module, name).weight.view(self.module.num_heads, -1, WIDTH)

    def cosine(self) -> float:
        nu = self.module.nu.abs()
        tau = self.module.tau.abs()
        grown = (2 * tau).exp()
        a = (grown * self.columns).clamp_max(N).sqrt()
        b = (N * (grown * self.peak).clamp_max(0.5)).sqrt()
        of_key = self.keep * nu * tau * b
        of_query = self.keep * nu * tau
        of_value = nu * (self.keep * a + self.fixed)
        return together(
            [
                (of_value, self.map("value")),
                (of_query, self.map("query")),
                (of_key, self.map("key")),
            ]
        )

    def lipschitz_norm(self) -> float:
        eta = math.exp(2)
        a = (self.columns + 2 * self.root + (eta - 3) * self.peak).clamp_max(N).sqrt()
        b = (eta * self.peak).clamp_max(0.5).sqrt()
        q = self.map("query")
        k = self.map("key")
        v = self.map("value")
        terms = [(self.keep * a + self.fixed, v), (self.keep, q), (self.keep * b, k)]
        return together(terms, [(self.keep, part) for part in (q, k, v)])

    def l2(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the constant of 6.2, and R_z, a, 2 (b_1 + b_2) of 6.3, for each head."""
        other = ~torch.eye(N, dtype=torch.bool)
        b = self.bias - self.bias.diagonal(dim1=-2, dim2=-1)[..., None]
        rows = lambert(((b - 1).exp() * other).sum(-1))
        each = lambert((b - 1).exp()) * other
        average = (1 + (b.sigmoid() * other).sum(-2).amax((0, 2))).sqrt()
        spread = rows.amax((0, 2))
        others = (rows[..., None] * each).sum(-2).amax((0, 2)).sqrt()
        z = RADIUS * norms(self.map("query")) * self.module.head_dim**-0.25
        grown = (4 * z * z).exp()
        a = torch.minimum(average, (grown * self.columns).sqrt())
        first = torch.minimum(spread.sqrt(), z)
        second = torch.minimum(
            each.sum(-2).amax((0, 2)).sqrt(),
            2 * z * (N * (grown * self.peak).clamp_max(0.5)).sqrt(),
        )
        return average + 2 * spread + 2 * others, z, a, 2 * (first + second)

    def tied(self) -> float:
        everywhere, z, a, moving = self.l2()
        return together(
            [
                (
                    self.keep * torch.minimum(everywhere, a + z * moving) + self.fixed,
                    self.map("query"),
                )
            ]
        )

    def untied(self) -> float:
        _, _, a, moving = self.l2()
        of_query = (
            self.keep * RADIUS * norms(self.map("value")) * moving * self.module.head_dim**-0.25
        )
        return together(
            [(self.keep * a + self.fixed, self.map("value")), (of_query, self.map("query"))]
        )


THEOREMS = {
    "scsa-attention": Layer.cosine,
    "lnorm-attention": Layer.lipschitz_norm,
    "l2-attention": Layer.tied,
    "l2-untied-value-attention": Layer.untied,
}


@pytest.mark.parametrize(
    "size", [0.05, 0.4, 2.0]
)  # of weights: each side of each minimum counts in one of them
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", THEOREMS)
@torch.no_grad()
def test_the_constant_is_that_of_the_theorem(name: str, place: str, size: float) -> None:
    attention: Any = replacement(name, PLACES[place]()).double().eval()
    stir(attention, size)
    mask = SHIFTED.double() if place == "shifted" else None
    for part in attention.children():
        if part.bias is not None:
            part.bias.zero_()
        part.weight -= part.weight.mean(
            1, keepdim=True
        )  # FloorNorm takes the mean of a token away, and may be folded
    attention.proj.weight.copy_(torch.eye(WIDTH))
    result = bound_network(
        Lone(attention, mask, FloorNorm(WIDTH, FLOOR)).double().eval(), (8, WIDTH), 3
    )
    expected = THEOREMS[name](Layer(attention, mask)) / FLOOR
    # 1e-9 below: the rounding of the numbers here; 1e-6 above: outward rounding, and gates that are
    # widened by 2^-40
    assert expected * (1 - 1e-9) <= float(result.upper) <= expected * (1 + 1e-6)


def test_what_rounding_loses_of_shifted_scores_is_added() -> None:
    """A number that is added to all scores changes no attention; beside 2^40 scores of 2^-13 are
    lost.
    """
    scores = torch.full((1, 1, N, N), 0.9 * 2.0**-13, dtype=torch.float64) * (1 - torch.eye(N))
    for shifted, plain in zip(_with_bias(scores + 2.0**40), _with_bias(scores), strict=True):
        assert bool((shifted >= plain).all())


class Dot(nn.Module):
    """torch's attention between linear maps without bias: in two heads, or (axis 1) of the halves
    of each token.
    """

    def __init__(self, scale: float | None, axis: int = 2) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.scale = scale
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            m(x).view(-1, N, 2, WIDTH // 2).transpose(1, self.axis)
            for m in (self.query, self.key, self.value)
        )
        return (
            functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
            .transpose(1, self.axis)
            .flatten(2)
        )


def dot(attention: nn.Module) -> tuple[list[Tensor], float]:
    """Return the maps of an attention with stirred weights that see no mean, and its bound on rows
    of length RADIUS.
    """
    attention = attention.double().eval()
    stir(attention, 0.4)
    weights = [part.weight for part in attention.modules() if isinstance(part, nn.Linear)]
    for weight in weights:
        weight -= weight.mean(1, keepdim=True)
    result = bound_network(
        Lone(attention, None, FloorNorm(WIDTH, FLOOR)).double().eval(), (8, WIDTH), 3
    )
    return weights, float(result.upper) * FLOOR


@torch.no_grad()
def test_halves_of_a_token_that_attend_to_each_other_are_rows_not_heads() -> None:
    (q, k, v), found = dot(Dot(None, axis=1))
    q_norm, k_norm, v_norm = (float(norms(part)) for part in (q, k, v))
    moving = RADIUS**2 * (WIDTH // 2) ** -0.5 * q_norm * k_norm * v_norm
    expected = 2**0.5 * v_norm + moving * (1 + (2 / 2) ** 0.5)
    assert (
        expected * (1 - 1e-9) <= found <= expected * (1 + 3e-6)
    )  # three norms, each proven to 1e-6


@torch.no_grad()
def test_queries_that_are_constant_count_by_their_longest_row() -> None:
    def attend(m: nn.Module, x: Tensor) -> Tensor:
        key, value = m.parts
        return functional.scaled_dot_product_attention(
            m.t.expand(len(x), -1, -1), key(x), value(x), scale=1.0
        )

    maps = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    (k, v), found = dot(
        f(
            attend,
            *maps,
            t=torch.tensor([[1.0, 0, 2, 0], [1.0, 5, 1, 3], [3.0, 0, 3, 0], [2.0, 0, 0, 2]]),
        )
    )
    expected = float(norms(v) * (N**0.5 + (N / 2) ** 0.5 * RADIUS * 6 * norms(k)))
    assert expected * (1 - 1e-9) <= found <= expected * (1 + 3e-6)


@torch.no_grad()
def test_a_norm_by_the_variance_has_the_constant_of_theorem_4_7() -> None:
    for scale in (0.01, 4.0):
        logits = float(
            bound_network(
                of_tokens(SimpleNorm(8, affine=False, eps=0.1), scale=scale).eval(), IMAGE, 3
            ).upper
        )
        expected = scale * (
            0.1**-0.5 + scale * 1.5 * 8**0.5 / (7**0.5 * 0.1)
        )  # of (x - 1/2) scale 3/2 scale is known
        assert expected * (1 - 1e-9) <= logits <= expected * (1 + 1e-6)


@pytest.mark.parametrize("scale", [None, 3.0, -3.0])
@torch.no_grad()
def test_dot_products_have_the_constant_of_theorem_5_2(scale: float | None) -> None:
    """With R_v = |W_V| R of each head, and the smaller of two ways to put heads together."""
    maps, found = dot(Dot(scale))
    q, k, v = (weight.view(2, -1, WIDTH) for weight in maps)

    def heads(weights: Tensor, maps: Tensor) -> Tensor:
        return torch.minimum(
            weights.max() * norms(maps.flatten(0, 1)), (weights * norms(maps)).norm()
        )

    factor = (WIDTH // 2) ** -0.5 if scale is None else abs(scale)
    radius = RADIUS**2 * norms(v)
    of_query = heads(radius * norms(k), q)
    of_key = (N / 2) ** 0.5 * heads(radius * norms(q), k)
    expected = float(N**0.5 * norms(v.flatten(0, 1)) + factor * (of_query + of_key))
    assert expected * (1 - 1e-9) <= found <= expected * (1 + 1e-6)
