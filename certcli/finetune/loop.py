"""The training loop: a generator of records that can resume after every epoch, and holds the best
weights by validation.

The records' estimates come from power iteration, which approaches norms from below. The caller
proves the bound at the end.
"""

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.file import tensors_digest
from certcli.checkpoint.mapped import Spool
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, Untraceable
from certcli.finetune import shards
from certcli.finetune.budget import Costs, affordable_steps, measure_steps, share_done
from certcli.finetune.ema import Average
from certcli.finetune.enclosure_penalty import RAMP
from certcli.finetune.evaluate import Quality, evaluate
from certcli.finetune.losses import NEEDS_CHAIN, NEEDS_ENCLOSURE, NEEDS_PAIRS
from certcli.finetune.losses.chain import ChainBound
from certcli.finetune.losses.local import AT_ONCE, JUDGES, LocalEnclosure
from certcli.finetune.objective import Objective, checkpoint_activations
from certcli.finetune.optimisers import Rates, frozen_parameters, make_optimisers
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.shards import Shares, Stored
from certcli.finetune.state import TrainingState
from certcli.finetune.step import Descent, Diverged
from certcli.finetune.stiefel import orthogonal_parameters, orthogonalise, retract
from certcli.finetune.teacher import Teacher
from certcli.images.labelled import Images
from certcli.lipschitz.network import pair_constants
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.lipschitz.propagate import propagate, trace_network
from certcli.models.pixels import PixelModel
from certcli.system.errors import (
    ArchitectureError,
    CheckpointError,
    DataError,
    NoBoundError,
    UsageError,
    one_line,
)
from certcli.system.processes import ALONE, Team

AVERAGE_ITERATIONS = 10
"""Power iterations, once an epoch, from the singular vectors of the weights in training to those of their average."""

SLACK = 0.25
"""Standard errors by which an epoch may fall short of the best one and still replace it: it saw more of the schedule. Two
epochs judge the same images, so chance moves their difference less than either share: where 1 % of the images decide, by
a quarter of the share's standard error. (The rule of one standard error of Breiman et al. 1984 is for independent folds.)
"""

RETRACTIONS = 6
"""Cubic steps after an epoch, to float precision: the estimate counts these norms as 1, and any epoch may be the best."""

SAID_STEPS = 2
SAID_IMAGES = 32
"""Steps and validation images that are measured before a run says how long it takes."""
ENCLOSED = 32
"""Validation images whose neighbourhoods are enclosed after an epoch: a second of CPU time on digits."""
ENCLOSED_ENTRIES = 256
"""Numbers in all tokens of an image up to which a penalised network is judged so: the time grows with their square, from a
second for 160 to a minute for 816."""
CONTENT = 1024
"""Number of images of each set whose pixels are part of a run's identity."""


@dataclass(frozen=True)
class Epoch:
    """One epoch: mean training loss, validation clean accuracy, and the share certified *by the
    estimate*.

    Attributes:
        masked: accuracy where a part of each validation image is seen, of runs that train on parts.
        noisy: accuracy under the noise of the training, of runs under noise.
    """

    epoch: int
    step: int
    loss: float
    clean: float
    certified_estimate: float | None
    lr: float
    images_per_second: float
    norm_estimate: float | None
    best: bool
    masked: float | None = None
    noisy: float | None = None


