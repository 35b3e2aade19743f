"""The proven bound of a whole network, pixels in [0, 1] -> logits: a walk gives each node of
the graph its Lipschitz constant from the pixels.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

import certcli.lipschitz.rules  # noqa: F401 (registers every rule)
from certcli.checkpoint.file import Checkpoint
from certcli.engine.replay import replayed
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, Untraceable, example_of, trace_model
from certcli.engine.tracer import ModuleScope
from certcli.engine.walk import Call, Domain, walk
from certcli.lipschitz.bound import FEATURES, Bound
from certcli.lipschitz.context import Charge, Context, Walk, rules
from certcli.lipschitz.numerics.arithmetic import UNDERFLOW, Arithmetic, Scalar
from certcli.lipschitz.numerics.outward import gamma, scale_to_unit, up
from certcli.lipschitz.numerics.real import INF, ONE, Real
from certcli.lipschitz.value import LogProbabilities, Size, Value
from certcli.models.build import load
from certcli.models.pixels import PixelModel


@dataclass(frozen=True)
class Propagation:
    """The result of a walk.

    Attributes:
        logits: The last value, its final linear map still pending.
        scopes: (call of a module, constant of its input, constant of its output).
        context: The last call's; settling in it adds charges to those of the walk.
    """

    logits: Value
    scopes: tuple[tuple[ModuleScope, Scalar, Scalar], ...]
    context: Context

    @property
    def charges(self) -> tuple[Charge, ...]:
        """One for each theorem that was applied, in the order of execution."""
        return tuple(self.context.walk.charges)


class GlobalDomain(Domain):
    """Lipschitz constants on the box [0, 1]^pixels, in one arithmetic."""

    rules = rules

    def __init__(self, arith: Arithmetic) -> None:
        self.walk = Walk(arith)
        self.bases: dict[fx.Node, Scalar] = {}
        self.last: Context | None = None

    def image(self, shape: tuple[int, ...]) -> Value:
        arith = self.walk.arith
        proof = (
            Bound("pixels", "input", ONE, "identity", "the image itself")
            if arith.rigorous
            else None
        )
        # every pixel lies in [0, 1]
        box = Size(arith, shape, peak=lambda: arith.const(1.0), pixels=True)
        return Value(arith.const(1.0), box, None, proof, shape)

    def context(self, call: Call) -> Context:
        self.last = Context(**vars(call), walk=self.walk)
        return self.last

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def result(self, value: Any, call: Call) -> Any:
        return _in_call_shape(value, call.shape)

    def observe(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, Value):
            self.bases[node] = value.base

    def forget(self, node: fx.Node, value: Any) -> None:
        settled = self.walk.settled.pop(id(value), None)
        if settled is not None:
            self.bases[node] = settled[1].base

    def scopes(self, traced: Trace) -> Iterator[tuple[ModuleScope, Scalar, Scalar]]:
        """Yield each call of a module with the constants of its input and output."""
        for scope in traced.scopes:
            if scope.entry is not None and scope.exit is not None:
                before = self.bases.get(scope.entry)
                after = self.bases.get(scope.exit)
                if before is not None and after is not None:
                    yield scope, before, after


def _in_call_shape(result: Any, shape: Any) -> Any:
    """A rule's result in the call's shape, if of as many entries and nothing waits: norms agree."""
    if isinstance(result, (list, tuple)) and isinstance(shape, list) and len(result) == len(shape):
        return [_in_call_shape(item, part) for item, part in zip(result, shape, strict=True)]
    if (
        not isinstance(result, Value)
        or not isinstance(shape, tuple)
        or tuple(result.shape) == shape
    ):
        return result
    if math.prod(result.shape) != math.prod(shape) or result.waiting is not None:
        return result
    return replace(result, shape=shape, size=result.size.arranged(shape, None))


def trace_network(model: nn.Module, size: tuple[int, ...]) -> Trace:
    """Return the graph on an image (c, h, w); modules with a rule of this domain are leaves."""
    return trace_model(model, example_of(model, size), rules)


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Raise the recursion limit: size bounds go back to the pixels, some calls a layer."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 50_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def propagate(traced: Trace, arith: Arithmetic) -> Propagation:
    """Apply the rules node by node; NoRule, with the path, where there is no theorem."""
    with deep_recursion():
        arith.begin()
        domain = GlobalDomain(arith)
        logits = walk(traced, domain)
        if not isinstance(logits, Value) or domain.last is None:
            raise NoRule("the logits do not depend on the image")
        return Propagation(logits, tuple(domain.scopes(traced)), domain.last)


_MANY_CLASSES = 4096  # a matrix of all pairs of 21,841 classes would take 4 GB


@dataclass(frozen=True)
class NetworkBound:
    """The proven global bound of a network, in pixel units. Paths are names in the checkpoint.

    Attributes:
        pairs: K of `pair_constants`; None without a bound.
        charges: One for each theorem that was applied, in the order of execution.
        blocks: (path, kind, constant before, constant after) of each module that was traced
            through.
        traced: The graph that was proven and replayed, for other domains with the same rules; None
            without one.
        hint: Of what has no bound, what takes the network; "": nothing that is known.
    """

    bound: Bound
    pairs: Tensor | None
    charges: tuple[Charge, ...]
    blocks: tuple[tuple[str, str, Real, Real], ...]
    traced: Trace | None = field(default=None, repr=False, compare=False)
    hint: str = field(default="", repr=False, compare=False)

    @property
    def upper(self) -> Real:
        return self.bound.value


def prove_network(model: PixelModel, classes: int) -> NetworkBound:
    """Prove the bound of a network of `classes` logits, or (0) of features; inf: there is none."""
    bound = bound_network(model, model.input_size, classes)
    if classes:
        return bound
    root = bound.bound
    why = (
        "the network has no classifier: its outputs are features" if root.value.finite else root.why
    )
    return replace(bound, bound=Bound("", FEATURES, root.value, "same", why, (root,)))


def prove_checkpoint(checkpoint: Checkpoint, device: torch.device | str = "cpu") -> NetworkBound:
    """Prove a checkpoint's bound. ArchitectureError: tensors and architecture disagree."""
    return prove_network(load(checkpoint, device), checkpoint.record.classes)


