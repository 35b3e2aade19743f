"""From results to the document: the answer in words, the gates, the lineage, and how to ask again."""

from collections.abc import Sequence
from typing import Any

from certcli.audit import gates, words
from certcli.audit.clock import Clock
from certcli.audit.run import Asked, Results
from certcli.checkpoint.record import versions
from certcli.evaluation.doubts import accuracy_doubts
from certcli.models.build import OpenCheckpoint
from certcli.report.document import Audit, Network, Step


def compose(
    checkpoint: OpenCheckpoint,
    results: Results,
    asked: Asked,
    demands: Sequence[gates.FailOn],
    clock: Clock,
    *,
    typed: words.Typed,
    limit: int | None,
) -> Audit:
    """Documents travel: what is a path here is shown without its folders."""
    record, clean = checkpoint.record, results.clean
    doubts = [*results.seen, *checkpoint.reading.doubts]
    doubts += [] if clean is None else accuracy_doubts(clean.hits, clean.images, checkpoint)
    doubts += results.doubts
    image = record.input.size[1:]
    judged = gates.judge(demands, results, image)
    named = typed.travelling()
    kept: dict[str, Any] = {
        name: getattr(results, name)
        for name in ("bound", "slope", "dataset", "clean", "certificates", "attack", "patched", "skipped")
    }
    return Audit(
        schema=1,
        command="audit",
        checkpoint=checkpoint.digest,
        network=Network(
            name=named.source,
            arch=record.arch,
            classes=record.classes,
            input=list(record.input.size),
            parameters=results.parameters,
            reading=checkpoint.reading.to_json(),
        ),
        verdict=[*results.seen, *words.verdict(results, asked)],
        doubts=doubts,
        next=words.next_steps(results, asked, named, clock.budget),
        gate=judged,
        lineage=[
            Step(command=step.command, parameters=step.shown, seed=step.seed, parent=step.parent)
            for step in record.lineage
        ],
        reproduce=words.reproduce(asked, results.precision, demands, named, limit, clock.budget),
        budget=clock.budget,
        seconds=round(clock.spent, 2),
        versions=versions(),
        records=results.records(),
        **kept,
    )
