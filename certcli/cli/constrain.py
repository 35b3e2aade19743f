"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from typing import Annotated

import typer

from certcli.cli import options
from certcli.cli.audit import log10_or_none, number
from certcli.cli.output import Sink, percent


def constrain(
    ckpt: options.CheckpointArgument,
    output: options.Output = None,
    beta: Annotated[float, typer.Option(help="Strength of the proximal map, the same scale for every layer.")] = 0.01,
    eta: Annotated[
        float, typer.Option(help="Relative output error that each layer may make (the paper allows 0.1).")
    ] = 0.03,
    relaxation: Annotated[float, typer.Option(help="lambda of Douglas-Rachford, in (0, 2).")] = 1.2,
    prox: Annotated[str, typer.Option(help="spectral, l1 (the paper's), nuclear, clip, ball.")] = "spectral",
    layers: Annotated[str | None, typer.Option(help="Only layers whose path matches this pattern (* and ?).")] = None,
    exclude: Annotated[str | None, typer.Option(help="Leave out layers whose path matches this pattern.")] = None,
    iterations: Annotated[int, typer.Option(min=1, help="At most so many iterations a layer.")] = 200,
    target: Annotated[
        float | None, typer.Option(help="Bring the network's proven bound to this, at the least output error.")
    ] = None,
    per_head: Annotated[bool, typer.Option("--per-head", help="Penalise q, k and v head by head.")] = False,
    groups: Annotated[int, typer.Option(min=1, help="Mini-batch groups, each with a constraint of its own.")] = 1,
    memory: Annotated[
        str | None, typer.Option(help="Most memory for statistics, e.g. 2G: layers in several passes.")
    ] = None,
    plot: options.Plot = None,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    limit: Annotated[int, typer.Option("--limit", help="Calibration images.")] = 500,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 50,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Lower each layer's spectral norm as far as its outputs on calibration images allow (Douglas-Rachford)."""
    from fnmatch import fnmatch

    from certcli import models
    from certcli.cli.inputs import calibration_images, hints, output_path, pick_device
    from certcli.constrain.douglas_rachford import check_options
    from certcli.constrain.methods import METHODS
    from certcli.constrain.network import Options, constrain_to, curves, meet_target, network_upper
    from certcli.constrain.statistics import collect, constrainable
    from certcli.errors import UsageError
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    METHODS[prox]
    check_options(beta, eta, relaxation)
    chosen = Options(prox, beta, eta, relaxation, iterations, per_head)
    limit_bytes = _bytes(memory)
    path = output_path(output, ckpt, "constrain", force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    size, classes = record.input.size, record.classes
    images = calibration_images(record, dataset, data_dir, limit, seed, sink)
    model = models.load(checkpoint, pick_device(device), writable=True)
    paths = [p for p in constrainable(model.net) if (layers is None or fnmatch(p, layers))]
    paths = [p for p in paths if exclude is None or not fnmatch(p, exclude)]
    if not paths:
        raise UsageError("no layer is left to constrain", "see --layers and --exclude; `certvit lipschitz --layers`")
    # every fifth image is held out: the order is by class in many datasets
    rows = range(len(images))
    held_out = list(rows[::5]) if len(images) >= 10 else []
    training, rest = images.select([row for row in rows if row not in set(held_out)]), images.select(held_out)
    before, clean_before = network_upper(model, size, classes), _accuracy(model, rest, record)
    full = [f"net.{p}" for p in paths]
    with sink.progress("statistics", total=None):
        statistics = collect(
            model,
            [pixels for _, pixels, _ in training.batches(batch_size)],
            full,
            groups=groups,
            memory_limit_bytes=limit_bytes,
            held_out_batches=[pixels for _, pixels, _ in rest.batches(batch_size)] if held_out else None,
        )
    found = {}
    if target is not None or plot is not None:
        with sink.progress("Pareto curves", total=len(statistics)) as bar:
            for name, curve in curves(statistics, chosen):
                found[name] = curve
                bar.advance(remark=name)
    if target is not None:
        results = meet_target(model, size, classes, statistics, found, target, chosen)
    else:
        results = []
        with sink.progress("constrain", total=len(statistics)) as bar:
            for result in constrain_to(model, statistics, dict.fromkeys(statistics, eta), chosen):
                results.append(result)
                bar.advance(remark=result.path)
    unseen = sorted(set(full) - set(statistics))
    if unseen:
        sink.warn(f"never called as a module, hence unchanged: {', '.join(p.removeprefix('net.') for p in unseen)}")
    thin = [result.path.removeprefix("net.") for result in results if result.ridge > 0]
    if thin:
        sink.note(f"fewer independent inputs than width in {len(thin)} layers ({thin[0]}, ...): regularised")
    after, clean_after = network_upper(model, size, classes), _accuracy(model, rest, record)
    parameters = {
        "prox": prox,
        "beta": beta,
        "eta": eta,
        "relaxation": relaxation,
        "iterations": iterations,
        "layers": layers,
        "exclude": exclude,
        "target": target,
        "groups": groups,
        "per_head": per_head,
        "calibration": images.name,
        "images": len(images),
    }
    derived = checkpoint.derive(models.tensors_of(model), "constrain", parameters, seed)
    derived.write(path, force)
    sink.document(
        {
            "output": str(path),
            "upper_before": number(before),
            "upper_after": number(after),
            "log10_upper_before": log10_or_none(before),
            "log10_upper_after": log10_or_none(after),
            "clean_before": clean_before,
            "clean_after": clean_after,
            "layers": [
                {
                    "path": r.path.removeprefix("net."),
                    "before": r.before,
                    "after": r.after,
                    "error": r.error,
                    "held_out_error": r.held_out_error,
                    "iterations": r.iterations,
                    "primal_residual": r.primal_residual,
                    "feasible": r.feasible,
                    "rank": r.rank,
                    "seconds": r.seconds,
                }
                for r in results
            ],
        }
    )
    sink.table(
        f"Spectral norms (proven) before and after, prox {prox}, beta {beta:g}, eta {eta:g}",
        ["layer", "before", "after", "error", "held out", "iterations", "s"],
        [
            (
                r.path.removeprefix("net."),
                f"{r.before:.4g}",
                f"{r.after:.4g}",
                percent(r.error),
                percent(r.held_out_error),
                str(r.iterations),
                f"{r.seconds:.2f}",
            )
            for r in results
        ],
    )
    sink.text(f"network's bound: {before} -> {after}")
    if clean_before is not None:
        sink.text(f"accuracy on {len(rest)} held-out images: {percent(clean_before)} -> {percent(clean_after)}")
    if plot is not None:
        from certcli.report.pareto import draw_curves

        draw_curves(
            {
                name.removeprefix("net."): [(point.error, point.norm) for point in curve]
                for name, curve in found.items()
            },
            {r.path.removeprefix("net."): (r.error, r.after) for r in results},
            plot,
        )
        sink.note(f"wrote {plot}")
    sink.text(f"wrote {path}")


def _bytes(text: str | None) -> int | None:
    """\"500M\" or \"2G\" -> bytes."""
    from certcli.errors import UsageError

    if text is None:
        return None
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:].upper(), 1)
    try:
        return int(float(text.rstrip("kKmMgG")) * scale)
    except ValueError as failure:
        raise UsageError(f"--memory '{text}' is not a size", "--memory 500M, or --memory 2G") from failure


def _accuracy(model, images, record) -> float | None:  # type: ignore[no-untyped-def]
    """Clean accuracy where the calibration images have the network's labels."""
    import torch

    from certcli import data
    from certcli.errors import DataError

    try:
        labelled = data.require_classes(images, record.classes, record.class_names)
    except DataError:
        return None
    if record.dataset is None and labelled.name == "digits":
        return None  # the default images: their ten labels are not those of a foreign network
    right, device = 0, next(model.parameters()).device
    with torch.no_grad():
        for _, pixels, labels in labelled.batches(64):
            right += int((model(pixels.to(device)).argmax(1).cpu() == labels).sum())
    return right / len(labelled) if len(labelled) else None
