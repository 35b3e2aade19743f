"""What `certvit verify` says of a file: one table, one document, and why it is not verified; and records
of `certify`: certificates on file, found again and attacked inside what they claim."""

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli.attack.families.ascent import margin_pgd
from certcli.attack.judge import judge_points, tuck_in
from certcli.attack.settings import AttackSettings
from certcli.certify import methods
from certcli.certify.certificate import Certifier
from certcli.certify.patch.certifier import PatchCertifier, TouchedPasses
from certcli.checkpoint.file import Checkpoint
from certcli.cli.shared import groups, output
from certcli.cli.verify import command
from certcli.evaluation import evidence, image_records, perturbation, record_lines, records
from certcli.evaluation.threat import Patch, Threat
from certcli.images.labelled import Images
from certcli.system.errors import DataError, GateError, UsageError

SHOWN = 40
"""Claims of one file that a person is shown; --json holds all."""
RECORDS = "records"


@dataclass(frozen=True)
class CheckedFile:
    """What became of the claims of one file.

    Args:
        words: the last line for a person, where all is verified.
        whole: whether the weights were there to check against.
        about: further facts for the document.
    """

    claims: Sequence[evidence.Claim]
    words: str
    whole: bool = True
    about: Mapping[str, Any] = field(default_factory=dict)


def conclude(file: Path, checked: CheckedFile, kind: str, sink: output.Sink) -> None:
    """Write the document, show what is not verified, and demand that all is."""
    reason = failure(file, checked.claims)
    gate = output.Gate()
    gate.demand(not reason, GateError(reason))
    document = {"file": file.name, "kind": kind, "whole": checked.whole, **checked.about}
    document |= summary(checked.claims)
    document["verified"] = document["verified"] and checked.whole
    sink.document(document, gate)
    refuted = [claim for claim in checked.claims if claim.status == "refuted"]
    shown = refuted if refuted or kind == RECORDS else checked.claims
    if shown:
        show_claims(file, shown, sink)
    if kind == RECORDS or not reason:
        sink.text(checked.words)
    gate.enforce()


def show_claims(file: Path, claims: Sequence[evidence.Claim], sink: output.Sink) -> None:
    rest = f", the first {SHOWN} of {len(claims)}" if len(claims) > SHOWN else ""
    rows = [(claim.title, claim.status, claim.why) for claim in claims[:SHOWN]]
    sink.table(f"Verification of {file}{rest}", ["claim", "status", "why"], rows)


def summary(claims: Sequence[evidence.Claim]) -> dict[str, Any]:
    counts = Counter(claim.status for claim in claims)
    return {
        "verified": not evidence.unverified_reasons(claims),
        "counts": {status: counts[status] for status in evidence.STATUSES},
        "claims": [asdict(claim) for claim in claims],
    }


def failure(file: Path, claims: Sequence[evidence.Claim]) -> str:
    """Return why the file is not verified; empty where it is."""
    refuted = [claim for claim in claims if claim.status == "refuted"]
    if refuted:
        first = refuted[0]
        more = f" {len(refuted)} of {len(claims)} claims;" if len(refuted) > 1 else ""
        return f"{file} is refuted:{more} {first.title}: {first.status} ({first.why})"
    reasons = evidence.unverified_reasons(claims)
    return f"{file} is not verified: {reasons[0]}" if reasons else ""


STEPS = 40
SMOOTH_STEPS = 10
PATCH_STEPS = 3
"""Of margin PGD: on a network; on a smoothed one, each of whose steps costs sixteen passes; behind
masks up to 32.
"""


