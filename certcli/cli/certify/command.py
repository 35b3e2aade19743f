"""certvit certify: certified accuracy at radii or against patches, one record an image."""

from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.certify.local_options import Local
from certcli.certify.patch.options import Patches
from certcli.certify.smoothing.options import Smoothing, Tuning
from certcli.cli.shared import inputs, options
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Evaluation, Machine, Output, Source, Talk
from certcli.cli.shared.output import Gate
from certcli.evaluation.threat import Threat
from certcli.system.processes import require_one, team

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint

RADII = {"l2": [0.25, 0.5, 1.0], "linf": [1 / 255, 2 / 255, 4 / 255, 8 / 255]}
"""Radii at which certified accuracy is shown where none is asked for."""


@group()
class Wanted:
    """What is certified, at which radii, and what the result must meet."""

    epsilon: Annotated[
        list[float],
        typer.Option(
            "--epsilon",
            "-e",
            parser=options.fraction,
            metavar="R",
            help="Radius in pixel units: 0.5 or 36/255; may be repeated. Default: 0.25, 0.5, 1; in linf 1, 2, 4, 8 / 255.",
        ),
    ] = field(default_factory=list)
    methods: Annotated[
        list[str],
        typer.Option(
            "--method",
            help="lipschitz (global bound, proof), local (each image on its own, small networks, proof), local-lip or bcp "
            "(the same for chains of layers), smoothing (any network, probability), patch (any network behind masks, against "
            "patches, proof), auto (says which is worth having); several: side by side.",
        ),
    ] = field(default_factory=lambda: ["lipschitz"])
    minimum: Annotated[
        str | None,
        typer.Option(
            "--min-certified",
            metavar="SHARE[@R]",
            help="Exit 7 below this share at radius (or patch) R (default: the smallest).",
        ),
    ] = None
    records: options.Records = None
    resume: options.Resume = False
    attack_records: Annotated[
        Path | None,
        typer.Option(
            "--attack-records", help="Records of `attack`, shown beside the certificates and above the curve of --plot."
        ),
        options.Reads(),
    ] = None
    verify: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Check these --records: certify again with other noise, attack inside each radius; exit 7 if refuted.",
        ),
        options.Reads(),
    ] = None
    sample: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With --verify: check N records, drawn afresh.")
    ] = None
    plot: options.Plot = None
    html: options.Html = None


