"""Try each option of each part alone, and measure the network's logits.

An option raises a norm's floor to a quantile of its deviations, or replaces dot-product attention by a fitted attention
of smaller constant. The segments before the changed part are not computed again.
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
    TRIAL_ATTENTIONS,
    Option,
    PartInputs,
    fit_attention,
    floor_options,
    new_attention,
    record_inputs,
    replacement,
)
from certcli.adapt.pixels import as_pixels
from certcli.adapt.segments import replaceable_attentions, segments_of
from certcli.lipschitz.network import trial_upper
from certcli.nn.norms import FloorNorm
from certcli.system.processes import ALONE, Team

COMPARED_IMAGES, FITTING_IMAGES = 12, 48
"""Images whose logits are compared, and images that give quantiles and closed forms."""


@dataclass(frozen=True)
class Move:
    """The step of one part to its next option: the digits it gains and the squared logit error it adds."""

    option: Option
    digits: float
    cost: float


Piece = tuple[int, str, str]
"""One unit of work: index of the segment, path of the part, name of the attention ("" for the floors of a norm)."""
Place = tuple[int, int, int]
"""The rank of an option among all: segment, part in the order of calls, option of the part."""


class SegmentRunner:
    """Run the network segment by segment; each segment runs once, when its first part is needed."""

    def __init__(self, trials: "Trials", parts: Mapping[str, nn.Module]) -> None:
        self.segments, self.parts, self.batch_size = segments_of(trials.student), parts, trials.batch_size
        self.rows = self.after = trials.fitting
        self.compared = trials.compared
        self.number, self.inputs = -1, dict[str, PartInputs]()
        self.reference = trials.student(as_pixels(trials.compared))

    def inputs_at(self, number: int) -> dict[str, PartInputs]:
        """Return the inputs of the parts in this segment, which must not precede the last one asked for."""
        while self.number < number:
            if self.number >= 0:
                self.rows, self.compared = self.after, self.segments[self.number].run(self.compared)
            self.number += 1
            segment = self.segments[self.number]
            inside = {path: part for path, part in self.parts.items() if segment.holds(path)}
            self.after, self.inputs = record_inputs(segment.run, self.rows, inside, self.batch_size)
        return self.inputs

    def error(self) -> float:
        """Return the relative error of the compared logits, with the network as it is from this segment on."""
        stream = self.compared
        for segment in self.segments[self.number :]:
            stream = segment.run(stream)
        return float((stream - self.reference).norm() / self.reference.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Trial:
    """The result of one option: its place, the attention's name ("" for a floor), the process that tried it."""

    place: Place
    option: Option
    name: str
    rank: int
    floor: float = 0.0

    def to_plain(self) -> list[Any]:
        """Return values that JSON can hold: all but the call that places the option."""
        place: Any = self.option.place
        floor = 0.0 if self.name else float(place.args[0]) if isinstance(place, partial) else self.floor
        values = [getattr(self.option, name) for name in _PLAIN_FIELDS]
        return [list(self.place), values, self.name, self.rank, floor]

    @staticmethod
    def of(plain: list[Any]) -> "Trial":
        place, values, name, rank, floor = plain
        option = Option(**dict(zip(_PLAIN_FIELDS, values, strict=True)), place=lambda: None)
        return Trial(tuple(place), option, name, rank, floor)


_PLAIN_FIELDS = ("path", "kind", "change", "digits", "error", "family")


