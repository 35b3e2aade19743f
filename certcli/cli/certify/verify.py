"""`certify --verify RECORDS`: certificates on file, found again and attacked; the verdicts, shown."""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Gate, Sink
from certcli.evaluation.threat import Patch, Threat
from certcli.system.errors import DataError, GateError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from certcli.certify.certificate import Certifier
    from certcli.certify.recheck import Attack
    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.certify.options import Options
    from certcli.cli.shared.groups import Evaluation
    from certcli.evaluation.records import Run
    from certcli.images.labelled import Images

SHOWN = 20
"""Refuted records that a person is shown; --json holds all."""
ALLOWED_DRAWS = 100_000
"""An image; what papers draw. A file that states more is checked where --samples says so: it is not the file's time."""
STATED = ("promise", "arithmetic", "domain")
"""Parameters of every method; whether they are so, `require_same_way` finds."""
STEPS = 40
SMOOTH_STEPS = 10
PATCH_STEPS = 3
"""Of margin PGD: on a network; on a smoothed one, each of whose steps costs sixteen passes; behind masks up to 32."""


def _require_alone(options: Options) -> Path:
    """Return the records to verify; UsageError for options that say what to certify anew."""
    target = options.target
    if target.verify is None:
        raise UsageError(
            "--sample is for --verify", "--verify FILE.jsonl --sample 100, or --limit for images"
        )
    others = {name: getattr(target, name) for name in ("records", "plot", "html", "attack_records")}
    others |= {"arithmetic": options.proof.arithmetic}
    others |= {
        "min_certified": target.minimum,
        "output": options.output.output,
        "resume": target.resume or None,
    }
    for name, value in others.items():
        if value is not None:
            raise UsageError(
                f"--verify checks records and writes nothing: --{name.replace('_', '-')} does not go with it",
                "leave it out",
            )
    return target.verify


def verify_records(options: Options, sink: Sink) -> None:
    """Verify every record, or a sample. GateError when one is refuted or none was verified."""
    from certcli.certify.methods import options_of, prepare, run_of
    from certcli.certify.recheck import FALSE_ALARM, read_claims, recheck, require_same_way
    from certcli.evaluation.records import read_records, require_same_images, require_same_network

    path = _require_alone(options)
    sample = options.target.sample
    machine = options.machine
    run, rows = read_records(path, "certify")
    checkpoint = options.source.open(sink)
    require_same_network(run, checkpoint.digest, path)
    method, parameters = _stated(run, path, options)
    images = _images(run, checkpoint, options.data, path, sink)
    require_same_images(rows, images, path)
    values = {
        **parameters,
        "batch_size": machine.batch_size,
        "denoiser_file": options.smoothing.denoiser_file,
    }
    try:
        certifier = prepare(method, checkpoint, machine.pick(), options_of(method, values))
    except UsageError as failure:
        raise DataError(
            f"{path} states parameters that mean nothing: {failure.message}"
        ) from failure
    if certifier.reading:
        sink.note(certifier.reading)
    require_same_way(run, run_of(certifier, checkpoint, images), str(path))
    claims = read_claims(rows, images, certifier, str(path))
    seed = int.from_bytes(os.urandom(6), "little")  # nobody who wrote the file can have known it
    chosen = claims
    if sample is not None and sample < len(claims):
        chosen = sorted(random.Random(seed).sample(claims, sample), key=lambda claim: claim.index)
        sink.note(f"a sample of {sample} of {len(claims)} records, drawn with seed {seed}")
    if len(claims) < len(images):
        sink.warn(
            f"{path} holds records of {len(claims)} of its {len(images)} images: the rest is unknown"
        )
    attack = margin_attack(STEPS if certifier.promise == "proof" else SMOOTH_STEPS)
    results = []
    with sink.progress(f"verify ({method})", total=len(chosen)) as bar:
        for row in recheck(certifier, chosen, images, seed, attack, machine.batch_size):
            results.append(row)
            bar.advance()
    counts = Counter(row.status for row in results)
    refuted = [row for row in results if row.status == "refuted"]
    gate = Gate()
    if refuted:
        first = refuted[0]
        message = f"{len(refuted)} of {len(results)} records are refuted; {images.named(first.claim.index)}: {first.why}"
        gate.demand(False, GateError(f"{path} is refuted: {message}"))
    gate.demand(counts["verified"] > 0, GateError(f"nothing was verified: {path} states nothing"))
    attacked = sum(row.attacked for row in results)
    document: dict[str, Any] = {
        "checkpoint": checkpoint.digest,
        "method": method,
        "promise": certifier.promise,
        "records": len(claims),
        "checked": len(results),
        "verdicts": {name: counts[name] for name in ("verified", "refuted", "not checked")},
        "attacked": attacked,
        "seed": seed,
        "false_alarm": FALSE_ALARM,
        "rows": [
            {"index": row.claim.index, "status": row.status, "why": row.why}
            | ({"file": images.file_of[row.claim.index]} if images.file_of else {})
            for row in results
        ],
    }
    sink.document(document, gate)
    if refuted:
        rest = f", the first {SHOWN} of {len(refuted)}" if len(refuted) > SHOWN else ""
        shown = [
            (
                images.named(row.claim.index).removeprefix("image "),
                f"{row.claim.radius:.6g}",
                row.why,
            )
            for row in refuted[:SHOWN]
        ]
        sink.table(f"Refuted{rest}", ["image", "radius", "why"], shown)
    sink.text(
        f"{len(results)} of {len(claims)} records ({method}): {counts['verified']} verified, {counts['refuted']} refuted, "
        f"{counts['not checked']} not checked; {attacked} attacked inside what they claim (margin PGD)"
    )
    if certifier.promise != "proof":
        sink.text(
            f"with fresh noise (seed {seed}): true statements are refuted with probability {FALSE_ALARM:g} at most, all "
            f"together; each statement itself is wrong with probability {certifier.failure:g}"
        )
    gate.enforce()


