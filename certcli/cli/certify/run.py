"""What `certify` does between its options and its result: the demand, the methods, what they found."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.shared.output import Gate, Sink
from certcli.evaluation.radii import Norm, parse_number, proven_percent
from certcli.system.errors import DataError, GateError, UsageError
from certcli.system.processes import team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from certcli.certify.certificate import Certificate, CertifiedAccuracy, Certifier
    from certcli.certify.options import Options
    from certcli.certify.patch.options import Patches
    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.record import Record
    from certcli.cli.shared.groups import Evaluation, Machine
    from certcli.evaluation.resumed import Resumed
    from certcli.evaluation.threat import Threat
    from certcli.images.labelled import Images


AUTO = "auto"


@dataclass(frozen=True)
class Demand:
    """--min-certified: a share of the images against a threat. every: no record may rest on a file."""

    threat: Threat
    share: float = 0.0
    every: bool = False

    def ask(self, found: CertifiedAccuracy, gate: Gate) -> None:
        reached = found.against(self.threat)
        told = f"certified accuracy {proven_percent(reached)} at {self.threat.proven()}"
        gate.demand(reached >= self.share, GateError(f"{told} is below --min-certified {self.share:g}"))


def demand(text: str | None, threats: Sequence[Threat], image: tuple[int, int] = (1, 1)) -> tuple[Demand, list[Threat]]:
    """Read "0.6@1.58", or "0.6" for the smallest threat: the demand, and all threats, ascending.

    A patch that is demanded is among those certified: the defence depends on them. UsageError when it is no share.
    """
    from certcli.evaluation.records import require_share
    from certcli.evaluation.threat import Threat

    chosen = sorted(set(threats))
    share, at, size = (text or "0").partition("@")
    least = require_share(_number(share), "--min-certified")
    there = Threat.read(size, chosen[0].norm, image) if at else chosen[0]
    if there.norm == "patch" and there not in chosen:
        raise UsageError(f"--min-certified {text} speaks of another patch", f"--patch {size} beside the others")
    return Demand(there, least), sorted({*chosen, there})


def _number(text: str) -> float:
    try:
        return parse_number(text)
    except ValueError as failure:
        raise UsageError(f"--min-certified: {failure}", "certvit certify --help shows how it is written") from failure


def patches_alone(methods: Sequence[str], patches: Patches, **others: object) -> bool:
    """Whether patches are what is certified; UsageError for --patch without the method, and for options of balls."""
    if "patch" not in methods:
        if patches.patches:
            raise UsageError("--patch is for --method patch", "certvit certify ... --method patch --patch 32")
        return False
    if methods != ["patch"]:
        raise UsageError("--method patch stands alone: shares against patches and within radii cannot be compared")
    for name, value in others.items():
        if value:
            raise UsageError(f"--{name.replace('_', '-')} does not go with --method patch", "leave it out")
    return True


def require_methods(methods: Sequence[str], norm: str, records: Path | None) -> None:
    """Raise UsageError for methods that are unknown, repeated, or cannot be combined, or do not know the norm."""
    from certcli.certify.methods import METHODS

    for method in methods:
        if method != AUTO:
            METHODS[method]
    if len(set(methods)) != len(methods) or (AUTO in methods and len(methods) > 1):
        raise UsageError(f"--method {' '.join(methods)}: name each method once, and auto alone")
    if norm == "linf" and methods != ["local"]:
        raise UsageError(
            "--norm linf is of --method local alone", "certvit certify ... --method local --norm linf -e 1/255"
        )
    if records is not None and len(methods) > 1:
        raise UsageError("a file of records holds one method", "run them one by one, or leave out --records")


def settle(
    methods: Sequence[str],
    checkpoint: Checkpoint,
    machine: Machine,
    images: Images,
    radii: Sequence[float],
    sink: Sink,
) -> tuple[Sequence[str], str | None, str | None]:
    """The methods as named; `auto` becomes the one that is worth having, with its reason, which is shown, and effort."""
    from certcli.certify.choice import choose_method

    if AUTO not in methods:
        return methods, None, None
    least = next((radius for radius in radii if radius > 0), 0.25)
    choice = choose_method(checkpoint, machine.pick(), images, least, machine.batch_size)
    sink.text(f"--method {choice.method}: {choice.reason}")
    return [choice.method, *choice.beside], choice.reason, choice.effort


def tuning_images(record: Record, data: Evaluation, judged: Images, sink: Sink) -> Images:
    """A few images of another split than the judged one, where the dataset has one; what was taken is said."""
    from certcli.certify.smoothing.sigma import TUNED
    from certcli.cli.shared.inputs import evaluation_images

    quiet = Sink(as_json=True, quiet=True)
    other = "train" if judged.split in ("val", "validation") else "val"
    if judged.split != "all":  # a folder without splits: any part of it is judged too
        try:
            images = evaluation_images(record, data.dataset, data.data_dir, other, TUNED, data.seed, quiet)
        except DataError:
            pass
        else:
            sink.note(f"sigma is chosen on {len(images)} images of {images.name} ({images.split})")
            return images
    images = judged.limit(TUNED, data.seed)
    sink.warn(
        f"sigma is chosen on {len(images)} of the judged images, for want of others: their shares flatter a little"
    )
    return images


@dataclass(frozen=True)
class Result:
    """What one method found. seconds: an image, of this run; None where all was read from --records."""

    certifier: Certifier
    rows: Sequence[Certificate]
    found: CertifiedAccuracy
    seconds: float | None
    resumed: Resumed | None = None

    def to_json(self) -> dict[str, Any]:
        certifier = self.certifier
        return {
            **self.found.to_json(),
            "promise": certifier.promise,
            "norm": certifier.norm,
            "arithmetic": certifier.arithmetic,
            "domain": certifier.domain,
            **certifier.about,
            "parameters": dict(certifier.parameters),
            **({} if self.resumed is None else {"resumed": self.resumed.to_json()}),
        }


@dataclass(frozen=True)
class CertifyRun:
    """What all methods of one command share: the network, the images, the threats of one norm, and the demand."""

    checkpoint: Checkpoint
    images: Images
    threats: Sequence[Threat]
    demand: Demand
    machine: Machine
    sink: Sink
    force: bool = False


def run(
    shared: CertifyRun, method: str, options: Options | None, records: Path | None = None, resume: bool = False
) -> Result | None:
    """All certificates of one method, shown as a bar and written as they are found; None where another process leads.

    Of the records that were read instead, some are found again: as many as the demand must not do without.
    """
    from certcli.certify.certificate import certified_accuracy
    from certcli.certify.methods import certify, prepare, run_of
    from certcli.certify.resumed import find_again
    from certcli.evaluation.records import RecordFile
    from certcli.evaluation.resumed import Demanded
    from certcli.evaluation.threat import one_norm

    checkpoint, images, machine, sink = shared.checkpoint, shared.images, shared.machine, shared.sink
    certifier = prepare(method, checkpoint, machine.pick(), options)
    assert one_norm(shared.threats) == certifier.norm, f"{method} certifies in {certifier.norm}"
    _require_reach(certifier, shared.threats, sink)
    if not team().leads:
        list(certify(certifier, images, machine.batch_size, team=team()))
        return None
    rows: list[Certificate] = []
    with RecordFile(
        records, run_of(certifier, checkpoint, images), images, resume=resume, force=shared.force, network=sink.network
    ) as file:
        if resume:
            sink.note(f"{records} holds {file.earlier} records of this run")
        started = time.perf_counter()
        with sink.progress(f"certify ({method})", total=len(images)) as bar:
            for batch in certify(certifier, images, machine.batch_size, file, team()):
                rows += batch
                bar.advance(len(batch))
    spent, resumed = time.perf_counter() - started, None
    if file.taken:
        demand = shared.demand
        new = sum(row.holds_at(demand.threat) for row in rows[file.taken :])
        demanded = Demanded(demand.share, len(rows), new, demand.every)
        claims, where = rows[: file.taken], str(records)
        resumed = find_again(certifier, claims, images, demand.threat, demanded, machine.batch_size, where)
    found = certified_accuracy(rows, shared.threats)
    if certifier.remark:
        sink.warn(certifier.remark)
    if found.abstained == 1:
        sink.warn("the method abstains on every image: try a smaller --sigma, or finetune --noise first")
    each = spent / (len(rows) - file.taken) if len(rows) > file.taken else None
    return Result(certifier, rows, found, each, resumed)


def _require_reach(certifier: Certifier, threats: Sequence[Threat], sink: Sink) -> None:
    """UsageError when no radius asked for can be certified, whatever the network; a warning when some cannot."""
    beyond = [t.attacked() for t in threats if isinstance(t.size, float) and t.size >= certifier.reach]
    if not beyond:
        return
    told = f"no radius beyond {certifier.reach:.4g} can be certified with these --samples, --alpha and --sigma"
    if len(beyond) == len(threats):
        raise UsageError(
            f"{told}; asked for {', '.join(beyond)}", "a smaller --epsilon, more --samples, a larger --sigma"
        )
    sink.warn(f"{told}: 0 % at {', '.join(beyond)} says nothing about the network")


def attacked_shares(
    path: Path | None, checkpoint: str, images: Images, norm: Norm = "l2"
) -> dict[Threat, dict[int, bool]]:
    """Records of `attack` -> threat -> index -> withstood all attacks in that norm; images attacked at every radius only.

    DataError when they are of another network, other images or other norms, or when no image was attacked at all radii.
    """
    from certcli.evaluation.records import read_records, require_same_images, require_same_network
    from certcli.evaluation.threat import Threat

    if path is None:
        return {}
    run, rows = read_records(path, "attack")
    require_same_network(run, checkpoint, path)
    require_same_images(rows, images, path)
    found: dict[Threat, dict[int, bool]] = {}
    clean: dict[int, bool] = {}
    for row in rows:
        if row["kind"] == norm and row["index"] in images.digests:
            at = found.setdefault(Threat(norm, row["epsilon"]), {})
            at[row["index"]] = at.get(row["index"], True) and all(left is True for left in row["robust"].values())
            clean[row["index"]] = row["prediction"] == row["label"]
    common = set.intersection(*map(set, found.values())) if found else set()
    if not common:
        raise DataError(
            f"no image of these was attacked in {norm} at all of the radii in {path}",
            "certvit attack this checkpoint on these images, with --epsilon and --records",
        )
    found.setdefault(Threat(norm, 0.0), clean)
    return {
        threat: {index: left for index, left in sorted(at.items()) if index in common} for threat, at in found.items()
    }
