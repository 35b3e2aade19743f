"""What both goals of adapt have: the old network, the plan, the records, and the new checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from certcli.adapt.plan import plan
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.state import adaptation_identity
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Replacement
from certcli.evaluation.evidence_schema import Rung
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system.processes import ALONE, Team


@dataclass(frozen=True)
class AdaptedPart:
    """An adapted part: its path, its description before and after, its relative output error."""

    path: str
    before: str
    after: str
    error: float


@dataclass(frozen=True)
class RaisedFloor:
    """A floor tried in place of the present one of the norm at `path`.

    Args:
        digits: log10 of the factor by which the norm's Lipschitz constant falls.
        error: |z - z0|_F / |z0|_F of the logits z with this change alone.
    """

    path: str
    floor: float
    digits: float
    error: float = 0.0

    @property
    def change(self) -> str:
        return f"floor {self.floor:.3g}"

    def to_json(self, placed: Mapping[str, "RaisedFloor"]) -> dict[str, Any]:
        return {
            "path": self.path,
            "change": self.change,
            "digits": self.digits,
            "logits_error": self.error,
            "taken": placed.get(self.path) is self,
        }


@dataclass(frozen=True)
class Trade:
    """The floors tried, those placed, and the rungs measured on the choosing images."""

    candidates: Sequence[RaisedFloor] = ()
    placed: Mapping[str, RaisedFloor] = field(default_factory=dict)
    rungs: Sequence[Rung] = ()


class Adaptation:
    """The original network (teacher) and, of a subclass, the new one (student).

    Args:
        images: calibration pixels (n, c, h, w), float in [0, 1] or uint8.
    """

    student: PixelModel

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
        # datasets are sorted by class, and closed forms and comparisons use the first images only
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        self.images = images[order].to(device)
        self.record = replace(checkpoint.record, surgery=plan(checkpoint, settings))
        # the student has no digits beyond float32
        self.teacher = build.load(checkpoint, device, torch.float32)
        self.identity = adaptation_identity(checkpoint.digest, settings, images)
        self.records: list[AdaptedPart] = []
        self.trade = Trade()

    def derive(self, surgery: tuple[Replacement, ...], **parameters: Any) -> Checkpoint:
        """Return the checkpoint of the student, with these parameters of lineage beside the settings."""
        parameters = {
            **self.settings.parameters(),
            "calibration_images": len(self.images),
            **parameters,
        }
        tensors = build.tensors_of(self.student)
        return self.checkpoint.derive(
            tensors, "adapt", parameters, self.settings.seed, surgery=surgery
        )
