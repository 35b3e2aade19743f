"""What `attack` runs and shows: records, document, table, examples, gallery, gate."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from certcli.attack import examples, judge
from certcli.attack.checks import Flag, raised
from certcli.attack.findings import AttackFindings, attack_again, findings_of, inspect
from certcli.attack.run import AttackRecord
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
from certcli.cli.attack import options
from certcli.cli.attack import patches as patch_attacked
from certcli.cli.shared import groups, inputs
from certcli.cli.shared.output import Bar, Gate, Sink, percent
from certcli.evaluation import evidence_schema, record_lines
from certcli.evaluation.intervals import number_of
from certcli.evaluation.radii import (
    attacked_percent,
    attacked_radius,
    percent_ends,
    proven_radius,
)
from certcli.evaluation.records import RecordFile, digested
from certcli.images.labelled import Images
from certcli.images.names import names_of_classes
from certcli.models import build, origins
from certcli.system.errors import CertvitError, UsageError
from certcli.system.processes import require_one, team

_BUG = (
    "a certificate and a counterexample cannot both be right: certvit verify checks the file; if it is verified, report "
    "the bug with --save-examples"
)


@dataclass(frozen=True)
class Session:
    """One run: the network, the images, and what is done. facts: for header and document."""

    checkpoint: Checkpoint
    images: Images
    tasks: Sequence[StageTask]
    settings: AttackSettings
    certificates: Mapping[int, judge.CertifiedImage] | None
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
        results: options.AttackOutput,
        force: bool,
        checks: bool,
        every: bool,
    ) -> tuple[AttackFindings, dict[int, list[AttackRecord]]] | None:
        """The findings, and the records by number of the task; written to `--records` as they are
        found. None for a process that leads no others: what it found is theirs.

        Args:
            every: none may rest on what --resume read.
        """
        batch_size = self.machine.batch_size
        model = self.load(self.checkpoint)
        crafter = None if crafted_on is None else self.load(crafted_on)
        records_of: dict[int, list[AttackRecord]] = {}
        plan = (self.tasks, self.settings, batch_size)
        campaign = Campaign(model, *plan, crafter, team().leads and results.keeps_images)
        if not team().leads:
            list(campaign.run(team=team()))
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
                for number, rows in campaign.run(file, team()):
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
            resumed = attack_again(
                campaign, records_of, file.taken, results.minimum, every, str(results.records)
            )
            findings = replace(findings, resumed=resumed)
        return findings, records_of

    def show(
        self,
        records_of: Mapping[int, Sequence[AttackRecord]],
        results: options.AttackOutput,
        compared: Checkpoint | None,
        name: str,
        force: bool,
    ) -> None:
        """The adversarial images: as tensors, as a gallery."""
        fallen = [row for rows in records_of.values() for row in rows if row.fell]
        if results.keeps_images and not fallen:
            self.sink.warn("no adversarial image was found: there is none to save or to draw")
        if results.save_examples is not None and fallen:
            write_safetensors(results.save_examples, examples.collect(fallen), {}, force)
            self.sink.note(f"wrote {results.save_examples}")
        shown = examples.choose_exhibits(records_of[0], name) if results.gallery is not None else []
        if results.gallery is None or not shown:
            return
        gathered = [[exhibit] for exhibit in shown]
        if compared is not None:
            second = examples.beside_network(
                shown,
                self.load(compared),
                Path(str(results.compare)).stem,
                self.tasks[0].stage,
                self.settings.seed,
            )
            gathered = [list(pair) for pair in zip(shown, second, strict=True)]
        record = self.checkpoint.record
        _draw(
            gathered,
            names_of_classes(record.classes, record.class_names, self.images.classes),
            results.gallery,
            f"{name} on {self.images.name} ({self.images.split})",
            self.images,
        )
        self.sink.note(f"wrote {results.gallery}")


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
            CertvitError(f"certified above attacked: {findings.contradiction.measured}", _BUG),
        )
    if minimum is not None:
        first = findings.first
        gate.demand_share(
            round(first.robust * first.images),
            first.images,
            minimum,
            f"robust accuracy at {attacked_radius(first.epsilon)}",
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
            between = {name: percent_ends(ends) for name, ends in summary.intervals.items()}
            radius = attacked_radius(summary.epsilon) if part.own is None else "its own"
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
                ("", f"{name} ({order})", attacked_percent(share), between[name], "")
                for name, share in summary.attacks.items()
            ]
            nearest = "" if summary.median_norm is None else attacked_radius(summary.median_norm, 4)
            rows.append(
                (
                    "",
                    "all (worst case)",
                    attacked_percent(summary.robust),
                    between["robust"],
                    nearest,
                )
            )
    title = f"{images}, {number_of(findings.first.images)}{', certified as their records say' if certified else ''}"
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
        if part.own is not None:
            summary_text = "smallest {}, median {}, largest {}".format(
                *(proven_radius(radius, 4) for radius in part.own)
            )
            sink.text(
                f"each image at the radius that its record states (certvit verify checks them): {summary_text}"
            )


def _draw(
    rows: list[list[examples.Exhibit]],
    names: list[str],
    path: Path,
    about: str,
    images: Images,
) -> None:
    from certcli.report.gallery import AttackedImage, draw_gallery

    def picture(exhibit: examples.Exhibit) -> AttackedImage:
        shown = exhibit.record
        assert shown.image is not None
        assert shown.adversarial is not None
        assert shown.norm is not None
        caption = f"{shown.kind} {attacked_radius(shown.norm, 3)}"
        if not exhibit.crafted_here:
            caption = f"{'withstands' if shown.correct else 'wrong already'}: that of the left"
        return AttackedImage(
            image=shown.image,
            adversarial=shown.adversarial,
            heading=f"image {shown.index}, {exhibit.network}",
            clean_class=names[shown.prediction],
            clean_right=shown.correct,
            adversarial_class=names[shown.adversarial_prediction],
            adversarial_right=shown.adversarial_prediction == shown.label,
            as_file=shown.as_8bit is True,
            norm=caption,
            file=images.file_of.get(shown.index, ""),
        )

    count = f"{len(rows)} attacked image{'s' * (len(rows) != 1)}"
    draw_gallery(
        [[picture(shown) for shown in row] for row in rows],
        path,
        f"{about}: {count}\nimage, perturbation, their sum; classes in blue where right",
    )


def report_attacks(
    source: groups.Source,
    attacks: options.Attacks,
    data: options.AttackedImages,
    patches: Patches,
    machine: groups.BatchDevice,
    results: options.AttackOutput,
    output: groups.Output,
    talk: groups.Talk,
) -> None:
    """Attack images: the accuracy under attack, an upper limit on any certified accuracy."""
    results.check()
    if results.keeps_images:
        require_one(
            "adversarial images are kept", "leave out --save-examples and --gallery, or torchrun"
        )
    output.claim(source, attacks, data, results)
    if patch_attacked.asks_for_patches(attacks, data, patches, results):
        require_one("patches are looked for", "certvit attack --norm patch without torchrun")
        patch_attacked.attack_by_patches(
            source, attacks, data, patches, machine, results, output, talk.sink()
        )
        return
    sink = talk.sink()
    gate = Gate()
    settings, stages = attacks.plan(data.seed, data.only_certified is not None)
    checkpoint = source.read(sink)
    crafted_on, compared = (
        _second(path, checkpoint, source.ckpt) for path in (attacks.crafted_on, results.compare)
    )
    certificates = None
    if data.only_certified is not None:
        norm, certificates = judge.read_certified(data.only_certified, checkpoint.digest)
        stages = in_norm(stages, norm, attacks.norm)
    images = data.images(checkpoint.record, sink, unlabelled=True)
    images = digested(inputs.answered(checkpoint, images, machine.pick(), sink), team())
    shares_seen = inputs.say_seen(checkpoint, images, sink)
    sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
    drawn = [
        stage.with_draws(data.seed, checkpoint.record.classes, attacks.precision)
        for stage in stages
    ]
    tasks = tasks_of(drawn, images, certificates)
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
    session.show(records, results, compared, Path(source.ckpt).stem, output.force)
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
        raise UsageError(
            f"{path} has other images or classes than {tested}", "both must see the same images"
        )
    return other
