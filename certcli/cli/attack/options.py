"""The options of `certvit attack`, a group a panel."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from certcli.cli.shared import options
from certcli.cli.shared.command import group
from certcli.cli.shared.groups import Evaluation
from certcli.system.errors import UsageError

if TYPE_CHECKING:
    from certcli.attack.settings import AttackSettings
    from certcli.attack.stages import Stage
    from certcli.cli.shared.output import Sink
    from certcli.images.labelled import Images


def list_attacks(context: typer.Context, enabled: bool) -> None:
    """Print every attack, ours and torchattacks', with norms, arguments and defaults."""
    from certcli.attack.catalogue import ATTACKS
    from certcli.attack.torchattacks_spec import PREFIX, names, signature
    from certcli.cli.shared.output import Sink

    if not enabled:
        return
    sink = Sink(as_json=False, quiet=False)
    sink.table(
        "Attacks",
        ["--attack", "norm", "what it does"],
        [(a.name, " ".join(a.norms), a.summary) for a in ATTACKS],
    )
    try:
        theirs = [(PREFIX + name, signature(name)) for name in names()]
    except UsageError as failure:
        sink.text(f"{failure.message}: {failure.hint}")
    else:
        sink.table(
            f"Attacks of torchattacks, as {PREFIX}NAME,argument=value",
            ["--attack", "norm", "measured in", "arguments and their defaults"],
            [
                (name, " ".join(s.norms), " ".join(s.measures) or "-", s.words())
                for name, s in theirs
            ],
        )
    raise typer.Exit


@group("Attacks")
class Attacks:
    """Which attacks run, at which radii, and what they may spend."""

    attacks: Annotated[
        list[str],
        typer.Option(
            "--attack",
            "-a",
            help="fgsm, pgd-50, margin-pgd, autoattack, torchattacks:Jitter,steps=20, and "
            "all that --list shows; may be "
            "repeated. Default: pgd.",
        ),
    ] = field(default_factory=list)
    listed: Annotated[
        bool,
        typer.Option(
            "--list", is_eager=True, callback=list_attacks, help="Show all attacks and exit."
        ),
    ] = False
    preset: Annotated[
        str | None, typer.Option(help="A paper's evaluation: certvit, specformer-standard, ...")
    ] = None
    epsilon: Annotated[
        list[float],
        typer.Option(
            "--epsilon",
            "-e",
            parser=options.fraction,
            metavar="R",
            help="Radius in pixel units, 0.5 or 8/255; repeated: a curve. Default: 0.5.",
        ),
    ] = field(default_factory=list)
    norm: Annotated[
        str | None, typer.Option(help="l2 (default), linf, or patch (with --patch).")
    ] = None
    defence: Annotated[
        str,
        typer.Option(
            help="With --norm patch: none, or patch, the classifier of certify --method patch."
        ),
    ] = "none"
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Steps of iterated attacks. Default: each attack's own."),
    ] = None
    restarts: Annotated[
        int, typer.Option(min=1, help="Runs of random attacks on images that still stand.")
    ] = 1
    step_size: Annotated[
        float | None,
        typer.Option(
            parser=options.fraction,
            metavar="A",
            help="Every step, in pixel units. Default: falls from 2 radii to 0.",
        ),
    ] = None
    samples: Annotated[
        int,
        typer.Option(
            min=1, help="Draws that the judge and eot-pgd average, for networks with randomness."
        ),
    ] = 1
    precision: Annotated[
        str,
        typer.Option(
            help="Precision of the attack's own passes, float32 or bf16; the network's own "
            "judges the result."
        ),
    ] = "float32"
    pixels: Annotated[
        str,
        typer.Option(
            help="float, or 8bit: rounds the images, and counts only adversarial images that "
            "a file can hold."
        ),
    ] = "float"
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Show every image to every attack, not only those that still stand.",
        ),
    ] = False
    refine: Annotated[
        int,
        typer.Option(
            min=0,
            help="Bisection steps that shorten each successful change, towards minimal norms.",
        ),
    ] = 0
    crafted_on: Annotated[
        str | None,
        typer.Option("--source", help="Craft on this checkpoint, test on CKPT (transfer)."),
        options.Reads(),
    ] = None
    checks: Annotated[bool, typer.Option(help="Check the evaluation itself on a few images.")] = (
        True
    )

    def plan(self, seed: int, certified: bool) -> tuple[AttackSettings, tuple[Stage, ...]]:
        """Settings and stages; UsageError on wishes that contradict."""
        from certcli.attack.settings import AttackSettings
        from certcli.attack.stages import stages_of

        settings = AttackSettings(
            steps=self.steps,
            restarts=self.restarts,
            step_size=self.step_size,
            samples=self.samples,
            seed=seed,
            precision=self.precision,
            pixels=self.pixels,
        )
        if self.refine and self.pixels == "8bit":
            raise UsageError("--refine halves changes, which 8 bits do not hold", "leave out one")
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
class AttackedImages(Evaluation):
    """The images that are attacked."""

    per_class: Annotated[
        int | None, typer.Option(min=1, help="Use K seeded images of every class.")
    ] = None
    only_certified: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Records of `certify`: attack each certified image at its own radius.",
        ),
        options.Reads(),
    ] = None

    def images(self, record: Any, sink: Sink, unlabelled: bool = False) -> Images:
        images = super().images(record, sink, unlabelled)
        return images if self.per_class is None else images.per_class(self.per_class, self.seed)


@group("Output")
class AttackOutput:
    """What is written beside the document, and what it must meet."""

    minimum: Annotated[
        float | None,
        typer.Option(
            "--min-robust",
            parser=options.share,
            metavar="A",
            help="Least share that withstands the attacks at the smallest radius: exit 7 "
            "where it is missed, 9 where the images do not decide.",
        ),
    ] = None
    records: options.Records = None
    resume: options.Resume = False
    save_examples: Annotated[
        Path | None,
        typer.Option("--save-examples", help="Adversarial examples as safetensors."),
        options.Writes(),
    ] = None
    gallery: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw images, perturbations and predictions: FILE.png, .svg or .pdf.",
        ),
        options.Writes(figure=True),
    ] = None
    compare: Annotated[
        str | None, typer.Option(help="Second checkpoint in the gallery."), options.Reads()
    ] = None

    @property
    def keeps_images(self) -> bool:
        return self.save_examples is not None or self.gallery is not None

    def check(self, data: AttackedImages) -> None:
        """UsageError on wishes that contradict, before any work."""
        if self.resume and self.keeps_images:
            raise UsageError(
                "--resume knows no images of what was attacked before",
                "leave out --save-examples, --gallery",
            )
        if self.compare is not None and self.gallery is None:
            raise UsageError("--compare is drawn in the gallery", "--gallery FILE.png")
        if data.limit is not None and data.per_class is not None:
            raise UsageError(
                "--limit and --per-class are two ways to choose images", "use one of them"
            )
