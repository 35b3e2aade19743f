"""Random programs for the local domains: odd layouts of small vision transformers' parts.

A program cuts an image of 16 pixels into tokens, moves them about (windows and quarters on the
batch axis, odd indexing, permutations, repeats, register tokens), lets modules act on them wherever
they stand, and reads some entries of the result.
"""

import functools
import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.system.compat  # noqa: F401

# isort: split
from timm.layers import LayerScale
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention

from certcli.nn.blocks import CenterNorm, FloorNorm
from certcli.nn.layers import MaxMin

SIZE = (1, 4, 4)
CLASSES = 3
LARGEST = 96
TOKENS = 8
LATER = 1_000_000
"""Programs of these seeds hold the parts of `act_later`, too; those of smaller ones stay what they were."""
LATEST = 40_000_000
"""From these seeds on those of `act_latest`, too."""
Step = Callable[[Tensor], Tensor]


class Program(nn.Module):
    """Steps one after the other. parts: the modules in them."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[str, Step]] = []
        self.parts = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for _, step in self.steps:
            x = step(x)
        return x


class Writer:
    """Writes one program step by step. x: what it has made of one image so far."""

    def __init__(self, seed: int) -> None:
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.program = Program()
        self.x = torch.rand(1, *SIZE, generator=self.generator).double()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).double()

    def part(self, module: nn.Module) -> nn.Module:
        """A module of the program, its weights far from where training begins."""
        module = module.double().eval()
        for name, parameter in module.named_parameters():
            matrix = parameter.dim() > 1
            start = 1.0 if not matrix and name.endswith(("weight", "gamma")) else 0.0
            parameter.data = start + (
                1.2 / parameter[0].numel() ** 0.5 if matrix else 0.5
            ) * self.normal(*parameter.shape)
            parameter.requires_grad_(False)
        self.program.parts.append(module)
        return module

    def add(self, name: str, step: Step) -> None:
        """Raises where torch does not take the step."""
        found = step(self.x)
        if not 0 < found.numel() <= LARGEST or found.dim() < 2 or found.shape[-2] > TOKENS:
            raise ValueError("too large")
        self.x = found
        self.program.steps.append((name, step))

    def order(self, count: int) -> list[int]:
        return self.random.sample(range(count), count)

    def places(self, count: int) -> list[int]:
        """Some of so many, in any order, perhaps repeated."""
        return [self.random.randrange(count) for _ in range(self.random.randint(1, count + 1))]

    def axis(self, first: int = 0) -> int:
        place = self.random.randrange(first, self.x.dim())
        return self.random.choice((place, place - self.x.dim()))


def quarters(x: Tensor) -> Tensor:
    """(1, 1, 4, 4) -> (4, 1, 2, 2)."""
    return x.reshape(1, 2, 2, 2, 2).permute(1, 3, 0, 2, 4).reshape(4, 1, 2, 2)


def first_tokens(w: Writer) -> None:
    """An image to tokens (b, n, d)."""
    width, many = w.random.choice((4, 6)), w.random.choice((1, 2, 4))
    linear, patch = w.part(nn.Linear(4, width)), w.part(nn.Conv2d(1, width, 2, 2))
    small = w.part(nn.Conv2d(1, width, 2, padding=w.random.choice((0, 1))))
    kinds: list[tuple[str, Step]] = [
        ("patches", lambda x: patch(x).flatten(2).transpose(1, 2)),
        ("quarters, convolved", lambda x: small(quarters(x)).flatten(2).transpose(-1, -2)),
        (
            "quarters as one image's tokens",
            lambda x: small(quarters(x)).flatten(2).transpose(1, 2).reshape(1, -1, width),
        ),
        ("windows", lambda x: linear(quarters(x).reshape(many, -1, 4))),
        ("rows", lambda x: linear(x[:, 0])),
        ("columns", lambda x: linear(x.flatten(0, 1).transpose(1, 2))),
    ]
    w.add(*w.random.choice(kinds))


def act(w: Writer) -> None:
    """A module or function on the tensor as it stands."""
    x = w.x
    width = w.x.shape[-1]
    heads = 2 if width % 2 == 0 else 1
    linear, square = (
        w.part(nn.Linear(width, w.random.choice((3, 4, 6)))),
        w.part(nn.Linear(width, width)),
    )
    norm, scale = (
        w.part(nn.LayerNorm(width, eps=w.random.choice((1e-2, 1e-5)))),
        w.part(LayerScale(width)),
    )
    attention = w.part(Attention(width, num_heads=heads, qkv_bias=w.random.random() < 0.5))
    channels = x.shape[1]
    conv = w.part(
        nn.Conv2d(channels, channels, 3, padding=1, groups=w.random.choice((1, channels)))
    )
    factor, constant = w.normal(width), w.normal(*x.shape[1:])
    gelu, relu = w.part(nn.GELU(w.random.choice(("none", "tanh")))), w.part(nn.ReLU())
    table: list[tuple[str, Step]] = [
        ("attention", attention),
        ("block", lambda x: x + attention(norm(x))),
        ("block", lambda x: x + attention(norm(x))),
        ("linear", linear),
        ("mlp", lambda x: x + square(gelu(square(x)))),
        ("norm", norm),
        ("norm, linear", lambda x: linear(norm(x))),
        ("gelu", gelu),
        ("relu", relu),
        ("layer scale", scale),
        ("convolution", conv),
        (
            "convolution of planes",
            lambda x: conv(x.reshape(x.shape[0], channels, 2, -1)).reshape(x.shape),
        ),
        ("times a constant", lambda x: x * factor),
        ("plus a constant", lambda x: constant + x),
        ("minus", lambda x: constant - x / 2),
        ("times itself", lambda x: x * square(x)),
        (
            "dot product",
            lambda x: F.scaled_dot_product_attention(
                *[square(x).unsqueeze(1)] * 3, scale=0.7
            ).squeeze(1),
        ),
        ("heads", lambda x: attended(x, square, heads, F.scaled_dot_product_attention)),
        ("rms norm", lambda x: F.rms_norm(x, (width,), factor, 1e-2)),
    ]
    w.add(*w.random.choice(table))


def act_later(w: Writer) -> None:
    """What later theorems are about: other norms, attention that is written out, numbers added."""
    shape = tuple(w.x.shape)
    width = shape[-1]
    if len(shape) != 3 or width < 2:
        raise ValueError("not tokens")
    heads = 2 if width % 2 == 0 else 1
    square = w.part(nn.Linear(width, width))
    floor = w.part(FloorNorm(width, w.random.choice((0.3, 1.0))))
    centred = w.part(CenterNorm(width))
    window = w.part(WindowAttention(width, num_heads=heads, window_size=2))
    statistics = w.part(nn.BatchNorm1d(shape[1]))
    assert isinstance(statistics, nn.BatchNorm1d)
    statistics.running_mean = w.normal(shape[1])
    statistics.running_var = w.normal(shape[1]).square() + 0.1
    tokens = 2 * w.normal(heads, shape[1], shape[1])
    matrix, row, axis = w.normal(5, width), w.normal(5), w.axis()
    before, after = w.random.randrange(2), w.random.randrange(2)
    table: list[tuple[str, Step]] = [
        ("norm with a floor", floor),
        ("norm with a floor, linear", lambda x: square(floor(x))),
        ("block", lambda x: x + attention_written_out(floor(x), square, heads, tokens)),
        ("centred norm", centred),
        ("MaxMin", MaxMin()),
        ("attention of a window", window),
        ("attention written out", lambda x: attention_written_out(x, square, heads, tokens)),
        ("numbers added to scores", lambda x: numbers_added(x, square, heads, tokens)),
        ("softmax", lambda x: square(x).softmax(-1)),
        ("product of matrices", lambda x: x @ square(x).transpose(1, 2)),
        ("product of windows", lambda x: torch.bmm(x.softmax(2), x.transpose(-1, -2))),
        ("linear function", lambda x: F.linear(x, matrix, row)),
        ("zeros around", lambda x: F.pad(x, (before, after, after, before))),
        ("rolled", lambda x: x.roll(before + 1, axis)),
        ("rolled twice", lambda x: torch.roll(x, (1, -1), (1, 2))),
        ("statistics", statistics),
        ("rows of length 1", lambda x: F.normalize(x, dim=-1, eps=0.5)),
        ("cosines", lambda x: attention_written_out(F.normalize(x, dim=-1), square, heads, tokens)),
        ("of its own type", lambda x: x.to(torch.float64).type_as(row)),
        ("curves", lambda x: F.silu(square(x)) + torch.tanh(x).sigmoid()),
        ("gate", lambda x: x + F.silu(square(x)) * square(x)),
        ("negative", lambda x: -x + square(x)),
        ("stacked", lambda x: torch.stack([x, square(x)], 1).flatten(1, 2)),
        ("mean of a map", lambda x: F.adaptive_avg_pool2d(x[:, None], 1)[:, 0] + x[..., :1]),
    ]
    w.add(*w.random.choice(table))


def act_latest(w: Writer) -> None:
    """Curves, products with sums spread, maxima, pools and convolutions along tokens."""
    shape = tuple(w.x.shape)
    width = shape[-1]
    if len(shape) != 3 or width < 2:
        raise ValueError("not tokens")
    square, one = w.part(nn.Linear(width, width)), w.part(nn.Linear(width, 1))
    along = w.part(
        nn.Conv1d(
            shape[1], 3, w.random.choice((1, 2, 3)), padding=1, dilation=w.random.choice((1, 2))
        )
    )
    solid = w.part(nn.Conv3d(1, 2, 2, padding=1))
    back = w.part(nn.ConvTranspose2d(shape[1], 2, 2, stride=2))
    low, size = w.random.uniform(-1, 0), w.random.choice((1, 2))
    gain, slope = w.random.uniform(0.3, 3), w.random.choice((0.01, 0.2, -0.3, 1.5))
    many = w.random.choice((2, 3))
    scale = w.random.choice((2, 1.5))
    edge = w.random.choice(("reflect", "replicate", "circular"))
    mask = w.normal(1, *shape[1:]) > 0
    plane = lambda x: x[:, None]  # noqa: E731
    table: list[tuple[str, Step]] = [
        ("square", lambda x: square(x) ** 2),
        ("product of itself", lambda x: x * x - square(x).square()),
        ("gain of a token", lambda x: x * one(x)),
        ("sum spread", lambda x: square(x) + one(x)),
        ("mean taken away", lambda x: (x - x.mean(1, keepdim=True)) * one(x).sigmoid()),
        ("clamped", lambda x: square(x).clamp(low, low + gain)),
        ("from below", lambda x: square(x).clamp(min=low)),
        ("larger of two", lambda x: torch.maximum(x, square(x))),
        ("smaller of two", lambda x: torch.minimum(square(x), x)),
        ("leaky", lambda x: F.leaky_relu(square(x), slope)),
        ("clipped", lambda x: F.relu6(4 * square(x)) + F.hardtanh(x, low, low + 0.5)),
        ("hard gates", lambda x: F.hardswish(3 * square(x)) + F.hardsigmoid(3 * x)),
        ("shrunk", lambda x: F.softshrink(square(x), 0.3) + F.hardshrink(0 * x, 0.1)),
        ("elu", lambda x: F.elu(gain * square(x)) + F.selu(x) + F.celu(x, 0.7)),
        ("softplus", lambda x: F.softplus(gain * square(x), 2.0)),
        ("mish", lambda x: F.mish(square(x)) + F.softsign(x)),
        ("waves", lambda x: torch.sin(gain * square(x)) + torch.cos(x)),
        ("arc", lambda x: torch.atan(gain * square(x)) + torch.erf(x)),
        ("size", lambda x: square(x).abs()),
        ("exponential", lambda x: torch.exp(0.3 * square(x))),
        ("root", lambda x: (square(x).square() + 0.2).sqrt()),
        ("one over", lambda x: x / (one(x).square() + 0.5)),
        ("logarithm", lambda x: torch.log(square(x).square() + 0.2)),
        ("quick gelu", lambda x: square(x) * torch.sigmoid(1.702 * square(x))),
        ("chosen by a mask", lambda x: torch.where(mask, square(x), 0.5 * x)),
        ("filled", lambda x: square(x).masked_fill(mask, low)),
        ("largest along", lambda x: x * square(x).amax(size, keepdim=True)),
        ("least along", lambda x: x - x.amin(1, keepdim=True)),
        ("largest of uneven windows", lambda x: F.adaptive_max_pool2d(plane(x), (2, 3))[:, 0]),
        ("largest of a window", lambda x: F.max_pool2d(plane(x), size, 1)[:, 0]),
        ("largest in steps", lambda x: F.max_pool1d(x, 2, 1, padding=size - 1)),
        (
            "average of a window",
            lambda x: F.avg_pool2d(plane(x), 2, 1, 1, count_include_pad=size == 1)[:, 0],
        ),
        ("average along", lambda x: F.avg_pool1d(x, 2, size)),
        ("convolution along", along),
        ("convolution of a solid", lambda x: solid(x[:, None, None]).flatten(1, 3)),
        ("convolution back", lambda x: back(plane(x).transpose(1, 2))[:, 0]),
        ("repeated", lambda x: x.repeat(1, many, 1)),
        ("interleaved", lambda x: x.repeat_interleave(many, 1)),
        ("nearest", lambda x: F.interpolate(plane(x), scale_factor=2, mode="nearest")[:, 0]),
        (
            "bilinear",
            lambda x: F.interpolate(
                plane(x), scale_factor=scale, mode="bilinear", align_corners=size == 1
            )[:, 0],
        ),
        ("bicubic", lambda x: F.interpolate(plane(x), size=(4, 4), mode="bicubic")[:, 0]),
        ("edges repeated", lambda x: F.pad(plane(x), (1, 1, 1, 0), mode=edge)[:, 0]),
        ("numbers around", lambda x: F.pad(x, (1, 0, 0, 1), value=low)),
        ("einsum", lambda x: torch.einsum("bnd,bmd->bnm", x, square(x))),
        (
            "scores kept",
            lambda x: torch.einsum("bnm,bmd->bnd", x.softmax(1).transpose(1, 2), x.transpose(1, 2)),
        ),
        ("log of shares", lambda x: square(x).log_softmax(-1)),
        ("flipped", lambda x: x.flip(1, 2)),
    ]
    w.add(*w.random.choice(table))


def attended(
    x: Tensor, maps: nn.Module, heads: int, mix: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Return what `mix` makes of queries, keys and values in heads, as tokens."""
    b, n, _ = x.shape
    q, k, v = (t.reshape(b, n, heads, -1).transpose(1, 2) for t in (maps(x), x, maps(x)))
    return mix(q, k, v).transpose(1, 2).reshape(b, n, -1)


