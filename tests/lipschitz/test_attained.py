"""Networks where every inequality of a theorem about sizes is an equality: any factor, term or
digit less would show.
"""

from collections.abc import Callable
from decimal import Decimal, localcontext
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.layers.attention import Attention
from timm.layers.grn import GlobalResponseNorm
from torch import nn
from torch.nn import functional

from certcli.engine.moves import Move
from certcli.engine.walk import Call
from certcli.lipschitz.context import Context, Walk
from certcli.lipschitz.network import propagate, trace_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix
from certcli.lipschitz.rules.add_sub import _convex_shares
from certcli.lipschitz.rules.moves import rearranged_bound
from certcli.lipschitz.value import Affine, Size, Value
from certcli.models.pixels import PixelNormalize
from certcli.nn.residual import ConvexResidual
from tests.helpers.lipschitz_cases import f, replaced_by

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
    context = Context(Walk(arith), Call("", "reshape", after))
    merged = rearranged_bound(context, value, Move(torch.Tensor.reshape, (after,)))
    assert merged.pending is not None
    assert merged.pending.bias is not None
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
