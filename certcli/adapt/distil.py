"""End-to-end distillation: all parts together learn the old network's logits on varied calibration images."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from certcli.adapt.descend import JUDGED, follow, make_optimiser, mixed_precision, state_of
from certcli.adapt.lots import Lots
from certcli.adapt.pixels import as_pixels, chances, varied
from certcli.adapt.settings import AdaptSettings

_BATCH = 32
_WORSE, _SLOWER, _TRIES = 1.1, 0.25, 3


class Distiller:
    """An epoch at a time; the best epoch's weights are kept, so it never ends worse than it began.

    Adapted networks can be steep: an epoch that loses more than a tenth is repeated at a quarter of the rate.
    """

    def __init__(
        self, teacher: Any, student: Any, settings: AdaptSettings, images: Mapping[int, Tensor], lots: Lots
    ) -> None:
        self.teacher, self.student, self.settings, self.images, self.lots = teacher, student, settings, images, lots
        self.batch_size = min(settings.batch_size, _BATCH)
        self.batches = -(-lots.count // self.batch_size)
        self.epoch = 0
        self.parameters = list(student.net.parameters())
        steps = settings.distill_epochs * self.batches
        self.optimiser, self.schedule = make_optimiser(self.parameters, settings.lr, steps)
        some = next(iter(images.values()))
        self.cast = mixed_precision(some.device, some[0].numel())
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
        self.lots.team.copy_from_leader(list(self.student.net.state_dict().values()))  # unlike machines drift apart
        for batch in self.lots.batches(self.batch_size, generator):
            drawn = {
                lot: chances(len(rows), generator) for lot, rows in batch.items()
            }  # of all lots: one stream of numbers
            self._learn(batch, drawn)
        return self.judge()

    def _learn(self, batch: Mapping[int, Tensor], drawn: Mapping[int, Tensor]) -> None:
        seen = {lot: varied(as_pixels(self.images[lot][batch[lot]]), drawn[lot]) for lot in self.lots.own}
        with self.cast, torch.no_grad():
            wanted = {lot: self.teacher(pixels).float() for lot, pixels in seen.items() if len(pixels)}

        def squares(lot: int) -> list[Tensor] | None:
            return [wanted[lot].double().square().sum().cpu().view(1)] if lot in wanted else None

        images = sum(map(len, batch.values()))
        size = float(self.lots.total(squares, [torch.zeros(1, dtype=torch.float64)])[0]) / images

        def loss(lot: int, rows: Tensor) -> Tensor:
            with self.cast:
                found = self.student(seen[lot]).float()
            return _loss(found, wanted[lot], size) * (len(rows) / images)

        follow(self.parameters, self.lots, batch, loss)
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

        def of(lot: int) -> list[Tensor]:
            loss = difference = size = 0.0
            for part in self.images[lot][: self.lots.size(lot, JUDGED)].split(self.settings.batch_size):
                pixels = as_pixels(part)
                with self.cast:
                    wanted, found = self.teacher(pixels).double(), self.student(pixels).double()
                squares = float(wanted.square().sum())
                loss += float(_loss(found, wanted, squares / len(part))) * len(part)
                difference += float((found - wanted).square().sum())
                size += squares
            return [torch.tensor([loss, difference, size], dtype=torch.float64)]

        loss, difference, size = self.lots.total(of, [torch.zeros(3, dtype=torch.float64)])[0].tolist()
        return loss, float((difference / max(size, 1e-30)) ** 0.5)

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


def _loss(found: Tensor, wanted: Tensor, size: float) -> Tensor:
    """The mean over images of divergence plus distance. size: the mean |wanted|^2 of an image."""
    return _divergence(found, wanted) + (found - wanted).square().sum() / (len(found) * max(size, 1e-12))


def _divergence(found: Tensor, wanted: Tensor) -> Tensor:
    """KL(softmax(wanted) | softmax(found)), the mean over images."""
    return functional.kl_div(
        functional.log_softmax(found, dim=1),
        functional.log_softmax(wanted, dim=1),
        log_target=True,
        reduction="batchmean",
    )
