"""Distil end to end: train all parts on the old network's logits of augmented images."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from certcli.adapt.calibration_shards import Lots
from certcli.adapt.descend import COMPARED, make_optimiser, mixed_precision, set_gradients, state_of
from certcli.adapt.pixels import as_pixels, augment, draw_augmentation
from certcli.adapt.settings import AdaptSettings
from certcli.system.products import fast_products

_BATCH = 32
_WORSE = 1.1
_SLOWER = 0.25
_TRIES = 3


class Distiller:
    """Train the student by epochs, and keep the best weights, the first ones included.

    Adapted networks can be steep: an epoch whose loss grows by more than a tenth is repeated at a
    quarter of the rate.
    """

    def __init__(
        self,
        teacher: Any,
        student: Any,
        settings: AdaptSettings,
        images: Mapping[int, Tensor],
        lots: Lots,
    ) -> None:
        self.teacher = teacher
        self.student = student
        self.settings = settings
        self.images = images
        self.lots = lots
        self.batch_size = min(settings.batch_size, _BATCH)
        self.batches = -(-lots.count // self.batch_size)
        self.epoch = 0
        self.parameters = list(student.net.parameters())
        steps = settings.distill * self.batches
        self.optimiser, self.schedule = make_optimiser(self.parameters, settings.lr, steps)
        some = next(iter(images.values()))
        self.cast = mixed_precision(some.device, some[0].numel())
        self.best, (self.best_loss, _) = state_of(student.net), self.judge()

    def run(self) -> Iterator[float]:
        """Train for the remaining epochs, and yield the relative logit error after each."""
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        while self.epoch < self.settings.distill:
            loss, error = self._pass()
            for _ in range(_TRIES):
                if loss < _WORSE * self.best_loss:
                    break
                self._take_back()
                loss, error = self._pass()
            self.epoch += 1
            if loss < self.best_loss:
                self.best = state_of(self.student.net)
                self.best_loss = loss
            if self.epoch == self.settings.distill:
                self.student.net.load_state_dict(self.best)
                _, error = self.judge()
            yield error
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def _pass(self) -> tuple[float, float]:
        """Train on all images once, and return the loss and the error after it."""
        generator = torch.Generator().manual_seed(self.settings.seed * 10_007 + 20_000 + self.epoch)
        # different machines drift apart
        self.lots.team.copy_from_leader(list(self.student.net.state_dict().values()))
        with fast_products(self.student):
            for batch in self.lots.batches(self.batch_size, generator):
                # of all lots: one stream of numbers
                drawn = {
                    lot: draw_augmentation(len(rows), generator) for lot, rows in batch.items()
                }
                self._learn(batch, drawn)
            return self.judge()

    def _learn(self, batch: Mapping[int, Tensor], drawn: Mapping[int, Tensor]) -> None:
        pixels = {
            lot: augment(as_pixels(self.images[lot][batch[lot]]), drawn[lot])
            for lot in self.lots.own
        }
        with self.cast, torch.no_grad():
            target = {lot: self.teacher(part).float() for lot, part in pixels.items() if len(part)}

        def squares(lot: int) -> list[Tensor] | None:
            return [target[lot].double().square().sum().cpu().view(1)] if lot in target else None

        images = sum(map(len, batch.values()))
        size = float(self.lots.total(squares, [torch.zeros(1, dtype=torch.float64)])[0]) / images

        def loss(lot: int, rows: Tensor) -> Tensor:
            with self.cast:
                logits = self.student(pixels[lot]).float()
            return _loss(logits, target[lot], size) * (len(rows) / images)

        set_gradients(self.parameters, self.lots, batch, loss)
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
        """Return the loss and the relative logit error on calibration images without augmentation."""

        def per_lot(lot: int) -> list[Tensor]:
            loss = difference = size = 0.0
            for part in self.images[lot][: self.lots.size(lot, COMPARED)].split(
                self.settings.batch_size
            ):
                pixels = as_pixels(part)
                with self.cast:
                    target = self.teacher(pixels).double()
                    logits = self.student(pixels).double()
                squares = float(target.square().sum())
                loss += float(_loss(logits, target, squares / len(part))) * len(part)
                difference += float((logits - target).square().sum())
                size += squares
            return [torch.tensor([loss, difference, size], dtype=torch.float64)]

        loss, difference, size = self.lots.total(per_lot, [torch.zeros(3, dtype=torch.float64)])[
            0
        ].tolist()
        return loss, float((difference / max(size, 1e-30)) ** 0.5)

    def state(self) -> dict[str, Tensor]:
        """Return what the next epoch depends on, beside the student's weights."""
        tensors = {f"best.{name}": value for name, value in self.best.items()}
        tensors["rates"] = torch.tensor(self.schedule.base_lrs, dtype=torch.float64)
        tensors["best_loss"] = torch.tensor(self.best_loss, dtype=torch.float64)
        for index, parameter in enumerate(self.parameters):
            for name, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"adam.{index}.{name}"] = value.detach().clone()
        return tensors

    def restore(self, tensors: dict[str, Tensor], epoch: int) -> None:
        self.epoch = epoch
        self.best = {
            name.removeprefix("best."): value
            for name, value in tensors.items()
            if name.startswith("best.")
        }
        self.best_loss = float(tensors["best_loss"])
        self._set_rates(tensors["rates"].tolist())
        for index, parameter in enumerate(self.parameters):
            prefix = f"adam.{index}."
            saved = {
                name.removeprefix(prefix): v
                for name, v in tensors.items()
                if name.startswith(prefix)
            }
            if saved:
                self.optimiser.state[parameter] = {
                    name: value if name == "step" else value.to(parameter.device)
                    for name, value in saved.items()
                }


def _loss(logits: Tensor, target: Tensor, size: float) -> Tensor:
    """Return the images' mean KL(softmax(target) | softmax(found)) + |found - target|^2 / size.

    Args:
        size: the mean |target|^2 of an image.
    """
    divergence = functional.kl_div(
        functional.log_softmax(logits, dim=1),
        functional.log_softmax(target, dim=1),
        log_target=True,
        reduction="batchmean",
    )
    return divergence + (logits - target).square().sum() / (len(logits) * max(size, 1e-12))
