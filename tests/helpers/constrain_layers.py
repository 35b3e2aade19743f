"""Layers with known inputs, a small network and its images, shared by the tests of constrain."""

from typing import Any

import torch
from torch import Tensor, nn

from certcli.constrain.layers import refusal
from certcli.constrain.network import LayerResult, constrain_layer
from certcli.constrain.settings import ConstrainSettings
from certcli.constrain.statistics import LayerStatistics, collect_in_passes

ROUNDING = 1e-9
"""Relative: float64 sums of some hundred terms, and singular values taken through a Gram matrix, err below 1e-12."""


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def anisotropic_layer(
    outputs: int = 12,
    inputs: int = 9,
    tokens: int = 80,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[LayerStatistics, Tensor]:
    """A layer with anisotropic inputs of non-zero mean, as real activations are, and the inputs
    (in, tokens).
    """
    weight = gaussian(outputs, inputs, seed=seed).to(dtype)
    scales = torch.logspace(0, -1.5, inputs, dtype=torch.float64)[:, None]
    columns = scales * (gaussian(inputs, tokens, seed=seed + 1) + 0.5)
    statistics = LayerStatistics(
        path="layer",
        weight=weight.double(),
        gram=columns @ columns.mT,
        kind="linear",
        shape=(outputs, inputs),
        dtype=dtype,
    )
    return statistics, columns


def measured_error(weight: Tensor, original: Tensor, columns: Tensor) -> float:
    """The definition, from the activations themselves."""
    change = (weight.double() - original) @ columns
    return float(change.norm() / (original @ columns).norm())


def collect(
    model: nn.Module, batches: Any, paths: list[str], **options: Any
) -> dict[str, LayerStatistics]:
    """Return the statistics of all passes."""
    passes = collect_in_passes(model, batches, paths, **options)
    return {path: layer.widened() for part in passes for path, layer in part.items()}


def constrain(statistics: LayerStatistics, **options: Any) -> LayerResult:
    return constrain_layer(statistics, ConstrainSettings(**{"ridge": None, **options}))[0]


def constrainable(model: nn.Module) -> list[str]:
    """Return the paths of the modules whose output is exactly W x + b with a W of their own."""
    return [path for path, module in model.named_modules() if refusal(module) is None]


class Net(nn.Module):
    """A patch embedding, tokens, a residual branch called twice, and a layer whose weight is used
    functionally.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 8, 4, 4)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8, bias=False)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images).flatten(2).mT
        tokens = tokens + self.fc2(self.fc1(tokens).relu())
        tokens = tokens + self.fc2(self.fc1(tokens).relu())
        tokens = nn.functional.linear(tokens, self.hidden.weight)
        return self.head(input=tokens.mean(1))


def small_net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


IMAGES = torch.rand(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))
PATHS = ["embed", "fc1", "fc2", "hidden", "head"]
