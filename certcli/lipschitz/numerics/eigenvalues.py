"""lambda_max(A) <= s, proven by a factorisation: the theorem of spectral.py without its last term; and
Lanczos' iteration for a guess, from which it is proven."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from certcli.lipschitz.numerics.outward import (
    UNIT,
    frobenius_norm,
    gamma,
    root_up,
    scale_to_unit,
    unscale,
    up,
)

MOST_STEPS = 96


def lanczos_guess(grams: Tensor, most_steps: int = MOST_STEPS) -> tuple[Tensor, Tensor]:
    """Guess the largest eigenvalue of each Hermitian matrix: (b, m, m) -> (b,), and (b,) whether it
    looks converged.

    Lanczos in single precision (half the memory traffic; the error of the Ritz vector enters
    squared) with full reorthogonalisation and a fixed start, then one Rayleigh quotient in double
    precision. The distance to the nearest eigenvalue is at most r and, with a gap g to the others,
    r^2 / g (r the residual).
    """
    batch, side, _ = grams.shape
    steps = min(side, most_steps)
    single = grams.to(torch.complex64 if grams.is_complex() else torch.float32)
    start = torch.randn(side, generator=torch.Generator().manual_seed(0))
    vector = (start / start.norm()).to(device=single.device, dtype=single.dtype).expand(batch, side)
    basis = single.new_zeros(batch, steps, side)
    tridiagonal = torch.zeros(batch, steps, steps, dtype=torch.float32, device=single.device)
    for step in range(steps):
        basis[:, step] = vector
        image = torch.matmul(single, vector.unsqueeze(-1))
        vectors_so_far = basis[:, : step + 1]
        for unconverged in (
            False,
            True,
        ):  # once is not enough: the orthogonality decays and ghosts above the spectrum appear
            coefficients = torch.matmul(vectors_so_far.conj(), image)
            image = image - torch.matmul(vectors_so_far.mT, coefficients)
            if not unconverged:
                tridiagonal[:, step, step] = coefficients[:, -1, 0].real
        length = torch.linalg.vector_norm(image, dim=-2)
        if step + 1 == steps or (step >= 23 and step % 8 == 7):
            ritz, vectors = torch.linalg.eigh(tridiagonal[:, : step + 1, : step + 1])
            value = ritz[:, -1]
            residual = length[:, 0] * vectors[:, -1, -1].abs()
            gap = (value - ritz[:, -2]).clamp_min(1e-30) if step else residual
            converged = torch.minimum(residual, residual * residual / gap) <= 1e-7 * value
            if step + 1 == steps or bool(converged.all()):
                break
        # An invariant subspace is exhausted when the image vanishes: go on with zeros instead of
        # noise.
        length = torch.where(length > 1e-5 * tridiagonal[:, 0, :1].abs(), length, 0.0)
        vector = (
            image / length.clamp_min(1e-30).unsqueeze(-1) * (length > 0).unsqueeze(-1)
        ).squeeze(-1)
        tridiagonal[:, step, step + 1] = tridiagonal[:, step + 1, step] = length[:, 0]
    top = torch.matmul(vectors[:, None, :, -1].to(vectors_so_far.dtype), vectors_so_far).to(
        grams.dtype
    )  # (b, 1, m): a row
    image = torch.matmul(grams, top.mT)
    energy = torch.matmul(top.conj(), image)[:, 0, 0].real
    return energy / torch.linalg.vector_norm(top, dim=-1)[:, 0].square().clamp_min(
        1e-300
    ), converged


_GUESS_SLACK = 1e-6  # relative, on sigma^2: the looseness on ordinary matrices is half of this
_FULL_SOLVER_SIDE = {
    "cpu": 256,
    "cuda": 32,
}  # up to here a full eigenvalue solver is as cheap as Lanczos (measured)
_SMALL_SIDE = 24  # of a convolution's matrices at one frequency, of which there are many
_ATTEMPTS = 6
_SHIFT_SLACK = 1e-6  # relative, on sigma^2
_PANEL = 192  # columns of a Gram matrix formed at a time: fastest of 96..1024 on one AVX-512 core


def certify_below(grams: Tensor, shifts: Sequence[float]) -> list[float]:
    """lambda_max(A_i) <= value_i (about shifts_i), or inf where shifts_i I - A_i has no Cholesky
    factor.

    Each part of an entry of a complex L L^* is a sum of 2 m real products.

    Args:
        grams: (b, m, m), real symmetric or complex Hermitian, read from the lower block triangle.
    """
    side = grams.shape[-1]
    shifted = grams.neg()
    diagonal = shifted.diagonal(dim1=-2, dim2=-1)
    diagonal += torch.tensor(shifts, dtype=torch.float64, device=grams.device).unsqueeze(-1)
    factor, info = torch.linalg.cholesky_ex(shifted)
    factor_square = _square_sum(factor)
    shifted_square = _square_sum(shifted)
    residual_square = torch.zeros_like(factor_square)
    for first, last in column_panels(side, grams.device):
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


def top_eigenvalues(grams: Tensor) -> list[float]:
    """lambda_max(A_i) <= value_i for positive semidefinite matrices with entries of ordinary size:
    (b, m, m), float64.

    Guess, certificate; where that fails a full eigenvalue solver as guess; where that fails Gram
    iteration.
    """
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
            values = torch.linalg.eigvalsh(_selected_grams(grams, open_ones))[:, -1].tolist()
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
        for index, bound in zip(indices, certify_below(_selected_grams(grams, indices), shifts)):
            bounds[index] = bound


def _selected_grams(grams: Tensor, indices: list[int]) -> Tensor:
    return grams if len(indices) == len(grams) else grams[indices]


def column_panels(side: int, device: torch.device) -> Iterator[tuple[int, int]]:
    width = _PANEL if device.type == "cpu" else side  # a GPU is slower with narrow panels
    for first in range(0, side, width):
        yield first, min(side, first + width)


def _square_sum(matrices: Tensor) -> Tensor:

    flat = torch.view_as_real(matrices).flatten(-2) if matrices.is_complex() else matrices
    norms: Tensor = torch.linalg.vector_norm(flat, dim=(-2, -1))
    return norms * norms


def largest_of_chunks(chunks: Iterator[Tensor]) -> float:
    """Upper bound on the largest eigenvalue of all Hermitian matrices in all chunks, inf if the
    certificate fails.

    The shift only grows: what was certified against a smaller one stays certified, so each matrix
    is factorised about once, and a better guess is looked for only among those that fail.
    """
    # the mean of the diagonal of G over the grid is |row|^2, and one weight is at least 1/2
    proven = 0.0
    shift = 0.25
    for grams in chunks:
        for attempt in range(_ATTEMPTS):
            if attempt > 0:
                shift = up(max(shift, _guess(grams, attempt)) * (1.0 + _SHIFT_SLACK))
            bounds = certify_below(grams, [shift] * len(grams))
            proven = max(proven, max((bound for bound in bounds if bound < math.inf), default=0.0))
            grams = grams[[index for index, bound in enumerate(bounds) if bound == math.inf]]
            if len(grams) == 0:
                break
        else:
            return math.inf
    return proven


def _guess(grams: Tensor, attempt: int) -> float:
    """About the largest eigenvalue of all matrices: roughly on all, with care on the largest."""
    if grams.shape[-1] <= _SMALL_SIDE:
        return float(torch.linalg.eigvalsh(grams)[:, -1].max())
    rough, _ = lanczos_guess(grams, 12 * 2**attempt)
    best = int(rough.argmax())
    return float(lanczos_guess(grams[best : best + 1])[0])
