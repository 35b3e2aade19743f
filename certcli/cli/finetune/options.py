"""The options of `certvit finetune`, a group a panel; each group knows its part of the run's settings."""

from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli.shared import options
from certcli.cli.shared.command import group
from certcli.cli.shared.groups import Data, Machine, Output, Source

if TYPE_CHECKING:
    from certcli.finetune.settings import FinetuneSettings


NO_SETTINGS = ("resume", "shard_weights")
"""Options among those of the recipe that do not decide its result. Any other without a setting is an error."""


@group("Objective")
class Objective:
    """What is to be learned."""

    loss: Annotated[
        str,
        typer.Option(
            help="ce; certified training: margin, gloro, lmt, emma, trades, hinge-kr; chains: bcp, local-lip."
        ),
    ] = "margin"
    epsilon: Annotated[
        float,
        typer.Option(
            "--epsilon",
            "-e",
            parser=options.fraction,
            metavar="R",
            help="Radius to certify, pixel l2: 0.5 or 36/255.",
        ),
    ] = 0.5
    ramp: Annotated[float, typer.Option(help="Share of the steps in which epsilon rises to its value.")] = 0.3
    label_smoothing: Annotated[float, typer.Option(help="Label smoothing of the cross entropy.")] = 0.0


@group("Length of the run")
class Length:
    """When it ends."""

    epochs: Annotated[int, typer.Option(help="Passes over the training images; the schedule ends with them.")] = 40
    steps: Annotated[int | None, typer.Option(help="Optimiser steps in all, in place of --epochs.")] = None
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Train as long as fits, the final proof included: 90s, 10m, 1h."),
    ] = None
    patience: Annotated[int | None, typer.Option(help="Stop after this many epochs without improvement.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run of the same command.")] = False


@group("Optimiser")
class Steps:
    """How one step is made."""

    optimiser: Annotated[
        str | None,
        typer.Option(
            "--optimiser",
            "--optimizer",
            help="adamw, sgd, or stiefel (matrices kept orthogonal; the default of losses that need a bound).",
        ),
    ] = None
    lr: Annotated[
        float | None,
        typer.Option(
            help="Learning rate. Default: 0.01 with stiefel (biases, residual weights, head), otherwise 0.001."
        ),
    ] = None
    stiefel_lr: Annotated[float, typer.Option(help="Learning rate of the orthogonal matrices.")] = 0.05
    weight_decay: Annotated[float, typer.Option(help="Weight decay of adamw and sgd.")] = 0.05
    schedule: Annotated[
        str, typer.Option(help="cosine, or steps (a tenth after 7/8 of the run, a hundredth after 19/20).")
    ] = "cosine"
    warmup: Annotated[float, typer.Option(help="Share of the steps with a rising learning rate.")] = 0.02
    clip_grad: Annotated[
        float | None, typer.Option(help="Largest length of the gradient, all parameters together.")
    ] = None
    accumulate: Annotated[int, typer.Option(metavar="N", help="Batches whose gradients make one step.")] = 1
    precision: Annotated[
        str, typer.Option(help="Precision of the network: float32, bf16 or fp16; the bound stays float32.")
    ] = "float32"
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations instead of keeping them.")
    ] = False
    shard_weights: Annotated[
        bool,
        typer.Option(
            "--shard-weights",
            help="Under torchrun: each process keeps a part of the weights (ce, with adamw or sgd).",
        ),
    ] = False
    sam: Annotated[float, typer.Option(metavar="RHO", help="Radius of sharpness-aware minimisation; 0: none.")] = 0.0
    adaptive_sam: Annotated[
        bool, typer.Option("--adaptive-sam", help="Measure RHO relative to each weight's size.")
    ] = False
    ema: Annotated[float, typer.Option(metavar="DECAY", help="Decay of a moving average of the weights; 0: none.")] = (
        0.0
    )


@group("Augmentation")
class Augmentation:
    """What is done to the training images."""

    noise: Annotated[float, typer.Option(help="Standard deviation of Gaussian pixel noise on training images.")] = 0.0
    augment: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Any of crop,flip,shift,cutout:2x128; parts of images: bands:3,cutout-random:2x96,cutout-greedy:2x96.",
        ),
    ] = None
    mixup: Annotated[float, typer.Option(help="Mixup with lambda ~ Beta(A, A); 0: none.")] = 0.0
    cutmix: Annotated[float, typer.Option(help="CutMix with lambda ~ Beta(A, A); 0: none.")] = 0.0
    mix_probability: Annotated[float, typer.Option(help="Share of the batches that are mixed.")] = 1.0


@group("Norms of the weights")
class Norms:
    """What keeps the weights small."""

    msvp: Annotated[
        str | None,
        typer.Option(metavar="L|Lq,Lk,Lv", help="Penalty on the spectral norms of query, key and value, per head."),
    ] = None
    project: Annotated[
        str | None,
        typer.Option(help="After each step bring norms to the radius: ball (larger norms only) or spectral (all)."),
    ] = None
    project_radius: Annotated[float, typer.Option(help="Largest spectral norm that --project leaves.")] = 1.0


