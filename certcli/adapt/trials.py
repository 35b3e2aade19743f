"""Which parts of a network could be worth changing: each is changed alone, and the whole network's logits are looked at.

Two kinds of change: a norm's floor raised to a quantile of the deviations that reach it, and an attention of smaller
constant in place of dot-product attention, fitted in closed form. What comes before the changed part is not computed again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.candidates import (
    QUANTILES,
    TRIED,
    Option,
    Seen,
    attention_option,
    fitted,
    floor_options,
    made,
    watched,
)
from certcli.adapt.pixels import as_pixels
from certcli.adapt.stages import replaceable_attentions, stages_of
from certcli.lipschitz.network import trial_upper
from certcli.nn.norms import FloorNorm
from certcli.system.processes import ALONE, Team

LOOKED_AT, FITTED_TO = 12, 48
"""Images whose logits are compared, and images that quantiles and closed forms are taken from."""


@dataclass(frozen=True)
class Step:
    """One move along the list: a part goes on to its next option, for so many digits and so much squared error."""

    option: Option
    digits: float
    cost: float


Piece = tuple[int, str, str]
"""What is tried at once: number of the stage, path of a part, "" for the floors of a norm or the name of an attention."""
Place = tuple[int, int, int]
"""Where an option stands among all: stage, the part in the order of calls, which of its options."""


class _Walk:
    """The images on their way through the network: each stage is run once, when its first part is asked for."""

    def __init__(self, trials: "Trials", parts: Mapping[str, nn.Module]) -> None:
        self.stages, self.parts, self.batch_size = stages_of(trials.student), parts, trials.batch_size
        self.rows = self.after = trials.fitted_to
        self.looked_at = trials.looked_at
        self.number, self.seen = -1, dict[str, Seen]()
        self.wanted = trials.student(as_pixels(trials.looked_at))

    def at(self, number: int) -> dict[str, Seen]:
        """What reaches the parts of this stage, which lies no earlier than the last one asked for."""
        while self.number < number:
            if self.number >= 0:
                self.rows, self.looked_at = self.after, self.stages[self.number].run(self.looked_at)
            self.number += 1
            stage = self.stages[self.number]
            inside = {path: part for path, part in self.parts.items() if stage.holds(path)}
            self.after, self.seen = watched(stage.run, self.rows, inside, self.batch_size)
        return self.seen

    def error(self) -> float:
        """Relative, of the logits of the images that are looked at, as the network now is from this stage on."""
        stream = self.looked_at
        for stage in self.stages[self.number :]:
            stream = stage.run(stream)
        return float((stream - self.wanted).norm() / self.wanted.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class _Tried:
    """place: where it stands among all options. name: of an attention, "" for a floor. rank: the process that tried it."""

    place: Place
    option: Option
    name: str
    rank: int
    floor: float = 0.0

    def to_plain(self) -> list[Any]:
        place: Any = self.option.place
        floor = 0.0 if self.name else float(place.args[0]) if isinstance(place, partial) else self.floor
        told = [getattr(self.option, name) for name in _STATED]
        return [list(self.place), told, self.name, self.rank, floor]

    @staticmethod
    def of(plain: list[Any]) -> "_Tried":
        """Inverse of `to_plain`, but for how it is placed."""
        place, told, name, rank, floor = plain
        option = Option(**dict(zip(_STATED, told, strict=True)), place=lambda: None)
        return _Tried(tuple(place), option, name, rank, floor)


_STATED = ("path", "kind", "change", "digits", "error", "family")


class Trials:
    """Every option of every part of `student`, whose floors are already below every deviation seen.

    Several processes try an option each, and all know every result: errors as they were found, attentions bit for bit.
    """

    def __init__(self, student: Any, images: Tensor, batch_size: int, team: Team = ALONE) -> None:
        self.student, self.batch_size, self.team = student, batch_size, team
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
        """Every option tried alone, from the first part of the network to the last; the leader is told of each."""
        self.undo = {path: partial(norm.floor.fill_, float(norm.floor)) for path, norm in self.norms.items()}
        self.undo |= {path: partial(self._put, path, old) for path, old in self.attentions.items()}
        parts, own = {**self.norms, **self.attentions}, dict[tuple[str, str], nn.Module]()
        walk, found = _Walk(self, parts), list[_Tried]()
        pieces = [
            (number, path, name)
            for number, stage in enumerate(walk.stages)
            for path in parts
            if stage.holds(path)
            for name in (("",) if path in self.norms else TRIED)
        ]

        def find(piece: Piece) -> list[_Tried]:
            return list(self._try(walk, piece, own))

        def pack(some: list[_Tried]) -> list[Any]:
            return [one.to_plain() for one in some]

        def unpack(rows: list[Any]) -> list[_Tried]:
            return [_Tried.of(row) for row in rows]

        for _, some in self.team.deal(pieces, find, pack=pack, unpack=unpack):
            found += some
            yield from (one.option for one in some)
        found.sort(key=lambda one: one.place)
        if self.team.several:
            known = unpack(self.team.agree(lambda: pack(found)))
            found = [replace(one, option=self._placeable(one, own)) for one in known]
        self.options = [one.option for one in found]

    def _try(self, walk: "_Walk", piece: Piece, own: dict[tuple[str, str], nn.Module]) -> "Iterator[_Tried]":
        """own: where the attentions that this process fits are kept."""
        number, path, name = piece
        seen = walk.at(number)
        if path not in seen:
            return
        if name:
            own[path, name] = fitted(name, self.attentions[path], seen[path])
            options = [attention_option(path, name, partial(self._put, path), own[path, name])]
        else:
            options = list(floor_options(path, self.norms[path], seen[path]))
        for turn, option in enumerate(options):
            option.place()
            tried = replace(option, error=walk.error())
            self.undo[path]()
            order = (number, list(seen).index(path), TRIED.index(name) if name else turn)
            yield _Tried(order, tried, name, self.team.rank)

    def _placeable(self, one: "_Tried", own: Mapping[tuple[str, str], nn.Module]) -> Option:
        """The option as this process can place it; the weights of an attention come from the process that fitted it."""
        path, name = one.option.path, one.name
        if not name:
            return replace(one.option, place=partial(self.norms[path].floor.fill_, one.floor))
        new = own[path, name] if (path, name) in own else made(name, self.attentions[path])
        for tensor in (*new.parameters(), *new.buffers()):
            self.team.spread(tensor, one.rank)
        return replace(one.option, place=partial(self._put, path, new))

    def _put(self, path: str, attention: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.student.net.get_submodule(parent), name, attention)

    def steps(self) -> list[Step]:
        """The moves, the cheapest digit first. What a kind of part gains is measured for all of its kind at once."""
        gains = self._gains()
        self.options = [replace(option, digits=option.digits * gains[option.kind]) for option in self.options]
        found: list[Step] = []
        for path in dict.fromkeys(option.path for option in self.options):
            found += hull([option for option in self.options if option.path == path])
        return sorted(found, key=lambda step: step.cost / step.digits)

    def _gains(self) -> dict[str, float]:
        """By kind: digits of the bound for each digit that its options claim, all of them placed: at least 0."""
        kinds = list(dict.fromkeys(option.kind for option in self.options))
        chosen = {kind: {option.path: option for option in self.options if option.kind == kind} for kind in kinds}

        def find(kind: str) -> float:
            for option in chosen.get(kind, {}).values():
                option.place()
            after = self.log10_upper()
            for path in chosen.get(kind, {}):
                self.undo[path]()
            return after

        found = [upper for _, upper in self.team.deal(["", *kinds], find)]  # first: as it is
        before, *after = self.team.agree(lambda: found)
        claimed = [sum(option.digits for option in some.values()) for some in chosen.values()]
        return {
            kind: max(0.0, before - upper) / digits if digits > 0 and before < float("inf") else 0.0
            for kind, upper, digits in zip(kinds, after, claimed, strict=True)
        }

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
