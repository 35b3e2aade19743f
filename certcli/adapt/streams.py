"""The streams of all calibration images in both networks, and what every fitting step shares."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from certcli.adapt.calibration_shards import Lots
from certcli.adapt.descend import mixed_precision
from certcli.adapt.families import Family, part_at
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import CenterStart, deviations, floor_start
from certcli.nn.norms import CenterNorm, FloorNorm


@dataclass(frozen=True)
class AdaptedPart:
    """An adapted part: its path, its description before and after, its relative output error."""

    path: str
    before: str
    after: str
    error: float


Stream = dict[int, Tensor]
"""Lot -> its images' activations (n, ...), for the lots of this process."""
Pairs = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Lot -> pairs (rows of the new network, target rows)."""


class Sums(Protocol):
    """A solver that is fitted from sums over rows."""

    @property
    def sums(self) -> list[Tensor]: ...

    def add(self, x: Tensor, y: Tensor, /) -> None: ...


Fit = TypeVar("Fit", bound=Sums)


class Streams:
    """Hold the streams between two sections, `old` and `new`, lot by lot."""

    def __init__(
        self, teacher: Any, student: Any, family: Family, settings: AdaptSettings, lots: Lots
    ) -> None:
        self.teacher = teacher
        self.student = student
        self.family = family
        self.settings = settings
        self.lots = lots
        self.old: Stream = {}
        self.new: Stream = {}

    def chunks(self, *streams: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = self.settings.batch_size
        yield from zip(*(stream.split(size) for stream in streams), strict=True)

    def forget(self) -> None:
        self.old = {}
        self.new = {}

    def agree_on(self, module: nn.Module) -> None:
        """Copy the leader's weights to all processes: different processors drift apart."""
        self.lots.team.copy_from_leader(list(module.state_dict().values()))

    def move(
        self, old: Callable[[Tensor], Tensor] | None, new: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Move both streams through one section; in place where the shape stays."""
        for run, stream in ((old, self.old), (new, self.new)):
            if run is not None:
                stream.update({lot: self._through(run, rows) for lot, rows in stream.items()})

    def _through(self, run: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        # the stream stays in float32; products are rounded only where AdamW rounds them as well
        exact = self.settings.epochs == 0
        with (
            contextlib.nullcontext() if exact else mixed_precision(stream.device, stream[0].numel())
        ):
            parts = stream.split(self.settings.batch_size)
            first = run(parts[0])
            if first.shape[1:] != stream.shape[1:]:
                return torch.cat([first, *(run(part) for part in parts[1:])]).float()
            parts[0].copy_(first)
            for part in parts[1:]:
                part.copy_(run(part))
        return stream

    def accumulate(self, fresh: Callable[[], Fit], pairs: Pairs) -> Fit:
        """Return a solver made by `fresh` that holds the sums over the pairs of all lots."""

        def per_lot(lot: int) -> list[Tensor]:
            one = fresh()
            for new, old in pairs(lot):
                one.add(new, old)
            return one.sums

        whole = fresh()
        for mine, total in zip(whole.sums, self.lots.total(per_lot, whole.sums), strict=True):
            mine.copy_(total)
        return whole

    def relative_error(self, pairs: Pairs) -> float:
        """Return |found - target|_F / |target|_F over the pairs of all lots."""

        def per_lot(lot: int) -> list[Tensor]:
            difference = size = 0.0
            for output, target in pairs(lot):
                difference += float((output - target).double().square().sum())
                size += float(target.double().square().sum())
            return [torch.tensor([difference, size], dtype=torch.float64)]

        difference, size = self.lots.total(per_lot, [torch.zeros(2, dtype=torch.float64)])[
            0
        ].tolist()
        return float((difference / max(size, 1e-30)) ** 0.5)

    def error(self, scale: float) -> float:
        return self.relative_error(
            lambda lot: (
                (new * scale, old) for new, old in self.chunks(self.new[lot], self.old[lot])
            )
        )

    def start_norm_at(
        self,
        path: str,
        run: Callable[[Any, Tensor], Tensor],
        old_inputs: Stream,
        new_inputs: Stream,
        first: int | None = None,
    ) -> Any:
        """Start the student's norm at `path` on its inputs during `run`; return it, if any.

        Args:
            first: the number of leading tokens that count; None: all.
        """
        new, old = part_at(self.student.net, path), part_at(self.teacher.net, path)
        if old is None or not isinstance(new, (CenterNorm, FloorNorm)):
            return None

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(old_inputs[lot], new_inputs[lot]):
                inputs = capture_input(new, partial(run, self.student, after))
                reached = capture_input(old, partial(run, self.teacher, before))
                if first is not None and inputs.dim() == 3:
                    inputs = inputs[:, :first]
                    reached = reached[:, :first]
                yield inputs.flatten(0, -2), old(reached).flatten(0, -2)

        self.start_norm(new, pairs)
        return new

    def start_norm(self, norm: nn.Module, pairs: Pairs) -> None:
        """Start a norm on pairs (inputs of the new norm, outputs of the old norm)."""
        if isinstance(norm, CenterNorm):
            self.accumulate(lambda: CenterStart(norm.width, norm.weight.device), pairs).start(norm)
        elif isinstance(norm, FloorNorm) and self.settings.norm_floor is None:
            floor_start(
                norm,
                self.lots.rows(
                    lambda lot: torch.cat([deviations(inputs) for inputs, _ in pairs(lot)])
                ),
            )


def capture_input(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """Return the input of `module` during `run`."""
    captured: list[Tensor] = []
    with module.register_forward_pre_hook(lambda _, inputs: captured.append(inputs[0])):
        run()
    return captured[0]
