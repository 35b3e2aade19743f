"""Equal functions, spelled otherwise: equal global bounds and equal local radii, or the table says by
how much they differ, and why; what does nothing changes no number at all.
"""

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split

import functools
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import timm.layers as timm_layers
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn import functional as F

from certcli.certify.local import LocalCertifier
from certcli.certify.options import Local
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.lipschitz.network import propagate, prove_network, trace_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.models.pixels import PixelModel
from certcli.system.errors import NoBoundError
from tests.helpers.grids import EVERY

D = 8
SIZE = (1, 4, 4)
Spelling = Callable[[Any, Tensor], Tensor]


class Network(nn.Module):
    """A spelling's network, of weights that all spellings share; its modules are those it may call."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.spelling = spelling
        self.embed, self.a, self.head = nn.Linear(4, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.qkv, self.proj, self.norm = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.LayerNorm(D, 0.1)
        self.conv, self.batch = nn.Conv2d(1, 4, 1), nn.BatchNorm2d(4)
        for tensor in (self.norm.weight, self.batch.weight, self.batch.running_var):
            nn.init.uniform_(tensor, 0.5, 1.5)
        for tensor in (self.norm.bias, self.batch.bias, self.batch.running_mean):
            nn.init.uniform_(tensor, -1, 1)
        self.gelu, self.of_timm, self.relu = nn.GELU(), timm_layers.GELU(), nn.ReLU()
        self.tanh, self.tanh_of_timm = nn.GELU("tanh"), timm_layers.GELUTanh()
        self.fused = timm_layers.Attention(D, num_heads=2, qkv_bias=True)
        self.unfused = timm_layers.Attention(D, num_heads=2, qkv_bias=True)
        for module in (self.fused, self.unfused):
            module.qkv, module.proj = self.qkv, self.proj
        self.unfused.fused_attn = False
        self.of_torch = nn.MultiheadAttention(D, 2, batch_first=True)
        self.of_torch.in_proj_weight, self.of_torch.in_proj_bias = self.qkv.weight, self.qkv.bias
        self.of_torch.out_proj.weight, self.of_torch.out_proj.bias = (
            self.proj.weight,
            self.proj.bias,
        )
        self.double()
        gain = self.batch.weight / (self.batch.running_var + self.batch.eps).sqrt()
        self.folded = nn.Conv2d(1, 4, 1).double()
        self.folded.weight.data = self.conv.weight.data * gain.data[:, None, None, None]
        shift = (self.conv.bias - self.batch.running_mean) * gain + self.batch.bias
        self.folded.bias.data = shift.data
        self.register_buffer("w", self.a.weight.detach().T.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.spelling(self, x)


def of_tokens(spelling: Spelling) -> Spelling:
    return lambda m, x: m.head(spelling(m, m.embed(x.reshape(len(x), 4, 4))))


def first(spelling: Spelling) -> Spelling:
    return of_tokens(lambda m, t: spelling(m, t)[:, 0])


def read(spelling: Callable[[Tensor], Tensor]) -> Spelling:
    return of_tokens(lambda m, t: spelling(F.relu(m.a(t))))


def attended(spelling: Spelling) -> Spelling:
    return first(lambda m, t: spelling(m, m.norm(t)))


def by_heads(mixed: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Spelling:
    def attention(m: Any, t: Tensor) -> Tensor:
        q, k, v = m.qkv(t).reshape(len(t), 4, 3, 2, D // 2).permute(2, 0, 3, 1, 4).unbind(0)
        return m.proj(mixed(q, k, v).transpose(1, 2).reshape(len(t), 4, D))

    return attended(attention)


SCALE = (D // 2) ** -0.5
SPELLED: dict[str, dict[str, Spelling]] = {
    "one token": {
        "[:, 0]": read(lambda t: t[:, 0]),
        "select": read(lambda t: t.select(1, 0)),
        "split": read(lambda t: t.split(1, 1)[0].squeeze(1)),
        "unbind": read(lambda t: t.unbind(1)[0]),
        "chunk": read(lambda t: torch.chunk(t, 4, 1)[0][:, 0]),
        "narrow": read(lambda t: t.narrow(1, 0, 1).squeeze(1)),
        "index_select": read(lambda t: t.index_select(1, torch.tensor([0]))[:, 0]),
    },
    "mean": {
        "mean": read(lambda t: t.mean(1)),
        "sum": read(lambda t: t.sum(1) / 4),
        "adaptive": read(lambda t: F.adaptive_avg_pool1d(t.transpose(1, 2), 1).squeeze(-1)),
        "windows": read(lambda t: F.avg_pool1d(t.transpose(1, 2), 4).squeeze(-1)),
    },
    "linear": {
        "module": first(lambda m, t: F.relu(m.a(t))),
        "function": first(lambda m, t: F.relu(F.linear(t, m.a.weight, m.a.bias))),
        "@": first(lambda m, t: F.relu(t @ m.w + m.a.bias)),
        "matmul": first(lambda m, t: F.relu(torch.matmul(t, m.w) + m.a.bias)),
        "einsum": first(lambda m, t: F.relu(torch.einsum("bnd,de->bne", t, m.w) + m.a.bias)),
        "bmm": first(lambda m, t: F.relu(torch.bmm(t, m.w[None]) + m.a.bias)),
        "addmm": first(
            lambda m, t: F.relu(torch.addmm(m.a.bias, t.reshape(-1, D), m.w).reshape(-1, 4, D))
        ),
    },
    "LayerNorm": {
        "module": first(lambda m, t: m.norm(t)),
        "function": first(lambda m, t: F.layer_norm(t, (D,), m.norm.weight, m.norm.bias, 0.1)),
        "gain beside it": first(
            lambda m, t: F.layer_norm(t, (D,), eps=0.1) * m.norm.weight + m.norm.bias
        ),
    },
    "GELU": {
        "module": first(lambda m, t: m.gelu(m.a(t))),
        "function": first(lambda m, t: F.gelu(m.a(t))),
        "timm": first(lambda m, t: m.of_timm(m.a(t))),
        "erf": first(lambda m, t: m.a(t) * (1 + torch.erf(m.a(t) * math.sqrt(0.5))) / 2),
    },
    "GELU by tanh": {
        "module": first(lambda m, t: m.tanh(m.a(t))),
        "function": first(lambda m, t: F.gelu(m.a(t), approximate="tanh")),
        "timm": first(lambda m, t: m.tanh_of_timm(m.a(t))),
    },
    "ReLU": {
        "module": first(lambda m, t: m.relu(m.a(t))),
        "function": first(lambda m, t: F.relu(m.a(t))),
        "clamp": first(lambda m, t: m.a(t).clamp(min=0)),
        "clamp_min": first(lambda m, t: m.a(t).clamp_min(0)),
    },
    "BatchNorm": {
        "module": lambda m, x: m.head(m.batch(m.conv(x)).flatten(1)[:, :D]),
        "folded": lambda m, x: m.head(m.folded(x).flatten(1)[:, :D]),
    },
    "attention": {
        "timm, fused": attended(lambda m, t: m.fused(t)),
        "timm, unfused": attended(lambda m, t: m.unfused(t)),
        "torch": attended(lambda m, t: m.of_torch(t, t, t, need_weights=False)[0]),
        "fused function": by_heads(F.scaled_dot_product_attention),
        "written out": by_heads(lambda q, k, v: (q @ k.transpose(-2, -1) * SCALE).softmax(-1) @ v),
        "scaled first": by_heads(lambda q, k, v: (q * SCALE @ k.mT).softmax(-1) @ v),
        "einsum": by_heads(
            lambda q, k, v: torch.einsum(
                "bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * SCALE).softmax(-1), v
            )
        ),
    },
}
"""The first spelling of each function is the one that others are compared with."""

_APART = "heads as products of tensors: no fold of W_K^T W_Q, and no norm folded in"
DIFFERENT: dict[tuple[str, str], tuple[str, dict[str, float]]] = {
    ("LayerNorm", "gain beside it"): (
        "a last norm is bounded together with the head where it has its gain",
        {"zonotope": 0.805},
    ),
    ("GELU", "erf"): (
        "a product of two tensors, which may move apart",
        {"global": 1.686},
    ),
    ("attention", "fused function"): (_APART, {"global": 1.307, "zonotope": 0.805}),
    ("attention", "written out"): (_APART, {"global": 1.307, "zonotope": 0.805}),
    ("attention", "scaled first"): (_APART, {"global": 1.307, "zonotope": 0.805}),
    ("attention", "einsum"): (_APART, {"global": 1.307, "zonotope": 0.805}),
    ("attention", "torch"): ("no enclosure of the module", {"zonotope": 0.0}),
}
"""By which factor a number differs from that of the first spelling; 0: refused."""


def numbers_of(spelling: Spelling) -> tuple[dict[str, float], Tensor]:
    """Return the global bound, the radius of zonotopes at an image, and the logits."""
    model = PixelModel(InputSpec(SIZE, (0.5,), (0.5,)), Network(spelling)).double().eval()
    image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(0)).double()
    logits = model(image).detach()
    numbers = {"global": float(prove_network(model, 3).upper), "zonotope": 0.0}
    with suppress(NoBoundError):
        certifier = LocalCertifier(model, SIZE, Local("zonotope", arithmetic="real"))
        numbers["zonotope"] = certifier.batch([0], image, [int(logits.argmax())])[0].radius
    return numbers, logits


@pytest.mark.parametrize("function", SPELLED)
def test_spellings_of_a_function_get_equal_numbers_or_the_table_says_why(function: str) -> None:
    (_, plain), *others = SPELLED[function].items()
    expected, logits = numbers_of(plain)
    assert all(expected.values())
    for name, spelling in others[:: 1 if EVERY else 2]:
        numbers, same = numbers_of(spelling)
        assert torch.allclose(same, logits, rtol=1e-10, atol=1e-12), name
        why, factors = DIFFERENT.get((function, name), ("", {}))
        assert bool(why) == bool(factors)
        for kind, number in numbers.items():
            ratio = number / expected[kind]
            if kind not in factors:
                assert ratio == pytest.approx(1.0, rel=1e-9), (name, kind, ratio)
            else:
                assert ratio != pytest.approx(1.0, rel=1e-9), (name, kind)
                assert ratio == pytest.approx(factors[kind], rel=0.03), (name, kind, ratio)


WIDE = (1, 4, 8)

NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(1, 4, 8),
    "flatten": lambda x: x.flatten(2),
    "expand": lambda x: x.expand(-1, -1, -1),
    "repeat": lambda x: x.repeat(1, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(1, 1),
    "permute": lambda x: x.permute(0, 1, 2),
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(torch.float64),
    "slices": lambda x: x[:, 0:],
    "whole": lambda x: x[..., 0:8],
    "index": lambda x: x.index_select(1, torch.arange(4)),
    "narrow": lambda x: x.narrow(2, 0, 8),
    "split": lambda x: x.split(8, -1)[0],
    "roll": lambda x: x.roll(0, -1),
    "flip": lambda x: x.flip(()),
    "flip twice": lambda x: x.flip(1).flip(1),
    "transpose twice": lambda x: x.transpose(1, 2).transpose(1, 2),
    "pad": lambda x: functional.pad(x, (0, 0, 0, 0)),
    "cat": lambda x: torch.cat([x], 1),
}


TOKENS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda x: x[:, 1],
    "of the last": lambda x: x[:, -3],
    "select": lambda x: x.select(1, 1),
    "function": lambda x: torch.select(x, 1, 1),
    "from the end": lambda x: x.select(-2, -3),
}


class Around(nn.Module):
    """Tokens (1, 4, 8) through a map, what waits of it, an operation, and the next map."""

    def __init__(self, first: str, operation: Callable[[Tensor], Tensor], tokens: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.operation = operation
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(6 * tokens, 5)])
        self.waits = nn.LayerNorm(8) if first == "norm" else nn.Linear(8, 8)
        for parameter in self.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=draw)

    def forward(self, x: Tensor) -> Tensor:
        before, after, last = self.layers
        x = self.operation(self.waits(before(x.reshape(1, 4, 8))))
        return last(after(x).flatten(1))


def network(first: str, operation: Callable[[Tensor], Tensor], tokens: int = 4) -> nn.Module:
    return Around(first, operation, tokens).double().eval().requires_grad_(False)


def bound(net: nn.Module) -> float:
    outcome = propagate(trace_network(net, WIDE), Arithmetic())
    return float(outcome.context.settle(outcome.logits).base)


def margins_near(net: nn.Module) -> list[float]:
    image = torch.full((1, *WIDE), 0.5).double()
    ball = l2_ball(image, 0.02, squares_up_to=64, limit=400)
    found: list[float] = LocalNetwork(net, WIDE).margins(ball, 1).tolist()
    return found


@pytest.mark.parametrize("first", ["norm", "linear"])
@pytest.mark.parametrize("name", NOTHING)
def test_an_operation_that_does_nothing_settles_nothing(first: str, name: str) -> None:
    assert bound(network(first, NOTHING[name])) == bound(network(first, lambda x: x))


@functools.cache
def plain(first: str) -> list[float]:
    return margins_near(network(first, lambda x: x))


@pytest.mark.parametrize("first", ["norm", "linear"])
@pytest.mark.parametrize("name", [name for name in NOTHING if "twice" not in name])
def test_an_operation_that_does_nothing_changes_no_margin(first: str, name: str) -> None:
    assert margins_near(network(first, NOTHING[name])) == plain(first)


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_is_read_alike_in_every_spelling(name: str) -> None:
    read, expected = (network("norm", TOKENS[of], 1) for of in (name, "item"))
    assert bound(read) == bound(expected)
    assert margins_near(read) == margins_near(expected)
