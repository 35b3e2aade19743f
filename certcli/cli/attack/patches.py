"""`attack --norm patch`: what patches leave of a network, or of its defended classifier."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from certcli.attack.catalogue import PATCH_ATTACK as ATTACK
from certcli.attack.judge import predict_classes
from certcli.attack.patch import PatchTarget, attack_patches
from certcli.attack.settings import AttackSettings
from certcli.certify import options
from certcli.certify.patch.certifier import PatchCertificate, TouchedPasses, prepare_patch
from certcli.checkpoint.file import Checkpoint
from certcli.cli.attack.command import AttackedImages, AttackOutput, Attacks
from certcli.cli.shared.groups import BatchDevice, Output, Source
from certcli.cli.shared.output import Gate, Sink, percent
from certcli.evaluation import evidence, record_lines, records, threat
from certcli.evaluation.intervals import number_of, share_interval
from certcli.evaluation.records import RecordBatch, Resumed, compute_again
from certcli.images.labelled import Images
from certcli.models import build
from certcli.system.errors import CertvitError, DataError, UsageError

Row = dict[str, Any]
"""A record."""
MOST_AT_ONCE = 16


def asks_for_patches(
    attacks: Attacks, data: AttackedImages, patches: options.Patches, results: AttackOutput
) -> bool:
    """Whether patches are looked for; UsageError for options of the other kind."""
    if attacks.norm != "patch":
        if patches.patches or attacks.defence != "none":
            raise UsageError(
                "--patch and --defence are for --norm patch",
                "certvit attack ... --norm patch --patch 32",
            )
        return False
    conflicting: dict[str, Any] = {
        "epsilon": attacks.epsilon,
        "preset": attacks.preset,
        "source": attacks.crafted_on,
        "step-size": attacks.step_size,
        "pixels": attacks.pixels != "float",
        "save-examples": results.save_examples,
        "gallery": results.gallery,
        "attack": [name for name in attacks.attacks if name != ATTACK],
    }
    for name, value in conflicting.items():
        if value:
            raise UsageError(
                f"--{name} does not go with --norm patch",
                f"its attack is {ATTACK}: --steps, --restarts",
            )
    return True


def attack_by_patches(
    source: Source,
    attacks: Attacks,
    data: AttackedImages,
    patches: options.Patches,
    machine: BatchDevice,
    results: AttackOutput,
    output: Output,
    sink: Sink,
) -> None:
    """Attack every image at many places, for each size; a certified image that falls is a bug."""

    checkpoint = source.open(sink)
    images = data.images(checkpoint.record, sink)
    device = machine.pick()
    defence = attacks.defence
    defended = patches
    certified: dict[str, list[int]] | None = None
    if data.only_certified is not None:
        defended, certified = _certified_by_records(data.only_certified, checkpoint, images)
        patches = replace(patches, patches=patches.patches or list(certified))
        defence = "patch"
    sizes = sorted(set(patches.sizes(checkpoint.record.input.size[1:])))
    targets, procedure = _targets(defence, checkpoint, device, defended, sizes)
    budget: dict[str, Any] = {
        "steps": attacks.steps,
        "restarts": attacks.restarts,
        "seed": data.seed,
    }
    settings = AttackSettings(**budget)
    about = {"defence": defence, **procedure, **budget, "certified_only": certified is not None}
    spelled = [str(patch) for patch in sizes]
    run = record_lines.Run.of(
        "attack",
        checkpoint.digest,
        images,
        [[ATTACK]],
        norm="patch",
        parameters={**about, "against": spelled},
    )
    rows_of: dict[str, list[Row]] = {}
    read: list[_Batch] = []
    with records.RecordFile(
        results.records, run, images, ("patch", "index"), resume=results.resume, force=output.force
    ) as file:
        for patch in sizes:
            part = images
            if certified is not None:
                those = set(certified.get(str(patch), []))
                part = images.select(
                    [place for place, index in enumerate(images.indices.tolist()) if index in those]
                )
            with sink.progress(f"attack ({patch})", total=len(part)) as bar:
                for batch in _attacked_batches(
                    targets[patch], part, patch, settings, file, device, machine.batch_size
                ):
                    rows_of.setdefault(str(patch), []).extend(batch.rows)
                    read += [batch] if batch.read else []
                    bar.advance(len(batch.rows))
            if str(patch) not in rows_of:
                raise DataError(
                    f"no image is certified against {patch}", "leave out --only-certified"
                )
    resumed = (
        _attack_patches_again(read, spelled[0], results, output.output is not None)
        if read
        else None
    )
    parts = [_patch_part(patch, rows) for patch, rows in rows_of.items()]
    first = parts[0]
    gate = Gate()
    fallen = [
        row["index"] for rows in rows_of.values() for row in rows if not row["robust"][ATTACK]
    ]
    if certified is not None and fallen:
        gate.demand(
            False,
            CertvitError(
                f"certified and broken: images {', '.join(map(str, fallen[:5]))}",
                "a certificate and a counterexample cannot both be right, unless other bits are executed here: report it",
            ),
        )
    if results.minimum is not None:
        gate.demand_share(
            round(first["robust"] * first["images"]),
            first["images"],
            results.minimum,
            f"robust accuracy against patches of {spelled[0]}",
            "--min-robust",
        )
    curve = {part["patch"]: part["robust"] for part in parts}
    intervals = {part["patch"]: part["intervals"]["robust"] for part in parts}
    document = {
        "clean": first["clean"],
        "robust": curve,
        "intervals": intervals,
        "norm": "patch",
        "parameters": about,
    }
    document |= {"checkpoint": checkpoint.digest, "dataset": record_lines.describe_images(images)}
    sink.document(document | ({} if resumed is None else {"resumed": resumed.to_json()}), gate)
    whom = "the network" if defence == "none" else "the defended classifier"
    sink.table(
        f"{images.name} ({images.split}), {number_of(first['images'])}: {whom}, attacked by {ATTACK} at many places",
        ["patch (pixels)", "correct after", "95 % interval"],
        [
            ("clean", percent(first["clean"]), ""),
            *((p["patch"], threat.attacked_percent(p["robust"]), threat.percent_ends(p["intervals"]["robust"]))
              for p in parts),
        ],
    )  # fmt: skip
    if resumed is not None:
        sink.text(f"{resumed}")
    parameters = {
        "dataset": images.name,
        "split": images.split,
        "images": len(images),
        "attacks": [[ATTACK]],
        "norm": ["patch"],
        "patches": spelled,
        "settings": budget,
        "certified_only": certified is not None,
        **({"defence": procedure} if procedure else {}),
    }
    result = {
        **first,
        "dataset": record_lines.describe_images(images),
        "curve": curve,
        "parts": parts if len(parts) > 1 else [],
    }
    output.write_evidence(checkpoint.with_evidence("attack", parameters, result), sink)
    gate.enforce()


def _patch_part(patch: str, rows: Sequence[Row]) -> dict[str, Any]:
    right = sum(row["prediction"] == row["label"] for row in rows)
    withstood = sum(row["robust"][ATTACK] for row in rows)
    attacked = list(share_interval(withstood, len(rows)))
    return {
        "norm": "patch",
        "patch": patch,
        "images": len(rows),
        "clean": right / len(rows),
        "robust": withstood / len(rows),
        "attacks": {ATTACK: withstood / len(rows)},
        "intervals": {
            "clean": list(share_interval(right, len(rows))),
            "robust": attacked,
            ATTACK: attacked,
        },
        "median_norm": None,
    }


@dataclass(frozen=True)
class _Batch:
    """Images attacked together, at one size. read: their records were in the file; find: again."""

    rows: list[Row]
    read: bool
    find: Callable[[], list[Row]]


def _attack_patches_again(
    read: Sequence[_Batch], patch: str, results: AttackOutput, every: bool
) -> Resumed:
    """Attack batches that were read again; DataError when one does not agree.

    Args:
        patch: the size of which the gate speaks.
    """

    def disagreements(places: Sequence[int]) -> Iterator[str]:
        for batch in (read[place] for place in places):
            for row, now in zip(batch.rows, batch.find(), strict=True):
                if any(row[name] != value for name, value in now.items()):
                    which = f"image {row['index']} at {row['patch']}"
                    yield f"the record of {which} in {results.records} does not agree"

    def hits(rows: Sequence[Row]) -> int:
        return sum(row["robust"][ATTACK] for row in rows if row["patch"] == patch)

    pieces = [RecordBatch(len(batch.rows), hits(batch.rows)) for batch in read]
    return compute_again(pieces, disagreements, gate=bool(results.minimum), every=every)


def _attacked_batches(
    target: PatchTarget,
    images: Images,
    patch: threat.Patch,
    settings: AttackSettings,
    file: records.RecordFile,
    device: torch.device,
    batch_size: int,
) -> Iterator[_Batch]:
    """Yield records batch by batch; what the file holds already is read, not found again."""

    def find(indices: list[int], pixels: torch.Tensor, labels: list[int]) -> list[Row]:
        return [
            row.to_json()
            for row in attack_patches(target, indices, pixels.to(device), labels, patch, settings)
        ]

    for indices, pixels, labels in images.batches(min(batch_size, MOST_AT_ONCE)):
        these = partial(find, indices.tolist(), pixels, labels.tolist())
        earlier = file.take([(str(patch), index) for index in indices.tolist()])
        rows = earlier if earlier is not None else these()
        if earlier is None:
            file.write(rows)
        yield _Batch(rows, earlier is not None, these)


def _targets(
    defence: str,
    checkpoint: Checkpoint,
    device: torch.device,
    defended: options.Patches,
    sizes: list[threat.Patch],
) -> tuple[dict[threat.Patch, PatchTarget], dict[str, Any]]:
    """Whom each size of patch attacks, and what decides that."""

    if defence == "none":
        model = build.load(checkpoint, device)
        plain = PatchTarget(
            lambda corner: model, lambda pixels: list(predict_classes(model, pixels).tolist())
        )
        return dict.fromkeys(sizes, plain), {}
    certifier = prepare_patch(checkpoint, device, defended)
    targets = {
        patch: PatchTarget(partial(TouchedPasses, certifier, patch), certifier.predict)
        for patch in sizes
    }
    return targets, dict(certifier.parameters)


def _certified_by_records(
    path: Path, checkpoint: Checkpoint, images: Images
) -> tuple[options.Patches, dict[str, list[int]]]:
    """The options of the records of `certify --method patch`, and the images certified."""

    run, rows = records.read_records(path, "certify")
    evidence.method_of(run, path)
    records.require_same_network(run, checkpoint.digest, path)
    records.require_same_images(rows, images, path)
    if run.norm != "patch":
        raise DataError(
            f"{path} holds certificates in {run.norm}, not against patches",
            "leave out --norm patch",
        )
    indices_of: dict[str, list[int]] = {}
    for row in rows:
        claim = PatchCertificate.from_json(row)
        for patch in claim.proven if claim.correct else ():
            indices_of.setdefault(patch, []).append(claim.index)
    if not indices_of:
        raise DataError(f"{path} certifies no image", "leave out --only-certified")
    return options.Patches.of(run.parameters), indices_of
