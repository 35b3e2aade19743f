"""A tensor's value: its constant and size for all images, and the operation that waits to be
charged.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch
from torch import Tensor

from certcli.lipschitz.bound import Bound
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix, Scalar

Thunk = Callable[[], Scalar] | None
"""A scalar that is computed on first use: most size bounds are never needed."""


class Size:
    """Bounds on a tensor over [0, 1]^pixels; each may be absent, and follows from others then.

    peak <= fibre <= total, fibre <= peak sqrt(length), total <= fibre sqrt(count).

    Attributes:
        fibre: Largest l2 norm of the entries along one `axis` (negative). Along -1 a fibre is a
            row: a token.
        total: Frobenius norm.
        peak: Largest absolute entry.
        pixels: Whether the tensor is the image itself.
    """

    def __init__(
        self,
        arith: Arithmetic,
        shape: tuple[int, ...],
        fibre: Thunk = None,
        axis: int = -1,
        total: Thunk = None,
        peak: Thunk = None,
        pixels: bool = False,
    ) -> None:
        self.pixels = pixels
        self.arith = arith
        self.shape = shape
        self.axis = axis
        self._fibre = None if fibre is None else cache(fibre)
        self._total = None if total is None else cache(total)
        self._peak = None if peak is None else cache(peak)

    @property
    def fibre(self) -> Scalar:
        return self.fibre_along(self.axis)

    def fibre_along(self, axis: int) -> Scalar:
        """Return the largest fibre along this (negative) axis."""
        along = self._fibre if axis == self.axis or not self.shape else None
        if along is not None and not self.arith.rigorous:
            return along()
        total: Thunk = self._total
        if total is along is self._peak is None and self._fibre is not None:
            total = lambda: self.total  # noqa: E731
        length = self.shape[axis] if self.shape else 1
        return self._least((along, None), (self._peak, length), (total, None))

    @cached_property
    def total(self) -> Scalar:
        count = math.prod(self.shape)
        fibres = count // max(1, self.shape[self.axis]) if self.shape else 0
        fibre = self._fibre if self.shape else None
        return self._least((self._total, None), (fibre, fibres), (self._peak, count))

    @cached_property
    def peak(self) -> Scalar:
        return self._least((self._peak, None), (self._fibre, None), (self._total, None))

    def along(self, axis: int) -> "Size":
        """Return the same bounds, fibres along another axis."""
        if axis == self.axis:
            return self
        return Size(
            self.arith, self.shape, lambda: self.fibre_along(axis), axis, self._total, self._peak
        )

    def arranged(self, shape: tuple[int, ...], axis: int | None, factor: float = 1.0) -> "Size":
        """Return the bounds of the same entries in another arrangement; entries may be dropped,
        never repeated.

        Args:
            axis: Where fibres lie that consist of at most `factor` old fibres, or None where
                nothing is known of fibres.
        """
        if axis is None:
            return Size(self.arith, shape, total=lambda: self.total, peak=self._peak)
        fibre: Thunk = self._fibre
        if fibre is not None and factor != 1:
            longest = fibre
            fibre = lambda: longest() * self.arith.sqrt(self.arith.const(factor))  # noqa: E731
        return Size(self.arith, shape, fibre, axis, self._total, self._peak)

    def _least(self, *bounds: tuple[Thunk, int | None]) -> Scalar:
        """Return the least of these that are known, each times the root of its count."""
        least = self.arith.const(math.inf)
        for fact, count in bounds:
            if fact is not None:
                size = fact() if count is None else fact() * self.arith.root(count)
                least = self.arith.minimum(least, size)
        return least


@dataclass(frozen=True)
class Affine:
    """A pending map x -> factor M diag(gain) P x + bias along one axis, not yet charged to the
    bound.

    Linear maps are multiplied out before their norm is taken: |W G P| <= |W| |G P|, often by a lot.

    Attributes:
        axis: Where the features are (negative); 0 where `index` says it.
        width: Number of features before the map.
        centered: Whether P = I - 11^T/d is applied first, else P = I.
        gain, matrix: None for the identity.
        source: Names of the modules that were folded in.
        factor: A number, rounded up.
        index: For features on several axes (heads): entry p of the tensor is feature index[p] of
            its token. `index` has the tensor's rank, and size 1 on every axis that holds tokens.
        result: The size of the tensor after the map, where more is known than its norm times the
            input's size.
        kind: The type of module that is charged.
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
    kind: str = "Linear"

    def after(self, arith: Arithmetic, weight: Matrix, bias: Tensor | None, path: str) -> "Affine":
        """Return this map followed by weight (out, features) and bias."""
        offset = None if bias is None else arith.matrix(bias.reshape(-1, 1))
        if self.bias is not None:
            carried = arith.matmul(weight, self.bias)
            offset = carried if offset is None else arith.add(offset, carried)
        matrix = weight if self.matrix is None else arith.matmul(weight, self.matrix)
        return replace(
            self,
            matrix=matrix,
            bias=offset,
            source=(*self.source, path),
            result=None,
            kind="Linear",
        )

    def scaled(self, arith: Arithmetic, gain: Tensor, path: str) -> "Affine":
        """Return this map followed by a gain for each of its features."""
        bias = None if self.bias is None else arith.scale_rows(self.bias, gain)
        after = replace(self, bias=bias, source=(*self.source, path), result=None)
        if self.matrix is None and self.gain is None:
            return replace(after, gain=gain)
        return replace(after, matrix=arith.scale_rows(self.rows(arith), gain))

    def shifted(self, arith: Arithmetic, shift: Matrix) -> "Affine":
        """Return this map plus a constant vector."""
        return replace(
            self, bias=shift if self.bias is None else arith.add(self.bias, shift), result=None
        )

    def rows(self, arith: Arithmetic) -> Matrix:
        """Return `matrix`, the identity where it is None: a second gain is not multiplied into the
        first, whose rounding away from zero allows for one."""
        if self.matrix is not None:
            return self.matrix
        place = None if self.gain is None else self.gain.device
        return arith.matrix(torch.eye(self.width, dtype=torch.float64, device=place))

    def effective(self, arith: Arithmetic) -> Matrix | None:
        """Return factor M diag(gain) P as one matrix, or None for the identity (and for P
        alone)."""
        matrix = self.matrix
        if matrix is None:
            if self.gain is None and self.factor == 1.0:
                return None  # the identity, or P, whose norm is 1
            ones = torch.ones(self.width, dtype=torch.float64)
            matrix = arith.matrix(torch.diag(ones if self.gain is None else self.gain))
        elif self.gain is not None:
            matrix = arith.scale_columns(matrix, self.gain)
        if self.centered:
            matrix = arith.centred(matrix, 1)
        return matrix if self.factor == 1.0 else arith.scale(matrix, self.factor)

    @property
    def features(self) -> int:
        """Return the number of features of a token after this map."""
        if self.index is not None:
            return self.index.numel()
        return self.width if self.matrix is None else self.matrix.shape[0]

    def picked(self, features: Tensor) -> "Affine":
        """Return the map to these features only, on the last axis."""
        assert self.matrix is not None
        matrix = Matrix(self.matrix.tensor[features], self.matrix.error)
        bias = None if self.bias is None else Matrix(self.bias.tensor[features], self.bias.error)
        return replace(self, matrix=matrix, bias=bias, axis=-1, index=None, result=None)


