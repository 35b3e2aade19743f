"""What a training run is: every number that decides its result, and nothing else."""

import math
import re
from dataclasses import dataclass

from certcli.finetune.losses import LOSSES, NEEDS_CHAIN
from certcli.finetune.projections import PROJECTIONS
from certcli.system.errors import UsageError
from certcli.system.registry import one_of

OPTIMISERS = ("adamw", "sgd", "stiefel")
SCHEDULES = ("cosine", "steps")
PRECISIONS = ("float32", "bf16", "fp16")
ADVERSARIES = ("none", "fgsm", "pgd", "trades")
NORMS = ("l2", "linf")
AUGMENTATIONS = ("crop", "flip", "shift")
CUTOUT = re.compile(r"cutout:([1-9][0-9]?)x([1-9][0-9]{0,4})")
"""How many squares, and their side in pixels."""
BANDS = re.compile(r"bands:([1-9][0-9]{0,3})")
"""How many columns of cells stay: tokens, where they can be dropped."""
SQUARES = re.compile(r"cutout-(random|greedy):([12])x([1-9][0-9]{0,4})")
"""How the places are chosen; then as CUTOUT. Four squares could hide a whole image, and a certificate hides two."""

CHOICES: dict[str, tuple[str, ...]] = {
    "optimiser": OPTIMISERS,
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
    "adversarial": ADVERSARIES,
    "attack_norm": NORMS,
    "project": PROJECTIONS,
}
RANGES: dict[str, tuple[float, float]] = {
    "epsilon": (0.0, 1e6),
    "lr": (1e-12, 100.0),
    "stiefel_lr": (1e-12, 10.0),
    "weight_decay": (0.0, 100.0),
    "warmup": (0.0, 1.0),
    "ramp": (0.0, 1.0),
    "label_smoothing": (0.0, 0.999),
    "noise": (0.0, 10.0),
    "clip_grad": (1e-12, 1e12),
    "mixup": (0.0, 1e3),
    "cutmix": (0.0, 1e3),
    "mix_probability": (0.0, 1.0),
    "project_radius": (1e-6, 1e6),
    "sam": (0.0, 100.0),
    "ema": (0.0, 0.999999),
    "distill_weight": (0.0, 1.0),
    "distill_temperature": (1e-3, 1e3),
    "attack_epsilon": (0.0, 1e6),
    "attack_step_size": (0.0, 1e6),
    "trades_beta": (0.0, 1e6),
    "ard": (0.0, 1.0),
    "prm": (0.0, 1.0),
    "mask_decay": (0.0, 1.0),
}
COUNTS = ("epochs", "steps", "batch_size", "accumulate", "patience", "attack_steps", "validation_limit")

SWITCHES: dict[str, tuple[str, ...]] = {
    "steps": (),
    "accumulate": (),
    "schedule": (),
    "clip_grad": (),
    "augment": (),
    "mixup": ("mix_probability",),
    "cutmix": ("mix_probability",),
    "msvp": (),
    "project": ("project_radius",),
    "sam": ("adaptive_sam",),
    "ema": (),
    "teacher": ("distill_weight", "distill_temperature"),
    "precision": (),
    "checkpointing": (),
    "adversarial": (
        *("attack_norm", "attack_epsilon", "attack_steps", "attack_step_size", "trades_beta"),
        *("ard", "prm", "mask_decay"),
    ),
    "validation_limit": (),
    "time_budget": (),
}
"""Options that the lineage names only when they are on, each with the options that mean something only beside it."""


