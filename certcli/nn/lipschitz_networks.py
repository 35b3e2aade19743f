"""Networks that are Lipschitz by design: patches to tokens, mixed by fixed or orthogonal maps, in
stages or not; and the mean of several.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from certcli.nn.layers import (
    ChannelRoll,
    FlatHead,
    L2Pool,
    MaxMin,
    OrthogonalMixing,
    TokenMaxMin,
    TokenShift,
)
from certcli.system.errors import ArchitectureError, raise_if


class _PatchNetwork(nn.Module):
    """Patches to tokens, each with a learnt position: (b, c, h, w) -> (b, tokens, width)."""

    def __init__(self, channels: int, side: int, patch: int, width: int, classes: int) -> None:
        super().__init__()
        self.num_classes = classes
        self.tokens = (side // patch) ** 2
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(0.1 * torch.randn(self.tokens, width))

    def tokens_of(self, x: Tensor) -> Tensor:
        patches: Tensor = self.embed(x)
        return patches.flatten(2).transpose(1, 2) + self.position


class LipschitzMixer(_PatchNetwork):
    """Patches to tokens, MaxMin MLP blocks without norms or residuals, a MaxMin head over all
    tokens. No attention.

    The constant is the product of the layers' spectral norms: 1 while they are kept orthogonal
    (`finetune`'s `stiefel`). With `rolls` neighbours exchange channels before each layer of a
    block, forwards and back in turn; without, tokens meet in the head alone.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        patch: int,
        width: int,
        depth: int,
        head: Sequence[int],
        classes: int,
        rolls: bool = False,
    ) -> None:
        super().__init__(channels, side, patch, width, classes)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2 * depth))
        if not isinstance(rolls, bool):
            raise ArchitectureError(f"rolls cannot be {rolls!r}", "true or false")
        moves = [
            ChannelRoll(side // patch, width, bool(i % 2)) if rolls else nn.Identity()
            for i in range(2 * depth)
        ]
        self.rolls = nn.ModuleList(moves)
        self.act = MaxMin()
        self.head = FlatHead(self.tokens * width, head, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens_of(x)
        for roll, layer in zip(self.rolls, self.layers, strict=True):
            tokens = self.act(layer(roll(tokens)))
        return self.head(tokens)


def _token_mixing(
    kind: str, tokens: int, width: int, heads: int, block: int, across: int | None = None
) -> nn.Module:
    if kind in ("sort", "soft"):
        # at distances 1, 2, 4, ...: after log2(tokens) blocks every token has met every other
        stride = 1 << (block % max(1, tokens.bit_length() - 1))
        return TokenMaxMin(tokens, width, stride, across, soft=kind == "soft")
    if kind == "orthogonal":
        return OrthogonalMixing(tokens, width, heads)
    if kind == "none":
        return TokenShift(tokens, width)
    raise ArchitectureError(
        f"unknown token mixing '{kind}'", "one of: sort, soft, orthogonal, none"
    )


class TokenMixer(_PatchNetwork):
    """Patches to tokens, blocks of [token mixing, linear, MaxMin], the mean of all tokens, a MaxMin
    head on that mean.

    The linear layers are shared by all tokens and the head sees only their mean, so a feature that
    depends on two places at once comes through the mixing. The constant is the product of the
    spectral norms and 1/sqrt(tokens) of the mean.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        patch: int,
        width: int,
        depth: int,
        mixing: str,
        heads: int,
        head: Sequence[int],
        classes: int,
    ) -> None:
        super().__init__(channels, side, patch, width, classes)
        self.mixings = nn.ModuleList(
            _token_mixing(mixing, self.tokens, width, heads, block) for block in range(depth)
        )
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = MaxMin()
        self.head = FlatHead(width, head, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.tokens_of(x)
        for mixing, layer in zip(self.mixings, self.layers, strict=True):
            tokens = self.act(layer(mixing(tokens)))
        return self.head(tokens.mean(dim=1))


class PlaceMixer(nn.Module):
    """Patches to tokens, blocks of [a linear map for each place, hard attention], one linear layer
    over all tokens.

    A token's features meet those of others in the attention's `across` channels alone: without it
    the logits are a sum of functions of one patch each. The constant is the product over layers of
    their largest spectral norm.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        patch: int,
        width: int,
        depth: int,
        mixing: str,
        across: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.num_classes = classes
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        tokens = (side // patch) ** 2
        # orthogonal mixing of the transposed tensor: a place is a head, and its channels are what
        # it mixes
        self.maps = nn.ModuleList(OrthogonalMixing(width, tokens, tokens) for _ in range(depth))
        mixings = [_token_mixing(mixing, tokens, width, 1, block, across) for block in range(depth)]
        self.mixings = nn.ModuleList(
            m if isinstance(m, TokenMaxMin) else nn.Sequential(m, MaxMin()) for m in mixings
        )
        self.head = FlatHead(tokens * width, [], classes)

    def forward(self, x: Tensor) -> Tensor:
        channels = self.embed(x).flatten(2)
        for places, mixing in zip(self.maps, self.mixings, strict=True):
            channels = mixing(places(channels).transpose(1, 2)).transpose(1, 2)
        return self.head(channels.transpose(1, 2))


class LipschitzPyramid(nn.Module):
    """Patches to tokens; stages of [roll, linear, MaxMin], between them 2 x 2 tokens become one;
    the length of each channel over windows of tokens; a MaxMin head. No attention.

    The constant is the product of the layers' spectral norms: 1 while they are kept orthogonal
    (`finetune`'s `stiefel`).

    Args:
        widths, depths: of each stage.
        windows: of tokens along each side, over which the lengths are taken.
    """

    def __init__(
        self,
        channels: int,
        side: int,
        patch: int,
        widths: Sequence[int],
        depths: Sequence[int],
        windows: int,
        head: Sequence[int],
        classes: int,
    ) -> None:
        super().__init__()
        raise_if(
            not widths or len(widths) != len(depths),
            ArchitectureError,
            f"{len(widths)} widths and {len(depths)} depths: each stage has one of both",
        )
        self.num_classes = classes
        self.embed = nn.Conv2d(channels, widths[0], patch, stride=patch)
        self.stages = nn.ModuleList()
        side //= patch
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            before = 4 * widths[number - 1] if number else None
            if number:
                raise_if(
                    side % 2,
                    ArchitectureError,
                    f"{side} x {side} tokens do not fall into windows of 2 x 2",
                )
                side //= 2
            self.stages.append(_Stage(side, before, width, depth))
        self.pool = L2Pool(side, windows)
        self.head = FlatHead(windows * windows * widths[-1], head, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        for stage in self.stages:
            tokens = stage(tokens)
        return self.head(self.pool(tokens))


class _Stage(nn.Module):
    """[merge 2 x 2 tokens,] add a shift to each place, then [roll, linear, MaxMin] `depth` times."""

    def __init__(self, side: int, before: int | None, width: int, depth: int) -> None:
        super().__init__()
        self.side = side
        self.merge = None if before is None else nn.Linear(before, width)
        self.position = nn.Parameter(0.1 * torch.randn(side * side, width))
        self.rolls = nn.ModuleList(ChannelRoll(side, width, bool(i % 2)) for i in range(depth))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = MaxMin()

    def forward(self, x: Tensor) -> Tensor:
        if self.merge is None:
            x = x + self.position
        else:
            windows = x.unflatten(1, (self.side, 2, self.side, 2)).transpose(2, 3)
            x = self.act(self.merge(windows.flatten(3).flatten(1, 2)) + self.position)
        for roll, layer in zip(self.rolls, self.layers, strict=True):
            x = self.act(layer(roll(x)))
        return x


MOST_MEMBERS = 32


class MeanNetwork(nn.Module):
    """x -> the mean over members f and views v of f(v(x)), v the image and with `mirror` its mirror
    image: -> (b, k).

    The members' features stand side by side, and one head maps them all. A mirror image is a
    permutation of pixels: where the features have one constant, each margin's is the root mean
    square of the members' (docs/bounds.md, section 11.5).
    """

    def __init__(self, members: Sequence[nn.Module], mirror: bool) -> None:
        super().__init__()
        widths = []
        for member in members:
            head = member.head
            assert isinstance(head, FlatHead)
            widths.append(head.out.in_features)
            self.num_classes = head.out.out_features
            head.out = nn.Identity()  # type: ignore[assignment]
        self.mirror = mirror
        self.members = nn.ModuleList(members)
        self.head = nn.Linear(sum(widths) * (1 + mirror), self.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        views = [x, x.flip(3)] if self.mirror else [x]
        return self.head(
            torch.cat([member(view) for view in views for member in self.members], dim=1)
        )


def build_members(make: Callable[..., nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """Build make(**arguments), or the mean of `members`; `head_2`: the second one's `head`."""
    count = arguments.pop("members", None)
    mirror = arguments.pop("mirror", False)
    if not isinstance(mirror, bool):
        raise ArchitectureError(f"mirror cannot be {mirror!r}", "true or false")
    if count is None and not mirror:
        return make(**arguments)
    count = 1 if count is None else count
    raise_if(
        type(count) is not int or not 1 <= count <= MOST_MEMBERS,
        ArchitectureError,
        f"members cannot be {count!r}",
        f"a number from 1 to {MOST_MEMBERS}",
    )
    own_arguments = [
        {key: value for key, value in arguments.items() if key.endswith(f"_{i}")}
        for i in range(1, count + 1)
    ]
    shared = {
        key: value
        for key, value in arguments.items()
        if not any(key in part for part in own_arguments)
    }
    each = [
        shared | {key.rpartition("_")[0]: value for key, value in part.items()}
        for part in own_arguments
    ]
    return MeanNetwork([make(**part) for part in each], mirror)


def mean_tensors(members: Sequence[Mapping[str, Tensor]], mirror: bool) -> dict[str, Tensor]:
    """Return the tensors of the `MeanNetwork` of networks with these tensors."""
    mean: dict[str, Tensor] = {}
    for number, tensors in enumerate(members):
        mean |= {
            f"members.{number}.{name}": t
            for name, t in tensors.items()
            if not name.startswith("head.out.")
        }
    views = 1 + mirror
    weights = torch.cat([tensors["head.out.weight"] for tensors in members], dim=1) / (
        len(members) * views
    )
    # one by one, since an order of sums that depends on the processor would be another file there
    bias = sum((tensors["head.out.bias"] for tensors in members), torch.zeros(())) / len(members)
    return mean | {"head.weight": weights.repeat(1, views), "head.bias": bias}
