"""The options that commands share, in groups; each makes the object that they describe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from certcli.cli.shared import inputs
from certcli.cli.shared.command import (
    MOST_IMAGES,
    CheckpointArgument,
    Force,
    Reads,
    Seed,
    Writes,
    group,
    marked,
)
from certcli.cli.shared.output import Sink
from certcli.system import errors, files, options, processes, reading

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.outputs import Outputs
    from certcli.checkpoint.record import Record
    from certcli.images.labelled import Images
    from certcli.models.build import OpenCheckpoint
    from certcli.models.origins import Hints


@group("Checkpoints of others")
class Reading:
    """The statements that a checkpoint's file lacks."""

    arch: str | None = options.option(None, "timm architecture of a foreign file.")
    arch_arg: list[str] = options.option(list, "Argument of --arch.", metavar="KEY=VALUE")
    mean: str | None = options.option(
        None, "Pixel mean of a foreign file, e.g. 0.5 or 0.48,0.45,0.41."
    )
    std: str | None = options.option(None, "Pixel standard deviation of a foreign file.")
    as_stated: bool = options.option(
        False, "Trust --arch-arg and config.json even if the tensors also fit another network."
    )
    weights: str | None = options.option(
        None,
        "Weights to read from a file that holds several: raw, ema, or a key.",
        metavar="raw|ema|KEY",
    )
    image_size: int | None = options.option(
        None,
        "Perturb images of N x N pixels: the network's first layer resizes them. Radii are in "
        "these pixels.",
        min=1,
        max=reading.LARGEST_SIDE,
        metavar="N",
    )

    def hints(self) -> Hints:
        from certcli.models.origins import Hints

        return Hints(
            self.arch,
            inputs.parse_arguments(self.arch_arg),
            inputs.typed_numbers("--mean", self.mean),
            inputs.typed_numbers("--std", self.std),
            self.as_stated,
            self.weights,
            image_size=self.image_size,
        )

    def words(self) -> list[str]:
        """Return the options as they are typed."""
        typed = {
            "--arch": self.arch,
            "--mean": self.mean,
            "--std": self.std,
            "--weights": self.weights,
            "--image-size": self.image_size,
        }
        pairs = [(name, str(value)) for name, value in typed.items() if value is not None]
        pairs += [("--arch-arg", pair) for pair in self.arch_arg]
        return [word for pair in pairs for word in pair] + ["--as-stated"] * self.as_stated

    def read_file(
        self, ckpt: str, sink: Sink, *, features: bool = False, logits: bool = False
    ) -> OpenCheckpoint:
        """Return the checkpoint with its assumptions, which the caller prints after other lines.

        Args:
            features: the network may end in features.
            logits: it need not decide by its largest logit.
        """
        from certcli.models.open import open_checkpoint

        hints = self.hints()
        hints = replace(hints, features=features or hints.features, logits=logits or hints.logits)
        checkpoint = open_checkpoint(ckpt, hints)
        for doubt in checkpoint.reading.doubts:
            sink.warn(doubt)
        return checkpoint


@group("Checkpoints of others")
class Source(Reading):
    """The network that a command reads, and the statements that its file lacks."""

    ckpt: CheckpointArgument

    def open(self, sink: Sink) -> OpenCheckpoint:
        """Return the checkpoint; print the assumptions of its reading, for documents too."""
        checkpoint = self.read(sink)
        sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
        return checkpoint

    def read(self, sink: Sink) -> OpenCheckpoint:
        """Return the checkpoint with its assumptions, which the caller prints after other lines."""
        return self.read_file(self.ckpt, sink)


@group("Images")
class Data:
    """Images by name, and the seed of every random choice."""

    dataset: str | None = options.option(
        None,
        "digits, torch/mnist, torch/cifar10, ..., or a folder: of class folders, in the order of "
        "their names, or of images with a labels.csv (file, class).",
        mark=Reads(folder=True),
    )
    data_dir: Path | None = options.option(
        None, "Folder of the torch/... datasets.", mark=Reads(folder=True)
    )
    limit: int | None = options.option(None, "Use a seeded, class-balanced sample of N images.")
    seed: Seed = 0


