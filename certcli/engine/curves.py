"""Functions of one entry: what is known of each, in one record for all domains.

Proofs: docs/bounds.md, section 3. `tests/engine/test_curves.py` sweeps every number here.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.engine.table import NoRule, RuleTable
from certcli.engine.walk import Constant
from certcli.system.errors import raise_if

Scalar = Callable[[Tensor], Tensor]
Limit = Tensor | float


def unknown_derivative(x: Tensor) -> Tensor:
    """The derivative of a curve that has none, or jumps."""
    raise NoRule("a curve whose second derivative jumps")


@dataclass(frozen=True)
class Line:
    """slope x + start to the left of all kinks; at each place the slope rises by a number."""

    slope: float
    start: Limit
    kinks: tuple[tuple[Limit, float], ...]


@dataclass(frozen=True)
class Curve:
    """f, f', f'' on float64 tensors, and bounds that are rounded up; inf where nothing is known.

    Attributes:
        later: f'''; None: it is found by differentiation of f''.
        third: sup |f'''|; 0.0: f' and all later derivatives are monotone, so that their ends bound them.
        fourth: sup |f''''|.
        breaks: (place, jump) where f'' jumps, and f' by so much at most; all of the above holds
            between them, and values of f' and f'' there are those of one side.
        relative: f is a power of x > 0, so an interval counts as short relative to x.
        slope: sup |f'|.
        bend: sup |f''|.
        why: the slope in words.
        growth, offset, limit: |f(t)| <= growth |t| + offset and |f| <= limit.
        line: f where it is piecewise linear.
        rounded: (a, b) where f is computed within a |x| + b units of elementary functions; None: only
            comparisons and products with numbers of `line`, or nothing is known.
        cubes: x^3 is computed on the way.
        units: where f is computed within so many units of elementary functions, relative to itself; 0:
            see `rounded`.
    """

    name: str
    value: Scalar
    first: Scalar = unknown_derivative
    second: Scalar = unknown_derivative
    later: Scalar | None = None
    third: float = math.inf
    fourth: float = math.inf
    breaks: tuple[tuple[float, float], ...] = ()
    relative: bool = False
    slope: float = math.inf
    bend: float = math.inf
    why: str = "slope at most 1"
    growth: float = 1.0
    offset: float = 0.0
    limit: float = math.inf
    line: Line | None = None
    rounded: tuple[float, float] | None = None
    cubes: bool = False
    units: float = 0.0


def _autograd_derivative(f: Scalar) -> Scalar:
    def derivative(x: Tensor) -> Tensor:
        with torch.enable_grad():
            start = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(f(start).sum(), start, create_graph=x.requires_grad)
        return slope

    return derivative


def smooth(name: str, value: Scalar, **facts: Any) -> Curve:
    """Return a curve whose derivatives are found by differentiation."""
    first = _autograd_derivative(value)
    return Curve(name, value, first, _autograd_derivative(first), **facts)


def derivative(f: Curve) -> Curve:
    """Return f' as a curve, for an f without breaks."""
    third = 0.0 if f.third == 0 else f.fourth
    facts: dict[str, Any] = {"third": third, "bend": f.third, "relative": f.relative}
    later = f.later or _autograd_derivative(f.second)
    return Curve(f"the slope of {f.name}", f.first, f.second, later, **facts)


def logistic(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return s(x) = 1 / (1 + e^-x) and its first three derivatives."""
    s = torch.sigmoid(x)
    slope = s * (1 - s)
    return s, slope, slope * (1 - 2 * s), slope * (1 - 6 * slope)


def gated(name: str, value: Scalar, rate: float, cubic: float = 0.0, **facts: Any) -> Curve:
    """Return x s(u), u = rate x + cubic x^3, s the logistic function; value: how it is computed."""

    def derivatives(x: Tensor, order: int) -> Tensor:
        square = cubic * x * x
        s, first, second, third = logistic((rate + square) * x)
        steep = rate + 3 * square  # u'; u'' = 6 cubic x, u''' = 6 cubic
        of_gate = [s, first * steep]
        if order > 1:
            of_gate.append(second * steep * steep + 6 * cubic * first * x)
        if order > 2:
            of_third = third * steep * steep * steep
            of_gate.append(of_third + 6 * cubic * (3 * second * steep * x + first))
        return order * of_gate[order - 1] + x * of_gate[order]

    first, second, later = (functools.partial(derivatives, order=order) for order in (1, 2, 3))
    return Curve(name, value, first, second, later, **facts)


def _density(x: Tensor) -> Tensor:
    return torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))


def _cumulative(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))


