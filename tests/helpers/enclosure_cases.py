"""The relaxations of the local domain, one row each, beside the function they enclose."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from certcli.enclosure.zonotopes.columns import Block, Blocks, reach_of, runs
from certcli.enclosure.zonotopes.direction import divided
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form, Space
from certcli.enclosure.zonotopes.normalisation import centred, layer_norm, signs
from certcli.enclosure.zonotopes.pointwise import activation, apply, relu
from certcli.enclosure.zonotopes.products import TIMES, product, squares
from certcli.enclosure.zonotopes.rules.arithmetic import negative
from certcli.enclosure.zonotopes.rules.attention import attend, average, scores, softmax
from certcli.enclosure.zonotopes.rules.layers import affine, clipped_relu, maxmin
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.curves import (
    EXP,
    GELU,
    GELU_TANH,
    HARD_SWISH,
    LOG,
    RECIPROCAL,
    RSQRT,
    SELU,
    SIGMOID,
    SILU,
    SQRT,
    TANH,
)
from certcli.nn.blocks import CenterNorm, Spread
from certcli.nn.layers import ClippedReLU, MaxMin


@dataclass(frozen=True)
class Case:
    """shapes of the inputs; the relaxation on forms; the function on tensors with a leading batch
    axis.

    positive: inputs above 1/2. order: of the first term that is left to the box when e e^T has
        columns (3), or is linear (9). below: the form only bounds the function from below.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    relax: Callable[..., Form]
    run: Callable[..., Tensor]
    positive: bool = False
    order: int = 3
    below: bool = False

    def excess(self, middle: Tensor, truth: Tensor) -> Tensor:
        """Return how far the truth is from the middle of the form, on a side that it bounds."""
        return middle - truth if self.below else (truth - middle).abs()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def seeded_weight(*shape: int) -> Tensor:
    return draw(*shape, seed=3)


_W, _B, _G = seeded_weight(5, 4), seeded_weight(5), seeded_weight(4)
_MANY = seeded_weight(5, 48)
_CLIPPED = ClippedReLU((3, 4)).double()
_CLIPPED.threshold.data = seeded_weight(3, 4)
_CENTRED = CenterNorm(4).double().requires_grad_(False)
_CENTRED.weight.data = seeded_weight(4)
_CENTRED.bias.data = seeded_weight(4).flip(0)
_STATISTICS = (
    seeded_weight(5),
    seeded_weight(5).square(),
    seeded_weight(5).flip(0),
    seeded_weight(5) / 2,
)
"""Mean, variance, weight and bias."""
_HEADS = (1, 2, 5, 3)


_FLOOR = Spread(0.0, 0.6)
"""The least variance: of nine tokens some are above it, some below, and some on both sides."""


def floored_deviation(x: Tensor) -> Tensor:
    return x.var(-1, unbiased=False, keepdim=True).clamp_min(_FLOOR.min_variance).sqrt()


