"""Random programs for the local domains, and the laws over them.

A program cuts an image of 16 pixels into tokens, moves them about (windows and quarters on the batch axis, odd indexing,
permutations, repeats, register tokens), lets modules act on them wherever they stand, and reads some entries of the result.
The laws: no point of the ball leaves a node of a walk, and no attack succeeds within a certified radius. What a domain
refuses is counted.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import certcli.compat  # noqa: F401

# isort: split
from timm.layers import LayerScale
from timm.layers.attention import Attention

from certcli.certify.local import LocalCertifier
from certcli.enclosure.domain import LocalNetwork
from certcli.enclosure.form import Form, Unbounded, l2_ball
from certcli.enclosure.norms.network import NormsNetwork
from certcli.enclosure.norms.value import Near, Normalised, settled
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace
from certcli.engine.tracer import Untraceable
from certcli.errors import NoBoundError
from tests.enclosure_cases import square_symbols

SIZE = (1, 4, 4)
CLASSES = 3
LARGEST, TOKENS = 96, 8
STARTS, STEPS = 3, 8
RADII = (1e-3, 1e-2, 0.05, 0.2, 0.8)
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
            parameter.data = start + (1.2 / parameter[0].numel() ** 0.5 if matrix else 0.5) * self.normal(
                *parameter.shape
            )
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


def start(w: Writer) -> None:
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
    x, width = w.x, w.x.shape[-1]
    heads = 2 if width % 2 == 0 else 1
    linear, square = w.part(nn.Linear(width, w.random.choice((3, 4, 6)))), w.part(nn.Linear(width, width))
    norm, scale = w.part(nn.LayerNorm(width, eps=w.random.choice((1e-2, 1e-5)))), w.part(LayerScale(width))
    attention = w.part(Attention(width, num_heads=heads, qkv_bias=w.random.random() < 0.5))
    channels = x.shape[1]
    conv = w.part(nn.Conv2d(channels, channels, 3, padding=1, groups=w.random.choice((1, channels))))
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
        ("convolution of planes", lambda x: conv(x.reshape(x.shape[0], channels, 2, -1)).reshape(x.shape)),
        ("times a constant", lambda x: x * factor),
        ("plus a constant", lambda x: constant + x),
        ("minus", lambda x: constant - x / 2),
        ("times itself", lambda x: x * square(x)),
        ("dot product", lambda x: F.scaled_dot_product_attention(*[square(x).unsqueeze(1)] * 3, scale=0.7).squeeze(1)),
        ("heads", lambda x: split_heads(x, square, heads)),
        ("rms norm", lambda x: F.rms_norm(x, (width,), factor, 1e-2)),
    ]
    w.add(*w.random.choice(table))


def split_heads(x: Tensor, maps: nn.Module, heads: int) -> Tensor:
    b, n, _ = x.shape
    q, k, v = (t.reshape(b, n, heads, -1).transpose(1, 2) for t in (maps(x), x, maps(x)))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, -1)


def move(w: Writer) -> None:
    """Entries moved, dropped, repeated, or joined."""
    x, axis, other = w.x, w.axis(), w.axis()
    shape, count = tuple(x.shape), x.shape[axis]
    order, places, place = w.order(count), w.places(count), w.random.randrange(-count, count)
    whole = (slice(None),) * (axis % x.dim())
    cut = slice(w.random.choice((0, 1, -2, None)), w.random.choice((None, 3, -1)), w.random.choice((1, 2, None)))
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
        ("two indices", lambda x: x[:, [0, -1]][:, :, [0, -1]] + x[:, [0, -1], 0:1].expand(-1, -1, 2)),
        ("diagonal", lambda x: x[:, list(range(min(shape[1:]))), list(range(min(shape[1:])))].unsqueeze(1)),
    ]
    w.add(*w.random.choice(table))


def end(w: Writer) -> None:
    """One row of entries, and a linear layer."""
    if w.x.dim() != 3:
        w.add("tokens", lambda x: x.reshape(1, -1, x.shape[-1]))
    b, n, width = w.x.shape
    norm, place = w.part(nn.LayerNorm(width, eps=1e-3)), w.random.randrange(-n, n)
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
    kinds = [start, *[w.random.choice((act, act, move)) for _ in range(w.random.randint(1, 6))], end]
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


@dataclass
class Found:
    """What the laws saw: counts of what was tried, and what broke them."""

    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def node_values(traced: Trace, pixels: Tensor) -> dict[fx.Node, Tensor]:
    """Every node of the graph at these pixels, one image at a time as it was traced."""
    values: dict[fx.Node, Tensor] = {}
    for node in traced.graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
        if node.op == "placeholder":
            values[node] = pixels
        elif node.op == "get_attr":
            values[node] = traced.constants[node.target]
        elif node.op == "call_module":
            values[node] = traced.root.get_submodule(node.target)(*args, **kwargs)
        elif node.op == "call_method":
            values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
        elif node.op == "call_function":
            values[node] = node.target(*args, **kwargs)
    return values


def unit(directions: Tensor) -> Tensor:
    return directions / directions.flatten(1).norm(dim=1).clamp_min(1e-300).view(-1, 1, 1, 1)


def guided(traced: Trace, pixels: Tensor, seed: int, most: int = 8) -> Tensor:
    """Unit moves (k, c, h, w): for some nodes, both ways along which a random sum of its entries changes fastest."""
    x = pixels.clone().requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    found = []
    values = [v for v in node_values(traced, x).values() if isinstance(v, Tensor) and v.requires_grad]
    for value in values[1:][:: max(1, len(values) // most)]:
        weight = torch.randn(value.shape, generator=generator).double()
        (slope,) = torch.autograd.grad((weight * value).sum(), x, retain_graph=True)
        found += [slope, -slope]
    axes = torch.eye(pixels.numel()).double().view(-1, *pixels.shape[1:])[seed % 3 :: 7]
    random_moves = torch.randn(6, *pixels.shape[1:], generator=generator).double()
    return unit(torch.cat([*found, axes, -axes, random_moves]))


def share_of_form(form: Form, e: Tensor, truth: Tensor) -> float:
    """How far the truth (points, *shape) is from the form at the symbols e (points, m), over what the form leaves free."""
    columns = torch.cat([e, square_symbols(e)], 1) if form.space.squares else e
    middle = form.centre + torch.tensordot(columns, form.gens[: form.fixed], dims=1)
    free = form.box.abs().sum(0) + form.slack
    # the network and the form are evaluated in float64: 500 roundings, relative to the values
    far = (truth - middle).abs() - 1e-13 * (1 + truth.abs() + form.size)
    return float((far / free.clamp_min(1e-300)).max())


def share_of_ball(near: Near, e: Tensor, truth: Tensor) -> float:
    """The same for a ball of norms, the larger of each fibre's share and that of all together."""
    far, noise = truth - near.centre[0], 1e-13 * (1 + near.centre.norm())
    each = (far.norm(dim=-1) - noise) / near.fibre[0].clamp_min(1e-300)
    together = (far.flatten(1).norm(dim=1) - noise) / near.whole.clamp_min(1e-300)
    return max(float(each.max()), float(together.max()))


