"""Certified training for `certify --method local`: the margins that an enclosure of each image's
neighbourhood leaves, with gradients.

A batch of forms (`forms.py`) goes through a plain vision transformer as docs/local.md has it, with
a few random directions in place of the pixels: row norms of A and Gram matrices survive them
(Johnson and Lindenstrauss). The margins are an estimate, and prove nothing.
"""

import math
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.models.vision_transformer import LayerScale
from torch import Generator, Tensor, nn
from torch.nn import functional

from certcli.finetune.losses.forms import (
    Form,
    Symbols,
    averages_of,
    dense_form,
    layer_norm_form,
    scores_of,
    softmax_form,
    variance_form,
)
from certcli.finetune.penalties import CURVED
from certcli.models.pixels import PixelModel
from certcli.nn.blocks import FloorNorm, spread_of
from certcli.system.errors import ArchitectureError

DIRECTIONS = 32
"""Random directions in place of the pixels, in training."""
JUDGES = 64
"""The same where an epoch is judged."""
AT_ONCE = 16
"""Images that are enclosed together where an epoch is judged: some 100 MB at 5 tokens."""
SAME_MARGINS = 1e-2
"""Relative distance at which margins count as the network's own. What `forms.NARROW` and `forms.TINY`
add to the small margins of a fresh network was at most 5e-4."""
_NARROW = 1e-6


def local(
    logits: Tensor,
    labels: Tensor,
    margins: Tensor,
    epsilon: float,
    worst_weight: float = 0.4,
) -> Tensor:
    """Return (1 - w) CE(logits) + w mean log(1 + CE(worst logits)): (b, k), (b,), (e, k) -> ().

    The logarithm leaves a gradient of use where an enclosure has exploded.

    Args:
        margins: lower bounds of z_y - z_j over the neighbourhoods of the first e images; 0 at y.
        epsilon: their radius, which the margins know.
        worst_weight: w; with a half, attention had less left to do on digits.
    """
    plain = functional.cross_entropy(logits, labels)
    worst = (-margins).logsumexp(1).log1p().mean()
    return (1 - worst_weight) * plain + worst_weight * worst.to(plain)


class LocalEnclosure:
    """Lower bounds, by estimate, of the margins near images.

    Raises:
        ArchitectureError: the network is no plain vision transformer.
    """

    def __init__(self, model: PixelModel) -> None:
        self.model = model
        self.net: Any = model.net
        self.pixels = math.prod(model.input_size)
        self._require_same()

    @torch.no_grad()
    def _require_same(self) -> None:
        """Raise ArchitectureError where the margins of the forms are not the network's own."""
        image = torch.rand(1, *self.model.input_size, generator=torch.Generator().manual_seed(0))
        image = image.to(next(self.net.parameters()))
        was_training = self.model.training
        self.model.eval()
        try:
            logits = self.model(image)
            label = logits.argmax(1)
            exact = logits.gather(1, label[:, None]) - logits
            margins = self.margins(image, label, 0.0, torch.zeros_like(image))
            if not (margins - exact).norm() <= SAME_MARGINS * exact.norm():
                raise ValueError("the margins differ")
        except (AttributeError, TypeError, ValueError, RuntimeError) as failure:
            raise ArchitectureError(
                f"no enclosure for training: this {type(self.net).__name__} is no vision "
                "transformer of LayerNorm and softmax attention as timm builds it",
                "--loss local takes timm's VisionTransformer (LayerNorm, softmax attention); "
                "--enclosure-penalty takes more",
            ) from failure
        finally:
            self.model.train(was_training)

    @property
    def entries(self) -> int:
        """Return how many numbers all tokens of an image hold."""
        net = self.net
        return int((net.patch_embed.num_patches + net.num_prefix_tokens) * net.embed_dim)

    def directions(self, generator: Generator, count: int = DIRECTIONS) -> Tensor:
        """Draw directions of the pixels, all of them where they are few: (m, c, h, w)."""
        if self.pixels <= count:
            return torch.eye(self.pixels).view(self.pixels, *self.model.input_size)
        return torch.randn(count, *self.model.input_size, generator=generator) / count**0.5

    def margins(self, images: Tensor, labels: Tensor, epsilon: float, directions: Tensor) -> Tensor:
        """Return bounds <= z_y - z_j within `epsilon`, 0 at j = y: (b, c, h, w), (b,) -> (b, k)."""
        net = self.net
        by_token = net.global_pool == "token"
        form = self._tokens(images, epsilon, directions)
        for number, block in enumerate(net.blocks, start=1):
            alone = by_token and number == len(net.blocks)
            form = _form_behind_block(form, block, only_first=alone)
        prefix = net.num_prefix_tokens

        def pooled(t: Tensor) -> Tensor:
            return t[..., 0, :] if by_token else t[..., prefix:, :].mean(-2)

        norm = net.norm if by_token else net.fc_norm
        return _margins_of_head(form.mapped(pooled), norm, net.head, labels)

    def gains(self, images: Tensor, labels: Tensor, epsilon: float, directions: Tensor) -> Tensor:
        """Return the largest growth of each z_j - z_y within `epsilon`: (b, k)."""
        logits = self.model(images)
        leads = logits.gather(1, labels[:, None]) - logits
        return leads - self.margins(images, labels, epsilon, directions)

    def _tokens(self, images: Tensor, epsilon: float, directions: Tensor) -> Form:
        """Return the form of the tokens before the first block."""
        net = self.net
        projection = net.patch_embed.proj
        pixels = self.model.normalize(images).to(projection.weight.dtype)
        centre = net._pos_embed(net.patch_embed(pixels))
        std = self.model.normalize.std.to(projection.weight)
        resize = self.model.resize
        resized = directions if resize is None else resize(directions)
        steps = epsilon * resized.to(projection.weight) / std
        moves = functional.conv2d(steps, projection.weight, None, projection.stride)
        ball = functional.pad(moves.flatten(2).mT, (0, 0, net.num_prefix_tokens, 0))
        ball = ball.expand(len(centre), *ball.shape)
        box = centre.new_zeros(len(centre), 0, *centre.shape[1:])
        return Form(centre, ball, box, None, Symbols())


