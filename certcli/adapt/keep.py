"""`--goal keep` from beginning to end: floors below every deviation seen, then whatever else serves and costs little.

Nothing is taken apart: a norm with a floor takes the place of each LayerNorm of any network, and its other tensors stay.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from certcli.adapt.candidates import FLOOR, Option
from certcli.adapt.floors import least_floors
from certcli.adapt.plan import plan
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.state import identity
from certcli.adapt.streams import Replaced
from certcli.adapt.trade import Rung, climb
from certcli.adapt.trials import Trials
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Replacement
from certcli.evaluation.fidelity import Witness
from certcli.models import build
from certcli.system.errors import DataError
from certcli.system.processes import ALONE, Team


@dataclass(frozen=True)
class Trade:
    """options: what was tried, part by part. placed: what each changed part became. rungs: what the network keeps and gains
    with more and more of it, on images that choose.
    """

    options: tuple[Option, ...] = ()
    placed: Mapping[str, Option] = field(default_factory=dict)
    rungs: tuple[Rung, ...] = ()

    def summary(self) -> list[tuple[str, ...]]:
        """A line for each kind of option: how many, how many of them are placed, mean digits and error, digits a cost."""
        found: list[tuple[str, ...]] = []
        for kind in dict.fromkeys(option.family for option in self.options):
            some = [option for option in self.options if option.family == kind]
            digits, square = (
                sum(values) / len(some) for values in zip(*((o.digits, o.error**2) for o in some), strict=True)
            )
            taken = sum(self.placed.get(option.path) is option for option in some)
            worth = f"{1e-2 * digits / square:.1f}" if square > 0 else "-"
            found.append((kind, str(len(some)), str(taken), f"{digits:.2f}", f"{100 * square**0.5:.1f} %", worth))
        return found


class Keeper:
    """Owns both networks. `run` yields what it is about, `result` is the checkpoint at the end.

    images: calibration pixels (n, c, h, w), float in [0, 1] or uint8. Unless `choose_by` is called nothing is changed but
    norms, and these nowhere on what was seen.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        settings: AdaptSettings,
        images: Tensor,
        device: torch.device,
        team: Team = ALONE,
    ) -> None:
        if not len(images):
            raise DataError("adapt needs at least one calibration image")
        self.checkpoint, self.settings, self.team = checkpoint, settings, team
        self.keep = 1.0
        self.chooser: Witness | None = None
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        self.images = images[order].to(device)
        self.record = replace(checkpoint.record, surgery=plan(checkpoint.record, settings))
        self.teacher = build.load(checkpoint, device, torch.float32)
        self.student = floored(checkpoint, self.record.surgery, self.teacher)
        self.identity = identity(checkpoint.digest, settings, images)
        self.records: list[Replaced] = []
        self.trade = Trade()
        self._trials: Trials | None = None

    def choose_by(self, chooser: Witness | None, keep: float) -> None:
        """Change more, as far as `keep` of the first choices stay. chooser: the original network's word on other images;
        None in a process that leads no others.
        """
        self.chooser, self.keep = chooser, keep
        self._trials = Trials(self.student, self.images, self.settings.batch_size, self.team)

    @property
    def steps(self) -> int:
        """How many steps a whole run has, at most."""
        return 1 if self._trials is None else 2 + self._trials.most

    def run(self) -> Iterator[str]:
        """A word on each step that is done."""
        self.records = list(least_floors(self.teacher, self.student, self.images, self.settings.batch_size, self.team))
        yield "floors"
        if self._trials is None:
            return
        for option in self._trials.run():
            yield f"{option.path}, {option.change}: logits off by {100 * option.error:.2g} %"
        steps = self._trials.steps()
        rungs, taken = climb(steps, self._trials, self.chooser, self.keep)
        placed = self._trials.place(steps[:taken])
        self.trade = Trade(tuple(self._trials.options), placed, tuple(rungs))
        self.records = [self._as_placed(record) for record in self.records]
        self.records += [
            Replaced(path, type(self.teacher.net.get_submodule(path)).__name__, option.change, option.error)
            for path, option in placed.items()
            if option.kind != FLOOR
        ]
        yield f"{len(placed)} parts changed"

    def _as_placed(self, record: Replaced) -> Replaced:
        option = self.trade.placed.get(record.path)
        return record if option is None else replace(record, after=f"FloorNorm, {option.change}", error=option.error)

    def result(self) -> Checkpoint:
        """The adapted checkpoint."""
        replaced = [Replacement(o.path, o.kind) for o in self.trade.placed.values() if o.kind != FLOOR]
        parameters: dict[str, Any] = {
            **self.settings.parameters(),
            "calibration_images": len(self.images),
            "keep": self.keep,
        }
        surgery = (*self.record.surgery, *replaced)
        tensors = build.tensors_of(self.student)
        return self.checkpoint.derive(tensors, "adapt", parameters, self.settings.seed, surgery=surgery)


def floored(checkpoint: Checkpoint, surgery: tuple[Replacement, ...], teacher: build.PixelModel) -> build.PixelModel:
    """The network with floors of 1 in its norms, and every other tensor as it was."""
    record = replace(checkpoint.record, surgery=surgery)
    net = build.build(record, initialise=True).requires_grad_(False)
    tensors = dict(teacher.net.state_dict())
    for name, value in net.state_dict().items():
        if name not in tensors:  # a floor, or the gain and offset of a norm that had none
            tensors[name] = torch.zeros_like(value) if name.endswith(".bias") else torch.ones_like(value)
    net.load_state_dict(tensors, strict=True)
    return build.PixelModel(record.input, net).eval().to(next(teacher.parameters()).device)
