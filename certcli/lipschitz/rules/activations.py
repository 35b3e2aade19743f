"""Activations: one table for modules, functions and methods. Proofs: docs/bounds.md, section 3.

A row reads options from the module's attributes or from the call's arguments, which have the same
names, and returns the curve's bounds, or refuses options for which there are none.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm.layers as timm_layers
import torch
from timm.layers import activations as timm_activations
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine import curves
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.activations import ClippedReLU


@dataclass(frozen=True)
class Curve:
    """|f'| <= slope, |f(t)| <= growth |t| + offset and |f| <= most; inf where nothing is known."""

    slope: float
    why: str
    growth: float = 1.0
    offset: float = 0.0
    most: float = math.inf


def applied(ctx: Context, x: Value, curve: Curve) -> Value:
    """Return the value after a curve, entry by entry."""
    x = ctx.settle(x)
    old = x.size
    arith = ctx.arith
    growth, maximum, through_0 = (
        arith.const(curve.growth),
        curve.most,
        curve.offset == 0 and math.isfinite(curve.growth),
    )

    def peak() -> Any:
        if not math.isfinite(curve.growth):
            return arith.const(maximum)
        grown = growth * old.peak
        grown = grown if through_0 else grown + arith.const(curve.offset)
        return arith.minimum(grown, arith.const(maximum)) if math.isfinite(maximum) else grown

    return ctx.chain(
        x,
        arith.const(curve.slope),
        curve.why,
        (lambda: growth * old.fibre) if through_0 else None,
        axis=old.axis,
        total=(lambda: growth * old.total) if through_0 else None,
        peak=peak,
        shape=x.shape,
    )


def activation(
    *modules: type[nn.Module], functions: tuple[Any, ...] = (), methods: tuple[str, ...] = ()
) -> Callable[[Callable[..., Curve]], Callable[..., Curve]]:
    """Register a function from options to a curve; modules have the options as attributes,
    functions as arguments.

    The option `dtype` is neither: it is the precision in which the network runs.
    """

    def register(curve: Callable[..., Curve]) -> Callable[..., Curve]:
        parameters = inspect.signature(curve).parameters
        options = inspect.Signature(
            [option for name, option in parameters.items() if name != "dtype"]
        )

        def curve_of(ctx: Context, arguments: dict[str, Any]) -> Curve:
            for value in arguments.values():
                if isinstance(value, (int, float, Tensor)) and bool(
                    torch.isnan(torch.as_tensor(value)).any()
                ):
                    raise NoRule("an option that is not a number")
            return curve(**arguments, **({"dtype": ctx.dtype} if "dtype" in parameters else {}))

        def of_module(ctx: Context, module: nn.Module, x: Value) -> Value:
            return applied(
                ctx, x, curve_of(ctx, {name: getattr(module, name) for name in options.parameters})
            )

        def of_call(
            ctx: Context, x: Value, *args: Any, inplace: bool = False, **named: Any
        ) -> Value:
            ctx.require(isinstance(x, Value), "an option that depends on the image")
            if len(args) == len(options.parameters) + 1 and isinstance(args[-1], bool):
                args = args[:-1]  # inplace, which every functional form has last
            arguments = options.bind(*args, **named)
            arguments.apply_defaults()
            plain = {
                name: v.tensor if isinstance(v, Constant) else v
                for name, v in arguments.arguments.items()
            }
            if any(isinstance(value, Value) for value in plain.values()):
                raise NoRule("an option that depends on the image")
            return applied(ctx, x, curve_of(ctx, plain))

        rules.module(*modules)(of_module)
        rules.function(*functions)(of_call)
        rules.method(*methods)(of_call)
        return curve

    return register


@activation(nn.GELU, functions=(functional.gelu,))
def gelu(approximate: str = "none") -> Curve:
    if approximate == "tanh":
        return Curve(curves.GELU_TANH.slope, "largest slope of tanh-GELU, at x = 1.4185")
    _need(approximate == "none", f"GELU approximation {approximate}")
    return Curve(curves.GELU.slope, "largest slope of GELU, at x = sqrt 2")


@activation(timm_layers.GELU)
def timm_gelu() -> Curve:
    return gelu()


@activation(timm_layers.GELUTanh)
def timm_gelu_tanh() -> Curve:
    return gelu("tanh")


@activation(
    nn.SiLU, timm_activations.Swish, timm_activations.QuickGELU, functions=(functional.silu,)
)
def silu() -> Curve:
    """x sigmoid(a x) has the same slopes for every a > 0."""
    return Curve(curves.SILU.slope, "largest slope of x sigmoid(a x)")


@activation(nn.Mish, timm_activations.Mish, functions=(functional.mish,))
def mish() -> Curve:
    return Curve(curves.MISH.slope, "largest slope of x tanh(softplus(x))")


@activation(nn.Hardswish, timm_activations.HardSwish, functions=(functional.hardswish,))
def hard_swish() -> Curve:
    return Curve(curves.HARD_SWISH.slope, "largest slope of x relu6(x + 3) / 6, at x = 3")


@activation(
    nn.ReLU, timm_activations.HardMish, nn.Tanhshrink,
    functions=(functional.relu, functional.relu_, torch.relu, torch.relu_, functional.tanhshrink, torch.abs, torch.atan),
    methods=("relu", "relu_", "abs", "abs_", "atan"),
)  # fmt: skip
def slope_one() -> Curve:
    return Curve(1.0, "slope at most 1")


@activation(
    nn.Tanh, nn.Softsign, timm_activations.Tanh, functions=(torch.tanh, functional.softsign, torch.sin),
    methods=("tanh", "tanh_", "sin"),
)  # fmt: skip
def slope_one_within_one() -> Curve:
    return Curve(1.0, "slope at most 1", most=1.0)


