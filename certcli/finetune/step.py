"""An optimiser step: the gradient of a batch, sharpened, clipped, applied at the rate of the
schedule; and a moving average of the weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from certcli.finetune.losses import NEEDS_CHAIN
from certcli.finetune.objective import Batch, Objective
from certcli.finetune.option_texts import rate_curve
from certcli.finetune.penalties import SpectralPenalty
from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.stiefel import StiefelMuon, retract
from certcli.images.labelled import Images
from certcli.models.pixels import PixelModel
from certcli.system.errors import CertvitError, raise_if
from certcli.system.processes import ALONE, Team
from certcli.system.torch_modes import fast_products, seed_all

SCALAR_RATE = 10.0
"""Learning rate of residual weights, relative to --lr."""


def make_optimisers(
    parameters: Iterable[Tensor], orthogonal: list[nn.Parameter], settings: FinetuneSettings
) -> list[torch.optim.Optimizer]:
    """Return AdamW or SGD; with `stiefel`, StiefelMuon for orthogonal matrices, Adam for others."""
    excluded = set(map(id, orthogonal))
    free = [p for p in parameters if p.requires_grad and id(p) not in excluded]
    if settings.optimiser == "sgd":
        return [
            torch.optim.SGD(free, lr=settings.lr, momentum=0.9, weight_decay=settings.weight_decay)
        ]
    if settings.optimiser == "adamw":
        return [torch.optim.AdamW(free, lr=settings.lr, weight_decay=settings.weight_decay)]
    # The free part (biases, residual weights, head) carries the network's scale: decay would fight
    # the margin. Residual weights enter the bound as products over all blocks: they must move as
    # fast as the margin does.
    groups = [
        {"params": [p for p in free if p.dim() > 0], "lr": settings.lr},
        {"params": [p for p in free if p.dim() == 0], "lr": SCALAR_RATE * settings.lr},
    ]
    adam = torch.optim.Adam([group for group in groups if group["params"]])
    return [adam, StiefelMuon(orthogonal, lr=settings.stiefel_lr)]


@contextmanager
def climbed(parameters: Sequence[Tensor], rho: float) -> Iterator[None]:
    """Move w to w + rho g / |g|_2 inside the block, g the parameters' gradients, and back to the
    same bits after it.

    Orthogonal matrices move in the ambient space. Source: Foret et al. 2021, eq. 2.
    """
    saved = [(parameter, parameter.detach().clone(), parameter.grad) for parameter in parameters]
    moving = [(parameter, w, gradient) for parameter, w, gradient in saved if gradient is not None]
    with torch.no_grad():
        length = torch.nn.utils.get_total_norm([gradient for _, _, gradient in moving])
        step = rho / float(length.clamp_min(1e-12))
        for parameter, _, gradient in moving:
            parameter.add_(gradient, alpha=step)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, w, _ in moving:
                parameter.copy_(w)


_RETRACTIONS = 12
"""Cubic steps from an average of orthogonal matrices (singular values in (0, 1]) back: from 0.05
they reach 1 - 1e-12."""


class Average(AveragedModel):
    """a <- d_n a + (1 - d_n) w after step n; d_n = min(decay, (1 + n) / (10 + n)) forgets the early
    steps.

    Buffers of integers are copied. An average of orthogonal matrices is not orthogonal: it is
    retracted where it is used, not where it is stored.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        def mixed(average: Tensor, value: Tensor, updates: Any) -> Tensor:
            share = min(decay, (1 + int(updates)) / (10 + int(updates)))
            return average.lerp(value, 1 - share) if value.is_floating_point() else value

        super().__init__(net, avg_fn=mixed, use_buffers=True)
        self.update_parameters(net)  # the first one copies

    @contextmanager
    def applied(self, net: nn.Module, orthogonal: Sequence[Tensor]) -> Iterator[None]:
        """Give `net` the average, `orthogonal` ones retracted, inside the block; its own after."""
        plain_weights = {name: value.detach().clone() for name, value in net.state_dict().items()}
        net.load_state_dict(self.module.state_dict())
        with torch.no_grad():
            for weight in orthogonal:
                retract(weight, _RETRACTIONS)
        try:
            yield
        finally:
            net.load_state_dict(plain_weights)