class Trials:
    """Try every option of every part of `student`, whose floors already lie below every deviation seen.

    Several processes share the options, and all learn every result: the same errors, the same attentions to the bit.
    """

    def __init__(self, student: Any, images: Tensor, batch_size: int, team: Team = ALONE) -> None:
        self.student, self.batch_size, self.team = student, batch_size, team
        self.fitting, self.compared = images[:FITTING_IMAGES], images[-COMPARED_IMAGES:]
        self.norms = {path: part for path, part in student.net.named_modules() if isinstance(part, FloorNorm)}
        self.attentions = replaceable_attentions(student.net)
        self.options: list[Option] = []
        self.undo: dict[str, Callable[[], Any]] = {}

    @property
    def most(self) -> int:
        """Return an upper limit of the number of options."""
        return len(self.norms) * len(QUANTILES) + len(self.attentions) * len(TRIAL_ATTENTIONS)

    @torch.no_grad()
    def run(self) -> Iterator[Option]:
        """Try every option alone, from the first part to the last; the leader yields each."""
        self.undo = {path: partial(norm.floor.fill_, float(norm.floor)) for path, norm in self.norms.items()}
        self.undo |= {path: partial(self._put, path, old) for path, old in self.attentions.items()}
        parts, fitted = {**self.norms, **self.attentions}, dict[tuple[str, str], nn.Module]()
        runner, trials = SegmentRunner(self, parts), list[Trial]()
        pieces = [
            (number, path, name)
            for number, segment in enumerate(runner.segments)
            for path in parts
            if segment.holds(path)
            for name in (("",) if path in self.norms else TRIAL_ATTENTIONS)
        ]

        def pack(some: list[Trial]) -> list[Any]:
            return [trial.to_plain() for trial in some]

        def unpack(rows: list[Any]) -> list[Trial]:
            return [Trial.of(row) for row in rows]

        work = self.team.deal(pieces, lambda piece: list(self._try(runner, piece, fitted)), pack=pack, unpack=unpack)
        for _, some in work:
            trials += some
            yield from (trial.option for trial in some)
        trials.sort(key=lambda trial: trial.place)
        if self.team.several:
            known = unpack(self.team.agree(lambda: pack(trials)))
            trials = [replace(trial, option=self._placeable(trial, fitted)) for trial in known]
        self.options = [trial.option for trial in trials]

    def _try(self, runner: SegmentRunner, piece: Piece, fitted: dict[tuple[str, str], nn.Module]) -> Iterator[Trial]:
        """Try the options of one piece, and store an attention that this process fits in `fitted`."""
        number, path, name = piece
        inputs = runner.inputs_at(number)
        if path not in inputs:
            return
        if name:
            new = fitted[path, name] = fit_attention(name, self.attentions[path], inputs[path])
            place = partial(self._put, path, new)
            kind, change = replacement(name), type(new).__name__
            options = [Option(path, kind, change, 1.0, place, family=f"{name} attention")]
        else:
            options = list(floor_options(path, self.norms[path], inputs[path]))
        for index, option in enumerate(options):
            option.place()
            measured = replace(option, error=runner.error())
            self.undo[path]()
            order = (number, list(inputs).index(path), TRIAL_ATTENTIONS.index(name) if name else index)
            yield Trial(order, measured, name, self.team.rank)

    def _placeable(self, trial: Trial, fitted: Mapping[tuple[str, str], nn.Module]) -> Option:
        """Return the option with a call that places it here; an attention's weights come from its own process."""
        path, name = trial.option.path, trial.name
        if not name:
            return replace(trial.option, place=partial(self.norms[path].floor.fill_, trial.floor))
        new = fitted[path, name] if (path, name) in fitted else new_attention(name, self.attentions[path])
        for tensor in (*new.parameters(), *new.buffers()):
            self.team.spread(tensor, trial.rank)
        return replace(trial.option, place=partial(self._put, path, new))

    def _put(self, path: str, attention: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.student.net.get_submodule(parent), name, attention)

    def moves(self) -> list[Move]:
        """Return the moves, the cheapest digit first. All parts of a kind are measured together for its gain."""
        gains = self._gains()
        self.options = [replace(option, digits=option.digits * gains[option.kind]) for option in self.options]
        moves: list[Move] = []
        for path in dict.fromkeys(option.path for option in self.options):
            moves += hull([option for option in self.options if option.path == path])
        return sorted(moves, key=lambda move: move.cost / move.digits)

    def _gains(self) -> dict[str, float]:
        """Return, for each kind, the digits that the bound gains per digit claimed, all its options placed; >= 0."""
        kinds = list(dict.fromkeys(option.kind for option in self.options))
        chosen = {kind: {option.path: option for option in self.options if option.kind == kind} for kind in kinds}

        def log10_with(kind: str) -> float:
            for option in chosen.get(kind, {}).values():
                option.place()
            after = self.log10_upper()
            for path in chosen.get(kind, {}):
                self.undo[path]()
            return after

        uppers = [upper for _, upper in self.team.deal(["", *kinds], log10_with)]  # "": the network as it is
        before, *after = self.team.agree(lambda: uppers)
        claimed = [sum(option.digits for option in some.values()) for some in chosen.values()]
        return {
            kind: max(0.0, before - upper) / digits if digits > 0 and before < float("inf") else 0.0
            for kind, upper, digits in zip(kinds, after, claimed, strict=True)
        }

    def log10_upper(self) -> float:
        return trial_upper(self.student, self.student.input_size).log10()

    def place(self, moves: Sequence[Move]) -> dict[str, Option]:
        """Place exactly these moves, and return the option that each changed path then has."""
        for undo in self.undo.values():
            undo()
        placed = {move.option.path: move.option for move in moves}
        for option in placed.values():
            option.place()
        return placed


def hull(options: Sequence[Option]) -> list[Move]:
    """Return one part's moves at rising cost per digit: the lower convex hull of (digits, error^2)."""

    def slope(old: tuple[float, float, int], new: tuple[float, float, int]) -> float:
        return (new[1] - old[1]) / (new[0] - old[0])

    points = sorted((option.digits, option.error**2, n) for n, option in enumerate(options) if option.digits > 0)
    corners: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    for point in points:
        if point[0] <= corners[-1][0]:
            continue
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return [Move(options[new[2]], new[0] - old[0], max(0.0, new[1] - old[1])) for old, new in pairwise(corners)]
