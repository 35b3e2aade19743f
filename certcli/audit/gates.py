"""Gates: `certified@0.25<0.4` fails where less than 40 % of the images are certified at 0.25; and what
the stages found, which they judge.

    GATE = SHARE "@" RADIUS ("<" | "<=") NUMBER | "patched@" PATCH ("<" | "<=") NUMBER |
           "clean" ("<" | "<=") NUMBER | "upper" (">" | ">=") NUMBER

SHARE is `certified` (the best method, whatever it promises), `proven` (proofs only) or `robust`
(what attacks left); `patched` is the share that no patch (32, 16x64, 2%) changes behind masks. A
number may be a quotient, 36/255.

The interval of a share decides (`certcli.evaluation.verdicts`). A gate whose quantity was not
measured fails, and says why; where time was short it is not decided. Gates are written as failures
and reported as requirements."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from certcli.evaluation import intervals, threat
from certcli.images.labelled import OWN, Images
from certcli.report.document import (
    AttackShares,
    CertifiedShares,
    Dataset,
    GateReport,
    GateResult,
    GlobalBound,
    ImageRow,
    PatchAttack,
    PatchShares,
    Share,
    Skipped,
    Slope,
)
from certcli.system import errors, registry

CLEAN = "clean"
ROBUST = "robust"
PATCHED = "patched"
Key = tuple[str, str]
"""CLEAN, ROBUST, PATCHED or a method of certificates, and the radius or patch, as keys of shares
spell it."""


@dataclass
class AuditFindings:
    """Measured and proven results. A stage that was not done leaves None, and a line in `skipped`.

    Attributes:
        input: channels, height and width of an image.
        gpu: whether this machine has one, for its advice.
        exhibits: fooled images with their pixels.
        sample: the first image.
        patched_pair: an image without and with a patch.
        images: that are judged.
        samples: of each share the outcome of its images, in the order in which they were judged.
        failing: why the figures say little about the network, so that the other stages are not
            worth their time.
        statistics: options that give the pixel statistics with which it is more often right.
    """

    parameters: int = 0
    input: tuple[int, int, int] = (0, 0, 0)
    changed: bool = False
    gpu: bool = False
    bound: GlobalBound | None = None
    slope: Slope | None = None
    attention_weight: float | None = None
    dataset: Dataset | None = None
    clean: Share | None = None
    certificates: list[CertifiedShares] = field(default_factory=list)
    attack: AttackShares | None = None
    patched: PatchShares | None = None
    patch_attack: PatchAttack | None = None
    skipped: list[Skipped] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    images: Images | None = None
    exhibits: list[Any] = field(default_factory=list)
    sample: Any = None
    patched_pair: tuple[Any, Any] | None = None
    samples: dict[Key, intervals.Sample] = field(default_factory=dict)
    precision: threat.Precision = "float32"
    failing: str | None = None
    statistics: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    @property
    def own(self) -> bool:
        """Whether the labels are the network's own answers: nothing is known of its accuracy."""
        return self.dataset is not None and self.dataset.split == OWN

    @property
    def stopped(self) -> bool:
        """Whether nothing was certified or attacked because the figures would say little."""
        return self.failing is not None and self.attack is None and not self.certificates

    def skip(self, stage: str, why: str, for_time: bool = False) -> None:
        self.skipped.append(Skipped(stage=stage, why=why, for_time=for_time))

    def row(self, index: int, label: int) -> dict[str, Any]:
        """Return the row of an image, which stages extend."""
        return self.rows.setdefault(index, {"index": index, "label": label})

    def records(self, files: bool = True) -> list[ImageRow]:
        """Return a row an image, with the name of its file if it has one and `files` are named."""
        file_of = {} if self.images is None or not files else self.images.file_of
        return [
            ImageRow(file=file_of.get(index), **row) for index, row in sorted(self.rows.items())
        ]


AT_A_RADIUS = ("certified", "proven", "robust")
AGAINST = "patched"
QUANTITIES = (*AT_A_RADIUS, AGAINST, "clean", "upper")
EXAMPLE = '--fail-on "certified@0.25<0.4", "proven@0.5<0.1", "robust@0.5<0.2", "patched@32<0.1", "clean<0.9" or "upper>100"'
_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?"
_PATCH = r"(?:\d+:)?(?:\d+x\d+|\d+(?:\.\d+)?%|\d+)"
_FORM = re.compile(
    rf"\s*(?P<quantity>[a-z]+)\s*(?:@\s*(?:(?P<radius>(?:{_NUMBER})(?:/(?:{_NUMBER}))?)|(?P<patch>{_PATCH})))?\s*"
    rf"(?P<sign><=|>=|<|>)\s*(?P<value>(?:{_NUMBER})(?:/(?:{_NUMBER}))?)\s*"
)


