"""Adapt a network: surgery, closed forms, blocks, distillation. A run can be resumed."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.adaptation import Adaptation, AdaptedPart
from certcli.adapt.calibration_shards import FEW, SHARDS, Shards
from certcli.adapt.distil import distil
from certcli.adapt.families import Half, adapted_family, token_counts
from certcli.adapt.fit import Fitter
from certcli.adapt.pixels import photograph_sized
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import fold_center_norm
from certcli.adapt.state import AdaptState
from certcli.adapt.weight_transfer import Scales, branch_inputs, carry_over, reads_linearly
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.norms import CenterNorm
from certcli.system.errors import CheckpointError, one_line
from certcli.system.processes import ALONE, Team
from certcli.system.torch_modes import seed_all

NETWORK = "(network)"
"""The path of the record of distillation."""


class Adapter(Adaptation):
    """Fit a new network to the original one.

    Several processes share the images by shards (`calibration_shards.py`) and end with the same
    networks.
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
        # many small passes are slow on a GPU, where equal bytes are not promised anyway
        number = 1 if device.type == "cuda" else SHARDS if photograph_sized(images) else FEW
        shards = Shards(len(images), team, number)
        self.student, scales = perform_surgery(self.record, settings, self.teacher)
        family = adapted_family(self.teacher.net)
        self.sections = len(family.body(self.student.net)) + 1  # and the end
        parts = {shard: self.images[shards.images(shard)] for shard in shards.own}
        self.fitter = Fitter(self.teacher, self.student, family, scales, settings, parts, shards)
        self.done = 0
        self.rate = settings.lr

    @property
    def steps(self) -> int:
        """Return about how many records a run has: sections, the end, epochs of distillation."""
        return self.sections + self.settings.distill

    def run(self) -> Iterator[AdaptedPart]:
        """Fit closed forms, then blocks, then distil; continue from a restored state."""
        if self.settings.epochs < 0:
            return
        self._copy_from_leader()
        if self.done < self.sections:
            for done, records in self.fitter.run(self.done):
                self._copy_from_leader()
                self.done = done
                self.records += records
                yield from records
        self.fitter.old, self.fitter.new = {}, {}
        if self.settings.distill > 0:
            yield from self._distil()

    def _distil(self) -> Iterator[AdaptedPart]:
        images, shards = self.fitter.images, self.fitter.shards
        epochs = self.done - self.sections
        for rate, error in distil(
            self.teacher, self.student, self.settings, images, shards, epochs, self.rate
        ):
            self.rate = rate
            self.done += 1
            self._copy_from_leader()
            after = f"distilled, epoch {self.done - self.sections}"
            self.records = [record for record in self.records if record.path != NETWORK]
            self.records.append(AdaptedPart(NETWORK, "logits", after, error))
            yield self.records[-1]

    def _copy_from_leader(self) -> None:
        """Copy the leader's weights to all processes: different processors drift apart."""
        self.team.copy_from_leader(list(self.student.net.state_dict().values()))

    def state(self) -> AdaptState:
        """Return the state between two records: everything that the next step depends on."""
        records = [asdict(record) for record in self.records]
        tensors = build.tensors_of(self.student)
        return AdaptState(self.identity, self.done, self.rate, records, tensors)

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
        self.done = state.done
        self.rate = state.rate

    def result(self) -> Checkpoint:
        """Return the adapted checkpoint; --norm fold folds centre norms into the next maps."""
        folded = _fold_norms(self.student.net) if self.settings.norm == "fold" else []
        return self.derive(
            tuple(
                replace(item, kind="identity") if item.path in folded else item
                for item in self.record.surgery
            )
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
        family = adapted_family(teacher.net)
        tokens = token_counts(teacher, record.input.size)
        scales = carry_over(teacher.net, net, family, tokens)
    return student, scales


def _fold_norms(net: Any) -> list[str]:
    """Fold the centre norms of all blocks into the next linear maps; return these norms' paths."""
    paths = []
    for step in adapted_family(net).body(net):
        half: Half
        for half in (1, 2) if step.kind == "block" else ():
            norm = getattr(step.module, f"norm{half}")
            readers = branch_inputs(step.module, half)
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