@activation(functions=(torch.cos,), methods=("cos",))
def cosine() -> Curve:
    return Curve(1.0, "slope at most 1", growth=math.inf, most=1.0)


@activation(functions=(torch.erf,), methods=("erf", "erf_"))
def error_function() -> Curve:
    slope = curves.ERF.slope
    return Curve(slope, "largest slope of erf, 2 / sqrt(pi), at 0", growth=slope, most=1.0)


@activation(nn.ReLU6, functions=(functional.relu6,))
def relu6() -> Curve:
    return Curve(1.0, "slope at most 1", most=6.0)


@activation(nn.Hardtanh, functions=(functional.hardtanh, functional.hardtanh_))
def hard_tanh(min_val: float = -1.0, max_val: float = 1.0) -> Curve:
    return clamped(
        *(torch.tensor(float(limit), dtype=torch.float64) for limit in (min_val, max_val))
    )


def clamped(low: Tensor | None, high: Tensor | None) -> Curve:
    """Return the curve t -> min(max(t, low), high): at most |t| if 0 lies between the limits, else
    |t| or a limit.
    """
    limits = [limit.detach().double() for limit in (low, high) if limit is not None]
    _need(not any(bool(torch.isnan(limit).any()) for limit in limits), "clamping to NaN")
    around_0 = (low is None or bool((low <= 0).all())) and (high is None or bool((high >= 0).all()))
    largest = max((float(limit.abs().max()) for limit in limits), default=0.0)
    maximum = largest if len(limits) == 2 else math.inf
    return Curve(
        1.0, "clamping has slope at most 1", offset=0.0 if around_0 else largest, most=maximum
    )


@activation(ClippedReLU)
def clipped_relu(threshold: Tensor) -> Curve:
    return clamped(torch.zeros(1, dtype=torch.float64), threshold.clamp_min(0.0))


@activation(nn.LeakyReLU, functions=(functional.leaky_relu, functional.leaky_relu_))
def leaky_relu(negative_slope: float = 0.01) -> Curve:
    slope = max(1.0, abs(float(negative_slope)))
    return Curve(slope, "leaky ReLU", slope)


@activation(
    nn.PReLU, timm_activations.PReLU, functions=(functional.prelu, torch.prelu), methods=("prelu",)
)
def parametric_relu(weight: Tensor) -> Curve:
    largest = float(weight.detach().double().abs().max())
    return Curve(max(1.0, largest), "PReLU: the largest of 1 and |weight|", max(1.0, largest))


@activation(nn.RReLU, functions=(functional.rrelu, torch.rrelu))
def random_relu(lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Curve:
    """Leaky with the mean of two slopes; random in training mode, which is refused."""
    _need(not training, "a random slope (training mode)")
    slope = max(1.0, up(abs(lower + upper) / 2, 2))
    return Curve(slope, "the mean of two slopes", slope)


@activation(nn.ELU, functions=(functional.elu, functional.elu_))
def elu(alpha: float = 1.0) -> Curve:
    slope = max(1.0, abs(float(alpha)))
    return Curve(slope, "ELU", slope)


@activation(nn.CELU, functions=(functional.celu, torch.celu))
def celu(alpha: float = 1.0) -> Curve:
    _need(0 < alpha < math.inf, "CELU with alpha that is not positive and finite")
    return Curve(1.0, "CELU: slope at most 1")


@activation(nn.SELU, functions=(functional.selu, torch.selu, functional.selu_, torch.selu_))
def selu() -> Curve:
    return Curve(curves.SELU.slope, "SELU: scale times alpha", curves.SELU.slope)


@activation(nn.Softshrink, functions=(functional.softshrink,))
def soft_shrink(lambd: float = 0.5) -> Curve:
    _need(lambd >= 0, "softshrink with a negative threshold")
    return Curve(1.0, "slope at most 1")


@activation(
    nn.Sigmoid,
    timm_activations.Sigmoid,
    functions=(torch.sigmoid,),
    methods=("sigmoid", "sigmoid_"),
)
def sigmoid() -> Curve:
    return Curve(curves.SIGMOID.slope, "slope of sigmoid at most 1/4", growth=math.inf, most=1.0)


@activation(nn.Hardsigmoid, timm_activations.HardSigmoid, functions=(functional.hardsigmoid,))
def hard_sigmoid() -> Curve:
    return Curve(
        curves.HARD_SIGMOID.slope, "slope of hard sigmoid at most 1/6", growth=math.inf, most=1.0
    )


@activation(nn.Softplus, functions=(functional.softplus,))
def softplus(
    beta: float = 1.0, threshold: float = 20.0, *, dtype: torch.dtype | None = None
) -> Curve:
    """log(1 + exp(beta t)) / beta; for beta t > T torch returns t, a jump of log(1 + exp(-T)) /
    beta.

    A function with a jump has no constant: refused unless the jump is below the rounding of T
    itself.
    """
    _need(0 < beta < math.inf, "softplus with beta that is not positive and finite")
    rounding = torch.finfo(dtype or torch.float64).eps / 2
    hidden = threshold > 0 and math.log1p(math.exp(-threshold)) <= rounding * threshold
    _need(hidden, f"softplus jumps at its threshold of {threshold:g} by more than {dtype} rounds")
    return Curve(1.0, "slope of softplus at most 1", offset=up(math.log(2.0) / beta, 2))


@activation(nn.LogSigmoid, functions=(functional.logsigmoid,))
def log_sigmoid() -> Curve:
    """-softplus(-x)."""
    return Curve(1.0, "slope of log sigmoid at most 1", offset=up(math.log(2.0), 2))


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise NoRule(reason)
