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


class Distiller:
    """An epoch at a time; at the end the weights before it come back where they were closer to the old logits."""

    def __init__(self, teacher: Any, student: Any, settings: AdaptSettings, images: Tensor) -> None:
        self.teacher, self.student, self.settings, self.images = teacher, student, settings, images
        self.batch_size = min(settings.batch_size, _BATCH)
        self.epoch = 0
        self.parameters = [p for p in student.net.parameters() if p.is_floating_point()]
        self.steps = settings.distill_epochs * -(-len(images) // self.batch_size)
        self.optimiser, self.schedule = make_optimiser(self.parameters, settings.lr, self.steps)
        self.before = state_of(student.net)
        self.cast = mixed_precision(images.device, images[0].numel())

    def run(self) -> Iterator[float]:
        """The relative error of the logits on the calibration images after each epoch that is left."""
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        while self.epoch < self.settings.distill_epochs:
            generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + 20_000 + self.epoch)
            for positions in torch.randperm(len(self.images), generator=generator).split(self.batch_size):
                self._learn(varied(as_pixels(self.images[positions]), generator))
            self.epoch += 1
            if self.epoch == self.settings.distill_epochs:
                self._choose()
            yield self.error()
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def _learn(self, images: Tensor) -> None:
        with self.cast:
            with torch.no_grad():
                wanted = self.teacher(images).float()
            found = self.student(images).float()
        loss = _divergence(found, wanted) + _distance(found, wanted)
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.schedule.step()

    def _choose(self) -> None:
        after, found = self.error(), state_of(self.student.net)
        self.student.net.load_state_dict(self.before)
        if after < self.error():
            self.student.net.load_state_dict(found)

    @torch.no_grad()
    def error(self) -> float:
        difference = size = 0.0
        for part in self.images[:JUDGED].split(self.settings.batch_size):
            pixels = as_pixels(part)
            with self.cast:
                wanted, found = self.teacher(pixels).double(), self.student(pixels).double()
            difference += float((found - wanted).square().sum())
            size += float(wanted.square().sum())
        return (difference / max(size, 1e-30)) ** 0.5

    def state(self) -> dict[str, Tensor]:
        """What the next epoch depends on, beside the student's weights."""
        tensors = {f"before.{name}": value for name, value in self.before.items()}
        tensors["rates"] = torch.tensor(self.schedule.base_lrs, dtype=torch.float64)
        for index, parameter in enumerate(self.parameters):
            for name, value in self.optimiser.state[parameter].items():
                tensors[f"adam.{index}.{name}"] = value.detach().clone()
        return tensors

    def restore(self, tensors: dict[str, Tensor], epoch: int) -> None:
        self.epoch = epoch
        self.before = {n.removeprefix("before."): v for n, v in tensors.items() if n.startswith("before.")}
        for index, parameter in enumerate(self.parameters):
            prefix = f"adam.{index}."
            self.optimiser.state[parameter] = {
                name.removeprefix(prefix): value.to(parameter.device)
                if name.endswith(("exp_avg", "exp_avg_sq"))
                else value
                for name, value in tensors.items()
                if name.startswith(prefix)
            }
        done = epoch * -(-len(self.images) // self.batch_size)
        self.schedule.base_lrs, self.schedule.last_epoch = tensors["rates"].tolist(), done
        for group, rate in zip(self.optimiser.param_groups, self.schedule.base_lrs, strict=True):
            group["lr"] = rate * self.schedule.lr_lambdas[0](done)


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
