"""The stages without images: the proven bound, what drives it, and a measured slope."""

from collections.abc import Iterator

import torch

from certcli.audit.findings import AuditFindings
from certcli.audit.schedule import Stage
from certcli.evaluation.radii import power_of_ten, rounded_up
from certcli.images.labelled import Images, sent
from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.estimate import measure
from certcli.lipschitz.network import NetworkBound, prove_network
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.report.document import Block, GlobalBound, Slope
from certcli.system.processes import ALONE, Team

SLOPE_IMAGES = 8
"""Images at most on which a slope is measured."""
PROOF = 30.0
"""Forward passes that a proof takes, about: a first guess."""
SLOPE = 50.0
"""The same of the slope at an image."""
SELDOM = 0.02
"""What a slope tells, of what a share of images does."""
LOOSE = 3.0
"""log10 of a bound from which on the answer names the layers that make it large."""
NEGLIGIBLE = 0.002
"""log10 below which a factor is none."""
DRIVER_SHARE = 0.2
"""Of the bound's logarithm, that a kind of layer must have to be named."""


def global_bound(proven: NetworkBound, seconds: float) -> GlobalBound:
    finite = proven.upper.finite
    return GlobalBound(
        **bound_document(proven.upper) | ({} if finite else {"upper_text": "none"}),
        why=proven.bound.why,
        drivers=drivers(proven) if finite else "",
        blocks=list(_bound_blocks(proven)) if finite else [],
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


def _bound_blocks(proven: NetworkBound) -> Iterator[Block]:
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


class Proving(Stage):
    """The proven bound, by the leader: the only row.

    double, network: the float64 network and its bound.
    """

    name = "bound"
    doing = "proven bound"
    gain = 1.0
    double: PixelModel | None = None
    network: NetworkBound | None = None

    def __init__(self, model: PixelModel, classes: int, forward: float, team: Team = ALONE) -> None:
        super().__init__(range(1), 1, PROOF * forward, team)
        self.model = model
        self.classes = classes

    def judge(self, positions: list[int]) -> list[bool]:
        self.double = build.converted(self.model, torch.float64)
        self.network = prove_network(self.double, self.classes)
        return [True]

    def report(self, findings: AuditFindings) -> None:
        assert self.network is not None
        findings.bound = global_bound(self.network, self.seconds)

    def unfinished(self) -> str:
        return f"its proof was {super().unfinished()}: it is unknown, not infinite"


class Measuring(Stage):
    """The steepest slope at a few images."""

    name = "slope"
    doing = "slope"

    def __init__(
        self, model: PixelModel, images: Images, seed: int, forward: float, team: Team = ALONE
    ) -> None:
        few = images.select(range(min(SLOPE_IMAGES, len(images))))
        super().__init__(few, 1, SLOPE * forward, team)
        self.model = model
        self.seed = seed

    @property
    def gain(self) -> float:
        """The chance that a further image is the steepest, which few ask for."""
        return SELDOM / (1 + self.count)

    def judge(self, positions: list[int]) -> list[float]:
        pixels = sent(self.images.fetch(positions), next(self.model.parameters()).device)
        return [float(one.value) for one in measure(self.model, iter([pixels]), seed=self.seed)]

    def report(self, findings: AuditFindings) -> None:
        findings.slope = Slope(
            lower=max(self.rows),
            images=self.count,
            of=f"{self.images.name} ({self.images.split})",
            seconds=round(self.seconds, 2),
        )
