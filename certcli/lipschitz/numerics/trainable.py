"""The trainable arithmetic of the rules: tensors with gradients, for losses, never shown; and
estimates of what `convolution.conv_norm` proves, from below, warm-started between steps. Never
a bound.

The estimate follows the bound that counts for the geometry, so that training sees the number that
is proven at the end: windows that are disjoint: the reshaped kernel; a small operator: itself, by
convolutions with the real padding; else the torus, where V(nu) = sum_q V_q exp(i nu q) is small and
all frequencies iterate at once: the largest is found whatever singular values lie close together,
and a new one takes over as soon as it is the largest.

Power iteration has a memory: singular vectors are stored between calls, so that one iteration a
step is enough. For losses, penalties and projections.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix
from certcli.lipschitz.numerics.convolution import (
    Geometry,
    _Axis,
    _dense_operator,
    _frequency_chunks,
    _is_small,
    _polyphase,
    _waves,
    geometry_axes,
    grouped_kernels,
)

COLD = 30
"""Iterations of a start from random vectors."""
_EXACT_WORK = 2**31  # of the eigenproblems of a cold start, (number) x (side)^3: about two seconds
_LEAST = 1e-30


def estimated_block_norms(
    blocks: Tensor, vectors: dict[str, Tensor], name: str, iterations: int = 1
) -> Tensor:
    """sigma(W_g) at once, with gradient u v^T: (g, m, n) -> (g,). Renews vectors[name], (g, m)."""
    fixed = blocks.detach()
    with torch.no_grad():
        start = warm_vectors(vectors.get(name), blocks.shape[:2], fixed)
        u = leading(fixed) if start is None else start.unsqueeze(-1)
        for _ in range(max(1, iterations)):
            v = unit_columns(fixed.mT @ u)
            u = unit_columns(fixed @ v)
        vectors[name] = u.squeeze(-1)
    return (u * (blocks @ v)).sum(dim=(-2, -1))


def leading(blocks: Tensor) -> Tensor:
    """Return first left singular vectors to start from; exact if cheap: (g, m, n) -> (g, m, 1)."""
    count, rows, columns = blocks.shape
    side = min(rows, columns)
    sound = bool(torch.isfinite(blocks.abs()).all())  # LAPACK does not take NaN
    if sound and count * side**3 <= _EXACT_WORK:
        wide = blocks.to(torch.complex128 if blocks.is_complex() else torch.float64)
        gram = wide @ wide.mH if rows == side else wide.mH @ wide
        top = torch.linalg.eigh(gram)[1][..., -1:]
        return (top if rows == side else unit_columns(wide @ top)).to(blocks)
    u = random_like((count, rows, 1), blocks)
    for _ in range(COLD):
        u = unit_columns(blocks @ (blocks.mH @ u))
    return u


def warm_vectors(vector: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Return the vectors of the last call, if they fit."""
    return vector.to(like) if vector is not None and vector.shape == torch.Size(shape) else None


