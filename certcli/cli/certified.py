"""What `certify` shows: its document, its table, its figure, its gates."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from certcli.cli.output import Sink, percent
from certcli.errors import DataError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from certcli.certify.certificate import Certificate, CertifiedAccuracy, Certifier
    from certcli.data import Images


def parse_gate(text: str, option: str) -> tuple[float, float | None]:
    """"0.6@1.58" -> share and radius; "0.6" -> share, at the smallest radius. UsageError when it is no share."""
    from certcli.cli.options import fraction
    from certcli.evaluation import require_radii, require_share

    share, at, radius = text.partition("@")
    try:
        wanted = float(share)
    except ValueError as failure:
        raise UsageError(f"{option} '{text}' is not SHARE or SHARE@RADIUS", f"{option} 0.6@1.58") from failure
    return require_share(wanted, option), require_radii([fraction(radius)])[0] if at else None


def document(
    found: CertifiedAccuracy, certifier: Certifier, checkpoint: str, dataset: dict[str, Any]
) -> dict[str, Any]:
    """The one document: what was certified, of which network, on which images, with which promise."""
    stated = {"promise": certifier.promise, "arithmetic": certifier.arithmetic, "domain": certifier.domain}
    return {
        "schema": 1,
        "command": "certify",
        "checkpoint": checkpoint,
        "dataset": dataset,
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


def attacked_shares(path: Path, checkpoint: str, images: Images) -> dict[float, dict[int, bool]]:
    """Records of `attack` -> radius -> index -> withstood all l2 attacks there; images attacked at every radius only.

    DataError when they are of another network or other images, of linf only, or when no image was attacked at all radii.
    """
    from certcli.evaluation import read_records, require_same_images, require_same_network

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
    return {radius: {index: left for index, left in sorted(at.items()) if index in common} for radius, at in found.items()}


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
            sink.warn(f"image {certificate.index} is certified to {certificate.radius:.6g} and broken at {broken[0]:.6g}")
    shares = {radius: sum(left.values()) / len(left) for radius, left in attacked.items()}
    if attacked:
        shares[0.0] = sum(certificate.correct for certificate in shown) / len(shown)
    label = "certified (proven)" if certifier.promise == "proof" else f"certified ({certifier.promise})"
    radii = [certificate.radius if certificate.correct else -1.0 for certificate in shown]
    draw_certified({label: radii}, shares, path, farthest, f"{network} on {images.name} ({images.split})")
