"""Lanczos' iteration: a guess of the largest eigenvalue, from which `spectral` proves a bound."""

import torch
from torch import Tensor

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
    if batch == 1 and grams.device.type == "cpu" and not grams.is_complex():
        return _lanczos_of_one(grams[0], steps)
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


def _lanczos_of_one(gram: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """`lanczos_guess` of one real matrix: at ordinary sizes a batch's calls cost more."""
    side = len(gram)
    single = gram.float()
    basis = single.new_zeros(steps, side)
    start = torch.randn(side, generator=torch.Generator().manual_seed(0))
    basis[0] = start / start.norm()
    tridiagonal = torch.zeros(steps, steps)
    converged = False
    for step in range(steps):
        image = torch.mv(single, basis[step])
        vectors_so_far = basis[: step + 1]
        coefficients = torch.mv(vectors_so_far, image)
        image.addmv_(vectors_so_far.T, coefficients, alpha=-1.0)
        image.addmv_(vectors_so_far.T, torch.mv(vectors_so_far, image), alpha=-1.0)
        tridiagonal[step, step] = coefficients[-1]
        length = float(torch.dot(image, image)) ** 0.5
        if step + 1 == steps or (step >= 23 and step % 8 == 7):
            ritz, vectors = torch.linalg.eigh(tridiagonal[: step + 1, : step + 1])
            value = float(ritz[-1])
            residual = length * abs(float(vectors[-1, -1]))
            gap = max(value - float(ritz[-2]), 1e-30) if step else residual
            converged = min(residual, residual * residual / max(gap, 1e-30)) <= 1e-7 * value
            if converged or step + 1 == steps:
                break
        # an invariant subspace is exhausted: zeros instead of noise
        if length <= 1e-5 * abs(float(tridiagonal[0, 0])):
            length = 0.0
        else:
            torch.mul(image, 1.0 / length, out=basis[step + 1])
        tridiagonal[step, step + 1] = tridiagonal[step + 1, step] = length
    top = torch.mv(vectors_so_far.T, vectors[:, -1]).double()
    energy = torch.dot(top, torch.mv(gram, top)) / torch.dot(top, top).clamp_min(1e-300)
    return energy.view(1), torch.tensor([converged])
