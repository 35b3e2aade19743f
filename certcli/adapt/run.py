"""Adaptation from beginning to end: surgery, closed forms, blocks, distillation. A generator of records, resumable."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.carry import Scales, carry_over, input_maps, reads_linearly
from certcli.adapt.distil import Distiller
from certcli.adapt.families import Half, family_of, token_counts
from certcli.adapt.fit import Fitter
from certcli.adapt.lots import FEW, LOTS, Lots
from certcli.adapt.pixels import photographs
from certcli.adapt.plan import folded, plan
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import fold_center_norm
from certcli.adapt.state import AdaptState, identity
from certcli.adapt.streams import Replaced
from certcli.checkpoint.file import Checkpoint
from certcli.models import build
from certcli.nn.norms import CenterNorm
from certcli.system.errors import CheckpointError, DataError, one_line
from certcli.system.processes import ALONE, Team


class Adapter:
    """Owns both networks. `run` yields a record for each adapted part, `result` is the checkpoint at the end.

    images: calibration pixels (n, c, h, w), float in [0, 1] or uint8. Several processes take some lots of them each
    (`lots.py`), go the same way, and end with the same networks.
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
        self.checkpoint, self.settings = checkpoint, settings
        # datasets come class by class; closed forms and comparisons look at the first images only
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        # on a GPU many small passes would cost more than equal bytes are worth, and nothing else promises them there
        lots = 1 if device.type == "cuda" else LOTS if photographs(images) else FEW
        self.lots = Lots(len(images), team, lots)
        self.images = {lot: images[order[self.lots.images(lot)]].to(device) for lot in self.lots.own}
        self.record = replace(checkpoint.record, surgery=plan(checkpoint.record, settings))
        self.teacher = build.load(checkpoint, device, torch.float32)  # the student is new: no digit of float64 survives
        self.student, scales = operate(checkpoint, settings, self.teacher)
        family = family_of(self.teacher.net)
        self.fitter = Fitter(self.teacher, self.student, family, scales, settings, self.images, self.lots)
        self.identity = identity(checkpoint.digest, settings, images)
        self.records: list[Replaced] = []
        self.distiller: Distiller | None = None
        self._resumed: AdaptState | None = None

    @property
    def steps(self) -> int:
        """How many records a whole run yields, about: the steps of the body, the end, the epochs of distillation."""
        return len(self.fitter.family.body(self.student.net)) + 1 + self.settings.distill_epochs

    @property
    def steps_done(self) -> int:
        return self.fitter.position + (0 if self._resumed is None else self._resumed.epoch)

    def run(self) -> Iterator[Replaced]:
        """Closed forms, blocks and distillation, as far as the settings ask for them and from where a state left off."""
        state = self._resumed
        if self.settings.epochs < 0:
            return
        self.fitter.agree_on(self.student.net)
        whole = len(self.fitter.family.body(self.student.net)) + 1
        if state is None or state.done < whole:
            self.fitter.advance(0 if state is None else state.done)
            for records in self.fitter.run():
                self.records += records
                yield from records
        self.fitter.forget()
        if self.settings.distill_epochs > 0:
            self.distiller = Distiller(self.teacher, self.student, self.settings, self.images, self.lots)
            if state is not None and state.epoch > 0:
                self.distiller.restore(dict(state.distiller), state.epoch)
            for error in self.distiller.run():
                after = f"distilled, epoch {self.distiller.epoch}"
                self.records = [record for record in self.records if record.path != "(network)"]
                self.records.append(Replaced("(network)", "logits", after, error))
                yield self.records[-1]

    def state(self) -> AdaptState:
        """Everything the next step depends on. To be asked for between two records."""
        position, whole = self.fitter.position, len(self.fitter.family.body(self.student.net)) + 1
        return AdaptState(
            identity=self.identity,
            done=whole if self.distiller is not None else position,
            epoch=0 if self.distiller is None else self.distiller.epoch,
            records=[asdict(record) for record in self.records],
            net=build.tensors_of(self.student),
            distiller={} if self.distiller is None else self.distiller.state(),
        )

    def restore(self, state: AdaptState) -> None:
        """Go on after `state`, to the same bytes on a CPU."""
        own = self.student.net.state_dict()
        try:
            self.records = [Replaced(**record) for record in state.records]
            for name, tensor in state.net.items():
                own[name].copy_(tensor)
        except (TypeError, KeyError, RuntimeError) as failure:
            raise CheckpointError(
                f"the state does not fit this network ({one_line(failure)})", "drop --resume"
            ) from failure
        self._resumed = state
        self.fitter.position = state.done

    def result(self) -> Checkpoint:
        """The adapted checkpoint; with --norm fold its centre norms are multiplied into the maps that follow them."""
        record = self.record
        if self.settings.norm == "fold":
            record = replace(record, surgery=folded(record.surgery, _fold_norms(self.student.net)))
        parameters: dict[str, Any] = {**self.settings.parameters(), "calibration_images": self.lots.count}
        return self.checkpoint.derive(
            build.tensors_of(self.student), "adapt", parameters, self.settings.seed, surgery=record.surgery
        )


def operate(checkpoint: Checkpoint, settings: AdaptSettings, teacher: build.PixelModel) -> tuple[Any, Scales]:
    """The network after surgery, each new part started from the weights of the part it replaces; the scales of its stream."""
    record = replace(checkpoint.record, surgery=plan(checkpoint.record, settings))
    device = next(teacher.parameters()).device
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(settings.seed)  # of parts that no start fills
        net = build.build(record, initialise=True).requires_grad_(False)
        student = build.PixelModel(record.input, net).eval().to(device)
        family = family_of(teacher.net)
        tokens = token_counts(teacher, record.input.size)
        scales = carry_over(teacher.net, net, family, tokens, settings.norm_floor)
    return student, scales


def _fold_norms(net: Any) -> list[str]:
    """Multiply every centre norm of a block into the linear maps that follow it; the paths of those now identities."""
    paths = []
    for step in family_of(net).body(net):
        half: Half
        for half in (1, 2) if step.kind == "block" else ():
            norm, readers = getattr(step.module, f"norm{half}"), input_maps(step.module, half)
            # an offset needs biases to go to, and what reads the stream otherwise than by a linear map sees the norm itself
            foldable = (
                bool(readers) and all(layer.bias is not None for layer in readers) and reads_linearly(step.module, half)
            )
            if isinstance(norm, CenterNorm) and foldable:
                for layer in readers:
                    fold_center_norm(norm, layer)
                setattr(step.module, f"norm{half}", nn.Identity())
                paths.append(f"{step.path}.norm{half}")
    return paths
