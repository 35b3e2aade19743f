"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli.constrain import view
from certcli.cli.shared import fidelity, options
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Calibration, Machine, Output, Source, Talk
from certcli.cli.shared.inputs import say_wider, size_in_bytes
from certcli.cli.shared.output import Sink
from certcli.system.processes import team

if TYPE_CHECKING:
    from certcli.constrain import network
    from certcli.constrain.options import Options
    from certcli.evaluation.fidelity import Fidelity, ReferenceLogits


@group("Method")
class Method:
    """The proximal map and its algorithm, under the paper's names."""

    beta: Annotated[float, typer.Option(help="Strength of the proximal map, the same scale for every layer.")] = 0.01
    keep: Annotated[
        float | None,
        typer.Option(
            help="Share of first choices to keep, on images that take no part: the layers' eta is found by it. 0.98 "
            "unless given; 0.95 on images made on the spot."
        ),
    ] = None
    eta: Annotated[
        float | None,
        typer.Option(help="Relative output error that each layer may make, in place of --keep (the paper allows 0.1)."),
    ] = None
    relaxation: Annotated[float, typer.Option(help="lambda of Douglas-Rachford, in (0, 2).")] = 1.2
    prox: Annotated[str, typer.Option(help="spectral, l1 (the paper's), nuclear, clip, ball.")] = "spectral"
    iterations: Annotated[int, typer.Option(min=1, help="At most so many iterations a layer.")] = 200
    target: Annotated[
        float | None, typer.Option(min=0, help="Bring the network's proven bound to this, at the least output error.")
    ] = None
    distance: Annotated[
        str,
        typer.Option(
            help="plain, relu (the paper's one-sided one; layers followed by ReLU), auto (relu where it may)."
        ),
    ] = "plain"
    per_head: Annotated[bool, typer.Option("--per-head", help="Penalise q, k and v head by head.")] = False
    groups: Annotated[int, typer.Option(min=1, help="Mini-batch groups, each with a constraint of its own.")] = 1
    ridge: Annotated[
        float,
        typer.Option(min=0, help="Isotropic part of the statistics, a share of their mean: no direction moves freely."),
    ] = 0.3
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of an image that count; 0: all, with products in float64.")
    ] = 50

    def options(self) -> "Options":
        """Return the core's own options, checked."""
        from certcli.constrain.keep import START, check_keep
        from certcli.constrain.options import Options

        chosen = Options(
            prox=self.prox,
            beta=self.beta,
            eta=START if self.eta is None else self.eta,
            relaxation=self.relaxation,
            iterations=self.iterations,
            per_head=self.per_head,
            ridge=self.ridge or None,
        )
        if self.keep is not None:
            check_keep(self.keep)
        return chosen


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
    data: Calibration = Calibration(limit=300),
    machine: Machine = Machine(batch_size=50),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Lower each layer's spectral norm as far as its outputs on calibration images allow (Douglas-Rachford)."""
    from certcli.checkpoint.record import SEEN
    from certcli.constrain import network
    from certcli.constrain.keep import usual_share
    from certcli.evaluation.seen import kept_of
    from certcli.images.calibration import hold_out
    from certcli.models import build

    sink = talk.sink()
    chosen = method.options()
    memory = None if layers.memory is None else size_in_bytes("--memory", layers.memory)
    path = output.target("constrain", source.ckpt, source, data, layers)
    checkpoint = source.open(sink)
    record = checkpoint.record
    size, classes = record.input.size, record.classes
    images = data.images(record, sink)
    keep = usual_share(images) if method.keep is None else method.keep
    model = build.load(checkpoint, machine.pick())
    paths, refused = view.choose(model, layers.layers, layers.exclude)
    seen, unseen = hold_out(images)
    if memory is None and machine.pick().type == "cpu":
        memory = network.room_for(model, paths, method.groups)
        if memory is not None:
            sink.note(f"statistics of {memory / 2**30:.1f} GiB at a time, the network is run for each: --memory")
    calibration = network.LayerCalibration(
        model,
        paths,
        lambda: (pixels for _, pixels, _ in seen.batches(machine.batch_size)),
        (lambda: (pixels for _, pixels, _ in unseen.batches(machine.batch_size))) if len(unseen) else None,
        method.groups,
        memory,
        network.rectified_paths(model, size, paths, method.distance),
        method.tokens or None,
        team=team(),
    )
    with calibration.watching():
        reference = fidelity.measure_reference(model, seen, unseen, record, machine.batch_size, sink)
    before = network.network_upper(model, size, classes) if team().leads else None
    found = _curves(calibration, chosen, sink) if method.target is not None or layers.plot is not None else {}
    judged = None
    if method.target is not None:
        results = network.meet_target(calibration, size, classes, found, method.target, chosen)
    elif method.eta is not None:
        results = _constrain(calibration, chosen, sink)
        network.write(model, {result.path: result.weight for result in results})
    else:
        results, judged = _keeping(calibration, chosen, keep, reference, sink)
    if not team().leads:
        return
    view.remarks(results, sorted(set(paths) - calibration.called), refused, sink)
    after = network.network_upper(model, size, classes)
    end_to_end = fidelity.fidelity_document(reference, model, record, not len(unseen), judged) | {
        "chose": judged is not None
    }
    parameters = {
        **asdict(method),
        "keep": keep,
        "layers": layers.layers,
        "exclude": layers.exclude,
        "calibration": images.name,
        "images": len(images),
        SEEN: kept_of(seen),
    }
    if method.eta is None and method.target is None:
        parameters["eta"] = max((result.eta for result in results), default=0.0)
    derived = checkpoint.derive(build.tensors_of(model, copy=False), "constrain", parameters, data.seed)
    say_wider(checkpoint, derived, sink)
    output.write(derived.with_evidence("constrain", {"calibration": images.name}, end_to_end), path)
    if layers.plot is not None:
        network_name, where = Path(source.ckpt).stem, f"{len(seen)} images of {images.name} ({images.split})"
        view.plot(found, results, layers.plot, f"{network_name}: norm against output error on {where}", sink)
    sink.document(view.document(path, before, after, end_to_end, results))
    fidelity.show(end_to_end, sink)
    sink.text(f"network's bound: {before} -> {after}")
    allowed = f"target {method.target:g}" if method.target is not None else f"eta {parameters['eta']:.3g}"
    title = f"Norms (proven) before and after, prox {method.prox}, beta {method.beta:g}, {allowed}"
    view.table(title, results, sink)
    sink.text(f"wrote {path}")


