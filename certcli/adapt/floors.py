"""Put a floor below the deviations at a LayerNorm, with ROOM for others: the function stays.

The deviations come from the old network on the calibration images and on blank ones (black, grey,
white). On a ViT-Tiny, blank images have the least deviations at the first norms, and synthetic
photographs at the last norms.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.fit import AdaptedPart
from certcli.adapt.pixels import as_pixels
from certcli.adapt.start import deviations
from certcli.images.labelled import at_once
from certcli.nn.norms import FloorNorm
from certcli.system.processes import ALONE, Team
from certcli.system.products import fast_products

BLANK = (0.0, 0.5, 1.0)

ROOM = 0.7
"""A floor is this share of the least deviation seen (docs/trials.md, *Room under the floors*)."""


@torch.no_grad()
def least_floors(
    teacher: Any, student: Any, images: Tensor, batch_size: int, team: Team = ALONE
) -> Iterator[AdaptedPart]:
    """Set every floor to ROOM times the least deviation that reaches it; yield a record each.

    A floor is at least 1e-6.

    The error of a record is eps / (2 floor^2): above a floor the two norms differ by LayerNorm's
    eps alone.

    Args:
        images: pixels (n, c, h, w), float in [0, 1] or uint8.
    """
    pairs: list[tuple[str, nn.LayerNorm, FloorNorm]] = []
    for path, new in student.net.named_modules():
        if isinstance(new, FloorNorm):
            pairs.append((path, teacher.net.get_submodule(path), new))
    smallest = least_deviations(teacher, [old for _, old, _ in pairs], images, batch_size, team)
    for (path, old, new), floor in zip(pairs, smallest, strict=True):
        # a norm that is never called
        floor = max(ROOM * floor, 1e-6) if math.isfinite(floor) else 1.0
        new.floor.fill_(floor)
        yield AdaptedPart(
            path, type(old).__name__, f"FloorNorm, floor {floor:.3g}", old.eps / (2 * floor * floor)
        )


def least_deviations(
    teacher: Any, norms: Sequence[nn.Module], images: Tensor, batch_size: int, team: Team = ALONE
) -> list[float]:
    """Return the least deviation of the rows that reach each norm, on images and blank ones.

    Several processes share the batches.
    """
    smallest = [float("inf")] * len(norms)

    def note(index: int, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        smallest[index] = min(smallest[index], float(deviations(inputs[0]).min()))

    with ExitStack() as hooks:
        hooks.enter_context(fast_products(teacher))
        for index, norm in enumerate(norms):
            hooks.enter_context(norm.register_forward_pre_hook(partial(note, index)))
        teacher(
            torch.stack([torch.full(images.shape[1:], value) for value in BLANK]).to(images.device)
        )
        count = at_once(batch_size, images.shape[1:], images.device)
        for part in images.split(count)[team.rank :: team.size]:
            teacher(as_pixels(part))
    return [min(column) for column in zip(*team.everyone(smallest), strict=True)]
