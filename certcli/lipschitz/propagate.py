"""Walk the traced graph once: every node gets its Lipschitz constant from the pixels, by its rule or not at all."""

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.lipschitz.arithmetic import Arithmetic, RigorousArithmetic, Scalar
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.context import Context, Step
from certcli.lipschitz.real import INF, ONE, Real
from certcli.lipschitz.rules.table import FUNCTION_RULES, METHOD_RULES, NoRule, find_module_rule, load_rules
from certcli.lipschitz.spectral import gamma, up
from certcli.lipschitz.trace import Scope, Trace, Untraceable, trace
from certcli.lipschitz.value import Constant, Size, Value

_MANY_CLASSES = 4096  # a matrix of all pairs of 21,841 classes would take 4 GB


@dataclass(frozen=True)
class Outcome:
    """What a walk found. logits: the last value, its final linear map still pending; steps: one a charged constant."""

    logits: Value
    steps: tuple[Step, ...]
    scopes: tuple[tuple[Scope, Scalar, Scalar], ...]
    context: Context


@dataclass(frozen=True)
class NetworkBound:
    """The proven global bound of a network, in pixel units, and what a certificate needs of it."""

    bound: Bound
    pairs: Tensor | None
    steps: tuple[Step, ...]
    blocks: tuple[tuple[str, str, Real, Real], ...]

    @property
    def upper(self) -> Real:
        return self.bound.value


def trace_network(model: nn.Module, size: tuple[int, ...]) -> Trace:
    """The graph of `model` on one image of this size (c, h, w). Untraceable names what cannot be followed."""
    load_rules()
    tensors = [*model.parameters(), *model.buffers()]
    parameter = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    device = parameter.device if parameter is not None else torch.device("cpu")
    dtype = parameter.dtype if parameter is not None else torch.float32
    example = torch.full((1, *size), 0.5, dtype=dtype, device=device)
    return trace(model, example, lambda module: find_module_rule(module) is not None)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Size bounds are computed on demand, back to the pixels: a few Python calls a layer."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 50_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def propagate(traced: Trace, arith: Arithmetic) -> Outcome:
    """Apply the rule table node by node. NoRule (with the path) where there is no theorem."""
    with _deep_recursion():
        return _propagate(traced, arith)


def _propagate(traced: Trace, arith: Arithmetic) -> Outcome:
    arith.begin()
    values: dict[fx.Node, Any] = {}
    bases: dict[fx.Node, Scalar] = {}
    steps: list[Step] = []
    memo: dict[int, tuple[Value, Value]] = {}
    context: Context | None = None
    last_use = {argument: node for node in traced.graph.nodes for argument in node.all_input_nodes}
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            proof = Bound("pixels", "input", ONE, "identity", "the image itself") if arith.rigorous else None
            shape = tuple(node.meta["shape"])
            box = Size(arith, shape, peak=lambda: arith.const(1.0), pixels=True)  # every pixel lies in [0, 1]
            values[node] = Value(arith.const(1.0), box, None, proof, shape)
        elif node.op == "get_attr":
            values[node] = Constant(traced.constants[node.target])
        elif node.op == "output":
            if context is None:
                raise NoRule("the network does nothing")
            return Outcome(values[node.args[0]], tuple(steps), _scopes(traced, bases), context)
        else:
            context = _context(traced, node, arith, steps, memo)
            values[node] = _shaped(_apply(traced, node, values, context), node.meta.get("shape"))
        if isinstance(values[node], Value):
            bases[node] = values[node].base
        for argument in node.all_input_nodes:  # weights in float64 are large: let go of what is not used again
            if last_use[argument] is node:
                settled = memo.pop(id(values.pop(argument)), None)
                if settled is not None:
                    bases[argument] = settled[1].base
    raise AssertionError("a graph ends in its output")


def _shaped(result: Any, shape: Any) -> Any:
    """A rule's result with the shapes that the traced forward pass had."""
    if isinstance(result, (list, tuple)):
        return [_shaped(item, part) for item, part in zip(result, shape, strict=True)]
    if isinstance(result, Value) and tuple(result.shape) != tuple(shape):
        if math.prod(result.shape) != math.prod(shape) or result.pending is not None or result.deferred is not None:
            raise AssertionError(f"a rule speaks of a tensor of shape {result.shape}, not {shape}")
        return replace(result, shape=tuple(shape), rows=result.rows.arranged(tuple(shape), None))
    return result


def _context(
    traced: Trace, node: fx.Node, arith: Arithmetic, steps: list[Step], memo: dict[int, tuple[Value, Value]]
) -> Context:
    inputs = [argument.meta.get("shape") for argument in _node_arguments(node)]
    path = str(node.target) if node.op == "call_module" else str(node.meta.get("scope", ""))
    kind = type(traced.root.get_submodule(path)).__name__ if node.op == "call_module" else _function_name(node)
    return Context(
        arith,
        path,
        kind,
        node.meta.get("shape"),
        inputs,
        steps,
        traced.constants,
        node.meta.get("dtype"),
        memo,
    )


