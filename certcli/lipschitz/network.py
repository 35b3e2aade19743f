"""The proven bound of a whole network: pixels in [0, 1] -> logits."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.engine.replay import replayed
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, Untraceable
from certcli.lipschitz.bound import FEATURES, Bound
from certcli.lipschitz.context import Charge
from certcli.lipschitz.numerics.arithmetic import UNDERFLOW, Arithmetic
from certcli.lipschitz.numerics.outward import gamma, scale_to_unit, up
from certcli.lipschitz.numerics.real import INF, Real
from certcli.lipschitz.propagate import Propagation, deep_recursion, propagate, trace_network
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import LogProbabilities
from certcli.models.build import load
from certcli.models.pixels import PixelModel

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
