"""What published formulas say and what networks do: one counterexample a claim of
docs/soundness.md, all in float64.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.formulas import (
    AttentionLayer,
    autolip,
    certvit,
    formula_value,
    lnformer,
    specformer,
)
from certcli.constrain.prox import l1
from certcli.engine import curves
from certcli.lipschitz.estimate import jacobian_norms
from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.arithmetic import lambert_w_upper
from certcli.lipschitz.numerics.convolution import Geometry, conv_norm
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention

D = 6
DH = 3


def slope(function: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """Largest singular value of the dense Jacobian at x."""
    jacobian = torch.autograd.functional.jacobian(function, x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def orthonormal(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(
        max(rows, columns), min(rows, columns), generator=generator, dtype=torch.float64
    )
    q = torch.linalg.qr(matrix)[0]
    return q if rows >= columns else q.T


def attended(
    query: Tensor, key: Tensor, value: Tensor, tokens: int, input_norm: float
) -> AttentionLayer:
    """One head, W_O the identity."""
    return AttentionLayer(
        "attn",
        (query,),
        (key,),
        (value,),
        torch.eye(len(value), dtype=value.dtype),
        tokens,
        input_norm,
    )


def test_gelu_is_steeper_than_printed() -> None:
    """CertViT, Appendix A: 1.12, read off a plot."""
    x = torch.tensor(math.sqrt(2), dtype=torch.float64)
    steepest = slope(functional.gelu, x.reshape(1))
    assert steepest > 1.1289
    assert steepest <= curves.GELU.slope


def test_kims_formula_as_printed_is_exceeded_and_our_bound_is_not() -> None:
    """Two tokens, large W_Q: the true slope grows with its square, the printed formula with its
    first power.
    """
    attention = (
        L2Attention(AttentionShape(D, 1, DH, bias=False, out_width=D, proj_bias=False))
        .double()
        .eval()
    )
    attention.query.weight.data = 20 * orthonormal(DH, D).contiguous()
    # |W_V| = |W_O| = 1: then `proj` is W_O W_h^T W_V / sqrt(dh), of norm 20 / sqrt(3)
    attention.proj.weight.data = 20 / 3**0.5 * orthonormal(D, DH).contiguous()

    class Lone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = attention

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x)

    net = Lone().eval()
    # two tokens torn between each other: |q_0 - q_1|^2 / sqrt(dh) = r with r / (1 + e^r) at its
    # largest
    apart = (
        (1.278 * 3**0.5) ** 0.5 / 20 * functional.normalize(attention.query.weight.data[0], dim=0)
    )
    x = torch.stack([torch.zeros(D, dtype=torch.float64), apart]).unsqueeze(0)
    logits = float(jacobian_norms(net, x, 60).max())
    assert logits > 5 * formula_value("l2former", net, (2, D)).layers[0][1]
    assert logits <= float(bound_network(net, (2, D), D).upper)


def test_l2_attention_with_values_of_its_own_is_not_lipschitz() -> None:
    """CertViT's code: softmax(-|q_i - q_j|^2 / sqrt(dh)) v with v = W_V x. No function of the
    weights bounds its slope.
    """
    query, value, tokens = orthonormal(DH, D), torch.eye(D, dtype=torch.float64), 5
    unseen = torch.linalg.qr(query.T, mode="complete")[0][:, DH]  # a direction in the kernel of W_Q

    def attention(x: Tensor) -> Tensor:
        q = x @ query.T
        return (-(q[:, None] - q[None]).square().sum(-1) / math.sqrt(DH)).softmax(-1) @ x @ value.T

    slopes = []
    for radius in (1.0, 1e2, 1e4):
        x = torch.zeros(tokens, D, dtype=torch.float64)
        x[0], x[1] = radius * unseen, -radius * unseen + query[0]
        slopes.append(slope(attention, x))
    # their formula: sqrt(n / dh) (4 W(n / e) + 1) sqrt(|W_Q| + |W_V|) |W_O|, all norms 1 here
    printed = math.sqrt(tokens / DH) * (4 * lambert_w_upper(tokens / math.e) + 1) * math.sqrt(2)
    assert slopes[0] < printed < slopes[1]
    assert slopes[2] == pytest.approx(
        100 * slopes[1], rel=0.05
    )  # in proportion to the length of the tokens


def test_specformers_theorem_is_false_at_zero() -> None:
    """At X = 0 the attention is the mean of all values: slope |W_V|, where the printed bound tends
    to 0 with delta.
    """
    query, key, value = (orthonormal(D, D) * scale for scale in (1.0, 2.0, 3.0))
    found = slope(
        lambda x: ((x @ query.T) @ (x @ key.T).T).softmax(-1) @ x @ value.T,
        torch.zeros(4, D, dtype=torch.float64),
    )
    assert found == pytest.approx(3.0, rel=1e-12)
    for delta in (0.0, 1e-3, 1e-2):
        assert specformer(nn.Identity(), [attended(query, key, value, 4, delta)])[0][1] < found


def test_lnformers_formula_forgets_the_values() -> None:
    """As quoted, 11 |W_O| |W_Q| |W_K|: with W_Q = 0 it is 0, and the layer is the mean of the
    values.
    """
    query = torch.zeros(D, D, dtype=torch.float64)
    value = 3 * orthonormal(D, D)
    x = torch.randn(4, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = slope(lambda x: torch.full((4, 4), 0.25, dtype=torch.float64) @ x @ value.T, x)
    assert lnformer(nn.Identity(), [attended(query, query, value, 4, 1.0)])[0][1] == 0
    assert found == pytest.approx(3.0, rel=1e-12)


class PreNorm(nn.Module):
    """x + W LN(x), half of a block of timm's ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, eps=1e-6)
        self.linear = nn.Linear(D, D, bias=False)
        self.linear.weight.data = 0.1 * orthonormal(D, D)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


