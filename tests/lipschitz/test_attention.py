"""What single theorems of attention say: the counterexamples that they exclude, and the cases in which they agree."""

import pytest
import torch
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention

from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.arithmetic import lambert_w_upper
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.lipschitz.propagate import propagate, trace_network
from certcli.lipschitz.rules.l2_attention import l2_mixing_constant, lambert_w_of_exp
from certcli.nn.surgery import REPLACEMENTS
from tests.nn.test_attention import CPU, PLACES, WIDTH, Lone, network, steepest


def test_unbounded_rows_leave_untied_values_without_a_bound() -> None:
    """The engine knows no size of a tensor whose entries were overwritten by a constant."""

    class Overwritten(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(torch.zeros(1, 8, WIDTH, dtype=torch.bool), 7.0)

    attention = REPLACEMENTS.load("l2-untied-value-attention")(PLACES["tokens"]())
    result = bound_network(Lone(attention, norm=Overwritten()).eval(), (8, WIDTH), 3)
    assert not result.upper.finite
    assert "untied values" in result.bound.why


def _two_tokens(kind: str, **weights: Tensor) -> nn.Module:
    attention = REPLACEMENTS.load(kind)(Attention(2, 1, proj_bias=False)).double().eval()
    for name, value in {"proj": torch.eye(2), **weights}.items():
        attention.get_submodule(name).weight.data.copy_(value)
    return attention


class Biased(nn.Module):
    """Two tokens in [-4, 4]^2, from pixels in [0, 1], that prefer each other by b over themselves."""

    def __init__(self, attention: nn.Module, b: float) -> None:
        super().__init__()
        self.attention = attention
        self.register_buffer("mask", torch.tensor([[[0.0, b], [b, 0.0]]], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(8 * (x - 0.5), mask=self.mask)


def test_positive_position_biases_exceed_the_constant_without_positions() -> None:
    """b = 10 and two tokens: slopes of 10 are found, c_2 is below 3. Theorem 6.2 counts b."""
    net = Biased(_two_tokens("l2-attention", query=torch.eye(2)), 10.0).eval()
    root = 2**0.25  # z = q / dh^(1/4)
    tokens = root * torch.stack([torch.tensor([[-r, 0.0], [r, 0.0]]) for r in torch.linspace(0.5, 2, 60)]).double()
    found = steepest(net, 0.5 + tokens / 8, steps=3) / 8
    assert found > 3 * l2_mixing_constant(2)
    assert found <= float(bound_network(net, (2, 2), 2).upper) / 8


@pytest.mark.parametrize("name", ["l2-attention", "l2-untied-value-attention"])
def test_short_rows_are_averaged(name: str) -> None:
    """Logits of tokens of length 1e-3 differ by 1e-6: attention is the mean, whose constant is 1."""
    attention = REPLACEMENTS.load(name)(PLACES["tokens"]())
    for layer in attention.children():
        layer.weight.data.copy_(torch.eye(WIDTH))
    net = Lone(attention, span=1e-3).double().eval()
    found = steepest(net, torch.full((1, 8, WIDTH), 0.5).double(), steps=1)
    assert found == pytest.approx(1e-3, rel=1e-6)
    assert found <= float(bound_network(net, (8, WIDTH), 3).upper) <= found * (1 + 1e-4)


def test_a_token_that_sees_only_itself_is_averaged_with_nothing() -> None:
    """A mask that leaves the diagonal: P = I, whose constant is 1; and the bound has a gradient."""
    attention = REPLACEMENTS.load("l2-attention")(PLACES["tokens"]())
    attention.query.weight.data.copy_(torch.eye(WIDTH))
    attention.proj.weight.data.copy_(torch.eye(WIDTH))
    alone = torch.full((2, 4, 4), -torch.inf).masked_fill(torch.eye(4, dtype=torch.bool), 0.0)
    net = Lone(attention, alone).double().eval()
    assert float(bound_network(net, (8, WIDTH), 3).upper) == pytest.approx(1.0, rel=1e-8)
    outcome = propagate(trace_network(net, (8, WIDTH)), TrainableArithmetic(CPU, 50))
    outcome.context.settle(outcome.logits).base.backward()
    assert attention.query.weight.grad.isfinite().all()


class Copies(nn.Module):
    """One sequence as three windows, of which the first is returned: the input repeated costs sqrt(3)."""

    def __init__(self, attention: nn.Module, mask: Tensor | None) -> None:
        super().__init__()
        self.attention, self.mask = attention, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.expand(3, -1, -1), mask=self.mask)[:1]


@pytest.mark.parametrize("n", [2, 7, 49])
@pytest.mark.parametrize("name", ["l2-attention", "l2-untied-value-attention", "scsa-attention", "lnorm-attention"])
def test_position_biases_of_zero_cost_nothing(name: str, n: int) -> None:
    attention = REPLACEMENTS.load(name)(PLACES["tokens"]()).eval()
    without, zeros = (
        bound_network(Copies(attention, mask).eval(), (n, WIDTH), 2).upper for mask in (None, torch.zeros(3, n, n))
    )
    # 1e-8: the outward rounding of the general constants
    assert float(without) <= float(zeros) * (1 + 1e-12)
    assert float(zeros) <= float(without) * (1 + 1e-8)
    if name == "l2-attention":
        attention.query.weight.data.copy_(torch.eye(WIDTH))
        attention.proj.weight.data.copy_(torch.eye(WIDTH))
        tied = bound_network(Copies(attention, None).eval(), (n, WIDTH), 2).upper
        assert float(tied) == pytest.approx(3**0.5 * l2_mixing_constant(n), rel=1e-8)


def test_untied_values_grow_along_what_the_queries_do_not_see() -> None:
    """|J| is proportional to the length R of the rows: no bound without one, and ours grows in proportion too."""
    net = _two_tokens("l2-untied-value-attention", query=torch.tensor([[1.0, 0.0], [0.0, 0.0]]), value=torch.eye(2))
    slopes = [steepest(net, torch.tensor([[[0.0, r], [1.0, -r]]]).double(), steps=1) for r in (1.0, 10.0, 1000.0)]
    assert slopes[1] > 5 * slopes[0]
    assert slopes[2] == pytest.approx(100 * slopes[1], rel=0.1)


def test_the_bound_has_a_gradient_in_the_position_biases() -> None:
    """Against central differences of the rigorous bound."""
    net = network("l2-attention", "windows", 1.0)
    table = net.attention.relative_position_bias_table
    outcome = propagate(trace_network(net, (8, WIDTH)), TrainableArithmetic(CPU, 50))
    outcome.context.settle(outcome.logits).base.backward()
    gradient = table.grad.clone()
    place = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    assert gradient[place] != 0
    values = []
    for step in (1e-4, -1e-4):
        with torch.no_grad():
            table[place] += step
            values.append(float(bound_network(net, (8, WIDTH), 3).upper))
            table[place] -= step
    # 1e-3: power iteration and the outward rounding of about 1e-9 over a step of 1e-4
    assert (values[0] - values[1]) / 2e-4 == pytest.approx(float(gradient[place]), rel=1e-3)


def test_lambert_w_of_an_exponential() -> None:
    """w + log w = t, and the derivative w / (1 + w); the scalar function is an upper bound of the same numbers."""
    t = torch.linspace(-600, 700, 2601, dtype=torch.float64).requires_grad_(True)
    w = lambert_w_of_exp(t)
    (slope,) = torch.autograd.grad(w.sum(), t)
    # relative to w an error of the residual counts 1 / (1 + w); t up to 700 has itself a rounding of 1e-13
    assert float(((w + w.log() - t).abs() / (1 + w)).detach().max()) < 1e-12
    assert torch.allclose(slope, w / (1 + w), rtol=1e-9)
    for z in (1e-3, 0.37, 1.0, 50.0, 1e6):
        exact = float(lambert_w_of_exp(torch.tensor(z, dtype=torch.float64).log()))
        assert exact * (1 - 1e-12) <= lambert_w_upper(z) <= exact * (1 + 1e-12)
