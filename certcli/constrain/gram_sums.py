"""Sums of X X^T over batches: products of many rows in their own precision, summed in float64."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ROWS = 1024
"""Rows of a layer's inputs that wait for one product, beside which its sum in float64 is cheap."""


@dataclass
class GramSums:
    """The sums of one pass for one layer, and for each group the rows that are not in its sum yet."""

    grams: Tensor
    conv: dict[str, Any] | None
    tokens: list[int]
    waiting: list[list[Tensor]]

    def add(self, group: int, columns: Tensor) -> None:
        """Add X X^T of the rows (tokens, in), those below float64 ROWS at a time."""
        self.tokens[group] += len(columns)
        if columns.dtype == torch.float64:
            self.grams[group].addmm_(columns.mT, columns)
            return
        self.waiting[group].append(columns)
        if sum(map(len, self.waiting[group])) >= ROWS:
            self.settle(group)

    def settle(self, group: int) -> None:
        """Add the rows that wait. The product is symmetric: three of its four blocks are computed."""
        if not self.waiting[group]:
            return
        columns = torch.cat(self.waiting[group])
        self.waiting[group].clear()
        first, second = columns.split([columns.shape[1] // 2, -(-columns.shape[1] // 2)], dim=1)
        gram = self.grams[group]
        half = first.shape[1]
        across = first.mT @ second
        gram[:half, :half] += first.mT @ first
        gram[half:, half:] += second.mT @ second
        gram[:half, half:] += across
        gram[half:, :half] += across.mT