@group("Images")
class Evaluation(Data):
    """Labelled images that judge a network."""

    split: str | None = options.option(None, "train, val or test. Default: the evaluation split.")

    def images(self, record: Record, sink: Sink, unlabelled: bool = False) -> Images:
        """Return the images that judge: of --dataset, else of the training's, with its classes.

        Without --split these are the images kept for validation, where training took a part of the
        dataset.

        Args:
            unlabelled: the command takes images without labels, for the network's own answers
                (`inputs.answered`).
        """
        from certcli.evaluation.image_doubts import seen_by, trained_on
        from certcli.images import datasets

        name = self.dataset or record.dataset
        if name is None:
            raise errors.DataError(
                "no --dataset, and the checkpoint does not name the images of its training",
                "--dataset digits",
            )

        def load(split: str | None) -> Images:
            loaded = datasets.load_dataset(name, record.input, split, self.data_dir)
            if loaded.unlabelled and unlabelled:
                return loaded
            return datasets.require_classes(loaded, record.classes, record.class_names)

        images = load(self.split)
        if (
            self.split is None
            and images.split in ("train", "all")
            and trained_on(seen_by(record), images)
        ):
            whole = images
            images = load("val")
            sink.note(
                f"images: the {len(images)} of {len(whole)} kept for validation (val); --split {whole.split} takes all"
            )
        if images.note:
            sink.note(images.note)
        if self.dataset is None:
            sink.note(
                f"images: {images.name} ({images.split}), of the dataset that the checkpoint was trained on"
            )
        chosen = images.limit(self.limit, self.seed)
        inputs.doubt_images(chosen, record, sink)
        return chosen


@group("Images")
class Calibration(Data):
    """Images to calibrate on, without their labels."""

    limit: int = options.option(500, "Number of calibration images.")

    def images(self, record: Record, sink: Sink, judges: int = 0) -> Images:
        """Return `limit` images, and at most `judges` more, in the dataset's order."""
        from certcli.images.calibration import calibration_images

        images = calibration_images(
            record, self.limit, self.seed, self.dataset, self.data_dir, judges
        )
        trained_on = record.dataset in (images.name, f"torch/{images.name}")
        origin = ""
        if self.dataset is None:
            other = "by default: --dataset takes images like those it was trained on"
            origin = f", {'which the checkpoint was trained on' if trained_on else other}"
        count = min(self.limit, len(images))
        further = f"; {len(images) - count} more to judge the result" if len(images) > count else ""
        sink.note(f"calibration images: {count} of {images.name} ({images.split}){further}{origin}")
        if images.note:
            sink.note(images.note)
        if self.dataset is None and record.dataset is not None and not trained_on:
            sink.warn(
                f"the checkpoint was trained on {record.dataset}, which is not found here: --dataset, --data-dir"
            )
        return images


@group("Machine")
class Device:
    """The device to compute on."""

    device: str = options.option("auto", "auto, cpu, cuda, cuda:1, mps.")

    def pick(self) -> torch.device:
        """Return the device; `auto` is CUDA if there is one. Each process has its own GPU.

        Raises:
            UsageError: the device is not here.
        """
        import torch

        name = self.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and processes.team().several:
            name = f"cuda:{processes.local_rank()}"
        try:
            device = torch.device(name)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError, ValueError) as failure:
            raise errors.UsageError(
                f"no device '{name}' here", "--device auto, cpu, cuda, cuda:1, mps"
            ) from failure
        return device

    def pick_for(self, arithmetic: object) -> torch.device:
        """Return the device for certificates in this arithmetic; `auto` is the CPU unless it is
        real, since only a CPU's rounding is proven.
        """
        on_cpu = self.device == "auto" and arithmetic not in (None, "real")
        return replace(self, device="cpu").pick() if on_cpu else self.pick()


@group("Machine")
class BatchDevice(Device):
    """The device, and the number of images in a batch."""

    batch_size: int = options.option(
        128, "Largest number of images in a batch.", min=1, max=MOST_IMAGES
    )


