"""What no local theorem is about: both local domains refuse it, and take the same network without
it.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention

from certcli.certify.local import LocalCertifier
from certcli.certify.local_options import Local
from certcli.enclosure.balls import layers, spelled_attention
from certcli.enclosure.balls.attention import attention as of_tokens
from certcli.enclosure.balls.ball import Near
from certcli.enclosure.balls.fused_attention import heads
from certcli.enclosure.balls.network import NormsNetwork
from certcli.enclosure.zonotopes.domain import LocalNetwork
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.neighbourhood import l2_ball
from certcli.enclosure.zonotopes.rules import arithmetic as zonotopes
from certcli.enclosure.zonotopes.rules import shapes, spelled
from certcli.enclosure.zonotopes.rules.layers import (
    batch_norm,
    linear_function,
    rms_norm,
    unit_length,
)
from certcli.enclosure.zonotopes.table import ZonotopeContext
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.models.pixels import PixelModel
from certcli.nn.layers import MaxMin
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.system.errors import NoBoundError
from tests.enclosure.test_balls import context
from tests.enclosure.test_zonotope_networks import SIZE, SPEC, directions, image, network

NO_TOKEN = ZonotopeContext(context().node, None)

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
    query = ADDED[None, :, :, :3]
    return F.scaled_dot_product_attention(query, heads, heads).transpose(1, 2).flatten(2)


def written_out(net: Tokens, x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    scores = heads @ heads.transpose(-2, -1) + ADDED
    return (scores.softmax(-1) @ heads).transpose(1, 2).flatten(2)


ADDED = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3)).double()
HIDDEN = torch.zeros(4, 4).double().masked_fill(torch.ones(4, 4).triu(1) > 0, -torch.inf)
MATRIX = torch.randn(6, 6, generator=torch.Generator().manual_seed(4)).double()
SEEN = torch.ones(4, 4, dtype=torch.bool).tril()
# the network, and why both local domains refuse it (None: they have theorems for it)
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
    "half": (lambda: Tokens(lambda m, x: x / 2), None),
    "divided by what depends on the image": (lambda: Tokens(lambda m, x: x / (3 + x)), "a division by something other"),
    "a convolution with mirrored edges": (
        lambda: Tokens(
            lambda m, x: m.conv(x[:, None]), conv=nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("effort", ["norms", "zonotope"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_without_a_local_theorem_is_refused(name: str, effort: str) -> None:
    torch.manual_seed(5)
    build, reason = NETWORKS[name]
    model = PixelModel(SPEC, build()).double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    pixels = image()
    label = int(model(pixels).flatten().argmax())
    with nullcontext() if reason is None else pytest.raises(NoBoundError, match=reason):
        certifier = LocalCertifier(
            model, SIZE, Local(effort=effort, at=[2e-3]), symbols=100, steps=0
        )
        (row,) = certifier.batch([0], pixels, [label])
        assert row.radius > 5e-4
        moved = pixels + row.radius * directions(model, pixels, label, 40).view(-1, *SIZE)
        assert (model(moved).argmax(1) == label).all()


LOGITS: dict[str, Callable[[], nn.Module]] = {
    "logits of two images": lambda: Tokens(lambda m, x: torch.cat([x, x], 0)),
    "logits of every token": lambda: nn.Sequential(nn.Flatten(2), nn.Linear(16, 4)),
    "one class": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 1)),
}


@pytest.mark.parametrize("domain", [NormsNetwork, LocalNetwork])
@pytest.mark.parametrize("name", LOGITS)
def test_a_network_without_a_row_of_logits_is_refused(
    name: str, domain: Callable[..., object]
) -> None:
    model = PixelModel(SPEC, LOGITS[name]()).double().eval().requires_grad_(False)
    with pytest.raises(NoRule, match="one class" if name == "one class" else "of one image"):
        domain(model, SIZE)


def test_attention_is_refused_what_is_not_the_tokens_of_one_image() -> None:
    x = Near.of(torch.rand(1, 2, 4, 6).double(), torch.zeros(1, 2, 4).double())
    mix = attention().double().requires_grad_(False)
    for call in (
        lambda: of_tokens(context(), mix, x),
        lambda: heads(context(), x, x, x, None, None),
    ):
        with pytest.raises(NoRule, match="attention over something other"):
            call()


WIDE = torch.rand(1, 1, 2, 8).double()


def a_form(*shape: int) -> Form:
    t = torch.rand(shape).double()
    return Form(Space(1, False, 9), t, torch.zeros(1, *shape).double(), 0 * t)


def a_ball(*shape: int) -> Near:
    t = torch.rand(1, *shape).double()
    return Near.of(t, 0 * t[..., 0], torch.zeros(1).double())


FORM = a_form(1, 2, 4)
BALL = a_ball(1, 2, 4)
# what a rule itself refuses, whatever is found beside it when the network runs
CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "forms, divided by 0": (lambda: zonotopes.divide(NO_TOKEN, FORM, 0), "a division"),
    "balls, divided by 0": (lambda: layers.divide(context(), BALL, 0.0), "a division"),
    "forms, divided by a form": (lambda: zonotopes.divide(NO_TOKEN, FORM, FORM), "a division"),
    "a number divided by a form": (lambda: zonotopes.divide(NO_TOKEN, 1.0, FORM), "a division"),
    "balls, divided by a tensor": (
        lambda: layers.divide(context(), BALL, torch.ones(1)),
        "a division",
    ),
    "several forms, rearranged": (
        lambda: shapes.arranged(torch.flatten, [FORM, FORM]),
        "a rearrangement",
    ),
    "an image of another shape, forms": (
        lambda: LocalNetwork(network("relu"), SIZE).margins(
            l2_ball(WIDE, 0.1, squares_up_to=0, limit=9), 0
        ),
        "images of shape",
    ),
    "an image of another shape, balls": (
        lambda: NormsNetwork(network("relu"), SIZE).margins(
            WIDE, torch.ones(1).double(), torch.tensor([0])
        ),
        "images of shape",
    ),
    "a norm's negative eps": (
        lambda: layers.rms_norm(context(), BALL, (4,), None, -1.0),
        "a norm with eps",
    ),
    "a norm over two axes": (
        lambda: layers.rms_norm(context(), BALL, (2, 4), None, 1.0),
        "several axes",
    ),
    "a norm of no eps": (lambda: layers.rms_norm(context(), BALL, (4,)), "several axes"),
    "forms, a norm over two axes": (
        lambda: rms_norm(NO_TOKEN, FORM, (2, 4), None, 1.0),
        "several axes",
    ),
    "forms, a norm of no eps": (lambda: rms_norm(NO_TOKEN, FORM, (4,)), "several axes"),
    "forms, a mean over the batch": (lambda: shapes.mean(NO_TOKEN, FORM, (0, 1)), "the batch"),
    "forms, a mean over no axes": (lambda: shapes.mean(NO_TOKEN, FORM, ()), "the batch"),
    "balls, a mean over the batch": (lambda: layers.mean(context(), BALL, (-3, 1)), "the batch"),
    "balls, a mean over no axes": (lambda: layers.mean(context(), BALL, ()), "the batch"),
    "forms, joined along the batch": (lambda: shapes.cat(NO_TOKEN, [FORM, FORM]), "the batch"),
    "balls, joined along the batch": (lambda: layers.cat(context(), [BALL, BALL]), "the batch"),
    "a constant of more axes": (lambda: FORM.shift(torch.ones(2, 1, 2, 4)), "repeats a tensor"),
    "a larger constant": (lambda: BALL.scale(torch.ones(3, 2, 4)), "repeats a tensor"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_rule_refuses_what_it_knows_nothing_of(name: str) -> None:
    call, reason = CALLS[name]
    with pytest.raises(NoRule, match=reason):
        call()


@pytest.mark.parametrize(
    ("rule", "place", "make"),
    [
        (spelled.product_of_matrices, NO_TOKEN, a_form),
        (spelled_attention.product_of_matrices, context(), a_ball),
    ],
    ids=["forms", "balls"],
)
def test_products_that_no_theorem_is_about_are_refused(
    rule: Callable[..., Any], place: Any, make: Callable[..., Any]
) -> None:
    x = make(1, 2, 4)
    constant = Constant(torch.ones(1, 4, 2).double())
    for pair, reason in (
        ((x, constant), "with a constant"),
        ((constant, x), "with a constant"),
        ((x, make(3, 4, 2)), "repeats a tensor"),
        ((make(2, 4), make(4, 3)), "repeats a tensor"),
        ((x, make(4, 3)), "repeats a tensor"),
    ):
        with pytest.raises(NoRule, match=reason):
            rule(place, *pair)
    assert rule(place, x, make(1, 4, 3)).shape == (1, 2, 3)


@pytest.mark.parametrize(
    ("axes", "dim", "dtype"), [(3, None, None), (3, 1, None), (3, -1, torch.float32), (1, 0, None)]
)
def test_softmax_along_another_axis_is_refused(axes: int, dim: int | None, dtype: Any) -> None:
    with pytest.raises(NoRule, match="another axis"):
        spelled.require_rows(axes, dim, dtype)
    spelled.require_rows(2, 1, None)
    spelled.require_rows(3, -1, None)


DEPENDS = {"forms": a_form(5), "balls": a_ball(1, 5)}
NUMBERS = torch.ones(2).double()


@pytest.mark.parametrize("kind", ["forms", "balls"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"training": True}, "the batch's own"),
        ({"running_mean": None}, "the batch's own"),
        ({"running_var": None}, "the batch's own"),
        ({"running_var": torch.tensor([-0.5, 1.0]).double()}, "may be 0"),
        ({"running_var": torch.tensor([1.0, -0.75]).double()}, "may be 0"),
        ({"weight": "image"}, "depend on the image"),
        ({"bias": "image"}, "depend on the image"),
    ],
)
def test_a_batch_norm_of_anything_but_stored_numbers_is_refused(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    options = {"running_mean": NUMBERS, "running_var": NUMBERS, "eps": 0.5}
    options |= {
        name: DEPENDS[kind] if isinstance(value, str) else value for name, value in changes.items()
    }
    rule, place, x = {
        "forms": (batch_norm, NO_TOKEN, FORM),
        "balls": (layers.batch_norm, context(), BALL),
    }[kind]
    with pytest.raises(NoRule, match=reason):
        rule(place, x, **options)  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["forms", "balls"])
def test_a_linear_function_of_moving_weights_is_refused(kind: str) -> None:
    rule, place, x, constant = {
        "forms": (linear_function, NO_TOKEN, FORM, torch.ones(3, 4).double()),
        "balls": (layers.linear_function, context(), BALL, torch.ones(3, 4).double()),
    }[kind]
    for arguments in ((x, x), (x, constant, x)):
        with pytest.raises(NoRule, match="depend on the image"):
            rule(place, *arguments)  # type: ignore[operator]
    assert rule(place, x, constant).shape == (1, 2, 3)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("p", "dim", "eps"),
    [
        (1.0, -1, 0.1),
        (2.0, 1, 0.1),
        (2.0, -1, 0.0),
        (2.0, -1, 1e-170),
        (2.0, -1, math.inf),
        (2.0, -1, math.nan),
    ],
)
def test_rows_of_another_length_are_refused(p: float, dim: int, eps: float) -> None:
    with pytest.raises(NoRule, match="rows of length 1"):
        unit_length((1, 3, 4), p, dim, eps)
    assert unit_length((1, 3, 4), 2.0, 2, 0.5).min_variance == 0.0625
