"""Both networks' streams of all calibration images, side by side, and what every fitting step does with them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from certcli.adapt.descend import mixed_precision
from certcli.adapt.families import Family
from certcli.adapt.lots import Lots
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import CenterStart, deviations, floor_start
from certcli.nn.norms import CenterNorm, FloorNorm


@dataclass(frozen=True)
class Replaced:
    """One adapted part: its path, what it was and became, its relative output error on the calibration images."""

    path: str
    before: str
    after: str
    error: float


Stream = dict[int, Tensor]
"""Lot -> what its images have become, (n, ...): of the lots that this process works on."""
Pairs = Callable[[int], Iterator[tuple[Tensor, Tensor]]]
"""Lot -> (rows of the new network, rows that they are to be fitted to)."""


class Sums(Protocol):
    """What is fitted from sums over rows."""

    @property
    def sums(self) -> list[Tensor]: ...

    def add(self, x: Tensor, y: Tensor, /) -> None: ...


Fit = TypeVar("Fit", bound=Sums)


class Streams:
    """`old` and `new`: the streams between two steps, lot by lot; the halves of a block are never kept."""

    def __init__(self, teacher: Any, student: Any, family: Family, settings: AdaptSettings, lots: Lots) -> None:
        self.teacher, self.student, self.family, self.settings, self.lots = teacher, student, family, settings, lots
        self.old: Stream = {}
        self.new: Stream = {}

    def chunks(self, *streams: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = self.settings.batch_size
        yield from zip(*(stream.split(size) for stream in streams), strict=True)

    def forget(self) -> None:
        """Let go of the streams."""
        self.old, self.new = {}, {}

    def agree_on(self, module: nn.Module) -> None:
        """All processes go on with the leader's weights: unlike processors would let them drift apart."""
        self.lots.team.copy_from_leader(list(module.state_dict().values()))

    def move(self, old: Callable[[Tensor], Tensor] | None, new: Callable[[Tensor], Tensor] | None) -> None:
        """Both streams through one step; in place where it keeps the shape."""
        for run, stream in ((old, self.old), (new, self.new)):
            if run is not None:
                stream.update({lot: self._through(run, rows) for lot, rows in stream.items()})

    def _through(self, run: Callable[[Tensor], Tensor], stream: Tensor) -> Tensor:
        # the stream itself stays in float32: only products are rounded, and only where AdamW rounds them as well
        exact = self.settings.epochs == 0
        with contextlib.nullcontext() if exact else mixed_precision(stream.device, stream[0].numel()):
            parts = stream.split(self.settings.batch_size)
            first = run(parts[0])
            if first.shape[1:] != stream.shape[1:]:
                return torch.cat([first, *(run(part) for part in parts[1:])]).float()
            parts[0].copy_(first)
            for part in parts[1:]:
                part.copy_(run(part))
        return stream

    def added(self, fresh: Callable[[], Fit], pairs: Pairs) -> Fit:
        """What `fresh` makes, given the pairs of all lots."""

        def of(lot: int) -> list[Tensor]:
            one = fresh()
            for new, old in pairs(lot):
                one.add(new, old)
            return one.sums

        whole = fresh()
        for mine, total in zip(whole.sums, self.lots.total(of, whole.sums), strict=True):
            mine.copy_(total)
        return whole

    def apart(self, pairs: Pairs) -> float:
        """|found - wanted|_F / |wanted|_F over the pairs of all lots."""

        def of(lot: int) -> list[Tensor]:
            difference = size = 0.0
            for found, wanted in pairs(lot):
                difference += float((found - wanted).double().square().sum())
                size += float(wanted.double().square().sum())
            return [torch.tensor([difference, size], dtype=torch.float64)]

        difference, size = self.lots.total(of, [torch.zeros(2, dtype=torch.float64)])[0].tolist()
        return float((difference / max(size, 1e-30)) ** 0.5)

    def error(self, scale: float) -> float:
        return self.apart(lambda lot: ((new * scale, old) for new, old in self.chunks(self.new[lot], self.old[lot])))

    def start_norm_at(
        self,
        path: str,
        run: Callable[[Any, Tensor], Tensor],
        old_inputs: Stream,
        new_inputs: Stream,
        first: int | None = None,
    ) -> Any:
        """Start the student's norm at `path` on what reaches it while `run` runs; None where there is no new norm.

        first: only the first so many tokens count.
        """
        try:
            new, old = self.student.net.get_submodule(path), self.teacher.net.get_submodule(path)
        except AttributeError:
            return None
        if not isinstance(new, (CenterNorm, FloorNorm)):
            return None

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(old_inputs[lot], new_inputs[lot]):
                inputs = captured(new, partial(run, self.student, after))
                reached = captured(old, partial(run, self.teacher, before))
                if first is not None and inputs.dim() == 3:
                    inputs, reached = inputs[:, :first], reached[:, :first]
                yield inputs.flatten(0, -2), old(reached).flatten(0, -2)

        self.start_norm(new, pairs)
        return new

    def start_norm(self, norm: nn.Module, pairs: Pairs) -> None:
        """pairs: (inputs of the new norm, outputs of the old one)."""
        if isinstance(norm, CenterNorm):
            self.added(lambda: CenterStart(norm.width, norm.weight.device), pairs).start(norm)
        elif isinstance(norm, FloorNorm) and self.settings.norm_floor is None:
            floor_start(norm, self.lots.rows(lambda lot: torch.cat([deviations(inputs) for inputs, _ in pairs(lot)])))


def captured(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """What reaches `module` while `run` runs."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        run()
    finally:
        handle.remove()
    return seen[0]
