"""Networks that are Lipschitz by design: patches to tokens, mixed by fixed or orthogonal maps."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from certcli.nn.activations import MaxMin
from certcli.nn.heads import FlatHead
from certcli.nn.orthogonal_mixing import ChannelRoll, OrthogonalMixing, TokenMaxMin, TokenShift
from certcli.system.errors import ArchitectureError


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
