"""Preview an adaptation: replaced modules, parameters, multiply-adds, bounds before and after."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from certcli.adapt.keep import with_unit_floors
from certcli.adapt.plan import plan
from certcli.adapt.run import perform_surgery
from certcli.adapt.settings import AdaptSettings
from certcli.checkpoint.file import Checkpoint
from certcli.lipschitz.network import prove
from certcli.models import build
from certcli.models.pixels import PixelModel


@dataclass(frozen=True)
class ModuleChange:
    """One module: its path, its type before and after."""

    path: str
    before: str
    after: str


@dataclass(frozen=True)
class Cost:
    """Parameters, multiply-adds an image, log10 of the proven bound; `why`: it has none."""

    parameters: int
    multiply_adds: int
    log10_upper: float | None
    why: str


@dataclass(frozen=True)
class Preview:
    """`after` describes the network after surgery, started from the weights, before any fitting."""

    changes: tuple[ModuleChange, ...]
    before: Cost
    after: Cost


def preview(checkpoint: Checkpoint, settings: AdaptSettings, bounds: bool = True) -> Preview:
    """Return the plan with its figures, without images. ArchitectureError names an unknown part."""
    record = replace(checkpoint.record, surgery=plan(checkpoint, settings))
    teacher = build.load(checkpoint)
    if settings.refit:
        student, _ = perform_surgery(record, settings, teacher)
    else:
        student = with_unit_floors(record, teacher)
    changes = []
    for path in (item.path or "head" for item in record.surgery):
        before, after = (
            type(net.get_submodule(path)).__name__ for net in (teacher.net, student.net)
        )
        changes.append(ModuleChange(path, before, after))
    return Preview(
        tuple(changes), _cost(teacher, checkpoint, bounds), _cost(student, checkpoint, bounds)
    )


def grouped(changes: Sequence[ModuleChange]) -> list[tuple[str, int, str, str]]:
    """Return (path with * for block numbers, count, before, after), by first appearance."""
    patterns = (
        ".".join("*" if part.isdigit() else part for part in change.path.split("."))
        for change in changes
    )
    counts = Counter(
        (pattern, each.before, each.after) for pattern, each in zip(patterns, changes, strict=True)
    )
    return [(pattern, count, before, after) for (pattern, before, after), count in counts.items()]


def _cost(model: PixelModel, checkpoint: Checkpoint, bounds: bool) -> Cost:
    parameters = sum(parameter.numel() for parameter in model.net.parameters())
    log10 = None
    why = "not asked for"
    if bounds:
        bound = prove(model, checkpoint.record.classes)
        log10, why = (bound.upper.log10(), "") if bound.upper.finite else (None, bound.bound.why)
    return Cost(parameters, multiply_adds(model, checkpoint.record.input.size), log10, why)


def multiply_adds(model: nn.Module, size: tuple[int, ...]) -> int:
    """Return the multiply-adds of one image's products and convolutions, counted on a forward pass."""
    counter = FlopCounterMode(display=False)
    parameter = next(model.parameters())
    pixels = torch.zeros(1, *size, dtype=parameter.dtype, device=parameter.device)
    with (
        torch.no_grad(),
        sdpa_kernel(SDPBackend.MATH),
        counter,
    ):  # fused attention on CPUs is not counted
        model(pixels)
    return int(counter.get_total_flops()) // 2
