"""certvit finetune: train for accuracy or for certified accuracy, from a checkpoint or, after init, from scratch."""

from dataclasses import replace
from typing import Annotated

import typer

from certcli.cli.shared import options
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Data, Machine, Output, Source, Talk
from certcli.finetune.settings import FinetuneSettings
from certcli.system.errors import UsageError

OFTEN = (
    *("loss", "epsilon", "epochs", "time_budget", "resume", "lr", "sam", "noise", "augment", "msvp", "teacher"),
    *("adversarial", "dataset", "data_dir", "seed", "device", "batch_size", "output", "force", "json", "quiet"),
)
"""The options of most runs."""


@group()
class Order:
    """One run: its settings, and the files, images and processes that it works with."""

    source: Source
    settings: FinetuneSettings
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue an interrupted run of the same command.", rich_help_panel="Length of the run"
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
    data: Data = Data()
    machine: Machine = Machine(batch_size=128)
    output: Output = Output()


@command(
    "certvit finetune m.safetensors --dataset digits --loss ce --epochs 20",
    "certvit finetune m.safetensors --loss margin -e 0.5 --time-budget 10m",
    page="finetune.md",
    often=OFTEN,
)
def finetune(order: Order, talk: Talk = Talk()) -> None:
    """Train on --dataset; choices are made on its validation split, and the bound at the end is proven."""
    from certcli.cli.finetune.run import Training

    if order.settings.time_budget is not None and order.settings.steps is not None:
        raise UsageError("--steps and --time-budget both say how long", "one of the two")
    settings = replace(order.settings, batch_size=order.machine.batch_size, seed=order.data.seed)
    Training(replace(order, settings=settings), talk.sink()).run()
