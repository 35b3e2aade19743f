"""What an adaptive attack climbs: the passes that see a patch, joined with gradients."""

import torch
from torch import Tensor, nn

from certcli.certify.patch.certifier import PatchCertifier
from certcli.certify.patch.double_masking import DoubleMasking
from certcli.certify.patch.masks import seen
from certcli.evaluation.threat import Patch

_MOST = 32
"""Passes that are put together, evenly chosen: each costs a gradient a step."""


class TouchedPasses(nn.Module):
    """log of the mean softmax over views that see the patch here: what has to change together.

    Of double masking those of the first round, whose majority a patch must turn.
    """

    def __init__(self, certifier: PatchCertifier, patch: Patch, corner: tuple[int, int]) -> None:
        super().__init__()
        self.part = certifier.passes.part
        procedure = certifier.procedure
        views = (
            procedure.views[: procedure.count]
            if isinstance(procedure, DoubleMasking)
            else procedure.views
        )
        (down, across), (top, column) = self.part.grid.cell, corner
        block = (
            (top // down, (top + patch.height - 1) // down + 1),
            (column // across, (column + patch.width - 1) // across + 1),
        )
        touched = views[seen(views, [block]).flatten()]
        self.views = touched[:: max(1, -(-len(touched) // _MOST))]
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        views = self.views.to(pixels.device)
        count = len(pixels)
        kinds = self.part.alike(views)
        shares: list[Tensor] = []
        for kind in kinds.unique().tolist():
            some = views[kinds == kind]
            logits = self.part(pixels.repeat_interleave(len(some), 0), some.repeat(count, 1, 1))
            shares.append(logits.softmax(dim=1).unflatten(0, (count, len(some))).sum(dim=1))
        return (torch.stack(shares).sum(dim=0) / len(views)).clamp_min(1e-30).log()
