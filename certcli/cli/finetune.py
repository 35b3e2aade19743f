"""certvit finetune: train for accuracy, or for certified accuracy; from a checkpoint, or from scratch after init."""

from typing import Annotated, Any

import typer

from certcli.cli import options
from certcli.cli.output import Sink


def finetune(
    ckpt: options.CheckpointArgument,
    output: options.Output = None,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    loss: Annotated[
        str, typer.Option(help="ce, or of certified training: margin, gloro, lmt, emma, trades, hinge-kr.")
    ] = "margin",
    epsilon: Annotated[
        float,
        typer.Option(
            "--epsilon",
            "-e",
            parser=options.fraction,
            metavar="R",
            help="Radius to be certified, pixel l2: 0.5 or 36/255.",
        ),
    ] = 0.5,
    epochs: Annotated[int, typer.Option(help="Passes over the training images; the schedule ends with them.")] = 40,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps in all, in place of --epochs.")] = None,
    time_budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="As many steps as fit, the final proof included: 90s, 10m, 1h."),
    ] = None,
    optimiser: Annotated[
        str | None,
        typer.Option(
            "--optimiser",
            "--optimizer",
            help="adamw, sgd, or stiefel (matrices kept orthogonal; the default of losses that need a bound).",
        ),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Learning rate; 0.01 with stiefel (of biases, residual weights, head), else 0.001."),
    ] = None,
    stiefel_lr: Annotated[float, typer.Option(help="Learning rate of the orthogonal matrices.")] = 0.05,
    weight_decay: Annotated[float, typer.Option(help="Of adamw and sgd.")] = 0.05,
    schedule: Annotated[
        str, typer.Option(help="cosine, or steps (a tenth after 7/8 of the run, a hundredth after 19/20).")
    ] = "cosine",
    warmup: Annotated[float, typer.Option(help="Share of the steps with a rising learning rate.")] = 0.02,
    ramp: Annotated[float, typer.Option(help="Share of the steps in which epsilon rises to its value.")] = 0.3,
    clip_grad: Annotated[float | None, typer.Option(help="Longest gradient, all parameters together.")] = None,
    label_smoothing: Annotated[float, typer.Option(help="Of the cross entropy.")] = 0.0,
    noise: Annotated[float, typer.Option(help="Deviation of Gaussian pixel noise on training images.")] = 0.0,
    augment: Annotated[str | None, typer.Option(metavar="LIST", help="Any of crop,flip,shift.")] = None,
    mixup: Annotated[float, typer.Option(help="Mixup with lambda ~ Beta(A, A); 0 is none.")] = 0.0,
    cutmix: Annotated[float, typer.Option(help="CutMix with lambda ~ Beta(A, A); 0 is none.")] = 0.0,
    mix_probability: Annotated[float, typer.Option(help="Share of the batches that are mixed.")] = 1.0,
    msvp: Annotated[
        str | None,
        typer.Option(metavar="L|Lq,Lk,Lv", help="Penalty on the spectral norms of query, key and value, per head."),
    ] = None,
    project: Annotated[
        str | None,
        typer.Option(help="After each step bring norms to the radius: ball (those beyond it), or spectral (all)."),
    ] = None,
    project_radius: Annotated[float, typer.Option(help="Largest spectral norm that --project leaves.")] = 1.0,
    sam: Annotated[float, typer.Option(metavar="RHO", help="Sharpness-aware minimisation; 0 is none.")] = 0.0,
    adaptive_sam: Annotated[
        bool, typer.Option("--adaptive-sam", help="Measure RHO relative to each weight's size.")
    ] = False,
    ema: Annotated[float, typer.Option(metavar="DECAY", help="Keep a moving average of the weights; 0 is none.")] = 0.0,
    teacher: Annotated[
        str | None, typer.Option(metavar="CKPT", help="Learn from this network's answers too (distillation).")
    ] = None,
    distill_weight: Annotated[float, typer.Option(help="Share of the teacher in the loss.")] = 0.5,
    distill_temperature: Annotated[float, typer.Option(help="Temperature of both answers.")] = 2.0,
    adversarial: Annotated[
        str, typer.Option(help="none, fgsm, pgd, or trades: train on attacked images, made on the fly.")
    ] = "none",
    attack_norm: Annotated[str, typer.Option(help="linf or l2: norm of the training attack.")] = "linf",
    attack_epsilon: Annotated[
        float | None,
        typer.Option(
            parser=options.fraction, metavar="R", help="Radius of the attack; 8/255 in linf, --epsilon in l2."
        ),
    ] = None,
    attack_steps: Annotated[int, typer.Option(help="Steps of pgd and trades.")] = 10,
    attack_step_size: Annotated[
        float | None,
        typer.Option(parser=options.fraction, metavar="A", help="Of each step; 2.5 radii over all steps, fgsm 1.25."),
    ] = None,
    trades_beta: Annotated[float, typer.Option(help="Weight of the divergence in --adversarial trades.")] = 6.0,
    ard: Annotated[
        float, typer.Option(metavar="P", help="Attention whose gradient the attack misses, at first.")
    ] = 0.0,
    prm: Annotated[float, typer.Option(metavar="P", help="Patches whose perturbation is dropped, at first.")] = 0.0,
    mask_decay: Annotated[
        float, typer.Option(help="Share of the steps after which --ard and --prm have fallen to 0; 0 keeps them.")
    ] = 0.25,
    accumulate: Annotated[int, typer.Option(metavar="N", help="Batches whose gradients make one step.")] = 1,
    precision: Annotated[str, typer.Option(help="float32, bf16 or fp16, of the network; the bound stays float32.")] = (
        "float32"
    ),
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Recompute activations in place of keeping them.")
    ] = False,
    patience: Annotated[int | None, typer.Option(help="Stop after so many epochs without improvement.")] = None,
    limit: options.Limit = None,
    validation_limit: Annotated[
        int | None, typer.Option(metavar="N", help="Validate on a seeded, class-balanced sample.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same command.")
    ] = False,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 128,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Train on --dataset; choices are made on its validation split, and the bound at the end is proven."""
    given: dict[str, Any] = dict(locals())
    from certcli.cli.training import Training
    from certcli.errors import UsageError
    from certcli.finetune.budget import parse_duration
    from certcli.finetune.losses import NEEDS_BOUND
    from certcli.finetune.settings import FinetuneSettings

    if time_budget is not None:
        parse_duration(time_budget)
        if steps is not None:
            raise UsageError("--steps and --time-budget both say how long", "one of the two")
    orthogonal = loss in NEEDS_BOUND and project is None
    given["optimiser"] = optimiser or ("stiefel" if orthogonal else "adamw")
    given["lr"] = (0.01 if given["optimiser"] == "stiefel" else 0.001) if lr is None else lr
    given["augment"] = tuple(name for name in (augment or "").split(",") if name)
    given["msvp"] = None if msvp is None else _three_weights(msvp)
    given["attack_epsilon"] = (
        (8 / 255 if attack_norm == "linf" else epsilon) if attack_epsilon is None else attack_epsilon
    )
    given["teacher_file"], given["teacher"] = (
        teacher,
        None,
    )  # the settings hold its digest, which is known once it is read
    names = FinetuneSettings.__dataclass_fields__
    settings = FinetuneSettings(**{name: given[name] for name in names})
    Training(settings, given, Sink(as_json, quiet)).run()


def _three_weights(text: str) -> tuple[float, float, float]:
    """Weights of query, key and value from one number or three."""
    from certcli.errors import UsageError

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
