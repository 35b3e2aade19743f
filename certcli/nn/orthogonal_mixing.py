"""Token mixing that loses no gradient norm: attention's limits with a Lipschitz constant of 1.

Softmax attention averages tokens, which shrinks their differences, so it cannot be orthogonal. Two
of its limits are: fixed weights, with which a head multiplies its tokens by an orthogonal matrix
(no longer a function of the image), and weights of 0 or 1, with which every channel of a token
attends to exactly one token (still a function of the image). Proofs: docs/bounds.md, section 11.
"""

import torch
from torch import Tensor, nn

from certcli.nn.activations import MaxMin, SoftMaxMin
from certcli.system.errors import ArchitectureError


class OrthogonalMixing(nn.Module):
    """x -> [M_h x_h]_h + p, x_h the h-th group of channels, M_h (n, n), p (n, d): (b, n, d) -> (b,
    n, d).

    Attention with weights that do not depend on the image. Its Lipschitz constant is max_h |M_h|: 1
    while the matrices are orthogonal, as they are at the start and stay under the optimiser
    `stiefel`. p tells places apart for the activation that follows.
    """

    def __init__(self, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise ArchitectureError(f"{heads} heads do not divide a width of {width}")
        self.heads = heads
        self.maps = nn.ModuleList(nn.Linear(tokens, tokens, bias=False) for _ in range(heads))
        for matrix in self.maps:
            nn.init.orthogonal_(matrix.weight)  # type: ignore[arg-type]
        self.shift = nn.Parameter(torch.zeros(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        matrices = torch.stack([matrix.weight for matrix in self.maps])  # type: ignore[misc]
        grouped = (
            x.reshape(b, n, self.heads, d // self.heads)
            .permute(2, 1, 0, 3)
            .reshape(self.heads, n, -1)
        )
        mixed = torch.bmm(matrices, grouped).reshape(self.heads, n, b, -1).permute(2, 1, 0, 3)
        return mixed.reshape(b, n, d) + self.shift

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class TokenMaxMin(nn.Module):
    """Tokens i and i + stride, shifted by p, meet in their first `across` channels; the others meet
    in MaxMin within a token.

    Hard attention: a pair becomes its maximum and minimum, channel by channel. y_ic = sum_j
    P^c_ij(x) (x + p)_jc, where P^c(x) is the permutation of tokens that sorts the pair in channel
    c, so that each output entry attends to exactly one token, and which one depends on the image. A
    permutation of entries at every point, continuous where two are equal: Lipschitz constant 1. The
    learned p (n, d) sets the offset at which a pair swaps: far from 0 it makes a fixed routing.
    With `soft` the pair becomes `SoftMaxMin`'s softmax averages. (b, n, d) -> (b, n, d).
    """

    def __init__(
        self, tokens: int, width: int, stride: int, across: int | None = None, soft: bool = False
    ) -> None:
        super().__init__()
        if stride < 1 or tokens % (2 * stride):
            raise ArchitectureError(
                f"{tokens} tokens do not fall into pairs at a distance of {stride}"
            )
        self.across = width if across is None else across
        if not 0 < self.across <= width or (width - self.across) % 2:
            raise ArchitectureError(
                f"{self.across} of {width} channels cannot meet across tokens: an even rest is needed"
            )
        self.stride = stride
        self.shift = nn.Parameter(0.1 * torch.randn(tokens, width))
        self.pair: nn.Module = SoftMaxMin() if soft else MaxMin()
        self.within = MaxMin()

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        shifted = x + self.shift
        groups = (b, n // (2 * self.stride), -1)
        # the two halves of a group are its tokens at a distance of `stride`
        if self.across == d:
            return self.pair(shifted.reshape(groups)).reshape(b, n, d)
        across, within = shifted.split([self.across, d - self.across], dim=-1)
        met = self.pair(across.reshape(groups)).reshape(b, n, self.across)
        return torch.cat([met, self.within(within)], dim=-1)

    def extra_repr(self) -> str:
        return f"stride={self.stride}, across={self.across}"


class ChannelRoll(nn.Module):
    """Move three quarters of the channels by one token: down, right, and both, around the edges:
    (b, side^2, d) -> the same.

    A permutation of entries: Lipschitz constant 1. A linear layer behind it maps each token's own
    first quarter, and the other quarters of three neighbours: a window of 2 x 2 tokens. Source:
    LipNeXt (Hu et al. 2026); here both axes. With `back` the channels move up and left.
    """

    def __init__(self, side: int, width: int, back: bool = False) -> None:
        super().__init__()
        if width % 4:
            raise ArchitectureError(
                f"a width of {width} does not fall into quarters", "a multiple of 4"
            )
        self.side = side
        self.step = -1 if back else 1

    def forward(self, x: Tensor) -> Tensor:
        still, down, right, both = x.unflatten(1, (self.side, self.side)).chunk(4, dim=-1)
        step = self.step
        rolled = [still, down.roll(step, 1), right.roll(step, 2), both.roll((step, step), (1, 2))]
        return torch.cat(rolled, dim=-1).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"side={self.side}, step={self.step}"


class TokenShift(nn.Module):
    """x -> x + p: (b, n, d) -> (b, n, d). A token mixing without the mixing, for comparisons."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(0.1 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift
