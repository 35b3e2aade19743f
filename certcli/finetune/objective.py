"""Turn training images into the loss: augmentation, attack, forward pass, loss, distillation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

from certcli.checkpoint.record import Record
from certcli.finetune.augment import Adversary, Hiding, augment_batch
from certcli.finetune.losses import LOSSES, NEEDS_ENCLOSURE
from certcli.finetune.losses.bounds import ChainBound
from certcli.finetune.losses.local import LocalEnclosure
from certcli.finetune.penalties import RAMP, EnclosurePenalty
from certcli.finetune.settings import FinetuneSettings
from certcli.images.datasets import imagenet_indices, resizer
from certcli.images.labelled import Images, sent
from certcli.models.pixels import PixelModel
from certcli.system.errors import ArchitectureError, raise_if

TAUGHT = 0.5
"""Weight of the teacher in the loss."""
HEAT = 2.0
"""Temperature of both softmaxes of the teacher's term."""


class Teacher:
    """The teacher's logits of the student's classes: (b, c, h, w) -> (b, k), in float32.

    A teacher of other image sizes sees the images resized, bilinear. One of ImageNet's 1,000
    classes teaches those that the dataset's folders name by their synsets.

    Args:
        classes: names of the dataset's classes.

    Raises:
        ArchitectureError: the teacher does not know the classes, or has no use for images of these
        channels.
    """

    def __init__(
        self, model: PixelModel, record: Record, student: Record, classes: Sequence[str]
    ) -> None:
        self.model = model
        self.outputs = None
        self.fit, resized = resizer(tuple(student.input.size), record.input)
        taken = record.input.size[0]
        there = student.input.size[0]
        raise_if(
            taken != 1 and there not in (1, taken),
            ArchitectureError,
            f"the teacher takes {taken} channels, the network {there}",
            "choose a teacher for the same images",
        )
        self.note = resized
        if record.classes != student.classes:
            indices = imagenet_indices(classes) if record.classes == 1000 else None
            if indices is None or len(indices) != student.classes:
                raise ArchitectureError(
                    f"the teacher knows {record.classes} classes, the network {student.classes}",
                    "choose a teacher for the same classes; one of ImageNet teaches folders named by synsets",
                )
            self.outputs = indices.to(next(model.parameters()).device)
            count = f"{len(indices)} of its 1,000 classes count"
            self.note = f"{resized}; {count}" if resized else count

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        logits = self.model(self.fit(images)).float()
        return logits if self.outputs is None else logits[:, self.outputs]


@dataclass
class Batch:
    """The images of one gradient, after augmentation.

    Args:
        taught: the teacher's logits.
        adversarial: attacked images, which replace the clean ones.
        views: the visible part of each image (b, rows, columns); None: all of it.
        directions: of the enclosure penalty, one an image, and the share of its weight at this step.
        sketch: the directions that stand for the pixels in an enclosure (m, c, h, w).
    """

    images: Tensor
    labels: Tensor
    taught: Tensor | None
    adversarial: Tensor | None = None
    views: Tensor | None = None
    directions: Tensor | None = None
    penalty_share: float = 0.0
    sketch: Tensor | None = None


