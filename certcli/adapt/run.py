"""Adapt a network: surgery, closed forms, blocks, distillation. A run can be resumed."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.bound_tradeoff import Trade
from certcli.adapt.calibration_shards import FEW, LOTS, Lots
from certcli.adapt.distil import Distiller
from certcli.adapt.families import Half, family_of, token_counts
from certcli.adapt.fit import Fitter
from certcli.adapt.pixels import photograph_sized
from certcli.adapt.plan import plan
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import fold_center_norm
from certcli.adapt.state import AdaptState, identity
from certcli.adapt.streams import AdaptedPart
from certcli.adapt.weight_transfer import Scales, carry_over, input_maps, reads_linearly
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.norms import CenterNorm
from certcli.system.errors import CheckpointError, one_line
from certcli.system.processes import ALONE, Team
from certcli.system.seeds import seed_all


class Adapter:
    """Own the original network (teacher) and the new one (student); `run` fits it.

    Several processes share the images by lots (`calibration_shards.py`) and end with the same networks.

    Args:
        images: calibration pixels (n, c, h, w), float in [0, 1] or uint8.
    """

    trade = Trade()

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
        # datasets are sorted by class, and closed forms and comparisons use the first images only
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(settings.seed))
        # many small passes are slow on a GPU, where equal bytes are not promised anyway
        lots = 1 if device.type == "cuda" else LOTS if photograph_sized(images) else FEW
        self.lots = Lots(len(images), team, lots)
        self.images = {
            lot: images[order[self.lots.images(lot)]].to(device) for lot in self.lots.own
        }
        self.record = replace(checkpoint.record, surgery=plan(checkpoint, settings))
        # the student has no digits beyond float32
        self.teacher = build.load(checkpoint, device, torch.float32)
        self.student, scales = perform_surgery(self.record, settings, self.teacher)
        family = family_of(self.teacher.net)
        self.fitter = Fitter(
            self.teacher, self.student, family, scales, settings, self.images, self.lots
        )
        self.identity = identity(checkpoint.digest, settings, images)
        self.records: list[AdaptedPart] = []
        self.distiller: Distiller | None = None
        self._resumed: AdaptState | None = None

    @property
    def steps(self) -> int:
        """Return about how many records a run has: sections, the end, epochs of distillation."""
        return self._fitting_steps + self.settings.distill

    @property
    def _fitting_steps(self) -> int:
        return len(self.fitter.family.body(self.student.net)) + 1

    @property
    def steps_done(self) -> int:
        return self.fitter.position + (0 if self._resumed is None else self._resumed.epoch)

    def run(self) -> Iterator[AdaptedPart]:
        """Fit closed forms, then blocks, then distil; continue from a restored state."""
        state = self._resumed
        if self.settings.epochs < 0:
            return
        self.fitter.agree_on(self.student.net)
        if state is None or state.done < self._fitting_steps:
            self.fitter.advance(0 if state is None else state.done)
            for records in self.fitter.run():
                self.records += records
                yield from records
        self.fitter.forget()
        if self.settings.distill > 0:
            self.distiller = Distiller(
                self.teacher, self.student, self.settings, self.images, self.lots
            )
            if state is not None and state.epoch > 0:
                self.distiller.restore(dict(state.distiller), state.epoch)
            for error in self.distiller.run():
                after = f"distilled, epoch {self.distiller.epoch}"
                self.records = [record for record in self.records if record.path != "(network)"]
                self.records.append(AdaptedPart("(network)", "logits", after, error))
                yield self.records[-1]

    def state(self) -> AdaptState:
        """Return the state between two records: everything that the next step depends on."""
        return AdaptState(
            identity=self.identity,
            done=self.fitter.position if self.distiller is None else self._fitting_steps,
            epoch=0 if self.distiller is None else self.distiller.epoch,
            records=[asdict(record) for record in self.records],
            net=build.tensors_of(self.student),
            distiller={} if self.distiller is None else self.distiller.state(),
        )

    def restore(self, state: AdaptState) -> None:
        """Continue after `state`, to the same bytes on a CPU."""
        tensors_of_student = self.student.net.state_dict()
        try:
            self.records = [AdaptedPart(**record) for record in state.records]
            for name, tensor in state.net.items():
                tensors_of_student[name].copy_(tensor)
        except (TypeError, KeyError, RuntimeError) as failure:
            raise CheckpointError(
                f"the state does not fit this network ({one_line(failure)})", "drop --resume"
            ) from failure
        self._resumed = state
        self.fitter.position = state.done

    def result(self) -> Checkpoint:
        """Return the adapted checkpoint; --norm fold folds centre norms into the next maps."""
        surgery = self.record.surgery
        if self.settings.norm == "fold":
            folded = _fold_norms(self.student.net)
            surgery = tuple(
                replace(item, kind="identity") if item.path in folded else item for item in surgery
            )
        parameters: dict[str, Any] = {
            **self.settings.parameters(),
            "calibration_images": self.lots.count,
        }
        return self.checkpoint.derive(
            build.tensors_of(self.student), "adapt", parameters, self.settings.seed, surgery=surgery
        )


def perform_surgery(
    record: Record, settings: AdaptSettings, teacher: PixelModel
) -> tuple[Any, Scales]:
    """Return the network after surgery and the scales of its stream, from the old weights."""
    device = next(teacher.parameters()).device
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_all(settings.seed)  # for weights without a start
        net = build.build(record, initialise=True).requires_grad_(False)
        student = PixelModel(record.input, net).eval().to(device)
        family = family_of(teacher.net)
        tokens = token_counts(teacher, record.input.size)
        scales = carry_over(teacher.net, net, family, tokens, settings.norm_floor)
    return student, scales


def _fold_norms(net: Any) -> list[str]:
    """Fold the centre norms of all blocks into the next linear maps; return these norms' paths."""
    paths = []
    for step in family_of(net).body(net):
        half: Half
        for half in (1, 2) if step.kind == "block" else ():
            norm = getattr(step.module, f"norm{half}")
            readers = input_maps(step.module, half)
            # an offset moves into biases, and only linear maps may read the normed stream
            foldable = (
                bool(readers)
                and all(layer.bias is not None for layer in readers)
                and reads_linearly(step.module, half)
            )
            if isinstance(norm, CenterNorm) and foldable:
                for layer in readers:
                    fold_center_norm(norm, layer)
                setattr(step.module, f"norm{half}", nn.Identity())
                paths.append(f"{step.path}.norm{half}")
    return paths
