"""The layers of one network together: curves, a budget that meets a target, and the least error at which it does."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from certcli.constrain.parallel import LayerResult, attention_blocks, constrain_layers
from certcli.constrain.statistics import LayerStatistics
from certcli.constrain.targets import Point, allocate, pareto
from certcli.errors import NoBoundError, UsageError
from certcli.lipschitz.propagate import bound_network
from certcli.lipschitz.real import Real


@dataclass(frozen=True)
class Options:
    """The algorithm's parameters under the paper's names; `eta` is the relative output error a layer may make.

    per_head: the penalty of q, k and v is the sum over heads. On ViT-Tiny at 10 % it lowers the heads' norms further
    (to .65 against .87 of the old) and the whole matrix's less (.76 against .64).
    """

    prox: str
    beta: float
    eta: float
    relaxation: float
    iterations: int
    per_head: bool = False


def network_upper(model: Any, size: tuple[int, ...], classes: int) -> Real:
    """The proven bound of the network as it is now."""
    return bound_network(model, size, classes).upper


def curves(statistics: Mapping[str, LayerStatistics], options: Options) -> Iterator[tuple[str, tuple[Point, ...]]]:
    """Each layer's Pareto curve (spectral norm against output error), one layer at a time."""
    for path, layer in statistics.items():
        yield path, pareto(layer, prox=options.prox, beta=options.beta, relaxation=options.relaxation)


def constrain_to(
    model: nn.Module, statistics: Mapping[str, LayerStatistics], etas: Mapping[str, float], options: Options
) -> Iterator[LayerResult]:
    """Constrain each layer at its own eta (0: leave it) and write it into the model."""
    blocks = attention_blocks(model) if options.per_head else {}
    for path, layer in statistics.items():
        if etas[path] <= 0:
            continue
        for result in constrain_layers(
            [layer],
            prox=options.prox,
            beta=options.beta,
            eta=etas[path],
            relaxation=options.relaxation,
            max_iterations=options.iterations,
            blocks=blocks,
        ):
            weight: Any = model.get_submodule(path).weight
            weight.data.copy_(result.weight)
            yield result


def budget(
    model: nn.Module, size: tuple[int, ...], classes: int, found: Mapping[str, tuple[Point, ...]], target: float
) -> dict[str, float]:
    """eta for each layer such that the network's bound meets `target` at the least total output error.

    The bound of a trial is proven with every layer's weights scaled to the norm that its curve promises; the caller
    constrains, proves the bound of the result, and calls again with a smaller target where interpolation fell short.
    Errors: NoBoundError without a finite bound, UsageError with the least bound within reach when the target is not.
    """
    if not network_upper(model, size, classes).finite:
        raise NoBoundError("the network has no finite bound to bring to a target", "certvit lipschitz says why")
    weights: dict[str, Any] = {path: model.get_submodule(path).weight for path in found}
    originals = {path: weight.data.clone() for path, weight in weights.items()}

    def log10_bound(norms: Mapping[str, float]) -> float:
        for path, norm in norms.items():
            largest = found[path][0].norm
            weights[path].data.copy_(originals[path] * (norm / largest if largest > 0 else 1.0))
        upper = network_upper(model, size, classes)
        return upper.log10() if upper > 0.0 else -math.inf

    try:
        chosen = allocate(found, target, log10_bound)
    finally:
        for path, weight in weights.items():
            weight.data.copy_(originals[path])
    return {path: point.error for path, point in chosen.items()}


def meet_target(
    model: nn.Module,
    size: tuple[int, ...],
    classes: int,
    statistics: Mapping[str, LayerStatistics],
    found: Mapping[str, tuple[Point, ...]],
    target: float,
    options: Options,
) -> list[LayerResult]:
    """Constrain until the PROVEN bound of the result is at most `target`; UsageError when five trials do not reach it."""
    originals = {path: layer.weight.reshape(layer.shape) for path, layer in statistics.items()}
    aim = target
    for _ in range(5):
        etas = budget(model, size, classes, found, aim)
        results = list(constrain_to(model, statistics, etas, options))
        upper = network_upper(model, size, classes)
        if upper <= target:
            return results
        aim *= 0.98 * target / float(upper)  # constrained layers line up worse than scaled ones; ask for the difference
        for path, weight in originals.items():
            parameter: Any = model.get_submodule(path).weight
            parameter.data.copy_(weight)
    raise UsageError(
        f"the bound came to {upper}, not to the target {target:g}", "take a larger --target or more layers"
    )
