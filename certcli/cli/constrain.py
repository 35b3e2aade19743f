"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from typing import Annotated, Any

import typer

from certcli.cli import constrained, options
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
    layers: Annotated[
        list[str], typer.Option(help="Only layers whose path matches this pattern (* and ?); may be repeated.")
    ] = [],
    exclude: Annotated[
        list[str], typer.Option(help="Leave out layers whose path matches this pattern; may be repeated.")
    ] = [],
    iterations: Annotated[int, typer.Option(min=1, help="At most so many iterations a layer.")] = 200,
    target: Annotated[
        float | None, typer.Option(help="Bring the network's proven bound to this, at the least output error.")
    ] = None,
    distance: Annotated[
        str,
        typer.Option(
            help="plain, relu (the paper's one-sided one; layers followed by ReLU), auto (relu where it may)."
        ),
    ] = "plain",
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
    from certcli import models
    from certcli.cli.inputs import calibration_images, hints, output_path, pick_device
    from certcli.constrain import network
    from certcli.constrain.douglas_rachford import check_options
    from certcli.constrain.methods import METHODS
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    METHODS[prox]
    check_options(beta, eta, relaxation)
    chosen = network.Options(prox, beta, eta, relaxation, iterations, per_head)
    limit_bytes = _bytes(memory)
    path = output_path(output, ckpt, "constrain", force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    size, classes = record.input.size, record.classes
    images = calibration_images(record, dataset, data_dir, limit, seed, sink)
    model = models.load(checkpoint, pick_device(device), writable=True)
    paths, refused = _choose(model, layers, exclude)
    # every fifth image is held out: the order is by class in many datasets
    held_out = list(range(len(images)))[::5] if len(images) >= 10 else []
    seen, unseen = (
        images.select([row for row in range(len(images)) if row not in set(held_out)]),
        images.select(held_out),
    )
    calibration = network.Calibration(
        model,
        paths,
        lambda: (pixels for _, pixels, _ in seen.batches(batch_size)),
        (lambda: (pixels for _, pixels, _ in unseen.batches(batch_size))) if held_out else None,
        groups,
        limit_bytes,
        network.rectified_paths(model, size, paths, distance),
    )
    before, clean_before = network.network_upper(model, size, classes), _accuracy(model, unseen, record)
    found = {}
    if target is not None or plot is not None:
        with sink.progress("Pareto curves", total=len(paths)) as bar:
            for name, curve in network.curves(calibration, chosen):
                found[name] = curve
                bar.advance(remark=name)
    if target is not None:
        results = network.meet_target(calibration, size, classes, found, target, chosen)
    else:
        results = []
        with sink.progress("constrain", total=len(paths)) as bar:
            for result in network.constrain_to(calibration, chosen):
                results.append(result)
                bar.advance(remark=result.path)
        network.write(model, {result.path: result.weight for result in results})
    constrained.remarks(results, sorted(set(paths) - calibration.called), refused, sink)
    after, clean_after = network.network_upper(model, size, classes), _accuracy(model, unseen, record)
    parameters = {
        "prox": prox,
        "beta": beta,
        "eta": eta,
        "relaxation": relaxation,
        "iterations": iterations,
        "layers": layers,
        "exclude": exclude,
        "target": target,
        "distance": distance,
        "groups": groups,
        "per_head": per_head,
        "calibration": images.name,
        "images": len(images),
    }
    derived = checkpoint.derive(models.tensors_of(model), "constrain", parameters, seed)
    derived.write(path, force)
    sink.document(constrained.document(path, before, after, clean_before, clean_after, results))
    allowed = f"eta {eta:g}" if target is None else f"target {target:g}"
    constrained.table(f"Norms (proven) before and after, prox {prox}, beta {beta:g}, {allowed}", results, sink)
    sink.text(f"network's bound: {before} -> {after}")
    if clean_before is not None:
        sink.text(f"accuracy on {len(unseen)} held-out images: {percent(clean_before)} -> {percent(clean_after)}")
    if plot is not None:
        constrained.plot(found, results, plot, sink)
    sink.text(f"wrote {path}")


def _choose(model: Any, layers: list[str], exclude: list[str]) -> tuple[list[str], dict[str, str]]:
    """(full paths to constrain, those among the chosen that cannot be and why)."""
    from fnmatch import fnmatch

    from torch import nn

    from certcli.constrain.layers import refusal
    from certcli.errors import UsageError

    paths, refused = [], {}
    for name, module in model.net.named_modules():
        if not isinstance(module, (nn.Linear, nn.Conv2d)):
            continue
        wanted = not layers or any(fnmatch(name, pattern) for pattern in layers)
        if wanted and not any(fnmatch(name, pattern) for pattern in exclude):
            reason = refusal(module)
            if reason is None:
                paths.append(f"net.{name}" if name else "net")
            else:
                refused[name] = reason
    if not paths:
        raise UsageError("no layer is left to constrain", "see --layers and --exclude; `certvit lipschitz --layers`")
    return paths, refused


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