@command(
    "certvit certify m.safetensors -e 36/255 -e 0.5 --records certified.jsonl",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method smoothing --sigma 0.12 -e 0.12 --limit 50",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method patch --patch 32 --limit 200",
    "certvit certify m.safetensors --verify certified.jsonl --sample 100",
    page="certify.md",
)
def certify(
    context: typer.Context,
    source: Source,
    wanted: Wanted = Wanted(),
    smoothing: Smoothing = Smoothing(),
    local: Local = Local(),
    patches: Patches = Patches(),
    data: Evaluation = Evaluation(),
    machine: Machine = Machine(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Share of the images that are classified correctly, certified, within each pixel l2 radius (or against each patch)."""
    from certcli.cli.certify import run, view
    from certcli.cli.certify import verify as rechecked
    from certcli.cli.shared import pages, typed_command
    from certcli.evaluation.records import digested
    from certcli.system.errors import NoBoundError

    if wanted.verify is not None or wanted.sample is not None:
        require_one("records are verified", "certvit certify ... --verify, without torchrun")
        asked = rechecked.Asked(
            wanted.verify,
            wanted.sample,
            wanted.methods,
            smoothing.denoiser_file,
            max(rechecked.ALLOWED_DRAWS, smoothing.samples),
        )
        asked.require_alone(
            records=wanted.records, plot=wanted.plot, html=wanted.html, attack_records=wanted.attack_records
        )
        asked.require_alone(min_certified=wanted.minimum, output=output.output, resume=wanted.resume or None)
        rechecked.verify_records(asked, source, data, machine, talk.sink())
        return
    gate = Gate()
    patched = run.patches_alone(
        wanted.methods,
        patches,
        epsilon=wanted.epsilon,
        plot=wanted.plot,
        attack_records=wanted.attack_records,
    )
    threats: list[Threat] = []
    if not patched:
        balls = [Threat(local.norm, radius) for radius in wanted.epsilon or RADII[local.norm]]
        demand, threats = run.demand(wanted.minimum, balls)
    run.require_methods(wanted.methods, local.norm, wanted.records)
    if run.AUTO in wanted.methods or smoothing.sigma == run.AUTO:
        require_one("auto chooses by trying", "certvit certify ... --limit 50 says what it chooses; name that")
    output.claim(source, wanted, smoothing, data)
    sink = talk.sink()
    checkpoint = source.read(sink)
    if patched:
        image = checkpoint.record.input.size[1:]
        named = [Threat("patch", patch) for patch in patches.sizes(image)]
        demand, threats = run.demand(wanted.minimum, named, image)
    radii = [] if patched else [threat.radius for threat in threats]
    demand = replace(demand, every=output.output is not None)
    images = digested(data.images(checkpoint.record, sink), team())
    seen = inputs.say_seen(checkpoint.record, images, sink)
    sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
    attacked = run.attacked_shares(wanted.attack_records, checkpoint.digest, images, local.norm)
    methods, reason, effort = run.settle(wanted.methods, checkpoint, machine, images, radii, sink)
    given = {
        "local": local if effort is None else replace(local, effort=effort),
        "patch": patches,
        "smoothing": replace(
            smoothing,
            seed=data.seed,
            batch_size=machine.batch_size,
            tuning=Tuning(lambda: run.tuning_images(checkpoint.record, data, images, sink), radii),
        ),
    }
    files = [(wanted.records, wanted.resume)] + [(None, False)] * (len(methods) - 1)  # records are of the first
    shared = run.CertifyRun(checkpoint, images, threats, demand, machine, sink, output.force)
    results: list[run.Result] = []
    for method, (records, resume) in zip(methods, files, strict=True):
        try:
            found = run.run(shared, method, given.get(method), records, resume)
        except NoBoundError as failure:
            if method == methods[0]:  # gate and document speak of the first: no other may stand in its place
                raise
            sink.warn(f"{method} is left out: {failure.message}")
        else:
            results += [found] if found is not None else []
    if not results:  # a process that leads no others
        return
    first = results[0]
    demand.ask(first.found, gate)
    document = view.document(results, reason, checkpoint.digest, images)
    sink.document({**document, "seen": seen, "doubts": sink.doubts}, gate)
    view.table(results, images, attacked, sink)
    if methods[0] not in ("smoothing", "patch"):  # whose network is another one: under noise, behind masks
        inputs.doubt_accuracy(first.found.clean, images, checkpoint, sink)
    if wanted.plot is not None:
        view.plot(results, attacked, _name(source.ckpt), images, wanted.plot, radii[-1], sink)
    if wanted.html is not None:
        again = typed_command.again(context, frozenset(("minimum", "attack_records")))
        pages.write(
            pages.certify_page(results, attacked, checkpoint, _name(source.ckpt), images, again, sink.doubts),
            wanted.html,
        )
        sink.note(f"wrote {wanted.html}")
    if output.output is not None:
        about = {"dataset": images.name, "split": images.split, "limit": data.limit, "seed": data.seed}
        written: Checkpoint = checkpoint
        for result in reversed(results):  # the first named comes last, where `log` looks for it
            evidence = view.evidence(result, images)
            written = written.with_evidence("certify", {**about, "method": result.certifier.method}, evidence)
        output.write(written, output.output)
        sink.note(f"wrote {output.output}")
    gate.enforce()


def _name(ckpt: str) -> str:
    """A network as a figure names it: its file's stem, or that of the folder it lies in."""
    path = Path(ckpt)
    return path.parent.name if path.stem == "model" and path.parent.name else path.stem