def _curves(calibration: "network.LayerCalibration", chosen: "Options", sink: Sink) -> Mapping[str, Any]:
    from certcli.constrain import network

    found = {}
    with sink.progress("Pareto curves", total=len(calibration.paths)) as bar:
        for name, curve in network.curves(calibration, chosen):
            found[name] = curve
            bar.advance(remark=name)
    return found


def _constrain(calibration: "network.LayerCalibration", chosen: "Options", sink: Sink) -> list[Any]:
    from certcli.constrain import network

    results = []
    with sink.progress("constrain", total=len(calibration.paths)) as bar:
        for result in network.constrain_to(calibration, chosen):
            results.append(result)
            bar.advance(remark=result.path)
    return results


def _keeping(
    calibration: "network.LayerCalibration", chosen: "Options", keep: float, reference: "ReferenceLogits", sink: Sink
) -> tuple[list[Any], "Fidelity"]:
    """The layers at the largest eta that keeps enough, and what the network then keeps; what was found is said."""
    from certcli.constrain.keep import ROUNDS, TRIALS, constrain_keeping

    with sink.progress("constrain", total=len(calibration.paths) * (TRIALS + ROUNDS)) as bar:
        found = constrain_keeping(
            calibration,
            chosen,
            keep,
            reference,
            lambda eta, path: bar.advance(remark=f"eta {eta:.3g}: {path}"),
        )
    if not found.results:
        sink.warn(f"no eta that was tried keeps {100 * keep:g} % of the first choices: nothing is changed")
    return list(found.results), found.fidelity
