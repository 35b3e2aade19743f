"""Multi-head attention: what no image changes (biases, masks, gated positions), its linear maps head by
head, and the sums that bound all heads together.

The output of head h moves by at most sum_t c_th |dy_th| over its maps y_t (queries, keys, values),
and every head has an output of its own. Proofs: docs/bounds.md, sections 5.4 and 7.1.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from certcli.engine.table import NoRule, runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.value import Value
from certcli.nn.attention import LipschitzAttention
from certcli.system.errors import raise_if

SLACK = 1e-9
"""Relative: the error of a softmax of numbers below 1e4 in float64, of Newton's last step, and
of sums of up to 1e6 positive terms of these, is below 1e-10.
"""


@dataclass(frozen=True)
class Prior:
    """Largest column sum, column norm and entry of pi = softmax(B) by head; B: biases, masks."""

    columns: list[Scalar]
    root: list[Scalar]
    peak: list[Scalar]


def by_head(
    ctx: Context,
    heads: int,
    without: Sequence[float],
    biases: Tensor | None,
    terms_of: Callable[[Tensor], Sequence[Tensor]],
) -> list[list[Scalar]]:
    """Return terms of a theorem, each a number a head.

    Args:
        without: The terms without biases, bounds from above.
        terms_of: Computes them from biases B (m, h, n, n), each (h,): differentiable, within SLACK.
    """
    if biases is None:
        return [[ctx.arith.const(value)] * heads for value in without]
    parts = terms_of(biases)
    if not ctx.arith.rigorous:
        return [list(part.unbind()) for part in parts]
    return [[ctx.arith.const(up(value * (1 + SLACK))) for value in part.tolist()] for part in parts]


def prior(ctx: Context, module: LipschitzAttention, mask: Any, tokens: int) -> Prior:
    """Return the bounds of pi for this layer and mask: 1, 1/sqrt(n) and 1/n where B = 0."""
    biases = position_logits(ctx, module, mask, tokens)
    without = (1.0, up(1 / math.sqrt(tokens), 2), up(1 / tokens))
    return Prior(*by_head(ctx, module.num_heads, without, biases, _prior_terms))


def _prior_terms(biases: Tensor) -> tuple[Tensor, ...]:
    largest = float(biases.detach().clamp_min(-1e4).abs().max())
    raise_if(largest > 1e4, NoRule, "position biases beyond 1e4")
    pi = biases.softmax(dim=-1)
    raise_if(pi.isnan().any(), NoRule, "a mask under which a token sees nothing")
    return pi.sum(-2).amax((0, 2)), pi.square().sum(-2).sqrt().amax((0, 2)), pi.amax((0, 2, 3))


def position_logits(
    ctx: Context, module: LipschitzAttention, mask: Any, tokens: int
) -> Tensor | None:
    """Return B, the constant in the logits: (m, h, n, n) in float64 for m masks; None for 0."""
    bias: Tensor | None = None
    if module.window_size is not None:
        bias = module.position_bias().double().unsqueeze(0)
        ctx.require(bias.shape[-1] == tokens, "windows of another size than the table of positions")
        ctx.require(bool(torch.isfinite(bias).all()), "infinite or NaN position biases")
    if mask is not None:
        fixed = ctx.constant_tensor(mask)
        ctx.require(
            fixed.dim() == 3 and fixed.is_floating_point(),
            "a mask that is not added to the scores of windows",
        )
        # most windows of an image share a mask (none)
        fixed = fixed.detach().double().unique(dim=0).unsqueeze(1)
        ctx.require(
            not bool(torch.isnan(fixed).any() | (fixed == math.inf).any()),
            "a mask with NaN or +inf",
        )
        bias = fixed.expand(-1, module.num_heads, -1, -1) if bias is None else bias + fixed
    return bias


def exp_twice(arith: Arithmetic, tau: Scalar) -> Scalar:
    """Return e^(2 tau): p_ij <= e^(2 tau) pi_ij if the image's part of a row spans <= 2 tau."""
    if not arith.rigorous:
        return (2 * tau).clamp_max(80.0).exp()
    return arith.const(up(math.exp(2 * float(tau)), 8) if float(tau) < 300 else math.inf)


