"""The audit itself: stage after stage within one time budget, and what did not fit."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from certcli.attack.settings import AttackSettings
from certcli.audit import judging, proving
from certcli.audit.clock import Clock, OutOfTime, Part
from certcli.audit.shared_stages import together
from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.choice import USEFUL
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.certify.local import LocalCertifier
from certcli.certify.local_options import Local
from certcli.certify.patch.certifier import PatchCertifier, defended
from certcli.certify.patch.options import Patches
from certcli.certify.smoothing.functions import Classifier
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import Smoothing
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.doubts import order_doubt
from certcli.evaluation.radii import radius_key
from certcli.evaluation.threat import Threat
from certcli.images.labelled import Images
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.network import NetworkBound
from certcli.lipschitz.numerics.real import INF
from certcli.models import build
from certcli.nn.residual import attention_weight
from certcli.report.document import Attacked, Certified, Dataset, Found, Patched, Row, Share, Skipped, Slope
from certcli.system.errors import ArchitectureError, DataError, NoBoundError, UsageError
from certcli.system.memory import free_bytes
from certcli.system.processes import Team

AUTO = "auto"
HOPELESS = 6.0
"""log10 of radius times bound from which on no certificate is tried: it would need a margin of a million between logits."""
LOCAL_PIXELS, LOCAL_PARAMETERS = 1024, 500_000
"""Networks that local certificates are tried on: beyond, one image takes minutes."""
DRAWS_FIRST, DRAWS = 16, 256
"""Of smoothing: draws that choose the class, and at most that bound its probability. A sure image takes 80 in all."""
FARTHEST = 1.5
"""Radius of a gate over sigma: with so few draws more images were certified at it than at 1 or 1.9 (validation digits)."""
NOISY = 64
"""Noisy images at a time on a CPU: four images' first draws."""
PATCH = "2%"
"""The patch that is asked about where none is named: a sticker."""
PHOTOGRAPH = 64
"""Pixels a side from which on it is."""
PATCHED_AT_ONCE = 4
"""Images that share batches of masked passes: few, since one batch of images must fit into the time."""
LARGE = 1_000_000
"""Parameters from which on smoothing and attacks run in bfloat16, where the machine multiplies matrices in it."""
COPIED = 0.25
"""Share of the free memory that a copy of the network in bfloat16 may take."""
ORDERED = 100
"""Images on which another place of the norms is tried, for a file of others."""
CLASSIFIED = 32
"""Images at a time for clean accuracy: on a slow machine a larger batch would take its whole time."""


