"""From findings to the document: answer, gates, lineage, and the command that repeats the audit; its
pictures: images that were fooled, and a patch at the place where it was tried; and the evidence that
the commands would have written, for `log` and `verify`."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.audit import answer, gates
from certcli.audit.plan import AuditPlan, Clock, Typed, reproduce
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import versions
from certcli.evaluation import image_doubts, threat
from certcli.images.labelled import Images
from certcli.models.build import OpenCheckpoint
from certcli.report import document, page
from certcli.system.reading import is_absent

LEFT_OUT = (
    "Left out (--anonymous): the folders in commands, the path in a repository, the names of the images' files, and the "
    "processor."
)


def compose(
    checkpoint: OpenCheckpoint,
    findings: gates.AuditFindings,
    plan: AuditPlan,
    clock: Clock,
    typed: Typed,
    device: torch.device,
) -> document.Audit:
    """Return the document. Its commands are the ones to type, unless the plan is anonymous."""
    record = checkpoint.record
    size = checkpoint.record.input.size
    clean = findings.clean
    doubts = [*findings.seen, *checkpoint.reading.doubts]
    doubts += (
        [] if clean is None else image_doubts.accuracy_doubts(clean.hits, clean.images, checkpoint)
    )
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
    return document.Audit(
        schema=1,
        command="audit",
        checkpoint=checkpoint.digest,
        network=document.Network(
            name=named.source.removeprefix("./"),
            arch=record.arch,
            classes=record.classes,
            input=list(size),
            parameters=findings.parameters,
            reading=checkpoint.reading.to_json(),
            path=None if plan.anonymous else path_in_repository(Path(typed.source)),
        ),
        headline=answer.headline(findings, plan, size),
        points=answer.points(findings, plan, size),
        scale=answer.scale(findings, plan, size),
        reference=answer.published_reference(findings, size),
        verdict=answer.verdict_sentences(findings, plan),
        doubts=[
            doubt for doubt in (*doubts, *findings.doubts) if doubt != findings.failing
        ],  # that is the headline
        next=answer.next_steps(findings, plan, shown),
        gate=gates.judge_gates(plan.gates, findings, size[1:]),
        lineage=[
            document.LineageStep(
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
        machine=document.Machine(
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


EACH = "Each: the image, what changes (around grey, magnified), the changed image."


def pictures_of(
    findings: gates.AuditFindings, names: Sequence[str], anonymous: bool = False
) -> dict[str, page.Gallery]:
    """Return galleries: a fooled image ("first"), a patch ("patch"), all ("fooled").

    anonymous: without the names of files.
    """
    images = None if anonymous else findings.images
    galleries: dict[str, page.Gallery] = {}
    if findings.patched_pair is not None and findings.patch_attack is not None:
        before, after = findings.patched_pair
        size = findings.patch_attack.patch.replace("x", " x ")
        pair = [
            (page.data_uri(before), "an image"),
            (page.data_uri(after), f"the image with a patch of {size} pixels"),
        ]
        caption = f"A patch of {size} pixels: at this place it changes the class that the network gives without masks."
        example = page.Figure(caption, pair, _large(before))
        galleries["patch"] = page.Gallery("What such a patch looks like", "", [example])
    if findings.exhibits:
        shown = next((row for row in findings.exhibits if row.as_8bit), findings.exhibits[0])
        galleries["first"] = page.Gallery("", "", [_first_figure(shown, names)])
        fooled = [_fooled(row, names, images) for row in findings.exhibits]
        galleries["fooled"] = page.Gallery("Images that were fooled", EACH, fooled)
    return galleries


def _first_figure(row: Any, names: Sequence[str]) -> page.Figure:
    """Return one image and its changed copy, with both answers."""
    before = names[row.prediction]
    after = names[row.adversarial_prediction]
    files = "" if row.as_8bit else f" Saved with 8 bits a value it is answered {before} again."
    caption = f"An image, and a copy changed by l2 {threat.attacked_radius(row.norm, 3)}.{files}"
    pair = [
        (page.data_uri(row.image), f"answer: {before}"),
        (page.data_uri(row.adversarial), f"answer: {after}"),
    ]
    return page.Figure(caption, pair, _large(row.image))


def _fooled(row: Any, names: Sequence[str], images: Images | None) -> page.Figure:
    change, factor = page.magnified(row.image, row.adversarial)
    uris = (page.data_uri(pixels) for pixels in (row.image, change, row.adversarial))
    before = names[row.prediction]
    after = names[row.adversarial_prediction]
    image = f"image {row.index}" if images is None else images.named(row.index)
    words = (
        f"{image}, classified {before}",
        "what changes, magnified",
        f"changed image, classified {after}",
    )
    files = "also as an 8-bit file" if row.as_8bit else f"as an 8-bit file {before} again"
    length = threat.attacked_radius(row.norm, 3)
    caption = (
        f"{image}: {before}, then {after} ({files}); l2 {length}, change shown {factor:.3g} times"
    )
    return page.Figure(caption, list(zip(uris, words, strict=True)), _large(row.image))


def _large(image: Tensor) -> bool:
    return max(image.shape[1:]) > page.LARGEST // 2


def with_evidence(checkpoint: Checkpoint, audit: document.Audit, seed: int) -> Checkpoint:
    """Return the same tensors with entries of lipschitz, certify (the best method last) and attack."""
    if audit.bound is not None:
        result = {
            "upper": audit.bound.upper,
            "log10_upper": audit.bound.log10_upper,
            "lower": None if audit.slope is None else audit.slope.lower,
            "why": audit.bound.why,
            "attention_weight": audit.attention_weight,
        }
        about: dict[str, Any] = {"images": 0 if audit.slope is None else audit.slope.images}
        checkpoint = checkpoint.with_evidence("lipschitz", about, result)
    shares: list[document.CertifiedShares | document.PatchShares] = [
        *sorted(audit.certificates, key=_worth)
    ]
    shares += [] if audit.patched is None else [audit.patched]
    for shares_of in shares:
        result = _certify_entry(shares_of)
        about = _images_entry(shares_of.dataset) | {
            "limit": shares_of.dataset.images,
            "seed": seed,
            "method": result["method"],
        }
        checkpoint = checkpoint.with_evidence("certify", about, result)
    if audit.attack is not None:
        about = _images_entry(audit.attack.dataset) | {
            "images": audit.attack.dataset.images,
            "attacks": [audit.attack.attacks],
            "radii": [[float(radius) for radius in audit.attack.robust]],
            "norm": [audit.attack.norm],
            "settings": audit.attack.settings,
        }
        checkpoint = checkpoint.with_evidence("attack", about, _attack_entry(audit.attack))
    return checkpoint


def _images_entry(dataset: document.Dataset) -> dict[str, Any]:
    return {"dataset": dataset.name, "split": dataset.split}


def _worth(shares: document.CertifiedShares) -> tuple[bool, float]:
    """Proofs that certify something come last, those that certify nothing first."""
    best = max((share.share for share in shares.certified.values()), default=0.0)
    return shares.failure == 0 and best > 0, best


def _certify_entry(shares: document.CertifiedShares | document.PatchShares) -> dict[str, Any]:
    if isinstance(shares, document.PatchShares):
        special: dict[str, Any] = {"method": "patch", "failure": 0.0, "promise": "proof"}
    else:
        special = {
            name: getattr(shares, name)
            for name in ("method", "failure", "promise", "average_radius")
        }
    return special | {
        "dataset": document.to_json(shares.dataset),
        "clean": shares.clean.share,
        "certified": {size: share.share for size, share in shares.certified.items()},
        "images": shares.clean.images,
        "arithmetic": shares.arithmetic,
        "parameters": shares.parameters,
    }


def _attack_entry(shares: document.AttackShares) -> dict[str, Any]:
    first = next(iter(shares.robust))
    return {
        "dataset": document.to_json(shares.dataset),
        "clean": shares.clean.share,
        "robust": shares.robust[first].share,
        "epsilon": float(first),
        "norm": shares.norm,
        "images": shares.clean.images,
        "attacks": {", ".join(shares.attacks): shares.robust[first].share},
        "curve": {radius: share.share for radius, share in shares.robust.items()},
        "median_norm": shares.median_norm,
    }
