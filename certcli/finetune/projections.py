"""Weights divided down to a spectral norm after every step of the optimiser."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from certcli.finetune.settings import FinetuneSettings
from certcli.finetune.stiefel import last_layer
from certcli.lipschitz.numerics.convolution_estimate import Geometry, convolution_estimate
from certcli.lipschitz.numerics.power import block_norms
from certcli.system.errors import ArchitectureError


class WeightProjection:
    """W <- W / max(1, sigma(W) / radius) for "ball", W <- W radius / sigma(W) for "spectral", after
    each step.

    It changes the weights of linear layers and convolutions except the last layer. sigma is the
    norm of the operator: for a convolution with its padding and stride, on images of the size that
    the forward pass before had. One power iteration a step estimates it from below, so norms may
    exceed the radius slightly; the bound is proven afterwards. Source: Gouk et al. 2021, algorithm
    2 ("ball"); Miyato et al. 2018, with the operator's own norm ("spectral").

    Attributes:
        vectors: singular vectors that the next step starts from.

    Raises:
        ArchitectureError: no layer can be projected, or a convolution's padding has no known norm.
    """

    def __init__(self, net: nn.Module, settings: FinetuneSettings) -> None:
        self.settings = settings
        self.vectors: dict[str, Tensor] = {}
        self._matrices: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._convolutions: dict[str, Any] = {}
        self._sizes: dict[str, tuple[int, ...]] = {}
        last = last_layer(net)
        for path, module in net.named_modules():
            if module is last:
                continue
            if isinstance(module, nn.Linear):
                self._matrices[module.out_features, module.in_features].append(module.weight)
            elif isinstance(module, (nn.Conv1d, nn.Conv2d)):
                self._add_convolution(path, module)
        if not self._matrices and not self._convolutions:
            raise ArchitectureError(
                "there is no linear layer or convolution to project", "drop --project"
            )

    def _add_convolution(self, path: str, module: Any) -> None:
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise ArchitectureError(
                f"{path}: a convolution with this padding has no norm to project by"
            )
        if (
            tuple(module.kernel_size) == tuple(module.stride)
            and not any(module.padding)
            and module.groups == 1
        ):
            weight = module.weight
            self._matrices[(weight.shape[0], weight[0].numel())].append(weight)
            return
        self._convolutions[path] = module

        def note(_: nn.Module, inputs: Any) -> None:
            self._sizes[path] = tuple(inputs[0].shape[2:])
            handle.remove()

        handle = module.register_forward_pre_hook(note)

    @torch.no_grad()
    def after_step(self) -> None:
        """Rescale every weight in place."""
        for shape, weights in self._matrices.items():
            blocks = torch.stack([weight.flatten(1) for weight in weights])
            factors = self._factors(block_norms(blocks, self.vectors, f"{shape[0]}x{shape[1]}"))
            for weight, factor in zip(weights, factors.unbind(), strict=True):
                weight.mul_(factor)
        for path, size in self._sizes.items():
            module = self._convolutions[path]
            padding = tuple((p, p) for p in module.padding)
            geometry = Geometry(
                tuple(module.stride), padding, tuple(module.dilation), module.groups, size
            )
            norm = convolution_estimate(module.weight, geometry, self.vectors, path, iterations=1)
            module.weight.mul_(self._factors(norm).to(module.weight))

    def _factors(self, norms: Tensor) -> Tensor:
        scaled = norms / self.settings.project_radius
        return 1 / scaled.clamp_min(1.0 if self.settings.project == "ball" else 1e-12)
