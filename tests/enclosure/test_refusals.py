"""What no local theorem is about is refused, and the same network without it is taken."""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention

from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.enclosure.operations import unit_length
from certcli.enclosure.zonotopes import space as zonotopes
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.rules.arithmetic import arranged
from certcli.enclosure.zonotopes.space import ZonotopeContext
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.models.pixels import PixelModel
from certcli.nn.blocks import CenterNorm, FloorNorm
from certcli.nn.layers import MaxMin
from certcli.system.errors import NoBoundError
from tests.enclosure.test_zonotope_networks import SIZE, SPEC, directions, image, network

NO_TOKEN = ZonotopeContext(fx.Graph().placeholder("x"), None)

Middle = Callable[["Tokens", Tensor], Any]


class Tokens(nn.Module):
    """Four tokens of 6 entries, something between, and four logits."""

    def __init__(self, middle: Middle, width: int | None = None, **parts: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.middle = middle
        self.head = nn.Linear(24 if width is None else width, 4)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        out = self.middle(self, self.embed(x.flatten(1).unflatten(1, (4, 4))))
        return self.head(out.flatten(1))


def sdpa(**options: Any) -> Middle:
    def middle(net: Tokens, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
        return (
            F.scaled_dot_product_attention(heads, heads, heads, **options)
            .transpose(1, 2)
            .flatten(2)
        )

    return middle


def attention() -> Attention:
    return Attention(6, num_heads=2)


def read_twice(net: Any, x: Tensor) -> Tensor:
    """All tokens of a norm, and one of them."""
    y = net.norm(x)
    return (net.mix(y) + y)[:, 1]


def shares(net: Tokens, x: Tensor) -> Tensor:
    y = 3 + x
    y /= y.sum(dim=-1).unsqueeze(-1)
    return y


def queried(net: Tokens, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    return (
        F.scaled_dot_product_attention(ADDED[None, :, :, :3], heads, heads)
        .transpose(1, 2)
        .flatten(2)
    )


def written_out(net: Tokens, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    scores = heads @ heads.transpose(-2, -1) + ADDED
    return (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)


ADDED = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3)).double()
HIDDEN = torch.zeros(4, 4).double().masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf)
MATRIX = torch.randn(6, 6, generator=torch.Generator().manual_seed(4)).double()
SEEN = torch.ones(4, 4, dtype=torch.bool).tril()
# the network, and why it is refused (None: it has theorems)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "attention": (lambda: Tokens(lambda m, x: m.mix(x), mix=attention()), None),
    "attention, masked": (lambda: Tokens(lambda m, x: m.mix(x, attn_mask=SEEN), mix=attention()), "a mask"),
    "attention, causal": (lambda: Tokens(lambda m, x: m.mix(x, is_causal=True), mix=attention()), "a mask"),
    "fused attention": (lambda: Tokens(sdpa()), None),
    "fused attention, scaled": (lambda: Tokens(sdpa(scale=0.3)), None),
    "fused attention, masked": (lambda: Tokens(sdpa(attn_mask=SEEN)), "a mask"),
    "fused attention, hidden tokens": (lambda: Tokens(sdpa(attn_mask=HIDDEN)), "hides tokens"),
    "fused attention, numbers added": (lambda: Tokens(sdpa(attn_mask=ADDED)), None),
    "a learned query": (lambda: Tokens(queried), None),
    "attention written out": (lambda: Tokens(written_out), None),
    "attention of a window": (lambda: Tokens(lambda m, x: m.mix(x), mix=WindowAttention(6, 2, window_size=2)), None),
    "softmax over the tokens": (lambda: Tokens(lambda m, x: x.softmax(1)), "another axis"),
    "a product with a matrix": (lambda: Tokens(lambda m, x: x @ MATRIX), None),
    "zeros around": (lambda: Tokens(lambda m, x: F.pad(x, (1, 0, 2, 0)), 42), None),
    "an edge repeated": (lambda: Tokens(lambda m, x: F.pad(x, (1, 1), mode="replicate"), 32), "padding mode"),
    "a part without entries": (lambda: Tokens(lambda m, x: torch.cat(x.split([6, 0], 2), 2)), "without entries"),
    "rows of length 1": (lambda: Tokens(lambda m, x: F.normalize(x, dim=-1, eps=0.1)), None),
    "columns of length 1": (lambda: Tokens(lambda m, x: F.normalize(x, dim=1)), "rows of length 1"),
    "rows of sum 1": (lambda: Tokens(lambda m, x: F.normalize(x, p=1.0, dim=-1)), "rows of length 1"),
    "a map pooled to four places": (
        lambda: Tokens(lambda m, x: F.adaptive_avg_pool2d(x[:, None], 2)[:, 0], 4),
        None,
    ),
    "shares of a sum": (lambda: Tokens(shares), None),
    "a sum of the batch": (lambda: Tokens(lambda m, x: x.sum(0, keepdim=True)), "a sum over the batch"),
    "sorted pairs": (lambda: Tokens(lambda m, x: m.act(x), act=MaxMin()), None),
    "centred": (lambda: Tokens(lambda m, x: m.norm(x), norm=CenterNorm(6)), None),
    "fused attention, causal": (lambda: Tokens(sdpa(is_causal=True)), "a mask"),
    "fused attention, dropout": (lambda: Tokens(sdpa(dropout_p=0.5)), "random numbers"),
    "convolution": (lambda: Tokens(lambda m, x: m.conv(x[:, None]), conv=nn.Conv2d(1, 1, 3, padding=1)), None),
    "convolution without a batch": (
        lambda: Tokens(lambda m, x: m.conv(x), conv=nn.Conv2d(1, 1, 3, padding=1)),
        "a convolution of something other",
    ),
    "mean of tokens": (lambda: Tokens(lambda m, x: x.mean(1), 6), None),
    "mean of the batch": (lambda: Tokens(lambda m, x: x.mean(0, keepdim=True)), "a mean over the batch"),
    "mean of the batch, from behind": (lambda: Tokens(lambda m, x: x.mean(-3, keepdim=True)), "a mean over the batch"),
    "mean of all": (lambda: Tokens(lambda m, x: x + x.mean()), "depend on its batch"),
    "tokens twice": (lambda: Tokens(lambda m, x: torch.cat([x, x], 1), 48), None),
    "RMSNorm": (lambda: Tokens(lambda m, x: F.rms_norm(x, (6,), eps=0.1)), None),
    "RMSNorm of the dtype's eps": (lambda: Tokens(lambda m, x: F.rms_norm(x, (6,))), "an RMSNorm over several axes"),
    "RMSNorm of all tokens": (lambda: Tokens(lambda m, x: F.rms_norm(x, (4, 6), eps=0.1)), "an RMSNorm over several axes"),
    "LayerNorm": (lambda: Tokens(lambda m, x: m.norm(x), norm=nn.LayerNorm(6, eps=0.1)), None),
    "LayerNorm of all tokens": (lambda: Tokens(lambda m, x: m.norm(x), norm=nn.LayerNorm((4, 6), eps=0.1)), "several axes"),
    "norm with a floor": (lambda: Tokens(lambda m, x: m.norm(x), norm=FloorNorm(6, 0.3)), None),
    "norm with a floor read twice": (lambda: Tokens(read_twice, 6, mix=attention(), norm=FloorNorm(6, 0.3)), None),
    "norm read twice": (lambda: Tokens(read_twice, 6, mix=attention(), norm=nn.LayerNorm(6, eps=0.1)), None),
    "a maximum by an argument's name": (
        lambda: Tokens(lambda m, x: torch.max(x, dim=1).values, 6),
        r"theorem does not know \(got an unexpected keyword argument 'dim'\)",
    ),
    "attention under a mask": (
        lambda: Tokens(lambda m, x: m.mix(x, attn_mask=torch.zeros(4, 4).double()), mix=attention()),
        "mask",
    ),
    "half": (lambda: Tokens(lambda m, x: x / 2), None),
    "divided by what depends on the image": (lambda: Tokens(lambda m, x: x / (3 + x)), "a division by something other"),
    "a convolution with mirrored edges": (
        lambda: Tokens(
            lambda m, x: m.conv(x[:, None]), conv=nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_without_a_local_theorem_is_refused(name: str) -> None:
    torch.manual_seed(5)
    build, reason = NETWORKS[name]
    model = PixelModel(SPEC, build()).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    pixels = image()
    label = int(model(pixels).flatten().argmax())
    with nullcontext() if reason is None else pytest.raises(NoBoundError, match=reason):
        certifier = LocalCertifier(model, SIZE, Local("zonotope", at=[2e-3]), symbols=100, steps=0)
        (row,) = certifier.batch([0], pixels, [label])
        assert row.radius > 5e-4
        moved = pixels + row.radius * directions(model, pixels, label, 40).view(-1, *SIZE)
        assert (model(moved).argmax(1) == label).all()


LOGITS: dict[str, Callable[[], nn.Module]] = {
    "logits of two images": lambda: Tokens(lambda m, x: torch.cat([x, x], 0)),
    "logits of every token": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 4)),
    "one class": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 1)),
}