def walked(
    network: LocalNetwork | NormsNetwork, pixels: Tensor, label: int, radius: float
) -> tuple[dict[fx.Node, tuple[object, int | None]], Tensor | None]:
    """Every node's value in a walk around the image, and the margins; None where the walk has no end."""
    values: dict[fx.Node, tuple[object, int | None]] = {}

    def watch(node: fx.Node, value: object, token: int | None) -> None:
        values[node] = value, token

    try:
        if isinstance(network, LocalNetwork):
            return values, network.margins(l2_ball(pixels, radius, squares_up_to=128, limit=300), label, watch)
        at = torch.tensor([radius], dtype=torch.float64)
        return values, network.margins(pixels, at, torch.tensor([label]), watch=watch)[0]
    except Unbounded:
        return values, None


def check_nodes(found: Found, name: str, network: LocalNetwork | NormsNetwork, pixels: Tensor, seed: int) -> None:
    """No point of the ball leaves a node; at radius 0 no margin is above the logits' own."""
    traced = network.ending.trace
    logits = traced.root(pixels)[0]
    scaled = isinstance(network, LocalNetwork) and network.ending.norm is not None  # its margins have the sign alone
    for label in range(CLASSES):
        _, margins = walked(network, pixels, label, 0.0)
        truth = torch.stack([logits[label] - z for j, z in enumerate(logits) if j != label])
        noise = 1e-9 * (1 + logits.abs().max())
        above = (margins > 0) & (truth < -noise) if scaled else margins > truth + noise
        if margins is not None and bool(above.any()):
            found.broken.append(f"{name}: margins {margins.tolist()} at radius 0, not {truth.tolist()}")
            return
    for radius in (1e-6, 3e-2):
        values, _ = walked(network, pixels, 0, radius)
        moves = guided(traced, pixels, seed)
        points = [node_values(traced, pixels + radius * e) for e in moves]
        for node, (value, token) in values.items():
            for part, tensors in beside(value, [point[node] for point in points], token):
                found.tried[f"{name} nodes"] += 1
                found.tried[f"{name} points at nodes"] += len(points)
                share = float("inf")
                if tuple(part.shape) == tuple(tensors.shape[1:]):
                    measure = share_of_form if isinstance(part, Form) else share_of_ball
                    share = measure(part, moves.flatten(1), tensors)
                if not share <= 1:
                    found.broken.append(f"{name}: {node} at {radius:g}: {share:.3g}")
                    return


