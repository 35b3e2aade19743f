"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from collections.abc import Mapping
from dataclasses import asdict, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli import constrained, options
from certcli.cli.command import command, group
from certcli.cli.groups import Calibration, Machine, Output, Source, Talk
from certcli.cli.output import Sink, percent

if TYPE_CHECKING:
    from certcli.constrain import network


@group("Method")
class Method:
    """The proximal map and its algorithm, under the paper's names."""

    beta: Annotated[float, typer.Option(help="Strength of the proximal map, the same scale for every layer.")] = 0.01
    eta: Annotated[
        float, typer.Option(help="Relative output error that each layer may make (the paper allows 0.1).")
    ] = 0.03
    relaxation: Annotated[float, typer.Option(help="lambda of Douglas-Rachford, in (0, 2).")] = 1.2
    prox: Annotated[str, typer.Option(help="spectral, l1 (the paper's), nuclear, clip, ball.")] = "spectral"
    iterations: Annotated[int, typer.Option(min=1, help="At most so many iterations a layer.")] = 200
    target: Annotated[
        float | None, typer.Option(help="Bring the network's proven bound to this, at the least output error.")
    ] = None
    distance: Annotated[
        str,
        typer.Option(
            help="plain, relu (the paper's one-sided one; layers followed by ReLU), auto (relu where it may)."
        ),
    ] = "plain"
    per_head: Annotated[bool, typer.Option("--per-head", help="Penalise q, k and v head by head.")] = False
    groups: Annotated[int, typer.Option(min=1, help="Mini-batch groups, each with a constraint of its own.")] = 1

    def options(self) -> "network.Options":
        """Checked; the core's own object."""
        from certcli.constrain import network
        from certcli.constrain.douglas_rachford import check_options
        from certcli.constrain.methods import METHODS

        METHODS[self.prox]
        check_options(self.beta, self.eta, self.relaxation)
        return network.Options(self.prox, self.beta, self.eta, self.relaxation, self.iterations, self.per_head)


@group("Layers")
class Layers:
    """Which layers, how many at a time, and a drawing of their curves."""

    layers: Annotated[
        list[str], typer.Option(help="Only layers whose path matches this pattern (* and ?); may be repeated.")
    ] = field(default_factory=list)
    exclude: Annotated[
        list[str], typer.Option(help="Leave out layers whose path matches this pattern; may be repeated.")
    ] = field(default_factory=list)
    memory: Annotated[
        str | None, typer.Option(help="Most memory for statistics, e.g. 2G: layers in several passes.")
    ] = None
    plot: options.Plot = None


@command(
    "certvit constrain m.safetensors --beta 0.01",
    "certvit constrain m.safetensors --target 100 --dataset photos/ -o lower.safetensors",
    page="constrain.md",
)
def constrain(
    source: Source,
    method: Method = Method(),
    layers: Layers = Layers(),
    data: Calibration = Calibration(limit=500),
    machine: Machine = Machine(batch_size=50),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Lower each layer's spectral norm as far as its outputs on calibration images allow (Douglas-Rachford)."""
    from certcli import models
    from certcli.constrain import network

    sink = talk.sink()
    chosen, memory = method.options(), _bytes(layers.memory)
    path = output.target("constrain", source.ckpt, source, data, layers)
    checkpoint = source.open()
    record = checkpoint.record
    size, classes = record.input.size, record.classes
    images = data.images(record, sink)
    model = models.load(checkpoint, machine.pick(), writable=True)
    paths, refused = constrained.choose(model, layers.layers, layers.exclude)
    seen, unseen = constrained.split(images)
    calibration = network.Calibration(
        model,
        paths,
        lambda: (pixels for _, pixels, _ in seen.batches(machine.batch_size)),
        (lambda: (pixels for _, pixels, _ in unseen.batches(machine.batch_size))) if len(unseen) else None,
        method.groups,
        memory,
        network.rectified_paths(model, size, paths, method.distance),
    )
    before, clean_before = network.network_upper(model, size, classes), constrained.accuracy(model, unseen, record)
    found = _curves(calibration, chosen, sink) if method.target is not None or layers.plot is not None else {}
    if method.target is not None:
        results = network.meet_target(calibration, size, classes, found, method.target, chosen)
    else:
        results = _constrain(calibration, chosen, sink)
        network.write(model, {result.path: result.weight for result in results})
    constrained.remarks(results, sorted(set(paths) - calibration.called), refused, sink)
    after, clean_after = network.network_upper(model, size, classes), constrained.accuracy(model, unseen, record)
    parameters = {
        **asdict(method),
        "layers": layers.layers,
        "exclude": layers.exclude,
        "calibration": images.name,
        "images": len(images),
    }
    derived = checkpoint.derive(models.tensors_of(model), "constrain", parameters, data.seed)
    derived.write(path, output.force)
    if layers.plot is not None:
        constrained.plot(found, results, layers.plot, sink)
    sink.document(constrained.document(path, before, after, clean_before, clean_after, results))
    allowed = f"eta {method.eta:g}" if method.target is None else f"target {method.target:g}"
    title = f"Norms (proven) before and after, prox {method.prox}, beta {method.beta:g}, {allowed}"
    constrained.table(title, results, sink)
    sink.text(f"network's bound: {before} -> {after}")
    if clean_before is not None:
        sink.text(f"accuracy on {len(unseen)} held-out images: {percent(clean_before)} -> {percent(clean_after)}")
    sink.text(f"wrote {path}")


def _curves(calibration: "network.Calibration", chosen: "network.Options", sink: Sink) -> Mapping[str, Any]:
    from certcli.constrain import network

    found = {}
    with sink.progress("Pareto curves", total=len(calibration.paths)) as bar:
        for name, curve in network.curves(calibration, chosen):
            found[name] = curve
            bar.advance(remark=name)
    return found


def _constrain(calibration: "network.Calibration", chosen: "network.Options", sink: Sink) -> list[Any]:
    from certcli.constrain import network

    results = []
    with sink.progress("constrain", total=len(calibration.paths)) as bar:
        for result in network.constrain_to(calibration, chosen):
            results.append(result)
            bar.advance(remark=result.path)
    return results


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
