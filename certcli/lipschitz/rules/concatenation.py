"""Concatenation. Proofs: docs/bounds.md, section 8.3."""

from collections.abc import Sequence
from typing import Any

import torch

from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


@rules.function(torch.cat, torch.concat, torch.concatenate, torch.stack)
def concatenate(ctx: Context, tensors: Sequence[Any], dim: int = 0) -> Value:
    """Tensors side by side: squares of constants add; constant tensors add nothing."""
    if len(tensors) == 1 and ctx.kind != "stack" and isinstance(tensors[0], Value):
        return tensors[0]
    values = [ctx.settle(tensor) for tensor in tensors if isinstance(tensor, Value)]
    fixed = [tensor.tensor for tensor in tensors if isinstance(tensor, Constant)]
    ctx.require(len(values) + len(fixed) == len(tensors), "a list with something else than tensors")
    arith, shape = ctx.arith, tuple(ctx.shape)
    stacked = ctx.kind == "stack"
    place = dim % len(shape) - len(shape)

    def entries(fibres: bool) -> Any:
        lengths = [value.size.fibre_along(-1) if fibres else value.size.peak for value in values]
        for tensor in fixed:
            flat = tensor.detach().double().reshape(-1, tensor.shape[-1] if tensor.dim() else 1)
            lengths.append(arith.longest(flat) if fibres else ctx.largest_entry(tensor))
        if fibres and place == -1:
            return arith.root_sum_of_squares(lengths)
        return arith.largest(lengths)

    def total() -> Any:
        sizes = [value.size.total for value in values]
        sizes += [arith.length(arith.matrix(tensor.reshape(-1, 1))) for tensor in fixed]
        return arith.root_sum_of_squares(sizes)

    fibre = None if stacked and place == -1 else (lambda: entries(fibres=True))
    size = Size(arith, shape, fibre, -1, total, lambda: entries(fibres=False))
    if len(values) == 1:
        return Value(values[0].base, size, None, values[0].proof, shape)
    return ctx.join("concatenation", values, "squares of side-by-side parts add", size)
