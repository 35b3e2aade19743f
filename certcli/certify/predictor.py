"""Classes of images, by a network or by the defended classifier of its certificates."""

from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.certify.options import Patches
from certcli.certify.patch.certifier import AT_ONCE, METHOD, PatchCertificate, PatchCertifier
from certcli.certify.patch.certifier import prepare_patch as prepare_patch
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.choices import Defence
from certcli.images.labelled import sent
from certcli.models import build
from certcli.system.errors import UsageError

MOST_LIKELY = 5
"""Classes that are listed of each image, where nobody says how many."""


@dataclass(frozen=True)
class ClassProbability:
    """A class, and its softmax probability: the network's own word, which proves nothing."""

    prediction: int
    probability: float


@dataclass(frozen=True)
class Prediction:
    """What a network, or a defence, says of an image.

    Args:
        prediction: the class, None where the network gives NaN.
        proven: the patches that cannot change it, as spelled.
        top: the most likely classes, the most likely first; a defence has votes and none of them.
    """

    prediction: int | None
    proven: tuple[str, ...] = ()
    top: tuple[ClassProbability, ...] = ()


class Predictor:
    """Images in, predictions out. options: of the defence, as its method of `certify` takes them.

    at_once: images that are best given together.
    """

    at_once = AT_ONCE

    def __init__(
        self,
        checkpoint: Checkpoint,
        device: torch.device,
        defence: Defence = "none",
        options: Patches | None = None,
        top: int = MOST_LIKELY,
    ) -> None:
        if top < 1:
            raise UsageError(f"top is {top}: at least one class must be listed", "5, or 1")
        self._top = min(top, checkpoint.record.classes)
        self.defended: PatchCertifier | None = None
        if defence == METHOD:
            self.defended = prepare_patch(checkpoint, device, options or Patches())
        else:
            self._model = build.load(checkpoint, device)
            self._device = device

    @torch.no_grad()
    def __call__(self, pixels: Tensor, prove: bool = False) -> list[Prediction]:
        """Predict pixels (b, c, h, w) in [0, 1]. prove: also whether a patch can change it."""
        if self.defended is None:
            return [self._likely(row) for row in self._model(sent(pixels, self._device))]
        predictions = self.defended.predict(pixels)
        if not prove:
            return [Prediction(top) for top in predictions]
        rows = self.defended.certificates(
            range(len(predictions)), pixels, [-1 if top is None else top for top in predictions]
        )
        proven = [row.proven if isinstance(row, PatchCertificate) else () for row in rows]
        return [Prediction(top, its) for top, its in zip(predictions, proven, strict=True)]

    def _likely(self, logits: Tensor) -> Prediction:
        """Return the most likely classes: logits (k,)."""
        if not bool(torch.isfinite(logits).all()):
            return Prediction(None)
        top = logits.double().softmax(0).topk(self._top)
        choices = map(ClassProbability, top.indices.tolist(), top.values.tolist())
        return Prediction(int(logits.argmax()), top=tuple(choices))
