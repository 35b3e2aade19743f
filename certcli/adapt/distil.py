"""End-to-end distillation: all parts together learn the old network's logits on varied calibration images."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from certcli.adapt.descend import JUDGED, make_optimiser, mixed_precision, state_of
from certcli.adapt.pixels import as_pixels, varied
from certcli.adapt.settings import AdaptSettings

_BATCH = 32
_WORSE, _SLOWER, _TRIES = 1.1, 0.25, 3


class Distiller:
    """An epoch at a time; the best epoch's weights are kept, so it never ends worse than it began.

    Adapted networks can be steep: an epoch that loses more than a tenth is repeated at a quarter of the rate.
    """

    def __init__(self, teacher: Any, student: Any, settings: AdaptSettings, images: Tensor) -> None:
        self.teacher, self.student, self.settings, self.images = teacher, student, settings, images
        self.batch_size = min(settings.batch_size, _BATCH)
        self.batches = -(-len(images) // self.batch_size)
        self.epoch = 0
        self.parameters = list(student.net.parameters())
        steps = settings.distill_epochs * self.batches
        self.optimiser, self.schedule = make_optimiser(self.parameters, settings.lr, steps)
        self.cast = mixed_precision(images.device, images[0].numel())
        self.best, (self.best_loss, _) = state_of(student.net), self.judge()

    def run(self) -> Iterator[float]:
        """The relative error of the logits on calibration images after each epoch that is left."""
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        while self.epoch < self.settings.distill_epochs:
            loss, error = self._pass()
            for _ in range(_TRIES):
                if loss < _WORSE * self.best_loss:
                    break
                self._take_back()
                loss, error = self._pass()
            self.epoch += 1
            if loss < self.best_loss:
                self.best, self.best_loss = state_of(self.student.net), loss
            if self.epoch == self.settings.distill_epochs:
                self.student.net.load_state_dict(self.best)
                _, error = self.judge()
            yield error
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def _pass(self) -> tuple[float, float]:
        """All images once; how the student then does."""
        generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + 20_000 + self.epoch)
        for positions in torch.randperm(len(self.images), generator=generator).split(self.batch_size):
            self._learn(varied(as_pixels(self.images[positions]), generator))
        return self.judge()

    def _learn(self, images: Tensor) -> None:
        with self.cast:
            with torch.no_grad():
                wanted = self.teacher(images).float()
            found = self.student(images).float()
        loss = _loss(found, wanted)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.schedule.step()

    def _take_back(self) -> None:
        self.student.net.load_state_dict(self.best)
        self.optimiser.state.clear()
        self._set_rates([float(rate) * _SLOWER for rate in self.schedule.base_lrs])

    def _set_rates(self, rates: list[float]) -> None:
        done = self.epoch * self.batches
        self.schedule.base_lrs, self.schedule.last_epoch = list(rates), done
        for group, rate in zip(self.optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * self.schedule.lr_lambdas[0](done)

    @torch.no_grad()
    def judge(self) -> tuple[float, float]:
        """The loss, and the relative error of the logits, on calibration images as they are."""
        loss = difference = size = 0.0
        for part in self.images[:JUDGED].split(self.settings.batch_size):
            pixels = as_pixels(part)
            with self.cast:
                wanted, found = self.teacher(pixels).double(), self.student(pixels).double()
            loss += float(_loss(found, wanted)) * len(part)
            difference += float((found - wanted).square().sum())
            size += float(wanted.square().sum())
        return loss, (difference / max(size, 1e-30)) ** 0.5

    def state(self) -> dict[str, Tensor]:
        """What the next epoch depends on, beside the student's weights."""
        tensors = {f"best.{name}": value for name, value in self.best.items()}
        tensors["rates"] = torch.tensor(self.schedule.base_lrs, dtype=torch.float64)
        tensors["best_loss"] = torch.tensor(self.best_loss, dtype=torch.float64)
        for index, parameter in enumerate(self.parameters):
            for name, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"adam.{index}.{name}"] = value.detach().clone()
        return tensors

    def restore(self, tensors: dict[str, Tensor], epoch: int) -> None:
        self.epoch = epoch
        self.best = {name.removeprefix("best."): value for name, value in tensors.items() if name.startswith("best.")}
        self.best_loss = float(tensors["best_loss"])
        self._set_rates(tensors["rates"].tolist())
        for index, parameter in enumerate(self.parameters):
            prefix = f"adam.{index}."
            found = {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
            if found:
                self.optimiser.state[parameter] = {
                    name: value if name == "step" else value.to(parameter.device) for name, value in found.items()
                }


def _loss(found: Tensor, wanted: Tensor) -> Tensor:
    return _divergence(found, wanted) + _distance(found, wanted)


def _divergence(found: Tensor, wanted: Tensor) -> Tensor:
    """KL(softmax(wanted) | softmax(found)), the mean over images."""
    return functional.kl_div(
        functional.log_softmax(found, dim=1),
        functional.log_softmax(wanted, dim=1),
        log_target=True,
        reduction="batchmean",
    )


def _distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Squared distance relative to the old logits' size: what the divergence does not see of unlikely classes."""
    return functional.mse_loss(found, wanted) / wanted.square().mean().clamp_min(1e-12)