# GELU' = Phi + x phi is Phi(sqrt 2) + sqrt(2) phi(sqrt 2) = 1.12890414518... at most; 1.12, as
# published, is below it. GELU'' is 2 phi(0) = 0.79788456... at most, GELU''' 0.7796.
GELU = Curve(
    "GELU",
    lambda x: x * _cumulative(x),
    lambda x: _cumulative(x) + x * _density(x),
    lambda x: _density(x) * (2 - x * x),
    lambda x: _density(x) * x * (x * x - 4),
    0.78,
    1.5957692,  # GELU'''' = phi(x) (x^2 (7 - x^2) - 4): twice as much as GELU'' at 0
    slope=1.12890415,
    bend=0.7978846,
    why="largest slope of GELU, at x = sqrt 2",
    rounded=(4, 0),
)
GELU_TANH = gated(  # (1 + tanh(u / 2)) / 2 = s(u)
    "tanh GELU",
    lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    rate=math.sqrt(8 / math.pi),
    cubic=math.sqrt(8 / math.pi) * 0.044715,
    third=0.9,
    fourth=1.604,
    slope=1.12901,
    bend=0.7978846,
    why="largest slope of tanh-GELU, at x = 1.4185",
    rounded=(4, 0),
    cubes=True,
)
# SiLU'' is 1/2 at 0, the largest; the third derivative 0.3082 at most. Of x g(x) with 0 <= g <= 1, what is off by a
# factor in the argument of g moves |g| by 1/2 of that factor at most
SILU = gated(
    "SiLU",
    lambda x: x * torch.sigmoid(x),
    rate=1.0,
    third=0.309,
    fourth=0.5001,
    slope=1.0998394,
    bend=0.5,
    why="largest slope of x sigmoid(a x)",
    rounded=(6, 0),
)
# s'' = s' (1 - 2 s) is 1 / (6 sqrt 3) at most, s' (1 - 6 s + 6 s^2) is -1/8 at 0; tanh x = 2 s(2 x) - 1
SIGMOID = Curve(
    "sigmoid",
    torch.sigmoid,
    lambda x: logistic(x)[1],
    lambda x: logistic(x)[2],
    lambda x: logistic(x)[3],
    third=0.125,
    fourth=0.128,
    slope=0.25,
    bend=0.0962251,
    why="slope of sigmoid at most 1/4",
    growth=math.inf,
    limit=1.0,
    rounded=(0, 4),
)
TANH = Curve(
    "tanh",
    torch.tanh,
    lambda x: 4 * logistic(2 * x)[1],
    lambda x: 8 * logistic(2 * x)[2],
    lambda x: 16 * logistic(2 * x)[3],
    third=2.0,
    fourth=4.086,
    slope=1.0,
    bend=0.7698004,
    limit=1.0,
    rounded=(2, 0),
)
MISH = smooth(
    "mish",
    lambda x: x * torch.tanh(functional.softplus(x)),
    third=0.5885,
    slope=1.0886,
    bend=0.64421,
    why="largest slope of x tanh(softplus(x))",
    rounded=(8, 0),
)
_ERF = math.nextafter(math.nextafter(2 / math.sqrt(math.pi), math.inf), math.inf)
ERF = smooth(
    "erf",
    torch.erf,
    third=2.2568,
    slope=_ERF,
    bend=0.9679,
    why="largest slope of erf, 2 / sqrt(pi), at 0",
    growth=_ERF,
    limit=1.0,
    rounded=(4, 0),
)
SQUARE = Curve(
    "square",
    torch.square,
    lambda x: 2 * x,
    lambda x: 2 + 0 * x,
    third=0.0,
    bend=2.0,
    growth=math.inf,
)

# all derivatives are monotone where x > 0; 1 / sqrt(x) may be a root and a quotient
_steep = functools.partial(Curve, third=0.0, growth=math.inf, units=2.0)
EXP = _steep("exp", torch.exp, torch.exp, torch.exp)
LOG = _steep("log", torch.log, lambda x: 1 / x, lambda x: -1 / (x * x), relative=True)
RECIPROCAL = _steep(
    "1/x", lambda x: 1 / x, lambda x: -1 / (x * x), lambda x: 2 / x**3, relative=True
)
RSQRT = _steep(
    "1/sqrt(x)", torch.rsqrt, lambda x: -0.5 * x**-1.5, lambda x: 0.75 * x**-2.5, relative=True
)
SQRT = _steep(
    "sqrt(x)",
    torch.sqrt,
    lambda x: 0.5 * x**-0.5,
    lambda x: -0.25 * x**-1.5,
    relative=True,
)


def bent_below(alpha: float, width: float = 1.0, scale: float = 1.0) -> Scalar:
    """scale x above 0, scale alpha (e^(x / width) - 1) below."""
    return lambda x: scale * torch.where(x > 0, x, alpha * torch.expm1(x.clamp_max(0) / width))


