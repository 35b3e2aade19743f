"""The settings of adapt: which parts are replaced, and how the new parts are fitted to the old ones."""

from dataclasses import asdict, dataclass
from typing import Any

from certcli.system.errors import UsageError
from certcli.system.registry import one_of

ATTENTIONS = {
    "l2": "l2-attention",
    "l2-untied-value": "l2-untied-value-attention",
    "scsa": "scsa-attention",
    "lnorm": "lnorm-attention",
    "conv": "conv-attention",
    "orthogonal": "orthogonal-attention",
    "keep": None,
    "dp": None,
}
"""--attention -> the name of its replacement."""
NORMS = {"center": "center-norm", "floor": "floor-norm", "fold": "center-norm", "keep": None}
RESIDUALS = {"convex": "convex-block", "weighted": "weighted-block", "keep": None}
ACTIVATIONS = {"keep": None, "maxmin": "maxmin", "relu": "relu"}
DISTILL = 5
EPOCHS = 3


@dataclass(frozen=True)
class AdaptSettings:
    """Which parts are replaced, and how the new parts are fitted to the old ones.

    Args:
        head: None keeps the head; a tuple of widths puts the tokens side by side into a MaxMin MLP of these widths
            (() is one linear layer).
        epochs: AdamW epochs a block after the closed forms; 0 takes closed forms only, -1 starts from the weights alone
            and needs no images.
        distill: epochs of end-to-end training on the old logits; None means 5, or 0 where `epochs` is not positive.
        lr: relative to the size of each tensor.
        norm_floor: the floor of --norm floor; None takes the 5 % quantile of each layer's deviations on the calibration
            images.
        refit: False where floors below every deviation seen are the only change, which leaves nothing to fit.

    Raises:
        UsageError: a value is unknown or out of its range.
    """

    attention: str = "l2"
    norm: str = "center"
    residual: str = "convex"
    activation: str = "keep"
    head: tuple[int, ...] | None = None
    epochs: int = EPOCHS
    distill: int | None = None
    lr: float = 5e-3
    batch_size: int = 64
    seed: int = 0
    norm_floor: float | None = None
    refit: bool = True

    def __post_init__(self) -> None:
        for name, value, known in (
            ("--attention", self.attention, ATTENTIONS),
            ("--norm", self.norm, NORMS),
            ("--residual", self.residual, RESIDUALS),
            ("--activation", self.activation, ACTIVATIONS),
        ):
            if value not in known:
                raise UsageError(f"unknown {name} '{value}'", one_of(value, known))
        if self.epochs < -1 or self.distill_epochs < 0 or self.lr <= 0 or self.batch_size < 1:
            raise UsageError("--epochs must be at least -1, --distill at least 0, --lr and --batch-size positive")
        if self.norm_floor is not None and not (self.norm == "floor" and 0 < self.norm_floor < float("inf")):
            raise UsageError("--norm-floor needs --norm floor and a positive number", "--norm floor --norm-floor 0.5")

    @property
    def distill_epochs(self) -> int:
        if self.distill is not None:
            return self.distill
        return DISTILL if self.epochs > 0 else 0

    @property
    def only_floors(self) -> bool:
        """Return whether norms with floors are the only replacement."""
        kept = self.attention in ("keep", "dp") and self.residual == self.activation == "keep" and self.head is None
        return kept and self.norm == "floor"

    def parameters(self) -> dict[str, Any]:
        """Return what the lineage records, and what a resumed run must share with the run that it continues."""
        values = asdict(self)
        del values["seed"]
        values["distill"] = self.distill_epochs
        values["head"] = None if self.head is None else list(self.head)
        if self.norm_floor is None:
            del values["norm_floor"]
        if self.refit:
            del values["refit"]
        return values


GOALS = {
    "keep": AdaptSettings("keep", "floor", "keep", epochs=0, refit=False),
    "certify": AdaptSettings("l2", "center", "convex"),
}
"""--goal -> the settings that it implies.

keep: the network keeps its answers. A floor bounds the rows that dot-product attention reads, which makes it Lipschitz.
certify: parts of small constants, for networks that are then trained against their bound.
"""


def settings_for(goal: str) -> AdaptSettings:
    """Return the settings that a goal implies. UsageError for an unknown goal."""
    if goal not in GOALS:
        raise UsageError(f"unknown --goal '{goal}'", f"one of: {', '.join(GOALS)}")
    return GOALS[goal]