@dataclass(frozen=True)
class Asked:
    """What an audit is asked for. radii: ascending; sigma: None takes the smallest radius above 0.

    patches: sizes as --patch spells them; none takes PATCH, where nothing else is proven of a network of photographs.
    reach: the largest radius that smoothing must speak of (None: the smallest of radii above 0). methods: of certificates;
    none takes those that make sense for the network. precision: of smoothing and of the attacks' own passes; "auto" takes
    bf16 for large networks where the machine multiplies matrices in it, else float32.
    """

    radii: tuple[float, ...] = (0.12, 0.5)
    attacked: tuple[float, ...] = (0.12, 0.5)
    sigma: float | None = None
    reach: float | None = None
    attacks: tuple[str, ...] = ("pgd",)
    methods: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    seed: int = 0
    batch_size: int = 128
    precision: str = AUTO

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
    patched: Patched | None = None
    skipped: list[Skipped] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    exhibits: list[Any] = field(default_factory=list)
    radii: dict[str, list[float]] = field(default_factory=dict)
    precision: str = "float32"
    doubts: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

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
    """images: those to judge by, in turn; None when there are none. calibration: images for the slope, if there are none.

    Of several processes (`clock.team`) each judges a part of the images; the leader's results are whole.
    """
    team = clock.team
    if len(set(team.everyone(checkpoint.digest if team.several else ""))) > 1:
        raise DataError("the processes did not read the same network", "leave the file alone while it is audited")
    results = Results(changed=bool(checkpoint.record.surgery))
    model = build.load(checkpoint, device)  # once: the stages share it, and its copies in other dtypes
    proven = _prove(model, checkpoint.record.classes, clock, results, tell)
    results.parameters = sum(weight.numel() for weight in model.parameters())
    results.attention_weight = attention_weight(model)
    tell("slope")
    if images is not None or asked.precision != AUTO:
        results.precision = team.agree(lambda: _precision(asked, model, results.parameters))
    part = clock.part(0.1)
    results.slope = proving.slope(model, images if images is not None else calibration(), asked.seed, part, team)
    if results.slope is None:
        results.skip("slope", f"no image was finished in {part}", True)
    if images is None:
        results.skip("images", "no labelled images were given: accuracy, certificates and attacks need them")
        return results
    results.dataset = judging.dataset_of(images)
    tell("clean accuracy")
    part = clock.part(0.2)
    found, image_seconds = judging.predictions(model, images, min(asked.batch_size, CLASSIFIED), part, team)
    if not found:
        results.skip("clean", f"no batch of images was classified in {part}", True)
        return results
    labels, indices = images.labels.tolist(), images.indices.tolist()
    right = [a == b for a, b in zip(found, labels)]
    results.clean = Share.of(sum(right), len(found))
    if checkpoint.record.foreign and team.leads:  # what certvit trained is read as it was trained
        with contextlib.suppress(OutOfTime), Part(0.1 * clock.left).ended():
            results.doubts += filter(None, [order_doubt(model, images, right[:ORDERED])])
    if len(found) < len(images):
        told = f"{len(found)} of {len(images)} images fitted into {part}"
        results.skip("clean, further images", told, True)
    for index, label, prediction in zip(indices, labels, found):
        results.rows[index] = {"index": index, "label": label, "prediction": prediction}
    stages = _Stages(checkpoint, model, images, asked, device, clock, results, tell, image_seconds)
    useful = stages.wanted("lipschitz") and stages.lipschitz(proven)
    if useful and not asked.methods:
        for method in ("local", "smoothing"):
            results.skip(method, "the proof of the whole network certifies more than a tenth of what is correct")
    elif stages.wanted("local"):
        stages.local()
    stages.attack()
    if asked.patches or not useful:
        stages.patch()
    if (asked.methods or not useful) and stages.wanted("smoothing"):
        stages.smoothing()
    stages.finish()
    return results


def _precision(asked: Asked, model: build.PixelModel, parameters: int) -> str:
    """The one that is asked for; of "auto", bf16 where it is faster and the network runs in it."""
    if asked.precision != AUTO:
        return asked.precision
    device = next(model.parameters()).device
    if parameters < LARGE or not build.multiplies_bf16(device):
        return "float32"
    if device.type == "cpu" and 2 * parameters > COPIED * free_bytes():  # float32 stays in its file
        return "float32"
    grey = torch.full((1, *model.input_size), 0.5, device=device)
    try:
        with torch.no_grad():
            logits = Classifier(model, "bf16")(grey)
    except UsageError:
        return "float32"
    return "bf16" if bool(torch.isfinite(logits).all()) else "float32"


def _prove(
    model: build.PixelModel, classes: int, clock: Clock, results: Results, tell: Callable[[str], None]
) -> tuple[Any, NetworkBound] | None:
    tell("proven bound")
    part = clock.part(0.4)
    if not clock.team.leads:  # it proves; the others measure slopes
        return None
    try:
        double = build.converted(model, torch.float64)
        results.bound, proven = proving.bound(double, classes, part)
    except OutOfTime:
        results.skip("bound", f"its proof was not finished in {part}: it is unknown, not infinite", True)
        return None
    return double, proven


