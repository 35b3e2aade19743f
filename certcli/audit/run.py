"""The audit itself: stage after stage within one time budget, and what did not fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from certcli import models
from certcli.attack.settings import AttackSettings
from certcli.audit import judged, proof
from certcli.audit.clock import Clock, OutOfTime
from certcli.audit_document import Attacked, Certified, Dataset, Found, Row, Share, Skipped, Slope
from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.choice import USEFUL
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.certify.methods import prepare
from certcli.checkpoint import Checkpoint
from certcli.errors import ArchitectureError, DataError, NoBoundError, UsageError
from certcli.images import Images
from certcli.lipschitz.network import NetworkBound
from certcli.nn.residual import attention_weight

HOPELESS = 6.0
"""log10 of radius times bound from which on no certificate is tried: it would need a margin of a million between logits."""
LOCAL_PIXELS, LOCAL_PARAMETERS = 1024, 500_000
"""Networks that local certificates are tried on: beyond, one image takes minutes."""
DRAWS_FIRST, DRAWS = 32, 400
"""Of smoothing: draws that choose the class, and at most that bound its probability. A sure image takes 96 in all."""


@dataclass(frozen=True)
class Asked:
    """What an audit is asked for. radii: ascending; sigma: None takes the smallest radius above 0.

    reach: the largest radius that smoothing must speak of (None: the smallest of radii above 0). methods: of certificates;
    none takes those that make sense for the network.
    """

    radii: tuple[float, ...] = (0.12, 0.5)
    attacked: tuple[float, ...] = (0.12, 0.5)
    sigma: float | None = None
    reach: float | None = None
    attacks: tuple[str, ...] = ("pgd",)
    methods: tuple[str, ...] = ()
    seed: int = 0
    batch_size: int = 128
    precision: str = "float32"

    @property
    def least(self) -> float:
        """The smallest radius above 0, which the answer speaks of first."""
        return next((radius for radius in self.radii if radius > 0), 0.12)


@dataclass
class Results:
    """What the stages found so far; nothing is there that was not measured."""

    parameters: int = 0
    changed: bool = False
    bound: Found | None = None
    slope: Slope | None = None
    attention_weight: float | None = None
    dataset: Dataset | None = None
    clean: Share | None = None
    certificates: list[Certified] = field(default_factory=list)
    attack: Attacked | None = None
    skipped: list[Skipped] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    exhibits: list[Any] = field(default_factory=list)
    radii: dict[str, list[float]] = field(default_factory=dict)

    def skip(self, stage: str, why: str, for_time: bool = False) -> None:
        self.skipped.append(Skipped(stage=stage, why=why, for_time=for_time))

    def records(self) -> list[Row]:
        return [Row(**row) for _, row in sorted(self.rows.items())]


def run(
    checkpoint: Checkpoint,
    images: Images | None,
    calibration: Callable[[], Images],
    asked: Asked,
    device: torch.device,
    clock: Clock,
    tell: Callable[[str], None] = lambda stage: None,
) -> Results:
    """images: those to judge by, in turn; None when there are none. calibration: images for the slope, if there are none."""
    results = Results(changed=bool(checkpoint.record.surgery))
    proven = _prove(checkpoint, device, clock, results, tell)
    model = models.load(checkpoint, device)
    results.parameters = sum(weight.numel() for weight in model.parameters())
    results.attention_weight = attention_weight(model)
    tell("slope")
    part = clock.part(0.15)
    results.slope = proof.slope(model, images if images is not None else calibration(), asked.seed, part)
    if results.slope is None:
        results.skip("slope", f"no image was finished in {part.seconds:.0f} s", True)
    if images is None:
        results.skip("images", "no labelled images were given: accuracy, certificates and attacks need them")
        return results
    results.dataset = judged.dataset_of(images)
    tell("clean accuracy")
    part = clock.part(0.2)
    found, image_seconds = judged.predictions(model, images, asked.batch_size, part)
    if not found:
        results.skip("clean", f"no batch of images was classified in {part.seconds:.0f} s", True)
        return results
    labels, indices = images.labels.tolist(), images.indices.tolist()
    results.clean = Share.of(sum(a == b for a, b in zip(found, labels)), len(found))
    if len(found) < len(images):
        told = f"{len(found)} of {len(images)} images fitted into {part.seconds:.0f} s"
        results.skip("clean, further images", told, True)
    for index, label, prediction in zip(indices, labels, found):
        results.rows[index] = {"index": index, "label": label, "prediction": prediction}
    stages = _Stages(checkpoint, images, asked, device, clock, results, tell, image_seconds)
    useful = stages.wanted("lipschitz") and stages.lipschitz(proven)
    if useful and not asked.methods:
        for method in ("local", "smoothing"):
            results.skip(method, "the proof of the whole network certifies more than a tenth of what is correct")
    elif stages.wanted("local"):
        stages.local()
    last = "smoothing" not in asked.methods if asked.methods else useful
    stages.attack(model, 0.9 if last else 0.4)
    if (asked.methods or not useful) and stages.wanted("smoothing"):
        stages.smoothing()
    return results


def _prove(
    checkpoint: Checkpoint, device: torch.device, clock: Clock, results: Results, tell: Callable[[str], None]
) -> tuple[Any, NetworkBound] | None:
    tell("proven bound")
    part = clock.part(0.4)
    try:
        double = models.load_double(checkpoint, device)
        results.bound, proven = proof.bound(double, checkpoint.record.classes, part)
    except OutOfTime:
        results.skip("bound", f"its proof was not finished in {part.seconds:.0f} s: it is unknown, not infinite", True)
        return None
    return double, proven


@dataclass
class _Stages:
    checkpoint: Checkpoint
    images: Images
    asked: Asked
    device: torch.device
    clock: Clock
    results: Results
    tell: Callable[[str], None]
    image_seconds: float

    def wanted(self, method: str) -> bool:
        """Whether it was named, or none was; else it is said that it was not."""
        if self.asked.methods and method not in self.asked.methods:
            self.results.skip(method, "not among the --method named")
            return False
        return True

    def lipschitz(self, proven: tuple[Any, NetworkBound] | None) -> bool:
        """Certificates from the bound, where some logits could reach them; whether they are worth having."""
        results, least = self.results, self.asked.least
        if proven is None or results.bound is None:
            results.skip("lipschitz", "there is no bound yet")
            return False
        model, bound = proven
        if bound.pairs is None:
            results.skip("lipschitz", f"no finite bound: {bound.bound.why}")
            return False
        size = results.bound.log10_upper
        need = -1.0 if size is None else size + torch.tensor(least).log10().item()
        if need > HOPELESS and "lipschitz" not in self.asked.methods:
            told = f"a certificate at {least:g} would need logits 10^{need:.0f} apart"
            results.skip("lipschitz", told)
            return False
        self.tell("certificates of the bound")
        certifier = LipschitzCertifier(model, bound)
        rows = self._certify(certifier, 0.3, "the network itself", self.asked.radii)
        correct = sum(row.correct for row in rows)
        return sum(row.holds_at(least) for row in rows) > USEFUL * correct if rows else False

    def local(self) -> None:
        """Certificates image by image, of a small network as it is."""
        pixels = self.images.fetch([0])[0].numel()
        large = pixels > LOCAL_PIXELS or self.results.parameters > LOCAL_PARAMETERS
        if large and "local" not in self.asked.methods:
            self.results.skip("local", "only for small networks: one image would take minutes or more")
            return
        self.tell("local certificates")
        part = self.clock.part(0.3)
        try:
            with part.ended():
                certifier = prepare("local", self.checkpoint, self.device)
        except OutOfTime:
            self.results.skip("local", f"not made ready in {part.seconds:.0f} s", True)
            return
        except (NoBoundError, ArchitectureError) as failure:
            self.results.skip("local", failure.message)
            return
        self._certify(certifier, 0.3, "the network itself", self.asked.radii)

    def smoothing(self) -> None:
        """Certificates of the smoothed network, with what time is left."""
        asked = self.asked
        reach = asked.reach if asked.reach is not None else asked.least
        sigma = asked.sigma if asked.sigma is not None else max(asked.least, reach / 2)
        size = asked.batch_size if self.device.type == "cuda" else min(asked.batch_size, DRAWS_FIRST)
        given = {
            "sigma": sigma, "n0": DRAWS_FIRST, "samples": DRAWS, "enough": reach, "seed": asked.seed,
            "precision": asked.precision, "batch_size": size,
        }  # fmt: skip
        self.tell("smoothing")
        try:
            certifier = prepare("smoothing", self.checkpoint, self.device, given)
        except UsageError as refusal:
            self.results.skip("smoothing", refusal.message)
            return
        radii = [radius for radius in asked.radii if 0 < radius <= reach]
        expected = self.image_seconds * (DRAWS_FIRST + DRAWS) * (certifier.at_once or 1)
        self._certify(certifier, 1.0, f"the network smoothed by noise of sigma {sigma:g}", radii, expected)

    def _certify(
        self, certifier: Certifier, share: float, about: str, radii: Sequence[float], expected: float = 0.0
    ) -> list[Certificate]:
        part = self.clock.part(share)
        try:
            rows, broken = judged.certificates(certifier, self.images, self.asked.batch_size, part, expected)
        except (NoBoundError, DataError) as failure:
            self.results.skip(certifier.method, failure.message)
            return []
        if not rows:
            self.results.skip(certifier.method, f"no image was finished in {part.seconds:.0f} s", True)
            return []
        if len(rows) < len(self.images):
            told = f"{len(rows)} of {len(self.images)} images fitted into {part.seconds:.0f} s"
            told += "; one more was broken off and is not counted: such images tend to be hard" if broken else ""
            self.results.skip(f"{certifier.method}, further images", told, True)
        self.results.certificates.append(judged.certified(certifier, rows, self.images, radii, about, part.spent))
        self.results.radii[certifier.method] = [row.radius if row.correct else -1.0 for row in rows]
        for row in rows:
            kept = self.results.rows.setdefault(row.index, {"index": row.index, "label": row.label})
            kept.setdefault("radius", {})[certifier.method] = row.radius if row.radius < float("inf") else "inf"
        return rows

    def attack(self, model: Any, share: float) -> None:
        """Attacks in turn, radii ascending, for a share of the time left."""
        asked = self.asked
        if not asked.attacked:
            self.results.skip("attack", "no radius to attack at")
            return
        self.tell("attacks")
        part = self.clock.part(share)
        settings = AttackSettings(seed=asked.seed, precision=asked.precision)
        classes = self.checkpoint.record.classes
        found = judged.attack(
            model, self.images, asked.attacks, asked.attacked, settings, classes, asked.batch_size, self.image_seconds, part
        )  # fmt: skip
        if found is None:
            self.results.skip("attack", f"no batch of images was finished in {part.seconds:.0f} s", True)
            return
        self.results.attack, self.results.exhibits = found.shares, found.exhibits
        if found.shares.clean.images < len(self.images):
            told = f"{found.shares.clean.images} of {len(self.images)} images fitted into {part.seconds:.0f} s"
            self.results.skip("attack, further images", told, True)
        for row in found.records:
            kept = self.results.rows.setdefault(row.index, {"index": row.index, "label": row.label})
            kept.setdefault("withstood", {})[f"{row.epsilon:g}"] = row.withstood
            if row.fell and "norm" not in kept:
                kept |= {"adversarial_prediction": row.adversarial_prediction, "norm": row.norm}
