"""From findings to the document: answer, gates, lineage, and the command that repeats the audit."""

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from certcli.audit import gates, headline, summary_text
from certcli.audit.clock import Clock
from certcli.audit.findings import AuditFindings
from certcli.audit.plan import AuditPlan, Typed, reproduce
from certcli.checkpoint.record import versions
from certcli.evaluation.image_doubts import accuracy_doubts
from certcli.models.build import OpenCheckpoint
from certcli.report.document import Audit, LineageStep, Machine, Network
from certcli.system.reading import is_absent

LEFT_OUT = (
    "Left out (--anonymous): the folders in commands, the path in a repository, the names of the images' files, and the "
    "processor."
)


def compose(
    checkpoint: OpenCheckpoint,
    findings: AuditFindings,
    plan: AuditPlan,
    clock: Clock,
    typed: Typed,
    device: torch.device,
) -> Audit:
    """Return the document. Its commands are the ones to type, unless the plan is anonymous."""
    record = checkpoint.record
    size = checkpoint.record.input.size
    clean = findings.clean
    doubts = [*findings.seen, *checkpoint.reading.doubts]
    doubts += [] if clean is None else accuracy_doubts(clean.hits, clean.images, checkpoint)
    named = typed.anonymous()
    shown = named if plan.anonymous else typed
    same = (
        "bound",
        "slope",
        "dataset",
        "clean",
        "certificates",
        "attack",
        "patched",
        "patch_attack",
        "skipped",
    )
    fields: dict[str, Any] = {name: getattr(findings, name) for name in (*same, "attention_weight")}
    if findings.own:
        fields["clean"] = None
    return Audit(
        schema=1,
        command="audit",
        checkpoint=checkpoint.digest,
        network=Network(
            name=named.source.removeprefix("./"),
            arch=record.arch,
            classes=record.classes,
            input=list(size),
            parameters=findings.parameters,
            reading=checkpoint.reading.to_json(),
            path=None if plan.anonymous else path_in_repository(Path(typed.source)),
        ),
        headline=headline.headline(findings, plan, size),
        points=headline.points(findings, plan, size),
        scale=headline.scale(findings, plan, size),
        reference=headline.published_reference(findings, size),
        verdict=summary_text.verdict_sentences(findings, plan),
        doubts=[
            doubt for doubt in (*doubts, *findings.doubts) if doubt != findings.failing
        ],  # that is the headline
        next=summary_text.next_steps(findings, plan, shown),
        gate=gates.judge_gates(plan.gates, findings, size[1:]),
        lineage=[
            LineageStep(
                command=step.command, parameters=step.shown, seed=step.seed, parent=step.parent
            )
            for step in record.lineage
        ],
        reproduce=reproduce(plan, findings.precision, shown),
        budget=clock.budget,
        seconds=round(clock.spent, 2),
        computed=round(clock.computed(), 2),
        versions=versions(),
        date=now(),
        machine=Machine(
            cpu="" if plan.anonymous else processor(),
            threads=torch.get_num_threads(),
            device=str(device),
        ),
        records=findings.records(files=not plan.anonymous),
        left_out=LEFT_OUT if plan.anonymous else "",
        **fields,
    )


def now() -> str:
    """Return the time in UTC, ISO 8601; SOURCE_DATE_EPOCH overrides it, as in reproducible builds."""
    epoch_text = os.environ.get("SOURCE_DATE_EPOCH", "")
    moment = (
        datetime.fromtimestamp(int(epoch_text), UTC)
        if epoch_text.isdecimal()
        else datetime.now(UTC)
    )
    return moment.strftime("%Y-%m-%dT%H:%M:%S")


def processor() -> str:
    """Return the model of the CPU, as far as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def path_in_repository(file: Path) -> str | None:
    """Return the path below the folder that holds .git; None outside every repository."""
    if is_absent(file):
        return None
    whole = file.resolve()
    root = next((folder for folder in whole.parents if not is_absent(folder / ".git")), None)
    return None if root is None else whole.relative_to(root).as_posix()