class Objective:
    """The loss of a batch, from the pair constants. It draws from `generator` alone, so that a run
    can be resumed.

    Args:
        chain: for the losses that follow each image's neighbourhood through a chain of layers.
        enclosure: for the loss that follows it through a vision transformer.
    """

    def __init__(
        self,
        model: PixelModel,
        settings: FinetuneSettings,
        generator: Generator,
        teacher: Teacher | None,
        chain: ChainBound | None = None,
        denoiser: nn.Module | None = None,
        enclosure: LocalEnclosure | None = None,
    ) -> None:
        self.model = model
        self.settings = settings
        self.generator = generator
        self.teacher = teacher
        self.chain = chain
        self.denoiser = denoiser
        self.enclosure = enclosure if settings.loss in NEEDS_ENCLOSURE else None
        self.device = next(model.parameters()).device
        self.narrow = settings.precision != "float32"
        self.loss: Callable[..., Tensor] = LOSSES.load(settings.loss)
        attacked = settings.adversarial != "none"
        self.adversary = Adversary(model, settings, generator) if attacked else None
        self.hiding = Hiding(model, settings.hiding, generator) if settings.hiding else None
        weights = settings.enclosure_penalty
        self.penalty = None if weights is None else EnclosurePenalty(model, weights)

    def prepare(self, train: Images, positions: Tensor, share: float) -> Batch:
        """Fetch, augment, mask and attack the images at these positions, at this share of the
        training.

        The teacher sees whole images, without noise, and runs in the precision of the settings.
        """
        settings = self.settings
        images = sent(train.fetch(positions.tolist()), self.device)
        labels = sent(train.labels[positions], self.device)
        if settings.augment:
            images = augment_batch(
                images, settings.augment, self.model.normalize.mean, self.generator
            )
        with self._precision():
            taught = None if self.teacher is None else self.teacher(images)
        if settings.noise > 0:
            noise = torch.randn(images.shape, generator=self.generator).to(images)
            images = self.denoised(images + settings.noise * noise)
        batch = Batch(images, labels, taught, penalty_share=min(1.0, share / RAMP))
        if self.hiding is not None:
            batch.views = self._views(self.hiding, batch)
        if self.penalty is not None:
            batch.directions = self.penalty.directions(images, self.generator)
        if self.enclosure is not None:
            batch.sketch = self.enclosure.directions(self.generator)
        if self.adversary is not None:
            forward = partial(self.forward, views=batch.views)
            batch.adversarial = self.adversary.attack(forward, images, labels, share)
        return batch

    @torch.no_grad()
    def denoised(self, noisy: Tensor) -> Tensor:
        """Return noisy pixels as the network sees them: behind the denoiser, where there is one."""
        return noisy if self.denoiser is None else self.denoiser(noisy)

    def _views(self, hiding: Hiding, batch: Batch) -> Tensor:
        """Draw the part of each image that the network sees."""

        def losses(views: Tensor) -> Tensor:
            logits = self.forward(batch.images, views)
            return cross_entropy(logits, batch.labels, reduction="none")

        was_training = self.model.training
        self.model.eval()
        views = hiding.draw(batch.images, losses)
        self.model.train(was_training)
        return views

    def forward(self, images: Tensor, views: Tensor | None = None) -> Tensor:
        """Return the logits of the images, or of their `views`, in float32 or wider.

        The network runs in the precision of the settings.
        """
        with self._precision():
            logits = (
                self.model(images)
                if views is None or self.hiding is None
                else self.hiding.logits(images, views)
            )
        return logits.float() if self.narrow else logits

    def _precision(self) -> torch.autocast:
        """Run passes in the settings' precision."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.narrow)

    def value(self, batch: Batch, pairs: Callable[[], Tensor | None], epsilon: float) -> Tensor:
        """Return the mean loss of the batch: ().

        A teacher makes it (1 - a) loss + a T^2 KL(p_teacher || p), both at temperature T (Hinton et
        al. 2015).

        Args:
            pairs: gives the pair constants (k, k); called once.
        """
        settings = self.settings
        images = batch.images if batch.adversarial is None else batch.adversarial
        logits = self.forward(images, batch.views)
        if self.enclosure is not None and batch.sketch is not None:
            enclosed = slice(settings.enclosed)
            margins = self.enclosure.margins(
                batch.images[enclosed], batch.labels[enclosed], epsilon, batch.sketch
            )
            loss = self.loss(logits, batch.labels, margins, epsilon, settings.worst_weight)
        elif self.chain is None:
            loss = self.loss(logits, batch.labels, pairs(), epsilon)
        else:
            loss = self._through_chain(self.chain, batch, images, logits, epsilon)
        if batch.taught is not None:
            student = log_softmax(logits / HEAT, dim=1)
            teacher = softmax(batch.taught / HEAT, dim=1)
            distillation = kl_div(student, teacher, reduction="sum") / len(logits)
            loss = (1 - TAUGHT) * loss + TAUGHT * HEAT**2 * distillation
        if self.penalty is not None and batch.directions is not None:
            loss = loss + batch.penalty_share * self.penalty(batch.images, batch.directions)
        return loss

    def _through_chain(
        self, chain: ChainBound, batch: Batch, images: Tensor, logits: Tensor, epsilon: float
    ) -> Tensor:
        """Return a CE(z) + (1 - a) CE(worst logits); a falls to 0 as the radius rises.

        GloRo's form has both in itself.
        """
        slopes = chain.slopes(images, batch.labels, epsilon)
        worst = self.loss(logits, batch.labels, slopes, epsilon)
        share = 1.0 if self.settings.epsilon == 0 else epsilon / self.settings.epsilon
        if share == 1 or self.settings.loss == "local-lip-gloro":
            return worst
        return share * worst + (1 - share) * cross_entropy(logits, batch.labels)
