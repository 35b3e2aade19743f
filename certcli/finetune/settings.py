"""The settings of a training run, which are also its options, and which of them are allowed, alone
and together. Importing this file imports no torch."""

import math
from dataclasses import dataclass, fields
from functools import partial
from typing import ClassVar, Literal

from certcli.evaluation.threat import parse_radius
from certcli.finetune.losses import LOSSES, NEEDS_CHAIN, NEEDS_ENCLOSURE, NEEDS_PAIRS
from certcli.finetune.option_texts import (
    BANDS,
    SQUARES,
    parse_duration,
    rate_curve,
    require_known_augmentations,
)
from certcli.system.errors import UsageError, raise_if
from certcli.system.options import option, require_choices

EPOCHS = 40
"""Of a fresh network."""
LINF_EPSILON = 8 / 255
"""Radius of training attacks in linf where none is named."""

RANGES: dict[str, tuple[float, float]] = {
    "epsilon": (0.0, 1e6),
    "lr": (1e-12, 100.0),
    "stiefel_lr": (1e-12, 10.0),
    "weight_decay": (0.0, 100.0),
    "warmup": (0.0, 1.0),
    "ramp": (0.0, 1.0),
    "noise": (0.0, 10.0),
    "clip_grad": (1e-12, 1e12),
    "worst_weight": (0.0, 1.0),
    "sam": (0.0, 100.0),
    "ema": (0.0, 0.999999),
    "attack_epsilon": (0.0, 1e6),
    "attack_ramp": (0.0, 1.0),
    "ard_prm": (0.0, 1.0),
    **dict.fromkeys(
        ("epochs", "steps", "batch_size", "attack_steps", "validation_limit", "enclosed"),
        (1, math.inf),
    ),
}

SWITCHES: dict[str, tuple[str, ...]] = {
    "steps": (),
    "schedule": (),
    "clip_grad": (),
    "augment": (),
    "msvp": (),
    "enclosure_penalty": (),
    "worst_weight": (),
    "enclosed": (),
    "sam": (),
    "ema": (),
    "denoiser": (),
    "teacher": (),
    "precision": (),
    "adversarial": ("attack_norm", "attack_epsilon", "attack_steps", "attack_ramp", "ard_prm"),
    "validation_limit": (),
    "time_budget": (),
}
"""Settings that the lineage names only when they are on, each with the settings that have a meaning
only then."""

FILLED_IN = ("attack_epsilon",)
"""Dependants with a default of another option."""

OF_A_CHOICE: dict[str, tuple[str, tuple[str, ...]]] = {
    "attack_steps": ("adversarial", ("pgd",)),
    "stiefel_lr": ("optimiser", ("stiefel",)),
    "weight_decay": ("optimiser", ("adamw", "sgd")),
    "worst_weight": ("loss", tuple(sorted(NEEDS_ENCLOSURE))),
    "enclosed": ("loss", tuple(sorted(NEEDS_ENCLOSURE))),
    "ramp": ("loss", tuple(sorted(NEEDS_PAIRS | NEEDS_CHAIN | NEEDS_ENCLOSURE))),
}
"""Options that mean something with these values of another option only."""

_length = partial(option, panel="Length of the run")
_optimiser = partial(option, panel="Optimiser")
_augmentation = partial(option, panel="Augmentation")
_norms = partial(option, panel="Norms of the weights")
_enclosure = partial(option, panel="Local certificates")
_attack = partial(option, panel="Attacks on training images")