def bound_network(model: nn.Module, size: tuple[int, ...], classes: int) -> NetworkBound:
    """Prove a module's bound on images (c, h, w); inf, with the reason, where there is none."""
    try:
        with replayed(model, size, rules) as traced:
            outcome = propagate(traced, Arithmetic())
        with (
            torch.no_grad(),
            deep_recursion(),
        ):  # a waiting operation may have no theorem of its own
            settled = outcome.context.settle(outcome.logits)
    except (NoRule, Untraceable) as reason:
        return NetworkBound(
            Bound("", type(model).__name__, INF, "unbounded", str(reason)),
            None,
            (),
            (),
            hint=reason.hint,
        )
    with torch.no_grad(), deep_recursion():
        pairs = pair_constants(outcome, classes) if settled.base.finite else None
        blocks = tuple(
            (call.path, call.kind, before, after)
            for call, before, after in outcome.scopes
            if after.finite
        )
        assert settled.proof is not None  # the rigorous arithmetic always builds one
        return NetworkBound(settled.proof, pairs, outcome.charges, blocks, traced)


def trial_upper(model: nn.Module, size: tuple[int, ...]) -> Real:
    """Bound the trace without a replay, in searches that end in `prove`. Never shown."""
    with torch.no_grad(), deep_recursion():
        try:
            outcome = propagate(trace_network(model, size), Arithmetic())
        except (NoRule, Untraceable):
            return INF
        return outcome.context.settle(outcome.logits).base


def pair_constants(outcome: Propagation, classes: int) -> Any:
    """Return K with |(z_i - z_j)(x) - (z_i - z_j)(y)| <= K_ij |x - y|: (k, k), zero diagonal.

    With a final linear map pending, K_ij = base |w_i - w_j|; else, and beyond 4096 classes, sqrt(2)
    times the constant of all logits (beyond 4096 classes expanded from one number, so that the
    diagonal, which no margin uses, is not 0). Source: Theorem 9.2.
    """
    arith = outcome.context.arith
    logits = outcome.logits
    if isinstance(logits.waiting, LogProbabilities) and logits.waiting.axis == -1:
        logits = logits.waiting.of
    pending = logits.pending
    effective = None if pending is None or pending.axis != -1 else pending.effective(arith)
    if (
        effective is None
        or effective.shape[0] != classes
        or (arith.rigorous and classes > _MANY_CLASSES)
    ):
        total = outcome.context.settle(logits).base
        root = arith.sqrt(arith.const(2.0))
        if arith.rigorous and classes > _MANY_CLASSES:
            return torch.tensor(float(total * root), dtype=torch.float64).expand(classes, classes)
        ones = torch.ones(classes, classes, dtype=torch.float64) - torch.eye(
            classes, dtype=torch.float64
        )
        return ones * float(total * root) if arith.rigorous else ones.to(total) * (total * root)
    rows = effective.tensor
    if not arith.rigorous:
        # differences, not inner products: close rows keep their digits
        return (
            logits.base
            * torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").double()
        )
    largest = float(logits.base)
    if math.isinf(largest):  # beyond float64
        return torch.full((classes, classes), math.inf, dtype=torch.float64).fill_diagonal_(0.0)
    # |w_i - w_j|^2 from the Gram matrix, whose entries are off by at most gamma_d |w_i| |w_j|; + 2
    # |dE| for the rows' own error; 1e-12 covers the few roundings that remain, relative to each
    # factor. Entries are of ordinary size: a square neither overflows nor underflows to anything
    # that counts beside the
    # largest row
    scaled, exponent = scale_to_unit(rows)
    gram = rows.new_zeros(classes, classes) if scaled is None else scaled @ scaled.T
    square = gram.diagonal().clone()
    size = square.clamp_min(0.0).sqrt()
    slack = up(8 * gamma(rows.shape[1] + 8), 4)
    # in place: with 1,000 classes these are a million entries, and every pass over them counts
    reach = size.unsqueeze(0) + size.unsqueeze(1)
    reach.mul_(reach).mul_(slack).add_(rows.shape[1] * UNDERFLOW)
    far = (
        gram.mul_(-2)
        .add_(square.unsqueeze(0))
        .add_(square.unsqueeze(1))
        .clamp_(min=0.0)
        .add_(reach)
    )
    distances = torch.ldexp(far.sqrt_().mul_(1 + 1e-12), torch.tensor(exponent, device=rows.device))
    distances.add_(2 * effective.error + UNDERFLOW).mul_(1 + 1e-12)
    return distances.mul_(largest).mul_(1 + 1e-12).add_(UNDERFLOW).fill_diagonal_(0.0)
