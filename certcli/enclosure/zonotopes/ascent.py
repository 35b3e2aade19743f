"""Margins by going back, parabolas above the hinges: of one e, not far along each at once.

max(x, 0) <= x / 2 + x^2 / (4 s) + s / 4 for any s > 0. With x = c + a.e + p the squares of all
hinges are e^T H e, H = sum_k w_k a_k a_k^T, and over the ball they are at most sigma(H), far less
than sum_k w_k |a_k|^2. Then bounds of domains by ascent over all that is chosen on the way back.
Proofs: docs/local.md, section 9.
"""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.backward import (
    BackwardBound,
    Hinge,
    HingeChoice,
    Node,
    ParabolaChoice,
    chord,
    descend,
    least,
    simple,
)
from certcli.enclosure.zonotopes.columns import TINY, gamma, reached, up
from certcli.enclosure.zonotopes.search import Unit
from certcli.lipschitz.numerics.outward import up as next_up
from certcli.lipschitz.numerics.spectral import spectral_norm

STEPS = 60
_RATE = 0.3


def hinges(out: Node) -> list[Hinge]:
    """Return the open hinges that `out` depends on."""
    return [hinge for hinge in every_hinge(out) if len(hinge.places)]


def every_hinge(out: Node) -> list[Hinge]:
    """Return the hinges that `out` depends on, in the order of execution."""
    hinge_nodes = (node for node in nodes_of(out) if isinstance(node, Hinge))
    return sorted(hinge_nodes, key=lambda node: node.place)


def nodes_of(out: Node) -> set[Node]:
    """Return all nodes that `out` depends on, itself too."""
    visited: set[Node] = set()
    waiting = [out]
    while waiting:
        node = waiting.pop()
        if node not in visited:
            visited.add(node)
            waiting += node.parents
    return visited


@dataclass
class Free:
    """The unconstrained parameters of one row's bound: four a hinge, and one for h."""

    hinges: list[Hinge]
    numbers: list[Tensor]

    @staticmethod
    def start(hinges_of: list[Hinge]) -> "Free":
        numbers: list[Tensor] = []
        for node in hinges_of:
            reach = node.columns.norm(dim=0) + node.rest
            zero = torch.zeros_like(reach)
            numbers += [
                simple(node) * 6 - 3,
                zero - 2,
                (reach / 2).clamp_min(TINY).log(),
                zero.clone(),
            ]
        numbers.append(torch.zeros((), dtype=torch.float64, device=hinges_of[0].columns.device))
        return Free(hinges_of, [t.requires_grad_(True) for t in numbers])

    def copy(self) -> "Free":
        return Free(self.hinges, [t.detach().clone() for t in self.numbers])

    def choices(self) -> dict[Node, HingeChoice]:
        choices_of: dict[Node, HingeChoice] = {}
        for i, node in enumerate(self.hinges):
            slope, share, width, split = self.numbers[4 * i : 4 * i + 4]
            choices_of[node] = HingeChoice(
                slope.sigmoid(), ParabolaChoice(share.sigmoid(), width.exp(), split.exp())
            )
        return choices_of

    @property
    def level(self) -> Tensor:
        """log (h / |g|)."""
        return self.numbers[-1]


def coupled(out: Node, row: Tensor, steps: int = STEPS) -> float:
    """Bound <row, z> below, row (1, *shape): ascent over all that may be chosen, then a proof.

    It ends as soon as the bound is positive. -inf where there is nothing to choose: no open hinge,
    or a box (in which parabolas gain nothing over chords, as measured).
    """
    bent = hinges(out)
    if not bent or descend(out, row, {}).ball.boxed:
        return -math.inf
    free = Free.start(bent)
    columns = torch.cat([node.columns for node in reversed(bent)], 1)  # as they are passed
    gram = columns.mT @ columns
    best = -math.inf
    chosen = free.copy()
    with torch.enable_grad():
        adam = torch.optim.Adam(free.numbers)
        for step in range(steps):
            # eigenvalues have kinks: ever smaller steps
            adam.param_groups[0]["lr"] = _RATE * 0.05 ** (step / steps)
            value = _estimate(descend(out, row, free.choices()), columns, gram, free.level)
            if float(value.detach()) > best:
                best = float(value.detach())
                chosen = free.copy()
            if best > 0 and step % 4 == 0:
                sure = proven(descend(out, row, chosen.choices()), float(chosen.level.exp()))
                if sure > 0:
                    return sure
            adam.zero_grad()
            (-value).backward()
            adam.step()
    return proven(descend(out, row, chosen.choices()), float(chosen.level.exp()))


