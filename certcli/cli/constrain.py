"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from typing import Annotated

import typer

from certcli.cli import options
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
    from certcli.constrain.parallel import attention_blocks, constrain_layers
    from certcli.constrain.statistics import collect, constrainable
    from certcli.errors import UsageError
    from certcli.foreign import open_checkpoint
    from certcli.lipschitz.propagate import bound_network

    sink = Sink(as_json, quiet)
    METHODS[prox]
    check_options(beta, eta, relaxation)
    path = output_path(output, ckpt, "constrain", force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    images = calibration_images(record, dataset, data_dir, limit, seed, sink)
    model = models.load(checkpoint, pick_device(device), writable=True)
    paths = [p for p in constrainable(model.net) if (layers is None or fnmatch(p, layers))]
    paths = [p for p in paths if exclude is None or not fnmatch(p, exclude)]
    if not paths:
        raise UsageError("no layer is left to constrain", "see --layers and --exclude; `certvit lipschitz --layers`")
    held_out = max(1, len(images) // 5) if len(images) >= 10 else 0
    rows = list(range(len(images)))
    training, rest = images.select(rows[: len(rows) - held_out]), images.select(rows[len(rows) - held_out :])
    before = bound_network(model, record.input.size, record.classes).upper
    full = [f"net.{p}" for p in paths]
    with sink.progress("statistics", total=len(training)) as bar:
        statistics = collect(
            model,
            _watched(training.batches(batch_size), bar),
            full,
            held_out_batches=[pixels for _, pixels, _ in rest.batches(batch_size)] if held_out else None,
        )
    results = []
    with sink.progress("constrain", total=len(statistics)) as bar:
        for result in constrain_layers(
            statistics,
            prox=prox,
            beta=beta,
            eta=eta,
            relaxation=relaxation,
            max_iterations=iterations,
            blocks=attention_blocks(model),
        ):
            model.get_submodule(result.path).weight.data.copy_(result.weight)  # type: ignore[operator]
            results.append(result)
            bar.advance(remark=result.path)
    unseen = sorted(set(full) - {result.path for result in results})
    if unseen:
        sink.warn(f"never called as a module, hence unchanged: {', '.join(p.removeprefix('net.') for p in unseen)}")
    thin = [result.path.removeprefix("net.") for result in results if result.ridge > 0]
    if thin:
        sink.note(f"fewer independent inputs than width in {len(thin)} layers ({thin[0]}, ...): regularised")
    after = bound_network(model, record.input.size, record.classes).upper
    parameters = {
        "prox": prox,
        "beta": beta,
        "eta": eta,
        "relaxation": relaxation,
        "iterations": iterations,
        "layers": layers,
        "exclude": exclude,
        "calibration": images.name,
        "images": len(images),
    }
    derived = checkpoint.derive(models.tensors_of(model), "constrain", parameters, seed)
    derived.write(path, force)
    sink.document(
        {
            "output": str(path),
            "upper_before": _number(before),
            "upper_after": _number(after),
            "log10_upper_before": _log(before),
            "log10_upper_after": _log(after),
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
    sink.text(f"wrote {path}")


def _watched(batches, bar):  # type: ignore[no-untyped-def]
    for indices, pixels, _ in batches:
        yield pixels
        bar.advance(len(indices))


def _number(value) -> float | str:  # type: ignore[no-untyped-def]
    shown = float(value)
    return shown if shown < float("inf") else "inf"


def _log(value) -> float | None:  # type: ignore[no-untyped-def]
    return value.log10() if value.finite else None
