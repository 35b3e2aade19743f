"""Networks that are a chain of linear layers and activations, read from the trace.

Certificates (`certify.chains`) and losses (`finetune.losses.bounds`) follow a neighbourhood from
layer to layer of such a chain, the first with proven norms, the second with trainable ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.engine.replay import replayed
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import of_margins
from certcli.engine.tracer import Untraceable
from certcli.engine.walk import Call, Domain, walk
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Scalar
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.models.pixels import PixelNormalize
from certcli.nn.layers import ClippedReLU, MaxMin
from certcli.system.errors import NoBoundError, raise_if

Run = Callable[[Tensor, Tensor], Tensor]
rules = RuleTable("sequential")


@dataclass(frozen=True)
class LinearLayer:
    """x -> W x + bias on batches: a linear layer, a convolution, or the pixel normalisation, which
    divides by its weight.

    Attributes:
        path: The module's name.
        run: (x, weight) -> W x, for any weight of the same form.
        terms: Length of the longest inner product.
        matrix: Whether the module is an nn.Linear, on (b, n).
        geometry: A convolution's, else None.
    """

    path: str
    module: nn.Module
    run: Run
    terms: int
    matrix: bool = False
    geometry: Geometry | None = None

    @property
    def weight(self) -> Tensor:
        return self.module.std if isinstance(self.module, PixelNormalize) else self.module.weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """Return the bias in a shape that broadcasts to the result."""
        if isinstance(self.module, PixelNormalize):
            return -self.module.mean / self.module.std
        bias: Tensor | None = self.module.bias  # type: ignore[assignment]
        return bias if bias is None or self.matrix else bias.view(-1, 1, 1)

    def norm(self, arithmetic: Arithmetic) -> Scalar:
        """Return |W|_2, proven or with a gradient."""
        if self.geometry is not None:
            return arithmetic.convolution(self.weight, 0.0, self.geometry, self.path)
        if self.matrix:
            return arithmetic.sigma(arithmetic.matrix(self.weight), self.path)
        return arithmetic.const(1.0) / arithmetic.absolute(self.weight.abs().min())


@dataclass(frozen=True)
class Activation:
    """A monotone map of slope <= 1, by entry and in l2.

    Attributes:
        pairs: It joins the last axis' halves.
        low, high: Below and above, it is constant in an entry; None: nowhere.
    """

    apply: Callable[[Tensor], Tensor]
    pairs: bool = False
    low: float | None = None
    high: float | Tensor | None = None

    def joined(self, x: Tensor) -> Tensor:
        """Return the larger one of the entries that are joined, at both places."""
        if not self.pairs:
            return x
        first, second = x.chunk(2, dim=-1)
        larger = torch.maximum(first, second)
        return torch.cat([larger, larger], dim=-1)


@dataclass(frozen=True)
class Flatten:
    """(b, c, h, w) -> (b, c h w)."""


Layer = LinearLayer | Activation | Flatten
Chain = tuple[Layer, ...]


@rules.module(nn.Identity, nn.Dropout)
def identity_layer(call: Call, module: nn.Module, x: Chain) -> Chain:
    return x


@rules.module(PixelNormalize)
def pixels_layer(call: Call, module: PixelNormalize, x: Chain) -> Chain:
    """(x - mean) / std with the weight std: every entry is one rounded quotient."""
    return (*x, LinearLayer(call.path, module, lambda t, weight: t / weight, 2))


@rules.module(nn.Linear)
def linear_layer(call: Call, module: nn.Linear, x: Chain) -> Chain:
    raise_if(
        len(call.shape) != 2, NoRule, "a linear layer on something other than one vector an image"
    )
    return (*x, LinearLayer(call.path, module, F.linear, module.in_features, matrix=True))


@rules.module(
    nn.Conv2d,
    when=lambda module: module.padding_mode == "zeros" and not isinstance(module.padding, str),
)
def convolution_layer(call: Call, module: nn.Conv2d, x: Chain) -> Chain:
    size = call.node.args[0].meta["shape"]  # type: ignore[union-attr]
    raise_if(len(size) != 4, NoRule, "a convolution of something other than (b, c, h, w)")
    options: Any = module.stride, module.padding, module.dilation, module.groups
    padding = tuple((int(p), int(p)) for p in module.padding)
    geometry = Geometry(module.stride, padding, module.dilation, module.groups, tuple(size[2:]))
    terms = module.weight[0].numel()
    return (
        *x,
        LinearLayer(
            call.path, module, lambda t, w: F.conv2d(t, w, None, *options), terms, geometry=geometry
        ),
    )


@rules.module(nn.ReLU)
@rules.function(torch.relu, F.relu)
def relu_layer(call: Call, *arguments: Any, inplace: bool = False) -> Chain:
    return (*_chain(arguments), Activation(torch.relu, low=0.0))


@rules.module(nn.ReLU6, nn.Hardtanh, when=lambda module: module.min_val < module.max_val)
def clipped_layer(call: Call, module: nn.Hardtanh, x: Chain) -> Chain:
    low, high = float(module.min_val), float(module.max_val)
    return (*x, Activation(lambda t: t.clamp(low, high), low=low, high=high))


@rules.module(ClippedReLU)
def clipped_relu_layer(call: Call, module: ClippedReLU, x: Chain) -> Chain:
    return (*x, Activation(module.forward, low=0.0, high=module.threshold))


@rules.module(MaxMin)
def maxmin_layer(call: Call, module: MaxMin, x: Chain) -> Chain:
    return (*x, Activation(module.forward, pairs=True))


@rules.module(nn.Flatten, when=lambda module: module.start_dim == 1 and module.end_dim == -1)
@rules.method("flatten")
@rules.function(torch.flatten)
def flatten_layer(call: Call, *arguments: Any, start_dim: int = 0, end_dim: int = -1) -> Chain:
    if isinstance(arguments[0], nn.Module):
        return (*_chain(arguments), Flatten())
    value, *rest = arguments
    raise_if(
        [*rest, start_dim][0] != 1 or end_dim != -1 or len(rest) > 1,
        NoRule,
        "a flattening of something other than an image's entries",
    )
    return (*_chain((value,)), Flatten())


def _chain(arguments: tuple[Any, ...]) -> Chain:
    """Return the chain before a call from its arguments, of which a module's rule gets the module
    first.

    A constant in its place cannot be unpacked: the walk refuses a rule that fails.
    """
    value: Chain = arguments[1] if isinstance(arguments[0], nn.Module) else arguments[0]
    return value


class _ChainDomain(Domain):
    """The layers from the image to each tensor; no rule takes two tensors."""

    rules = rules

    def image(self, shape: tuple[int, ...]) -> Chain:
        return ()

    def context(self, call: Call) -> Call:
        return call

    def shape(self, value: Any) -> None:
        return None  # a list of steps: they are run beside the network


def read_chain(model: nn.Module, size: tuple[int, int, int]) -> tuple[Chain, LinearLayer]:
    """Read a network on images (c, h, w) as a chain, checked against the network itself.

    Returns:
        The layers before the last one, and the last one, an nn.Linear.

    Raises:
        NoBoundError: The network is no chain; names what differs.
    """
    try:
        with replayed(model, size, rules) as traced:
            layers: Chain = walk(of_margins(traced), _ChainDomain())
    except (NoRule, Untraceable) as reason:
        hint = "chains of Conv2d, Linear, ReLU and MaxMin are; others: certify --method local, finetune --loss margin"
        raise NoBoundError(f"the network is no chain: {reason}", hint) from reason
    last = layers[-1] if layers else None
    if not isinstance(last, LinearLayer) or not last.matrix:
        raise NoBoundError("the network does not end in a linear layer", "--method lipschitz")
    before: Layer | None = None
    for layer in layers:
        if isinstance(layer, Activation) and not isinstance(before, LinearLayer):
            raise NoBoundError(
                "the network has an activation without a linear layer before it",
                "--method lipschitz",
            )
        before = before if isinstance(layer, Flatten) else layer
    return layers[:-1], last