@dataclass(frozen=True)
class Windows:
    """One way to bound a fibre of a convolution's result: kernel times a window, plus bias.

    Attributes:
        kernel: As in `Convolution`, within `error` (Frobenius).
        bias: (out, 1), or None.
        entry: Size of the tensor that the windows are cut from.
    """

    kernel: Tensor
    error: float
    bias: Matrix | None
    entry: Size


_LARGEST_KERNEL = 2**20
"""Entries of a kernel that is written out without groups, so that the map after it can be
multiplied in."""


@dataclass(frozen=True)
class Convolution:
    """A pending convolution: maps of its output channels that follow are multiplied in first.

    Attributes:
        weight: The kernel with the neighbouring maps folded in, within `error` (Frobenius); it acts
            on `input`.
        input: The settled value before the maps that are folded in.
        windows: What bounds the size of the result; the smallest bound counts.
        axis: Where the output channels are (negative).
        key: id() of the parameter that `weight` is, None if it was computed.
        source: Names of the modules that were folded in.
    """

    weight: Tensor
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    path: str
    kind: str
    input: "Value"
    windows: tuple[Windows, ...]
    axis: int
    error: float = 0.0
    key: int | None = None
    source: tuple[str, ...] = ()

    def scaled(self, arith: Arithmetic, gain: Tensor, path: str) -> "Convolution":
        """Return this convolution followed by a gain for each of its output channels."""
        return self._followed(arith, lambda rows: arith.scale_rows(rows, gain), path)

    def shifted(self, arith: Arithmetic, shift: Matrix) -> "Convolution":
        """Return this convolution plus a constant for each of its output channels."""
        sums = [
            shift if part.bias is None else arith.add(part.bias, shift) for part in self.windows
        ]
        shifted = tuple(
            replace(part, bias=bias) for part, bias in zip(self.windows, sums, strict=True)
        )
        return replace(self, windows=shifted)

    def after(
        self, arith: Arithmetic, weight: Matrix, bias: Tensor | None, path: str
    ) -> "Convolution | None":
        """Return it followed by weight (new out, out) and bias; None: kernel too large."""
        whole = self
        if self.groups > 1:
            if self.weight.numel() * self.groups > _LARGEST_KERNEL:
                return None
            spread = tuple(
                replace(part, kernel=_ungrouped(part.kernel, self.groups)) for part in self.windows
            )
            whole = replace(
                self, weight=_ungrouped(self.weight, self.groups), windows=spread, groups=1
            )
        followed = whole._followed(arith, lambda rows: arith.matmul(weight, rows), path)
        return (
            followed if bias is None else followed.shifted(arith, arith.matrix(bias.reshape(-1, 1)))
        )

    def _followed(
        self, arith: Arithmetic, change: Callable[[Matrix], Matrix], path: str
    ) -> "Convolution":
        """Return it followed by a linear map, given as a change of matrices of channel rows."""

        def kernel(old: Tensor, error: float) -> tuple[Tensor, float]:
            new = change(replace(arith.matrix(old.flatten(1)), error=error, key=None))
            return new.tensor.view(-1, *old.shape[1:]), new.error

        weight, error = kernel(self.weight, self.error)
        windows = []
        for part in self.windows:
            kernel_and_error = (
                (weight, error) if part.kernel is self.weight else kernel(part.kernel, part.error)
            )
            windows.append(
                Windows(
                    *kernel_and_error, None if part.bias is None else change(part.bias), part.entry
                )
            )
        source = (*self.source, path)
        return replace(
            self, weight=weight, error=error, windows=tuple(windows), key=None, source=source
        )


