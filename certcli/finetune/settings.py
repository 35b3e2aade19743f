"""What a training run is: every number that decides its result, and nothing else."""

from dataclasses import dataclass

from certcli.errors import UsageError
from certcli.finetune.losses import LOSSES

OPTIMISERS = ("adamw", "sgd", "stiefel")


@dataclass(frozen=True)
class FinetuneSettings:
    """epsilon: pixel l2 radius of the margin loss; it ramps from 20 % to its value over the first `ramp` of the steps.

    lr: of AdamW / SGD (with `stiefel`: of biases, residual weights and head); stiefel_lr: of the orthogonal matrices.
    """

    loss: str = "margin"
    epsilon: float = 0.5
    epochs: int = 20
    batch_size: int = 128
    optimiser: str = "adamw"
    lr: float = 1e-3
    stiefel_lr: float = 0.05
    weight_decay: float = 0.05
    warmup: float = 0.02
    ramp: float = 0.3
    label_smoothing: float = 0.0
    noise: float = 0.0
    patience: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        LOSSES[self.loss]
        if self.optimiser not in OPTIMISERS:
            raise UsageError(f"unknown optimiser '{self.optimiser}'", f"one of: {', '.join(OPTIMISERS)}")
        for name, low, high in (
            ("epsilon", 0.0, 1e6),
            ("lr", 1e-12, 100.0),
            ("stiefel_lr", 1e-12, 10.0),
            ("weight_decay", 0.0, 100.0),
            ("warmup", 0.0, 1.0),
            ("ramp", 0.0, 1.0),
            ("label_smoothing", 0.0, 0.999),
            ("noise", 0.0, 10.0),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} {value} is outside [{low:g}, {high:g}]")
        if self.epochs < 1 or self.batch_size < 1 or (self.patience is not None and self.patience < 1):
            raise UsageError("--epochs, --batch-size and --patience must be at least 1")

    def parameters(self) -> dict[str, object]:
        """For the lineage: everything but the seed, which has its own place there."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "seed"}
