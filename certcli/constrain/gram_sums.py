"""Sums of X X^T over batches: products of many rows in their own precision, summed in float64."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROWS = 1024
"""Rows of a layer's inputs that wait for one product, beside which its sum in float64 is cheap."""

STRIPS = 8
"""Strips of a sum, each computed from its diagonal on: 9 of 16 parts of the products and of the sums."""


@dataclass
class GramSums:
    """The sum of one pass for one layer, (in, in), and the rows that are not in it yet.

    Below the diagonal the sum is complete after `mirror` only.
    """

    gram: Tensor
    conv: dict[str, Any] | None
    tokens: int = 0
    waiting: list[Tensor] = field(default_factory=list)

    def add(self, columns: Tensor) -> None:
        """Add X X^T of the rows (tokens, in), those below float64 ROWS at a time."""
        self.tokens += len(columns)
        self.waiting.append(columns)
        if columns.dtype == torch.float64 or sum(map(len, self.waiting)) >= ROWS:
            self.settle()

    def settle(self) -> None:
        """Add the rows that wait."""
        if not self.waiting:
            return
        columns = torch.cat(self.waiting)
        self.waiting.clear()
        width = columns.shape[1]
        step = -(-width // STRIPS)
        for start in range(0, width, step):
            strip = columns[:, start : start + step]
            self.gram[start : start + step, start:] += strip.mT @ columns[:, start:]

    def mirror(self) -> None:
        """Copy what lies above the diagonal below it."""
        self.gram.triu_().add_(self.gram.triu(1).mT)
