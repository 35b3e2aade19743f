"""Activations and other functions of one entry: one list of names for all domains."""

import math
import operator
from dataclasses import replace
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import timm.layers as timm_layers
import torch
from timm.layers import activations as timm_activations
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.engine.curves import (
    ERF,
    EXP,
    GELU,
    GELU_TANH,
    HARD_SIGMOID,
    HARD_SWISH,
    LOG,
    MISH,
    NAMED,
    RECIPROCAL,
    RSQRT,
    SELU,
    SIGMOID,
    SILU,
    SQRT,
    SQUARE,
    STEEP,
    TANH,
    Curve,
    Limit,
    Line,
    Named,
    Scalar,
    bent_below,
    enter_curve,
    gated,
    logistic,
    smooth,
)
from certcli.engine.table import NoRule
from certcli.nn.layers import ClippedReLU
from certcli.system.errors import raise_if


def up_by_roundings(number: float, roundings: int) -> float:
    """Return what is no smaller than a number > 0 after so many roundings."""
    return number * (1 + (roundings + 1) * 2.0**-52)


def _need(condition: bool, reason: str) -> None:
    raise_if(not condition, NoRule, reason)


def _is_moderate(number: float) -> bool:
    """Tell whether arguments that are multiplied or divided by it neither overflow nor vanish."""
    return 2.0**-60 < number < 2.0**60


def name_curve(
    known: Curve,
    *modules: type[nn.Module],
    functions: tuple[Any, ...] = (),
    methods: tuple[str, ...] = (),
    among: list[Named] = NAMED,
) -> None:
    """Enter the names of a curve without options."""
    enter_curve(*modules, functions=functions, methods=methods, among=among)(lambda: known)


name_curve(GELU, timm_layers.GELU)
name_curve(GELU_TANH, timm_layers.GELUTanh)
name_curve(SILU, nn.SiLU, timm_activations.Swish, functions=(F.silu,))
name_curve(MISH, nn.Mish, timm_activations.Mish, functions=(F.mish,))
name_curve(HARD_SWISH, nn.Hardswish, timm_activations.HardSwish, functions=(F.hardswish,))
name_curve(HARD_SIGMOID, nn.Hardsigmoid, timm_activations.HardSigmoid, functions=(F.hardsigmoid,))
name_curve(
    SIGMOID,
    nn.Sigmoid,
    timm_activations.Sigmoid,
    functions=(torch.sigmoid,),
    methods=("sigmoid", "sigmoid_"),
)
name_curve(TANH, nn.Tanh, timm_activations.Tanh, functions=(torch.tanh,), methods=("tanh", "tanh_"))
name_curve(ERF, functions=(torch.erf,), methods=("erf", "erf_"))
name_curve(SELU, nn.SELU, functions=(F.selu, torch.selu, F.selu_, torch.selu_))
name_curve(
    Curve("ReLU", torch.relu, slope=1.0, line=Line(0.0, 0.0, ((0.0, 1.0),))),
    nn.ReLU,
    functions=(F.relu, F.relu_, torch.relu, torch.relu_),
    methods=("relu", "relu_"),
)
name_curve(
    Curve("ReLU6", F.relu6, slope=1.0, limit=6.0, line=Line(0.0, 0.0, ((0.0, 1.0), (6.0, -1.0)))),
    nn.ReLU6,
    functions=(F.relu6,),
)
name_curve(
    Curve("abs", torch.abs, slope=1.0, line=Line(-1.0, 0.0, ((0.0, 2.0),))),
    functions=(torch.abs,),
    methods=("abs", "abs_"),
)
name_curve(
    smooth(
        "hard mish",
        lambda x: x / 2 * (x + 2).clamp(0, 2),
        third=0.0,
        breaks=((-2.0, 1.0), (0.0, 0.0)),
        bend=1.0,
        slope=1.0,
        rounded=(8, 0),
    ),
    timm_activations.HardMish,
)
name_curve(
    smooth("tanhshrink", F.tanhshrink, third=2.0, slope=1.0, bend=0.7698004, rounded=(4, 0)),
    nn.Tanhshrink,
    functions=(F.tanhshrink,),
)
name_curve(
    smooth(
        "softsign",
        F.softsign,
        third=6.0,
        breaks=((0.0, 0.0),),
        bend=2.0,
        slope=1.0,
        limit=1.0,
        rounded=(4, 0),
    ),
    nn.Softsign,
    functions=(F.softsign,),
)
name_curve(
    smooth("atan", torch.atan, third=2.0, slope=1.0, bend=0.6496, rounded=(4, 0)),
    functions=(torch.atan,),
    methods=("atan",),
)
name_curve(
    smooth("sin", torch.sin, third=1.0, slope=1.0, bend=1.0, limit=1.0, rounded=(4, 0)),
    functions=(torch.sin,),
    methods=("sin",),
)
name_curve(
    smooth(
        "cos", torch.cos, third=1.0, slope=1.0, bend=1.0, growth=math.inf, limit=1.0, rounded=(0, 4)
    ),
    functions=(torch.cos,),
    methods=("cos",),
)
name_curve(
    Curve(
        "log sigmoid",
        F.logsigmoid,
        lambda x: logistic(-x)[0],
        lambda x: -logistic(x)[1],
        lambda x: -logistic(x)[2],
        third=SIGMOID.bend,
        slope=1.0,
        bend=SIGMOID.slope,
        why="slope of log sigmoid at most 1",
        offset=up_by_roundings(math.log(2.0), 2),
        rounded=(4, 8),  # a sum of two numbers of one sign, |log(1 + e^-|x|)| <= 1
    ),
    nn.LogSigmoid,
    functions=(F.logsigmoid,),
)


