"""What the engine knows about one tensor of the network, and the operations that wait to be charged with their neighbours."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.lipschitz.bound import Bound
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.size import Size


@dataclass(frozen=True)
class Affine:
    """A pending map x -> factor M diag(gain) P x + bias along one axis, not yet charged to the bound.

    Linear maps are multiplied out before their norm is taken: |W G P| <= |W| |G P|, often by a lot. `centered` is P = I -
    11^T/d, applied first; `gain` and `matrix` may be absent (identity); `factor` is a number rounded up. `axis` (negative)
    is where the features live now. `source` names the modules that were folded in.

    index: the features may be spread over several axes (heads): then entry p of the tensor is feature index[p] of its
    token, `index` having the tensor's rank and size 1 on every axis that holds tokens; `axis` is then 0.
    result: how large the tensor after this map is, where more is known than its norm times the input's size.
    """

    axis: int
    width: int
    centered: bool = False
    gain: Tensor | None = None
    matrix: Matrix | None = None
    bias: Matrix | None = None
    source: tuple[str, ...] = ()
    factor: float = 1.0
    index: Tensor | None = None
    result: Size | None = None

    def after(self, arith: Arithmetic, weight: Matrix, bias: Tensor | None, path: str) -> "Affine":
        """weight (out, width) applied to this map: the pending map of the composition."""
        offset = None if bias is None else arith.matrix(bias.reshape(-1, 1))
        if self.bias is not None:
            carried = arith.matmul(weight, self.bias)
            offset = carried if offset is None else arith.add(offset, carried)
        matrix = weight if self.matrix is None else arith.matmul(weight, self.matrix)
        return replace(self, matrix=matrix, bias=offset, source=(*self.source, path), result=None)

    def effective(self, arith: Arithmetic) -> Matrix | None:
        """M diag(gain) P as one matrix, or None for the identity."""
        matrix = self.matrix
        if matrix is None:
            if self.gain is None and self.factor == 1.0:
                return None  # the identity, or P, whose norm is 1
            ones = torch.ones(self.width, dtype=torch.float64)
            matrix = arith.matrix(torch.diag(ones if self.gain is None else self.gain))
        elif self.gain is not None:
            matrix = arith.scale_columns(matrix, self.gain)
        if self.centered:
            matrix = arith.center_columns(matrix)
        return matrix if self.factor == 1.0 else arith.scale(matrix, self.factor)

    @property
    def features(self) -> int:
        """How many features a token has after this map."""
        if self.index is not None:
            return self.index.numel()
        return self.width if self.matrix is None else self.matrix.shape[0]

    def picked(self, features: Tensor) -> "Affine":
        """The map to these features only, on the last axis."""
        assert self.matrix is not None
        matrix = Matrix(self.matrix.tensor[features], self.matrix.error)
        bias = None if self.bias is None else Matrix(self.bias.tensor[features], self.bias.error)
        return replace(self, matrix=matrix, bias=bias, axis=-1, index=None, result=None)


@dataclass(frozen=True)
class Convolution:
    """A convolution not yet charged: what follows on its channels (a batch norm, a scale) is multiplied in first.

    plain: the weight as it is applied to the tensor before it, of size `entry`; `weight` has the maps before it folded
    in, with an error of at most `error` (Frobenius), and acts on `input`, in which nothing waits. key: identity of the
    parameter that `weight` is, if unchanged.
    """

    weight: Tensor
    bias: Tensor | None
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    path: str
    kind: str
    plain: Tensor
    input: "Value"
    entry: Size
    error: float = 0.0
    key: int | None = None
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scores:
    """scale * q k^T + a constant, for q (..., n, d) and k (..., m, d): waits for its softmax.

    shifted: the constant is not 0. moving: a tensor of the scores' shape added to them that depends on the image.
    replaced: finite constants stand in fixed places, where scores were.
    """

    query: "Value"
    key: "Value"
    scale: Scalar
    shifted: bool = False
    moving: "Value | None" = None
    replaced: bool = False


@dataclass(frozen=True)
class Probabilities:
    """softmax over the last axis of such scores: waits for its values."""

    scores: Scores


Waiting = Affine | Convolution | Scores | Probabilities
"""What a value may hold back: charged together with what follows, or by the rule registered with `rules.settles`."""


@dataclass(frozen=True)
class Value:
    """One tensor: how fast it moves with the pixels, how large it can be, and what was not yet charged to that.

    waiting: an operation that comes last and is not charged yet. With a pending map (Affine) `base` is the Lipschitz
    constant from the pixels (Frobenius norm) to the tensor before it, and `size` says how large that tensor can be over
    the domain [0, 1]^pixels. With any other, base is inf, so that a rule which forgets to settle proves nothing. With None
    both speak of the tensor itself. proof: why base holds (rigorous only). shape: the tensor's, after what waits.
    """

    base: Scalar
    size: Size
    waiting: Waiting | None = None
    proof: Bound | None = None
    shape: tuple[int, ...] = ()

    @property
    def pending(self) -> Affine | None:
        """The affine map that waits, if that is what waits."""
        return self.waiting if isinstance(self.waiting, Affine) else None
