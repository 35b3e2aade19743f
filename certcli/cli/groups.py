"""Options that commands share, as objects: a command takes the groups that it needs and asks them for what they stand for."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli import inputs, options
from certcli.cli.command import group
from certcli.cli.output import Sink

if TYPE_CHECKING:
    import torch

    from certcli.checkpoint import Checkpoint
    from certcli.data import Images
    from certcli.foreign import Hints
    from certcli.provenance import Record


@group("Checkpoints of others")
class Source:
    """The network that a command reads, and what the user says about it where its file does not."""

    ckpt: options.CheckpointArgument
    arch: options.Arch = None
    arch_arg: options.ArchArg = field(default_factory=list)
    mean: options.Mean = None
    std: options.Std = None

    def hints(self) -> Hints:
        return inputs.hints(self.arch, self.arch_arg, self.mean, self.std)

    def open(self) -> Checkpoint:
        from certcli.foreign import open_checkpoint

        return open_checkpoint(self.ckpt, self.hints())


@group("Images")
class Data:
    """Images by name, and the seed of every random choice."""

    dataset: options.Dataset = None
    data_dir: options.DataDir = None
    limit: options.Limit = None
    seed: options.Seed = 0


@group("Images")
class Evaluation(Data):
    """Images to judge a network by: labelled, of the split to evaluate on."""

    split: options.Split = None

    def images(self, record: Record, sink: Sink) -> Images:
        return inputs.evaluation_images(record, self.dataset, self.data_dir, self.split, self.limit, self.seed, sink)


@group("Images")
class Calibration(Data):
    """Images to calibrate on: labels unused."""

    limit: Annotated[int, typer.Option("--limit", help="Calibration images.")] = 500

    def images(self, record: Record, sink: Sink) -> Images:
        return inputs.calibration_images(record, self.dataset, self.data_dir, self.limit, self.seed, sink)


@group("Machine")
class Machine:
    """Where it is computed, and how many images at a time."""

    device: options.Device = "auto"
    batch_size: options.BatchSize = 128

    def pick(self) -> torch.device:
        return inputs.pick_device(self.device)


@group("Output")
class Output:
    """The checkpoint to be written."""

    output: options.Output = None
    force: options.Force = False

    def path(self, source: str, command: str) -> Path:
        """-o, or <stem>.<command>.safetensors beside the source; checked before any work is done."""
        return inputs.output_path(self.output, source, command, self.force)

    def check(self, source: str) -> None:
        """The same checks for commands that write a checkpoint only with -o."""
        if self.output is not None:
            self.path(source, "")


@group("Output")
class Talk:
    """How much is said, and in which form."""

    as_json: options.Json = False
    quiet: options.Quiet = False

    def sink(self) -> Sink:
        return Sink(self.as_json, self.quiet)
