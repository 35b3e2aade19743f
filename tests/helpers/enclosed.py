"""What the enclosures claim about every node of a network near an image, and runs of its graph that
measure it.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.enclosure.zonotopes.backward import lower
from certcli.enclosure.zonotopes.domain import l2_ball, linf_ball
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.margins import nothing_further, optimised
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.space import rules
from certcli.engine.trace import executed
from certcli.evaluation.perturbation import Norm
from certcli.models.pixels import PixelModel
from tests.helpers.reached import Entry, recorded
from tests.helpers.slopes import IMAGE

ROUNDED = 1e-13
"""Rounding of the measured tensor and of the form's middle, in float64: 500 units of their sizes."""
ROWS = 4
"""Sums of a tensor's entries that are bounded by going back, where a walk has a tape."""
FEW = 64
"""Margins up to this number are bounded by search as well; of more logits these are looked at for slopes."""


@dataclass
class Walked:
    """One walk: the values of its nodes, and its bounds on margins (None: no finite enclosure).

    `far` says of a value, a place of the neighbourhood and the tensor there how far the tensor lies
    outside; `bounds` has one number for each class but `label`.
    """

    label: int
    places: list[tuple[Any, Tensor]]
    trace: Any
    values: dict[fx.Node, tuple[Any, int | None]] = field(default_factory=dict)
    bounds: Tensor | None = None
    backwards: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def watch(self, node: fx.Node, value: Any, token: int | None) -> None:
        self.values[node] = (value, token)

    @torch.no_grad()
    def faults(self, model: PixelModel) -> Iterator[str]:
        """Yield each claim that a run of the network at one of the places refutes."""
        for place, pixels in self.places:
            for node, result in executed(self.trace, pixels):
                if node in self.values:
                    yield from self._refuted(node, place, result)
            if self.bounds is None:
                continue
            logits = model(pixels)[0]
            others = torch.cat([logits[: self.label], logits[self.label + 1 :]])
            margins = logits[self.label] - others
            below = self.bounds - margins - 10 * ROUNDED * (1 + float(logits.abs().max()))
            if bool((below > 0).any()):
                yield f"a margin of {float(margins[below.argmax()]):.6g} is {float(below.max()):.3g} less than proven"

    def _refuted(self, node: fx.Node, place: Any, result: Any) -> Iterator[str]:
        value, token = self.values[node]
        several = isinstance(value, (list, tuple))
        pairs = zip(value, result, strict=True) if several else [(value, result)]
        for part, tensor in pairs:
            if not hasattr(part, "farthest"):
                continue
            truth = tensor if token is None else tensor[:, token : token + 1]
            size = part.size if isinstance(part, Form) else part.centre.norm()
            far = part.farthest(place, truth) - ROUNDED * (1 + truth.norm() + size.max())
            if bool((far > 0).any()):
                yield f"{node.meta['path']} {node.name}: {float(far.max()):.3g} outside"
            if isinstance(part, Form) and part.node is not None:
                rows, least = self._backwards(part)
                below = least - rows @ truth.flatten() - ROUNDED * (1 + rows.norm() * truth.norm())
                if bool((below > 0).any()):
                    yield f"{node.meta['path']} {node.name}: {float(below.max()):.3g} below, going back"

    def _backwards(self, part: Form) -> tuple[Tensor, Tensor]:
        """Return numbers w of a tensor z, (rows, entries), and what going back says <w, z> is above."""
        if id(part) not in self.backwards:
            generator = torch.Generator().manual_seed(part.centre.numel())
            rows = torch.randn(ROWS, part.centre.numel(), generator=generator, dtype=torch.float64)
            self.backwards[id(part)] = rows, lower(part.node, rows.view(ROWS, *part.shape))
        return self.backwards[id(part)]