@dataclass
class _Stages:
    checkpoint: Checkpoint
    model: build.PixelModel
    images: Images
    asked: Asked
    device: torch.device
    clock: Clock
    results: Results
    tell: Callable[[str], None]
    image_seconds: float
    going: list[tuple[judging.Certifying, str, Sequence[float], bool]] = field(default_factory=list)
    attacking: judging.Attacking | None = None

    @property
    def team(self) -> Team:
        return self.clock.team

    def wanted(self, method: str) -> bool:
        """Whether it was named, or none was; else it is said that it was not."""
        if self.asked.methods and method not in self.asked.methods:
            self.results.skip(method, "not among the --method named")
            return False
        return True

    def lipschitz(self, proven: tuple[Any, NetworkBound] | None) -> bool:
        """Certificates from the bound, where some logits could reach them; whether they are worth having."""
        refusal = self.team.agree(lambda: self._refusal(proven))
        if refusal is not None:
            self.results.skip("lipschitz", refusal)
            return False
        self.tell("certificates of the bound")
        try:
            certifier = LipschitzCertifier(*self._for_all(proven))
        except NoBoundError as failure:
            self.results.skip("lipschitz", failure.message)
            return False
        rows = self._certify(certifier, 0.3, "the network itself", self.asked.radii)
        correct, least = sum(row.correct for row in rows), self.asked.least
        return sum(row.holds_at(Threat("l2", least)) for row in rows) > USEFUL * correct if rows else False

    def _refusal(self, proven: tuple[Any, NetworkBound] | None) -> str | None:
        """Why no certificate of the bound is tried."""
        results, least = self.results, self.asked.least
        if proven is None or results.bound is None:
            return "there is no bound yet"
        if proven[1].pairs is None:
            return f"no finite bound: {proven[1].bound.why}"
        size = results.bound.log10_upper
        need = -1.0 if size is None else size + math.log10(least)
        if need > HOPELESS and "lipschitz" not in self.asked.methods:
            return f"a certificate at {least:g} would need logits 10^{need:.0f} apart"
        return None

    def _for_all(self, proven: tuple[Any, NetworkBound] | None) -> tuple[Any, NetworkBound]:
        """What the leader proved of the network that all have read, in float64."""
        if proven is None:
            nothing = Bound("", type(self.model).__name__, INF, "unbounded", "another process proved it")
            classes = self.checkpoint.record.classes
            pairs = torch.empty(classes, classes, dtype=torch.float64)
            proven = build.converted(self.model, torch.float64), NetworkBound(nothing, pairs, (), ())
        assert proven[1].pairs is not None
        if self.team.several:
            self.team.spread(proven[1].pairs, 0)
        return proven

    def local(self) -> None:
        """Certificates image by image, of a small network as it is, at the radii that are asked about."""
        pixels = self.images.fetch([0])[0].numel()
        large = pixels > LOCAL_PIXELS or self.results.parameters > LOCAL_PARAMETERS
        if large and "local" not in self.asked.methods:
            self.results.skip("local", "only for small networks: one image would take minutes or more")
            return
        self.tell("local certificates")
        part = self.clock.part(0.3)
        at = [radius for radius in self.asked.radii if radius > 0]
        ready: list[Certifier] = []

        def make() -> bool:
            double = build.converted(self.model, torch.float64)
            ready.append(LocalCertifier(double, self.model.input_size, Local(at=at)))
            return True

        try:
            _, broken = together(self.team, part, make)
        except (NoBoundError, ArchitectureError) as failure:
            self.results.skip("local", failure.message)
            return
        if broken:
            self.results.skip("local", f"not made ready in {part}", True)
            return
        self._certify(ready[0], 0.3, "the network itself", self.asked.radii)

    def smoothing(self) -> None:
        """Certificates of the smoothed network, with what time is left."""
        asked, precision = self.asked, self.results.precision
        reach = asked.reach if asked.reach is not None else asked.least
        sigma = asked.sigma if asked.sigma is not None else max(asked.least, reach / FARTHEST)
        radii = [radius for radius in asked.radii if 0 < radius <= reach]
        size = asked.batch_size if self.device.type == "cuda" else min(asked.batch_size, NOISY)
        self.tell("smoothing")
        try:
            options = Smoothing(
                sigma, DRAWS_FIRST, DRAWS, enough=reach, decide=radii == [reach],
                precision=precision, seed=asked.seed, batch_size=size,
            )  # fmt: skip
            classify = Classifier(self.model, precision)
            certifier = SmoothingCertifier(classify, self.checkpoint.record.classes, options, self.device)
        except UsageError as refusal:
            self.results.skip("smoothing", refusal.message)
            return
        each = self.image_seconds / (judging.BF16_GAIN if precision == "bf16" else 1.0)
        expected = each * (DRAWS_FIRST + DRAWS) * (certifier.at_once or 1)
        self._certify(certifier, 1.0, f"the network smoothed by noise of sigma {sigma:g}", radii, expected)

    def patch(self) -> None:
        """Certificates of the classifier behind masks, against patches: for networks that nothing else is proven of."""
        asked, size = self.asked, self.checkpoint.record.input.size
        named = bool(asked.patches) or "patch" in asked.methods
        if not named and (asked.methods or min(size[1:]) < PHOTOGRAPH):
            return
        self.tell("certificates against patches")
        try:
            certifier = defended(self.model, Patches(list(asked.patches) or [PATCH]))
        except UsageError as refusal:
            self.results.skip("patch", refusal.message)
            return
        certifier.at_once = PATCHED_AT_ONCE
        self._certify(certifier, 0.4, "the network behind masks", ())

    def _certify(
        self, certifier: Certifier, share: float, about: str, radii: Sequence[float], expected: float = 0.0
    ) -> list[Certificate]:
        part = self.clock.part(share)
        going = judging.Certifying(certifier, self.images, self.asked.batch_size, expected, self.team)
        try:
            broken = going.go(part)
        except (NoBoundError, DataError, UsageError) as failure:
            self.results.skip(certifier.method, failure.message)
            return []
        self.going.append((going, about, radii, broken))
        return going.rows

    def attack(self) -> None:
        """Attacks in turn, radii ascending, for 0.4 of the time left; `finish` goes on."""
        asked = self.asked
        if not asked.attacked:
            self.results.skip("attack", "no radius to attack at")
            return
        self.tell("attacks")
        part = self.clock.part(0.4)
        settings = AttackSettings(seed=asked.seed, precision=self.results.precision)
        self.attacking = judging.Attacking(
            self.model, self.images, asked.attacks, asked.attacked, settings, self.checkpoint.record.classes,
            asked.batch_size, self.image_seconds, part.seconds, self.team,
        )  # fmt: skip
        self.attacking.go(part)

    def finish(self) -> None:
        """Time left over goes to images that attacks, then certificates, did not come to; then all is written down."""
        if self.attacking is not None and self.attacking.rest:
            self.tell("attacks, further images")
            self.attacking.go(self.clock.part(1.0))
        for number, (going, about, radii, broken) in enumerate(self.going):
            if going.rest and going.certifier.method != "smoothing":  # smoothing had all there was
                self.tell(f"{going.certifier.method} certificates, further images")
                broken = going.go(self.clock.part(1.0)) or broken
            self.going[number] = (going, about, radii, broken)
        self.results.exhibits = [] if self.attacking is None else self.attacking.exhibits()
        if not self.team.leads:
            return
        for going, about, radii, broken in self.going:
            self._certified(going, about, radii, broken)
        self._attacked()

    def _certified(self, going: judging.Certifying, about: str, radii: Sequence[float], broken: bool) -> None:
        method, rows, results = going.certifier.method, going.rows, self.results
        if not rows:
            results.skip(method, "no image was finished in its time", True)
            return
        if going.rest:
            told = f"{len(rows)} of {len(self.images)} images fitted into {going.seconds:.0f} s"
            told += "; one more was broken off and is not counted: such images tend to be hard" if broken else ""
            results.skip(f"{method}, further images", told, True)
        if isinstance(going.certifier, PatchCertifier):
            sizes = going.certifier.patches
            results.patched = judging.patched(going.certifier, rows, self.images, sizes, going.seconds)
            for row in rows:
                kept = results.rows.setdefault(row.index, {"index": row.index, "label": row.label})
                kept["proven"] = [str(size) for size in sizes if row.holds_at(Threat("patch", size))]
            return
        results.certificates.append(judging.certified(going.certifier, rows, self.images, radii, about, going.seconds))
        results.radii[method] = [row.radius if row.correct else -1.0 for row in rows]
        for row in rows:
            kept = results.rows.setdefault(row.index, {"index": row.index, "label": row.label})
            kept.setdefault("radius", {})[method] = row.radius if row.radius < float("inf") else "inf"

    def _attacked(self) -> None:
        results, attacking = self.results, self.attacking
        if attacking is None:
            return
        results.attack = attacking.shares
        if results.attack is None:
            results.skip("attack", "no batch of images was finished in its time", True)
            return
        if attacking.rest:
            told = f"{attacking.count} of {len(self.images)} images fitted into {attacking.seconds:.0f} s"
            results.skip("attack, further images", told, True)
        for row in attacking.records:
            kept = results.rows.setdefault(row.index, {"index": row.index, "label": row.label})
            kept.setdefault("withstood", {})[radius_key(row.epsilon)] = row.withstood
            if row.fell and "norm" not in kept:
                kept |= {"adversarial_prediction": row.adversarial_prediction, "norm": row.norm}
