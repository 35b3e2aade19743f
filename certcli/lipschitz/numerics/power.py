"""Power iteration with a memory: singular vectors are kept between calls, so that one iteration a
step is enough.

What it finds approaches spectral norms from below. For losses, penalties and projections; never a
bound.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COLD = 30
"""Iterations of a start from random vectors."""
_EXACT_WORK = 2**31  # of the eigenproblems of a cold start, (number) x (side)^3: about two seconds
_LEAST = 1e-30


def block_norms(
    blocks: Tensor, vectors: dict[str, Tensor], name: str, iterations: int = 1
) -> Tensor:
    """sigma(W_g) at once, with gradient u v^T: (g, m, n) -> (g,). Renews vectors[name], (g, m)."""
    fixed = blocks.detach()
    with torch.no_grad():
        start = warm(vectors.get(name), blocks.shape[:2], fixed)
        u = leading(fixed) if start is None else start.unsqueeze(-1)
        for _ in range(max(1, iterations)):
            v = unit(fixed.mT @ u)
            u = unit(fixed @ v)
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
        return (top if rows == side else unit(wide @ top)).to(blocks)
    u = random_like((count, rows, 1), blocks)
    for _ in range(COLD):
        u = unit(blocks @ (blocks.mH @ u))
    return u


def warm(vector: Tensor | None, shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Return the vectors of the last call, if they fit."""
    return vector.to(like) if vector is not None and vector.shape == torch.Size(shape) else None


def random_like(shape: Sequence[int], like: Tensor) -> Tensor:
    """Standard normal numbers, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(tuple(shape), generator=generator, dtype=like.dtype).to(like.device)


def unit(x: Tensor) -> Tensor:
    """Columns of length 1 (or 0): (..., m, 1)."""
    return x / torch.linalg.vector_norm(x, dim=-2, keepdim=True).clamp_min(_LEAST)
