"""What the user states about a foreign file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from certcli.checkpoint.arch_args import arch_arguments
from certcli.checkpoint.schema import require_statistics
from certcli.models.adapters import Adapter
from certcli.system.errors import Refused, UsageError


@dataclass(frozen=True)
class Hints:
    """The architecture, its arguments and the pixel statistics of a foreign file.

    Attributes:
        as_stated: Believe these and config.json where the tensors fit another network too.
        weights: "raw", "ema" or a key: the weights to read of a file that holds several.
        features: Open a network without a classifier, which ends in features.
        image_size: Side of the images, and of the pixels in which radii are measured, where it is
            not the network's own: its first layer resizes them. It goes with every file.
        adapter: To be merged into the file's weights, by the names that it has.
        logits: Open a network that does not decide by its largest logit: only the logits count.
    """

    arch: str | None = None
    arch_args: Mapping[str, Any] = field(default_factory=dict)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    as_stated: bool = False
    weights: str | None = None
    features: bool = False
    image_size: int | None = None
    adapter: Adapter | None = None
    logits: bool = False

    def __post_init__(self) -> None:
        try:
            arch_arguments(self.arch_args)
            require_statistics(self.mean or (), self.std or ())
        except Refused as refusal:
            raise UsageError(
                str(refusal), "see --arch-arg, --mean and --std; pixels are in [0, 1]"
            ) from refusal

    def adapted(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with the adapter in them, where there is one."""
        return tensors if self.adapter is None else self.adapter.merged(tensors)

    @property
    def given(self) -> list[str]:
        """Return the options that are given, as spelled on the command line."""
        named = {
            "--arch": self.arch,
            "--mean": self.mean,
            "--std": self.std,
            "--weights": self.weights,
        }
        arguments = [f"--arch-arg {key}" for key in self.arch_args]
        return [option for option, value in named.items() if value] + arguments
