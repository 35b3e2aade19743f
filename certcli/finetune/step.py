"""One optimiser step: the gradient of one or several batches, made sharp, clipped, applied, projected."""

import contextlib
import math
from collections.abc import Callable, Iterator

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
from certcli.models.build import PixelModel
from certcli.system.errors import CertvitError
from certcli.system.processes import ALONE, Team

_APART = 0x9E3779B97F4A7C15
"""Between the seeds of two processes: far more than there are steps."""

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

    pairs() gives the trainable pair constants; it is called once a gradient, however many batches that gradient has. Of
    several processes each takes its part of every batch; the gradients are added, and all make the same step.
    shares: of weights that are shared out among them; each makes the step of its own rows.
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
        self.model, self.settings, self.objective, self.team = model, settings, objective, team
        self.shares = shares
        self.optimisers, self.pairs = optimisers, pairs
        self.parameters = [p for group in optimisers for part in group.param_groups for p in part["params"]]
        self.scaler = torch.amp.GradScaler("cuda", enabled=settings.precision == "fp16")
        weights, kind = settings.msvp, settings.project
        self.penalty = None if weights is None else SpectralPenalty(model.net, weights, per_head=True)
        self.projection = None if kind is None else WeightProjection(model.net, kind, settings.project_radius)

    def step(self, train: Images, positions: Tensor, share: float, where: str, number: int) -> float:
        """The mean loss at these images, whose gradient has then been followed. Diverged when it is not finite."""
        settings = self.settings
        with _own_randomness(settings.seed, number, self.objective.device, self.team):
            if self.team.several:  # the run's own generator orders the images, the same in all processes
                self.objective.generator.manual_seed(torch.initial_seed())
            epsilon = settings.epsilon * _ramp(settings.ramp, share, 0.0 if settings.loss in NEEDS_CHAIN else START)
            batches = []
            for part in positions.split(settings.batch_size):
                own, weight = self._own(part)
                batches.append((self.objective.prepare(train, own, share), weight * len(part) / len(positions)))
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
        """The positions of this step and of those that follow: their files are read meanwhile."""
        parts = [part for positions in steps for part in positions.split(self.settings.batch_size)]
        train.expect([position for part in parts for position in self._own(part)[0].tolist()])

    def _own(self, part: Tensor) -> tuple[Tensor, float]:
        """This process's images of a batch, and their weight in it; of too few images for all each takes all."""
        size = self.team.size
        own = part.tensor_split(size)[self.team.rank] if len(part) >= size else part
        return own, len(own) / len(part) if len(part) >= size else 1 / size

    def _gradient(self, batches: list[tuple[Batch, float]], epsilon: float, where: str) -> float:
        """Fill every `.grad` with the gradient of the mean over all images of all processes; returns that mean."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        if self.shares is not None:
            self.shares.forget()
        if len(batches) == 1 and not self.team.several:
            loss = self.objective.value(batches[0][0], self.pairs, epsilon)
            if self.penalty is not None:
                loss = loss + self.penalty()
            return self._backward(loss, where)
        # the bound's graph is walked once: batches add to the gradient of its value, which is then passed on
        pairs = self.pairs()
        leaf = None if pairs is None else pairs.detach().requires_grad_(True)
        total = 0.0
        for batch, weight in batches:
            loss = self.objective.value(batch, lambda: leaf, epsilon)
            total += self._backward(loss * weight, where)
        if pairs is not None and leaf is not None and leaf.grad is not None:
            pairs.backward(leaf.grad)
        if self.penalty is not None:  # of the weights alone: each process gives its share of it
            total += self._backward(self.penalty() / self.team.size, where)
        return self._added(total, where) if self.team.several else total

    def _added(self, loss: float, where: str) -> float:
        """Gradients and loss added up over the processes; all of them see whether that is finite."""
        total = torch.tensor(loss, dtype=torch.float64)
        if self.shares is None:
            self.team.add_up([total, *(p.grad for p in self.parameters if p.grad is not None)])
        else:
            self.team.add_up([total])
            self.shares.collect()
        _require_finite(float(total), where)
        return float(total)

    def _backward(self, loss: Tensor, where: str) -> float:
        value = float(loss.detach())
        if not self.team.several:
            _require_finite(value, where)
        if self.shares is not None:
            loss = loss * self.team.size  # what follows takes the mean over the processes
        self.scaler.scale(loss).backward()
        return value

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


def _require_finite(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the loss became {loss} at {where}")


def _ramp(ramp: float, share: float, start: float) -> float:
    return 1.0 if ramp == 0 else min(1.0, start + (1 - start) * share / ramp)


@contextlib.contextmanager
def _own_randomness(seed: int, number: int, device: torch.device, team: Team) -> Iterator[None]:
    """Dropout draws from global generators: inside the block they depend on seed, step and process alone, so a run can
    resume.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed((seed * 1_000_003 + number + team.rank * _APART) % 2**63)
        yield
