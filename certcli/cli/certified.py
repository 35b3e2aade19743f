"""What `certify` shows: its document, its table, its figure, its gates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.output import Gate, Sink, percent
from certcli.errors import DataError, GateError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from certcli.certify.certificate import Certificate, CertifiedAccuracy, Certifier
    from certcli.checkpoint import Checkpoint
    from certcli.data import Images


EVIDENCE = (
    "dataset", "clean", "certified", "average_radius", "images", "method", "failure", "promise", "arithmetic", "parameters",
)  # fmt: skip
"""Keys of the document that a checkpoint keeps."""


@dataclass(frozen=True)
class Demand:
    """--min-certified: a share of the images at a radius; none asks for nothing."""

    share: float = 0.0
    radius: float = 0.0

    def ask(self, found: CertifiedAccuracy, gate: Gate) -> None:
        reached = found.certified[f"{self.radius:g}"]
        told = f"certified accuracy {percent(reached)} at {self.radius:g} is below --min-certified {self.share:g}"
        gate.demand(reached >= self.share, GateError(told))


def demand(text: str | None, epsilons: Sequence[float]) -> tuple[Demand, tuple[float, ...]]:
    """ "0.6@1.58", or "0.6" for the smallest radius -> the demand, and all radii. UsageError when it is no share."""
    from certcli.cli.options import fraction
    from certcli.evaluation import require_radii, require_share

    radii, option = require_radii(epsilons), "--min-certified"
    if text is None:
        return Demand(radius=radii[0]), radii
    share, at, radius = text.partition("@")
    try:
        wanted = require_share(float(share), option)
    except ValueError as failure:
        raise UsageError(f"{option} '{text}' is not SHARE or SHARE@RADIUS", f"{option} 0.6@1.58") from failure
    if not at:
        return Demand(wanted, radii[0]), radii
    (there,) = require_radii([fraction(radius)])
    return Demand(wanted, there), require_radii([*radii, there])


def collect(
    certifier: Certifier,
    checkpoint: Checkpoint,
    images: Images,
    records: Path | None,
    resume: bool,
    batch_size: int,
    force: bool,
    sink: Sink,
) -> list[Certificate]:
    """All certificates, shown as a bar and written as they are found."""
    from certcli.certify.methods import certify, run_of
    from certcli.evaluation import RecordFile

    rows: list[Certificate] = []
    with RecordFile(records, run_of(certifier, checkpoint, images), images, resume=resume, force=force) as file:
        if resume:
            sink.note(f"{records} holds {file.earlier} records of this run")
        with sink.progress("certify", total=len(images)) as bar:
            for batch in certify(certifier, images, batch_size, file):
                rows += batch
                bar.advance(len(batch))
    return rows


def document(found: CertifiedAccuracy, certifier: Certifier, checkpoint: str, images: Images) -> dict[str, Any]:
    """The one document: what was certified, of which network, on which images, with which promise."""
    from certcli.evaluation import describe

    stated = {"promise": certifier.promise, "arithmetic": certifier.arithmetic, "domain": certifier.domain}
    return {
        "schema": 1,
        "command": "certify",
        "checkpoint": checkpoint,
        "dataset": describe(images),
        **found.to_json(),
        **stated,
        **certifier.about,
        "parameters": dict(certifier.parameters),
    }


def table(found: CertifiedAccuracy, certifier: Certifier, images: Images, sink: Sink) -> None:
    """Certified accuracy at each radius, with intervals for images that are a sample."""

    def between(name: str) -> str:
        low, high = found.intervals[name]
        return f"{100 * low:.1f} to {100 * high:.1f}"

    sink.table(
        f"{images.name} ({images.split}), {len(images)} images; {certifier.title}",
        ["radius (pixel l2)", "certified accuracy", "95 % interval"],
        [("clean", percent(found.clean), between("clean"))]
        + [(e, percent(share), between(e)) for e, share in found.certified.items()],
    )
    sink.text(certifier.statement)


def attacked_shares(path: Path | None, checkpoint: str, images: Images) -> dict[float, dict[int, bool]]:
    """Records of `attack` -> radius -> index -> withstood all l2 attacks there; images attacked at every radius only.

    DataError when they are of another network or other images, of linf only, or when no image was attacked at all radii.
    """
    from certcli.evaluation import read_records, require_same_images, require_same_network

    if path is None:
        return {}
    run, rows = read_records(path, "attack")
    require_same_network(run, checkpoint, path)
    require_same_images(rows, images, path)
    found: dict[float, dict[int, bool]] = {}
    try:
        for row in rows:
            if row["kind"] == "l2" and row["index"] in images.digests:
                at = found.setdefault(float(row["epsilon"]), {})
                at[row["index"]] = at.get(row["index"], True) and all(left is True for left in row["robust"].values())
    except (KeyError, TypeError, ValueError, AttributeError) as failure:
        raise DataError(f"{path} holds a line that is no record of attack ({failure})") from failure
    common = set.intersection(*map(set, found.values())) if found else set()
    if not common:
        raise DataError(
            f"no image of these was attacked in l2 at all of the radii in {path}",
            "certvit attack this checkpoint on these images, with --epsilon and --records",
        )
    return {
        radius: {index: left for index, left in sorted(at.items()) if index in common} for radius, at in found.items()
    }


def plot(
    certificates: Sequence[Certificate],
    certifier: Certifier,
    attacked: dict[float, dict[int, bool]],
    network: str,
    images: Images,
    path: Path,
    farthest: float,
    sink: Sink,
) -> None:
    """Certified and attacked shares over the images that both know."""
    from certcli.report.curve import draw_certified

    common = set(next(iter(attacked.values()))) if attacked else set(images.digests)
    shown = [certificate for certificate in certificates if certificate.index in common]
    if len(shown) < len(certificates):
        sink.note(f"the figure shows the {len(shown)} of {len(certificates)} images that were attacked too")
    for certificate in shown if certifier.promise == "proof" else ():
        broken = [r for r, left in attacked.items() if certificate.holds_at(r) and not left[certificate.index]]
        if broken:
            sink.warn(
                f"image {certificate.index} is certified to {certificate.radius:.6g} and broken at {broken[0]:.6g}"
            )
    shares = {radius: sum(left.values()) / len(left) for radius, left in attacked.items()}
    if attacked:
        shares[0.0] = sum(certificate.correct for certificate in shown) / len(shown)
    label = "certified (proven)" if certifier.promise == "proof" else f"certified ({certifier.promise})"
    radii = [certificate.radius if certificate.correct else -1.0 for certificate in shown]
    draw_certified({label: radii}, shares, path, farthest, f"{network} on {images.name} ({images.split})")
    sink.note(f"wrote {path}")
