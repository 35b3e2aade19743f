"""certvit init: make a checkpoint from an architecture's name."""

from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli.shared import groups
from certcli.cli.shared.command import Reads, Seed, command, group
from certcli.system.options import option

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint


@group()
class Architecture:
    """The architecture, its weights and its input."""

    arch: Annotated[
        str,
        typer.Argument(
            metavar="ARCH",
            help="A timm name, or one of ours: certvit_vit_digits, certvit_lip_mnist, ...",
        ),
    ]
    pretrained: bool = option(False, "Take timm's published weights.")
    arch_arg: list[str] = option(list, "Argument of the architecture.", metavar="KEY=VALUE")
    mean: str | None = option(None, "Pixel mean, e.g. 0.5 or 0.48,0.45,0.41.")
    std: str | None = option(None, "Pixel standard deviation.")
    seed: Seed = 0
    member: list[str] = option(
        list,
        "Trained network of ARCH to average; repeat for each.",
        metavar="CKPT",
        mark=Reads(),
    )

    def build(self) -> "Checkpoint":
        """Return the new checkpoint. UsageError for options that contradict published weights."""
        from certcli.cli.shared.inputs import parse_arguments, typed_numbers
        from certcli.models import build, in_memory, origins
        from certcli.models.open import open_checkpoint
        from certcli.system.errors import UsageError

        from_options = origins.Hints(
            None,
            parse_arguments(self.arch_arg),
            typed_numbers("--mean", self.mean),
            typed_numbers("--std", self.std),
        )
        if self.member:
            arguments = dict(from_options.arch_args)
            mirror = arguments.pop("mirror", False)
            if arguments or self.pretrained or from_options.mean or from_options.std:
                raise UsageError(
                    "--member takes all other arguments from its files",
                    "only --arch-arg mirror=true goes with it",
                )
            return in_memory.mean_of(
                self.arch, [open_checkpoint(source) for source in self.member], mirror
            )
        if self.pretrained:
            if from_options.mean or from_options.std:
                raise UsageError(
                    "--pretrained keeps the published mean and std", "drop --mean and --std"
                )
            return open_checkpoint(self.arch, from_options)
        return build.initialise(
            self.arch,
            dict(from_options.arch_args),
            seed=self.seed,
            mean=from_options.mean,
            std=from_options.std,
        )


@command(
    "certvit init certvit_vit_digits -o init.safetensors",
    "certvit init vit_tiny_patch16_224 --pretrained -o tiny.safetensors",
    "certvit init certvit_lip_cifar10 --member a.safetensors --member b.safetensors -o mean.safetensors",
    page="architectures.md",
)
def init(
    architecture: Architecture,
    output: groups.Output = groups.Output(),
    talk: groups.Talk = groups.Talk(),
) -> None:
    """Write a new checkpoint: freshly initialised, with timm's published weights, or the mean of
    trained networks.
    """
    from certcli.models import build as models

    sink = talk.sink()
    arch = architecture.arch
    path = output.target("init", arch, architecture)
    checkpoint = architecture.build()
    # refuses, as every later command would, a network that does not map an image to its classes
    models.load(checkpoint)
    if not architecture.member:  # a mean tells its own step
        checkpoint = checkpoint.derive(
            checkpoint.tensors,
            "init",
            {"arch": arch, "pretrained": architecture.pretrained},
            architecture.seed,
        )
    output.write(checkpoint, path)
    size = "x".join(str(side) for side in checkpoint.record.input.size)
    count = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    sink.document(
        {
            "output": str(path),
            "arch": arch,
            "classes": checkpoint.record.classes,
            "parameters": count,
        }
    )
    sink.text(
        f"{path}: {arch}, {checkpoint.record.classes} classes, input {size}, {count:,} parameters"
    )
