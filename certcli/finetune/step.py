"""An optimiser step: the gradient of batches, sharpened, clipped, applied; then the projection."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from certcli.finetune.losses import NEEDS_CHAIN
from certcli.finetune.objective import Batch, Objective
from certcli.finetune.penalties import SpectralPenalty
from certcli.finetune.projections import WeightProjection
from certcli.finetune.sam import climbed, length_of
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.shards import Shares
from certcli.images.labelled import Images
from certcli.models.pixels import PixelModel
from certcli.system.errors import CertvitError
from certcli.system.processes import ALONE, Team
from certcli.system.products import fast_products
from certcli.system.seeds import seed_all

_APART = 0x9E3779B97F4A7C15
"""Difference of the seeds of two processes: far more than the number of steps."""

START = 0.2
"""Share of the radius at which the ramp begins. Losses through a chain begin at 0 with cross entropy, as published."""


class Diverged(CertvitError):
    """The loss or the weights became NaN or infinite; the best weights before that are kept."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "the best weights so far are kept; try a smaller --lr, a longer --warmup, or --clip-grad 1",
        )


class Descent:
    """Change the weights by the gradient of the loss at given images.

    Each of several processes takes its part of every batch. Their gradients are added, and all make
    the same step.

    Args:
        pairs: gives the trainable pair constants; called once a gradient, for all its batches.
        shares: this process's rows of sharded weights; each process steps its own.
    """

    def __init__(
        self,
        model: PixelModel,
        settings: FinetuneSettings,
        objective: Objective,
        optimisers: list[torch.optim.Optimizer],
        pairs: Callable[[], Tensor | None],
        team: Team = ALONE,
        shares: Shares | None = None,
    ) -> None:
        self.settings = settings
        self.objective = objective
        self.team = team
        self.shares = shares
        self.optimisers = optimisers
        self.pairs = pairs
        self.parameters = [
            p for group in optimisers for part in group.param_groups for p in part["params"]
        ]
        self.scaler = torch.amp.GradScaler("cuda", enabled=settings.precision == "fp16")
        self.penalty = None if settings.msvp is None else SpectralPenalty(model.net, settings.msvp)
        self.projection = (
            None if settings.project is None else WeightProjection(model.net, settings)
        )

    def step(
        self, train: Images, positions: Tensor, share: float, where: str, number: int
    ) -> float:
        """Make step `number` at a share of the training, and return the mean loss before it.

        Dropout draws from global generators. Inside, they depend on seed, step and process alone,
        so that a run can resume.

        Args:
            where: names the step in an error.

        Raises:
            Diverged: the loss is not finite.
        """
        with fast_products(self.objective.model):
            return self._step(train, positions, share, where, number)

    def _step(
        self, train: Images, positions: Tensor, share: float, where: str, number: int
    ) -> float:
        settings = self.settings
        device = self.objective.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_all((settings.seed * 1_000_003 + number + self.team.rank * _APART) % 2**63)
            # the run's own generator orders the images, the same in all processes
            if self.team.several:
                self.objective.generator.manual_seed(torch.initial_seed())
            start = 0.0 if settings.loss in NEEDS_CHAIN else START
            ramp = (
                1.0 if settings.ramp == 0 else min(1.0, start + (1 - start) * share / settings.ramp)
            )
            epsilon = settings.epsilon * ramp
            batches = []
            for part in positions.split(settings.batch_size):
                local_part, weight = self._own(part)
                batches.append(
                    (
                        self.objective.prepare(train, local_part, share),
                        weight * len(part) / len(positions),
                    )
                )
            loss = self._gradient(batches, epsilon, where)
            if settings.sam > 0:
                length = length_of if self.shares is None else self.shares.length
                with climbed(self.parameters, settings.sam, settings.adaptive_sam, length):
                    self._gradient(batches, epsilon, where)
        if settings.clip_grad is not None:
            for optimiser in self.optimisers:
                self.scaler.unscale_(optimiser)
            if self.shares is None:
                torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip_grad)
            else:
                self.shares.clip(settings.clip_grad)
        for optimiser in self.optimisers:
            self.scaler.step(optimiser)
        self.scaler.update()
        if self.projection is not None:
            self.projection.after_step()
        return loss

    def expect(self, train: Images, *steps: Tensor) -> None:
        """Let the files of this step's images and of the following steps' be read ahead."""
        parts = [part for positions in steps for part in positions.split(self.settings.batch_size)]
        train.expect([position for part in parts for position in self._own(part)[0].tolist()])

    def _own(self, part: Tensor) -> tuple[Tensor, float]:
        """Return this process's images of a batch, and their weight; where too few, all."""
        size = self.team.size
        local_part = part.tensor_split(size)[self.team.rank] if len(part) >= size else part
        return local_part, len(local_part) / len(part) if len(part) >= size else 1 / size

    def _gradient(self, batches: list[tuple[Batch, float]], epsilon: float, where: str) -> float:
        """Set every `.grad` to that of the mean loss over all processes; return the mean."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        if self.shares is not None:
            self.shares.forget()
        if len(batches) == 1 and not self.team.several:
            loss = self.objective.value(batches[0][0], self.pairs, epsilon)
            if self.penalty is not None:
                loss = loss + self.penalty()
            return self._backward(loss, where)
        # walk the bound's graph once: the batches add up the gradient of its value, which then goes
        # through it
        pairs = self.pairs()
        leaf = None if pairs is None else pairs.detach().requires_grad_(True)
        total = 0.0
        for batch, weight in batches:
            loss = self.objective.value(batch, lambda: leaf, epsilon)
            total += self._backward(loss * weight, where)
        if pairs is not None and leaf is not None and leaf.grad is not None:
            pairs.backward(leaf.grad)
        if self.penalty is not None:  # it reads the weights alone: each process adds its share
            total += self._backward(self.penalty() / self.team.size, where)
        if not self.team.several:
            return total
        added = torch.tensor(total, dtype=torch.float64)
        if self.shares is None:
            self.team.add_up([added, *(p.grad for p in self.parameters if p.grad is not None)])
        else:
            self.team.add_up([added])
            self.shares.collect()
        _require_finite(float(added), where)  # here, where all processes see it
        return float(added)

    def _backward(self, loss: Tensor, where: str) -> float:
        """Add the gradient of the loss to every `.grad`, and return the loss."""
        value = float(loss.detach())
        if not self.team.several:
            _require_finite(value, where)
        if self.shares is not None:
            loss = loss * self.team.size  # the backward pass takes the mean over the processes
        self.scaler.scale(loss).backward()
        return value

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the penalty's and the projection's vectors, and half precision's scale."""
        parts = {name: dict(part.vectors) for name, part in self._remembering()}
        if self.scaler.is_enabled():
            parts["scaler"] = {
                name: torch.tensor(value) for name, value in self.scaler.state_dict().items()
            }
        return parts

    def load(self, parts: dict[str, dict[str, Tensor]]) -> None:
        for name, part in self._remembering():
            part.vectors = {path: value.clone() for path, value in parts[name].items()}
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(
                {name: value.item() for name, value in parts["scaler"].items()}
            )

    def _remembering(self) -> list[tuple[str, SpectralPenalty | WeightProjection]]:
        named = (("penalty", self.penalty), ("projection", self.projection))
        return [(name, part) for name, part in named if part is not None]


def _require_finite(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the loss became {loss} at {where}")