def floored_norm(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / floored_deviation(x)


def _softmax_rows(x: Tensor) -> Tensor:
    return x.softmax(-1)


CASES = (
    Case(
        "linear", ((1, 3, 4),), lambda x: affine(x, _W, _B), lambda x: F.linear(x, _W, _B), order=9
    ),
    Case("centring", ((1, 3, 4),), centred, lambda x: x - x.mean(-1, keepdim=True), order=9),
    Case("sum", ((1, 3, 4), (1, 3, 4)), lambda x, y: x + y, torch.add, order=9),
    Case("difference", ((1, 3, 4), (1, 3, 4)), lambda x, y: x + negative(y), torch.sub, order=9),
    Case("reduction", ((1, 3, 4),), reduced, lambda x: x, order=9),
    Case("symbols for slack", ((1, 3, 4),), lambda x: x.solid(), lambda x: x, order=9),
    Case("ReLU", ((1, 3, 4),), relu, torch.relu, order=1),
    Case("GELU", ((1, 3, 4),), lambda x: apply(GELU, x), F.gelu),
    Case(
        "tanh GELU",
        ((1, 3, 4),),
        lambda x: apply(GELU_TANH, x),
        lambda x: F.gelu(x, approximate="tanh"),
    ),
    Case("exp", ((1, 3, 4),), lambda x: apply(EXP, x), torch.exp),
    Case("log", ((1, 3, 4),), lambda x: apply(LOG, x), torch.log, positive=True),
    Case(
        "reciprocal", ((1, 3, 4),), lambda x: apply(RECIPROCAL, x), torch.reciprocal, positive=True
    ),
    Case("rsqrt", ((1, 3, 4),), lambda x: apply(RSQRT, x), torch.rsqrt, positive=True),
    Case("sqrt", ((1, 3, 4),), lambda x: apply(SQRT, x), torch.sqrt, positive=True),
    Case("product", ((1, 3, 4), (1, 3, 1)), lambda x, y: product(x, y, TIMES, 1), torch.mul),
    Case("sum of squares", ((1, 3, 4),), squares, lambda x: (x * x).sum(-1, keepdim=True)),
    Case(
        "LayerNorm",
        ((1, 3, 4),),
        lambda x: layer_norm(x, Spread(1e-2), _G, _B[:4]),
        lambda x: F.layer_norm(x, (4,), _G, _B[:4], 1e-2),
    ),
    Case(
        "sign of a LayerNorm",
        ((1, 1, 4),),
        lambda x: signs(x, Spread(1e-2), _W, _B, torch.zeros(5).double()),
        lambda x: centred_heads(x) + _B * (x.var(-1, unbiased=False, keepdim=True) + 1e-2).sqrt(),
        below=True,
    ),
    Case("scores", (_HEADS, _HEADS), scores, lambda q, k: q @ (k - k.mean(-2, keepdim=True)).mT),
    Case("softmax", ((1, 2, 3, 4),), softmax, _softmax_rows),
    Case(
        "average",
        ((1, 2, 5, 5), _HEADS),
        lambda s, v: average(softmax(s), v),
        lambda s, v: s.softmax(-1) @ v,
    ),
    Case(
        "attention",
        (_HEADS, _HEADS, _HEADS),
        lambda q, k, v: attend(q, k, v, 0.5),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5),
    ),
    Case(
        "clipped ReLU",
        ((1, 3, 4),),
        lambda x: clipped_relu(None, _CLIPPED, x),  # type: ignore[arg-type]
        lambda x: x.minimum(_CLIPPED.threshold).relu(),
        order=1,
    ),
    Case(
        "LayerNorm, mixed",
        ((1, 3, 4),),
        lambda x: affine(layer_norm(x, Spread(1e-2), _G, None), _W, _B),
        lambda x: F.linear(F.layer_norm(x, (4,), _G, None, 1e-2), _W, _B),
    ),
    Case(
        "reduction, mixed",
        ((1, 3, 4),),
        lambda x: affine(reduced(x), _W, _B),
        lambda x: F.linear(x, _W, _B),
        order=9,
    ),
    Case("SiLU", ((1, 3, 4),), lambda x: apply(SILU, x), F.silu),
    Case("hard swish", ((1, 3, 4),), lambda x: apply(HARD_SWISH, x), F.hardswish, order=1),
    Case("SELU", ((1, 3, 4),), lambda x: apply(SELU, x), F.selu, order=1),
    Case("sigmoid", ((1, 3, 4),), lambda x: apply(SIGMOID, x), torch.sigmoid),
    Case("tanh", ((1, 3, 4),), lambda x: apply(TANH, x), torch.tanh),
    Case(
        "centred norm",
        ((1, 3, 4),),
        lambda x: rules.modules[CenterNorm].apply(None, _CENTRED, x),  # type: ignore[arg-type]
        _CENTRED,
        order=9,
    ),
    Case(
        "BatchNorm",
        ((1, 5, 4),),
        lambda x: rules.functions[F.batch_norm](None, x, *_STATISTICS, eps=0.2),  # type: ignore[arg-type]
        lambda x: F.batch_norm(x.flatten(0, -3), *_STATISTICS, eps=0.2).view(x.shape),
        order=9,
    ),
    Case(
        "linear function",
        ((1, 3, 4),),
        lambda x: rules.functions[F.linear](None, x, _W, _B),  # type: ignore[arg-type]
        lambda x: F.linear(x, _W, _B),
        order=9,
    ),
    Case(
        "rows of length 1",
        ((1, 9, 4),),
        lambda x: rules.functions[F.normalize](ZonotopeContext(None, None), x, dim=-1, eps=1.5),  # type: ignore[arg-type]
        lambda x: F.normalize(x, dim=-1, eps=1.5),
        order=1,
    ),
    Case(
        "MaxMin",
        ((1, 3, 4),),
        lambda x: maxmin(None, MaxMin(), x),  # type: ignore[arg-type]
        MaxMin(),
        order=1,
    ),
    Case(
        "sum of tokens",
        ((1, 3, 4),),
        lambda x: rules.functions[torch.sum](None, x, 1),
        lambda x: x.sum(-2),
        order=9,
    ),  # type: ignore[arg-type]
    Case(
        "rows over their sums",
        ((1, 3, 4),),
        lambda x: rules.functions[torch.div](
            None, x, rules.functions[torch.sum](None, x, -1, keepdim=True)
        ),  # type: ignore[arg-type]
        lambda x: x / x.sum(-1, keepdim=True),
        positive=True,
    ),
    Case(
        "norm with a floor",
        ((1, 9, 4),),
        lambda x: layer_norm(x, _FLOOR, _G, _B[:4]),
        lambda x: floored_norm(x) * _G + _B[:4],
        order=1,
    ),
    Case(
        "norm with a floor, mixed",
        ((1, 9, 4),),
        lambda x: affine(layer_norm(x, _FLOOR, _G, None), _W, _B),
        lambda x: F.linear(floored_norm(x) * _G, _W, _B),
        order=1,
    ),
    Case(
        "sign of a norm with a floor",
        ((1, 9, 4),),
        lambda x: signs(x, _FLOOR, _W, _B, torch.zeros(5).double()),
        lambda x: centred_heads(x) + _B * floored_deviation(x),
        order=1,
    ),
    Case("GELU of many", ((1, 3, 48),), lambda x: activation(GELU, x), F.gelu),
    Case(
        "SiLU, mixed",
        ((1, 3, 48),),
        lambda x: affine(activation(SILU, x), _MANY, None),
        lambda x: F.linear(F.silu(x), _MANY),
    ),
    Case(
        "square times a number",
        ((1, 3, 4), (1, 3, 1)),
        lambda x, h: divided(squares(x), h, squares(x).interval()[1]),
        lambda x, h: (x * x).sum(-1, keepdim=True) * h,
        order=1,
    ),
)


