"""Rounding in walks that enclose executed tensors near an image: by the sizes they find."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.executed import Bounds
from certcli.engine.table import NoRule
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.rounding.head import Head
from certcli.rounding.operation_errors import Executed, Sizes
from certcli.rounding.precisions import Precision, compounded


@dataclass(frozen=True)
class ErrorStep:
    """One tensor of the graph: slopes in the tensors that it is made of, what rounding adds, its
    sizes on the whole box.

    Attributes:
        node: the name of the node that made it.
        shifts: it is the logits' log_softmax, whose margins are theirs.
        hides: as in `Followed`.
    """

    node: str
    sources: tuple[int, ...]
    slopes: tuple[Real, ...]
    rounding: Callable[[Sizes], Real]
    box: Executed
    entries: int
    shifts: bool = False
    hides: bool = False


def carried(factors: Sequence[Real], values: Sequence[Real]) -> Real:
    """Return the sum of each value times its factor."""
    total = ZERO
    for factor, value in zip(factors, values, strict=True):
        if value > ZERO:  # what is exact stays so whatever the slope
            total = total + factor * value
    return total


def errors_of_pairs(
    steps: Sequence[ErrorStep],
    last: int,
    head: Head | None,
    precision: Precision,
    sizes: Mapping[int, Executed] | Sequence[Executed],
    errors: Mapping[int, Real] | Sequence[Real],
) -> Tensor:
    """Return E_ij of all logits, (k, k), from all tensors' errors; last: the logits' place."""
    if steps[last].shifts:
        # less two numbers that all logits share: their difference, and the results, are rounded
        (source,) = steps[last].sources
        of_logits = errors_of_pairs(steps, source, head, precision, sizes, errors)
        largest = sizes[source].peak * 4.0 + 2.0 * math.log(of_logits.shape[0] + 1)
        return of_logits + 2 * float(largest * compounded(as_real(2 * precision.unit)))
    if head is None:
        both = errors[last] * (1 + 2.0**-1)  # |z_i - z_j| moves by sqrt(2) |z| at most
        classes = steps[last].box.shape[-1]
        return torch.full((classes, classes), float(both), dtype=torch.float64)
    (source,) = steps[last].sources
    return head.pairs(errors[source], sizes[source].total, errors[last])


class EnclosedErrors:
    """What `enclosure.zonotopes.executed.Execution` promises, of a network whose operations were
    followed.

    Attributes:
        enclosed: names of the nodes whose executed values a walk encloses; their errors count as 0
            in what comes behind them. NoRule where one of them was not followed.
    """

    def __init__(
        self,
        steps: Sequence[ErrorStep],
        enclosed: frozenset[str],
        last: int,
        head: Head | None,
        precision: Precision,
    ) -> None:
        self.steps = steps
        self.last = last
        self.head = head
        self.precision = precision
        self.places: dict[str, list[int]] = {}
        for place, step in enumerate(steps):
            if not step.node or step.node in enclosed:
                self.places.setdefault(step.node, []).append(place)
        if missing := sorted(enclosed - set(self.places)):
            raise NoRule(f"the rounding of '{missing[0]}' is not known")

    def walk(self, images: int) -> "EnclosedWalk":
        """Return the rounding of one walk around this many images."""
        return EnclosedWalk(self, images)


class EnclosedWalk:
    """A walk around some images; it calls `found` with each value's bounds, in order."""

    def __init__(self, errors: EnclosedErrors, images: int) -> None:
        self.errors = errors
        self.sizes: list[dict[int, Executed]] = [{} for _ in range(images)]
        self.holds = [True] * images

    def observe(self, node: str, parts: Sequence[Bounds]) -> None:
        """Note the values of a node; "" is the image. What may overflow has no enclosure."""
        for place, bounds in zip(self.errors.places[node], parts, strict=True):
            box = self.errors.steps[place].box
            rows = zip(*(part.tolist() for part in bounds), strict=True)
            for image, (total, fibre, peak, deviation) in enumerate(rows):
                # not where it is NaN
                largest = [as_real(x) if x >= 0 else INF for x in (total, fibre, peak)]
                size = box.within_all(largest[0], largest[1], largest[2], deviation)
                self.sizes[image][place] = size
                self.holds[image] &= size.peak < self.errors.precision.largest

    def lost(self, node: str) -> list[Tensor]:
        """Return the l2 norm of rounding in each result of a node, by image: (b,) each."""
        return [
            torch.tensor(
                [self._lost(image, self.errors.steps[place]) for image in range(len(self.sizes))]
            ).double()
            for place in self.errors.places[node]
        ]

    def _lost(self, image: int, step: ErrorStep) -> float:
        added = step.rounding(lambda x: self.sizes[image][x.place])
        self.holds[image] &= added.finite
        return float(added) if added.finite else 0.0

    def pairs(self) -> Tensor:
        """Return how far execution beyond the enclosed nodes moves z_i - z_j: (b, k, k), or inf."""
        return torch.stack([self._pairs(image) for image in range(len(self.sizes))])

    def _pairs(self, image: int) -> Tensor:
        analysis = self.errors
        sizes = dict(self.sizes[image])
        errors: dict[int, Real] = dict.fromkeys(sizes, ZERO)
        for place, step in enumerate(analysis.steps):
            if place in sizes or any(source not in sizes for source in step.sources):
                continue  # enclosed, or not read by the logits
            added = step.rounding(lambda x: sizes[x.place])
            error = carried(step.slopes, [errors[source] for source in step.sources]) + added
            sizes[place] = step.box
            peak = step.box.peak
            if place == analysis.last and analysis.head is not None:
                # logits of features near the image are smaller than those on the whole box
                features = sizes[step.sources[0]].total
                peak = min(peak, analysis.head.layer.reach(features) + added)
            errors[place] = error if peak < analysis.precision.largest else INF
        errors_of = errors_of_pairs(
            analysis.steps, analysis.last, analysis.head, analysis.precision, sizes, errors
        )
        return errors_of if self.holds[image] else torch.full_like(errors_of, torch.inf)
