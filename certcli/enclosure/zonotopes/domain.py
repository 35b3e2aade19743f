"""The local domain: one walk of the traced graph encloses every tensor near an image."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.enclosure.zonotopes.backward import Ball
from certcli.enclosure.zonotopes.columns import Reach, up
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.needed_tokens import (
    NetworkEnd,
    chosen_token,
    reads,
    split,
    tokens_read,
)
from certcli.enclosure.zonotopes.rules.layers import (
    FIBREWISE,
    FIBREWISE_FUNCTIONS,
    NORMS,
    QUERIES,
    SUMMING,
    TOKENWISE,
)
from certcli.enclosure.zonotopes.space import (
    ExecutedWalk,
    Execution,
    Space,
    ZonotopeContext,
    rules,
)
from certcli.engine.replay import close, noise_like, replayed
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, example_of, executed, last_of, result_of, shifts_logits
from certcli.engine.tracer import target_name
from certcli.engine.walk import Call, Constant, Domain
from certcli.system.errors import raise_if

Watch = Callable[[fx.Node, Any, int | None], None]
Change = Callable[[fx.Node, Any], Any]
"""What a walk goes on with in place of a node's value."""
_ROUNDING = 2.0**-26
"""Relative to the length of a tensor: far above rounding differences of kernels, far below a wrong
tensor.
"""


