"""certvit constrain: lower each layer's Lipschitz constant, keep its outputs."""

from dataclasses import asdict, replace

from certcli.cli.constrain import view
from certcli.cli.shared import fidelity
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import BatchDevice, Calibration, Output, Source, Talk
from certcli.cli.shared.inputs import say_wider
from certcli.constrain.settings import BETA, ConstrainSettings, preset_of
from certcli.system.errors import UsageError
from certcli.system.options import option
from certcli.system.processes import team


@group("Method")
class Aim:
    """The allowed output error."""

    keep: float | None = option(
        None,
        "Fraction of top-1 predictions to preserve on held-out images (default 0.98; 0.95 "
        "on synthetic images). Sets --eta.",
    )
    eta: float | None = option(
        None, "Allowed relative output error of each layer, in place of --keep."
    )
    preset: str | None = option(
        None,
        "certvit-paper: the paper's problem in its own units (l1, absolute eta 0.1, all "
        "tokens, no ridge), 10 iterations; certvit-paper-tables: eta 0.01 and beta 0.1, as its "
        "Tables 9 and 10 have. Either takes --beta and --relaxation.",
    )


def preset_settings(aim: Aim, settings: ConstrainSettings) -> ConstrainSettings:
    """Return the preset's, with beta and lambda as typed; UsageError where another option differs."""
    assert aim.preset is not None
    if (aim.keep, aim.eta) != (None, None) or settings != ConstrainSettings(
        beta=settings.beta, relaxation=settings.relaxation
    ):
        raise UsageError(
            "--preset sets the method and the error",
            "of --eta, --keep and Method it takes --beta and --relaxation alone",
        )
    return replace(
        preset_of(aim.preset),
        beta=settings.beta or preset_of(aim.preset).beta,
        relaxation=settings.relaxation,
    )


@group("Layers")
class Layers:
    """Which layers."""

    layers: list[str] = option(
        list, "Only layers whose path matches this pattern (* and ?); may be repeated."
    )


@command(
    "certvit constrain m.safetensors --beta 0.01",
    "certvit constrain m.safetensors --keep 0.9 --dataset photos/ -o lower.safetensors",
    page="constrain.md",
    often=(
        "prox",
        "beta",
        "keep",
        "eta",
        "preset",
        "layers",
    ),
)
def constrain(
    source: Source,
    settings: ConstrainSettings = ConstrainSettings(),
    aim: Aim = Aim(),
    layers: Layers = Layers(),
    data: Calibration = Calibration(limit=300),
    machine: BatchDevice = BatchDevice(batch_size=50),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Lower each layer's spectral norm as far as its outputs on calibration images allow
    (Douglas-Rachford).
    """
    from certcli.checkpoint.record import SEEN
    from certcli.cli.constrain import run
    from certcli.constrain import network
    from certcli.constrain.keep import START, check_keep, usual_share
    from certcli.evaluation.fidelity import MANY_JUDGES
    from certcli.evaluation.training_images import kept_of
    from certcli.images.calibration import hold_out
    from certcli.images.labelled import at_once
    from certcli.models import build

    sink = talk.sink()
    if aim.preset is not None:
        settings = preset_settings(aim, settings)
    elif settings.beta is not None:
        sink.note("beta sets the pace; --keep or --eta the strength")
    settings = replace(
        settings, eta=START if aim.eta is None else aim.eta, beta=settings.beta or BETA
    )
    if aim.keep is not None:
        check_keep(aim.keep)
    path = output.target("constrain", source.ckpt, source, data, layers)
    checkpoint = source.open(sink)
    record = checkpoint.record
    size = record.input.size
    classes = record.classes
    images = data.images(record, sink, judges=max(0, min(2 * data.limit, MANY_JUDGES)))
    keep = usual_share(images) if aim.keep is None else aim.keep
    model = build.load(checkpoint, machine.pick())
    paths, refused = view.choose(model, layers.layers)
    used, unseen = hold_out(images, limit=data.limit)
    memory = network.room_for(model, paths) if machine.pick().type == "cpu" else None
    if memory is not None:
        sink.note(f"statistics of {memory / 2**30:.1f} GiB at a time, the network is run for each")
    batch = at_once(machine.batch_size, size, machine.pick())
    calibration = network.LayerCalibration(
        model,
        paths,
        lambda: (pixels for _, pixels, _ in used.batches(batch)),
        (lambda: (pixels for _, pixels, _ in unseen.batches(batch))) if len(unseen) else None,
        memory,
        settings.tokens,
        team=team(),
    )
    with calibration.watching():
        reference = fidelity.measure_reference(model, used, unseen, record, batch, sink)
    before = network.network_upper(model, size, classes) if team().leads else None
    job = run.Job(calibration, settings, sink)
    judged = None
    if aim.eta is not None or aim.preset is not None:
        results = job.to_error()
    else:
        results, judged = job.to_agreement(keep, reference)
    if not team().leads:
        return
    view.remarks(results, sorted(set(paths) - calibration.called), refused, sink)
    after = network.network_upper(model, size, classes)
    end_to_end = fidelity.fidelity_document(reference, model, record, not len(unseen), judged) | {
        "chose": judged is not None
    }
    parameters = {
        **asdict(settings),
        **asdict(aim),
        "keep": keep,
        "layers": layers.layers,
        "calibration": images.name,
        "images": min(len(images), data.limit),
        SEEN: kept_of(used),
    }
    if aim.eta is None:
        parameters["eta"] = max((result.eta for result in results), default=0.0)
    derived = checkpoint.derive(
        build.tensors_of(model, copy=False), "constrain", parameters, data.seed
    )
    say_wider(checkpoint, derived, sink)
    output.write(derived.with_evidence("constrain", {"calibration": images.name}, end_to_end), path)
    sink.document(view.document(path, before, after, end_to_end, results))
    fidelity.show(end_to_end, sink)
    sink.text(f"network's bound: {before} -> {after}")
    title = (
        f"Norms (proven) before and after, prox {settings.prox}, beta {settings.beta:g}, "
        f"eta {parameters['eta']:.3g}"
    )
    view.table(title, results, sink)
    sink.text(f"wrote {path}")
