"""`certvit lipschitz --around R`: proven and measured slopes near each image."""

import math
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from certcli.cli.lipschitz.options import LipschitzOptions
from certcli.cli.lipschitz.view import Audited
from certcli.cli.shared.groups import Evaluation
from certcli.cli.shared.output import Sink
from certcli.evaluation.radii import proven_radius, rounded_down, rounded_up
from certcli.system.errors import UsageError

if TYPE_CHECKING:
    from certcli.certify.around import Around, AroundImages, NearImage
    from certcli.images.labelled import Images

Row = tuple[int, "NearImage"]
"""An image's position in its split, and what is proven near it."""


def prepared(audited: Audited, options: LipschitzOptions) -> "AroundImages":
    """Return the network for these balls, before anything is measured.

    Raises:
        UsageError: a radius is as wide as the box, or the network ends in features.
        NoBoundError: an operation has no derivative; the walk does not fit into memory.
    """
    from certcli.certify.around import prepare

    if audited.of_features:
        raise UsageError("--around is about logits, and this network ends in features")
    return prepare(audited.checkpoint, balls(options), options.machine.pick())


def balls(options: LipschitzOptions) -> list["Around"]:
    """Return the balls that were asked for."""
    from certcli.certify.around import Around

    return [Around(radius, options.near.norm) for radius in options.near.around]


def show(
    audited: Audited, network: "AroundImages", options: LipschitzOptions, sink: Sink
) -> dict[str, Any]:
    """Prove and measure near each image; show the table, draw the picture, return the document."""
    data = options.data
    images = Evaluation(
        dataset=data.dataset, data_dir=data.data_dir, limit=data.limit, seed=data.seed
    ).images(audited.checkpoint.record, sink)
    rows = _rows(network, images, options, sink)
    _table(rows, images, audited, options, sink)
    if options.views.plot is not None:
        _draw(rows, audited, options.views.plot)
    return {
        "norm": options.near.norm,
        "seed": data.seed,
        "dataset": {
            "name": images.name,
            "split": images.split,
            "images": len(images),
            "digest": images.digest,
        },
        "images": [_document(index, near) for index, near in rows],
    }


def _rows(
    network: "AroundImages", images: "Images", options: LipschitzOptions, sink: Sink
) -> list[Row]:
    rows: list[Row] = []
    near = balls(options)
    with sink.progress("slopes near images", total=len(images) * len(near)) as bar:
        for indices, pixels, _ in images.batches(1):
            for proven in network.each(pixels, near):
                rows.append((int(indices[0]), proven))
                bar.advance()
    return rows


def _table(
    rows: list[Row], images: "Images", audited: Audited, options: LipschitzOptions, sink: Sink
) -> None:
    norm = options.near.norm
    columns = ["image", "R", "margin", "upper", "lower", "upper / lower", "logits", "min(R, m / L)"]
    cells = []
    for index, near in rows:
        rival = near.rival
        upper, lower = float(near.upper[rival]), float(near.slopes[rival])
        ratio = rounded_up(upper / lower, 5) if lower > 0 and upper < math.inf else near.why[:80]
        cells.append(
            [
                str(index),
                f"{near.around.radius:g}",
                f"{near.prediction} - {rival}",
                rounded_up(upper, 5),
                rounded_down(lower, 5),
                ratio,
                rounded_up(near.logits, 5),
                proven_radius(near.radius),
            ]
        )
    title = (
        f"Near images of {images.name} ({images.split}), {norm}: no slope of the margin above `upper` (proven), one of "
        f"`lower` (measured); for all images {audited.proven.upper} bounds the logits"
    )
    sink.table(title, columns, cells)
    ratios = [
        float(near.upper[near.rival] / near.slopes[near.rival])
        for _, near in rows
        if near.slopes[near.rival] > 0
    ]
    if ratios:
        sink.text(
            f"upper / lower: median {rounded_up(median(ratios), 5)}; the margin is the one proven least far at the "
            f"image; {rounded_up(sum(near.seconds for _, near in rows) / len(rows), 3)} s of CPU each"
        )


def _document(index: int, near: "NearImage") -> dict[str, Any]:
    def numbers(values: Any) -> list[float | str]:
        return [value if math.isfinite(value) else "inf" for value in values.tolist()]

    return {
        "index": index,
        "radius": near.around.radius,
        "prediction": near.prediction,
        "rival": near.rival,
        "margins": near.margins.tolist(),
        "upper": numbers(near.upper),
        "lower": near.slopes.tolist(),
        "logits_upper": near.logits if near.logits < math.inf else "inf",
        "certified": near.radius,
        "why": near.why,
        "seconds": round(near.seconds, 3),
    }


def _draw(rows: list[Row], audited: Audited, path: Path) -> None:
    from certcli.report.around import draw_around

    points: dict[float, list[tuple[float, float]]] = {}
    for _, near in rows:
        pair = float(near.upper[near.rival]), float(near.slopes[near.rival])
        points.setdefault(near.around.radius, []).append(pair)
    draw_around(
        points, rows[0][1].around.norm, path, f"{audited.name}: slopes near {len(rows)} images"
    )
