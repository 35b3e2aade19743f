"""A network traced once for many images: where it changes to fewer numbers than pixels, what fits
into memory,
and its margins. Proofs: docs/local.md.
"""

import ctypes
import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes.columns import norm2, up
from certcli.enclosure.zonotopes.domain import Enclosure, Watch, names_of_results, prepared
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.margins import (
    Further,
    linear_logits,
    linear_margins,
    lower_bounds,
    normalised_margins,
    nothing_further,
    optimised,
)
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.enclosure.zonotopes.rules.layers import QUERIES
from certcli.enclosure.zonotopes.space import (
    Coordinates,
    ExecutedWalk,
    Execution,
    coordinates_of,
)
from certcli.engine.trace import Trace
from certcli.engine.walk import walk
from certcli.nn.blocks import spread_of
from certcli.system.memory import free_bytes


def narrow_place(traced: Trace) -> fx.Node | None:
    """Return the first node narrower than the image, through which alone the image passes."""
    nodes = list(traced.graph.nodes)
    last_use = {argument: node for node in nodes for argument in node.all_input_nodes}
    order = {node: place for place, node in enumerate(nodes)}
    image = next(node for node in nodes if node.op == "placeholder")
    pixels = math.prod(image.meta["shape"])
    reached = {image}
    alive = {image}
    for node in nodes:
        if any(argument in reached for argument in node.all_input_nodes):
            reached.add(node)
            alive.add(node)
        alive = {one for one in alive if order[last_use.get(one, one)] > order[node]}
        shape = node.meta.get("shape")
        if alive == {node} and isinstance(shape, tuple) and math.prod(shape) < pixels:
            return node
    return None


def changed(x: Form, coordinates: Coordinates) -> Form:
    """Return the form of x in these coordinates; what they do not hold of it becomes slack."""
    space = x.space
    ball = x.ball
    columns = coordinates.down(ball) * coordinates.stretch
    residue = norm2(ball - coordinates.lifted(columns))
    rounding = coordinates.lost(norm2(columns)) + 2.0**-50 * norm2(ball)
    squares = coordinates.count <= space.squares_up_to
    new = replace(space, ball=coordinates.count, squares=squares, coordinates=coordinates)
    gens = torch.cat([columns, columns.new_zeros(new.square, *x.shape), x.box])
    return Form(new, x.centre, gens, up(x.slack + residue + rounding, 4), x.blocks, x.node)