def centred_heads(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) @ _W.T


BALL = 6
BLOCKS = (Block(-1, 4), Block(-2, 4, 2))
BOX = 8


def forms(case: Case, size: float, squares_on: bool, seed: int, mixed: bool = False) -> list[Form]:
    """Random forms of radius about `size` for the inputs: they share e and the box symbols, and
    have slack.

    What stands in Q, B and slack is of second and third order, as it is in a walk; `mixed`: as
    large as the ball's part. At odd seeds some entries of e move one way only, or not at all, as
    pixels at 0 and 1 do.
    """
    generator = torch.Generator().manual_seed(seed)
    fall, rise = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 0, 1, 1, 0]]).double()
    space = Space(BALL, squares_on, 14, reach=(fall, rise) if seed % 2 else None)
    made = []
    for shape in case.shapes:
        random = [
            torch.randn(*lead, *shape, generator=generator).double()
            for lead in ((), (BALL,), (space.square,))
        ]
        box = torch.randn(BOX, *shape, generator=generator).double()
        slack = torch.rand(*shape, generator=generator).double()
        centre = random[0].abs() + 1 if case.positive else random[0]
        scale = size / BALL**0.5
        second, third = (scale / 4, scale / 4) if mixed else (scale**2, scale**3)
        gens = torch.cat([random[1] * scale, random[2] * second, box * (third / 2)])
        made.append(Form(space, centre, gens, slack * third, BLOCKS))
    return made


def square_symbols(e: Tensor) -> Tensor:
    """vec(e e^T) of each row of e: (b, m) -> (b, m (m + 1) / 2)."""
    first, second = torch.triu_indices(e.shape[1], e.shape[1])
    return (
        e[:, first]
        * e[:, second]
        * torch.where(first == second, e.new_tensor(1.0), e.new_tensor(2**0.5))
    )


def evaluate(form: Form, e: Tensor, n: Tensor, known: Blocks) -> tuple[Tensor, Tensor]:
    """The form at symbols e (b, m), within its reach, and n (b, box) of the blocks `known`, and the
    radius of the rest.
    """
    if form.space.reach is not None:
        e = torch.maximum(torch.minimum(e, form.space.reach[1]), -form.space.reach[0])
    columns = [e, square_symbols(e)] if form.space.squares else [e]
    free = form.slack.clone()
    given = []
    for block, part in runs(form.box, form.blocks):
        if block in known:
            given.append(part)
        else:
            free = free + reach_of(part, (block,))
    used = torch.cat([form.gens[: form.fixed], *given])
    symbols = torch.cat([*columns, n[:, : len(used) - form.fixed]], 1)
    return form.centre + torch.tensordot(symbols, used, dims=1), free


OWN = (Block(-3, 4, 1, of_fibres=True), Block(-4, 4, 2, of_fibres=True))
"""Four box symbols and two groups of two, of each fibre its own."""


def fibre_forms(
    shapes: tuple[tuple[int, ...], ...], size: float, seed: int, *, positive: bool, boxed: bool
) -> list[Form]:
    """Random forms of radius about `size` whose symbols are the fibres' own, as large as the ball's."""
    generator = torch.Generator().manual_seed(seed)
    space = Space(BALL, squares=False, limit=14, boxed=boxed, by_fibres=True)
    made = []
    for shape in shapes:
        centre, *gens = (
            torch.randn(*lead, *shape, generator=generator).double()
            for lead in ((), (BALL,), (BOX,))
        )
        slack = torch.rand(*shape, generator=generator).double() * size**2 / 4
        columns = torch.cat(gens) * (size / BALL**0.5)
        made.append(Form(space, centre.abs() + 1 if positive else centre, columns, slack, OWN))
    return made


def evaluate_fibres(form: Form, e: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
    """The form at symbols e (b, m) and n (b, box, fibres) of `OWN`, and the radius of the rest."""
    own = {block.name: part for block, part in zip(OWN, n.split(4, 1), strict=True)}
    middle = form.centre + torch.tensordot(e, form.ball, dims=1)
    free = form.slack.clone()
    for block, part in runs(form.box, form.blocks):
        name, place = block.name if isinstance(block.name, tuple) else (block.name, None)
        if name not in own:
            free = free + reach_of(part, (block,))
        elif block.of_fibres:
            moved = torch.einsum("bkf,kfd->bfd", own[name], part.flatten(1, -2))
            middle = middle + moved.view(-1, *form.shape)
        else:
            symbols = (
                own[name].transpose(1, 2).flatten(1) if place is None else own[name][..., place]
            )
            middle = middle + torch.tensordot(symbols, part, dims=1)
    return middle, free
