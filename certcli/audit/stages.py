"""The stages that need labelled images: the choice of certificates, attacks, and time left over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from certcli.attack.settings import AttackSettings
from certcli.audit import judging
from certcli.audit.attacking import Attacking, attack_by_patch
from certcli.audit.clock import Clock
from certcli.audit.findings import AuditFindings
from certcli.audit.gates import waits_for
from certcli.audit.plan import AuditPlan
from certcli.audit.shared_stages import together
from certcli.certify.certificate import Certificate, Certifier
from certcli.certify.hopeless import hopeless
from certcli.certify.lipschitz import LipschitzCertifier
from certcli.certify.local import LocalCertifier
from certcli.certify.local_options import Local
from certcli.certify.method_choice import is_useful, local_effort
from certcli.certify.patch.certifier import defended
from certcli.certify.patch.options import Patches
from certcli.certify.smoothing.functions import Classifier, require_alone
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import Smoothing
from certcli.certify.smoothing.pixel_denoiser import PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.verdicts import FEWEST
from certcli.images.labelled import Images
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.network import NetworkBound
from certcli.lipschitz.numerics.real import INF
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.system.errors import ArchitectureError, DataError, NoBoundError, UsageError

LOCAL_PARAMETERS = 500_000
"""Of networks that local certificates are tried on: beyond, one image may take an audit's whole time."""
DRAWS_FIRST = 16
DRAWS = 256
"""Of smoothing: draws that choose the class, and at most that bound its probability. A sure image takes 80 in all."""
NOISY = 64
"""Noisy images at a time on a CPU: four images' first draws."""
SHARED = 0.6
"""Smoothing's share of the time left where a gate waits for images of another stage; otherwise it takes all."""
PATCH = "2%"
"""The patch that is tried where none is named: a sticker."""
PHOTOGRAPH = 64
"""Pixels a side from which on an image is a photograph, which a sticker is tried on."""
PATCHED_AT_ONCE = 4
"""Images that share batches of masked passes: few, since one batch of images must fit into the time."""

Proven = tuple[PixelModel, NetworkBound]
"""The network in float64, and its bound."""