def _node_arguments(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: found.append(n) or n)  # type: ignore[func-returns-value]
    return found


def _function_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _apply(traced: Trace, node: fx.Node, values: Mapping[fx.Node, Any], ctx: Context) -> Any:
    rule: Callable[..., Any] | None
    where = ctx.path or "the network"
    args: Any = fx.node.map_arg(node.args, lambda n: values[n])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: values[n])
    if node.op == "call_module":
        module = traced.root.get_submodule(str(node.target))
        found = find_module_rule(module)
        if found is None:
            raise NoRule(f"{where}: no theorem for {type(module).__name__}")
        rule, args = found.apply, (module, *args)
    elif node.op == "call_method":
        rule = METHOD_RULES.get(str(node.target))
    else:
        rule = FUNCTION_RULES.get(node.target)
    if rule is None:
        raise NoRule(f"{where}: no theorem for the operation '{ctx.kind}'")
    try:
        return rule(ctx, *args, **kwargs)
    except NoRule as reason:
        raise NoRule(str(reason) if str(reason).startswith(where) else f"{where} ({ctx.kind}): {reason}") from None
    except (TypeError, AttributeError, IndexError, ValueError) as failure:
        raise NoRule(f"{where} ({ctx.kind}): called with arguments its theorem does not know ({failure})") from failure


def _scopes(traced: Trace, bases: Mapping[fx.Node, Scalar]) -> tuple[tuple[Scope, Scalar, Scalar], ...]:
    found = []
    for scope in traced.scopes:
        if scope.entry is not None and scope.exit is not None and scope.entry in bases and scope.exit in bases:
            found.append((scope, bases[scope.entry], bases[scope.exit]))
    return tuple(found)


def pair_constants(outcome: Outcome, classes: int) -> Any:
    """K with |(z_i - z_j)(x) - (z_i - z_j)(y)| <= K_ij |x - y| : (k, k), zero diagonal.

    With a final linear map pending, K_ij = base |w_i - w_j|; else sqrt(2) times the constant of all logits. Beyond
    4096 classes the latter, as one number seen as a matrix (its diagonal, which no margin uses, is not 0).
    """
    arith, logits = outcome.context.arith, outcome.logits
    pending = logits.pending
    effective = None if pending is None or pending.axis != -1 else pending.effective(arith)
    if effective is None or effective.shape[0] != classes or (arith.rigorous and classes > _MANY_CLASSES):
        total = outcome.context.settle(logits).base
        root = arith.sqrt(arith.const(2.0))
        if arith.rigorous and classes > _MANY_CLASSES:
            return torch.tensor(float(total * root), dtype=torch.float64).expand(classes, classes)
        ones = torch.ones(classes, classes, dtype=torch.float64) - torch.eye(classes, dtype=torch.float64)
        return ones * float(total * root) if arith.rigorous else ones.to(total) * (total * root)
    rows = effective.tensor
    if not arith.rigorous:
        # differences, not inner products: close rows keep their digits
        return logits.base * torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").double()
    largest = float(logits.base)
    if math.isinf(largest):  # beyond float64
        return torch.full((classes, classes), math.inf, dtype=torch.float64).fill_diagonal_(0.0)
    # |w_i - w_j|^2 from the Gram matrix, whose entries are off by at most gamma_d |w_i| |w_j|; + 2 |dE| for the rows' own
    # error; 1e-12 covers the few roundings that remain, relative to each factor
    gram = rows @ rows.T
    square = gram.diagonal()
    size = square.clamp_min(0.0).sqrt()
    reach = size.unsqueeze(0) + size.unsqueeze(1)
    slack = up(8 * gamma(rows.shape[1] + 8), 4) * reach * reach
    far = (square.unsqueeze(0) + square.unsqueeze(1) - 2 * gram).clamp_min(0.0) + slack
    pairs = (far.sqrt() * (1 + 1e-12) + 2 * effective.error) * largest * (1 + 1e-12)
    return pairs.fill_diagonal_(0.0)


def bound_network(model: nn.Module, size: tuple[int, ...], classes: int) -> NetworkBound:
    """The proven bound of pixels -> logits on [0, 1]^pixels, or inf with the reason. Never raises for want of a theorem."""
    with torch.no_grad(), _deep_recursion():
        return _bound_network(model, size, classes)


def _bound_network(model: nn.Module, size: tuple[int, ...], classes: int) -> NetworkBound:
    try:
        outcome = propagate(trace_network(model, size), RigorousArithmetic())
    except (NoRule, Untraceable) as reason:
        return NetworkBound(Bound("", type(model).__name__, INF, "unbounded", str(reason)), None, (), ())
    pairs = pair_constants(outcome, classes) if outcome.logits.base.finite else None
    blocks = tuple((scope.path, scope.kind, before, after) for scope, before, after in outcome.scopes if after.finite)
    settled = outcome.context.settle(outcome.logits)
    if settled.proof is None:
        raise AssertionError("the rigorous arithmetic always builds a proof")
    return NetworkBound(settled.proof, pairs, tuple(outcome.context.steps), blocks)
