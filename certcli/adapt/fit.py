"""Fit the new parts in order: each learns the old part's output, on inputs from adapted parts.

Parts that are linear in their parameters have a closed form; AdamW fits the rest. The streams of
all calibration images, old and new, stay in memory; the streams inside a block do not.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.descend import (
    COMPARED,
    FEW,
    SHARDS,
    Descent,
    Pairs,
    Shards,
    Stream,
    as_pixels,
    mixed_precision,
    photograph_sized,
)
from certcli.adapt.plan import (
    Adaptation,
    AdaptedPart,
    Half,
    Section,
    adapted_family,
    attention_input,
    part_at,
    run_end,
    run_half,
)
from certcli.adapt.start import (
    branch_inputs,
    compose_inputs,
    deviations,
    fit_layer,
    head_layers,
    output_map,
    perform_surgery,
    start_norm,
)
from certcli.nn.layers import FlatHead
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.system.products import fast_products

RIDGE = 1e-4
_HEAD_RIDGE = 0.05
FLOOR_QUANTILE = 0.05
"""A default floor lies above the deviation of this share of the calibration tokens."""
# rows for each unknown of a least-squares problem, and its least number of images
_ROWS = 64
_FEWEST = 128

Map = Callable[[Tensor], Tensor]


class Fitter(Adaptation):
    """Fit the sections of both networks side by side, then the end.

    Several processes share the images by shards and end with the same networks.
    """

    def _begin(self) -> None:
        # many small passes are slow on a GPU, where equal bytes are not promised anyway
        photographs = photograph_sized(self.images)
        number = 1 if self.images.is_cuda else SHARDS if photographs else FEW
        self.shards = Shards(len(self.images), self.team, number)
        self.family = adapted_family(self.teacher.net)
        self.student, self.scales = perform_surgery(self.record, self.settings, self.teacher)
        self.pixels: Stream = {
            shard: self.images[self.shards.images(shard)] for shard in self.shards.own
        }
        self.old: Stream = {}
        self.new: Stream = {}

    def fit(self, done: int) -> Iterator[tuple[int, list[AdaptedPart]]]:
        """Adapt what follows the first `done` sections; yield the new `done` and the records."""
        bodies = (self.family.body(model.net) for model in (self.teacher, self.student))
        sections = list(zip(*bodies, strict=True))
        with torch.no_grad(), fast_products(self.student.net):
            self._embed(start_norms=done == 0)
            for old, new in sections[:done]:
                self._move(old.run, new.run)
        for index in range(done, len(sections) + 1):
            with torch.no_grad(), fast_products(self.student.net):
                last = index == len(sections)
                parts = self._fit_end() if last else self._fit_section(index, *sections[index])
            yield index + 1, parts

    def _embed(self, start_norms: bool) -> None:
        """Compute the streams before the first section; the embedding's new norms start on them."""

        def embed(model: Any, pixels: Tensor) -> Tensor:
            return self.family.embed(model.net, model.normalize(as_pixels(pixels)))

        runs = partial(embed, self.teacher), partial(embed, self.student)
        for path in self.family.embed_norms if start_norms else ():
            norms = part_at(self.teacher.net, path), part_at(self.student.net, path)
            self._start_norm(*norms, self._input_pairs(*norms, runs, self.pixels, self.pixels))
        for run, stream in zip(runs, (self.old, self.new), strict=True):
            stream.update(
                {shard: self._moved(run, images) for shard, images in self.pixels.items()}
            )

    def _fit_section(self, index: int, old: Section, new: Section) -> list[AdaptedPart]:
        if new.kind == "tokens":
            self._move(old.run, new.run)
            return []
        x, y = self._subset(self.old, new), self._subset(self.new, new)
        if new.kind == "merge":
            self._fit_merge(old, new, x, y)
            self._move(old.run, new.run)
            return [
                AdaptedPart(
                    new.path,
                    type(old.module).__name__,
                    type(new.module.norm).__name__,
                    self._error(1.0),
                )
            ]
        half: Half
        for half in (1, 2):
            self._fit_half(old.module, new, half, x, y)
        scale = self.scales[new.path, 2].after
        self._move(old.run, None)
        self._descend(new.module, new.run, scale, index)
        self._move(None, new.run)
        return [
            AdaptedPart(
                new.path, type(old.module).__name__, _describe_block(new.module), self._error(scale)
            )
        ]

    def _subset(self, stream: Stream, section: Section) -> Stream:
        """Copy as many images as the widest least-squares problem of this section needs."""
        is_block = section.kind == "block"
        widest = section.module.mlp.fc2 if is_block else section.module.reduction
        some = next(iter(self.old.values()))[0]
        rows = some.numel() // some.shape[-1]
        count = max(_FEWEST, -(-_ROWS * widest.in_features // rows))
        return {
            shard: rows[: self.shards.size(shard, count)].clone() for shard, rows in stream.items()
        }

    def _fit_half(self, old: Any, section: Section, half: Half, x: Stream, y: Stream) -> None:
        """Fit norm, input and output map of a residual branch, and move both streams past it."""
        new = section.module
        scale = self.scales[section.path, half]
        runs = partial(run_half, old, half), partial(run_half, new, half)
        norms = getattr(old, f"norm{half}"), getattr(new, f"norm{half}")
        norm_pairs = self._input_pairs(*norms, runs, x, y)
        self._start_norm(*norms, norm_pairs)
        if readers := branch_inputs(new, half):
            compose_inputs(readers, self.shards, _outputs(*norms, norm_pairs), RIDGE)
        output = output_map(new, half)

        def output_pairs(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self._chunks(x[shard], y[shard]):
                goal = runs[0](before)
                # the branch that is missing in the stream: (goal / s - keep y) / share
                target = (goal / scale.after - scale.keep * after) / scale.share
                features = capture_input(output, partial(runs[1], after)).flatten(0, -2)
                if half == 1:
                    inside = attention_input(new, torch.ones_like(target[..., :1])).flatten() > 0
                    target = attention_input(new, target).flatten(0, -2)[inside]
                    features = features[inside]
                yield features, target.flatten(0, -2)
                before.copy_(goal)

        part = "attn" if half == 1 else "mlp.act"
        fixed = type(new.get_submodule(part)) is type(old.get_submodule(part))
        fit_layer(output, self.shards, output_pairs, RIDGE, fixed)
        for rows in y.values():
            for (after,) in self._chunks(rows):
                after.copy_(runs[1](after))

    def _fit_merge(self, old: Section, new: Section, x: Stream, y: Stream) -> None:
        """Fit patch merging: its norm, then its map by least squares."""
        norms = old.module.norm, new.module.norm
        runs = old.run, new.run
        self._start_norm(*norms, self._input_pairs(*norms, runs, x, y))
        reduction = new.module.reduction
        fit_layer(reduction, self.shards, self._output_pairs(reduction, runs, x, y), RIDGE, True)

    def _fit_end(self) -> list[AdaptedPart]:
        """Fit the final norms, then the head; both streams end as logits."""
        parts = []
        runs = partial(run_end, self.teacher.net), partial(run_end, self.student.net)
        net: Any = self.student.net
        tokens = len(head_layers(net)) if getattr(net, "global_pool", "") == "token" else None
        for path in self.family.end_norms:
            norms = part_at(self.teacher.net, path), part_at(net, path)
            if isinstance(norms[1], (CenterNorm, FloorNorm)):
                pairs = self._input_pairs(*norms, runs, self.old, self.new, tokens)
                self._start_norm(*norms, pairs)
                error = self.shards.relative_error(_outputs(*norms, pairs))
                parts.append(AdaptedPart(path, "LayerNorm", type(norms[1]).__name__, error))
        head = net.head
        after = type(head).__name__
        if isinstance(head, FlatHead):
            after = f"FlatHead{[layer.out_features for layer in head.hidden]}"
            self._start_flat_head(head, runs)
        else:
            for old, new in zip(head_layers(self.teacher.net), head_layers(net), strict=True):
                # only as many rows as images: the fewer rows a feature has, the larger the ridge
                ridge = _HEAD_RIDGE * new.in_features / self.shards.count
                pairs = self._input_pairs(old, new, runs, self.old, self.new)
                compose_inputs([new], self.shards, pairs, ridge)
        self._move(runs[0], None)
        if isinstance(head, FlatHead):
            self._descend(head, runs[1], 1.0, 9_999)
        self._move(None, runs[1])
        return [
            *parts,
            AdaptedPart("head", type(self.teacher.net.head).__name__, after, self._error(1.0)),
        ]

    def _start_flat_head(self, head: Any, runs: tuple[Map, Map]) -> None:
        """Start hidden layers orthogonal, and the last one by least squares on the old logits."""
        generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + 9_999)
        for layer in head.hidden:
            drawn = torch.empty_like(layer.weight, device="cpu")  # where the generator is
            layer.weight.data.copy_(nn.init.orthogonal_(drawn, generator=generator))
            nn.init.zeros_(layer.bias)
        pairs = self._output_pairs(head.out, runs, self.old, self.new)
        fit_layer(head.out, self.shards, pairs, 1e-3)

    def _input_pairs(
        self,
        old: nn.Module,
        new: nn.Module,
        runs: tuple[Map, Map],
        x: Stream,
        y: Stream,
        tokens: int | None = None,
    ) -> Pairs:
        """Return pairs (rows that reach the new part, rows that reach the old part).

        Args:
            tokens: the number of leading tokens that count; None: all.
        """

        def pairs(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
            for chunk in self._chunks(x[shard], y[shard]):
                before, after = (
                    capture_input(part, partial(run, rows))
                    for part, run, rows in zip((old, new), runs, chunk, strict=True)
                )
                if after.dim() == 3:
                    before, after = before[:, :tokens], after[:, :tokens]
                yield after.flatten(0, -2), before.flatten(0, -2)

        return pairs

    def _output_pairs(self, layer: nn.Linear, runs: tuple[Map, Map], x: Stream, y: Stream) -> Pairs:
        """Return pairs (inputs of the layer in the new run, outputs of the old run)."""

        def pairs(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self._chunks(x[shard], y[shard]):
                features = capture_input(layer, partial(runs[1], after))
                yield features.flatten(0, -2), runs[0](before).flatten(0, -2)

        return pairs

    def _start_norm(self, old: Any, new: Any, pairs: Pairs) -> None:
        """Start a new norm by the deviations of the rows that reach it."""
        is_floor = isinstance(new, FloorNorm)
        if not is_floor and not isinstance(new, CenterNorm):
            return

        def per_shard(shard: int) -> list[Tensor]:
            sizes = torch.cat([deviations(rows) for rows, _ in pairs(shard)]).sort().values
            count = len(sizes)
            floor = sizes[int(FLOOR_QUANTILE * (count - 1))]
            return [
                torch.stack([torch.full_like(floor, count), sizes.square().sum(), count * floor])
            ]

        like = torch.zeros(3, dtype=torch.float64)
        count, squares, floors = self.shards.total(per_shard, [like])[0].tolist()
        start_norm(old, new, max((floors if is_floor else (count * squares) ** 0.5) / count, 1e-6))

    def _descend(self, module: nn.Module, run: Map, scale: float, number: int) -> None:
        """Fit `run` of the new stream to the old stream / scale by AdamW.

        Every feature is weighted by its own variance: a few features of pre-trained vision
        transformers are a hundred times larger than the rest.
        """
        if self.settings.epochs <= 0:
            return
        deviation = self._feature_deviations() / scale
        weight = (1 / deviation.clamp_min(1e-2 * float(deviation.mean()) + 1e-12)).float()

        def loss(shard: int, rows: Tensor, _seed: int | None) -> Tensor:
            inputs, goal = self.new[shard][rows], self.old[shard][rows] / scale
            with mixed_precision(inputs):
                output = run(inputs)
            return ((output.float() - goal) * weight).square().mean()

        seed = self.settings.seed * 10_007 + 100 * number
        settings = self.settings
        descent = Descent(
            module, self.shards, loss, settings.epochs, settings.batch_size, seed, 1 / scale
        )
        deque(descent.run(settings.lr), maxlen=0)

    def _feature_deviations(self) -> Tensor:
        """Return the deviation (d,) float64 of each feature of the old stream, on COMPARED images."""

        def per_shard(shard: int) -> list[Tensor]:
            rows = self.old[shard][: self.shards.size(shard, COMPARED)].flatten(0, -2).double()
            return [rows.sum(0), rows.square().sum(0), torch.full_like(rows[0, :1], len(rows))]

        features = next(iter(self.old.values())).flatten(0, -2)[0].double()
        total, squares, count = self.shards.total(per_shard, [features, features, features[:1]])
        return (squares / count - (total / count).square()).clamp_min(0).sqrt()

    def _chunks(self, *streams: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = self.settings.batch_size
        yield from zip(*(stream.split(size) for stream in streams), strict=True)

    def _move(self, old: Map | None, new: Map | None) -> None:
        """Move both streams through one section, shard by shard."""
        for run, stream in ((old, self.old), (new, self.new)):
            if run is not None:
                stream.update({shard: self._moved(run, rows) for shard, rows in stream.items()})

    def _moved(self, run: Map, rows: Tensor) -> Tensor:
        # the stream stays in float32; products are rounded only where AdamW rounds them as well
        exact = self.settings.epochs == 0
        with contextlib.nullcontext() if exact else mixed_precision(rows):
            return torch.cat([run(part) for part in rows.split(self.settings.batch_size)]).float()

    def _error(self, scale: float) -> float:
        return self.shards.relative_error(
            lambda shard: (
                (new * scale, old) for old, new in self._chunks(self.old[shard], self.new[shard])
            )
        )


class _Reached(Exception):
    """A run has reached the module whose input was asked for."""


def capture_input(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    """Return the input of `module` during `run`, which ends there."""
    captured: list[Tensor] = []

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured.append(inputs[0])
        raise _Reached

    with module.register_forward_pre_hook(stop), contextlib.suppress(_Reached):
        run()
    return captured[0]


def _outputs(old: nn.Module, new: nn.Module, pairs: Pairs) -> Pairs:
    """Return pairs (output of the new part, output of the old part) of pairs of their inputs."""
    return lambda shard: ((new(rows), old(reached)) for rows, reached in pairs(shard))


def _describe_block(block: Any) -> str:
    parts = [block.attn, block.norm1, block.mlp.act]
    parts += [block.residual1] if hasattr(block, "residual1") else []
    return ", ".join(type(part).__name__ for part in parts)
