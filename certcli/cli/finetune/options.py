"""The options of `certvit finetune`: the settings of a run, its files, images and processes."""

from pathlib import Path

import typer

from certcli.cli.shared import command, groups, options
from certcli.finetune.presets import options_of_preset
from certcli.finetune.settings import FinetuneSettings
from certcli.system.options import option


def take_preset(context: typer.Context, name: str | None) -> str | None:
    """Make a preset's options the defaults of this call, so that a typed option comes before it."""
    if name is not None:
        context.default_map = {**(context.default_map or {}), **options_of_preset(name)}
    return name


@command.group("Machine")
class TrainingMachine(groups.Device):
    """The device, and the number of images in a batch."""

    batch_size: int | None = option(
        None,
        "Images in a batch. Default: 128, with stiefel 512 for 25,600 or more.",
        min=1,
        max=options.MOST_IMAGES,
    )


@command.group()
class Order:
    """One run: its settings, and the files, images and processes that it works with."""

    source: groups.Source
    preset: str | None = option(
        None,
        "A paper's training: gloro-mnist, local-lip-cifar10, certvit-cifar10, cauchy, "
        "... Options that you type override it.",
        is_eager=True,
        callback=take_preset,
        panel="Objective",
    )
    settings: FinetuneSettings
    resume: bool = option(
        False, "Continue an interrupted run of the same command.", panel="Length of the run"
    )
    teacher: str | None = option(
        None,
        "Also learn from this network's outputs (distillation).",
        metavar="CKPT",
        panel="Teacher",
        mark=options.Reads(),
    )
    denoiser: Path | None = option(
        None,
        "With --noise: denoiser of the noisy images, as in certify --denoiser.",
        metavar="PATH",
        panel="Augmentation",
        mark=options.Reads(),
    )
    data: groups.Data = groups.Data()
    machine: TrainingMachine = TrainingMachine()
    output: groups.Output = groups.Output()