class LocalNetwork:
    """A network traced once for many images. NoRule, Untraceable: what has no relaxation.

    Of the first walk that ends every node is checked at three images of the ball, of later ones the
    last node at their own.
    """

    def __init__(
        self, model: nn.Module, size: tuple[int, int, int], execution: Execution | None = None
    ) -> None:
        self.size = size
        self._seen = False
        self.ending, self.needed, self.execution = prepared(model, size, execution)
        self.narrow = narrow_place(self.ending.trace)
        self.coordinates: Coordinates | None = None

    @property
    def numbers(self) -> int:
        """Return the most numbers the network depends on in an l2 ball: pixels or a first map's."""
        return math.prod(self.size if self.narrow is None else self.narrow.meta["shape"])

    @property
    def opens(self) -> bool:
        """Tell whether the network has a ReLU."""
        functions = {node.target for node in self.ending.trace.graph.nodes}
        return self._has(nn.ReLU) or bool(functions & {F.relu, torch.relu})

    @property
    def attends(self) -> bool:
        """Tell whether the network has attention whose rule keeps the symbols of tokens apart."""
        return self._has(*QUERIES)

    def _has(self, *kinds: type[nn.Module]) -> bool:
        trace = self.ending.trace
        return any(
            isinstance(trace.root.get_submodule(str(node.target)), kinds)
            for node in trace.graph.nodes
            if node.op == "call_module"
        )

    def change(self, node: fx.Node, value: Any) -> Any:
        """Return the first map's result in fewer numbers than pixels, computed once."""
        if node is not self.narrow or not isinstance(value, Form):
            return value
        # the theorem is about forms of an l2 ball, with nothing in e e^T yet
        if value.space.boxed or bool(value.square.any()):
            return value
        if self.coordinates is None:
            if not bool(value.ball.any()):  # radius 0 says nothing of the map
                return value
            self.coordinates = coordinates_of(value.of_image(0).ball)
            self.narrow = None if self.coordinates is None else node
        return value if self.coordinates is None else changed(value, self.coordinates)

    def sizes(self) -> tuple[int, int, int, int]:
        """Entries of an image, of the largest sum, of the largest tensor; a block's symbols."""
        pixels = math.prod(self.size)
        stream, largest, fresh = 1, pixels, 0
        names = names_of_results(self.ending.trace)
        for node in self.ending.trace.graph.nodes:
            shape = node.meta.get("shape")
            if node.name not in names or not isinstance(shape, tuple):
                continue
            entries = math.prod(shape)
            of_module = node.op == "call_module"
            root = self.ending.trace.root
            module = root.get_submodule(str(node.target)) if of_module else None
            heads = getattr(module, "num_heads", None)
            sums = node.target in (operator.add, operator.iadd, torch.add)
            stream = max(stream, entries) if sums and len(node.all_input_nodes) == 2 else stream
            scores = heads * shape[-2] ** 2 if isinstance(heads, int) else 0
            largest = max(largest, scores, 3 * entries if scores else entries)
            fresh = max(fresh, 2 * scores + 4 * entries if scores else 2 * entries)
        return pixels, stream, largest, fresh

    @property
    def widest(self) -> int:
        """Return the most entries of a token behind the image."""
        shapes = (node.meta.get("shape") for node in self.ending.trace.graph.nodes)
        return max((shape[-1] for shape in shapes if isinstance(shape, tuple) and shape), default=1)

    def witnesses(self, start: Form) -> list[tuple[Tensor, Tensor]]:
        """Return places of a neighbourhood with their images: three, of later walks the middle.

        Of several images the middle of each.
        """
        if start.space.images > 1:
            middle = start.centre.new_zeros(start.space.ball)
            return [(middle, image[None]) for image in start.centre]
        return [(e, start.at(e)) for e in start.somewhere()[: 1 if self._seen else 3]]

    def last_form(
        self, start: Form, watch: Watch | None = None, executed_as: ExecutedWalk | None = None
    ) -> Form:
        """Return the form before the last norm and layer. `watch` sees every node's value."""
        with torch.no_grad():
            domain = Enclosure(
                self.ending,
                self.needed,
                start,
                watch,
                self.witnesses(start),
                not self._seen,
                executed_as,
                self.change,
            )
            form: Form = walk(self.ending.trace, domain)
        self._seen = True
        return form

    def margins(
        self, start: Form, label: int, watch: Watch | None = None, further: Further = optimised
    ) -> Tensor:
        """k - 1 numbers, all > 0 only if z_label - z_j > 0 for all j != label on `start`.

        Unbounded when the neighbourhood is too large for a finite enclosure. further: bounds
        margins that walk and way back do not prove.
        """
        with torch.no_grad():
            return lower_bounds(self.margin_form(start, label, watch), further).flatten()

    @torch.no_grad()
    def margin_form(self, start: Form, label: int | Tensor, watch: Watch | None = None) -> Form:
        """Return a form (1, k - 1), positive only where the margins are. Unbounded: as in `margins`.

        Args:
            label: of several images (images,), with a row each in the form.
        """
        executed_as = None if self.execution is None else self.execution()
        form = self.last_form(start, watch, executed_as)
        head: Any = self.ending.head
        executed = None if executed_as is None else executed_as.pairs().to(form.centre)
        if executed is not None and not bool(torch.isfinite(executed).all()):
            raise Unbounded("a result that may overflow as it is executed")
        form = self.one_row(form)
        if head is None:
            eye = torch.eye(form.shape[-1], dtype=torch.float64, device=form.centre.device)
            return linear_margins(form, eye, None, label, executed)
        if self.ending.norm is None:
            return linear_margins(form, head.weight, head.bias, label, executed)
        return normalised_margins(form, self.ending.norm, head.weight, head.bias, label, executed)

    def logits(self, start: Form, label: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return bounds of z (k,), (k,), and z_label - z_j, (k - 1,), (k - 1,), on `start`.

        Lower bounds are rounded down and upper bounds up; of the network in real arithmetic.
        Unbounded as in `margins`.
        """
        form = self.last_form(start)
        head = self.ending.head
        norm = self.ending.norm
        with torch.no_grad():
            form = self.one_row(form)
            if norm is not None:
                form = layer_norm(form, spread_of(norm), norm.weight, norm.bias)  # type: ignore[arg-type]
            eye = torch.eye(form.shape[-1], dtype=torch.float64, device=form.centre.device)
            weight = eye if head is None else head.weight
            bias = None if head is None else head.bias
            opposite = None if bias is None else -bias
            forms = (
                linear_logits(form, weight, bias),
                linear_logits(form, -weight, opposite),
                linear_margins(form, weight, bias, label),
                linear_margins(form, -weight, opposite, label),
            )
            bounds = [lower_bounds(z, nothing_further).flatten() for z in forms]
            return bounds[0], -bounds[1], bounds[2], -bounds[3]

    def one_row(self, form: Form) -> Form:
        """Return the token that the last layers read, (images, d)."""
        if self.ending.token is not None and form.shape[1] > 1:
            form = form.choose(self.ending.token)
        images = form.space.images
        common = form.with_common_symbols()
        return common.linear(lambda t: t.reshape(len(t), images, t.shape[-1]))


_COPIES = 5
"""Arrays of the largest kind that are alive at once, temporaries of one operation included
(measured: 4).
"""

_SYMBOLS_OF_WIDTH = 4
"""Symbols of one token, over the most entries that a token has anywhere."""


def available(device: torch.device) -> float:
    """Return the bytes that may be used: 60 % of the free memory of the device or the machine."""
    if device.type == "cuda":
        return 0.6 * torch.cuda.mem_get_info(device)[0]
    return 0.6 * free_bytes()


def keep_pages() -> None:
    """Let glibc keep the memory of freed arrays, where there is a glibc.

    A walk frees and allocates the same gigabyte hundreds of times; new pages from the system took a
    fifth of the time.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
        tune(-4, 0)  # M_MMAP_MAX: no array has a mapping of its own
        tune(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    except (OSError, AttributeError, TypeError):
        return


def affordable(
    network: LocalNetwork, squares_up_to: int, symbols: int, budget: float
) -> int | None:
    """Return `symbols`, or the fewer that fit, 0; None where the image's own do not fit.

    A residual sum keeps at least a symbol an entry. On the way through a block every nonlinear
    result brings its own.
    """
    pixels, stream, largest, fresh = network.sizes()
    numbers = network.numbers
    squares = numbers * (numbers + 1) // 2 if numbers <= squares_up_to else 0
    room = budget / (8 * _COPIES * largest) - pixels - squares - fresh
    count = min(symbols, int(room))
    if count >= min(symbols, stream) and room >= stream:
        return max(count, stream)
    return 0 if room + fresh >= 0 else None


def fits_by_fibres(network: LocalNetwork, budget: float) -> bool:
    """Tell whether columns for the image and for the symbols of one token each fit."""
    pixels, _, largest, _ = network.sizes()
    return 8 * _COPIES * largest * (pixels + _SYMBOLS_OF_WIDTH * network.widest) <= budget