def linear_part(descent: BackwardBound) -> tuple[Tensor, Tensor]:
    """Return constants (rows,) and slopes in e (rows, pixels), parabolas about their middles.

    Directions that leave the images' box are taken from the slope: of all images, what is left is
    no larger.
    """
    total = descent.total + descent.slope @ descent.ball.centre.flatten()
    slope = descent.ball.radius * descent.slope
    for part in descent.parabolas:
        middle = part.hinge.middle
        total = total - (part.weight * middle * middle).sum(1)
        slope = slope - 2 * ((part.weight * middle) @ part.hinge.columns.mT)
    falling = descent.ball.falling
    return total, slope if falling is None else reached(slope.mT, falling).mT


def _estimate(descent: BackwardBound, columns: Tensor, gram: Tensor, level: Tensor) -> Tensor:
    """`proven` in a differentiable way, from the small matrix of the same spectrum."""
    total, slope = (part[0] for part in linear_part(descent))
    height = slope.norm().clamp_min(TINY) * level.exp()
    root = torch.cat([part.weight[0] for part in descent.parabolas]).clamp_min(1e-300).sqrt()
    linear = root * (slope @ columns) / (2 * height).sqrt()
    corner = (slope @ slope / (2 * height))[None, None]
    square = torch.cat(
        [
            torch.cat([root[:, None] * gram * root, linear[:, None]], 1),
            torch.cat([linear[None], corner], 1),
        ],
        0,
    )
    return total - height / 2 - torch.linalg.eigvalsh(square)[-1]


@torch.no_grad()
def proven(descent: BackwardBound, level: float, row: int = 0) -> float:
    """total - h / 2 - sigma([sqrt(w_k) a_k; g / sqrt(2 h)])^2, h = level |g|, rounded down.

    g.e - sum_k w_k (a_k.e)^2 is no less, as -g.e <= (g.e)^2 / (2 h) + h / 2 for any h > 0 and |e|
    <= 1.
    """
    total, slope = (part[row] for part in linear_part(descent))
    size = descent.size[row] + descent.slope[row].abs() @ descent.ball.centre.abs().flatten()
    size = size + descent.ball.radius * descent.slope[row].norm()
    for part in descent.parabolas:
        reach = part.hinge.middle.abs() + part.hinge.columns.norm(dim=0)
        size = size + 4 * (part.weight[row] * reach * reach).sum()
    height = float(slope.norm()) * level + 1e-300
    rows = [(part.weight[row].sqrt() * part.hinge.columns).mT for part in descent.parabolas]
    stack = torch.cat([slope[None] / (2 * height) ** 0.5, *rows])
    largest = spectral_norm(stack, next_up(2.0**-49 * float(stack.norm())))
    entries = descent.entries + sum(len(part.weight[row]) for part in descent.parabolas)
    rounding = float(up(gamma(entries + len(slope) + 64) * size))
    return float(total) - (height / 2 + largest * largest) * (1 + 2.0**-47) - rounding


RATE = 0.25
DECAY = 0.93
"""Of Adam, and its fall from step to step."""
FALL = 30
"""An ascent of more steps ends at the same rate, DECAY^FALL: its multipliers can grow further,
which a
nearly empty domain needs."""
_NEGLIGIBLE = 1e-9
"""Of the largest error of a node: what rounding may cost, which ascent need not see."""
_MOST_ENTRIES = 3e7
"""Entries of all nodes and rows together, some of which a step of ascent keeps."""
POWER = 8
"""Steps of the power iteration for the parabolas' largest eigenvalue, from a start of the step
before.
"""


