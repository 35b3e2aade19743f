"""Penalties on what makes networks hard to prove.

*Maximum singular value penalisation*: large query, key and value maps of attention cost.

*Enclosure penalty*, which makes ordinary attention provable: what an enclosure of the network
loses, it loses by this. A local certificate (`certify --method local`) carries the linear part of
every tensor exactly. It loses where the network is not linear, in proportion to squares of alpha,
the row norms of the Jacobian A of a tensor with respect to the pixels (docs/local.md, sections 1.1
and 3 to 7). The penalty is, summed over places and averaged over images and entries,

    LayerNorm   |A_y|_F^2 / |y|^2    the centred token y may move, relative to its length (where a
                                     floor is above it, to the floor)
    softmax     alpha^2 of the scores less their mean over the keys
    activation  alpha^2 of the inputs of GELU and its kind

One random direction e an image estimates it: |A_i|_2^2 = n E (A_i . e)^2 for e uniform on the
sphere of R^n, and A e = (z(x + h e) - z(x)) / h. It is no bound and proves nothing.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from torch import Generator, Tensor, nn

from certcli.lipschitz.numerics.trainable import estimated_block_norms
from certcli.models.pixels import PixelModel
from certcli.nn.blocks import FloorNorm, Spread, spread_of
from certcli.system.errors import ArchitectureError, raise_if

KINDS = ("q", "k", "v")


@dataclass(frozen=True)
class AttentionMap:
    """The map of one kind within a weight (or its transpose): its rows, split into heads."""

    weight: Tensor
    kind: str
    place: int
    kinds: int
    heads: int
    transposed: bool = False

    def blocks(self) -> Tensor:
        """Return the heads' matrices: (heads, rows, columns)."""
        weight = self.weight.T if self.transposed else self.weight
        return weight.chunk(self.kinds)[self.place].unflatten(0, (self.heads, -1))


class SpectralPenalty:
    """sum over layers and heads of l_q sigma(W_q)^2 + l_k sigma(W_k)^2 + l_v sigma(W_v)^2 -> (),
    with gradient.

    Norms are estimated by power iteration, one step a call from the vectors of the call before, all
    matrices of one shape at once. In a tied L2 attention W_q is the query map, and the rows of
    `proj` are the value map; it has no key map.
    Source: Hu et al. 2024 (SpecFormer), equations 11 to 13.

    Args:
        weights: (l_q, l_k, l_v).

    Attributes:
        vectors: singular vectors that the next call starts from.

    Raises:
        ArchitectureError: the network has no attention.
    """

    def __init__(self, net: nn.Module, weights: tuple[float, float, float]) -> None:
        self.strengths = dict(zip(KINDS, weights, strict=True))
        self.vectors: dict[str, Tensor] = {}
        maps = list(attention_maps(net))
        raise_if(
            not maps,
            ArchitectureError,
            "there is no attention whose query, key and value maps could be penalised",
            "drop --msvp",
        )
        self._alike: dict[tuple[int, ...], list[AttentionMap]] = {}
        for each in maps:
            if self.strengths[each.kind] > 0:
                with torch.no_grad():
                    shape = tuple(each.blocks().shape[1:])
                self._alike.setdefault(shape, []).append(each)

    def __call__(self) -> Tensor:
        """Return the penalty, in float32 also under autocast."""
        total = torch.zeros(())
        for (rows, columns), members in self._alike.items():
            device = members[0].weight.device
            with torch.autocast(device.type, enabled=False):
                blocks = torch.cat([each.blocks() for each in members])
                norms = estimated_block_norms(blocks, self.vectors, f"{rows}x{columns}")
                factors = [self.strengths[each.kind] for each in members for _ in range(each.heads)]
                squares = torch.tensor(factors, device=device) * norms.square()
                total = total.to(device) + squares.sum()
        return total


LAYOUTS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"qkv": KINDS},
    {"qk": ("q", "k"), "v": ("v",)},
    {"q": ("q",), "k": ("k",), "v": ("v",)},
    {"query": ("q",), "key": ("k",), "value": ("v",)},
    {"query": ("q",), "value": ("v",)},
    {"query": ("q",)},
)
"""Layers of an attention and the maps in each: timm's, ConViT's, ours. The first that is there counts."""


def attention_maps(net: nn.Module) -> Iterator[AttentionMap]:
    """Yield all attentions' maps."""
    for module in net.modules():
        heads = getattr(module, "num_heads", None)
        layers = {
            name: each for name, each in module.named_children() if isinstance(each, nn.Linear)
        }
        layout = next((each for each in LAYOUTS if each.keys() <= layers.keys()), None)
        if layout is None or not isinstance(heads, int):
            continue
        out = layers.get("proj")
        for name, kinds in layout.items():
            rows = layers[name].out_features
            # queries, keys and values of one width, where they are one layer
            alike = name != "qkv" or out is None or 3 * out.in_features == rows
            if alike and rows % (len(kinds) * heads) == 0:
                for place, kind in enumerate(kinds):
                    yield AttentionMap(layers[name].weight, kind, place, len(kinds), heads)
        if "query" in layout and "value" not in layout and out is not None:
            yield AttentionMap(out.weight, "v", 0, 1, heads, transposed=True)


