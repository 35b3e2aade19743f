"""The paper's one-sided distance for layers before a ReLU, from streamed signs: no Gram form.

y = max(W0 x + b, 0) is the proximal map of the indicator f of [0, inf), and df(y) is {0} where y >
0, (-inf, 0] where y = 0. The squared distance of z - y to df(y), z = W x + b, summed over tokens
and outputs, is

    h(W) = sum (z - y)^2 over active entries (y > 0) + sum max(z, 0)^2 over inactive ones.

It is convex, h(W0) = 0, and it is at least |max(z, 0) - y|^2: an error of eta is also one of what
comes after the ReLU.

For fixed W_k let Y_k be y where active and min(z_k, 0) where not: q_k(W) = |W X + b - Y_k|^2 >=
h(W), with equal value and gradient at W_k. So {q_k <= r} lies inside {h <= r}, and it is an
ellipsoid about W0 + M_k, M_k = E_k X^T G^-1 with E_k = Y_k - W0 X - b, to which the Gram form
applies. Each round streams the inputs once for h, its gradient and E_k X^T, and goes on with
Douglas-Rachford on that ellipsoid. A fixed point satisfies the optimality conditions of h itself,
because the gradients agree; h is convex, so it is optimal.
Source: CertViT, section on the constraint set; Marks & Wright 1978 for the inner approximation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from certcli.constrain.layers import CHUNK_BYTES, Batches, StopBatch, module_at, rows, stream
from certcli.constrain.statistics import LayerStatistics, error_ratio
from certcli.engine.table import runs_known_code
from certcli.engine.trace import Untraceable
from certcli.lipschitz.propagate import trace_network

Visit = Callable[[int, Tensor], None]
"""Takes a group and float64 input rows (tokens, in)."""


def not_followed_by_relu(
    model: nn.Module, size: tuple[int, ...], paths: list[str]
) -> dict[str, str]:
    """Return path -> reason for layers whose output may not go through ReLU alone, always.

    Read from the graph of a real forward pass on an image of `size` (c, h, w); identities and
    dropout are skipped.
    """
    try:
        graph = trace_network(model, size).graph
    except Untraceable as reason:
        return dict.fromkeys(paths, f"the network cannot be traced: {reason}")
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    reasons = {}
    for path in paths:
        if path not in calls:
            reasons[path] = "the forward pass does not call it as a module"
        for node in calls.get(path, []):
            other = _first_other_use(model, node)
            if other is not None:
                reasons[path] = f"its output goes to {other}"
    return reasons


def _first_other_use(model: nn.Module, node: fx.Node) -> str | None:
    for user in node.users:
        if user.op == "call_module":
            module: Any = model.get_submodule(str(user.target))
            if runs_known_code(module, nn.ReLU):
                continue
            if any(runs_known_code(module, kind) for kind in (nn.Identity, nn.Dropout)):
                other = _first_other_use(model, user)
                if other is None:
                    continue
                return other
            return f"{user.target} ({type(module).__name__})"
        if user.op == "output":
            return "the network's output"
        if user.target not in (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"):
            return f"the operation '{getattr(user.target, '__name__', user.target)}'"
    return None if node.users else "nothing"


class StreamedInputs:
    """The inputs of one layer, kept in memory, or recomputed by the network at each visit."""

    def __init__(
        self, model: nn.Module, batches: Batches, path: str, groups: int, keep_bytes: int | None
    ) -> None:
        """Keep at most `keep_bytes` (None: all). The model must not change where recomputed."""
        self.model = model
        self.batches = batches
        self.path = path
        self.groups = groups
        self.module: Any = module_at(model, path)
        self.kept: list[tuple[int, Tensor]] | None = []
        size = 0

        def keep(number: int, path: str, module: nn.Module, value: Tensor) -> None:
            nonlocal size
            size += value.numel() * value.element_size()
            if self.kept is None or (keep_bytes is not None and size > keep_bytes):
                self.kept = None
                raise StopBatch
            self.kept.append((number, value.clone()))

        stream(model, batches, [path], keep)

    def visit(self, see: Visit) -> None:
        """Call see(group, rows) for all inputs in order."""

        def look(number: int, path: str, module: nn.Module, value: Tensor) -> None:
            for piece in rows(self.module, value):
                see(number % self.groups, piece)

        if self.kept is None:
            stream(self.model, self.batches, [self.path], look)
        else:
            for number, value in self.kept:
                look(number, self.path, self.module, value)


@dataclass(frozen=True, eq=False)
class SignPass:
    """The sums of one pass over the inputs for a matrix W, one entry for each group j.

    Args:
        errors: h_j(W).
        gradients: (groups, out, in), half the gradient of h_j.
        shifts: |E_j|^2.
        crosses: E_j X_j^T.
    """

    errors: Tensor
    gradients: Tensor
    shifts: Tensor
    crosses: Tensor


@dataclass(frozen=True, eq=False)
class RectifiedStatistics(LayerStatistics):
    """A layer's statistics with inputs, by the one-sided distance; eta is relative to |y|."""

    bias: Tensor | None = None
    inputs: StreamedInputs | None = None
    held_out_inputs: StreamedInputs | None = None

    @classmethod
    def of(
        cls,
        layer: LayerStatistics,
        model: nn.Module,
        batches: Batches,
        held_out: Batches | None,
        memory_limit_bytes: int | None = None,
    ) -> "RectifiedStatistics":
        """Add inputs to `layer`: kept where they fit half the limit, recomputed where they do not."""
        share = None if memory_limit_bytes is None else memory_limit_bytes // 4
        arguments: Mapping[str, Any] = {
            field.name: getattr(layer, field.name) for field in fields(LayerStatistics)
        }
        bias = module_at(model, layer.path).bias
        unseen = None if held_out is None else StreamedInputs(model, held_out, layer.path, 1, share)
        inputs = StreamedInputs(model, batches, layer.path, len(layer.grams), share)
        return cls(
            **arguments,
            bias=None if bias is None else bias.detach().double(),
            inputs=inputs,
            held_out_inputs=unseen,
        )

    @cached_property
    def energies(self) -> Tensor:
        """Return S_j = |y|^2, the energy of the ReLU's outputs: (groups,)."""
        return self._energies(self.inputs)

    @cached_property
    def _held_out_energy(self) -> Tensor:
        return self._energies(self.held_out_inputs)

    def relative_errors(self, weight: Tensor) -> Tensor:
        """Return sqrt(h_j(W) / S_j) of each group: (out, in) -> (groups,). 0 / 0 is 0."""
        return error_ratio(self.errors(weight), self.energies)

    def errors(self, weight: Tensor) -> Tensor:
        return self._errors(self.inputs, weight)

    def held_out_error(self, weight: Tensor) -> float | None:
        if self.held_out_inputs is None:
            return None
        return float(
            error_ratio(self._errors(self.held_out_inputs, weight), self._held_out_energy).max()
        )

    def at(self, weight: Tensor) -> SignPass:
        """Return h and its majorant at W, from one pass."""
        count = len(self.grams)
        errors, shifts = (
            torch.zeros(count, dtype=torch.float64, device=weight.device) for _ in range(2)
        )
        gradients, crosses = (
            torch.zeros(count, *weight.shape).to(weight),
            torch.zeros(count, *weight.shape).to(weight),
        )

        def see(group: int, tokens: Tensor, old: Tensor, new: Tensor) -> None:
            inactive = old <= 0
            shift = torch.where(inactive, new.clamp_max(0) - old, 0.0)
            residual = new - old - shift
            errors[group] += residual.square().sum()
            shifts[group] += shift.square().sum()
            gradients[group].addmm_(residual.mT, tokens)
            crosses[group].addmm_(shift.mT, tokens)

        self._compare(self.inputs, weight, see)
        return SignPass(errors, gradients, shifts, crosses)

    def _errors(self, inputs: StreamedInputs | None, weight: Tensor) -> Tensor:
        errors = torch.zeros(
            inputs.groups if inputs else 0, dtype=torch.float64, device=weight.device
        )

        def see(group: int, tokens: Tensor, old: Tensor, new: Tensor) -> None:
            errors[group] += torch.where(old > 0, new - old, new.clamp_min(0)).square().sum()

        self._compare(inputs, weight, see)
        return errors

    def _energies(self, inputs: StreamedInputs | None) -> Tensor:
        energies = torch.zeros(
            inputs.groups if inputs else 0, dtype=torch.float64, device=self.weight.device
        )

        def see(group: int, tokens: Tensor, old: Tensor, new: Tensor) -> None:
            energies[group] += old.clamp_min(0).square().sum()

        self._compare(inputs, self.weight, see)
        return energies

    def _compare(
        self,
        inputs: StreamedInputs | None,
        weight: Tensor,
        see: Callable[[int, Tensor, Tensor, Tensor], None],
    ) -> None:
        """Call see(group, x, W0 x + b, W x + b) for small pieces of the inputs."""
        assert inputs is not None
        both = torch.cat([self.weight, weight]).mT.contiguous()
        outputs = len(weight)
        offset = 0.0 if self.bias is None else self.bias
        step = max(1, CHUNK_BYTES // (64 * max(both.shape)))

        def look(group: int, tokens: Tensor) -> None:
            for piece in tokens.split(step):
                product = piece @ both
                see(group, piece, product[:, :outputs] + offset, product[:, outputs:] + offset)

        with torch.inference_mode():
            inputs.visit(look)
