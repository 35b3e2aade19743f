"""Each operation of a traced network alone, on operands of scales at which one term of its rounding
is the largest.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from certcli.engine.replay import noise_like
from certcli.engine.trace import executed
from certcli.lipschitz.numerics.real import as_real
from certcli.rounding import NeighbourErrors
from certcli.rounding.arithmetics import Precision
from certcli.rounding.enclosed import ErrorStep
from certcli.rounding.operation_errors import Executed, Followed, OfResult, Steep
from tests.helpers.executions import channels_last

Draw = Callable[[Tensor, torch.Generator], Tensor]


def gaussian_like(like: Tensor, draw: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=draw, dtype=torch.float64)


def _spike(like: Tensor, draw: torch.Generator) -> Tensor:
    spike = torch.zeros(like.numel(), dtype=torch.float64)
    spike[torch.randint(like.numel(), (1,), generator=draw)] = 1.1
    return spike.view(like.shape)


OPERANDS: dict[str, Draw] = {
    "zeros": lambda like, draw: torch.zeros_like(like),
    "as traced": lambda like, draw: like,
    **{
        f"noise of 2^{power}": (
            lambda like, draw, power=power: gaussian_like(like, draw) * 2.0**power
        )
        for power in (-22, -6, 0, 4)
    },
    # means beside which deviations are small, sums whose terms have one sign
    **{
        f"a mean of 2^{power}": (
            lambda like, draw, power=power: (1 + 2.0**-9 * gaussian_like(like, draw)) * 2.0**power
        )
        for power in (0, 3, 7)
    },
    "a spike": _spike,
}


def sizes_of(x: Tensor) -> Executed:
    """Return the sizes of a tensor, rounded up."""
    lengths = (x.norm(), x.norm(dim=-1).amax(), x.abs().amax())
    return Executed(tuple(x.shape), *(as_real(float(part)) * (1 + 2.0**-40) for part in lengths))


def result_of(node: fx.Node, module: nn.Module | None, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the results of one node, in float64, with 0 for scores that are hidden."""
    if module is not None:
        result = module(*args, **kwargs)
    elif node.op == "call_method":
        result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    parts = result if isinstance(result, (list, tuple)) else [result]
    return [part.double().masked_fill(part == -math.inf, 0.0) for part in parts if part is not None]


@dataclass(frozen=True)
class Alone:
    """|executed - exact| of one operation, the most of its layouts, and what is proven of it.

    Attributes:
        rule: the name of its rounding's theorem.
    """

    rule: str
    node: fx.Node
    operands: str
    error: float
    bound: float


@torch.no_grad()
def operations(
    analysis: NeighbourErrors, size: tuple[int, ...], precision: Precision
) -> Iterator[Alone]:
    """Yield every operation of a network beside its rounding, wherever that is finite."""
    traced = analysis._traced
    values: dict[fx.Node, Any] = {}
    place = 0
    modules = {node: module for node, module, _ in traced.steps}
    places: dict[fx.Node, int] = {}
    for node, value in executed(traced, noise_like(torch.empty(1, *size, dtype=torch.float64))):
        values[node] = value
        numbers = [0] if node.op == "placeholder" else analysis._tensors.get(node.name)
        if numbers is None:  # what depends on no image, or is an item of a list
            continue
        places[node] = place
        steps = analysis._steps[place : place + len(numbers)]
        place += len(numbers)
        if node.op != "placeholder" and len(numbers) == 1:
            module = modules[node]
            parts = {torch.float64: module, precision.dtype: copied(module, precision.dtype)}
            for name, make in OPERANDS.items():
                operands = scaled_operands(node, values, make, precision, places)
                if operands is not None:
                    pair = _pair(node, parts, values, operands, steps, places, precision)
                    rounding = steps[0].rounding
                    function: Any = rounding.rounding if isinstance(rounding, Steep) else rounding
                    function = OfResult if isinstance(rounding, OfResult) else function
                    theorem = f"{function.__module__}.{function.__qualname__.split('.')[0]}"
                    yield Alone(theorem, node, name, *pair)


def copied(module: nn.Module | None, dtype: torch.dtype) -> nn.Module | None:
    return None if module is None else copy.deepcopy(module).to(dtype)


def scaled_operands(
    node: fx.Node,
    values: dict[fx.Node, Any],
    make: Draw,
    precision: Precision,
    places: dict[fx.Node, int],
) -> dict[fx.Node, Tensor] | None:
    """Return numbers of the arithmetic in place of each tensor that depends on the image; None where
    one is a list.
    """
    operands = {}
    for number, source in enumerate(node.all_input_nodes):
        if source in places:
            if not isinstance(values[source], Tensor):
                return None
            made = make(values[source], torch.Generator().manual_seed(number))
            operands[source] = made.to(precision.dtype).double()
    return operands


def _pair(
    node: fx.Node,
    parts: dict[torch.dtype, nn.Module | None],
    values: dict[fx.Node, Any],
    operands: dict[fx.Node, Tensor],
    steps: list[ErrorStep],
    places: dict[fx.Node, int],
    precision: Precision,
) -> tuple[float, float]:
    """Return the error of one operation, and its bound; 0 where it may overflow."""
    of_place = {places[source]: sizes_of(x) for source, x in operands.items()}

    def sizes(x: Followed) -> Executed:
        return of_place[x.place]

    def run(dtype: torch.dtype, lay: Callable[[Tensor], Tensor]) -> Tensor:
        def stored(source: fx.Node) -> Any:
            value = lay(operands[source].clone()) if source in operands else values[source]
            return tree_map_only(
                Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value
            )

        args, kwargs = fx.node.map_arg((node.args, node.kwargs), stored)
        return result_of(node, parts[dtype], args, kwargs)[0]

    exact = run(torch.float64, torch.clone)
    rounding = steps[0].rounding
    bound = float(rounding(sizes))
    if isinstance(rounding, OfResult) and bool(exact.isfinite().all()):
        near = sizes_of(exact)
        bound = float(rounding.near(near.total, near.peak))
    # of results that overflow there is no proof, whatever is charged: `NeighbourErrors._pairs`
    if not float(exact.abs().max()) + bound < precision.largest:
        return 0.0, math.inf
    # views, which are methods, refuse what lies in memory in another order
    layouts = (torch.clone,) if node.op == "call_method" else (torch.clone, channels_last)
    return max(float((run(precision.dtype, lay) - exact).norm()) for lay in layouts), bound
