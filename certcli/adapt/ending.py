"""The end of the network: final norms, then the head."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.carry import heads
from certcli.adapt.descend import descend
from certcli.adapt.start import LeastSquares, compose_inputs, relative_error
from certcli.adapt.streams import Replaced, Streams, captured
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

    def _logits(self, model: Any, stream: Tensor) -> Tensor:
        return torch.cat([self.streams.family.end(model.net, part) for (part,) in self.streams.chunks(stream)])

    def _end_error(self, path: str | None) -> float:
        """Relative error of a norm's outputs at the tokens that the head reads, or of the logits."""
        found: list[Tensor] = []
        wanted: list[Tensor] = []
        for x, y in self.streams.chunks(self.streams.old, self.streams.new):
            for model, stream, into in ((self.streams.student, y, found), (self.streams.teacher, x, wanted)):
                if path is None:
                    into.append(self.streams.family.end(model.net, stream))
                else:
                    norm = model.net.get_submodule(path)
                    reached = captured(norm, partial(self._end_of, model, stream))
                    into.append(norm(reached[:, : self._tokens_read] if reached.dim() == 3 else reached))
        return relative_error(torch.cat(found), torch.cat(wanted))

    def _correct_head(self, old: nn.Linear, new: nn.Linear) -> None:
        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in self.streams.chunks(self.streams.old, self.streams.new):
                after = captured(new, partial(self.streams.family.end, self.streams.student.net, y))
                before = captured(old, partial(self.streams.family.end, self.streams.teacher.net, x))
                yield after.flatten(0, -2), before.flatten(0, -2)

        # as few rows as images: the fewer there are for each feature, the more stays as it was
        compose_inputs([new], pairs(), _HEAD_RIDGE * new.in_features / len(self.streams.new))

    def _distil_head(self, head: FlatHead) -> None:
        """Orthogonal hidden layers, the last one by least squares on the old logits, then AdamW on all of them."""
        net, settings = self.streams.student.net, self.streams.settings
        generator = torch.Generator().manual_seed(settings.seed * 10_007 + 9_999)
        hidden: list[Any] = list(head.hidden)
        for layer in hidden:
            nn.init.orthogonal_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        features = torch.cat([net.fc_norm(net.norm(part)) for (part,) in self.streams.chunks(self.streams.new)])
        logits = self._logits(self.streams.teacher, self.streams.old)
        solver = LeastSquares(head.out.in_features, head.out.out_features, features.device)
        for part, goal in self.streams.chunks(features, logits):
            rows = part.flatten(1)
            for layer in hidden:
                rows = head.act(layer(rows))
            solver.add(rows, goal)
        solver.solve_into(head.out, ridge=1e-3)
        with torch.enable_grad():
            descend(
                head, head, features, logits, 1.0, settings.epochs, settings.lr, settings.batch_size, generator
            )  # fmt: skip
