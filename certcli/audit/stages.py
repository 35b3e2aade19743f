"""Which stages an audit of these images has, what each waits for, and when it is not worth its
time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from certcli.attack.settings import AttackSettings
from certcli.audit import attacking, gates, judging, schedule
from certcli.audit.plan import AuditPlan
from certcli.certify import certificate, lipschitz, local, method_choice
from certcli.certify.options import Local, Patches, Smoothing
from certcli.certify.patch.certifier import defended
from certcli.certify.smoothing import noise, pixel_denoiser
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation import intervals, threat
from certcli.images.labelled import Images
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.network import NetworkBound
from certcli.lipschitz.numerics.real import INF
from certcli.models import build, pixels
from certcli.system import errors, processes

LOCAL_PARAMETERS = 500_000
"""Of networks that local certificates are tried on: beyond, one image may take an audit's whole
time."""
DRAWS_FIRST = 16
DRAWS = 256
"""Of smoothing: draws that choose the class, and at most that bound its probability. A sure image
takes 80 in all."""
NOISY = 64
"""Noisy images at a time on a CPU: four images' first draws."""
PATCH = "2%"
"""The patch that is tried where none is named: a sticker."""
PATCHED_AT_ONCE = 4
"""Images that share batches of masked passes: few, since a unit of them must fit into the time."""
PHOTOGRAPH = 64
"""Pixels a side from which on an image is a photograph, which a sticker is tried on."""
BY_BOUND = 6.0
MASKED = 200.0
LOCALLY = 2000.0
"""Forward passes that a certificate takes, about: first guesses."""
USEFUL = "the proof of the whole network certifies more than a tenth of what is correct"