def _ungrouped(kernel: Tensor, groups: int) -> Tensor:
    """Return a kernel (out, in, ...) of one group equal to this, (out, in / groups, ...)."""
    out, width, *taps = kernel.shape
    blocks = kernel.reshape(groups, out // groups, 1, width, math.prod(taps))
    identity = torch.eye(groups, dtype=kernel.dtype, device=kernel.device).view(
        groups, 1, groups, 1, 1
    )
    return (identity * blocks).reshape(out, groups * width, *taps)


@dataclass(frozen=True)
class Scores:
    """scale * q k^T + a constant, for q (..., n, d) and k (..., m, d): waits for its softmax.

    Attributes:
        shifted: Whether the constant may differ from 0.
        moving: A tensor of the scores' shape that is added to them and depends on the image.
        replaced: Whether finite constants replace scores in fixed places.
        hidden: Whether -inf does.
    """

    query: "Value"
    key: "Value"
    scale: Scalar
    shifted: bool = False
    moving: "Value | None" = None
    replaced: bool = False
    hidden: bool = False


@dataclass(frozen=True)
class Probabilities:
    """softmax over the last axis of such scores: waits for its values."""

    scores: Scores


@dataclass(frozen=True)
class LogProbabilities:
    """log_softmax along an axis of a tensor: differences along it are those of the tensor."""

    of: "Value"
    axis: int


Waiting = Affine | Convolution | Scores | Probabilities | LogProbabilities
"""A pending operation: charged together with the next one, or by the rule registered with
`rules.settles`."""


@dataclass(frozen=True)
class Value:
    """The bounds of one tensor.

    With nothing waiting, `base` and `size` are those of the tensor itself. With a pending map
    (Affine) they are those of the tensor before it. With any other operation waiting `base` is inf,
    so that a rule which forgets to settle proves nothing.

    Attributes:
        base: Lipschitz constant from the pixels (Frobenius norm).
        size: Bounds on the size over [0, 1]^pixels.
        waiting: The last operation, if it is not charged yet.
        proof: The proof of `base` (rigorous arithmetic only).
        shape: The tensor's shape, after the waiting operation.
    """

    base: Scalar
    size: Size
    waiting: Waiting | None = None
    proof: Bound | None = None
    shape: tuple[int, ...] = ()

    @property
    def pending(self) -> Affine | None:
        """Return the waiting operation if it is an affine map, else None."""
        return self.waiting if isinstance(self.waiting, Affine) else None
