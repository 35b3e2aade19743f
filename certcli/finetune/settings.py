"""The settings of a training run, which are also its options. Importing this file imports no torch."""

from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, Literal

from certcli.evaluation.radii import parse_radius
from certcli.finetune.agreement import (
    FILLED_IN,
    SWITCHES,
    require_agreement,
    require_ranges,
)
from certcli.finetune.augmentations import BANDS, SQUARES, require_known_augmentations
from certcli.finetune.budget import parse_duration
from certcli.finetune.losses import LOSSES, NEEDS_ENCLOSURE, NEEDS_PAIRS
from certcli.finetune.rates import rate_curve
from certcli.system.errors import UsageError
from certcli.system.options import option

EPOCHS = 40
"""Of a fresh network."""
LINF_EPSILON = 8 / 255
"""Radius of training attacks in linf where none is named."""

_length = partial(option, panel="Length of the run")
_optimiser = partial(option, panel="Optimiser")
_augmentation = partial(option, panel="Augmentation")
_norms = partial(option, panel="Norms of the weights")
_enclosure = partial(option, panel="Local certificates")
_attack = partial(option, panel="Attacks on training images")


def _three_weights(text: str) -> tuple[float, float, float]:
    """Return the weights of query, key and value from one number or three."""
    try:
        weights = [float(part) for part in text.split(",")]
        query, key, value = weights * 3 if len(weights) == 1 else weights
    except ValueError as failure:
        raise UsageError(
            f"--msvp '{text}' is neither one number nor three",
            "--msvp 1e-4 or --msvp 1e-4,1e-4,2e-4",
        ) from failure
    return query, key, value


def _factors_of_places(text: str) -> tuple[float, float, float]:
    """Return the factors of norms, softmax and activations."""
    try:
        norm, softmax, activation = (float(part) for part in text.split(","))
    except ValueError as failure:
        raise UsageError(
            f"--penalty-places '{text}' is not three numbers", "--penalty-places 1,0.03,3"
        ) from failure
    return norm, softmax, activation