@dataclass(frozen=True)
class Gates:
    """Output keep P(x) v + B v, B constant: `keep` and `fixed` = |B| by head."""

    keep: list[Scalar]
    fixed: list[Scalar]

    def scale(self, weights: Sequence[Scalar]) -> list[Scalar]:
        return [keep * weight for keep, weight in zip(self.keep, weights, strict=True)]

    def averaging(self, weights: Sequence[Scalar]) -> list[Scalar]:
        """Return the factors of |dv_h|: keep_h |P_h| + |B_h| for |P_h| = weights_h."""
        return [
            scaled_term + fixed
            for scaled_term, fixed in zip(self.scale(weights), self.fixed, strict=True)
        ]


def gates_of_layer(ctx: Context, module: LipschitzAttention, tokens: int) -> Gates:
    """Return the gates of Theorem 7.1 for ConViT's gated positions, else keep = 1, B = 0."""
    if not module.gated:
        one = ctx.arith.const(1.0)
        return Gates([one] * module.num_heads, [ctx.arith.const(0.0)] * module.num_heads)
    ctx.require(runs_known_code(module.pos_proj, nn.Linear), "a replaced linear layer")
    return positional_gates(ctx, module, tokens)


@torch.no_grad()
def positional_gates(ctx: Context, module: Any, tokens: int) -> Gates:
    """Return 1 - g_h, g_h |B_h| of ConViT's `pos_proj`, `gating_param`, `get_rel_indices`."""
    weight = module.pos_proj.weight.double()
    bias = module.pos_proj.bias.double()
    scores: Tensor = module.get_rel_indices(tokens).double() @ weight.T + bias
    # scores below 1e5 in float64: probabilities within a relative 1e-9; a matrix of averages is at
    # most sqrt(n)
    ctx.require(float(scores.abs().max()) < 1e5, "positional scores beyond 1e5")
    arith = ctx.arith
    slack = 2.0**-40
    keep = []
    fixed = []
    positions = scores.permute(0, 3, 1, 2).softmax(dim=-1)[0]
    for h, gate in enumerate(module.gating_param.double().sigmoid().tolist()):
        computed = arith.sigma(arith.matrix(positions[h]), f"{ctx.path}.positions.{h}")
        norm = arith.minimum(computed * arith.const(1 + 1e-9), arith.root(tokens))
        keep.append(arith.const(1.0 - gate + slack))
        fixed.append(arith.const(gate + slack) * norm)
    return Gates(keep, fixed)


@dataclass(frozen=True)
class HeadMap:
    """u -> W u + b on |u| <= radius, the pending map folded in; head h has W's h-th rows."""

    arith: Arithmetic
    matrix: Matrix
    bias: Matrix | None
    heads: int
    radius: Scalar
    name: str

    @cached_property
    def whole(self) -> Scalar:
        """|W|."""
        return self.arith.sigma(self.matrix, self.name)

    @property
    def parts(self) -> list[Matrix]:
        """W_h."""
        return [self._part(self.matrix, h) for h in range(self.heads)]

    @property
    def offsets(self) -> list[Matrix | None]:
        """b_h."""
        bias = self.bias
        return [None if bias is None else self._part(bias, h) for h in range(self.heads)]

    @cached_property
    def slopes(self) -> list[Scalar]:
        """|W_h|."""
        return self.arith.sigmas(self.parts, f"{self.name}.head")

    @cached_property
    def reach(self) -> list[Scalar]:
        """Radius of the rows W_h u + b_h about b_h."""
        return [slope * self.radius for slope in self.slopes]

    @property
    def norms(self) -> list[Scalar]:
        """Largest norm of a row W_h u + b_h."""
        lengths = map(self.arith.length, self.offsets)
        return [reach + length for reach, length in zip(self.reach, lengths, strict=True)]

    def _part(self, matrix: Matrix, h: int) -> Matrix:
        width = matrix.shape[0] // self.heads
        return self.arith.rows(matrix, h * width, (h + 1) * width)