def test_a_layer_norm_does_not_count_as_one() -> None:
    """At a token with equal features its slope is 1/sqrt(eps) = 1,000; blocks counted as |W| + 1
    are exceeded.
    """
    net = PreNorm()
    grey = torch.full((1, D), 0.5, dtype=torch.float64)
    found = slope(lambda x: net(x.unsqueeze(0))[0], grey)
    assert found > 50 * (1 + 0.1)
    assert found <= float(bound_network(net, (1, D), D).upper)


def test_a_layer_norm_does_not_map_to_the_unit_interval() -> None:
    """SpecFormer bounds |X| by it. A row is as long as sqrt(d), and entries reach sqrt(d - 1)."""
    x = functional.layer_norm(torch.eye(D, dtype=torch.float64), (D,))
    assert float(x.max()) > 2
    assert float(x.min()) < 0
    assert float(x.norm(dim=1).min()) > 0.99 * math.sqrt(D)


def test_a_product_of_spectral_norms_bounds_no_residual_network() -> None:
    """Scaman and Virmaux's product is for chains of layers: x + W x has more than |W|."""
    net = PreNorm()
    net.norm = nn.Identity()
    x = torch.zeros(1, D, dtype=torch.float64)
    product = math.prod(value for _, value in autolip(net, []))
    assert slope(lambda x: net(x.unsqueeze(0))[0], x) > 5 * product
    assert math.prod(value for _, value in certvit(net, [])) == product  # neither counts the skip


def test_groups_of_a_convolution_are_no_product() -> None:
    """Eight groups that halve their channel: the operator has norm 1/2, the product of the groups'
    norms is 2^-8.
    """
    weight = torch.full((8, 1, 1, 1), 0.5, dtype=torch.float64)
    known = conv_norm(weight, Geometry((1, 1), ((0, 0),) * 2, (1, 1), 8, (3, 3)))
    image = torch.ones(1, 8, 3, 3, dtype=torch.float64)
    logits = float(functional.conv2d(image, weight, groups=8).norm() / image.norm())
    assert logits == pytest.approx(0.5)
    assert math.prod(float(group.norm()) for group in weight) < logits <= known <= 0.5 * (1 + 1e-9)


