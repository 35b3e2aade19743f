"""The local domain: the traced graph walked once for one neighbourhood, every tensor an enclosure of what it can be."""

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.margins import linear_margins, normalised_margins
from certcli.enclosure.zonotopes.needed_tokens import Ending, reads, split, tokens_read
from certcli.enclosure.zonotopes.rules.layers import NORMS, QUERIES, TOKENWISE
from certcli.enclosure.zonotopes.table import Context, rules
from certcli.engine.replay import replayed
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Trace
from certcli.engine.walk import Call, Constant, Domain, walk

Watch = Callable[[fx.Node, Any, int | None], None]


class Enclosure(Domain):
    """One walk for one neighbourhood. wanted: of every node, the only token that is read later."""

    rules = rules

    def __init__(self, ending: Ending, wanted: dict[fx.Node, int | None], start: Any, watch: Watch | None) -> None:
        self.ending, self.wanted, self.start, self.watch = ending, wanted, start, watch

    def image(self, shape: tuple[int, ...]) -> Any:
        if shape != self.start.shape:
            raise AssertionError(f"images of shape {shape}, not {self.start.shape}")
        return self.start

    def context(self, call: Call) -> Any:
        assert call.node is not None
        return Context(call.node, self.wanted.get(call.node))

    def read(self, node: fx.Node, argument: fx.Node, value: Any) -> Any:
        asked = reads(self.ending.trace, node, self.wanted.get(node), tokenwise)
        if asked is None or self.wanted.get(argument) is not None or node.target is operator.getitem:
            return value
        if isinstance(value, Constant):
            many = value.tensor.dim() == 3 and value.tensor.shape[1] > 1
            return Constant(value.tensor[:, asked : asked + 1]) if many else value
        return value.choose(asked)

    def found(self, node: fx.Node, value: Any) -> None:
        if self.watch is not None:
            self.watch(node, value, self.wanted.get(node))


def tokenwise(module: nn.Module) -> bool:
    """Whether a module acts on tokens one by one."""
    return type(module) in TOKENWISE


def queries(module: nn.Module) -> bool:
    """Whether the rule of a module computes single tokens of its result."""
    return type(module) in QUERIES


def require_rules(traced: Trace, table: RuleTable) -> None:
    """NoRule names the first operation that has none, before any image is read."""
    for node in traced.graph.nodes:
        known = table.methods if node.op == "call_method" else table.functions
        if node.op in ("call_method", "call_function") and node.target not in known:
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
            raise NoRule(f"{node.meta.get('path') or 'the network'}: no relaxation for the operation '{name}'")


class LocalNetwork:
    """A network traced once, ready for the neighbourhoods of many images. NoRule, Untraceable name what has no relaxation."""

    def __init__(self, model: nn.Module, size: tuple[int, int, int]) -> None:
        self.size = size
        with replayed(model, size, rules) as traced:  # what is enclosed is the network, not only its trace
            self.ending = split(traced, NORMS)
            self.wanted = tokens_read(self.ending.trace, self.ending.token, tokenwise, queries)
            require_rules(self.ending.trace, rules)

    def sizes(self) -> tuple[int, int, int, int]:
        """Entries: of an image, of the largest sum of two tensors, of the largest tensor at all; symbols made in a block."""
        pixels, stream, largest, fresh = math.prod(self.size), 1, math.prod(self.size), 0
        for node in self.ending.trace.graph.nodes:
            shape = node.meta.get("shape")
            if node.op not in ("call_module", "call_function", "call_method") or not isinstance(shape, tuple):
                continue
            entries = math.prod(shape)
            module = self.ending.trace.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            heads = getattr(module, "num_heads", None)
            if isinstance(heads, int):
                scores = heads * shape[-2] ** 2
                fresh = max(fresh, 2 * scores + 3 * entries)
                largest = max(largest, scores, 3 * entries)
            if node.target in (operator.add, operator.iadd, torch.add) and len(node.all_input_nodes) == 2:
                stream = max(stream, entries)
            largest = max(largest, entries)
            fresh = max(fresh, 2 * entries)
        return pixels, stream, largest, fresh

    def last_form(self, start: Form, watch: Watch | None = None) -> Form:
        """The form before the last norm and linear layer. `watch` is shown every node's value on the way."""
        with torch.no_grad():
            form: Form = walk(self.ending.trace, Enclosure(self.ending, self.wanted, start, watch))
        return form

    def margins(self, start: Form, label: int, watch: Watch | None = None) -> Tensor:
        """k - 1 numbers, all positive only if z_label - z_j > 0 for every j != label on all of `start`: a proof.

        Unbounded when the neighbourhood is too large for a finite enclosure.
        """
        form = self.last_form(start, watch)
        head: Any = self.ending.head
        with torch.no_grad():
            if self.ending.token is not None and form.shape[1] > 1:
                form = form.choose(self.ending.token)
            form = form.linear(lambda t: t.reshape(len(t), 1, t.shape[-1]))
            if head is None:
                eye = torch.eye(form.shape[-1], dtype=torch.float64, device=form.centre.device)
                return linear_margins(form, eye, None, label)
            if self.ending.norm is None:
                return linear_margins(form, head.weight, head.bias, label)
            norm: Any = self.ending.norm
            return normalised_margins(form, norm.eps, norm.weight, norm.bias, head.weight, head.bias, label)
