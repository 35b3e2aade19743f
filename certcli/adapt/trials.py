"""Which parts of a network could be worth changing: each is changed alone, and the whole network's logits are looked at.

Two kinds of change: a norm's floor raised to a quantile of the deviations that reach it, and an attention of smaller
constant in place of dot-product attention, fitted in closed form. What comes before the changed part is not computed again.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from certcli.adapt.options import QUANTILES, TRIED, Option, Seen, floor_options, replaced_attentions, watched
from certcli.adapt.pixels import as_pixels
from certcli.adapt.stages import Stage, replaceable_attentions, stages_of
from certcli.lipschitz.network import trial_upper
from certcli.nn.norms import FloorNorm

LOOKED_AT, FITTED_TO = 12, 48
"""Images whose logits are compared, and images that quantiles and closed forms are taken from."""


@dataclass(frozen=True)
class Step:
    """One move along the list: a part goes on to its next option, for so many digits and so much squared error."""

    option: Option
    digits: float
    cost: float


class Trials:
    """Every option of every part of `student`, whose floors are already below every deviation seen."""

    def __init__(self, student: Any, images: Tensor, batch_size: int) -> None:
        self.student, self.batch_size = student, batch_size
        self.fitted_to, self.looked_at = images[:FITTED_TO], images[-LOOKED_AT:]
        self.norms = {path: part for path, part in student.net.named_modules() if isinstance(part, FloorNorm)}
        self.attentions = replaceable_attentions(student.net)
        self.options: list[Option] = []
        self.undo: dict[str, Callable[[], Any]] = {}

    @property
    def most(self) -> int:
        """No more options than this are tried."""
        return len(self.norms) * len(QUANTILES) + len(self.attentions) * len(TRIED)

    @torch.no_grad()
    def run(self) -> Iterator[Option]:
        """Every option tried alone, from the first part of the network to the last."""
        stages = stages_of(self.student)
        rows, looked_at = self.fitted_to, self.looked_at
        wanted = self.student(as_pixels(looked_at))
        for number, stage in enumerate(stages):
            parts = {path: part for path, part in {**self.norms, **self.attentions}.items() if stage.holds(path)}
            after, seen = watched(stage.run, rows, parts, self.batch_size)
            for path, what in seen.items():
                for option in self._options(path, what):
                    option.place()
                    found = _through(stages[number:], looked_at)
                    self.undo[path]()
                    error = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
                    self.options.append(replace(option, error=error))
                    yield self.options[-1]
            rows, looked_at = after, stage.run(looked_at)

    def _options(self, path: str, seen: Seen) -> Iterator[Option]:
        if path in self.norms:
            norm = self.norms[path]
            self.undo[path] = partial(norm.floor.fill_, float(norm.floor))
            yield from floor_options(path, norm, seen)
            return
        parent, _, name = path.rpartition(".")
        holder, old = self.student.net.get_submodule(parent), self.attentions[path]
        self.undo[path] = partial(setattr, holder, name, old)
        yield from replaced_attentions(path, holder, name, old, seen)

    def steps(self) -> list[Step]:
        """The moves, the cheapest digit first. What a kind of part gains is measured for all of its kind at once."""
        gains = {kind: self._gain(kind) for kind in dict.fromkeys(option.kind for option in self.options)}
        self.options = [replace(option, digits=option.digits * gains[option.kind]) for option in self.options]
        found: list[Step] = []
        for path in dict.fromkeys(option.path for option in self.options):
            found += hull([option for option in self.options if option.path == path])
        return sorted(found, key=lambda step: step.cost / step.digits)

    def _gain(self, kind: str) -> float:
        """Digits of the bound for each digit that the options of this kind claim, all of them placed: at least 0."""
        chosen = {option.path: option for option in self.options if option.kind == kind}
        claimed = sum(option.digits for option in chosen.values())
        before = self.log10_upper()
        for option in chosen.values():
            option.place()
        after = self.log10_upper()
        for path in chosen:
            self.undo[path]()
        return max(0.0, before - after) / claimed if claimed > 0 and before < float("inf") else 0.0

    def log10_upper(self) -> float:
        return trial_upper(self.student, self.student.input_size).log10()

    def place(self, steps: Sequence[Step]) -> dict[str, Option]:
        """Exactly these moves; the option that each part has then."""
        for undo in self.undo.values():
            undo()
        placed = {step.option.path: step.option for step in steps}
        for option in placed.values():
            option.place()
        return placed


def hull(options: Sequence[Option]) -> list[Step]:
    """One part's options as moves, each dearer a digit than the one before: the lower convex hull of (digits, error^2)."""
    points = sorted(
        (option.digits, option.error**2, number) for number, option in enumerate(options) if option.digits > 0
    )
    kept: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    for point in points:
        if point[0] <= kept[-1][0]:
            continue
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) >= _slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    return [Step(options[new[2]], new[0] - old[0], max(0.0, new[1] - old[1])) for old, new in pairwise(kept)]


def _slope(old: tuple[float, float, int], new: tuple[float, float, int]) -> float:
    return (new[1] - old[1]) / (new[0] - old[0])


def _through(stages: Sequence[Stage], stream: Tensor) -> Tensor:
    for stage in stages:
        stream = stage.run(stream)
    return stream
