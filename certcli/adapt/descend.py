"""AdamW on a mean squared error, with bfloat16 products where the machine has them."""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.calibration_shards import Lots
from certcli.adapt.settings import AdaptSettings
from certcli.models.build import multiplies_bf16

COMPARED = 256  # images that compare two epochs


def mixed_precision(device: torch.device, size: int) -> contextlib.AbstractContextManager[Any]:
    """Use bfloat16 products where the device has them and the streams are long enough to gain."""
    if size < 2**14 or not multiplies_bf16(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def make_optimiser(
    parameters: list[nn.Parameter], lr: float, steps: int, unit: float = 1.0
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    """AdamW with steps relative to each tensor's size (>= 1 % of `unit`), warm-up, cosine.

    Least squares leaves output maps a thousand times larger than query maps, so one rate cannot
    suit both.
    """
    groups = [
        {"params": [p], "lr": lr * max(float(p.detach().square().mean().sqrt()), 1e-2 * unit)}
        for p in parameters
    ]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.0)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser,
        lambda step: (
            min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))
        ),
    )
    return optimiser, schedule


@torch.enable_grad()
def descend(
    block: Callable[[Tensor], Tensor],
    module: nn.Module,
    lots: Lots,
    inputs: Mapping[int, Tensor],
    targets: Mapping[int, Tensor],
    scale: float,
    settings: AdaptSettings,
    generator: torch.Generator,
) -> None:
    """Fit block(inputs) to targets / scale; keep the best weights, the first ones included.

    Every feature is weighted by its own variance: a few features of pre-trained vision transformers
    are a hundred times larger than the rest.

    Args:
        inputs, targets: rows of each lot of this process.
    """
    epochs = settings.epochs
    batch_size = settings.batch_size
    if epochs <= 0:
        return
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.requires_grad_(True)
    steps = epochs * -(-lots.count // batch_size)
    optimiser, schedule = make_optimiser(parameters, settings.lr, steps, 1 / scale)
    some = next(iter(inputs.values()))
    cast = mixed_precision(some.device, some[0].numel())
    deviation = _feature_deviations(lots, targets, scale)
    weight = (1 / deviation.clamp_min(1e-2 * float(deviation.mean()) + 1e-12)).to(some.dtype)

    def distance(prediction: Tensor, goal: Tensor) -> Tensor:
        return ((prediction.float() - goal / scale) * weight).square().mean()

    def error() -> float:
        def per_lot(lot: int) -> list[Tensor]:
            total = 0.0
            judged = lots.size(lot, COMPARED)
            with torch.no_grad(), cast:
                parts = zip(
                    inputs[lot][:judged].split(batch_size),
                    targets[lot][:judged].split(batch_size),
                    strict=True,
                )
                for part, goal in parts:
                    total += float(distance(block(part), goal)) * len(part)
            return [torch.tensor([total], dtype=torch.float64)]

        return float(lots.total(per_lot, [torch.zeros(1, dtype=torch.float64)])[0])

    best = error()
    best_state = state_of(module)
    for _ in range(epochs):
        for batch in lots.batches(batch_size, generator):
            images = sum(map(len, batch.values()))

            def loss(lot: int, rows: Tensor, images: int = images) -> Tensor:
                with cast:
                    error = distance(block(inputs[lot][rows]), targets[lot][rows])
                return error * (len(rows) / images)

            set_gradients(parameters, lots, batch, loss)
            optimiser.step()
            schedule.step()
        new_error = error()
        if new_error < best:
            best = new_error
            best_state = state_of(module)
    module.load_state_dict(best_state)
    for parameter in parameters:
        parameter.grad = None
        parameter.requires_grad_(False)


def set_gradients(
    parameters: Sequence[nn.Parameter],
    lots: Lots,
    batch: Mapping[int, Tensor],
    loss: Callable[[int, Tensor], Tensor],
) -> None:
    """Set every `.grad` to the gradient of the sum of loss(lot, rows) over the lots of the batch."""

    def per_lot(lot: int) -> Sequence[Tensor] | None:
        if not len(batch[lot]):
            return None
        gradients = torch.autograd.grad(loss(lot, batch[lot]), parameters, allow_unused=True)
        pairs = zip(gradients, parameters, strict=True)
        return [torch.zeros_like(parameter) if each is None else each for each, parameter in pairs]

    for parameter, gradient in zip(parameters, lots.total(per_lot, parameters), strict=True):
        parameter.grad = gradient


def _feature_deviations(lots: Lots, targets: Mapping[int, Tensor], scale: float) -> Tensor:
    """Return the deviation (d,) float64 of each feature of targets / scale, on COMPARED images."""

    def per_lot(lot: int) -> list[Tensor]:
        rows = targets[lot][: lots.size(lot, COMPARED)].flatten(0, -2).double() / scale
        return [rows.sum(0), rows.square().sum(0), torch.full_like(rows[0, :1], len(rows))]

    features = next(iter(targets.values())).flatten(0, -2)[0].double()
    total, squares, count = lots.total(per_lot, [features, features, features[:1]])
    return (squares / count - (total / count).square()).clamp_min(0).sqrt()


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