def identity(parent_digest: str, settings: FinetuneSettings, *sets: Images) -> str:
    """Return a digest of the starting weights, the settings and the images, which a resumed run
    must share.

    It covers all labels, and the pixels of CONTENT images of each set: reading all of a large set
    would take an epoch.
    """
    content = [
        [images.name, tensors_digest({"": images.labels}), images.limit(CONTENT).digest]
        for images in sets
    ]
    text = json.dumps(
        [parent_digest, settings.parameters(), settings.seed, content], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()


class Trainer:
    """Train a model: `run` yields an `Epoch` after each, `state` and `restore` serve `--resume`.

    Args:
        sharded: the processes share the model's weights (`share_out`), and all make the same calls.
        denoiser: noisy pixels pass it before the network; it is not trained.

    Raises:
        NoBoundError: the loss needs a bound, and the network has none.
    """

    def __init__(
        self,
        model: PixelModel,
        settings: FinetuneSettings,
        classes: int,
        run_identity: str,
        teacher: Teacher | None = None,
        team: Team = ALONE,
        sharded: bool = False,
        denoiser: nn.Module | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.classes = classes
        self.team = team
        self.device = next(model.parameters()).device
        self.identity = run_identity
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.best = -1.0
        self.best_epoch = -1
        self.epoch = self.step = 0
        self.changes: list[tuple[int, int]] = []
        model.eval()
        frozen = frozen_parameters(model.net, settings.freeze or ())
        if frozen and sharded:
            raise UsageError("--freeze does not go with --shard-weights", "one of the two")
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for name, parameter in model.net.named_parameters():
            parameter.requires_grad_(name not in frozen)
        self.orthogonal: list[nn.Parameter] = []
        if settings.optimiser == "stiefel":
            orthogonalise(model.net)
            self.orthogonal = orthogonal_parameters(model.net)
        self.arithmetic = self._arithmetic()
        self.trace: Trace | None = None
        if settings.loss in NEEDS_PAIRS:
            try:
                self.trace = trace_network(model, model.input_size)
                propagate(self.trace, TrainableArithmetic(self.device))
            except (NoRule, Untraceable) as reason:
                raise NoBoundError(
                    f"the loss '{settings.loss}' needs a bound and there is none: {reason}",
                    "adapt the network first (`certvit adapt`), or train with --loss ce",
                ) from reason
        if settings.checkpointing:
            checkpoint_activations(model.net)
        self.shares = Shares(model.parameters(), team) if sharded else None
        trained = model.parameters() if self.shares is None else self.shares.rows
        self.optimisers = make_optimisers(trained, self.orthogonal, settings)
        self.rates = Rates(self.optimisers, settings)
        drop = settings.loss == "local-lip"
        self.chain = (
            ChainBound(model, lambda: self.arithmetic, drop=drop)
            if settings.loss in NEEDS_CHAIN
            else None
        )
        self.enclosure = self._enclosure()
        # the run's own generator draws the order of the images, the same in all processes
        draws = torch.Generator() if team.several else self.generator
        self.objective = Objective(
            model, settings, draws, teacher, self.chain, denoiser, self.enclosure
        )
        self.descent = Descent(
            model, settings, self.objective, self.optimisers, self.pairs, team, self.shares
        )
        self.average = Average(model.net, settings.ema) if settings.ema > 0 else None
        self.best_net = self._net_state()

    def _arithmetic(self, iterations: int = 1) -> TrainableArithmetic:
        orthogonal = frozenset(map(id, self.orthogonal))
        return TrainableArithmetic(self.device, iterations=iterations, orthogonal=orthogonal)

    def _enclosure(self) -> LocalEnclosure | None:
        """Return what encloses the network near images, where the run is for local certificates.

        Raises:
            ArchitectureError: the loss needs it, and the network is of another kind.
        """
        if self.shares is not None or not self.settings.is_for_local:
            return None
        needed = self.settings.loss in NEEDS_ENCLOSURE
        try:
            enclosure = LocalEnclosure(self.model)
        except ArchitectureError:
            if needed:
                raise
            return None
        return enclosure if needed or enclosure.entries <= ENCLOSED_ENTRIES else None

    def pairs(self) -> Tensor | None:
        """Return estimated pair constants (k, k), with gradient; None: not needed."""
        if self.trace is None:
            return None
        return pair_constants(propagate(self.trace, self.arithmetic), self.classes)

    def total_steps(self, train: Images) -> int:
        """Return the optimiser steps of the whole run."""
        return self.settings.steps or self.settings.epochs * self.batches(train)

    def batches(self, train: Images) -> int:
        """Return the optimiser steps of one epoch."""
        return -(-len(train) // (self.settings.batch_size * self.settings.accumulate))

    def run(
        self,
        train: Images,
        validation: Images,
        watch: Callable[[int, float], None] = lambda step, loss: None,
    ) -> Iterator[Epoch]:
        """Train to the end of the schedule, or until patience runs out.

        Args:
            watch: called after every optimiser step with the number of steps and the epoch's mean
                loss.

        Raises:
            DataError: a label is outside the classes.
            Diverged: the loss or the weights are not finite; `best_net` holds the best weights
            before that.
        """
        settings = self.settings
        for images in (train, validation):
            low = int(images.labels.min())
            high = int(images.labels.max())
            if low < 0 or high >= self.classes:
                raise DataError(
                    f"label {low if low < 0 else high} of {images.name} ({images.split}) is outside the network's "
                    f"{self.classes} classes",
                    "use the dataset that the network was made for",
                )
        validation = validation.limit(settings.validation_limit, settings.seed)
        patience = math.inf if settings.patience is None else settings.patience
        while (
            self.step < (total := self.total_steps(train))
            and self.epoch - max(self.best_epoch, 0) < patience
        ):
            started = time.perf_counter()
            losses = 0.0
            count = 0
            before = self.step
            self.model.train()
            tensors = self.model.net.state_dict().values()
            self.team.copy_from_leader([value for value in tensors if not shards.is_sharded(value)])
            order = torch.randperm(len(train), generator=self.generator)
            steps = order.split(settings.batch_size * settings.accumulate)[: total - self.step]
            for number, positions in enumerate(steps):
                if self.step >= self.total_steps(train):  # `watch` may make the run shorter
                    break
                self.descent.expect(train, *steps[number : number + 2])
                losses += self._learn(train, positions, share_done(self.step, total, self.changes))
                count += len(positions)
                watch(self.step, losses / (self.step - before))
            self.model.eval()
            self.epoch += 1
            with torch.no_grad():
                for weight in self.orthogonal:
                    retract(weight, RETRACTIONS)
            self._require_finite_weights()
            elapsed = time.perf_counter() - started
            rising = self._is_rising(total)
            quality, net = self.evaluate(validation, encloses=not rising)
            top = max(self.best, quality.score)
            judges = len(validation)
            if self.enclosure is not None:
                judges = min(judges, ENCLOSED)
            improved = quality.score >= top - SLACK * math.sqrt(top * (1 - top) / judges)
            if improved:
                self.best = top
                self.best_epoch = self.epoch
                self.best_net = net
            if rising:
                self.best = 0.0  # until the penalty has its weight, a later epoch is a better one
            yield Epoch(
                epoch=self.epoch,
                step=self.step,
                loss=losses / (self.step - before),
                clean=quality.clean,
                certified_estimate=quality.certified,
                lr=self.optimisers[0].param_groups[0]["lr"],
                images_per_second=count / elapsed,
                norm_estimate=quality.norm,
                best=improved,
                masked=quality.masked,
                noisy=quality.noisy,
            )

    def _is_rising(self, total: int) -> bool:
        """Whether the weight of the enclosure penalty is still on its way up."""
        share = share_done(self.step, total, self.changes)
        return self.settings.enclosure_penalty > 0 and share <= RAMP

    def _require_finite_weights(self) -> None:
        """Raise Diverged, in all processes, with the name of the first weight that is not finite."""
        tensors = self.model.net.state_dict().items()
        bad = [
            name
            for name, value in tensors
            if value.is_floating_point() and not bool(torch.isfinite(shards.own(value)).all())
        ]
        if self.shares is not None:
            bad = [name for names in self.team.everyone(bad) for name in names]
        if bad:
            raise Diverged(f"the weights '{bad[0]}' became NaN or infinite by step {self.step}")

    def _learn(self, train: Images, positions: Tensor, share: float) -> float:
        self.rates.set(share)
        loss = self.descent.step(
            train, positions, share, f"step {self.step} (epoch {self.epoch + 1})", self.step
        )
        if self.average is not None:
            self.average.update(self.model.net)
        self.step += 1
        return loss

    def evaluate(self, images: Images, encloses: bool = True) -> tuple[Quality, dict[str, Stored]]:
        """Return the quality of the weights that would be written (the average, where there is
        one), and these weights.

        Args:
            encloses: judge runs for local certificates by an enclosure, too.
        """
        with torch.no_grad():
            if self.average is None:
                return self._quality(images, encloses), self._net_state()
            with self.average.applied(self.model.net, self.orthogonal):
                live = self.arithmetic
                self.arithmetic = self._arithmetic(AVERAGE_ITERATIONS)
                self.arithmetic.vectors = dict(live.vectors)
                try:
                    return self._quality(images, encloses), self._net_state()
                finally:
                    self.arithmetic = live

    def _quality(self, images: Images, encloses: bool) -> Quality:
        """Judge the weights by the estimate that the loss reads."""
        chain, epsilon, batch = (
            self.chain,
            self.settings.epsilon,
            max(self.settings.batch_size, 256),
        )
        gains = (
            None if chain is None else lambda pixels, labels: chain.gains(pixels, epsilon)(labels)
        )
        in_step = self.shares is not None
        # sharded weights are gathered in one precision
        forward = self.objective.forward if in_step else self.model
        quality = evaluate(
            forward, self.pairs(), images, epsilon, batch, self.device, gains, self.team, in_step
        )
        noise = self.settings.noise
        if noise > 0:
            noisy = evaluate(
                lambda pixels: forward(self.objective.denoised(pixels)),
                None,
                images,
                epsilon,
                batch,
                self.device,
                team=self.team,
                in_step=in_step,
                noise=noise,
            )
            quality = replace(quality, noisy=noisy.clean)
        if self.enclosure is not None and encloses:
            quality = replace(quality, certified=self._enclosed(self.enclosure, images))
        if in_step:
            shards.let_go(self.model.net)
        if self.objective.hiding is not None:
            behind = evaluate(
                self.objective.hiding.validated,
                None,
                images,
                epsilon,
                batch,
                self.device,
                team=self.team,
            )
            quality = replace(quality, masked=behind.clean)
        return quality

    def _enclosed(self, enclosure: LocalEnclosure, images: Images) -> float | None:
        """Return the share of a few images with positive margins, by the estimated enclosure."""
        sketch = enclosure.directions(torch.Generator().manual_seed(0), JUDGES)
        epsilon = self.settings.epsilon
        few = images.limit(ENCLOSED, self.settings.seed)
        return evaluate(
            self.model,
            None,
            few,
            epsilon,
            AT_ONCE,
            self.device,
            lambda pixels, labels: enclosure.gains(pixels, epsilon, sketch)(labels),
            self.team,
        ).certified

    def last_net(self) -> dict[str, Stored]:
        """Return the present weights, or their average where there is one."""
        if self.average is None:
            return self._net_state()
        with self.average.applied(self.model.net, self.orthogonal):
            return self._net_state()

    def whole(self, net: Mapping[str, Stored]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors; sharded ones gathered in the leader, mapped (`Spool`)."""
        return shards.whole(net, self.team, Spool().keep)

    def plan(self, train: Images, validation: Images, budget: float, around: Costs) -> Costs:
        """Turn a time budget into `settings.steps` and, where time is short and none is given,
        `validation_limit`.

        It measures a few steps and a little validation, and restores the state before them.

        Args:
            budget: seconds left.
            around: seconds of saving, bound and certificate.

        Returns:
            These, with the seconds of a step and of validating an image.
        """
        started = time.perf_counter()
        before = copy.deepcopy(self.state())
        size = self.settings.batch_size * self.settings.accumulate
        parts = torch.randperm(len(train), generator=self.generator).split(size)
        self.model.train()
        step_seconds = measure_steps(
            lambda: self._learn(train, parts[self.step % len(parts)], 0.0), budget
        )
        self.model.eval()
        sample = validation.limit(256)
        self.evaluate(sample)
        clock = time.perf_counter()
        self.evaluate(sample)
        image_seconds = (time.perf_counter() - clock) / len(sample)
        self.restore(before)
        costs = replace(around, step=step_seconds, image=image_seconds)
        affordable = affordable_steps(
            budget - (time.perf_counter() - started), costs, self.batches(train), len(validation)
        )
        limit = self.settings.validation_limit or affordable.validation_limit
        self.settings = replace(self.settings, steps=affordable.steps, validation_limit=limit)
        return costs

    def takes(self, train: Images, validation: Images) -> str:
        """Measure a few steps and validations, restore the state, return the run's seconds."""
        before = copy.deepcopy(self.state())
        size = self.settings.batch_size * self.settings.accumulate
        parts = torch.randperm(len(train), generator=self.generator).split(size)
        self.model.train()
        started = time.perf_counter()
        for positions in parts[:SAID_STEPS]:
            warm = time.perf_counter()  # the first step is slower: the clock of the last one counts
            self._learn(train, positions, 0.0)
        step = time.perf_counter() - warm
        self.model.eval()
        sample = validation.limit(SAID_IMAGES)
        started = time.perf_counter()
        self.evaluate(sample)
        image = (time.perf_counter() - started) / len(sample)
        self.restore(before)
        steps = self.total_steps(train)
        epochs = -(-steps // self.batches(train))
        judged = len(validation.limit(self.settings.validation_limit, self.settings.seed))
        seconds = steps * step + epochs * judged * image
        about = f"{seconds / 60:.0f} min" if seconds >= 100 else f"{max(1, round(seconds))} s"
        return f"this takes about {about}: {steps} steps of {step:.2g} s, {epochs} epochs"

    def change_plan(self, train: Images, steps: int) -> None:
        """Make `steps` those of the whole run; the schedule goes on from where it is."""
        self.changes.append((self.step, self.total_steps(train)))
        self.settings = replace(self.settings, steps=steps)

    def _net_state(self) -> dict[str, Stored]:
        return {
            name: shards.stored_copy(value) for name, value in self.model.net.state_dict().items()
        }

    def state(self) -> TrainingState:
        """Return everything that the next epoch depends on."""
        parts: dict[str, dict[str, Any]] = {**self.descent.state()}
        optimisers = [optimiser.state_dict() for optimiser in self.optimisers]
        if self.shares is not None:
            optimisers = [self.shares.stored(optimiser) for optimiser in optimisers]
        if self.average is not None:
            parts["average"] = self.average.state()
        return TrainingState(
            identity=self.identity,
            epoch=self.epoch,
            step=self.step,
            best=self.best,
            best_epoch=self.best_epoch,
            steps=self.settings.steps,
            validation_limit=self.settings.validation_limit,
            changes=list(self.changes),
            net=self._net_state(),
            best_net=self.best_net,
            optimisers=optimisers,
            vectors={name: value.detach().cpu() for name, value in self.arithmetic.vectors.items()},
            generator=self.generator.get_state(),
            parts=parts,
        )

    def restore(self, state: TrainingState) -> None:
        """Continue after `state`, bit for bit on a CPU. CheckpointError: another network's."""
        current = self.model.net.state_dict()
        try:
            self.settings = replace(
                self.settings, steps=state.steps, validation_limit=state.validation_limit
            )
            self.epoch, self.step, self.changes = state.epoch, state.step, list(state.changes)
            best = {
                name: shards.stored_as(value, state.best_net[name], self.team)
                for name, value in current.items()
            }
            self.best, self.best_epoch, self.best_net = state.best, state.best_epoch, best
            for name, value in current.items():
                shards.put(value, state.net[name], self.team)
            for optimiser, stored in zip(self.optimisers, state.optimisers, strict=True):
                optimiser.load_state_dict(
                    stored if self.shares is None else self.shares.own_of(stored)
                )
            self.arithmetic.vectors = {
                name: value.to(self.device) for name, value in state.vectors.items()
            }
            self.generator.set_state(state.generator)
            self.descent.load(state.parts)
            if self.average is not None:
                self.average.load(state.parts["average"], self.team)
        except (KeyError, RuntimeError, TypeError, ValueError) as failure:
            raise CheckpointError(
                f"the state does not fit this run ({one_line(failure)})", "drop --resume"
            ) from failure
