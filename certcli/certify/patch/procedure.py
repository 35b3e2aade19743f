"""A defence against patches: it classifies by passes over views, and proves its answers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from certcli.certify.patch.passes import MaskedPasses
from certcli.evaluation.threat import Patch


@dataclass(frozen=True)
class PatchOutcome:
    """The class, the patches proven not to change it, and what passes voted, where they do.

    Attributes:
        prediction: NONE where passes with logits that are not finite decide.
    """

    prediction: int
    proven: tuple[Patch, ...] = ()
    votes: tuple[int, ...] = ()


class Procedure(ABC):
    """views: (m, rows, columns), of all passes. settings: for records; title: in words."""

    name: ClassVar[str]
    views: Tensor
    settings: Mapping[str, Any]
    title: str

    @abstractmethod
    def predict(self, passes: MaskedPasses, pixels: Tensor) -> list[PatchOutcome]:
        """The class of each image (b, c, h, w), nothing proven."""

    @abstractmethod
    def certify(
        self, passes: MaskedPasses, pixels: Tensor, labels: Sequence[int]
    ) -> list[PatchOutcome]:
        """Classify, and prove. An image not of its label's class may be left unproven."""
