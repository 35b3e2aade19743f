"""Both networks' streams of all calibration images, side by side, and what every fitting step does with them."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.descend import mixed_precision
from certcli.adapt.families import Family
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import center_norm_start, floor_start
from certcli.nn.norms import CenterNorm, FloorNorm


@dataclass(frozen=True)
class Replaced:
    """One adapted part: its path, what it was and became, its relative output error on the calibration images."""

    path: str
    before: str
    after: str
    error: float


Pairs = Callable[[], Iterator[tuple[Tensor, Tensor]]]


class Streams:
    """`old` and `new`: the streams between two steps, (n, ...) each; the halves of a block are never kept."""

    def __init__(self, teacher: Any, student: Any, family: Family, settings: AdaptSettings) -> None:
        self.teacher, self.student, self.family, self.settings = teacher, student, family, settings
        self.old = self.new = torch.empty(0)

    def chunks(self, *streams: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = self.settings.batch_size
        yield from zip(*(stream.split(size) for stream in streams), strict=True)

    def forget(self) -> None:
        """Let go of the streams."""
        self.old = self.new = torch.empty(0)

    def move(self, old: Callable[[Tensor], Tensor] | None, new: Callable[[Tensor], Tensor] | None) -> None:
        """Both streams through one step; in place where it keeps the shape."""
        self.old = self._through(old, self.old)
        self.new = self._through(new, self.new)

    def _through(self, run: Callable[[Tensor], Tensor] | None, stream: Tensor) -> Tensor:
        if run is None:
            return stream
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

    def error(self, scale: float) -> float:
        difference = size = 0.0
        for old, new in self.chunks(self.old, self.new):
            difference += float((new * scale - old).double().square().sum())
            size += float(old.double().square().sum())
        return (difference / max(size, 1e-30)) ** 0.5

    def start_norm_at(
        self,
        path: str,
        run: Callable[[Any, Tensor], Tensor],
        old_inputs: Tensor,
        new_inputs: Tensor,
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

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(old_inputs, new_inputs):
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
            center_norm_start(norm, pairs())
        elif isinstance(norm, FloorNorm) and self.settings.norm_floor is None:
            floor_start(norm, (inputs for inputs, _ in pairs()), None)


def captured(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """What reaches `module` while `run` runs."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        run()
    finally:
        handle.remove()
    return seen[0]