def of_shape(value: Tensor, stored: Tensor) -> Tensor:
    """Return `stored`; ValueError where its shape is not that of `value`."""
    message = f"{tuple(stored.shape)} is stored where {tuple(value.shape)} is expected"
    raise_if(stored.shape != value.shape, ValueError, message)
    return stored


_APART = 0x9E3779B97F4A7C15
"""Difference of the seeds of two processes: far more than the number of steps."""

START = 0.2
"""Share of the radius at which the ramp begins. Losses through a chain begin at 0 with cross
entropy, as published."""


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
    the same step. The learning rates of all groups rise linearly, then follow the schedule: a
    cosine must finish, because certified accuracy comes in its last third. Momentum stays.

    Args:
        pairs: gives the trainable pair constants; called once a gradient.
    """

    def __init__(
        self,
        model: PixelModel,
        settings: FinetuneSettings,
        objective: Objective,
        optimisers: list[torch.optim.Optimizer],
        pairs: Callable[[], Tensor | None],
        team: Team = ALONE,
    ) -> None:
        self.settings = settings
        self.objective = objective
        self.team = team
        self.optimisers = optimisers
        self.pairs = pairs
        groups = [each.param_groups for each in optimisers]
        self.parameters = [p for some in groups for group in some for p in group["params"]]
        self.rates = [[group["lr"] for group in some] for some in groups]
        self.curve = rate_curve(settings.schedule, settings.lr, settings.warmup)
        self.penalty = None if settings.msvp is None else SpectralPenalty(model.net, settings.msvp)

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
        settings = self.settings
        for optimiser, rates in zip(self.optimisers, self.rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * self.curve(share)
        device = self.objective.device
        forked = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with fast_products(self.objective.model), forked:
            seed_all((settings.seed * 1_000_003 + number + self.team.rank * _APART) % 2**63)
            # the run's own generator orders the images, the same in all processes
            if self.team.several:
                self.objective.generator.manual_seed(torch.initial_seed())
            start = 0.0 if settings.loss in NEEDS_CHAIN else START
            risen = 1.0 if settings.ramp == 0 else share / settings.ramp
            epsilon = settings.epsilon * min(1.0, start + (1 - start) * risen)
            local_part, weight = self._own(positions)
            batch = self.objective.prepare(train, local_part, share)
            loss = self._gradient(batch, weight, epsilon, where)
            if settings.sam > 0:
                with climbed(self.parameters, settings.sam):
                    self._gradient(batch, weight, epsilon, where)
        if settings.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip_grad)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss

    def expect(self, train: Images, *steps: Tensor) -> None:
        """Let the files of this step's images and of the following steps' be read ahead."""
        train.expect([position for part in steps for position in self._own(part)[0].tolist()])

    def _own(self, part: Tensor) -> tuple[Tensor, float]:
        """Return this process's images of a batch, and their weight; where too few, all."""
        size = self.team.size
        if len(part) < size:
            return part, 1 / size
        local_part = part.tensor_split(size)[self.team.rank]
        return local_part, len(local_part) / len(part)

    def _gradient(self, batch: Batch, weight: float, epsilon: float, where: str) -> float:
        """Set every `.grad` to that of the mean loss over all processes; return the mean."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss = self.objective.value(batch, self.pairs, epsilon) * weight
        if self.penalty is not None:  # it reads the weights alone: each process adds its share
            loss = loss + self.penalty() / self.team.size
        value = float(loss.detach())
        finite = math.isfinite(value) or self.team.several
        raise_if(not finite, Diverged, f"the loss became {value} at {where}")
        loss.backward()
        if self.team.several:
            added = torch.tensor(value, dtype=torch.float64)
            self.team.add_up([added, *(p.grad for p in self.parameters if p.grad is not None)])
            value = float(added)
        # here, where all processes see it
        raise_if(not math.isfinite(value), Diverged, f"the loss became {value} at {where}")
        return value

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the penalty's vectors."""
        return {} if self.penalty is None else {"penalty": dict(self.penalty.vectors)}