def attention_written_out(x: Tensor, maps: nn.Module, heads: int, numbers: Tensor) -> Tensor:
    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (0.7 * q @ k.transpose(-2, -1) + numbers).softmax(dim=-1) @ v

    return attended(x, maps, heads, mix)


def numbers_added(x: Tensor, maps: nn.Module, heads: int, numbers: Tensor) -> Tensor:
    mix = functools.partial(F.scaled_dot_product_attention, attn_mask=numbers)
    return attended(x, maps, heads, mix)


def move(w: Writer) -> None:
    """Entries moved, dropped, repeated, or joined."""
    x, axis, other = w.x, w.axis(), w.axis()
    shape = tuple(x.shape)
    count = x.shape[axis]
    order, places, place = w.order(count), w.places(count), w.random.randrange(-count, count)
    whole = (slice(None),) * (axis % x.dim())
    cut = slice(
        w.random.choice((0, 1, -2, None)),
        w.random.choice((None, 3, -1)),
        w.random.choice((1, 2, None)),
    )
    axes, many = w.order(x.dim()), w.random.choice((2, 4))
    register = w.normal(*shape[:1], 1, *shape[2:])
    loose = w.normal(1, 1, *shape[2:])
    inner = w.places(shape[-1])
    table: list[tuple[str, Step]] = [
        ("reordered", lambda x: x[(*whole, order)]),
        ("reordered", lambda x: x[(*whole, order)]),
        ("some", lambda x: x[(*whole, places)]),
        ("some of a token", lambda x: x[..., inner]),
        ("one", lambda x: x[(*whole, place)].unsqueeze(axis)),
        ("selected", lambda x: x.select(axis, place).unsqueeze(axis)),
        ("cut", lambda x: x[(*whole, cut)]),
        ("a new axis and away", lambda x: x[(*whole, None)].squeeze(axis % x.dim())),
        ("permuted", lambda x: x.permute(axes)),
        ("transposed", lambda x: x.transpose(axis, other)),
        ("windows", lambda x: x.reshape(many, -1, shape[-1])),
        ("windows of rows", lambda x: x.reshape(shape[0] * many, -1, shape[-1])),
        ("one image", lambda x: x.reshape(1, -1, shape[-1])),
        ("narrow tokens", lambda x: x.reshape(shape[0], -1, 2)),
        ("viewed", lambda x: x.contiguous().view(-1, shape[0], shape[-1])),
        ("chunks the other way", lambda x: torch.cat(x.chunk(2, axis)[::-1], axis)),
        ("split", lambda x: torch.cat([x.split(1, dim=axis)[place], x], dim=axis)),
        ("unbound", lambda x: torch.cat([t.unsqueeze(0) for t in x.unbind(axis)[::-1]][:2], 1)),
        ("narrowed", lambda x: x.narrow(axis, place % count, 1).expand(shape)),
        ("twice", lambda x: torch.cat([x, x], axis)),
        ("register tokens", lambda x: torch.cat([register, x], 1)),
        ("loose tokens", lambda x: torch.cat([loose.expand(x.shape[0], -1, -1), x], 1)),
        ("token dropped", lambda x: x[:, 1:]),
        ("mean kept", lambda x: x.mean(axis, keepdim=True)),
        ("mean subtracted", lambda x: x - x.mean(axis, keepdim=True).expand(shape)),
        ("mean over two", lambda x: x.unflatten(axis, (-1, 2)).mean(axis % x.dim() + 1)),
        ("no mean", lambda x: x.mean((), keepdim=True)),
        ("repeated on the batch axis", lambda x: x[:1].expand(many, -1, -1)),
        (
            "two indices",
            lambda x: x[:, [0, -1]][:, :, [0, -1]] + x[:, [0, -1], 0:1].expand(-1, -1, 2),
        ),
        (
            "diagonal",
            lambda x: x[:, list(range(min(shape[1:]))), list(range(min(shape[1:])))].unsqueeze(1),
        ),
    ]
    w.add(*w.random.choice(table))


