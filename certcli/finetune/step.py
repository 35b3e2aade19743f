"""One optimiser step: the gradient of one or several batches, made sharp, clipped, applied, projected."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from certcli.errors import CertvitError
from certcli.finetune.losses import CHAIN
from certcli.finetune.objective import Batch, Objective
from certcli.finetune.penalties import SpectralPenalty
from certcli.finetune.projections import WeightProjection
from certcli.finetune.sam import climbed
from certcli.finetune.settings import FinetuneSettings
from certcli.images import Images
from certcli.models import PixelModel

START = 0.2
"""Of the radius, where the ramp begins. Losses through a chain begin at 0 with cross entropy alone, as published."""


class Diverged(CertvitError):
    """The loss or the weights became NaN or infinite; the last good weights are kept."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(
            message, "the best weights so far are kept; try a smaller --lr, a longer --warmup, or --clip-grad 1"
        )


class Descent:
    """Everything between a list of image positions and changed weights.

    pairs() gives the trainable pair constants; it is called once a gradient, however many batches that gradient has.
    """

    def __init__(
        self,
        model: PixelModel,
        settings: FinetuneSettings,
        objective: Objective,
        optimisers: list[torch.optim.Optimizer],
        pairs: Callable[[], Tensor | None],
    ) -> None:
        self.model, self.settings, self.objective = model, settings, objective
        self.optimisers, self.pairs = optimisers, pairs
        self.parameters = [p for group in optimisers for part in group.param_groups for p in part["params"]]
        self.scaler = torch.amp.GradScaler("cuda", enabled=settings.precision == "fp16")
        weights, kind = settings.msvp, settings.project
        self.penalty = None if weights is None else SpectralPenalty(model.net, weights, per_head=True)
        self.projection = None if kind is None else WeightProjection(model.net, kind, settings.project_radius)

    def step(self, train: Images, positions: Tensor, share: float, where: str, number: int) -> float:
        """The mean loss at these images, whose gradient has then been followed. Diverged when it is not finite."""
        settings = self.settings
        with _own_randomness(settings.seed, number, self.objective.device):
            epsilon = settings.epsilon * _ramp(settings.ramp, share, 0.0 if settings.loss in CHAIN else START)
            batches = [self.objective.prepare(train, part, share) for part in positions.split(settings.batch_size)]
            loss = self._gradient(batches, epsilon, where)
            if settings.sam > 0:
                with climbed(self.parameters, settings.sam, settings.adaptive_sam):
                    self._gradient(batches, epsilon, where)
        if settings.clip_grad is not None:
            for optimiser in self.optimisers:
                self.scaler.unscale_(optimiser)
            torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip_grad)
        for optimiser in self.optimisers:
            self.scaler.step(optimiser)
        self.scaler.update()
        if self.projection is not None:
            self.projection.after_step()
        return loss

    def _gradient(self, batches: list[Batch], epsilon: float, where: str) -> float:
        """Fill every `.grad` with the gradient of the mean over all images; returns that mean."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        if len(batches) == 1:
            loss = self.objective.value(batches[0], self.pairs, epsilon)
            if self.penalty is not None:
                loss = loss + self.penalty()
            return self._backward(loss, where)
        # the bound's graph is walked once: batches add to the gradient of its value, which is then passed on
        pairs = self.pairs()
        leaf = None if pairs is None else pairs.detach().requires_grad_(True)
        count, total = sum(len(batch.labels) for batch in batches), 0.0
        for batch in batches:
            loss = self.objective.value(batch, lambda: leaf, epsilon)
            total += self._backward(loss * (len(batch.labels) / count), where)
        if pairs is not None and leaf is not None and leaf.grad is not None:
            pairs.backward(leaf.grad)
        return total if self.penalty is None else total + self._backward(self.penalty(), where)

    def _backward(self, loss: Tensor, where: str) -> float:
        if not torch.isfinite(loss):
            raise Diverged(f"the loss became {float(loss.detach())} at {where}")
        self.scaler.scale(loss).backward()
        return float(loss.detach())

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Vectors of the penalty and the projection, and the scale of half-precision gradients."""
        parts: dict[str, dict[str, Tensor]] = {}
        if self.penalty is not None:
            parts["penalty"] = self.penalty.state()
        if self.projection is not None:
            parts["projection"] = self.projection.state()
        if self.scaler.is_enabled():
            parts["scaler"] = {name: torch.tensor(value) for name, value in self.scaler.state_dict().items()}
        return parts

    def load(self, parts: dict[str, dict[str, Tensor]]) -> None:
        if self.penalty is not None:
            self.penalty.load(parts["penalty"])
        if self.projection is not None:
            self.projection.load(parts["projection"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict({name: value.item() for name, value in parts["scaler"].items()})


def _ramp(ramp: float, share: float, start: float) -> float:
    return 1.0 if ramp == 0 else min(1.0, start + (1 - start) * share / ramp)


@contextlib.contextmanager
def _own_randomness(seed: int, number: int, device: torch.device) -> Iterator[None]:
    """Dropout draws from global generators: inside the block they depend on seed and step alone, so a run can resume."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed((seed * 1_000_003 + number) % 2**63)
        yield
