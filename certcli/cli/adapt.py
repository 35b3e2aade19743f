"""certvit adapt: a ViT, DeiT, Swin or ConViT becomes Lipschitz-continuous and keeps what it knew."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli import options
from certcli.cli.output import Sink, percent

if TYPE_CHECKING:
    from certcli.adapt.settings import AdaptSettings
    from certcli.checkpoint import Checkpoint
    from certcli.foreign import Hints


def adapt(
    ckpt: options.CheckpointArgument,
    output: options.Output = None,
    attention: Annotated[
        str, typer.Option(help="l2 (Kim et al., tied), l2-untied-value, scsa, lnorm, conv, orthogonal; keep or dp.")
    ] = "l2",
    norm: Annotated[
        str,
        typer.Option(
            help="center, floor (LayerNorm above a floor), fold (center, multiplied into the next map), keep."
        ),
    ] = "center",
    norm_floor: Annotated[
        float | None, typer.Option(help="Floor of --norm floor; by default each layer's 5 % quantile on the images.")
    ] = None,
    residual: Annotated[str, typer.Option(help="convex: (1-t)x + t f; weighted: x + a f; or keep.")] = "convex",
    activation: Annotated[
        str, typer.Option(help="keep, or of slope 1: relu, maxmin (loses no gradient norm).")
    ] = "keep",
    head: Annotated[
        str | None, typer.Option(help="'flat', or widths such as 128,128: tokens side by side into a MaxMin MLP.")
    ] = None,
    epochs: Annotated[
        int,
        typer.Option(min=-1, help="AdamW epochs a block; 0: surgery with closed-form starts; -1: without images."),
    ] = 3,
    distill: Annotated[
        int | None,
        typer.Option(min=0, help="Epochs on the old network's logits, at the end; 5, or 0 without --epochs."),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate, relative to the size of each tensor.")] = 5e-3,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int, typer.Option("--limit", help="Calibration images.")] = 2000,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an interrupted run of the same command.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan with parameters, multiply-adds and bounds, and stop.")
    ] = False,
    bounds: Annotated[bool, typer.Option("--bounds/--no-bounds", help="Bounds in the plan.")] = True,
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
    """Turn a ViT, DeiT, Swin or ConViT into a Lipschitz-continuous one, block by block, fitted to the old one's outputs."""
    from certcli.adapt.pixels import compact
    from certcli.adapt.run import Adapter
    from certcli.adapt.settings import AdaptSettings
    from certcli.adapt.state import load_state, save_state
    from certcli.cli.inputs import calibration_images, hints, output_path, pick_device
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    settings = AdaptSettings(
        attention, norm, residual, activation, _widths(head), epochs, distill, lr, batch_size, seed, norm_floor
    )
    given = hints(arch, arch_arg, mean, std)
    if dry_run:
        _show_plan(_open_for_plan(ckpt, given, seed, sink), settings, bounds, sink)
        return
    path = output_path(output, ckpt, "adapt", force)
    checkpoint = open_checkpoint(ckpt, given)
    adapter_images = calibration_images(checkpoint.record, dataset, data_dir, limit, seed, sink)
    pixels = compact(batch for _, batch, _ in adapter_images.batches(256))
    adapter = Adapter(checkpoint, settings, pixels, pick_device(device))
    state_path = path.with_name(f"{path.name.removesuffix('.safetensors')}.state.safetensors")
    if resume and state_path.exists():
        adapter.restore(load_state(state_path, adapter.identity))
        sink.note(f"going on after {adapter.records[-1].path if adapter.records else 'the start'}")
    total = adapter.steps
    with sink.progress("adapt", total=total) as bar:
        bar.advance(adapter.steps_done)
        for record in adapter.run():
            save_state(state_path, adapter.state())
            bar.advance(remark=f"{record.path}: error {percent(record.error)}")
    adapter.result().write(path, force)
    state_path.unlink(missing_ok=True)
    parts = [{"path": r.path, "from": r.before, "to": r.after, "error": r.error} for r in adapter.records]
    memory = _peak_memory()
    sink.document({"output": str(path), "replaced": parts, "peak_memory_bytes": memory})
    sink.table(
        "Adapted parts, with their relative output error on the calibration images",
        ["part", "was", "is", "error"],
        [(r.path, r.before, r.after, percent(r.error)) for r in adapter.records],
    )
    sink.text(f"wrote {path}; peak memory {memory / 2**30:.1f} GiB")


def _open_for_plan(source: str, given: "Hints", seed: int, sink: Sink) -> "Checkpoint":
    """A checkpoint; a timm name gets random weights, since a plan is no reason to download any."""
    from dataclasses import replace
    from pathlib import Path

    import certcli.compat  # noqa: F401

    # isort: split
    import timm

    from certcli import models
    from certcli.foreign import open_checkpoint

    if Path(source).exists() or not timm.is_model(source):
        return open_checkpoint(source, given)
    net = models.create(source, given.arch_args, initialise=False)
    spec = models.spec_of(net, size=models.input_size_of(net))
    spec = replace(spec, mean=given.mean or spec.mean, std=given.std or spec.std)
    sink.note("nothing is downloaded for a plan: the bounds are those of random weights")
    return models.initialise(source, given.arch_args, spec, models.classes_of(net), seed)


def _show_plan(checkpoint: "Checkpoint", settings: "AdaptSettings", bounds: bool, sink: Sink) -> None:
    from dataclasses import asdict

    from certcli.adapt.preview import grouped, preview

    found = preview(checkpoint, settings, bounds)
    sink.document(
        {
            "plan": [{"path": change.path, "from": change.before, "to": change.after} for change in found.changes],
            "before": asdict(found.before),
            "after": asdict(found.after),
        }
    )
    sink.table(
        "Plan: nothing was changed",
        ["modules", "count", "are", "become"],
        [(pattern, str(count), before, after) for pattern, count, before, after in grouped(found.changes)],
    )
    rows = [
        ("parameters", f"{found.before.parameters:,}", f"{found.after.parameters:,}"),
        ("multiply-adds an image", *(f"{cost.multiply_adds / 1e6:,.1f} M" for cost in (found.before, found.after))),
    ]
    if bounds:
        rows.append(("Lipschitz bound", *(_power(cost.log10_upper) for cost in (found.before, found.after))))
    sink.table("Before and after surgery, before any fitting", ["", "before", "after"], rows)
    for name, cost in (("before", found.before), ("after", found.after)):
        if bounds and cost.log10_upper is None:
            sink.text(f"no bound {name}: {cost.why}")
    if settings.norm == "floor" and settings.norm_floor is None:
        sink.note("floors are found on the calibration images; the bound after surgery counts them as 1")


def _power(log10: float | None) -> str:
    return "inf" if log10 is None else f"10^{log10:.1f}"


def _peak_memory() -> int:
    """Bytes that this process held at most."""
    import resource
    import sys

    peak: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) * (1 if sys.platform == "darwin" else 1024)


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
