"""The table of the global domain's theorems, and the first argument of every rule: arithmetic,
shapes of the call, and ways to build a value.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from certcli.engine.table import NoRule, Rule, RuleTable
from certcli.engine.walk import Call, Constant
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.value import Affine, Size, Thunk, Value

rules = RuleTable("lipschitz")


def resized(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    """Return the shape with another length along one axis."""
    changed = list(shape)
    changed[axis] = length
    return tuple(changed)


@dataclass(frozen=True)
class Charge:
    """One theorem applied to one module or operation: a line of the layer report."""

    path: str
    kind: str
    constant: Scalar
    law: str
    why: str
    cumulative: Scalar


@dataclass(frozen=True)
class Walk:
    """The state that all calls of one walk share.

    Attributes:
        settled: id(value) -> (the value, kept so that no other gets its id; the value after
            settling).
    """

    arith: Arithmetic
    charges: list[Charge] = field(default_factory=list)
    settled: dict[int, tuple[Value, Value]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Context(Call):
    """One call of one rule."""

    walk: Walk

    @property
    def arith(self) -> Arithmetic:
        return self.walk.arith

    def at(self, shape: tuple[int, ...]) -> "Context":
        """Return the same call, for an intermediate result of another shape."""
        return replace(self, shape=shape)

    def chain(
        self,
        x: Value,
        constant: Scalar,
        why: str,
        fibre: Thunk = None,
        *,
        axis: int = -1,
        total: Thunk = None,
        peak: Thunk = None,
        shape: tuple[int, ...] | None = None,
    ) -> Value:
        """Return the value after a map with this Lipschitz constant.

        Args:
            x: A settled value.
            why: The theorem in words, for the report.
            fibre, total, peak: Bounds on the result's fibres along `axis`, on its norm, on its
                entries (see `Size`).
            shape: The result's shape; by default the call's.
        """
        shape = self.shape if shape is None else shape
        return self.charge(x, constant, why, Size(self.arith, shape, fibre, axis, total, peak))

    def charge(
        self,
        x: Value,
        constant: Scalar,
        why: str,
        size: Size,
        path: str | None = None,
        kind: str | None = None,
    ) -> Value:
        """Return the value of this size after a map with this constant, reported by name."""
        if x.waiting is not None:
            raise AssertionError("a rule must settle its input before charging a constant")
        path = self.path if path is None else path
        kind = self.kind if kind is None else kind
        base = x.base * constant
        self.walk.charges.append(Charge(path, kind, constant, "composition", why, base))
        proof = None
        if self.arith.rigorous and x.proof is not None:
            leaf = Bound(path, kind, constant, "theorem", why)
            proof = Bound(
                path, kind, base, "composition", "Lip(f o g) <= Lip(f) Lip(g)", (leaf, x.proof)
            )
        return Value(base, size, None, proof, size.shape)

    def combine(self, parts: Sequence[tuple[Value, Scalar]], why: str, size: Size) -> Value:
        """Return the value of a map with constant c_i in settled x_i: base sum_i c_i base_i."""
        merged: list[tuple[Value, Scalar]] = []
        for value, constant in parts:
            if value.waiting is not None:
                raise AssertionError("a rule must settle its inputs before charging a constant")
            same = next(
                (i for i, (other, _) in enumerate(merged) if other.base is value.base), None
            )
            if same is None:
                merged.append((value, constant))
            else:
                merged[same] = (merged[same][0], merged[same][1] + constant)
        charged = [self.charge(value, constant, why, size) for value, constant in merged]
        if len(charged) == 1:
            return charged[0]
        return self.join("sum", charged, "the differential is a sum over the arguments", size)

    def join(
        self, law: Literal["sum", "concatenation"], values: Sequence[Value], why: str, size: Size
    ) -> Value:
        """Return the proven sum of settled values, or the tensor with them side by side."""
        bases = [value.base for value in values]
        base = self.arith.total(bases) if law == "sum" else self.arith.root_sum_of_squares(bases)
        proofs = tuple(value.proof for value in values if value.proof is not None)
        complete = self.arith.rigorous and len(proofs) == len(values)
        proof = Bound(self.path, self.kind, base, law, why, proofs) if complete else None
        return Value(base, size, None, proof, size.shape)

    def settle(self, x: Value, keep: type | tuple[type, ...] = ()) -> Value:
        """Charge the waiting operation unless its type is in `keep`: `base` is the tensor's."""
        if x.waiting is None or isinstance(x.waiting, keep):
            return x
        settled = self.walk.settled
        if id(x) not in settled:  # a tensor that is used twice (a residual) is charged once
            settled[id(x)] = (x, rules.settlers[type(x.waiting)](self, x, x.waiting))
        return settled[id(x)][1]

    def fold(
        self,
        x: Value,
        weight: Tensor | Matrix,
        bias: Tensor | None,
        path: str | None = None,
        axis: int = -1,
    ) -> Value:
        """Return `x` after a linear layer on an axis, composed with the map that is pending there.

        Args:
            weight: (out, features).
            path: The layer's name, where it is a part of the call's module.
        """
        x = self.on_axis(x, axis)
        matrix = weight if isinstance(weight, Matrix) else self.arith.matrix(weight)
        pending = x.pending
        if pending is None:
            x = replace(x, size=x.size.along(axis))
            pending = Affine(axis=axis, width=matrix.shape[1])
        after = pending.after(self.arith, matrix, bias, self.path if path is None else path)
        return replace(x, waiting=after, shape=resized(x.shape, axis, matrix.shape[0]))

    def on_axis(self, x: Value, axis: int = -1) -> Value:
        """Return `x` with nothing waiting, or only a map on this axis."""
        return x if x.pending is not None and x.pending.axis == axis else self.settle(x)

    def spread(self, x: Value, shape: tuple[int, ...]) -> Value:
        """Return a settled `x` repeated (broadcast) to this shape: constant sqrt(repetitions)."""
        if tuple(x.shape) == tuple(shape):
            return x
        old_shape = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
        if len(old_shape) > len(shape) or any(
            o not in (1, n) for o, n in zip(old_shape, shape, strict=True)
        ):
            raise NoRule(f"a tensor of shape {tuple(x.shape)} repeated to {tuple(shape)}")
        times = math.prod(shape) // max(1, math.prod(x.shape))
        factor = self.arith.const(up(math.sqrt(times), 1))
        old = x.size
        axis = (
            old.axis if len(x.shape) >= -old.axis and x.shape[old.axis] == shape[old.axis] else None
        )
        size = Size(
            self.arith,
            shape,
            None if axis is None else (lambda: old.fibre),
            axis or -1,
            lambda: old.total * factor,
            lambda: old.peak,
        )
        if times == 1:
            return replace(x, shape=shape, size=size)
        return self.charge(x, factor, f"repeated {times} times: sqrt({times})", size)

    def require(self, condition: bool, reason: str) -> None:
        """Raise NoRule unless the theorem's assumption holds."""
        if not condition:
            raise NoRule(reason)

    def finite(self, scalar: Scalar, what: str) -> Scalar:
        """Return the bound on the size of one factor of a product; NoRule where it is infinite."""
        if self.arith.rigorous and not scalar.finite:
            raise NoRule(f"a product of tensors of which one has no bound on its size ({what})")
        return scalar

    def constant_tensor(self, argument: Any) -> Tensor:
        """Return the tensor of an argument that does not depend on the pixels; NoRule if it
        does."""
        if isinstance(argument, Constant):
            return argument.tensor
        if isinstance(argument, Tensor):
            return argument
        raise NoRule("an operand that should be constant depends on the image")

    def optional_tensor(self, argument: Any) -> Tensor | None:
        """Return `constant_tensor` of a weight or bias that may be absent."""
        return None if argument is None else self.constant_tensor(argument)

    def column(self, vector: Tensor | None) -> Matrix | None:
        """Return a vector (n,), such as a bias, as a matrix (n, 1); None where it is absent."""
        return None if vector is None else self.arith.matrix(vector.reshape(-1, 1))

    def largest_entry(self, tensor: Tensor) -> Scalar:
        """Return max |entry| of a constant."""
        if not self.arith.rigorous:
            return tensor.abs().max().double()
        if not torch.isfinite(tensor).all():
            raise NoRule("a constant with infinite or NaN entries")
        return self.arith.const(float(tensor.detach().double().abs().max()))


def of_settled(rule: Rule) -> Rule:
    """Return a rule for values of which nothing waits."""

    @functools.wraps(rule)
    def apply(ctx: Context, *args: Any, **kwargs: Any) -> Any:
        return rule(ctx, *(ctx.settle(x) if isinstance(x, Value) else x for x in args), **kwargs)

    return apply
