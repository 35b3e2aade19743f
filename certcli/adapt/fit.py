"""Re-fitting from first to last: each new part learns the old one's output, fed by the parts already adapted.

Closed form where a part is linear in its parameters, AdamW for the rest. Every block first, then what lies between and
after blocks; the streams of all calibration images, old and new, are kept in memory, their halves are not.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.carry import HalfScale, Scales, heads, input_maps, output_map
from certcli.adapt.descend import descend
from certcli.adapt.families import Family, Half, Step, attended, run_half
from certcli.adapt.pixels import as_pixels
from certcli.adapt.settings import AdaptSettings
from certcli.adapt.start import LeastSquares, center_norm_start, compose_inputs, floor_start, relative_error
from certcli.nn.heads import FlatHead
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.nn.residual import ResidualBlock

HALVES: tuple[Half, Half] = (1, 2)
RIDGE = 1e-4
_ROWS, _FEWEST = 64, 128  # rows for each unknown of a least-squares problem, and the fewest images it is given
_HEAD_RIDGE = 1e-2  # as few rows as images


@dataclass(frozen=True)
class Replaced:
    """One adapted part: its path, what it was and became, its relative output error on the calibration images."""

    path: str
    before: str
    after: str
    error: float


Pairs = Callable[[], Iterator[tuple[Tensor, Tensor]]]


class Fitter:
    """Walks both networks side by side. `position` counts the steps of the body that are done."""

    def __init__(
        self, teacher: Any, student: Any, family: Family, scales: Scales, settings: AdaptSettings, images: Tensor
    ) -> None:
        self.teacher, self.student, self.family = teacher, student, family
        self.scales, self.settings, self.images = scales, settings, images
        self.position = 0
        self.old = self.new = torch.empty(0)

    def chunks(self, *streams: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = self.settings.batch_size
        yield from zip(*(stream.split(size) for stream in streams), strict=True)

    @torch.no_grad()
    def advance(self, done: int) -> None:
        """Embed the images and carry both streams past the first `done` steps, which were adapted before."""
        self._embed(start_norms=done == 0)
        steps = zip(self.family.body(self.teacher.net), self.family.body(self.student.net), strict=True)
        for old, new in list(steps)[:done]:
            self._move(old.run, new.run)
        self.position = done

    def forget(self) -> None:
        """Let go of the streams."""
        self.old = self.new = torch.empty(0)

    def run(self) -> Iterator[list[Replaced]]:
        """Adapt the steps that are left, then the end of the network; the records of each step."""
        steps = list(zip(self.family.body(self.teacher.net), self.family.body(self.student.net), strict=True))
        for index, (old, new) in enumerate(steps):
            if index < self.position:
                continue
            record = self._adapt(index, old, new)
            self.position = index + 1
            if record is not None:
                yield [record]
        if self.position == len(steps):
            with torch.no_grad():
                records = list(self._end())
            self.position += 1
            yield records

    @torch.no_grad()
    def _adapt(self, index: int, old: Step, new: Step) -> Replaced | None:
        if new.kind == "tokens":
            self._move(old.run, new.run)
            return None
        count = self._enough(new)
        few = (self.old[:count].clone(), self.new[:count].clone())
        if new.kind == "merge":
            self._merge(old, new, *few)
            self._move(old.run, new.run)
            return Replaced(new.path, _name(old.module), _name(new.module.norm), self._error(1.0))
        for half in HALVES:
            self._half(old.module, new.module, half, self.scales[(new.path, half)], *few)
        self._move(old.run, None)
        last = self.scales[(new.path, 2)].after
        if self.settings.epochs > 0:
            generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + index)
            with torch.enable_grad():
                descend(
                    new.module, new.module, self.new, self.old, last, self.settings.epochs, self.settings.lr,
                    self.settings.batch_size, generator,
                )  # fmt: skip
        self._move(None, new.run)
        return Replaced(new.path, _name(old.module), describe(new.module), self._error(last))

    def _enough(self, step: Step) -> int:
        """Images whose tokens determine the widest least-squares problem of this step."""
        widest = step.module.mlp.fc2.in_features if step.kind == "block" else step.module.reduction.in_features
        tokens = self.old[0].numel() // self.old.shape[-1]
        return max(_FEWEST, -(-_ROWS * widest // tokens))

    def _move(self, old: Callable[[Tensor], Tensor] | None, new: Callable[[Tensor], Tensor] | None) -> None:
        """Both streams through one step; in place where it keeps the shape."""
        self.old = self._through(old, self.old)
        self.new = self._through(new, self.new)

    def _through(self, run: Callable[[Tensor], Tensor] | None, stream: Tensor) -> Tensor:
        if run is None:
            return stream
        first = run(stream[: self.settings.batch_size])
        if first.shape[1:] != stream.shape[1:]:
            return torch.cat([run(part) for part in stream.split(self.settings.batch_size)])
        for part in stream.split(self.settings.batch_size):
            part.copy_(run(part))
        return stream

    def _error(self, scale: float) -> float:
        difference = size = 0.0
        for old, new in self.chunks(self.old, self.new):
            difference += float((new * scale - old).double().square().sum())
            size += float(old.double().square().sum())
        return (difference / max(size, 1e-30)) ** 0.5

    def _embed(self, start_norms: bool) -> None:
        """The streams before the first step; a new norm inside the embedding is started on the way."""
        size = self.settings.batch_size

        def embed(model: Any, part: Tensor) -> Tensor:
            return self.family.embed(model.net, model.normalize(as_pixels(part)))

        for path in self.family.embed_norms if start_norms else ():
            self._start_norm_at(path, lambda model, part: embed(model, part), self.images, self.images)
        self.old = torch.cat([embed(self.teacher, part) for part in self.images.split(size)])
        self.new = torch.cat([embed(self.student, part) for part in self.images.split(size)])

    def _start_norm_at(
        self, path: str, run: Callable[[Any, Tensor], Tensor], old_inputs: Tensor, new_inputs: Tensor
    ) -> Any:
        """Start the student's norm at `path` on what reaches it while `run` runs; None where there is no new norm."""
        try:
            new, old = self.student.net.get_submodule(path), self.teacher.net.get_submodule(path)
        except AttributeError:
            return None
        if not isinstance(new, (CenterNorm, FloorNorm)):
            return None

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(old_inputs, new_inputs):
                inputs = captured(new, partial(run, self.student, after))
                reached = captured(old, partial(run, self.teacher, before))
                yield inputs.flatten(0, -2), old(reached).flatten(0, -2)

        self._start_norm(new, pairs)
        return new

    def _start_norm(self, norm: nn.Module, pairs: Pairs) -> None:
        """pairs: (inputs of the new norm, outputs of the old one)."""
        if isinstance(norm, CenterNorm):
            center_norm_start(norm, pairs())
        elif isinstance(norm, FloorNorm) and self.settings.norm_floor is None:
            floor_start(norm, (inputs for inputs, _ in pairs()), None)

    def _half(self, old: Any, new: Any, half: Half, scale: HalfScale, x: Tensor, y: Tensor) -> None:
        """Norm, input maps, output map of one residual branch; then both streams move past it."""
        old_norm, new_norm = getattr(old, f"norm{half}"), getattr(new, f"norm{half}")

        def norm_pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x, y):
                yield after.flatten(0, -2), old_norm(before).flatten(0, -2)

        self._start_norm(new_norm, norm_pairs)
        readers = input_maps(new, half)
        if readers:
            compose_inputs(readers, ((new_norm(after), wanted) for after, wanted in norm_pairs()), RIDGE)
        output = output_map(new, half)
        solver = LeastSquares(output.in_features, output.out_features, output.weight.device, output.bias is not None)
        for before, after in self.chunks(x, y):
            goal = run_half(old, half, before)
            # what the stream lacks: (goal / s - keep y) / share
            target = (goal / scale.after - scale.keep * after) / scale.share
            features = captured(output, partial(run_half, new, half, after)).flatten(0, -2)
            if half == 1:
                inside = attended(new, torch.ones_like(target[..., :1])).flatten() > 0
                target = attended(new, target).flatten(0, -2)[inside]
                features = features[inside]
            solver.add(features, target.flatten(0, -2))
            before.copy_(goal)
        kept = type(new.attn) is type(old.attn) if half == 1 else type(new.mlp.act) is type(old.mlp.act)
        solver.solve_into(output, RIDGE, keep=kept)
        for (after,) in self.chunks(y):
            after.copy_(run_half(new, half, after))

    def _merge(self, old: Step, new: Step, x: Tensor, y: Tensor) -> None:
        """Patch merging: its norm, then its map by least squares."""
        reduction: nn.Linear = new.module.reduction

        def norm_pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self.chunks(x, y):
                inputs = captured(new.module.norm, partial(new.run, after))
                reached = captured(old.module.norm, partial(old.run, before))
                yield inputs.flatten(0, -2), old.module.norm(reached).flatten(0, -2)

        self._start_norm(new.module.norm, norm_pairs)
        solver = LeastSquares(reduction.in_features, reduction.out_features, reduction.weight.device, False)
        for before, after in self.chunks(x, y):
            features = captured(reduction, partial(new.run, after))
            solver.add(features.flatten(0, -2), old.run(before).flatten(0, -2))
        solver.solve_into(reduction, RIDGE, keep=True)

    def _end(self) -> Iterator[Replaced]:
        """Final norms, then the head: flat ones are distilled from features, others composed with a linear correction."""
        for path in self.family.end_norms:
            norm = self._start_norm_at(path, lambda model, part: self.family.end(model.net, part), self.old, self.new)
            if norm is not None:
                yield Replaced(path, "LayerNorm", type(norm).__name__, self._end_error(path))
        head: Any = getattr(self.student.net, "head", None)
        if isinstance(head, FlatHead):
            if head.hidden:
                self._distil_head(head)
            after = f"FlatHead{[layer.out_features for layer in head.hidden]}"
        else:
            for old, new in zip(heads(self.teacher.net), heads(self.student.net), strict=True):
                self._correct_head(old, new)
            after = type(head).__name__
        yield Replaced("head", type(self.teacher.net.head).__name__, after, self._end_error(None))

    def _logits(self, model: Any, stream: Tensor) -> Tensor:
        return torch.cat([self.family.end(model.net, part) for (part,) in self.chunks(stream)])

    def _end_error(self, path: str | None) -> float:
        """Relative error of a norm's outputs, or of the logits."""
        found: list[Tensor] = []
        wanted: list[Tensor] = []
        for x, y in self.chunks(self.old, self.new):
            for model, stream, into in ((self.student, y, found), (self.teacher, x, wanted)):
                if path is None:
                    into.append(self.family.end(model.net, stream))
                else:
                    norm = model.net.get_submodule(path)
                    into.append(norm(captured(norm, partial(self.family.end, model.net, stream))))
        return relative_error(torch.cat(found), torch.cat(wanted))

    def _correct_head(self, old: nn.Linear, new: nn.Linear) -> None:
        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in self.chunks(self.old, self.new):
                after = captured(new, partial(self.family.end, self.student.net, y))
                before = captured(old, partial(self.family.end, self.teacher.net, x))
                yield after.flatten(0, -2), before.flatten(0, -2)

        compose_inputs([new], pairs(), _HEAD_RIDGE)

    def _distil_head(self, head: FlatHead) -> None:
        """Orthogonal hidden layers, the last one by least squares on the old logits, then AdamW on all of them."""
        net, settings = self.student.net, self.settings
        generator = torch.Generator().manual_seed(settings.seed * 10_007 + 9_999)
        hidden: list[Any] = list(head.hidden)
        for layer in hidden:
            nn.init.orthogonal_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        features = torch.cat([net.fc_norm(net.norm(part)) for (part,) in self.chunks(self.new)])
        logits = self._logits(self.teacher, self.old)
        solver = LeastSquares(head.out.in_features, head.out.out_features, features.device)
        for part, goal in self.chunks(features, logits):
            rows = part.flatten(1)
            for layer in hidden:
                rows = head.act(layer(rows))
            solver.add(rows, goal)
        solver.solve_into(head.out, ridge=1e-3)
        with torch.enable_grad():
            descend(
                head, head, features, logits, 1.0, settings.epochs, settings.lr, settings.batch_size, generator
            )  # fmt: skip


def captured(module: nn.Module, run: Callable[[], Tensor]) -> Tensor:
    """What reaches `module` while `run` runs."""
    seen: list[Tensor] = []
    handle = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        run()
    finally:
        handle.remove()
    return seen[0]


def _name(part: nn.Module) -> str:
    return type(part).__name__


def describe(block: Any) -> str:
    parts = [_name(block.attn), _name(block.norm1), _name(block.mlp.act)]
    if isinstance(block, ResidualBlock) or hasattr(block, "residual1"):
        parts.append(_name(block.residual1))
    return ", ".join(parts)
