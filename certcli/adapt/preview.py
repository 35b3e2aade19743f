"""Preview an adaptation: replaced modules, parameters, multiply-adds, bounds before and after."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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


def preview(checkpoint: Checkpoint, settings: AdaptSettings) -> dict[str, Any]:
    """Return the plan with its costs before and after surgery, which is not fitted, without images.

    Each cost has parameters, multiply-adds an image, log10 of the proven bound, and why it has
    none. ArchitectureError names an unknown part.
    """
    record = replace(checkpoint.record, surgery=plan(checkpoint, settings))
    teacher = build.load(checkpoint)
    if settings.refit:
        student, _ = perform_surgery(record, settings, teacher)
    else:
        student = with_unit_floors(record, teacher)
    changes = []
    for path in (item.path or "head" for item in record.surgery):
        old, new = (type(model.net.get_submodule(path)).__name__ for model in (teacher, student))
        changes.append({"path": path, "from": old, "to": new})
    before, after = (_cost(model, checkpoint) for model in (teacher, student))
    return {"plan": changes, "before": before, "after": after}


def grouped(changes: Sequence[Mapping[str, str]]) -> list[tuple[str, str, str, str]]:
    """Return (path with * for block numbers, count, before, after), by first appearance."""
    counts = Counter(
        (re.sub(r"(?<![^.])\d+(?![^.])", "*", each["path"]), each["from"], each["to"])
        for each in changes
    )
    return [(path, str(count), before, after) for (path, before, after), count in counts.items()]


def _cost(model: PixelModel, checkpoint: Checkpoint) -> dict[str, Any]:
    bound = prove(model, checkpoint.record.classes)
    return {
        "parameters": sum(parameter.numel() for parameter in model.net.parameters()),
        "multiply_adds": multiply_adds(model, checkpoint.record.input.size),
        "log10_upper": bound.upper.log10() if bound.upper.finite else None,
        "why": "" if bound.upper.finite else bound.bound.why,
    }


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
