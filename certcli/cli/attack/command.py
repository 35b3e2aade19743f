"""certvit attack: the empirical upper bound, judged by us."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from certcli.certify.options import Patches
from certcli.cli.shared import groups
from certcli.cli.shared.command import Reads, Records, Resume, Writes, command, group, typed_share
from certcli.evaluation import threat
from certcli.system import errors, options

if TYPE_CHECKING:
    from certcli.attack.settings import AttackSettings
    from certcli.attack.stages import Stage


def list_attacks(context: typer.Context, enabled: bool) -> None:
    """Print every attack, ours and torchattacks', with norms, arguments and defaults."""
    from certcli.attack.catalogue import ATTACKS, PREFIX, signature, torchattacks_names
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
        theirs = [(PREFIX + name, signature(name)) for name in torchattacks_names()]
    except errors.UsageError as failure:
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

    attacks: list[str] = options.option(
        list,
        "fgsm, pgd-50, margin-pgd, autoattack, torchattacks:Jitter,steps=20, and all that "
        "--list shows; may be repeated. Default: pgd.",
        "--attack",
        "-a",
    )
    listed: bool = options.option(
        False, "Show all attacks and exit.", "--list", is_eager=True, callback=list_attacks
    )
    preset: str | None = options.option(
        None, "A paper's evaluation: certvit, specformer-standard, ..."
    )
    epsilon: list[float] = options.option(
        list,
        "Radius in pixel units, 0.5 or 8/255; repeated: a curve. Default: 0.5.",
        "--epsilon",
        "-e",
        metavar="R",
        read=threat.parse_radius,
    )
    norm: threat.Kind | None = options.option(None, "l2 (default), linf, or patch (with --patch).")
    defence: threat.Defence = options.option(
        "none", "With --norm patch: none, or patch, the classifier of certify --method patch."
    )
    steps: int | None = options.option(
        None, "Steps of iterated attacks. Default: each attack's own.", min=1
    )
    restarts: int = options.option(
        1, "Runs of random attacks on images that are not broken yet.", min=1
    )
    samples: int = options.option(
        1, "Draws to average for networks with randomness, in eot-pgd and in the verdict.", min=1
    )
    precision: threat.Precision = options.option(
        "float32",
        "Precision of the attack's own passes, float32 or bf16; results are judged in "
        "the network's own.",
    )
    pixels: threat.Pixels = options.option(
        "float",
        "float, or 8bit: round the images first, and search among 8-bit images only.",
    )
    crafted_on: str | None = options.option(
        None, "Craft on this checkpoint, test on CKPT (transfer).", "--source", mark=Reads()
    )
    checks: bool = options.option(
        True, "Check the evaluation itself on a few images.", "--checks/--no-checks"
    )

    def plan(self, seed: int, certified: bool) -> tuple[AttackSettings, tuple[Stage, ...]]:
        """Settings and stages; UsageError on wishes that contradict."""
        from certcli.attack.settings import AttackSettings
        from certcli.attack.stages import stages_of

        settings = AttackSettings(
            steps=self.steps,
            restarts=self.restarts,
            samples=self.samples,
            seed=seed,
            precision=self.precision,
            pixels=self.pixels,
        )
        if certified and self.precision != "float32":
            raise errors.UsageError("certificates are attacked in float64", "leave out --precision")
        return settings, stages_of(
            self.attacks,
            self.preset,
            self.norm,
            self.epsilon,
            settings,
            certified=certified,
        )


@group("Images")
class AttackedImages(groups.Evaluation):
    """The images that are attacked."""

    only_certified: Path | None = options.option(
        None,
        "Records of `certify`: attack each certified image at its own radius.",
        metavar="FILE.jsonl",
        mark=Reads(),
    )


@group("Output")
class AttackOutput:
    """What is written beside the document, and what it must meet."""

    minimum: float | None = options.option(
        None,
        "Required share that withstands the attacks at the smallest radius: exit 7 if it "
        "is missed, 9 if the images do not decide.",
        "--min-robust",
        metavar="A",
        read=typed_share,
    )
    records: Records = None
    resume: Resume = False
    save_examples: Path | None = options.option(
        None, "Write adversarial examples as safetensors.", mark=Writes()
    )
    plot: Path | None = options.option(
        None,
        "Draw images, perturbations and predictions: FILE.png, .svg or .pdf.",
        metavar="FILE",
        mark=Writes(figure=True),
    )

    @property
    def keeps_images(self) -> bool:
        return self.save_examples is not None or self.plot is not None

    def check(self) -> None:
        """UsageError on wishes that contradict, before any work."""
        if self.resume and self.keeps_images:
            raise errors.UsageError(
                "the records that --resume reads hold no images",
                "leave out --save-examples, --plot",
            )


@command(
    "certvit attack m.safetensors -a pgd -a margin-pgd --restarts 3 -e 36/255 --records attacked.jsonl",
    "certvit attack m.safetensors --only-certified certified.jsonl -a margin-pgd",
    "certvit attack m.safetensors --norm patch --patch 32 --defence patch",
    page="attack.md",
    run="certcli.cli.attack.run:report_attacks",
    often=(
        "attacks",
        "listed",
        "preset",
        "epsilon",
        "norm",
        "only_certified",
        "minimum",
        "records",
        "resume",
        "plot",
    ),
    panels={"patch": "Patches"},
)
def attack(
    source: groups.Source,
    attacks: Attacks = Attacks(),
    data: AttackedImages = AttackedImages(),
    patches: Patches = Patches(),
    machine: groups.BatchDevice = groups.BatchDevice(),
    results: AttackOutput = AttackOutput(),
    output: groups.Output = groups.Output(),
    talk: groups.Talk = groups.Talk(),
) -> None:
    """Attack images: the accuracy under attack, an upper limit on any certified accuracy."""
