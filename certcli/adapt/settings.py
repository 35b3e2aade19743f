"""What adapt replaces, and how the new parts are fitted to the old ones."""

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
GOALS = {
    "keep": {"attention": "keep", "norm": "floor", "residual": "keep"},
    "certify": {"attention": "l2", "norm": "center", "residual": "convex"},
}
"""--goal -> what is replaced unless told otherwise.

keep: the network goes on answering as it did. Dot-product attention is Lipschitz once a floor bounds the rows that it
reads, and the closed forms fit all that a floor changes. certify: parts of small constants, for networks that are trained
against their bound afterwards.
"""


@dataclass(frozen=True)
class AdaptSettings:
    """What is replaced, and how the new parts are fitted to the old ones.

    norm_floor: of --norm floor; None takes the 5 % quantile of each layer's deviations on the calibration images. head:
    None keeps it; a tuple of widths puts the tokens side by side into a MaxMin MLP of these widths (() is one linear
    layer). epochs: AdamW epochs a block after the closed forms; 0 is surgery with closed-form starts, -1 surgery with
    starts from the weights alone, which need no images. distill: epochs of end-to-end training on the old logits after
    the blocks; None is 5, or none where epochs is not positive. lr: relative to the size of each tensor. refit: False
    where nothing but LayerNorms is replaced, by floors below every deviation seen, so that there is nothing to fit
    (`floors.py`).
    """

    attention: str = "l2"
    norm: str = "center"
    residual: str = "convex"
    activation: str = "keep"
    head: tuple[int, ...] | None = None
    epochs: int = 3
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

    def parameters(self) -> dict[str, Any]:
        """What the lineage records of a run, and what a resumed run must have in common with it."""
        values = asdict(self)
        del values["seed"]
        values["distill"] = self.distill_epochs
        values["head"] = None if self.head is None else list(self.head)
        if self.norm_floor is None:
            del values["norm_floor"]
        if self.refit:
            del values["refit"]
        return values


def settings_for(goal: str, **given: Any) -> AdaptSettings:
    """AdaptSettings of a goal; what is None in `given` is the goal's to choose. UsageError for an unknown goal.

    Where the goal is `keep` and nothing is replaced but norms by floors, floors below every deviation seen leave nothing to
    fit: `refit` is False, unless epochs or a floor are given. Else epochs are 3.
    """
    if goal not in GOALS:
        raise UsageError(f"unknown --goal '{goal}'", f"one of: {', '.join(GOALS)}")
    chosen: dict[str, Any] = {**GOALS[goal], **{name: value for name, value in given.items() if value is not None}}
    replaced = [chosen.get("residual"), chosen.get("activation", "keep"), chosen.get("head") or "keep"]
    same = chosen["attention"] in ("keep", "dp") and chosen["norm"] == "floor" and set(replaced) == {"keep"}
    if goal == "keep" and same and not {"epochs", "norm_floor"} & set(chosen):
        chosen |= {"epochs": 0, "refit": False}
    return AdaptSettings(**chosen)
