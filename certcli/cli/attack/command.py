"""certvit attack: the empirical upper bound, judged by us."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from certcli.certify.patch.options import Patches
from certcli.cli.attack import patches as patch_attacked
from certcli.cli.attack import run
from certcli.cli.attack.options import AttackedImages, AttackOutput, Attacks
from certcli.cli.shared import inputs
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Output, Source, Talk
from certcli.cli.shared.output import Gate
from certcli.system.errors import UsageError
from certcli.system.processes import require_one, team

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint


@command(
    "certvit attack m.safetensors -a pgd -a margin-pgd --restarts 3 -e 36/255 --records attacked.jsonl",
    "certvit attack m.safetensors --only-certified certified.jsonl -a margin-pgd",
    "certvit attack m.safetensors --norm patch --patch 32 --defence patch",
    page="attack.md",
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
        "gallery",
    ),
    panels={"patch": "Patches"},
)
def attack(
    source: Source,
    attacks: Attacks = Attacks(),
    data: AttackedImages = AttackedImages(),
    patches: Patches = Patches(),
    machine: BatchDevice = BatchDevice(),
    results: AttackOutput = AttackOutput(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Attack images: the accuracy under attack, an upper limit on any certified accuracy."""
    from certcli.attack.certified_radii import read_certified
    from certcli.attack.stages import in_norm, parameters_of, tasks_of
    from certcli.evaluation.records import digested

    results.check()
    if results.keeps_images:
        require_one(
            "adversarial images are kept", "leave out --save-examples and --gallery, or torchrun"
        )
    output.claim(source, attacks, data, results)
    if patch_attacked.require(attacks, data, patches, results):
        require_one("patches are looked for", "certvit attack --norm patch without torchrun")
        patch_attacked.attack(source, attacks, data, patches, machine, results, output, talk.sink())
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
        norm, certificates = read_certified(data.only_certified, checkpoint.digest)
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
    session = run.Session(checkpoint, images, tasks, settings, certificates, machine, facts, sink)
    outcome = session.run(
        crafted_on, results, output.force, attacks.checks, output.output is not None
    )
    if outcome is None:
        return
    findings, records = outcome
    document = session.document(findings)
    unchecked = {} if certificates is None else {"authors_word": ["certified_only", "own_radii"]}
    run.gate_of(findings, results.minimum, gate)
    sink.document({**document, **unchecked, "seen": shares_seen, "doubts": sink.doubts}, gate)
    run.table(
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
    if output.output is not None:
        from certcli.evaluation.evidence_schema import AttackResult

        parameters = parameters_of(tasks, settings, **facts)
        result = {
            name: document[name] for name in AttackResult.__struct_fields__ if name in document
        }
        output.write(checkpoint.with_evidence("attack", parameters, result), output.output)
        sink.note(f"wrote {output.output}")
    gate.enforce()


def _second(path: str | None, checkpoint: Checkpoint, tested: str) -> Checkpoint | None:
    """Another checkpoint that sees the same images; UsageError when it cannot."""
    from certcli.models.open import open_checkpoint
    from certcli.models.overrides import Hints

    if path is None:
        return None
    other = open_checkpoint(path, Hints())
    record = checkpoint.record
    if (other.record.input.size, other.record.classes) != (record.input.size, record.classes):
        raise UsageError(
            f"{path} has other images or classes than {tested}", "both must see the same images"
        )
    return other