NO_SPREAD = Spread(0.0)
PLACES = ("norm", "softmax", "activation")
STEP = 0.02
"""h, in pixel units: an eighth of the least radius at which the recipes certify."""
RAMP = 0.5
"""Share of the training in which the weight rises to its value."""
_LENGTH = 1e-6
"""Least squared length of a token: a constant token has none."""
CURVED = (nn.GELU, nn.SiLU, nn.Mish, nn.ReLU, nn.Tanh, nn.Sigmoid)


@dataclass(frozen=True)
class NonlinearInput:
    """The input of one nonlinear place for both halves of a batch: (2 b, ..., d).

    Attributes:
        spread: what a norm divides by.
    """

    place: str
    values: Tensor
    spread: Spread


class EnclosurePenalty:
    """sum over places of weight * mean alpha^2 -> (), with gradient.

    Args:
        weights: of the places, in the order of `PLACES`.

    Raises:
        ArchitectureError: the network has no such place.
    """

    def __init__(self, model: PixelModel, weights: tuple[float, float, float]) -> None:
        self.model = model
        self.weights = dict(zip(PLACES, weights, strict=True))
        raise_if(
            not list(_nonlinear_places(model)),
            ArchitectureError,
            "there is no LayerNorm, softmax or activation whose curvature could be penalised",
            "drop --enclosure-penalty",
        )

    def directions(self, images: Tensor, generator: Generator) -> Tensor:
        """Draw one direction of length 1 for each image: (b, c, h, w)."""
        noise = torch.randn(images.shape, generator=generator).to(images)
        return noise / noise.flatten(1).norm(dim=1).view(-1, 1, 1, 1)

    def __call__(self, images: Tensor, directions: Tensor) -> Tensor:
        """Return the penalty, in eval mode: dropout would draw another network for each half."""
        was_training = self.model.training
        self.model.eval()
        with _recorded(self.model) as readings:
            self.model(torch.cat([images, images + STEP * directions]))
        self.model.train(was_training)
        pixels = images[0].numel()
        total = torch.zeros((), device=images.device)
        for reading in readings:
            total = total + self.weights[reading.place] * _squared_slopes(reading, pixels).mean()
        return total


def _squared_slopes(reading: NonlinearInput, pixels: int) -> Tensor:
    """Return n (A e)^2 of each entry; of a norm's input relative to the token's length."""
    values = reading.values
    if reading.place != "activation":
        values = values - values.mean(-1, keepdim=True)
    before, after = values.chunk(2)
    squares = (after - before).square() * (pixels / STEP**2)
    if reading.place != "norm":
        return squares
    width = before.shape[-1]
    length = before.square().sum(-1) + reading.spread.eps * width
    return squares.sum(-1) / (length.clamp_min(reading.spread.min_variance * width) + _LENGTH)


def _nonlinear_places(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, FloorNorm)):
            yield "norm", module
        elif isinstance(module, CURVED):
            yield "activation", module
        elif isinstance(module, (Attention, WindowAttention)):
            yield "softmax", module


@contextmanager
def _recorded(model: nn.Module) -> Iterator[list[NonlinearInput]]:
    """Record the input of every nonlinear place of the forward passes inside the block."""
    readings: list[NonlinearInput] = []
    with ExitStack() as hooks:
        for place, module in _nonlinear_places(model):
            if place == "softmax":
                reader = partial(_read_scores, readings, module)
                hooks.enter_context(module.qkv.register_forward_hook(reader))
            else:
                note = partial(_read_input, readings, place)
                hooks.enter_context(module.register_forward_pre_hook(note))
        yield readings


def _read_input(readings: list[NonlinearInput], place: str, module: Any, arguments: Any) -> None:
    spread = spread_of(module) if place == "norm" else NO_SPREAD
    readings.append(NonlinearInput(place, arguments[0], spread))


def _read_scores(
    readings: list[NonlinearInput], attention: Any, _qkv: Any, _arguments: Any, output: Tensor
) -> None:
    """Read what softmax is taken of from the output of timm's `qkv`: (b, n, 3 d) -> (b, h, n,
    n)."""
    batch, tokens, width = output.shape
    heads = attention.num_heads
    split = output.view(batch, tokens, 3, heads, width // (3 * heads))
    query, key, _ = split.permute(2, 0, 3, 1, 4)
    if isinstance(attention, Attention):
        query = attention.q_norm(query)
        key = attention.k_norm(key)
    scores = attention.scale * query @ key.transpose(-1, -2)
    readings.append(NonlinearInput("softmax", scores, NO_SPREAD))
