"""`--goal certify` and named parts: surgery, closed forms, blocks, distillation.

The new parts are fitted in order: each learns the old part's output, on inputs from adapted parts.
Parts that are linear in their parameters have a closed form; AdamW fits the rest. The streams of
all calibration images, old and new, stay in memory; the streams inside a block do not. A run can be
resumed; its state is safetensors, written atomically, no pickle.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from certcli.adapt.descend import (
    FEW,
    SHARDS,
    Descent,
    Pairs,
    Shards,
    Stream,
    distil,
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
    capture_input,
    compose_inputs,
    deviations,
    fit_layer,
    fold_norms,
    head_layers,
    output_map,
    perform_surgery,
    start_norm,
)
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.outputs import read_state, write_state
from certcli.checkpoint.schema import AdaptFields
from certcli.models import build
from certcli.nn.blocks import CenterNorm, FloorNorm
from certcli.nn.layers import FlatHead
from certcli.system.errors import CheckpointError, one_line
from certcli.system.torch_modes import fast_products

KEY = "certvit-adapt-state"
NETWORK = "(network)"
"""The path of the record of distillation."""
RIDGE = 1e-4
_HEAD_RIDGE = 0.05
FLOOR_QUANTILE = 0.05
"""A default floor lies above the deviation of this share of the calibration tokens."""
# rows for each unknown of a least-squares problem, and its least number of images
_ROWS = 64
_FEWEST = 128

Map = Callable[[Tensor], Tensor]


class Adapter(Adaptation):
    """Fit the sections of both networks side by side, then the end; `store` and `restore` its state.

    Several processes share the images by shards and end with the same networks. `done` counts the
    adapted sections (the end is one) and the epochs of distillation.
    """

    def _begin(self) -> None:
        # many small passes are slow on a GPU, where equal bytes are not promised anyway
        photographs = photograph_sized(self.images)
        number = 1 if self.images.is_cuda else SHARDS if photographs else FEW
        self.shards = Shards(len(self.images), self.team, number)
        self.family = adapted_family(self.teacher.net)
        self.student, self.scales = perform_surgery(self.record, self.settings, self.teacher)
        step = self.shards.number
        self.pixels: Stream = {shard: self.images[shard::step] for shard in self.shards.own}
        bodies = (self.family.body(model.net) for model in (self.teacher, self.student))
        self.body = list(zip(*bodies, strict=True))
        self.sections = len(self.body) + 1
        self.done = 0
        self.rate = self.settings.lr

    @property
    def steps(self) -> int:
        """Return about how many records a run has: sections, the end, epochs of distillation."""
        return self.sections + self.settings.distill

    def run(self) -> Iterator[AdaptedPart]:
        """Fit closed forms, then blocks, then distil; continue from a restored state."""
        if self.settings.epochs < 0:
            return
        self._copy_from_leader()
        if self.done < self.sections:
            yield from self._fit()
        self.old = self.new = dict[int, Tensor]()
        if self.settings.distill > 0:
            yield from self._distil()

    def _fit(self) -> Iterator[AdaptedPart]:
        """Adapt what follows the first `done` sections."""
        with torch.no_grad(), fast_products(self.student.net):
            self._embed()
            for old, new in self.body[: self.done]:
                self._move((old.run, self.old), (new.run, self.new))
        for index in range(self.done, self.sections):
            with torch.no_grad(), fast_products(self.student.net):
                last = index == len(self.body)
                parts = self._fit_end() if last else self._fit_section(index, *self.body[index])
            self._copy_from_leader()
            self.done = index + 1
            self.records += parts
            yield from parts

    def _distil(self) -> Iterator[AdaptedPart]:
        epochs = self.done - self.sections
        for rate, error in distil(
            self.teacher, self.student, self.settings, self.pixels, self.shards, epochs, self.rate
        ):
            self.rate = rate
            self.done += 1
            self._copy_from_leader()
            after = f"distilled, epoch {self.done - self.sections}"
            self.records = [record for record in self.records if record.path != NETWORK]
            self.records.append(AdaptedPart(NETWORK, "logits", after, error))
            yield self.records[-1]

    def _copy_from_leader(self) -> None:
        """Copy the leader's weights to all processes: different processors drift apart."""
        self.team.copy_from_leader(list(self.student.net.state_dict().values()))

    def store(self, path: Path) -> None:
        """Write the state between two records: everything that the next step depends on."""
        about = {
            "identity": self.identity,
            "done": self.done,
            "rate": self.rate,
            "records": [asdict(record) for record in self.records],
        }
        write_state(path, KEY, about, build.tensors_of(self.student, copy=False))

    def restore(self, path: Path) -> None:
        """Continue after the state at `path`, to the same bytes on a CPU."""
        about, tensors = read_state(path, KEY, AdaptFields, "an adaptation", self.identity)
        tensors_of_student = self.student.net.state_dict()
        try:
            self.records = [AdaptedPart(**record) for record in about.records]
            for name, tensor in tensors.items():
                tensors_of_student[name].copy_(tensor)
        except (TypeError, KeyError, RuntimeError) as failure:
            raise CheckpointError(
                f"the state does not fit this network ({one_line(failure)})", "drop --resume"
            ) from failure
        self.done = about.done
        self.rate = about.rate

    def result(self) -> Checkpoint:
        """Return the adapted checkpoint; --norm fold folds centre norms into the next maps."""
        folded = fold_norms(self.student.net) if self.settings.norm == "fold" else []
        surgery = self.record.surgery
        others = dict.fromkeys(folded, "identity")
        return self.derive(
            tuple(replace(item, kind=others.get(item.path, item.kind)) for item in surgery)
        )

    def _embed(self) -> None:
        """Compute the streams before the first section; the embedding's new norms start on them."""

        def embed(model: Any, pixels: Tensor) -> Tensor:
            return self.family.embed(model.net, model.normalize(pixels))

        runs = partial(embed, self.teacher), partial(embed, self.student)
        self.old = dict(self.pixels)
        self.new = dict(self.pixels)
        for path in () if self.done else self.family.embed_norms:
            norms = part_at(self.teacher.net, path), part_at(self.student.net, path)
            self._start_norm(*norms, self._pairs(*norms, runs, self.old, self.new))
        self._move((runs[0], self.old), (runs[1], self.new))

    def _fit_section(self, index: int, old: Section, new: Section) -> list[AdaptedPart]:
        if new.kind == "tokens":
            self._move((old.run, self.old), (new.run, self.new))
            return []
        x = self._subset(self.old, new)
        y = self._subset(self.new, new)
        scale = 1.0
        if new.kind == "merge":
            parts = [new.module.norm]
            runs = (old.run, new.run)
            reduction = new.module.reduction
            norm_pairs = self._pairs(old.module.norm, new.module.norm, runs, x, y)
            self._start_norm(old.module.norm, new.module.norm, norm_pairs)
            pairs = self._pairs(None, reduction, runs, x, y)
            fit_layer(reduction, self.shards, pairs, RIDGE, True)
            self._move((old.run, self.old))
        else:
            parts = [new.module.attn, new.module.norm1, new.module.mlp.act]
            parts += [new.module.residual1] if hasattr(new.module, "residual1") else []
            half: Half
            for half in (1, 2):
                self._fit_half(old.module, new, half, x, y)
            scale = self.scales[new.path, 2].after
            self._move((old.run, self.old))
            self._descend(new.module, new.run, scale, index)
        self._move((new.run, self.new))
        after = ", ".join(type(part).__name__ for part in parts)
        return [AdaptedPart(new.path, type(old.module).__name__, after, self._error(scale))]

    def _subset(self, stream: Stream, section: Section) -> Stream:
        """Copy as many images as the widest least-squares problem of this section needs."""
        block = section.kind == "block"
        widest = section.module.mlp.fc2 if block else section.module.reduction
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
        norm_pairs = self._pairs(*norms, runs, x, y)
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

    def _fit_end(self) -> list[AdaptedPart]:
        """Fit the final norms, then the head; both streams end as logits."""
        parts = []
        runs = partial(run_end, self.teacher.net), partial(run_end, self.student.net)
        net: Any = self.student.net
        tokens = len(head_layers(net)) if getattr(net, "global_pool", "") == "token" else None
        for path in self.family.end_norms:
            norms = part_at(self.teacher.net, path), part_at(net, path)
            if isinstance(norms[1], (CenterNorm, FloorNorm)):
                pairs = self._pairs(*norms, runs, self.old, self.new, tokens)
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
                pairs = self._pairs(old, new, runs, self.old, self.new)
                compose_inputs([new], self.shards, pairs, ridge)
        self._move((runs[0], self.old))
        if isinstance(head, FlatHead):
            self._descend(head, runs[1], 1.0, 9_999)
        self._move((runs[1], self.new))
        was = type(self.teacher.net.head).__name__
        return [*parts, AdaptedPart("head", was, after, self._error(1.0))]

    def _start_flat_head(self, head: Any, runs: tuple[Map, Map]) -> None:
        """Start hidden layers orthogonal, and the last one by least squares on the old logits."""
        generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + 9_999)
        for layer in head.hidden:
            drawn = torch.empty_like(layer.weight, device="cpu")  # where the generator is
            layer.weight.data.copy_(nn.init.orthogonal_(drawn, generator=generator))
            nn.init.zeros_(layer.bias)
        pairs = self._pairs(None, head.out, runs, self.old, self.new)
        fit_layer(head.out, self.shards, pairs, 1e-3)

    def _pairs(
        self,
        old: nn.Module | None,
        new: nn.Module,
        runs: tuple[Map, Map],
        x: Stream,
        y: Stream,
        tokens: int | None = None,
    ) -> Pairs:
        """Return pairs (rows that reach the new part, rows that reach the old part).

        Args:
            old: None: in place of what reaches a part, what the old run returns.
            tokens: the number of leading tokens that count; None: all.
        """

        def pairs(shard: int) -> Iterator[tuple[Tensor, Tensor]]:
            for before, after in self._chunks(x[shard], y[shard]):
                run = partial(runs[0], before)
                target = run() if old is None else capture_input(old, run)
                rows = capture_input(new, partial(runs[1], after))
                count = tokens if rows.dim() == 3 and old is not None else None
                yield rows[:, :count].flatten(0, -2), target[:, :count].flatten(0, -2)

        return pairs

    def _start_norm(self, old: Any, new: Any, pairs: Pairs) -> None:
        """Start a new norm by the deviations of the rows that reach it."""
        if not isinstance(new, (CenterNorm, FloorNorm)):
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
        size = floors if isinstance(new, FloorNorm) else (count * squares) ** 0.5
        start_norm(old, new, max(size / count, 1e-6))

    def _descend(self, module: nn.Module, run: Map, scale: float, number: int) -> None:
        """Fit `run` of the new stream to the old stream / scale by AdamW.

        Every feature is weighted by its own variance: a few features of pre-trained vision
        transformers are a hundred times larger than the rest.
        """
        if self.settings.epochs <= 0:
            return
        deviation = self.shards.feature_deviations(self.old) / scale
        weight = (1 / deviation.clamp_min(1e-2 * float(deviation.mean()) + 1e-12)).float()

        def loss(shard: int, rows: Tensor, _seed: int | None) -> Tensor:
            inputs = self.new[shard][rows]
            goal = self.old[shard][rows] / scale
            with mixed_precision(inputs):
                output = run(inputs)
            return ((output.float() - goal) * weight).square().mean()

        settings = self.settings
        lengths = settings.epochs, settings.batch_size, settings.seed * 10_007 + 100 * number
        descent = Descent(module, self.shards, loss, *lengths, 1 / scale)
        deque(descent.run(settings.lr), maxlen=0)

    def _chunks(self, *streams: Tensor) -> Iterator[tuple[Tensor, ...]]:
        size = self.settings.batch_size
        yield from zip(*(stream.split(size) for stream in streams), strict=True)

    def _move(self, *moves: tuple[Map, Stream]) -> None:
        """Move each stream through its map, shard by shard."""
        # the stream stays in float32; products are rounded only where AdamW rounds them as well
        exact = self.settings.epochs == 0
        for run, stream in moves:
            for shard, rows in stream.items():
                with contextlib.nullcontext() if exact else mixed_precision(rows):
                    parts = [run(part) for (part,) in self._chunks(rows)]
                stream[shard] = torch.cat(parts).float()

    def _error(self, scale: float) -> float:
        return self.shards.relative_error(
            lambda shard: (
                (new * scale, old) for old, new in self._chunks(self.old[shard], self.new[shard])
            )
        )


def _outputs(old: nn.Module, new: nn.Module, pairs: Pairs) -> Pairs:
    """Return pairs (output of the new part, output of the old part) of pairs of their inputs."""
    return lambda shard: ((new(rows), old(reached)) for rows, reached in pairs(shard))
