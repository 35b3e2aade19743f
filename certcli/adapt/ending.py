"""Fit the end of the network: final norms, then the head."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.descend import descend
from certcli.adapt.families import end
from certcli.adapt.start import LeastSquares, between_inputs, compose_inputs
from certcli.adapt.streams import AdaptedPart, Stream, Streams, capture_input
from certcli.adapt.weight_transfer import heads
from certcli.nn.heads import FlatHead

_HEAD_RIDGE = 0.05


class EndFitter:
    """Adapt the layers after the last block on the streams that leave it."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def run(self) -> Iterator[AdaptedPart]:
        """Adapt the final norms, then the head: distil a flat head, correct others by a linear map."""
        for path in self.streams.family.end_norms:
            norm = self.streams.start_norm_at(
                path,
                lambda model, x: end(model.net, x),
                self.streams.old,
                self.streams.new,
                self._tokens_read,
            )
            if norm is not None:
                yield AdaptedPart(path, "LayerNorm", type(norm).__name__, self._end_error(path))
        head: Any = getattr(self.streams.student.net, "head", None)
        if isinstance(head, FlatHead):
            if head.hidden:
                self._distil_head(head)
            after = f"FlatHead{[layer.out_features for layer in head.hidden]}"
        else:
            for old, new in zip(
                heads(self.streams.teacher.net), heads(self.streams.student.net), strict=True
            ):
                self._correct_head(old, new)
            after = type(head).__name__
        yield AdaptedPart(
            "head", type(self.streams.teacher.net.head).__name__, after, self._end_error(None)
        )

    @property
    def _tokens_read(self) -> int | None:
        """Return the number of leading tokens that the head reads; None: all."""
        net = self.streams.student.net
        return len(heads(net)) if getattr(net, "global_pool", "") == "token" else None

    def _end_error(self, path: str | None) -> float:
        """Return a norm's relative output error at the tokens that the head reads; None: logits."""

        def judged(model: Any, stream: Tensor) -> Tensor:
            if path is None:
                return end(model.net, stream)
            norm = model.net.get_submodule(path)
            reached = capture_input(norm, partial(end, model.net, stream))
            normalised: Tensor = norm(
                reached[:, : self._tokens_read] if reached.dim() == 3 else reached
            )
            return normalised

        streams = self.streams
        return streams.relative_error(
            lambda lot: (
                (judged(streams.student, y), judged(streams.teacher, x))
                for x, y in streams.chunks(streams.old[lot], streams.new[lot])
            )
        )

    def _correct_head(self, old: nn.Linear, new: nn.Linear) -> None:
        streams = self.streams

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in streams.chunks(streams.old[lot], streams.new[lot]):
                after = capture_input(new, partial(end, streams.student.net, y))
                before = capture_input(old, partial(end, streams.teacher.net, x))
                yield after.flatten(0, -2), before.flatten(0, -2)

        # there are only as many rows as images: the fewer rows a feature has, the larger the ridge
        sums = streams.accumulate(partial(between_inputs, [new]), pairs)
        compose_inputs([new], sums, _HEAD_RIDGE * new.in_features / streams.lots.count)

    def _distil_head(self, head: FlatHead) -> None:
        """Start hidden layers orthogonal, fit the last one by least squares, then run AdamW."""
        streams = self.streams
        net = self.streams.student.net
        settings = self.streams.settings
        generator = torch.Generator().manual_seed(settings.seed * 10_007 + 9_999)
        hidden: list[Any] = list(head.hidden)
        for layer in hidden:
            drawn = torch.empty_like(layer.weight, device="cpu")  # where the generator is
            layer.weight.data.copy_(nn.init.orthogonal_(drawn, generator=generator))
            nn.init.zeros_(layer.bias)
        features: Stream = {}
        logits: Stream = {}
        for lot in streams.lots.own:
            parts = list(streams.chunks(streams.old[lot], streams.new[lot]))
            features[lot] = torch.cat([net.fc_norm(net.norm(y)) for _, y in parts])
            logits[lot] = torch.cat([end(streams.teacher.net, x) for x, _ in parts])

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for part, goal in streams.chunks(features[lot], logits[lot]):
                rows = part.flatten(1)
                for layer in hidden:
                    rows = head.act(layer(rows))
                yield rows, goal

        out = head.out
        solver = streams.accumulate(
            lambda: LeastSquares(out.in_features, out.out_features, out.weight.device), pairs
        )
        solver.solve_into(out, ridge=1e-3)
        descend(head, head, streams.lots, features, logits, 1.0, settings, generator)
