"""Try each candidate change of each part alone, and measure the network's logits.

A candidate raises a norm's floor to a quantile of its deviations, or replaces dot-product attention
by a fitted attention of smaller constant. The segments before the changed part are not computed
again.
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
    Candidate,
    PartInputs,
    fit_attention,
    floor_candidates,
    new_attention,
    record_inputs,
    replacement,
)
from certcli.adapt.pixels import as_pixels
from certcli.adapt.segments import replaceable_attentions, segments_of
from certcli.evaluation.records import packed, unpacked
from certcli.lipschitz.network import trial_upper
from certcli.nn.norms import FloorNorm
from certcli.system.processes import ALONE, Team
from certcli.system.products import fast_products

COMPARED_IMAGES = 12
FITTING_IMAGES = 48
"""Number of images whose logits are compared, and of images that give quantiles and closed forms."""


@dataclass(frozen=True)
class Move:
    """The step of a part to its next candidate: digits gained and squared logit error added."""

    candidate: Candidate
    digits: float
    cost: float


Piece = tuple[int, str, str]
"""One unit of work: index of the segment, path of the part, name of the attention ("" for the floors of a norm)."""
Order = tuple[int, int, int]
"""The place of a candidate among all: segment, part in the order of calls, candidate of the part."""


class SegmentRunner:
    """Run the network segment by segment; each segment runs once, when its first part is needed."""

    def __init__(self, trials: "Trials", parts: Mapping[str, nn.Module]) -> None:
        self.segments = segments_of(trials.student)
        self.parts = parts
        self.batch_size = trials.batch_size
        self.rows = self.after = trials.fitting
        self.compared = trials.compared
        self.number, self.inputs = -1, dict[str, PartInputs]()
        self.reference = trials.student(as_pixels(trials.compared))

    def inputs_at(self, number: int) -> dict[str, PartInputs]:
        """Return the inputs of the parts in this segment, no earlier one than last time."""
        while self.number < number:
            if self.number >= 0:
                self.rows, self.compared = self.after, self.segments[self.number].run(self.compared)
            self.number += 1
            segment = self.segments[self.number]
            inside = {path: part for path, part in self.parts.items() if segment.holds(path)}
            self.after, self.inputs = record_inputs(segment.run, self.rows, inside, self.batch_size)
        return self.inputs

    def error(self) -> float:
        """Return the relative error of the compared logits, with this segment as it is now."""
        stream = self.compared
        for segment in self.segments[self.number :]:
            stream = segment.run(stream)
        return float((stream - self.reference).norm() / self.reference.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Trial:
    """A measured candidate, its place, the attention's name ("": a floor), and its process."""

    order: Order
    candidate: Candidate
    name: str
    rank: int

    def to_json(self) -> list[Any]:
        """Return values that JSON can hold: all but the call that places the candidate."""
        return [
            list(self.order),
            [getattr(self.candidate, name) for name in _PLAIN_FIELDS],
            self.name,
            self.rank,
        ]

    @staticmethod
    def from_json(plain: list[Any]) -> "Trial":
        """Return the trial of these values; its candidate cannot be placed."""
        order, values, name, rank = plain
        candidate = Candidate(**dict(zip(_PLAIN_FIELDS, values, strict=True)), place=lambda: None)
        return Trial(tuple(order), candidate, name, rank)


_PLAIN_FIELDS = ("path", "kind", "change", "digits", "error", "family", "floor")