# exp may be taken less 1: an error of 1; 1.06 alpha < 2
SELU = smooth(
    "SELU",
    bent_below(1.6732632423543772848170429916717, 1.0, 1.0507009873554804934193349852946),
    third=1.7580994,
    breaks=((0.0, 0.7073984),),
    bend=1.7580994,
    slope=1.7580994,
    growth=1.7580994,
    why="SELU: scale times alpha",
    rounded=(8, 8),
)
# x + 3 is off by 3 units where g is neither 0 nor 1
HARD_SWISH = smooth(
    "hard swish",
    lambda x: x * (x + 3).clamp(0, 6) / 6,
    third=0.0,
    breaks=((-3.0, 0.5), (3.0, 0.5)),
    bend=math.nextafter(1 / 3, 1),
    slope=1.5,
    why="largest slope of x relu6(x + 3) / 6, at x = 3",
    rounded=(8, 0),
)
_SIXTH = math.nextafter(1 / 6, math.inf)
HARD_SIGMOID = Curve(
    "hard sigmoid",
    functional.hardsigmoid,
    slope=_SIXTH,
    why="slope of hard sigmoid at most 1/6",
    growth=math.inf,
    limit=1.0,
    line=Line(0.0, 0.0, ((-3.0, 1 / 6), (3.0, -1 / 6))),
    rounded=(0, 8),
)

Describe = Callable[..., Curve]


@dataclass(frozen=True)
class Named:
    """The modules, functions and methods of a curve; describe: options -> Curve, or NoRule."""

    describe: Describe
    modules: tuple[type[nn.Module], ...]
    functions: tuple[Any, ...]
    methods: tuple[str, ...]


NAMED: list[Named] = []
STEEP: list[Named] = []
"""Curves of no bounded slope, which only domains that know where their arguments are have."""


def enter_curve(
    *modules: type[nn.Module],
    functions: tuple[Any, ...] = (),
    methods: tuple[str, ...] = (),
    among: list[Named] = NAMED,
) -> Callable[[Describe], Describe]:
    """Enter names. Modules have the options as attributes, functions as arguments.

    The option `dtype` is neither: it is the precision in which the network runs.
    """

    def register(describe: Describe) -> Describe:
        among.append(Named(describe, modules, functions, methods))
        return describe

    return register


def curve_of(module: nn.Module) -> Curve | None:
    """Return the curve that a module is, if it is one without an option of its precision."""
    for named in NAMED:
        options = inspect.signature(named.describe).parameters
        if type(module) in named.modules and "dtype" not in options:
            return named.describe(**{name: getattr(module, name) for name in options})
    return None


def register_curves(
    table: RuleTable,
    values: type | tuple[type, ...],
    transfer: Callable[[Any, Any, Curve], Any],
    names: Sequence[Named] = NAMED,
    mark: Callable[[Any], Any] = lambda rule: rule,
) -> None:
    """Register all names in a domain's table; transfer: (context, value, curve) -> value.

    Args:
        values: the types of the domain's values.
        mark: adds to each rule what the domain notes of it.
    """
    for named in names:
        of_module, of_call = map(mark, _rules(named.describe, values, transfer))
        table.module(*named.modules)(of_module)
        table.function(*named.functions)(of_call)
        table.method(*named.methods)(of_call)


def _rules(describe: Describe, values: Any, transfer: Any) -> tuple[Any, Any]:
    parameters = inspect.signature(describe).parameters
    options = inspect.Signature([option for name, option in parameters.items() if name != "dtype"])

    def described(ctx: Any, arguments: dict[str, Any]) -> Curve:
        for value in arguments.values():
            number = isinstance(value, (int, float, Tensor))
            raise_if(
                number and bool(torch.isnan(torch.as_tensor(value)).any()),
                NoRule,
                "an option that is not a number",
            )
        dtype = {"dtype": getattr(ctx, "dtype", None)} if "dtype" in parameters else {}
        return describe(**arguments, **dtype)

    def of_module(ctx: Any, module: nn.Module, x: Any) -> Any:
        arguments = {name: getattr(module, name) for name in options.parameters}
        return transfer(ctx, x, described(ctx, arguments))

    def of_call(ctx: Any, x: Any, *args: Any, inplace: bool = False, **named: Any) -> Any:
        if len(args) == len(options.parameters) + 1 and isinstance(args[-1], bool):
            args = args[:-1]  # inplace, which every functional form has last
        arguments = options.bind(*args, **named)
        arguments.apply_defaults()
        plain = {
            name: part.tensor if isinstance(part, Constant) else part
            for name, part in arguments.arguments.items()
        }
        if not isinstance(x, values) or any(isinstance(part, values) for part in plain.values()):
            raise NoRule("an option that depends on the image")
        return transfer(ctx, x, described(ctx, plain))

    return of_module, of_call
