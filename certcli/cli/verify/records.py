"""Records of `certify`: certificates on file, found again and attacked inside what they claim."""

import os
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli.attack.families.ascent import margin_pgd
from certcli.attack.judge import judge_points, tuck_in
from certcli.attack.settings import AttackSettings
from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.methods import (
    FALSE_ALARM,
    Attack,
    certify_run,
    options_of_method,
    prepare_method,
    read_claims,
    recheck,
    require_same_way,
)
from certcli.certify.patch.certifier import PatchCertifier, TouchedPasses
from certcli.checkpoint.file import Checkpoint
from certcli.cli.shared import groups, output
from certcli.cli.verify.options import VerifyOptions
from certcli.cli.verify.view import CheckedFile
from certcli.evaluation import evidence, perturbation, record_lines, records
from certcli.evaluation.threat import Patch, Threat
from certcli.images.labelled import Images
from certcli.system.errors import DataError, UsageError

STEPS = 40
SMOOTH_STEPS = 10
PATCH_STEPS = 3
"""Of margin PGD: on a network; on a smoothed one, each of whose steps costs sixteen passes; behind
masks up to 32.
"""


def check_records(options: VerifyOptions, sink: output.Sink) -> CheckedFile:
    """Check every record, or a sample."""

    path = options.file
    run, rows = records.read_records(path, "certify")
    checkpoint = options.open(sink)
    records.require_same_network(run, checkpoint.digest, path)
    method = evidence.method_of(run, path)
    _require_few_draws(run, path, options.scope.draws)
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
        for row in recheck(certifier, chosen, images, seed, attack, options.machine.batch_size):
            number = row.certificate.index
            abstains = row.claim.status == "unverified"
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
        "false_alarm": FALSE_ALARM,
    }
    counts = Counter(claim.status for claim in claims)
    verdicts = ", ".join(f"{counts[name]} {name}" for name in ("verified", "refuted", "unverified"))
    words = (
        f"{len(claims)} of {len(certificates)} records ({method}): {verdicts}; "
        f"{attacked} attacked inside what they claim (margin PGD)"
    )
    if certifier.promise != "proof":
        words += (
            f"; with fresh noise (seed {seed}): true statements are refuted with probability {FALSE_ALARM:g} at most, "
            f"all together; each statement itself is wrong with probability {certifier.failure:g}"
        )
    return CheckedFile(claims, words, about=about)


def _ready(
    run: record_lines.Run,
    rows: Sequence[Mapping[str, Any]],
    checkpoint: Checkpoint,
    images: Images,
    options: VerifyOptions,
) -> tuple[Certifier, list[Certificate]]:
    """Return the header's method, made ready, and certificates. DataError: they disagree."""

    method = str(run.method)
    values = {
        **run.parameters,
        "batch_size": options.machine.batch_size,
        "denoiser_file": options.scope.denoiser,
    }
    try:
        settings = options_of_method(method, values)
        certifier = prepare_method(
            method,
            checkpoint,
            options.machine.pick_for(getattr(settings, "arithmetic", None)),
            settings,
        )
    except UsageError as failure:
        raise DataError(
            f"{options.file} states parameters that mean nothing: {failure.message}"
        ) from failure
    require_same_way(run, certify_run(certifier, checkpoint, images), str(options.file))
    return certifier, read_claims(rows, images, certifier, str(options.file))


def _require_few_draws(run: record_lines.Run, path: Path, allowed: int) -> None:
    draws = max(run.parameters.get("n0", 0), run.parameters.get("samples", 0))
    if draws > allowed:
        raise DataError(
            f"{path} states {draws:,} draws an image; without --draws at most {allowed:,} are allowed",
            f"--draws {draws} allows them",
        )


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


def margin_attack(steps: int) -> Attack:
    """Return margin PGD: from the image, then towards the likeliest class; patches: one place."""

    def in_patch(
        certifier: PatchCertifier, image: Tensor, classes: Tensor, patch: Patch, seed: int
    ) -> Tensor:
        draw = random.Random(seed)
        sides = zip(image.shape[-2:], (patch.height, patch.width), strict=True)
        top, left = (draw.randint(0, side - inner) for side, inner in sides)
        region = perturbation.Region.within(patch, [(top, left)], image)
        # a random start
        settings = AttackSettings(steps=PATCH_STEPS, restart=AttackSettings.targets + 1, seed=seed)
        return region.project(
            margin_pgd(
                TouchedPasses(certifier, patch, (top, left)), image, classes, region, settings
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