name_curve(EXP, functions=(torch.exp,), methods=("exp", "exp_"), among=STEEP)
name_curve(LOG, functions=(torch.log,), methods=("log",), among=STEEP)
name_curve(SQRT, functions=(torch.sqrt,), methods=("sqrt",), among=STEEP)
name_curve(RSQRT, functions=(torch.rsqrt,), methods=("rsqrt",), among=STEEP)
name_curve(RECIPROCAL, functions=(torch.reciprocal,), methods=("reciprocal",), among=STEEP)


@enter_curve(nn.GELU, functions=(F.gelu,))
def gelu_curve(approximate: str = "none") -> Curve:
    _need(approximate in ("none", "tanh"), f"GELU approximation {approximate}")
    return GELU if approximate == "none" else GELU_TANH


@enter_curve(timm_activations.QuickGELU)
def quick_gelu() -> Curve:
    """x sigmoid(a x) has the slopes of x sigmoid(x)."""
    a = 1.702
    return gated(
        "quick GELU",
        lambda x: x * torch.sigmoid(a * x),
        rate=a,
        third=SILU.third * (a * a) * (1 + 2.0**-40),
        slope=SILU.slope,
        bend=SILU.bend * a * (1 + 2.0**-40),
        why=SILU.why,
        rounded=SILU.rounded,
    )


@enter_curve(methods=("square", "pow"), functions=(torch.square, torch.pow, operator.pow))
def power_curve(exponent: float = 2) -> Curve:
    _need(exponent in (1, 2), f"the power {exponent}")
    return (
        SQUARE
        if exponent == 2
        else Curve("itself", lambda x: x, slope=1.0, line=Line(1.0, 0.0, ()))
    )


@enter_curve(nn.Hardtanh, functions=(F.hardtanh, F.hardtanh_))
def hard_tanh(min_val: float = -1.0, max_val: float = 1.0) -> Curve:
    return clamped_curve(min_val, max_val)


@enter_curve(methods=("clamp", "clamp_", "clip", "clip_"), functions=(torch.clamp, torch.clip))
def clamped_curve(min: Limit | None = None, max: Limit | None = None) -> Curve:
    """t -> min(max(t, low), high): at most |t| if 0 lies between the limits, else |t| or a
    limit."""
    low, high = (
        None if limit is None else torch.as_tensor(limit, dtype=torch.float64).detach()
        for limit in (min, max)
    )
    limits = [limit for limit in (low, high) if limit is not None]
    _need(not any(bool(limit.isnan().any()) for limit in limits), "clamping to NaN")
    around_0 = (low is None or bool((low <= 0).all())) and (high is None or bool((high >= 0).all()))
    largest = torch.stack([limit.abs().max() for limit in limits]).max() if limits else 0.0
    ordered = low is None or high is None or bool((low <= high).all())
    ends = ((min, low, 1.0), (max, high, -1.0))
    kinks = tuple(
        (end if isinstance(limit, Tensor) else float(end), rise)
        for limit, end, rise in ends
        if end is not None
    )
    line = Line(1.0, 0.0, kinks) if low is None else Line(0.0, low, kinks)
    finite = all(bool(limit.isfinite().all()) for limit in limits)
    return Curve(
        "clamping",
        lambda x: x.clamp(low, high),
        slope=1.0,
        why="clamping has slope at most 1",
        offset=0.0 if around_0 else float(largest),
        limit=float(largest) if len(limits) == 2 else math.inf,
        line=line if ordered and finite else None,
    )


@enter_curve(methods=("clamp_min", "clamp_min_"), functions=(torch.clamp_min,))
def clamped_below(min: Limit) -> Curve:
    return clamped_curve(min, None)


@enter_curve(methods=("clamp_max", "clamp_max_"), functions=(torch.clamp_max,))
def clamped_above(max: Limit) -> Curve:
    return clamped_curve(None, max)


@enter_curve(ClippedReLU)
def clipped_relu_curve(threshold: Tensor) -> Curve:
    return clamped_curve(0.0, threshold.clamp_min(0.0))


