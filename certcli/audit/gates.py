"""Gates of an audit: `certified@0.25<0.4` fails where less than 40 % of the images are certified at radius 0.25.

    GATE = SHARE "@" RADIUS ("<" | "<=") NUMBER | "patched@" PATCH ("<" | "<=") NUMBER |
           "clean" ("<" | "<=") NUMBER | "upper" (">" | ">=") NUMBER

SHARE is `certified` (the best method, whatever it promises), `proven` (proofs only) or `robust` (what attacks left);
`patched` is the share that no patch (32, 16x64, 2%) changes behind masks. A number may be a quotient, 36/255. A gate whose
quantity was not measured fails, and says why. Gates are written as failures and reported as requirements.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from certcli.audit.findings import Findings
from certcli.evaluation.intervals import interval_of_few, interval_text
from certcli.evaluation.radii import proven_percent, radius_key
from certcli.evaluation.threat import Threat
from certcli.report.document import GateReport, GateResult, Share
from certcli.system.errors import UsageError
from certcli.system.registry import one_of

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
    """One expression, read. radius: None for `clean`, `upper` and `patched`, which alone has a patch, as it is spelled."""

    text: str
    quantity: str
    radius: float | None
    sign: str
    value: float
    patch: str | None = None

    def met(self, measured: float) -> bool:
        """Whether the expression, which describes a failure, is true."""
        signs = {
            "<": measured < self.value,
            "<=": measured <= self.value,
            ">": measured > self.value,
            ">=": measured >= self.value,
        }
        return signs[self.sign]

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


def parse(text: str) -> FailOn:
    """Return the gate of an expression; UsageError names the mistake and the likely correction."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(f"--fail-on '{text}' is no gate", EXAMPLE)
    quantity, sign = match["quantity"], match["sign"]
    if quantity not in QUANTITIES:
        raise UsageError(
            f"--fail-on '{text}': unknown quantity '{quantity}'", one_of(quantity, QUANTITIES)
        )
    size = match["radius"] or match["patch"]
    if quantity == AGAINST:
        if size is None:
            raise UsageError(f"--fail-on '{text}': patched needs a patch", EXAMPLE)
        Threat.read(size, "patch")
    elif match["patch"] is not None:
        raise UsageError(f"--fail-on '{text}': {quantity} speaks of no patch", EXAMPLE)
    elif (match["radius"] is not None) != (quantity in AT_A_RADIUS):
        mistake = "needs a radius" if quantity in AT_A_RADIUS else "has no radius"
        raise UsageError(f"--fail-on '{text}': {quantity} {mistake}", EXAMPLE)
    if sign[0] != (">" if quantity == "upper" else "<"):
        turned = text.replace(sign, sign.translate({ord("<"): ">", ord(">"): "<"}))
        raise UsageError(
            f"--fail-on '{text}' would fail a network for being better", f"did you mean '{turned}'?"
        )
    value = _number(match["value"], text)
    if quantity != "upper" and value > 1:
        raise UsageError(
            f"--fail-on '{text}': {value:g} is no share of the images", "0.4 stands for 40 %"
        )
    name = " ".join(text.split())
    if quantity == AGAINST:
        return FailOn(name, quantity, None, sign, value, size)
    radius = None if match["radius"] is None else _number(match["radius"], text)
    return FailOn(name, quantity, radius, sign, value)


def _number(text: str, gate: str) -> float:
    above, _, below = text.partition("/")
    divisor = float(below) if below else 1.0
    found = float(above) / divisor if divisor else math.inf
    if not math.isfinite(found):
        raise UsageError(f"--fail-on '{gate}': {text} is not a finite number", EXAMPLE)
    return found


def judge(gates: Sequence[FailOn], findings: Findings, image: tuple[int, int]) -> GateReport:
    """Compare every gate with the measured figures. image: (height, width), for patches given as a share."""
    judged = [_judged(gate, findings, image) for gate in gates]
    reasons = [row.reason for row in judged if not row.passed]
    return GateReport(passed=not reasons, reasons=reasons, judged=judged)


def _judged(gate: FailOn, findings: Findings, image: tuple[int, int]) -> GateResult:
    share, by, stages = _share(gate, findings, image)
    bound = findings.bound
    measured: float | None = None if share is None else share.share
    if gate.quantity == "upper" and bound is not None:
        measured = math.inf if bound.upper == "inf" else float(bound.upper)
    if measured is None:
        why = "; ".join(
            f"{item.stage}: {item.why}" for item in findings.skipped if item.stage in stages
        )
        reason = f"{gate.requirement}, not measured ({why or 'nothing was found at this radius'}): failed"
        return GateResult(fail_on=gate.text, passed=False, measured=None, reason=reason)
    if share is not None:
        few = interval_of_few(share.hits, share.images)
        percent = "" if few else f"{proven_percent(share.share)}, "
        between = few or f" ({interval_text(share.hits, share.images)} %)"
        found = f"{percent}{share.hits} of {share.images} images{between}{by}"
    else:
        found = "" if bound is None else bound.upper_text
    failed = gate.met(measured)
    reason = f"{gate.requirement}, found {found}: {'failed' if failed else 'passed'}"
    shown: float | str = measured if math.isfinite(measured) else "inf"
    return GateResult(fail_on=gate.text, passed=not failed, measured=shown, reason=reason)  # type: ignore[arg-type]


def _share(
    gate: FailOn, findings: Findings, image: tuple[int, int]
) -> tuple[Share | None, str, tuple[str, ...]]:
    """Return the share that a gate speaks of, how it was found, and the stages that would have found it."""
    needed = ("images", "clean", "certificates and attacks")
    if gate.quantity == "upper":
        return None, "", ("bound",)
    if gate.quantity == "clean":
        return findings.clean, "", needed
    if gate.quantity == "robust":
        attack = findings.attack
        share = None if attack is None else attack.robust.get(radius_key(gate.radius or 0.0))
        return (
            share,
            "" if attack is None else f" after {', '.join(attack.attacks)}",
            (*needed, "attack"),
        )
    if gate.patch is not None:
        behind = findings.patched
        share = (
            None
            if behind is None
            else behind.certified.get(Threat.read(gate.patch, "patch", image).key)
        )
        return (
            share,
            "" if behind is None else f" by {behind.procedure} (proof)",
            (*needed, "patch"),
        )
    at = radius_key(gate.radius or 0.0)
    reached = [
        (found.certified[at], f" by {found.method} ({found.promise})")
        for found in findings.certificates
        if at in found.certified and (gate.quantity == "certified" or found.failure == 0)
    ]
    stages = (*needed, "bound", "lipschitz", "local", "smoothing")
    return (
        (*max(reached, key=lambda pair: pair[0].share), stages) if reached else (None, "", stages)
    )
