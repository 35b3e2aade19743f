"""`attack --norm patch`: what patches leave of a network, or of the defended classifier that was certified."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Gate, Sink, percent
from certcli.system.errors import CertvitError, DataError, GateError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from certcli.attack.patch import Target
    from certcli.attack.settings import AttackSettings
    from certcli.certify.patch.options import Patches
    from certcli.checkpoint.file import Checkpoint
    from certcli.cli.attack.options import AttackOutput, Attacks, Chosen
    from certcli.cli.shared.groups import Machine, Source
    from certcli.evaluation.records import RecordFile
    from certcli.evaluation.resumed import Resumed
    from certcli.evaluation.sizes import Patch
    from certcli.images.labelled import Images

Row = dict[str, Any]
"""A record."""
ATTACK = "margin-pgd"
MOST_AT_ONCE = 16


def require(wanted: Attacks, chosen: Chosen, patches: Patches, results: AttackOutput) -> bool:
    """Whether patches are looked for; UsageError for options of balls beside them, and for options of patches without."""
    if wanted.norm != "patch":
        if patches.patches or wanted.defence != "none":
            raise UsageError("--patch and --defence are for --norm patch", "certvit attack ... --norm patch --patch 32")
        return False
    if wanted.defence not in ("none", "patch"):
        raise UsageError(f"--defence {wanted.defence}: one of none, patch")
    beside: dict[str, Any] = {
        "epsilon": wanted.epsilon,
        "preset": wanted.preset,
        "source": wanted.crafted_on,
        "refine": wanted.refine,
        "step-size": wanted.step_size,
        "save-examples": results.save_examples,
        "gallery": results.gallery,
        "attack": [name for name in wanted.attacks if name != ATTACK],
    }
    for name, value in beside.items():
        if value:
            raise UsageError(f"--{name} does not go with --norm patch", f"its attack is {ATTACK}: --steps, --restarts")
    return True


def attack(
    source: Source,
    wanted: Attacks,
    chosen: Chosen,
    patches: Patches,
    machine: Machine,
    results: AttackOutput,
    force: bool,
    sink: Sink,
) -> None:
    """Every image at many places, for each size of patch; a certified image that falls is a bug."""
    from certcli.attack.settings import AttackSettings
    from certcli.evaluation.intervals import share_interval
    from certcli.evaluation.records import RecordFile, Run, describe

    checkpoint = source.open(sink)
    images, device = chosen.images(checkpoint.record, sink), machine.pick()
    defence, defended = wanted.defence, patches
    certified: dict[str, list[int]] | None = None
    if chosen.only_certified is not None:
        defended, certified = _certified(chosen.only_certified, checkpoint, images)
        patches, defence = replace(patches, patches=patches.patches or list(certified)), "patch"
    sizes = sorted(set(patches.sizes(checkpoint.record.input.size[1:])))
    targets, about_defence = _targets(defence, checkpoint, device, defended, sizes)
    settings = AttackSettings(steps=wanted.steps, restarts=wanted.restarts, seed=chosen.seed)
    spent = {"steps": wanted.steps, "restarts": wanted.restarts, "seed": chosen.seed}
    about = {"defence": defence, **about_defence, **spent, "certified_only": certified is not None}
    spelled = [str(patch) for patch in sizes]
    run = Run.of(
        "attack", checkpoint.digest, images, [[ATTACK]], norm="patch", parameters={**about, "against": spelled}
    )
    found: dict[str, list[Row]] = {}
    read: list[_Piece] = []
    with RecordFile(results.records, run, images, ("patch", "index"), resume=results.resume, force=force) as file:
        for patch in sizes:
            part = images if certified is None else _those(images, certified.get(str(patch), []))
            with sink.progress(f"attack ({patch})", total=len(part)) as bar:
                for piece in _attacked(targets[patch], part, patch, settings, file, device, machine.batch_size):
                    found.setdefault(str(patch), []).extend(piece.rows)
                    read += [piece] if piece.read else []
                    bar.advance(len(piece.rows))
            if str(patch) not in found:
                raise DataError(f"no image is certified against {patch}", "leave out --only-certified")
    resumed = _again(read, found[spelled[0]], spelled[0], results) if read else None
    gate = Gate()
    left = {patch: sum(row["robust"][ATTACK] for row in rows) for patch, rows in found.items()}
    robust = {patch: left[patch] / len(rows) for patch, rows in found.items()}
    intervals = {patch: share_interval(left[patch], len(rows)) for patch, rows in found.items()}
    first = found[spelled[0]]
    clean = sum(row["prediction"] == row["label"] for row in first) / len(first)
    fallen = [row["index"] for rows in found.values() for row in rows if not row["robust"][ATTACK]]
    if certified is not None and fallen:
        hint = "a certificate and a counterexample cannot both be right, unless other bits are executed here: report it"
        gate.demand(False, CertvitError(f"certified and broken: images {', '.join(map(str, fallen[:5]))}", hint))
    if results.minimum is not None:
        short = (
            f"{percent(robust[spelled[0]])} withstand patches of {spelled[0]}, below --min-robust {results.minimum:g}"
        )
        gate.demand(robust[spelled[0]] >= results.minimum, GateError(short))
    shares = {"clean": clean, "robust": robust, "intervals": intervals, "norm": "patch", "parameters": about}
    told = {} if resumed is None else {"resumed": resumed.to_json()}
    sink.document({"checkpoint": checkpoint.digest, "dataset": describe(images), **shares, **told}, gate)
    whom = "the network" if defence == "none" else "the defended classifier"
    between = {patch: f"{100 * low:.1f} to {100 * high:.1f}" for patch, (low, high) in intervals.items()}
    sink.table(
        f"{images.name} ({images.split}), {len(first)} images: {whom}, attacked by {ATTACK} at many places",
        ["patch (pixels)", "correct after", "95 % interval"],
        [("clean", percent(clean), ""), *((patch, percent(robust[patch]), between[patch]) for patch in robust)],
    )
    if resumed is not None:
        sink.text(f"{resumed}")
    gate.enforce()


@dataclass(frozen=True)
class _Piece:
    """Images that are attacked together, at one size. read: the records were in the file; find: attacks again."""

    rows: list[Row]
    read: bool
    find: Callable[[], list[Row]]


def _again(read: Sequence[_Piece], first: Sequence[Row], patch: str, results: AttackOutput) -> Resumed:
    """Some of the pieces that were read, attacked again; DataError when one does not agree. first: records at the size of the
    gate.
    """
    from certcli.evaluation.resumed import Demanded, Resumed, to_compute_again, usual

    held = [sum(row["robust"][ATTACK] for row in piece.rows if row["patch"] == patch) for piece in read]
    elsewhere = sum(row["robust"][ATTACK] for row in first) - sum(held)
    chosen = to_compute_again(held, Demanded(results.minimum or 0.0, len(first), elsewhere), usual(len(read)))
    for place in chosen:
        for stated, now in zip(read[place].rows, read[place].find(), strict=True):
            if any(stated[name] != value for name, value in now.items()):
                raise DataError(
                    f"the record of image {stated['index']} at {stated['patch']} in {results.records} does not agree",
                    "it was edited, or written on a machine that computes otherwise: leave out --resume",
                )
    return Resumed(sum(len(piece.rows) for piece in read), sum(len(read[place].rows) for place in chosen))


def _attacked(
    target: Target,
    images: Images,
    patch: Patch,
    settings: AttackSettings,
    file: RecordFile,
    device: torch.device,
    batch_size: int,
) -> Iterator[_Piece]:
    """Records, batch by batch; what the file holds already is read, not found again."""
    from certcli.attack.patch import attack_patches

    def find(indices: list[int], pixels: torch.Tensor, labels: list[int]) -> list[Row]:
        found = attack_patches(target, indices, pixels.to(device), labels, patch, settings)
        return [
            {
                "index": one.index,
                "label": one.label,
                "kind": "patch",
                "patch": str(patch),
                "prediction": one.prediction,
                "adversarial_prediction": one.prediction if one.corner is None else one.found,
                "robust": {ATTACK: one.withstood},
                "corner": None if one.corner is None else list(one.corner),
            }
            for one in found
        ]

    for indices, pixels, labels in images.batches(min(batch_size, MOST_AT_ONCE)):
        these = partial(find, indices.tolist(), pixels, labels.tolist())
        earlier = file.take([(str(patch), index) for index in indices.tolist()])
        rows = earlier if earlier is not None else these()
        if earlier is None:
            file.write(rows)
        yield _Piece(rows, earlier is not None, these)


def _targets(
    defence: str, checkpoint: Checkpoint, device: torch.device, defended: Patches, sizes: list[Patch]
) -> tuple[dict[Patch, Target], dict[str, Any]]:
    """Whom each size of patch attacks, and what decides that."""
    from certcli.attack.judge import predict
    from certcli.attack.patch import Target
    from certcli.certify.patch.certifier import prepare
    from certcli.certify.patch.climbed import TouchedPasses
    from certcli.models import build

    if defence == "none":
        model = build.load(checkpoint, device)
        plain = Target(lambda corner: model, lambda pixels: list(predict(model, pixels).tolist()))
        return dict.fromkeys(sizes, plain), {}
    certifier = prepare(checkpoint, device, defended)
    found = {
        patch: Target(lambda corner, patch=patch: TouchedPasses(certifier, patch, corner), certifier.predict)  # type: ignore[misc]
        for patch in sizes
    }
    return found, dict(certifier.parameters)


def _certified(path: Path, checkpoint: Checkpoint, images: Images) -> tuple[Patches, dict[str, list[int]]]:
    """The options of records of `certify --method patch`, and which images are certified against which patch."""
    from certcli.certify.patch.certifier import PatchCertificate
    from certcli.certify.patch.options import Patches
    from certcli.evaluation.records import read_records, require_same_images, require_same_network

    run, rows = read_records(path, "certify")
    require_same_network(run, checkpoint.digest, path)
    require_same_images(rows, images, path)
    if run.norm != "patch":
        raise DataError(f"{path} holds certificates in {run.norm}, not against patches", "leave out --norm patch")
    found: dict[str, list[int]] = {}
    for row in rows:
        claim = PatchCertificate.from_json(row, str(path))
        for patch in claim.proven if claim.correct else ():
            found.setdefault(patch, []).append(claim.index)
    if not found:
        raise DataError(f"{path} certifies no image", "leave out --only-certified")
    return Patches.of(run.parameters), found


def _those(images: Images, indices: list[int]) -> Images:
    chosen = set(indices)
    return images.select([place for place, index in enumerate(images.indices.tolist()) if index in chosen])
