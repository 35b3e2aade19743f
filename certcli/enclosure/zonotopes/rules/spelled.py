"""Attention that is written out: products of matrices, and softmax over the last axis."""

import operator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes.attention import matmul, softmax
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.table import ZonotopeContext, rules
from certcli.engine.table import NoRule, with_attributes


@rules.function(operator.matmul, torch.matmul, torch.bmm)
@rules.method("matmul", "bmm")
def product_of_matrices(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    if not isinstance(x, Form) or not isinstance(y, Form):
        raise NoRule("a product of matrices with a constant")
    if x.shape[:-2] != y.shape[:-2] or min(len(x.shape), len(y.shape)) < 3:
        raise NoRule("a product of matrices that repeats a tensor")
    return matmul(x, y)


@rules.function(torch.softmax, F.softmax)
@rules.method("softmax")
def softmax_of_rows(
    ctx: ZonotopeContext, x: Form, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Form:
    require_rows(len(x.shape), dim, dtype)
    ctx.inner["p"] = softmax(x)
    probabilities: Form = ctx.inner["p"]
    return probabilities


def require_rows(axes: int, dim: int | None, dtype: Any) -> None:
    """Raise NoRule for softmax over another axis than the last, or in another type."""
    if dim is None or dim % axes != axes - 1 or axes < 2 or dtype is not None:
        raise NoRule("softmax over another axis than the last")


rules.module(nn.Softmax)(with_attributes(softmax_of_rows, "dim"))
