"""Theorems computed once more from docs/bounds.md, and networks where each inequality is an equality."""

import certcli.system.compat  # noqa: F401

# isort: split
import math
from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from timm.layers.grn import GlobalResponseNorm
from timm.layers.norm import SimpleNorm
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.moves import Move
from certcli.lipschitz.context import Context, Walk
from certcli.lipschitz.network import bound_network, propagate, trace_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix
from certcli.lipschitz.rules.joined import _convex_shares
from certcli.lipschitz.rules.lipschitz_attention import _with_bias
from certcli.lipschitz.rules.moves import rearranged_bound
from certcli.lipschitz.value import Affine, Size, Value
from certcli.models.pixels import PixelNormalize
from certcli.nn.blocks import ConvexResidual, FloorNorm
from tests.helpers.lipschitz_cases import f, of_tokens, replaced_by
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
        of_key = self.keep * nu * tau * (N * (grown * self.peak).clamp_max(0.5)).sqrt()
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


ONE = (1, 1, 1)


def ones(*layers: nn.Module) -> nn.Module:
    """Layers whose parameters are all 1, on one token of one number."""
    net = nn.Sequential(nn.Flatten(2), *layers).double().eval().requires_grad_(False)
    for parameter in net.parameters():
        parameter.fill_(1.0)
    return net


def middle(kernel: nn.Conv2d) -> nn.Conv2d:
    """3 x 3 weights of which the middle one counts."""
    kernel.weight.data = functional.pad(torch.ones(1, 1, 1, 1), (1, 1, 1, 1)).double()
    return kernel


def plain(*layers: nn.Module) -> nn.Module:
    """Layers on images; parameters that were made in float32 become 1."""
    for parameter in nn.Sequential(*layers).parameters():
        if parameter.dtype == torch.float32:
            parameter.data = torch.ones_like(parameter).double()
    return nn.Sequential(*layers).double().eval().requires_grad_(False)


ATTAINED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "attention": (lambda: ones(Attention(1, 1, qkv_bias=True)), ONE),
    **{
        name: (lambda name=name: ones(replaced_by(name, Attention(1, 1, qkv_bias=True))), ONE)  # type: ignore[misc]
        for name in ("l2-attention", "l2-untied-value-attention", "lnorm-attention")
    },
    "attention-fused": (
        lambda: ones(f(lambda m, x: functional.scaled_dot_product_attention(x, x, m.parts[0](x)), nn.Linear(1, 1))), ONE
    ),
    "linear": (lambda: ones(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)), ONE),
    "constants": (lambda: ones(f(lambda m, x: torch.cat([x, 7 * m.t], 1) + m.t, t=torch.ones(1, 1, 1))), ONE),
    "side by side": (lambda: ones(f(lambda m, x: torch.cat([x, x], -1))), ONE),
    "beside a constant": (lambda: ones(f(lambda m, x: torch.cat([x, 7 * m.t], 1), t=torch.ones(1, 1, 1))), ONE),
    "convex residual": (lambda: ones(f(lambda m, x: m.parts[0](x, m.parts[1](x)), ConvexResidual(), nn.Linear(1, 1))), ONE),
    "normalised": (lambda: plain(PixelNormalize((-0.5,), (0.5,)), nn.ReLU(), nn.BatchNorm2d(1, eps=0.0)), ONE),
    "convolution": (lambda: plain(nn.ReLU(), middle(nn.Conv2d(1, 1, 3, padding=1))), ONE),
    "transposed convolution": (lambda: plain(nn.ReLU(), nn.ConvTranspose2d(1, 1, 1)), ONE),
    "convolution after a bias": (lambda: plain(nn.Conv2d(2, 1, 1), middle(nn.Conv2d(1, 1, 3, padding=1))), (2, 1, 1)),
    "convolution of more channels than pixels": (lambda: plain(nn.ReLU(), nn.Conv2d(16, 1, 1, stride=2)), (16, 1, 2)),
    "averages beside the axis of which something is known": (
        lambda: plain(f(lambda m, x: functional.normalize(x, dim=1)), nn.AvgPool2d(1)), (2, 4, 4)
    ),
    "rows that are laid end to end": (
        lambda: plain(f(lambda m, x: functional.normalize(x.flatten(2), dim=-1).flatten(1))), (2, 4, 4)
    ),
    "response norm": (lambda: plain(GlobalResponseNorm(1, channels_last=False)), ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTAINED)
def test_the_largest_image_is_as_large_as_is_said(name: str) -> None:
    make, shape = ATTAINED[name]
    net = make()
    outcome = propagate(trace_network(net, shape), Arithmetic())
    size = outcome.context.settle(outcome.logits).size
    result = net(torch.ones(1, *shape).double())
    pairs = [
        (float(size.total), float(result.norm())),
        (float(size.peak), float(result.abs().max())),
    ]
    pairs += [
        (float(size.fibre_along(a)), float(result.norm(dim=a).max()))
        for a in range(-result.dim(), 0)
    ]
    assert all(proven >= found * (1 - 1e-14) for proven, found in pairs)  # what is rounded here
    assert any(
        proven <= found * (1 + 1e-6) for proven, found in pairs
    )  # promised by spectral norms


@pytest.mark.parametrize("times", range(2, 12))
def test_copies_of_a_number_are_off_by_no_less_than_all_of_them(times: int) -> None:
    arith = Arithmetic()
    before = (1, 2, times)
    after = (1, 2 * times)
    pending = Affine(axis=-2, width=2, bias=Matrix(torch.ones(2, 1).double(), 0.1))
    value = Value(arith.const(1.0), Size(arith, before), pending, None, before)
    context = Context("", "reshape", after, walk=Walk(arith))
    merged = rearranged_bound(context, value, Move(torch.Tensor.reshape, (after,)))
    truth = times * Fraction(0.1) ** 2
    assert truth <= Fraction(merged.pending.bias.error) ** 2 <= truth * (1 + Fraction(1, 2**49))


@pytest.mark.parametrize("theta", [-30.0, -1.0, 0.0, 0.3, 2.0, 36.0])
def test_shares_of_a_convex_residual_are_no_smaller_than_they_are(theta: float) -> None:
    context: Any = SimpleNamespace(arith=Arithmetic())
    rest, share = _convex_shares(context, torch.tensor(theta, dtype=torch.float64))
    with localcontext(prec=50):
        true_share = 1 / (1 + (-Decimal(theta)).exp())
        assert Decimal(float(share)) > true_share
        assert Decimal(float(rest)) > 1 - true_share