class Enclosure(Domain):
    """One walk for one neighbourhood. needed: node -> the only token read later; None: all.

    Attributes:
        witnesses: images of the neighbourhood, each with its place in it. The graph runs on them
            beside the walk (of several images one each), and no node's value (thorough; else the last one's) may exclude what
            the network has there, whatever a rule believes of its arguments.
        executed_as: the rounding of an arithmetic, whose executed tensors are then enclosed in
            place of the real ones.
        change: of coordinates.
    """

    rules = rules

    def __init__(
        self,
        ending: NetworkEnd,
        needed: dict[fx.Node, int | None],
        start: Any,
        watch: Watch | None,
        witnesses: Sequence[tuple[Any, Tensor]] = (),
        thorough: bool = True,
        executed_as: ExecutedWalk | None = None,
        change: Change | None = None,
    ) -> None:
        self.executed_as = executed_as
        self.change = change
        self.ending = ending
        self.needed = needed
        self.start = start
        self.by_fibres = isinstance(start, Form) and start.space.by_fibres
        self.watch = watch
        self.checked = set(ending.trace.graph.nodes) if thorough else {last_of(ending.trace)}
        self.runs = [(place, executed(ending.trace, image)) for place, image in witnesses]

    @property
    def images(self) -> int:
        """Return how many images the walk is of."""
        return self.start.space.images if isinstance(self.start, Form) else 1

    def image(self, shape: tuple[int, ...]) -> Any:
        if self._of_all(shape) != self.start.shape:
            raise NoRule(f"images of shape {shape}, not {self.start.shape}")
        if self.executed_as is not None:
            self.executed_as.observe("", [self.start.bounds()])
        return self.start

    def shape(self, value: Any) -> tuple[int, ...]:
        if not value.consistent:
            raise NoRule("a theorem whose result has parts of different shapes")
        return tuple(value.shape)

    def expected(self, call: Call) -> Any:
        token = None if call.node is None else self.needed.get(call.node)
        shape = call.shape if token is None else (call.shape[0], 1, *call.shape[2:])
        return self._of_all(shape)

    def _of_all(self, shape: Any) -> Any:
        """Return the shape of a result of several images, or of each of several results."""
        if self.images == 1:
            return shape
        if isinstance(shape, list):
            return [self._of_all(part) for part in shape]
        raise_if(len(shape) < 2 or shape[0] != 1, NoRule, "several images in an axis that moves")
        return (self.images, *shape[1:])

    def result(self, value: Any, call: Call) -> Any:
        """Return the enclosure with room for what rounding adds in this operation."""
        assert call.node is not None
        if self.by_fibres:
            value = with_space(value, by_fibres=True, limit=self.start.space.limit)
        value = self._executed(value, call.node)
        return value if self.change is None else self.change(call.node, value)

    def _executed(self, value: Any, node: fx.Node) -> Any:
        if self.executed_as is None:
            return value
        several = isinstance(value, (list, tuple))
        results = value if several else [value]
        pairs = zip(results, self.executed_as.lost(node.name, results), strict=True)
        parts = [part.doubted(rounding) if rounding else part for part, rounding in pairs]
        self.executed_as.observe(node.name, [part.bounds() for part in parts])
        return parts if several else parts[0]

    def context(self, call: Call) -> Any:
        assert call.node is not None
        return ZonotopeContext(call.node, self.needed.get(call.node))

    def read(self, node: fx.Node, argument: fx.Node, value: Any) -> Any:
        value = self._needed_of(node, argument, value)
        if self._keeps_fibres(node):
            return value
        if self.by_fibres:  # a rule that mixes fibres makes no symbols of single ones
            return with_space(value, by_fibres=False, limit=0)
        return value.with_common_symbols() if isinstance(value, Form) else value

    def _keeps_fibres(self, node: fx.Node) -> bool:
        """Tell whether the rule of a node keeps the symbols of each fibre its own."""
        if node.op != "call_module":
            return self.by_fibres and node.target in FIBREWISE_FUNCTIONS
        module = type(self.ending.trace.root.get_submodule(str(node.target)))
        if not self.by_fibres:
            return module in SUMMING
        shape = node.meta["shape"]
        return module in FIBREWISE or (module in QUERIES and len(shape) == 3 and shape[0] == 1)

    def _needed_of(self, node: fx.Node, argument: fx.Node, value: Any) -> Any:
        read = reads(self.ending.trace, node, self.needed.get(node), tokenwise)
        if read is None or self.needed.get(argument) is not None or chosen_token(node) is not None:
            return value
        if isinstance(value, Constant):
            many = value.tensor.dim() == 3 and value.tensor.shape[1] > 1
            return Constant(value.tensor[:, read : read + 1]) if many else value
        return value.choose(read)

    def observe(self, node: fx.Node, value: Any) -> None:
        for number, (place, run) in enumerate(self.runs):
            _, truth = next(run)
            if node in self.checked:
                self.require_holds(node, value, place, truth, min(number, self.images - 1))
        if self.watch is not None:
            self.watch(node, value, self.needed.get(node))

    def require_holds(
        self, node: fx.Node, value: Any, place: Any, truth: Any, image: int = 0
    ) -> None:
        """Raise NoRule where `value` excludes the truth at a witness of one image."""
        if isinstance(value, Constant):
            return
        if isinstance(value, (list, tuple)):
            for part, tensor in zip(value, truth, strict=True):
                self.require_holds(node, part, place, tensor, image)
            return
        token = self.needed.get(node)
        truth = truth if token is None else truth[:, token : token + 1]
        value = value.of_image(image) if self.images > 1 else value
        if bool((value.farthest(place, truth) > _ROUNDING * truth.norm()).any()):
            where = node.meta.get("path") or "the network"
            raise NoRule(f"{where} ({node.name}): its theorem excludes what the network does there")


def with_space(value: Any, *, by_fibres: bool, limit: int) -> Any:
    """Return forms whose errors become symbols of single fibres, or whose symbols are common."""
    if isinstance(value, (list, tuple)):
        return type(value)(with_space(part, by_fibres=by_fibres, limit=limit) for part in value)
    if not isinstance(value, Form):
        return value
    common = value if by_fibres else value.with_common_symbols()
    return replace(common, space=replace(common.space, by_fibres=by_fibres, limit=limit))


def tokenwise(module: nn.Module) -> bool:
    """Return whether a module acts on tokens one by one."""
    return type(module) in TOKENWISE


def queries(module: nn.Module) -> bool:
    """Return whether the rule of a module computes single tokens of its result."""
    return type(module) in QUERIES


