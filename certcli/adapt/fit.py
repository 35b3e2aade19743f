"""Re-fitting from first to last: each new part learns the old one's output, fed by the parts already adapted.

Closed form where a part is linear in its parameters, AdamW for the rest. Every block first, then what lies between and
after blocks; the streams of all calibration images, old and new, are kept in memory, their halves are not.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.carry import HalfScale, Scales, input_maps, output_map
from certcli.adapt.descend import descend
from certcli.adapt.ending import Ending
from certcli.adapt.families import Family, Half, Section, attended, run_half
from certcli.adapt.lots import Lots
from certcli.adapt.pixels import as_pixels
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import LeastSquares, between_inputs, compose_inputs
from certcli.adapt.streams import Replaced, Stream, Streams, captured
from certcli.nn.residual import ResidualBlock

HALVES: tuple[Half, Half] = (1, 2)
RIDGE = 1e-4
_ROWS, _FEWEST = 64, 128  # rows for each unknown of a least-squares problem, and the fewest images it is given


class Fitter(Streams):
    """Walks both networks side by side. `position` counts the steps of the body that are done."""

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
        self.scales, self.images = scales, images
        self.position = 0

    @torch.no_grad()
    def advance(self, done: int) -> None:
        """Embed the images and carry both streams past the first `done` steps, which were adapted before."""
        self._embed(start_norms=done == 0)
        steps = zip(self.family.body(self.teacher.net), self.family.body(self.student.net), strict=True)
        for old, new in list(steps)[:done]:
            self.move(old.run, new.run)
        self.position = done

    def run(self) -> Iterator[list[Replaced]]:
        """Adapt the steps that are left, then the end of the network; the records of each step."""
        steps = list(zip(self.family.body(self.teacher.net), self.family.body(self.student.net), strict=True))
        for index, (old, new) in enumerate(steps):
            if index < self.position:
                continue
            record = self._adapt(index, old, new)
            self.position = index + 1
            if record is not None:
                self.agree_on(new.module)
                yield [record]
        if self.position == len(steps):
            with torch.no_grad():
                records = list(Ending(self).run())
            self.agree_on(self.student.net)
            self.position += 1
            yield records

    @torch.no_grad()
    def _adapt(self, index: int, old: Section, new: Section) -> Replaced | None:
        if new.kind == "tokens":
            self.move(old.run, new.run)
            return None
        few = self._few(self.old, new), self._few(self.new, new)
        if new.kind == "merge":
            self._merge(old, new, *few)
            self.move(old.run, new.run)
            return Replaced(new.path, _name(old.module), _name(new.module.norm), self.error(1.0))
        for half in HALVES:
            self._half(old.module, new.module, half, self.scales[(new.path, half)], *few)
        self.move(old.run, None)
        last = self.scales[(new.path, 2)].after
        if self.settings.epochs > 0:
            generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + index)
            descend(new.module, new.module, self.lots, self.new, self.old, last, self.settings, generator)
        self.move(None, new.run)
        return Replaced(new.path, _name(old.module), describe(new.module), self.error(last))

    def _few(self, stream: Stream, step: Section) -> Stream:
        """A copy of as many images as have tokens enough to determine the widest least-squares problem of this step."""
        widest = step.module.mlp.fc2.in_features if step.kind == "block" else step.module.reduction.in_features
        some = next(iter(self.old.values()))[0]
        count = max(_FEWEST, -(-_ROWS * widest // (some.numel() // some.shape[-1])))
        return {lot: rows[: self.lots.size(lot, count)].clone() for lot, rows in stream.items()}

    def _embed(self, start_norms: bool) -> None:
        """The streams before the first step; a new norm inside the embedding is started on the way."""
        size = self.settings.batch_size

        def embed(model: Any, part: Tensor) -> Tensor:
            return self.family.embed(model.net, model.normalize(as_pixels(part)))

        for path in self.family.embed_norms if start_norms else ():
            self.start_norm_at(path, lambda model, part: embed(model, part), self.images, self.images)
        for model, stream in ((self.teacher, self.old), (self.student, self.new)):
            for lot, images in self.images.items():
                stream[lot] = torch.cat([embed(model, part) for part in images.split(size)])

    def _half(self, old: Any, new: Any, half: Half, scale: HalfScale, x: Stream, y: Stream) -> None:
        """Norm, input maps, output map of one residual branch; then both streams move past it."""
        old_norm, new_norm = getattr(old, f"norm{half}"), getattr(new, f"norm{half}")

        def norm_pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                yield after.flatten(0, -2), old_norm(before).flatten(0, -2)

        self.start_norm(new_norm, norm_pairs)
        readers = input_maps(new, half)
        if readers:
            found = self.added(
                partial(between_inputs, readers), lambda lot: ((new_norm(rows), goal) for rows, goal in norm_pairs(lot))
            )
            compose_inputs(readers, found, RIDGE)
        output = output_map(new, half)

        def output_pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                goal = run_half(old, half, before)
                # what the stream lacks: (goal / s - keep y) / share
                target = (goal / scale.after - scale.keep * after) / scale.share
                features = captured(output, partial(run_half, new, half, after)).flatten(0, -2)
                if half == 1:
                    inside = attended(new, torch.ones_like(target[..., :1])).flatten() > 0
                    target = attended(new, target).flatten(0, -2)[inside]
                    features = features[inside]
                yield features, target.flatten(0, -2)
                before.copy_(goal)

        kept = type(new.attn) is type(old.attn) if half == 1 else type(new.mlp.act) is type(old.mlp.act)
        self.added(partial(_onto, output), output_pairs).solve_into(output, RIDGE, keep=kept)
        for lot in self.lots.own:
            for (after,) in self.chunks(y[lot]):
                after.copy_(run_half(new, half, after))

    def _merge(self, old: Section, new: Section, x: Stream, y: Stream) -> None:
        """Patch merging: its norm, then its map by least squares."""
        reduction: nn.Linear = new.module.reduction

        def norm_pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                inputs = captured(new.module.norm, partial(new.run, after))
                reached = captured(old.module.norm, partial(old.run, before))
                yield inputs.flatten(0, -2), old.module.norm(reached).flatten(0, -2)

        def pairs(lot: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x[lot], y[lot]):
                features = captured(reduction, partial(new.run, after))
                yield features.flatten(0, -2), old.run(before).flatten(0, -2)

        self.start_norm(new.module.norm, norm_pairs)
        self.added(partial(_onto, reduction), pairs).solve_into(reduction, RIDGE, keep=True)


def _onto(layer: nn.Linear) -> LeastSquares:
    """To be given (what reaches the layer, what it should give)."""
    return LeastSquares(layer.in_features, layer.out_features, layer.weight.device, layer.bias is not None)


def _name(part: nn.Module) -> str:
    return type(part).__name__


def describe(block: Any) -> str:
    parts = [_name(block.attn), _name(block.norm1), _name(block.mlp.act)]
    if isinstance(block, ResidualBlock) or hasattr(block, "residual1"):
        parts.append(_name(block.residual1))
    return ", ".join(parts)
