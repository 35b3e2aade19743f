"""`attack --norm patch`: what patches leave of a network, or of its defended classifier."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from certcli.attack import findings, judge
from certcli.attack.catalogue import PATCH_ATTACK as ATTACK
from certcli.attack.patch import PatchCampaign, PatchTarget
from certcli.attack.settings import AttackSettings
from certcli.certify import options
from certcli.certify.patch.certifier import TouchedPasses, prepare_patch
from certcli.checkpoint.file import Checkpoint
from certcli.cli.attack.command import AttackedImages, AttackOutput, Attacks
from certcli.cli.shared.groups import BatchDevice, Output, Source
from certcli.cli.shared.output import Gate, Sink, percent
from certcli.evaluation import evidence, image_records, record_lines, records, threat
from certcli.evaluation.intervals import number_of, share_interval
from certcli.images.labelled import Images
from certcli.models import build
from certcli.system.errors import CertvitError, DataError, UsageError


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
        "pixels": attacks.pixels != "float",
        "save-examples": results.save_examples,
        "plot": results.plot,
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
    images_of = {patch: _certified_of(images, patch, certified) for patch in sizes}
    campaign = PatchCampaign(targets, images_of, settings, machine.batch_size, device)
    rows_of: dict[str, list[image_records.PatchRecord]] = {}
    with (
        records.RecordFile(
            results.records,
            run,
            images,
            ("patch", "index"),
            resume=results.resume,
            force=output.force,
        ) as file,
        sink.progress("attack by patches", total=sum(map(len, images_of.values()))) as bar,
    ):
        for batch in campaign.run(file):
            rows_of.setdefault(batch[0].patch, []).extend(batch)
            bar.advance(len(batch), batch[0].patch)
    resumed = None
    if file.taken:
        rows = [row for part in rows_of.values() for row in part]
        gate_rests, every = bool(results.minimum), output.output is not None
        resumed = findings.attack_again(
            campaign, rows, file.taken, gate_rests, every, str(results.records)
        )
    parts = [_patch_part(patch, rows) for patch, rows in rows_of.items()]
    first = parts[0]
    gate = Gate()
    fallen = [row.index for rows in rows_of.values() for row in rows if not row.withstood]
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


def _patch_part(patch: str, rows: Sequence[image_records.PatchRecord]) -> dict[str, Any]:
    right = sum(row.prediction == row.label for row in rows)
    withstood = sum(row.withstood for row in rows)
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


def _certified_of(
    images: Images, patch: threat.Patch, certified: Mapping[str, list[int]] | None
) -> Images:
    """Return the images that are certified against the patch; all where no records say so."""
    if certified is None:
        return images
    those = set(certified.get(str(patch), []))
    places = [place for place, index in enumerate(images.indices.tolist()) if index in those]
    if not places:
        raise DataError(f"no image is certified against {patch}", "leave out --only-certified")
    return images.select(places)


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
            lambda corner: model, lambda pixels: list(judge.predict_classes(model, pixels).tolist())
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
        for patch in row.proven if row.correct else ():
            indices_of.setdefault(patch, []).append(row.index)
    if not indices_of:
        raise DataError(f"{path} certifies no image", "leave out --only-certified")
    return options.Patches.of(run.parameters), indices_of