class Trials:
    """Try all candidates of all parts of `student`, floors below all deviations seen.

    Several processes share the candidates, and all get every result: the same errors, the same
    attentions to the bit.
    """

    def __init__(self, student: Any, images: Tensor, batch_size: int, team: Team = ALONE) -> None:
        self.student = student
        self.batch_size = batch_size
        self.team = team
        self.fitting = images[:FITTING_IMAGES]
        self.compared = images[-COMPARED_IMAGES:]
        self.norms = {
            path: part for path, part in student.net.named_modules() if isinstance(part, FloorNorm)
        }
        self.attentions = replaceable_attentions(student.net)
        self.candidates: list[Candidate] = []
        self.undo: dict[str, Callable[[], Any]] = {}

    @property
    def most_candidates(self) -> int:
        """Return an upper limit of the number of candidates."""
        return len(self.norms) * len(QUANTILES) + len(self.attentions) * len(TRIAL_ATTENTIONS)

    @torch.no_grad()
    def run(self) -> Iterator[Candidate]:
        """Try every candidate alone, from the first part to the last; the leader yields each."""
        self.undo = {
            path: partial(norm.floor.fill_, float(norm.floor)) for path, norm in self.norms.items()
        }
        self.undo |= {path: partial(self._put, path, old) for path, old in self.attentions.items()}
        parts = {**self.norms, **self.attentions}
        fitted = dict[tuple[str, str], nn.Module]()
        runner, trials = SegmentRunner(self, parts), list[Trial]()
        pieces = [
            (number, path, name)
            for number, segment in enumerate(runner.segments)
            for path in parts
            if segment.holds(path)
            for name in (("",) if path in self.norms else TRIAL_ATTENTIONS)
        ]

        def tried(piece: Piece) -> list[Trial]:
            with fast_products(self.student):
                return list(self._try(runner, piece, fitted))

        unpack = partial(unpacked, Trial)
        work = self.team.deal(pieces, tried, pack=packed, unpack=unpack)
        for _, some in work:
            trials += some
            yield from (trial.candidate for trial in some)
        trials.sort(key=lambda trial: trial.order)
        if self.team.several:
            agreed = unpack(self.team.agree(lambda: packed(trials)))
            trials = [replace(trial, candidate=self._placeable(trial, fitted)) for trial in agreed]
        self.candidates = [trial.candidate for trial in trials]

    def _try(
        self, runner: SegmentRunner, piece: Piece, fitted: dict[tuple[str, str], nn.Module]
    ) -> Iterator[Trial]:
        """Try the candidates of one piece; an attention fitted in this process goes to `fitted`."""
        number, path, name = piece
        inputs = runner.inputs_at(number)
        if path not in inputs:
            return
        if name:
            new = fitted[path, name] = fit_attention(name, self.attentions[path], inputs[path])
            place = partial(self._put, path, new)
            kind = replacement(name)
            change = type(new).__name__
            candidates = [Candidate(path, kind, change, 1.0, place, family=f"{name} attention")]
        else:
            candidates = list(floor_candidates(path, self.norms[path], inputs[path]))
        for index, candidate in enumerate(candidates):
            candidate.place()
            measured = replace(candidate, error=runner.error())
            self.undo[path]()
            order = (
                number,
                list(inputs).index(path),
                TRIAL_ATTENTIONS.index(name) if name else index,
            )
            yield Trial(order, measured, name, self.team.rank)

    def _placeable(self, trial: Trial, fitted: Mapping[tuple[str, str], nn.Module]) -> Candidate:
        """Return the candidate with a call that places it here, its weights from its process."""
        path = trial.candidate.path
        name = trial.name
        if not name:
            return replace(
                trial.candidate, place=partial(self.norms[path].floor.fill_, trial.candidate.floor)
            )
        new = (
            fitted[path, name]
            if (path, name) in fitted
            else new_attention(name, self.attentions[path])
        )
        for tensor in (*new.parameters(), *new.buffers()):
            self.team.spread(tensor, trial.rank)
        return replace(trial.candidate, place=partial(self._put, path, new))

    def _put(self, path: str, attention: nn.Module) -> None:
        parent, _, name = path.rpartition(".")
        setattr(self.student.net.get_submodule(parent), name, attention)

    def moves(self) -> list[Move]:
        """Return the moves, the cheapest digit first; a kind's gain is measured all at once."""
        gains = self._gains()
        self.candidates = [
            replace(each, digits=each.digits * gains[each.kind]) for each in self.candidates
        ]
        moves: list[Move] = []
        for path in dict.fromkeys(candidate.path for candidate in self.candidates):
            moves += hull([candidate for candidate in self.candidates if candidate.path == path])
        return sorted(moves, key=lambda move: move.cost / move.digits)

    def _gains(self) -> dict[str, float]:
        """Return, by kind, the digits gained a digit claimed, all its candidates placed; >= 0."""
        kinds = list(dict.fromkeys(candidate.kind for candidate in self.candidates))
        chosen = {
            kind: {each.path: each for each in self.candidates if each.kind == kind}
            for kind in kinds
        }

        def log10_with(kind: str) -> float:
            for candidate in chosen.get(kind, {}).values():
                candidate.place()
            after = self.log10_upper()
            for path in chosen.get(kind, {}):
                self.undo[path]()
            return after

        # "": the network as it is
        uppers = [upper for _, upper in self.team.deal(["", *kinds], log10_with)]
        before, *after = self.team.agree(lambda: uppers)
        claimed = [sum(candidate.digits for candidate in some.values()) for some in chosen.values()]
        return {
            kind: max(0.0, before - upper) / digits if digits > 0 and before < float("inf") else 0.0
            for kind, upper, digits in zip(kinds, after, claimed, strict=True)
        }

    def log10_upper(self) -> float:
        return trial_upper(self.student, self.student.input_size).log10()

    def place(self, moves: Sequence[Move]) -> dict[str, Candidate]:
        """Place exactly these moves, and return the candidate that each changed path then has."""
        for undo in self.undo.values():
            undo()
        placed = {move.candidate.path: move.candidate for move in moves}
        for candidate in placed.values():
            candidate.place()
        return placed


def hull(candidates: Sequence[Candidate]) -> list[Move]:
    """Return one part's moves at rising cost per digit: the lower convex hull of (digits, error^2)."""

    def slope(old: tuple[float, float, int], new: tuple[float, float, int]) -> float:
        return (new[1] - old[1]) / (new[0] - old[0])

    points = sorted(
        (each.digits, each.error**2, n) for n, each in enumerate(candidates) if each.digits > 0
    )
    corners: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    for point in points:
        if point[0] <= corners[-1][0]:
            continue
        while len(corners) > 1 and slope(corners[-2], corners[-1]) >= slope(corners[-1], point):
            corners.pop()
        corners.append(point)
    return [
        Move(candidates[new[2]], new[0] - old[0], max(0.0, new[1] - old[1]))
        for old, new in pairwise(corners)
    ]
