"""certvit attack: the empirical upper bound, judged by us."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli import attacked, options
from certcli.cli.command import command, group
from certcli.cli.groups import Evaluation, Machine, Output, Source, Talk
from certcli.cli.output import Gate, Sink
from certcli.errors import UsageError

if TYPE_CHECKING:
    from certcli.attack.campaign import Stage
    from certcli.attack.settings import AttackSettings
    from certcli.checkpoint import Checkpoint
    from certcli.data import Images


@group("Attacks")
class Attacks:
    """Which attacks run, at which radii, and what they may spend."""

    attacks: Annotated[
        list[str],
        typer.Option(
            "--attack", "-a", help="pgd unless named; fgsm, pgd-50, margin-pgd, cw, autoattack, ...; several."
        ),
    ] = field(default_factory=list)
    preset: Annotated[str | None, typer.Option(help="A paper's evaluation: certvit, specformer-standard, ...")] = None
    epsilon: Annotated[
        list[float],
        typer.Option(
            "--epsilon",
            "-e",
            parser=options.fraction,
            metavar="R",
            help="Radius in pixel units, 0.5 unless given, also as 8/255; several: a curve.",
        ),
    ] = field(default_factory=list)
    norm: Annotated[str | None, typer.Option(help="l2 (unless given) or linf.")] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of iterated attacks; else each attack's own.")] = None
    restarts: Annotated[int, typer.Option(min=1, help="Runs of random attacks on what still stands.")] = 1
    step_size: Annotated[
        float | None,
        typer.Option(parser=options.fraction, metavar="A", help="Step in pixel units; else 2.5 radius / steps."),
    ] = None
    samples: Annotated[int, typer.Option(min=1, help="Draws averaged by verdict and eot-pgd: for random nets.")] = 1
    precision: Annotated[
        str, typer.Option(help="float32, or bf16: the attack's own passes run faster; verdicts never do.")
    ] = "float32"
    independent: Annotated[
        bool, typer.Option("--independent", help="Show every image to every attack, not only what still stands.")
    ] = False
    refine: Annotated[int, typer.Option(min=0, help="Halvings of each success towards its image: minimal norms.")] = 0
    crafted_on: Annotated[
        str | None,
        typer.Option("--source", help="Checkpoint to craft on (transfer); CKPT is tested."),
        options.Reads(),
    ] = None
    checks: Annotated[bool, typer.Option(help="Check the evaluation itself on a few images.")] = True

    def plan(self, seed: int, certified: bool) -> tuple[AttackSettings, tuple[Stage, ...]]:
        """Settings and stages; UsageError on wishes that contradict."""
        from certcli.attack.campaign import stages_of
        from certcli.attack.settings import AttackSettings

        settings = AttackSettings(
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
            samples=self.samples,
            seed=seed,
            precision=self.precision,
        )
        if certified and self.precision != "float32":
            raise UsageError("certificates are attacked in float64", "leave out --precision")
        return settings, stages_of(
            self.attacks,
            self.preset,
            self.norm,
            self.epsilon,
            settings,
            independent=self.independent,
            certified=certified,
        )


@group("Images")
class Chosen(Evaluation):
    """The images that are attacked."""

    per_class: Annotated[int | None, typer.Option(min=1, help="Use K seeded images of every class.")] = None
    only_certified: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Records of `certify`: attack what is certified, at its own radius."),
        options.Reads(),
    ] = None

    def images(self, record: Any, sink: Sink) -> Images:
        images = super().images(record, sink)
        return images if self.per_class is None else images.per_class(self.per_class, self.seed)


@group("Output")
class Results:
    """What is written beside the document, and what it must meet."""

    minimum: Annotated[
        float | None,
        typer.Option(
            "--min-robust", parser=options.share, metavar="A", help="Exit 7 below this share at the smallest radius."
        ),
    ] = None
    records: options.Records = None
    resume: options.Resume = False
    save_examples: Annotated[
        Path | None, typer.Option("--save-examples", help="Adversarial examples as safetensors."), options.Writes()
    ] = None
    gallery: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw images, perturbations and predictions."),
        options.Writes(),
    ] = None
    compare: Annotated[str | None, typer.Option(help="Second checkpoint in the gallery."), options.Reads()] = None

    @property
    def keeps_images(self) -> bool:
        return self.save_examples is not None or self.gallery is not None

    def check(self, chosen: Chosen) -> None:
        """UsageError on wishes that contradict, before any work."""
        if self.resume and self.keeps_images:
            raise UsageError(
                "--resume knows no images of what was attacked before", "leave out --save-examples, --gallery"
            )
        if self.compare is not None and self.gallery is None:
            raise UsageError("--compare is drawn in the gallery", "--gallery FILE.png")
        if chosen.limit is not None and chosen.per_class is not None:
            raise UsageError("--limit and --per-class are two ways to choose images", "use one of them")


@command(
    "certvit attack m.safetensors -a pgd -a margin-pgd --restarts 3 -e 36/255 --records attacked.jsonl",
    "certvit attack m.safetensors --only-certified certified.jsonl -a margin-pgd",
    page="attack.md",
)
def attack(
    source: Source,
    wanted: Attacks = Attacks(),
    chosen: Chosen = Chosen(),
    machine: Machine = Machine(),
    results: Results = Results(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Share of the images that the attacks leave correctly classified: no certified accuracy can exceed it."""
    from certcli.attack.campaign import parameters_of, tasks_of
    from certcli.attack.certified import read_certified

    results.check(chosen)
    output.claim(source, wanted, chosen, results)
    sink, gate = talk.sink(), Gate()
    settings, stages = wanted.plan(chosen.seed, chosen.only_certified is not None)
    checkpoint = source.open()
    crafted_on, compared = (_second(path, checkpoint, source.ckpt) for path in (wanted.crafted_on, results.compare))
    certificates = None
    if chosen.only_certified is not None:
        certificates = read_certified(chosen.only_certified, checkpoint.digest)
    images = chosen.images(checkpoint.record, sink)
    drawn = [stage.with_draws(chosen.seed, checkpoint.record.classes, wanted.precision) for stage in stages]
    tasks = tasks_of(drawn, images, certificates)
    told = {
        "preset": wanted.preset,
        "source": crafted_on.digest if crafted_on else None,
        "certified_only": certificates is not None,
        "refine": wanted.refine,
    }
    session = attacked.Session(checkpoint, images, tasks, settings, certificates, machine, told, sink)
    findings, found = session.run(crafted_on, results, output.force, wanted.checks)
    document = session.document(findings)
    attacked.gate_of(findings, results.minimum, gate)
    sink.document(document, gate)
    attacked.table(sink, findings, f"{images.name} ({images.split})", crafted_on is not None, certificates is not None)
    session.show(found, results, compared, Path(source.ckpt).stem, output.force)
    if output.output is not None:
        parameters = parameters_of(tasks, settings, **told)
        result = {name: value for name, value in document.items() if name not in ("schema", "command", "checkpoint")}
        checkpoint.with_evidence("attack", parameters, result).write(output.output, output.force)
        sink.note(f"wrote {output.output}")
    gate.enforce()


def _second(path: str | None, checkpoint: Checkpoint, tested: str) -> Checkpoint | None:
    """Another checkpoint that sees the same images; UsageError when it cannot."""
    from certcli.foreign import Hints, open_checkpoint

    if path is None:
        return None
    other = open_checkpoint(path, Hints())
    record = checkpoint.record
    if (other.record.input.size, other.record.classes) != (record.input.size, record.classes):
        raise UsageError(f"{path} has other images or classes than {tested}", "both must see the same images")
    return other
