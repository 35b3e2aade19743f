"""Rounding in walks that enclose executed tensors near an image, by the sizes they find; of the
last linear
layer logit by logit.
"""

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from certcli.enclosure.zonotopes.space import Bounds, Enclosed
from certcli.engine.table import NoRule, runs_known_code
from certcli.engine.trace import Trace, last_of
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.rounding.arithmetics import LinearMap, Precision, compounded
from certcli.rounding.operation_errors import Executed, OfResult, Sizes


@dataclass(frozen=True)
class Head:
    """The last linear layer: its rounding, logit by logit."""

    layer: LinearMap
    exact: Tensor

    def pairs(self, error: Real, total: Real, whole: Real) -> Tensor:
        """Return bounds on the rounding of z_i - z_j: (k, k).

        |w_i - w_j| e of the features' error e, and of each logit gamma (|w_i| |x| + |b_i|) and what storing w_i moves.

        Args:
            total: The norm of the executed features.
            whole: The error of all logits; infinite where they may overflow.
        """
        p = self.layer.precision
        layer = self.layer
        up = 1 + 2.0**-30
        if not (whole.finite and float(total) < 1e150 and float(error) < 1e150):
            return torch.full((layer.out, layer.out), math.inf, dtype=torch.float64)
        size = float(total)
        gamma = float(p.products(layer.terms))
        norm = torch.linalg.vector_norm(layer.weight.number, dim=1)
        rounding = norm * (size * gamma) + float(p.lost(layer.terms, 1.0))
        rounding = (
            rounding
            + (torch.linalg.vector_norm(layer.weight.difference, dim=1) + layer.weight.flushed)
            * size
        )
        if layer.bias is not None:
            rounding = (
                rounding
                + layer.bias.number.abs() * gamma
                + layer.bias.difference.abs()
                + layer.bias.flushed
            )
        distances = torch.cdist(self.exact, self.exact, compute_mode="donot_use_mm_for_euclid_dist")
        return (distances * float(error) + rounding[:, None] + rounding[None, :]) * up + 1e-300


def head_of(traced: Trace, precision: Precision) -> Head | None:
    """Return the linear layer that makes the logits, where one does."""
    node = last_of(traced)
    if node.op != "call_module" or len(node.meta["shape"]) != 2:
        return None
    module = traced.root.get_submodule(str(node.target))
    if (
        not runs_known_code(module, nn.Linear)
        or not isinstance(module, nn.Linear)
        or module.out_features > 4096
    ):
        return None
    return Head(LinearMap(module.weight, module.bias, precision), module.weight.detach().double())


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
    """What `enclosure.zonotopes.space.Execution` promises, of a network whose operations were
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

    def walk(self) -> "EnclosedWalk":
        """Return the rounding of one walk around an image."""
        return EnclosedWalk(self)


class EnclosedWalk:
    """A walk around an image; it calls `observe` with each value's bounds, in order."""

    def __init__(self, errors: EnclosedErrors) -> None:
        self.errors = errors
        self.sizes: dict[int, Executed] = {}
        self.holds = True

    def observe(self, node: str, parts: Sequence[Bounds]) -> None:
        """Note the values of a node; "" is the image. What may overflow has no enclosure."""
        for place, bounds in zip(self.errors.places[node], parts, strict=True):
            # not where it is NaN
            total, fibre, peak = (as_real(x) if x >= 0 else INF for x in bounds[:3])
            size = self.errors.steps[place].box.within_all(total, fibre, peak, bounds.deviation)
            self.sizes[place] = size
            self.holds &= size.peak < self.errors.precision.largest

    def lost(self, node: str, results: Sequence[Enclosed]) -> list[float]:
        """Return the l2 norm of rounding in each result of a node."""
        places = zip(self.errors.places[node], results, strict=True)
        return [self._lost(self.errors.steps[place], result) for place, result in places]

    def _lost(self, step: ErrorStep, result: Enclosed) -> float:
        if isinstance(step.rounding, OfResult):
            bounds = result.bounds()
            finite = bounds.total < math.inf  # not where it is NaN
            near = step.rounding.near
            added = near(as_real(bounds.total), as_real(bounds.peak)) if finite else INF
        else:
            added = step.rounding(lambda x: self.sizes[x.place])
        self.holds &= added.finite
        return float(added) if added.finite else 0.0

    def pairs(self) -> Tensor:
        """Return how far execution beyond the enclosed nodes moves z_i - z_j: (k, k), or inf."""
        analysis = self.errors
        sizes = dict(self.sizes)
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
        return errors_of if self.holds else torch.full_like(errors_of, torch.inf)
