"""A network without a proof has the bound inf, and the reason names the module: no finite number,
no traceback.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import certcli.system.compat  # noqa: F401

# isort: split
import timm.layers as timm_layers
from timm.layers.grn import GlobalResponseNorm

from certcli.lipschitz.network import bound_network
from certcli.nn.attention import AttentionShape
from certcli.nn.attention_variants import L2Attention
from certcli.nn.layers import MaxMin, TokenMaxMin
from tests.helpers.slopes import IMAGE, slope_at


class Net(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("store", torch.zeros(1, 2, 4, 4))
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Louder(nn.Linear):
    """Inherits Linear's weight, not its function."""

    def forward(self, x: Tensor) -> Tensor:
        return 100 * super().forward(x)


class HiddenConv(nn.Conv2d):
    """Inherits Conv2d's forward but not what it calls."""

    def _conv_forward(self, *arguments: Tensor) -> Tensor:
        return super()._conv_forward(*arguments).exp()


class LouderMaxMin(MaxMin):
    def forward(self, x: Tensor) -> Tensor:
        return 100 * super().forward(x)


def made_over(net: nn.Module, change: Callable[[Any], object]) -> nn.Module:
    """Return the network, changed after it was made."""
    change(net)
    return net


def head() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(32, 3), nn.Linear(3, 3))


def attending(change: Callable[[Any], object], soft: bool = False) -> nn.Module:
    """Return a network of one attention, changed after it was made."""
    mixing = made_over(TokenMaxMin(4, 8, 1, across=4, soft=soft), change)
    return Net(lambda m, x: m.mixing(x.reshape(-1, 4, 8)).flatten(1)[:, :3], mixing=mixing)


def of_rows(odd: nn.Module) -> nn.Module:
    """Return a network of one module on four tokens of eight entries."""
    return Net(lambda m, x: m.odd(x.reshape(-1, 4, 8)), odd=odd)


