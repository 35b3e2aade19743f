"""sigma(conv) <= s, proven: the operator norm of a zero-padded convolution between images.

Per axis: H input pixels, kernel k, dilation d, effective kernel e = d (k - 1) + 1, stride s,
padding (p, p'), output i reads the padded pixels s i + d j, 0 <= j < k. Four bounds, every one
proven; the smallest counts.

Windows. sum_i |W x_i|^2 <= sigma(W)^2 sum_i |x_i|^2 for the reshaped kernel W (out, in k k') and
the windows x_i of the image. A pixel lies in at most ceil(k gcd(s, d) / s) windows per axis (those
taps j with s | q - d j), so sigma <= sigma(W) sqrt(product of these counts). With a count of 1
(kernel = stride: patches) and a window that lies inside the image this is an equality.

Torus. Let M >= max(H + max(p, p'), e) be a multiple of s. On the torus of M pixels per axis put the
image at offset p and zeros elsewhere: the two borders may share their zeros, every window of the
padded image is a window of the torus, so the convolution is a restriction of the circular one. Two
windows that coincide there lie wholly in the borders and give 0. Splitting pixels by their residue
modulo s (polyphase) makes the circular convolution one of stride 1 on a torus of N = M / s pixels
per axis with in s s' channels. The Fourier transform makes it block diagonal, so

    sigma^2 <= max over nu in the grid of lambda_max(G(nu)),  G(nu) = sum_delta C_delta exp(2 pi i
    nu delta / N), C_delta = sum_q V_q V_{q + delta}^T,  V_q the matrix of tap q (or of its
    transpose: the shorter side is taken).

C_{-delta} = C_delta^T and G(-nu) = conj G(nu): half of the lags and half of the grid suffice. There
is no FFT: the number of lags is small, a plain sum over them is fast, and its rounding error has a
simple proof. All G(nu) are certified against one shift with the a posteriori Cholesky residual of
`spectral.certify_below`.

Dense. Small operators are written out as a matrix (every entry is 0 or a weight), whose norm is
then exact.

Groups. The operator is block diagonal: the maximum over groups (a product would be wrong).

Rounding of G. Sums of K = (columns of V) (number of taps) products, then of L lags with factors of
cosines (absolute error below 32 u: the angle is reduced in integers to [-pi, pi], so its rounding
and the library's cosine, good to 2 ulps, stay below 16 u), then 3 additions: each of the real and
the imaginary part is wrong by at most gamma_{K + L + 40} B B^T entry by entry, B = sum_q |V_q|
(Higham, Lemma 3.3), so G is wrong by at most 2 gamma_{K + L + 40} |B|_F^2 in spectral norm.

Source: Sedghi, Gupta, Long 2019 for the Fourier blocks of circular convolutions; the embedding of
the zero-padded one and the lag form are proven above.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.lipschitz.numerics.eigenvalues import largest_of_chunks
from certcli.lipschitz.numerics.outward import gamma, root_up, scale_to_unit, unscale, up
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.system.errors import UsageError

_CHUNK_ENTRIES = {
    "cpu": 2**17,
    "cuda": 2**24,
}  # of G held at a time, complex; some five copies live
_DENSE_ENTRIES = 2**22
_DENSE_SIDE = 1024


@dataclass(frozen=True)
class Geometry:
    """A zero-padded convolution without its weight: numbers per axis, (before, after) of the
    padding, input pixels.

    Attributes:
        transposed: the adjoint of such a convolution, from images of input_size, for every output
            padding.
    """

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    input_size: tuple[int, ...]
    transposed: bool = False


@dataclass(frozen=True)
class _Axis:
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    size: int

    @property
    def extent(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    @property
    def outputs(self) -> int:
        return (self.size + self.before + self.after - self.extent) // self.stride + 1

    @property
    def windows_per_pixel(self) -> int:
        taps = -(-self.kernel * math.gcd(self.stride, self.dilation) // self.stride)
        return min(taps, self.outputs)

    @property
    def holds_a_window(self) -> bool:
        first = -(-self.before // self.stride)
        return self.stride * first - self.before + self.extent <= self.size

    @property
    def torus(self) -> int:
        """N = M / s."""
        return -(-max(self.size + max(self.before, self.after), self.extent) // self.stride)


def conv_norm(weight: Tensor, geometry: Geometry) -> float:
    """|conv(x)|_2 <= value |x|_2 for every image x of input_size, zero padding, the bias left out.

    Args:
        weight: (out, in / groups, k) or (out, in / groups, k, k') as in torch's convolutions, for
            `transposed` (in, out / groups, ...); any float dtype.
        geometry: not of circular or reflecting padding, whose operators are larger.

    Errors: CheckpointError on NaN or infinite weights, UsageError on a geometry that cannot be.

    Source: this module's docstring.
    """
    axes = geometry_axes(weight, geometry)
    with torch.no_grad():
        scaled, exponent = scale_to_unit(weight)
        if scaled is None:
            return 0.0
        kernels = grouped_kernels(scaled, geometry)
        bounds = [
            up(
                _largest_norm(kernels.flatten(2))
                * root_up(math.prod(axis.windows_per_pixel for axis in axes))
            )
        ]
        disjoint = all(axis.windows_per_pixel == 1 for axis in axes)
        if disjoint and all(axis.holds_a_window for axis in axes):
            return unscale(bounds[0], exponent)
        if _is_small(kernels, axes):
            bounds.append(max(spectral_norms(list(_dense_operator(kernels, axes)))))
        elif not disjoint:
            bounds.append(_torus_norm(kernels, axes))
        return unscale(min(bounds), exponent)


def grouped_kernels(weight: Tensor, geometry: Geometry) -> Tensor:
    """Return a weight as (g, out / g, in / g, k, k'), of one axis with k = 1."""
    if len(weight) % geometry.groups:
        raise UsageError(f"{len(weight)} channels cannot be split into {geometry.groups} groups")
    whole = weight if weight.ndim == 4 else weight.unsqueeze(2)
    return whole.unflatten(0, (geometry.groups, -1))


def geometry_axes(weight: Tensor, geometry: Geometry) -> list[_Axis]:
    """Return both axes; UsageError where a window does not fit."""
    count = weight.ndim - 2
    if count not in (1, 2):
        raise UsageError(f"a convolution has a weight of 3 or 4 dimensions, not {weight.ndim}")
    axes = []
    for kernel, step, spread, (first, last), size in zip(
        weight.shape[2:],
        geometry.stride,
        geometry.dilation,
        geometry.padding,
        geometry.input_size,
        strict=True,
    ):
        if geometry.transposed:
            # The adjoint of a convolution of the output image. A larger image has a larger norm, so
            # the largest output padding that torch allows covers all of them.
            size = (size - 1) * step - first - last + spread * (kernel - 1) + max(step, spread)
        axis = _Axis(kernel, step, spread, first, last, size)
        if kernel < 1 or size < 1 or axis.size + first + last < axis.extent:
            raise UsageError(
                f"a kernel of {axis.extent} pixels does not fit an image of {size} + {first} + {last}"
            )
        axes.append(axis)
    return axes if count == 2 else [_Axis(1, 1, 1, 0, 0, 1), *axes]


def _largest_norm(matrices: Tensor) -> float:
    """max over g of sigma(W_g): (g, m, n) -> a float."""
    if 1 in matrices.shape[1:]:
        return _largest_frobenius(matrices)
    return max(spectral_norms(list(matrices)))


def _largest_frobenius(matrices: Tensor) -> float:
    """max over g of |W_g|_F: (g, ...) -> a float."""
    norms = torch.linalg.vector_norm(matrices.flatten(1), dim=1)
    return up(float(norms.max()) * (1.0 + 2.0 * gamma(matrices[0].numel() + 4)), 2)


def _is_small(kernels: Tensor, axes: list[_Axis]) -> bool:
    rows = kernels.shape[1] * math.prod(axis.outputs for axis in axes)
    columns = kernels.shape[2] * math.prod(axis.size for axis in axes)
    return len(kernels) * rows * columns <= _DENSE_ENTRIES and min(rows, columns) <= _DENSE_SIDE


def _dense_operator(kernels: Tensor, axes: list[_Axis]) -> Tensor:
    """Return each group's convolution as a matrix, (g, out n n', in H H'), by exact assignment."""
    outputs = [axis.outputs for axis in axes]
    sizes = [axis.size for axis in axes]
    groups, rows, channels = kernels.shape[:3]
    matrix = kernels.new_zeros(groups, rows, *outputs, channels, *sizes)
    for tap in itertools.product(*(range(axis.kernel) for axis in axes)):
        places = []
        for axis, j in zip(axes, tap):
            output = torch.arange(axis.outputs, device=kernels.device)
            pixel = axis.stride * output + axis.dilation * j - axis.before
            inside = (pixel >= 0) & (pixel < axis.size)
            places.append((output[inside], pixel[inside]))
        (row, y), (column, x) = places
        # the indexed axes come first in the assignment, then (g, out, in)
        matrix[:, :, row[:, None], column[None, :], :, y[:, None], x[None, :]] = kernels[
            ..., tap[0], tap[1]
        ]
    return matrix.view(groups, rows * math.prod(outputs), channels * math.prod(sizes))


def _torus_norm(kernels: Tensor, axes: list[_Axis]) -> float:
    """Return the bound by the torus, kernels (g, out, in, k, k')."""
    shifts, taps = _polyphase(kernels, axes)
    if taps.shape[2] > taps.shape[3]:
        taps = taps.mT
    largest = up(_largest_frobenius(taps.abs().sum(dim=0)) * (1.0 + 2.0 * gamma(len(shifts))), 2)
    if taps.shape[2] == 1:
        return _vector_norm(taps[:, :, 0], shifts, axes, largest)
    top = largest_of_chunks(_fourier_grams(taps, shifts, axes))
    terms = taps.shape[3] * len(shifts) + len(_half_lags(shifts)) + 40
    return root_up(up(top + up(2.0 * gamma(terms) * up(largest * largest), 3)))


def _polyphase(kernels: Tensor, axes: list[_Axis]) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return the kernel at stride 1: shifts q and V_q, (taps, g, out, in r), r residues in use."""
    places = {
        tap: [divmod(axis.dilation * j, axis.stride) for axis, j in zip(axes, tap)]
        for tap in itertools.product(*(range(axis.kernel) for axis in axes))
    }
    shifts = sorted({tuple(q for q, _ in place) for place in places.values()})
    residues = sorted({tuple(r for _, r in place) for place in places.values()})
    taps = kernels.new_zeros(len(shifts), *kernels.shape[:3], len(residues))
    for tap, place in places.items():
        shift = tuple(q for q, _ in place)
        residue = tuple(r for _, r in place)
        taps[shifts.index(shift), ..., residues.index(residue)] = kernels[..., tap[0], tap[1]]
    return shifts, taps.flatten(3)


def _half_lags(shifts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Return the differences of shifts > 0 lexicographically; the others are negatives."""
    differences = {
        tuple(b - a for a, b in zip(first, second)) for first in shifts for second in shifts
    }
    return sorted(lag for lag in differences if lag > (0,) * len(lag))


def _frequency_chunks(axes: list[_Axis], entries: int, device: torch.device) -> Iterator[Tensor]:
    """Half of the torus' grid, nu up to sign: (f, 2) integers, f * entries within the memory."""
    rows, columns = (torch.arange(axis.torus, device=device) for axis in axes)
    grid = torch.cartesian_prod(rows, columns)
    sizes = torch.tensor([axis.torus for axis in axes], device=device)
    mirrored = (sizes - grid) % sizes
    half = grid[grid[:, 0] * sizes[1] + grid[:, 1] <= mirrored[:, 0] * sizes[1] + mirrored[:, 1]]
    yield from half.split(max(1, _CHUNK_ENTRIES.get(device.type, _CHUNK_ENTRIES["cpu"]) // entries))


def _waves(
    frequencies: Tensor, shifts: list[tuple[int, ...]], axes: list[_Axis]
) -> tuple[Tensor, Tensor]:
    """cos and sin of 2 pi nu q / N: (f, taps) each, the angle reduced in integers, then rounded."""
    common = math.lcm(*(axis.torus for axis in axes))
    weights = torch.tensor(
        [[q * (common // axis.torus) for q, axis in zip(shift, axes)] for shift in shifts]
    )
    turns = (frequencies[:, None, :] * weights.to(frequencies.device)).sum(dim=-1) % common
    turns = torch.where(2 * turns > common, turns - common, turns)
    angles = turns.double() * (2.0 * math.pi / common)
    return angles.cos(), angles.sin()


def _fourier_grams(
    taps: Tensor, shifts: list[tuple[int, ...]], axes: list[_Axis]
) -> Iterator[Tensor]:
    """Yield G(nu) of all groups in complex chunks (chunk, n, n); taps (taps, g, n, c)."""
    side = taps.shape[2]
    place = {shift: index for index, shift in enumerate(shifts)}
    lags = _half_lags(shifts)
    block = max(
        1,
        _CHUNK_ENTRIES.get(taps.device.type, _CHUNK_ENTRIES["cpu"])
        // (side * side * (len(lags) + 1)),
    )
    for chosen in taps.split(block, dim=1):
        products = chosen.new_empty(len(lags) + 1, chosen.shape[1], side, side)
        for index, lag in enumerate([(0, 0), *lags]):
            pairs = [
                (i, place.get(tuple(a + b for a, b in zip(shift, lag))))
                for shift, i in place.items()
            ]
            left = torch.cat([chosen[i] for i, j in pairs if j is not None], dim=-1)
            right = torch.cat([chosen[j] for _, j in pairs if j is not None], dim=-1)
            products[index] = torch.matmul(left, right.mT)
        center = products[0]
        others = products[1:].flatten(1)
        for frequencies in _frequency_chunks(axes, center.numel(), taps.device):
            cosines, sines = _waves(frequencies, lags, axes)
            even = (cosines @ others).view(-1, *center.shape)
            odd = (sines @ others).view(-1, *center.shape)
            yield torch.complex(even + even.mT + center, odd - odd.mT).flatten(0, 1)


def _vector_norm(
    vectors: Tensor, shifts: list[tuple[int, ...]], axes: list[_Axis], largest: float
) -> float:
    """The case of one channel on one side (depthwise): the largest |sum_q v_q exp(i nu q)|, vectors
    (taps, g, c).

    Both parts of each entry are wrong by at most gamma_{taps + 34} B, B = sum_q |v_q|, whose norm
    is at most `largest`.
    """
    count, groups, length = vectors.shape
    flat = vectors.flatten(1)
    top = 0.0
    for frequencies in _frequency_chunks(axes, groups * length, vectors.device):
        cosines, sines = _waves(frequencies, shifts, axes)
        squares = (cosines @ flat).square() + (sines @ flat).square()
        top = max(top, float(squares.view(-1, groups, length).sum(dim=-1).max()))
    top = root_up(up(top * (1.0 + 2.0 * gamma(length + 4)), 2))
    return up(top + up(2.0 * gamma(count + 34) * largest, 2))
