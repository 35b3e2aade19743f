"""`--goal keep`: put floors under every LayerNorm, then raise them as far as enough predictions stay.

Each LayerNorm of the network becomes a norm with a floor. All other tensors keep their values.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from certcli.adapt.floors import least_floors
from certcli.adapt.run import Adaptation
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.trials import QUANTILES, Trials
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.evaluation.fidelity import ReferenceLogits
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system.processes import ALONE, Team


class Keeper(Adaptation):
    """Change the network as far as it keeps its predictions.

    Unless `choose_by` is called, only norms change, and on the calibration images they act as
    before.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: AdaptSettings,
        images: Tensor,
        device: torch.device,
        team: Team = ALONE,
    ) -> None:
        super().__init__(checkpoint, settings, images, device, team)
        self.student = with_unit_floors(self.record, self.teacher)
        self.reference: ReferenceLogits | None = None
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
        return 1 if self._trials is None else 2 + len(QUANTILES) * len(self._trials.norms)

    def run(self) -> Iterator[str]:
        """Change the student, and yield a remark after each step."""
        size = self.settings.batch_size
        floors = least_floors(self.teacher, self.student, self.images, size, self.team)
        self.records = list(floors)
        yield "floors"
        if self._trials is None:
            return
        for candidate in self._trials.run():
            error = f"logit error {100 * candidate.error:.2g} %"
            yield f"{candidate.path}, {candidate.change}: {error}"
        self.trade = self._trials.choose(self.reference, self.keep)
        raised = self.trade.placed
        self.records = [
            replace(
                part, after=f"FloorNorm, {raised[part.path].change}", error=raised[part.path].error
            )
            if part.path in raised
            else part
            for part in self.records
        ]
        yield f"{len(raised)} floors raised"

    def result(self) -> Checkpoint:
        return self.derive(self.record.surgery, keep=self.keep)


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
