"""Margins by going back, parabolas above the hinges: of one e, not far along each at once.

max(x, 0) <= x / 2 + x^2 / (4 s) + s / 4 for any s > 0. With x = c + a.e + p the squares of all
hinges are e^T H e, H = sum_k w_k a_k a_k^T, and over the ball they are at most sigma(H), far less
than sum_k w_k |a_k|^2. Proofs: docs/local.md, section 9.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.backward import (
    BackwardBound,
    Hinge,
    HingeChoice,
    Node,
    ParabolaChoice,
    descend,
    simple,
)
from certcli.enclosure.zonotopes.rounding import TINY, gamma, reached, up
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
