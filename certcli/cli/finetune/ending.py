"""How training ended, against its begin: at chance, or below its start, it is not done."""

import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from certcli.certify import method_choice, methods
from certcli.certify.certificate import certified_accuracy
from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.pixel_denoiser import PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.cli.finetune.command import Order
from certcli.cli.shared.output import Sink, percent
from certcli.evaluation import image_doubts, intervals, record_lines
from certcli.evaluation.threat import Threat, proven_percent, proven_radius
from certcli.finetune.loop import Epoch
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.numerics.real import INF
from certcli.models import build, pixels
from certcli.system.errors import CertvitError, NoBoundError, UsageError

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
        return intervals.share_interval(self.right, self.images)[0]


@dataclass(frozen=True)
class TrainingDoubt:
    """message: what is wrong. ruined: the start was better than chance, and the end is not."""

    message: str
    ruined: bool


def accuracy(model: pixels.PixelModel, validation: Images) -> Accuracy:
    """Judge the weights, in eval mode, on a sample of the validation images."""
    sample = validation.limit(JUDGES)
    return Accuracy(sum(image_doubts.right_of(model, sample)), len(sample))


def warn_of_orthogonal(before: Accuracy, after: Accuracy, sink: Sink) -> None:
    """Warn where making the matrices orthogonal has undone what the network had learned."""
    if intervals.share_interval(after.right, after.images)[1] >= before.low:
        return
    sink.warn(
        f"stiefel starts from orthogonal matrices, so validation accuracy starts at {100 * after.share:.1f} %, not at "
        f"{100 * before.share:.1f} %; --loss ce, or --optimiser adamw, keeps the weights"
    )


def doubt_training(
    before: Accuracy | None, clean: float, images: int, record: Record, under_noise: bool = False
) -> TrainingDoubt | None:
    """Return why this training is not done; None where nothing speaks against it.

    Args:
        before: of the starting weights; None where it was not measured.
        clean: accuracy at the end, on `images` images.
        under_noise: the training gives clean accuracy for accuracy under noise.
    """
    at_chance = intervals.chance_level(round(clean * images), images, record.classes)
    began = "" if before is None else f" (before training {100 * before.share:.1f} %)"
    ended = f"validation accuracy {100 * clean:.1f} %{began}"
    if at_chance:
        better = before is not None and before.low > 1 / max(1, record.classes)
        return TrainingDoubt(f"not done: training ended about chance, {ended}", better)
    if before is not None and clean < before.low and not under_noise:
        return TrainingDoubt(f"not done: training ended below its start, {ended}", False)
    return None


def end_in_doubt(ending: TrainingDoubt, sink: Sink) -> None:
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


FEWEST = 100
"""Images that are certified however short the time is."""
MEASURED = 16
"""Images on which the time of a certificate is measured."""


@dataclass(frozen=True)
class Final:
    """Fields of the evidence. skipped: why no image was certified, where none was tried."""

    evidence: dict[str, Any]
    skipped: str | None = None

    def told(self, images: int, epsilon: float) -> str:
        """Return the last line of a run: the validation shares, and the bound."""
        evidence = self.evidence
        at = proven_radius(epsilon)
        certified = f"certified at {at} {intervals.share_text(evidence['certified'], images, proven_percent)}"
        if self.skipped is not None:
            certified = f"nothing certified at {at} ({self.skipped})"
        clean = intervals.share_text(evidence["clean"], images)
        return f"validation clean {clean}, {certified}, bound {evidence['upper_text']} (proven)"


def affordable_images(images: int, seconds_left: float | None, costs: tuple[float, float]) -> int:
    """Return how many of the images are certified in the seconds that are left, FEWEST at least.

    Args:
        seconds_left: None: all the time that it takes.
        costs: seconds of the bound and of a certificate.
    """
    bound, certificate = costs
    if seconds_left is None or certificate <= 0:
        return images
    return min(images, max(FEWEST, int((seconds_left - bound) / certificate)))


