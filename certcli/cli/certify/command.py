"""certvit certify: certified accuracy at radii or against patches, one record an image."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from certcli.certify.local_options import Local
from certcli.certify.patch.options import Patches
from certcli.certify.proof_options import Proof
from certcli.certify.smoothing.options import Smoothing
from certcli.cli.certify.options import CertifyOptions, CertifyTarget
from certcli.cli.shared import inputs
from certcli.cli.shared.command import command
from certcli.cli.shared.groups import BatchDevice, Evaluation, Output, Source, Talk
from certcli.cli.shared.output import Gate
from certcli.system.errors import UsageError
from certcli.system.processes import require_one, team

if TYPE_CHECKING:
    from certcli.checkpoint.file import Checkpoint


PANELS = {
    "smoothing": "Smoothing",
    "local": "Local",
    "patch": "Patches",
    **dict.fromkeys(("lipschitz", "box", "local-lip", "bcp"), "Proofs"),
}
"""A method -> the panel of its options."""


@command(
    "certvit certify m.safetensors -e 36/255 -e 0.5 --records certified.jsonl",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method smoothing --sigma "
    "0.12 -e 0.12 --limit 50",
    "certvit certify vit_tiny_patch16_224 --dataset FOLDER --method patch --patch 32 --limit 200",
    page="certify.md",
    often=(
        "epsilon",
        "methods",
        "minimum",
        "records",
        "resume",
        "plot",
        "attack_records",
    ),
    panels=PANELS,
)
def certify(
    context: typer.Context,
    source: Source,
    target: CertifyTarget = CertifyTarget(),
    proof: Proof = Proof(),
    smoothing: Smoothing = Smoothing(),
    local: Local = Local(),
    patches: Patches = Patches(),
    data: Evaluation = Evaluation(),
    machine: BatchDevice = BatchDevice(),
    output: Output = Output(),
    talk: Talk = Talk(),
) -> None:
    """Certify images: the certified accuracy at each l2 radius, or against each patch."""
    from certcli.cli.certify import run, view
    from certcli.cli.certify.demands import AUTO, patch_demand, require_compatible
    from certcli.evaluation.records import digested

    options = CertifyOptions(
        source, target, proof, smoothing, local, patches, data, machine, output
    )
    if target.vnnlib is not None:
        from certcli.cli.certify import query

        query.require_read(context)
        output.claim(source, target)
        query.answer(options, talk.sink())
        return
    if target.result is not None:
        raise UsageError(
            "--result is the answer to a query", "certvit certify NET.onnx --vnnlib SPEC"
        )
    gate = Gate()
    demand, threats = require_compatible(options)
    if AUTO in target.methods:
        require_one(
            "auto chooses by trying",
            "certvit certify ... --limit 50 says what it chooses; name that",
        )
    output.claim(source, target, smoothing, data)
    sink = talk.sink()
    checkpoint = source.read(sink)
    if demand is None:
        demand, threats = patch_demand(target.minimum, patches, checkpoint.record.input.size[1:])
    demand = replace(demand, every=output.output is not None)
    images = data.images(checkpoint.record, sink, unlabelled=True)
    images = digested(inputs.answered(checkpoint, images, machine.pick(), sink), team())
    shares_seen = inputs.say_seen(checkpoint, images, sink)
    sink.assumes(checkpoint.reading.line(), checkpoint.reading.to_json())
    attacked = run.attacked_shares(target.attack_records, checkpoint.digest, images, local.norm)
    task = run.CertifyTask(checkpoint, images, threats, demand)
    choice = run.choose(task, options, sink)
    results = run.run_all(choice, task, options, sink)
    if not results:  # a process that leads no others
        return
    first = results[0]
    demand.check(first.accuracy, gate)
    document = view.document(results, choice.reason or None, checkpoint.digest, images)
    sink.document({**document, "seen": shares_seen, "doubts": sink.doubts}, gate)
    view.table(results, images, attacked, sink)
    if choice.method not in (
        "smoothing",
        "patch",
    ):  # whose network is another one: under noise, behind masks
        answers = [row.prediction for row in first.rows]
        inputs.doubt_accuracy(first.accuracy.clean, images, checkpoint, sink, answers)
    if target.plot is not None:
        view.plot(
            results, attacked, _name(source.ckpt), images, target.plot, threats[-1].radius, sink
        )
    if output.output is not None:
        about = {
            "dataset": images.name,
            "split": images.split,
            "limit": data.limit,
            "seed": data.seed,
        }
        written: Checkpoint = checkpoint
        for result in reversed(results):  # the first named comes last, where `log` looks for it
            evidence = view.evidence(result, images)
            written = written.with_evidence(
                "certify", {**about, "method": result.certifier.method}, evidence
            )
        output.write(written, output.output)
        sink.note(f"wrote {output.output}")
    gate.enforce()


def _name(ckpt: str) -> str:
    """Return a network's name in a figure: its file's stem, or that of the folder it lies in."""
    path = Path(ckpt)
    return path.parent.name if path.stem == "model" and path.parent.name else path.stem
