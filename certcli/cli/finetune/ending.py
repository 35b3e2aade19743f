"""How training ended, against its begin: at chance, or below its start, it is not done."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from certcli.checkpoint.record import Record
from certcli.cli.finetune.options import Order
from certcli.cli.shared.output import Sink
from certcli.evaluation.image_doubts import right_of
from certcli.evaluation.intervals import chance_level, share_interval
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.models.pixels import PixelModel
from certcli.system.errors import CertvitError

JUDGES = 256
"""Validation images on which the start is judged."""


class EndedAtChanceError(CertvitError):
    """Training took a network that was better than chance to chance."""

    code = 1


@dataclass(frozen=True)
class Accuracy:
    """Right answers on validation images."""

    right: int
    images: int

    @property
    def share(self) -> float:
        return self.right / self.images

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval."""
        return share_interval(self.right, self.images)[0]


@dataclass(frozen=True)
class TrainingDoubt:
    """message: what is wrong. ruined: the start was better than chance, and the end is not."""

    message: str
    ruined: bool


def accuracy(model: PixelModel, validation: Images) -> Accuracy:
    """Judge the weights on a sample of the validation images."""

    sample = validation.limit(JUDGES)
    was_training = model.training
    model.eval()
    right = right_of(model, sample)
    model.train(was_training)
    return Accuracy(sum(right), len(sample))


def warn_of_orthogonal(before: Accuracy, after: Accuracy, sink: Sink) -> None:
    """Warn where making the matrices orthogonal has undone what the network had learned."""
    if share_interval(after.right, after.images)[1] >= before.low:
        return
    sink.warn(
        f"stiefel starts from orthogonal matrices, so validation accuracy starts at {100 * after.share:.1f} %, not at "
        f"{100 * before.share:.1f} %; --loss ce, or --optimiser adamw, keeps the weights"
    )


def doubt(
    before: Accuracy | None, clean: float, images: int, record: Record, under_noise: bool = False
) -> TrainingDoubt | None:
    """Return why this training is not done; None where nothing speaks against it.

    Args:
        before: of the starting weights; None where it was not measured.
        clean: accuracy at the end, on `images` images.
        under_noise: the training gives clean accuracy for accuracy under noise.
    """
    at_chance = chance_level(round(clean * images), images, record.classes)
    began = "" if before is None else f" (before training {100 * before.share:.1f} %)"
    ended = f"validation accuracy {100 * clean:.1f} %{began}"
    if at_chance:
        better = before is not None and before.low > 1 / max(1, record.classes)
        return TrainingDoubt(f"not done: training ended about chance, {ended}", better)
    if before is not None and clean < before.low and not under_noise:
        return TrainingDoubt(f"not done: training ended below its start, {ended}", False)
    return None


def end(ending: TrainingDoubt, sink: Sink) -> None:
    """Say it in the last line. EndedAtChanceError where training ruined the network."""
    hint = "a smaller --lr, --loss ce, weaker noise or attacks; the file is written all the same"
    if ending.ruined:
        raise EndedAtChanceError(ending.message, hint)
    sink.warn(ending.message)


def certifying_command(order: Order, settings: FinetuneSettings, path: Path) -> str:
    """Return what certifies a network trained for local certificates or under noise, as it can be
    pasted; "" for others.
    """
    words = ["certvit", "certify", str(path)]
    for option, value in (("--dataset", order.data.dataset), ("--data-dir", order.data.data_dir)):
        words += [] if value is None else [option, str(value)]
    if settings.is_for_local:
        words += ["--method", "local", "-e", str(settings.epsilon)]
        return f"image by image: {shlex.join([*words, '--limit', '50'])}"
    if settings.noise == 0:
        return ""
    sigma = str(settings.noise)
    words += ["--method", "smoothing", "--sigma", sigma, "-e", sigma, "--enough", sigma]
    words += [] if order.denoiser is None else ["--denoiser", str(order.denoiser)]
    words += ["--precision", "bf16"] if settings.precision == "bf16" else []
    return f"smoothed: {shlex.join([*words, '--limit', '50'])}"
