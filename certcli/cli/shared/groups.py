"""Options that commands share, as objects: a command takes the groups that it needs and asks them for what they stand for."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli.shared import inputs, options
from certcli.cli.shared.command import group, marked
from certcli.cli.shared.output import Sink
from certcli.system.errors import UsageError
from certcli.system.files import is_stream
from certcli.system.processes import team

if TYPE_CHECKING:
    import torch

    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.outputs import Outputs
    from certcli.checkpoint.record import Record
    from certcli.images.labelled import Images
    from certcli.models.build import OpenCheckpoint
    from certcli.models.hints import Hints


@group("Checkpoints of others")
class Source:
    """The network that a command reads, and what the user says about it where its file does not."""

    ckpt: options.CheckpointArgument
    arch: options.Arch = None
    arch_arg: options.ArchArg = field(default_factory=list)
    mean: options.Mean = None
    std: options.Std = None
    norm_eps: options.NormEps = None
    as_stated: options.AsStated = False
    weights: options.Weights = None

    def hints(self) -> Hints:
        return inputs.hints(self.arch, self.arch_arg, self.mean, self.std, self.norm_eps, self.as_stated, self.weights)

    def words(self) -> list[str]:
        """What was said about the network beside its name, to be typed again."""
        given = {
            "--arch": self.arch,
            "--mean": self.mean,
            "--std": self.std,
            "--norm-eps": self.norm_eps,
            "--weights": self.weights,
        }
        found = [part for name, value in given.items() if value is not None for part in (name, str(value))]
        found += [part for pair in self.arch_arg for part in ("--arch-arg", pair)]
        return found + ["--as-stated"] * self.as_stated

    def open(self, sink: Sink) -> OpenCheckpoint:
        """Open the checkpoint; show what is assumed in reading it, and put that into the document."""
        checkpoint = self.read(sink)
        sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
        return checkpoint

    def read(self, sink: Sink) -> OpenCheckpoint:
        """Open the checkpoint; the caller shows what is assumed, after other lines."""
        from certcli.models.open import open_checkpoint

        checkpoint = open_checkpoint(self.ckpt, self.hints())
        for doubt in checkpoint.reading.doubts:
            sink.warn(doubt)
        return checkpoint


@group("Images")
class Data:
    """Images by name, and the seed of every random choice."""

    dataset: options.Dataset = None
    data_dir: options.DataDir = None
    limit: options.Limit = None
    seed: options.Seed = 0
    workers: options.Workers = None


@group("Images")
class Evaluation(Data):
    """Images to judge a network by: labelled, of the split to evaluate on."""

    split: options.Split = None

    def images(self, record: Record, sink: Sink) -> Images:
        given = (self.dataset, self.data_dir, self.split, self.limit, self.seed)
        return inputs.evaluation_images(record, *given, sink).read_by(self.workers)


@group("Images")
class Calibration(Data):
    """Images to calibrate on: labels unused."""

    limit: Annotated[int, typer.Option("--limit", help="Number of calibration images.")] = 500

    def images(self, record: Record, sink: Sink) -> Images:
        given = (self.dataset, self.data_dir, self.limit, self.seed)
        return inputs.calibration_images(record, *given, sink).read_by(self.workers)


@group("Machine")
class Machine:
    """Where it is computed, and how many images at a time."""

    device: options.Device = "auto"
    batch_size: options.BatchSize = 128

    def pick(self) -> torch.device:
        return inputs.pick_device(self.device)


@group("Output")
class Output:
    """The checkpoint to be written, and the one place that compares all that is written with all that is read."""

    output: options.Output = None
    shard_size: options.ShardSize = None
    force: options.Force = False

    def claim(self, *groups: object) -> None:
        """Before any work: refuse what these groups and -o must not write, or what they read as well."""
        self._shard_bytes()
        self._check(self._outputs(groups))

    def target(self, command: str, source: str, *groups: object, last: bool = False, state: str | None = None) -> Path:
        """The same for a command that makes a checkpoint: -o, or <stem>.<command>.safetensors beside the source.

        With --shard-size and no -o it is an index.
        last, state: it also writes the last epoch's file, a state file (whose metadata has this key) beside the output.
        """
        self._shard_bytes()
        path = self.output or inputs.default_output(source, command, shards=self.shard_size is not None)
        outputs = self._outputs(groups)
        if (last or state is not None) and is_stream(path):
            raise UsageError(
                f"-o {path} is no file, and {command} keeps others beside its output", "-o FILE.safetensors"
            )
        if self.output is None:
            outputs.writes("-o", path)
        if last:
            outputs.writes("-o, the last epoch's file", beside(path, "last"))
        if state is not None:
            outputs.keeps_state(beside(path, "state"), state)
        self._check(outputs)
        return path

    def write(self, checkpoint: Checkpoint, path: Path) -> None:
        """In one file, or in several where `path` is an index's."""
        checkpoint.write(path, self.force, self._shard_bytes())

    def _shard_bytes(self) -> int:
        from certcli.checkpoint.shards import ENDING, SHARD_BYTES, is_index

        if self.shard_size is None:
            return SHARD_BYTES
        if self.output is not None and not is_index(self.output):
            raise UsageError(
                f"--shard-size makes several files and their index, and {self.output} is to be one file",
                f"-o {self.output.with_name(self.output.name.removesuffix('.safetensors') + ENDING)}",
            )
        return inputs.size_in_bytes("--shard-size", self.shard_size)

    def _check(self, outputs: Outputs) -> None:
        if team().leads:  # another process would find what the leader has begun to write
            outputs.check()

    def _outputs(self, groups: tuple[object, ...]) -> Outputs:
        from certcli.checkpoint.outputs import Outputs

        found = Outputs(self.force)
        resume = any(getattr(part, "resume", False) for part in groups)
        for option, mark, value in marked((*groups, self), options.Writes):
            for path in value if isinstance(value, list) else [value]:
                if mark.figure:
                    found.draws(option, path)
                else:
                    found.writes(option, path, continued=mark.resumable and resume)
        for option, source, name in marked(groups, options.Reads):
            (found.reads_folder if source.folder else found.reads)(option, Path(name))
        return found


def beside(path: Path, word: str) -> Path:
    """<stem>.<word>.safetensors beside an output, in one file or in several as it is; a state is one file always."""
    from certcli.checkpoint.shards import ENDING, is_index, stem

    return path.with_name(f"{stem(path)}.{word}{ENDING if is_index(path) and word != 'state' else '.safetensors'}")


@group("Output")
class Talk:
    """How much is said, and in which form."""

    as_json: options.Json = False
    quiet: options.Quiet = False

    def sink(self) -> Sink:
        return Sink(self.as_json, self.quiet)