@dataclass(frozen=True)
class FinetuneSettings:
    """Everything that decides the result of a training run; fields without an `Option` come from
    elsewhere.

    Args:
        epsilon: rises from 20 % of its value (from 0 for losses through a chain) over the first
            `ramp` of the steps.
        optimiser, lr, epochs, attack_epsilon: None becomes the default that the option's help
            states.
        teacher: digest of the teacher's tensors.
        denoiser: digest of the function that noisy images pass before the network.
        time_budget: as typed; a planned run holds the result in `steps` and `validation_limit`.

    Raises:
        UsageError: a value is unknown or out of its range, or two options contradict each other.
    """

    panel: ClassVar[str] = "Objective"
    loss: str = option(
        "margin",
        "ce; certified training: margin, gloro, lmt, emma, trades, hinge-kr; chains: bcp, "
        "local-lip; local certificates: local.",
    )
    epsilon: float = option(
        0.5,
        "Radius to certify, pixel l2: 0.5 or 36/255.",
        "--epsilon",
        "-e",
        metavar="R",
        read=parse_radius,
    )
    ramp: float = option(0.3, "Share of the steps in which epsilon rises to its value.")
    epochs: int = _length(
        None,
        "Passes over the training images. Default: 40; 3 for a trained network (10 if it "
        "is small).",
    )
    steps: int | None = _length(None, "Number of optimiser steps, in place of --epochs.")
    time_budget: str | None = _length(
        None, "Time for the training and the final proof: 90s, 10m, 1h.", metavar="TIME"
    )

    optimiser: Literal["adamw", "sgd", "stiefel"] = _optimiser(
        None,
        "adamw, sgd, or stiefel (matrices kept orthogonal; the default of losses that "
        "need a bound).",
        "--optimiser",
        "--optimizer",
    )
    lr: float = _optimiser(
        None,
        "Learning rate. Default: 0.01 with stiefel (biases, residual weights, head), "
        "otherwise 0.001; 5e-5 for a trained network (5e-4 if it is small).",
    )
    stiefel_lr: float = _optimiser(0.03, "Learning rate of the orthogonal matrices.")
    weight_decay: float = _optimiser(0.05, "Weight decay of adamw and sgd.")
    schedule: str = _optimiser(
        "cosine",
        "cosine, steps (a tenth after 7/8 of the run, a hundredth after 19/20), "
        "one-cycle; or cosine:LAST, exponential:LAST@SHARE, steps:FACTOR@SHARE,SHARE.",
    )
    warmup: float = _optimiser(0.02, "Share of the steps with a rising learning rate.")
    clip_grad: float | None = _optimiser(None, "Largest norm of the gradient of all parameters.")
    precision: Literal["float32", "bf16"] = _optimiser(
        "float32", "Precision of the network: float32 or bf16; the bound stays float32."
    )
    sam: float = _optimiser(0.0, "Radius of sharpness-aware minimisation; 0: none.", metavar="RHO")
    ema: float = _optimiser(
        0.0, "Decay of a moving average of the weights; 0: none.", metavar="DECAY"
    )

    noise: float = _augmentation(0.0, "Deviation of Gaussian pixel noise on training images.")
    augment: tuple[str, ...] | None = _augmentation(
        None,
        "Any of crop,flip,shift,warp,color-jitter:0.4,cutout:2x128; parts of images: "
        "bands:3,cutout-random:2x96,cutout-greedy:2x96.",
        metavar="LIST",
        read=lambda text: tuple(name for name in text.split(",") if name) or None,
    )

    msvp: tuple[float, float, float] | None = _norms(
        None,
        "Penalty on the spectral norms of query, key and value, per head.",
        metavar="L|Lq,Lk,Lv",
        read=_three_weights,
    )
    enclosure_penalty: float = _enclosure(
        0.0,
        "Weight of a penalty after which certify --method local proves more, e.g. 0.3.",
        metavar="W",
    )
    penalty_places: tuple[float, float, float] | None = _enclosure(
        None,
        "Factors of --enclosure-penalty for norms, softmax, activations. Default: 1,1,1; "
        "1,0.03,3 keeps attention in use.",
        metavar="N,S,A",
        read=_factors_of_places,
    )
    worst_weight: float = _enclosure(
        0.4,
        "Weight of the worst logits in --loss local. Less keeps more clean accuracy.",
        metavar="W",
    )
    enclosed: int = _enclosure(8, "Images of each batch that --loss local encloses.", metavar="N")
    adversarial: Literal["none", "fgsm", "pgd"] = _attack(
        "none", "Adversarial training: none, fgsm or pgd."
    )
    attack_norm: Literal["l2", "linf"] = _attack("linf", "Norm of the training attack: linf or l2.")
    attack_epsilon: float = _attack(
        None,
        "Radius of the attack. Default: 8/255 in linf, --epsilon in l2.",
        metavar="R",
        read=parse_radius,
    )
    attack_steps: int = _attack(10, "Steps of pgd.")
    attack_step_size: float | None = _attack(
        None,
        "Step size. Default: 2.5 radii / steps, fgsm 1.25 radii.",
        metavar="A",
        read=parse_radius,
    )
    attack_ramp: float = _attack(
        0.0, "Share of the steps in which the attack's radius rises to its value; 0: at once."
    )
    ard: float = _attack(
        0.0,
        "Drop the attack's gradient through each attention with probability P, at first.",
        metavar="P",
    )
    prm: float = _attack(
        0.0, "Drop the attack's change on a share P of the patches, at first.", metavar="P"
    )

    validation_limit: int | None = option(
        None, "Validate on a seeded, class-balanced sample.", metavar="N", panel="Images"
    )
    teacher: str | None = None
    denoiser: str | None = None
    batch_size: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        LOSSES[self.loss]
        if self.optimiser is None:
            usual = "stiefel" if self.loss in NEEDS_PAIRS else "adamw"
            object.__setattr__(self, "optimiser", usual)
        chosen = {"lr": self.lr, "epochs": self.epochs}
        self.__dict__["_unsaid"] = frozenset(name for name in chosen if chosen[name] is None)
        if self.epochs is None:
            object.__setattr__(self, "epochs", EPOCHS)
        if self.lr is None:
            object.__setattr__(self, "lr", 0.01 if self.optimiser == "stiefel" else 0.001)
        if self.adversarial == "none" and self.attack_epsilon not in (None, LINF_EPSILON):
            raise UsageError(
                "--attack-epsilon has no meaning without --adversarial", "both, or neither"
            )
        if self.attack_epsilon is None:
            object.__setattr__(
                self, "attack_epsilon", LINF_EPSILON if self.attack_norm == "linf" else self.epsilon
            )
        require_ranges(self)
        require_known_augmentations(self.augment or ())
        rate_curve(self.schedule, self.lr, self.warmup)
        if self.time_budget is not None:
            parse_duration(self.time_budget)
        require_agreement(self)

    @property
    def unsaid(self) -> frozenset[str]:
        """Return which of lr and epochs nobody named; `replace` names all."""
        names: frozenset[str] = self.__dict__["_unsaid"]
        return names

    @property
    def is_for_local(self) -> bool:
        """Tell whether the run is to make local certificates larger."""
        return self.loss in NEEDS_ENCLOSURE or self.enclosure_penalty > 0

    @property
    def hiding(self) -> tuple[str, ...]:
        """Return the augmentations that hide a part of each image from the network."""
        return tuple(
            name for name in self.augment or () if BANDS.fullmatch(name) or SQUARES.fullmatch(name)
        )

    def is_default(self, name: str) -> bool:
        """Tell whether an option is as nobody named it; `FILLED_IN` are not asked."""
        if name in FILLED_IN:
            return True
        return bool(getattr(self, name) == type(self).__dataclass_fields__[name].default)

    def parameters(self) -> dict[str, object]:
        """Return what the lineage records: the settings that are on, without the seed."""
        hidden = {"seed"} | ({"epochs"} if self.steps is not None else set())
        for switch, dependants in SWITCHES.items():
            if self.is_default(switch):
                hidden |= {switch, *dependants}
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in hidden
        }
