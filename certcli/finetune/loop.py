"""The training loop: a generator of records, resumable after every epoch, the best weights by validation kept.

What the records call an estimate is one: pair constants by power iteration, which approaches norms from below. Proven
numbers are computed once, at the end, by the caller.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.data import Images
from certcli.errors import CertvitError, DataError, NoBoundError
from certcli.finetune.losses import LOSSES, NEEDS_BOUND
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.state import TrainingState
from certcli.finetune.stiefel import StiefelMuon, orthogonal_parameters, orthogonalise, retract
from certcli.lipschitz.arithmetic import TrainableArithmetic
from certcli.lipschitz.propagate import pair_constants, propagate, trace_network
from certcli.lipschitz.rules.table import NoRule
from certcli.lipschitz.trace import Trace, Untraceable
from certcli.models import PixelModel

SCALAR_RATE = 10.0
"""Learning rate of residual weights, relative to --lr."""


class Diverged(CertvitError):
    """The loss became NaN or infinite; the last good weights are kept."""

    code = 1


@dataclass(frozen=True)
class Epoch:
    """One epoch: mean training loss, validation clean accuracy, and the share certified *by the estimate*."""

    epoch: int
    step: int
    loss: float
    clean: float
    certified_estimate: float | None
    lr: float
    images_per_second: float
    norm_estimate: float | None
    best: bool


def identity(parent_digest: str, settings: FinetuneSettings, dataset: str) -> str:
    """What a resumed run must have in common with the one it goes on with."""
    text = json.dumps([parent_digest, settings.parameters(), settings.seed, dataset], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


class Trainer:
    """Owns the model while it learns. `run` yields an `Epoch` after each, `state` is what `--resume` needs."""

    def __init__(self, model: PixelModel, settings: FinetuneSettings, classes: int, run_identity: str) -> None:
        self.model, self.settings, self.classes = model, settings, classes
        self.device = next(model.parameters()).device
        self.identity = run_identity
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.best, self.best_epoch = -1.0, -1
        self.epoch = self.step = 0
        model.eval()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        orthogonal: list[torch.nn.Parameter] = []
        if settings.optimiser == "stiefel":
            orthogonalise(model.net)
            orthogonal = orthogonal_parameters(model.net)
        self.orthogonal = orthogonal
        self.arithmetic = TrainableArithmetic(self.device, orthogonal=frozenset(map(id, orthogonal)))
        self.trace = self._trace() if settings.loss in NEEDS_BOUND else None
        self.optimisers = self._make_optimisers(orthogonal)
        self.base_rates = [[group["lr"] for group in optimiser.param_groups] for optimiser in self.optimisers]
        self.best_net = self._net_state()

    def _trace(self) -> Trace:
        try:
            traced = trace_network(self.model, self.model.input_size)
            propagate(traced, TrainableArithmetic(self.device))
        except (NoRule, Untraceable) as reason:
            raise NoBoundError(
                f"the loss '{self.settings.loss}' needs a bound and there is none: {reason}",
                "adapt the network first (`certvit adapt`), or train with --loss ce",
            ) from reason
        return traced

    def _make_optimisers(self, orthogonal: list[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
        held = set(map(id, orthogonal))
        free = [p for p in self.model.parameters() if p.requires_grad and id(p) not in held]
        settings = self.settings
        if settings.optimiser == "sgd":
            return [torch.optim.SGD(free, lr=settings.lr, momentum=0.9, weight_decay=settings.weight_decay)]
        if settings.optimiser == "adamw":
            return [torch.optim.AdamW(free, lr=settings.lr, weight_decay=settings.weight_decay)]
        # the free part (biases, residual weights, head) carries the network's scale: decay would fight the margin
        # residual weights enter the bound as products over all blocks: they must move as fast as the margin does
        groups = [
            {"params": [p for p in free if p.dim() > 0], "lr": settings.lr},
            {"params": [p for p in free if p.dim() == 0], "lr": SCALAR_RATE * settings.lr},
        ]
        adam = torch.optim.Adam([group for group in groups if group["params"]])
        return [adam, StiefelMuon(orthogonal, lr=settings.stiefel_lr)]

    def pairs(self) -> Tensor | None:
        """Estimated pair constants (k, k), with gradient; None for losses that need none."""
        if self.trace is None:
            return None
        return pair_constants(propagate(self.trace, self.arithmetic), self.classes)

    def run(self, train: Images, validation: Images) -> Iterator[Epoch]:
        """Train to the end of the schedule. Diverged stops it with the last good weights still in `best_net`."""
        settings = self.settings
        batches = -(-len(train) // settings.batch_size)
        total = settings.epochs * batches
        loss_function: Callable[..., Tensor] = LOSSES.load(settings.loss)
        since_best = self.epoch - self.best_epoch
        while self.epoch < settings.epochs:
            started, losses = time.perf_counter(), 0.0
            self.model.train()
            for positions in torch.randperm(len(train), generator=self.generator).split(settings.batch_size):
                losses += self._learn(train, positions, loss_function, total)
            self.model.eval()
            self.epoch += 1
            if self.epoch == settings.epochs:
                with torch.no_grad():
                    for weight in self.orthogonal:
                        retract(weight, 6)  # to float precision: the proven norm is then 1 up to 1e-6
            elapsed = time.perf_counter() - started
            clean, certified, norm = self.evaluate(validation)
            score = clean if certified is None else certified
            improved = score >= self.best  # of equals the later one, which saw more of the schedule
            since_best = 0 if improved else since_best + 1
            if improved:
                self.best, self.best_epoch, self.best_net = score, self.epoch, self._net_state()
            yield Epoch(
                epoch=self.epoch,
                step=self.step,
                loss=losses / batches,
                clean=clean,
                certified_estimate=certified,
                lr=self.optimisers[0].param_groups[0]["lr"],
                images_per_second=len(train) / elapsed,
                norm_estimate=norm,
                best=improved,
            )
            if settings.patience is not None and since_best >= settings.patience:
                return

    def _learn(self, train: Images, positions: Tensor, loss_function: Callable[..., Tensor], total: int) -> float:
        settings = self.settings
        share = self.step / total
        self._set_rates(share)
        images = train.fetch(positions.tolist()).to(self.device)
        labels = train.labels[positions].to(self.device)
        if int(labels.max()) >= self.classes:
            raise DataError(f"label {int(labels.max())} is outside the network's {self.classes} classes")
        if settings.noise > 0:
            images = images + settings.noise * torch.randn(images.shape, generator=self.generator).to(images)
        ramp = 1.0 if settings.ramp == 0 else min(1.0, 0.2 + 0.8 * share / settings.ramp)
        loss = loss_function(
            self.model(images), labels, self.pairs(), settings.epsilon * ramp, settings.label_smoothing
        )
        if not torch.isfinite(loss):
            raise Diverged(
                f"the loss became {float(loss)} at step {self.step} (epoch {self.epoch + 1})",
                "the best weights so far are kept; try a smaller --lr, or a longer --warmup",
            )
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        self.step += 1
        return float(loss.detach())

    def _set_rates(self, share: float) -> None:
        """Linear warm-up, then a cosine to a thousandth; it must finish, certified accuracy comes in its last third."""
        warm = 1.0 if self.settings.warmup == 0 else min(1.0, share / self.settings.warmup + 1e-3)
        factor = max(1e-3, warm * 0.5 * (1 + math.cos(math.pi * share)))
        for optimiser, rates in zip(self.optimisers, self.base_rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    @torch.no_grad()
    def evaluate(self, images: Images) -> tuple[float, float | None, float | None]:
        """Clean accuracy, share certified at epsilon by the estimate, and the estimated constant of the logits."""
        pairs = self.pairs()
        right = robust = 0
        for _, pixels, labels in images.batches(max(self.settings.batch_size, 256)):
            logits = self.model(pixels.to(self.device)).double().cpu()
            own = logits.gather(1, labels.unsqueeze(1))
            right += int((logits.argmax(1) == labels).sum())
            if pairs is not None:
                needed = self.settings.epsilon * pairs.double().cpu()[labels]
                slack = (own - logits - needed).scatter(1, labels.unsqueeze(1), math.inf)
                robust += int((slack.amin(1) > 0).sum())
        count = len(images)
        if pairs is None:
            return right / count, None, None
        return right / count, robust / count, float(pairs.max())

    def _net_state(self) -> dict[str, Tensor]:
        return {name: value.detach().cpu().clone() for name, value in self.model.net.state_dict().items()}

    def state(self) -> TrainingState:
        """Everything the next epoch depends on."""
        return TrainingState(
            identity=self.identity,
            epoch=self.epoch,
            step=self.step,
            best=self.best,
            best_epoch=self.best_epoch,
            net=self._net_state(),
            best_net=self.best_net,
            optimisers=[optimiser.state_dict() for optimiser in self.optimisers],
            vectors={name: value.detach().cpu() for name, value in self.arithmetic.vectors.items()},
            generator=self.generator.get_state(),
        )

    def restore(self, state: TrainingState) -> None:
        """Go on after `state`, bit for bit on a CPU."""
        self.epoch, self.step = state.epoch, state.step
        self.best, self.best_epoch, self.best_net = state.best, state.best_epoch, state.best_net
        with torch.no_grad():
            for name, value in self.model.net.state_dict().items():
                value.copy_(state.net[name])
        for optimiser, stored in zip(self.optimisers, state.optimisers, strict=True):
            optimiser.load_state_dict(stored)
        self.arithmetic.vectors = {name: value.to(self.device) for name, value in state.vectors.items()}
        self.generator.set_state(state.generator)