def _stated(run: Run, path: Path, options: Options) -> tuple[str, Mapping[str, Any]]:
    """Method and parameters as the header has them; DataError when they are none of a method's, or
    ask for too much.
    """
    from certcli.checkpoint.schema import convert
    from certcli.evaluation.evidence import OPTIONS
    from certcli.system.errors import Refused

    if not isinstance(run.method, str) or run.method not in OPTIONS:
        raise DataError(
            f"{path} names no method of certify", "certvit certify ... --records FILE writes them"
        )
    allowed = max(ALLOWED_DRAWS, options.smoothing.samples)
    if options.target.methods not in (["lipschitz"], [run.method]):
        raise UsageError(
            f"{path} holds records of {run.method}", "leave out --method: the file names it"
        )
    try:
        convert(
            {name: value for name, value in run.parameters.items() if name not in STATED},
            OPTIONS[run.method],
        )
    except Refused as refusal:
        raise DataError(
            f"{path} states parameters that no {run.method} has: {refusal}"
        ) from refusal
    draws = max(run.parameters.get("n0", 0), run.parameters.get("samples", 0))
    if draws > allowed:
        raise DataError(
            f"{path} states {draws:,} draws an image; a file alone may ask for {allowed:,}",
            f"--samples {draws} allows them",
        )
    return run.method, run.parameters


def _images(run: Run, checkpoint: Checkpoint, data: Evaluation, path: Path, sink: Sink) -> Images:
    """The images of the records: by --dataset, in the split and the number that the header states.
    DataError for others.
    """
    split = run.dataset["split"]
    count = run.dataset["images"]
    named = data if data.split is not None else replace(data, split=split)
    images = named.images(checkpoint.record, sink)
    if count < len(images):
        images = images.limit(count, data.seed)
    here = (images.name, images.split)
    recorded = (run.dataset["name"], split)
    other = here != recorded and images.ahead is None  # a folder has any name
    if other or images.digest != run.dataset["digest"]:
        raise DataError(
            f"{path} is about other images than these {len(images)} of {images.name} ({images.split})",
            "give the --dataset, --data-dir, --split, --limit and --seed that the records were made with",
        )
    return images


def margin_attack(steps: int) -> Attack:
    """Return margin PGD: from the image itself, then towards the likeliest other class; of patches
    at one drawn place.
    """
    from certcli.attack.families.margin import margin_pgd
    from certcli.attack.judge import judge, tuck_in
    from certcli.attack.settings import AttackSettings
    from certcli.certify.patch.certifier import PatchCertifier
    from certcli.certify.patch.climbed import TouchedPasses
    from certcli.evaluation.region import Region

    def in_patch(
        certifier: PatchCertifier, image: Tensor, classes: Tensor, patch: Patch, seed: int
    ) -> Tensor:
        draw = random.Random(seed)
        sides = zip(image.shape[-2:], (patch.height, patch.width), strict=True)
        top, left = (draw.randint(0, side - inner) for side, inner in sides)
        region = Region.within(patch, [(top, left)], image)
        settings = AttackSettings(
            steps=PATCH_STEPS, restart=AttackSettings.targets + 1, seed=seed
        )  # a random start
        net = TouchedPasses(certifier, patch, (top, left))
        return region.project(margin_pgd(net, image, classes, region, settings), image)

    def attack(
        certifier: Certifier, image: Tensor, classes: Tensor, threat: Threat, seed: int
    ) -> Tensor:
        if isinstance(threat.size, Patch):
            assert isinstance(certifier, PatchCertifier)
            return in_patch(certifier, image, classes, threat.size, seed)
        model, region, point = certifier.attacked.eval(), Region(threat.norm, threat.radius), image  # type: ignore[arg-type]
        for restart in range(2):
            settings = AttackSettings(steps=steps, restart=restart)
            point = tuck_in(margin_pgd(model, image, classes, region, settings), image, region)
            if bool(judge(model, image, classes, point, region, prediction=classes).success):
                break
        return point

    return attack
