"""Gates of an audit: `certified@0.25<0.4` fails a network of which less than 40 % is certified at radius 0.25.

    GATE = SHARE "@" RADIUS ("<" | "<=") NUMBER | "patched@" PATCH ("<" | "<=") NUMBER |
           "clean" ("<" | "<=") NUMBER | "upper" (">" | ">=") NUMBER

SHARE is `certified` (the best method, whatever it promises), `proven` (proofs only) or `robust` (what attacks left);
`patched` is the share that no patch (32, 16x64, 2%) changes behind masks. A number may be a quotient, 36/255. A gate whose
quantity was not measured fails, and says why.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from certcli.audit.run import Asked, Results
from certcli.evaluation.radii import proven_percent, radius_key
from certcli.evaluation.records import require_radii
from certcli.evaluation.threat import Threat
from certcli.report.document import Gate, Judged, Share
from certcli.system.errors import UsageError
from certcli.system.registry import one_of

AT_A_RADIUS = ("certified", "proven", "robust")
AGAINST = "patched"
QUANTITIES = (*AT_A_RADIUS, AGAINST, "clean", "upper")
EXAMPLE = (
    '--fail-on "certified@0.25<0.4", "proven@0.5<0.1", "robust@0.5<0.2", "patched@32<0.1", "clean<0.9" or "upper>100"'
)
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


def parse(text: str) -> FailOn:
    """UsageError names what is wrong with the expression, and what was probably meant."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise UsageError(f"--fail-on '{text}' is no gate", EXAMPLE)
    quantity, sign = match["quantity"], match["sign"]
    if quantity not in QUANTITIES:
        raise UsageError(f"--fail-on '{text}': unknown quantity '{quantity}'", one_of(quantity, QUANTITIES))
    size = match["radius"] or match["patch"]
    if quantity == AGAINST:
        if size is None:
            raise UsageError(f"--fail-on '{text}': patched needs a patch", EXAMPLE)
        Threat.read(size, "patch")
    elif match["patch"] is not None:
        raise UsageError(f"--fail-on '{text}': {quantity} speaks of no patch", EXAMPLE)
    elif (match["radius"] is not None) != (quantity in AT_A_RADIUS):
        told = "needs a radius" if quantity in AT_A_RADIUS else "has no radius"
        raise UsageError(f"--fail-on '{text}': {quantity} {told}", EXAMPLE)
    if sign[0] != (">" if quantity == "upper" else "<"):
        turned = text.replace(sign, sign.translate({ord("<"): ">", ord(">"): "<"}))
        raise UsageError(f"--fail-on '{text}' would fail a network for being better", f"did you mean '{turned}'?")
    value = _number(match["value"], text)
    if quantity != "upper" and value > 1:
        raise UsageError(f"--fail-on '{text}': {value:g} is no share of the images", "0.4 stands for 40 %")
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


def radii(gates: Sequence[FailOn], *quantities: str) -> list[float]:
    """The radii at which these quantities are asked for."""
    return [gate.radius for gate in gates if gate.radius is not None and gate.quantity in quantities]


def widened(asked: Asked, gates: Sequence[FailOn]) -> Asked:
    """The same, with the radii that only gates name."""
    certified = radii(gates, "certified", "proven")
    return replace(
        asked,
        radii=require_radii([*asked.radii, *certified]),
        attacked=require_radii([*asked.attacked, *radii(gates, "robust")]),
        patches=(*asked.patches, *(gate.patch for gate in gates if gate.patch is not None)),
        reach=max(radii(gates, "certified"), default=asked.reach),
    )


def judge(
    gates: Sequence[FailOn],
    results: Results,
    image: tuple[int, int],
) -> Gate:
    """Every gate against what was measured; shares with their n and interval. image: (height, width), for patches."""
    bound, clean, attack, patched = results.bound, results.clean, results.attack, results.patched

    def missing(*stages: str) -> str:
        return "; ".join(f"{item.stage}: {item.why}" for item in results.skipped if item.stage in stages)

    def one(gate: FailOn) -> Judged:
        share: Share | None = None
        measured: float | None = None
        by, why = "", ""
        if gate.quantity == "upper":
            measured = None if bound is None else math.inf if bound.upper == "inf" else float(bound.upper)
            by, why = ("", missing("bound")) if bound is None else ("", "")
        elif gate.quantity == "clean":
            share, why = clean, missing("images", "clean")
        elif gate.quantity == "robust":
            share = None if attack is None else attack.robust.get(radius_key(gate.radius or 0.0))
            by = "" if attack is None else f" after {', '.join(attack.attacks)}"
            why = missing("images", "clean", "attack")
        elif gate.patch is not None:
            why = missing("images", "clean", "patch")
            if patched is not None:
                share = patched.certified.get(Threat.read(gate.patch, "patch", image).key)
                by = f" by {patched.procedure} (proof)"
        else:
            at = radius_key(gate.radius or 0.0)
            reached = [
                (found.certified[at], found)
                for found in results.certificates
                if at in found.certified and (gate.quantity == "certified" or found.failure == 0)
            ]
            if reached:
                share, found = max(reached, key=lambda pair: pair[0].share)
                by = f" by {found.method} ({found.promise})"
            why = missing("images", "clean", "bound", "lipschitz", "local", "smoothing")
        if share is not None:
            low, high = share.interval
            measured = share.share
            by = f"{by}: {share.hits} of {share.images} images (95 % interval {100 * low:.0f} to {100 * high:.0f} %)"
        if measured is None:
            told = f"not measured ({why or 'nothing was found at this radius'})"
            return Judged(fail_on=gate.text, passed=False, measured=None, reason=f"{gate.text}: {told}")
        failed = gate.met(measured)
        shown: float | str = measured if math.isfinite(measured) else "inf"
        shown_share = (
            proven_percent(measured)
            if gate.quantity in ("certified", "proven", "patched")
            else f"{100 * measured:.1f} %"
        )
        value = shown_share if share is not None else "" if bound is None else bound.upper_text
        text = f"{gate.text}: {'failed' if failed else 'passed'}, {gate.quantity} {value}{by}"
        return Judged(fail_on=gate.text, passed=not failed, measured=shown, reason=text)  # type: ignore[arg-type]

    judged = [one(gate) for gate in gates]
    reasons = [row.reason for row in judged if not row.passed]
    return Gate(passed=not reasons, reasons=reasons, judged=judged)