def _leaky(name: str, slope: float, value: Scalar, why: str) -> Curve:
    largest = max(1.0, abs(slope))
    line = Line(slope, 0.0, ((0.0, 1.0 - slope),))
    return Curve(name, value, slope=largest, why=why, growth=largest, line=line)


@enter_curve(nn.LeakyReLU, functions=(F.leaky_relu, F.leaky_relu_))
def leaky_relu_curve(negative_slope: float = 0.01) -> Curve:
    slope = float(negative_slope)
    return _leaky("leaky ReLU", slope, lambda x: F.leaky_relu(x, slope), "leaky ReLU")


@enter_curve(nn.RReLU, functions=(F.rrelu, torch.rrelu))
def random_relu_curve(lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Curve:
    """Leaky with the mean of two slopes; random in training mode, which is refused."""
    _need(not training, "a random slope (training mode)")
    mean = (lower + upper) / 2
    known = _leaky("RReLU", mean, lambda x: F.leaky_relu(x, mean), "the mean of two slopes")
    return replace(
        known,
        slope=max(1.0, up_by_roundings(abs(mean), 2)),
        growth=max(1.0, up_by_roundings(abs(mean), 2)),
    )


@enter_curve(nn.PReLU, timm_activations.PReLU, functions=(F.prelu, torch.prelu), methods=("prelu",))
def parametric_relu_curve(weight: Tensor) -> Curve:
    weights = weight.detach().double()
    slope = float(weights.abs().max())
    why = "PReLU: the largest of 1 and |weight|"
    known = _leaky("PReLU", slope, lambda x: F.prelu(x, weights), why)
    return (
        _leaky("PReLU", float(weights), known.value, why)
        if len(weights) == 1
        else replace(known, line=None)
    )


@enter_curve(nn.ELU, functions=(F.elu, F.elu_))
def elu_curve(alpha: float = 1.0) -> Curve:
    """Computed, e^x may be taken less 1."""
    bend = abs(float(alpha))
    slope = max(1.0, bend)
    return smooth(
        "ELU",
        bent_below(float(alpha)),
        third=bend,
        breaks=((0.0, up_by_roundings(abs(1.0 - alpha), 1)),),
        bend=bend,
        slope=slope,
        why="ELU",
        growth=slope,
        rounded=(4 * slope, 4 * slope),
    )


@enter_curve(nn.CELU, functions=(F.celu, torch.celu))
def celu_curve(alpha: float = 1.0) -> Curve:
    """x / alpha, computed, is a few units off, which moves e^z by |z| e^z < 1/2 of them."""
    _need(0 < alpha < math.inf, "CELU with alpha that is not positive and finite")
    rounded = (4, 8 * float(alpha)) if _is_moderate(alpha) else None
    bend = up_by_roundings(1.0 / alpha, 1)
    return smooth(
        "CELU",
        bent_below(float(alpha), float(alpha)),
        third=up_by_roundings(bend * bend, 1),
        breaks=((0.0, 0.0),),
        bend=bend,
        slope=1.0,
        why="CELU: slope at most 1",
        rounded=rounded,
    )


@enter_curve(nn.Softshrink, functions=(F.softshrink,))
def soft_shrink(lambd: float = 0.5) -> Curve:
    _need(lambd >= 0, "softshrink with a negative threshold")
    line = Line(1.0, lambd, ((-lambd, -1.0), (lambd, 1.0)))
    return Curve(
        "softshrink", lambda x: F.softshrink(x, lambd), slope=1.0, line=line, rounded=(4, 0)
    )


@enter_curve(nn.Softplus, functions=(F.softplus,))
def softplus_curve(
    beta: float = 1.0, threshold: float = 20.0, *, dtype: torch.dtype | None = None
) -> Curve:
    """log(1 + exp(beta t)) / beta; for beta t > T torch returns t, a jump of log(1 + exp(-T)) / beta.

    A function with a jump has no constant: refused unless the jump is below the rounding of T
    itself.
    """
    _need(0 < beta < math.inf, "softplus with beta that is not positive and finite")
    rounding = torch.finfo(dtype or torch.float64).eps / 2
    hidden = threshold > 0 and math.log1p(math.exp(-threshold)) <= rounding * threshold
    _need(hidden, f"softplus jumps at its threshold of {threshold:g} by more than {dtype} rounds")
    return Curve(
        "softplus",
        lambda x: F.softplus(x, beta, 40.0),
        lambda x: logistic(beta * x)[0],
        lambda x: beta * logistic(beta * x)[1],
        lambda x: beta * beta * logistic(beta * x)[2],
        third=up_by_roundings(SIGMOID.bend * beta * beta, 4),
        slope=1.0,
        bend=up_by_roundings(SIGMOID.slope * beta, 2),
        why="slope of softplus at most 1",
        offset=up_by_roundings(math.log(2.0) / beta, 2),
        # beta t is a few units off, of slope 1; so is the jump
        rounded=(8, 8 / float(beta)) if _is_moderate(beta) else None,
    )
