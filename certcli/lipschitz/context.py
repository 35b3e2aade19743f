"""What a rule works with: the arithmetic, the shapes of this call, and the ways to build the next value and its proof."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from certcli.lipschitz.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.rules.table import NoRule
from certcli.lipschitz.value import Affine, Lazy, Value


@dataclass(frozen=True)
class Step:
    """One theorem applied to one module or operation: a line of the layer report."""

    path: str
    kind: str
    constant: Scalar
    law: str
    why: str
    cumulative: Scalar


class Context:
    """One call of one rule."""

    def __init__(
        self,
        arith: Arithmetic,
        path: str,
        kind: str,
        shape: Any,
        input_shapes: Sequence[Any],
        steps: list[Step],
        constants: Mapping[str, Any],
    ) -> None:
        self.arith = arith
        self.path = path
        self.kind = kind
        self.shape = shape
        self.input_shapes = input_shapes
        self.steps = steps
        self.constants = constants

    def chain(self, x: Value, constant: Scalar, why: str, rows: Callable[[], Scalar] | None = None) -> Value:
        """The value after a map with this Lipschitz constant; `x` must have nothing pending."""
        return self._record(x, constant, why, rows, self.path, self.kind)

    def _record(
        self, x: Value, constant: Scalar, why: str, rows: Callable[[], Scalar] | None, path: str, kind: str
    ) -> Value:
        if x.pending is not None:
            raise AssertionError("a rule must settle its input before charging a constant")
        base = x.base * constant
        self.steps.append(Step(path, kind, constant, "composition", why, base))
        proof = None
        if self.arith.rigorous and x.proof is not None:
            leaf = Bound(path, kind, constant, "theorem", why)
            proof = Bound(path, kind, base, "composition", "Lip(f o g) <= Lip(f) Lip(g)", (leaf, x.proof))
        return Value(base, Lazy(rows or self.unbounded), None, proof)

    def unbounded(self) -> Scalar:
        return self.arith.const(float("inf"))

    def settle(self, x: Value) -> Value:
        """Charge a pending linear map to the bound: its spectral norm, its rows from |E x + b| <= |E| |x| + |b|."""
        pending = x.pending
        if pending is None:
            return x
        effective = pending.effective(self.arith)
        path, kind = (pending.source[-1] if pending.source else self.path), "Linear"
        plain = replace(x, pending=None)
        if effective is None:
            sigma = self.arith.const(1.0)
        else:
            sigma = self.arith.sigma(effective, f"{path}:{pending.axis}")
        bias = pending.bias

        def rows() -> Scalar:
            if pending.axis != -1:
                return self.unbounded()
            longest = sigma * x.rows.value
            return longest if bias is None else longest + self.arith.length(bias)

        if effective is None:
            return replace(plain, rows=Lazy(rows))
        folded = f", with {', '.join(pending.source[:-1])} folded in" if len(pending.source) > 1 else ""
        return self._record(plain, sigma, f"spectral norm of the matrix{folded}", rows, path, kind)

    def fold(self, x: Value, weight: Tensor | Matrix, bias: Tensor | None) -> Affine:
        """The pending map of a linear layer on the last axis, after whatever is pending there already."""
        matrix = weight if isinstance(weight, Matrix) else self.arith.matrix(weight)
        pending = x.pending or Affine(axis=-1, width=matrix.shape[1])
        return pending.after(self.arith, matrix, bias, self.path)

    def on_last_axis(self, x: Value) -> Value:
        """`x` with nothing pending on any axis but the last."""
        return x if x.pending is None or x.pending.axis == -1 else self.settle(x)

    def require(self, condition: bool, reason: str) -> None:
        """NoRule unless the option that the theorem assumes holds."""
        if not condition:
            raise NoRule(reason)

    def constant_tensor(self, argument: Any) -> Tensor:
        """The tensor behind an argument that does not depend on the pixels; NoRule when it does."""
        from certcli.lipschitz.value import Constant

        if isinstance(argument, Constant):
            return argument.tensor
        if isinstance(argument, Tensor):
            return argument
        raise NoRule("an operand that should be constant depends on the image")