@pytest.mark.parametrize("name", LOGITS)
def test_a_network_without_a_row_of_logits_is_refused(name: str) -> None:
    model = PixelModel(SPEC, LOGITS[name]()).double().eval().requires_grad_(False)
    with pytest.raises(NoRule, match="one class" if name == "one class" else "of one image"):
        LocalNetwork(model, SIZE)


WIDE = torch.rand(1, 1, 2, 8).double()


def a_form(*shape: int) -> Form:
    t = torch.rand(shape).double()
    return Form(Space(1, False, 9), t, torch.zeros(1, *shape).double(), 0 * t)


STATISTICS = {"running_mean": torch.ones(2).double(), "running_var": torch.ones(2).double()}


X = a_form(1, 2, 4)


def called(function: Any, *args: Any, **named: Any) -> Any:
    return zonotopes.rules.functions[function](NO_TOKEN, *args, **named)


def batch_norm(**changes: Any) -> Any:
    return called(F.batch_norm, X, **(STATISTICS | {"eps": 0.5} | changes))


CONSTANT = Constant(torch.ones(1, 4, 2).double())
WEIGHT = torch.ones(3, 4).double()
NEGATIVE = torch.tensor([-0.5, 1.0]).double()
NOTHING_LEFT = torch.tensor([1.0, -0.75]).double()
# what a rule itself refuses, whatever is found beside it when the network runs
OF_RULES: dict[str, tuple[Callable[[], Any], str]] = {
    "several forms, rearranged": (
        lambda: arranged(torch.flatten, [X, X]),
        "a rearrangement",
    ),
    "an image of another shape, forms": (
        lambda: LocalNetwork(network("relu"), SIZE).margins(
            l2_ball(WIDE, 0.1, squares_up_to=0, limit=9), 0
        ),
        "images of shape",
    ),
    "softmax of a vector": (
        lambda: zonotopes.rules.functions[torch.softmax](NO_TOKEN, a_form(4), 0),
        "another axis",
    ),
    "a constant of more axes": (lambda: X.shift(torch.ones(2, 1, 2, 4)), "repeats a tensor"),
    "a larger constant": (lambda: X.scale(torch.ones(3, 2, 4)), "repeats a tensor"),
    "a choice by numbers": (
        lambda: called(torch.where, torch.full((1, 2, 4), 2), X, 0.0),
        "a 2 would count twice",
    ),
    "filling with an infinite number": (
        lambda: called(torch.masked_fill, X, torch.ones(1, 2, 4).bool(), math.inf),
        "an infinite number",
    ),
    "divided by 0": (lambda: called(torch.div, X, 0.0), "a division"),
    "divided by a tensor with a 0": (lambda: called(torch.div, X, torch.zeros(1)), "a division"),
    "divided by many numbers": (lambda: called(torch.div, X, X), "a division"),
    "a number divided": (lambda: called(torch.div, 1.0, X), "a division"),
    "a norm over two axes": (lambda: called(F.rms_norm, X, (2, 4), None, 1.0), "several axes"),
    "a norm of no eps": (lambda: called(F.rms_norm, X, (4,)), "several axes"),
    "a mean over the batch": (lambda: called(torch.mean, X, (-3, 1)), "the batch"),
    "a mean over no axes": (lambda: called(torch.mean, X, ()), "the batch"),
    "a mean of all": (lambda: called(torch.mean, X), "the batch"),
    "joined along the batch": (lambda: called(torch.cat, [X, X]), "the batch"),
    "a constant matrix": (lambda: called(torch.matmul, X, CONSTANT), "with a constant"),
    "times a constant matrix": (lambda: called(torch.matmul, CONSTANT, X), "with a constant"),
    "more matrices": (lambda: called(torch.matmul, X, a_form(3, 4, 2)), "repeats a tensor"),
    "no batch": (lambda: called(torch.matmul, a_form(2, 4), a_form(4, 3)), "repeats a tensor"),
    "one matrix": (lambda: called(torch.matmul, X, a_form(4, 3)), "repeats a tensor"),
    "softmax, no axis": (lambda: called(torch.softmax, X), "another axis"),
    "softmax of columns": (lambda: called(torch.softmax, X, 1), "another axis"),
    "softmax of a type": (
        lambda: called(torch.softmax, X, -1, dtype=torch.float32),
        "another axis",
    ),
    "BatchNorm in training": (lambda: batch_norm(training=True), "the batch's own"),
    "BatchNorm of no mean": (lambda: batch_norm(running_mean=None), "the batch's own"),
    "BatchNorm of no variance": (lambda: batch_norm(running_var=None), "the batch's own"),
    "a negative variance": (lambda: batch_norm(running_var=NEGATIVE), "may be 0"),
    "a variance of -eps": (lambda: batch_norm(running_var=NOTHING_LEFT), "may be 0"),
    "a gain of the image": (lambda: batch_norm(weight=a_form(1, 5)), "depend on the image"),
    "an offset of the image": (lambda: batch_norm(bias=a_form(1, 5)), "depend on the image"),
    "a weight of the image": (lambda: called(F.linear, X, X), "depend on the image"),
    "a bias of the image": (lambda: called(F.linear, X, WEIGHT, X), "depend on the image"),
    "a constant, mapped": (lambda: called(F.linear, CONSTANT, X), "depend on the image"),
    **{
        f"rows of length 1, {words}": (
            functools.partial(called, F.normalize, X, *numbers),
            "rows of length 1",
        )
        for words, numbers in {
            "l1": (1.0, -1, 0.1),
            "columns": (2.0, 1, 0.1),
            "no eps": (2.0, -1, 0.0),
            "a small eps": (2.0, -1, 1e-170),
            "an infinite eps": (2.0, -1, math.inf),
            "NaN": (2.0, -1, math.nan),
        }.items()
    },
}


@pytest.mark.parametrize(("call", "reason"), OF_RULES.values(), ids=OF_RULES)
def test_a_rule_refuses_what_it_knows_nothing_of(call: Callable[[], Any], reason: str) -> None:
    with pytest.raises(NoRule, match=reason):
        call()


def test_what_is_beside_a_refusal_has_a_theorem() -> None:
    assert called(torch.matmul, X, a_form(1, 4, 3)).shape == (1, 2, 3)
    assert called(torch.softmax, a_form(2, 4), 1).shape == (2, 4)
    assert called(F.linear, X, WEIGHT).shape == (1, 2, 3)
    assert batch_norm().shape == (1, 2, 4)
    assert unit_length((1, 3, 4), 2.0, 2, 0.5).min_variance == 0.0625
