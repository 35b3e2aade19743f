"""Another network's answers to the images of training, for distillation."""

from collections.abc import Sequence

import torch
from torch import Tensor

from certcli.checkpoint.record import Record
from certcli.images.datasets import imagenet_indices, resizer
from certcli.models.pixels import PixelModel
from certcli.system.errors import ArchitectureError


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
        notes = []
        self.fit, resized = resizer(tuple(student.input.size), record.input)
        if student.input.size[0] not in (1, record.input.size[0]) and record.input.size[0] != 1:
            raise ArchitectureError(
                f"the teacher takes {record.input.size[0]} channels, the network {student.input.size[0]}",
                "choose a teacher for the same images",
            )
        if resized:
            notes.append(resized)
        if record.classes != student.classes:
            indices = imagenet_indices(classes) if record.classes == 1000 else None
            if indices is None or len(indices) != student.classes:
                raise ArchitectureError(
                    f"the teacher knows {record.classes} classes, the network {student.classes}",
                    "choose a teacher for the same classes; one of ImageNet teaches folders named by synsets",
                )
            self.outputs = indices.to(next(model.parameters()).device)
            notes.append(f"{len(indices)} of its 1,000 classes count")
        self.note = "; ".join(notes)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        logits = self.model(self.fit(images)).float()
        return logits if self.outputs is None else logits[:, self.outputs]
