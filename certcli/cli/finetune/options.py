"""The options of `certvit finetune`: the settings of a run, its files, images and processes."""

from pathlib import Path
from typing import Annotated

import typer

from certcli.cli.shared import options
from certcli.cli.shared.command import group
from certcli.cli.shared.groups import Data, Device, Output, Source
from certcli.finetune.presets import options_of
from certcli.finetune.settings import FinetuneSettings


def take_preset(context: typer.Context, name: str | None) -> str | None:
    """Make a preset's options the defaults of this call, so that a typed option comes before it."""
    if name is not None:
        context.default_map = {**(context.default_map or {}), **options_of(name)}
    return name


@group("Machine")
class TrainingMachine(Device):
    """The device, and the number of images in a batch."""

    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=options.MOST_IMAGES,
            help="Images in a batch. Default: 128, with stiefel 512 for 25,600 or more.",
        ),
    ] = None


@group()
class Order:
    """One run: its settings, and the files, images and processes that it works with."""

    source: Source
    preset: Annotated[
        str | None,
        typer.Option(
            is_eager=True,
            callback=take_preset,
            help="A paper's training: gloro-mnist, local-lip-cifar10, certvit-cifar10, cauchy, ... "
            "What you type comes before it.",
            rich_help_panel="Objective",
        ),
    ] = None
    settings: FinetuneSettings
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue an interrupted run of the same command.",
            rich_help_panel="Length of the run",
        ),
    ] = False
    shard_weights: Annotated[
        bool,
        typer.Option(
            "--shard-weights",
            help="Under torchrun: each process keeps a part of the weights (ce, with adamw or sgd).",
            rich_help_panel="Optimiser",
        ),
    ] = False
    teacher: Annotated[
        str | None,
        typer.Option(
            metavar="CKPT",
            help="Learn from this network's answers too (distillation).",
            rich_help_panel="Teacher",
        ),
        options.Reads(),
    ] = None
    denoiser: Annotated[
        Path | None,
        typer.Option(
            "--denoiser",
            metavar="PATH",
            help="With --noise: noisy images pass it first, as in certify --denoiser.",
            rich_help_panel="Augmentation",
        ),
        options.Reads(),
    ] = None
    data: Data = Data()
    machine: TrainingMachine = TrainingMachine()
    output: Output = Output()