@group("Teacher")
class Distillation:
    """Another network's answers."""

    teacher: Annotated[
        str | None,
        typer.Option(metavar="CKPT", help="Learn from this network's answers too (distillation)."),
        options.Reads(),
    ] = None
    distill_weight: Annotated[float, typer.Option(help="Share of the teacher in the loss.")] = 0.5
    distill_temperature: Annotated[float, typer.Option(help="Temperature of both answers.")] = 2.0


@group("Attacks on training images")
class Adversary:
    """Images attacked as they are learned."""

    adversarial: Annotated[
        str, typer.Option(help="none, fgsm, pgd or trades: train on images attacked on the fly.")
    ] = "none"
    attack_norm: Annotated[str, typer.Option(help="Norm of the training attack: linf or l2.")] = "linf"
    attack_epsilon: Annotated[
        float | None,
        typer.Option(
            parser=options.fraction, metavar="R", help="Radius of the attack. Default: 8/255 in linf, --epsilon in l2."
        ),
    ] = None
    attack_steps: Annotated[int, typer.Option(help="Steps of pgd and trades.")] = 10
    attack_step_size: Annotated[
        float | None,
        typer.Option(
            parser=options.fraction, metavar="A", help="Size of a step. Default: 2.5 radii over all steps, fgsm 1.25."
        ),
    ] = None
    trades_beta: Annotated[float, typer.Option(help="Weight of the divergence in --adversarial trades.")] = 6.0
    ard: Annotated[
        float,
        typer.Option(
            metavar="P", help="At first, the attack misses the gradient of each attention with probability P."
        ),
    ] = 0.0
    prm: Annotated[
        float,
        typer.Option(metavar="P", help="At first, the attack loses its perturbation on a share P of the patches."),
    ] = 0.0
    mask_decay: Annotated[
        float, typer.Option(help="Share of the steps in which --ard and --prm fall to 0; 0: they stay.")
    ] = 0.25


@group("Images")
class TrainingImages(Data):
    """Images to learn from, and how many to choose by."""

    validation_limit: Annotated[
        int | None, typer.Option(metavar="N", help="Validate on a seeded, class-balanced sample.")
    ] = None


@group()
class Order:
    """One run: the network to start from, the recipe in its groups, what it reads and what it writes."""

    source: Source
    objective: Objective = Objective()
    length: Length = Length()
    steps: Steps = Steps()
    augmentation: Augmentation = Augmentation()
    norms: Norms = Norms()
    distillation: Distillation = Distillation()
    adversary: Adversary = Adversary()
    data: TrainingImages = TrainingImages()
    machine: Machine = Machine(batch_size=128)
    output: Output = Output()

    def settings(self) -> "FinetuneSettings":
        """Return every number that decides the result, defaults filled in.

        Raises:
            UsageError: two options contradict each other.
        """
        from certcli.finetune.budget import parse_duration
        from certcli.finetune.losses import NEEDS_PAIRS
        from certcli.finetune.settings import FinetuneSettings
        from certcli.system.errors import UsageError

        if self.length.time_budget is not None:
            parse_duration(self.length.time_budget)
            if self.length.steps is not None:
                raise UsageError("--steps and --time-budget both say how long", "one of the two")
        orthogonal = self.objective.loss in NEEDS_PAIRS and self.norms.project is None
        optimiser = self.steps.optimiser or ("stiefel" if orthogonal else "adamw")
        usual = 8 / 255 if self.adversary.attack_norm == "linf" else self.objective.epsilon
        recipe = (
            self.objective,
            self.length,
            self.steps,
            self.augmentation,
            self.norms,
            self.distillation,
            self.adversary,
        )
        as_given = {name: value for part in recipe for name, value in vars(part).items() if name not in NO_SETTINGS}
        filled = {
            "optimiser": optimiser,
            "lr": (0.01 if optimiser == "stiefel" else 0.001) if self.steps.lr is None else self.steps.lr,
            "augment": tuple(name for name in (self.augmentation.augment or "").split(",") if name),
            "msvp": None if self.norms.msvp is None else _three_weights(self.norms.msvp),
            "attack_epsilon": usual if self.adversary.attack_epsilon is None else self.adversary.attack_epsilon,
            "teacher": None,  # the digest of --teacher's file, which is known once it is read
            "batch_size": self.machine.batch_size,
            "seed": self.data.seed,
            "validation_limit": self.data.validation_limit,
        }
        return FinetuneSettings(**{**as_given, **filled})


def _three_weights(text: str) -> tuple[float, float, float]:
    """Weights of query, key and value from one number or three."""
    from certcli.system.errors import UsageError

    try:
        weights = [float(part) for part in text.split(",")]
        if len(weights) not in (1, 3):
            raise ValueError
    except ValueError as failure:
        raise UsageError(
            f"--msvp '{text}' is neither one number nor three", "--msvp 1e-4 or --msvp 1e-4,1e-4,2e-4"
        ) from failure
    query, key, value = weights * 3 if len(weights) == 1 else weights
    return query, key, value