def head_maps(
    ctx: Context, x: Value, module: LipschitzAttention, *names: str
) -> tuple[Value, list[HeadMap]]:
    """Return the tokens an attention's maps act on, and the maps, by their layers' names."""
    maps = []
    for name in names:
        layer = getattr(module, name)
        ctx.require(runs_known_code(layer, nn.Linear), "a replaced linear layer")
        folded = ctx.fold(x, layer.weight, layer.bias)
        pending = folded.pending
        assert pending is not None
        matrix = pending.effective(ctx.arith)
        assert matrix is not None
        size = folded.size.fibre
        place = f"{ctx.path}.{name}"
        maps.append(HeadMap(ctx.arith, matrix, pending.bias, module.num_heads, size, place))
    return replace(folded, waiting=None), maps


def require_bounded_tokens(ctx: Context, x: Value, what: str) -> None:
    """Raise NoRule where nothing bounds the length of a token."""
    ctx.require(
        not ctx.arith.rigorous or x.size.fibre.finite,
        f"{what} is not Lipschitz on tokens of unbounded norm (no norm layer before it)",
    )


Term = tuple[Sequence[Scalar], HeadMap]


def combined(
    arith: Arithmetic,
    terms: Sequence[Term],
    pairs: tuple[Sequence[Scalar], tuple[HeadMap, HeadMap, HeadMap]] | None = None,
) -> Scalar:
    """Return a bound on |(do_h)_h| / |du| for |do_h| <= sum_t c_th |dy_th|: term by term or head by
    head.

    Args:
        terms: (c_t, y_t) for each t; c_t holds one factor a head.
        pairs: (c, three maps) of one more term, c_h times the two largest of the three |dy_h|.

    Source: docs/bounds.md, section 5.4.
    """
    heads = range(len(terms[0][0]))
    by_term = [_term(arith, weights, moving) for weights, moving in terms]
    by_head = [
        arith.total([weights[h] * moving.slopes[h] for weights, moving in terms]) for h in heads
    ]
    if pairs is not None:
        weights, maps = pairs
        by_term += [_term(arith, weights, moving) for moving in maps]
        for h in heads:
            a, b, c = (moving.slopes[h] for moving in maps)
            by_head[h] = by_head[h] + weights[h] * arith.largest([a + b, a + c, b + c])
    return arith.minimum(arith.total(by_term), arith.root_sum_of_squares(by_head))


def _term(arith: Arithmetic, weights: Sequence[Scalar], moving: HeadMap) -> Scalar:
    """Return |diag(c_1, .., c_1, c_2, ..) W|, rows times their head's factor; it grows with c_h."""
    top = arith.largest(weights)
    numbers = (
        [float(weight) for weight in weights]
        if arith.rigorous
        else torch.stack(list(weights)).tolist()
    )
    scale = max(numbers)
    if min(numbers) == scale or not 0 < scale < math.inf:
        return top * moving.whole
    if arith.rigorous:  # relative to the largest, rounded up: no overflow
        gains = torch.tensor([up(number / scale, 2) for number in numbers], dtype=torch.float64)
    else:
        gains = torch.stack([weight / top for weight in weights])
    rows = gains.repeat_interleave(moving.matrix.shape[0] // moving.heads)
    return top * arith.sigma(arith.scale_rows(moving.matrix, rows), f"{moving.name}.weighted")


def mixed_heads(
    ctx: Context,
    module: LipschitzAttention,
    x: Value,
    constant: Scalar,
    why: str,
    norms: Callable[[], list[Scalar]],
) -> Value:
    """Return the value after [P_h v_h]_h, with this constant, and `proj`, which stays pending.

    Args:
        norms: Computes the largest norm of a row of v_h for each head; rows of P_h v_h (gated or
            not) are averages.
    """
    ctx.require(runs_known_code(module.proj, nn.Linear), "a replaced linear layer")
    shape = (*x.shape[:-1], module.num_heads * module.head_dim)
    features = ctx.chain(
        x, constant, why, lambda: ctx.arith.root_sum_of_squares(norms()), shape=shape
    )
    return ctx.fold(features, module.proj.weight, module.proj.bias, f"{ctx.path}.proj")