def beside(value: object, tensors: list[object], token: int | None) -> Iterator[tuple[Form | Near, Tensor]]:
    """What a walk says of a node's tensors, beside these tensors at some points: (points, *shape)."""
    if isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from beside(part, [one[i] for one in tensors], token)
    elif isinstance(value, (Form, Near, Normalised)):
        stacked = torch.stack(tensors)
        part = value if isinstance(value, Form) else settled(value)
        yield part, stacked if token is None else stacked[:, :, token : token + 1]


def attack(model: nn.Module, pixels: Tensor, label: int, radius: float, seed: int) -> float:
    """The least margin found within the radius, one image at a time: most programs take no batch."""
    generator, least = torch.Generator().manual_seed(seed), float("inf")
    for turn in range(STARTS):
        delta = radius * unit(torch.randn(1, *SIZE, generator=generator).double())
        for step in range(STEPS):
            delta = delta.requires_grad_(True)
            logits = model(pixels + delta)[0]
            margins = torch.stack([logits[label] - z for j, z in enumerate(logits) if j != label])
            least = min(least, float(margins.detach().min()))
            aim = margins[turn % len(margins)] if turn < len(margins) else margins.min()
            (slope,) = torch.autograd.grad(aim, delta)
            delta = delta.detach() - (radius if step == 0 else 0.5 * radius * (1 - step / STEPS)) * unit(slope)
            delta = delta * (radius / delta.norm()).clamp_max(1)
    return least


def check_certificate(found: Found, model: nn.Module, certifier: LocalCertifier, pixels: Tensor, seed: int) -> None:
    """No attack succeeds within the radius of this image."""
    label, name = int(model(pixels).argmax()), certifier.effort
    (row,) = certifier.batch([0], pixels, [label])
    if row.radius > 0:
        found.tried[f"{name} certificates"] += 1
        found.tried[f"{name} attacks"] += STARTS
        least = attack(model, pixels, label, row.radius, seed)
        if not least > 0:
            found.broken.append(f"{name}: margin {least:.3g} within {row.radius:.3g}")


def check(seed: int, found: Found) -> None:
    """All laws for the program of this seed."""
    model, laws = program(seed), Found()
    pixels = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(seed + 1)).double()
    kinds: tuple[tuple[str, type[LocalNetwork | NormsNetwork]], ...] = (
        ("zonotope", LocalNetwork),
        ("norms", NormsNetwork),
    )
    for name, kind in kinds:
        at = RADII if name == "zonotope" else ()
        try:
            check_nodes(laws, name, kind(model, SIZE), pixels, seed)
            check_certificate(
                laws, model, LocalCertifier(model, SIZE, effort=name, symbols=300, steps=1, at=at), pixels, seed
            )
        except (NoRule, Untraceable, NoBoundError) as reason:
            found.refused[f"{name}: {str(reason).removeprefix('no local certificate: ')}"[:90]] += 1
    found.tried.update(laws.tried)
    found.tried["programs"] += 1
    found.broken += [f"seed {seed}, {line}" for line in laws.broken]
