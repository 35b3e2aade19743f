"""Slopes near images, proven again from the weights: the `around` of a report of `certvit lipschitz`."""

import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace

from certcli.certify.around import Around, AroundImages, NearImage, prepare
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.schema import AroundFields, NearImageFields
from certcli.cli.shared.output import Sink
from certcli.cli.verify.options import VerifyOptions
from certcli.evaluation.claim import Claim
from certcli.evaluation.radii import rounded_down, rounded_up
from certcli.images.labelled import Images
from certcli.system.errors import CertvitError
from certcli.verification.report import SLACK


def near_images(
    claimed: AroundFields, checkpoint: Checkpoint, options: VerifyOptions, sink: Sink
) -> list[Claim]:
    """Return the claim of each image that a report bounds slopes near; of a sample with --sample."""
    statement = f"slopes near {claimed.dataset.images} images of {claimed.dataset.name}"
    try:
        return list(_again(claimed, checkpoint, options, sink))
    except CertvitError as failure:
        return [Claim(statement, "unverified", failure.message)]


def _again(
    claimed: AroundFields, checkpoint: Checkpoint, options: VerifyOptions, sink: Sink
) -> Iterator[Claim]:

    data = replace(
        options.data, split=claimed.dataset.split, limit=claimed.dataset.images, seed=claimed.seed
    )
    images = data.images(checkpoint.record, sink)
    if images.digest != claimed.dataset.digest:
        yield Claim(
            "slopes near images",
            "unverified",
            "these are other images than those of the report: name its --dataset",
        )
        return
    near = {row.radius: Around(row.radius, claimed.norm, slopes=False) for row in claimed.images}
    network = prepare(checkpoint, list(near.values()), options.machine.pick())
    rows = list(claimed.images)
    if options.scope.sample is not None and options.scope.sample < len(rows):
        chooser = random.Random(os.urandom(8))  # the file's author cannot have predicted it
        rows = chooser.sample(rows, options.scope.sample)
    with sink.progress("prove slopes again", total=len(rows)) as bar:
        for row in rows:
            yield _claim(row, near[row.radius], network, images)
            bar.advance()


def _claim(row: NearImageFields, around: Around, network: AroundImages, images: Images) -> Claim:
    statement = f"slopes near image {row.index}, within {row.radius:g}"
    places = (images.indices == row.index).nonzero().flatten().tolist()
    if not places:
        return Claim(statement, "refuted", "no such image is among them")
    (proven,) = network.each(images.fetch(places[:1]), [around])
    problem = next(_problems(row, proven), None)
    if problem is not None:
        return Claim(statement, "refuted", problem)
    return Claim(
        statement,
        "verified",
        f"the logits' proven again: {rounded_up(proven.logits, 5)}; slopes from below and seconds: the author's word",
    )


def _alike(claims: list[float], margins: list[float]) -> bool:
    """Tell whether margins are the same up to another machine's rounding in float64."""
    size = max(map(abs, margins), default=0.0)
    pairs = zip(claims, margins, strict=False)
    return len(claims) == len(margins) and all(abs(a - b) <= 1e-9 * size for a, b in pairs)


def _problems(row: NearImageFields, proven: NearImage) -> Iterator[str]:
    """Yield what does not follow: bounds below those proven again, radii above them."""
    if row.prediction != proven.prediction:
        yield f"class {row.prediction} is stated, the network says {proven.prediction}"
    upper = proven.upper.tolist()
    if len(row.upper) != len(upper):
        yield f"{len(row.upper)} margins are stated, the network has {len(upper)}"
    if not _alike(row.margins, proven.margins.tolist()):
        yield "the margins at the image are other ones"
    elif row.rival != proven.rival:
        yield f"class {row.rival} is the nearest, as is stated, and {proven.rival} is"
    slopes = [(slope, bound) for slope, bound in zip(row.lower, upper) if slope is not None]
    if len(row.lower) != len(upper) or any(slope > bound for slope, bound in slopes):
        yield "a slope is stated that is above what is proven"
    pairs = [*zip(row.upper, upper, strict=False), (row.logits_upper, proven.logits)]
    for claimed, bound in pairs:
        if float(claimed) * (1 + SLACK) < bound and float(claimed) < math.inf:
            yield f"{rounded_down(claimed, 9)} is stated, {rounded_up(bound, 9)} is proven"
    if row.certified > proven.radius * (1 + SLACK):
        shown = rounded_up(row.certified, 9), rounded_down(proven.radius, 9)
        yield f"radius {shown[0]} is stated, {shown[1]} is proven"
