"""The training loop: a generator of records that can resume after every epoch, and holds the best
weights by validation.

The records' estimates come from power iteration, which approaches norms from below. The caller
proves the bound at the end.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from certcli.checkpoint.schema import TrainingFields
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, Untraceable
from certcli.finetune.losses import NEEDS_CHAIN, NEEDS_PAIRS
from certcli.finetune.losses.bounds import ChainBound
from certcli.finetune.objective import Objective, Teacher
from certcli.finetune.option_texts import share_done
from certcli.finetune.penalties import RAMP
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.state import TrainingState, optimiser_parts
from certcli.finetune.step import Average, Descent, Diverged, make_optimisers, of_shape
from certcli.finetune.stiefel import orthogonal_parameters, orthogonalise, retract
from certcli.finetune.validation import Quality, Validation, enclosure_of
from certcli.images.labelled import Images
from certcli.lipschitz.network import pair_constants, propagate, trace_network
from certcli.lipschitz.numerics.trainable import TrainableArithmetic
from certcli.models.pixels import PixelModel
from certcli.system.errors import (
    CheckpointError,
    DataError,
    NoBoundError,
    one_line,
    raise_if,
)
from certcli.system.processes import ALONE, Team
from certcli.system.torch_modes import fast_products

AVERAGE_ITERATIONS = 10
"""Power iterations, once an epoch, from the singular vectors of the weights in training to those of
their average."""

RETRACTIONS = 6
"""Cubic steps after an epoch, to float precision: the estimate counts these norms as 1, and any
epoch may be the best."""


@dataclass(frozen=True, kw_only=True)
class Epoch(Quality):
    """One epoch: its mean training loss, and the quality of the weights at its end."""

    epoch: int
    step: int
    loss: float
    lr: float
    images_per_second: float
    best: bool


def require_labels(images: Images, classes: int) -> None:
    """Raise DataError where a label is outside the classes 0 to `classes` - 1."""
    labels = images.labels
    outside = labels[(labels < 0) | (labels >= classes)].tolist()
    raise_if(
        outside,
        DataError,
        f"label {min(outside, default=0)} of {images.name} ({images.split}) is outside the network's "
        f"{classes} classes",
        "use the dataset that the network was made for",
    )


class Trainer:
    """Train a model: `run` yields an `Epoch` after each, `state` and `restore` serve `--resume`.

    Args:
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
        for parameter in model.parameters():
            parameter.requires_grad_(True)
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
        self.optimisers = make_optimisers(model.parameters(), self.orthogonal, settings)
        chain: ChainBound | None = None
        if settings.loss in NEEDS_CHAIN:
            drop = settings.loss != "bcp"
            chain = ChainBound(model, lambda: self.arithmetic, drop=drop)
        enclosure = enclosure_of(model, settings)
        # the run's own generator draws the order of the images, the same in all processes
        draws = torch.Generator() if team.several else self.generator
        self.objective = Objective(model, settings, draws, teacher, chain, denoiser, enclosure)
        self.descent = Descent(model, settings, self.objective, self.optimisers, self.pairs, team)
        self.average = Average(model.net, settings.ema) if settings.ema > 0 else None
        self.validation = Validation(self.objective, enclosure, team)
        self.best_net = self._net_state()

    def _arithmetic(self, iterations: int = 1) -> TrainableArithmetic:
        orthogonal = frozenset(map(id, self.orthogonal))
        return TrainableArithmetic(self.device, iterations=iterations, orthogonal=orthogonal)

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
        return -(-len(train) // self.settings.batch_size)

    def run(
        self,
        train: Images,
        validation: Images,
        watch: Callable[[int, float], None] = lambda step, loss: None,
    ) -> Iterator[Epoch]:
        """Train to the end of the schedule.

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
            require_labels(images, self.classes)
        validation = validation.limit(settings.validation_limit, settings.seed)
        while self.step < (total := self.total_steps(train)):
            started = time.perf_counter()
            losses = 0.0
            count = 0
            before = self.step
            self.model.train()
            self.team.copy_from_leader(list(self.model.net.state_dict().values()))
            order = torch.randperm(len(train), generator=self.generator)
            steps = order.split(settings.batch_size)[: total - self.step]
            for number, positions in enumerate(steps):
                self.descent.expect(train, *steps[number : number + 2])
                losses += self.learn(train, positions, share_done(self.step, total, self.changes))
                count += len(positions)
                watch(self.step, losses / (self.step - before))
            self.model.eval()
            self.epoch += 1
            with torch.no_grad():
                for weight in self.orthogonal:
                    retract(weight, RETRACTIONS)
            for name, value in self.model.net.state_dict().items():
                finite = not value.is_floating_point() or bool(torch.isfinite(value).all())
                message = f"the weights '{name}' became NaN or infinite by step {self.step}"
                raise_if(not finite, Diverged, message)
            elapsed = time.perf_counter() - started
            penalised = settings.enclosure_penalty is not None  # its weight is still on its way up
            rising = penalised and share_done(self.step, total, self.changes) <= RAMP
            quality, net = self.evaluate(validation, encloses=not rising)
            top = max(self.best, quality.score)
            improved = quality.score >= top - self.validation.tolerance(top, validation)
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
                lr=self.optimisers[0].param_groups[0]["lr"],
                images_per_second=count / elapsed,
                best=improved,
                **vars(quality),
            )

    def learn(self, train: Images, positions: Tensor, share: float) -> float:
        """Make one optimiser step at a share of the schedule, and return its loss."""
        where = f"step {self.step} (epoch {self.epoch + 1})"
        loss = self.descent.step(train, positions, share, where, self.step)
        if self.average is not None:
            self.average.update_parameters(self.model.net)
        self.step += 1
        return loss

    def evaluate(self, images: Images, encloses: bool = True) -> tuple[Quality, dict[str, Tensor]]:
        """Return the quality of the weights that would be written (the average, where there is
        one), and these weights.

        Args:
            encloses: judge runs for local certificates by an enclosure, too.
        """
        live = self.arithmetic
        with torch.no_grad(), fast_products(self.model), self._averaged():
            if self.average is not None:
                self.arithmetic = self._arithmetic(AVERAGE_ITERATIONS)
                self.arithmetic.vectors = dict(live.vectors)
            try:
                return self.validation.quality(images, self.pairs(), encloses), self._net_state()
            finally:
                self.arithmetic = live

    def _averaged(self) -> AbstractContextManager[None]:
        """Let the network have the average of its weights, where there is one."""
        if self.average is None:
            return nullcontext()
        return self.average.applied(self.model.net, self.orthogonal)

    def last_net(self) -> dict[str, Tensor]:
        """Return the present weights, or their average where there is one."""
        with self._averaged():
            return self._net_state()

    def change_plan(self, train: Images, steps: int) -> None:
        """Make `steps` those of the whole run; the schedule goes on from where it is."""
        self.changes.append((self.step, self.total_steps(train)))
        self.settings = replace(self.settings, steps=steps)

    def _net_state(self) -> dict[str, Tensor]:
        return {
            name: value.detach().cpu().clone()
            for name, value in self.model.net.state_dict().items()
        }

    def state(self) -> TrainingState:
        """Return everything that the next epoch depends on."""
        parts = self.descent.state()
        if self.average is not None:
            parts["average"] = dict(self.average.state_dict())
        structure, tensors = optimiser_parts(self.optimisers)
        tensors["generator"] = self.generator.get_state()
        groups = {
            "net": self._net_state(),
            "best": self.best_net,
            "vector": {key: value.detach().cpu() for key, value in self.arithmetic.vectors.items()},
            **{f"part.{name}": values for name, values in parts.items()},
        }
        for prefix, values in groups.items():
            tensors |= {f"{prefix}.{name}": value for name, value in values.items()}
        about = TrainingFields(
            identity=self.identity,
            epoch=self.epoch,
            step=self.step,
            best=self.best,
            best_epoch=self.best_epoch,
            steps=self.settings.steps,
            validation_limit=self.settings.validation_limit,
            changes=list(self.changes),
            optimisers=structure,
            parts=sorted(parts),
            digest="",
        )
        return TrainingState(about, tensors)

    def restore(self, state: TrainingState) -> None:
        """Continue after `state`, bit for bit on a CPU. CheckpointError: another network's."""
        about = state.about
        try:
            self.settings = replace(
                self.settings, steps=about.steps, validation_limit=about.validation_limit
            )
            self.epoch, self.step, self.changes = about.epoch, about.step, list(about.changes)
            self.best = about.best
            self.best_epoch = about.best_epoch
            best = state.under("best.")
            net = state.under("net.")
            for name, value in self.model.net.state_dict().items():
                self.best_net[name] = of_shape(value, best[name])
                value.copy_(of_shape(value, net[name]))
            for number, optimiser in enumerate(self.optimisers):
                optimiser.load_state_dict(state.optimiser(number))
            self.arithmetic.vectors = {
                name: value.to(self.device) for name, value in state.under("vector.").items()
            }
            self.generator.set_state(state.tensors["generator"].to(torch.uint8))
            if self.descent.penalty is not None:
                self.descent.penalty.vectors = state.under("part.penalty.")
            if self.average is not None:
                self.average.load_state_dict(state.under("part.average."))
        except (LookupError, RuntimeError, TypeError, ValueError) as failure:
            raise CheckpointError(
                f"the state does not fit this run ({one_line(failure)})", "drop --resume"
            ) from failure