def test_an_unknown_layer_does_not_count_as_one() -> None:
    """exp has slope e at 1. What has no theorem has no bound, and is named."""

    class Exponential(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp()

    result = bound_network(nn.Sequential(nn.Flatten(), Exponential()).eval(), (1, 2, 2), 4)
    assert not result.upper.finite
    assert "exp" in result.bound.why
    assert slope(torch.exp, torch.ones(1, dtype=torch.float64)) > 2.7


def test_a_sampled_slope_is_no_constant() -> None:
    """A hundred random images show a slope below 2; a grey one shows 100."""
    net = PreNorm()
    images = torch.rand(100, 1, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled = float(jacobian_norms(net, images, 30).max())
    grey = slope(lambda x: net(x.unsqueeze(0))[0], torch.full((1, D), 0.5, dtype=torch.float64))
    assert 50 * sampled < grey <= float(bound_network(net, (1, D), D).upper)


@pytest.mark.parametrize(("threshold", "f_is_more_robust"), [(1.4, False), (0.5, True)])
def test_smaller_singular_values_of_blocks_order_no_networks(
    threshold: float, f_is_more_robust: bool
) -> None:
    blocks = {"f": torch.diag(torch.tensor([0.5, 0.0])), "g": torch.diag(torch.tensor([0.0, 1.0]))}
    norms = {name: float(torch.linalg.matrix_norm(block, 2)) for name, block in blocks.items()}
    assert norms["f"] < norms["g"]  # the theorem's premise

    image = torch.tensor([1.0, 0.0])
    distances = {}
    for name, block in blocks.items():
        row = (torch.eye(2) + block)[0]  # the class is the sign of row @ image - threshold
        distances[name] = float(abs(row @ image - threshold) / torch.linalg.vector_norm(row))
    assert (distances["f"] > distances["g"]) == f_is_more_robust


def test_certvits_algorithm_1_diverges_as_printed() -> None:
    """The least sum of magnitudes on a ball of radius 2, which an exact projection meets."""
    centre = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sums = {}
    for sign in (1.0, -1.0):  # Douglas-Rachford's, the printed one
        state = centre
        for _ in range(40):
            near = l1(state, 0.1)
            away = 2 * near - state - centre
            projected = centre + away * min(1.0, 2.0 / float(away.norm()))
            state = state + 1.2 * sign * (projected - near)
        sums[sign] = float(near.abs().sum())
    # a soft threshold of the least t with |W - W0| = 2 is the solution
    assert sums[1.0] == pytest.approx(26.501, abs=1e-3)
    assert sums[-1.0] > 1e12


def test_certvits_algorithm_2_divides_nothing_by_nothing() -> None:
    """At W = W0, for any cut: both conditions before the last case fail."""
    away = torch.zeros(3, 3, dtype=torch.float64)
    cut = torch.ones(3, 3, dtype=torch.float64)
    pi, mu, nu = (away * cut).sum(), away.square().sum(), cut.square().sum()
    zeta = mu * nu - pi * pi
    assert not (zeta == 0 and pi > 0)
    assert not (zeta > 0 and pi * nu > zeta)
    assert (nu / zeta * (pi * away - mu * cut)).isnan().all()


def test_the_cauchy_papers_jacobian_has_a_product_in_the_wrong_order() -> None:
    """Equation (5), a = 1, five tokens: P diag(z) diag(mu) for diag(z) diag(mu) P."""
    ratios = []
    for seed in range(40):
        z = torch.randn(5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        weights = torch.outer(z, z).softmax(-1)
        mean = weights @ z
        rest = z[:, None] * weights * z + torch.diag(weights @ z**2 - mean**2) + weights
        true = torch.autograd.functional.jacobian(lambda z: torch.outer(z, z).softmax(-1) @ z, z)
        torch.testing.assert_close(rest - (z * mean)[:, None] * weights, true)
        printed = rest - weights * (z * mean)
        ratios.append(
            float(torch.linalg.matrix_norm(printed, 2) / torch.linalg.matrix_norm(true, 2))
        )
    assert min(ratios) < 0.9
    assert max(ratios) > 1.5