@dataclass(frozen=True)
class FailOn:
    """One expression. radius: None for `clean`, `upper`, `patched`; patch: as it is spelled."""

    text: str
    quantity: str
    radius: float | None
    sign: str
    value: float
    patch: str | None = None

    @property
    def demand(self) -> intervals.Demand:
        """Return what a share of the images must meet."""
        return intervals.Demand(self.value, more=self.sign == "<=")

    @property
    def requirement(self) -> str:
        """Return what the network must meet: "certified at l2 0.25: required at least 40 %"."""
        about = {
            "certified": f"certified at l2 {self.radius}",
            "proven": f"proven at l2 {self.radius}",
            "robust": f"correct after attacks at l2 {self.radius}",
            "patched": f"proven against patches of {self.patch}",
            "clean": "correct without any change",
            "upper": "Lipschitz bound",
        }
        words = {"<": "at least", "<=": "more than", ">": "at most", ">=": "less than"}
        value = f"{self.value:g}" if self.quantity == "upper" else f"{100 * self.value:g} %"
        return f"{about[self.quantity]}: required {words[self.sign]} {value}"


def parse_gate(text: str) -> FailOn:
    """Return the gate of an expression; UsageError names the mistake and the likely correction."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise errors.UsageError(f"--fail-on '{text}' is no gate", EXAMPLE)
    quantity = match["quantity"]
    sign = match["sign"]
    if quantity not in QUANTITIES:
        raise errors.UsageError(
            f"--fail-on '{text}': unknown quantity '{quantity}'",
            registry.one_of(quantity, QUANTITIES),
        )
    size = match["radius"] or match["patch"]
    patch = size if quantity == AGAINST else match["patch"]
    of_a = {AGAINST: "patch", **dict.fromkeys(AT_A_RADIUS, "radius")}.get(quantity)
    named = "patch" if patch is not None else None if size is None else "radius"
    if named != of_a:
        mistake = f"has no {named}" if of_a is None else f"needs a {of_a}"
        raise errors.UsageError(f"--fail-on '{text}': {quantity} {mistake}", EXAMPLE)
    if patch is not None:
        threat.Threat.read(patch, "patch")
    if sign[0] != (">" if quantity == "upper" else "<"):
        turned = text.replace(sign, sign.translate({ord("<"): ">", ord(">"): "<"}))
        raise errors.UsageError(
            f"--fail-on '{text}' would fail a network for being better", f"did you mean '{turned}'?"
        )
    value = _gate_number(match["value"], text)
    if quantity != "upper" and value > 1:
        raise errors.UsageError(
            f"--fail-on '{text}': {value:g} is no share of the images", "0.4 means 40 %"
        )
    radius = _gate_number(size, text) if size is not None and patch is None else None
    return FailOn(" ".join(text.split()), quantity, radius, sign, value, patch)


def _gate_number(text: str, gate: str) -> float:
    above, _, below = text.partition("/")
    divisor = float(below) if below else 1.0
    number = float(above) / divisor if divisor else math.inf
    if not math.isfinite(number):
        raise errors.UsageError(f"--fail-on '{gate}': {text} is not a finite number", EXAMPLE)
    return number


def judge_gates(
    gates: Sequence[FailOn], findings: AuditFindings, image: tuple[int, int]
) -> GateReport:
    """Compare each gate with the figures. image: (height, width), for patches given as a share."""
    rows = [_judge_gate(gate, findings, image) for gate in gates]
    verdicts = [row.verdict for row in rows]
    verdict = next(
        (v for v in (intervals.FAILED, intervals.UNDECIDED) if v in verdicts), intervals.PASSED
    )
    reasons = [row.reason for row in rows if not row.passed]
    return GateReport(
        passed=verdict == intervals.PASSED, verdict=verdict, reasons=reasons, judged=rows
    )


def waits_for(
    gates: Sequence[FailOn],
    key: Key,
    proven: bool,
    sample: intervals.Sample,
    image: tuple[int, int],
) -> bool:
    """Return whether a gate about the share of this key is not decided by these images.

    Args:
        key: of the share, as `AuditFindings.samples` has it.
        proven: whether the share is one of proofs.
    """
    speaking = [gate for gate in gates if _speaks_of(gate, key, proven, image)]
    return any(
        intervals.judge_sample(sample, gate.demand).verdict == intervals.UNDECIDED
        for gate in speaking
    )


def _speaks_of(gate: FailOn, key: Key, proven: bool, image: tuple[int, int]) -> bool:
    stage, size = key
    if gate.quantity in ("certified", "proven"):
        return (
            stage not in (CLEAN, ROBUST, PATCHED)
            and size == threat.radius_key(gate.radius or 0.0)
            and (proven or gate.quantity == "certified")
        )
    return gate.quantity == stage and key == _key(gate, image)


def _key(gate: FailOn, image: tuple[int, int]) -> Key:
    """Return the key of the share that a gate of `clean`, `robust` or `patched` speaks of."""
    if gate.patch is not None:
        return PATCHED, threat.Threat.read(gate.patch, "patch", image).key
    return gate.quantity, "" if gate.radius is None else threat.radius_key(gate.radius)


OF_ALL = ("images", "clean", "certificates and attacks")
STAGES_OF = {
    "clean": OF_ALL,
    "robust": (*OF_ALL, "attack"),
    "patched": (*OF_ALL, "patch"),
    "certified": (*OF_ALL, "bound", "lipschitz", "local", "smoothing"),
    "proven": (*OF_ALL, "bound", "lipschitz", "local"),
}
"""A quantity -> the stages that would have found it."""


def _judge_gate(gate: FailOn, findings: AuditFindings, image: tuple[int, int]) -> GateResult:
    if gate.quantity == "upper":
        return _judged_bound(gate, findings)
    looks = _looks_of_gate(gate, findings, image)
    missing = [item for item in findings.skipped if item.stage in STAGES_OF[gate.quantity]]
    waiting = any(item.for_time for item in missing)
    if not looks:
        why = "; ".join(f"{item.stage}: {item.why}" for item in missing)
        return _unmeasured(gate, why or "nothing was found at this radius", waiting)
    order = (
        intervals.PASSED,
        intervals.UNDECIDED,
        intervals.FAILED,
    )  # the best of several methods speaks for the network
    look, by, images = min(
        looks, key=lambda row: (order.index(row[0].verdict), -_share_of_look(row[0]))
    )
    verdict = intervals.UNDECIDED if look.verdict == intervals.FAILED and waiting else look.verdict
    return GateResult(
        fail_on=gate.text,
        passed=verdict == intervals.PASSED,
        verdict=verdict,
        measured=_share_of_look(look),
        reason=f"{gate.requirement}, found {_measured_text(look, images)}{by}: {verdict}",
    )


def _judged_bound(gate: FailOn, findings: AuditFindings) -> GateResult:
    bound = findings.bound
    if bound is None:
        missing = [item for item in findings.skipped if item.stage == "bound"]
        why = "; ".join(item.why for item in missing) or "nothing was found"
        return _unmeasured(gate, why, any(item.for_time for item in missing))
    upper = math.inf if bound.upper == "inf" else float(bound.upper)
    missed = upper > gate.value or (gate.sign == ">=" and upper == gate.value)
    verdict = intervals.FAILED if missed else intervals.PASSED
    return GateResult(
        fail_on=gate.text,
        passed=verdict == intervals.PASSED,
        verdict=verdict,
        measured=upper if math.isfinite(upper) else "inf",
        reason=f"{gate.requirement}, found {bound.upper_text}: {verdict}",
    )


def _unmeasured(gate: FailOn, why: str, for_time: bool) -> GateResult:
    """Return the result of a gate without its quantity: undecided where time was short."""
    verdict = intervals.UNDECIDED if for_time else intervals.FAILED
    reason = f"{gate.requirement}, not measured ({why}): {verdict}"
    return GateResult(
        fail_on=gate.text, passed=False, verdict=verdict, measured=None, reason=reason
    )


def _share_of_look(look: intervals.Look) -> float:
    return look.hits / look.images if look.images else 0.0


def _measured_text(look: intervals.Look, images: int) -> str:
    """Return "94.5 %, 189 of 200 images (95 % interval 90 to 97 %)"; of few images no share.

    Args:
        images: of the table beside the gate; a look that decided earlier says "of the first 50".
    """
    first = "the first " if look.images < images else ""
    percent = (
        "" if look.images < intervals.FEW else f"{threat.proven_percent(_share_of_look(look))}, "
    )
    between = f"({intervals.interval_text(look.hits, look.images, look.chance)} %)"
    return f"{percent}{look.hits} of {first}{look.images} images {between}"


def _looks_of_gate(
    gate: FailOn, findings: AuditFindings, image: tuple[int, int]
) -> list[tuple[intervals.Look, str, int]]:
    """Return what the images say of the shares that a gate speaks of, how each share was found, and
    how many images its stage judged.
    """
    shares: list[tuple[Key, Share | None, str]] = []
    at = threat.radius_key(gate.radius or 0.0)
    if gate.quantity == CLEAN and findings.own:
        return []  # an answer is always the network's own
    if gate.quantity == CLEAN:
        shares = [((CLEAN, ""), findings.clean, "")]
    elif gate.quantity == ROBUST and (attack := findings.attack) is not None:
        by = f" after {', '.join(attack.attacks)}"
        shares = [((ROBUST, at), attack.robust.get(at), by)]
    elif gate.patch is not None and (behind := findings.patched) is not None:
        key = _key(gate, image)
        shares = [(key, behind.certified.get(key[1]), f" by {behind.procedure} (proof)")]
    elif gate.quantity in ("certified", "proven"):
        shares = [
            (
                (certification.method, at),
                certification.certified.get(at),
                f" by {certification.method} ({certification.promise})",
            )
            for certification in findings.certificates
            if gate.quantity == "certified" or certification.failure == 0
        ]
    return [
        (_deciding_look(findings, key, share, gate.demand), by, share.images)
        for key, share, by in shares
        if share is not None
    ]


def _deciding_look(
    findings: AuditFindings, key: Key, share: Share, demand: intervals.Demand
) -> intervals.Look:
    """Return the look that decides; the only one at a share whose images have no order."""
    sample = findings.samples.get(key)
    return (
        intervals.judge_all(share.hits, share.images, demand)
        if sample is None
        else intervals.judge_sample(sample, demand)
    )
