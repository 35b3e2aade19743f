"""certvit adapt: a plain ViT becomes Lipschitz-continuous and keeps what it knew."""

from typing import Annotated

import typer

from certcli.cli import options
from certcli.cli.output import Sink, percent


def adapt(
    ckpt: options.CheckpointArgument,
    output: options.Output = None,
    attention: Annotated[str, typer.Option(help="l2 (Kim et al., tied, with the factor A_h) or keep.")] = "l2",
    norm: Annotated[
        str, typer.Option(help="center, fold (centre norms multiplied into the next map) or keep.")
    ] = "center",
    residual: Annotated[str, typer.Option(help="convex: (1-t)x + t f; weighted: x + a f; or keep.")] = "convex",
    activation: Annotated[str, typer.Option(help="keep, or maxmin (slope 1, loses no gradient norm).")] = "keep",
    head: Annotated[
        str | None, typer.Option(help="'flat', or widths such as 128,128: tokens side by side into a MaxMin MLP.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=-1, help="AdamW epochs a block; 0 closed form only, -1 surgery only.")] = 3,
    distill: Annotated[
        int, typer.Option(min=0, help="Epochs of training on the old network's logits, at the end.")
    ] = 5,
    lr: Annotated[float, typer.Option(help="Learning rate, relative to the size of each tensor.")] = 5e-3,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int, typer.Option("--limit", help="Calibration images.")] = 2000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 64,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Turn a plain ViT into a Lipschitz-continuous one, block by block, fitted to the old one's outputs."""
    from certcli.adapt.fit import Replaced
    from certcli.adapt.fit import adapt as run
    from certcli.adapt.plan import AdaptSettings, plan
    from certcli.cli.inputs import calibration_images, hints, output_path, pick_device
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    settings = AdaptSettings(
        attention, norm, residual, activation, _widths(head), epochs, distill, lr, batch_size, seed
    )
    path = None if dry_run else output_path(output, ckpt, "adapt", force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    planned = plan(checkpoint.record, settings)
    if dry_run or path is None:
        rows = [(item.path or "(network)", item.kind, str(dict(item.args)) if item.args else "") for item in planned]
        sink.document({"plan": [{"path": p, "to": k} for p, k, _ in rows]})
        sink.table("Plan: nothing was changed", ["module", "becomes", "with"], rows)
        return
    images = calibration_images(checkpoint.record, dataset, data_dir, limit, seed, sink)
    pixels, _ = images.tensors()
    replaced: list[Replaced] = []
    result = checkpoint
    with sink.progress("adapt", total=None) as bar:
        for event in run(checkpoint, settings, pixels, pick_device(device)):
            if isinstance(event, Replaced):
                replaced.append(event)
                bar.advance(remark=f"{event.path}: error {percent(event.error)}")
            else:
                result = event
    result.write(path, force)
    parts = [{"path": r.path, "from": r.before, "to": r.after, "error": r.error} for r in replaced]
    sink.document({"output": str(path), "replaced": parts})
    sink.table(
        "Adapted parts, with their relative output error on the calibration images",
        ["part", "was", "is", "error"],
        [(r.path, r.before, r.after, percent(r.error)) for r in replaced],
    )
    sink.text(f"wrote {path}")


def _widths(head: str | None) -> tuple[int, ...] | None:
    from certcli.errors import UsageError

    if head is None or head == "keep":
        return None
    if head == "flat":
        return ()
    try:
        widths = tuple(int(part) for part in head.replace(",", " ").split())
    except ValueError:
        widths = ()
    if not widths or any(width < 2 or width % 2 for width in widths):
        raise UsageError(f"--head '{head}' is neither keep, flat nor even widths", "--head flat, or --head 128,128")
    return widths
