"""certvit audit: is my model robust? Bound, slope, certificates and attacks within a time budget, answered in words."""

from __future__ import annotations

from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from certcli.cli.shared import options
from certcli.cli.shared.command import command, group
from certcli.cli.shared.groups import Evaluation, Machine, Output, Source, Talk
from certcli.cli.shared.output import Sink
from certcli.system.errors import UsageError
from certcli.system.processes import team
from certcli.system.registry import one_of

if TYPE_CHECKING:
    from certcli.audit.gates import FailOn
    from certcli.audit.run import Asked
    from certcli.checkpoint.record import Record
    from certcli.images.labelled import Images


METHODS = ("lipschitz", "local", "patch", "smoothing")


@group("Audit")
class Wanted:
    """What is asked, in how much time, and what the answer must meet."""

    time_budget: Annotated[
        str, typer.Option("--time-budget", metavar="T", help="Wall time: 90s, 2m, 1h. What does not fit is said.")
    ] = "2m"
    epsilon: options.Epsilons = field(default_factory=lambda: [0.12, 0.5])
    attacks: Annotated[
        list[str],
        typer.Option("--attack", "-a", help="pgd unless named; margin-pgd, autoattack, ...; several, in turn."),
    ] = field(default_factory=lambda: ["pgd"])
    methods: Annotated[
        list[str],
        typer.Option(
            "--method", help="lipschitz, local, patch, smoothing; several; else those that make sense for the network."
        ),
    ] = field(default_factory=list)
    patches: Annotated[
        list[str],
        typer.Option(
            "--patch",
            metavar="SIZE",
            help="Patch that must not change the answer behind masks: 32, 16x64, 2%; several.",
        ),
    ] = field(default_factory=list)
    sigma: Annotated[
        float | None,
        typer.Option(
            parser=options.fraction,
            metavar="S",
            help="Noise of smoothing, pixel units; else the smallest --epsilon, at least R / 1.5 for certified@R.",
        ),
    ] = None
    precision: Annotated[
        str,
        typer.Option(
            help="float32 or bf16, of smoothing and the attack's own passes; auto: bf16 for a million parameters and more, "
            "where the machine multiplies matrices in it."
        ),
    ] = "auto"
    fail_on: Annotated[
        list[str],
        typer.Option(
            "--fail-on",
            metavar="GATE",
            help="Exit 7 if so: certified@0.25<0.4, proven@0.5<0.1, robust@0.5<0.2, patched@32<0.1, clean<0.9, upper>100.",
        ),
    ] = field(default_factory=list)

    def gates(self) -> list[FailOn]:
        from certcli.audit.gates import parse

        return [parse(text) for text in self.fail_on]

    def asked(self, gates: list[FailOn], seed: int, batch_size: int) -> Asked:
        """UsageError on names and values that mean nothing, before any work."""
        from certcli.attack.campaign import stages_of
        from certcli.attack.settings import PRECISIONS, AttackSettings
        from certcli.audit.gates import widened
        from certcli.audit.run import AUTO, Asked
        from certcli.evaluation.records import require_radii
        from certcli.evaluation.sizes import ANY_IMAGE, Patch

        for method in self.methods:
            if method not in METHODS:
                raise UsageError(f"an audit knows no method '{method}'", one_of(method, METHODS))
        for patch in self.patches:
            Patch.read(patch, ANY_IMAGE)
        chosen = require_radii(self.epsilon)
        if self.precision not in (AUTO, *PRECISIONS):
            raise UsageError(f"unknown precision '{self.precision}'", one_of(self.precision, (AUTO, *PRECISIONS)))
        stages_of(self.attacks, None, "l2", chosen, AttackSettings(seed=seed))
        asked = Asked(
            radii=chosen,
            attacked=chosen,
            sigma=self.sigma,
            attacks=tuple(self.attacks),
            methods=tuple(self.methods),
            patches=tuple(self.patches),
            seed=seed,
            batch_size=batch_size,
            precision=self.precision,
        )
        return widened(asked, gates)


@group("Output")
class Reports:
    """Files beside the answer; their suffix decides the format."""

    report: Annotated[
        list[Path],
        typer.Option(
            "--report",
            metavar="FILE",
            help=".html .json .sarif .xml (JUnit) .csv (records) .svg (badge) .md (model card).",
        ),
        options.Writes(),
    ] = field(default_factory=list)
    html: options.Html = None


@command(
    "certvit audit m.safetensors --dataset digits --html audit.html",
    'certvit audit m.safetensors --fail-on "certified@0.25<0.4" --fail-on "robust@0.5<0.2"',
    page="audit.md",
)
def audit(
    source: Source,
    wanted: Wanted = Wanted(),
    data: Evaluation = Evaluation(limit=200),
    machine: Machine = Machine(),
    reports: Reports = Reports(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Is it robust? Bound, slope, certificates and attacks within a time budget, answered in words."""
    from certcli.attack.showcase import class_names
    from certcli.audit.clock import Clock
    from certcli.audit.compose import compose
    from certcli.audit.run import run
    from certcli.audit.words import Typed, next_steps, reproduce
    from certcli.cli.audit import view
    from certcli.cli.shared.inputs import calibration_images
    from certcli.evaluation.records import digested
    from certcli.evaluation.seen import doubts
    from certcli.finetune.budget import parse_duration
    from certcli.models.open import read

    clock = Clock.since(Sink.started, parse_duration(wanted.time_budget), team())
    gates = wanted.gates()
    asked = wanted.asked(gates, data.seed, machine.batch_size)
    output.claim(source, data, reports)
    view.require_formats(reports.report)
    sink = talk.sink()
    opened = read(source.ckpt, source.hints())
    checkpoint = opened.checkpoint
    images = _images(checkpoint.record, data, sink)
    images = None if images is None else digested(images, team())

    def calibration() -> Images:
        return calibration_images(checkpoint.record, None, None, 8, data.seed, sink)

    with sink.progress("audit", total=round(clock.budget)) as bar:

        def tell(stage: str) -> None:
            bar.reach(round(clock.spent), stage)

        results = run(checkpoint, images, calibration, asked, machine.pick(), clock, tell)
    if not team().leads:
        return
    results.seen = [] if images is None else doubts(checkpoint.record, images)[1]
    dataset = data.dataset or (checkpoint.record.dataset if images is not None else None)
    folder = None if data.data_dir is None else str(data.data_dir)
    typed = Typed(source.ckpt, source.words(), dataset, folder, data.split)
    document = compose(
        opened,
        results,
        asked,
        gates,
        clock,
        typed=typed,
        limit=data.limit,
    )
    gate = view.gate_of(document)
    further = next_steps(results, asked, typed, clock.budget)
    again = reproduce(asked, results.precision, gates, typed, data.limit, clock.budget)
    view.show(document, further, again, opened.reading.line(), sink)
    names = [] if images is None else class_names(images, checkpoint.record.classes, checkpoint.record.class_names)
    view.write(document, results, checkpoint, reports, output, names, data.seed, sink)
    gate.enforce()


def _images(record: Record, data: Evaluation, sink: Sink) -> Images | None:
    """The images to judge by, in turn; None when none were named and those it was trained on are not here."""
    from certcli.system.errors import DataError

    if data.dataset is None and record.dataset is None:
        return None
    try:
        images = replace(data, limit=None).images(record, sink).in_turn(data.seed)
    except DataError as failure:
        if data.dataset is not None:
            raise
        sink.warn(
            f"the images that it was trained on are not here ({failure.message}): the audit goes on without images"
        )
        return None
    return images.select(range(len(images.limit(data.limit))))