def check_records(options: command.VerifyOptions, sink: output.Sink) -> CheckedFile:
    """Check every record, or a sample."""

    path = options.file
    run, rows = records.read_records(path, "certify")
    checkpoint = options.open(sink)
    records.require_same_network(run, checkpoint.digest, path)
    method = evidence.method_of(run, path)
    draws = max(run.parameters.get("n0", 0), run.parameters.get("samples", 0))
    if draws > evidence.MOST_DRAWS:
        raise DataError(
            f"{path} states {draws:,} draws an image; at most {evidence.MOST_DRAWS:,} are allowed"
        )
    images = _recorded_images(run, checkpoint, options.data, path, sink)
    records.require_same_images(rows, images, path)
    certifier, certificates = _ready(run, rows, checkpoint, images, options)
    if certifier.reading:
        sink.note(certifier.reading)
    seed = int.from_bytes(os.urandom(6), "little")  # nobody who wrote the file can have known it
    chosen = certificates
    sample = options.scope.sample
    if sample is not None and sample < len(certificates):
        drawn = random.Random(seed).sample(certificates, sample)
        chosen = sorted(drawn, key=lambda certificate: certificate.index)
        sink.note(f"a sample of {sample} of {len(certificates)} records, drawn with seed {seed}")
    if len(certificates) < len(images):
        missing = f"{len(certificates)} of its {len(images)} images: the rest is unknown"
        sink.warn(f"{path} holds records of {missing}")
    attack = margin_attack(STEPS if certifier.promise == "proof" else SMOOTH_STEPS)
    claims = []
    attacked = 0
    with sink.progress(f"verify ({method})", total=len(chosen)) as bar:
        for row in methods.recheck(
            certifier, chosen, images, seed, attack, options.machine.batch_size
        ):
            number = row.certificate.index
            abstains = row.certificate.prediction is None
            name = images.named(number)
            claims.append(replace(row.claim, entry=name, number=number, asked=not abstains))
            attacked += row.attacked
            bar.advance()
    about = {
        "checkpoint": checkpoint.digest,
        "method": method,
        "promise": certifier.promise,
        "records": len(certificates),
        "checked": len(claims),
        "attacked": attacked,
        "seed": seed,
        "false_alarm": methods.FALSE_ALARM,
    }
    counts = Counter(claim.status for claim in claims)
    verdicts = ", ".join(f"{counts[name]} {name}" for name in ("verified", "refuted", "unverified"))
    words = (
        f"{len(claims)} of {len(certificates)} records ({method}): {verdicts}; "
        f"{attacked} attacked inside what they claim (margin PGD)"
    )
    if certifier.promise != "proof":
        words += (
            f"; with fresh noise (seed {seed}): true statements are refuted with probability "
            f"{methods.FALSE_ALARM:g} at most, all together; "
            f"each statement itself is wrong with probability {certifier.failure:g}"
        )
    return CheckedFile(claims, words, about=about)


def _ready(
    run: record_lines.Run,
    rows: list[image_records.Certificate],
    checkpoint: Checkpoint,
    images: Images,
    options: command.VerifyOptions,
) -> tuple[Certifier, list[image_records.Certificate]]:
    """Return the header's method, made ready, and certificates. DataError: they disagree."""

    method = str(run.method)
    values = {
        **run.parameters,
        "batch_size": options.machine.batch_size,
        "denoiser_file": options.scope.denoiser,
    }
    try:
        settings = methods.options_of_method(method, values)
        certifier = methods.prepare_method(
            method,
            checkpoint,
            options.machine.pick_for(getattr(settings, "arithmetic", None)),
            settings,
        )
    except UsageError as failure:
        raise DataError(
            f"{options.file} states parameters that mean nothing here: {failure.message}",
            "certify again",
        ) from failure
    methods.require_same_way(
        run, methods.certify_run(certifier, checkpoint, images), str(options.file)
    )
    return certifier, methods.read_claims(rows, images, str(options.file))


def _recorded_images(
    run: record_lines.Run,
    checkpoint: Checkpoint,
    data: groups.Evaluation,
    path: Path,
    sink: output.Sink,
) -> Images:
    """The records' images, by --dataset, of the header's split and number; else DataError."""
    split = run.dataset.split
    count = run.dataset.images
    named = data if data.split is not None else replace(data, split=split)
    images = named.images(checkpoint.record, sink)
    if count < len(images):
        images = images.limit(count, data.seed)
    here = (images.name, images.split)
    recorded = (run.dataset.name, split)
    other = here != recorded and images.ahead is None  # a folder has any name
    if other or images.digest != run.dataset.digest:
        raise DataError(
            f"{path} is about other images than these {len(images)} of {images.name} ({images.split})",
            "give the --dataset, --data-dir, --split, --limit and --seed that the records were made with",
        )
    return images


def margin_attack(steps: int) -> methods.Attack:
    """Return margin PGD: from the image, then towards the likeliest class; patches: one place."""

    def in_patch(
        certifier: PatchCertifier, image: Tensor, classes: Tensor, patch: Patch, seed: int
    ) -> Tensor:
        draw = random.Random(seed)
        sides = zip(image.shape[-2:], (patch.height, patch.width), strict=True)
        row, column = (draw.randint(0, side - inner) for side, inner in sides)
        region = perturbation.Region.within(patch, [(row, column)], image)
        # a random start
        settings = AttackSettings(steps=PATCH_STEPS, restart=AttackSettings.targets + 1, seed=seed)
        return region.project(
            margin_pgd(
                TouchedPasses(certifier, patch, (row, column)), image, classes, region, settings
            ),
            image,
        )

    def attack(
        certifier: Certifier, image: Tensor, classes: Tensor, threat: Threat, seed: int
    ) -> Tensor:
        if isinstance(threat.size, Patch):
            assert isinstance(certifier, PatchCertifier)
            return in_patch(certifier, image, classes, threat.size, seed)
        region = perturbation.Region(threat.norm, threat.radius)  # type: ignore[arg-type]
        model, point = certifier.attacked.eval(), image
        for restart in range(2):
            point = tuck_in(
                margin_pgd(
                    model, image, classes, region, AttackSettings(steps=steps, restart=restart)
                ),
                image,
                region,
            )
            if bool(judge_points(model, image, classes, point, region, prediction=classes).success):
                break
        return point

    return attack