def _form_behind_block(form: Form, block: Any, only_first: bool) -> Form:
    """Return the form behind a block; `only_first`: of the first token."""
    branch = _attended_form(_normed_form(form, block.norm1), block.attn, only_first)
    if only_first:
        form = form.rearranged(lambda t: t[..., :1, :])
    form = form.plus(branch.scaled(_layer_scale_of(block.ls1))).solid()
    mlp = block.mlp
    if not isinstance(mlp.act, CURVED):
        raise TypeError("no function of one entry")
    hidden = dense_form(_normed_form(form, block.norm2), mlp.fc1.weight, mlp.fc1.bias).applied(
        mlp.act
    )
    return form.plus(
        dense_form(hidden, mlp.fc2.weight, mlp.fc2.bias).scaled(_layer_scale_of(block.ls2))
    )


def _layer_scale_of(scale: nn.Module) -> Tensor | float:
    return scale.gamma if isinstance(scale, LayerScale) else 1.0


def _normed_form(form: Form, norm: nn.LayerNorm | FloorNorm) -> Form:
    return layer_norm_form(form, norm.weight, norm.bias, spread_of(norm))


def _attended_form(form: Form, attention: Any, only_first: bool) -> Form:
    """Return the form behind an attention; the keys' mean goes, which scores do not see."""
    heads = attention.num_heads
    qkv = dense_form(form, attention.qkv.weight, attention.qkv.bias)
    width = qkv.centre.shape[-1] // 3

    def part(number: int) -> Form:
        return qkv.rearranged(
            lambda t: (
                t[..., number * width : (number + 1) * width]
                .unflatten(-1, (heads, width // heads))
                .transpose(-2, -3)
            )
        )

    query = part(0).scaled(float(attention.scale))
    if only_first:
        query = query.rearranged(lambda t: t[..., :1, :])
    key = part(1).mapped(lambda t: t - t.mean(-2, keepdim=True))
    mixed = averages_of(softmax_form(scores_of(query, key)), part(2))
    joined = mixed.rearranged(lambda t: t.transpose(-2, -3).flatten(-2))
    return dense_form(joined, attention.proj.weight, attention.proj.bias)


def _margins_of_head(
    token: Form, norm: nn.LayerNorm | FloorNorm, head: nn.Linear, labels: Tensor
) -> Tensor:
    """Return lower bounds of the margins of head(norm(token)), by docs/local.md, section 6: (w . y
    + b s) / (s at the image), s the spread: sqrt(v), or a floor."""
    rows = head.weight[labels][:, None] - head.weight
    offsets = torch.zeros_like(rows[..., 0])
    if head.bias is not None:
        offsets = head.bias[labels][:, None] - head.bias
    offsets = offsets + rows @ norm.bias
    rows = rows * norm.weight
    spread = spread_of(norm)
    centred, length, floor = variance_form(token, spread.eps)
    root = length.applied(
        lambda v: v.clamp_min(spread.min_variance).sqrt(), low=_NARROW, floor=floor
    ).solid()
    # the columns are one axis of a matrix here: (b, m, d) @ (b, d, k)
    centre = (centred.centre[:, None] @ rows.mT)[:, 0] + root.centre * offsets
    ball = centred.ball @ rows.mT + root.ball * offsets[:, None]
    count = root.box.shape[1]
    box = centred.padded_box(count) @ rows.mT + root.padded_box(count) * offsets[:, None]
    margin = Form(centre, ball, box, None, token.symbols)
    lower = (margin.centre - margin.alpha - margin.rho) / length.centre.clamp_min(
        spread.min_variance
    ).sqrt().detach()
    return lower.scatter(1, labels[:, None], 0.0)
