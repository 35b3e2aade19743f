"""The end of the network: final norms, then the head."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.carry import heads
from certcli.adapt.descend import descend
from certcli.adapt.start import LeastSquares, between_inputs, compose_inputs
from certcli.adapt.streams import Replaced, Stream, Streams, captured
from certcli.nn.heads import FlatHead

_HEAD_RIDGE = 0.05


class Ending:
    """Adapts what comes after the last block, fed by the streams that left it."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def run(self) -> Iterator[Replaced]:
        """Final norms, then the head: flat ones are distilled from features, others composed with a linear correction."""
        for path in self.streams.family.end_norms:
            norm = self.streams.start_norm_at(path, self._end_of, self.streams.old, self.streams.new, self._tokens_read)
            if norm is not None:
                yield Replaced(path, "LayerNorm", type(norm).__name__, self._end_error(path))
        head: Any = getattr(self.streams.student.net, "head", None)
        if isinstance(head, FlatHead):
            if head.hidden:
                self._distil_head(head)
            after = f"FlatHead{[layer.out_features for layer in head.hidden]}"
        else:
            for old, new in zip(heads(self.streams.teacher.net), heads(self.streams.student.net), strict=True):
                self._correct_head(old, new)
            after = type(head).__name__
        yield Replaced("head", type(self.streams.teacher.net.head).__name__, after, self._end_error(None))

    def _end_of(self, model: Any, stream: Tensor) -> Tensor:
        return self.streams.family.end(model.net, stream)

    @property
    def _tokens_read(self) -> int | None:
        """How many of the last stream's tokens the head reads, the first ones; None: all."""
        net = self.streams.student.net
        return len(heads(net)) if getattr(net, "global_pool", "") == "token" else None

    def _end_error(self, path: str | None) -> float:
        """Relative error of a norm's outputs at the tokens that the head reads, or of the logits."""

        def end(model: Any, stream: Tensor) -> Tensor:
            if path is None:
                return self._end_of(model, stream)
            norm = model.net.get_submodule(path)
            reached = captured(norm, partial(self._end_of, model, stream))
            found: Tensor = norm(reached[:, : self._tokens_read] if reached.dim() == 3 else reached)
            return found

        streams = self.streams
        return streams.apart(
            lambda lot: (
                (end(streams.student, y), end(streams.teacher, x))
                for x, y in streams.chunks(streams.old[lot], streams.new[lot])
            )
        )

    def _correct_head(self, old: nn.Linear, new: nn.Linear) -> None:
        streams = self.streams

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in streams.chunks(streams.old[lot], streams.new[lot]):
                after = captured(new, partial(self._end_of, streams.student, y))
                before = captured(old, partial(self._end_of, streams.teacher, x))
                yield after.flatten(0, -2), before.flatten(0, -2)

        # as few rows as images: the fewer there are for each feature, the more stays as it was
        found = streams.added(partial(between_inputs, [new]), pairs)
        compose_inputs([new], found, _HEAD_RIDGE * new.in_features / streams.lots.count)

    def _distil_head(self, head: FlatHead) -> None:
        """Orthogonal hidden layers, the last one by least squares on the old logits, then AdamW on all of them."""
        streams, net, settings = self.streams, self.streams.student.net, self.streams.settings
        generator = torch.Generator().manual_seed(settings.seed * 10_007 + 9_999)
        hidden: list[Any] = list(head.hidden)
        for layer in hidden:
            nn.init.orthogonal_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        features: Stream = {}
        logits: Stream = {}
        for lot in streams.lots.own:
            parts = list(streams.chunks(streams.old[lot], streams.new[lot]))
            features[lot] = torch.cat([net.fc_norm(net.norm(y)) for _, y in parts])
            logits[lot] = torch.cat([self._end_of(streams.teacher, x) for x, _ in parts])

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for part, goal in streams.chunks(features[lot], logits[lot]):
                rows = part.flatten(1)
                for layer in hidden:
                    rows = head.act(layer(rows))
                yield rows, goal

        out = head.out
        solver = streams.added(lambda: LeastSquares(out.in_features, out.out_features, out.weight.device), pairs)
        solver.solve_into(out, ridge=1e-3)
        descend(head, head, streams.lots, features, logits, 1.0, settings, generator)
