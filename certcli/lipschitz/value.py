"""What the engine knows about one tensor of the network: how fast it moves with the pixels, and how large it can be."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from certcli.lipschitz.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.bound import Bound


class Lazy:
    """A scalar computed when first asked for: most size bounds are never needed."""

    def __init__(self, compute: Callable[[], Scalar]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> Scalar:
        return self._compute()


Thunk = Callable[[], Scalar] | None


class Size:
    """How large a tensor can be over the domain [0, 1]^pixels: each bound may be absent, and implies others.

    rows: largest l2 norm of a fibre along `axis` (negative; -1: of a row, which is a token); total: Frobenius norm;
    peak: largest absolute entry. peak <= fibre <= total, fibre <= peak sqrt(length), total <= fibre sqrt(count).
    """

    def __init__(
        self,
        arith: Arithmetic,
        shape: tuple[int, ...],
        rows: Thunk = None,
        axis: int = -1,
        total: Thunk = None,
        peak: Thunk = None,
        pixels: bool = False,
    ) -> None:
        self.pixels = pixels
        self.arith = arith
        self.shape = shape
        self.axis = axis
        self._rows = None if rows is None else Lazy(rows)
        self._total = None if total is None else Lazy(total)
        self._peak = None if peak is None else Lazy(peak)

    @property
    def value(self) -> Scalar:
        """The largest fibre along the axis the bound speaks of."""
        return self.row(self.axis)

    def row(self, axis: int) -> Scalar:
        """The largest fibre along this (negative) axis."""
        known: list[Scalar] = []
        if self._rows is not None and (axis == self.axis or not self.shape):
            known.append(self._rows.value)
            if not self.arith.rigorous:
                return known[0]
        if self._peak is not None:
            known.append(self._peak.value * self._root(self.shape[axis] if self.shape else 1))
        if self._total is not None:
            known.append(self._total.value)
        elif not known and self._rows is not None:
            known.append(self.total)
        return self._least(known)

    @cached_property
    def total(self) -> Scalar:
        known: list[Scalar] = []
        count = math.prod(self.shape)
        if self._total is not None:
            known.append(self._total.value)
        if self._rows is not None and self.shape:
            known.append(self._rows.value * self._root(count // max(1, self.shape[self.axis])))
        if self._peak is not None:
            known.append(self._peak.value * self._root(count))
        return self._least(known)

    @cached_property
    def peak(self) -> Scalar:
        return self._least([known.value for known in (self._peak, self._rows, self._total) if known is not None])

    def along(self, axis: int) -> "Size":
        """The same bounds, with the fibre bound about another axis."""
        if axis == self.axis:
            return self
        return Size(self.arith, self.shape, lambda: self.row(axis), axis, self._of(self._total), self._of(self._peak))

    def arranged(self, shape: tuple[int, ...], axis: int | None, factor: float = 1.0) -> "Size":
        """The same entries in another arrangement: fibres along `axis` are at most `factor` (exact) old fibres long.

        axis None: nothing is known about fibres. Entries may be dropped, never repeated.
        """
        rows: Thunk = None
        if axis is not None and self._rows is not None:
            known = self._rows
            rows = (lambda: known.value * self.arith.sqrt(self.arith.const(factor))) if factor != 1 else self._of(known)
        total = (lambda: self.total) if axis is None else self._of(self._total)
        return Size(self.arith, shape, rows, -1 if axis is None else axis, total, self._of(self._peak))

    def _root(self, count: int) -> Scalar:
        return self.arith.sqrt(self.arith.const(float(count)))

    def _least(self, known: list[Scalar]) -> Scalar:
        if not known:
            return self.arith.const(math.inf)
        least = known[0]
        for other in known[1:]:
            least = self.arith.minimum(least, other)
        return least

    @staticmethod
    def _of(known: Lazy | None) -> Thunk:
        return None if known is None else (lambda: known.value)


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
    in, with an error of at most `error` (Frobenius). key: identity of the parameter that `weight` is, if unchanged.
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
    entry: Size
    error: float = 0.0
    key: int | None = None
    source: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scores:
    """scale * q k^T + a constant, for q (..., n, d) and k (..., m, d): waits for its softmax.

    shifted: the constant is not 0. moving: a tensor of the scores' shape added to them that depends on the image.
    """

    query: "Value"
    key: "Value"
    scale: Scalar
    shifted: bool = False
    moving: "Value | None" = None


@dataclass(frozen=True)
class Probabilities:
    """softmax over the last axis of such scores: waits for its values."""

    scores: Scores


@dataclass(frozen=True)
class Value:
    """One tensor: base composed with a pending affine map, or with a deferred operation.

    base: Lipschitz constant from the pixels (Frobenius norm) to the tensor before `pending`. rows: how large that tensor
    can be over the domain [0, 1]^pixels. proof: why base holds (rigorous only). shape: the tensor's shape, after
    `pending`. deferred: an operation on other values that `Context.settle` still has to charge; until then base is inf,
    so that a rule which forgets to settle proves nothing.
    """

    base: Scalar
    rows: Size
    pending: Affine | None = None
    proof: Bound | None = None
    shape: tuple[int, ...] = ()
    deferred: Convolution | Scores | Probabilities | None = None
    inner: "Value | None" = None


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the pixels: a parameter, or a function of parameters."""

    tensor: Tensor


Argument = Any
"""What a rule receives: a Value, a Constant, a list or tuple of them, or a plain Python object."""
