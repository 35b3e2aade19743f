"""Stages without attacks: the proven bound, what drives it, and a measured slope; clean accuracy and
certificates, of the first n images that time allows.

The images come class by class in turn, so any first n of them are a balanced sample, the same as
`--limit n`. A unit begins only if the longest image so far would fit into the time again, so slow
images are not left out for being slow."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from certcli.audit import gates, schedule
from certcli.certify.certificate import Certifier, certified_accuracy
from certcli.evaluation import image_records, intervals, record_lines, records
from certcli.evaluation.threat import Threat, power_of_ten, rounded_up
from certcli.images.labelled import Images, sent
from certcli.lipschitz import bound, estimate
from certcli.lipschitz.network import NetworkBound, prove_network
from certcli.lipschitz.numerics.real import Real
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.report.document import (
    Block,
    CertifiedShares,
    Dataset,
    GlobalBound,
    PatchShares,
    Share,
    Slope,
)
from certcli.system import errors, processes

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
PENDING = ("(last linear map)", "Linear", "a linear map that was pending when its block ended")
JOINED = ("(how they are joined)", "", "last maps, sums and concatenations")
"""Path, kind and reason of what the parts leave of the bound."""


def global_bound(proven: NetworkBound, seconds: float) -> GlobalBound:
    finite = proven.upper.finite
    return GlobalBound(
        **bound.bound_document(proven.upper) | ({} if finite else {"upper_text": "none"}),
        why=proven.bound.why,
        drivers=drivers(proven) if finite else "",
        blocks=[block for block, _ in bound_parts(proven)] if finite else [],
        seconds=round(seconds, 2),
    )


def drivers(proven: NetworkBound) -> str:
    """Return "each of 25 LayerNorms alone contributes 1000", for layers that carry log(bound)."""
    if not proven.upper > 0.0 or proven.upper.log10() < LOOSE:
        return ""
    kinds: dict[str, list[float]] = {}
    for charge in proven.charges:
        if charge.constant.finite and charge.constant > 0.0:
            kinds.setdefault(charge.kind, []).append(charge.constant.log10())
    clauses = []
    for kind, logs in sorted(kinds.items(), key=lambda item: -sum(item[1]))[:2]:
        if sum(logs) >= DRIVER_SHARE * proven.upper.log10():
            of = f"the {kind}" if len(logs) == 1 else f"each of {len(logs)} {kind}s"
            size = " to ".join(dict.fromkeys(map(_two_digits, (min(logs), max(logs)))))
            clauses.append(f"{of} alone contributes {size}")
    return ", ".join(clauses)


def _two_digits(log10: float) -> str:
    """Return 1000, 0.35, 10^9."""
    return f"{float(f'{10**log10:.2g}'):,g}" if -3 < log10 < 5 else power_of_ten(log10)


def bound_parts(proven: NetworkBound) -> list[tuple[Block, Real]]:
    """Return the outermost parts of the network, and what stands outside them, in order, each with
    the proven constant from the pixels to its end; the constants' product is the bound.
    """
    rows: list[tuple[Block, Real]] = []
    inside = [path for path, *_ in proven.blocks if path]
    containers = {path for path in inside if any(other.startswith(f"{path}.") for other in inside)}
    named = [
        path
        for path in inside
        if path.count(".") <= 1 and not (path in containers and path.count(".") == 0)
    ]
    for path, kind, before, after in proven.blocks:
        if path in named and before.finite and before > 0.0 and after > 0.0:
            rows.append((_part(path, kind, after / before, _why(proven, path)), after))
    for charge in proven.charges:
        covered = any(charge.path == path or charge.path.startswith(f"{path}.") for path in named)
        if not covered and charge.constant > 0.0:
            part = _part(charge.path, charge.kind, charge.constant, charge.why)
            rows.append((part, charge.cumulative))
    order = {charge.path: number for number, charge in enumerate(proven.charges)}

    def place(path: str) -> int:
        return min(
            (number for at, number in order.items() if at == path or at.startswith(f"{path}.")),
            default=10**9,
        )

    rows.sort(key=lambda row: place(row[0].path))
    if not (proven.upper.finite and proven.upper > 0.0):
        return rows
    rest = proven.upper.log10() - sum(row.log10 for row, _ in rows)
    if abs(rest) > NEGLIGIBLE:
        last = proven.blocks[-1][3] if proven.blocks else proven.upper
        pending = last > 0.0 and abs(proven.upper.log10() - last.log10() - rest) < NEGLIGIBLE
        name, kind, why = PENDING if pending else JOINED
        size = rounded_up(10**rest, 4) if abs(rest) < 5 else power_of_ten(rest)
        rows.append((Block(path=name, kind=kind, log10=rest, text=size, why=why), proven.upper))
    return rows


def _part(path: str, kind: str, constant: Real, why: str) -> Block:
    log10 = constant.log10() if constant.finite else math.inf
    return Block(path=path, kind=kind, log10=log10, text=str(constant), why=why)


def _why(proven: NetworkBound, path: str) -> str:
    """The largest constants inside a block, each with its theorem."""
    inner = [
        c
        for c in proven.charges
        if c.path.startswith(f"{path}.") and c.constant.finite and c.constant > 0.0
    ]
    largest = sorted(inner, key=lambda charge: charge.constant, reverse=True)[:3]
    return "; ".join(f"{charge.path} {charge.constant}: {charge.why}" for charge in largest)


class Proving(schedule.Stage):
    """The proven bound, by the leader: the only row.

    double, network: the float64 network and its bound.
    """

    name = "bound"
    doing = "proven bound"
    owed = True
    gain = 1.0
    double: PixelModel | None = None
    network: NetworkBound | None = None

    def __init__(
        self,
        model: PixelModel,
        classes: int,
        forward: float,
        team: processes.Team = processes.ALONE,
    ) -> None:
        super().__init__(range(1), 1, PROOF * forward, team)
        self.model = model
        self.classes = classes

    def judge(self, positions: list[int]) -> list[bool]:
        self.double = build.converted(self.model, torch.float64)
        self.network = prove_network(self.double, self.classes)
        return [True]

    def report(self, findings: gates.AuditFindings) -> None:
        assert self.network is not None
        findings.bound = global_bound(self.network, self.seconds)

    def unfinished(self) -> str:
        return f"its proof was {super().unfinished()}: it is unknown, not infinite"


class Measuring(schedule.Stage):
    """The steepest slope at a few images."""

    name = "slope"
    doing = "slope"

    def __init__(
        self,
        model: PixelModel,
        images: Images,
        seed: int,
        forward: float,
        team: processes.Team = processes.ALONE,
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
        return [
            float(one.value) for one in estimate.measure(self.model, iter([pixels]), seed=self.seed)
        ]

    def report(self, findings: gates.AuditFindings) -> None:
        findings.slope = Slope(
            lower=max(self.rows),
            images=self.count,
            of=f"{self.images.name} ({self.images.split})",
            seconds=round(self.seconds, 2),
        )


def dataset_of(images: Images) -> Dataset:
    return Dataset(**record_lines.describe_images(images))


def first_in_turn(images: Images, count: int) -> Images:
    """The first `count` images in turn, in the order of the split: what `--limit count` gives."""
    return images.select(sorted(range(count), key=lambda position: int(images.indices[position])))


class Classifying(schedule.Stage):
    """Predictions of the network without any change."""

    name = gates.CLEAN
    doing = "clean accuracy"
    owed = True

    def __init__(
        self,
        model: PixelModel,
        images: Images,
        largest: int,
        team: processes.Team = processes.ALONE,
    ) -> None:
        super().__init__(images, largest, 0.0, team)
        self.model = model

    @property
    def right(self) -> list[bool]:
        return [a == b for a, b in zip(self.rows, self.images.labels.tolist())]

    @property
    def samples(self) -> dict[gates.Key, intervals.Sample]:
        return {(gates.CLEAN, ""): intervals.Sample(self.right, len(self.images))}

    @torch.no_grad()
    def judge(self, positions: list[int]) -> list[int]:
        """Return their classes. DataError for NaN."""
        pixels = self.images.fetch(positions)
        self.images.expect_at(positions[-1] + 1, 2 * self.size)
        logits = self.model(sent(pixels, next(self.model.parameters()).device))
        if not torch.isfinite(logits).all():
            raise errors.DataError("the network gives NaN or infinite logits on these images")
        classes: list[int] = logits.argmax(1).tolist()
        return classes

    def report(self, findings: gates.AuditFindings) -> None:
        findings.clean = Share.of(sum(self.right), self.count)
        labelled = zip(self.images.indices.tolist(), self.images.labels.tolist(), self.rows)
        for index, label, prediction in labelled:
            findings.row(index, label)["prediction"] = prediction


class Certifying(schedule.Stage):
    """Certificates of one method.

    Args:
        make: the certifier, within the first unit.
        threats: of the shares.
        about: which network the statement is about.
    """

    optional = True

    def __init__(
        self,
        name: str,
        make: Callable[[], Certifier],
        images: Images,
        largest: int,
        threats: Sequence[Threat],
        each: float = 0.0,
        about: str = "the network itself",
        team: processes.Team = processes.ALONE,
    ) -> None:
        super().__init__(images, largest, each, team)
        self.name = name
        self.doing = f"{name} certificates"
        self.proven = name != "smoothing"
        self.make = make
        self.certifier: Certifier | None = None
        self.threats = threats
        self.about = about

    @property
    def samples(self) -> dict[gates.Key, intervals.Sample]:
        name = gates.PATCHED if self.name == "patch" else self.name
        return {
            (name, threat.key): intervals.Sample(
                [row.holds_at(threat) for row in self.rows], len(self.images)
            )
            for threat in self.threats
        }

    def judge(self, positions: list[int]) -> list[image_records.Certificate]:
        if self.certifier is None:
            self.certifier = self.make()
        indices = self.images.indices[positions].tolist()
        labels = self.images.labels[positions].tolist()
        return self.certifier.certificates(indices, self.images.fetch(positions), labels)

    @staticmethod
    def pack(piece: Any) -> Any:
        return records.packed(piece)

    def unpack(self, plain: Any) -> list[image_records.Certificate]:
        # a process without images has made no certifier
        return records.unpacked(
            image_records.PatchCertificate if self.name == "patch" else image_records.Certificate,
            plain,
        )

    def report(self, findings: gates.AuditFindings) -> None:
        assert self.certifier is not None
        by_index = {row.index: findings.row(row.index, row.label) for row in self.rows}
        common = self._common(self.certifier)
        if self.name == "patch":
            procedure = str(self.certifier.parameters["procedure"])
            findings.patched = PatchShares(procedure=procedure, **common)
            for row in self.rows:
                by_index[row.index]["proven"] = [
                    str(threat.size) for threat in self.threats if row.holds_at(threat)
                ]
            return
        result = certified_accuracy(self.rows, self.threats)
        findings.certificates.append(
            CertifiedShares(
                method=self.name,
                promise=self.certifier.promise,
                failure=result.failure,
                domain=self.certifier.domain,
                about=self.about,
                average_radius=result.average_radius or 0.0,
                abstained=result.abstained,
                **common,
            )
        )
        for row in self.rows:
            radius = row.radius if row.radius < float("inf") else "inf"
            by_index[row.index].setdefault("radius", {})[self.name] = radius

    def _common(self, certifier: Certifier) -> dict[str, Any]:
        """Fields that shares at radii and at patches have in common."""
        certified = {
            t.key: Share.of(sum(row.holds_at(t) for row in self.rows), self.count)
            for t in self.threats
        }
        return {
            "arithmetic": certifier.arithmetic,
            "title": certifier.title,
            "statement": certifier.statement,
            "dataset": dataset_of(first_in_turn(self.images, self.count)),
            "clean": Share.of(sum(row.correct for row in self.rows), self.count),
            "certified": certified,
            "parameters": dict(certifier.parameters),
            "seconds": round(self.seconds, 2),
        }
