"""The stages without images: the proven bound, what drives it, and a measured slope."""

import time
from collections.abc import Iterator

from certcli.audit.clock import OutOfTime, StageTime
from certcli.evaluation.radii import power_of_ten, rounded_up
from certcli.images.labelled import Images
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.measured.estimate import measure
from certcli.lipschitz.network import NetworkBound, prove
from certcli.models.pixels import PixelModel
from certcli.report.document import Block, GlobalBound, Slope
from certcli.system.processes import ALONE, Team

SLOPE_IMAGES = 8
"""Images at most on which a slope is measured."""
LOOSE = 3.0
"""log10 of a bound from which on the answer names the layers that make it large."""
NEGLIGIBLE = 0.002
"""log10 below which a factor is none."""
DRIVER_SHARE = 0.2
"""Of the bound's logarithm, that a kind of layer must have to be named."""


def bound(model: PixelModel, classes: int, part: StageTime) -> tuple[GlobalBound, NetworkBound]:
    """The proven bound. OutOfTime when it is not finished in its time."""
    started = time.perf_counter()
    with part.ended():
        proven = prove(model, classes)
    return global_bound(proven, time.perf_counter() - started), proven


def global_bound(proven: NetworkBound, seconds: float) -> GlobalBound:
    finite = proven.upper.finite
    return GlobalBound(
        **bound_document(proven.upper) | ({} if finite else {"upper_text": "none"}),
        why=proven.bound.why,
        drivers=drivers(proven) if finite else "",
        blocks=list(_blocks(proven)) if finite else [],
        seconds=round(seconds, 2),
    )


def drivers(proven: NetworkBound) -> str:
    """Return "each of 25 LayerNorms alone contributes 1000", for layers that carry log(bound)."""
    if not proven.upper > 0.0 or proven.upper.log10() < LOOSE:
        return ""
    whole = proven.upper.log10()
    kinds: dict[str, list[float]] = {}
    for charge in proven.charges:
        if charge.constant.finite and charge.constant > 0.0:
            kinds.setdefault(charge.kind, []).append(charge.constant.log10())
    heaviest = sorted(kinds.items(), key=lambda item: -sum(item[1]))[:2]
    sentences = []
    for kind, logs in heaviest:
        if sum(logs) < DRIVER_SHARE * whole:
            continue
        low = _round(min(logs))
        high = _round(max(logs))
        size = high if low == high else f"{low} to {high}"
        sentences.append(
            f"the {kind} contributes {size}"
            if len(logs) == 1
            else f"each of {len(logs)} {kind}s {size}"
        )
    if sentences and sentences[0].startswith("each"):
        head, _, tail = sentences[0].partition("s ")
        sentences[0] = f"{head}s alone contributes {tail}"
    return ", ".join(sentences)


def _round(log10: float) -> str:
    """Two digits: 1000, 0.35, 10^9."""
    return f"{float(f'{10**log10:.2g}'):,g}" if -3 < log10 < 5 else power_of_ten(log10)


def _blocks(proven: NetworkBound) -> Iterator[Block]:
    """The outermost parts of the network, and what stands outside them, in order."""
    rows: list[Block] = []
    inside = [path for path, *_ in proven.blocks if path]
    containers = {path for path in inside if any(other.startswith(f"{path}.") for other in inside)}
    named = [
        path
        for path in inside
        if path.count(".") <= 1 and not (path in containers and path.count(".") == 0)
    ]
    for path, kind, before, after in proven.blocks:
        if path in named and before.finite and before > 0.0 and after > 0.0:
            ratio = after / before
            rows.append(
                Block(
                    path=path,
                    kind=kind,
                    log10=ratio.log10(),
                    text=str(ratio),
                    why=_why(proven, path),
                )
            )
    for charge in proven.charges:
        covered = any(charge.path == path or charge.path.startswith(f"{path}.") for path in named)
        if not covered and charge.constant.finite and charge.constant > 0.0:
            size = charge.constant
            row = Block(
                path=charge.path,
                kind=charge.kind,
                log10=size.log10(),
                text=str(size),
                why=charge.why,
            )
            rows.append(row)
    order = {charge.path: number for number, charge in enumerate(proven.charges)}

    def place(path: str) -> int:
        return min(
            (number for at, number in order.items() if at == path or at.startswith(f"{path}.")),
            default=10**9,
        )

    yield from sorted(rows, key=lambda row: place(row.path))
    rest = proven.upper.log10() - sum(row.log10 for row in rows) if proven.upper > 0.0 else 0.0
    if abs(rest) > NEGLIGIBLE:
        last = proven.blocks[-1][3] if proven.blocks else proven.upper
        pending = last > 0.0 and abs(proven.upper.log10() - last.log10() - rest) < NEGLIGIBLE
        name, kind = ("(last linear map)", "Linear") if pending else ("(how they are joined)", "")
        size = rounded_up(10**rest, 4) if abs(rest) < 5 else power_of_ten(rest)
        why = (
            "a linear map that was pending when its block ended"
            if pending
            else "last maps, sums and concatenations"
        )
        yield Block(path=name, kind=kind, log10=rest, text=size, why=why)


def _why(proven: NetworkBound, path: str) -> str:
    """The largest constants inside a block, each with its theorem."""
    inner = [
        c
        for c in proven.charges
        if c.path.startswith(f"{path}.") and c.constant.finite and c.constant > 0.0
    ]
    largest = sorted(inner, key=lambda charge: charge.constant, reverse=True)[:3]
    return "; ".join(f"{charge.path} {charge.constant}: {charge.why}" for charge in largest)


def slope(
    model: PixelModel, images: Images, seed: int, part: StageTime, team: Team = ALONE
) -> Slope | None:
    """The steepest slope at a few images, until the time is over; None: not one was finished.

    Of several processes all but the leader measure, who is busy with the proof meanwhile.
    """
    few = images.select(range(min(SLOPE_IMAGES, len(images))))
    if not team.several:
        return _slope(model, few, seed, part)
    others = range(team.rank - 1, len(few), team.size - 1) if not team.leads else ()
    mine = _slope(model, few.select(others), seed, part) if others else None
    estimates = [
        row
        for row in team.everyone(None if mine is None else [mine.lower, mine.images, mine.seconds])
        if row
    ]
    if not estimates:
        return None
    lowers, counts, seconds = zip(*estimates, strict=True)
    return Slope(lower=max(lowers), images=sum(counts), of=_images_of(images), seconds=max(seconds))


def _images_of(images: Images) -> str:
    return f"{images.name} ({images.split})"


def _slope(model: PixelModel, few: Images, seed: int, part: StageTime) -> Slope | None:
    device = next(model.parameters()).device
    started = time.perf_counter()
    count = 0
    best = 0.0
    batches = (pixels.to(device) for _, pixels, _ in few.batches(1))
    try:
        with part.ended():
            for estimate in measure(model, batches, seed=seed):
                count, best = count + 1, float(estimate.value)
                if part.left < 1.2 * part.spent / count:
                    break
    except OutOfTime:
        if not count:
            return None
    return Slope(
        lower=best,
        images=count,
        of=_images_of(few),
        seconds=round(time.perf_counter() - started, 2),
    )