class Ascent:
    """Bounds of rows (margins, *shape) of the last node, over signs of open units.

    numbers, one row a domain: per unit a slope (before the sigmoid) and a multiplier (in units of
    `scale`); in an l2 ball also share, width and split of a parabola (before sigmoid, exp, exp),
    and at the end log (h / |g|).
    """

    def __init__(self, out: Node, rows: Tensor) -> None:
        self.out = out
        self.rows = rows
        every = every_hinge(out)
        self.all = every
        self.hinges = [hinge for hinge in every if len(hinge.places)]
        self.units = [
            Unit(number, entry)
            for number, hinge in enumerate(every)
            for entry in hinge.places.tolist()
        ]
        self.places = {unit: place for place, unit in enumerate(self.units)}
        self.counts = [len(hinge.places) for hinge in self.hinges]
        self.curved = False
        if self.units:
            self._prepare()

    def _prepare(self) -> None:
        descent = descend(self.out, self.rows, {})
        self.curved = not descent.ball.boxed
        self.at_once = max(2, int(_MOST_ENTRIES / descent.entries))
        weight = torch.cat([descent.passed[hinge] for hinge in self.hinges], 1).abs().amax(0)
        self.scale = weight + 1e-3 * weight.amax() + TINY
        self.chords = torch.cat([chord(hinge)[1] for hinge in self.hinges])
        self.low, self.high = (
            torch.cat([getattr(h, end).flatten()[h.places] for h in self.hinges])
            for end in ("low", "high")
        )
        errors = {n: n.largest_error for n in nodes_of(self.out)}
        largest = max(errors.values())
        self.negligible = frozenset(n for n, e in errors.items() if e < _NEGLIGIBLE * largest)
        if self.curved:
            self.columns = torch.cat([hinge.columns for hinge in self.hinges], 1)

    def start(self) -> tuple[Tensor, Tensor]:
        """Return signs and numbers of the whole neighbourhood: (units,), (numbers,)."""
        slope = torch.cat([simple(hinge) for hinge in self.hinges])
        none = torch.zeros_like(slope)
        parts = [4 * slope - 2, none]
        if self.curved:
            reach = torch.cat([h.columns.norm(dim=0) + h.rest for h in self.hinges])
            parts = [
                6 * slope - 3,
                none,
                none - 2,
                (reach / 2).clamp_min(TINY).log(),
                none,
                none[:1],
            ]
        return none, torch.cat(parts)

    def sign_of(self, unit: Unit) -> float:
        """Return the sign of a unit that is not open: of one that is unknown, either."""
        if unit.hinge >= len(self.all) or unit.entry >= self.all[unit.hinge].low.numel():
            return 1.0
        return 1.0 if float(self.all[unit.hinge].low.flatten()[unit.entry]) >= 0 else -1.0

    def choices(self, signs: Tensor, numbers: Tensor) -> dict[Node, HingeChoice]:
        """Return what is chosen at each hinge: (b, units), (b, numbers)."""
        count = len(self.units)
        slope = numbers[:, :count].sigmoid()
        multiplier = numbers[:, count : 2 * count] * self.scale
        parts = [slope, multiplier, signs]
        if self.curved:
            share, width, split = numbers[:, 2 * count : 5 * count].chunk(3, 1)
            parts += [share.sigmoid(), width.exp(), split.exp()]
        cut = [part.split(self.counts, 1) for part in parts]
        choice_of: dict[Node, HingeChoice] = {}
        for i, hinge in enumerate(self.hinges):
            slices = [part[i] for part in cut]
            parabola = ParabolaChoice(*slices[3:]) if self.curved else None
            choice_of[hinge] = HingeChoice(slices[0], parabola, slices[2], slices[1])
        return choice_of

    def estimates(
        self, margins: list[int], signs: Tensor, numbers: Tensor
    ) -> tuple[Tensor, BackwardBound]:
        """Return the bounds of domains as they are, without their proof: (b,); and the way back."""
        choices = self.choices(signs, numbers)
        descent = descend(self.out, self.rows[margins], choices, self.negligible)
        value = self._estimate(descent, numbers[:, -1]) if self.curved else least(descent)
        return value, descent

    def climb(
        self,
        margins: list[int],
        signs: Tensor,
        numbers: Tensor,
        steps: int,
        until: float = math.inf,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the bounds (b,) that ascent found, proven; the numbers that give them; scores of
        open units (b, units).

        Args:
            until: the time (time.monotonic) after which no further step begins.
        """
        best = torch.full((len(margins),), -torch.inf, dtype=numbers.dtype, device=numbers.device)
        chosen = numbers.clone()
        scores = torch.zeros_like(signs)
        numbers, mean, square = (
            numbers.clone(),
            torch.zeros_like(numbers),
            torch.zeros_like(numbers),
        )
        fall = DECAY ** min(1.0, FALL / steps)
        for step in range(steps):
            (rising,) = (~(best > 0)).nonzero(as_tuple=True)
            if not len(rising) or (step and time.monotonic() >= until):
                break
            at = numbers[rising].requires_grad_(True)
            with torch.enable_grad():
                owners = [margins[i] for i in rising.tolist()]
                value, bound = self.estimates(owners, signs[rising], at)
                (slope,) = torch.autograd.grad(value.sum(), at)
            scores[rising] = self._scores(bound, signs[rising], at.detach())
            value = value.detach()
            better = value > best[rising]
            chosen[rising[better]] = at.detach()[better]
            best[rising] = torch.maximum(best[rising], value)
            mean[rising] = 0.9 * mean[rising] + 0.1 * slope
            square[rising] = 0.999 * square[rising] + 0.001 * slope * slope
            size = (square[rising] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12
            move = mean[rising] / (1 - 0.9 ** (step + 1)) / size
            numbers[rising] = self._inside(at.detach() + RATE * fall**step * move)
        return self._proven(margins, signs, chosen, best), chosen, scores

    def _inside(self, numbers: Tensor) -> Tensor:
        """Return the numbers with multipliers that are not negative."""
        count = len(self.units)
        numbers[:, count : 2 * count] = numbers[:, count : 2 * count].clamp_min(0)
        return numbers

    @torch.no_grad()
    def _scores(self, bound: BackwardBound, signs: Tensor, numbers: Tensor) -> Tensor:
        """Return what the bounds of each open unit may lose: (b, units)."""
        some = torch.cat([bound.passed[hinge] for hinge in self.hinges], 1)
        slope = numbers[:, : len(self.units)].sigmoid()
        below = torch.maximum((1 - slope) * self.high, -slope * self.low)
        losses = -some.clamp_max(0) * self.chords + 0.5 * some.clamp_min(0) * below
        return losses * (signs == 0)

    def _estimate(self, bound: BackwardBound, level: Tensor) -> Tensor:
        """Return `proven` of rows, differentiable, nearly: eigenvalues by power iteration."""
        total, slope = linear_part(bound)
        height = slope.norm(dim=1).clamp_min(TINY) * level.exp()
        weight = torch.cat([part.weight for part in bound.parabolas[::-1]], 1)

        def form(e: Tensor) -> tuple[Tensor, Tensor]:
            return e @ self.columns, (slope * e).sum(1, keepdim=True) / (2 * height[:, None])

        with torch.no_grad():
            e = slope + self.columns.sum(1)
            for _ in range(POWER):
                e = e / e.norm(dim=1, keepdim=True).clamp_min(TINY)
                along, rest = form(e)
                e = (weight * along) @ self.columns.mT + rest * slope
            e = e / e.norm(dim=1, keepdim=True).clamp_min(TINY)
        along, rest = form(e)
        maximum = (weight * along * along).sum(1) + rest[:, 0] * (slope * e).sum(1)
        return total - height / 2 - maximum

    @torch.no_grad()
    def _proven(self, margins: list[int], signs: Tensor, chosen: Tensor, best: Tensor) -> Tensor:
        """Return the bounds with a proof in place of the positive estimates; no other is above 0."""
        bounds = best.clamp_max(0.0)
        (positive,) = (best > 0).nonzero(as_tuple=True)
        if len(positive):
            numbers = chosen[positive]
            choices = self.choices(signs[positive], numbers)
            descent = descend(self.out, self.rows[[margins[i] for i in positive.tolist()]], choices)
            if not self.curved:
                bounds[positive] = least(descent)
                return bounds
            levels = enumerate(numbers[:, -1].exp().tolist())
            sure = [proven(descent, level, row) for row, level in levels]
            bounds[positive] = descent.total.new_tensor(sure)
        return bounds