@dataclass(frozen=True)
class FinetuneSettings:
    """epsilon: pixel l2 radius of the losses that read the bound; it ramps from 20 % (0 for those through a
    chain) over the first `ramp` of the steps.

    lr: of AdamW / SGD (with `stiefel`: of biases, residual weights and head); stiefel_lr: of the orthogonal matrices.
    steps: optimiser steps in all, in place of `epochs`. One step reads accumulate x batch_size images. teacher: digest
    of the teacher's tensors. ard, prm: shares at the start; they fall to 0 over the first `mask_decay` of the steps
    (0: they stay). time_budget: as typed; what it resolved to stands in `steps` and `validation_limit`.
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
    steps: int | None = None
    accumulate: int = 1
    schedule: str = "cosine"
    clip_grad: float | None = None
    augment: tuple[str, ...] = ()
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    msvp: tuple[float, float, float] | None = None
    project: str | None = None
    project_radius: float = 1.0
    sam: float = 0.0
    adaptive_sam: bool = False
    ema: float = 0.0
    teacher: str | None = None
    distill_weight: float = 0.5
    distill_temperature: float = 2.0
    precision: str = "float32"
    checkpointing: bool = False
    adversarial: str = "none"
    attack_norm: str = "linf"
    attack_epsilon: float = 8 / 255
    attack_steps: int = 10
    attack_step_size: float | None = None
    trades_beta: float = 6.0
    ard: float = 0.0
    prm: float = 0.0
    mask_decay: float = 0.25
    validation_limit: int | None = None
    time_budget: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        LOSSES[self.loss]
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise UsageError(f"unknown {name.replace('_', ' ')} '{value}'", one_of(value, known))
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise UsageError(f"--{name.replace('_', '-')} {value} is outside [{low:g}, {high:g}]")
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        for name in self.augment:
            if name not in AUGMENTATIONS and not any(kind.fullmatch(name) for kind in (CUTOUT, BANDS, SQUARES)):
                hint = f"any of: {','.join(AUGMENTATIONS)},cutout:2x128,bands:3,cutout-greedy:2x96"
                raise UsageError(f"unknown augmentation '{name}'", hint)
        if self.msvp is not None and not all(0 <= weight < math.inf for weight in self.msvp):
            raise UsageError(f"--msvp {self.msvp} holds a number that is not finite and >= 0")
        self._require_sense()

    @property
    def hiding(self) -> tuple[str, ...]:
        """The augmentations that hide a part of each image from the network."""
        return tuple(name for name in self.augment if BANDS.fullmatch(name) or SQUARES.fullmatch(name))

    def _require_sense(self) -> None:
        """Options that contradict each other."""
        if self.hiding and self.loss in NEEDS_CHAIN:
            raise UsageError(f"--loss {self.loss} bounds whole images: not with {self.hiding[0]}", "--loss ce")
        if self.hiding and self.checkpointing:
            raise UsageError(f"--checkpointing does not reach passes behind masks: not with {self.hiding[0]}")
        if self.project is not None and self.optimiser == "stiefel":
            raise UsageError("--project would undo what stiefel keeps orthogonal", "--optimiser adamw, or no --project")
        if self.precision == "fp16" and self.sam > 0:
            raise UsageError("--sam needs gradients that do not overflow: not with fp16", "--precision bf16")
        if self.adversarial == "none" and (self.ard > 0 or self.prm > 0):
            raise UsageError("--ard and --prm weaken an attack, and there is none", "--adversarial pgd")
        if self.adversarial != "none" and self.noise > 0:
            raise UsageError("--noise leaves the box of images that an attack starts from", "one of the two")
        if self.adaptive_sam and self.sam == 0:
            raise UsageError("--adaptive-sam needs a radius", "--sam 0.5")

    def parameters(self) -> dict[str, object]:
        """For the lineage: what is on, without the seed, which has its own place there."""
        hidden = {"seed"} | ({"epochs"} if self.steps is not None else set())
        for switch, dependants in SWITCHES.items():
            if getattr(self, switch) == type(self).__dataclass_fields__[switch].default:
                hidden |= {switch, *dependants}
        for switch, dependants in SWITCHES.items():  # an option may serve two switches
            if switch not in hidden:
                hidden -= set(dependants)
        return {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in hidden}
