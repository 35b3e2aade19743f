"""certvit init: a checkpoint from an architecture's name."""

from typing import Annotated

import typer

from certcli.cli import options
from certcli.cli.output import Sink


def init(
    arch: Annotated[
        str, typer.Argument(help="A timm name, or one of ours: certvit_vit_digits, certvit_lip_mnist, ...")
    ],
    output: options.Output = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="Take timm's published weights.")] = False,
    classes: Annotated[int | None, typer.Option("--classes", min=2, help="Number of classes.")] = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Write a new checkpoint: freshly initialised, or with timm's published weights."""
    from dataclasses import replace

    from certcli import models
    from certcli.cli.inputs import hints, output_path, parse_arguments
    from certcli.errors import UsageError
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    given = hints(None, arch_arg, mean, std)
    path = output_path(output, arch, "init", force) if output is None else output_path(output, arch, "", force)
    if pretrained:
        if classes is not None:
            raise UsageError("--pretrained keeps the published classes", "drop --classes, or fine-tune afterwards")
        checkpoint = open_checkpoint(arch, given)
    else:
        arguments = parse_arguments(arch_arg) | ({} if classes is None else {"num_classes": classes})
        net = models.create(arch, arguments, initialise=False)
        spec = models.spec_of(net, size=models.input_size_of(net))
        spec = replace(spec, mean=given.mean or spec.mean, std=given.std or spec.std)
        checkpoint = models.initialise(arch, arguments, spec, models.classes_of(net), seed)
    parameters = {"arch": arch, "pretrained": pretrained}
    checkpoint = checkpoint.derive(checkpoint.tensors, "init", parameters, seed)
    checkpoint.write(path, force)
    size = "x".join(str(side) for side in checkpoint.record.input.size)
    count = sum(tensor.numel() for tensor in checkpoint.tensors.values())
    sink.document({"output": str(path), "arch": arch, "classes": checkpoint.record.classes, "parameters": count})
    sink.text(f"{path}: {arch}, {checkpoint.record.classes} classes, input {size}, {count:,} parameters")
