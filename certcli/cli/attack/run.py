"""What `attack` runs and shows: records, document, table, examples, gallery, gate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from certcli.attack import judge
from certcli.attack.checks import Flag, raised
from certcli.attack.findings import (
    AttackFindings,
    attack_again,
    choose_exhibits,
    collect,
    findings_of,
    inspect,
)
from certcli.attack.settings import AttackSettings
from certcli.attack.stages import (
    RECORD_KEYS,
    Campaign,
    StageTask,
    attack_run,
    in_norm,
    parameters_of,
    tasks_of,
)
from certcli.certify.options import Patches
from certcli.checkpoint.file import Checkpoint, write_safetensors
from certcli.cli.attack import command
from certcli.cli.attack import patches as patch_attacked
from certcli.cli.shared import groups, inputs
from certcli.cli.shared.output import Bar, Gate, Sink, percent
from certcli.evaluation import evidence_schema, image_records, intervals, record_lines, threat
from certcli.evaluation.records import RecordFile, digested
from certcli.images import labelled, names
from certcli.models import build, origins
from certcli.system import errors, processes

_BUG = (
    "a certificate and a counterexample cannot both be right: certvit verify checks the file; if it is verified, report "
    "the bug with --save-examples"
)


@dataclass(frozen=True)
class Session:
    """One run: the network, the images, and what is done. facts: for header and document."""

    checkpoint: Checkpoint
    images: labelled.Images
    tasks: Sequence[StageTask]
    settings: AttackSettings
    certificates: Mapping[int, image_records.Certificate] | None
    machine: groups.BatchDevice
    facts: Mapping[str, Any]
    sink: Sink

    def load(self, checkpoint: Checkpoint) -> Any:
        """A certificate speaks of the network in float64, so that is what must not be broken."""
        load = build.load_double if self.certificates is not None else build.load
        return load(checkpoint, self.machine.pick())

    def run(
        self,
        crafted_on: Checkpoint | None,
        results: command.AttackOutput,
        force: bool,
        checks: bool,
        every: bool,
    ) -> tuple[AttackFindings, dict[int, list[image_records.AttackRecord]]] | None:
        """The findings, and the records by number of the task; written to `--records` as they are
        found. None for a process that leads no others: what it found is theirs.

        Args:
            every: none may rest on what --resume read.
        """
        batch_size = self.machine.batch_size
        model = self.load(self.checkpoint)
        crafter = None if crafted_on is None else self.load(crafted_on)
        records_of: dict[int, list[image_records.AttackRecord]] = {}
        plan = (self.tasks, self.settings, batch_size)
        campaign = Campaign(model, *plan, crafter, processes.team().leads and results.keeps_images)
        if not processes.team().leads:
            list(campaign.run(team=processes.team()))
            return None
        with RecordFile(
            results.records,
            attack_run(*plan, self.checkpoint.digest, self.images, **self.facts),
            self.images,
            RECORD_KEYS,
            resume=results.resume,
            force=force,
            network=self.sink.network,
        ) as file:
            if results.resume:
                self.sink.note(f"{results.records} holds {file.earlier} records of this run")
            flags: tuple[Flag, ...] = ()
            total = sum(map(len, self.tasks))
            with self.sink.progress("attack", total=total) as bar, PassCounter(model, bar) as work:
                for number, rows in campaign.run(file, processes.team()):
                    records_of.setdefault(number, []).extend(rows)
                    bar.advance(len(rows))
                    if checks and not flags:
                        passes = work.rows * total // len(rows)
                        work.stage = "checks of the attacks"
                        flags = inspect(
                            model, crafter, self.tasks[number], rows, self.settings, passes
                        )
                        work.stage = "attacks"
                        for flag in raised(flags):
                            self.sink.warn(
                                f"{flag.check.name}: {flag.measured}. {flag.check.explanation}"
                            )
        findings = findings_of(self.tasks, records_of, flags, self.certificates)
        if file.taken:
            rows = [row for number in sorted(records_of) for row in records_of[number]]
            gate = bool(results.minimum)
            resumed = attack_again(campaign, rows, file.taken, gate, every, str(results.records))
            findings = replace(findings, resumed=resumed)
        return findings, records_of

    def show(
        self,
        records_of: Mapping[int, Sequence[image_records.AttackRecord]],
        results: command.AttackOutput,
        name: str,
        force: bool,
    ) -> None:
        """The adversarial images: as tensors, as a gallery."""
        fallen = [row for rows in records_of.values() for row in rows if row.fell]
        if results.keeps_images and not fallen:
            self.sink.warn("no adversarial image was found: there is none to save or to draw")
        if results.save_examples is not None and fallen:
            write_safetensors(results.save_examples, collect(fallen), {}, force)
            self.sink.note(f"wrote {results.save_examples}")
        if results.plot is None or not fallen:
            return
        record = self.checkpoint.record
        _draw_fallen(
            choose_exhibits(records_of[0]),
            names.names_of_classes(record.classes, record.class_names, self.images.classes),
            results.plot,
            name,
            self.images,
        )
        self.sink.note(f"wrote {results.plot}")


class PassCounter:
    """Shows on a bar the number of the network's passes: one batch may take minutes."""

    def __init__(self, model: Any, bar: Bar) -> None:
        self.stage = "attacks"
        self.count = 0
        self.rows = 0
        self._bar = bar
        self._hook = model.register_forward_hook(self._note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self._hook.remove()

    def _note(self, model: Any, arguments: Any, logits: object) -> None:
        self.count += 1
        self.rows += len(arguments[0])
        self._bar.advance(0, f"{self.stage}, {self.count} passes")


def attack_gate(findings: AttackFindings, minimum: float | None, gate: Gate) -> None:
    """A counterexample within a certified radius is a bug, first of all; then --min-robust."""
    if findings.contradiction is not None:
        gate.demand(
            False,
            errors.CertvitError(
                f"certified above attacked: {findings.contradiction.measured}", _BUG
            ),
        )
    if minimum is not None:
        first = findings.first
        gate.demand_share(
            round(first.robust * first.images),
            first.images,
            minimum,
            f"robust accuracy at {threat.attacked_radius(first.epsilon)}",
            "--min-robust",
        )


def show_attacks(
    sink: Sink, findings: AttackFindings, images: str, transfer: bool, certified: bool
) -> None:
    """One row an attack and radius, and the worst case below them."""
    rows = []
    for part in findings.parts:
        order = "alone" if part.stage.independent else "in turn"
        for summary in part.summaries:
            between = {name: threat.percent_ends(ends) for name, ends in summary.intervals.items()}
            radius = (
                threat.attacked_radius(summary.epsilon) if part.own_radii is None else "its own"
            )
            rows.append(
                (
                    f"{part.stage.norm} {radius}",
                    "clean",
                    percent(summary.clean),
                    between["clean"],
                    "",
                )
            )
            rows += [
                ("", f"{name} ({order})", threat.attacked_percent(share), between[name], "")
                for name, share in summary.attacks.items()
            ]
            nearest = (
                ""
                if summary.median_norm is None
                else threat.attacked_radius(summary.median_norm, 4)
            )
            rows.append(
                (
                    "",
                    "all (worst case)",
                    threat.attacked_percent(summary.robust),
                    between["robust"],
                    nearest,
                )
            )
    title = f"{images}, {intervals.number_of(findings.first.images)}{', certified as their records say' if certified else ''}"
    sink.table(
        title + (", crafted on another network" if transfer else ""),
        ["radius (pixel)", "correct after", "share", "95 % interval", "median norm found"],
        rows,
    )
    if findings.resumed is not None:
        sink.text(f"{findings.resumed}")
    for part in findings.parts:
        last = part.summaries[-1]
        if last.fooled:
            sink.text(
                f"As 8-bit files, {last.fooled_8bit} of {last.fooled} adversarial images fool it too."
            )
    for part in findings.parts:
        if part.own_radii is not None:
            summary_text = "smallest {}, median {}, largest {}".format(
                *(threat.proven_radius(radius, 4) for radius in part.own_radii)
            )
            sink.text(
                f"each image at the radius that its record states (certvit verify checks them): {summary_text}"
            )


def _draw_fallen(
    fallen: Sequence[Any],
    classes: Sequence[str],
    path: Path,
    network: str,
    images: labelled.Images,
) -> None:
    from certcli.report.figures import AttackedImage, draw_gallery

    rows = []
    for record in fallen:
        after = classes[record.adversarial_prediction]
        rows.append(
            AttackedImage(
                image=record.image,
                adversarial=record.adversarial,
                heading=f"image {record.index}, {network}",
                before=classes[record.prediction],
                after=after if record.as_8bit else f"{after} (not as 8 bits)",
                norm=f"{record.kind} {threat.attacked_radius(record.norm, 3)}",
                file=images.file_of.get(record.index, ""),
            )
        )
    count = f"{len(rows)} attacked image{'s' * (len(rows) != 1)}"
    draw_gallery(
        rows,
        path,
        f"{network} on {images.name} ({images.split}): {count}\n"
        "image, perturbation, their sum; classes in blue where right",
    )


def report_attacks(
    source: groups.Source,
    attacks: command.Attacks,
    data: command.AttackedImages,
    patches: Patches,
    machine: groups.BatchDevice,
    results: command.AttackOutput,
    output: groups.Output,
    talk: groups.Talk,
) -> None:
    """Attack images: the accuracy under attack, an upper limit on any certified accuracy."""
    results.check()
    if results.keeps_images:
        processes.require_one(
            "adversarial images are kept", "leave out --save-examples and --plot, or torchrun"
        )
    output.claim(source, attacks, data, results)
    if patch_attacked.asks_for_patches(attacks, data, patches, results):
        processes.require_one(
            "patches are looked for", "certvit attack --norm patch without torchrun"
        )
        patch_attacked.attack_by_patches(
            source, attacks, data, patches, machine, results, output, talk.sink()
        )
        return
    sink = talk.sink()
    gate = Gate()
    settings, stages = attacks.plan(data.seed, data.only_certified is not None)
    checkpoint = source.read(sink)
    crafted_on = _second(attacks.crafted_on, checkpoint, source.ckpt)
    certificates = None
    if data.only_certified is not None:
        norm, certificates = judge.read_certified(data.only_certified, checkpoint.digest)
        stages = in_norm(stages, norm, attacks.norm)
    images = data.images(checkpoint.record, sink, unlabelled=True)
    images = digested(inputs.answered(checkpoint, images, machine.pick(), sink), processes.team())
    shares_seen = inputs.say_seen(checkpoint, images, sink)
    sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
    stages = tuple(stage.ready(checkpoint.net, checkpoint.record, settings) for stage in stages)
    tasks = tasks_of(stages, images, certificates)
    facts = {
        "preset": attacks.preset,
        "source": crafted_on.digest if crafted_on else None,
        "certified_only": certificates is not None,
    }
    session = Session(checkpoint, images, tasks, settings, certificates, machine, facts, sink)
    outcome = session.run(
        crafted_on, results, output.force, attacks.checks, output.output is not None
    )
    if outcome is None:
        return
    findings, records = outcome
    about = {"checkpoint": checkpoint.digest, "dataset": record_lines.describe_images(images)}
    document = {**about, **findings.to_json(), **facts}
    unchecked = {} if certificates is None else {"authors_word": ["certified_only", "own_radii"]}
    attack_gate(findings, results.minimum, gate)
    sink.document({**document, **unchecked, "seen": shares_seen, "doubts": sink.doubts}, gate)
    show_attacks(
        sink,
        findings,
        f"{images.name} ({images.split})",
        crafted_on is not None,
        certificates is not None,
    )
    if certificates is None:
        # one an image, in the order of the images: the records are of every radius
        answers = {record.index: record.prediction for record in records[0]}
        inputs.doubt_accuracy(document["clean"], images, checkpoint, sink, list(answers.values()))
    session.show(records, results, Path(source.ckpt).stem, output.force)
    result = {
        name: document[name]
        for name in evidence_schema.AttackResult.__struct_fields__
        if name in document
    }
    output.write_evidence(
        checkpoint.with_evidence("attack", parameters_of(tasks, settings, **facts), result), sink
    )
    gate.enforce()


def _second(path: str | None, checkpoint: Checkpoint, tested: str) -> Checkpoint | None:
    """Another checkpoint that sees the same images; UsageError when it cannot."""
    from certcli.models.open import open_checkpoint

    if path is None:
        return None
    other = open_checkpoint(path, origins.Hints())
    record = checkpoint.record
    if (other.record.input.size, other.record.classes) != (record.input.size, record.classes):
        raise errors.UsageError(
            f"{path} has other images or classes than {tested}", "both must see the same images"
        )
    return other
