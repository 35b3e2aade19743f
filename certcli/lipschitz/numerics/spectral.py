"""sigma(M) <= s, proven: spectral norms of weight matrices as upper bounds in float64, never as
estimates.

An iterative eigenvalue solver gives a guess, a factorisation proves it, and every rounding error is
accounted for. Notation: u = 2^-53, gamma_k = k u / (1 - k u), |.| the spectral norm, |.|_F the
Frobenius norm, W the (m, n) matrix with m <= n (else its transpose), multiplied by a power of two
so that its largest entry lies in [1/2, 1).

Lemma (inner products; Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 3.1
and (3.13)). A sum of k products of floats, in any order, blocked or not, with fused multiply-add or
without, has an error of at most gamma_k times the sum of the absolute values. So fl(X Y^T) - X Y^T
is at most gamma_k |X||Y|^T entry by entry, hence at most gamma_k |X|_F |Y|_F in spectral norm. This
is the only fact about the library's matrix product that is used. It holds for every conventional
product; a product of Strassen's kind would need other constants.

Theorem (docs/bounds.md, section 1.6, with its proof). Let A = fl(W W^T), s a float, T = fl(s I -
A), L ANY float matrix, C = fl(T - L L^T). Then

    sigma(W)^2 <= s + |C|_F + gamma_{m+1} (|T|_F + |L|_F^2) + u |T|_F + gamma_n |W|_F^2.

L is the computed Cholesky factor of T, which makes C tiny (about 1e-14 s) when s exceeds the
largest eigenvalue of A. Rump's and Higham's (Theorem 10.3) a priori bounds would save the product L
L^T, but they assume that the library solves triangular systems by plain substitution, while fast
libraries invert diagonal blocks instead. The a posteriori residual assumes nothing about the
factorisation. |W|_F^2 is bounded through tr A >= (1 - gamma_n) (1 - gamma_m) |W|_F^2.

Half of the work. W W^T and L L^T are formed in column panels, from the diagonal block downwards.
This stands for the matrix whose upper blocks mirror the lower ones, for which the entrywise bounds
hold as well. With panels, L is the computed factor without the blocks above its diagonal blocks:
again some float matrix.

Underflow. After the scaling s is at least 1/4, while products that underflow lose at most 2^-1022
each, fewer than 2^90 of them: far below the last ulp that `up` adds. Scaling is exact but for
entries that fall below 2^-1022, which are covered in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from certcli.lipschitz.numerics.lanczos import lanczos_guess
from certcli.system.errors import CheckpointError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

UNIT = 2.0**-53
"""Unit roundoff of float64."""

_GUESS_SLACK = 1e-6  # relative, on sigma^2: the looseness on ordinary matrices is half of this
_FULL_SOLVER_SIDE = {
    "cpu": 256,
    "cuda": 32,
}  # up to here a full eigenvalue solver is as cheap as Lanczos (measured)
_PANEL = 192  # columns of a Gram matrix formed at a time, and
# columns of the long side cast to double at a time: fastest of 96..1024 on one AVX-512 core
_COLUMNS = 512
_BATCH_BYTES = {"cpu": 2**22, "cuda": 2**30}


def gamma(terms: int) -> float:
    """n u / (1 - n u), rounded up: the relative error of a sum of n products in float64.

    Errors: UsageError beyond 2^52 terms, where the constant loses its meaning.
    """
    if terms * UNIT > 0.5:
        raise UsageError(f"a sum of {terms} products is too long for float64 error bounds")
    return up(terms * UNIT / (1.0 - terms * UNIT), 3)


def up(x: float, steps: int = 1) -> float:
    """Return the float64 `steps` ulps above x, one for each rounded operation; inf stays inf."""
    for _ in range(steps):
        x = math.nextafter(x, math.inf)
    return x


def root_up(x: float) -> float:
    """sqrt(x), rounded up."""
    return up(math.sqrt(x))


def frobenius_norm(tensor: Tensor) -> float:
    """|T|_F <= value: sum of squares in float64, any shape, one rounding constant for the whole
    sum.

    Errors: CheckpointError on NaN or infinite entries.
    """
    import torch

    if tensor.is_floating_point() and tensor.device.type != "mps":
        plain = tensor.detach().reshape(-1).double()
        square = float(torch.dot(plain, plain))
        # of ordinary size: what products lose by underflow, 2^-1022 each of fewer than 2^60, is far
        # below the last ulp
        if 1e-200 < square < 1e200:
            return root_up(up(square * (1.0 + 2.0 * gamma(plain.numel() + 2)), 3))
    scaled, exponent = scale_to_unit(tensor)
    if scaled is None:
        return 0.0
    flat = scaled.reshape(-1)
    square = float(torch.dot(flat, flat))
    return unscale(root_up(up(square * (1.0 + 2.0 * gamma(flat.numel() + 2)), 2)), exponent)


def spectral_norm(matrix: Tensor, error: float = 0.0) -> float:
    """sigma(M) <= value for every real matrix M with |M - matrix|_2 <= error.

    The value is at most 1e-6 above sigma(matrix) + error, relatively, unless the certificate has to
    fall back. 0.0 only for an exactly zero (or empty) matrix without error; inf when the value
    exceeds float64.

    Args:
        matrix: (rows, columns), any float dtype (cast to float64, which is exact), any device.

    Errors: CheckpointError on NaN or infinite entries, UsageError on another number of dimensions.

    Source: theorem in the module's docstring; the idea of proving s I - A >= 0 by Cholesky is
    Rump's (BIT 46, 2006).
    """
    return spectral_norms([matrix], [error])[0]


def spectral_norms(
    matrices: Sequence[Tensor], errors: Sequence[float] | None = None
) -> list[float]:
    """sigma(M_i) <= value_i for every M_i with |M_i - matrices_i|_2 <= errors_i.

    Equal shapes on one device are handled together: in one batch for small matrices and on GPUs,
    one after the other for large matrices on a CPU (where a batch gains nothing and costs memory).
    Errors and source: `spectral_norm`.
    """
    import torch

    allowances = [0.0] * len(matrices) if errors is None else [float(error) for error in errors]
    if len(allowances) != len(matrices):
        raise UsageError(f"{len(matrices)} matrices but {len(allowances)} error bounds")
    if not all(allowance >= 0.0 for allowance in allowances):
        raise UsageError("an error bound on a matrix is negative or NaN")
    norms = [0.0] * len(matrices)
    with torch.no_grad():
        for indices in _batches(matrices):
            for index, norm in zip(indices, _norms_of_equal_shapes([matrices[i] for i in indices])):
                norms[index] = norm
    return [
        norm if allowance == 0.0 else up(norm + allowance)
        for norm, allowance in zip(norms, allowances)
    ]


def unit_exponent(tensor: Tensor) -> int | None:
    """e with max |2^-e * tensor| in [1/2, 1); None for a zero or empty tensor.

    Errors: CheckpointError on NaN or infinite entries, UsageError on a dtype that is not real
    floating point.
    """
    import torch

    if not tensor.is_floating_point():
        raise UsageError(f"a norm needs a real floating point tensor, not {tensor.dtype}")
    if tensor.numel() == 0:
        return None
    low, high = (float(extreme) for extreme in torch.aminmax(tensor.detach()))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CheckpointError(
            "the weights hold NaN or infinite values", "train again, or read another checkpoint"
        )
    largest = max(-low, high)
    return math.frexp(largest)[1] if largest > 0.0 else None


def scale_to_unit(tensor: Tensor) -> tuple[Tensor | None, int]:
    """tensor = 2^e * scaled with max |scaled| in [1/2, 1), a fresh float64 tensor; (None, 0) for a
    zero or empty one.

    Exact, but for entries 2^1000 times smaller than the largest. MPS has no float64: computed on
    the CPU there. Errors: those of `unit_exponent`.
    """
    exponent = unit_exponent(tensor)
    if exponent is None:
        return None, 0
    return _scaled(tensor.detach().unsqueeze(0), [exponent]).squeeze(0), exponent


def unscale(value: float, exponent: int) -> float:
    """2^e * value, rounded up; inf beyond float64."""
    try:
        return up(math.ldexp(value, exponent))
    except OverflowError:
        return math.inf


def certify_below(grams: Tensor, shifts: Sequence[float]) -> list[float]:
    """lambda_max(A_i) <= value_i (about shifts_i), or inf where shifts_i I - A_i has no Cholesky
    factor.

    The theorem of the module without its last term. Each part of an entry of a complex L L^* is a
    sum of 2 m real products.

    Args:
        grams: (b, m, m), real symmetric or complex Hermitian, read from the lower block triangle.
    """
    import torch

    side = grams.shape[-1]
    shifted = grams.neg()
    diagonal = shifted.diagonal(dim1=-2, dim2=-1)
    diagonal += torch.tensor(shifts, dtype=torch.float64, device=grams.device).unsqueeze(-1)
    factor, info = torch.linalg.cholesky_ex(shifted)
    factor_square = _square_sum(factor)
    shifted_square = _square_sum(shifted)
    residual_square = torch.zeros_like(factor_square)
    for first, last in _panels(side, grams.device):
        below = factor[:, first:, :last]
        right = factor[:, first:last, :last]
        part = torch.baddbmm(shifted[:, first:, first:last], below, right.mH, alpha=-1)
        residual_square += _square_sum(part[:, : last - first]) + 2.0 * _square_sum(
            part[:, last - first :]
        )
    # Complex: both parts of an entry together cost a factor of sqrt(2).
    rounding = up(2.0 * gamma(2 * side + 1)) if grams.is_complex() else gamma(side + 1)
    slack = 1.0 + 2.0 * gamma(2 * side * side + 8)  # the computed sums of squares themselves
    values = []
    for shift, failed, c, t, f in zip(
        shifts,
        info.tolist(),
        residual_square.tolist(),
        shifted_square.tolist(),
        factor_square.tolist(),
    ):
        if failed or not math.isfinite(c + t + f):
            values.append(math.inf)
            continue
        residual = up(root_up(c) * slack)
        scale = up(root_up(t) * slack)
        values.append(
            up(shift + up(residual + rounding * up(scale + f * slack, 2) + UNIT * scale, 4))
        )
    return values


def gram_iteration(gram: Tensor, steps: int = 12) -> float:
    """sigma(A) <= value: G_0 = A, G_{t+1} = G_t^T G_t, sigma(A)^(2^t) <= |G_t|_F, with the errors
    carried backwards.

    The last resort: it needs no guess and cannot fail. Loose by rank^(1 / 2^(steps + 1)). From
    |fl(G^T G) - G^T G| <= gamma_m |G|_F^2 =: e_t follows sigma(G_t) <= sqrt(sigma(fl(G_t^T G_t)) +
    e_t).

    Args:
        gram: (m, m) float64.

    Source: Delattre et al., Efficient bound of Lipschitz constant for convolutional layers by Gram
    iteration, 2023.
    """
    records = []
    current, exponent = scale_to_unit(gram)
    for _ in range(steps):
        if current is None:
            return 0.0
        size = frobenius_norm(current)
        records.append((exponent, up(gamma(len(current)) * up(size * size))))
        current, exponent = scale_to_unit(current.mT @ current)
    bound = 0.0 if current is None else unscale(frobenius_norm(current), exponent)
    for exponent, allowance in reversed(records):
        bound = unscale(root_up(up(bound + allowance)), exponent)
    return bound


def _batches(matrices: Sequence[Tensor]) -> Iterator[list[int]]:
    groups: dict[tuple[int, int, torch.dtype, torch.device], list[int]] = {}
    for index, matrix in enumerate(matrices):
        if matrix.ndim != 2:
            raise UsageError(
                f"a spectral norm needs a matrix, not a tensor of shape {tuple(matrix.shape)}"
            )
        groups.setdefault((*matrix.shape, matrix.dtype, matrix.device), []).append(index)
    for (rows, columns, _, device), indices in groups.items():
        budget = _BATCH_BYTES.get(device.type, _BATCH_BYTES["cpu"])
        size = max(1, budget // max(1, 8 * (rows * columns + 5 * min(rows, columns) ** 2)))
        for first in range(0, len(indices), size):
            yield indices[first : first + size]


def _norms_of_equal_shapes(matrices: Sequence[Tensor]) -> list[float]:
    import torch

    if 1 in matrices[0].shape or len(matrices[0]) == 0:
        return [frobenius_norm(matrix) for matrix in matrices]
    exponents = [unit_exponent(matrix) for matrix in matrices]
    nonzero = [index for index, exponent in enumerate(exponents) if exponent is not None]
    norms = [0.0] * len(matrices)
    if not nonzero:
        return norms
    chosen = [matrices[index].detach() for index in nonzero]
    stacked = torch.stack(chosen) if len(chosen) > 1 else chosen[0].unsqueeze(0)
    if stacked.shape[1] > stacked.shape[2]:
        stacked = stacked.mT
    _, side, length = stacked.shape
    grams = _gram_matrices(stacked, [exponents[index] or 0 for index in nonzero])
    traces = grams.diagonal(dim1=-2, dim2=-1).sum(dim=-1).tolist()
    for index, trace, top in zip(nonzero, traces, top_eigenvalues(grams)):
        square_sum = up(up(trace / (1.0 - gamma(length)), 2) / (1.0 - gamma(side)), 2)
        norms[index] = unscale(
            root_up(up(top + up(gamma(length) * square_sum))), exponents[index] or 0
        )
    return norms


def _gram_matrices(stacked: Tensor, exponents: list[int]) -> Tensor:
    """fl(W W^T) of every W = 2^-e stacked, (b, m, n) -> (b, m, m), the upper blocks mirrored from
    the lower ones.

    On a CPU large matrices are cast to double by column blocks that stay in the cache: a double
    copy of the whole would cost more page faults than arithmetic. The lemma covers blocked sums.
    """
    import torch

    batch, side, length = stacked.shape
    device = _float64_device(stacked.device)
    width = _COLUMNS if batch == 1 and device.type == "cpu" else length
    grams = torch.zeros(batch, side, side, dtype=torch.float64, device=device)
    for first_column in range(0, length, width):
        block = _scaled(stacked[:, :, first_column : first_column + width], exponents)
        for first, last in _panels(side, device):
            grams[:, first:, first:last].baddbmm_(block[:, first:], block[:, first:last].mT)
    for first, last in _panels(side, device):
        grams[:, first:last, last:] = grams[:, last:, first:last].mT
    return grams


def _scaled(stacked: Tensor, exponents: list[int]) -> Tensor:
    """2^-e_i * stacked_i as a fresh float64 tensor, (b, ...), in two steps: 2^-e may overflow."""
    import torch

    source = stacked.to(_float64_device(stacked.device))
    scaled = source.to(torch.float64, copy=True)
    if max(abs(exponent) for exponent in exponents) <= 1000:
        steps = [[-exponent for exponent in exponents]]
    else:
        steps = [
            [-exponent // 2 for exponent in exponents],
            [-(exponent // 2) for exponent in exponents],
        ]
    for powers in steps:
        factors = torch.tensor(
            [2.0**power for power in powers], dtype=torch.float64, device=scaled.device
        )
        scaled.mul_(factors.view((-1,) + (1,) * (scaled.ndim - 1)))
    return scaled


def _float64_device(device: torch.device) -> torch.device:
    import torch

    return torch.device("cpu") if device.type == "mps" else device


def top_eigenvalues(grams: Tensor) -> list[float]:
    """lambda_max(A_i) <= value_i for positive semidefinite matrices with entries of ordinary size:
    (b, m, m), float64.

    Guess, certificate; where that fails a full eigenvalue solver as guess; where that fails Gram
    iteration.
    """
    import torch

    side = grams.shape[-1]
    bounds = [math.inf] * len(grams)
    if side > _FULL_SOLVER_SIDE.get(grams.device.type, 32):
        guess, converged = lanczos_guess(grams)
        hopeful = [i for i, good in enumerate(converged.tolist()) if good]
        _try_shifts(
            grams,
            hopeful,
            [value * (1.0 + _GUESS_SLACK) for value in guess[hopeful].tolist()],
            bounds,
        )
    for slack in (1e-9, 1e-7, 1e-4):
        open_ones = [i for i, bound in enumerate(bounds) if bound == math.inf]
        if not open_ones:
            return bounds
        try:
            values = torch.linalg.eigvalsh(_select(grams, open_ones))[:, -1].tolist()
        except torch.linalg.LinAlgError:
            break
        _try_shifts(
            grams,
            open_ones,
            [value * (1.0 + slack + side * side * UNIT) for value in values],
            bounds,
        )
    return [
        gram_iteration(gram) if bound == math.inf else bound for gram, bound in zip(grams, bounds)
    ]


def _try_shifts(
    grams: Tensor, indices: list[int], shifts: list[float], bounds: list[float]
) -> None:
    if indices:
        for index, bound in zip(indices, certify_below(_select(grams, indices), shifts)):
            bounds[index] = bound


def _select(grams: Tensor, indices: list[int]) -> Tensor:
    return grams if len(indices) == len(grams) else grams[indices]


def _panels(side: int, device: torch.device) -> Iterator[tuple[int, int]]:
    width = _PANEL if device.type == "cpu" else side  # a GPU is slower with narrow panels
    for first in range(0, side, width):
        yield first, min(side, first + width)


def _square_sum(matrices: Tensor) -> Tensor:
    import torch

    flat = torch.view_as_real(matrices).flatten(-2) if matrices.is_complex() else matrices
    norms: Tensor = torch.linalg.vector_norm(flat, dim=(-2, -1))
    return norms * norms
