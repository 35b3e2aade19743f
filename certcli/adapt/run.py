"""`--goal certify` and named parts: surgery, closed forms, blocks, distillation. A run can be
resumed; its state is safetensors, written atomically, no pickle.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from certcli.adapt.descend import distil
from certcli.adapt.fit import Fitter
from certcli.adapt.plan import AdaptedPart, Half, adapted_family
from certcli.adapt.start import branch_inputs, fold_center_norm, reads_linearly
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.outputs import read_state, write_state
from certcli.checkpoint.schema import AdaptFields
from certcli.checkpoint.tensor_files import in_file_order
from certcli.models import build
from certcli.nn.norms import CenterNorm
from certcli.system.errors import CheckpointError, one_line

KEY = "certvit-adapt-state"


@dataclass(frozen=True)
class AdaptState:
    """Adapted sections and epochs of distillation (`done`), the rate of the next epoch, records
    reported so far, and the new network's tensors.
    """

    identity: str
    done: int
    rate: float
    records: list[dict[str, Any]]
    net: Mapping[str, Tensor]


def save_adaptation_state(path: Path, state: AdaptState) -> None:
    about = {name: getattr(state, name) for name in ("identity", "done", "rate", "records")}
    write_state(path, KEY, about, state.net, (state.net[name] for name in in_file_order(state.net)))


def load_adaptation_state(path: Path, expected: str) -> AdaptState:
    """Return the state at `path`, as `read_state` reads it."""
    about, tensors = read_state(path, KEY, AdaptFields, "an adaptation", expected)
    net = {name: value.clone() for name, value in tensors.items()}
    return AdaptState(about.identity, about.done, about.rate, about.records, net)


NETWORK = "(network)"
"""The path of the record of distillation."""


class Adapter(Fitter):
    """Fit a new network to the original one; see `state` and `restore`."""

    def _begin(self) -> None:
        super()._begin()
        self.sections = len(self.family.body(self.student.net)) + 1  # and the end
        self.done = 0
        self.rate = self.settings.lr

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
            for done, records in self.fit(self.done):
                self._copy_from_leader()
                self.done = done
                self.records += records
                yield from records
        self.old, self.new = {}, {}
        if self.settings.distill > 0:
            yield from self._distil()

    def _distil(self) -> Iterator[AdaptedPart]:
        epochs = self.done - self.sections
        for rate, error in distil(
            self.teacher, self.student, self.settings, self.pixels, self.shards, epochs, self.rate
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