def seconds(
    checkpoint: Checkpoint, sample: Images, epsilon: float, sink: Sink
) -> tuple[float, float]:
    """Measure the seconds of the final bound and of a certificate, on the starting weights."""
    few = sample.limit(MEASURED)
    started = time.perf_counter()
    certifier = _certifier(checkpoint)
    proven = time.perf_counter()
    if isinstance(certifier, str) or _hopeless_reason(certifier, epsilon) is not None:
        _clean_accuracy(checkpoint, few)
    else:
        _certified_shares(certifier, few, epsilon, sink)
    return proven - started, (time.perf_counter() - proven) / len(few)


def prove_trained(checkpoint: Checkpoint, validation: Images, epsilon: float, sink: Sink) -> Final:
    """Prove the bound in float64, rounded outward; count the certified validation images."""

    started = time.perf_counter()
    about: dict[str, Any] = {"dataset": record_lines.describe_images(validation)}
    certifier = _certifier(checkpoint)
    if isinstance(certifier, str):
        sink.note(certifier)
        clean = _clean_accuracy(checkpoint, validation)
        return Final({**about, "clean": clean, "certified": 0.0, **bound_document(INF)})
    sink.note(f"proved the bound in {time.perf_counter() - started:.0f} s")
    about |= {"arithmetic": certifier.arithmetic, **certifier.about["bound"]}
    why = _hopeless_reason(certifier, epsilon)
    if why is not None:
        sink.note(f"skipped the certificates: {why}")
        return Final(
            {**about, "clean": _clean_accuracy(checkpoint, validation), "certified": 0.0}, why
        )
    started = time.perf_counter()
    clean, certified = _certified_shares(certifier, validation, epsilon, sink)
    spent = time.perf_counter() - started
    sink.note(f"certified {len(validation)} validation images in {spent:.0f} s")
    return Final({**about, "clean": clean, "certified": certified})


def _certifier(checkpoint: Checkpoint) -> Any:
    """Return the certifier of the global bound; a sentence where there is none."""

    try:
        return methods.prepare_method("lipschitz", checkpoint, torch.device("cpu"))
    except NoBoundError as failure:
        return failure.message


def _hopeless_reason(certifier: Any, epsilon: float) -> str | None:

    return method_choice.why_hopeless(certifier.about["bound"]["log10_upper"], epsilon)


def _clean_accuracy(checkpoint: Checkpoint, images: Images) -> float:
    """Return the accuracy in float64, of which a certificate would speak."""

    return sum(image_doubts.right_of(build.load_double(checkpoint), images)) / len(images)


def _certified_shares(
    certifier: Any, images: Images, epsilon: float, sink: Sink
) -> tuple[float, float]:
    """Return the clean accuracy and the share certified at epsilon."""
    rows: list[Any] = []
    with sink.progress("certify", total=len(images)) as bar:
        for batch in methods.certify_images(certifier, images, 256):
            rows += batch
            bar.advance(len(batch))
    threat = Threat("l2", epsilon)
    accuracy_of = certified_accuracy(rows, [threat])
    return accuracy_of.clean, accuracy_of.against(threat)


def read_noise_remover(
    path: Path | None, noise: float, size: tuple[int, int, int], device: torch.device, sink: Sink
) -> PixelDenoiser | None:
    """Return the denoiser for this noise and images (c, h, w); UsageError without noise."""

    if path is None:
        return None
    if noise == 0:
        raise UsageError("--denoiser needs noise to remove", "--noise 0.25")
    denoiser = read_denoiser(path, size[0]).at(noise).to(device)
    denoiser.require_size(size)
    sink.note(f"denoiser: {denoiser.line}")
    return denoiser


def remark_of(epoch: Epoch) -> str:
    """Return the loss of an epoch and those shares that it has; the certified one is an estimate."""
    shares = {"clean": epoch.clean, "under noise": epoch.noisy, "in part": epoch.masked}
    parts = [f"{name} {percent(share)}" for name, share in shares.items() if share is not None]
    if epoch.certified_estimate is not None:
        parts.append(f"about {percent(epoch.certified_estimate)} certified")
    return ", ".join([f"loss {epoch.loss:.3f}", *parts])