def end(w: Writer) -> None:
    """One row of entries, and a linear layer."""
    if w.x.dim() != 3:
        w.add("tokens", lambda x: x.reshape(1, -1, x.shape[-1]))
    b, n, width = w.x.shape
    norm = w.part(nn.LayerNorm(width, eps=1e-3))
    place = w.random.randrange(-n, n)
    order, some, row = w.order(width), w.places(width), w.random.randrange(b)
    if w.random.random() < 0.6:
        w.add("last norm", norm)
    table: list[tuple[str, Step]] = [
        ("one token", lambda x: x[:, place]),
        ("all of one token", lambda x: x[:, place, :]),
        ("one token, reordered", lambda x: x[:, place, order]),
        ("one token, backwards", lambda x: x[:, place, list(range(width))[::-1]]),
        ("some of one token", lambda x: x[:, place, some]),
        ("part of one token", lambda x: x[:, place, 1:]),
        ("every second of one token", lambda x: x[:, place, ::2]),
        ("one token, rest", lambda x: x[:, place, ...]),
        ("token of a row", lambda x: x[row : row + 1, place]),
        ("token of a row", lambda x: x[row, place].unsqueeze(0)),
        ("mean", lambda x: x.mean(1)),
        ("mean of rows", lambda x: x[[row]].mean(1)),
        ("all", lambda x: x.reshape(1, -1)),
    ]
    w.add(*w.random.choice(table))
    if w.x.shape[0] != 1:
        w.add("rows side by side", lambda x: x.reshape(1, -1))
    if w.x.shape[1] == width and w.random.random() < 0.3:
        w.add("norm", norm)
    w.add("head", w.part(nn.Linear(w.x.shape[-1], CLASSES)))
    if w.random.random() < 0.2:
        last = w.order(CLASSES)
        w.add("classes reordered", lambda x: x[:, last])


def program(seed: int) -> Program:
    """The program of this seed; steps that torch does not take are drawn again."""
    w = Writer(seed)
    inner = (act, act_later, act_later, move) if seed >= LATER else (act, act, move)
    inner = (act, act_latest, act_latest, act_latest, move) if seed >= LATEST else inner
    kinds = [
        first_tokens,
        *[w.random.choice(inner) for _ in range(w.random.randint(1, 6))],
        end,
    ]
    for kind in kinds:
        for _ in range(50):
            try:
                kind(w)
                break
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue
        else:
            return program(seed + 100_003)
    return w.program.double().eval()
