"""certvit attack: the empirical upper bound, judged by us."""

from pathlib import Path
from typing import Annotated, cast

import typer

from certcli.cli import options
from certcli.cli.output import Sink, percent
from certcli.errors import GateError, UsageError


def attack(
    ckpt: options.CheckpointArgument,
    dataset: options.Dataset = None,
    data_dir: options.DataDir = None,
    split: options.Split = None,
    attacks: Annotated[
        list[str],
        typer.Option("--attack", "-a", help="fgsm, pgd, pgd-50, margin-pgd, cw, autoattack, ...; may be repeated."),
    ] = ["pgd"],
    epsilon: options.Epsilons = [0.5],
    norm: Annotated[str, typer.Option(help="l2 or linf.")] = "l2",
    steps: Annotated[int, typer.Option(min=1, help="Steps of iterated attacks.")] = 20,
    restarts: Annotated[int, typer.Option(min=1, help="Restarts of random attacks.")] = 1,
    step_size: Annotated[
        float | None, typer.Option(help="Step of iterated attacks; by default 2.5 radius / steps.")
    ] = None,
    minimum: Annotated[
        float | None, typer.Option("--min-robust", help="Exit 7 below this share at the smallest radius.")
    ] = None,
    records: options.Records = None,
    save_examples: Annotated[
        Path | None, typer.Option("--save-examples", help="Adversarial examples as safetensors.")
    ] = None,
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
    from certcli.attack.examples import collect
    from certcli.attack.run import attack_curve
    from certcli.attack.settings import AttackSettings
    from certcli.attack.summary import summarise
    from certcli.checkpoint import require_absent, write_safetensors
    from certcli.cli.inputs import check_evidence_path, evaluation_images, hints, pick_device
    from certcli.cli.records import JsonLines
    from certcli.foreign import open_checkpoint
    from certcli.threat import Norm

    sink = Sink(as_json, quiet)
    if norm not in ("l2", "linf"):
        raise UsageError(f"unknown norm '{norm}'", "one of: l2, linf")
    radii = sorted(set(epsilon))
    check_evidence_path(output, ckpt, force)
    if save_examples is not None:
        require_absent(save_examples, force)
    checkpoint = open_checkpoint(ckpt, hints(arch, arch_arg, mean, std))
    record = checkpoint.record
    images = evaluation_images(record, dataset, data_dir, split, limit, seed, sink)
    where = pick_device(device)
    model = models.load(checkpoint, where)
    settings = AttackSettings(steps=steps, restarts=restarts, step_size=step_size, seed=seed, classes=record.classes)
    found = []
    batches = ((index, pixels.to(where), labels) for index, pixels, labels in images.batches(batch_size))
    with JsonLines(records, force) as lines, sink.progress("attack", total=len(images) * len(radii)) as bar:
        for row in attack_curve(
            model, batches, attacks, cast(Norm, norm), radii, settings, keep_images=save_examples is not None
        ):
            found.append(row)
            lines.write([row.as_json()])
            bar.advance()
    summaries = {radius: summarise([row for row in found if row.epsilon == radius]) for radius in radii}
    first = summaries[radii[0]]
    curve = {f"{radius:g}": summary.robust for radius, summary in summaries.items()}
    document = {
        "clean": first.clean,
        "robust": first.robust,
        "epsilon": radii[0],
        "norm": norm,
        "images": first.images,
        "attacks": first.attacks,
        "curve": curve,
    }
    sink.document(document)
    names = list(first.attacks)
    sink.table(
        f"{images.name} ({images.split}), {first.images} images, {norm}; robust accuracy after each attack alone or in turn",
        ["radius (pixel)", *names, "all"],
        [("clean", *["" for _ in names], percent(first.clean))]
        + [(f"{r:g}", *[percent(s.attacks.get(n)) for n in names], percent(s.robust)) for r, s in summaries.items()],
    )
    if save_examples is not None:
        write_safetensors(save_examples, collect(found), {}, force)
        sink.note(f"wrote {save_examples}")
    if output is not None:
        parameters = {
            "dataset": images.name,
            "split": images.split,
            "images": len(images),
            "attacks": names,
            "norm": norm,
            "steps": steps,
            "restarts": restarts,
        }
        checkpoint.with_evidence("attack", parameters, document).write(output, force)
        sink.note(f"wrote {output}")
    if minimum is not None and first.robust < minimum:
        raise GateError(f"robust accuracy {percent(first.robust)} at {radii[0]:g} is below --min-robust {minimum:g}")