def _three_weights(text: str) -> tuple[float, float, float]:
    """Return the weights of three parts of a penalty from one number or three."""
    try:
        weights = [float(part) for part in text.split(",")]
        first, second, third = weights * 3 if len(weights) == 1 else weights
    except ValueError as failure:
        raise UsageError(
            f"'{text}' is neither one number nor three", "1e-4 or 1e-4,1e-4,2e-4"
        ) from failure
    return first, second, third


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
        "local-lip, local-lip-gloro; local certificates: local.",
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
    enclosure_penalty: tuple[float, float, float] | None = _enclosure(
        None,
        "Weight of a penalty after which certify --method local proves more, e.g. 0.3; or of "
        "its parts for norms, softmax, activations: 0.3,0.009,0.9 keeps attention in use.",
        metavar="W|N,S,A",
        read=_three_weights,
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
    attack_ramp: float = _attack(
        0.0, "Share of the steps in which the attack's radius rises to its value; 0: at once."
    )
    ard_prm: float = _attack(
        0.0,
        "Drop the attack's gradient through each attention, and its change on each patch, with "
        "probability P, at first.",
        metavar="P",
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
        raise_if(
            self.adversarial == "none" and self.attack_epsilon not in (None, LINF_EPSILON),
            UsageError,
            "--attack-epsilon has no meaning without --adversarial",
            "both, or neither",
        )
        unsaid = [name for name in ("lr", "epochs") if getattr(self, name) is None]
        self.__dict__["_unsaid"] = frozenset(unsaid)
        orthogonal = self.loss in NEEDS_PAIRS and self.optimiser is None
        defaults = {
            "optimiser": "stiefel" if orthogonal else "adamw",
            "epochs": EPOCHS,
            "lr": 0.01 if orthogonal or self.optimiser == "stiefel" else 0.001,
            "attack_epsilon": LINF_EPSILON if self.attack_norm == "linf" else self.epsilon,
        }
        for name, usual in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, usual)
        require_ranges(self)
        require_known_augmentations(self.augment or ())
        rate_curve(self.schedule, self.lr, self.warmup)
        if self.time_budget is not None:
            parse_duration(self.time_budget)
        require_agreement(self)

    @property
    def unsaid(self) -> frozenset[str]:
        """Return which of lr and epochs nobody named; `replace` names all."""
        return frozenset(self.__dict__["_unsaid"])

    @property
    def is_for_local(self) -> bool:
        """Tell whether the run is to make local certificates larger."""
        return self.loss in NEEDS_ENCLOSURE or self.enclosure_penalty is not None

    @property
    def hiding(self) -> tuple[str, ...]:
        """Return the augmentations that hide a part of each image from the network."""
        return tuple(
            name for name in self.augment or () if BANDS.fullmatch(name) or SQUARES.fullmatch(name)
        )

    def is_default(self, name: str) -> bool:
        """Tell whether an option is as nobody named it; `FILLED_IN` are not asked."""
        default = type(self).__dataclass_fields__[name].default
        return name in FILLED_IN or bool(getattr(self, name) == default)

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


def option_of(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"


def require_ranges(settings: FinetuneSettings) -> None:
    """Raise UsageError for a value that is unknown or outside its range."""
    require_choices(settings)
    for name, (low, high) in RANGES.items():
        value = getattr(settings, name)
        wrong = value is not None and not low <= value <= high
        raise_if(wrong, UsageError, f"{option_of(name)} {value} is outside [{low:g}, {high:g}]")
    for name in ("msvp", "enclosure_penalty"):
        weights = getattr(settings, name)
        wrong = not all(0 <= weight < math.inf for weight in weights or ())
        message = f"{option_of(name)} {weights} holds a number that is not finite and >= 0"
        raise_if(wrong, UsageError, message)


def require_agreement(settings: FinetuneSettings) -> None:
    """Raise UsageError for options that contradict each other, or that have no meaning."""
    raise_if(
        settings.hiding and settings.loss in NEEDS_CHAIN | NEEDS_ENCLOSURE,
        UsageError,
        f"--loss {settings.loss} bounds whole images: not with {next(iter(settings.hiding), '')}",
        "--loss ce",
    )
    raise_if(
        settings.adversarial != "none" and settings.noise > 0,
        UsageError,
        "--noise and --adversarial exclude each other",
        "one of the two",
    )
    for switch, dependants in SWITCHES.items():
        for name in dependants:
            raise_if(
                settings.is_default(switch) and not settings.is_default(name),
                UsageError,
                f"{option_of(name)} has no meaning without {option_of(switch)}",
                "both, or neither",
            )
    for name, (chooser, values) in OF_A_CHOICE.items():
        chosen = getattr(settings, chooser)
        raise_if(
            chosen not in values and not settings.is_default(name),
            UsageError,
            f"{option_of(name)} has no meaning with --{chooser} {chosen}",
            f"leave it out, or --{chooser} {values[0]}",
        )
