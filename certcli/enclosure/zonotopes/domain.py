"""The local domain: one walk of the traced graph encloses every tensor near an image."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes.coordinates import Coordinates, coordinates_of
from certcli.enclosure.zonotopes.executed import ExecutedNodes, ExecutedWalk, Execution
from certcli.enclosure.zonotopes.first_map import changed, may_change, narrow_place
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
from certcli.enclosure.zonotopes.needed_tokens import (
    NetworkEnd,
    chosen_token,
    reads,
    split,
    tokens_read,
)
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.enclosure.zonotopes.rules.layers import (
    FIBREWISE,
    FIBREWISE_FUNCTIONS,
    NORMS,
    QUERIES,
    SUMMING,
    TOKENWISE,
)
from certcli.enclosure.zonotopes.table import ZonotopeContext, rules
from certcli.engine.replay import close, noise_like, replayed
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Trace, example_of, executed, last_of, result_of, shifts_logits
from certcli.engine.walk import Call, Constant, Domain, walk
from certcli.nn.norms import spread_of

Watch = Callable[[fx.Node, Any, int | None], None]
Change = Callable[[fx.Node, Any], Any]
"""What a walk goes on with in place of a node's value."""
_ROUNDING = 2.0**-26
"""Relative to the length of a tensor: far above rounding differences of kernels, far below a wrong tensor."""


class Enclosure(Domain):
    """One walk for one neighbourhood. needed: node -> the only token read later; None: all.

    Attributes:
        witnesses: images of the neighbourhood, each with its place in it. The graph runs on them
            beside the walk, and no node's value (thorough; else the last one's) may exclude what
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

    def image(self, shape: tuple[int, ...]) -> Any:
        if shape != self.start.shape:
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
        return call.shape if token is None else (call.shape[0], 1, *call.shape[2:])

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
        losses = self.executed_as.lost(node.name)
        pairs = zip(value if several else [value], losses, strict=True)
        parts = [
            part.doubted(rounding.to(part.centre)) if bool(rounding.any()) else part
            for part, rounding in pairs
        ]
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
        for place, run in self.runs:
            _, truth = next(run)
            if node in self.checked:
                self.require_holds(node, value, place, truth)
        if self.watch is not None:
            self.watch(node, value, self.needed.get(node))

    def require_holds(self, node: fx.Node, value: Any, place: Any, truth: Any) -> None:
        """Raise NoRule where `value` excludes the truth at a witness."""
        if isinstance(value, Constant):
            return
        if isinstance(value, (list, tuple)):
            for part, tensor in zip(value, truth, strict=True):
                self.require_holds(node, part, place, tensor)
            return
        token = self.needed.get(node)
        truth = truth if token is None else truth[:, token : token + 1]
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


def require_rules(traced: Trace, table: RuleTable) -> None:
    """Raise NoRule that names the first operation without a rule, before any image is read."""
    for node in traced.graph.nodes:
        supported = table.methods if node.op == "call_method" else table.functions
        if node.op in ("call_method", "call_function") and node.target not in supported:
            name = getattr(node.target, "__name__", node.target)
            where = node.meta.get("path") or "the network"
            raise NoRule(f"{where}: no relaxation for the operation '{name}'")


def prepared(
    model: nn.Module, size: tuple[int, int, int], table: RuleTable, execution: Execution | None
) -> tuple[NetworkEnd, dict[fx.Node, int | None], ExecutedNodes | None]:
    """Return the network up to its last layers, tokens read, and an execution's rounding.

    NoRule, Untraceable name a missing theorem.
    """
    tables = [table] if execution is None else [table, *execution.tables]
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
        require_rules(ending.trace, table)
    nodes = None if execution is None else execution.beside(names_of_results(ending.trace))
    return ending, tokens_read(ending.trace, ending.token, tokenwise, queries), nodes


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
        self.ending, self.needed, self.execution = prepared(model, size, rules, execution)
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
        if node is not self.narrow or not isinstance(value, Form) or not may_change(value):
            return value
        if self.coordinates is None:
            if not bool(value.ball.any()):  # radius 0 says nothing of the map
                return value
            self.coordinates = coordinates_of(value.ball)
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
        """Return places of a neighbourhood with their images: three, of later walks the middle."""
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
    def margin_form(self, start: Form, label: int, watch: Watch | None = None) -> Form:
        """Return the form (1, k - 1) of numbers that are positive where the margins are. Unbounded."""
        executed_as = None if self.execution is None else self.execution.walk(1)
        form = self.last_form(start, watch, executed_as)
        head: Any = self.ending.head
        executed = None if executed_as is None else executed_as.pairs()[0].to(form.centre)
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
            low, high, least, most = (lower_bounds(z, nothing_further).flatten() for z in forms)
            return low, -high, least, -most

    def one_row(self, form: Form) -> Form:
        """Return the token that the last layers read, (1, d)."""
        if self.ending.token is not None and form.shape[1] > 1:
            form = form.choose(self.ending.token)
        return form.with_common_symbols().linear(lambda t: t.reshape(len(t), 1, t.shape[-1]))