def random_like(shape: Sequence[int], like: Tensor) -> Tensor:
    """Standard normal numbers, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator, dtype=like.dtype).to(like.device)


def unit_columns(x: Tensor) -> Tensor:
    """Columns of length 1 (or 0): (..., m, 1)."""
    return x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(_LEAST)


_FOURIER_ENTRIES = 2**24  # of all V(nu), complex64: 128 MiB. Beyond it the operator itself iterates


def convolution_estimate(
    weight: Tensor, geometry: Geometry, vectors: dict[str, Tensor], name: str, iterations: int
) -> Tensor:
    """About sigma(conv), at most what is proven for it: weight as in `conv_norm` -> () in float64,
    with gradient.

    Args:
        vectors: what `name` iterates on, renewed in place.
        iterations: of this call.
    """
    axes = geometry_axes(weight, geometry)
    kernels = grouped_kernels(weight, geometry)
    if all(axis.windows_per_pixel == 1 and axis.holds_a_window for axis in axes):
        return estimated_block_norms(kernels.flatten(2), vectors, name, iterations).max().double()
    frequencies = math.prod(axis.torus for axis in axes) // 2 + 1
    small = _is_small(kernels, axes)
    if small or frequencies * kernels.numel() > _FOURIER_ENTRIES:
        return _operator(kernels, axes, vectors, name, iterations, small)
    return _torus(kernels, axes, vectors, name, iterations)


def _operator(
    kernels: Tensor,
    axes: list[_Axis],
    vectors: dict[str, Tensor],
    name: str,
    iterations: int,
    small: bool,
) -> Tensor:
    """Power iteration on the convolution itself: images (1, g in, H, H')."""
    weight = kernels.flatten(0, 1)
    groups = len(kernels)
    stride, dilation = [a.stride for a in axes], [a.dilation for a in axes]
    (top, bottom), (left, right) = ((a.before, a.after) for a in axes)
    height, width = (a.size for a in axes)

    def forward(x: Tensor, w: Tensor) -> Tensor:
        return functional.conv2d(
            functional.pad(x, (left, right, top, bottom)), w, None, stride, 0, dilation, groups
        )

    def adjoint(y: Tensor, w: Tensor) -> Tensor:
        x = functional.conv_transpose2d(y, w, None, stride, 0, 0, groups, dilation)
        # rows of pixels that no window reaches are missing at the end
        missing = (height + top + bottom - x.shape[-2], width + left + right - x.shape[-1])
        return functional.pad(x, (-left, missing[1] - right, -top, missing[0] - bottom))

    def unit_images(x: Tensor) -> Tensor:
        # each group its own: any of them may become the largest
        return unit_columns(x.reshape(groups, -1, 1)).reshape(x.shape)

    fixed = weight.detach()
    shape = (1, groups * kernels.shape[2], height, width)
    with torch.no_grad():
        x = warm_vectors(vectors.get(name), shape, fixed)
        steps = max(1, iterations)
        if x is None and small:
            x = leading(_dense_operator(kernels.detach(), axes).mT).reshape(shape)
        elif x is None:
            x, steps = random_like(shape, fixed), max(COLD, iterations)
        for _ in range(steps):
            x = unit_images(adjoint(forward(x, fixed), fixed))
        vectors[name] = x
        y = forward(x, fixed).reshape(groups, -1)
        sizes = y.norm(dim=1)
        best = int(sizes.argmax())
        direction = torch.zeros_like(y)
        direction[best] = unit_columns(y[best].unsqueeze(-1)).squeeze(-1)
    return (direction * forward(x, weight).reshape(groups, -1)).sum().double()


def _torus(
    kernels: Tensor, axes: list[_Axis], vectors: dict[str, Tensor], name: str, iterations: int
) -> Tensor:
    """max over frequencies, groups of sigma(V(nu)). Complex numbers as pairs: much faster."""
    with torch.no_grad():
        shifts, taps = _polyphase(kernels.detach(), axes)
        flip = taps.shape[2] > taps.shape[3]
        taps = taps.mT if flip else taps
        groups, n, c = taps.shape[1:]
        waves = _all_waves(tuple(axes), tuple(shifts), taps.dtype, taps.device)
        spectrum = (waves.flatten(0, 1) @ taps.reshape(len(shifts), -1)).view(2, -1, n, c)
        u = warm_vectors(vectors.get(name), (spectrum.shape[1], n, 2), taps)
        if u is None:
            u = torch.view_as_real(leading(torch.complex(*spectrum)).squeeze(-1))
        for _ in range(max(1, iterations)):
            real, imaginary = spectrum.mT @ u
            v = _unit_pairs(real + _turned(imaginary))
            real, imaginary = spectrum @ v
            u = real - _turned(imaginary)
            sizes = u.flatten(1).norm(dim=1)
            u = _unit_pairs(u)
        vectors[name] = u
        best = int(sizes.argmax())
        frequency, group = divmod(best, groups)
        # u^* V(nu) v is linear in the taps, and each tap of the kernel is an entry of one of them
        outer = (
            torch.view_as_complex(u[best].contiguous())
            .conj()
            .outer(torch.view_as_complex(v[best].contiguous()))
        )
        wave = torch.complex(*waves[:, frequency]).view(-1, 1, 1)
        slopes = (wave * outer).real
        slopes = (slopes.mT if flip else slopes).unflatten(2, (kernels.shape[2], -1))
        coefficients = _of_taps(slopes, axes)
    return (kernels[group] * coefficients).sum().double()


def _turned(pairs: Tensor) -> Tensor:
    """-i z for z in pairs: (x, y) -> (y, -x)."""
    return torch.stack([pairs[..., 1], -pairs[..., 0]], dim=-1)


def _unit_pairs(pairs: Tensor) -> Tensor:
    return unit_columns(pairs.reshape(len(pairs), -1, 1)).view(pairs.shape)


@lru_cache(maxsize=64)
def _all_waves(
    axes: tuple[_Axis, ...],
    shifts: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """cos and sin of all frequencies of the grid, up to sign: (2, f, shifts)."""
    grid = torch.cat(list(_frequency_chunks(list(axes), 1, device)))
    return torch.stack(_waves(grid, list(shifts), list(axes))).to(dtype)


def _of_taps(slopes: Tensor, axes: list[_Axis]) -> Tensor:
    """Return the inverse polyphase arrangement: (shifts, out, in, residues) -> (out, in, k, k')."""
    places = [[divmod(axis.dilation * j, axis.stride) for j in range(axis.kernel)] for axis in axes]
    pairs = list(itertools.product(*places))
    shifts = sorted({tuple(q for q, _ in pair) for pair in pairs})
    residues = sorted({tuple(r for _, r in pair) for pair in pairs})
    rows = [shifts.index(tuple(q for q, _ in pair)) for pair in pairs]
    columns = [residues.index(tuple(r for _, r in pair)) for pair in pairs]
    return (
        slopes[rows, :, :, columns]
        .permute(1, 2, 0)
        .unflatten(2, tuple(axis.kernel for axis in axes))
    )


class TrainableArithmetic(Arithmetic):
    """Differentiable estimates of the same numbers. Power iteration approaches spectral norms from
    below.

    Matrices stay in the network's precision, scalars are float64: the bound of an untrained network
    is a product of many factors, beyond float32. Without gradients (an evaluation, once an epoch) a
    norm gets at least 30 iterations, because the vectors of training lag behind weights that move
    fast.

    Attributes:
        vectors: Singular vectors by name, kept between steps, so that one iteration a step is
            enough.
        orthogonal: id() of the parameters that the optimiser keeps orthogonal: their norm is 1,
            without a useful gradient.
    """

    rigorous = False

    def __init__(
        self, device: torch.device, iterations: int = 1, orthogonal: frozenset[int] = frozenset()
    ) -> None:
        self.device = device
        self.iterations = iterations
        self.orthogonal = orthogonal
        self.vectors: dict[str, Tensor] = {}
        self._constants: dict[float, Tensor] = {}
        self._uses: Counter[str] = Counter()

    def begin(self) -> None:
        self._uses.clear()

    def _own(self, name: str) -> str:
        """Return a name of this matrix: a module may call a function several times."""
        self._uses[name] += 1
        return name if self._uses[name] == 1 else f"{name}#{self._uses[name]}"

    @property
    def _steps(self) -> int:
        return max(1 if torch.is_grad_enabled() else COLD, self.iterations)

    def const(self, value: float) -> Tensor:
        value = float(value)
        if value not in self._constants:
            self._constants[value] = torch.tensor(value, dtype=torch.float64, device=self.device)
        return self._constants[value]

    def matrix(self, tensor: Tensor) -> Matrix:
        return Matrix(tensor.float() if tensor.dtype != torch.float64 else tensor, 0.0, id(tensor))

    def matmul(self, a: Matrix, b: Matrix) -> Matrix:
        left, right = _in_one_precision(a.tensor, b.tensor)
        return Matrix(left @ right)

    def add(self, a: Matrix, b: Matrix) -> Matrix:
        left, right = _in_one_precision(a.tensor, b.tensor)
        return Matrix(left + right)

    def sigma(self, matrix: Matrix, name: str = "") -> Tensor:
        if matrix.key in self.orthogonal:
            return self.const(1.0)
        return self._norms(matrix.tensor.unsqueeze(0), name)[0]

    def _norms(self, blocks: Tensor, name: str) -> list[Tensor]:
        norms = estimated_block_norms(blocks, self.vectors, self._own(name), self._steps)
        return list(norms.double().unbind())

    def sigmas(self, matrices: list[Matrix], name: str) -> list[Tensor]:
        tensors = [matrix.tensor for matrix in matrices]
        if len({tensor.shape for tensor in tensors}) > 1:
            return [self.sigma(one, f"{name}.{number}") for number, one in enumerate(matrices)]
        return self._norms(torch.stack(tensors), name)

    def sigma_products(self, pairs: list[tuple[Matrix, Matrix]], name: str) -> list[Tensor]:
        left, right = ([pair[place].tensor for pair in pairs] for place in (0, 1))
        if len({(a.shape, b.shape) for a, b in zip(left, right, strict=True)}) > 1:
            names = [f"{name}.{number}" for number in range(len(pairs))]
            return [
                self.sigma_product(*pair, label) for pair, label in zip(pairs, names, strict=True)
            ]
        return self._norms(torch.stack(left).mT @ torch.stack(right), name)

    def convolution(
        self, weight: Tensor, error: float, geometry: Geometry, name: str = ""
    ) -> Tensor:
        return convolution_estimate(weight, geometry, self.vectors, self._own(name), self._steps)

    def length(self, vector: Matrix | None) -> Tensor:
        return self.const(0.0) if vector is None else vector.tensor.norm().double()

    def sqrt(self, value: Tensor) -> Tensor:
        return value.clamp_min(1e-30).sqrt()

    def total(self, values: list[Tensor]) -> Tensor:
        return torch.stack(values).sum()

    def root_sum_of_squares(self, values: list[Tensor]) -> Tensor:
        stacked = torch.stack(values)
        # squares of 1e200 would overflow
        largest = stacked.detach().abs().max().clamp(1e-300, 1e300)
        return (stacked / largest).norm() * largest

    def minimum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.minimum(a, b)

    def maximum(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.maximum(a, b)

    def absolute(self, parameter: Tensor) -> Tensor:
        return parameter.double().abs()

    def _norm(self, tensor: Tensor) -> float:
        return 0.0  # errors are not tracked: these numbers are never called bounds

    def _largest(self, gains: Tensor) -> float:
        return 0.0

    def _error(self, products: int, *terms: tuple[float, ...]) -> float:
        return 0.0

    def sigma_product(self, a: Matrix, b: Matrix, name: str = "") -> Tensor:
        return self.sigma(self.matmul(self.transpose(a), b), name)


def _in_one_precision(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in one precision on one device: float64 constants meet float32."""
    b = b.to(a.device)
    return (a, b) if a.dtype == b.dtype else (a.float(), b.float())
