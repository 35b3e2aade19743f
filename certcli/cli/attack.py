"""certvit attack: the empirical upper bound, judged by us."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli import options
from certcli.cli.output import Sink, percent
from certcli.errors import CertvitError, GateError, UsageError

if TYPE_CHECKING:
    from certcli.attack.outcome import Outcome
    from certcli.attack.showcase import Exhibit

_BUG = "a certificate and a counterexample cannot both be right: report it with --save-examples"


def attack(
    ckpt: options.CheckpointArgument,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    split: options.Split = None,
    attacks: Annotated[
        list[str],
        typer.Option(
            "--attack", "-a", help="pgd unless named; fgsm, pgd-50, margin-pgd, cw, autoattack, ...; several."
        ),
    ] = [],
    preset: Annotated[str | None, typer.Option(help="A paper's evaluation: certvit, specformer-standard, ...")] = None,
    epsilon: Annotated[
        list[float],
        typer.Option(
            "--epsilon",
            "-e",
            parser=options.fraction,
            metavar="R",
            help="Radius in pixel units, 0.5 unless given, also as 8/255; several: a curve.",
        ),
    ] = [],
    norm: Annotated[str | None, typer.Option(help="l2 (unless given) or linf.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of iterated attacks; else each attack's own.")] = None,
    restarts: Annotated[int, typer.Option(min=1, help="Runs of random attacks on what still stands.")] = 1,
    step_size: Annotated[
        float | None,
        typer.Option(parser=options.fraction, metavar="A", help="Step in pixel units; else 2.5 radius / steps."),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Draws averaged by verdict and eot-pgd: for random nets.")] = 1,
    precision: Annotated[
        str, typer.Option(help="float32, or bf16: the attack's own passes run faster; verdicts never do.")
    ] = "float32",
    independent: Annotated[
        bool, typer.Option("--independent", help="Show every image to every attack, not only what still stands.")
    ] = False,
    refine: Annotated[int, typer.Option(min=0, help="Halvings of each success towards its image: minimal norms.")] = 0,
    source: Annotated[str | None, typer.Option(help="Checkpoint to craft on (transfer); CKPT is tested.")] = None,
    only_certified: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Records of `certify`: attack what is certified, at its own radius."),
    ] = None,
    per_class: Annotated[int | None, typer.Option(min=1, help="Use K seeded images of every class.")] = None,
    minimum: Annotated[
        float | None, typer.Option("--min-robust", help="Exit 7 below this share at the smallest radius.")
    ] = None,
    records: options.Records = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the --records of the same run.")] = False,
    save_examples: Annotated[
        Path | None, typer.Option("--save-examples", help="Adversarial examples as safetensors.")
    ] = None,
    gallery: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw images, perturbations and predictions.")
    ] = None,
    compare: Annotated[str | None, typer.Option(help="Second checkpoint in the gallery.")] = None,
    checks: Annotated[bool, typer.Option(help="Check the evaluation itself on a few images.")] = True,
    output: options.Output = None,
    limit: options.Limit = None,
    arch: options.Arch = None,
    arch_arg: options.ArchArg = [],
    mean: options.Mean = None,
    std: options.Std = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    batch_size: options.BatchSize = 128,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Share of the images that the attacks leave correctly classified: no certified accuracy can exceed it."""
    from certcli import models
    from certcli.attack.campaign import evaluate, parameters_of, run_of, stages_of, tasks_of
    from certcli.attack.certified import read_certified
    from certcli.attack.checks import raised
    from certcli.attack.examples import collect
    from certcli.attack.outcome import inspect, outcome_of
    from certcli.attack.records import RecordFile
    from certcli.attack.settings import AttackSettings
    from certcli.attack.showcase import beside, choose, class_names
    from certcli.checkpoint import require_absent, write_safetensors
    from certcli.cli.inputs import check_evidence_path, evaluation_images, hints, load_double, pick_device
    from certcli.foreign import open_checkpoint

    sink = Sink(as_json, quiet)
    if resume and (save_examples or gallery):
        raise UsageError("--resume knows no images of what was attacked before", "leave out --save-examples, --gallery")
    if compare is not None and gallery is None:
        raise UsageError("--compare is drawn in the gallery", "--gallery FILE.png")
    if limit is not None and per_class is not None:
        raise UsageError("--limit and --per-class are two ways to choose images", "use one of them")
    settings = AttackSettings(
        steps=steps, restarts=restarts, step_size=step_size, samples=samples, seed=seed, precision=precision
    )
    if only_certified is not None and precision != "float32":
        raise UsageError("certificates are attacked in float64", "leave out --precision")
    certificates = None if only_certified is None else read_certified(only_certified)
    stages = stages_of(
        attacks, preset, norm, epsilon, settings, independent=independent, certified=certificates is not None
    )
    check_evidence_path(output, ckpt, force)
    for wanted in (save_examples, gallery):
        if wanted is not None:
            require_absent(wanted, force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    helpers = {name: open_checkpoint(path) for name, path in (("source", source), ("compare", compare)) if path}
    for name, other in helpers.items():
        if (other.record.input.size, other.record.classes) != (record.input.size, record.classes):
            raise UsageError(f"--{name} has other images or classes than {ckpt}", "both must see the same images")
    images = evaluation_images(record, dataset, data_dir, split, limit, seed, sink)
    if per_class is not None:
        images = images.per_class(per_class, seed)
    tasks = tasks_of([stage.with_draws(seed, record.classes, precision) for stage in stages], images, certificates)

    where = pick_device(device)
    # a certificate speaks of the network in float64, so that is what must not be broken
    load = load_double if certificates is not None else models.load
    model = load(checkpoint, where)
    crafter = load(helpers["source"], where) if source else None
    origin = helpers["source"].digest if source else None
    told = {"preset": preset, "source": origin, "certified_only": certificates is not None, "refine": refine}
    run = run_of(tasks, settings, batch_size, checkpoint=checkpoint.digest, **told)
    found: dict[int, list[Any]] = {}
    with RecordFile(records, run, resume=resume, force=force) as file:
        if resume:
            sink.note(f"{records} holds {file.earlier} records of this run")
        flags = inspect(model, crafter, tasks[0], settings) if checks else ()
        for flag in raised(flags):
            sink.warn(f"{flag.check.name}: {flag.measured}. {flag.check.explanation}")
        keep = save_examples is not None or gallery is not None
        with sink.progress("attack", total=sum(map(len, tasks))) as bar:
            for number, rows in evaluate(
                model, tasks, settings, batch_size, source=crafter, refine_steps=refine, keep_images=keep, file=file
            ):
                found.setdefault(number, []).extend(rows)
                bar.advance(len(rows))

    outcome = outcome_of(tasks, found, flags, certificates)
    document = {**outcome.to_json(), **told}
    sink.document(document)
    _table(sink, outcome, f"{images.name} ({images.split})", crafter is not None, certificates is not None)
    fallen = [row for rows in found.values() for row in rows if row.fell]
    if keep and not fallen:
        sink.warn("no adversarial image was found: there is none to save or to draw")
    if save_examples is not None and fallen:
        write_safetensors(save_examples, collect(fallen), {}, force)
        sink.note(f"wrote {save_examples}")
    shown = choose(found[0], Path(ckpt).stem) if gallery is not None else []
    if gallery is not None and shown:
        gathered = [[exhibit] for exhibit in shown]
        if compare:
            second = beside(shown, load(helpers["compare"], where), Path(compare).stem, tasks[0].stage, seed)
            gathered = [list(pair) for pair in zip(shown, second, strict=True)]
        _draw(gathered, class_names(images, record.classes, record.class_names), gallery)
        sink.note(f"wrote {gallery}")
    if output is not None:
        checkpoint.with_evidence("attack", parameters_of(tasks, settings, **told), document).write(output, force)
        sink.note(f"wrote {output}")
    if outcome.contradiction is not None:
        raise CertvitError(f"certified above attacked: {outcome.contradiction.measured}", _BUG)
    if minimum is not None and outcome.first.robust < minimum:
        raise GateError(
            f"robust accuracy {percent(outcome.first.robust)} at {outcome.first.epsilon:g} is below --min-robust {minimum:g}"
        )


def _table(sink: Sink, outcome: Outcome, images: str, transfer: bool, certified: bool) -> None:
    """One row an attack and radius, and the worst case below them."""
    rows = []
    for part in outcome.parts:
        way = "alone" if part.stage.independent else "in turn"
        for summary in part.summaries:
            between = {name: f"{100 * low:.1f} to {100 * high:.1f}" for name, (low, high) in summary.intervals.items()}
            radius = f"{summary.epsilon:g}" if part.own is None else "its own"
            rows.append((f"{part.stage.norm} {radius}", "clean", percent(summary.clean), between["clean"], ""))
            rows += [
                ("", f"{name} ({way})", percent(share), between[name], "") for name, share in summary.attacks.items()
            ]
            nearest = "" if summary.median_norm is None else f"{summary.median_norm:.4g}"
            rows.append(("", "all (worst case)", percent(summary.robust), between["robust"], nearest))
    title = f"{images}, {outcome.first.images}{' certified' if certified else ''} images"
    sink.table(
        title + (", crafted on another network" if transfer else ""),
        ["radius (pixel)", "correct after", "share", "95 % interval", "median norm found"],
        rows,
    )
    for part in outcome.parts:
        if part.own is not None:
            sink.text(
                "each image at its certified radius: smallest {:.4g}, median {:.4g}, largest {:.4g}".format(*part.own)
            )


def _draw(rows: list[list[Exhibit]], names: list[str], path: Path) -> None:
    from certcli.report.gallery import Picture, draw_gallery

    def picture(shown: Exhibit) -> Picture:
        told = f"{shown.kind} {shown.norm:.3g}"
        if not shown.crafted_here:
            told = f"{'withstands' if shown.prediction == shown.label else 'wrong already'}: that of the left"
        return Picture(
            image=shown.image,
            adversarial=shown.adversarial,
            heading=f"image {shown.index}, {shown.network}",
            clean_class=names[shown.prediction],
            clean_right=shown.prediction == shown.label,
            found_class=names[shown.adversarial_prediction],
            found_right=shown.adversarial_prediction == shown.label,
            norm=told,
        )

    title = "image, perturbation, adversarial image; below them the predictions, green when right"
    draw_gallery([[picture(shown) for shown in row] for row in rows], path, title)
