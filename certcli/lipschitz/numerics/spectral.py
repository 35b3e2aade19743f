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

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from certcli.lipschitz.numerics.eigenvalues import column_panels, top_eigenvalues
from certcli.lipschitz.numerics.outward import (
    float64_device,
    frobenius_norm,
    gamma,
    root_up,
    scaled_to_double,
    unit_exponent,
    unscale,
    up,
)
from certcli.system.errors import UsageError

_COLUMNS = 512  # of the long side cast to double at a time: fastest of 96..1024 on one AVX-512 core
_BATCH_BYTES = {"cpu": 2**22, "cuda": 2**30}


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
    batch, side, length = stacked.shape
    device = float64_device(stacked.device)
    width = _COLUMNS if batch == 1 and device.type == "cpu" else length
    grams = torch.zeros(batch, side, side, dtype=torch.float64, device=device)
    for first_column in range(0, length, width):
        block = scaled_to_double(stacked[:, :, first_column : first_column + width], exponents)
        for first, last in column_panels(side, device):
            grams[:, first:, first:last].baddbmm_(block[:, first:], block[:, first:last].mT)
    for first, last in column_panels(side, device):
        grams[:, first:last, last:] = grams[:, last:, first:last].mT
    return grams
