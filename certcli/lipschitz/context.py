"""What a rule works with: the arithmetic, the shapes of this call, and the ways to build the next value and its proof."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from certcli.lipschitz.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.convolution_estimate import Geometry
from certcli.lipschitz.rules.table import NoRule
from certcli.lipschitz.spectral import up
from certcli.lipschitz.value import Affine, Constant, Convolution, Lazy, Size, Thunk, Value


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
        dtype: Any = None,
        memo: dict[int, tuple[Value, Value]] | None = None,
    ) -> None:
        self.dtype = dtype
        self.memo = {} if memo is None else memo
        self.arith = arith
        self.path = path
        self.kind = kind
        self.shape = shape
        self.input_shapes = input_shapes
        self.steps = steps
        self.constants = constants

    def at(self, shape: tuple[int, ...]) -> "Context":
        """The same call, for an intermediate result of another shape."""
        return Context(
            self.arith,
            self.path,
            self.kind,
            shape,
            self.input_shapes,
            self.steps,
            self.constants,
            self.dtype,
            self.memo,
        )

    def chain(
        self,
        x: Value,
        constant: Scalar,
        why: str,
        rows: Thunk = None,
        *,
        axis: int = -1,
        total: Thunk = None,
        peak: Thunk = None,
        shape: tuple[int, ...] | None = None,
    ) -> Value:
        """The value after a map with this Lipschitz constant; `x` must have nothing pending.

        rows, total, peak: what is known about the result's fibres along `axis`, its norm and its entries.
        """
        shape = self.shape if shape is None else shape
        return self._record(x, constant, why, Size(self.arith, shape, rows, axis, total, peak), self.path, self.kind)

    def _record(self, x: Value, constant: Scalar, why: str, rows: Size, path: str, kind: str) -> Value:
        if x.pending is not None or x.deferred is not None:
            raise AssertionError("a rule must settle its input before charging a constant")
        base = x.base * constant
        self.steps.append(Step(path, kind, constant, "composition", why, base))
        proof = None
        if self.arith.rigorous and x.proof is not None:
            leaf = Bound(path, kind, constant, "theorem", why)
            proof = Bound(path, kind, base, "composition", "Lip(f o g) <= Lip(f) Lip(g)", (leaf, x.proof))
        return Value(base, rows, None, proof, rows.shape)

    def combine(self, parts: Sequence[tuple[Value, Scalar]], why: str, rows: Size) -> Value:
        """The value of a map with Lipschitz constant c_i in its i-th argument x_i, all settled: base sum_i c_i base_i."""
        merged: list[tuple[Value, Scalar]] = []
        for value, constant in parts:
            if value.pending is not None or value.deferred is not None:
                raise AssertionError("a rule must settle its inputs before charging a constant")
            same = next((i for i, (other, _) in enumerate(merged) if other.base is value.base), None)
            if same is None:
                merged.append((value, constant))
            else:
                merged[same] = (merged[same][0], merged[same][1] + constant)
        charged = [self._record(value, constant, why, rows, self.path, self.kind) for value, constant in merged]
        if len(charged) == 1:
            return charged[0]
        base = self.arith.total([value.base for value in charged])
        proof = None
        if self.arith.rigorous:
            proofs = tuple(value.proof for value in charged if value.proof is not None)
            proof = Bound(self.path, self.kind, base, "sum", "the differential is a sum over the arguments", proofs)
        return Value(base, rows, None, proof, rows.shape)

    def unbounded(self) -> Scalar:
        return self.arith.const(float("inf"))

    def settle(self, x: Value) -> Value:
        """Charge what is pending or deferred to the bound: afterwards `base` speaks of the tensor itself."""
        if x.pending is None and x.deferred is None:
            return x
        if id(x) not in self.memo:  # a tensor that is used twice (a residual) is charged once
            self.memo[id(x)] = (x, self._settle(x))
        return self.memo[id(x)][1]

    def _settle(self, x: Value) -> Value:
        if isinstance(x.deferred, Convolution):
            return self._settle_convolution(x, x.deferred)
        if x.deferred is not None:
            from certcli.lipschitz.rules.products import settle_attention

            return settle_attention(self, x)
        assert x.pending is not None
        return self._settle_affine(x, x.pending)

    def _settle_affine(self, x: Value, pending: Affine) -> Value:
        """Its spectral norm; its fibres from |E x + b| <= |E| |x| + |b|."""
        simple = pending.matrix is None and pending.factor == 1.0 and (not pending.centered or pending.width > 1024)
        effective = None if simple else pending.effective(self.arith)
        path, kind = (pending.source[-1] if pending.source else self.path), "Linear"
        plain = replace(x, pending=None)
        bias = pending.bias
        if effective is None:  # |diag(g) P| <= max |g|, exact without P; beyond 1024 features not worth a spectral norm
            sigma = self.arith.const(1.0) if pending.gain is None else self.largest_entry(pending.gain)
        elif pending.index is None:
            sigma = self.arith.sigma(effective, f"{path}:{pending.axis}")
        else:
            chosen = pending.index.flatten()
            whole = chosen.numel() == effective.shape[0]
            effective = effective if whole else Matrix(effective.tensor[chosen], effective.error)
            bias = bias if bias is None or whole else Matrix(bias.tensor[chosen], bias.error)
            sigma = self.arith.sigma(effective, f"{path}:{pending.axis}:{int(chosen[0])}:{chosen.numel()}")
        size = self._affine_size(x, pending, lambda: sigma, bias)
        if effective is None:
            if pending.gain is None:
                return replace(plain, rows=size)
            return self._record(plain, sigma, "largest |gain|", size, path, kind)
        folded = f", with {', '.join(pending.source[:-1])} folded in" if len(pending.source) > 1 else ""
        return self._record(plain, sigma, f"spectral norm of the matrix{folded}", size, path, kind)

    def size_after(self, x: Value) -> Size:
        """The size of a tensor with a gain pending: |diag(g) P v + b| <= max |g| |v| + |b|."""
        pending = x.pending
        if pending is None or pending.matrix is not None:
            raise AssertionError("only for a pending gain")
        gain = self.arith.const(1.0) if pending.gain is None else self.largest_entry(pending.gain)
        return self._affine_size(x, pending, lambda: gain, pending.bias)

    def _affine_size(self, x: Value, pending: Affine, sigma: Callable[[], Scalar], bias: Matrix | None) -> Size:
        known = pending.result
        if known is not None and math.prod(known.shape) == math.prod(x.shape):
            return known.arranged(x.shape, known.axis if known.shape == x.shape else None)
        tokens = math.prod(x.shape) // max(1, pending.features)
        # size bounds live as long as the proof is built: they must not hold on to matrices
        arith, old = self.arith, x.rows

        def rows() -> Scalar:
            longest = sigma() * old.value
            return longest if bias is None else longest + arith.length(bias)

        def total() -> Scalar:
            largest = sigma() * old.total
            if bias is None:
                return largest
            return largest + arith.length(bias) * arith.sqrt(arith.const(float(tokens)))

        axis = pending.axis
        if pending.index is not None:
            # a fibre along one of the axes that hold features is a part of the token's feature vector
            places = [a for a in range(-len(x.shape), 0) if pending.index.shape[a] > 1]
            if not places:  # a single feature: the bound is one on entries
                return Size(self.arith, x.shape, total=total, peak=rows)
            axis = places[-1]
        return Size(self.arith, x.shape, rows, axis, total)

    def _settle_convolution(self, x: Value, conv: Convolution) -> Value:
        """Norm of the zero-padded convolution; an output fibre is W times a window plus the bias."""
        inner = x.inner
        if inner is None:
            raise AssertionError("a deferred convolution has an input")
        arith, weight = self.arith, conv.weight
        spatial = len(conv.stride)
        kernel = tuple(weight.shape[2:])
        patches = kernel == conv.stride and not any(map(any, conv.padding)) and set(conv.dilation) == {1}
        # the operator is a sum over taps, each off by at most the weight's error
        perturbation = up(conv.error * math.prod(kernel)) if conv.error else 0.0
        if patches and conv.groups == 1:
            matrix = arith.matrix(weight.reshape(weight.shape[0], -1))
            sigma = arith.sigma(Matrix(matrix.tensor, perturbation, conv.key), conv.path)
            why = "patches are disjoint: spectral norm of the reshaped kernel"
        else:
            geometry = Geometry(conv.stride, conv.padding, conv.dilation, conv.groups, tuple(inner.shape[-spatial:]))
            sigma = arith.convolution(weight, perturbation, geometry, conv.path)
            why = "zero-padded convolution"
        axis = -spatial - 1
        bias = None if conv.bias is None else arith.length(arith.matrix(conv.bias.reshape(-1, 1)))
        taps = math.prod(kernel)

        unchanged, entry = conv.plain is weight, conv.entry
        positions = float(math.prod(x.shape) // x.shape[axis])

        def flat_norm() -> Scalar:
            """The norm of the kernel as a matrix, as it acts on a window of the tensor before."""
            if patches and unchanged:
                return sigma
            if patches and conv.groups == 1:
                return arith.sigma(arith.matrix(conv.plain.reshape(len(conv.plain), -1)), f"{conv.path}:plain")
            return arith.length(arith.matrix(conv.plain.reshape(-1, 1)))

        # in training it is rarely asked for; a proof must not hold on to weights in float64
        known = flat_norm() if arith.rigorous else None
        flat = Lazy(flat_norm if known is None else lambda: known)

        def rows() -> Scalar:
            window = entry.row(axis) * arith.sqrt(arith.const(float(taps)))
            longest = flat.value * arith.minimum(window, entry.total)
            return longest if bias is None else longest + bias

        def total() -> Scalar:
            # a pixel lies in at most as many windows as the kernel has taps
            repeats = arith.const(1.0 if patches else float(taps))
            whole = sigma if unchanged else flat.value * arith.sqrt(repeats)
            largest = whole * entry.total
            return largest if bias is None else largest + bias * arith.sqrt(arith.const(positions))

        folded = f"; with {', '.join(conv.source)} folded in" if conv.source else ""
        return self._record(inner, sigma, why + folded, Size(arith, x.shape, rows, axis, total), conv.path, conv.kind)

    def fold(self, x: Value, weight: Tensor | Matrix, bias: Tensor | None) -> Value:
        """A linear layer on the last axis, pending after whatever is pending there already."""
        return self.fold_at(x, weight, bias, self.path)

    def fold_at(self, x: Value, weight: Tensor | Matrix, bias: Tensor | None, path: str) -> Value:
        """`fold` for a layer that is a part of the module at hand."""
        x = self.on_last_axis(x)
        matrix = weight if isinstance(weight, Matrix) else self.arith.matrix(weight)
        pending = x.pending
        if pending is None:
            x = replace(x, rows=x.rows.along(-1))
            pending = Affine(axis=-1, width=matrix.shape[1])
        shape = (*x.shape[:-1], matrix.shape[0])
        return replace(x, pending=pending.after(self.arith, matrix, bias, path), shape=shape)

    def on_last_axis(self, x: Value) -> Value:
        """`x` with nothing pending or deferred but a map on the last axis."""
        if x.deferred is None and (x.pending is None or x.pending.axis == -1):
            return x
        return self.settle(x)

    def spread(self, x: Value, shape: tuple[int, ...]) -> Value:
        """A settled `x` repeated (broadcast) to this shape: sqrt(repetitions)."""
        if tuple(x.shape) == tuple(shape):
            return x
        old_shape = (1,) * (len(shape) - len(x.shape)) + tuple(x.shape)
        if len(old_shape) > len(shape) or any(o not in (1, n) for o, n in zip(old_shape, shape, strict=True)):
            raise NoRule(f"a tensor of shape {tuple(x.shape)} repeated to {tuple(shape)}")
        times = math.prod(shape) // max(1, math.prod(x.shape))
        factor = self.arith.const(up(math.sqrt(times), 1))
        old = x.rows
        axis = old.axis if len(x.shape) >= -old.axis and x.shape[old.axis] == shape[old.axis] else None
        size = Size(
            self.arith,
            shape,
            None if axis is None else (lambda: old.value),
            axis or -1,
            lambda: old.total * factor,
            lambda: old.peak,
        )
        if times == 1:
            return replace(x, shape=shape, rows=size)
        return self._record(x, factor, f"repeated {times} times: sqrt({times})", size, self.path, self.kind)

    def box(self, x: Value) -> bool:
        """Whether `x` is the image itself, every entry of which lies in [0, 1]."""
        return x.pending is None and x.deferred is None and x.rows.pixels

    def require(self, condition: bool, reason: str) -> None:
        """NoRule unless the option that the theorem assumes holds."""
        if not condition:
            raise NoRule(reason)

    def constant_tensor(self, argument: Any) -> Tensor:
        """The tensor behind an argument that does not depend on the pixels; NoRule when it does."""
        if isinstance(argument, Constant):
            return argument.tensor
        if isinstance(argument, Tensor):
            return argument
        raise NoRule("an operand that should be constant depends on the image")

    def largest_entry(self, tensor: Tensor) -> Scalar:
        """max |entry| of a constant."""
        if not self.arith.rigorous:
            return tensor.abs().max().double()
        if not torch.isfinite(tensor).all():
            raise NoRule("a constant with infinite or NaN entries")
        return self.arith.const(float(tensor.detach().double().abs().max()))
