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
from certcli.rounding.operation_errors import Followed, Operation, Rounding, Sizes, rules, scaled
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


_curve(
    functions=(torch.sin, torch.atan, torch.erf),
    methods=("sin", "atan", "erf", "erf_"),
    of_x=4,
)
_curve(functions=(torch.cos,), methods=("cos",), of_x=0, of_one=4)
# x - lambda is rounded where |x| > lambda, which is stored
_curve(nn.Softshrink, functions=(functional.softshrink,), of_x=4)
# a sum of two numbers of one sign, |log(1 + e^-|x|)| <= 1
_curve(nn.LogSigmoid, functions=(functional.logsigmoid,), of_x=4, of_one=8)
# exp may be taken less 1: an error of 1; 1.06 alpha < 2
_curve(
    nn.SELU,
    functions=(functional.selu, torch.selu, functional.selu_, torch.selu_),
    of_x=8,
    of_one=8,
)


def _within(op: Operation, x: Followed, of_x: float, of_one: float) -> Rounding:
    fixed = as_real(float(x.entries)).sqrt() * of_one
    size = as_real(of_x)
    return lambda sizes: (
        (sizes(x).total * size + fixed) * op.precision.function + op.underflow() * (size + 2.0)
    )


@rules.function(functional.elu, functional.elu_)
@covers("function")
def elu(op: Operation, x: Followed, alpha: float = 1.0, inplace: bool = False) -> Rounding:
    """alpha (e^x - 1) below 0: an error of 4 alpha `function` where e^x is taken less 1."""
    size = 4 * max(1.0, abs(float(alpha)))
    return _within(op, x, size, size)


@rules.function(functional.celu, torch.celu)
@covers("function")
def celu(op: Operation, x: Followed, alpha: float = 1.0, inplace: bool = False) -> Rounding:
    """alpha (e^z - 1), z = x / alpha a few units off, which moves e^z by |z| e^z < 1/2 of them."""
    op.require(2.0**-60 < float(alpha) < 2.0**60, f"alpha = {alpha}")
    return _within(op, x, 4.0, 8 * float(alpha))


@rules.function(functional.softplus)
@covers("function")
def softplus(op: Operation, x: Followed, beta: float = 1.0, threshold: float = 20.0) -> Rounding:
    """log(1 + e^z) / beta, z = beta x a few units off, has slope 1; so has the jump at z = T, whose
    height is below 2^-53 T / beta.
    """
    op.require(2.0**-60 < float(beta) < 2.0**60, f"beta = {beta}")
    return _within(op, x, 8.0, 8 / float(beta))


rules.module(nn.ELU)(with_attributes(elu, "alpha"))
rules.module(nn.CELU)(with_attributes(celu, "alpha"))
rules.module(nn.Softplus)(with_attributes(softplus, "beta", "threshold"))


@rules.method("prelu")
@rules.function(functional.prelu, torch.prelu)
@covers("entries")
def parametric_relu(op: Operation, x: Followed, weight: Any) -> Rounding:
    """A product with a stored number, for the entries below 0."""
    return scaled(op, x, op.stored(op.tensor(weight)))


rules.module(nn.PReLU, timm_activations.PReLU)(with_attributes(parametric_relu, "weight"))


@rules.function(functional.rrelu, torch.rrelu)
@covers("entries")
def random_relu(
    op: Operation, x: Followed, lower: float = 1 / 8, upper: float = 1 / 3, *_: Any, **__: Any
) -> Rounding:
    """A product with the rounded mean of two numbers, for the entries below 0."""
    share = as_real(8 * op.precision.unit) * (abs(float(lower)) + abs(float(upper)))
    return lambda sizes: sizes(x).total * share + op.underflow()


rules.module(nn.RReLU)(with_attributes(random_relu, "lower", "upper"))


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


@rules.function(functional.leaky_relu, functional.leaky_relu_)
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