@dataclass
class Stages:
    """image_seconds: of a forward pass in float32."""

    checkpoint: Checkpoint
    model: PixelModel
    images: Images
    plan: AuditPlan
    device: torch.device
    clock: Clock
    findings: AuditFindings
    tell: Callable[[str], None]
    image_seconds: float
    denoiser: PixelDenoiser | None = None
    begun: list[judging.Certifying] = field(default_factory=list)
    attacking: Attacking | None = None

    def run(self, proven: Proven | None) -> None:
        """Certify and attack; proven: None where there is no bound."""
        plan = self.plan
        skip = self.findings.skip
        for method in ("lipschitz", "local", "smoothing"):
            if not plan.tries(method):
                skip(method, "not among the --method named")
        useful = plan.tries("lipschitz") and self.lipschitz(proven)
        if useful and not plan.methods:
            for method in ("local", "smoothing"):
                skip(
                    method,
                    "the proof of the whole network certifies more than a tenth of what is correct",
                )
        elif plan.tries("local"):
            self.local()
        self.attack()
        if plan.tried_patches or not useful:
            self.patch()
        if plan.tries("smoothing") and (plan.methods or not useful):
            self.smoothing()
        self.finish()

    def lipschitz(self, proven: Proven | None) -> bool:
        """Certify by the bound, where logits could reach it; tell whether enough is."""
        refusal = self.clock.team.agree(lambda: self._refusal(proven))
        if refusal is not None:
            self.findings.skip("lipschitz", refusal)
            return False
        self.tell("certificates of the bound")
        try:
            certifier = LipschitzCertifier(*self._for_all(proven))
        except NoBoundError as failure:
            self.findings.skip("lipschitz", failure.message)
            return False
        rows = self._certify(certifier, 0.3, self.plan.certified_radii)
        return is_useful(rows[:FEWEST], self.plan.least)

    def _refusal(self, proven: Proven | None) -> str | None:
        """Return why no certificate of the bound is tried."""
        bound = self.findings.bound
        smallest = self.plan.least
        if proven is None or bound is None:
            return "there is no bound yet"
        if proven[1].pairs is None:
            return f"no finite bound: {proven[1].bound.why}"
        named = "lipschitz" in self.plan.methods
        return None if named else hopeless(bound.log10_upper, smallest)

    def _for_all(self, proven: Proven | None) -> Proven:
        """Return the leader's proof in every process."""
        if proven is None:
            nothing = Bound(
                "", type(self.model).__name__, INF, "unbounded", "another process proved it"
            )
            classes = self.checkpoint.record.classes
            pairs = torch.empty(classes, classes, dtype=torch.float64)
            proven = (
                build.converted(self.model, torch.float64),
                NetworkBound(nothing, pairs, (), ()),
            )
        assert proven[1].pairs is not None
        if self.clock.team.several:
            self.clock.team.spread(proven[1].pairs, 0)
        return proven

    def local(self) -> None:
        """Certify image by image a small network as it is, at the radii of the plan."""
        named = "local" in self.plan.methods
        large = self.findings.parameters > LOCAL_PARAMETERS
        if not named and (large or local_effort(self.model) == "norms"):
            self.findings.skip(
                "local", "only for small networks: one image would take minutes or more"
            )
            return
        self.tell("local certificates")
        part = self.clock.part(0.3)
        at = [radius for radius in self.plan.certified_radii if radius > 0]
        ready: list[Certifier] = []

        def make() -> bool:
            double = build.converted(self.model, torch.float64)
            ready.append(LocalCertifier(double, self.model.input_size, Local(at=at)))
            return True

        try:
            _, broken = together(self.clock.team, part, make)
        except (NoBoundError, ArchitectureError) as failure:
            self.findings.skip("local", failure.message)
            return
        if broken:
            self.findings.skip("local", f"not made ready in {part}", True)
            return
        self._certify(ready[0], 0.3, self.plan.certified_radii)

    def smoothing(self) -> None:
        """Certify the smoothed network in the time that is left."""
        plan = self.plan
        precision = self.findings.precision
        reach = self.plan.reach
        sigma = plan.noise
        radii = [radius for radius in plan.certified_radii if 0 < radius <= reach]
        size = plan.batch_size if self.device.type == "cuda" else min(plan.batch_size, NOISY)
        self.tell("smoothing")
        try:
            options = Smoothing(
                sigma, DRAWS_FIRST, DRAWS, enough=reach, decide=radii == [reach],
                precision=precision, seed=plan.seed, batch_size=size,
                denoiser=None if self.denoiser is None else self.denoiser.digest,
            )  # fmt: skip
            require_alone(self.model)
            before = None if self.denoiser is None else self.denoiser.to(self.device)
            classify = Classifier(self.model, precision, before)
            certifier = SmoothingCertifier(
                classify, self.checkpoint.record.classes, options, self.device
            )
        except UsageError as refusal:
            self.findings.skip("smoothing", refusal.message)
            return
        each = self.image_seconds / (judging.BF16_GAIN if precision == "bf16" else 1.0)
        if self.denoiser is not None:
            each = certifier.seconds_a_draw(self.model.input_size)
        expected = each * (DRAWS_FIRST + DRAWS) * (certifier.at_once or 1)
        share = SHARED if any(map(self._awaited, self._judging)) else 1.0
        about = f"the network smoothed by noise of sigma {sigma:g}"
        if self.denoiser is not None:
            about += f", behind a denoiser ({self.denoiser.line})"
        self._certify(certifier, share, radii, about, expected)

    def patch(self) -> None:
        """Certify the network behind masks, then search a patch that fools it without."""
        plan = self.plan
        size = self.checkpoint.record.input.size
        named = bool(plan.tried_patches) or "patch" in plan.methods
        if not named and (plan.methods or min(size[1:]) < PHOTOGRAPH):
            return
        self.tell("certificates against patches")
        try:
            certifier = defended(self.model, Patches(plan.tried_patches or [PATCH]))
        except UsageError as refusal:
            self.findings.skip("patch", refusal.message)
            return
        certifier.at_once = PATCHED_AT_ONCE
        self._certify(certifier, 0.4, (), "the network behind masks")
        self.tell("attacks by patches")
        if self.clock.team.several:
            self.findings.skip("attack by patches", "only in one process")
            return
        part = self.clock.part(0.15)
        settings = AttackSettings(seed=plan.seed)
        findings, (first, *_) = self.findings, certifier.patches
        findings.patch_attack, findings.patched_pair = attack_by_patch(
            self.model, self.images, first, settings, part
        )
        if findings.patch_attack is None:
            findings.skip("attack by patches", f"no image was finished in {part}", True)

    def _certify(
        self,
        certifier: Certifier,
        share: float,
        radii: Sequence[float],
        about: str = "the network itself",
        expected: float = 0.0,
    ) -> list[Certificate]:
        """Certify images for this share of the time left; expected: seconds of a batch."""
        part = self.clock.part(share)
        size = self.plan.batch_size
        team = self.clock.team
        stage = judging.Certifying(certifier, self.images, size, radii, about, expected, team)
        try:
            stage.go(part)
        except (NoBoundError, DataError, UsageError) as failure:
            self.findings.skip(certifier.method, failure.message)
            return []
        self.begun.append(stage)
        return stage.rows

    def attack(self) -> None:
        """Attack in turn, radii ascending, for 0.4 of the time left; `finish` continues."""
        plan = self.plan
        if not plan.attacked_radii:
            self.findings.skip("attack", "no radius to attack at")
            return
        self.tell("attacks")
        part = self.clock.part(0.4)
        settings = AttackSettings(
            seed=plan.seed, precision=self.findings.precision, pixels=plan.pixels
        )
        self.attacking = Attacking(
            self.model, self.images, plan.attacks, plan.attacked_radii, settings, self.checkpoint.record.classes,
            plan.batch_size, self.clock.team,
        )  # fmt: skip
        self.attacking.go(part)

    @property
    def _judging(self) -> list[Attacking | judging.Certifying]:
        """The stages that judge images, which can go on with further ones."""
        return [*([] if self.attacking is None else [self.attacking]), *self.begun]

    def _awaited(self, stage: Attacking | judging.Certifying) -> bool:
        """Whether a gate is not decided by the images of this stage, and there are more."""
        size = self.checkpoint.record.input.size[1:]
        return stage.rest > 0 and any(
            waits_for(self.plan.gates, key, stage.proven, sample, size)
            for key, sample in stage.samples.items()
        )

    def finish(self) -> None:
        """Give time left to further images, where gates wait first; then write all down."""
        team = self.clock.team
        awaited = team.agree(lambda: [self._awaited(stage) for stage in self._judging])
        waiting = [
            stage for stage, is_awaited in zip(self._judging, awaited, strict=True) if is_awaited
        ]
        for number, stage in enumerate(waiting):
            self._go_on(stage, 1 / (len(waiting) - number), awaited_only=True)
        for stage in self._judging:
            smoothed = stage not in waiting and self._smooths(stage)  # it had all time left
            if stage.rest and not smoothed:
                self._go_on(stage, 1.0)
        self._write_down()

    def _smooths(self, stage: Attacking | judging.Certifying) -> bool:
        return isinstance(stage, judging.Certifying) and stage.certifier.method == "smoothing"

    def _go_on(
        self,
        stage: Attacking | judging.Certifying,
        share: float,
        awaited_only: bool = False,
    ) -> None:
        """Judge further images for this share of the time left, or until no gate waits for them."""
        name = "attacks"
        if isinstance(stage, judging.Certifying):
            name = f"{stage.certifier.method} certificates"
        self.tell(f"{name}, further images")
        stage.go(self.clock.part(share), lambda: awaited_only and not self._awaited(stage))

    def _write_down(self) -> None:
        self.findings.exhibits = [] if self.attacking is None else self.attacking.exhibits()
        if not self.clock.team.leads:
            return
        for stage in self.begun:
            stage.write_down(self.findings)
        if self.attacking is not None:
            self.attacking.write_down(self.findings)