@group("Output")
class Output:
    """The checkpoint to write; all written files are compared with all read files here."""

    output: Path | None = options.option(
        None, "Checkpoint to write.", "-o", "--output", mark=Writes()
    )
    shard_size: str | None = options.option(
        None,
        "Largest file of a sharded output (-o FILE.safetensors.index.json): 5GB, 200MB.",
        metavar="SIZE",
    )
    force: Force = False

    def claim(self, *groups: object) -> None:
        """Refuse, before any work, files that these groups and -o must not write, or read as well."""
        if self.output is not None:
            for group in groups:
                inputs.require_nameable(str(getattr(group, "ckpt", "")))
        self.shard_bytes()
        self._check(self._outputs(groups))

    def target(
        self,
        command: str,
        source: str,
        *groups: object,
        last: bool = False,
        state: str | None = None,
    ) -> Path:
        """Do as `claim`; return the checkpoint to write: -o, else <stem>.<command>.safetensors.

        Args:
            last: the last epoch's file is written beside it.
            state: a state file is written beside it, and its metadata has this key.
        """
        inputs.require_nameable(source)
        self.shard_bytes()
        path = self.output or inputs.default_output(
            source, command, shards=self.shard_size is not None
        )

        from certcli.checkpoint.outputs import is_unfinished

        def unfinished(file: Path) -> bool:
            return resumes(groups) and is_unfinished(
                file, inputs.path_beside(path, "state"), command
            )

        outputs = self._outputs(groups, unfinished if state is not None else lambda file: False)
        if (last or state is not None) and files.is_stream(path):
            raise errors.UsageError(
                f"-o {path} is no file, and {command} keeps others beside it", "-o FILE.safetensors"
            )
        if self.output is None:
            outputs.writes("-o", path, continued=state is not None and unfinished(path))
        if last:
            file = inputs.path_beside(path, "last")
            outputs.writes("-o, the last epoch's file", file, continued=unfinished(file))
        if state is not None:
            outputs.keeps_state(inputs.path_beside(path, "state"), state)
        self._check(outputs)
        return path

    def write(self, checkpoint: Checkpoint, path: Path, resumed: bool = False) -> None:
        """Write one file, or several where `path` is an index.

        Args:
            resumed: an output of the same command and start, which a stopped run left, is replaced.
        """
        from certcli.checkpoint.outputs import last_step

        replaces = self.force
        if resumed:
            step = checkpoint.record.lineage[-1]
            replaces |= last_step(path) == (step.command, str(step.parent))
        checkpoint.write(path, replaces, self.shard_bytes())

    def write_evidence(self, checkpoint: Checkpoint, sink: Sink) -> None:
        """Write a checkpoint that has got evidence, where -o names a file for it."""
        if self.output is not None:
            self.write(checkpoint, self.output)
            sink.note(f"wrote {self.output}")

    def shard_bytes(self) -> int:
        """Return the most bytes of a file. UsageError: --shard-size where -o is no index."""
        from certcli.checkpoint.tensor_files import ENDING, SHARD_BYTES, is_index

        if self.shard_size is None:
            return SHARD_BYTES
        if self.output is not None and not is_index(self.output):
            raise errors.UsageError(
                f"--shard-size makes several files and their index, and {self.output} is one file",
                f"-o {self.output.with_name(self.output.name.removesuffix('.safetensors') + ENDING)}",
            )
        return inputs.size_in_bytes("--shard-size", self.shard_size)

    def _check(self, outputs: Outputs) -> None:
        if processes.team().leads:  # another process would find what the leader has begun to write
            outputs.check()

    def _outputs(
        self, groups: tuple[object, ...], unfinished: Callable[[Path], bool] = lambda file: False
    ) -> Outputs:
        from certcli.checkpoint.outputs import Outputs

        outputs = Outputs(self.force)
        for spelling, mark, value in marked((*groups, self), Writes):
            for path in value if isinstance(value, list) else [value]:
                if mark.figure:
                    outputs.draws(spelling, path)
                else:
                    outputs.writes(
                        spelling,
                        path,
                        continued=(mark.resumable and resumes(groups)) or unfinished(path),
                    )
        for spelling, source, value in marked(groups, Reads):
            for name in value if isinstance(value, list) else [value]:
                (outputs.reads_folder if source.folder else outputs.reads)(spelling, Path(name))
        return outputs


def resumes(groups: Sequence[object]) -> bool:
    """Tell whether one of the groups has --resume."""
    return any(getattr(part, "resume", False) for part in groups)


@group("Output")
class Talk:
    """The form of the output, and its amount."""

    as_json: bool = options.option(False, "Machine-readable output on stdout.", "--json")
    quiet: bool = options.option(False, "No progress and no notes on stderr.", "--quiet", "-q")

    def sink(self) -> Sink:
        return Sink(self.as_json, self.quiet)
