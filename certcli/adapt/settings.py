"""The settings of adapt, which are also its options. Importing this file imports no torch."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

from certcli.system.errors import UsageError, raise_if
from certcli.system.options import option
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
GOALS = {"keep": ("keep", "floor", "keep"), "certify": ("l2", "center", "convex")}
"""--goal -> attention, norm and residual where no option names them.

keep: the network keeps its answers. A floor bounds the rows that dot-product attention reads, which makes it Lipschitz.
certify: parts of small constants, for networks that are then trained against their bound.
"""
CHOICES: Mapping[str, Collection[str]] = {
    "goal": GOALS,
    "attention": ATTENTIONS,
    "norm": NORMS,
    "residual": RESIDUALS,
    "activation": ACTIVATIONS,
}
KEEP_HEAD = "keep"
HEAD = (128, 128)
"""Widths of the head that --goal certify takes where no option names one. From the old head
`finetune --loss margin` ended at chance, from this one it learnt (a ViT on digits, one on MNIST)."""
EPOCHS = 3
DISTILL = 5

_fitting = partial(option, panel="Fitting")


def _widths(text: str) -> tuple[int, ...] | str:
    """Return the widths of --head; "keep" as it is."""
    if text == KEEP_HEAD:
        return KEEP_HEAD
    parts = text.replace(",", " ").split()
    widths = tuple(int(part) if part.isdecimal() else 0 for part in parts)
    wrong = not widths or any(width < 2 or width % 2 for width in widths)
    message = f"--head '{text}' is neither keep nor even widths"
    raise_if(wrong, UsageError, message, "--head 128,128")
    return widths


@dataclass(frozen=True)
class AdaptSettings:
    """The parts that are replaced, and how the new parts are fitted to the old ones.

    Where a part is None the goal names it. Named parts win over the goal, and then the new parts
    are fitted.

    Args:
        keep: None where the images decide.
        head: a tuple of widths puts the tokens side by side into a MaxMin MLP of these widths. None
            and "keep" leave the head; for None a command may choose `HEAD`.
        epochs: AdamW epochs a block after the closed forms; 0 takes closed forms only, -1 starts
            from the weights alone and needs no images.
        refit: False where floors below every deviation seen are the only change, which leaves
            nothing to fit.

    Raises:
        UsageError: a value is unknown or out of its range.
    """

    panel: ClassVar[str] = "Surgery"
    goal: str = option(
        "keep",
        "keep: the network keeps its predictions; certify: parts for certified training.",
    )
    keep: float | None = option(
        None,
        "With --goal keep: fraction of top-1 predictions to preserve. Default: 0.98 with "
        "--dataset, else 1 (only norms change).",
    )
    attention: str = option(
        None, "l2 (Kim et al., tied), l2-untied-value, scsa, lnorm, conv, orthogonal; keep or dp."
    )
    norm: str = option(
        None,
        "center, floor (LayerNorm above a floor), fold (center, multiplied into the next "
        "map), keep.",
    )
    residual: str = option(None, "convex: (1-t)x + t f; weighted: x + a f; or keep.")
    activation: str = option(
        "keep", "keep, or a function of slope 1: relu, maxmin (preserves the gradient norm)."
    )
    head: tuple[int, ...] | str | None = option(
        None,
        "Widths such as 128,128: tokens side by side into a MaxMin MLP; or keep. "
        "Default: keep; 128,128 with --goal certify and at most 100 classes.",
        read=_widths,
    )
    epochs: int = _fitting(
        None,
        "AdamW epochs a block; 0: closed forms only; -1: no images. Default: 3, or 0 if "
        "only norms change.",
    )
    distill: int = _fitting(
        None,
        "Epochs of distillation from the old network, at the end. Default: 5, or 0 "
        "without --epochs.",
    )
    lr: float = _fitting(0.005, "Learning rate, relative to the size of each tensor.")
    batch_size: int = 64
    seed: int = 0
    refit: bool = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise UsageError(f"unknown --{name} '{value}'", one_of(value, choices))
        attention, norm, residual = GOALS[self.goal]
        self._default(attention=attention, norm=norm, residual=residual)
        others = self.residual == self.activation == "keep" and self.widths is None
        floors_alone = others and self.attention in ("keep", "dp") and self.norm == "floor"
        self._default(refit=not (self.goal == "keep" and floors_alone and self.epochs is None))
        self._default(epochs=EPOCHS if self.refit else 0)
        self._default(distill=DISTILL if self.epochs > 0 else 0)
        raise_if(
            self.epochs < -1 or self.distill < 0 or self.lr <= 0 or self.batch_size < 1,
            UsageError,
            "--epochs must be at least -1, --distill at least 0, --lr and --batch-size positive",
        )
        raise_if(
            self.distill > 0 and not self.refit,
            UsageError,
            "--distill trains new parts, and --goal keep alone fits none",
            "--epochs 3 --distill 5",
        )
        if self.keep is not None:
            from certcli.evaluation.fidelity import check_keep  # which imports torch

            check_keep(self.keep)
        raise_if(
            self.keep is not None and self.refit,
            UsageError,
            "--keep belongs to --goal keep, which chooses the parts itself",
            "drop --keep, or the options that name parts",
        )

    def _default(self, **values: Any) -> None:
        """Set the fields that are None."""
        for name, value in values.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def widths(self) -> tuple[int, ...] | None:
        """The widths of a new head; None: the head stays."""
        return self.head if isinstance(self.head, tuple) else None

    def parameters(self) -> dict[str, Any]:
        """Return what the lineage records, and what a resumed run must share."""
        left_out = {"seed", "goal", "keep", *(["refit"] if self.refit else [])}
        values = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {**values, "head": None if self.widths is None else list(self.widths)}