@dataclass
class Stages:
    """The stages that need labelled images.

    Attributes:
        forward, passing: seconds of work of a forward pass of an image alone, in float32 and in the
            precision of smoothing and attacks.
    """

    checkpoint: Checkpoint
    model: pixels.PixelModel
    images: Images
    plan: AuditPlan
    device: torch.device
    findings: gates.AuditFindings
    proving: judging.Proving
    forward: float
    passing: float
    team: processes.Team
    denoiser: pixel_denoiser.PixelDenoiser | None = None

    def all(self) -> list[schedule.Stage]:
        """Return the stages; what is refused before any work is said in the findings."""
        plan = self.plan
        for method in ("lipschitz", "local", "smoothing"):
            if not plan.tries(method):
                self.findings.skip(method, "not among the --method named")
        bound = self._by_bound() if plan.tries("lipschitz") else None
        others = [
            *(self._local() if plan.tries("local") else []),
            *(self._smoothing() if plan.tries("smoothing") else []),
        ]
        patches = self._patches()
        waiting = others * (not plan.methods) + patches * (not plan.tried_patches)
        if bound is not None:
            for stage in waiting:
                stage.after = [bound]
                stage.barred = lambda: (
                    USEFUL
                    if method_choice.is_useful(bound.rows[: intervals.FEWEST], plan.least)
                    else None
                )
            others.append(bound)
        return [*others, *self._attack(), *patches]

    def _certifying(
        self,
        name: str,
        make: Callable[[], certificate.Certifier],
        each: float,
        largest: int | None = None,
        about: str = "the network itself",
        threats: Sequence[threat.Threat] | None = None,
    ) -> judging.Certifying:
        """each: forward passes of an image, about."""
        one = self.passing if name == "smoothing" else self.forward
        if threats is None:
            threats = [threat.Threat("l2", radius) for radius in self.plan.certified_radii]
        size = largest or self.plan.batch_size
        stage = judging.Certifying(
            name, make, self.images, size, threats, each * one, about, self.team
        )
        # one image of what is dear; a few say whether the bound is worth having
        stage.first = schedule.FIRST if name == "lipschitz" else 1
        return stage

    def _by_bound(self) -> judging.Certifying:
        """Certificates of the bound, after its proof, where logits could reach it."""
        stage = self._certifying(
            "lipschitz", lambda: lipschitz.LipschitzCertifier(*self._shared()), BY_BOUND
        )
        stage.after = [self.proving]
        stage.barred = self._no_bound
        return stage

    def _no_bound(self) -> str | None:
        proven = self.proving.network
        if proven is None:
            return "there is no bound yet"
        if proven.pairs is None:
            return f"no finite bound: {proven.bound.why}"
        if "lipschitz" in self.plan.methods:
            return None
        log10 = proven.upper.log10() if proven.upper > 0.0 else None
        return method_choice.why_hopeless(log10, self.plan.least)

    def _shared(self) -> tuple[pixels.PixelModel, NetworkBound]:
        """Return the float64 network and the leader's proof, in every process."""
        double, proven = self.proving.double, self.proving.network
        if double is None or proven is None:
            nothing = Bound(
                "", type(self.model).__name__, INF, "unbounded", "another process proved it"
            )
            classes = self.checkpoint.record.classes
            pairs = torch.empty(classes, classes, dtype=torch.float64)
            double = build.converted(self.model, torch.float64)
            proven = NetworkBound(nothing, pairs, (), ())
        assert proven.pairs is not None
        if self.team.several:
            self.team.spread(proven.pairs, 0)
        return double, proven

    def _local(self) -> list[schedule.Stage]:
        """Image by image a small network as it is, at the radii of the plan."""
        named = "local" in self.plan.methods
        large = self.findings.parameters > LOCAL_PARAMETERS
        slow = large or method_choice.largest_tensor(self.model) > method_choice.ENCLOSED
        if not named and slow:
            why = "only for small networks: one image would take minutes or more"
            self.findings.skip("local", why)
            return []
        at = [radius for radius in self.plan.certified_radii if radius > 0]

        def make() -> certificate.Certifier:
            double = build.converted(self.model, torch.float64)
            return local.LocalCertifier(double, self.model.input_size, Local(at=at))

        return [self._certifying("local", make, LOCALLY, 1)]

    def _smoothing(self) -> list[schedule.Stage]:
        """The smoothed network, behind its denoiser if there is one."""
        plan = self.plan
        sigma = plan.noise
        threats = [
            threat.Threat("l2", radius)
            for radius in plan.certified_radii
            if 0 < radius <= plan.reach
        ]
        size = plan.batch_size if self.device.type == "cuda" else min(plan.batch_size, NOISY)
        precision = self.findings.precision
        about = f"the network smoothed by noise of sigma {sigma:g}"
        each = float(DRAWS_FIRST + DRAWS)
        before = None
        if self.denoiser is not None:
            before = self.denoiser.to(self.device)
            about += f", behind a denoiser ({self.denoiser.line})"
            weights = sum(weight.numel() for weight in self.denoiser.parameters())
            each *= 1 + weights / max(1, self.findings.parameters)
        try:
            options = Smoothing(
                sigma, DRAWS_FIRST, DRAWS, enough=plan.reach, decide=len(threats) == 1,
                precision=precision, seed=plan.seed, batch_size=size,
                denoiser=None if self.denoiser is None else self.denoiser.digest,
            )  # fmt: skip
            options.require_reach()
        except errors.UsageError as refusal:
            self.findings.skip("smoothing", refusal.message)
            return []

        def make() -> certificate.Certifier:
            noise.require_rows_alone(self.model)
            classify = noise.Classifier(self.model, precision, before)
            return SmoothingCertifier(
                classify, self.checkpoint.record.classes, options, self.device
            )

        largest = -(-size // DRAWS_FIRST)
        return [self._certifying("smoothing", make, each, largest, about, threats)]

    def _patches(self) -> list[schedule.Stage]:
        """The network behind masks, and patches that fool it without."""
        plan = self.plan
        size = self.checkpoint.record.input.size
        named = bool(plan.tried_patches) or "patch" in plan.methods
        if not named and (plan.methods or min(size[1:]) < PHOTOGRAPH):
            return []
        options = Patches(plan.tried_patches or [PATCH])
        try:
            patches = sorted(set(options.sizes((size[1], size[2]))))
        except errors.UsageError as refusal:
            self.findings.skip("patch", refusal.message)
            return []
        threats = [threat.Threat("patch", patch) for patch in patches]
        proofs = self._certifying(
            "patch", lambda: defended(self.model, options), MASKED, PATCHED_AT_ONCE,
            "the network behind masks", threats,
        )  # fmt: skip
        if self.team.several:
            self.findings.skip("attack by patches", "only in one process")
            return [proofs]
        attack = attacking.PatchAttacking(
            self.model, self.images, patches[0], plan.seed, self.forward
        )
        return [proofs, attack]

    def _attack(self) -> list[schedule.Stage]:
        """Attacks in turn, radii ascending."""
        plan = self.plan
        if not plan.attacked_radii:
            self.findings.skip("attack", "no radius to attack at")
            return []
        settings = AttackSettings(
            seed=plan.seed, precision=self.findings.precision, pixels=plan.pixels
        )
        return [
            attacking.Attacking(
                self.model, self.images, plan.attacks, plan.attacked_radii, settings,
                self.checkpoint.record, plan.batch_size, self.passing, self.team,
            )
        ]  # fmt: skip


def awaited(plan: AuditPlan, size: Sequence[int], stage: schedule.Stage) -> bool:
    """Whether a gate is not decided by what this stage found so far. size: (c, height, width)."""
    if stage.name == judging.Proving.name:
        return any(gate.quantity in ("upper", "certified", "proven") for gate in plan.gates)
    return any(
        gates.waits_for(plan.gates, key, stage.proven, sample, (size[1], size[2]))
        for key, sample in stage.samples.items()
    )
