"""What the engine knows about one tensor of the network: how fast it moves with the pixels, and how long its rows can be."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from certcli.lipschitz.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.bound import Bound


class Lazy:
    """A scalar computed when first asked for: most row bounds are never needed."""

    def __init__(self, compute: Callable[[], Scalar]) -> None:
        self._compute = compute

    @cached_property
    def value(self) -> Scalar:
        return self._compute()


@dataclass(frozen=True)
class Affine:
    """A pending map x -> factor M diag(gain) P x + bias along one axis, not yet charged to the bound.

    Linear maps are multiplied out before their norm is taken: |W G P| <= |W| |G P|, often by a lot. `centered` is P = I -
    11^T/d, applied first; `gain` and `matrix` may be absent (identity); `factor` is a number rounded up. A matrix acts
    on the last axis; a pending map on the channel axis of images has gain and bias only. `source` names the modules that
    were folded in.
    """

    axis: int
    width: int
    centered: bool = False
    gain: Tensor | None = None
    matrix: Matrix | None = None
    bias: Matrix | None = None
    source: tuple[str, ...] = ()
    factor: float = 1.0

    def after(self, arith: Arithmetic, weight: Matrix, bias: Tensor | None, path: str) -> "Affine":
        """weight (out, width) applied to this map: the pending map of the composition."""
        offset = None if bias is None else arith.matrix(bias.reshape(-1, 1))
        if self.bias is not None:
            carried = arith.matmul(weight, self.bias)
            offset = carried if offset is None else arith.add(offset, carried)
        matrix = weight if self.matrix is None else arith.matmul(weight, self.matrix)
        return replace(self, matrix=matrix, bias=offset, source=(*self.source, path))

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


@dataclass(frozen=True)
class Value:
    """One tensor: base composed with a pending affine map.

    base: Lipschitz constant from the pixels (Frobenius norm) to the tensor before `pending`. rows: largest l2 norm of a
    row (last axis) of that tensor over the domain [0, 1]^pixels; may be inf. proof: why base holds (rigorous only).
    """

    base: Scalar
    rows: Lazy
    pending: Affine | None = None
    proof: Bound | None = None


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the pixels: a parameter, or a function of parameters."""

    tensor: Tensor


Argument = Any
"""What a rule receives: a Value, a Constant, a list or tuple of them, or a plain Python object."""