def names_of_results(traced: Trace) -> frozenset[str]:
    """Return the names of the nodes that run something."""
    ran = ("call_module", "call_function", "call_method")
    return frozenset(node.name for node in traced.graph.nodes if node.op in ran)


def require_rules(traced: Trace) -> None:
    """Raise NoRule that names the first operation without a rule, before any image is read."""
    for node in traced.graph.nodes:
        supported = rules.methods if node.op == "call_method" else rules.functions
        if node.op in ("call_method", "call_function") and node.target not in supported:
            where = node.meta.get("path") or "the network"
            name = target_name(node.target)
            raise NoRule(f"{where}: no relaxation for the operation '{name}'")


def prepared(
    model: nn.Module, size: tuple[int, int, int], execution: Execution | None
) -> tuple[NetworkEnd, dict[fx.Node, int | None], Callable[[], ExecutedWalk] | None]:
    """Return the network up to its last layers, tokens read, and an execution's rounding.

    NoRule, Untraceable name a missing theorem.
    """
    tables = [rules] if execution is None else [rules, *execution.tables]
    # the enclosure is of the network, not only of its trace
    with replayed(model, size, *tables) as traced:
        image = noise_like(example_of(model, size))
        logits = result_of(traced, image)
        if logits.dim() != 2 or len(logits) != 1:
            raise NoRule(f"the network makes logits of shape {tuple(logits.shape)} of one image")
        if logits.shape[1] < 2:
            raise NoRule("the network has one class, and no margin to another")
        ending = split(traced, NORMS)
        finished = ending.finish(result_of(ending.trace, image))
        finished = finished.log_softmax(1) if shifts_logits(last_of(traced)) else finished
        # float64: other kernels than the network's, over its last layers alone
        if not close(finished, logits, 2.0**-40 * logits.abs()):
            raise NoRule("the network without its last layers, and these, are not the network")
        require_rules(ending.trace)
    nodes = None if execution is None else execution.beside(names_of_results(ending.trace))
    return ending, tokens_read(ending.trace, ending.token, tokenwise, queries), nodes


def _around(
    boxed: bool,
    image: Tensor,
    radius: float,
    *,
    squares_up_to: int = 0,
    limit: int,
    tape: bool = False,
    in_box: bool = False,
    by_fibres: bool = False,
) -> Form:
    """Return all images within `radius` of `image` (images, c, h, w) in l2, or with every pixel within it
    (boxed): radius * identity as A.

    Args:
        squares_up_to: entries up to which e e^T has columns; in a box none.
        tape: keep nodes; e e^T then has no columns.
        in_box: of the images in [0, 1] alone.
        by_fibres: errors become symbols of one fibre each; e e^T then has no columns.
    """
    squares_up_to = 0 if boxed or tape or by_fibres else squares_up_to
    images = len(image)
    count = image[0].numel()
    reach = _reach_in_box(image, radius, boxed) if in_box else None
    space = Space(
        count, count <= squares_up_to, limit, boxed, reach, None, squares_up_to, by_fibres, images
    )
    gens = image.new_zeros(count + space.square, *image.shape)
    gens[:count].view(count, images, count).diagonal(dim1=0, dim2=2).fill_(radius)
    first = Ball(
        tuple(image.shape),
        (),
        lambda rows: (),
        centre=image,
        radius=radius,
        boxed=boxed,
        reach=reach,
    )
    return Form(space, image, gens, torch.zeros_like(image), (), first if tape else None)


l2_ball = functools.partial(_around, False)
linf_ball = functools.partial(_around, True)


def _reach_in_box(image: Tensor, radius: float, boxed: bool) -> Reach:
    """Return how far pixels of image + radius e can move in [0, 1]; in an l2 ball 0 or 1."""
    fall = image.flatten(1).mT if len(image) > 1 else image.flatten()
    rise = 1 - fall
    if not boxed:
        return (fall > 0).double(), (rise > 0).double()
    far = up(fall / radius, 2).clamp(max=1), up(rise / radius, 2).clamp(max=1)
    return far[0].where(fall > 0, 0.0), far[1].where(rise > 0, 0.0)
