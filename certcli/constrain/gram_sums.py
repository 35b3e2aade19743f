"""Sums of X X^T over batches: products of many rows in their own precision, summed in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 1024
"""Rows of a layer's inputs that wait for one product, beside which its sum in float64 is cheap."""

STRIPS = 8
"""Strips of a sum, each computed from its diagonal on: 9 of 16 parts of the products and of the sums."""


@dataclass
class GramSums:
    """The sums of one pass for one layer, and for each group the rows that are not in its sum yet.

    Below the diagonal the sums are complete after `mirror` only.
    """

    grams: Tensor
    conv: dict[str, Any] | None
    tokens: list[int]
    waiting: list[list[Tensor]]

    def add(self, group: int, columns: Tensor) -> None:
        """Add X X^T of the rows (tokens, in), those below float64 ROWS at a time."""
        self.tokens[group] += len(columns)
        self.waiting[group].append(columns)
        if columns.dtype == torch.float64 or sum(map(len, self.waiting[group])) >= ROWS:
            self.settle(group)

    def settle(self, group: int) -> None:
        """Add the rows that wait."""
        if not self.waiting[group]:
            return
        columns = torch.cat(self.waiting[group])
        self.waiting[group].clear()
        width = columns.shape[1]
        step = -(-width // STRIPS)
        for start in range(0, width, step):
            strip = columns[:, start : start + step]
            self.grams[group, start : start + step, start:] += strip.mT @ columns[:, start:]

    def mirror(self) -> None:
        """Copy what lies above the diagonal below it."""
        for gram in self.grams:
            gram.triu_().add_(gram.triu(1).mT)
