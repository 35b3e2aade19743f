"""`--goal keep`: raise floors under every LayerNorm, then change what keeps enough first choices.

Each LayerNorm of the network becomes a norm with a floor. All other tensors keep their values.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from certcli.adapt.bound_tradeoff import Trade, search_moves
from certcli.adapt.candidates import FLOOR
from certcli.adapt.floors import least_floors
from certcli.adapt.plan import plan
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.state import identity
from certcli.adapt.streams import AdaptedPart
from certcli.adapt.trials import Trials
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record, Replacement
from certcli.evaluation.fidelity import ReferenceLogits
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system.processes import ALONE, Team


class Keeper:
    """Own the original network (teacher) and the changed one (student); `run` changes it.

    Unless `choose_by` is called, only norms change, and on the calibration images they act as
    before.

    Args:
        images: calibration pixels (n, c, h, w), float in [0, 1] or uint8.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: AdaptSettings,
        images: Tensor,
        device: torch.device,
        team: Team = ALONE,
    ) -> None:
        self.checkpoint = checkpoint
        self.settings = settings
        self.team = team
        self.reference: ReferenceLogits | None = None
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        self.images = images[order].to(device)
        self.record = replace(checkpoint.record, surgery=plan(checkpoint, settings))
        self.teacher = build.load(checkpoint, device, torch.float32)
        self.student = with_unit_floors(self.record, self.teacher)
        self.identity = identity(checkpoint.digest, settings, images)
        self.records: list[AdaptedPart] = []
        self.trade = Trade()
        self._trials: Trials | None = None

    def choose_by(self, reference: ReferenceLogits | None) -> None:
        """Let `run` change more, as long as the share `settings.keep` of first choices stays.

        Args:
            reference: the original logits of other images; None except in the leading process.
        """
        self.reference = reference
        self._trials = Trials(self.student, self.images, self.settings.batch_size, self.team)

    @property
    def keep(self) -> float:
        """Return the share of first choices that must stay."""
        return 1.0 if self._trials is None or self.settings.keep is None else self.settings.keep

    @property
    def steps(self) -> int:
        """Return an upper limit of the number of steps that `run` yields."""
        return 1 if self._trials is None else 2 + self._trials.most_candidates

    def run(self) -> Iterator[str]:
        """Change the student, and yield a remark after each step."""
        self.records = list(
            least_floors(
                self.teacher, self.student, self.images, self.settings.batch_size, self.team
            )
        )
        yield "floors"
        if self._trials is None:
            return
        for candidate in self._trials.run():
            error = f"logit error {100 * candidate.error:.2g} %"
            yield f"{candidate.path}, {candidate.change}: {error}"
        moves = self._trials.moves()
        rungs, taken = search_moves(moves, self._trials, self.reference, self.keep)
        placed = self._trials.place(moves[:taken])
        self.trade = Trade(tuple(self._trials.candidates), placed, tuple(rungs))
        self.records = [
            replace(
                record,
                after=f"FloorNorm, {placed[record.path].change}",
                error=placed[record.path].error,
            )
            if record.path in placed
            else record
            for record in self.records
        ]
        self.records += [
            AdaptedPart(
                path,
                type(self.teacher.net.get_submodule(path)).__name__,
                candidate.change,
                candidate.error,
            )
            for path, candidate in placed.items()
            if candidate.kind != FLOOR
        ]
        yield f"{len(placed)} parts changed"

    def result(self) -> Checkpoint:
        replaced = [
            Replacement(each.path, each.kind)
            for each in self.trade.placed.values()
            if each.kind != FLOOR
        ]
        parameters: dict[str, Any] = {
            **self.settings.parameters(),
            "calibration_images": len(self.images),
            "keep": self.keep,
        }
        surgery = (*self.record.surgery, *replaced)
        tensors = build.tensors_of(self.student)
        return self.checkpoint.derive(
            tensors, "adapt", parameters, self.settings.seed, surgery=surgery
        )


def with_unit_floors(record: Record, teacher: PixelModel) -> PixelModel:
    """Return the network after surgery: floors of 1, all other tensors as in the teacher."""
    net = build.build(record, initialise=True).requires_grad_(False)
    tensors = dict(teacher.net.state_dict())
    for name, value in net.state_dict().items():
        if name not in tensors:  # a floor, or the gain and offset of a norm that had none
            tensors[name] = (
                torch.zeros_like(value) if name.endswith(".bias") else torch.ones_like(value)
            )
    net.load_state_dict(tensors, strict=True)
    return PixelModel(record.input, net).eval().to(next(teacher.parameters()).device)
