"""Margins and radii by balls of norms, many images at once. Proofs: docs/local.md, 10."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.enclosure.balls.ball import (
    BallContext,
    Near,
    Normalised,
    fibres,
    pixel_ball,
    rules,
    settled,
)
from certcli.enclosure.balls.layers import normalised
from certcli.enclosure.zonotopes.columns import gamma, up
from certcli.enclosure.zonotopes.domain import Enclosure, Watch, prepared
from certcli.enclosure.zonotopes.margins import differences
from certcli.enclosure.zonotopes.space import ExecutedWalk, Execution
from certcli.engine.table import NoRule
from certcli.engine.walk import Call, walk
from certcli.evaluation.perturbation import Norm
from certcli.nn.blocks import spread_of

_COPIES = 24
"""Arrays of the largest kind an image, with those kept for the next radius."""
_MOST = 64


class _BallWalk(Enclosure):
    """One walk: the same graph and the same tokens as the local domain, with norms for values."""

    rules = rules

    def __init__(
        self,
        network: "NormsNetwork",
        start: Near,
        facts: dict[Any, Any],
        watch: Watch | None,
        witnesses: Sequence[tuple[int, Tensor]],
        executed_as: ExecutedWalk | None,
    ) -> None:
        super().__init__(
            network.ending, network.needed, start, watch, witnesses, executed_as=executed_as
        )
        self._weights = network.weights
        self._facts = facts

    def context(self, call: Call) -> Any:
        assert call.node is not None
        return BallContext(call.node, self.needed.get(call.node), self._weights, self._facts)


class NormsNetwork:
    """A network traced once. NoRule, Untraceable name an operation without a theorem."""

    def __init__(
        self, model: nn.Module, size: tuple[int, int, int], execution: Execution | None = None
    ) -> None:
        self.size = size
        self.weights: dict[Any, Any] = {}
        self.ending, self.needed, self.execution = prepared(model, size, rules, execution)

    def at_once(self, budget: float) -> int:
        """Return how many images fit into `budget` bytes, with all heads' probabilities and a
        head's matrix a token.
        """
        largest = max(self.size)
        for node in self.ending.trace.graph.nodes:
            shape = node.meta.get("shape")
            if node.op not in ("call_module", "call_function", "call_method") or not isinstance(
                shape, tuple
            ):
                continue
            largest = max(largest, math.prod(shape))
            if node.target is functional.scaled_dot_product_attention:
                keys = max(part.meta.get("shape", shape)[-2] for part in node.all_input_nodes)
                largest = max(largest, math.prod(shape[:-1]) * keys)
            module: Any = (
                self.ending.trace.root.get_submodule(str(node.target))
                if node.op == "call_module"
                else None
            )
            if isinstance(getattr(module, "num_heads", None), int):
                tokens = shape[-2]
                largest = max(largest, module.num_heads * tokens * max(tokens, module.head_dim**2))
        return max(1, min(_MOST, int(budget / (8 * _COPIES * largest))))

    @torch.no_grad()
    def margins(
        self,
        images: Tensor,
        radii: Tensor,
        labels: Tensor,
        facts: dict[Any, Any] | None = None,
        watch: Watch | None = None,
        norm: Norm = "l2",
    ) -> Tensor:
        """Return (b, k - 1) bounds <= z_label - z_j over each ball; NaN or -inf: not proven.

        Args:
            facts: filled with what depends on the images alone, for the next radii around the same
                images.
        """
        start = pixel_ball(images, radii, norm)
        facts = {} if facts is None else facts
        witnesses: list[tuple[int, Tensor]] = []
        # once for these images: all centres, and two far points of the first image
        if "witnessed" not in facts:
            witnesses = [
                *enumerate(images[:, None]),
                *((0, image) for image in start.far(radii[0], norm)),
            ]
        executed_as = None if self.execution is None else self.execution.walk(len(images))
        x: Any = walk(
            self.ending.trace, _BallWalk(self, start, facts, watch, witnesses, executed_as)
        )
        loss = (
            [None] * len(images) if executed_as is None else executed_as.pairs().to(images).unbind()
        )
        facts["witnessed"] = True
        head: Any = self.ending.head
        if self.ending.token is not None and x.shape[1] > 1:
            x = settled(x).choose(self.ending.token)
        if self.ending.norm is not None:
            last: Any = self.ending.norm
            x = normalised(None, x, spread_of(last), last.weight, last.bias)
        gain = x.gain if isinstance(x, Normalised) else None
        near = x.near if isinstance(x, Normalised) else settled(x)
        rows = torch.eye(x.centre.shape[-1]).to(images) if head is None else head.weight
        bias = None if head is None else head.bias
        margins = []
        for i, label in enumerate(labels.tolist()):
            gradients = differences(rows, bias, label, loss[i])
            margins.append(_margins(x.centre[i], near.fibre[i], gradients, gain))
        return torch.stack(margins)

    def radii(self, images: Tensor, labels: Tensor, steps: int = 4, norm: Norm = "l2") -> Tensor:
        """Return the largest radii whose margins were all proven positive, else 0.0: (b,).

        The exponent is bisected for all images at once. Every radius returned was checked; monotony
        is not assumed.
        """
        facts: dict[Any, Any] = {}
        proven = torch.zeros(len(images), dtype=torch.float64, device=images.device)
        # 2^-44: below it the pixels' own rounding in float64 is not far
        low = torch.full_like(proven, -44.0)
        high = torch.full_like(proven, 6.0)
        for _ in range(6 + steps):
            middle = (low + high) / 2
            tried = torch.exp2(middle)
            # False with NaN
            holds = (self.margins(images, tried, labels, facts, norm=norm) > 0).all(1)
            proven = torch.where(holds, torch.maximum(proven, tried), proven)
            low = torch.where(holds, middle, low)
            high = torch.where(holds, high, middle)
        return proven


def _margins(
    centre: Tensor, fibre: Tensor, of: tuple[Tensor, Tensor, Tensor], gain: Tensor | None
) -> Tensor:
    """Return (w_label - w_j) z at the centre - |(w_label - w_j) D| radius, rounded down."""
    rows, offset, doubt = of
    flat = centre.flatten()
    radius = fibre.flatten()
    if len(radius) != 1:
        raise NoRule("a head on several tokens")
    lengths = fibres(rows if gain is None else rows * gain) * (1 + 2**-50)
    loss = gamma(len(flat) + 8) * (rows.abs() @ flat.abs() + offset.abs()) * 4
    return rows @ flat + offset - up(lengths * radius + loss + doubt, 8)
