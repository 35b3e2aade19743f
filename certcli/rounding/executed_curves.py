"""What rounding adds in a function of one entry. Proofs: docs/soundness.md."""

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import operator
from typing import Any

import torch
from timm.layers import GELU as TimmGELU
from timm.layers import GELUTanh
from timm.layers import activations as timm_activations
from torch import nn
from torch.nn import functional

from certcli.engine.table import with_attributes
from certcli.lipschitz.numerics.real import INF, Real, as_real
from certcli.rounding.algorithms import covers
from certcli.rounding.operation_errors import Followed, Operation, Rounding, Sizes, rules
from certcli.rounding.precisions import compounded


def _curve(
    *modules: type[nn.Module],
    functions: tuple[Any, ...] = (),
    methods: tuple[str, ...] = (),
    of_x: int,
    of_one: int = 0,
) -> None:
    """Register a curve computed within `function` (of_x |x_i| + of_one), two units and more."""

    @covers("function")
    def rounding(op: Operation, x: Followed, *_: Any, **__: Any) -> Rounding:
        fixed = as_real(float(x.entries)).sqrt() * float(of_one)
        return lambda sizes: (
            (sizes(x).total * float(of_x) + fixed) * op.precision.function + op.underflow() * 2.0
        )

    rules.module(*modules)(covers("function")(lambda op, module, x: rounding(op, x)))
    rules.function(*functions)(rounding)
    rules.method(*methods)(rounding)


# x g(x) with 0 <= g <= 1: what is off by a factor in the argument of g moves |g| by 1/2 of that
# factor at most
_curve(
    nn.SiLU,
    timm_activations.Swish,
    timm_activations.QuickGELU,
    functions=(functional.silu,),
    of_x=6,
)
_curve(nn.Mish, timm_activations.Mish, functions=(functional.mish,), of_x=8)
# x + 3 and x + 2 are off by 3 units where g is neither 0 nor 1
_curve(nn.Hardswish, timm_activations.HardSwish, functions=(functional.hardswish,), of_x=8)
_curve(timm_activations.HardMish, of_x=8)
# |tanh x| <= |x|
_curve(
    nn.Tanh,
    timm_activations.Tanh,
    functions=(torch.tanh,),
    methods=("tanh", "tanh_"),
    of_x=2,
)
_curve(nn.Tanhshrink, functions=(functional.tanhshrink,), of_x=4)
_curve(nn.Softsign, functions=(functional.softsign,), of_x=4)
_curve(nn.Sigmoid, timm_activations.Sigmoid, functions=(torch.sigmoid,),
       methods=("sigmoid", "sigmoid_"), of_x=0, of_one=4)  # fmt: skip
_curve(
    nn.Hardsigmoid,
    timm_activations.HardSigmoid,
    functions=(functional.hardsigmoid,),
    of_x=0,
    of_one=8,
)


@rules.function(functional.gelu)
@covers("function")
def gelu(op: Operation, x: Followed, approximate: str = "none") -> Rounding:
    """x times a number of [0, 1], off by <= 4 `function`; the tanh form cubes on its way."""

    def rounding(sizes: Sizes) -> Real:
        peak = sizes(x).peak
        if approximate != "none" and not op.precision.fits(peak * peak * peak):
            return INF
        return sizes(x).total * (4 * op.precision.function) + op.underflow()

    return rounding


rules.module(nn.GELU)(with_attributes(gelu, "approximate"))
rules.module(TimmGELU)(covers("function")(lambda op, module, x: gelu(op, x)))
rules.module(GELUTanh)(covers("function")(lambda op, module, x: gelu(op, x, "tanh")))


@rules.function(functional.leaky_relu)
@covers("entries")
def leaky_relu(
    op: Operation, x: Followed, negative_slope: float = 0.01, inplace: bool = False
) -> Rounding:
    """A product with a number that is stored, for the entries below 0."""
    share = compounded(as_real(4 * op.precision.unit)) * abs(float(negative_slope))
    return lambda sizes: sizes(x).total * share + op.underflow()


rules.module(nn.LeakyReLU)(with_attributes(leaky_relu, "negative_slope"))


@rules.method("square", "pow")
@rules.function(torch.square, torch.pow, operator.pow)
@covers("entries")
def squared(op: Operation, x: Followed, exponent: Any = 2) -> Rounding:
    """|x^2| <= max |x_i| |x|; a power of 1 is the tensor itself."""
    op.require(exponent in (1, 2), f"the power {exponent}")
    return lambda sizes: sizes(x).peak * sizes(x).total * (2 * op.precision.unit) + op.underflow()
