"""certvit finetune: train for clean or certified accuracy, from a checkpoint or from scratch."""

from pathlib import Path

import typer

from certcli.cli.shared import groups
from certcli.cli.shared.command import MOST_IMAGES, Reads, command, group
from certcli.finetune.presets import options_of_preset
from certcli.finetune.settings import FinetuneSettings
from certcli.system.options import option


def take_preset(context: typer.Context, name: str | None) -> str | None:
    """Make a preset's options the defaults of this call, so that a typed option comes before it."""
    if name is not None:
        context.default_map = {**(context.default_map or {}), **options_of_preset(name)}
    return name


@group("Machine")
class TrainingMachine(groups.Device):
    """The device, and the number of images in a batch."""

    batch_size: int | None = option(
        None,
        "Images in a batch. Default: 128, with stiefel 512 for 25,600 or more.",
        min=1,
        max=MOST_IMAGES,
    )


@group()
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
        mark=Reads(),
    )
    denoiser: Path | None = option(
        None,
        "With --noise: denoiser of the noisy images, as in certify --denoiser.",
        metavar="PATH",
        panel="Augmentation",
        mark=Reads(),
    )
    data: groups.Data = groups.Data()
    machine: TrainingMachine = TrainingMachine()
    output: groups.Output = groups.Output()


@command(
    "certvit finetune m.safetensors --dataset digits --loss ce --epochs 20",
    "certvit finetune m.safetensors --loss margin -e 0.5 --time-budget 10m",
    page="finetune.md",
    run="certcli.cli.finetune.run:train",
    often=("preset", "loss", "epsilon", "epochs", "time_budget", "resume", "lr", "noise"),
)
def finetune(order: Order, talk: groups.Talk = groups.Talk()) -> None:
    """Train on --dataset, choose the epoch on its validation images, and prove the bound of the
    result."""