@torch.no_grad()
def unit_ball_places(count: int, norm: Norm, seed: int) -> Tensor:
    """Return places of the unit ball, (n, pixels): its middle, axes, its boundary, and inside.

    The boundary of the linf ball is its corners.
    """
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.Size(IMAGE).numel()
    random = torch.randn(count, pixels, generator=generator, dtype=torch.float64)
    ends = random.sign() if norm == "linf" else random / random.norm(dim=1, keepdim=True)
    ends = torch.cat([ends, -ends])
    inside = ends[:2] * torch.rand(2, 1, generator=generator, dtype=torch.float64)
    axes = torch.eye(pixels, dtype=torch.float64)[:: pixels // 2]
    return torch.cat([torch.zeros(1, pixels, dtype=torch.float64), axes, ends, inside])


def steepest_directions(model: PixelModel, pixels: Tensor, norm: Norm, count: int = 2) -> Tensor:
    """Return the places towards which the steepest logits grow and fall most, (2 count, pixels)."""
    start = pixels.clone().requires_grad_(True)
    with sdpa_kernel(SDPBackend.MATH):
        logits = model(start)[0][:FEW]
        (slopes,) = torch.autograd.grad(
            logits, start, torch.eye(len(logits), dtype=torch.float64), is_grads_batched=True
        )
    flat = slopes.flatten(1)
    up = flat[flat.norm(dim=1).topk(min(count, len(flat))).indices]
    up = up.sign() if norm == "linf" else up / up.norm(dim=1, keepdim=True).clamp_min(1e-300)
    return torch.cat([up, -up])


def ball_places(model: PixelModel, pixels: Tensor, norm: Norm, count: int) -> Tensor:
    return torch.cat(
        [unit_ball_places(count, norm, count), steepest_directions(model, pixels, norm)]
    )


class Enclosed:
    """A network, traced once. reached: the entries of the table whose rules have returned a value."""

    def __init__(self, model: PixelModel) -> None:
        self.model = model
        self.reached: set[Entry] = set()
        self.network = LocalNetwork(model, IMAGE)


Walk = Callable[[Enclosed, Tensor, float, int], Walked]
"""Of the network, the image (1, c, h, w), a radius and the number of random places."""


def witnesses_near(model: PixelModel, start: Form, count: int) -> list[tuple[Tensor, Tensor]]:
    """Return places of the neighbourhood of one image, each with the image there."""
    every = ball_places(model, start.centre, "linf" if start.space.boxed else "l2", count)
    if start.space.reach is not None:
        fall, rise = start.space.reach
        every = torch.maximum(torch.minimum(every, rise), -fall)
    return [(e, start.at(e)) for e in every]


def _zonotopes(around: Callable[[Tensor, float], Form]) -> Walk:
    def walk(row: Enclosed, pixels: Tensor, radius: float, count: int) -> Walked:
        start = around(pixels, radius)
        local = row.network
        logits = row.model(pixels)[0]
        places = witnesses_near(row.model, start, count)
        walked = Walked(int(logits.argmax()), places, local.ending.trace)
        further = optimised if len(logits) <= FEW else nothing_further
        with suppress(Unbounded), recorded(rules) as reached:
            walked.bounds = local.margins(start, walked.label, walked.watch, further)
        row.reached |= reached
        return walked

    return walk


_ball = partial(l2_ball, squares_up_to=128, limit=4000)
STARTS: dict[str, Callable[[Tensor, float], Form]] = {
    "l2 with squares": _ball,
    "linf": partial(linf_ball, limit=4000),
    "l2 in the box": partial(_ball, in_box=True),
    "l2": partial(_ball, squares_up_to=0),
    "linf in the box": partial(linf_ball, limit=4000, in_box=True),
    "l2 with few symbols": partial(_ball, limit=100),
    "l2 and back": partial(_ball, squares_up_to=0, in_box=True, tape=True),
}
ZONOTOPES: dict[str, Walk] = {kind: _zonotopes(around) for kind, around in STARTS.items()}


def sample_images(count: int) -> list[Tensor]:
    """Return one image of noise, then one with pixels at 0 and 1, then more noise."""
    noise = torch.rand(
        count, 1, *IMAGE, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    return [x.round() if number == 1 else x for number, x in enumerate(noise)]
