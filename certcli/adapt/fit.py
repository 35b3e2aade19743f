"""Fit the new parts in order: each learns the old part's output, on inputs from adapted parts.

Parts that are linear in their parameters have a closed form; AdamW fits the rest. The streams of
all calibration images, old and new, stay in memory; the streams inside a block do not.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.calibration_shards import Lots
from certcli.adapt.descend import descend
from certcli.adapt.ending import EndFitter
from certcli.adapt.families import Family, Half, Section, attention_input, run_half
from certcli.adapt.pixels import as_pixels
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import LeastSquares, between_inputs, compose_inputs
from certcli.adapt.streams import AdaptedPart, Stream, Streams, capture_input
from certcli.adapt.weight_transfer import HalfScale, Scales, input_maps, output_map
from certcli.system.products import fast_products

HALVES: tuple[Half, Half] = (1, 2)
RIDGE = 1e-4
# rows for each unknown of a least-squares problem, and its least number of images
_ROWS = 64
_FEWEST = 128


class Fitter(Streams):
    """Fit the sections of both networks side by side; `position` counts the finished sections."""

    def __init__(
        self,
        teacher: Any,
        student: Any,
        family: Family,
        scales: Scales,
        settings: AdaptSettings,
        images: Stream,
        lots: Lots,
    ) -> None:
        super().__init__(teacher, student, family, settings, lots)
        self.scales = scales
        self.images = images
        self.position = 0

    @torch.no_grad()
    def advance(self, done: int) -> None:
        """Embed the images, and move both streams past the first `done` sections."""
        self._embed(start_norms=done == 0)
        steps = zip(
            self.family.body(self.teacher.net), self.family.body(self.student.net), strict=True
        )
        for old, new in list(steps)[:done]:
            self.move(old.run, new.run)
        self.position = done

    def run(self) -> Iterator[list[AdaptedPart]]:
        """Adapt the remaining sections, then the end of the network; yield the records of each."""
        steps = list(
            zip(self.family.body(self.teacher.net), self.family.body(self.student.net), strict=True)
        )
        for index, (old, new) in enumerate(steps):
            if index < self.position:
                continue
            with fast_products(self.student.net):
                record = self._adapt(index, old, new)
            self.position = index + 1
            if record is not None:
                self.agree_on(new.module)
                yield [record]
        if self.position == len(steps):
            with torch.no_grad(), fast_products(self.student.net):
                records = list(EndFitter(self).run())
            self.agree_on(self.student.net)
            self.position += 1
            yield records

    @torch.no_grad()
    def _adapt(self, index: int, old: Section, new: Section) -> AdaptedPart | None:
        if new.kind == "tokens":
            self.move(old.run, new.run)
            return None
        few = self._subset(self.old, new), self._subset(self.new, new)
        if new.kind == "merge":
            self._merge(old, new, *few)
            self.move(old.run, new.run)
            return AdaptedPart(new.path, _name(old.module), _name(new.module.norm), self.error(1.0))
        for half in HALVES:
            self._half(old.module, new.module, half, self.scales[(new.path, half)], *few)
        self.move(old.run, None)
        last = self.scales[(new.path, 2)].after
        if self.settings.epochs > 0:
            generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + index)
            descend(
                new.module,
                new.module,
                self.lots,
                self.new,
                self.old,
                last,
                self.settings,
                generator,
            )
        self.move(None, new.run)
        return AdaptedPart(new.path, _name(old.module), describe(new.module), self.error(last))

    def _subset(self, stream: Stream, step: Section) -> Stream:
        """Copy as many images as the widest least-squares problem of this section needs."""
        widest = (
            step.module.mlp.fc2.in_features
            if step.kind == "block"
            else step.module.reduction.in_features
        )
        some = next(iter(self.old.values()))[0]
        count = max(_FEWEST, -(-_ROWS * widest // (some.numel() // some.shape[-1])))
        return {lot: rows[: self.lots.size(lot, count)].clone() for lot, rows in stream.items()}

    def _embed(self, start_norms: bool) -> None:
        """Compute the streams before the first section, and start the new norms of the embedding."""
        size = self.settings.batch_size

        def embed(model: Any, part: Tensor) -> Tensor:
            return self.family.embed(model.net, model.normalize(as_pixels(part)))

        for path in self.family.embed_norms if start_norms else ():
            self.start_norm_at(
                path, lambda model, part: embed(model, part), self.images, self.images
            )
        for model, stream in ((self.teacher, self.old), (self.student, self.new)):
            for lot, images in self.images.items():
                stream[lot] = torch.cat([embed(model, part) for part in images.split(size)])

    def _half(self, old: Any, new: Any, half: Half, scale: HalfScale, x: Stream, y: Stream) -> None:
        """Fit norm, input and output map of a residual branch, and move both streams past it."""
        old_norm, new_norm = getattr(old, f"norm{half}"), getattr(new, f"norm{half}")

        def norm_pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                yield after.flatten(0, -2), old_norm(before).flatten(0, -2)

        self.start_norm(new_norm, norm_pairs)
        readers = input_maps(new, half)
        if readers:
            sums = self.accumulate(
                partial(between_inputs, readers),
                lambda lot: ((new_norm(rows), goal) for rows, goal in norm_pairs(lot)),
            )
            compose_inputs(readers, sums, RIDGE)
        output = output_map(new, half)

        def output_pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                goal = run_half(old, half, before)
                # the branch that is missing in the stream: (goal / s - keep y) / share
                target = (goal / scale.after - scale.keep * after) / scale.share
                features = capture_input(output, partial(run_half, new, half, after)).flatten(0, -2)
                if half == 1:
                    inside = attention_input(new, torch.ones_like(target[..., :1])).flatten() > 0
                    target = attention_input(new, target).flatten(0, -2)[inside]
                    features = features[inside]
                yield features, target.flatten(0, -2)
                before.copy_(goal)

        fixed = (
            type(new.attn) is type(old.attn)
            if half == 1
            else type(new.mlp.act) is type(old.mlp.act)
        )
        self.accumulate(partial(_least_squares_onto, output), output_pairs).solve_into(
            output, RIDGE, keep=fixed
        )
        for lot in self.lots.own:
            for (after,) in self.chunks(y[lot]):
                after.copy_(run_half(new, half, after))

    def _merge(self, old: Section, new: Section, x: Stream, y: Stream) -> None:
        """Fit patch merging: its norm, then its map by least squares."""
        reduction: nn.Linear = new.module.reduction

        def norm_pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                inputs = capture_input(new.module.norm, partial(new.run, after))
                reached = capture_input(old.module.norm, partial(old.run, before))
                yield inputs.flatten(0, -2), old.module.norm(reached).flatten(0, -2)

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                features = capture_input(reduction, partial(new.run, after))
                yield features.flatten(0, -2), old.run(before).flatten(0, -2)

        self.start_norm(new.module.norm, norm_pairs)
        self.accumulate(partial(_least_squares_onto, reduction), pairs).solve_into(
            reduction, RIDGE, keep=True
        )


def _least_squares_onto(layer: nn.Linear) -> LeastSquares:
    """Return the solver for pairs (inputs of the layer, its target outputs)."""
    return LeastSquares(
        layer.in_features, layer.out_features, layer.weight.device, layer.bias is not None
    )


def _name(part: nn.Module) -> str:
    return type(part).__name__


def describe(block: Any) -> str:
    parts = [_name(block.attn), _name(block.norm1), _name(block.mlp.act)]
    if hasattr(block, "residual1"):
        parts.append(_name(block.residual1))
    return ", ".join(parts)
