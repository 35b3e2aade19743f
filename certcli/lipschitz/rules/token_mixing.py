"""Token mixing with a constant of 1: orthogonal matrices over tokens, and hard attention. Proofs: docs/bounds.md, 11."""

from typing import Any

from torch import Tensor, nn

from certcli.engine.table import runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.orthogonal_mixing import OrthogonalMixing, TokenMaxMin


def _plain_maps(module: OrthogonalMixing) -> bool:
    return all(runs_known_code(part, nn.Linear) and part.bias is None for part in module.maps)


@rules.module(OrthogonalMixing, when=_plain_maps)
def orthogonal_mixing(ctx: Context, module: OrthogonalMixing, x: Value) -> Value:
    """[M_h x_h]_h + p: heads are disjoint, so max_h |M_h|, taken from the matrices as they are."""
    arith = ctx.arith
    norms = [
        arith.sigma(arith.matrix(part.weight), f"{ctx.path}.maps.{h}")  # type: ignore[arg-type]
        for h, part in enumerate(module.maps)
    ]
    largest = norms[0]
    for norm in norms[1:]:
        largest = arith.maximum(largest, norm)
    why = f"{len(norms)} heads mix their tokens by matrices: the largest of their spectral norms"
    return _mixed(ctx, x, largest, module.shift, why, before=False)


@rules.module(TokenMaxMin)
def token_max_min(ctx: Context, module: TokenMaxMin, x: Value) -> Value:
    """The entries of x + p, in another order within each channel at every point: 1."""
    one = ctx.arith.const(1.0)
    return _mixed(ctx, x, one, module.shift, "pairs of tokens sorted in each channel: a permutation at every point")


def _mixed(ctx: Context, x: Value, constant: Any, shift: Tensor, why: str, before: bool = True) -> Value:
    """The value after a mixing of tokens with this constant in every channel, whose shift p comes before or after it."""
    ctx.require(len(x.shape) == 3, "token mixing of something else than tokens")
    x, arith = ctx.settle(x), ctx.arith
    old = x.size

    def moved() -> Any:
        length = arith.length(arith.matrix(shift.reshape(-1, 1)))
        return constant * length if before else length

    # a column (one channel of all tokens) is mapped to a column; tokens themselves may grow
    return ctx.chain(
        x,
        constant,
        why,
        lambda: constant * old.fibre_along(-2) + moved(),
        axis=-2,
        total=lambda: constant * old.total + moved(),
    )