def overwritten_view(net: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    z = y.flatten(1)
    y.mul_(3)
    return z


def written_into_part(net: nn.Module, x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = x[:, 1]
    return y


def written_into_constant(net: nn.Module, x: Tensor) -> Tensor:
    canvas = torch.zeros(1, 2, 4, 4)
    canvas[:, :, 0] = x[:, :, 0]
    return canvas + x


def written_into_buffer(net: nn.Module, x: Tensor) -> Tensor:
    y = x + net.store
    net.store.add_(1.0)
    return y


def copied_into_buffer(net: nn.Module, x: Tensor) -> Tensor:
    net.store.copy_(x)
    return net.store + x


def attends(net: nn.Module, x: Tensor, factor: float = 1.0) -> Tensor:
    rows = functional.normalize(x.reshape(-1, 4, 8), dim=-1)
    others = rows if factor == 1.0 else rows * factor
    out, weights = net.odd(rows, others, others)
    return out if factor != 1.0 else out + weights.sum()


def masked_row(net: nn.Module, x: Tensor) -> Tensor:
    rows = functional.normalize(x.reshape(1, 4, 8), dim=-1)
    scores = torch.where(torch.arange(4).view(4, 1) > 0, rows @ rows.transpose(1, 2), -torch.inf)
    return scores.softmax(dim=-1) @ rows


def left_out(net: nn.Module, x: Tensor) -> Tensor:
    rows = x.reshape(1, 4, 8)
    return (
        torch.where(torch.eye(4) > 0, rows @ rows.transpose(1, 2), -torch.inf).clamp_min(-50.0)
        @ rows
    )


def turned(
    net: nn.Module, x: Tensor, change: Callable[[Tensor], Tensor], fill: float = -torch.inf
) -> Tensor:
    rows = functional.normalize(x.reshape(1, 4, 8), dim=-1)
    scores = (rows @ rows.transpose(1, 2)).masked_fill(torch.ones(4, 4).triu(1) > 0, fill)
    return change(scores).softmax(dim=-1) @ rows


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "hook": (
        lambda: made_over(
            head(), lambda net: net[1].register_forward_hook(lambda *args: 100 * args[2])
        ),
        "1 has a forward hook",
    ),
    "training": (
        lambda: made_over(head().eval(), lambda net: net[1].train()),
        "1 is in training mode",
    ),
    "temperature without end": (
        lambda: attending(lambda m: nn.init.constant_(m.pair.log_temperature, 1e4), soft=True),
        "a temperature that is 0 or infinite",
    ),
    "hook within attention": (
        lambda: attending(
            lambda m: m.pair.register_forward_hook(lambda module, inputs, output: 100 * output)
        ),
        "has a forward hook",
    ),
    "patched forward": (
        lambda: made_over(head(), lambda net: setattr(net[1], "forward", lambda x: x[:, :3].exp())),
        "exp",
    ),
    "patched helper": (
        lambda: made_over(
            nn.Conv2d(2, 2, 3), lambda conv: setattr(conv, "_conv_forward", lambda x, *_: x.exp())
        ),
        "exp",
    ),
    "overridden helper": (lambda: HiddenConv(2, 2, 3), "exp"),
    "unknown operation": (lambda: Net(lambda m, x: m.head(x.exp()), head=nn.Flatten()), "exp"),
    "unknown module": (lambda: Net(lambda m, x: m.odd(x), odd=nn.LPPool2d(3.0, 2)), "odd"),
    "random numbers": (lambda: Net(lambda m, x: x + torch.rand(1)), "random"),
    "branch on a value": (lambda: Net(lambda m, x: x if x.sum() > 0 else 2 * x), "branches"),
    "value as number": (lambda: Net(lambda m, x: x * x.mean().item()), "reads a tensor's value"),
    "value in an inner part": (
        lambda: nn.Sequential(nn.Sequential(Net(lambda m, x: x * x.mean().item()))),
        "0.0: item reads a tensor's value",
    ),
    "view of an overwritten tensor": (lambda: Net(overwritten_view), "overwritten in place"),
    "assignment into a part": (
        lambda: nn.Sequential(Net(written_into_part)),
        "0: an assignment into a part of a tensor (torch.cat and torch.where make a new one)",
    ),
    "operation of a family": (
        lambda: nn.Sequential(Net(lambda m, x: torch.fft.fft(x).real)),
        "0: no theorem for the operation 'torch.fft.fft'",
    ),
    "choice by a value": (
        lambda: Net(lambda m, x: torch.where(x > 0, x, 2 * x)),
        "no theorem for the operation '>'",
    ),
    "assignment into a constant": (lambda: Net(written_into_constant), "writes into a tensor"),
    "buffer that changes": (lambda: Net(written_into_buffer), "store"),
    "buffer that is copied into": (lambda: Net(copied_into_buffer), "copy_"),
    "division by the image": (
        lambda: Net(lambda m, x: x / x.sum((2, 3), keepdim=True)),
        "division",
    ),
    "division by a constant 0": (
        lambda: Net(lambda m, x: x / torch.tensor([1.0, 2.0, 3.0, 0.0])),
        "a division by zero",
    ),
    "unnormalised power": (lambda: Net(lambda m, x: x**3), "power"),
    "index by the image": (lambda: Net(lambda m, x: x.flatten()[x.flatten().argsort()]), "argsort"),
    "other norm": (lambda: Net(lambda m, x: functional.normalize(x, p=1.0)), "norm"),
    "other precision": (
        lambda: Net(lambda m, x: x.to(torch.bfloat16)),
        "conversion to torch.bfloat16",
    ),
    "division by a length of 0": (
        lambda: Net(lambda m, x: functional.normalize(x, eps=0.0)),
        "by another norm",
    ),
    "norm without eps": (lambda: nn.LayerNorm(4, eps=0.0), "eps"),
    "norm by the variance without eps": (
        lambda: Net(lambda m, x: m.odd(x), odd=timm_layers.SimpleNorm(4, affine=False, eps=0.0)),
        "eps = 0",
    ),
    "norm of groups without eps": (lambda: nn.GroupNorm(1, 2, eps=0.0), "eps"),
    "norm of another width": (
        lambda: Net(lambda m, x: m.odd(x), odd=timm_layers.SimpleNorm(100, affine=False)),
        "of another width",
    ),
    "norm over two axes": (
        lambda: Net(lambda m, x: m.odd(x), odd=timm_layers.SimpleNorm((4, 4), affine=False)),
        "over several axes",
    ),
    "norm of one channel for two": (
        lambda: Net(lambda m, x: m.odd(x), odd=timm_layers.RmsNorm2d(1, affine=False)),
        "of another width",
    ),
    "response norm of one channel for two": (
        lambda: Net(lambda m, x: m.odd(x), odd=GlobalResponseNorm(1, channels_last=False)),
        "of another width",
    ),
    "masked scores turned": (
        lambda: Net(lambda m, x: turned(m, x, lambda y: 1 - y)),
        "masked scores",
    ),
    "masked scores times 0": (
        lambda: Net(lambda m, x: turned(m, x, lambda y: (y - m.scale) * 0)),
        "masked scores",
    ),
    "scores that a constant masks, times constants": (
        lambda: Net(
            lambda m, x: turned(
                m, x, lambda y: (y + torch.full((4, 4), -torch.inf).triu(1)) * -torch.ones(1), 0.0
            )
        ),
        "masked scores",
    ),
    "batch statistics": (lambda: nn.BatchNorm2d(2, track_running_stats=False), "batch statistics"),
    "a number without axes": (lambda: Net(lambda m, x: x.mean()), "single number"),
    "tokens filled with -inf": (
        lambda: Net(lambda m, x: x.masked_fill(m.store > 0, -torch.inf).softmax(-1)),
        "filling with -inf",
    ),
    "scores of unknown size as logits": (
        lambda: Net(
            lambda m, x: (lambda y: y @ y.transpose(-1, -2))(
                torch.where(torch.eye(4) > 0, x, -torch.inf).clamp_min(-50.0)
            )
        ),
        "no bound on its size",
    ),
    "scores of unknown size as weights": (lambda: Net(left_out), "no bound on its size"),
    "variance of unknown size": (
        lambda: Net(
            lambda m, x: torch.where(torch.eye(4) > 0, x, -torch.inf).clamp_min(-50.0).var(1)
        ),
        "the variance of a tensor",
    ),
    "shares that are infinite": (
        lambda: Net(lambda m, x: torch.lerp(x, 2 * x, torch.tensor([0.5, 0.5, 0.5, torch.inf]))),
        "not finite numbers",
    ),
    "keys that are constant": (
        lambda: Net(lambda m, x: functional.scaled_dot_product_attention(x, m.store, x)),
        "constant keys or values",
    ),
    "windows that are not those of the positions": (
        lambda: of_rows(L2Attention(AttentionShape(8, 2, 4, True, 8, True, (1, 1)))),
        "windows of another size",
    ),
    "a token that does not see itself": (
        lambda: Net(
            lambda m, x: m.odd(x.reshape(-1, 4, 8), mask=(1 - torch.eye(4)[None]).log()),
            odd=L2Attention(AttentionShape(8, 2, 4, True, 8, True, (2, 2))),
        ),
        "does not see itself",
    ),
    "positional scores of -2e5": (
        lambda: of_rows(
            made_over(
                L2Attention(AttentionShape(8, 2, 4, True, 8, True, gated=True)),
                lambda odd: nn.init.constant_(odd.pos_proj.bias, -2e5),
            )
        ),
        "positional scores beyond 1e5",
    ),
    "two outputs": (lambda: Net(lambda m, x: (x, x)), "something other than one tensor"),
    "mask of the image": (lambda: Net(lambda m, x: torch.where(x.bool(), x, 2.0)), "bool"),
    "row masked altogether": (lambda: Net(masked_row), "masked altogether"),
    "activation that is NaN": (
        lambda: Net(lambda m, x: functional.leaky_relu(x, float("nan"))),
        "not a number",
    ),
    "random slopes": (
        lambda: Net(lambda m, x: functional.rrelu(x, 0.5, 0.5, training=True)),
        "random",
    ),
    "deviation of one": (
        lambda: Net(lambda m, x: x[:, :1].var(dim=1, keepdim=True) + x),
        "too few",
    ),
    "window of maxima in the padding": (
        lambda: Net(
            lambda m, x: functional.max_pool2d(x[:, :, :2, :2], 2, 1, 1, dilation=3).relu()
        ),
        "lies in the padding",
    ),
    "maximum with infinity": (
        lambda: Net(lambda m, x: torch.maximum(x, torch.full((2, 4, 4), torch.inf)).clamp(0, 1)),
        "infinite or NaN entries",
    ),
    "indices of maxima": (lambda: Net(lambda m, x: x.max(dim=1)[0]), "indices"),
    "option given twice": (lambda: Net(lambda m, x: x.reshape(4, 8).softmax(1, dim=1)), "softmax"),
    "weights of the image": (
        lambda: Net(lambda m, x: torch.lerp(x, 2 * x, x)),
        "weights that depend",
    ),
    "attention weights": (
        lambda: Net(attends, odd=nn.MultiheadAttention(8, 2, batch_first=True)),
        "weights are used",
    ),
    "attention to another": (
        lambda: Net(
            lambda m, x: attends(m, x, 2), odd=nn.MultiheadAttention(8, 2, batch_first=True)
        ),
        "different tensors",
    ),
    "attention with a bias of keys": (
        lambda: Net(
            lambda m, x: m.odd(x[0], x[0], x[0])[0],
            odd=nn.MultiheadAttention(4, 2, add_bias_kv=True),
        ),
        "multi_head_attention_forward",
    ),
    "half precision": (lambda: Net(lambda m, x: x.to(torch.float16).float()), "float16"),
    "dtype view": (lambda: Net(lambda m, x: x.view(torch.int32).float()), "dtype"),
    "written by hand": (lambda: Net(lambda m, x: x.detach().numpy()), "one tensor"),
    "real part": (lambda: Net(lambda m, x: x.real * 2), "real"),
    "endless": (lambda: Net(lambda m, x: m(x)), "Recursion"),
    "MaxMin of odd width": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(32, 5), MaxMin()),
        "does not run",
    ),
    "infinite weights": (
        lambda: made_over(head(), lambda net: net[1].weight.data[0].fill_(math.inf)),
        "infinite",
    ),
    "infinite kernel": (
        lambda: made_over(nn.Conv2d(2, 2, 3), lambda conv: conv.weight.data[0].fill_(math.inf)),
        "infinite",
    ),
    "infinite bias": (
        lambda: made_over(head(), lambda net: net[1].bias.data[0].fill_(math.inf)),
        "infinite",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason(name: str) -> None:
    build, reason = REFUSED[name]
    net = build()
    if name != "training":
        net = net.eval()
    result = bound_network(net, IMAGE, 3)
    assert not result.upper.finite
    assert result.pairs is None
    assert reason in result.bound.why


FOLLOWED: dict[str, Callable[[], nn.Module]] = {
    # what a rule would misread is traced through instead: the factor of 100 must be in the bound
    "overridden pair": lambda: attending(lambda m: setattr(m, "pair", LouderMaxMin())),
    "overridden forward": lambda: Net(lambda m, x: m.loud(x.flatten(1)), loud=Louder(32, 3)),
    "replaced part of attention": lambda: of_rows(
        made_over(
            timm_layers.Attention(8, 2), lambda attention: setattr(attention, "qkv", Louder(8, 24))
        )
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_overridden_forwards_are_followed(name: str) -> None:
    torch.manual_seed(0)
    net = FOLLOWED[name]().double().eval()
    result = bound_network(net, IMAGE, 3)
    assert result.upper.finite, result.bound.why
    assert slope_at(net, torch.rand(IMAGE, dtype=torch.float64))[0] <= float(result.upper)


def test_a_parametrised_layer_is_read_through_its_parametrisation() -> None:
    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    net = nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).eval()
    plain = float(bound_network(net, IMAGE, 3).upper)
    nn.utils.parametrize.register_parametrization(net[1], "weight", Twice())
    assert float(bound_network(net.eval(), IMAGE, 3).upper) == pytest.approx(
        2 * plain, rel=1e-6
    )  # looseness of sigma
